"""The proxy process: listeners, exchanges, ledger, spool and the observer child, from start to drained end."""

import asyncio
import contextlib
import errno
import gc
import os
import resource
import secrets
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import turngate
from turngate.proxy import control, wire
from turngate.proxy.access import accesses
from turngate.proxy.app_side import App, Listener
from turngate.proxy.config import Address, Settings, SettingsError
from turngate.proxy.control import FileWatcher, Watcher
from turngate.proxy.exchange import Exchange, Services
from turngate.proxy.judging import Judge
from turngate.proxy.keys import load_or_create_key
from turngate.proxy.ledger_sqlite import Ledger, LedgerDown
from turngate.proxy.rollout import Order
from turngate.proxy.routes import Routes
from turngate.proxy.supervisor import ObserverSettings, Supervisor
from turngate.proxy.upstream import Origin, Pool
from turngate.proxy.wire import Framing
from turngate.telemetry.events import FailureCounted, ProxyPulse, ProxyStarted, ProxyStopped
from turngate.telemetry.spool import Spool
from turngate.validators.gate import HoldBudget
from turngate.validators.ledger import Retries
from turngate.validators.previews import Marks
from turngate.validators.schemas import Schemas

WATCHED: Final = ("stage", "scopes", "conversation_from", "promotion", "rollback")
"""Settings that a running proxy takes over when their file changes."""
LEDGER_RETRY_S: Final = 5.0
PULSE_S: Final = 5.0
PULSE_LOOKS: Final = 10
"""How often the loop's lag is measured within a pulse."""
ORPHAN_S: Final = 3.0
"""The observer of a proxy that was killed loads what is sealed before it ends, and holds its two ports meanwhile."""


class StartError(Exception):
    """The proxy cannot start; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Listening:
    """The three listening sockets, bound before anything else happens so that a port in use is told at once."""

    data: socket.socket
    metrics: socket.socket
    admin: socket.socket

    @classmethod
    def bind(cls, settings: Settings) -> "Listening":
        """Raises StartError."""
        bound: list[socket.socket] = []
        try:
            bound.append(_bind("listen", settings.listen))
            for name in ("metrics", "admin"):
                bound.append(_bind(name, getattr(settings, name), patience_s=ORPHAN_S))
        except StartError:
            for each in bound:
                each.close()
            raise
        return cls(*bound)

    def close(self) -> None:
        for each in (self.data, self.metrics, self.admin):
            each.close()


@dataclass(frozen=True, slots=True)
class Source:
    """The settings file, and how it is read again, with the same flags over it."""

    path: Path
    reread: Callable[[], Settings]


class Proxy:
    """One proxy process. `start`, then `drain`; both in its event loop."""

    def __init__(self, settings: Settings, listening: Listening, source: Source | None = None) -> None:
        self.settings = settings
        self.listening = listening
        self.instance = secrets.token_hex(8)
        self.ready = False
        self._exchanges: set[Exchange] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._hurry = asyncio.Event()
        loop = self._loop = asyncio.get_running_loop()
        data_dir = settings.data_dir
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.spool = Spool(data_dir / "spool", self.instance, bytes_max=settings.spool.bytes_max)
        self.ledger = Ledger(
            data_dir / "ledger.sqlite3",
            instance=self.instance,
            emit=self.spool.emit,
            loop=loop,
            lease_s=settings.ledger.lease_s,
        )
        self.supervisor = Supervisor(
            ObserverSettings(
                data_dir=str(data_dir),
                metrics_fd=listening.metrics.fileno(),
                admin_fd=listening.admin.fileno(),
                log=settings.log,
                otlp=settings.otlp.endpoint,
                upstreams={name: _place(upstream.url) for name, upstream in settings.upstreams.items()},
            ),
            instance=self.instance,
            emit=self.spool.emit,
        )
        self._ledger_path = data_dir / "ledger.sqlite3"
        self._control = Watcher(
            self._ledger_path,
            changed=self._hear,
            failed=lambda error: self._failed("control", error),
        )
        self._settings_watch: FileWatcher[Settings] | None = None
        if source is not None:
            self._settings_watch = FileWatcher(
                source.path,
                source.reread,
                changed=self._hear_settings,
                failed=lambda error: self._failed("settings", error),
            )
        self._pool = _pool(settings, listening)
        digest_key = load_or_create_key(data_dir / "keys" / "digest.key", 32)
        self._services = Services(
            settings=settings,
            ladder=settings.ladder(digest_key),
            routes=Routes(settings),
            pool=self._pool,
            ledger=self.ledger,
            emit=self.spool.emit,
            monotonic=time.monotonic,
            wall=time.time,
            new_operation=_operations().__next__,
            judge=Judge(),
            digest_key=digest_key,
            instance=self.instance,
            holds=HoldBudget(settings.limits.hold_all_bytes),
            schemas=Schemas(),
            marks=Marks(time.monotonic, digest_key),
            retries=Retries(),
        )
        self._listener = Listener(self._handle, self._failed)
        self._server: asyncio.Server | None = None
        self._ledger_retry: asyncio.Task[None] | None = None
        self._pulse: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the ledger, start the observer, accept requests."""
        self.spool.start()
        self.spool.emit(
            ProxyStarted(
                at_s=time.time(), instance=self.instance, version=turngate.__version__, pid=os.getpid()
            )
        )
        if not self._open_ledger():
            self._ledger_retry = asyncio.create_task(self._retry_ledger())
        self._control.start()
        if self._settings_watch is not None:
            self._settings_watch.start()
        self.supervisor.start()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._listener, sock=self.listening.data, backlog=4096)
        # What start-up made lives as long as the process: a full collection over it costs 11 to 14 ms each time.
        gc.collect()
        gc.freeze()
        self._pulse = asyncio.create_task(self._tell_pulse())
        self.ready = True

    async def drain(self) -> None:
        """Readiness off, let open exchanges end for as long as is set, end the rest loudly, write everything down.

        New requests are still taken meanwhile: a load balancer learns late that we are leaving.
        """
        self.ready = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_s):
                await self._hurried(self.settings.linger_s)
                await self._idle.wait()
        left = len(self._exchanges)
        if self._server is not None:
            self._server.close()
        for exchange in list(self._exchanges):
            exchange.stop()
        await self._listener.shutdown(1.0)
        await self._pool.close()
        await asyncio.to_thread(self._stop_watching)
        for task in (self._ledger_retry, self._pulse):
            if task is not None:
                task.cancel()
        await self.ledger.close()
        self.spool.emit(ProxyStopped(at_s=time.time(), instance=self.instance, open_exchanges=left))
        await asyncio.to_thread(self.spool.close)
        await self.supervisor.stop()
        self.listening.close()

    async def _hurried(self, at_most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), at_most_s)

    def hurry(self) -> None:
        """Do not wait for open exchanges any longer."""
        self._hurry.set()
        self._idle.set()

    async def _handle(self, app: App) -> bool:
        """Carry one request through; True where its connection may carry another one."""
        if app.head.target.startswith("/-/"):
            return self._health(app)
        exchange = Exchange(self._services, app)
        self._exchanges.add(exchange)
        self._idle.clear()
        try:
            return await exchange.run() and self.ready
        finally:
            self._exchanges.discard(exchange)
            if not self._exchanges:
                self._idle.set()

    def _health(self, app: App) -> bool:
        """`/-/healthz`: the process answers. `/-/readyz`: it wants new requests."""
        match app.head.target.partition("?")[0]:
            case "/-/healthz":
                status, body = 200, b"ok\n"
            case "/-/readyz":
                status, body = (200, b"ready\n") if self.ready else (503, b"draining\n")
            case _:
                status, body = 404, b"there are /-/healthz and /-/readyz\n"
        headers = [("content-type", "text/plain; charset=utf-8")]
        keep_alive = app.keeps_alive and app.at_end
        app.start(wire.own_head(status, headers, len(body), close=not keep_alive), Framing.LENGTH)
        if app.head.method != "HEAD":
            app.send(body)
        return keep_alive

    async def _tell_pulse(self) -> None:
        """How the process is doing, while there is work, and once when there is none any more."""
        worked = False
        while True:
            lag_s = 0.0
            for _ in range(PULSE_LOOKS):
                due_s = self._loop.time() + PULSE_S / PULSE_LOOKS
                await asyncio.sleep(PULSE_S / PULSE_LOOKS)
                lag_s = max(lag_s, self._loop.time() - due_s)
            if worked or self._exchanges:
                streams = [
                    each for each in self._exchanges if each.sequence is not None and each.sequence.stream
                ]
                self.spool.emit(
                    ProxyPulse(
                        at_s=time.time(),
                        instance=self.instance,
                        open_exchanges=len(self._exchanges),
                        open_streams=len(streams),
                        held_bytes=sum(each.reply.held_bytes for each in streams),
                        eventloop_lag_s=lag_s,
                    )
                )
            worked = bool(self._exchanges)

    def _stop_watching(self) -> None:
        if self._settings_watch is not None:
            self._settings_watch.stop()
        self._control.stop()

    def _hear_settings(self, settings: Settings) -> None:
        """Called in a watcher's thread. What is in `WATCHED` is taken over; all else is so from the next start on."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._redeclared, settings)
        try:
            control.declare(self._ledger_path, settings.declared())
        except sqlite3.Error as error:
            self._failed("control", error)

    def _redeclared(self, settings: Settings) -> None:
        services = self._services
        services.ladder.redeclare(settings.rungs(), settings.stage, sticky_header=settings.conversation_from)
        changed = services.settings.model_copy(update={name: getattr(settings, name) for name in WATCHED})
        # Open exchanges keep what they began with.
        self._services = replace(services, settings=changed)

    def _hear(self, order: Order) -> None:
        """Called in the watcher's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._ordered, order)

    def _ordered(self, order: Order) -> None:
        """An order: in force for the next request, open ones go on as they began."""
        self._services.ladder.obey(order)
        self.spool.emit(control.ordered(order, instance=self.instance, at_s=time.time()))

    def _failed(self, where: str, error: Exception) -> None:
        self.spool.emit(FailureCounted(at_s=time.time(), where=where, error=type(error).__name__))

    def _open_ledger(self) -> bool:
        try:
            self.ledger.open()
            control.declare(self._ledger_path, self.settings.declared())
        except LedgerDown as error:
            self._failed("ledger.open", error)
            return False
        except sqlite3.Error as error:  # commands then go by the settings that they find themselves
            self._failed("control", error)
        return True

    async def _retry_ledger(self) -> None:
        """Traffic goes on without a ledger, as in observe, until it can be opened."""
        while True:
            await asyncio.sleep(LEDGER_RETRY_S)
            if await asyncio.to_thread(self._open_ledger):
                return


def _operations() -> Iterator[str]:
    """Ids that grow within a process: the ledger's index is then written at its end, at two thirds of the price."""
    while True:
        prefix = secrets.token_hex(5)
        for number in range(1 << 24):
            yield f"op-{prefix}{number:06x}"


def _place(url: str) -> tuple[str, int]:
    origin, _ = Origin.parse(url)
    return origin.host, origin.port


def _pool(settings: Settings, listening: Listening) -> Pool:
    """Connections to the upstreams as settings and environment say. Raises StartError."""
    host, port = listening.data.getsockname()[:2]
    try:
        return Pool(accesses(settings, Address(host=host, port=port), os.environ))
    except SettingsError as error:
        raise StartError(str(error)) from error


async def serve(
    settings: Settings,
    listening: Listening,
    started: Callable[[Proxy], None],
    source: Source | None = None,
) -> None:
    """Run until SIGTERM or SIGINT, then drain; a second signal ends the draining. `started` is told once."""
    raise_file_limit()
    try:
        proxy = Proxy(settings, listening, source)
        await proxy.start()
    except (OSError, ValueError) as error:
        raise StartError(f"cannot use data_dir {settings.data_dir}: {error}") from error
    stop = asyncio.Event()

    def signalled() -> None:
        if stop.is_set():
            proxy.hurry()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    started(proxy)
    await stop.wait()
    await proxy.drain()


def raise_file_limit() -> None:
    """Each stream takes two descriptors; the soft limit is often 1,024 while the hard one is far away."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems name a hard limit they do not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _bind(name: str, address: Address, patience_s: float = 0.0) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        until_s = time.monotonic() + patience_s
        while True:
            try:
                bound.bind((address.host, address.port))
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() >= until_s:
                    raise
            time.sleep(0.05)
        bound.listen(4096)
    except OSError as error:
        bound.close()
        what = "it is in use" if error.errno == errno.EADDRINUSE else str(error)
        raise StartError(
            f"cannot listen on {name} {address}: {what}; choose another with --{name} HOST:PORT"
        ) from error
    bound.setblocking(False)
    return bound
