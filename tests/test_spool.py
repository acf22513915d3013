"""The spool: nothing is lost silently, nothing waits, whatever the disk does."""

import errno
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngate.telemetry import spool as spool_module
from turngate.telemetry.events import (
    EVENT_TYPES,
    MODEL_MAX,
    AnyEvent,
    Event,
    EventsDropped,
    FailureCounted,
    RequestUnjudged,
    StateChanged,
    shown_model,
)
from turngate.telemetry.spool import OTHERS_UNTIL, Spool


def an_other(n: int = 0) -> RequestUnjudged:
    return RequestUnjudged(at_s=1.0, operation=f"op-{n}", surface="batches", why="surface.uncovered")


def a_verdict(n: int = 0) -> StateChanged:
    return StateChanged(
        at_s=1.0, operation=f"op-{n}", upstream="openai", before="SENT", after="STREAMING", how="head"
    )


def any_event() -> st.SearchStrategy[Event]:
    """Any event with any contents that UTF-8 and JSON can say."""
    fields: dict[object, st.SearchStrategy[object]] = {
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(st.characters(exclude_categories=["Cs"])),
        tuple[str, ...]: st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=3).map(tuple),
    }

    def built(event_type: type[Event]) -> st.SearchStrategy[Event]:
        hints = get_type_hints(event_type)
        return st.builds(
            event_type,
            **{
                name: st.sampled_from(get_args(hints[name]))
                if get_origin(hints[name]) is Literal
                else fields[hints[name]]
                for name in event_type.__struct_fields__
            },
        )

    return st.one_of(*map(built, EVENT_TYPES))


def sealed(directory: Path) -> list[AnyEvent]:
    decoder = msgspec.json.Decoder(AnyEvent)
    return [
        event
        for path in sorted(directory.glob("*.jsonl"))
        for event in decoder.decode_lines(path.read_bytes())
    ]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        threading.Event().wait(0.005)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def start(directory: Path) -> Iterator[Callable[..., Spool]]:
    """Start a spool with fast times; closed at the end of the test."""
    spools: list[Spool] = []

    def started(**options: float) -> Spool:
        chosen = {"flush_s": 0.0, "segment_s": 0.01, **options}
        spool = Spool(directory, f"i{len(spools)}", **chosen)  # type: ignore[arg-type]  # ints among the floats
        spools.append(spool)
        spool.start()
        return spool

    yield started
    for spool in spools:
        spool.close()


@given(events=st.lists(any_event(), max_size=40))
@settings(max_examples=40, deadline=None)
def test_what_is_emitted_is_sealed_in_order_when_the_spool_closes(events: list[AnyEvent]) -> None:
    with tempfile.TemporaryDirectory() as name:
        spool = Spool(Path(name), "i", flush_s=0.0)
        spool.start()
        for event in events:
            spool.emit(event)
        spool.close()
        assert sealed(Path(name)) == events
        assert not list(Path(name).glob("*.part"))


def test_an_idle_spool_writes_nothing(directory: Path, start: Callable[..., Spool]) -> None:
    start().close()
    assert list(directory.iterdir()) == []


def test_a_segment_is_sealed_by_age_without_further_events(
    directory: Path, start: Callable[..., Spool]
) -> None:
    start().emit(a_verdict())
    wait_until(lambda: sealed(directory))
    assert [path.suffix for path in directory.iterdir()] == [".jsonl"]


def test_a_segment_is_sealed_by_size(directory: Path, start: Callable[..., Spool]) -> None:
    def seals(count: int) -> bool:
        return len(sealed(directory)) == count

    spool = start(segment_bytes=1, segment_s=3600.0)
    for n in range(3):
        spool.emit(a_verdict(n))
        wait_until(partial(seals, n + 1))
    assert sorted(path.name for path in directory.iterdir()) == [f"i0-{n:08d}.jsonl" for n in range(3)]


def test_segments_are_for_their_owner_only(directory: Path, start: Callable[..., Spool]) -> None:
    spool = start()
    spool.emit(a_verdict())
    spool.close()
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


def test_events_of_many_threads_all_arrive(directory: Path, start: Callable[..., Spool]) -> None:
    spool = start()

    def emit_thousand(first: int) -> None:
        for n in range(first, first + 1000):
            spool.emit(a_verdict(n))

    threads = [threading.Thread(target=emit_thousand, args=[first]) for first in range(0, 4000, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spool.close()
    operations = Counter(event.operation for event in sealed(directory) if isinstance(event, StateChanged))
    assert operations == Counter(f"op-{n}" for n in range(4000))


def test_other_events_stop_before_verdicts_and_both_before_the_bound(
    directory: Path, start: Callable[..., Spool]
) -> None:
    bytes_max = 40_000
    spool = start(bytes_max=bytes_max, segment_s=3600.0)
    line = len(msgspec.json.encode(an_other(1000))) + 1
    for emitted, event in ((2000, an_other), (2000, a_verdict)):
        for n in range(1000, 1000 + emitted):
            spool.emit(event(n))
            if n % 16 == 0:
                wait_until(lambda: not spool._pending)
    spool.close()
    written = Counter(type(event) for event in sealed(directory))
    size = sum(path.stat().st_size for path in directory.iterdir())
    assert bytes_max * (OTHERS_UNTIL - 0.1) < written[RequestUnjudged] * line <= bytes_max * OTHERS_UNTIL
    assert written[StateChanged] > 0
    assert size <= bytes_max
    assert spool.dropped == {
        "other": 2000 - written[RequestUnjudged],
        "verdict": 2000 - written[StateChanged],
    }


def test_drops_are_told_once_there_is_room(directory: Path, start: Callable[..., Spool]) -> None:
    spool = start(bytes_max=2_000)
    for n in range(200):
        spool.emit(an_other(n))
    wait_until(lambda: spool.dropped["other"] and not spool._pending)
    for path in directory.glob("*.jsonl"):
        path.unlink()
    wait_until(lambda: any(isinstance(event, EventsDropped) for event in sealed(directory)))
    spool.close()
    told = [event for event in sealed(directory) if isinstance(event, EventsDropped)]
    assert [(event.event_class, event.count) for event in told] == [("other", spool.dropped["other"])]


def test_memory_is_bounded_while_nobody_writes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "PENDING_MAX", 10)
    spool = Spool(directory, "i")
    for n in range(20):
        spool.emit(an_other(n))
    for n in range(5):
        spool.emit(a_verdict(n))
    assert spool.dropped == {"other": 12, "verdict": 3}
    spool.start()
    spool.close()
    assert [type(event) for event in sealed(directory)] == [
        *[RequestUnjudged] * 8,
        *[StateChanged] * 2,
        *[EventsDropped] * 2,
    ]


def test_a_lost_directory_is_counted_and_writing_resumes(
    directory: Path, start: Callable[..., Spool]
) -> None:
    spool = start()
    directory.rmdir()
    directory.write_text("a file where the directory was")
    for n in range(3):
        spool.emit(a_verdict(n))
    wait_until(lambda: spool.dropped["verdict"] == 3)
    assert spool.write_errors >= 1
    directory.unlink()
    directory.mkdir()
    spool.emit(a_verdict(99))
    wait_until(lambda: len(sealed(directory)) >= 3)
    spool.close()
    dropped = [event for event in sealed(directory) if isinstance(event, EventsDropped)]
    assert sum(event.count for event in dropped) == 3
    assert [event.error for event in sealed(directory) if isinstance(event, FailureCounted)] == [
        "NotADirectoryError"
    ]
    assert a_verdict(99) in sealed(directory)


def test_a_disk_that_fills_up_within_a_batch_leaves_whole_lines_only(
    directory: Path, start: Callable[..., Spool], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    full = threading.Event()

    def fill(descriptor: int, data: memoryview) -> int:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        if b"op-13" in bytes(data):
            full.set()
            return write(descriptor, data[:10])
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", fill)
    spool = start(segment_s=3600.0)
    spool.emit(a_verdict(1))
    wait_until(lambda: list(directory.glob("*.part")) and next(directory.glob("*.part")).stat().st_size)
    spool.emit(a_verdict(13))
    wait_until(lambda: spool.dropped["verdict"] == 1)
    full.clear()
    spool.emit(a_verdict(2))
    spool.close()
    events = sealed(directory)
    assert [event for event in events if isinstance(event, StateChanged)] == [a_verdict(1), a_verdict(2)]
    assert sum(event.count for event in events if isinstance(event, EventsDropped)) == 1


def test_emit_does_not_wait_for_a_disk_that_hangs(
    start: Callable[..., Spool], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    hanging, freed = threading.Event(), threading.Event()

    def hang(descriptor: int, data: memoryview) -> int:
        hanging.set()
        assert freed.wait(60)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", hang)
    spool = start()
    spool.emit(a_verdict(0))
    assert hanging.wait(60)
    for n in range(1, 1000):
        spool.emit(a_verdict(n))  # would hang here for good
    freed.set()
    spool.close()
    assert len(sealed(directory)) == 1000


def test_an_event_that_cannot_be_written_takes_no_other_with_it(
    directory: Path, start: Callable[..., Spool]
) -> None:
    half_an_emoji = FailureCounted(at_s=1.0, where="decode", error="\ud83d")
    spool = start()
    for event in (a_verdict(1), half_an_emoji, a_verdict(2)):
        spool.emit(event)
    spool.close()
    assert [event for event in sealed(directory) if isinstance(event, StateChanged)] == [
        a_verdict(1),
        a_verdict(2),
    ]
    assert spool.dropped == {"other": 1}


def test_a_spool_that_is_closed_twice_stays_closed(directory: Path, start: Callable[..., Spool]) -> None:
    spool = start()
    spool.emit(a_verdict())
    spool.close()
    spool.close()
    assert sealed(directory) == [a_verdict()]


@given(st.text(max_size=300))
def test_a_shown_model_is_printable_and_short(model: str) -> None:
    shown = shown_model(model)
    assert shown in (model, "other")
    assert shown.isprintable()
    assert len(shown) <= MODEL_MAX
