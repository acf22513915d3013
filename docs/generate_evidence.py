"""Write evidence.md from the evidence schema: `python docs/generate_evidence.py`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from turngate.telemetry import schema, views
from turngate.telemetry.queries import list_views

PAGE: Final = Path(__file__).parent / "evidence.md"
HEAD: Final = "<!-- Generated. To change it: edit telemetry/schema.py or views.py, then `python docs/generate_evidence.py`. -->\n"
INTRODUCTION: Final = """# Evidence

What the sidecar writes down, for whoever asks it with SQL. One DuckDB file a day (UTC) lies in
`<data_dir>/evidence/YYYY-MM-DD.duckdb`. `turngate query` asks all days at once and can change nothing:

```
turngate query "SELECT outcome, count(*) AS n FROM exchanges GROUP BY ALL ORDER BY n DESC"
turngate query "SELECT time, operation, reason, pointer, provider FROM findings ORDER BY time DESC LIMIT 20"
turngate query "SELECT reason, sum(true_refusals), sum(false_refusals), sum(misses) FROM confusion GROUP BY ALL"
turngate query "SELECT upstream, count(*), max(since_s) FROM dispatches WHERE state = 'UNKNOWN' GROUP BY ALL"
turngate query "SELECT cause, count(*), quantile_cont(hold_s, 0.99) FROM streams WHERE cause <> '' GROUP BY ALL"
turngate explain op-0123456789abcdef
```

The files are free while the sidecar does not load, so the `duckdb` shell opens them too, version 1.5 and later; each
file has the views below, over its own day, and its comments (`SELECT * FROM duckdb_columns()`). Loading waits as long as
a shell has a file open; nothing is lost. Open it with `-readonly`, and close it soon.

No message text and no credential is in any column. A column called `at_s` is the proxy's wall clock: it is for people, and
durations are measured by another clock. Days older than the retention are removed with their file.
"""
VERSIONS: Final = """
## Versions

This is schema {version}; `meta` in each file tells which schemas wrote there. A schema only grows: columns, tables and
views are added, and none takes another meaning. Rows of an older file show the default of a column they lack, which
says that nobody told ("", -1, [] or false). A file of a newer Turngate can be read, and `turngate query` and
`turngate report` say so, because what it added may be missing in their views.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD + INTRODUCTION, *_all(), VERSIONS.format(version=schema.SCHEMA_VERSION)])


def _all() -> Iterator[str]:
    yield "## Views\n"
    for name, columns in list_views().items():
        if name == next(iter(schema.TABLES)):
            yield "## Tables\n"
            yield "A row is an event, as the proxy told it.\n"
        yield f"### {name}\n"
        is_view = name in views.VIEWS
        yield (views.VIEWS[name].comment if is_view else schema.table_comment(name)) + "\n"
        yield "| column | type | what it says |"
        yield "|---|---|---|"
        for column, sql_type in columns:
            comment = views.column_comment(name, column) if is_view else schema.column_comment(name, column)
            yield f"| `{column}` | {sql_type} | {comment} |"
        yield ""


if __name__ == "__main__":
    main()
