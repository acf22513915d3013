"""Decode and judge a request, and remember what was legal, so that an agent's next turn costs its new messages only.

A conversation is sent whole each time and grows at its end. What is kept of a legal request is its body up to its
last assistant turn: there every call is answered, so the rest can be judged by itself. If the next body begins with
the same bytes, only what follows them is decoded, hashed and judged. This shortens the legal case alone: whatever
the rest gives cause to object to is decided again over the whole body.

The shortened judgement must be the whole one. Most rules look at one message, at one turn and its results, or at the
end; those are in the rest. What the others need of the beginning is kept beside it: the role of its last message, the
ids its calls have used, how many cache borders it has. What stands beside the messages (model, tools, thinking, and
the headers) bears on the beginning too, so it must be the same as before. What cannot be told so (a compaction block,
a server tool's call that is still open, a window to count against) is decided over the whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import msgspec

from turngate.adapters.dialect import NO_CONTEXT, Dialect, RequestContext, Undecodable
from turngate.validators.graph import Kind, MessageSequence, Role, Setting
from turngate.validators.rules import Judgement, Levels, judge

WORTH_BYTES: Final = 16 * 1024
"""Smaller bodies are decoded faster than they are remembered."""
REMEMBERED_MAX: Final = 64
MET_MAX: Final = 16
"""Bodies met once are kept whole, with what was read out of them."""
ALIKE_BYTES: Final = 64
"""Looked at first at the end of a beginning, because many conversations have a long preamble in common; then at its
start."""
REMEMBERED_BYTES_MAX: Final = 32 * 2**20
BLOCK_BYTES: Final = 200
"""What a block, or an id, takes beside the bytes it was read from; measured, rounded up."""


class Judged(msgspec.Struct, frozen=True):
    """A request in words, its verdict, and the plain sha256 of its bytes."""

    sequence: MessageSequence
    judgement: Judgement
    digest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Settled:
    """The beginning of a body that was legal: all bytes before its last assistant turn."""

    prefix: bytes
    opening: bytes
    """The bytes up to and including the bracket that opens `messages`."""
    api: str
    levels: Levels
    context: RequestContext
    setting: Setting
    last_role: Role
    ids: set[str]
    """The ids of its calls. Handed on as the conversation grows, so that a turn costs its own ids only."""
    marks: int
    messages: int
    uses_tools: bool
    hashed: Any  # hashlib's objects have no public type
    size: int
    """Memory in bytes, about."""

    def begins(self, body: bytes) -> bool:
        end = len(self.prefix)
        near = max(0, end - ALIKE_BYTES)
        return body.startswith(self.prefix[near:], near) and body.startswith(self.prefix)


@dataclass(frozen=True, slots=True, eq=False)
class _Met:
    """A legal body that was met once. Its beginning is worked out when another body seems to go on from it: most
    conversations of one request never come back, and that work is a third of judging them."""

    body: bytes
    spoke: int
    """Where the role of the last assistant message stands, or seems to."""
    levels: Levels
    context: RequestContext
    sequence: MessageSequence

    @property
    def size(self) -> int:
        """Memory in bytes, about."""
        return len(self.body) + BLOCK_BYTES * len(self.sequence.blocks)

    def seems_to_begin(self, body: bytes) -> bool:
        """True where all is the same up to the assistant's last turn: behind it histories grow, and marks move."""
        near = max(0, self.spoke - ALIKE_BYTES)
        if not body.startswith(self.body[near : self.spoke], near):
            return False
        at, length = 0, ALIKE_BYTES
        while at < self.spoke:  # in growing pieces: a slice is a copy, and most of what differs differs early
            end = min(at + length, self.spoke)
            if not body.startswith(self.body[at:end], at):
                return False
            at, length = end, 4 * length
        return True


class Judge:
    """Judges requests; keeps the beginnings of recent conversations, bounded in number and bytes."""

    def __init__(self) -> None:
        self._met: list[_Met] = []  # the latest last
        self._settled: list[_Settled] = []  # the latest last; a table of 250 KB keys would hash them
        self._bytes = 0

    def judge(
        self, dialect: Dialect, body: bytes, levels: Levels, context: RequestContext = NO_CONTEXT
    ) -> Judged:
        """Raises Undecodable."""
        known = self._find(dialect.api, body, levels, context) or self._settle(
            dialect.api, body, levels, context
        )
        if known is not None:
            judged = self._continue(dialect, body, known)
            if judged is not None:
                return judged
        sequence = dialect.parse_request(body, context)
        judgement = judge(sequence, levels)
        if len(body) >= WORTH_BYTES and not judgement.findings and context.window is None:
            self._meet(_Met(body, body.rfind(b'"assistant"'), levels, context, sequence))
        return Judged(sequence, judgement, sha256(body).digest())

    def _meet(self, met: _Met) -> None:
        if met.spoke < 0:
            return  # nothing of it is settled yet
        self._met.append(met)
        self._bytes += met.size
        self._make_room()

    def _find(self, api: str, body: bytes, levels: Levels, context: RequestContext) -> _Settled | None:
        if len(body) < WORTH_BYTES:
            return None
        for settled in reversed(self._settled):
            if (
                settled.levels is levels
                and settled.api == api
                and settled.context == context
                and settled.begins(body)
            ):
                if settled is not self._settled[-1]:
                    self._settled.remove(settled)
                    self._settled.append(settled)
                return settled
        return None

    def _settle(self, api: str, body: bytes, levels: Levels, context: RequestContext) -> _Settled | None:
        """Work out the beginning that this body seems to share with one met before; None where it does not."""
        if len(body) < WORTH_BYTES:
            return None
        for met in reversed(self._met):
            if (
                met.levels is levels
                and met.sequence.api == api
                and met.context == context
                and met.seems_to_begin(body)
            ):
                self._met.remove(met)
                self._bytes -= met.size
                settled = self._remember(met.sequence, met.body, met.body, levels, context, None)
                return settled if settled is not None and settled.begins(body) else None
        return None

    def _continue(self, dialect: Dialect, body: bytes, known: _Settled) -> Judged | None:
        """Judge what follows a known beginning; None where that must be done over the whole."""
        rest = body[len(known.prefix) :]
        if b'"messages"' in rest:
            return None  # perhaps a second key of that name: the last one counts for most readers
        short = known.opening + rest
        try:
            sequence = dialect.parse_request(short, known.context)
        except Undecodable:
            return None
        if not _follows(sequence, known):
            return None  # only what goes on as before may be judged without what came before
        judgement = judge(msgspec.structs.replace(sequence, before=known.last_role), known.levels)
        if judgement.findings:
            return None
        self._remember(sequence, short, body, known.levels, known.context, known)
        whole = msgspec.structs.replace(
            sequence,
            messages=known.messages + sequence.messages,
            uses_tools=known.uses_tools or sequence.uses_tools,
        )
        return Judged(whole, judgement, _digest(body, known))

    def _remember(
        self,
        sequence: MessageSequence,
        short: bytes,
        body: bytes,
        levels: Levels,
        context: RequestContext,
        known: _Settled | None,
    ) -> _Settled | None:
        """Keep the beginning of a legal body. `short` is the body without what was `known` before."""
        turn = _last_assistant_turn(sequence)
        place = _place(short, turn) if turn and not _hangs(sequence, turn) else None
        if place is None:
            return None
        opening, end = place
        end += len(body) - len(short)
        prefix = body[:end]
        if known is None:
            hashed, ids = sha256(prefix), set[str]()
        else:
            ids = known.ids
            hashed = known.hashed.copy()
            hashed.update(body[len(known.prefix) : end])
            self._forget(known)
        ids.update(_ids(sequence, turn))
        settled = _Settled(
            prefix,
            opening,
            sequence.api,
            levels,
            context,
            sequence.setting,
            sequence.turns[turn - 1],
            ids,
            sum(_turn_at(mark) < turn for mark in sequence.marks) + (known.marks if known is not None else 0),
            turn + (known.messages if known is not None else 0),
            sequence.uses_tools or (known is not None and known.uses_tools),
            hashed,
            len(prefix) + BLOCK_BYTES * len(ids),
        )
        self._settled.append(settled)
        self._bytes += settled.size
        self._make_room()
        return settled

    def _make_room(self) -> None:
        """What was met once goes first."""
        while self._met and (len(self._met) > MET_MAX or self._bytes > REMEMBERED_BYTES_MAX):
            self._bytes -= self._met.pop(0).size
        while len(self._settled) > REMEMBERED_MAX or self._bytes > REMEMBERED_BYTES_MAX:
            self._forget(self._settled[0])

    def _forget(self, settled: _Settled) -> None:
        self._settled.remove(settled)
        self._bytes -= settled.size


def _digest(body: bytes, settled: _Settled) -> bytes:
    """sha256 of a body whose beginning has been hashed already."""
    hashed = settled.hashed.copy()
    hashed.update(body[len(settled.prefix) :])
    digest: bytes = hashed.digest()
    return digest


def _follows(sequence: MessageSequence, known: _Settled) -> bool:
    """True where the rest goes on as the beginning was left, so that only the rest can be at fault."""
    return (
        sequence.turns[:1] == (Role.ASSISTANT,)
        and sequence.setting == known.setting
        and known.marks + len(sequence.marks) + len(sequence.setting.marks) <= _MARKS_SURE
        and not any(block.kind is Kind.COMPACTION for block in sequence.blocks)
        and known.ids.isdisjoint(_ids(sequence, len(sequence.turns)))
    )


_MARKS_SURE: Final = 4
"""More cache borders than that are counted over the whole; no server is known to allow fewer."""


def _ids(sequence: MessageSequence, before: int) -> Iterator[str]:
    """The ids of the calls in the messages before this one."""
    for block in sequence.blocks:
        if block.turn >= before:
            break
        if block.kind is Kind.TOOL_CALL and block.call_id is not None:
            yield block.call_id


def _hangs(sequence: MessageSequence, turn: int) -> bool:
    """True where a server's call before this message has no result there, or a compaction stands there."""
    open_calls: set[str | None] = set()
    for block in sequence.blocks:
        if block.turn >= turn:
            break
        if block.kind is Kind.COMPACTION:
            return True
        if block.kind is Kind.SERVER_TOOL_CALL:
            open_calls.add(block.call_id)
        elif block.kind is Kind.SERVER_TOOL_RESULT:
            open_calls.discard(block.call_id)
    return bool(open_calls)


def _turn_at(pointer: str) -> int:
    """The message that a pointer like /messages/3/content/0 leads into."""
    return int(pointer.split("/", 3)[2])


def _last_assistant_turn(sequence: MessageSequence) -> int:
    """The index of the message that opens the last assistant turn; 0 where nothing stands before it."""
    turn = 0
    before: Role | None = None
    for index, role in enumerate(sequence.turns):
        if role is Role.ASSISTANT and before is not Role.ASSISTANT:
            turn = index
        before = role
    return turn


class _Raws(msgspec.Struct, gc=False):
    messages: list[msgspec.Raw]


_decode_raws = msgspec.json.Decoder(_Raws).decode
_BETWEEN: Final = b" \t\r\n,"


def _place(body: bytes, turn: int) -> tuple[bytes, int] | None:
    """(bytes up to the opening bracket of `messages`, offset of message `turn`), or None where that is not certain."""
    raws = _decode_raws(body).messages
    at = body.find(bytes(raws[0])) if raws else -1
    if at < 0:
        return None
    opening = body[:at]
    try:
        # Only the true place leaves an empty list when the rest is cut off there.
        if _decode_raws(opening + b"]}").messages:
            return None
    except msgspec.DecodeError:
        return None
    for raw in raws[:turn]:
        if not body.startswith(bytes(raw), at):
            return None
        at += len(raw)
        while body[at] in _BETWEEN:
            at += 1
    return opening, at
