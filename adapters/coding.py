"""Content codings: what a compressed body says, read beside its bytes. Bounded in size and ratio, so that a small body
cannot fill memory."""

import sys
import zlib
from collections.abc import Callable
from typing import Final

import brotli

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

OUTPUT_BYTES_MAX: Final = 64 * 2**20
"""What one body may inflate to before its reader gives up; a long streamed answer stays below 10 MiB."""
RATIO_MAX: Final = 300
RATIO_FROM_BYTES: Final = 2**20
"""Beyond this much output a body that is still so much larger than its bytes is made to harm; text packs 3 to 20 times."""

_BOTH_HEADERS: Final = 32 + zlib.MAX_WBITS  # gzip's or zlib's, whichever comes

_Step = Callable[[bytes, int], tuple[bytes, bool]]
"""(input, most output) -> (output, more output waits for no more input)."""


class CodingError(Exception):
    """The body is not what its Content-Encoding says, or inflates beyond the bounds."""


class Decoder:
    """Reads one body, piece by piece."""

    __slots__ = ("_in_bytes", "_out_bytes", "_step")

    def __init__(self, step: _Step) -> None:
        self._step = step
        self._in_bytes = 0
        self._out_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """What these bytes add. Raises CodingError."""
        self._in_bytes += len(data)
        parts: list[bytes] = []
        more = True
        while more:
            try:
                out, more = self._step(data, OUTPUT_BYTES_MAX + 1 - self._out_bytes)
            except (zlib.error, brotli.error, zstd.ZstdError, EOFError) as error:
                raise CodingError(f"not what its Content-Encoding says: {error}") from error
            data = b""
            parts.append(out)
            self._out_bytes += len(out)
            if self._out_bytes > OUTPUT_BYTES_MAX:
                raise CodingError(f"inflates to more than {OUTPUT_BYTES_MAX} bytes")
            if self._out_bytes > max(RATIO_FROM_BYTES, RATIO_MAX * self._in_bytes):
                raise CodingError(f"inflates to more than {RATIO_MAX} times its size")
        return b"".join(parts)


def open_decoder(content_encoding: bytes) -> Decoder | None:
    """A decoder for this Content-Encoding, or None for one we do not read."""
    match content_encoding.strip().lower():
        case b"gzip" | b"x-gzip" | b"deflate":
            return Decoder(_inflate())
        case b"br":
            return Decoder(_brotli())
        case b"zstd":
            return Decoder(_zstd())
        case _:
            return None


def _inflate() -> _Step:
    inflater = zlib.decompressobj(_BOTH_HEADERS)

    def step(data: bytes, most: int) -> tuple[bytes, bool]:
        out = inflater.decompress(inflater.unconsumed_tail + data, most)
        return out, bool(inflater.unconsumed_tail)

    return step


def _brotli() -> _Step:
    decompressor = brotli.Decompressor()

    def step(data: bytes, most: int) -> tuple[bytes, bool]:
        out = decompressor.process(data, output_buffer_limit=most)
        return out, not decompressor.can_accept_more_data() and not decompressor.is_finished()

    return step


def _zstd() -> _Step:
    decompressor = zstd.ZstdDecompressor()

    def step(data: bytes, most: int) -> tuple[bytes, bool]:
        if decompressor.eof:
            return b"", False  # what follows the frame is no part of the body
        out = decompressor.decompress(data, max_length=most)
        return out, not decompressor.needs_input and not decompressor.eof

    return step
