"""Content codings: what a compressed body says, read beside its bytes. Bounded, so that a small body cannot fill memory."""

import zlib
from typing import Final

OUTPUT_BYTES_MAX: Final = 64 * 2**20
"""What one body may inflate to before its reader gives up; a long streamed answer stays below 10 MiB."""

_BOTH_HEADERS: Final = 32 + zlib.MAX_WBITS  # gzip's or zlib's, whichever comes


class CodingError(Exception):
    """The body is not what its Content-Encoding says, or inflates beyond the bound."""


class Inflater:
    """Decoder for gzip and deflate, fed piece by piece."""

    __slots__ = ("_decoder", "_left")

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(_BOTH_HEADERS)
        self._left = OUTPUT_BYTES_MAX

    def feed(self, data: bytes) -> bytes:
        """What these bytes add. Raises CodingError."""
        try:
            out = self._decoder.decompress(data, self._left + 1)
        except zlib.error as error:
            raise CodingError(str(error)) from error
        self._left -= len(out)
        if self._left < 0:
            raise CodingError(f"inflates to more than {OUTPUT_BYTES_MAX} bytes")
        return out


def open_decoder(content_encoding: bytes) -> Inflater | None:
    """A decoder for this Content-Encoding, or None for one we do not read."""
    return Inflater() if content_encoding.strip().lower() in (b"gzip", b"x-gzip", b"deflate") else None
