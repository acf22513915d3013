"""The official Node SDKs against a running sidecar where tool calls are enforced; the simulator is the provider.

They are installed by `npm ci --prefix tests/node`. What is tested at every byte with the Python SDKs is tested here at
the places where the Node SDKs could differ: the class they raise, whether they try again, and what they showed before.
"""

import asyncio
import json
import shutil
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
from running import Sidecar

from turngate.proxy.simulator import Simulator

HERE: Final = Path(__file__).parent / "node"
NODE: Final = shutil.which("node")

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(NODE is None, reason="no node: install Node.js 20 or newer"),
    pytest.mark.skipif(
        not (HERE / "node_modules").is_dir(),
        reason="no Node SDKs: npm ci --ignore-scripts --prefix tests/node",
    ),
]

HANG_S: Final = 120.0
"""Only what never comes meets this bound."""

Json = dict[str, Any]

SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER: Final = {"role": "user", "content": "Weather in Oslo?"}
ANSWER: Final = {
    "text": ["Let me look. "],
    "calls": [{"name": "get_weather", "arguments": ['{"city":', '"Oslo"}']}],
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What an SDK is asked with, and where its base URL lies behind a host."""

    prefix: str
    path: str
    asked: Json
    calling: Json
    answered: Json
    stray: Json
    """A result without its call, and where it stands."""
    stray_at: str


CHAT: Final = Dialect(
    "/v1",
    "/v1/chat/completions",
    {
        "model": "m",
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}],
    },
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "14"},
    {"role": "tool", "tool_call_id": "x", "content": "14"},
    "/messages/1",
)
MESSAGES: Final = Dialect(
    "",
    "/v1/messages",
    {"model": "m", "max_tokens": 99, "tools": [{"name": "get_weather", "input_schema": SCHEMA}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "14"}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "14"}]},
    "/messages/1/content/0",
)
SDKS: Final = {
    **dict.fromkeys(("openai", "openai-6", "openai-5", "openai-4"), CHAT),
    **dict.fromkeys(("@anthropic-ai/sdk", "anthropic-0"), MESSAGES),
}
"""The packages of tests/node/package.json: openai 7 and 6, and Anthropic's."""

READS: Final = ("whole", "iterate", "helper")


@dataclass(frozen=True, slots=True)
class Wire:
    """The simulator and the sidecar in front of it."""

    simulator: Simulator
    sidecar: Sidecar

    def play(self, answer: Json | None = None, **step: Any) -> None:
        """What the simulator does next, with its requests forgotten and its ids counted anew."""
        self.simulator.use({"steps": [{"answer": answer, **step}]} if answer else None)
        self.simulator.reset()

    async def ask(self, sdk: str, read: str, *messages: Json, direct: bool = False) -> Json:
        """What the SDK's user sees, see ask.mjs."""
        assert NODE is not None
        dialect = SDKS[sdk]
        base_url = (self.simulator.url if direct else self.sidecar.url) + dialect.prefix
        job = {
            "sdk": sdk,
            "base_url": base_url,
            "read": read,
            "asked": {**dialect.asked, "messages": list(messages)},
        }
        process = await asyncio.create_subprocess_exec(
            NODE, "ask.mjs", cwd=HERE, stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(json.dumps(job).encode()), HANG_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, err.decode()
        seen: Json = json.loads(out)
        return seen


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    async with AsyncExitStack() as stack:
        simulator = await stack.enter_async_context(Simulator())
        upstreams = dict.fromkeys(("openai", "anthropic"), simulator.url)
        data_dir = tmp_path_factory.mktemp("node") / "data"
        sidecar = await stack.enter_async_context(Sidecar(data_dir, upstreams, stage="enforce-tools"))
        yield Wire(simulator, sidecar)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("sdk", SDKS)
async def test_an_illegal_request_raises_bad_request_after_one_attempt(
    wire: Wire, sdk: str, read: str
) -> None:
    dialect = SDKS[sdk]
    wire.play()
    seen = await wire.ask(sdk, read, USER, dialect.stray)
    error = seen["error"]
    assert (seen["attempts"], seen["shown"], wire.simulator.requests) == (1, [], [])
    assert (error["name"], error["bad_request"], error["status"]) == ("BadRequestError", True, 400)
    assert f"result.orphan at {dialect.stray_at}:" in error["message"]
    assert "Send the assistant message with that call before it, or drop the result." in error["message"]
    if dialect is CHAT:
        assert (error["code"], error["param"]) == ("result.orphan", dialect.stray_at)
    else:
        assert error["body"]["error"]["type"] == "invalid_request_error"


async def place_in_call(wire: Wire, dialect: Dialect) -> int:
    """The offset behind the event of the streamed answer that holds the first half of a call's arguments."""
    wire.play(ANSWER)
    body = {**dialect.asked, "messages": [USER], "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(wire.simulator.url + dialect.path, json=body) as answer,
    ):
        stream = await answer.read()
        return stream.index(b"\n\n", stream.index(b"city")) + 2


def shows_call(shown: list[Json]) -> bool:
    return "get_weather" in json.dumps(shown)


ENDINGS: Final[dict[str, Json]] = {
    "eof": {"how": "eof"},
    "reset": {"how": "reset"},
    "clean end": {"clean_end": True},
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize("read", ["iterate", "helper"])
@pytest.mark.parametrize("sdk", SDKS)
async def test_a_stream_cut_inside_a_call_raises_and_shows_no_call(
    wire: Wire, sdk: str, read: str, ending: Json
) -> None:
    at = await place_in_call(wire, SDKS[sdk])
    wire.play(ANSWER, fault={"cut_at_byte": at, **ending})
    seen = await wire.ask(sdk, read, USER)
    assert seen["error"] is not None
    assert seen["error"]["api_error"]
    assert "stream." in seen["error"]["message"]
    assert "Let me" in json.dumps(seen["shown"])
    assert not shows_call(seen["shown"])
    assert (seen["attempts"], len(wire.simulator.requests)) == (1, 1)


@pytest.mark.parametrize("sdk", SDKS)
async def test_without_the_proxy_such_a_cut_shows_a_call_and_raises_nothing(wire: Wire, sdk: str) -> None:
    """The danger is real: else the test above would prove nothing."""
    at = await place_in_call(wire, SDKS[sdk])
    wire.play(ANSWER, fault={"cut_at_byte": at, "clean_end": True})
    seen = await wire.ask(sdk, "iterate", USER, direct=True)
    assert seen["error"] is None
    assert shows_call(seen["shown"])


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("sdk", SDKS)
async def test_legal_traffic_gives_the_same_objects_as_without_the_proxy(
    wire: Wire, sdk: str, read: str
) -> None:
    dialect = SDKS[sdk]
    for messages in ([USER], [USER, dialect.calling, dialect.answered]):
        seen = []
        for direct in (True, False):
            wire.play()
            seen.append(await wire.ask(sdk, read, *messages, direct=direct))
        assert seen[0] == seen[1]
        assert (seen[0]["error"], seen[0]["attempts"]) == (None, 1)
        assert shows_call(seen[0]["shown"]) is (len(messages) == 1)
