"""What became of each request that was sent."""

from typing import Final

from panels import Advice, Page, Query, grid, in_range, lines, metric, number, quantile, rate

FINE: Final = (
    number(
        "Unknown now",
        f"sum({metric('dispatches', state='UNKNOWN')})",
        Advice("0, or few for seconds.", "`turngate unknown list` shows them.", "TurngateUnknownDispatchOld"),
        steps=((None, "green"), (1.0, "yellow"), (20.0, "red")),
    ),
    number(
        "Oldest unknown",
        f"max({metric('unknown_dispatch_age_seconds')}) or vector(0)",
        Advice("below a minute.", "resolve it, or wait for its time limit.", "TurngateUnknownDispatchOld"),
        unit="s",
        steps=((None, "green"), (60.0, "yellow"), (600.0, "red")),
    ),
    number(
        "Open now",
        f"sum({metric('dispatches')})",
        Advice("as many as requests under way.", "more than that: a process died, its lease runs out soon."),
    ),
    number(
        "Became unknown",
        in_range("dispatch_transitions_total", to="UNKNOWN"),
        Advice("few.", "see which upstream breaks off: *Streams and tool calls*."),
        steps=((None, "green"), (1.0, "yellow")),
    ),
    number(
        "Conflicts",
        in_range("canonical_conflicts_total"),
        Advice("0.", "two workers go on with one conversation.", "TurngateConflicts"),
        steps=((None, "green"), (1.0, "yellow")),
    ),
    number(
        "Never sent",
        in_range("dispatch_transitions_total", to="UNSENT"),
        Advice("0.", "the provider cannot be reached; these may be retried freely."),
        steps=((None, "green"), (1.0, "yellow")),
    ),
)
WHY: Final = (
    lines(
        "Open dispatches by state",
        [Query(f"sum by (state) ({metric('dispatches')})", "{{state}}")],
        Advice("`STREAMING` carries most.", "`UNKNOWN` that grows: outcomes get lost."),
        stacked=True,
    ),
    lines(
        "How dispatches end",
        [
            Query(
                rate(
                    "dispatch_transitions_total",
                    "to",
                    to="~COMMITTED|REFUSED|CANCELLED|ABANDONED|UNSENT|REJECTED|WAITING",
                ),
                "{{to}}",
            )
        ],
        Advice("`COMMITTED` carries nearly all.", "ABANDONED: the result is lost, and maybe billed."),
        unit="ops",
        stacked=True,
    ),
    lines(
        "Age of the oldest unknown, by upstream",
        [Query(f"max by (upstream) ({metric('unknown_dispatch_age_seconds')})", "{{upstream}}")],
        Advice(
            "a saw with small teeth.",
            "a line that climbs is one dispatch that nobody resolves.",
            "TurngateUnknownDispatchOld",
        ),
        unit="s",
        limit=600,
    ),
    lines(
        "Into and out of unknown",
        [
            Query(rate("dispatch_transitions_total", to="UNKNOWN"), "in"),
            Query(rate("dispatch_transitions_total", "to", **{"from": "UNKNOWN"}), "out to {{to}}"),
        ],
        Advice("both near 0, and equal.", "more in than out: see the oldest."),
        unit="ops",
    ),
    lines(
        "How long they were unknown",
        [
            Query(
                quantile(share, "unknown_dispatch_resolved_seconds", "how"),
                f"p{share * 100:.0f} {{{{how}}}}",
            )
            for share in (0.5, 0.99)
        ],
        Advice("seconds: the settle time.", "`operator`: somebody resolved them by hand."),
        unit="s",
    ),
    lines(
        "Conflicts",
        [Query(rate("canonical_conflicts_total"), "refused with 409")],
        Advice("0.", "an exemplar names the attempt that lost.", "TurngateConflicts"),
        unit="ops",
        exemplars=True,
    ),
    grid(
        "Moves",
        in_range("dispatch_transitions_total", "from, to") + " >= 0.5",
        Advice("PREPARED, DISPATCHING, SENT, STREAMING, COMMITTED.", "the docs say what each state means."),
        span=24,
    ),
)

PAGE: Final = Page(
    "turngate-dispatches",
    "Turngate / Dispatch ledger",
    "What became of each request that was sent, and of which of them nobody knows.",
    (("Is it fine?", FINE), ("Why", WHY)),
)
