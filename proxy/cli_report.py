"""`turngate report`: what each rule would have done against what the provider did, for people, scripts and colleagues."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Final

import duckdb
import jinja2
import msgspec
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import turngate
from turngate.proxy.cli_query import WIDE
from turngate.proxy.report_sections import (
    FAULTS,
    Cell,
    Grid,
    Section,
    chart,
    faults,
    headline,
    matrix,
    matrix_by_scope,
    moment,
    seconds,
    sections,
    span,
)
from turngate.telemetry.queries import connect_readonly, newer_days
from turngate.telemetry.report import Report, Rule, Scope, gather

_STYLES: Final = {"": "", "good": "green", "warn": "yellow", "bad": "bold red", "quiet": "dim"}
_BAR_WIDTH: Final = 8
_KEPT_WHOLE_MAX: Final = 24
"""Characters of a row's name; a longer one gives way where a line is too short for all."""
_PIECES: Final = " ▏▎▍▌▋▊▉█"
_STEPS: Final = "▁▂▃▄▅▆▇█"
_UNITS_S: Final = {"m": 60, "h": 3_600, "d": 86_400}


class BadOption(Exception):
    """An option's text cannot be used; it says what can."""


class NoEvidence(Exception):
    """The evidence cannot be read; the text says why."""


def parse_since(text: str, now_s: float) -> float:
    """`7d`, `24h`, `30m` ago, or a day (UTC), as Unix seconds. Raises BadOption."""
    if ago := re.fullmatch(r"(\d{1,6})([mhd])", text):
        return max(0.0, now_s - int(ago[1]) * _UNITS_S[ago[2]])
    try:
        return max(0.0, datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp())
    except ValueError as error:
        raise BadOption(f"--since {text}: write 7d, 24h, 30m or a day such as 2026-03-01") from error


def parse_faults(text: str) -> list[str]:
    """Names out of FAULTS, as `--fail-on` takes them. Raises BadOption."""
    named = [name for name in text.split(",") if name]
    if unknown := [name for name in named if name not in FAULTS]:
        raise BadOption(f"--fail-on {unknown[0]}: choose among {', '.join(FAULTS)}")
    return named


def found(report: Report, named: Sequence[str]) -> str:
    """Which of these faults there are, in words; empty for none."""
    counts = faults(report)
    return ", ".join(f"{name}: {counts[name]:,}" for name in named if counts[name])


def read(evidence_dir: Path, since_s: float, now_s: float, err: Console) -> Report:
    """Gather the report; on a terminal with a line on what is being read. Raises NoEvidence."""
    try:
        with _progress(err) as told, connect_readonly(evidence_dir, since_s=since_s) as database:
            if newer := newer_days(database):
                err.print(f"a newer turngate wrote {', '.join(newer)}: what it added may be missing here")
            return gather(database, since_s=since_s, now_s=now_s, told=told)
    except duckdb.Error as error:
        raise NoEvidence(
            f"cannot read the evidence in {evidence_dir}: {error}\n"
            "If a duckdb shell has one of its files open, close it there."
        ) from error


@contextmanager
def _progress(err: Console) -> Iterator[Callable[[str], None]]:
    """On a terminal a line that names the part that is being read."""
    if not err.is_terminal:
        yield lambda part: None
        return
    with err.status("opening the evidence") as status:
        yield lambda part: status.update(f"reading {part}")


def give_out(
    report: Report, evidence_dir: Path, out: Console, err: Console, *, as_json: bool, html: Path | None
) -> None:
    """To standard output, or as HTML into a file. Raises BadOption where that cannot be written."""
    if not report.totals.exchanges:
        err.print(
            f"nothing is written down yet in {evidence_dir} since {moment(report.since_s)} UTC. "
            "Send traffic through the sidecar (turngate serve, turngate run), or look further back with --since.",
            markup=False,
        )
    if as_json:
        print(to_json(report))
    elif html is not None:
        try:
            html.write_text(to_html(report), encoding="utf-8")
        except OSError as error:
            raise BadOption(f"cannot write {html}: {error.strerror or error}") from error
        err.print(f"written: {html}", markup=False)
    elif report.totals.exchanges:
        print_report(report, unfolded(out))


def unfolded(out: Console) -> Console:
    """A console on which nothing is folded but on a terminal."""
    return Console(width=None if out.is_terminal else WIDE, highlight=False)


def to_json(report: Report) -> str:
    """One object, with every number of the report."""
    return msgspec.json.encode(report).decode()


def to_html(report: Report) -> str:
    """One file that needs nothing else: no script, no font, no picture from elsewhere."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = files("turngate.dashboards").joinpath("report/report.html.j2").read_text(encoding="utf-8")
    says, tone = headline(report)
    timeline = report.timeline
    return environment.from_string(template).render(
        span=span(report),
        headline=says,
        tone=tone,
        columns=chart(report),
        first=moment(timeline[0].at_s) if timeline else "",
        last=moment(timeline[-1].at_s + report.bucket_s) if timeline else "",
        bucket=seconds(report.bucket_s),
        highest=f"{max((bucket.exchanges for bucket in timeline), default=0):,}",
        sections=sections(report),
        version=turngate.__version__,
        made=moment(report.now_s),
    )


def print_report(report: Report, out: Console) -> None:
    """For a terminal or a pipe."""
    out.print(Text.assemble(("Turngate report", "bold"), "  ", (span(report), "dim")))
    columns = chart(report)
    if len(columns) > 1:
        heights = [each.fine + each.stopped + each.provider_errors + each.broken for each in columns]
        line = "".join(_STEPS[round(height * (len(_STEPS) - 1))] if height else " " for height in heights)
        out.print(Text.assemble((line, "blue"), (f"  {seconds(report.bucket_s)} a column", "dim")))
    for section in sections(report):
        out.print()
        _print_section(section, out)


def _print_section(section: Section, out: Console) -> None:
    out.print(Text(section.title, style="bold"))
    out.print(Padding(Text(section.says, style=_STYLES[section.tone]), (0, 0, 0, 2), expand=False))
    for grid in section.grids:
        _print_grid(grid, out)


def _print_grid(grid: Grid, out: Console) -> None:
    out.print()
    if grid.title:
        out.print(Text(f"  {grid.title}", style="dim"))
    out.print(Padding(draw(grid), (0, 0, 0, 2), expand=False))


def print_matrix(rules: Sequence[Rule], scopes: Sequence[Scope], out: Console) -> None:
    """The confusion matrix as the report draws it, in the order given."""
    for grid in (matrix(rules), matrix_by_scope(scopes)):
        _print_grid(grid, out)


def draw(grid: Grid) -> Table:
    """A grid as a table for the terminal."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_header=any(grid.heads),
    )
    for number, head in enumerate(grid.heads):
        longest = max((len(row[number].text) for row in grid.rows), default=0)
        if grid.rows and grid.rows[0][number].number:
            # As narrow as can be, so that texts keep their room: such a head is broken between its words.
            width = max(longest, *map(len, head.split()), 0)
            table.add_column(head, justify="right", width=width)
        else:
            least = min(longest, _KEPT_WHOLE_MAX) if number == 0 else None
            table.add_column(head, overflow="fold", min_width=least)
        if any(row[number].bar is not None for row in grid.rows):
            table.add_column("", no_wrap=True)
    for row in grid.rows:
        table.add_row(*(drawn for cell in row for drawn in _drawn(cell)))
    return table


def _drawn(cell: Cell) -> list[Text]:
    text = Text(cell.text, style=_STYLES[cell.tone])
    return [text] if cell.bar is None else [text, Text(bar(cell.bar), style="blue")]


def bar(part: float) -> str:
    """A part of a whole, 0 to 1, drawn in eighths of a character; what is not nothing can be seen."""
    eighths = max(round(part * _BAR_WIDTH * 8), 1 if part else 0)
    return ("█" * (eighths // 8) + _PIECES[eighths % 8]).rstrip()
