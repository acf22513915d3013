"""What is known of one exchange, and how it is told: the only place where the data path speaks to telemetry."""

import re
from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec

from turngate.adapters.answers import Answered
from turngate.proxy.rollout import Action, Stage
from turngate.telemetry import events
from turngate.telemetry.events import AnyEvent, Outcome, ProviderClass, Witness, shown_model
from turngate.validators.graph import MessageSequence
from turngate.validators.previews import Hit
from turngate.validators.rules import Finding, Level, Reason, Verdict
from turngate.validators.stream import Assembler, Turn, TurnVerdict

ACTION_WORDS: Final[dict[Action, Literal["rejected", "would_reject", "reported"]]] = {
    Action.REFUSE: "rejected",
    Action.MARK: "would_reject",
    Action.PASS: "reported",
}


class Record(msgspec.Struct):
    """Facts of one exchange as they become known; `ended` turns them into its last event. Durations in seconds."""

    emit: Callable[[AnyEvent], None]
    monotonic: Callable[[], float]
    wall: Callable[[], float]
    operation: str
    started_s: float
    upstream: str = ""
    api: str = ""
    outcome: Outcome = "passed"
    error_type: str = ""
    status: int = 0
    verdict: Verdict = Verdict.UNJUDGED
    stage: Stage = Stage.OFF
    enforced: bool = False
    request_bytes: int = 0
    judge_s: float = 0.0
    claim_s: float = 0.0
    first_byte_s: float = 0.0
    reasons: tuple[str, ...] = ()
    server: str = ""
    request_class: Literal["", "text", "tools"] = ""
    traceparent: str = ""
    hold_s: float = 0.0
    hold_bytes: int = 0
    client: str = ""
    retry_of: str = ""
    provider: ProviderClass = ""
    provider_reason: str = ""
    _held_since_s: float | None = None

    def findings(self, findings: tuple[Finding, ...], action: Action) -> None:
        self.reasons = tuple(
            dict.fromkeys(each.reason.value for each in findings if each.level is Level.HARD)
        )
        for finding in findings:
            hard = finding.level is Level.HARD
            self.emit(
                events.FindingMade(
                    at_s=self.wall(),
                    operation=self.operation,
                    upstream=self.upstream,
                    api=self.api,
                    reason=finding.reason,
                    level=finding.level,
                    at=finding.at,
                    action=ACTION_WORDS[action] if hard else "reported",
                )
            )

    def unjudged(self, why: Reason) -> None:
        self.emit(
            events.RequestUnjudged(
                at_s=self.wall(), operation=self.operation, surface=self.api or "unknown", why=why
            )
        )

    def failed(self, where: str, error: BaseException) -> None:
        """Something of ours broke and the exchange went on. The text names the error's kind, never a body."""
        self.emit(events.FailureCounted(at_s=self.wall(), where=where, error=type(error).__name__))

    def went_wrong(self, outcome: Outcome, error_type: str) -> None:
        """The first thing that went wrong is the outcome."""
        if self.outcome == "passed":
            self.outcome, self.error_type = outcome, error_type

    def holding(self, held_bytes: int) -> None:
        """The gate holds this much now, or nothing any more."""
        if held_bytes:
            self.hold_bytes = max(self.hold_bytes, held_bytes)
            if self._held_since_s is None:
                self._held_since_s = self.monotonic()
        elif self._held_since_s is not None:
            self.hold_s += self.monotonic() - self._held_since_s
            self._held_since_s = None

    def calls(self, verdict: TurnVerdict, count: int) -> None:
        """What became of the answer's tool calls: all of them leave, or none."""
        released = verdict.turn is Turn.COMMITTED
        for _ in range(count):
            self.emit(
                events.CallDecided(
                    at_s=self.wall(),
                    operation=self.operation,
                    upstream=self.upstream,
                    api=self.api,
                    decision="released" if released else "withheld",
                    reason="" if released else verdict.reason or "",
                    held=self.enforced,
                    hold_s=self.hold_s,
                    hold_bytes=self.hold_bytes,
                )
            )

    def retracted(self, verdict: TurnVerdict, preview_bytes: int) -> None:
        """The turn did not end well. `preview_bytes`: what the app had been given of it."""
        failed = verdict.reason is Reason.STREAM_ERROR_EVENT
        self.went_wrong("retracted", "provider_stream_error" if failed else "provider_stream_broken")
        self.emit(
            events.PreviewRetracted(
                at_s=self.wall(),
                operation=self.operation,
                upstream=self.upstream,
                api=self.api,
                cause=verdict.reason or Reason.INTERNAL,
                enforced=self.enforced,
                preview_bytes=preview_bytes,
            )
        )

    def answered(self, answered: Answered) -> None:
        """What the provider's answer says about the request; the latest word counts."""
        self.provider, self.provider_reason = answered.kind, answered.reason or ""

    def leaked(self, hit: Hit) -> None:
        """The request brings back what was retracted."""
        self.emit(
            events.PreviewLeaked(
                at_s=self.wall(),
                operation=self.operation,
                upstream=self.upstream,
                api=self.api,
                reason=hit.reason,
                cause=hit.cause,
                retracted_operation=hit.operation,
                at=hit.at,
                whole=hit.whole,
            )
        )

    def anomaly(self, reason: Reason) -> None:
        """Something irregular in the answer that did not end it."""
        self.emit(
            events.AnomalySeen(
                at_s=self.wall(),
                operation=self.operation,
                upstream=self.upstream,
                api=self.api,
                reason=reason,
            )
        )

    def witnessed(self, witness: Witness, detail: str) -> None:
        """A witness found something wrong with the answer."""
        self.emit(
            events.WitnessSpoke(
                at_s=self.wall(),
                operation=self.operation,
                upstream=self.upstream,
                api=self.api,
                witness=witness,
                enforced=self.enforced,
                detail=detail,
            )
        )

    def ended(
        self,
        sequence: MessageSequence | None,
        response_bytes: int,
        assembler: Assembler | None,
        finish: str,
    ) -> None:
        """The exchange is over. `assembler` has the answer, where one was read."""
        self.emit(
            events.ExchangeEnded(
                at_s=self.wall(),
                operation=self.operation,
                upstream=self.upstream,
                api=self.api,
                model=shown_model(sequence.model) if sequence else "",
                stream=sequence.stream if sequence else False,
                stage=self.stage,
                verdict=self.verdict,
                outcome=self.outcome,
                status=self.status,
                error_type=self.error_type,
                messages=sequence.messages if sequence else 0,
                request_bytes=self.request_bytes,
                response_bytes=response_bytes,
                judge_s=self.judge_s,
                claim_s=self.claim_s,
                first_byte_s=self.first_byte_s,
                total_s=self.monotonic() - self.started_s,
                server=self.server,
                reasons=self.reasons,
                client=self.client,
                retry_of=self.retry_of,
                provider=self.provider,
                provider_reason=self.provider_reason,
                input_tokens=assembler.input_tokens if assembler is not None else -1,
                output_tokens=assembler.output_tokens if assembler is not None else -1,
                answered_model=shown_model(assembler.model) if assembler is not None else "",
                finish=finish,
                hold_s=self.hold_s,
                request_class=self.request_class,
                traceparent=self.traceparent,
            )
        )


_TRACEPARENT: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The W3C trace context among a request's headers, "" where there is none that is well formed."""
    for name, value in headers:
        if len(name) == 11 and name.lower() == b"traceparent":
            return value.decode("ascii") if _TRACEPARENT.fullmatch(value) else ""
    return ""
