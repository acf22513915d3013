"""Keeps one observer alive beside the proxy. The proxy never waits for it and never dies of it."""

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from turngate.telemetry.events import AnyEvent, FailureCounted, ObserverStarted

BACKOFF_MIN_S: Final = 0.2
BACKOFF_MAX_S: Final = 30.0
HEALTHY_S: Final = 10.0
"""A child that lived so long is restarted at once when it ends, as if it were the first."""

STOP_S: Final = 10.0
"""How long a child may load what is sealed after it was told to end."""


class ObserverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is told on its command line. The descriptors are listening sockets that it inherits.

    No credential may stand here: every process of the machine can read it.
    """

    data_dir: str
    metrics_fd: int
    admin_fd: int
    retention_days: int = 14
    restart: int = 0
    log: Literal["off", "auto", "text", "json"] = "off"
    """A line for each exchange on stderr; auto: text on a terminal, else JSON."""
    otlp: str = ""
    """Base URL of a collector; empty: as OTEL_EXPORTER_OTLP_ENDPOINT says, and without that none."""
    upstreams: dict[str, tuple[str, int]] = {}
    """Host and port by name, for spans."""


class Supervisor:
    """Starts the observer and starts it again whenever it ends; `emit` gets an ObserverStarted each time.

    The sockets in `settings` stay the caller's: bound before and closed after, so that a restart loses no scrape.
    """

    def __init__(
        self, settings: ObserverSettings, *, instance: str, emit: Callable[[AnyEvent], None]
    ) -> None:
        self._settings = settings
        self._instance = instance
        self._emit = emit
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The living child's process id; None between two lives."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def start(self) -> None:
        """Begin in the running event loop."""
        self._task = asyncio.create_task(self._keep_alive(), name="observer-supervisor")

    async def stop(self) -> None:
        """Let the child load what is sealed and end; kill it after STOP_S seconds."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _keep_alive(self) -> None:
        backoff_s = BACKOFF_MIN_S
        restart = 0
        while True:
            born_s = time.monotonic()
            await self._live_once(restart)
            if time.monotonic() - born_s >= HEALTHY_S:
                backoff_s = BACKOFF_MIN_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(BACKOFF_MAX_S, backoff_s * 2)
            restart += 1

    async def _live_once(self, restart: int) -> None:
        settings = msgspec.structs.replace(self._settings, restart=restart)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "turngate.proxy.observer", msgspec.json.encode(settings).decode()),
                env={
                    **os.environ,
                    "PYTHONSAFEPATH": "1",
                },  # with -m the working directory would come before the library
                stdin=PIPE,  # never written to: its end tells the child that we are gone
                pass_fds=(settings.metrics_fd, settings.admin_fd),
            )
        except OSError as exc:
            # No memory or no process left: traffic goes on, and we try again.
            self._emit(FailureCounted(at_s=time.time(), where="observer_start", error=type(exc).__name__))
            return
        self._emit(ObserverStarted(at_s=time.time(), instance=self._instance, restart=restart))
        await self._process.wait()
