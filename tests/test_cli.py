"""The commands: exit codes and words for scripts and people, and `check` as the sidecar would judge."""

import asyncio
import csv
import io
import json
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import aiohttp
import duckdb
import msgspec
import pytest
from rich.console import Console

from turngate.adapters.openai_chat import OpenAIChat
from turngate.proxy import cli, cli_check, cli_query
from turngate.proxy.simulator import Simulator
from turngate.telemetry.events import AnyEvent, ExchangeEnded, Outcome
from turngate.telemetry.metrics import Registry
from turngate.telemetry.queries import connect_readonly
from turngate.telemetry.recorder import Recorder
from turngate.telemetry.schema import TABLES
from turngate.telemetry.spool import Spool

Json = dict[str, Any]


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
    """The command line, in this process and with no settings but a test's own."""
    for name in [name for name in os.environ if name.startswith("TURNGATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path, stdin: bytes = b"") -> Said:
        monkeypatch.setattr(sys, "argv", ["turngate", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return Said(int(ended.value.code or 0), out, err)

    return run


# check

USER: Json = {"role": "user", "content": "Weather?"}
CALL: Json = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLING: Json = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: Json = {"role": "tool", "tool_call_id": "call_1", "content": "14"}
USE: Json = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
USED: Json = {"role": "assistant", "content": [USE]}
USE_RESULT: Json = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "14"}
WEATHER: list[Json] = [{"name": "weather", "input_schema": {"type": "object"}}]
USE_ANSWERED: Json = {"role": "user", "content": [USE_RESULT]}


def chat(*messages: Json, **more: object) -> Json:
    return {"model": "gpt-4.1", "messages": list(messages), **more}


def anthropic(*messages: Json) -> Json:
    body = {"model": "claude-sonnet-4-5", "max_tokens": 100, "messages": list(messages)}
    return {**body, "tools": WEATHER} if USED in messages else body


CHAT, MESSAGES = "openai.chat", "anthropic.messages"

CHECKED: dict[str, tuple[Json | bytes, int, str, str, list[tuple[str, str]]]] = {
    "a chat round is legal": (chat(USER, CALLING, RESULT), 0, CHAT, "legal", []),
    "a messages round is legal": (anthropic(USER, USED, USE_ANSWERED), 0, MESSAGES, "legal", []),
    "a result without its call is illegal": (
        chat(USER, RESULT),
        *(1, CHAT, "illegal", [("result.orphan", "/messages/1")]),
    ),
    "a tool use without a result is illegal": (
        anthropic(USER, USED, USER, {"role": "assistant", "content": "Mild."}, USER),
        *(1, MESSAGES, "illegal", [("call.unanswered", "/messages/1/content/0")]),
    ),
    "an open call at the end is waiting": (
        chat(USER, CALLING),
        *(2, CHAT, "waiting", [("call.unanswered", "/messages/1/tool_calls/0")]),
    ),
    "no JSON is unjudged": (b"{", 3, "", "unjudged", []),
    "JSON without messages is unjudged": ({"prompt": "Weather?"}, 3, "", "unjudged", []),
}


@pytest.mark.parametrize("from_stdin", [False, True], ids=["file", "stdin"])
@pytest.mark.parametrize(("body", "code", "api", "verdict", "found"), CHECKED.values(), ids=CHECKED)
def test_check_tells_its_verdict_by_exit_code_and_json(
    turngate: Turngate,
    tmp_path: Path,
    body: Json | bytes,
    code: int,
    api: str,
    verdict: str,
    found: list[tuple[str, str]],
    *,
    from_stdin: bool,
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    file = tmp_path / "body.json"
    file.write_bytes(raw)
    name = "-" if from_stdin else str(file)
    said = turngate("check", name, "--json", stdin=raw if from_stdin else b"")
    line = json.loads(said.out)
    assert (said.code, said.out.count("\n"), said.err) == (code, 1, "")
    assert (line["id"], line["api"], line["verdict"]) == (name, api, verdict)
    assert [(each["reason"], each["at"]) for each in line["findings"]] == found
    assert all(set(each) == {"reason", "level", "at", "message", "remedy"} for each in line["findings"])


GUESSES: dict[str, tuple[Json, str, str]] = {
    "a tool role": (chat(USER, CALLING, RESULT), CHAT, "certain"),
    "a tool_result block": (anthropic(USER, USED, USE_ANSWERED), MESSAGES, "certain"),
    "a top-level system": ({"system": "Be brief.", "messages": [USER]}, MESSAGES, "certain"),
    "a Claude model with max_tokens": (anthropic(USER), MESSAGES, "likely"),
    "nothing special": (chat(USER), CHAT, "likely"),
}


@pytest.mark.parametrize(("body", "api", "sure"), GUESSES.values(), ids=GUESSES)
def test_check_guesses_the_dialect_and_says_why(turngate: Turngate, body: Json, api: str, sure: str) -> None:
    said = turngate("check", "-", stdin=json.dumps(body).encode())
    assert said.out.startswith(f"legal  {api} ({sure}: ")


def test_check_takes_the_dialect_that_is_named(turngate: Turngate) -> None:
    said = turngate("check", "-", "--api", MESSAGES, stdin=json.dumps(chat(USER)).encode())
    assert (said.code, said.out) == (0, f"legal  {MESSAGES}\n")


def test_check_names_reason_place_and_remedy_for_people(turngate: Turngate) -> None:
    said = turngate("check", "-", stdin=json.dumps(chat(USER, RESULT)).encode())
    assert "hard result.orphan at /messages/1: " in said.out
    assert "call_1" in said.out


LONG = "What is the weather in Oslo today, and is it worth the while to take an umbrella along?"
TWO_CALLS: Json = {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "call_2"}]}
LATER: list[Json] = [USER, {"role": "assistant", "content": "?"}] * 3

Drawn = list[tuple[str, str, str]]
DRAWINGS: dict[str, tuple[Json, Drawn]] = {
    "an orphan stands alone": (
        chat({"role": "user", "content": LONG}, RESULT, USER),
        [
            ("", "/messages/0/content", f'user "{LONG[:62]}…'),
            ("✗", "/messages/1", 'tool result "call_1" "14"'),
            ("", "/messages/2/content", 'user "Weather?"'),
        ],
    ),
    "a misplaced result is tied to its call over what lies between": (
        chat(USER, CALLING, *LATER, RESULT),
        [
            ("", "/messages/0/content", 'user "Weather?"'),
            (
                "╭─",
                "/messages/1/tool_calls/0",
                'assistant tool call "call_1" weather {"name": "weather", "arguments": "{}"}',
            ),
            ("│", "/messages/2/content", 'user "Weather?"'),
            ("│", "", "… 4 more …"),
            ("│", "/messages/7/content", 'assistant "?"'),
            ("╰─✗", "/messages/8", 'tool result "call_1" "14"'),
        ],
    ),
    "a result that is missing is drawn where it belongs": (
        chat(USER, TWO_CALLS, RESULT, USER),
        [
            (
                "",
                "/messages/1/tool_calls/0",
                'assistant tool call "call_1" weather {"name": "weather", "arguments": "{}"}',
            ),
            (
                "╭─",
                "/messages/1/tool_calls/1",
                'assistant tool call "call_2" weather {"name": "weather", "arguments": "{}"}',
            ),
            ("│", "/messages/2", 'tool result "call_1" "14"'),
            ("╰─✗", "", 'the result of "call_2" is missing here'),
            ("", "/messages/3/content", 'user "Weather?"'),
        ],
    ),
    "a result too many is tied to the call": (
        anthropic(USER, USED, {"role": "user", "content": [USE_RESULT, {**USE_RESULT, "content": "15"}]}),
        [
            ("", "/messages/0/content", 'user "Weather?"'),
            ("╭─", "/messages/1/content/0", 'assistant tool call "toolu_1" weather {}'),
            ("│", "/messages/2/content/0", 'user tool result "toolu_1" "14"'),
            ("╰─✗", "/messages/2/content/1", 'user tool result "toolu_1" "15"'),
        ],
    ),
    "what a body holds cannot steer the terminal": (
        chat({"role": "user", "content": "[red]\x1b[2J\u202e"}, RESULT),
        [
            ("", "/messages/0/content", 'user "[red]\\u001b[2J?"'),
            ("✗", "/messages/1", 'tool result "call_1" "14"'),
        ],
    ),
}


@pytest.mark.parametrize(("body", "drawn"), DRAWINGS.values(), ids=DRAWINGS)
def test_check_draws_the_broken_place(body: Json, drawn: Drawn) -> None:
    checked = cli_check.check(json.dumps(body).encode(), None, "")
    assert checked.sequence is not None
    rows = list(cli_check.draw(checked.judgement.findings[0], checked.sequence, body))
    assert [(row.edge.strip(), row.at, row.said) for row in rows] == drawn
    assert [row.edge for row in rows if row.broken] == [edge for edge, _, _ in drawn if "✗" in edge]


def test_check_draws_at_most_nine_rows_of_a_long_history() -> None:
    body = chat(*LATER, CALLING, *LATER, RESULT, *LATER, USER)
    checked = cli_check.check(json.dumps(body).encode(), CHAT, "openai")
    assert checked.sequence is not None
    assert {finding.reason for finding in checked.judgement.findings} >= {"result.misplaced"}
    for finding in checked.judgement.findings:
        assert 1 < len(list(cli_check.draw(finding, checked.sequence, body))) <= 9


def test_check_draws_in_colour_on_a_terminal_and_never_in_a_pipe(
    turngate: Turngate, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps(chat(USER, CALLING, *LATER, RESULT)).encode()
    piped = turngate("check", "-", stdin=body)
    assert "\x1b" not in piped.out
    assert "╰─✗" not in piped.out
    monkeypatch.setattr(cli, "out", Console(force_terminal=True, color_system="standard", width=160))
    seen = turngate("check", "-", stdin=body)
    assert re.search(r"\x1b\[31m    ╰─✗/messages/8 .*\x1b\[0m", seen.out)
    assert seen.code == piped.code == 1


def test_rules_tells_level_words_rule_and_date(turngate: Turngate) -> None:
    said = turngate("rules", "--server", "anthropic", "--json")
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert {(row["api"], row["server"]) for row in rows} == {(MESSAGES, "anthropic")}
    (orphan,) = [row for row in rows if row["reason"] == "result.orphan" and row["rule"] == "A-B2"]
    assert (orphan["level"], orphan["date"]) == ("hard", "2026-11")
    table = turngate("rules", "--api", MESSAGES).out
    assert MESSAGES in table
    assert CHAT not in table
    assert [word for word in ("result.orphan", "hard", "A-B2", "2026-11") if word not in table] == []


USAGE: dict[str, tuple[list[str], str]] = {
    "no file is named": (["check"], "Missing argument"),
    "the file is not there": (["check", "absent.json"], "cannot read absent.json: No such file"),
    "an unknown dialect": (["check", "-", "--api", "smoke.signals"], "openai.chat"),
    "a recording that is not there": (["replay", "absent.jsonl"], "cannot read absent.jsonl: No such file"),
    "a server without rules": (["rules", "--server", "smoke"], "choose one of"),
    "an unknown option": (["check", "-", "--jsno"], "--jsno"),
    "an unknown command": (["chekc"], "chekc"),
    "two formats at once": (["query", "SELECT 1", "--json", "--csv"], "choose one"),
    "a row limit of none": (["query", "SELECT 1", "--rows", "0"], "--rows"),
    "an upstream without URL": (["serve", "--upstream", "openai"], "write NAME=URL"),
}


@pytest.mark.parametrize(("arguments", "text"), USAGE.values(), ids=USAGE)
def test_a_wrong_command_line_ends_with_64_and_never_with_a_verdict(
    turngate: Turngate, arguments: list[str], text: str
) -> None:
    said = turngate(*arguments)
    assert (said.code, said.out) == (64, "")
    assert text in said.err


def test_check_tells_a_failure_of_our_own_with_70(
    turngate: Turngate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_dialect: OpenAIChat, _body: bytes) -> None:
        raise RuntimeError("broken for the test")

    monkeypatch.setattr(OpenAIChat, "parse_request", fail)
    said = turngate("check", "-", "--json", stdin=json.dumps(chat(USER)).encode())
    assert (said.code, said.out) == (70, "")
    assert "RuntimeError: broken for the test" in said.err


@pytest.mark.parametrize(
    ("command", "options"),
    {
        "serve": ["--config", "--listen", "--metrics", "--admin", "--data-dir", "--stage", "--upstream"],
        "demo": ["--exit"],
        "check": ["--api", "--server", "--json", "Exit code"],
        "replay": ["--json", "--stage", "--api", "Exit code"],
        "rules": ["--api", "--server", "--json"],
        "query": ["--data-dir", "--json", "--csv", "--parquet", "--rows", "--seconds", "Exit code"],
        "rollout": ["show", "set"],
        "version": ["Print the version"],
    }.items(),
)
def test_each_command_explains_itself(turngate: Turngate, command: str, options: list[str]) -> None:
    said = turngate(command, "--help")
    assert said.code == 0
    assert [option for option in options if option not in said.out] == []
    assert f" {command} " in turngate("--help").out


# serve, as far as it does not start

BAD_SETTINGS: dict[str, tuple[list[str], dict[str, str], str, list[str]]] = {
    "an unknown key in the file": ([], {}, "stag: observe", ["stag: no such setting", "did you mean stage?"]),
    "an unknown key in a section": ([], {}, "limits: {hold: 1}", ["limits.hold", "hold_bytes"]),
    "a value of the wrong kind in the file": ([], {}, "drain_s: soon", ["drain_s: 'soon' is not allowed"]),
    "a file that is no YAML": ([], {}, "a: [", ["turngate.yaml"]),
    "a file that is not there": (["--config", "absent.yaml"], {}, "", ["absent.yaml: there is no such file"]),
    "a bad address": (["--listen", "localhost"], {}, "", ["listen: 'localhost'", "HOST:PORT"]),
    "a bad stage in the environment": (
        [],
        {"TURNGATE_STAGE": "brave"},
        "",
        ["stage: 'brave'", "enforce-tools"],
    ),
    "an upstream URL that is none": (["--upstream", "openai=ftp://x"], {}, "", ["upstreams.openai.url"]),
    "a default upstream that is not there": ([], {}, "default_upstream: gemini", ["gemini", "openai"]),
    "a listener for the whole world": (["--listen", "0.0.0.0:0"], {}, "", ["--allow-remote"]),
}


@pytest.mark.parametrize(
    ("arguments", "environment", "file", "texts"), BAD_SETTINGS.values(), ids=BAD_SETTINGS
)
def test_serve_does_not_start_on_settings_that_cannot_be_used(
    turngate: Turngate,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    environment: dict[str, str],
    file: str,
    texts: list[str],
) -> None:
    if file:
        (tmp_path / "turngate.yaml").write_text(file)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said = turngate("serve", *arguments)
    assert (said.code, said.out) == (64, "")
    assert [text for text in texts if text not in said.err] == []


@pytest.mark.parametrize("listener", ["listen", "metrics", "admin"])
def test_serve_names_the_listener_whose_port_is_in_use(turngate: Turngate, listener: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        others = [each for each in ("listen", "metrics", "admin") if each != listener]
        free = [part for each in others for part in (f"--{each}", "127.0.0.1:0")]
        said = turngate("serve", *free, f"--{listener}", address)
    assert (said.code, said.out) == (1, "")
    assert f"cannot listen on {listener} {address}: it is in use" in said.err
    assert f"--{listener} HOST:PORT" in said.err


def test_a_variable_that_is_no_setting_is_told_and_does_no_harm(
    turngate: Turngate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNGATE_PORT", "tcp://10.0.0.1:8787")
    said = turngate("query", "SELECT 1")
    assert said.code == 0
    assert "TURNGATE_PORT is no setting" in said.err


# query


def ended(operation: str, outcome: Outcome, at_s: float) -> AnyEvent:
    zero = {name: 0 for name, sql_type in TABLES["exchange_ended"] if sql_type in ("BIGINT", "DOUBLE")}
    empty = {name: "" for name, sql_type in TABLES["exchange_ended"] if sql_type == "VARCHAR"}
    said = {"at_s": at_s, "operation": operation, "outcome": outcome, "stream": True, "status": 200}
    return msgspec.convert({**zero, **empty, **said, "event": "exchange_ended"}, ExchangeEnded)


@pytest.fixture(name="data_dir")
def data_dir_with_three_exchanges(tmp_path: Path) -> Path:
    """Evidence over two days, written by the code that writes it."""
    data_dir = tmp_path / "data"
    spool = Spool(data_dir / "spool", "test")
    spool.start()
    for event in (ended("op-1", "passed", 0), ended("op-2", "refused", 1), ended("op-3", "passed", 86_400)):
        spool.emit(event)
    spool.close()
    recorder = Recorder(
        data_dir / "spool", data_dir / "evidence", Registry("test"), retention_days=14, clock=lambda: 86_500.0
    )
    assert recorder.load_pending() == 3
    recorder.close()
    return data_dir


BY_OUTCOME = "SELECT outcome, count(*) AS n FROM exchange_ended GROUP BY ALL ORDER BY ALL"


def test_query_prints_a_table(turngate: Turngate, data_dir: Path) -> None:
    said = turngate("query", BY_OUTCOME, "--data-dir", data_dir)
    assert [line.split() for line in said.out.splitlines() if "─" not in line and line.strip()] == [
        ["outcome", "n"],
        ["passed", "2"],
        ["refused", "1"],
    ]
    assert (said.code, said.err) == (0, "")


def test_query_folds_nothing_in_a_pipe(turngate: Turngate, data_dir: Path) -> None:
    said = turngate("query", "SELECT repeat('x', 500)", "--data-dir", data_dir)
    assert "x" * 500 in said.out


def test_query_prints_json_lines(turngate: Turngate, data_dir: Path) -> None:
    said = turngate("query", BY_OUTCOME, "--json", "--data-dir", data_dir)
    assert [json.loads(line) for line in said.out.splitlines()] == [
        {"outcome": "passed", "n": 2},
        {"outcome": "refused", "n": 1},
    ]


def test_query_prints_values_of_every_type_as_json(turngate: Turngate, data_dir: Path) -> None:
    sql = "SELECT NULL AS a, 1.50::DECIMAL(4,2) AS b, [1, 2] AS c, {'k': true} AS d, 0 / 0e0 AS e, DATE '2026-01-02' AS f"
    said = turngate("query", sql, "--json", "--data-dir", data_dir)
    expected = {"a": None, "b": "1.50", "c": [1, 2], "d": {"k": True}, "e": None, "f": "2026-01-02"}
    assert json.loads(said.out) == expected


def test_query_prints_csv(turngate: Turngate, data_dir: Path) -> None:
    said = turngate("query", "SELECT 'a,\"b' AS x, NULL AS y, 1 AS x", "--csv", "--data-dir", data_dir)
    assert list(csv.reader(io.StringIO(said.out))) == [["x", "y", "x"], ['a,"b', "", "1"]]


def test_query_writes_parquet_with_types_and_order(
    turngate: Turngate, data_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "ended.parquet"
    sql = 'SELECT operation, at_s, stream, status AS "the ""status""" FROM exchange_ended ORDER BY at_s DESC'
    said = turngate("query", sql, "--parquet", file, "--data-dir", data_dir)
    assert (said.code, said.out, said.err) == (0, "", "")
    with duckdb.connect() as database:
        read = database.read_parquet(str(file))
        assert [str(each) for each in read.types] == ["VARCHAR", "DOUBLE", "BOOLEAN", "BIGINT"]
        assert read.columns == ["operation", "at_s", "stream", 'the "status"']
        assert read.fetchall() == [
            ("op-3", 86_400, True, 200),
            ("op-2", 1, True, 200),
            ("op-1", 0, True, 200),
        ]


REFUSED: dict[str, tuple[str, list[str], int, str]] = {
    "a mistake": ("SELEKT 1", [], 64, "syntax error"),
    "an unknown view": ("FROM exchange", [], 64, "exchanges"),
    "an empty statement": ("", [], 64, "one SELECT at a time"),
    "two statements": ("SELECT 1; SELECT 2", [], 64, "one SELECT at a time"),
    "a deletion": ("DELETE FROM exchange_ended", [], 64, "can be read, not changed"),
    "a table": ("CREATE TABLE mine (a INTEGER)", [], 64, "can be read, not changed"),
    "a file to write": ("COPY (SELECT 1) TO 'out.csv'", [], 64, "can be read, not changed"),
    "a file to read": ("SELECT * FROM read_text('/etc/hostname')", [], 64, "disabled by configuration"),
    "one name for two columns, as JSON": ("SELECT 1 AS a, 2 AS a", ["--json"], 64, 'called "a"'),
    "one name for two columns, as Parquet": (
        "SELECT 1 AS a, 2 AS a",
        *(["--parquet", "out.parquet"], 64, 'called "a"'),
    ),
    "a file that cannot be written": (
        "SELECT 1",
        ["--parquet", "absent/out.parquet"],
        1,
        "absent/out.parquet",
    ),
    "too long a run": (
        "SELECT sum(a.range) FROM range(10000000) a, range(10000000) b",
        *(["--seconds", "0.1"], 1, "stopped after 0.1 s"),
    ),
}


@pytest.mark.parametrize(("sql", "options", "code", "text"), REFUSED.values(), ids=REFUSED)
def test_query_refuses_and_names_the_problem(
    turngate: Turngate, data_dir: Path, tmp_path: Path, sql: str, options: list[str], code: int, text: str
) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    said = turngate("query", sql, *options, "--data-dir", data_dir)
    assert (said.code, said.out) == (code, "")
    assert said.err.startswith("error: ")
    assert text in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_query_says_that_there_are_more_rows(turngate: Turngate, data_dir: Path) -> None:
    said = turngate("query", "FROM range(5)", "--rows", "2", "--csv", "--data-dir", data_dir)
    assert said.out.splitlines() == ["range", "0", "1"]
    assert "more rows than 2" in said.err
    assert turngate("query", "FROM range(2)", "--rows", "2", "--data-dir", data_dir).err == ""


def test_query_on_no_evidence_has_no_rows_and_says_why(turngate: Turngate, tmp_path: Path) -> None:
    said = turngate("query", "SELECT outcome FROM exchange_ended", "--csv", "--data-dir", tmp_path / "new")
    assert (said.code, said.out) == (0, "outcome\n")
    assert f"nothing is written down yet in {tmp_path / 'new' / 'evidence'}" in said.err
    assert not (tmp_path / "new").exists()


def test_query_without_a_statement_lists_the_views(turngate: Turngate) -> None:
    said = turngate("query")
    assert said.code == 0
    assert [view for view in (*TABLES, "segments") if view not in said.out] == []


def test_query_on_evidence_that_another_process_holds_names_the_file(
    turngate: Turngate, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_query, "connect_readonly", partial(connect_readonly, wait_s=0.0))
    file = min((data_dir / "evidence").glob("*.duckdb"))
    hold = f"import duckdb; held = duckdb.connect({str(file)!r}); print('held', flush=True); input()"
    with Popen([sys.executable, "-c", hold], stdin=PIPE, stdout=PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        said = turngate("query", "SELECT 1", "--data-dir", data_dir)
        holder.communicate("\n")
    assert (said.code, said.out) == (1, "")
    assert "cannot open the evidence" in said.err
    assert str(file) in said.err


# check and the running gate

REASONS = {
    *("result.orphan", "result.duplicate", "result.misplaced", "result.mismatch", "call.unanswered"),
    None,
}


def cases() -> list[Json]:
    """Exchange objects with a request that both can judge."""
    shared = Path(os.environ.get("TURNGATE_SHARED", Path(__file__).parents[2] / "shared")) / "cases"
    if not shared.is_dir():
        pytest.skip(f"no cases in {shared}: set TURNGATE_SHARED")
    found = [json.loads(file.read_bytes()) for file in sorted(shared.glob("*.json"))]
    return [
        case
        for case in found
        if case["api"] in (CHAT, MESSAGES)
        and case["expect"].get("reason") in REASONS
        and not case.get("context", {}).get("needs_ledger")
    ]


@asynccontextmanager
async def sidecar(data_dir: Path, provider_url: str, names: set[str]) -> AsyncIterator[str]:
    """`turngate serve` in enforce-tools as a process; gives its base URL."""
    arguments = ["--stage", "enforce-tools", "--data-dir", str(data_dir)]
    for listener in ("listen", "metrics", "admin"):
        arguments += [f"--{listener}", "127.0.0.1:0"]
    for name in names:
        arguments += ["--upstream", f"{name}={provider_url}"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "turngate", "serve", *arguments),
        stdin=DEVNULL,
        stderr=PIPE,
        cwd=data_dir.parent,
    )
    try:
        assert process.stderr is not None
        announced = re.search(rb"listens on (\S+)", await process.stderr.readline())
        assert announced is not None
        yield announced[1].decode()
    finally:
        process.terminate()
        await process.wait()


async def test_check_and_the_running_gate_give_the_same_verdict(turngate: Turngate, tmp_path: Path) -> None:
    """A refusal carries the first finding's reason; what `check` calls legal reaches the provider."""
    told = cases()
    servers = {case.get("server") or case["api"].partition(".")[0] for case in told}
    checked, live = {}, {}
    async with (
        Simulator({"refusals": False}) as simulator,
        sidecar(tmp_path / "data", simulator.url, servers | {"openai", "anthropic"}) as url,
        aiohttp.ClientSession() as session,
    ):
        for case in told:
            server, request = case.get("server") or case["api"].partition(".")[0], case["request"]
            body = request.get("body_text", json.dumps(request.get("body"))).encode()
            said = turngate("check", "-", "--api", case["api"], "--server", server, "--json", stdin=body)
            verdict = json.loads(said.out)
            stops = verdict["verdict"] in ("illegal", "waiting")
            checked[case["id"]] = (verdict["findings"][0]["reason"] if stops else None, not stops)
            before = len(simulator.requests)
            async with session.post(f"{url}/{server}{request['path']}", data=body) as answer:
                await answer.read()
            reason = answer.headers.get("x-turngate-reason")
            live[case["id"]] = (reason, len(simulator.requests) > before)
    assert live == checked
    assert len(live) > 30
    assert {reason for reason, _ in live.values()} == REASONS
