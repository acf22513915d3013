"""The whole table of stages: what is done with every verdict in every stage."""

from itertools import product

import pytest

from turngate.proxy.rollout import Action, Ladder, RequestClass, Rung, Stage, decide, enforced
from turngate.validators.rules import Verdict

TEXT, TOOLS = RequestClass.TEXT, RequestClass.TOOLS

ENFORCED = {
    (Stage.OFF, TEXT): False,
    (Stage.OFF, TOOLS): False,
    (Stage.OBSERVE, TEXT): False,
    (Stage.OBSERVE, TOOLS): False,
    (Stage.ENFORCE_TEXT, TEXT): True,
    (Stage.ENFORCE_TEXT, TOOLS): False,
    (Stage.ENFORCE_TOOLS, TEXT): True,
    (Stage.ENFORCE_TOOLS, TOOLS): True,
}

ACTIONS = {
    # verdict: (where nothing is enforced, where it is)
    Verdict.LEGAL: (Action.PASS, Action.PASS),
    Verdict.UNJUDGED: (Action.PASS, Action.PASS),
    Verdict.WAITING: (Action.MARK, Action.REFUSE),
    Verdict.ILLEGAL: (Action.MARK, Action.REFUSE),
}

LADDER = (Stage.OFF, Stage.OBSERVE, Stage.ENFORCE_TEXT, Stage.ENFORCE_TOOLS)


@pytest.mark.parametrize(("cell", "expected"), ENFORCED.items(), ids=lambda cell: str(cell))
def test_a_stage_enforces_what_it_says(cell: tuple[Stage, RequestClass], expected: bool) -> None:
    assert enforced(*cell) is expected


@pytest.mark.parametrize("cell", list(product(ENFORCED, ACTIONS)), ids=lambda cell: str(cell))
def test_every_cell_of_the_table(cell: tuple[tuple[Stage, RequestClass], Verdict]) -> None:
    (stage, request_class), verdict = cell
    assert decide(stage, request_class, verdict) is ACTIONS[verdict][ENFORCED[stage, request_class]]


def test_the_table_names_every_stage_class_and_verdict() -> None:
    assert set(product(LADDER, RequestClass)) == set(ENFORCED)
    assert set(LADDER) == set(Stage)
    assert set(ACTIONS) == set(Verdict)
    assert {
        decide(stage, kind, verdict) for stage, kind, verdict in product(LADDER, RequestClass, Verdict)
    } == set(Action)


@pytest.mark.parametrize(("verdict", "request_class"), list(product(Verdict, RequestClass)))
def test_each_stage_does_what_the_one_before_it_does_and_more(
    verdict: Verdict, request_class: RequestClass
) -> None:
    severity = [
        (Action.PASS, Action.MARK, Action.REFUSE).index(decide(s, request_class, verdict)) for s in LADDER
    ]
    assert severity == sorted(severity)


RUNGS = [
    Rung("openai", "gpt-4*", Stage.ENFORCE_TOOLS),
    Rung("openai", "*", Stage.ENFORCE_TEXT),
    Rung("openai", "o3", Stage.OFF),
    Rung("azure-*", "o3", Stage.OFF),
]

IN_FORCE = {
    "the first scope that matches": ("openai", "gpt-4o", Stage.ENFORCE_TOOLS),
    "the next one": ("openai", "claude", Stage.ENFORCE_TEXT),
    "one behind a wider one never counts": ("openai", "o3", Stage.ENFORCE_TEXT),
    "a pattern of upstreams": ("azure-west", "o3", Stage.OFF),
    "no model": ("openai", "", Stage.ENFORCE_TEXT),
    "none that matches": ("azure-west", "gpt-4o", Stage.OBSERVE),
    "upper case is another name": ("OpenAI", "gpt-4o", Stage.OBSERVE),
}


@pytest.mark.parametrize(("upstream", "model", "stage"), IN_FORCE.values(), ids=IN_FORCE)
def test_the_first_scope_that_matches_gives_the_stage(upstream: str, model: str, stage: Stage) -> None:
    ladder = Ladder(RUNGS, Stage.OBSERVE)
    assert ladder.stage(upstream, model) is stage
    assert stage in ladder.possible(upstream)


POSSIBLE = {
    "openai": {Stage.ENFORCE_TOOLS, Stage.ENFORCE_TEXT},
    "azure-west": {Stage.OFF, Stage.OBSERVE},
    "anthropic": {Stage.OBSERVE},
}


@pytest.mark.parametrize(("upstream", "stages"), POSSIBLE.items())
def test_before_the_model_is_known_every_stage_that_can_come_is_possible(
    upstream: str, stages: set[Stage]
) -> None:
    assert Ladder(RUNGS, Stage.OBSERVE).possible(upstream) == stages


@pytest.mark.parametrize("stage", Stage)
def test_an_order_stands_above_every_scope(stage: Stage) -> None:
    ladder = Ladder(RUNGS, Stage.OBSERVE)
    ladder.ordered = stage
    assert ladder.stage("openai", "gpt-4o") is stage
    assert ladder.possible("openai") == {stage}
    ladder.ordered = None
    assert ladder.stage("openai", "gpt-4o") is Stage.ENFORCE_TOOLS
