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


class ChoiceFinished(_Happened, frozen=True, gc=False):
    """The provider ended this choice and said why. `stops_for_tools`: its word means that calls are to be run."""

    choice: int
    finish: Finish
    stops_for_tools: bool = False


class TurnEnded(_Happened, frozen=True, gc=False):
    """The terminal event of the answer."""


class ProviderFailed(_Happened, frozen=True, gc=False):
    """The provider reported an error inside the stream."""

    message: str


class EndedEarly(_Happened, frozen=True, gc=False):
    """The dialect's last word came before the answer had its end: clients stop reading here, and raise nothing."""


class FrameUnreadable(_Happened, frozen=True, gc=False):
    """A complete frame that is not what this dialect sends."""

    detail: str


StreamEvent = (
    TurnStarted
    | TextDelta
    | CallOpened
    | CallNamed
    | CallDelta
    | CallClosed
    | ChoiceFinished
    | TurnEnded
    | ProviderFailed
    | EndedEarly
    | FrameUnreadable
)


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One complete frame of the stream: its bytes as they came, and what they say."""

    raw: bytes
    events: tuple[StreamEvent, ...]


class StreamParser(Protocol):
    """One dialect's reader of a streamed answer: bytes in, frames out. `pending` is the frame that is not whole yet."""

    @property
    def closes_calls(self) -> bool:
        """The dialect says itself when a call's arguments are whole, before the turn ends."""

    @property
    def pending(self) -> bytes: ...

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

    @property
    def arguments(self) -> str:
        """The JSON text of the arguments. Nothing at all stands for an empty object in both dialects."""
        return "".join(self.fragments) or "{}"

    def fault(self) -> Reason | None:
        """Why the arguments are not whole, as far as their text tells."""
        return None if self.free_text else arguments_fault(self.arguments)


class TurnVerdict(msgspec.Struct, frozen=True):
    """The end of a turn. `calls` are the ones an app may run: none unless committed."""

    turn: Turn
    reason: Reason | None = None
    finish: Finish | None = None
    calls: tuple[Call, ...] = ()


@dataclass(slots=True)
class Assembler:
    """Build one turn from its events. No socket, no clock."""

    choices: int = 1
    closes_calls: bool = False
    handle: str = ""
    model: str = ""
    text_characters: int = 0
    calls: list[Call] = field(default_factory=list)
    finishes: dict[int, ChoiceFinished] = field(default_factory=dict)
    ended: bool = False
    fault: Reason | None = None

    def receive(self, event: StreamEvent) -> None:
        """Take one event. The first fault stays; what comes after it changes nothing."""
        match event:
            case TextDelta(size):
                self.text_characters += size
            case CallDelta(call, fragment):
                self.calls[call].fragments.append(fragment)
            case CallOpened(_, choice, id_, name, free_text):
                self.calls.append(Call(choice, id_, name, free_text))
                self.ended = False  # a call after a finish reopens the turn: it needs an end of its own
            case CallNamed(call, id_, name):
                self.calls[call].id = self.calls[call].id or id_
                self.calls[call].name = self.calls[call].name or name
            case CallClosed(call):
                self.calls[call].closed = True
            case ChoiceFinished(choice):
                self._finish(choice, event)
            case TurnStarted(handle, model):
                self.handle, self.model = self.handle or handle, self.model or model
            case TurnEnded():
                self.ended = True
            case ProviderFailed():
                self.fault = self.fault or Reason.STREAM_ERROR_EVENT
            case EndedEarly():
                self.fault = self.fault or Reason.STREAM_NO_STOP
            case FrameUnreadable():
                self.fault = self.fault or Reason.STREAM_BAD_FRAMING
            case _:
                assert_never(event)

    def _finish(self, choice: int, event: ChoiceFinished) -> None:
        # Some servers send a second finish with the usage or with another word; the first one that stops for tools,
        # else the first one, is what their clients go by (openai-chat.md DEV-11). An early end stays one.
        first = self.finishes.get(choice)
        if first is None or (event.stops_for_tools and first.finish is Finish.COMPLETE):
            self.finishes[choice] = event

    def judge(self) -> TurnVerdict:
        """The verdict on a turn whose terminal event has come."""
        if self.fault is not None:
            return TurnVerdict(Turn.RETRACTED, self.fault)
        finish = self._worst_finish()
        if finish is Finish.FILTERED:
            return TurnVerdict(Turn.INCOMPLETE, Reason.STREAM_FILTERED, finish)
        if finish is Finish.TRUNCATED:
            cut = next((reason for call in self.calls if (reason := self._call_fault(call))), None)
            return TurnVerdict(Turn.INCOMPLETE, cut or Reason.STREAM_LENGTH_LIMITED, finish)
        if self.calls and (finish is Finish.OTHER or not self.finishes):
            return TurnVerdict(Turn.RETRACTED, Reason.STREAM_NO_STOP, finish)
        reason = self._calls_fault()
        if reason is not None:
            return TurnVerdict(Turn.RETRACTED, reason, finish)
        lost = not self.calls and any(event.stops_for_tools for event in self.finishes.values())
        anomaly = Reason.STREAM_TOOL_STOP_WITHOUT_CALL if lost else None
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
                return reason
        return None

    def _call_fault(self, call: Call) -> Reason | None:
        if self.closes_calls and not call.closed:
            return Reason.CALL_ARGUMENTS_UNCLOSED
        return call.fault()

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


def calls_of(events: Sequence[StreamEvent]) -> bool:
    """True where one of these events belongs to a tool call: from here on a gate holds."""
    return any(isinstance(event, CallOpened | CallDelta | CallNamed | CallClosed) for event in events)
