"""The proxy's side of the diary: events become JSON lines in bounded segment files that the observer reads.

A segment is born as `<instance>-<seq>.part`, locked with flock by its writer, and sealed by renaming it to `.jsonl`.
A `.part` whose lock is free therefore belongs to a dead writer, and the observer may adopt it. The kernel frees the
lock whatever ends the process, which no pid file can promise.

`emit` only appends to a deque: 0.3 us in the caller's thread, against 1.1 us more if it also encoded (timeit on
ExchangeEnded, `emit` and `Encoder.encode`). Encoding happens in one daemon thread, a few events at a time, because `encode_lines` keeps
the GIL: 256 events hold it for about 0.1 ms.
"""

import fcntl
import itertools
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from turngate.telemetry.events import VERDICT_EVENTS, AnyEvent, Event, EventsDropped, FailureCounted

EventClass = Literal["verdict", "other"]

PENDING_MAX: Final = 50_000
"""Events waiting for the writer, about 25 MB; two seconds of the heaviest traffic, twenty times `flush_s`."""

OTHERS_UNTIL: Final = 0.8
"""Share of each bound (pending events, bytes on disk) up to which events that carry no verdict are taken."""

ENCODED_AT_ONCE: Final = 256
SCAN_COST_SHARE: Final = 0.02
"""The directory is measured at most so often that doing so takes this share of one core."""


class Spool:
    """Takes events from any thread, never blocks, never raises; what does not fit is dropped and counted.

    `flush_s` is how long events may wait in memory, `segment_s` and `segment_bytes` when a segment is sealed.
    An idle spool has no open segment and its thread sleeps. What a full disk loses is counted in `dropped` and told
    by an `EventsDropped` as soon as there is room.
    """

    def __init__(
        self,
        directory: Path,
        instance: str,
        *,
        bytes_max: int = 256 << 20,
        segment_bytes: int = 4 << 20,
        segment_s: float = 1.0,
        flush_s: float = 0.1,
    ) -> None:
        self.dropped: Counter[EventClass] = Counter()
        self.write_errors = 0
        self._directory = directory
        self._instance = instance
        self._bytes_max = bytes_max
        self._segment_bytes = segment_bytes
        self._segment_s = segment_s
        self._flush_s = flush_s
        self._pending: deque[Event] = deque()
        self._untold: Counter[EventClass] = Counter()
        self._untold_error = ""
        self._counting = threading.Lock()
        self._waked = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._encoder = msgspec.json.Encoder()
        self._sequence = itertools.count()
        self._segment: _Segment | None = None
        self._bytes = 0
        self._scan_after = 0.0
        self._thread = threading.Thread(target=self._run, name="turngate-spool", daemon=True)

    def __repr__(self) -> str:
        return f"<Spool {self._directory} pending={len(self._pending)} bytes={self._bytes} dropped={dict(self.dropped)}>"

    def start(self) -> None:
        """Make the directory and start the writer. Raises OSError when the directory cannot be made."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._thread.start()

    def emit(self, event: AnyEvent) -> None:
        """Take one event. Any thread; neither blocks nor raises."""
        pending = len(self._pending)
        if pending >= PENDING_MAX * OTHERS_UNTIL and (pending >= PENDING_MAX or _class_of(event) == "other"):
            self._drop([event])
            return
        self._pending.append(event)
        if not self._waked:
            self._waked = True
            self._wake.set()

    def close(self) -> None:
        """Write what is pending and seal the open segment; takes as long as the disk does, at most 5 s."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(self._until_sealing_s())
            if self._wake.is_set():
                # Let company arrive: one write for all that comes within flush_s.
                self._closing.wait(self._flush_s)
            self._wake.clear()
            self._waked = False  # before draining: an event that comes from now on wakes the writer again
            self._write_pending()
            self._seal_if_due()
        self._write_pending()
        self._seal()

    def _until_sealing_s(self) -> float | None:
        """Time left to the open segment in seconds; None (sleep until woken) without one and with nothing to tell."""
        if self._segment is not None:
            return max(0.0, self._segment.opened_s + self._segment_s - time.monotonic())
        return self._segment_s if self._untold or self._untold_error else None

    def _write_pending(self) -> None:
        while self._pending:
            # The emitters only append, this thread alone removes: so many are there for sure.
            count = min(ENCODED_AT_ONCE, len(self._pending))
            self._write_counted([self._pending.popleft() for _ in range(count)])
        self._tell()

    def _write_counted(self, events: Sequence[Event]) -> None:
        """Write what there is room for; the rest is dropped."""
        kept = events
        data = self._encode(events)
        room = self._bytes_max - self._used()
        if len(data) > room - self._bytes_max * (1 - OTHERS_UNTIL):
            kept = [event for event in events if type(event) in VERDICT_EVENTS]
            data = self._encode(kept)
            self._drop([event for event in events if type(event) not in VERDICT_EVENTS])
        if data and (len(data) > room or not self._write(data)):
            self._drop(kept)

    def _encode(self, events: Sequence[Event]) -> bytes:
        try:
            return self._encoder.encode_lines(events)
        except (UnicodeEncodeError, TypeError, ValueError):
            return b"".join(map(self._encode_or_drop, events))

    def _encode_or_drop(self, event: Event) -> bytes:
        try:
            return self._encoder.encode(event) + b"\n"
        except (UnicodeEncodeError, TypeError, ValueError) as exc:
            # Half an emoji from a client arrives as a lone surrogate, which UTF-8 cannot say.
            self._untold_error = type(exc).__name__
            self._drop([event])
            return b""

    def _write(self, data: bytes) -> bool:
        try:
            if self._segment is None:
                self._segment = _Segment.open(self._directory, self._instance, self._sequence)
            self._segment.write(data)
        except OSError as exc:
            self.write_errors += 1
            self._untold_error = type(exc).__name__
            # A segment that met an error is not written again: whether its end is whole is the reader's to find out.
            self._seal()
            return False
        self._bytes += len(data)
        if self._segment.size >= self._segment_bytes:
            self._seal()
        return True

    def _used(self) -> int:
        """Bytes in the directory: measured now and then, because the observer removes what it has loaded."""
        begun = time.monotonic()
        if begun >= self._scan_after:
            self._bytes = _size_of(self._directory)
            ended = time.monotonic()
            self._scan_after = ended + max(self._segment_s, (ended - begun) / SCAN_COST_SHARE)
        return self._bytes

    def _tell(self) -> None:
        """Say what was lost. What cannot be said now stays to be said later."""
        now = time.time()
        with self._counting:
            untold, self._untold = self._untold, Counter()
        error, self._untold_error = self._untold_error, ""
        notes: list[AnyEvent] = [
            EventsDropped(at_s=now, event_class=event_class, count=count)
            for event_class, count in untold.items()
        ]
        if error:
            notes.append(FailureCounted(at_s=now, where="spool", error=error))
        data = self._encoder.encode_lines(notes)
        if notes and not (self._used() + len(data) <= self._bytes_max * OTHERS_UNTIL and self._write(data)):
            with self._counting:
                self._untold += untold
            self._untold_error = self._untold_error or error

    def _drop(self, events: Sequence[Event]) -> None:
        # A lock, because += on a counter is not atomic across threads; nothing waits while it is held.
        with self._counting:
            for event in events:
                self.dropped[_class_of(event)] += 1
                self._untold[_class_of(event)] += 1

    def _seal_if_due(self) -> None:
        if self._segment is not None and time.monotonic() >= self._segment.opened_s + self._segment_s:
            self._seal()

    def _seal(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        try:
            segment.seal()
        except OSError as exc:
            # Its lock is free now, so the observer adopts it like a dead writer's.
            self.write_errors += 1
            self._untold_error = type(exc).__name__


@dataclass(slots=True)
class _Segment:
    """One open `.part` file, locked by us; `size` counts bytes of whole batches."""

    path: Path
    descriptor: int
    opened_s: float
    size: int = 0

    @classmethod
    def open(cls, directory: Path, instance: str, sequence: "itertools.count[int]") -> "_Segment":
        """Make and lock the next segment. Raises OSError."""
        while True:
            path = directory / f"{instance}-{next(sequence):08d}.part"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            if _lock(descriptor) and path.exists():
                return cls(path, descriptor, time.monotonic())
            # Between open and lock the observer took the file for a dead writer's: leave it and take the next.
            os.close(descriptor)

    def write(self, data: bytes) -> None:
        """Append the whole batch or, raising OSError, nothing of it."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.descriptor, view) :]
        except OSError:
            os.ftruncate(self.descriptor, self.size)
            raise
        self.size += len(data)

    def seal(self) -> None:
        """Give the file its final name, then let go of it. Raises OSError when renaming fails."""
        try:
            self.path.rename(self.path.with_suffix(".jsonl"))
        finally:
            os.close(self.descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size_of(directory: Path) -> int:
    total = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    total += entry.stat().st_size
                except FileNotFoundError:
                    continue  # loaded and removed while we looked
    except OSError:
        return total  # no directory, no bytes; the write that follows meets the same error and counts it
    return total


def _class_of(event: Event) -> EventClass:
    return "verdict" if type(event) in VERDICT_EVENTS else "other"
