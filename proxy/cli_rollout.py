"""`turngate rollout`: which stage is in force where, since when and why; one step up, one step down.

The evidence that a promotion asks for is counted here, out of the evidence files; what it must be, `gates` says.
"""

import contextlib
import getpass
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, NoReturn

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turngate.proxy import config, control
from turngate.proxy.config import SettingsError
from turngate.proxy.control import BadOrder, Declared, NoEvidence, NotYet, Operator, Overtaken, Rollout
from turngate.proxy.gates import Evidence, Fault, count_of, newly_enforced
from turngate.proxy.report_sections import moment
from turngate.proxy.rollout import EVERYTHING, Order, Rung, Scope, Stage, matching

EX_REFUSED, EX_USAGE, EX_INTERNAL = 1, 64, 70
EVIDENCE_S: Final = 7 * 86_400.0
"""How far back evidence is looked for where the stage has been in force for longer."""
HISTORY_SHOWN: Final = 10


# -- the evidence ---------------------------------------------------------------------------------------------------

# A request that the provider did not answer says nothing about us, so it is no sample; one that we refused is.
_SEEN: Final = """
WITH judged AS (
    SELECT *, list_contains($classes, request_class) AS concerned,
        verdict IN ('illegal', 'waiting') AND outcome <> 'refused' AS asked
    FROM exchange_ended WHERE api <> ''
),
seen AS (
    SELECT upstream, model, operation, at_s, 'sample' AS kind, '' AS what FROM judged
    WHERE concerned AND stage = $stage AND verdict <> 'unjudged'
        AND (outcome = 'refused' OR provider IN ('accepted', 'refused_sequence'))
    UNION ALL
    SELECT upstream, model, operation, at_s, CASE provider WHEN 'accepted' THEN 'false refusal'
            WHEN 'refused_sequence' THEN 'true refusal' ELSE 'unclear' END,
        'of ' || coalesce(reasons[1], 'no named rule')
    FROM judged WHERE concerned AND asked
    UNION ALL
    SELECT upstream, model, operation, at_s, 'miss', 'of ' || coalesce(nullif(provider_reason, ''), 'an unknown rule')
    FROM judged WHERE concerned AND verdict = 'legal' AND provider = 'refused_sequence'
    UNION ALL
    SELECT upstream, model, operation, at_s, 'failure', '(' || error_type || ')'
    FROM judged WHERE starts_with(error_type, 'turngate_')
    UNION ALL
    SELECT w.upstream, coalesce(e.model, ''), w.operation, w.at_s, 'finding', 'of the witness ' || w.witness
    FROM witness_spoke AS w LEFT JOIN exchange_ended AS e USING (operation)
    WHERE w.enforced OR w.witness = 'byte_mismatch'
    UNION ALL
    SELECT d.upstream, coalesce(e.model, ''), d.operation, d.since_s, 'unsettled', ''
    FROM dispatches AS d LEFT JOIN exchange_ended AS e USING (operation) WHERE d.state = 'UNKNOWN'
    UNION ALL
    SELECT NULL, NULL, '', at_s, 'failure', 'in ' || "where" || ' (' || error || ')' FROM failure_counted
)
SELECT upstream, model, kind, what, count(*) AS count, arg_max(operation, at_s, 3) AS operations
FROM seen GROUP BY ALL ORDER BY count DESC, kind, what
"""


def read_evidence(
    evidence_dir: Path, rungs: Sequence[Rung], rung: Rung, to: Stage, *, now_s: float
) -> Evidence:
    """What was seen where this rung may be in force, since it is, that concerns a step to another stage.

    Headers and conversations do not stand in the evidence: a scope that asks for them is judged by all requests of
    its upstream and model. Faults of ours that belong to no upstream count everywhere. Raises NoEvidence.
    """
    import duckdb  # not above: whoever only shows the stages should not wait for it

    from turngate.telemetry.queries import connect_readonly

    since_s = max(rung.since_s, now_s - EVIDENCE_S)
    classes = sorted(kind.value for kind in newly_enforced(rung.stage, to))
    try:
        with contextlib.closing(connect_readonly(evidence_dir, since_s=since_s)) as database:
            cursor = database.execute(_SEEN, {"stage": rung.stage.value, "classes": classes})
            rows = cursor.fetchall()
    except duckdb.Error as error:
        raise NoEvidence(f"cannot read the evidence in {evidence_dir}: {error}") from error
    return _summed(
        (kind, what, count, operations)
        for upstream, model, kind, what, count, operations in rows
        if upstream is None or rung in matching(rungs, upstream, model)
    )


def _summed(seen: Iterable[tuple[str, str, int, list[str]]]) -> Evidence:
    faults: dict[str, dict[str, Fault]] = {}
    for kind, what, count, operations in seen:
        of_kind = faults.setdefault(kind, {})
        before = of_kind.get(what)
        total = count + (before.count if before is not None else 0)
        known = before.operations if before is not None else ()
        of_kind[what] = Fault(f"{_noun(kind, total)} {what}", total, (*known, *filter(None, operations)))

    def of(kind: str) -> tuple[Fault, ...]:
        return tuple(faults.get(kind, {}).values())

    return Evidence(
        samples=count_of(of("sample")),
        true_refusals=count_of(of("true refusal")),
        unclear=count_of(of("unclear")),
        unsettled=count_of(of("unsettled")),
        false_refusals=of("false refusal"),
        misses=of("miss"),
        witnesses=of("finding"),
        failures=of("failure"),
    )


def _noun(kind: str, count: int) -> str:
    plural = "misses" if kind == "miss" else f"{kind}s"
    return kind if count == 1 else plural


# -- the commands ---------------------------------------------------------------------------------------------------

app = typer.Typer(
    no_args_is_help=True, help="Stages of a running proxy: where, since when, why; up and down."
)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Settings file (default: ./turngate.yaml).")
]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="The proxy's data_dir.")]
ScopeArgument = Annotated[
    str,
    typer.Argument(metavar="SCOPE", help="UPSTREAM[/MODEL][,HEADER=VALUE]; *: what no other scope covers."),
]
Why = Annotated[str, typer.Option("--why", help="Kept with the change.")]
By = Annotated[str, typer.Option("--by", help="Who it is (default: the user's name).")]
Percent = Annotated[int | None, typer.Option("--percent", min=1, max=100, help="Of the conversations.")]


@app.command("show")
def show(
    config_file: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Which stage is in force where, since when, by whom and why; then the latest changes.

    The first scope that matches a request counts. Exit code: 0, 64 usage, 70 the ledger cannot be read.
    """
    with _told():
        _, rollout = _find(config_file, data_dir)
        if as_json:
            print(msgspec.json.encode(rollout.told()).decode())
        else:
            print_rollout(rollout, out)


@app.command("set")
def set_stage(
    stage: Annotated[
        str, typer.Argument(metavar="STAGE", help=f"{', '.join(Stage)}; settings: end the scope's order.")
    ],
    config_file: ConfigFile = None,
    data_dir: DataDir = None,
    scope: Annotated[
        str, typer.Option("--scope", help="UPSTREAM[/MODEL][,HEADER=VALUE]; all: above every other.")
    ] = EVERYTHING,
    percent: Percent = None,
    why: Why = "",
    by: By = "",
) -> None:
    """Put a stage in force, without a gate, within a fifth of a second; open streams go on as they began.

    Without --scope it is in force for everything, whatever settings and other orders say. Exit code: 0, 64 usage.
    """
    if stage not in (*Stage, "settings"):
        _fail(f"{stage}: choose one of {', '.join(Stage)}, or settings", EX_USAGE)
    with _told():
        ledger, rollout = _find(config_file, data_dir)
        wanted = None if stage == "settings" else Stage(stage)
        share = 100 if percent is None else percent
        control.put(ledger, rollout, _scope(scope), wanted, share, _operator(by, why))
        out.print(f"{stage} is in force for {_covered(scope, share)} in {ledger.parent}", markup=False)


@app.command("promote")
def promote(
    scope: ScopeArgument = "*",
    config_file: ConfigFile = None,
    data_dir: DataDir = None,
    percent: Percent = None,
    force: Annotated[
        bool, typer.Option("--force", help="Whatever the evidence says; that is kept too.")
    ] = False,
    why: Why = "",
    by: By = "",
) -> None:
    """One step up: first to all conversations of the present stage, then to the next stage for ten percent.

    Refused where the evidence does not bear it; it says what is missing. Exit code: 0, 1 refused, 64 usage, 70 the
    evidence cannot be read.
    """
    with _told():
        ledger, rollout = _find(config_file, data_dir)

        def gathered(rung: Rung, to: Stage) -> Evidence:
            return read_evidence(ledger.parent / "evidence", rollout.rungs, rung, to, now_s=time.time())

        scope = _scope(scope)
        stage, share = control.promote(
            ledger, rollout, scope, gathered, _operator(by, why), percent=percent, force=force
        )
        out.print(f"{stage} is in force for {_covered(scope, share)} in {ledger.parent}", markup=False)


@app.command("rollback")
def rollback(
    scope: ScopeArgument = "*",
    config_file: ConfigFile = None,
    data_dir: DataDir = None,
    why: Why = "",
    by: By = "",
) -> None:
    """Down to the last lower stage that held for all of the scope, or to observe; open streams go on as they began.

    To stop enforcing everywhere at once: turngate rollout set observe. Exit code: 0, 64 usage.
    """
    with _told():
        ledger, rollout = _find(config_file, data_dir)
        scope = _scope(scope)
        stage = control.roll_back(ledger, rollout, scope, _operator(by, why))
        out.print(f"{stage} is in force for {_covered(scope, 100)} in {ledger.parent}", markup=False)


def _find(config_file: Path | None, data_dir: Path | None) -> tuple[Path, Rollout]:
    """The ledger, and where things stand in it."""
    settings = config.load(config_file, data_dir=data_dir)
    ledger = settings.data_dir / "ledger.sqlite3"
    if not ledger.exists():
        _fail(
            f"no proxy has run with data_dir {settings.data_dir}; name its folder with --data-dir", EX_USAGE
        )
    return ledger, control.read(ledger, Declared(settings.ladder().rungs[:-1], settings.stage))


def _scope(name: str) -> str:
    """A scope as it is written everywhere."""
    return name if name == EVERYTHING else Scope.parse(name).name


def _covered(scope: str, percent: int) -> str:
    what = "everything" if scope == EVERYTHING else "all the rest" if scope == "*" else scope
    return what if percent == 100 else f"{percent} % of {what}"


def _operator(by: str, why: str) -> Operator:
    return Operator(by or getpass.getuser(), why)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Each way to fail with its exit code."""
    try:
        yield
    except NotYet as error:
        _fail(str(error), EX_REFUSED)
    except (BadOrder, Overtaken, SettingsError, ValueError) as error:
        _fail(str(error), EX_USAGE)
    except (NoEvidence, sqlite3.Error) as error:
        _fail(str(error), EX_INTERNAL)


def _fail(text: str, code: int) -> NoReturn:
    err.print(f"error: {text}", markup=False, style="red" if err.is_terminal else None)
    raise typer.Exit(code)


# -- how it is shown ------------------------------------------------------------------------------------------------


def print_rollout(rollout: Rollout, to: Console) -> None:
    """For a terminal or a pipe."""
    to.print(_table(("scope", "stage", "since (UTC)", "by", "why"), map(_standing_row, rollout.rungs)))
    if rollout.history:
        to.print("\nlatest changes")
        rows = map(_change_row, rollout.history[:HISTORY_SHOWN])
        to.print(_table(("when (UTC)", "scope", "stage", "by", "why"), rows))


def _standing_row(rung: Rung) -> tuple[str, ...]:
    order = rung.order
    name = {EVERYTHING: "everything", "*": "all the rest" if order is None else "*"}.get(rung.name, rung.name)
    stage = _shown(rung.stage, rung.percent, rung.rest)
    return (name, stage, "", "settings", "") if order is None else (name, stage, *_by(order))


def _change_row(order: Order) -> tuple[str, ...]:
    when, who, why = _by(order)
    return when, order.scope, _shown(order.stage, order.percent, order.rest), who, why


def _by(order: Order) -> tuple[str, str, str]:
    why = "; ".join(filter(None, (order.why, order.evidence)))
    return moment(order.set_s), order.who, why


def _shown(stage: Stage | None, percent: int, rest: Stage | None) -> str:
    if stage is None:
        return "as the settings say"
    if percent == 100:
        return str(stage)
    return f"{stage} {percent} %, {rest or 'else the next scope'}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
