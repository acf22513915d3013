"""The dashboards as the JSON that lies in dashboards/grafana: `python deploy/dashboards` writes it.

Each goes from "is it fine?" to "why not?", and each panel says what is normal and what to do otherwise: whoever looks at
it at night has not read the design. Metrics are named through the table in telemetry/metrics.py, so a panel on one that
does not exist cannot be written. Needs grafana-foundation-sdk (in the `dev` extra), whose schema is Grafana 11.6's.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import dispatches
import honesty
import overview
import rollout
import sequences
import streams
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models
from panels import FILTERS, SOURCE, Page, link

from turngate.telemetry.metrics import PREFIX

FOLDER: Final = Path(__file__).parents[2] / "dashboards" / "grafana"
DOCS_URL: Final = "http://localhost:8790"
"""Where the compose file serves docs/; a dashboard's variable `docs` names another place."""

PAGES: Final = tuple(each.PAGE for each in (overview, sequences, streams, honesty, dispatches, rollout))


def built(page: Page) -> str:
    """A page as the JSON that the schema library's own reader leaves unchanged."""
    board = (
        dashboard.Dashboard(page.title)
        .uid(page.uid)
        .description(page.says)
        .tags(["turngate"])
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-6h", "now")
        .refresh("30s")
        .link(_siblings())
        .link(link("Docs", "${docs}/metrics.md"))
        .annotation(_changes())
    )
    for variable in _variables():
        board.with_variable(variable)
    for title, panels in page.rows:
        board.with_row(dashboard.Row(title))
        for panel in panels:
            board.with_panel(panel)
    made = board.build()
    for number, placed in enumerate(made.panels or [], 1):
        placed.id_val = number
    return _settled(made)


def _settled(board: models.Dashboard) -> str:
    """Written, read and written: the reader adds defaults, once."""
    register_default_plugins()
    once = json.loads(json.dumps(board, cls=JSONEncoder))
    return json.dumps(models.Dashboard.from_json(once), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _siblings() -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink("Turngate")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags(["turngate"])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )


def _changes() -> dashboard.AnnotationQuery:
    """A mark wherever an order put another stage in force."""
    changed = f'changes({PREFIX}rollout_stage{{job=~"$job"}}[2m])'
    return (
        dashboard.AnnotationQuery()
        .name("Rollout")
        .datasource(SOURCE)
        .enable(True)
        .icon_color("blue")
        .expr(f"max by (job, stage) ({changed}) > 0")
    )


def _variables() -> Iterator[Builder[models.VariableModel]]:
    yield dashboard.DatasourceVariable("datasource").label("Source").type("prometheus")
    sources: Mapping[str, str] = {
        "job": f"label_values({PREFIX}build_info, job)",
        **{name: f'label_values({PREFIX}requests_total{{job=~"$job"}}, {name})' for name in FILTERS},
    }
    everything: dict[str, Any] = {"selected": True, "text": "All", "value": "$__all"}
    for name, query in sources.items():
        yield (
            dashboard.QueryVariable(name)
            .label(name)
            .datasource(SOURCE)
            .query(query)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(models.VariableOption(**everything))
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
        )
    yield dashboard.TextBoxVariable("docs").label("Docs").default_value(DOCS_URL)


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        (FOLDER / f"{page.uid}.json").write_text(built(page))
