"""Recorded answers broken in every way, through the gate the proxy runs: what would an app have got?

Each variant of an answer is cut, fragmented or disordered, and what the gate lets out of it is read by a reader of its
own (`turngate.proxy.torture_reader`) and by the witness. No network, no clock; chance comes from a seed.

A cut variant shares its beginning with all the others: one gate is fed byte by byte, and at each byte a copy of it is
told how the bytes ended. The copy is shallow, which is sound as long as `Gate.finish` binds and does not change
what it shares; that this holds is seen from the gate that goes on, whose output must be that of an untouched one.
"""

import random
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final, TypeVar

import msgspec

from turngate.adapters import registry
from turngate.adapters.dialect import Trouble
from turngate.proxy.config import Limits
from turngate.proxy.replay import APIS, Line
from turngate.proxy.reply import RETRACTED
from turngate.proxy.torture_reader import CallKey, Reader, Reading, split
from turngate.telemetry.witness import Scanner
from turngate.validators.gate import Gate
from turngate.validators.graph import MessageSequence
from turngate.validators.rules import Reason
from turngate.validators.stream import Assembler, Ending

T = TypeVar("T")

ENDINGS: Final = (Ending.CLEAN, Ending.EOF, Ending.RESET, Ending.STALLED)
RANDOM_FRAGMENTATIONS: Final = 8
FRAGMENT_BYTES_MAX: Final = 200
EXAMPLES_MAX: Final = 3


class Kind(StrEnum):
    """How a variant differs from its recording. `at` is a byte, a number of a fragmentation, or one of a frame."""

    CUT = "cut"
    BYTES = "byte by byte"
    FRAMES = "frame by frame"
    RANDOM = "random fragments"
    IN_CHARACTERS = "cut inside every character"
    CRLF = "line ends as CRLF"
    IN_LINE_ENDS = "cut inside every CRLF"
    DROPPED = "frame dropped"
    DOUBLED = "frame doubled"
    SWAPPED = "frame swapped with the next"
    LATE = "frame behind the end"


FRAGMENTATIONS: Final = (
    (Kind.BYTES, 0),
    (Kind.FRAMES, 0),
    *((Kind.RANDOM, number) for number in range(RANDOM_FRAGMENTATIONS)),
    (Kind.IN_CHARACTERS, 0),
    (Kind.CRLF, 0),
    (Kind.IN_LINE_ENDS, 0),
)
DISORDERS: Final = (Kind.DROPPED, Kind.DOUBLED, Kind.SWAPPED, Kind.LATE)


class Fault(StrEnum):
    """What must never be, whatever happened to the stream."""

    PARTIAL_CALL = "partial call"
    QUIET_END = "quiet end"
    TEXT_LOST = "text lost"
    CHANGED = "bytes changed"
    WITNESS = "witness"
    CRASH = "crash"


class Variant(msgspec.Struct, frozen=True):
    """One way to break an answer."""

    kind: Kind
    at: int = 0
    ending: Ending = Ending.CLEAN

    def __str__(self) -> str:
        return f"{self.kind} {self.at}, {self.ending}"


class Example(msgspec.Struct, frozen=True):
    """One violation, with what it takes to see it again: `play` with the answer, the variant and the seed."""

    id: str
    variant: Variant
    fault: Fault
    what: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One recorded streamed answer: its dialect, the request's body, and the bytes of the answer."""

    id: str
    api: str
    request: bytes
    data: bytes


@dataclass(slots=True)
class Tally:
    """Counts over everything that was played. `indistinct`: disorder that leaves a stream nobody can tell from sound."""

    answers: int = 0
    variants: Counter[Kind] = field(default_factory=Counter)
    faults: Counter[tuple[Kind, Fault]] = field(default_factory=Counter)
    indistinct: int = 0
    released: int = 0
    examples: list[Example] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Take the counts of another one; of its examples as many as there is room for of each kind and fault."""
        self.answers += other.answers
        self.variants += other.variants
        self.faults += other.faults
        self.indistinct += other.indistinct
        self.released += other.released
        for example in other.examples:
            self.keep(example)

    def keep(self, example: Example) -> None:
        if sum(_place(kept) == _place(example) for kept in self.examples) < EXAMPLES_MAX:
            self.examples.append(example)


def _place(example: Example) -> tuple[Kind, Fault]:
    return example.variant.kind, example.fault


def answer_of(line: Line) -> Answer | None:
    """The streamed answer of a recorded exchange; None where it has none in a dialect that is judged."""
    response, request = line.response, line.request
    if line.api:
        dialect = APIS[line.api][0] if line.api in APIS else None
    else:
        dialect = registry.by_path(request.method, request.path.partition("?")[0])
    if dialect is None or response is None or not 200 <= (response.status or 200) < 300:
        return None
    try:
        data = b"".join(response.pieces())
    except ValueError:
        return None  # no base64: `turngate replay` tells
    if not data.lstrip().startswith((b"data:", b"event:", b":")):
        return None
    return Answer(str(line.id), dialect.api, request.data(), data)


def torture(answer: Answer, seed: int = 0, limit: int | None = None) -> Tally:
    """Play every variant of an answer, or `limit` of them, spread evenly. Raises Undecodable."""
    return _Rack(answer, seed).play_all(limit)


def play(answer: Answer, variant: Variant, seed: int = 0) -> tuple[bytes, "Verdict"]:
    """What one variant lets out, by a gate of its own, and what is wrong with it. Raises Undecodable."""
    return _Rack(answer, seed).play(variant)


# -- what came out --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the app got. `frames` up to `kept` are those given; `held_back`: not all of those given came out."""

    frames: list[bytes]
    kept: int
    held_back: bool
    starved: bool
    """A frame of text that stood before the first call did not come out."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with it. `released`: calls that came out; `indistinct`: one of them altered, and nobody could tell."""

    found: tuple[tuple[Fault, str], ...] = ()
    released: int = 0
    indistinct: bool = False

    def plus(self, fault: Fault, what: str) -> "Verdict":
        return replace(self, found=(*self.found, (fault, what)))


NOTHING_WRONG: Final = Verdict()
Found = list[tuple[Fault, str]]


class Judge:
    """Holds what came out against the recorded answer."""

    def __init__(self, api: str, reader: Reader, recorded: Reading) -> None:
        self._api = api
        self._reader = reader
        self._recorded = Counter(recorded.keys)

    def verdict(self, given: Sequence[bytes], outcome: Outcome) -> Verdict:
        """`given` are the frames that the gate was given."""
        reading = self._reader.read(outcome.frames)
        found, indistinct = self._calls(given, reading)
        if outcome.starved:
            found.append((Fault.TEXT_LOST, "text before the first call was withheld"))
        found += self._end(given, outcome, reading)
        scanner = Scanner(self._api)
        scanner.see(b"".join(outcome.frames))
        if said := scanner.end(clean=True):
            found.append((Fault.WITNESS, said))
        return Verdict(tuple(found), len(reading.calls), indistinct)

    def _calls(self, given: Sequence[bytes], reading: Reading) -> tuple[Found, bool]:
        """Each call that came out is one of the recorded, once."""
        found: Found = []
        altered: list[CallKey] = []
        for call, times in Counter(reading.keys).items():
            if times > 1:
                found.append((Fault.PARTIAL_CALL, f"call {call[1]!r} came out {times} times"))
            if call not in self._recorded:
                altered.append(call)
        half = [call for call in reading.calls if not call.runs() or (reading.messages and not call.closed)]
        if reading.stray_behind_end:
            found.append((Fault.PARTIAL_CALL, "a piece of a call came out behind the end"))
        if half or (reading.calls and not reading.ended):
            found.append((Fault.PARTIAL_CALL, "a call came out that is not whole"))
        elif altered and not self._reader.read(given).sound():
            found.append((Fault.PARTIAL_CALL, f"call {altered[0][1]!r} is not as recorded"))
        return found, bool(altered and not found)

    def _end(self, given: Sequence[bytes], outcome: Outcome, reading: Reading) -> Found:
        """It is complete, or ends with an error, or with the provider's own early finish; and is made of whole frames."""
        extra = outcome.frames[outcome.kept :]
        error = bool(extra) and self._reader.facts(extra[-1]).failed
        if error:
            del extra[-1:]
        if extra and not (reading.early and _is_tail(extra, given[outcome.kept :])):
            return [(Fault.CHANGED, "frames came out that were not given, or not in this order")]
        if error or reading.failed_at == len(outcome.frames) - 1:
            return []  # the gate's error, or the provider's own
        if reading.failed_at is not None:
            rest = outcome.frames[reading.failed_at + 1 :]
            quiet = all(self._reader.facts(frame).empty for frame in rest)
            return [] if quiet else [(Fault.QUIET_END, "something follows the error")]
        if not reading.ended:
            return [(Fault.QUIET_END, "neither an end nor an error came out")]
        if outcome.held_back and not extra:
            return [(Fault.TEXT_LOST, "it ends well without all that was given")]
        return []


def _is_tail(extra: list[bytes], rest: Sequence[bytes]) -> bool:
    """Whether these frames stand, in this order and without a gap, behind what was withheld."""
    starts = (at for at in range(1, len(rest)) if rest[at] == extra[0])
    return any(list(rest[at : at + len(extra)]) == extra for at in starts)


# -- variants -------------------------------------------------------------------------------------------------------


class _Rack:
    """Plays the variants of one answer. Raises Undecodable where its request cannot be read."""

    def __init__(self, answer: Answer, seed: int) -> None:
        self.answer = answer
        self.data = answer.data
        self.seed = seed
        self.dialect = registry.DIALECTS[answer.api]
        self.sequence: MessageSequence = self.dialect.parse_request(answer.request)
        self.reader = Reader(answer.api, _choices(answer.request))
        self.frames = split(answer.data)
        self.ends = list(accumulate(map(len, self.frames)))
        self.recorded = self.reader.read(self.frames)
        self.judge = Judge(answer.api, self.reader, self.recorded)
        self.tally = Tally(answers=1)
        self._judged: dict[tuple[int, bytes, bool, bool], Verdict] = {}

    def gate(self) -> Gate:
        """As the proxy opens it where calls are held."""
        parser = self.dialect.open_stream(self.sequence)
        return Gate(
            parser,
            Assembler(self.sequence.choices, parser.closes_calls),
            holds=True,
            held_bytes_max=Limits().hold_bytes,
            retraction=self._retraction,
        )

    def _retraction(self, reason: Reason) -> bytes:
        return self.dialect.stream_error(Trouble(reason, RETRACTED))

    @cached_property
    def whole(self) -> bytes:
        """What the gate makes of the answer as it was recorded, given at once."""
        return self._run([self.data])

    @cached_property
    def whole_crlf(self) -> bytes:
        """The same of the answer with CRLF for its line ends."""
        return self._run([self.crlf])

    @cached_property
    def crlf(self) -> bytes:
        """The answer with CRLF for its line ends; as it is where it has such already."""
        return self.data if b"\r" in self.data else self.data.replace(b"\n", b"\r\n")

    @cached_property
    def free(self) -> int:
        """How many bytes come before the first frame of a call, or the first that no client takes."""
        at = self._free(self.frames)
        return self.ends[at - 1] if at else 0

    def _free(self, frames: Sequence[bytes]) -> int:
        """How many frames come before the first one of a call, or the first that no client takes."""
        reading = Reading(self.reader.messages, self.reader.choices)
        for at, frame in enumerate(frames):
            facts = self.reader.facts(frame)
            unseen = reading.last_word and not reading.messages
            if unseen or reading.take(at, facts) or reading.failed_at is not None:
                return at
            if facts.last_word and not reading.ended:
                return at
        return len(frames)

    def _run(self, pieces: Sequence[bytes], ending: Ending = Ending.CLEAN) -> bytes:
        gate = self.gate()
        return b"".join([*map(gate.receive, pieces), gate.finish(ending)])

    def play_all(self, limit: int | None) -> Tally:
        fragmentations = list(FRAGMENTATIONS)
        last = len(self.frames) - 1
        moves = {Kind.SWAPPED, Kind.LATE}  # the last frame has no next one and is at the end already
        disorders = [(k, at) for at in range(last + 1) for k in DISORDERS if at < last or k not in moves]
        cuts = len(ENDINGS) * (len(self.data) + 1)
        if limit is not None:
            fragmentations = _spread(fragmentations, limit // 3)
            disorders = _spread(disorders, (limit - len(fragmentations)) // 2)
            limit -= len(fragmentations) + len(disorders)
        self._play_cuts(range(cuts) if limit is None or limit >= cuts else _spread(range(cuts), limit))
        for kind, at in (*fragmentations, *disorders):
            self._count(Variant(kind, at))
        return self.tally

    def play(self, variant: Variant) -> tuple[bytes, Verdict]:
        """Play one variant with a gate of its own."""
        if variant.kind is Kind.CUT:
            out = self._run([self.data[: variant.at]], variant.ending)
            return out, self._judge_cut(variant.at, *self._apart(out))
        if variant.kind in DISORDERS:
            raw = b"".join(_disordered(self.frames, variant))
            out = self._run([raw], variant.ending)
            return out, self._judge_disordered(split(raw), out)
        out = self._run(self._fragments(variant), variant.ending)
        return out, self._judge_fragments(variant, out)

    # Cuts

    def _play_cuts(self, numbers: Sequence[int]) -> None:
        """Cut number n is at byte n // 4 with ending n % 4."""
        gate, fed, kept, extra = self.gate(), 0, 0, b""
        for number in numbers:
            at, ending = number // len(ENDINGS), ENDINGS[number % len(ENDINGS)]
            if at > fed:
                try:
                    out = gate.receive(self.data[fed:at])
                except Exception as error:  # noqa: BLE001 - counted as what it is
                    self._fail(Variant(Kind.CUT, at, ending), error)
                    return
                fed = at
                if out and not extra and self.data.startswith(out, kept):
                    kept += len(out)
                else:
                    extra += out
            self._count_cut(gate, Variant(Kind.CUT, at, ending), kept, extra)

    def _count_cut(self, gate: Gate, variant: Variant, kept: int, extra: bytes) -> None:
        self.tally.variants[Kind.CUT] += 1
        try:
            tail = copy(gate).finish(variant.ending)
        except Exception as error:  # noqa: BLE001 - counted as what it is
            self._fail(variant, error)
            return
        self._take(variant, self._judge_cut(variant.at, kept, extra + tail))

    def _apart(self, out: bytes) -> tuple[int, bytes]:
        """How many bytes at the beginning are the recorded ones, by whole frames, and what follows."""
        kept = 0
        for frame, end in zip(self.frames, self.ends, strict=True):
            if not out.startswith(frame, kept):
                break
            kept = end
        return kept, out[kept:]

    def _judge_cut(self, at: int, kept: int, tail: bytes) -> Verdict:
        """Judge what came out: `kept` bytes of the recorded answer, then `tail`. The same is judged once."""
        border = self._border(at)
        rest = self.data[kept:at]
        if tail and rest.startswith(tail):
            kept, tail = kept + len(tail), b""  # what was given, to the last byte
        # Of CR LF, the LF alone may be outstanding: the line has ended.
        held_back = kept < border and bool(self.data[kept:border].strip())
        starved = kept < min(self.free, border) and held_back
        key = kept, tail, held_back, starved
        known = self._judged.get(key)
        if known is None:
            given = split(self.data[:at])
            out = split(self.data[:kept]) + split(tail)
            outcome = Outcome(out, len(out) - len(split(tail)), held_back, starved)
            known = self._judged[key] = self.judge.verdict(given, outcome)
        return known

    def _border(self, at: int) -> int:
        """The end of the last frame that is whole when so many bytes have come."""
        number = bisect_right(self.ends, at)
        if number == len(self.frames) and not _is_whole(self.frames[-1:]):
            number -= 1
        return self.ends[number - 1] if number > 0 else 0

    # Fragmentations and disorder: each by a gate of its own

    def _fragments(self, variant: Variant) -> list[bytes]:
        match variant.kind:
            case Kind.FRAMES:
                return self.frames
            case Kind.RANDOM:
                return _cut_at(self.data, self._random_offsets(variant.at))
            case Kind.IN_CHARACTERS:
                return _cut_at(self.data, (at for at, byte in enumerate(self.data) if byte & 0xC0 == 0x80))
            case Kind.CRLF:
                return [self.crlf]
            case Kind.IN_LINE_ENDS:
                return _cut_at(self.crlf, (found.start() + 1 for found in re.finditer(b"\r\n", self.crlf)))
        return [self.data[at : at + 1] for at in range(len(self.data))]

    def _random_offsets(self, number: int) -> Iterator[int]:
        chance = random.Random(f"{self.seed} {self.answer.id} {number}")
        at = 0
        while (at := at + chance.randint(1, FRAGMENT_BYTES_MAX)) < len(self.data):
            yield at

    def _judge_fragments(self, variant: Variant, out: bytes) -> Verdict:
        """The way an answer is cut into reads changes nothing; and nothing at all where nothing is wrong with it."""
        rewritten = variant.kind in (Kind.CRLF, Kind.IN_LINE_ENDS)
        given, wanted = (self.crlf, self.whole_crlf) if rewritten else (self.data, self.whole)
        verdict = NOTHING_WRONG if rewritten else self._judge_cut(len(given), *self._apart(out))
        # Between CR and LF a frame may end too soon; the LF then belongs to nothing.
        if out != wanted and not (b"\r" in given and _lines(out) == _lines(wanted)):
            return verdict.plus(Fault.CHANGED, "another fragmentation, another output")
        withheld = self.recorded.early and self.recorded.calls
        if self.recorded.sound() and _is_whole(self.frames[-1:]) and not withheld and out != given:
            return verdict.plus(Fault.CHANGED, "nothing is wrong with it, and it did not pass as it is")
        return verdict

    def _judge_disordered(self, given: Sequence[bytes], out: bytes) -> Verdict:
        came = split(out)
        kept = next(
            (at for at, (one, other) in enumerate(zip(given, came, strict=False)) if one != other),
            min(len(given), len(came)),
        )
        held_back = kept < len(given) - (not _is_whole(given[-1:]))
        starved = held_back and kept < self._free(given)
        return self.judge.verdict(given, Outcome(came, kept, held_back, starved))

    # Counts

    def _count(self, variant: Variant) -> None:
        self.tally.variants[variant.kind] += 1
        try:
            self._take(variant, self.play(variant)[1])
        except Exception as error:  # noqa: BLE001 - counted as what it is
            self._fail(variant, error)

    def _take(self, variant: Variant, verdict: Verdict) -> None:
        self.tally.released += verdict.released
        self.tally.indistinct += verdict.indistinct
        for fault, what in verdict.found:
            self._note(variant, fault, what)

    def _fail(self, variant: Variant, error: Exception) -> None:
        self._note(variant, Fault.CRASH, f"{type(error).__name__}: {error}")

    def _note(self, variant: Variant, fault: Fault, what: str) -> None:
        self.tally.faults[variant.kind, fault] += 1
        self.tally.keep(Example(self.answer.id, variant, fault, what))


def _disordered(frames: Sequence[bytes], variant: Variant) -> list[bytes]:
    """The frames as an app without the gate would get them."""
    at, frame = variant.at, frames[variant.at]
    before, behind = list(frames[:at]), list(frames[at + 1 :])
    match variant.kind:
        case Kind.DOUBLED:
            return [*before, frame, frame, *behind]
        case Kind.SWAPPED:
            return [*before, *behind[:1], frame, *behind[1:]]
        case Kind.LATE:
            return [*before, *behind, frame]
    return before + behind


def _is_whole(frames: Sequence[bytes]) -> bool:
    """Whether the last frame, if there is one, has its blank line."""
    return all(frame.replace(b"\r\n", b"\n")[-2:] in (b"\n\n", b"\r\r") for frame in frames)


def _cut_at(data: bytes, offsets: Iterable[int]) -> list[bytes]:
    return [data[start:end] for start, end in pairwise([0, *offsets, len(data)])]


def _lines(data: bytes) -> list[bytes]:
    """The lines that say something, whatever ends them."""
    return [line for line in re.split(rb"[\r\n]+", data) if line]


def _spread(items: Sequence[T], count: int) -> list[T]:
    """So many of these, evenly."""
    return [items[at * len(items) // count] for at in range(count)] if count < len(items) else list(items)


class _Asked(msgspec.Struct):
    n: int | None = None


def _choices(request: bytes) -> int:
    """How many answers a Chat Completions request asks for."""
    try:
        return msgspec.json.decode(request, type=_Asked).n or 1
    except msgspec.DecodeError:
        return 1
