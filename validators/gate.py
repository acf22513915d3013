"""What of a streamed answer may pass to the app, and when.

Pass or replace, never edit: text passes at once; from the first tool call on every frame waits until the turn has
ended and each call in it checks. Then all of them go, or an error in the dialect's shape, or (where the provider
itself stopped early and said so) the provider's own finish without the calls.

The same gate watches where nothing may be held: `holds=False` passes every byte as it comes and still judges.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from turngate.validators.previews import Preview
from turngate.validators.rules import Reason
from turngate.validators.stream import (
    Assembler,
    ChoiceFinished,
    Ending,
    Frame,
    ProviderFailed,
    StreamParser,
    TextDelta,
    Turn,
    TurnVerdict,
    calls_of,
)


@dataclass(slots=True)
class HoldBudget:
    """What all answers of a process may hold together, in bytes."""

    bytes_max: int
    held_bytes: int = 0

    def resize(self, before: int, after: int) -> bool:
        """Change one holder's share; False, and nothing changed, where that is too much for all of them."""
        if after > before and self.held_bytes + after - before > self.bytes_max:
            return False
        self.held_bytes += after - before
        return True


@dataclass(slots=True)
class Gate:
    """One answer's gate. Bytes in, bytes out; no socket, no clock.

    `retraction` makes the dialect's in-stream error for a reason. `held_bytes_max` bounds what waits here, the
    frame that is not whole yet included; `budget` what waits in all gates. `verdict` is None until the turn is judged.
    """

    parser: StreamParser
    assembler: Assembler
    holds: bool
    held_bytes_max: int
    retraction: Callable[[Reason], bytes]
    budget: HoldBudget = field(default_factory=lambda: HoldBudget(sys.maxsize))
    preview: Preview | None = None
    """Collects the text that the app is shown, where somebody wants to recognise it."""
    verdict: TurnVerdict | None = None
    over: bool = False
    """Nothing more may be written: the app was told that the turn is broken."""
    blind: bool = False
    """A frame outgrew the bound where nothing may be held: the rest of the answer is not judged."""
    withheld_bytes: int = 0
    released_calls: int = 0
    """Calls that have left, whatever became of the turn behind them."""
    _held: list[Frame] = field(default_factory=list)
    _held_bytes: int = 0
    _pending_bytes: int = 0
    _charged: int = 0

    @property
    def holding(self) -> bool:
        """True while frames wait for the end of their turn."""
        return bool(self._held)

    @property
    def held_bytes(self) -> int:
        """Bytes that wait now, without the frame that is not whole."""
        return self._held_bytes

    def receive(self, data: bytes) -> bytes:
        """Take bytes from the provider; return what may go to the app now."""
        if self.over:
            return b""
        if not self.holds:
            self._watch(data)
            return data
        untouched = not self._held and not self._pending_bytes
        frames = self.parser.feed(data)
        self._pending_bytes = len(self.parser.pending)
        if untouched and not self._pending_bytes and _only_text(frames):
            self.assembler.receive(frames[0].events[0])
            if self.preview is not None:
                self.preview.add(frames[0].text)
            return data  # nearly all of them: one whole frame of text, no copy
        out: list[bytes] = []
        for frame in frames:
            self._take(frame, out)
            if self.over:
                return b"".join(out)
        if not self._within(self._pending_bytes + self._held_bytes):
            self._retract(Reason.LIMIT_HOLD, out)
        return b"".join(out)

    def close(self) -> None:
        """Nothing more will come or go: give back what this answer takes of the budget."""
        self.budget.resize(self._charged, 0)
        self._charged = 0

    def _within(self, waiting: int) -> bool:
        if waiting > self.held_bytes_max or not self.budget.resize(self._charged, waiting):
            return False
        self._charged = waiting
        return True

    def finish(self, ending: Ending) -> bytes:
        """The provider's bytes are over; return the last bytes for the app."""
        if self.over or self.blind:
            return b""
        rest = self.parser.pending
        self.verdict = self.assembler.close(ending, inside_frame=bool(rest))
        if not self.holds or ending is Ending.LEFT:
            return b""
        if self.assembler.ended:
            if rest and ending is Ending.CLEAN:
                return self._torn(rest)
            self.withheld_bytes += len(rest)
            return b""
        out: list[bytes] = []
        self._retract(self.verdict.reason or Reason.STREAM_NO_STOP, out)
        return b"".join(out)

    def _torn(self, rest: bytes) -> bytes:
        """What stands behind the end without its blank line. Clients of SSE drop it, others read it line by line: half
        an event must not reach them."""
        if self.parser.pending_is_idle:
            return rest
        self.assembler.note(Reason.STREAM_TRUNCATED)
        self.withheld_bytes += len(rest)
        return b""

    def abandon(self, reason: Reason = Reason.INTERNAL) -> bytes:
        """Give the turn up, for a fault of our own unless told otherwise; return what the app must be told."""
        if self.over:
            return b""
        self.verdict = TurnVerdict(Turn.RETRACTED, reason)
        out: list[bytes] = []
        self._retract(reason, out)
        return b"".join(out)

    def _watch(self, data: bytes) -> None:
        if self.blind:
            return
        for frame in self.parser.feed(data):
            for event in frame.events:
                self.assembler.receive(event)
            self._show(frame)
        self.blind = len(self.parser.pending) > self.held_bytes_max

    def _take(self, frame: Frame, out: list[bytes]) -> None:
        assembler = self.assembler
        for event in frame.events:
            assembler.receive(event)
        if assembler.fault is not None:
            self.verdict = assembler.judge()
            self._drop()
            told = any(isinstance(event, ProviderFailed) for event in frame.events)
            out.append(frame.raw if told else self.retraction(assembler.fault))
            self.over = True
        elif self._held or calls_of(frame.events):
            self._held.append(frame)
            self._held_bytes += len(frame.raw)
            if assembler.ended:
                self._settle(out)
        else:
            out.append(frame.raw)
            self._show(frame)

    def _show(self, frame: Frame) -> None:
        if frame.text and self.preview is not None:
            self.preview.add(frame.text)

    def _settle(self, out: list[bytes]) -> None:
        """The turn has ended with frames held: release, let the finish pass alone, or retract."""
        self.verdict = verdict = self.assembler.judge()
        if verdict.turn is Turn.COMMITTED:
            for frame in self._held:
                out.append(frame.raw)
                self._show(frame)
            self.released_calls = len(verdict.calls)
        elif verdict.turn is Turn.INCOMPLETE and (end := self._end_without_calls()):
            for frame in end:
                out.append(frame.raw)
                self._show(frame)
            self.withheld_bytes += self._held_bytes - sum(len(frame.raw) for frame in end)
        else:
            self._retract(verdict.reason or Reason.INTERNAL, out)
        self._held, self._held_bytes = [], 0

    def _end_without_calls(self) -> list[Frame]:
        """The held frames from the provider's finish on; none where a call is in one of them (another choice's, say)."""
        for index, frame in enumerate(self._held):
            if any(isinstance(event, ChoiceFinished) for event in frame.events):
                end = self._held[index:]
                return [] if any(calls_of(frame.events) for frame in end) else end
        return []

    def _retract(self, reason: Reason, out: list[bytes]) -> None:
        if self.verdict is None:
            self.verdict = TurnVerdict(Turn.RETRACTED, reason)
        self._drop()
        out.append(self.retraction(reason))
        self.over = True

    def _drop(self) -> None:
        self.close()
        self.withheld_bytes += self._held_bytes
        self._held, self._held_bytes = [], 0


def _only_text(frames: list[Frame]) -> bool:
    """True for a single frame that says nothing but more text."""
    return len(frames) == 1 and len(frames[0].events) == 1 and type(frames[0].events[0]) is TextDelta
