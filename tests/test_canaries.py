"""Marked credentials and contents, put wherever a request or an answer can hold some, are in nothing that we write.

Nothing means: every file below `data_dir` (raw, and each column of the evidence), what goes to stderr, `/metrics`, the admin
listener, spans and OTLP metrics, the command line of the observer. The model's name is the control: it is a label and a
column by design, so it must be found in each of them, or the search would be blind there.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import duckdb
import pytest
from aiohttp import web
from running import Sidecar, in_loop
from test_tracing import Collector

MODEL: Final = "control-model-4"
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HEADERS: Final = (
    *("authorization", "x-api-key", "cookie", "api-key", "proxy-authorization", "x-goog-api-key"),
    *(
        "openai-organization",
        "idempotency-key",
        "x-request-id",
        "referer",
        "traceparent",
        "tracestate",
        "baggage",
    ),
    *("x-stainless-lang", "user-agent", "x-forwarded-for", "x-amz-security-token", "x-odd-one"),
)
CASES: Final = ("answered", "refused", "echoed", "failing", "erring", "cut", "unknown path")
"""What happens to each request, by dialect and by whether it streams."""


class Canaries:
    """Makes marked words; each names the place where it was put."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self._numbers = itertools.count()
        self._run = secrets.token_hex(4)

    def __call__(self, place: str) -> str:
        word = f"canary{self._run}x{next(self._numbers)}x{re.sub('[^a-z]', '', place)}"
        self.words.append(word)
        return word

    def found_in(self, data: bytes) -> list[str]:
        """The words of which something is there: as they are, or as a hash that is no better."""
        if self._run.encode() not in data:
            forms = ((word, hashlib.sha256(word.encode()).hexdigest().encode()) for word in self.words)
            return [word for word, digest in forms if digest in data]
        return [word for word in self.words if word.encode() in data] or [f"a part of canary{self._run}"]


# -- requests ---------------------------------------------------------------------------------------------------------


def chat_body(mark: Canaries, *, stream: bool, legal: bool) -> dict[str, Any]:
    call = {
        "id": mark("call id"),
        "type": "function",
        "function": {
            "name": mark("tool name"),
            "arguments": json.dumps({mark("argument key"): mark("argument")}),
        },
    }
    result = {"role": "tool", "tool_call_id": call["id"], "content": mark("tool result")}
    orphan = {"role": "tool", "tool_call_id": mark("orphan id"), "content": mark("orphan result")}
    image = {"url": "data:image/png;base64," + mark("image")}
    return {
        "model": MODEL,
        "stream": stream,
        "user": mark("user field"),
        "metadata": {mark("metadata key"): mark("metadata")},
        "stop": [mark("stop")],
        mark("unknown key"): mark("unknown value"),
        "messages": [
            {"role": "system", "content": mark("system text")},
            {"role": "user", "name": mark("name"), "content": mark("user text")},
            {"role": "user", "content": [{"type": "image_url", "image_url": image}]},
            {"role": "assistant", "content": mark("assistant text"), "tool_calls": [call]},
            result,
            *([] if legal else [orphan]),
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": mark("declared name"),
                    "description": mark("description"),
                    "parameters": {"type": "object", "properties": {mark("property"): {"type": "string"}}},
                },
            }
        ],
    }


def messages_body(mark: Canaries, *, stream: bool, legal: bool) -> dict[str, Any]:
    call = {
        "type": "tool_use",
        "id": mark("call id"),
        "name": mark("tool name"),
        "input": {mark("argument key"): mark("argument")},
    }
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": mark("tool result")}
    orphan = {"type": "tool_result", "tool_use_id": mark("orphan id"), "content": mark("orphan result")}
    return {
        "model": MODEL,
        "max_tokens": 99,
        "stream": stream,
        "system": mark("system text"),
        "metadata": {"user_id": mark("user id")},
        "stop_sequences": [mark("stop")],
        mark("unknown key"): mark("unknown value"),
        "messages": [
            {"role": "user", "content": mark("user text")},
            {"role": "assistant", "content": [{"type": "text", "text": mark("assistant text")}, call]},
            {"role": "user", "content": [result, *([] if legal else [orphan])]},
        ],
        "tools": [
            {
                "name": mark("declared name"),
                "description": mark("description"),
                "input_schema": {"type": "object", "properties": {mark("property"): {"type": "string"}}},
            }
        ],
    }


BODIES: Final = {CHAT: chat_body, MESSAGES: messages_body}


def unreadable(mark: Canaries) -> Iterator[tuple[str, bytes]]:
    """Path and body of requests that cannot be judged, or read at all."""
    word = mark("unreadable")
    for path in (CHAT, MESSAGES):
        yield path, f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "{word}'.encode()
        yield path, f'{{"model": "{MODEL}", "messages": [], "messages": ["{word}"]}}'.encode()
        yield (
            path,
            f'{{"model": "{MODEL}", "messages": [{{"role": "{word}", "content": "{word}"}}]}}'.encode(),
        )
        yield path, f'{{"model": "{MODEL}", "messages": "{word}", "tools": {{"{word}": 1}}}}'.encode()
        yield path, word.encode() + b"\xff\xfe\x00"
        yield path, b""
    yield "/v1/responses", f'{{"model": "{MODEL}", "input": "{word}"}}'.encode()


# -- the provider -----------------------------------------------------------------------------------------------------


class Provider:
    """Answers with marks of its own in every place, and quotes what it was sent. `x-case` tells it how."""

    def __init__(self, mark: Canaries) -> None:
        self._mark = mark
        self.url = ""
        self.asked = asyncio.Event()

    @asynccontextmanager
    async def listening(self) -> "AsyncIterator[Provider]":
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        mark, case = self._mark, request.headers.get("x-case", "")
        body = await request.read()
        sent = body.decode(errors="replace")
        headers = {
            "set-cookie": mark("set-cookie"),
            "x-request-id": mark("request id"),
            "x-odd": mark("odd header"),
        }
        quoted = {**dict(request.headers), "query": request.query_string, "body": sent}
        if case == "echoed":
            error = {"message": json.dumps(quoted), "type": mark("error type"), "code": mark("error code")}
            return web.json_response({"type": "error", "error": error}, status=400, headers=headers)
        if case == "failing":
            return web.Response(status=503, text=f"<html>{json.dumps(quoted)}</html>", headers=headers)
        erring = case == "erring"
        frames = self._messages(erring) if MESSAGES in request.path else self._chat(erring)
        if '"stream": true' not in sent and case != "hanging":
            return web.Response(body=self._whole(MESSAGES in request.path), content_type="application/json")
        answer = web.StreamResponse(headers={**headers, "content-type": "text/event-stream"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        for frame in frames[: len(frames) // 2] if case in ("cut", "hanging") else frames:
            await answer.write(frame)
        if case == "hanging":
            self.asked.set()
            await asyncio.sleep(600)
        if case == "cut" and request.transport is not None:
            request.transport.abort()
        return answer

    def _chat(self, erring: bool) -> list[bytes]:
        mark = self._mark
        function = {"name": mark("called name"), "arguments": "{"}
        deltas: list[dict[str, Any]] = [
            {"content": mark("answer text")},
            {"reasoning_content": mark("reasoning")},
            {"tool_calls": [{"index": 0, "id": mark("answer call id"), "function": function}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": f'"{mark("answered key")}": 1}}'}}]},
        ]
        chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
        failed = {"error": {"message": mark("stream error"), "type": mark("stream error type")}}
        said = [*chunks, failed if erring else end]
        return [b"data: " + json.dumps({"model": MODEL, **each}).encode() + b"\n\n" for each in said]

    def _messages(self, erring: bool) -> list[bytes]:
        mark = self._mark
        block = {"type": "tool_use", "id": mark("answer call id"), "name": mark("called name"), "input": {}}
        text = {"type": "text_delta", "text": mark("answer text")}
        arguments = {"type": "input_json_delta", "partial_json": f'{{"{mark("answered key")}": 1}}'}
        said: list[dict[str, Any]] = [
            {"type": "message_start", "message": {"model": MODEL, "content": []}},
            {"type": "content_block_delta", "index": 0, "delta": text},
            {"type": "content_block_start", "index": 1, "content_block": block},
            {"type": "content_block_delta", "index": 1, "delta": arguments},
        ]
        if erring:
            error = {"type": mark("stream error type"), "message": mark("stream error")}
            said.append({"type": "error", "error": error})
        else:
            said.append({"type": "content_block_stop", "index": 1})
            said.append({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {}})
            said.append({"type": "message_stop"})
        return [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in said]

    def _whole(self, messages: bool) -> bytes:
        mark = self._mark
        if messages:
            block = {
                "type": "tool_use",
                "id": mark("id"),
                "name": mark("name"),
                "input": {"a": mark("argument")},
            }
            content = [{"type": "text", "text": mark("whole text")}, block]
            return json.dumps({"model": MODEL, "content": content, "stop_reason": "tool_use"}).encode()
        call = {
            "id": mark("id"),
            "function": {"name": mark("name"), "arguments": '{"' + mark("cut arguments")},
        }
        message = {"content": mark("whole text"), "tool_calls": [call]}
        choices = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
        return json.dumps({"model": MODEL, "choices": choices}).encode()


# -- the traffic ------------------------------------------------------------------------------------------------------


def marked_headers(mark: Canaries, case: str) -> dict[str, str]:
    headers = {name: mark(name) for name in HEADERS}
    headers["authorization"] = "Bearer sk-" + headers["authorization"]
    headers["cookie"] = "session=" + headers["cookie"]
    return headers | {"x-case": case, "content-type": "application/json"}


async def ask(
    url: str, mark: Canaries, session: aiohttp.ClientSession, case: str, body: bytes, path: str
) -> int:
    """Send one marked request; 0 where the answer breaks off."""
    query = f"?key={mark('query')}&api-key={mark('query')}&{mark('query name')}="
    headers = marked_headers(mark, case)
    if case == "unknown path":
        path = f"/{mark('path')}{path}"
    try:
        async with session.post(
            url + path + query, data=body, headers=headers, allow_redirects=False
        ) as answer:
            await answer.read()
            return answer.status
    except aiohttp.ClientError:
        return 0


async def not_http(url: str, mark: Canaries) -> None:
    """What is refused before it is a request at all."""
    host, port = url.removeprefix("http://").split(":")
    word = mark("no request")
    for raw in (
        f"{word} {word}\r\n\r\n",
        f"POST {CHAT}?{word} HTTP/1.1\r\n{word}\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {word}\r\n\r\n",
        f"POST http://{word}.example{CHAT} HTTP/1.1\r\nhost: {word}.example\r\ncontent-length: 0\r\n\r\n",
        f"CONNECT {word}.example:443 HTTP/1.1\r\nhost: {word}\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(raw.encode())
        writer.write_eof()
        await reader.read()
        writer.close()


async def all_traffic(url: str, mark: Canaries) -> set[tuple[str, int]]:
    """Everything, once; case and status of each."""
    seen: set[tuple[str, int]] = set()
    async with aiohttp.ClientSession() as session:
        for (path, make), stream, case in itertools.product(BODIES.items(), (False, True), CASES):
            body = make(mark, stream=stream, legal=case != "refused")
            seen.add((case, await ask(url, mark, session, case, json.dumps(body).encode(), path)))
        for path, data in unreadable(mark):
            await ask(url, mark, session, "echoed", data, path)
        for path in (CHAT, MESSAGES):
            body = BODIES[path](mark, stream=False, legal=True)
            status = await ask(url, mark, session, "unsent", json.dumps(body).encode(), f"/spare{path}")
            seen.add(("unsent", status))
    await not_http(url, mark)
    return seen


# -- where it could be ------------------------------------------------------------------------------------------------


def files(data_dir: Path) -> Iterator[tuple[str, bytes]]:
    """Every file as it lies there."""
    for path in sorted(data_dir.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # loaded and removed while we looked
            if path.is_file():
                yield str(path.relative_to(data_dir)), path.read_bytes()


def evidence(data_dir: Path) -> Iterator[tuple[str, bytes]]:
    """What the evidence says when it is read: columns may lie there compressed."""
    for path in sorted(data_dir.rglob("*.duckdb")):
        with duckdb.connect(str(path), read_only=True) as database:
            for (table,) in database.execute("SELECT table_name FROM duckdb_tables()").fetchall():
                rows = database.execute(f'SELECT COLUMNS(*)::VARCHAR FROM "{table}"').fetchall()
                yield f"{path.name}: {table}", "\n".join(map(str, rows)).encode()


def command_lines(pid: int) -> bytes:
    """The process's and its children's, which everybody on the machine can read."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return b"".join(Path(f"/proc/{each}/cmdline").read_bytes() for each in (str(pid), *children))


async def fetched(url: str) -> bytes:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return str(answer.headers).encode() + await answer.read()


async def loaded(metrics_url: str, requests: int) -> bytes:
    """`/metrics` once it counts so many requests."""
    for _ in range(1000):
        page = await fetched(f"{metrics_url}/metrics")
        counts = re.findall(rb"^turngate_requests_total\{.*\} (\S+)$", page, re.MULTILINE)
        if sum(map(float, counts)) >= requests:
            return page
        await asyncio.sleep(0.05)
    pytest.fail("the observer never counted them")


@pytest.mark.parametrize("stage", ["observe", "enforce-tools"])
async def test_no_credential_and_no_content_is_in_anything_we_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], stage: str
) -> None:
    mark = Canaries()
    places: dict[str, bytes] = {}
    data_dir = tmp_path / "data"
    proxy = f"http://{mark('proxy user')}:{mark('proxy password')}@127.0.0.1:1"
    async with Collector.listening() as collector, Provider(mark).listening() as provider:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization={mark('collector token')}")
        spare: dict[str, Any] = {"url": "http://spare.invalid", "proxy": proxy}
        upstreams: dict[str, str | dict[str, Any]] = {
            "openai": provider.url,
            "anthropic": provider.url,
            "spare": spare,
        }
        sidecar = Sidecar(data_dir, upstreams, stage=stage)
        async with sidecar, aiohttp.ClientSession() as session:
            seen = await all_traffic(sidecar.url, mark)
            assert ("refused", 400 if stage == "enforce-tools" else 200) in seen
            assert {("answered", 200), ("echoed", 400), ("failing", 503), ("unsent", 502)} <= seen
            places["metrics"] = await loaded(sidecar.metrics_url, len(seen))
            body = BODIES[CHAT](mark, stream=True, legal=True)
            hanging = asyncio.create_task(
                ask(sidecar.url, mark, session, "hanging", json.dumps(body).encode(), CHAT)
            )
            await asyncio.wait_for(provider.asked.wait(), 60)
            places["command lines"] = command_lines(sidecar.process.pid)
            await sidecar.kill()
            await hanging
            places |= {f"after the crash: {name}": data for name, data in files(data_dir)}
        places["log"] = "".join(sidecar.log).encode()
        async with in_loop(data_dir, upstreams, stage=stage) as second:
            async with aiohttp.ClientSession() as session:
                body = BODIES[MESSAGES](mark, stream=True, legal=True)
                await ask(second.url, mark, session, "answered", json.dumps(body).encode(), MESSAGES)
            places["metrics again"] = await loaded(second.metrics_url, 1)
            host, port = second.proxy.listening.admin.getsockname()[:2]
            for path in ("/", "/-/healthz", "/api/status", f"/{mark('admin path')}?q={mark('admin query')}"):
                places[f"admin {path.split('canary')[0]}"] = await fetched(f"http://{host}:{port}{path}")
        places["spans and OTLP metrics"] = b"\n".join(collector.raw)
    places["log again"] = capfd.readouterr().err.encode()
    places |= dict(files(data_dir)) | dict(evidence(data_dir))

    assert len(mark.words) > 500
    leaks = {where: found[:5] for where, data in places.items() if (found := mark.found_in(data))}
    assert leaks == {}
    rows = next(name for name in places if name.endswith(": exchange_ended"))
    for where in ("metrics", "metrics again", rows, "ledger.sqlite3", "spans and OTLP metrics"):
        assert MODEL.encode() in places[where], f"the search is blind in {where}"
    assert not list(data_dir.rglob("*.bad"))


def test_the_search_finds_words_their_parts_and_their_plain_hashes() -> None:
    mark = Canaries()
    word = mark("header")
    assert mark.found_in(b"x" + word.encode() + b"y") == [word]
    assert mark.found_in(word[:-3].encode()) != []
    assert mark.found_in(hashlib.sha256(word.encode()).hexdigest().encode()) == [word]
    assert mark.found_in(b"nothing") == []
