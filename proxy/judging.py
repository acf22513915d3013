"""Decode and judge a request, and remember what was legal, so that an agent's next turn costs its new messages only.

A conversation is sent whole each time and grows at its end. What is kept of a legal request is its body up to its
last assistant turn: there every call is answered, so the rest can be judged by itself. If the next body begins with
the same bytes, only what follows them is decoded, hashed and judged. This shortens the legal case alone: whatever
the rest gives cause to object to is decided again over the whole body.
"""

from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import msgspec

from turngate.adapters.dialect import Dialect, Undecodable
from turngate.validators.graph import MessageSequence, Role
from turngate.validators.rules import Judgement, Levels, judge

WORTH_BYTES: Final = 16 * 1024
"""Smaller bodies are decoded faster than they are remembered."""
REMEMBERED_MAX: Final = 64
REMEMBERED_BYTES_MAX: Final = 32 * 2**20


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
    messages: int
    uses_tools: bool
    hashed: Any  # hashlib's objects have no public type


class Judge:
    """Judges requests; keeps the beginnings of recent conversations, bounded in number and bytes."""

    def __init__(self) -> None:
        self._settled: list[_Settled] = []  # the latest last; a table of 250 KB keys would hash them
        self._bytes = 0

    def judge(self, dialect: Dialect, body: bytes, levels: Levels) -> Judged:
        """Raises Undecodable."""
        known = self._find(dialect.api, body, levels)
        if known is not None:
            judged = self._continue(dialect, body, levels, known)
            if judged is not None:
                return judged
        sequence = dialect.parse_request(body)
        judgement = judge(sequence, levels)
        settled = None
        if len(body) >= WORTH_BYTES and not judgement.findings:
            settled = self._remember(sequence, body, body, levels, None)
        return Judged(sequence, judgement, _digest(body, settled))

    def _find(self, api: str, body: bytes, levels: Levels) -> _Settled | None:
        if len(body) < WORTH_BYTES:
            return None
        for settled in reversed(self._settled):
            if body.startswith(settled.prefix) and settled.api == api and settled.levels is levels:
                if settled is not self._settled[-1]:
                    self._settled.remove(settled)
                    self._settled.append(settled)
                return settled
        return None

    def _continue(self, dialect: Dialect, body: bytes, levels: Levels, known: _Settled) -> Judged | None:
        """Judge what follows a known beginning; None where that must be done over the whole."""
        rest = body[len(known.prefix) :]
        if b'"messages"' in rest:
            return None  # perhaps a second key of that name: the last one counts for most readers
        short = known.opening + rest
        try:
            sequence = dialect.parse_request(short)
        except Undecodable:
            return None
        judgement = judge(sequence, levels)
        follows = sequence.blocks[:1]
        if judgement.findings or not follows or follows[0].turn or follows[0].role is not Role.ASSISTANT:
            return None  # only what goes on as before may be judged without what came before
        self._remember(sequence, short, body, levels, known)
        whole = msgspec.structs.replace(
            sequence,
            messages=known.messages + sequence.messages,
            uses_tools=known.uses_tools or sequence.uses_tools,
        )
        return Judged(whole, judgement, _digest(body, known))

    def _remember(
        self, sequence: MessageSequence, short: bytes, body: bytes, levels: Levels, known: _Settled | None
    ) -> _Settled | None:
        """Keep the beginning of a legal body. `short` is the body without what was `known` before."""
        turn = _last_assistant_turn(sequence)
        place = _place(short, turn) if turn else None
        if place is None:
            return None
        opening, end = place
        end += len(body) - len(short)
        prefix = body[:end]
        if known is None:
            hashed = sha256(prefix)
        else:
            hashed = known.hashed.copy()
            hashed.update(body[len(known.prefix) : end])
            self._forget(known)
        settled = _Settled(
            prefix,
            opening,
            sequence.api,
            levels,
            turn + (known.messages if known is not None else 0),
            sequence.uses_tools or (known is not None and known.uses_tools),
            hashed,
        )
        self._settled.append(settled)
        self._bytes += len(prefix)
        while len(self._settled) > REMEMBERED_MAX or self._bytes > REMEMBERED_BYTES_MAX:
            self._forget(self._settled[0])
        return settled

    def _forget(self, settled: _Settled) -> None:
        self._settled.remove(settled)
        self._bytes -= len(settled.prefix)


def _digest(body: bytes, settled: _Settled | None) -> bytes:
    """sha256 of a body whose beginning may have been hashed already."""
    if settled is None:
        return sha256(body).digest()
    hashed = settled.hashed.copy()
    hashed.update(body[len(settled.prefix) :])
    digest: bytes = hashed.digest()
    return digest


def _last_assistant_turn(sequence: MessageSequence) -> int:
    """The index of the message that opens the last assistant turn; 0 where nothing stands before it."""
    turn = 0
    before: Role | None = None
    for block in sequence.blocks:
        if block.role is Role.ASSISTANT and before is not Role.ASSISTANT:
            turn = block.turn
        before = block.role
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
