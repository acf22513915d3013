"""How connections live and end on both sides, and who is told."""

import hashlib
from typing import Final

from wire_peers import TEXT_BODY, answer, chunked, length, request, sized

from conformance.case import CHAT, OK, Case, Cases, Differs, everywhere, exchange
from conformance.wire import Script, Wire, status

PER_HOP: Final = "connections are each hop's own (RFC 9112, 9.3)"
RESET_CLOSES: Final = "a reset is passed on as a close where that cannot be taken for a proper end"
NO_HEAD: Final = "instead of no answer an error that its SDK raises and does not repeat"
PIECE: Final = bytes(range(256)) * 1024
STALLED_BYTES: Final = 256 * len(PIECE)
"""64 MiB: many times what the system's buffers and Turngate's own hold."""


async def reused(wire: Wire) -> None:
    """Two requests, one after the other."""
    app = await wire.app()
    provider = None
    for number in (b"1", b"2"):
        app.send(sized(CHAT, TEXT_BODY, b"X-Number: " + number))
        provider = provider or await wire.provider()
        wire.note(f"request {number.decode()}", await provider.request())
        provider.send(answer(length(number), number))
        wire.note(f"answer {number.decode()}", await app.answer())
    wire.note("another connection", wire.asked)
    wire.note("app's connection", await wire.connection(app))


async def pipelined(wire: Wire) -> None:
    """Two requests at once."""
    app = await wire.app()
    app.send(sized(CHAT, b"1") + sized(CHAT, b"2"))
    provider = await wire.provider()
    first = await provider.request()
    wire.note("first request", first.body)
    ahead = await wire.arrived(provider)
    wire.note("the second before the first is answered", bool(ahead))
    provider.send(answer(length(b"1"), b"1"))
    wire.note("first answer", await app.answer())
    second = ahead or (await provider.request()).body
    wire.note("second request", second.endswith(b"2"))
    provider.send(answer(length(b"2"), b"2"))
    wire.note("second answer", await app.answer())


async def closed_while_idle(wire: Wire) -> None:
    """The provider ends a connection between two requests."""
    app = await wire.app()
    app.send(sized(CHAT, TEXT_BODY))
    provider = await wire.provider()
    await provider.request()
    provider.send(OK)
    wire.note("first answer", await app.answer())
    provider.close()
    await wire.settle()
    wire.answering(OK)
    app.send(sized(CHAT, TEXT_BODY))
    wire.note("second answer", status(await app.answer()))


def ends_before_head(*, reset: bool, reuse: bool) -> Script:
    """The provider has the request and ends the connection."""

    async def script(wire: Wire) -> None:
        app = await wire.app()
        app.send(sized(CHAT, TEXT_BODY))
        provider = await wire.provider()
        await provider.request()
        if reuse:
            provider.send(OK)
            await app.answer()
            app.send(sized(CHAT, TEXT_BODY))
            await provider.request()
        if reset:
            provider.reset()
        else:
            provider.close()
        got = await app.answer()
        wire.note("answer", got)
        wire.note("app's connection", await wire.connection(app))
        wire.note("sent again", wire.asked)

    return script


def ends_within(told: bytes, *, reset: bool = False) -> Script:
    """The provider ends the connection in the middle of its answer."""

    async def script(wire: Wire) -> None:
        app = await wire.app()
        app.send(sized(CHAT, TEXT_BODY))
        provider = await wire.provider()
        await provider.request()
        provider.send(told)
        head, body = await app.head(), await wire.arrived(app)
        wire.note("head", head)
        wire.note("body", body)
        if reset:
            provider.reset()
        else:
            provider.close()
        wire.note("app's connection", await wire.connection(app))

    return script


async def garbage(wire: Wire) -> None:
    """What is no HTTP answer."""
    app = await wire.app()
    app.send(sized(CHAT, TEXT_BODY))
    provider = await wire.provider()
    await provider.request()
    provider.send(b"garbage\r\n\r\n")
    provider.close()
    wire.note("app has", (await app.rest()).partition(b"\r\n")[0])


async def app_leaves_waiting(wire: Wire) -> None:
    app = await wire.app()
    app.send(sized(CHAT, TEXT_BODY))
    provider = await wire.provider()
    wire.note("request", await provider.request())
    app.close()
    wire.note("provider's connection", await wire.connection(provider))


async def app_leaves_reading(wire: Wire) -> None:
    app = await wire.app()
    app.send(sized(CHAT, TEXT_BODY))
    provider = await wire.provider()
    await provider.request()
    provider.send(answer(b"Transfer-Encoding: chunked\r\n", chunked(b"one")[:-5]))
    wire.note("head", await app.head())
    wire.note("body", await wire.arrived(app))
    app.close()
    wire.note("provider's connection", await wire.connection(provider))


async def half_closed(wire: Wire) -> None:
    """An app that says with its request that no other will follow."""
    app = await wire.app()
    app.send(sized(CHAT, TEXT_BODY))
    provider = await wire.provider()
    await provider.request()
    app.half_close()
    await wire.settle()
    provider.send(OK)
    provider.close()
    wire.note("answer", await app.answer())
    wire.note("app's connection", await wire.connection(app))


async def app_closes_after(wire: Wire) -> None:
    """Connection: close in the request."""
    app = await wire.app()
    app.send(sized(CHAT, TEXT_BODY, b"Connection: close"))
    provider = await wire.provider()
    got = await provider.request()
    wire.note("provider is told", got.get(b"connection"))
    provider.send(answer(b"Connection: close\r\n" + length(b"{}"), b"{}"))
    provider.close()
    wire.note("answer", await app.answer())
    wire.note("app's connection", await wire.connection(app))


async def stalled(wire: Wire) -> None:
    """An app that does not read for a while."""
    app = await wire.app()
    app.send(sized(CHAT, TEXT_BODY))
    provider = await wire.provider()
    await provider.request()
    provider.send(answer(b"Content-Length: %d\r\n" % STALLED_BYTES))
    wire.note("head", await app.head())
    sent, digest = 0, hashlib.sha256()
    while sent < STALLED_BYTES and await wire.takes(provider):
        provider.send(PIECE)
        sent += len(PIECE)
    wire.note("provider could send all of it", sent == STALLED_BYTES)
    for _ in range((STALLED_BYTES - sent) // len(PIECE)):
        provider.send(PIECE)
    for _ in range(STALLED_BYTES // len(PIECE)):
        digest.update(await app.exactly(len(PIECE)))
    wire.note("body", digest.digest())
    wire.note("app's connection", await wire.connection(app))


async def unreachable(wire: Wire) -> None:
    """A provider where nobody listens: in the settings of these tests the one of another dialect."""
    try:
        app = await (wire.app(port=1) if wire.stage == "direct" else wire.app())
    except ConnectionRefusedError:
        wire.note("answer", "connection refused")
        return
    app.send(sized(b"/v1/messages", TEXT_BODY))
    wire.note("answer", await app.answer())


async def websocket(wire: Wire) -> None:
    """A connection that becomes another protocol's."""
    app = await wire.app()
    asks = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: eA==", b"X: 1")
    app.send(request(b"/v1/realtime?model=m", list(asks), method=b"GET"))
    provider = await wire.provider()
    asked = await provider.head()
    wire.note("request", asked)
    wire.note("request's Upgrade", (asked.get(b"connection"), asked.get(b"upgrade")))
    provider.send(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: eQ==\r\n\r\n\x81\x02hi"
    )
    told = await app.head()
    wire.note("answer", told)
    wire.note("answer's Upgrade", (told.get(b"connection"), told.get(b"upgrade")))
    wire.note("bytes behind the head", await app.exactly(4))
    app.send(b"\x81\x82\0\0\0\0\r\n")
    wire.note("the app's bytes", await provider.exactly(8))
    provider.send(b"\0\xff")
    wire.note("the provider's bytes", await app.exactly(2))
    app.close()
    wire.note("provider's connection", await wire.connection(provider))


def _no_head(*, reset: bool = False, reuse: bool = False) -> Case:
    closes = {"app's connection": "closed"} if reset else {}
    passed = Differs("HTTP", RESET_CLOSES, closes) if reset else None
    answered = Differs("Z5", NO_HEAD, {**closes, "answer": "502 dispatch.unknown_outcome, retry false"})
    direct = f"the app's connection {'is reset' if reset else 'ends'}, too; nobody asks again"
    return Case(direct, ends_before_head(reset=reset, reuse=reuse), passed, passed, answered)


CONNECTIONS: Final[Cases] = {
    "A second request on the same connection": Case("both connections are used again", reused),
    "Two requests at once (pipelining)": everywhere(
        "the provider has both, answers come in order",
        pipelined,
        "HTTP",
        "sent on one after the other; answers keep their order (RFC 9112, 9.3.2)",
        {"the second before the first is answered": False},
    ),
    "Connection: close in request and answer": everywhere(
        "arrives; the connection ends", app_closes_after, "HTTP", PER_HOP, {"provider is told": None}
    ),
    "Connection: close in the answer": everywhere(
        "arrives; the connection ends",
        exchange(sized(CHAT, TEXT_BODY), answer(b"Connection: close\r\n" + length(b"{}"), b"{}"), close=True),
        "HTTP",
        PER_HOP,
        {"app's connection": "open"},
    ),
    "The provider closes an idle connection before the next POST": everywhere(
        "the app has to connect anew", closed_while_idle, "HTTP", PER_HOP, {"second answer": "200"}
    ),
    "The provider closes a kept connection when the next POST arrives": _no_head(reuse=True),
    "The provider closes before the answer's head": _no_head(),
    "The provider resets before the answer's head": _no_head(reset=True),
    "The provider closes within a length": Case(
        "the part, then the close", ends_within(answer(b"Content-Length: 100\r\n", b"half"))
    ),
    "The provider closes within chunks": Case(
        "the part, then the close",
        ends_within(answer(b"Transfer-Encoding: chunked\r\n", chunked(b"half")[:-5])),
    ),
    "The provider resets within a body that ends with the connection": Case(
        "the part, then a reset", ends_within(answer(b"X: 1\r\n", b"half"), reset=True)
    ),
    "The provider resets within a length": everywhere(
        "the part, then a reset",
        ends_within(answer(b"Content-Length: 100\r\n", b"half"), reset=True),
        "HTTP",
        RESET_CLOSES,
        {"app's connection": "closed"},
    ),
    "An answer that is not HTTP": Case(
        "arrives",
        garbage,
        Differs("HTTP", "where it ends cannot be known: the app's connection ends", {"app has": b""}),
        Differs("HTTP", "where it ends cannot be known: the app's connection ends", {"app has": b""}),
        Differs("Z5", NO_HEAD, {"app has": b"HTTP/1.1 502 Bad Gateway"}),
    ),
    "A provider where nobody listens": everywhere(
        "connection refused",
        unreachable,
        "HTTP",
        "the app has its connection: it gets 502, and may try again, for nothing was sent",
        {"answer": "502 dispatch.unsent, retry true"},
    ),
    "The app leaves before the answer": Case("the provider sees the end", app_leaves_waiting),
    "The app leaves within the answer": Case("the provider sees the end", app_leaves_reading),
    "The app half-closes behind its request": everywhere(
        "it still gets its answer",
        half_closed,
        "HTTP",
        "taken for leaving: by the end of its bytes alone the two cannot be told apart",
        {"answer": None},
    ),
    "An app that does not read for a while": Case(
        "the provider cannot write on until it reads; all arrives", stalled
    ),
    "WebSocket": Case("after 101 raw bytes both ways", websocket),
}
