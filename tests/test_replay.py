"""`turngate replay`: recorded exchanges judged by the code that judges live ones, counted, and never an error of theirs."""

import base64
import gzip
import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import Sidecar

from turngate.adapters import levels, registry
from turngate.adapters.dialect import Undecodable
from turngate.proxy import cli, cli_check, replay
from turngate.proxy.replay import STRICTEST, Line, Tally, Unreadable
from turngate.proxy.rollout import Stage
from turngate.proxy.simulator import Simulator
from turngate.validators.rules import Verdict, judge

Json = dict[str, Any]
SHARED: Final = Path(os.environ.get("TURNGATE_SHARED") or Path(__file__).parents[2] / "shared")

SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}}}
USER: Final = {"role": "user", "content": "Weather?"}
STRAY: Final = {"role": "tool", "tool_call_id": "x", "content": "14"}
TOOLS: Final = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALLING: Final = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
}


def asked(*messages: Json, **more: object) -> Json:
    body = {"model": "m", "messages": list(messages), "tools": TOOLS}
    return {"method": "POST", "path": "/v1/chat/completions", "body": body, **more}


def line(response: Json | None = None, *messages: Json, api: str = "openai.chat", **more: object) -> Json:
    exchange = {"id": "x-1", "api": api, "request": asked(*(messages or (USER,))), **more}
    return exchange if response is None else {**exchange, "response": response}


def written(path: Path, *lines: Json | str) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def read(path: Path) -> list[Line | Unreadable]:
    return list(replay.read(path, lambda _: None))


def judged(exchange: Json, stage: Stage = STRICTEST, tally: Tally | None = None) -> Json:
    """What `--json` prints for one exchange."""
    found = replay.parse(json.dumps(exchange).encode(), "FILE:1")
    assert isinstance(found, Line)
    told: Json = json.loads(json.dumps(replay.replay(found, stage, None, tally or Tally())))
    return told


# Requests

REQUESTS: Final[dict[str, tuple[Json, str, list[str]]]] = {
    "legal": (line(), "legal", []),
    "a result without its call": (line(None, USER, STRAY), "illegal", ["hard result.orphan"]),
    "an open call at the end": (line(None, USER, CALLING), "waiting", ["hard call.unanswered"]),
    "rules of a host": (
        line(None, USER, STRAY, api="openai.compatible", host="api.openai.com"),
        *("illegal", ["hard result.orphan"]),
    ),
    "an unknown host has soft rules": (
        line(None, USER, STRAY, host="localhost"),
        *("legal", ["soft result.orphan"]),
    ),
    "a server stands above a host": (
        line(None, USER, STRAY, host="localhost", server="openai"),
        *("illegal", ["hard result.orphan"]),
    ),
    "no API, but a path": (
        line(None, USER, STRAY, api="", host="api.openai.com"),
        "illegal",
        ["hard result.orphan"],
    ),
    "fields that say nothing": (
        line(None, USER, STRAY, server=None, host=None),
        "illegal",
        ["hard result.orphan"],
    ),
    "another API": (line(api="smoke.signals"), "unjudged", []),
    "what only the ledger would know is left alone": (line(context={"needs_ledger": True}), "legal", []),
    "another format of the same API": ({**line(), "request": {"body": {"prompt": "?"}}}, "unjudged", []),
    "no body": ({**line(), "request": {"path": "/v1/chat/completions"}}, "unjudged", []),
    "the exact text counts": (
        {**line(), "request": asked(USER, body_text=json.dumps({"model": "m", "messages": [USER, STRAY]}))},
        *("illegal", ["hard result.orphan"]),
    ),
}


@pytest.mark.parametrize(("exchange", "verdict", "findings"), REQUESTS.values(), ids=REQUESTS)
def test_a_request_is_judged_by_the_rules_of_its_server(
    exchange: Json, verdict: str, findings: list[str]
) -> None:
    told = judged(exchange)
    assert (told["id"], told["api"]) == ("x-1", exchange["api"] or "openai.chat")
    assert told["verdict"] == verdict
    assert [f"{each['level']} {each['reason']}" for each in told["findings"]] == findings
    assert ("why" in told) is (verdict == "unjudged")
    assert "turn" not in told


FAMILIES: Final[dict[str, tuple[str, str, str | None, str]]] = {
    "a named server": ("openai.chat", "api.openai.com", "vllm", "vllm"),
    "a host": ("openai.compatible", "api.deepseek.com", None, "deepseek"),
    "a tenant's host": ("azure.chat", "resource.openai.azure.com", None, "azure"),
    "a region's host": ("anthropic.messages", "us-east5-aiplatform.googleapis.com", None, "vertex"),
    "a host in capitals": ("openai.chat", "API.OpenAI.com", None, "openai"),
    "a host that only ends alike": ("openai.chat", "notapi.openai.com", None, ""),
    "an unknown host": ("mistral.chat", "localhost", None, ""),
    "no host: the API's own": ("mistral.chat", "", None, "mistral"),
    "no host: nobody's API": ("openai.compatible", "", None, ""),
}


@pytest.mark.parametrize(("api", "host", "server", "family"), FAMILIES.values(), ids=FAMILIES)
def test_the_server_of_a_line(api: str, host: str, server: str | None, family: str) -> None:
    assert replay.family(Line(replay.Request(), api=api, host=host, server=server)) == family


# Answers


def chunk(delta: Json, finish: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'id': 'c', 'model': 'm', 'choices': [choice]}, ensure_ascii=False)}\n\n"


def call_chunk(arguments: str, **opening: str) -> str:
    function = {"arguments": arguments, **({"name": "weather"} if opening else {})}
    return chunk({"tool_calls": [{"index": 0, **opening, "function": function}]})


SSE: Final = {"Content-Type": "text/event-stream; charset=utf-8"}
JSON: Final = {"content-type": ["application/json"]}
TEXT: Final = [chunk({"role": "assistant", "content": "Let "}), chunk({"content": "me sé."})]
DONE: Final = "data: [DONE]\n\n"
CALLS: Final = [*TEXT, call_chunk('{"city": ', id="a"), call_chunk('"Åre"}')]
WHOLE: Final = [*CALLS, chunk({}, "tool_calls"), DONE]
RELEASED: Final = [{"id": "a", "name": "weather", "arguments": {"city": "Åre"}}]
MESSAGE: Final = {"role": "assistant", "content": "Hm.", "tool_calls": None}
CUT_CALL: Final = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"ci'}}


def stream(frames: list[str], ending: str = "clean") -> Json:
    return {"status": 200, "headers": SSE, "frames": frames, "ending": ending}


def answer(message: Json, finish: str = "stop") -> Json:
    return {"id": "c", "model": "m", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def whole(body: object, **more: object) -> Json:
    return {"status": 200, "headers": JSON, "body": body, **more}


def encoded(frames: list[str], cut: int) -> list[str]:
    data = "".join(frames).encode()
    return [base64.b64encode(data[at : at + cut]).decode() for at in range(0, len(data), cut)]


def as_latin_1(frames: list[str], cut: int) -> list[str]:
    text = "".join(frames).encode().decode("latin-1")
    return [text[at : at + cut] for at in range(0, len(text), cut)]


Told = tuple[str | None, str | None, list[Json], str, bool]

ANSWERS: Final[dict[str, tuple[Json, Told]]] = {
    "a whole stream": (stream(WHOLE), ("committed", None, RELEASED, "Let me sé.", True)),
    "the same as bytes, cut anywhere": (
        {"status": 200, "headers": SSE, "frames_b64": encoded(WHOLE, 7)},
        ("committed", None, RELEASED, "Let me sé.", True),
    ),
    "the same as bytes that are written as characters": (
        stream(as_latin_1(WHOLE, 7)),
        ("committed", None, RELEASED, "Let me sé.", True),
    ),
    "the same as one text": (
        {"status": 200, "headers": SSE, "body": "".join(WHOLE)},
        ("committed", None, RELEASED, "Let me sé.", True),
    ),
    "the same without a content type": (
        {"status": 200, "frames": WHOLE},
        ("committed", None, RELEASED, "Let me sé.", True),
    ),
    "cut inside a call": (
        stream(CALLS[:-1], "eof"),
        ("retracted", "stream.truncated", [], "Let me sé.", False),
    ),
    "reset inside a call": (
        stream(CALLS[:-1], "reset"),
        ("retracted", "stream.truncated", [], "Let me sé.", False),
    ),
    "stalled inside a call": (
        stream(CALLS[:-1], "stall"),
        ("unknown", "stream.stalled", [], "Let me sé.", False),
    ),
    "no finish": (stream(CALLS), ("retracted", "stream.no_stop", [], "Let me sé.", False)),
    "the length limit inside a call": (
        stream([*CALLS[:-1], chunk({}, "length"), DONE]),
        ("incomplete", "call.arguments_unclosed", [], "Let me sé.", False),
    ),
    "text only": (stream([*TEXT, chunk({}, "stop"), DONE]), ("committed", None, [], "Let me sé.", True)),
    "nothing": (stream([]), ("unknown", "stream.no_stop", [], "", False)),
    "an answer of JSON": (whole(answer(MESSAGE)), ("committed", None, [], "Hm.", True)),
    "an answer of JSON as text": (whole(json.dumps(answer(MESSAGE))), ("committed", None, [], "Hm.", True)),
    "an answer of JSON in base64": (
        {
            "status": 200,
            "headers": JSON,
            "body_b64": base64.b64encode(json.dumps(answer(MESSAGE)).encode()).decode(),
        },
        ("committed", None, [], "Hm.", True),
    ),
    "a cut call in an answer of JSON": (
        whole(answer({**MESSAGE, "tool_calls": [CUT_CALL]}, "tool_calls")),
        ("retracted", "call.arguments_unclosed", [], "", False),
    ),
    "half an answer of JSON": (whole('{"choices": ['), ("retracted", "stream.truncated", [], "", False)),
    "an answer of JSON that broke off": (
        whole(answer(MESSAGE), ending="reset"),
        ("retracted", "stream.truncated", [], "", False),
    ),
    "a refusal": ({"status": 400, "headers": JSON, "body": "{}"}, ("refused", None, [], "", True)),
    "no JSON and no stream": (
        {"status": 200, "headers": {"content-type": "text/html"}, "body": "<p>"},
        (None, "surface.uncovered", [], "", True),
    ),
    "no base64": (
        {"status": 200, "headers": SSE, "frames_b64": ["a"]},
        (None, "body.undecodable", [], "", True),
    ),
}


@pytest.mark.parametrize(("response", "told"), ANSWERS.values(), ids=ANSWERS)
def test_an_answer_is_judged_by_the_gate(response: Json, told: Told) -> None:
    found = judged(line(response))
    keys = ("turn", "reason", "tool_calls_released", "text_preview", "bytes_identical")
    assert tuple(found[key] for key in keys) == told


@pytest.mark.parametrize("stage", [Stage.OFF, Stage.OBSERVE, Stage.ENFORCE_TEXT])
def test_where_calls_are_not_gated_every_byte_passes_and_the_verdict_is_the_same(stage: Stage) -> None:
    for response in (
        stream(CALLS[:-1], "eof"),
        whole(answer({**MESSAGE, "tool_calls": [CUT_CALL]}, "tool_calls")),
    ):
        strict, lax = judged(line(response)), judged(line(response), stage)
        assert (strict["bytes_identical"], lax["bytes_identical"]) == (False, True)
        assert (lax["turn"], lax["reason"]) == (strict["turn"], strict["reason"])
        assert lax["tool_calls_released"] == []


@given(cut=st.integers(1, 400), ending=st.sampled_from(["clean", "eof", "reset"]), at=st.integers(0, 2000))
def test_no_cut_of_a_stream_releases_a_call(cut: int, ending: str, at: int) -> None:
    """Frames may end anywhere; what stands before the finish is never enough."""
    before = "".join(CALLS).encode()
    data = before[: at % (len(before) + 1)]
    pieces = [base64.b64encode(data[i : i + cut]).decode() for i in range(0, len(data), cut)]
    told = judged(line({"status": 200, "headers": SSE, "frames_b64": pieces, "ending": ending}))
    assert told["tool_calls_released"] == []
    assert told["turn"] in ("retracted", "unknown")
    assert "Let me sé.".startswith(told["text_preview"])


def test_a_failure_of_our_own_is_told_and_the_next_line_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken for the test")

    with monkeypatch.context() as broken:
        broken.setattr(type(registry.CHAT), "parse_request", fail)
        told = judged(line())
    assert (told["verdict"], told["why"]) == ("unjudged", "internal: RuntimeError: broken for the test")
    with monkeypatch.context() as broken:
        broken.setattr(type(registry.CHAT), "open_stream", fail)
        assert judged(line(stream(WHOLE)))["reason"] == "internal"
    assert judged(line(stream(WHOLE)))["turn"] == "committed"


# Files


def test_lines_archives_and_single_objects_are_read_alike(tmp_path: Path) -> None:
    lines = written(tmp_path / "a.jsonl", line(id="a"), "", line(id="b"))
    archive = tmp_path / "a.jsonl.gz"
    archive.write_bytes(gzip.compress(lines.read_bytes()))
    single = tmp_path / "one.json"
    single.write_text(json.dumps(line(id="a"), indent=1))
    named_wrongly = written(tmp_path / "lines.json", line(id="a"), line(id="b"))
    assert [getattr(each, "id", each) for each in read(lines)] == ["a", "b"]
    assert read(archive) == read(lines) == read(named_wrongly)
    assert [json.loads(each.request.data()) for each in read(single) if isinstance(each, Line)] == [
        asked(USER)["body"]
    ]


BAD: Final[dict[str, tuple[str, str]]] = {
    "no JSON": ("{", "truncated"),
    "no object": ("[]", "Expected `object`"),
    "no request": ('{"id": "a"}', "request"),
    "a field of the wrong kind": ('{"request": {"path": 1}}', "$.request.path"),
    "an ending that is none": (
        '{"request": {}, "response": {"ending": "abrupt"}}',
        "'abrupt': choose one of clean",
    ),
}


@pytest.mark.parametrize(("text", "why"), BAD.values(), ids=BAD)
def test_a_bad_line_is_told_by_its_place_and_the_others_are_judged(
    tmp_path: Path, text: str, why: str
) -> None:
    path = written(tmp_path / "a.jsonl", line(id="a"), text, line(id="b"))
    first, bad, last = read(path)
    assert (getattr(first, "id", ""), getattr(last, "id", "")) == ("a", "b")
    assert isinstance(bad, Unreadable)
    assert bad.where == f"{path}:2"
    assert why in bad.why


def test_a_pipe_is_read_as_a_file_is() -> None:
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, (json.dumps(line(id="a")) + "\n").encode())
        os.close(write_end)
        assert [getattr(each, "id", each) for each in read(Path(f"/dev/fd/{read_end}"))] == ["a"]
    finally:
        os.close(read_end)


def test_a_damaged_archive_gives_what_stands_before_the_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(line(id="a")) + "\n").encode())[:-8] + b"damage")
    first, bad = read(path)
    assert getattr(first, "id", "") == "a"
    assert isinstance(bad, Unreadable)
    assert (bad.where, "damaged" in bad.why) == (f"{path}:2", True)


def test_a_line_is_judged_before_the_next_is_read(tmp_path: Path) -> None:
    """Memory does not grow with the file."""
    path = written(tmp_path / "a.jsonl", *[line(id=str(n), padding="x" * 100_000) for n in range(40)])
    advanced: list[int] = []
    lines = replay.read(path, advanced.append)
    assert isinstance(next(lines), Line)
    assert 0 < sum(advanced) < path.stat().st_size / 10
    assert len(list(lines)) == 39
    assert sum(advanced) == path.stat().st_size


# Counts


def test_the_summary_sets_our_verdict_against_the_providers_answer() -> None:
    words = [
        next(e.message for e in levels.entries("openai.chat", "openai") if e.reason == reason)
        for reason in ("result.orphan", "result.mismatch")
    ]
    words += ["Incorrect API key provided: x", "no"]
    refused = [{"status": 400, "body": {"error": {"message": f"Bad: {each} (x)"}}} for each in words]
    tally = Tally()
    for response in (stream(WHOLE), *refused, {"status": 500}, None):
        judged(line(response, USER, STRAY), tally=tally)
    judged(line(refused[0]), tally=tally)
    judged(line(stream(CALLS, "eof")), tally=tally)
    summary = tally.summary()
    row = {"accepted": 1, "refused_sequence": 2, "refused_other": 1, "unknown": 3}
    assert summary["matrix"]["illegal"] == row
    assert summary["rules"] == [{"reason": "result.orphan", "level": "hard", **row}]
    assert summary["matrix"]["legal"] == {
        "accepted": 1,
        "refused_sequence": 1,
        "refused_other": 0,
        "unknown": 0,
    }
    scope = {"api": "openai.chat", "server": "openai", "upstream": "", "model": "m", "client": "none"}
    counts = {"false_refusals": 1, "true_refusals": 2, "misses": 1, "unknown": 4, "refused_by_us": 0}
    assert summary["confusion"] == [{"reason": "result.orphan", **scope, **counts}]
    assert summary["verdicts"] == {"legal": 2, "waiting": 0, "illegal": 7, "unjudged": 0}
    assert summary["actions"] == {"refuse": 7, "pass": 2}
    assert summary["turns"] == {"refused": 6, "committed": 1, "retracted": 1}
    assert (summary["exchanges"], summary["tool_calls_released"], summary["answers_changed"]) == (9, 1, 1)
    assert set(summary["examples"]) == {
        "illegal, but the provider took it",
        "illegal",
        "legal, but the provider refused the sequence",
        "answer retracted",
    }
    assert len(summary["examples"]["illegal"]) == replay.EXAMPLES_MAX


# The command


@dataclass(frozen=True, slots=True)
class Said:
    """What a command came to."""

    code: int
    out: str
    err: str


@pytest.fixture(name="turngate")
def turngate_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["turngate", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Said(int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_replay_prints_one_object_an_exchange_and_then_the_summary(
    turngate: Callable[..., Said], tmp_path: Path
) -> None:
    path = written(tmp_path / "a.jsonl", line(stream(WHOLE), id="a"), "{", line(None, USER, STRAY, id="b"))
    said = turngate("replay", path, path, "--json")
    *exchanges, last = [json.loads(each) for each in said.out.splitlines()]
    assert said.code == 0
    assert [(each["id"], each["verdict"]) for each in exchanges] == [("a", "legal"), ("b", "illegal")] * 2
    assert exchanges[0]["tool_calls_released"] == RELEASED
    assert set(exchanges[1]["findings"][0]) == {"reason", "level", "at", "message", "remedy"}
    assert (last["summary"]["exchanges"], last["summary"]["bad_lines"]) == (4, 2)
    assert said.err.count(f"{path}:2: ") == 2
    assert len(said.err.splitlines()) == 2


def test_replay_sums_up_for_people(turngate: Callable[..., Said], tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl",
        line(stream(CALLS, "eof"), id="cut-1"),
        line(stream(WHOLE), USER, STRAY, id="taken-1"),
        line(api="cohere.chat", id="other-1"),
    )
    said = turngate("replay", path)
    assert (said.code, said.err) == (0, "")
    texts = [
        *("3 exchanges judged as at", "openai.chat 2", "cohere.chat 1", "retracted 1", "stream.no_stop 1"),
        *(
            "Each rule against the provider's answer",
            "By model and client, the worst first",
            "illegal, but the provider took it",
            "  taken-1  result.orphan at /messages/1",
        ),
        *("  cut-1  stream.no_stop", "1 tool calls released; 1 answers"),
    ]
    assert [text for text in texts if text not in said.out] == []


def test_replay_of_nothing_is_an_empty_report(turngate: Callable[..., Said], tmp_path: Path) -> None:
    said = turngate("replay", written(tmp_path / "a.jsonl"))
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("0 exchanges")


def test_replay_takes_stage_and_api_from_the_command_line(
    turngate: Callable[..., Said], tmp_path: Path
) -> None:
    path = written(tmp_path / "a.jsonl", line(stream(CALLS, "eof"), api="", host="api.openai.com"))
    observed = json.loads(turngate("replay", path, "--json", "--stage", "observe").out.splitlines()[0])
    assert (observed["verdict"], observed["turn"], observed["bytes_identical"]) == (
        "legal",
        "retracted",
        True,
    )
    other = json.loads(turngate("replay", path, "--json", "--api", "anthropic.messages").out.splitlines()[0])
    assert other["api"] == "anthropic.messages"


@pytest.mark.parametrize("arguments", [["absent.jsonl"], [], ["--stage", "brave", "x"]])
def test_a_wrong_command_line_ends_with_64(turngate: Callable[..., Said], arguments: list[str]) -> None:
    said = turngate("replay", *arguments)
    assert (said.code, said.out) == (64, "")
    assert said.err


def test_many_bad_lines_are_counted_and_only_the_first_are_told(
    turngate: Callable[..., Said], tmp_path: Path
) -> None:
    said = turngate("replay", written(tmp_path / "a.jsonl", *["{"] * 50))
    assert len(said.err.splitlines()) == 21
    assert "50 bad lines" in said.out


# What lies beside the repository


def cases() -> Iterator[tuple[Json, Line]]:
    files = sorted((SHARED / "cases").glob("*.json"))
    if not files:
        pytest.skip(f"no cases in {SHARED}; set TURNGATE_SHARED")
    for file in files:
        (found,) = read(file)
        assert isinstance(found, Line)
        yield json.loads(file.read_bytes()), found


def is_text(response: replay.Response) -> bool:
    """Its chunks are text as they stand, and its end is one that a provider can be told to make."""
    frames = response.frames or []
    return (
        bool(frames)
        and response.ending != "stall"
        and response.pieces() == [each.encode() for each in frames]
    )


async def test_what_replay_says_of_an_answer_is_what_the_running_gate_does_with_it(tmp_path: Path) -> None:
    told, live = {}, {}
    async with (
        Simulator({"refusals": False}) as simulator,
        Sidecar(
            tmp_path / "data", dict.fromkeys(("openai", "anthropic"), simulator.url), stage="enforce-tools"
        ) as sidecar,
        aiohttp.ClientSession() as session,
    ):
        for _, found in cases():
            response = found.response
            if found.api not in replay.APIS or response is None or not is_text(response):
                continue
            sent = b"".join(response.pieces())
            fault = {"cut_at_byte": len(sent), "how": response.ending} if response.ending != "clean" else None
            answered = {"answer": {"frames": response.frames}, **({"fault": fault} if fault else {})}
            simulator.use({"refusals": False, "steps": [answered]})
            simulator.reset()
            upstream = "anthropic" if found.api == "anthropic.messages" else "openai"
            url = f"{sidecar.url}/{upstream}{found.request.path}"
            async with session.post(url, data=found.request.data()) as got:
                live[found.id] = (await got.read()) == sent
            told[found.id] = replay.replay(found, Stage.ENFORCE_TOOLS, None, Tally())["bytes_identical"]
    assert live == told
    assert set(live.values()) == {True, False}
    assert len(live) > 30


COARSER: Final = {
    *("stream.duplicate_delta", "stream.malformed_call", "call.arguments_schema", "call.unknown_tool"),
    "stream.call_id_conflict",
}
"""Reasons of answers that need more than the answer itself, or that the gate calls by a wider word."""


def test_the_answers_of_the_cases_come_to_what_is_expected_of_them() -> None:
    seen = 0
    for case, found in cases():
        expect = case["expect"]
        if found.api not in replay.APIS or found.response is None or expect["reason"] in COARSER:
            continue
        told = json.loads(json.dumps(replay.replay(found, STRICTEST, None, Tally())))
        keys = ("turn", "reason", "tool_calls_released", "text_preview")
        assert {key: told[key] for key in keys} == {key: expect[key] for key in keys}, found.id
        seen += 1
    assert seen > 30


def test_replay_and_check_give_the_same_verdict_on_every_case() -> None:
    seen = set()
    for _, found in cases():
        if found.api not in replay.APIS or found.context not in (None, replay.Told()):
            continue  # `check` is told nothing beside the body
        told = json.loads(json.dumps(replay.replay(found, STRICTEST, None, Tally())))
        dialect, server = replay.APIS[found.api or ""][0], replay.family(found) or "(unknown)"
        checked = cli_check.check(found.request.data(), dialect.api, server)
        assert json.loads(cli_check.as_json(str(found.id), checked)) == {
            **told_request(told),
            "api": dialect.api,
        }
        seen.add(checked.judgement.verdict)
    assert seen >= {Verdict.LEGAL, Verdict.ILLEGAL, Verdict.WAITING}


def told_request(told: Json) -> Json:
    return {key: told[key] for key in ("id", "api", "verdict", "findings")}


def test_recorded_traffic_is_replayed_without_a_bad_line_and_no_broken_turn_releases_a_call() -> None:
    recordings = SHARED / "traffic" / "dev.jsonl.gz"
    if not recordings.is_file():
        pytest.skip(f"no recordings at {recordings}; set TURNGATE_SHARED")
    tally = Tally()
    for found in replay.read(recordings, lambda _: None):
        assert isinstance(found, Line)
        told = replay.replay(found, STRICTEST, None, tally)
        if told["turn"] == "committed":
            assert told["bytes_identical"], found.id
        else:
            assert not told["tool_calls_released"], found.id
    summary = tally.summary()
    assert sum(sum(row.values()) for row in summary["matrix"].values()) == summary["exchanges"] > 5000
    assert summary["answer_reasons"].get("internal") is None
    assert summary["turns"]["committed"] > 2500
    assert summary["tool_calls_released"] > 1000


SHAPES: Final = re.compile(r"^tools\.\d|unknown variant|unsupported content\[\]\.type")
"""Refusals of kinds of blocks and of tools' definitions, which the analysis of the recordings puts elsewhere."""
FILTERED: Final = "openllmetry-489"
"""A content filter's error with status 200."""


def provider_by_the_analysis() -> dict[str, str]:
    kinds = {FILTERED: "refused_other"}
    for text in (SHARED / "traffic" / "refused.jsonl").read_text().splitlines():
        row = json.loads(text)
        sequence = row["class"] == "A" or SHAPES.search(row["message"])
        kinds[row["id"]] = (
            "refused_sequence" if sequence else "unknown" if row["class"] == "Z" else "refused_other"
        )
    return kinds


def test_the_matrix_over_recorded_traffic_equals_an_independent_count() -> None:
    recordings = SHARED / "traffic" / "dev.jsonl.gz"
    if not recordings.is_file():
        pytest.skip(f"no recordings at {recordings}; set TURNGATE_SHARED")
    provider, counted, tally = provider_by_the_analysis(), Counter[tuple[str, ...]](), Tally()
    for found in replay.read(recordings, lambda _: None):
        assert isinstance(found, Line)
        replay.replay(found, STRICTEST, None, tally)
        if found.api in replay.APIS:
            counted.update(counts_of(found, provider.get(str(found.id), "accepted")))
    kinds = ("true_refusals", "false_refusals", "misses", "unknown")
    told = Counter[tuple[str, ...]]()
    for each in tally.by_scope():
        for kind in kinds:
            reason = "" if kind == "misses" else each.reason
            told[kind, reason, each.api, each.server, each.upstream, each.model] += getattr(each, kind)
        assert (each.client, each.refused_by_us) == ("none", 0)  # the recorders left the user agents out
    assert +told == counted
    assert {kind for kind, *_ in counted} >= {"true_refusals", "false_refusals", "misses"}


def counts_of(found: Line, provider: str) -> Iterator[tuple[str, ...]]:
    """What one recorded exchange adds to the matrix, by another hand. Of a miss the reason is the provider's to tell."""
    dialect = replay.APIS[found.api or ""][0]
    server, body = replay.family(found), found.request.data()
    try:
        judgement = judge(
            dialect.parse_request(body, found.request_context()), levels.levels(dialect.api, server)
        )
    except Undecodable:
        return
    scope = (dialect.api, server, found.host or "", json.loads(body).get("model", ""))
    if judgement.verdict is Verdict.LEGAL:
        if provider == "refused_sequence":
            yield "misses", "", *scope
        return
    kind = {"accepted": "false_refusals", "refused_sequence": "true_refusals"}.get(provider, "unknown")
    for reason in {each.reason for each in judgement.findings if each.level == "hard"}:
        yield kind, reason, *scope
