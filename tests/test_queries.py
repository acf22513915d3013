"""The evidence schema: what is in a day file, what its views say, and that old and new files can be read together."""

import importlib.util
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import duckdb
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngate.proxy import cli_query
from turngate.telemetry import schema, views
from turngate.telemetry.events import (
    AnomalySeen,
    CallDecided,
    Event,
    ExchangeEnded,
    FindingMade,
    PreviewRetracted,
    StateChanged,
    WitnessSpoke,
)
from turngate.telemetry.metrics import Registry
from turngate.telemetry.queries import connect_readonly, list_views, newer_days
from turngate.telemetry.recorder import Recorder
from turngate.validators.ledger import NEXT, State

DOCS: Final = Path(__file__).parents[1] / "docs"
NOON: Final = 1_772_366_400.0
DAY: Final = "2026-03-01.duckdb"

SCHEMAS: Final = {2: "73a153b714917082", 3: "7847bf07d23a8c55"}
"""Each schema's fingerprint. After a change of tables or views: raise SCHEMA_VERSION and write the new one here."""


def state(operation: str, before: str, after: str, *through: str, at_s: float = NOON) -> StateChanged:
    return StateChanged(
        at_s=at_s,
        operation=operation,
        upstream="openai",
        before=before,
        after=after,
        how="x",
        through=through,
    )


def ended(operation: str, **said: Any) -> ExchangeEnded:
    fields = {
        name: 0 for name, sql_type in schema.TABLES["exchange_ended"] if sql_type in ("BIGINT", "DOUBLE")
    }
    words = {name: "" for name, sql_type in schema.TABLES["exchange_ended"] if sql_type == "VARCHAR"}
    given_: dict[str, Any] = {
        "operation": operation,
        "api": "openai.chat",
        "stream": True,
        "outcome": "passed",
    }
    line = {"event": "exchange_ended", **fields, **words, "at_s": NOON, **given_, **said}
    return msgspec.convert(line, ExchangeEnded)


def load(place: Path, events: Sequence[Event], name: str = "i-00000000") -> Recorder:
    """Load one segment as the observer does."""
    return load_lines(place, msgspec.json.Encoder().encode_lines(events), name)


def load_lines(place: Path, lines: bytes, name: str = "i-00000000") -> Recorder:
    (place / "spool").mkdir(exist_ok=True)
    (place / "spool" / f"{name}.jsonl").write_bytes(lines)
    recorder = Recorder(place / "spool", place / "evidence", Registry("1"), clock=lambda: NOON)
    recorder.load_pending()
    recorder.close()
    return recorder


def ask(place: Path, sql: str) -> list[tuple[Any, ...]]:
    with connect_readonly(place / "evidence") as database:
        return database.execute(sql).fetchall()


# -- what everything means ------------------------------------------------------------------------------------------


def test_every_table_view_and_column_has_a_comment() -> None:
    for name, columns in list_views().items():
        is_view = name in views.VIEWS
        comment = views.VIEWS[name].comment if is_view else schema.table_comment(name)
        assert comment.endswith((".", ").")), name
        for column, _ in columns:
            said = views.column_comment(name, column) if is_view else schema.column_comment(name, column)
            assert said.endswith("."), (name, column)


def test_no_comment_is_about_a_column_that_is_gone() -> None:
    columns = {(table, column) for table, found in schema.ALL_TABLES.items() for column, _ in found}
    assert {about for about in schema.OWN_COMMENTS if about[0] in schema.ALL_TABLES} <= columns
    assert set(schema.SHARED_COMMENTS) <= {column for _, column in columns}
    listed = list_views()
    for name, view in views.VIEWS.items():
        assert set(view.own) <= {column for column, _ in listed[name]}


def test_a_change_of_the_schema_raises_its_version() -> None:
    """If this fails: raise SCHEMA_VERSION and write the new fingerprint into SCHEMAS."""
    found = json.dumps([schema.ALL_TABLES, {name: view.sql for name, view in views.VIEWS.items()}])
    assert {schema.SCHEMA_VERSION: sha256(found.encode()).hexdigest()[:16]} == {
        max(SCHEMAS): SCHEMAS[max(SCHEMAS)]
    }


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_evidence", DOCS / "generate_evidence.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_on_the_evidence_is_current() -> None:
    """If this fails: python docs/generate_evidence.py"""
    assert (DOCS / "evidence.md").read_text() == load_generator().page()


def test_every_statement_on_the_page_runs(tmp_path: Path) -> None:
    statements = re.findall(r"^turngate query (.+)$", (DOCS / "evidence.md").read_text(), re.MULTILINE)
    assert len(statements) >= 5
    for statement in statements:
        cli_query.ask(tmp_path, *shlex.split(statement), rows_max=10, time_s=10)


def test_the_list_of_views_needs_no_quotes_to_be_asked_for(tmp_path: Path) -> None:
    for name in views.VIEWS:
        columns = ", ".join(column for column, _ in list_views()[name])
        ask(tmp_path, f"SELECT {columns} FROM {name}")


# -- one file by itself ---------------------------------------------------------------------------------------------


def test_a_day_file_explains_itself(tmp_path: Path) -> None:
    load(tmp_path, [state("op-1", "", "SENT"), ended("op-1")])
    with duckdb.connect(str(tmp_path / "evidence" / DAY), read_only=True) as database:
        assert database.execute("SELECT operation, state FROM exchanges").fetchall() == [("op-1", "SENT")]
        assert database.execute("SELECT day, schema_version FROM meta").fetchall() == [
            ("2026-03-01", schema.SCHEMA_VERSION)
        ]
        columns = "SELECT count(*) FROM duckdb_columns() WHERE NOT internal AND coalesce(comment, '') = ''"
        assert database.execute(columns).fetchall() == [(0,)]
        tables = "SELECT table_name, comment FROM duckdb_tables() UNION ALL SELECT view_name, comment FROM duckdb_views() WHERE NOT internal"
        told = dict(database.execute(tables).fetchall())
        assert set(told) == {*schema.ALL_TABLES, *views.VIEWS}
        assert all(told.values())


def shell() -> str | None:
    """The `duckdb` shell, as PyPI's duckdb-cli installs it beside Python, or any other."""
    beside = Path(sys.executable).with_name("duckdb")
    return str(beside) if beside.exists() else shutil.which("duckdb")


def test_the_duckdb_shell_opens_a_day_and_its_views(tmp_path: Path) -> None:
    program = shell()
    if program is None:
        pytest.skip("no duckdb shell here: pip install duckdb-cli")
    load(tmp_path, [state("op-1", "", "SENT", "DISPATCHING"), ended("op-1"), ended("op-2")])
    names = list_views()
    script = "".join(f"SELECT '{name}' AS name, count(*) AS n FROM {name};" for name in names)
    done = subprocess.run(
        [program, "-readonly", "-json", str(tmp_path / "evidence" / DAY), script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = {
        row["name"]: row["n"]
        for line in done.stdout.split("]")
        if line.strip()
        for row in json.loads(line + "]")
    }
    assert set(counts) == set(names)
    assert (counts["exchanges"], counts["streams"], counts["dispatches"]) == (2, 2, 1)


# -- older and newer files ------------------------------------------------------------------------------------------


def old_day(place: Path) -> None:
    """A file as the first version left it: no `meta`, no views, fewer columns."""
    (place / "evidence").mkdir()
    with duckdb.connect(str(place / "evidence" / DAY)) as database:
        database.execute(
            "CREATE TABLE exchange_ended (at_s DOUBLE, operation VARCHAR, api VARCHAR, stream BOOLEAN, outcome VARCHAR)"
        )
        database.execute(
            "INSERT INTO exchange_ended VALUES (?, 'old', 'openai.chat', true, 'passed')", [NOON]
        )


DEFAULTED: Final = (
    "SELECT operation, reasons, provider, input_tokens, upstream, findings FROM exchanges ORDER BY 1"
)


def test_an_older_file_is_read_with_defaults_for_what_it_lacks(tmp_path: Path) -> None:
    old_day(tmp_path)
    assert ask(tmp_path, DEFAULTED) == [("old", [], "", -1, None, [])]


def test_an_older_file_is_migrated_when_it_is_loaded_into(tmp_path: Path) -> None:
    old_day(tmp_path)
    load(tmp_path, [ended("new", reasons=["role.order"])])
    assert ask(tmp_path, DEFAULTED) == [
        ("new", ["role.order"], "", 0, "", []),
        ("old", [], "", -1, None, []),
    ]
    assert ask(tmp_path, "SELECT day, schema_version FROM meta") == [("2026-03-01", schema.SCHEMA_VERSION)]


def test_a_line_of_an_older_proxy_gets_defaults_and_no_null(tmp_path: Path) -> None:
    line = msgspec.to_builtins(ended("op-1"))
    told = {name: value for name, value in line.items() if name not in schema.DEFAULTS["exchange_ended"]}
    load_lines(tmp_path, json.dumps(told).encode() + b"\n")
    columns = ", ".join(schema.DEFAULTS["exchange_ended"])
    with duckdb.connect(str(tmp_path / "evidence" / DAY), read_only=True) as database:
        (row,) = database.execute(f"SELECT {columns} FROM exchange_ended").fetchall()
    assert None not in row
    assert dict(zip(schema.DEFAULTS["exchange_ended"], row, strict=True))["input_tokens"] == -1


def test_a_newer_file_is_read_written_and_told(tmp_path: Path) -> None:
    load(tmp_path, [state("op-1", "", "SENT")])
    with duckdb.connect(str(tmp_path / "evidence" / DAY)) as database:
        database.execute("INSERT INTO meta VALUES ('2026-03-01', 99, 0)")
        database.execute("ALTER TABLE state_changed ADD COLUMN mood VARCHAR")
        database.execute("UPDATE state_changed SET mood = 'calm'")
        database.execute("CREATE OR REPLACE VIEW streams AS SELECT 'of the newer one' AS a")
    load(tmp_path, [state("op-2", "", "SENT")], "i-00000001")
    with connect_readonly(tmp_path / "evidence") as database:
        assert newer_days(database) == ["2026-03-01"]
        rows = database.execute("SELECT operation, mood FROM state_changed ORDER BY 1").fetchall()
    assert rows == [("op-1", "calm"), ("op-2", None)]
    with duckdb.connect(str(tmp_path / "evidence" / DAY), read_only=True) as database:
        assert database.execute("FROM streams").fetchall() == [("of the newer one",)]


def test_a_file_of_our_own_schema_is_not_called_newer(tmp_path: Path) -> None:
    load(tmp_path, [state("op-1", "", "SENT")])
    with connect_readonly(tmp_path / "evidence") as database:
        assert newer_days(database) == []


# -- the views ------------------------------------------------------------------------------------------------------


@st.composite
def walks(draw: st.DrawFn) -> tuple[list[StateChanged], str]:
    """A legal life of one dispatch, told in pieces of one or more moves, and the state it ended in."""
    path = [State.PREPARED]
    while NEXT[path[-1]] and len(path) < 8 and (len(path) == 1 or draw(st.booleans())):
        path.append(draw(st.sampled_from(sorted(NEXT[path[-1]]))))
    told: list[StateChanged] = []
    before, steps = "", path
    while steps:
        count = draw(st.integers(1, len(steps)))
        *through, after = steps[:count]
        told.append(state("op", before, after, *through))
        before, steps = after, steps[count:]
    return told, path[-1]


@given(walk=walks(), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_dispatch_stands_where_its_moves_lead_whatever_the_clock_says(
    walk: tuple[list[StateChanged], str], seed: int
) -> None:
    told, last = walk
    random.Random(seed).shuffle(told)
    with duckdb.connect(":memory:") as database:
        columns = ", ".join(f'"{name}" {sql_type}' for name, sql_type in schema.TABLES["state_changed"])
        database.execute(f"CREATE TABLE state_changed ({columns})")
        for event in told:
            row = msgspec.structs.asdict(event)
            database.execute(
                "INSERT INTO state_changed BY NAME SELECT $at_s AS at_s, $operation AS operation, $how AS how,"
                ' $before AS "before", $after AS "after", $through::VARCHAR[] AS through, \'\' AS upstream',
                {name: row[name] for name in ("at_s", "operation", "how", "before", "after", "through")},
            )
        database.execute(f"CREATE VIEW dispatches AS {views.VIEWS['dispatches'].sql}")
        assert database.execute("SELECT state FROM dispatches").fetchall() == [(last,)]


def test_a_dispatch_that_lost_an_event_stands_in_its_latest_state(tmp_path: Path) -> None:
    load(tmp_path, [state("op", "", "SENT"), state("op", "STREAMING", "COMMITTED", at_s=NOON + 1)])
    assert ask(tmp_path, "SELECT state FROM dispatches") == [("COMMITTED",)]


def test_unknown_time_is_told_when_it_is_over(tmp_path: Path) -> None:
    load(
        tmp_path,
        [
            state("over", "", "UNKNOWN", "SENT"),
            state("over", "UNKNOWN", "ABANDONED", at_s=NOON + 7),
            state("open", "", "UNKNOWN", "SENT"),
            state("never", "", "COMMITTED", "SENT"),
            state("between", "", "ABANDONED", "SENT", "UNKNOWN"),
        ],
    )
    rows = ask(tmp_path, "SELECT operation, was_unknown, unknown_for_s FROM dispatches ORDER BY 1")
    assert rows == [
        ("between", True, None),
        ("never", False, None),
        ("open", True, None),
        ("over", True, 7.0),
    ]


def decided(operation: str, decision: str) -> Event:
    told = {"upstream": "", "api": "", "reason": "", "held": True, "hold_s": 1.0, "hold_bytes": 1}
    line = {"event": "call_decided", "at_s": NOON, "operation": operation, "decision": decision, **told}
    return msgspec.convert(line, CallDecided)


def test_an_exchange_is_one_row_whatever_is_told_about_it(tmp_path: Path) -> None:
    where: Any = {"at_s": NOON, "operation": "op", "upstream": "openai", "api": "openai.chat"}
    load(
        tmp_path,
        [
            ended("op"),
            ended("other"),
            FindingMade(
                **where, reason="call.unknown_tool", level="soft", at="/messages/1", action="reported"
            ),
            FindingMade(**where, reason="role.order", level="hard", at="/messages/2", action="would_reject"),
            FindingMade(**where, reason="role.order", level="hard", at="/messages/2", action="would_reject"),
            *(decided("op", decision) for decision in ("released", "released", "withheld")),
            PreviewRetracted(**where, cause="stream.no_stop", enforced=True, preview_bytes=9),
            AnomalySeen(**where, reason="stream.after_stop"),
            AnomalySeen(**where, reason="stream.after_stop"),
            WitnessSpoke(**where, witness="byte_mismatch", enforced=True, detail=""),
            state("op", "", "COMMITTED", "SENT"),
        ],
    )
    told = (
        "SELECT operation, findings, pointer, calls_released, calls_withheld, cause, preview_bytes, anomalies,"
        " witnesses, state FROM exchanges ORDER BY operation"
    )
    assert ask(tmp_path, told) == [
        (
            *("op", ["call.unknown_tool", "role.order"], "/messages/2", 2, 1, "stream.no_stop", 9),
            *(["stream.after_stop"], ["byte_mismatch"], "COMMITTED"),
        ),
        ("other", [], "", 0, 0, "", 0, [], [], ""),
    ]
    assert ask(tmp_path, "SELECT operation, enforced, calls_withheld FROM streams ORDER BY 1") == [
        ("op", True, 1),
        ("other", False, 0),
    ]
    assert ask(tmp_path, "SELECT count(*), min(time) FROM findings")[0][0] == 3


def test_relayed_bytes_and_whole_answers_are_no_streams(tmp_path: Path) -> None:
    load(tmp_path, [ended("relayed", api=""), ended("whole", stream=False), ended("stream")])
    assert ask(tmp_path, "SELECT operation FROM streams") == [("stream",)]


def test_only_events_since_a_moment_are_shown(tmp_path: Path) -> None:
    load(tmp_path, [ended("yesterday", at_s=NOON - 86_400), ended("early", at_s=NOON - 1), ended("now")])
    with connect_readonly(tmp_path / "evidence", since_s=NOON) as database:
        assert database.execute("SELECT operation FROM exchanges").fetchall() == [("now",)]
        attached = "SELECT database_name FROM duckdb_databases() WHERE NOT internal AND path IS NOT NULL"
        assert database.execute(attached).fetchall() == [("2026-03-01",)]


def test_the_views_cannot_be_changed(tmp_path: Path) -> None:
    load(tmp_path, [ended("op")])
    with connect_readonly(tmp_path / "evidence") as database, pytest.raises(duckdb.Error):
        database.execute('CREATE VIEW "2026-03-01".mine AS SELECT 1')
