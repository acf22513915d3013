"""Two processes on one ledger file that want the same turn at the same time."""

import asyncio
import multiprocessing
import sqlite3
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

from turngate.proxy.ledger_sqlite import ClaimConflict, Ledger
from turngate.validators.ledger import Dispatch, State

ROUNDS = 1_000
ROUND_S = 60.0
"""Beyond this a process that waits for the other one gives up; nothing takes so long."""


def test_of_two_processes_that_want_one_revision_exactly_one_gets_it_each_time(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    results: multiprocessing.Queue[tuple[str, list[str]]] = context.Queue()
    racers = [
        context.Process(target=_race, args=(path, instance, barrier, results), daemon=True)
        for instance in ("a", "b")
    ]
    for racer in racers:
        racer.start()
    outcomes = dict(results.get(timeout=ROUND_S) for _ in racers)
    for racer in racers:
        racer.join(ROUND_S)
    for n, (a, b) in enumerate(zip(outcomes["a"], outcomes["b"], strict=True)):
        winner, heard = ("a", b) if a == "" else ("b", a)
        assert (outcomes[winner][n], heard) == ("", f"dispatch.conflict {n}-{winner}")
    assert len(outcomes["a"]) == ROUNDS
    db = sqlite3.connect(path)
    assert db.execute("SELECT count(*), count(DISTINCT revision), max(seq) FROM dispatches").fetchall() == [
        (ROUNDS, ROUNDS, ROUNDS)
    ]
    assert db.execute("SELECT count(*) FROM turns").fetchone() == (ROUNDS,)
    db.close()


def _race(
    path: Path, instance: str, barrier: Barrier, results: "multiprocessing.Queue[tuple[str, list[str]]]"
) -> None:
    """Claim revision 1, 2, 3, ... of one conversation as soon as the other one is ready to; the winner commits it."""
    results.put((instance, asyncio.run(_claims(path, instance, barrier))))


async def _claims(path: Path, instance: str, barrier: Barrier) -> list[str]:
    """For each round: empty where it was granted, else the refusal."""
    ledger = Ledger(
        path, instance=instance, emit=lambda event: None, loop=asyncio.get_running_loop(), lease_s=ROUND_S
    )
    ledger.open()
    outcomes: list[str] = []
    for n in range(ROUNDS):
        d = Dispatch(
            operation=f"{n}-{instance}",
            upstream="openai",
            api="openai_chat",
            model="gpt-5",
            request_digest="00ff",
            instance=instance,
            settle_s=0.0,
            state=State.DISPATCHING,
            opened_s=time.time(),
            changed_s=time.time(),
            conversation="c",
            strength="explicit",
            revision=n + 1,
        )
        barrier.wait(ROUND_S)
        try:
            await ledger.claim(d)
        except ClaimConflict as error:
            outcomes.append(f"{error.refusal.reason} {error.refusal.operation}")
        else:
            outcomes.append("")
            committed = await ledger.commit(ledger.move(d, State.STREAMING))
            assert committed.canonical
    await ledger.close()
    return outcomes
