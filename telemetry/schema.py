"""The evidence schema: tables, views, and what each of their columns means. The one source of the day files' comments
and of docs/evidence.md.

Tables come from the events, their defaults too; what a field means to somebody who reads rows is said here. A file
knows the schema it was written with (`meta`). Schemas only grow: a table, a view or a column is added and never takes
another meaning, so that an older reader and an older writer can go on with a newer file. Views give an older file's
rows the defaults of the columns it lacks.
"""

import inspect
from collections.abc import Mapping
from typing import Final, get_type_hints

import msgspec

from turngate.telemetry.events import EVENT_TYPES, Event

SCHEMA_VERSION: Final = 3
"""Raised with every change of a table or view. 1: files without `meta`."""

Columns = tuple[tuple[str, str], ...]

_SQL_TYPES: Final = {bool: "BOOLEAN", int: "BIGINT", float: "DOUBLE", tuple[str, ...]: "VARCHAR[]"}


def table_of(event_type: type[Event]) -> str:
    """The evidence table of an event type: its tag."""
    return str(event_type.__struct_config__.tag)


def columns_of(event_type: type[Event]) -> Columns:
    """Column names and SQL types of an event type, the time first."""
    hints = get_type_hints(event_type)
    names = sorted(event_type.__struct_fields__, key=lambda name: name != "at_s")
    return tuple((name, _SQL_TYPES.get(hints[name], "VARCHAR")) for name in names)


def defaults_of(event_type: type[Event]) -> dict[str, str]:
    """SQL literals of the fields that an older writer does not know: each says "not told"."""
    fields = msgspec.structs.fields(event_type)
    return {field.name: literal(field.default) for field in fields if field.default is not msgspec.NODEFAULT}


def literal(value: object) -> str:
    """A value as SQL."""
    match value:
        case bool() | int() | float():
            return str(value)
        case str():
            return "'" + value.replace("'", "''") + "'"
        case tuple():
            return "[" + ", ".join(map(literal, value)) + "]"
    raise TypeError(f"no SQL literal for {value!r}")


META: Final = "meta"
SEGMENTS: Final = "segments"
TABLES: Final[dict[str, Columns]] = {
    table_of(event_type): columns_of(event_type) for event_type in EVENT_TYPES
}
BOOKS: Final[dict[str, Columns]] = {
    SEGMENTS: (("name", "VARCHAR"), ("rows", "BIGINT"), ("loaded_s", "DOUBLE")),
    META: (("day", "VARCHAR"), ("schema_version", "BIGINT"), ("since_s", "DOUBLE")),
}
"""What the recorder keeps about a file, in the file."""
ALL_TABLES: Final[dict[str, Columns]] = {**TABLES, **BOOKS}
DEFAULTS: Final[Mapping[str, Mapping[str, str]]] = {
    table_of(event_type): defaults_of(event_type) for event_type in EVENT_TYPES
}


def table_comment(table: str) -> str:
    """One sentence or two on what a row is."""
    return BOOK_COMMENTS.get(table) or TABLE_COMMENTS[table]


def column_comment(table: str, column: str) -> str:
    """What a column says. Raises KeyError where nobody wrote it down: a test asks for all of them."""
    return OWN_COMMENTS.get((table, column)) or SHARED_COMMENTS[column]


def comment_statements(prefix: str) -> str:
    """SQL that says in the database called `prefix` what its tables and their columns mean."""
    return ";\n".join(
        statement
        for table, columns in ALL_TABLES.items()
        for statement in (
            f"COMMENT ON TABLE {prefix}{table} IS {literal(table_comment(table))}",
            *(
                f'COMMENT ON COLUMN {prefix}{table}."{name}" IS {literal(column_comment(table, name))}'
                for name, _ in columns
            ),
        )
    )


TABLE_COMMENTS: Final[Mapping[str, str]] = {
    table_of(event_type): " ".join((inspect.getdoc(event_type) or "").split()) for event_type in EVENT_TYPES
}

BOOK_COMMENTS: Final[Mapping[str, str]] = {
    SEGMENTS: "The spool segments whose rows this file has: a segment that comes again is not loaded again.",
    META: "The schemas that wrote into a file, one row each: the highest tells what to expect.",
}

SHARED_COMMENTS: Final[Mapping[str, str]] = {
    "action": "What this stage did about the finding: rejected, would_reject or reported.",
    "answered_model": "The model that the provider says it used; empty where it did not say.",
    "api": "The dialect, e.g. openai.chat; empty for relayed bytes.",
    "at": "JSON pointer into the body that the app sent.",
    "at_s": "When it was told: Unix seconds by the proxy's wall clock. For people; it orders nothing.",
    "cause": "The reason why the turn did not end well, out of the closed list of reasons.",
    "client": "The app's SDK and the first number of its version, out of a closed list, e.g. openai-python/3.",
    "enforced": "Whether the stage let Turngate act on it; if not, it was watched only.",
    "finish": "Why the provider stopped, in neutral words; empty where it did not say.",
    "instance": "The proxy process: random per start.",
    "model": "The model that the app asked for.",
    "operation": "The exchange: the same id in every table, in the ledger and in x-turngate-operation.",
    "preview_bytes": "How many bytes of the turn the app had been given, -1 where nobody counted.",
    "provider": "What the provider made of the request: accepted, refused_sequence, refused_other, unknown; empty "
    "where it was not asked.",
    "provider_reason": "What the provider objects to, in our words, as far as its message is known.",
    "reason": "Out of the closed list of reasons, e.g. result.orphan; each has a page in docs/rules.",
    "server": "The family whose rules applied, e.g. openai, azure, vllm.",
    "stage": "The stage in force: off, observe, enforce-text, enforce-tools, enforce-schema.",
    "upstream": "The configured name of the provider.",
    "verdict": "legal, waiting (a call has no result yet), illegal or unjudged; the same at every stage.",
}
"""What a column means wherever it stands."""

OWN_COMMENTS: Final[Mapping[tuple[str, str], str]] = {
    (table, column): comment
    for table, columns in {
        "proxy_started": {
            "version": "Turngate's version.",
            "pid": "Process id, as the proxy's own container sees it.",
        },
        "proxy_stopped": {"open_exchanges": "Exchanges that were cut off because the drain time was over."},
        "proxy_pulse": {
            "open_exchanges": "Exchanges that were going on.",
            "open_streams": "Streamed answers that were going on.",
            "held_bytes": "Bytes that gates held back at that moment.",
            "eventloop_lag_s": "How late the event loop was, in seconds.",
        },
        "observer_started": {"restart": "0 for the first of this proxy process, then one more each time."},
        "stage_ordered": {
            "stage": "The stage ordered; empty: as the settings say again.",
            "who": "The operator's name; turngate for an automatic rollback.",
            "why": "The reason the operator gave.",
            "scope": "What it covers: UPSTREAM[/MODEL][,HEADER=VALUE]; all: everything, whatever the settings say.",
            "percent": "Of the scope's conversations.",
            "rest": "The stage of the others; empty: as the next scope says.",
            "evidence": "By what it was decided, in one sentence; empty where nobody asked for any.",
            "automatic": "Whether Turngate rolled the scope back by itself.",
            "set_s": "When it was given, Unix time. A proxy that starts tells the orders that stand again: with a later "
            "at_s and the same set_s.",
        },
        "exchange_ended": {
            "stream": "Whether the app asked for a streamed answer.",
            "outcome": "How it ended for the app: passed, refused (by us, nothing was sent), provider_error, "
            "retracted, incomplete, unsent, client_gone, unknown.",
            "status": "HTTP status that the app got; 0 if it left before one.",
            "error_type": "What went wrong; it begins with whose fault it is: caller_, policy_, provider_, "
            "turngate_. Empty if nothing did.",
            "messages": "Messages in the request.",
            "request_bytes": "Size of the request's body as sent by the app.",
            "response_bytes": "Size of the body that went to the app.",
            "judge_s": "Seconds spent on decoding and judging.",
            "claim_s": "Seconds until the dispatch was on disk; 0 where it is written behind.",
            "first_byte_s": "Seconds from the request to the first byte of the answer; 0 without one.",
            "total_s": "Seconds from the request to the end, by a monotonic clock.",
            "reasons": "What the hard findings say, each once: why it was refused, or would have been.",
            "input_tokens": "As the provider counted them; -1 where it did not say.",
            "output_tokens": "As the provider counted them; -1 where it did not say.",
            "hold_s": "Seconds for which something of the answer was held back.",
            "request_class": "What a stage's promise about it is about: text or tools; empty where it was not judged.",
            "traceparent": "W3C trace context as the app sent it, where it is well formed.",
            "retry_of": "The operation that the app's SDK repeats with this one, as it says itself; empty: none.",
        },
        "finding_made": {
            "level": "hard: this provider refuses it, there is evidence; soft: it takes it, the meaning is broken."
        },
        "request_unjudged": {
            "surface": "What was asked for: a dialect, or unknown.",
            "why": "The reason why nothing was judged, e.g. body.undecodable.",
        },
        "call_decided": {
            "decision": "released: it went to the app whole; withheld: it did not. Where nothing was held: what "
            "would have been decided.",
            "reason": "Why it was withheld; empty if it was released.",
            "held": "Whether it was really held; if not, it was watched only.",
            "hold_s": "Seconds for which it was held.",
            "hold_bytes": "Bytes that were held with it at most.",
        },
        "state_changed": {
            "before": "The state it left; empty for the first.",
            "after": "The state it entered: see the dispatch states in the documentation.",
            "how": "Short cause of the last move, e.g. eof, connection_end, operator.",
            "through": "States passed between the two, in order, where moves are told together.",
        },
        "preview_leaked": {
            "cause": "Why that turn had been retracted.",
            "retracted_operation": "The exchange in which it was retracted.",
            "whole": "Whether all that the app had been shown came back, not only its beginning.",
        },
        "witness_spoke": {
            "witness": "partial_tool_dispatch: the app got a tool call that is not whole in an answer that looks "
            "ended. byte_mismatch: what went out is not what came in.",
            "detail": "Where to look; never contents.",
        },
        "failure_counted": {
            "where": "The part of Turngate that failed.",
            "error": "The kind of error; never a body.",
        },
        "events_dropped": {
            "event_class": "verdict: events about verdicts and states, which outlive others; other: the rest.",
            "count": "How many were lost.",
        },
        SEGMENTS: {
            "name": "File name of the segment.",
            "rows": "Rows of it that belong to this day.",
            "loaded_s": "When it was loaded, Unix seconds.",
        },
        META: {
            "day": "The file's day (UTC).",
            "schema_version": "The evidence schema that wrote into the file.",
            "since_s": "When it did so first, Unix seconds.",
        },
    }.items()
    for column, comment in columns.items()
}
"""What a column means in one table."""
