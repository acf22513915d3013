"""The HTTP/1.1 client: framing of answers, ends and breaks of connections, the pool."""

import asyncio
import ctypes
import errno
import functools
import inspect
import itertools
import os
import shutil
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from turngate.proxy import upstream
from turngate.proxy.upstream import (
    FRAMING_BYTES_MAX,
    UNREAD_BYTES_MAX,
    Broken,
    Head,
    Link,
    Origin,
    Pool,
    Unreachable,
)

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
TLS_CONTEXT = ssl.create_default_context()  # one for all: loading the roots takes 30 ms
LOCAL = Origin("http", "127.0.0.1", 80)
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Answer = tuple[int | None, bytes, str]
"""Status, entity bytes, and "end" or the kind of break."""


def both_loops(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on plain asyncio and on uvloop."""

    @functools.wraps(scenario)
    def test(*args: Any, loop_name: str, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop_name]) as runner:
            runner.run(scenario(*args, **kwargs))

    signature = inspect.signature(scenario)
    added = inspect.Parameter("loop_name", inspect.Parameter.KEYWORD_ONLY)
    test.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), added]
    )
    parametrised: Callable[..., None] = pytest.mark.parametrize("loop_name", LOOPS)(test)
    return parametrised


@asynccontextmanager
async def serving(
    handler: Handler, *, reuse_s: float = 60.0, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
) -> AsyncIterator[tuple[Pool, Origin]]:
    """A server on a free port and a pool; `tls` is the server's and the client's context."""
    handlers: list[asyncio.Task[None]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.append(task)
        # What ends a handler that the test has no more use for.
        with suppress(asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError), closing(writer):
            await handler(reader, writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls[0] if tls else None)
    pool = Pool(reuse_s=reuse_s, ssl_context=tls[1] if tls else TLS_CONTEXT)
    port = server.sockets[0].getsockname()[1]
    try:
        yield pool, Origin("https" if tls else "http", "127.0.0.1", port)
    finally:
        await pool.close()
        server.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something is so; the suite's time limit is the only clock."""
    while not condition():  # noqa: ASYNC110 - what is waited for lies inside transports and tells nobody
        await asyncio.sleep(0)


async def answer_of(link: Link) -> Answer:
    status, body = None, b""
    try:
        status = (await link.head()).status
        while data := await link.read():
            body += data
    except Broken as broken:
        if broken.before_head != (status is None):
            pytest.fail(f"before_head is {broken.before_head} with status {status}")
        return status, body, broken.kind
    return status, body, "end"


async def ask(pool: Pool, origin: Origin, *, head_request: bool = False) -> tuple[Link, Answer]:
    link = await pool.acquire(origin)
    link.expect_answer(head_request=head_request)
    link.write(REQUEST)
    return link, await answer_of(link)


class Wire(asyncio.Transport):
    """A transport that goes nowhere: pieces reach the link exactly as a test cuts them."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.theirs = socket.socketpair()
        self.written: list[bytes] = []
        self.unsent_bytes = 0
        self.aborted = False
        self.reading = True
        self.protocol: asyncio.BaseProtocol | None = None

    def close_sockets(self) -> None:
        self.ours.close()
        self.theirs.close()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.ours if name == "socket" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close_sockets()


def linked(wire: Wire, *, head_request: bool = False) -> tuple[Pool, Link]:
    """A link on a wire, its request written."""
    pool = Pool(ssl_context=TLS_CONTEXT)
    link = Link(pool, LOCAL, asyncio.get_running_loop())
    link.connection_made(wire)
    link.expect_answer(head_request=head_request)
    link.write(REQUEST)
    return pool, link


# What the server sends before it closes; HEAD?; the answer we see; may the connection be used again before the close?
CASES: dict[str, tuple[bytes, bool, Answer, bool]] = {
    "content-length": (OK + b"Content-Length: 5\r\n\r\nhello", False, (200, b"hello", "end"), True),
    "an empty body": (OK + b"Content-Length: 0\r\n\r\n", False, (200, b"", "end"), True),
    "no reason phrase": (b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\nx", False, (200, b"x", "end"), True),
    "an error status": (b"HTTP/1.1 529 \r\nContent-Length: 1\r\n\r\nx", False, (529, b"x", "end"), True),
    "blank lines before the head": (
        b"\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\nx",
        False,
        (200, b"x", "end"),
        True,
    ),
    "chunked": (CHUNKED + b"5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n", False, (200, b"hello!", "end"), True),
    "chunked, upper case and padded": (
        OK + b"TRANSFER-ENCODING: CHUNKED \r\n\r\n00A  \r\n0123456789\r\n0\r\n\r\n",
        False,
        (200, b"0123456789", "end"),
        True,
    ),
    "chunk extensions": (
        CHUNKED + b'5;a=b;c="d"\r\nhello\r\n0;last\r\n\r\n',
        False,
        (200, b"hello", "end"),
        True,
    ),
    "trailers": (
        CHUNKED + b"2\r\nhi\r\n0\r\nX-Sum: 1\r\nX-Two: 2\r\n\r\n",
        False,
        (200, b"hi", "end"),
        True,
    ),
    "a compressed stream stays compressed": (
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n4\r\n\x1f\x8b\x08\x00\r\n0\r\n\r\n",
        False,
        (200, b"\x1f\x8b\x08\x00", "end"),
        True,
    ),
    "ended by the connection": (OK + b"\r\nhello", False, (200, b"hello", "end"), False),
    "ended by the connection, not chunked last": (
        OK + b"Transfer-Encoding: chunked, gzip\r\n\r\nhello",
        False,
        (200, b"hello", "end"),
        False,
    ),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\n\r\nhello", False, (200, b"hello", "end"), False),
    "HTTP/1.0 with a length": (
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        False,
        (200, b"hi", "end"),
        False,
    ),
    "HTTP/1.0 with keep-alive": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi",
        False,
        (200, b"hi", "end"),
        True,
    ),
    "connection: close": (
        OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi",
        False,
        (200, b"hi", "end"),
        False,
    ),
    "HEAD": (OK + b"Content-Length: 500\r\n\r\n", True, (200, b"", "end"), True),
    "HEAD of a stream": (CHUNKED, True, (200, b"", "end"), True),
    "HEAD answered with a body": (OK + b"Content-Length: 2\r\n\r\nhi", True, (200, b"", "end"), False),
    "HEAD after early hints": (
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK + b"Content-Length: 500\r\n\r\n",
        True,
        (200, b"", "end"),
        True,
    ),
    "204": (b"HTTP/1.1 204 No Content\r\nContent-Length: 7\r\n\r\n", False, (204, b"", "end"), True),
    "304": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n", False, (304, b"", "end"), True),
    "304 of a stream": (
        b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n",
        False,
        (304, b"", "end"),
        True,
    ),
    "100 and 103 first": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
        + OK
        + b"Content-Length: 2\r\n\r\nhi",
        False,
        (200, b"hi", "end"),
        True,
    ),
    "101": (UPGRADE + b"\x81\x05hello", False, (101, b"\x81\x05hello", "end"), False),
    "101 with a length that means nothing": (
        UPGRADE[:-2] + b"Content-Length: 1\r\n\r\nHTTP/1.1 ",
        False,
        (101, b"HTTP/1.1 ", "end"),
        False,
    ),
    "101 to HEAD": (UPGRADE, True, (101, b"", "end"), False),
    "garbage after an answer": (OK + b"Content-Length: 2\r\n\r\nhiBUG", False, (200, b"hi", "end"), False),
    "a second answer": (2 * (OK + b"Content-Length: 2\r\n\r\nhi"), False, (200, b"hi", "end"), False),
    "garbage after the last chunk": (CHUNKED + b"0\r\n\r\n0\r\n\r\n", False, (200, b"", "end"), False),
    "garbage after connection: close": (
        OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi!",
        False,
        (200, b"hi", "end"),
        False,
    ),
    # Ends that are none.
    "nothing": (b"", False, (None, b"", "eof"), False),
    "end inside the head": (OK + b"Content-Le", False, (None, b"", "eof"), False),
    "end after 100": (b"HTTP/1.1 100 Continue\r\n\r\n", False, (None, b"", "eof"), False),
    "end inside the length": (OK + b"Content-Length: 9\r\n\r\nhello", False, (200, b"hello", "eof"), False),
    "end inside a chunk": (CHUNKED + b"9\r\nhello", False, (200, b"hello", "eof"), False),
    "end between chunks": (CHUNKED + b"5\r\nhello\r\n", False, (200, b"hello", "eof"), False),
    "end before the last line": (CHUNKED + b"5\r\nhello\r\n0\r\n", False, (200, b"hello", "eof"), False),
    # Garbage.
    "not HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", False, (None, b"", "bad_framing"), False),
    "HTTP/2 in the clear": (
        b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",
        False,
        (None, b"", "bad_framing"),
        False,
    ),
    "a chunk size that is none": (CHUNKED + b"1\r\na\r\nxyz\r\n", False, (200, b"a", "bad_framing"), False),
    "a chunk longer than it says": (CHUNKED + b"1\r\nab\r\n", False, (200, b"a", "bad_framing"), False),
    "two lengths": (
        OK + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\nx",
        False,
        (None, b"", "bad_framing"),
        False,
    ),
    "a length and chunks": (
        OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        False,
        (None, b"", "bad_framing"),
        False,
    ),
    "a negative length": (OK + b"Content-Length: -1\r\n\r\n", False, (None, b"", "bad_framing"), False),
    "a folded header": (
        OK + b"X: a\r\n b\r\nContent-Length: 0\r\n\r\n",
        False,
        (None, b"", "bad_framing"),
        False,
    ),
    "a space before the colon": (
        OK + b"Content-Length : 0\r\n\r\n",
        False,
        (None, b"", "bad_framing"),
        False,
    ),
    "a NUL in a value": (OK + b"X: a\0\r\n\r\n", False, (None, b"", "bad_framing"), False),
    "bare line feeds": (b"HTTP/1.1 200 OK\nContent-Length: 0\n\n", False, (None, b"", "bad_framing"), False),
    "101 without upgrade": (
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        False,
        (None, b"", "bad_framing"),
        False,
    ),
}


def every_cut(data: bytes) -> Iterator[list[bytes]]:
    yield [data]
    yield [data[at : at + 1] for at in range(len(data))]
    for at in range(1, len(data)):
        yield [data[:at], data[at:]]


@pytest.mark.parametrize(("sent", "head_request", "answer", "reusable"), CASES.values(), ids=CASES)
async def test_an_answer_is_the_same_however_it_is_cut(
    wire: Wire, sent: bytes, head_request: bool, answer: Answer, reusable: bool
) -> None:
    for pieces in every_cut(sent):
        wire.aborted = False
        _, link = linked(wire, head_request=head_request)
        for piece in filter(None, pieces):
            link.data_received(piece)
        link.eof_received()
        link.connection_lost(None)
        assert (pieces, await answer_of(link)) == (pieces, answer)


@pytest.mark.parametrize(("sent", "head_request", "answer", "reusable"), CASES.values(), ids=CASES)
async def test_a_connection_returns_to_the_pool_only_after_a_whole_answer_and_nothing_else(
    wire: Wire, sent: bytes, head_request: bool, answer: Answer, reusable: bool
) -> None:
    for pieces in every_cut(sent):
        wire.aborted = False
        pool, link = linked(wire, head_request=head_request)
        for piece in filter(None, pieces):
            link.data_received(piece)
        link.release()
        assert (pieces, pool.idle_count, wire.aborted) == (pieces, int(reusable), not reusable)
        assert pool._expiry is None or reusable
        if pool._expiry is not None:
            pool._expiry.cancel()


@pytest.mark.parametrize("bytewise", [False, True], ids=["whole", "byte by byte"])
@pytest.mark.parametrize(("sent", "head_request", "answer", "reusable"), CASES.values(), ids=CASES)
@both_loops
async def test_an_answer_arrives_over_a_socket(
    sent: bytes, head_request: bool, answer: Answer, reusable: bool, bytewise: bool
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in [sent[at : at + 1] for at in range(len(sent))] if bytewise else [sent]:
            writer.write(piece)
            await asyncio.sleep(0)

    async with serving(handler) as (pool, origin):
        link, seen = await ask(pool, origin, head_request=head_request)
        assert seen == answer
        link.release()


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_chunks_and_cuts_leave_no_trace_in_the_bytes(chunks: list[bytes], cuts: list[int]) -> None:
    wire = Wire()

    async def scenario() -> None:
        framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
        sent = CHUNKED + framed + b"0\r\n\r\n"
        _, link = linked(wire)
        edges = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
        got = b""
        for start, end in itertools.pairwise(edges):
            if start < end:
                link.data_received(sent[start:end])
            if link._parts:
                got += await link.read()
        assert got + await link.read() == b"".join(chunks)
        assert await link.read() == b""

    asyncio.run(scenario())
    wire.close_sockets()


@given(
    prefix=st.sampled_from([b"", OK, CHUNKED, CHUNKED + b"5\r\nhello", UPGRADE]),
    noise=st.lists(st.binary(min_size=1, max_size=60), max_size=4),
)
def test_no_bytes_make_anything_but_an_answer_or_a_break(prefix: bytes, noise: list[bytes]) -> None:
    wire = Wire()

    async def scenario() -> None:
        _, link = linked(wire)
        for piece in filter(None, [prefix, *noise]):
            link.data_received(piece)
        link.connection_lost(None)
        assert (await answer_of(link))[2] in {"end", "eof", "bad_framing"}

    asyncio.run(scenario())
    wire.close_sockets()


async def test_a_head_keeps_names_order_duplicates_and_values(wire: Wire) -> None:
    _, link = linked(wire)
    for at in range(len(sent := b"HTTP/1.1 200 \xc3\xa4 b\r\n" + HEADER_LINES + b"\r\n")):
        link.data_received(sent[at : at + 1])
    assert await link.head() == Head(
        status=200,
        reason=b"\xc3\xa4 b",
        headers=(
            (b"set-cookie", b"a=1"),
            (b"X-Empty", b""),
            (b"Set-Cookie", b"b=2"),
            (b"X-RAW", b"\xff: ,\tx  "),
            (b"Content-Length", b"0"),
        ),
        names=(b"set-cookie", b"x-empty", b"set-cookie", b"x-raw", b"content-length"),
        http_1_0=False,
        content_length=0,
        chunked=False,
    )


HEADER_LINES = (
    b"set-cookie: a=1\r\nX-Empty:\r\nSet-Cookie:b=2\r\nX-RAW: \t\xff: ,\tx  \r\nContent-Length: 0\r\n"
)


async def test_get_finds_the_first_value_whatever_the_case_and_trims_it(wire: Wire) -> None:
    _, link = linked(wire)
    link.data_received(OK + HEADER_LINES + b"\r\n")
    head = await link.head()
    found = [head.get(name) for name in (b"set-cookie", b"x-raw", b"x-empty", b"x-none")]
    assert found == [b"a=1", b"\xff: ,\tx", b"", None]


async def test_informational_answers_and_trailers_are_counted(wire: Wire) -> None:
    _, link = linked(wire)
    link.data_received(CASES["100 and 103 first"][0])
    assert (link.informational, link.trailers) == (2, 0)
    head = await link.head()
    assert (head.reason, head.headers) == (b"OK", ((b"Content-Length", b"2"),))
    link.expect_answer()
    link.data_received(CASES["trailers"][0])
    assert (link.informational, link.trailers) == (0, 2)


async def test_one_read_returns_all_that_has_arrived(wire: Wire) -> None:
    _, link = linked(wire)
    link.data_received(CHUNKED + b"1\r\na\r\n2\r\nbc\r\n")
    link.data_received(b"1\r\nd\r\n")
    assert await link.read() == b"abcd"
    reading = asyncio.create_task(link.read())
    await asyncio.sleep(0)
    link.data_received(b"1\r\n")
    await asyncio.sleep(0)
    assert not reading.done()
    link.data_received(b"e\r\n1\r\nf\r\n")
    assert await reading == b"ef"


async def test_a_cancelled_read_loses_nothing(wire: Wire) -> None:
    _, link = linked(wire)
    reading = asyncio.create_task(link.head())
    await asyncio.sleep(0)
    link.data_received(OK + b"Content-Length: 2\r\n\r\nhi")
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await answer_of(link) == (200, b"hi", "end")


FLOODS = {
    "headers": (OK, b"X: y\r\n", None),
    "one endless header": (OK + b"X: ", b"y" * 1000, None),
    "informational answers": (b"", b"HTTP/1.1 102 Processing\r\n\r\n", None),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", b"X: y\r\n", 200),
    "chunk extensions": (CHUNKED + b"1\r\nx\r\n1", b";a=b", 200),
}


@pytest.mark.parametrize(("start", "flood", "status"), FLOODS.values(), ids=FLOODS)
async def test_framing_without_end_is_refused(
    wire: Wire, start: bytes, flood: bytes, status: int | None
) -> None:
    _, link = linked(wire)
    link.data_received(start)
    for _ in range(FRAMING_BYTES_MAX // len(flood) + 2):
        link.data_received(flood)
        if wire.aborted:
            break
    link.connection_lost(None)
    assert await answer_of(link) == (status, b"x" if status else b"", "bad_framing")


async def test_small_chunks_may_add_up_to_more_than_the_framing_limit(wire: Wire) -> None:
    _, link = linked(wire)
    link.data_received(CHUNKED)
    for _ in range(FRAMING_BYTES_MAX // 100):
        link.data_received(b"1;" + b"e" * 200 + b"\r\n")
        link.data_received(b"x\r\n")
        assert await link.read() == b"x"


async def test_a_server_that_speaks_unasked_is_refused(wire: Wire) -> None:
    pool = Pool(ssl_context=TLS_CONTEXT)
    link = Link(pool, LOCAL, asyncio.get_running_loop())
    link.connection_made(wire)
    link.data_received(b"220 mail.example ESMTP\r\n")
    link.expect_answer()
    link.write(REQUEST)
    assert await answer_of(link) == (None, b"", "bad_framing")
    assert wire.written == []


async def test_drain_says_whether_there_is_an_answer_to_a_request_that_could_not_be_finished(
    wire: Wire,
) -> None:
    _, link = linked(wire)
    link.pause_writing()
    draining = asyncio.create_task(link.drain())
    await asyncio.sleep(0)
    link.data_received(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
    link.connection_lost(BrokenPipeError())
    with pytest.raises(Broken) as caught:
        await draining
    assert (caught.value.kind, caught.value.before_head) == ("reset", False)
    assert isinstance(caught.value.__cause__, BrokenPipeError)
    assert await answer_of(link) == (413, b"no", "end")


async def test_drain_waits_until_the_transport_wants_more(wire: Wire) -> None:
    _, link = linked(wire)
    await link.drain()
    link.pause_writing()
    draining = asyncio.create_task(link.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    link.resume_writing()
    await draining


async def test_a_request_still_in_the_buffer_keeps_the_connection_out_of_the_pool(wire: Wire) -> None:
    pool, link = linked(wire)
    link.data_received(OK + b"Content-Length: 0\r\n\r\n")
    wire.unsent_bytes = 1
    link.release()
    assert (pool.idle_count, wire.aborted) == (0, True)


async def test_a_released_link_is_dead_for_whoever_kept_it(wire: Wire) -> None:
    pool, link = linked(wire)
    link.data_received(OK + b"Content-Length: 0\r\n\r\n")
    link.release()
    again = await pool.acquire(LOCAL)
    assert (again.reused, link.reused, wire.protocol) == (True, False, again)
    link.write(b"late")
    link.writelines([b"late"])
    link.release()
    link.abort()
    with pytest.raises(Broken, match="aborted"):
        await link.drain()
    assert (wire.written, wire.aborted) == ([REQUEST], False)
    again.abort()
    assert wire.aborted
    await asyncio.sleep(0)
    again.connection_lost(None)
    await pool.close()


async def test_reading_stops_while_the_app_is_behind(wire: Wire) -> None:
    _, link = linked(wire)
    link.data_received(OK + b"\r\n" + b"x" * UNREAD_BYTES_MAX)
    assert wire.reading
    link.data_received(b"x")
    assert not wire.reading
    assert len(await link.read()) == UNREAD_BYTES_MAX + 1
    assert wire.reading


async def test_a_connection_given_back_with_much_unread_is_read_from_again(wire: Wire) -> None:
    pool, link = linked(wire)
    size = UNREAD_BYTES_MAX + 1
    link.data_received(OK + b"Content-Length: %d\r\n\r\n" % size + bytes(size))
    assert not wire.reading
    link.release()
    assert (pool.idle_count, wire.reading) == (1, True)


@both_loops
async def test_a_sender_is_paused_while_the_app_is_behind_and_nothing_is_lost() -> None:
    size = 32 * 1024 * 1024
    writers: list[asyncio.StreamWriter] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writers.append(writer)
        writer.write(OK + b"Content-Length: %d\r\n\r\n" % size + bytes(size))
        await writer.drain()

    async with serving(handler) as (pool, origin):
        link = await pool.acquire(origin)
        link.expect_answer()
        link.write(REQUEST)
        await link.head()
        for _ in range(1000):  # unpaused, 128 turns are enough for all of it
            await asyncio.sleep(0)
        assert writers[0].transport.get_write_buffer_size() > size // 2
        received = 0
        while data := await link.read():
            assert len(data) <= 2 * UNREAD_BYTES_MAX
            received += len(data)
        assert received == size


@both_loops
async def test_a_connection_is_used_again() -> None:
    requests: list[int] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(requests)
        requests.append(0)
        while True:
            await read_request(reader)
            requests[number] += 1
            writer.write(CASES["trailers"][0])

    async with serving(handler) as (pool, origin):
        for round_ in range(3):
            link, answer = await ask(pool, origin)
            assert answer == (200, b"hi", "end")
            assert (link.reused, pool.idle_count, pool.open_count) == (round_ > 0, 0, 1)
            link.release()
            assert (pool.idle_count, pool.open_count) == (1, 1)
        assert requests == [3]
        assert repr(pool) == "<Pool open=1 idle=1>"


async def keep_answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while not reader.at_eof():
        await read_request(reader)
        writer.write(OK + b"Content-Length: 2\r\n\r\nhi")


@both_loops
async def test_exchanges_at_the_same_time_have_a_connection_each_and_the_newest_is_used_first() -> None:
    async with serving(keep_answering) as (pool, origin):
        first, second = await ask(pool, origin), await ask(pool, origin)
        assert pool.open_count == 2
        first[0].release()
        second[0].release()
        transport = second[0]._transport
        assert (await pool.acquire(origin))._transport is transport
        assert (pool.idle_count, pool.open_count) == (1, 2)


@both_loops
async def test_a_connection_older_than_the_window_is_not_used_again() -> None:
    async with serving(keep_answering, reuse_s=0.0) as (pool, origin):
        link, _ = await ask(pool, origin)
        link.release()
        assert pool.idle_count == 1
        again = await pool.acquire(origin)
        assert (again.reused, pool.idle_count) == (False, 0)
        await until(lambda: pool.open_count == 1)


@both_loops
async def test_connections_too_old_for_use_are_closed_without_a_next_request() -> None:
    closed: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"Content-Length: 2\r\n\r\nhi")
        closed.append(await reader.read())

    async with serving(handler, reuse_s=0.01) as (pool, origin):
        links = [(await ask(pool, origin))[0] for _ in range(3)]
        for link in links:
            link.release()
            await asyncio.sleep(0)
        await until(lambda: len(closed) == 3)
        await until(lambda: pool.open_count == 0)
        assert pool.idle_count == 0


def of_idle(writer: asyncio.StreamWriter) -> socket.socket:
    return socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))


def end(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


def speak(sock: socket.socket) -> None:
    sock.send(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")


def reset(sock: socket.socket) -> None:
    # The loop holds this socket too, so closing ours sends nothing; connecting it to AF_UNSPEC resets it (tcp(7)).
    address = struct.pack("HxxI8x", socket.AF_UNSPEC, 0)
    assert ctypes.CDLL(None).connect(sock.fileno(), address, len(address)) == 0


@pytest.mark.parametrize("seen_by_loop", [True, False], ids=["seen", "not yet seen"])
@pytest.mark.parametrize("happening", [end, speak, reset])
@both_loops
async def test_what_happens_to_an_idle_connection_takes_it_out_of_the_pool(
    happening: Callable[[socket.socket], None], seen_by_loop: bool
) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await keep_answering(reader, writer)

    async with serving(handler) as (pool, origin):
        link, _ = await ask(pool, origin)
        link.release()
        with of_idle(writers[0]) as sock:
            happening(sock)
            if seen_by_loop:
                await until(lambda: pool.open_count == 0)
                assert pool.idle_count == 0
            link, answer = await ask(pool, origin)
        assert (link.reused, answer) == (False, (200, b"hi", "end"))


@both_loops
async def test_a_reset_inside_a_body_comes_after_the_bytes_before_it() -> None:
    got_part = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"\r\nhel")  # even where the end of the connection would be the end of the body
        await got_part.wait()
        with of_idle(writer) as sock:
            reset(sock)

    async with serving(handler) as (pool, origin):
        link = await pool.acquire(origin)
        link.expect_answer()
        link.write(REQUEST)
        await link.head()
        await until(lambda: link._unread_bytes == 3)
        got_part.set()
        await until(lambda: link._lost is not None)
        assert await answer_of(link) == (200, b"hel", "reset")


@both_loops
async def test_an_early_answer_is_returned_while_the_request_is_being_written() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await asyncio.Event().wait()  # reads no more

    async with serving(handler) as (pool, origin):
        link = await pool.acquire(origin)
        link.expect_answer()
        link.writelines([REQUEST, bytes(64 * 1024 * 1024)])
        draining = asyncio.create_task(link.drain())
        assert await answer_of(link) == (413, b"no", "end")
        assert not draining.done()
        link.release()
        assert pool.idle_count == 0
        with pytest.raises(Broken, match="aborted"):
            await draining
        await until(lambda: pool.open_count == 0)


@pytest.mark.parametrize("sent", [b"", OK + b"Content-Length: 9\r\n\r\n"], ids=["head", "read"])
@both_loops
async def test_abort_ends_who_waits_and_closes_the_connection(sent: bytes) -> None:
    closed = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(sent)
        await reader.read()
        closed.set()

    async with serving(handler) as (pool, origin):
        link = await pool.acquire(origin)
        link.expect_answer()
        link.write(REQUEST)
        if sent:
            await link.head()
        waiting = asyncio.create_task(answer_of(link))
        await asyncio.sleep(0)
        assert not waiting.done()
        link.abort()
        assert await waiting == (200 if sent else None, b"", "aborted")
        await closed.wait()
        await until(lambda: pool.open_count == 0)


@both_loops
async def test_after_101_bytes_go_both_ways_until_the_end() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(UPGRADE + b"first")
        writer.write(await reader.readexactly(4))

    async with serving(handler) as (pool, origin):
        link = await pool.acquire(origin)
        link.expect_answer()
        link.write(REQUEST)
        assert (await link.head()).status == 101
        got = await link.read()
        link.write(b"HTTP")
        while data := await link.read():
            got += data
        assert got == b"firstHTTP"
        link.release()
        assert pool.idle_count == 0


@both_loops
async def test_closing_the_pool_ends_all_exchanges_and_refuses_new_ones() -> None:
    async with serving(keep_answering) as (pool, origin):
        idle, _ = await ask(pool, origin)
        busy = await pool.acquire(origin)
        busy.expect_answer()
        idle.release()
        waiting = asyncio.create_task(answer_of(busy))
        await asyncio.sleep(0)
        await pool.close()
        assert (pool.open_count, pool.idle_count) == (0, 0)
        assert await waiting == (None, b"", "aborted")
        with pytest.raises(Unreachable, match="closed") as caught:
            await pool.acquire(origin)
        assert caught.value.cause_kind == "other"


@both_loops
async def test_sockets_send_at_once_and_are_kept_alive() -> None:
    async with serving(keep_answering) as (pool, origin):
        link = await pool.acquire(Origin("http", "localhost", origin.port))
        with socket.socket(fileno=os.dup(link._transport.get_extra_info("socket").fileno())) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


@both_loops
async def test_a_closed_port_is_unreachable_as_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    pool = Pool(ssl_context=TLS_CONTEXT)
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port}") as caught:
        await pool.acquire(Origin("http", "127.0.0.1", port))
    assert (caught.value.cause_kind, pool.open_count) == ("refused", 0)


@both_loops
async def test_a_name_that_cannot_exist_is_unreachable_as_dns() -> None:
    # A label over 63 characters fails before anything is asked of the network.
    with pytest.raises(Unreachable) as caught:
        await Pool(ssl_context=TLS_CONTEXT).acquire(Origin("http", "a" * 64 + ".invalid", 80))
    assert caught.value.cause_kind == "dns"


CONNECT_ERRORS = {
    "timeout": (OSError(errno.ETIMEDOUT, "timed out"), "timeout"),
    "refused at all addresses": (OSError(errno.ECONNREFUSED, "Multiple exceptions: ..."), "refused"),
    "no route": (OSError(errno.ENETUNREACH, "unreachable"), "other"),
    "different errors": (OSError("Multiple exceptions: ..."), "other"),
    "no descriptors": (OSError(errno.EMFILE, "too many"), "other"),
    "uvloop's own": (RuntimeError("handle is closed"), "other"),
}


@pytest.mark.parametrize(("error", "cause_kind"), CONNECT_ERRORS.values(), ids=CONNECT_ERRORS)
async def test_failures_to_connect_have_a_kind(
    monkeypatch: pytest.MonkeyPatch, error: Exception, cause_kind: str
) -> None:
    async def start_connection(*args: object, **kwargs: object) -> socket.socket:
        raise error

    monkeypatch.setattr(upstream, "start_connection", start_connection)
    with pytest.raises(Unreachable) as caught:
        await Pool(ssl_context=TLS_CONTEXT).acquire(LOCAL)
    assert (caught.value.cause_kind, caught.value.__cause__) == (cause_kind, error)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a certificate of its own making, and a client's that trusts it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command to make a certificate with")
    folder: Path = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -keyout {key} -out {cert}"
    subprocess.run(
        [openssl, *command.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    return server, ssl.create_default_context(cafile=str(cert))


@both_loops
async def test_tls_connections_are_verified(tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async with serving(keep_answering, tls=(tls[0], TLS_CONTEXT)) as (pool, origin):
        with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED") as caught:
            await pool.acquire(origin)
        assert (caught.value.cause_kind, pool.open_count) == ("tls", 0)


@both_loops
async def test_a_server_that_speaks_no_tls_is_unreachable_as_tls() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read(1)

    async with serving(handler) as (pool, origin):
        with pytest.raises(Unreachable) as caught:
            await pool.acquire(Origin("https", origin.host, origin.port))
        assert (caught.value.cause_kind, pool.open_count) == ("tls", 0)


@both_loops
async def test_tls_connections_are_used_again(tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async with serving(keep_answering, tls=tls) as (pool, origin):
        for round_ in range(3):
            link, answer = await ask(pool, origin)
            assert (link.reused, answer) == (round_ > 0, (200, b"hi", "end"))
            link.release()
        assert (pool.idle_count, pool.open_count) == (1, 1)


@both_loops
async def test_a_caller_may_give_up_while_connecting_and_leaves_nothing_open() -> None:
    hello, closed = asyncio.Event(), asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(5)  # the client's half of a handshake that is never answered
        hello.set()
        await reader.read()
        closed.set()

    async with serving(handler) as (pool, origin):
        acquiring = asyncio.create_task(pool.acquire(Origin("https", origin.host, origin.port)))
        await hello.wait()
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        await closed.wait()
        assert pool.open_count == 0


def test_verification_is_on_unless_a_context_says_otherwise() -> None:
    context = Pool()._ssl_context
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


URLS = {
    "http://127.0.0.1:8080": (Origin("http", "127.0.0.1", 8080), "", b"127.0.0.1:8080"),
    "https://api.openai.com/v1/": (Origin("https", "api.openai.com", 443), "/v1", b"api.openai.com"),
    "HTTPS://API.Example.com:443/a/b//": (
        Origin("https", "api.example.com", 443),
        "/a/b",
        b"api.example.com",
    ),
    "http://localhost:443/": (Origin("http", "localhost", 443), "", b"localhost:443"),
    "http://[::1]:11434/x%20y": (Origin("http", "::1", 11434), "/x%20y", b"[::1]:11434"),
    "https://[2001:DB8::1]": (Origin("https", "2001:db8::1", 443), "", b"[2001:db8::1]"),
    "http://my_host": (Origin("http", "my_host", 80), "", b"my_host"),
}


@pytest.mark.parametrize(("url", "expected"), URLS.items(), ids=URLS)
def test_a_base_url_gives_origin_prefix_and_host(url: str, expected: tuple[Origin, str, bytes]) -> None:
    origin, prefix = Origin.parse(url)
    assert (origin, prefix, origin.host_header) == expected


BAD_URLS = {
    "ftp://x": "start the URL with http",
    "api.openai.com/v1": "start the URL with http",
    "localhost:8080": "start the URL with http",
    "": "start the URL with http",
    "http://": "write a host",
    "http:///v1": "write a host",
    "http://:80": "write a host",
    "http://a,b": "write a host",
    "http://[::1%25eth0]": "write a host",
    "http://x:0": "port from 1 to 65535",
    "http://x:65536": "port from 1 to 65535",
    "http://x:http": "port from 1 to 65535",
    "http://x/?api-version=1": "remove ? and #",
    "http://x/#a": "remove ? and #",
    "http://x/a b": "percent-encode",
    "http://x/a\r\nEvil: y": "percent-encode",
    "http://bücher.example": "percent-encode",
}


@pytest.mark.parametrize(("url", "remedy"), BAD_URLS.items(), ids=list(map(repr, BAD_URLS)))
def test_another_url_is_refused_with_a_remedy(url: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy.replace("?", r"\?")):
        Origin.parse(url)


def test_a_refused_credential_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="remove what stands before the @") as caught:
        Origin.parse("https://key-123@api.example.com")
    assert "key-123" not in str(caught.value)
