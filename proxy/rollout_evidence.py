"""What the evidence says of a scope at its present stage, counted for the gate that a promotion has to pass."""

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from turngate.proxy.control import NoEvidence
from turngate.proxy.gates import Evidence, Fault, count_of, newly_enforced
from turngate.proxy.rollout import Rung, Stage, matching

EVIDENCE_S: Final = 7 * 86_400.0
"""How far back evidence is looked for where the stage has been in force for longer."""

# A request that the provider did not answer says nothing about us, so it is no sample; one that we refused is.
_SEEN: Final = """
WITH judged AS (
    SELECT *, list_contains($classes, request_class) AS concerned,
        verdict IN ('illegal', 'waiting') AND outcome <> 'refused' AS asked
    FROM exchange_ended WHERE api <> ''
),
seen AS (
    SELECT upstream, model, operation, at_s, 'sample' AS kind, '' AS what FROM judged
    WHERE concerned AND stage = $stage AND verdict <> 'unjudged'
        AND (outcome = 'refused' OR provider IN ('accepted', 'refused_sequence'))
    UNION ALL
    SELECT upstream, model, operation, at_s, CASE provider WHEN 'accepted' THEN 'false refusal'
            WHEN 'refused_sequence' THEN 'true refusal' ELSE 'unclear' END,
        'of ' || coalesce(reasons[1], 'no named rule')
    FROM judged WHERE concerned AND asked
    UNION ALL
    SELECT upstream, model, operation, at_s, 'miss', 'of ' || coalesce(nullif(provider_reason, ''), 'an unknown rule')
    FROM judged WHERE concerned AND verdict = 'legal' AND provider = 'refused_sequence'
    UNION ALL
    SELECT upstream, model, operation, at_s, 'failure', '(' || error_type || ')'
    FROM judged WHERE starts_with(error_type, 'turngate_')
    UNION ALL
    SELECT w.upstream, coalesce(e.model, ''), w.operation, w.at_s, 'finding', 'of the witness ' || w.witness
    FROM witness_spoke AS w LEFT JOIN exchange_ended AS e USING (operation)
    WHERE w.enforced OR w.witness = 'byte_mismatch'
    UNION ALL
    SELECT d.upstream, coalesce(e.model, ''), d.operation, d.since_s, 'unsettled', ''
    FROM dispatches AS d LEFT JOIN exchange_ended AS e USING (operation) WHERE d.state = 'UNKNOWN'
    UNION ALL
    SELECT NULL, NULL, '', at_s, 'failure', 'in ' || "where" || ' (' || error || ')' FROM failure_counted
)
SELECT upstream, model, kind, what, count(*) AS count, arg_max(operation, at_s, 3) AS operations
FROM seen GROUP BY ALL ORDER BY count DESC, kind, what
"""


def read_evidence(
    evidence_dir: Path, rungs: Sequence[Rung], rung: Rung, to: Stage, *, now_s: float
) -> Evidence:
    """What was seen where this rung may be in force, since it is, that concerns a step to another stage.

    Headers and conversations do not stand in the evidence: a scope that asks for them is judged by all requests of
    its upstream and model. Faults of ours that belong to no upstream count everywhere. Raises NoEvidence.
    """
    import duckdb  # not above: whoever only shows the stages should not wait for it

    from turngate.telemetry.queries import connect_readonly

    since_s = max(rung.since_s, now_s - EVIDENCE_S)
    classes = sorted(kind.value for kind in newly_enforced(rung.stage, to))
    try:
        with contextlib.closing(connect_readonly(evidence_dir, since_s=since_s)) as database:
            cursor = database.execute(_SEEN, {"stage": rung.stage.value, "classes": classes})
            rows = cursor.fetchall()
    except duckdb.Error as error:
        raise NoEvidence(f"cannot read the evidence in {evidence_dir}: {error}") from error
    return _summed(
        (kind, what, count, operations)
        for upstream, model, kind, what, count, operations in rows
        if upstream is None or rung in matching(rungs, upstream, model)
    )


def _summed(seen: Iterable[tuple[str, str, int, list[str]]]) -> Evidence:
    faults: dict[str, dict[str, Fault]] = {}
    for kind, what, count, operations in seen:
        of_kind = faults.setdefault(kind, {})
        before = of_kind.get(what)
        total = count + (before.count if before is not None else 0)
        known = before.operations if before is not None else ()
        of_kind[what] = Fault(f"{_noun(kind, total)} {what}", total, (*known, *filter(None, operations)))

    def of(kind: str) -> tuple[Fault, ...]:
        return tuple(faults.get(kind, {}).values())

    return Evidence(
        samples=count_of(of("sample")),
        true_refusals=count_of(of("true refusal")),
        unclear=count_of(of("unclear")),
        unsettled=count_of(of("unsettled")),
        false_refusals=of("false refusal"),
        misses=of("miss"),
        witnesses=of("finding"),
        failures=of("failure"),
    )


def _noun(kind: str, count: int) -> str:
    plural = "misses" if kind == "miss" else f"{kind}s"
    return kind if count == 1 else plural
