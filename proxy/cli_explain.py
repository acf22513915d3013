"""`turngate explain`: one exchange on one page, out of the evidence and the ledger, and what each other stage would
have done with it.

The story is told from what was written down at the time; nothing is judged again, and no message text is there to be
shown. Times between events come from the wall clock, the phases of the exchange from its own monotonic durations.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import duckdb
import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from turngate.proxy.cli_check import LEVEL_STYLES, STYLES
from turngate.proxy.cli_report import draw, unfolded
from turngate.proxy.report_sections import Cell, Grid, Tone, moment, seconds, size
from turngate.proxy.rollout import Action, RequestClass, Stage, decide, enforced
from turngate.telemetry.queries import connect_readonly
from turngate.telemetry.schema import TABLES
from turngate.validators.rules import Level, Reason, Verdict

Row = Mapping[str, Any]


class NotFound(Exception):
    """Nobody wrote down such an operation; the text says where was looked."""


class NoEvidence(Exception):
    """Evidence or ledger cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class Story:
    """What was written down about one operation. `events`: rows by table; `ledger`: its row there, if it is kept."""

    operation: str
    events: Mapping[str, list[Row]]
    ledger: Row | None
    leaked_by: list[Row] = field(default_factory=list)
    """Later requests that brought back what this one had retracted."""

    @property
    def ended(self) -> Row | None:
        """The exchange's own last event; None while it goes on, or where a crash swallowed it."""
        return next(iter(self.events.get("exchange_ended", ())), None)


def look_up(data_dir: Path, operation: str) -> Story:
    """Find an operation in evidence and ledger. Raises NotFound and NoEvidence."""
    evidence_dir, ledger_path = data_dir / "evidence", data_dir / "ledger.sqlite3"
    try:
        with connect_readonly(evidence_dir) as database:
            events = {
                table: rows
                for table, columns in TABLES.items()
                if any(name == "operation" for name, _ in columns)
                and (rows := _rows(database, table, "operation", operation))
            }
            leaked_by = _rows(database, "preview_leaked", "retracted_operation", operation)
    except duckdb.Error as error:
        raise NoEvidence(
            f"cannot read the evidence in {evidence_dir}: {error}\n"
            "If a duckdb shell has one of its files open, close it there."
        ) from error
    ledger = _ledger_row(ledger_path, operation)
    if not events and ledger is None:
        raise NotFound(
            f"no operation {operation} in {evidence_dir} nor in {ledger_path}; name another folder with --data-dir. "
            "An exchange is there about two seconds after its end."
        )
    return Story(operation, events, ledger, leaked_by)


def _rows(database: duckdb.DuckDBPyConnection, table: str, column: str, operation: str) -> list[Row]:
    cursor = database.execute(f"SELECT * FROM {table} WHERE {column} = ? ORDER BY at_s", [operation])
    names = [str(described[0]) for described in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _ledger_row(path: Path, operation: str) -> Row | None:
    """The dispatch's row with whatever columns that ledger has; None without one. Raises NoEvidence."""
    if not path.exists():
        return None
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=5)
        ) as db:
            db.row_factory = sqlite3.Row
            row = db.execute("SELECT * FROM dispatches WHERE operation = ?", (operation,)).fetchone()
    except sqlite3.Error as error:
        raise NoEvidence(f"cannot read the ledger {path}: {error}") from error
    return None if row is None else dict(row)


# -- what each stage would have done --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Would:
    """What one stage does with the request, and with the answer that came."""

    stage: Stage
    in_force: bool
    request: str
    answer: str


def stages(story: Story) -> list[Would]:
    """Every stage on the recorded verdict and class; empty where nothing was judged because nothing was told."""
    ended = story.ended
    if ended is None:
        return []
    verdict = Verdict(ended["verdict"]) if ended["verdict"] in set(Verdict) else Verdict.UNJUDGED
    return [
        Would(
            stage,
            in_force=stage == ended["stage"],
            request=_request_at(stage, verdict, _class(story)),
            answer=_answer_at(stage, story, verdict, _class(story)),
        )
        for stage in Stage
    ]


def _class(story: Story) -> RequestClass:
    """What the promise of a stage is about. A request without any trace of tools counts as text."""
    ended = story.ended or {}
    told = ended.get("request_class")
    if told in set(RequestClass):
        return RequestClass(told)
    about_tools = ("call.", "result.", "toolset.")
    traces = any(str(each["reason"]).startswith(about_tools) for each in story.events.get("finding_made", ()))
    return RequestClass.TOOLS if traces or "call_decided" in story.events else RequestClass.TEXT


def _request_at(stage: Stage, verdict: Verdict, request_class: RequestClass) -> str:
    if stage is Stage.OFF:
        return "pass unread"
    match decide(stage, request_class, verdict):
        case Action.REFUSE:
            return "refuse with 400: the provider never sees it"
        case Action.MARK:
            return "pass, and record that it would be refused"
        case Action.PASS:
            return "pass"


def _answer_at(stage: Stage, story: Story, verdict: Verdict, request_class: RequestClass) -> str:
    ended = story.ended or {}
    if decide(stage, request_class, verdict) is Action.REFUSE:
        return "none"
    if ended["outcome"] == "refused" and verdict in (Verdict.ILLEGAL, Verdict.WAITING):
        return "not known: it was refused then, so there was none"
    if ended["outcome"] in ("unsent", "unknown"):
        return f"none came ({ended['outcome']})"
    retraction = next(iter(story.events.get("preview_retracted", ())), None)
    count = len(story.events.get("call_decided", ()))
    calls = f"{count} tool call{'' if count == 1 else 's'}" if count else ""
    if not enforced(stage, request_class):
        broken = f"pass as it is, broken ({retraction['cause']})" if retraction else "pass as it is"
        return broken if stage is Stage.OFF else f"{broken}, and record it"
    if retraction is not None:
        withheld = f"; {calls} withheld" if calls else ""
        return f"end with an error event ({retraction['cause']}){withheld}"
    if not calls:
        return "pass"
    return f"hold {calls} until the turn has ended well, then release"


# -- the timeline ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that happened."""

    at_s: float
    what: str
    tone: Tone = ""


def timeline(story: Story) -> list[Moment]:
    """Everything that was told, in the order of the wall clock."""
    phases = list(_phases(story.ended)) if story.ended else []
    # Sorting is stable: at one and the same time the end of the exchange comes last.
    return sorted([*phases[:-1], *_events(story), *phases[-1:]], key=lambda each: each.at_s)


def _phases(ended: Row) -> Iterator[Moment]:
    """The exchange's own phases, counted back from its end, which is the last of them."""
    start_s = ended["at_s"] - ended["total_s"]
    yield Moment(
        start_s,
        f"request of {size(ended['request_bytes'])}, {ended['messages']} messages, from {ended['client'] or 'an app'}",
    )
    judged_s = start_s + ended["judge_s"]
    if ended["api"]:
        yield Moment(judged_s, f"judged {ended['verdict']} in {seconds(ended['judge_s'])}")
    if ended["claim_s"]:
        yield Moment(judged_s + ended["claim_s"], f"dispatch on disk after {seconds(ended['claim_s'])}")
    if ended["first_byte_s"]:
        yield Moment(start_s + ended["first_byte_s"], "first byte of the answer")
    yield Moment(
        ended["at_s"],
        f"ended: {ended['outcome']}, status {ended['status']}, {size(ended['response_bytes'])} to the app",
        "good" if ended["outcome"] == "passed" else "warn",
    )


def _events(story: Story) -> Iterator[Moment]:
    for table, words in _WORDS.items():
        for row in story.events.get(table, ()):
            yield Moment(row["at_s"], words.format_map({**row, **_said(table, row)}), _TONES.get(table, ""))
    for row in story.leaked_by:
        yield Moment(row["at_s"], f"what it showed came back in {row['operation']} at {row['at']}", "bad")


_WORDS: Final = {
    "finding_made": "{level} {reason} at {at}: {action}",
    "request_unjudged": "not judged: {why}",
    "state_changed": "dispatch {path}{by}",
    "call_decided": "tool call {decision}{because}{held_for}",
    "anomaly_seen": "irregular: {reason}",
    "preview_retracted": "turn retracted: {cause}, {preview_bytes} bytes had been shown{told}",
    "preview_leaked": "brings back {reason} at {at}: retracted in {retracted_operation} ({cause})",
    "witness_spoke": "witness: {witness} {detail}",
}
_TONES: Final[Mapping[str, Tone]] = {
    "finding_made": "warn",
    "preview_retracted": "warn",
    "preview_leaked": "bad",
    "witness_spoke": "bad",
}


def _said(table: str, row: Row) -> dict[str, str]:
    """The parts of a sentence that depend on the row."""
    match table:
        case "state_changed":
            path = " -> ".join(filter(None, (row["before"], *(row["through"] or ()), row["after"])))
            return {"path": path, "by": f" ({row['how']})" if row["how"] else ""}
        case "call_decided":
            held = f", held for {seconds(row['hold_s'])}, {size(row['hold_bytes'])}" if row["held"] else ""
            return {"because": f": {row['reason']}" if row["reason"] else "", "held_for": held}
        case "preview_retracted":
            return {"told": ", the app was told" if row["enforced"] else ", the app was not told"}
    return {}


# -- what to do about a finding -------------------------------------------------------------------------------------

REMEDIES: Final[Mapping[Reason, str]] = {
    Reason.ROLE_UNKNOWN: "Use a role that this server and model know.",
    Reason.ROLE_ORDER: "Bring the turns into the order that this server takes.",
    Reason.BLOCK_UNKNOWN_KIND: "Send only kinds of content that this API knows.",
    Reason.BLOCK_WRONG_ROLE: "Move the content into a message whose role may carry it.",
    Reason.BLOCK_MIXED_TURN: "Put the tool results first in their message, or alone.",
    Reason.BLOCK_EMPTY: "Drop the empty message or content, or fill it.",
    Reason.CALL_BAD_ID: "Send the call's id as the provider gave it.",
    Reason.CALL_BAD_NAME: "Send the tool's name as it was declared.",
    Reason.CALL_DUPLICATE_ID: "Give each call of the history an id of its own.",
    Reason.CALL_ARGUMENTS_UNCLOSED: "Drop the call and its result: it was cut off when it was streamed.",
    Reason.CALL_ARGUMENTS_INVALID: "Send the call's arguments as a JSON object, as they came.",
    Reason.CALL_ARGUMENTS_SCHEMA: "Send arguments that fit the tool's declared schema.",
    Reason.CALL_UNANSWERED: "Send a result for each call right after it, or drop the call.",
    Reason.CALL_UNKNOWN_TOOL: "Declare the tool again, or drop its calls and results.",
    Reason.RESULT_ORPHAN: "Send the assistant message with that call before the result, or drop the result.",
    Reason.RESULT_DUPLICATE: "Send one result a call.",
    Reason.RESULT_MISPLACED: "Put the result right after the message with its call.",
    Reason.RESULT_MISMATCH: "Name the call that the result answers by its own id and tool.",
    Reason.RESULT_BAD_SHAPE: "Send the result in the shape that this API declares.",
    Reason.REASONING_DETACHED: "Send reasoning back unchanged with the turn it belongs to, or not at all.",
    Reason.SIGNATURE_MISSING: "Send the signature with the block, as it came.",
    Reason.TOOLSET_INVALID: "Correct the declared tools.",
    Reason.CONTEXT_OVER_BUDGET: "Shorten the history in whole turns until it fits the model's window.",
}
"""In general; the answer to the app named the place and its own remedy."""


def page_of(reason: str) -> str:
    """The reference page of a rule."""
    return f"docs/rules/{reason}.md"


# -- for scripts and for people -------------------------------------------------------------------------------------


def as_json(story: Story) -> str:
    """One object: what was written down, and what was made of it."""
    findings = [
        {**row, "remedy": REMEDIES.get(row["reason"], ""), "page": page_of(row["reason"])}
        for row in story.events.get("finding_made", ())
    ]
    return msgspec.json.encode(
        {
            "operation": story.operation,
            "exchange": story.ended,
            "findings": findings,
            "timeline": timeline(story),
            "ledger": story.ledger,
            "stages": stages(story),
            "events": {table: rows for table, rows in story.events.items() if table != "exchange_ended"},
            "leaked_by": story.leaked_by,
        }
    ).decode()


def print_story(story: Story, out: Console) -> None:
    """One page."""
    out = unfolded(out)
    _print_head(story, out)
    _print_findings(story, out)
    _print_timeline(story, out)
    if story.ledger is not None:
        told = [
            (Cell(name), Cell(str(value))) for name, value in story.ledger.items() if value not in ("", None)
        ]
        _print_grid("Ledger", Grid("", ("", ""), told), out)
    if would := stages(story):
        _print_stages(story, would, out)


def _print_stages(story: Story, would: Sequence[Would], out: Console) -> None:
    about = "with tools" if _class(story) is RequestClass.TOOLS else "without tools"
    if not (story.ended or {}).get("request_class"):
        about += ", as far as can be told"
    rows = [
        (
            Cell(
                f"{each.stage}{' (was in force)' if each.in_force else ''}", "good" if each.in_force else ""
            ),
            Cell(each.request),
            Cell(each.answer),
        )
        for each in would
    ]
    _print_grid(
        f"What each stage would do with a request {about}",
        Grid("", ("stage", "the request", "the answer"), rows),
        out,
    )


def _print_head(story: Story, out: Console) -> None:
    ended = story.ended
    out.print(Text(story.operation, style="bold"))
    if ended is None:
        out.print("  not ended, as far as it was told: it is going on, or the proxy died", style="yellow")
        return
    style = STYLES.get(ended["verdict"], "")
    out.print(
        Text.assemble(
            "  ",
            (ended["verdict"], style),
            f"; the app got: {ended['outcome']} ({ended['status']}), {ended['stage']}",
        )
    )
    what = [ended["api"] or "relayed", ended["upstream"], ended["model"], ended["client"]]
    out.print("  " + ", ".join(filter(None, what)), markup=False)
    if ended["error_type"]:
        out.print(f"  {ended['error_type']}", markup=False)
    provider = ended["provider"]
    if provider:
        why = f": {ended['provider_reason']}" if ended["provider_reason"] else ""
        tokens = [
            f"{ended[name]:,} {name.replace('_', ' ')}"
            for name in ("input_tokens", "output_tokens")
            if ended[name] >= 0
        ]
        model = ended["answered_model"]
        told = [f"the provider: {provider}{why}", model, ended["finish"], *tokens]
        out.print("  " + ", ".join(filter(None, told)), markup=False)


def _print_findings(story: Story, out: Console) -> None:
    findings = story.events.get("finding_made", ())
    if findings:
        out.print("\n[bold]Findings[/]")
    for row in findings:
        style = LEVEL_STYLES.get(Level(row["level"]), "")
        out.print(
            Text.assemble("  ", (f"{row['level']} {row['reason']}", style), (f" at {row['at']}", "cyan"))
        )
        if remedy := REMEDIES.get(row["reason"]):
            out.print(Text(f"    {remedy}", style="green"))
        out.print(Text(f"    {page_of(row['reason'])}", style="dim"))


def _print_timeline(story: Story, out: Console) -> None:
    moments = timeline(story)
    first_s = moments[0].at_s if moments else 0.0
    rows = [
        (Cell(f"+{max(each.at_s - first_s, 0):.3f} s", "quiet", number=True), Cell(each.what, each.tone))
        for each in moments
    ]
    if rows:
        _print_grid(f"Timeline from {moment(first_s)} UTC", Grid("", ("", ""), rows), out)


def _print_grid(title: str, grid: Grid, out: Console) -> None:
    out.print()
    out.print(Text(title, style="bold"))
    out.print(Padding(draw(grid), (0, 0, 0, 2), expand=False))
