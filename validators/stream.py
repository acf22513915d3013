"""What a provider's answer says, in neutral events, and the assembler that builds the turn from them.

Adapters turn wire bytes into these events (in a stream one by one, for a whole JSON answer all at once); the
assembler knows no wire format. It keeps a turn's calls until they are closed and says at the end what the turn was.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NoReturn, Protocol, assert_never

import msgspec

from turngate.validators.rules import Reason
from turngate.validators.schemas import Declared


class Finish(StrEnum):
    """Why the provider says it stopped."""

    COMPLETE = "complete"
    TRUNCATED = "truncated"  # a length limit
    FILTERED = "filtered"  # a refusal or content filter
    OTHER = "other"  # a word we do not know: never a licence to run a tool


class _Happened(msgspec.Struct, frozen=True, gc=False):
    """Base of the stream events. `choice` counts parallel answers to one request."""


class TurnStarted(_Happened, frozen=True, gc=False):
    """The provider named its answer: `handle` is its id."""

    handle: str
    model: str


class TextDelta(_Happened, frozen=True, gc=False):
    """Content the app may show at once; `size` in characters."""

    size: int


class CallOpened(_Happened, frozen=True, gc=False):
    """A client's tool call begins. `call` numbers it within the turn, whatever the wire's index says.

    `free_text`: its input is no JSON by declaration (custom tools).
    """

    call: int
    choice: int
    id: str
    name: str
    free_text: bool = False


class CallNamed(_Happened, frozen=True, gc=False):
    """A later event brought the id or name that the opening one lacked."""

    call: int
    id: str
    name: str


class CallDelta(_Happened, frozen=True, gc=False):
    """The next piece of a call's arguments."""

    call: int
    fragment: str


class CallClosed(_Happened, frozen=True, gc=False):
    """The wire says that this call's arguments are whole. Chat Completions has no such event but the finish."""

    call: int


class CallDisplaced(_Happened, frozen=True, gc=False):
    """Another call took this one's place on the wire. That is how some servers number calls; else a fault (told only
    at the finish, when it is known whether anything is missing)."""

    call: int


class ChoiceFinished(_Happened, frozen=True, gc=False):
    """The provider ended this choice and said why. `stops_for_tools`: its word means that calls are to be run."""

    choice: int
    finish: Finish
    stops_for_tools: bool = False


class TurnEnded(_Happened, frozen=True, gc=False):
    """The terminal event of the answer."""


ERROR_BYTES_MAX: Final = 4096
"""What is kept of a provider's error."""


class ProviderFailed(_Happened, frozen=True, gc=False):
    """The provider reported an error inside the stream: its JSON text, up to `ERROR_BYTES_MAX`. `malformed_call`: it could not read its model's own call."""

    message: str
    malformed_call: bool = False


class EndedEarly(_Happened, frozen=True, gc=False):
    """The dialect's last word came before the answer had its end: clients stop reading here, and raise nothing."""


class FrameUnreadable(_Happened, frozen=True, gc=False):
    """A complete frame that is not what this dialect sends."""

    detail: str


class Irregular(_Happened, frozen=True, gc=False):
    """Something the dialect's grammar forbids. `fatal` where clients would read different turns from it."""

    reason: Reason
    fatal: bool = False


class UsageReported(_Happened, frozen=True, gc=False):
    """Tokens as the provider counts them, what was cached included; -1 where it does not say. Later ones count."""

    input_tokens: int = -1
    output_tokens: int = -1


StreamEvent = (
    TurnStarted
    | TextDelta
    | CallOpened
    | CallNamed
    | CallDelta
    | CallClosed
    | CallDisplaced
    | ChoiceFinished
    | TurnEnded
    | ProviderFailed
    | EndedEarly
    | FrameUnreadable
    | Irregular
    | UsageReported
)


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One complete frame of the stream: its bytes as they came, and what they say.

    `text` is what an app keeps of it as the answer: no reasoning, and of several choices the first.
    """

    raw: bytes
    events: tuple[StreamEvent, ...]
    text: str = ""


class StreamParser(Protocol):
    """One dialect's reader of a streamed answer: bytes in, frames out. `pending` is the frame that is not whole yet."""

    @property
    def closes_calls(self) -> bool:
        """The dialect says itself when a call's arguments are whole, before the turn ends."""

    @property
    def pending(self) -> bytes: ...

    @property
    def pending_is_idle(self) -> bool:
        """What is pending is no half of anything: blank lines, comments, or the dialect's last word."""

    def feed(self, data: bytes) -> list[Frame]: ...


class Ending(StrEnum):
    """How the bytes of an answer ended."""

    CLEAN = "clean"  # in HTTP's proper way
    EOF = "eof"  # the connection was closed before that
    RESET = "reset"
    LEFT = "left"  # the app went away, so we closed
    STALLED = "stalled"  # the provider was silent for too long, so we closed


class Turn(StrEnum):
    """What an answer came to."""

    COMMITTED = "committed"
    INCOMPLETE = "incomplete"  # the provider ended it early and said so
    RETRACTED = "retracted"  # content was seen, then it broke, failed or contradicted itself
    UNKNOWN = "unknown"  # nothing decisive is known


@dataclass(slots=True)
class Call:
    """One tool call of the answer, as far as it has arrived."""

    choice: int
    id: str
    name: str
    free_text: bool = False
    fragments: list[str] = field(default_factory=list)
    closed: bool = False
    sealed: bool = False
    """Its choice has finished behind it: an app may run it now, so nothing may be added."""
    displaced: bool = False

    @property
    def arguments(self) -> str:
        """The JSON text of the arguments. Nothing at all stands for an empty object in both dialects."""
        return "".join(self.fragments) or "{}"

    def fault(self) -> Reason | None:
        """Why the arguments are not whole, as far as their text tells."""
        if self.free_text:
            return None
        arguments = self.arguments
        return arguments_fault(arguments) or (
            Reason.CALL_ARGUMENTS_DUPLICATE_KEY if repeats_key(arguments) else None
        )


class TurnVerdict(msgspec.Struct, frozen=True):
    """The end of a turn. `calls` are the ones an app may run: none unless committed."""

    turn: Turn
    reason: Reason | None = None
    finish: Finish | None = None
    calls: tuple[Call, ...] = ()


@dataclass(slots=True)
class Assembler:
    """Build one turn from its events. No socket, no clock.

    `declared` is what the request lets a call be, None where nobody asks. `anomalies` has each irregularity once that did not end the turn; it is complete with the verdict.
    """

    choices: int = 1
    closes_calls: bool = False
    handle: str = ""
    model: str = ""
    text_characters: int = 0
    calls: list[Call] = field(default_factory=list)
    finishes: dict[int, ChoiceFinished] = field(default_factory=dict)
    ended: bool = False
    fault: Reason | None = None
    failure: str = ""
    """The provider's own error, as it said it."""
    declared: Declared | None = None
    anomalies: list[Reason] = field(default_factory=list)
    input_tokens: int = -1
    output_tokens: int = -1
    _started: bool = False
    _restart: Reason | None = None
    _released: int = 0
    """So many calls an app may have run already, when others came behind the end."""
    _late: bool = False
    """Text came behind the last end so far. Some servers say "stop" with every piece, so it is no anomaly yet."""

    def receive(self, event: StreamEvent) -> None:
        """Take one event. The first fault stays; what comes after it changes nothing."""
        match event:
            case TextDelta(size):
                self.text_characters += size
                if self.ended:
                    self._late = True
            case CallDelta(call, fragment):
                self._add(self.calls[call], fragment)
            case CallOpened():
                self._open(event)
            case CallNamed(call, id_, name):
                self._name(self.calls[call], id_, name)
            case CallClosed(call):
                self.calls[call].closed = True
            case CallDisplaced(call):
                self.calls[call].displaced = True
            case ChoiceFinished(choice):
                self._finish(choice, event)
            case TurnStarted(handle, model):
                self._start(handle, model)
            case TurnEnded():
                self.ended, self._late = True, False
            case UsageReported(input_tokens, output_tokens):
                self.input_tokens = input_tokens if input_tokens >= 0 else self.input_tokens
                self.output_tokens = output_tokens if output_tokens >= 0 else self.output_tokens
            case ProviderFailed(message, malformed_call):
                self.failure = self.failure or message
                self._fail(Reason.STREAM_MALFORMED_CALL if malformed_call else Reason.STREAM_ERROR_EVENT)
            case EndedEarly():
                self._fail(Reason.STREAM_NO_STOP)
            case FrameUnreadable():
                self._fail(Reason.STREAM_BAD_FRAMING)
            case Irregular(reason, fatal):
                self._fail(reason) if fatal else self.note(reason)
            case _:
                assert_never(event)

    def note(self, reason: Reason) -> None:
        """Remember what is irregular and ends nothing. Each reason once, so that the closed list is the bound."""
        if reason not in self.anomalies:
            self.anomalies.append(reason)

    def _fail(self, reason: Reason) -> None:
        self.fault = self.fault or reason

    def _start(self, handle: str, model: str) -> None:
        """The answer's name. A second start is harmless before anything was said, and afterwards as long as it can
        only repeat text: with another handle, or beside calls, two answers have run into one."""
        if self._started:
            other = bool(handle and self.handle and handle != self.handle)
            reason = Reason.STREAM_WRONG_HANDLE if other else Reason.STREAM_DUPLICATE_DELTA
            if self.calls or (other and self.text_characters):
                self._fail(reason)
            else:
                self._restart = self._restart or reason
                self.note(reason)
        self._started = True
        self.handle, self.model = self.handle or handle, self.model or model

    def _open(self, event: CallOpened) -> None:
        if self.ended:
            self._released = len(self.calls)
            self.note(Reason.STREAM_AFTER_STOP)
        self.calls.append(Call(event.choice, event.id, event.name, event.free_text))
        self.ended = False  # a call after a finish reopens the turn: it needs an end of its own

    def _add(self, call: Call, fragment: str) -> None:
        if call.sealed or call.closed:
            # Whoever ran the call at its end has it without this piece; a piece that says nothing changes nothing.
            self._fail(Reason.STREAM_AFTER_STOP) if fragment else self.note(Reason.STREAM_AFTER_STOP)
        call.fragments.append(fragment)

    def _name(self, call: Call, id_: str, name: str) -> None:
        if call.sealed:
            self._fail(Reason.STREAM_AFTER_STOP)
        call.id, call.name = call.id or id_, call.name or name

    def _finish(self, choice: int, event: ChoiceFinished) -> None:
        # Some servers send a second finish with the usage or with another word; the first one that stops for tools,
        # else the first one, is what their clients go by (openai-chat.md DEV-11). An early end stays one.
        first = self.finishes.get(choice)
        if first is None or (event.stops_for_tools and first.finish is Finish.COMPLETE):
            self.finishes[choice] = event
        for call in self.calls:
            if call.choice == choice:
                call.sealed = True

    def judge(self) -> TurnVerdict:
        """The verdict on a turn whose terminal event has come."""
        if self._late:
            self.note(Reason.STREAM_AFTER_STOP)
        if self.fault is not None:
            return TurnVerdict(Turn.RETRACTED, self.fault)
        finish = self._worst_finish()
        if finish is Finish.FILTERED:
            return TurnVerdict(Turn.INCOMPLETE, Reason.STREAM_FILTERED, finish)
        if finish is Finish.TRUNCATED:
            return TurnVerdict(Turn.INCOMPLETE, self._cut() or Reason.STREAM_LENGTH_LIMITED, finish)
        if self.calls and (finish is Finish.OTHER or not all(call.sealed for call in self.calls)):
            return TurnVerdict(Turn.RETRACTED, Reason.STREAM_NO_STOP, finish)
        reason = self._calls_fault() or self._declared_fault()
        if reason is not None:
            return TurnVerdict(Turn.RETRACTED, reason, finish)
        lost = not self.calls and any(event.stops_for_tools for event in self.finishes.values())
        anomaly = Reason.STREAM_TOOL_STOP_WITHOUT_CALL if lost else self._restart
        return TurnVerdict(Turn.COMMITTED, anomaly, finish, tuple(self.calls))

    def close(self, ending: Ending, *, inside_frame: bool = False) -> TurnVerdict:
        """The verdict when the bytes are over. `inside_frame`: they stopped in the middle of one."""
        if self.ended or self.fault is not None:
            return self.judge()
        if ending is Ending.STALLED:
            return TurnVerdict(Turn.UNKNOWN, Reason.STREAM_STALLED)
        seen = bool(self.text_characters or self.calls)
        turn = Turn.RETRACTED if seen else Turn.UNKNOWN
        half = any(self._half(call) for call in self.calls)
        torn = ending is not Ending.CLEAN and (inside_frame or not seen)
        return TurnVerdict(turn, Reason.STREAM_TRUNCATED if half or torn else Reason.STREAM_NO_STOP)

    def _worst_finish(self) -> Finish:
        found = {event.finish for event in self.finishes.values()}
        for finish in (Finish.FILTERED, Finish.TRUNCATED, Finish.OTHER):
            if finish in found:
                return finish
        return Finish.COMPLETE

    def _cut(self) -> Reason | None:
        """What a length limit did to a call, if that can be seen. A server may close the JSON of a call that was cut."""
        return next(filter(None, map(self._call_fault, self.calls)), None) or self._declared_fault()

    def _calls_fault(self) -> Reason | None:
        """Why the calls of a finished turn may not run, or None."""
        seen: set[tuple[int, str]] = set()
        for call in self.calls:
            if not call.id:
                return Reason.STREAM_CALL_ID_MISSING
            if (call.choice, call.id) in seen:
                return Reason.STREAM_CALL_ID_CONFLICT
            seen.add((call.choice, call.id))
            if not call.name:
                return Reason.CALL_BAD_NAME
            reason = self._call_fault(call)
            if reason is not None:
                return self._told_better(call, reason)
        return Reason.STREAM_DUPLICATE_DELTA if self._runs_twice() else None

    def _runs_twice(self) -> bool:
        """True where a call came behind the end that is one of those before it, by another id: somebody asked again."""
        done = {(call.choice, call.name, call.arguments) for call in self.calls[: self._released]}
        return any((call.choice, call.name, call.arguments) in done for call in self.calls[self._released :])

    def _call_fault(self, call: Call) -> Reason | None:
        if self.closes_calls and not call.closed:
            return Reason.CALL_ARGUMENTS_UNCLOSED
        return call.fault()

    def _told_better(self, call: Call, reason: Reason) -> Reason:
        """What made the arguments what they are, where that can be seen."""
        if call.displaced:
            return Reason.STREAM_CALL_ID_CONFLICT
        return Reason.STREAM_DUPLICATE_DELTA if _came_twice(call.fragments) else reason

    def _declared_fault(self) -> Reason | None:
        """Why a call is not what the request lets it be; where that is not enforced, only a note."""
        declared = self.declared
        if declared is None or not self.calls:
            return None
        used = declared.used_ids()
        for call in self.calls:
            if call.id in used:
                # No provider refuses an id of an earlier turn, and some mint them per turn: never more than a note.
                self.note(Reason.CALL_DUPLICATE_ID)
            reason = declared.fault(call.name, None if call.free_text else call.arguments)
            if reason is None:
                continue
            if declared.enforced and reason is not Reason.TOOLSET_INVALID:
                return reason
            self.note(reason)
        return None

    def _half(self, call: Call) -> bool:
        """True where the bytes stopped inside this call."""
        if self.closes_calls:
            return not call.closed
        return not any(call.fragments) or call.fault() is not None


def arguments_fault(arguments: str) -> Reason | None:
    """Why this text is not one JSON value: unclosed where more text could still make it one, else invalid."""
    try:
        msgspec.json.decode(arguments)
        return None
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        fault = Reason.CALL_ARGUMENTS_UNCLOSED if "truncated" in str(error) else Reason.CALL_ARGUMENTS_INVALID
    except RecursionError:
        return Reason.CALL_ARGUMENTS_INVALID
    # The fast decoder also refuses what JSON allows (half a surrogate pair, 1e999): a second opinion before a call
    # is withheld.
    try:
        _LENIENT.decode(arguments)
    except (ValueError, RecursionError):
        return fault
    return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_LENIENT: Final = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_int=len, parse_float=len, strict=True
)
"""Grammar only: numbers are not converted, so that their size does not matter."""


def repeats_key(arguments: str) -> bool:
    """True where an object in this JSON text has a key twice: which of the two counts, decoders do not agree on."""
    repeated = False

    def look(pairs: list[tuple[str, object]]) -> None:
        nonlocal repeated
        repeated = repeated or len({key for key, _ in pairs}) < len(pairs)

    try:
        json.JSONDecoder(object_pairs_hook=look, parse_int=len, parse_float=len).decode(arguments)
    except RecursionError:
        return True  # nobody can vouch for what cannot be looked through
    return repeated


REPEATS_MAX: Final = 4
"""So many pieces that came twice in a row are looked at: each costs a reading of the whole arguments."""


def _came_twice(fragments: list[str]) -> bool:
    """True where arguments that do not parse would, had a piece, or all of them, not come a second time."""
    if len(fragments) < 2:
        return False
    begun, last = "".join(fragments[:-1]), fragments[-1]
    if begun and last.startswith(begun) and arguments_fault(last) is None:
        return True
    doubles = [at for at in range(1, len(fragments)) if fragments[at] == fragments[at - 1] != ""]
    return any(
        arguments_fault("".join(fragments[:at] + fragments[at + 1 :])) is None for at in doubles[:REPEATS_MAX]
    )


def calls_of(events: Sequence[StreamEvent]) -> bool:
    """True where one of these events belongs to a tool call: from here on a gate holds."""
    return any(isinstance(event, CallOpened | CallDelta | CallNamed | CallClosed) for event in events)
