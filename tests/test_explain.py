"""One operation on one page: what was written down, in order, and what each other stage would have done."""

import json
import os
import sqlite3
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from turngate.adapters import levels
from turngate.proxy import cli, cli_explain
from turngate.proxy.rollout import Stage
from turngate.telemetry import schema
from turngate.telemetry.events import (
    AnyEvent,
    CallDecided,
    ExchangeEnded,
    FindingMade,
    PreviewLeaked,
    PreviewRetracted,
    RequestUnjudged,
    StateChanged,
    WitnessSpoke,
)
from turngate.telemetry.metrics import Registry
from turngate.telemetry.recorder import Recorder

NOW: Final = 1_772_366_400.0
WHERE: Final[dict[str, Any]] = {"operation": "op-1", "upstream": "openai", "api": "openai.chat"}


def ended(**said: Any) -> ExchangeEnded:
    fields = {
        name: 0 for name, sql_type in schema.TABLES["exchange_ended"] if sql_type in ("BIGINT", "DOUBLE")
    }
    words = {name: "" for name, sql_type in schema.TABLES["exchange_ended"] if sql_type == "VARCHAR"}
    usual: dict[str, Any] = {
        **WHERE,
        "at_s": NOW,
        "model": "gpt-4.1",
        "stream": True,
        "stage": "observe",
        "verdict": "legal",
        "outcome": "passed",
        "status": 200,
        "messages": 3,
        "total_s": 2.0,
        "judge_s": 0.001,
        "first_byte_s": 0.5,
    }
    return msgspec.convert({"event": "exchange_ended", **fields, **words, **usual, **said}, ExchangeEnded)


def finding(reason: str = "result.orphan") -> FindingMade:
    return FindingMade(
        at_s=NOW - 1.99, **WHERE, reason=reason, level="hard", at="/messages/2", action="would_reject"
    )


def call(decision: Any = "released", reason: str = "", *, held: bool = True) -> CallDecided:
    return CallDecided(
        at_s=NOW - 0.1, **WHERE, decision=decision, reason=reason, held=held, hold_s=1.2, hold_bytes=300
    )


CUT: Final = PreviewRetracted(
    at_s=NOW - 0.1, **WHERE, cause="stream.truncated", enforced=False, preview_bytes=12
)


@dataclass(frozen=True, slots=True)
class Said:
    """What a command came to."""

    code: int
    out: str
    err: str


Explain = Callable[..., Said]


@pytest.fixture(name="explain")
def explain_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Explain:
    """`turngate explain` on evidence of these events; twice in one test: another folder."""
    for name in [name for name in os.environ if name.startswith("TURNGATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    data_dir = tmp_path / "data"

    def run(events: Sequence[AnyEvent], *options: str, operation: str = "op-1") -> Said:
        (data_dir / "spool").mkdir(parents=True)
        (data_dir / "spool" / "i-00000000.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(events))
        recorder = Recorder(data_dir / "spool", data_dir / "evidence", Registry("1"), clock=lambda: NOW)
        assert recorder.load_pending() == len(events)
        recorder.close()
        arguments = ["turngate", "explain", operation, "--data-dir", str(data_dir), *options]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return Said(int(end.value.code or 0), said.out, said.err)

    return run


def test_the_page_tells_the_whole_story_in_order(explain: Explain) -> None:
    events = [
        ended(
            verdict="illegal",
            outcome="retracted",
            provider="accepted",
            reasons=["result.orphan"],
            input_tokens=9,
        ),
        finding(),
        StateChanged(
            at_s=NOW - 1,
            operation="op-1",
            upstream="openai",
            before="",
            after="UNKNOWN",
            how="eof",
            through=("DISPATCHING", "SENT"),
        ),
        call("withheld", "stream.truncated"),
        CUT,
        WitnessSpoke(at_s=NOW, **WHERE, witness="byte_mismatch", enforced=False, detail="response"),
    ]
    said = explain(events)
    assert (said.code, said.err) == (0, "")
    told = [
        "op-1",
        "illegal; the app got: retracted (200), observe",
        "the provider: accepted, 9 input tokens",
        "hard result.orphan at /messages/2",
        "Send the assistant message with that call",
        "docs/rules/result.orphan.md",
        "Timeline from 2026-03-01 11:59:58 UTC",
        "+0.000 s  request of",
        "judged illegal in 1 ms",
        "hard result.orphan at /messages/2: would_reject",
        "+0.500 s  first byte",
        "dispatch DISPATCHING -> SENT -> UNKNOWN (eof)",
        "tool call withheld: stream.truncated, held for 1.2 s, 300 B",
        "turn retracted: stream.truncated, 12 bytes had been shown, the app was not told",
        "witness: byte_mismatch response",
        "+2.000 s  ended: retracted, status 200",
        "What each stage would do with a request with tools",
    ]
    places = [said.out.find(each) for each in told]
    assert -1 not in places, told[places.index(-1)]
    assert places == sorted(places)


PASS, MARK, REFUSE = (
    "pass",
    "pass, and record that it would be refused",
    "refuse with 400: the provider never sees it",
)
AS_IS, RECORD = "pass as it is", "pass as it is, and record it"
BROKEN = "pass as it is, broken (stream.truncated)"
HELD = "hold 1 tool call until the turn has ended well"
ENDED = "end with an error event (stream.truncated); 1 tool call withheld"

STAGES: dict[str, tuple[Sequence[AnyEvent], list[tuple[str, str]]]] = {
    "a legal text": (
        [ended()],
        [("pass unread", AS_IS), (PASS, RECORD), (PASS, PASS), (PASS, PASS)],
    ),
    "an illegal text": (
        [ended(verdict="illegal"), finding("role.order")],
        [("pass unread", AS_IS), (MARK, RECORD), *[(REFUSE, "none")] * 2],
    ),
    "an illegal request with tools": (
        [ended(verdict="illegal"), finding()],
        [("pass unread", AS_IS), (MARK, RECORD), (MARK, RECORD), (REFUSE, "none")],
    ),
    "one that was refused then": (
        [ended(verdict="waiting", outcome="refused", stage="enforce-tools"), finding("call.unanswered")],
        [
            ("pass unread", "not known: it was refused then, so there was none"),
            *[(MARK, "not known: it was refused then, so there was none")] * 2,
            (REFUSE, "none"),
        ],
    ),
    "whole calls": (
        [ended(), call(held=False)],
        [("pass unread", AS_IS), (PASS, RECORD), (PASS, RECORD), (PASS, f"{HELD}, then release")],
    ),
    "a broken answer with a call": (
        [ended(outcome="retracted"), call("withheld", "stream.truncated"), CUT],
        [
            ("pass unread", BROKEN),
            (PASS, f"{BROKEN}, and record it"),
            (PASS, f"{BROKEN}, and record it"),
            (PASS, ENDED),
        ],
    ),
    "no answer": (
        [ended(outcome="unsent")],
        [("pass unread", "none came (unsent)"), *[(PASS, "none came (unsent)")] * 3],
    ),
    "not judged": (
        [
            ended(verdict="unjudged"),
            RequestUnjudged(at_s=NOW, operation="op-1", surface="x", why="limit.body"),
        ],
        [("pass unread", AS_IS), (PASS, RECORD), *[(PASS, PASS)] * 2],
    ),
}


@pytest.mark.parametrize(("events", "would"), STAGES.values(), ids=STAGES)
def test_each_stage_says_what_it_would_have_done(
    explain: Explain, events: Sequence[AnyEvent], would: list[tuple[str, str]]
) -> None:
    told = json.loads(explain(events, "--json").out)
    assert [each["stage"] for each in told["stages"]] == list(Stage)
    assert [(each["request"], each["answer"]) for each in told["stages"]] == [
        *would,
        would[-1],  # of what was declared, which alone sets enforce-schema apart, the evidence says nothing
    ]
    in_force = [each["stage"] for each in told["stages"] if each["in_force"]]
    assert in_force == [events[0].stage if isinstance(events[0], ExchangeEnded) else ""]


def test_a_leak_is_told_on_both_sides(explain: Explain) -> None:
    leak = PreviewLeaked(
        at_s=NOW,
        operation="op-2",
        upstream="openai",
        api="openai.chat",
        reason="preview.leaked",
        cause="stream.truncated",
        retracted_operation="op-1",
        at="/messages/4",
        whole=True,
    )
    told = json.loads(explain([ended(outcome="retracted"), CUT, leak], "--json").out)
    assert told["leaked_by"][0]["operation"] == "op-2"
    assert "what it showed came back in op-2 at /messages/4" in [each["what"] for each in told["timeline"]]


def write_ledger(path: Path, operation: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE dispatches (operation TEXT PRIMARY KEY, state TEXT, handle TEXT)")
        database.execute("INSERT INTO dispatches VALUES (?, 'STREAMING', '')", (operation,))
    database.close()


def test_the_ledgers_row_is_shown_as_it_stands(explain: Explain, tmp_path: Path) -> None:
    write_ledger(tmp_path / "data" / "ledger.sqlite3", "op-1")
    before = (tmp_path / "data" / "ledger.sqlite3").read_bytes()
    assert json.loads(explain([ended()], "--json").out)["ledger"] == {
        "operation": "op-1",
        "state": "STREAMING",
        "handle": "",
    }
    assert (tmp_path / "data" / "ledger.sqlite3").read_bytes() == before


def test_an_exchange_that_only_the_ledger_knows_is_going_on(explain: Explain, tmp_path: Path) -> None:
    write_ledger(tmp_path / "data" / "ledger.sqlite3", "op-1")
    said = explain([])
    assert said.code == 0
    assert "not ended, as far as it was told" in said.out
    assert "STREAMING" in said.out
    assert "What each stage would do" not in said.out


def test_an_unknown_operation_says_where_was_looked(explain: Explain, tmp_path: Path) -> None:
    said = explain([ended()], operation="op-9")
    assert (said.code, said.out) == (1, "")
    assert "no operation op-9" in said.err
    assert str(tmp_path / "data" / "evidence") in said.err
    assert "ledger.sqlite3" in said.err


def test_a_ledger_that_cannot_be_read_is_told(explain: Explain, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "ledger.sqlite3").write_bytes(b"no database" * 1000)
    said = explain([ended()])
    assert (said.code, said.out) == (70, "")
    assert "cannot read the ledger" in said.err


def test_every_rule_that_may_refuse_has_a_remedy_and_a_page() -> None:
    reasons = {entry.reason for entry in levels.ENTRIES}
    assert reasons <= set(cli_explain.REMEDIES)
    docs = Path(__file__).parents[1]
    assert all((docs / cli_explain.page_of(reason)).is_file() for reason in reasons)
