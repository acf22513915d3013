"""The observer child, its supervisor, and who may ask the admin listener."""

import asyncio
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from turngate.proxy import supervisor as supervisor_module
from turngate.proxy.admin import Status, admin_app, is_loopback
from turngate.proxy.keys import load_or_create_key
from turngate.proxy.observer import Audience
from turngate.proxy.supervisor import ObserverSettings, Supervisor
from turngate.telemetry.events import AnyEvent, FailureCounted, ObserverStarted, StateChanged
from turngate.telemetry.queries import connect_readonly, run_query
from turngate.telemetry.spool import Spool


def move(n: int) -> StateChanged:
    return StateChanged(
        at_s=time.time(), operation=f"op-{n}", upstream="openai", before="SENT", after="STREAMING", how="head"
    )


def operations(data_dir: Path) -> Counter[str]:
    with connect_readonly(data_dir / "evidence") as database:
        rows = run_query(database, "SELECT operation FROM state_changed", rows_max=10_000_000).rows
    return Counter(operation for (operation,) in rows)


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    for _ in range(3000):
        if await condition():
            return
        await asyncio.sleep(0.02)
    pytest.fail("it never came true")


class House:
    """A spool, two listeners and a supervisor, as `serve` has them."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.told: list[AnyEvent] = []
        self.metrics = socket.create_server(("127.0.0.1", 0))
        self.admin = socket.create_server(("127.0.0.1", 0))
        self.spool = Spool(data_dir / "spool", "i", segment_s=0.05, flush_s=0.0)
        self.spool.start()
        self.supervisor = Supervisor(
            ObserverSettings(
                data_dir=str(data_dir), metrics_fd=self.metrics.fileno(), admin_fd=self.admin.fileno()
            ),
            instance="i",
            emit=self.told.append,
        )

    async def get(self, listener: socket.socket, path: str) -> str:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.status == 200
            return await response.text()

    async def scrape(self) -> str:
        return await self.get(self.metrics, "/metrics")

    async def loaded(self, rows: int) -> None:
        async def have() -> bool:
            return f"turngate_evidence_rows_total {float(rows)}\n" in await self.scrape()

        await until(have)

    def kill(self, number: int) -> None:
        assert self.supervisor.pid is not None
        os.kill(self.supervisor.pid, number)


@asynccontextmanager
async def a_house(data_dir: Path) -> AsyncIterator[House]:
    house = House(data_dir)
    house.supervisor.start()
    try:
        yield house
    finally:
        house.spool.close()
        await house.supervisor.stop()
        house.metrics.close()
        house.admin.close()


async def test_events_arrive_in_metrics_status_and_evidence(tmp_path: Path) -> None:
    async with a_house(tmp_path) as house:
        for n in range(10):
            house.spool.emit(move(n))
        await house.loaded(10)
        text = await house.scrape()
        assert 'turngate_dispatch_transitions_total{from="SENT",to="STREAMING"} 10.0' in text
        status = msgspec.json.decode(await house.get(house.admin, "/api/status"), type=Status)
        assert (status.evidence_rows, status.observer_restarts) == (10, 0)
        assert await house.get(house.admin, "/-/healthz") == "ok\n"
        assert "/metrics" in await house.get(house.metrics, "/")
    assert operations(tmp_path) == Counter(f"op-{n}" for n in range(10))


async def test_each_event_is_one_row_however_often_the_observer_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "BACKOFF_MAX_S", 0.0)
    chance = random.Random(7)
    async with a_house(tmp_path) as house:
        emitted = 0
        for _ in range(int(os.environ.get("CRASHES", "6"))):
            await house.scrape()  # it lives, and loads from now on
            patience = time.monotonic() + chance.uniform(0.0, 0.7)
            while time.monotonic() < patience:
                for _ in range(200):
                    house.spool.emit(move(emitted))
                    emitted += 1
                await asyncio.sleep(0.01)
            house.kill(signal.SIGKILL)
        await house.scrape()
    assert emitted > 0
    assert operations(tmp_path) == Counter(f"op-{n}" for n in range(emitted))
    assert [path.name for path in (tmp_path / "spool").iterdir()] == [".loading"]
    assert len(list((tmp_path / "evidence").glob("*.corrupt-*"))) == 0


def test_who_fails_to_listen_is_counted_and_the_others_are_told() -> None:
    audience = Audience("1")
    heard: list[AnyEvent] = []

    def deaf(events: Sequence[AnyEvent]) -> None:
        raise ValueError("cannot take that")

    audience.add_sink("log", deaf)
    audience.add_sink("otlp", heard.extend)
    events = [move(1), move(2)]
    audience.observe_all(iter(events))
    assert heard == events
    assert audience.value("dispatch_transitions_total", "SENT", "STREAMING") == 2
    assert audience.value("observer_failures_total", "log") == 1


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_BSP_SCHEDULE_DELAY"])
async def test_variables_that_the_collectors_side_cannot_use_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, "soon")
    async with a_house(tmp_path) as house:
        house.spool.emit(move(1))
        await house.loaded(1)


async def test_a_restart_loses_no_scrape_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "BACKOFF_MAX_S", 0.0)
    async with a_house(tmp_path) as house:
        await house.scrape()
        first = house.supervisor.pid
        house.kill(signal.SIGKILL)
        # The listener is the parent's: a scrape while nobody is there waits in its backlog.
        assert "turngate_observer_restarts_total 1.0" in await house.scrape()
        assert house.supervisor.pid != first
        starts = [event for event in house.told if isinstance(event, ObserverStarted)]
        assert [(event.instance, event.restart) for event in starts] == [("i", 0), ("i", 1)]


async def test_ctrl_c_is_not_for_the_observer(tmp_path: Path) -> None:
    async with a_house(tmp_path) as house:
        await house.scrape()
        pid = house.supervisor.pid
        house.kill(signal.SIGINT)
        house.spool.emit(move(1))
        await house.loaded(1)
        assert house.supervisor.pid == pid


async def test_stopping_loads_what_is_sealed(tmp_path: Path) -> None:
    async with a_house(tmp_path) as house:
        await house.scrape()
        for n in range(500):
            house.spool.emit(move(n))
        house.spool.close()
        await house.supervisor.stop()
        assert house.supervisor.pid is None
        assert operations(tmp_path) == Counter(f"op-{n}" for n in range(500))


async def test_an_observer_that_cannot_be_started_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "BACKOFF_MAX_S", 0.0)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    async with a_house(tmp_path) as house:

        async def tried_again() -> bool:
            return len(house.told) >= 2

        await until(tried_again)
        assert {(event.where, event.error) for event in house.told if isinstance(event, FailureCounted)} == {
            ("observer_start", "FileNotFoundError")
        }


PARENT = """
import asyncio, socket, sys, time
from pathlib import Path
from turngate.proxy.supervisor import ObserverSettings, Supervisor
from turngate.telemetry.events import ProxyStarted
from turngate.telemetry.spool import Spool

async def main():
    spool = Spool(Path(sys.argv[1]) / "spool", "parent", segment_s=3600.0, flush_s=0.0)
    spool.start()
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    fds = [listener.fileno() for listener in sockets]
    settings = ObserverSettings(data_dir=sys.argv[1], metrics_fd=fds[0], admin_fd=fds[1])
    supervisor = Supervisor(settings, instance="parent", emit=lambda event: None)
    supervisor.start()
    spool.emit(ProxyStarted(at_s=time.time(), instance="parent", version="1", pid=1))
    while supervisor.pid is None or not any(p.stat().st_size for p in Path(sys.argv[1]).glob("spool/*.part")):
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(*sockets[0].getsockname())
    writer.write(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
    await reader.readline()
    print(supervisor.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_observer_ends_with_a_killed_parent_and_keeps_its_last_events(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        observer = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        # A pidfd becomes readable when its process ends.
        assert select.select([observer], [], [], 60.0)[0]
    finally:
        os.close(observer)
    with connect_readonly(tmp_path / "evidence") as database:
        assert run_query(database, "SELECT instance FROM proxy_started").rows == [("parent",)]
    assert not list((tmp_path / "spool").glob("parent-*"))


TOKEN = "s3cret"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
# bound to, method, headers, status; a path that does not exist shows by 404 or 405 that the guard let it pass
REQUESTS: dict[str, tuple[str, str, dict[str, str], int]] = {
    "reading on loopback": ("127.0.0.1", "GET", {"Host": "127.0.0.1:8789"}, 200),
    "by name": ("127.0.0.1", "GET", {"Host": "LOCALHOST:8789"}, 200),
    "by IPv6": ("127.0.0.1", "GET", {"Host": "[::1]:8789"}, 200),
    "a name that was made to point at us": ("127.0.0.1", "GET", {"Host": "evil.example"}, 421),
    "a name that begins like ours": ("127.0.0.1", "GET", {"Host": "127.0.0.1.evil.example"}, 421),
    "a user part": ("127.0.0.1", "GET", {"Host": "127.0.0.1@evil.example"}, 421),
    "no name": ("127.0.0.1", "GET", {"Host": ""}, 421),
    "half a name": ("127.0.0.1", "GET", {"Host": "[::1"}, 421),
    "our own page": ("127.0.0.1", "GET", {"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
    "another port's page": ("127.0.0.1", "GET", {"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
    "another site's page": (
        "127.0.0.1",
        "GET",
        {"Host": "localhost:1", "Origin": "http://evil.example"},
        403,
    ),
    "a page without origin": ("127.0.0.1", "GET", {"Host": "localhost:1", "Origin": "null"}, 403),
    "another site with the token": (
        "127.0.0.1",
        "POST",
        {"Host": "localhost:1", "Origin": "http://evil.example", **BEARER},
        403,
    ),
    "writing without the token": ("127.0.0.1", "POST", {"Host": "localhost:1"}, 401),
    "writing with a wrong token": (
        "127.0.0.1",
        "POST",
        {"Host": "localhost:1", "Authorization": "Bearer s3cre"},
        401,
    ),
    "writing with another scheme": (
        "127.0.0.1",
        "DELETE",
        {"Host": "localhost:1", "Authorization": f"Basic {TOKEN}"},
        401,
    ),
    "writing with a token beyond ASCII": (
        "127.0.0.1",
        "PUT",
        {"Host": "localhost:1", "Authorization": "Bearer s3crét"},
        401,
    ),
    "writing with the token": ("127.0.0.1", "POST", {"Host": "localhost:1", **BEARER}, 405),
    "changing without the token": ("127.0.0.1", "PATCH", {"Host": "localhost:1"}, 401),
    "reading off loopback without the token": ("192.0.2.1", "GET", {"Host": "192.0.2.1:8789"}, 401),
    "reading off loopback with the token": ("192.0.2.1", "GET", {"Host": "192.0.2.1:8789", **BEARER}, 200),
    "another name off loopback": ("192.0.2.1", "GET", {"Host": "evil.example", **BEARER}, 421),
    "any name where all addresses are bound": ("0.0.0.0", "GET", {"Host": "box.lan:8789", **BEARER}, 200),
    "no token where all addresses are bound": ("0.0.0.0", "GET", {"Host": "127.0.0.1:8789"}, 401),
}


@pytest.mark.parametrize(("host", "method", "headers", "status"), REQUESTS.values(), ids=REQUESTS)
async def test_the_admin_listener_answers_only_whom_it_should(
    host: str, method: str, headers: dict[str, str], status: int
) -> None:
    def report() -> Status:
        return Status(version="1", evidence_rows=1, evidence_lag_s=0.0, spool_bytes=0, observer_restarts=0)

    app = admin_app(host=host, token=TOKEN, status=report)
    async with TestClient(TestServer(app)) as client:
        response = await client.request(method, "/api/status", headers=headers)
        assert response.status == status


ADDRESSES = {
    "localhost": True,
    "127.0.0.1": True,
    "127.9.9.9": True,
    "::1": True,
    "0.0.0.0": False,
    "192.0.2.1": False,
    "localhost.example": False,
    "": False,
}


@pytest.mark.parametrize(("host", "loopback"), ADDRESSES.items(), ids=str)
def test_loopback_is_this_machine_only(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


def test_a_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "digest.key"
    key = load_or_create_key(path, 32)
    assert len(key) == 32
    assert load_or_create_key(path, 32) == key
    assert load_or_create_key(tmp_path / "keys" / "other.key", 32) != key
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_all_who_make_a_key_at_once_get_the_same(tmp_path: Path) -> None:
    keys: set[bytes] = set()
    together = threading.Barrier(8)

    def make() -> None:
        together.wait()
        keys.add(load_or_create_key(tmp_path / "keys" / "a", 32))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 1
    assert [path.name for path in (tmp_path / "keys").iterdir()] == ["a"]


@pytest.mark.parametrize("text", ["", "00", "not hex at all", "00" * 33])
def test_a_file_that_holds_no_key_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no key of 32 bytes"):
        load_or_create_key(path, 32)
    assert path.read_text() == text
