"""An app that leaves: the provider's connection closes at once, and the ledger says how each dispatch ended."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from running import Sidecar, evidence, ledger_rows

from turngate.proxy.simulator import Received, Simulator

STAGES: Final = ("observe", "enforce-tools")
AT_ONCE: Final = 10
HANG_S: Final = 60.0
"""Only what never comes meets this bound."""

TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ANSWER: Final = {"text": ["Hej."], "calls": [{"name": "f", "arguments": {}}]}
TERMINAL: Final = b'"finish_reason":"tool_calls"}]}\n\n'
HUGE: Final = {"text": ["x" * 100_000] * 300}
FOREVER_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Leaving:
    """When an app leaves, and what must be written of it. `seen` is the last that it reads; empty: it reads nothing.

    `fault_at` is where the provider falls silent: it never ends an answer itself.
    """

    seen: bytes
    row: tuple[str, str]
    ended: tuple[str, str]
    answer: dict[str, Any]
    stream: bool = True
    delay_s: float = 0.0
    silent_behind: bytes = b""


GONE: Final = (("CANCELLED", "app_left"), ("client_gone", "caller_gone"))
WHOLE: Final = (("COMMITTED", ""), ("passed", ""))

READING: Final = {
    "before the head of a stream": Leaving(b"", *GONE, ANSWER, delay_s=FOREVER_S),
    "before the head of a JSON answer": Leaving(b"", *GONE, ANSWER, stream=False, delay_s=FOREVER_S),
    "in the middle of text": Leaving(
        b'"Hej."', *GONE, {"text": ["Hej.", " Hur"]}, silent_behind=b'"content":" H'
    ),
    "while a call is under way": Leaving(
        b'"Hej."', *GONE, ANSWER, silent_behind=b'"name":"f","arguments":""'
    ),
    "behind the terminal event of a call": Leaving(TERMINAL, *WHOLE, ANSWER, silent_behind=TERMINAL),
    "behind the terminal event of text": Leaving(
        b'"stop"}]}\n\n', *WHOLE, {"text": ["Hej."]}, silent_behind=b'"stop"}]}\n\n'
    ),
}
BEHIND: Final = {"behind in reading": Leaving(b"HTTP/1.1 200", *GONE, HUGE)}
"""Apart, because so many bytes keep the loop busy in which the others' times are taken."""

TABLES: Final = {"reading": (READING, 20), "behind": (BEHIND, 3)}
"""Cases, and how often each is played."""


def request(case: str, number: int = 0, *, stream: bool = True) -> bytes:
    """A request that the simulator's scenario and the tables know by its model."""
    messages = [{"role": "user", "content": f"number {number}."}]
    asked = {"model": case, "messages": messages, "tools": TOOLS, "stream": stream}
    body = json.dumps(asked).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


async def scenario(cases: dict[str, Leaving]) -> dict[str, Any]:
    """One step a case, with the offset at which its stream falls silent."""
    steps: list[dict[str, Any]] = []
    for name, case in cases.items():
        step: dict[str, Any] = {"when": {"model": name}, "answer": case.answer, "delay_s": case.delay_s}
        if case.silent_behind:
            async with (
                Simulator({"steps": [step]}) as simulator,
                connected(simulator.url) as (reader, writer),
            ):
                writer.write(request(name).replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n"))
                body = dechunked(await reader.read())
            step["fault"] = {"stall_at_byte": body.index(case.silent_behind) + len(case.silent_behind)}
        steps.append(step)
    return {"steps": steps}


def dechunked(answer: bytes) -> bytes:
    rest = answer.partition(b"\r\n\r\n")[2]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        try:
            yield reader, writer
        finally:
            writer.close()


async def leave(sidecar: Sidecar, simulator: Simulator, case: Leaving, asked: bytes) -> float:
    """Play one case; seconds from the app's close to the end of the provider's connection."""
    async with connected(sidecar.url) as (reader, writer):
        writer.write(asked)
        received = await arrival(simulator, asked.partition(b"\r\n\r\n")[2])
        if case.seen:
            await reader.readuntil(case.seen)
        left_s = time.monotonic()
        writer.close()
        return await simulator.wait_closed(received) - left_s


async def arrival(simulator: Simulator, body: bytes) -> Received:
    """Wait for the request with this body."""
    count = 1
    while not (found := [each for each in simulator.requests if each.body == body]):
        count = max(count, len(simulator.requests)) + 1
        await simulator.wait_request(count)
    return found[0]


async def observer_started(sidecar: Sidecar) -> None:
    """Its start takes a core for a while, which is no part of what is measured."""
    async with connected(sidecar.metrics_url) as (reader, writer):
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert (await reader.readline()).endswith(b" 200 OK\r\n")


def told(latencies_s: list[float], tell: Callable[[str, object], None]) -> None:
    """Put the measured distribution into the test's report."""
    latencies_s.sort()
    for share in (50, 99):
        value_ms = 1000 * latencies_s[min(len(latencies_s) - 1, len(latencies_s) * share // 100)]
        tell(f"provider_closed_p{share}_ms", round(value_ms, 2))
        print(f"provider's connection closed after the app's: p{share} {value_ms:.2f} ms")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("cases", "times"), TABLES.values(), ids=TABLES)
async def test_when_the_app_leaves_the_provider_is_left_and_the_ledger_says_so(
    tmp_path: Path,
    cases: dict[str, Leaving],
    times: int,
    stage: str,
    record_property: Callable[[str, object], None],
) -> None:
    turn = asyncio.Semaphore(AT_ONCE)
    async with (
        Simulator(await scenario(cases)) as simulator,
        Sidecar(tmp_path / "data", {"openai": simulator.url}, stage=stage) as sidecar,
    ):
        await observer_started(sidecar)

        async def play(name: str, number: int) -> float:
            async with turn:
                asked = request(name, number, stream=cases[name].stream)
                return await leave(sidecar, simulator, cases[name], asked)

        plays = [play(name, number) for number in range(times) for name in cases]
        latencies_s = list(await asyncio.gather(*plays))
        assert len(simulator.requests) == len(plays)  # none was sent twice
    told(latencies_s, record_property)
    rows = Counter(ledger_rows(tmp_path / "data", "model, state, how"))
    assert rows == {(name, *case.row): times for name, case in cases.items()}
    ended = evidence(tmp_path / "data", "SELECT model, outcome, error_type FROM exchange_ended")
    assert Counter(ended) == {(name, *case.ended): times for name, case in cases.items()}
    assert evidence(tmp_path / "data", "SELECT * FROM failure_counted") == []


@pytest.mark.parametrize("stage", ["off", *STAGES])
async def test_when_the_app_leaves_in_its_upload_nothing_of_it_goes_on(tmp_path: Path, stage: str) -> None:
    arrived: list[bytes] = []
    begun, over = asyncio.Event(), asyncio.Event()

    async def provider(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.append(await reader.readuntil(b'{"model":'))
        begun.set()
        arrived.append(await reader.read())
        over.set()
        writer.close()

    server = await asyncio.start_server(provider, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, Sidecar(tmp_path / "data", {"openai": url}, stage=stage) as sidecar:
        async with connected(sidecar.url) as (_, writer):
            writer.write(request("m")[:-9])
            if stage != "enforce-tools":
                await begun.wait()
        if stage != "enforce-tools":
            await asyncio.wait_for(over.wait(), HANG_S)
    assert len(arrived) == (
        0 if stage == "enforce-tools" else 2
    )  # where enforced, only a judged request goes out
    assert ledger_rows(tmp_path / "data") == []
    ended = evidence(tmp_path / "data", "SELECT outcome, error_type, status FROM exchange_ended")
    assert ended == [("client_gone", "caller_gone", 0)]


async def test_when_the_app_leaves_before_a_refusal_the_refusal_is_still_in_the_ledger(
    tmp_path: Path,
) -> None:
    orphan = {"role": "tool", "tool_call_id": "x", "content": "1"}
    body = json.dumps({"model": "m", "messages": [orphan]}).encode()
    async with (
        Simulator() as simulator,
        Sidecar(tmp_path / "data", {"openai": simulator.url}, stage="enforce-tools") as sidecar,
    ):
        async with connected(sidecar.url) as (reader, writer):
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
            await reader.readuntil(b"HTTP/1.1 400")
        assert simulator.requests == []
    assert ledger_rows(tmp_path / "data", "state, how") == [("REJECTED", "result.orphan")]
