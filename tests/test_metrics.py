"""The projection of events onto metrics: each event counts where the table says, and labels stay bounded."""

import re
from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.telemetry.events import (
    AnyEvent,
    CallDecided,
    EventsDropped,
    ExchangeEnded,
    FailureCounted,
    FindingMade,
    ObserverStarted,
    PreviewRetracted,
    ProxyStarted,
    ProxyStopped,
    RequestUnjudged,
    StateChanged,
)
from turngate.telemetry.metrics import LABEL_LENGTH_MAX, METRICS, PREFIX, Registry

Samples = dict[str, float]


def samples_of(registry: Registry) -> Samples:
    """All samples that are not 0, by the line's text before the value, without our prefix."""
    lines = (line.rpartition(" ") for line in registry.render().decode().splitlines() if line[0] != "#")
    return {name.removeprefix(PREFIX): float(value) for name, _, value in lines if float(value)}


def counted(events: Sequence[AnyEvent], now: float = 100.0) -> Samples:
    registry = Registry("1.2.3", clock=lambda: now)
    registry.observe_all(events)
    samples = samples_of(registry)
    assert samples.pop('build_info{version="1.2.3"}') == 1
    return samples


def exchange(
    *, stream: bool = True, model: str = "m", error_type: str = "", stage: str = "observe"
) -> ExchangeEnded:
    return ExchangeEnded(
        at_s=1.0,
        operation="op-1",
        upstream="openai",
        api="openai_chat",
        model=model,
        stream=stream,
        stage=stage,
        verdict="legal",
        outcome="passed",
        status=200,
        error_type=error_type,
        messages=2,
        request_bytes=10,
        response_bytes=20,
        judge_s=0.002,
        claim_s=2.0,
        first_byte_s=0.1,
        total_s=0.2,
    )


def finding(reason: str, action: Literal["rejected", "would_reject", "reported"]) -> FindingMade:
    return FindingMade(
        at_s=1.0,
        operation="op-1",
        upstream="openai",
        api="openai_chat",
        reason=reason,
        level="hard",
        at="/messages/1",
        action=action,
    )


def call(decision: Literal["released", "withheld"], reason: str, *, held: bool) -> CallDecided:
    return CallDecided(
        at_s=1.0,
        operation="op-1",
        upstream="openai",
        api="openai_chat",
        reason=reason,
        decision=decision,
        held=held,
        hold_s=700.0,
        hold_bytes=4097,
    )


def move(before: str, after: str, at_s: float, operation: str = "op-1") -> StateChanged:
    return StateChanged(
        at_s=at_s, operation=operation, upstream="openai", before=before, after=after, how="provider"
    )


def histogram(name: str, labels: str, buckets: Sequence[float], value: float) -> Samples:
    """The samples of one observation."""
    outside = f"{{{labels}}}" if labels else ""

    def bucket(bound: object) -> str:
        return name + "_bucket{" + ",".join(sorted(filter(None, [labels, f'le="{bound}"']))) + "}"

    bounds = [bucket(bound) for bound in buckets if bound >= value]
    above = [bucket("+Inf"), f"{name}_count{outside}"]
    return {**dict.fromkeys([*bounds, *above], 1.0), f"{name}_sum{outside}": value}


LATENCY = METRICS["added_latency_seconds"].buckets
LATENCIES = {
    key: sample
    for phase, value in (("judge", 0.002), ("claim", 2.0))
    for key, sample in histogram("added_latency_seconds", f'phase="{phase}"', LATENCY, value).items()
}
HELD = {
    **histogram("tool_hold_seconds", "", METRICS["tool_hold_seconds"].buckets, 700.0),
    **histogram("tool_hold_bytes", "", METRICS["tool_hold_bytes"].buckets, 4097.0),
}

CASES: dict[str, tuple[list[AnyEvent], Samples]] = {
    "the start and end of a proxy are rows only": (
        [
            ProxyStarted(at_s=1.0, instance="i", version="1", pid=1),
            ProxyStopped(at_s=2.0, instance="i", open_exchanges=0),
        ],
        {},
    ),
    "the restart that an observer was told of is the total": (
        [ObserverStarted(at_s=1.0, instance="i", restart=3)],
        {"observer_restarts_total": 3},
    ),
    "a streamed exchange": (
        [exchange()],
        {
            'requests_total{api="openai_chat",model="m",outcome="passed",stage="observe",stream="true",'
            'upstream="openai"}': 1,
            'streams_ended_total{end="passed"}': 1,
            **LATENCIES,
        },
    ),
    "a failed exchange that is no stream": (
        [exchange(stream=False, error_type="provider_overloaded")],
        {
            'requests_total{api="openai_chat",model="m",outcome="passed",stage="observe",stream="false",'
            'upstream="openai"}': 1,
            'request_errors_total{error_type="provider_overloaded",upstream="openai"}': 1,
            **LATENCIES,
        },
    ),
    "a stage that the table does not know is other": (
        [exchange(stream=False, stage="enforce-everything")],
        {
            'requests_total{api="openai_chat",model="m",outcome="passed",stage="other",stream="false",'
            'upstream="openai"}': 1,
            **LATENCIES,
        },
    ),
    "a finding that refused": (
        [finding("result.orphan", "rejected")],
        {
            'sequence_rejects_total{action="rejected",api="openai_chat",reason="result.orphan",'
            'upstream="openai"}': 1,
            'tool_result_faults_total{kind="orphan"}': 1,
        },
    ),
    "a finding that would have refused": (
        [finding("role.order", "would_reject")],
        {
            'sequence_rejects_total{action="would_reject",api="openai_chat",reason="role.order",'
            'upstream="openai"}': 1
        },
    ),
    "a reported finding rejects nothing": (
        [finding("result.mismatch", "reported"), finding("block.empty", "reported")],
        {'tool_result_faults_total{kind="mismatch"}': 1},
    ),
    "an unjudged request": (
        [RequestUnjudged(at_s=1.0, operation="op-1", surface="batches", why="surface.uncovered")],
        {'unjudged_total{surface="batches",why="surface.uncovered"}': 1},
    ),
    "a released call": (
        [call("released", "", held=True)],
        {'tool_calls_total{decision="released",reason=""}': 1, **HELD},
    ),
    "a call that was only watched blocks nothing": (
        [call("withheld", "stream.truncated", held=False)],
        {'tool_calls_total{decision="withheld",reason="stream.truncated"}': 1},
    ),
    "a blocked call that was cut": (
        [call("withheld", "stream.truncated", held=True)],
        {
            'tool_calls_total{decision="withheld",reason="stream.truncated"}': 1,
            "partial_tool_calls_blocked_total": 1,
            **HELD,
        },
    ),
    "a blocked call that was whole": (
        [call("withheld", "call.duplicate_id", held=True)],
        {'tool_calls_total{decision="withheld",reason="call.duplicate_id"}': 1, **HELD},
    ),
    "a retracted preview": (
        [
            PreviewRetracted(
                at_s=1.0,
                operation="op-1",
                upstream="openai",
                api="openai_chat",
                cause="stream.stalled",
                enforced=True,
                preview_bytes=5,
            )
        ],
        {'preview_retractions_total{cause="stream.stalled"}': 1},
    ),
    "a failure of ours": (
        [FailureCounted(at_s=1.0, where="decode", error="ValueError")],
        {'observer_failures_total{where="decode"}': 1},
    ),
    "dropped events": (
        [
            EventsDropped(at_s=1.0, event_class="other", count=5),
            EventsDropped(at_s=1.0, event_class="verdict", count=2),
        ],
        {'spool_dropped_total{class="other"}': 5, 'spool_dropped_total{class="verdict"}': 2},
    ),
    "a first state comes from none": (
        [move("", "PREPARED", 1.0)],
        {'dispatch_transitions_total{from="none",to="PREPARED"}': 1},
    ),
    "the oldest unknown dispatch is shown": (
        [move("SENT", "UNKNOWN", 60.0, "op-1"), move("SENT", "UNKNOWN", 90.0, "op-2")],
        {
            'dispatch_transitions_total{from="SENT",to="UNKNOWN"}': 2,
            'unknown_dispatch_age_seconds{upstream="openai"}': 40,
        },
    ),
    "a resolved dispatch ages no more": (
        [move("SENT", "UNKNOWN", 60.0), move("UNKNOWN", "ABANDONED", 67.0)],
        {
            'dispatch_transitions_total{from="SENT",to="UNKNOWN"}': 1,
            'dispatch_transitions_total{from="UNKNOWN",to="ABANDONED"}': 1,
            **histogram(
                "unknown_dispatch_resolved_seconds",
                'how="provider"',
                METRICS["unknown_dispatch_resolved_seconds"].buckets,
                7.0,
            ),
        },
    ),
    "a clock that was set back gives no negative age": (
        [move("SENT", "UNKNOWN", 500.0)],
        {'dispatch_transitions_total{from="SENT",to="UNKNOWN"}': 1},
    ),
}


@pytest.mark.parametrize(("events", "samples"), CASES.values(), ids=CASES)
def test_events_are_counted_where_the_table_says(events: list[AnyEvent], samples: Samples) -> None:
    assert counted(events) == samples


@given(values=st.lists(st.floats(0, 1000), max_size=30))
def test_a_histogram_counts_each_observation_at_or_below_its_bound(values: list[float]) -> None:
    registry = Registry("1")
    registry.observe_all([call("released", "", held=True) for _ in values])
    for value in values:
        registry.observe(
            CallDecided(
                at_s=1.0,
                operation="o",
                upstream="u",
                api="a",
                decision="released",
                reason="",
                held=True,
                hold_s=value,
                hold_bytes=0,
            )
        )
    samples = samples_of(registry)
    for bound in METRICS["tool_hold_seconds"].buckets:
        below = sum(value <= bound for value in values)
        assert samples.get(f'tool_hold_seconds_bucket{{le="{bound}"}}', 0.0) == below
    assert samples.get("tool_hold_seconds_count", 0.0) == 2 * len(values)


def test_models_beyond_the_allow_list_are_other_and_none_is_lost() -> None:
    registry = Registry("1")
    registry.observe_all([exchange(model=f"m{n}") for n in range(60)] * 2)
    models = {
        match[1]: value
        for name, value in samples_of(registry).items()
        if (match := re.match(r'requests_total.*model="(\w+)"', name))
    }
    assert models == {**{f"m{n}": 2.0 for n in range(50)}, "other": 20.0}


@pytest.mark.parametrize("value", ["x" * (LABEL_LENGTH_MAX + 1), "line\nbreak"])
def test_a_label_value_that_people_cannot_read_is_other(value: str) -> None:
    registry = Registry("1")
    registry.observe(FailureCounted(at_s=1.0, where=value, error="E"))
    assert registry.value("observer_failures_total", "other") == 1


def test_unknown_dispatches_of_an_earlier_observer_keep_their_age() -> None:
    registry = Registry("1", clock=lambda: 1000.0)
    registry.restore_unknown([("op-1", "openai", 400.0)])
    assert samples_of(registry)['unknown_dispatch_age_seconds{upstream="openai"}'] == 600
    registry.observe(move("UNKNOWN", "COMMITTED", 1000.0))
    assert 'unknown_dispatch_age_seconds{upstream="openai"}' not in samples_of(registry)


def test_every_metric_without_labels_is_there_before_the_first_event() -> None:
    text = Registry("1").render().decode()
    for name, metric in METRICS.items():
        assert f"# TYPE {PREFIX}{name} {metric.kind}" in text
        if not metric.labels:
            assert re.search(rf"^{PREFIX}{name}(_sum)? 0\.0$", text, re.MULTILINE)


def test_the_table_keeps_prometheus_conventions() -> None:
    for name, metric in METRICS.items():
        assert (metric.kind == "counter") == name.endswith("_total")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith(".")


def test_a_metric_that_is_not_in_the_table_cannot_be_counted() -> None:
    with pytest.raises(KeyError):
        Registry("1").add("surprises_total", 1)
