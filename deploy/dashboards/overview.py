"""Is traffic fine, and what does Turngate add to it?"""

from typing import Final

from panels import NONE_IS_FINE, Advice, Page, Query, in_range, lines, metric, number, quantile, rate

REQUESTS: Final = metric("requests_total")
BAD: Final = metric("requests_total", outcome="~retracted|unknown|provider_error|unsent")
FINE: Final = (
    number(
        "Sidecars that report",
        f"count({metric('build_info')})",
        Advice("as many as you run.", "look at `up` of the scrape job.", "TurngateDown"),
        steps=((None, "red"), (1.0, "green")),
    ),
    number(
        "Requests",
        f"sum(rate({REQUESTS}[$__rate_interval]))",
        Advice("what your apps send.", "at 0, ask whether the apps still point here."),
        unit="reqps",
    ),
    number(
        "Ended badly",
        f"sum(increase({BAD}[$__range])) / (sum(increase({REQUESTS}[$__range])) > 0) or vector(0)",
        Advice(
            "below 1 %: provider errors and broken streams.",
            "see whose fault it is below.",
            "TurngateProviderErrors",
        ),
        unit="percentunit",
        steps=((None, "green"), (0.01, "yellow"), (0.05, "red")),
    ),
    number(
        "Refused by us",
        in_range("requests_total", outcome="refused") + " or vector(0)",
        Advice(
            "0 after the app's bugs are fixed.",
            "Sequence integrity names the reason; the app got pointer and remedy.",
        ),
        steps=((None, "green"), (1.0, "yellow")),
    ),
    number(
        "Oldest unknown dispatch",
        f"max({metric('unknown_dispatch_age_seconds')}) or vector(0)",
        Advice(
            "seconds, or 0.",
            "the outcome of a request is not known for long.",
            "TurngateUnknownDispatchOld",
        ),
        unit="s",
        steps=((None, "green"), (60.0, "yellow"), (600.0, "red")),
    ),
    number(
        "Turngate at fault",
        f"sum(increase({metric('illegal_sequences_sent_total', stage='~enforce-.*')}[$__range]))"
        f" + sum(increase({metric('partial_tool_dispatch_total', enforced='true')}[$__range]))"
        f" + sum(increase({metric('byte_mismatch_total')}[$__range]))",
        Advice("0, always: misses and witnesses.", "open *Is Turngate honest?*.", "TurngateWitnessSpoke"),
        steps=NONE_IS_FINE,
    ),
)
TRAFFIC: Final = (
    lines(
        "Requests by how they ended",
        [Query(rate("requests_total", "outcome"), "{{outcome}}")],
        Advice("`passed` carries nearly all.", "a growing other colour says which way they end."),
        unit="reqps",
        stacked=True,
    ),
    lines(
        "Requests by upstream",
        [Query(rate("requests_total", "upstream"), "{{upstream}}")],
        Advice("follows your load.", "an upstream that falls to 0 alone is not reached or not asked."),
        unit="reqps",
        stacked=True,
    ),
    lines(
        "Errors by whose fault it is",
        [Query(rate("request_errors_total", "upstream, error_type"), "{{upstream}} {{error_type}}")],
        Advice(
            "few; `caller_` is the app's, `policy_` a refusal of ours.",
            "`provider_`: see the provider's status page. `turngate_`: ours, report it.",
            "TurngateProviderErrors",
        ),
        unit="reqps",
    ),
    lines(
        "Requests by model",
        [Query(f"topk(10, {rate('requests_total', 'model')})", "{{model}}")],
        Advice("the models you use.", "`other` means more than 50 names: somebody invents them."),
        unit="reqps",
        stacked=True,
    ),
)
COST: Final = (
    lines(
        "Latency of our own",
        [
            Query(quantile(0.99, "added_latency_seconds", "phase"), "p99 {{phase}}"),
            Query(quantile(0.99, "first_byte_added_seconds"), "p99 before the first byte"),
        ],
        Advice(
            "judging below 5 ms, a claim below 10 ms.",
            "claims wait for the disk, judging for big bodies; exemplars name the operation.",
            "TurngateLatencyAdded",
        ),
        unit="s",
        exemplars=True,
        limit=0.05,
    ),
    lines(
        "Open now",
        [
            Query(f"sum({metric('open_exchanges')})", "exchanges"),
            Query(f"sum({metric('open_streams')})", "streams"),
        ],
        Advice("follows the load.", "growth without load: the provider is slow, or the app does not read."),
    ),
    lines(
        "Not judged",
        [Query(rate("unjudged_total", "surface, why"), "{{surface}} {{why}}")],
        Advice(
            "0, or the surfaces that Turngate does not cover.",
            "`body.*`: the app sends what cannot be read; `internal`: ours, report it.",
        ),
        unit="reqps",
    ),
    lines(
        "Held back now",
        [Query(f"sum({metric('held_bytes')})", "held bytes")],
        Advice("kilobytes: tool calls on their way.", "at megabytes look at the hold time of tool calls."),
        unit="bytes",
    ),
)

PAGE: Final = Page(
    "turngate-overview",
    "Turngate / Overview",
    "Is traffic through the sidecars fine, and what does Turngate add to it?",
    (("Is it fine?", FINE), ("Traffic", TRAFFIC), ("What Turngate costs", COST)),
)
