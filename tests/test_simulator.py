"""The provider simulator, seen by the official SDKs and on raw sockets."""

import ast
import asyncio
import json
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from anthropic import APIStatusError as AnthropicStatusError
from anthropic import AsyncAnthropic
from anthropic import BadRequestError as AnthropicBadRequest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIConnectionError, APIError, AsyncOpenAI, BadRequestError, InternalServerError

from turngate.proxy.simulator import (
    SCENARIOS,
    Received,
    Scenario,
    ScenarioError,
    Simulator,
    agent,
    chat,
    messages,
)
from turngate.proxy.simulator.__main__ import line
from turngate.proxy.simulator.dialect import Dialect, Json
from turngate.proxy.simulator.scenario import fragments, load, words

ROOT: Final = Path(__file__).parent.parent

SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS: Final[Any] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("get_weather", "get_time")
]
MESSAGES_TOOLS: Final[Any] = [{"name": name, "input_schema": SCHEMA} for name in ("get_weather", "get_time")]
QUESTION: Final[Any] = [{"role": "user", "content": "Weather?"}]
BOTH: Final[Any] = [{"role": "user", "content": "Ask get_time and get_weather, not get_weather2."}]


@pytest.fixture
async def simulator() -> AsyncIterator[Simulator]:
    async with Simulator() as simulator:
        yield simulator


@pytest.fixture
async def openai(simulator: Simulator) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=simulator.url + "/v1", api_key="k-secret", max_retries=0) as client:
        yield client


@pytest.fixture
async def anthropic(simulator: Simulator) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=simulator.url, api_key="k-secret", max_retries=0) as client:
        yield client


# The official SDKs.


async def test_openai_reads_an_echo_without_tools(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(model="m", messages=QUESTION)
    assert (answer.model, answer.choices[0].finish_reason) == ("m", "stop")
    assert answer.choices[0].message.content == "You said: Weather?"
    assert answer.usage is not None
    assert answer._request_id == "req_sim000001"


async def test_openai_reads_one_call_of_the_first_tool(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(model="m", messages=QUESTION, tools=CHAT_TOOLS)
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.type == "function"
    assert (call.id, call.function.name, call.function.arguments) == (
        "call_sim00000100",
        "get_weather",
        '{"city":"sample"}',
    )


async def test_openai_assembles_text_and_parallel_calls_from_a_stream(openai: AsyncOpenAI) -> None:
    async with openai.chat.completions.stream(
        model="m", messages=BOTH, tools=CHAT_TOOLS, stream_options={"include_usage": True}
    ) as stream:
        answer = await stream.get_final_completion()
    calls = answer.choices[0].message.tool_calls or []
    assert [(call.id, call.function.name) for call in calls] == [
        ("call_sim00000100", "get_weather"),
        ("call_sim00000101", "get_time"),
    ]
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "sample"}] * 2
    assert answer.choices[0].message.content == "I call get_weather, get_time."
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


async def test_openai_gets_tool_results_quoted(openai: AsyncOpenAI) -> None:
    asked = await openai.chat.completions.create(model="m", messages=BOTH, tools=CHAT_TOOLS)
    calls = asked.choices[0].message.tool_calls or []
    history: Any = [*BOTH, asked.choices[0].message.to_dict()]
    history += [
        {"role": "tool", "tool_call_id": call.id, "content": f"{at} C"} for at, call in enumerate(calls)
    ]
    answer = await openai.chat.completions.create(model="m", messages=history, tools=CHAT_TOOLS)
    assert answer.choices[0].message.content == "The tools said: 0 C; 1 C"


async def test_anthropic_reads_an_echo_without_tools(anthropic: AsyncAnthropic) -> None:
    answer = await anthropic.messages.create(model="m", max_tokens=9, messages=QUESTION)
    assert (answer.model, answer.stop_reason) == ("m", "end_turn")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "You said: Weather?"}]
    assert answer._request_id == "req_sim000001"


async def test_anthropic_assembles_text_and_parallel_calls_from_a_stream(anthropic: AsyncAnthropic) -> None:
    async with anthropic.messages.stream(
        model="m", max_tokens=9, messages=BOTH, tools=MESSAGES_TOOLS
    ) as stream:
        streamed = await stream.get_final_message()
    whole = await anthropic.messages.create(model="m", max_tokens=9, messages=BOTH, tools=MESSAGES_TOOLS)
    for number, answer in ((1, streamed), (2, whole)):
        assert answer.stop_reason == "tool_use"
        assert [(b.type, b.to_dict().get("id"), b.to_dict().get("input")) for b in answer.content] == [
            ("text", None, None),
            ("tool_use", f"toolu_sim{number:06d}00", {"city": "sample"}),
            ("tool_use", f"toolu_sim{number:06d}01", {"city": "sample"}),
        ]
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 0


async def test_anthropic_gets_results_of_several_messages_quoted(anthropic: AsyncAnthropic) -> None:
    history: Any = [
        *BOTH,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": id_, "name": "f", "input": {}} for id_ in "ab"],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "9 C"}]},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "noon"},
                {"type": "text", "text": "well?"},
            ],
        },
    ]
    answer = await anthropic.messages.create(model="m", max_tokens=9, messages=history, tools=MESSAGES_TOOLS)
    assert answer.content[0].to_dict()["text"] == "The tools said: 9 C; noon"


async def test_both_sdks_list_models(openai: AsyncOpenAI, anthropic: AsyncAnthropic) -> None:
    assert [model.id async for model in openai.models.list()] == ["sim-small", "sim-large"]
    assert [model.id async for model in anthropic.models.list()] == ["sim-small", "sim-large"]


CHOICES: Final[dict[str, tuple[Json, list[str], str]]] = {
    "none forbids calls": ({"tool_choice": "none"}, [], "stop"),
    "a named tool is the only one, and ends with stop": (
        {"tool_choice": {"type": "function", "function": {"name": "get_time"}}},
        ["get_time"],
        "stop",
    ),
    "no parallel calls": ({"parallel_tool_calls": False}, ["get_weather"], "tool_calls"),
    "all that are named": ({}, ["get_weather", "get_time"], "tool_calls"),
}


@pytest.mark.parametrize(("options", "names", "finish"), CHOICES.values(), ids=CHOICES)
async def test_chat_follows_the_tool_choice(
    openai: AsyncOpenAI, options: Json, names: list[str], finish: str
) -> None:
    answer = await openai.chat.completions.create(model="m", messages=BOTH, tools=CHAT_TOOLS, **options)
    calls = answer.to_dict()["choices"][0]["message"].get("tool_calls", [])  # type: ignore[index]
    assert [call["function"]["name"] for call in calls] == names
    assert answer.choices[0].finish_reason == finish


MESSAGES_CHOICES: Final[dict[str, tuple[Json, list[str]]]] = {
    "none forbids calls": ({"type": "none"}, []),
    "a named tool is the only one": ({"type": "tool", "name": "get_time"}, ["get_time"]),
    "no parallel calls": ({"type": "auto", "disable_parallel_tool_use": True}, ["get_weather"]),
}


@pytest.mark.parametrize(("choice", "names"), MESSAGES_CHOICES.values(), ids=MESSAGES_CHOICES)
async def test_messages_follows_the_tool_choice(
    anthropic: AsyncAnthropic, choice: Any, names: list[str]
) -> None:
    answer = await anthropic.messages.create(
        model="m", max_tokens=9, messages=BOTH, tools=MESSAGES_TOOLS, tool_choice=choice
    )
    assert [block.name for block in answer.content if block.type == "tool_use"] == names


# Refusals.


async def test_openai_raises_on_a_refusal(openai: AsyncOpenAI) -> None:
    orphan: Any = [*QUESTION, {"role": "tool", "tool_call_id": "call_1", "content": "14C"}]
    for stream in (False, True):
        with pytest.raises(BadRequestError) as caught:
            await openai.chat.completions.create(model="m", messages=orphan, stream=stream)
        assert "must be a response to a preceeding message with 'tool_calls'" in caught.value.message
        assert (caught.value.type, caught.value.param) == ("invalid_request_error", "messages.[1].role")


async def test_anthropic_raises_on_a_refusal(anthropic: AsyncAnthropic) -> None:
    orphan: Any = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_9"}]}]
    with pytest.raises(AnthropicBadRequest) as caught:
        await anthropic.messages.create(model="m", max_tokens=9, messages=orphan)
    assert "unexpected `tool_use_id` found in `tool_result` blocks: toolu_9" in caught.value.message
    assert caught.value.request_id == "req_sim000001"


KEYS: Final = st.sampled_from(["messages", "role", "content", "id", "type", "text", "name", "thread"])
TOOL_KEYS: Final = st.sampled_from(
    ["tools", "tool_calls", "function", "input_schema", "tool_call_id", "tool_use_id"]
)
LEAVES: Final = st.none() | st.integers() | st.sampled_from(["", "user", "assistant", "tool", "tool_use"])
BODIES: Final = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | TOOL_KEYS, inner, max_size=5),
    max_leaves=30,
)


@given(st.dictionaries(st.sampled_from(["messages", "tools", "tool_choice", "thread"]), BODIES))
@settings(deadline=None)
def test_any_json_object_is_read_and_answered_without_an_exception(body: Json) -> None:
    dialects: tuple[Dialect, ...] = (chat, messages)
    for dialect in dialects:
        agent.reply(dialect.read(body), 1)


# Raw sockets.

Ending = Literal["eof", "reset"]


def ask(
    path: str = "/v1/chat/completions", *, stream: bool = True, extra: str = "", method: str = "POST"
) -> bytes:
    body = json.dumps({"model": "m", "stream": stream, "messages": QUESTION})
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{extra}Content-Length: {len(body)}\r\n\r\n{body}".encode()


CLOSE: Final = "Connection: close\r\n"


async def exchange(simulator: Simulator, request: bytes) -> tuple[bytes, Ending]:
    """Send bytes, read until the connection ends: all that came, and how it ended.

    By a blocking socket, because asyncio's reader forgets what it has when a reset comes.
    """

    def talk() -> tuple[bytes, Ending]:
        received = b""
        with socket.create_connection(("127.0.0.1", simulator.port), timeout=30) as peer:
            peer.sendall(request)
            try:
                while data := peer.recv(65536):
                    received += data
            except ConnectionResetError:
                return received, "reset"
        return received, "eof"

    return await asyncio.to_thread(talk)


def unchunked(answer: bytes) -> tuple[bytes, bool]:
    """The body of a chunked answer, and whether the last chunk came."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        if length == 0:
            return body, True
        body, rest = body + rest[:length], rest[length + 2 :]
    return body, False


FRAMES: Final = ["data: é1\n\n", ": ping\n\n", "data: [DONE]\n\n"]
STREAM: Final = "".join(FRAMES).encode()
CUTS: Final[dict[str, tuple[Json, Ending, bool]]] = {
    "end of file": ({"how": "eof"}, "eof", False),
    "reset": ({"how": "reset"}, "reset", False),
    "proper end": ({"clean_end": True}, "eof", True),
}


@pytest.mark.parametrize(("options", "ending", "terminated"), CUTS.values(), ids=CUTS)
async def test_a_stream_is_cut_at_exactly_the_byte_asked_for(
    simulator: Simulator, options: Json, ending: Ending, terminated: bool
) -> None:
    for at in range(len(STREAM) + 2):
        simulator.use({"steps": [{"answer": {"frames": FRAMES}, "fault": {"cut_at_byte": at, **options}}]})
        answer, how = await exchange(simulator, ask(extra=CLOSE))
        assert (*unchunked(answer), how) == (STREAM[:at], terminated, ending)
        assert (simulator.requests[-1].ended, simulator.requests[-1].bytes_sent) == (
            "cut",
            min(at, len(STREAM)),
        )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_cut_answer_is_a_prefix_of_the_whole_one(simulator: Simulator, path: str) -> None:
    whole, _ = unchunked((await exchange(simulator, ask(path, extra=CLOSE)))[0])
    for at in range(0, len(whole), 97):
        simulator.reset()
        simulator.use({"steps": [{"fault": {"cut_at_byte": at}}]})
        answer, _ = await exchange(simulator, ask(path, extra=CLOSE))
        assert unchunked(answer) == (whole[:at], False)


async def test_a_reset_loses_nothing_of_a_long_stream(simulator: Simulator) -> None:
    frame = "data: " + "x" * 65_000 + "\n\n"
    fault = {"cut_at_byte": 3_000_000, "how": "reset"}
    simulator.use({"steps": [{"answer": {"frames": [frame] * 60}, "fault": fault}]})
    answer, how = await exchange(simulator, ask())
    assert (len(unchunked(answer)[0]), how) == (3_000_000, "reset")


async def test_a_cut_json_answer_announces_more_than_it_sends(simulator: Simulator) -> None:
    simulator.use(
        {"steps": [{"fault": {"cut_at_byte": 10}}, {"fault": {"cut_at_byte": 10, "clean_end": True}}]}
    )
    for announced in (False, True):
        answer, _ = await exchange(simulator, ask(stream=False, extra=CLOSE))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert len(body) == 10
        assert (b"content-length: 10\r\n" in head) is announced


async def test_a_stalled_stream_stays_open_until_the_client_goes(simulator: Simulator) -> None:
    simulator.use({"steps": [{"answer": {"frames": FRAMES}, "fault": {"stall_at_byte": 7}}]})
    reader, writer = await asyncio.open_connection("127.0.0.1", simulator.port)
    writer.write(ask())
    received = await simulator.wait_request()
    await reader.readuntil(b"7\r\n" + STREAM[:7] + b"\r\n")
    assert (received.ended, received.closed_at_s, simulator.connections_open) == (None, None, 1)
    writer.close()
    assert await simulator.wait_closed(received) >= received.arrived_s
    assert (received.ended, received.bytes_sent, simulator.connections_open) == ("client_closed", 7, 0)


async def test_an_interval_keeps_the_second_event_back(simulator: Simulator) -> None:
    simulator.use({"steps": [{"answer": {"frames": FRAMES}, "interval_s": 600}]})
    reader, writer = await asyncio.open_connection("127.0.0.1", simulator.port)
    writer.write(ask())
    await reader.readuntil(FRAMES[0].encode() + b"\r\n")
    writer.close()
    await simulator.wait_closed(simulator.requests[0])
    assert simulator.requests[0].bytes_sent == len(FRAMES[0].encode())


async def test_a_client_that_goes_before_the_answer_is_noticed(simulator: Simulator) -> None:
    simulator.use({"steps": [{"delay_s": 600}]})
    _, writer = await asyncio.open_connection("127.0.0.1", simulator.port)
    writer.write(ask())
    received = await simulator.wait_request()
    writer.transport.abort()
    await simulator.wait_closed(received)
    assert (received.status, received.ended) == (None, "client_closed")


async def test_closing_the_simulator_ends_what_is_open() -> None:
    async with Simulator({"steps": [{"fault": {"stall_at_byte": 0}}]}) as simulator:
        _, writer = await asyncio.open_connection("127.0.0.1", simulator.port)
        writer.write(ask())
        received = await simulator.wait_request()
    assert received.ended == "stopped"
    writer.close()
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", simulator.port)


async def test_equal_requests_get_equal_bytes_after_a_reset(simulator: Simulator) -> None:
    first, _ = await exchange(simulator, ask(extra=CLOSE))
    simulator.reset()
    assert (simulator.requests, simulator.connections) == ([], simulator.connections_open)
    assert (await exchange(simulator, ask(extra=CLOSE)))[0] == first


async def test_requests_that_arrive_together_are_answered_in_order(simulator: Simulator) -> None:
    request = ask(stream=False) + ask("/v1/messages?beta=true", stream=False) + ask(extra=CLOSE)
    answer, _ = await exchange(simulator, request)
    ids = re.findall(rb'"id":"((?:chatcmpl-|msg_)sim\d+)"', answer)
    assert list(dict.fromkeys(ids)) == [b"chatcmpl-sim000001", b"msg_sim000002", b"chatcmpl-sim000003"]
    assert [(r.path, r.ended) for r in simulator.requests] == [
        ("/v1/chat/completions", "complete"),
        ("/v1/messages?beta=true", "complete"),
        ("/v1/chat/completions", "complete"),
    ]
    assert simulator.connections == 1


async def test_a_request_is_kept_as_it_came_but_for_credentials(simulator: Simulator) -> None:
    secrets = "".join(
        f"{name}: k-secret\r\n" for name in ("Authorization", "X-Api-Key", "api-key", "Cookie", "X-Kept")
    )
    await exchange(
        simulator, ask("/p/v1/messages?x=%3A", extra="X-Twice: 1\r\nx-twice: 2\r\n" + secrets + CLOSE)
    )
    (received,) = simulator.requests
    assert received.path == "/p/v1/messages?x=%3A"
    assert received.headers[:7] == [
        (b"Host", b"x"),
        (b"X-Twice", b"1"),
        (b"x-twice", b"2"),
        (b"Authorization", b"<withheld>"),
        (b"X-Api-Key", b"<withheld>"),
        (b"api-key", b"<withheld>"),
        (b"Cookie", b"<withheld>"),
    ]
    assert received.header(b"x-kept") == b"k-secret"
    assert json.loads(received.body)["messages"] == QUESTION


async def test_the_callback_comes_before_the_answer(simulator: Simulator, openai: AsyncOpenAI) -> None:
    seen: list[tuple[str, int | None]] = []

    def look(received: Received) -> None:
        seen.append((json.loads(received.body)["model"], received.status))
        simulator.use({"steps": [{"answer": {"text": "decided late"}}]})

    simulator.on_request = look
    answer = await openai.chat.completions.create(model="m", messages=QUESTION)
    assert seen == [("m", None)]
    assert answer.choices[0].message.content == "decided late"


WIRE: Final[dict[str, tuple[bytes, bytes]]] = {
    "an unknown path is a 404": (ask("/v1/embeddings", extra=CLOSE), b"HTTP/1.1 404 Not Found\r\n"),
    "so is another method": (ask(extra=CLOSE, method="PUT"), b"HTTP/1.1 404 Not Found\r\n"),
    "what is no HTTP gets a 400": (b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 400 Bad Request\r\n"),
    "a body that is no JSON gets a 400": (
        b"POST /messages HTTP/1.1\r\nConnection: close\r\nContent-Length: 4\r\n\r\n{\xff\xff}",
        b"HTTP/1.1 400 Bad Request\r\n",
    ),
    "a body nested too deep gets a 400": (
        b"POST /messages HTTP/1.1\r\nConnection: close\r\nContent-Length: 99999\r\n\r\n" + b"[" * 99999,
        b"HTTP/1.1 400 Bad Request\r\n",
    ),
    "a client that waits is told to continue": (
        ask(extra="Expect: 100-continue\r\n" + CLOSE),
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n",
    ),
}


@pytest.mark.parametrize(("request_", "start"), WIRE.values(), ids=WIRE)
async def test_http(simulator: Simulator, request_: bytes, start: bytes) -> None:
    answer, ending = await exchange(simulator, request_)
    assert (answer[: len(start)], ending) == (start, "eof")


async def test_a_request_without_end_is_refused(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turngate.proxy.simulator.http.REQUEST_BYTES_MAX", 100)
    answer, _ = await exchange(simulator, b"GET / HTTP/1.1\r\nX: " + b"x" * 100)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert simulator.requests == []


async def test_a_head_request_gets_no_body(simulator: Simulator) -> None:
    answer, _ = await exchange(simulator, b"HEAD / HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert answer.endswith(b"\r\n\r\n")


async def test_a_stream_to_an_old_client_ends_with_the_connection(simulator: Simulator) -> None:
    simulator.use({"steps": [{"answer": {"frames": FRAMES}}]})
    answer, _ = await exchange(simulator, ask().replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body == STREAM
    assert b"transfer-encoding" not in head


async def test_a_stream_has_one_chunk_an_event(simulator: Simulator) -> None:
    answer, _ = await exchange(simulator, ask(extra=CLOSE))
    body, terminated = unchunked(answer)
    events = body.split(b"\n\n")[:-1]
    assert answer.partition(b"\r\n\r\n")[2] == b"".join(
        b"%x\r\n%b\n\n\r\n" % (len(event) + 2, event) for event in events
    ) + (b"0\r\n\r\n" if terminated else b"")
    assert events[-1] == b"data: [DONE]"


# Scenarios.


async def test_openai_raises_on_an_error_event(simulator: Simulator, openai: AsyncOpenAI) -> None:
    simulator.use({"steps": [{"when": {}, "fault": {"error_event_after": 2}}]})
    stream = await openai.chat.completions.create(model="m", messages=QUESTION, stream=True)
    chunks = aiter(stream)
    assert [(await anext(chunks)).object for _ in range(2)] == ["chat.completion.chunk"] * 2
    with pytest.raises(APIError, match="had an error while processing"):
        await anext(chunks)
    with pytest.raises(InternalServerError):
        await openai.chat.completions.create(model="m", messages=QUESTION)


async def test_anthropic_raises_on_an_error_event(simulator: Simulator, anthropic: AsyncAnthropic) -> None:
    simulator.use({"steps": [{"fault": {"error_event_after": 2}}]})
    with pytest.raises(AnthropicStatusError, match="Overloaded") as caught:
        async for _ in await anthropic.messages.create(
            model="m", max_tokens=9, messages=QUESTION, stream=True
        ):
            pass
    assert caught.value.status_code == 200


async def test_openai_sees_a_connection_error_when_a_stream_is_reset(
    simulator: Simulator, openai: AsyncOpenAI
) -> None:
    simulator.use({"steps": [{"fault": {"cut_at_byte": 400, "how": "reset"}}]})
    stream = await openai.chat.completions.create(model="m", messages=QUESTION, stream=True)
    with pytest.raises(APIConnectionError):
        async for _ in stream:
            pass


async def test_steps_serve_the_requests_they_match_and_wear_out(
    simulator: Simulator, openai: AsyncOpenAI
) -> None:
    simulator.use(
        {
            "steps": [
                {"when": {"contains": "cat"}, "times": 2, "answer": {"text": "cat"}},
                {"when": {"dialect": "messages"}, "answer": {"text": "wrong dialect"}},
                {"when": {"stream": True}, "answer": {"text": "wrong kind"}},
                {"answer": {"text": "first"}},
                {"answer": {"text": ["sec", "ond"]}},
                {"when": {"model": "other"}, "answer": {"text": "other"}},
            ]
        }
    )
    asked = [
        ("m", "a"),
        ("m", "a cat"),
        ("m", "a cat"),
        ("m", "a cat"),
        ("other", "a"),
        ("other", "a"),
        ("m", "a"),
    ]
    answers = []
    for model, text in asked:
        answer = await openai.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}]
        )
        answers.append(answer.choices[0].message.content)
    assert answers == ["first", "cat", "cat", "second", "other", "other", "You said: a"]


async def test_raw_fragments_are_streamed_as_they_stand(simulator: Simulator, openai: AsyncOpenAI) -> None:
    call = {"name": "f", "arguments": ['{"a', '": 1', "broken"]}
    simulator.use({"steps": [{"answer": {"calls": [call], "finish": "length"}}]})
    stream = await openai.chat.completions.create(model="m", messages=QUESTION, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    deltas = [delta for choice in choices for delta in choice.delta.tool_calls or []]
    assert [delta.function.arguments for delta in deltas if delta.function] == ["", '{"a', '": 1', "broken"]
    assert choices[-1].finish_reason == "length"


async def test_raw_fragments_that_are_no_json_make_an_empty_input(
    simulator: Simulator, anthropic: AsyncAnthropic
) -> None:
    simulator.use({"steps": [{"answer": {"calls": [{"name": "f", "arguments": ["{broken"]}]}}]})
    answer = await anthropic.messages.create(model="m", max_tokens=9, messages=QUESTION)
    assert [block.to_dict()["input"] for block in answer.content] == [{}]


async def test_headers_of_an_answer_are_set_and_left_out(simulator: Simulator) -> None:
    headers = {"Content-Type": "text/plain", "x-request-id": None, "retry-after": "3"}
    simulator.use({"steps": [{"answer": {"text": "t", "headers": headers}}]})
    head = (await exchange(simulator, ask(extra=CLOSE)))[0].partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert b"Content-Type: text/plain" in head
    assert b"retry-after: 3" in head
    assert not [line for line in head if line.startswith((b"x-request-id", b"content-type"))]


async def test_a_lenient_provider_takes_any_sequence(simulator: Simulator, openai: AsyncOpenAI) -> None:
    simulator.use({"refusals": False})
    orphan: Any = [{"role": "tool", "tool_call_id": "call_1", "content": "14C"}]
    answer = await openai.chat.completions.create(model="m", messages=orphan)
    assert answer.choices[0].message.content == "The tools said: 14C"


async def test_a_refused_request_uses_up_no_step(simulator: Simulator, openai: AsyncOpenAI) -> None:
    simulator.use({"steps": [{"answer": {"text": "first"}}]})
    with pytest.raises(BadRequestError):
        await openai.chat.completions.create(model="m", messages=[])
    answer = await openai.chat.completions.create(model="m", messages=QUESTION)
    assert answer.choices[0].message.content == "first"


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.json")), ids=lambda path: path.name)
def test_shipped_scenarios_are_valid_and_say_what_they_show(path: Path) -> None:
    assert load(path).description


async def test_sdks_get_over_the_overload_scenario_by_retrying(simulator: Simulator) -> None:
    simulator.use(SCENARIOS / "overloaded.json")
    async with AsyncOpenAI(base_url=simulator.url, api_key="k") as client:
        await client.chat.completions.create(model="m", messages=QUESTION)
    async with AsyncAnthropic(base_url=simulator.url, api_key="k") as other:
        await other.messages.create(model="m", max_tokens=9, messages=QUESTION)
    assert [received.status for received in simulator.requests] == [429, 429, 200, 529, 529, 200]


BROKEN: Final[dict[str, tuple[object, str]]] = {
    "an unknown key": ({"step": []}, "step: Extra inputs are not permitted"),
    "an unknown key in an answer": (
        {"steps": [{"answer": {"txt": "x"}}]},
        "steps.0.answer.txt: Extra inputs",
    ),
    "no number": ({"steps": [{"delay_s": "1"}]}, "steps.0.delay_s: Input should be a valid number"),
    "a negative pause": ({"steps": [{}, {"interval_s": -1}]}, "steps.1.interval_s: Input should be greater"),
    "an unknown dialect": ({"steps": [{"when": {"dialect": "x"}}]}, "steps.0.when.dialect: Input should be"),
    "a fault of no kind": (
        {"steps": [{"fault": {"how": "eof"}}]},
        "steps.0.fault: should have one of the keys",
    ),
    "two faults": (
        {"steps": [{"fault": {"cut_at_byte": 1, "stall_at_byte": 1}}]},
        "steps.0.fault.stall_at_byte: Extra inputs",
    ),
    "a negative byte": (
        {"steps": [{"fault": {"cut_at_byte": -1}}]},
        "steps.0.fault.cut_at_byte: Input should be",
    ),
    "two endings": (
        {"steps": [{"fault": {"cut_at_byte": 1, "how": "eof", "clean_end": True}}]},
        "steps.0.fault: Value error, clean_end and how exclude each other",
    ),
    "text and an error": (
        {"steps": [{"answer": {"text": "x", "error": {"status": 500, "type": "t", "message": "m"}}}]},
        "steps.0.answer: Value error, content, error and frames exclude each other, got text, error",
    ),
    "an error that is none": (
        {"steps": [{"answer": {"error": {"status": 200, "type": "t", "message": "m"}}}]},
        "steps.0.answer.error.status: Input should be greater",
    ),
    "arguments as text": (
        {"steps": [{"answer": {"calls": [{"name": "f", "arguments": "{}"}]}}]},
        "steps.0.answer.calls.0.arguments: Value error, should be an object or a list of raw fragments",
    ),
    "a list": ([], "(top): Input should be"),
}


@pytest.mark.parametrize(("scenario", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_scenario_names_its_key(tmp_path: Path, scenario: object, message: str) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(scenario))
    with pytest.raises(ScenarioError) as caught:
        Simulator(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("content", [None, "{"])
def test_a_scenario_file_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "scenario.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ScenarioError, match=re.escape(f"{path}: ")):
        Simulator(path)


def test_a_scenario_is_taken_as_model_and_as_object() -> None:
    value: Json = {"steps": [{"fault": {"cut_at_byte": 1}}]}
    assert Simulator(Scenario.model_validate(value)).scenario == Simulator(value).scenario


# Small parts.


@given(st.text())
def test_text_is_cut_into_words_without_loss(text: str) -> None:
    assert "".join(words(text)) == text


@given(st.dictionaries(st.text(), st.integers() | st.text()))
def test_arguments_are_cut_into_fragments_without_loss(arguments: Json) -> None:
    assert json.loads("".join(fragments(arguments))) == arguments


NODE: Final[Json] = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
SCHEMAS: Final[dict[str, tuple[Json, Json]]] = {
    "no schema": ({}, {}),
    "only what is required": ({"properties": {"a": {"type": "string"}}}, {}),
    "each type": (
        {
            "properties": {
                "s": {"type": "string", "minLength": 8},
                "t": {"type": "string", "maxLength": 3},
                "i": {"type": "integer", "minimum": 5},
                "n": {"type": "number", "maximum": 0},
                "b": {"type": "boolean"},
                "z": {"type": "null"},
                "l": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
                "e": {"enum": ["x", "y"]},
                "c": {"const": 7},
                "u": {"type": ["string", "null"]},
                "o": {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"]},
            },
            "required": ["s", "t", "i", "n", "b", "z", "l", "e", "c", "u", "o"],
        },
        {
            "s": "sample..",
            "t": "sam",
            "i": 5,
            "n": 0,
            "b": True,
            "z": None,
            "l": [1, 1],
            "e": "x",
            "c": 7,
            "u": "sample",
            "o": {"k": True},
        },
    ),
    "references and unions, as pydantic writes them": (
        {
            "properties": {
                "p": {"$ref": "#/$defs/P"},
                "q": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
            "required": ["p", "q"],
            "$defs": {"P": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
        },
        {"p": {"x": True}, "q": 1},
    ),
}


@pytest.mark.parametrize(("schema", "value"), SCHEMAS.values(), ids=SCHEMAS)
def test_arguments_fit_the_schema(schema: Json, value: Json) -> None:
    assert agent.arguments(schema) == value


def test_a_schema_that_contains_itself_comes_to_an_end() -> None:
    assert json.dumps(agent.arguments(NODE)).count("next") == agent.SCHEMA_DEPTH_MAX


def test_the_simulator_imports_nothing_else_of_the_package() -> None:
    for path in (ROOT / "proxy" / "simulator").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            ours = [name for name in names if name.startswith("turngate")]
            assert [name for name in ours if not name.startswith("turngate.proxy.simulator")] == []


# The command.


def _line(status: int | None, ended: Any) -> Received:
    return Received("GET", "/\x1b[2J\x9b", [], "1.1", True, status=status, ended=ended)


def test_a_line_is_plain_and_safe_for_a_terminal() -> None:
    assert line(_line(200, "complete"), coloured=False) == "GET /?[2J? 200 0 bytes complete"


COLOURS: Final = {
    "well": (200, "complete", "\x1b[32m"),
    "cut": (200, "cut", "\x1b[33m"),
    "refused": (400, "complete", "\x1b[31m"),
    "never begun": (None, "client_closed", "\x1b[31m"),
}


@pytest.mark.parametrize(("status", "ended", "colour"), COLOURS.values(), ids=COLOURS)
def test_a_line_is_coloured_by_its_outcome(status: int | None, ended: str, colour: str) -> None:
    assert line(_line(status, ended), coloured=True).startswith(colour)


@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGTERM])
async def test_the_command_tells_its_address_and_each_request(interrupt: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "turngate.proxy.simulator", "--scenario", "broken-stream.json"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        said = [(await process.stdout.readline()).decode() for _ in range(3)]
        url = said[0].split()[3]
        assert said[1:] == [
            f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=any\n",
            f"  export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY=any\n",
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(ask())
        await reader.read()
        writer.close()
        assert await process.stdout.readline() == b"POST /v1/chat/completions 200 900 bytes cut\n"
        process.send_signal(interrupt)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("options", [["--listen", "nowhere"], ["--scenario", "/nowhere.json"]])
async def test_the_command_refuses_what_it_cannot_use(options: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "turngate.proxy.simulator", *options), stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert options[1] in said.decode()
