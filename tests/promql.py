"""What tests need to know of PromQL: the selectors in an expression, and where expressions stand."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

_SELECTOR: Final = re.compile(r"(?<![\w:\"])((?:\w+:)?turngate_\w+(?::\w+)?|up(?=\{))(\{[^}]*\})?")
_MATCHER: Final = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric's name and its matchers: label, operator, value. `text` is how it stands there."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]
    text: str


def selectors(expr: str) -> list[Selector]:
    """Each selector of an expression."""
    return [
        Selector(found[1], tuple(_MATCHER.findall(found[2] or "")), found[0])
        for found in _SELECTOR.finditer(expr)
    ]


def unvaried(expr: str) -> str:
    """An expression of a dashboard with its variables replaced, as Grafana would with everything chosen."""
    for name, value in (("__rate_interval", "5m"), ("__range", "1h"), ("__interval", "1m")):
        expr = expr.replace(f"${name}", value)
    return re.sub(r"\$(?:job|upstream|api|model)\b", ".*", expr)


def recorded(name: str) -> bool:
    """True for the name of a recording rule."""
    return ":" in name


def exprs_of_dashboard(board: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every expression of a dashboard, with where it stands."""
    for mark in board["annotations"]["list"]:
        yield f"mark {mark['name']}", mark["expr"]
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield f"{panel['title']} {target['refId']}", target["expr"]


def rules_of(path: Path) -> list[dict[str, Any]]:
    """The rules of a file."""
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
