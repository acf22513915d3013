"""The dispatch ledger on disk: SQLite in WAL mode, one writer thread, group commit.

The loop thread only puts rows into memory; the writer thread alone touches SQLite. Claims that wait when the writer
is free become one transaction, and so do, `write_behind_s` after the first of them, the latest values of the rows
that changed. So 64 claims cost one or two fsyncs, and an exchange that ends soon costs one INSERT.

Who owns a row is settled in the database, never in memory: each later write is a compare-and-swap on the
instance and on the stored state. An instance that slept through its lease and finds its rows abandoned loses
the swap, and that is counted.

A failing disk fails the claims that wait and delays the rest: rows stay in memory, bounded, and are retried.
"""

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from turngate.proxy.ledger_store import (
    UNCHOSEN,
    Answer,
    Change,
    Choice,
    LedgerDown,
    Question,
    Store,
    Written,
    already_known,
    down,
    may_pass,
)
from turngate.telemetry.events import AnyEvent, FailureCounted
from turngate.validators.ledger import (
    REACHABLE,
    Dispatch,
    End,
    IllegalMove,
    LateEvent,
    Refusal,
    State,
    moved,
)

__all__ = ["ClaimConflict", "Ledger", "LedgerDown"]

KEPT_ROWS_MAX: Final = 10_000
"""Rows kept while the disk is away: about 6 MB. Between two looks at it there may be twice as many."""

BATCH_ROWS_MAX: Final = 1_000
"""Rows of one transaction: about 10 ms, which a claim may have to wait after an outage."""

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
CLOSE_TRIES: Final = 4
"""Failed tries in a row after which closing gives up: about 1.5 s with the lock waits."""


class ClaimConflict(Exception):
    """The claim was not granted and nothing is stored; `refusal` says why, and what stands there."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class _Claim:
    dispatch: Dispatch
    done: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Asked:
    question: Question | Choice
    done: asyncio.Future[int]


_Order = _Claim | _Asked


@dataclass(slots=True)
class _Row(Change):
    """A change that waits to be written, and who waits for it."""

    done: asyncio.Future[Dispatch] | None = None


@dataclass(slots=True)
class _Batch:
    """What one transaction writes."""

    orders: list[_Order] = field(default_factory=list)
    rows: dict[str, _Row] = field(default_factory=dict)
    late: list[LateEvent] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.orders or self.rows or self.late)


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
        unknown_ttl_s: float = 600.0,
        retention_s: float = 7 * 86_400.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.commits = 0
        """Transactions with claims or rows that reached the disk."""
        self._path = path
        self._emit = emit
        self._loop = loop
        self._clock = clock
        self._write_behind_s = write_behind_s
        self._store = Store(
            path,
            instance,
            lease_s=lease_s,
            unknown_ttl_s=unknown_ttl_s,
            retention_s=retention_s,
            started_s=clock(),
        )
        self._thread: threading.Thread | None = None
        # Shared by both threads, under the lock.
        self._lock = threading.Lock()
        self._orders: list[_Order] = []
        self._dirty: dict[str, _Row] = {}
        self._late: list[LateEvent] = []
        self._timed = False
        self._rows_due = False
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
            f"<Ledger {self._path} {'running' if self._running else 'down'} orders={len(self._orders)} "
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
        when it is durable, before the future resolves. In a conversation of explicit identity the swap is on its
        revision and cancel generation (`may_claim`).
        """
        if d.state is not State.DISPATCHING:
            raise IllegalMove(d.state, State.DISPATCHING)
        done: asyncio.Future[None] = self._loop.create_future()
        with self._lock:
            if d.operation in self._dirty:
                done.set_exception(
                    ClaimConflict(already_known(d.operation, self._dirty[d.operation].dispatch.state))
                )
            else:
                self._order(_Claim(d, done))
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
        answered_model: str = "",
        end: End = "",
        canonical: bool = False,
    ) -> Dispatch:
        """The dispatch after one move, written behind. An illegal move is counted and returns `d` itself."""
        try:
            after = moved(
                d,
                to,
                now_s=self._clock(),
                how=how,
                handle=handle,
                answered_model=answered_model,
                end=end,
                canonical=canonical,
            )
        except IllegalMove as exc:
            self._count("ledger.move", str(exc))
            return d
        self._put(d.state, after)
        return after

    def commit(
        self, d: Dispatch, *, handle: str = "", answered_model: str = "", end: End = "complete"
    ) -> asyncio.Future[Dispatch]:
        """Move to COMMITTED as the canonical turn; done when that is fsynced, with the dispatch as it stands then.

        Release what is held only if that one `may_release`. It is not canonical where its revision has another turn
        already, and not even COMMITTED where the attempt was taken from us and abandoned. Raises IllegalMove. The
        future fails with LedgerDown; the move itself stays in memory and is retried.
        """
        after = moved(
            d,
            State.COMMITTED,
            now_s=self._clock(),
            handle=handle,
            answered_model=answered_model,
            end=end,
            canonical=True,
        )
        done: asyncio.Future[Dispatch] = self._loop.create_future()
        self._put(d.state, after, done)
        return done

    def cancel(self, conversation: str) -> asyncio.Future[int]:
        """Raise the conversation's cancel generation; done when that is fsynced, with the new one.

        Claims in it that were prepared under an older one fail from then on. Fails with LedgerDown.
        """
        return self._ask(Question(conversation, 1))

    def cancel_generation(self, conversation: str) -> asyncio.Future[int]:
        """The conversation's cancel generation, for requests that are being prepared. Fails with LedgerDown."""
        return self._ask(Question(conversation, 0))

    def choose(self, operation: str) -> asyncio.Future[int]:
        """Make a committed dispatch the turn of its revision, because the app goes on with it; others are `unchosen`.

        Only in a conversation of derived identity. Done with 1 when that is fsynced, with 0 where there is nothing of
        the kind. Fails with LedgerDown.
        """
        return self._ask(Choice(operation))

    def quarantine(self, late: LateEvent) -> None:
        """Keep something that came after its attempt's end, apart from what counts; written behind."""
        with self._lock:
            kept = self._running and len(self._late) < KEPT_ROWS_MAX
            if kept:
                self._late.append(late)
                self._time_rows()
        if not kept:
            self._count("ledger.dropped", f"a late {late.event} of {late.operation}")

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

    def _ask(self, question: Question | Choice) -> asyncio.Future[int]:
        done: asyncio.Future[int] = self._loop.create_future()
        with self._lock:
            self._order(_Asked(question, done))
        return done

    def _order(self, order: _Order) -> None:
        """Have the writer do it, or say that there is none. Needs the lock."""
        if self._running:
            self._orders.append(order)
            self._ring()
        else:
            order.done.set_exception(LedgerDown(f"{self._path} is not open"))

    def _put(self, before: str, d: Dispatch, done: asyncio.Future[Dispatch] | None = None) -> None:
        dropped: list[_Row] = []
        told: _Row | None = None
        with self._lock:
            running = self._running
            if running:
                row = self._dirty.get(d.operation)
                if row is None:
                    self._dirty[d.operation] = _Row(d, before, (), done)
                elif row.dispatch.state is State.UNKNOWN:
                    # Told by itself though the file never held it: how long it lasted and how it ended are metrics.
                    told, self._dirty[d.operation] = row, _Row(d, before, (), done)
                else:
                    row.through += (row.dispatch.state,)
                    row.dispatch, row.done = d, done
                if done is not None:
                    self._rows_due = True
                    self._ring()
                else:
                    self._time_rows()
                if len(self._dirty) >= 2 * KEPT_ROWS_MAX:
                    dropped = self._trim()
        if told is not None:
            self._tell(told)
        if not running:
            self._count("ledger.write", f"{self._path} is not open: {d.operation} {d.state} is not recorded")
            self._tell(Change(d, before))
            if done is not None:
                done.set_exception(LedgerDown(f"{self._path} is not open"))
        self._drop(dropped)

    def _time_rows(self) -> None:
        """Rows wait for company, but not long. Needs the lock."""
        if not self._timed:
            self._timed = True
            self._loop.call_later(self._write_behind_s, self._ring_for_rows)

    def _ring_for_rows(self) -> None:
        with self._lock:
            self._timed = False
            self._rows_due = True
            # While the disk fails the writer's back-off sets the pace, not the traffic.
            if not self._failures:
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
            for row in rows:
                self._tell(row)
            self._answer([(row.done, LedgerDown(f"{self._path}: given up")) for row in rows])

    def _tell(self, row: Change) -> None:
        self._emit(row.event())

    def _count(self, where: str, error: str) -> None:
        self._emit(FailureCounted(at_s=self._clock(), where=where, error=error))

    # The writer thread's side.

    def _run(self, opened: ThreadFuture[None]) -> None:
        try:
            self._store.connect()
            self._store.write([], [], [], now_s=self._clock())
            self._keep_up()
        except Exception as exc:  # noqa: BLE001 - handed to the caller of open(), who waits for it
            self._store.disconnect()
            opened.set_exception(exc if isinstance(exc, LedgerDown) else down(self._path, exc))
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
            left = bool(self._orders or self._dirty or self._late)
            return self._closing and (not left or self._failures >= CLOSE_TRIES)

    def _pause_s(self) -> float:
        """How long the writer may sleep if nobody rings."""
        if self._failures:
            # The exponent is bounded too: an outage of an hour would otherwise overflow a float.
            return min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(self._failures - 1, 16))
        if self._upkeep_due or self._closing or self._rows_due:
            return 0.0
        return self._store.renewal_in_s(self._clock())

    def _turn(self) -> None:
        """Write what waits, then look after old rows. Whatever fails is counted; the thread goes on."""
        batches = self._take()
        try:
            if not batches:
                self._write(_Batch())  # the lease may be due
            while batches:
                self._write(batches[0])
                batches.pop(0)
            if self._upkeep_due:
                self._keep_up()
            self._failures = 0
        except Exception as exc:  # noqa: BLE001 - counted; a dead writer would take every claim with it
            self._failed(exc, batches)

    def _take(self) -> list[_Batch]:
        """What is to be written now: claims first and alone, unless what they find depends on the rows."""
        with self._lock:
            self._rung = False
            orders, self._orders = self._orders, []
            decisive = any(_decides(order) for order in orders)
            rest = _Batch()
            if self._rows_due or self._closing or decisive:
                rest = self._take_rows(orders if decisive else [])
        if decisive:
            return [_Batch(orders, rest.rows, rest.late)]
        return [batch for batch in (_Batch(orders), rest) if batch]

    def _take_rows(self, before_claims: list[_Order]) -> _Batch:
        """A batch of rows, without those whose own claim is still to be written. Needs the lock."""
        claimed = {order.dispatch.operation for order in before_claims if isinstance(order, _Claim)}
        rows = dict(islice(self._dirty.items(), BATCH_ROWS_MAX))
        left = dict(islice(self._dirty.items(), BATCH_ROWS_MAX, None))
        for operation in claimed & rows.keys():
            left[operation] = rows.pop(operation)
        self._dirty = left
        late, self._late = self._late, []
        self._rows_due = bool(left)
        return _Batch(rows=rows, late=late)

    def _write(self, batch: _Batch) -> None:
        now_s = self._clock()
        renewal_due = self._store.renewal_in_s(now_s) <= 0.0
        if not (batch or renewal_due):
            return
        self._store.connect()
        rows = [row.dispatch for row in batch.rows.values()]
        orders = [order.dispatch if isinstance(order, _Claim) else order.question for order in batch.orders]
        written = self._store.write(rows, orders, batch.late, now_s=now_s)
        self._upkeep_due = self._upkeep_due or renewal_due
        if batch:
            self.commits += 1
        # Told in the order in which the transaction did it.
        self._wrote(batch.rows, written)
        for row in written.ended:
            self._tell(row)
        self._answer_orders(batch.orders, written.answers)

    def _answer_orders(self, orders: list[_Order], answers: list[Answer]) -> None:
        """Tell what was granted, then those who wait for it."""
        outcomes: list[tuple[asyncio.Future[Any] | None, object]] = []
        for order, answer in zip(orders, answers, strict=True):
            if isinstance(answer, Refusal):
                outcomes.append((order.done, ClaimConflict(answer)))
                continue
            if isinstance(order, _Claim):
                self._tell(Change(order.dispatch, ""))
            outcomes.append((order.done, answer))
        self._answer(outcomes)

    def _wrote(self, rows: dict[str, _Row], written: Written) -> None:
        """Tell the moves that the file has taken; the others are counted, and kept apart."""
        late: list[LateEvent] = []
        for operation, row in rows.items():
            d = row.dispatch
            stored = written.lost.get(operation)
            if stored is not None:
                self._count("ledger.cas", f"{operation} stays {stored.state}, not {d.state}")
                late.append(LateEvent(operation=operation, at_s=d.changed_s, event=d.state, handle=d.handle))
                row.dispatch = stored
                continue
            if operation in written.unchosen:
                row.dispatch = msgspec.structs.replace(d, canonical=False, how=UNCHOSEN)
                if d.strength == "explicit":
                    self._count("ledger.canonical", f"{operation}: turn {d.revision} is another one's")
            if self._store.revived(operation):
                row.before = State.UNKNOWN
                row.through = tuple(each for each in row.through if each in REACHABLE[State.UNKNOWN])
            if row.before != d.state:
                self._tell(row)
        if late:
            with self._lock:
                self._late += late
                self._rows_due = True
        self._answer([(row.done, row.dispatch) for row in rows.values()])

    def _keep_up(self) -> None:
        self._store.connect()
        kept = self._store.keep_up(self._clock())
        self._upkeep_due = kept.more
        for row in kept.swept:
            self._tell(row)

    def _answer(self, outcomes: Iterable[tuple[asyncio.Future[Any] | None, object]]) -> None:
        waiting = [(done, outcome) for done, outcome in outcomes if done is not None]
        if waiting:
            # A closed loop has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_settle, waiting)

    def _failed(self, exc: Exception, batches: list[_Batch]) -> None:
        """Count it, tell those who wait, and put the rows back: all of them, or all but those that cannot be stored."""
        self._failures += 1
        self._store.disconnect()
        self._count("ledger.write", f"{type(exc).__name__}: {exc}")
        self._answer([(order.done, down(self._path, exc)) for batch in batches for order in batch.orders])
        if batches and not may_pass(exc):
            # The same rows would fail the same way for ever and hold up all others.
            self._write_singly(batches.pop(0))
        for batch in batches:
            self._answer([(row.done, down(self._path, exc)) for row in batch.rows.values()])
            self._keep(batch)

    def _write_singly(self, batch: _Batch) -> None:
        if batch.late:
            self._count("ledger.dropped", f"{len(batch.late)} late events")
        for operation, row in batch.rows.items():
            try:
                self._store.connect()
                self._wrote({operation: row}, self._store.write([row.dispatch], [], [], now_s=self._clock()))
            except Exception as exc:  # noqa: BLE001 - told by what becomes of the row
                self._store.disconnect()
                if may_pass(exc):
                    self._keep(_Batch(rows={operation: row}))
                else:
                    self._drop([row])

    def _keep(self, batch: _Batch) -> None:
        """Put back what could not be written; what changed meanwhile is newer and stands."""
        told: list[_Row] = []
        with self._lock:
            for operation, newer in self._dirty.items():
                older = batch.rows.get(operation)
                if older is None:
                    continue
                if older.dispatch.state is State.UNKNOWN:
                    told.append(older)  # by itself, as in `_put`
                else:
                    newer.through = (*older.through, older.dispatch.state, *newer.through)
                    newer.before = older.before
            self._dirty = batch.rows | self._dirty
            self._late = batch.late + self._late
            self._rows_due = True
            dropped = self._trim()
        for row in told:
            self._tell(row)
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
            orders, self._orders = self._orders, []
            rows, self._dirty = self._dirty, {}
            late, self._late = self._late, []
        self._store.disconnect()
        self._answer([(order.done, LedgerDown(f"{self._path} was closed")) for order in orders])
        self._drop(rows.values())
        if late:
            self._count("ledger.dropped", f"{len(late)} late events")


def _settle(outcomes: list[tuple[asyncio.Future[Any], object]]) -> None:
    """Tell those who wait; runs in the loop thread, once per commit."""
    for done, outcome in outcomes:
        if done.done():
            continue  # the exchange stopped waiting; what is stored is told all the same
        if isinstance(outcome, Exception):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)


def _decides(order: _Order) -> bool:
    """Does its answer hang on what else is in the file?"""
    return isinstance(order, _Asked) or order.dispatch.strength == "explicit"
