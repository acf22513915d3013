"""Bytes through the running proxy, on raw sockets at both ends: what arrives is what was sent.

Each case runs twice, straight to the provider and through the proxy; the two may differ in what ends at each hop
(RFC 9110, 7.6.1), in Host, and in what an enforced stage names itself. Chunk borders are no content.
"""

import asyncio
import gzip
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final

import pytest
import pytest_asyncio
from running import Sidecar
from wire_peers import (
    ANSWER_BODY,
    EVENTS,
    FRAMES,
    HOP_BY_HOP,
    STREAM_BODY,
    TEXT_BODY,
    TOOLS_BODY,
    Message,
    answer,
    chunked,
    end_to_end,
    length,
    read_chunk,
    read_head,
    read_message,
    request,
    sized,
    without,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

STAGES: Final = ("off", "observe", "enforce-tools")
PATHS: Final = {
    "chat": b"/v1/chat/completions",
    "messages": b"/v1/messages",
    "relayed": b"/v1/embeddings",
}
HANG_S: Final = 30.0
"""Only what never comes meets this bound."""

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


# Both ends of the wire


class Provider:
    """A server of raw bytes. What it does with a connection is the test's `handler`."""

    def __init__(self) -> None:
        self.port = 0
        self.handler: Handler = self.answering(b"")
        self.requests: asyncio.Queue[Message] = asyncio.Queue()
        self._connections: set[asyncio.Task[None]] = set()

    def answering(self, answer: bytes, *, close: bool = False) -> Handler:
        """Read requests and give each the same answer."""

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                self.requests.put_nowait(await read_message(reader))
                writer.write(answer)
                await writer.drain()
                if close:
                    return

        return handler

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            # The peer may end at any time; what it had of the exchange is what the test looks at.
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                await self.handler(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def reset(self) -> None:
        """End all connections, so that none of a pool is left with an old test's handler."""
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections)
        self.requests = asyncio.Queue()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def listening() -> AsyncIterator[Provider]:
    provider = Provider()
    server = await asyncio.start_server(provider.serve, "127.0.0.1", 0, limit=2**20)
    provider.port = server.sockets[0].getsockname()[1]
    async with server:
        yield provider
        await provider.reset()


@pytest_asyncio.fixture(loop_scope="module")
async def provider(listening: Provider) -> AsyncIterator[Provider]:
    yield listening
    await listening.reset()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ports(
    listening: Provider, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, int]]:
    """The port of a sidecar in each stage, and, as `direct`, the provider's own."""
    url = f"http://127.0.0.1:{listening.port}"
    directory = tmp_path_factory.mktemp("bytes")
    async with AsyncExitStack() as stack:
        sidecars = [
            Sidecar(directory / stage, {"openai": url, "anthropic": url}, stage=stage) for stage in STAGES
        ]
        await asyncio.gather(*(stack.enter_async_context(sidecar) for sidecar in sidecars))
        found = {
            stage: int(sidecar.url.rpartition(":")[2])
            for stage, sidecar in zip(STAGES, sidecars, strict=True)
        }
        yield {"direct": listening.port, **found}


@asynccontextmanager
async def app(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        try:
            yield reader, writer
        finally:
            writer.close()


async def ask(port: int, request: bytes) -> Message:
    """Send a request, return its answer."""
    async with app(port) as (reader, writer):
        writer.write(request)
        return await read_message(reader, method=request.partition(b" ")[0])


# Requests

GZIPPED: Final = gzip.compress(TEXT_BODY, mtime=0)

REQUESTS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "names, order, case, duplicates and values stay": lambda path: sized(
        path,
        TEXT_BODY,
        *(b"X-B: 1", b"x-a: 2", b"X-B: 3", b"AUTHORIZATION: Bearer k", b"user-agent: raw", b"x-empty:"),
        *(b"X-Padded:   two  words  ", b"Cookie: a=1; b=2", b"X-Latin: \xe9", b"X-UTF8: \xc3\xa9", b"x-b: 4"),
    ),
    "no header appears that was not sent": lambda path: sized(path, TEXT_BODY),
    "what ends at the hop stays behind": lambda path: sized(
        path,
        TEXT_BODY,
        *(
            b"Connection: keep-alive, X-Mine",
            b"X-Mine: 1",
            b"Keep-Alive: timeout=5",
            b"TE: trailers",
            b"X: 1",
        ),
        b"Proxy-Authorization: Basic eA==",
    ),
    "a compressed body keeps its coding": lambda path: sized(path, GZIPPED, b"Content-Encoding: gzip"),
    "a chunked body stays chunked": lambda path: request(
        path,
        [b"transfer-encoding: chunked", b"X-After: 1"],
        chunked(TEXT_BODY[:7], TEXT_BODY[7:8], TEXT_BODY[8:]),
    ),
    "an empty chunked body stays chunked": lambda path: request(
        path, [b"Transfer-Encoding: chunked"], chunked()
    ),
    "a length of zero is said": lambda path: sized(path, b""),
    "no length and no body": lambda path: request(path, []),
    "a body that is no JSON": lambda path: sized(path, bytes(range(256))),
    "a header of 20 KB": lambda path: sized(path, TEXT_BODY, b"X-Large: " + b"v" * 20_000),
    "250 headers": lambda path: sized(path, TEXT_BODY, *(b"X-%d: %d" % (n, n) for n in range(250))),
    "GET": lambda path: request(path, [], method=b"GET"),
    "DELETE": lambda path: request(path, [], method=b"DELETE"),
    "PATCH with a body": lambda path: request(path, [b"Content-Length: 2"], b"{}", method=b"PATCH"),
    "OPTIONS": lambda path: request(path, [b"Origin: http://x", b"X: 1"], method=b"OPTIONS"),
    "HEAD": lambda path: request(path, [], method=b"HEAD"),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("make", REQUESTS.values(), ids=REQUESTS)
async def test_the_provider_gets_the_app_s_request(
    provider: Provider, ports: dict[str, int], make: Callable[[bytes], bytes], path: bytes, stage: str
) -> None:
    provider.handler = provider.answering(b"HTTP/1.1 204 No Content\r\n\r\n")
    for port in (ports["direct"], ports[stage]):
        assert (await ask(port, make(path))).first == b"HTTP/1.1 204 No Content"
    direct, through = provider.requests.get_nowait(), provider.requests.get_nowait()
    assert through.get(b"host") == b"127.0.0.1:%d" % provider.port
    assert end_to_end(through) == end_to_end(direct)
    assert not HOP_BY_HOP & {name.lower() for name, _ in through.headers}
    assert provider.requests.empty()


TARGETS: Final = {
    "escapes stay as they are": b"/v1/models/a%3Ab%2Fc%20d%2fe?q=%2B%20%3d&x=%E4%BD%A0%C3%A9",
    "plus, semicolon, at, comma and the like": b"/v1/files/a+b;c=1,d@e:f!$&'()*~?a;b=1+2&c=[0]&d=%",
    "double slashes": b"/v1//files///x",
    "dot segments": b"/v1/files/../models/./x/..",
    "an empty query": b"/v1/files?",
    "two question marks": b"/v1/files?a=?b",
    "a dialect's path with a query": b"/v1/chat/completions?api-version=2024%3A10&a=%2F+",
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
async def test_path_and_query_are_not_touched(
    provider: Provider, ports: dict[str, int], target: bytes, stage: str
) -> None:
    provider.handler = provider.answering(b"HTTP/1.1 204 No Content\r\n\r\n")
    await ask(ports[stage], sized(target, TEXT_BODY))
    await ask(ports[stage], sized(b"/openai" + target, TEXT_BODY))
    for _ in ("by its path", "by the upstream's name"):
        assert provider.requests.get_nowait().first == b"POST %s HTTP/1.1" % target


async def test_a_gated_stream_is_asked_for_uncompressed_and_in_all_else_as_sent(
    provider: Provider, ports: dict[str, int]
) -> None:
    provider.handler = provider.answering(b"HTTP/1.1 204 No Content\r\n\r\n")
    await ask(
        ports["enforce-tools"], sized(PATHS["chat"], STREAM_BODY, b"ACCEPT-Encoding: gzip, br", b"X: 1")
    )
    assert end_to_end(provider.requests.get_nowait()).headers == [
        (b"Host", b"(the upstream)"),
        (b"ACCEPT-Encoding", b"identity"),
        (b"X", b"1"),
        (b"Content-Length", b"%d" % len(STREAM_BODY)),
    ]


# Answers

ANSWER_GZIPPED: Final = gzip.compress(ANSWER_BODY, mtime=0)

ANSWERS: Final[dict[str, tuple[bytes, bool]]] = {
    "no header appears": (answer(length(ANSWER_BODY), ANSWER_BODY), False),
    "names, order, case, duplicates and values stay": (
        answer(
            b"X-B: 1\r\nSet-Cookie: a=1; Path=/\r\nx-a:\r\nset-cookie: b=2\r\nX-B: 2\r\nDate: then\r\n"
            b"SERVER: own\r\nX-Latin: \xe9\r\n" + length(ANSWER_BODY) + b"x-should-retry: true\r\n",
            ANSWER_BODY,
        ),
        False,
    ),
    "what ends at the hop stays behind": (
        answer(
            b"Connection: keep-alive, X-Mine\r\nX-Mine: 1\r\nKeep-Alive: timeout=5\r\n" + length(ANSWER_BODY),
            ANSWER_BODY,
        ),
        False,
    ),
    "an own reason phrase": (
        answer(length(ANSWER_BODY), ANSWER_BODY, status=b"200 Fine By Me"),
        False,
    ),
    "no reason phrase": (answer(length(b"{}"), b"{}", status=b"429 "), False),
    "an unknown status": (answer(length(b"{}"), b"{}", status=b"529 Overloaded"), False),
    "a body of nothing": (answer(b"Content-Length: 0\r\n"), False),
    "204": (answer(b"X: 1\r\n", status=b"204 No Content"), False),
    "304 with the length of what it does not send": (
        answer(b"Content-Length: 7\r\nETag: x\r\n", status=b"304 Not Modified"),
        False,
    ),
    "a redirect is not followed": (
        answer(b"Location: /elsewhere\r\nContent-Length: 0\r\n", status=b"307 Temporary Redirect"),
        False,
    ),
    "chunks": (
        answer(b"X: 1\r\nTransfer-Encoding: chunked\r\nY: 2\r\n", chunked(b" \n", ANSWER_BODY)),
        False,
    ),
    "an answer that ends with its connection": (answer(b"X: 1\r\n", ANSWER_BODY), True),
    "a compressed answer": (
        answer(b"Content-Encoding: gzip\r\n" + length(ANSWER_GZIPPED), ANSWER_GZIPPED),
        False,
    ),
    "a compressed answer in chunks": (
        answer(
            b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n",
            chunked(ANSWER_GZIPPED[:9], ANSWER_GZIPPED[9:]),
        ),
        False,
    ),
    "an answer that is no JSON": (answer(length(b"\0\xff\r\n"), b"\0\xff\r\n"), False),
    "events in chunks": (answer(EVENTS + b"Transfer-Encoding: chunked\r\n", chunked(*FRAMES)), False),
    "events with comments and other line ends": (
        answer(
            EVENTS + b"transfer-encoding: chunked\r\n",
            chunked(b": ping\n\n", FRAMES[0].replace(b"\n", b"\r\n"), *FRAMES[1:], b": bye\n\n"),
        ),
        False,
    ),
    "events until the connection ends": (answer(EVENTS, b"".join(FRAMES)), True),
    "a header of 20 KB": (
        answer(b"X-Large: %s\r\n" % (b"v" * 20_000) + length(ANSWER_BODY), ANSWER_BODY),
        False,
    ),
}
BODIES: Final = {"text": TEXT_BODY, "tools": TOOLS_BODY, "no JSON": b"{"}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("path", [PATHS["chat"], PATHS["relayed"]], ids=["chat", "relayed"])
@pytest.mark.parametrize(("raw", "close"), ANSWERS.values(), ids=ANSWERS)
async def test_the_app_gets_the_provider_s_answer(
    provider: Provider, ports: dict[str, int], raw: bytes, close: bool, path: bytes, body: bytes, stage: str
) -> None:
    provider.handler = provider.answering(raw, close=close)
    direct, through = [await ask(port, sized(path, body)) for port in (ports["direct"], ports[stage])]
    assert direct.whole
    assert without(end_to_end(through), b"x-turngate-operation") == end_to_end(direct)
    marked = through.get(b"x-turngate-operation") is not None
    assert marked == (stage == "enforce-tools" and path == PATHS["chat"] and body != b"{")


HEADS: Final = {
    "a length": b"Content-Length: 1000\r\nContent-Type: application/json\r\n",
    "chunks": b"Transfer-Encoding: chunked\r\n",
    "neither": b"X: 1\r\n",
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("headers", HEADS.values(), ids=HEADS)
async def test_the_answer_to_head_has_no_body_and_keeps_its_headers_and_the_connection(
    provider: Provider, ports: dict[str, int], headers: bytes, path: bytes, stage: str
) -> None:
    provider.handler = provider.answering(answer(headers))
    head = request(path, [], method=b"HEAD")
    direct = await ask(ports["direct"], head)
    async with app(ports[stage]) as (reader, writer):
        for _ in range(2):
            writer.write(head)
            through = await read_message(reader, method=b"HEAD")
            # Transfer-Encoding is about this hop, and here nothing is transferred.
            assert end_to_end(through) == without(end_to_end(direct), b"transfer-encoding")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("path", [PATHS["chat"], PATHS["relayed"]], ids=["chat", "relayed"])
@pytest.mark.parametrize("streams", [True, False], ids=["events", "JSON"])
async def test_an_app_of_http_1_0_gets_no_chunks_and_the_end_by_closing(
    provider: Provider, ports: dict[str, int], streams: bool, path: bytes, stage: str
) -> None:
    parts = FRAMES if streams else (ANSWER_BODY[:5], ANSWER_BODY[5:])
    head = (EVENTS if streams else b"") + b"Transfer-Encoding: chunked\r\n"
    provider.handler = provider.answering(answer(head, chunked(*parts)))
    asked = STREAM_BODY if streams else TEXT_BODY
    async with app(ports[stage]) as (reader, writer):
        writer.write(sized(path, asked, version=b"1.0"))
        got = await read_message(reader, method=b"POST")
    assert (got.whole, got.body) == (True, b"".join(parts))
    assert got.get(b"transfer-encoding") is None
    assert provider.requests.get_nowait().first == b"POST %s HTTP/1.1" % path


LARGE: Final = bytes(range(251)) * (10 * 2**20 // 251)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("path", [PATHS["chat"], PATHS["relayed"]], ids=["chat", "relayed"])
@pytest.mark.parametrize("in_chunks", [False, True], ids=["length", "chunks"])
async def test_ten_megabytes_pass_up_and_down(
    provider: Provider, ports: dict[str, int], in_chunks: bool, path: bytes, stage: str
) -> None:
    parts = [LARGE[at : at + 100_000] for at in range(0, len(LARGE), 100_000)]
    if in_chunks:
        asked = request(path, [b"Transfer-Encoding: chunked"], chunked(*parts))
        told = answer(b"Transfer-Encoding: chunked\r\n", chunked(*parts))
    else:
        asked, told = sized(path, LARGE), answer(length(LARGE), LARGE)
    provider.handler = provider.answering(told)
    got = await ask(ports[stage], asked)
    assert got.whole
    assert got.body == LARGE  # not in one with the next: pytest would explain 10 MB of difference for long
    assert provider.requests.get_nowait().body == LARGE


# Nothing waits for what comes next


def piecewise(provider: Provider, head: bytes, pieces: tuple[bytes, ...], seen: asyncio.Semaphore) -> Handler:
    """Send each piece when the app has said that it has the one before."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        provider.requests.put_nowait(await read_message(reader))
        writer.write(answer(head))
        for piece in pieces:
            await seen.acquire()
            writer.write(chunked(piece)[:-5])
        await seen.acquire()
        writer.write(chunked())
        await writer.drain()
        await reader.read()

    return handler


TORN: Final = (
    FRAMES[0][:9],
    FRAMES[0][9:],
    FRAMES[1] + FRAMES[2][:3],
    FRAMES[2][3:-1],
    FRAMES[2][-1:],
    FRAMES[3],
)
JSON_TORN: Final = (ANSWER_BODY[:1], ANSWER_BODY[1:20], ANSWER_BODY[20:])
PIECES: Final = {
    "bytes in off": ("off", PATHS["chat"], STREAM_BODY, EVENTS, TORN),
    "torn frames in observe": ("observe", PATHS["chat"], STREAM_BODY, EVENTS, TORN),
    "torn frames of another dialect in observe": ("observe", PATHS["messages"], STREAM_BODY, EVENTS, TORN),
    "torn frames in observe, tools": ("observe", PATHS["chat"], TOOLS_BODY, EVENTS, TORN),
    "whole frames of text in enforce": ("enforce-tools", PATHS["chat"], STREAM_BODY, EVENTS, FRAMES),
    "whole frames of text in enforce, tools": ("enforce-tools", PATHS["chat"], TOOLS_BODY, EVENTS, FRAMES),
    "JSON in observe": ("observe", PATHS["chat"], TOOLS_BODY, b"", JSON_TORN),
    "JSON without tools in enforce": ("enforce-tools", PATHS["chat"], TEXT_BODY, b"", JSON_TORN),
    "what is relayed in enforce": ("enforce-tools", PATHS["relayed"], b"x", EVENTS, TORN),
}


@pytest.mark.parametrize(("stage", "path", "body", "head", "pieces"), PIECES.values(), ids=PIECES)
async def test_the_app_has_each_piece_before_the_provider_sends_the_next(
    provider: Provider,
    ports: dict[str, int],
    stage: str,
    path: bytes,
    body: bytes,
    head: bytes,
    pieces: tuple[bytes, ...],
) -> None:
    seen = asyncio.Semaphore(0)
    provider.handler = piecewise(provider, head + b"Transfer-Encoding: chunked\r\n", pieces, seen)
    async with app(ports[stage]) as (reader, writer):
        writer.write(sized(path, body))
        assert (await read_head(reader)).first == b"HTTP/1.1 200 OK"
        for piece in pieces:
            seen.release()
            got = b""
            while got != piece:
                got += await read_chunk(reader)
                assert piece.startswith(got)
        seen.release()
        assert await read_chunk(reader) == b""


@pytest.mark.parametrize("stage", ["off", "observe"])
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
async def test_the_provider_has_each_piece_of_a_request_before_the_app_sends_the_next(
    provider: Provider, ports: dict[str, int], path: bytes, stage: str
) -> None:
    pieces = (TEXT_BODY[:4], TEXT_BODY[4:9], TEXT_BODY[9:])
    there = asyncio.Semaphore(0)

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        there.release()
        for piece in pieces:
            assert await reader.readexactly(len(piece)) == piece
            there.release()
        writer.write(answer(length(b"{}"), b"{}"))
        await writer.drain()
        await reader.read()

    provider.handler = handler
    async with app(ports[stage]) as (reader, writer):
        writer.write(request(path, [b"Content-Length: %d" % len(TEXT_BODY)]))
        for piece in pieces:
            await there.acquire()
            writer.write(piece)
        await there.acquire()
        assert (await read_message(reader, method=b"POST")).body == b"{}"


# What HTTP makes us do


@pytest.mark.parametrize("path", [PATHS["chat"], PATHS["messages"]], ids=["chat", "messages"])
async def test_where_a_body_is_judged_first_turngate_asks_for_it_and_the_provider_is_not_asked_to(
    provider: Provider, ports: dict[str, int], path: bytes
) -> None:
    provider.handler = provider.answering(answer(length(ANSWER_BODY), ANSWER_BODY))
    async with app(ports["enforce-tools"]) as (reader, writer):
        expecting = [b"Expect: 100-continue", b"X: 1", b"Content-Length: %d" % len(TEXT_BODY)]
        writer.write(request(path, expecting))
        assert (await read_head(reader)).first == b"HTTP/1.1 100 Continue"
        writer.write(TEXT_BODY)
        assert (await read_message(reader, method=b"POST")).body == ANSWER_BODY
    got = provider.requests.get_nowait()
    assert (got.get(b"expect"), got.get(b"x"), got.body) == (None, b"1", TEXT_BODY)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
async def test_pipelined_requests_are_answered_in_order(
    provider: Provider, ports: dict[str, int], path: bytes, stage: str
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            body = (await read_message(reader)).get(b"x-number") or b""
            writer.write(answer(length(body), body))

    provider.handler = handler
    numbers = [b"%d" % n for n in range(5)]
    async with app(ports[stage]) as (reader, writer):
        writer.write(b"".join(sized(path, TEXT_BODY, b"X-Number: " + number) for number in numbers))
        got = [(await read_message(reader, method=b"POST")).body for _ in numbers]
    assert got == numbers


@pytest.mark.parametrize("stage", STAGES)
async def test_one_connection_carries_what_goes_to_different_places(
    provider: Provider, ports: dict[str, int], stage: str
) -> None:
    provider.handler = provider.answering(answer(length(ANSWER_BODY), ANSWER_BODY))
    asked = [(path, body) for path in PATHS.values() for body in (TEXT_BODY, TOOLS_BODY, GZIPPED, b"")]
    async with app(ports[stage]) as (reader, writer):
        for path, body in asked:
            writer.write(sized(path, body))
            got = await read_message(reader, method=b"POST")
            # What is no answer of its dialect is withheld where tools are enforced; the connection goes on.
            withheld = (stage, path, body) == ("enforce-tools", PATHS["messages"], TOOLS_BODY)
            assert got.first == (b"HTTP/1.1 502 Bad Gateway" if withheld else b"HTTP/1.1 200 OK")
            sent = provider.requests.get_nowait()
            assert (sent.first, sent.body) == (b"POST %s HTTP/1.1" % path, body)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
async def test_an_app_that_wants_its_connection_closed_gets_its_answer_and_the_close(
    provider: Provider, ports: dict[str, int], path: bytes, stage: str
) -> None:
    provider.handler = provider.answering(answer(length(ANSWER_BODY), ANSWER_BODY))
    async with app(ports[stage]) as (reader, writer):
        writer.write(sized(path, TEXT_BODY, b"Connection: close"))
        got = await read_message(reader, method=b"POST")
        assert (got.body, got.get(b"connection")) == (ANSWER_BODY, b"close")
        assert await reader.read() == b""
    assert provider.requests.get_nowait().get(b"connection") is None


@pytest.mark.parametrize("stage", ["off", "observe"])
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("in_chunks", [False, True], ids=["length", "chunks"])
async def test_an_early_413_reaches_the_app_in_the_middle_of_its_upload(
    provider: Provider, ports: dict[str, int], in_chunks: bool, path: bytes, stage: str
) -> None:
    refusal = answer(length(b"too large"), b"too large", status=b"413 Content Too Large")

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        await reader.readexactly(50_000)
        writer.write(refusal)
        await writer.drain()
        await reader.read()

    provider.handler = handler
    framing = b"Transfer-Encoding: chunked" if in_chunks else b"Content-Length: 100000000"
    async with app(ports[stage]) as (reader, writer):
        writer.write(request(path, [framing], b"1ffff\r\n" if in_chunks else b"") + b"x" * 60_000)
        got = await read_message(reader, method=b"POST")
        assert (got.first, got.body) == (b"HTTP/1.1 413 Content Too Large", b"too large")
        # Half a request is under way: the connection cannot carry another.
        assert got.get(b"connection") == b"close"


# What was cut stays cut

CUTS: Final = {
    "a length not reached": answer(b"Content-Length: 100\r\n", ANSWER_BODY[:10]),
    "a length, nothing came": answer(b"Content-Length: 100\r\n"),
    "inside a chunk": answer(b"Transfer-Encoding: chunked\r\n", b"64\r\n" + ANSWER_BODY[:10]),
    "between chunks": answer(b"Transfer-Encoding: chunked\r\n", chunked(ANSWER_BODY[:10])[:-5]),
    "inside the last chunk": answer(b"Transfer-Encoding: chunked\r\n", chunked(ANSWER_BODY)[:-3]),
    "events, inside a frame": answer(
        EVENTS + b"Transfer-Encoding: chunked\r\n", chunked(FRAMES[0], FRAMES[1][:9])[:-5]
    ),
    "events, between frames": answer(EVENTS + b"Transfer-Encoding: chunked\r\n", chunked(FRAMES[0])[:-5]),
    "events with a length": answer(EVENTS + b"Content-Length: 9999\r\n", FRAMES[0]),
}


@pytest.mark.parametrize("version", [b"1.1", b"1.0"], ids=["1.1", "1.0"])
@pytest.mark.parametrize("stage", ["off", "observe"])
@pytest.mark.parametrize("path", [PATHS["chat"], PATHS["relayed"]], ids=["chat", "relayed"])
@pytest.mark.parametrize("raw", CUTS.values(), ids=CUTS)
async def test_an_answer_cut_short_is_cut_short_for_the_app_too(
    provider: Provider, ports: dict[str, int], raw: bytes, path: bytes, stage: str, version: bytes
) -> None:
    provider.handler = provider.answering(raw, close=True)
    asked = sized(path, STREAM_BODY if EVENTS in raw else TEXT_BODY, version=version)
    direct, through = [await ask(port, asked) for port in (ports["direct"], ports[stage])]
    assert not direct.whole
    assert not through.whole
    assert through.first == direct.first
    if version == b"1.1":  # a reset, all that HTTP/1.0 leaves, may overtake bytes
        assert end_to_end(through) == end_to_end(direct)


@pytest.mark.parametrize("stage", ["off", "observe"])
@pytest.mark.parametrize("path", [PATHS["chat"], PATHS["relayed"]], ids=["chat", "relayed"])
async def test_a_reset_answer_of_open_length_is_reset_for_the_app_too(
    provider: Provider, ports: dict[str, int], path: bytes, stage: str
) -> None:
    seen = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_message(reader)
        writer.write(answer(b"X: 1\r\n", b"half"))
        await seen.wait()
        peer: socket.socket = writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    provider.handler = handler
    async with app(ports[stage]) as (reader, writer):
        writer.write(sized(path, TEXT_BODY))
        await read_head(reader)
        assert await reader.readexactly(4) == b"half"
        seen.set()
        with pytest.raises(ConnectionResetError):
            await reader.read()


Json = dict[str, Any]


def chat_answer(finish: str, arguments: str | None) -> Json:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "so", "tool_calls": [call] if arguments is not None else []}
    return {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def messages_answer(stop: str, arguments: Json | None) -> Json:
    content: list[Json] = [{"type": "text", "text": "so"}]
    if arguments is not None:
        content.append({"type": "tool_use", "id": "call_1", "name": "f", "input": arguments})
    return {"id": "x", "type": "message", "role": "assistant", "content": content, "stop_reason": stop}


MESSAGES_TOOLS_BODY: Final = json.dumps(
    {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }
).encode()

ENDED_EARLY: Final[dict[str, tuple[str, Json, bytes]]] = {
    # name: (API, answer, why it is withheld; empty where it passes)
    "broken arguments": ("chat", chat_answer("length", '{"a": 1'), b"call.arguments_unclosed"),
    "arguments that happen to parse": ("chat", chat_answer("length", '{"a": 1}'), b"stream.length_limited"),
    "no arguments yet": ("chat", chat_answer("length", ""), b"stream.length_limited"),
    "filtered beside a call": ("chat", chat_answer("content_filter", '{"a": 1}'), b"stream.filtered"),
    "an object that was cut": ("messages", messages_answer("max_tokens", {}), b"stream.length_limited"),
    "text alone": ("chat", chat_answer("length", None), b""),
    "text alone, filtered": ("chat", chat_answer("content_filter", None), b""),
    "text alone in Messages": ("messages", messages_answer("max_tokens", None), b""),
    "a call in an answer that ended well": ("chat", chat_answer("tool_calls", "{}"), b""),
    "the same in Messages": ("messages", messages_answer("tool_use", {}), b""),
}


@pytest.mark.parametrize(("api", "said", "reason"), ENDED_EARLY.values(), ids=ENDED_EARLY)
async def test_a_whole_answer_that_ended_early_is_withheld_if_it_holds_a_call(
    provider: Provider, ports: dict[str, int], api: str, said: Json, reason: bytes
) -> None:
    body = json.dumps(said).encode()
    provider.handler = provider.answering(answer(b"Content-Type: application/json\r\n" + length(body), body))
    asked = TOOLS_BODY if api == "chat" else MESSAGES_TOOLS_BODY
    got = await ask(ports["enforce-tools"], sized(PATHS[api], asked))
    watched = await ask(ports["observe"], sized(PATHS[api], asked))
    assert (watched.first, watched.body) == (b"HTTP/1.1 200 OK", body)
    if reason:
        assert (got.first, got.get(b"x-turngate-reason")) == (b"HTTP/1.1 502 Bad Gateway", reason)
        assert b"call_1" not in got.body
    else:
        assert (got.first, got.body) == (b"HTTP/1.1 200 OK", body)


@pytest.mark.parametrize("body", [TEXT_BODY, TOOLS_BODY], ids=["text", "tools"])
@pytest.mark.parametrize("raw", CUTS.values(), ids=CUTS)
async def test_an_answer_cut_short_never_looks_whole_where_enforced(
    provider: Provider, ports: dict[str, int], raw: bytes, body: bytes
) -> None:
    provider.handler = provider.answering(raw, close=True)
    got = await ask(ports["enforce-tools"], sized(PATHS["chat"], body))
    if EVENTS in raw:
        assert got.whole  # by HTTP; what the app's SDK raises on is the last event
        assert json.loads(got.body.rpartition(b"data: ")[2])["error"]["code"].startswith("stream.")
        assert got.body.startswith(FRAMES[0])
    elif body == TOOLS_BODY:
        assert (got.first, got.get(b"x-turngate-reason")) == (
            b"HTTP/1.1 502 Bad Gateway",
            b"stream.truncated",
        )
    else:
        assert not got.whole
