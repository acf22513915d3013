"""The demo as somebody runs it who has just cloned the project: it keeps its promises, says so, and leaves nothing."""

import asyncio
import os
import pty
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, PIPE

import aiohttp
import pytest

from turngate.proxy import demo
from turngate.proxy.demo_agent import CHAT, MESSAGES, Call, Got, Json, Kind, Said, Wire

DEMO = (sys.executable, "-m", "turngate", "demo")


@pytest.fixture(name="folder")
def folder_for_all_it_writes(tmp_path: Path) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


def environment(folder: Path) -> dict[str, str]:
    """The demo's folder goes where the test looks; settings in the environment must not matter to it."""
    return {**os.environ, "TMPDIR": str(folder), "TURNGATE_STAGE": "off", "TERM": "xterm", "COLUMNS": "120"}


def left_in(folder: Path) -> list[str]:
    """Files in the folder, and command lines that name it: those of sidecar and observer do."""
    found = [path.name for path in folder.iterdir()]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended
        if str(folder) in line:
            found.append(line)
    return found


async def test_the_demo_shows_every_step_and_ends_by_itself_without_a_terminal(folder: Path) -> None:
    (folder.parent / "turngate.yaml").write_text("no such setting: here")
    process = await asyncio.create_subprocess_exec(
        *DEMO, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environment(folder), cwd=folder.parent
    )
    out, err = (part.decode() for part in await process.communicate())
    assert (process.returncode, err) == (0, "")
    rows = [re.split(r"  +", line) for line in out.splitlines()[1 : len(demo.STEPS) + 1]]
    assert [row[:2] for row in rows] == [[step.wire.name, step.does] for step in demo.STEPS]
    assert {tuple(row[2:]) for row in rows} == {
        ("answered", "passed: text"),
        ("answered", "passed: 2 whole calls"),
        ("never saw it", "refused: result.orphan"),
        ("never saw it", "refused: result.duplicate"),
        ("never saw it", "refused: result.misplaced"),
        ("never saw it", "refused: call.unanswered"),
        ("broke off", "retracted: stream.truncated"),
        ("broke off", "retracted: stream.no_stop"),
        ("answered", "retracted: call.arguments_unclosed"),
        ("answered", "retracted: provider's own error"),
    }
    assert "16 requests, 11 reached the provider: 6 passed, 5 refused, 5 retracted." in out
    assert "illegal sequences sent to the provider: 0 · partial tool calls released: 0" in out
    assert "retracted previews: 5 · tool calls withheld: 3" in out
    assert left_in(folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_demo_leaves_no_process_no_folder_and_no_traceback(
    folder: Path, number: signal.Signals
) -> None:
    process = await asyncio.create_subprocess_exec(
        *DEMO, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environment(folder)
    )
    assert process.stdout is not None
    assert b"the app gets" in await process.stdout.readline()
    assert len(left_in(folder)) >= 2  # the data folder, the sidecar
    process.send_signal(number)
    _, err = await process.communicate()
    assert (process.returncode, err) == (128 + number, b"")
    assert left_in(folder) == []


@asynccontextmanager
async def on_a_terminal(
    folder: Path, *arguments: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """The demo with a terminal for its output; gives the process and the terminal's other end."""
    ours, its = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(*DEMO, *arguments), stdin=its, stdout=its, stderr=its, env=environment(folder)
    )
    os.close(its)
    try:
        yield process, ours
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)


async def read_until(terminal: int, end: str) -> str:
    """What a terminal shows, up to some words; all of it where they do not come."""
    shown = ""
    while end not in shown:
        try:
            data = await asyncio.to_thread(os.read, terminal, 65536)
        except OSError:
            break  # the other end is closed: this is how Linux tells it
        shown += data.decode(errors="replace")
    return shown


async def test_on_a_terminal_it_stays_up_for_ones_own_app_until_ctrl_c(folder: Path) -> None:
    async with on_a_terminal(folder) as (process, terminal):
        shown = await read_until(terminal, "Ctrl-C ends it.")
        assert all(step.does in shown for step in demo.STEPS)
        base = re.search(r"ANTHROPIC_BASE_URL=(http://127\.0\.0\.1:\d+) ", shown)
        metrics = re.search(r"curl (http://127\.0\.0\.1:\d+/metrics)", shown)
        data_dir = re.search(r"query --data-dir (\S+) ", shown)
        assert base is not None
        assert metrics is not None
        assert data_dir is not None
        assert Path(data_dir[1]).parent == folder
        async with aiohttp.ClientSession() as session:
            broken = {
                "model": "gpt-4.1",
                "messages": [{"role": "tool", "tool_call_id": "call_9", "content": "14"}],
            }
            async with session.post(base[1] + "/v1/chat/completions", json=broken) as answer:
                assert (answer.status, answer.headers["x-turngate-reason"]) == (400, "result.orphan")
            sound = {"model": "gpt-4.1", "messages": [{"role": "user", "content": "Good morning!"}]}
            async with session.post(base[1] + "/v1/chat/completions", json=sound) as answer:
                assert answer.status == 200
            async with session.get(metrics[1]) as answer:
                assert "turngate_requests_total" in await answer.text()
        process.send_signal(signal.SIGINT)
        rest = await read_until(terminal, "Traceback")
        assert await process.wait() == 0
    assert rest == ""
    assert left_in(folder) == []


async def test_on_a_terminal_it_ends_after_the_summary_if_told_to(folder: Path) -> None:
    async with on_a_terminal(folder, "--exit") as (process, terminal):
        shown = await read_until(terminal, "never shown")
        assert await process.wait() == 0
    assert "illegal sequences sent to the provider: 0" in shown
    assert "Ctrl-C" not in shown


def test_a_promise_that_is_not_kept_is_named_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(demo.STEPS[0], kind="refused", reason="result.orphan")
    monkeypatch.setattr(demo, "STEPS", (wrong, demo.STEPS[1]))
    assert demo.run(stay=False) == 1
    out = capsys.readouterr().out
    assert (
        "NOT AS PROMISED  says hello: the app should see refused: result.orphan; it saw passed: text" in out
    )
    assert out.count("NOT AS PROMISED") == 2  # in its row, and below the sums


def test_a_sidecar_that_does_not_start_is_told_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(demo, "_port", lambda _preferred: port)
        assert demo.run(stay=False) == 1
    err = capsys.readouterr().err
    assert err.startswith("turngate demo: the sidecar did not start\n")
    assert f"cannot listen on listen 127.0.0.1:{port}: it is in use" in err


CUT = Call("call_1", "get_weather", '{"city":"Osl')
WHOLE = Call("call_1", "get_weather", '{"city":"Oslo"}')

PARTIAL: dict[str, tuple[Kind, tuple[Call, ...], int]] = {
    "whole calls of a turn that passed": ("passed", (WHOLE, WHOLE), 0),
    "a cut call of a turn that passed": ("passed", (WHOLE, CUT), 1),
    "arguments that are no object": ("passed", (replace(WHOLE, arguments="[]"),), 1),
    "a whole call of a turn that was retracted": ("retracted", (WHOLE,), 1),
    "text of a turn that was retracted": ("retracted", (), 0),
}


@pytest.mark.parametrize(("kind", "calls", "count"), PARTIAL.values(), ids=PARTIAL)
def test_the_agent_counts_calls_that_must_not_reach_it(
    kind: Kind, calls: tuple[Call, ...], count: int
) -> None:
    assert Got(kind, turn=Said("Let me look.", calls)).partial_calls == count


def chat_delta(**delta: object) -> Json:
    return {"choices": [{"index": 0, "delta": delta}]}


def fragment(text: str) -> Json:
    return chat_delta(tool_calls=[{"index": 0, "function": {"arguments": text}}])


HEAD: Json = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": ""}}
START: Json = {"type": "content_block_start", "index": 1}
USE: Json = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {}}


def block_delta(**delta: object) -> Json:
    return {"type": "content_block_delta", "index": 1, "delta": delta}


STREAMS: dict[str, tuple[Wire, list[Json], Said]] = {
    "chat": (
        CHAT,
        [chat_delta(content="Hm."), chat_delta(tool_calls=[HEAD]), fragment('{"city":"'), fragment("Osl")],
        Said("Hm.", (CUT,)),
    ),
    "messages": (
        MESSAGES,
        [
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hm."}},
            START | {"content_block": USE},
            block_delta(type="input_json_delta", partial_json='{"city":"'),
            block_delta(type="input_json_delta", partial_json="Osl"),
        ],
        Said("Hm.", (CUT,)),
    ),
}


@pytest.mark.parametrize(("wire", "events", "turn"), STREAMS.values(), ids=STREAMS)
def test_the_agent_would_see_half_a_call(wire: Wire, events: list[Json], turn: Said) -> None:
    assert wire.turn(events) == turn


def test_a_port_that_is_taken_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert demo._port(port) == 0
    assert demo._port(port) == port
