"""HTTP/1.1 heads and chunk framing as bytes: what is passed on as it came, and the little that HTTP makes us change.

Names, order, duplicates and values stay; hop-by-hop headers go (RFC 9110, 7.6.1), Host is the upstream's. Transfer
framing is kept in kind: a length stays a length in its place, chunks stay chunks (their borders are not content).
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from http import HTTPStatus
from typing import Final

import msgspec

from turngate.proxy.upstream import Head

Headers = Sequence[tuple[bytes, bytes]]

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_REWRITTEN: Final = frozenset({b"host", b"accept-encoding", b"expect"})

LAST_CHUNK: Final = b"0\r\n\r\n"


class Framing(Enum):
    """How the end of a body is told."""

    NONE = "none"
    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"


class RequestHead(msgspec.Struct, frozen=True):
    """A request's head as the app sent it, with what we need to know of it."""

    method: str
    target: str
    headers: Headers
    names: tuple[bytes, ...]
    """The headers' names in lower case: asked for many times, so folded once."""
    framing: Framing
    expects_continue: bool
    upgrades: bool
    """The app asks for another protocol on this connection (a WebSocket)."""

    @classmethod
    def read(cls, method: str, target: str, headers: Headers) -> "RequestHead":
        names = tuple([name.lower() for name, _ in headers])
        framing, expects_continue, upgrades = Framing.NONE, False, False
        if b"transfer-encoding" in names:
            framing = Framing.CHUNKED
        elif b"content-length" in names and _values(headers, names, b"content-length") != [b"0"]:
            framing = Framing.LENGTH
        if b"expect" in names:
            expects_continue = _values(headers, names, b"expect")[-1].lower() == b"100-continue"
        if b"connection" in names:
            upgrades = b"upgrade" in b",".join(_values(headers, names, b"connection")).lower()
        return cls(method, target, headers, names, framing, expects_continue, upgrades)

    def has(self, lower_name: bytes) -> bool:
        return lower_name in self.names


def _values(headers: Headers, names: Sequence[bytes], lower_name: bytes) -> list[bytes]:
    """A header's values, without blanks around them."""
    return [value.strip() for name, (_, value) in zip(names, headers, strict=True) if name == lower_name]


def request_bytes(
    head: RequestHead, target: str, host: bytes, *, identity: bool = False, expect: bool = False
) -> bytes:
    """The head for the upstream.

    `identity`: ask for an uncompressed answer, whose events can be held apart. `expect`: the body follows when the
    provider says so; without it Expect is left out, for the body is here.
    """
    lines = [b"%s %s HTTP/1.1\r\n" % (head.method.encode(), target.encode("latin-1"))]
    dropped = _dropped(head.headers, head.names)
    if b"host" not in head.names:
        lines.append(b"Host: %s\r\n" % host)
    for lower, header in zip(head.names, head.headers, strict=True):
        if lower in _REWRITTEN:
            if lower == b"host":
                header = (header[0], host)
            elif lower == b"accept-encoding" and identity:
                header = (header[0], b"identity")
            elif (lower == b"expect" and not expect) or lower in dropped:
                continue
        elif lower in dropped and not _stays(lower, head):
            continue
        lines.append(b"%s: %s\r\n" % header)
    if head.upgrades:
        lines.append(b"Connection: Upgrade\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def _stays(lower: bytes, head: RequestHead) -> bool:
    """Whether a header of this hop is the next one's too. Codings before the chunks (`gzip, chunked`) are not undone
    here: they stay named."""
    if lower == b"transfer-encoding":
        return head.framing is Framing.CHUNKED
    return lower == b"upgrade" and head.upgrades


def answer_bytes(
    head: Head, framing: Framing, *, close: bool, extra: Headers = (), repeatable: bool = True
) -> bytes:
    """The head for the app, with our own `extra` headers at its end.

    Where the gate may withhold bytes, a length becomes chunks in its place. Unless `repeatable`, the provider's word
    that its error may be asked for again is left out: SDKs repeat even a 400 for it.
    """
    lines = [b"HTTP/1.1 %d %s\r\n" % (head.status, head.reason)]
    dropped = _dropped(head.headers, head.names)
    framed = False
    for lower, header in zip(head.names, head.headers, strict=True):
        if lower == b"transfer-encoding":
            if framing is Framing.CHUNKED or (framing is Framing.CLOSE and not head.chunked):
                lines.append(b"%s: %s\r\n" % header)
                framed = True
        elif lower == b"content-length":
            if framing is not Framing.CHUNKED:
                lines.append(b"%s: %s\r\n" % header)
            elif not framed:
                lines.append(b"Transfer-Encoding: chunked\r\n")
                framed = True
        elif lower not in dropped and (
            repeatable or lower != b"x-should-retry" or header[1].strip() != b"true"
        ):
            lines.append(b"%s: %s\r\n" % header)
    if framing is Framing.CHUNKED and not framed:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    lines += [b"%s: %s\r\n" % header for header in extra]
    if head.status == 101:
        lines += [b"Upgrade: %s\r\n" % (head.get(b"upgrade") or b""), b"Connection: Upgrade\r\n"]
    elif close:
        lines.append(b"Connection: close\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def own_head(status: int, headers: Iterable[tuple[str, str]], length: int, *, close: bool) -> bytes:
    """The head of an answer of ours with a body of `length` bytes."""
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers]
    lines.append(f"content-length: {length}")
    if close:
        lines.append("connection: close")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def chunk(data: bytes) -> bytes:
    """One chunk; `data` must not be empty (an empty one would end the body)."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def _dropped(headers: Headers, names: Sequence[bytes]) -> frozenset[bytes]:
    """Lower-case names that end at this hop: the standard ones and those that Connection names."""
    if b"connection" not in names:
        return _HOP_BY_HOP
    tokens = b",".join(_values(headers, names, b"connection")).lower().split(b",")
    return _HOP_BY_HOP | {token.strip() for token in tokens}
