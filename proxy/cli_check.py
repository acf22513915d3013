"""`turngate check`: the verdict on one request body, and on a terminal a drawing of the place that is broken."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.text import Text

from turngate.adapters import levels, registry
from turngate.adapters.dialect import Dialect, Undecodable
from turngate.validators.graph import Block, Kind, MessageSequence, Role
from turngate.validators.rules import Finding, Judgement, Level, Reason, Verdict, judge

EXIT_CODES: Final = {Verdict.LEGAL: 0, Verdict.ILLEGAL: 1, Verdict.WAITING: 2, Verdict.UNJUDGED: 3}
STYLES: Final = {
    Verdict.LEGAL: "green",
    Verdict.WAITING: "yellow",
    Verdict.ILLEGAL: "red",
    Verdict.UNJUDGED: "magenta",
}
LEVEL_STYLES: Final = {Level.HARD: "bold red", Level.SOFT: "yellow", Level.OFF: "dim"}

DRAWN_MAX: Final = 5
"""So many findings are drawn; all are named."""
SHOWN_CHARACTERS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Checked:
    """One body's verdict. `guess` says what the dialect was known by, `why` why nothing could be judged."""

    api: str
    judgement: Judgement
    guess: str = ""
    why: str = ""
    sequence: MessageSequence | None = None


def check(body: bytes, api: str | None, server: str) -> Checked:
    """Judge a request as the sidecar would. Without `api` the body has to tell it; without `server` the API's own."""
    guess = ""
    try:
        dialect, guess = _dialect(body, api)
        sequence = dialect.parse_request(body)
    except Undecodable as error:
        return Checked(api or "", Judgement(Verdict.UNJUDGED), guess, str(error))
    named = server or levels.SERVERS[dialect.api][0]
    return Checked(dialect.api, judge(sequence, levels.levels(dialect.api, named)), guess, sequence=sequence)


def _dialect(body: bytes, api: str | None) -> tuple[Dialect, str]:
    """The dialect, and how sure that is where it was guessed. Raises Undecodable."""
    if api is not None:
        return registry.DIALECTS[api], ""
    dialect, why = registry.by_body(body)
    return dialect, f"{'likely' if why in registry.ONLY_LIKELY else 'certain'}: {why}"


def as_json(name: str, checked: Checked) -> str:
    """The line that `replay --json` prints for a request."""
    line = {
        "id": name,
        "api": checked.api,
        "verdict": checked.judgement.verdict,
        "findings": msgspec.to_builtins(checked.judgement.findings),
    }
    return json.dumps({**line, "why": checked.why} if checked.why else line)


def print_checked(checked: Checked, body: bytes, out: Console) -> None:
    """For people. What is drawn is drawn on a terminal only, so that a pipe gets one line a finding."""
    verdict = checked.judgement.verdict
    out.print(
        f"[{STYLES[verdict]}]{verdict}[/]  {checked.api}" + (f" ({checked.guess})" if checked.guess else "")
    )
    if checked.why:
        out.print(f"  {checked.why}", markup=False)
    request = msgspec.json.decode(body) if checked.judgement.findings and out.is_terminal else None
    for number, finding in enumerate(checked.judgement.findings):
        if request is None or checked.sequence is None:
            out.print(f"  {finding.level} {finding}", markup=False)
            continue
        if number:
            out.print()
        _print_finding(finding, out)
        if number < DRAWN_MAX:
            _print_rows(list(draw(finding, checked.sequence, request)), out)


def _print_finding(finding: Finding, out: Console) -> None:
    style = LEVEL_STYLES[finding.level]
    out.print(
        Text.assemble("  ", (f"{finding.level} {finding.reason}", style), (f" at {finding.at}", "cyan"))
    )
    out.print(Text(f"    {finding.message}"))
    out.print(Text(f"    {finding.remedy}", style="green"))


def _print_rows(rows: list["Row"], out: Console) -> None:
    width = max((len(row.at) for row in rows), default=0)
    for row in rows:
        text = Text(f"    {row.edge:<3}{row.at:<{width}}  {row.said}")
        text.stylize("red" if row.broken else "dim" if row.aside else "")
        if not row.broken:
            text.stylize("red", 4, 7)  # the edge
        out.print(text, no_wrap=True, overflow="ellipsis", crop=True)


# -- the drawing ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One line: a piece of the edge, the block's pointer, and what it says. `aside`: only there to show the place."""

    edge: str
    at: str
    said: str
    broken: bool = False
    aside: bool = False


_ANSWERS: Final = {
    Kind.TOOL_CALL: Kind.TOOL_RESULT,
    Kind.TOOL_RESULT: Kind.TOOL_CALL,
    Kind.SERVER_TOOL_CALL: Kind.SERVER_TOOL_RESULT,
    Kind.SERVER_TOOL_RESULT: Kind.SERVER_TOOL_CALL,
}


def draw(finding: Finding, sequence: MessageSequence, request: object) -> Iterator[Row]:
    """The blocks round a finding, and the edge from it to its other end, or to where that is missing.

    At most nine rows: both ends, their neighbours, and marks where blocks are left out.
    """
    blocks = sequence.blocks
    here = _index(blocks, finding.at)
    if here is None:
        yield Row("✗", finding.at, shown(_at(request, finding.at)), broken=True)
        return
    missing = _place_of_result(blocks, here) if finding.reason is Reason.CALL_UNANSWERED else None
    there = _other_end(blocks, here) if missing is None else missing - 1
    ends = (here, here) if there is None else (min(here, there), max(here, there))
    kept = sorted({i + d for i in (here, *ends) for d in (-1, 0, 1)} & set(range(len(blocks))))
    before = kept[0]
    for i in kept:
        if i - before > 1:
            yield Row(_between(i, ends), "", f"… {i - before - 1} more …", aside=True)
        before = i
        broken = i == here and missing is None
        yield Row(
            _edge(i, here, ends, missing),
            blocks[i].at,
            _said(blocks[i], request),
            broken,
            i not in (here, there),
        )
        if missing == i + 1:
            yield Row("╰─✗", "", f"the result of {_named(blocks[here])} is missing here", broken=True)


def _index(blocks: tuple[Block, ...], at: str) -> int | None:
    """The block at a pointer, or the one that holds it, or the first one inside of it."""
    for i, block in enumerate(blocks):
        if block.at == at or at.startswith(f"{block.at}/"):
            return i
    return next((i for i, block in enumerate(blocks) if block.at.startswith(f"{at}/")), None)


def _other_end(blocks: tuple[Block, ...], here: int) -> int | None:
    """The nearest block that names the same call from the other side, else the nearest one with the same id."""
    block = blocks[here]
    if block.call_id is None:
        return None
    same = [i for i, each in enumerate(blocks) if each.call_id == block.call_id and i != here]
    others = [i for i in same if blocks[i].kind is _ANSWERS.get(block.kind)]
    return min(others or same, key=lambda i: abs(i - here), default=None)


def _place_of_result(blocks: tuple[Block, ...], here: int) -> int:
    """The index before which a call's result belongs: behind the assistant's blocks and the results that stand there."""
    i = here
    while i < len(blocks) and blocks[i].role is blocks[here].role:
        i += 1
    while i < len(blocks) and blocks[i].kind is Kind.TOOL_RESULT:
        i += 1
    return i


def _edge(i: int, here: int, ends: tuple[int, int], missing: int | None) -> str:
    if missing is not None:
        return "╭─ " if i == here else _between(i, (here, missing - 1))
    if ends[0] == ends[1]:
        return "✗" if i == here else ""
    if i in ends:
        return ("╭─" if i == ends[0] else "╰─") + ("✗" if i == here else " ")
    return _between(i, ends)


def _between(i: int, ends: tuple[int, int]) -> str:
    return "│" if ends[0] < i <= ends[1] else ""


def _named(block: Block) -> str:
    return _printable(f'"{block.call_id}"' if block.call_id is not None else block.name or "the call")


def _said(block: Block, request: object) -> str:
    """Role, kind, what it is called, and its content, each as the body has it."""
    names = [_named(block)] if block.call_id is not None else []
    names += [_printable(block.name)] if block.name else []
    value = _at(request, block.at)
    if isinstance(value, dict):
        told = (block.role, block.kind, block.call_id, block.name)
        value = {
            key: each
            for key, each in value.items()
            if each not in told and key != "type" and each is not None
        }
        value = next(iter(value.values())) if len(value) == 1 else value
    kind = block.kind.replace("_", " ")
    role = [block.role] if block.role is not Role.TOOL else []
    return " ".join([*role, *([kind] if kind != "text" else []), *names, shown(value)])


def shown(value: object) -> str:
    """A value of the body as JSON, printable and not long."""
    return _printable(json.dumps(value, ensure_ascii=False))


def _printable(text: str) -> str:
    cut = text if len(text) <= SHOWN_CHARACTERS_MAX else text[: SHOWN_CHARACTERS_MAX - 1] + "…"
    return "".join(c if c.isprintable() else "?" for c in cut)


def _at(value: Any, pointer: str) -> Any:
    """The value at a JSON pointer; None where it leads nowhere."""
    for key in pointer.split("/")[1:]:
        try:
            value = (
                value[int(key)]
                if isinstance(value, list)
                else value[key.replace("~1", "/").replace("~0", "~")]
            )
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return value
