"""The ladder of a running proxy: which request is under which stage, and how that changes while streams are open.

What is in force shows in `x-turngate-operation`, which only enforced exchanges have, and in what becomes of an orphan.
"""

import asyncio
import dataclasses
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import openai
import pytest
import yaml
from running import InLoop, Sidecar, evidence, in_loop, settings_of, until

from turngate.adapters import levels
from turngate.adapters.registry import CHAT
from turngate.proxy import control, server
from turngate.proxy.keys import load_or_create_key
from turngate.proxy.rollout import Stage
from turngate.proxy.simulator import Simulator
from turngate.validators.checks import Grade, Level
from turngate.validators.graph import Check

MARK: Final = "x-turngate-operation"
TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
USER: Final = {"role": "user", "content": "Go on."}
ORPHAN: Final = {"role": "tool", "tool_call_id": "call_9", "content": "1"}
LENIENT: Final = {"refusals": False}
"""A provider that takes any sequence: what we refuse there is a false refusal."""

JsonObject = dict[str, Any]


@dataclass(slots=True)
class App:
    """Asks Chat Completions behind a proxy."""

    url: str
    session: aiohttp.ClientSession
    statuses: list[int] = field(default_factory=list)

    async def ask(
        self, *history: JsonObject, headers: dict[str, str] | None = None, tools: bool = False, **fields: Any
    ) -> tuple[bool, int]:
        """Whether the answer says that the exchange was enforced, and its status."""
        asked = {"model": "m", "messages": [USER, *history], **({"tools": TOOLS} if tools else {}), **fields}
        url = f"{self.url}/v1/chat/completions"
        async with self.session.post(url, json=asked, headers=headers) as answer:
            await answer.read()
            return MARK in answer.headers, answer.status


@asynccontextmanager
async def app(url: str) -> AsyncIterator[App]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield App(url, session)


@pytest.fixture(autouse=True)
def same_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which conversations are in a percentage hangs on the key."""
    monkeypatch.setattr(server, "load_or_create_key", lambda _path, size: bytes(range(size)))


# -- where a stage is in force --------------------------------------------------------------------------------------


async def test_a_scope_may_be_a_header_and_a_share_of_the_conversations(tmp_path: Path) -> None:
    scopes = [
        {"match": {"header": {"x-team": "blue*"}}, "stage": "enforce-tools"},
        {"match": {"model": "half-*"}, "stage": "enforce-tools", "percent": 50},
    ]
    async with (
        Simulator() as simulator,
        in_loop(tmp_path, {"openai": simulator.url}, scopes=scopes, conversation_from="x-chat") as sidecar,
        app(sidecar.url) as asking,
    ):
        assert await asking.ask(headers={"x-team": "blue-1"}) == (True, 200)
        assert await asking.ask(headers={"x-team": "red"}) == (False, 200)
        assert await asking.ask() == (False, 200)
        sides: dict[int, set[bool]] = {}
        for number in range(40):
            turn = {"role": "user", "content": f"Conversation {number}."}
            for named in ({"x-chat": f"chat {number}"}, None):
                body: JsonObject = {"model": "half-1", "messages": [turn]}
                longer: JsonObject = {
                    **body,
                    "messages": [turn, {"role": "assistant", "content": "Yes."}, USER],
                }
                key = 2 * number + (named is None)
                for fields in (body, longer):
                    enforced, _ = await asking.ask(headers=named, **fields)
                    sides.setdefault(key, set()).add(enforced)
    assert all(len(side) == 1 for side in sides.values())
    assert 20 < sum(True in side for side in sides.values()) < 60


async def test_each_stage_does_its_own_and_nothing_of_the_next(tmp_path: Path) -> None:
    """With the real SDK: what is refused, and whether the answer to a broken stream raises."""
    cut = {"answer": {"text": ["Hej.", " Hur"]}, "fault": {"cut_at_byte": 300, "clean_end": True}}
    steps = {"steps": [{"when": {"model": "cut"}, **cut}], **LENIENT}
    bad_text = [USER, {"role": "nobody", "content": "x"}]
    found: dict[str, list[str]] = {}
    async with Simulator(steps) as simulator, AsyncExitStack() as stack:
        for stage in Stage:
            sidecar = await stack.enter_async_context(
                in_loop(tmp_path / stage, {"openai": simulator.url}, stage=stage.value)
            )
            client = await stack.enter_async_context(
                openai.AsyncOpenAI(api_key="k", base_url=f"{sidecar.url}/v1", max_retries=0)
            )

            async def said(messages: list[Any], client: openai.AsyncOpenAI = client, **more: Any) -> str:
                try:
                    answer = await client.chat.completions.create(messages=messages, **more)
                    if isinstance(answer, openai.AsyncStream):
                        async for _ in answer:
                            pass
                except openai.BadRequestError:
                    return "refused"
                except openai.APIError:
                    return "raised"
                return "passed"

            found[stage] = [
                await said(bad_text, model="m"),
                await said([USER, ORPHAN], model="m"),
                await said([USER], model="cut", stream=True),
                await said([USER], model="cut", stream=True, tools=TOOLS),
            ]
    assert found == {
        "off": ["passed"] * 4,
        "observe": ["passed"] * 4,
        "enforce-text": ["refused", "passed", "raised", "passed"],
        "enforce-tools": ["refused", "refused", "raised", "raised"],
        "enforce-schema": ["refused", "refused", "raised", "raised"],
    }


# -- changes --------------------------------------------------------------------------------------------------------


async def test_a_settings_file_that_changes_changes_the_stages(tmp_path: Path) -> None:
    async with (
        Simulator() as simulator,
        Sidecar(tmp_path / "data", {"openai": simulator.url}) as sidecar,
        app(sidecar.url) as asking,
    ):
        assert await asking.ask() == (False, 200)
        file = tmp_path / "data.yaml"
        said = settings_of(tmp_path / "data", {"openai": simulator.url}, "observe", {})
        file.write_text(yaml.safe_dump({**said, "scopes": [{"stage": "enforce-text"}]}))

        async def enforced() -> bool:
            return (await asking.ask())[0]

        await until(enforced)
        file.write_text("stage: [no stage]\n")  # told, and nothing changes
        failures = "SELECT count(*) FROM failure_counted WHERE \"where\" = 'settings'"
        await until(lambda: evidence(tmp_path / "data", failures)[0][0])
        assert await asking.ask() == (True, 200)
        assert control.read(tmp_path / "data" / "ledger.sqlite3").rungs[0].stage == "enforce-text"


STREAMS: Final = 200
BY: Final = control.Operator("a tester", "to see it")


async def test_promotion_and_rollback_touch_no_open_stream(tmp_path: Path) -> None:
    """observe, ten percent, all, and back, while 200 streams run: each conversation is on one side, none is broken."""
    answer = {"text": [f"word{n} " for n in range(40)], "calls": [{"name": "f", "arguments": {}}]}
    steps = {"steps": [{"when": {"stream": True}, "answer": answer, "interval_s": 0.03}]}
    ledger = tmp_path / "ledger.sqlite3"
    sides: dict[str, list[set[bool]]] = {}
    whole = 0

    async def stream(asking: App, turn: int, chat: str, side: set[bool]) -> None:
        nonlocal whole
        asked = {"model": "m", "messages": [USER] * turn, "tools": TOOLS, "stream": True}
        headers = {"x-chat": chat}
        url = f"{asking.url}/v1/chat/completions"
        async with asking.session.post(url, json=asked, headers=headers) as got:
            side.add(MARK in got.headers)
            body = await got.read()
        assert body.endswith(b"data: [DONE]\n\n")
        assert body.count(b'"finish_reason":"tool_calls"') == 1
        whole += 1

    async def in_force(asking: App, chats: list[str]) -> list[set[bool]]:
        """Start a stream of each conversation; they are open when this returns."""
        found: list[set[bool]] = [set() for _ in chats]
        turn = len(sides) + 1
        started = [
            asyncio.create_task(stream(asking, turn, *each)) for each in zip(chats, found, strict=True)
        ]
        await until(lambda: all(found))
        running.extend(started)
        return found

    running: list[asyncio.Task[None]] = []
    chats = [f"chat {number}" for number in range(STREAMS // 4)]
    async with (
        Simulator(steps) as simulator,
        in_loop(tmp_path, {"openai": simulator.url}, conversation_from="x-chat") as sidecar,
        app(sidecar.url) as asking,
    ):

        async def obeyed(stage: str, percent: int) -> None:
            ladder = sidecar.proxy._services.ladder
            await until(lambda: (ladder.rungs[0].stage, ladder.rungs[0].percent) == (stage, percent))

        sides["observe"] = await in_force(asking, chats)
        for percent in (10, 100):
            rollout = control.read(ledger)
            control.put(ledger, rollout, "openai", Stage.ENFORCE_TOOLS, percent, BY)
            began_s = time.monotonic()
            await obeyed("enforce-tools", percent)
            took_s = time.monotonic() - began_s
            sides[f"{percent} %"] = await in_force(asking, chats)
        control.roll_back(ledger, control.read(ledger), "openai", BY)
        await obeyed("observe", 100)
        sides["rollback"] = await in_force(asking, chats)
        await asyncio.gather(*running)
        print(f"an order was in force after {took_s * 1000:.0f} ms")
    assert whole == STREAMS
    assert all(len(side) == 1 for step in sides.values() for side in step)
    enforced = {name: sum(True in side for side in step) for name, step in sides.items()}
    assert (enforced["observe"], enforced["100 %"], enforced["rollback"]) == (0, len(chats), 0)
    assert 0 < enforced["10 %"] < len(chats) // 2
    counts = dict(evidence(tmp_path, "SELECT stage, count(*) FROM exchange_ended GROUP BY ALL"))
    assert counts.pop("enforce-tools") == sum(enforced.values())
    assert counts == {"observe": STREAMS - sum(enforced.values())}
    told = evidence(tmp_path, "SELECT stage, percent, who, why FROM stage_ordered ORDER BY at_s")
    assert told == [
        ("enforce-tools", 10, *BY_WORDS),
        ("enforce-tools", 100, *BY_WORDS),
        ("observe", 100, *BY_WORDS),
    ]


BY_WORDS: Final = (BY.who, BY.why)


# -- automatic rollback ---------------------------------------------------------------------------------------------


def order_of(ledger: Path, scope: str) -> str | None:
    """The stage that stands for a scope by order."""
    try:
        order = control.read(ledger).in_force.get(scope)
    except sqlite3.Error:
        return None
    return order.stage if order is not None else None


@pytest.mark.parametrize("kind", ["false refusals", "misses", "truly illegal"])
async def test_what_turngate_gets_wrong_rolls_it_back_and_what_it_gets_right_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Half of the conversations are enforced; the other half shows what the provider says to the same."""
    if kind == "misses":
        right = levels.levels(CHAT.api, "openai")
        wrong = dataclasses.replace(right, grades={**right.grades, Check.RESULT_ORPHAN: Grade(Level.OFF)})
        monkeypatch.setattr(levels, "levels", lambda _api, _server: wrong)
    scenario = LENIENT if kind == "false refusals" else {}
    ledger = tmp_path / "ledger.sqlite3"
    async with (
        Simulator(scenario) as simulator,
        in_loop(tmp_path, {"openai": simulator.url}, conversation_from="x-chat") as sidecar,
        app(sidecar.url) as asking,
    ):
        control.put(ledger, control.read(ledger), "openai", Stage.ENFORCE_TOOLS, 50, BY)
        await until(lambda: sidecar.proxy._services.ladder.rungs[0].stage == "enforce-tools")
        for number in range(30):
            await asking.ask(ORPHAN, headers={"x-chat": f"chat {number}"})
        if kind == "truly illegal":
            await until(lambda: loaded(sidecar) >= 30)
            assert order_of(ledger, "openai") == "enforce-tools"
            return
        await until(lambda: order_of(ledger, "openai") == "observe")
        order = control.read(ledger).in_force["openai"]
        assert order.who == "turngate"
        assert kind.removesuffix("s") in order.evidence
        assert "result.orphan" in order.evidence
        await until(lambda: sidecar.proxy._services.ladder.rungs[0].stage == "observe")
        assert await asking.ask(ORPHAN, headers={"x-chat": "chat 1"}) == (
            False,
            400 if kind == "misses" else 200,
        )


def loaded(sidecar: InLoop) -> int:
    """Exchanges in the evidence."""
    try:
        return int(evidence(sidecar.data_dir, "SELECT count(*) FROM exchange_ended")[0][0])
    except Exception:  # noqa: BLE001 - nothing is there yet
        return 0


# -- the admin listener ---------------------------------------------------------------------------------------------


async def test_the_admin_listener_shows_and_changes_what_is_in_force(tmp_path: Path) -> None:
    async with (
        Simulator() as simulator,
        in_loop(tmp_path, {"openai": simulator.url}) as sidecar,
        aiohttp.ClientSession() as session,
    ):
        host, port = sidecar.proxy.listening.admin.getsockname()[:2]
        url = f"http://{host}:{port}/api/rollout"
        token = load_or_create_key(tmp_path / "keys" / "admin.token", 32).hex()
        headers = {"Authorization": f"Bearer {token}"}

        async def told(**change: Any) -> tuple[int, Any]:
            body = json.dumps({"by": "a tester", "why": "to see it", **change})
            async with session.post(url, data=body, headers=headers) as answer:
                return answer.status, await answer.json()

        async with session.get(url) as answer:
            assert [each["stage"] for each in (await answer.json())["scopes"]] == ["observe"]
        status, refused = await told(action="promote")
        assert status == 409
        assert refused["missing"] == ["0 of 500 samples"]
        status, now = await told(action="set", scope="openai", stage="enforce-tools", percent=10)
        assert status == 200
        assert (now["scopes"][0]["scope"], now["scopes"][0]["percent"]) == ("openai", 10)
        await until(lambda: sidecar.proxy._services.ladder.rungs[0].percent == 10)
        async with session.post(url, data=b"{}") as answer:
            assert answer.status in (401, 403)
