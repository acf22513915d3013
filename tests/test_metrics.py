"""The projection of events onto metrics: each event counts where the table says, and labels stay bounded."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from turngate.telemetry.events import (
    AnomalySeen,
    AnyEvent,
    CallDecided,
    EventsDropped,
    ExchangeEnded,
    FailureCounted,
    FindingMade,
    ObserverStarted,
    Outcome,
    PreviewLeaked,
    PreviewRetracted,
    ProviderClass,
    ProxyPulse,
    ProxyStarted,
    ProxyStopped,
    RequestUnjudged,
    StageOrdered,
    StateChanged,
    WitnessSpoke,
)
from turngate.telemetry.metrics import LABEL_LENGTH_MAX, METRICS, PREFIX, Registry
from turngate.validators.ledger import NEXT

Samples = dict[str, float]


def samples_of(registry: Registry) -> Samples:
    """All samples that are not 0, by the line's text before the value, without our prefix."""
    lines = (line.rpartition(" ") for line in registry.expose("")[0].decode().splitlines() if line[0] != "#")
    return {name.removeprefix(PREFIX): float(value) for name, _, value in lines if float(value)}


def parsed(openmetrics: bytes) -> Iterator[Metric]:
    families: Iterator[Metric] = text_string_to_metric_families(openmetrics.decode())  # type: ignore[no-untyped-call]
    return families


def counted(events: Sequence[AnyEvent], now: float = 100.0) -> Samples:
    registry = Registry("1.2.3", clock=lambda: now)
    registry.observe_all(events)
    samples = samples_of(registry)
    assert samples.pop('build_info{version="1.2.3"}') == 1
    return samples


def exchange(
    *,
    stream: bool = True,
    model: str = "m",
    error_type: str = "",
    stage: str = "observe",
    verdict: str = "legal",
    outcome: Outcome = "passed",
    reasons: tuple[str, ...] = (),
    provider: ProviderClass = "",
    judge_s: float = 0.002,
    claim_s: float = 2.0,
    first_byte_s: float = 0.1,
    input_tokens: int = -1,
    output_tokens: int = -1,
) -> ExchangeEnded:
    return ExchangeEnded(
        at_s=1.0,
        operation="op-1",
        upstream="openai",
        api="openai_chat",
        model=model,
        stream=stream,
        stage=stage,
        verdict=verdict,
        outcome=outcome,
        status=200,
        error_type=error_type,
        messages=2,
        request_bytes=10,
        response_bytes=20,
        judge_s=judge_s,
        claim_s=claim_s,
        first_byte_s=first_byte_s,
        total_s=0.2,
        reasons=reasons,
        provider=provider,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
    )


def unmeasured(
    *,
    stage: str = "observe",
    verdict: str = "legal",
    outcome: Outcome = "passed",
    reasons: tuple[str, ...] = (),
    provider: ProviderClass = "",
    input_tokens: int = -1,
    output_tokens: int = -1,
) -> ExchangeEnded:
    """An exchange that leaves nothing in the histograms."""
    return exchange(
        stream=False,
        judge_s=0.0,
        claim_s=0.0,
        first_byte_s=0.0,
        stage=stage,
        verdict=verdict,
        outcome=outcome,
        reasons=reasons,
        provider=provider,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
    )


def request(stage: str = "observe", outcome: str = "passed") -> Samples:
    """The sample of one of them among the requests."""
    labels = (
        f'api="openai_chat",model="m",outcome="{outcome}",stage="{stage}",stream="false",upstream="openai"'
    )
    return {f"requests_total{{{labels}}}": 1.0}


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


def move(
    before: str, after: str, at_s: float, operation: str = "op-1", through: tuple[str, ...] = ()
) -> StateChanged:
    return StateChanged(
        at_s=at_s,
        operation=operation,
        upstream="openai",
        before=before,
        after=after,
        how="provider",
        through=through,
    )


def transitions(*path: str) -> Samples:
    return {
        f'dispatch_transitions_total{{from="{before}",to="{after}"}}': 1.0 for before, after in pairwise(path)
    }


def witness(word: Literal["partial_tool_dispatch", "byte_mismatch"], *, enforced: bool) -> WitnessSpoke:
    return WitnessSpoke(
        at_s=1.0,
        operation="op-1",
        upstream="openai",
        api="openai_chat",
        witness=word,
        enforced=enforced,
        detail="",
    )


def anomaly(reason: str) -> AnomalySeen:
    return AnomalySeen(at_s=1.0, operation="op-1", upstream="openai", api="openai_chat", reason=reason)


def ordered(stage: str, **fields: Any) -> StageOrdered:
    return StageOrdered(at_s=1.0, instance="i", stage=stage, who="w", why="", **fields)


LEAK = PreviewLeaked(
    at_s=1.0,
    operation="op-2",
    upstream="openai",
    api="openai_chat",
    reason="call.uncommitted",
    cause="stream.truncated",
    retracted_operation="op-1",
    at="/messages/3",
    whole=True,
)
RETRACTED = PreviewRetracted(
    at_s=1.0,
    operation="op-1",
    upstream="openai",
    api="openai_chat",
    cause="stream.stalled",
    enforced=True,
    preview_bytes=5,
)
PULSE = ProxyPulse(
    at_s=1.0, instance="i", open_exchanges=7, open_streams=3, held_bytes=4096, eventloop_lag_s=0.25
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
            **histogram("first_byte_added_seconds", "", LATENCY, 2.002),
        },
    ),
    "a phase that a request did not have is not measured": ([unmeasured()], request()),
    "nothing of ours comes before the first byte where nothing is enforced": (
        [exchange(stream=False, claim_s=0.0)],
        {**request(), **histogram("added_latency_seconds", 'phase="judge"', LATENCY, 0.002)},
    ),
    "a request that waits for a tool result": (
        [
            unmeasured(
                verdict="waiting", outcome="refused", reasons=("call.unanswered",), stage="enforce-tools"
            )
        ],
        {**request("enforce-tools", "refused"), 'waiting_total{end="refused"}': 1},
    ),
    "a miss: called legal, and refused by the provider for its sequence": (
        [unmeasured(provider="refused_sequence", outcome="provider_error", stage="enforce-tools")],
        {
            **request("enforce-tools", "provider_error"),
            'illegal_sequences_sent_total{stage="enforce-tools"}': 1,
            'shadow_verdicts_total{provider="refused_sequence",reason="",verdict="legal"}': 1,
        },
    ),
    "a provider that refuses for another cause makes no miss": (
        [unmeasured(provider="refused_other", outcome="provider_error")],
        {
            **request(outcome="provider_error"),
            'shadow_verdicts_total{provider="refused_other",reason="",verdict="legal"}': 1,
        },
    ),
    "a false refusal counts under each of its reasons, and is no miss": (
        [unmeasured(verdict="illegal", provider="accepted", reasons=("result.orphan", "role.order"))],
        {
            **request(),
            'shadow_verdicts_total{provider="accepted",reason="result.orphan",verdict="illegal"}': 1,
            'shadow_verdicts_total{provider="accepted",reason="role.order",verdict="illegal"}': 1,
        },
    ),
    "what the provider was not asked has no shadow": (
        [unmeasured(verdict="illegal", outcome="refused", reasons=("result.orphan",), stage="enforce-tools")],
        {**request("enforce-tools", "refused")},
    ),
    "a conflict": (
        [unmeasured(outcome="refused", reasons=("dispatch.conflict",), stage="enforce-tools")],
        {**request("enforce-tools", "refused"), "canonical_conflicts_total": 1},
    ),
    "tokens of a broken turn are lost": (
        [unmeasured(outcome="retracted", input_tokens=100, output_tokens=20)],
        {**request(outcome="retracted"), 'breakage_tokens_total{kind="truncated",upstream="openai"}': 120},
    ),
    "tokens whose end nobody saw may be billed, and those that nobody told are none": (
        [unmeasured(outcome="client_gone", input_tokens=100)],
        {
            **request(outcome="client_gone"),
            'breakage_tokens_total{kind="billed_unknown",upstream="openai"}': 100,
        },
    ),
    "a turn that the provider ended itself is no loss": (
        [unmeasured(outcome="incomplete", input_tokens=100, output_tokens=20)],
        request(outcome="incomplete"),
    ),
    "a leak": ([LEAK], {'preview_leaks_total{cause="stream.truncated"}': 1}),
    "a witness where enforced": (
        [witness("partial_tool_dispatch", enforced=True)],
        {'partial_tool_dispatch_total{enforced="true"}': 1},
    ),
    "a witness where only watched": (
        [witness("byte_mismatch", enforced=False)],
        {'byte_mismatch_total{enforced="false"}': 1},
    ),
    "an answer that went on after its end, and one that stuttered": (
        [anomaly("stream.late"), anomaly("stream.after_stop"), anomaly("stream.duplicate_delta")],
        {"late_blocks_total": 2},
    ),
    "the last pulse is what goes on": (
        [PULSE, msgspec.structs.replace(PULSE, open_streams=2)],
        {"open_exchanges": 7, "open_streams": 2, "held_bytes": 4096, "eventloop_lag_seconds": 0.25},
    ),
    "a new process has nothing open": (
        [PULSE, ProxyStarted(at_s=2.0, instance="j", version="1", pid=2)],
        {},
    ),
    "an order puts one stage in force, and its end none": (
        [ordered("off"), ordered("observe")],
        {'rollout_stage{scope="all",stage="observe"}': 1},
    ),
    "a scope that Turngate rolled back by itself": (
        [ordered("observe", automatic=True)],
        {'rollout_stage{scope="all",stage="observe"}': 1, 'rollout_rolled_back{scope="all"}': 1},
    ),
    "the order after that ends it": (
        [ordered("observe", automatic=True), ordered("enforce-text")],
        {'rollout_stage{scope="all",stage="enforce-text"}': 1},
    ),
    "an order's end leaves the settings": (
        [ordered("off"), ordered("")],
        {},
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
        [RETRACTED],
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
        {**transitions("none", "PREPARED"), 'dispatches{state="PREPARED"}': 1},
    ),
    "moves that are told together are counted one by one": (
        [move("", "COMMITTED", 1.0, through=("PREPARED", "DISPATCHING", "SENT", "STREAMING"))],
        transitions("none", "PREPARED", "DISPATCHING", "SENT", "STREAMING", "COMMITTED"),
    ),
    "a dispatch stands in one state only": (
        [move("", "DISPATCHING", 1.0, through=("PREPARED",)), move("DISPATCHING", "SENT", 2.0)],
        {**transitions("none", "PREPARED", "DISPATCHING", "SENT"), 'dispatches{state="SENT"}': 1},
    ),
    "the end of a dispatch whose begin nobody told leaves nothing": (
        [move("STREAMING", "COMMITTED", 1.0)],
        transitions("STREAMING", "COMMITTED"),
    ),
    "the oldest unknown dispatch is shown": (
        [move("SENT", "UNKNOWN", 60.0, "op-1"), move("SENT", "UNKNOWN", 90.0, "op-2")],
        {
            'dispatch_transitions_total{from="SENT",to="UNKNOWN"}': 2,
            'unknown_dispatch_age_seconds{upstream="openai"}': 40,
            'dispatches{state="UNKNOWN"}': 2,
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
        {**transitions("SENT", "UNKNOWN"), 'dispatches{state="UNKNOWN"}': 1},
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


def test_every_series_whose_labels_are_known_is_there_before_the_first_event() -> None:
    text = Registry("1").expose("")[0].decode()
    for name, metric in METRICS.items():
        assert f"# TYPE {PREFIX}{name} {metric.kind}" in text
        if all(label.values for label in metric.labels):
            zeros = re.findall(rf"^{PREFIX}{name}(?:_sum)?(?:{{.*}})? 0\.0$", text, re.MULTILINE)
            assert len(zeros) == len(list(metric.starts())) > 0


def test_the_series_at_rest_are_few() -> None:
    assert len(Registry("1").expose("")[0].decode().splitlines()) < 600


def test_every_legal_move_of_a_dispatch_has_its_series_from_the_start() -> None:
    moves = {(state.value, after.value) for state, following in NEXT.items() for after in following}
    assert set(METRICS["dispatch_transitions_total"].starts()) == {("none", "PREPARED"), *moves}


def test_a_scraper_that_asks_for_it_gets_openmetrics_with_the_operations_as_exemplars() -> None:
    registry = Registry("1")
    registry.observe_all(
        [
            exchange(stage="enforce-tools", outcome="refused", reasons=("dispatch.conflict",)),
            exchange(provider="refused_sequence"),
            finding("result.orphan", "rejected"),
            call("withheld", "stream.truncated", held=True),
            witness("partial_tool_dispatch", enforced=True),
            witness("byte_mismatch", enforced=True),
            LEAK,
            RETRACTED,
            move("", "COMMITTED", 1.0),
        ]
    )
    plain, plain_type = registry.expose("text/plain;version=0.0.4;q=0.5,*/*;q=0.1")
    text, content_type = registry.expose(
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    )
    assert (plain, plain_type.split(";")[0]) == (registry.expose("")[0], "text/plain")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    shown = {
        (family.name if family.type == "histogram" else f"{family.name}_total").removeprefix(PREFIX)
        for family in parsed(text)
        for sample in family.samples
        if sample.exemplar and sample.exemplar.labels["operation"].startswith("op-")
    }
    assert shown == {name for name, metric in METRICS.items() if metric.exemplars}
    assert b"op-1" not in plain


def test_an_exemplar_is_the_last_operation_of_its_bucket() -> None:
    registry = Registry("1")
    for operation, judge_s in (("op-a", 0.002), ("op-b", 0.0021), ("op-c", 0.3)):
        event = msgspec.structs.replace(exchange(), operation=operation, judge_s=judge_s, claim_s=0.0)
        registry.observe(event)
    families = parsed(registry.expose("application/openmetrics-text")[0])
    found = {
        sample.labels["le"]: (sample.exemplar.labels["operation"], sample.exemplar.value)
        for family in families
        for sample in family.samples
        if sample.name == f"{PREFIX}added_latency_seconds_bucket" and sample.exemplar
    }
    assert found == {"0.0025": ("op-b", 0.0021), "0.5": ("op-c", 0.3)}


def test_the_page_of_metrics_is_up_to_date() -> None:
    """If this fails: python docs/generate_metrics.py"""
    page = Path(__file__).parents[1] / "docs" / "generate_metrics.py"
    spec = importlib.util.spec_from_file_location("generate_metrics", page)
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.PAGE.read_text() == generate.page()


def test_the_table_keeps_prometheus_conventions() -> None:
    for name, metric in METRICS.items():
        assert (metric.kind == "counter") == name.endswith("_total")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert not (metric.kind == "gauge" and metric.exemplars)  # OpenMetrics has none there
        assert all(label.values or label.names_max for label in metric.labels)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith(".")


def test_a_metric_that_is_not_in_the_table_cannot_be_counted() -> None:
    with pytest.raises(KeyError):
        Registry("1").add("surprises_total", 1)
