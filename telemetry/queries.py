"""Read-only SQL on the evidence: what the console, the report and `turngate query` stand on.

The evidence files are attached read-only to a database in memory that is then locked: no file can be read or
written, nothing attached, installed or set. A statement can at most waste its own time, which is limited.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import duckdb

from turngate.telemetry.recorder import in_use, quoted
from turngate.telemetry.schema import ALL_TABLES, DEFAULTS, META, SCHEMA_VERSION, Columns
from turngate.telemetry.views import VIEWS, view_statements

WAIT_S: Final = 10.0
"""How long the observer's short turns with a day file are waited for."""

_POLL_S: Final = 0.05
# No spilling to disk: a statement that needs more memory fails.
_CONFIG: Final[dict[str, str | bool | int | float | list[str]]] = {
    "memory_limit": "1GB",
    "temp_directory": "",
    "autoinstall_known_extensions": False,
}


@dataclass(frozen=True, slots=True)
class QueryResult:
    """`types` are DuckDB's names of the columns' types; `cut` tells that there were more rows than asked for."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    cut: bool


class QueryTimeout(Exception):
    """A statement ran past its time limit and was interrupted."""


def connect_readonly(
    evidence_dir: Path, *, wait_s: float = WAIT_S, since_s: float = 0.0
) -> duckdb.DuckDBPyConnection:
    """A locked database with a view per table and the views of `telemetry.views`, over all days and events since
    `since_s` (Unix seconds); empty ones where there is no day yet.

    The day files are kept from the observer until the connection is closed: close it soon. Blocks up to `wait_s`
    seconds while the observer loads, then raises duckdb.OperationalError.
    """
    database = duckdb.connect(":memory:", config=_CONFIG)
    try:
        days = _attach_days(database, _days(evidence_dir, since_s), time.monotonic() + wait_s)
        _create_views(database, days, since_s)
        # In this order: what is locked cannot be switched off any more.
        database.execute("SET enable_external_access = false")
        database.execute("SET lock_configuration = true")
    except BaseException:
        database.close()
        raise
    return database


def list_views() -> dict[str, Columns]:
    """What there is to ask about: the views of `telemetry.views`, then one a table; columns with their SQL types."""
    with duckdb.connect(":memory:") as database:
        _create_views(database, [], 0.0)
        return {
            name: tuple((row[0], row[1]) for row in database.execute(f"DESCRIBE {name}").fetchall())
            for name in (*VIEWS, *ALL_TABLES)
        }


def newer_days(database: duckdb.DuckDBPyConnection) -> list[str]:
    """Days that a newer Turngate wrote: what it added is not in our views, though its own columns are."""
    return [
        str(day)
        for (day,) in database.execute(
            f"SELECT DISTINCT day FROM {META} WHERE schema_version > ? ORDER BY day", [SCHEMA_VERSION]
        ).fetchall()
    ]


def run_query(
    database: duckdb.DuckDBPyConnection, sql: str, *, rows_max: int = 10_000, time_s: float = 30.0
) -> QueryResult:
    """Run one statement. Raises duckdb.Error for a bad one and QueryTimeout after `time_s` seconds."""
    timer = threading.Timer(time_s, database.interrupt)
    timer.start()
    try:
        database.execute(sql)
        rows = database.fetchmany(rows_max + 1)
    except duckdb.InterruptException as exc:
        raise QueryTimeout(
            f"The statement was stopped after {time_s:g} s. Ask for fewer days or rows."
        ) from exc
    finally:
        timer.cancel()
        timer.join()  # an interrupt on its way must not meet the next statement, or a closed database
    described = database.description or ()
    columns = tuple(str(column[0]) for column in described)
    types = tuple(str(column[1]) for column in described)
    return QueryResult(columns, types, rows[:rows_max], len(rows) > rows_max)


def open_unknowns(evidence_dir: Path) -> list[tuple[str, str, float]]:
    """Dispatches that entered UNKNOWN more often than they left it: operation, upstream, since when (Unix seconds).

    Raises duckdb.Error.
    """
    with connect_readonly(evidence_dir) as database:
        return database.execute(
            """
            SELECT operation, any_value(upstream), max(at_s) FILTER (after = 'UNKNOWN')
            FROM state_changed WHERE 'UNKNOWN' IN (before, after)
            GROUP BY operation HAVING count(*) FILTER (after = 'UNKNOWN') > count(*) FILTER (before = 'UNKNOWN')
            """
        ).fetchall()


def _days(evidence_dir: Path, since_s: float) -> list[Path]:
    first = datetime.fromtimestamp(since_s, UTC).date().isoformat()
    return sorted(path for path in evidence_dir.glob("????-??-??.duckdb") if path.stem >= first)


def _attach_days(database: duckdb.DuckDBPyConnection, paths: Iterable[Path], until_s: float) -> list[str]:
    """Attach each day file; their database names."""
    days = []
    for path in paths:
        day = path.stem
        while True:
            try:
                database.execute(f'ATTACH {quoted(path)} AS "{day}" (READ_ONLY)')
            except duckdb.OperationalError as exc:
                if not path.exists():
                    break  # retention or the observer has just taken it away
                if not in_use(exc) or time.monotonic() >= until_s:
                    raise
                time.sleep(_POLL_S)
            else:
                days.append(day)
                break
    return days


def _create_views(database: duckdb.DuckDBPyConnection, days: Sequence[str], since_s: float) -> None:
    there: dict[tuple[str, str], set[str]] = {}
    for day, table, column in database.execute(
        "SELECT database_name, table_name, column_name FROM duckdb_columns() WHERE NOT internal"
    ).fetchall():
        there.setdefault((day, table), set()).add(column)
    for table in ALL_TABLES:
        parts = [_rows_of(day, table, there[day, table], since_s) for day in days if (day, table) in there]
        database.execute(f"CREATE VIEW {table} AS " + " UNION ALL BY NAME ".join([_no_rows(table), *parts]))
    database.execute(view_statements(""))


def _rows_of(day: str, table: str, there: set[str], since_s: float) -> str:
    """One day's rows of a table; the columns that an older file lacks say what their default says."""
    lacking = [
        f', {DEFAULTS.get(table, {}).get(name, "NULL")}::{sql_type} AS "{name}"'
        for name, sql_type in ALL_TABLES[table]
        if name not in there
    ]
    since = f" WHERE at_s >= {since_s!r}" if since_s and "at_s" in there else ""
    return f'SELECT *{"".join(lacking)} FROM "{day}".{table}{since}'


def _no_rows(table: str) -> str:
    typed = ", ".join(f'NULL::{sql_type} AS "{name}"' for name, sql_type in ALL_TABLES[table])
    return f"(SELECT {typed} WHERE false)"
