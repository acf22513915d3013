"""What witnesses say that share no code with the decisions."""

from typing import Final

from panels import NONE_IS_FINE, Advice, Page, Query, grid, in_range, lines, metric, number, rate

FINE: Final = (
    number(
        "Misses where enforced",
        in_range("illegal_sequences_sent_total", stage="~enforce-.*"),
        Advice("0.", "a rule is missing for what this provider refuses.", "TurngateIllegalSequenceSent"),
        steps=NONE_IS_FINE,
    ),
    number(
        "False refusals",
        in_range("shadow_verdicts_total", verdict="~illegal|waiting", provider="accepted"),
        Advice(
            "0: what we call illegal, the provider refuses.",
            "do not raise the stage; the reason's rule is wrong for this server.",
            "TurngateFalseRefusal",
        ),
        steps=NONE_IS_FINE,
    ),
    number(
        "Half tool calls let through",
        in_range("partial_tool_dispatch_total", enforced="true"),
        Advice("0.", "the gate let half a call pass: roll back, report it.", "TurngateWitnessSpoke"),
        steps=NONE_IS_FINE,
    ),
    number(
        "Changed bytes",
        in_range("byte_mismatch_total"),
        Advice(
            "0 at every stage.",
            "what was passed was not passed as it was: report it.",
            "TurngateWitnessSpoke",
        ),
        steps=NONE_IS_FINE,
    ),
    number(
        "Failures of our own",
        in_range("observer_failures_total"),
        Advice("0.", "traffic went on; the table below says where.", "TurngateFailing"),
        steps=NONE_IS_FINE,
    ),
    number(
        "Events lost",
        in_range("spool_dropped_total"),
        Advice("0.", "from here on these figures are too low.", "TurngateEvidenceDropped"),
        steps=NONE_IS_FINE,
    ),
)
AGREEMENT: Final = (
    lines(
        "Where we and the provider disagree",
        [
            Query(rate("illegal_sequences_sent_total", "stage"), "missed at {{stage}}"),
            Query(
                rate("shadow_verdicts_total", "reason", verdict="~illegal|waiting", provider="accepted")
                + " > 0",
                "false refusal: {{reason}}",
            ),
        ],
        Advice(
            "nothing.",
            "`turngate explain` on an exemplar's operation shows both sides.",
            "TurngateFalseRefusal",
        ),
        unit="ops",
        exemplars=True,
    ),
    grid(
        "Our verdict against the provider's answer",
        in_range("shadow_verdicts_total", "verdict, provider, reason") + " >= 0.5",
        Advice(
            "legal and accepted; illegal and refused_sequence.",
            "illegal and accepted is a false refusal, legal and refused_sequence a miss.",
            "TurngateIllegalSequenceSent",
        ),
    ),
    lines(
        "Witnesses",
        [
            Query(rate("partial_tool_dispatch_total", "enforced"), "half tool call, enforced={{enforced}}"),
            Query(rate("byte_mismatch_total", "enforced"), "changed bytes, enforced={{enforced}}"),
        ],
        Advice(
            "nothing where enforced=true.",
            "where only watched, half calls are the provider's: what enforcing would have kept away.",
            "TurngateWitnessSpoke",
        ),
        unit="ops",
        exemplars=True,
    ),
    grid(
        "Failures of our own",
        in_range("observer_failures_total", "instance, where") + " >= 0.5",
        Advice("empty.", "the log of the instance names the error's kind.", "TurngateFailing"),
    ),
)
OWN: Final = (
    lines(
        "How far the evidence is behind",
        [Query(f"max by (instance) ({metric('evidence_lag_seconds')})", "{{instance}}")],
        Advice(
            "a few seconds.",
            "somebody holds a day file open, or the disk is full.",
            "TurngateEvidenceLag",
        ),
        unit="s",
        limit=120,
    ),
    lines(
        "Spool",
        [Query(f"max by (instance) ({metric('spool_bytes')})", "{{instance}}")],
        Advice("near 0.", "it grows while the observer is away; at its bound events are dropped."),
        unit="bytes",
    ),
    lines(
        "Event loop lag",
        [Query(f"max by (instance) ({metric('eventloop_lag_seconds')})", "{{instance}}")],
        Advice(
            "milliseconds.",
            "the sidecar lacks CPU: every stream through it is late.",
            "TurngateEventLoopLag",
        ),
        unit="s",
        limit=0.25,
    ),
    lines(
        "Observer restarts and rows written",
        [
            Query(f"max by (instance) ({metric('observer_restarts_total')})", "restarts {{instance}}"),
            Query(rate("evidence_rows_total", "instance"), "rows/s {{instance}}"),
        ],
        Advice(
            "no restarts; rows follow the load.",
            "its last words are in the log.",
            "TurngateObserverRestarts",
        ),
    ),
)

PAGE: Final = Page(
    "turngate-honesty",
    "Turngate / Is Turngate honest?",
    "What witnesses say that share no code with the decisions: providers, a scanner of the bytes, sums of our own.",
    (("To stay 0", FINE), ("Against the provider", AGREEMENT), ("Turngate itself", OWN)),
)
