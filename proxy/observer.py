"""The observer child: loads the spool, serves metrics and admin. `python -m turngate.proxy.observer SETTINGS_JSON`.

It inherits its two listening sockets and ends when its standard input does, which is when its parent is gone, or on
SIGTERM; both times it first loads what is sealed. Nothing here is on the path of a request.
"""

import asyncio
import os
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import duckdb
import msgspec
from aiohttp import web

from turngate import __version__
from turngate.proxy import control
from turngate.proxy.admin import RolloutDesk, Status, admin_app
from turngate.proxy.control import AutomaticRollback
from turngate.proxy.gates import Evidence
from turngate.proxy.keys import load_or_create_key
from turngate.proxy.rollout import Rung, Stage
from turngate.proxy.rollout_evidence import read_evidence
from turngate.proxy.supervisor import ObserverSettings
from turngate.telemetry.events import AnyEvent
from turngate.telemetry.logs import ExchangeLog
from turngate.telemetry.metrics import Registry
from turngate.telemetry.queries import open_unknowns
from turngate.telemetry.recorder import Recorder

if TYPE_CHECKING:
    from turngate.telemetry.tracing import Tracing

LEDGER: Final = "ledger.sqlite3"
ADMIN_TOKEN_BYTES: Final = 32
LAST_TRIES: Final = 4
"""Before the end: a day file that somebody reads, or that was set aside as corrupt, may be free the next time."""
PAUSE_MIN_S: Final = 0.5
PAUSE_MAX_S: Final = 2.0
PAUSE_PER_COST: Final = 100
"""A load has a fixed price (about 15 ms of CPU), so the pause after it keeps light traffic near 1 % of a core."""

BACKOFF_MAX_S: Final = 5.0

NICENESS: Final = 5
"""Beside a proxy on one core, a load would hold deltas up for milliseconds; so a quarter of the core is left for it
when the proxy takes all it can get. Less would let a busy machine starve it: its end is waited for."""

OTLP_VARIABLES: Final = tuple(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT" for name in ("", "TRACES_", "METRICS_"))
"""Each names a collector, as it does for every program that uses OpenTelemetry."""


def main() -> None:
    """Run until the parent is gone."""
    # Ctrl-C reaches the whole group; when to end is the parent's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    settings = msgspec.json.decode(sys.argv[1], type=ObserverSettings)
    asyncio.run(_observe(settings))


async def _observe(settings: ObserverSettings) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    data_dir = Path(settings.data_dir)
    registry = Audience(__version__)
    registry.set("observer_restarts_total", settings.restart)
    if settings.log != "off":
        registry.add_sink("log", _open_log(settings, registry).observe_all)
    registry.add_sink("rollback", AutomaticRollback(data_dir / LEDGER, _tell).observe_all)
    tracing = _open_tracing(settings, registry)
    if tracing is not None:
        registry.add_sink("otlp", tracing.observe_all)
    recorder = Recorder(
        data_dir / "spool", data_dir / "evidence", registry, retention_days=settings.retention_days
    )
    sites = [
        await _serve(metrics_app(registry, recorder), socket.socket(fileno=settings.metrics_fd)),
        await _serve_admin(data_dir, registry, recorder, socket.socket(fileno=settings.admin_fd)),
    ]
    parent = asyncio.create_task(_end_with_parent(stopping))
    # One thread of its own for DuckDB, so that a scrape never waits for a load.
    with ThreadPoolExecutor(1, "turngate-loader") as loader:
        await _load_until(stopping, data_dir / "evidence", recorder, registry, loader)
    parent.cancel()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)
    for site in sites:
        await site.cleanup()


class Audience(Registry):
    """The registry, and with it all who are told the same events: each once, when it is in the evidence."""

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self._sinks: list[tuple[str, Callable[[Sequence[AnyEvent]], None]]] = []

    def add_sink(self, where: str, sink: Callable[[Sequence[AnyEvent]], None]) -> None:
        """Tell this one too; its failures are counted under `where`."""
        self._sinks.append((where, sink))

    def observe_all(self, events: Iterable[AnyEvent]) -> None:
        """Count the events, then pass them on."""
        told = tuple(events)
        super().observe_all(told)
        for where, sink in self._sinks:
            try:
                sink(told)
            except Exception:  # noqa: BLE001 - counted; these events are loaded, and more are to be
                self.add("observer_failures_total", 1, where)


def _open_log(settings: ObserverSettings, registry: Registry) -> ExchangeLog:
    stderr = sys.stderr.fileno()
    form = settings.log
    if form not in ("text", "json"):
        form = "text" if os.isatty(stderr) else "json"
    return ExchangeLog(stderr, form, lost=lambda lines: registry.add("observer_failures_total", lines, "log"))


def _open_tracing(settings: ObserverSettings, registry: Registry) -> "Tracing | None":
    """Spans and metrics to a collector, where settings or environment name one."""
    named = settings.otlp or any(os.environ.get(name) for name in OTLP_VARIABLES)
    if not named or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    told = False

    def failed(what: str = "cannot send to the collector") -> None:
        nonlocal told
        registry.add("observer_failures_total", 1, "otlp")
        if not told:  # the counter tells the rest
            told = True
            print(f"turngate observer: otlp: {what}", file=sys.stderr, flush=True)

    try:
        # Not above: the SDK takes 14 MB and 0.2 s that nobody should pay who does not use it.
        from turngate.telemetry.tracing import open_tracing

        return open_tracing(settings.otlp, version=__version__, upstreams=settings.upstreams, failed=failed)
    except Exception as exc:  # noqa: BLE001 - counted and told; variables of the SDK's must not stop the evidence
        failed(f"not started: {type(exc).__name__}")
        return None


def metrics_app(registry: Registry, recorder: Recorder) -> web.Application:
    """`/metrics` and a line that points to it; nothing here changes anything."""

    async def metrics(request: web.Request) -> web.Response:
        registry.set("evidence_lag_seconds", recorder.lag_s())
        body, content_type = registry.expose(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def index(_request: web.Request) -> web.Response:
        return web.Response(text="Turngate: metrics are at /metrics\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/", index)
    return app


async def _serve_admin(
    data_dir: Path, registry: Registry, recorder: Recorder, listener: socket.socket
) -> web.AppRunner:
    def status() -> Status:
        return Status(
            version=__version__,
            evidence_rows=int(registry.value("evidence_rows_total")),
            evidence_lag_s=recorder.lag_s(),
            spool_bytes=int(registry.value("spool_bytes")),
            observer_restarts=int(registry.value("observer_restarts_total")),
        )

    token = load_or_create_key(data_dir / "keys" / "admin.token", ADMIN_TOKEN_BYTES).hex()
    host = listener.getsockname()[0]
    desk = RolloutDesk(data_dir / LEDGER, partial(_gathered, data_dir / "evidence"))
    return await _serve(admin_app(host=host, token=token, status=status, rollout=desk), listener)


def _gathered(evidence_dir: Path, rungs: Sequence[Rung], rung: Rung, to: Stage) -> Evidence:
    return read_evidence(evidence_dir, rungs, rung, to, now_s=time.time())


def _tell(text: str) -> None:
    print(f"turngate observer: {text}", file=sys.stderr, flush=True)


async def _serve(app: web.Application, listener: socket.socket) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    return runner


async def _end_with_parent(stopping: asyncio.Event) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while await reader.read(4096):
        pass  # nothing is said on this pipe; only its end counts
    stopping.set()


async def _load_until(
    stopping: asyncio.Event,
    evidence_dir: Path,
    recorder: Recorder,
    registry: Registry,
    loader: ThreadPoolExecutor,
) -> None:
    """Load again and again, and once more at the end."""
    in_loader = asyncio.get_running_loop().run_in_executor

    async def tried(where: str, attempt: Awaitable[object]) -> bool:
        try:
            await attempt
        except (OSError, ValueError, duckdb.Error, sqlite3.Error) as exc:
            registry.add("observer_failures_total", 1, where)
            print(f"turngate observer: {where}: {exc}", file=sys.stderr, flush=True)
            return False
        return True

    await tried("restore", in_loader(loader, _restore, evidence_dir, registry))
    await tried("restore", in_loader(loader, restore_orders, evidence_dir.with_name(LEDGER), registry))
    backoff_s = PAUSE_MIN_S
    while not stopping.is_set():
        begun_s = time.monotonic()
        fine = await tried("load", in_loader(loader, recorder.load_pending)) and not recorder.behind
        cost_s = time.monotonic() - begun_s
        backoff_s = PAUSE_MIN_S if fine else min(BACKOFF_MAX_S, backoff_s * 2)
        pause_s = min(PAUSE_MAX_S, max(PAUSE_MIN_S, cost_s * PAUSE_PER_COST)) if fine else backoff_s
        await _pause(stopping, pause_s)
    for _ in range(LAST_TRIES):
        if await tried("load", in_loader(loader, recorder.load_pending)) and not recorder.behind:
            break
        await asyncio.sleep(PAUSE_MIN_S)
    await in_loader(loader, recorder.close)


def _restore(evidence_dir: Path, registry: Registry) -> None:
    """The age of an UNKNOWN dispatch must survive the observer that saw it begin."""
    registry.restore_unknown(open_unknowns(evidence_dir))


def restore_orders(ledger: Path, registry: Registry) -> None:
    """Which orders stand, too: the proxy tells each only once. All others heard of them in that earlier life."""
    if ledger.exists():
        orders = control.read(ledger).in_force.values()
        told = [control.ordered(order, instance="", at_s=order.set_s) for order in orders]
        Registry.observe_all(registry, told)


async def _pause(stopping: asyncio.Event, pause_s: float) -> None:
    try:
        await asyncio.wait_for(stopping.wait(), pause_s)
    except TimeoutError:
        return  # the pause is over


if __name__ == "__main__":
    main()
