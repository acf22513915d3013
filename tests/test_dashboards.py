"""Dashboards and alert rules against the table of metrics: what they name exists, is explained, and has a page.

The dashboards are also what their generator makes, and what the schema library's own reader leaves unchanged.
"""

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from promql import Selector, exprs_of_dashboard, recorded, rules_of, selectors, unvaried

from turngate.telemetry.metrics import METRICS, PREFIX, Metric
from turngate.telemetry.queries import connect_readonly, run_query

ROOT: Final = Path(__file__).parents[1]
GRAFANA: Final = ROOT / "dashboards" / "grafana"
ALERTS: Final = ROOT / "dashboards" / "alerts"
RUNBOOKS: Final = ROOT / "docs" / "runbooks"
ALERT_TESTS: Final = ROOT / "tests" / "alerts_test.yml"

BOARDS: Final = {path.stem: json.loads(path.read_text()) for path in sorted(GRAFANA.glob("*.json"))}
RULES: Final = [rule for path in sorted(ALERTS.glob("*.yml")) for rule in rules_of(path)]
FIRING: Final = {rule["alert"]: rule for rule in RULES if "alert" in rule}

OF_SCRAPES: Final = {"job", "instance"}
SUFFIXES: Final = ("_bucket", "_sum", "_count")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here: apt-get install prometheus"
)


def panels_of(board: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


PANELS: Final = {
    f"{name}: {panel['title']}": panel for name, board in BOARDS.items() for panel in panels_of(board)
}
EXPRS: Final = {
    **{f"{name} {n}": expr for name, board in BOARDS.items() for n, expr in exprs_of_dashboard(board)},
    **{rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES},
}


# -- what an expression names ----------------------------------------------------------------------------------------


def faults(expr: str, metrics: Mapping[str, Metric] = METRICS) -> list[str]:
    """What in an expression does not exist: metrics, labels, values of closed labels, names in `by` and legends."""
    found: list[str] = []
    known = set(OF_SCRAPES) | set(re.findall(r'"([a-z]+)", "(?:\$1|[a-z_]+)"', expr))  # of label_replace
    for selector in selectors(unvaried(expr)):
        labels = labels_of(selector, metrics)
        if labels is None:
            found.append(f"no metric {selector.name}")
            continue
        known |= set(labels)
        for name, operator, value in selector.matchers:
            if name not in labels:
                found.append(f"{selector.name} has no label {name}")
            elif closed := labels[name]:
                wanted = value.split("|") if "~" in operator else [value]
                found += [
                    f"{name} is never {each}"
                    for each in wanted
                    if not any(re.fullmatch(each, one) for one in closed)
                ]
    for group in re.findall(r"\b(?:by|on|without|group_left) \(([^)]*)\)", expr):
        found += [f"nothing has a label {name}" for name in re.findall(r"\w+", group) if name not in known]
    return found


def labels_of(selector: Selector, metrics: Mapping[str, Metric]) -> dict[str, tuple[str, ...]] | None:
    """Labels of what a selector names, each with its values where they are a closed list; None if there is no such."""
    scraped: dict[str, tuple[str, ...]] = dict.fromkeys(OF_SCRAPES, ())
    if selector.name == "up":
        return scraped
    if recorded(selector.name):
        if not any(rule.get("record") == selector.name for rule in RULES):
            return None
        return dict.fromkeys(selector.name.partition(":")[0].split("_"), ())
    name = selector.name.removeprefix(PREFIX)
    base, suffix = next(((name.removesuffix(end), end) for end in SUFFIXES if name.endswith(end)), (name, ""))
    if name in metrics and metrics[name].kind != "histogram":
        base, suffix = name, ""
    elif base not in metrics or (metrics[base].kind == "histogram") != bool(suffix):
        return None
    own = {label.name: () if label.names_max else label.values for label in metrics[base].labels}
    return {**scraped, **own, **({"le": ()} if suffix == "_bucket" else {})}


@pytest.mark.parametrize("expr", EXPRS.values(), ids=EXPRS)
def test_a_panel_or_rule_names_only_metrics_and_labels_that_exist(expr: str) -> None:
    assert selectors(unvaried(expr))
    assert faults(expr) == []


BROKEN = {
    "no such metric": ("rate(turngate_surprises_total[5m])", ["no metric turngate_surprises_total"]),
    "a histogram without its suffix": (
        "turngate_tool_hold_seconds",
        ["no metric turngate_tool_hold_seconds"],
    ),
    "no such label": (
        'turngate_open_streams{upstream="a"}',
        ["turngate_open_streams has no label upstream"],
    ),
    "no such value": ('turngate_requests_total{outcome="lost"}', ["outcome is never lost"]),
    "no such value among others": (
        'turngate_requests_total{outcome=~"passed|lost"}',
        ["outcome is never lost"],
    ),
    "summed by what nothing has": (
        "sum by (colour) (turngate_open_streams)",
        ["nothing has a label colour"],
    ),
    "no such recorded series": ("job:turngate_hope:rate5m", ["no metric job:turngate_hope:rate5m"]),
    "a label that the record has not": (
        'job_upstream:turngate_requests:rate5m{model="m"}',
        ["job_upstream:turngate_requests:rate5m has no label model"],
    ),
}


@pytest.mark.parametrize(("expr", "found"), BROKEN.values(), ids=BROKEN)
def test_what_does_not_exist_is_found(expr: str, found: list[str]) -> None:
    assert faults(expr) == found


@pytest.mark.parametrize("name", METRICS)
def test_no_metric_can_be_renamed_without_its_dashboard(name: str) -> None:
    """Every metric is on some dashboard, so that a new name for it is noticed; an old one is a fault."""
    renamed = {key: metric for key, metric in METRICS.items() if key != name}
    assert any(faults(expr, renamed) for expr in EXPRS.values())


def test_a_record_is_named_after_what_it_is_summed_by() -> None:
    for rule in RULES:
        if "record" in rule:
            summed = re.search(r"by \(([^)]*)\)", rule["expr"])
            level = set(rule["record"].partition(":")[0].split("_"))
            if summed is None:  # made of other records: of the finest of them
                assert level in [set(s.name.partition(":")[0].split("_")) for s in selectors(rule["expr"])]
            else:
                assert set(re.findall(r"\w+", summed[1])) - {"le"} == level


# -- dashboards -------------------------------------------------------------------------------------------------------


@pytest.fixture(name="boards", scope="module")
def boards_module() -> Iterator[ModuleType]:
    """The generator, which is a script beside its own modules."""
    folder = str(ROOT / "deploy" / "dashboards")
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("boards")
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                del sys.modules[name]


def test_the_dashboards_are_what_their_generator_makes(boards: ModuleType) -> None:
    """If this fails: python deploy/dashboards"""
    made = {page.uid: boards.built(page) for page in boards.PAGES}
    assert {path.stem: path.read_text() for path in GRAFANA.iterdir()} == made


def test_a_panel_on_a_metric_that_does_not_exist_cannot_be_written(boards: ModuleType) -> None:
    panels = sys.modules["panels"]
    with pytest.raises(KeyError):
        panels.metric("surprises_total")
    with pytest.raises(KeyError):
        panels.metric("requests_total", colour="blue")


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_passes_through_the_schemas_reader_unchanged(name: str) -> None:
    register_default_plugins()
    read = Dashboard.from_json(json.loads((GRAFANA / f"{name}.json").read_text()))
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == BOARDS[name]


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_a_panel_says_what_is_normal_and_what_to_do(panel: dict[str, Any]) -> None:
    assert re.fullmatch(r"Normal: .+\.\n\nOtherwise: .+\.", panel["description"])
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["type"] in ("table", "state-timeline") or panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        assert panel["type"] == "table" or target["legendFormat"]
        summed = {
            name
            for group in re.findall(r"by \(([^)]*)\)", target["expr"])
            for name in re.findall(r"\w+", group)
        }
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= summed
    for link in panel.get("links", []):
        assert (ROOT / link["url"].replace("${docs}", "docs")).is_file()


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_can_be_narrowed_links_to_the_docs_and_marks_rollouts(board: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "upstream", "api", "model", "docs"]
    for name in ("job", "upstream", "api", "model"):
        assert variables[name]["multi"]
        assert variables[name]["includeAll"]
        (selector,) = selectors(unvaried(variables[name]["query"]))
        assert faults(variables[name]["query"]) == []
        assert name in (labels_of(selector, METRICS) or {})
    assert [mark["name"] for mark in board["annotations"]["list"]] == ["Rollout"]
    assert any(link["url"] == "${docs}/metrics.md" for link in board["links"] if link["type"] == "link")
    assert board["schemaVersion"] >= 39


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_the_panels_of_a_dashboard_fill_the_grid_without_overlap(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_each_dashboard_begins_with_whether_all_is_fine() -> None:
    for board in BOARDS.values():
        first = panels_of(board)[:6]
        assert {panel["type"] for panel in first} == {"stat"}
        assert any(len(panel["fieldConfig"]["defaults"]["thresholds"]["steps"]) > 1 for panel in first)


# -- alerts and their pages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIRING)
def test_an_alert_tells_how_bad_it_is_what_it_is_and_where_its_page_lies(name: str) -> None:
    rule = FIRING[name]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"
    page = (RUNBOOKS / f"{name}.md").read_text()
    assert page.startswith(f"# {name}\n\nSeverity: {rule['labels']['severity']}\n")
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == [
        "What it means",
        "Where to look",
        "What to do",
    ]


def test_every_page_belongs_to_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.iterdir()} == set(FIRING)


STATEMENTS: Final = sorted(
    {
        found.replace('\\"', '"')
        for path in RUNBOOKS.iterdir()
        for found in re.findall(r'turngate query "((?:[^"\\]|\\.)*)"', path.read_text())
    }
)


@pytest.mark.parametrize("statement", STATEMENTS)
def test_the_statements_of_the_pages_can_be_asked(tmp_path: Path, statement: str) -> None:
    with closing(connect_readonly(tmp_path)) as database:
        assert run_query(database, statement).rows == []


def test_each_alert_is_tested_to_fire_and_not_to_fire() -> None:
    fires: set[str] = set()
    quiet: set[str] = set()
    for test in yaml.safe_load(ALERT_TESTS.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            (fires if case["exp_alerts"] else quiet).add(case["alertname"])
    assert fires == quiet == set(FIRING)


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", str(ALERTS / "recording.yml"), str(ALERTS / "alerts.yml")),
        ("test", "rules", str(ALERT_TESTS)),
    ],
    ids=["the rules are well formed", "the alerts fire when they should"],
)
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -- deployment -------------------------------------------------------------------------------------------------------


def test_what_the_compose_file_mounts_is_there(boards: ModuleType) -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    services = compose["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source, _ = volume.split(":", 1)
            if source.startswith("."):
                assert (ROOT / "deploy" / source).exists(), volume
            else:
                assert source in compose["volumes"], volume
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/turngate.yml").read_text())
    folder = provider["providers"][0]["options"]["path"]
    assert f"../dashboards/grafana:{folder}:ro" in services["grafana"]["volumes"]
    assert f"127.0.0.1:{boards.DOCS_URL.rpartition(':')[2]}:8790" in services["docs"]["ports"]


def test_the_rules_and_the_job_are_in_prometheus_configuration() -> None:
    settings = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    assert settings["rule_files"] == ["rules/*.yml"]
    (job,) = settings["scrape_configs"]
    assert re.fullmatch(r".*turngate.*", job["job_name"])  # as the alert TurngateDown wants it
    assert job["static_configs"] == [{"targets": ["sidecar:8788"]}]
