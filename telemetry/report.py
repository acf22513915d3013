"""What the evidence says as one value: the numbers behind `turngate report`, for the terminal, JSON and HTML alike.

Every number is a count over the evidence views. Nothing here decides or words anything, and no message text is in the
evidence that could be shown. Field names are the JSON's.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args, get_type_hints

import msgspec

from turngate.telemetry import schema
from turngate.telemetry.events import WitnessSpoke

if TYPE_CHECKING:
    import duckdb  # `replay` counts in these rows too, and its process must not carry DuckDB

TOP_MAX: Final = 10
"""Rows of a ranking; the totals beside it count everything."""
EXAMPLES_MAX: Final = 3
"""Examples of a kind, the newest first."""
SCOPES_MAX: Final = 1_000
"""Rows of the matrix by model and client, the worst first: apps invent names of models."""
BUCKETS_MAX: Final = 60
_BUCKET_S: Final = (60, 300, 900, 3_600, 10_800, 21_600, 86_400)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What all rows of the report share: fields are columns of the statement that fills them."""


class Totals(Row, frozen=True):
    """All judged traffic (`relayed`: bytes that no dialect speaks for). Quantiles in seconds."""

    exchanges: int
    relayed: int
    first_s: float
    last_s: float
    refused: int
    would_refuse: int
    unjudged: int
    true_refusals: int
    false_refusals: int
    misses: int
    misses_enforced: int
    unanswered: int
    judge_p50_s: float
    judge_p99_s: float


class Witness(Row, frozen=True):
    """What a witness found wrong, where Turngate acted and where it only watched."""

    witness: str
    enforced: int
    watched: int


class Share(Row, frozen=True):
    """Traffic of one upstream, dialect, model or client."""

    name: str
    exchanges: int
    refused: int
    would_refuse: int
    provider_errors: int
    broken: int


class Bucket(Row, frozen=True):
    """Traffic of one piece of time that begins at `at_s`."""

    at_s: float
    exchanges: int
    stopped: int
    broken: int
    provider_errors: int


class Rule(Row, frozen=True):
    """One rule's verdict against the provider's answer (see the view `confusion`)."""

    reason: str
    api: str
    server: str
    true_refusals: int
    false_refusals: int
    misses: int
    unknown: int
    refused_by_us: int


class Scope(Rule, frozen=True):
    """The same for one upstream, model and client: whose requests those are."""

    upstream: str
    model: str
    client: str


class Count(Row, frozen=True):
    """How often something was seen."""

    name: str
    count: int


class Retraction(Row, frozen=True):
    """Turns that did not end well, by cause. `told`: so many apps were told so by Turngate."""

    cause: str
    count: int
    told: int
    preview_bytes: int


class Held(Row, frozen=True):
    """For how long answers were held back, in seconds."""

    answers: int
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


class Calls(Row, frozen=True):
    """Tool calls of answers: what was decided, or where nothing was held, would have been."""

    decision: str
    reason: str
    held: int
    watched: int


class Streams(Row, frozen=True):
    """How streamed answers ended, and what their gates did."""

    ends: tuple[Count, ...]
    retractions: tuple[Retraction, ...]
    held: Held
    calls: tuple[Calls, ...]
    anomalies: tuple[Count, ...]
    leaks: tuple[Count, ...]


class Unknown(Row, frozen=True):
    """Dispatches of an upstream whose outcome is still not known."""

    upstream: str
    count: int
    oldest_age_s: float


class Resolution(Row, frozen=True):
    """How dispatches left UNKNOWN: into which state, why, and after how long."""

    state: str
    how: str
    count: int
    p50_s: float
    max_s: float


class Dispatches(Row, frozen=True):
    """Where dispatches stand."""

    states: tuple[Count, ...]
    unknown: tuple[Unknown, ...]
    resolutions: tuple[Resolution, ...]


class Ours(Row, frozen=True):
    """What went wrong inside Turngate itself. `crashes`: proxies that started and never said they stopped."""

    failures: tuple[Count, ...]
    dropped: tuple[Count, ...]
    unjudged: tuple[Count, ...]
    starts: int
    not_stopped: int
    observer_restarts: int


class Cost(Row, frozen=True):
    """Tokens of answers that were of no use, by how they ended; `uncounted`: no provider said how many."""

    outcome: str
    exchanges: int
    input_tokens: int
    output_tokens: int
    uncounted: int


class Order(Row, frozen=True):
    """A stage that was put in force for `percent` of a scope's conversations; empty: as the settings say again."""

    at_s: float
    scope: str
    stage: str
    percent: int
    who: str
    why: str
    evidence: str


class Example(Row, frozen=True):
    """One exchange as `turngate explain` would open it: its structure, never its contents."""

    kind: str
    at_s: float
    operation: str
    upstream: str
    api: str
    model: str
    stage: str
    verdict: str
    reason: str
    at: str
    messages: int
    outcome: str
    provider: str


class Report(Row, frozen=True):
    """The whole report over `since_s` to `now_s` (Unix seconds)."""

    since_s: float
    now_s: float
    totals: Totals
    witnesses: tuple[Witness, ...]
    traffic: dict[str, tuple[Share, ...]]
    bucket_s: int
    timeline: tuple[Bucket, ...]
    rules: tuple[Rule, ...]
    scopes: tuple[Scope, ...]
    soft: tuple[Count, ...]
    streams: Streams
    dispatches: Dispatches
    ours: Ours
    cost: tuple[Cost, ...]
    orders: tuple[Order, ...]
    examples: tuple[Example, ...]


R = TypeVar("R", bound=Row)


def gather(
    database: "duckdb.DuckDBPyConnection",
    *,
    since_s: float,
    now_s: float,
    told: Callable[[str], None] = lambda part: None,
) -> Report:
    """Ask an evidence database (`queries.connect_readonly`) for everything. `told` hears which part comes next.

    Raises duckdb.Error.
    """
    told("totals")
    totals = _one(database, _TOTALS, Totals)
    bucket_s = _bucket_s(totals.last_s - totals.first_s)
    told("traffic")
    traffic = {
        name: _all(database, _TRAFFIC.format(name=name), Share)
        for name in ("upstream", "api", "model", "client")
    }
    timeline = _all(database, _TIMELINE.format(bucket_s=bucket_s), Bucket)
    told("rules")
    rules = _all(database, _RULES, Rule)
    scopes = _all(database, _SCOPES, Scope)
    soft = _all(database, _SOFT, Count)
    told("streams")
    streams = _streams(database)
    told("dispatches")
    dispatches = _dispatches(database, now_s)
    told("failures, cost and examples")
    return Report(
        since_s=since_s,
        now_s=now_s,
        totals=totals,
        witnesses=_all(database, _WITNESSES, Witness),
        traffic=traffic,
        bucket_s=bucket_s,
        timeline=timeline,
        rules=rules,
        scopes=scopes,
        soft=soft,
        streams=streams,
        dispatches=dispatches,
        ours=_ours(database),
        cost=_all(database, _COST, Cost),
        orders=_all(database, _ORDERS, Order),
        examples=tuple(
            example
            for kind, condition in _EXAMPLE_KINDS.items()
            for example in _all(database, _EXAMPLES.format(kind=kind, condition=condition), Example)
        ),
    )


def _all(
    database: "duckdb.DuckDBPyConnection", sql: str, row_type: type[R], **parameters: float
) -> tuple[R, ...]:
    cursor = database.execute(sql, parameters or None)
    names = [str(column[0]) for column in cursor.description or ()]
    return tuple(
        msgspec.convert(dict(zip(names, row, strict=True)), row_type, strict=False)
        for row in cursor.fetchall()
    )


def _one(database: "duckdb.DuckDBPyConnection", sql: str, row_type: type[R]) -> R:
    (row,) = _all(database, sql, row_type)
    return row


def _number(database: "duckdb.DuckDBPyConnection", sql: str) -> int:
    row: tuple[Any, ...] | None = database.execute(sql).fetchone()
    return int(row[0]) if row else 0


def _bucket_s(span_s: float) -> int:
    return next((each for each in _BUCKET_S if span_s / each < BUCKETS_MAX), _BUCKET_S[-1])


def _streams(database: "duckdb.DuckDBPyConnection") -> Streams:
    return Streams(
        ends=_all(database, _counts("streams", "outcome"), Count),
        retractions=_all(database, _RETRACTIONS, Retraction),
        held=_one(database, _HELD, Held),
        calls=_all(database, _CALLS, Calls),
        anomalies=_all(database, _counts("anomaly_seen", "reason"), Count),
        leaks=_all(database, _counts("preview_leaked", "reason"), Count),
    )


def _dispatches(database: "duckdb.DuckDBPyConnection", now_s: float) -> Dispatches:
    return Dispatches(
        states=_all(database, _counts("dispatches", "state"), Count),
        unknown=_all(database, _UNKNOWN, Unknown, now_s=now_s),
        resolutions=_all(database, _RESOLUTIONS, Resolution),
    )


def _ours(database: "duckdb.DuckDBPyConnection") -> Ours:
    return Ours(
        failures=_all(database, _counts("failure_counted", "\"where\" || ': ' || error"), Count),
        dropped=_all(database, _DROPPED, Count),
        unjudged=_all(database, _counts("request_unjudged", "why"), Count),
        starts=_number(database, "SELECT count(*) FROM proxy_started"),
        not_stopped=_number(
            database,
            "SELECT count(*) FROM proxy_started WHERE instance NOT IN (SELECT instance FROM proxy_stopped)",
        ),
        observer_restarts=_number(database, "SELECT count(*) FROM observer_started WHERE restart > 0"),
    )


def _counts(table: str, of: str) -> str:
    return f"SELECT {of} AS name, count(*) AS count FROM {table} GROUP BY ALL ORDER BY count DESC, name"


# What Turngate holds against a request, whatever the stage did about it, and what a provider's answer says about that.
_OURS: Final = "verdict IN ('illegal', 'waiting')"
_ASKED: Final = f"({_OURS} AND outcome <> 'refused')"
_FALSE_REFUSAL: Final = f"{_ASKED} AND provider = 'accepted'"
_MISS: Final = "verdict = 'legal' AND provider = 'refused_sequence'"
_BROKEN: Final = "outcome IN ('retracted', 'unknown')"
_ENFORCING: Final = "stage IN ('enforce-text', 'enforce-tools', 'enforce-schema')"

_TOTALS: Final = f"""
SELECT count(*) FILTER (api <> '') AS exchanges, count(*) FILTER (api = '') AS relayed,
    coalesce(min(at_s), 0) AS first_s, coalesce(max(at_s), 0) AS last_s,
    count(*) FILTER (outcome = 'refused' AND {_OURS}) AS refused,
    count(*) FILTER ({_ASKED}) AS would_refuse,
    count(*) FILTER (api <> '' AND verdict = 'unjudged') AS unjudged,
    count(*) FILTER ({_ASKED} AND provider = 'refused_sequence') AS true_refusals,
    count(*) FILTER ({_FALSE_REFUSAL}) AS false_refusals,
    count(*) FILTER ({_MISS}) AS misses,
    count(*) FILTER ({_MISS} AND {_ENFORCING}) AS misses_enforced,
    count(*) FILTER ({_ASKED} AND provider NOT IN ('accepted', 'refused_sequence')) AS unanswered,
    coalesce(quantile_cont(judge_s + claim_s, 0.5) FILTER (api <> ''), 0) AS judge_p50_s,
    coalesce(quantile_cont(judge_s + claim_s, 0.99) FILTER (api <> ''), 0) AS judge_p99_s
FROM exchange_ended
"""

# Each witness has its row: a zero says that it looked.
_WITNESSES: Final = f"""
SELECT witness, count(operation) FILTER (enforced) AS enforced, count(operation) FILTER (NOT enforced) AS watched
FROM (SELECT unnest({schema.literal(get_args(get_type_hints(WitnessSpoke)["witness"]))}) AS witness)
LEFT JOIN witness_spoke USING (witness) GROUP BY witness ORDER BY witness
"""

_TRAFFIC: Final = f"""
SELECT {{name}} AS name, count(*) AS exchanges, count(*) FILTER (outcome = 'refused' AND {_OURS}) AS refused,
    count(*) FILTER ({_ASKED}) AS would_refuse,
    count(*) FILTER (outcome = 'provider_error') AS provider_errors, count(*) FILTER ({_BROKEN}) AS broken
FROM exchange_ended WHERE api <> '' GROUP BY ALL ORDER BY exchanges DESC, name LIMIT {TOP_MAX}
"""

_TIMELINE: Final = f"""
SELECT floor(at_s / {{bucket_s}}) * {{bucket_s}} AS at_s, count(*) AS exchanges,
    count(*) FILTER ({_OURS}) AS stopped, count(*) FILTER ({_BROKEN}) AS broken,
    count(*) FILTER (outcome = 'provider_error' AND NOT ({_OURS})) AS provider_errors
FROM exchange_ended WHERE api <> '' GROUP BY ALL ORDER BY at_s
"""

_COUNTS: Final = """sum(true_refusals) AS true_refusals, sum(false_refusals) AS false_refusals,
    sum(misses) AS misses, sum(unknown) AS unknown, sum(refused_by_us) AS refused_by_us"""
_WORST_FIRST: Final = "sum(false_refusals) + sum(misses) DESC, sum(true_refusals) + sum(refused_by_us) DESC"

_RULES: Final = f"""
SELECT reason, api, server, {_COUNTS} FROM confusion GROUP BY ALL ORDER BY {_WORST_FIRST}, reason, api, server
"""

_SCOPES: Final = f"""
SELECT reason, api, server, upstream, model, client, {_COUNTS} FROM confusion GROUP BY ALL
ORDER BY {_WORST_FIRST}, reason, api, server, upstream, model, client LIMIT {SCOPES_MAX}
"""

_SOFT: Final = f"""
SELECT reason AS name, count(*) AS count FROM finding_made WHERE level = 'soft'
GROUP BY ALL ORDER BY count DESC, name LIMIT {TOP_MAX}
"""

_RETRACTIONS: Final = """
SELECT cause, count(*) AS count, count(*) FILTER (enforced) AS told,
    sum(greatest(preview_bytes, 0)) AS preview_bytes
FROM preview_retracted GROUP BY cause ORDER BY count DESC, cause
"""

_HELD: Final = """
SELECT count(*) AS answers, coalesce(quantile_cont(hold_s, 0.5), 0) AS p50_s,
    coalesce(quantile_cont(hold_s, 0.9), 0) AS p90_s, coalesce(quantile_cont(hold_s, 0.99), 0) AS p99_s,
    coalesce(max(hold_s), 0) AS max_s
FROM (SELECT max(hold_s) AS hold_s FROM call_decided WHERE held GROUP BY operation)
"""

_CALLS: Final = """
SELECT decision, reason, count(*) FILTER (held) AS held, count(*) FILTER (NOT held) AS watched
FROM call_decided GROUP BY ALL ORDER BY count(*) DESC, decision, reason
"""

_UNKNOWN: Final = """
SELECT upstream, count(*) AS count, max(greatest($now_s - since_s, 0)) AS oldest_age_s
FROM dispatches WHERE state = 'UNKNOWN' GROUP BY upstream ORDER BY oldest_age_s DESC
"""

_RESOLUTIONS: Final = """
SELECT "after" AS state, how, count(*) AS count, coalesce(median(unknown_for_s), 0) AS p50_s,
    coalesce(max(unknown_for_s), 0) AS max_s
FROM state_changed JOIN (SELECT operation, unknown_for_s FROM dispatches) USING (operation)
WHERE "before" = 'UNKNOWN' GROUP BY ALL ORDER BY count DESC, state, how
"""

_DROPPED: Final = """
SELECT event_class AS name, sum(count) AS count FROM events_dropped GROUP BY ALL ORDER BY name
"""

# `incomplete` is left out: the provider ended that turn itself, and the app knows.
_COST: Final = """
SELECT outcome, count(*) AS exchanges, coalesce(sum(input_tokens) FILTER (input_tokens > 0), 0) AS input_tokens,
    coalesce(sum(output_tokens) FILTER (output_tokens > 0), 0) AS output_tokens,
    count(*) FILTER (input_tokens < 0 AND output_tokens < 0) AS uncounted
FROM exchange_ended WHERE api <> '' AND outcome IN ('retracted', 'unknown', 'client_gone')
GROUP BY outcome ORDER BY exchanges DESC, outcome
"""

# A proxy that starts tells the orders that stand once more.
_ORDERS: Final = f"""
SELECT min(at_s) AS at_s, scope, stage, percent, who, why, evidence FROM stage_ordered
GROUP BY scope, stage, percent, who, why, evidence, set_s ORDER BY min(at_s) DESC, scope LIMIT {TOP_MAX}
"""

_UNKNOWN_NOW: Final = "operation IN (SELECT operation FROM dispatches WHERE state = 'UNKNOWN')"
_WITHHELD: Final = "operation IN (SELECT operation FROM call_decided WHERE decision = 'withheld')"

_EXAMPLE_KINDS: Final = {
    "miss": _MISS,
    "false refusal": _FALSE_REFUSAL,
    "witness": "operation IN (SELECT operation FROM witness_spoke)",
    "still unknown": _UNKNOWN_NOW,
    "fault of ours": "error_type LIKE 'turngate\\_%' ESCAPE '\\'",
    "calls withheld": _WITHHELD,
    "broken answer": f"{_BROKEN} AND NOT {_WITHHELD} AND NOT {_UNKNOWN_NOW}",
}
"""The worst first: what Turngate got wrong, then what it could not finish, then what it kept from the app."""

# Not over the view `exchanges`: joining a million of them to show three took half a second a kind.
_EXAMPLES: Final = f"""
WITH worst AS (
    SELECT * FROM exchange_ended WHERE api <> '' AND ({{condition}}) ORDER BY at_s DESC LIMIT {EXAMPLES_MAX}
),
cause AS (
    SELECT operation, any_value(cause) AS cause FROM preview_retracted
    WHERE operation IN (SELECT operation FROM worst) GROUP BY operation
),
place AS (
    SELECT operation, min_by("at", level) AS pointer FROM finding_made
    WHERE operation IN (SELECT operation FROM worst) GROUP BY operation
)
SELECT '{{kind}}' AS kind, at_s, operation, upstream, api, model, stage, verdict,
    coalesce(cause.cause, reasons[1], provider_reason) AS reason,
    coalesce(place.pointer, '') AS "at", messages, outcome, provider
FROM worst LEFT JOIN cause USING (operation) LEFT JOIN place USING (operation) ORDER BY at_s DESC
"""
