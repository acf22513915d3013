"""The request rules as tables, for both dialects, and against the examples of the providers' documents and the cases."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turngate.adapters.dialect import context_of
from turngate.adapters.levels import levels
from turngate.adapters.registry import DIALECTS
from turngate.validators.rules import Finding, Judgement, Level, Reason, Verdict, judge, quoted

SHARED = Path(os.environ.get("TURNGATE_SHARED") or Path(__file__).parents[2] / "shared")

Json = dict[str, Any]
Expected = tuple[Verdict, list[tuple[Reason, str]]]

ORPHAN, DUPLICATE = Reason.RESULT_ORPHAN, Reason.RESULT_DUPLICATE
MISPLACED, MISMATCH, UNANSWERED = Reason.RESULT_MISPLACED, Reason.RESULT_MISMATCH, Reason.CALL_UNANSWERED
EDGE_REASONS = {ORPHAN, DUPLICATE, MISPLACED, MISMATCH, UNANSWERED}
"""The reasons that these tables are complete for. A rule that comes later may find more in the same history."""

LEGAL: Expected = (Verdict.LEGAL, [])


def judged(api: str, server: str, messages: list[Json], **more: object) -> Judgement:
    body = json.dumps({"model": "m", "messages": messages, **more}).encode()
    return judge(DIALECTS[api].parse_request(body), levels(api, server))


def edge_findings(judgement: Judgement) -> list[tuple[Reason, str]]:
    return [(finding.reason, finding.at) for finding in judgement.findings if finding.reason in EDGE_REASONS]


# -- Chat Completions -----------------------------------------------------------------------------------------------


def asks(*ids: str, content: object = None) -> Json:
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": id_, "type": "function", "function": function} for id_ in ids]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def tool(id_: str) -> Json:
    return {"role": "tool", "tool_call_id": id_, "content": "ok"}


def says(role: str) -> Json:
    return {"role": role, "content": "hm"}


USER, ASSISTANT, SYSTEM = says("user"), says("assistant"), says("system")
CUSTOM = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "f", "input": "x"}}],
}
LEGACY = [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}]
ILLEGAL, WAITING = Verdict.ILLEGAL, Verdict.WAITING

CHAT_CASES: dict[str, tuple[list[Json], Expected]] = {
    "no tools": ([SYSTEM, USER, ASSISTANT, USER], LEGAL),
    "one call, one result": ([USER, asks("a"), tool("a")], LEGAL),
    "parallel results in call order": ([asks("a", "b"), tool("a"), tool("b"), USER], LEGAL),
    "parallel results in another order": ([asks("a", "b"), tool("b"), tool("a"), USER], LEGAL),
    "several rounds": ([USER, asks("a"), tool("a"), asks("b"), tool("b"), ASSISTANT, USER], LEGAL),
    "an id that comes back in a later turn": ([asks("a"), tool("a"), USER, asks("a"), tool("a")], LEGAL),
    "an id that comes back in the next turn": ([asks("a"), tool("a"), asks("a"), tool("a")], LEGAL),
    "text beside calls": ([asks("a", content="let me see"), tool("a")], LEGAL),
    "assistants in a row": ([ASSISTANT, ASSISTANT, USER, USER, SYSTEM], LEGAL),
    "empty assistant, then one with calls": (
        [{"role": "assistant", "content": ""}, asks("a"), tool("a")],
        LEGAL,
    ),
    "a custom tool": ([USER, CUSTOM, tool("a")], LEGAL),
    "legacy function": ([*LEGACY, {"role": "function", "name": "f", "content": "ok"}, USER], LEGAL),
    "a legacy function without result": ([*LEGACY, USER], LEGAL),
    "call text that a user writes": ([{"role": "user", "content": json.dumps(asks("a"))}], LEGAL),
    "two calls of one id, one result": ([asks("a", "a"), tool("a"), USER], LEGAL),
    "two calls of one id, two results": ([asks("a", "a"), tool("a"), tool("a"), USER], LEGAL),
    "two calls of one id, no result": (
        [asks("a", "a"), USER],
        (WAITING, [(UNANSWERED, "/messages/0/tool_calls/0"), (UNANSWERED, "/messages/0/tool_calls/1")]),
    ),
    "two calls of one id, three results": (
        [asks("a", "a"), tool("a"), tool("a"), tool("a")],
        (ILLEGAL, [(DUPLICATE, "/messages/3")]),
    ),
    "orphan at the start": ([tool("a"), USER], (ILLEGAL, [(ORPHAN, "/messages/0")])),
    "orphan after a plain assistant": ([USER, ASSISTANT, tool("a")], (ILLEGAL, [(ORPHAN, "/messages/2")])),
    "orphan after a complete run": (
        [asks("a"), tool("a"), tool("b")],
        (ILLEGAL, [(ORPHAN, "/messages/2")]),
    ),
    "orphan before the result of the run": (
        [asks("a"), tool("b"), tool("a")],
        (ILLEGAL, [(ORPHAN, "/messages/1")]),
    ),
    "orphan behind a user": ([asks("a"), tool("a"), USER, tool("b")], (ILLEGAL, [(ORPHAN, "/messages/3")])),
    "orphan, and an open call behind it": (
        [tool("z"), asks("a"), USER],
        (ILLEGAL, [(ORPHAN, "/messages/0"), (UNANSWERED, "/messages/1/tool_calls/0")]),
    ),
    "open call at the end": ([USER, asks("a")], (WAITING, [(UNANSWERED, "/messages/1/tool_calls/0")])),
    "open call before a last user": (
        [asks("a"), USER],
        (WAITING, [(UNANSWERED, "/messages/0/tool_calls/0")]),
    ),
    "one of two open at the end": (
        [asks("a", "b"), tool("b")],
        (WAITING, [(UNANSWERED, "/messages/0/tool_calls/0")]),
    ),
    "open call in an earlier turn": (
        [asks("a"), USER, ASSISTANT],
        (ILLEGAL, [(UNANSWERED, "/messages/0/tool_calls/0")]),
    ),
    "open call behind an answered one": (
        [asks("a"), tool("a"), asks("b"), USER],
        (WAITING, [(UNANSWERED, "/messages/2/tool_calls/0")]),
    ),
    "two turns open": (
        [asks("a"), USER, asks("b")],
        (ILLEGAL, [(UNANSWERED, "/messages/0/tool_calls/0"), (UNANSWERED, "/messages/2/tool_calls/0")]),
    ),
    "calls split over two assistants": (
        [asks("a"), asks("b"), tool("a"), tool("b")],
        (ILLEGAL, [(MISPLACED, "/messages/2")]),
    ),
    "a user inside the run": (
        [asks("a", "b"), tool("a"), USER, tool("b")],
        (ILLEGAL, [(MISPLACED, "/messages/3")]),
    ),
    "a system message inside the run": (
        [asks("a", "b"), tool("a"), SYSTEM, tool("b")],
        (ILLEGAL, [(MISPLACED, "/messages/3")]),
    ),
    "a user before the run": ([asks("a"), USER, tool("a")], (ILLEGAL, [(MISPLACED, "/messages/2")])),
    "an assistant before the run": (
        [asks("a"), ASSISTANT, tool("a")],
        (ILLEGAL, [(MISPLACED, "/messages/2")]),
    ),
    "a result before its call": ([tool("a"), asks("a")], (ILLEGAL, [(MISPLACED, "/messages/0")])),
    "two results for one call": ([asks("a"), tool("a"), tool("a")], (ILLEGAL, [(DUPLICATE, "/messages/2")])),
    "a second result behind a user": (
        [asks("a"), tool("a"), USER, tool("a")],
        (ILLEGAL, [(DUPLICATE, "/messages/3")]),
    ),
    "a wrong id while a call waits": (
        [asks("a"), tool("z"), USER],
        (
            ILLEGAL,
            [(MISMATCH, "/messages/1/tool_call_id"), (UNANSWERED, "/messages/0/tool_calls/0")],
        ),
    ),
    "an earlier turn's id while a call waits": (
        [asks("a"), tool("a"), asks("b"), tool("a")],
        (
            ILLEGAL,
            [(MISMATCH, "/messages/3/tool_call_id"), (UNANSWERED, "/messages/2/tool_calls/0")],
        ),
    ),
}


@pytest.mark.parametrize(("messages", "expected"), CHAT_CASES.values(), ids=CHAT_CASES)
def test_chat_histories(messages: list[Json], expected: Expected) -> None:
    judgement = judged("openai.chat", "openai", messages)
    assert (judgement.verdict, edge_findings(judgement)) == expected


@pytest.mark.parametrize(("messages", "expected"), CHAT_CASES.values(), ids=CHAT_CASES)
def test_a_server_without_evidence_refuses_nothing_and_is_told_the_same(
    messages: list[Json], expected: Expected
) -> None:
    judgement = judged("openai.chat", "some lenient server", messages)
    assert (judgement.verdict, edge_findings(judgement)) == (Verdict.LEGAL, expected[1])
    assert {finding.level for finding in judgement.findings} <= {Level.SOFT}


# -- Messages -------------------------------------------------------------------------------------------------------


def use(id_: str) -> Json:
    return {"type": "tool_use", "id": id_, "name": "f", "input": {}}


def result(id_: str) -> Json:
    return {"type": "tool_result", "tool_use_id": id_, "content": "ok"}


def server(id_: str) -> Json:
    return {"type": "server_tool_use", "id": f"srvtoolu_{id_}", "name": "web_search", "input": {}}


def found(id_: str) -> Json:
    return {"type": "web_search_tool_result", "tool_use_id": f"srvtoolu_{id_}", "content": []}


def u(*blocks: Json) -> Json:
    return {"role": "user", "content": list(blocks)}


def a(*blocks: Json) -> Json:
    return {"role": "assistant", "content": list(blocks)}


TEXT = {"type": "text", "text": "hm"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
MCP = {"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "s", "input": {}}
MCP_RESULT = {"type": "mcp_tool_result", "tool_use_id": "m", "content": []}

MESSAGES_CASES: dict[str, tuple[list[Json], Expected]] = {
    "no tools": ([USER, ASSISTANT, USER], LEGAL),
    "one call, one result": ([USER, a(use("a")), u(result("a"))], LEGAL),
    "text behind the results": ([a(use("a")), u(result("a"), TEXT)], LEGAL),
    "text in the next user message": ([a(use("a")), u(result("a")), u(TEXT)], LEGAL),
    "results in another order": ([a(use("a"), use("b")), u(result("b"), result("a"))], LEGAL),
    "results over two user messages": ([a(use("a"), use("b")), u(result("b")), u(result("a"), TEXT)], LEGAL),
    "calls over two assistant messages": ([a(use("a")), a(use("b")), u(result("a"), result("b"))], LEGAL),
    "an empty assistant message between": ([a(use("a")), a(), u(result("a"))], LEGAL),
    "thinking and text before the call": (
        [a({"type": "thinking", "thinking": "so", "signature": "c2ln"}, TEXT, use("a")), u(result("a"))],
        LEGAL,
    ),
    "an id that comes back": ([a(use("a")), u(result("a")), a(use("a")), u(result("a"))], LEGAL),
    "a leading assistant": ([ASSISTANT, USER], LEGAL),
    "a system message behind a user": ([USER, SYSTEM, ASSISTANT, USER, SYSTEM], LEGAL),
    "a server's call with its result": ([a(server("s"), found("s"), TEXT), USER, ASSISTANT], LEGAL),
    "another server's call with its result": ([a(MCP, MCP_RESULT), USER], LEGAL),
    "a paused turn sent back": ([USER, a(TEXT, server("s"))], LEGAL),
    "a mixed turn sent back": ([USER, a(server("s"), use("a"))], LEGAL),
    "a mixed turn answered": ([USER, a(server("s"), use("a")), u(result("a"))], LEGAL),
    "a mixed turn that went on": (
        [a(server("s"), use("a")), u(result("a")), a(found("s"), TEXT), USER],
        LEGAL,
    ),
    "two server calls, one open, in the last turn": ([a(server("s"), server("t"), found("s"))], LEGAL),
    "a mixed turn answered in part": (
        [a(server("s"), use("a"), use("b")), u(result("b"))],
        (WAITING, [(UNANSWERED, "/messages/0/content/1")]),
    ),
    "a mixed turn with text behind its results": (
        [a(server("s"), use("a")), u(result("a"), TEXT)],
        (ILLEGAL, [(UNANSWERED, "/messages/0/content/0")]),
    ),
    "a mixed turn answered by text": (
        [a(server("s"), use("a")), USER],
        (ILLEGAL, [(UNANSWERED, "/messages/0/content/1"), (UNANSWERED, "/messages/0/content/0")]),
    ),
    "a server's call left open in an earlier turn": (
        [a(server("s"), TEXT), USER, ASSISTANT, USER],
        (ILLEGAL, [(UNANSWERED, "/messages/0/content/0")]),
    ),
    "of two server's calls one left open in an earlier turn": (
        [a(server("s"), server("t"), found("t")), USER, ASSISTANT],
        (ILLEGAL, [(UNANSWERED, "/messages/0/content/0")]),
    ),
    "open at the end": ([USER, a(use("a"))], (WAITING, [(UNANSWERED, "/messages/1/content/0")])),
    "open before a last user": ([a(use("a")), USER], (WAITING, [(UNANSWERED, "/messages/0/content/0")])),
    "open in an earlier turn": (
        [a(use("a")), USER, ASSISTANT],
        (ILLEGAL, [(UNANSWERED, "/messages/0/content/0")]),
    ),
    "text before the result": (
        [a(use("a")), u(TEXT, result("a"))],
        (ILLEGAL, [(MISPLACED, "/messages/1/content/1")]),
    ),
    "text closes the run": (
        [a(use("a"), use("b")), u(result("a"), TEXT), u(result("b"))],
        (ILLEGAL, [(MISPLACED, "/messages/2/content/0")]),
    ),
    "a user message before the results": (
        [a(use("a")), USER, u(result("a"))],
        (ILLEGAL, [(MISPLACED, "/messages/2/content/0")]),
    ),
    "a system message before the results": (
        [a(use("a")), SYSTEM, u(result("a"))],
        (ILLEGAL, [(MISPLACED, "/messages/2/content/0")]),
    ),
    "orphan": ([u(result("z"))], (ILLEGAL, [(ORPHAN, "/messages/0/content/0")])),
    "orphan beside a good result": (
        [a(use("a")), u(result("z"), result("a"))],
        (ILLEGAL, [(ORPHAN, "/messages/1/content/0")]),
    ),
    "two results in one message": (
        [a(use("a")), u(result("a"), result("a"))],
        (ILLEGAL, [(DUPLICATE, "/messages/1/content/1")]),
    ),
    "two results in two messages": (
        [a(use("a")), u(result("a")), u(result("a"))],
        (ILLEGAL, [(DUPLICATE, "/messages/2/content/0")]),
    ),
    "a wrong id while a call waits": (
        [a(use("a")), u(result("z"))],
        (ILLEGAL, [(MISMATCH, "/messages/1/content/0/tool_use_id"), (UNANSWERED, "/messages/0/content/0")]),
    ),
}


@pytest.mark.parametrize(("messages", "expected"), MESSAGES_CASES.values(), ids=MESSAGES_CASES)
def test_messages_histories(messages: list[Json], expected: Expected) -> None:
    judgement = judged("anthropic.messages", "anthropic", messages, tools=[SEARCH])
    assert (judgement.verdict, edge_findings(judgement)) == expected


THREAD_CASES: dict[str, tuple[list[Json], Expected]] = {
    "a result whose call the provider holds": ([u(result("z"))], LEGAL),
    "results and text": ([u(result("y"), result("z"), TEXT)], LEGAL),
    "a call in the body still needs its result": (
        [u(result("z")), a(use("a")), USER],
        (WAITING, [(UNANSWERED, "/messages/1/content/0")]),
    ),
    "two results for a call in the body": (
        [a(use("a")), u(result("a"), result("a"))],
        (ILLEGAL, [(DUPLICATE, "/messages/1/content/1")]),
    ),
}


@pytest.mark.parametrize(("messages", "expected"), THREAD_CASES.values(), ids=THREAD_CASES)
def test_a_continued_thread_may_answer_calls_that_are_not_in_the_body(
    messages: list[Json], expected: Expected
) -> None:
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    judgement = judged("anthropic.messages", "anthropic", messages, thread=thread)
    assert (judgement.verdict, edge_findings(judgement)) == expected


def test_a_created_thread_holds_nothing_yet() -> None:
    judgement = judged("anthropic.messages", "anthropic", [u(result("z"))], thread={"type": "create"})
    assert edge_findings(judgement) == [(ORPHAN, "/messages/0/content/0")]


# -- findings and levels --------------------------------------------------------------------------------------------


def test_a_hard_finding_stands_before_a_soft_one() -> None:
    sequence = DIALECTS["openai.chat"].parse_request(
        json.dumps({"messages": [tool("z"), asks("a"), USER]}).encode()
    )
    judgement = judge(sequence, {ORPHAN: Level.SOFT, UNANSWERED: Level.HARD})
    assert [(finding.reason, finding.level) for finding in judgement.findings] == [
        (UNANSWERED, Level.HARD),
        (ORPHAN, Level.SOFT),
    ]
    assert judgement.verdict is Verdict.WAITING


def test_a_rule_that_is_off_finds_nothing() -> None:
    sequence = DIALECTS["openai.chat"].parse_request(json.dumps({"messages": [tool("z")]}).encode())
    assert judge(sequence, {ORPHAN: Level.OFF}) == judge(sequence, {}) == Judgement(Verdict.LEGAL)


def test_a_finding_says_what_where_and_what_to_do() -> None:
    finding = judged("openai.chat", "openai", [USER, tool("call_9")]).findings[0]
    assert finding == Finding(
        ORPHAN,
        Level.HARD,
        "/messages/1",
        'no tool call has id "call_9".',
        "Send the assistant message with that call before it, or drop the result.",
    )
    assert str(finding).startswith('result.orphan at /messages/1: no tool call has id "call_9". Send ')


QUOTED = {
    "plain": ("call_1", '"call_1"'),
    "absent": (None, "(none)"),
    "long": ("x" * 65, '"' + "x" * 64 + '…"'),
    "just short enough": ("x" * 64, '"' + "x" * 64 + '"'),
    "unprintable": ("a\n\x1b[31mb", '"a??[31mb"'),
}


@pytest.mark.parametrize(("text", "shown"), QUOTED.values(), ids=QUOTED)
def test_an_id_is_quoted_short_and_printable(text: str | None, shown: str) -> None:
    assert quoted(text) == shown


# -- the providers' documents ---------------------------------------------------------------------------------------


def document(name: str) -> str:
    path = SHARED / "providers" / name
    if not path.is_file():
        pytest.skip(f"no provider document at {path}; set TURNGATE_SHARED")
    return path.read_text()


CHAT_RULES = {
    "CHAT-B01": Reason.RESULT_ORPHAN,
    "CHAT-B02": Reason.CALL_UNANSWERED,
    "CHAT-B03": Reason.RESULT_MISPLACED,
    "CHAT-B04": Reason.RESULT_MISMATCH,
    "CHAT-B05": Reason.RESULT_DUPLICATE,
    "CHAT-B06": Reason.CALL_DUPLICATE_ID,
    "CHAT-B08": Reason.RESULT_BAD_SHAPE,
    "CHAT-B09": Reason.BLOCK_EMPTY,
    "CHAT-B20": Reason.BLOCK_EMPTY,
    "CHAT-B22": Reason.BLOCK_WRONG_ROLE,
}
"""The reason that comes first for a document rule's illegal example."""

REFUSED_ELSEWHERE = {"CHAT-B06": "deepseek"}
"""Its own text calls it soft at the default server, for want of a quotation, and hard at this one."""


def test_the_examples_of_the_chat_document() -> None:
    blocks = re.findall(
        r"<!-- case: (\S+) (\w+)( request)? -->\n```json\n(.*?)```", document("openai-chat.md"), re.DOTALL
    )
    assert {id_ for id_, verdict, *_ in blocks if verdict == "illegal"} == CHAT_RULES.keys()
    for id_, verdict, request, text in blocks:
        value = json.loads(text)
        body = {"model": "gpt-4o", "messages": value} if not request else value
        sequence = DIALECTS["openai.chat"].parse_request(json.dumps(body).encode())
        judgement = judge(sequence, levels("openai.chat", "openai"))
        if verdict != "illegal":
            assert judgement.verdict is Verdict.LEGAL, id_
            assert bool(judgement.findings) is (verdict == "soft"), id_
            continue
        if id_ in REFUSED_ELSEWHERE:
            assert (judgement.verdict, judgement.findings[0].reason) == (Verdict.LEGAL, CHAT_RULES[id_])
            judgement = judge(sequence, levels("openai.chat", REFUSED_ELSEWHERE[id_]))
        assert judgement.verdict in (Verdict.ILLEGAL, Verdict.WAITING), id_
        assert judgement.findings[0].reason is CHAT_RULES[id_], id_


def spelled_out(example: str) -> list[Json]:
    """An example of the Messages document with its shorthand `TU(id)` and `TR(id)` written out."""
    text = re.sub(r'TU\("([^"]+)"\)', lambda m: json.dumps(use(m[1])), example.strip())
    text = re.sub(r'TR\("([^"]+)"\)', lambda m: json.dumps(result(m[1])), text)
    if text.startswith("…"):  # "what came before": a user's question and one call
        text = json.dumps([USER, a(use("toolu_1"))])[:-1] + ", " + text.removeprefix("…").strip() + "]"
    messages: list[Json] = json.loads(text)
    return messages


MESSAGES_RULES = {
    "B1": Reason.CALL_UNANSWERED,
    "B2": Reason.RESULT_ORPHAN,
    "B3": Reason.RESULT_DUPLICATE,
    "B14": Reason.ROLE_ORDER,
}


def test_the_examples_of_the_messages_document() -> None:
    sections = re.split(r"^### (B\d+)\b", document("anthropic-messages.md"), flags=re.MULTILINE)
    seen = set()
    for id_, section in zip(sections[1::2], sections[2::2], strict=True):
        for verdict, example in re.findall(r"^(illegal|legal):\s+(.+)$", section, re.MULTILINE):
            judgement = judged("anthropic.messages", "anthropic", spelled_out(example))
            if verdict == "legal":
                assert judgement.verdict is Verdict.LEGAL, id_
            else:
                assert judgement.verdict in (Verdict.ILLEGAL, Verdict.WAITING), id_
                assert judgement.findings[0].reason is MESSAGES_RULES[id_], id_
            seen.add((id_, verdict))
    assert {(id_, verdict) for id_ in MESSAGES_RULES for verdict in ("illegal", "legal")} == seen


def shape(text: str) -> Iterator[Json]:
    """`a[TU1,TU2] │ u[TR2] │ u[TR1,text]` as messages; a bare `u` is a plain message."""
    roles = {"u": "user", "a": "assistant"}
    for part in text.split("│"):
        role, _, inside = part.strip().rstrip("]").partition("[")
        names = [name for name in inside.split(",") if name]
        blocks = [
            use(n) if n.startswith("TU") else result(n.replace("TR", "TU")) if n[:2] == "TR" else TEXT
            for n in names
        ]
        yield {"role": roles[role], "content": blocks or "hm"}


def test_the_shapes_that_were_tried_on_the_live_api() -> None:
    rows = re.findall(r"^\| `([ua][^`]*│[^`]*)` \| (\d+)", document("anthropic-messages.md"), re.MULTILINE)
    assert len(rows) >= 5
    for text, status in rows:
        judgement = judged("anthropic.messages", "anthropic", list(shape(text)))
        assert bool(edge_findings(judgement)) is (status == "400"), text


# -- cases after public bug reports ---------------------------------------------------------------------------------

APIS = {
    "openai.chat": ("openai.chat", "openai"),
    "azure.chat": ("openai.chat", "azure"),
    "openai.compatible": ("openai.chat", ""),
    "mistral.chat": ("openai.chat", "mistral"),
    "anthropic.messages": ("anthropic.messages", "anthropic"),
}


def cases() -> list[Json]:
    found = [json.loads(path.read_text()) for path in sorted((SHARED / "cases").glob("*.json"))]
    return [case for case in found if case["api"] in APIS]


CASES = cases()


def test_the_cases_are_there() -> None:
    if not CASES:
        pytest.skip(f"no cases in {SHARED / 'cases'}; set TURNGATE_SHARED")
    assert len(CASES) > 100


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_case_is_judged_as_its_provider_did(case: Json) -> None:
    api, server_ = APIS[case["api"]]
    context = case.get("context") or {}
    body = case["request"].get("body_text") or json.dumps(case["request"]["body"])
    sequence = DIALECTS[api].parse_request(
        body.encode(),
        context_of(wire_headers(case["request"]["headers"]), context.get("model_context_window")),
    )
    judgement = judge(sequence, levels(api, case.get("server") or server_))
    expect = case["expect"]
    if "response" in case or context.get("needs_ledger") or expect["verdict"] == "legal":
        assert judgement.verdict is Verdict.LEGAL, judgement.findings
        return
    first = judgement.findings[0]
    assert (judgement.verdict, first.reason, first.at) == (expect["verdict"], expect["reason"], expect["at"])
    assert first.level is Level.HARD


def wire_headers(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    """Recorded headers as they stand on the wire."""
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
