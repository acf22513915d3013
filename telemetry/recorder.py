"""The observer's side of the diary: each sealed segment is read once and feeds the metrics and the evidence files.

Exactly once: the rows of a segment and its name go into a day's file in one transaction, and a segment is unlinked
only after all of its days committed. After a crash anywhere in between, the name tells which days have it already.
Metrics count a segment after its last commit, so that their sums equal the rows.

How rows get in was measured (`time.process_time` round one ATTACH, transaction and DETACH for 30,000 events of 216
bytes on an existing day, decoding included): `from_json` over the lines as one parameter 3.2 to 4.5 us an event;
`read_json` over a file written per type a tenth less, but it needs that file; `read_json` of the whole segment and
one insert per type 6 us, and it may disagree with our own decoder about a line; the appender 5 us; `unnest` of column
lists 13 us. `load_pending` as a whole, metrics included, takes 4.1 us at best and 5 us in the median (decoding and
grouping 1.1, parsing and inserting 1.3, DuckDB's log and checkpoint 1.2, metrics 0.6). A load of a few events takes
12 to 15 ms, so at a low rate the rarer it is, the cheaper.
"""

import fcntl
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final

import duckdb
import msgspec

from turngate.telemetry import schema, views
from turngate.telemetry.events import EVENT_TYPES, AnyEvent, Event
from turngate.telemetry.metrics import Registry
from turngate.telemetry.schema import ALL_TABLES, DEFAULTS, META, SCHEMA_VERSION, TABLES, table_of

BATCH_BYTES: Final = 8 << 20
"""Segments are loaded together up to this size: more saves nothing, and decoded events take twice their lines."""

STORAGE_VERSION: Final = "v1.5.0"
"""A file of DuckDB 2.0's own version cannot be opened by the 1.5 shells that people have."""

_DAY_S: Final = 86_400
_EPOCH: Final = date(1970, 1, 1)
_DAYS_MAX: Final = (date.max - _EPOCH).days


class Recorder:
    """Loads sealed segments from `spool_dir` into `evidence_dir`/YYYY-MM-DD.duckdb (UTC) and into `registry`.

    Several recorders may share the directories; only one loads at a time. Not for use by two threads at once, but
    `lag_s` may be asked from any thread.
    """

    def __init__(
        self,
        spool_dir: Path,
        evidence_dir: Path,
        registry: Registry,
        *,
        retention_days: int = 14,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._spool_dir = spool_dir
        self._evidence_dir = evidence_dir
        self._registry = registry
        self._retention_days = retention_days
        self._clock = clock
        self._decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
        self._database: duckdb.DuckDBPyConnection | None = None
        self._ready_days: set[float] = set()
        self._committed: set[str] = set()
        self._pending_since_s: float | None = None
        self._swept: date | None = None
        self.behind = False

    def load_pending(self) -> int:
        """Load all sealed segments; the number of events loaded. Blocks: not for an event loop.

        `behind` then tells that something could not be loaded yet, usually because somebody has a day file open:
        call again later. Raises OSError when a directory cannot be used at all.
        """
        self._evidence_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._spool_dir.is_dir():
            return 0
        with _only_one(self._spool_dir / ".loading") as mine:
            if not mine:
                self.behind = True
                return 0
            self._adopt_orphans()
            rows = self._load_all(self._list_sealed())
            self._remove_old_days()
        return rows

    def lag_s(self) -> float:
        """Age in seconds of the oldest sealed segment that is not loaded, as of the last look; 0 without one."""
        since = self._pending_since_s
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def close(self) -> None:
        """Let go of DuckDB."""
        database, self._database = self._database, None
        self._ready_days.clear()
        if database is not None:
            database.close()

    def _adopt_orphans(self) -> None:
        """Seal what dead writers left: a `.part` file whose lock is free."""
        for path in self._spool_dir.glob("*.part"):
            try:
                with path.open("rb") as part:
                    fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Renamed under the lock, and a writer that gets it after us looks whether its path is still there.
                    path.rename(path.with_suffix(".jsonl"))
            except BlockingIOError:
                continue  # its writer lives
            except FileNotFoundError:
                continue  # its writer has just sealed it

    def _list_sealed(self) -> list["_File"]:
        """Sealed segments, oldest first; also tells the registry how big the spool is."""
        sealed = []
        size = 0
        with os.scandir(self._spool_dir) as entries:
            for entry in entries:
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue  # sealed under its other name while we looked; it comes next time
                size += stat.st_size
                if entry.name.endswith(".jsonl"):
                    sealed.append(_File(Path(entry.path), stat.st_size, stat.st_mtime))
        self._registry.set("spool_bytes", size)
        sealed.sort(key=lambda file: (file.sealed_s, file.path.name))
        return sealed

    def _load_all(self, sealed: Sequence["_File"]) -> int:
        rows = 0
        self.behind = False
        for batch in _batches(sealed):
            self._pending_since_s = batch[0].sealed_s
            rows += self._load_batch([self._read(file) for file in batch])
            if self.behind:
                return rows
        self._pending_since_s = None
        return rows

    def _read(self, file: "_File") -> "_Segment":
        events, lines = self._decode(file.path.read_bytes())
        groups = _group(events, lines)
        if not all(map(_in_calendar, groups)):
            fits = [0 <= event.at_s // _DAY_S < _DAYS_MAX for event in events]
            self._failed("segment_line", fits.count(False))
            events = list(itertools.compress(events, fits))
            groups = _group(events, itertools.compress(lines, fits))
        return _Segment(file.path, events, groups)

    def _decode(self, data: bytes) -> tuple[list[AnyEvent], list[bytes]]:
        """Events and their lines. Those that cannot be decoded are counted and left out: the torn last line of a
        killed writer, an event of a newer version."""
        lines = data.splitlines()
        try:
            events = self._decoder.decode_lines(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            events = []  # the line at fault is found below
        if len(events) == len(lines):
            return events, lines
        events, kept = [], []
        for line in lines:
            try:
                events.append(self._decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._failed("segment_line")
            else:
                kept.append(line)
        return events, kept

    def _load_batch(self, segments: Sequence["_Segment"], *, afresh: bool = False) -> int:
        """Load each day of the batch in its own transaction, then count and unlink the segments. `afresh`: for the
        second time, because a day was set aside."""
        for day in sorted({day for segment in segments for day, _ in segment.groups}):
            path = self._evidence_dir / f"{_EPOCH + timedelta(days=day)}.duckdb"
            try:
                self._load_day(path, day, [segment for segment in segments if segment.touches(day)])
            except duckdb.Error as exc:
                self.close()  # rolls back, and a fatal error would have spoilt the whole database
                return self._survive(exc, path, segments, afresh)
        rows = 0
        for segment in segments:
            # A segment that an earlier process committed was for its registry to count.
            if segment.path.name in self._committed:
                self._registry.observe_all(segment.events)
                rows += len(segment.events)
                self._committed.discard(segment.path.name)
            segment.path.unlink(missing_ok=True)
        self._registry.add("evidence_rows_total", rows)
        return rows

    def _load_day(self, path: Path, day: float, segments: Sequence["_Segment"]) -> None:
        """One transaction: rows and names of the segments that the file does not name yet. Raises duckdb.Error."""
        database = self._database = self._database or _open_memory()
        if path.exists():
            database.execute(f"ATTACH {quoted(path)} AS day")
        else:
            database.execute(f"ATTACH {quoted(path)} AS day (STORAGE_VERSION '{STORAGE_VERSION}')")
            self._ready_days.discard(day)
        database.begin()
        if day not in self._ready_days:
            _prepare_tables(database, path.stem, self._clock())
        names = [segment.path.name for segment in segments]
        known = database.execute(
            "SELECT name FROM day.segments WHERE list_contains(?, name)", [names]
        ).fetchall()
        new = [segment for segment in segments if (segment.path.name,) not in known]
        _insert(database, day, new, self._clock())
        database.commit()
        self._ready_days.add(day)
        self._committed.update(segment.path.name for segment in new)
        database.execute("DETACH day")

    def _survive(self, exc: duckdb.Error, path: Path, segments: Sequence["_Segment"], afresh: bool) -> int:
        """Decide what a failure means. Nothing is lost: the segments stay, or are set aside."""
        message = str(exc)
        if in_use(exc):
            self.behind = True  # somebody reads the day file: normal
        elif any(sign in message for sign in _SIGNS_OF_CORRUPTION):
            self._set_day_aside(path)
            if not afresh:
                return self._load_batch(segments, afresh=True)
            self.behind = True
        elif not isinstance(exc, duckdb.DataError):
            # Full disk, memory limit, a file of a newer version: not the segment's fault, so it is tried again.
            self._failed("evidence_file")
            self.behind = True
        elif len(segments) > 1:
            return sum(self._load_batch([segment]) for segment in segments)
        else:
            self._failed("segment")
            segments[0].path.rename(segments[0].path.with_suffix(".bad"))
        return 0

    def _set_day_aside(self, path: Path) -> None:
        self._failed("evidence_corrupt")
        for n in itertools.count(1):
            aside = path.with_name(f"{path.name}.corrupt-{n}")
            if not aside.exists():
                break
        path.rename(aside)
        log = path.with_name(path.name + ".wal")
        if log.exists():
            log.rename(aside.with_name(aside.name + ".wal"))

    def _remove_old_days(self) -> None:
        """Unlink what belongs to days that retention has passed; looked at once a day."""
        today = datetime.fromtimestamp(self._clock(), UTC).date()
        if today == self._swept:
            return
        self._swept = today
        for path in self._evidence_dir.glob("????-??-??.duckdb*"):
            try:
                day = date.fromisoformat(path.name[:10])
            except ValueError:
                continue  # not one of ours
            if (today - day).days > self._retention_days:
                path.unlink(missing_ok=True)

    def _failed(self, where: str, times: int = 1) -> None:
        self._registry.add("observer_failures_total", times, where)


def in_use(exc: duckdb.Error) -> bool:
    """Somebody else has the file open: normal, and over soon."""
    return isinstance(exc, duckdb.ResourceInUseException) or "Could not set lock" in str(exc)


def quoted(path: Path) -> str:
    """A path as an SQL string, because ATTACH takes no parameters."""
    return "'" + str(path).replace("'", "''") + "'"


_SIGNS_OF_CORRUPTION: Final = (
    "Corrupt database file",
    "not a valid DuckDB database file",
    "Could not read enough bytes",
)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    size: int
    sealed_s: float


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment in memory: its events, and its lines by day (since 1970) and event type."""

    path: Path
    events: list[AnyEvent]
    groups: Mapping[tuple[float, type[Event]], list[bytes]]

    def touches(self, day: float) -> bool:
        return any(of_day == day for of_day, _ in self.groups)


def _group(
    events: Iterable[AnyEvent], lines: Iterable[bytes]
) -> Mapping[tuple[float, type[Event]], list[bytes]]:
    groups: defaultdict[tuple[float, type[Event]], list[bytes]] = defaultdict(list)
    for event, line in zip(events, lines, strict=True):
        groups[event.at_s // _DAY_S, type(event)].append(line)
    return groups


def _in_calendar(key: tuple[float, type[Event]]) -> bool:
    return 0 <= key[0] < _DAYS_MAX


def _batches(sealed: Sequence[_File]) -> Iterator[list[_File]]:
    batch: list[_File] = []
    size = 0
    for file in sealed:
        if batch and size + file.size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(file)
        size += file.size
    if batch:
        yield batch


def _open_memory() -> duckdb.DuckDBPyConnection:
    """The database that day files are attached to; kept, because making it costs 18 ms and attaching 1 ms."""
    return duckdb.connect(
        ":memory:",
        # One thread: more cost CPU and save only time, which nobody waits for. The observer must not outgrow a sidecar.
        config={"threads": 1, "memory_limit": "256MB", "autoinstall_known_extensions": False},
    )


def _prepare_tables(database: duckdb.DuckDBPyConnection, day: str, now_s: float) -> None:
    """Bring the file to this schema: make what it lacks, and say in it what everything means.

    A file of a newer schema is written to as it is: schemas only grow.
    """
    there = set(
        database.execute(
            "SELECT table_name, column_name FROM duckdb_columns() WHERE database_name = 'day'"
        ).fetchall()
    )
    for table, columns in ALL_TABLES.items():
        declared = ", ".join(f'"{name}" {sql_type}' for name, sql_type in columns)
        database.execute(f"CREATE TABLE IF NOT EXISTS day.{table} ({declared})")
        for name, sql_type in columns:
            if there and (table, name) not in there:
                default = DEFAULTS.get(table, {}).get(name, "NULL")
                database.execute(
                    f'ALTER TABLE day.{table} ADD COLUMN IF NOT EXISTS "{name}" {sql_type} DEFAULT {default}'
                )
    (written_by,) = database.execute(f"SELECT max(schema_version) FROM day.{META}").fetchall()[0]
    if written_by is None or written_by < SCHEMA_VERSION:
        database.execute(schema.comment_statements("day."))
        database.execute(views.view_statements("day."))
        database.execute(views.comment_statements("day.", _view_columns(database)))
        database.execute(f"INSERT INTO day.{META} VALUES (?, ?, ?)", [day, SCHEMA_VERSION, now_s])


def _view_columns(database: duckdb.DuckDBPyConnection) -> list[tuple[str, str]]:
    return database.execute(
        "SELECT table_name, column_name FROM duckdb_columns() "
        "WHERE database_name = 'day' AND list_contains(?, table_name)",
        [list(views.VIEWS)],
    ).fetchall()


def _insert(
    database: duckdb.DuckDBPyConnection, day: float, segments: Sequence[_Segment], loaded_s: float
) -> None:
    by_type: dict[type[Event], list[bytes]] = {}
    for segment in segments:
        rows = 0
        for (of_day, event_type), lines in segment.groups.items():
            if of_day == day:
                by_type.setdefault(event_type, []).extend(lines)
                rows += len(lines)
        database.execute("INSERT INTO day.segments VALUES (?, ?, ?)", [segment.path.name, rows, loaded_s])
    for event_type, lines in by_type.items():
        # What our decoder skips without looking (fields of a newer version) need not be UTF-8.
        database.execute(_INSERTS[event_type], [b"\n".join(lines).decode(errors="replace")])


def _insert_statement(table: str) -> str:
    shape = msgspec.json.encode(dict(TABLES[table])).decode()
    # A line of an older version lacks fields: its row says what the field's default says, never NULL.
    filled = ", ".join(
        f'coalesce("{name}", {default}) AS "{name}"' for name, default in DEFAULTS[table].items()
    )
    return (
        f"INSERT INTO day.{table} BY NAME SELECT *{f' REPLACE ({filled})' if filled else ''} "
        f"FROM (SELECT unnest(from_json(line, '{shape}'), max_depth := 2) "
        "FROM (SELECT unnest(string_split(?, chr(10))) AS line))"
    )


_INSERTS: Final = {event_type: _insert_statement(table_of(event_type)) for event_type in EVENT_TYPES}


@contextmanager
def _only_one(lock: Path) -> Iterator[bool]:
    """Hold a lock file, or give False at once if another process has it. The kernel frees it at our death."""
    with lock.open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
