"""What Anthropic refuses at Messages, in its words: parameters, roles, blocks. `refusals_turns` has the rest.

What depends on the model is asked of its name; a name without a version is taken for a model without limits.
Where the provider's own text is not known, that of its validator for such cases stands.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from turngate.proxy.simulator import refusals_turns
from turngate.proxy.simulator.dialect import Json, Refusal, mapping, objects, string

MESSAGES_MAX: Final = 100_000
CACHE_MARKS_MAX: Final = 4

_OWN: Final = """model max_tokens messages system tools tool_choice stream stop_sequences thinking metadata container
    output_config cache_control diagnostics service_tier speed inference_geo temperature top_p top_k"""
# Which beta brings which of these is not documented well enough to ask for its header.
_BETA: Final = """thread compaction context_management mcp_servers fallbacks fallback_credit_token billing_policy
    output_format"""
# Clouds take the headers' values from the body.
_CLOUD: Final = "anthropic_version anthropic_beta"
PARAMETERS: Final = frozenset(f"{_OWN} {_BETA} {_CLOUD}".split())

FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "text": ("text",),
    "image": ("source",),
    "document": ("source",),
    "search_result": ("source", "title", "content"),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": ("data",),
    "server_tool_use": ("id", "name", "input"),
    "web_search_tool_result": ("tool_use_id", "content"),
    "web_fetch_tool_result": ("tool_use_id", "content"),
    "code_execution_tool_result": ("tool_use_id", "content"),
    "bash_code_execution_tool_result": ("tool_use_id", "content"),
    "text_editor_code_execution_tool_result": ("tool_use_id", "content"),
    "tool_search_tool_result": ("tool_use_id", "content"),
    "container_upload": ("file_id",),
    "mcp_tool_use": ("id", "name", "server_name", "input"),
    "mcp_tool_result": ("tool_use_id",),
    "mcp_tool_listing": ("mcp_server_name", "tools"),
    "advisor_tool_result": ("tool_use_id", "content"),
    "compaction": (),
    "fallback": ("from", "to"),
    "tool_addition": ("tool",),
    "tool_removal": ("tool",),
    # Named in the documents only; what it holds is not known.
    "connector_text": (),
}
"""The kinds of blocks, with what each must have."""

PATTERNS: Final[Mapping[str, str]] = {
    "tool_use": "^[a-zA-Z0-9_-]+$",
    "server_tool_use": "^srvtoolu_[a-zA-Z0-9_]+$",
}
"""What the id of a call looks like."""

TOOL_NAME: Final = "^[a-zA-Z0-9_-]{1,128}$"

HOMES: Final[Mapping[str, str]] = {"tool_result": "user", "tool_use": "assistant"}

SYSTEM_KINDS: Final = ("text", "tool_addition", "tool_removal")

UNFORCEABLE: Final = re.compile(r"opus-5-5|fable-5-1|mythos-5-1")
"""Models that choose their tools themselves."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the headers of a request say."""

    version: str = ""
    betas: str = ""
    """As sent, a list with commas."""


def refuse(body: Json, asked: Asked = Asked()) -> Refusal | None:
    return (
        _no_messages(body)
        or _bad_parameter(body)
        or _bad_tool(body)
        or _bad_messages(body, asked)
        or _too_many_cache_marks(body)
        or refusals_turns.refuse(body)
        or _too_new(body, asked)
    )


def _no_messages(body: Json) -> Refusal | None:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return Refusal("messages: Field required")
    if not messages:
        return Refusal("messages: at least one message is required")
    if len(messages) > MESSAGES_MAX:
        return Refusal(
            f"messages: List should have at most {MESSAGES_MAX} items after validation, not {len(messages)}"
        )
    return None


def _bad_parameter(body: Json) -> Refusal | None:
    if unknown := [key for key in body if key not in PARAMETERS]:
        return Refusal(f"{unknown[0]}: Extra inputs are not permitted")
    choice = body.get("tool_choice")
    if choice is not None and not isinstance(choice, dict):
        return Refusal("tool_choice: Input should be an object")
    forced = mapping(choice).get("type") in ("tool", "any")
    if forced and UNFORCEABLE.search(string(body.get("model"))):
        return Refusal('tool_choice: type "tool" and "any" are not supported for this model.')
    return None


def _bad_tool(body: Json) -> Refusal | None:
    seen: set[str] = set()
    for at, tool in enumerate(objects(body.get("tools"))):
        name = string(tool.get("name"))
        if name and name in seen:
            return Refusal("tools: Tool names must be unique.", code="tool_name_conflict")
        seen.add(name)
        if tool.get("type") in (None, "custom") and (fault := _custom_tool(tool)):
            return Refusal(f"tools.{at}.custom.{fault}")
    return None


def _custom_tool(tool: Json) -> str | None:
    """The fault of a tool that the client runs; typed tools are the provider's own, and their fields its affair."""
    for key in ("name", "input_schema"):
        if key not in tool:
            return f"{key}: Field required"
    if not _matches(tool["name"], TOOL_NAME):
        return f"name: String should match pattern '{TOOL_NAME}'"
    if not isinstance(tool["input_schema"], dict):
        return "input_schema: Input does not match the expected shape."
    kind = tool["input_schema"].get("type")
    if kind is None:
        return "input_schema.type: Field required"
    return None if kind == "object" else "input_schema.type: Input should be 'object'"


def _matches(value: object, pattern: str) -> bool:
    # `$` would let a line end pass.
    return re.fullmatch(pattern.rstrip("$"), string(value)) is not None


# Messages and their blocks.


def _bad_messages(body: Json, asked: Asked) -> Refusal | None:
    for at, message in enumerate(body["messages"]):
        if not isinstance(message, dict):
            return Refusal(f"messages.{at}: Input does not match the expected shape.")
        if refusal := _bad_role(message) or _bad_content(message, at) or _bad_blocks(message, at, asked):
            return refusal
    return None


def _bad_role(message: Json) -> Refusal | None:
    role = message.get("role")
    if role in ("user", "assistant", "system"):
        return None
    return Refusal(f'messages: Unexpected role "{role}". Allowed roles are "user" or "assistant"')


def _bad_content(message: Json, at: int) -> Refusal | None:
    content = message.get("content")
    if content is None:
        return Refusal(f"messages.{at}.content: Field required")
    match message["role"]:
        case "user" if content in ("", []):
            return Refusal(f"messages.{at}: user messages must have non-empty content")
        case "user" if isinstance(content, str) and not content.strip():
            return Refusal(BLANK)
        # Directives without content are allowed at any place.
        case "system" if content in ("", []) and "output_config" not in message:
            return Refusal(f"messages.{at}: system content must contain at least one block")
    return None


BLANK: Final = "messages: text content blocks must contain non-whitespace text"


def _bad_blocks(message: Json, at: int, asked: Asked) -> Refusal | None:
    for number, block in enumerate(objects(message["content"])):
        place = f"messages.{at}.content.{number}"
        refusal = (
            _bad_kind(block, place, asked)
            or _misplaced(block, message, at)
            or _bad_fields(block, place)
            or _bad_text(block, message["role"], place)
        )
        if refusal:
            return refusal
    return None


def _bad_kind(block: Json, place: str, asked: Asked) -> Refusal | None:
    kind = block.get("type")
    if kind is None:
        return Refusal(f"{place}.type: Field required")
    # Of the kinds that a beta brings, this one alone is known to be refused without it.
    if string(kind) in FIELDS and (kind != "fallback" or "fallback" in asked.betas):
        return None
    tags = ", ".join(f"'{tag}'" for tag in FIELDS if tag != "fallback")
    return Refusal(
        f"{place}: Input tag '{kind}' found using 'type' does not match any of the expected tags: {tags}"
    )


def _misplaced(block: Json, message: Json, at: int) -> Refusal | None:
    kind, role = block["type"], message["role"]
    if role == "system":
        if message.get("clear_at") == "next_user_message" and kind != "text":
            return Refusal(
                f"messages.{at}: a turn-scoped system message supports text blocks only "
                "(clear_at: 'next_user_message')"
            )
        supported = kind in SYSTEM_KINDS or kind == "compaction"  # that one has a complaint of its own
        text = f"messages.{at}: role 'system' supports text, tool_addition, and tool_removal blocks only"
        return None if supported else Refusal(text)
    home = HOMES.get(kind, role)
    return (
        None if home == role else Refusal(f"messages.{at}: `{kind}` blocks can only be in `{home}` messages")
    )


def _bad_fields(block: Json, place: str) -> Refusal | None:
    kind = block["type"]
    for key in FIELDS[kind]:
        if key not in block:
            return Refusal(f"{place}.{kind}.{key}: Field required")
    pattern = PATTERNS.get(kind)
    if pattern and not _matches(block["id"], pattern):
        return Refusal(f"{place}.{kind}.id: String should match pattern '{pattern}'")
    if kind == "tool_use" and not isinstance(block["input"], dict):
        return Refusal(f"{place}.tool_use.input: Input should be an object")
    if kind == "thinking" and not string(block.get("signature")):
        return Refusal(f"{place}: Invalid `signature` in `thinking` block")
    return None


def _bad_text(block: Json, role: str, place: str) -> Refusal | None:
    if block["type"] != "text":
        return None
    text = string(block["text"])
    if not text and block.get("cache_control"):
        return Refusal(f"{place}.text: cache_control cannot be set for empty text blocks")
    if not text:
        return Refusal("messages: text content blocks must be non-empty")
    # Recorded traffic shows blank text accepted in an assistant message, where the model itself may write it.
    if not text.strip() and role != "assistant":
        return Refusal(BLANK)
    return None


# The whole body.


def _too_many_cache_marks(body: Json) -> Refusal | None:
    for at, block in enumerate(objects(body.get("system"))):
        if block.get("cache_control") and block.get("text") == "":
            return Refusal(f"system.{at}: cache_control cannot be set for empty text blocks")
    count = sum(1 for part in (body, *_markable(body)) if part.get("cache_control"))
    if count <= CACHE_MARKS_MAX:
        return None
    return Refusal(
        f"A maximum of {CACHE_MARKS_MAX} blocks with cache_control may be provided. Found {count}."
    )


def _markable(body: Json) -> Iterator[Json]:
    yield from objects(body.get("tools"))
    yield from objects(body.get("system"))
    for message in objects(body["messages"]):
        for block in objects(message.get("content")):
            yield block
            yield from objects(block.get("content"))


VERSION_2026: Final = "2026-10-21"

DEFAULTS: Final[Mapping[str, tuple[Any, ...]]] = {"temperature": (1,), "top_p": (1,), "top_k": ()}
"""Sampling parameters, and the values that say nothing."""


def _too_new(body: Json, asked: Asked) -> Refusal | None:
    """What newer models and the newer version of the API take no more."""
    newest = VERSION_2026 in (asked.version, body.get("anthropic_version"))
    version = refusals_turns.model_version(string(body.get("model")))
    for key, defaults in DEFAULTS.items():
        if body.get(key) is None or body[key] in defaults:
            continue
        if newest or (version is not None and version >= (4, 7)):
            return Refusal(f"`{key}` is deprecated for this model")
    return _gone_block(body) if newest else None


def _gone_block(body: Json) -> Refusal | None:
    for at, message in enumerate(objects(body["messages"])):
        for number, block in enumerate(objects(message.get("content"))):
            place = f"messages.{at}.content.{number}"
            match message["role"], block["type"]:
                case "assistant", "document":
                    return Refusal(f"messages.{at}: `document` blocks can only be in `user` messages")
                case "user", "text" if block.get("citations"):
                    return Refusal(f"{place}.text.citations: Extra inputs are not permitted")
    return None
