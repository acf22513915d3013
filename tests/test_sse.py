"""SSE framing: whatever the line ends and however the bytes are cut, the frames joined are the stream."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.adapters import sse

Event = tuple[bytes, bytes | None]

FIELDS: dict[str, tuple[bytes, Event]] = {
    "data alone": (b"data: {}\n\n", (b"", b"{}")),
    "no space after the colon": (b"data:{}\n\n", (b"", b"{}")),
    "only the first space is cut": (b"data:  x\n\n", (b"", b" x")),
    "name and data": (b"event: ping\ndata: {}\n\n", (b"ping", b"{}")),
    "data before name": (b"data: {}\nevent: ping\n\n", (b"ping", b"{}")),
    "several data lines are joined by a line feed": (b"data: a\ndata: b\n\n", (b"", b"a\nb")),
    "empty data lines count": (b"data\ndata:\n\n", (b"", b"\n")),
    "comment": (b": keep-alive\n\n", (b"", None)),
    "bare colon": (b":\n\n", (b"", None)),
    "comment beside data": (b": x\ndata: 1\n\n", (b"", b"1")),
    "name without data": (b"event: ping\n\n", (b"ping", None)),
    "other fields are passed over": (b"id: 7\nretry: 10\ndata: 1\n\n", (b"", b"1")),
    "a longer field name is another field": (b"database: 1\n\n", (b"", None)),
    "CR LF": (b"event: e\r\ndata: 1\r\n\r\n", (b"e", b"1")),
    "CR": (b"event: e\rdata: 1\r\r", (b"e", b"1")),
    "mixed line ends": (b"data: a\rdata: b\r\n\n", (b"", b"a\nb")),
    "a CR before plain line feeds is a line end": (b"data: a\rdata: b\n\n", (b"", b"a\nb")),
    "byte order mark": (b"\xef\xbb\xbfdata: 1\n\n", (b"", b"1")),
    "a colon in the value": (b"data: a:b\n\n", (b"", b"a:b")),
}

STREAMS: dict[str, tuple[bytes, list[Event], bytes]] = {
    "frames of one line": (b"data: 1\n\ndata: 2\n\n", [(b"", b"1"), (b"", b"2")], b""),
    "named frames": (b"event: a\ndata: 1\n\nevent: b\ndata: 2\n\n", [(b"a", b"1"), (b"b", b"2")], b""),
    "CR LF": (b"data: 1\r\n\r\nevent: b\r\ndata: 2\r\n\r\n", [(b"", b"1"), (b"b", b"2")], b""),
    "CR": (b"data: 1\r\revent: b\rdata: 2\r\r", [(b"", b"1"), (b"b", b"2")], b""),
    "every kind of line end": (
        b"data: 1\n\r\ndata: 2\r\n\ndata: 3\r\r\ndata: 4\n\rdata: 5\r\n\r\n",
        [(b"", b"%d" % n) for n in range(1, 6)],
        b"",
    ),
    "line ends that change in mid-stream": (
        b"data: 1\n\ndata: 2\r\n\r\ndata: 3\n\n",
        [(b"", b"1"), (b"", b"2"), (b"", b"3")],
        b"",
    ),
    "comments between": (b": hi\n\ndata: 1\n\n: hi\n: ho\n\ndata: 2\n\n", [(b"", b"1"), (b"", b"2")], b""),
    "blank lines between": (b"\n\n\ndata: 1\n\n\n\ndata: 2\n\n", [(b"", b"1"), (b"", b"2")], b""),
    "byte order mark": (b"\xef\xbb\xbfdata: 1\n\ndata: 2\n\n", [(b"", b"1"), (b"", b"2")], b""),
    "several data lines": (b"data: 1\ndata: 2\n\ndata: 3\n\n", [(b"", b"1\n2"), (b"", b"3")], b""),
    "letters of more than one byte": ("data: 北京 🌧\n\n".encode(), [(b"", "北京 🌧".encode())], b""),
    "trailing bytes": (b"data: 1\n\ndata: 2", [(b"", b"1")], b"data: 2"),
    "a last line without its blank line": (b"data: 1\n\ndata: 2\n", [(b"", b"1")], b"data: 2\n"),
    "nothing": (b"", [], b""),
}


def cut(stream: bytes, *offsets: int) -> list[bytes]:
    return [stream[start:end] for start, end in pairwise((0, *offsets, len(stream)))]


def events(pieces: list[bytes]) -> tuple[list[Event], bytes]:
    """The events with data, and what is left; proves on the way that no byte is lost or moved."""
    framer = sse.SseFramer()
    frames: list[bytes] = []
    for index, piece in enumerate(pieces):
        frames += framer.feed(piece)
        assert b"".join(frames) + framer.pending == b"".join(pieces[: index + 1])
    read = [sse.fields(frame) for frame in frames]
    return [event for event in read if event[1] is not None], framer.pending


@pytest.mark.parametrize(("frame", "expected"), FIELDS.values(), ids=FIELDS)
def test_a_frame_says_its_name_and_data(frame: bytes, expected: Event) -> None:
    assert sse.fields(frame) == expected


@pytest.mark.parametrize(("stream", "expected", "rest"), STREAMS.values(), ids=STREAMS)
def test_a_stream_is_cut_into_its_frames(stream: bytes, expected: list[Event], rest: bytes) -> None:
    assert events([stream]) == (expected, rest)


@pytest.mark.parametrize(("stream", "expected", "rest"), STREAMS.values(), ids=STREAMS)
def test_fed_byte_by_byte_a_stream_says_the_same(stream: bytes, expected: list[Event], rest: bytes) -> None:
    found, left = events([stream[at : at + 1] for at in range(len(stream))])
    assert found == expected
    assert left.strip(b"\r\n") == rest.strip(b"\r\n")


@pytest.mark.parametrize(("stream", "expected", "rest"), STREAMS.values(), ids=STREAMS)
def test_cut_in_two_anywhere_a_stream_says_the_same(
    stream: bytes, expected: list[Event], rest: bytes
) -> None:
    for offset in range(len(stream) + 1):
        found, left = events(cut(stream, offset))
        assert found == expected, f"cut at {offset}"
        assert left.strip(b"\r\n") == rest.strip(b"\r\n"), f"cut at {offset}"


PIECES = st.lists(
    st.sampled_from(
        [b"data: ", b"data:", b"event: e", b": c", b"x", b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n"]
    ),
    max_size=24,
)


@given(st.sampled_from([b"", sse.BOM]), PIECES, st.data())
def test_no_fragmentation_changes_what_a_stream_says(
    mark: bytes, pieces: list[bytes], data: st.DataObject
) -> None:
    stream = mark + b"".join(pieces)
    offsets = data.draw(st.lists(st.integers(0, len(stream)), max_size=6).map(sorted))
    whole, _ = events([stream])
    assert events(cut(stream, *offsets))[0] == whole


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_no_bytes_are_lost_or_raise(pieces: list[bytes]) -> None:
    events(pieces)


def test_a_frame_that_is_made_reads_back() -> None:
    assert sse.fields(sse.event(b'{"a":1}')) == (b"", b'{"a":1}')
    assert sse.fields(sse.event(b'{"a":1}', b"error")) == (b"error", b'{"a":1}')


def test_a_long_frame_fed_in_small_pieces_is_found_once_whole() -> None:
    framer = sse.SseFramer()
    body = b"data: " + b"x" * 100_000
    assert [frame for at in range(0, len(body), 7) for frame in framer.feed(body[at : at + 7])] == []
    assert framer.feed(b"\n\n") == [body + b"\n\n"]
    assert framer.pending == b""


IDLE: dict[str, tuple[bytes, bool]] = {
    "nothing": (b"", True),
    "line ends": (b"\r\n\n", True),
    "comments": (b": a\n:b\n", True),
    "a byte order mark": (sse.BOM, True),
    "data": (b": a\ndata: 1\n", False),
    "half a field": (b"da", False),
}


@pytest.mark.parametrize(("frame", "idle"), IDLE.values(), ids=IDLE)
def test_a_frame_of_comments_and_blank_lines_is_idle(frame: bytes, idle: bool) -> None:
    assert sse.is_idle(frame) is idle
