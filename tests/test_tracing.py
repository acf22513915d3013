"""Exchanges as OpenTelemetry spans and metrics: what they say, whose children they are, and that nobody waits for them."""

import asyncio
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from turngate.proxy.supervisor import ObserverSettings, Supervisor
from turngate.telemetry import tracing as tracing_module
from turngate.telemetry.events import (
    AnyEvent,
    CallDecided,
    ExchangeEnded,
    FindingMade,
    PreviewRetracted,
    StateChanged,
)
from turngate.telemetry.spool import Spool
from turngate.telemetry.tracing import OPERATIONS, TEXT_MAX, Tracing, open_tracing, phases

NOW: Final = 1_750_000_000.0
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
UPSTREAMS: Final = {"openai": ("api.openai.com", 443)}


def ended(**fields: Any) -> ExchangeEnded:
    """An exchange that went well."""
    usual: dict[str, Any] = {
        "at_s": NOW,
        "operation": "op-1",
        "upstream": "openai",
        "api": "openai.chat",
        "model": "gpt-4.1",
        "stream": True,
        "stage": "enforce-tools",
        "verdict": "legal",
        "outcome": "passed",
        "status": 200,
        "error_type": "",
        "messages": 3,
        "request_bytes": 900,
        "response_bytes": 1200,
        "judge_s": 0.001,
        "claim_s": 0.002,
        "first_byte_s": 0.5,
        "total_s": 2.0,
        "server": "openai",
    }
    return ExchangeEnded(**(usual | fields))


ABOUT: Final = {"operation": "op-1", "upstream": "openai", "api": "openai.chat"}
FINDING: Final = FindingMade(
    at_s=NOW - 1.9, **ABOUT, reason="result.orphan", level="hard", at="/messages/1", action="rejected"
)
RELEASED: Final = CallDecided(
    at_s=NOW - 0.1, **ABOUT, decision="released", reason="", held=True, hold_s=0.4, hold_bytes=900
)
RETRACTED: Final = PreviewRetracted(
    at_s=NOW - 0.1, **ABOUT, cause="stream.truncated", enforced=True, preview_bytes=70
)


def spans_of(*events: AnyEvent) -> list[ReadableSpan]:
    """The spans that these events make, in the order in which they end."""
    exporter = InMemorySpanExporter()
    failures: list[None] = []
    tracing = Tracing(exporter, None, version="1", upstreams=UPSTREAMS, failed=lambda: failures.append(None))
    tracing.observe_all(events)
    tracing.close()
    assert not failures
    return list(exporter.get_finished_spans())


def root_of(*events: AnyEvent) -> ReadableSpan:
    [root] = [span for span in spans_of(*events) if span.kind is SpanKind.CLIENT]
    return root


# -- what a span says -------------------------------------------------------------------------------------------------

USUAL: Final = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "gpt-4.1",
    "gen_ai.request.stream": True,
    "server.address": "api.openai.com",
    "server.port": 443,
    "http.response.status_code": 200,
    "turngate.operation": "op-1",
    "turngate.upstream": "openai",
    "turngate.api": "openai.chat",
    "turngate.stage": "enforce-tools",
    "turngate.verdict": "legal",
    "turngate.outcome": "passed",
}

ATTRIBUTES: Final[dict[str, tuple[ExchangeEnded, str, dict[str, Any]]]] = {
    # name: (event, span name, what differs from USUAL; None: is not there)
    "a streamed answer": (ended(), "chat gpt-4.1", {}),
    "a whole one": (ended(stream=False), "chat gpt-4.1", {"gen_ai.request.stream": None}),
    "what the provider said of itself": (
        ended(answered_model="gpt-4.1-2025-04-14", finish="complete", input_tokens=12, output_tokens=0),
        "chat gpt-4.1",
        {
            "gen_ai.response.model": "gpt-4.1-2025-04-14",
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.usage.input_tokens": 12,
            "gen_ai.usage.output_tokens": 0,
        },
    ),
    "the length limit": (
        ended(outcome="incomplete", finish="truncated"),
        "chat gpt-4.1",
        {"turngate.outcome": "incomplete", "gen_ai.response.finish_reasons": ("length",)},
    ),
    "another server of the same dialect": (
        ended(server="azure", upstream="ours"),
        "chat gpt-4.1",
        {
            "gen_ai.provider.name": "azure.ai.openai",
            "server.address": None,
            "server.port": None,
            "turngate.upstream": "ours",
        },
    ),
    "a server without a name speaks somebody's dialect": (
        ended(server="gateway", api="anthropic.messages"),
        "chat gpt-4.1",
        {"gen_ai.provider.name": "anthropic", "turngate.api": "anthropic.messages"},
    ),
    "a refusal": (
        ended(
            verdict="illegal",
            outcome="refused",
            status=400,
            error_type="policy_sequence",
            reasons=("result.orphan", "call.duplicate_id"),
            client="openai-python/3",
        ),
        "chat gpt-4.1",
        {
            "turngate.verdict": "illegal",
            "turngate.outcome": "refused",
            "turngate.reasons": ("result.orphan", "call.duplicate_id"),
            "turngate.client": "openai-python/3",
            "http.response.status_code": 400,
            "error.type": "policy_sequence",
        },
    ),
    "what no model was named in": (ended(model=""), "chat", {"gen_ai.request.model": None}),
    "a model's name that is no label": (
        ended(model="x\x1b[2J", answered_model="y" * 1000),
        "chat other",
        {"gen_ai.request.model": "other", "gen_ai.response.model": "other"},
    ),
    "a surface that is not judged": (
        ended(api="gemini.generate", model="", stream=False, upstream="gemini", server="gemini"),
        "generate_content",
        {
            "gen_ai.operation.name": "generate_content",
            "gen_ai.provider.name": "gcp.gemini",
            "gen_ai.request.model": None,
            "gen_ai.request.stream": None,
            "server.address": None,
            "server.port": None,
            "turngate.upstream": "gemini",
            "turngate.api": "gemini.generate",
        },
    ),
    "relayed bytes say nothing of GenAI": (
        ended(api="", model="", stream=False, verdict="unjudged"),
        "relay openai",
        {
            **{key: None for key in USUAL if key.startswith("gen_ai.")},
            "turngate.api": None,
            "turngate.verdict": "unjudged",
        },
    ),
}


@pytest.mark.parametrize(("event", "name", "differs"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_a_span_says_what_the_conventions_ask_for(
    event: ExchangeEnded, name: str, differs: Mapping[str, Any]
) -> None:
    root = root_of(event)
    assert root.name == name
    expected = {key: value for key, value in {**USUAL, **differs}.items() if value is not None}
    assert dict(root.attributes or {}) == expected
    assert (root.start_time, root.end_time) == (1_749_999_998 * 10**9, 1_750_000_000 * 10**9)


def test_a_finish_with_calls_is_one_for_tools() -> None:
    attributes = root_of(RELEASED, ended(finish="complete")).attributes or {}
    assert attributes["gen_ai.response.finish_reasons"] == ("tool_call",)


INTERRUPTED: Final = {
    "retracted": ("provider_stream_broken", ("stream.truncated",), "retracted: stream.truncated"),
    "unknown": ("provider_closed", (), "unknown"),
    "client_gone": ("caller_gone", (), "client_gone"),
    "provider_error": ("provider_rate_limit", (), "provider_error"),
}


@pytest.mark.parametrize("outcome", INTERRUPTED)
def test_an_interrupted_stream_is_an_error_with_the_usage_that_was_told(outcome: Any) -> None:
    error_type, reasons, description = INTERRUPTED[outcome]
    root = root_of(ended(outcome=outcome, error_type=error_type, reasons=reasons, input_tokens=7))
    attributes = root.attributes or {}
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, description)
    assert attributes["error.type"] == error_type
    assert attributes["gen_ai.usage.input_tokens"] == 7
    assert "gen_ai.usage.output_tokens" not in attributes


@pytest.mark.parametrize("outcome", ["passed", "incomplete"])
def test_what_the_provider_ended_itself_is_no_error(outcome: Any) -> None:
    assert root_of(ended(outcome=outcome)).status.status_code is StatusCode.UNSET


def test_what_happened_on_the_way_are_the_spans_events() -> None:
    moved = StateChanged(at_s=NOW, operation="op-1", upstream="openai", before="", after="SENT", how="")
    other = msgspec.structs.replace(FINDING, operation="op-2")
    root = root_of(FINDING, other, moved, RETRACTED, ended(outcome="retracted", error_type="x"))
    happened = [(each.name, each.timestamp, dict(each.attributes or {})) for each in root.events]
    assert happened == [
        (
            "finding_made",
            int((NOW - 1.9) * 1e9),
            {
                "turngate.reason": "result.orphan",
                "turngate.level": "hard",
                "turngate.at": "/messages/1",
                "turngate.action": "rejected",
            },
        ),
        (
            "preview_retracted",
            int((NOW - 0.1) * 1e9),
            {"turngate.cause": "stream.truncated", "turngate.enforced": True, "turngate.preview_bytes": 70},
        ),
    ]


def test_what_never_ends_is_forgotten_and_what_never_stops_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_module, "OPEN_MAX", 3)
    monkeypatch.setattr(tracing_module, "EVENTS_MAX", 5)
    begun = [msgspec.structs.replace(FINDING, operation=f"op-{n}") for n in range(4)]
    assert root_of(*begun, ended(operation="op-0")).events == ()
    assert len(root_of(*begun, ended(operation="op-1")).events) == 1
    assert len(root_of(*[FINDING] * 9, ended()).events) == 5


def test_no_text_is_longer_than_its_bound() -> None:
    root = root_of(msgspec.structs.replace(FINDING, at="/" + "x" * 999), ended(client="y" * 999))
    texts = [*(root.attributes or {}).values(), *((root.events[0].attributes or {}).values())]
    assert max(len(text) for text in texts if isinstance(text, str)) == TEXT_MAX


# -- whose children ---------------------------------------------------------------------------------------------------


def test_the_apps_trace_goes_on() -> None:
    spans = spans_of(ended(traceparent=f"00-{TRACE}-{PARENT}-01"))
    root = spans[-1]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    assert len({span.context.span_id for span in spans} | {int(PARENT, 16)}) == len(spans) + 1


def test_what_the_app_does_not_sample_is_not_sent() -> None:
    assert spans_of(ended(traceparent=f"00-{TRACE}-{PARENT}-00")) == []


BAD_PARENTS: Final = [
    "",
    "x",
    f"00-{'0' * 32}-{PARENT}-01",
    f"ff-{TRACE}-{PARENT}-01",
    f"00-{TRACE}-{PARENT}",
]


@pytest.mark.parametrize("traceparent", BAD_PARENTS)
def test_without_a_well_formed_context_a_trace_begins(traceparent: str) -> None:
    first, second = (root_of(ended(traceparent=traceparent)) for _ in range(2))
    assert first.parent is None
    assert first.context.trace_id not in (0, second.context.trace_id, int(TRACE, 16))


PHASES: Final[dict[str, tuple[ExchangeEnded, list[tuple[str, float, float]]]]] = {
    # name: (event, phases in seconds after the exchange's begin)
    "enforced": (
        ended(hold_s=0.4),
        [
            ("turngate.judge", 0.0, 0.001),
            ("turngate.claim", 0.001, 0.003),
            ("turngate.wait", 0.003, 0.5),
            ("turngate.receive", 0.5, 2.0),
            ("turngate.hold", 1.6, 2.0),
        ],
    ),
    "observed: judged while the provider works": (
        ended(claim_s=0.0),
        [("turngate.judge", 0.0, 0.001), ("turngate.wait", 0.0, 0.5), ("turngate.receive", 0.5, 2.0)],
    ),
    "refused: nothing was asked": (
        ended(claim_s=0.0, first_byte_s=0.0, total_s=0.002),
        [("turngate.judge", 0.0, 0.001)],
    ),
    "no answer ever began": (
        ended(first_byte_s=0.0),
        [("turngate.judge", 0.0, 0.001), ("turngate.claim", 0.001, 0.003)],
    ),
    "relayed": (
        ended(judge_s=0.0, claim_s=0.0),
        [("turngate.wait", 0.0, 0.5), ("turngate.receive", 0.5, 2.0)],
    ),
}


@pytest.mark.parametrize(("event", "expected"), PHASES.values(), ids=PHASES)
def test_phases_are_children_in_their_order(
    event: ExchangeEnded, expected: list[tuple[str, float, float]]
) -> None:
    *children, root = spans_of(event)
    begin = event.at_s - event.total_s
    found = [
        (span.name, *(round((at or 0) / 1e9 - begin, 5) for at in (span.start_time, span.end_time)))
        for span in children
    ]
    assert found == expected
    assert {span.parent.span_id for span in children if span.parent} <= {root.context.span_id}
    assert all(span.parent for span in children)


seconds = st.floats(0, 1e4)


@given(judge=seconds, claim=seconds, first=seconds, hold=seconds, total=seconds)
def test_a_phase_lies_within_its_exchange_whatever_was_measured(
    judge: float, claim: float, first: float, hold: float, total: float
) -> None:
    event = ended(judge_s=judge, claim_s=claim, first_byte_s=first, hold_s=hold, total_s=total)
    for _, begin_s, end_s in phases(event):
        assert event.at_s - event.total_s <= begin_s <= end_s <= event.at_s


# -- metrics ----------------------------------------------------------------------------------------------------------


def measured(*events: AnyEvent, newer_names: bool) -> dict[str, list[tuple[dict[str, Any], float]]]:
    """Name to attributes and sum of each series."""
    reader = InMemoryMetricReader()
    tracing = Tracing(
        *(None, reader),
        version="1",
        upstreams=UPSTREAMS,
        failed=lambda: pytest.fail("failed"),
        newer_names=newer_names,
    )
    tracing.observe_all(events)
    data = reader.get_metrics_data()
    tracing.close()
    if data is None:
        return {}
    found = data.resource_metrics[0].scope_metrics[0].metrics
    return {
        metric.name: [(dict(point.attributes or {}), point.sum) for point in metric.data.data_points]  # type: ignore[union-attr]
        for metric in found
    }


MEASURED: Final = [
    ended(input_tokens=7, output_tokens=3),
    ended(input_tokens=5),
    ended(api="", input_tokens=1),
]
SERIES: Final = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "gpt-4.1",
    "server.address": "api.openai.com",
    "server.port": 443,
}


def test_metrics_have_the_names_of_the_conventions() -> None:
    assert measured(*MEASURED, newer_names=False) == {
        "gen_ai.client.operation.duration": [(SERIES, 4.0)],
        "gen_ai.client.token.usage": [
            ({**SERIES, "gen_ai.token.type": "input"}, 12),
            ({**SERIES, "gen_ai.token.type": "output"}, 3),
        ],
    }


def test_and_the_newer_ones_where_somebody_opted_in() -> None:
    assert measured(*MEASURED, newer_names=True) == {
        "gen_ai.client.inference.duration": [(SERIES, 4.0)],
        "gen_ai.client.inference.operation.input_tokens": [(SERIES, 12)],
        "gen_ai.client.inference.operation.output_tokens": [(SERIES, 3)],
    }


def test_a_duration_tells_what_went_wrong_and_tokens_do_not() -> None:
    found = measured(ended(error_type="provider_error", input_tokens=1), newer_names=False)
    assert found["gen_ai.client.operation.duration"] == [({**SERIES, "error.type": "provider_error"}, 2.0)]
    assert found["gen_ai.client.token.usage"] == [({**SERIES, "gen_ai.token.type": "input"}, 1)]


# -- collectors that are slow, broken, dead -----------------------------------------------------------------------------


class Stuck(SpanExporter):
    """Takes its first batch and then hangs until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()
        self.sent = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        self.let_go.wait()
        self.sent += len(spans)
        return SpanExportResult.SUCCESS


def test_what_finds_no_room_is_lost_and_counted_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_module, "QUEUE_SPANS", 1000)
    exporter, failures = Stuck(), []
    tracing = Tracing(exporter, None, version="1", upstreams={}, failed=lambda: failures.append(1))
    per_exchange = 5
    tracing.observe_all([ended()] * 200)  # fills a batch, which wakes the exporter
    assert exporter.entered.wait(60)
    tracing.observe_all([ended()] * 1000)
    assert 0 < len(failures) < 1200
    exporter.let_go.set()
    tracing.close()
    assert exporter.sent == per_exchange * (1200 - len(failures))


def test_closing_does_not_wait_for_a_collector_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_module, "CLOSE_S", 0.05)
    exporter = Stuck()
    tracing = Tracing(exporter, None, version="1", upstreams={}, failed=lambda: None)
    tracing.observe_all([ended()])
    tracing.close()  # would hang: the exporter is let go only now
    exporter.let_go.set()


class Broken(SpanExporter):
    """Raises, or fails politely."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.error is not None:
            raise self.error
        return SpanExportResult.FAILURE


@pytest.mark.parametrize("error", [None, ValueError("no")], ids=["fails", "raises"])
def test_a_failed_export_is_counted(error: Exception | None) -> None:
    failures: list[int] = []
    tracing = Tracing(Broken(error), None, version="1", upstreams={}, failed=lambda: failures.append(1))
    tracing.observe_all([ended()])
    tracing.close()
    assert failures == [1]


def test_a_dead_collector_is_counted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    failures: list[int] = []
    tracing = open_tracing(
        f"http://127.0.0.1:{port}", version="1", upstreams={}, failed=lambda: failures.append(1)
    )
    tracing.observe_all([ended()])
    tracing.close()
    assert len(failures) == 2  # spans and metrics
    assert capfd.readouterr() == ("", ""), "the SDK must not write to what may be a command's terminal"


# -- through a real observer ------------------------------------------------------------------------------------------


@dataclass
class Collector:
    """An OTLP/HTTP collector that keeps what it gets: decoded, and as raw bytes."""

    url: str = ""
    raw: list[bytes] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def listening(cls) -> "AsyncIterator[Collector]":
        collector = cls()
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/traces", collector._traces)
        app.router.add_post("/v1/metrics", collector._metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield collector
        finally:
            await runner.cleanup()

    async def _traces(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await self._kept(request))
        for of_resource in message.resource_spans:
            attributes = of_resource.resource.attributes
            self.resources.append({each.key: each.value.string_value for each in attributes})
            self.spans += [span for scope in of_resource.scope_spans for span in scope.spans]
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        message = ExportMetricsServiceRequest.FromString(await self._kept(request))
        self.metrics += [
            metric
            for resource in message.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]
        return web.Response()

    async def _kept(self, request: web.Request) -> bytes:
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.raw.append(await request.read())
        return self.raw[-1]


@asynccontextmanager
async def an_observer(data_dir: Path, **more: Any) -> AsyncIterator[Spool]:
    """A real observer child, and the spool that it reads; ended at the context's end."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    spool = Spool(data_dir / "spool", "i", segment_s=0.05, flush_s=0.0)
    spool.start()
    supervisor = Supervisor(
        ObserverSettings(
            data_dir=str(data_dir), metrics_fd=listeners[0].fileno(), admin_fd=listeners[1].fileno(), **more
        ),
        instance="i",
        emit=lambda event: None,
    )
    supervisor.start()
    reader, writer = await asyncio.open_connection(*listeners[0].getsockname())
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    await reader.read()  # it lives
    writer.close()
    try:
        yield spool
    finally:
        await asyncio.to_thread(spool.close)
        await supervisor.stop()
        for listener in listeners:
            listener.close()


async def test_an_observer_sends_what_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=secret")
    async with Collector.listening() as collector:
        async with an_observer(tmp_path, otlp=collector.url, upstreams=UPSTREAMS) as spool:
            spool.emit(FINDING)
            spool.emit(ended(at_s=time.time(), input_tokens=5, traceparent=f"00-{TRACE}-{PARENT}-01"))
        names = [span.name for span in collector.spans]
        [root] = [span for span in collector.spans if span.name == "chat gpt-4.1"]
        [metric] = [each for each in collector.metrics if each.name == "gen_ai.client.token.usage"]
    assert sorted(names)[1:] == sorted(f"turngate.{name}" for name in ("judge", "claim", "wait", "receive"))
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert [event.name for event in root.events] == ["finding_made"]
    attributes = {each.key: each.value.string_value for each in root.attributes}
    assert attributes["server.address"] == "api.openai.com"
    assert metric.histogram.data_points[0].sum == 5
    assert collector.resources[0]["service.name"] == "turngate"
    assert collector.resources[0]["deployment.environment.name"] == "test"
    assert all(headers["x-token"] == "secret" for headers in collector.headers)


@pytest.mark.parametrize("how", ["named by the environment", "not named", "disabled"])
async def test_the_environment_can_switch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    async with Collector.listening() as collector:
        if how != "not named":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        if how == "disabled":
            monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        async with an_observer(tmp_path) as spool:
            spool.emit(ended(at_s=time.time()))
        assert bool(collector.spans) == (how == "named by the environment")
        assert bool(collector.metrics) == (how == "named by the environment")


def test_the_page_tells_every_name_that_is_sent() -> None:
    page = (Path(__file__).parents[1] / "docs" / "tracing.md").read_text()
    root = root_of(
        ended(
            finish="complete",
            answered_model="m",
            input_tokens=1,
            output_tokens=1,
            error_type="x",
            reasons=("a",),
            provider="accepted",
            provider_reason="a",
            client="c",
        )
    )
    names = {*(root.attributes or {}), *(name for name, _, _ in phases(ended(hold_s=1.0)))}
    names |= set(measured(*MEASURED, newer_names=False)) | set(measured(*MEASURED, newer_names=True))
    names |= set(OPERATIONS.values())
    assert names - set(re.findall(r"`([\w.]+)`", page)) == set()
