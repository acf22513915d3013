"""What a gate that holds costs and gives: its bounds, what the app hears meanwhile, and what it may have when.

The proxy runs in the test's own loop; the provider is a script that goes on when the test says so.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from running import InLoop, evidence, in_loop, ledger_rows
from wire_peers import EVENTS, TOOLS, answer, chunked, frame, length, read_message, sized

from turngate.adapters import sse
from turngate.proxy import server
from turngate.proxy.simulator import Simulator
from turngate.validators.gate import HoldBudget
from turngate.validators.ledger import Dispatch

CHAT: Final = b"/v1/chat/completions"
HANG_S: Final = 60.0
"""Only what never comes meets this bound."""
LONG_TEXT: Final = "The harbour is closed until the ice has gone."
DONE: Final = b"data: [DONE]\n\n"

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


def ask(*history: dict[str, Any], stream: bool = True, tools: Any = TOOLS, key: bytes = b"a") -> bytes:
    messages = [{"role": "user", "content": "Go on."}, *history]
    body = json.dumps({"model": "m", "messages": messages, "stream": stream, "tools": tools}).encode()
    return sized(CHAT, body, b"Authorization: Bearer " + key)


def delta(**fields: Any) -> bytes:
    choice = {"index": 0, "delta": {"tool_calls": [{"index": 0, **fields}]}, "finish_reason": None}
    return b"data: %s\n\n" % json.dumps({"id": "c1", "model": "m", "choices": [choice]}).encode()


def call(arguments: str, id_: str = "call_9k2m4x7q") -> tuple[bytes, ...]:
    opened = delta(id=id_, type="function", function={"name": "f", "arguments": ""})
    return opened, delta(function={"arguments": arguments}), frame(None, "tool_calls"), DONE


def pieces(*frames: bytes) -> bytes:
    """Frames as chunks, without the end."""
    return chunked(*frames)[: -len(b"0\r\n\r\n")]


STARTED: Final = answer(EVENTS + b"Transfer-Encoding: chunked\r\n")


@asynccontextmanager
async def provider(*scripts: Script) -> AsyncIterator[str]:
    """A server that answers its first request by the first script, and so on."""
    left = iter(scripts)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (await reader.read(1)) and await read_message(reader):
                await next(left)(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**22)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def whole(*frames: bytes) -> Script:
    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(STARTED + chunked(*frames))

    return script


def waiting(before: bytes, for_: asyncio.Event, behind: bytes) -> Script:
    """An answer in two parts."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(before)
        await writer.drain()
        await for_.wait()
        writer.write(behind)

    return script


@asynccontextmanager
async def app(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=2**22)
        try:
            yield reader, writer
        finally:
            writer.close()


async def answered(sidecar: InLoop, request: bytes) -> bytes:
    """The body of the answer to one request."""
    async with app(sidecar.url) as (reader, writer):
        writer.write(request)
        return (await read_message(reader, method=b"POST")).body


def held_bytes(sidecar: InLoop) -> int:
    return sidecar.proxy._services.holds.held_bytes


# What the app hears


async def test_an_app_hears_that_the_stream_is_alive_while_calls_are_held(tmp_path: Path) -> None:
    enough = asyncio.Event()
    frames = (frame("one"), *call('{"a": 1}'))
    script = waiting(STARTED + pieces(*frames[:2]), enough, chunked(*frames[2:]))
    async with (
        provider(script) as url,
        in_loop(
            tmp_path, {"openai": url}, stage="enforce-tools", observer=False, timeouts={"keep_alive_s": 0.02}
        ) as sidecar,
        app(sidecar.url) as (reader, writer),
    ):
        writer.write(ask())
        for _ in range(3):
            seen = await reader.readuntil(sse.KEEP_ALIVE)
            assert b"call_" not in seen
        enough.set()
        rest = await reader.readuntil(b"0\r\n\r\n")
    assert rest.endswith(chunked(b"".join(frames[1:])))


@pytest.mark.parametrize("frames", [(frame("one"), frame(None, "stop"), DONE), (frame("one"), *call("{}"))])
async def test_nothing_is_added_where_nothing_waits(tmp_path: Path, frames: tuple[bytes, ...]) -> None:
    async with (
        provider(whole(*frames)) as url,
        in_loop(
            tmp_path, {"openai": url}, stage="enforce-tools", observer=False, timeouts={"keep_alive_s": 60.0}
        ) as sidecar,
    ):
        assert await answered(sidecar, ask()) == b"".join(frames)


# Bounds


@dataclass(slots=True)
class Watched(HoldBudget):
    """Tells when so much is held."""

    full: asyncio.Event = field(default_factory=asyncio.Event)

    def resize(self, before: int, after: int) -> bool:
        done = HoldBudget.resize(self, before, after)
        if self.held_bytes >= 40_000:
            self.full.set()
        return done


async def test_what_all_answers_hold_together_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds = Watched(60_000)
    monkeypatch.setattr(server, "HoldBudget", lambda _: holds)
    large = '{"a": "' + 40_000 * "x" + '"}'
    go_on = asyncio.Event()
    first = call(large)
    async with (
        provider(
            waiting(STARTED + pieces(*first[:2]), go_on, chunked(*first[2:])),
            waiting(STARTED + pieces(*first[:2]), go_on, b""),
            whole(*call(large)),
        ) as url,
        in_loop(tmp_path, {"openai": url}, observer=False, stage="enforce-tools") as sidecar,
    ):
        one = asyncio.create_task(answered(sidecar, ask()))
        await holds.full.wait()
        second = await answered(sidecar, ask())
        assert b'"code":"limit.hold"' in second
        assert b"call_" not in second
        go_on.set()
        assert await one == b"".join(first)
        assert await answered(sidecar, ask()) == b"".join(first)
        assert holds.held_bytes == 0


async def test_a_whole_answer_is_held_within_the_same_bound(tmp_path: Path) -> None:
    body = json.dumps({"id": "c1", "choices": [], "pad": 70_000 * "x"}).encode()
    small = json.dumps(
        {"id": "c1", "choices": [{"index": 0, "message": {"content": "å"}, "finish_reason": "stop"}]}
    )

    def told(body: bytes) -> Script:
        async def script(writer: asyncio.StreamWriter) -> None:
            writer.write(answer(b"Content-Type: application/json\r\n" + length(body), body))

        return script

    async with (
        provider(told(body), told(small.encode())) as url,
        in_loop(
            tmp_path,
            {"openai": url},
            observer=False,
            stage="enforce-tools",
            limits={"hold_all_bytes": 60_000},
        ) as sidecar,
    ):
        refused = json.loads(await answered(sidecar, ask(stream=False)))
        assert refused["error"]["code"] == "limit.hold"
        assert held_bytes(sidecar) == 0
        assert await answered(sidecar, ask(stream=False)) == small.encode()


# What is declared

NEEDS_A: Final = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["a"]}}}
]


@pytest.mark.parametrize(
    ("stage", "frames", "reason"),
    [
        ("enforce-tools", call("{}"), ""),
        ("enforce-schema", call("{}"), "call.arguments_schema"),
        ("enforce-schema", call('{"a": 1}'), ""),
        ("observe", call("{}"), ""),
    ],
)
async def test_only_the_last_stage_holds_calls_against_their_schema(
    tmp_path: Path, stage: str, frames: tuple[bytes, ...], reason: str
) -> None:
    async with (
        provider(whole(*frames)) as url,
        in_loop(tmp_path, {"openai": url}, stage=stage) as sidecar,
    ):
        got = await answered(sidecar, ask(tools=NEEDS_A))
    if reason:
        assert b'"code":"%s"' % reason.encode() in got
        assert b"call_9k2m4x7q" not in got
    else:
        assert got == b"".join(frames)
    noted = evidence(tmp_path, "SELECT reason FROM anomaly_seen")
    assert noted == ([("call.arguments_schema",)] if frames[1] == call("{}")[1] and not reason else [])


# The ledger first


async def test_calls_are_let_go_when_the_turn_is_on_disk(tmp_path: Path) -> None:
    forever = asyncio.Event()
    frames = call("{}")
    async with (
        provider(waiting(STARTED + pieces(*frames), forever, chunked())) as url,
        in_loop(tmp_path, {"openai": url}, observer=False, stage="enforce-tools") as sidecar,
        app(sidecar.url) as (reader, writer),
    ):
        writer.write(ask())
        await reader.readuntil(b"call_9k2m4x7q")
        assert ledger_rows(tmp_path, "state, canonical, handle") == [("COMMITTED", 1, "c1")]
        forever.set()
        await reader.readuntil(b"0\r\n\r\n")


@pytest.mark.parametrize("stream", [True, False])
async def test_calls_of_a_turn_that_another_one_is_already_are_withheld(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    steps = {"steps": [{"answer": {"text": ["Hej."], "calls": [{"name": "f", "arguments": {}}]}}]}
    async with (
        Simulator(steps) as simulator,
        in_loop(tmp_path, {"openai": simulator.url}, observer=False, stage="enforce-tools") as sidecar,
    ):
        ledger = sidecar.proxy.ledger
        commit = ledger.commit

        async def lost(d: Dispatch, **how: Any) -> Dispatch:
            return msgspec.structs.replace(await commit(d, **how), strength="explicit", canonical=False)

        monkeypatch.setattr(ledger, "commit", lost)
        got = await answered(sidecar, ask(stream=stream))
    assert b"dispatch.conflict" in got
    assert b"tool_calls" not in got
    assert (b"Hej." in got) == stream


@pytest.mark.parametrize("clean", [True, False])
async def test_half_an_event_behind_the_end_is_dropped_and_nobody_is_alarmed(
    tmp_path: Path, clean: bool
) -> None:
    async def torn(writer: asyncio.StreamWriter) -> None:
        body = (frame("one"), frame(None, "stop"), b'data: {"id": "c1", "mod')
        writer.write(STARTED + (chunked(*body) if clean else pieces(*body)))
        writer.close()

    async with (
        provider(torn) as url,
        in_loop(tmp_path, {"openai": url}, stage="enforce-tools") as sidecar,
    ):
        assert await answered(sidecar, ask()) == frame("one") + frame(None, "stop")
    assert evidence(tmp_path, "SELECT outcome FROM exchange_ended") == [("passed",)]
    assert evidence(tmp_path, "SELECT * FROM witness_spoke") == []


# What was retracted


FINE: Final = (frame("All right."), frame(None, "stop"), DONE)
AGAIN: Final = {"role": "user", "content": "Again."}


async def cut(writer: asyncio.StreamWriter) -> None:
    """Text, and half a call."""
    writer.write(STARTED + pieces(frame(LONG_TEXT[:20]), frame(LONG_TEXT[20:]), call("{}")[0]))
    writer.close()


async def test_a_preview_that_comes_back_is_recognised_for_its_owner_alone(tmp_path: Path) -> None:
    fine = whole(*FINE)
    leak = {"role": "assistant", "content": LONG_TEXT}
    ran = {
        "role": "assistant",
        "tool_calls": [
            {"id": "call_9k2m4x7q", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
    result = {"role": "tool", "tool_call_id": "call_9k2m4x7q", "content": "1"}
    async with (
        provider(cut, fine, fine, fine) as url,
        in_loop(tmp_path, {"openai": url}, stage="enforce-tools") as sidecar,
    ):
        broken = await answered(sidecar, ask())
        assert LONG_TEXT[20:].encode() in broken
        assert b'"error"' in broken
        for key in (b"b", b"a"):
            assert b"All right." in await answered(sidecar, ask(leak, AGAIN, key=key))
        assert b"All right." in await answered(sidecar, ask(ran, result))
    found = evidence(
        tmp_path,
        "SELECT reason, l.at, whole, l.cause, r.operation = retracted_operation"
        " FROM preview_leaked l, preview_retracted r ORDER BY l.at_s",
    )
    assert found == [
        ("preview.leaked", "/messages/1", True, "stream.truncated", True),
        ("call.uncommitted", "/messages/1/tool_calls/0", True, "stream.truncated", True),
    ]


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        (LONG_TEXT, True),
        (LONG_TEXT[:20] + LONG_TEXT[20:30], False),
        ("Something else, as long as that was.", False),
    ],
    ids=["all of it", "a part", "another text"],
)
async def test_a_scope_may_refuse_what_its_app_was_told_to_drop(
    tmp_path: Path, said: str, refused: bool
) -> None:
    leak = {"role": "assistant", "content": said}
    scopes = [{"stage": "enforce-tools", "integrity": "enforce"}]
    async with (
        provider(cut, whole(*FINE)) as url,
        in_loop(tmp_path, {"openai": url}, scopes=scopes) as sidecar,
    ):
        assert b'"error"' in await answered(sidecar, ask())
        got = await answered(sidecar, ask(leak, AGAIN))
    if refused:
        error = json.loads(got)["error"]
        assert (error["code"], error["param"]) == ("preview.leaked", "/messages/1")
    else:
        assert got == b"".join(FINE)
    found = evidence(tmp_path, "SELECT reason, action FROM finding_made")
    assert found == ([("preview.leaked", "rejected")] if refused else [])


# What cannot be judged or written down

UNREADABLE: Final = b'{"model": "m", "model": "n", "messages": []}'


@pytest.mark.parametrize("uncovered", ["pass", "refuse"])
@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (UNREADABLE, b"400", "body.ambiguous"),
        (b"{", b"400", "body.undecodable"),
        (json.dumps({"messages": "x" * 3000}).encode(), b"413", "limit.body"),
    ],
    ids=["ambiguous", "undecodable", "large"],
)
async def test_a_scope_may_refuse_what_cannot_be_judged(
    tmp_path: Path, uncovered: str, body: bytes, status: bytes, reason: str
) -> None:
    scopes = [{"stage": "enforce-tools", "uncovered": uncovered}]
    async with (
        provider(whole(*FINE)) as url,
        in_loop(
            tmp_path, {"openai": url}, observer=False, scopes=scopes, limits={"body_bytes": 2000}
        ) as sidecar,
        app(sidecar.url) as (reader, writer),
    ):
        writer.write(sized(CHAT, body))
        got = await read_message(reader, method=b"POST")
    if uncovered == "pass":
        assert got.body == b"".join(FINE)
    else:
        assert got.first.split()[1] == status
        assert json.loads(got.body)["error"]["code"] == reason


@pytest.mark.parametrize("ledger_down", ["degrade", "refuse"])
async def test_a_scope_may_refuse_what_the_ledger_cannot_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger_down: str
) -> None:
    scopes = [{"stage": "enforce-tools", "ledger_down": ledger_down}]
    async with (
        provider(whole(*FINE)) as url,
        in_loop(tmp_path, {"openai": url}, observer=False, scopes=scopes) as sidecar,
        app(sidecar.url) as (reader, writer),
    ):
        await sidecar.proxy.ledger.close()
        writer.write(ask())
        got = await read_message(reader, method=b"POST")
    if ledger_down == "degrade":
        assert got.body == b"".join(FINE)
    else:
        assert got.first.split()[1] == b"503"
        assert got.get(b"x-turngate-reason") == b"internal"


# A second attempt


def half_json(body: bytes) -> Script:
    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"Content-Type: application/json\r\n" + length(body), body[:20]))
        await writer.drain()
        writer.close()

    return script


async def nothing(writer: asyncio.StreamWriter) -> None:
    writer.close()


SMALL: Final = json.dumps(
    {"id": "c1", "choices": [{"index": 0, "message": {"content": "å"}, "finish_reason": "stop"}]}
).encode()


@pytest.mark.parametrize(
    ("first", "stream", "again"),
    [(nothing, True, True), (nothing, False, True), (half_json(SMALL), False, True), (cut, True, False)],
    ids=["no head of a stream", "no head", "half a JSON answer", "a stream that has begun"],
)
@pytest.mark.parametrize("reattempt", ["never", "confirmed"])
async def test_a_request_without_any_answer_may_be_sent_once_more(
    tmp_path: Path, first: Script, stream: bool, again: bool, reattempt: str
) -> None:
    async def second(writer: asyncio.StreamWriter) -> None:
        json_answer = answer(b"Content-Type: application/json\r\n" + length(SMALL), SMALL)
        writer.write(STARTED + chunked(*FINE) if stream else json_answer)

    scopes = [{"stage": "enforce-tools", "reattempt": reattempt}]
    async with (
        provider(first, second) as url,
        in_loop(tmp_path, {"openai": url}, observer=False, scopes=scopes) as sidecar,
    ):
        got = await answered(sidecar, ask(stream=stream))
    rows = ledger_rows(tmp_path, "attempt_generation, state, how")
    if again and reattempt == "confirmed":
        assert got == (b"".join(FINE) if stream else SMALL)
        assert [(row[0], row[2]) for row in rows] == [(1, "asked_again"), (2, "")]
        assert rows[1][1] == "COMMITTED"
    else:
        assert b'"error"' in got
        assert len(rows) == 1


async def test_there_is_no_third_attempt(tmp_path: Path) -> None:
    scopes = [{"stage": "enforce-tools", "reattempt": "confirmed"}]
    async with (
        provider(nothing, nothing, whole(*FINE)) as url,
        in_loop(tmp_path, {"openai": url}, observer=False, scopes=scopes) as sidecar,
    ):
        refused = json.loads(await answered(sidecar, ask()))
    assert refused["error"]["code"] == "dispatch.unknown_outcome"
    assert len(ledger_rows(tmp_path)) == 2
