"""What the simulator refuses, held against the provider documents, the collected cases and recorded traffic.

The three lie beside the repository and are read from $TURNGATE_SHARED; the tables in here stand alone.
"""

import asyncio
import gzip
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from anthropic import AsyncAnthropic
from anthropic import BadRequestError as AnthropicBadRequest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, BadRequestError

from turngate.proxy.simulator import Simulator, chat, messages, responses
from turngate.proxy.simulator.dialect import Dialect, Json, Refusal
from turngate.proxy.simulator.refusals_messages import Asked
from turngate.proxy.simulator.refusals_turns import model_version
from turngate.proxy.simulator.scenario import Server as Name
from turngate.proxy.simulator.servers import SERVERS

SHARED: Final = Path(os.environ.get("TURNGATE_SHARED") or Path(__file__).parents[2] / "shared")

SCHEMA: Final[Json] = {"type": "object", "properties": {}}


# Chat Completions.


def _say(role: str, content: object = "x", **more: object) -> Json:
    return {"role": role, "content": content, **more}


def _called(*ids: str, name: str = "f", arguments: object = "{}") -> Json:
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}} for id_ in ids
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _done(id_: str, content: object = "ok") -> Json:
    return {"role": "tool", "tool_call_id": id_, "content": content}


def _chat(*said: object, **more: object) -> Json:
    return {"messages": list(said), **more}


USER: Final = _say("user")
TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
IMAGE: Final = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
EMPTY: Final = "empty array. Expected an array with minimum length 1, but got an empty array instead."
ONLY: Final = "is only allowed when 'tools' are specified."

CHAT: Final[dict[str, tuple[Json, str, str, str | None]]] = {
    "no messages at all": (
        {},
        "Missing required parameter: 'messages'.",
        "messages",
        "missing_required_parameter",
    ),
    "empty messages": (_chat(), f"Invalid 'messages': {EMPTY}", "messages", "empty_array"),
    "empty tools": (_chat(USER, tools=[]), f"Invalid 'tools': {EMPTY}", "tools", "empty_array"),
    "empty calls": (
        _chat(USER, _say("assistant", tool_calls=[])),
        f"Invalid 'messages[1].tool_calls': {EMPTY}",
        "messages[1].tool_calls",
        "empty_array",
    ),
    "empty calls beside null": (
        _chat(USER, _say("assistant", None, tool_calls=[])),
        f"Invalid 'messages[1].tool_calls': {EMPTY}",
        "messages[1].tool_calls",
        "empty_array",
    ),
    "a choice without tools": (
        _chat(USER, tool_choice="auto"),
        f"Invalid value for 'tool_choice': 'tool_choice' {ONLY}",
        "tool_choice",
        None,
    ),
    "parallel calls without tools": (
        _chat(USER, parallel_tool_calls=False),
        f"Invalid value for 'parallel_tool_calls': 'parallel_tool_calls' {ONLY}",
        "parallel_tool_calls",
        None,
    ),
    "stream options without a stream": (
        _chat(USER, stream_options={"include_usage": True}),
        "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
        "stream_options",
        None,
    ),
    "a role that nobody has": (
        _chat(USER, _say("model")),
        (
            "Invalid value: 'model'. Supported values are: 'system', 'assistant', 'user', 'function', 'tool', and "
            "'developer'."
        ),
        "messages[1].role",
        "invalid_value",
    ),
    "no role": (
        _chat({"content": "x"}),
        "Missing required parameter: 'messages[0].role'.",
        "messages[0].role",
        "missing_required_parameter",
    ),
    "a function message without a name": (
        _chat(_say("function")),
        "Missing parameter 'name': messages with role 'function' must have a 'name'.",
        "messages.[0].name",
        None,
    ),
    "a part without a type": (
        _chat(_say("user", [{"text": "x"}])),
        "Missing required parameter: 'messages[0].content[0].type'.",
        "messages[0].content[0].type",
        "missing_required_parameter",
    ),
    "an image of the system": (
        _chat(_say("system", IMAGE)),
        (
            "Invalid 'messages[0]'. Image URLs are only allowed for messages with role 'user', but this message "
            "with role 'system' contains an image URL."
        ),
        "messages[0]",
        "invalid_value",
    ),
    "an assistant that says nothing": (
        _chat(USER, _say("assistant", None)),
        "Invalid value for 'content': expected a string, got null.",
        "messages.[1].content",
        None,
    ),
    "a result of null": (
        _chat(USER, _called("a"), _done("a", None)),
        "Invalid value for 'content': expected a string, got null.",
        "messages.[2].content",
        None,
    ),
    "an id of 41 characters": (
        _chat(USER, _called("a" * 41), _done("a" * 41)),
        (
            "Invalid 'messages[1].tool_calls[0].id': string too long. Expected a string with maximum length 40, "
            "but got a string with length 41 instead."
        ),
        "messages[1].tool_calls[0].id",
        "string_above_max_length",
    ),
    "a call without a name": (
        _chat(USER, _called("a", name=""), _done("a")),
        (
            "Invalid 'messages[1].tool_calls[0].function.name': empty string. Expected a string with minimum "
            "length 1, but got an empty string instead."
        ),
        "messages[1].tool_calls[0].function.name",
        "empty_string",
    ),
    "a name of 65 characters": (
        _chat(USER, tools=[{"type": "function", "function": {"name": "f" * 65}}]),
        (
            "Invalid 'tools[0].function.name': string too long. Expected a string with maximum length 64, "
            "but got a string with length 65 instead."
        ),
        "tools[0].function.name",
        "string_above_max_length",
    ),
    "a name with a space": (
        _chat(USER, tools=[{"type": "function", "function": {"name": "a b"}}]),
        (
            "Invalid 'tools[0].function.name': string does not match pattern. Expected a string that matches the "
            "pattern '^[a-zA-Z0-9_-]+$'."
        ),
        "tools[0].function.name",
        "invalid_value",
    ),
    "a result without a call": (
        _chat(USER, _done("a")),
        (
            "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with "
            "'tool_calls'."
        ),
        "messages.[1].role",
        None,
    ),
    "a result without an id": (
        _chat(USER, _called("a"), _say("tool")),
        "Missing parameter 'tool_call_id': messages with role 'tool' must have a 'tool_call_id'.",
        "messages.[2].tool_call_id",
        None,
    ),
    "a result of an unknown id": (
        _chat(USER, _called("a"), _done("b")),
        "Invalid parameter: 'tool_call_id' of 'b' not found in 'tool_calls' of previous message.",
        "messages.[2].tool_call_id",
        None,
    ),
    "a second result": (
        _chat(USER, _called("a"), _done("a"), _done("a")),
        "Invalid parameter: Duplicate value for 'tool_call_id' of 'a', in messages[2] and messages[3].",
        "messages.[3].tool_call_id",
        None,
    ),
    "two calls without a result": (
        _chat(USER, _called("a", "b", "c"), _done("b"), USER),
        (
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
            "'tool_call_id'. The following tool_call_ids did not have response messages: a, c"
        ),
        "messages.[3].role",
        None,
    ),
}


@pytest.mark.parametrize(("body", "message", "param", "code"), CHAT.values(), ids=CHAT)
def test_chat_is_refused_as_openai_does(body: Json, message: str, param: str, code: str | None) -> None:
    assert chat.refuse(body) == Refusal(message, param=param, code=code)


CHAT_LEGAL: Final[dict[str, Json]] = {
    "results in another order": _chat(USER, _called("a", "b"), _done("b"), _done("a"), USER),
    "an id again in a later turn": _chat(USER, _called("a"), _done("a"), _called("a"), _done("a")),
    "one id twice in a turn": _chat(USER, _called("a", "a"), _done("a")),
    "arguments that are no JSON": _chat(USER, _called("a", arguments="15 * 4"), _done("a")),
    "an id of 40 characters": _chat(USER, _called("a" * 40), _done("a" * 40)),
    "an assistant that says an empty string": _chat(USER, _say("assistant", ""), USER),
    "a refusal without content": _chat(USER, _say("assistant", None, refusal="no"), USER),
    "the assistant's last word": _chat(USER, _say("assistant")),
    "the system in between": _chat(USER, _say("assistant"), _say("developer"), USER, _say("system")),
    "parameters that are null": _chat(USER, tool_choice=None, parallel_tool_calls=None, stream_options=None),
    "a choice with tools": _chat(USER, tools=TOOLS, tool_choice="none", parallel_tool_calls=True),
    "stream options with a stream": _chat(USER, stream=True, stream_options={"include_usage": True}),
    "an image of the user": _chat(_say("user", IMAGE)),
}


@pytest.mark.parametrize("body", CHAT_LEGAL.values(), ids=CHAT_LEGAL)
def test_chat_passes_what_openai_takes(body: Json) -> None:
    assert chat.refuse(body) is None


# Messages.


def _use(id_: str, kind: str = "tool_use", name: str = "f", **more: object) -> Json:
    return {"type": kind, "id": id_, "name": name, "input": {}, **more}


def _result(id_: str, content: object = "ok", kind: str = "tool_result") -> Json:
    return {"type": kind, "tool_use_id": id_, "content": content}


def _turns(*contents: tuple[str, object], **more: object) -> Json:
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return {"messages": [{"role": roles[role], "content": content} for role, content in contents], **more}


def _text(text: str, **more: object) -> Json:
    return {"type": "text", "text": text, **more}


TEXT: Final = _text("t")
MARK: Final = {"cache_control": {"type": "ephemeral"}}
MARKED: Final = _text("t", **MARK)
THOUGHT: Final = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
MANUAL: Final = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
SEARCH: Final = _use("srvtoolu_1", "server_tool_use", "web_search")
FOUND: Final = _result("srvtoolu_1", [], "web_search_tool_result")
SEARCHABLE: Final[Json] = {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}
CONTINUED: Final[Json] = {"thread": {"type": "continue", "previous_message_id": "msg_1"}}
COMPACTED: Final = {"type": "compaction", "content": "so far"}
ADDED: Final = {"type": "tool_addition", "tool": {"type": "tool_reference", "tool_name": "f"}}


def _tool(**changes: object) -> Json:
    return {"name": "f", "input_schema": SCHEMA} | changes


UNANSWERED: Final = "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: "
ORPHAN: Final = "messages.{}.content.{}: unexpected `tool_use_id` found in `tool_result` blocks: "
DUPLICATE: Final = "messages.{}.content.{}: each tool_use must have a single result."
OPEN: Final = (
    "messages.1: `web_search` tool use with id `srvtoolu_1` was found without a corresponding "
    "`web_search_tool_result` block"
)
FOLLOW: Final = "messages.{}: role 'system' must follow a 'user' message or an 'assistant' message ending in"

EDGES: Final[dict[str, tuple[Json, str | None]]] = {
    "result in the next message": (_turns(("u", "q"), ("a", [_use("a")]), ("u", [_result("a")])), None),
    "text after the result": (_turns(("u", "q"), ("a", [_use("a")]), ("u", [_result("a"), TEXT])), None),
    "text in the message after": (
        _turns(("u", "q"), ("a", [_use("a")]), ("u", [_result("a")]), ("u", "t")),
        None,
    ),
    "results over two messages, swapped": (
        _turns(("u", "q"), ("a", [_use("a"), _use("b")]), ("u", [_result("b")]), ("u", [_result("a"), TEXT])),
        None,
    ),
    "calls of neighbouring assistant messages": (
        _turns(("u", "q"), ("a", [_use("a")]), ("a", "more"), ("u", [_result("a")])),
        None,
    ),
    "one id in two turns": (
        _turns(("a", [_use("a")]), ("u", [_result("a")]), ("a", [_use("a")]), ("u", [_result("a")])),
        None,
    ),
    "a thread goes on with a result": (_turns(("u", [_result("a")]), **CONTINUED), None),
    "text instead of a result": (_turns(("u", "q"), ("a", [_use("a")]), ("u", "t")), UNANSWERED + "a. "),
    "text before the result": (
        _turns(("u", "q"), ("a", [_use("a")]), ("u", [TEXT, _result("a")])),
        UNANSWERED + "a. ",
    ),
    "text between results": (
        _turns(("u", "q"), ("a", [_use("a"), _use("b")]), ("u", [_result("a"), TEXT]), ("u", [_result("b")])),
        UNANSWERED + "b. ",
    ),
    "two open calls": (
        _turns(("u", "q"), ("a", [_use("a"), _use("b")]), ("u", "t")),
        UNANSWERED + "a, b. ",
    ),
    "an open call at the end": (_turns(("u", "q"), ("a", [_use("a")])), UNANSWERED + "a. "),
    "a result at the start": (_turns(("u", [_result("a")])), ORPHAN.format(0, 0) + "a. "),
    "a result of an earlier turn": (
        _turns(
            ("u", "q"), ("a", [_use("a")]), ("u", [_result("a")]), ("a", "t"), ("u", [TEXT, _result("a")])
        ),
        ORPHAN.format(4, 1) + "a. ",
    ),
    "two results for one call": (
        _turns(("u", "q"), ("a", [_use("a")]), ("u", [_result("a")]), ("u", [_result("a")])),
        DUPLICATE.format(3, 0),
    ),
    "two results in a continued thread": (
        _turns(("u", [_result("a"), _result("a")]), **CONTINUED),
        DUPLICATE.format(0, 1),
    ),
    "a create of a thread is no excuse": (
        _turns(("u", [_result("a")]), thread={"type": "create"}),
        ORPHAN.format(0, 0) + "a. ",
    ),
    "one id twice in a turn": (
        _turns(("u", "q"), ("a", [_use("a")]), ("a", [_use("a")]), ("u", [_result("a")])),
        "messages.2.content.0: `tool_use` ids must be unique",
    ),
}

SERVER_TOOLS: Final[dict[str, tuple[Json, str | None]]] = {
    "a result in the same message": (_turns(("u", "q"), ("a", [SEARCH, FOUND]), ("u", "q")), None),
    "a paused turn as it came": (_turns(("u", "q"), ("a", [SEARCH]), **SEARCHABLE), None),
    "a paused turn of a model without prefill": (
        _turns(("u", "q"), ("a", [SEARCH]), model="claude-opus-4-8", **SEARCHABLE),
        None,
    ),
    "a mixed turn with its client result": (
        _turns(("u", "q"), ("a", [_use("a"), SEARCH]), ("u", [_result("a")]), **SEARCHABLE),
        None,
    ),
    "a mixed turn as it came": (_turns(("u", "q"), ("a", [_use("a"), SEARCH]), **SEARCHABLE), None),
    "an open call to an MCP server": (
        _turns(("u", "q"), ("a", [_use("m", "mcp_tool_use", server_name="x"), TEXT]), ("u", "t")),
        None,
    ),
    "text after the results of a mixed turn": (
        _turns(("u", "q"), ("a", [_use("a"), SEARCH]), ("u", [_result("a"), TEXT]), **SEARCHABLE),
        OPEN,
    ),
    "an open call in an earlier turn": (
        _turns(("u", "q"), ("a", [SEARCH, TEXT]), ("u", "t"), ("a", "t"), ("u", "t"), **SEARCHABLE),
        OPEN,
    ),
    "an open call that the user talks over": (
        _turns(("u", "q"), ("a", [SEARCH]), ("u", "t"), **SEARCHABLE),
        OPEN,
    ),
    "a paused turn whose tool was dropped": (
        _turns(("u", "q"), ("a", [SEARCH])),
        OPEN + ", but no `web_search` tool was provided",
    ),
    "an open client call beside a finished server call": (
        _turns(("u", "q"), ("a", [SEARCH, FOUND, _use("a")])),
        UNANSWERED + "a. ",
    ),
    "an id of another form": (
        _turns(("u", "q"), ("a", [_use("toolu_1", "server_tool_use", "web_search")])),
        "messages.1.content.0.server_tool_use.id: String should match pattern '^srvtoolu_[a-zA-Z0-9_]+$'",
    ),
}

BLOCKS: Final[dict[str, tuple[Json, str | None]]] = {
    "no messages": ({"messages": []}, "messages: at least one message is required"),
    "messages missing": ({}, "messages: Field required"),
    "too many messages": ({"messages": [{}] * 100_001}, "messages: List should have at most 100000 items"),
    "a message that is none": ({"messages": ["q"]}, "messages.0: Input does not match the expected shape."),
    "an empty text block": (
        _turns(("u", "q"), ("a", [_text("")]), ("u", "q")),
        "messages: text content blocks must be non-empty",
    ),
    "an empty text block that is not the first": (
        _turns(("u", [TEXT, _text("")])),
        "messages: text content blocks must be non-empty",
    ),
    "a blank text block": (
        _turns(("u", [_text(" \n")])),
        "messages: text content blocks must contain non-whitespace text",
    ),
    "blank text": (_turns(("u", " ")), "messages: text content blocks must contain non-whitespace text"),
    "a blank text block of the assistant": (_turns(("u", "q"), ("a", [_text("\n")]), ("u", "q")), None),
    "an empty user message": (_turns(("u", "")), "messages.0: user messages must have non-empty content"),
    "an empty list of the user": (_turns(("u", [])), "messages.0: user messages must have non-empty content"),
    "an empty assistant message": (_turns(("u", "q"), ("a", ""), ("u", "q"), ("a", []), ("u", "q")), None),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
    "a marked empty text block": (
        _turns(("u", [_text("", **MARK)])),
        "messages.0.content.0.text: cache_control cannot be set for empty text blocks",
    ),
    "a marked empty system block": (
        _turns(("u", "q"), system=[_text("", **MARK)]),
        "system.0: cache_control cannot be set for empty text blocks",
    ),
    "four marks": (_turns(("u", [MARKED, MARKED]), system=[MARKED], tools=[_tool(**MARK)]), None),
    "five marks": (
        _turns(("u", [MARKED, MARKED]), system=[MARKED], tools=[_tool(**MARK)], **MARK),
        "A maximum of 4 blocks with cache_control may be provided. Found 5.",
    ),
    "a bad id": (
        _turns(("u", "q"), ("a", [_use("a|b")]), ("u", [_result("a|b")])),
        "messages.1.content.0.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'",
    ),
    "an empty id": (
        _turns(("u", "q"), ("a", [_use("")]), ("u", [_result("")])),
        "messages.1.content.0.tool_use.id: String should match pattern",
    ),
    "an id with a line end": (
        _turns(("u", "q"), ("a", [_use("a\n")]), ("u", [_result("a\n")])),
        "messages.1.content.0.tool_use.id: String should match pattern",
    ),
    "input that is an array": (
        _turns(("u", "q"), ("a", [_use("a") | {"input": []}]), ("u", [_result("a")])),
        "messages.1.content.0.tool_use.input: Input should be an object",
    ),
    "a result without an id": (
        _turns(("u", "q"), ("a", [_use("a")]), ("u", [{"type": "tool_result"}])),
        "messages.2.content.0.tool_result.tool_use_id: Field required",
    ),
    "a result of the assistant": (
        _turns(("u", "q"), ("a", [_result("a")])),
        "messages.1: `tool_result` blocks can only be in `user` messages",
    ),
    "a call of the user": (
        _turns(("u", [_use("a")])),
        "messages.0: `tool_use` blocks can only be in `assistant` messages",
    ),
    "a block of no kind": (
        _turns(("u", [{"type": "poem"}])),
        "messages.0.content.0: Input tag 'poem' found using 'type' does not match any of the expected tags: ",
    ),
    "a block without a type": (_turns(("u", [{}])), "messages.0.content.0.type: Field required"),
    "an unknown parameter": (_turns(("u", "q"), n=1), "n: Extra inputs are not permitted"),
    "a choice that is a string": (
        _turns(("u", "q"), tools=[_tool()], tool_choice="auto"),
        "tool_choice: Input should be an object",
    ),
    "a model that is not to be forced": (
        _turns(("u", "q"), model="claude-opus-5-5", tools=[_tool()], tool_choice={"type": "any"}),
        'tool_choice: type "tool" and "any" are not supported for this model.',
    ),
    "a model that may be": (
        _turns(("u", "q"), model="claude-opus-4-8", tools=[_tool()], tool_choice={"type": "any"}),
        None,
    ),
    "a tool's name with a space": (
        _turns(("u", "q"), tools=[_tool(name="a b")]),
        "tools.0.custom.name: String should match pattern '^[a-zA-Z0-9_-]{1,128}$'",
    ),
    "a tool without a schema": (
        _turns(("u", "q"), tools=[{"name": "f"}]),
        "tools.0.custom.input_schema: Field required",
    ),
    "a schema that is none": (
        _turns(("u", "q"), tools=[_tool(input_schema=True)]),
        "tools.0.custom.input_schema: Input does not match the expected shape.",
    ),
    "a schema without a type": (
        _turns(("u", "q"), tools=[_tool(input_schema={})]),
        "tools.0.custom.input_schema.type: Field required",
    ),
    "a schema of a string": (
        _turns(("u", "q"), tools=[_tool(input_schema={"type": "string"})]),
        "tools.0.custom.input_schema.type: Input should be 'object'",
    ),
    "two tools of one name": (
        _turns(("u", "q"), tools=[_tool(), _tool()]),
        "tools: Tool names must be unique.",
    ),
}

PLACES: Final[dict[str, tuple[Json, str | None]]] = {
    "the system at the end": (_turns(("u", "q"), ("s", "x")), None),
    "the system after the results": (
        _turns(("u", "q"), ("a", [_use("a")]), ("u", [_result("a")]), ("s", "be brief")),
        None,
    ),
    "the system twice": (_turns(("u", "q"), ("s", "x"), ("s", "y"), ("a", "t"), ("u", "q")), None),
    "the system after a server tool's result": (
        _turns(("u", "q"), ("a", [SEARCH, FOUND]), ("s", "x"), model="claude-opus-4-8"),
        None,
    ),
    "the system at the start": (
        _turns(("s", "x"), ("u", "q")),
        (
            "messages.0: use the top-level 'system' parameter for the initial system prompt; the directive-only "
            "form (content: [] with output_config) is accepted at any position"
        ),
    ),
    "directives at the start": (
        {
            "messages": [
                {"role": "system", "content": [], "output_config": {}},
                *_turns(("u", "q"))["messages"],
            ]
        },
        None,
    ),
    "the system after the assistant": (
        _turns(("u", "q"), ("a", "t"), ("s", "x"), ("u", "q")),
        FOLLOW.format(2),
    ),
    "the system before a result": (
        _turns(("u", "q"), ("a", [_use("a")]), ("s", "x"), ("u", [_result("a")])),
        FOLLOW.format(2),
    ),
    "the system before the user": (
        _turns(("u", "q"), ("s", "x"), ("u", "q")),
        "messages.1: role 'system' must precede an 'assistant' message or end the array",
    ),
    "the system without a word": (
        _turns(("u", "q"), ("s", [])),
        "messages.1: system content must contain at least one block",
    ),
    "the system with a picture": (
        _turns(("u", "q"), ("s", [{"type": "image", "source": {}}])),
        "messages.1: role 'system' supports text, tool_addition, and tool_removal blocks only",
    ),
    "a system message for a turn with a tool": (
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "system", "content": [ADDED], "clear_at": "next_user_message"},
            ],
            "tools": [_tool()],
        },
        "messages.1: a turn-scoped system message supports text blocks only (clear_at: 'next_user_message')",
    ),
    "the system of an older model": (
        _turns(("u", "q"), ("s", "x"), model="claude-sonnet-4-5"),
        (
            'messages: Unexpected role "system". The Messages API accepts a top-level `system` parameter, not '
            '"system" as an input message role.'
        ),
    ),
    "a role that nobody has": (
        {"messages": [{"role": "tool", "content": "x"}]},
        'messages: Unexpected role "tool".',
    ),
    "an added tool that is declared": (_turns(("u", "q"), ("s", [ADDED]), tools=[_tool()]), None),
    "an added tool that is not": (
        _turns(("u", "q"), ("s", [ADDED])),
        "messages.1.content.0: no tool named 'f' is declared",
    ),
    "an added tool of a thread that goes on": (_turns(("u", "q"), ("s", [ADDED]), **CONTINUED), None),
    "a compaction at the start": (_turns(("a", [COMPACTED]), ("u", "q")), None),
    "a compaction further on": (
        _turns(("u", [TEXT, COMPACTED])),
        "messages.0.content.1: `compaction` must be the first block of the conversation",
    ),
    "a compaction of the system": (
        _turns(("u", "q"), ("s", [COMPACTED])),
        "messages.1.content.0: `compaction` must be the first block of the conversation",
    ),
    "two compactions": (
        _turns(("u", [COMPACTED]), ("a", [COMPACTED]), ("u", "q")),
        "messages: only one `compaction` block may have content",
    ),
    "an empty compaction": (
        _turns(("u", [COMPACTED | {"content": ""}, TEXT])),
        "messages.0.content.0.compaction.content: String should have at least 1 character",
    ),
}

ENDINGS: Final[dict[str, tuple[Json, str | None]]] = {
    "a prefill of an older model": (_turns(("u", "q"), ("a", "{"), model="claude-sonnet-4-5"), None),
    "a prefill of a model that nobody knows": (_turns(("u", "q"), ("a", "{"), model="m"), None),
    "a prefill of a newer model": (
        _turns(("u", "q"), ("a", "{"), model="claude-sonnet-5"),
        "This model does not support assistant message prefill. The conversation must end with a user message.",
    ),
    "a retry with a credit": (
        _turns(("u", "q"), ("a", "{"), model="claude-sonnet-5", fallback_credit_token="t"),
        None,
    ),
    "a prefill with a space at its end": (
        _turns(("u", "q"), ("a", "so ")),
        "messages: final assistant content cannot end with trailing whitespace",
    ),
    "a prefill that ends in thought": (
        _turns(("u", "q"), ("a", [THOUGHT]), **MANUAL),
        "messages.1: The final block in an assistant message cannot be `thinking`.",
    ),
    "a thought at the end while thinking is off": (
        _turns(("u", "q"), ("a", [THOUGHT, TEXT])),
        (
            "messages.1.content.0: When thinking is disabled, an `assistant` message in the final position cannot "
            "contain `thinking`"
        ),
    ),
    "a thought earlier while thinking is off": (_turns(("u", "q"), ("a", [THOUGHT, TEXT]), ("u", "q")), None),
    "a thought after text": (
        _turns(("u", "q"), ("a", [TEXT, THOUGHT, TEXT]), ("u", "q")),
        (
            "messages.1.content.0.type: If an assistant message contains any thinking blocks, the first block must "
            "be thinking or redacted_thinking. Found text."
        ),
    ),
    "a thought without a signature": (
        _turns(("u", "q"), ("a", [THOUGHT | {"signature": ""}, TEXT]), ("u", "q")),
        "messages.1.content.0: Invalid `signature` in `thinking` block",
    ),
    "a call after a thought": (
        _turns(("u", "q"), ("a", [THOUGHT, _use("a")]), ("u", [_result("a")]), **MANUAL),
        None,
    ),
    "a thought at the start of the loop": (
        _turns(
            *(("u", "q"), ("a", [THOUGHT, _use("a")]), ("u", [_result("a")])),
            *(("a", [_use("b")]), ("u", [_result("b")])),
            **MANUAL,
        ),
        None,
    ),
    "a call without a thought": (
        _turns(("u", "q"), ("a", [_use("a")]), ("u", [_result("a")]), **MANUAL),
        (
            "messages.1.content.0.type: Expected `thinking` or `redacted_thinking`, but found `tool_use`. When "
            "`thinking` is enabled, a final `assistant` message must start with a thinking block"
        ),
    ),
    "a call without a thought in an earlier turn": (
        _turns(("u", "q"), ("a", [_use("a")]), ("u", [_result("a")]), ("a", "t"), ("u", "q"), **MANUAL),
        None,
    ),
    "sampling of an older model": (_turns(("u", "q"), model="claude-sonnet-4-6", temperature=0.2), None),
    "sampling of a newer model": (
        _turns(("u", "q"), model="claude-opus-4-8", temperature=0.2),
        "`temperature` is deprecated for this model",
    ),
    "the default of a newer model": (_turns(("u", "q"), model="claude-opus-4-8", temperature=1), None),
}

MESSAGES: Final = EDGES | SERVER_TOOLS | BLOCKS | PLACES | ENDINGS


def test_no_two_cases_have_one_name() -> None:
    assert len(MESSAGES) == sum(map(len, (EDGES, SERVER_TOOLS, BLOCKS, PLACES, ENDINGS)))


@pytest.mark.parametrize(("body", "message"), MESSAGES.values(), ids=MESSAGES)
def test_messages_are_refused_as_anthropic_does(body: Json, message: str | None) -> None:
    refusal = messages.refuse(body)
    assert (refusal and refusal.message[: len(message or "")]) == message


CODES: Final = {
    "two compactions": "compaction_block_ambiguous",
    "a compaction further on": "compaction_block_misplaced",
    "an added tool that is not": "tool_reference_unresolved",
    "two tools of one name": "tool_name_conflict",
    "an empty text block": None,
}


@pytest.mark.parametrize(("case", "code"), CODES.items(), ids=CODES)
def test_documented_codes_come_along(case: str, code: str | None) -> None:
    refusal = messages.refuse(MESSAGES[case][0])
    assert refusal is not None
    assert (refusal.code, refusal.type, refusal.status) == (code, "invalid_request_error", 400)


FALLBACK: Final = _turns(("u", "q"), ("a", [{"type": "fallback", "from": {}, "to": {}}, TEXT]), ("u", "q"))
DOCUMENT: Final = _turns(("u", "q"), ("a", [{"type": "document", "source": {}}]), ("u", "q"))
CITED: Final = _turns(("u", [TEXT | {"citations": [{}]}]))
NEW: Final = Asked(version="2026-10-21")
OLD: Final = Asked(version="2023-06-01")

HEADERS: Final[dict[str, tuple[Json, Asked, str | None]]] = {
    "a beta's block without the beta": (FALLBACK, OLD, "Input tag 'fallback' found using 'type' does not"),
    "a beta's block with it": (FALLBACK, Asked(betas="x,server-side-fallback-2026-07-01"), None),
    "a document of the assistant": (DOCUMENT, OLD, None),
    "a document of the assistant in the new version": (DOCUMENT, NEW, "messages.1: `document` blocks"),
    "the new version in the body": (DOCUMENT | {"anthropic_version": "2026-10-21"}, OLD, "`document` blocks"),
    "citations of the user": (CITED, OLD, None),
    "citations of the user in the new version": (CITED, NEW, "messages.0.content.0.text.citations: "),
    "sampling": (_turns(("u", "q"), top_k=4), OLD, None),
    "sampling in the new version": (_turns(("u", "q"), top_k=4), NEW, "`top_k` is deprecated"),
}


@pytest.mark.parametrize(("body", "asked", "message"), HEADERS.values(), ids=HEADERS)
def test_headers_change_what_is_refused(body: Json, asked: Asked, message: str | None) -> None:
    refusal = messages.refuse(body, asked)
    assert (refusal is None) if message is None else (refusal is not None and message in refusal.message)


VERSIONS: Final = {
    "claude-opus-4-8": (4, 8),
    "claude-sonnet-4-20250514": (4, 0),
    "claude-3-5-haiku-20241022": (3, 5),
    "us.anthropic.claude-sonnet-4-5-20250929-v1:0": (4, 5),
    "claude-sonnet-5": (5, 0),
    "claude-opus-4.6": (4, 6),
    "claude-mythos-preview": None,
    "m": None,
}


def test_a_models_name_tells_its_version() -> None:
    assert {model: model_version(model) for model in VERSIONS} == VERSIONS


# Servers.


def judge(server: Name, dialect: Dialect, body: Json, headers: Mapping[str, str]) -> Refusal | None:
    named = {name.lower(): value for name, value in headers.items()}
    asked = Asked(named.get("anthropic-version", ""), named.get("anthropic-beta", ""))
    return SERVERS[server].refuse(dialect, body, asked)


A, B = "aaaaaaaaa", "bbbbbbbbb"
PAIR: Final = (USER, _called(A), _done(A))
DUPLICATED: Final = "Duplicate value for 'tool_call_id' of a in message[{}]"
INVALID: Final = "invalid_request_error"
ORDER: Final = "invalid_request_message_order"
REASONED: Final = _called("a") | {"reasoning_content": ""}
ALTERNATE: Final = "conversation roles must alternate user/assistant/user/assistant/..."

OTHERS: Final[dict[str, tuple[Json, str | None]]] = {
    "deepseek: a result without a call": (
        _chat(USER, _done("a")),
        "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'",
    ),
    "deepseek: an open call": (
        _chat(USER, _called("a", "b"), _done("a"), USER),
        "(insufficient tool messages following tool_calls message)",
    ),
    "deepseek: a second result": (_chat(USER, _called("a"), _done("a"), _done("a")), DUPLICATED.format(3)),
    "deepseek: one id twice in a turn": (
        _chat(USER, _called("a", "a"), _done("a"), USER),
        DUPLICATED.format(1),
    ),
    "deepseek: one id twice in the last message": (
        _chat(USER, USER, _called("a", "a")),
        DUPLICATED.format(2),
    ),
    "deepseek: a role of others": (
        _chat(_say("developer"), USER),
        "messages[0].role: unknown variant `developer`, expected one of `system`",
    ),
    "deepseek: a picture": (
        _chat(_say("user", IMAGE)),
        "messages[0]: unknown variant `image_url`, expected `text`",
    ),
    "deepseek: reasoning left out": (
        _chat(USER, _called("a"), _done("a"), model="deepseek-v4-flash"),
        "The reasoning_content in the thinking mode must be passed back to the API.",
    ),
    "deepseek: reasoning that is empty": (
        _chat(USER, REASONED, _done("a"), thinking={"type": "enabled"}),
        None,
    ),
    "deepseek: no thinking, no reasoning": (
        _chat(USER, _called("a"), _done("a"), thinking={"type": "disabled"}),
        None,
    ),
    "deepseek: a model that does not think": (
        _chat(USER, _called("a"), _done("a"), model="deepseek-chat"),
        None,
    ),
    "mistral: a pair": (_chat(*PAIR), None),
    "mistral: the user after a tool": (_chat(*PAIR, USER), None),
    "mistral: empty calls": (_chat(USER, _say("assistant", tool_calls=[]), USER), None),
    "mistral: a prefix": (_chat(USER, _say("assistant", prefix=True)), None),
    "mistral: a foreign id": (
        _chat(USER, _called("call_1"), _done("call_1")),
        "Tool call id was call_1 but must be a-z, A-Z, 0-9, with a length of 9.",
    ),
    "mistral: a result with a foreign id": (
        _chat(USER, _called(A), _done("call_1")),
        "Tool call id was call_1 but must be a-z, A-Z, 0-9, with a length of 9.",
    ),
    "mistral: a bad name": (
        _chat(USER, _called(A, name="a b"), _done(A)),
        "Function name was a b but must be a-z, A-Z, 0-9, or contain underscores",
    ),
    "mistral: a tool after the user": (_chat(USER, _done(A)), "Unexpected role 'tool' after role 'user'"),
    "mistral: the developer after the assistant": (
        _chat(USER, _say("assistant"), _say("developer"), USER),
        "Unexpected role 'system' after role 'assistant'",
    ),
    "mistral: too few results": (
        _chat(USER, _called(A, B), _done(A)),
        "Not the same number of function calls and responses",
    ),
    "mistral: too many results": (
        _chat(*PAIR, _done(B)),
        "Not the same number of function calls and responses",
    ),
    "mistral: the result of another call": (
        _chat(USER, _called(A), _done(B)),
        f"Unexpected tool call id {B} in tool results",
    ),
    "mistral: one id twice": (
        _chat(USER, _called(A, A), _done(A), _done(A)),
        "Duplicate tool call id in assistant message",
    ),
    "mistral: two results of one id": (
        _chat(USER, _called(A, B), _done(A), _done(A)),
        "Duplicate tool call id in tool results",
    ),
    "mistral: the assistant's last word": (
        _chat(USER, _say("assistant")),
        "Expected last role User or Tool (or Assistant with prefix True) for serving but got assistant",
    ),
    "mistral: a prefix too early": (
        _chat(USER, _say("assistant", prefix=True), USER),
        "Assistant message with prefix True must be last message",
    ),
    "mistral: nothing": (_chat(), "Conversation must have at least one message"),
    "vllm: any sequence": (_chat(_done("a"), _called("b"), USER), None),
    "vllm: arguments that are empty": (_chat(_called("a", arguments="")), None),
    "vllm: arguments that are an object": (_chat(_called("a", arguments={})), None),
    "vllm: arguments cut off": (_chat(_called("a", arguments='{"a": "b')), "Unterminated string starting at"),
    "vllm: no tools": (_chat(USER, tools=[]), "`tools` must not be an empty array"),
    "vllm: a choice without tools": (
        _chat(USER, tool_choice="auto"),
        "When using `tool_choice`, `tools` must be set.",
    ),
    "vllm: stream options without a stream": (
        _chat(USER, stream_options={"include_usage": True}),
        "Stream options can only be defined when `stream=True`.",
    ),
    "vllm: the assistant goes on": (
        _chat(USER, _say("assistant"), continue_final_message=True, add_generation_prompt=False),
        None,
    ),
    "vllm: the assistant goes on and begins anew": (
        _chat(USER, _say("assistant"), continue_final_message=True),
        "continue_final_message",
    ),
    "vllm: two user messages and a strict template": (
        _chat(_say("system"), USER, USER, model="mistralai/Mistral-7B"),
        ALTERNATE,
    ),
    "vllm: a strict template kept": (
        _chat(_say("system"), USER, _say("assistant"), USER, model="mistralai/Mistral-7B"),
        None,
    ),
    "ollama: any sequence": (_chat(_done("a"), _called("b"), USER), None),
    "ollama: no content": (_chat(USER, _say("assistant", None)), "invalid message content type: <nil>"),
    "ollama: content that is a number": (_chat(_say("user", 1)), "invalid message content type: float64"),
    "ollama: arguments that are no object": (
        _chat(_called("a", arguments="[]")),
        "invalid tool call arguments",
    ),
    "ollama: arguments cut off": (_chat(_called("a", arguments='{"a')), "invalid tool call arguments"),
    "ollama: a picture elsewhere": (
        _chat(_say("user", [{"type": "image_url", "image_url": {"url": "https://x.y/z"}}])),
        "image URLs are not currently supported, please use base64 encoded data instead",
    ),
    "ollama: a picture in the body": (_chat(_say("user", [TEXT, *IMAGE])), None),
    "ollama: a part of no kind": (_chat(_say("user", [{"type": "poem"}])), "invalid message format"),
    "azure: as openai": (_chat(USER, _done("a")), "must be a response to a preceeding message"),
}
"""The server is the first word."""


@pytest.mark.parametrize(
    ("case", "body", "message"), [(case, *row) for case, row in OTHERS.items()], ids=OTHERS
)
def test_other_servers_refuse_in_their_own_words(case: str, body: Json, message: str | None) -> None:
    server = next(name for name in SERVERS if case.startswith(f"{name}: "))
    refusal = judge(server, chat, body, {})
    if message is None:
        assert refusal is None
    else:
        assert refusal is not None
        assert message in refusal.message
        assert (refusal.type, refusal.code, refusal.status) == (*kind(server, message), 400)


def kind(server: Name, message: str) -> tuple[str, str | None]:
    """The type and code of an error."""
    if server == "mistral":
        of_call = message.startswith(("Tool call id", "Function name"))
        return ("invalid_function_call", "3280") if of_call else (ORDER, "3230")
    return INVALID, INVALID if server == "deepseek" else None


THINKS: Final[Json] = {"thinking": {"type": "enabled"}}

DEEPSEEK_MESSAGES: Final[dict[str, tuple[Json, str | None]]] = {
    "the system in between": (
        _turns(("u", "q"), ("s", "x")),
        "messages[1].role: unknown variant `system`, expected `user` or `assistant`",
    ),
    "a call without its thought": (
        _turns(("u", "q"), ("a", [_use("a")]), ("u", [_result("a")]), **THINKS),
        "The `content[].thinking` in the thinking mode must be passed back to the API.",
    ),
    "a call with its thought": (
        _turns(("u", "q"), ("a", [THOUGHT, _use("a")]), ("u", [_result("a")]), **THINKS),
        None,
    ),
    "text without a thought": (_turns(("u", "q"), ("a", [TEXT]), ("u", "q"), **THINKS), None),
    "a call where nobody thinks": (_turns(("u", "q"), ("a", [_use("a")]), ("u", [_result("a")])), None),
}


@pytest.mark.parametrize(("body", "message"), DEEPSEEK_MESSAGES.values(), ids=DEEPSEEK_MESSAGES)
def test_deepseek_has_two_rules_of_its_own_for_messages(body: Json, message: str | None) -> None:
    refusal = judge("deepseek", messages, body, {})
    assert (refusal is None) if message is None else (refusal is not None and message in refusal.message)
    assert refusal is None or refusal.code is None


KEYS: Final = st.sampled_from(
    ["messages", "role", "content", "id", "type", "text", "name", "thread", "tool", "input", "prefix"]
)
TOOL_KEYS: Final = st.sampled_from(
    [
        "tools",
        "tool_calls",
        "function",
        "arguments",
        "input_schema",
        "tool_call_id",
        "tool_use_id",
        "image_url",
    ]
)
LEAVES: Final = (
    st.none()
    | st.integers()
    | st.sampled_from(["", "{", "user", "assistant", "system", "tool", "tool_use", "tool_result", "thinking"])
    | st.sampled_from(
        ["server_tool_use", "compaction", "tool_addition", "tool_reference", "image_url", "mistral"]
    )
)
VALUES: Final = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | TOOL_KEYS, inner, max_size=5),
    max_leaves=30,
)
SAID: Final = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": VALUES | st.lists(st.dictionaries(KEYS | TOOL_KEYS, VALUES, max_size=5), max_size=3),
    },
    optional={"tool_calls": VALUES, "tool_call_id": VALUES},
)
PARAMETERS: Final = st.sampled_from(
    ["messages", "tools", "tool_choice", "thread", "thinking", "model", "system"]
)


@given(st.dictionaries(PARAMETERS, VALUES), st.none() | st.lists(SAID, min_size=1, max_size=4))
@settings(deadline=None)
def test_any_json_object_is_judged_by_every_server_without_an_exception(
    body: Json, said: list[Json] | None
) -> None:
    body = body if said is None else body | {"messages": said}
    dialects: tuple[Dialect, ...] = (chat, messages, responses)
    for server in SERVERS.values():
        for dialect in dialects:
            refusal = server.refuse(dialect, body, NEW)
            assert refusal is None or json.dumps(server.error(dialect, refusal, 1))


# On the wire.


async def test_openai_reads_type_param_and_code() -> None:
    async with (
        Simulator() as simulator,
        AsyncOpenAI(base_url=simulator.url, api_key="k", max_retries=0) as client,
    ):
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[])
    assert (caught.value.type, caught.value.param, caught.value.code) == (INVALID, "messages", "empty_array")


async def test_anthropic_reads_the_code_in_the_details() -> None:
    twice: Any = MESSAGES["two compactions"][0]["messages"]
    async with (
        Simulator() as simulator,
        AsyncAnthropic(base_url=simulator.url, api_key="k", max_retries=0) as client,
    ):
        with pytest.raises(AnthropicBadRequest) as caught:
            await client.messages.create(model="m", max_tokens=9, messages=twice)
    assert caught.value.body == {
        "type": "error",
        "error": {
            "type": INVALID,
            "message": MESSAGES["two compactions"][1],
            "details": {"error_code": "compaction_block_ambiguous"},
        },
        "request_id": "req_sim000001",
    }


async def test_the_headers_of_a_request_are_looked_at() -> None:
    async with (
        Simulator() as simulator,
        AsyncAnthropic(base_url=simulator.url, api_key="k", max_retries=0) as client,
    ):
        body: Any = {"model": "m", "max_tokens": 9, **FALLBACK}
        beta = {"anthropic-beta": "server-side-fallback-2026-07-01"}
        await client.post("/v1/messages", body=body, cast_to=object, options={"headers": beta})
        with pytest.raises(AnthropicBadRequest, match="Input tag 'fallback'"):
            await client.post("/v1/messages", body=body, cast_to=object)


ENVELOPES: Final[dict[Name, Json]] = {
    "mistral": {
        "object": "error",
        "message": "Conversation must have at least one message",
        "type": ORDER,
        "param": None,
        "code": "3230",
    },
    "vllm": {
        "message": "`tools` must not be an empty array.",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    },
    "deepseek": {
        "message": f"Invalid 'messages': {EMPTY}",
        "type": INVALID,
        "param": "messages",
        "code": "empty_array",
    },
}


@pytest.mark.parametrize(("server", "error"), ENVELOPES.items(), ids=ENVELOPES)
async def test_a_server_has_its_own_shape_of_errors(server: Name, error: Json) -> None:
    async with (
        Simulator({"server": server}) as simulator,
        AsyncOpenAI(base_url=simulator.url, api_key="k", max_retries=0) as client,
    ):
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[], tools=[])
    # The SDK unwraps what lies under "error".
    assert caught.value.body == error


async def test_the_command_plays_the_server_it_is_told() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "turngate.proxy.simulator", "--server", "mistral"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        url = (await process.stdout.readline()).decode().split()[3]
        async with AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            with pytest.raises(BadRequestError, match="Conversation must have at least one message"):
                await client.chat.completions.create(model="m", messages=[])
    finally:
        process.kill()
        await process.wait()


# The provider documents.


def document(name: str) -> str:
    path = SHARED / "providers" / name
    if not path.is_file():
        pytest.skip(f"no provider document at {path}: set TURNGATE_SHARED")
    return path.read_text()


def chat_examples() -> Iterator[tuple[str, str, Json]]:
    """The marked examples: rule, verdict, body."""
    marked = r"^<!-- case: (\S+) (\w+)( request)? -->\n```json\n(.*?)^```$"
    for rule, verdict, whole, block in re.findall(
        marked, document("openai-chat.md"), re.MULTILINE | re.DOTALL
    ):
        value = json.loads(block)
        yield rule, verdict, value if whole else {"messages": value}


def test_chat_agrees_with_every_example_of_its_document() -> None:
    examples = list(chat_examples())
    judged = {(rule, verdict): chat.refuse(body) is not None for rule, verdict, body in examples}
    # The document calls this one refused elsewhere and doubtful at OpenAI.
    assert judged.pop(("CHAT-B06", "illegal")) is False
    assert judged == {(rule, verdict): verdict == "illegal" for rule, verdict in judged}
    assert len(judged) >= 20


REFUSED_BY: Final[Mapping[Name, frozenset[str]]] = {
    "azure": frozenset(["B01", "B02", "B03", "B04", "B05", "B08", "B09", "B20", "B22"]),
    # Of B22 no text is known, so it passes.
    "mistral": frozenset(["B01", "B02", "B03", "B04", "B05", "B06", "B08"]),
    # In B04 and B08 the call stays open.
    "deepseek": frozenset(["B01", "B02", "B03", "B04", "B05", "B06", "B08", "B22"]),
    "vllm": frozenset({"B12"}),
    "ollama": frozenset({"B12", "B20"}),
}
"""The matrix of the document of compatible servers: which examples that are not legal each refuses."""


@pytest.mark.parametrize(("server", "refused"), REFUSED_BY.items(), ids=REFUSED_BY)
def test_servers_differ_on_the_examples_as_the_matrix_says(server: Name, refused: frozenset[str]) -> None:
    judged: dict[str, set[str]] = {"illegal": set(), "legal": set(), "soft": set()}
    for rule, verdict, body in chat_examples():
        if server == "mistral":
            # Ids of its form: what is left is the rule of the example.
            body = json.loads(re.sub(r'"(?:c|call_)(\d)"', r'"abcdefgh\1"', json.dumps(body)))
        if server == "deepseek":
            body |= {"thinking": {"type": "disabled"}}
        if judge(server, chat, body, {}):
            judged[verdict].add(rule.removeprefix("CHAT-"))
    # DeepSeek reads text only, so it takes the picture nowhere.
    assert judged["legal"] == ({"B22"} if server == "deepseek" else set())
    assert judged["illegal"] | judged["soft"] == refused


def anthropic_examples() -> Iterator[tuple[str, bool, Json]]:
    """The examples in the document's shorthand: its line, whether it is legal, body."""
    text = document("anthropic-messages.md")
    opening = '{"role":"user","content":"q"},{"role":"assistant","content":[TU("toolu_1")]},'
    for line in re.findall(r"^(?:illegal|legal): .*$", text, re.MULTILINE):
        verdict, _, value = line.partition(":")
        said = re.sub(r"^… (.*)$", rf"[{opening}\1]", value.strip())
        said = re.sub(r"TU\((.*?)\)", r'{"type":"tool_use","id":\1,"name":"f","input":{}}', said)
        said = re.sub(r"TR\((.*?)\)", r'{"type":"tool_result","tool_use_id":\1,"content":"ok"}', said)
        yield line, verdict == "legal", {"messages": json.loads(said)}


def anthropic_shapes() -> Iterator[tuple[str, bool, Json]]:
    """The table of live results: `u │ a[TU1,TU2] │ u[TR1,text]`, status."""
    for shape, status in re.findall(
        r"^\| `(u │.*?)` \| (\d+)", document("anthropic-messages.md"), re.MULTILINE
    ):
        said = []
        for part in shape.split(" │ "):
            blocks = [_shorthand(kind) for kind in part[2:-1].split(",")] if "[" in part else "q"
            said.append((part[0], blocks))
        yield shape, status == "200", _turns(*said)


def _shorthand(kind: str) -> Json:
    if kind == "text":
        return TEXT
    return (_use if kind.startswith("TU") else _result)(f"toolu_{kind[2:]}")


def test_messages_agree_with_every_example_of_their_document() -> None:
    examples = [*anthropic_examples(), *anthropic_shapes()]
    assert len(examples) >= 13
    for place, legal, body in examples:
        assert (messages.refuse(body) is None, place) == (legal, place)


# The collected cases.

SERVED: Final[Mapping[str, Name]] = {
    "openai.chat": "openai",
    "azure.chat": "azure",
    "mistral.chat": "mistral",
    "anthropic.messages": "openai",
}
COMPATIBLE: Final[Mapping[str, Name]] = {
    "deepseek": "deepseek",
    "deepseek-anthropic": "deepseek",
    "vllm": "vllm",
    "ollama": "ollama",
}

UNDECIDABLE: Final = {
    "anthropic-thinking-block-edited": "only the provider knows what it signed",
    "deepseek-messages-plus-completion-over-context": "the simulator's models have no window",
    "openai-chat-tool-result-over-context": "the simulator's models have no window",
}
"""Refused by the provider for what a body does not show."""


def server_of(api: str, server: str | None) -> Name | None:
    """Who answers a case or a recording; None where it is nobody that the simulator plays."""
    if api in SERVED and server is None:
        return SERVED[api]
    return COMPATIBLE.get(server or "") if api in (*SERVED, "openai.compatible") else None


def test_every_collected_case_gets_the_providers_status_and_text() -> None:
    paths = sorted((SHARED / "cases").glob("*.json"))
    if not paths:
        pytest.skip(f"no cases in {SHARED / 'cases'}: set TURNGATE_SHARED")
    judged = refused = 0
    for path in paths:
        case = json.loads(path.read_text())
        expected, request = case["expect"], case["request"]
        server = server_of(case["api"], case.get("server"))
        if server is None or expected.get("provider_status") is None or path.stem in UNDECIDABLE:
            continue
        dialect: Dialect = messages if case["api"] == "anthropic.messages" else chat
        refusal = judge(server, dialect, request["body"], request["headers"])
        judged += 1
        assert (refusal.status if refusal else 200, path.name) == (expected["provider_status"], path.name)
        if refusal is not None:
            refused += 1
            assert expected["provider_error"] in refusal.message
    assert (judged >= 60, refused >= 35) == (True, True)


# Recorded traffic.

DEVIATIONS: Final = {"ddpy-132": "OLD: an id that did not match, taken in 2024 and never since"}
"""Accepted, and refused here all the same: marked so in the analysis of the recordings."""


def recordings() -> Iterator[Json]:
    path = SHARED / "traffic" / "dev.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no recordings at {path}: set TURNGATE_SHARED")
    with gzip.open(path, "rt") as lines:
        yield from map(json.loads, lines)


def judged_recordings() -> Iterator[tuple[str, Json, Refusal | None]]:
    for recorded in recordings():
        body, server = recorded["request"]["body"], SERVED.get(recorded["api"])
        if recorded["host"] == "api.deepseek.com" and recorded["api"] == "openai.compatible":
            server = "deepseek"
        # Bodies without messages are of an API that came before.
        if server is None or not isinstance(body, dict) or "messages" not in body:
            continue
        if server == "mistral":
            # One recorder replaced ids by longer ones.
            body = json.loads(re.sub(r"call_REDACTED_(\d)\b", r"REDACTED\1", json.dumps(body)))
        dialect: Dialect = messages if recorded["api"] == "anthropic.messages" else chat
        headers = {name: str(value) for name, value in (recorded["request"]["headers"] or {}).items()}
        yield recorded["id"], recorded["response"], judge(server, dialect, body, headers)


SAME_TEXT: Final = frozenset(
    {
        "rig-395",
        "rig-400",
        "rig-423",
        "rig-761",
        "rig-762",
        "rig-765",
        "ddpy-117",
        "activeagent-57",
        "crewai-871",
        "envoyai-10",
    }
)
"""Recorded refusals that the simulator repeats word for word."""


def test_what_providers_took_is_taken_and_what_they_said_is_said() -> None:
    accepted, wrong, repeated = 0, {}, set()
    for id_, response, refusal in judged_recordings():
        if response["status"] < 300:
            accepted += 1
            if refusal is not None:
                wrong[id_] = refusal.message
        elif refusal is not None and json.dumps(refusal.message)[1:-1] in str(response["body"]):
            repeated.add(id_)
    assert wrong.keys() == DEVIATIONS.keys(), wrong
    assert repeated >= SAME_TEXT
    assert accepted > 2000
