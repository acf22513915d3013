"""The report: numbers that a second count agrees with, on a terminal, as JSON and as one HTML file; never contents."""

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec
import pytest

from turngate.adapters.answers import classify
from turngate.adapters.clients import client_family
from turngate.adapters.levels import levels
from turngate.adapters.registry import DIALECTS
from turngate.proxy import cli
from turngate.proxy.cli_report import bar, parse_since
from turngate.proxy.replay import Line, Tally, parse, replay
from turngate.proxy.report_sections import headline, seconds
from turngate.proxy.rollout import Stage
from turngate.proxy.simulator import Simulator
from turngate.proxy.simulator.servers import SERVERS
from turngate.telemetry.events import (
    AnyEvent,
    CallDecided,
    EventsDropped,
    ExchangeEnded,
    FailureCounted,
    FindingMade,
    Outcome,
    PreviewRetracted,
    ProviderClass,
    ProxyStarted,
    ProxyStopped,
    RequestUnjudged,
    StageOrdered,
    StateChanged,
    WitnessSpoke,
)
from turngate.telemetry.metrics import Registry
from turngate.telemetry.queries import connect_readonly
from turngate.telemetry.recorder import Recorder
from turngate.telemetry.report import Report, gather
from turngate.validators.rules import judge

NOW = 1_772_370_000.0
HOUR = 3_600.0


def ended(
    operation: str,
    *,
    at_s: float = NOW - HOUR,
    verdict: str = "legal",
    outcome: Outcome = "passed",
    provider: ProviderClass = "accepted",
    reasons: tuple[str, ...] = (),
    provider_reason: str = "",
    model: str = "gpt-4.1",
    upstream: str = "openai",
    stage: str = "observe",
    error_type: str = "",
    tokens: tuple[int, int] = (-1, -1),
) -> ExchangeEnded:
    return ExchangeEnded(
        at_s=at_s,
        operation=operation,
        upstream=upstream,
        api="openai.chat",
        model=model,
        stream=True,
        stage=stage,
        verdict=verdict,
        outcome=outcome,
        status=200,
        error_type=error_type,
        messages=7,
        request_bytes=100,
        response_bytes=200,
        judge_s=0.0001,
        claim_s=0.0003,
        first_byte_s=0.2,
        total_s=1.5,
        server=upstream,
        client="openai-python/3",
        reasons=reasons,
        provider=provider,
        provider_reason=provider_reason,
        input_tokens=tokens[0],
        output_tokens=tokens[1],
    )


def finding(operation: str, reason: str, level: str = "hard", at: str = "/messages/3") -> FindingMade:
    action: Literal["would_reject", "reported"] = "would_reject" if level == "hard" else "reported"
    return FindingMade(
        at_s=NOW - HOUR,
        operation=operation,
        upstream="openai",
        api="openai.chat",
        reason=reason,
        level=level,
        at=at,
        action=action,
    )


def moved(
    operation: str, before: str, after: str, how: str, at_s: float, *through: str, upstream: str = "openai"
) -> StateChanged:
    return StateChanged(
        at_s=at_s,
        operation=operation,
        upstream=upstream,
        before=before,
        after=after,
        how=how,
        through=through,
    )


def call(
    operation: str, decision: Literal["released", "withheld"], reason: str, hold_s: float
) -> CallDecided:
    return CallDecided(
        at_s=NOW - HOUR,
        operation=operation,
        upstream="openai",
        api="openai.chat",
        decision=decision,
        reason=reason,
        held=True,
        hold_s=hold_s,
        hold_bytes=10,
    )


def retracted(operation: str, cause: str, *, enforced: bool = True) -> PreviewRetracted:
    return PreviewRetracted(
        at_s=NOW - HOUR,
        operation=operation,
        upstream="openai",
        api="openai.chat",
        cause=cause,
        enforced=enforced,
        preview_bytes=40,
    )


ORPHAN, MISPLACED = ("result.orphan",), ("result.misplaced",)
WEEK: tuple[AnyEvent, ...] = (
    ProxyStarted(at_s=NOW - 2 * HOUR, instance="i-1", version="1", pid=1),
    ProxyStarted(at_s=NOW - HOUR, instance="i-2", version="1", pid=2),
    ProxyStopped(at_s=NOW, instance="i-2", open_exchanges=0),
    StageOrdered(at_s=NOW - HOUR, instance="i-2", stage="enforce-tools", who="ada", why="a quiet week"),
    ended("old", at_s=NOW - 9 * 86_400),
    ended("fine-1", tokens=(100, 20)),
    ended("fine-2", upstream="azure", model="gpt-4o"),
    ended("odd", provider="", verdict="unjudged"),
    ended("true", verdict="illegal", reasons=ORPHAN, outcome="provider_error", provider="refused_sequence"),
    finding("true", "result.orphan"),
    ended("false", verdict="illegal", reasons=MISPLACED),
    finding("false", "result.misplaced"),
    ended(
        "missed",
        outcome="provider_error",
        provider="refused_sequence",
        provider_reason="call.unanswered",
        stage="enforce-tools",
    ),
    ended(
        "busy",
        verdict="waiting",
        reasons=("call.unanswered",),
        provider="refused_other",
        outcome="provider_error",
    ),
    ended(
        "stopped", verdict="illegal", reasons=ORPHAN, outcome="refused", provider="", stage="enforce-tools"
    ),
    finding("fine-1", "call.unknown_tool", "soft"),
    ended("cut", outcome="retracted", tokens=(500, 33), stage="enforce-tools"),
    retracted("cut", "stream.truncated"),
    call("cut", "withheld", "stream.truncated", 2.0),
    call("fine-1", "released", "", 4.0),
    ended("seen", outcome="retracted"),
    retracted("seen", "stream.no_stop", enforced=False),
    moved("gone", "", "UNKNOWN", "eof", NOW - 300, "DISPATCHING", "SENT"),
    ended("gone", outcome="unknown", provider="unknown"),
    moved("back", "", "UNKNOWN", "eof", NOW - 200, "DISPATCHING", "SENT"),
    moved("back", "UNKNOWN", "ABANDONED", "connection_end", NOW - 150),
    RequestUnjudged(at_s=NOW, operation="odd", surface="openai.chat", why="body.undecodable"),
    FailureCounted(at_s=NOW, where="judge", error="KeyError"),
    EventsDropped(at_s=NOW, event_class="other", count=5),
    WitnessSpoke(
        at_s=NOW,
        operation="fine-2",
        upstream="azure",
        api="openai.chat",
        witness="byte_mismatch",
        enforced=False,
        detail="response",
    ),
)


def write_evidence(data_dir: Path, events: Sequence[AnyEvent]) -> Path:
    """Evidence as the sidecar writes it; the folder `evidence`."""
    (data_dir / "spool").mkdir(parents=True)
    (data_dir / "spool" / "i-00000000.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(events))
    recorder = Recorder(data_dir / "spool", data_dir / "evidence", Registry("1"), clock=lambda: NOW)
    assert recorder.load_pending() == len(events)
    recorder.close()
    return data_dir / "evidence"


def report_of(evidence: Path, since_s: float = 0.0) -> Report:
    with connect_readonly(evidence, since_s=since_s) as database:
        return gather(database, since_s=since_s, now_s=NOW)


@pytest.fixture(name="evidence", scope="module")
def evidence_of_a_week(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_evidence(tmp_path_factory.mktemp("week"), WEEK)


@pytest.fixture(name="week", scope="module")
def report_of_a_week(evidence: Path) -> Report:
    return report_of(evidence, NOW - 7 * 86_400)


def test_an_order_stands_once_however_often_it_was_told(tmp_path: Path) -> None:
    def told(at_s: float, set_s: float, percent: int) -> StageOrdered:
        stage = "enforce-tools"
        return StageOrdered(
            at_s=at_s,
            instance="i",
            stage=stage,
            who="ada",
            why="",
            scope="azure",
            percent=percent,
            set_s=set_s,
        )

    events = [told(NOW - 3, NOW - 4, 10), told(NOW - 2, NOW - 2, 100), told(NOW - 1, NOW - 2, 100)]
    report = report_of(write_evidence(tmp_path, events))
    assert [(each.at_s, each.scope, each.percent) for each in report.orders] == [
        (NOW - 2, "azure", 100),
        (NOW - 3, "azure", 10),
    ]


def test_the_totals_hold_each_verdict_against_the_providers_answer(week: Report) -> None:
    totals = week.totals
    assert (totals.exchanges, totals.refused, totals.would_refuse, totals.unjudged) == (11, 1, 3, 1)
    assert (totals.true_refusals, totals.false_refusals, totals.unanswered) == (1, 1, 1)
    assert (totals.misses, totals.misses_enforced) == (1, 1)


def test_each_rule_has_its_row_of_the_confusion_matrix(week: Report) -> None:
    rows = {
        rule.reason: (rule.true_refusals, rule.false_refusals, rule.misses, rule.unknown, rule.refused_by_us)
        for rule in week.rules
    }
    assert rows == {
        "result.orphan": (1, 0, 0, 0, 1),
        "result.misplaced": (0, 1, 0, 0, 0),
        "call.unanswered": (0, 0, 1, 1, 0),
    }
    wrong = [each for each in week.scopes if each.false_refusals or each.misses]
    assert [(each.reason, each.upstream, each.model, each.client) for each in wrong] == [
        ("call.unanswered", "openai", "gpt-4.1", "openai-python/3"),
        ("result.misplaced", "openai", "gpt-4.1", "openai-python/3"),
    ]
    assert week.scopes[:2] == tuple(wrong)


VERDICTS = ("legal", "illegal", "waiting", "unjudged")
REASONS = ("result.orphan", "role.order", "call.unanswered")
ANSWERS: tuple[ProviderClass, ...] = ("", "accepted", "refused_sequence", "refused_other", "unknown")


def any_exchange(number: int, dice: random.Random) -> ExchangeEnded:
    verdict = dice.choice(VERDICTS)
    accused = verdict in ("illegal", "waiting")
    refused = accused and dice.random() < 0.3
    return ended(
        f"op-{number}",
        verdict=verdict,
        reasons=tuple(dice.sample(REASONS, dice.randint(1, 3))) if accused else (),
        outcome="refused" if refused else "passed",
        provider="" if refused else dice.choice(ANSWERS),
        provider_reason=dice.choice(("", *REASONS)),
        model=dice.choice(("gpt-4.1", "gpt-4o")),
    )


def counted(exchanges: Sequence[ExchangeEnded]) -> Counter[tuple[str, str]]:
    """The matrix by another hand: (reason, what it was)."""
    found: Counter[tuple[str, str]] = Counter()
    for each in exchanges:
        if each.verdict == "legal" and each.provider == "refused_sequence":
            found[each.provider_reason, "misses"] += 1
        if each.verdict not in ("illegal", "waiting"):
            continue
        kind = {"accepted": "false_refusals", "refused_sequence": "true_refusals"}.get(
            each.provider, "unknown"
        )
        for reason in each.reasons:
            found[reason, "refused_by_us" if each.outcome == "refused" else kind] += 1
    return found


def test_the_matrix_equals_an_independent_count(tmp_path: Path) -> None:
    exchanges = [any_exchange(number, random.Random(number)) for number in range(400)]
    report = report_of(write_evidence(tmp_path, exchanges))
    kinds = ("true_refusals", "false_refusals", "misses", "unknown", "refused_by_us")
    found = Counter({(rule.reason, kind): getattr(rule, kind) for rule in report.rules for kind in kinds})
    assert +found == counted(exchanges)
    for model in ("gpt-4.1", "gpt-4o"):
        scopes = [each for each in report.scopes if each.model == model]
        found = Counter({(scope.reason, kind): getattr(scope, kind) for scope in scopes for kind in kinds})
        assert +found == counted([each for each in exchanges if each.model == model])
    assert sum(bucket.exchanges for bucket in report.timeline) == 400


EXAMPLES = Path(__file__).parents[1] / "docs" / "rules" / "examples.json"
AGENTS = ("OpenAI/Python 3.57.0", "claude-cli/2.1.220 (external, cli)", "a program of somebody's")


@dataclass(frozen=True)
class Asked:
    """One request to a simulated provider, and what it said."""

    api: str
    server: str
    agent: str
    body: dict[str, object]
    status: int
    answer: bytes

    @property
    def operation(self) -> str:
        return f"{self.api} {self.server} {hash(self.answer + json.dumps(self.body).encode())}"

    def line(self) -> bytes:
        """As a recording holds it."""
        request = {"headers": {"User-Agent": self.agent}, "body": self.body}
        response = {"status": self.status, "body": self.answer.decode()}
        return json.dumps(
            {"api": self.api, "server": self.server, "host": "here", "request": request, "response": response}
        ).encode()

    def event(self) -> ExchangeEnded:
        """As the evidence holds it where nothing is enforced."""
        dialect = DIALECTS[self.api]
        judgement = judge(
            dialect.parse_request(json.dumps(self.body).encode()), levels(self.api, self.server)
        )
        said = classify(self.api, self.server, self.status, self.answer)
        hard = dict.fromkeys(str(each.reason) for each in judgement.findings if each.level == "hard")
        return msgspec.structs.replace(
            ended(
                self.operation,
                verdict=judgement.verdict,
                outcome="passed" if self.status == 200 else "provider_error",
                provider="accepted" if self.status == 200 else "refused_sequence",
                provider_reason=said.reason or "",
                reasons=tuple(hard) if judgement.verdict in ("illegal", "waiting") else (),
                upstream="here",
                model=str(self.body["model"]),
            ),
            api=self.api,
            server=self.server,
            client=client_family([(b"User-Agent", self.agent.encode())]),
        )


async def simulated_run() -> list[Asked]:
    """The rules' examples, illegal and legal, by several clients, at servers that refuse them and at some that do not."""
    examples = [each for told in json.loads(EXAMPLES.read_text()).values() for each in told["examples"]]
    asked: list[Asked] = []
    async with Simulator() as simulator, aiohttp.ClientSession() as session:
        for number, example in enumerate(examples * 2):
            simulated = example["server"] if example["server"] in SERVERS else "openai"
            simulator.use({"server": simulated, "refusals": number < len(examples) or number % 2 == 0})
            path = "messages" if example["api"] == "anthropic.messages" else "chat/completions"
            agent = AGENTS[number % len(AGENTS)]
            for body in (example["illegal"], example["legal"]):
                async with session.post(f"{simulator.url}/v1/{path}", json=body) as answer:
                    data = await answer.read()
                    asked.append(Asked(example["api"], example["server"], agent, body, answer.status, data))
    return asked


async def test_the_matrix_of_the_evidence_is_that_of_replay(tmp_path: Path) -> None:
    run = await simulated_run()
    tally = Tally()
    for asked in run:
        line = parse(asked.line(), "RUN:1")
        assert isinstance(line, Line)
        replay(line, Stage.OBSERVE, None, tally)
    report = report_of(write_evidence(tmp_path, [asked.event() for asked in run]))
    assert report.rules == tuple(tally.by_rule())
    assert report.scopes == tuple(tally.by_scope())
    seen = {kind for rule in report.rules for kind in msgspec.structs.asdict(rule) if getattr(rule, kind)}
    assert seen >= {"true_refusals", "false_refusals"}
    assert {scope.client for scope in report.scopes} == {"openai-python/3", "claude-code", "other"}


def test_streams_dispatches_failures_and_cost_are_told(week: Report) -> None:
    assert {each.cause: (each.count, each.told) for each in week.streams.retractions} == {
        "stream.truncated": (1, 1),
        "stream.no_stop": (1, 0),
    }
    assert (week.streams.held.answers, week.streams.held.p50_s, week.streams.held.max_s) == (2, 3.0, 4.0)
    assert [(each.upstream, each.count, each.oldest_age_s) for each in week.dispatches.unknown] == [
        ("openai", 1, 300.0)
    ]
    assert [(each.state, each.how, each.p50_s) for each in week.dispatches.resolutions] == [
        ("ABANDONED", "connection_end", 50.0)
    ]
    assert [(each.name, each.count) for each in week.ours.failures] == [("judge: KeyError", 1)]
    assert [(each.name, each.count) for each in week.ours.dropped] == [("other", 5)]
    assert (week.ours.starts, week.ours.not_stopped) == (2, 1)
    assert {each.outcome: (each.input_tokens, each.output_tokens, each.uncounted) for each in week.cost} == {
        "retracted": (500, 33, 1),
        "unknown": (0, 0, 1),
    }


def test_every_witness_has_a_row_even_if_it_had_nothing_to_say(week: Report) -> None:
    assert {each.witness: (each.enforced, each.watched) for each in week.witnesses} == {
        "byte_mismatch": (0, 1),
        "partial_tool_dispatch": (0, 0),
    }


def test_the_worst_examples_come_first_and_point_at_the_place(week: Report) -> None:
    assert [(each.kind, each.operation) for each in week.examples] == [
        ("miss", "missed"),
        ("false refusal", "false"),
        ("witness", "fine-2"),
        ("still unknown", "gone"),
        ("calls withheld", "cut"),
        ("broken answer", "seen"),
    ]
    assert (week.examples[1].reason, week.examples[1].at) == ("result.misplaced", "/messages/3")


def test_what_is_older_than_asked_for_is_left_out(evidence: Path) -> None:
    assert report_of(evidence).totals.exchanges == 12
    assert report_of(evidence, NOW - 7 * 86_400).totals.exchanges == 11
    assert report_of(evidence, NOW - 60).totals.exchanges == 0


# -- the command ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Said:
    """What a command came to."""

    code: int
    out: str
    err: str


Turngate = Callable[..., Said]


@pytest.fixture(name="turngate")
def turngate_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Turngate:
    for name in [name for name in os.environ if name.startswith("TURNGATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["turngate", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return Said(int(ended.value.code or 0), said.out, said.err)

    return run


ALL = ("--since", "2026-01-01")


def test_the_terminal_gets_all_sections_and_no_colours_in_a_pipe(turngate: Turngate, evidence: Path) -> None:
    said = turngate("report", "--data-dir", evidence.parent, *ALL)
    assert (said.code, said.err) == (0, "")
    assert "\x1b" not in said.out
    for title in (
        *("Is Turngate honest?", "Traffic", "Findings per rule", "Streams and tool calls", "Dispatches"),
        *("Our own failures", "Cost of breakage", "Worst examples", "turngate explain"),
    ):
        assert title in said.out
    assert re.search(r"result\.misplaced +openai\.chat, openai +0 +1 +0 +0 +0", said.out)


def test_json_is_one_object_with_the_same_numbers(turngate: Turngate, evidence: Path) -> None:
    said = turngate("report", "--data-dir", evidence.parent, *ALL, "--json")
    told = json.loads(said.out)
    assert (said.code, told["totals"]["exchanges"], told["totals"]["misses"]) == (0, 12, 1)
    assert msgspec.convert(told, Report).rules == report_of(evidence).rules


class Page(HTMLParser):
    """Reads a page: its elements must close in order, and nothing may be fetched."""

    EMPTY = frozenset({"meta", "link", "img", "br", "hr", "input", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()
        self.words: list[str] = []
        self.classes: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        for name, value in attributes:
            assert name not in ("src", "href", "onclick", "onload"), (tag, name)
            assert "://" not in (value or "")
            if name == "class":
                self.classes.update((value or "").split())
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read_page(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    return page


def test_the_html_page_is_whole_and_needs_nothing_else(
    turngate: Turngate, evidence: Path, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    said = turngate("report", "--data-dir", evidence.parent, *ALL, "--html", file)
    assert (said.code, said.out) == (0, "")
    page = read_page(file)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.seen)
    assert page.seen["svg"] == 5  # the chart, and a mark for each of its four kinds
    assert page.classes["stopped"] > 1
    text = " ".join(page.words)
    assert "A witness found Turngate at fault" in text
    assert "result.misplaced at /messages/3" in text
    assert "@import" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_names_that_look_like_markup_are_shown_as_text(turngate: Turngate, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>[/bold]"
    write_evidence(tmp_path / "data", [ended("op", model=evil, upstream=evil)])
    assert turngate("report", "--data-dir", tmp_path / "data", *ALL, "--html", "r.html").code == 0
    page = read_page(tmp_path / "r.html")
    assert page.seen["script"] == 0
    assert evil in page.words
    assert evil in turngate("report", "--data-dir", tmp_path / "data", *ALL).out


def test_no_evidence_gets_a_kind_word_and_no_error(turngate: Turngate, tmp_path: Path) -> None:
    said = turngate("report", "--data-dir", tmp_path / "new")
    assert (said.code, said.out) == (0, "")
    assert "nothing is written down yet" in said.err
    assert str(tmp_path / "new" / "evidence") in said.err
    assert not (tmp_path / "new").exists()
    said = turngate("report", "--data-dir", tmp_path / "new", "--json")
    assert json.loads(said.out)["totals"]["exchanges"] == 0
    said = turngate("report", "--data-dir", tmp_path / "new", "--html", "empty.html")
    assert said.code == 0
    assert "No judged exchange" in " ".join(read_page(tmp_path / "empty.html").words)


EXITS: dict[str, tuple[Sequence[AnyEvent], str, int, str]] = {
    "a miss": (WEEK, "misses", 1, "misses: 1"),
    "any of several": (WEEK, "witnesses,false-refusals", 1, "witnesses: 1, false-refusals: 1"),
    "losses count as failures": (WEEK, "failures", 1, "failures: 6"),
    "none of those named": ([ended("op")], "misses,false-refusals,witnesses,failures,no-evidence", 0, ""),
    "nothing to judge by": ([], "no-evidence", 1, "no-evidence: 1"),
    "a watched half call is the provider's": (
        [
            ended("op"),
            WitnessSpoke(
                at_s=NOW,
                operation="op",
                upstream="",
                api="",
                witness="partial_tool_dispatch",
                enforced=False,
                detail="",
            ),
        ],
        *("witnesses", 0, ""),
    ),
    "a word that is none": ([ended("op")], "rejects", 64, "choose among misses"),
}


@pytest.mark.parametrize(("events", "named", "code", "text"), EXITS.values(), ids=EXITS)
def test_a_script_can_stop_at_faults(
    turngate: Turngate, tmp_path: Path, events: Sequence[AnyEvent], named: str, code: int, text: str
) -> None:
    write_evidence(tmp_path / "data", events)
    said = turngate("report", "--data-dir", tmp_path / "data", *ALL, "--json", "--fail-on", named)
    assert said.code == code
    assert text in said.err


BAD_OPTIONS: dict[str, tuple[list[str], int, str]] = {
    "a time that is none": (["--since", "yesterday"], 64, "write 7d, 24h, 30m or a day"),
    "two forms": (["--json", "--html", "x.html"], 64, "choose one"),
    "a file that cannot be written": (["--html", "absent/x.html"], 64, "cannot write absent/x.html"),
}


@pytest.mark.parametrize(("options", "code", "text"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_are_told(
    turngate: Turngate, evidence: Path, options: list[str], code: int, text: str
) -> None:
    said = turngate("report", "--data-dir", evidence.parent, *options)
    assert (said.code, said.out) == (code, "")
    assert text in said.err


def test_evidence_that_cannot_be_read_is_no_empty_report(turngate: Turngate, tmp_path: Path) -> None:
    (tmp_path / "data" / "evidence").mkdir(parents=True)
    (tmp_path / "data" / "evidence" / "2026-03-01.duckdb").write_text("no database" * 1000)
    said = turngate("report", "--data-dir", tmp_path / "data", *ALL)
    assert (said.code, said.out) == (70, "")
    assert "cannot read the evidence" in said.err


SINCE = {
    "7d": NOW - 604_800,
    "24h": NOW - 86_400,
    "30m": NOW - 1_800,
    "2026-02-28": 1_772_236_800.0,
    "999999d": 0.0,
}


@pytest.mark.parametrize(("text", "since_s"), SINCE.items())
def test_since_takes_ages_and_days(text: str, since_s: float) -> None:
    assert parse_since(text, NOW) == since_s


HEADLINES: dict[str, tuple[list[AnyEvent], str]] = {
    "nothing to object to": ([ended("op")], "Nothing to object to in 1 exchanges."),
    "all right": (
        [ended("op", verdict="illegal", reasons=ORPHAN, provider="refused_sequence")],
        "The provider agreed wherever it judged",
    ),
    "not yet known": (
        [ended("op", verdict="illegal", reasons=ORPHAN, outcome="refused", provider="")],
        "neither confirmed nor contradicted",
    ),
    "wrong": (
        [ended("op", verdict="illegal", reasons=ORPHAN), ended("op-2", provider="refused_sequence")],
        "1 false refusal and 1 miss",
    ),
}


@pytest.mark.parametrize(("events", "text"), HEADLINES.values(), ids=HEADLINES)
def test_one_sentence_says_how_it_is(tmp_path: Path, events: list[AnyEvent], text: str) -> None:
    assert text in headline(report_of(write_evidence(tmp_path, events)))[0]


NUMBERS = {
    0.0: "0 µs",
    0.0004: "400 µs",
    0.9995: "1 s",
    1.5: "1.5 s",
    119.0: "119 s",
    300.0: "5 min",
    7_200.0: "2 h",
    864_000.0: "10 d",
}


@pytest.mark.parametrize(("value_s", "text"), NUMBERS.items())
def test_durations_are_said_as_people_say_them(value_s: float, text: str) -> None:
    assert seconds(value_s) == text


def test_a_bar_shows_what_is_not_nothing() -> None:
    assert [len(bar(part)) for part in (0, 0.0001, 0.5, 1)] == [0, 1, 4, 8]


def test_a_terminal_gets_colours_and_is_told_what_is_being_read(evidence: Path) -> None:
    script = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    command = [sys.executable, "-m", "turngate", "report", "--data-dir", str(evidence.parent), *ALL]
    done = subprocess.run(
        [sys.executable, "-c", script, *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    assert done.returncode == 0
    assert "\x1b[1;31m" in done.stdout
    assert "reading " in done.stdout
