"""The rules' reference pages: generated, up to date, and every example judged as its page says."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from turngate.adapters import levels
from turngate.validators.rules import Reason, Verdict

RULES: Final = Path(__file__).parents[1] / "docs" / "rules"


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_rules", RULES / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


GENERATOR: Final = load_generator()
TOLD: Final[dict[str, Any]] = json.loads((RULES / "examples.json").read_text())
EXAMPLES: Final = {
    f"{reason}, {example['api']}, {example['server']}": (reason, example)
    for reason, told in TOLD.items()
    for example in told["examples"]
}


def test_every_rule_has_a_page_and_no_page_is_stale() -> None:
    """If this fails: python docs/rules/generate.py"""
    assert {path.name: path.read_text() for path in RULES.glob("*.md")} == GENERATOR.pages()


def test_every_reason_of_the_table_is_explained_and_no_other() -> None:
    assert set(TOLD) == {entry.reason for entry in levels.ENTRIES}


def test_every_reason_is_explained_somewhere() -> None:
    told = (RULES.parent / "reasons.md").read_text()
    assert {reason for reason in Reason if f"| `{reason}` |" not in told} <= set(TOLD)


def test_every_hard_reason_has_an_example_in_each_api_that_refuses_it() -> None:
    hard = {(entry.reason, entry.api) for entry in levels.ENTRIES if entry.level == "hard"}
    assert hard <= {(reason, example["api"]) for reason, example in EXAMPLES.values()}


@pytest.mark.parametrize(("reason", "example"), EXAMPLES.values(), ids=EXAMPLES)
def test_an_illegal_example_is_illegal_for_its_reason_first(reason: str, example: dict[str, Any]) -> None:
    judgement = GENERATOR.judged(example, "illegal")
    assert judgement.verdict in (Verdict.ILLEGAL, Verdict.WAITING)
    assert judgement.findings[0].reason == reason


@pytest.mark.parametrize(("reason", "example"), EXAMPLES.values(), ids=EXAMPLES)
def test_its_legal_neighbour_has_nothing_to_object_to(reason: str, example: dict[str, Any]) -> None:
    judgement = GENERATOR.judged(example, "legal")
    assert (judgement.verdict, judgement.findings) == (Verdict.LEGAL, ())
    assert example["legal"] != example["illegal"], reason


def test_each_page_shows_the_providers_words_and_the_remedy() -> None:
    for entry in levels.ENTRIES:
        page = (RULES / f"{entry.reason}.md").read_text()
        assert entry.message.replace("|", r"\|") in page
        assert entry.rule in page
    for reason, example in EXAMPLES.values():
        assert GENERATOR.judged(example, "illegal").findings[0].remedy in (RULES / f"{reason}.md").read_text()
