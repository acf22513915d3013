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

import msgspec


class Role(StrEnum):
    """Who speaks. A role the adapter does not know is `UNKNOWN`, never guessed."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    UNKNOWN = "unknown"


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


class Block(msgspec.Struct, frozen=True, gc=False):
    """One piece of a message. `turn` is the message's index, `at` the JSON pointer into the provider's body.

    `call_id` is set on calls and results; None there means that the wire has no id to pair by (the legacy function
    messages), or that the app left it out.
    """

    role: Role
    kind: Kind
    turn: int
    at: str
    call_id: str | None = None
    name: str | None = None


class MessageSequence(msgspec.Struct, frozen=True):
    """What one request asks the provider to read.

    `result_id_key` is the name of the field in which a result on this wire names its call, for pointers.
    `uses_tools`: a tool is declared or occurs. It is the request class that text-only stages leave alone, and where it
    is false there are no edges to look at.
    `continues` is true where the provider holds earlier turns itself, so that a result's call need not be in the body.
    `joins_assistant_turns` is true where the provider merges consecutive assistant messages into one turn.
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


@dataclass(slots=True, eq=False)
class Edge:
    """A client's tool call and the result that answers it, if one stands in its place."""

    call: Block
    result: Block | None = None
    result_elsewhere: bool = False


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


def pair(sequence: MessageSequence) -> Pairing:
    """Link results to calls as the provider does. Linear in the number of blocks."""
    pairing = Pairing()
    run = _Run()
    strays: list[tuple[Block, Stray, _Run]] = []
    for block in sequence.blocks:
        if block.role is Role.ASSISTANT:
            if not run.at_assistant or (block.turn != run.turn and not sequence.joins_assistant_turns):
                pairing.server_calls += run.server_calls.values()
                run = _Run(at_assistant=True)
            run.turn = block.turn
            if block.kind is Kind.TOOL_CALL:
                pairing.edges.append(run.open(block))
            elif block.kind is Kind.SERVER_TOOL_CALL:
                run.server_calls[block.call_id] = block
            elif block.kind is Kind.SERVER_TOOL_RESULT:
                _answer_server_call(block, run, pairing)
        elif block.kind is Kind.TOOL_RESULT:
            run.at_assistant = False
            stray = run.answer(block)
            if stray is not None:
                strays.append((block, stray, run))
        else:
            run.at_assistant = run.unbroken = False
    pairing.last_turn, pairing.paused = run.edges, run.at_assistant and bool(run.server_calls)
    if run.edges and not run.unbroken:
        # A mixed turn goes on after its results alone; anything behind them ends the wait (anthropic-messages.md B12).
        pairing.server_calls += run.server_calls.values()
    if strays:
        pairing.strays = list(_placed(pairing, strays))
    return pairing


def _answer_server_call(result: Block, run: "_Run", pairing: Pairing) -> None:
    """A server's result stands in the turn of its call, or, after a mixed turn, in a later one."""
    if run.server_calls.pop(result.call_id, None) is None:
        pairing.server_calls = [call for call in pairing.server_calls if call.call_id != result.call_id]


@dataclass(slots=True)
class _Run:
    """An assistant turn's calls, and the row of results behind it for as long as nothing else came between."""

    at_assistant: bool = False
    turn: int = -1
    unbroken: bool = True
    edges: list[Edge] = field(default_factory=list)
    by_id: dict[str, list[Edge]] = field(default_factory=dict)
    results: dict[str, int] = field(default_factory=dict)
    """How many have been placed, by id."""
    server_calls: dict[str | None, Block] = field(default_factory=dict)
    """Those of this turn that have no result yet."""

    def open(self, call: Block) -> Edge:
        edge = Edge(call)
        self.edges.append(edge)
        if call.call_id is not None:
            self.by_id.setdefault(call.call_id, []).append(edge)
        return edge

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
        if stray is Stray.WRONG_ID and not any(edge.result is None for edge in run.edges):
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
