"""Do answers end well, and do tool calls arrive whole or not at all?"""

from typing import Final

from panels import Advice, Page, Query, in_range, lines, metric, number, quantile, rate

RETRACTED: Final = rate("requests_total", "upstream", outcome="retracted")
FINE: Final = (
    number(
        "Streams that broke",
        f"{in_range('streams_ended_total', end='retracted')} / ({in_range('streams_ended_total')} > 0) or vector(0)",
        Advice(
            "below 1 %.", "causes are below; by upstream it is the provider's.", "TurngateRetractionsHigh"
        ),
        unit="percentunit",
        steps=((None, "green"), (0.01, "yellow"), (0.05, "red")),
    ),
    number(
        "Half tool calls kept from apps",
        in_range("partial_tool_calls_blocked_total"),
        Advice("few: as many as streams break in a call.", "nothing: this is what Turngate is for."),
    ),
    number(
        "Tool calls withheld",
        f"{in_range('tool_calls_total', decision='withheld')} / ({in_range('tool_calls_total')} > 0) or vector(0)",
        Advice("below 1 %.", "by reason below: cut streams, or a model that writes bad JSON."),
        unit="percentunit",
        steps=((None, "green"), (0.01, "yellow"), (0.05, "red")),
    ),
    number(
        "Hold time of tool calls, p99",
        f"histogram_quantile(0.99, sum by (le) (increase({metric('tool_hold_seconds', '_bucket')}[$__range])))",
        Advice(
            "the time a turn takes after its first call.",
            "long turns hold long; it adds no waiting for text.",
        ),
        unit="s",
    ),
    number(
        "Answers that went on after their end",
        in_range("late_blocks_total"),
        Advice("0.", "a provider or a proxy in between repeats or mixes answers: report it to them."),
        steps=((None, "green"), (1.0, "yellow")),
    ),
    number(
        "Tokens of no use",
        in_range("breakage_tokens_total") + " or vector(0)",
        Advice("a small share of your tokens.", "broken turns cost money: compare upstreams below."),
    ),
)
WHY: Final = (
    lines(
        "Streams by how they ended",
        [Query(rate("streams_ended_total", "end"), "{{end}}")],
        Advice(
            "`passed` carries nearly all.",
            "`client_gone`: apps give up; `retracted`: providers break off.",
        ),
        unit="reqps",
        stacked=True,
    ),
    lines(
        "Retractions by cause",
        [Query(rate("preview_retractions_total", "cause"), "{{cause}}")],
        Advice(
            "near 0.",
            "stream.truncated and stream.stalled: network or provider; call.*: the model's arguments.",
            "TurngateRetractionsHigh",
        ),
        unit="ops",
        exemplars=True,
    ),
    lines(
        "Share of requests retracted, by upstream",
        [Query(f"{RETRACTED} / ({rate('requests_total', 'upstream')} > 0)", "{{upstream}}")],
        Advice(
            "below 1 %.",
            "one upstream alone: its provider. All: your network.",
            "TurngateRetractionsHigh",
        ),
        unit="percentunit",
        limit=0.05,
    ),
    lines(
        "Withheld tool calls by reason",
        [Query(rate("tool_calls_total", "reason", decision="withheld"), "{{reason}}")],
        Advice("near 0.", "where nothing is enforced these calls reached the app.", ""),
        unit="ops",
    ),
    lines(
        "Tool calls",
        [Query(rate("tool_calls_total", "decision"), "{{decision}}")],
        Advice("`released` carries nearly all.", "see the reasons beside."),
        unit="ops",
        stacked=True,
    ),
    lines(
        "How long tool calls are held",
        [Query(quantile(share, "tool_hold_seconds"), f"p{share * 100:.0f}") for share in (0.5, 0.9, 0.99)],
        Advice(
            "from a call's begin to its turn's end.",
            "an exemplar names the operation that was held long.",
        ),
        unit="s",
        exemplars=True,
    ),
    lines(
        "How much is held for a call",
        [
            Query(quantile(0.99, "tool_hold_bytes"), "p99 of a call"),
            Query(f"sum({metric('held_bytes')})", "all that is held now"),
        ],
        Advice("kilobytes.", "a turn beyond limits.hold_bytes is given up as limit.hold."),
        unit="bytes",
        exemplars=True,
    ),
    lines(
        "Tokens of no use",
        [Query(rate("breakage_tokens_total", "upstream, kind"), "{{upstream}} {{kind}}")],
        Advice("near 0.", "`billed_unknown`: nobody saw the end, ask the provider's bill."),
        unit="ops",
    ),
)

PAGE: Final = Page(
    "turngate-streams",
    "Turngate / Streams and tool calls",
    "Do answers end well, and do tool calls reach the apps whole or not at all?",
    (("Is it fine?", FINE), ("Why", WHY)),
)
