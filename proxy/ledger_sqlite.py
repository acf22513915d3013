"""The dispatch ledger on disk: SQLite in WAL mode, one writer thread, group commit.

The loop thread only puts rows into memory; the writer thread alone touches SQLite. What waits when the writer
is free becomes one transaction: claims first (somebody waits for each), then the latest value of each row
that changed. So 64 claims cost one or two fsyncs, and an exchange that ends within `write_behind_s` costs
one INSERT.

Who owns a row is settled in the database, never in memory: each later write is a compare-and-swap on the
instance and on the stored state. An instance that slept through its lease and finds its rows abandoned loses
the swap, and that is counted.

A failing disk fails the claims that wait and delays the rest: rows stay in memory, bounded, and are retried.
"""

import asyncio
import contextlib
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from turngate.telemetry.events import AnyEvent, FailureCounted, StateChanged
from turngate.validators.ledger import (
    OPEN,
    REACHABLE,
    SWEPT_HOW,
    Dispatch,
    End,
    IllegalMove,
    State,
    moved,
    sweep,
)

SCHEMA_VERSION: Final = 1
DOCUMENT_VERSION: Final = 1

KEPT_ROWS_MAX: Final = 10_000
"""Rows kept while the disk is away: about 6 MB. Between two looks at it there may be twice as many."""

BATCH_ROWS_MAX: Final = 1_000
"""Rows of one transaction: about 10 ms, which a claim may have to wait after an outage."""

SWEEP_ROWS_MAX: Final = 200
EXPIRE_ROWS_MAX: Final = 500
"""Small, because a claim that arrives meanwhile waits for the transaction."""

BUSY_S: Final = 0.25
"""How long one transaction waits for another process's lock; commands hold it for a few ms."""

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
CLOSE_TRIES: Final = 4
"""Failed tries in a row after which closing gives up: about 1.5 s with the lock waits."""


class LedgerDown(Exception):
    """The ledger could not be read or written; the cause, if any, is SQLite's own error."""


class ClaimConflict(Exception):
    """The operation is already in the ledger: it was claimed or recorded before."""


@dataclass(frozen=True, slots=True)
class _Claim:
    dispatch: Dispatch
    done: asyncio.Future[None]


@dataclass(slots=True)
class _Row:
    """A dispatch that waits to be written, and the moves that are not told yet."""

    dispatch: Dispatch
    before: str
    through: tuple[str, ...] = ()


class Ledger:
    """Durable claims, written-behind records and moves, leases and sweeps of dispatches.

    Methods are for the loop thread. `clock` (wall-clock Unix seconds) and `emit` are called from both.
    """

    def __init__(
        self,
        path: Path,
        *,
        instance: str,
        emit: Callable[[AnyEvent], None],
        loop: asyncio.AbstractEventLoop,
        lease_s: float = 10.0,
        write_behind_s: float = 0.02,
        retention_s: float = 7 * 86_400.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.commits = 0
        """Transactions with claims or rows that reached the disk."""
        self._path = path
        self._emit = emit
        self._loop = loop
        self._clock = clock
        self._lease_s = lease_s
        self._write_behind_s = write_behind_s
        self._store = _Store(path, instance, lease_s=lease_s, retention_s=retention_s, started_s=clock())
        self._thread: threading.Thread | None = None
        # Shared by both threads, under the lock.
        self._lock = threading.Lock()
        self._claims: list[_Claim] = []
        self._dirty: dict[str, _Row] = {}
        self._rung = False
        self._running = False
        self._closing = False
        # A queue written in C as bell: ringing a condition variable costs more than twice as much.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        # The writer's own; the loop thread only looks at the number.
        self._failures = 0
        self._upkeep_due = True

    def __repr__(self) -> str:
        return (
            f"<Ledger {self._path} {'running' if self._running else 'down'} claims={len(self._claims)} "
            f"dirty={len(self._dirty)} commits={self.commits} failures={self._failures}>"
        )

    def open(self) -> None:
        """Create or check the file, take the lease, sweep once, start the writer. Blocks until that is done.

        Raises LedgerDown, also when the file is of a newer schema. It may then be called again, and through
        `asyncio.to_thread` once traffic runs: a locked file takes `BUSY_S` to say so.
        """
        opened: ThreadFuture[None] = ThreadFuture()
        self._closing = False
        # Daemon: a disk that hangs in fsync must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(opened,), name="ledger", daemon=True)
        self._thread.start()
        opened.result()

    def claim(self, d: Dispatch) -> asyncio.Future[None]:
        """Put a new dispatch on disk as DISPATCHING; done when it is fsynced.

        Give it as it shall stand there, DISPATCHING; any other state raises IllegalMove. The future fails
        with ClaimConflict, or with LedgerDown: then nothing is stored or retried, and `record` may still
        be called. A cancelled future does not undo the claim: move it to CANCELLED. StateChanged is emitted
        when it is durable, before the future resolves.
        """
        if d.state is not State.DISPATCHING:
            raise IllegalMove(d.state, State.DISPATCHING)
        done: asyncio.Future[None] = self._loop.create_future()
        with self._lock:
            if not self._running:
                done.set_exception(LedgerDown(f"{self._path} is not open"))
            elif d.operation in self._dirty:
                done.set_exception(ClaimConflict(f"{d.operation} is already recorded"))
            else:
                self._claims.append(_Claim(d, done))
                self._ring()
        return done

    def record(self, d: Dispatch) -> None:
        """Write a new dispatch behind, in whatever state it is; nobody waits."""
        self._put("", d)

    def move(
        self,
        d: Dispatch,
        to: State,
        *,
        how: str = "",
        handle: str = "",
        end: End = "",
        canonical: bool = False,
    ) -> Dispatch:
        """The dispatch after one move, written behind. An illegal move is counted and returns `d` itself."""
        try:
            after = moved(d, to, now_s=self._clock(), how=how, handle=handle, end=end, canonical=canonical)
        except IllegalMove as exc:
            self._count("ledger.move", str(exc))
            return d
        self._put(d.state, after)
        return after

    async def close(self) -> None:
        """Write what is left, end the lease unless rows are open, and end the thread. Safe to repeat."""
        thread = self._thread
        if thread is None:
            return
        with self._lock:
            self._closing = True
            self._ring()
        await asyncio.to_thread(thread.join)

    # The loop thread's side.

    def _put(self, before: str, d: Dispatch) -> None:
        dropped: list[_Row] = []
        with self._lock:
            running = self._running
            if running:
                if not self._dirty:
                    self._loop.call_later(self._write_behind_s, self._ring_for_rows)
                row = self._dirty.get(d.operation)
                if row is None:
                    self._dirty[d.operation] = _Row(d, before)
                else:
                    row.through += (row.dispatch.state,)
                    row.dispatch = d
                if len(self._dirty) >= 2 * KEPT_ROWS_MAX:
                    dropped = self._trim()
        if not running:
            self._count("ledger.write", f"{self._path} is not open: {d.operation} {d.state} is not recorded")
            self._tell(before, d)
        self._drop(dropped)

    def _ring_for_rows(self) -> None:
        # While the disk fails the writer's back-off sets the pace, not the traffic.
        if not self._failures:
            with self._lock:
                self._ring()

    def _ring(self) -> None:
        """Wake the writer, once until it looks. Needs the lock."""
        if not self._rung:
            self._rung = True
            self._bell.put(None)

    def _trim(self) -> list[_Row]:
        """Forget all but the newest operations; which. Needs the lock."""
        surplus = max(0, len(self._dirty) - KEPT_ROWS_MAX)
        forgotten = list(islice(self._dirty.values(), surplus))
        if surplus:
            self._dirty = dict(islice(self._dirty.items(), surplus, None))
        return forgotten

    def _drop(self, rows: Iterable[_Row]) -> None:
        """Count rows that will not be written; what happened is told all the same."""
        rows = list(rows)
        if rows:
            self._count("ledger.dropped", f"{len(rows)} rows")
            self._tell_rows(rows)

    def _tell_rows(self, rows: Iterable[_Row]) -> None:
        for row in rows:
            self._tell(row.before, row.dispatch, row.through)

    def _tell(self, before: str, d: Dispatch, through: tuple[str, ...] = ()) -> None:
        self._emit(
            StateChanged(
                at_s=d.changed_s,
                operation=d.operation,
                upstream=d.upstream,
                before=str(before),
                after=str(d.state),
                how=d.how,
                through=through,
            )
        )

    def _count(self, where: str, error: str) -> None:
        self._emit(FailureCounted(at_s=self._clock(), where=where, error=error))

    def _settle(self, outcomes: list[tuple[_Claim, Exception | None]]) -> None:
        """Tell the waiting claims; runs in the loop thread, once per commit."""
        for claim, failure in outcomes:
            if failure is None:
                self._tell("", claim.dispatch)
            if claim.done.done():
                continue  # the exchange stopped waiting; what is stored is told above all the same
            if failure is None:
                claim.done.set_result(None)
            else:
                claim.done.set_exception(failure)

    # The writer thread's side.

    def _run(self, opened: ThreadFuture[None]) -> None:
        try:
            self._store.connect()
            self._store.write([], [], now_s=self._clock())
            self._keep_up()
        except Exception as exc:  # noqa: BLE001 - handed to the caller of open(), who waits for it
            self._store.disconnect()
            opened.set_exception(exc if isinstance(exc, LedgerDown) else _down(self._path, exc))
            return
        with self._lock:
            self._running = True
        opened.set_result(None)
        try:
            while not self._finished():
                with contextlib.suppress(queue.Empty):  # nothing rang: a retry, the lease or a sweep is due
                    self._bell.get(timeout=self._pause_s())
                self._turn()
            self._end_lease()
        finally:
            self._stop()

    def _finished(self) -> bool:
        with self._lock:
            left = bool(self._claims or self._dirty)
            return self._closing and (not left or self._failures >= CLOSE_TRIES)

    def _pause_s(self) -> float:
        """How long the writer may sleep if nobody rings."""
        if self._failures:
            # The exponent is bounded too: an outage of an hour would otherwise overflow a float.
            return min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(self._failures - 1, 16))
        if self._upkeep_due or self._closing:
            return 0.0
        if self._dirty:  # more than one batch, or a ring that fell into a failed try
            return self._write_behind_s
        return self._store.renewal_in_s(self._clock())

    def _turn(self) -> None:
        """Write what waits, then look after old rows. Whatever fails is counted; the thread goes on."""
        claims, rows = self._take()
        try:
            self._write(claims, rows)
            claims, rows = [], {}
            if self._upkeep_due:
                self._keep_up()
            self._failures = 0
        except Exception as exc:  # noqa: BLE001 - counted below; a dead writer would take every claim with it
            self._failed(exc, claims)
            if _may_pass(exc):
                self._keep(rows)
            else:
                # The same rows would fail the same way for ever and hold up all others.
                self._drop(rows.values())

    def _take(self) -> tuple[list[_Claim], dict[str, _Row]]:
        with self._lock:
            self._rung = False
            claims, self._claims = self._claims, []
            if len(self._dirty) <= BATCH_ROWS_MAX:
                rows, self._dirty = self._dirty, {}
            else:
                rows = dict(islice(self._dirty.items(), BATCH_ROWS_MAX))
                self._dirty = dict(islice(self._dirty.items(), BATCH_ROWS_MAX, None))
        return claims, rows

    def _write(self, claims: list[_Claim], rows: dict[str, _Row]) -> None:
        now_s = self._clock()
        renewal_due = self._store.renewal_in_s(now_s) <= 0.0
        if not (claims or rows or renewal_due):
            return
        self._store.connect()
        written = self._store.write(
            [claim.dispatch for claim in claims], [row.dispatch for row in rows.values()], now_s=now_s
        )
        self._upkeep_due = self._upkeep_due or renewal_due
        if claims or rows:
            self.commits += 1
        conflicts = written.conflicts
        self._answer(
            [
                (claim, ClaimConflict(f"{claim.dispatch.operation} exists") if index in conflicts else None)
                for index, claim in enumerate(claims)
            ]
        )
        self._tell_rows(rows.values())
        for operation, stored, wanted in written.lost:
            self._count("ledger.cas", f"{operation} stays {stored}, not {wanted}")

    def _keep_up(self) -> None:
        self._store.connect()
        kept = self._store.keep_up(self._clock())
        self._upkeep_due = kept.more
        for before, after in kept.swept:
            self._tell(before, after)

    def _answer(self, outcomes: list[tuple[_Claim, Exception | None]]) -> None:
        if outcomes:
            # A closed loop has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._settle, outcomes)

    def _failed(self, exc: Exception, claims: list[_Claim]) -> None:
        self._failures += 1
        self._store.disconnect()
        self._count("ledger.write", f"{type(exc).__name__}: {exc}")
        self._answer([(claim, _down(self._path, exc)) for claim in claims])

    def _keep(self, rows: dict[str, _Row]) -> None:
        """Put rows back that could not be written; what changed meanwhile is newer and stands."""
        with self._lock:
            for operation, newer in self._dirty.items():
                older = rows.get(operation)
                if older is not None:
                    newer.before, newer.through = (
                        older.before,
                        (*older.through, older.dispatch.state, *newer.through),
                    )
            self._dirty = rows | self._dirty
            dropped = self._trim()
        self._drop(dropped)

    def _end_lease(self) -> None:
        try:
            self._store.connect()
            self._store.end_lease(self._clock())
        except (LedgerDown, OSError, sqlite3.Error) as exc:
            self._failed(exc, [])  # the lease then runs out by itself

    def _stop(self) -> None:
        """The last act of the thread, also if it ends by a mistake: nobody may go on waiting for it."""
        with self._lock:
            self._running = False
            claims, self._claims = self._claims, []
            left, self._dirty = self._dirty, {}
        self._store.disconnect()
        self._answer([(claim, LedgerDown(f"{self._path} was closed")) for claim in claims])
        self._drop(left.values())


def read_dispatches(path: Path) -> list[Dispatch]:
    """All dispatches in the order they were first stored; also beside a running proxy. Raises LedgerDown."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=BUSY_S)
        ) as db:
            _check_version(path, db)
            rows = db.execute(f"SELECT {_COLUMNS} FROM dispatches ORDER BY rowid").fetchall()
    except sqlite3.Error as exc:
        raise _down(path, exc) from exc
    return [_dispatch(row) for row in rows]


# A row is (Dispatch fields..., document version). The state names below are ours and hold no quotes.


def _listed(states: Iterable[State]) -> str:
    return ", ".join(f"'{state}'" for state in sorted(states))


_FIELDS: Final = Dispatch.__struct_fields__
_COLUMNS: Final = ", ".join(_FIELDS)
_UNSETTLED: Final = _listed(OPEN | {State.UNKNOWN})

_SCHEMA: Final = (
    """CREATE TABLE dispatches (
        operation TEXT PRIMARY KEY, upstream TEXT NOT NULL, api TEXT NOT NULL, model TEXT NOT NULL,
        request_digest TEXT NOT NULL, instance TEXT NOT NULL, attempt_generation INTEGER NOT NULL,
        cancel_generation INTEGER NOT NULL, settle_s REAL NOT NULL, state TEXT NOT NULL, how TEXT NOT NULL,
        handle TEXT NOT NULL, end TEXT NOT NULL, canonical INTEGER NOT NULL, opened_s REAL NOT NULL,
        changed_s REAL NOT NULL, unknown_since_s REAL NOT NULL, document_version INTEGER NOT NULL)""",
    # The sweep looks at these alone; a finished row is not in it, so in observe it costs nothing.
    f"CREATE INDEX unsettled ON dispatches (operation) WHERE state IN ({_UNSETTLED})",
    """CREATE TABLE instances (
        instance TEXT PRIMARY KEY, pid INTEGER NOT NULL, started_s REAL NOT NULL,
        lease_until_s REAL NOT NULL)""",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

_INSERT: Final = (
    f"INSERT INTO dispatches ({_COLUMNS}, document_version) VALUES ({', '.join('?' * (len(_FIELDS) + 1))})"
)
_CLAIM: Final = f"{_INSERT} ON CONFLICT (operation) DO NOTHING"

_PRIOR: Final[Mapping[State, str]] = {
    after: ",".join(["", *(before for before in State if after in REACHABLE[before]), ""]) for after in State
}
"""State -> the stored states it may replace, as `,A,B,`: cheaper to search than an IN list."""

_UPSERT: Final = (
    f"{_INSERT} ON CONFLICT (operation) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in ("state", "how", "handle", "end", "canonical"))
    + ", changed_s = excluded.changed_s, unknown_since_s = excluded.unknown_since_s"
    " WHERE dispatches.instance = excluded.instance AND instr(?, ',' || dispatches.state || ',') > 0"
)

_RENEW: Final = (
    "INSERT INTO instances (instance, pid, started_s, lease_until_s) VALUES (?, ?, ?, ?)"
    " ON CONFLICT (instance) DO UPDATE SET lease_until_s = excluded.lease_until_s"
)

# Our own open rows are never swept by us: we are alive. Rows of an instance nobody knows have no lease.
_SWEEPABLE: Final = f"""SELECT {", ".join(f"d.{name}" for name in _FIELDS)}, coalesce(i.lease_until_s, 0.0)
    FROM dispatches d INDEXED BY unsettled LEFT JOIN instances i ON i.instance = d.instance
    WHERE d.state IN ({_UNSETTLED}) AND d.operation > :after
    AND CASE WHEN d.instance = :instance THEN d.state = 'UNKNOWN'
        ELSE coalesce(i.lease_until_s, 0.0) <= :now_s END
    ORDER BY d.operation LIMIT {SWEEP_ROWS_MAX}"""

_SWEEP: Final = (
    "UPDATE dispatches SET state = ?, how = ?, changed_s = ?, unknown_since_s = ?"
    " WHERE operation = ? AND instance = ? AND state = ?"
)

# Row ids grow with age, so the oldest need no index of their own. A PREPARED row that old was never sent.
_EXPIRE: Final = f"""DELETE FROM dispatches WHERE rowid IN
    (SELECT rowid FROM dispatches ORDER BY rowid LIMIT {EXPIRE_ROWS_MAX})
    AND state NOT IN ({_UNSETTLED}) AND changed_s < ?"""

_END_LEASE: Final = f"""UPDATE instances SET lease_until_s = ? WHERE instance = ? AND NOT EXISTS
    (SELECT 1 FROM dispatches WHERE instance = ? AND state IN ({_listed(OPEN)}))"""


def _row(d: Dispatch) -> tuple[str | int | float, ...]:
    # Written out: plain str and int spare sqlite3 the search for an adapter of each enum and bool.
    return (
        d.operation,
        d.upstream,
        d.api,
        d.model,
        d.request_digest,
        d.instance,
        d.attempt_generation,
        d.cancel_generation,
        d.settle_s,
        d.state.value,
        d.how,
        d.handle,
        d.end,
        1 if d.canonical else 0,
        d.opened_s,
        d.changed_s,
        d.unknown_since_s,
        DOCUMENT_VERSION,
    )


def _dispatch(values: Iterable[object]) -> Dispatch:
    # Not strict: SQLite has no booleans.
    return msgspec.convert(dict(zip(_FIELDS, values, strict=True)), Dispatch, strict=False)


def _down(path: Path, cause: Exception) -> LedgerDown:
    down = LedgerDown(f"ledger {path}: {cause}")
    down.__cause__ = cause
    return down


def _may_pass(exc: Exception) -> bool:
    """Can a later try succeed (disk, file, lock)? Else a value or our code is wrong."""
    # A damaged file is a plain DatabaseError; the subclasses other than OperationalError blame the statement.
    return (
        isinstance(exc, LedgerDown | OSError | sqlite3.OperationalError) or type(exc) is sqlite3.DatabaseError
    )


def _check_version(path: Path, db: sqlite3.Connection) -> int:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise LedgerDown(
            f"ledger {path} has schema {version}, this turngate knows up to {SCHEMA_VERSION}: "
            "upgrade turngate or give it another data_dir"
        )
    return int(version)


@dataclass(slots=True)
class _Written:
    """What one transaction could not do: indexes of claims, and (operation, stored state, wanted state)."""

    conflicts: set[int] = field(default_factory=set)
    lost: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What one sweep did: (state before, row after); `more` if a page was full."""

    swept: list[tuple[State, Dispatch]]
    more: bool


class _Store:
    """The SQL, for one thread. After any error call `disconnect`: that is also the rollback."""

    def __init__(
        self, path: Path, instance: str, *, lease_s: float, retention_s: float, started_s: float
    ) -> None:
        self._path = path
        self._instance = instance
        self._lease_s = lease_s
        self._retention_s = retention_s
        self._started_s = started_s
        self._db: sqlite3.Connection | None = None
        self._renewed_s = -lease_s
        self._swept_to = ""

    def connect(self) -> None:
        """Open the file, made 0600, and bring it to our schema; nothing if it is open.

        Raises LedgerDown, OSError, sqlite3.Error.
        """
        if self._db is not None:
            return
        if not self._path.exists():
            _create_private(self._path)
        self._db = db = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise LedgerDown(f"ledger {self._path}: no WAL on this file system (it says {mode!r})")
        db.execute("PRAGMA synchronous = FULL")
        if _check_version(self._path, db) == 0:
            db.execute("BEGIN IMMEDIATE")
            if _check_version(self._path, db) == 0:  # another process may have been first
                for statement in _SCHEMA:
                    db.execute(statement)
            db.execute("COMMIT")

    def disconnect(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            # Closing a broken file may fail too; the error that led here is the one that is reported.
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def renewal_in_s(self, now_s: float) -> float:
        """Seconds until the lease should be renewed; 0 when due, or when the clock jumped back."""
        age_s = now_s - self._renewed_s
        return max(0.0, self._lease_s / 3 - age_s) if age_s >= 0.0 else 0.0

    def write(self, claims: list[Dispatch], rows: Iterable[Dispatch], *, now_s: float) -> _Written:
        """Commit claims, rows and, when due, the lease, as one transaction, on disk when this returns."""
        db = self._open_db()
        written = _Written()
        renew = self.renewal_in_s(now_s) <= 0.0
        db.execute("BEGIN IMMEDIATE")
        for index, d in enumerate(claims):
            if db.execute(_CLAIM, _row(d)).rowcount == 0:
                written.conflicts.add(index)
        changed = list(rows)
        if changed:
            done = db.executemany(_UPSERT, [(*_row(d), _PRIOR[d.state]) for d in changed]).rowcount
            if done < len(changed):
                written.lost = _lost(db, changed)
        if renew:
            db.execute(_RENEW, (self._instance, os.getpid(), self._started_s, now_s + self._lease_s))
        db.execute("COMMIT")
        if renew:
            self._renewed_s = now_s
        return written

    def keep_up(self, now_s: float) -> _Kept:
        """Sweep a page of rows that lost their owner or settled, drop a batch of those kept long enough."""
        db = self._open_db()
        # The write lock first: an instance that renews its lease after we read it would lose live rows.
        db.execute("BEGIN IMMEDIATE")
        page = db.execute(
            _SWEEPABLE, {"after": self._swept_to, "instance": self._instance, "now_s": now_s}
        ).fetchall()
        swept: list[tuple[State, Dispatch]] = []
        for *values, lease_until_s in page:
            d = _dispatch(values)
            to = sweep(d, lease_until_s=lease_until_s, now_s=now_s)
            if to is not None:
                swept.append((d.state, moved(d, to, now_s=now_s, how=SWEPT_HOW[to])))
        db.executemany(
            _SWEEP,
            [
                (a.state.value, a.how, a.changed_s, a.unknown_since_s, a.operation, a.instance, before.value)
                for before, a in swept
            ],
        )
        kept_from_s = now_s - self._retention_s
        expired = db.execute(_EXPIRE, (kept_from_s,)).rowcount
        db.execute("DELETE FROM instances WHERE lease_until_s < ?", (kept_from_s,))
        db.execute("COMMIT")
        page_full = len(page) == SWEEP_ROWS_MAX
        self._swept_to = page[-1][0] if page_full else ""
        return _Kept(swept, more=page_full or expired == EXPIRE_ROWS_MAX)

    def end_lease(self, now_s: float) -> None:
        """Let others take over at once what we leave, unless an attempt is still open under this lease."""
        self._open_db().execute(_END_LEASE, (now_s, self._instance, self._instance))

    def _open_db(self) -> sqlite3.Connection:
        assert self._db is not None, "connect() comes first"
        return self._db


def _create_private(path: Path) -> None:
    """Make the file for its owner only, its name durable. SQLite gives `-wal` and `-shm` the same mode."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lost(db: sqlite3.Connection, rows: list[Dispatch]) -> list[tuple[str, str, str]]:
    """Which rows the store did not let us change: swept, or another instance's."""
    lost: list[tuple[str, str, str]] = []
    for d in rows:
        query = "SELECT state, instance FROM dispatches WHERE operation = ?"
        stored, instance = db.execute(query, (d.operation,)).fetchone()
        # Our own row in that state: a write whose success was never told, or a sweep that said the same.
        if stored != d.state.value or instance != d.instance:
            lost.append((d.operation, stored, d.state.value))
    return lost
