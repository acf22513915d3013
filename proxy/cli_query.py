"""What stands behind `turngate query`: one statement on the evidence, and the four ways to give its rows out."""

import csv
import sys
from pathlib import Path
from typing import Final, Literal, TextIO

import duckdb
import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from turngate.telemetry.queries import (
    QueryResult,
    QueryTimeout,
    connect_readonly,
    list_views,
    newer_days,
    run_query,
)
from turngate.telemetry.schema import table_comment
from turngate.telemetry.views import VIEWS

READING: Final = frozenset(
    {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN, duckdb.StatementType.MULTI}
)
"""Kinds of statement that are taken; MULTI is a PIVOT. Any other could change nothing here and would only seem to."""

WIDE: Final = 10_000
"""Columns of a table that goes into a pipe: nothing is folded there."""


class BadStatement(Exception):
    """The statement, or its columns, cannot be used; the text says why."""


class NoAnswer(Exception):
    """There is no answer though the statement may be good; the text says why."""


def ask(evidence_dir: Path, sql: str, *, rows_max: int, time_s: float) -> tuple[QueryResult, list[str]]:
    """Run one reading statement; also tells which days a newer Turngate wrote. Raises BadStatement and NoAnswer."""
    try:
        database = connect_readonly(evidence_dir)
    except duckdb.Error as error:
        raise NoAnswer(
            f"cannot open the evidence in {evidence_dir}: {error}\n"
            "If a duckdb shell has one of its files open, close it there."
        ) from error
    with database:
        try:
            kinds = [statement.type for statement in database.extract_statements(sql)]
            if len(kinds) != 1 or kinds[0] not in READING:
                raise BadStatement("one SELECT at a time: the evidence can be read, not changed")
            return run_query(database, sql, rows_max=rows_max, time_s=time_s), newer_days(database)
        except duckdb.Error as error:
            raise BadStatement(str(error)) from error
        except QueryTimeout as error:
            raise NoAnswer(str(error)) from error


def give_out(result: QueryResult, form: Literal["table", "json", "csv"] | Path) -> None:
    """To standard output, or into a Parquet file. Raises BadStatement and NoAnswer."""
    match form:
        case "json":
            print_json(result, sys.stdout)
        case "csv":
            print_csv(result, sys.stdout)
        case "table":
            print_table(result, Console(width=None if sys.stdout.isatty() else WIDE, highlight=False))
        case Path():
            write_parquet(result, form)


def print_views(console: Console) -> None:
    """What there is to ask about: each view, what a row of it is, and its columns."""
    console.print('turngate query "SELECT outcome, count(*) FROM exchanges GROUP BY ALL"\n', markup=False)
    for name, columns in list_views().items():
        comment = VIEWS[name].comment if name in VIEWS else table_comment(name)
        console.print(Text.assemble((name, "bold"), "  ", comment.partition(". ")[0].rstrip(".")))
        listed = Text(", ".join(column for column, _ in columns), style="dim")
        console.print(Padding(listed, (0, 0, 0, 4)), soft_wrap=False)
    console.print(
        "\nat_s is Unix time in seconds, time the same as a timestamp; one view covers all days. "
        "docs/evidence.md says what each column means.",
        markup=False,
    )


def print_table(result: QueryResult, console: Console) -> None:
    """For people."""
    table = Table(box=box.SIMPLE_HEAD)
    numbers = [not rows or all(isinstance(each, int | float) for each in rows) for rows in _by_column(result)]
    for name, is_number in zip(result.columns, numbers, strict=True):
        table.add_column(escape(name), justify="right" if is_number else "left", overflow="fold")
    for row in result.rows:
        table.add_row(*("" if value is None else escape(str(value)) for value in row))
    console.print(table)


def print_json(result: QueryResult, to: TextIO) -> None:
    """One object a line. Raises BadStatement where two columns have one name."""
    _require_names(result)
    for row in result.rows:
        line = msgspec.json.encode(dict(zip(result.columns, row, strict=True)), enc_hook=str)
        to.write(line.decode() + "\n")


def print_csv(result: QueryResult, to: TextIO) -> None:
    """With a header; NULL is an empty field."""
    writer = csv.writer(to, lineterminator="\n")
    writer.writerow(result.columns)
    writer.writerows(result.rows)


def write_parquet(result: QueryResult, path: Path) -> None:
    """With the types of the query. Raises BadStatement where two columns have one name, NoAnswer where the file cannot be
    written.

    A database of its own does it, because the one with the evidence may not write any file.
    """
    _require_names(result)
    named = zip(result.columns, result.types, strict=True)
    columns = [
        f'unnest(?::{sql_type}[]) AS "{name.replace(chr(34), chr(34) * 2)}"' for name, sql_type in named
    ]
    with duckdb.connect(":memory:") as database:
        database.execute(f"CREATE TABLE result AS SELECT {', '.join(columns)}", _by_column(result))
        try:
            database.table("result").write_parquet(str(path))
        except duckdb.IOException as error:
            raise NoAnswer(f"cannot write {path}: {error}") from error


def _by_column(result: QueryResult) -> list[list[object]]:
    return [[row[at] for row in result.rows] for at in range(len(result.columns))]


def _require_names(result: QueryResult) -> None:
    twice = next((name for name in result.columns if result.columns.count(name) > 1), None)
    if twice is not None:
        raise BadStatement(f'two columns are called "{twice}": name them with AS')
