"""Exchanges as OpenTelemetry spans and metrics, observer side; imported only where somebody asked for them.

One span an exchange, its phases as children, what was found on the way as its events. Names and attributes follow the
GenAI conventions of v1.41, the last version before they moved to a repository of their own. What that repository's
v0.1.0 changed of what is sent here is the metrics' names; they come with
OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental.

The SDK, not this file, reads the other OTEL_ variables: headers, certificates, sampler, resource. Headers come from there
alone, so that no credential of the collector is in a settings file. An exchange that finds the queue full is lost and
counted; the loader never waits for a collector. Measured (perf_counter, an exporter that takes everything): 0.14 ms for
an exchange of five spans, 0.02 ms for one that is not sampled.
"""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Histogram, Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from turngate.telemetry.events import (
    AnomalySeen,
    AnyEvent,
    CallDecided,
    ExchangeEnded,
    FindingMade,
    PreviewLeaked,
    PreviewRetracted,
    RequestUnjudged,
    WitnessSpoke,
    shown_model,
)

QUEUE_SPANS: Final = 8192
"""Spans that wait for the collector, about 20 MB; four seconds of 500 exchanges a second."""

EXCHANGE_SPANS: Final = 6
"""The most that one exchange makes."""

OPEN_MAX: Final = 10_000
EVENTS_MAX: Final = 100
"""Exchanges that have not ended and what is kept of each. An exchange whose process died never ends."""

CLOSE_S: Final = 3.0
"""How long the last export may take. The supervisor waits 10 s for all that an observer does at its end."""

TEXT_MAX: Final = 128
"""Characters of any attribute."""

Attributes = dict[str, str | bool | int | float | Sequence[str]]
EventOfExchange = (
    AnomalySeen
    | CallDecided
    | FindingMade
    | PreviewLeaked
    | PreviewRetracted
    | RequestUnjudged
    | WitnessSpoke
)

OPERATIONS: Final[Mapping[str, str]] = {
    "openai.chat": "chat",
    "anthropic.messages": "chat",
    "openai.responses": "chat",
    "ollama.chat": "chat",
    "ollama.generate": "text_completion",
    "gemini.generate": "generate_content",
    "bedrock.converse": "chat",
}
"""`gen_ai.operation.name` by api. Other exchanges are relayed bytes, and their spans say nothing of GenAI."""

PROVIDERS: Final[Mapping[str, str]] = {
    "openai": "openai",
    "anthropic": "anthropic",
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "deepseek": "deepseek",
    "gemini": "gcp.gemini",
    "groq": "groq",
    "mistral": "mistral_ai",
    "ollama": "ollama",
    "vertex": "gcp.vertex_ai",
    "vllm": "vllm",
}
"""`gen_ai.provider.name` by server family; the convention names no value for servers that people run themselves."""

FINISHES: Final[Mapping[str, str]] = {
    "complete": "stop",
    "truncated": "length",
    "filtered": "content_filter",
}
"""Our neutral words for a finish in the convention's; a finish with calls is `tool_call`."""

_SECONDS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS: Final = tuple(float(4**n) for n in range(14))


class Tracing:
    """Spans and metrics of one observer. `observe_all` never waits for a collector; one thread at a time.

    `upstreams` are host and port by name. `failed` is called from any thread each time something was lost.
    """

    def __init__(
        self,
        exporter: SpanExporter | None,
        reader: MetricReader | None,
        *,
        version: str,
        upstreams: Mapping[str, tuple[str, int]],
        failed: Callable[[], None],
        newer_names: bool = False,
    ) -> None:
        self._upstreams = upstreams
        self._failed = failed
        self._open: OrderedDict[str, list[EventOfExchange]] = OrderedDict()
        self._exporter = None if exporter is None else _Counting(exporter, failed)
        self._given = 0
        self._propagator = TraceContextTextMapPropagator()
        resource = _resource(version)
        self._spans = TracerProvider(
            resource=resource, shutdown_on_exit=False, span_limits=SpanLimits(max_attribute_length=TEXT_MAX)
        )
        if self._exporter is not None:
            self._spans.add_span_processor(
                BatchSpanProcessor(
                    self._exporter, max_queue_size=QUEUE_SPANS + EXCHANGE_SPANS, max_export_batch_size=512
                )
            )
        schema = None if newer_names else Schemas.V1_41_0.value  # the new repository has none
        self._tracer = self._spans.get_tracer("turngate", version, schema_url=schema)
        self._meters = MeterProvider(
            metric_readers=() if reader is None else (reader,), resource=resource, shutdown_on_exit=False
        )
        meter = self._meters.get_meter("turngate", version, schema_url=schema)
        self._instruments = None if reader is None else _Instruments(meter, newer_names=newer_names)

    def observe_all(self, events: Iterable[AnyEvent]) -> None:
        """Take events in the order in which they happened."""
        for event in events:
            if isinstance(event, ExchangeEnded):
                self._end(event)
            elif isinstance(event, EventOfExchange):
                self._keep(event)

    def close(self) -> None:
        """Send what waits, for at most CLOSE_S seconds."""
        # The SDK waits up to 30 s for an export under way and takes no other bound.
        closing = threading.Thread(target=self._shutdown, name="turngate-otlp-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _shutdown(self) -> None:
        self._spans.shutdown()
        self._meters.shutdown()

    def _keep(self, event: EventOfExchange) -> None:
        kept = self._open.get(event.operation)
        if kept is None:
            if len(self._open) >= OPEN_MAX:
                self._open.popitem(last=False)
            kept = self._open[event.operation] = []
        if len(kept) < EVENTS_MAX:
            kept.append(event)

    def _end(self, event: ExchangeEnded) -> None:
        happened = self._open.pop(event.operation, [])
        common = self._common(event)
        if self._instruments is not None:
            self._instruments.record(event, common)
        if self._exporter is None:
            return
        if self._given - self._exporter.taken > QUEUE_SPANS:
            self._failed()
            return
        root = self._tracer.start_span(
            _name(event),
            self._parent(event),
            SpanKind.CLIENT,
            common,
            start_time=_ns(event.at_s - event.total_s),
        )
        if root.is_recording():
            self._describe(root, event, happened)
        root.end(_ns(event.at_s))

    def _parent(self, event: ExchangeEnded) -> Context:
        return self._propagator.extract({"traceparent": event.traceparent}, Context())

    def _describe(self, root: Span, event: ExchangeEnded, happened: Iterable[EventOfExchange]) -> None:
        root.set_attributes(_outcome(event, calls=any(isinstance(each, CallDecided) for each in happened)))
        for each in happened:
            name, attributes = _as_span_event(each)
            root.add_event(name, attributes, _ns(each.at_s))
        if event.error_type:
            told = (event.outcome, *event.reasons)
            root.set_status(Status(StatusCode.ERROR, ": ".join(told)[:TEXT_MAX]))
        context = trace.set_span_in_context(root, Context())
        self._given += 1
        for name, begin_s, end_s in phases(event):
            self._tracer.start_span(name, context, start_time=_ns(begin_s)).end(_ns(end_s))
            self._given += 1

    def _common(self, event: ExchangeEnded) -> Attributes:
        """What spans and metrics share, and what a sampler may want to know."""
        attributes: Attributes = {}
        if operation := OPERATIONS.get(event.api):
            attributes["gen_ai.operation.name"] = operation
            attributes["gen_ai.provider.name"] = _provider(event)
            if event.model:
                attributes["gen_ai.request.model"] = shown_model(event.model)
            if event.answered_model:
                attributes["gen_ai.response.model"] = shown_model(event.answered_model)
        if server := self._upstreams.get(event.upstream):
            attributes["server.address"], attributes["server.port"] = server
        if event.error_type:
            attributes["error.type"] = event.error_type
        return attributes


def open_tracing(
    endpoint: str, *, version: str, upstreams: Mapping[str, tuple[str, int]], failed: Callable[[], None]
) -> Tracing:
    """Spans and metrics to a collector over OTLP/HTTP (protobuf). `endpoint` is its base URL; empty: as the
    environment says. OTEL_TRACES_EXPORTER=none and OTEL_METRICS_EXPORTER=none leave one of them out.

    Raises ValueError and the SDK's own errors for variables that it cannot use.
    """
    # It logs each failed attempt, with the collector's words; failures are counted here instead.
    logger = logging.getLogger("opentelemetry")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    base = endpoint.rstrip("/")
    exporter, reader = None, None
    if os.environ.get("OTEL_TRACES_EXPORTER") != "none":
        exporter = OTLPSpanExporter(endpoint=f"{base}/v1/traces" if base else None)
    if os.environ.get("OTEL_METRICS_EXPORTER") != "none":
        metrics = _MetricExporter(endpoint=f"{base}/v1/metrics" if base else None)
        metrics.failed = failed
        reader = PeriodicExportingMetricReader(metrics)
    opted = os.environ.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(",")
    return Tracing(
        exporter,
        reader,
        version=version,
        upstreams=upstreams,
        failed=failed,
        newer_names="gen_ai_latest_experimental" in map(str.strip, opted),
    )


def phases(event: ExchangeEnded) -> list[tuple[str, float, float]]:
    """(name, begin, end) of an exchange's phases, Unix seconds. Durations were measured; where a phase lies follows
    from the order in which they come. In `observe` judging overlaps the wait for the provider."""
    end_s = event.at_s
    begin_s = end_s - event.total_s
    found = []
    at_s = begin_s
    for name, duration_s in (("turngate.judge", event.judge_s), ("turngate.claim", event.claim_s)):
        if duration_s > 0:
            found.append((name, at_s, at_s := min(at_s + duration_s, end_s)))
    if event.first_byte_s > 0:
        answer_s = min(begin_s + event.first_byte_s, end_s)
        sent_s = min(at_s, answer_s) if event.claim_s > 0 else begin_s
        found += [("turngate.wait", sent_s, answer_s), ("turngate.receive", answer_s, end_s)]
    if event.hold_s > 0:
        found.append(("turngate.hold", max(begin_s, end_s - event.hold_s), end_s))
    return found


def _name(event: ExchangeEnded) -> str:
    operation = OPERATIONS.get(event.api)
    if operation is None:
        return f"relay {event.upstream}".rstrip()
    return f"{operation} {shown_model(event.model)}".rstrip()


def _provider(event: ExchangeEnded) -> str:
    """Who speaks here, or whose dialect it is where the server is nobody's that has a name."""
    dialect = event.api.partition(".")[0]
    return PROVIDERS.get(event.server) or PROVIDERS.get(dialect, dialect)


def _outcome(event: ExchangeEnded, *, calls: bool) -> Attributes:
    """What is known only at the end."""
    attributes: Attributes = {
        "turngate.operation": event.operation,
        "turngate.upstream": event.upstream,
        "turngate.api": event.api,
        "turngate.stage": event.stage,
        "turngate.verdict": event.verdict,
        "turngate.outcome": event.outcome,
        "turngate.reasons": event.reasons,
        "turngate.provider": event.provider,
        "turngate.provider_reason": event.provider_reason,
        "turngate.client": event.client,
    }
    if event.status:
        attributes["http.response.status_code"] = event.status
    if event.api in OPERATIONS:
        if event.stream:
            attributes["gen_ai.request.stream"] = True
        if event.finish:
            finish = FINISHES.get(event.finish, event.finish)
            attributes["gen_ai.response.finish_reasons"] = (
                "tool_call" if calls and finish == "stop" else finish,
            )
        if event.input_tokens >= 0:
            attributes["gen_ai.usage.input_tokens"] = event.input_tokens
        if event.output_tokens >= 0:
            attributes["gen_ai.usage.output_tokens"] = event.output_tokens
    return {key: value for key, value in attributes.items() if value not in ("", ())}


def _as_span_event(event: EventOfExchange) -> tuple[str, Attributes]:
    """Its tag and its fields, without what the span says already. No event holds content."""
    fields = msgspec.structs.asdict(event)
    for known in ("at_s", "operation", "upstream", "api"):
        fields.pop(known, None)
    attributes = {f"turngate.{key}": value for key, value in fields.items() if value != ""}
    return str(event.__struct_config__.tag), attributes


def _ns(at_s: float) -> int:
    return int(at_s * 1e9)


def _resource(version: str) -> Resource:
    """What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say wins."""
    resource = Resource.create({SERVICE_VERSION: version})
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):  # the SDK's own default
        return resource.merge(Resource({SERVICE_NAME: "turngate"}))
    return resource


class _Instruments:
    """The metrics of the conventions, in one of their two generations of names."""

    def __init__(self, meter: Meter, *, newer_names: bool) -> None:
        def tokens(name: str) -> Histogram:
            return meter.create_histogram(name, "{token}", explicit_bucket_boundaries_advisory=_TOKENS)

        name = "gen_ai.client.inference.duration" if newer_names else "gen_ai.client.operation.duration"
        self._duration = meter.create_histogram(name, "s", explicit_bucket_boundaries_advisory=_SECONDS)
        if newer_names:
            self._input = tokens("gen_ai.client.inference.operation.input_tokens")
            self._output = tokens("gen_ai.client.inference.operation.output_tokens")
        else:
            self._input = self._output = tokens("gen_ai.client.token.usage")
        self._typed = not newer_names

    def record(self, event: ExchangeEnded, common: Attributes) -> None:
        """Count one exchange, if it is one of those that the conventions are about."""
        if event.api not in OPERATIONS:
            return
        self._duration.record(event.total_s, common)
        about = {key: value for key, value in common.items() if key != "error.type"}
        for instrument, kind, count in (
            (self._input, "input", event.input_tokens),
            (self._output, "output", event.output_tokens),
        ):
            if count >= 0:
                instrument.record(count, {**about, "gen_ai.token.type": kind} if self._typed else about)


class _Counting(SpanExporter):
    """Counts what left the queue, and tells of what could not be sent."""

    def __init__(self, inner: SpanExporter, failed: Callable[[], None]) -> None:
        self._inner = inner
        self._failed = failed
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self._failed()
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class _MetricExporter(OTLPMetricExporter):
    """Tells of what could not be sent."""

    failed: Callable[[], None]

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: object
    ) -> MetricExportResult:
        result = super().export(metrics_data, timeout_millis, **kwargs)
        if result is not MetricExportResult.SUCCESS:
            self.failed()
        return result
