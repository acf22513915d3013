"""Server-sent events: bytes to frames and back. Framing only; what a frame says is the dialect's business.

A frame is everything up to and including its blank line, byte for byte, so that the frames joined are the stream.
Line ends are LF, CRLF or CR, also mixed; a pair cut in half between two reads is still one line end.
"""

import re
from typing import Final

BOM: Final = b"\xef\xbb\xbf"

# Two line ends in a row. Atomic groups: "\r\n" must not count as two.
_BLANK_LINE: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class SseFramer:
    """Cut a stream into frames. `pending` holds the frame whose blank line has not come yet."""

    __slots__ = ("_only_lf", "_searched", "pending")

    def __init__(self) -> None:
        self.pending = b""
        self._searched = 0
        self._only_lf = True

    def feed(self, data: bytes) -> list[bytes]:
        """Complete frames, oldest first."""
        buffer = self.pending + data if self.pending else data
        if self._only_lf and b"\r" in data:
            self._only_lf = False
        if self._only_lf and buffer.find(b"\n\n", self._searched) == len(buffer) - 2 >= 0:
            self.pending, self._searched = b"", 0
            return [buffer]  # one read brought the end of one frame: nearly always
        frames: list[bytes] = []
        start = 0
        search = self._searched
        while True:
            end = self._frame_end(buffer, max(start, search))
            if end < 0:
                break
            frames.append(buffer[start:end])
            start = search = end
        self.pending = buffer[start:]
        # What was searched once is not searched again; the last bytes may be half of a blank line.
        self._searched = max(0, len(self.pending) - 3)
        return frames

    def _frame_end(self, buffer: bytes, start: int) -> int:
        if self._only_lf:
            at = buffer.find(b"\n\n", start)
            return at + 2 if at >= 0 else -1
        match = _BLANK_LINE.search(buffer, start)
        return match.end() if match else -1


def fields(frame: bytes) -> tuple[bytes, bytes | None]:
    """(event name, data) of one frame; data is None where it has no data line. Comments and other fields are passed over."""
    # The shape of nearly every frame without a name, taken without a split. A CR is a line end too.
    if frame.startswith(b"data: ") and frame.find(b"\n") == len(frame) - 2 and b"\r" not in frame:
        return b"", frame[6:-2]
    name = b""
    data: list[bytes] = []
    for line in _LINE_END.split(frame.removeprefix(BOM)):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return name, b"\n".join(data) if data else None


def is_idle(frame: bytes) -> bool:
    """True where a frame, whole or not, has only blank lines and comments."""
    return all(line.startswith(b":") for line in _LINE_END.split(frame.removeprefix(BOM)) if line)


KEEP_ALIVE: Final = b": keep-alive\n\n"
"""A comment between two events: every SDK skips it (openai-chat.md DEV-15, anthropic-messages.md D)."""


def event(data: bytes, name: bytes = b"") -> bytes:
    """One frame."""
    return b"event: %s\ndata: %s\n\n" % (name, data) if name else b"data: %s\n\n" % data
