"""The older official Python SDKs that apps still have: they raise their usual exception with our words, once."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from running import InLoop, in_loop

from turngate.proxy.simulator import Simulator

HERE: Final = Path(__file__).parent
INSTALLED: Final = HERE / ".sdks"
VERSIONS: Final = {"openai": ("1.109.1", "2.54.0"), "anthropic": ("0.125.0",)}
SDKS: Final = [f"{name}=={version}" for name, versions in VERSIONS.items() for version in versions]

MISSING: Final = [sdk for sdk in SDKS if not (INSTALLED / sdk).is_dir()]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason="get the older SDKs by: make sdks"),
    pytest.mark.asyncio(loop_scope="module"),
]

QUESTION: Final = {"role": "user", "content": "Weather?"}
ASKED: Final[dict[str, dict[str, Any]]] = {
    "openai": {
        "model": "m",
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    },
    "anthropic": {
        "model": "claude-sonnet-4-5",
        "max_tokens": 100,
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    },
}
ORPHAN: Final[dict[str, list[Any]]] = {
    "openai": [QUESTION, {"role": "tool", "tool_call_id": "call_9", "content": "4 C"}],
    "anthropic": [
        QUESTION,
        {"role": "assistant", "content": "One moment."},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_9", "content": "4 C"}]},
    ],
}
PLACE: Final = {"openai": "/messages/1", "anthropic": "/messages/2/content/0"}
CALL: Final = {"steps": [{"answer": {"calls": [{"name": "look", "arguments": {"city": "Oslo"}}]}}]}
CUT: Final = {"steps": [{**CALL["steps"][0], "fault": {"cut_at_byte": 520, "how": "eof"}}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Simulator, InLoop]]:
    async with Simulator() as provider:
        upstreams = {"openai": provider.url, "anthropic": provider.url}
        async with in_loop(tmp_path_factory.mktemp("sidecar"), upstreams, stage="enforce-tools") as proxy:
            yield provider, proxy


async def ask(sdk: str, proxy: InLoop, messages: list[Any], **more: object) -> dict[str, Any]:
    name = sdk.partition("=")[0]
    base_url = f"{proxy.url}/v1" if name == "openai" else proxy.url
    job = {"sdk": name, "base_url": base_url, "asked": {**ASKED[name], "messages": messages, **more}}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE / "sdk_ask.py")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(INSTALLED / sdk)},
    )
    out, _ = await process.communicate(json.dumps(job).encode())
    told: dict[str, Any] = json.loads(out)
    assert told["version"] == sdk.rpartition("=")[2]
    return told


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sdk", SDKS)
async def test_a_refusal_is_raised_once_with_reason_place_and_remedy(
    wire: tuple[Simulator, InLoop], sdk: str, stream: bool
) -> None:
    provider, proxy = wire
    provider.reset()
    name = sdk.partition("=")[0]
    told = await ask(sdk, proxy, ORPHAN[name], stream=stream)
    assert (told["sent"], told["shown"], len(provider.requests)) == (1, [], 0)
    assert told["error"]["name"] == "BadRequestError"
    for word in ("result.orphan", PLACE[name], "or drop the result."):
        assert word in told["error"]["text"]


@pytest.mark.parametrize("sdk", SDKS)
async def test_a_stream_cut_inside_a_call_raises_and_shows_none_of_it(
    wire: tuple[Simulator, InLoop], sdk: str
) -> None:
    provider, proxy = wire
    provider.use(CUT)
    told = await ask(sdk, proxy, [QUESTION], stream=True)
    assert "stream." in told["error"]["text"]
    assert "look" not in json.dumps(told["shown"])


@pytest.mark.parametrize("sdk", SDKS)
async def test_a_whole_call_arrives(wire: tuple[Simulator, InLoop], sdk: str) -> None:
    provider, proxy = wire
    provider.use(CALL)
    told = await ask(sdk, proxy, [QUESTION])
    assert told["error"] is None
    assert "Oslo" in json.dumps(told["shown"])
