"""The ladder of a running proxy: which request is under which stage, and how that changes while streams are open.

What is in force shows in `x-turngate-operation`, which only enforced exchanges have, and in what becomes of an orphan.
"""

import asyncio
import dataclasses
import json
import re
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import anthropic
import msgspec
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
from turngate.proxy.simulator import server as simulator_server
from turngate.telemetry.events import AnyEvent, ExchangeEnded
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


async def ordered(sidecar: InLoop, stage: Stage) -> None:
    """Wait until an order for everything is in force."""
    await until(lambda: sidecar.proxy._services.ladder.ordered is stage)


PARAMETERS: Final = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
CHAT_TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
MESSAGES_TOOLS: Final = [{"name": "f", "input_schema": PARAMETERS}]
NOBODY: Final = {"role": "nobody", "content": "x"}
ORPHAN_RESULT: Final = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "toolu_9", "content": "1"}],
}
CASES: Final = ("illegal text", "illegal tool turn", "text cut", "tool turn cut", "call against its schema")
P, R, E = "passed", "refused", "raised"
BY_STAGE: Final = {
    Stage.OFF: (P, P, P, P, P),
    Stage.OBSERVE: (P, P, P, P, P),
    Stage.ENFORCE_TEXT: (R, P, E, P, P),
    Stage.ENFORCE_TOOLS: (R, R, E, E, P),
    Stage.ENFORCE_SCHEMA: (R, R, E, E, E),
}
"""What an app's SDK makes of each case, in either dialect."""


async def test_each_stage_does_its_own_and_nothing_of_the_next(tmp_path: Path) -> None:
    """With the real SDKs: what is refused, and whether a broken answer or a call that does not fit raises."""
    cut = {"answer": {"text": ["Hej.", " Hur"]}, "fault": {"cut_at_byte": 300, "clean_end": True}}
    misfit = {"answer": {"calls": [{"name": "f", "arguments": {"n": "one"}}]}}
    plays = [{"when": {"model": name}, **how} for name, how in (("cut", cut), ("misfit", misfit))]
    async with (
        Simulator({"steps": plays, **LENIENT}) as simulator,
        in_loop(tmp_path, {"openai": simulator.url, "anthropic": simulator.url}, observer=False) as sidecar,
        openai.AsyncOpenAI(api_key="k", base_url=f"{sidecar.url}/v1", max_retries=0) as chat,
        anthropic.AsyncAnthropic(api_key="k", base_url=sidecar.url, max_retries=0) as messages,
    ):

        async def asked_chat(history: list[Any], **fields: Any) -> None:
            async for _ in await chat.chat.completions.create(messages=history, stream=True, **fields):
                pass

        async def asked_messages(history: list[Any], **fields: Any) -> None:
            stream = await messages.messages.create(messages=history, stream=True, max_tokens=99, **fields)
            async for _ in stream:
                pass

        async def became(asking: Coroutine[Any, Any, None]) -> str:
            try:
                await asking
            except (openai.BadRequestError, anthropic.BadRequestError):
                return R
            except (openai.APIError, anthropic.APIError):
                return E
            return P

        for stage, expected in BY_STAGE.items():
            control.give(tmp_path / "ledger.sqlite3", stage, who="a tester", why="to see it")
            await ordered(sidecar, stage)
            for asked, orphan, tools in (
                (asked_chat, ORPHAN, CHAT_TOOLS),
                (asked_messages, ORPHAN_RESULT, MESSAGES_TOOLS),
            ):
                found = [
                    await became(asked([USER, NOBODY], model="m")),
                    await became(asked([USER, orphan], model="m")),
                    await became(asked([USER], model="cut")),
                    await became(asked([USER], model="cut", tools=tools)),
                    await became(asked([USER], model="misfit", tools=tools)),
                ]
                told = dict(zip(CASES, found, strict=True))
                assert told == dict(zip(CASES, expected, strict=True)), (stage, asked.__name__)


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
        file.write_text(
            yaml.safe_dump({**said, "scopes": [{"stage": "enforce-text", "uncovered": "refuse"}]})
        )

        async def enforced() -> bool:
            return (await asking.ask())[0]

        await until(enforced)
        async with asking.session.post(f"{asking.url}/v1/chat/completions", data=b"{") as answer:
            assert answer.status == 400  # what a scope says beside its stage holds as well
            assert answer.headers["x-turngate-reason"] == "body.undecodable"
        file.write_text("stage: [no stage]\n")  # told, and nothing changes

        async def told() -> bool:
            async with asking.session.get(f"{sidecar.metrics_url}/metrics") as answer:
                return 'turngate_observer_failures_total{where="settings"} 1.0' in await answer.text()

        await until(told)
        assert await asking.ask() == (True, 200)
        assert control.read(tmp_path / "data" / "ledger.sqlite3").rungs[0].stage == "enforce-text"


STREAMS: Final = 200
BY: Final = control.Operator("a tester", "to see it")


class Clockwork:
    """Takes the place of `asyncio` where the simulator paces its streams: each goes one event further at a tick."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self.runs_freely = False

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        if seconds and not self.runs_freely:
            await self._next.wait()

    def tick(self) -> None:
        self._next.set()
        self._next = asyncio.Event()


async def test_promotion_and_rollback_touch_no_open_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """observe, ten percent, all, and back, while 200 streams run: each conversation is on one side, none is broken."""
    clockwork = Clockwork()
    monkeypatch.setattr(simulator_server, "asyncio", clockwork)
    answer = {"text": [f"word{n} " for n in range(9)], "calls": [{"name": "f", "arguments": {}}]}
    steps = {"steps": [{"when": {"stream": True}, "answer": answer, "interval_s": 1.0}]}
    ledger = tmp_path / "ledger.sqlite3"
    chats = [f"chat {number}" for number in range(STREAMS // 4)]
    sides: dict[str, list[bool]] = {}
    running: list[asyncio.Task[bytes]] = []
    async with (
        Simulator(steps) as simulator,
        in_loop(tmp_path, {"openai": simulator.url}, conversation_from="x-chat") as sidecar,
        app(sidecar.url) as asking,
    ):

        async def begin(chat: str) -> bool:
            """Whether the stream of a conversation's next turn is enforced; it is open when this returns."""
            asked = {"model": "m", "messages": [USER] * (len(sides) + 1), "tools": TOOLS, "stream": True}
            url = f"{asking.url}/v1/chat/completions"
            got = await asking.session.post(url, json=asked, headers={"x-chat": chat})
            running.append(asyncio.create_task(got.read()))
            return MARK in got.headers

        async def begin_all(name: str) -> None:
            sides[name] = list(await asyncio.gather(*map(begin, chats)))
            clockwork.tick()

        async def obeyed(stage: Stage, percent: int) -> None:
            ladder = sidecar.proxy._services.ladder
            await until(lambda: (ladder.rungs[0].stage, ladder.rungs[0].percent) == (stage, percent))

        await begin_all("observe")
        for percent in (10, 100):
            control.put(ledger, control.read(ledger), "openai", Stage.ENFORCE_TOOLS, percent, BY)
            await obeyed(Stage.ENFORCE_TOOLS, percent)
            await begin_all(f"{percent} %")
        control.roll_back(ledger, control.read(ledger), "openai", BY)
        await obeyed(Stage.OBSERVE, 100)
        await begin_all("rollback")
        assert len(running) == STREAMS
        assert not any(stream.done() for stream in running)
        clockwork.runs_freely = True
        clockwork.tick()
        for body in await asyncio.gather(*running):
            assert body.endswith(b"data: [DONE]\n\n")
            assert body.count(b'"finish_reason":"tool_calls"') == 1
            assert b'"name":"f"' in body
        sums = await counted(sidecar.metrics_url, STREAMS)
    enforced = {name: sum(side) for name, side in sides.items()}
    assert (enforced["observe"], enforced["100 %"], enforced["rollback"]) == (0, len(chats), 0)
    assert 0 < enforced["10 %"] < len(chats) // 2
    promoted = sum(enforced.values())
    assert sums == {("passed", "enforce-tools"): promoted, ("passed", "observe"): STREAMS - promoted}
    rows = evidence(tmp_path, "SELECT outcome, stage, count(*) FROM exchange_ended GROUP BY ALL")
    assert {(outcome, stage): count for outcome, stage, count in rows} == sums
    told = evidence(tmp_path, "SELECT stage, percent, who, why, automatic FROM stage_ordered ORDER BY at_s")
    assert told == [
        ("enforce-tools", 10, BY.who, BY.why, False),
        ("enforce-tools", 100, BY.who, BY.why, False),
        ("observe", 100, BY.who, BY.why, False),
    ]


async def counted(metrics_url: str, count: int) -> dict[tuple[str, str], int]:
    """Requests by outcome and stage as Prometheus would read them, once there are so many.

    Not by the evidence: who reads that often keeps the observer from writing it.
    """
    sample = re.compile(
        r'^turngate_requests_total\{.*outcome="(.+?)".*stage="(.+?)".*\} (\S+)$', re.MULTILINE
    )

    async def scraped() -> Counter[tuple[str, str]]:
        async with aiohttp.request("GET", f"{metrics_url}/metrics") as answer:
            found = sample.findall(await answer.text())
        sums: Counter[tuple[str, str]] = Counter()
        for outcome, stage, value in found:
            sums[outcome, stage] += int(float(value))
        return +sums if sums.total() == count else Counter()

    return dict(await until(scraped))


async def test_an_order_to_enforce_is_not_for_a_request_that_is_on_its_way(tmp_path: Path) -> None:
    """Its body still comes when the order does: it was sent unclaimed, so it is observed to its end."""
    body = json.dumps({"model": "m", "messages": [USER, ORPHAN], "tools": TOOLS}).encode()
    async with (
        Simulator(LENIENT) as simulator,
        in_loop(tmp_path, {"openai": simulator.url}, observer=False) as sidecar,
        app(sidecar.url) as asking,
    ):
        ladder = sidecar.proxy._services.ladder

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:20]
            await until(lambda: sidecar.proxy._exchanges and simulator.connections_open)
            ladder.ordered = Stage.ENFORCE_TOOLS
            yield body[20:]

        async with asking.session.post(f"{asking.url}/v1/chat/completions", data=slowly()) as answer:
            assert (MARK in answer.headers, answer.status) == (False, 200)
        assert await asking.ask(ORPHAN, tools=True) == (True, 400)
    assert ended(tmp_path) == [("observe", "passed"), ("enforce-tools", "refused")]


def ended(data_dir: Path) -> list[tuple[str, str]]:
    """Stage and outcome of each exchange that the proxy told of, where no observer loads it."""
    read = msgspec.json.Decoder(AnyEvent).decode_lines
    events = [
        each for path in sorted((data_dir / "spool").glob("*.jsonl")) for each in read(path.read_bytes())
    ]
    return [(each.stage, each.outcome) for each in events if isinstance(each, ExchangeEnded)]


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
            await counted(sidecar.metrics_url, 30)
            await asking.ask()
            # Events go to whoever rolls back after they were counted, and before the next ones are.
            await counted(sidecar.metrics_url, 31)
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
    async with in_loop(tmp_path, {"openai": simulator.url}, observer=False) as sidecar:
        rung = sidecar.proxy._services.ladder.rungs[0]
        assert (rung.name, rung.stage, rung.percent) == ("openai", "enforce-tools", 10)  # kept, and at once
