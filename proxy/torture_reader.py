"""A third reading of streamed answers: what an app makes of the bytes it was given, for `turngate torture`.

It shares no code with the gate, the adapters or the witness and imports nothing of ours, so that a mistake of theirs
cannot hide itself. So it knows the two wire formats on its own account. It is lenient as apps are: it takes an event
whose blank line never came, and a piece of a call wherever it stands.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import orjson

_BLANK_LINE: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_EARLY: Final = frozenset(
    ("length", "content_filter", "max_tokens", "model_context_window_exceeded", "refusal")
)
"""Words with which a provider says that it stopped before the answer was whole."""


def split(data: bytes) -> list[bytes]:
    """The frames of a stream, each with its blank line; the last one may lack it."""
    if b"\r" not in data:
        *frames, rest = data.split(b"\n\n")
        whole = [frame + b"\n\n" for frame in frames]
        return [*whole, rest] if rest else whole
    ends = [0, *(found.end() for found in _BLANK_LINE.finditer(data)), len(data)]
    return [data[start:end] for start, end in pairwise(ends) if start < end]


CallKey = tuple[int, str, str, str]
"""Choice, id, name, and the text of the arguments."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one frame says of one call. `opens` and `closes` are Messages' block start and stop.

    `foreign`: it opens a block that is no call of the app's (text, or a tool that the provider runs itself).
    """

    choice: int
    index: int | None
    id: str = ""
    name: str = ""
    arguments: str = ""
    opens: bool = False
    closes: bool = False
    free_text: bool = False
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """What one frame says. `begun` and `finished` are numbers of choices; `last_word`: [DONE] or message_stop."""

    begun: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()
    finished: tuple[int, ...] = ()
    early: bool = False
    last_word: bool = False
    failed: bool = False
    unreadable: bool = False
    empty: bool = False
    """It has no data, as a comment or a stray line end has none."""


NOTHING: Final = Facts()


class Reader:
    """Reads frames of one dialect. What a frame says is kept, as the same frames come again and again."""

    def __init__(self, api: str, choices: int) -> None:
        self.messages = api == "anthropic.messages"
        self.choices = choices
        self._known: dict[bytes, Facts] = {}

    def facts(self, frame: bytes) -> Facts:
        """What this frame says."""
        known = self._known.get(frame)
        if known is None:
            known = self._known[frame] = self._read(frame)
        return known

    def read(self, frames: Sequence[bytes]) -> "Reading":
        """What all of these say together."""
        reading = Reading(self.messages, self.choices)
        for at, frame in enumerate(frames):
            facts = self.facts(frame)
            if facts is not NOTHING:
                reading.take(at, facts)
        return reading

    def _read(self, frame: bytes) -> Facts:
        whole = len(frame) >= 2 and frame[-1:] in b"\r\n"
        lines = _LINE_END.split(frame)
        data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
        if not data:
            return Facts(empty=True)
        text = b"\n".join(data)
        if text == b"[DONE]":
            return Facts(last_word=True)
        try:
            said = _decoded(text)
        except (ValueError, RecursionError):
            return Facts(unreadable=True) if whole else Facts(empty=True)
        named_error = any(line.replace(b" ", b"") == b"event:error" for line in lines)
        if not isinstance(said, dict) or named_error:
            return Facts(failed=named_error)
        return _messages(said) if self.messages else _chat(said)


@dataclass(slots=True)
class SeenCall:
    """A call as an app puts it together."""

    choice: int
    id: str
    name: str
    free_text: bool = False
    parts: list[str] = field(default_factory=list)
    closed: bool = False

    @property
    def key(self) -> CallKey:
        return self.choice, self.id, self.name, "".join(self.parts)

    def runs(self) -> bool:
        """Whether an app could run it: it has an id, a name, and arguments that parse (or none at all)."""
        text = "".join(self.parts)
        return bool(self.id and self.name) and (self.free_text or not text.strip() or _parses(text))


@dataclass
class Reading:
    """What was said so far.

    `stray`: a piece of a call came where none may be, so that any reader could have told before the end.
    `stray_behind_end`: one came when the answer had its end, and the calls had been taken.
    """

    messages: bool
    choices: int
    calls: list[SeenCall] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    early: bool = False
    last_word: bool = False
    stray: bool = False
    stray_behind_end: bool = False
    failed_at: int | None = None
    _open: dict[tuple[int, int], SeenCall] = field(default_factory=dict)
    _closed: set[tuple[int, int]] = field(default_factory=set)
    _foreign: set[tuple[int, int]] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        """The answer has its proper end: Messages' last event, or a finish of every choice."""
        if self.messages:
            return self.last_word
        enough = len(self.finished) >= self.choices or (self.last_word and bool(self.finished))
        return enough and self.begun <= self.finished

    @cached_property
    def keys(self) -> list[CallKey]:
        return [call.key for call in self.calls]

    def sound(self) -> bool:
        """It ended well, and nothing in it says that something is missing."""
        whole = all(call.runs() and (call.closed or not self.messages) for call in self.calls)
        once = len({key[:2] for key in self.keys}) == len(self.keys)
        return self.ended and whole and once and not self.stray and self.failed_at is None

    def take(self, at: int, facts: Facts) -> bool:
        """The frame with this number says these things. True where it belongs to a call."""
        if self.last_word and not self.messages:
            return False  # clients of Chat Completions read no further than [DONE]
        if (facts.failed or facts.unreadable) and self.failed_at is None:
            self.failed_at = at
        self.begun.update(facts.begun)
        of_call = False
        for piece in facts.pieces:
            belongs = self._take_block(piece) if self.messages else self._take_item(piece)
            of_call = of_call or belongs
        self.finished.update(facts.finished)
        self.early = self.early or facts.early
        self.last_word = self.last_word or facts.last_word
        return of_call

    def _take_block(self, piece: Piece) -> bool:
        """True where it belongs to a call."""
        place = (0, piece.index or 0)
        call = self._open.get(place)
        if piece.foreign:
            self._foreign.add(place)
            return False
        if piece.opens:
            self._foreign.discard(place)
            self._misplaced(call is not None or place in self._closed)
            self._open[place] = SeenCall(0, piece.id, piece.name)
            self.calls.append(self._open[place])
            return True
        if piece.closes:
            if call is not None:
                call.closed = True
                self._closed.add(place)
                del self._open[place]
            return call is not None
        if call is None and place in self._foreign:
            return False
        if call is None:
            # An app that acts when the block stops has acted without this piece: the call stays as it was then.
            self._misplaced(bool(piece.arguments))
            return bool(piece.arguments)
        call.parts.append(piece.arguments)
        return True

    def _take_item(self, piece: Piece) -> bool:
        """True where it belongs to a call."""
        call = self._known(piece)
        if call is None:
            call = SeenCall(piece.choice, piece.id, "", piece.free_text)
            self.calls.append(call)
            if piece.index is not None:
                self._open[piece.choice, piece.index] = call
            self.finished.discard(piece.choice)  # some servers send a finish after each call
        elif piece.choice in self.finished:
            self._misplaced(bool(piece.arguments))
            return True
        call.id = call.id or piece.id
        call.name = call.name or piece.name
        call.parts.append(piece.arguments)
        return True

    def _misplaced(self, misplaced: bool) -> None:
        """What comes behind the end could tell nobody anything before the end."""
        if self.ended:
            self.stray_behind_end = self.stray_behind_end or misplaced
        else:
            self.stray = self.stray or misplaced

    def _known(self, piece: Piece) -> SeenCall | None:
        """The call that an item goes on with; servers number calls by the index, all alike, or not at all."""
        if piece.index is not None:
            call = self._open.get((piece.choice, piece.index))
            if call is not None and piece.id in ("", call.id):
                return call
            if call is not None and not call.id:
                return call
        for call in reversed(self.calls):
            same = call.id == piece.id if piece.id else piece.index is None
            if call.choice == piece.choice and same:
                return call
        return None


def _messages(said: dict[str, Any]) -> Facts:
    index = _integer(said.get("index"))
    block, delta = _dict(said.get("content_block")), _dict(said.get("delta"))
    match said.get("type"):
        case "content_block_start" if block.get("type") == "tool_use":
            return Facts(pieces=(Piece(0, index, _text(block, "id"), _text(block, "name"), opens=True),))
        case "content_block_start":
            return Facts(pieces=(Piece(0, index, opens=True, foreign=True),))
        case "content_block_delta" if isinstance(delta.get("partial_json"), str):
            return Facts(pieces=(Piece(0, index, arguments=delta["partial_json"]),))
        case "content_block_stop":
            return Facts(pieces=(Piece(0, index, closes=True),))
        case "message_delta" if delta.get("stop_reason"):
            return Facts(finished=(0,), early=delta["stop_reason"] in _EARLY)
        case "message_stop":
            return Facts(last_word=True)
        case "error":
            return Facts(failed=True)
    return NOTHING


def _chat(said: dict[str, Any]) -> Facts:
    if said.get("error"):
        return Facts(failed=True)
    begun: list[int] = []
    finished: list[int] = []
    pieces: list[Piece] = []
    early = False
    for choice in _dicts(said.get("choices")):
        number = _integer(choice.get("index"))
        begun.append(number)
        delta = _dict(choice.get("delta"))
        pieces += [_item(number, item) for item in _dicts(delta.get("tool_calls"))]
        legacy = _dict(delta.get("function_call"))
        if legacy.get("name") or legacy.get("arguments"):  # some servers put an empty one into every answer
            pieces.append(_item(number, {"index": 0, "id": "function_call", "function": legacy}))
        if reason := choice.get("finish_reason"):
            finished.append(number)
            early = early or reason in _EARLY
    return Facts(tuple(begun), tuple(pieces), tuple(finished), early)


def _item(choice: int, item: dict[str, Any]) -> Piece:
    custom = isinstance(item.get("custom"), dict)
    body = _dict(item.get("custom" if custom else "function"))
    given = body.get("input" if custom else "arguments")
    arguments = json.dumps(given) if isinstance(given, dict) else given if isinstance(given, str) else ""
    id_ = _text(item, "id")
    index = item.get("index")
    return Piece(
        choice,
        index if isinstance(index, int) else None,
        "" if id_ == "null" else id_,  # one server's way to say that there is none
        _text(body, "name"),
        arguments,
        free_text=custom,
    )


def _decoded(text: bytes) -> Any:
    """As lenient as Python's own decoder: half a surrogate pair and a BOM are no reason to raise."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text.decode(errors="replace").removeprefix("\ufeff"))


def _parses(text: str) -> bool:
    try:
        _GRAMMAR.decode(text)
    except ValueError:
        return False
    except RecursionError:
        return True  # too deep to tell
    return True


_GRAMMAR: Final = json.JSONDecoder(parse_int=str, parse_float=str)
"""Grammar only: numbers stay text, so that their size does not matter."""


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _text(said: dict[str, Any], key: str) -> str:
    value = said.get(key)
    return value if isinstance(value, str) else ""


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0
