"""What is judged: sequences, streams with tool calls, whole answers with tool calls."""

import gzip
import json
from typing import Final

from wire_peers import (
    ANSWER_BODY,
    EVENTS,
    FRAMES,
    STREAM_BODY,
    TEXT_BODY,
    TOOLS_BODY,
    answer,
    chunked,
    length,
    sized,
    without,
)

from conformance.case import CHAT, OK, Case, Cases, Differs
from conformance.wire import Script, Wire, last_event

STREAMED_TOOLS: Final = json.dumps({**json.loads(TOOLS_BODY), "stream": True}).encode()
ORPHAN: Final = json.dumps(
    {"model": "m", "messages": [{"role": "tool", "tool_call_id": "call_9", "content": "1"}]}
).encode()
ROUNDS_MAX: Final = 1_000
"""A broken answer never comes to an end: seconds."""
CHUNKED_EVENTS: Final = EVENTS + b"Transfer-Encoding: chunked\r\n"


def _call_frame(call: dict[str, object], finish: str | None = None) -> bytes:
    delta = {"tool_calls": [{"index": 0, **call}]} if call else {}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: %s\n\n" % json.dumps({"id": "c1", "model": "m", "choices": [choice]}).encode()


CALL_FRAMES: Final = (
    FRAMES[0],
    _call_frame({"id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}),
    _call_frame({"function": {"arguments": '{"a": 1}'}}),
    _call_frame({}, "tool_calls"),
    FRAMES[-1],
)


def begun(body: bytes, told: bytes, rest: bytes) -> Script:
    """What the app has of an answer before the provider sends the rest and leaves, and what it has then."""

    async def script(wire: Wire) -> None:
        app = await wire.app()
        app.send(sized(CHAT, body))
        provider = await wire.provider()
        wire.note("request", await provider.request())
        provider.send(told)
        before = await wire.arrived(app)
        wire.note("before the rest", before.partition(b"\r\n\r\n")[2])
        provider.send(rest)
        provider.close()
        # The disk is asked before calls are let go: that is no matter of round trips.
        for _ in range(ROUNDS_MAX):
            before += await wire.arrived(app)
            head, _, all_of_it = before.partition(b"\r\n\r\n")
            if len(all_of_it) >= len(told.partition(b"\r\n\r\n")[2] + rest):
                break
        wire.note("status line", head.partition(b"\r\n")[0])
        wire.note("body", all_of_it)

    return script


def streamed(*frames: bytes, whole: bool) -> Script:
    """How a stream with a call looks to the app, by its last event."""

    async def script(wire: Wire) -> None:
        app = await wire.app()
        app.send(sized(CHAT, STREAMED_TOOLS))
        provider = await wire.provider()
        wire.note("request", await provider.request())
        provider.send(answer(CHUNKED_EVENTS, chunked(*frames) if whole else chunked(*frames)[:-5]))
        if not whole:
            provider.close()
        got = await app.answer()
        assert got is not None
        wire.note("text", got.body.startswith(FRAMES[0]))
        wire.note("last event", last_event(got))
        wire.note("of the call", b"call_1" in got.body)
        wire.note("transfer is whole", got.whole)

    return script


def judged(body: bytes, told: bytes = OK, *, close: bool = False) -> Script:
    """Whether a request reaches the provider, and what is made of its answer."""

    async def script(wire: Wire) -> None:
        wire.answering(told, close=close)
        app = await wire.app()
        app.send(sized(CHAT, body))
        wire.note("answer", await app.answer())
        wire.note("requests at the provider", [each.body for each in wire.requests])

    return script


async def compressed_stream(wire: Wire) -> None:
    """A provider that compresses a stream, also where it was asked not to."""
    app = await wire.app()
    app.send(sized(CHAT, STREAM_BODY, b"Accept-Encoding: gzip", b"X: 1"))
    provider = await wire.provider()
    got = await provider.request()
    wire.note("Accept-Encoding", got.get(b"accept-encoding"))
    wire.note("request", without(got, b"accept-encoding"))
    coded = gzip.compress(b"".join(FRAMES), mtime=0)
    provider.send(answer(EVENTS + b"Content-Encoding: gzip\r\n" + length(coded), coded))
    wire.note("answer", await app.answer())


async def repeatable(wire: Wire) -> None:
    """What the app is told of repeating a request with tools that failed."""
    app = await wire.app()
    app.send(sized(CHAT, TOOLS_BODY))
    provider = await wire.provider()
    await provider.request()
    provider.send(
        answer(b"Retry-After: 7\r\nx-should-retry: true\r\n" + length(b"{}"), b"{}", status=b"529 Overloaded")
    )
    got = await app.answer()
    assert got is not None
    wire.note("answer", without(got, b"x-should-retry"))
    wire.note("x-should-retry", got.get(b"x-should-retry"))


async def marks(wire: Wire) -> None:
    """Headers of Turngate's own in an answer that passes."""
    app = await wire.app()
    app.send(sized(CHAT, TEXT_BODY))
    provider = await wire.provider()
    await provider.request()
    provider.send(OK)
    got = await app.answer()
    assert got is not None
    wire.note("x-turngate", [name for name, _ in got.headers if name.startswith(b"x-turngate-")])


_WHOLE_CALL: Final = answer(EVENTS, b"".join(CALL_FRAMES[:3]))
_PADDED: Final = answer(b"Content-Length: %d\r\n" % (len(ANSWER_BODY) + 3), b"\n\n\n")

GENERATIONS: Final[Cases] = {
    "An illegal sequence (a result without its call)": Case(
        "arrives at the provider",
        judged(ORPHAN),
        enforce=Differs(
            "Z4-1",
            "refused in the provider's own shape",
            {"answer": "400 result.orphan, retry false", "requests at the provider": []},
        ),
    ),
    "Events of text": Case(
        "each arrives before the next",
        begun(STREAM_BODY, answer(EVENTS, FRAMES[0] + FRAMES[1]), b"".join(FRAMES[2:])),
    ),
    "Events of a tool call": Case(
        "each arrives before the next",
        begun(STREAMED_TOOLS, _WHOLE_CALL, b"".join(CALL_FRAMES[3:])),
        enforce=Differs(
            "Z4-2", "held until the turn is complete, then all of them", {"before the rest": FRAMES[0]}
        ),
    ),
    "A stream that breaks off within a tool call": Case(
        "the part arrives, then the close",
        streamed(*CALL_FRAMES[:3], whole=False),
        enforce=Differs(
            "Z4-2",
            "nothing of the call, but an error that its SDK raises",
            {"last event": "error stream.no_stop", "of the call": False, "transfer is whole": True},
        ),
    ),
    "A streamed tool call whose arguments are left open": Case(
        "arrives",
        streamed(
            *CALL_FRAMES[:2], _call_frame({"function": {"arguments": "{"}}), *CALL_FRAMES[3:], whole=True
        ),
        enforce=Differs(
            "Z4-2",
            "nothing of the call, but an error that its SDK raises",
            {"last event": "error call.arguments_unclosed", "of the call": False},
        ),
    ),
    "Blank lines before a JSON answer": Case("arrive at once", begun(TEXT_BODY, _PADDED, ANSWER_BODY)),
    "The same for a request with tools": Case(
        "arrive at once",
        begun(TOOLS_BODY, _PADDED, ANSWER_BODY),
        enforce=Differs(
            "Z4-2", "JSON that may hold a call is judged before its first byte", {"before the rest": b""}
        ),
    ),
    "A JSON answer that is cut, for a request with tools": Case(
        "the part arrives, then the close",
        judged(TOOLS_BODY, answer(b"Content-Length: 999\r\n", ANSWER_BODY[:40]), close=True),
        enforce=Differs(
            "Z4-2",
            "nothing of it, but an error that its SDK raises and does not repeat",
            {"answer": "502 stream.truncated, retry false"},
        ),
    ),
    "A compressed stream (gzip)": Case(
        "Accept-Encoding arrives; the bytes stay as they are",
        compressed_stream,
        enforce=Differs(
            "Z4-4",
            "an event cannot be cut out of a compressed stream; one that comes all the same passes",
            {"Accept-Encoding": b"identity"},
        ),
    ),
    "`x-should-retry: true` on an error of a request with tools": Case(
        "arrives: SDKs then repeat whatever it was",
        repeatable,
        enforce=Differs(
            "Z4-6", "what the provider's own tools did, a repeat does again", {"x-should-retry": None}
        ),
    ),
    "`x-turngate-*` in an answer that passes": Case(
        "none",
        marks,
        enforce=Differs(
            "Z4-7", "names the operation in ledger and console", {"x-turngate": [b"x-turngate-operation"]}
        ),
    ),
}
