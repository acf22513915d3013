"""A remembered beginning changes what a judgement costs and nothing else: verdict, findings, digest.

Conversations grow, fork and are edited at random, with every kind of thing in them that a rule looks back for; each
body goes to a Judge that remembers, and is judged afresh beside it.
"""

import json
import random
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngate.adapters.dialect import NO_CONTEXT, Ambiguous, Dialect, RequestContext, Undecodable
from turngate.adapters.levels import SERVERS, levels
from turngate.adapters.registry import DIALECTS
from turngate.proxy import judging
from turngate.proxy.judging import Judge
from turngate.validators.checks import Profile
from turngate.validators.rules import judge

Json = dict[str, Any]
CHAT, MESSAGES = "openai.chat", "anthropic.messages"

CONTEXTS = (NO_CONTEXT, RequestContext("2026-10-21", frozenset()), RequestContext(window=40))


@pytest.fixture(autouse=True)
def everything_is_worth_remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "WORTH_BYTES", 0)


def new_id(rng: random.Random, api: str) -> str:
    """Ids come back now and then, and some are of a form that one server or another refuses."""
    return rng.choice(("a", "b", "c", f"call_{rng.randrange(10**6)}", f"{rng.randrange(10**9):09}", "x|y"))


def marked(rng: random.Random, block: Json) -> Json:
    return block | ({"cache_control": {"type": "ephemeral"}} if rng.random() < 0.2 else {})


def clean_turn(rng: random.Random, api: str, number: int) -> list[Json]:
    """A turn that nobody has anything against: a call and its result, or words and a user's next ones."""
    id_ = f"{number:09}"
    if api == CHAT:
        if rng.random() < 0.3:
            return [{"role": "assistant", "content": "fine"}, {"role": "user", "content": "more"}]
        function = {"name": "f", "arguments": "{}"}
        asked: Json = {
            "role": "assistant",
            "content": "so",
            "tool_calls": [{"id": id_, "type": "function", "function": function}],
        }
        if rng.random() < 0.8:
            asked["reasoning_content"] = "because"
        return [asked, {"role": "tool", "tool_call_id": id_, "content": "ok"}]
    text = {"type": "text", "text": "hm"}
    if rng.random() < 0.3:
        return [
            {"role": "assistant", "content": [marked(rng, text)]},
            {"role": "user", "content": [marked(rng, text)]},
        ]
    calls: list[Json] = [{"type": "tool_use", "id": id_, "name": "f", "input": {}}]
    result = marked(rng, {"type": "tool_result", "tool_use_id": id_, "content": "ok"})
    turn: list[Json] = [{"role": "assistant", "content": calls}, {"role": "user", "content": [result]}]
    if rng.random() < 0.25:  # a mixed turn; what the server found comes with the next one, or never
        use = {"type": "server_tool_use", "id": f"srvtoolu_{number}", "name": "web_search", "input": {}}
        calls.append(use)
        found = {"type": "web_search_tool_result", "tool_use_id": use["id"], "content": []}
        behind: list[Json] = [found, text] if rng.random() < 0.7 else [text]
        turn += [{"role": "assistant", "content": behind}, {"role": "user", "content": [text]}]
    return turn


def chat_turn(rng: random.Random) -> list[Json]:
    match rng.randrange(9):
        case 0:
            return [{"role": rng.choice(("system", "developer", "user")), "content": "so"}]
        case 1:
            return [{"role": "assistant", "content": rng.choice(("fine", "", None))}]
        case 2:
            return [{"role": "user", "content": rng.choice(("", "hm", [{"type": "text", "text": "t"}]))}]
        case _:
            ids = [new_id(rng, CHAT) for _ in range(rng.choice((1, 1, 2)))]
            arguments = rng.choice(("{}", "{}", "{}", '{"a', "null"))
            function = {"name": "f", "arguments": arguments}
            asked: Json = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": id_, "type": "function", "function": function} for id_ in ids],
            }
            if rng.random() < 0.7:
                asked["reasoning_content"] = rng.choice(("because", "because", ""))
            return [asked, *({"role": "tool", "tool_call_id": id_, "content": "ok"} for id_ in ids)]


def messages_turn(rng: random.Random) -> list[Json]:
    text = marked(rng, {"type": "text", "text": "hm"})
    match rng.randrange(12):
        case 0:
            return [{"role": "system", "content": "so"}]
        case 1:
            contents: list[object] = [[], "", [text]]
            return [{"role": "assistant", "content": rng.choice(contents)}]
        case 2:
            return [
                {"role": "user", "content": rng.choice(([text], "hm"))},
                {"role": "system", "content": "s"},
            ]
        case 3:
            use = {
                "type": "server_tool_use",
                "id": f"srvtoolu_{rng.randrange(3)}",
                "name": "web_search",
                "input": {},
            }
            found = {"type": "web_search_tool_result", "tool_use_id": use["id"], "content": []}
            shapes: list[list[Json]] = [[use, found, text], [use], [found, text]]
            return [{"role": "assistant", "content": rng.choice(shapes)}]
        case 4:
            return [{"role": "assistant", "content": [{"type": "compaction", "content": "short"}, text]}]
        case 5 | 6:
            return [{"role": "user", "content": [text]}]
        case _:
            ids = [new_id(rng, MESSAGES) for _ in range(rng.choice((1, 1, 2)))]
            thinking = {"type": "thinking", "thinking": "so", "signature": "c2ln"}
            calls = [marked(rng, {"type": "tool_use", "id": id_, "name": "f", "input": {}}) for id_ in ids]
            if rng.random() < 0.2:
                calls.append(
                    {"type": "server_tool_use", "id": "srvtoolu_d", "name": "web_search", "input": {}}
                )
            results = [{"type": "tool_result", "tool_use_id": id_, "content": "ok"} for id_ in ids]
            return [
                {"role": "assistant", "content": [*([thinking] if rng.random() < 0.5 else []), *calls]},
                {"role": "user", "content": results},
            ]


TURN = {CHAT: chat_turn, MESSAGES: messages_turn}
TOOLS: dict[str, list[Json]] = {
    CHAT: [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    MESSAGES: [
        {"name": "f", "input_schema": {"type": "object"}},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
}


def beside(rng: random.Random, api: str) -> Json:
    """What stands beside the messages; some of it changes what earlier messages mean."""
    more: Json = {"tools": TOOLS[api]}
    if rng.random() < 0.2:
        more["thinking"] = {"type": rng.choice(("enabled", "disabled"))}
    if rng.random() < 0.1:
        del more["tools"]
    if rng.random() < 0.1:
        more["tools"] = [{**tool, "cache_control": {"type": "ephemeral"}} for tool in TOOLS[api]]
    return more


def body_of(rng: random.Random, messages: list[Json], more: Json, model: str) -> bytes:
    """Tools stand before or behind the messages, text is compact or spaced: the same all through a conversation."""
    fields: Json = {"model": model, "messages": messages, **more}
    if rng.random() < 0.05:
        fields = dict(reversed(fields.items()))
    return json.dumps(fields, separators=(",", ":")).encode()


def conversation(api: str, rng: random.Random) -> list[bytes]:
    """The bodies of one agent in order: mostly growing, sometimes forked, cut or edited in the middle."""
    messages: list[Json] = [{"role": "user", "content": "go"}]
    more, model = beside(rng, api), rng.choice(("m", "deepseek-v4-flash", "gpt-4o", "claude-opus-4-6"))
    bodies = []
    oddness = rng.choice((0.0, 0.0, 0.1, 0.3))
    for step in range(rng.randint(2, 9)):
        for part in range(rng.randint(1, 2)):
            odd = step > 1 and rng.random() < oddness
            # Numbers come back now and then, some steps later.
            number = 10 * step + part if rng.random() < 0.9 else rng.randrange(20)
            messages = [*messages, *(TURN[api](rng) if odd else clean_turn(rng, api, number))]
        if rng.random() < 0.3:  # as clients do when a turn is under way
            bodies.append(body_of(rng, messages[:-1], more, model))
        match rng.randrange(40):
            case 0:
                messages = messages[: rng.randint(1, len(messages))]
            case 1:
                index = rng.randrange(len(messages))
                messages = [*messages[:index], *messages[index + 1 :]]
            case 2:
                index = rng.randrange(len(messages))
                messages = [*messages[:index], *TURN[api](rng), *messages[index:]]
            case 3:
                more = beside(rng, api)
        bodies.append(body_of(rng, messages, more, model))
    return bodies


def judged_afresh(
    dialect: Dialect, body: bytes, profile: Profile, context: RequestContext
) -> tuple[object, ...]:
    judgement = judge(dialect.parse_request(body, context), profile)
    return judgement.verdict, judgement.findings, sha256(body).digest()


SERVED = [(api, server) for api, servers in SERVERS.items() for server in (*servers, "unknown")]


@pytest.mark.parametrize(("api", "server"), SERVED)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_a_judge_that_remembers_says_what_a_fresh_one_says(api: str, server: str, seed: int) -> None:
    rng = random.Random(seed)
    remembering, dialect, profile = Judge(), DIALECTS[api], levels(api, server)
    context = rng.choice(CONTEXTS) if rng.random() < 0.3 else NO_CONTEXT
    for body in conversation(api, rng):
        for _ in range(rng.choice((1, 1, 2))):
            judged = remembering.judge(dialect, body, profile, context)
            told = judged.judgement.verdict, judged.judgement.findings, judged.digest
            assert told == judged_afresh(dialect, body, profile, context)


def plain(api: str, turns: int) -> bytes:
    """A legal conversation of so many tool turns."""
    messages: list[Json] = [{"role": "user", "content": "go"}]
    for turn in range(turns):
        if api == CHAT:
            function = {"name": "f", "arguments": "{}"}
            calls = [{"id": f"call_{turn}", "type": "function", "function": function}]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": "ok"})
        else:
            use = {"type": "tool_use", "id": f"call_{turn}", "name": "f", "input": {}}
            messages.append({"role": "assistant", "content": [use]})
            result = {"type": "tool_result", "tool_use_id": f"call_{turn}", "content": "ok"}
            messages.append({"role": "user", "content": [result]})
    return json.dumps({"model": "m", "messages": messages, "tools": TOOLS[api]}).encode()


@pytest.mark.parametrize("api", [CHAT, MESSAGES])
def test_a_growing_conversation_is_read_from_its_last_turn_on(api: str) -> None:
    remembering, profile = Judge(), levels(api, SERVERS[api][0])
    for turns in range(2, 30):
        judged = remembering.judge(DIALECTS[api], plain(api, turns), profile)
        assert judged.sequence.messages == 1 + 2 * turns
        assert judged.sequence.uses_tools
        if turns > 2:
            assert len(judged.sequence.turns) == 4  # the turn that was last, and the new one


def test_a_key_that_comes_a_second_time_behind_the_beginning_is_noticed() -> None:
    remembering, profile = Judge(), levels(CHAT, "openai")
    remembering.judge(DIALECTS[CHAT], plain(CHAT, 3), profile)
    for more in (b',"messages":[]}', b',"m\\u0065ssages":[]}', b',"model":"other"}'):
        with pytest.raises(Ambiguous):
            remembering.judge(DIALECTS[CHAT], plain(CHAT, 4)[:-1] + more, profile)


def test_what_is_cut_behind_the_beginning_is_undecodable() -> None:
    remembering, profile = Judge(), levels(CHAT, "openai")
    whole = plain(CHAT, 3)
    remembering.judge(DIALECTS[CHAT], whole, profile)
    for end in range(len(whole) - 400, len(whole), 7):
        with pytest.raises(Undecodable):
            remembering.judge(DIALECTS[CHAT], whole[:end], profile)


def test_another_servers_rules_are_not_taken_for_this_ones() -> None:
    remembering = Judge()
    body = plain(CHAT, 3)
    assert remembering.judge(DIALECTS[CHAT], body, levels(CHAT, "openai")).judgement.verdict == "legal"
    assert remembering.judge(DIALECTS[CHAT], body, levels(CHAT, "mistral")).judgement.verdict == "illegal"


# -- what the beginning must be asked about, one by one ---------------------------------------------------------------


def verdicts(
    api: str, server: str, *bodies: tuple[list[Json], Json], context: RequestContext = NO_CONTEXT
) -> list[str]:
    """The verdicts of one remembering judge on these bodies in turn, each the same as a fresh one's."""
    remembering, profile = Judge(), levels(api, server)
    found = []
    for messages, more in bodies:
        body = json.dumps({"model": "m", "messages": messages, **more}).encode()
        judged = remembering.judge(DIALECTS[api], body, profile, context)
        assert judged.judgement == judge(DIALECTS[api].parse_request(body, context), profile)
        found.append(str(judged.judgement.verdict))
    return found


def test_thinking_that_is_switched_on_later_bears_on_the_earlier_turns() -> None:
    function = {"name": "f", "arguments": "{}"}
    turn: list[Json] = [
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
    ]
    text: list[Json] = [{"role": "assistant", "content": "hm"}, {"role": "user", "content": "hm"}]
    messages = [{"role": "user", "content": "go"}, *turn, *text]
    off, on = {"thinking": {"type": "disabled"}}, {"thinking": {"type": "enabled"}}
    found = verdicts(
        CHAT, "deepseek", (messages, off), ([*messages, *text], off), ([*messages, *text * 2], on)
    )
    assert found == ["legal", "legal", "illegal"]


SEARCH = {"tools": TOOLS[MESSAGES]}
MIXED: list[Json] = [
    {"role": "user", "content": "go"},
    {
        "role": "assistant",
        "content": [
            {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
            {"type": "tool_use", "id": "a", "name": "f", "input": {}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "ok"}]},
]


def test_a_servers_call_that_was_answered_once_is_missed_when_its_result_is_gone() -> None:
    found = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    text = {"type": "text", "text": "hm"}
    user = {"role": "user", "content": "hm"}
    gone = ([*MIXED, {"role": "assistant", "content": [text]}, user], SEARCH)
    told = [
        verdicts(
            MESSAGES, "anthropic", ([*MIXED, {"role": "assistant", "content": first}, user], SEARCH), gone
        )
        for first in ([found, text], [found])
    ]
    assert told == [["legal", "illegal"]] * 2


def test_a_window_is_counted_over_the_whole() -> None:
    turn: list[Json] = [
        {"role": "assistant", "content": "one two"},
        {"role": "user", "content": "three four"},
    ]
    bodies: list[tuple[list[Json], Json]] = [
        ([{"role": "user", "content": "go"}, *turn * n], {}) for n in range(1, 6)
    ]
    found = verdicts(CHAT, "openai", *bodies, context=RequestContext(window=15))
    assert found == ["legal", "legal", "legal", "illegal", "illegal"]


def test_what_an_older_version_took_is_not_remembered_for_a_newer_one() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
    text: list[Json] = [{"role": "assistant", "content": "hm"}, {"role": "user", "content": "hm"}]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [document]},
        *text[1:],
        *text,
    ]
    remembering, profile, dialect = Judge(), levels(MESSAGES, "anthropic"), DIALECTS[MESSAGES]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    for version, verdict in (("2023-06-01", "legal"), ("2026-10-21", "illegal"), ("2023-06-01", "legal")):
        context = RequestContext(version, frozenset())
        assert remembering.judge(dialect, body, profile, context).judgement.verdict == verdict


@pytest.mark.parametrize("api", [CHAT, MESSAGES])
def test_a_beginning_changed_behind_what_is_looked_at_first_is_read_whole(api: str) -> None:
    dialect, profile = DIALECTS[api], levels(api, SERVERS[api][0])
    body = plain(api, 40)
    name = b"tool_call_id" if api == CHAT else b"tool_use_id"
    changed = body.replace(b'"%s": "call_30"' % name, b'"%s": "call_99"' % name)
    assert changed != body
    warm = Judge()
    warm.judge(dialect, body, profile)
    judged = warm.judge(dialect, changed, profile)
    assert judged.judgement == judge(dialect.parse_request(changed), profile)
    assert judged.judgement.findings
