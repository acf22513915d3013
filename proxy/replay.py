"""Judge recorded exchanges as the sidecar would have judged them live: the same rules, parsers and gate, no network.

What is read are exchange lines: one JSON object a line (also gzip), or one object a file. Lines are read one by one,
so memory is bounded by the longest.
"""

import base64
import dataclasses
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast, get_args

import msgspec

from turngate.adapters import levels, preview, registry
from turngate.adapters.answers import Answered, Kind, classify
from turngate.adapters.clients import client_family
from turngate.adapters.dialect import Dialect, RequestContext, Trouble, Undecodable, context_of
from turngate.proxy.config import Limits
from turngate.proxy.reply import ENDED_WELL, RETRACTED, class_of
from turngate.proxy.rollout import Stage, decide, enforced
from turngate.telemetry.events import shown_model
from turngate.telemetry.report import Rule, Scope
from turngate.validators.gate import Gate
from turngate.validators.graph import MessageSequence
from turngate.validators.previews import Hit, Said, refused_for
from turngate.validators.rules import Finding, Judgement, Level, Reason, Verdict, judge
from turngate.validators.schemas import Declared, Schemas
from turngate.validators.stream import Assembler, Call, Ending, Turn, TurnVerdict

STRICTEST: Final = list(Stage)[-1]
"""Recorded exchanges are judged at the top of the ladder unless told otherwise."""

# -- exchange lines -------------------------------------------------------------------------------------------------

_NOTHING: Final = msgspec.Raw(b"")


class Request(msgspec.Struct):
    """`body` is kept as it stands in the line; `body_text` is the exact text where that mattered to the recorder."""

    method: str = "POST"
    path: str = ""
    headers: dict[str, Any] = {}
    body: msgspec.Raw = _NOTHING
    body_text: str | None = None

    def data(self) -> bytes:
        if self.body_text is not None:
            return self.body_text.encode(errors="surrogatepass")
        return bytes(self.body)

    def wire_headers(self) -> Iterator[tuple[bytes, bytes]]:
        for name, value in self.headers.items():
            yield name.encode(), _one(value).encode("latin-1", "replace")


class Response(msgspec.Struct):
    """One of the four bodies is there; `ending` says how its bytes ended."""

    status: int | None = None
    headers: dict[str, Any] = {}
    body: msgspec.Raw = _NOTHING
    body_b64: str | None = None
    frames: list[str] | None = None
    frames_b64: list[str] | None = None
    ending: str = "clean"

    def pieces(self) -> list[bytes]:
        """The bytes as they were read, cut where the recording cuts them. Raises ValueError."""
        if self.frames_b64 is not None:
            return [base64.b64decode(each) for each in self.frames_b64]
        if self.frames is not None:
            return _encoded(self.frames)
        if self.body_b64 is not None:
            return [base64.b64decode(self.body_b64)]
        raw = bytes(self.body)
        if raw.startswith(b'"'):
            return [msgspec.json.decode(raw, type=str).encode(errors="surrogatepass")]
        return [b"" if raw == b"null" else raw]

    @property
    def content_type(self) -> str:
        for name, value in self.headers.items():
            if name.lower() == "content-type":
                return _one(value)
        return ""


def _one(value: object) -> str:
    """A header's value; some recorders keep lists."""
    return str(value[0] if isinstance(value, list) and value else value)


class Told(msgspec.Struct):
    """What is known of an exchange beside its bytes: what a ledger would know of turns that were retracted, too."""

    model_context_window: int | None = None
    retracted_previews: tuple[str, ...] = ()
    retracted_calls: tuple[str, ...] = ()

    def leaks(self, said: Iterable[Said]) -> Iterator[Hit]:
        """What of the retracted turns these messages bring back."""
        texts, ids = {text.strip() for text in self.retracted_previews}, set(self.retracted_calls)
        for message in said:
            if message.text.strip() in texts:
                yield Hit(
                    Reason.PREVIEW_LEAKED, message.at, "retracted before", "told", whole=True, told=True
                )
            for at, id_ in message.calls:
                if id_ in ids:
                    yield Hit(Reason.CALL_UNCOMMITTED, at, "retracted before", "told", whole=True, told=True)


class Line(msgspec.Struct):
    """One recorded exchange, as far as it is judged."""

    request: Request
    id: str | int = ""
    api: str | None = None
    server: str | None = None
    host: str | None = None
    response: Response | None = None
    context: Told | None = None

    def request_context(self) -> RequestContext:
        """Recorders leave headers out, so that nothing may be concluded from a header that is not there."""
        window = self.context.model_context_window if self.context is not None else None
        context = context_of(self.request.wire_headers(), window)
        return context if context.betas else dataclasses.replace(context, betas=None)


ENDINGS: Final[Mapping[str, Ending]] = {
    "clean": Ending.CLEAN,
    "eof": Ending.EOF,
    "reset": Ending.RESET,
    "stall": Ending.STALLED,
}

_decode_line = msgspec.json.Decoder(Line).decode


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line that is no exchange: `FILE:LINE` and why."""

    where: str
    why: str


def read(path: Path, advance: Callable[[int], object]) -> Iterator[Line | Unreadable]:
    """The exchanges of a file, one at a time. `advance` is told how many bytes of it have been read. Raises OSError.

    A damaged archive gives what stands before the damage.
    """
    with path.open("rb") as file:
        if path.suffix == ".json":
            if whole := _whole(file.read(), f"{path}:1"):
                yield whole
                return
            file.seek(0)
        lines = cast(io.BufferedIOBase, gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file)
        place = file.tell if file.seekable() else lambda: 0  # a pipe has no place and no length
        number, at = 0, 0
        while True:
            number += 1
            try:
                data = lines.readline()
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                yield Unreadable(f"{path}:{number}", f"the archive is damaged: {error}")
                return
            if not data:
                return
            if (now := place()) != at:
                advance(now - at)
                at = now
            if data.strip():
                yield parse(data, f"{path}:{number}")


def _whole(data: bytes, where: str) -> Line | Unreadable | None:
    """A file that is one object; None where it is lines."""
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except msgspec.DecodeError:
        return None
    return parse(data, where)


def parse(data: bytes, where: str) -> Line | Unreadable:
    try:
        line = _decode_line(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Unreadable(where, str(error))
    if line.response is not None and line.response.ending not in ENDINGS:
        return Unreadable(where, f"ending {line.response.ending!r}: choose one of {', '.join(ENDINGS)}")
    return msgspec.structs.replace(line, id=line.id if line.id != "" else where)


def _encoded(frames: list[str]) -> list[bytes]:
    """The bytes of recorded chunks. A chunk that ends inside a character is written byte for byte, as Latin-1."""
    with suppress(UnicodeEncodeError, UnicodeDecodeError):
        pieces = [frame.encode("latin-1") for frame in frames]
        b"".join(pieces).decode()  # real Latin-1 text is hardly ever valid UTF-8 by chance
        return pieces
    return [frame.encode(errors="surrogatepass") for frame in frames]


# -- whose rules ----------------------------------------------------------------------------------------------------

APIS: Final[Mapping[str, tuple[Dialect, str]]] = {
    "openai.chat": (registry.CHAT, "openai"),
    "azure.chat": (registry.CHAT, "azure"),
    "mistral.chat": (registry.CHAT, "mistral"),
    "openai.compatible": (registry.CHAT, ""),
    "anthropic.messages": (registry.MESSAGES, "anthropic"),
}
"""By the name in a line: its dialect, and whose rules hold where the line names neither server nor host."""

HOSTS: Final[Mapping[str, str]] = {
    "api.openai.com": "openai",
    "openai.azure.com": "azure",
    "services.ai.azure.com": "azure",
    "cognitiveservices.azure.com": "azure",
    "api.anthropic.com": "anthropic",
    "api.deepseek.com": "deepseek",
    "api.mistral.ai": "mistral",
    "api.groq.com": "groq",
    "openrouter.ai": "openrouter",
    "api.x.ai": "xai",
    "api.moonshot.ai": "moonshot",
    "api.moonshot.cn": "moonshot",
    "api.minimax.io": "minimax",
    "api.minimaxi.com": "minimax",
    "api.fireworks.ai": "fireworks",
    "api.together.xyz": "together",
    "api.together.ai": "together",
    "api.githubcopilot.com": "github-copilot",
    "generativelanguage.googleapis.com": "gemini",
    "aiplatform.googleapis.com": "vertex",
    "amazonaws.com": "bedrock",
    "ollama.com": "ollama",
}
"""The server family behind a host, or behind what stands in front of it with a dot or a hyphen."""


def family(line: Line) -> str:
    """The server whose rules hold for a line; "" where that is not known."""
    if line.server:
        return line.server
    if not line.host:
        return APIS[line.api][1] if line.api and line.api in APIS else ""
    host = line.host.lower()
    return next((name for end, name in HOSTS.items() if re.search(rf"(^|[.-]){re.escape(end)}$", host)), "")


def _dialect(line: Line, forced: Dialect | None) -> Dialect | None:
    if forced is not None:
        return forced
    if line.api:
        return APIS[line.api][0] if line.api in APIS else None
    return registry.by_path(line.request.method, line.request.path.partition("?")[0])


# -- judging --------------------------------------------------------------------------------------------------------


class Judged(msgspec.Struct, frozen=True):
    """What one exchange came to, as `replay --json` prints it. `why` is said of a request that was not judged."""

    id: str | int
    api: str
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    why: str | None = None


class JudgedAnswer(msgspec.Struct, frozen=True):
    """What an answer came to. `turn` is None where it was not judged: then `reason` says why."""

    turn: str | None
    reason: Reason | None = None
    tool_calls_released: tuple[dict[str, Any], ...] = ()
    text_preview: str = ""
    bytes_identical: bool = True


REFUSED: Final = "refused"
"""The `turn` of an answer that is the provider's refusal."""


def replay(line: Line, stage: Stage, forced: Dialect | None, tally: "Tally") -> dict[str, Any]:
    """Judge one exchange, count it, and return it as plain values."""
    dialect = _dialect(line, forced)
    server = family(line)
    sequence, judgement, why = _judge_request(line, dialect, server)
    judged = Judged(
        line.id, line.api or (dialect.api if dialect else ""), judgement.verdict, judgement.findings, why
    )
    answer = None
    if line.response is not None:
        declared = _declared(line, dialect, sequence, stage)
        answer = _judge_response(line.response, dialect, sequence, stage, declared)
    asked = Asked(
        dialect.api if dialect else judged.api,
        server,
        line.host or "",
        shown_model(dialect.model_of(line.request.data())) if dialect else "",
        client_family(line.request.wire_headers()),
    )
    tally.count(judged, answer, provider_said(line.response, asked), sequence, stage, asked)
    out: dict[str, Any] = msgspec.to_builtins(judged)
    if why is None:
        del out["why"]
    return {**out, **(msgspec.to_builtins(answer) if answer is not None else {})}


def _judge_request(
    line: Line, dialect: Dialect | None, server: str
) -> tuple[MessageSequence | None, Judgement, str | None]:
    """The request in words, its verdict, and why it was not judged."""
    if dialect is None:
        return None, Judgement(Verdict.UNJUDGED), f"{Reason.SURFACE_UNCOVERED}: no rules for this API yet"
    try:
        body = line.request.data()
        sequence = dialect.parse_request(body, line.request_context())
        judgement = judge(sequence, levels.levels(dialect.api, server))
        if line.context is not None and (line.context.retracted_previews or line.context.retracted_calls):
            judgement = refused_for([*line.context.leaks(dialect.said(body))], judgement)
        return sequence, judgement, None
    except Undecodable as error:
        return None, Judgement(Verdict.UNJUDGED), f"{error.reason}: {error}"
    except Exception as error:  # noqa: BLE001 - told and counted as unjudged, as live; the next line goes on
        return None, Judgement(Verdict.UNJUDGED), f"{Reason.INTERNAL}: {type(error).__name__}: {error}"


_SCHEMAS: Final = Schemas()


def _declared(
    line: Line, dialect: Dialect | None, sequence: MessageSequence | None, stage: Stage
) -> Declared | None:
    """What the answer's calls may be."""
    if dialect is None or sequence is None or sequence.setting.tools is None:
        return None
    tools = partial(dialect.declared_tools, line.request.data())
    return Declared(tools, _SCHEMAS, enforced=stage is Stage.ENFORCE_SCHEMA, used_ids=sequence.call_ids)


def _judge_response(
    response: Response,
    dialect: Dialect | None,
    sequence: MessageSequence | None,
    stage: Stage,
    declared: Declared | None,
) -> JudgedAnswer:
    if response.status is not None and not 200 <= response.status < 300:
        return JudgedAnswer(REFUSED)
    if dialect is None or sequence is None:
        return JudgedAnswer(None, Reason.SURFACE_UNCOVERED)
    try:
        pieces = response.pieces()
        if _is_stream(response, pieces):
            return _judge_stream(response, pieces, dialect, sequence, stage, declared)
        if response.content_type and "json" not in response.content_type:
            return JudgedAnswer(None, Reason.SURFACE_UNCOVERED)  # a binary event stream, a page of HTML
        return _judge_whole(response, b"".join(pieces), dialect, sequence, stage, declared)
    except ValueError:
        return JudgedAnswer(None, Reason.BODY_UNDECODABLE)  # no base64
    except Exception:  # noqa: BLE001 - told and counted as unjudged, as live; the next line goes on
        return JudgedAnswer(None, Reason.INTERNAL)


def _is_stream(response: Response, pieces: list[bytes]) -> bool:
    if response.content_type:
        return response.content_type.startswith("text/event-stream")
    return b"".join(pieces[:2]).lstrip().startswith((b"data:", b"event:", b":"))


def _judge_stream(
    response: Response,
    pieces: list[bytes],
    dialect: Dialect,
    sequence: MessageSequence,
    stage: Stage,
    declared: Declared | None,
) -> JudgedAnswer:
    """Through the gate, piece by piece; what it lets out is what the app would have got."""
    parser = dialect.open_stream(sequence)
    gate = Gate(
        parser,
        Assembler(sequence.choices, parser.closes_calls, declared=declared),
        holds=enforced(stage, class_of(sequence)),
        held_bytes_max=Limits().hold_bytes,
        retraction=lambda reason: dialect.stream_error(Trouble(reason, RETRACTED)),
    )
    out = b"".join([gate.receive(piece) for piece in pieces])
    out += gate.finish(ENDINGS[response.ending])
    if gate.verdict is None:
        return JudgedAnswer(None, Reason.SURFACE_UNCOVERED)
    text = preview.text_of(dialect.api, out, streamed=True)
    return _told(gate.verdict, text, identical=out == b"".join(pieces))


def _judge_whole(
    response: Response,
    body: bytes,
    dialect: Dialect,
    sequence: MessageSequence,
    stage: Stage,
    declared: Declared | None,
) -> JudgedAnswer:
    """One JSON value, by the code that judges streams. Where calls are gated a bad one is withheld as a whole."""
    ending = ENDINGS[response.ending]
    held = enforced(stage, class_of(sequence)) and sequence.uses_tools
    try:
        verdict = _verdict_on_whole(body, ending, dialect, sequence, declared)
    except Undecodable:
        if not held:
            return JudgedAnswer(None, Reason.BODY_UNDECODABLE)
        verdict = TurnVerdict(Turn.RETRACTED, Reason.STREAM_TRUNCATED)
    withheld = held and verdict.turn not in ENDED_WELL
    text = "" if withheld else preview.text_of(dialect.api, body, streamed=False)
    return _told(verdict, text, identical=not withheld)


def _verdict_on_whole(
    body: bytes, ending: Ending, dialect: Dialect, sequence: MessageSequence, declared: Declared | None
) -> TurnVerdict:
    """Raises Undecodable."""
    if ending is Ending.STALLED:
        return TurnVerdict(Turn.UNKNOWN, Reason.STREAM_STALLED)
    if ending is not Ending.CLEAN:
        return TurnVerdict(Turn.RETRACTED, Reason.STREAM_TRUNCATED)
    assembler = Assembler(sequence.choices, declared=declared)
    for event in dialect.parse_answer(body):
        assembler.receive(event)
    return assembler.close(ending)


def _told(verdict: TurnVerdict, text: str, *, identical: bool) -> JudgedAnswer:
    calls = tuple({"id": call.id, "name": call.name, "arguments": _arguments(call)} for call in verdict.calls)
    return JudgedAnswer(verdict.turn, verdict.reason, calls, text, identical)


def _arguments(call: Call) -> object:
    if call.free_text:
        return call.arguments
    try:
        return json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments  # JSON, but beyond what Python reads: a number of 5,000 digits, deep nesting


# -- what the provider did ------------------------------------------------------------------------------------------

PROVIDER: Final = get_args(Kind)
"""How the provider answered, see `telemetry.events.ProviderClass`."""


class Asked(NamedTuple):
    """Who asked whom: what the confusion matrix is told apart by. `api` is the dialect, `upstream` the recorded host."""

    api: str
    server: str
    upstream: str
    model: str
    client: str


def provider_said(response: Response | None, asked: Asked) -> Answered:
    """What the recorded answer says; an answer without a status says nothing."""
    if response is None or response.status is None:
        return Answered("unknown")
    try:
        body = b"".join(response.pieces())
    except ValueError:
        body = b""  # no base64: the status is left
    return classify(asked.api, asked.server, response.status, body)


# -- counts ---------------------------------------------------------------------------------------------------------

EXAMPLES_MAX: Final = 3


@dataclass(slots=True)
class Tally:
    """Counts over everything that was replayed. `examples` hold the first few of each kind: (id, what)."""

    exchanges: int = 0
    bad_lines: int = 0
    apis: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)
    answer_reasons: Counter[str] = field(default_factory=Counter)
    tool_calls_released: int = 0
    answers_changed: int = 0
    matrix: dict[str, Counter[str]] = field(default_factory=dict)
    rules: dict[str, Counter[str]] = field(default_factory=dict)
    confusion: dict[tuple[str, Asked], Counter[str]] = field(default_factory=dict)
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def count(
        self,
        judged: Judged,
        answer: JudgedAnswer | None,
        answered: Answered,
        sequence: MessageSequence | None,
        stage: Stage,
        asked: Asked,
    ) -> None:
        """Take one exchange."""
        provider = answered.kind
        self.exchanges += 1
        self.apis[judged.api or "(none)"] += 1
        self.verdicts[judged.verdict] += 1
        self.matrix.setdefault(judged.verdict, Counter())[provider] += 1
        if sequence is not None and stage is not Stage.OFF:
            self.actions[decide(stage, class_of(sequence), judged.verdict)] += 1
        for reason, level in {(finding.reason, finding.level) for finding in judged.findings}:
            self.reasons[reason] += 1
            self.rules.setdefault(f"{reason} {level}", Counter())[provider] += 1
        self._confront(judged, answered, asked)
        if judged.verdict in (Verdict.ILLEGAL, Verdict.WAITING):
            kind = f"{judged.verdict}, but the provider took it" if provider == "accepted" else judged.verdict
            self._keep(kind, judged.id, str(judged.findings[0]))
        elif judged.verdict is Verdict.LEGAL and provider == "refused_sequence":
            self._keep("legal, but the provider refused the sequence", judged.id, "")
        if answer is not None:
            self._count_answer(judged, answer)

    def _confront(self, judged: Judged, answered: Answered, asked: Asked) -> None:
        """As the view `confusion` of the evidence; every request of a recording was sent."""
        if judged.verdict in (Verdict.ILLEGAL, Verdict.WAITING):
            kind = {"accepted": "false_refusals", "refused_sequence": "true_refusals"}.get(
                answered.kind, "unknown"
            )
            for reason in {each.reason for each in judged.findings if each.level is Level.HARD}:
                self.confusion.setdefault((reason, asked), Counter())[kind] += 1
        elif judged.verdict is Verdict.LEGAL and answered.kind == "refused_sequence":
            self.confusion.setdefault((answered.reason or "", asked), Counter())["misses"] += 1

    def by_scope(self) -> list[Scope]:
        """The confusion matrix by rule, dialect, model and client, the worst first."""
        scopes = [
            msgspec.convert({"reason": reason, **asked._asdict(), **_judged_counts(counted)}, Scope)
            for (reason, asked), counted in self.confusion.items()
        ]
        return sorted(
            scopes, key=lambda each: (*_worst(each), each.server, each.upstream, each.model, each.client)
        )

    def by_rule(self) -> list[Rule]:
        """The same by rule and server."""
        whole: dict[tuple[str, str, str], Counter[str]] = {}
        for (reason, asked), counted in self.confusion.items():
            whole.setdefault((reason, asked.api, asked.server), Counter()).update(counted)
        rules = [
            Rule(reason=reason, api=api, server=server, **_judged_counts(counted))
            for (reason, api, server), counted in whole.items()
        ]
        return sorted(rules, key=lambda each: (*_worst(each), each.server))

    def _count_answer(self, judged: Judged, answer: JudgedAnswer) -> None:
        self.turns[answer.turn or "unjudged"] += 1
        self.tool_calls_released += len(answer.tool_calls_released)
        self.answers_changed += not answer.bytes_identical
        if answer.reason is not None:
            self.answer_reasons[answer.reason] += 1
        if answer.turn in (Turn.RETRACTED, Turn.UNKNOWN):
            self._keep(f"answer {answer.turn}", judged.id, answer.reason or "")

    def _keep(self, kind: str, id_: str | int, what: str) -> None:
        kept = self.examples.setdefault(kind, [])
        if len(kept) < EXAMPLES_MAX:
            kept.append((str(id_), what))

    def summary(self) -> dict[str, Any]:
        """All counts as plain values.

        `matrix` is our verdict against the provider's answer, `rules` the same by finding, and `confusion` what each
        rule got right and wrong, by server, model and client.
        """
        return {
            "exchanges": self.exchanges,
            "bad_lines": self.bad_lines,
            "apis": dict(self.apis.most_common()),
            "verdicts": {each: self.verdicts[each] for each in Verdict},
            "actions": dict(self.actions),
            "reasons": {each: self.reasons[each] for each in Reason if self.reasons[each]},
            "turns": dict(self.turns.most_common()),
            "answer_reasons": dict(self.answer_reasons.most_common()),
            "tool_calls_released": self.tool_calls_released,
            "answers_changed": self.answers_changed,
            "matrix": {each: _row(self.matrix.get(each)) for each in Verdict},
            "confusion": msgspec.to_builtins(self.by_scope()),
            "rules": [
                dict(zip(("reason", "level"), rule.split(), strict=True), **_row(row))
                for rule, row in sorted(self.rules.items())
            ],
            "examples": {
                kind: [{"id": id_, "what": what} for id_, what in kept]
                for kind, kept in self.examples.items()
            },
        }


def _row(counted: Counter[str] | None) -> dict[str, int]:
    return {each: counted[each] if counted else 0 for each in PROVIDER}


def _judged_counts(counted: Counter[str]) -> dict[str, int]:
    kinds = ("true_refusals", "false_refusals", "misses", "unknown", "refused_by_us")
    return {kind: counted[kind] for kind in kinds}


def _worst(rule: Rule) -> tuple[int, int, str, str]:
    """The order of the report."""
    return -rule.false_refusals - rule.misses, -rule.true_refusals - rule.refused_by_us, rule.reason, rule.api
