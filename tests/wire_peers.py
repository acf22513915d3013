"""HTTP/1.1 as raw bytes for tests: reading messages as they arrived, writing requests and answers as they are meant.

Nothing is normalised: names, order, duplicates and values of headers are compared as they came.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Final

HOP_BY_HOP: Final = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"),
    *(b"upgrade", b"proxy-connection"),
}

Lines = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer as it arrived. `whole` is false where its end never came."""

    first: bytes
    headers: Lines
    body: bytes
    whole: bool = True

    def get(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


async def read_head(reader: asyncio.StreamReader) -> Message:
    """Raises IncompleteReadError where the peer ends before it."""
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
    split = [line.partition(b":") for line in lines[1:]]
    return Message(lines[0], [(name, value.strip(b" \t")) for name, _, value in split], b"")


async def read_message(reader: asyncio.StreamReader, *, method: bytes = b"") -> Message:
    """A request, or, if `method` tells what was asked, an answer. Raises IncompleteReadError without a head."""
    head = await read_head(reader)
    status = head.first.split(b" ")[1]
    body = bytearray()
    whole = True
    try:
        if method == b"HEAD" or (method and (status in (b"204", b"304") or status.startswith(b"1"))):
            pass
        elif (head.get(b"transfer-encoding") or b"").lower() == b"chunked":
            while chunk := await read_chunk(reader):
                body += chunk
        elif (length := head.get(b"content-length")) is not None:
            while len(body) < int(length):
                body += await read_some(reader, int(length) - len(body))
        elif method:
            while data := await reader.read(65536):
                body += data
    except asyncio.IncompleteReadError as cut:
        whole = False
        body += cut.partial
    except ConnectionResetError:
        whole = False
    return Message(head.first, head.headers, bytes(body), whole)


async def read_some(reader: asyncio.StreamReader, limit: int) -> bytes:
    data = await reader.read(min(limit, 65536))
    if not data:
        raise asyncio.IncompleteReadError(b"", limit)
    return data


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk, b"" for the last one."""
    line = await reader.readline()
    if not line.endswith(b"\r\n"):
        raise asyncio.IncompleteReadError(b"", None)
    data = await reader.readexactly(int(line.partition(b";")[0], 16))
    assert await reader.readexactly(2) == b"\r\n"
    return data


def end_to_end(message: Message) -> Message:
    """The message without what ends at each hop; Host masked, which names the hop's own peer."""
    named = {
        token.strip().lower()
        for name, value in message.headers
        if name.lower() == b"connection"
        for token in value.split(b",")
    }
    kept = [
        (name, b"(the upstream)" if name.lower() == b"host" else value)
        for name, value in message.headers
        if name.lower() not in HOP_BY_HOP | named
    ]
    return Message(message.first, kept, message.body, message.whole)


def without(message: Message, *names: bytes) -> Message:
    kept = [(name, value) for name, value in message.headers if name.lower() not in names]
    return Message(message.first, kept, message.body, message.whole)


# Writing


def request(
    path: bytes, headers: list[bytes], body: bytes = b"", *, method: bytes = b"POST", version: bytes = b"1.1"
) -> bytes:
    lines = [b"%s %s HTTP/%s" % (method, path, version), b"Host: provider.example", *headers, b"", body]
    return b"\r\n".join(lines)


def sized(path: bytes, body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    """A POST with a Content-Length."""
    return request(path, [*headers, b"Content-Length: %d" % len(body)], body, version=version)


def answer(headers: bytes, body: bytes = b"", *, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\n%s\r\n%s" % (status, headers, body)


def length(body: bytes) -> bytes:
    return b"content-length: %d\r\n" % len(body)


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


# A provider's dialect

TEXT_BODY: Final = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hej å"}]}).encode()
TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TOOLS_BODY: Final = json.dumps({**json.loads(TEXT_BODY), "tools": TOOLS}).encode()
STREAM_BODY: Final = json.dumps({**json.loads(TEXT_BODY), "stream": True}).encode()

CHAT_ANSWER: Final[dict[str, Any]] = {
    "id": "c1",
    "object": "chat.completion",
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "å"}, "finish_reason": "stop"}],
}
ANSWER_BODY: Final = json.dumps(CHAT_ANSWER, indent=1).encode()
EVENTS: Final = b"Content-Type: text/event-stream\r\n"


def frame(text: str | None, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return b"data: %s\n\n" % json.dumps({"id": "c1", "model": "m", "choices": [choice]}).encode()


FRAMES: Final = (frame("one"), frame("two"), frame(None, "stop"), b"data: [DONE]\n\n")
