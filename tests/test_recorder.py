"""The recorder and its queries: every event is one row and one count, whatever happens in between."""

import fcntl
import itertools
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import duckdb
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngate.telemetry import recorder as recorder_module
from turngate.telemetry.events import EVENT_TYPES, Event, FailureCounted, StateChanged
from turngate.telemetry.metrics import METRICS, PREFIX, Registry
from turngate.telemetry.queries import QueryTimeout, connect_readonly, open_unknowns, run_query
from turngate.telemetry.recorder import Recorder
from turngate.telemetry.schema import TABLES, table_of

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
MIDNIGHT = datetime(2026, 3, 2, tzinfo=UTC).timestamp()
DAY, NEXT_DAY = "2026-03-01.duckdb", "2026-03-02.duckdb"


def move(
    operation: str = "op-1", before: str = "SENT", after: str = "UNKNOWN", at_s: float = NOON
) -> StateChanged:
    return StateChanged(
        at_s=at_s, operation=operation, upstream="openai", before=before, after=after, how="eof"
    )


def any_event() -> st.SearchStrategy[Event]:
    """Any event of two days, with any text that UTF-8 can say."""
    fields: dict[object, st.SearchStrategy[object]] = {
        bool: st.booleans(),
        int: st.integers(0, 2**40),  # sums stay exact in a float
        float: st.floats(0, 1e9),
        str: st.text(st.characters(exclude_categories=["Cs"])),
        tuple[str, ...]: st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=3).map(tuple),
    }

    def built(event_type: type[Event]) -> st.SearchStrategy[Event]:
        hints = get_type_hints(event_type)
        strategies = {
            name: st.sampled_from(get_args(hint)) if get_origin(hint) is Literal else fields[hint]
            for name, hint in hints.items()
            if name in event_type.__struct_fields__
        }
        return st.builds(event_type, **{**strategies, "at_s": st.floats(NOON, NOON + 86_400)})

    return st.one_of(*map(built, EVENT_TYPES))


class Place:
    """A spool and an evidence directory, with what belongs to them."""

    def __init__(self, root: Path) -> None:
        self.spool = root / "spool"
        self.spool.mkdir()
        self.evidence = root / "evidence"
        self.registry = Registry("1")
        self.recorder = self.another()

    def another(self) -> Recorder:
        """A recorder as a new process would make it; the first one counts into `registry`."""
        registry = Registry("1") if hasattr(self, "recorder") else self.registry
        return Recorder(self.spool, self.evidence, registry, clock=lambda: NOON)

    def seal(self, events: Sequence[Event], name: str = "i-00000000", tail: bytes = b"") -> Path:
        path = self.spool / f"{name}.jsonl"
        path.write_bytes(msgspec.json.Encoder().encode_lines(events) + tail)
        return path

    def segments(self) -> list[str]:
        return sorted(path.name for path in self.spool.iterdir() if path.name != ".loading")

    def failures(self, where: str) -> float:
        return self.registry.value("observer_failures_total", where)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with connect_readonly(self.evidence) as database:
            return run_query(database, sql).rows

    def operations(self) -> Counter[str]:
        return Counter(operation for (operation,) in self.query("SELECT operation FROM state_changed"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def total(registry: Registry, name: str) -> float:
    """The sum over all labels, as a scrape would see it."""
    ending = "_count" if METRICS[name].kind == "histogram" else ""
    lines = registry.expose("")[0].decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith((f"{PREFIX}{name}{ending}" + "{", f"{PREFIX}{name}{ending} "))
    )


SUMS = {
    "requests_total": "SELECT count(*) FROM exchange_ended",
    "request_errors_total": "SELECT count(*) FROM exchange_ended WHERE error_type <> ''",
    "streams_ended_total": "SELECT count(*) FROM exchange_ended WHERE stream",
    "unjudged_total": "SELECT count(*) FROM request_unjudged",
    "sequence_rejects_total": "SELECT count(*) FROM finding_made WHERE action <> 'reported'",
    "tool_calls_total": "SELECT count(*) FROM call_decided",
    "tool_hold_seconds": "SELECT count(*) FROM call_decided WHERE held",
    "preview_retractions_total": "SELECT count(*) FROM preview_retracted",
    "dispatch_transitions_total": "SELECT coalesce(sum(1 + len(through)), 0) FROM state_changed",
    "observer_failures_total": "SELECT count(*) FROM failure_counted",
    "spool_dropped_total": "SELECT coalesce(sum(count), 0) FROM events_dropped",
    "evidence_rows_total": "SELECT coalesce(sum(rows), 0) FROM segments",
}


@given(segments=st.lists(st.lists(any_event(), max_size=12), max_size=4))
@settings(max_examples=6, deadline=None)
def test_rows_are_the_events_and_metrics_are_sums_over_rows(segments: list[list[Event]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Place(Path(name))
        for n, events in enumerate(segments):
            place.seal(events, f"i-{n:08d}")
        everything = [event for events in segments for event in events]
        assert place.recorder.load_pending() == len(everything)
        assert place.segments() == []
        with connect_readonly(place.evidence) as database:
            for event_type in EVENT_TYPES:
                columns = ", ".join(f'"{name}"' for name in event_type.__struct_fields__)
                rows = run_query(database, f"SELECT {columns} FROM {table_of(event_type)}").rows
                expected = [
                    msgspec.structs.astuple(event) for event in everything if type(event) is event_type
                ]
                assert Counter(map(repr, map(listed, rows))) == Counter(map(repr, map(listed, expected)))
            for metric, sql in SUMS.items():
                assert total(place.registry, metric) == run_query(database, sql).rows[0][0], metric


def listed(row: tuple[Any, ...]) -> list[Any]:
    """A row as DuckDB gives it: a tuple within it is a list."""
    return [list(value) if isinstance(value, tuple) else value for value in row]


def test_a_segment_that_comes_again_is_only_removed(place: Place) -> None:
    place.seal([move()])
    assert place.recorder.load_pending() == 1
    place.seal([move()])
    assert place.another().load_pending() == 0
    assert place.segments() == []
    assert place.operations() == {"op-1": 1}
    assert place.registry.value("evidence_rows_total") == 1


def test_a_segment_over_midnight_goes_into_two_days(place: Place) -> None:
    place.seal([move("op-1", at_s=MIDNIGHT - 0.001), move("op-2", at_s=MIDNIGHT)])
    assert place.recorder.load_pending() == 2
    assert sorted(path.name for path in place.evidence.iterdir()) == [DAY, NEXT_DAY]
    assert place.query("SELECT name, rows FROM segments") == [("i-00000000.jsonl", 1)] * 2


class Killed(BaseException):
    """Stands for the end of the process: nothing in the recorder catches it."""


@pytest.mark.parametrize("days_before", [0, 1])
def test_a_recorder_that_dies_between_two_days_leaves_each_row_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, days_before: int
) -> None:
    place.seal([move("op-1"), move("op-2", at_s=MIDNIGHT)])
    load_day = Recorder._load_day
    days = itertools.count()

    def die(self: Recorder, *arguments: Any) -> None:
        if next(days) == days_before:
            raise Killed
        load_day(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "_load_day", die)
        with pytest.raises(Killed):
            place.recorder.load_pending()
    assert place.segments() == ["i-00000000.jsonl"]
    assert place.registry.value("evidence_rows_total") == 0
    place.recorder.close()
    assert place.another().load_pending() == 2
    assert place.operations() == {"op-1": 1, "op-2": 1}


def test_a_recorder_that_dies_before_it_removes_a_segment_does_not_load_it_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_path: Path, missing_ok: bool = False) -> None:
        raise Killed

    place.seal([move()])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", die)
        with pytest.raises(Killed):
            place.recorder.load_pending()
    place.recorder.close()
    assert place.another().load_pending() == 0
    assert (place.segments(), place.operations()) == ([], {"op-1": 1})


LOADING = """
import sys
from pathlib import Path
from turngate.telemetry import recorder
from turngate.telemetry.metrics import Registry

recorder.BATCH_BYTES = 1  # each segment by itself
load_day = recorder.Recorder._load_day

def tell(self, *arguments):
    print("loading a day", flush=True)
    load_day(self, *arguments)

recorder.Recorder._load_day = tell
root = Path(sys.argv[1])
recorder.Recorder(root / "spool", root / "evidence", Registry("1"), clock=lambda: 1772366400.0).load_pending()
print("done", flush=True)
"""


@pytest.mark.parametrize("days_before", [1, 2, 5, 8, 11])
def test_kill_9_at_any_moment_leaves_each_row_once(place: Place, tmp_path: Path, days_before: int) -> None:
    for n in range(6):
        place.seal([move(f"early-{n}"), move(f"late-{n}", at_s=MIDNIGHT)], f"i-{n:08d}")
    with subprocess.Popen(
        [sys.executable, "-c", LOADING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(days_before):
            assert process.stdout.readline() == "loading a day\n"
        process.kill()
    assert place.segments() != []
    place.another().load_pending()
    assert place.segments() == []
    assert place.operations() == Counter(f"{when}-{n}" for when in ("early", "late") for n in range(6))


DAMAGE = {
    "a torn last line": (msgspec.json.encode(move("op-9"))[:-7], 1),
    "a line that is no JSON": (b"\x00\x00\n", 1),
    "an event of another version": (b'{"event":"moon_landed","at_s":1.0}\n', 1),
    "an event that lacks a field": (b'{"event":"proxy_stopped","at_s":1.0}\n', 1),
    "a line that is not UTF-8": (b'{"event":"failure_counted","at_s":1.0,"where":"\xff","error":""}\n', 1),
    "a blank line": (b"\n", 1),
    "a time before 1970": (msgspec.json.encode(move("op-9", at_s=-1.0)) + b"\n", 1),
    "a time beyond all calendars": (msgspec.json.encode(move("op-9", at_s=1e18)) + b"\n", 1),
    "an infinite time": (b'{"event":"failure_counted","at_s":1e999,"where":"","error":""}\n', 1),
    "nothing": (b"", 0),
}


@pytest.mark.parametrize(("tail", "failures"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_line_is_counted_and_the_rest_is_loaded(place: Place, tail: bytes, failures: int) -> None:
    place.seal([move("op-1"), move("op-2")], tail=tail)
    assert place.recorder.load_pending() == 2
    assert place.operations() == {"op-1": 1, "op-2": 1}
    assert place.failures("segment_line") == failures
    assert place.segments() == []


def test_a_dead_writers_segment_is_adopted_and_a_living_ones_is_not(place: Place) -> None:
    for name in ("dead", "alive"):
        place.seal([move(name)], name).rename(place.spool / f"{name}.part")
    with (place.spool / "alive.part").open("ab") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        assert place.recorder.load_pending() == 1
        assert place.segments() == ["alive.part"]
    assert place.recorder.load_pending() == 1
    assert place.operations() == {"dead": 1, "alive": 1}


def test_two_recorders_on_one_spool_load_each_event_once(place: Place) -> None:
    for n in range(30):
        place.seal([move(f"op-{n}")], f"i-{n:08d}")
    loaded: list[int] = []

    def load() -> None:
        recorder = place.another()
        while place.segments():
            loaded.append(recorder.load_pending())

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(loaded) == 30
    assert place.operations() == Counter(f"op-{n}" for n in range(30))


@contextmanager
def a_reader_of(path: Path) -> Iterator[None]:
    """Another process that has the day file open, as the duckdb shell would."""
    code = (
        "import duckdb, sys; database = duckdb.connect(sys.argv[1], read_only=True);"
        "print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield
        process.communicate()


def test_a_file_that_somebody_reads_only_delays_loading(place: Place) -> None:
    place.seal([move("op-1")])
    place.recorder.load_pending()
    with a_reader_of(place.evidence / DAY):
        place.seal([move("op-2"), move("op-3", at_s=MIDNIGHT)], "i-00000001")
        assert place.recorder.load_pending() == 0
        assert place.recorder.behind
        assert place.segments() == ["i-00000001.jsonl"]
        assert place.registry.value("evidence_rows_total") == 1
    assert place.recorder.load_pending() == 2
    assert not place.recorder.behind
    assert place.operations() == {"op-1": 1, "op-2": 1, "op-3": 1}
    assert place.registry.value("evidence_rows_total") == 3


def test_files_are_let_go_after_each_load(place: Place) -> None:
    place.seal([move()])
    place.recorder.load_pending()
    with a_reader_of(place.evidence / DAY):
        assert place.operations() == {"op-1": 1}


def damage_checksums(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[12_288 + 8 : 12_288 + 4096] = b"x" * 4088
    path.write_bytes(data)


CORRUPTIONS = {
    "garbage": lambda path: path.write_bytes(b"garbage" * 1000),
    "an empty file": lambda path: path.write_bytes(b""),
    "a file that was cut": lambda path: path.write_bytes(path.read_bytes()[:13_000]),
    "a block that does not fit its checksum": damage_checksums,
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_corrupt_day_is_set_aside_and_loading_goes_on(place: Place, corrupt: Any) -> None:
    place.seal([move("op-1")])
    place.recorder.load_pending()
    corrupt(place.evidence / DAY)
    (place.evidence / f"{DAY}.corrupt-1").write_text("an earlier one")
    place.seal([move("op-2")], "i-00000001")
    assert place.recorder.load_pending() == 1
    assert place.failures("evidence_corrupt") == 1
    assert sorted(path.name for path in place.evidence.iterdir()) == [
        DAY,
        f"{DAY}.corrupt-1",
        f"{DAY}.corrupt-2",
    ]
    assert place.operations() == {"op-2": 1}


def test_a_segment_that_the_file_cannot_take_is_set_aside_alone(place: Place) -> None:
    place.evidence.mkdir()
    with duckdb.connect(str(place.evidence / DAY)) as database:
        database.execute('CREATE TABLE failure_counted (at_s DOUBLE, "where" VARCHAR, error INTEGER)')
    place.seal([move("op-1")], "i-00000000")
    place.seal([FailureCounted(at_s=NOON, where="x", error="no number")], "i-00000001")
    place.seal([move("op-2")], "i-00000002")
    assert place.recorder.load_pending() == 2
    assert place.segments() == ["i-00000001.bad"]
    assert place.failures("segment") == 1
    assert place.operations() == {"op-1": 1, "op-2": 1}


def test_a_day_of_an_older_version_gets_the_new_columns(place: Place) -> None:
    place.evidence.mkdir()
    with duckdb.connect(str(place.evidence / DAY)) as database:
        database.execute("CREATE TABLE state_changed (operation VARCHAR, gone VARCHAR)")
        database.execute("INSERT INTO state_changed VALUES ('op-0', 'x')")
    place.seal([move("op-1")])
    assert place.recorder.load_pending() == 1
    assert place.query('SELECT operation, "before", gone FROM state_changed ORDER BY 1') == [
        ("op-0", None, "x"),
        ("op-1", "SENT", None),
    ]


def test_a_day_that_is_removed_while_we_run_is_made_again(place: Place) -> None:
    for n in range(2):
        place.seal([move(f"op-{n}")], f"i-{n:08d}")
        assert place.recorder.load_pending() == 1
        if n == 0:
            (place.evidence / DAY).unlink()
    assert place.operations() == {"op-1": 1}


def test_many_segments_are_loaded_in_batches(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "BATCH_BYTES", 300)
    for n in range(7):
        place.seal([move(f"op-{n}")], f"i-{n:08d}")
    assert place.recorder.load_pending() == 7
    assert place.operations() == Counter(f"op-{n}" for n in range(7))


def test_days_beyond_retention_are_removed_and_others_are_not(place: Place) -> None:
    place.evidence.mkdir()
    kept = ["2026-02-15.duckdb", "2026-02-15.duckdb.corrupt-1", "notes-of-us.duckdb", "2026-99-99.duckdb"]
    for name in (*kept, "2026-02-14.duckdb", "2026-02-14.duckdb.wal", "2025-01-01.duckdb.corrupt-3"):
        (place.evidence / name).write_text("")
    place.recorder.load_pending()
    assert sorted(path.name for path in place.evidence.iterdir()) == sorted(kept)


def test_lag_is_the_age_of_the_oldest_segment_that_waits(place: Place) -> None:
    now = datetime.now(UTC).timestamp()
    recorder = Recorder(place.spool, place.evidence, place.registry, clock=lambda: now + 100)
    place.seal([move(at_s=now)])
    recorder.load_pending()
    assert recorder.lag_s() == 0
    with a_reader_of(next(place.evidence.iterdir())):
        place.seal([move(at_s=now)], "i-00000001")
        recorder.load_pending()
        assert 99 <= recorder.lag_s() <= 101 + 60  # the file was written after `now`, by this machine's clock


def test_the_size_of_the_spool_is_told(place: Place) -> None:
    size = place.seal([move()]).stat().st_size
    place.recorder.load_pending()
    assert place.registry.value("spool_bytes") == size


def test_a_missing_spool_is_no_error(tmp_path: Path) -> None:
    assert Recorder(tmp_path / "spool", tmp_path / "evidence", Registry("1")).load_pending() == 0


def test_files_can_be_opened_by_older_shells(place: Place) -> None:
    for n in range(2):
        place.seal([move()], f"i-{n:08d}")
        assert place.recorder.load_pending() == 1
    with duckdb.connect(str(place.evidence / DAY), read_only=True) as database:
        (tags,) = database.execute("SELECT tags FROM duckdb_databases() WHERE NOT internal").fetchall()[0]
    assert tags["storage_version"].startswith("v1.5.0")


def test_views_exist_before_the_first_day(tmp_path: Path) -> None:
    with connect_readonly(tmp_path / "evidence") as database:
        for table, columns in TABLES.items():
            assert run_query(database, f"FROM {table}").columns == tuple(name for name, _ in columns)
            assert run_query(database, f"FROM {table}").rows == []


REFUSED = [
    "COPY (SELECT 1) TO '{root}/out.csv'",
    "SELECT * FROM read_text('/etc/hostname')",
    "SELECT * FROM '{root}/evidence/2026-03-01.duckdb'",
    "ATTACH '{root}/other.duckdb'",
    "EXPORT DATABASE '{root}/out'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "INSERT INTO state_changed (operation) VALUES ('x')",
    "INSERT INTO \"2026-03-01\".state_changed (operation) VALUES ('x')",
    'DROP TABLE "2026-03-01".state_changed',
    "SET memory_limit = '100GB'",
    "SET enable_external_access = true",
    "RESET lock_configuration",
]


@pytest.mark.parametrize("sql", REFUSED)
def test_a_query_can_neither_write_nor_leave_the_evidence(place: Place, tmp_path: Path, sql: str) -> None:
    place.seal([move()])
    place.recorder.load_pending()
    before = sorted(tmp_path.rglob("*"))
    with connect_readonly(place.evidence) as database, pytest.raises(duckdb.Error):
        run_query(database, sql.format(root=tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_query_is_cut_at_its_row_limit(place: Place) -> None:
    with connect_readonly(place.evidence) as database:
        exact = run_query(database, "FROM range(3)", rows_max=3)
        more = run_query(database, "FROM range(4)", rows_max=3)
    assert (exact.rows, exact.cut) == ([(0,), (1,), (2,)], False)
    assert (more.rows, more.cut) == ([(0,), (1,), (2,)], True)


def test_an_endless_query_is_stopped(place: Place) -> None:
    with connect_readonly(place.evidence) as database:
        with pytest.raises(QueryTimeout):
            run_query(database, "SELECT sum(a.range) FROM range(10000000) a, range(10000000) b", time_s=0.1)
        assert run_query(database, "SELECT 1").rows == [(1,)]


def test_a_query_gives_up_on_a_day_that_stays_locked(place: Place) -> None:
    place.evidence.mkdir()
    with duckdb.connect(str(place.evidence / DAY)), pytest.raises(duckdb.OperationalError):
        connect_readonly(place.evidence, wait_s=0.1)


def test_dispatches_that_are_still_unknown_are_found_again(place: Place) -> None:
    place.seal(
        [
            move("resolved", "SENT", "UNKNOWN"),
            move("resolved", "UNKNOWN", "ABANDONED", MIDNIGHT),
            move("open", "SENT", "UNKNOWN"),
            move("again", "SENT", "UNKNOWN"),
            move("again", "UNKNOWN", "STREAMING", NOON + 1),
            move("again", "STREAMING", "UNKNOWN", NOON + 2),
            move("never", "SENT", "STREAMING"),
        ]
    )
    place.recorder.load_pending()
    assert sorted(open_unknowns(place.evidence)) == [
        ("again", "openai", NOON + 2),
        ("open", "openai", NOON),
    ]
