"""The app's connection: requests out of bytes, whole, cut anywhere, one behind the other, and what is no request."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from turngate.proxy.app_side import HEAD_BYTES_MAX, UNREAD_BYTES_MAX, App, AppGone, Listener
from turngate.proxy.wire import Framing, own_head

Served = list[tuple[str, str, list[tuple[bytes, bytes]], bytes]]

SIZED = b"POST /a HTTP/1.1\r\nHost: x\r\nX-A:  1 \r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"POST /b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1;x=y\r\nd\r\n0\r\nT: 1\r\n\r\n"
PLAIN = b"GET /c?q=%3A HTTP/1.1\r\n\r\n"
OFFERED = (
    b"POST /d HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nhi"
)
OFFERED_CHUNKED = b"POST /d HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"

REQUESTS = {
    "a length": (SIZED, [("POST", "/a", b"hello")]),
    "chunks and a trailer": (CHUNKED, [("POST", "/b", b"abcd")]),
    "no body": (PLAIN, [("GET", "/c?q=%3A", b"")]),
    "one behind the other": (
        SIZED + CHUNKED + PLAIN,
        [("POST", "/a", b"hello"), ("POST", "/b", b"abcd"), ("GET", "/c?q=%3A", b"")],
    ),
    "an offer of another protocol, with a body": (
        OFFERED + PLAIN,
        [("POST", "/d", b"hi"), ("GET", "/c?q=%3A", b"")],
    ),
    "the same in chunks": (
        OFFERED_CHUNKED + PLAIN,
        [("POST", "/d", b"hi"), ("GET", "/c?q=%3A", b"")],
    ),
    "blank lines before it": (b"\r\n\r\n" + PLAIN, [("GET", "/c?q=%3A", b"")]),
}


class Port:
    """A listener that answers each request with nothing and keeps what it was given."""

    def __init__(self) -> None:
        self.served: Served = []
        self.gone: list[str] = []
        self.failures: list[Exception] = []

    async def serve(self, app: App) -> bool:
        body = b""
        try:
            while data := await app.read():
                body += data
        except AppGone as error:
            self.gone.append(str(error))
            return False
        self.served.append((app.head.method, app.head.target, list(app.head.headers), body))
        app.start(own_head(200, [], 0, close=False), Framing.LENGTH)
        return app.keeps_alive

    async def answers_to(self, pieces: Sequence[bytes]) -> bytes:
        """All that comes back for these pieces, each its own write, up to the close of our side."""
        loop = asyncio.get_running_loop()
        listener = Listener(self.serve, lambda _where, error: self.failures.append(error))
        server = await loop.create_server(listener, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            last = b"GET /last HTTP/1.1\r\nConnection: close\r\n\r\n"
            writer.write(last)
            answered = await reader.read()
            writer.close()
            await listener.shutdown(1.0)
        return answered


def whole(data: bytes) -> list[list[bytes]]:
    return [[data]]


def byte_by_byte(data: bytes) -> list[list[bytes]]:
    return [[data[i : i + 1] for i in range(len(data))]]


def cut_anywhere(data: bytes) -> list[list[bytes]]:
    return [[data[:i], data[i:]] for i in range(1, len(data))]


@pytest.mark.parametrize("cutting", [whole, byte_by_byte, cut_anywhere])
@pytest.mark.parametrize(("data", "expected"), REQUESTS.values(), ids=REQUESTS)
async def test_requests_are_read_the_same_however_their_bytes_arrive(
    data: bytes, expected: list[Any], cutting: Callable[[bytes], list[list[bytes]]]
) -> None:
    for pieces in cutting(data):
        port = Port()
        answered = await port.answers_to(pieces)
        assert [(method, target, body) for method, target, _, body in port.served] == [
            *expected,
            ("GET", "/last", b""),
        ]
        assert answered.count(b"HTTP/1.1 200 OK") == len(expected) + 1
        assert not port.failures


async def test_header_names_order_and_values_stay_without_blanks_around_them() -> None:
    port = Port()
    await port.answers_to([SIZED])
    assert port.served[0][2] == [(b"Host", b"x"), (b"X-A", b"1"), (b"Content-Length", b"5")]


async def test_reading_goes_on_behind_a_refused_upgrade_that_had_much_behind_it() -> None:
    asked = b"GET /w HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    body = b"x" * (3 * UNREAD_BYTES_MAX)
    port = Port()
    async with asyncio.timeout(30):
        await port.answers_to([asked, b"POST /a HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body), body])
    assert [(target, len(got)) for _, target, _, got in port.served] == [
        *(("/w", 0), ("/a", len(body))),
        ("/last", 0),
    ]


REFUSED = {
    "two framings": (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
    "a blank before the colon": (b"POST / HTTP/1.1\r\nContent-Length : 1\r\n\r\na", b"400"),
    "no HTTP at all": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
    "a head without end": (b"GET / HTTP/1.1\r\nA: " + b"a" * (2 * HEAD_BYTES_MAX + 1), b"431"),
    "a head that is too long": (
        b"GET / HTTP/1.1\r\nA: " + b"a" * (HEAD_BYTES_MAX + 1) + b"\r\n\r\n",
        b"431",
    ),
}


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED)
async def test_what_is_no_request_is_answered_and_served_to_nobody(data: bytes, status: bytes) -> None:
    port = Port()
    answered = await port.answers_to([PLAIN, data])
    assert [target for _, target, _, _ in port.served] == ["/c?q=%3A"]
    assert answered.split(b"HTTP/1.1 ")[2].startswith(status)
    assert not port.failures


ENDLESS = b"".join(b"T%d: %s\r\n" % (n, b"t" * 1000) for n in range(2 * HEAD_BYTES_MAX // 1000 + 300))


@pytest.mark.parametrize("rest", [b"zz\r\n", b"0\r\n" + ENDLESS], ids=["no chunk", "trailers without end"])
async def test_a_body_that_is_none_ends_its_request(rest: bytes) -> None:
    port = Port()
    await port.answers_to([b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + rest])
    assert port.served == []
    assert len(port.gone) == 1
