"""`turngate replay`: recorded exchanges one by one, then what they came to, for people or as JSON lines."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from turngate.adapters.dialect import Dialect
from turngate.proxy.cli_check import STYLES
from turngate.proxy.replay import PROVIDER, Tally, Unreadable, read, replay
from turngate.proxy.rollout import Stage

BAD_LINES_SHOWN_MAX: Final = 20


def run(
    files: Sequence[Path], stage: Stage, forced: Dialect | None, out: Console, err: Console, *, as_json: bool
) -> None:
    """Judge every exchange of these files. Raises OSError where one cannot be read."""
    tally = Tally()
    started_s = time.monotonic()
    with _progress(err) as progress:
        task = progress.add_task("judging", total=sum(file.stat().st_size for file in files))
        for file in files:
            for line in read(file, lambda size: progress.advance(task, size)):
                if isinstance(line, Unreadable):
                    tally.bad_lines += 1
                    _tell_bad_line(line, tally.bad_lines, err)
                    continue
                judged = replay(line, stage, forced, tally)
                if as_json:
                    print(json.dumps(judged))
    if as_json:
        print(json.dumps({"summary": tally.summary()}))
    else:
        _print_summary(tally, stage, time.monotonic() - started_s, out)


def _progress(err: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def _tell_bad_line(line: Unreadable, number: int, err: Console) -> None:
    if number <= BAD_LINES_SHOWN_MAX:
        err.print(f"{line.where}: {line.why}", markup=False)
    if number == BAD_LINES_SHOWN_MAX:
        err.print("further bad lines are counted only")


def _print_summary(tally: Tally, stage: Stage, took_s: float, out: Console) -> None:
    from turngate.proxy import cli_report  # not above: `serve` must not carry DuckDB in its memory

    out = cli_report.unfolded(out)
    summary = tally.summary()
    exchanges, bad = summary["exchanges"], summary["bad_lines"]
    rate = f", {exchanges / took_s:,.0f} a second" if took_s > 0 else ""
    out.print(f"{exchanges:,} exchanges judged as at {stage}" + rate + (f"; {bad} bad lines" if bad else ""))
    out.print()
    for name, title in (("apis", "APIs"), ("turns", "answers"), ("answer_reasons", "answers, by reason")):
        _print_counts(title, summary[name], out)
    if exchanges:
        out.print(_verdicts(summary))
    if rules := tally.by_rule():
        cli_report.print_matrix(rules, tally.by_scope(), out)
        out.print()
    _print_examples(summary["examples"], out)
    out.print(
        f"{summary['tool_calls_released']:,} tool calls released; {summary['answers_changed']:,} answers would have"
        " been withheld or cut short"
    )


def _print_counts(title: str, counts: Mapping[str, int], out: Console) -> None:
    if counts:
        out.print(
            f"{title}: " + ", ".join(f"{name} {count:,}" for name, count in counts.items()), markup=False
        )


def _verdicts(summary: Mapping[str, Any]) -> Table:
    """Our verdict against the provider's answer."""
    table = Table("our verdict", *(f"provider {each.replace('_', ': ')}" for each in PROVIDER))
    for verdict, row in summary["matrix"].items():
        if any(row.values()):
            table.add_row(Text(verdict, style=STYLES[verdict]), *(f"{row[each]:,}" for each in PROVIDER))
    return table


def _print_examples(examples: Mapping[str, list[dict[str, str]]], out: Console) -> None:
    for kind, kept in examples.items():
        out.print(f"{kind}, for example:")
        for each in kept:
            out.print(f"  {each['id']}  {each['what']}", markup=False)
