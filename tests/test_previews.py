"""What was retracted is recognised when it comes back, and what may be there is not."""

import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.adapters.registry import CHAT, DIALECTS, MESSAGES
from turngate.validators.checks import Reason
from turngate.validators.previews import (
    BORDERS_MAX,
    CHARACTERS_MAX,
    CHARACTERS_MIN,
    Hit,
    Marks,
    Preview,
    Said,
)

Json = dict[str, Any]
PIECES: Final = ["I will ", "look up ", "the weather ", "in Oslo ", "for you ", "right away. "]
WHOLE: Final = "".join(PIECES)
KEY: Final = b"k" * 32
CALL: Final = ("toolu_01AbCdEfGh", "get_weather")
LEAKED, PART = (
    Hit(Reason.PREVIEW_LEAKED, "/messages/1", "op-1", "stream.truncated", whole) for whole in (True, False)
)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def shown(*pieces: str) -> Preview:
    preview = Preview()
    for piece in pieces:
        preview.add(piece)
    return preview


def marks(**bounds: Any) -> Marks:
    store = Marks(Clock(), KEY, **bounds)
    store.add("owner", "op-1", "stream.truncated", shown(*PIECES), [CALL])
    return store


def said(text: str, *ids: str) -> list[Said]:
    return [Said("/messages/1", text, [(f"/messages/1/{index}", id_) for index, id_ in enumerate(ids)])]


RETURNS: dict[str, tuple[list[Said], list[Hit]]] = {
    "all of it": (said(WHOLE), [LEAKED]),
    "all of it, trimmed": (said(WHOLE.strip()), [LEAKED]),
    "all of it, with a line end": (said(f"\n{WHOLE}\n"), [LEAKED]),
    "what the app had at some moment": (said("".join(PIECES[:4])), [PART]),
    "that, trimmed": (said("".join(PIECES[:4]).strip()), [PART]),
    "too little to say": (said("".join(PIECES[:2])), []),
    "a beginning that ends inside a delta": (said(WHOLE[:40]), []),
    "a longer text that begins like it": (said(WHOLE + "It rains."), []),
    "another text": (said("Nothing of this has been said before by anybody."), []),
    "nothing": ([], []),
    "a call that never left": (
        said("", CALL[0]),
        [Hit(Reason.CALL_UNCOMMITTED, "/messages/1/0", "op-1", "stream.truncated", True)],
    ),
    "another call": (said("", "toolu_other_id_1"), []),
    "text and call": (
        said(WHOLE, "x", CALL[0]),
        [LEAKED, Hit(Reason.CALL_UNCOMMITTED, "/messages/1/1", "op-1", "stream.truncated", True)],
    ),
}


@pytest.mark.parametrize(("history", "hits"), RETURNS.values(), ids=RETURNS)
def test_what_was_retracted_is_recognised(history: list[Said], hits: list[Hit]) -> None:
    assert marks().find("owner", history) == hits


def test_another_owner_is_told_nothing() -> None:
    store = marks()
    assert "owner" in store
    assert "other" not in store
    assert store.find("other", said(WHOLE, CALL[0])) == []


def test_what_a_later_turn_commits_is_history_in_its_own_right() -> None:
    store = marks()
    store.committed("other", WHOLE, [CALL[0]])
    assert store.find("owner", said(WHOLE)) == [LEAKED]
    store.committed("owner", WHOLE, [CALL[0]])
    assert store.find("owner", said(WHOLE, CALL[0])) == []
    assert store.find("owner", said("".join(PIECES[:4]))) == [PART]


def test_a_turn_with_nothing_left_to_recognise_is_forgotten() -> None:
    store = Marks(Clock(), KEY)
    store.add("owner", "op-1", "stream.truncated", shown(WHOLE), [CALL])
    store.committed("owner", WHOLE)
    assert "owner" in store
    store.committed("owner", "", [CALL[0]])
    assert "owner" not in store
    assert len(store) == 0


NOT_MARKED: dict[str, tuple[Preview | None, list[tuple[str, str]]]] = {
    "nothing was shown": (None, []),
    "a short text": (shown("x" * (CHARACTERS_MIN - 1)), []),
    "blanks": (shown(" " * 100), []),
    "a counted id": (None, [("call_0", "f")]),
    "an id made from the tool's name": (None, [("functions.get_weather:0", "get_weather")]),
}


@pytest.mark.parametrize(("preview", "calls"), NOT_MARKED.values(), ids=NOT_MARKED)
def test_what_any_other_turn_may_say_too_is_not_kept(
    preview: Preview | None, calls: list[tuple[str, str]]
) -> None:
    store = Marks(Clock(), KEY)
    store.add("owner", "op-1", "stream.truncated", preview, calls)
    assert len(store) == 0


def test_the_latest_turn_that_said_so_is_named() -> None:
    store = marks()
    store.add("owner", "op-2", "stream.stalled", shown(WHOLE))
    assert [hit.operation for hit in store.find("owner", said(WHOLE))] == ["op-2"]


def test_only_so_many_turns_are_kept_the_latest() -> None:
    store = marks(turns_max=3)
    for number in range(2, 6):
        store.add("owner", f"op-{number}", "stream.truncated", shown(f"{WHOLE}{number}"))
    assert len(store) == 3
    assert store.find("owner", said(WHOLE)) == []
    assert [hit.operation for hit in store.find("owner", said(f"{WHOLE}5"))] == ["op-5"]


def test_a_turn_is_forgotten_when_it_is_old() -> None:
    clock = Clock()
    store = Marks(clock, KEY, age_s_max=60.0)
    store.add("owner", "op-1", "stream.truncated", shown(*PIECES))
    clock.now_s = 60.0
    assert store.find("owner", said(WHOLE)) == [LEAKED]
    clock.now_s = 61.0
    assert store.find("owner", said(WHOLE)) == []
    assert "owner" not in store


def test_no_text_and_no_id_can_be_read_in_the_store() -> None:
    told = repr(marks())
    assert "Oslo" not in told
    assert CALL[0] not in told
    assert repr(KEY) not in told


def test_by_another_key_all_digests_are_others() -> None:
    texts = []
    for key in (KEY, b"l" * 32):
        store = Marks(Clock(), key)
        store.add("owner", "op-1", "stream.truncated", shown(*PIECES))
        texts.append(set(store._turns["owner", "op-1"].texts))
    assert texts[0]
    assert not texts[0] & texts[1]


def test_of_a_text_beyond_the_bound_only_beginnings_are_recognised() -> None:
    pieces = [f"{number:09}\n" for number in range(CHARACTERS_MAX // 10 + 1000)]
    preview = shown(*pieces)
    assert not preview.whole
    assert CHARACTERS_MAX <= len(preview.text()) < CHARACTERS_MAX + 1000
    store = Marks(Clock(), KEY)
    store.add("owner", "op-1", "stream.truncated", preview)
    assert store.find("owner", said("".join(pieces[:100]))) == [PART]
    assert store.find("owner", said("".join(pieces[: BORDERS_MAX - 1]))) == [PART]
    assert store.find("owner", said("".join(pieces[: BORDERS_MAX + 9]))) == []
    assert store.find("owner", said("".join(pieces))) == []


@given(st.lists(st.text(), max_size=200))
def test_every_beginning_that_the_app_had_is_recognised_and_the_whole_as_whole(pieces: list[str]) -> None:
    store = Marks(Clock(), KEY)
    store.add("owner", "op-1", "stream.truncated", shown(*pieces))
    whole = "".join(pieces).strip()
    for end in range(1, len(pieces) + 1):
        text = "".join(pieces[:end])
        long_enough = len(text.strip()) >= CHARACTERS_MIN
        hits = store.find("owner", said(text))
        assert [hit.whole for hit in hits] == ([text.strip() == whole] if long_enough else [])


# -- what a request says the assistant said ---------------------------------------------------------------------------

HISTORIES: dict[str, tuple[str, list[Json], list[Said]]] = {
    "chat": (
        CHAT.api,
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": [{"id": "x"}, {"id": "y"}]},
        ],
        [Said("/messages/1", "b", [("/messages/1/tool_calls/0", "x"), ("/messages/1/tool_calls/1", "y")])],
    ),
    "chat, parts": (
        CHAT.api,
        [{"role": "assistant", "content": [{"type": "text", "text": "a"}, "b", {"type": "refusal"}]}],
        [Said("/messages/0", "ab", [])],
    ),
    "chat, null": (CHAT.api, [{"role": "assistant", "content": None}], [Said("/messages/0", "", [])]),
    "chat, no messages": (CHAT.api, [1], []),  # type: ignore[list-item]
    "messages": (
        MESSAGES.api,
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "x", "name": "f", "input": {}},
                    {"type": "text", "text": "b"},
                ],
            }
        ],
        [Said("/messages/0", "ab", [("/messages/0/content/2", "x")])],
    ),
    "messages, a string": (MESSAGES.api, [{"role": "assistant", "content": "a"}], [Said("/messages/0", "a")]),
    "messages, no messages": (MESSAGES.api, ["x"], []),  # type: ignore[list-item]
}


@pytest.mark.parametrize(("api", "messages", "expected"), HISTORIES.values(), ids=HISTORIES)
def test_a_request_says_what_the_assistant_said(api: str, messages: list[Json], expected: list[Said]) -> None:
    found = DIALECTS[api].said(json.dumps({"messages": messages}).encode())
    assert [(one.at, one.text, list(one.calls)) for one in found] == [
        (one.at, one.text, list(one.calls)) for one in expected
    ]
