"""Every Prometheus metric in one table, and the projection of events onto them.

A metric is declared only when something feeds it. The names here are without the prefix `turngate_`. A label has
values that are known from the start, and may learn `names_max` more from the events; anything else is shown as
`other`: what an app or a provider invents cannot make the number of series grow without end, and sums stay right.
Series whose labels are all known are there as zeros from the first scrape on: `increase` does not see the step from
no series to 1, and an alert on it would sleep through the first fault.

The samples are kept in dicts of our own, and prometheus_client only writes them out: one streamed exchange with its
row of the ledger and a held call costs 8 us here, exemplars included. Kept children of prometheus_client, which take a
lock for each number, cost twice as much.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, product
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, assert_never, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

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
from turngate.validators.ledger import FINAL, NEXT, State
from turngate.validators.rules import Reason, Verdict

PREFIX: Final = "turngate_"
OTHER: Final = "other"
LABEL_LENGTH_MAX: Final = 128
"""Characters; a longer value is `other`, and so is one that is not printable."""

OPEN_MAX: Final = 10_000
"""Dispatches that are followed until they end; more are a broken provider, and the oldest still tell it."""


@dataclass(frozen=True, slots=True)
class Label:
    """`values` are known from the start; up to `names_max` more are learnt, none where the list is closed."""

    name: str
    values: tuple[str, ...] = ()
    names_max: int = 0


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `buckets` are upper bounds in the unit that the name ends with.

    `zeros` are the series that are there from the start; None: every combination of known values.
    `exemplars`: each bucket or counter tells the operation that touched it last.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    zeros: tuple[tuple[str, ...], ...] | None = None
    exemplars: bool = False

    def starts(self) -> Iterator[tuple[str, ...]]:
        """Label values of the series that are shown before anything happened."""
        if self.zeros is not None:
            yield from self.zeros
        else:
            yield from product(*(label.values for label in self.labels))


_OVERHEAD_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)
# A held call waits for the end of its turn: from no time to the longest reasoning pause seen, ten minutes.
_HOLD_S = (
    *(0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_RESOLVED_S = (1.0, 5.0, 15.0, 60.0, 300.0, 600.0, 1800.0, 3600.0, 21600.0, 86400.0)
_HOLD_BYTES = (256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0, 16777216.0)

_REASONS = tuple(reason.value for reason in Reason)
_CAUSES = (
    *(reason for reason in _REASONS if reason.startswith(("call.", "stream."))),
    *(Reason.LIMIT_HOLD.value, Reason.INTERNAL.value),
)
"""Why an answer's turn did not end well."""

_STATES = tuple(state.value for state in State)
_OPEN_STATES = tuple(state.value for state in State if state not in FINAL)

_UPSTREAM = Label("upstream", names_max=100)
_API = Label("api", names_max=30)
_MODEL = Label("model", names_max=50)
_REASON = Label("reason", _REASONS)
_CAUSE = Label("cause", _CAUSES)
_STREAM = Label("stream", ("false", "true"))
_STAGE = Label("stage", ("off", "observe", "enforce-text", "enforce-tools", "enforce-schema"))
_SCOPE = Label("scope", ("all",), names_max=32)
_ENFORCED = Label("enforced", ("false", "true"))
_VERDICT = Label("verdict", tuple(verdict.value for verdict in Verdict))
_PROVIDER = Label("provider", tuple(value for value in get_args(ProviderClass) if value))
_WHERE = Label(
    "where",
    (
        *("exchange", "connection", "judge", "gate", "coding", "witness", "record", "control", "settings"),
        *("ledger.open", "ledger.claim", "ledger.move", "ledger.write", "ledger.cas", "ledger.dropped"),
        *("observer_start", "spool"),
        *(
            "segment",
            "segment_line",
            "evidence_file",
            "evidence_corrupt",
            "load",
            "restore",
            "rollback",
            "log",
            "otlp",
        ),
    ),
    names_max=40,
)

_TRAFFIC = (
    Metric(
        "requests_total",
        "counter",
        "Requests by how they ended for the app.",
        (_UPSTREAM, _API, _MODEL, _STREAM, _STAGE, Label("outcome", get_args(Outcome))),
    ),
    Metric(
        "request_errors_total",
        "counter",
        "Requests that failed; the type begins with whose fault it is: caller_, policy_, provider_, turngate_.",
        (_UPSTREAM, Label("error_type", names_max=40)),
    ),
    Metric(
        "unjudged_total",
        "counter",
        "Generation requests that were not judged.",
        (Label("surface", names_max=30), Label("why", _REASONS)),
    ),
    Metric(
        "added_latency_seconds",
        "histogram",
        "Time of our own in a phase of a request that had it: judging, and the claim on disk.",
        (Label("phase", ("judge", "claim")),),
        _OVERHEAD_S,
        exemplars=True,
    ),
    Metric(
        "first_byte_added_seconds",
        "histogram",
        "Time of our own before the answer's first byte, at stages that enforce; elsewhere nothing of ours comes first.",
        buckets=_OVERHEAD_S,
        exemplars=True,
    ),
    Metric("open_streams", "gauge", "Streamed answers that go on, as of the proxy's last pulse."),
    Metric("open_exchanges", "gauge", "Exchanges that go on, as of the proxy's last pulse."),
)

_SEQUENCES = (
    Metric(
        "sequence_rejects_total",
        "counter",
        "Findings that refused a request, or would have at a stage that enforces.",
        (_UPSTREAM, _API, _REASON, Label("action", ("rejected", "would_reject"))),
        exemplars=True,
    ),
    Metric(
        "waiting_total",
        "counter",
        "Requests with a tool call whose result is still to come, by how they ended for the app.",
        (Label("end", get_args(Outcome)),),
    ),
    Metric(
        "tool_result_faults_total",
        "counter",
        "Findings about tool results, whatever was done about them.",
        (Label("kind", ("orphan", "duplicate", "mismatch", "misplaced")),),
    ),
    Metric(
        "preview_leaks_total",
        "counter",
        "Requests that bring back, as if it were history, what was retracted; the cause is why it was.",
        (_CAUSE,),
        exemplars=True,
    ),
)

_ANSWERS = (
    Metric(
        "tool_calls_total",
        "counter",
        "Tool calls of answers, by what the gate decided; at a stage that only watches, would have decided.",
        (Label("decision", ("released", "withheld")), Label("reason", ("", *_CAUSES))),
        zeros=(("released", ""), *(("withheld", cause) for cause in _CAUSES)),
    ),
    Metric(
        "tool_hold_seconds",
        "histogram",
        "How long held tool calls were held.",
        buckets=_HOLD_S,
        exemplars=True,
    ),
    Metric(
        "tool_hold_bytes",
        "histogram",
        "Size of what was held for a tool call.",
        buckets=_HOLD_BYTES,
        exemplars=True,
    ),
    Metric("held_bytes", "gauge", "Bytes that gates hold back, as of the proxy's last pulse."),
    Metric(
        "partial_tool_calls_blocked_total",
        "counter",
        "Tool calls that were held and withheld because they did not arrive whole.",
        exemplars=True,
    ),
    Metric(
        "preview_retractions_total",
        "counter",
        "Turns that did not end well after text was shown.",
        (_CAUSE,),
        exemplars=True,
    ),
    Metric(
        "streams_ended_total",
        "counter",
        "Streamed answers by how they ended.",
        (Label("end", get_args(Outcome)),),
    ),
    Metric(
        "late_blocks_total",
        "counter",
        "Times that an answer went on after its end.",
    ),
    Metric(
        "breakage_tokens_total",
        "counter",
        "Tokens of answers that were of no use, as far as the provider counted them: of broken turns, of those whose end "
        "nobody saw, which may be billed, and of those that an SDK asked for again.",
        (_UPSTREAM, Label("kind", ("truncated", "billed_unknown", "duplicate"))),
    ),
)

_DISPATCHES = (
    Metric(
        "dispatches",
        "gauge",
        "Dispatches that have not ended, by state, as far as this observer was told.",
        (Label("state", _OPEN_STATES),),
    ),
    Metric(
        "dispatch_transitions_total",
        "counter",
        "Moves in the ledger; `none` is before the first state.",
        (Label("from", ("none", *_STATES)), Label("to", _STATES)),
        zeros=(
            ("none", State.PREPARED.value),
            *((state.value, to.value) for state in State for to in sorted(NEXT[state])),
        ),
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
        (Label("how", ("connection_end", "operator"), names_max=20),),
        _RESOLVED_S,
    ),
    Metric(
        "canonical_conflicts_total",
        "counter",
        "Requests refused because another attempt has this revision of the conversation.",
        exemplars=True,
    ),
)

_HONESTY = (
    Metric(
        "illegal_sequences_sent_total",
        "counter",
        "Misses: requests that we called legal and the provider refused for their sequence. To stay 0.",
        (_STAGE,),
        exemplars=True,
    ),
    Metric(
        "shadow_verdicts_total",
        "counter",
        "Our verdict on requests that were sent, once for each reason, against what the provider made of them.",
        (Label("reason", ("", *_REASONS)), _VERDICT, _PROVIDER),
        # All of them would be 700 series; these are the ones that honesty is read from.
        zeros=(
            *(("", Verdict.LEGAL.value, provider) for provider in _PROVIDER.values),
            *product(_REASONS, (Verdict.ILLEGAL.value,), ("accepted", "refused_sequence")),
            *product(
                (Reason.CALL_UNANSWERED.value,), (Verdict.WAITING.value,), ("accepted", "refused_sequence")
            ),
        ),
        exemplars=True,
    ),
    Metric(
        "partial_tool_dispatch_total",
        "counter",
        "Answers in which a witness saw the app get a tool call that is not whole. To stay 0 where enforced.",
        (_ENFORCED,),
        exemplars=True,
    ),
    Metric(
        "byte_mismatch_total",
        "counter",
        "Exchanges that were passed and whose bytes a witness saw changed. To stay 0.",
        (_ENFORCED,),
        exemplars=True,
    ),
    Metric(
        "rollout_stage",
        "gauge",
        "The share of a scope's conversations for which an order put the stage in force; without one the settings hold.",
        (_SCOPE, _STAGE),
    ),
    Metric(
        "rollout_rolled_back",
        "gauge",
        "1 while the order in force for a scope is one that Turngate gave by itself, because of what it got wrong.",
        (_SCOPE,),
    ),
)

_OURS = (
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
    Metric("evidence_lag_seconds", "gauge", "Age of the oldest sealed segment that is not loaded yet."),
    Metric(
        "eventloop_lag_seconds",
        "gauge",
        "The latest that a timer of the proxy's event loop came between its last two pulses.",
    ),
    Metric("observer_restarts_total", "counter", "Restarts of the observer by this proxy process."),
    Metric("build_info", "gauge", "Always 1; the version is the label.", (Label("version", names_max=5),)),
)

SUBJECTS: Final[Mapping[str, tuple[Metric, ...]]] = MappingProxyType(
    {
        "Traffic": _TRAFFIC,
        "Sequences": _SEQUENCES,
        "Answers and tool calls": _ANSWERS,
        "Dispatches": _DISPATCHES,
        "Honesty and rollout": _HONESTY,
        "Turngate itself": _OURS,
    }
)
"""All metrics by what they are about."""

METRICS: Final[Mapping[str, Metric]] = MappingProxyType(
    {metric.name: metric for metrics in SUBJECTS.values() for metric in metrics}
)
"""All metrics by name."""

_FAULT_KINDS = {
    "result.orphan": "orphan",
    "result.duplicate": "duplicate",
    "result.mismatch": "mismatch",
    "result.misplaced": "misplaced",
}
_NOT_WHOLE = frozenset({"call.arguments_unclosed", "call.arguments_invalid"})
_LATE = frozenset({"stream.late", "stream.after_stop"})
_BREAKAGE = {"retracted": "truncated", "unknown": "billed_unknown", "client_gone": "billed_unknown"}
"""The kind of loss by outcome. An `incomplete` turn is none: the provider ended it, and the app knows."""


_OfOperation = ExchangeEnded | CallDecided | FindingMade | PreviewRetracted | PreviewLeaked | WitnessSpoke


class _Standing(NamedTuple):
    """Where an open dispatch stands, and since when in Unix seconds."""

    state: str
    upstream: str
    since_s: float


class Registry(Collector):
    """The samples of one observer. One thread may count while another renders."""

    def __init__(self, version: str, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._learnt: dict[str, set[str]] = {}
        self._open: dict[str, _Standing] = {}
        self._samples = {name: _Samples(metric, self._learnt) for name, metric in METRICS.items()}
        self._requests = self._samples["requests_total"]
        self._latencies = self._samples["added_latency_seconds"]
        self._errors = self._samples["request_errors_total"]
        self._transitions = self._samples["dispatch_transitions_total"]
        self._ages = self._samples["unknown_dispatch_age_seconds"]
        self.set("build_info", 1, version)
        for name, metric in METRICS.items():
            for labels in metric.starts():
                self._samples[name][labels]  # makes it
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
            self._samples[name][labels].value += amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge (or a counter whose truth lies elsewhere)."""
        with self._lock:
            self._samples[name][labels].value = value

    def value(self, name: str, *labels: str) -> float:
        """The counter or gauge now; of a histogram the number of observations."""
        with self._lock:
            cell = self._samples[name].get(labels, _NO_CELL)
            return sum(cell.counts) if METRICS[name].kind == "histogram" else cell.value

    def restore_unknown(self, dispatches: Iterable[tuple[str, str, float]]) -> None:
        """Take over dispatches (operation, upstream, when in Unix seconds) that were UNKNOWN in an earlier life.

        Those in other open states are not: an observer that starts again is told of their next move.
        """
        with self._lock:
            for operation, upstream, at_s in dispatches:
                self._follow(operation, _Standing("UNKNOWN", upstream, at_s))

    def expose(self, accept: str) -> tuple[bytes, str]:
        """All samples and their content type, in the format that an Accept header asks for: OpenMetrics has exemplars."""
        encode, content_type = choose_encoder(accept)
        return encode(self._collectors), content_type

    def collect(self) -> Iterator[Family]:
        """What prometheus_client asks for when it renders."""
        with self._lock:
            self._show_open()
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
                self._mark("preview_retractions_total", event, cause)
            case PreviewLeaked(cause=cause):
                self._mark("preview_leaks_total", event, cause)
            case WitnessSpoke(witness=witness, enforced=enforced):
                self._mark(f"{witness}_total", event, _word(enforced))
            case AnomalySeen(reason=reason):
                if reason in _LATE:
                    self._count("late_blocks_total")
            case RequestUnjudged(surface=surface, why=why):
                self._count("unjudged_total", surface, why)
            case _:
                self._project_own(event)

    def _project_own(
        self,
        event: ProxyStarted
        | ProxyStopped
        | ProxyPulse
        | ObserverStarted
        | StageOrdered
        | FailureCounted
        | EventsDropped,
    ) -> None:
        """What is not about one exchange."""
        match event:
            case FailureCounted(where=where):
                self._count("observer_failures_total", where)
            case EventsDropped(event_class=event_class, count=count):
                self._samples["spool_dropped_total"][(event_class,)].value += count
            case ObserverStarted(restart=restart):
                # The event carries the total, because this registry died with the observer before it.
                self._samples["observer_restarts_total"][()].value = restart
            case StageOrdered():
                for stage in _STAGE.values:
                    of_rest = (100 - event.percent) * (stage == event.rest)
                    share = event.percent * (stage == event.stage) + of_rest
                    self._samples["rollout_stage"][(event.scope, stage)].value = share / 100
                self._samples["rollout_rolled_back"][(event.scope,)].value = float(event.automatic)
            case ProxyPulse():
                self._feel(event.open_exchanges, event.open_streams, event.held_bytes, event.eventloop_lag_s)
            case ProxyStarted() | ProxyStopped():
                # Whatever the pulse before it said, nothing goes on now. Restarts are told by `up`.
                self._feel(0, 0, 0, 0.0)
            case _:
                assert_never(event)

    def _feel(self, exchanges: int, streams: int, held_bytes: int, lag_s: float) -> None:
        self._samples["open_exchanges"][()].value = exchanges
        self._samples["open_streams"][()].value = streams
        self._samples["held_bytes"][()].value = held_bytes
        self._samples["eventloop_lag_seconds"][()].value = lag_s

    def _count(self, name: str, *labels: str) -> None:
        self._samples[name][labels].value += 1

    def _mark(self, name: str, event: _OfOperation, *labels: str) -> None:
        """Count, and keep which operation it was."""
        cell = self._samples[name][labels]
        cell.value += 1
        cell.exemplars[0] = (event.operation, 1.0, event.at_s)

    def _count_exchange(self, event: ExchangeEnded) -> None:
        key = (event.upstream, event.api, event.model, _word(event.stream), event.stage, event.outcome)
        self._requests[key].value += 1
        if event.judge_s:
            self._latencies.measure(("judge",), event.judge_s, event)
        if event.claim_s:
            self._latencies.measure(("claim",), event.claim_s, event)
        if event.first_byte_s and event.stage.startswith("enforce"):
            self._samples["first_byte_added_seconds"].measure((), event.judge_s + event.claim_s, event)
        if event.stream:
            self._count("streams_ended_total", event.outcome)
        self._errors[event.upstream, "turngate_internal"]  # what must stay 0 is shown as 0
        if event.error_type:
            self._errors[event.upstream, event.error_type].value += 1
        if event.verdict == "waiting":
            self._count("waiting_total", event.outcome)
        if event.outcome == "refused" and Reason.DISPATCH_CONFLICT in event.reasons:
            self._mark("canonical_conflicts_total", event)
        kind = _BREAKAGE.get(event.outcome) or ("duplicate" if event.retry_of else "")
        if kind and event.api:
            tokens = max(0, event.input_tokens) + max(0, event.output_tokens)
            self._samples["breakage_tokens_total"][event.upstream, kind].value += tokens
        if event.provider:
            self._compare(event)

    def _compare(self, event: ExchangeEnded) -> None:
        """Our verdict against the provider's."""
        for reason in event.reasons or ("",):
            self._mark("shadow_verdicts_total", event, reason, event.verdict, event.provider)
        if event.verdict == "legal" and event.provider == "refused_sequence":
            self._mark("illegal_sequences_sent_total", event, event.stage)

    def _count_finding(self, event: FindingMade) -> None:
        if event.action != "reported":
            labels = (event.upstream, event.api, event.reason, event.action)
            self._mark("sequence_rejects_total", event, *labels)
        if kind := _FAULT_KINDS.get(event.reason):
            self._count("tool_result_faults_total", kind)

    def _count_call(self, event: CallDecided) -> None:
        self._count("tool_calls_total", event.decision, event.reason)
        if not event.held:
            return
        self._samples["tool_hold_seconds"].measure((), event.hold_s, event)
        self._samples["tool_hold_bytes"].measure((), event.hold_bytes, event)
        if event.decision == "withheld" and (
            event.reason in _NOT_WHOLE or event.reason.startswith("stream.")
        ):
            self._mark("partial_tool_calls_blocked_total", event)

    def _count_move(self, event: StateChanged) -> None:
        path = (event.before or "none", *event.through, event.after)
        for step in pairwise(path):
            self._transitions[step].value += 1
        self._ages[(event.upstream,)]  # 0 from the first dispatch on
        left = self._open.pop(event.operation, None)
        if event.after not in FINAL:
            stays = left is not None and left.state == event.after
            since_s = left.since_s if left is not None and stays else event.at_s
            self._follow(event.operation, _Standing(event.after, event.upstream, since_s))
        if left is not None and left.state == "UNKNOWN" and event.after != "UNKNOWN":
            # The wall clock may have been set back in between.
            unknown_s = max(0.0, event.at_s - left.since_s)
            self._samples["unknown_dispatch_resolved_seconds"].measure((event.how,), unknown_s)

    def _follow(self, operation: str, standing: _Standing) -> None:
        if len(self._open) < OPEN_MAX:
            self._open.setdefault(operation, standing)

    def _show_open(self) -> None:
        states = self._samples["dispatches"]
        for cell in (*states.values(), *self._ages.values()):
            cell.value = 0.0
        now = self._clock()
        for state, upstream, since_s in self._open.values():
            states[(state,)].value += 1
            if state == "UNKNOWN":
                cell = self._ages[(upstream,)]
                cell.value = max(cell.value, now - since_s)


def _word(truth: bool) -> str:
    return "true" if truth else "false"


@dataclass(slots=True)
class _Cell:
    """One series. `value` is the sum of a histogram, `counts` its observations by bucket.

    `exemplars`, by bucket, else one: operation, value, when in Unix seconds.
    """

    value: float = 0.0
    counts: list[int] = field(default_factory=list)
    exemplars: list[tuple[str, float, float] | None] = field(default_factory=list)


_NO_CELL: Final = _Cell()


class _Samples(dict[tuple[str, ...], _Cell]):
    """The series of one metric: cells by label values."""

    def __init__(self, metric: Metric, learnt: dict[str, set[str]]) -> None:
        super().__init__()
        self.metric = metric
        self._learnt = learnt

    def __missing__(self, labels: tuple[str, ...]) -> _Cell:
        """A new cell, or that of `other` for values outside their list."""
        shown = tuple(
            self._shown(label, value) for label, value in zip(self.metric.labels, labels, strict=True)
        )
        buckets = 1 + len(self.metric.buckets) if self.metric.kind == "histogram" else 0
        return self.setdefault(shown, _Cell(0.0, [0] * buckets, [None] * (buckets or 1)))

    def measure(self, labels: tuple[str, ...], value: float, event: _OfOperation | None = None) -> None:
        """Add one observation to a histogram."""
        cell = self[labels]
        bucket = bisect_left(self.metric.buckets, value)
        cell.value += value
        cell.counts[bucket] += 1
        if event is not None:
            cell.exemplars[bucket] = (event.operation, value, event.at_s)

    def family(self) -> Family:
        """The samples in prometheus_client's form."""
        metric = self.metric
        name = PREFIX + metric.name
        names = [label.name for label in metric.labels]
        if metric.kind == "histogram":
            histogram = HistogramMetricFamily(name, metric.help, labels=names)
            for labels, cell in self.items():
                histogram.add_metric(labels, list(self._cumulated(cell)), cell.value)
            return histogram
        if metric.kind == "counter":
            counter = CounterMetricFamily(name, metric.help, labels=names)
            for labels, cell in self.items():
                counter.add_metric(labels, cell.value, exemplar=_exemplar(cell.exemplars[0]))
            return counter
        gauge = GaugeMetricFamily(name, metric.help, labels=names)
        for labels, cell in self.items():
            gauge.add_metric(labels, cell.value)
        return gauge

    def _shown(self, label: Label, value: str) -> str:
        if value in label.values:
            return value
        names = self._learnt.setdefault(label.name, set())
        if value in names:
            return value
        if len(names) >= label.names_max or len(value) > LABEL_LENGTH_MAX or not value.isprintable():
            return OTHER
        names.add(value)
        return value

    def _cumulated(self, cell: _Cell) -> Iterator[tuple[str, float] | tuple[str, float, Exemplar]]:
        total = 0
        bounds = (*map(str, self.metric.buckets), "+Inf")
        for bound, count, touched in zip(bounds, cell.counts, cell.exemplars, strict=True):
            total += count
            exemplar = _exemplar(touched)
            yield (bound, total) if exemplar is None else (bound, total, exemplar)


def _exemplar(touched: tuple[str, float, float] | None) -> Exemplar | None:
    if touched is None:
        return None
    operation, value, at_s = touched
    return Exemplar({"operation": operation}, value, at_s)
