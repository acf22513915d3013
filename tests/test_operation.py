"""The running proxy as its operators meet it: orders, limits in time, draining, and what breaks inside it."""

import asyncio
import hashlib
import json
import os
import resource
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from running import InLoop, Sidecar, evidence, in_loop, ledger_rows

from turngate.proxy import control, exchange, server
from turngate.proxy.judging import Judge
from turngate.proxy.keys import load_or_create_key
from turngate.proxy.record import Record
from turngate.proxy.rollout import Stage
from turngate.proxy.simulator import Simulator
from turngate.telemetry.events import ProxyPulse
from turngate.telemetry.witness import Flow, Scanner
from turngate.validators.gate import Gate
from turngate.validators.ledger import Retries
from turngate.validators.previews import Marks, Preview
from turngate.validators.stream import Assembler, Call

ORPHAN = {
    "model": "m",
    "messages": [{"role": "user", "content": "q"}, {"role": "tool", "tool_call_id": "x", "content": "y"}],
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
LOOK = {"model": "m", "stream": True, "tools": [TOOL], "messages": [{"role": "user", "content": "look"}]}
ANSWERED = {"refusals": False, "steps": [{"when": {}, "answer": {"text": ["fine"]}}]}


def both(simulator: Simulator) -> dict[str, str]:
    return {"openai": simulator.url, "anthropic": simulator.url}


async def post(
    url: str, body: object, path: str = "/v1/chat/completions"
) -> tuple[int, dict[str, str], bytes]:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as answer:
        return (
            answer.status,
            {name.lower(): value for name, value in answer.headers.items()},
            await answer.read(),
        )


# -- orders ------------------------------------------------------------------------------------------------------


async def obeyed(proxy: InLoop, stage: Stage | None) -> None:
    while proxy.proxy._services.ladder.ordered is not stage:  # noqa: ASYNC110 - the order comes from a file
        await asyncio.sleep(0.01)


async def test_an_order_is_in_force_for_the_next_request_and_ends_with_the_settings_again(
    tmp_path: Path,
) -> None:
    async with (
        Simulator(ANSWERED) as provider,
        in_loop(tmp_path, both(provider), stage="enforce-tools") as proxy,
    ):
        ledger = proxy.data_dir / "ledger.sqlite3"
        assert (await post(proxy.url, ORPHAN))[0] == 400
        control.give(ledger, Stage.OFF, who="op", why="too strict")
        await obeyed(proxy, Stage.OFF)
        status, headers, _ = await post(proxy.url, ORPHAN)
        assert (status, "x-turngate-operation" in headers) == (200, False)
        control.give(ledger, None, who="op", why="")
        await obeyed(proxy, None)
        assert (await post(proxy.url, ORPHAN))[0] == 400
    ordered = evidence(tmp_path, "SELECT stage, who, why FROM stage_ordered ORDER BY at_s")
    assert ordered == [("off", "op", "too strict"), ("", "op", "")]


async def test_an_order_survives_a_restart(tmp_path: Path) -> None:
    async with Simulator(ANSWERED) as provider:
        async with in_loop(tmp_path, both(provider)) as proxy:
            control.give(proxy.data_dir / "ledger.sqlite3", Stage.ENFORCE_TOOLS, who="op", why="")
        async with in_loop(tmp_path, both(provider)) as proxy:
            await obeyed(proxy, Stage.ENFORCE_TOOLS)
            assert (await post(proxy.url, ORPHAN))[0] == 400


async def test_an_order_leaves_an_open_stream_as_it_began(tmp_path: Path) -> None:
    slow = {"steps": [{"answer": {"calls": [{"name": "look", "arguments": {}}]}, "interval_s": 0.05}]}
    async with Simulator(slow) as provider, in_loop(tmp_path, both(provider), stage="enforce-tools") as proxy:
        request = asyncio.create_task(post(proxy.url, LOOK))
        await provider.wait_request()
        control.give(proxy.data_dir / "ledger.sqlite3", Stage.OFF, who="op", why="")
        await obeyed(proxy, Stage.OFF)
        status, headers, body = await request
        assert status == 200
        assert "x-turngate-operation" in headers
        assert body.endswith(b"data: [DONE]\n\n")
    assert evidence(tmp_path, "SELECT decision, held FROM call_decided") == [("released", True)]


# -- limits in time ----------------------------------------------------------------------------------------------


async def test_a_silent_provider_is_given_up_with_an_error_the_sdks_raise(tmp_path: Path) -> None:
    stalled = {
        "steps": [
            {"answer": {"calls": [{"name": "look", "arguments": {"a": 1}}]}, "fault": {"stall_at_byte": 300}}
        ]
    }
    async with (
        Simulator(stalled) as provider,
        in_loop(tmp_path, both(provider), stage="enforce-tools", timeouts={"idle_s": 0.2}) as proxy,
    ):
        status, _, body = await post(proxy.url, LOOK)
        last = json.loads(body.rstrip().rpartition(b"data: ")[2])
        assert (status, last["error"]["code"]) == (200, "stream.stalled")
        await provider.wait_closed(provider.requests[0])
    assert [row[1:] for row in ledger_rows(tmp_path)] == [("UNKNOWN", "stream.stalled")]


async def test_a_provider_that_never_begins_is_given_up_and_not_asked_again(tmp_path: Path) -> None:
    silent = {"steps": [{"answer": {"text": ["late"]}, "delay_s": 30}]}
    async with (
        Simulator(silent) as provider,
        in_loop(tmp_path, both(provider), stage="enforce-tools", timeouts={"first_byte_s": 0.2}) as proxy,
    ):
        status, headers, body = await post(proxy.url, LOOK)
        assert (status, headers["x-should-retry"]) == (504, "false")
        assert json.loads(body)["error"]["code"] == "stream.stalled"
        assert len(provider.requests) == 1


async def test_no_limit_of_ours_applies_where_nothing_is_enforced(tmp_path: Path) -> None:
    late = {"steps": [{"answer": {"text": ["late"]}, "delay_s": 0.4}]}
    async with (
        Simulator(late) as provider,
        in_loop(tmp_path, both(provider), timeouts={"first_byte_s": 0.05, "idle_s": 0.05}) as proxy,
    ):
        assert (await post(proxy.url, LOOK))[0] == 200


# -- draining ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drain_s", "whole"), [(20, True), (0.2, False)], ids=["in time", "too long"])
async def test_sigterm_lets_open_answers_end_and_tells_those_that_cannot(
    tmp_path: Path, drain_s: float, whole: bool
) -> None:
    slow = {"steps": [{"answer": {"text": [f"{n} " for n in range(8)]}, "interval_s": 0.1}]}
    async with (
        Simulator(slow) as provider,
        Sidecar(tmp_path, both(provider), stage="enforce-tools", drain_s=drain_s) as sidecar,
    ):
        request = asyncio.create_task(post(sidecar.url, LOOK))
        await provider.wait_request()
        sidecar.process.send_signal(signal.SIGTERM)
        status, _, body = await request
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n") is whole
        assert (b'"error"' in body) is not whole
        await sidecar.stop()


async def test_while_draining_it_is_not_ready_and_still_answers(tmp_path: Path) -> None:
    async with (
        Simulator(ANSWERED) as provider,
        Sidecar(tmp_path, both(provider), linger_s=1.0) as sidecar,
        aiohttp.ClientSession() as session,
    ):
        sidecar.process.send_signal(signal.SIGTERM)
        status = 200
        while status == 200:
            async with session.get(f"{sidecar.url}/-/readyz") as answer:
                status = answer.status
        assert status == 503
        async with session.get(f"{sidecar.url}/-/healthz") as answer:
            assert answer.status == 200
        assert (await post(sidecar.url, ORPHAN))[0] == 200
        await sidecar.stop()


# -- other protocols and targets ---------------------------------------------------------------------------------


async def test_a_websocket_is_tunnelled_as_raw_bytes_after_the_101(tmp_path: Path) -> None:
    heard: list[bytes] = []
    closed = asyncio.Event()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nfirst"
        )
        while data := await reader.read(65536):
            writer.write(data[::-1])
        closed.set()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, in_loop(tmp_path, {"openai": url}, stage="enforce-tools") as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /v1/realtime?model=m HTTP/1.1\r\nHost: app\r\nConnection: keep-alive, Upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Key: AAAA\r\n\r\n"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101")
        assert b"Upgrade: websocket" in head
        assert await reader.readexactly(5) == b"first"
        for frame in (b"\x81\x05hello", b"\x00" * 300_000):
            writer.write(frame)
            assert await reader.readexactly(len(frame)) == frame[::-1]
        assert b"Upgrade: websocket" in heard[0]
        assert b"Sec-WebSocket-Key: AAAA" in heard[0]
        writer.close()
        await closed.wait()


async def test_an_absolute_target_reaches_its_configured_upstream_and_no_other(tmp_path: Path) -> None:
    async with Simulator() as provider, in_loop(tmp_path, both(provider)) as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")

        async def get(target: str) -> bytes:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET {target} HTTP/1.1\r\nHost: app\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            return answer

        assert (await get(f"{provider.url}/v1/models")).startswith(b"HTTP/1.1 200 ")
        assert (await get("http://elsewhere.example/v1/models")).startswith(b"HTTP/1.1 421 ")
        assert [received.path for received in provider.requests] == ["/v1/models"]


async def test_upstreams_that_share_a_path_are_told_apart_by_header_or_model(tmp_path: Path) -> None:
    async with Simulator() as plain, Simulator() as by_model, Simulator() as by_header:
        upstreams: dict[str, str | dict[str, Any]] = {
            "openai": {"url": plain.url},
            "spare": {"url": by_model.url + "/base", "models": ["spare-*"]},
            "team": {"url": by_header.url, "header": {"x-team": "blue"}},
        }
        async with in_loop(tmp_path, upstreams) as proxy, aiohttp.ClientSession() as session:
            for model, headers in (
                ("m", {}),
                ("spare-1", {}),
                ("spare-1", {"X-Team": "blue"}),
                ("m", {"X-Team": "red"}),
            ):
                url = f"{proxy.url}/v1/chat/completions?q=1"
                async with session.post(url, json=LOOK | {"model": model}, headers=headers) as answer:
                    assert answer.status == 200
                    await answer.read()
        assert [received.path for received in plain.requests] == ["/v1/chat/completions?q=1"] * 2
        assert [received.path for received in by_model.requests] == ["/base/v1/chat/completions?q=1"]
        assert [received.path for received in by_header.requests] == ["/v1/chat/completions?q=1"]
    told = evidence(tmp_path, "SELECT upstream, count(*) FROM exchange_ended GROUP BY ALL ORDER BY ALL")
    assert told == [("openai", 2), ("spare", 1), ("team", 1)]


# -- what breaks inside ------------------------------------------------------------------------------------------


def broken(*_: object, **__: object) -> object:
    raise RuntimeError("injected")


FAULTS = {
    "decoding or a rule": (Judge, "judge", "judge"),
    "the gate": (Gate, "receive", "gate"),
    "the end of the gate": (Gate, "finish", "gate"),
    "the assembler": (Assembler, "receive", "gate"),
    "the sum of what came in": (Flow, "took", "witness"),
    "the sum of what went out": (Flow, "gave", "witness"),
    "the scanner": (Scanner, "see", "witness"),
    "the scanner's last word": (Scanner, "end", "record"),
    "recognising a retry": (Retries, "retried", "judge"),
    "recognising what was retracted": (Marks, "__contains__", "previews"),
    "collecting the preview": (Preview, "add", "gate"),
    "what the client is": (exchange, "client_family", "record"),
    "what the answer says": (Record, "answered", "record"),
}


@asynccontextmanager
async def observed(tmp_path: Path) -> AsyncIterator[tuple[Simulator, InLoop]]:
    async with Simulator() as provider, in_loop(tmp_path, both(provider)) as proxy:
        yield provider, proxy


@pytest.mark.parametrize(("owner", "method", "where"), FAULTS.values(), ids=FAULTS)
async def test_a_fault_of_ours_leaves_observed_traffic_as_it_is_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, where: str
) -> None:
    async with observed(tmp_path) as (provider, proxy):
        alone = await post(provider.url, LOOK)
        provider.reset()
        monkeypatch.setattr(owner, method, broken)
        through = await post(proxy.url, LOOK)
        assert (through[0], through[2]) == (alone[0], alone[2])
        monkeypatch.undo()
    assert (where,) in evidence(tmp_path, 'SELECT DISTINCT "where" FROM failure_counted')


async def test_a_pulse_tells_of_open_streams_while_there_are_some_and_once_when_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PULSE_S", 0.02)
    call = {"calls": [{"name": "look", "arguments": {"a": 1}}]}
    stalled = {"steps": [{"answer": call, "fault": {"stall_at_byte": 900}}]}
    async with (
        Simulator(stalled) as provider,
        in_loop(tmp_path, both(provider), stage="enforce-tools") as proxy,
    ):
        pulses: asyncio.Queue[ProxyPulse] = asyncio.Queue()
        emit = proxy.proxy.spool.emit
        monkeypatch.setattr(
            proxy.proxy.spool,
            "emit",
            lambda event: pulses.put_nowait(event) if isinstance(event, ProxyPulse) else emit(event),
        )
        asking = asyncio.create_task(post(proxy.url, LOOK))
        async with asyncio.timeout(30):
            while not (pulse := await pulses.get()).held_bytes:
                pass
            assert (pulse.open_exchanges, pulse.open_streams) == (1, 1)
            asking.cancel()
            while (pulse := await pulses.get()).open_exchanges:
                pass
        assert (pulse.open_streams, pulse.held_bytes) == (0, 0)


HALF_A_CALL = {
    "refusals": False,
    "steps": [{"when": {}, "answer": {"calls": [{"name": "look", "arguments": ['{"a": 1']}]}}],
}
SPOKEN = "SELECT witness, enforced FROM witness_spoke"


@pytest.mark.parametrize("stage", ["observe", "enforce-tools"])
async def test_a_request_that_does_not_go_out_as_it_came_in_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    async with Simulator() as provider, in_loop(tmp_path, both(provider), stage=stage) as proxy:
        piece = exchange.Exchange._piece
        monkeypatch.setattr(
            exchange.Exchange, "_piece", lambda self, data: piece(self, data.replace(b"look", b"book"))
        )
        assert (await post(proxy.url, LOOK))[0] == 200
    assert evidence(tmp_path, SPOKEN) == [("byte_mismatch", stage == "enforce-tools")]


async def test_the_witnesses_have_nothing_to_say_of_sound_traffic(tmp_path: Path) -> None:
    async with Simulator() as provider, in_loop(tmp_path, both(provider), stage="enforce-tools") as proxy:
        assert (await post(proxy.url, LOOK))[0] == 200
    assert evidence(tmp_path, SPOKEN) == []


async def test_a_call_that_the_gate_lets_through_by_mistake_is_seen_by_the_scanner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        Simulator(HALF_A_CALL) as provider,
        in_loop(tmp_path, both(provider), stage="enforce-tools") as proxy,
    ):
        await post(proxy.url, LOOK)
        monkeypatch.setattr(Call, "fault", lambda _call: None)
        await post(proxy.url, LOOK)
        monkeypatch.undo()
    assert evidence(tmp_path, SPOKEN) == [("partial_tool_dispatch", True)]


async def test_half_a_call_that_is_only_watched_is_told_as_not_enforced(tmp_path: Path) -> None:
    async with Simulator(HALF_A_CALL) as provider, in_loop(tmp_path, both(provider)) as proxy:
        await post(proxy.url, LOOK)
    assert evidence(tmp_path, SPOKEN) == [("partial_tool_dispatch", False)]


async def test_bytes_that_change_on_their_way_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = Gate.receive
    async with (
        Simulator(ANSWERED) as provider,
        in_loop(tmp_path, both(provider), stage="enforce-tools") as proxy,
    ):
        monkeypatch.setattr(Gate, "receive", lambda gate, data: receive(gate, data).replace(b"fine", b"fire"))
        await post(proxy.url, LOOK)
        monkeypatch.undo()
    assert evidence(tmp_path, SPOKEN) == [("byte_mismatch", True)]


async def test_a_fault_in_telling_leaves_the_answer_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with observed(tmp_path) as (provider, proxy):
        alone = await post(provider.url, LOOK)
        provider.reset()
        for method in ("findings", "calls", "ended"):
            monkeypatch.setattr(Record, method, broken)
        through = await post(proxy.url, LOOK)
        assert (through[0], through[2]) == (alone[0], alone[2])
        monkeypatch.undo()
        assert (await post(proxy.url, LOOK))[0] == 200
    assert ("record",) in evidence(tmp_path, 'SELECT DISTINCT "where" FROM failure_counted')


async def test_a_fault_of_ours_in_an_enforced_scope_is_an_error_not_half_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Simulator() as provider, in_loop(tmp_path, both(provider), stage="enforce-tools") as proxy:
        monkeypatch.setattr(Assembler, "judge", broken)
        status, _, body = await post(proxy.url, LOOK)
        monkeypatch.undo()
        assert status == 200
        assert b'"tool_calls"' not in body
        assert json.loads(body.rstrip().rpartition(b"data: ")[2])["error"]["code"] == "internal"


async def test_a_locked_ledger_holds_up_no_observed_request_and_recording_resumes(tmp_path: Path) -> None:
    async with observed(tmp_path) as (_, proxy):
        with closing(sqlite3.connect(proxy.data_dir / "ledger.sqlite3", isolation_level=None)) as holder:
            holder.execute("BEGIN EXCLUSIVE")
            for _ in range(3):
                assert (await post(proxy.url, LOOK))[0] == 200
            holder.execute("ROLLBACK")
    assert [row[1] for row in ledger_rows(tmp_path)] == ["COMMITTED"] * 3


async def test_a_ledger_that_is_down_makes_an_enforced_scope_act_as_observe(tmp_path: Path) -> None:
    async with Simulator() as provider, in_loop(tmp_path, both(provider), stage="enforce-tools") as proxy:
        with closing(sqlite3.connect(proxy.data_dir / "ledger.sqlite3", isolation_level=None)) as holder:
            holder.execute("BEGIN EXCLUSIVE")
            status, headers, _ = await post(proxy.url, LOOK)
            holder.execute("ROLLBACK")
        assert (status, "x-turngate-operation" in headers) == (200, False)
    assert ("ledger.claim",) in evidence(tmp_path, 'SELECT DISTINCT "where" FROM failure_counted')


async def test_no_ledger_at_all_stops_neither_start_nor_traffic(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite3").mkdir()
    async with observed(tmp_path) as (_, proxy):
        assert (await post(proxy.url, LOOK))[0] == 200
    assert ("ledger.open",) in evidence(tmp_path, 'SELECT DISTINCT "where" FROM failure_counted')


async def test_a_spool_that_cannot_be_written_stops_no_traffic(tmp_path: Path) -> None:
    async with observed(tmp_path) as (_, proxy):
        spool = proxy.data_dir / "spool"
        for left in spool.iterdir():
            left.unlink()
        spool.rmdir()
        spool.write_text("in the way")
        for _ in range(3):
            assert (await post(proxy.url, LOOK))[0] == 200
        spool.unlink()
        spool.mkdir()
        assert (await post(proxy.url, LOOK))[0] == 200


@pytest.mark.parametrize(
    "body", [b"{not json", b'{"messages": [' + b" " * 3000 + b"]}"], ids=["unreadable", "too large"]
)
async def test_what_cannot_be_judged_is_in_the_ledger_before_it_leaves_all_the_same(
    tmp_path: Path, body: bytes
) -> None:
    stored: list[object] = []
    async with (
        Simulator() as provider,
        in_loop(tmp_path, both(provider), stage="enforce-tools", limits={"body_bytes": 2000}) as proxy,
    ):
        provider.on_request = lambda _: stored.append(ledger_rows(tmp_path, "state"))
        url = f"{proxy.url}/v1/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, data=body) as answer:
            await answer.read()
        assert stored == [[("DISPATCHING",)]]
    assert evidence(tmp_path, "SELECT count(*) FROM request_unjudged") == [(1,)]


async def test_a_full_disk_stops_no_observed_traffic_and_recording_resumes(tmp_path: Path) -> None:
    async with Simulator() as provider, Sidecar(tmp_path, both(provider)) as sidecar:
        alone = await post(provider.url, LOOK)
        assert (await post(sidecar.url, LOOK))[0] == 200
        soft, hard = resource.prlimit(sidecar.process.pid, resource.RLIMIT_FSIZE)
        # No file may grow: to SQLite and the spool that is a disk without room.
        resource.prlimit(sidecar.process.pid, resource.RLIMIT_FSIZE, (0, hard))
        for _ in range(20):
            provider.reset()
            through = await post(sidecar.url, LOOK)
            assert (through[0], through[2]) == (alone[0], alone[2])
        await ledger_failed(sidecar)
        resource.prlimit(sidecar.process.pid, resource.RLIMIT_FSIZE, (soft, hard))
        assert (await post(sidecar.url, LOOK))[0] == 200
        await sidecar.stop()
    assert len(ledger_rows(tmp_path)) == 22
    assert {row[1] for row in ledger_rows(tmp_path)} == {"COMMITTED"}
    dropped = evidence(tmp_path, "SELECT sum(count) FROM events_dropped")
    counted = evidence(tmp_path, "SELECT count(*) FROM failure_counted WHERE \"where\" = 'ledger.write'")
    assert dropped[0][0] or counted[0][0]


async def ledger_failed(sidecar: Sidecar) -> None:
    """Wait until the writer has met the full disk: it tries again with a growing pause."""
    wal = sidecar.data_dir / "ledger.sqlite3-wal"
    size = wal.stat().st_size
    for _ in range(20):
        await asyncio.sleep(0.05)
    assert wal.stat().st_size == size


async def test_a_dead_observer_and_a_corrupt_day_file_are_not_noticed_by_traffic(tmp_path: Path) -> None:
    async with Simulator() as provider, in_loop(tmp_path, both(provider)) as proxy:
        alone = await post(provider.url, LOOK)
        supervisor = proxy.proxy.supervisor
        while supervisor.pid is None:  # noqa: ASYNC110 - a process comes to life
            await asyncio.sleep(0.01)
        first = supervisor.pid
        os.kill(first, signal.SIGKILL)
        day = datetime.now(UTC).strftime("%Y-%m-%d")
        (tmp_path / "evidence").mkdir(exist_ok=True)
        (tmp_path / "evidence" / f"{day}.duckdb").write_bytes(b"no database" * 1000)
        for _ in range(5):
            provider.reset()
            through = await post(proxy.url, LOOK)
            assert (through[0], through[2]) == (alone[0], alone[2])
        while supervisor.pid in (None, first):  # noqa: ASYNC110 - another one takes its place
            await asyncio.sleep(0.01)
    assert evidence(tmp_path, "SELECT count(*) FROM exchange_ended") == [(5,)]
    assert list((tmp_path / "evidence").glob(f"{day}*corrupt*"))


SURFACES = {
    "/v1/responses": "openai.responses",
    "/openai/v1beta/models/m:generateContent?key=x": "gemini.generate",
    "/v1/embeddings": None,
}


@pytest.mark.parametrize(("path", "surface"), SURFACES.items())
async def test_generation_that_no_dialect_reads_is_relayed_and_counted(
    tmp_path: Path, path: str, surface: str | None
) -> None:
    async with Simulator() as provider, in_loop(tmp_path, both(provider), stage="enforce-tools") as proxy:
        await post(proxy.url, {"model": "m", "input": "hello"}, path)
        assert len(provider.requests) == 1
    told = evidence(tmp_path, "SELECT surface, why FROM request_unjudged")
    assert told == ([(surface, "surface.uncovered")] if surface else [])


ODD_BODIES = {
    "a byte order mark": b'\xef\xbb\xbf{"model":"m","messages":[{"role":"user","content":"x"}]}',
    "half a surrogate pair": b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}',
    "a key twice": b'{"model":"m","messages":[],"messages":[{"role":"user","content":"x"}]}',
    "deep nesting": b'{"model":"m","metadata":' + b"[" * 100_000 + b"]" * 100_000 + b',"messages":[]}',
    "a huge number": b'{"model":"m","seed":' + b"9" * 5_000 + b',"messages":[{"role":"user","content":"x"}]}',
    "no UTF-8": b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
    "no JSON": b"\x00\x01",
}


@pytest.mark.parametrize("stage", ["observe", "enforce-tools"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_odd_bodies_reach_the_provider_as_they_are_and_the_ledger_has_their_digest(
    tmp_path: Path, path: str, stage: str
) -> None:
    async with (
        Simulator({"refusals": False}) as provider,
        in_loop(tmp_path, both(provider), stage=stage) as proxy,
        aiohttp.ClientSession() as session,
    ):
        for body in ODD_BODIES.values():
            async with session.post(proxy.url + path, data=body) as answer:
                await answer.read()
        assert [received.body for received in provider.requests] == list(ODD_BODIES.values())
        key = load_or_create_key(tmp_path / "keys" / "digest.key", 32)
    keyed = [
        hashlib.blake2b(hashlib.sha256(body).digest(), key=key, digest_size=16).hexdigest()
        for body in ODD_BODIES.values()
    ]
    assert [row[0] for row in ledger_rows(tmp_path, "request_digest")] == keyed
    whys = dict(evidence(tmp_path, "SELECT why, count(*) FROM request_unjudged GROUP BY ALL"))
    assert whys.pop("body.ambiguous") == 1
    assert set(whys) == {"body.undecodable"}
