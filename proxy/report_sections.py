"""The report in words: sections of grids, which the terminal and the HTML page only have to draw.

What is good and what is bad is said here once, by the tone of a cell. A section that has nothing to show says so in
one sentence: a reader must be able to tell "nothing happened" from "nobody looked".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from turngate.telemetry.report import TOP_MAX, Count, Order, Report, Rule, Scope, Share

Tone = Literal["", "good", "warn", "bad", "quiet"]


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a grid. `bar`: how much of the row's whole it is, 0 to 1, drawn beside the text."""

    text: str
    tone: Tone = ""
    bar: float | None = None
    number: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """A small table."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]


@dataclass(frozen=True, slots=True)
class Section:
    """One subject. `says` is read first; `tone` is the worst thing in it."""

    title: str
    says: str
    tone: Tone = ""
    grids: tuple[Grid, ...] = ()


def sections(report: Report) -> list[Section]:
    """All sections in reading order: is it fine, then why not."""
    return [
        _honesty(report),
        _traffic(report),
        _rules(report),
        _streams(report),
        _dispatches(report),
        _ours(report),
        _cost(report),
        _examples(report),
    ]


FAULTS: Final = ("misses", "false-refusals", "witnesses", "failures", "no-evidence")
"""What a script may want to stop at (`--fail-on`)."""


def faults(report: Report) -> dict[str, int]:
    """How many of each of FAULTS there are."""
    return {
        "misses": report.totals.misses,
        "false-refusals": report.totals.false_refusals,
        "witnesses": _witnessed(report),
        "failures": sum(each.count for each in (*report.ours.failures, *report.ours.dropped)),
        "no-evidence": int(report.totals.exchanges == 0),
    }


def _witnessed(report: Report) -> int:
    """What must never be. Half a tool call that went through where Turngate only watches is the provider's."""
    return sum(
        each.enforced + (each.watched if each.witness == "byte_mismatch" else 0) for each in report.witnesses
    )


def headline(report: Report) -> tuple[str, Tone]:
    """The report in one sentence."""
    totals = report.totals
    if totals.exchanges == 0:
        return "No judged exchange in this time.", "quiet"
    if _witnessed(report):
        return "A witness found Turngate at fault: look at the examples first.", "bad"
    wrong = [
        f"{count:,} {noun}{'' if count == 1 else plural}"
        for count, noun, plural in (
            (totals.false_refusals, "false refusal", "s"),
            (totals.misses, "miss", "es"),
        )
        if count
    ]
    if wrong:
        return f"Turngate and the provider disagree: {' and '.join(wrong)}.", "bad"
    if totals.would_refuse + totals.refused == 0:
        return f"Nothing to object to in {totals.exchanges:,} exchanges.", "good"
    if totals.true_refusals == 0:
        return "The providers have neither confirmed nor contradicted a refusal yet.", "warn"
    return (
        f"The provider agreed wherever it judged: {totals.true_refusals:,} true refusals, no false one.",
        "good",
    )


def matrix(rules: Sequence[Rule]) -> Grid:
    """The confusion matrix by rule; also what `turngate replay` ends in."""
    rows = [
        (
            Cell(rule.reason or "(no rule of ours)"),
            Cell(f"{rule.api}, {rule.server}" if rule.server else rule.api, "quiet"),
            *_judged(rule),
        )
        for rule in rules
    ]
    return Grid("Each rule against the provider's answer", ("rule", "API, server", *_JUDGED), rows)


def matrix_by_scope(scopes: Sequence[Scope]) -> Grid:
    """The same by upstream, model and client, as far as a person reads."""
    rows = [
        (
            Cell(scope.reason or "(no rule of ours)"),
            Cell(scope.upstream),
            Cell(scope.model),
            Cell(scope.client),
            *_judged(scope),
        )
        for scope in scopes[:TOP_MAX]
    ]
    return Grid(
        "By model and client, the worst first", ("rule", "upstream", "model", "client", *_JUDGED), rows
    )


_JUDGED: Final = ("true", "false", "missed", "unclear", "by us")


def _judged(rule: Rule) -> tuple[Cell, ...]:
    return (
        _count(rule.true_refusals, "good"),
        _count(rule.false_refusals, "bad"),
        _count(rule.misses, "bad"),
        _count(rule.unknown),
        _count(rule.refused_by_us),
    )


def _honesty(report: Report) -> Section:
    totals = report.totals
    asked = totals.true_refusals + totals.false_refusals
    rows = [
        *(
            (
                Cell(f"witness {each.witness}"),
                _count(each.enforced, "bad"),
                _count(each.watched, "bad" if each.witness == "byte_mismatch" else "warn"),
                Cell(_WITNESSED.get(each.witness, ""), "quiet"),
            )
            for each in report.witnesses
        ),
        (
            Cell("misses"),
            _count(totals.misses_enforced, "bad"),
            _count(totals.misses - totals.misses_enforced, "bad"),
            Cell("legal to us; the provider objected to the sequence", "quiet"),
        ),
        (
            Cell("false refusals"),
            Cell("not asked", "quiet", number=True),
            _count(totals.false_refusals, "bad"),
            Cell(f"we would have refused; the provider answered (of {asked:,} that it judged)", "quiet"),
        ),
    ]
    says, tone = headline(report)
    return Section(
        "Is Turngate honest?", says, tone, (Grid("", ("", "enforced", "watched", "what it means"), rows),)
    )


_WITNESSED: Final = {
    "partial_tool_dispatch": "the app got half a tool call in an answer that looked ended",
    "byte_mismatch": "what went out was not what came in",
}


def _traffic(report: Report) -> Section:
    totals = report.totals
    says = (
        f"{totals.exchanges:,} judged exchanges, {totals.relayed:,} relayed unread. "
        f"{totals.refused:,} refused, {totals.would_refuse:,} would be refused where the stage enforces. "
        f"Judging and claiming took {seconds(totals.judge_p50_s)} in the median, "
        f"{seconds(totals.judge_p99_s)} at the 99th percentile."
    )
    grids = [
        _shares(f"By {name}".replace("api", "API"), shares, totals.exchanges)
        for name, shares in report.traffic.items()
        if shares
    ]
    if report.orders:
        rows = [
            (
                Cell(moment(each.at_s)),
                Cell({"all": "everything"}.get(each.scope, each.scope)),
                Cell(_ordered(each)),
                Cell(each.who),
                Cell("; ".join(filter(None, (each.why, each.evidence))), "quiet"),
            )
            for each in report.orders
        ]
        grids.append(Grid("Stages ordered, the newest first", ("when", "scope", "stage", "who", "why"), rows))
    return Section("Traffic", says, "", tuple(grids))


def _ordered(order: Order) -> str:
    if not order.stage:
        return "as the settings say"
    return order.stage if order.percent == 100 else f"{order.stage} {order.percent} %"


def _shares(title: str, shares: Sequence[Share], whole: int) -> Grid:
    rows = [
        (
            Cell(share.name or "(not told)", "" if share.name else "quiet"),
            Cell(f"{share.exchanges:,}", bar=share.exchanges / whole, number=True),
            _count(share.refused, "warn"),
            _count(share.would_refuse, "warn"),
            _count(share.provider_errors, "warn"),
            _count(share.broken, "warn"),
        )
        for share in shares
    ]
    heads = ("", "exchanges", "refused", "would refuse", "provider errors", "broken answers")
    return Grid(title, heads, rows)


def _rules(report: Report) -> Section:
    if not report.rules and not report.soft:
        return Section("Findings per rule", "No rule found anything, and no provider objected to a sequence.")
    grids = [matrix(report.rules), matrix_by_scope(report.scopes)] if report.rules else []
    if report.soft:
        grids.append(_counts("Soft findings: accepted, but the meaning is broken", "rule", report.soft))
    says = (
        "True: the provider refused it too. False: the provider answered it. Missed: the provider refused it though no "
        "rule did. Unclear: its answer says nothing about the sequence. By us: refused, so the provider was not asked. "
        "Promote a scope when none is false."
    )
    return Section("Findings per rule", says, "", tuple(grids))


def _streams(report: Report) -> Section:
    streams = report.streams
    whole = sum(each.count for each in streams.ends)
    if not whole and not streams.calls:
        return Section("Streams and tool calls", "No streamed answer.")
    held = streams.held
    retractions = [
        (
            Cell(each.cause),
            _count(each.count, "warn"),
            _count(each.told),
            Cell(size(each.preview_bytes), number=True),
        )
        for each in streams.retractions
    ]
    calls = [
        (
            Cell(each.decision, "good" if each.decision == "released" else "warn"),
            Cell(each.reason),
            _count(each.held),
            _count(each.watched),
        )
        for each in streams.calls
    ]
    grids = [
        _counts("How streams ended", "end", streams.ends),
        Grid(
            "Turns that did not end well", ("cause", "turns", "told to the app", "shown before"), retractions
        ),
        Grid("Tool calls", ("decision", "why", "held", "watched only"), calls),
        _counts("Irregular, but not fatal", "what", streams.anomalies),
        _counts("Came back as history", "what", streams.leaks),
    ]
    says = f"{whole:,} streamed answers. " + (
        f"Calls of {held.answers:,} were held: {seconds(held.p50_s)} in the median, {seconds(held.p90_s)} at the "
        f"90th, {seconds(held.p99_s)} at the 99th percentile, {seconds(held.max_s)} at most."
        if held.answers
        else "Nothing was held."
    )
    return Section("Streams and tool calls", says, "", tuple(grid for grid in grids if grid.rows))


def _dispatches(report: Report) -> Section:
    dispatches = report.dispatches
    if not dispatches.states:
        return Section("Dispatches", "No dispatch was told of.")
    unknown = [
        (
            Cell(each.upstream),
            _count(each.count, "warn"),
            Cell(seconds(each.oldest_age_s), "warn", number=True),
        )
        for each in dispatches.unknown
    ]
    resolutions = [
        (
            Cell(each.state),
            Cell(each.how),
            _count(each.count),
            Cell(seconds(each.p50_s), number=True),
            Cell(seconds(each.max_s), number=True),
        )
        for each in dispatches.resolutions
    ]
    grids = [
        _counts("Where they stand", "state", dispatches.states),
        Grid("Still unknown", ("upstream", "dispatches", "oldest"), unknown),
        Grid("How unknown ones ended", ("into", "by", "dispatches", "median", "longest"), resolutions),
    ]
    still = sum(each.count for each in dispatches.unknown)
    says = f"The outcome of {still:,} is not known." if still else "The outcome of each is known."
    return Section("Dispatches", says, "warn" if still else "", tuple(grid for grid in grids if grid.rows))


def _ours(report: Report) -> Section:
    ours = report.ours
    lives = [
        ("proxy starts", ours.starts, ""),
        ("of those without a stop: running, or crashed", ours.not_stopped, ""),
        ("observer restarts", ours.observer_restarts, "warn"),
    ]
    rows = [(Cell(name), _count(count, "warn" if tone else "")) for name, count, tone in lives]
    grids = [
        _counts("Failures, traffic went on", "where", ours.failures, "bad"),
        _counts("Events lost", "class", ours.dropped, "bad"),
        _counts("Requests that could not be judged", "why", ours.unjudged, "warn"),
        Grid("Processes", ("", ""), rows),
    ]
    bad = bool(ours.failures or ours.dropped)
    says = "Something of ours broke." if bad else "Nothing of ours broke, no event was lost."
    return Section("Our own failures", says, "bad" if bad else "", tuple(grid for grid in grids if grid.rows))


def _cost(report: Report) -> Section:
    if not report.cost:
        return Section("Cost of breakage", "No answer was cut off, given up or lost.")
    rows = [
        (
            Cell(each.outcome),
            _count(each.exchanges),
            _count(each.input_tokens),
            _count(each.output_tokens),
            _count(each.uncounted, "warn"),
        )
        for each in report.cost
    ]
    heads = ("the answer was", "exchanges", "input tokens", "output tokens", "not counted")
    says = "Tokens of answers that were of no use, as the providers counted them; they may bill more than they told."
    return Section("Cost of breakage", says, "", (Grid("", heads, rows),))


def _examples(report: Report) -> Section:
    if not report.examples:
        return Section("Worst examples", "Nothing to look at.")
    rows = [
        (
            Cell(each.kind, "bad" if each.kind in ("miss", "false refusal", "witness") else "warn"),
            Cell(each.operation),
            Cell(f"{each.reason}{f' at {each.at}' if each.at else ''}"),
            Cell(
                f"{each.verdict}, {each.messages:,} messages; the app got: {each.outcome}; {each.upstream} "
                f"{each.model}, {moment(each.at_s)}",
                "quiet",
            ),
        )
        for each in report.examples
    ]
    heads = ("", "operation", "reason and place", "what it was")
    says = "One page on each: turngate explain OPERATION"
    return Section("Worst examples", says, "", (Grid("", heads, rows),))


def _counts(title: str, head: str, counts: Sequence[Count], tone: Tone = "") -> Grid:
    whole = sum(each.count for each in counts)
    rows = [
        (Cell(each.name or "(not told)"), Cell(f"{each.count:,}", tone, each.count / whole, number=True))
        for each in counts
    ]
    return Grid(title, (head, "count"), rows)


def _count(count: int, tone: Tone = "") -> Cell:
    """A number that is toned only if it is not zero."""
    return Cell(f"{count:,}", tone if count else "quiet", number=True)


def seconds(value_s: float) -> str:
    """A duration as people say it."""
    for limit_s, unit_s, unit in _UNITS:
        if value_s < limit_s:
            return f"{value_s / unit_s:.3g} {unit}"
    return f"{value_s / 86_400:.3g} d"


_UNITS: Final = (
    (0.9995e-3, 1e-6, "µs"),
    (0.9995, 1e-3, "ms"),
    (120, 1, "s"),
    (7_200, 60, "min"),
    (172_800, 3_600, "h"),
)


def size(count: int) -> str:
    """Bytes as people say it."""
    value = float(count)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def moment(at_s: float) -> str:
    """A point in time, UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def span(report: Report) -> str:
    """What time the report is about."""
    totals = report.totals
    first_s, last_s = (totals.first_s, totals.last_s) if totals.last_s else (report.since_s, report.now_s)
    return f"{moment(first_s)} to {moment(last_s)} UTC"


@dataclass(frozen=True, slots=True)
class Column:
    """One piece of time in the chart: heights from the bottom up, each 0 to 1 of the highest column."""

    label: str
    fine: float
    stopped: float
    provider_errors: float
    broken: float


def chart(report: Report) -> list[Column]:
    """Traffic over time, gaps included."""
    if not report.timeline:
        return []
    return list(_columns(report))


def _columns(report: Report) -> Iterator[Column]:
    found = {bucket.at_s: bucket for bucket in report.timeline}
    highest = max(bucket.exchanges for bucket in report.timeline)
    at_s = report.timeline[0].at_s
    while at_s <= report.timeline[-1].at_s:
        bucket = found.get(at_s)
        if bucket is None:
            yield Column(f"{moment(at_s)}: nothing", 0, 0, 0, 0)
        else:
            bad = bucket.stopped + bucket.broken + bucket.provider_errors
            yield Column(
                f"{moment(at_s)}: {bucket.exchanges:,} exchanges, {bucket.stopped:,} illegal or waiting, "
                f"{bucket.provider_errors:,} other provider errors, {bucket.broken:,} broken",
                max(bucket.exchanges - bad, 0) / highest,
                bucket.stopped / highest,
                bucket.provider_errors / highest,
                bucket.broken / highest,
            )
        at_s += report.bucket_s
