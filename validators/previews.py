"""Recognise what was retracted when a later request brings it back as history.

While an answer runs, a `Preview` collects the text that the app is shown. If the turn is retracted, what may come back
is kept as keyed digests: of the text at each border of a delta (an app that kept what it had at some moment has just
that), and of the ids of the calls that never left. Nobody can read a text from them.

A partial answer may be kept on purpose: hits are reported. Only where the app was told to drop the turn, and all of it
comes back, may a scope refuse for them (`refused_for`).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from turngate.validators.checks import Level, Reason
from turngate.validators.rules import Finding, Judgement, Verdict

CHARACTERS_MIN: Final = 24
"""Shorter texts are said again and again ("Let me look that up."): to meet one twice says nothing. Among longer ones,
two that are equal to the letter come from one answer, or from a repetition of it; and what a later turn commits is
taken off the marks (`Marks.committed`)."""
ID_CHARACTERS_MIN: Final = 9
"""The shortest ids that providers draw at random (Mistral's); shorter ones are counted."""
CHARACTERS_MAX: Final = 64 * 1024
"""Text kept of one answer while it runs; of what is longer only the beginning is recognised."""
BORDERS_MAX: Final = 4096
"""Borders at which a beginning is recognised: a digest takes about a microsecond, so at most 4 ms of a retraction."""
DIGEST_BYTES: Final = 8
"""Keyed, and looked up among one owner's marks only: the chance of a false hit is below 1 in 10**12 lookups."""
_PIECES_MAX: Final = 64


class Preview:
    """The text of one answer, as the app is shown it. An addition costs a list's append nearly always."""

    __slots__ = ("_borders", "_characters", "_joined", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._joined: list[str] = []
        self._borders: list[int] = []
        self._characters = 0

    def add(self, text: str) -> None:
        """The next delta."""
        self._pieces.append(text)
        if len(self._pieces) == _PIECES_MAX:
            self._join()

    def _join(self) -> None:
        """Many short strings become one: their overhead would be ten times their text."""
        if self._characters <= CHARACTERS_MAX:
            for piece in self._pieces:
                self._characters += len(piece)
                self._borders.append(self._characters)
            self._joined.append("".join(self._pieces))
        self._pieces.clear()

    def text(self) -> str:
        """All of it; of a text beyond the bound a beginning."""
        self._join()
        return "".join(self._joined)

    @property
    def whole(self) -> bool:
        """False where the text went beyond the bound."""
        self._join()
        return self._characters <= CHARACTERS_MAX

    def beginnings(self) -> Iterator[str]:
        """The text at each border, piece by piece: joined up to any of them they are what the app had then."""
        text = self.text()
        start = 0
        for end in self._borders[: BORDERS_MAX - 1] + self._borders[-1:]:
            yield text[start:end]
            start = end


@dataclass(frozen=True, slots=True)
class Said:
    """An assistant's message in a request: its place, its text (of all its parts), and (place, id) of its calls."""

    at: str
    text: str
    calls: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Hit:
    """Something retracted that has come back. `whole`: all that had been shown, not only a beginning; `told`: its app
    had been told, by an error, that the turn is broken."""

    reason: Reason
    at: str
    operation: str
    cause: str
    whole: bool
    told: bool = False

    def finding(self) -> Finding:
        """What its sender reads."""
        if self.reason is Reason.CALL_UNCOMMITTED:
            what, remedy = "this tool call never left its turn", "Drop the call and its result."
        else:
            what, remedy = "this text was shown before its turn broke", "Drop the message."
        return Finding(self.reason, Level.HARD, self.at, f"{what} ({self.operation}, {self.cause}).", remedy)


def refused_for(hits: Sequence[Hit], judgement: Judgement) -> Judgement:
    """The judgement where integrity is enforced."""
    findings = [hit.finding() for hit in hits if hit.told and hit.whole]
    return Judgement(Verdict.ILLEGAL, (*findings, *judgement.findings)) if findings else judgement


@dataclass(slots=True)
class _Mark:
    """One retracted turn: digest -> whether it is of the whole text; digests of call ids."""

    operation: str
    cause: str
    at_s: float
    texts: dict[bytes, bool]
    calls: frozenset[bytes]
    told: bool


@dataclass(slots=True)
class Marks:
    """What was retracted lately, by owner. In memory only; `now_s` is a monotonic clock, `key` 32 bytes of chance.

    `turns_max` bounds the retracted turns kept, of all owners; `age_s_max` how long one is.
    """

    now_s: Callable[[], float]
    key: bytes = field(repr=False)
    turns_max: int = 1000
    age_s_max: float = 24 * 3600.0
    _turns: OrderedDict[tuple[str, str], _Mark] = field(default_factory=OrderedDict)
    _owners: dict[str, dict[str, _Mark]] = field(default_factory=dict)

    def __contains__(self, owner: str) -> bool:
        """Whether there is anything to find for this owner. Asked before a request's texts are read."""
        return owner in self._owners

    def __len__(self) -> int:
        return len(self._turns)

    def add(
        self,
        owner: str,
        operation: str,
        cause: str,
        preview: Preview | None,
        calls: Iterable[tuple[str, str]] = (),
        *,
        told: bool = False,
    ) -> None:
        """Remember a retracted turn; `calls` are (id, tool name) of its calls, none of which left; `told` as in `Hit`."""
        texts = self._texts(preview) if preview is not None else {}
        ids = frozenset(self._digest(id_) for id_, name in calls if _is_drawn(id_, name))
        if not texts and not ids:
            return
        self._forget_old()
        mark = _Mark(operation, cause, self.now_s(), texts, ids, told)
        self._turns[owner, operation] = mark
        self._owners.setdefault(owner, {})[operation] = mark
        while len(self._turns) > self.turns_max:
            self._drop(*next(iter(self._turns)))

    def committed(self, owner: str, text: str, ids: Iterable[str] = ()) -> None:
        """A turn of this owner was committed: what it says is history in its own right, whoever said it before."""
        marks = self._owners.get(owner)
        if marks is None:
            return
        said = self._digest(text.strip())
        released = {self._digest(id_) for id_ in ids}
        for operation, mark in list(marks.items()):
            mark.texts.pop(said, None)
            mark.calls -= released
            if not mark.texts and not mark.calls:
                self._drop(owner, operation)

    def find(self, owner: str, said: Iterable[Said]) -> list[Hit]:
        """What of this owner's retracted turns these messages bring back, each turn's text and each call once."""
        self._forget_old()
        marks = self._owners.get(owner)
        if marks is None:
            return []
        hits: list[Hit] = []
        for message in said:
            text = message.text.strip()
            digest = self._digest(text) if len(text) >= CHARACTERS_MIN else b""
            ids = [(at, self._digest(id_)) for at, id_ in message.calls]
            for mark in reversed(marks.values()):
                if digest in mark.texts:
                    whole = mark.texts[digest]
                    hits.append(
                        Hit(Reason.PREVIEW_LEAKED, message.at, mark.operation, mark.cause, whole, mark.told)
                    )
                    break  # the latest turn that said so
            hits += [
                Hit(Reason.CALL_UNCOMMITTED, at, mark.operation, mark.cause, True, mark.told)
                for at, id_ in ids
                for mark in marks.values()
                if id_ in mark.calls
            ]
        return hits

    def _texts(self, preview: Preview) -> dict[bytes, bool]:
        """Digests of the text at each of its borders, without white space around it: apps trim what they keep."""
        found: dict[bytes, bool] = {}
        running = self._blake2b()
        characters, blank, digest = 0, "", b""
        for piece in preview.beginnings():
            piece = blank + piece if characters else piece.lstrip()
            body = piece.rstrip()
            blank = piece[len(body) :]
            if not body:
                continue
            running.update(body.encode(errors="surrogatepass"))
            characters += len(body)
            if characters >= CHARACTERS_MIN:
                digest = running.copy().digest()
                found[digest] = False
        if digest and preview.whole:
            found[digest] = True
        return found

    def _digest(self, text: str) -> bytes:
        running = self._blake2b()
        running.update(text.encode(errors="surrogatepass"))
        return running.digest()

    def _blake2b(self) -> "hashlib.blake2b":
        return hashlib.blake2b(key=self.key, digest_size=DIGEST_BYTES)

    def _forget_old(self) -> None:
        oldest_s = self.now_s() - self.age_s_max
        while self._turns:
            turn, mark = next(iter(self._turns.items()))
            if mark.at_s >= oldest_s:
                return
            self._drop(*turn)

    def _drop(self, owner: str, operation: str) -> None:
        del self._turns[owner, operation]
        marks = self._owners[owner]
        del marks[operation]
        if not marks:
            del self._owners[owner]


def _is_drawn(id_: str, name: str) -> bool:
    """False for ids that are counted or made from the tool's name: another turn has the same by chance."""
    return len(id_) >= ID_CHARACTERS_MIN and (not name or name not in id_)
