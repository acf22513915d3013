"""The views of the evidence beside its tables: the questions people ask most, joined once and for all.

They stand over all days in `queries`, and in each day file for whoever opens it with the `duckdb` shell. None of
them orders by a clock where order matters: how a dispatch stands is told by the moves themselves.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from turngate.telemetry import schema


@dataclass(frozen=True, slots=True)
class View:
    """`own` says what no table says of a column of that name."""

    comment: str
    sql: str
    own: Mapping[str, str]


def column_comment(view: str, column: str) -> str:
    """What a view's column says. Raises KeyError where nobody wrote it down."""
    own = VIEWS[view].own.get(column)
    if own is not None:
        return own
    for table in _FIRST_ASKED:
        if (table, column) in schema.OWN_COMMENTS:
            return schema.OWN_COMMENTS[table, column]
    return schema.SHARED_COMMENTS[column]


_FIRST_ASKED: Final = ("exchange_ended", "finding_made")
_TIME: Final = "make_timestamp(CAST(floor({}.at_s * 1e6) AS BIGINT)) AS time"
_TIME_COMMENT: Final = "at_s as a timestamp in UTC."

_ENDED: Final = ", ".join(f"e.{name}" for name, _ in schema.TABLES["exchange_ended"])

_DISPATCHES: Final = """
WITH step AS (
    SELECT operation, at_s, how, "after" AS state, 1 AS way FROM state_changed
    UNION ALL
    SELECT operation, at_s, '', "before", -1 FROM state_changed WHERE "before" <> ''
),
-- A dispatch stands where it went in once more than it came out; if an event was lost, at the latest such state.
standing AS (
    SELECT operation, state, arg_max(how, at_s) FILTER (way > 0) AS how, max(at_s) FILTER (way > 0) AS since_s
    FROM step GROUP BY operation, state HAVING sum(way) > 0
),
latest AS (
    SELECT operation, arg_max(state, since_s) AS state, arg_max(how, since_s) AS how, max(since_s) AS since_s
    FROM standing GROUP BY operation
),
life AS (
    SELECT operation, any_value(upstream) AS upstream, min(at_s) AS first_s,
        max(at_s) FILTER ("after" = 'UNKNOWN') AS unknown_s, max(at_s) FILTER ("before" = 'UNKNOWN') AS resolved_s,
        bool_or(list_contains(through, 'UNKNOWN')) AS passed_unknown
    FROM state_changed GROUP BY operation
)
SELECT life.operation, life.upstream, latest.state, latest.how, life.first_s, latest.since_s,
    life.unknown_s IS NOT NULL OR life.resolved_s IS NOT NULL OR life.passed_unknown AS was_unknown,
    -- Not greatest(): it skips NULL, and so would call a time that nobody told 0.
    CASE WHEN latest.state = 'UNKNOWN' THEN NULL WHEN life.resolved_s < life.unknown_s THEN 0
        ELSE life.resolved_s - life.unknown_s END AS unknown_for_s
FROM life JOIN latest USING (operation)
"""

_CALLS: Final = """(
    SELECT operation, count(*) FILTER (decision = 'released') AS calls_released,
        count(*) FILTER (decision = 'withheld') AS calls_withheld
    FROM call_decided GROUP BY operation)"""
_RETRACTIONS: Final = """(
    SELECT operation, any_value(cause) AS cause, bool_or(enforced) AS enforced, max(preview_bytes) AS preview_bytes
    FROM preview_retracted GROUP BY operation)"""
_ANOMALIES: Final = """(
    SELECT operation, list(DISTINCT reason ORDER BY reason) AS anomalies FROM anomaly_seen GROUP BY operation)"""
_WITNESSES: Final = """(
    SELECT operation, list(DISTINCT witness ORDER BY witness) AS witnesses FROM witness_spoke GROUP BY operation)"""
_FINDINGS: Final = """(
    SELECT operation, list(DISTINCT reason ORDER BY reason) AS findings, min_by("at", level) AS pointer
    FROM finding_made GROUP BY operation)"""

_EXCHANGES: Final = f"""
SELECT {_TIME.format("e")}, {_ENDED}, coalesce(f.findings, []) AS findings, coalesce(f.pointer, '') AS pointer,
    coalesce(c.calls_released, 0) AS calls_released, coalesce(c.calls_withheld, 0) AS calls_withheld,
    coalesce(r.cause, '') AS cause, coalesce(r.preview_bytes, 0) AS preview_bytes,
    coalesce(a.anomalies, []) AS anomalies, coalesce(w.witnesses, []) AS witnesses,
    coalesce(d.state, '') AS state, coalesce(d.how, '') AS how
FROM exchange_ended AS e
LEFT JOIN {_FINDINGS} AS f USING (operation)
LEFT JOIN {_CALLS} AS c USING (operation)
LEFT JOIN {_RETRACTIONS} AS r USING (operation)
LEFT JOIN {_ANOMALIES} AS a USING (operation)
LEFT JOIN {_WITNESSES} AS w USING (operation)
LEFT JOIN dispatches AS d USING (operation)
"""

_FINDING_VIEW: Final = f"""
SELECT {_TIME.format("f")}, f.operation, f.upstream, f.api, e.server, e.model, e.client, e.stage, f.reason, f.level,
    f."at" AS pointer, f.action, e.verdict, e.outcome, e.provider, e.provider_reason
FROM finding_made AS f LEFT JOIN exchange_ended AS e USING (operation)
"""

_STREAMS: Final = f"""
SELECT {_TIME.format("e")}, e.operation, e.upstream, e.api, e.model, e.client, e.stage, e.outcome,
    coalesce(r.cause, '') AS cause, coalesce(r.enforced, false) AS enforced, e.finish,
    coalesce(r.preview_bytes, 0) AS preview_bytes, e.response_bytes, e.first_byte_s, e.hold_s, e.total_s,
    coalesce(c.calls_released, 0) AS calls_released, coalesce(c.calls_withheld, 0) AS calls_withheld,
    coalesce(a.anomalies, []) AS anomalies, e.input_tokens, e.output_tokens
FROM exchange_ended AS e
LEFT JOIN {_CALLS} AS c USING (operation)
LEFT JOIN {_RETRACTIONS} AS r USING (operation)
LEFT JOIN {_ANOMALIES} AS a USING (operation)
WHERE e.stream AND e.api <> ''
"""

# An exchange that we refused ourselves tells nothing about its provider: it has a column of its own.
_CONFUSION: Final = """
SELECT reason, api, server, model, client, upstream,
    count(*) FILTER (ours AND outcome <> 'refused' AND provider = 'refused_sequence') AS true_refusals,
    count(*) FILTER (ours AND outcome <> 'refused' AND provider = 'accepted') AS false_refusals,
    count(*) FILTER (NOT ours) AS misses,
    count(*) FILTER (ours AND outcome <> 'refused' AND provider NOT IN ('refused_sequence', 'accepted')) AS unknown,
    count(*) FILTER (ours AND outcome = 'refused') AS refused_by_us
FROM (
    SELECT unnest(reasons) AS reason, api, server, model, client, upstream, outcome, provider, true AS ours
    FROM exchange_ended WHERE verdict IN ('illegal', 'waiting')
    UNION ALL
    SELECT provider_reason, api, server, model, client, upstream, outcome, provider, false
    FROM exchange_ended WHERE verdict = 'legal' AND provider = 'refused_sequence'
)
GROUP BY ALL
"""

_JOINED: Final = {
    "time": _TIME_COMMENT,
    "calls_released": "Tool calls of the answer that went to the app whole (where watched only: would have).",
    "calls_withheld": "Tool calls of the answer that did not (where watched only: would not have).",
    "cause": "Why the answer's turn did not end well; empty if it did.",
    "anomalies": "Irregularities in the answer that did not end it, each once.",
    "preview_bytes": "Bytes of a turn that did not end well which the app had been given.",
}

VIEWS: Final[Mapping[str, View]] = {
    "dispatches": View(
        "One row a dispatch: how it stands by the moves that were told.",
        _DISPATCHES,
        {
            "state": "The last state.",
            "how": "Short cause of the move into it.",
            "first_s": "When it was first told of, Unix seconds.",
            "since_s": "When it entered its state, Unix seconds.",
            "was_unknown": "Whether it was ever UNKNOWN.",
            "unknown_for_s": "Seconds it was UNKNOWN the last time; NULL if it never was, still is, or its moves were told together.",
        },
    ),
    "exchanges": View(
        "One row an exchange, with what its findings, calls, retraction, witnesses and dispatch say.",
        _EXCHANGES,
        {
            **_JOINED,
            "findings": "Reasons of all findings, hard and soft, each once.",
            "pointer": "JSON pointer of a finding, of a hard one if there is any; empty without one.",
            "witnesses": "What witnesses found wrong, each once.",
            "state": "The last state of its dispatch; empty without one.",
            "how": "Short cause of the move into that state.",
        },
    ),
    "findings": View(
        "One row a finding, with the exchange it is about and the provider's answer.",
        _FINDING_VIEW,
        {
            "time": _TIME_COMMENT,
            # The table's own name for it has to be quoted in SQL.
            "pointer": "JSON pointer into the body that the app sent.",
        },
    ),
    "confusion": View(
        "Each rule's verdict against the provider's answer, by dialect, server, model, client and upstream.",
        _CONFUSION,
        {
            "reason": "The rule; of a miss what the provider objects to, empty where its message is not known.",
            "true_refusals": "We would refuse it, and the provider refused the sequence.",
            "false_refusals": "We would refuse it, and the provider answered it.",
            "misses": "We called it legal, and the provider refused the sequence.",
            "unknown": "We would refuse it, and the provider's answer says nothing about the sequence.",
            "refused_by_us": "We refused it, so the provider was not asked.",
        },
    ),
    "streams": View(
        "One row a streamed answer: how it ended, how long it was held, what became of its tool calls.",
        _STREAMS,
        {**_JOINED, "enforced": "Whether Turngate told the app that the turn did not end well."},
    ),
}
"""By name, in an order in which each stands on earlier ones only."""


def view_statements(prefix: str) -> str:
    """SQL that puts all views into the database called `prefix`, over the tables there."""
    return ";\n".join(
        f"CREATE OR REPLACE VIEW {prefix}{name} AS {view.sql.strip()}" for name, view in VIEWS.items()
    )


def comment_statements(prefix: str, columns: Iterable[tuple[str, str]]) -> str:
    """SQL that says in the database called `prefix` what its views and these (view, column) mean."""
    return ";\n".join(
        [f"COMMENT ON VIEW {prefix}{name} IS {schema.literal(view.comment)}" for name, view in VIEWS.items()]
        + [
            f'COMMENT ON COLUMN {prefix}{view}."{column}" IS {schema.literal(column_comment(view, column))}'
            for view, column in columns
        ]
    )
