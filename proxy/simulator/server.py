"""The listener: connections, faults on the wire, and what tests want to know of them."""

import asyncio
import contextlib
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from turngate.proxy.simulator.http import (
    LAST_CHUNK,
    Ended,
    MalformedRequest,
    Received,
    RequestReader,
    Response,
    chunk,
    cut,
    head,
)
from turngate.proxy.simulator.provider import Provider
from turngate.proxy.simulator.scenario import Cut, Scenario, Stall, load

if sys.platform == "linux":
    import fcntl
    import termios


class Simulator:
    """A provider on a local port while the context is open.

    `requests` holds every request since the start or `reset`, in the order of arrival. Both callbacks are
    called in the event loop and must not block: `on_request` when a request has arrived whole and nothing is
    decided yet, `on_ended` when its answer has ended.
    """

    def __init__(
        self,
        scenario: Scenario | Path | Mapping[str, Any] | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Raises ScenarioError."""
        self.requests: list[Received] = []
        self.on_request: Callable[[Received], None] | None = None
        self.on_ended: Callable[[Received], None] | None = None
        self.connections = 0
        self._host, self._port = host, port
        self._provider = Provider(load(scenario))
        self._open: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), self._host, self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(connection.stop() for connection in tuple(self._open)))

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        """Base address without a path: OpenAI's SDKs want `/v1` behind it, Anthropic's do not."""
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"

    @property
    def scenario(self) -> Scenario:
        return self._provider.scenario

    @property
    def connections_open(self) -> int:
        return len(self._open)

    def use(self, scenario: Scenario | Path | Mapping[str, Any] | None) -> None:
        """Follow another scenario from the next request on. Raises ScenarioError."""
        self._provider.use(load(scenario))

    def reset(self) -> None:
        """Forget the requests and start the scenario and all ids anew; connections and callbacks stay."""
        self.requests.clear()
        self.connections = len(self._open)
        self._provider = Provider(self.scenario)

    async def wait_request(self, count: int = 1) -> Received:
        """Wait until `count` requests have arrived; return the last of them."""
        await self._until(lambda: len(self.requests) >= count)
        return self.requests[count - 1]

    async def wait_closed(self, received: Received) -> float:
        """Wait until the connection of a request is gone, and with it its answer; return when that was."""
        await self._until(lambda: received.closed_at_s is not None)
        return cast(float, received.closed_at_s)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    # What follows is for connections.

    def opened(self, connection: "_Connection") -> None:
        self.connections += 1
        self._open.add(connection)

    def closed(self, connection: "_Connection") -> None:
        self._open.discard(connection)
        self._notify()

    def arrived(self, received: Received) -> Response:
        self.requests.append(received)
        self._notify()
        if self.on_request is not None:
            self.on_request(received)
        return self._provider.respond(received)

    def ended(self, received: Received) -> None:
        self._notify()
        if self.on_ended is not None:
            self.on_ended(received)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class _Connection(asyncio.Protocol):
    """One client: requests are answered one after the other, also if they arrive together."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._reader = RequestReader(expect=lambda: self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n"))
        self._received: list[Received] = []
        self._waiting: asyncio.Queue[tuple[Received, Response]] = asyncio.Queue()
        self._writable = asyncio.Event()

    # The event loop's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # No buffer of our own: only so is "all written" the same as "all with the kernel".
        self._transport.set_write_buffer_limits(high=0)
        self._writable.set()
        self._task = asyncio.get_running_loop().create_task(self._serve())
        self._simulator.opened(self)

    def data_received(self, data: bytes) -> None:
        try:
            complete = self._reader.feed(data)
        except MalformedRequest as exc:
            headers = (("content-length", "0"), ("connection", "close"))
            self._transport.write(head(exc.status, headers))
            self._transport.close()
            return
        for received in complete:
            received.arrived_s = time.monotonic()
            self._received.append(received)
            self._waiting.put_nowait((received, self._simulator.arrived(received)))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._task.cancel()
        for received in self._received:
            received.closed_at_s = time.monotonic()
            self._end(received, "client_closed")
        self._simulator.closed(self)

    # What the simulator and the connection do themselves.

    async def stop(self) -> None:
        for received in self._received:
            self._end(received, "stopped")
        self._transport.abort()
        self._task.cancel()
        # A fault of the simulator's own comes out here instead of passing for a cancellation.
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _end(self, received: Received, how: Ended) -> None:
        """Note how an answer ended; what is said first counts."""
        if received.ended is None:
            received.ended = how
            self._simulator.ended(received)

    async def _serve(self) -> None:
        try:
            keep_alive = True
            while keep_alive:
                keep_alive = await self._play(*await self._waiting.get())
        finally:
            self._transport.close()

    async def _play(self, received: Received, response: Response) -> bool:
        """Write an answer with its pauses and its fault; tell whether the connection goes on."""
        await asyncio.sleep(response.delay_s)
        fault, parts = response.fault, response.parts
        if isinstance(fault, Cut):
            parts = cut(parts, fault.cut_at_byte)
        elif isinstance(fault, Stall):
            parts = cut(parts, fault.stall_at_byte)
        whole = parts if isinstance(fault, Cut) and fault.clean_end else response.parts
        # A client of HTTP/1.0 knows no chunks; it reads until the connection ends.
        chunked = response.streamed and received.http_version != "1.0"
        keep_alive = received.keep_alive and (chunked or not response.streamed)
        received.status = response.status
        self._transport.write(head(response.status, _framed(response, whole, chunked, keep_alive)))
        for at, part in enumerate(parts):
            await asyncio.sleep(response.interval_s if at else 0)
            self._transport.write(chunk(part) if chunked else part)
            received.bytes_sent += len(part)
            await self._writable.wait()
        return await self._finish(received, response, chunked) and keep_alive

    async def _finish(self, received: Received, response: Response, chunked: bool) -> bool:
        """End an answer as its fault says; tell whether the connection can go on."""
        match response.fault:
            case Stall():
                await asyncio.get_running_loop().create_future()
            case Cut(clean_end=False, how=how):
                self._end(received, "cut")
                if how == "reset":
                    await self._reset()
                return False
        if chunked:
            self._transport.write(LAST_CHUNK)
        self._end(received, "cut" if isinstance(response.fault, Cut) else "complete")
        await self._writable.wait()
        return True

    async def _reset(self) -> None:
        """Close with a TCP reset once the client's kernel has all: a reset discards what is under way."""
        peer: socket.socket = self._transport.get_extra_info("socket")
        while _under_way(peer):  # noqa: ASYNC110  the kernel has no event for it
            await asyncio.sleep(0.001)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


def _framed(
    response: Response, body: tuple[bytes, ...], chunked: bool, keep_alive: bool
) -> tuple[tuple[str, str], ...]:
    """The headers of a response with those that frame its body."""
    framing = []
    if chunked:
        framing = [("transfer-encoding", "chunked")]
    elif not response.streamed:
        framing = [("content-length", str(sum(map(len, body))))]
    return (*response.headers, *framing, ("connection", "keep-alive" if keep_alive else "close"))


def _under_way(peer: socket.socket) -> int:
    """Bytes that the client's kernel has not confirmed; where the system does not tell, none."""
    if sys.platform != "linux":
        return 0
    waiting = fcntl.ioctl(peer.fileno(), termios.TIOCOUTQ, b"\0" * 4)
    return int.from_bytes(waiting, sys.byteorder)
