"""One run of a case: raw sockets of the app and of the provider in the hands of one script, and the facts it finds.

A script says and reads on both sides in turn, so the order of events is the order of its lines. Where it must be known
that something has *not* arrived, the script waits for round trips through the same event loop of the proxy, not for
time to pass.
"""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal, get_args

from wire_peers import Message, end_to_end, read_head, read_message, without

Stage = Literal["direct", "off", "observe", "enforce-tools"]
STAGES: Final = get_args(Stage)[1:]

HANG_S: Final = 30.0
"""Only what never comes meets this bound."""

LINE_BYTES_MAX: Final = 2**20
ROUND_TRIPS: Final = 30
"""Bytes on an open connection take a proxy a few turns of its loop; each of these takes two at least."""

PATIENCE: Final = 20
"""A new connection takes more: names are resolved beside the loop."""

Facts = dict[str, object]
Script = Callable[["Wire"], Awaitable[None]]


class Peer:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def head(self) -> Message:
        return await read_head(self._reader)

    async def request(self) -> Message:
        return await read_message(self._reader)

    async def answer(self, method: bytes = b"POST") -> Message | None:
        """An answer, None where the connection ends without one."""
        try:
            return await read_message(self._reader, method=method)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def until(self, mark: bytes) -> bytes:
        return await self._reader.readuntil(mark)

    async def exactly(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def rest(self) -> bytes:
        """All that comes until the peer's end, be it a close or a reset."""
        data = b""
        with suppress(ConnectionError):
            while more := await self._reader.read(LINE_BYTES_MAX):
                data += more
        return data

    async def ready(self) -> bytes | None:
        """What is here now; None at the peer's proper end. Raises ConnectionError after a reset."""
        read = asyncio.ensure_future(self._reader.read(LINE_BYTES_MAX))
        await asyncio.sleep(0)
        if not read.done():
            read.cancel()
            await asyncio.wait([read])
            return b""
        return read.result() or None

    @property
    def unsent_bytes(self) -> int:
        """What the system does not take any more."""
        return self._writer.transport.get_write_buffer_size()

    def half_close(self) -> None:
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        peer: socket.socket = self._writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.close()


class Provider:
    """A listener of raw bytes; its connections wait in a queue for the script."""

    def __init__(self) -> None:
        self.port = 0
        self.accepted: asyncio.Queue[Peer] = asyncio.Queue()
        self._peers: list[Peer] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Provider"]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=LINE_BYTES_MAX)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.forget()

    def forget(self) -> None:
        """End all connections, so that a proxy's pool keeps none for the next case."""
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        self.accepted = asyncio.Queue()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self._peers.append(peer)
        self.accepted.put_nowait(peer)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an app connects: the provider itself, or a proxy in one stage."""

    stage: Stage
    port: int
    provider: Provider


class Wire:
    """What a script works with. Its notes are compared between the runs."""

    def __init__(self, place: Place) -> None:
        self.facts: Facts = {}
        self.stage = place.stage
        self.provider_port = place.provider.port
        self._place = place
        self._apps: list[Peer] = []
        self._watch: Peer | None = None
        self._answering: list[asyncio.Task[None]] = []
        self.requests: list[Message] = []
        """What came to a provider that is `answering`."""

    def note(self, fact: str, value: object) -> None:
        """Note what was found. Of a message all counts that does not end at each hop."""
        assert fact not in self.facts
        self.facts[fact] = self._essence(value) if isinstance(value, Message) else value

    def _essence(self, message: Message) -> object:
        reason = message.get(b"x-turngate-reason")
        if reason is not None:
            # An answer of Turngate's own has an operation in it, which is never the same twice.
            retry = (message.get(b"x-should-retry") or b"unsaid").decode()
            return f"{status(message)} {reason.decode()}, retry {retry}"
        if self.stage == "enforce-tools":
            # Its mark is a case of its own, not a difference in each.
            message = without(message, b"x-turngate-operation")
        return end_to_end(message)

    async def app(self, *, port: int | None = None) -> Peer:
        """A new connection of the app."""
        peer = await self._connect(port or self._place.port)
        self._apps.append(peer)
        return peer

    @property
    def asked(self) -> bool:
        """A connection to the provider waits for the script."""
        return not self._place.provider.accepted.empty()

    async def reaches(self) -> bool:
        """Whether what was sent so far makes a proxy ask the provider, once it had all the turns that it may need."""
        for _ in range(PATIENCE):
            if self.asked:
                return True
            await self.settle()
        return False

    async def provider(self) -> Peer:
        """The provider's end of the next connection."""
        return await self._place.provider.accepted.get()

    def answering(self, answer: bytes, *, close: bool = False) -> None:
        """From here on the provider answers every request on every connection alike (and closes it)."""
        self._answering.append(asyncio.create_task(self._answer_all(answer, close=close)))

    async def settle(self) -> None:
        """Return when what was sent has arrived, as far as it ever will without more being sent."""
        if self.stage == "direct":
            for _ in range(ROUND_TRIPS):
                await asyncio.sleep(0)
            return
        if self._watch is None:
            self._watch = await self._connect(self._place.port)
        for _ in range(ROUND_TRIPS):
            self._watch.send(b"GET /-/healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = await self._watch.answer(b"GET")
            assert answer is not None

    async def arrived(self, peer: Peer) -> bytes:
        """What a peer has by now."""
        await self.settle()
        data = b""
        with suppress(ConnectionError):
            while more := await peer.ready():
                data += more
        return data

    async def takes(self, peer: Peer) -> bool:
        """Whether what was sent to a peer has left, so that more can be sent."""
        if peer.unsent_bytes:
            await self.settle()
        return not peer.unsent_bytes

    async def connection(self, peer: Peer) -> str:
        """How the other side left a connection: open, closed or reset. Raises AssertionError where bytes are unread."""
        await self.settle()
        try:
            data = await peer.ready()
        except ConnectionError:
            return "reset"
        assert not data, data
        return "closed" if data is None else "open"

    def end(self) -> None:
        for task in self._answering:
            task.cancel()
        for peer in self._apps:
            peer.close()
        if self._watch is not None:
            self._watch.close()
        self._place.provider.forget()

    async def _connect(self, port: int) -> Peer:
        return Peer(*await asyncio.open_connection("127.0.0.1", port, limit=LINE_BYTES_MAX))

    async def _answer_all(self, answer: bytes, *, close: bool) -> None:
        while True:
            peer = await self.provider()
            self._answering.append(asyncio.create_task(self._answer(peer, answer, close=close)))

    async def _answer(self, peer: Peer, answer: bytes, *, close: bool) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # the app's side has ended
            while True:
                self.requests.append(await peer.request())
                peer.send(answer)
                if close:
                    peer.close()


async def run(script: Script, place: Place) -> Facts:
    """The facts that a script finds in a place."""
    wire = Wire(place)
    try:
        async with asyncio.timeout(HANG_S):
            await script(wire)
    finally:
        wire.end()
    return wire.facts


def status(message: Message | None) -> str:
    """The status of an answer as text, or that there was none."""
    return "none" if message is None else message.first.split(b" ")[1].decode()


def last_event(message: Message | None) -> str:
    """What the last event of a streamed answer is: an error's code, or its data."""
    assert message is not None
    data = message.body.rstrip(b"\n").rpartition(b"data: ")[2]
    if data.startswith(b'{"error"'):
        return f"error {json.loads(data)['error']['code']}"
    return data.decode()
