"""The whole table of stages: what is done with every verdict in every stage."""

from itertools import product

import pytest

from turngate.proxy.rollout import Action, RequestClass, Stage, decide, enforced
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
    assert set(product(LADDER, RequestClass)) <= set(ENFORCED)
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
