"""`turngate torture`: the gate lets no half call and no quiet end out, and a gate that does is found out."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from turngate.adapters import registry
from turngate.proxy import cli, cli_torture, torture
from turngate.proxy.replay import Line, read
from turngate.proxy.torture import (
    DISORDERS,
    FRAGMENTATIONS,
    Answer,
    Fault,
    Kind,
    Tally,
    Variant,
    answer_of,
    play,
)
from turngate.proxy.torture_reader import Reader, split
from turngate.validators.gate import Gate
from turngate.validators.stream import Ending

SHARED: Final = Path(os.environ.get("TURNGATE_SHARED") or Path(__file__).parents[2] / "shared")
RECORDINGS: Final = SHARED / "traffic" / "dev.jsonl.gz"
VARIANTS_OF_A_RECORDING: Final = 60
ONE_IN: Final = 24

CHAT: Final = registry.CHAT.api
MESSAGES: Final = registry.MESSAGES.api
TOOLS: Final = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
Json = dict[str, Any]


def chunk(delta: Json, finish: str | None = None, choice: int = 0) -> bytes:
    choices = [{"index": choice, "delta": delta, "finish_reason": finish}]
    said = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": choices}
    return b"data: %s\n\n" % json.dumps(said, ensure_ascii=False).encode()


def item(index: int, arguments: str, **more: Any) -> Json:
    name = more.pop("name", None)
    body = {"arguments": arguments} | ({"name": name} if name else {})
    return {"tool_calls": [{"index": index, "function": body, **more}]}


def event(type_: str, **more: Any) -> bytes:
    said = json.dumps({"type": type_, **more}, ensure_ascii=False).encode()
    return b"event: %s\ndata: %s\n\n" % (type_.encode(), said)


def block(index: int, start: Json, *deltas: Json) -> list[bytes]:
    return [
        event("content_block_start", index=index, content_block=start),
        *(event("content_block_delta", index=index, delta=delta) for delta in deltas),
        event("content_block_stop", index=index),
    ]


def use(index: int, *fragments: str) -> list[bytes]:
    start = {"type": "tool_use", "id": f"toolu_{index}", "name": "lookup", "input": {}}
    return block(index, start, *({"type": "input_json_delta", "partial_json": each} for each in fragments))


def says(index: int, *texts: str) -> list[bytes]:
    return block(index, {"type": "text", "text": ""}, *({"type": "text_delta", "text": t} for t in texts))


def thinks(index: int, *texts: str) -> list[bytes]:
    deltas = [{"type": "thinking_delta", "thinking": text} for text in texts]
    signed = {"type": "signature_delta", "signature": "c2lnbmVk"}
    return block(index, {"type": "thinking", "thinking": "", "signature": ""}, *deltas, signed)


def ends(reason: str) -> list[bytes]:
    delta = {"stop_reason": reason, "stop_sequence": None}
    return [event("message_delta", delta=delta, usage={"output_tokens": 9}), event("message_stop")]


ROLE: Final = chunk({"role": "assistant", "content": ""})
DONE: Final = b"data: [DONE]\n\n"
START: Final = event(
    "message_start", message={"id": "msg_1", "role": "assistant", "content": [], "model": "m"}
)
CALL: Final = [
    chunk(item(0, "", id="call_1", type="function", name="lookup")),
    chunk(item(0, '{"city": "Zü')),
    chunk(item(0, 'rich 🏔"}')),
]

STREAMS: Final = {
    "text": (
        CHAT,
        1,
        [ROLE, chunk({"content": "Grüß"}), chunk({"content": " dich 🙂"}), chunk({}, "stop"), DONE],
    ),
    "a call": (CHAT, 1, [ROLE, chunk({"content": "Ich sehe nach …"}), *CALL, chunk({}, "tool_calls"), DONE]),
    "parallel calls": (
        CHAT,
        1,
        [
            *CALL,
            chunk(item(1, "", id="call_2", type="function", name="lookup")),
            chunk(item(1, "{}")),
            chunk({}, "tool_calls"),
            DONE,
        ],
    ),
    "two choices, one with a call": (
        CHAT,
        2,
        [
            ROLE,
            *CALL,
            chunk({"content": "Nein"}, None, 1),
            chunk({}, "tool_calls"),
            chunk({}, "stop", 1),
            DONE,
        ],
    ),
    "a call cut by the length limit": (CHAT, 1, [ROLE, *CALL[:2], chunk({}, "length"), DONE]),
    "an error inside": (CHAT, 1, [ROLE, *CALL, b'data: {"error": {"message": "overloaded"}}\n\n']),
    "messages text": (MESSAGES, 1, [START, *says(0, "Grüß", " dich 🙂"), *ends("end_turn")]),
    "messages thinking, then calls": (
        MESSAGES,
        1,
        [
            START,
            event("ping"),
            *thinks(0, "Hm, Zürich", " …"),
            *says(1, "Ich sehe nach"),
            *use(2, "", '{"city": "Zü', 'rich"}'),
            *use(3, "", '{"city":', ' "Bern"}'),
            *ends("tool_use"),
        ],
    ),
    "messages call cut by the length limit": (
        MESSAGES,
        1,
        [START, *says(0, "Ich"), *use(1, "", '{"city": "Z'), *ends("max_tokens")],
    ),
}


def answer(name: str) -> Answer:
    api, choices, frames = STREAMS[name]
    asked: Json = {"model": "m", "messages": [{"role": "user", "content": "?"}], "stream": True}
    asked |= {"n": choices, "tools": TOOLS} if api == CHAT else {"max_tokens": 99}
    return Answer(name, api, json.dumps(asked).encode(), b"".join(frames))


def line(id_: str, given: Answer, ending: str = "clean") -> Json:
    response = {"status": 200, "headers": {"content-type": "text/event-stream"}, "body": given.data.decode()}
    return {
        "id": id_,
        "api": given.api,
        "request": {"body": json.loads(given.request)},
        "response": {**response, "ending": ending},
    }


ALL: Final = pytest.mark.parametrize("name", STREAMS)


# -- the gate as it is ----------------------------------------------------------------------------------------------


@ALL
def test_no_variant_of_an_answer_makes_the_gate_break_its_promise(name: str) -> None:
    given = answer(name)
    tally = torture.torture(given)
    assert [*map(str, tally.examples)] == []
    assert not tally.faults
    frames = len(split(given.data))
    assert tally.variants[Kind.CUT] == 4 * (len(given.data) + 1)
    assert sum(tally.variants[kind] for kind in DISORDERS) == 4 * frames - 2
    assert tally.variants.total() == 4 * (len(given.data) + 1) + len(FRAGMENTATIONS) + 4 * frames - 2


@pytest.mark.skipif(not RECORDINGS.exists(), reason=f"no recordings in {RECORDINGS}")
def test_no_recorded_answer_of_real_providers_makes_it_break_its_promise() -> None:
    lines = (each for each in read(RECORDINGS, lambda _: None) if isinstance(each, Line))
    recorded = [given for each in lines if (given := answer_of(each)) is not None]
    assert len(recorded) > 500
    total = Tally()
    for given in recorded[::ONE_IN]:  # all of them: make torture
        total.add(torture.torture(given, limit=VARIANTS_OF_A_RECORDING))
    assert [*map(str, total.examples)] == []
    assert not total.faults
    assert total.variants.total() == VARIANTS_OF_A_RECORDING * len(recorded[::ONE_IN])


# -- gates that are not ---------------------------------------------------------------------------------------------


class LeakyGate(Gate):
    """Holds nothing."""

    def receive(self, data: bytes) -> bytes:
        self.holds = False
        return Gate.receive(self, data)


class SilentGate(Gate):
    """Ends a broken turn without a word."""

    def finish(self, ending: Ending) -> bytes:
        Gate.finish(self, ending)
        return b""


class EditingGate(Gate):
    """Puts another word in."""

    def receive(self, data: bytes) -> bytes:
        return Gate.receive(self, data).replace(b"dich", b"euch")


class TardyGate(Gate):
    """Lets nothing out before the end."""

    def receive(self, data: bytes) -> bytes:
        Gate.receive(self, data)
        return b""


class RepeatingGate(Gate):
    """Gives everything twice."""

    def receive(self, data: bytes) -> bytes:
        return Gate.receive(self, data) * 2


class FragileGate(Gate):
    """Fails at the end."""

    def finish(self, ending: Ending) -> bytes:
        raise RuntimeError("broken promise")


BAD_GATES: Final = {
    "one that holds nothing lets parts of calls out": (LeakyGate, "a call", Fault.PARTIAL_CALL),
    "and of parallel calls": (LeakyGate, "messages thinking, then calls", Fault.PARTIAL_CALL),
    "and the witness sees it": (LeakyGate, "parallel calls", Fault.WITNESS),
    "one that is silent at the end ends quietly": (SilentGate, "text", Fault.QUIET_END),
    "in the other dialect too": (SilentGate, "messages text", Fault.QUIET_END),
    "one that edits changes bytes": (EditingGate, "text", Fault.CHANGED),
    "one that lets nothing out loses text": (TardyGate, "messages text", Fault.TEXT_LOST),
    "one that repeats lets a call out twice": (
        RepeatingGate,
        "messages thinking, then calls",
        Fault.PARTIAL_CALL,
    ),
    "one that raises is counted": (FragileGate, "a call", Fault.CRASH),
}


@pytest.mark.parametrize(("gate", "name", "fault"), BAD_GATES.values(), ids=BAD_GATES)
def test_a_gate_that_breaks_its_promise_is_found_out(
    gate: type[Gate], name: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torture, "Gate", gate)
    tally = torture.torture(answer(name))
    assert fault in {each for _, each in tally.faults}
    assert fault in {example.fault for example in tally.examples}


def test_an_example_can_be_played_again_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torture, "Gate", LeakyGate)
    given = answer("a call")
    tally = torture.torture(given, seed=7)
    assert len({(each.variant.kind, each.fault) for each in tally.examples}) > 3
    for example in tally.examples:
        _, verdict = play(given, example.variant, seed=7)
        assert (example.fault, example.what) in verdict.found, example


def test_a_cut_shares_its_beginning_and_comes_to_the_same_as_one_by_itself() -> None:
    given = answer("messages thinking, then calls")
    counted = torture.torture(given).released
    cuts = (Variant(Kind.CUT, at, ending) for at in range(len(given.data) + 1) for ending in torture.ENDINGS)
    disorders = (Variant(kind, at) for at in range(len(split(given.data))) for kind in DISORDERS)
    last = len(split(given.data)) - 1
    alone = [
        *cuts,
        *(Variant(kind, at) for kind, at in FRAGMENTATIONS),
        *(each for each in disorders if each.at < last or each.kind in (Kind.DROPPED, Kind.DOUBLED)),
    ]
    assert counted == sum(play(given, variant)[1].released for variant in alone)


# -- what is played -------------------------------------------------------------------------------------------------


def test_a_limit_bounds_the_variants_and_spreads_them_over_kinds_and_the_whole_answer() -> None:
    given = answer("messages thinking, then calls")
    tally = torture.torture(given, limit=90)
    assert tally.variants.total() == 90
    assert set(tally.variants) > {Kind.CUT, Kind.BYTES, *DISORDERS}
    assert torture.torture(given, limit=1).variants.total() == 1
    assert torture.torture(given, limit=10**9).variants == torture.torture(given).variants


def test_a_seed_gives_the_same_fragments_and_another_one_others() -> None:
    given = answer("messages thinking, then calls")
    seen: list[tuple[bytes, ...]] = []

    class Recording(Gate):
        def receive(self, data: bytes) -> bytes:
            seen[-1] += (data,)
            return Gate.receive(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torture, "Gate", Recording)
        for seed in (1, 1, 2):
            seen.append(())
            play(given, Variant(Kind.RANDOM, 3), seed)
    assert seen[0] == seen[1] != seen[2]
    assert all(given.data in b"".join(pieces) for pieces in seen)


NOT_STREAMED: Final[dict[str, Callable[[Json], Json]]] = {
    "a whole JSON answer": lambda each: {**each, "response": {"status": 200, "body": {"choices": []}}},
    "a refusal": lambda each: {**each, "response": {**each["response"], "status": 400}},
    "another API": lambda each: {**each, "api": "gemini.generate"},
    "no answer": lambda each: {"id": "x", "request": each["request"], "api": each["api"]},
    "no API and an unknown path": lambda each: {**{k: v for k, v in each.items() if k != "api"}},
}


@pytest.mark.parametrize("change", NOT_STREAMED.values(), ids=NOT_STREAMED)
def test_lines_without_a_streamed_answer_are_passed_over(
    change: Callable[[Json], Json], tmp_path: Path
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(change(line("x", answer("text")))))
    (read_line,) = read(file, lambda _: None)
    assert isinstance(read_line, Line)
    assert answer_of(read_line) is None


# -- the reader -----------------------------------------------------------------------------------------------------

READINGS: Final = {
    "a whole call": ("a call", slice(None), True, True, [(0, "call_1", "lookup", '{"city": "Zürich 🏔"}')]),
    "half a call": ("a call", slice(-3), False, False, [(0, "call_1", "lookup", '{"city": "Zü')]),
    "no end of one choice": ("two choices, one with a call", slice(-2), False, False, None),
    "both ended, [DONE] is not needed": ("two choices, one with a call", slice(-1), True, True, None),
    "an error": ("an error inside", slice(None), False, False, None),
    "two calls": (
        "messages thinking, then calls",
        slice(None),
        True,
        True,
        [(0, "toolu_2", "lookup", '{"city": "Zürich"}'), (0, "toolu_3", "lookup", '{"city": "Bern"}')],
    ),
    "no message_stop": ("messages text", slice(-1), False, False, []),
    "a block that is not closed": ("messages call cut by the length limit", slice(-3), False, False, None),
}


@pytest.mark.parametrize(("name", "part", "ended", "sound", "calls"), READINGS.values(), ids=READINGS)
def test_the_reader_takes_from_frames_what_an_app_takes(
    name: str, part: slice, ended: bool, sound: bool, calls: list[Any] | None
) -> None:
    api, choices, frames = STREAMS[name]
    reading = Reader(api, choices).read(frames[part])
    assert (reading.ended, reading.sound()) == (ended, sound)
    if calls is not None:
        assert reading.keys == calls


def test_frames_are_split_whatever_ends_their_lines() -> None:
    for end in (b"\n", b"\r\n", b"\r"):
        data = b"data: a\n\n: c\n\ndata: b".replace(b"\n", end)
        assert b"".join(split(data)) == data
        assert len(split(data)) == 3
    assert split(b"") == []


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    file = tmp_path / "answers.jsonl"
    lines = [line(name, answer(name)) for name in ("text", "a call")]
    file.write_text("\n".join(map(json.dumps, [*lines, {"id": "r", "request": {"body": {}}}])))
    return file


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["torture", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_counts_and_ends_well_where_nothing_is_wrong(recordings: Path) -> None:
    code, output = invoke(recordings, "--limit", 60, "--jobs", 1)
    assert code == 0, output
    assert "120" in output
    assert "2 streamed answers (1 lines without one)" in output


def test_several_processes_come_to_the_same_as_one(recordings: Path) -> None:
    told = []
    for jobs in (1, 2):
        code, output = invoke(recordings, "--limit", 60, "--jobs", jobs, "--json")
        told.append(json.loads(output))
        told[-1].pop("took_s")
        assert code == 0
    assert told[0] == told[1]
    assert told[0]["variants_total"] == 120
    assert told[0]["violations"] == dict.fromkeys(Fault, 0)


def test_violations_make_the_command_fail_and_are_shown(
    recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torture, "Gate", LeakyGate)
    code, output = invoke(recordings, "--jobs", 1, "--json")
    told = json.loads(output)
    assert code == 1
    assert told["violations"]["partial call"] > 0
    first = told["examples"][0]
    assert set(first) == {"id", "kind", "at", "ending", "violation", "what"}
    code, output = invoke(recordings, "--jobs", 1)
    assert code == 1
    assert "partial call: a call came out that is not whole" in output


def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    code, output = invoke(tmp_path / "missing.jsonl")
    assert code == cli_torture.EX_USAGE
    assert "missing.jsonl" in output
