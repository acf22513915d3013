"""Anthropic Messages: `POST …/messages`.

Facts and their evidence: the provider document anthropic-messages.md (sections A to G). Consecutive user messages are
one run of results (B1), consecutive assistant messages one turn (B8), and only client tools wait for results.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, Literal

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
    CallClosed,
    CallDelta,
    CallOpened,
    ChoiceFinished,
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
)

_NULL: Final = msgspec.Raw(b"null")
_UNSET: Final = msgspec.UNSET


class _Written(msgspec.Struct, gc=False, omit_defaults=True):
    """What stands among the messages. Written out again it is what was read (`keys.nothing_dropped`): so a field that is
    null is told from one that is not there, and fields are named that nobody looks at, because clients send them."""


class _Block(_Written):
    type: str = ""
    id: str | msgspec.UnsetType | None = _UNSET
    tool_use_id: str | msgspec.UnsetType | None = _UNSET
    name: str | msgspec.UnsetType | None = _UNSET
    # Looked at, not decoded: most of a body is in these.
    text: msgspec.Raw = _NULL
    input: msgspec.Raw = _NULL
    content: msgspec.Raw = _NULL
    is_error: msgspec.Raw = _NULL
    thinking: msgspec.Raw = _NULL
    signature: msgspec.Raw = _NULL
    data: msgspec.Raw = _NULL
    source: msgspec.Raw = _NULL
    title: msgspec.Raw = _NULL
    context: msgspec.Raw = _NULL
    citations: msgspec.Raw = _NULL
    cache_control: msgspec.Raw = _NULL
    caller: msgspec.Raw = _NULL


class _Message(_Written):
    role: str = ""
    content: str | list[_Block] | msgspec.UnsetType | None = _UNSET
    output_config: msgspec.Raw = _NULL
    clear_at: str | msgspec.UnsetType | None = _UNSET


class _Thread(msgspec.Struct, gc=False):
    type: str = ""


class _Request(msgspec.Struct, gc=False):
    messages: list[_Message]
    model: str | None = None
    stream: bool | None = None
    thread: _Thread | None = None
    system: msgspec.Raw = _NULL
    tools: msgspec.Raw = _NULL
    tool_choice: msgspec.Raw = _NULL
    mcp_servers: msgspec.Raw = _NULL
    thinking: msgspec.Raw = _NULL
    cache_control: msgspec.Raw = _NULL
    fallback_credit_token: msgspec.Raw = _NULL
    max_tokens: msgspec.Raw = _NULL
    anthropic_version: str | None = None
    anthropic_beta: msgspec.Raw = _NULL


class _Schema(msgspec.Struct, gc=False):
    type: msgspec.Raw = _NULL


class _Tool(msgspec.Struct, gc=False):
    name: str = ""
    type: str | None = None
    input_schema: _Schema | None = None
    cache_control: msgspec.Raw = _NULL


class _ToolChoice(msgspec.Struct, gc=False):
    type: str = ""
    name: str | None = None


_decode_request = msgspec.json.Decoder(_Request).decode
_decode_message = msgspec.json.Decoder(_Message).decode
_decode_blocks = msgspec.json.Decoder(list[_Block]).decode
_decode_tools = msgspec.json.Decoder(list[_Tool]).decode
_decode_choice = msgspec.json.Decoder(_ToolChoice).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode
_encode = msgspec.json.Encoder().encode

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
# Members that are asked for at every block: an enum looks them up slowly.
_USER: Final = Role.USER
_ASSISTANT: Final = Role.ASSISTANT
_SYSTEM: Final = Role.SYSTEM
_UNKNOWN: Final = Role.UNKNOWN
_TEXT: Final = Kind.TEXT
_CALL: Final = Kind.TOOL_CALL
_RESULT: Final = Kind.TOOL_RESULT
_EDGES: Final = frozenset({Kind.TOOL_CALL, Kind.TOOL_RESULT, Kind.SERVER_TOOL_CALL})

_ELSEWHERE: Final[dict[Role, dict[Kind, Check]]] = {
    Role.USER: {
        Kind.TOOL_CALL: Check.CALL_IN_WRONG_ROLE,
        **dict.fromkeys(
            (
                Kind.THINKING,
                Kind.REDACTED_THINKING,
                Kind.SERVER_TOOL_CALL,
                Kind.SERVER_TOOL_RESULT,
            ),
            Check.KIND_IN_WRONG_ROLE,
        ),
    },
    Role.ASSISTANT: {
        Kind.TOOL_RESULT: Check.RESULT_IN_WRONG_ROLE,
        Kind.IMAGE: Check.KIND_IN_WRONG_ROLE,
        Kind.SEARCH_RESULT: Check.KIND_IN_WRONG_ROLE,
    },
}
"""Kinds under a role that the table of blocks (A5) does not give them."""
_TOOLSET_EDITS: Final = frozenset({"tool_addition", "tool_removal"})
_OF_BETAS: Final = _TOOLSET_EDITS | {"fallback", "mcp_tool_listing", "connector_text"}
"""Documented kinds of betas that have no kind of ours (A5)."""
_STRICTER: Final = "2026-10-21"
"""The API version from which documents of the assistant and citations of the user are refused (B19)."""
_BLANK_BYTES_MAX: Final = 256
"""A longer text is not looked through for being blank."""

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

    def parse_request(self, body: bytes, context: RequestContext = NO_CONTEXT) -> MessageSequence:
        try:
            return self._sequence(keys.compacted(body), context)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Undecodable(str(error)) from error

    def _sequence(self, text: bytes, context: RequestContext) -> MessageSequence:
        request, strangers = _read(text)
        reading = _Reading(len(request.messages), _betas(request, context), _version(request, context))
        for turn, message in enumerate(request.messages):
            reading.add(turn, message)
        # What stands for strangers is not what was read.
        whole = not strangers and keys.nothing_dropped(text, len(_encode(request.messages)))
        if not whole and keys.repeats_key(text):
            raise Ambiguous("a key stands twice in one object")
        reading.finish(strangers)
        blocks = tuple(reading.blocks)
        return MessageSequence(
            api=self.api,
            model=request.model or "",
            stream=bool(request.stream),
            blocks=blocks,
            messages=len(request.messages),
            uses_tools=bytes(request.tools) not in _EMPTY
            or bytes(request.mcp_servers) not in _EMPTY
            or any(block.kind in _EDGES for block in blocks),
            result_id_key="tool_use_id",
            continues=request.thread is not None and request.thread.type == "continue",
            joins_assistant_turns=True,
            turns=tuple(reading.turns),
            oddities=tuple(reading.oddities),
            marks=tuple(reading.marks),
            setting=_setting(request),
            budget=None
            if context.window is None
            else Budget(context.window, tokens_min(text), integer_in(request.max_tokens), "/max_tokens"),
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
        return [_said(turn, said) for turn, said in enumerate(messages) if said.role == "assistant"]

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
        events += _usage(answer.usage)
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


def _betas(request: _Request, context: RequestContext) -> frozenset[str] | None:
    """The betas that header and body switch on; None where the header is not known."""
    try:
        named = frozenset(_decode_texts(request.anthropic_beta))
    except msgspec.DecodeError:
        named = frozenset()
    return named or None if context.betas is None else context.betas | named


def _version(request: _Request, context: RequestContext) -> str:
    return context.version or request.anthropic_version or ""


class _Reading:
    """The blocks of a request in the making, and what is odd about its messages."""

    __slots__ = ("_betas", "_compactions", "_last", "_stricter", "blocks", "marks", "oddities", "turns")

    def __init__(self, messages: int, betas: frozenset[str] | None, version: str) -> None:
        self.blocks: list[Block] = []
        self.oddities: list[Oddity] = []
        self.turns: list[Role] = []
        self.marks: list[str] = []
        self._betas = betas
        self._stricter = version[:1].isdigit() and version >= _STRICTER
        self._last = messages - 1
        self._compactions = 0
        if messages == 0:
            self.note(Check.NO_MESSAGES, "/messages")

    def note(self, check: Check, at: str, about: str = "") -> None:
        self.oddities.append(Oddity(check, at, about))

    def finish(self, strangers: list[int]) -> None:
        for place in strangers:
            self.note(Check.NOT_A_MESSAGE, f"/messages/{place}")

    def add(self, turn: int, message: _Message) -> None:
        role = _ROLES.get(message.role, _UNKNOWN)
        self.turns.append(role)
        if role is _UNKNOWN:
            at = f"/messages/{turn}"
            self.note(Check.ROLE_UNKNOWN, f"{at}/role" if message.role else at, message.role)
        content = message.content
        if isinstance(content, list):
            for index, block in enumerate(content):
                self._add_block(turn, index, role, message, block)
            if role is _ASSISTANT and turn == self._last and content:
                self._note_end(f"/messages/{turn}/content/{len(content) - 1}", content[-1])
        elif isinstance(content, str):
            self.blocks.append(Block(role, _TEXT, turn, "/content"))
            if content and (content[-1].isspace() or content[0].isspace()):
                self._note_blank(turn, role, f"/messages/{turn}/content", content)
        else:
            at = f"/messages/{turn}"
            self.note(Check.CONTENT_NULL, at if content is _UNSET else f"{at}/content")
            return
        if not content:
            self._note_empty(role, f"/messages/{turn}", message)

    def _add_block(self, turn: int, index: int, role: Role, message: _Message, block: _Block) -> None:
        type_ = block.type
        kind = _KINDS.get(type_)
        if kind is _TEXT:
            added = Block(role, kind, turn, "/content", index)
            if len(block.text) <= _BLANK_BYTES_MAX or block.citations is not _NULL:
                self._note_text(role, added, block)
        elif kind is _RESULT:
            answers = block.tool_use_id if block.tool_use_id is not _UNSET else None
            name = block.name if block.name is not _UNSET else None
            added = Block(role, kind, turn, "/content", index, answers, name, type_)
            if answers is None:
                self.note(Check.RESULT_WITHOUT_ID, added.at)
        elif kind is _CALL:
            added = self._called(role, kind, turn, index, block)
            if memoryview(block.input)[0] != _BRACE:
                at = added.at
                self.note(Check.ARGUMENTS_NO_OBJECT, at if block.input is _NULL else f"{at}/input")
        else:
            added = self._rarer(role, kind, turn, index, block)
            kind = added.kind
        self.blocks.append(added)
        if block.cache_control is not _NULL and memoryview(block.cache_control)[0] != _N:
            self.marks.append(added.at)
        if role is _SYSTEM:
            self._note_system(added.at, kind, message, type_)
        elif role is not _UNKNOWN and (check := _ELSEWHERE[role].get(kind)) is not None:
            self.note(check, added.at, type_)

    def _called(self, role: Role, kind: Kind, turn: int, index: int, block: _Block) -> Block:
        id_ = block.id if block.id is not _UNSET else None
        name = block.name if block.name is not _UNSET else None
        return Block(role, kind, turn, "/content", index, id_, name, block.type)

    def _rarer(self, role: Role, kind: Kind | None, turn: int, index: int, block: _Block) -> Block:
        """A block that is no text and no client tool's."""
        type_ = block.type
        if kind is Kind.SERVER_TOOL_CALL:
            return self._called(role, kind, turn, index, block)
        if kind is None:
            # web_search_tool_result and its kin answer a server's call inside the same assistant message.
            kind = Kind.SERVER_TOOL_RESULT if type_.endswith("_tool_result") else Kind.UNKNOWN
        answers = block.tool_use_id if block.tool_use_id is not _UNSET else None
        name = block.name if block.name is not _UNSET else None
        added = Block(role, kind, turn, "/content", index, answers, name, type_)
        match kind:
            case Kind.THINKING:
                if len(block.signature) <= len('""') or memoryview(block.signature)[0] == _N:
                    self.note(Check.SIGNATURE_MISSING, added.at)
            case Kind.COMPACTION:
                self._note_compaction(role, index, added.at, block)
            case Kind.DOCUMENT if self._stricter and role is _ASSISTANT:
                self.note(Check.DOCUMENT_OF_ASSISTANT, added.at)
            case Kind.UNKNOWN:
                self._note_unknown(added.at, type_)
        return added

    # What is odd

    def _note_text(self, role: Role, added: Block, block: _Block) -> None:
        text = block.text
        if len(text) == len('""'):
            self.note(Check.TEXT_EMPTY, added.at)
        elif len(text) <= _BLANK_BYTES_MAX and text is not _NULL and _is_blank(text):
            blank = Check.TEXT_OF_ASSISTANT_BLANK if role is _ASSISTANT else Check.TEXT_BLANK
            self.note(blank, added.at)
        cited = len(block.citations) > len("[]") and memoryview(block.citations)[0] != _N
        if cited and self._stricter and role is _USER:
            self.note(Check.CITATIONS_OF_USER, f"{added.at}/citations")

    def _note_blank(self, turn: int, role: Role, at: str, text: str) -> None:
        if text.isspace():
            blank = Check.TEXT_OF_ASSISTANT_BLANK if role is _ASSISTANT else Check.TEXT_BLANK
            self.note(blank, at)
        elif role is _ASSISTANT and turn == self._last and text[-1].isspace():
            self.note(Check.PREFILL_BLANK, at)

    def _note_end(self, at: str, block: _Block) -> None:
        """The very end of a history that ends with the assistant."""
        if block.type != "text" or len(block.text) <= len('""') or memoryview(block.text)[0] != _QUOTE:
            return
        text = _lenient_text(block.text)
        if text[-1:].isspace() and not text.isspace():
            self.note(Check.PREFILL_BLANK, at)

    def _note_empty(self, role: Role, at: str, message: _Message) -> None:
        if role is Role.USER:
            self.note(Check.CONTENT_OF_USER_EMPTY, f"{at}/content")
        elif role is Role.SYSTEM and message.output_config is _NULL:
            self.note(Check.CONTENT_OF_SYSTEM_EMPTY, f"{at}/content")

    def _note_compaction(self, role: Role, index: int, at: str, block: _Block) -> None:
        if role is Role.SYSTEM:
            self.note(Check.COMPACTION_OF_SYSTEM, at)
        elif index:
            self.note(Check.COMPACTION_MISPLACED, at)
        if len(block.content) == len('""'):
            self.note(Check.COMPACTION_EMPTY, f"{at}/content")
        elif memoryview(block.content)[0] == _QUOTE:
            self._compactions += 1
            if self._compactions > 1:
                self.note(Check.COMPACTION_REPEATED, at)

    def _note_unknown(self, at: str, type_: str) -> None:
        if not type_:
            self.note(Check.PART_WITHOUT_TYPE, at)
        elif type_ == "fallback" and self._betas is not None and not self._betas:
            self.note(Check.KIND_WITHOUT_BETA, at, type_)
        elif type_ not in _OF_BETAS:
            # The set of kinds is open: what a beta that was sent may have switched on is never called unknown.
            certain = self._betas is not None and not self._betas
            self.note(Check.KIND_UNKNOWN if certain else Check.KIND_UNCERTAIN, at, type_)

    def _note_system(self, at: str, kind: Kind, message: _Message, type_: str) -> None:
        if kind is Kind.TEXT or kind is Kind.COMPACTION:
            return
        if type_ not in _TOOLSET_EDITS or message.clear_at == "next_user_message":
            self.note(Check.KIND_OF_SYSTEM, at, type_)


_N: Final = ord("n")
_BRACE: Final = ord("{")
_QUOTE: Final = ord('"')


def _is_blank(text: msgspec.Raw) -> bool:
    return memoryview(text)[0] == _QUOTE and _lenient_text(text).isspace()


def _lenient_text(text: msgspec.Raw) -> str:
    try:
        return _decode_text(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""  # half a surrogate pair: whatever it is, it is not blank


# -- what stands beside the messages ----------------------------------------------------------------------------


def _setting(request: _Request) -> Setting:
    oddities: list[Oddity] = []
    marks: list[str] = []
    tools = _tools(request, oddities, marks)
    _look_at_system(request, oddities, marks)
    if request.cache_control is not _NULL and memoryview(request.cache_control)[0] != _N:
        marks.append("/cache_control")
    return Setting(
        request.model or "",
        tools,
        _choice(request, oddities),
        thinking_in(request.thinking) if request.thinking is not _NULL else None,
        request.fallback_credit_token is not _NULL,
        tuple(oddities),
        tuple(marks),
    )


def _tools(request: _Request, oddities: list[Oddity], marks: list[str]) -> tuple[Tool, ...] | None:
    if bytes(request.tools) in _EMPTY:
        return None
    try:
        declared = _decode_tools(request.tools)
    except msgspec.ValidationError:
        return None  # tools in a form of another API: nothing can be said of them
    tools = []
    for index, tool in enumerate(declared):
        at = f"/tools/{index}"
        custom = tool.type is None or tool.type == "custom"
        tools.append(Tool(tool.name, at, "" if custom else tool.type or ""))
        if tool.cache_control is not _NULL and memoryview(tool.cache_control)[0] != _N:
            marks.append(at)
        if not custom:
            continue
        if tool.input_schema is None:
            oddities.append(Oddity(Check.TOOL_WITHOUT_SCHEMA, at))
        elif bytes(tool.input_schema.type) != b'"object"':
            missing = tool.input_schema.type is _NULL
            where = f"{at}/input_schema" if missing else f"{at}/input_schema/type"
            oddities.append(Oddity(Check.TOOL_SCHEMA_TYPE, where))
    return tuple(tools)


def _look_at_system(request: _Request, oddities: list[Oddity], marks: list[str]) -> None:
    if memoryview(request.system)[0] != ord("["):
        return
    try:
        blocks = _decode_blocks(request.system)
    except msgspec.ValidationError:
        return
    for index, block in enumerate(blocks):
        if block.cache_control is not _NULL and memoryview(block.cache_control)[0] != _N:
            marks.append(f"/system/{index}")
            if len(block.text) == len('""'):
                oddities.append(Oddity(Check.TEXT_EMPTY, f"/system/{index}"))


def _choice(request: _Request, oddities: list[Oddity]) -> str | None:
    """The one tool that must be called."""
    if request.tool_choice is _NULL:
        return None
    if memoryview(request.tool_choice)[0] == _QUOTE:
        oddities.append(Oddity(Check.CHOICE_NO_OBJECT, "/tool_choice"))
        return None
    try:
        choice = _decode_choice(request.tool_choice)
    except msgspec.ValidationError:
        return None
    return choice.name if choice.type == "tool" else None


# -- what an answer is held against ---------------------------------------------------------------------------------


class _DeclaredTool(msgspec.Struct, gc=False):
    name: str = ""
    type: str | None = None
    input_schema: msgspec.Raw = _NULL


class _Declaration(msgspec.Struct, gc=False):
    tools: list[_DeclaredTool] | None = None


class _SpokenPart(msgspec.Struct, gc=False):
    type: str = ""
    text: str = ""
    id: str | None = None


class _Spoken(msgspec.Struct, gc=False):
    role: str = ""
    content: str | list[_SpokenPart] = ""


class _History(msgspec.Struct, gc=False):
    messages: list[_Spoken]


_decode_declaration = msgspec.json.Decoder(_Declaration).decode
_decode_history = msgspec.json.Decoder(_History).decode
_TOOLS_CHANGE: Final = (b'"tool_addition"', b'"tool_changes"')


def _declared(body: bytes) -> Tools | None:
    try:
        declared = _decode_declaration(body).tools
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # tools in a form of another API: nothing can be said of them
    if not declared:
        return None
    # A built-in toolset is called by the names of its members, and messages may add tools (A2, B18).
    custom = all(tool.name and tool.type in (None, "custom") for tool in declared)
    return Tools(
        {
            tool.name: b"" if memoryview(tool.input_schema)[0] == _N else bytes(tool.input_schema)
            for tool in declared
        },
        custom and not any(change in body for change in _TOOLS_CHANGE),
    )


def _said(turn: int, message: _Spoken) -> Said:
    at, content = f"/messages/{turn}", message.content
    if isinstance(content, str):
        return Said(at, content)
    calls = [
        (f"{at}/content/{index}", part.id)
        for index, part in enumerate(content)
        if part.type == "tool_use" and part.id
    ]
    return Said(at, "".join(part.text for part in content if part.type == "text"), calls)


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
    usage: msgspec.Raw = _NULL
    error: msgspec.Raw = _NULL


class _Usage(msgspec.Struct, gc=False):
    input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    output_tokens: int | None = None


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
    usage: msgspec.Raw = _NULL


class _Event(msgspec.Struct, gc=False):
    type: str = ""
    index: int = 0
    delta: _Delta | None = None
    content_block: _StartedBlock | None = None
    message: _StartedMessage | None = None
    usage: msgspec.Raw = _NULL
    error: msgspec.Raw = _NULL


_decode_event = msgspec.json.Decoder(_Event).decode


class MessagesStream:
    """Reader of one streamed answer.

    Blocks are numbered 0, 1, 2…, and one is open at a time. The SDKs append a block at its start and find it again by
    its index: where the two disagree, they put a call's arguments into another block and raise nothing. So what is
    irregular in the numbers around a call ends the turn; around text it is only noted.
    """

    __slots__ = ("_blocks", "_calls", "_framer", "_known", "_open", "_others")

    closes_calls: Literal[True] = True

    def __init__(self) -> None:
        self._framer = sse.SseFramer()
        self._blocks = 0  # the next index
        self._calls = 0
        self._open: dict[int, int | None] = {}  # index of each open block -> number of the client call in it
        self._known: dict[int, str] = {}  # index -> id of the client call that was ever there
        self._others: set[int] = set()  # indexes whose latest block is no client call

    @property
    def pending(self) -> bytes:
        return self._framer.pending

    @property
    def pending_is_idle(self) -> bool:
        return sse.is_idle(self.pending)

    def feed(self, data: bytes) -> list[Frame]:
        return [self._read(raw) for raw in self._framer.feed(data)]

    def _read(self, frame: bytes) -> Frame:
        name, data = sse.fields(frame)
        if data is None or data == b"[DONE]":  # the last word of another API, which bridges add to this one
            return Frame(frame, ())
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            second = _second_reading(data)
            if second is None:
                # The API may add events of a name and shape we do not know; its own must be readable.
                return Frame(frame, () if _foreign(name, error) else (FrameUnreadable(str(error)),))
            event = second
        delta = event.delta
        if event.type == "content_block_delta" and delta is not None and delta.text:
            return Frame(frame, (TextDelta(len(delta.text)),), delta.text)  # nearly all, so without detours
        return Frame(frame, tuple(self._events(event)))

    def _events(self, event: _Event) -> Iterator[StreamEvent]:
        match event.type:
            case "content_block_delta":
                yield from self._delta(event.index, event.delta or _Delta())
            case "content_block_start":
                yield from self._start(event.index, event.content_block or _StartedBlock())
            case "content_block_stop":
                yield from self._stop(event.index)
            case "message_delta":
                yield from _usage(event.usage)
                if event.delta is not None and event.delta.stop_reason:
                    yield from _finished(event.delta.stop_reason)
            case "message_stop":
                yield TurnEnded()
            case "message_start":
                message = event.message or _StartedMessage()
                yield TurnStarted(message.id or "", message.model or "")
                yield from _usage(message.usage)
            case "error":
                yield ProviderFailed(_shown(event.error))

    def _start(self, index: int, block: _StartedBlock) -> Iterator[StreamEvent]:
        is_call = block.type == "tool_use"
        if index < self._blocks:
            another = is_call and self._known.get(index, block.id) != block.id
            yield Irregular(
                Reason.STREAM_CALL_ID_CONFLICT if another else Reason.STREAM_DUPLICATE_DELTA,
                fatal=is_call or index in self._known,
            )
        elif index > self._blocks > 0:
            yield Irregular(Reason.STREAM_OUT_OF_ORDER)  # the SDKs raise on it by themselves, or do not mind
        self._blocks = max(self._blocks, index) + 1
        self._open[index] = None
        if not is_call:
            self._others.add(index)
        else:
            self._others.discard(index)
            self._open[index] = self._calls
            self._known[index] = block.id or ""
            yield CallOpened(self._calls, 0, block.id or "", block.name or "")
            self._calls += 1

    def _stop(self, index: int) -> Iterator[StreamEvent]:
        if index not in self._open:
            yield Irregular(
                Reason.STREAM_DUPLICATE_DELTA if index < self._blocks else Reason.STREAM_OUT_OF_ORDER
            )
        elif (call := self._open.pop(index)) is not None:
            yield CallClosed(call)

    def _delta(self, index: int, delta: _Delta) -> Iterator[StreamEvent]:
        if delta.partial_json is not None:
            if index not in self._open:
                # A call whose beginning was lost, or a piece behind its end. One that says nothing changes nothing,
                # and what belongs to a server's own tool is run by nobody here.
                behind = index in self._known or index in self._others
                yield Irregular(
                    Reason.STREAM_AFTER_STOP if behind else Reason.STREAM_OUT_OF_ORDER,
                    fatal=bool(delta.partial_json) and index not in self._others,
                )
            elif (call := self._open[index]) is not None:
                yield CallDelta(call, delta.partial_json)
        elif delta.text or delta.thinking:
            yield TextDelta(len(delta.text or delta.thinking or ""))


def _usage(usage: msgspec.Raw) -> Iterator[UsageReported]:
    """Tokens in and out, if that can be read. The API counts what was read from or written to the cache apart."""
    if usage is _NULL or memoryview(usage)[0] == _N:
        return
    with suppress(msgspec.DecodeError):
        counted = msgspec.json.decode(usage, type=_Usage)
        cached = (counted.cache_creation_input_tokens or 0) + (counted.cache_read_input_tokens or 0)
        yield UsageReported(
            -1 if counted.input_tokens is None else counted.input_tokens + cached,
            -1 if counted.output_tokens is None else counted.output_tokens,
        )


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
    return bytes(error)[:ERROR_BYTES_MAX].decode(errors="replace")
