"""Anthropic Messages: `POST …/messages`.

Facts and their evidence: the provider document anthropic-messages.md (sections A to G). Consecutive user messages are
one run of results (B1), consecutive assistant messages one turn (B8), and only client tools wait for results.
"""

import json
from collections.abc import Iterator
from typing import Final, Literal

import msgspec
import orjson

from turngate.adapters import sse
from turngate.adapters.dialect import Answer, Trouble, Undecodable, model_in
from turngate.validators.graph import Block, Kind, MessageSequence, Role
from turngate.validators.stream import (
    CallClosed,
    CallDelta,
    CallOpened,
    ChoiceFinished,
    Finish,
    Frame,
    FrameUnreadable,
    ProviderFailed,
    StreamEvent,
    TextDelta,
    TurnEnded,
    TurnStarted,
)

_NULL: Final = msgspec.Raw(b"null")


class _Block(msgspec.Struct, gc=False):
    type: str = ""
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None


class _Message(msgspec.Struct, gc=False):
    role: str = ""
    content: str | list[_Block] | None = None


class _Thread(msgspec.Struct, gc=False):
    type: str = ""


class _Request(msgspec.Struct, gc=False):
    messages: list[_Message]
    model: str | None = None
    stream: bool | None = None
    thread: _Thread | None = None
    tools: msgspec.Raw = _NULL
    mcp_servers: msgspec.Raw = _NULL


_decode_request = msgspec.json.Decoder(_Request).decode

_ROLES: Final = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM}
_KINDS: Final = {
    "text": Kind.TEXT,
    "image": Kind.IMAGE,
    "document": Kind.DOCUMENT,
    "search_result": Kind.SEARCH_RESULT,
    "tool_use": Kind.TOOL_CALL,
    "tool_result": Kind.TOOL_RESULT,
    "thinking": Kind.THINKING,
    "redacted_thinking": Kind.REDACTED_THINKING,
    "server_tool_use": Kind.SERVER_TOOL_CALL,
    "mcp_tool_use": Kind.SERVER_TOOL_CALL,
    "compaction": Kind.COMPACTION,
    "container_upload": Kind.FILE,
}
_EMPTY: Final = frozenset({b"null", b"[]"})
_CALLS: Final = frozenset({Kind.TOOL_CALL, Kind.SERVER_TOOL_CALL})
_EDGES: Final = frozenset({Kind.TOOL_CALL, Kind.TOOL_RESULT, Kind.SERVER_TOOL_CALL})

_FINISHES: Final = {
    "end_turn": (Finish.COMPLETE, False),
    "stop_sequence": (Finish.COMPLETE, False),
    "tool_use": (Finish.COMPLETE, True),
    "pause_turn": (Finish.COMPLETE, False),
    "compaction": (Finish.COMPLETE, False),
    "max_tokens": (Finish.TRUNCATED, False),
    "model_context_window_exceeded": (Finish.TRUNCATED, False),
    "refusal": (Finish.FILTERED, False),
}


class AnthropicMessages:
    """The dialect; see `turngate.adapters.dialect.Dialect`."""

    api: Final = "anthropic.messages"

    def parse_request(self, body: bytes) -> MessageSequence:
        try:
            request = _decode_request(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Undecodable(str(error)) from error
        blocks: list[Block] = []
        for turn, message in enumerate(request.messages):
            _add_blocks(blocks, turn, message)
        return MessageSequence(
            api=self.api,
            model=request.model or "",
            stream=bool(request.stream),
            blocks=tuple(blocks),
            messages=len(request.messages),
            uses_tools=bytes(request.tools) not in _EMPTY
            or bytes(request.mcp_servers) not in _EMPTY
            or any(block.kind in _EDGES for block in blocks),
            result_id_key="tool_use_id",
            continues=request.thread is not None and request.thread.type == "continue",
            joins_assistant_turns=True,
        )

    def model_of(self, body: bytes) -> str:
        return model_in(body)

    def open_stream(self, sequence: MessageSequence) -> "MessagesStream":
        return MessagesStream()

    def parse_answer(self, body: bytes) -> list[StreamEvent]:
        try:
            answer = msgspec.json.decode(body, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Undecodable(str(error)) from error
        if answer.type == "error":
            return [ProviderFailed(_shown(answer.error))]
        events: list[StreamEvent] = [TurnStarted(answer.id or "", answer.model or "")]
        calls = 0
        for block in answer.content:
            if block.type == "tool_use":
                events.append(CallOpened(calls, 0, block.id or "", block.name or ""))
                if bytes(block.input) != b"{}":
                    events.append(CallDelta(calls, bytes(block.input).decode(errors="replace")))
                events.append(CallClosed(calls))
                calls += 1
            elif block.text or block.thinking:
                events.append(TextDelta(len(block.text or block.thinking or "")))
        if answer.stop_reason:
            events += [*_finished(answer.stop_reason), TurnEnded()]
        return events

    def error(self, status: int, trouble: Trouble, operation: str, *, retry: bool = False) -> Answer:
        headers = {
            "content-type": "application/json",
            "request-id": operation,
            "x-should-retry": "true" if retry else "false",
        }
        kind = "invalid_request_error" if status < 500 else "api_error"
        return Answer(status, headers, _error_body(trouble, kind, request_id=operation))

    def stream_error(self, trouble: Trouble) -> bytes:
        # The event name must be exactly this: under any other the SDKs pass the error over (section G).
        return sse.event(_error_body(trouble, "api_error"), b"error")


def _error_body(trouble: Trouble, kind: str, **more: str) -> bytes:
    where = f"{trouble.reason} at {trouble.at}" if trouble.at else str(trouble.reason)
    error = {
        "type": kind,
        "message": f"turngate: {where}: {trouble.message}",
        "details": {"error_code": trouble.reason},
    }
    return orjson.dumps({"type": "error", "error": error, **more})


def _add_blocks(blocks: list[Block], turn: int, message: _Message) -> None:
    role = _ROLES.get(message.role, Role.UNKNOWN)
    at = f"/messages/{turn}/content"
    if isinstance(message.content, str):
        blocks.append(Block(role, Kind.TEXT, turn, at))
        return
    for index, block in enumerate(message.content or ()):
        kind = _KINDS.get(block.type)
        if kind is None:
            # web_search_tool_result and its kin answer a server's call inside the same assistant message.
            kind = Kind.SERVER_TOOL_RESULT if block.type.endswith("_tool_result") else Kind.UNKNOWN
        call_id = block.id if kind in _CALLS else block.tool_use_id
        blocks.append(Block(role, kind, turn, f"{at}/{index}", call_id, block.name))


# -- answers ----------------------------------------------------------------------------------------------------


class _AnswerBlock(msgspec.Struct, gc=False):
    type: str = ""
    id: str | None = None
    name: str | None = None
    text: str | None = None
    thinking: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"{}")


class _Answer(msgspec.Struct, gc=False):
    type: str = ""
    id: str | None = None
    model: str | None = None
    content: list[_AnswerBlock] = []
    stop_reason: str | None = None
    error: msgspec.Raw = _NULL


class _Delta(msgspec.Struct, gc=False):
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class _StartedBlock(msgspec.Struct, gc=False):
    type: str = ""
    id: str | None = None
    name: str | None = None


class _StartedMessage(msgspec.Struct, gc=False):
    id: str | None = None
    model: str | None = None


class _Event(msgspec.Struct, gc=False):
    type: str = ""
    index: int = 0
    delta: _Delta | None = None
    content_block: _StartedBlock | None = None
    message: _StartedMessage | None = None
    error: msgspec.Raw = _NULL


_decode_event = msgspec.json.Decoder(_Event).decode


class MessagesStream:
    """Reader of one streamed answer."""

    __slots__ = ("_calls", "_framer", "_open")

    closes_calls: Literal[True] = True

    def __init__(self) -> None:
        self._framer = sse.SseFramer()
        self._calls = 0
        self._open: dict[int, int] = {}  # content block index -> number of the client call in it

    @property
    def pending(self) -> bytes:
        return self._framer.pending

    def feed(self, data: bytes) -> list[Frame]:
        return [Frame(raw, self._read(raw)) for raw in self._framer.feed(data)]

    def _read(self, frame: bytes) -> tuple[StreamEvent, ...]:
        name, data = sse.fields(frame)
        if data is None:
            return ()
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            second = _second_reading(data)
            if second is None:
                # The API may add events of a name and shape we do not know; its own must be readable.
                return () if _foreign(name, error) else (FrameUnreadable(str(error)),)
            event = second
        if event.type == "content_block_delta" and event.delta is not None and event.delta.text:
            return (TextDelta(len(event.delta.text)),)  # nearly all of them, so without detours
        return tuple(self._events(event))

    def _events(self, event: _Event) -> Iterator[StreamEvent]:
        match event.type:
            case "content_block_delta":
                yield from self._delta(event.index, event.delta or _Delta())
            case "content_block_start":
                block = event.content_block
                if block is not None and block.type == "tool_use":
                    self._open[event.index] = self._calls
                    yield CallOpened(self._calls, 0, block.id or "", block.name or "")
                    self._calls += 1
            case "content_block_stop":
                if event.index in self._open:
                    yield CallClosed(self._open.pop(event.index))
            case "message_delta":
                if event.delta is not None and event.delta.stop_reason:
                    yield from _finished(event.delta.stop_reason)
            case "message_stop":
                yield TurnEnded()
            case "message_start":
                message = event.message or _StartedMessage()
                yield TurnStarted(message.id or "", message.model or "")
            case "error":
                yield ProviderFailed(_shown(event.error))

    def _delta(self, index: int, delta: _Delta) -> Iterator[StreamEvent]:
        if delta.partial_json is not None:
            if index in self._open:
                yield CallDelta(self._open[index], delta.partial_json)
        elif delta.text or delta.thinking:
            yield TextDelta(len(delta.text or delta.thinking or ""))


_NAMES: Final = frozenset(
    {
        b"message_start",
        b"content_block_start",
        b"content_block_delta",
        b"content_block_stop",
        b"message_delta",
        b"message_stop",
        b"error",
    }
)


def _foreign(name: bytes, error: Exception) -> bool:
    """True for an event of a name the API may have added since, or of a shape that no call can hide in."""
    return (bool(name) and name not in _NAMES) or (
        isinstance(error, msgspec.ValidationError) and name == b"message_start"
    )


def _finished(reason: str) -> Iterator[StreamEvent]:
    finish, for_tools = _FINISHES.get(reason, (Finish.OTHER, False))
    yield ChoiceFinished(0, finish, for_tools)


def _second_reading(data: bytes) -> _Event | None:
    """Half a surrogate pair is JSON to most clients, and to the strict decoder it is not."""
    try:
        return msgspec.convert(json.loads(data), _Event)
    except (ValueError, msgspec.ValidationError, RecursionError):
        return None


def _shown(error: msgspec.Raw) -> str:
    return bytes(error)[:200].decode(errors="replace")
