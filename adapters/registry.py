"""Which dialect a request speaks: by its path on the wire, by its body where only a body is at hand."""

from typing import Final

import orjson

from turngate.adapters.anthropic_messages import AnthropicMessages
from turngate.adapters.dialect import Dialect, Undecodable
from turngate.adapters.openai_chat import OpenAIChat

CHAT: Final = OpenAIChat()
MESSAGES: Final = AnthropicMessages()

DIALECTS: Final[dict[str, Dialect]] = {dialect.api: dialect for dialect in (CHAT, MESSAGES)}
"""By the name used in settings, metrics and commands."""


_CLAUDE_MODEL: Final = "a Claude model with max_tokens"
_NOTHING_AGAINST: Final = "nothing that speaks against Chat Completions"
ONLY_LIKELY: Final = frozenset({_CLAUDE_MODEL, _NOTHING_AGAINST})
"""The guesses of `by_body` that rest on custom; what the others rest on occurs in no other dialect."""


def by_path(method: str, path: str) -> Dialect | None:
    """The dialect of a generation call, or None for everything that is only relayed. `path` without its query."""
    if method != "POST":
        return None
    if path.endswith("/chat/completions"):
        return CHAT
    # Anthropic's token count and batches live below this path and generate nothing.
    return MESSAGES if path.endswith("/messages") else None


_UNCOVERED: Final = (
    ("/responses", "openai.responses"),
    ("/realtime", "openai.realtime"),
    ("/api/chat", "ollama.chat"),
    ("/api/generate", "ollama.generate"),
    (":generateContent", "gemini.generate"),
    (":streamGenerateContent", "gemini.generate"),
    ("/converse", "bedrock.converse"),
    ("/converse-stream", "bedrock.converse"),
    ("/invoke", "bedrock.invoke"),
    ("/invoke-with-response-stream", "bedrock.invoke"),
    (":rawPredict", "vertex.predict"),
    (":streamRawPredict", "vertex.predict"),
    ("/batches", "batches"),
)


def uncovered(method: str, path: str, *, upgrades: bool) -> str:
    """The name of a generation surface that has no dialect yet, "" for anything else. `path` without its query."""
    if method != "POST" and not upgrades:  # a WebSocket begins with a GET
        return ""
    return next((surface for suffix, surface in _UNCOVERED if path.endswith(suffix)), "")


def by_body(body: bytes) -> tuple[Dialect, str]:
    """Guess the dialect of a request body; also says what the guess rests on. Raises Undecodable.

    Both dialects have `messages` and `model`, so marks that only one of them has decide: typed blocks, top-level
    `system`, `max_tokens` as a required field, roles and fields of the other.
    """
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Undecodable(str(error)) from error
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise Undecodable('no list "messages" at the top level')
    messages = [message for message in request["messages"] if isinstance(message, dict)]
    if any(
        message.get("role") in ("tool", "developer", "function") or "tool_calls" in message
        for message in messages
    ):
        return CHAT, "a role or field that only Chat Completions has"
    blocks = [
        block
        for message in messages
        if isinstance(message.get("content"), list)
        for block in message["content"]
        if isinstance(block, dict)
    ]
    if any(
        block.get("type") in ("tool_use", "tool_result", "thinking", "server_tool_use") for block in blocks
    ):
        return MESSAGES, "a block type that only Messages has"
    if "system" in request or "thread" in request or "anthropic_version" in request:
        return MESSAGES, "a top-level field that only Messages has"
    tools = request.get("tools")
    if isinstance(tools, list) and any(isinstance(tool, dict) and "input_schema" in tool for tool in tools):
        return MESSAGES, "a tool definition in Messages' form"
    if "max_tokens" in request and str(request.get("model", "")).startswith("claude"):
        return MESSAGES, _CLAUDE_MODEL
    return CHAT, _NOTHING_AGAINST
