"""The wire formats: what each body and frame says, what we answer in the same words, and that no bytes can hurt."""

import json
import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngate.adapters import sse
from turngate.adapters.dialect import Ambiguous, Dialect, Trouble, Undecodable
from turngate.adapters.keys import repeats_key
from turngate.adapters.registry import CHAT, DIALECTS, MESSAGES, by_body, by_path
from turngate.validators.graph import Kind, Role
from turngate.validators.rules import Level, Reason, judge
from turngate.validators.stream import (
    Assembler,
    CallClosed,
    CallDelta,
    CallNamed,
    CallOpened,
    ChoiceFinished,
    EndedEarly,
    Ending,
    Finish,
    FrameUnreadable,
    ProviderFailed,
    StreamEvent,
    TextDelta,
    TurnEnded,
    TurnStarted,
)

Json = dict[str, Any]
S, D, U, A, T = Role.SYSTEM, Role.DEVELOPER, Role.USER, Role.ASSISTANT, Role.TOOL
BOTH = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


def blocks(dialect: Dialect, message: object) -> list[tuple[object, ...]]:
    """(role, kind, pointer, call id, name) of each block of one message, without the Nones at the end."""
    body = json.dumps({"model": "m", "messages": [message]}).encode()
    rows: list[list[object]] = [
        [b.role, b.kind, b.at, b.call_id, b.name] for b in dialect.parse_request(body).blocks
    ]
    for row in rows:
        while row[-1] is None:
            row.pop()
    return [tuple(row) for row in rows]


def function(name: str, arguments: str = "{}") -> Json:
    return {"name": name, "arguments": arguments}


CHAT_MESSAGES: dict[str, tuple[object, list[tuple[object, ...]]]] = {
    "system": ({"role": "system", "content": "x"}, [(S, Kind.TEXT, "/messages/0/content")]),
    "developer": ({"role": "developer", "content": "x"}, [(D, Kind.TEXT, "/messages/0/content")]),
    "unknown role": ({"role": "human", "content": "x"}, [(Role.UNKNOWN, Kind.TEXT, "/messages/0/content")]),
    "no role": ({"content": "x"}, [(Role.UNKNOWN, Kind.TEXT, "/messages/0/content")]),
    "parts of every kind": (
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "x"},
                {"type": "image_url", "image_url": {"url": "data:,"}},
                {"type": "input_audio", "input_audio": {}},
                {"type": "file", "file": {}},
                {"type": "hologram"},
                "bare text",
            ],
        },
        [
            (U, Kind.TEXT, "/messages/0/content/0"),
            (U, Kind.IMAGE, "/messages/0/content/1"),
            (U, Kind.AUDIO, "/messages/0/content/2"),
            (U, Kind.FILE, "/messages/0/content/3"),
            (U, Kind.UNKNOWN, "/messages/0/content/4"),
            (U, Kind.TEXT, "/messages/0/content/5"),
        ],
    ),
    "text before calls": (
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "a", "type": "function", "function": function("f")},
                {"id": "b", "type": "custom", "custom": {"name": "g", "input": "x"}},
                {"type": "function"},
            ],
            "content": "let me see",
        },
        [
            (A, Kind.TEXT, "/messages/0/content"),
            (A, Kind.TOOL_CALL, "/messages/0/tool_calls/0", "a", "f"),
            (A, Kind.TOOL_CALL, "/messages/0/tool_calls/1", "b", "g"),
            (A, Kind.TOOL_CALL, "/messages/0/tool_calls/2"),
        ],
    ),
    "null content and calls": ({"role": "assistant", "content": None, "tool_calls": []}, []),
    "refusal": ({"role": "assistant", "refusal": "no"}, [(A, Kind.REFUSAL, "/messages/0/refusal")]),
    "legacy call": (
        {"role": "assistant", "content": None, "function_call": function("f")},
        [(A, Kind.TOOL_CALL, "/messages/0/function_call", None, "f")],
    ),
    "result": (
        {"role": "tool", "tool_call_id": "a", "content": "x"},
        [(T, Kind.TOOL_RESULT, "/messages/0", "a")],
    ),
    "result of parts is one block": (
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x"}] * 2},
        [(T, Kind.TOOL_RESULT, "/messages/0", "a")],
    ),
    "legacy result": (
        {"role": "function", "name": "f", "content": "x"},
        [(T, Kind.TOOL_RESULT, "/messages/0", None, "f")],
    ),
}

MESSAGES_MESSAGES: dict[str, tuple[object, list[tuple[object, ...]]]] = {
    "string": ({"role": "user", "content": "x"}, [(U, Kind.TEXT, "/messages/0/content")]),
    "system inside messages": ({"role": "system", "content": "x"}, [(S, Kind.TEXT, "/messages/0/content")]),
    "unknown role": ({"role": "model", "content": "x"}, [(Role.UNKNOWN, Kind.TEXT, "/messages/0/content")]),
    "nothing": ({"role": "assistant", "content": []}, []),
    "a user's blocks": (
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "x"},
                {"type": "text", "text": "x"},
                {"type": "image"},
                {"type": "document"},
                {"type": "search_result"},
                {"type": "container_upload"},
                {"type": "hologram"},
                {"type": "compaction"},
            ],
        },
        [
            (U, Kind.TOOL_RESULT, "/messages/0/content/0", "a"),
            (U, Kind.TEXT, "/messages/0/content/1"),
            (U, Kind.IMAGE, "/messages/0/content/2"),
            (U, Kind.DOCUMENT, "/messages/0/content/3"),
            (U, Kind.SEARCH_RESULT, "/messages/0/content/4"),
            (U, Kind.FILE, "/messages/0/content/5"),
            (U, Kind.UNKNOWN, "/messages/0/content/6"),
            (U, Kind.COMPACTION, "/messages/0/content/7"),
        ],
    ),
    "an assistant's blocks": (
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "x", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                {"type": "mcp_tool_use", "id": "m", "name": "f", "input": {}},
                {"type": "mcp_tool_result", "tool_use_id": "m", "content": []},
                {"type": "tool_use", "id": "a", "name": "f", "input": {}},
            ],
        },
        [
            (A, Kind.THINKING, "/messages/0/content/0"),
            (A, Kind.REDACTED_THINKING, "/messages/0/content/1"),
            (A, Kind.SERVER_TOOL_CALL, "/messages/0/content/2", "s", "web_search"),
            (A, Kind.SERVER_TOOL_RESULT, "/messages/0/content/3", "s"),
            (A, Kind.SERVER_TOOL_CALL, "/messages/0/content/4", "m", "f"),
            (A, Kind.SERVER_TOOL_RESULT, "/messages/0/content/5", "m"),
            (A, Kind.TOOL_CALL, "/messages/0/content/6", "a", "f"),
        ],
    ),
}


@pytest.mark.parametrize(("message", "expected"), CHAT_MESSAGES.values(), ids=CHAT_MESSAGES)
def test_a_chat_message_becomes_blocks(message: object, expected: list[tuple[object, ...]]) -> None:
    assert blocks(CHAT, message) == expected


@pytest.mark.parametrize(("message", "expected"), MESSAGES_MESSAGES.values(), ids=MESSAGES_MESSAGES)
def test_a_messages_message_becomes_blocks(message: object, expected: list[tuple[object, ...]]) -> None:
    assert blocks(MESSAGES, message) == expected


USES_TOOLS: dict[str, tuple[Dialect, Json, bool]] = {
    "chat: nothing": (CHAT, {}, False),
    "chat: empty list": (CHAT, {"tools": []}, False),
    "chat: null": (CHAT, {"tools": None}, False),
    "chat: declared": (CHAT, {"tools": [{"type": "function"}]}, True),
    "chat: declared the old way": (CHAT, {"functions": [{"name": "f"}]}, True),
    "chat: only in history": (
        CHAT,
        {"messages": [{"role": "tool", "tool_call_id": "a", "content": "x"}]},
        True,
    ),
    "messages: nothing": (MESSAGES, {}, False),
    "messages: declared": (MESSAGES, {"tools": [{"name": "f"}]}, True),
    "messages: tools of a server": (MESSAGES, {"mcp_servers": [{"name": "s"}]}, True),
    "messages: only in history": (
        MESSAGES,
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
        True,
    ),
}


@pytest.mark.parametrize(("dialect", "request_", "expected"), USES_TOOLS.values(), ids=USES_TOOLS)
def test_a_request_that_declares_or_holds_tools_is_a_tool_request(
    dialect: Dialect, request_: Json, expected: bool
) -> None:
    body = {"model": "m", "messages": [], **request_}
    assert dialect.parse_request(json.dumps(body).encode()).uses_tools is expected


def test_the_frame_of_a_request_is_read() -> None:
    chat = CHAT.parse_request(
        b'{"model":"gpt-4o","stream":true,"n":3,"messages":[{"role":"user","content":"x"}]}'
    )
    assert (chat.api, chat.model, chat.stream, chat.choices, chat.messages) == (
        "openai.chat",
        "gpt-4o",
        True,
        3,
        1,
    )
    bare = CHAT.parse_request(b'{"messages":[]}')
    assert (bare.model, bare.stream, bare.choices, bare.messages, bare.continues) == ("", False, 1, 0, False)
    thread = MESSAGES.parse_request(b'{"messages":[],"thread":{"type":"continue","previous_message_id":"m"}}')
    assert (thread.api, thread.continues, thread.joins_assistant_turns) == ("anthropic.messages", True, True)
    assert not MESSAGES.parse_request(b'{"messages":[],"thread":{"type":"create"}}').continues


# -- whole answers --------------------------------------------------------------------------------------------------

DONE: list[StreamEvent] = [ChoiceFinished(0, Finish.COMPLETE, False), TurnEnded()]
DONE_FOR_TOOLS: list[StreamEvent] = [ChoiceFinished(0, Finish.COMPLETE, True), TurnEnded()]
STARTED = TurnStarted("r1", "m1")


def chat_answer(message: Json, finish: str | None = "stop") -> Json:
    return {"id": "r1", "model": "m1", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def messages_answer(*content: Json, stop: str | None = "end_turn") -> Json:
    return {"type": "message", "id": "r1", "model": "m1", "content": list(content), "stop_reason": stop}


ANSWERS: dict[str, tuple[Dialect, Json, list[StreamEvent]]] = {
    "chat text": (CHAT, chat_answer({"content": "four"}), [STARTED, TextDelta(4), *DONE]),
    "chat call": (
        CHAT,
        chat_answer({"tool_calls": [{"id": "a", "function": function("f", '{"x":1}')}]}, "tool_calls"),
        [STARTED, CallOpened(0, 0, "a", "f"), CallDelta(0, '{"x":1}'), *DONE_FOR_TOOLS],
    ),
    "chat custom call": (
        CHAT,
        chat_answer({"tool_calls": [{"id": "a", "custom": {"name": "f", "input": "x"}}]}, "tool_calls"),
        [STARTED, CallOpened(0, 0, "a", "f", True), CallDelta(0, "x"), *DONE_FOR_TOOLS],
    ),
    "chat legacy call": (
        CHAT,
        chat_answer({"function_call": function("f")}, "function_call"),
        [STARTED, CallOpened(0, 0, "function_call", "f"), CallDelta(0, "{}"), *DONE_FOR_TOOLS],
    ),
    "chat legacy call that says nothing": (
        CHAT,
        chat_answer({"content": "four", "function_call": {"name": "", "arguments": ""}}),
        [STARTED, TextDelta(4), *DONE],
    ),
    "chat length": (
        CHAT,
        chat_answer({"content": "x"}, "length"),
        [STARTED, TextDelta(1), ChoiceFinished(0, Finish.TRUNCATED), TurnEnded()],
    ),
    "chat filter": (
        CHAT,
        chat_answer({"content": "x"}, "content_filter"),
        [STARTED, TextDelta(1), ChoiceFinished(0, Finish.FILTERED), TurnEnded()],
    ),
    "chat finish of another word": (
        CHAT,
        chat_answer({"content": "x"}, "eos"),
        [STARTED, TextDelta(1), ChoiceFinished(0, Finish.OTHER), TurnEnded()],
    ),
    "chat without finish": (CHAT, chat_answer({"content": "x"}, None), [STARTED, TextDelta(1)]),
    "chat error with status 200": (CHAT, {"error": {"code": 1}}, [ProviderFailed('{"code":1}')]),
    "messages text and thinking": (
        MESSAGES,
        messages_answer({"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "four"}),
        [STARTED, TextDelta(2), TextDelta(4), *DONE],
    ),
    "messages call": (
        MESSAGES,
        messages_answer({"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}, stop="tool_use"),
        [STARTED, CallOpened(0, 0, "a", "f"), CallDelta(0, '{"x":1}'), CallClosed(0), *DONE_FOR_TOOLS],
    ),
    "messages call without input": (
        MESSAGES,
        messages_answer({"type": "tool_use", "id": "a", "name": "f", "input": {}}, stop="tool_use"),
        [STARTED, CallOpened(0, 0, "a", "f"), CallClosed(0), *DONE_FOR_TOOLS],
    ),
    "messages call of a server": (
        MESSAGES,
        messages_answer(
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, stop="pause_turn"
        ),
        [STARTED, *DONE],
    ),
    "messages empty": (MESSAGES, messages_answer(), [STARTED, *DONE]),
    "messages error": (MESSAGES, {"type": "error", "error": {"type": "x"}}, [ProviderFailed('{"type":"x"}')]),
}


@pytest.mark.parametrize(("dialect", "answer", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_a_whole_answer_says_what_its_stream_would(
    dialect: Dialect, answer: Json, expected: list[StreamEvent]
) -> None:
    body = json.dumps(answer, separators=(",", ":")).encode()
    assert dialect.parse_answer(body) == expected


# -- streams --------------------------------------------------------------------------------------------------------


def chunk(delta: Json, finish: str | None = None, index: int = 0) -> Json:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}


def piece(**fields: object) -> Json:
    return chunk({"tool_calls": [fields]})


OPENED = CallOpened(0, 0, "a", "f")
FINISHED = DONE_FOR_TOOLS

CHAT_STREAMS: dict[str, tuple[list[object], list[StreamEvent]]] = {
    "text": ([chunk({"role": "assistant", "content": ""}), chunk({"content": "hi"})], [TextDelta(2)]),
    "id and model come once": (
        [{"id": "r1", "model": "m1", "choices": []}, {"id": "r1", "model": "m1", "choices": []}],
        [STARTED],
    ),
    "reasoning and refusal are content": (
        [chunk({"reasoning_content": "hm"}), chunk({"refusal": "no!"})],
        [TextDelta(2), TextDelta(3)],
    ),
    "usage and annotations at the side": ([{"choices": [], "usage": {}}, {"choices": None}, {}], []),
    "finish": ([chunk({}, "stop")], DONE),
    "a call in pieces": (
        [piece(index=0, id="a", function=function("f", "")), piece(index=0, function={"arguments": "{}"})],
        [OPENED, CallDelta(0, "{}")],
    ),
    "content and call in one delta (DEV-13)": (
        [chunk({"content": "hi", "tool_calls": [{"index": 0, "id": "a", "function": function("f")}]})],
        [TextDelta(2), OPENED, CallDelta(0, "{}")],
    ),
    "interleaved calls": (
        [
            piece(index=0, id="a", function=function("f", "[")),
            piece(index=1, id="b", function=function("g", "{")),
            piece(index=0, function={"arguments": "]"}),
            piece(index=1, function={"arguments": "}"}),
        ],
        [
            OPENED,
            CallDelta(0, "["),
            CallOpened(1, 0, "b", "g"),
            CallDelta(1, "{"),
            CallDelta(0, "]"),
            CallDelta(1, "}"),
        ],
    ),
    "no index, one call (DEV-01)": (
        [piece(id="a", function=function("f", "{")), piece(function={"arguments": "}"})],
        [OPENED, CallDelta(0, "{"), CallDelta(0, "}")],
    ),
    "no index, two calls (DEV-01)": (
        [piece(id="a", function=function("f")), piece(id="b", function=function("g"))],
        [OPENED, CallDelta(0, "{}"), CallOpened(1, 0, "b", "g"), CallDelta(1, "{}")],
    ),
    "every call has index 0 (DEV-02)": (
        [piece(index=0, id="a", function=function("f")), piece(index=0, id="b", function=function("g"))],
        [OPENED, CallDelta(0, "{}"), CallOpened(1, 0, "b", "g"), CallDelta(1, "{}")],
    ),
    "the first index is not 0 (DEV-03)": (
        [piece(index=7, id="a", function=function("f", "{")), piece(index=7, function={"arguments": "}"})],
        [OPENED, CallDelta(0, "{"), CallDelta(0, "}")],
    ),
    "no id at all (DEV-04)": (
        [piece(index=0, function=function("f"))],
        [CallOpened(0, 0, "", "f"), CallDelta(0, "{}")],
    ),
    "id and name on every delta (DEV-05)": (
        [
            piece(index=0, id="a", function=function("f", "{")),
            piece(index=0, id="a", function=function("f", "}")),
        ],
        [OPENED, CallDelta(0, "{"), CallDelta(0, "}")],
    ),
    "empty and null id on later deltas": (
        [
            piece(index=0, id="a", function=function("f", "{")),
            piece(index=0, id="", function={"name": "", "arguments": "}"}),
            piece(index=0, id="null", function={"arguments": " "}),
        ],
        [OPENED, CallDelta(0, "{"), CallDelta(0, "}"), CallDelta(0, " ")],
    ),
    "the name comes after the arguments (DEV-06)": (
        [piece(index=0, id="a", function={"arguments": "{}"}), piece(index=0, function={"name": "f"})],
        [CallOpened(0, 0, "a", ""), CallDelta(0, "{}"), CallNamed(0, "", "f")],
    ),
    "null arguments (DEV-07)": (
        [piece(index=0, id="a", function={"name": "f", "arguments": None})],
        [OPENED],
    ),
    "arguments as an object (DEV-08)": (
        [piece(index=0, id="a", function={"name": "f", "arguments": {"x": [1, {"y": 2}]}})],
        [OPENED, CallDelta(0, '{"x":[1,{"y":2}]}')],
    ),
    "an object with a number of any size (DEV-08)": (
        [piece(index=0, id="a", function={"name": "f", "arguments": {"x": 10**40}})],
        [OPENED, CallDelta(0, '{"x":' + str(10**40) + "}")],
    ),
    "a whole call in one delta (DEV-09)": (
        [piece(index=0, id="a", function=function("f"))],
        [OPENED, CallDelta(0, "{}")],
    ),
    "stop although there are calls (DEV-10)": (
        [piece(index=0, id="a", function=function("f")), chunk({}, "stop")],
        [OPENED, CallDelta(0, "{}"), *DONE],
    ),
    "two finishes (DEV-11)": ([chunk({}, "tool_calls"), chunk({}, "stop")], [*FINISHED, *DONE]),
    "empty list of calls (DEV-12)": ([chunk({"tool_calls": []}), chunk({}, "tool_calls")], FINISHED),
    "custom tool": (
        [piece(index=0, id="a", custom={"name": "f", "input": "x"})],
        [CallOpened(0, 0, "a", "f", True), CallDelta(0, "x")],
    ),
    "legacy call": (
        [chunk({"function_call": function("f", "{")}), chunk({"function_call": {"arguments": "}"}})],
        [CallOpened(0, 0, "function_call", "f"), CallDelta(0, "{"), CallDelta(0, "}")],
    ),
    "a piece that says nothing new belongs to its call": (
        [
            piece(index=0, id="a", function=function("f", "")),
            piece(index=0, id="a", function=function("f", "")),
        ],
        [OPENED, CallDelta(0, "")],
    ),
    "a legacy call that says nothing": ([chunk({"function_call": {"name": "", "arguments": ""}})], []),
    "error": ([{"error": {"message": "x"}}], [ProviderFailed('{"message":"x"}')]),
    "an error that no SDK raises on": ([{"error": None}, {"error": {}}, {"error": ""}, {"error": False}], []),
    "another word for the finish": ([chunk({}, "error")], [ChoiceFinished(0, Finish.OTHER), TurnEnded()]),
    "an empty finish is none": ([chunk({}, "")], []),
    "JSON of another shape": (["hello", 7, [], {"choices": {"a": 1}}], []),
    "half a surrogate pair in text": ([chunk({"content": "\ud83d"})], [TextDelta(1)]),
}


def chat_events(frames: list[object], choices: int = 1, done: bool = False) -> list[StreamEvent]:
    body = json.dumps({"messages": [], "n": choices}).encode()
    stream = CHAT.open_stream(CHAT.parse_request(body))
    raw = [sse.event(json.dumps(frame, separators=(",", ":")).encode()) for frame in frames]
    if done:
        raw.append(b"data: [DONE]\n\n")
    return [event for data in raw for frame in stream.feed(data) for event in frame.events]


@pytest.mark.parametrize(("frames", "expected"), CHAT_STREAMS.values(), ids=CHAT_STREAMS)
def test_a_chat_stream_is_read_as_its_clients_mean_it(
    frames: list[object], expected: list[StreamEvent]
) -> None:
    assert chat_events(frames) == expected
    last = [] if TurnEnded() in expected else [EndedEarly()]
    assert chat_events(frames, done=True) == [*expected, *last]


N_CHOICES: dict[str, tuple[list[object], bool, bool]] = {
    "all finished": ([chunk({}, "stop"), chunk({}, "stop", 1)], False, True),
    "one finished, the other begun": ([chunk({"content": "x"}, None, 1), chunk({}, "stop")], True, False),
    "one finished, no word of the other": ([chunk({}, "stop")], False, False),
    "a server that ignores n and says so with [DONE]": ([chunk({}, "stop")], True, True),
    "one more than asked for, not finished": (
        [chunk({}, None, 2), chunk({}, "stop"), chunk({}, "stop", 1)],
        True,
        False,
    ),
    "[DONE] without any finish": ([chunk({"content": "x"})], True, False),
}


@pytest.mark.parametrize(("frames", "done", "ended"), N_CHOICES.values(), ids=N_CHOICES)
def test_an_answer_of_several_choices_ends_when_all_have(
    frames: list[object], done: bool, ended: bool
) -> None:
    assert (TurnEnded() in chat_events(frames, choices=2, done=done)) is ended


def test_equal_indices_of_two_choices_are_two_calls() -> None:
    calls = [{"index": 0, "id": "a", "function": function("f")}]
    frames: list[object] = [chunk({"tool_calls": calls}), chunk({"tool_calls": calls}, index=1)]
    opened = [event for event in chat_events(frames, choices=2) if isinstance(event, CallOpened)]
    assert opened == [CallOpened(0, 0, "a", "f"), CallOpened(1, 1, "a", "f")]


def start(index: int, **block: object) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, **fields: object) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": fields}


def stop(index: int) -> Json:
    return {"type": "content_block_stop", "index": index}


CALL = start(1, type="tool_use", id="a", name="f", input={})
MESSAGES_STREAMS: dict[str, tuple[list[Json], list[StreamEvent]]] = {
    "start": ([{"type": "message_start", "message": {"id": "r1", "model": "m1"}}], [STARTED]),
    "ping": ([{"type": "ping"}], []),
    "an event of the future": ([{"type": "message_thought", "index": "x"}], []),
    "text and thinking": (
        [
            start(0, type="text", text=""),
            delta(0, type="text_delta", text="hi"),
            delta(0, thinking="hm!"),
            stop(0),
        ],
        [TextDelta(2), TextDelta(3)],
    ),
    "signature": ([delta(0, type="signature_delta", signature="x")], []),
    "call": (
        [
            CALL,
            delta(1, partial_json=""),
            delta(1, partial_json='{"x":'),
            delta(1, partial_json="1}"),
            stop(1),
        ],
        [OPENED, CallDelta(0, ""), CallDelta(0, '{"x":'), CallDelta(0, "1}"), CallClosed(0)],
    ),
    "call without input": ([CALL, stop(1)], [OPENED, CallClosed(0)]),
    "parallel calls": (
        [CALL, stop(1), start(2, type="tool_use", id="b", name="g"), delta(2, partial_json="{}"), stop(2)],
        [OPENED, CallClosed(0), CallOpened(1, 0, "b", "g"), CallDelta(1, "{}"), CallClosed(1)],
    ),
    "a server's call is no call of ours": (
        [start(0, type="server_tool_use", id="s", name="web_search"), delta(0, partial_json="{}"), stop(0)],
        [],
    ),
    "end": (
        [{"type": "message_delta", "delta": {"stop_reason": "tool_use"}}, {"type": "message_stop"}],
        DONE_FOR_TOOLS,
    ),
    "a delta without stop reason": ([{"type": "message_delta", "delta": {}}], []),
    "refusal": (
        [{"type": "message_delta", "delta": {"stop_reason": "refusal"}}],
        [ChoiceFinished(0, Finish.FILTERED)],
    ),
    "length": (
        [{"type": "message_delta", "delta": {"stop_reason": "max_tokens"}}],
        [ChoiceFinished(0, Finish.TRUNCATED)],
    ),
    "error": ([{"type": "error", "error": {"type": "x"}}], [ProviderFailed('{"type":"x"}')]),
    "half a surrogate pair in text": ([delta(0, text="\ud83d")], [TextDelta(1)]),
}


@pytest.mark.parametrize(("frames", "expected"), MESSAGES_STREAMS.values(), ids=MESSAGES_STREAMS)
def test_a_messages_stream_is_read(frames: list[Json], expected: list[StreamEvent]) -> None:
    stream = MESSAGES.open_stream(MESSAGES.parse_request(b'{"messages":[]}'))
    raw = [sse.event(json.dumps(f, separators=(",", ":")).encode(), f["type"].encode()) for f in frames]
    assert [event for data in raw for frame in stream.feed(data) for event in frame.events] == expected


UNREADABLE = {
    "chat: cut": (CHAT, b'data: {"choices":[{"delta"\n\n', True),
    "chat: no JSON": (CHAT, b"data: hello\n\n", True),
    "chat: calls of another shape": (CHAT, b'data: {"choices":[{"delta":{"tool_calls":"x"}}]}\n\n', True),
    "chat: two events glued together": (CHAT, b'data: {"choices":[]}data: {"choices":[]}\n\n', True),
    "chat: comment": (CHAT, b": OPENROUTER PROCESSING\n\n", False),
    "messages: cut": (MESSAGES, b'event: content_block_delta\ndata: {"type":"content_\n\n', True),
    "messages: a known event of another shape": (
        MESSAGES,
        b'event: content_block_start\ndata: {"type":"content_block_start","index":"x"}\n\n',
        True,
    ),
    "messages: an unknown event that is no JSON": (MESSAGES, b"event: data\ndata: [DONE]\n\n", False),
    "messages: no name and no JSON": (MESSAGES, b"data: hello\n\n", True),
}


@pytest.mark.parametrize(("dialect", "raw", "unreadable"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_frame_in_which_a_call_could_hide_must_be_readable(
    dialect: Dialect, raw: bytes, unreadable: bool
) -> None:
    (frame,) = dialect.open_stream(dialect.parse_request(b'{"messages":[]}')).feed(raw)
    assert frame.raw == raw
    assert [type(event) for event in frame.events] == ([FrameUnreadable] if unreadable else [])


# -- what we answer ourselves ---------------------------------------------------------------------------------------

TROUBLE = Trouble(Reason.RESULT_ORPHAN, "no tool call has that id.", "/messages/7/content/0")


def test_a_chat_refusal_has_the_providers_shape() -> None:
    answer = CHAT.error(400, TROUBLE, "op-1")
    assert (answer.status, dict(answer.headers)) == (
        400,
        {"content-type": "application/json", "x-request-id": "op-1", "x-should-retry": "false"},
    )
    assert json.loads(answer.body) == {
        "error": {
            "message": "turngate: result.orphan at /messages/7/content/0: no tool call has that id.",
            "type": "invalid_request_error",
            "param": "/messages/7/content/0",
            "code": "result.orphan",
        }
    }


def test_a_messages_refusal_has_the_providers_shape() -> None:
    answer = MESSAGES.error(400, TROUBLE, "op-1")
    assert (answer.status, dict(answer.headers)) == (
        400,
        {"content-type": "application/json", "request-id": "op-1", "x-should-retry": "false"},
    )
    assert json.loads(answer.body) == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "turngate: result.orphan at /messages/7/content/0: no tool call has that id.",
            "details": {"error_code": "result.orphan"},
        },
        "request_id": "op-1",
    }


@BOTH
def test_an_error_of_ours_says_whether_to_try_again_and_whose_fault_it_is(dialect: Dialect) -> None:
    trouble = Trouble(Reason.DISPATCH_UNSENT, "nothing was sent.")
    answer = dialect.error(502, trouble, "op-1", retry=True)
    assert answer.headers["x-should-retry"] == "true"
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["message"]) == (
        {"openai.chat": "server_error", "anthropic.messages": "api_error"}[dialect.api],
        "turngate: dispatch.unsent: nothing was sent.",
    )


@BOTH
def test_our_stream_error_reads_as_an_error_of_the_provider(dialect: Dialect) -> None:
    raw = dialect.stream_error(TROUBLE)
    (frame,) = dialect.open_stream(dialect.parse_request(b'{"messages":[]}')).feed(raw)
    assert [type(event) for event in frame.events] == [ProviderFailed]
    assert sse.fields(raw)[0] == {"openai.chat": b"", "anthropic.messages": b"error"}[dialect.api]


# -- which dialect --------------------------------------------------------------------------------------------------

PATHS = {
    ("POST", "/v1/chat/completions"): CHAT,
    ("POST", "/chat/completions"): CHAT,
    ("POST", "/openai/deployments/d/chat/completions"): CHAT,
    ("POST", "/v1/messages"): MESSAGES,
    ("POST", "/anthropic/v1/messages"): MESSAGES,
    ("GET", "/v1/chat/completions"): None,
    ("GET", "/v1/chat/completions/chatcmpl-1/messages"): None,
    ("POST", "/v1/messages/count_tokens"): None,
    ("POST", "/v1/messages/batches"): None,
    ("POST", "/v1/embeddings"): None,
    ("POST", "/"): None,
}


@pytest.mark.parametrize(
    ("call", "expected"), PATHS.items(), ids=lambda value: getattr(value, "api", str(value))
)
def test_the_path_tells_the_dialect(call: tuple[str, str], expected: Dialect | None) -> None:
    assert by_path(*call) is expected


def typed(**block: object) -> list[Json]:
    return [{"role": "user", "content": [block]}]


BODIES: dict[str, tuple[Json, Dialect]] = {
    "a tool message": ({"messages": [{"role": "tool", "tool_call_id": "a", "content": "x"}]}, CHAT),
    "tool calls": ({"messages": [{"role": "assistant", "tool_calls": []}]}, CHAT),
    "a tool result block": ({"messages": typed(type="tool_result", tool_use_id="a")}, MESSAGES),
    "top-level system": ({"messages": [], "system": "x"}, MESSAGES),
    "input schema": ({"messages": [], "tools": [{"name": "f", "input_schema": {}}]}, MESSAGES),
    "a Claude model": ({"messages": [], "model": "claude-sonnet-4-5", "max_tokens": 1}, MESSAGES),
    "text alone": ({"messages": typed(type="text", text="x"), "model": "gpt-4o"}, CHAT),
}


@pytest.mark.parametrize(("body", "expected"), BODIES.values(), ids=BODIES)
def test_the_body_tells_the_dialect_where_there_is_no_path(body: Json, expected: Dialect) -> None:
    dialect, why = by_body(json.dumps(body).encode())
    assert dialect is expected
    assert why


@pytest.mark.parametrize("body", [b"", b"x", b"[]", b"{}", b'{"messages":1}', b'"x"', b"[" * 100_000])
def test_a_body_of_no_dialect_is_undecodable(body: bytes) -> None:
    with pytest.raises(Undecodable):
        by_body(body)


# -- a key that stands twice ----------------------------------------------------------------------------------------

REPEATING = {
    "a field": b'{"model":"a","model":"b","messages":[]}',
    "the messages": b'{"messages":[{"role":"user","content":"x"}],"messages":[]}',
    "a role": b'{"messages":[{"role":"user","content":"x","role":"system"}]}',
    "a role, written another way": b'{"messages":[{"role":"user","content":"x","r\\u006fle":"system"}]}',
    "a field, spaced": b'{"model": "a", "messages": [], "model": "b"}',
    "a block's text": b'{"messages":[{"role":"user","content":[{"type":"text","text":"a","text":"b"}]}]}',
    "a call's id": b'{"messages":[{"role":"assistant","tool_calls":[{"id":"a","type":"function","id":"b"}]}]}',
    "a function's name": b'{"messages":[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","name":"g"}}]}]}',
    "a legacy function's name": b'{"messages":[{"role":"assistant","function_call":{"name":"f","name":"g"}}]}',
    "beside half a surrogate pair": b'{"messages":[{"role":"user","role":"x"}],"user":"\\ud83d"}',
    "with keys that are not ASCII": '{"é":1,"messages":[{"role":"user","role":"x"}]}'.encode(),
}
"""Bodies in which an object that is decoded has a key twice."""

SINGLE = {
    "empty": b"{}",
    "no messages": b'{"messages":[]}',
    "empty objects": b'{"messages":[{},{}]}',
    "in the text of arguments": json.dumps(
        {"messages": [{"tool_calls": [{"function": {"arguments": '{"a":1,"a":2}'}}]}]}
    ).encode(),
    "in an input, which is not decoded": b'{"messages":[{"content":[{"type":"tool_use","input":{"a":1,"a":2}}]}]}',
    "in a schema, which is not decoded": b'{"messages":[],"tools":[{"input_schema":{"a":1,"a":2}}]}',
    "one key in two objects": b'{"role":"x","messages":[{"role":"user"},{"role":"user"}]}',
    "strings among the parts": b'{"messages":[{"content":["a",{"type":"text","text":"b"}]}]}',
    "messages that are no list": b'{"messages":{"role":"user"}}',
    "keys that are not ASCII": '{"é":1,"messages":[{"é":1}]}'.encode(),
}


@pytest.mark.parametrize("body", REPEATING.values(), ids=REPEATING)
def test_a_key_that_stands_twice_where_it_is_decoded_makes_a_body_ambiguous(body: bytes) -> None:
    assert repeats_key(body)
    if b"ud83d" not in body:  # that one is undecodable already
        for dialect in (CHAT, MESSAGES):
            with pytest.raises(Ambiguous) as raised:
                dialect.parse_request(body)
            assert raised.value.reason is Reason.BODY_AMBIGUOUS


@pytest.mark.parametrize("body", SINGLE.values(), ids=SINGLE)
def test_other_repetitions_are_nobodys_business(body: bytes) -> None:
    assert not repeats_key(body)


VALUES = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.fixed_dictionaries({"id": VALUES, "function": st.dictionaries(st.text(), VALUES, max_size=3)})
MESSAGE = st.dictionaries(st.sampled_from(["role", "name", "é", "x"]), VALUES) | st.fixed_dictionaries(
    {
        "role": st.text(),
        "content": st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=3) | VALUES,
        "tool_calls": st.lists(CALLS, max_size=2) | VALUES,
    }
)


@given(
    messages=st.lists(MESSAGE, max_size=4),
    indent=st.sampled_from([None, None, 2]),
    compact=st.booleans(),
    ascii_only=st.booleans(),
    where=st.integers(0, 3),
)
@settings(max_examples=80, deadline=None)
def test_a_key_is_found_repeated_exactly_where_it_is(
    messages: list[Json], indent: int | None, compact: bool, ascii_only: bool, where: int
) -> None:
    separators = (",", ":") if compact else None
    request = {"model": "m", "messages": messages}
    text = json.dumps(request, indent=indent, separators=separators, ensure_ascii=ascii_only)
    assert not repeats_key(text.encode("utf-8", "surrogatepass"))
    if where < len(messages):
        messages[where] = {"MARK": 1, **messages[where]}
        text = json.dumps(request, indent=indent, separators=separators, ensure_ascii=ascii_only)
        assert repeats_key(text.replace('"MARK"', '"MARK":2,"MARK"', 1).encode("utf-8", "surrogatepass"))


# -- no bytes can hurt ----------------------------------------------------------------------------------------------


def consume(dialect: Dialect, body: bytes, pieces: list[bytes]) -> None:
    """Everything that is ever done with bytes from outside. Only Undecodable may come out, and not of a stream."""
    with suppress(Undecodable):
        by_body(body)
    with suppress(Undecodable):
        judge(dialect.parse_request(body), dict.fromkeys(Reason, Level.HARD))
    with suppress(Undecodable):
        assembled(Assembler(), dialect.parse_answer(body))
    stream = dialect.open_stream(dialect.parse_request(b'{"messages":[]}'))
    assembler = Assembler(closes_calls=stream.closes_calls)
    for data in pieces:
        for frame in stream.feed(data):
            assembled(assembler, frame.events)
    assembler.close(Ending.CLEAN)


def assembled(assembler: Assembler, events: Iterable[StreamEvent]) -> None:
    for event in events:
        assembler.receive(event)
    assembler.judge()


DEEP = 100_000
CHAT_CALL = b'{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":%s}}]}}]}'
NASTY = {
    "nothing": b"",
    "deep lists": b"[" * DEEP,
    "deep lists, closed": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep content": b'{"messages":[{"role":"user","content":' + b"[" * DEEP + b"]" * DEEP + b"}]}",
    "deep tools": b'{"messages":[],"tools":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep error": b'{"error":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep chat arguments": CHAT_CALL % (b'{"x":' * DEEP + b"1" + b"}" * DEEP),
    "deep chat arguments as text": CHAT_CALL % json.dumps("[" * DEEP).encode(),
    "deep messages input": b'{"type":"content_block_delta","index":0,"delta":{"x":'
    + b"[" * DEEP
    + b"]" * DEEP
    + b"}}",
    "deep input": b'{"content":[{"type":"tool_use","input":' + b"[" * DEEP + b"]" * DEEP + b"}]}",
    "huge integer": b'{"messages":[],"n":' + b"9" * 10_000 + b"}",
    "huge integer in arguments": CHAT_CALL % (b'{"x":' + b"9" * 10_000 + b"}"),
    "huge integer as text": CHAT_CALL % (b'"' + b"9" * 10_000 + b'"'),
    "huge exponent": b'{"messages":[],"n":1e999999,"choices":[{"index":1e999999}],"index":1e999999}',
    "negative choices": b'{"messages":[],"n":-5}',
    "lone surrogates": b'{"messages":[{"role":"user","content":"\\ud83d"}],"choices":[{"delta":{"content":"\\ud83d"}}]}',
    "a lone surrogate in a call": CHAT_CALL % b'"{\\"x\\":\\"\\\\ud83d\\"} \\ud83d"',
    "a lone surrogate in an object": CHAT_CALL % b'{"x":"\\ud83d"}',
    "byte order mark": b'\xef\xbb\xbf{"messages":[]}',
    "UTF-16": '{"messages":[]}'.encode("utf-16"),
    "duplicate keys": b'{"messages":[],"messages":[{"role":"user","role":"tool","content":"x","content":null}]}',
    "invalid UTF-8": b'{"messages":[{"role":"user","content":"\xff\xfe\xc0\x80"}]}',
    "NaN": b'{"messages":[],"n":NaN,"choices":[{"index":Infinity}]}',
    "nulls everywhere": b'{"messages":null,"model":null,"choices":null,"content":null,"type":null,"index":null}',
    "null message": b'{"messages":[null],"choices":[null],"content":[null]}',
    "zero bytes": b"\0" * 100,
}


@BOTH
@pytest.mark.parametrize("body", NASTY.values(), ids=NASTY)
def test_a_nasty_body_is_at_worst_undecodable(dialect: Dialect, body: bytes) -> None:
    names = [b"", b"event: content_block_delta\n", b"event: message_start\n", b"event: content_block_start\n"]
    consume(dialect, body, [b"%sdata: %s\n\n" % (name, body) for name in names])


@BOTH
@given(body=st.binary(max_size=200), pieces=st.lists(st.binary(max_size=80), max_size=5))
def test_no_bytes_raise_anything_else(dialect: Dialect, body: bytes, pieces: list[bytes]) -> None:
    consume(dialect, body, [*pieces, b"data: " + body + b"\n\n"])


REAL_BODIES = {
    "openai.chat": json.dumps(
        {
            "model": "m",
            "stream": True,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "a", "function": function("f")}],
                },
                {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "ok"}]},
            ],
        }
    ).encode(),
    "anthropic.messages": json.dumps(
        {
            "model": "m",
            "thread": {"type": "create"},
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "ok"}]},
            ],
        }
    ).encode(),
}
REAL_STREAMS = {
    "openai.chat": b"".join(
        sse.event(json.dumps(frame).encode()) for frames, _ in CHAT_STREAMS.values() for frame in frames
    ),
    "anthropic.messages": b"".join(
        sse.event(json.dumps(frame).encode(), frame["type"].encode())
        for frames, _ in MESSAGES_STREAMS.values()
        for frame in frames
    ),
}


def mutated(body: bytes, rng: random.Random) -> bytes:
    """The same body with a few bytes changed, dropped, doubled, or swapped for JSON that means something else."""
    data = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        end = min(len(data), at + rng.randint(1, 12))
        swap = rng.choice(
            (
                b"",
                bytes([rng.randrange(256)]),
                data[at:end] * 2,
                b"null",
                b"[]",
                b"{}",
                b'"',
                b"-1",
                b"\\ud800",
            )
        )
        data[at:end] = swap
        if not data:
            break
    return bytes(data)


@BOTH
@given(seed=st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_no_mutation_of_a_real_body_raises_anything_else(dialect: Dialect, seed: int) -> None:
    rng = random.Random(seed)
    stream = mutated(REAL_STREAMS[dialect.api], rng)
    cut = rng.randrange(len(stream) + 1)
    consume(dialect, mutated(REAL_BODIES[dialect.api], rng), [stream[:cut], stream[cut:]])


@BOTH
@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "messages",
                        "role",
                        "content",
                        "tool_calls",
                        "id",
                        "function",
                        "name",
                        "arguments",
                        "type",
                        "index",
                        "delta",
                        "choices",
                        "error",
                        "content_block",
                        "stop_reason",
                        "finish_reason",
                        "message",
                        "input",
                        "model",
                        "stream",
                        "n",
                        "tools",
                        "thread",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_no_json_of_another_shape_raises_anything_else(dialect: Dialect, value: object) -> None:
    body = json.dumps(value).encode()
    consume(dialect, body, [sse.event(body), sse.event(body, b"content_block_start")])
