"""The ladder of stages: what each does with every verdict, and which is in force for which request."""

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.proxy.rollout import (
    Action,
    Ladder,
    Order,
    RequestClass,
    Rung,
    Scope,
    Stage,
    arrange,
    decide,
    enforced,
    first_turn,
    step_down,
    step_up,
)
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
    (Stage.ENFORCE_SCHEMA, TEXT): True,
    (Stage.ENFORCE_SCHEMA, TOOLS): True,
}

ACTIONS = {
    # verdict: (where nothing is enforced, where it is)
    Verdict.LEGAL: (Action.PASS, Action.PASS),
    Verdict.UNJUDGED: (Action.PASS, Action.PASS),
    Verdict.WAITING: (Action.MARK, Action.REFUSE),
    Verdict.ILLEGAL: (Action.MARK, Action.REFUSE),
}

LADDER = (Stage.OFF, Stage.OBSERVE, Stage.ENFORCE_TEXT, Stage.ENFORCE_TOOLS, Stage.ENFORCE_SCHEMA)


@pytest.mark.parametrize(("cell", "expected"), ENFORCED.items(), ids=lambda cell: str(cell))
def test_a_stage_enforces_what_it_says(cell: tuple[Stage, RequestClass], expected: bool) -> None:
    assert enforced(*cell) is expected


@pytest.mark.parametrize("cell", list(product(ENFORCED, ACTIONS)), ids=lambda cell: str(cell))
def test_every_cell_of_the_table(cell: tuple[tuple[Stage, RequestClass], Verdict]) -> None:
    (stage, request_class), verdict = cell
    assert decide(stage, request_class, verdict) is ACTIONS[verdict][ENFORCED[stage, request_class]]


def test_the_table_names_every_stage_class_and_verdict() -> None:
    assert set(product(LADDER, RequestClass)) == set(ENFORCED)
    assert tuple(Stage) == LADDER
    assert [stage.rank for stage in LADDER] == [0, 1, 2, 3, 4]
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
def test_an_order_for_everything_stands_above_every_scope(stage: Stage) -> None:
    ladder = Ladder(RUNGS, Stage.OBSERVE)
    ladder.obey(order("openai", Stage.ENFORCE_SCHEMA))
    ladder.obey(order("all", stage))
    assert ladder.stage("openai", "gpt-4o") is stage
    assert ladder.possible("openai") == {stage}
    ladder.obey(order("all", None))
    assert ladder.stage("openai", "gpt-4o") is Stage.ENFORCE_TOOLS
    assert ladder.stage("openai", "claude") is Stage.ENFORCE_SCHEMA


def order(scope: str, stage: Stage | None, percent: int = 100, rest: Stage | None = None) -> Order:
    return Order(scope=scope, stage=stage, percent=percent, rest=rest, who="ada", why="")


# -- names of scopes ------------------------------------------------------------------------------------------------

NAMES = {
    "*": Scope(),
    "openai": Scope("openai"),
    "openai/gpt-4*": Scope("openai", "gpt-4*"),
    "vllm/meta/llama": Scope("vllm", "meta/llama"),
    "openai,x-team=blue": Scope("openai", "*", (("x-team", "blue"),)),
    "*/o3,a=1,b=2*": Scope("*", "o3", (("a", "1"), ("b", "2*"))),
}


@pytest.mark.parametrize(("name", "scope"), NAMES.items())
def test_a_scope_is_read_from_its_name_and_named_alike(name: str, scope: Scope) -> None:
    assert Scope.parse(name) == scope
    assert scope.name == name


def test_the_name_of_a_scope_knows_no_order_of_headers_nor_case_of_their_names() -> None:
    assert Scope.parse("openai,B=2,a=1").name == "openai,a=1,b=2"


@pytest.mark.parametrize(
    "name", ["", "/gpt", "openai/", "openai,", "openai,x-team", "openai,=blue", "openai,x="]
)
def test_what_is_no_scope_is_refused_with_what_can_be_written(name: str) -> None:
    with pytest.raises(ValueError, match="write UPSTREAM"):
        Scope.parse(name)


# -- orders among the settings' scopes ------------------------------------------------------------------------------

SETTINGS = (Rung("openai", "gpt-4o", Stage.OFF), Rung("openai", "*", Stage.OBSERVE))
ARRANGED = {
    "no order": ([], ["openai/gpt-4o", "openai", "*"]),
    "one for everything comes first": (
        [order("all", Stage.OFF), order("azure", Stage.OFF)],
        ["all", "openai/gpt-4o", "openai", "azure", "*"],
    ),
    "one for a scope of the settings takes its place": (
        [order("openai", Stage.ENFORCE_TEXT)],
        ["openai/gpt-4o", "openai", "*"],
    ),
    "one for some of its conversations stands before it": (
        [order("openai", Stage.ENFORCE_TEXT, 10)],
        ["openai/gpt-4o", "openai", "openai", "*"],
    ),
    "and takes its place where it says what the others get": (
        [order("openai", Stage.ENFORCE_TEXT, 10, Stage.OBSERVE)],
        ["openai/gpt-4o", "openai", "*"],
    ),
    "a new one leaves narrower exceptions alone": (
        [order("openai/gpt-*", Stage.ENFORCE_TEXT)],
        ["openai/gpt-4o", "openai/gpt-*", "openai", "*"],
    ),
    "a header makes it narrower than any model": (
        [order("*,x-team=blue", Stage.ENFORCE_TEXT)],
        ["*,x-team=blue", "openai/gpt-4o", "openai", "*"],
    ),
    "one that is ended is none": (
        [order("all", None), order("openai", None)],
        ["openai/gpt-4o", "openai", "*"],
    ),
}


@pytest.mark.parametrize(("orders", "names"), ARRANGED.values(), ids=ARRANGED)
def test_orders_are_worked_into_the_settings(orders: list[Order], names: list[str]) -> None:
    for given_ in (orders, orders[::-1]):
        assert [rung.name for rung in arrange(SETTINGS, Stage.OBSERVE, given_)] == names


# -- headers --------------------------------------------------------------------------------------------------------

TEAM = Rung("openai", "*", Stage.ENFORCE_TOOLS, header=(("x-team", "blue*"),))
HEADERS: dict[str, tuple[list[tuple[bytes, bytes]], Stage]] = {
    "the header": ([(b"x-team", b"blue")], Stage.ENFORCE_TOOLS),
    "its name in any case, blanks around its value": ([(b"X-Team", b" blue-1 ")], Stage.ENFORCE_TOOLS),
    "one of several": ([(b"x-team", b"red"), (b"x-team", b"blue")], Stage.ENFORCE_TOOLS),
    "another value": ([(b"x-team", b"red")], Stage.OBSERVE),
    "bytes that are no ASCII": ([(b"x-team", b"\xff")], Stage.OBSERVE),
    "no header": ([], Stage.OBSERVE),
}


@pytest.mark.parametrize(("headers", "stage"), HEADERS.values(), ids=HEADERS)
def test_a_scope_can_ask_for_a_header(headers: list[tuple[bytes, bytes]], stage: Stage) -> None:
    ladder = Ladder([TEAM], Stage.OBSERVE)
    assert ladder.stage("openai", "m", headers) is stage
    assert stage in ladder.possible("openai", headers)
    assert ladder.possible("azure", headers) == {Stage.OBSERVE}


def test_a_scope_that_asks_for_two_headers_wants_both() -> None:
    both = Rung("*", "*", Stage.OFF, header=(("a", "1"), ("b", "2")))
    ladder = Ladder([both], Stage.OBSERVE)
    assert ladder.stage("u", "m", [(b"a", b"1")]) is Stage.OBSERVE
    assert ladder.stage("u", "m", [(b"b", b"2"), (b"a", b"1")]) is Stage.OFF


# -- percentages ----------------------------------------------------------------------------------------------------

CONVERSATIONS = [str(number).encode() for number in range(2_000)]


def sides(ladder: Ladder) -> list[Stage]:
    return [ladder.stage("openai", "m", (), lambda turn=turn: turn) for turn in CONVERSATIONS]  # type: ignore[misc]


def ladder_at(percent: int, rest: Stage | None = None, key: bytes = b"key") -> Ladder:
    ladder = Ladder([], Stage.OBSERVE, key=key)
    ladder.obey(order("openai", Stage.ENFORCE_TOOLS, percent, rest))
    return ladder


@pytest.mark.parametrize("percent", [1, 10, 50, 99])
def test_about_so_many_conversations_get_the_stage_and_each_always_the_same(percent: int) -> None:
    found = sides(ladder_at(percent))
    assert found == sides(ladder_at(percent))
    share = found.count(Stage.ENFORCE_TOOLS) / len(found)
    assert abs(share - percent / 100) < 0.03
    assert set(found) == {Stage.ENFORCE_TOOLS, Stage.OBSERVE}


def test_a_larger_percentage_leaves_no_conversation_behind() -> None:
    before = sides(ladder_at(10))
    for percent in (20, 60, 100):
        after = sides(ladder_at(percent))
        assert all(
            b is Stage.ENFORCE_TOOLS for a, b in zip(before, after, strict=True) if a is Stage.ENFORCE_TOOLS
        )
        before = after
    assert set(before) == {Stage.ENFORCE_TOOLS}


def test_the_others_get_what_the_order_says_or_the_next_scope() -> None:
    assert set(sides(ladder_at(50, Stage.ENFORCE_TEXT))) == {Stage.ENFORCE_TOOLS, Stage.ENFORCE_TEXT}
    assert ladder_at(50, Stage.ENFORCE_TEXT).possible("openai") == {Stage.ENFORCE_TOOLS, Stage.ENFORCE_TEXT}
    assert ladder_at(50).possible("openai") == {Stage.ENFORCE_TOOLS, Stage.OBSERVE}


def test_who_does_not_know_the_key_cannot_choose_a_side() -> None:
    assert sides(ladder_at(50, key=b"one")) != sides(ladder_at(50, key=b"two"))


def test_a_request_without_identity_is_in_no_percentage() -> None:
    ladder = ladder_at(99)
    assert ladder.stage("openai", "m") is Stage.OBSERVE
    assert ladder_at(99, Stage.ENFORCE_TEXT).stage("openai", "m") is Stage.ENFORCE_TEXT


def test_the_named_header_is_a_conversations_identity_before_its_first_turn() -> None:
    ladder = Ladder(
        [Rung("*", "*", Stage.ENFORCE_TOOLS, percent=50)],
        Stage.OBSERVE,
        sticky_header="X-Conversation",
        key=b"k",
    )

    def side(name: bytes, turn: bytes) -> Stage:
        return ladder.stage("openai", "m", [(b"x-conversation", name)] if name else [], lambda: turn)

    assert len({side(b"c-1", turn) for turn in CONVERSATIONS[:50]}) == 1
    assert len({side(name, b"same") for name in CONVERSATIONS[:50]}) == 2
    assert len({side(b"", turn) for turn in CONVERSATIONS[:50]}) == 2


def test_the_first_turn_is_asked_for_only_where_a_percentage_depends_on_it() -> None:
    def never() -> bytes:
        raise AssertionError("asked")

    ladder = Ladder(RUNGS, Stage.OBSERVE)
    assert ladder.stage("openai", "gpt-4o", (), never) is Stage.ENFORCE_TOOLS
    assert Ladder([], Stage.OFF).stage("openai", "m", (), never) is Stage.OFF


STAGES = st.sampled_from(Stage)
PLACES = st.sampled_from(["*", "openai", "azure", "openai/gpt-4*", "*/o3", "openai,x-team=blue"])
ORDERS = st.builds(order, st.one_of(PLACES, st.just("all")), STAGES, st.integers(0, 100), st.none() | STAGES)


@given(
    st.lists(ORDERS, max_size=5),
    st.sampled_from(["openai", "azure"]),
    st.sampled_from(["gpt-4o", "o3"]),
    st.binary(max_size=4),
    st.booleans(),
)
def test_what_is_in_force_was_possible_before_the_body_was_read(
    orders: list[Order], upstream: str, model: str, turn: bytes, blue: bool
) -> None:
    ladder = Ladder(RUNGS, Stage.OBSERVE)
    for each in orders:
        ladder.obey(each)
    headers = [(b"x-team", b"blue")] if blue else []
    assert ladder.stage(upstream, model, headers, lambda: turn) in ladder.possible(upstream, headers)


def test_new_settings_leave_the_orders_in_force() -> None:
    ladder = Ladder(RUNGS, Stage.OBSERVE)
    ladder.obey(order("azure-west", Stage.ENFORCE_SCHEMA))
    ladder.redeclare([], Stage.OFF)
    assert ladder.stage("openai", "gpt-4o") is Stage.OFF
    assert ladder.stage("azure-west", "gpt-4o") is Stage.ENFORCE_SCHEMA


# -- the first turn -------------------------------------------------------------------------------------------------

ASKED = {"role": "user", "content": "hello"}
SAME: dict[str, list[dict[str, Any]]] = {
    "alone": [ASKED],
    "behind a system message that tells the time": [{"role": "system", "content": "it is noon"}, ASKED],
    "as a part": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "with a cache mark": [
        {
            "role": "user",
            "content": [{"text": "hello", "cache_control": {"type": "ephemeral"}, "type": "text"}],
        }
    ],
    "with all that followed": [
        ASKED,
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "and?"},
    ],
}


@pytest.mark.parametrize("messages", SAME.values(), ids=SAME)
def test_a_conversations_first_turn_stays_the_same(messages: list[dict[str, Any]]) -> None:
    body = json.dumps({"model": "m", "messages": messages}, indent=1).encode()
    assert first_turn(body) == first_turn(json.dumps({"messages": [ASKED]}).encode()) != b""


def test_another_question_is_another_first_turn() -> None:
    other = {"messages": [{"role": "user", "content": "hello?"}]}
    assert first_turn(json.dumps(other).encode()) != first_turn(json.dumps({"messages": [ASKED]}).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"messages": 1}',
        b'{"messages": [1]}',
        b'{"messages": [{"role": "user", "content": 1}]}',
        b'{"messages": [{"role": "assistant"}]}',
        b"\xff",
    ],
)
def test_a_body_that_cannot_be_read_has_no_first_turn(body: bytes) -> None:
    assert first_turn(body) == b""


# -- one step up, one step down -------------------------------------------------------------------------------------

TEXT_10 = Rung("*", "*", Stage.ENFORCE_TEXT, percent=10, rest=Stage.OBSERVE)
UPWARD = {
    "from off to observing, which harms nobody": (Rung("*", "*", Stage.OFF), None, (Stage.OBSERVE, 100)),
    "to some first": (Rung("*", "*", Stage.OBSERVE), None, (Stage.ENFORCE_TEXT, 10)),
    "to so many as are asked for": (Rung("*", "*", Stage.OBSERVE), 25, (Stage.ENFORCE_TEXT, 25)),
    "then to all": (TEXT_10, None, (Stage.ENFORCE_TEXT, 100)),
    "or to some more": (TEXT_10, 50, (Stage.ENFORCE_TEXT, 50)),
    "never to fewer": (TEXT_10, 10, None),
    "to the schema last": (Rung("*", "*", Stage.ENFORCE_TOOLS), None, (Stage.ENFORCE_SCHEMA, 10)),
    "and no further": (Rung("*", "*", Stage.ENFORCE_SCHEMA), None, None),
}


@pytest.mark.parametrize(("rung", "percent", "step"), UPWARD.values(), ids=UPWARD)
def test_a_step_up(rung: Rung, percent: int | None, step: tuple[Stage, int] | None) -> None:
    assert step_up(rung, percent) == step


TOOLS_10 = order("*", Stage.ENFORCE_TOOLS, 10, Stage.ENFORCE_TEXT)
DOWNWARD: dict[str, tuple[Rung, list[Order], Stage | None]] = {
    "nothing is enforced": (Rung("*", "*", Stage.OBSERVE), [], None),
    "or even read": (Rung("*", "*", Stage.OFF), [order("*", Stage.OFF)], None),
    "without history": (Rung("*", "*", Stage.ENFORCE_SCHEMA), [], Stage.OBSERVE),
    "some of it goes to what the others have": (
        Rung("*", "*", Stage.ENFORCE_TOOLS, percent=10, rest=Stage.ENFORCE_TEXT),
        [TOOLS_10],
        Stage.ENFORCE_TEXT,
    ),
    "all of it goes to what held for all": (
        Rung("*", "*", Stage.ENFORCE_TOOLS),
        [order("*", Stage.ENFORCE_TOOLS), TOOLS_10, order("*", Stage.ENFORCE_TEXT)],
        Stage.ENFORCE_TEXT,
    ),
    "never up": (
        Rung("*", "*", Stage.ENFORCE_TEXT),
        [order("*", Stage.ENFORCE_TEXT), order("*", Stage.ENFORCE_TOOLS), order("*", Stage.OBSERVE)],
        Stage.OBSERVE,
    ),
    "never to off": (
        Rung("*", "*", Stage.ENFORCE_TEXT),
        [order("*", Stage.ENFORCE_TEXT), order("*", Stage.OFF)],
        Stage.OBSERVE,
    ),
    "what stood before the settings held is forgotten": (
        Rung("*", "*", Stage.ENFORCE_TOOLS),
        [order("*", Stage.ENFORCE_TOOLS), order("*", None), order("*", Stage.ENFORCE_TEXT)],
        Stage.OBSERVE,
    ),
}


@pytest.mark.parametrize(("rung", "history", "stage"), DOWNWARD.values(), ids=DOWNWARD)
def test_a_step_down(rung: Rung, history: list[Order], stage: Stage | None) -> None:
    assert step_down(rung, history) is stage
