"""Every Prometheus metric in one table, and the projection of events onto them.

A metric is declared only when something feeds it. The names here are without the prefix `turngate_`. A label either
has a closed list of values, and anything else is shown as `other`, or it learns its values from the first events up
to `names_max`, and later ones are shown as `other`: what an app or a provider invents cannot make the number of
series grow without end, and sums stay right.

The samples are kept in dicts of our own, and prometheus_client only writes them out: one streamed exchange with four
ledger moves and a held call costs 4 us here, and 9 us with kept children of prometheus_client, which take a lock for
each number.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final, Literal, assert_never, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

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
    ProxyStarted,
    ProxyStopped,
    RequestUnjudged,
    StageOrdered,
    StateChanged,
    WitnessSpoke,
)

PREFIX: Final = "turngate_"
OTHER: Final = "other"
LABEL_LENGTH_MAX: Final = 128
"""Characters; a longer value is `other`, and so is one that is not printable."""

UNKNOWN_MAX: Final = 10_000
"""Dispatches in UNKNOWN whose age is followed; more are a broken provider, and the oldest still tell it."""


@dataclass(frozen=True, slots=True)
class Label:
    """`values` is the closed list, if there is one; else up to `names_max` values are learnt."""

    name: str
    values: tuple[str, ...] = ()
    names_max: int = 100


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `buckets` are upper bounds in the unit that the name ends with."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()


_OVERHEAD_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)
# A held call waits for the end of its turn: from no time to the longest reasoning pause seen, ten minutes.
_HOLD_S = (
    0.0005,
    0.001,
    0.005,
    0.01,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
_RESOLVED_S = (1.0, 5.0, 15.0, 60.0, 300.0, 600.0, 1800.0, 3600.0, 21600.0, 86400.0)
_HOLD_BYTES = (256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0, 16777216.0)

_UPSTREAM = Label("upstream")
_API = Label("api")
_REASON = Label("reason")
_CAUSE = Label("cause")
_WHERE = Label("where")
_MODEL = Label("model", names_max=50)
_STREAM = Label("stream", ("false", "true"))
_STAGE = Label("stage", ("off", "observe", "enforce-text", "enforce-tools", "enforce-schema"))
_SCOPE = Label("scope", ("all",))
_OUTCOME = Label("outcome", get_args(Outcome))
_STATES = (
    *("PREPARED", "WAITING", "REJECTED", "DISPATCHING", "UNSENT", "SENT", "STREAMING", "UNKNOWN"),
    *("REFUSED", "CANCELLED", "COMMITTED", "ABANDONED"),
)

METRICS: Final[Mapping[str, Metric]] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            Metric(
                "requests_total",
                "counter",
                "Requests by how they ended for the app.",
                (_UPSTREAM, _API, _MODEL, _STREAM, _STAGE, _OUTCOME),
            ),
            Metric(
                "request_errors_total",
                "counter",
                "Requests that failed; the type begins with whose fault it is.",
                (_UPSTREAM, Label("error_type")),
            ),
            Metric(
                "unjudged_total",
                "counter",
                "Generation requests that were not judged.",
                (Label("surface"), Label("why")),
            ),
            Metric(
                "added_latency_seconds",
                "histogram",
                "Time of our own in each phase of a request.",
                (Label("phase", ("judge", "claim")),),
                _OVERHEAD_S,
            ),
            Metric(
                "sequence_rejects_total",
                "counter",
                "Findings that refused a request, or would have at a stage that enforces.",
                (_UPSTREAM, _API, _REASON, Label("action", ("rejected", "would_reject"))),
            ),
            Metric(
                "tool_result_faults_total",
                "counter",
                "Findings about tool results, whatever was done about them.",
                (Label("kind", ("orphan", "duplicate", "mismatch", "misplaced")),),
            ),
            Metric(
                "tool_calls_total",
                "counter",
                "Tool calls of answers, by what the gate decided; at a stage that only watches, would have decided.",
                (Label("decision", ("released", "withheld")), _REASON),
            ),
            Metric(
                "tool_hold_seconds",
                "histogram",
                "How long held tool calls were held.",
                buckets=_HOLD_S,
            ),
            Metric(
                "tool_hold_bytes",
                "histogram",
                "Size of what was held for a tool call.",
                buckets=_HOLD_BYTES,
            ),
            Metric(
                "partial_tool_calls_blocked_total",
                "counter",
                "Tool calls that were held and withheld because they did not arrive whole.",
            ),
            Metric(
                "preview_retractions_total",
                "counter",
                "Turns that did not end well after text was shown.",
                (_CAUSE,),
            ),
            Metric(
                "streams_ended_total",
                "counter",
                "Streamed answers by how they ended.",
                (Label("end", get_args(Outcome)),),
            ),
            Metric(
                "dispatch_transitions_total",
                "counter",
                "Moves in the ledger; `none` is before the first state.",
                (Label("from", ("none", *_STATES)), Label("to", _STATES)),
            ),
            Metric(
                "unknown_dispatch_age_seconds",
                "gauge",
                "Age of the oldest dispatch whose outcome is not known; 0 without one.",
                (_UPSTREAM,),
            ),
            Metric(
                "unknown_dispatch_resolved_seconds",
                "histogram",
                "How long dispatches were in UNKNOWN before they left it.",
                (Label("how"),),
                _RESOLVED_S,
            ),
            Metric(
                "observer_failures_total",
                "counter",
                "Failures of our own while traffic went on, by where.",
                (_WHERE,),
            ),
            Metric("spool_bytes", "gauge", "Size of the spool directory."),
            Metric(
                "spool_dropped_total",
                "counter",
                "Events lost because the spool was at its bound or could not be written.",
                (Label("class", ("verdict", "other")),),
            ),
            Metric("evidence_rows_total", "counter", "Events written to the evidence files."),
            Metric(
                "evidence_lag_seconds", "gauge", "Age of the oldest sealed segment that is not loaded yet."
            ),
            Metric(
                "rollout_stage",
                "gauge",
                "1 for the stage an operator's order put in force for everything; without an order the settings hold.",
                (_SCOPE, _STAGE),
            ),
            Metric("observer_restarts_total", "counter", "Restarts of the observer by this proxy process."),
            Metric("build_info", "gauge", "Always 1; the version is the label.", (Label("version"),)),
        )
    }
)
"""All metrics by name."""

_FAULT_KINDS = {
    "result.orphan": "orphan",
    "result.duplicate": "duplicate",
    "result.mismatch": "mismatch",
    "result.misplaced": "misplaced",
}
_NOT_WHOLE = frozenset({"call.arguments_unclosed", "call.arguments_invalid"})


class Registry(Collector):
    """The samples of one observer. One thread may count while another renders."""

    def __init__(self, version: str, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._learnt: dict[str, set[str]] = {}
        self._unknown: dict[str, tuple[str, float]] = {}
        self._samples = {name: _Samples(metric, self._learnt) for name, metric in METRICS.items()}
        self._requests = self._samples["requests_total"]
        self._latencies = self._samples["added_latency_seconds"]
        self._transitions = self._samples["dispatch_transitions_total"]
        self.set("build_info", 1, version)
        for name, metric in METRICS.items():
            if not metric.labels:
                self._samples[name][()]  # shown as 0 from the first scrape on
        self._collectors = CollectorRegistry(auto_describe=False)
        self._collectors.register(self)

    def observe(self, event: AnyEvent) -> None:
        """Count one event."""
        self.observe_all((event,))

    def observe_all(self, events: Iterable[AnyEvent]) -> None:
        """Count the events so that a scrape sees all of them or none."""
        with self._lock:
            for event in events:
                self._project(event)

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Raise a counter that no event feeds."""
        with self._lock:
            self._samples[name][labels][0] += amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge (or a counter whose truth lies elsewhere)."""
        with self._lock:
            self._samples[name][labels][0] = value

    def value(self, name: str, *labels: str) -> float:
        """The counter or gauge now; of a histogram the number of observations."""
        with self._lock:
            cell = self._samples[name].get(labels, [0.0])
            return sum(cell[1:]) if METRICS[name].kind == "histogram" else cell[0]

    def restore_unknown(self, dispatches: Iterable[tuple[str, str, float]]) -> None:
        """Take over dispatches (operation, upstream, when in Unix seconds) that were UNKNOWN in an earlier life."""
        with self._lock:
            for operation, upstream, at_s in dispatches:
                self._enter_unknown(operation, upstream, at_s)

    def render(self) -> bytes:
        """All samples in Prometheus' text format 0.0.4."""
        return generate_latest(self._collectors)

    def collect(self) -> Iterator[Family]:
        """What prometheus_client asks for when it renders."""
        with self._lock:
            self._age_unknown()
            return iter([samples.family() for samples in self._samples.values()])

    def _project(self, event: AnyEvent) -> None:
        match event:
            case StateChanged():
                self._count_move(event)
            case ExchangeEnded():
                self._count_exchange(event)
            case CallDecided():
                self._count_call(event)
            case FindingMade():
                self._count_finding(event)
            case PreviewRetracted(cause=cause):
                self._count("preview_retractions_total", cause)
            case RequestUnjudged(surface=surface, why=why):
                self._count("unjudged_total", surface, why)
            case FailureCounted(where=where):
                self._count("observer_failures_total", where)
            case EventsDropped(event_class=event_class, count=count):
                self._samples["spool_dropped_total"][(event_class,)][0] += count
            case ObserverStarted(restart=restart):
                # The event carries the total, because this registry died with the observer before it.
                self._samples["observer_restarts_total"][()][0] = restart
            case StageOrdered(stage=ordered):
                for stage in _STAGE.values:
                    self._samples["rollout_stage"][("all", stage)][0] = float(stage == ordered)
            case AnomalySeen() | PreviewLeaked() | WitnessSpoke():
                pass  # rows only
            case ProxyStarted() | ProxyStopped():
                pass  # rows only: Prometheus has `up` and process_start_time_seconds of its own
            case _:
                assert_never(event)

    def _count(self, name: str, *labels: str) -> None:
        self._samples[name][labels][0] += 1

    def _measure(self, name: str, value: float, *labels: str) -> None:
        self._samples[name].measure(labels, value)

    def _count_exchange(self, event: ExchangeEnded) -> None:
        stream = "true" if event.stream else "false"
        key = (event.upstream, event.api, event.model, stream, event.stage, event.outcome)
        self._requests[key][0] += 1
        self._latencies.measure(("judge",), event.judge_s)
        self._latencies.measure(("claim",), event.claim_s)
        if event.stream:
            self._count("streams_ended_total", event.outcome)
        if event.error_type:
            self._count("request_errors_total", event.upstream, event.error_type)

    def _count_finding(self, event: FindingMade) -> None:
        if event.action != "reported":
            self._count("sequence_rejects_total", event.upstream, event.api, event.reason, event.action)
        if kind := _FAULT_KINDS.get(event.reason):
            self._count("tool_result_faults_total", kind)

    def _count_call(self, event: CallDecided) -> None:
        self._count("tool_calls_total", event.decision, event.reason)
        if not event.held:
            return
        self._measure("tool_hold_seconds", event.hold_s)
        self._measure("tool_hold_bytes", event.hold_bytes)
        if event.decision == "withheld" and (
            event.reason in _NOT_WHOLE or event.reason.startswith("stream.")
        ):
            self._count("partial_tool_calls_blocked_total")

    def _count_move(self, event: StateChanged) -> None:
        path = (event.before or "none", *event.through, event.after)
        for step in pairwise(path):
            self._transitions[step][0] += 1
        if event.after == "UNKNOWN":
            self._enter_unknown(event.operation, event.upstream, event.at_s)
        elif event.before == "UNKNOWN":
            entered = self._unknown.pop(event.operation, None)
            if entered is not None:
                # The wall clock may have been set back in between.
                self._measure(
                    "unknown_dispatch_resolved_seconds", max(0.0, event.at_s - entered[1]), event.how
                )

    def _enter_unknown(self, operation: str, upstream: str, at_s: float) -> None:
        if len(self._unknown) < UNKNOWN_MAX:
            self._unknown.setdefault(operation, (upstream, at_s))

    def _age_unknown(self) -> None:
        ages = self._samples["unknown_dispatch_age_seconds"]
        now = self._clock()
        for cell in ages.values():
            cell[0] = 0.0
        for upstream, at_s in self._unknown.values():
            cell = ages[(upstream,)]
            cell[0] = max(cell[0], now - at_s)


class _Samples(dict[tuple[str, ...], list[float]]):
    """The series of one metric: cells by label values. A cell is [value], or [sum, observations by bucket...]."""

    def __init__(self, metric: Metric, learnt: dict[str, set[str]]) -> None:
        super().__init__()
        self.metric = metric
        self._learnt = learnt

    def __missing__(self, labels: tuple[str, ...]) -> list[float]:
        """A new cell, or that of `other` for values outside their list."""
        shown = tuple(
            self._shown(label, value) for label, value in zip(self.metric.labels, labels, strict=True)
        )
        size = 2 + len(self.metric.buckets) if self.metric.kind == "histogram" else 1
        return self.setdefault(shown, [0.0] * size)

    def measure(self, labels: tuple[str, ...], value: float) -> None:
        """Add one observation to a histogram."""
        cell = self[labels]
        cell[0] += value
        cell[1 + bisect_left(self.metric.buckets, value)] += 1

    def family(self) -> Family:
        """The samples in prometheus_client's form."""
        metric = self.metric
        name = PREFIX + metric.name
        names = [label.name for label in metric.labels]
        if metric.kind == "histogram":
            histogram = HistogramMetricFamily(name, metric.help, labels=names)
            for labels, cell in self.items():
                histogram.add_metric(labels, list(self._cumulated(cell)), cell[0])
            return histogram
        family_type = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = family_type(name, metric.help, labels=names)
        for labels, cell in self.items():
            family.add_metric(labels, cell[0])
        return family

    def _shown(self, label: Label, value: str) -> str:
        if label.values:
            return value if value in label.values else OTHER
        names = self._learnt.setdefault(label.name, set())
        if value in names:
            return value
        if len(names) >= label.names_max or len(value) > LABEL_LENGTH_MAX or not value.isprintable():
            return OTHER
        names.add(value)
        return value

    def _cumulated(self, cell: list[float]) -> Iterator[tuple[str, float]]:
        total = 0.0
        for bound, count in zip((*map(str, self.metric.buckets), "+Inf"), cell[1:], strict=True):
            total += count
            yield bound, total
