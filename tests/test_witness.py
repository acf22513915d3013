"""The witnesses: what they find, what they must not find, and that they share nothing with the decision."""

import ast
import gzip
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.adapters.dialect import Trouble
from turngate.adapters.registry import DIALECTS
from turngate.telemetry import witness as witness_module
from turngate.telemetry.witness import BLOCK_BYTES, CALLS_MAX, Flow, Scanner
from turngate.validators.gate import Gate
from turngate.validators.rules import Reason
from turngate.validators.stream import Assembler, Ending, Turn

SHARED: Final = Path(os.environ.get("TURNGATE_SHARED") or Path(__file__).parents[2] / "shared")
CHAT, MESSAGES = "openai.chat", "anthropic.messages"
NOTHING = ""
Json = dict[str, Any]


def said(value: object) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def chunk(delta: Json, finish: str | None = None, index: int = 0) -> bytes:
    return said({"id": "c", "choices": [{"index": index, "delta": delta, "finish_reason": finish}]})


def piece(arguments: object, index: int | None = 0, choice: int = 0, **more: object) -> bytes:
    named = {"name": more.pop("name")} if "name" in more else {}
    item = {"function": {**named, "arguments": arguments}, **more}
    return chunk({"tool_calls": [item if index is None else {"index": index, **item}]}, index=choice)


def event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\n".encode() + said({"type": kind, **fields})


def use(index: int, id: str, *fragments: str, closed: bool = True, name: str = "f") -> bytes:
    block = {"type": "tool_use", "id": id, "name": name, "input": {}}
    deltas = [{"type": "input_json_delta", "partial_json": text} for text in fragments]
    return b"".join(
        (
            event("content_block_start", index=index, content_block=block),
            *(event("content_block_delta", index=index, delta=delta) for delta in deltas),
            event("content_block_stop", index=index) if closed else b"",
        )
    )


TEXT = chunk({"content": "an error in tool_calls, they say: [DONE]"})
OPEN = piece("", id="a", name="f")
CALL = OPEN + piece('{"x":') + piece("1}")
FOR_TOOLS, DONE = chunk({}, "tool_calls"), b"data: [DONE]\n\n"
FAILED = said({"error": {"message": "overloaded"}})
SAY = event("content_block_delta", index=0, delta={"type": "text_delta", "text": "tool_use, message_stop"})
END = event("message_delta", delta={"stop_reason": "tool_use"}) + event("message_stop")
OVERLOADED = event("error", error={"type": "overloaded_error", "message": "x"})

PARSE, CLOSED, ENDLESS = "has arguments that do not parse", "is not closed", "is in an answer without an end"
TWINS = "shares its id with another"


def answer(*calls: Json, finish: str = "tool_calls") -> bytes:
    return json.dumps(
        {"choices": [{"message": {"tool_calls": list(calls)}, "finish_reason": finish}]}
    ).encode()


def whole_call(arguments: object, **more: object) -> Json:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}


CASES: Final[dict[str, tuple[str, bytes, bool, str]]] = {
    # name: (api, what was written, whether the transfer ended properly, what the scanner says)
    "text alone is nothing": (CHAT, TEXT * 3 + chunk({}, "stop") + DONE, True, NOTHING),
    "text that stops is nothing": (CHAT, TEXT, True, NOTHING),
    "a whole call is nothing": (CHAT, TEXT + CALL + FOR_TOOLS + DONE, True, NOTHING),
    "a call without arguments is whole": (CHAT, OPEN + FOR_TOOLS + DONE, True, NOTHING),
    "a finish alone ends an answer": (CHAT, CALL + FOR_TOOLS, True, NOTHING),
    "a finish ends it even if the transfer breaks": (CHAT, CALL + FOR_TOOLS, False, NOTHING),
    "[DONE] alone ends an answer": (CHAT, CALL + DONE, True, NOTHING),
    "a [DONE] without a blank line ends it": (CHAT, CALL + b"data: [DONE]", True, NOTHING),
    "a cut call with a finish": (CHAT, OPEN + piece('{"x":') + FOR_TOOLS + DONE, True, PARSE),
    "a cut call with a finish and a broken transfer": (CHAT, OPEN + piece('{"x":') + FOR_TOOLS, False, PARSE),
    "a cut call at the length limit": (CHAT, OPEN + piece('{"x":') + chunk({}, "length") + DONE, True, PARSE),
    "a cut call that ends quietly": (CHAT, TEXT + OPEN + piece('{"x":'), True, PARSE),
    "a whole call that ends quietly": (CHAT, TEXT + CALL, True, ENDLESS),
    "a cut call in a broken transfer raises": (CHAT, TEXT + OPEN + piece('{"x":'), False, NOTHING),
    "a cut call before an error raises": (CHAT, OPEN + piece('{"x":') + FAILED, True, NOTHING),
    "an error behind the end comes too late": (CHAT, OPEN + piece("{") + FOR_TOOLS + FAILED, True, PARSE),
    "what is behind [DONE] is not read": (CHAT, CALL + FOR_TOOLS + DONE + OPEN + piece("{"), True, NOTHING),
    "a frame that does not parse raises": (CHAT, OPEN + piece("{") + b'data: {"error', True, PARSE),
    "such a frame with its blank line": (
        CHAT,
        OPEN + piece("{") + b'data: {"error\n\n' + DONE,
        True,
        NOTHING,
    ),
    "a call behind the finish needs another": (
        CHAT,
        CALL + FOR_TOOLS + piece("", 1, id="b", name="f"),
        True,
        ENDLESS,
    ),
    "no id": (CHAT, piece("{}", name="f") + FOR_TOOLS, True, "has no id"),
    "an id that says null": (CHAT, piece("{}", id="null", name="f") + FOR_TOOLS, True, "has no id"),
    "no name": (CHAT, piece("{}", id="a") + FOR_TOOLS, True, "has no name"),
    "id and name may come later": (
        *(CHAT, piece("{") + piece("}", id=None, name="f") + piece("", id="a") + FOR_TOOLS),
        *(True, NOTHING),
    ),
    "two calls": (CHAT, CALL + piece("{}", 1, id="b", name="g") + FOR_TOOLS, True, NOTHING),
    "two calls, both numbered 0": (CHAT, CALL + piece("{}", 0, id="b", name="g") + FOR_TOOLS, True, NOTHING),
    "pieces without a number go on": (
        CHAT,
        piece("{", None, id="a", name="f") + piece("}", None) + DONE,
        True,
        NOTHING,
    ),
    "the second of two is cut": (
        CHAT,
        CALL + piece("[", 1, id="b", name="g") + FOR_TOOLS,
        True,
        f"call 1 {PARSE}",
    ),
    "one id goes on with its call": (CHAT, CALL + piece("", 1, id="a", name="f") + FOR_TOOLS, True, NOTHING),
    "one id twice": (
        *(CHAT, piece("{}", name="f") + piece("{}", 1, id="a", name="f") + piece("", id="a") + FOR_TOOLS),
        *(True, TWINS),
    ),
    "another choice may use an id again": (
        *(CHAT, CALL + FOR_TOOLS + piece("{}", 0, 1, id="a", name="f") + chunk({}, "tool_calls", 1) + DONE),
        *(True, NOTHING),
    ),
    "only the other choice has ended": (
        *(CHAT, CALL + FOR_TOOLS + piece("{", 0, 1, id="b", name="f") + FAILED),
        *(True, NOTHING),
    ),
    "text may hold braces": (CHAT, OPEN + piece('{"x": "}{\\""}') + FOR_TOOLS, True, NOTHING),
    "a number of any size is a number": (CHAT, OPEN + piece("1" * 5000) + FOR_TOOLS, True, NOTHING),
    "too deep to tell is nothing": (CHAT, OPEN + piece("[" * 100_000) + FOR_TOOLS, True, NOTHING),
    "free text is no JSON": (
        *(CHAT, chunk({"tool_calls": [{"index": 0, "id": "a", "custom": {"name": "f", "input": "ls -l"}}]})),
        *(True, ENDLESS),
    ),
    "the oldest form": (
        CHAT,
        chunk({"function_call": {"name": "f", "arguments": "{"}}) + FOR_TOOLS,
        True,
        PARSE,
    ),
    "the oldest form, whole": (
        *(CHAT, chunk({"function_call": {"name": "f", "arguments": "{}"}}, "function_call")),
        *(True, NOTHING),
    ),
    "the oldest form, empty": (CHAT, chunk({"function_call": {"name": "", "arguments": ""}}), True, NOTHING),
    "arguments as an object": (CHAT, piece({"x": 1}, id="a", name="f") + FOR_TOOLS, True, NOTHING),
    "shapes that nobody sends": (
        *(CHAT, said({"choices": [None, {"index": "x", "delta": {"tool_calls": {"a": 1}}}], "error": None})),
        *(True, NOTHING),
    ),
    "messages: text": (MESSAGES, SAY * 3 + END, True, NOTHING),
    "messages: a whole call": (MESSAGES, SAY + use(1, "t", '{"x"', ":1}") + END, True, NOTHING),
    "messages: two whole calls": (MESSAGES, use(0, "t", "{}") + use(1, "u") + END, True, NOTHING),
    "messages: one number twice": (MESSAGES, use(0, "t", "{}") + use(0, "u", "{") + END, True, PARSE),
    "messages: cut but closed": (MESSAGES, use(1, "t", '{"x"') + END, True, PARSE),
    "messages: plausible but not closed": (
        MESSAGES,
        use(1, "t", '{"x":1}', closed=False) + END,
        True,
        CLOSED,
    ),
    "messages: ends quietly": (MESSAGES, use(1, "t", "{}"), True, ENDLESS),
    "messages: ends quietly inside": (MESSAGES, use(1, "t", '{"x', closed=False), True, PARSE),
    "messages: broken transfer": (MESSAGES, use(1, "t", '{"x', closed=False), False, NOTHING),
    "messages: broken behind the end": (MESSAGES, use(1, "t", '{"x') + END, False, PARSE),
    "messages: an error event": (MESSAGES, use(1, "t", '{"x', closed=False) + OVERLOADED, True, NOTHING),
    "messages: an error told by its name only": (
        *(MESSAGES, use(1, "t", '{"x') + b"event: error\ndata: {}\n\n" + END),
        *(True, NOTHING),
    ),
    "messages: a call over many blocks": (
        *(MESSAGES, use(1, "t", *["["] * 300, "1", *["]"] * 300) + END),
        *(True, NOTHING),
    ),
    "messages: a cut call over many blocks": (
        *(MESSAGES, use(1, "t", *["["] * 300, "1", *["]"] * 299) + END),
        *(True, PARSE),
    ),
    "messages: no id": (MESSAGES, use(1, "", "{}") + END, True, "has no id"),
    "messages: no name": (MESSAGES, use(1, "t", "{}", name="") + END, True, "has no name"),
    "messages: one id twice": (MESSAGES, use(1, "t", "{}") + use(2, "t", "{}") + END, True, TWINS),
    "messages: a call behind the end": (MESSAGES, use(1, "t") + END + use(2, "u"), True, ENDLESS),
    "messages: calls of the server are its own": (
        *(MESSAGES, use(1, "t", '{"x').replace(b"tool_use", b"server_tool_use") + END),
        *(True, NOTHING),
    ),
    "whole: a call": (CHAT, answer(whole_call("{}")), True, NOTHING),
    "whole: behind blank lines": (CHAT, b"\n\n" + b" " * BLOCK_BYTES + answer(whole_call("{")), True, PARSE),
    "whole: cut arguments": (CHAT, answer(whole_call('{"x":')), True, PARSE),
    "whole: cut arguments at the limit": (CHAT, answer(whole_call('{"x":'), finish="length"), True, PARSE),
    "whole: no id": (CHAT, answer(whole_call("{}", id="")), True, "has no id"),
    "whole: cut itself": (CHAT, answer(whole_call('{"x":'))[:-2], True, NOTHING),
    "whole: an error": (CHAT, b'{"error": {"message": "tool_calls"}}', True, NOTHING),
    "whole: longer than a block": (CHAT, answer(whole_call("[" + "1," * BLOCK_BYTES)), True, PARSE),
    "whole: messages": (
        *(MESSAGES, b'{"content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}'),
        *(True, NOTHING),
    ),
    "whole: messages without an id": (
        *(MESSAGES, b'{"content": [{"type": "tool_use", "name": "f", "input": {}}]}'),
        *(True, "has no id"),
    ),
    "nothing at all": (CHAT, b"", True, NOTHING),
    "no answer of the kind": (CHAT, b"<html>tool_calls</html>", True, NOTHING),
}


def scan(api: str, written: Sequence[bytes], *, clean: bool) -> str:
    scanner = Scanner(api)
    for data in written:
        scanner.see(data)
    assert not scanner.gave_up
    return scanner.end(clean=clean)


def bytewise(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


@pytest.mark.parametrize(("api", "written", "clean", "expected"), CASES.values(), ids=CASES)
def test_the_scanner_speaks_of_what_is_not_whole_and_of_nothing_else(
    api: str, written: bytes, clean: bool, expected: str
) -> None:
    found = scan(api, [written], clean=clean)
    assert found.endswith(expected), found
    assert bool(found) == bool(expected), found
    for line_end in (b"\n", b"\r\n", b"\r"):
        lines = written.replace(b"\n", line_end)
        assert scan(api, [lines], clean=clean) == found
        assert scan(api, bytewise(lines), clean=clean) == found


@pytest.mark.parametrize("at", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_a_call_is_found_wherever_a_block_ends(at: int, line_end: bytes) -> None:
    cut_call = (OPEN + piece('{"x":') + FOR_TOOLS + DONE).replace(b"\n", line_end)
    for inside in range(0, len(cut_call), 3):
        comment = b": " + b"x" * (BLOCK_BYTES - 4 - inside + at) + line_end * 2
        assert scan(CHAT, bytewise(comment + cut_call), clean=True).endswith(PARSE)


def test_what_grows_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness_module, "KEPT_BYTES_MAX", 4 * BLOCK_BYTES)
    floods: dict[str, Iterator[bytes]] = {
        "an event": iter([b"data: "] + [b"x" * 100] * 1000),
        "a body": iter([b"{"] + [b"x" * 100] * 1000),
        "arguments": iter([OPEN] + [piece("x" * 100)] * 1000),
        "calls": (piece("{}", n, id=str(n), name="f") for n in range(CALLS_MAX + 100)),
    }
    for name, flood in floods.items():
        scanner = Scanner(CHAT)
        for data in flood:
            scanner.see(data)
        assert scanner.end(clean=True) == "", name
        assert scanner.gave_up, name
        assert not scanner._kept, name
        assert not scanner._tail, name


@given(st.sampled_from([CHAT, MESSAGES]), st.lists(st.binary(max_size=40), max_size=20), st.booleans())
def test_no_bytes_make_the_scanner_raise(api: str, written: list[bytes], clean: bool) -> None:
    marks = [
        b'data: {"choices":[{"delta":{"tool_calls":[',
        b"event: error\n",
        b'{"type":"tool_use"}',
        b"\n\n",
    ]
    scan(api, [part for pair in zip(written, marks * 5, strict=False) for part in pair], clean=clean)


# -- against the gate -----------------------------------------------------------------------------------------------

ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def streams(draw: st.DrawFn) -> tuple[str, list[bytes], int]:
    """An api, the events of a proper answer with calls, and how many of them come before the first call."""
    api = draw(st.sampled_from([CHAT, MESSAGES]))
    texts = draw(
        st.lists(st.sampled_from(["Hi", " tool_calls", "tool_use", " [DONE] error", "\n\n"]), max_size=3)
    )
    events = [chunk({"content": text}) for text in texts] if api == CHAT else []
    if api == MESSAGES:
        deltas = [{"type": "text_delta", "text": text} for text in texts]
        events = [event("content_block_delta", index=0, delta=delta) for delta in deltas]
    before = len(events)
    for number in range(draw(st.integers(1, 3))):
        text = json.dumps(draw(ARGUMENTS), ensure_ascii=draw(st.booleans()))
        cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
        fragments = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        if api == CHAT:
            events.append(piece("", number, id=f"call_{number}", name="f"))
            events += [piece(fragment, number) for fragment in fragments]
        else:
            blocks = use(number + 1, f"toolu_{number}", *fragments).split(b"\n\n")
            events += [block + b"\n\n" for block in blocks if block]
    if api == CHAT:
        return api, [*events, FOR_TOOLS, DONE], before
    return api, [*events, *(part + b"\n\n" for part in END.split(b"\n\n") if part)], before


def recut(draw: st.DrawFn | Callable[..., Any], data: bytes) -> list[bytes]:
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@given(streams(), st.data())
def test_a_gate_that_leaks_is_found_and_one_that_tells_of_the_break_is_not(
    stream: tuple[str, list[bytes], int], data: st.DataObject
) -> None:
    api, events, before = stream
    assert scan(api, recut(data.draw, b"".join(events)), clean=True) == ""
    last = 1 if api == MESSAGES else 2  # [DONE] is not needed
    kept = data.draw(st.integers(0, len(events) - last))
    leaked = recut(data.draw, b"".join(events[:kept]))
    assert bool(scan(api, leaked, clean=True)) == (kept > before)
    error = DIALECTS[api].stream_error(Trouble(Reason.STREAM_TRUNCATED, "it broke off"))
    assert scan(api, [*leaked, error], clean=True) == ""
    assert scan(api, leaked, clean=False) == ""


@given(streams(), st.data())
def test_what_the_real_gate_lets_through_is_never_spoken_of(
    stream: tuple[str, list[bytes], int], data: st.DataObject
) -> None:
    api, events, _ = stream
    raw = b"".join(data.draw(st.permutations(events)) if data.draw(st.booleans()) else events)
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    ending = data.draw(st.sampled_from([Ending.CLEAN, Ending.EOF, Ending.RESET, Ending.STALLED]))
    out, _ = through_the_gate(api, recut(data.draw, raw), ending)
    assert scan(api, out, clean=True) == ""


def through_the_gate(api: str, parts: Sequence[bytes], ending: Ending) -> tuple[list[bytes], Gate]:
    """What an app in an enforced scope gets of these bytes."""
    dialect = DIALECTS[api]
    sequence = dialect.parse_request(b'{"messages": []}')
    parser = dialect.open_stream(sequence)
    gate = Gate(
        *(parser, Assembler(sequence.choices, parser.closes_calls), True, 2**24),
        lambda reason: dialect.stream_error(Trouble(reason, "it broke off")),
    )
    out = [gate.receive(part) for part in parts]
    return [*out, gate.finish(ending)], gate


# -- recorded answers -----------------------------------------------------------------------------------------------


@cache
def recorded() -> list[tuple[str, str, bytes]]:
    """(id, api, bytes) of recorded answers in the two dialects; servers that imitate one of them are in it too."""
    path = SHARED / "traffic" / "dev.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no recorded traffic in {SHARED}; set TURNGATE_SHARED")
    apis = dict.fromkeys((CHAT, "openai.compatible", "azure.chat", "mistral.chat"), CHAT) | {
        MESSAGES: MESSAGES
    }
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        exchanges = [exchange for line in lines if (exchange := json.loads(line))["api"] in apis]
    answers = [(exchange, exchange["response"].get("body")) for exchange in exchanges]
    return [
        (
            exchange["id"],
            apis[exchange["api"]],
            body.encode() if isinstance(body, str) else json.dumps(body).encode(),
        )
        for exchange, body in answers
        if isinstance(body, str | dict) and exchange["response"]["status"] == 200
    ]


def test_recorded_answers_give_no_alarm_and_the_beginnings_of_their_calls_do() -> None:
    streams = calls = 0
    for name, api, answer in recorded():
        if answer.startswith(b"{"):
            assembler = Assembler()
            for happened in DIALECTS[api].parse_answer(answer):
                assembler.receive(happened)
            if assembler.close(Ending.CLEAN).turn is Turn.COMMITTED:
                assert scan(api, [answer], clean=True) == "", name
            continue
        out, gate = through_the_gate(api, [answer], Ending.CLEAN)
        assert scan(api, out, clean=True) == "", name
        streams += 1
        if gate.verdict is not None and gate.verdict.turn is Turn.COMMITTED and gate.verdict.calls:
            assert scan(api, [answer], clean=True) == "", name
            opened = re.search(rb'"(tool_calls": ?\[\{|type": ?"tool_use").*\n', answer)
            assert opened is not None, name
            if not re.search(
                rb'finish_reason": ?"', opened[0]
            ):  # some servers send call and finish as one event
                assert scan(api, [answer[: opened.end()]], clean=True), name
                calls += 1
    assert streams > 100
    assert calls > 50


# -- bytes in, bytes out ----------------------------------------------------------------------------------------------


@given(st.binary(max_size=300), st.booleans(), st.data())
def test_a_flow_is_equal_however_it_is_cut(data: bytes, same: bool, draws: st.DataObject) -> None:
    flow = Flow(same=same)
    for part in recut(draws.draw, data):
        flow.took(part)
    for part in recut(draws.draw, data):
        flow.gave(part)
    assert flow.mismatch == ""
    assert flow.bytes_in == flow.bytes_out == len(data)


@given(st.lists(st.binary(max_size=9)), st.data())
def test_a_flow_of_the_same_pieces_tells_from_where_on_others_went_out(
    parts: list[bytes], draws: st.DataObject
) -> None:
    """Each piece goes out as it came in, as an equal one, or changed."""
    flow = Flow(same=True)
    changed = False
    for part in parts:
        flow.took(part)
        how = draws.draw(st.sampled_from(["same", "equal", "changed"]))
        changed = changed or (how == "changed" and bool(part))
        others = {"equal": bytes(bytearray(part)), "changed": bytes(255 - byte for byte in part)}
        flow.gave(others.get(how, part))
    size = sum(map(len, parts))
    assert flow.mismatch == (f"{size} bytes came in, others went out" if changed else "")


@given(st.binary(min_size=1, max_size=300), st.booleans(), st.data())
def test_a_flow_tells_of_any_byte_changed_lost_or_added(
    data: bytes, same: bool, draws: st.DataObject
) -> None:
    at = draws.draw(st.integers(0, len(data) - 1))
    changed = data[:at] + bytes([data[at] ^ draws.draw(st.integers(1, 255))]) + data[at + 1 :]
    others = {
        f"{len(data)} bytes came in, others went out": changed,
        f"{len(data)} bytes came in, {len(data) - 1} went out": data[:at] + data[at + 1 :],
        f"{len(data)} bytes came in, {len(data) + 1} went out": data[:at] + b"\x00" + data[at:],
    }
    for expected, out in others.items():
        flow = Flow(same=same)
        flow.took(data)
        flow.gave(out)
        assert flow.mismatch == expected


def test_two_parts_in_the_wrong_order_differ() -> None:
    flow = Flow()
    flow.took(b"ab")
    flow.gave(b"b")
    flow.gave(b"a")
    assert flow.mismatch == "2 bytes came in, others went out"


def test_the_witness_imports_nothing_of_ours() -> None:
    tree = ast.parse(Path(witness_module.__file__).read_text())
    modules = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert modules == {"json", "collections", "collections.abc", "dataclasses", "typing", "zlib"}
