"""The table of levels: every entry has its evidence, every check a home, and each rule an illegal and a nearest legal body."""

import json
import re
from typing import Any

import pytest

from turngate.adapters.dialect import NO_CONTEXT, RequestContext, context_of
from turngate.adapters.levels import ENTRIES, SERVERS, entries, levels
from turngate.adapters.registry import DIALECTS
from turngate.validators.checks import RANK, REASONS, Level, Profile, Reason
from turngate.validators.graph import Check
from turngate.validators.rules import EDGE_RULES, TURN_RULES, Judgement, Verdict, judge
from turngate.validators.shapes import WORDS

Json = dict[str, Any]
CHAT, MESSAGES = "openai.chat", "anthropic.messages"
SERVED = [(api, server) for api, servers in SERVERS.items() for server in servers]


def test_every_check_has_a_reason_and_either_words_or_a_rule() -> None:
    assert set(REASONS) == set(Check) == set(RANK)
    assert set(Check) == set(WORDS) | set(TURN_RULES) | set(EDGE_RULES)
    assert not set(WORDS) & (set(TURN_RULES) | set(EDGE_RULES))


def test_every_entry_says_rule_source_and_date() -> None:
    for entry in ENTRIES:
        assert entry.rule, entry
        assert entry.source, entry
        assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", entry.date), entry
        assert entry.reason is REASONS[entry.check]


def test_no_server_has_two_entries_for_one_check() -> None:
    keys = [(entry.api, entry.server, entry.check) for entry in ENTRIES]
    assert len(keys) == len(set(keys))


def test_every_check_is_somebodys() -> None:
    assert {entry.check for entry in ENTRIES} == set(Check)


def test_the_default_server_of_an_api_comes_first() -> None:
    assert {api: servers[0] for api, servers in SERVERS.items()} == {CHAT: "openai", MESSAGES: "anthropic"}
    assert SERVERS.keys() == DIALECTS.keys()


@pytest.mark.parametrize(("api", "server"), SERVED)
def test_a_level_is_what_the_strictest_entry_of_its_reason_says(api: str, server: str) -> None:
    profile = levels(api, server)
    hard = {entry.reason for entry in entries(api, server) if entry.level is Level.HARD}
    assert {reason for reason, level in profile.items() if level is Level.HARD} == hard
    assert all(entry.server == server and entry.api == api for entry in entries(api, server))


@pytest.mark.parametrize("api", SERVERS)
def test_an_unknown_server_has_only_soft_rules(api: str) -> None:
    assert set(levels(api, "some new server").values()) == {Level.SOFT}
    assert set(levels("no.such.api", "x").values()) == set()


def test_the_reasons_without_a_rule_are_those_no_server_checks_in_requests() -> None:
    request = {reason for reason in Reason if reason.split(".")[0] in FAMILIES}
    assert request - set(REASONS.values()) == {
        Reason.CALL_ARGUMENTS_SCHEMA,
        Reason.CALL_ARGUMENTS_DUPLICATE_KEY,
        Reason.CALL_UNCOMMITTED,
    }


FAMILIES = {"role", "block", "call", "result", "reasoning", "signature", "toolset", "context"}


def test_profiles_are_told_apart_by_identity() -> None:
    assert Profile({}) != Profile({})
    assert levels(CHAT, "openai") == levels(CHAT, "openai")


# -- each rule, its illegal example and the nearest legal one ---------------------------------------------------------

USER: Json = {"role": "user", "content": "hm"}
BOT: Json = {"role": "assistant", "content": "hm"}
SYSTEM: Json = {"role": "system", "content": "hm"}


def asks(*ids: str, name: str = "f", arguments: object = "{}", **more: object) -> Json:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": id_, "type": "function", "function": function} for id_ in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def tool(id_: str, content: object = "ok") -> Json:
    return {"role": "tool", "tool_call_id": id_, "content": content}


def says(role: str, *parts: Json) -> Json:
    return {"role": role, "content": list(parts)}


def text(value: str, **more: object) -> Json:
    return {"type": "text", "text": value, **more}


def use(id_: str = "a", **more: object) -> Json:
    return {"type": "tool_use", "id": id_, "name": "f", "input": {}, **more}


def result(id_: str = "a") -> Json:
    return {"type": "tool_result", "tool_use_id": id_, "content": "ok"}


def search(id_: str = "srvtoolu_1") -> Json:
    return {"type": "server_tool_use", "id": id_, "name": "web_search", "input": {}}


IMAGE: Json = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
THINKING: Json = {"type": "thinking", "thinking": "so", "signature": "c2ln"}
DOCUMENT: Json = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
MARK: Json = {"cache_control": {"type": "ephemeral"}}
COMPACTION: Json = {"type": "compaction", "content": "short"}


def function(name: str = "f", **more: object) -> Json:
    return {"type": "function", "function": {"name": name, **more}}


OBJECT: Json = {"type": "object"}
ENABLED: Json = {"thinking": {"type": "enabled"}}
LOOP = [USER, says("assistant", use()), says("user", result())]
SEARCHING = [USER, says("assistant", search(), use()), says("user", result())]
BARE = RequestContext("2023-06-01", frozenset())
BETA = RequestContext("2023-06-01", frozenset({"some-beta-2026"}))
NEWER = RequestContext("2026-10-21", frozenset())

Body = list[Any] | tuple[list[Any], Json]
Pair = tuple[Body, Reason, str, Body]

CHAT_PAIRS: dict[str, Pair] = {
    "openai: no messages": ([], Reason.BLOCK_EMPTY, "/messages", [USER]),
    "openai: null content": (
        [{"role": "user", "content": None}],
        Reason.BLOCK_EMPTY,
        "/messages/0/content",
        [{"role": "user", "content": ""}],
    ),
    "openai: no content": (
        [USER, {"role": "assistant"}, USER],
        Reason.BLOCK_EMPTY,
        "/messages/1",
        [USER, {"role": "assistant", "refusal": "no"}, USER],
    ),
    "openai: null result": (
        [USER, asks("a"), tool("a", None)],
        Reason.BLOCK_EMPTY,
        "/messages/2/content",
        [USER, asks("a"), tool("a", "")],
    ),
    "openai: empty list of calls": (
        [USER, BOT | {"tool_calls": []}, USER],
        Reason.BLOCK_EMPTY,
        "/messages/1/tool_calls",
        [USER, BOT | {"tool_calls": None}, USER],
    ),
    "openai: unknown role": (
        [{"role": "human", "content": "hm"}],
        Reason.ROLE_UNKNOWN,
        "/messages/0/role",
        [{"role": "developer", "content": "hm"}],
    ),
    "openai: no role": ([{"content": "hm"}], Reason.ROLE_UNKNOWN, "/messages/0", [USER]),
    "openai: a result without id": (
        [USER, asks("a"), {"role": "tool", "content": "ok"}],
        Reason.RESULT_BAD_SHAPE,
        "/messages/2",
        [USER, asks("a"), tool("a")],
    ),
    "openai: a function's result without name": (
        [{"role": "function", "content": "ok"}],
        Reason.RESULT_BAD_SHAPE,
        "/messages/0",
        [{"role": "function", "name": "f", "content": None}],
    ),
    "openai: name with a space": (
        [USER, asks("a", name="a b"), tool("a")],
        Reason.CALL_BAD_NAME,
        "/messages/1/tool_calls/0/function/name",
        [USER, asks("a", name="a-b_C9"), tool("a")],
    ),
    "openai: declared name too long": (
        ([USER], {"tools": [function("f" * 65)]}),
        Reason.TOOLSET_INVALID,
        "/tools/0/function/name",
        ([USER], {"tools": [function("f" * 64)]}),
    ),
    "openai: a choice without tools": (
        ([USER], {"tool_choice": "auto"}),
        Reason.TOOLSET_INVALID,
        "/tool_choice",
        ([USER], {"tool_choice": "auto", "tools": [function()]}),
    ),
    "openai: parallel calls without tools": (
        ([USER], {"parallel_tool_calls": False}),
        Reason.TOOLSET_INVALID,
        "/parallel_tool_calls",
        ([USER], {"parallel_tool_calls": None}),
    ),
    "openai: a part without type": (
        [says("user", {"text": "hm"})],
        Reason.BLOCK_UNKNOWN_KIND,
        "/messages/0/content/0",
        [says("user", text("hm"))],
    ),
    "openai gpt-4o: an image of the system": (
        ([says("system", IMAGE)], {"model": "gpt-4o"}),
        Reason.BLOCK_WRONG_ROLE,
        "/messages/0/content/0",
        ([says("user", IMAGE)], {"model": "gpt-4o"}),
    ),
    "openai o1-mini: a developer": (
        ([{"role": "developer", "content": "hm"}, USER], {"model": "o1-mini"}),
        Reason.ROLE_UNKNOWN,
        "/messages/0/role",
        ([{"role": "developer", "content": "hm"}, USER], {"model": "gpt-4o"}),
    ),
    "azure: no messages": ([], Reason.BLOCK_EMPTY, "/messages", [USER]),
    "deepseek: an id twice in a turn": (
        [USER, asks("a", "a"), tool("a"), tool("a")],
        Reason.CALL_DUPLICATE_ID,
        "/messages/1/tool_calls/1",
        [USER, asks("a", "b"), tool("a"), tool("b")],
    ),
    "deepseek: reasoning lost": (
        ([USER, asks("a"), tool("a"), BOT, USER], ENABLED),
        Reason.REASONING_DETACHED,
        "/messages/1",
        ([USER, asks("a", reasoning_content=""), tool("a"), BOT, USER], ENABLED),
    ),
    "deepseek: an image": (
        [says("user", text("hm"), IMAGE)],
        Reason.BLOCK_UNKNOWN_KIND,
        "/messages/0/content/1",
        [says("user", text("hm"))],
    ),
    "mistral: an id of another form": (
        [USER, asks("call_1"), tool("call_1")],
        Reason.CALL_BAD_ID,
        "/messages/1/tool_calls/0/id",
        [USER, asks("a1B2c3D4e"), tool("a1B2c3D4e")],
    ),
    "mistral: system behind the assistant": (
        [USER, BOT, SYSTEM, USER],
        Reason.ROLE_ORDER,
        "/messages/2",
        [USER, SYSTEM, BOT, USER],
    ),
    "mistral: a message behind a result": (
        [USER, asks("a1B2c3D4e"), tool("a1B2c3D4e"), SYSTEM, USER],
        Reason.ROLE_ORDER,
        "/messages/3",
        [USER, asks("a1B2c3D4e"), tool("a1B2c3D4e"), USER],
    ),
    "mistral: the assistant last": (
        [USER, BOT],
        Reason.ROLE_ORDER,
        "/messages/1",
        [USER, BOT | {"prefix": True}],
    ),
    "mistral: a prefix in the middle": (
        [USER, BOT | {"prefix": True}, USER],
        Reason.ROLE_ORDER,
        "/messages/1/prefix",
        [USER, BOT | {"prefix": False}, USER],
    ),
    "mistral: one result too few": (
        [USER, asks("a1B2c3D4e"), USER, BOT, USER],
        Reason.CALL_UNANSWERED,
        "/messages/1/tool_calls/0",
        [USER, asks("a1B2c3D4e"), tool("zzzzzzzzz"), BOT, USER],
    ),
    "vllm: cut arguments": (
        [USER, asks("a", arguments='{"a'), tool("a")],
        Reason.CALL_ARGUMENTS_UNCLOSED,
        "/messages/1/tool_calls/0/function/arguments",
        [USER, asks("a", arguments=""), tool("a")],
    ),
    "vllm: broken arguments": (
        [USER, asks("a", arguments='{"a" b}'), tool("a")],
        Reason.CALL_ARGUMENTS_INVALID,
        "/messages/1/tool_calls/0/function/arguments",
        [USER, asks("a", arguments={"a": 1}), tool("a")],
    ),
    "vllm: no tools in the list": (
        ([USER], {"tools": []}),
        Reason.TOOLSET_INVALID,
        "/tools",
        ([USER], {"tools": None}),
    ),
    "vllm: an undeclared choice": (
        ([USER], {"tools": [function()], "tool_choice": function("g")}),
        Reason.TOOLSET_INVALID,
        "/tool_choice",
        ([USER], {"tools": [function()], "tool_choice": function("f")}),
    ),
    "vllm: an unknown part": (
        [says("user", {"type": "hologram"})],
        Reason.BLOCK_UNKNOWN_KIND,
        "/messages/0/content/0",
        [says("user", {"type": "video_url"})],
    ),
    "ollama: arguments that are no object": (
        [USER, asks("a", arguments="[]"), tool("a")],
        Reason.CALL_ARGUMENTS_INVALID,
        "/messages/1/tool_calls/0/function/arguments",
        [USER, asks("a", arguments=" {}"), tool("a")],
    ),
    "ollama: empty arguments": (
        [USER, asks("a", arguments=""), tool("a")],
        Reason.CALL_ARGUMENTS_INVALID,
        "/messages/1/tool_calls/0/function/arguments",
        [USER, asks("a"), USER],
    ),
    "ollama: an image by its address": (
        [says("user", {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}})],
        Reason.BLOCK_UNKNOWN_KIND,
        "/messages/0/content/0/image_url",
        [says("user", IMAGE)],
    ),
    "ollama: null content": (
        [USER, {"role": "assistant", "content": None}, USER],
        Reason.BLOCK_EMPTY,
        "/messages/1/content",
        [USER, asks("a"), USER],
    ),
    "moonshot: an empty assistant": (
        [USER, {"role": "assistant", "content": ""}, USER],
        Reason.BLOCK_EMPTY,
        "/messages/1/content",
        [USER, BOT, USER],
    ),
    "minimax: a tool without parameters": (
        ([USER], {"tools": [function()]}),
        Reason.TOOLSET_INVALID,
        "/tools/0/function",
        ([USER], {"tools": [function(parameters=OBJECT)]}),
    ),
    "llama.cpp: two assistants at the end": (
        [USER, BOT, BOT],
        Reason.ROLE_ORDER,
        "/messages/2",
        [USER, BOT, BOT, USER],
    ),
}

MESSAGES_PAIRS: dict[str, Pair] = {
    "no messages": ([], Reason.BLOCK_EMPTY, "/messages", [USER]),
    "no message": (["hm"], Reason.BLOCK_UNKNOWN_KIND, "/messages/0", [USER]),
    "an unknown role": (
        [{"role": "tool", "content": "hm"}],
        Reason.ROLE_UNKNOWN,
        "/messages/0/role",
        [USER],
    ),
    "an empty text": (
        [says("user", text("hm"), text(""))],
        Reason.BLOCK_EMPTY,
        "/messages/0/content/1",
        [says("user", text("hm"), text("."))],
    ),
    "a blank text": (
        [says("user", text(" \n"))],
        Reason.BLOCK_EMPTY,
        "/messages/0/content/0",
        [USER, says("assistant", text(" ")), USER],
    ),
    "an empty user": (
        [{"role": "user", "content": ""}],
        Reason.BLOCK_EMPTY,
        "/messages/0/content",
        [USER, {"role": "assistant", "content": ""}, USER],
    ),
    "a result in the assistant's message": (
        [USER, says("assistant", use(), result()), says("user", result())],
        Reason.BLOCK_WRONG_ROLE,
        "/messages/1/content/1",
        LOOP,
    ),
    "a call in the user's message": (
        [says("user", use())],
        Reason.BLOCK_WRONG_ROLE,
        "/messages/0/content/0",
        LOOP,
    ),
    "an id twice in a turn over two messages": (
        [USER, says("assistant", use()), says("assistant", use()), says("user", result())],
        Reason.CALL_DUPLICATE_ID,
        "/messages/2/content/0",
        [*LOOP, says("assistant", use()), says("user", result())],
    ),
    "an id with a dot": (
        [USER, says("assistant", use("a.b")), says("user", result("a.b"))],
        Reason.CALL_BAD_ID,
        "/messages/1/content/0/id",
        LOOP,
    ),
    "an empty id": (
        [USER, says("assistant", use("")), says("user", result(""))],
        Reason.CALL_BAD_ID,
        "/messages/1/content/0/id",
        LOOP,
    ),
    "a server's call with a client's id": (
        [
            USER,
            says("assistant", search("toolu_1"), {**result("toolu_1"), "type": "web_search_tool_result"}),
            USER,
        ],
        Reason.CALL_BAD_ID,
        "/messages/1/content/0/id",
        [
            USER,
            says("assistant", search(), {**result("srvtoolu_1"), "type": "web_search_tool_result"}),
            USER,
        ],
    ),
    "input that is a list": (
        [USER, says("assistant", use(input=[])), says("user", result())],
        Reason.CALL_ARGUMENTS_INVALID,
        "/messages/1/content/0/input",
        LOOP,
    ),
    "a result without id": (
        [USER, says("assistant", use()), says("user", {"type": "tool_result"})],
        Reason.RESULT_BAD_SHAPE,
        "/messages/2/content/0",
        LOOP,
    ),
    "thinking without signature": (
        [USER, says("assistant", {"type": "thinking", "thinking": "so"}, text("hm")), USER],
        Reason.SIGNATURE_MISSING,
        "/messages/1/content/0",
        [USER, says("assistant", THINKING, text("hm")), USER],
    ),
    "a loop without thinking": (
        (LOOP, ENABLED),
        Reason.REASONING_DETACHED,
        "/messages/1/content/0",
        ([USER, says("assistant", THINKING, use()), *LOOP[2:], *LOOP[1:]], ENABLED),
    ),
    "thinking disabled": (
        ([USER, says("assistant", THINKING, text("hm"))], {"thinking": {"type": "disabled"}}),
        Reason.REASONING_DETACHED,
        "/messages/1/content/0",
        ([USER, says("assistant", THINKING, text("hm")), USER], {"thinking": {"type": "disabled"}}),
    ),
    "thinking at the end": (
        [USER, says("assistant", text("hm"), THINKING)],
        Reason.REASONING_DETACHED,
        "/messages/1/content/1",
        [USER, says("assistant", text("hm"), THINKING), USER],
    ),
    "a prefill of a newer model": (
        ([USER, BOT], {"model": "claude-sonnet-5"}),
        Reason.ROLE_ORDER,
        "/messages/1",
        ([USER, BOT], {"model": "claude-opus-4-20250514"}),
    ),
    "a prefill with blanks behind it": (
        [USER, {"role": "assistant", "content": "so "}],
        Reason.ROLE_ORDER,
        "/messages/1/content",
        [USER, {"role": "assistant", "content": "so"}],
    ),
    "the system prompt as first message": (
        [SYSTEM, USER],
        Reason.ROLE_ORDER,
        "/messages/0",
        [{"role": "system", "content": [], "output_config": {"effort": "low"}}, USER],
    ),
    "a system message before the user": (
        [USER, SYSTEM, USER],
        Reason.ROLE_ORDER,
        "/messages/1",
        [USER, SYSTEM, SYSTEM, BOT, USER],
    ),
    "an image of the system": (
        [USER, says("system", {"type": "image"})],
        Reason.BLOCK_WRONG_ROLE,
        "/messages/1/content/0",
        [USER, says("system", {"type": "tool_addition", "tool": {}})],
    ),
    "a system message without blocks": (
        [USER, says("system")],
        Reason.BLOCK_EMPTY,
        "/messages/1/content",
        [USER, SYSTEM],
    ),
    "a mixed turn without its server tool": (
        (SEARCHING, {"tools": [{"name": "f", "input_schema": OBJECT}]}),
        Reason.CALL_UNKNOWN_TOOL,
        "/messages/1/content/0",
        (SEARCHING, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ),
    "five cache marks": (
        ([says("user", *(text("hm", **MARK) for _ in range(4)))], {"system": [text("hm", **MARK)]}),
        Reason.CONTEXT_OVER_BUDGET,
        "/messages/0/content/3",
        ([says("user", *(text("hm", **MARK) for _ in range(3)))], {"system": [text("hm", **MARK)]}),
    ),
    "two compactions": (
        [says("assistant", COMPACTION), USER, says("assistant", COMPACTION), USER],
        Reason.BLOCK_MIXED_TURN,
        "/messages/2/content/0",
        [says("assistant", COMPACTION), USER],
    ),
    "an empty compaction": (
        [says("assistant", {"type": "compaction", "content": ""}), USER],
        Reason.BLOCK_EMPTY,
        "/messages/0/content/0/content",
        [says("assistant", {"type": "compaction", "content": None}), USER],
    ),
    "a tool without schema": (
        ([USER], {"tools": [{"name": "f"}]}),
        Reason.TOOLSET_INVALID,
        "/tools/0",
        ([USER], {"tools": [{"name": "bash", "type": "bash_20250124"}]}),
    ),
    "a schema of another type": (
        ([USER], {"tools": [{"name": "f", "input_schema": {"type": "string"}}]}),
        Reason.TOOLSET_INVALID,
        "/tools/0/input_schema/type",
        ([USER], {"tools": [{"name": "f", "input_schema": OBJECT}]}),
    ),
    "a tool's name with a space": (
        ([USER], {"tools": [{"name": "a b", "input_schema": OBJECT}]}),
        Reason.TOOLSET_INVALID,
        "/tools/0/name",
        ([USER], {"tools": [{"name": "a" * 128, "input_schema": OBJECT}]}),
    ),
    "a choice in words": (
        ([USER], {"tool_choice": "auto"}),
        Reason.TOOLSET_INVALID,
        "/tool_choice",
        ([USER], {"tool_choice": {"type": "auto"}}),
    ),
}


def judged(api: str, server: str, body: Body, context: RequestContext = NO_CONTEXT) -> Judgement:
    messages, more = body if isinstance(body, tuple) else (body, {})
    request = json.dumps({"model": "m", "messages": messages, **more}).encode()
    return judge(DIALECTS[api].parse_request(request, context), levels(api, server))


@pytest.mark.parametrize(("name", "pair"), CHAT_PAIRS.items(), ids=CHAT_PAIRS)
def test_a_chat_rule_refuses_its_example_and_not_the_nearest_legal_one(name: str, pair: Pair) -> None:
    check(CHAT, re.split(r"[: ]", name)[0], pair)


@pytest.mark.parametrize("pair", MESSAGES_PAIRS.values(), ids=MESSAGES_PAIRS)
def test_a_messages_rule_refuses_its_example_and_not_the_nearest_legal_one(pair: Pair) -> None:
    check(MESSAGES, "anthropic", pair)


def check(api: str, server: str, pair: Pair) -> None:
    illegal, reason, at, legal = pair
    found = judged(api, server, illegal)
    assert found.verdict is Verdict.ILLEGAL
    assert (found.findings[0].reason, found.findings[0].at) == (reason, at)
    assert judged(api, server, legal).verdict in (Verdict.LEGAL, Verdict.WAITING)
    # Elsewhere nothing is refused for want of evidence.
    assert judged(api, "some new server", illegal).verdict is Verdict.LEGAL


# -- what the headers say ---------------------------------------------------------------------------------------------

UNKNOWN_KIND: Body = [says("user", text("hm"), {"type": "hologram"})]
FALLBACK: Body = [USER, says("assistant", {"type": "fallback"}, text("hm")), USER]
BY_HEADERS: dict[str, tuple[Body, RequestContext, Verdict]] = {
    "an unknown kind, headers not at hand": (UNKNOWN_KIND, NO_CONTEXT, Verdict.LEGAL),
    "an unknown kind without any beta": (UNKNOWN_KIND, BARE, Verdict.ILLEGAL),
    "an unknown kind that a beta may enable": (UNKNOWN_KIND, BETA, Verdict.LEGAL),
    "an unknown kind and a beta in the body": (
        ([says("user", {"type": "hologram"})], {"anthropic_beta": ["some-beta"]}),
        BARE,
        Verdict.LEGAL,
    ),
    "fallback without any beta": (FALLBACK, BARE, Verdict.ILLEGAL),
    "fallback with a beta": (FALLBACK, BETA, Verdict.LEGAL),
    "a document of the assistant, older version": (
        [USER, says("assistant", DOCUMENT), USER],
        BARE,
        Verdict.LEGAL,
    ),
    "a document of the assistant, newer version": (
        [USER, says("assistant", DOCUMENT), USER],
        NEWER,
        Verdict.ILLEGAL,
    ),
    "citations of the user, older version": (
        [says("user", text("hm", citations=[{"type": "x"}]))],
        BARE,
        Verdict.LEGAL,
    ),
    "citations of the user, newer version": (
        [says("user", text("hm", citations=[{"type": "x"}]))],
        NEWER,
        Verdict.ILLEGAL,
    ),
    "the newer version in the body": (
        ([USER, says("assistant", DOCUMENT), USER], {"anthropic_version": "2026-10-21"}),
        NO_CONTEXT,
        Verdict.ILLEGAL,
    ),
    "an older client's version in the body": (
        ([USER, says("assistant", DOCUMENT), USER], {"anthropic_version": "vertex-2023-10-16"}),
        NO_CONTEXT,
        Verdict.LEGAL,
    ),
}


@pytest.mark.parametrize(("body", "context", "verdict"), BY_HEADERS.values(), ids=BY_HEADERS)
def test_what_a_body_means_depends_on_its_headers(
    body: Body, context: RequestContext, verdict: Verdict
) -> None:
    assert judged(MESSAGES, "anthropic", body, context).verdict is verdict


def test_headers_are_read_in_any_case_and_betas_one_by_one() -> None:
    context = context_of([(b"Anthropic-Version", b"2023-06-01"), (b"ANTHROPIC-BETA", b"a, b,,c")])
    assert context == RequestContext("2023-06-01", frozenset({"a", "b", "c"}))
    assert context_of([]) == RequestContext(None, frozenset())


def test_a_window_is_exceeded_only_where_it_is_known_and_surely() -> None:
    words = " ".join(f"word{n:03}" for n in range(60))  # two tokens a word at least
    body = [{"role": "user", "content": words}]
    for window, more, at in (
        (119, {}, "/messages"),
        (120, {"max_tokens": 1}, "/max_tokens"),
        (120, {}, None),
        (None, {"max_tokens": 10**9}, None),
    ):
        found = judged(CHAT, "deepseek", (body, more), RequestContext(window=window)).findings
        assert [finding.at for finding in found] == ([at] if at else [])
        assert {finding.reason for finding in found} <= {Reason.CONTEXT_OVER_BUDGET}
