"""The provider-neutral message graph: blocks in the order the provider reads them, and the tool edges between them.

A sequence holds what the rules need and nothing else: no message text, no bytes. Adapters build it; nobody changes it.

How a call is answered differs by provider only in words. Both dialects read the history as one list of blocks, and
a result counts where it stands in the *run*: the unbroken row of results right after the assistant's blocks. In Chat
Completions a block of the run is a message of role `tool` (openai-chat.md B01 to B05); in Messages it is a
`tool_result` block, and the run goes on across consecutive user messages (anthropic-messages.md B1 to B4).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec


class Role(StrEnum):
    """Who speaks. A role the adapter does not know is `UNKNOWN`, never guessed."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    UNKNOWN = "unknown"

    # An enum's own hash is computed in Python at every look-up; equality is the text's already.
    __hash__ = str.__hash__


class Kind(StrEnum):
    """What a block is. A kind the adapter does not know stays in the graph as `UNKNOWN`; it is never dropped."""

    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    FILE = "file"
    DOCUMENT = "document"
    REFUSAL = "refusal"
    THINKING = "thinking"
    REDACTED_THINKING = "redacted_thinking"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    SERVER_TOOL_CALL = "server_tool_call"
    SERVER_TOOL_RESULT = "server_tool_result"
    COMPACTION = "compaction"
    SEARCH_RESULT = "search_result"
    REFERENCE = "reference"
    UNKNOWN = "unknown"

    __hash__ = str.__hash__


class Check(StrEnum):
    """Everything that is looked for in a request. Adapters notice what a single message tells (an `Oddity`), rules
    what only several tell together. `REASONS` in `turngate.validators.checks` says what each is reported as."""

    NO_MESSAGES = "no_messages"
    NOT_A_MESSAGE = "not_a_message"
    ROLE_UNKNOWN = "role_unknown"
    ROLE_UNSUPPORTED = "role_unsupported"
    ROLE_OF_MODEL = "role_of_model"
    CALL_IN_WRONG_ROLE = "call_in_wrong_role"
    RESULT_IN_WRONG_ROLE = "result_in_wrong_role"
    MEDIA_IN_WRONG_ROLE = "media_in_wrong_role"
    KIND_IN_WRONG_ROLE = "kind_in_wrong_role"
    DOCUMENT_OF_ASSISTANT = "document_of_assistant"
    CITATIONS_OF_USER = "citations_of_user"
    KIND_OF_SYSTEM = "kind_of_system"
    COMPACTION_OF_SYSTEM = "compaction_of_system"
    COMPACTION_MISPLACED = "compaction_misplaced"
    COMPACTION_REPEATED = "compaction_repeated"
    COMPACTION_EMPTY = "compaction_empty"
    ARGUMENTS_UNCLOSED = "arguments_unclosed"
    ARGUMENTS_INVALID = "arguments_invalid"
    ARGUMENTS_EMPTY = "arguments_empty"
    ARGUMENTS_NO_OBJECT = "arguments_no_object"
    ARGUMENTS_NO_TEXT = "arguments_no_text"
    ID_REPEATED = "id_repeated"
    ID_REUSED = "id_reused"
    ID_PATTERN = "id_pattern"
    ID_TOO_LONG = "id_too_long"
    SERVER_ID_PATTERN = "server_id_pattern"
    CALL_WITHOUT_ID = "call_without_id"
    NAME_EMPTY = "name_empty"
    NAME_PATTERN = "name_pattern"
    RESULT_WITHOUT_ID = "result_without_id"
    RESULT_WITHOUT_NAME = "result_without_name"
    RESULT_AS_LIST = "result_as_list"
    RESULT_ORPHAN = "result_orphan"
    RESULT_MISMATCH = "result_mismatch"
    RESULT_DUPLICATE = "result_duplicate"
    RESULT_MISPLACED = "result_misplaced"
    CALL_UNANSWERED = "call_unanswered"
    CALL_STOOD_IN = "call_stood_in"
    SERVER_CALL_UNANSWERED = "server_call_unanswered"
    SERVER_TOOL_UNDECLARED = "server_tool_undeclared"
    TOOL_UNDECLARED = "tool_undeclared"
    PART_WITHOUT_TYPE = "part_without_type"
    KIND_UNKNOWN = "kind_unknown"
    KIND_WITHOUT_BETA = "kind_without_beta"
    KIND_UNCERTAIN = "kind_uncertain"
    PART_UNSUPPORTED = "part_unsupported"
    AUDIO_OF_MODEL = "audio_of_model"
    IMAGE_BY_ADDRESS = "image_by_address"
    CALLS_EMPTY = "calls_empty"
    CONTENT_NULL = "content_null"
    CONTENT_OF_USER_EMPTY = "content_of_user_empty"
    CONTENT_OF_ASSISTANT_EMPTY = "content_of_assistant_empty"
    CONTENT_OF_SYSTEM_EMPTY = "content_of_system_empty"
    TEXT_EMPTY = "text_empty"
    TEXT_BLANK = "text_blank"
    TEXT_OF_ASSISTANT_BLANK = "text_of_assistant_blank"
    REFUSAL_MIXED = "refusal_mixed"
    CALL_FORMS_MIXED = "call_forms_mixed"
    REASONING_NOT_ECHOED = "reasoning_not_echoed"
    REASONING_EMPTY = "reasoning_empty"
    REASONING_NOT_FIRST = "reasoning_not_first"
    REASONING_DISABLED = "reasoning_disabled"
    REASONING_AT_END = "reasoning_at_end"
    SIGNATURE_MISSING = "signature_missing"
    SYSTEM_FIRST = "system_first"
    SYSTEM_PLACE = "system_place"
    SUCCESSION = "succession"
    ALTERNATION = "alternation"
    FIRST_ROLE = "first_role"
    LAST_ROLE = "last_role"
    PREFIX_NOT_LAST = "prefix_not_last"
    PREFILL = "prefill"
    PREFILL_BLANK = "prefill_blank"
    ASSISTANTS_AT_END = "assistants_at_end"
    TOOLS_EMPTY = "tools_empty"
    TOOLS_MISSING = "tools_missing"
    TOOL_NAME_PATTERN = "tool_name_pattern"
    TOOL_NAME_REPEATED = "tool_name_repeated"
    TOOL_WITHOUT_SCHEMA = "tool_without_schema"
    TOOL_SCHEMA_TYPE = "tool_schema_type"
    TOOL_WITHOUT_PARAMETERS = "tool_without_parameters"
    CHOICE_WITHOUT_TOOLS = "choice_without_tools"
    NO_CHOICE_WITHOUT_TOOLS = "no_choice_without_tools"
    PARALLEL_WITHOUT_TOOLS = "parallel_without_tools"
    CHOICE_UNDECLARED = "choice_undeclared"
    CHOICE_NO_OBJECT = "choice_no_object"
    MARKS_TOO_MANY = "marks_too_many"
    WINDOW_EXCEEDED = "window_exceeded"
    COMPLETION_BEYOND_WINDOW = "completion_beyond_window"


class Block(msgspec.Struct, frozen=True, gc=False):
    """One piece of a message. `turn` is the message's index; `field` and `index` say where it stands in there.

    `call_id` is set on calls and results; None there means that the wire has no id to pair by (the legacy function
    messages), or that the app left it out. `wire` is the wire's own name of the kind where the kind does not tell.
    """

    role: Role
    kind: Kind
    turn: int
    field: str = ""
    index: int | None = None
    call_id: str | None = None
    name: str | None = None
    wire: str = ""

    @property
    def at(self) -> str:
        """The JSON pointer into the provider's body; put together when it is asked for, which is at a finding."""
        where = f"/messages/{self.turn}{self.field}"
        return where if self.index is None else f"{where}/{self.index}"


class Oddity(msgspec.Struct, frozen=True, gc=False):
    """Something that one message, or a field beside the messages, has out of the ordinary: a fact, no judgement."""

    check: Check
    at: str
    about: str = ""


class Tool(msgspec.Struct, frozen=True, gc=False):
    """A declared tool. `at` points to what holds its name; `wire` is the wire's type of tools that are not custom."""

    name: str
    at: str
    wire: str = ""


class Setting(msgspec.Struct, frozen=True):
    """What stands beside the messages and bears on how they are read.

    `thinking`: whether the request switches reasoning on or off; None where it does not say. `choice` is the one tool
    that must be called. `tools` is None where none are declared.
    """

    model: str = ""
    tools: tuple[Tool, ...] | None = None
    choice: str | None = None
    thinking: bool | None = None
    continues_turn: bool = False
    oddities: tuple[Oddity, ...] = ()
    marks: tuple[str, ...] = ()


class Budget(msgspec.Struct, frozen=True):
    """A model's window, and the least number of tokens that the messages can be; all in tokens."""

    window: int
    messages_min: int
    completion_max: int
    completion_at: str


class MessageSequence(msgspec.Struct, frozen=True):
    """What one request asks the provider to read.

    `result_id_key` is the name of the field in which a result on this wire names its call, for pointers.
    `uses_tools`: a tool is declared or occurs. It is the request class that text-only stages leave alone, and where it
    is false there are no edges to look at.
    `continues` is true where the provider holds earlier turns itself, so that a result's call need not be in the body.
    `joins_assistant_turns` is true where the provider merges consecutive assistant messages into one turn.
    `turns` has the role of each message, `marks` the pointers of what the app marks as cache borders in the messages.
    `before` is the role of the message before the first one where only the end of a body is looked at.
    """

    api: str
    model: str
    stream: bool
    blocks: tuple[Block, ...]
    messages: int
    uses_tools: bool
    result_id_key: str
    choices: int = 1
    continues: bool = False
    joins_assistant_turns: bool = False
    turns: tuple[Role, ...] = ()
    oddities: tuple[Oddity, ...] = ()
    marks: tuple[str, ...] = ()
    setting: Setting = Setting()
    budget: Budget | None = None
    before: Role | None = None
    names_nested: bool = False
    """A call's name stands in an object of its own on this wire, for pointers."""

    def call_ids(self) -> set[str]:
        """The ids of the client tools' calls that are in here."""
        return {
            block.call_id
            for block in self.blocks
            if block.kind is Kind.TOOL_CALL and block.call_id is not None
        }


class Edge(msgspec.Struct, eq=False, gc=False):
    """A client's tool call and the result that answers it, if one stands in its place."""

    call: Block
    result: Block | None = None
    result_elsewhere: bool = False
    stand_in: Block | None = None
    """A result of another id that stands where this call's result belongs."""


class Stray(StrEnum):
    """Why a result answers no call where it stands."""

    UNKNOWN_ID = "unknown id, and no call is open"
    WRONG_ID = "an id of another turn or of none, while a call waits for its result"
    REPEATED = "its call has a result already"
    ELSEWHERE = "its call is in the history, but this is not the place of its result"


@dataclass(slots=True)
class Pairing:
    """All tool edges of a sequence, and the results that belong to none."""

    edges: list[Edge] = field(default_factory=list)
    strays: list[tuple[Block, Stray]] = field(default_factory=list)
    last_turn: list[Edge] = field(default_factory=list)
    """The edges of the last assistant turn: a result for these can still be put in its place."""
    server_calls: list[Block] = field(default_factory=list)
    """Server tools' calls that nobody will answer any more: their result is nowhere and their turn is past."""
    paused: bool = False
    """The sequence ends with an assistant turn that waits for a server tool (a paused or mixed turn)."""
    deferred: list[Block] = field(default_factory=list)
    """The server tools' calls of a mixed last turn: they run when the client's results are in."""
    repeated: list[Edge] = field(default_factory=list)
    """Calls whose id another call of the same turn has."""
    reused: dict[str, Edge] = field(default_factory=dict)
    """The first call of each id that an earlier turn has had, by id."""


_ASSISTANT: Final = Role.ASSISTANT  # a member is looked up slowly, and these are asked for at every block
_TOOL_CALL: Final = Kind.TOOL_CALL
_TOOL_RESULT: Final = Kind.TOOL_RESULT
_TEXT: Final = Kind.TEXT


def pair(sequence: MessageSequence) -> Pairing:
    """Link results to calls as the provider does. Linear in the number of blocks."""
    pairing = Pairing()
    run = _Run()
    met: dict[str, Edge] = {}
    strays: list[tuple[Block, Stray, _Run]] = []
    joins = sequence.joins_assistant_turns
    for block in sequence.blocks:
        kind = block.kind
        if block.role is _ASSISTANT:
            if not run.at_assistant or (block.turn != run.turn and not joins):
                pairing.server_calls += run.server_calls.values()
                run = _Run()
                run.at_assistant = True
            run.turn = block.turn
            if kind is _TOOL_CALL:
                _call(block, run, pairing, met)
            elif kind is not _TEXT:
                _look_at_server(block, run, pairing)
        elif kind is _TOOL_RESULT:
            run.at_assistant = False
            stray = run.answer(block)
            if stray is not None:
                strays.append((block, stray, run))
        else:
            run.at_assistant = run.unbroken = False
    pairing.last_turn, pairing.paused = run.edges, run.at_assistant and bool(run.server_calls)
    if run.edges and run.unbroken and not run.at_assistant:
        pairing.deferred = list(run.server_calls.values())
    if run.edges and not run.unbroken:
        # A mixed turn goes on after its results alone; anything behind them ends the wait (anthropic-messages.md B12).
        pairing.server_calls += run.server_calls.values()
    if strays:
        pairing.strays = list(_placed(pairing, strays))
    return pairing


def _call(call: Block, run: "_Run", pairing: Pairing, met: dict[str, Edge]) -> None:
    edge = Edge(call)
    run.edges.append(edge)
    pairing.edges.append(edge)
    id_ = call.call_id
    if id_ is None:
        return
    if id_ in run.by_id:
        run.by_id[id_].append(edge)
        pairing.repeated.append(edge)
        return
    run.by_id[id_] = [edge]
    if met.setdefault(id_, edge) is not edge:
        pairing.reused.setdefault(id_, edge)


def _look_at_server(block: Block, run: "_Run", pairing: Pairing) -> None:
    if block.kind is Kind.SERVER_TOOL_CALL:
        run.server_calls[block.call_id] = block
    elif block.kind is Kind.SERVER_TOOL_RESULT:
        _answer_server_call(block, run, pairing)


def _answer_server_call(result: Block, run: "_Run", pairing: Pairing) -> None:
    """A server's result stands in the turn of its call, or, after a mixed turn, in a later one."""
    if run.server_calls.pop(result.call_id, None) is None:
        pairing.server_calls = [call for call in pairing.server_calls if call.call_id != result.call_id]


class _Run:
    """An assistant turn's calls, and the row of results behind it for as long as nothing else came between.

    `results` counts those that have been placed, by id; `server_calls` are those of this turn without a result yet.
    """

    __slots__ = ("at_assistant", "by_id", "edges", "results", "server_calls", "turn", "unbroken")

    def __init__(self) -> None:
        self.at_assistant = False
        self.turn = -1
        self.unbroken = True
        self.edges: list[Edge] = []
        self.by_id: dict[str, list[Edge]] = {}
        self.results: dict[str, int] = {}
        self.server_calls: dict[str | None, Block] = {}

    def answer(self, result: Block) -> Stray | None:
        """Take one result; say why not where it answers nothing here."""
        if result.call_id is None:
            # Nothing to pair by. Whether its absence is a fault is another rule's question; here every call may be
            # the one it answers.
            for edge in self.edges:
                edge.result = edge.result or result
            return None
        edges = self.by_id.get(result.call_id)
        if edges is None:
            return Stray.WRONG_ID if self.unbroken else Stray.UNKNOWN_ID
        # Two calls of one id: the first result answers both (nobody is known to refuse that as unanswered, CHAT-B06),
        # the next one takes over from the second call on; more results than calls are repeats.
        before = self.results.get(result.call_id, 0)
        if before >= len(edges):
            return Stray.REPEATED
        if not self.unbroken:
            for edge in edges[before:]:
                edge.result_elsewhere = True
            return Stray.REPEATED if before else Stray.ELSEWHERE
        self.results[result.call_id] = before + 1
        for edge in edges[before:]:
            edge.result = result
        return None


def _placed(pairing: Pairing, strays: list[tuple[Block, Stray, _Run]]) -> Iterator[tuple[Block, Stray]]:
    """Tell a result whose call stands elsewhere in the history from one whose call is nowhere."""
    calls: dict[str, list[Edge]] = {}
    for edge in pairing.edges:
        if edge.call.call_id is not None:
            calls.setdefault(edge.call.call_id, []).append(edge)
    for block, stray, run in strays:
        if stray is Stray.WRONG_ID:
            waiting = next((e for e in run.edges if e.result is None and e.stand_in is None), None)
            if waiting is not None:
                waiting.stand_in = block
            else:
                stray = Stray.UNKNOWN_ID  # the run is complete without it
        if stray in (Stray.UNKNOWN_ID, Stray.WRONG_ID) and block.call_id in calls:
            unanswered = [edge for edge in calls[block.call_id] if edge.result is None]
            for edge in unanswered:
                edge.result_elsewhere = True
            if unanswered:
                stray = Stray.ELSEWHERE
            elif stray is Stray.UNKNOWN_ID:
                stray = Stray.REPEATED
        yield block, stray
