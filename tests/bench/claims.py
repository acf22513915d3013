"""What a durable claim costs: `python tests/bench/claims.py [--json]`.

Wall time of a claim alone and of 64 at once (from the call until its future is done), and CPU time of the
whole process, both threads, per claim and per row written behind. The disk is the one under the system's temp
directory.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from turngate.proxy.ledger_sqlite import Ledger
from turngate.validators.ledger import Dispatch, State

ALONE = 1_000
GROUP = 64
GROUPS = 50
ROWS = 20_000
ROWS_PER_TICK = 100
"""One write-behind interval at 5,000 exchanges a second."""


def dispatching(operation: str) -> Dispatch:
    return Dispatch(
        operation=operation,
        upstream="openai",
        api="openai_chat",
        model="gpt-5",
        request_digest="5f" * 32,
        instance="bench",
        settle_s=5.0,
        state=State.DISPATCHING,
        opened_s=time.time(),
        changed_s=time.time(),
    )


async def claimed_s(ledger: Ledger, operation: str) -> float:
    started = time.perf_counter()
    await ledger.claim(dispatching(operation))
    return time.perf_counter() - started


async def alone(ledger: Ledger) -> list[float]:
    return [await claimed_s(ledger, f"alone-{n:06}") for n in range(ALONE)]


async def grouped(ledger: Ledger) -> list[float]:
    taken: list[float] = []
    for group in range(GROUPS):
        names = [f"group-{group:03}-{n:03}" for n in range(GROUP)]
        taken += await asyncio.gather(*(claimed_s(ledger, name) for name in names))
    return taken


async def behind(ledger: Ledger) -> list[float]:
    """Exchanges of `observe`: recorded, sent, answered and ended within one write-behind interval."""
    for first in range(0, ROWS, ROWS_PER_TICK):
        for n in range(first, first + ROWS_PER_TICK):
            d = dispatching(f"behind-{n:06}")
            ledger.record(d)
            d = ledger.move(d, State.SENT)
            d = ledger.move(d, State.STREAMING, handle="chatcmpl-1")
            ledger.move(d, State.COMMITTED, end="complete", canonical=True)
        await asyncio.sleep(0.02)
    await ledger.close()
    return []


async def measure(
    name: str, work: Callable[[Ledger], Awaitable[list[float]]], count: int
) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(
            Path(folder) / "ledger.sqlite3",
            instance="bench",
            emit=lambda event: None,
            loop=asyncio.get_running_loop(),
        )
        ledger.open()
        cpu = time.process_time()
        taken = sorted(await work(ledger))
        cpu_us = (time.process_time() - cpu) / count * 1e6
        await ledger.close()
        return {
            "what": name,
            "count": count,
            "p50_ms": round(taken[len(taken) // 2] * 1e3, 3) if taken else None,
            "p99_ms": round(taken[len(taken) * 99 // 100] * 1e3, 3) if taken else None,
            "cpu_us": round(cpu_us, 1),
            "commits": ledger.commits,
        }


async def main(as_json: bool) -> None:
    results = [
        await measure("claim, alone", alone, ALONE),
        await measure(f"claim, {GROUP} at once", grouped, GROUP * GROUPS),
        await measure("row written behind, 4 states", behind, ROWS),
    ]
    if as_json:
        print(json.dumps(results))
        return
    print(f"{'':30}{'count':>8}{'p50 ms':>9}{'p99 ms':>9}{'CPU us':>9}{'commits':>9}")
    for r in results:
        print(
            f"{r['what']:30}{r['count']:>8}{r['p50_ms'] or '-':>9}{r['p99_ms'] or '-':>9}"
            f"{r['cpu_us']:>9}{r['commits']:>9}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON array instead of the table")
    uvloop.run(main(parser.parse_args().json))
