"""`turngate torture`: every variant of recorded answers, played by as many processes as are asked for, and counted."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from turngate.adapters.dialect import Undecodable
from turngate.proxy.replay import Unreadable, read
from turngate.proxy.torture import Answer, Fault, Kind, Tally, answer_of, torture

EX_USAGE: Final = 64

WAITING_MAX: Final = 4
"""Answers a process may have before it, so that it never waits for the file and memory stays bounded."""


def command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Exchange lines, also .gz; or one exchange a .json file."),
    ],
    seed: Annotated[int, typer.Option(help="Of what is left to chance.")] = 0,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="At most so many variants an answer, spread evenly (default: all)."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes (default: one for each processor).", show_default=False)
    ] = os.cpu_count() or 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Cut, fragment and disorder recorded answers in every way; show that no half call and no quiet end comes out.

    Each streamed answer goes through the gate that holds calls, and what the app would get is read by code that the
    gate does not share. Nothing is sent anywhere.

    Exit code: 0 nothing wrong, 1 violations, 64 usage, or a file that cannot be read.
    """
    out = Console(highlight=False, soft_wrap=True)
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        sound = run(files, out, err, seed=seed, limit=limit, jobs=jobs, as_json=as_json)
    except BrokenPipeError:
        raise  # whoever read the output has enough: no fault of a file
    except OSError as error:
        err.print(f"error: cannot read {error.filename}: {error.strerror or error}", markup=False)
        raise typer.Exit(EX_USAGE) from error
    raise typer.Exit(0 if sound else 1)


def run(
    files: Sequence[Path],
    out: Console,
    err: Console,
    *,
    seed: int,
    limit: int | None,
    jobs: int,
    as_json: bool,
) -> bool:
    """Play everything and print what it came to; True where nothing was wrong. Raises OSError."""
    total, skipped = Tally(), 0
    started_s = time.monotonic()
    with _progress(err) as progress:
        task = progress.add_task("", total=sum(file.stat().st_size for file in files), told="")
        answers = _answers(files, lambda size: progress.advance(task, size))
        for tally in _played(answers, seed, limit, jobs):
            if tally is None:
                skipped += 1
                continue
            total.add(tally)
            faults = total.faults.total()
            told = f"{total.variants.total():,} variants, {faults:,} violations"
            progress.update(task, told=told)
    took_s = time.monotonic() - started_s
    if as_json:
        print(json.dumps(summary(total, skipped, seed, took_s)))
    else:
        _print(total, skipped, seed, took_s, out)
    return not total.faults


def _answers(files: Sequence[Path], advance: Callable[[int], object]) -> Iterator[Answer | None]:
    """The streamed answers of these files; None for a line that has none."""
    for file in files:
        for line in read(file, advance):
            yield None if isinstance(line, Unreadable) else answer_of(line)


def _played(
    answers: Iterable[Answer | None], seed: int, limit: int | None, jobs: int
) -> Iterator[Tally | None]:
    """What each answer came to, as they get ready; None where there was nothing to play."""
    if jobs == 1:
        yield from (_play(answer, seed, limit) if answer is not None else None for answer in answers)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting: set[Future[Tally | None]] = set()
        for answer in answers:
            if answer is None:
                yield None
                continue
            waiting.add(pool.submit(_play, answer, seed, limit))
            if len(waiting) >= jobs * WAITING_MAX:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (each.result() for each in done)
        yield from (each.result() for each in waiting)


def _play(answer: Answer, seed: int, limit: int | None) -> Tally | None:
    try:
        return torture(answer, seed, limit)
    except Undecodable:
        return None  # no answer is judged where the request could not be read


def summary(total: Tally, skipped: int, seed: int, took_s: float) -> dict[str, Any]:
    """All counts as plain values."""
    return {
        "answers": total.answers,
        "skipped": skipped,
        "seed": seed,
        "variants": {kind: total.variants[kind] for kind in Kind if total.variants[kind]},
        "variants_total": total.variants.total(),
        "violations": {fault: _of(total, fault) for fault in Fault},
        "violations_total": total.faults.total(),
        "calls_released": total.released,
        "indistinct": total.indistinct,
        "took_s": round(took_s, 3),
        "examples": [
            {
                "id": example.id,
                "kind": example.variant.kind,
                "at": example.variant.at,
                "ending": example.variant.ending,
                "violation": example.fault,
                "what": example.what,
            }
            for example in total.examples
        ],
    }


def _of(total: Tally, fault: Fault) -> int:
    return sum(count for (_, each), count in total.faults.items() if each is fault)


def _progress(err: Console) -> Progress:
    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.fields[told]}"))
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def _print(total: Tally, skipped: int, seed: int, took_s: float, out: Console) -> None:
    table = Table("variant")
    for title in ("variants", *Fault):
        table.add_column(title, justify="right")
    for kind in Kind:
        if total.variants[kind]:
            faults = (_cell(total.faults[kind, fault]) for fault in Fault)
            table.add_row(kind, f"{total.variants[kind]:,}", *faults)
    table.add_section()
    table.add_row("all", f"{total.variants.total():,}", *(_cell(_of(total, fault)) for fault in Fault))
    out.print(table)
    rate = f", {total.variants.total() / took_s:,.0f} variants a second" if took_s > 0 else ""
    out.print(
        f"{total.answers:,} streamed answers ({skipped:,} lines without one){rate}; seed {seed}\n"
        f"{total.released:,} calls came out; {total.indistinct:,} disordered streams nobody could tell from sound ones"
    )
    for example in total.examples:
        out.print(f"  {example.id}  {example.variant}  {example.fault}: {example.what}", markup=False)


def _cell(count: int) -> Text:
    return Text(f"{count:,}", style="bold red" if count else "")
