"""What our HTTP/1.1 client costs beside aiohttp's: CPU time of this process per request and per streamed delta.

    python tests/bench/upstream.py [--rounds 3]

A child process serves whole answers (1 KiB of JSON) and chunked streams whose deltas come one write at a time; both
clients take turns, and the median of the rounds is printed. Only CPU time of the client's process counts, so other
load on the machine disturbs little. `reads/delta` near 1 means that nearly each delta was a wake-up of its own.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import uvloop

from turngate.proxy.upstream import Origin, Pool

REQUESTS: Final = 4000
STREAMS: Final = 32
DELTAS: Final = 200
TICK_S: Final = 0.005
BODY: Final = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * 4000 + b'"}]}'
ANSWER: Final = b'{"choices":[{"message":{"role":"assistant","content":"' + b"y" * 950 + b'"}}]}'
DELTA: Final = b'data: {"choices":[{"index":0,"delta":{"content":" token"}}]}\n\n'
PROVIDER_HEADERS: Final = b"".join(b"x-provider-header-%d: some value %d\r\n" % (n, n) for n in range(12))


class Provider(asyncio.Protocol):
    """Answers `/whole` at once and `/stream` one delta a tick."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.received.endswith(BODY):
            return
        is_stream = self.received.startswith(b"POST /stream")
        self.received = b""
        head = b"HTTP/1.1 200 OK\r\n" + PROVIDER_HEADERS
        if is_stream:
            self.transport.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
            asyncio.get_running_loop().call_later(TICK_S, self.send_delta, DELTAS)
        else:
            self.transport.write(head + b"Content-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER)

    def send_delta(self, left: int) -> None:
        if left:
            self.transport.write(b"%x\r\n%s\r\n" % (len(DELTA), DELTA))
            asyncio.get_running_loop().call_later(TICK_S, self.send_delta, left - 1)
        else:
            self.transport.write(b"0\r\n\r\n")


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Provider, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # ends with the parent


Ask = Callable[[str], Coroutine[Any, Any, tuple[int, int]]]
"""One exchange at a path; gives entity bytes and reads."""


@asynccontextmanager
async def ours(port: int) -> AsyncIterator[Ask]:
    pool = Pool()
    origin, _ = Origin.parse(f"http://127.0.0.1:{port}")

    async def ask(path: str) -> tuple[int, int]:
        link = await pool.acquire(origin)
        link.expect_answer()
        head = b"POST %s HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n"
        link.write(head % (path.encode(), origin.host_header, len(BODY)) + BODY)
        await link.head()
        size = reads = 0
        while data := await link.read():
            size += len(data)
            reads += 1
        link.release()
        return size, reads

    yield ask
    await pool.close()


@asynccontextmanager
async def theirs(port: int) -> AsyncIterator[Ask]:
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}",
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
    ) as session:

        async def ask(path: str) -> tuple[int, int]:
            size = reads = 0
            async with session.post(path, data=BODY, allow_redirects=False) as response:
                async for data in response.content.iter_any():
                    size += len(data)
                    reads += 1
            return size, reads

        yield ask


async def measure(ask: Ask) -> tuple[float, float, float]:
    """CPU microseconds per request and per delta, and reads per delta."""
    for _ in range(50):
        await ask("/whole")

    async def worker() -> None:
        for _ in range(REQUESTS // 8):
            size, _ = await ask("/whole")
            assert size == len(ANSWER)

    began_s = time.process_time()
    await asyncio.gather(*(worker() for _ in range(8)))
    request_us = (time.process_time() - began_s) / REQUESTS * 1e6

    began_s = time.process_time()
    streams = await asyncio.gather(*(ask("/stream") for _ in range(STREAMS)))
    stream_us = (time.process_time() - began_s) / STREAMS * 1e6 - request_us
    assert all(size == DELTAS * len(DELTA) for size, _ in streams)
    return request_us, stream_us / DELTAS, sum(reads for _, reads in streams) / STREAMS / DELTAS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(serve())
        return
    clients = {"turngate": ours, "aiohttp": theirs}
    loops = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    figures: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        for _ in range(arguments.rounds):
            for loop_name, loop_factory in loops.items():
                for name, client in clients.items():
                    with asyncio.Runner(loop_factory=loop_factory) as runner:
                        figures.setdefault((name, loop_name), []).append(runner.run(one(client, port)))
    print(f"{'client':10}{'loop':10}{'us/request':>12}{'us/delta':>12}{'reads/delta':>13}")
    for (name, loop_name), rounds in figures.items():
        request_us, delta_us, reads = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:10}{loop_name:10}{request_us:12.1f}{delta_us:12.1f}{reads:13.2f}")


async def one(client: Callable[[int], Any], port: int) -> tuple[float, float, float]:
    async with client(port) as ask:
        return await measure(ask)


if __name__ == "__main__":
    main()
