"""OpenAI Chat Completions: `POST …/chat/completions`, also spoken by Azure, vLLM, Ollama and many others.

Facts and their evidence: the provider document openai-chat.md (rule ids CHAT-…, deviations DEV-…). What real servers
do differently on the wire is read here as their clients mean it.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
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
from turngate.validators.previews import Said
from turngate.validators.schemas import Tools
from turngate.validators.stream import (
    ERROR_BYTES_MAX,
    CallDelta,
    CallDisplaced,
    CallNamed,
    CallOpened,
    ChoiceFinished,
    EndedEarly,
    Finish,
    Frame,
    FrameUnreadable,
    Irregular,
    ProviderFailed,
    StreamEvent,
    TextDelta,
    TurnEnded,
    TurnStarted,
    UsageReported,
    arguments_fault,
)
from turngate.validators.turns import EMPTY

_NULL: Final = msgspec.Raw(b"null")
_UNSET: Final = msgspec.UNSET


class _Written(msgspec.Struct, gc=False, omit_defaults=True):
    """What stands among the messages. Written out again it is what was read (`keys.nothing_dropped`): so a field that is
    null is told from one that is not there, and fields are named that nobody looks at, because clients send them."""


class _Part(_Written):
    type: str = ""
    text: msgspec.Raw = _NULL
    image_url: msgspec.Raw = _NULL
    input_audio: msgspec.Raw = _NULL
    file: msgspec.Raw = _NULL
    refusal: msgspec.Raw = _NULL
    cache_control: msgspec.Raw = _NULL


class _Function(_Written):
    name: str | msgspec.UnsetType | None = msgspec.UNSET
    arguments: msgspec.Raw = _NULL


class _Custom(_Written):
    name: str | msgspec.UnsetType | None = msgspec.UNSET
    input: msgspec.Raw = _NULL


class _Call(_Written):
    id: str | msgspec.UnsetType | None = msgspec.UNSET
    type: msgspec.Raw = _NULL
    function: _Function | msgspec.UnsetType | None = msgspec.UNSET
    custom: _Custom | msgspec.UnsetType | None = msgspec.UNSET
    index: msgspec.Raw = _NULL


class _Message(_Written):
    role: str = ""
    content: msgspec.Raw = _NULL  # most of a body is in these
    tool_calls: list[_Call] | msgspec.UnsetType | None = msgspec.UNSET
    tool_call_id: str | msgspec.UnsetType | None = msgspec.UNSET
    name: str | msgspec.UnsetType | None = msgspec.UNSET
    refusal: str | msgspec.UnsetType | None = msgspec.UNSET
    function_call: _Function | msgspec.UnsetType | None = msgspec.UNSET
    audio: msgspec.Raw = _NULL
    annotations: msgspec.Raw = _NULL
    reasoning_content: msgspec.Raw = _NULL
    reasoning: msgspec.Raw = _NULL
    reasoning_details: msgspec.Raw = _NULL
    cache_control: msgspec.Raw = _NULL
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
_decode_parts = msgspec.json.Decoder(list[_Part | str]).decode
_decode_text = msgspec.json.Decoder(str).decode
# A string by the specification; some clients send the object itself, and some servers take it.
_decode_arguments = msgspec.json.Decoder(str | dict[str, msgspec.Raw] | None).decode
_decode_tools = msgspec.json.Decoder(list[_Tool]).decode
_decode_choice = msgspec.json.Decoder(_NamedChoice | str | None).decode
_encode = msgspec.json.Encoder().encode
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
# Members that are asked for at every message: an enum looks them up slowly.
_ASSISTANT: Final = Role.ASSISTANT
_TOOL: Final = Role.TOOL
_UNKNOWN: Final = Role.UNKNOWN
_TEXT: Final = Kind.TEXT
_CALL: Final = Kind.TOOL_CALL
_RESULT: Final = Kind.TOOL_RESULT
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
            return self._sequence(keys.compacted(body), context)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Undecodable(str(error)) from error

    def _sequence(self, text: bytes, context: RequestContext) -> MessageSequence:
        request, strangers = _read(text)
        if not _is_utf8(text):
            _check_contents(request.messages)
        reading = _Reading(len(request.messages))
        for turn, message in enumerate(request.messages):
            reading.add(turn, message)
        # What stands for strangers is not what was read.
        whole = not strangers and reading.whole
        whole = whole and keys.nothing_dropped(text, len(_encode(request.messages)))
        if not whole and keys.repeats_key(text):
            raise Ambiguous("a key stands twice in one object")
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
            budget=None if context.window is None else _budget(text, request, context.window),
            names_nested=True,
        )

    def model_of(self, body: bytes) -> str:
        return model_in(body)

    def declared_tools(self, body: bytes) -> Tools | None:
        return _declared(body)

    def said(self, body: bytes) -> list[Said]:
        try:
            messages = _decode_history(body).messages
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return []  # what stands there is judged by the rules; here nothing can be recognised in it
        return [
            Said(f"/messages/{turn}", _spoken(message.content), _named_calls(turn, message))
            for turn, message in enumerate(messages)
            if message.role == "assistant"
        ]

    def open_stream(self, sequence: MessageSequence) -> "ChatStream":
        return ChatStream(sequence.choices)

    def parse_answer(self, body: bytes) -> list[StreamEvent]:
        try:
            answer = msgspec.json.decode(body, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Undecodable(str(error)) from error
        if bytes(answer.error) != b"null" and not answer.choices:
            return [_failed(answer.error)]
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
        events += _usage(answer.usage)
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


def _is_utf8(text: bytes) -> bool:
    try:
        return text.isascii() or bool(text.decode())
    except UnicodeDecodeError:
        return False


def _check_contents(messages: list[_Message]) -> None:
    """Decode the texts, which else are only looked at. Raises UnicodeDecodeError or msgspec.DecodeError."""
    for message in messages:
        if memoryview(message.content)[0] == _QUOTE:
            _decode_text(message.content)


class _Reading:
    """The blocks of a request in the making, and what is odd about its messages."""

    __slots__ = ("_last", "blocks", "oddities", "prefixed", "turns", "whole")

    def __init__(self, messages: int) -> None:
        self.blocks: list[Block] = []
        self.oddities: list[Oddity] = []
        self.turns: list[Role] = []
        self.prefixed = False
        """The last message asks the model to go on with it."""
        self.whole = True
        """Nothing is known to have been dropped from a list of parts."""
        self._last = messages - 1
        if messages == 0:
            self.note(Check.NO_MESSAGES, "/messages")

    def note(self, check: Check, at: str, about: str = "") -> None:
        self.oddities.append(Oddity(check, at, about))

    def note_strangers(self, places: list[int]) -> None:
        for place in places:
            self.note(Check.NOT_A_MESSAGE, f"/messages/{place}")

    def add(self, turn: int, message: _Message) -> None:
        """Content first, then the calls, as the provider reads a message. Raises msgspec.DecodeError."""
        role = _ROLES.get(message.role, _UNKNOWN)
        self.turns.append(role)
        content = message.content
        opens = memoryview(content)[0]
        if role is _TOOL:
            id_ = message.tool_call_id if message.tool_call_id is not _UNSET else None
            name = message.name if message.name is not _UNSET else None
            self.blocks.append(Block(role, _RESULT, turn, "", None, id_, name))
            if opens != _QUOTE or id_ is None:
                self._note_result(f"/messages/{turn}", opens, message)
            return
        if opens == _QUOTE:
            self.blocks.append(Block(role, _TEXT, turn, "/content"))
            if len(content) == len('""'):
                self._note_empty(turn, role, message)
        elif opens == _BRACKET:
            self._add_parts(turn, role, message)
        else:
            self._note_null(turn, role, opens, message)
        if role is _ASSISTANT:
            self._add_rest(turn, message)
        elif role is _UNKNOWN:
            at = f"/messages/{turn}"
            self.note(Check.ROLE_UNKNOWN, f"{at}/role" if message.role else at, message.role)
        if type(message.refusal) is str:
            self.blocks.append(Block(role, Kind.REFUSAL, turn, "/refusal"))
        if message.tool_calls is not _UNSET or message.function_call is not _UNSET:
            self._add_calls(turn, role, message)

    def _parts(self, content: msgspec.Raw) -> list[_Part | str]:
        parts = _decode_parts(content)
        self.whole = self.whole and len(_encode(parts)) == len(content)
        return parts

    def _add_parts(self, turn: int, role: Role, message: _Message) -> None:
        refusals = 0
        parts = self._parts(message.content)
        for index, part in enumerate(parts):
            if isinstance(part, str):  # some servers take bare strings
                self.blocks.append(Block(role, _TEXT, turn, "/content", index))
                continue
            kind = _PARTS.get(part.type, Kind.UNKNOWN)
            block = Block(role, kind, turn, "/content", index, wire=part.type)
            self.blocks.append(block)
            if kind is Kind.UNKNOWN:
                self.note(Check.KIND_UNKNOWN if part.type else Check.PART_WITHOUT_TYPE, block.at, part.type)
            elif kind is Kind.IMAGE:
                self._note_image(role, block.at, part)
            elif role is not Role.USER and kind not in _TEXTS:
                self.note(Check.KIND_IN_WRONG_ROLE, block.at, part.type)
            refusals += kind is Kind.REFUSAL
        if refusals and len(parts) > 1:
            self.note(Check.REFUSAL_MIXED, f"/messages/{turn}/content")
        if not parts:
            self._note_empty(turn, role, message)

    def _add_rest(self, turn: int, message: _Message) -> None:
        """What only an assistant's message has."""
        if message.reasoning_content is not _NULL:
            self._add_thoughts(turn, "/reasoning_content", message.reasoning_content)
        if message.reasoning is not _NULL:
            self._add_thoughts(turn, "/reasoning", message.reasoning)
        if message.prefix is not _NULL and bytes(message.prefix) == b"true":
            if turn == self._last:
                self.prefixed = True
            else:
                self.note(Check.PREFIX_NOT_LAST, f"/messages/{turn}/prefix")

    def _add_thoughts(self, turn: int, field: str, thoughts: msgspec.Raw) -> None:
        if memoryview(thoughts)[0] != _N:
            wire = EMPTY if len(thoughts) == len('""') else ""
            self.blocks.append(Block(_ASSISTANT, Kind.THINKING, turn, field, wire=wire))

    def _add_calls(self, turn: int, role: Role, message: _Message) -> None:
        for index, call in enumerate(message.tool_calls or ()):
            function, custom = call.function, call.custom
            id_ = call.id if call.id is not _UNSET else None
            if function:
                name = function.name if function.name is not _UNSET else None
                block = Block(role, _CALL, turn, "/tool_calls", index, id_, name, "function")
                self.blocks.append(block)
                self._note_arguments(block, "/function/arguments", function.arguments)
            else:
                name = custom.name if custom and custom.name is not _UNSET else None
                self.blocks.append(Block(role, _CALL, turn, "/tool_calls", index, id_, name, "custom"))
        if message.function_call:
            # No id on either side: the pairing cannot be checked (CHAT-B28).
            legacy = message.function_call
            name = legacy.name if legacy.name is not _UNSET else None
            block = Block(role, _CALL, turn, "/function_call", None, None, name, "function_call")
            self.blocks.append(block)
            self._note_arguments(block, "/arguments", legacy.arguments)
            if message.tool_calls:
                self.note(Check.CALL_FORMS_MIXED, block.at)
        if message.tool_calls == []:
            self.note(Check.CALLS_EMPTY, f"/messages/{turn}/tool_calls")
        elif role is not _ASSISTANT and (message.tool_calls or message.function_call):
            self.note(Check.CALL_IN_WRONG_ROLE, f"/messages/{turn}/tool_calls")

    # What is odd

    def _note_result(self, at: str, opens: int, message: _Message) -> None:
        legacy, content = message.role == "function", message.content
        if legacy and not isinstance(message.name, str):
            self.note(Check.RESULT_WITHOUT_NAME, at)
        elif not legacy and not isinstance(message.tool_call_id, str):
            self.note(Check.RESULT_WITHOUT_ID, at)
        if opens == _QUOTE:
            return
        if content is _NULL or (opens == _N and not legacy):
            self.note(Check.CONTENT_NULL, at if content is _NULL else f"{at}/content")
        elif opens != _N:
            parts = self._parts(content)
            self.note(Check.RESULT_AS_LIST, f"{at}/content")
            for index, part in enumerate(parts):
                kind = Kind.TEXT if isinstance(part, str) else _PARTS.get(part.type, Kind.UNKNOWN)
                if not isinstance(part, str) and kind not in _TEXTS:
                    check = Check.MEDIA_IN_WRONG_ROLE if kind is Kind.IMAGE else Check.KIND_IN_WRONG_ROLE
                    self.note(check, f"{at}/content/{index}", part.type)

    def _note_image(self, role: Role, where: str, part: _Part) -> None:
        if role is not Role.USER:
            self.note(Check.MEDIA_IN_WRONG_ROLE, where, part.type)
        if len(part.image_url) < _ADDRESS_BYTES_MAX and _ADDRESS.match(bytes(part.image_url)):
            self.note(Check.IMAGE_BY_ADDRESS, f"{where}/image_url")

    def _note_null(self, turn: int, role: Role, opens: int, message: _Message) -> None:
        if opens != _N:
            _decode_parts(message.content)  # raises: it is neither a text nor a list
        says = message.tool_calls or message.function_call or isinstance(message.refusal, str)
        if role is _ASSISTANT and (says or message.audio is not _NULL):
            return  # calls, a refusal or an earlier spoken reply stand for the content
        at = f"/messages/{turn}"
        self.note(Check.CONTENT_NULL, at if message.content is _NULL else f"{at}/content")

    def _note_empty(self, turn: int, role: Role, message: _Message) -> None:
        if role is Role.USER:
            self.note(Check.CONTENT_OF_USER_EMPTY, f"/messages/{turn}/content")
        elif role is _ASSISTANT and not message.tool_calls and not message.function_call:
            self.note(Check.CONTENT_OF_ASSISTANT_EMPTY, f"/messages/{turn}/content")

    def _note_arguments(self, call: Block, field: str, written: msgspec.Raw) -> None:
        arguments = _decode_arguments(written)
        if not isinstance(arguments, str):
            if arguments is not None:
                self.note(Check.ARGUMENTS_NO_TEXT, call.at + field)
            return
        try:
            _scan(arguments)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            self._note_broken_arguments(call.at + field, arguments)
        else:
            if arguments[0] != "{" and not arguments.lstrip().startswith("{"):
                self.note(Check.ARGUMENTS_NO_OBJECT, call.at + field)

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
_QUOTE: Final = ord('"')
_BRACKET: Final = ord("[")
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


# -- what an answer is held against ---------------------------------------------------------------------------------


class _Declaration(msgspec.Struct, gc=False):
    tools: list[_Tool] | None = None
    functions: list[_ToolFunction] | None = None


class _SpokenPart(msgspec.Struct, gc=False):
    text: str | None = None


class _MadeCall(msgspec.Struct, gc=False):
    id: str | None = None


class _Spoken(msgspec.Struct, gc=False):
    role: str = ""
    content: str | list[_SpokenPart | str] | None = None
    tool_calls: list[_MadeCall] | None = None


class _History(msgspec.Struct, gc=False):
    messages: list[_Spoken]


_decode_declaration = msgspec.json.Decoder(_Declaration).decode
_decode_history = msgspec.json.Decoder(_History).decode


def _declared(body: bytes) -> Tools | None:
    try:
        declaration = _decode_declaration(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # tools in a form of another API: nothing can be said of them
    schemas: dict[str, bytes] = {}
    complete = True
    for function in declaration.functions or ():
        schemas[function.name] = _schema(function)
    for tool in declaration.tools or ():
        if tool.function is not None:
            schemas[tool.function.name] = _schema(tool.function)
        elif tool.custom is not None:
            schemas[tool.custom.name] = b""
        else:
            complete = False  # a server's own tool: what its calls are named, only the server knows
    return Tools(schemas, complete) if declaration.functions or declaration.tools else None


def _schema(function: _ToolFunction) -> bytes:
    return b"" if memoryview(function.parameters)[0] == _N else bytes(function.parameters)


def _spoken(content: str | list[_SpokenPart | str] | None) -> str:
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else part.text or "" for part in content)
    return content or ""


def _named_calls(turn: int, message: _Spoken) -> list[tuple[str, str]]:
    return [
        (f"/messages/{turn}/tool_calls/{index}", call.id)
        for index, call in enumerate(message.tool_calls or ())
        if call.id
    ]


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
    usage: msgspec.Raw = _NULL
    error: msgspec.Raw = _NULL


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Error(msgspec.Struct, gc=False):
    code: str | int | None = None


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
    usage: msgspec.Raw = _NULL
    error: msgspec.Raw = _NULL


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_LAST_WORD: Final = b"[DONE]"
_FALSY: Final = frozenset({b"null", b"false", b"{}", b'""', b"0"})
"""Error values that the SDKs do not raise on (openai-chat.md G.2)."""


class ChatStream:
    """Reader of one streamed answer. `choices` is how many the request asked for: all must finish.

    Servers that ignore `n` answer with fewer (openai-compatible.md section 0); then [DONE] ends the turn, if every
    choice that began has finished.
    """

    __slots__ = ("_begun", "_calls", "_choices", "_displaced", "_finished", "_framer", "_known", "_started")

    closes_calls: Literal[False] = False

    def __init__(self, choices: int = 1) -> None:
        self._framer = sse.SseFramer()
        self._choices = choices
        self._calls: list[_OpenCall] = []
        self._known: dict[tuple[int, int], int] = {}
        self._displaced: list[tuple[int, int]] = []  # (choice, call) of calls whose index another one took
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        self._started = False

    @property
    def pending(self) -> bytes:
        return self._framer.pending

    @property
    def pending_is_idle(self) -> bool:
        return sse.is_idle(self.pending) or sse.fields(self.pending)[1] == _LAST_WORD

    def feed(self, data: bytes) -> list[Frame]:
        return [self._read(raw) for raw in self._framer.feed(data)]

    def _read(self, frame: bytes) -> Frame:
        _, data = sse.fields(frame)
        if data is None:
            return Frame(frame, ())
        if data == _LAST_WORD:
            return Frame(frame, self._done())
        try:
            chunk = _decode_chunk(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            second = self._second_reading(data)
            if second is None:
                return Frame(frame, _unreadable(data, error))
            chunk = second
        return self._only_text(frame, chunk) or Frame(frame, tuple(self._events(chunk)), _shown_text(chunk))

    def _only_text(self, frame: bytes, chunk: _Chunk) -> Frame | None:
        """A frame that brings more text and nothing else: nearly all of them, so without detours."""
        choices = chunk.choices
        if not choices or len(choices) > 1 or chunk.error is not _NULL:
            return None
        choice, delta = choices[0], choices[0].delta
        if delta is None or choice.finish_reason or choice.index not in self._begun:
            return None
        content = delta.content
        if not content or delta.tool_calls is not None or delta.function_call is not None:
            return None
        return Frame(frame, (TextDelta(len(content)),), _kept(content) if choice.index == 0 else "")

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
            yield _failed(chunk.error)
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
                for _, call in filter(lambda place: place[0] == choice.index, self._displaced):
                    yield CallDisplaced(call)
                yield from _finished(choice.index, choice.finish_reason)
                self._finished.add(choice.index)
                if len(self._finished) >= self._choices and self._begun <= self._finished:
                    yield TurnEnded()
        yield from _usage(chunk.usage)

    def _call(self, choice: int, item: _CallDelta) -> Iterator[StreamEvent]:
        body = item.function or item.custom or _CallBody()
        id_ = item.id if item.id and item.id != "null" else ""  # Mistral's client reads "null" as absent
        number = self._locate(choice, item.index, id_)
        if number is None:
            number = len(self._calls)
            self._calls.append(_OpenCall(choice, id_, body.name or ""))
            if item.index is not None:
                if (choice, item.index) in self._known:
                    self._displaced.append((choice, self._known[choice, item.index]))
                self._known[choice, item.index] = number
            self._finished.discard(choice)  # it needs another finish
            yield CallOpened(number, choice, id_, body.name or "", item.custom is not None)
        elif (id_ and not self._calls[number].id) or (body.name and not self._calls[number].name):
            call = self._calls[number]
            call.id, call.name = call.id or id_, call.name or body.name or ""
            yield CallNamed(number, id_, body.name or "")
        else:
            if choice in self._finished and (id_ or body.name):
                # Some clients take every id for a new call: behind the finish that would run the call again.
                yield Irregular(Reason.STREAM_AFTER_STOP, fatal=True)
            elif body.name and body.name != self._calls[number].name:
                # Of two names clients keep the first, the last, or both joined.
                yield Irregular(Reason.STREAM_CALL_ID_CONFLICT)
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


def _kept(content: str | list[Any]) -> str:
    """What an app keeps of a delta. Content in parts (Mistral's) is only counted."""
    return content if isinstance(content, str) else ""


def _shown_text(chunk: _Chunk) -> str:
    deltas = (choice.delta for choice in chunk.choices or () if choice.index == 0)
    return "".join(_kept(delta.content) for delta in deltas if delta is not None and delta.content)


def _usage(usage: msgspec.Raw) -> Iterator[UsageReported]:
    """What a chunk or an answer says of its tokens, if that can be read: a strange count is no fault of the turn."""
    if usage is _NULL or memoryview(usage)[0] == _N:
        return
    with suppress(msgspec.DecodeError):
        counted = msgspec.json.decode(usage, type=_Usage)
        if counted.prompt_tokens is not None or counted.completion_tokens is not None:
            yield UsageReported(_known(counted.prompt_tokens), _known(counted.completion_tokens))


def _known(tokens: int | None) -> int:
    return -1 if tokens is None else tokens


_MALFORMED_CALL: Final = "tool_use_failed"
"""Groq's code for a call of its model that it could not read."""


def _failed(error: msgspec.Raw) -> ProviderFailed:
    try:
        code = msgspec.json.decode(error, type=_Error).code
    except msgspec.DecodeError:
        code = None  # an error in another shape, a bare string, say
    return ProviderFailed(_shown(error), code == _MALFORMED_CALL)


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
    return bytes(error)[:ERROR_BYTES_MAX].decode(errors="replace")
