"""`turngate rollout`: which stage is in force where, since when and why; one step up, one step down.

What the evidence for a promotion must be, `gates` says; `rollout_evidence` counts it.
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
from turngate.proxy.control import BadOrder, NoEvidence, NotYet, Operator, Overtaken, Rollout
from turngate.proxy.gates import Evidence
from turngate.proxy.report_sections import moment
from turngate.proxy.rollout import EVERYTHING, Order, Rung, Scope, Stage
from turngate.proxy.rollout_evidence import read_evidence

EX_REFUSED, EX_USAGE, EX_INTERNAL = 1, 64, 70
HISTORY_SHOWN: Final = 10


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
    return ledger, control.read(ledger, settings.declared())


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
