"""The ledger on a real file: durability, groups, conflicts, leases, crashes, and a disk that fails."""

import asyncio
import contextlib
import os
import sqlite3
import stat
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from turngate.proxy import ledger_sqlite, ledger_store
from turngate.proxy.ledger_sqlite import ClaimConflict, Ledger, LedgerDown
from turngate.proxy.ledger_store import EXPIRE_ROWS_MAX, SWEEP_ROWS_MAX, read_dispatches
from turngate.telemetry.events import Event, FailureCounted, StateChanged
from turngate.validators.ledger import Dispatch, IllegalMove, LateEvent, Refusal, State, may_release

LEASE_S = 1_000.0
"""So long that within a test only the injected clock, never the real one, makes a renewal due."""

UNKNOWN_TTL_S = 300.0

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
        retention_s: float = 7 * 86_400.0,
    ) -> Ledger:
        """One more instance on the file. A clock of its own that nobody moves is how a test lets it sleep."""
        made = Ledger(
            self.path,
            instance=instance,
            lease_s=LEASE_S,
            unknown_ttl_s=UNKNOWN_TTL_S,
            retention_s=retention_s,
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
        self,
        operation: str,
        state: State = State.DISPATCHING,
        instance: str = "a",
        model: str = "gpt-5",
        **more: Any,
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
            **more,
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

    def __call__(
        self, rows: list[Dispatch], orders: list[Dispatch], late: list[LateEvent], *, now_s: float
    ) -> object:
        assert self._store._db is not None
        self.synchronous.update(self._store._db.execute("PRAGMA synchronous").fetchone())
        written = self._write(rows, orders, late, now_s=now_s)
        self.states += [d.state for d in rows]
        self._loop.call_soon_threadsafe(self.done.set)
        return written


async def written(ledger: Ledger) -> None:
    """All that was recorded or moved so far is on disk."""
    await ledger.cancel_generation("any")


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
    settle = ledger_sqlite._settle

    def counted(outcomes: list[Any]) -> None:
        answers.append(len(outcomes))
        settle(outcomes)

    monkeypatch.setattr(ledger_sqlite, "_settle", counted)
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


async def test_a_claim_does_not_wait_for_what_is_only_recorded(bench: Bench) -> None:
    ledger = bench.ledger()
    ledger.record(bench.row("op-1", State.REJECTED))
    await ledger.claim(bench.row("op-2"))
    assert bench.states == {"op-2": State.DISPATCHING}
    await ledger.close()
    assert bench.states == {"op-2": State.DISPATCHING, "op-1": State.REJECTED}


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
    await written(ledger)
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
    await ledger.cancel_generation("any")  # takes the row along
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
    left = {"op-1": State.REFUSED, "op-2": State.DISPATCHING, "op-3": State.DISPATCHING}
    seen = []
    for instance, age_s in (("soon", 9.9), ("later", 10.0), ("settling", 14.9), ("settled", 15.0)):
        bench.clock.now_s = started_s + age_s
        await bench.ledger(instance).close()
        seen.append(bench.states)
    open_rows = {"op-2", "op-3"}
    unknown = left | dict.fromkeys(open_rows, State.UNKNOWN)
    assert seen == [left, unknown, unknown, left | dict.fromkeys(open_rows, State.ABANDONED)]
    assert {move[1:] for move in bench.diary.moves} == {
        ("DISPATCHING", "UNKNOWN", "lease_ended"),
        ("UNKNOWN", "ABANDONED", "connection_end"),
    }


async def test_the_sweep_takes_page_after_page(bench: Bench) -> None:
    count = 2 * SWEEP_ROWS_MAX + 7
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
    await written(alive)
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
    await written(ledger)
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


async def test_a_sleeper_that_ends_what_was_taken_for_unknown_tells_that_it_left_unknown(
    bench: Bench,
) -> None:
    clock = Clock()
    sleeper = bench.ledger("sleeper", clock=clock)
    rows = [bench.row(operation, instance="sleeper") for operation in ("op-1", "op-2")]
    for d in rows:
        await sleeper.claim(d)
    bench.clock.now_s += LEASE_S
    await bench.ledger("heir").close()
    clock.now_s = bench.clock()
    sleeper.move(sleeper.move(sleeper.move(rows[0], State.SENT), State.STREAMING), State.REFUSED)
    await written(sleeper)
    sleeper.move(rows[1], State.UNKNOWN, how="eof")
    await sleeper.close()
    told = [
        (event.operation, event.before, event.through, event.after)
        for event in bench.diary.events
        if isinstance(event, StateChanged)
    ]
    assert told[-1] == ("op-1", "UNKNOWN", ("STREAMING",), "REFUSED")
    assert [operation for operation, before, *_ in told if before == "DISPATCHING"] == ["op-1", "op-2"]


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
    for n in range(EXPIRE_ROWS_MAX + 100):
        first.record(bench.row(f"old-{n}", State.REJECTED))
    first.record(bench.row("open", instance="b"))
    await first.close()
    second = bench.ledger("b")
    bench.clock.now_s += 7 * 86_400.0
    second.record(bench.row("new", State.REJECTED, instance="b"))
    await second.close()
    assert len(bench.states) == EXPIRE_ROWS_MAX + 102
    bench.clock.now_s += 1.0
    third = bench.ledger("c")
    # The second batch goes before or just after this claim; closing waits for the writer's turn to end.
    await third.claim(bench.row("claim", instance="c"))
    await third.close()
    assert bench.states == {"open": State.DISPATCHING, "new": State.REJECTED, "claim": State.DISPATCHING}
    assert [name for (name,) in bench.sql("SELECT instance FROM instances ORDER BY instance")] == ["b", "c"]


# Conversations.

CHAT: dict[str, Any] = {"conversation": "c", "strength": "explicit"}


async def test_one_attempt_at_a_turn_is_let_through_and_the_other_hears_what_stands_there(
    bench: Bench,
) -> None:
    a, b = bench.ledger("a"), bench.ledger("b")
    await a.claim(bench.row("op-1", **CHAT, revision=1))
    with pytest.raises(ClaimConflict) as caught:
        await b.claim(bench.row("op-2", instance="b", **CHAT, revision=1))
    assert caught.value.refusal == Refusal(
        "dispatch.conflict", "turn 1 is being answered (DISPATCHING)", "op-1"
    )
    await b.claim(bench.row("op-3", instance="b", **CHAT, revision=2))
    assert set(bench.states) == {"op-1", "op-3"}


async def test_a_turn_that_is_there_is_not_asked_for_again(bench: Bench) -> None:
    ledger = bench.ledger()
    d = bench.row("op-1", **CHAT, revision=1)
    await ledger.claim(d)
    ledger.move(ledger.move(d, State.STREAMING), State.COMMITTED, end="complete", canonical=True)
    with pytest.raises(ClaimConflict, match="the conversation already has its turn 1") as caught:
        await ledger.claim(bench.row("op-2", **CHAT, revision=1))
    assert caught.value.refusal.operation == "op-1"
    await ledger.claim(bench.row("op-3", **CHAT, revision=2))


async def test_an_attempt_that_ended_without_a_turn_may_be_followed_by_another_generation(
    bench: Bench,
) -> None:
    ledger = bench.ledger()
    for n in range(3):
        d = bench.row(f"op-{n}", **CHAT, revision=1)
        await ledger.claim(d)
        ledger.move(d, State.REFUSED, how="status_429")
    assert bench.sql("SELECT operation, seq, attempt_generation FROM dispatches ORDER BY seq") == [
        ("op-0", 1, 1),
        ("op-1", 2, 2),
        ("op-2", 3, 3),
    ]


async def test_an_unknown_attempt_whose_connection_ended_is_out_of_the_way_at_once(bench: Bench) -> None:
    ledger = bench.ledger()
    d = bench.row("op-1", **CHAT, revision=1)
    await ledger.claim(d)
    ledger.move(d, State.UNKNOWN, how="eof")
    await ledger.claim(bench.row("op-2", **CHAT, revision=1))
    assert bench.states == {"op-1": State.ABANDONED, "op-2": State.DISPATCHING}
    assert bench.diary.moves[1:] == [
        ("op-1", "DISPATCHING", "UNKNOWN", "eof"),
        ("op-1", "UNKNOWN", "ABANDONED", "connection_end"),
        ("op-2", "", "DISPATCHING", ""),
    ]


async def test_an_unknown_attempt_with_another_channel_holds_up_a_retry_until_its_time_limit(
    bench: Bench,
) -> None:
    ledger = bench.ledger()
    d = bench.row("op-1", **CHAT, revision=1, ended_by="retrieval")
    await ledger.claim(d)
    ledger.move(d, State.UNKNOWN, how="eof")
    with pytest.raises(ClaimConflict) as caught:
        await ledger.claim(bench.row("op-2", **CHAT, revision=1))
    assert (caught.value.refusal.reason, caught.value.refusal.operation) == (
        "dispatch.unknown_outcome",
        "op-1",
    )
    bench.clock.now_s += UNKNOWN_TTL_S
    await ledger.claim(bench.row("op-3", **CHAT, revision=1))
    assert bench.states == {"op-1": State.ABANDONED, "op-3": State.DISPATCHING}
    assert ("op-1", "UNKNOWN", "ABANDONED", "time_limit") in bench.diary.moves


async def test_an_attempt_of_a_dead_process_that_no_sweep_has_met_yet_is_unknown_to_a_claim(
    bench: Bench,
) -> None:
    await bench.ledger("dead").claim(bench.row("op-1", instance="dead", **CHAT, revision=1))
    heir = bench.ledger("heir")
    bench.clock.now_s += LEASE_S
    await heir.claim(bench.row("op-2", instance="heir", **CHAT, revision=1))
    assert bench.states == {"op-1": State.ABANDONED, "op-2": State.DISPATCHING}
    assert [move[1:] for move in bench.diary.moves if move[0] == "op-1"] == [
        ("", "DISPATCHING", ""),
        ("DISPATCHING", "UNKNOWN", "lease_ended"),
        ("UNKNOWN", "ABANDONED", "connection_end"),
    ]


async def test_a_claim_prepared_before_a_cancellation_fails(bench: Bench) -> None:
    ledger = bench.ledger()
    assert await ledger.cancel_generation("c") == 0
    assert await ledger.cancel("c") == 1
    with pytest.raises(ClaimConflict, match="cancelled before it was sent"):
        await ledger.claim(bench.row("op-1", **CHAT, revision=1, cancel_generation=0))
    await ledger.claim(bench.row("op-2", **CHAT, revision=1, cancel_generation=1))
    await ledger.claim(bench.row("op-3", **CHAT, revision=2))
    assert bench.sql("SELECT operation, cancel_generation FROM dispatches") == [("op-2", 1), ("op-3", 1)]


async def test_a_derived_conversation_holds_nothing_up_and_keeps_the_first_turn(bench: Bench) -> None:
    ledger = bench.ledger()
    for operation in ("op-1", "op-2"):
        d = bench.row(operation, conversation="c", strength="derived", revision=1)
        await ledger.claim(d)
        ledger.move(ledger.move(d, State.STREAMING), State.COMMITTED, end="complete", canonical=True)
    await ledger.close()
    assert bench.sql("SELECT operation, state, canonical, how FROM dispatches") == [
        ("op-1", "COMMITTED", 1, ""),
        ("op-2", "COMMITTED", 0, "unchosen"),
    ]
    assert bench.diary.failures("ledger.canonical") == []
    assert bench.diary.moves[-1] == ("op-2", "DISPATCHING", "COMMITTED", "unchosen")


async def test_the_answer_that_the_app_goes_on_with_is_the_turn_of_a_derived_conversation(
    bench: Bench,
) -> None:
    ledger = bench.ledger()
    for operation, strength in (("a", "derived"), ("b", "derived"), ("c", "explicit")):
        revision = 2 if strength == "explicit" else 1
        d = bench.row(operation, conversation="c", strength=strength, revision=revision)
        await ledger.claim(d)
        committed = await ledger.commit(ledger.move(d, State.STREAMING))
        assert may_release(committed)
    assert [await ledger.choose(operation) for operation in ("b", "c", "nobody's")] == [1, 0, 0]
    assert bench.sql("SELECT operation, canonical, how FROM dispatches") == [
        ("a", 0, "unchosen"),
        ("b", 1, ""),
        ("c", 1, ""),
    ]
    assert bench.sql("SELECT operation FROM turns ORDER BY revision") == [("b",), ("c",)]


async def test_places_in_a_conversation_have_no_gaps_whatever_is_written_together(bench: Bench) -> None:
    a, b = bench.ledger("a"), bench.ledger("b")
    count = ledger_store.STATEMENT_ROWS_MAX + 5
    for n in range(count):
        for ledger, instance in ((a, "a"), (b, "b")):
            ledger.record(
                bench.row(
                    f"{instance}-{n:03}",
                    State.REJECTED,
                    instance,
                    conversation="xy"[n % 2],
                    strength="derived",
                    revision=n // 8,
                )
            )
    await asyncio.gather(a.close(), b.close())
    for conversation in "xy":
        rows = bench.sql(f"SELECT seq FROM dispatches WHERE conversation = '{conversation}' ORDER BY rowid")
        assert [seq for (seq,) in rows] == list(range(1, len(rows) + 1))
    generations = bench.sql(
        "SELECT count(*), max(attempt_generation) FROM dispatches GROUP BY conversation, revision"
    )
    assert all(rows == newest for rows, newest in generations)
    assert sum(int(str(rows)) for rows, _ in generations) == 2 * count


async def test_a_turn_is_released_only_when_it_is_on_disk_as_the_only_one(bench: Bench) -> None:
    ledger = bench.ledger()
    first = bench.row("a", conversation="c", strength="derived", revision=1)
    second = bench.row("b", **CHAT, revision=1)
    for d in (second, first):
        await ledger.claim(d)
    won = await ledger.commit(ledger.move(first, State.STREAMING), handle="msg_1", answered_model="m-1")
    assert (won.canonical, won.handle, won.answered_model) == (True, "msg_1", "m-1")
    lost = await ledger.commit(ledger.move(second, State.STREAMING))
    assert (lost.state, lost.canonical, lost.how) == (State.COMMITTED, False, "unchosen")
    assert [may_release(d) for d in (won, lost)] == [True, False]
    assert [(d.operation, d.canonical, d.answered_model) for d in read_dispatches(bench.path)] == [
        ("b", False, ""),
        ("a", True, "m-1"),
    ]


async def test_whose_attempt_was_abandoned_meanwhile_does_not_commit_and_what_came_late_is_kept_apart(
    bench: Bench,
) -> None:
    sleeper = bench.ledger("sleeper", clock=Clock())
    d = bench.row("op-1", instance="sleeper", **CHAT, revision=1)
    await sleeper.claim(d)
    bench.clock.now_s += LEASE_S
    heir = bench.ledger("heir")
    await heir.claim(bench.row("op-2", instance="heir", **CHAT, revision=1))
    stored = await sleeper.commit(sleeper.move(d, State.STREAMING), handle="msg_1")
    assert (stored.state, stored.canonical, may_release(stored)) == (State.ABANDONED, False, False)
    sleeper.quarantine(
        LateEvent(operation="op-1", at_s=bench.clock(), event="stream.late", digest="ab", size_bytes=12)
    )
    await sleeper.close()
    assert bench.states == {"op-1": State.ABANDONED, "op-2": State.DISPATCHING}
    assert bench.sql("SELECT operation, event, handle, digest, size_bytes FROM quarantine") == [
        ("op-1", "COMMITTED", "msg_1", "", 0),
        ("op-1", "stream.late", "", "ab", 12),
    ]


async def test_a_commit_that_cannot_be_written_says_so_and_is_retried(bench: Bench) -> None:
    ledger = bench.ledger()
    d = bench.row("op-1", conversation="c", strength="derived", revision=1)
    await ledger.claim(d)
    with bench.locked(), pytest.raises(LedgerDown, match="locked"):
        await ledger.commit(ledger.move(d, State.STREAMING))
    await ledger.close()
    assert bench.states == {"op-1": State.COMMITTED}


async def test_a_conversation_with_a_newer_document_is_left_alone_and_nothing_else_is(bench: Bench) -> None:
    newer = bench.ledger("newer")
    await newer.claim(bench.row("op-1", instance="newer", **CHAT, revision=1))
    await newer.close()
    bench.sql("UPDATE dispatches SET document_version = 9, state = 'SETTLING', how = '?'")
    bench.sql("UPDATE conversations SET document_version = 9")
    bench.sql("UPDATE instances SET lease_until_s = 0")
    ledger = bench.ledger()
    with pytest.raises(ClaimConflict) as caught:
        await ledger.claim(bench.row("op-2", **CHAT, revision=2))
    assert caught.value.refusal.reason == "dispatch.paused"
    await ledger.claim(bench.row("op-3", conversation="d", strength="explicit", revision=1))
    await ledger.claim(bench.row("op-4", conversation="c", strength="derived", revision=2))
    await ledger.close()
    assert set(bench.states) == {"op-3", "op-4"}
    assert bench.sql("SELECT state FROM dispatches WHERE operation = 'op-1'") == [("SETTLING",)]


async def test_becoming_unknown_is_told_by_itself_even_if_the_file_never_held_it(bench: Bench) -> None:
    ledger = bench.ledger()
    d = bench.row("op-1")
    ledger.record(d)
    d = ledger.move(ledger.move(d, State.STREAMING), State.UNKNOWN, how="eof")
    ledger.move(d, State.COMMITTED, end="complete")
    await ledger.close()
    told = [event for event in bench.diary.events if isinstance(event, StateChanged)]
    assert [(event.before, event.through, event.after, event.how) for event in told] == [
        ("", ("DISPATCHING", "STREAMING"), "UNKNOWN", "eof"),
        ("UNKNOWN", (), "COMMITTED", ""),
    ]


async def test_a_week_of_traffic_leaves_a_bounded_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "ledger.sqlite3")
    ledger = bench.ledger(retention_s=86_400.0)
    pages: list[int] = []
    for hour in range(24 * 7):
        for n in range(40):
            revision = hour * 40 + n
            operation = f"op-{revision:06}"
            d = bench.row(
                operation, conversation=f"c-{hour}", strength="derived", revision=revision, state=State.SENT
            )
            ledger.record(d)
            ledger.move(ledger.move(d, State.STREAMING), State.COMMITTED, end="complete", canonical=True)
            ledger.quarantine(LateEvent(operation=operation, at_s=bench.clock(), event="stream.late"))
        await ledger.cancel(f"never-used-{hour}")
        await written(ledger)
        bench.clock.now_s += 3_600.0
        pages.append(int(str(bench.sql("PRAGMA page_count")[0][0])))
    await ledger.close()
    tables = ("dispatches", "conversations", "turns", "quarantine")
    counts = {table: int(str(bench.sql(f"SELECT count(*) FROM {table}")[0][0])) for table in tables}
    a_day = 24 * 40
    assert all(counts[table] <= a_day + 80 for table in ("dispatches", "turns", "quarantine")), counts
    assert counts["conversations"] <= 2 * 26
    assert max(pages[72:]) <= 1.1 * max(pages[24:72])


async def test_a_file_of_schema_1_is_taken_over_with_its_rows_and_other_tables(bench: Bench) -> None:
    with contextlib.closing(sqlite3.connect(bench.path)) as db:
        db.executescript(SCHEMA_1)
    bench.sql("CREATE TABLE orders (why TEXT)")
    bench.sql("INSERT INTO orders VALUES ('kept')")
    bench.clock.now_s += 100.0
    await bench.ledger().close()
    (row,) = read_dispatches(bench.path)
    assert (row.operation, row.state, row.ended_by, row.conversation) == (
        "op-old",
        State.UNKNOWN,
        "connection_end",
        "",
    )
    assert bench.sql("PRAGMA user_version") == [(ledger_store.SCHEMA_VERSION,)]
    assert bench.sql("SELECT why FROM orders") == [("kept",)]


SCHEMA_1 = """
CREATE TABLE dispatches (
    operation TEXT PRIMARY KEY, upstream TEXT NOT NULL, api TEXT NOT NULL, model TEXT NOT NULL,
    request_digest TEXT NOT NULL, instance TEXT NOT NULL, attempt_generation INTEGER NOT NULL,
    cancel_generation INTEGER NOT NULL, settle_s REAL NOT NULL, state TEXT NOT NULL, how TEXT NOT NULL,
    handle TEXT NOT NULL, end TEXT NOT NULL, canonical INTEGER NOT NULL, opened_s REAL NOT NULL,
    changed_s REAL NOT NULL, unknown_since_s REAL NOT NULL, document_version INTEGER NOT NULL);
CREATE INDEX unsettled ON dispatches (operation) WHERE state IN ('DISPATCHING', 'SENT', 'STREAMING', 'UNKNOWN');
CREATE TABLE instances (
    instance TEXT PRIMARY KEY, pid INTEGER NOT NULL, started_s REAL NOT NULL, lease_until_s REAL NOT NULL);
INSERT INTO dispatches VALUES ('op-old', 'openai', 'openai_chat', 'm', '', 'gone', 1, 0, 5.0, 'SENT', '', '', '', 0,
    1000000.0, 1000000.0, 0.0, 1);
INSERT INTO instances VALUES ('gone', 1, 1000000.0, 1000010.0);
PRAGMA user_version = 1;
"""


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
    await ledger.close()
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

    def fail_once(*batch: Any, now_s: float) -> object:
        if has_moved.is_set():
            return write(*batch, now_s=now_s)
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
    await ledger.close()
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


async def test_a_value_the_file_cannot_hold_is_given_up_alone(bench: Bench) -> None:
    ledger = bench.ledger()
    for n, model in enumerate(("gpt-5", "\ud800", "gpt-5")):
        ledger.record(bench.row(f"op-{n}", model=model))
    with pytest.raises(LedgerDown):
        await ledger.claim(bench.row("op-3", model="\ud800"))
    await ledger.claim(bench.row("op-4"))
    await ledger.close()
    assert bench.states == dict.fromkeys(("op-0", "op-2", "op-4"), State.DISPATCHING)
    assert bench.diary.failures("ledger.dropped") == ["1 rows"]
    assert sorted(operation for operation, *_ in bench.diary.moves) == ["op-0", "op-1", "op-2", "op-4"]


async def test_a_damaged_file_is_refused_at_the_start(bench: Bench) -> None:
    bench.path.write_bytes(b"not a database" * 1_000)
    with pytest.raises(LedgerDown, match="not a database"):
        bench.ledger(opened=False).open()


async def test_a_newer_schema_is_refused_and_left_as_it_is(bench: Bench) -> None:
    await bench.ledger().close()
    bench.sql("PRAGMA user_version = 7")
    with pytest.raises(LedgerDown, match="has schema 7, this turngate knows up to 2: upgrade turngate"):
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
