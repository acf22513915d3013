"""What the ledger makes of conversations in a running proxy: those that an app names, and those it does not."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import openai
import pytest
from running import evidence, in_loop, ledger_rows, until
from typer.testing import CliRunner

from turngate.proxy import cli_unknown
from turngate.proxy.simulator import Simulator

RACES: Final = int(os.environ.get("RACES", "50"))
NAMED: Final[dict[str, Any]] = {"conversation_from": "x-chat"}
TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
USER: Final = {"role": "user", "content": "Go on."}
YES: Final = {"role": "assistant", "content": "Yes."}
SLOW: Final = {"steps": [{"when": {"model": "slow"}, "answer": {"text": "Hej."}, "delay_s": 3600.0}]}


@dataclass(frozen=True, slots=True)
class Said:
    """What came back: status, our reason, the error's text, and whether the SDK is told to ask again."""

    status: int
    reason: str | None
    message: str
    retry: str | None


@dataclass(frozen=True, slots=True)
class App:
    url: str
    session: aiohttp.ClientSession

    async def ask(self, *history: dict[str, Any], chat: str = "one", key: str = "a", **fields: Any) -> Said:
        asked = {"model": "m", "messages": [USER, *history], "tools": TOOLS, **fields}
        headers = {"x-chat": chat, "authorization": f"Bearer {key}"}
        async with self.session.post(
            f"{self.url}/v1/chat/completions", json=asked, headers=headers
        ) as answer:
            text = await answer.text()
            message = json.loads(text)["error"]["message"] if answer.status >= 400 else ""
            told = answer.headers
            return Said(answer.status, told.get("x-turngate-reason"), message, told.get("x-should-retry"))


@asynccontextmanager
async def app(url: str) -> AsyncIterator[App]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield App(url, session)


async def gone(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


# -- conversations that the app names -------------------------------------------------------------------------------


async def test_of_two_that_want_one_turn_one_is_sent(tmp_path: Path) -> None:
    async with (
        Simulator(SLOW) as simulator,
        in_loop(tmp_path, {"openai": simulator.url}, stage="enforce-tools", **NAMED) as sidecar,
        app(sidecar.url) as asking,
    ):
        first = asyncio.create_task(asking.ask(model="slow"))
        await until(lambda: ledger_rows(tmp_path, "state") == [("SENT",)])
        second = await asking.ask()
        assert (second.status, second.reason, second.retry) == (409, "dispatch.conflict", "false")
        assert "is being answered" in second.message
        assert (await asking.ask(chat="another")).status == 200
        assert (await asking.ask(key="b")).status == 200  # another owner's conversation of the same name
        assert len(simulator.requests) == 3
        await gone(first)
        await until(lambda: ("CANCELLED",) in ledger_rows(tmp_path, "state"))
        assert (await asking.ask()).status == 200  # the app left: its turn is free again
    assert evidence(tmp_path, "SELECT status FROM exchange_ended WHERE outcome = 'refused'") == [(409,)]


async def test_a_turn_that_is_there_is_not_answered_again(tmp_path: Path) -> None:
    async with (
        Simulator() as simulator,
        in_loop(tmp_path, {"openai": simulator.url}, stage="enforce-tools", **NAMED) as sidecar,
        app(sidecar.url) as asking,
    ):
        assert (await asking.ask()).status == 200
        again = await asking.ask()
        assert (again.status, again.reason) == (409, "dispatch.conflict")
        assert "already has its turn" in again.message
        assert (await asking.ask(YES, USER)).status == 200
    rows = ledger_rows(tmp_path, "revision, state, canonical, strength")
    assert rows == [(1, "COMMITTED", 1, "explicit"), (3, "COMMITTED", 1, "explicit")]


@pytest.mark.parametrize("stage", ["observe", "enforce-text"])
async def test_where_a_request_is_not_enforced_nothing_is_refused(tmp_path: Path, stage: str) -> None:
    async with (
        Simulator() as simulator,
        in_loop(tmp_path, {"openai": simulator.url}, stage=stage, **NAMED) as sidecar,
        app(sidecar.url) as asking,
    ):
        assert {(await asking.ask()).status for _ in range(3)} == {200}
    assert Counter(ledger_rows(tmp_path, "revision, canonical")) == {(1, 1): 1, (1, 0): 2}


async def test_what_nobody_can_know_waits_for_its_time_or_an_operator(tmp_path: Path) -> None:
    """A provider's own tool at a third party: whether it ran is not known when the connection breaks."""
    cut = {"answer": {"text": "Hej."}, "fault": {"cut_at_byte": 0, "how": "reset"}}
    tools = [{"type": "mcp_toolset", "mcp_server_name": "s"}]
    asked = {"model": "m", "max_tokens": 9, "messages": [USER], "tools": tools}
    async with (
        Simulator({"steps": [cut], "refusals": False}) as simulator,
        in_loop(tmp_path, {"anthropic": simulator.url}, stage="enforce-tools", **NAMED) as sidecar,
        aiohttp.ClientSession() as session,
    ):

        async def ask() -> tuple[int, str | None]:
            headers = {"x-chat": "one", "anthropic-version": "2023-06-01"}
            async with session.post(f"{sidecar.url}/v1/messages", json=asked, headers=headers) as answer:
                await answer.read()
                return answer.status, answer.headers.get("x-turngate-reason")

        first = await ask()
        assert first[0] == 502
        await until(lambda: ledger_rows(tmp_path, "state, ended_by") == [("UNKNOWN", "never")])
        assert await ask() == (409, "dispatch.unknown_outcome")
        (operation,) = ledger_rows(tmp_path, "operation")[0]
        command = [
            "resolve",
            "--data-dir",
            str(tmp_path),
            operation,
            "--as",
            "abandoned",
            "--why",
            "looked it up",
        ]
        resolved = await asyncio.to_thread(CliRunner().invoke, cli_unknown.app, command)
        assert resolved.exit_code == 0, resolved.output
        assert (await ask())[0] == 200


# -- conversations that it does not name ----------------------------------------------------------------------------


async def test_a_hiccup_and_the_sdk_s_own_retry_block_nothing(tmp_path: Path) -> None:
    """The connection breaks before the head; the real SDK asks again, and the conversation goes on."""
    cut = {"times": 1, "answer": {"text": "Hej."}, "fault": {"cut_at_byte": 0, "how": "reset"}}
    steps = {"steps": [{"when": {"contains": "Go on."}, **cut}]}
    async with (
        Simulator(steps) as simulator,
        in_loop(tmp_path, {"openai": simulator.url}) as sidecar,
        openai.AsyncOpenAI(api_key="k", base_url=f"{sidecar.url}/v1", max_retries=2) as client,
    ):
        said: list[Any] = [USER]
        for _ in range(3):
            answer = await client.chat.completions.create(model="m", messages=said)
            said += [{"role": "assistant", "content": answer.choices[0].message.content}, USER]
        assert len(simulator.requests) == 4
    rows = evidence(
        tmp_path,
        "SELECT e.outcome, b.outcome FROM exchange_ended e LEFT JOIN exchange_ended b ON b.operation = e.retry_of"
        " ORDER BY e.at_s",
    )
    assert rows[0][0] != "passed"
    assert rows[1] == ("passed", rows[0][0])
    assert rows[2:] == [("passed", None)] * 2


# -- a race ---------------------------------------------------------------------------------------------------------

RACER: Final = """
import openai, sys
client = openai.OpenAI(api_key="k", base_url=sys.argv[1], default_headers={"x-chat": "race"})
for line in sys.stdin:
    messages = [{"role": "user", "content": "Go on."}] * int(line)
    try:
        client.chat.completions.create(model="m", messages=messages)
        print("won", flush=True)
    except openai.ConflictError as error:
        print(error.code, flush=True)
"""


async def test_two_sdk_clients_in_two_processes_race_and_exactly_one_wins(tmp_path: Path) -> None:
    """RACES=1000 for the long form. The loser's SDK does not ask again: as many requests arrive as there are turns."""
    async with (
        Simulator({"refusals": False}) as simulator,
        in_loop(tmp_path, {"openai": simulator.url}, stage="enforce-tools", **NAMED) as sidecar,
    ):
        racers = [
            await create_subprocess_exec(
                sys.executable, "-c", RACER, f"{sidecar.url}/v1", stdin=PIPE, stdout=PIPE
            )
            for _ in range(2)
        ]

        async def race(turn: int, racer: asyncio.subprocess.Process) -> str:
            assert racer.stdin is not None
            assert racer.stdout is not None
            racer.stdin.write(b"%d\n" % turn)
            return (await racer.stdout.readline()).decode().strip()

        for turn in range(1, RACES + 1):
            outcomes = await asyncio.gather(*(race(turn, racer) for racer in racers))
            assert sorted(outcomes) == ["dispatch.conflict", "won"]
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.close()
            assert await racer.wait() == 0
        assert len(simulator.requests) == RACES
    rows = ledger_rows(tmp_path, "revision, state, canonical")
    assert rows == [(turn, "COMMITTED", 1) for turn in range(1, RACES + 1)]
