"""The same count everywhere: what Prometheus would scrape, the rows of the evidence, the provider, and the app itself.

Each ending of an exchange is played; then the proxy is killed with streams open, started again, and counted on.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from running import Sidecar, evidence, ledger_rows, until

from turngate.proxy.simulator import Received, Simulator

TIMES: Final = 3
"""How often each ending is played, and how many streams are open at the kill."""
TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
SAID: Final[dict[str, Any]] = {
    "text": ["Hej.", " Hur", " mår du?"],
    "calls": [{"name": "f", "arguments": {}}],
}


@dataclass(frozen=True, slots=True)
class End:
    """One ending: the provider's step, and the outcome that the evidence must name. `reaches`: the provider sees it.

    `leaves`: the app goes as soon as it has the first bytes.
    """

    outcome: str
    step: dict[str, Any]
    stream: bool = True
    leaves: bool = False
    reaches: bool = True
    upstream: str = "/v1"


ENDS: Final = {
    "a whole stream": End("passed", {"answer": SAID}),
    "a whole JSON answer": End("passed", {"answer": SAID}, stream=False),
    "text cut by a close": End("retracted", {"answer": SAID, "fault": {"cut_at_byte": 700, "how": "eof"}}),
    "text cut by a reset": End("retracted", {"answer": SAID, "fault": {"cut_at_byte": 700, "how": "reset"}}),
    "a quiet end": End("retracted", {"answer": SAID, "fault": {"cut_at_byte": 700, "clean_end": True}}),
    "silence within an answer": End("retracted", {"answer": SAID, "fault": {"stall_at_byte": 700}}),
    "silence before an answer": End("unknown", {"answer": SAID, "delay_s": 3600.0}),
    "an error": End(
        "provider_error", {"answer": {"error": {"status": 429, "type": "requests", "message": "Slow down."}}}
    ),
    "an error event": End("retracted", {"answer": SAID, "fault": {"error_event_after": 2}}),
    "a length limit": End("incomplete", {"answer": {"text": "Hej", "finish": "length"}}),
    "an app that leaves": End("client_gone", {"answer": SAID, "fault": {"stall_at_byte": 400}}, leaves=True),
    "an illegal sequence": End("refused", {}, reaches=False),
    "no provider": End("unsent", {}, reaches=False, upstream="/nowhere/v1"),
}
SCENARIO: Final = {
    "steps": [
        *({"when": {"model": name}, **end.step} for name, end in ENDS.items() if end.reaches),
        {"when": {"model": "open"}, "answer": SAID, "fault": {"stall_at_byte": 400}},
    ]
}
SETTINGS: Final[dict[str, Any]] = {
    "stage": "enforce-tools",
    "timeouts": {"first_byte_s": 1.0, "idle_s": 1.0},
    "ledger": {"lease_s": 1.0, "settle_s": 0.0},
}


def body(name: str, *, stream: bool) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go on."}]
    if name == "an illegal sequence":
        messages.append({"role": "tool", "tool_call_id": "call_9", "content": "1"})
    return {"model": name, "messages": messages, "stream": stream, "tools": TOOLS}


async def play(session: aiohttp.ClientSession, url: str, name: str, end: End) -> None:
    """One request, read to whatever end it has."""
    asked = body(name, stream=end.stream)
    try:
        async with session.post(f"{url}{end.upstream}/chat/completions", json=asked) as answer:
            if end.leaves:
                await answer.content.readany()
                answer.close()
            else:
                await answer.read()
    except aiohttp.ClientError:
        pass  # a broken answer may be told so, too


async def scraped(session: aiohttp.ClientSession, sidecar: Sidecar) -> Counter[tuple[str, str]]:
    """(model, outcome) -> `turngate_requests_total`."""
    async with session.get(f"{sidecar.metrics_url}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
        return Counter(
            {
                (sample.labels["model"], sample.labels["outcome"]): int(sample.value)
                for family in families
                for sample in family.samples
                if sample.name == "turngate_requests_total" and sample.value
            }
        )


@asynccontextmanager
async def started(
    data_dir: Path, url: str, seen: list[Counter[tuple[str, str]]]
) -> AsyncIterator[tuple[Sidecar, aiohttp.ClientSession]]:
    upstreams = {"openai": url, "nowhere": "http://127.0.0.1:1"}
    async with (
        Sidecar(data_dir, upstreams, **SETTINGS) as sidecar,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        await asyncio.gather(
            *(play(session, sidecar.url, name, end) for name, end in ENDS.items() for _ in range(TIMES))
        )
        count = len(ENDS) * TIMES

        async def all_counted() -> Counter[tuple[str, str]] | None:
            found = await scraped(session, sidecar)
            return found if found.total() >= count else None

        seen.append(await until(all_counted))
        yield sidecar, session


async def test_metrics_evidence_provider_and_app_count_the_same(tmp_path: Path) -> None:
    received: list[Received] = []
    seen: list[Counter[tuple[str, str]]] = []
    data_dir = tmp_path / "data"
    async with Simulator(SCENARIO) as simulator:
        received = simulator.requests
        async with started(data_dir, simulator.url, seen) as (sidecar, session):
            left = [
                asyncio.create_task(play(session, sidecar.url, "open", ENDS["a whole stream"]))
                for _ in range(TIMES)
            ]
            await until(lambda: ledger_rows(data_dir, "state").count(("STREAMING",)) == TIMES)
            await sidecar.kill()
            await asyncio.gather(*left)
        async with started(data_dir, simulator.url, seen) as (sidecar, _):
            await until(lambda: ledger_rows(data_dir, "model, state").count(("open", "ABANDONED")) == TIMES)
    played = Counter({(name, end.outcome): 2 * TIMES for name, end in ENDS.items()})
    assert sum(seen, Counter()) == played  # by increase: each process counts from 0
    rows = evidence(data_dir, "SELECT model, outcome, count(*) FROM exchange_ended GROUP BY ALL")
    assert {(model, outcome): count for model, outcome, count in rows} == played
    asked = Counter(json.loads(each.body)["model"] for each in received)
    assert asked == Counter({**{name: 2 * TIMES for name, end in ENDS.items() if end.reaches}, "open": TIMES})
    moved = dict(evidence(data_dir, "SELECT state, count(*) FROM dispatches GROUP BY ALL"))
    assert sum(moved.values()) == played.total() + TIMES
    assert moved == Counter(state for (state,) in ledger_rows(data_dir, "state"))
