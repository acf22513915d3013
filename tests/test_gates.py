"""The gates: what a promotion lacks, in words, and what sends a scope down by itself."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.proxy.gates import (
    SEEN_MAX,
    Evidence,
    Fault,
    Guard,
    RollbackLimits,
    Thresholds,
    missing,
    newly_enforced,
)
from turngate.proxy.rollout import Order, RequestClass, Rung, Stage
from turngate.telemetry.events import AnyEvent, ExchangeEnded, FindingMade, Witness, WitnessSpoke

TEXT, TOOLS = RequestClass.TEXT, RequestClass.TOOLS

# -- promotion ------------------------------------------------------------------------------------------------------

DETACHED = Fault("false refusal of reasoning.detached", 1, ("op-1",))
LACKING: dict[str, tuple[Evidence, list[str]]] = {
    "nothing": (Evidence(samples=500), []),
    "samples": (Evidence(samples=37), ["37 of 500 samples"]),
    "a sound rule": (
        Evidence(samples=37, true_refusals=5, false_refusals=(DETACHED,)),
        ["37 of 500 samples", "1 false refusal of reasoning.detached, op-1"],
    ),
    "all kinds of faults, each named": (
        Evidence(
            samples=1_000,
            misses=(Fault("misses of call.unanswered", 1_200, ("op-1", "op-2", "op-3", "op-4")),),
            witnesses=(Fault("finding of the witness byte_mismatch", 1, ("op-5",)),),
            failures=(Fault("failures in judge (KeyError)", 2),),
        ),
        [
            "1,200 misses of call.unanswered, op-1, op-2, op-3",
            "1 finding of the witness byte_mismatch, op-5",
            "2 failures in judge (KeyError)",
        ],
    ),
    "nothing, although much was refused rightly": (Evidence(samples=500, true_refusals=400), []),
    "clear answers": (
        Evidence(samples=500, true_refusals=2, unclear=3),
        ["3 of 5 refusals unclear: the provider's answer does not tell"],
    ),
    "nothing, as half of them is clear": (Evidence(samples=500, true_refusals=3, unclear=3), []),
    "settled dispatches": (Evidence(samples=500, unsettled=6), ["6 dispatches still UNKNOWN"]),
    "nothing, as one in a hundred may be unsettled": (Evidence(samples=500, unsettled=5), []),
}


@pytest.mark.parametrize(("evidence", "lacking"), LACKING.values(), ids=LACKING)
def test_a_promotion_lacks(evidence: Evidence, lacking: list[str]) -> None:
    assert list(missing(evidence, Thresholds())) == lacking


def test_the_thresholds_can_be_set() -> None:
    lenient = Thresholds(samples_min=10, false_refusals_max=1)
    assert missing(Evidence(samples=10, true_refusals=1, false_refusals=(DETACHED,)), lenient) == ()


@given(st.integers(0, 2_000), st.integers(0, 50), st.integers(0, 50), st.integers(0, 5))
def test_more_faults_never_help_and_more_samples_never_hurt(
    samples: int, true: int, unclear: int, false: int
) -> None:
    def lacking(samples: int, false: int) -> int:
        faults = (Fault("false refusal", false),) if false else ()
        evidence = Evidence(samples=samples, true_refusals=true, unclear=unclear, false_refusals=faults)
        return len([each for each in missing(evidence, Thresholds()) if "unclear" not in each])

    assert lacking(samples, false + 1) >= lacking(samples, false)
    assert lacking(samples + 1, false) <= lacking(samples, false)


def test_the_summary_tells_every_count() -> None:
    evidence = Evidence(samples=1_512, true_refusals=3, false_refusals=(DETACHED, DETACHED))
    assert evidence.summary() == (
        "1,512 samples, 3 true and 2 false refusals, 0 misses, 0 findings of witnesses, 0 faults of ours"
    )


CLASSES = {
    (Stage.OFF, Stage.OBSERVE): {TEXT, TOOLS},
    (Stage.OBSERVE, Stage.ENFORCE_TEXT): {TEXT},
    (Stage.ENFORCE_TEXT, Stage.ENFORCE_TEXT): {TEXT},
    (Stage.ENFORCE_TEXT, Stage.ENFORCE_TOOLS): {TOOLS},
    (Stage.ENFORCE_TOOLS, Stage.ENFORCE_TOOLS): {TOOLS},
    (Stage.ENFORCE_TOOLS, Stage.ENFORCE_SCHEMA): {TOOLS},
}


@pytest.mark.parametrize(("step", "classes"), CLASSES.items(), ids=str)
def test_a_stage_is_promoted_on_its_own_evidence(
    step: tuple[Stage, Stage], classes: set[RequestClass]
) -> None:
    assert newly_enforced(*step) == classes


# -- automatic rollback ---------------------------------------------------------------------------------------------

ENFORCING = (Rung("openai", "*", Stage.ENFORCE_TOOLS), Rung("*", "*", Stage.OBSERVE))


def ended(at_s: float, operation: str = "op", **said: Any) -> ExchangeEnded:
    fields: dict[str, Any] = {
        "upstream": "openai",
        "api": "openai.chat",
        "model": "m",
        "stream": False,
        "stage": "enforce-tools",
        "verdict": "legal",
        "outcome": "passed",
        "status": 200,
        "error_type": "",
        "messages": 1,
        "request_bytes": 1,
        "response_bytes": 1,
        "judge_s": 0.0,
        "claim_s": 0.0,
        "first_byte_s": 0.0,
        "total_s": 0.0,
        "provider": "accepted",
        "request_class": "tools",
    }
    return ExchangeEnded(at_s=at_s, operation=operation, **{**fields, **said})


FALSE: dict[str, Any] = {"verdict": "illegal", "reasons": ("reasoning.detached",), "stage": "observe"}
MISS: dict[str, Any] = {
    "outcome": "provider_error",
    "provider": "refused_sequence",
    "provider_reason": "call.unanswered",
}
REFUSED: dict[str, Any] = {
    "verdict": "illegal",
    "reasons": ("result.orphan",),
    "outcome": "refused",
    "provider": "",
}
TRUE: dict[str, Any] = {
    "verdict": "illegal",
    "reasons": ("result.orphan",),
    "outcome": "provider_error",
    "provider": "refused_sequence",
}


def spoke(operation: str, witness: Witness, *, enforced: bool, at_s: float = 1.0) -> WitnessSpoke:
    return WitnessSpoke(
        at_s=at_s,
        operation=operation,
        upstream="openai",
        api="openai.chat",
        witness=witness,
        enforced=enforced,
        detail="",
    )


def times(count: int, **said: Any) -> list[AnyEvent]:
    return [ended(float(n), f"op-{n}", **said) for n in range(count)]


ALARMS: dict[str, tuple[list[AnyEvent], str]] = {
    "false refusals": (
        times(3, **FALSE),
        "within 10 minutes: 3 false refusals of reasoning.detached, op-2, op-1, op-0",
    ),
    "misses": (times(5, **MISS), "within 10 minutes: 5 misses of call.unanswered, op-4, op-3, op-2"),
    "a miss of a rule we do not have": (
        times(5, **MISS | {"provider_reason": ""}),
        "within 10 minutes: 5 misses of an unknown rule, op-4, op-3, op-2",
    ),
    "faults of ours": (
        times(5, error_type="turngate_internal"),
        "within 10 minutes: 5 faults of ours (turngate_internal), op-4, op-3, op-2",
    ),
    "half a call let through where it is enforced": (
        [spoke("op-1", "partial_tool_dispatch", enforced=True)],
        "within 10 minutes: 1 finding of the witness partial_tool_dispatch, op-1",
    ),
    "changed bytes anywhere": (
        [spoke("op-1", "byte_mismatch", enforced=False), ended(2.0, "op-1")],
        "within 10 minutes: 1 finding of the witness byte_mismatch, op-1",
    ),
    "several reasons together": (
        [*times(2, **FALSE), ended(3.0, "op-9", **FALSE | {"reasons": ("role.order",)})],
        "within 10 minutes: 3 false refusals of role.order, of reasoning.detached, op-9, op-1, op-0",
    ),
}


@pytest.mark.parametrize(("events", "because"), ALARMS.values(), ids=ALARMS)
def test_a_scope_goes_down_for(events: list[AnyEvent], because: str) -> None:
    (alarm,) = Guard().watch(events, ENFORCING)
    assert (alarm.rung, alarm.because) == (ENFORCING[0], because)


QUIET: dict[str, list[AnyEvent]] = {
    "nothing at all": [],
    "sound traffic": times(1_000),
    "a burst of requests that we refused": times(1_000, **REFUSED),
    "a burst that the provider refused as we would have": times(1_000, **TRUE),
    "requests that fail for other reasons": times(1_000, **TRUE | {"provider": "refused_other"}),
    "a provider that is down": times(
        1_000, outcome="unsent", provider="unknown", error_type="provider_unreachable"
    ),
    "fewer false refusals than it takes": times(2, **FALSE),
    "fewer misses than it takes": times(4, **MISS),
    "another upstream": times(9, **FALSE, upstream="azure"),
    "half a call that went through where Turngate only watches": [
        spoke(f"op-{n}", "partial_tool_dispatch", enforced=False) for n in range(9)
    ],
    "findings that are soft": [
        FindingMade(
            at_s=1.0,
            operation="op",
            upstream="openai",
            api="a",
            reason="r",
            level="soft",
            at="",
            action="reported",
        )
    ]
    * 9,
}


@pytest.mark.parametrize("events", QUIET.values(), ids=QUIET)
def test_a_scope_stays_for(events: list[AnyEvent]) -> None:
    assert Guard().watch(events, ENFORCING) == []


@pytest.mark.parametrize("cut", range(6))
def test_it_makes_no_difference_how_events_are_batched(cut: int) -> None:
    events = [*times(2, **FALSE), ended(10.0), ended(11.0, "op-last", **FALSE), ended(12.0)]
    guard = Guard()
    alarms = guard.watch(events[:cut], ENFORCING) + guard.watch(events[cut:], ENFORCING)
    assert [alarm.rung.name for alarm in alarms][:1] == ["openai"]


def test_what_lies_further_back_than_the_window_counts_no_more() -> None:
    guard = Guard()
    assert guard.watch(times(2, **FALSE), ENFORCING) == []
    assert guard.watch([ended(602.0, **FALSE)], ENFORCING) == []
    assert guard.watch([ended(603.0, **FALSE), ended(604.0, **FALSE)], ENFORCING) != []


def since(at_s: float, stage: Stage) -> tuple[Rung, ...]:
    order = Order(scope="openai", stage=stage, who="w", why="", set_s=at_s)
    return (Rung("openai", "*", stage, order=order), ENFORCING[1])


def test_what_was_seen_before_a_change_is_not_held_against_what_came_after() -> None:
    guard = Guard()
    assert guard.watch(times(3, **FALSE), since(0.0, Stage.ENFORCE_TOOLS)) != []
    later = since(2.5, Stage.ENFORCE_TOOLS)
    assert guard.watch([ended(3.0, **FALSE), ended(4.0, **FALSE)], later) == []
    assert guard.watch([ended(5.0, **FALSE)], later) != []


def test_a_scope_that_enforces_nothing_has_nothing_to_roll_back() -> None:
    for stage in (Stage.OFF, Stage.OBSERVE):
        assert Guard().watch(times(9, **FALSE), (Rung("*", "*", stage),)) == []


def test_a_stage_answers_only_for_the_requests_it_enforces() -> None:
    text = (Rung("*", "*", Stage.ENFORCE_TEXT),)
    assert Guard().watch(times(9, **FALSE), text) == []
    assert Guard().watch(times(9, **FALSE | {"request_class": "text"}), text) != []


def test_false_refusals_in_the_rest_of_a_percentage_are_held_against_the_part_that_enforces() -> None:
    part = Rung("openai", "*", Stage.ENFORCE_TOOLS, percent=10, rest=Stage.OBSERVE)
    (alarm,) = Guard().watch(times(3, **FALSE), (part, ENFORCING[1]))
    assert alarm.rung is part


def test_every_scope_that_can_be_meant_goes_down_and_none_behind_one_that_takes_all() -> None:
    rungs = (
        Rung("openai", "*", Stage.ENFORCE_TOOLS, header=(("x-team", "blue"),)),
        Rung("openai", "o3", Stage.ENFORCE_TOOLS),
        Rung("openai", "*", Stage.ENFORCE_SCHEMA),
        Rung("*", "*", Stage.ENFORCE_TOOLS),
    )
    alarms = Guard().watch(times(3, **FALSE), rungs)
    assert [alarm.rung.name for alarm in alarms] == ["openai,x-team=blue", "openai"]


LIMITS = {
    "false_refusals": times(1_000, **FALSE),
    "misses": times(1_000, **MISS),
    "failures": times(1_000, error_type="turngate_internal"),
    "witnesses": [spoke("op", "byte_mismatch", enforced=True)],
}


@pytest.mark.parametrize(("name", "events"), LIMITS.items(), ids=LIMITS)
def test_a_limit_of_0_is_none(name: str, events: Sequence[AnyEvent]) -> None:
    assert Guard(msgspec.structs.replace(RollbackLimits(), **{name: 0})).watch(events, ENFORCING) == []


def test_what_a_guard_keeps_is_bounded() -> None:
    guard = Guard(RollbackLimits(misses=0))
    for n in range(5):
        guard.watch([ended(1.0, f"op-{n}-{i}", **MISS) for i in range(SEEN_MAX)], ENFORCING)
    assert len(guard._seen) <= SEEN_MAX
    assert len(guard._places) <= SEEN_MAX


KINDS = st.sampled_from([{}, REFUSED, TRUE, {"outcome": "client_gone", "provider": "unknown"}])


@given(st.lists(st.tuples(st.floats(0, 600), KINDS), max_size=60))
def test_no_mix_of_rightly_refused_and_sound_requests_ever_sends_a_scope_down(
    mixed: list[tuple[float, dict[str, Any]]],
) -> None:
    assert Guard().watch([ended(at_s, **said) for at_s, said in mixed], ENFORCING) == []
