"""What real servers do differently on the wire, read as their clients mean it; one row for each that is documented.

The provider documents number the deviations of Chat Completions (DEV-…) and name those of Anthropic Messages by the
report they come from. Each has a stream here, with what it comes to, or a reason why there is nothing to test.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from turngate.adapters import sse
from turngate.adapters.dialect import Dialect, Trouble
from turngate.adapters.registry import CHAT, MESSAGES
from turngate.validators.gate import Gate
from turngate.validators.rules import Reason
from turngate.validators.stream import Assembler, Ending, Turn

PROVIDERS = Path(os.environ.get("TURNGATE_SHARED") or Path(__file__).parents[2] / "shared") / "providers"
Json = dict[str, Any]
Calls = list[tuple[str, str, str]]


def chunk(delta: Json, finish: str | None = None, **more: object) -> bytes:
    value = {
        "id": "c",
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        **more,
    }
    return sse.event(json.dumps(value).encode())


def item(function: Json, **more: object) -> Json:
    return {"tool_calls": [{**more, "function": function}]}


def event(kind: str, **fields: object) -> bytes:
    return sse.event(json.dumps({"type": kind, **fields}).encode(), kind.encode())


def use(index: int, id: str, *pieces: str) -> tuple[bytes, ...]:
    block = {"type": "tool_use", "id": id, "name": "f", "input": {}}
    deltas = [{"type": "input_json_delta", "partial_json": text} for text in pieces]
    return (
        event("content_block_start", index=index, content_block=block),
        *(event("content_block_delta", index=index, delta=delta) for delta in deltas),
        event("content_block_stop", index=index),
    )


def stop(reason: str) -> tuple[bytes, bytes]:
    return event("message_delta", delta={"stop_reason": reason}), event("message_stop")


F, G = {"name": "f", "arguments": '{"x":1}'}, {"name": "g", "arguments": "{}"}
OPEN, REST = {"name": "f", "arguments": ""}, {"arguments": '{"x":1}'}
TEXT, TOOLS, STOP, DONE = (
    chunk({"content": "hi"}),
    chunk({}, "tool_calls"),
    chunk({}, "stop"),
    b"data: [DONE]\n\n",
)
CALL = (chunk(item(OPEN, index=0, id="a")), chunk(item(REST, index=0)))
NOTE = sse.event(b'{"choices":[],"prompt_filter_results":[]}')
START = event("message_start", message={"id": "msg_1", "model": "m"})
SPOKEN = (
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event("content_block_delta", index=0, delta={"type": "text_delta", "text": "hi"}),
    event("content_block_stop", index=0),
)
A: Calls = [("a", "f", '{"x":1}')]
AB: Calls = [*A, ("b", "g", "{}")]
NO_STOP, UNCLOSED = Reason.STREAM_NO_STOP, Reason.CALL_ARGUMENTS_UNCLOSED


@dataclass(frozen=True)
class Row:
    """A stream and what it comes to. Every byte passes of a committed turn, and of a provider's own error."""

    dialect: Dialect
    frames: tuple[bytes, ...]
    calls: Calls
    turn: Turn = Turn.COMMITTED
    reason: Reason | None = None
    anomalies: tuple[Reason, ...] = ()


def chat(*frames: bytes, calls: Calls, reason: Reason | None = None, turn: Turn = Turn.COMMITTED) -> Row:
    return Row(CHAT, frames, calls, turn, reason)


def broken(dialect: Dialect, *frames: bytes, reason: Reason) -> Row:
    return Row(dialect, frames, [], Turn.RETRACTED, reason)


ROWS: dict[str, Row] = {
    "DEV-01 no index": chat(chunk(item(F, id="a")), chunk(item(G, id="b")), TOOLS, DONE, calls=AB),
    "DEV-01 no index, in pieces": chat(
        chunk(item(OPEN, id="a")), chunk(item(REST)), chunk(item(G, id="b")), TOOLS, DONE, calls=AB
    ),
    "DEV-02 every index is 0": chat(
        chunk(item(F, index=0, id="a")), chunk(item(G, index=0, id="b")), TOOLS, DONE, calls=AB
    ),
    "DEV-02 and the first call was cut off": broken(
        CHAT,
        chunk(item({"name": "f", "arguments": '{"x'}, index=0, id="a")),
        chunk(item(G, index=0, id="b")),
        TOOLS,
        DONE,
        reason=Reason.STREAM_CALL_ID_CONFLICT,
    ),
    "DEV-03 the first index is not 0": chat(
        chunk(item(F, index=3, id="a")), chunk(item(G, index=7, id="b")), TOOLS, DONE, calls=AB
    ),
    "DEV-04 no id": broken(
        CHAT, TEXT, chunk(item(F, index=0)), TOOLS, DONE, reason=Reason.STREAM_CALL_ID_MISSING
    ),
    "DEV-04 the id is the word null": broken(
        CHAT, chunk(item(F, index=0, id="null")), TOOLS, DONE, reason=Reason.STREAM_CALL_ID_MISSING
    ),
    "DEV-05 id and name on every delta": chat(
        chunk(item(OPEN, index=0, id="a")), chunk(item(F, index=0, id="a")), TOOLS, DONE, calls=A
    ),
    "DEV-06 arguments before the name": chat(
        chunk(item(REST, index=0, id="a")), chunk(item({"name": "f"}, index=0)), TOOLS, DONE, calls=A
    ),
    "DEV-07 null arguments": chat(
        chunk(item({"name": "f", "arguments": None}, index=0, id="a")), CALL[1], TOOLS, DONE, calls=A
    ),
    "DEV-08 arguments as an object": chat(
        chunk(item({"name": "f", "arguments": {"x": 1}}, index=0, id="a")), TOOLS, DONE, calls=A
    ),
    "DEV-09 call and finish in one delta": chat(chunk(item(F, index=0, id="a"), "tool_calls"), DONE, calls=A),
    "DEV-10 stop although there are calls": chat(*CALL, STOP, DONE, calls=A),
    "DEV-11 two finishes, the second with usage": chat(
        *CALL, TOOLS, chunk({}, "tool_calls", usage={"prompt_tokens": 3}), DONE, calls=A
    ),
    "DEV-11 the second finish echoes an empty delta": Row(
        CHAT,
        (*CALL, TOOLS, chunk(item({"arguments": ""}, index=0), "tool_calls"), DONE),
        A,
        anomalies=(Reason.STREAM_AFTER_STOP,),
    ),
    "DEV-12 the call was lost": chat(
        TEXT, chunk({"tool_calls": []}), TOOLS, DONE, calls=[], reason=Reason.STREAM_TOOL_STOP_WITHOUT_CALL
    ),
    "DEV-13 content and call in one delta": chat(
        chunk({"content": "hi", **item(F, index=0, id="a")}), TOOLS, DONE, calls=A
    ),
    "DEV-14 no last word": chat(*CALL, TOOLS, calls=A),
    "DEV-14 no last word and no finish": broken(CHAT, *CALL, reason=NO_STOP),
    "DEV-15 comments": chat(b": OPENROUTER PROCESSING\n\n", TEXT, b": keep-alive\n\n", STOP, DONE, calls=[]),
    "DEV-16 no space, CR LF and CR": chat(
        TEXT.replace(b"data: ", b"data:"),
        CALL[0].replace(b"\n", b"\r\n"),
        CALL[1].replace(b"\n", b"\r"),
        TOOLS,
        DONE,
        calls=A,
    ),
    "DEV-17 a byte order mark": chat(sse.BOM + TEXT, *CALL, TOOLS, DONE, calls=A),
    "DEV-18 an event without data": chat(TEXT, b"event: ping\n\n", *CALL, TOOLS, DONE, calls=A),
    "DEV-18 an event with empty data": broken(
        CHAT, TEXT, b"data: \n\n", *CALL, TOOLS, DONE, reason=Reason.STREAM_BAD_FRAMING
    ),
    "DEV-19 the finish without its blank line": broken(CHAT, TEXT, *CALL, TOOLS[:-2], reason=NO_STOP),
    "DEV-19 the last word without its blank line": chat(*CALL, TOOLS, DONE[:-2], calls=A),
    "DEV-20 no choices at the start, in the middle, at the end": chat(
        NOTE, TEXT, NOTE, *CALL, TOOLS, NOTE, DONE, calls=A
    ),
    "DEV-21 the arguments are cut": broken(
        CHAT, TEXT, CALL[0], chunk(item({"arguments": '{"x"'}, index=0)), STOP, DONE, reason=UNCLOSED
    ),
    "anthropic-sdk-typescript#842 the connection closes inside the arguments": broken(
        MESSAGES, START, *use(0, "a", '{"x"')[:2], reason=Reason.STREAM_TRUNCATED
    ),
    "litellm#32159 silence behind a cut": broken(MESSAGES, START, *SPOKEN[:2], reason=NO_STOP),
    "sudocode#576 message_stop without its blank line": broken(
        MESSAGES, START, *use(0, "a", "{}"), stop("tool_use")[0], stop("tool_use")[1][:-2], reason=NO_STOP
    ),
    "cc-switch#6541 no message_stop": broken(
        MESSAGES, START, *use(0, "a", "{}"), stop("tool_use")[0], reason=NO_STOP
    ),
    "cc-switch#6541 an empty stop reason": broken(
        MESSAGES, START, *use(0, "a", "{}"), *stop(""), reason=NO_STOP
    ),
    "cindy#1055 a stop reason of another API": broken(
        MESSAGES, START, *use(0, "a", "{}"), *stop("max_output_tokens"), reason=NO_STOP
    ),
    "litellm#23510 two calls with one id": broken(
        MESSAGES,
        START,
        *use(0, "a", "{}"),
        *use(1, "a", "{}"),
        *stop("tool_use"),
        reason=Reason.STREAM_CALL_ID_CONFLICT,
    ),
    "ClawRouter#17 an id with colons": Row(
        MESSAGES,
        (START, *use(0, "functions.f:0", '{"x":1}'), *stop("tool_use")),
        [("functions.f:0", "f", '{"x":1}')],
    ),
    "Antigravity-Manager#654 an error of Google's in the stream": broken(
        MESSAGES,
        START,
        event("error", error={"code": 429, "message": '{"type":"error"}', "status": "RESOURCE_EXHAUSTED"}),
        reason=Reason.STREAM_ERROR_EVENT,
    ),
    "a start that comes twice": Row(
        MESSAGES,
        (START, START, *SPOKEN, *use(1, "a", '{"x":1}'), *stop("tool_use")),
        A,
        reason=Reason.STREAM_DUPLICATE_DELTA,
        anomalies=(Reason.STREAM_DUPLICATE_DELTA,),
    ),
    "a text block that starts twice, before a call": Row(
        MESSAGES,
        (START, SPOKEN[0], *SPOKEN, *use(1, "a", "{}"), *stop("tool_use")),
        [],
        Turn.RETRACTED,
        Reason.STREAM_DUPLICATE_DELTA,
        (Reason.STREAM_DUPLICATE_DELTA,),
    ),
    "the last word of Chat Completions behind message_stop": Row(
        MESSAGES, (START, *SPOKEN, *stop("end_turn"), DONE), []
    ),
}

NOTHING_TO_TEST: Final = {
    "TensorRT-LLM#18289": "the server makes up a proper end; nothing on the wire tells it from a real one",
    "anthropic-sdk-python#920": "the proposal of an SDK, named beside the deviation it answers",
    "anthropic-sdk-typescript#920": "the proposal of an SDK, named beside the deviation it answers",
    "private-ai-gateway#114": "as TensorRT-LLM#18289",
    "nanobot#4356": "as ClawRouter#17: ids in requests, judged by the rules there",
}


def run(row: Row) -> tuple[Gate, bytes]:
    sequence = row.dialect.parse_request(b'{"messages":[]}')
    parser = row.dialect.open_stream(sequence)
    gate = Gate(
        parser,
        Assembler(1, parser.closes_calls),
        holds=True,
        held_bytes_max=2**20,
        retraction=lambda reason: row.dialect.stream_error(Trouble(reason, "broke")),
    )
    return gate, b"".join(gate.receive(frame) for frame in row.frames) + gate.finish(Ending.CLEAN)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_deviation_is_read_as_its_clients_mean_it(row: Row) -> None:
    gate, out = run(row)
    verdict = gate.verdict
    assert verdict is not None
    released = [(call.id, call.name, call.arguments) for call in verdict.calls]
    assert (verdict.turn, verdict.reason, released) == (row.turn, row.reason, row.calls)
    assert tuple(gate.assembler.anomalies) == row.anomalies
    untouched = row.turn is Turn.COMMITTED or row.reason is Reason.STREAM_ERROR_EVENT
    assert (out == b"".join(row.frames)) is untouched


def documented() -> set[str]:
    chat_page = (PROVIDERS / "openai-chat.md").read_text()
    anthropic_page = (PROVIDERS / "anthropic-messages.md").read_text()
    table = anthropic_page.partition("### Known deviations")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| (DEV-\d+) \|", chat_page, re.MULTILINE)) | set(
        re.findall(r"[\w-]+#\d+", table)
    )


def test_every_documented_deviation_has_a_row_or_a_reason_why_not() -> None:
    if not PROVIDERS.is_dir():
        pytest.skip(f"no provider documents in {PROVIDERS}; set TURNGATE_SHARED")
    told = {name.split()[0] for name in ROWS} | set(NOTHING_TO_TEST)
    found = documented()
    assert len(found) > 30
    assert found - told == set()
