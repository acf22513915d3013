"""The ledger on a real file: durability, groups, conflicts, leases, crashes, and a disk that fails."""

import asyncio
import contextlib
import os
import sqlite3
import stat
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from turngate.proxy import ledger_sqlite
from turngate.proxy.ledger_sqlite import ClaimConflict, Ledger, LedgerDown, read_dispatches
from turngate.telemetry.events import Event, FailureCounted, StateChanged
from turngate.validators.ledger import Dispatch, IllegalMove, State

LEASE_S = 1_000.0
"""So long that within a test only the injected clock, never the real one, makes a renewal due."""

NEVER_S = 1_000.0
"""A write-behind time that only a claim or the end cuts short."""


class Clock:
    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Diary:
    """Takes events from both threads, and wakes a test that waits for some of them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._loop.call_soon_threadsafe(self._changed.set)

    @property
    def moves(self) -> list[tuple[str, str, str, str]]:
        return [(e.operation, e.before, e.after, e.how) for e in self.events if isinstance(e, StateChanged)]

    def failures(self, where: str) -> list[str]:
        return [e.error for e in self.events if isinstance(e, FailureCounted) and e.where == where]

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not reached():
                self._changed.clear()
                if not reached():
                    await self._changed.wait()


class Bench:
    """One ledger file, any number of instances on it, one clock and one diary."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = Clock()
        self.diary = Diary()
        self.ledgers: list[Ledger] = []

    def ledger(
        self,
        instance: str = "a",
        *,
        write_behind_s: float = NEVER_S,
        opened: bool = True,
        clock: Clock | None = None,
    ) -> Ledger:
        """One more instance on the file. A clock of its own that nobody moves is how a test lets it sleep."""
        made = Ledger(
            self.path,
            instance=instance,
            lease_s=LEASE_S,
            write_behind_s=write_behind_s,
            clock=clock or self.clock,
            emit=self.diary,
            loop=asyncio.get_running_loop(),
        )
        self.ledgers.append(made)
        if opened:
            made.open()
        return made

    def row(
        self, operation: str, state: State = State.DISPATCHING, instance: str = "a", model: str = "gpt-5"
    ) -> Dispatch:
        return Dispatch(
            operation=operation,
            upstream="openai",
            api="openai_chat",
            model=model,
            request_digest="00ff",
            instance=instance,
            settle_s=5.0,
            state=state,
            opened_s=self.clock(),
            changed_s=self.clock(),
        )

    @property
    def states(self) -> dict[str, State]:
        return {d.operation: d.state for d in read_dispatches(self.path)}

    def sql(self, text: str) -> list[tuple[object, ...]]:
        with contextlib.closing(sqlite3.connect(self.path)) as db, db:
            return db.execute(text).fetchall()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            yield
            other.execute("ROLLBACK")


class Writes:
    """Watches the transactions of one ledger: states it upserts, how durable they are, when one is done."""

    def __init__(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[State] = []
        self.synchronous: set[int] = set()
        self.done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._store = ledger._store
        self._write = self._store.write
        monkeypatch.setattr(self._store, "write", self)

    def __call__(self, claims: list[Dispatch], rows: Iterable[Dispatch], *, now_s: float) -> object:
        rows = list(rows)
        assert self._store._db is not None
        self.synchronous.update(self._store._db.execute("PRAGMA synchronous").fetchone())
        written = self._write(claims, rows, now_s=now_s)
        self.states += [d.state for d in rows]
        self._loop.call_soon_threadsafe(self.done.set)
        return written


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "ledger.sqlite3")
    yield made
    for ledger in made.ledgers:
        await ledger.close()


async def test_a_claim_is_on_disk_when_its_future_resolves(bench: Bench) -> None:
    row = bench.row("op-1")
    await bench.ledger().claim(row)
    assert read_dispatches(bench.path) == [row]
    assert bench.sql("PRAGMA journal_mode") == [("wal",)]
    assert bench.diary.moves == [("op-1", "", "DISPATCHING", "")]


async def test_every_commit_is_synced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = bench.ledger()
    writes = Writes(ledger, monkeypatch)
    await ledger.claim(bench.row("op-1"))
    assert writes.synchronous == {2}  # SQLite's number for FULL


async def test_an_operation_is_claimed_once(bench: Bench) -> None:
    a, b = bench.ledger("a"), bench.ledger("b")
    first = bench.row("op-1")
    await a.claim(first)
    with pytest.raises(ClaimConflict):
        await a.claim(first)
    with pytest.raises(ClaimConflict):
        await b.claim(bench.row("op-1", instance="b"))
    assert read_dispatches(bench.path) == [first]


async def test_of_equal_claims_in_one_group_one_wins_and_the_others_of_the_group_do_too(bench: Bench) -> None:
    ledger = bench.ledger()
    claims = [ledger.claim(bench.row(operation)) for operation in ("op-1", "op-2", "op-1", "op-3")]
    results = await asyncio.gather(*claims, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), type(None), ClaimConflict, type(None)]
    assert set(bench.states) == {"op-1", "op-2", "op-3"}


async def test_what_is_recorded_already_cannot_be_claimed(bench: Bench) -> None:
    ledger = bench.ledger()
    ledger.record(bench.row("op-1", State.PREPARED))
    with pytest.raises(ClaimConflict):
        await ledger.claim(bench.row("op-1"))


async def test_only_a_dispatching_row_can_be_claimed(bench: Bench) -> None:
    with pytest.raises(IllegalMove):
        bench.ledger().claim(bench.row("op-1", State.PREPARED))


async def test_concurrent_claims_share_commits_and_are_answered_once_per_commit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = bench.ledger()
    answers: list[int] = []
    settle = ledger._settle

    def counted(outcomes: list[Any]) -> None:
        answers.append(len(outcomes))
        settle(outcomes)

    monkeypatch.setattr(ledger, "_settle", counted)
    await asyncio.gather(*(ledger.claim(bench.row(f"op-{n:02}")) for n in range(64)))
    assert len(bench.states) == 64
    assert ledger.commits <= 8
    assert (len(answers), sum(answers)) == (ledger.commits, 64)


async def test_an_exchange_that_ends_soon_costs_one_insert(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = bench.ledger()
    writes = Writes(ledger, monkeypatch)
    d = bench.row("op-1")
    ledger.record(d)
    d = ledger.move(d, State.SENT)
    d = ledger.move(d, State.STREAMING, handle="msg_1")
    d = ledger.move(d, State.COMMITTED, end="complete", canonical=True)
    await ledger.close()
    assert writes.states == [State.COMMITTED]
    assert ledger.commits == 1
    assert read_dispatches(bench.path) == [d]
    told = [event for event in bench.diary.events if isinstance(event, StateChanged)]
    assert [(event.before, event.through, event.after) for event in told] == [
        ("", ("DISPATCHING", "SENT", "STREAMING"), "COMMITTED")
    ]


async def test_a_claim_takes_along_what_is_dirty(bench: Bench) -> None:
    ledger = bench.ledger()
    ledger.record(bench.row("op-1", State.REJECTED))
    await ledger.claim(bench.row("op-2"))
    assert bench.states == {"op-1": State.REJECTED, "op-2": State.DISPATCHING}
    assert ledger.commits == 1


async def test_a_row_reaches_the_disk_without_anybody_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = bench.ledger(write_behind_s=0.001)
    writes = Writes(ledger, monkeypatch)
    ledger.record(bench.row("op-1"))
    await asyncio.wait_for(writes.done.wait(), 60)
    assert bench.states == {"op-1": State.DISPATCHING}


async def test_rows_beyond_one_batch_are_all_written(bench: Bench) -> None:
    ledger = bench.ledger()
    count = 2 * ledger_sqlite.BATCH_ROWS_MAX + 1
    for n in range(count):
        ledger.record(bench.row(f"op-{n}"))
    await ledger.close()
    assert len(bench.states) == count
    assert ledger.commits == 3


async def test_moves_that_could_not_be_written_are_told_once_with_those_that_follow(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = bench.ledger(write_behind_s=0.0)
    write, failures = ledger._store.write, iter([sqlite3.OperationalError("disk I/O error")])

    def failing_once(*args: Any, **kwargs: Any) -> Any:
        for failure in failures:
            raise failure
        return write(*args, **kwargs)

    monkeypatch.setattr(ledger._store, "write", failing_once)
    d = bench.row("op-1")
    ledger.record(d)
    await bench.diary.until(lambda: bool(bench.diary.failures("ledger.write")))
    ledger.move(ledger.move(d, State.SENT), State.STREAMING)
    await ledger.close()
    told = [event for event in bench.diary.events if isinstance(event, StateChanged)]
    states = [each for event in told for each in (*event.through, event.after)]
    assert states == ["DISPATCHING", "SENT", "STREAMING"]
    assert [event.before for event in told[1:]] == [event.after for event in told[:-1]]


async def test_moves_after_a_claim_are_stored(bench: Bench) -> None:
    ledger = bench.ledger()
    d = bench.row("op-1")
    await ledger.claim(d)
    d = ledger.move(d, State.REFUSED, how="provider_429")
    await ledger.close()
    assert read_dispatches(bench.path) == [d]
    assert bench.diary.failures("ledger.cas") == []


async def test_an_illegal_move_changes_nothing_and_is_counted(bench: Bench) -> None:
    ledger = bench.ledger()
    d = bench.row("op-1")
    await ledger.claim(d)
    assert ledger.move(d, State.COMMITTED, end="complete") is d
    await ledger.close()
    assert bench.states == {"op-1": State.DISPATCHING}
    assert bench.diary.failures("ledger.move") == [
        "DISPATCHING cannot become COMMITTED; legal: CANCELLED, REFUSED, SENT, STREAMING, UNKNOWN, UNSENT"
    ]


async def test_an_old_value_cannot_take_a_stored_row_back(bench: Bench) -> None:
    ledger = bench.ledger()
    old = bench.row("op-1")
    await ledger.claim(old)
    ledger.move(ledger.move(old, State.SENT), State.STREAMING)
    await ledger.claim(bench.row("op-2"))
    ledger.move(old, State.UNSENT)
    await ledger.close()
    assert bench.states["op-1"] is State.STREAMING
    assert bench.diary.failures("ledger.cas") == ["op-1 stays STREAMING, not UNSENT"]


async def test_a_row_of_another_instance_is_not_overwritten(bench: Bench) -> None:
    row = bench.row("op-1", instance="a")
    await bench.ledger("a").claim(row)
    other = bench.ledger("b")
    other.record(bench.row("op-1", State.SENT, instance="b"))
    await other.close()
    assert read_dispatches(bench.path) == [row]
    assert bench.diary.failures("ledger.cas") == ["op-1 stays DISPATCHING, not SENT"]


async def test_a_claim_nobody_waits_for_any_more_is_stored_and_told(bench: Bench) -> None:
    ledger = bench.ledger()
    given_up = ledger.claim(bench.row("op-1"))
    given_up.cancel()
    await ledger.claim(bench.row("op-2"))
    assert bench.states["op-1"] is State.DISPATCHING
    assert ("op-1", "", "DISPATCHING", "") in bench.diary.moves


async def test_the_file_is_private(bench: Bench) -> None:
    await bench.ledger().claim(bench.row("op-1"))
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in bench.path.parent.iterdir()}
    assert modes == {f"ledger.sqlite3{suffix}": 0o600 for suffix in ("", "-wal", "-shm")}


# Leases, sweeps, crashes.

CHILD = """
import asyncio, sys
from pathlib import Path
import msgspec
from turngate.proxy.ledger_sqlite import Ledger
from turngate.validators.ledger import Dispatch, State

async def main():
    ledger = Ledger(Path(sys.argv[1]), instance="dead", lease_s=10.0, clock=lambda: 1_000_000.0,
                    emit=lambda event: None, loop=asyncio.get_running_loop())
    ledger.open()
    rows = msgspec.json.decode(sys.argv[2], type=list[Dispatch])
    await asyncio.gather(*(ledger.claim(row) for row in rows))
    ledger.move(rows[0], State.REFUSED)
    await ledger.claim(msgspec.structs.replace(rows[0], operation="last"))
    print("claimed", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_claims_of_a_killed_process_become_unknown_after_its_lease_and_then_abandoned(
    bench: Bench,
) -> None:
    rows = [bench.row(operation, instance="dead") for operation in ("op-1", "op-2", "op-3")]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, bench.path, msgspec.json.encode(rows), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        assert await child.stdout.readline() == b"claimed\n"
    finally:
        child.kill()
        await child.wait()
    started_s = bench.clock()
    left = {
        "op-1": State.REFUSED,
        "op-2": State.DISPATCHING,
        "op-3": State.DISPATCHING,
        "last": State.DISPATCHING,
    }
    seen = []
    for instance, age_s in (("soon", 9.9), ("later", 10.0), ("settling", 14.9), ("settled", 15.0)):
        bench.clock.now_s = started_s + age_s
        await bench.ledger(instance).close()
        seen.append(bench.states)
    open_rows = {"op-2", "op-3", "last"}
    unknown = left | dict.fromkeys(open_rows, State.UNKNOWN)
    assert seen == [left, unknown, unknown, left | dict.fromkeys(open_rows, State.ABANDONED)]
    assert {move[1:] for move in bench.diary.moves} == {
        ("DISPATCHING", "UNKNOWN", "lease_ended"),
        ("UNKNOWN", "ABANDONED", "connection_end"),
    }


async def test_the_sweep_takes_page_after_page(bench: Bench) -> None:
    count = 2 * ledger_sqlite.SWEEP_ROWS_MAX + 7
    dead = bench.ledger("dead")
    await asyncio.gather(*(dead.claim(bench.row(f"op-{n:04}", instance="dead")) for n in range(count)))
    await dead.close()
    bench.clock.now_s += LEASE_S
    heir = bench.ledger("heir")
    await bench.diary.until(lambda: sum(after == "UNKNOWN" for _, _, after, _ in bench.diary.moves) == count)
    await heir.close()
    assert set(bench.states.values()) == {State.UNKNOWN}


async def test_rows_of_a_living_instance_are_left_alone(bench: Bench) -> None:
    alive = bench.ledger("alive", clock=Clock())
    d = bench.row("op-1", instance="alive")
    await alive.claim(d)
    alive.move(d, State.UNKNOWN, how="eof")
    await alive.claim(bench.row("op-2", instance="alive"))
    bench.clock.now_s += LEASE_S - 1.0
    await bench.ledger("other").close()
    assert bench.states == {"op-1": State.UNKNOWN, "op-2": State.DISPATCHING}


async def test_our_own_unknown_rows_settle_and_our_open_ones_stay(bench: Bench) -> None:
    ledger = bench.ledger()
    d = bench.row("op-1")
    await ledger.claim(d)
    await ledger.claim(bench.row("op-2"))
    ledger.move(d, State.UNKNOWN, how="eof")
    await ledger.claim(bench.row("op-3"))
    bench.clock.now_s += 10 * LEASE_S  # the sweep comes with the renewal, and the renewal with the next claim
    await ledger.claim(bench.row("op-4"))
    await bench.diary.until(lambda: ("op-1", "UNKNOWN", "ABANDONED", "connection_end") in bench.diary.moves)
    assert bench.states == {
        "op-1": State.ABANDONED,
        "op-2": State.DISPATCHING,
        "op-3": State.DISPATCHING,
        "op-4": State.DISPATCHING,
    }


async def test_an_instance_that_slept_through_its_lease_cannot_revive_what_was_abandoned(
    bench: Bench,
) -> None:
    sleeper = bench.ledger("sleeper", clock=Clock())
    d = bench.row("op-1", instance="sleeper")
    await sleeper.claim(d)
    for pause_s in (LEASE_S, 5.0):
        bench.clock.now_s += pause_s
        await bench.ledger(f"heir after {pause_s}").close()
    sleeper.move(d, State.SENT)
    await sleeper.close()
    assert bench.states == {"op-1": State.ABANDONED}
    assert bench.diary.failures("ledger.cas") == ["op-1 stays ABANDONED, not SENT"]


async def test_an_instance_that_slept_shortly_may_still_tell_how_it_ended(bench: Bench) -> None:
    sleeper = bench.ledger("sleeper", clock=Clock())
    d = bench.row("op-1", instance="sleeper")
    await sleeper.claim(d)
    bench.clock.now_s += LEASE_S
    await bench.ledger("heir").close()
    assert bench.states == {"op-1": State.UNKNOWN}
    d = sleeper.move(d, State.STREAMING)
    sleeper.move(d, State.COMMITTED, end="complete")
    await sleeper.close()
    assert bench.states == {"op-1": State.COMMITTED}
    assert bench.diary.failures("ledger.cas") == []


@pytest.mark.parametrize(
    "jump_s", [LEASE_S / 3, -500.0], ids=["a third of it passed", "the clock jumped back"]
)
async def test_a_claim_renews_a_lease_that_is_due(bench: Bench, jump_s: float) -> None:
    ledger = bench.ledger()
    bench.clock.now_s += jump_s
    await ledger.claim(bench.row("op-1"))
    assert bench.sql("SELECT lease_until_s FROM instances") == [(bench.clock() + LEASE_S,)]


@pytest.mark.parametrize(("last", "lease_left_s"), [(State.SENT, LEASE_S), (State.CANCELLED, 0.0)])
async def test_closing_ends_the_lease_unless_an_attempt_is_open(
    bench: Bench, last: State, lease_left_s: float
) -> None:
    ledger = bench.ledger()
    d = bench.row("op-1")
    await ledger.claim(d)
    ledger.move(d, last)
    await ledger.close()
    assert bench.sql("SELECT instance, pid, lease_until_s FROM instances") == [
        ("a", os.getpid(), bench.clock() + lease_left_s)
    ]


async def test_what_ended_long_ago_is_forgotten_and_what_is_open_is_kept(bench: Bench) -> None:
    first = bench.ledger("a")
    for n in range(ledger_sqlite.EXPIRE_ROWS_MAX + 100):
        first.record(bench.row(f"old-{n}", State.REJECTED))
    first.record(bench.row("open", instance="b"))
    await first.close()
    second = bench.ledger("b")
    bench.clock.now_s += 7 * 86_400.0
    second.record(bench.row("new", State.REJECTED, instance="b"))
    await second.close()
    assert len(bench.states) == ledger_sqlite.EXPIRE_ROWS_MAX + 102
    bench.clock.now_s += 1.0
    third = bench.ledger("c")
    # The second batch goes before or just after this claim; closing waits for the writer's turn to end.
    await third.claim(bench.row("claim", instance="c"))
    await third.close()
    assert bench.states == {"open": State.DISPATCHING, "new": State.REJECTED, "claim": State.DISPATCHING}
    assert [name for (name,) in bench.sql("SELECT instance FROM instances ORDER BY instance")] == ["b", "c"]


# A disk that fails.


async def test_a_locked_ledger_fails_claims_and_recovers_by_itself(bench: Bench) -> None:
    ledger = bench.ledger()
    with bench.locked():
        ledger.record(bench.row("op-1"))
        with pytest.raises(LedgerDown, match="locked") as caught:
            await ledger.claim(bench.row("op-2"))
        assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
    assert bench.diary.failures("ledger.write")
    await ledger.claim(bench.row("op-3"))
    assert bench.states == {"op-1": State.DISPATCHING, "op-3": State.DISPATCHING}


async def test_recording_resumes_by_itself(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = bench.ledger(write_behind_s=0.001)
    writes = Writes(ledger, monkeypatch)
    with bench.locked():
        ledger.record(bench.row("op-1"))
        await bench.diary.until(lambda: bool(bench.diary.failures("ledger.write")))
    await asyncio.wait_for(writes.done.wait(), 60)
    assert bench.states == {"op-1": State.DISPATCHING}


async def test_a_move_during_a_failed_write_is_the_one_that_is_stored(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = bench.ledger(write_behind_s=0.001)
    loop = asyncio.get_running_loop()
    taken, has_moved = asyncio.Event(), threading.Event()
    write = ledger._store.write

    def fail_once(claims: list[Dispatch], rows: Iterable[Dispatch], *, now_s: float) -> object:
        if has_moved.is_set():
            return write(claims, rows, now_s=now_s)
        loop.call_soon_threadsafe(taken.set)
        has_moved.wait(60)
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(ledger._store, "write", fail_once)
    d = bench.row("op-1")
    ledger.record(d)
    await asyncio.wait_for(taken.wait(), 60)
    ledger.move(d, State.SENT)
    has_moved.set()
    await ledger.close()
    assert bench.states == {"op-1": State.SENT}
    assert bench.diary.failures("ledger.write") == ["OperationalError: disk I/O error"]


@pytest.mark.parametrize(
    ("failures", "pause_s"), [(1, 0.05), (2, 0.1), (6, 1.6), (7, 2.0), (5_000, 2.0)], ids=str
)
async def test_the_pause_between_tries_grows_to_its_bound(
    bench: Bench, failures: int, pause_s: float
) -> None:
    ledger = bench.ledger(opened=False)
    ledger._failures = failures
    assert ledger._pause_s() == pytest.approx(pause_s)


async def test_a_full_disk_fails_claims_and_recording_resumes_when_there_is_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = bench.ledger()
    store = ledger._store
    pages_max = 1  # SQLite takes it as: no more than there are
    connect = store.connect

    def connect_bounded() -> None:
        connect()
        assert store._db is not None
        store._db.execute(f"PRAGMA max_page_count = {pages_max}")

    monkeypatch.setattr(store, "connect", connect_bounded)
    ledger.record(bench.row("op-1"))
    with pytest.raises(LedgerDown, match="full"):
        await ledger.claim(bench.row("op-2", model="x" * 20_000))
    with pytest.raises(LedgerDown, match="full"):
        await ledger.claim(bench.row("op-3", model="x" * 20_000))
    pages_max = 1_000_000
    await ledger.claim(bench.row("op-4", model="x" * 20_000))
    assert set(bench.states) == {"op-1", "op-4"}


async def test_while_the_disk_is_away_the_newest_operations_are_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_sqlite, "KEPT_ROWS_MAX", 10)
    ledger = bench.ledger()
    with bench.locked():
        for n in range(25):
            ledger.record(bench.row(f"op-{n:02}"))
        with pytest.raises(LedgerDown):
            await ledger.claim(bench.row("claim"))
    await ledger.close()
    assert list(bench.states) == [f"op-{n:02}" for n in range(15, 25)]
    assert bench.diary.failures("ledger.dropped") == ["10 rows", "5 rows"]


async def test_a_ledger_that_stays_locked_can_be_closed_and_says_what_is_lost(bench: Bench) -> None:
    ledger = bench.ledger()
    with bench.locked():
        ledger.record(bench.row("op-1"))
        await ledger.close()
    assert bench.states == {}
    assert bench.diary.failures("ledger.dropped") == ["1 rows"]


async def test_a_value_the_file_cannot_hold_is_given_up_and_does_not_block_the_rest(bench: Bench) -> None:
    ledger = bench.ledger()
    ledger.record(bench.row("op-1", model="\ud800"))
    with pytest.raises(LedgerDown):
        await ledger.claim(bench.row("op-2"))
    await ledger.claim(bench.row("op-3"))
    assert bench.states == {"op-3": State.DISPATCHING}
    assert bench.diary.failures("ledger.dropped") == ["1 rows"]


async def test_a_damaged_file_is_refused_at_the_start(bench: Bench) -> None:
    bench.path.write_bytes(b"not a database" * 1_000)
    with pytest.raises(LedgerDown, match="not a database"):
        bench.ledger(opened=False).open()


async def test_a_newer_schema_is_refused_and_left_as_it_is(bench: Bench) -> None:
    await bench.ledger().close()
    bench.sql("PRAGMA user_version = 7")
    with pytest.raises(LedgerDown, match="has schema 7, this turngate knows up to 1: upgrade turngate"):
        bench.ledger("b", opened=False).open()
    with pytest.raises(LedgerDown, match="has schema 7"):
        read_dispatches(bench.path)
    assert bench.sql("SELECT instance FROM instances") == [("a",)]


async def test_a_ledger_that_could_not_be_opened_fails_claims_and_counts_records_until_it_is(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path / "missing" / "ledger.sqlite3")
    ledger = bench.ledger(opened=False)
    with pytest.raises(LedgerDown) as caught:
        ledger.open()
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(LedgerDown, match="is not open"):
        await ledger.claim(bench.row("op-1"))
    ledger.record(bench.row("op-1"))
    assert len(bench.diary.failures("ledger.write")) == 1
    bench.path.parent.mkdir()
    ledger.open()
    await ledger.claim(bench.row("op-1"))
    await ledger.close()
    assert bench.states == {"op-1": State.DISPATCHING}


async def test_after_closing_a_claim_fails_and_closing_again_is_harmless(bench: Bench) -> None:
    ledger = bench.ledger()
    await ledger.close()
    await ledger.close()
    with pytest.raises(LedgerDown):
        await ledger.claim(bench.row("op-1"))


def test_reading_a_missing_ledger_says_so(tmp_path: Path) -> None:
    with pytest.raises(LedgerDown, match="unable to open"):
        read_dispatches(tmp_path / "ledger.sqlite3")
