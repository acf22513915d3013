"""The gate: bytes in, bytes out, over small streams of both dialects, cut everywhere and ended in every way.

What must hold: text passes at once; a call leaves whole after a proper end or not at all; a broken end is exactly one
error frame and nothing after it; what is passed in full is the provider's bytes.
"""

import base64
import json
import os
import random
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngate.adapters import sse
from turngate.adapters.dialect import Dialect, Trouble
from turngate.adapters.registry import CHAT, DIALECTS, MESSAGES
from turngate.validators.gate import Gate
from turngate.validators.previews import Preview
from turngate.validators.rules import Reason
from turngate.validators.schemas import Declared, Schemas
from turngate.validators.stream import (
    Assembler,
    Call,
    Ending,
    Finish,
    Turn,
    TurnVerdict,
    arguments_fault,
    calls_of,
)

SHARED = Path(os.environ.get("TURNGATE_SHARED") or Path(__file__).parents[2] / "shared")
HELD_BYTES_MAX: Final = 2**20
Json = dict[str, Any]


@dataclass(frozen=True)
class Stream:
    """A recorded-like stream: its frames, and what it comes to when it arrives whole."""

    dialect: Dialect
    frames: tuple[bytes, ...]
    turn: Turn = Turn.COMMITTED
    reason: Reason | None = None
    calls: tuple[tuple[str, str, str], ...] = ()
    n: int = 1
    passes: tuple[int, ...] | None = None
    """Indices of the frames that reach the app, where not all do. An error of ours follows if the turn is retracted."""

    @property
    def raw(self) -> bytes:
        return b"".join(self.frames)

    def gate(
        self,
        *,
        holds: bool = True,
        held_bytes_max: int = HELD_BYTES_MAX,
        request: bytes = b"",
        enforced: bool = True,
    ) -> Gate:
        body = request or json.dumps({"messages": [], "n": self.n}).encode()
        sequence = self.dialect.parse_request(body)
        parser = self.dialect.open_stream(sequence)
        declared = Declared(lambda: self.dialect.declared_tools(body), Schemas(), enforced)
        assembler = Assembler(sequence.choices, parser.closes_calls, declared=declared)
        return Gate(parser, assembler, holds, held_bytes_max, self.error)

    def error(self, reason: Reason) -> bytes:
        return self.dialect.stream_error(Trouble(reason, "the answer broke off."))


# -- the streams ----------------------------------------------------------------------------------------------------


def data(value: object) -> bytes:
    return sse.event(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())


def chunk(delta: Json, finish: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return data({"id": "chatcmpl-1", "model": "m", "choices": [choice]})


def piece(
    index: int | None, arguments: object = None, id: str | None = None, name: str | None = None
) -> bytes:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    item = {
        key: value
        for key, value in (("index", index), ("id", id), ("function", function))
        if value is not None
    }
    return chunk({"tool_calls": [item]})


def event(kind: str, **fields: object) -> bytes:
    return sse.event(json.dumps({"type": kind, **fields}, separators=(",", ":")).encode(), kind.encode())


def tool_use(index: int, id: str, *pieces: str, closed: bool = True) -> list[bytes]:
    block = {"type": "tool_use", "id": id, "name": "f", "input": {}}
    deltas = [{"type": "input_json_delta", "partial_json": text} for text in pieces]
    return [
        event("content_block_start", index=index, content_block=block),
        *(event("content_block_delta", index=index, delta=delta) for delta in deltas),
        *([event("content_block_stop", index=index)] if closed else []),
    ]


ROLE, HELLO, WORLD = (
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "Héllo"}),
    chunk({"content": " 🌍"}),
)
DONE, USAGE = b"data: [DONE]\n\n", data({"choices": [], "usage": {"total_tokens": 9}})
OPEN_A, OPEN_B = piece(0, "", "a", "f"), piece(1, "", "b", "g")
CALL_A = (OPEN_A, piece(0, '{"x":'), piece(0, "1}"))
A, B = ("a", "f", '{"x":1}'), ("b", "g", "{}")
FOR_TOOLS, STOP, LENGTH = chunk({}, "tool_calls"), chunk({}, "stop"), chunk({}, "length")
ERROR = data({"error": {"message": "overloaded", "code": 502}})

START = event("message_start", message={"id": "msg_1", "model": "m", "content": []})
PING = event("ping")
TEXT = (
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event("content_block_delta", index=0, delta={"type": "text_delta", "text": "Hi"}),
    event("content_block_stop", index=0),
)
END = event("message_stop")


def ends(stop_reason: str) -> tuple[bytes, bytes]:
    return event("message_delta", delta={"stop_reason": stop_reason}, usage={"output_tokens": 7}), END


MA = ("toolu_a", "f", '{"x":1}')
USE_A = tuple(tool_use(1, "toolu_a", "", '{"x"', ":1}"))
FAILED = event("error", error={"type": "overloaded_error", "message": "Overloaded"})
LIMIT, CUT = Reason.STREAM_LENGTH_LIMITED, Reason.CALL_ARGUMENTS_UNCLOSED

STREAMS: dict[str, Stream] = {
    "chat text": Stream(CHAT, (ROLE, HELLO, WORLD, STOP, USAGE, DONE)),
    "chat text, [DONE] without a finish": Stream(
        CHAT, (ROLE, HELLO, DONE), Turn.RETRACTED, Reason.STREAM_NO_STOP, passes=(0, 1)
    ),
    "chat call, [DONE] before its id and finish": Stream(
        CHAT,
        (piece(0, "{}"), DONE, OPEN_A, FOR_TOOLS, DONE),
        Turn.RETRACTED,
        Reason.STREAM_NO_STOP,
        passes=(),
    ),
    "chat text without [DONE] (DEV-14)": Stream(CHAT, (ROLE, HELLO, STOP)),
    "chat call": Stream(CHAT, (ROLE, HELLO, *CALL_A, FOR_TOOLS, USAGE, DONE), calls=(A,)),
    "chat call, no text": Stream(CHAT, (*CALL_A, FOR_TOOLS, DONE), calls=(A,)),
    "chat parallel": Stream(CHAT, (HELLO, *CALL_A, OPEN_B, piece(1, "{}"), FOR_TOOLS, DONE), calls=(A, B)),
    "chat interleaved": Stream(
        CHAT,
        (OPEN_A, OPEN_B, piece(0, '{"x":'), piece(1, "{"), piece(0, "1}"), piece(1, "}"), FOR_TOOLS, DONE),
        calls=(A, B),
    ),
    "chat text between calls": Stream(CHAT, (*CALL_A, WORLD, OPEN_B, FOR_TOOLS, DONE), calls=(A, B)),
    "no index (DEV-01)": Stream(
        CHAT, (piece(None, '{"x":1}', "a", "f"), piece(None, "{}", "b", "g"), FOR_TOOLS, DONE), calls=(A, B)
    ),
    "every index is 0 (DEV-02)": Stream(
        CHAT, (piece(0, '{"x":1}', "a", "f"), piece(0, "{}", "b", "g"), FOR_TOOLS, DONE), calls=(A, B)
    ),
    "first index is 3 (DEV-03)": Stream(CHAT, (piece(3, '{"x":1}', "a", "f"), FOR_TOOLS, DONE), calls=(A,)),
    "no id (DEV-04)": Stream(
        CHAT,
        (HELLO, piece(0, "{}", None, "f"), FOR_TOOLS, DONE),
        Turn.RETRACTED,
        Reason.STREAM_CALL_ID_MISSING,
        passes=(0,),
    ),
    "id and name repeated (DEV-05)": Stream(
        CHAT, (piece(0, '{"x":', "a", "f"), piece(0, "1}", "a", "f"), FOR_TOOLS, DONE), calls=(A,)
    ),
    "late name (DEV-06)": Stream(
        CHAT, (piece(0, '{"x":1}', "a"), piece(0, None, None, "f"), FOR_TOOLS, DONE), calls=(A,)
    ),
    "null arguments (DEV-07)": Stream(
        CHAT,
        (
            chunk({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": None}}]}),
            piece(0, '{"x":1}'),
            FOR_TOOLS,
            DONE,
        ),
        calls=(A,),
    ),
    "arguments as an object (DEV-08)": Stream(
        CHAT, (piece(0, {"x": 1}, "a", "f"), FOR_TOOLS, DONE), calls=(A,)
    ),
    "call and finish in one frame (DEV-09)": Stream(
        CHAT,
        (
            HELLO,
            chunk(
                {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x":1}'}}]},
                "tool_calls",
            ),
            DONE,
        ),
        calls=(A,),
    ),
    "stop although there are calls (DEV-10)": Stream(CHAT, (*CALL_A, STOP, DONE), calls=(A,)),
    "two finishes (DEV-11)": Stream(CHAT, (*CALL_A, FOR_TOOLS, chunk({}, "stop"), DONE), calls=(A,)),
    "calls lost by the server (DEV-12)": Stream(
        CHAT, (HELLO, chunk({"tool_calls": []}), FOR_TOOLS, DONE), reason=Reason.STREAM_TOOL_STOP_WITHOUT_CALL
    ),
    "keep-alive comments": Stream(
        CHAT, (b": OPENROUTER PROCESSING\n\n", HELLO, b":\n\n", *CALL_A, FOR_TOOLS, DONE), calls=(A,)
    ),
    "line ends CR LF": Stream(
        CHAT, tuple(frame.replace(b"\n", b"\r\n") for frame in (HELLO, *CALL_A, FOR_TOOLS, DONE)), calls=(A,)
    ),
    "cut arguments, and the finish says tools (DEV-21)": Stream(
        CHAT, (HELLO, OPEN_A, piece(0, '{"x":'), FOR_TOOLS, DONE), Turn.RETRACTED, CUT, passes=(0,)
    ),
    "length inside text": Stream(CHAT, (HELLO, LENGTH, DONE), Turn.INCOMPLETE, LIMIT),
    "length inside a call": Stream(
        CHAT,
        (HELLO, OPEN_A, piece(0, '{"x":'), LENGTH, USAGE, DONE),
        Turn.INCOMPLETE,
        CUT,
        passes=(0, 3, 4, 5),
    ),
    "length behind a whole call": Stream(
        CHAT, (HELLO, *CALL_A, LENGTH, DONE), Turn.INCOMPLETE, LIMIT, passes=(0, 4, 5)
    ),
    "length and the call in one frame": Stream(
        CHAT,
        (
            HELLO,
            chunk(
                {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}}]},
                "length",
            ),
            DONE,
        ),
        Turn.INCOMPLETE,
        CUT,
        passes=(0,),
    ),
    "length of one choice, calls of the other": Stream(
        CHAT,
        (
            HELLO,
            *CALL_A,
            LENGTH,
            chunk(
                {"tool_calls": [{"index": 0, "id": "b", "function": {"name": "g", "arguments": "{}"}}]},
                None,
                1,
            ),
            chunk({}, "tool_calls", 1),
            DONE,
        ),
        Turn.INCOMPLETE,
        LIMIT,
        n=2,
        passes=(0,),
    ),
    "filter behind a call": Stream(
        CHAT,
        (HELLO, *CALL_A, chunk({}, "content_filter"), DONE),
        Turn.INCOMPLETE,
        Reason.STREAM_FILTERED,
        passes=(0, 4, 5),
    ),
    "two choices": Stream(
        CHAT,
        (HELLO, *CALL_A, FOR_TOOLS, chunk({"content": "x"}, None, 1), chunk({}, "stop", 1), DONE),
        calls=(A,),
        n=2,
    ),
    "error in mid-text": Stream(CHAT, (HELLO, ERROR), Turn.RETRACTED, Reason.STREAM_ERROR_EVENT),
    "error in mid-call": Stream(
        CHAT, (HELLO, *CALL_A, ERROR, DONE), Turn.RETRACTED, Reason.STREAM_ERROR_EVENT, passes=(0, 4)
    ),
    "[DONE] without finish": Stream(
        CHAT, (HELLO, *CALL_A, DONE), Turn.RETRACTED, Reason.STREAM_NO_STOP, passes=(0,)
    ),
    "an unreadable frame": Stream(
        CHAT, (HELLO, b"data: {oops\n\n", STOP, DONE), Turn.RETRACTED, Reason.STREAM_BAD_FRAMING, passes=(0,)
    ),
    "a call after the finish": Stream(CHAT, (HELLO, STOP, *CALL_A, FOR_TOOLS, DONE), calls=(A,)),
    "a call after the finish, without an end of its own": Stream(
        CHAT, (HELLO, STOP, *CALL_A, DONE), Turn.RETRACTED, Reason.STREAM_NO_STOP, passes=(0, 1)
    ),
    "messages text": Stream(MESSAGES, (START, PING, *TEXT, *ends("end_turn"))),
    "messages call": Stream(MESSAGES, (START, *TEXT, *USE_A, *ends("tool_use")), calls=(MA,)),
    "messages call without input": Stream(
        MESSAGES, (START, *tool_use(0, "toolu_b", ""), *ends("tool_use")), calls=(("toolu_b", "f", "{}"),)
    ),
    "messages parallel": Stream(
        MESSAGES,
        (START, *TEXT, *USE_A, PING, *tool_use(2, "toolu_b", "{}"), *ends("tool_use")),
        calls=(MA, ("toolu_b", "f", "{}")),
    ),
    "messages, end_turn although there is a call": Stream(
        MESSAGES, (START, *USE_A, *ends("end_turn")), calls=(MA,)
    ),
    "messages length inside a call": Stream(
        MESSAGES,
        (START, *TEXT, *tool_use(1, "toolu_a", '{"x"', closed=False), *ends("max_tokens")),
        Turn.INCOMPLETE,
        CUT,
        passes=(0, 1, 2, 3, 6, 7),
    ),
    "messages, a call that is never closed": Stream(
        MESSAGES,
        (START, *TEXT, *tool_use(1, "toolu_a", "{}", closed=False), *ends("tool_use")),
        Turn.RETRACTED,
        CUT,
        passes=(0, 1, 2, 3),
    ),
    "messages refusal": Stream(
        MESSAGES, (START, *TEXT, *ends("refusal")), Turn.INCOMPLETE, Reason.STREAM_FILTERED
    ),
    "messages error": Stream(
        MESSAGES,
        (START, *TEXT, *USE_A[:2], FAILED),
        Turn.RETRACTED,
        Reason.STREAM_ERROR_EVENT,
        passes=(0, 1, 2, 3, 6),
    ),
    "messages without message_stop": Stream(
        MESSAGES,
        (START, *TEXT, *USE_A, ends("tool_use")[0]),
        Turn.RETRACTED,
        Reason.STREAM_NO_STOP,
        passes=(0, 1, 2, 3),
    ),
}

ALL = pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)


# -- what comes out -------------------------------------------------------------------------------------------------


def run(gate: Gate, pieces: Iterable[bytes], ending: Ending = Ending.CLEAN) -> bytes:
    return b"".join(gate.receive(piece) for piece in pieces) + gate.finish(ending)


def told(verdict: TurnVerdict | None) -> tuple[Turn, Reason | None, tuple[tuple[str, str, str], ...]]:
    assert verdict is not None
    return verdict.turn, verdict.reason, tuple((call.id, call.name, call.arguments) for call in verdict.calls)


def expected(stream: Stream) -> bytes:
    if stream.passes is None:
        return stream.raw
    out = b"".join(stream.frames[index] for index in stream.passes)
    broken_by_provider = stream.reason is Reason.STREAM_ERROR_EVENT
    finished = stream.turn is Turn.INCOMPLETE and len(stream.frames) - 1 in stream.passes
    assert stream.reason is not None
    return out if broken_by_provider or finished else out + stream.error(stream.reason)


def one_by_one(raw: bytes) -> list[bytes]:
    return [raw[at : at + 1] for at in range(len(raw))]


@ALL
@pytest.mark.parametrize("fragments", ["whole", "frame by frame", "byte by byte"])
def test_a_whole_stream_passes_or_is_replaced(stream: Stream, fragments: str) -> None:
    pieces = {"whole": [stream.raw], "frame by frame": stream.frames, "byte by byte": one_by_one(stream.raw)}[
        fragments
    ]
    gate = stream.gate()
    assert run(gate, pieces) == expected(stream)
    assert told(gate.verdict) == (stream.turn, stream.reason, stream.calls)


@ALL
def test_cut_in_two_anywhere_a_stream_is_the_same(stream: Stream) -> None:
    wanted = expected(stream)
    for offset in range(len(stream.raw)):
        gate = stream.gate()
        assert run(gate, [stream.raw[:offset], stream.raw[offset:]]) == wanted, f"cut at {offset}"
        assert told(gate.verdict) == (stream.turn, stream.reason, stream.calls), f"cut at {offset}"


@ALL
def test_watching_passes_every_byte_at_once_and_comes_to_the_same_verdict(stream: Stream) -> None:
    for pieces in ([stream.raw], stream.frames, one_by_one(stream.raw)):
        gate = stream.gate(holds=False)
        for piece_ in pieces:
            assert gate.receive(piece_) == piece_
        assert gate.finish(Ending.CLEAN) == b""
        assert told(gate.verdict) == (stream.turn, stream.reason, stream.calls)


@ALL
def test_text_before_the_first_call_passes_with_the_end_of_its_own_frame(stream: Stream) -> None:
    gate = stream.gate()
    reader = stream.gate().parser
    for frame in stream.frames:
        read = reader.feed(frame)
        if any(calls_of(part.events) for part in read) or gate.over or gate.holding:
            return
        assert b"".join(gate.receive(byte) for byte in one_by_one(frame)).startswith(frame[:-1]) or gate.over


@dataclass(frozen=True)
class Parts:
    """What an independent walk over the frames of some output sees, without parser and assembler."""

    calls: bool
    errors: int
    error_is_last: bool
    rest: bytes
    """What stands behind the last blank line."""


@cache
def parts(out: bytes) -> Parts:
    *frames, rest = out.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n")
    values = [frame.partition(b"data: ")[2] for frame in frames if b"data: {" in frame]
    errors = [b'{"error"' in value or b'"type":"error"' in value for value in values]
    calls = any(
        b'"tool_calls":[{' in v or (b'"tool_use"' in v and b"block" in v) or b"partial_json" in v
        for v in values
    )
    return Parts(calls, sum(errors), errors[-1:] != [False] or not any(errors), rest)


def cuts(stream: Stream) -> Iterator[tuple[int, Gate, bytes]]:
    """Every offset with gates that were fed so far, whole, byte by byte and in two, and what they let pass."""
    raw, byte_by_byte, passed = stream.raw, stream.gate(), b""
    for offset in range(len(raw)):
        yield offset, copy(byte_by_byte), passed
        passed += byte_by_byte.receive(raw[offset : offset + 1])
        whole = stream.gate()
        yield offset, whole, whole.receive(raw[:offset])
        if offset % 5 == 0:
            in_two = stream.gate()
            yield (
                offset,
                in_two,
                in_two.receive(raw[: offset // 2]) + in_two.receive(raw[offset // 2 : offset]),
            )


@ALL
def test_a_stream_cut_anywhere_ends_properly_or_in_one_error_and_leaks_no_call(stream: Stream) -> None:
    raw = stream.raw
    for offset, fed, passed in cuts(stream):
        for ending in (Ending.CLEAN, Ending.EOF, Ending.RESET, Ending.STALLED):
            gate = copy(fed)
            out = passed + gate.finish(ending)
            verdict, seen, where = gate.verdict, parts(out), f"cut at {offset}, {ending}"
            assert verdict is not None
            if verdict.turn is Turn.COMMITTED:
                assert raw.startswith(out), where
                assert seen.errors == 0, where
            else:
                assert not seen.calls, where
                assert verdict.calls == (), where
            if verdict.turn in (Turn.RETRACTED, Turn.UNKNOWN):
                assert (seen.errors, seen.error_is_last, seen.rest.strip()) == (1, True, b""), where
                assert gate.receive(b"data: {}\n\n") + gate.finish(Ending.CLEAN) == b"", where


def test_the_walk_that_looks_for_calls_and_errors_sees_them() -> None:
    assert parts(STREAMS["chat call"].raw) == Parts(True, 0, True, b"")
    assert parts(STREAMS["messages parallel"].raw) == Parts(True, 0, True, b"")
    assert parts(STREAMS["error in mid-text"].raw) == Parts(False, 1, True, b"")
    assert parts(STREAMS["messages error"].raw + PING + b"data") == Parts(True, 1, False, b"data")
    assert all(parts(stream.error(LIMIT)) == Parts(False, 1, True, b"") for stream in STREAMS.values())


@ALL
def test_however_it_is_cut_a_stream_comes_to_the_same_when_only_watched(stream: Stream) -> None:
    raw = stream.raw
    for offset in range(0, len(raw), 3):
        for ending in (Ending.CLEAN, Ending.EOF):
            holding, watching = stream.gate(), stream.gate(holds=False)
            run(holding, [raw[:offset]], ending)
            assert run(watching, [raw[:offset]], ending) == raw[:offset]
            assert told(holding.verdict) == told(watching.verdict), (offset, ending)


@pytest.mark.parametrize("name", ["chat call", "messages parallel", "length inside a call", "messages error"])
@given(data_=st.data())
def test_no_fragmentation_changes_anything(name: str, data_: st.DataObject) -> None:
    stream = STREAMS[name]
    offsets = data_.draw(st.lists(st.integers(0, len(stream.raw)), max_size=8).map(sorted))
    borders = [0, *offsets, len(stream.raw)]
    gate = stream.gate()
    pieces = [stream.raw[start:end] for start, end in pairwise(borders)]
    assert run(gate, pieces) == expected(stream)


POOL = {
    CHAT: [
        ROLE,
        HELLO,
        *CALL_A,
        OPEN_B,
        piece(1, "{}"),
        FOR_TOOLS,
        STOP,
        LENGTH,
        ERROR,
        USAGE,
        DONE,
        b": x\n\n",
        chunk({}, "content_filter"),
        chunk({}, "weird"),
        chunk({}, "stop", 1),
        piece(None, "{}"),
        piece(0, "{}", "z", "h"),
    ],
    MESSAGES: [
        START,
        PING,
        *TEXT,
        *USE_A,
        *ends("tool_use"),
        *ends("max_tokens"),
        ends("refusal")[0],
        FAILED,
    ],
}


def disordered(stream: Stream, rng: random.Random) -> Stream:
    """The same stream with a few frames dropped, swapped, or put in from elsewhere."""
    frames = list(stream.frames)
    for _ in range(rng.randint(1, 5)):
        at, other = rng.randrange(len(frames)), rng.randrange(len(frames))
        match rng.choice(("insert", "insert", "drop", "swap")):
            case "insert":
                frames.insert(at, rng.choice(POOL[stream.dialect]))
            case "drop" if len(frames) > 1:
                del frames[at]
            case _:
                frames[at], frames[other] = frames[other], frames[at]
    return Stream(stream.dialect, tuple(frames), n=rng.choice((1, 1, 2)))


def lines(written: bytes) -> list[bytes]:
    """The lines that say something, whatever ends them."""
    return [line for line in written.replace(b"\r", b"\n").split(b"\n") if line]


def whole_calls_only(stream: Stream, written: bytes) -> bool:
    """What the app has been given so far holds no call, or only whole ones with a finish that lets them run."""
    reader = stream.gate()
    assembler = reader.assembler
    for frame in reader.parser.feed(written):
        for event_ in frame.events:
            assembler.receive(event_)
    early = {Finish.TRUNCATED, Finish.FILTERED, Finish.OTHER} & {
        end.finish for end in assembler.finishes.values()
    }
    return not assembler.calls or bool(
        all(call.id and call.name and arguments_fault(call.arguments) is None for call in assembler.calls)
        and assembler.finishes
        and not early
    )


@given(seed=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_in_whatever_disorder_frames_come_no_part_of_a_call_is_ever_written(seed: int) -> None:
    rng = random.Random(seed)
    stream = disordered(rng.choice(list(STREAMS.values())), rng)
    gate, written = stream.gate(), b""
    for frame in stream.frames:
        if passed := gate.receive(frame):
            written += passed
            assert whole_calls_only(stream, written), stream.frames
    written += gate.finish(Ending.CLEAN)
    assert run(stream.gate(), [stream.raw]) == written
    # Fed byte by byte, a frame may end between a CR and its LF.
    assert lines(run(stream.gate(), one_by_one(stream.raw))) == lines(written)


# -- bounds and leaving ---------------------------------------------------------------------------------------------


def test_holding_more_than_the_bound_retracts_the_turn() -> None:
    stream = STREAMS["chat call"]
    held = sum(map(len, CALL_A))
    enough = stream.gate(held_bytes_max=held + len(FOR_TOOLS))
    assert run(enough, stream.frames) == stream.raw
    short = stream.gate(held_bytes_max=held - 1)
    assert run(short, stream.frames) == ROLE + HELLO + stream.error(Reason.LIMIT_HOLD)
    assert told(short.verdict) == (Turn.RETRACTED, Reason.LIMIT_HOLD, ())
    assert short.withheld_bytes == held


def test_a_frame_without_end_is_bounded_too() -> None:
    stream = STREAMS["chat text"]
    gate = stream.gate(held_bytes_max=100)
    assert gate.receive(b"data: " + b"x" * 94) == b""
    assert gate.receive(b"x") == stream.error(Reason.LIMIT_HOLD)
    assert gate.receive(b"\n\n") == b""


def test_where_nothing_is_held_a_frame_without_end_only_makes_the_gate_blind() -> None:
    gate = STREAMS["chat text"].gate(holds=False, held_bytes_max=100)
    for piece_ in (HELLO, b"data: " + b"x" * 200, b"\n\n", STOP):
        assert gate.receive(piece_) == piece_
    assert gate.blind
    assert gate.finish(Ending.CLEAN) == b""
    assert gate.verdict is None


@ALL
def test_when_the_app_has_left_nothing_more_is_written(stream: Stream) -> None:
    gate = stream.gate()
    gate.receive(b"".join(stream.frames[:2]))
    if not gate.over:
        assert gate.finish(Ending.LEFT) == b""


def test_while_a_call_waits_the_gate_says_so() -> None:
    gate = STREAMS["chat call"].gate()
    assert gate.receive(ROLE + HELLO) == ROLE + HELLO
    assert (gate.holding, gate.held_bytes) == (False, 0)
    assert gate.receive(b"".join(CALL_A)) == b""
    assert (gate.holding, gate.held_bytes) == (True, sum(map(len, CALL_A)))
    assert gate.receive(FOR_TOOLS) == b"".join(CALL_A) + FOR_TOOLS
    assert (gate.holding, gate.held_bytes, gate.withheld_bytes) == (False, 0, 0)
    assert gate.receive(DONE) == DONE


def test_what_a_length_end_withholds_is_counted() -> None:
    stream = STREAMS["length behind a whole call"]
    gate = stream.gate()
    run(gate, [stream.raw])
    assert gate.withheld_bytes == sum(map(len, CALL_A))


SAYS_NOTHING = piece(0, "")
BEHIND: dict[str, tuple[Dialect, tuple[bytes, ...], tuple[bytes, ...], Reason | None]] = {
    "a piece of a released call": (
        CHAT,
        (*CALL_A, FOR_TOOLS),
        (piece(0, "x"), DONE),
        Reason.STREAM_AFTER_STOP,
    ),
    "a piece that leaves it JSON": (
        CHAT,
        (*CALL_A, FOR_TOOLS),
        (piece(0, " "), DONE),
        Reason.STREAM_AFTER_STOP,
    ),
    "the released call once more": (
        CHAT,
        (*CALL_A, FOR_TOOLS),
        (*CALL_A, FOR_TOOLS, DONE),
        Reason.STREAM_AFTER_STOP,
    ),
    "the released call opened once more": (
        CHAT,
        (*CALL_A, FOR_TOOLS),
        (OPEN_A, FOR_TOOLS, DONE),
        Reason.STREAM_AFTER_STOP,
    ),
    "a piece that says nothing": (CHAT, (*CALL_A, FOR_TOOLS), (SAYS_NOTHING, DONE), None),
    "another whole call with an end of its own": (
        CHAT,
        (*CALL_A, FOR_TOOLS),
        (OPEN_B, piece(1, "{}"), FOR_TOOLS, DONE),
        None,
    ),
    "the released call by another id": (
        CHAT,
        (*CALL_A, FOR_TOOLS),
        (piece(1, '{"x":1}', "z", "f"), FOR_TOOLS, DONE),
        Reason.STREAM_DUPLICATE_DELTA,
    ),
    "another call without an end of its own": (
        CHAT,
        (*CALL_A, FOR_TOOLS),
        (OPEN_B, piece(1, "{}"), DONE),
        Reason.STREAM_NO_STOP,
    ),
    "an error": (CHAT, (*CALL_A, FOR_TOOLS), (ERROR,), Reason.STREAM_ERROR_EVENT),
    "messages, a piece of a released call": (
        MESSAGES,
        (START, *TEXT, *USE_A, *ends("tool_use")),
        (USE_A[2],),
        Reason.STREAM_AFTER_STOP,
    ),
    "messages, the whole answer once more": (
        MESSAGES,
        (START, *TEXT, *USE_A, *ends("tool_use")),
        (START, *TEXT, *USE_A, *ends("tool_use")),
        Reason.STREAM_DUPLICATE_DELTA,
    ),
    "messages, another answer": (
        MESSAGES,
        (START, *TEXT, *USE_A, *ends("tool_use")),
        (event("message_start", message={"id": "msg_2"}), *tool_use(0, "toolu_c", "{}"), *ends("tool_use")),
        Reason.STREAM_WRONG_HANDLE,
    ),
}


@pytest.mark.parametrize(("dialect", "answer", "behind", "reason"), BEHIND.values(), ids=BEHIND)
def test_what_comes_behind_a_release_changes_no_call_and_repeats_none(
    dialect: Dialect, answer: tuple[bytes, ...], behind: tuple[bytes, ...], reason: Reason | None
) -> None:
    gate = Stream(dialect, answer).gate()
    assert gate.receive(b"".join(answer)) == b"".join(answer)
    assert gate.released_calls == 1
    out = b"".join(gate.receive(frame) for frame in behind) + gate.finish(Ending.CLEAN)
    assert gate.verdict is not None
    if reason is None:
        assert (out, gate.verdict.turn) == (b"".join(behind), Turn.COMMITTED)
    else:
        assert gate.verdict.reason is reason
        assert parts(out).errors == 1
        assert not parts_with_calls(dialect, out)


TORN: dict[str, tuple[Dialect, bytes, bool]] = {
    "the last word without its blank line": (CHAT, b"data: [DONE]", True),
    "the last word and one line end": (CHAT, b"data: [DONE]\n", True),
    "a line end": (CHAT, b"\n", True),
    "a comment": (CHAT, b": bye", True),
    "half of the last word": (CHAT, b"data: [DO", False),
    "half of the usage": (CHAT, USAGE[:20], False),
    "half of a call": (CHAT, OPEN_B[:-9], False),
    "a call without its blank line": (CHAT, OPEN_B[:-2], False),
    "messages, a line end": (MESSAGES, b"\r\n", True),
    "messages, half of an event": (MESSAGES, PING[:-5], False),
}


@pytest.mark.parametrize(("dialect", "rest", "passes"), TORN.values(), ids=TORN)
def test_half_an_event_behind_the_end_does_not_pass(dialect: Dialect, rest: bytes, passes: bool) -> None:
    ended = (HELLO, STOP) if dialect is CHAT else (START, *TEXT, *ends("end_turn"))
    gate = Stream(dialect, ended).gate()
    assert run(gate, [*ended, rest]) == b"".join(ended) + (rest if passes else b"")
    assert told(gate.verdict) == (Turn.COMMITTED, None, ())
    assert gate.assembler.anomalies == ([] if passes else [Reason.STREAM_TRUNCATED])


@pytest.mark.parametrize("ending", [Ending.CLEAN, Ending.EOF, Ending.RESET])
def test_a_cut_between_the_finish_and_the_last_word_leaves_a_whole_turn(ending: Ending) -> None:
    """Every choice has finished: the last word says nothing more (openai-chat.md section E)."""
    stream = Stream(CHAT, (HELLO, *CALL_A, FOR_TOOLS), calls=(A,))
    gate = stream.gate()
    assert run(gate, stream.frames, ending) == stream.raw
    assert told(gate.verdict) == (Turn.COMMITTED, None, (A,))


@pytest.mark.parametrize("end", [(DONE,), ()], ids=["last word", "clean end"])
@pytest.mark.parametrize("n", [1, 2])
def test_no_call_leaves_while_another_choice_never_finishes(n: int, end: tuple[bytes, ...]) -> None:
    other = chunk({"content": "x"}, None, 1)
    stream = Stream(CHAT, (ROLE, other, *CALL_A, FOR_TOOLS, *end), n=n)
    gate = stream.gate()
    out = run(gate, stream.frames)
    assert out == ROLE + other + stream.error(Reason.STREAM_NO_STOP)
    assert told(gate.verdict) == (Turn.RETRACTED, Reason.STREAM_NO_STOP, ())


COUNTS = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
CACHED = {"input_tokens": 5, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 10}
COUNTED: dict[str, tuple[Dialect, tuple[bytes, ...], bytes, tuple[int, int]]] = {
    "chat": (
        CHAT,
        (HELLO, STOP, data({"choices": [], "usage": COUNTS}), DONE),
        json.dumps({"choices": [], "usage": COUNTS}).encode(),
        (5, 2),
    ),
    "chat, with the finish": (
        CHAT,
        (HELLO, data({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": COUNTS})),
        json.dumps({"usage": COUNTS}).encode(),
        (5, 2),
    ),
    "chat, null": (
        CHAT,
        (data({"choices": [], "usage": None}), STOP),
        json.dumps({"usage": None}).encode(),
        (-1, -1),
    ),
    "chat, in another shape": (
        CHAT,
        (data({"choices": [], "usage": {"prompt_tokens": "many"}}), STOP),
        json.dumps({"usage": 7}).encode(),
        (-1, -1),
    ),
    "messages": (
        MESSAGES,
        (
            event("message_start", message={"id": "m", "usage": {"input_tokens": 5, "output_tokens": 1}}),
            event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2}),
            END,
        ),
        json.dumps({"type": "message", "usage": {"input_tokens": 5, "output_tokens": 2}}).encode(),
        (5, 2),
    ),
    "messages, what was cached included": (
        MESSAGES,
        (event("message_start", message={"id": "m", "usage": {**CACHED, "output_tokens": 1}}), END),
        json.dumps({"type": "message", "usage": {**CACHED, "output_tokens": 1}}).encode(),
        (105, 1),
    ),
    "messages, in another shape": (
        MESSAGES,
        (event("message_start", message={"id": "m", "usage": []}), END),
        json.dumps({"type": "message", "usage": "none"}).encode(),
        (-1, -1),
    ),
}


@pytest.mark.parametrize(("dialect", "frames", "whole", "tokens"), COUNTED.values(), ids=COUNTED)
def test_tokens_are_counted_alike_in_a_stream_and_in_a_whole_answer(
    dialect: Dialect, frames: tuple[bytes, ...], whole: bytes, tokens: tuple[int, int]
) -> None:
    gate = Stream(dialect, frames).gate()
    run(gate, frames)
    assert (gate.assembler.input_tokens, gate.assembler.output_tokens) == tokens
    assembler = Assembler()
    for event_ in dialect.parse_answer(whole):
        assembler.receive(event_)
    assert (assembler.input_tokens, assembler.output_tokens) == tokens


SHOWN: dict[str, tuple[str, str]] = {
    "all of a text": ("chat text", "Héllo 🌍"),
    "what stood before a call that was retracted": ("error in mid-call", "Héllo"),
    "what was held and released": ("chat text between calls", " 🌍"),
    "the first of two choices": ("two choices", "Héllo"),
    "nothing that was held and dropped": ("length of one choice, calls of the other", "Héllo"),
    "messages": ("messages text", "Hi"),
}


@pytest.mark.parametrize(("name", "text"), SHOWN.values(), ids=SHOWN)
def test_a_preview_has_the_text_that_was_shown(name: str, text: str) -> None:
    stream = STREAMS[name]
    for pieces in ([stream.raw], stream.frames, one_by_one(stream.raw)):
        gate = stream.gate()
        gate.preview = Preview()
        run(gate, pieces)
        assert gate.preview.text() == text


def test_where_nothing_is_held_a_preview_has_all_text() -> None:
    stream = STREAMS["chat text between calls"]
    gate = stream.gate(holds=False)
    gate.preview = Preview()
    run(gate, stream.frames)
    assert gate.preview.text() == " 🌍"


WEATHER = {"name": "f", "parameters": {"type": "object", "required": ["city"]}}
ASKED = json.dumps(
    {"messages": [], "tools": [{"type": "function", "function": WEATHER}], "model": "m"}
).encode()
FITS: dict[str, tuple[bytes, Reason | None]] = {
    "fits": (piece(0, '{"city":"Oslo"}', "a", "f"), None),
    "does not fit": (piece(0, '{"town":"Oslo"}', "a", "f"), Reason.CALL_ARGUMENTS_SCHEMA),
    "is no object": (piece(0, "[]", "a", "f"), Reason.CALL_ARGUMENTS_SCHEMA),
    "is of no declared tool": (piece(0, "{}", "a", "g"), Reason.CALL_UNKNOWN_TOOL),
}


@pytest.mark.parametrize(("call", "reason"), FITS.values(), ids=FITS)
@pytest.mark.parametrize("enforced", [True, False])
def test_a_call_that_does_not_fit_is_withheld_where_that_is_enforced_and_noted_elsewhere(
    call: bytes, reason: Reason | None, enforced: bool
) -> None:
    stream = Stream(CHAT, (HELLO, call, FOR_TOOLS, DONE))
    gate = stream.gate(request=ASKED, enforced=enforced)
    out = run(gate, stream.frames)
    if reason is not None and enforced:
        assert out == HELLO + stream.error(reason)
        assert told(gate.verdict) == (Turn.RETRACTED, reason, ())
        assert gate.assembler.anomalies == []
    else:
        assert out == stream.raw
        assert gate.verdict is not None
        assert (gate.verdict.turn, gate.verdict.reason) == (Turn.COMMITTED, None)
        assert gate.assembler.anomalies == ([reason] if reason else [])


# -- cases after public bug reports ---------------------------------------------------------------------------------

APIS = {
    "openai.chat": "openai.chat",
    "azure.chat": "openai.chat",
    "openai.compatible": "openai.chat",
    "mistral.chat": "openai.chat",
    "anthropic.messages": "anthropic.messages",
}


def cases() -> list[Json]:
    found = [json.loads(path.read_text()) for path in sorted((SHARED / "cases").glob("*.json"))]
    return [
        case
        for case in found
        if case["api"] in APIS and {"frames", "frames_b64"} & set(case.get("response", ()))
    ]


CASES = cases()


def arguments(value: object) -> object:
    """As a value, so that only its meaning counts."""
    return json.loads(value) if isinstance(value, str) else value


def test_the_cases_are_there() -> None:
    if not CASES:
        pytest.skip(f"no cases in {SHARED / 'cases'}; set TURNGATE_SHARED")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_case_comes_to_what_its_report_says(case: Json) -> None:
    dialect = DIALECTS[APIS[case["api"]]]
    answer, expect = case["response"], case["expect"]
    frames = [base64.b64decode(text) for text in answer.get("frames_b64", ())]
    frames += [text.encode() for text in answer.get("frames", ())]
    gate = Stream(dialect, tuple(frames)).gate(request=json.dumps(case["request"]["body"]).encode())
    ending = {"stall": Ending.STALLED}.get(answer.get("ending", "")) or Ending(answer.get("ending", "clean"))
    out = run(gate, frames, ending)
    verdict = gate.verdict
    assert verdict is not None
    released = [
        {"id": call.id, "name": call.name, "arguments": arguments(call.arguments)} for call in verdict.calls
    ]
    wanted = [{**call, "arguments": arguments(call["arguments"])} for call in expect["tool_calls_released"]]
    assert (verdict.turn, verdict.reason, released) == (expect["turn"], reason_of(expect), wanted)
    if verdict.turn is Turn.COMMITTED:
        assert out == b"".join(frames)
    if not expect["tool_calls_released"]:
        assert not parts_with_calls(dialect, out)


def reason_of(expect: Json) -> Reason | None:
    """The reason a case names, as far as the closed list has its word."""
    nearest = {
        "stream.duplicate_delta": Reason.STREAM_DUPLICATE_DELTA,
        "stream.malformed_call": Reason.STREAM_MALFORMED_CALL,
    }
    word = expect.get("reason")
    return None if word is None else nearest.get(word) or Reason(word)


def parts_with_calls(dialect: Dialect, out: bytes) -> bool:
    reader = dialect.open_stream(dialect.parse_request(b'{"messages":[]}'))
    return any(calls_of(frame.events) for frame in reader.feed(out))


def test_a_verdict_compares_by_what_it_says() -> None:
    one = TurnVerdict(Turn.COMMITTED, None, Finish.COMPLETE, (Call(0, "a", "f", fragments=["{", "}"]),))
    assert told(one) == (Turn.COMMITTED, None, (("a", "f", "{}"),))
