"""OpenAI Chat Completions: `POST …/chat/completions`, also spoken by Azure, vLLM, Ollama and many others.

Facts and their evidence: the provider document openai-chat.md (rule ids CHAT-…, deviations DEV-…). What real servers
do differently on the wire is read here as their clients mean it.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
import orjson

from turngate.adapters import keys, sse
from turngate.adapters.dialect import (
    NO_CONTEXT,
    Ambiguous,
    Answer,
    RequestContext,
    Trouble,
    Undecodable,
    integer_in,
    messages_among,
    model_in,
    thinking_in,
    tokens_min,
    without_messages,
)
from turngate.validators.checks import Reason
from turngate.validators.graph import (
    Block,
    Budget,
    Check,
    Kind,
    MessageSequence,
    Oddity,
    Role,
    Setting,
    Tool,
)
from turngate.validators.stream import (
    CallDelta,
    CallNamed,
    CallOpened,
    ChoiceFinished,
    EndedEarly,
    Finish,
    Frame,
    FrameUnreadable,
    ProviderFailed,
    StreamEvent,
    TextDelta,
    TurnEnded,
    TurnStarted,
    arguments_fault,
)
from turngate.validators.turns import EMPTY

_NULL: Final = msgspec.Raw(b"null")


class _Part(msgspec.Struct, gc=False):
    type: str = ""
    image_url: msgspec.Raw = _NULL


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    # A string by the specification; some clients send the object itself, and some servers take it.
    arguments: str | dict[str, msgspec.Raw] | None = None


class _Custom(msgspec.Struct, gc=False):
    name: str | None = None


class _Call(msgspec.Struct, gc=False):
    id: str | None = None
    function: _Function | None = None
    custom: _Custom | None = None


class _Message(msgspec.Struct, gc=False):
    role: str = ""
    content: str | list[_Part | str] | msgspec.UnsetType | None = msgspec.UNSET
    refusal: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: _Function | None = None
    audio: msgspec.Raw = _NULL
    reasoning_content: msgspec.Raw = _NULL
    reasoning: msgspec.Raw = _NULL
    prefix: msgspec.Raw = _NULL


class _Request(msgspec.Struct, gc=False):
    messages: list[_Message]
    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    tools: msgspec.Raw = _NULL
    functions: msgspec.Raw = _NULL
    tool_choice: msgspec.Raw = _NULL
    parallel_tool_calls: msgspec.Raw = _NULL
    thinking: msgspec.Raw = _NULL
    continue_final_message: msgspec.Raw = _NULL
    max_tokens: msgspec.Raw = _NULL
    max_completion_tokens: msgspec.Raw = _NULL


class _ToolFunction(msgspec.Struct, gc=False):
    name: str = ""
    parameters: msgspec.Raw = _NULL


class _Tool(msgspec.Struct, gc=False):
    function: _ToolFunction | None = None
    custom: _ToolFunction | None = None


class _NamedChoice(msgspec.Struct, gc=False):
    function: _ToolFunction | None = None
    custom: _ToolFunction | None = None


_decode_request = msgspec.json.Decoder(_Request).decode
_decode_message = msgspec.json.Decoder(_Message).decode
_decode_tools = msgspec.json.Decoder(list[_Tool]).decode
_decode_choice = msgspec.json.Decoder(_NamedChoice | str | None).decode
_scan = msgspec.json.Decoder(msgspec.Raw).decode

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
    # What compatible servers know beyond these (openai-compatible.md sections 2 and 4).
    "input_text": Kind.TEXT,
    "output_text": Kind.TEXT,
    "thinking": Kind.THINKING,
    "input_image": Kind.IMAGE,
    "image_embeds": Kind.IMAGE,
    "audio_url": Kind.AUDIO,
    "video_url": Kind.VIDEO,
    "document_url": Kind.DOCUMENT,
    "file_url": Kind.FILE,
    "reference": Kind.REFERENCE,
}
_EMPTY: Final = frozenset({b"null", b"[]"})
_EDGES: Final = frozenset({Kind.TOOL_CALL, Kind.TOOL_RESULT})
_TEXTS: Final = frozenset({Kind.TEXT, Kind.REFUSAL, Kind.THINKING})
_ADDRESS_BYTES_MAX: Final = 4096
"""A longer image_url holds the image itself."""

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

    def parse_request(self, body: bytes, context: RequestContext = NO_CONTEXT) -> MessageSequence:
        try:
            request, strangers = _read(body)
            if keys.repeats_key(body):
                raise Ambiguous("a key stands twice in one object")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Undecodable(str(error)) from error
        reading = _Reading(len(request.messages))
        for turn, message in enumerate(request.messages):
            reading.add(turn, message)
        reading.note_strangers(strangers)
        blocks = tuple(reading.blocks)
        return MessageSequence(
            api=self.api,
            model=request.model or "",
            stream=bool(request.stream),
            blocks=blocks,
            messages=len(request.messages),
            uses_tools=bytes(request.tools) not in _EMPTY
            or bytes(request.functions) not in _EMPTY
            or any(block.kind in _EDGES for block in blocks),
            result_id_key="tool_call_id",
            choices=request.n or 1,
            turns=tuple(reading.turns),
            oddities=tuple(reading.oddities),
            setting=_setting(request, reading.prefixed),
            budget=None if context.window is None else _budget(body, request, context.window),
            names_nested=True,
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


def _read(body: bytes) -> tuple[_Request, list[int]]:
    """The request, and the places of what stands among the messages and is no object."""
    try:
        return _decode_request(body), []
    except msgspec.ValidationError:
        messages, strangers = messages_among(body)
        if not strangers:
            raise
        request = _decode_request(without_messages(body))
        request.messages = [_decode_message(message) for message in messages]
        return request, strangers


class _Reading:
    """The blocks of a request in the making, and what is odd about its messages."""

    __slots__ = ("_last", "blocks", "oddities", "prefixed", "turns")

    def __init__(self, messages: int) -> None:
        self.blocks: list[Block] = []
        self.oddities: list[Oddity] = []
        self.turns: list[Role] = []
        self.prefixed = False
        """The last message asks the model to go on with it."""
        self._last = messages - 1
        if messages == 0:
            self.note(Check.NO_MESSAGES, "/messages")

    def note(self, check: Check, at: str, about: str = "") -> None:
        self.oddities.append(Oddity(check, at, about))

    def note_strangers(self, places: list[int]) -> None:
        for place in places:
            self.note(Check.NOT_A_MESSAGE, f"/messages/{place}")

    def add(self, turn: int, message: _Message) -> None:
        """Content first, then the calls, as the provider reads a message."""
        role = _ROLES.get(message.role, Role.UNKNOWN)
        self.turns.append(role)
        at = f"/messages/{turn}"
        content = message.content
        if role is Role.TOOL:
            self.blocks.append(Block(role, Kind.TOOL_RESULT, turn, at, message.tool_call_id, message.name))
            if type(content) is not str or message.tool_call_id is None:
                self._note_result(at, message)
            return
        if type(content) is str:
            self.blocks.append(Block(role, Kind.TEXT, turn, f"{at}/content"))
            if not content:
                self._note_empty(at, role, message)
        elif isinstance(content, list):
            self._add_parts(turn, role, at, content)
            if not content:
                self._note_empty(at, role, message)
        else:
            self._note_null(at, role, message)
        if role is Role.ASSISTANT:
            self._add_rest(turn, at, message)
        elif role is Role.UNKNOWN:
            self.note(Check.ROLE_UNKNOWN, f"{at}/role" if message.role else at, message.role)
        if message.refusal is not None:
            self.blocks.append(Block(role, Kind.REFUSAL, turn, f"{at}/refusal"))
        if message.tool_calls is not None or message.function_call is not None:
            self._add_calls(turn, role, at, message)

    def _add_parts(self, turn: int, role: Role, at: str, parts: list[_Part | str]) -> None:
        refusals = 0
        for index, part in enumerate(parts):
            where = f"{at}/content/{index}"
            if isinstance(part, str):  # some servers take bare strings
                self.blocks.append(Block(role, Kind.TEXT, turn, where))
                continue
            kind = _PARTS.get(part.type, Kind.UNKNOWN)
            self.blocks.append(Block(role, kind, turn, where, wire=part.type))
            if kind is Kind.UNKNOWN:
                self.note(Check.KIND_UNKNOWN if part.type else Check.PART_WITHOUT_TYPE, where, part.type)
            elif kind is Kind.IMAGE:
                self._note_image(role, where, part)
            elif role is not Role.USER and kind not in _TEXTS:
                self.note(Check.KIND_IN_WRONG_ROLE, where, part.type)
            refusals += kind is Kind.REFUSAL
        if refusals and len(parts) > 1:
            self.note(Check.REFUSAL_MIXED, f"{at}/content")

    def _add_rest(self, turn: int, at: str, message: _Message) -> None:
        """What only an assistant's message has."""
        for name, thoughts in (
            ("reasoning_content", message.reasoning_content),
            ("reasoning", message.reasoning),
        ):
            if thoughts is not _NULL and memoryview(thoughts)[0] != _N:
                wire = EMPTY if len(thoughts) == len('""') else ""
                self.blocks.append(Block(Role.ASSISTANT, Kind.THINKING, turn, f"{at}/{name}", wire=wire))
        if message.prefix is not _NULL and bytes(message.prefix) == b"true":
            if turn == self._last:
                self.prefixed = True
            else:
                self.note(Check.PREFIX_NOT_LAST, f"{at}/prefix")

    def _add_calls(self, turn: int, role: Role, at: str, message: _Message) -> None:
        for index, call in enumerate(message.tool_calls or ()):
            where = f"{at}/tool_calls/{index}"
            function = call.function
            if function is not None:
                self.blocks.append(
                    Block(role, Kind.TOOL_CALL, turn, where, call.id, function.name, "function")
                )
                self._note_arguments(f"{where}/function/arguments", function.arguments)
            else:
                name = call.custom.name if call.custom is not None else None
                self.blocks.append(Block(role, Kind.TOOL_CALL, turn, where, call.id, name, "custom"))
        if message.function_call is not None:
            # No id on either side: the pairing cannot be checked (CHAT-B28).
            where, legacy = f"{at}/function_call", message.function_call
            self.blocks.append(Block(role, Kind.TOOL_CALL, turn, where, None, legacy.name, "function_call"))
            self._note_arguments(f"{where}/arguments", legacy.arguments)
            if message.tool_calls:
                self.note(Check.CALL_FORMS_MIXED, where)
        if message.tool_calls == []:
            self.note(Check.CALLS_EMPTY, f"{at}/tool_calls")
        elif role is not Role.ASSISTANT:
            self.note(Check.CALL_IN_WRONG_ROLE, f"{at}/tool_calls")

    # What is odd

    def _note_result(self, at: str, message: _Message) -> None:
        legacy, content = message.role == "function", message.content
        if legacy and message.name is None:
            self.note(Check.RESULT_WITHOUT_NAME, at)
        elif not legacy and message.tool_call_id is None:
            self.note(Check.RESULT_WITHOUT_ID, at)
        if content is msgspec.UNSET or (content is None and not legacy):
            self.note(Check.CONTENT_NULL, at if content is msgspec.UNSET else f"{at}/content")
        elif isinstance(content, list):
            self.note(Check.RESULT_AS_LIST, f"{at}/content")
            for index, part in enumerate(content):
                kind = Kind.TEXT if isinstance(part, str) else _PARTS.get(part.type, Kind.UNKNOWN)
                if not isinstance(part, str) and kind not in _TEXTS:
                    check = Check.MEDIA_IN_WRONG_ROLE if kind is Kind.IMAGE else Check.KIND_IN_WRONG_ROLE
                    self.note(check, f"{at}/content/{index}", part.type)

    def _note_image(self, role: Role, where: str, part: _Part) -> None:
        if role is not Role.USER:
            self.note(Check.MEDIA_IN_WRONG_ROLE, where, part.type)
        if len(part.image_url) < _ADDRESS_BYTES_MAX and _ADDRESS.match(bytes(part.image_url)):
            self.note(Check.IMAGE_BY_ADDRESS, f"{where}/image_url")

    def _note_null(self, at: str, role: Role, message: _Message) -> None:
        says = message.tool_calls or message.function_call or message.refusal is not None
        if role is Role.ASSISTANT and (says or message.audio is not _NULL):
            return  # calls, a refusal or an earlier spoken reply stand for the content
        self.note(Check.CONTENT_NULL, at if message.content is msgspec.UNSET else f"{at}/content")

    def _note_empty(self, at: str, role: Role, message: _Message) -> None:
        if role is Role.USER:
            self.note(Check.CONTENT_OF_USER_EMPTY, f"{at}/content")
        elif role is Role.ASSISTANT and not message.tool_calls and not message.function_call:
            self.note(Check.CONTENT_OF_ASSISTANT_EMPTY, f"{at}/content")

    def _note_arguments(self, at: str, arguments: str | dict[str, msgspec.Raw] | None) -> None:
        if not isinstance(arguments, str):
            if arguments is not None:
                self.note(Check.ARGUMENTS_NO_TEXT, at)
            return
        try:
            _scan(arguments)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            self._note_broken_arguments(at, arguments)
        else:
            if arguments[0] != "{" and not arguments.lstrip().startswith("{"):
                self.note(Check.ARGUMENTS_NO_OBJECT, at)

    def _note_broken_arguments(self, at: str, arguments: str) -> None:
        fault = arguments_fault(arguments)
        if not arguments.strip():
            # Nothing at all stands for no arguments; only some servers mind.
            self.note(Check.ARGUMENTS_EMPTY, at)
        elif fault is Reason.CALL_ARGUMENTS_UNCLOSED:
            self.note(Check.ARGUMENTS_UNCLOSED, at)
        elif fault is not None:
            self.note(Check.ARGUMENTS_INVALID, at)


_N: Final = ord("n")
_ADDRESS: Final = re.compile(rb'(\{\s*"url"\s*:\s*)?"https?://', re.IGNORECASE)


# -- what stands beside the messages ----------------------------------------------------------------------------


def _setting(request: _Request, prefixed: bool) -> Setting:
    tools, oddities = _tools(request)
    choice: str | None = None
    if request.tool_choice is not _NULL or request.parallel_tool_calls is not _NULL:
        choice = _couplings(request, oddities)
    continues = prefixed or bytes(request.continue_final_message) == b"true"
    if tools is None and choice is None and not continues and request.thinking is _NULL and not oddities:
        return Setting(request.model or "")
    return Setting(
        request.model or "", tools, choice, thinking_in(request.thinking), continues, tuple(oddities)
    )


def _tools(request: _Request) -> tuple[tuple[Tool, ...] | None, list[Oddity]]:
    oddities: list[Oddity] = []
    if bytes(request.tools) in _EMPTY:
        if len(request.tools) == len("[]"):
            oddities.append(Oddity(Check.TOOLS_EMPTY, "/tools"))
        return None, oddities
    try:
        declared = _decode_tools(request.tools)
    except msgspec.ValidationError:
        return None, oddities  # tools in a form of another API: nothing can be said of them
    tools = []
    for index, tool in enumerate(declared):
        key = "function" if tool.function is not None else "custom"
        function = tool.function or tool.custom
        if function is None:
            tools.append(Tool("", f"/tools/{index}", "unknown"))
            continue
        at = f"/tools/{index}/{key}"
        tools.append(Tool(function.name, at))
        if tool.function is not None and memoryview(function.parameters)[0] == _N:
            oddities.append(Oddity(Check.TOOL_WITHOUT_PARAMETERS, at))
    return tuple(tools), oddities


def _couplings(request: _Request, oddities: list[Oddity]) -> str | None:
    """Note what needs tools and has none; return the name of the one tool that must be called."""
    try:
        choice = _decode_choice(request.tool_choice)
    except msgspec.ValidationError:
        choice = None
    if bytes(request.tools) in _EMPTY and bytes(request.functions) in _EMPTY:
        if choice is not None:
            none = choice == "none"
            check = Check.NO_CHOICE_WITHOUT_TOOLS if none else Check.CHOICE_WITHOUT_TOOLS
            oddities.append(Oddity(check, "/tool_choice"))
        if bytes(request.parallel_tool_calls) != b"null":
            oddities.append(Oddity(Check.PARALLEL_WITHOUT_TOOLS, "/parallel_tool_calls"))
    if isinstance(choice, _NamedChoice):
        function = choice.function or choice.custom
        return function.name if function is not None else None
    return None


def _budget(body: bytes, request: _Request, window: int) -> Budget:
    key = "max_completion_tokens" if request.max_completion_tokens is not _NULL else "max_tokens"
    asked = integer_in(request.max_completion_tokens) or integer_in(request.max_tokens)
    return Budget(window, tokens_min(body), asked, f"/{key}")


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
        if not self._finished or self._begun > self._finished:
            return (EndedEarly(),)
        return (TurnEnded(),) if len(self._finished) < self._choices else ()

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
