"""HTTP/1.1 by hand: requests read by httptools, answers written byte by byte. No sockets in here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, Literal

import httptools

from turngate.proxy.simulator.scenario import Fault

REQUEST_BYTES_MAX: Final = 32 * 1024 * 1024
"""Head and body together; Anthropic's limit for a body."""

LAST_CHUNK: Final = b"0\r\n\r\n"

WITHHELD: Final = b"<withheld>"
SECRET_HEADERS: Final = frozenset(
    {b"authorization", b"x-api-key", b"api-key", b"cookie", b"proxy-authorization"}
)

Ended = Literal["complete", "cut", "client_closed", "stopped"]
"""How an answer ended: as HTTP demands (an error event included), by a cut of the scenario, because the
client went away, or because the simulator was closed."""


@dataclass(slots=True, eq=False)
class Received:
    """A request as it arrived, and what became of its answer. Times are of the monotonic clock."""

    method: str
    path: str
    """The request target as sent, query string included."""
    headers: list[tuple[bytes, bytes]]
    """In order and in the client's spelling; values of credentials are replaced by `<withheld>`."""
    http_version: str
    keep_alive: bool
    body: bytes = b""
    arrived_s: float = 0.0
    status: int | None = None
    """None until the head of the answer is written."""
    bytes_sent: int = 0
    """Bytes of the answer's body, before chunked framing."""
    ended: Ended | None = None
    closed_at_s: float | None = None
    """When its connection was gone, by whichever side."""

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header, by lower-case name."""
        return next((value for key, value in self.headers if key.lower() == name), None)


@dataclass(frozen=True, slots=True)
class Response:
    """An answer to be written, and how it is to fail."""

    status: int
    headers: tuple[tuple[str, str], ...]
    parts: tuple[bytes, ...]
    """The body, one chunk each if streamed."""
    streamed: bool = False
    delay_s: float = 0
    interval_s: float = 0
    fault: Fault | None = None


@dataclass(slots=True)
class MalformedRequest(Exception):
    """What arrived is no HTTP request that the simulator reads; the connection cannot go on."""

    status: int


@dataclass(slots=True)
class RequestReader:
    """Bytes of one connection in, requests out."""

    expect: Callable[[], None]
    """Called when a client waits for `100 Continue`."""
    _parser: httptools.HttpRequestParser = field(init=False)
    _target: bytes = b""
    _headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    _body: list[bytes] = field(default_factory=list)
    _size: int = 0
    _complete: list[Received] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> list[Received]:
        """Take bytes, return the requests they complete. Raises MalformedRequest."""
        self._size += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the request is whole, and the last: it gets an answer in HTTP, and its connection ends
        except httptools.HttpParserError as exc:
            raise MalformedRequest(HTTPStatus.BAD_REQUEST) from exc
        complete, self._complete = self._complete, []
        if complete:
            self._size = 0
        elif self._size > REQUEST_BYTES_MAX:
            raise MalformedRequest(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return complete

    # What follows are the parser's callbacks.

    def on_message_begin(self) -> None:
        self._target, self._headers, self._body = b"", [], []

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, WITHHELD if name.lower() in SECRET_HEADERS else value))

    def on_headers_complete(self) -> None:
        if any(key.lower() == b"expect" and value.lower() == b"100-continue" for key, value in self._headers):
            self.expect()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        received = Received(
            method=self._parser.get_method().decode("ascii"),
            path=self._target.decode("latin-1"),
            headers=self._headers,
            http_version=self._parser.get_http_version(),
            keep_alive=self._parser.should_keep_alive() and not self._parser.should_upgrade(),
            body=b"".join(self._body),
        )
        self._complete.append(received)


def head(status: int, headers: tuple[tuple[str, str], ...]) -> bytes:
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Overloaded"
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def cut(parts: tuple[bytes, ...], at_byte: int) -> tuple[bytes, ...]:
    """The parts that make the first `at_byte` bytes."""
    kept = []
    for part in parts:
        if at_byte <= 0:
            break
        kept.append(part[:at_byte])
        at_byte -= len(part)
    return tuple(kept)
