"""What the app gets of an answer."""

import gzip
import sys
from typing import Final

import brotli
from wire_peers import ANSWER_BODY, TEXT_BODY, TOOLS_BODY, answer, chunked, length, request, sized, without

from conformance.case import CHAT, OK, Case, Cases, everywhere, exchange
from conformance.wire import Script, Wire

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FRAMED_ANEW: Final = "the coding of chunks is each hop's own and carries no content (RFC 9112, 7.1)"
CODINGS: Final = {"gzip": gzip.compress, "br": brotli.compress, "zstd": zstd.compress}
EARLY_HINTS: Final = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"


def told(answer: bytes, *, close: bool = False, method: bytes = b"POST", body: bytes = TEXT_BODY) -> Script:
    """A request and this answer."""
    asked = sized(CHAT, body) if method == b"POST" else request(CHAT, [], method=method)
    return exchange(asked, answer, close=close)


def chunk_coded(coded: bytes, coding: bytes = b"chunked") -> Script:
    """A chunked answer as it is in transfer."""

    async def script(wire: Wire) -> None:
        app = await wire.app()
        app.send(sized(CHAT, TEXT_BODY))
        provider = await wire.provider()
        await provider.request()
        provider.send(answer(b"Transfer-Encoding: " + coding + b"\r\n", coded))
        wire.note("head", await app.head())
        wire.note("body", await app.until(b"0\r\n") + await app.until(b"\r\n"))
        wire.note("more", await wire.arrived(app))

    return script


def informed(before: bytes) -> Script:
    """Something that comes before the final answer."""

    async def script(wire: Wire) -> None:
        app = await wire.app()
        app.send(sized(CHAT, TEXT_BODY))
        provider = await wire.provider()
        await provider.request()
        provider.send(before)
        wire.note("before the answer", await wire.arrived(app))
        provider.send(OK)
        wire.note("answer", await app.answer())

    return script


async def redirected(wire: Wire) -> None:
    """Who follows a redirect."""
    app = await wire.app()
    app.send(sized(CHAT, TEXT_BODY))
    provider = await wire.provider()
    await provider.request()
    provider.send(answer(b"Location: /v1/files\r\nContent-Length: 0\r\n", status=b"307 Temporary Redirect"))
    wire.note("answer", await app.answer())
    wire.note("asked again", await wire.arrived(provider) or wire.asked)


async def cookies(wire: Wire) -> None:
    """Who remembers a cookie."""
    app = await wire.app()
    app.send(sized(CHAT, TEXT_BODY))
    provider = await wire.provider()
    await provider.request()
    provider.send(answer(b"Set-Cookie: a=1; Path=/\r\nset-cookie: b=2\r\n" + length(b"{}"), b"{}"))
    wire.note("answer", await app.answer())
    app.send(sized(CHAT, TEXT_BODY))
    wire.note("next request", await provider.request())


async def piecewise(wire: Wire) -> None:
    """Whether the app has each piece before the provider sends the next."""
    app = await wire.app()
    app.send(sized(CHAT, TEXT_BODY))
    provider = await wire.provider()
    await provider.request()
    provider.send(answer(length(ANSWER_BODY)))
    wire.note("head", await app.head())
    for name, piece in (("first", ANSWER_BODY[:9]), ("second", ANSWER_BODY[9:])):
        provider.send(piece)
        wire.note(f"{name} piece", await wire.arrived(app))


async def head_only(wire: Wire) -> None:
    """HEAD, and an answer that says how its body would be framed."""
    app = await wire.app()
    app.send(request(CHAT, [], method=b"HEAD"))
    provider = await wire.provider()
    wire.note("request", await provider.request())
    provider.send(answer(b"Transfer-Encoding: chunked\r\nX: 1\r\n"))
    got = await app.head()
    wire.note("answer", without(got, b"transfer-encoding"))
    wire.note("Transfer-Encoding", got.get(b"transfer-encoding"))
    wire.note("body", await wire.arrived(app))


async def http_1_0(wire: Wire) -> None:
    """A provider of HTTP/1.0."""
    app = await wire.app()
    app.send(sized(CHAT, TEXT_BODY))
    provider = await wire.provider()
    await provider.request()
    provider.send(b"HTTP/1.0 200 OK\r\nX: 1\r\n\r\n" + ANSWER_BODY)
    provider.close()
    got = await app.answer()
    assert got is not None
    wire.note("status line", got.first)
    wire.note("body", got.body)
    wire.note("app's connection", await wire.connection(app))


async def surplus(wire: Wire) -> None:
    """More than one answer to one request."""
    app = await wire.app()
    app.send(sized(CHAT, TEXT_BODY))
    provider = await wire.provider()
    await provider.request()
    provider.send(OK + OK)
    wire.note("answer", await app.answer())
    wire.note("more", await wire.arrived(app))


def _compressed(name: str, body: bytes) -> Script:
    coded = CODINGS[name](ANSWER_BODY)
    return told(answer(b"Content-Encoding: %s\r\n%s" % (name.encode(), length(coded)), coded), body=body)


ANSWERS: Final[Cases] = {
    "Names, order, case and duplicates of headers": Case(
        "arrive as sent",
        told(answer(b"X-B: 1\r\nx-a:\r\nX-B: 2\r\nDate: then\r\nSERVER: own\r\n" + length(b"{}"), b"{}")),
    ),
    "Date, Server and Content-Type that were not sent": Case("nobody adds them", told(OK)),
    "An own reason phrase": Case("arrives as sent", told(answer(length(b""), status=b"200 Fine By Me"))),
    "No reason phrase": Case("none arrives", told(answer(length(b""), status=b"429 "))),
    "A header of 100 KB": Case(
        "arrives", told(answer(b"X-Large: %s\r\n%s" % (b"v" * 100_000, length(b"{}")), b"{}"))
    ),
    "HEAD with a length": Case("no body follows", told(answer(b"Content-Length: 1000\r\n"), method=b"HEAD")),
    "HEAD with Transfer-Encoding": everywhere(
        "no body follows",
        head_only,
        "HTTP",
        "it is about this hop, where nothing is transferred",
        {"Transfer-Encoding": None},
    ),
    "204": Case("no body follows", told(answer(b"X: 1\r\n", status=b"204 No Content"))),
    "304 with the length of what it does not send": Case(
        "no body follows", told(answer(b"Content-Length: 7\r\n", status=b"304 Not Modified"))
    ),
    "An empty body": Case("its length of zero arrives", told(answer(b"Content-Length: 0\r\n"))),
    "A body of known length, piece by piece": Case("each piece arrives before the next", piecewise),
    "A body in chunks": Case(
        "arrives in chunks",
        told(answer(b"X: 1\r\nTransfer-Encoding: chunked\r\nY: 2\r\n", chunked(b" ", ANSWER_BODY))),
    ),
    "A body in chunks that is compressed in transfer (`gzip, chunked`)": Case(
        "arrives as sent, with both codings named",
        chunk_coded(chunked(gzip.compress(b"{}", mtime=0)), b"gzip, chunked"),
    ),
    "A body that ends with the connection": Case(
        "the end is the connection's", told(answer(b"X: 1\r\n", ANSWER_BODY), close=True)
    ),
    "Chunk extensions": everywhere(
        "arrive", chunk_coded(b"2;a=b\r\n{}\r\n0\r\n\r\n"), "HTTP", FRAMED_ANEW, {"body": chunked(b"{}")}
    ),
    "Trailers": everywhere(
        "arrive",
        chunk_coded(b"2\r\n{}\r\n0\r\nX-Sum: 1\r\n\r\n"),
        "HTTP",
        "dropped, as RFC 9110, 6.5.1 allows",
        {"body": chunked(b"{}"), "more": b""},
    ),
    **{
        f"JSON in {name}, for a request {tools} tools": Case("arrives compressed", _compressed(name, body))
        for name in CODINGS
        for tools, body in (("without", TEXT_BODY), ("with", TOOLS_BODY))
    },
    "A redirect": Case("arrives; nobody follows it", redirected),
    "Set-Cookie": Case("arrives; nobody keeps it for the app's next request", cookies),
    "103 Early Hints": Case("arrives before the answer", informed(EARLY_HINTS)),
    "A provider's error": Case(
        "arrives as sent",
        told(
            answer(
                b"Retry-After: 7\r\nx-should-retry: true\r\n" + length(b"{}"), b"{}", status=b"529 Overloaded"
            )
        ),
    ),
    "A provider of HTTP/1.0": everywhere(
        "its version arrives",
        http_1_0,
        "HTTP",
        "each hop has its own version (RFC 9110, 2.5)",
        {"status line": b"HTTP/1.1 200 OK"},
    ),
    "Bytes behind the answer's end": everywhere(
        "arrive",
        surplus,
        "HTTP",
        "they belong to no request; that connection is not used again",
        {"more": b""},
    ),
}
