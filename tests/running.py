"""Real sidecars for tests: `turngate serve` as a process, or the same proxy inside the test's own event loop.

Both listen on free ports of 127.0.0.1 and keep their files in a directory of the test. `pythonpath` in pyproject.toml
makes this module importable: `from running import Sidecar`.
"""

import asyncio
import os
import re
import sqlite3
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import yaml

from turngate.proxy.config import Settings
from turngate.proxy.server import Listening, Proxy
from turngate.telemetry.queries import connect_readonly

ANY_PORT: Final = "127.0.0.1:0"
START_S: Final = 30.0
STOP_S: Final = 60.0
"""Bounds that only a proxy that hangs meets."""
LOOK_S: Final = 0.02

NOWHERE: Final = {name: "http://127.0.0.1:1" for name in ("openai", "anthropic")}
"""In the place of the built-in providers: a test that forgets to name one must not reach the real one."""

_ANNOUNCED: Final = re.compile(r"listens on (?P<url>http://\S+)|^  metrics +(?P<metrics>http://\S+)/metrics$")


class Sidecar:
    """`turngate serve` as a child process while the context is open.

    `upstreams` maps names to base URLs, or to whole settings of an upstream; `settings` are further keys of the settings file. At the context's end the
    process is stopped (or killed, if the test failed or did so itself). `log` holds what it wrote to stderr.
    """

    process: Process

    def __init__(
        self,
        data_dir: Path,
        upstreams: Mapping[str, str | dict[str, Any]],
        *,
        stage: str = "observe",
        **settings: object,
    ) -> None:
        self.data_dir = data_dir
        self.url = ""
        self.metrics_url = ""
        self.log: list[str] = []
        self._settings = settings_of(data_dir, upstreams, stage, settings)
        self._announced = asyncio.Event()

    async def __aenter__(self) -> Self:
        config = self.data_dir.with_name(f"{self.data_dir.name}.yaml")
        config.write_text(yaml.safe_dump(self._settings))
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "turngate", "serve", "--config", str(config)),
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith("TURNGATE_")},
        )
        self._reading = asyncio.create_task(self._read_log())
        try:
            await asyncio.wait_for(self._announced.wait(), START_S)
        except BaseException:
            await self.kill()
            raise
        assert self.metrics_url, f"turngate serve did not start:\n{''.join(self.log)}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.returncode is None and kind is None:
            await self.stop()
        else:
            await self.kill()

    async def stop(self) -> None:
        """SIGTERM; returns when it has drained, loaded its evidence and ended well."""
        self.process.terminate()
        try:
            code = await asyncio.wait_for(self.process.wait(), STOP_S)
        except TimeoutError:
            await self.kill()
            raise
        await self._reading
        assert code == 0, f"exit code {code}:\n{''.join(self.log)}"

    async def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        # Its observer holds the same stderr and notices only later that its parent is gone.
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read_log(self) -> None:
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            line = raw.decode(errors="replace")
            self.log.append(line)
            if found := _ANNOUNCED.search(line.rstrip("\n")):
                self.url = found["url"] or self.url
                self.metrics_url = found["metrics"] or self.metrics_url
                if self.metrics_url:
                    self._announced.set()
        self._announced.set()  # it ended: whoever waits for the start has to know


@dataclass(frozen=True, slots=True)
class InLoop:
    """A proxy that runs in the test's own event loop."""

    proxy: Proxy
    url: str
    metrics_url: str
    data_dir: Path


@asynccontextmanager
async def in_loop(
    data_dir: Path,
    upstreams: Mapping[str, str | dict[str, Any]],
    *,
    stage: str = "observe",
    observer: bool = True,
    **settings: object,
) -> AsyncIterator[InLoop]:
    """As `Sidecar`, without a process of its own but for the observer; drained at the context's end.

    Without `observer` nothing is loaded into the evidence: a second is saved.
    """
    loaded = Settings(**settings_of(data_dir, upstreams, stage, settings))
    listening = Listening.bind(loaded)
    proxy = Proxy(loaded, listening)
    if not observer:
        proxy.supervisor.start = lambda: None  # type: ignore[method-assign]
    await proxy.start()
    try:
        yield InLoop(proxy, _url(listening.data), _url(listening.metrics), data_dir)
    finally:
        await proxy.drain()


def settings_of(
    data_dir: Path, upstreams: Mapping[str, str | dict[str, Any]], stage: str, more: Mapping[str, object]
) -> dict[str, Any]:
    """The content of a settings file. No other than the given upstreams can be reached by the usual paths."""
    return {
        "listen": ANY_PORT,
        "metrics": ANY_PORT,
        "admin": ANY_PORT,
        "data_dir": str(data_dir),
        "stage": stage,
        "upstreams": {
            name: {"url": each} if isinstance(each, str) else each
            for name, each in {**NOWHERE, **upstreams}.items()
        },
        **more,
    }


async def until(look: Callable[[], Any]) -> Any:
    """What `look` finds as soon as it finds something; it may be asynchronous. For what other processes bring about."""
    async with asyncio.timeout(STOP_S):
        while True:
            found = look()
            found = await found if asyncio.iscoroutine(found) else found
            if found:
                return found
            await asyncio.sleep(LOOK_S)


def ledger_rows(data_dir: Path, columns: str = "operation, state, how") -> list[tuple[Any, ...]]:
    """Rows of the ledger as they are on disk now, oldest first."""
    with closing(sqlite3.connect(f"file:{data_dir}/ledger.sqlite3?mode=ro", uri=True)) as database:
        return database.execute(f"SELECT {columns} FROM dispatches ORDER BY rowid").fetchall()


def evidence(data_dir: Path, statement: str) -> list[tuple[Any, ...]]:
    """Rows of a query on what the observer has loaded."""
    with closing(connect_readonly(data_dir / "evidence")) as database:
        return database.execute(statement).fetchall()


def _url(listener: Any) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{host}:{port}"
