"""The official SDKs, their retries at the defaults, through the running proxy where tool calls are enforced.

The simulator is the provider. What an app sees through the proxy is compared with what it sees straight from there.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anthropic
import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from running import Sidecar, ledger_rows

from turngate.proxy.simulator import Simulator

pytestmark = pytest.mark.asyncio(loop_scope="module")

HANG_S: Final = 120.0
"""Only what never comes meets this bound."""

SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMES: Final = ("get_weather", "get_time")
CHAT: Final = {
    "model": "m",
    "tools": [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in NAMES],
}
MESSAGES: Final = {
    "model": "m",
    "max_tokens": 99,
    "tools": [{"name": n, "input_schema": SCHEMA} for n in NAMES],
}


@dataclass(frozen=True, slots=True)
class Sdk:
    """One SDK in its three manners of asking, with equal results for equal answers. `client` is one of its clients."""

    whole: Callable[..., Awaitable[Any]]
    iterate: Callable[..., AsyncIterator[Any]]
    helper: Callable[..., AsyncIterator[Any]]
    shows_call: Callable[[Any], bool]
    """Whether an event of `iterate` or `helper` holds anything of a tool call."""
    broken: type[Exception]
    """What it raises inside a stream."""
    bad_request: type[Exception]
    server_error: type[Exception]


async def chat_whole(client: AsyncOpenAI, **asked: Any) -> Any:
    return await client.chat.completions.create(**asked)


async def chat_iterate(client: AsyncOpenAI, **asked: Any) -> AsyncIterator[Any]:
    async with await client.chat.completions.create(stream=True, **asked) as stream:
        async for chunk in stream:
            yield chunk


async def chat_helper(client: AsyncOpenAI, **asked: Any) -> AsyncIterator[Any]:
    async with client.chat.completions.stream(**asked) as stream:
        async for event in stream:
            yield event
        yield await stream.get_final_completion()


def chat_shows_call(event: Any) -> bool:
    if event_type := getattr(event, "type", ""):
        return event_type.startswith("tool_calls.") or (
            event_type == "chunk" and chat_shows_call(event.chunk)
        )
    if event.object == "chat.completion":
        return any(choice.message.tool_calls for choice in event.choices)
    return any(choice.delta.tool_calls for choice in event.choices)


async def messages_whole(client: AsyncAnthropic, **asked: Any) -> Any:
    return await client.messages.create(**asked)


async def messages_iterate(client: AsyncAnthropic, **asked: Any) -> AsyncIterator[Any]:
    async with await client.messages.create(stream=True, **asked) as stream:
        async for event in stream:
            yield event


async def messages_helper(client: AsyncAnthropic, **asked: Any) -> AsyncIterator[Any]:
    async with client.messages.stream(**asked) as stream:
        async for event in stream:
            yield event
        yield await stream.get_final_message()


def messages_shows_call(event: Any) -> bool:
    if event.type == "message":
        return any(block.type == "tool_use" for block in event.content)
    if event.type in ("content_block_start", "content_block_stop") and hasattr(event, "content_block"):
        return bool(event.content_block.type == "tool_use")
    in_delta = event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    return bool(in_delta or event.type == "input_json")


SDKS: Final = {
    "openai": Sdk(
        *(chat_whole, chat_iterate, chat_helper, chat_shows_call),
        *(openai.APIError, openai.BadRequestError, openai.InternalServerError),
    ),
    "anthropic": Sdk(
        *(messages_whole, messages_iterate, messages_helper, messages_shows_call),
        *(anthropic.APIStatusError, anthropic.BadRequestError, anthropic.InternalServerError),
    ),
}
ASKED: Final[dict[str, dict[str, Any]]] = {"openai": CHAT, "anthropic": MESSAGES}


@dataclass(frozen=True, slots=True)
class Wire:
    """A simulator, the sidecar in front of it, and by SDK name a client of each."""

    simulator: Simulator
    sidecar: Sidecar
    direct: dict[str, Any]
    through: dict[str, Any]

    def play(self, answer: dict[str, Any] | None = None, **step: Any) -> None:
        """What the simulator does next, with its requests forgotten and its ids counted anew."""
        self.simulator.use({"steps": [{"answer": answer, **step}]} if answer else None)
        self.simulator.reset()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    async with AsyncExitStack() as stack:
        simulator = await stack.enter_async_context(Simulator())
        upstreams = dict.fromkeys(SDKS, simulator.url)
        data_dir = tmp_path_factory.mktemp("sdk") / "data"
        sidecar = await stack.enter_async_context(Sidecar(data_dir, upstreams, stage="enforce-tools"))
        clients: list[dict[str, Any]] = []
        for url in (simulator.url, sidecar.url):
            chat = AsyncOpenAI(base_url=url + "/v1", api_key="k")
            messages = AsyncAnthropic(base_url=url, api_key="k")
            clients.append(
                {
                    "openai": await stack.enter_async_context(chat),
                    "anthropic": await stack.enter_async_context(messages),
                }
            )
        yield Wire(simulator, sidecar, *clients)


async def all_of(events: AsyncIterator[Any]) -> list[Any]:
    """Each event as plain values, taken at once: helpers go on changing the objects they have given out."""
    return [event.model_dump() async for event in events]


# Legal traffic


def question(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


CHAT_CALLS: Final = [
    {"id": id_, "type": "function", "function": {"name": "get_time", "arguments": "{}"}} for id_ in ("a", "b")
]
CHAT_TURN: Final = {"role": "assistant", "content": None, "tool_calls": CHAT_CALLS}
MESSAGES_CALLS: Final[list[dict[str, Any]]] = [
    {"type": "tool_use", "id": id_, "name": "get_time", "input": {}} for id_ in ("a", "b")
]
MESSAGES_TURN: Final = {"role": "assistant", "content": MESSAGES_CALLS}


def chat_result(id_: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": f"{id_} C"}


def messages_results(*ids: str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": id_, "content": f"{id_} C"} for id_ in ids],
    }


HISTORIES: Final[dict[str, dict[str, list[dict[str, Any]]]]] = {
    "openai": {"results": [*question("?"), CHAT_TURN, chat_result("b"), chat_result("a")]},
    "anthropic": {"results": [*question("?"), MESSAGES_TURN, messages_results("b", "a")]},
}
LEGAL: Final[dict[str, dict[str, Any]]] = {
    "text": {"messages": question("Hej å"), "tools": []},
    "text where tools are declared": {"messages": "results"},
    "a call": {"messages": question("Weather?")},
    "parallel calls": {"messages": question("Ask get_time and get_weather.")},
}


@pytest.mark.parametrize("name", SDKS)
@pytest.mark.parametrize("changes", LEGAL.values(), ids=LEGAL)
async def test_legal_traffic_gives_the_same_objects_as_without_the_proxy(
    wire: Wire, name: str, changes: dict[str, Any]
) -> None:
    sdk = SDKS[name]
    asked = {**ASKED[name], **changes}
    if asked["messages"] == "results":
        asked["messages"] = HISTORIES[name]["results"]
    if not asked["tools"]:
        del asked["tools"]  # an empty list is not what apps send
    seen = []
    for clients in (wire.direct, wire.through):
        wire.play()
        whole = await sdk.whole(clients[name], **asked)
        streamed = await all_of(sdk.iterate(clients[name], **asked))
        helped = await all_of(sdk.helper(clients[name], **asked))
        assert len(wire.simulator.requests) == 3
        seen.append((whole._request_id, whole.model_dump(), streamed, helped))
    assert seen[0] == seen[1]


# Illegal requests

CALL_A: Final = {**CHAT_TURN, "tool_calls": CHAT_CALLS[:1]}
USE_A: Final = {**MESSAGES_TURN, "content": MESSAGES_CALLS[:1]}
TEXT: Final = [{"type": "text", "text": "first"}]
ILLEGAL: Final = {
    "chat, orphan": ("openai", [*question("?"), chat_result("x")], "result.orphan", "/messages/1"),
    "chat, unanswered": (
        "openai",
        [*question("?"), CHAT_TURN, chat_result("b"), {"role": "assistant", "content": "."}, *question("!")],
        "call.unanswered",
        "/messages/1/tool_calls/0",
    ),
    "chat, waiting": ("openai", [*question("?"), CALL_A], "call.unanswered", "/messages/1/tool_calls/0"),
    "chat, duplicate": (
        "openai",
        [*question("?"), CALL_A, chat_result("a"), chat_result("a")],
        "result.duplicate",
        "/messages/3",
    ),
    "chat, misplaced": (
        "openai",
        [*question("?"), CALL_A, *question("!"), chat_result("a")],
        "result.misplaced",
        "/messages/3",
    ),
    "messages, orphan": (
        "anthropic",
        [*question("?"), messages_results("x")],
        "result.orphan",
        "/messages/1/content/0",
    ),
    "messages, unanswered": (
        "anthropic",
        [*question("?"), MESSAGES_TURN, messages_results("b"), MESSAGES_TURN, messages_results("a", "b")],
        "call.unanswered",
        "/messages/1/content/0",
    ),
    "messages, waiting": (
        "anthropic",
        [*question("?"), USE_A],
        "call.unanswered",
        "/messages/1/content/0",
    ),
    "messages, duplicate": (
        "anthropic",
        [*question("?"), USE_A, messages_results("a", "a")],
        "result.duplicate",
        "/messages/2/content/1",
    ),
    "messages, misplaced": (
        "anthropic",
        [*question("?"), USE_A, {"role": "user", "content": [*TEXT, *messages_results("a")["content"]]}],
        "result.misplaced",
        "/messages/2/content/1",
    ),
}
REMEDIES: Final = {
    "result.orphan": "Send the assistant message with that call before it, or drop the result.",
    "call.unanswered": "Send its result (success, error or cancelled) right behind the assistant message.",
    "result.duplicate": "Keep one result per call.",
    "result.misplaced": "Put all results right behind that message, before anything else.",
}


async def test_an_illegal_request_raises_once_and_never_reaches_the_provider(tmp_path: Path) -> None:
    states: list[tuple[str, str, str]] = []
    async with AsyncExitStack() as stack:
        simulator = await stack.enter_async_context(Simulator())
        upstreams = dict.fromkeys(SDKS, simulator.url)
        sidecar = await stack.enter_async_context(
            Sidecar(tmp_path / "data", upstreams, stage="enforce-tools")
        )
        clients: dict[str, Any] = {
            "openai": await stack.enter_async_context(AsyncOpenAI(base_url=sidecar.url + "/v1", api_key="k")),
            "anthropic": await stack.enter_async_context(AsyncAnthropic(base_url=sidecar.url, api_key="k")),
        }
        for case, (name, history, reason, at) in ILLEGAL.items():
            sdk = SDKS[name]
            asked = {**ASKED[name], "messages": history}
            for ask in (sdk.whole(clients[name], **asked), all_of(sdk.iterate(clients[name], **asked))):
                with pytest.raises(sdk.bad_request) as raised:
                    await ask
                operation = raised.value.response.headers["x-turngate-operation"]  # type: ignore[attr-defined]
                states.append((operation, "WAITING" if "waiting" in case else "REJECTED", reason))
                text = str(raised.value)
                assert f"{reason} at {at}:" in text, case
                assert REMEDIES[reason] in text, case
        assert simulator.requests == []
    # One row a request: no SDK has tried again.
    assert ledger_rows(tmp_path / "data") == states


# Broken streams

ONE_CALL: Final = {
    "text": ["Hej å. "],
    "calls": [{"name": "get_weather", "arguments": ['{"city":', '"Oslo"}']}],
}
TWO_CALLS: Final = {"calls": [{"name": name, "arguments": ['{"city":"Oslo"}']} for name in NAMES]}


def choice_frame(index: int, delta: dict[str, Any], finish: str | None = None) -> str:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


def call_delta(arguments: str, **opening: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "function": {"name": "get_time", "arguments": arguments}, **opening}]}


TWO_CHOICES: Final = {
    "frames": [
        choice_frame(0, {"role": "assistant", "content": "No."}),
        choice_frame(1, call_delta('{"a":', id="call_1", type="function")),
        choice_frame(0, {}, "stop"),
        choice_frame(1, {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}),
        choice_frame(1, {}, "tool_calls"),
        "data: [DONE]\n\n",
    ]
}


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a provider streams, and to which request."""

    name: str
    answer: dict[str, Any]
    asked: dict[str, Any]

    @classmethod
    def to(cls, name: str, answer: dict[str, Any], **more: Any) -> "Streamed":
        return cls(name, answer, {**ASKED[name], "messages": question("Weather?"), **more})


STREAMS: Final = {
    "openai, text and a call": Streamed.to("openai", ONE_CALL),
    "openai, parallel calls": Streamed.to("openai", TWO_CALLS),
    "openai, two choices": Streamed.to("openai", TWO_CHOICES, n=2),
    "anthropic, text and a call": Streamed.to("anthropic", ONE_CALL),
    "anthropic, parallel calls": Streamed.to("anthropic", TWO_CALLS),
}
ENDINGS: Final[dict[str, dict[str, Any]]] = {"eof": {"how": "eof"}, "clean end": {"clean_end": True}}
TERMINAL: Final = {"openai": b'"finish_reason":"tool_calls"}', "anthropic": b'"type":"message_stop"}'}


async def stream_bytes(wire: Wire, streamed: Streamed) -> bytes:
    """The simulator's stream as it is on the wire."""
    wire.play(streamed.answer)
    client = wire.direct[streamed.name]
    endpoint = client.chat.completions if streamed.name == "openai" else client.messages
    async with endpoint.with_streaming_response.create(**streamed.asked, stream=True) as response:
        return bytes(await response.read())


def terminal_end(name: str, stream: bytes) -> int:
    """The offset behind the last byte of the terminal event."""
    return stream.index(b"\n\n", stream.index(TERMINAL[name])) + 2


async def outcome(sdk: Sdk, events: AsyncIterator[Any]) -> tuple[bool, bool]:
    """(whether the SDK raised, whether the app saw anything of a call)."""
    seen = False
    try:
        async for event in events:
            seen = seen or sdk.shows_call(event)
    except sdk.broken:
        return True, seen
    return False, seen


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize("streamed", STREAMS.values(), ids=STREAMS)
async def test_a_stream_cut_at_any_byte_before_its_end_raises_and_shows_no_call(
    wire: Wire, streamed: Streamed, ending: dict[str, Any]
) -> None:
    sdk, client = SDKS[streamed.name], wire.through[streamed.name]
    end = terminal_end(streamed.name, await stream_bytes(wire, streamed))

    async def cut_at(at: int) -> tuple[int, bool, bool]:
        # Both manners of reading meet every offset that is tried, in one ending or the other.
        read = sdk.iterate if (at // CUT_STEP + (ending is ENDINGS["eof"])) % 2 else sdk.helper
        asked = {**streamed.asked, "messages": question(f"cut at {at}.")}
        return (at, *await outcome(sdk, read(client, **asked)))

    found = []
    cuts = range(CUT_FROM[ending is ENDINGS["eof"]], end, CUT_STEP)
    for batch in batches(cuts):
        wire.simulator.use({"steps": [cut_step(streamed.answer, at, ending) for at in batch]})
        wire.simulator.reset()
        found += await asyncio.gather(*map(cut_at, batch))
        assert len(wire.simulator.requests) == len(batch)
    assert end > 500
    assert found == [(at, True, False) for at in cuts]


CUT_STEP: Final = int(os.environ.get("CUT_STEP", "13"))
"""1: at every byte, as `make torture` does."""
CUT_FROM: Final = (0, CUT_STEP // 2)
"""The two endings share out the offsets."""


def batches(offsets: range) -> list[range]:
    """So many at once that the three processes of the test do not wait for each other."""
    return [offsets[first : first + 16] for first in range(0, len(offsets), 16)]


def cut_step(answer: dict[str, Any], at: int, ending: dict[str, Any]) -> dict[str, Any]:
    return {"when": {"contains": f"cut at {at}."}, "answer": answer, "fault": {"cut_at_byte": at, **ending}}


@pytest.mark.parametrize("streamed", STREAMS.values(), ids=STREAMS)
async def test_a_stream_reset_before_its_end_raises_and_shows_no_call(wire: Wire, streamed: Streamed) -> None:
    sdk, client = SDKS[streamed.name], wire.through[streamed.name]
    end = terminal_end(streamed.name, await stream_bytes(wire, streamed))
    for at in {*range(0, end, 97), end - 1}:
        wire.play(streamed.answer, fault={"cut_at_byte": at, "how": "reset"})
        assert await outcome(sdk, sdk.iterate(client, **streamed.asked)) == (True, False), at


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize("streamed", STREAMS.values(), ids=STREAMS)
async def test_a_stream_cut_behind_its_terminal_event_gives_what_the_whole_one_gives(
    wire: Wire, streamed: Streamed, ending: dict[str, Any]
) -> None:
    sdk, name = SDKS[streamed.name], streamed.name
    stream = await stream_bytes(wire, streamed)
    for read in (sdk.iterate, sdk.helper):
        wire.play(streamed.answer)
        whole = await all_of(read(wire.direct[name], **streamed.asked))
        for at in range(terminal_end(name, stream), len(stream) + 1):
            wire.play(streamed.answer, fault={"cut_at_byte": at, **ending})
            assert await all_of(read(wire.through[name], **streamed.asked)) == whole, at


@pytest.mark.parametrize("streamed", STREAMS.values(), ids=STREAMS)
async def test_without_the_proxy_such_a_cut_shows_a_call_and_raises_nothing(
    wire: Wire, streamed: Streamed
) -> None:
    """The danger is real: else the tests above would prove nothing."""
    sdk = SDKS[streamed.name]
    end = terminal_end(streamed.name, await stream_bytes(wire, streamed))
    wire.play(streamed.answer, fault={"cut_at_byte": end - 1, "clean_end": True})
    seen = await outcome(sdk, sdk.iterate(wire.direct[streamed.name], **streamed.asked))
    assert seen == (False, True)


# Broken JSON answers


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize("name", SDKS)
async def test_a_json_answer_cut_at_any_byte_raises_once(
    wire: Wire, name: str, ending: dict[str, Any]
) -> None:
    sdk = SDKS[name]
    wire.play(ONE_CALL)
    await sdk.whole(wire.direct[name], **ASKED[name], messages=question("Weather?"))
    length = wire.simulator.requests[0].bytes_sent

    async def cut_at(at: int) -> None:
        with pytest.raises(sdk.server_error) as raised:
            await sdk.whole(wire.through[name], **ASKED[name], messages=question(f"cut at {at}."))
        assert "stream.truncated" in str(raised.value)

    for batch in batches(range(0, length, CUT_STEP)):
        wire.simulator.use({"steps": [cut_step(ONE_CALL, at, ending) for at in batch]})
        wire.simulator.reset()
        await asyncio.gather(*map(cut_at, batch))
        assert len(wire.simulator.requests) == len(batch)
    assert length > 300
