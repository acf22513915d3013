"""OpenAI Chat Completions: `POST …/chat/completions`, also spoken by Azure, vLLM, Ollama and many others.

Facts and their evidence: the provider document openai-chat.md (rule ids CHAT-…, deviations DEV-…). What real servers
do differently on the wire is read here as their clients mean it.
"""

import json
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
import orjson

from turngate.adapters import sse
from turngate.adapters.dialect import Answer, Trouble, Undecodable, model_in
from turngate.validators.graph import Block, Kind, MessageSequence, Role
from turngate.validators.stream import (
    CallDelta,
    CallNamed,
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


class _Part(msgspec.Struct, gc=False):
    type: str = ""


class _Function(msgspec.Struct, gc=False):
    name: str | None = None


class _Call(msgspec.Struct, gc=False):
    id: str | None = None
    function: _Function | None = None
    custom: _Function | None = None


class _Message(msgspec.Struct, gc=False):
    role: str = ""
    content: str | list[_Part | str] | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: _Function | None = None


class _Request(msgspec.Struct, gc=False):
    messages: list[_Message]
    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    tools: msgspec.Raw = _NULL
    functions: msgspec.Raw = _NULL


_decode_request = msgspec.json.Decoder(_Request).decode

_ROLES: Final = {
    "system": Role.SYSTEM,
    "developer": Role.DEVELOPER,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}
_PARTS: Final = {
    "text": Kind.TEXT,
    "image_url": Kind.IMAGE,
    "input_audio": Kind.AUDIO,
    "file": Kind.FILE,
    "refusal": Kind.REFUSAL,
}
_EMPTY: Final = frozenset({b"null", b"[]"})
_EDGES: Final = frozenset({Kind.TOOL_CALL, Kind.TOOL_RESULT})

_FINISHES: Final = {
    "stop": (Finish.COMPLETE, False),
    "tool_calls": (Finish.COMPLETE, True),
    "function_call": (Finish.COMPLETE, True),
    "length": (Finish.TRUNCATED, False),
    "content_filter": (Finish.FILTERED, False),
}


class OpenAIChat:
    """The dialect; see `turngate.adapters.dialect.Dialect`."""

    api: Final = "openai.chat"

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
            or bytes(request.functions) not in _EMPTY
            or any(block.kind in _EDGES for block in blocks),
            result_id_key="tool_call_id",
            choices=request.n or 1,
        )

    def model_of(self, body: bytes) -> str:
        return model_in(body)

    def open_stream(self, sequence: MessageSequence) -> "ChatStream":
        return ChatStream(sequence.choices)

    def parse_answer(self, body: bytes) -> list[StreamEvent]:
        try:
            answer = msgspec.json.decode(body, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Undecodable(str(error)) from error
        if bytes(answer.error) != b"null" and not answer.choices:
            return [ProviderFailed(_shown(answer.error))]
        events: list[StreamEvent] = [TurnStarted(answer.id or "", answer.model or "")]
        calls = 0
        for choice in answer.choices:
            message = choice.message
            if message.content:
                events.append(TextDelta(len(message.content)))
            for call in message.tool_calls or ():
                function = call.function or call.custom or _CallBody()
                events += _whole_call(calls, choice.index, call.id or "", function, call.custom is not None)
                calls += 1
            if message.function_call is not None and _says_anything(message.function_call):
                events += _whole_call(calls, choice.index, LEGACY_CALL_ID, message.function_call, False)
                calls += 1
            events += _finished(choice.index, choice.finish_reason)
        if answer.choices and all(choice.finish_reason for choice in answer.choices):
            events.append(TurnEnded())
        return events

    def error(self, status: int, trouble: Trouble, operation: str, *, retry: bool = False) -> Answer:
        headers = {
            "content-type": "application/json",
            "x-request-id": operation,
            "x-should-retry": "true" if retry else "false",
        }
        kind = "invalid_request_error" if status < 500 else "server_error"
        return Answer(status, headers, _error_body(trouble, kind))

    def stream_error(self, trouble: Trouble) -> bytes:
        return sse.event(_error_body(trouble, "server_error"))


LEGACY_CALL_ID: Final = "function_call"
"""Stands in for the id that the deprecated function calls have not got."""


def _error_body(trouble: Trouble, kind: str) -> bytes:
    where = f"{trouble.reason} at {trouble.at}" if trouble.at else str(trouble.reason)
    return orjson.dumps(
        {
            "error": {
                "message": f"turngate: {where}: {trouble.message}",
                "type": kind,
                "param": trouble.at or None,
                "code": trouble.reason,
            }
        }
    )


def _add_blocks(blocks: list[Block], turn: int, message: _Message) -> None:
    """Content first, then the calls, as the provider reads a message."""
    role = _ROLES.get(message.role, Role.UNKNOWN)
    at = f"/messages/{turn}"
    if role is Role.TOOL:
        blocks.append(Block(role, Kind.TOOL_RESULT, turn, at, message.tool_call_id, message.name))
        return
    content = message.content
    if isinstance(content, list):
        for index, part in enumerate(content):
            kind = Kind.TEXT if isinstance(part, str) else _PARTS.get(part.type, Kind.UNKNOWN)
            blocks.append(Block(role, kind, turn, f"{at}/content/{index}"))
    elif content is not None:
        blocks.append(Block(role, Kind.TEXT, turn, f"{at}/content"))
    if message.refusal is not None:
        blocks.append(Block(role, Kind.REFUSAL, turn, f"{at}/refusal"))
    if message.tool_calls:
        for index, call in enumerate(message.tool_calls):
            function = call.function or call.custom
            name = function.name if function is not None else None
            blocks.append(Block(role, Kind.TOOL_CALL, turn, f"{at}/tool_calls/{index}", call.id, name))
    if message.function_call is not None:
        # No id on either side: the pairing cannot be checked (CHAT-B28).
        name = message.function_call.name
        blocks.append(Block(role, Kind.TOOL_CALL, turn, f"{at}/function_call", None, name))


# -- answers ----------------------------------------------------------------------------------------------------


class _CallBody(msgspec.Struct, gc=False):
    name: str | None = None
    # DEV-07, DEV-08: null, or an object instead of its text. Its values stay as they came.
    arguments: str | dict[str, msgspec.Raw] | None = None
    input: str | None = None


class _WholeCall(msgspec.Struct, gc=False):
    id: str | None = None
    function: _CallBody | None = None
    custom: _CallBody | None = None


class _AnswerMessage(msgspec.Struct, gc=False):
    content: str | list[Any] | None = None
    tool_calls: list[_WholeCall] | None = None
    function_call: _CallBody | None = None


class _AnswerChoice(msgspec.Struct, gc=False):
    index: int = 0
    message: _AnswerMessage = msgspec.field(default_factory=_AnswerMessage)
    finish_reason: str | None = None


class _Answer(msgspec.Struct, gc=False):
    id: str | None = None
    model: str | None = None
    choices: list[_AnswerChoice] = []
    error: msgspec.Raw = _NULL


class _CallDelta(msgspec.Struct, gc=False):
    index: int | None = None
    id: str | None = None
    function: _CallBody | None = None
    custom: _CallBody | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | list[Any] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallDelta] | None = None
    function_call: _CallBody | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, gc=False):
    id: str | None = None
    model: str | None = None
    choices: list[_Choice] | None = None
    error: msgspec.Raw = _NULL


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_FALSY: Final = frozenset({b"null", b"false", b"{}", b'""', b"0"})
"""Error values that the SDKs do not raise on (openai-chat.md G.2)."""


class ChatStream:
    """Reader of one streamed answer. `choices` is how many the request asked for: all must finish.

    Servers that ignore `n` answer with fewer (openai-compatible.md section 0); then [DONE] ends the turn, if every
    choice that began has finished.
    """

    __slots__ = ("_begun", "_calls", "_choices", "_finished", "_framer", "_known", "_started")

    closes_calls: Literal[False] = False

    def __init__(self, choices: int = 1) -> None:
        self._framer = sse.SseFramer()
        self._choices = choices
        self._calls: list[_OpenCall] = []
        self._known: dict[tuple[int, int], int] = {}
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        self._started = False

    @property
    def pending(self) -> bytes:
        return self._framer.pending

    def feed(self, data: bytes) -> list[Frame]:
        return [Frame(raw, self._read(raw)) for raw in self._framer.feed(data)]

    def _read(self, frame: bytes) -> tuple[StreamEvent, ...]:
        _, data = sse.fields(frame)
        if data is None:
            return ()
        if data == b"[DONE]":
            return self._done()
        try:
            chunk = _decode_chunk(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            second = self._second_reading(data)
            if second is None:
                return _unreadable(data, error)
            chunk = second
        text = self._only_text(chunk)
        return (text,) if text is not None else tuple(self._events(chunk))

    def _only_text(self, chunk: _Chunk) -> TextDelta | None:
        """The event of a chunk that brings more text and nothing else: nearly all of them, so without detours."""
        choices = chunk.choices
        if not choices or len(choices) > 1 or chunk.error is not _NULL:
            return None
        choice, delta = choices[0], choices[0].delta
        if delta is None or not delta.content or choice.finish_reason or choice.index not in self._begun:
            return None
        if delta.tool_calls is not None or delta.function_call is not None:
            return None
        return TextDelta(len(delta.content))

    def _done(self) -> tuple[StreamEvent, ...]:
        short = 0 < len(self._finished) < self._choices
        return (TurnEnded(),) if short and self._begun <= self._finished else ()

    def _second_reading(self, data: bytes) -> _Chunk | None:
        """Half a surrogate pair is JSON to most clients, and to the strict decoder it is not."""
        try:
            return msgspec.convert(json.loads(data), _Chunk)
        except (ValueError, msgspec.ValidationError, RecursionError):
            return None

    def _events(self, chunk: _Chunk) -> Iterator[StreamEvent]:
        if not self._started and (chunk.id or chunk.model):
            self._started = True
            yield TurnStarted(chunk.id or "", chunk.model or "")
        if bytes(chunk.error) not in _FALSY:
            yield ProviderFailed(_shown(chunk.error))
            return
        for choice in chunk.choices or ():
            delta = choice.delta
            self._begun.add(choice.index)
            if delta is not None:
                text = delta.content or delta.reasoning_content or delta.refusal
                if text:
                    yield TextDelta(len(text))
                for item in delta.tool_calls or ():
                    yield from self._call(choice.index, item)
                if delta.function_call is not None and _says_anything(delta.function_call):
                    yield from self._call(
                        choice.index, _CallDelta(index=0, id=LEGACY_CALL_ID, function=delta.function_call)
                    )
            if choice.finish_reason:
                yield from _finished(choice.index, choice.finish_reason)
                self._finished.add(choice.index)
                if len(self._finished) >= self._choices and self._begun <= self._finished:
                    yield TurnEnded()

    def _call(self, choice: int, item: _CallDelta) -> Iterator[StreamEvent]:
        body = item.function or item.custom or _CallBody()
        id_ = item.id if item.id and item.id != "null" else ""  # Mistral's client reads "null" as absent
        number = self._locate(choice, item.index, id_)
        if number is None:
            number = len(self._calls)
            self._calls.append(_OpenCall(choice, id_, body.name or ""))
            if item.index is not None:
                self._known[choice, item.index] = number
            yield CallOpened(number, choice, id_, body.name or "", item.custom is not None)
        elif (id_ and not self._calls[number].id) or (body.name and not self._calls[number].name):
            call = self._calls[number]
            call.id, call.name = call.id or id_, call.name or body.name or ""
            yield CallNamed(number, id_, body.name or "")
        else:
            # Even a piece that says nothing new belongs to its call, and goes where that goes.
            yield CallDelta(number, _text(body))
            return
        fragment = _text(body)
        if fragment:
            yield CallDelta(number, fragment)

    def _locate(self, choice: int, index: int | None, id_: str) -> int | None:
        """The call that an item belongs to, or None for a new one (the assembly rule of openai-chat.md D.1).

        An index alone proves nothing: some servers number every call 0, others leave it out. A known index with a
        different id is a new call; without any index the last open call of the choice goes on.
        """
        if index is not None:
            number = self._known.get((choice, index))
            if number is None or not id_ or not self._calls[number].id or self._calls[number].id == id_:
                return number
        for number in range(len(self._calls) - 1, -1, -1):
            call = self._calls[number]
            if call.choice == choice and ((id_ and call.id == id_) or (index is None and not id_)):
                return number
        return None


class _OpenCall(msgspec.Struct, gc=False):
    choice: int
    id: str
    name: str


def _whole_call(
    number: int, choice: int, id_: str, body: _CallBody, free_text: bool
) -> Iterator[StreamEvent]:
    yield CallOpened(number, choice, id_, body.name or "", free_text)
    fragment = _text(body)
    if fragment:
        yield CallDelta(number, fragment)


def _says_anything(body: _CallBody) -> bool:
    """False for the empty call that some servers put into every answer (seen at Snowflake)."""
    return bool(body.name or body.arguments)


def _text(body: _CallBody) -> str:
    arguments = body.arguments if body.arguments is not None else body.input
    return msgspec.json.encode(arguments).decode() if isinstance(arguments, dict) else arguments or ""


def _finished(choice: int, reason: str | None) -> Iterator[StreamEvent]:
    if reason:
        finish, for_tools = _FINISHES.get(reason, (Finish.OTHER, False))
        yield ChoiceFinished(choice, finish, for_tools)


def _unreadable(data: bytes, error: Exception) -> tuple[StreamEvent, ...]:
    """A frame that is JSON of another shape is not ours to object to, unless a call may be in it."""
    if (
        isinstance(error, msgspec.ValidationError)
        and b"tool_calls" not in data
        and b"function_call" not in data
    ):
        return ()
    return (FrameUnreadable(str(error)),)


def _shown(error: msgspec.Raw) -> str:
    """The provider's words, bounded: they go to metrics' events as a cause, never as a label."""
    return bytes(error)[:200].decode(errors="replace")
