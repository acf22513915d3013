"""The gates of the rollout: what is missing before a scope may go one stage up, and when it has to go down by itself.

Both are pure. Evidence against a stage is what only Turngate can have got wrong: a request that it would have refused
and the provider answered, one that it passed and the provider refused, what a witness saw, a fault of its own. How
much is refused is never held against it: a bad release of the app must not switch the protection off.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from turngate.proxy.rollout import RequestClass, Rung, Stage, enforced, matching
from turngate.telemetry.events import AnyEvent, ExchangeEnded, WitnessSpoke
from turngate.validators.rules import Verdict

OPERATIONS_MAX: Final = 3
"""Operations named in a sentence: enough to look at with `turngate explain`."""

REFUSABLE: Final = frozenset({Verdict.ILLEGAL.value, Verdict.WAITING.value})


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """What a promotion asks for. Counts but for the two shares, which are of 1."""

    samples_min: int = 500
    """Requests that were judged and answered at the present stage, of the class that the next step is about. If none
    of 500 is wrong, fewer than 0.6 % are, at 95 % confidence (the rule of three)."""
    false_refusals_max: int = 0
    misses_max: int = 0
    witnesses_max: int = 0
    failures_max: int = 0
    unclear_share_max: float = 0.5
    """Of the refusals that were not made, so many may have had an answer that says nothing about the sequence."""
    unsettled_share_max: float = 0.01
    """Of the samples, so many dispatches may be UNKNOWN."""


class RollbackLimits(msgspec.Struct, frozen=True, kw_only=True):
    """At how many within `window_s` seconds a scope is rolled back by itself; 0: never for this."""

    window_s: float = 600.0
    false_refusals: int = 3
    misses: int = 5
    """Above false refusals: a miss harms nobody who would not have been harmed without Turngate."""
    witnesses: int = 1
    failures: int = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """So many times the same thing went wrong; `operations`: the latest of them, for `turngate explain`."""

    what: str
    count: int
    operations: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(self.operations[:OPERATIONS_MAX])
        return f"{self.count:,} {self.what}" + (f", {shown}" if shown else "")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen in a scope at its present stage. `unclear`: would-be refusals whose answer tells nothing.

    `unsettled`: dispatches that are UNKNOWN now.
    """

    samples: int = 0
    true_refusals: int = 0
    unclear: int = 0
    unsettled: int = 0
    false_refusals: tuple[Fault, ...] = ()
    misses: tuple[Fault, ...] = ()
    witnesses: tuple[Fault, ...] = ()
    failures: tuple[Fault, ...] = ()

    def summary(self) -> str:
        """One sentence: kept with the change that it decided."""
        return (
            f"{self.samples:,} samples, {self.true_refusals:,} true and {count_of(self.false_refusals):,} false refusals, "
            f"{count_of(self.misses):,} misses, {count_of(self.witnesses):,} findings of witnesses, "
            f"{count_of(self.failures):,} faults of ours"
        )


def missing(evidence: Evidence, wanted: Thresholds) -> tuple[str, ...]:
    """What stands between a scope and its next stage, each in words; nothing where it may be promoted."""
    found: list[str] = []
    if evidence.samples < wanted.samples_min:
        found.append(f"{evidence.samples:,} of {wanted.samples_min:,} samples")
    for faults, allowed in (
        (evidence.false_refusals, wanted.false_refusals_max),
        (evidence.misses, wanted.misses_max),
        (evidence.witnesses, wanted.witnesses_max),
        (evidence.failures, wanted.failures_max),
    ):
        if count_of(faults) > allowed:
            found += map(str, faults)
    refusals = evidence.true_refusals + count_of(evidence.false_refusals) + evidence.unclear
    if evidence.unclear > refusals * wanted.unclear_share_max:
        found.append(
            f"{evidence.unclear:,} of {refusals:,} refusals unclear: the provider's answer does not tell"
        )
    if evidence.unsettled > evidence.samples * wanted.unsettled_share_max:
        found.append(f"{evidence.unsettled:,} dispatches still UNKNOWN")
    return tuple(found)


def newly_enforced(present: Stage, to: Stage) -> frozenset[RequestClass]:
    """The classes of request whose evidence a step between two stages asks for.

    Those that it enforces anew; where there are none (more of the same stage, or the schema as well), the class that
    the higher stage is about.
    """
    anew = frozenset(kind for kind in RequestClass if enforced(to, kind) and not enforced(present, kind))
    if anew or to.rank <= Stage.OBSERVE.rank:
        return anew or frozenset(RequestClass)
    return frozenset({RequestClass.TEXT if to is Stage.ENFORCE_TEXT else RequestClass.TOOLS})


def count_of(faults: Iterable[Fault]) -> int:
    """How often anything of it went wrong."""
    return sum(fault.count for fault in faults)


# -- automatic rollback ---------------------------------------------------------------------------------------------

SEEN_MAX: Final = 1_000
"""Faults kept: far more than any limit asks for."""
PLACES_MAX: Final = 1_000
"""Operations of which model and class are kept, for witnesses that speak in the same batch or soon after."""

Kind = Literal["false refusal", "miss", "finding", "fault"]
_PLURALS: Final[dict[Kind, str]] = {
    "false refusal": "false refusals",
    "miss": "misses",
    "finding": "findings",
    "fault": "faults",
}


@dataclass(frozen=True, slots=True)
class _Seen:
    """One thing that went wrong. `request_class` is "" where any stage that enforces answers for it."""

    at_s: float
    kind: Kind
    what: str
    operation: str
    upstream: str
    model: str
    request_class: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """A scope has to go down, because."""

    rung: Rung
    because: str


@dataclass(slots=True)
class Guard:
    """Watches what enforcing scopes get wrong. It is fed every event once, and says who has to go down.

    Times are the events' own. What it has seen dies with it: after a restart the window begins anew.
    """

    limits: RollbackLimits = field(default_factory=RollbackLimits)
    _seen: deque[_Seen] = field(default_factory=deque)
    _places: dict[str, tuple[str, str]] = field(default_factory=dict)
    """(model, request class) of the operations that ended last, by id: a witness does not name them."""

    def watch(self, events: Sequence[AnyEvent], rungs: Sequence[Rung]) -> list[Alarm]:
        """Take in events; the alarms under the rungs now in force, at most one a rung.

        Who acts on an alarm gives rungs with a later `since_s` the next time: what was seen before counts no more.
        """
        for event in events:
            if isinstance(event, ExchangeEnded):
                self._remember(event)
        for event in events:
            found = self._fault_of(event)
            if found is not None:
                self._seen.append(found)
        if not events or not self._seen:
            return []
        since_s = max(event.at_s for event in events) - self.limits.window_s
        while self._seen and (self._seen[0].at_s < since_s or len(self._seen) > SEEN_MAX):
            self._seen.popleft()
        return [Alarm(rung, because) for rung in rungs if (because := self._against(rung, rungs))]

    def _remember(self, event: ExchangeEnded) -> None:
        self._places[event.operation] = event.model, event.request_class
        if len(self._places) > PLACES_MAX:
            del self._places[next(iter(self._places))]

    def _fault_of(self, event: AnyEvent) -> _Seen | None:
        match event:
            case ExchangeEnded():
                kind, what = _verdict_on(event)
                if not kind:
                    return None
                place: tuple[str, str] = event.model, event.request_class
            case WitnessSpoke() if event.enforced or event.witness == "byte_mismatch":
                # Half a call that went through where Turngate only watches is the provider's doing.
                kind, what = "finding", f"of the witness {event.witness}"
                place = self._places.get(event.operation, ("", ""))
            case _:
                return None
        return _Seen(event.at_s, kind, what, event.operation, event.upstream, *place)

    def _against(self, rung: Rung, rungs: Sequence[Rung]) -> str:
        """Why this rung has to go down; "" where it may stay."""
        if rung.stage.rank <= Stage.OBSERVE.rank or not rung.percent:
            return ""
        seen = [each for each in self._seen if each.at_s >= rung.since_s and _concerns(each, rung, rungs)]
        for kind, limit in (
            ("finding", self.limits.witnesses),
            ("false refusal", self.limits.false_refusals),
            ("miss", self.limits.misses),
            ("fault", self.limits.failures),
        ):
            of_kind = [each for each in seen if each.kind == kind]
            if limit and len(of_kind) >= limit:
                return _told(of_kind, self.limits.window_s)
        return ""


def _verdict_on(event: ExchangeEnded) -> tuple[Kind | Literal[""], str]:
    """What an exchange tells against us, if anything."""
    if event.error_type.startswith("turngate_"):
        return "fault", f"of ours ({event.error_type})"
    if event.verdict in REFUSABLE and event.outcome != "refused" and event.provider == "accepted":
        return "false refusal", f"of {event.reasons[0] if event.reasons else 'no named rule'}"
    if event.verdict == Verdict.LEGAL and event.provider == "refused_sequence":
        return "miss", f"of {event.provider_reason or 'an unknown rule'}"
    return "", ""


def _concerns(seen: _Seen, rung: Rung, rungs: Sequence[Rung]) -> bool:
    """Whether a rung answers for it.

    A rule that is wrong for an upstream and a model is wrong wherever they are enforced: a false refusal can only be
    seen among those that are not, as in the rest of a percentage.
    """
    if seen.request_class in set(RequestClass) and not enforced(rung.stage, RequestClass(seen.request_class)):
        return False
    return rung in matching(rungs, seen.upstream, seen.model)


def _told(seen: Sequence[_Seen], window_s: float) -> str:
    kind = seen[0].kind
    what = ", ".join(dict.fromkeys(each.what for each in reversed(seen)))
    fault = Fault(
        f"{kind if len(seen) == 1 else _PLURALS[kind]} {what}",
        len(seen),
        tuple(each.operation for each in reversed(seen) if each.operation),
    )
    return f"within {window_s / 60:g} minutes: {fault}"
