"""One line for each exchange: what it says, where it goes, and that no reader can hold the observer up."""

import json
import os
import pty
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tracing import FINDING, an_observer, ended

from turngate.telemetry import logs as logs_module
from turngate.telemetry.events import ExchangeEnded, Outcome
from turngate.telemetry.logs import COLOURS, TEXT_MAX, ExchangeLog, as_json, as_text, shown

REFUSED: Final = ended(
    at_s=1_772_366_584.1236,
    operation="op-1f2e3d4c",
    verdict="illegal",
    outcome="refused",
    status=400,
    error_type="policy_sequence",
    reasons=("result.orphan",),
    total_s=0.00081,
)
LINES: Final[dict[str, tuple[ExchangeEnded, str]]] = {
    "passed": (
        ended(at_s=0.0),
        "00:00:00.000 passed 200 openai openai.chat gpt-4.1 enforce-tools 2000.0ms op-1",
    ),
    "refused": (
        REFUSED,
        "12:03:04.123 refused 400 openai openai.chat gpt-4.1 enforce-tools 0.8ms illegal result.orphan op-1f2e3d4c",
    ),
    "passed in observe, would have been refused": (
        ended(at_s=0.0, verdict="illegal", stage="observe", reasons=("a", "b")),
        "00:00:00.000 passed 200 openai openai.chat gpt-4.1 observe 2000.0ms illegal a b op-1",
    ),
    "broken off": (
        ended(at_s=0.0, outcome="unknown", status=0, error_type="provider_closed"),
        "00:00:00.000 unknown - openai openai.chat gpt-4.1 enforce-tools 2000.0ms provider_closed op-1",
    ),
    "relayed": (
        ended(at_s=0.0, api="", model="", stage="off", verdict="unjudged"),
        "00:00:00.000 passed 200 openai - - off 2000.0ms unjudged op-1",
    ),
}


@pytest.mark.parametrize(("event", "line"), LINES.values(), ids=LINES)
def test_a_line_is_readable(event: ExchangeEnded, line: str) -> None:
    assert as_text(event) == line + "\n"


@pytest.mark.parametrize("event", [event for event, _ in LINES.values()], ids=LINES)
def test_colours_change_nothing_but_colours(event: ExchangeEnded) -> None:
    coloured = as_text(event, colour=True)
    assert "\x1b[" in coloured
    for code in {*COLOURS.values(), logs_module.GREY, logs_module.PLAIN}:
        coloured = coloured.replace(code, "")
    assert coloured == as_text(event)


def test_every_outcome_has_a_colour_and_what_would_be_refused_has_another() -> None:
    assert set(COLOURS) == set(get_args(Outcome))
    assert f"{logs_module.GREEN}passed" in as_text(ended(), colour=True)
    assert f"{logs_module.YELLOW}passed" in as_text(ended(reasons=("a",)), colour=True)


def test_json_has_the_same_fields_every_time() -> None:
    said = json.loads(as_json(REFUSED))
    assert said == {
        "time": "2026-03-01T12:03:04.123+00:00",
        "operation": "op-1f2e3d4c",
        "upstream": "openai",
        "api": "openai.chat",
        "model": "gpt-4.1",
        "stage": "enforce-tools",
        "verdict": "illegal",
        "outcome": "refused",
        "status": 400,
        "reasons": ["result.orphan"],
        "error_type": "policy_sequence",
        "total_ms": 0.8,
    }
    assert said.keys() == json.loads(as_json(ended(model="", api=""))).keys()


def test_the_page_shows_these_lines() -> None:
    page = (Path(__file__).parents[1] / "docs" / "tracing.md").read_text()
    assert as_text(REFUSED) in page
    assert as_json(REFUSED) in page


@given(st.text(), st.text())
def test_names_make_no_lines_and_move_no_cursor(model: str, upstream: str) -> None:
    event = ended(model=model, upstream=upstream)
    line = as_text(event)
    assert line.endswith("\n")
    assert line[:-1].isprintable()
    if not any(0xD800 <= ord(c) < 0xE000 for c in model + upstream):  # the spool takes no such event
        assert as_json(event).count("\n") == 1
    assert len(shown(model)) <= TEXT_MAX


# -- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def a_pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def test_lines_arrive_whole_and_in_order_and_other_events_are_none() -> None:
    lost: list[int] = []
    with a_pipe() as (reader, writer):
        log = ExchangeLog(writer, "json", lost=lost.append)
        log.observe_all([ended(operation=f"op-{n}") for n in range(100)] + [FINDING])
        log.observe_all([FINDING])
        assert select.select([reader], [], [], 0)[0]
        found = [json.loads(line)["operation"] for line in os.read(reader, 1 << 20).splitlines()]
    assert found == [f"op-{n}" for n in range(100)]
    assert lost == []


def test_a_reader_that_stands_still_costs_lines_and_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "WAIT_S", 0.01)
    lost: list[int] = []
    with a_pipe() as (reader, writer):
        log = ExchangeLog(writer, "text", lost=lost.append)
        for _ in range(3):
            log.observe_all([ended()] * 1000)  # more than a pipe holds: would block for ever
        read = os.read(reader, 1 << 20)
        log.observe_all([ended()])
        read += os.read(reader, 1 << 20)
    whole = read.splitlines()
    assert set(whole) == {as_text(ended()).encode().rstrip()}
    assert sum(lost) == 3001 - len(whole)
    assert len(lost) == 3


def test_without_a_reader_lines_are_counted_and_nothing_is_raised() -> None:
    lost: list[int] = []
    with a_pipe() as (reader, writer):
        log = ExchangeLog(writer, "text", lost=lost.append)
        os.dup2(writer, reader)  # the reading end is gone
        log.observe_all([ended()] * 3)
    assert lost == [3]


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
    ids=str,
)
def test_a_terminal_is_coloured_unless_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], coloured: bool
) -> None:
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    if "NO_COLOR" not in environment:
        monkeypatch.delenv("NO_COLOR", raising=False)
    master, slave = pty.openpty()
    try:
        ExchangeLog(slave, "text", lost=lambda lines: pytest.fail("lost")).observe_all([ended()])
        assert (b"\x1b[" in os.read(master, 4096)) == coloured
    finally:
        os.close(master)
        os.close(slave)


LOGS: Final[dict[str, tuple[dict[str, Any], bool]]] = {
    "off is the default": ({}, False),
    "auto is JSON where there is no terminal": ({"log": "auto"}, True),
    "json": ({"log": "json"}, True),
}


@pytest.mark.parametrize(("settings", "expected"), LOGS.values(), ids=LOGS)
async def test_an_observer_logs_what_it_loads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], settings: dict[str, Any], expected: bool
) -> None:
    event = ended(at_s=time.time())
    async with an_observer(tmp_path, **settings) as spool:
        spool.emit(event)
    assert capfd.readouterr().err == (as_json(event) if expected else "")


async def test_an_observer_logs_as_text_where_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    event = msgspec.structs.replace(REFUSED, at_s=time.time())
    async with an_observer(tmp_path, log="text") as spool:
        spool.emit(event)
    assert capfd.readouterr().err == as_text(event)
