"""What the dashboards are made of: PromQL over our own metrics, and panels that all look and speak alike."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from turngate.telemetry.metrics import METRICS, PREFIX

SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
FILTERS: Final = ("upstream", "api", "model")
NONE_IS_FINE: Final = ((None, "green"), (1.0, "red"))
"""One is too many. `increase` gives fractions, but never less than what was counted."""

PLAIN: Final = ((None, "text"),)

Steps = Sequence[tuple[float | None, str]]


# PromQL


def metric(name: str, suffix: str = "", /, **labels: str) -> str:
    """A selector on one of our metrics, narrowed to what the variables choose. Raises KeyError for no such metric or label.

    A label's value that begins with `~` is a regular expression.
    """
    known = [label.name for label in METRICS[name].labels]
    for label in labels:
        if label not in known:
            raise KeyError(f"{name} has no label {label}")
    matchers = ['job=~"$job"', *(f'{each}=~"${each}"' for each in FILTERS if each in known)]
    for label, value in labels.items():
        matchers.append(f'{label}=~"{value[1:]}"' if value.startswith("~") else f'{label}="{value}"')
    return f"{PREFIX}{name}{suffix}{{{','.join(matchers)}}}"


def rate(name: str, by: str = "", suffix: str = "", **labels: str) -> str:
    """A counter's rate a second, summed."""
    return f"sum{_by(by)} (rate({metric(name, suffix, **labels)}[$__rate_interval]))"


def in_range(name: str, by: str = "", **labels: str) -> str:
    """What a counter counted in the time shown."""
    return f"sum{_by(by)} (increase({metric(name, **labels)}[$__range]))"


def quantile(share: float, name: str, by: str = "", **labels: str) -> str:
    """A histogram's quantile."""
    inner = rate(name, ", ".join(filter(None, ("le", by))), "_bucket", **labels)
    return f"histogram_quantile({share}, {inner})"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


# Panels


@dataclass(frozen=True, slots=True)
class Advice:
    """What a panel's reader needs to know. `runbook` names a page of docs/runbooks."""

    normal: str
    otherwise: str
    runbook: str = ""

    def __str__(self) -> str:
        return f"Normal: {self.normal}\n\nOtherwise: {self.otherwise}"

    def links(self) -> list[Builder[models.DashboardLink]]:
        if not self.runbook:
            return []
        url = f"${{docs}}/runbooks/{self.runbook}.md"
        return [link(f"Runbook: {self.runbook}", url)]


@dataclass(frozen=True, slots=True)
class Query:
    """`legend` is a template of Grafana's: `{{upstream}}`."""

    expr: str
    legend: str


Panel = Builder[models.Panel]
Row = tuple[str, Sequence[Panel]]


def number(
    title: str, expr: str, advice: Advice, *, unit: str = "short", steps: Steps = PLAIN, span: int = 4
) -> Panel:
    """One figure over the time shown, coloured by what it means."""
    return (
        stat.Panel()
        .title(title)
        .description(str(advice))
        .links(advice.links())
        .datasource(SOURCE)
        .with_target(_target(Query(expr, title), "A").instant())
        .unit(unit)
        .decimals(0 if unit == "short" else 2)
        .thresholds(_thresholds(steps))
        .color_mode(shapes.BigValueColorMode.VALUE)
        .graph_mode(shapes.BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .no_value("no data")
        .span(span)
        .height(4)
    )


def lines(
    title: str,
    queries: Sequence[Query],
    advice: Advice,
    *,
    unit: str = "short",
    stacked: bool = False,
    exemplars: bool = False,
    limit: float | None = None,
    span: int = 12,
) -> Panel:
    """Series over time. `limit` draws the line at which an alert fires."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(str(advice))
        .links(advice.links())
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .fill_opacity(25 if stacked else 5)
        .show_points(shapes.VisibilityMode.NEVER)
        .stacking(common.StackingConfig().mode(_stacking(stacked)))
        .legend(
            common.VizLegendOptions()
            .display_mode(shapes.LegendDisplayMode.TABLE)
            .placement(shapes.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(
            common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING)
        )
        .span(span)
        .height(8)
    )
    if limit is not None:
        panel.thresholds(_thresholds(((None, "transparent"), (limit, "red"))))
        panel.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(shapes.GraphThresholdsStyleMode.DASHED)
        )
    for letter, query in zip("ABCDEF", queries, strict=False):
        panel.with_target(_target(query, letter).range().exemplar(exemplars))
    return panel


def grid(title: str, expr: str, advice: Advice, *, hidden: Iterable[str] = (), span: int = 12) -> Panel:
    """A table of label values with how many of each, the most first."""
    organised = {"excludeByName": dict.fromkeys(("Time", *hidden), True), "renameByName": {"Value": "count"}}
    return (
        table.Panel()
        .title(title)
        .description(str(advice))
        .links(advice.links())
        .datasource(SOURCE)
        .with_target(_target(Query(expr, ""), "A").instant().format(PromQueryFormat.TABLE))
        .with_transformation(models.DataTransformerConfig(id_val="organize", options=organised))
        .sort_by([common.TableSortByFieldState().display_name("count").desc(True)])
        .decimals(0)
        .no_value("none")
        .span(span)
        .height(9)
    )


def states(title: str, query: Query, advice: Advice, *, span: int = 24) -> Panel:
    """When each series was not 0."""
    shown = {"0": models.ValueMappingResult(text="–", color="transparent")}
    shown["1"] = models.ValueMappingResult(text="in force", color="blue")
    return (
        statetimeline.Panel()
        .title(title)
        .description(str(advice))
        .links(advice.links())
        .datasource(SOURCE)
        .with_target(_target(query, "A").range())
        .mappings([models.ValueMap(options=shown)])
        .show_value(shapes.VisibilityMode.NEVER)
        .span(span)
        .height(6)
    )


def _target(query: Query, letter: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter).datasource(SOURCE)
    )


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    made = [models.Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(made)


def _stacking(stacked: bool) -> shapes.StackingMode:
    return shapes.StackingMode.NORMAL if stacked else shapes.StackingMode.NONE


def link(title: str, url: str) -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink(title)
        .type(models.DashboardLinkType.LINK)
        .url(url)
        .icon("doc")
        .target_blank(True)
    )


@dataclass(frozen=True, slots=True)
class Page:
    """A dashboard: rows from "is it fine?" to "why not?"."""

    uid: str
    title: str
    says: str
    rows: Sequence[Row]
