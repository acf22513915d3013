"""Agents of the common frameworks behind an enforced scope: a call that was cut is not run, and the agent raises."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
from running import InLoop, in_loop

from turngate.proxy.simulator import Received, Simulator

HERE: Final = Path(__file__).parent
INSTALLED: Final = HERE / ".sdks" / "frameworks"
pytestmark = [
    pytest.mark.skipif(not INSTALLED.is_dir(), reason="get the agent frameworks by: make sdks"),
    pytest.mark.asyncio(loop_scope="module"),
]

FRAMEWORKS: Final = [
    ("langchain", "openai"),
    ("langchain", "anthropic"),
    ("openai-agents", "openai"),
    ("pydantic-ai", "openai"),
    ("pydantic-ai", "anthropic"),
]
CALL: Final[dict[str, Any]] = {"text": "I look.", "calls": [{"name": "look", "arguments": {"city": "Oslo"}}]}
STOPS: Final = {"openai": b'"finish_reason":"tool_calls"', "anthropic": b"event: message_delta"}
LAST_WORD: Final = {"text": "4 C."}
WHOLE: Final = {"steps": [{"answer": CALL}, {"when": {}, "answer": LAST_WORD}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Simulator, InLoop]]:
    async with Simulator() as provider:
        upstreams = {"openai": provider.url, "anthropic": provider.url}
        directory = tmp_path_factory.mktemp("sidecar")
        async with in_loop(directory, upstreams, stage="enforce-tools", observer=False) as proxy:
            yield provider, proxy


class Agent:
    """A process of one framework that does one task after the other."""

    def __init__(self, framework: str, api: str, proxy: InLoop, process: asyncio.subprocess.Process) -> None:
        base_url = f"{proxy.url}/v1" if api == "openai" else proxy.url
        self._job = {"framework": framework, "api": api, "base_url": base_url}
        self._process = process

    async def ask(self, *, stream: bool) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**self._job, "stream": stream}).encode() + b"\n")
        while not (line := await self._process.stdout.readline()).startswith(b'{"called"'):
            assert line, "the agent's process ended"
        told: dict[str, Any] = json.loads(line)
        return told


@asynccontextmanager
async def agent(framework: str, api: str, proxy: InLoop) -> AsyncIterator[Agent]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE / "agent_ask.py")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(INSTALLED)},
    )
    try:
        yield Agent(framework, api, proxy, process)
    finally:
        process.kill()
        await process.wait()


async def end_of_calls(provider: Simulator, asked: Received, api: str) -> int:
    """Where, in the answer to such a request, the provider says why it stopped."""
    provider.use(WHOLE)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{provider.url}{asked.path}", data=asked.body) as answer,
    ):
        return (await answer.read()).index(STOPS[api])


@pytest.mark.parametrize(("framework", "api"), FRAMEWORKS)
async def test_an_agent_runs_its_tool_once_and_one_whose_call_is_cut_raises_and_runs_nothing(
    wire: tuple[Simulator, InLoop], framework: str, api: str
) -> None:
    provider, proxy = wire
    async with agent(framework, api, proxy) as asked:
        for stream in (True, False):
            provider.use(WHOLE)
            provider.reset()
            whole = await asked.ask(stream=stream)
            assert (whole["called"], whole["error"]) == (1, None)
            # In the middle, and so late that the arguments are whole and only the answer's end is missing.
            end = await end_of_calls(provider, provider.requests[0], api) if stream else 0
            sent = provider.requests[0].bytes_sent
            for at in (end // 2, end - 1) if stream else (sent - 20,):
                step = {"when": {}, "answer": CALL, "fault": {"cut_at_byte": at, "clean_end": True}}
                provider.use({"steps": [step]})
                told = await asked.ask(stream=stream)
                assert (told["called"], told["said"]) == (0, None), at
                assert told["error"]
