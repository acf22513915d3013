"""Tool edges over generated histories: every single illegal edit is found in its place, every legal one is left alone.

The generator knows nothing of the rules. It writes legal histories as a flat list of items (a user's text, an assistant
turn with its calls, one result), and each dialect's renderer says where every item came to stand.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngate.adapters.levels import levels
from turngate.adapters.registry import DIALECTS
from turngate.validators.graph import Kind, MessageSequence, pair
from turngate.validators.rules import Finding, Judgement, Level, Reason, Verdict, judge

CHAT, MESSAGES = "openai.chat", "anthropic.messages"
SERVERS = {CHAT: "openai", MESSAGES: "anthropic"}
MESSAGES_MAX = 300


@dataclass(frozen=True)
class Item:
    """A user's text (no calls, no id), an assistant turn, or one result."""

    role: str
    calls: tuple[str, ...] = ()
    id: str = ""


USER = Item("user")
At = dict[tuple[int, str], str]
"""Pointer of (item's index, call id), or of (item's index, "") for the item itself."""


def history(rng: random.Random, length: int) -> list[Item]:
    """A legal history of about this many items. Ids come back in later turns now and then."""
    items: list[Item] = []
    used: list[str] = []
    while len(items) < length:
        items += [USER] * rng.choice((0, 1, 1, 1, 2))
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            fresh = [f"call_{len(used) + n}" for n in range(rng.choice((1, 1, 2, 3, 5)))]
            ids = [rng.choice(used) if used and rng.random() < 0.1 else id_ for id_ in fresh]
            ids = list(dict.fromkeys(ids))
            used += ids
            items.append(Item("assistant", tuple(ids)))
            rng.shuffle(ids)
            items += [Item("result", id=id_) for id_ in ids]
        if rng.random() < 0.7:
            items += [Item("assistant")] * rng.choice((1, 1, 2))
    return items[:length] if items[length - 1].role == "user" else items


def render_chat(items: list[Item], rng: random.Random) -> tuple[list[object], At]:
    messages: list[object] = []
    at: At = {}
    for index, item in enumerate(items):
        where = f"/messages/{len(messages)}"
        at[index, ""] = where
        if item.role == "result":
            messages.append({"role": "tool", "tool_call_id": item.id, "content": "ok"})
        elif item.calls:
            at |= {(index, id_): f"{where}/tool_calls/{n}" for n, id_ in enumerate(item.calls)}
            function = {"name": "f", "arguments": "{}"}
            calls = [{"id": id_, "type": "function", "function": function} for id_ in item.calls]
            content = rng.choice((None, "thinking aloud", [{"type": "text", "text": "so"}]))
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        else:
            messages.append(
                {"role": item.role, "content": rng.choice(("hm", [{"type": "text", "text": "hm"}]))}
            )
    return messages, at


def render_messages(items: list[Item], rng: random.Random) -> tuple[list[object], At]:
    """Neighbours of one role are put into one message or into several, as the dice fall."""
    messages: list[tuple[str, list[object]]] = []
    at: At = {}
    for index, item in enumerate(items):
        role = "user" if item.role == "result" else item.role
        if not messages or messages[-1][0] != role or rng.random() < 0.5:
            messages.append((role, []))
        content = messages[-1][1]
        where = f"/messages/{len(messages) - 1}/content"
        if item.role == "result":
            at[index, ""] = f"{where}/{len(content)}"
            content.append({"type": "tool_result", "tool_use_id": item.id, "content": "ok"})
            continue
        if not item.calls or rng.random() < 0.5:
            content.append({"type": "text", "text": "hm"})
        for id_ in item.calls:
            at[index, id_] = f"{where}/{len(content)}"
            content.append({"type": "tool_use", "id": id_, "name": "f", "input": {}})
    return [{"role": role, "content": content} for role, content in messages], at


RENDER = {CHAT: render_chat, MESSAGES: render_messages}


def parsed(api: str, items: list[Item], rng: random.Random) -> tuple[MessageSequence, At]:
    messages, at = RENDER[api](items, rng)
    body = json.dumps({"model": "m", "messages": messages}).encode()
    return DIALECTS[api].parse_request(body), at


def judged(api: str, items: list[Item], rng: random.Random) -> tuple[Judgement, At]:
    sequence, at = parsed(api, items, rng)
    return judge(sequence, levels(api, SERVERS[api])), at


@dataclass(frozen=True)
class Edited:
    """A history after one edit, and what must be said about it: `at` as (item, call id), and what follows the pointer."""

    items: list[Item]
    reason: Reason
    at: tuple[int, str]
    at_more: str = ""
    waiting: bool = False


def hard(judgement: Judgement) -> list[Finding]:
    """What the provider refuses. Who speaks first and last and ids that come back are soft, and not these tests' matter."""
    return [finding for finding in judgement.findings if finding.level is Level.HARD]


def results_of_unique_calls(items: list[Item]) -> list[int]:
    """Results whose id occurs once in the whole history, so that an edit can mean only one thing."""
    count = Counter(item.id for item in items if item.role == "result")
    return [index for index, item in enumerate(items) if item.role == "result" and count[item.id] == 1]


def caller(items: list[Item], result: int) -> int:
    """The assistant item whose run this result is in."""
    return next(index for index in range(result, -1, -1) if items[index].role == "assistant")


def run_end(items: list[Item], result: int) -> int:
    """The first item behind the run."""
    return next((i for i in range(result, len(items)) if items[i].role != "result"), len(items))


def drop_a_result(items: list[Item], result: int, rng: random.Random) -> Edited:
    turn = caller(items, result)
    last = not any(item.role == "assistant" for item in items[result:])
    rest = items[:result] + items[result + 1 :]
    return Edited(rest, Reason.CALL_UNANSWERED, (turn, items[result].id), waiting=last)


def drop_a_call(items: list[Item], result: int, rng: random.Random) -> Edited:
    turn = caller(items, result)
    calls = tuple(id_ for id_ in items[turn].calls if id_ != items[result].id)
    return Edited(
        [*items[:turn], replace(items[turn], calls=calls), *items[turn + 1 :]],
        Reason.RESULT_ORPHAN,
        (result, ""),
    )


def duplicate_a_result(items: list[Item], result: int, rng: random.Random) -> Edited:
    copy = rng.randint(result + 1, run_end(items, result))
    return Edited([*items[:copy], items[result], *items[copy:]], Reason.RESULT_DUPLICATE, (copy, ""))


def move_a_result_past_the_next_message(items: list[Item], result: int, rng: random.Random) -> Edited:
    end = run_end(items, result)
    behind = [*items[:end], *items[end : end + 1], *items[end + 1 :]] if end < len(items) else [*items, USER]
    moved = [*behind[:result], *behind[result + 1 : end + 1], items[result], *behind[end + 1 :]]
    return Edited(moved, Reason.RESULT_MISPLACED, (end, ""))


def rename_a_result(items: list[Item], result: int, rng: random.Random) -> Edited:
    wrong = Item("result", id="call_nobody_made")
    edited = [*items[:result], wrong, *items[result + 1 :]]
    return Edited(edited, Reason.RESULT_MISMATCH, (result, ""), at_more="id")


def put_a_user_into_the_run(items: list[Item], result: int, rng: random.Random) -> Edited:
    return Edited([*items[:result], USER, *items[result:]], Reason.RESULT_MISPLACED, (result + 1, ""))


ILLEGAL: list[Callable[[list[Item], int, random.Random], Edited]] = [
    drop_a_result,
    drop_a_call,
    duplicate_a_result,
    move_a_result_past_the_next_message,
    rename_a_result,
    put_a_user_into_the_run,
]


def permute_the_run(items: list[Item], result: int, rng: random.Random) -> list[Item]:
    start, end = caller(items, result) + 1, run_end(items, result)
    return items[:start] + rng.sample(items[start:end], end - start) + items[end:]


def append_text_to_the_run(items: list[Item], result: int, rng: random.Random) -> list[Item]:
    end = run_end(items, result)
    return [*items[:end], USER, *items[end:]]


def let_users_follow_each_other(items: list[Item], result: int, rng: random.Random) -> list[Item]:
    end = run_end(items, result)
    return [*items[:end], USER, USER, USER, *items[end:]]


def answer_with_an_old_id_again(items: list[Item], result: int, rng: random.Random) -> list[Item]:
    """A whole later turn that reuses the id of an earlier one."""
    end = run_end(items, result)
    return [*items[:end], Item("assistant", (items[result].id,)), items[result], *items[end:]]


LEGAL = [permute_the_run, append_text_to_the_run, let_users_follow_each_other, answer_with_an_old_id_again]


def would_join_turns(items: list[Item], result: int) -> bool:
    """Without this result two assistant turns are neighbours, which Messages reads as one turn."""
    end = run_end(items, result)
    return (
        caller(items, result) == result - 1
        and end == result + 1
        and items[end:] != []
        and (items[end].role == "assistant")
    )


LENGTHS = st.integers(1, 40) | st.integers(200, MESSAGES_MAX)
SEEDS = st.integers(0, 2**32)
BOTH = pytest.mark.parametrize("api", [CHAT, MESSAGES])


@BOTH
@given(seed=SEEDS, length=LENGTHS)
@settings(max_examples=60, deadline=None)
def test_a_legal_history_is_legal_and_every_call_has_its_own_result(api: str, seed: int, length: int) -> None:
    rng = random.Random(seed)
    items = history(rng, length)
    sequence, at = parsed(api, items, rng)
    assert not hard(judge(sequence, levels(api, SERVERS[api])))
    edges = {edge.call.at: edge.result.at for edge in pair(sequence).edges if edge.result is not None}
    runs = [(index, caller(items, index)) for index, item in enumerate(items) if item.role == "result"]
    assert edges == {at[turn, items[index].id]: at[index, ""] for index, turn in runs}
    assert sum(block.kind is Kind.TOOL_CALL for block in sequence.blocks) == len(edges)


@BOTH
@pytest.mark.parametrize("edit", ILLEGAL, ids=lambda edit: edit.__name__)
@given(seed=SEEDS, length=LENGTHS)
@settings(max_examples=50, deadline=None)
def test_each_illegal_edit_is_found_where_it_was_made(
    api: str, edit: Callable[[list[Item], int, random.Random], Edited], seed: int, length: int
) -> None:
    rng = random.Random(seed)
    items = history(rng, length)
    targets = results_of_unique_calls(items)
    if not targets:
        items += [Item("assistant", ("a", "b")), Item("result", id="b"), Item("result", id="a")]
        targets = results_of_unique_calls(items)
    target = rng.choice(targets)
    if api == MESSAGES and would_join_turns(items, target):
        items = append_text_to_the_run(items, target, rng)
    edited = edit(items, target, rng)
    judgement, at = judged(api, edited.items, rng)
    key = {CHAT: "/tool_call_id", MESSAGES: "/tool_use_id"}[api] if edited.at_more else ""
    first = judgement.findings[0]
    assert (first.reason, first.at) == (edited.reason, at[edited.at] + key)
    assert judgement.verdict is (Verdict.WAITING if edited.waiting else Verdict.ILLEGAL)
    blamed = {finding.reason for finding in hard(judgement)}
    assert blamed <= {edited.reason, Reason.CALL_UNANSWERED}


@BOTH
@pytest.mark.parametrize("edit", LEGAL, ids=lambda edit: edit.__name__)
@given(seed=SEEDS, length=LENGTHS)
@settings(max_examples=40, deadline=None)
def test_each_legal_edit_is_left_alone(
    api: str, edit: Callable[[list[Item], int, random.Random], list[Item]], seed: int, length: int
) -> None:
    rng = random.Random(seed)
    items = history(rng, length)
    results = [index for index, item in enumerate(items) if item.role == "result"]
    if not results:
        items += [Item("assistant", ("a",)), Item("result", id="a")]
        results = [len(items) - 1]
    judgement, _ = judged(api, edit(items, rng.choice(results), rng), rng)
    assert (judgement.verdict, hard(judgement)) == (Verdict.LEGAL, [])


# -- edits of a single message ----------------------------------------------------------------------------------------

Edit = Callable[[list[Any], int], str]
"""Changes the message at this place; returns what follows the pointer to it."""


def of_role(role: str, *, calls: bool | None = None) -> Callable[[Any], bool]:
    def fits(message: Any) -> bool:
        asks = "tool_calls" in message or any(
            isinstance(b, dict) and b["type"] == "tool_use" for b in message["content"] or ()
        )
        return message["role"] == role and (calls is None or asks is calls)

    return fits


def put(key: str, value: object, more: str = "") -> Edit:
    def edit(messages: list[Any], place: int) -> str:
        messages[place] = messages[place] | {key: value}
        return f"/{key}{more}"

    return edit


def put_into_call(key: str, value: object) -> Edit:
    def edit(messages: list[Any], place: int) -> str:
        call = messages[place]["tool_calls"][0]
        call["function"] = call["function"] | {key: value}
        return f"/tool_calls/0/function/{key}"

    return edit


def drop(key: str) -> Edit:
    def edit(messages: list[Any], place: int) -> str:
        messages[place] = {k: v for k, v in messages[place].items() if k != key}
        return ""

    return edit


def put_block_last(block: object) -> Edit:
    def edit(messages: list[Any], place: int) -> str:
        messages[place]["content"] = [*messages[place]["content"], block]
        return f"/content/{len(messages[place]['content']) - 1}"

    return edit


TEXT_BLOCK = {"type": "text", "text": "hm"}
SINGLE_EDITS: dict[str, tuple[str, Callable[[Any], bool], Edit, Reason | None]] = {
    "null for a user": (CHAT, of_role("user"), put("content", None), Reason.BLOCK_EMPTY),
    "null for a result": (CHAT, of_role("tool"), put("content", None), Reason.BLOCK_EMPTY),
    "an empty list of calls": (
        CHAT,
        of_role("assistant", calls=False),
        put("tool_calls", []),
        Reason.BLOCK_EMPTY,
    ),
    "no id of the call": (CHAT, of_role("tool"), drop("tool_call_id"), Reason.RESULT_BAD_SHAPE),
    "a role of nobody": (CHAT, of_role("user"), put("role", "human"), Reason.ROLE_UNKNOWN),
    "a name that is empty": (
        CHAT,
        of_role("assistant", calls=True),
        put_into_call("name", ""),
        Reason.CALL_BAD_NAME,
    ),
    "cut arguments": (CHAT, of_role("assistant", calls=True), put_into_call("arguments", '{"a'), None),
    "an empty text for a user": (CHAT, of_role("user"), put("content", ""), None),
    "an empty block": (
        MESSAGES,
        of_role("user"),
        put_block_last({"type": "text", "text": ""}),
        Reason.BLOCK_EMPTY,
    ),
    "thinking without signature": (
        MESSAGES,
        of_role("assistant"),
        put_block_last({"type": "thinking", "thinking": "so"}),
        Reason.SIGNATURE_MISSING,
    ),
    "a result in the assistant's turn": (
        MESSAGES,
        of_role("assistant"),
        put_block_last({"type": "tool_result", "tool_use_id": "call_0"}),
        Reason.BLOCK_WRONG_ROLE,
    ),
    "an empty user": (MESSAGES, of_role("user"), put("content", []), Reason.BLOCK_EMPTY),
    "text behind all else": (MESSAGES, of_role("assistant"), put_block_last(TEXT_BLOCK), None),
}
"""(api, which messages, edit, the reason it must be refused for or None where it stays legal)."""


@pytest.mark.parametrize(("api", "fits", "edit", "reason"), SINGLE_EDITS.values(), ids=SINGLE_EDITS)
@given(seed=SEEDS, length=LENGTHS)
@settings(max_examples=40, deadline=None)
def test_each_edit_of_one_message_is_found_where_it_was_made(
    api: str, fits: Callable[[Any], bool], edit: Edit, reason: Reason | None, seed: int, length: int
) -> None:
    rng = random.Random(seed)
    messages, _ = RENDER[api]([*history(rng, length), USER], rng)
    places = [place for place, message in enumerate(messages) if fits(message)]
    if not places:
        return
    place = rng.choice(places)
    at = f"/messages/{place}{edit(messages, place)}"
    body = json.dumps({"model": "m", "messages": messages}).encode()
    judgement = judge(DIALECTS[api].parse_request(body), levels(api, SERVERS[api]))
    if reason is None:
        assert not hard(judgement)
        return
    assert judgement.verdict is Verdict.ILLEGAL
    # What stood behind a message that was emptied may have lost its place besides.
    assert (reason, at) in [(finding.reason, finding.at) for finding in hard(judgement)]
