"""The assembler as a table: events in, a verdict on the turn out; and which arguments are whole."""

import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.validators.rules import Reason
from turngate.validators.stream import (
    Assembler,
    CallClosed,
    CallDelta,
    CallDisplaced,
    CallNamed,
    CallOpened,
    ChoiceFinished,
    Ending,
    Finish,
    FrameUnreadable,
    Irregular,
    ProviderFailed,
    StreamEvent,
    TextDelta,
    Turn,
    TurnEnded,
    TurnStarted,
    TurnVerdict,
    UsageReported,
    arguments_fault,
    repeats_key,
)

Released = list[tuple[str, str, str]]
"""(id, name, arguments) of the calls that may run."""

STOP, FOR_TOOLS = ChoiceFinished(0, Finish.COMPLETE), ChoiceFinished(0, Finish.COMPLETE, True)
LENGTH, FILTER = ChoiceFinished(0, Finish.TRUNCATED), ChoiceFinished(0, Finish.FILTERED)
OTHER, END = ChoiceFinished(0, Finish.OTHER), TurnEnded()
TEXT = TextDelta(2)
UNCLOSED, INVALID = Reason.CALL_ARGUMENTS_UNCLOSED, Reason.CALL_ARGUMENTS_INVALID


def call(number: int, *fragments: str, id: str = "", name: str = "f", choice: int = 0) -> list[StreamEvent]:
    opened = CallOpened(number, choice, id or f"c{number}", name)
    return [opened, *(CallDelta(number, fragment) for fragment in fragments)]


def released(verdict: TurnVerdict) -> Released:
    return [(call.id, call.name, call.arguments) for call in verdict.calls]


COMMITTED, INCOMPLETE, RETRACTED, UNKNOWN = Turn.COMMITTED, Turn.INCOMPLETE, Turn.RETRACTED, Turn.UNKNOWN

ENDED: dict[str, tuple[list[StreamEvent], Turn, Reason | None, Released]] = {
    "text": ([TEXT, STOP, END], COMMITTED, None, []),
    "nothing, and it ended": ([STOP, END], COMMITTED, None, []),
    "a call": ([*call(0, '{"x"', ":1}"), FOR_TOOLS, END], COMMITTED, None, [("c0", "f", '{"x":1}')]),
    "a call without arguments": ([*call(0), FOR_TOOLS, END], COMMITTED, None, [("c0", "f", "{}")]),
    "arguments that are no object": (
        [*call(0, "null"), FOR_TOOLS, END],
        COMMITTED,
        None,
        [("c0", "f", "null")],
    ),
    "text and parallel calls": (
        [TEXT, *call(0, "{}"), *call(1, "[]"), FOR_TOOLS, END],
        COMMITTED,
        None,
        [("c0", "f", "{}"), ("c1", "f", "[]")],
    ),
    "interleaved calls": (
        [*call(0, "["), *call(1, "{"), CallDelta(0, "]"), CallDelta(1, "}"), FOR_TOOLS, END],
        COMMITTED,
        None,
        [("c0", "f", "[]"), ("c1", "f", "{}")],
    ),
    "calls, and the finish says stop": ([*call(0, "{}"), STOP, END], COMMITTED, None, [("c0", "f", "{}")]),
    "a name that comes late": (
        [
            CallOpened(0, 0, "", ""),
            CallDelta(0, "{}"),
            CallNamed(0, "c0", ""),
            CallNamed(0, "x", "f"),
            STOP,
            END,
        ],
        COMMITTED,
        None,
        [("c0", "f", "{}")],
    ),
    "free text is not JSON": (
        [CallOpened(0, 0, "c0", "f", True), CallDelta(0, "SELECT {"), FOR_TOOLS, END],
        COMMITTED,
        None,
        [("c0", "f", "SELECT {")],
    ),
    "the finish says tools, and there are none": (
        [TEXT, FOR_TOOLS, END],
        COMMITTED,
        Reason.STREAM_TOOL_STOP_WITHOUT_CALL,
        [],
    ),
    "one id in two choices": (
        [
            *call(0, "{}", id="a"),
            *call(1, "{}", id="a", choice=1),
            FOR_TOOLS,
            ChoiceFinished(1, Finish.COMPLETE),
            END,
        ],
        COMMITTED,
        None,
        [("a", "f", "{}"), ("a", "f", "{}")],
    ),
    "one id twice in a choice": (
        [*call(0, "{}", id="a"), *call(1, "{}", id="a"), FOR_TOOLS, END],
        RETRACTED,
        Reason.STREAM_CALL_ID_CONFLICT,
        [],
    ),
    "no id": (
        [CallOpened(0, 0, "", "f"), CallDelta(0, "{}"), FOR_TOOLS, END],
        RETRACTED,
        Reason.STREAM_CALL_ID_MISSING,
        [],
    ),
    "no name": ([CallOpened(0, 0, "a", ""), FOR_TOOLS, END], RETRACTED, Reason.CALL_BAD_NAME, []),
    "cut arguments, and the finish says tools (DEV-21)": (
        [*call(0, '{"x":'), FOR_TOOLS, END],
        RETRACTED,
        UNCLOSED,
        [],
    ),
    "arguments that are no JSON": ([*call(0, "{x}"), FOR_TOOLS, END], RETRACTED, INVALID, []),
    "one good call, one cut": ([*call(0, "{}"), *call(1, "{"), FOR_TOOLS, END], RETRACTED, UNCLOSED, []),
    "length, text": ([TEXT, LENGTH, END], INCOMPLETE, Reason.STREAM_LENGTH_LIMITED, []),
    "length, a call that is whole": (
        [*call(0, "{}"), LENGTH, END],
        INCOMPLETE,
        Reason.STREAM_LENGTH_LIMITED,
        [],
    ),
    "length, a call that is cut": ([*call(0, "{"), LENGTH, END], INCOMPLETE, UNCLOSED, []),
    "filter": ([TEXT, FILTER, END], INCOMPLETE, Reason.STREAM_FILTERED, []),
    "filter, with a call": ([*call(0, "{}"), FILTER, END], INCOMPLETE, Reason.STREAM_FILTERED, []),
    "another word, text": ([TEXT, OTHER, END], COMMITTED, None, []),
    "another word, with a call": ([*call(0, "{}"), OTHER, END], RETRACTED, Reason.STREAM_NO_STOP, []),
    "an end that gives no reason, text": ([TEXT, END], COMMITTED, None, []),
    "an end that gives no reason, with a call": ([*call(0, "{}"), END], RETRACTED, Reason.STREAM_NO_STOP, []),
    "a second finish (DEV-11)": (
        [*call(0, "{}"), FOR_TOOLS, END, STOP, END],
        COMMITTED,
        None,
        [("c0", "f", "{}")],
    ),
    "length stays length after a second finish": (
        [*call(0, "{}"), LENGTH, END, FOR_TOOLS, END],
        INCOMPLETE,
        Reason.STREAM_LENGTH_LIMITED,
        [],
    ),
    "one of two choices was cut": (
        [TEXT, STOP, ChoiceFinished(1, Finish.TRUNCATED), END],
        INCOMPLETE,
        Reason.STREAM_LENGTH_LIMITED,
        [],
    ),
    "a provider's error": ([TEXT, ProviderFailed("x")], RETRACTED, Reason.STREAM_ERROR_EVENT, []),
    "an error after the end": (
        [TEXT, STOP, END, ProviderFailed("x")],
        RETRACTED,
        Reason.STREAM_ERROR_EVENT,
        [],
    ),
    "an unreadable frame": (
        [TEXT, FrameUnreadable("x"), STOP, END],
        RETRACTED,
        Reason.STREAM_BAD_FRAMING,
        [],
    ),
    "the first fault stays": (
        [FrameUnreadable("x"), ProviderFailed("x")],
        RETRACTED,
        Reason.STREAM_BAD_FRAMING,
        [],
    ),
}


@pytest.mark.parametrize(("events", "turn", "reason", "calls"), ENDED.values(), ids=ENDED)
@pytest.mark.parametrize("ending", Ending)
def test_an_ended_turn_is_judged_by_its_events_however_the_bytes_end(
    events: list[StreamEvent], turn: Turn, reason: Reason | None, calls: Released, ending: Ending
) -> None:
    assembler = Assembler()
    for event in events:
        assembler.receive(event)
    verdict = assembler.close(ending)
    assert (verdict.turn, verdict.reason, released(verdict)) == (turn, reason, calls)


BROKEN: dict[str, tuple[list[StreamEvent], bool, Ending, Turn, Reason]] = {
    "nothing came, and the end was clean": ([], False, Ending.CLEAN, UNKNOWN, Reason.STREAM_NO_STOP),
    "nothing came, and the connection broke": ([], False, Ending.RESET, UNKNOWN, Reason.STREAM_TRUNCATED),
    "half a frame came": ([], True, Ending.EOF, UNKNOWN, Reason.STREAM_TRUNCATED),
    "text without end": ([TEXT], False, Ending.CLEAN, RETRACTED, Reason.STREAM_NO_STOP),
    "text, and the connection broke": ([TEXT], False, Ending.EOF, RETRACTED, Reason.STREAM_NO_STOP),
    "text, and the connection broke inside a frame": (
        [TEXT],
        True,
        Ending.EOF,
        RETRACTED,
        Reason.STREAM_TRUNCATED,
    ),
    "a whole call without end": (call(0, "{}"), False, Ending.CLEAN, RETRACTED, Reason.STREAM_NO_STOP),
    "a call cut in its arguments": (call(0, '{"x'), False, Ending.CLEAN, RETRACTED, Reason.STREAM_TRUNCATED),
    "a call whose arguments have only begun": (
        call(0, ""),
        False,
        Ending.EOF,
        RETRACTED,
        Reason.STREAM_TRUNCATED,
    ),
    "a call before its arguments": (call(0), False, Ending.EOF, RETRACTED, Reason.STREAM_TRUNCATED),
    "a call after the finish": (
        [STOP, END, *call(0, "{}")],
        False,
        Ending.CLEAN,
        RETRACTED,
        Reason.STREAM_NO_STOP,
    ),
    "silence": ([TEXT], False, Ending.STALLED, UNKNOWN, Reason.STREAM_STALLED),
}


@pytest.mark.parametrize(("events", "inside", "ending", "turn", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_turn_without_end_is_never_committed(
    events: list[StreamEvent], inside: bool, ending: Ending, turn: Turn, reason: Reason
) -> None:
    assembler = Assembler()
    for event in events:
        assembler.receive(event)
    verdict = assembler.close(ending, inside_frame=inside)
    assert (verdict.turn, verdict.reason, verdict.calls) == (turn, reason, ())


CLOSED = CallClosed(0)
CLOSING: dict[str, tuple[list[StreamEvent], Turn, Reason | None]] = {
    "closed": ([*call(0, "{}"), CLOSED, FOR_TOOLS, END], COMMITTED, None),
    "closed without arguments": ([*call(0), CLOSED, FOR_TOOLS, END], COMMITTED, None),
    "not closed although whole": ([*call(0, "{}"), FOR_TOOLS, END], RETRACTED, UNCLOSED),
    "closed although cut": ([*call(0, "{"), CLOSED, FOR_TOOLS, END], RETRACTED, UNCLOSED),
    "length inside the call": ([*call(0, "{"), LENGTH, END], INCOMPLETE, UNCLOSED),
    "length behind a closed call": (
        [*call(0, "{}"), CLOSED, LENGTH, END],
        INCOMPLETE,
        Reason.STREAM_LENGTH_LIMITED,
    ),
    "the bytes end inside the call": ([*call(0, "{}")], RETRACTED, Reason.STREAM_TRUNCATED),
    "the bytes end behind the call": ([*call(0, "{}"), CLOSED], RETRACTED, Reason.STREAM_NO_STOP),
    "the bytes end behind the finish": (
        [*call(0, "{}"), CLOSED, FOR_TOOLS],
        RETRACTED,
        Reason.STREAM_NO_STOP,
    ),
}


@pytest.mark.parametrize(("events", "turn", "reason"), CLOSING.values(), ids=CLOSING)
def test_where_the_wire_closes_calls_an_open_one_is_not_whole(
    events: list[StreamEvent], turn: Turn, reason: Reason | None
) -> None:
    assembler = Assembler(closes_calls=True)
    for event in events:
        assembler.receive(event)
    verdict = assembler.close(Ending.EOF)
    assert (verdict.turn, verdict.reason) == (turn, reason)


def test_a_call_after_a_finish_reopens_the_turn_until_it_ends_again() -> None:
    assembler = Assembler()
    ended: list[StreamEvent] = [TEXT, STOP, END]
    for event in ended:
        assembler.receive(event)
    assert assembler.ended
    assembler.receive(CallOpened(0, 0, "c0", "f"))
    assert not assembler.ended
    again: list[StreamEvent] = [CallDelta(0, "{}"), FOR_TOOLS, END]
    for event in again:
        assembler.receive(event)
    assert released(assembler.close(Ending.CLEAN)) == [("c0", "f", "{}")]


def test_the_first_name_of_the_answer_stays() -> None:
    assembler = Assembler()
    for event in [TurnStarted("", "m"), TurnStarted("r1", "m2"), TurnStarted("r2", "")]:
        assembler.receive(event)
    assert (assembler.handle, assembler.model) == ("r1", "m")


START, AGAIN, OTHER_START = TurnStarted("r1", "m"), TurnStarted("r1", "m"), TurnStarted("r2", "m")
ODD = Irregular(Reason.STREAM_OUT_OF_ORDER)
IRREGULAR: dict[str, tuple[list[StreamEvent], Turn, Reason | None, list[Reason]]] = {
    "a second start": (
        [START, AGAIN, TEXT, STOP, END],
        COMMITTED,
        Reason.STREAM_DUPLICATE_DELTA,
        [Reason.STREAM_DUPLICATE_DELTA],
    ),
    "a second start behind text": (
        [START, TEXT, AGAIN, STOP, END],
        COMMITTED,
        Reason.STREAM_DUPLICATE_DELTA,
        [Reason.STREAM_DUPLICATE_DELTA],
    ),
    "a second start behind a call": (
        [START, *call(0, "{}"), AGAIN, FOR_TOOLS, END],
        RETRACTED,
        Reason.STREAM_DUPLICATE_DELTA,
        [],
    ),
    "another answer before anything was said": (
        [START, OTHER_START, TEXT, STOP, END],
        COMMITTED,
        Reason.STREAM_WRONG_HANDLE,
        [Reason.STREAM_WRONG_HANDLE],
    ),
    "another answer behind text": (
        [START, TEXT, OTHER_START, STOP, END],
        RETRACTED,
        Reason.STREAM_WRONG_HANDLE,
        [],
    ),
    "text behind the end": ([TEXT, STOP, END, TEXT], COMMITTED, None, [Reason.STREAM_AFTER_STOP]),
    "an end with every piece of text": ([TEXT, STOP, END, TEXT, STOP, END], COMMITTED, None, []),
    "a piece behind the finish of its choice": (
        [*call(0, "{}"), FOR_TOOLS, CallDelta(0, " "), END],
        RETRACTED,
        Reason.STREAM_AFTER_STOP,
        [],
    ),
    "a piece that says nothing, behind the finish": (
        [*call(0, "{}"), FOR_TOOLS, CallDelta(0, ""), END],
        COMMITTED,
        None,
        [Reason.STREAM_AFTER_STOP],
    ),
    "a name behind the finish": (
        [CallOpened(0, 0, "c0", ""), FOR_TOOLS, CallNamed(0, "", "f"), END],
        RETRACTED,
        Reason.STREAM_AFTER_STOP,
        [],
    ),
    "a piece behind the close of its call": (
        [*call(0, "{}"), CallClosed(0), CallDelta(0, " "), FOR_TOOLS, END],
        RETRACTED,
        Reason.STREAM_AFTER_STOP,
        [],
    ),
    "a call behind the finish of its choice, and another choice ends": (
        [STOP, *call(0, "{}"), ChoiceFinished(1, Finish.COMPLETE), END],
        RETRACTED,
        Reason.STREAM_NO_STOP,
        [],
    ),
    "a call behind the end": (
        [*call(0, "{}"), FOR_TOOLS, END, *call(1, "[]"), FOR_TOOLS, END],
        COMMITTED,
        None,
        [Reason.STREAM_AFTER_STOP],
    ),
    "a call behind the end that repeats one": (
        [*call(0, "{}"), FOR_TOOLS, END, *call(1, "{}"), FOR_TOOLS, END],
        RETRACTED,
        Reason.STREAM_DUPLICATE_DELTA,
        [Reason.STREAM_AFTER_STOP],
    ),
    "one call twice, at once": ([*call(0, "{}"), *call(1, "{}"), FOR_TOOLS, END], COMMITTED, None, []),
    "a whole call that was displaced": (
        [*call(0, "{}"), *call(1, "[]"), CallDisplaced(0), FOR_TOOLS, END],
        COMMITTED,
        None,
        [],
    ),
    "a cut call that was displaced": (
        [*call(0, "{"), *call(1, "[]"), CallDisplaced(0), FOR_TOOLS, END],
        RETRACTED,
        Reason.STREAM_CALL_ID_CONFLICT,
        [],
    ),
    "all arguments once more": (
        [*call(0, '{"a"', ":1", '{"a":1}'), FOR_TOOLS, END],
        RETRACTED,
        Reason.STREAM_DUPLICATE_DELTA,
        [],
    ),
    "whole arguments twice": (
        [*call(0, "{}", "{}"), FOR_TOOLS, END],
        RETRACTED,
        Reason.STREAM_DUPLICATE_DELTA,
        [],
    ),
    "one piece twice": (
        [*call(0, '{"a"', ":", ":", "1}"), FOR_TOOLS, END],
        RETRACTED,
        Reason.STREAM_DUPLICATE_DELTA,
        [],
    ),
    "one piece too many": ([*call(0, '{"a"', ":", "]", "1}"), FOR_TOOLS, END], RETRACTED, INVALID, []),
    "a key that stands twice": (
        [*call(0, '{"a":1,"a":2}'), FOR_TOOLS, END],
        RETRACTED,
        Reason.CALL_ARGUMENTS_DUPLICATE_KEY,
        [],
    ),
    "the same oddity twice": ([ODD, TEXT, ODD, STOP, END], COMMITTED, None, [Reason.STREAM_OUT_OF_ORDER]),
    "an oddity that clients read in two ways": (
        [TEXT, Irregular(Reason.STREAM_OUT_OF_ORDER, fatal=True), STOP, END],
        RETRACTED,
        Reason.STREAM_OUT_OF_ORDER,
        [],
    ),
    "a call that the provider could not read": (
        [ProviderFailed("x", malformed_call=True)],
        RETRACTED,
        Reason.STREAM_MALFORMED_CALL,
        [],
    ),
}


@pytest.mark.parametrize(("events", "turn", "reason", "anomalies"), IRREGULAR.values(), ids=IRREGULAR)
def test_what_is_irregular_ends_the_turn_or_is_noted(
    events: list[StreamEvent], turn: Turn, reason: Reason | None, anomalies: list[Reason]
) -> None:
    assembler = Assembler()
    for event in events:
        assembler.receive(event)
    verdict = assembler.close(Ending.CLEAN)
    assert (verdict.turn, verdict.reason, assembler.anomalies) == (turn, reason, anomalies)
    assert verdict.calls == (tuple(assembler.calls) if turn is COMMITTED else ())


USAGES: dict[str, tuple[list[StreamEvent], tuple[int, int]]] = {
    "never told": ([TEXT], (-1, -1)),
    "at the end": ([TEXT, UsageReported(7, 3)], (7, 3)),
    "at the start and at the end": ([UsageReported(7, 1), TEXT, UsageReported(-1, 3)], (7, 3)),
    "a later count replaces": ([UsageReported(7, 1), UsageReported(9, 0)], (9, 0)),
}


@pytest.mark.parametrize(("events", "tokens"), USAGES.values(), ids=USAGES)
def test_the_last_count_of_tokens_counts(events: list[StreamEvent], tokens: tuple[int, int]) -> None:
    assembler = Assembler()
    for event in events:
        assembler.receive(event)
    assert (assembler.input_tokens, assembler.output_tokens) == tokens


REPEATED: dict[str, bool] = {
    "{}": False,
    '{"a":1,"b":1}': False,
    '{"a":{"a":{"a":1}}}': False,
    '[{"a":1},{"a":1}]': False,
    '{"a":1,"a":1}': True,
    '{"a":{"b":1,"b":[]}}': True,
    '{"a":1,"\\u0061":2}': True,
    '["a","a"]': False,
    '{"n":' + "9" * 10_000 + "}": False,
}


@pytest.mark.parametrize(("text", "repeated"), REPEATED.items(), ids=lambda value: str(value)[:20])
def test_a_key_that_stands_twice_is_seen(text: str, repeated: bool) -> None:
    assert repeats_key(text) is repeated


ARGUMENTS: dict[str, Reason | None] = {
    "{}": None,
    '{"a": [1, 2.5e3, "x", null, true]}': None,
    " 7 ": None,
    '"\\ud83d"': None,  # half a surrogate pair: JSON by its grammar
    "1e999": None,
    '{"n": ' + "9" * 10_000 + "}": None,
    '{"a":': UNCLOSED,
    '{"a":"Ro': UNCLOSED,
    '{"a":1': UNCLOSED,
    "[": UNCLOSED,
    "tru": UNCLOSED,
    "{a}": INVALID,
    "{'a': 1}": INVALID,
    '{"a":1}}': INVALID,
    '{"a":1}{"b":2}': INVALID,
    '{"a":1,}': INVALID,
    "NaN": INVALID,
    "hello": INVALID,
    "[" * 100_000: INVALID,
    "[" * 100_000 + "]" * 100_000: INVALID,
}


@pytest.mark.parametrize(("text", "expected"), ARGUMENTS.items(), ids=lambda value: str(value)[:20])
def test_arguments_are_whole_unclosed_or_invalid(text: str, expected: Reason | None) -> None:
    assert arguments_fault(text) is expected


def documents() -> st.SearchStrategy[object]:
    leaves = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text()
    )
    return st.recursive(
        leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
    )


@given(documents(), st.booleans())
def test_every_object_is_whole_and_no_beginning_of_one_is(document: object, ascii_only: bool) -> None:
    text = json.dumps({"x": document}, ensure_ascii=ascii_only, allow_nan=False)
    assert arguments_fault(text) is None
    for end in range(1, len(text), max(1, len(text) // 10)):
        assert arguments_fault(text[:end]) is not None, text[:end]


@given(st.text())
def test_no_text_breaks_the_check(text: str) -> None:
    arguments_fault(text)


EVENTS: list[StreamEvent] = [
    TEXT,
    STOP,
    FOR_TOOLS,
    LENGTH,
    FILTER,
    OTHER,
    END,
    ProviderFailed("x"),
    FrameUnreadable("x"),
]


@given(
    st.lists(st.sampled_from(EVENTS) | st.sampled_from(["open", "delta", "close"])),
    st.sampled_from(list(Ending)),
)
def test_calls_run_only_in_a_committed_turn_that_ended(
    script: list[StreamEvent | str], ending: Ending
) -> None:
    for closes_calls, choices in product((True, False), (1, 2)):
        assembler = Assembler(choices, closes_calls)
        opened = 0
        for step in script:
            if step == "open":
                assembler.receive(CallOpened(opened, 0, f"c{opened}", "f"))
                opened += 1
            elif isinstance(step, str):
                if opened:
                    event = CallDelta(opened - 1, "{}") if step == "delta" else CallClosed(opened - 1)
                    assembler.receive(event)
            else:
                assembler.receive(step)
        verdict = assembler.close(ending)
        assert not verdict.calls or (verdict.turn is COMMITTED and assembler.ended)
        assert verdict.turn is not COMMITTED or len(verdict.calls) == opened
        assert verdict.turn is COMMITTED or verdict.reason is not None
