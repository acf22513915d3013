"""May a scope be promoted, and what did the last change do?"""

from typing import Final

from panels import (
    NONE_IS_FINE,
    Advice,
    Page,
    Query,
    grid,
    in_range,
    lines,
    metric,
    number,
    quantile,
    rate,
    states,
)

FINE: Final = (
    number(
        "True refusals",
        in_range("shadow_verdicts_total", verdict="~illegal|waiting", provider="refused_sequence")
        + " or vector(0)",
        Advice("the provider refuses what we would.", "at 0 there is no evidence yet: observe longer."),
    ),
    number(
        "False refusals",
        in_range("shadow_verdicts_total", verdict="~illegal|waiting", provider="accepted"),
        Advice("0 before any promotion.", "that rule is wrong for this server.", "TurngateFalseRefusal"),
        steps=NONE_IS_FINE,
    ),
    number(
        "Misses",
        in_range("illegal_sequences_sent_total"),
        Advice("0.", "the provider knows a rule that we do not.", "TurngateMissObserved"),
        steps=((None, "green"), (1.0, "yellow")),
    ),
    number(
        "Would be refused",
        f"{in_range('sequence_rejects_total', action='would_reject')} / ({in_range('requests_total')} > 0) or vector(0)",
        Advice("the share of findings per request that enforcing would refuse.", "fix the apps first."),
        unit="percentunit",
    ),
    number(
        "Not judged",
        f"{in_range('unjudged_total')} / ({in_range('requests_total')} > 0) or vector(0)",
        Advice("below 1 %: enforcing protects what is judged.", "the Overview tells why."),
        unit="percentunit",
        steps=((None, "green"), (0.01, "yellow")),
    ),
    number(
        "Errors of Turngate's own",
        in_range("observer_failures_total"),
        Advice("0.", "do not promote while something of ours breaks.", "TurngateFailing"),
        steps=NONE_IS_FINE,
    ),
)
STAGES: Final = (
    states(
        "Orders in force",
        Query(f"max by (scope, stage) ({metric('rollout_stage')})", "{{scope}}: {{stage}}"),
        Advice(
            "none, or the rollout you are in.",
            "one for `all` holds everything down: `turngate rollout show` tells who gave it and why.",
            "TurngateHeldDown",
        ),
    ),
    states(
        "Rolled back by itself",
        Query(f"max by (scope) ({metric('rollout_rolled_back')})", "{{scope}}"),
        Advice(
            "never.",
            "Turngate saw itself be wrong there: `turngate rollout show` tells in what.",
            "TurngateRolledBack",
        ),
    ),
    lines(
        "Requests by stage",
        [Query(rate("requests_total", "stage"), "{{stage}}")],
        Advice("as the settings say.", "`observe` where you expect enforcing: an order is in force."),
        unit="reqps",
        stacked=True,
    ),
    lines(
        "Refused and would be refused",
        [Query(rate("sequence_rejects_total", "action"), "{{action}}")],
        Advice(
            "after a promotion the second becomes the first.",
            "a jump after a deploy is the app's, not ours.",
        ),
        unit="ops",
    ),
)
EVIDENCE: Final = (
    grid(
        "What the provider says to each rule",
        in_range("shadow_verdicts_total", "reason, provider", verdict="~illegal|waiting") + " >= 0.5",
        Advice(
            "refused_sequence in every row.",
            "`turngate report` tells the same with examples.",
            "TurngateFalseRefusal",
        ),
    ),
    grid(
        "Versions",
        f"count by (version) ({metric('build_info')})",
        Advice(
            "one version, two during a rollout.", "an old one that stays: that sidecar was not restarted."
        ),
    ),
    lines(
        "Latency before the first byte, where enforced",
        [Query(quantile(share, "first_byte_added_seconds"), f"p{share * 100:.0f}") for share in (0.5, 0.99)],
        Advice("a few ms.", "claims wait for the disk: see `TurngateLatencyAdded`.", "TurngateLatencyAdded"),
        unit="s",
        exemplars=True,
        limit=0.05,
    ),
    lines(
        "Streams that broke, before and after",
        [Query(rate("streams_ended_total", "end", end="~retracted|client_gone|unknown"), "{{end}}")],
        Advice(
            "the same before and after a promotion.",
            "more `client_gone` after it: apps do not wait for held calls.",
        ),
        unit="reqps",
    ),
)

PAGE: Final = Page(
    "turngate-rollout",
    "Turngate / Rollout",
    "May this scope be promoted, and what did the last change do?",
    (("Before you promote", FINE), ("What is in force", STAGES), ("Evidence", EVIDENCE)),
)
