"""Connections to providers: HTTP/1.1 as bytes, with a pool of kept-alive connections.

aiohttp's client costs about three times what this one does per request, adds headers of its own, decompresses and
retries. Here the caller writes the request's bytes and gets the answer's names, values and entity bytes as they
came; only the transfer framing is removed. Nothing is retried, redirected, remembered or decoded.

A forward proxy is asked for a tunnel (CONNECT) to plain http origins too: what goes in absolute form may be cached
and rewritten by it, and then the bytes are no longer the app's. Names are resolved anew, by the system or the forward
proxy, for every connection.

Who owns a transport is told by its protocol: a `Link` while an exchange uses it, an `_Idle` while it lies in the
pool. Each acquisition makes a new `Link`, so that one kept too long by an exchange can never touch the next one.

Parsing is llhttp's (through httptools), strict: an answer that two parsers could read differently (both
Content-Length and Transfer-Encoding, two lengths, folded lines, bare LF, control characters) is `bad_framing`.
"""

import asyncio
import base64
import errno
import ipaddress
import re
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, Self, cast
from urllib.parse import unquote_to_bytes, urlsplit

import httptools
import msgspec
from aiohappyeyeballs import start_connection

UNREAD_BYTES_MAX: Final = 256 * 1024
"""Entity bytes an app may be behind before we stop reading: one socket read of asyncio, so one more may follow."""

FRAMING_BYTES_MAX: Final = 256 * 1024
"""Bytes that may arrive without any entity byte (head, 1xx answers, chunk extensions, trailers). Providers' heads
have 2 to 4 KiB; the limit only keeps a broken peer from filling our memory."""

HAPPY_EYEBALLS_DELAY_S: Final = 0.25  # RFC 8305, section 5

CONNECTION_AGE_MAX_S: Final = 300.0
"""A connection never without work would lead to one address for ever. Providers move traffic by DNS, with TTLs up to
five minutes (Cloudflare's for the names it serves): one older than that takes no further request."""

TUNNEL_HEAD_BYTES_MAX: Final = 64 * 1024
"""Refusals of some forward proxies carry whole pages, but not in the head."""

KEEPALIVE_OPTIONS: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 30), ("TCP_KEEPCNT", 5))
"""Models think for minutes without a byte: probes keep NAT tables (350 s at some clouds) from forgetting us."""

DEFAULT_PORTS: Final = {"http": 80, "https": 443}

CauseKind = Literal["dns", "refused", "tls", "timeout", "proxy", "other"]
BreakKind = Literal["eof", "reset", "bad_framing", "aborted"]


class Unreachable(Exception):
    """No byte of a request can have reached the provider: free to retry.

    `cause_kind`: dns (no such name), refused, timeout (the system's own limit for connecting), tls (anything
    during the handshake), proxy (anything on the way to an open tunnel: the forward proxy cannot be reached or refuses
    it), other (no route, no file descriptor left, pool closed).
    """

    def __init__(self, cause_kind: CauseKind, message: str) -> None:
        super().__init__(message)
        self.cause_kind = cause_kind


class Broken(Exception):
    """The connection ended or spoke garbage before the answer was complete.

    `kind`: eof (clean TCP end), reset (or any other failure of the transport), bad_framing, aborted (by us).
    `before_head`: no final answer's head had arrived.
    """

    def __init__(self, kind: BreakKind, *, before_head: bool) -> None:
        place = "before the answer's head" if before_head else "after the answer's head"
        super().__init__(f"upstream connection ended {place}: {kind}")
        self.kind = kind
        self.before_head = before_head


class Origin(msgspec.Struct, frozen=True, dict=True):
    """Where a connection leads, and the key of the pool."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> tuple[Self, str]:
        """Origin and path prefix ("" or "/v1", no trailing slash) of an upstream's base URL.

        Raises ValueError, with the remedy, for anything that is not a plain http or https base URL.
        """
        # urlsplit drops line breaks silently; this text ends up in request heads.
        if not (url.isascii() and url.isprintable()) or " " in url:
            raise ValueError(f"{url!r}: percent-encode spaces and non-ASCII, write hosts in their xn-- form")
        parts = urlsplit(url)
        if parts.scheme not in DEFAULT_PORTS:
            raise ValueError(f"{url!r}: start the URL with http:// or https://")
        if "@" in parts.netloc:
            # Not quoted: what stands before the @ may be a credential.
            raise ValueError(
                "URL with user information: remove what stands before the @; apps send their own keys"
            )
        if parts.query or parts.fragment:
            raise ValueError(f"{url!r}: remove ? and #; apps send their own query")
        host = parts.hostname or ""
        if not _is_host(host, bracketed="[" in parts.netloc):
            raise ValueError(f"{url!r}: write a host name or address after {parts.scheme}://")
        return cls(parts.scheme, host, _port(url, parts.scheme)), parts.path.rstrip("/")

    @cached_property
    def host_header(self) -> bytes:
        """Value of the Host header: default ports left out, IPv6 in brackets."""
        authority = self.authority
        if self.port == DEFAULT_PORTS[self.scheme]:
            authority = authority.rpartition(":")[0]
        return authority.encode("ascii")

    @cached_property
    def authority(self) -> str:
        """Host and port, IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _is_host(host: str, *, bracketed: bool) -> bool:
    if not bracketed:
        return re.fullmatch(r"[a-z0-9._-]+", host) is not None
    try:
        return ipaddress.IPv6Address(host).scope_id is None
    except ValueError:
        return False


def _port(url: str, scheme: str) -> int:
    try:
        port = urlsplit(url).port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"{url!r}: write a port from 1 to 65535 or none")
    return port or DEFAULT_PORTS[scheme]


@dataclass(frozen=True, slots=True)
class ForwardProxy:
    """A proxy that opens tunnels for us. `authorization` is the value of Proxy-Authorization, or empty."""

    address: Origin
    authorization: bytes = field(default=b"", repr=False)

    @classmethod
    def parse(cls, url: str) -> Self:
        """From `http://USER:PASSWORD@HOST:PORT`; scheme, user information and port (80) may be left out.

        Raises ValueError with the remedy. It quotes nothing of what may be a credential.
        """
        scheme, _, rest = url.partition("://") if "://" in url else ("http", "", url)
        if scheme.lower() != "http":
            raise ValueError("a proxy is http://[USER:PASSWORD@]HOST:PORT; no other kind can be used")
        userinfo, at, address = rest.rpartition("@")
        origin, path = Origin.parse(f"http://{address}")
        if path:
            raise ValueError(f"{address!r}: a proxy has no path; remove it")
        if not at:
            return cls(origin)
        user, _, password = userinfo.partition(":")
        credentials = unquote_to_bytes(user) + b":" + unquote_to_bytes(password)
        return cls(origin, b"Basic " + base64.b64encode(credentials))

    def __str__(self) -> str:
        return self.address.authority

    def tunnel_request(self, origin: Origin) -> bytes:
        """The head that asks for a tunnel."""
        authority = origin.authority.encode("ascii")
        head = b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n" % (authority, authority)
        if self.authorization:
            head += b"Proxy-Authorization: %b\r\n" % self.authorization
        return head + b"\r\n"


@dataclass(frozen=True, slots=True)
class Access:
    """How an origin is reached: through a forward proxy or not, and with whose TLS context (None: the pool's)."""

    proxy: ForwardProxy | None = None
    ssl_context: ssl.SSLContext | None = None


_DIRECT: Final = Access()


class Head(msgspec.Struct, frozen=True, gc=False):
    """An answer's status line and headers as they came: raw names, order, duplicates; values without leading blanks.

    `content_length` and `chunked` are what the head declares, also where no body follows (HEAD, 204, 304).
    """

    status: int
    reason: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    names: tuple[bytes, ...]
    """The headers' names in lower case: asked for many times, so folded once."""
    http_1_0: bool
    content_length: int | None
    chunked: bool

    @classmethod
    def read(
        cls, status: int, reason: bytes, headers: Iterable[tuple[bytes, bytes]], *, http_1_0: bool = False
    ) -> Self:
        """Content-Length and whether the last transfer coding is chunked are read as llhttp reads them."""
        headers = tuple(headers)
        names = tuple([name.lower() for name, _ in headers])
        content_length, chunked = None, False
        if b"content-length" in names:
            content_length = int(
                headers[names.index(b"content-length")][1]
            )  # llhttp let only digits pass, once
        if b"transfer-encoding" in names:
            codings = [
                value for name, (_, value) in zip(names, headers, strict=True) if name == b"transfer-encoding"
            ]
            chunked = codings[-1].rpartition(b",")[2].strip(b" \t").lower() == b"chunked"
        return cls(status, reason, headers, names, http_1_0, content_length, chunked)

    def get(self, lower_name: bytes) -> bytes | None:
        """First value of a header, without blanks around it."""
        if lower_name not in self.names:
            return None
        return self.headers[self.names.index(lower_name)][1].rstrip(b" \t")


Sink = Callable[[bytes], bool]
"""Takes entity bytes; true where it wants no more for now."""


class Link(asyncio.Protocol):
    """One connection in the hands of one exchange, one request at a time. Made by `Pool.acquire`.

    `expect_answer`, write, `head`, `read` until b"", `release`; or `abort` at any time. One task may wait in
    `head` or `read` while another waits in `drain`.
    """

    __slots__ = (
        "_cause",
        "_done",
        "_drain_waiter",
        "_extra",
        "_framing_bytes",
        "_head",
        "_head_request",
        "_headers",
        "_idle",
        "_informed",
        "_keep_alive",
        "_loop",
        "_lost",
        "_parser",
        "_parts",
        "_pool",
        "_raw",
        "_reading_paused",
        "_reason",
        "_sink",
        "_sink_failure",
        "_transport",
        "_unread_bytes",
        "_waiter",
        "_writing_paused",
        "informational",
        "opened_s",
        "origin",
        "reused",
        "trailers",
    )

    _transport: asyncio.Transport

    def __init__(self, pool: "Pool", origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self.origin = origin
        self.reused = False
        self.opened_s = 0.0  # the pool's clock
        self.informational = 0  # 1xx answers before the head
        self.trailers = 0  # trailer fields dropped after a chunked body
        self._pool = pool
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._drain_waiter: asyncio.Future[None] | None = None
        self._writing_paused = False
        self._reading_paused = False
        self._lost: BreakKind | None = (
            None  # how the connection ended for this exchange, also after a whole answer
        )
        self._cause: Exception | None = None
        self._idle: _Idle | None = None  # what owned the connection before and will again
        self._extra = False  # bytes that belong to no answer: never reused
        self._raw = False  # after a 101
        self._informed: Callable[[Head], None] | None = None
        self._sink: Sink | None = None
        self._sink_failure: Exception | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reset_answer(head_request=False)

    def _reset_answer(self, *, head_request: bool) -> None:
        self._head_request = head_request
        self._head: Head | None = None
        self._reason = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._unread_bytes = 0
        self._framing_bytes = 0
        self._done = False
        self._keep_alive = False

    @property
    def is_open(self) -> bool:
        """Whether no end was seen yet. False before the first write: nothing was sent, another link may take over."""
        return self._lost is None

    # Sending

    def expect_answer(
        self, *, head_request: bool = False, informed: Callable[[Head], None] | None = None
    ) -> None:
        """Begin an exchange; call it before the first write of each request.

        `informed` is told of each 1xx answer (but 101) as it arrives; it must not raise. It is forgotten at the
        head: who is told knows the link, and the two would be a reference cycle.
        """
        self._informed = informed
        self.informational = self.trailers = 0
        self._reset_answer(head_request=head_request)
        self._parser = httptools.HttpResponseParser(self)
        # Some servers pad the size line; how long the chunk is stays beyond doubt.
        self._parser.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)

    def write(self, data: bytes) -> None:
        """Send or queue bytes. On a lost connection nothing happens: `drain`, `head` and `read` tell."""
        if self._lost is None:
            self._transport.write(data)

    def writelines(self, parts: Iterable[bytes]) -> None:
        """As `write`, for several pieces."""
        if self._lost is None:
            self._transport.writelines(parts)

    async def drain(self) -> None:
        """Wait until the transport wants more bytes. Raises Broken if the connection is lost.

        With `before_head` false there is an answer (say a 413): ask `head`.
        """
        if self._writing_paused and self._lost is None:
            assert self._drain_waiter is None, "one task at a time may drain"
            self._drain_waiter = self._loop.create_future()
            try:
                await self._drain_waiter
            finally:
                self._drain_waiter = None
        if self._lost is not None:
            raise self._broken(self._lost)

    # Receiving

    async def head(self) -> Head:
        """The final answer's head, as soon as it is here, even while the request is still being written."""
        while self._head is None:
            if self._lost is not None:
                raise self._broken(self._lost)
            await self._wait()
        return self._head

    async def read(self) -> bytes:
        """All entity bytes that arrived since the last read, at least one; b"" at the proper end.

        Raises Broken after the bytes that came before the break were delivered.
        """
        while not self._parts:
            if self._done:
                return b""
            if self._lost is not None:
                raise self._broken(self._lost)
            await self._wait()
        return self._take()

    async def pump(self, sink: Sink) -> bool:
        """Give all that arrives to `sink`, in the callback of each socket read: no task is woken for a delta.

        Ends with True as soon as `sink` returns true (it wants no more for now; call again to go on), with False at
        the proper end of the answer. Raises Broken after the bytes before the break were given, and what `sink` raises.
        """
        if self._parts and sink(self._take()):
            return True
        self._sink = sink
        try:
            while not (self._done or self._lost is not None or self._sink is None):
                await self._wait()
            if self._sink is None:
                failure, self._sink_failure = self._sink_failure, None
                if failure is not None:
                    raise failure
                return True
        finally:
            self._sink = None
        if self._done:
            return False
        assert self._lost is not None
        raise self._broken(self._lost)

    def _pour(self, sink: Sink) -> None:
        try:
            wanted = not sink(self._take())
        except Exception as error:  # noqa: BLE001 - raised where `pump` is awaited
            self._sink_failure, wanted = error, False
        if not wanted:
            self._sink = None
            self._wake()

    def _take(self) -> bytes:
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._unread_bytes = 0
        if self._reading_paused:
            self._resume_reading()
        return data

    async def _wait(self) -> None:
        assert self._waiter is None, "one task at a time may wait for the answer"
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _broken(self, kind: BreakKind) -> Broken:
        broken = Broken(kind, before_head=self._head is None)
        broken.__cause__ = self._cause
        return broken

    # Ending

    def abort(self) -> None:
        """Close at once, dropping what is queued. Bytes already received can still be read. Idempotent."""
        if self._lost == "aborted":
            return  # also after `release`: the transport may belong to another exchange by now
        self._end("aborted")
        self._transport.abort()

    def release(self) -> None:
        """Give the connection back: to the pool if the answer ended properly and another may follow, else it closes.

        Only the caller knows whether the request was written in full: after an early answer to half a request,
        `abort`. The link is dead afterwards.
        """
        if self._lost == "aborted":
            return
        transport = self._transport
        reusable = (
            self._done
            and self._keep_alive
            and not self._extra
            and self._lost is None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )
        if not reusable:
            self.abort()
            return
        if self._reading_paused:
            self._resume_reading()
        self._end("aborted")
        self._pool._park(self, transport)

    def _end(self, kind: BreakKind, cause: Exception | None = None) -> None:
        """The connection is over for this exchange; the first reason counts."""
        if self._lost is None:
            self._lost = kind
            self._cause = cause
            if kind == "eof" and self._ends_with_connection():
                self._done = True
        self._parser = self._informed = None
        self._wake()
        if self._drain_waiter is not None and not self._drain_waiter.done():
            self._drain_waiter.set_result(None)

    def _ends_with_connection(self) -> bool:
        head = self._head
        return self._raw or (head is not None and head.content_length is None and not head.chunked)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _resume_reading(self) -> None:
        self._reading_paused = False
        if not self._transport.is_closing():
            self._transport.resume_reading()

    # Called by the transport

    def adopt(self, idle: "_Idle") -> None:
        """Take over a kept-alive transport from the pool."""
        self.reused = True
        self.opened_s = idle.opened_s
        self._idle = idle
        self._transport = idle.transport
        idle.transport.set_protocol(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class
        self.opened_s = self._pool.monotonic()
        self._pool._open.add(self)

    def data_received(self, data: bytes) -> None:
        if self._raw:
            self.on_body(data)
        elif self._parser is not None:
            self._parse(self._parser, data)
        elif self._done:
            self._extra = True
        else:
            self._refuse(None)  # the server speaks before it was asked
        if self._unread_bytes > UNREAD_BYTES_MAX and not self._reading_paused:
            self._reading_paused = True
            if not self._transport.is_closing():
                self._transport.pause_reading()
        if self._sink is None:
            self._wake()
            return
        if self._parts:
            self._pour(self._sink)
        if self._done or self._lost is not None:
            self._wake()

    def eof_received(self) -> None:
        self._end("eof")  # returning nothing makes the transport close itself

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("eof" if exc is None else "reset", exc)
        self._pool._closed(self)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._drain_waiter is not None and not self._drain_waiter.done():
            self._drain_waiter.set_result(None)

    # Parsing

    def _parse(self, parser: httptools.HttpResponseParser, data: bytes) -> None:
        unread_bytes = self._unread_bytes
        try:
            if self._head_request:
                self._feed_head_only(parser, data)
            else:
                parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._extra = True  # never HTTP again
            self._raw = not self._done
            if self._raw and (rest := data[upgrade.args[0] :]):
                self.on_body(rest)
        except httptools.HttpParserError as error:
            if not self._done:
                self._refuse(error)
            self._extra = True
        if self._done or self._raw:
            self._parser = (
                None  # it holds our callbacks: left in place, every link would be a reference cycle
            )
        elif self._unread_bytes > unread_bytes:
            self._framing_bytes = 0
        else:
            self._framing_bytes += len(data)
            if self._framing_bytes > FRAMING_BYTES_MAX:
                self._refuse(None)

    def _feed_head_only(self, parser: httptools.HttpResponseParser, data: bytes) -> None:
        """Line by line, because httptools cannot be told that no body follows the head of an answer to HEAD."""
        for line in data.splitlines(keepends=True):
            if self._done:
                self._extra = True
                return
            parser.feed_data(line)

    def _refuse(self, error: Exception | None) -> None:
        self._end("bad_framing", error)
        self._transport.abort()

    # Called by the parser; an exception in here stops it with HttpParserError

    def on_message_begin(self) -> None:
        if self._done:
            raise ValueError("a second answer to one request")
        self._reason = b""
        self._headers = []

    def on_status(self, part: bytes) -> None:
        self._reason += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:
            self._headers.append((name, value))
        else:
            self.trailers += 1

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        status = parser.get_status_code()
        if status == 101:
            if not parser.should_upgrade():
                raise ValueError("101 without Upgrade: which bytes follow is unknown")
        elif status < 200:
            self.informational += 1
            if self._informed is not None:
                self._informed(Head.read(status, self._reason, self._headers))
            return
        self._informed = None
        self._head = Head.read(
            status, self._reason, self._headers, http_1_0=parser.get_http_version() == "1.0"
        )
        if self._head_request:
            self._complete(parser)

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)
        self._unread_bytes += len(part)

    def on_message_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        if self._head is not None and self._head.status != 101:
            self._complete(parser)

    def _complete(self, parser: httptools.HttpResponseParser) -> None:
        self._done = True
        self._keep_alive = parser.should_keep_alive()


class Pool:
    """Kept-alive connections by origin. It has no limit: the number of exchanges is bounded elsewhere.

    `reuse_s` is short because a provider may close an idle connection at any time: the POST that meets such a
    close is lost with an unknown outcome, a new connection costs one round trip.

    An origin that `accesses` does not name is reached directly, with `ssl_context` if it is https.
    """

    def __init__(
        self,
        accesses: Mapping[Origin, Access] | None = None,
        *,
        reuse_s: float = 4.0,
        ssl_context: ssl.SSLContext | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._accesses = accesses or {}
        self._reuse_s = reuse_s
        self._ssl_context = ssl_context or verifying_context()
        self.monotonic = monotonic
        self._idle: dict[Origin, list[_Idle]] = {}  # newest last
        self._open: set[Link | _Idle] = set()
        self._expiry: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._all_closed: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Pool open={self.open_count} idle={self.idle_count}>"

    @property
    def idle_count(self) -> int:
        """Connections that wait for a next request."""
        return sum(map(len, self._idle.values()))

    @property
    def open_count(self) -> int:
        """All connections, idle and in use, until their sockets are closed."""
        return len(self._open)

    async def acquire(self, origin: Origin) -> Link:
        """A connection idle for less than `reuse_s` and not too old, else a new one. Raises Unreachable.

        No time limit but the system's for connecting (two minutes on Linux) and asyncio's for a TLS handshake (60 s),
        and none for a forward proxy's answer; the caller's `asyncio.timeout` may cancel this at any point.
        """
        link = self.reuse(origin)
        if link is None and not self._is_closed:
            loop = asyncio.get_running_loop()
            link = Link(self, origin, loop)
            await self._connect(link, loop)
        if link is None or self._is_closed:  # perhaps while connecting
            raise Unreachable("other", "the connection pool is closed")
        return link

    def reuse(self, origin: Origin) -> Link | None:
        """The part of `acquire` that needs no waiting: a kept-alive connection, if there is one."""
        if self._is_closed:
            return None
        loop = asyncio.get_running_loop()
        idle = self._pop(origin, loop.time())
        if idle is None:
            return None
        link = Link(self, origin, loop)
        link.adopt(idle)
        self._open.add(link)
        return link

    async def close(self) -> None:
        """Abort all connections, also those in use, and wait until their sockets are closed."""
        self._is_closed = True
        if self._expiry is not None:
            self._expiry.cancel()
        for connection in tuple(self._open):
            connection.abort()
        if self._open:
            self._all_closed = asyncio.get_running_loop().create_future()
            await self._all_closed

    def _pop(self, origin: Origin, now: float) -> "_Idle | None":
        idle_here = self._idle.get(origin)
        while idle_here:
            idle = idle_here.pop()
            if now - idle.since_s < self._reuse_s and not self._is_old(idle.opened_s) and idle.is_silent():
                self._open.discard(idle)
                return idle
            idle.transport.abort()
        return None

    async def _connect(self, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        origin = link.origin
        access = self._accesses.get(origin, _DIRECT)
        if access.proxy is None:
            sock = await _open_socket(origin, loop)
        else:
            sock = await _open_tunnel(access.proxy, origin, loop)
        is_tls = origin.scheme == "https"
        try:
            await loop.create_connection(
                lambda: link,
                sock=sock,
                ssl=(access.ssl_context or self._ssl_context) if is_tls else None,
                server_hostname=origin.host if is_tls else None,
            )
        except OSError as error:  # ssl.SSLError is one; the transport closes the socket
            raise Unreachable("tls" if is_tls else "other", f"{origin.authority}: {error}") from error
        if self._is_closed:
            link.abort()

    def _is_old(self, opened_s: float) -> bool:
        return self.monotonic() - opened_s >= CONNECTION_AGE_MAX_S

    def _park(self, link: Link, transport: asyncio.Transport) -> None:
        loop = link._loop
        idle = link._idle or _Idle(link, transport)
        idle.since_s = loop.time()
        transport.set_protocol(idle)
        self._open.discard(link)
        self._open.add(idle)
        self._idle.setdefault(link.origin, []).append(idle)
        if self._expiry is None:
            self._expiry = loop.call_later(self._reuse_s, self._expire)

    def _expire(self) -> None:
        """Close what is too old to be used, so that a burst of streams leaves no sockets behind."""
        loop = asyncio.get_running_loop()
        self._expiry = None
        born_after_s = loop.time() - self._reuse_s
        waiting = [idle for idle_here in self._idle.values() for idle in idle_here]
        for idle in waiting:
            if idle.since_s <= born_after_s:
                idle.abort()
        oldest_s = min((idle.since_s for idle in waiting if idle.since_s > born_after_s), default=None)
        if oldest_s is not None:
            self._expiry = loop.call_at(oldest_s + self._reuse_s, self._expire)

    def _forget(self, idle: "_Idle") -> None:
        idle_here = self._idle[idle.origin]
        if idle in idle_here:  # not if `_pop` found it first
            idle_here.remove(idle)

    def _closed(self, connection: "Link | _Idle") -> None:
        self._open.discard(connection)
        if not self._open and self._all_closed is not None and not self._all_closed.done():
            self._all_closed.set_result(None)


class _Idle(asyncio.Protocol):
    """A connection in the pool. Whatever happens to it there (end, reset, unasked bytes) takes it out at once."""

    __slots__ = ("_poll", "_pool", "opened_s", "origin", "since_s", "transport")

    def __init__(self, link: Link, transport: asyncio.Transport) -> None:
        self._pool = link._pool
        self.origin = link.origin
        self.opened_s = link.opened_s
        self.transport = transport
        self.since_s = 0.0  # the loop's clock
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def is_silent(self) -> bool:
        """Whether nothing has arrived that the loop has not told us yet: a close that it had no time to see."""
        return not self.transport.is_closing() and not self._poll.poll(0)

    def abort(self) -> None:
        self._pool._forget(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        # The peer's end comes here too, because a transport closes itself after it. The reason does not
        # matter: nobody waits for anything on this connection.
        self._pool._forget(self)
        self._pool._closed(self)


def verifying_context() -> ssl.SSLContext:
    """TLS for HTTP/1.1 that trusts what the system trusts (or SSL_CERT_FILE and SSL_CERT_DIR). Takes 30 ms to make."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


async def _open_socket(origin: Origin, loop: asyncio.AbstractEventLoop) -> socket.socket:
    """A connected TCP socket to the address that answers first. Raises Unreachable."""
    where = origin.authority
    try:
        addresses = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label longer than DNS allows
        raise Unreachable("dns", f"{where}: {error}") from error
    try:
        sock = await start_connection(addresses, happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY_S, loop=loop)
    except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError for some
        raise Unreachable(_connect_cause(error), f"{where}: {error}") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE_OPTIONS:
        if hasattr(socket, option):  # macOS lacks some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock


async def _open_tunnel(proxy: ForwardProxy, origin: Origin, loop: asyncio.AbstractEventLoop) -> socket.socket:
    """A socket that a forward proxy has connected to an origin. Raises Unreachable."""
    try:
        sock = await _open_socket(proxy.address, loop)
    except Unreachable as error:
        raise Unreachable("proxy", f"proxy {error}") from error
    try:
        await loop.sock_sendall(sock, proxy.tunnel_request(origin))
        refusal = await _tunnel_refusal(sock, loop)
        if refusal:
            raise ConnectionError(refusal)
    except OSError as error:
        sock.close()
        raise Unreachable("proxy", f"proxy {proxy}: no tunnel to {origin.authority}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


async def _tunnel_refusal(sock: socket.socket, loop: asyncio.AbstractEventLoop) -> str:
    """Read the answer to CONNECT: why there is no tunnel, or "" when it is open."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        data = await loop.sock_recv(sock, 4096)
        if not data:
            return "it closed the connection"
        answer += data
        if len(answer) > TUNNEL_HEAD_BYTES_MAX:
            return "its answer is too long"
    status = re.match(rb"HTTP/1\.[01] ([1-9][0-9]{2})[ \r]", answer)
    if status is None:
        return "its answer is not HTTP/1.1"
    if not status[1].startswith(b"2"):
        return f"status {status[1].decode()}"
    # An origin is silent until it is asked: what follows the head would be read as its words.
    return "" if answer.index(b"\r\n\r\n") + 4 == len(answer) else "it sent more than a head"


def _connect_cause(error: Exception) -> CauseKind:
    match error:
        case ConnectionRefusedError() | OSError(errno=errno.ECONNREFUSED):
            return "refused"
        case TimeoutError() | OSError(errno=errno.ETIMEDOUT):
            return "timeout"
    return "other"
