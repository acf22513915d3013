"""The app's side: its connection, one request of it at a time, the answer's bytes out, and the news that it left.

HTTP/1.1 as bytes, parsed by llhttp (through httptools), strict: a request that two parsers could read differently (both
Content-Length and Transfer-Encoding, two lengths, a blank before a colon) gets a 400 and never a provider. aiohttp's
server costs six times as much per request, and its answers add headers of their own.

Requests of one connection are served in order by one task. What arrives meanwhile waits, bounded, in memory.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import chain
from typing import Final, cast

import httptools

from turngate.proxy.wire import LAST_CHUNK, Framing, RequestHead, chunk, own_head

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

HEAD_BYTES_MAX: Final = 256 * 1024
"""Request line and headers together. Agents send up to 30 KiB of them; providers set limits of their own."""

UNREAD_BYTES_MAX: Final = 256 * 1024
"""What may wait to be read of a connection before its socket is not read any more; one socket read may follow."""

WAITING_MAX: Final = 16
"""Pipelined requests that may wait for their turn."""

LINGER_S: Final = 10.0
"""How long an app may still be sending when its answer is out: closing at once would reset what it has not read."""

_RESET: Final = struct.pack("ii", 1, 0)


class AppGone(Exception):
    """The app closed its connection, or sent a body that is none."""


class Request:
    """One request as it arrives: its head is here, its body comes."""

    __slots__ = ("broken", "ended", "head", "keep_alive", "parts", "takes_chunks", "unread_bytes")

    def __init__(self, head: RequestHead, *, keep_alive: bool, takes_chunks: bool) -> None:
        self.head = head
        self.keep_alive = keep_alive
        self.takes_chunks = takes_chunks
        self.parts: list[bytes] = []
        self.unread_bytes = 0
        self.ended = False
        self.broken = ""
        """Why no more of the body will come, where it is not whole."""


class Refusal:
    """What stands in a request's place when the app's bytes are no HTTP."""

    __slots__ = ("status", "text")

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        self.text = text


HEAD_TOO_LARGE: Final = Refusal(431, f"turngate: a request's head may have {HEAD_BYTES_MAX:,} bytes\n")


class Connection(asyncio.Protocol):
    """One connection of an app. `on_lost` is called when it is gone."""

    __slots__ = (
        "_ahead",
        "_arrived",
        "_discarding",
        "_headers",
        "_latest",
        "_listener",
        "_loop",
        "_parser",
        "_pending",
        "_progressed",
        "_reading_paused",
        "_rest_of_body",
        "_resumed",
        "_tunnel",
        "_unparsed_bytes",
        "_url",
        "_waiting",
        "on_lost",
        "task",
        "transport",
        "writing_paused",
    )

    def __init__(self, listener: "Listener", loop: asyncio.AbstractEventLoop) -> None:
        self._listener = listener
        self._loop = loop
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None
        self.on_lost: Callable[[], None] | None = None
        self.writing_paused = False
        self._reading_paused = False
        self._discarding = False
        self._tunnel: Tunnel | None = None
        self._pending = b""  # the answer's head, until the first of its body or the loop's next turn
        self._ahead: bytes | None = None  # what came behind a request to upgrade; None where there was none
        self._arrived: asyncio.Future[None] | None = None
        self._resumed: asyncio.Future[None] | None = None
        self._waiting: deque[Request | Refusal] = deque()
        self._latest: Request | None = None
        self._new_parser()

    def _new_parser(self) -> None:
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._rest_of_body = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._progressed = False
        self._unparsed_bytes = 0  # since the parser last had something whole, and at most one read more

    # The life of the connection

    async def _serve(self) -> None:
        """Serve one request after the other until one of the sides wants no more."""
        try:
            while (request := await self._next()) is not None:
                if isinstance(request, Refusal):
                    self._refuse(request)
                    await self._linger()
                    return
                if not await self._listener.serve(App(request, self)):
                    if not request.ended:
                        await self._linger()
                    return
                self._go_on()
        except Exception as error:  # noqa: BLE001 - a fault of ours ends this connection, never the process
            self._listener.failed("connection", error)
        finally:
            self.flush()
            if self.transport is not None:
                self.transport.close()

    async def _next(self) -> Request | Refusal | None:
        """The next request, as soon as its head is here; None when the app wants no more."""
        while not self._waiting:
            if self.transport is None or self.transport.is_closing():
                return None
            await self.arrival()
        request = self._waiting.popleft()
        self._read_on()
        return request

    def _go_on(self) -> None:
        """The answer is out and the connection stays: what came behind a refused upgrade is HTTP again."""
        if self._ahead is not None and not self._waiting:
            ahead, self._ahead = self._ahead, None
            self._new_parser()
            self._parse(ahead)
            self._read_on()

    def _refuse(self, refusal: Refusal) -> None:
        body = refusal.text.encode()
        headers = [("content-type", "text/plain; charset=utf-8")]
        self.write(own_head(refusal.status, headers, len(body), close=True) + body)

    async def _linger(self) -> None:
        """The answer is out, the app may still be sending: take that, so that it can read the answer."""
        self.flush()
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self._discarding = True
        self._waiting.clear()
        with suppress(OSError, RuntimeError):  # the app has just left
            transport.write_eof()
        self._read_on()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._next()

    def close_if_idle(self) -> None:
        """Close a connection that waits for a request."""
        if self._arrived is not None and self.transport is not None:
            self.transport.close()

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._listener.connections.add(self)
        self.task = self._loop.create_task(self._serve())

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = self._parser = None  # the parser knows us: a reference cycle
        self._listener.connections.discard(self)
        if self._latest is not None and not self._latest.ended:
            self._latest.broken = self._latest.broken or "the app left"
        if self._tunnel is not None:
            self._tunnel.feed_eof()
        self._wake()
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        if self._tunnel is not None:
            self._tunnel.feed_data(data)
        elif self._ahead is not None:
            self._ahead += data
        elif not self._discarding:
            self._parse(data)
        self._hold_reading()

    def pause_writing(self) -> None:
        self.writing_paused = True

    def resume_writing(self) -> None:
        self.writing_paused = False
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)

    def write(self, data: bytes) -> None:
        """Write at once, behind a head that waits."""
        transport = self.transport
        if transport is None:
            return
        if self._pending:
            head, self._pending = self._pending, b""
            transport.writelines((head, data))
        else:
            transport.write(data)

    def write_soon(self, head: bytes) -> None:
        """Write an answer's head together with what follows it in this turn of the loop, or at its end. A small answer
        then costs one system call, which on loopback is the dearest thing that happens to it."""
        self.flush()
        self._pending = head
        self._loop.call_soon(self.flush)

    def flush(self) -> None:
        head, self._pending = self._pending, b""
        if head and self.transport is not None:
            self.transport.write(head)

    async def writable(self) -> None:
        """Wait until the app has taken enough of what was written, or left."""
        if self.writing_paused and self.transport is not None:
            self._resumed = self._loop.create_future()
            try:
                await self._resumed
            finally:
                self._resumed = None

    # Parsing

    def _parse(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:
            return  # the app has left
        self._unparsed_bytes += len(data)
        self._progressed = False
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._give_up(Refusal(400, f"turngate: this is no HTTP/1.1 request: {error}\n"))
        if self._progressed:
            self._unparsed_bytes = len(data)
        elif self._unparsed_bytes > 2 * HEAD_BYTES_MAX:
            self._give_up(HEAD_TOO_LARGE)  # a head or trailers without end

    def _upgrade(self, rest: bytes) -> None:
        """The parser stops behind a head that asks for another protocol. Its body, if it has one, is HTTP still."""
        latest = self._latest
        if latest is None or latest.head.framing is Framing.NONE:
            self._ahead = rest
            return
        latest.ended = False
        self._new_parser()
        self._rest_of_body = True
        framing = [line for line in latest.head.headers if line[0].lower() in _FRAMING]
        self._parse(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(b"%s: %s\r\n" % line for line in framing))
        self._parse(rest)

    def _give_up(self, refusal: Refusal) -> None:
        """What follows cannot be read any more."""
        self._discarding = True
        if self._latest is not None and not self._latest.ended:
            self._latest.broken = refusal.text
            self._wake()
        else:
            self._arrive(refusal)

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self._progressed = True
        url, headers = self._url, self._headers
        self._headers = []  # what comes now are trailers: the upstream's framing is ours, so they end here
        if self._rest_of_body:
            return
        if (
            self._unparsed_bytes > HEAD_BYTES_MAX
            and sum(map(len, chain(*headers)), len(url)) > HEAD_BYTES_MAX
        ):
            self._give_up(HEAD_TOO_LARGE)
            self._latest = None
            return
        parser = self._parser
        assert parser is not None, "it is calling"
        head = RequestHead.read(parser.get_method().decode("ascii"), url.decode("latin-1"), headers)
        self._latest = Request(
            head, keep_alive=parser.should_keep_alive(), takes_chunks=parser.get_http_version() != "1.0"
        )
        self._arrive(self._latest)

    def on_body(self, data: bytes) -> None:
        self._progressed = True
        if (latest := self._latest) is not None:
            latest.parts.append(data)
            latest.unread_bytes += len(data)
            self._wake()

    def on_message_complete(self) -> None:
        self._progressed = True
        if self._latest is not None:
            self._latest.ended = True
            self._wake()
        self._rest_of_body = False

    def _arrive(self, request: Request | Refusal) -> None:
        self._waiting.append(request)
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    # The body

    async def arrival(self) -> None:
        """Wait for more of the present request, or for the end of the connection."""
        self._arrived = self._loop.create_future()
        try:
            await self._arrived
        finally:
            self._arrived = None

    def _hold_reading(self) -> None:
        latest = self._latest
        if self._reading_paused or self._discarding or self.transport is None:
            return
        unread_bytes = latest.unread_bytes if latest is not None else 0
        if unread_bytes > UNREAD_BYTES_MAX or len(self._waiting) >= WAITING_MAX or self._is_far_ahead():
            self.pause_reading()

    def _is_far_ahead(self) -> bool:
        return self._ahead is not None and len(self._ahead) > UNREAD_BYTES_MAX

    def taken(self, request: Request) -> bytes:
        """What is here of a request's body."""
        parts = request.parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        request.unread_bytes = 0
        if self._reading_paused:
            self._read_on()
        return data

    def pause_reading(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self._reading_paused = True
            self.transport.pause_reading()

    def _read_on(self) -> None:
        if self._reading_paused and len(self._waiting) < WAITING_MAX:
            self.resume_reading()

    def resume_reading(self) -> None:
        self._reading_paused = False
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def open_tunnel(self) -> "Tunnel":
        """What comes from here on is no HTTP."""
        self._tunnel = tunnel = Tunnel(self)
        ahead, self._ahead = self._ahead, b""
        if ahead:
            tunnel.feed_data(ahead)
        return tunnel


_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})


class Listener:
    """The open connections of the data port; called for each new one. `serve` carries one request through and says
    whether its connection may carry another one."""

    def __init__(
        self, serve: Callable[["App"], Awaitable[bool]], failed: Callable[[str, Exception], None]
    ) -> None:
        self.serve = serve
        self.failed = failed
        self.connections: set[Connection] = set()
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> Connection:
        return Connection(self, self._loop)

    async def shutdown(self, timeout_s: float) -> None:
        """Close what waits for a request, give the rest time to end, then close it too."""
        for connection in list(self.connections):
            connection.close_if_idle()
        tasks = [connection.task for connection in self.connections if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for connection in list(self.connections):
            if connection.transport is not None:
                connection.transport.abort()


class App:
    """One request of the app and the way back to it."""

    __slots__ = (
        "_connection",
        "_framing",
        "_request",
        "continue_due",
        "ended",
        "gone",
        "head",
        "told",
        "written_bytes",
    )

    def __init__(self, request: Request, connection: Connection) -> None:
        self._request = request
        self._connection = connection
        self._framing = Framing.NONE
        self.head = request.head
        self.continue_due = self.head.expects_continue
        """The app waits for a 100 that `read` gives it. False where the provider's own is passed on."""
        self.gone = connection.transport is None
        self.ended = False
        """The answer was given a proper end."""
        self.told: Callable[[bytes], None] | None = None
        """Shown each piece of the answer's body once it is written; must not raise."""
        self.written_bytes = 0

    # The request

    @property
    def at_end(self) -> bool:
        """The whole body has been read."""
        return self._request.ended and not self._request.parts

    @property
    def keeps_alive(self) -> bool:
        return self._request.keep_alive

    @property
    def takes_chunks(self) -> bool:
        """HTTP/1.0 knows no chunks."""
        return self._request.takes_chunks

    def read_ready(self) -> bytes:
        """The part of the body that is here now."""
        return self._connection.taken(self._request)

    async def read(self) -> bytes:
        """The next part of the body, b"" at its end. Raises AppGone."""
        request = self._request
        if self.continue_due and not self.at_end:
            self.continue_due = False
            self.inform(CONTINUE)
        while not request.parts:
            if request.ended:
                return b""
            if request.broken:
                raise AppGone(request.broken)
            await self._connection.arrival()
        return self._connection.taken(request)

    # The answer

    def inform(self, head: bytes) -> None:
        """Write a 1xx answer, which HTTP/1.0 does not know."""
        if self.takes_chunks:
            self._connection.write(head)

    def start(self, head: bytes, framing: Framing) -> None:
        """Write an answer's head; `framing` tells how its body's end will be told."""
        self._framing = framing
        self._connection.write_soon(head)

    def send(self, data: bytes) -> None:
        """Write entity bytes, as one piece."""
        self.written_bytes += len(data)
        self._connection.write(chunk(data) if self._framing is Framing.CHUNKED else data)
        if self.told is not None:
            self.told(data)

    def send_aside(self, data: bytes) -> None:
        """Write what is no part of the answer. Only where its length was not told."""
        self._connection.write(chunk(data) if self._framing is Framing.CHUNKED else data)

    def end(self) -> None:
        """The answer is whole."""
        self.ended = True
        if self._framing is Framing.CHUNKED:
            self._connection.write(LAST_CHUNK)

    def cut(self) -> None:
        """Close so that no reader can take what it has for the whole answer."""
        self._connection.flush()
        transport = self._connection.transport
        if transport is None:
            return
        if self._framing is Framing.CLOSE:
            # A proper close would be the end of the body: this one must be a reset.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            transport.abort()
        else:
            transport.close()

    @property
    def slow(self) -> bool:
        """The app has not taken what was written; wait for `writable` before reading more from upstream."""
        return self._connection.writing_paused

    async def writable(self) -> None:
        await self._connection.writable()

    def listen(self, on_gone: Callable[[], None] | None) -> None:
        """Call this when the app leaves; None when nobody is interested any more."""
        self._connection.on_lost = on_gone

    def tunnel(self) -> "Tunnel":
        """From here on the app's bytes belong to the protocol it asked for."""
        return self._connection.open_tunnel()


class Tunnel:
    """The app's raw bytes after an upgrade."""

    __slots__ = ("_connection", "_ended", "_parts", "_paused", "_waiter")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parts: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._paused = False

    async def read(self) -> bytes:
        """What has come, b"" when the app closed."""
        while not self._parts and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = b"".join(self._parts)
        self._parts.clear()
        if self._paused:
            self._paused = False
            self._connection.resume_reading()
        return data

    def feed_data(self, data: bytes) -> None:
        self._parts.append(data)
        if not self._paused and sum(map(len, self._parts)) > UNREAD_BYTES_MAX:
            self._paused = True
            self._connection.pause_reading()
        self._wake()

    def feed_eof(self) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
