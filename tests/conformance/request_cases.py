"""What the provider gets of a request, and when."""

import gzip
from typing import Final

from wire_peers import TEXT_BODY, answer, chunked, request, sized

from conformance.case import CHAT, OK, Case, Cases, Differs, everywhere, exchange
from conformance.wire import Script, Wire, status

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
READS_FIRST: Final = "what may be refused is read to its end and judged before the provider is asked"
FRAMED_ANEW: Final = "the coding of chunks is each hop's own and carries no content (RFC 9112, 7.1)"
SMUGGLED: Final = "two readers could see two different requests (RFC 9112, 6.1 to 6.3)"


def offered(asked: bytes) -> Script:
    """A request that may not reach the provider."""

    async def script(wire: Wire) -> None:
        wire.answering(OK)
        app = await wire.app()
        app.send(asked)
        wire.note("status", status(await app.answer(asked.partition(b" ")[0])))
        await wire.settle()
        wire.note("requests at the provider", len(wire.requests))

    return script


def refused(asked: bytes, code: str, reason: str) -> Case:
    """A request that no stage passes on."""
    facts = {"status": code, "requests at the provider": 0}
    return everywhere("the provider decides", offered(asked), "HTTP", f"{code}: {reason}", facts)


def chunk_coded(coded: bytes, coding: bytes = b"chunked") -> Script:
    """A chunked body as it is in transfer."""

    async def script(wire: Wire) -> None:
        app = await wire.app()
        app.send(request(CHAT, [b"Transfer-Encoding: " + coding], coded))
        provider = await wire.provider()
        wire.note("request", await provider.head())
        wire.note("body", await provider.until(b"\r\n\r\n"))
        provider.send(OK)
        wire.note("answer", await app.answer())

    return script


async def hop_by_hop(wire: Wire) -> None:
    """Headers about the app's own connection."""
    names = (b"connection", b"x-mine", b"keep-alive", b"te", b"proxy-authorization")
    values = (b"keep-alive, X-Mine", b"1", b"timeout=5", b"trailers", b"Basic eA==")
    app = await wire.app()
    lines = [b"%s: %s" % pair for pair in zip(names, values, strict=True)]
    app.send(sized(CHAT, TEXT_BODY, *lines, b"X: 1"))
    provider = await wire.provider()
    got = await provider.request()
    wire.note("request", got)
    wire.note("hop-by-hop", [name for name in names if got.get(name) is not None])
    provider.send(OK)
    wire.note("answer", await app.answer())


async def absolute_form(wire: Wire) -> None:
    """The provider by its own name, as clients name it that take Turngate for their HTTP proxy."""
    host = b"127.0.0.1:%d" % wire.provider_port
    app = await wire.app()
    app.send(sized(b"http://%s%s" % (host, CHAT), TEXT_BODY))
    provider = await wire.provider()
    got = await provider.request()
    wire.note("target", got.first.split(b" ")[1].replace(host, b"provider"))
    wire.note("body", got.body)
    provider.send(OK)
    wire.note("answer", await app.answer())


async def http_1_0(wire: Wire) -> None:
    """An app of HTTP/1.0 and a provider that answers in chunks all the same."""
    app = await wire.app()
    app.send(sized(CHAT, TEXT_BODY, version=b"1.0"))
    provider = await wire.provider()
    wire.note("version", (await provider.request()).first.rpartition(b" ")[2])
    provider.send(answer(b"Transfer-Encoding: chunked\r\n", chunked(b"one", b"two")))
    provider.close()
    got = await app.answer()
    assert got is not None
    wire.note("answer in chunks", got.get(b"transfer-encoding") is not None)
    wire.note("answer's body", got.body)
    wire.note("app's connection", await wire.connection(app))


def in_pieces(path: bytes) -> Script:
    """Whether the provider has a request's first half before the app sends the second."""

    async def script(wire: Wire) -> None:
        app = await wire.app()
        app.send(request(path, [b"Content-Length: %d" % len(TEXT_BODY)], TEXT_BODY[:9]))
        wire.note("first half before the second", await wire.reaches())
        app.send(TEXT_BODY[9:])
        provider = await wire.provider()
        wire.note("request", await provider.request())
        provider.send(OK)
        wire.note("answer", await app.answer())

    return script


def early(told: bytes) -> Script:
    """A provider that answers in the middle of an upload and leaves."""

    async def script(wire: Wire) -> None:
        app = await wire.app()
        app.send(request(CHAT, [b"Content-Length: %d" % len(TEXT_BODY)], TEXT_BODY[:9]))
        if held := not await wire.reaches():
            app.send(TEXT_BODY[9:])
        wire.note("answered before the upload's end", not held)
        provider = await wire.provider()
        await provider.head()
        await provider.exactly(len(TEXT_BODY) if held else 9)
        provider.send(told)
        provider.close()
        got = await app.answer()
        wire.note("answer", got)
        closes = got is not None and got.get(b"connection") == b"close"
        wire.note("half a request on a connection that goes on", not held and not closes)

    return script


async def broken_off(wire: Wire) -> None:
    """An app that leaves in the middle of its upload."""
    app = await wire.app()
    app.send(request(CHAT, [b"Content-Length: 100"], TEXT_BODY[:9]))
    reached = await wire.reaches()
    app.close()
    await wire.settle()
    got = None
    if reached or wire.asked:
        provider = await wire.provider()
        got = await provider.request()
        assert not got.whole
        assert await wire.connection(provider) == "closed"
    wire.note("what the provider has, and the end", got and got.body)


def expecting(word: bytes) -> Script:
    """An app that sends its body only when it is told to, or that it need not."""

    async def script(wire: Wire) -> None:
        app = await wire.app()
        app.send(request(CHAT, [b"Expect: 100-continue", b"Content-Length: %d" % len(TEXT_BODY)]))
        before = b""
        while not before and not wire.asked:
            before = await wire.arrived(app)
        before += await wire.arrived(app)
        wire.note("told before the provider's word", before)
        wire.note("provider asked before the body", wire.asked)
        if held := not wire.asked:
            app.send(TEXT_BODY)
        provider = await wire.provider()
        asked_for_word = (await provider.head()).get(b"expect")
        wire.note("Expect", asked_for_word)
        if word == CONTINUE:
            if asked_for_word is not None:
                provider.send(word)
            wire.note("told to go on", before + await wire.arrived(app))
            if not held:
                app.send(TEXT_BODY)
            wire.note("body", await provider.exactly(len(TEXT_BODY)))
        provider.send(OK if word == CONTINUE else word)
        wire.note("answer", await app.answer())

    return script


def _early(told: bytes) -> Case:
    enforce = Differs("Z4-1", READS_FIRST, {"answered before the upload's end": False})
    return Case("it comes at once, then the close", early(told), enforce=enforce)


def _expecting(direct: str, word: bytes) -> Case:
    told = {"told before the provider's word": CONTINUE, "Expect": None}
    held = Differs(
        "Z4-1", f"{READS_FIRST}; Turngate says 100 itself", {**told, "provider asked before the body": False}
    )
    return Case(direct, expecting(word), enforce=held)


REQUESTS: Final[Cases] = {
    "Names, order, case and duplicates of headers": Case(
        "arrive as sent",
        exchange(
            sized(CHAT, TEXT_BODY, b"X-B: 1", b"x-a: 2", b"X-B: 3", b"AUTHORIZATION: Bearer k", b"x-e:")
        ),
    ),
    "Headers that clients like to add (Accept, User-Agent, Content-Type)": Case(
        "only what was sent arrives", exchange(sized(CHAT, TEXT_BODY))
    ),
    "Cookies": Case("arrive as sent", exchange(sized(CHAT, TEXT_BODY, b"Cookie: a=1; b=2", b"cookie: c=3"))),
    "Hop-by-hop headers, and those that Connection names": everywhere(
        "arrive", hop_by_hop, "HTTP", "they end at each hop (RFC 9110, 7.6.1)", {"hop-by-hop": []}
    ),
    "A header of 20 KB": Case("arrives", exchange(sized(CHAT, TEXT_BODY, b"X-Large: " + b"v" * 20_000))),
    "A header of 100 KB": Case("arrives", exchange(sized(CHAT, TEXT_BODY, b"X-Large: " + b"v" * 100_000))),
    "A header of 300 KB": refused(
        sized(CHAT, TEXT_BODY, b"X-Large: " + b"v" * 300_000), "431", "a head has a limit of 256 KiB"
    ),
    "200 headers": Case(
        "arrive", exchange(sized(CHAT, TEXT_BODY, *(b"X-%d: %d" % (n, n) for n in range(200))))
    ),
    "1,200 headers": Case(
        "arrive", exchange(sized(CHAT, TEXT_BODY, *(b"X-%d: %d" % (n, n) for n in range(1200))))
    ),
    "Percent signs in path and query (`%3A`, `%2F`, `%7e`)": Case(
        "stay as they are", exchange(sized(b"/v1/models/a%3Ab%2Fc%7e?q=%2B&x=%3a", TEXT_BODY))
    ),
    "Absolute-form of a configured host": everywhere(
        "arrives as such",
        absolute_form,
        "HTTP",
        "who sends to the origin itself names the path only (RFC 9112, 3.2)",
        {"target": CHAT},
    ),
    "Absolute-form of another host": refused(
        sized(b"http://elsewhere.example" + CHAT, TEXT_BODY), "421", "only configured upstreams are reached"
    ),
    "OPTIONS": Case("arrives", exchange(request(CHAT, [b"Origin: http://x"], method=b"OPTIONS"))),
    "A compressed body": Case(
        "arrives compressed, with its Content-Encoding",
        exchange(sized(CHAT, gzip.compress(TEXT_BODY, mtime=0), b"Content-Encoding: gzip")),
    ),
    "A chunked body": Case(
        "arrives in chunks",
        exchange(request(CHAT, [b"Transfer-Encoding: chunked"], chunked(TEXT_BODY[:7], TEXT_BODY[7:]))),
    ),
    "A chunked body that is compressed in transfer (`gzip, chunked`)": Case(
        "arrives as sent, with both codings named",
        chunk_coded(chunked(gzip.compress(b"{}", mtime=0)), b"gzip, chunked"),
    ),
    "Chunk extensions": everywhere(
        "arrive", chunk_coded(b"2;a=b\r\n{}\r\n0\r\n\r\n"), "HTTP", FRAMED_ANEW, {"body": chunked(b"{}")}
    ),
    "Trailers": everywhere(
        "arrive",
        chunk_coded(b"2\r\n{}\r\n0\r\nX-Sum: 1\r\n\r\n"),
        "HTTP",
        "dropped, as RFC 9110, 6.5.1 allows",
        {"body": chunked(b"{}")},
    ),
    "An empty body with a length": Case("the length of zero is said", exchange(sized(CHAT, b""))),
    "No body and no length": Case("none is said", exchange(request(CHAT, []))),
    "Content-Length with Transfer-Encoding": refused(
        request(CHAT, [b"Content-Length: 2", b"Transfer-Encoding: chunked"], chunked(b"{}")), "400", SMUGGLED
    ),
    "Two Content-Lengths": refused(
        request(CHAT, [b"Content-Length: 2", b"Content-Length: 3"], b"{} "), "400", SMUGGLED
    ),
    "Blanks between a header's name and its colon": refused(
        request(CHAT, [b"Content-Length : 2"], b"{}"), "400", SMUGGLED
    ),
    "A body that the app sends piece by piece": Case(
        "each piece arrives before the next",
        in_pieces(CHAT),
        enforce=Differs("Z4-1", READS_FIRST, {"first half before the second": False}),
    ),
    "The same on an endpoint that generates nothing": Case(
        "each piece arrives before the next", in_pieces(b"/v1/files")
    ),
    "An app that leaves in the middle of its upload": Case(
        "the provider has the part and sees the end",
        broken_off,
        enforce=Differs("Z4-1", READS_FIRST, {"what the provider has, and the end": None}),
    ),
    "401 in the middle of an upload": _early(
        answer(b"Content-Length: 2\r\nConnection: close\r\n", b"{}", status=b"401 Unauthorized")
    ),
    "413 in the middle of an upload": _early(
        answer(b"Content-Length: 2\r\nConnection: close\r\n", b"{}", status=b"413 Content Too Large")
    ),
    "Expect: 100-continue, and the provider says so": _expecting(
        "100 comes when the provider gives it", CONTINUE
    ),
    "Expect: 100-continue, refused with 417": _expecting(
        "the app's body is never sent",
        answer(b"Content-Length: 0\r\nConnection: close\r\n", status=b"417 Expectation Failed"),
    ),
    "Expect: 100-continue, answered with 401": _expecting(
        "the app's body is never sent",
        answer(b"Content-Length: 2\r\nConnection: close\r\n", b"{}", status=b"401 Unauthorized"),
    ),
    "An app of HTTP/1.0": everywhere(
        "its version arrives; it may get chunks, which it does not know",
        http_1_0,
        "HTTP",
        "each hop has its own version (RFC 9110, 2.5); no chunks for it, the end is the connection's",
        {"version": b"HTTP/1.1", "answer in chunks": False},
    ),
}
