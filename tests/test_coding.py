"""Compressed bodies read beside their bytes: whole, in pieces, too large, and not what they say they are."""

import gzip
import sys
import zlib
from collections.abc import Callable

import brotli
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.adapters import coding
from turngate.adapters.coding import CodingError, Decoder, open_decoder

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXT = b'data: {"choices":[]}\n\n' * 50

ENCODERS: dict[str, tuple[bytes, Callable[[bytes], bytes]]] = {
    "gzip": (b"gzip", gzip.compress),
    "x-gzip": (b"x-gzip", gzip.compress),
    "deflate": (b"deflate", zlib.compress),
    "br": (b"br", brotli.compress),
    "zstd": (b"zstd", zstd.compress),
}

READ = {b"gzip": True, b"GZIP": True, b" x-gzip ": True, b"deflate": True, b"br": True, b"zstd": True}
UNREAD = {b"compress": False, b"identity": False, b"": False, b"gzip, br": False}


def decoder(content_encoding: bytes) -> Decoder:
    found = open_decoder(content_encoding)
    assert found is not None
    return found


@pytest.mark.parametrize(("content_encoding", "known"), (READ | UNREAD).items())
def test_only_codings_we_can_read_get_a_decoder(content_encoding: bytes, known: bool) -> None:
    assert (open_decoder(content_encoding) is not None) is known


@pytest.mark.parametrize(("name", "encode"), ENCODERS.values(), ids=ENCODERS)
def test_a_body_inflates_to_the_same_text_however_it_is_cut(
    name: bytes, encode: Callable[[bytes], bytes]
) -> None:
    body = encode(TEXT)
    assert decoder(name).feed(body) == TEXT
    one_by_one = decoder(name)
    assert b"".join(one_by_one.feed(body[at : at + 1]) for at in range(len(body))) == TEXT
    for offset in range(len(body) + 1):
        in_two = decoder(name)
        assert in_two.feed(body[:offset]) + in_two.feed(body[offset:]) == TEXT


def test_a_flushed_event_can_be_read_before_the_stream_ends() -> None:
    compressor = zlib.compressobj(wbits=31)
    first = compressor.compress(b"data: 1\n\n") + compressor.flush(zlib.Z_SYNC_FLUSH)
    assert decoder(b"gzip").feed(first) == b"data: 1\n\n"


def test_a_bomb_is_given_up_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "OUTPUT_BYTES_MAX", 1000)
    exact = decoder(b"gzip")
    assert len(exact.feed(gzip.compress(b"\0" * 1000))) == 1000
    with pytest.raises(CodingError, match="more than 1000 bytes"):
        decoder(b"gzip").feed(gzip.compress(b"\0" * 1001))


def test_a_bomb_fed_slowly_is_given_up_at_the_bound_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "OUTPUT_BYTES_MAX", 1000)
    slow = decoder(b"gzip")
    told = 0
    for byte in gzip.compress(b"\0" * 10_000):
        try:
            told += len(slow.feed(bytes([byte])))
        except CodingError:
            break
    else:
        pytest.fail("the bomb went off")
    assert told <= 1000


def test_the_bound_in_force_stops_a_bomb() -> None:
    bomb = gzip.compress(b"\0" * (coding.OUTPUT_BYTES_MAX + 1), compresslevel=1)
    with pytest.raises(CodingError):
        decoder(b"gzip").feed(bomb)


@pytest.mark.parametrize(("name", "encode"), ENCODERS.values(), ids=ENCODERS)
def test_a_body_far_larger_than_its_bytes_is_given_up_early(
    name: bytes, encode: Callable[[bytes], bytes]
) -> None:
    bomb = encode(b"\0" * (4 * coding.RATIO_FROM_BYTES))
    with pytest.raises(CodingError, match="times its size"):
        decoder(name).feed(bomb)


def test_text_that_is_not_compressed_says_so() -> None:
    with pytest.raises(CodingError):
        decoder(b"gzip").feed(TEXT)


@given(st.lists(st.binary(max_size=60), max_size=5), st.sampled_from([b"gzip", b"deflate"]))
def test_garbage_raises_nothing_but_the_coding_error(pieces: list[bytes], name: bytes) -> None:
    inflater = decoder(name)
    try:
        for piece in pieces:
            inflater.feed(piece)
    except CodingError:
        return


@given(st.data(), st.sampled_from(sorted(ENCODERS)))
def test_a_damaged_body_raises_nothing_but_the_coding_error(data: st.DataObject, name: str) -> None:
    content_encoding, encode = ENCODERS[name]
    body = bytearray(encode(TEXT))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decoder(content_encoding).feed(bytes(body))
    except CodingError:
        return
