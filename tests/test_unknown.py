"""`turngate unknown`: what an operator sees, says, and what the proxy and the observer make of it."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from turngate.proxy import cli_unknown
from turngate.proxy.ledger_sqlite import ClaimConflict, Ledger
from turngate.proxy.ledger_store import Store, read_dispatches
from turngate.telemetry.metrics import Registry
from turngate.telemetry.recorder import Recorder
from turngate.validators.ledger import Dispatch, State

CHAT: Mapping[str, Any] = {"conversation": "c", "strength": "explicit", "revision": 1}


def dispatch(operation: str, state: State = State.UNKNOWN, *, age_s: float = 0.0, **more: Any) -> Dispatch:
    since_s = time.time() - age_s
    values = {"instance": "i", "upstream": "openai", "model": "gpt-5", "how": "eof", **more}
    return Dispatch(
        operation=operation,
        api="openai_chat",
        request_digest="00ff",
        settle_s=600.0,
        state=state,
        opened_s=since_s,
        changed_s=since_s,
        unknown_since_s=since_s if state is State.UNKNOWN else 0.0,
        **values,
    )


def ledger_of(data_dir: Path, *rows: Dispatch, lease_s: float = 1_000.0) -> Path:
    """A ledger file as a proxy would have left it, which was killed."""
    path = data_dir / "ledger.sqlite3"
    store = Store(path, "i", lease_s=lease_s, unknown_ttl_s=600.0, retention_s=1e9, started_s=time.time())
    store.connect()
    store.write(rows, [], [], now_s=time.time())
    store.disconnect()
    return path


def turngate_unknown(data_dir: Path, *arguments: str) -> Result:
    command, *rest = arguments
    return CliRunner().invoke(cli_unknown.app, [command, "--data-dir", str(data_dir), *rest])


def test_they_are_listed_oldest_first_and_nothing_else_is(tmp_path: Path) -> None:
    ledger_of(
        tmp_path,
        dispatch("op-new", age_s=5.0),
        dispatch("op-old", age_s=3_700.0, how="stream.truncated", upstream="[red]", conversation="c-7"),
        dispatch("op-open", State.STREAMING),
        dispatch("op-done", State.COMMITTED),
    )
    listed = turngate_unknown(tmp_path, "list")
    assert listed.exit_code == 0
    first, second = (line for line in listed.stdout.splitlines() if "op-" in line)
    assert [cell.strip() for cell in first.split("│")[1:-1]] == [
        *("op-old", "1:01:40", "[red]", "gpt-5", "stream.truncated", "c-7")
    ]
    assert "op-new" in second


def test_json_is_one_object_a_line(tmp_path: Path) -> None:
    ledger_of(tmp_path, dispatch("op-1", age_s=5.0, handle="resp_1", ended_by="retrieval", **CHAT))
    listed = turngate_unknown(tmp_path, "list", "--json")
    (found,) = map(json.loads, listed.stdout.splitlines())
    assert found.pop("age_s") == pytest.approx(time.time() - found.pop("since_s"), abs=60.0)
    assert found == {
        "operation": "op-1",
        "upstream": "openai",
        "api": "openai_chat",
        "model": "gpt-5",
        "how": "eof",
        "handle": "resp_1",
        "conversation": "c",
        "revision": 1,
        "ended_by": "retrieval",
    }


def test_what_a_dead_process_had_open_is_listed_before_any_sweep(tmp_path: Path) -> None:
    ledger_of(tmp_path, dispatch("op-1", State.SENT, how=""), lease_s=0.0)
    listed = turngate_unknown(tmp_path, "list", "--json")
    assert [json.loads(line)["how"] for line in listed.stdout.splitlines()] == ["lease_ended"]


def test_none_is_said_and_has_its_exit_code(tmp_path: Path) -> None:
    ledger_of(tmp_path, dispatch("op-1", State.COMMITTED))
    listed = turngate_unknown(tmp_path, "list", "--json")
    assert (listed.exit_code, listed.stdout, listed.stderr) == (1, "", "no dispatch is UNKNOWN\n")


RESOLUTIONS = {"committed": (State.COMMITTED, "complete", True), "abandoned": (State.ABANDONED, "", False)}


@pytest.mark.parametrize(("word", "expected"), RESOLUTIONS.items(), ids=RESOLUTIONS)
def test_a_resolution_is_stored_with_who_and_why_and_told(
    tmp_path: Path, word: str, expected: tuple[State, str, bool]
) -> None:
    path = ledger_of(tmp_path, dispatch("op-1", age_s=50.0, **CHAT), dispatch("op-2", age_s=7.0))
    said = turngate_unknown(tmp_path, "resolve", "op-1", "--as", word, "--why", "asked the provider")
    assert (said.exit_code, said.stdout) == (0, f"op-1 is {word}\n")
    first, second = read_dispatches(path)
    assert (first.state, first.end, first.canonical) == expected
    assert (first.how, second.state) == ("operator", State.UNKNOWN)
    registry = Registry("1")
    recorder = Recorder(tmp_path / "spool", tmp_path / "evidence", registry)
    assert recorder.load_pending() == 1
    recorder.close()
    assert registry.value("dispatch_transitions_total", "UNKNOWN", expected[0].value) == 1


def test_what_is_not_unknown_stays_and_the_others_are_resolved(tmp_path: Path) -> None:
    path = ledger_of(
        tmp_path, dispatch("op-1"), dispatch("op-2", State.REFUSED), dispatch("op-3", State.SENT)
    )
    said = turngate_unknown(
        tmp_path, *("resolve", "op-1", "op-2", "op-3", "op-4", "--as", "abandoned", "--why", "")
    )
    assert (said.exit_code, said.stdout) == (1, "op-1 is abandoned\n")
    assert said.stderr == "".join(f"op-{n} is not UNKNOWN\n" for n in (2, 3, 4))
    assert [d.state for d in read_dispatches(path)] == [State.ABANDONED, State.REFUSED, State.SENT]


def test_the_first_word_stands(tmp_path: Path) -> None:
    path = ledger_of(tmp_path, dispatch("op-1"))
    for word, code in (("committed", 0), ("abandoned", 1)):
        said = turngate_unknown(tmp_path, "resolve", "op-1", "--as", word, "--why", "")
        assert said.exit_code == code
    assert [d.state for d in read_dispatches(path)] == [State.COMMITTED]


async def test_a_running_proxy_goes_by_the_resolution_with_its_next_claim(tmp_path: Path) -> None:
    ledger = Ledger(
        tmp_path / "ledger.sqlite3",
        instance="i",
        emit=lambda event: None,
        loop=asyncio.get_running_loop(),
    )
    ledger.open()
    for n, word in enumerate(RESOLUTIONS):
        chat = {**CHAT, "conversation": word, "ended_by": "never"}
        d = dispatch(f"{n}-first", State.DISPATCHING, **chat)
        await ledger.claim(d)
        ledger.move(d, State.UNKNOWN, how="eof")
        with pytest.raises(ClaimConflict) as pending:
            await ledger.claim(dispatch(f"{n}-early", State.DISPATCHING, **chat))
        assert pending.value.refusal.reason == "dispatch.unknown_outcome"
        arguments = ("resolve", f"{n}-first", "--as", word, "--why", "")
        assert (await asyncio.to_thread(turngate_unknown, tmp_path, *arguments)).exit_code == 0
        claim = ledger.claim(dispatch(f"{n}-next", State.DISPATCHING, **chat))
        if word == "abandoned":
            await claim
        else:
            with pytest.raises(ClaimConflict) as taken:
                await claim
            assert taken.value.refusal.operation == f"{n}-first"
    await ledger.close()


def test_without_a_ledger_it_says_where_it_looked(tmp_path: Path) -> None:
    listed = turngate_unknown(tmp_path, "list")
    assert (listed.exit_code, str(tmp_path) in listed.stderr) == (64, True)


def test_a_ledger_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite3").write_bytes(b"no database, by far" * 100)
    assert turngate_unknown(tmp_path, "list").exit_code == 70
    said = turngate_unknown(tmp_path, "resolve", "op-1", "--as", "abandoned", "--why", "")
    assert said.exit_code == 70


USAGE = {
    "no reason": ("resolve", "op-1", "--as", "abandoned"),
    "no such end": ("resolve", "op-1", "--as", "lost", "--why", ""),
    "no operation": ("resolve", "--as", "abandoned", "--why", ""),
}


def test_a_wrong_command_line_has_the_code_for_usage() -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "turngate", "unknown", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for arguments in USAGE.values()
    ]
    assert [process.wait(timeout=60) for process in started] == [64] * len(USAGE)
