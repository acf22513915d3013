"""Recorded exchanges of real providers: everything is decoded, nothing a provider took is refused, no byte is lost.

The recordings are third-party material beside the repository, read from $TURNGATE_SHARED/traffic.
"""

import base64
import gzip
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from turngate.adapters.dialect import Dialect, RequestContext, Trouble, Undecodable, context_of
from turngate.adapters.levels import levels
from turngate.adapters.registry import DIALECTS
from turngate.validators.gate import Gate
from turngate.validators.graph import MessageSequence
from turngate.validators.rules import Level, Verdict, judge
from turngate.validators.stream import Assembler, ChoiceFinished, Ending, Turn, TurnVerdict, calls_of

SHARED = Path(os.environ.get("TURNGATE_SHARED") or Path(__file__).parents[2] / "shared")
RECORDINGS = SHARED / "traffic" / "dev.jsonl.gz"
Json = dict[str, Any]

APIS: Final = {
    "openai.chat": ("openai.chat", "openai"),
    "azure.chat": ("openai.chat", "azure"),
    "openai.compatible": ("openai.chat", ""),
    "mistral.chat": ("openai.chat", "mistral"),
    "anthropic.messages": ("anthropic.messages", "anthropic"),
}

FAMILIES: Final = {
    "deepseek": "deepseek",
    "groq": "groq",
    "openrouter": "openrouter",
    "llamacpp": "llama.cpp",
    "ollama": "ollama",
}
"""Which server's rules a host of a compatible server stands for, by a part of its name."""

ACCEPTED_ONCE: Final = {
    "ddpy-132": "OLD: in 2024 the API did not check the id of a result; no newer recording shows that",
}
"""Requests that a provider took and we call illegal, with the mark of the analysis beside the recordings."""

NOT_COMMITTED: Final = {
    "rig-216": "the recorder trimmed the line feed behind message_stop",
    **dict.fromkeys(
        ("rig-2286", "rig-2288", "rig-2292", "rig-2299", "rig-2300", "rig-2304", "rig-2306"),
        "arguments cut by the token limit, and the finish says tool_calls",
    ),
    "llm-19": "ART: a stream edited by hand, without finish",
    "llm-21": "ART: a stream edited by hand, without finish",
    "ddpy-191": "LOCAL: a gateway that leaves out the finish of the second choice",
    "ddpy-210": "an old preview model with finish_details instead of finish_reason",
    "crewai-874": "no finish_reason in a whole answer",
    "openllmetry-489": "a content filter's error with status 200",
    "pydanticai-822": "an error event",
    "pydanticai-825": "an error event",
    "pydanticai-1737": "an error event",
    "lccommunity-1": "LOCAL: another product's answer",
    "lccommunity-2": "LOCAL: another product's answer",
    "pydanticai-1500": "LOCAL: a demo endpoint",
    **dict.fromkeys(
        (f"pydanticai-{n}" for n in (1758, 1759, 1760, 1763, 1764, 1765, 1766, 1767)),
        "a hosted server that sends an empty finish_reason or none",
    ),
}
"""Answers with status 2xx whose turn is not committed, and why."""


@dataclass(frozen=True)
class Exchange:
    """One recorded exchange, as far as these tests look at it."""

    id: str
    dialect: Dialect
    server: str
    body: Json
    context: RequestContext
    status: int
    content_type: str
    answer: bytes

    @property
    def is_ours(self) -> bool:
        """False for an older format that shares the path: a text prompt."""
        return isinstance(self.body.get("messages"), list)

    @property
    def messages(self) -> list[Json]:
        return [message for message in self.body["messages"] if isinstance(message, dict)]

    def sequence(self) -> MessageSequence:
        return self.dialect.parse_request(json.dumps(self.body, ensure_ascii=False).encode(), self.context)


def server_at(host: str, server: str) -> str:
    return server or next((name for part, name in FAMILIES.items() if part in host), "")


def restored(text: str, server: str) -> str:
    """One recorder put call_REDACTED_1 for every id. Where the form of an id is a rule, give them that form back."""
    return (
        re.sub(r"call_REDACTED_(\d+)", lambda m: f"redact{m[1]:0>3}", text) if server == "mistral" else text
    )


def answer_bytes(response: Json) -> bytes:
    if "body_b64" in response:
        return base64.b64decode(response["body_b64"])
    body = response.get("body")
    return (body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)).encode()


def content_type(headers: Json) -> str:
    value = next((value for name, value in headers.items() if name.lower() == "content-type"), "")
    return str(value[0] if isinstance(value, list) else value)


def read() -> Iterator[Exchange]:
    with gzip.open(RECORDINGS) as lines:
        for line in lines:
            record = json.loads(line)
            if record["api"] not in APIS:
                continue
            api, server = APIS[record["api"]]
            request, response = record["request"], record["response"]
            text = request.get("body_text")
            yield Exchange(
                record["id"],
                DIALECTS[api],
                server_at(record["host"], server),
                json.loads(restored(text or json.dumps(request["body"] or {}), server)),
                context_of(
                    (name.encode(), str(value).encode("latin-1", "replace"))
                    for name, value in request["headers"].items()
                ),
                response["status"],
                content_type(response["headers"]),
                answer_bytes(response),
            )


@cache
def exchanges() -> tuple[Exchange, ...]:
    if not RECORDINGS.is_file():
        pytest.skip(f"no recordings at {RECORDINGS}; set TURNGATE_SHARED")
    return tuple(read())


def requests() -> list[Exchange]:
    return [exchange for exchange in exchanges() if exchange.is_ours]


def answers(*, streamed: bool) -> list[Exchange]:
    """The answers with status 2xx in a format of ours."""
    return [
        exchange
        for exchange in requests()
        if exchange.status // 100 == 2
        and exchange.answer.strip()
        and "amazon.eventstream" not in exchange.content_type
        and exchange.answer.lstrip().startswith((b"data:", b"event:", b":")) is streamed
    ]


def test_every_request_is_decoded_but_those_of_another_format() -> None:
    undecodable = set()
    for exchange in exchanges():
        try:
            exchange.sequence()
        except Undecodable:
            undecodable.add(exchange.id)
    assert undecodable == {exchange.id for exchange in exchanges() if not exchange.is_ours}
    assert len(undecodable) < 10
    assert len(requests()) > 3000


def blocks_on_the_wire(exchange: Exchange) -> int:
    """The pieces of all messages, counted in the plain JSON."""
    count = 0
    for message in exchange.messages:
        content = message.get("content")
        if message.get("role") in ("tool", "function"):
            count += 1
            continue
        count += len(content) if isinstance(content, list) else content is not None
        if exchange.dialect.api == "openai.chat":
            count += len(message.get("tool_calls") or ())
            count += (message.get("refusal") is not None) + (message.get("function_call") is not None)
            if message["role"] == "assistant":
                count += sum(message.get(name) is not None for name in ("reasoning_content", "reasoning"))
    return count


def test_no_block_is_lost() -> None:
    for exchange in requests():
        sequence = exchange.sequence()
        strangers = len(exchange.body["messages"]) - len(exchange.messages)
        assert len(sequence.blocks) - strangers == blocks_on_the_wire(exchange), exchange.id
        assert sequence.messages == len(exchange.body["messages"]), exchange.id
        assert len({block.at for block in sequence.blocks}) == len(sequence.blocks), exchange.id


def test_every_pointer_leads_to_its_block() -> None:
    for exchange in requests():
        for block in exchange.sequence().blocks:
            value: Any = exchange.body
            if not isinstance(exchange.body["messages"][block.turn], dict):
                continue
            for key in block.at.split("/")[1:]:
                value = value[int(key) if isinstance(value, list) else key]
            if block.call_id is not None:
                assert block.call_id in (value.get("id"), value.get("tool_call_id"), value.get("tool_use_id"))


def test_nothing_that_a_provider_took_is_refused() -> None:
    refused = {}
    for exchange in requests():
        judgement = judge(exchange.sequence(), levels(exchange.dialect.api, exchange.server))
        hard = [finding for finding in judgement.findings if finding.level is Level.HARD]
        if hard and exchange.status // 100 == 2:
            refused[exchange.id] = str(hard[0])
    assert refused.keys() == ACCEPTED_ONCE.keys(), refused


def test_every_refusal_for_the_structure_of_the_messages_is_found() -> None:
    lines = (SHARED / "traffic" / "refused.jsonl").read_text().splitlines() if exchanges() else []
    structure = {record["id"] for line in lines if (record := json.loads(line))["class"] == "A"}
    found = {}
    for exchange in requests():
        if exchange.id in structure:
            judgement = judge(exchange.sequence(), levels(exchange.dialect.api, exchange.server))
            found[exchange.id] = judgement.verdict
    assert len(found) == 10
    assert set(found.values()) == {Verdict.ILLEGAL}, found


def fragments(data: bytes, rng: random.Random) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = rng.choice((1, 2, 7, 40, 300, 2000, 9000))
        yield data[at : at + size]
        at += size


def gated(exchange: Exchange, *, holds: bool) -> tuple[bytes, TurnVerdict, bytes]:
    """What passes the gate in random fragments, the verdict, and our error where the gate has made one."""
    sequence, dialect = exchange.sequence(), exchange.dialect
    errors: list[bytes] = []

    def retraction(reason: Any) -> bytes:
        errors.append(dialect.stream_error(Trouble(reason, "x")))
        return errors[-1]

    parser = dialect.open_stream(sequence)
    gate = Gate(parser, Assembler(sequence.choices, parser.closes_calls), holds, 2**25, retraction)
    out = b"".join(gate.receive(piece) for piece in fragments(exchange.answer, random.Random(exchange.id)))
    out += gate.finish(Ending.CLEAN)
    assert gate.verdict is not None
    assert len(errors) <= 1
    return out, gate.verdict, b"".join(errors)


def holds_calls(exchange: Exchange, data: bytes) -> bool:
    return any(
        calls_of(frame.events) for frame in exchange.dialect.open_stream(exchange.sequence()).feed(data)
    )


def finish_cannot_be_told_apart(exchange: Exchange) -> bool:
    """The provider's finish stands in one frame with a call, so that it cannot pass without it."""
    frames = exchange.dialect.open_stream(exchange.sequence()).feed(exchange.answer)
    return any(
        calls_of(frame.events) and any(isinstance(event, ChoiceFinished) for event in frame.events)
        for frame in frames
    )


def test_streams_pass_byte_for_byte_unless_the_verdict_says_otherwise() -> None:
    seen: Counter[Turn] = Counter()
    for exchange in answers(streamed=True):
        out, verdict, error = gated(exchange, holds=True)
        seen[verdict.turn] += 1
        if verdict.turn is Turn.COMMITTED:
            assert out == exchange.answer, exchange.id
        else:
            assert not holds_calls(exchange, out), exchange.id
            assert out.endswith(error), exchange.id
            assert exchange.answer.startswith(out) or error or holds_calls(exchange, exchange.answer), (
                exchange.id
            )
        if verdict.turn is Turn.INCOMPLETE:
            assert bool(error) is finish_cannot_be_told_apart(exchange), exchange.id
        told = exchange.id in NOT_COMMITTED
        assert (verdict.turn in (Turn.RETRACTED, Turn.UNKNOWN)) is told, (exchange.id, verdict)
    assert seen[Turn.COMMITTED] > 700
    assert seen[Turn.INCOMPLETE] > 50


def test_watched_streams_pass_untouched_and_are_judged_alike() -> None:
    for exchange in answers(streamed=True):
        out, verdict, error = gated(exchange, holds=False)
        assert (out, error) == (exchange.answer, b""), exchange.id
        assert (verdict.turn in (Turn.RETRACTED, Turn.UNKNOWN)) is (exchange.id in NOT_COMMITTED), exchange.id


def calls_on_the_wire(exchange: Exchange) -> list[tuple[str, str]]:
    """(id, name) of every call in a whole answer, read from the plain JSON."""
    answer = json.loads(exchange.answer)
    if exchange.dialect.api == "anthropic.messages":
        return [(b["id"], b["name"]) for b in answer.get("content") or () if b.get("type") == "tool_use"]
    calls = [
        call
        for choice in answer.get("choices") or ()
        for call in (choice.get("message") or {}).get("tool_calls") or ()
    ]
    return [(call.get("id") or "", (call.get("function") or call.get("custom"))["name"]) for call in calls]


def test_whole_answers_are_read_with_all_their_calls() -> None:
    for exchange in answers(streamed=False):
        assembler = Assembler(exchange.sequence().choices)
        for event in exchange.dialect.parse_answer(exchange.answer):
            assembler.receive(event)
        verdict = assembler.close(Ending.CLEAN)
        assert (verdict.turn in (Turn.RETRACTED, Turn.UNKNOWN)) is (exchange.id in NOT_COMMITTED), exchange.id
        found = [(call.id, call.name) for call in assembler.calls if call.id != "function_call"]
        assert found == calls_on_the_wire(exchange), exchange.id
        if verdict.turn is Turn.COMMITTED:
            assert len(verdict.calls) == len(assembler.calls)


def test_every_exception_is_still_one() -> None:
    known = {exchange.id for exchange in exchanges()}
    assert known > NOT_COMMITTED.keys() | ACCEPTED_ONCE.keys()
