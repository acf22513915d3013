"""The app's side of one exchange: its request's bytes in, the answer's bytes out, and the news that it left.

aiohttp's low-level server parses the request; the answer is written to the transport as it is, because aiohttp's own
response adds headers (Date, Server, Content-Type) and costs more than the rest of the way.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.http import HttpVersion11

from turngate.proxy.wire import LAST_CHUNK, Framing, RequestHead, chunk

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

TUNNEL_BYTES_MAX: Final = 256 * 1024
"""What may wait for a slow upstream before the app's socket is not read any more."""

_RESET: Final = struct.pack("ii", 1, 0)


class AppGone(Exception):
    """The app closed its connection, or sent a body that is none."""


class Connection(web.RequestHandler):
    """aiohttp's connection, which also tells the exchange when the app left and when it reads too slowly."""

    __slots__ = ("_writable", "on_lost")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_lost: Callable[[], None] | None = None
        self._writable: asyncio.Future[None] | None = None

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._wake()
        if self.on_lost is not None:
            self.on_lost()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wake()

    async def writable(self) -> None:
        """Wait until the app has taken enough of what was written, or left."""
        if self.writing_paused and self.transport is not None:
            self._writable = self._loop.create_future()
            try:
                await self._writable
            finally:
                self._writable = None

    def _wake(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)


class Written:
    """What the handler gives back to aiohttp: the answer has been written already."""

    __slots__ = ("keep_alive",)

    def __init__(self, *, keep_alive: bool) -> None:
        self.keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing is left to write."""

    async def write_eof(self) -> None:
        """Nothing is left to write."""


class App:
    """One request of the app and the way back to it."""

    __slots__ = (
        "_connection",
        "_content",
        "_framing",
        "_request",
        "continue_due",
        "gone",
        "head",
        "written_bytes",
    )

    def __init__(self, request: web.BaseRequest, connection: Connection) -> None:
        self._request = request
        self._connection = connection
        self._content = request.content
        self._framing = Framing.NONE
        self.head = RequestHead.read(request.method, request.raw_path, request.raw_headers)
        self.continue_due = self.head.expects_continue
        """The app waits for a 100 that `read` gives it. False where the provider's own is passed on."""
        self.gone = connection.transport is None
        self.written_bytes = 0

    # The request

    @property
    def at_end(self) -> bool:
        """The whole body has been read."""
        return self._content.at_eof()

    @property
    def keeps_alive(self) -> bool:
        return self._request.keep_alive

    @property
    def takes_chunks(self) -> bool:
        """HTTP/1.0 knows no chunks."""
        return self._request.version >= HttpVersion11

    def read_ready(self) -> bytes:
        """The part of the body that is here now."""
        return self._content.read_nowait() if self._content.exception() is None else b""

    async def read(self) -> bytes:
        """The next part of the body, b"" at its end. Raises AppGone."""
        if self.continue_due and not self.at_end:
            self.continue_due = False
            self.inform(CONTINUE)
        try:
            return await self._content.readany()
        except (ConnectionError, web.RequestPayloadError, asyncio.IncompleteReadError) as error:
            raise AppGone(str(error)) from error

    # The answer

    def inform(self, head: bytes) -> None:
        """Write a 1xx answer, which HTTP/1.0 does not know."""
        if self.takes_chunks:
            self._write(head)

    def start(self, head: bytes, framing: Framing) -> None:
        """Write an answer's head; `framing` tells how its body's end will be told."""
        self._framing = framing
        self._write(head)

    def send(self, data: bytes) -> None:
        """Write entity bytes, as one piece."""
        self.written_bytes += len(data)
        self._write(chunk(data) if self._framing is Framing.CHUNKED else data)

    def end(self) -> None:
        """The answer is whole."""
        if self._framing is Framing.CHUNKED:
            self._write(LAST_CHUNK)

    def cut(self) -> None:
        """Close so that no reader can take what it has for the whole answer."""
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
        tunnel = Tunnel(self._connection)
        self._connection.set_parser(tunnel)  # type: ignore[arg-type]  # aiohttp calls feed_data and feed_eof only
        return tunnel

    def _write(self, data: bytes) -> None:
        transport = self._connection.transport
        if transport is not None:
            transport.write(data)


class Tunnel:
    """The app's raw bytes after an upgrade, in the place where aiohttp would have a WebSocket reader."""

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

    # Called by aiohttp

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self._parts.append(data)
        if not self._paused and sum(map(len, self._parts)) > TUNNEL_BYTES_MAX:
            self._paused = True
            self._connection.pause_reading()
        self._wake()
        return False, b""

    def feed_eof(self) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
