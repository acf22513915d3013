"""Declared tools: which calls fit, which schemas cannot be used, and that neither costs more than it may."""

import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.adapters.registry import CHAT, DIALECTS, MESSAGES
from turngate.validators.rules import Reason
from turngate.validators.schemas import SCHEMA_BYTES_MAX, Declared, Schemas, Tools
from turngate.validators.stream import (
    Assembler,
    CallDelta,
    CallOpened,
    ChoiceFinished,
    Ending,
    Finish,
    StreamEvent,
    Turn,
    TurnEnded,
)

Json = dict[str, Any]
MISFIT, UNUSABLE = Reason.CALL_ARGUMENTS_SCHEMA, Reason.TOOLSET_INVALID
CITY: Json = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 7}},
    "required": ["city"],
    "additionalProperties": False,
}

FAULTS: dict[str, tuple[object, str, Reason | None]] = {
    "fits": (CITY, '{"city": "Oslo", "days": 3}', None),
    "a field is missing": (CITY, '{"days": 3}', MISFIT),
    "a field of another type": (CITY, '{"city": 1}', MISFIT),
    "a field too many": (CITY, '{"city": "Oslo", "x": 1}', MISFIT),
    "beyond a limit": (CITY, '{"city": "Oslo", "days": 8}', MISFIT),
    "a whole number written as a fraction": (CITY, '{"city": "Oslo", "days": 3.0}', None),
    "no object": (CITY, "[]", MISFIT),
    "an empty schema takes everything": ({}, "[1]", None),
    "draft 4, by its own word": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "properties": {"x": {"maximum": 3, "exclusiveMaximum": True}},
        },
        '{"x": 3}',
        MISFIT,
    ),
    "a reference into itself": (
        {
            "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["v"]}},
            "$ref": "#/$defs/n",
        },
        '{"v": 1, "n": {"v": 2, "n": {}}}',
        MISFIT,
    ),
    "a reference in a circle": ({"$ref": "#"}, "{}", None),
    "a format is no more than a hint": ({"properties": {"d": {"format": "date"}}}, '{"d": "x"}', None),
    "look-around in a pattern": ({"properties": {"a": {"pattern": "^(?!x)"}}}, '{"a": "xy"}', MISFIT),
    "no schema": ([], "{}", UNUSABLE),
    "a type that is none": ({"type": "strange"}, "{}", UNUSABLE),
    "a pattern that is none": ({"properties": {"a": {"pattern": "("}}}, "{}", UNUSABLE),
    "a reference to nothing": ({"$ref": "#/$defs/none"}, "{}", UNUSABLE),
    "a reference to a file": ({"$ref": "file:///etc/passwd"}, "{}", UNUSABLE),
    "too large": ({"description": "x" * SCHEMA_BYTES_MAX}, "{}", UNUSABLE),
    "half a letter cannot be checked": (CITY, '{"city": "\\ud83d", "x": 1}', None),
    "a number beyond all bounds cannot be checked": (CITY, '{"city": 1e999}', None),
}


@pytest.mark.parametrize(("schema", "arguments", "reason"), FAULTS.values(), ids=FAULTS)
def test_arguments_fit_their_schema_or_say_why_not(
    schema: object, arguments: str, reason: Reason | None
) -> None:
    assert Schemas().fault(json.dumps(schema).encode(), arguments) is reason


def test_a_schema_that_is_no_json_is_unusable() -> None:
    assert Schemas().fault(b'{"type":', "{}") is UNUSABLE


def test_a_pattern_that_would_search_for_ever_gives_up() -> None:
    schema = {"properties": {"a": {"pattern": r"^(a|a)*\1?(?=x)$"}}}
    assert Schemas().fault(json.dumps(schema).encode(), json.dumps({"a": "a" * 60 + "b"})) is UNUSABLE


def test_a_reference_to_the_network_is_not_followed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        schema = {"$ref": f"http://127.0.0.1:{server.getsockname()[1]}/schema"}
        assert Schemas().fault(json.dumps(schema).encode(), "{}") is UNUSABLE
        with pytest.raises(BlockingIOError):
            server.accept()


def test_the_last_used_schemas_are_kept_and_no_more() -> None:
    schemas = Schemas(count_max=3)
    for number in range(10):
        assert schemas.fault(b'{"minimum": %d}' % number, "-1") is MISFIT
    assert len(schemas) == 3
    kept = schemas._validator(b'{"minimum": 7}')
    schemas.fault(b'{"minimum": 10}', "0")
    assert schemas._validator(b'{"minimum": 7}') is kept


@given(
    st.recursive(st.none() | st.booleans() | st.text(), lambda inner: st.dictionaries(st.text(), inner)),
    st.text(),
)
def test_no_schema_and_no_arguments_break_the_check(schema: object, arguments: str) -> None:
    Schemas().fault(json.dumps({"properties": schema}).encode(), arguments)
    Schemas().fault(json.dumps(schema).encode(), json.dumps(arguments))


def test_arguments_as_deep_as_they_can_be_read_are_checked_without_harm() -> None:
    schema = b'{"type": ["object", "null"], "additionalProperties": {"$ref": "#"}}'
    assert Schemas().fault(schema, '{"a":' * 900 + "null" + "}" * 900) is None


# -- what a request declares ------------------------------------------------------------------------------------------

FUNCTION: Json = {"name": "f", "parameters": CITY}
SCHEMA = json.dumps(CITY, separators=(",", ":")).encode()
DECLARATIONS: dict[str, tuple[str, Json, Tools | None]] = {
    "chat": (CHAT.api, {"tools": [{"type": "function", "function": FUNCTION}]}, Tools({"f": SCHEMA})),
    "chat, functions": (CHAT.api, {"functions": [FUNCTION]}, Tools({"f": SCHEMA})),
    "chat, no parameters": (CHAT.api, {"tools": [{"function": {"name": "f"}}]}, Tools({"f": b""})),
    "chat, null parameters": (
        CHAT.api,
        {"functions": [{"name": "f", "parameters": None}]},
        Tools({"f": b""}),
    ),
    "chat, free text": (
        CHAT.api,
        {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
        Tools({"f": b""}),
    ),
    "chat, a server's tool": (
        CHAT.api,
        {"tools": [{"type": "web_search"}, {"type": "function", "function": FUNCTION}]},
        Tools({"f": SCHEMA}, complete=False),
    ),
    "chat, none": (CHAT.api, {}, None),
    "chat, an empty list": (CHAT.api, {"tools": []}, None),
    "chat, another form": (CHAT.api, {"tools": {"f": 1}}, None),
    "messages": (MESSAGES.api, {"tools": [{"name": "f", "input_schema": CITY}]}, Tools({"f": SCHEMA})),
    "messages, said to be custom": (
        MESSAGES.api,
        {"tools": [{"type": "custom", "name": "f", "input_schema": CITY}]},
        Tools({"f": SCHEMA}),
    ),
    "messages, a built-in toolset": (
        MESSAGES.api,
        {"tools": [{"type": "computer_20250124", "name": "computer"}]},
        Tools({"computer": b""}, complete=False),
    ),
    "messages, tools added on the way": (
        MESSAGES.api,
        {
            "tools": [{"name": "f", "input_schema": CITY}],
            "messages": [{"role": "system", "content": [{"type": "tool_addition", "tool": {}}]}],
        },
        Tools({"f": SCHEMA}, complete=False),
    ),
    "messages, none": (MESSAGES.api, {"messages": []}, None),
    "messages, another form": (MESSAGES.api, {"tools": "all"}, None),
}


@pytest.mark.parametrize(("api", "body", "tools"), DECLARATIONS.values(), ids=DECLARATIONS)
def test_a_request_declares_its_tools(api: str, body: Json, tools: Tools | None) -> None:
    assert DIALECTS[api].declared_tools(json.dumps(body, separators=(",", ":")).encode()) == tools


def test_a_body_that_is_no_json_declares_nothing() -> None:
    assert [DIALECTS[api].declared_tools(b"{") for api in (CHAT.api, MESSAGES.api)] == [None, None]


# -- in a turn --------------------------------------------------------------------------------------------------------


def turn(
    name: str, arguments: str, finish: Finish = Finish.COMPLETE, free_text: bool = False
) -> list[StreamEvent]:
    opened = CallOpened(0, 0, "id_1", name, free_text)
    return [opened, CallDelta(0, arguments), ChoiceFinished(0, finish), TurnEnded()]


def judged(
    events: list[StreamEvent], tools: Tools | None, enforced: bool, used: tuple[str, ...] = ()
) -> Assembler:
    assembler = Assembler(declared=Declared(lambda: tools, Schemas(), enforced, lambda: used))
    for event in events:
        assembler.receive(event)
    return assembler


TOOLS = Tools({"f": SCHEMA, "any": b"", "broken": b"[]"})
OPEN_TOOLS = Tools(TOOLS.schemas, complete=False)
TURNS: dict[str, tuple[list[StreamEvent], Tools | None, Reason | None, bool]] = {
    "fits": (turn("f", '{"city":"Oslo"}'), TOOLS, None, False),
    "does not fit": (turn("f", "{}"), TOOLS, MISFIT, True),
    "no such tool": (turn("g", "{}"), TOOLS, Reason.CALL_UNKNOWN_TOOL, True),
    "no such tool, and others may be meant": (turn("g", "{}"), OPEN_TOOLS, None, False),
    "does not fit, and others may be meant": (turn("f", "{}"), OPEN_TOOLS, MISFIT, True),
    "nothing is declared": (turn("g", "{}"), None, None, False),
    "a tool without schema": (turn("any", "[]"), TOOLS, None, False),
    "a schema that cannot be used": (turn("broken", "{}"), TOOLS, UNUSABLE, False),
    "free text": (turn("f", "SELECT", free_text=True), TOOLS, None, False),
    "free text of no such tool": (turn("g", "SELECT", free_text=True), TOOLS, Reason.CALL_UNKNOWN_TOOL, True),
}


@pytest.mark.parametrize("enforced", [True, False])
@pytest.mark.parametrize(("events", "tools", "reason", "withholds"), TURNS.values(), ids=TURNS)
def test_what_does_not_fit_is_withheld_or_noted(
    events: list[StreamEvent], tools: Tools | None, reason: Reason | None, withholds: bool, enforced: bool
) -> None:
    assembler = judged(events, tools, enforced)
    verdict = assembler.close(Ending.CLEAN)
    if withholds and enforced:
        assert (verdict.turn, verdict.reason, verdict.calls) == (Turn.RETRACTED, reason, ())
        assert assembler.anomalies == []
    else:
        assert (verdict.turn, verdict.reason, len(verdict.calls)) == (Turn.COMMITTED, None, 1)
        assert assembler.anomalies == ([reason] if reason else [])


@pytest.mark.parametrize(
    ("enforced", "reason"), [(True, MISFIT), (False, Reason.STREAM_LENGTH_LIMITED)], ids=["enforced", "noted"]
)
def test_a_call_that_a_server_closed_at_the_limit_is_told_by_its_schema(
    enforced: bool, reason: Reason
) -> None:
    verdict = judged(turn("f", "{}", Finish.TRUNCATED), TOOLS, enforced).close(Ending.CLEAN)
    assert (verdict.turn, verdict.reason, verdict.calls) == (Turn.INCOMPLETE, reason, ())


@pytest.mark.parametrize("enforced", [True, False])
def test_an_id_of_an_earlier_turn_is_only_noted(enforced: bool) -> None:
    assembler = judged(turn("any", "{}"), TOOLS, enforced, used=("id_1",))
    assert assembler.close(Ending.CLEAN).turn is Turn.COMMITTED
    assert assembler.anomalies == [Reason.CALL_DUPLICATE_ID]


def test_where_the_answer_has_no_call_nobody_asks_what_was_declared() -> None:
    def never() -> Tools | None:
        raise AssertionError

    assembler = Assembler(declared=Declared(never, Schemas(), True, never))  # type: ignore[arg-type]
    for event in (ChoiceFinished(0, Finish.COMPLETE), TurnEnded()):
        assembler.receive(event)
    assert assembler.close(Ending.CLEAN).turn is Turn.COMMITTED
