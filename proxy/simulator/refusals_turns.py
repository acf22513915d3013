"""What Anthropic refuses about the sequence: where system messages stand, and what belongs to which turn.

Neighbours of one role are one turn. A call of a client tool is answered at the head of the user turn that follows;
a call of a server tool within its own turn, unless it is the last one, which the provider goes on with.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from turngate.proxy.simulator.dialect import Json, Refusal, mapping, objects, string

PREFILL_GONE: Final = (4, 6)
SYSTEM_CAME: Final = (4, 8)
"""First versions of models that take no prefill, and that take system messages among the others."""

THINKING: Final = ("thinking", "redacted_thinking")


@dataclass(slots=True)
class Turn:
    """An assistant turn and the user turn after it."""

    at: int | None = None
    """Index of the last assistant message; None before the first."""
    blocks: list[tuple[str, Json]] = field(default_factory=list)
    """What the assistant turn holds: place in the provider's notation, block."""
    replies: list[tuple[str, Json]] = field(default_factory=list)
    """What the user turn holds."""
    last: bool = False

    @property
    def calls(self) -> list[str]:
        return [string(block.get("id")) for _, block in self.blocks if block.get("type") == "tool_use"]

    @property
    def open_server_calls(self) -> list[Json]:
        """Server calls without their result; those to MCP servers are the provider's as well."""
        answered = {string(block.get("tool_use_id")) for _, block in self.blocks}
        used = [block for _, block in self.blocks if block.get("type") in ("server_tool_use", "mcp_tool_use")]
        return [block for block in used if string(block.get("id")) not in answered]


def refuse(body: Json) -> Refusal | None:
    messages = objects(body["messages"])
    turns = list(_turns(messages))
    return (
        _bad_system(body, messages)
        or _bad_compaction(messages)
        or _unresolved_tool(body, messages)
        or _broken_edge(body, turns)
        or _bad_thinking(body, messages, turns)
        or _bad_prefill(body, messages, turns)
    )


def model_version(model: str) -> tuple[int, int] | None:
    """The version in a model's name, as in `claude-opus-4-8` or `claude-3-5-haiku`; None without one."""
    # Eight digits are a date.
    found = re.search(r"claude-(?:[a-z]+-)?(\d+)(?:[-.](\d{1,2})(?!\d))?", model)
    return (int(found[1]), int(found[2] or 0)) if found else None


def _turns(messages: list[Json]) -> Iterator[Turn]:
    turn = Turn()
    for at, message in enumerate(messages):
        placed = [(f"messages.{at}.content.{n}", block) for n, block in enumerate(_blocks(message))]
        if message.get("role") != "assistant":
            # A system message inside the history counts like text: it ends the run of results.
            turn.replies += placed
            continue
        if turn.replies:
            yield turn
            turn = Turn()
        turn.at = at
        turn.blocks += placed
    turn.last = True
    yield turn


def _blocks(message: Json) -> list[Json]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else objects(content)


# System messages.


def _bad_system(body: Json, messages: list[Json]) -> Refusal | None:
    version = model_version(string(body.get("model")))
    for at, message in enumerate(messages):
        if message.get("role") != "system":
            continue
        if version is not None and version < SYSTEM_CAME:
            return Refusal(
                'messages: Unexpected role "system". The Messages API accepts a top-level `system` parameter, '
                'not "system" as an input message role.'
            )
        directive = message.get("content") == [] and "output_config" in message
        if not directive and (fault := _system_place(messages, at)):
            return Refusal(f"messages.{at}: {fault}")
    return None


def _system_place(messages: list[Json], at: int) -> str | None:
    before = next((m for m in reversed(messages[:at]) if m.get("role") != "system"), None)
    after = next((m for m in messages[at + 1 :] if m.get("role") != "system"), None)
    if before is None:
        return (
            "use the top-level 'system' parameter for the initial system prompt; the directive-only form "
            "(content: [] with output_config) is accepted at any position"
        )
    if before.get("role") == "assistant" and not _ends_in_server_result(before):
        return "role 'system' must follow a 'user' message or an 'assistant' message ending in a server tool result"
    if after is not None and after.get("role") != "assistant":
        return "role 'system' must precede an 'assistant' message or end the array"
    return None


def _ends_in_server_result(message: Json) -> bool:
    blocks = _blocks(message)
    return bool(blocks) and string(blocks[-1].get("type")).endswith("_tool_result")


# Compaction and changes of the tool set; only their codes are documented.


def _bad_compaction(messages: list[Json]) -> Refusal | None:
    places = [
        (at, number, block)
        for at, message in enumerate(messages)
        for number, block in enumerate(_blocks(message))
        if block.get("type") == "compaction"
    ]
    if sum(1 for *_, block in places if block.get("content")) > 1:
        text = "messages: only one `compaction` block may have content"
        return Refusal(text, code="compaction_block_ambiguous")
    for at, number, block in places:
        place = f"messages.{at}.content.{number}"
        if (at, number) != (0, 0) or messages[0].get("role") == "system":
            text = f"{place}: `compaction` must be the first block of the conversation"
            return Refusal(text, code="compaction_block_misplaced")
        if block.get("content") == "":
            return Refusal(f"{place}.compaction.content: String should have at least 1 character")
    return None


def _unresolved_tool(body: Json, messages: list[Json]) -> Refusal | None:
    """Changes of the tool set name tools that were declared, in `tools` or by an earlier change."""
    if _continued(body):
        return None  # the tools are on the provider's side
    declared = {string(tool.get("name")) for tool in objects(body.get("tools"))}
    for at, message in enumerate(messages):
        for number, block in enumerate(_blocks(message)):
            if block.get("type") not in ("tool_addition", "tool_removal"):
                continue
            tool = mapping(block.get("tool"))
            declared.add(string(mapping(tool.get("definition")).get("name")))
            name = string(tool.get("tool_name", tool.get("name")))
            if tool.get("type") == "tool_reference" and name not in declared:
                text = f"messages.{at}.content.{number}: no tool named {name!r} is declared"
                return Refusal(text, code="tool_reference_unresolved")
    return None


def _continued(body: Json) -> bool:
    return mapping(body.get("thread")).get("type") == "continue"


# Calls and results.


def _broken_edge(body: Json, turns: list[Turn]) -> Refusal | None:
    for turn in turns:
        # The calls of a continued thread are on the provider's side: its first results are no orphans.
        known = turn.at is not None or not _continued(body)
        refusal = (
            _duplicate_calls(turn)
            or _bad_results(turn, known)
            or _bad_server_calls(turn, body)
            or _unanswered(turn)
        )
        if refusal:
            return refusal
    return None


def _duplicate_calls(turn: Turn) -> Refusal | None:
    seen: set[str] = set()
    for place, block in turn.blocks:
        if block.get("type") != "tool_use":
            continue
        if (id_ := string(block.get("id"))) in seen:
            return Refusal(f"{place}: `tool_use` ids must be unique")
        seen.add(id_)
    return None


def _bad_results(turn: Turn, calls_known: bool) -> Refusal | None:
    seen: set[str] = set()
    for place, block in turn.replies:
        if block.get("type") != "tool_result":
            continue
        id_ = string(block.get("tool_use_id"))
        if calls_known and id_ not in turn.calls:
            return Refusal(
                f"{place}: unexpected `tool_use_id` found in `tool_result` blocks: {id_}. Each `tool_result` "
                "block must have a corresponding `tool_use` block in the previous message."
            )
        if id_ in seen:
            return Refusal(
                f"{place}: each tool_use must have a single result. "
                f"Found multiple `tool_result` blocks with id: {id_}"
            )
        seen.add(id_)
    return None


def _bad_server_calls(turn: Turn, body: Json) -> Refusal | None:
    """Open calls of server tools: in the last turn only, with nothing but client results after them."""
    declared = [string(tool.get("name")) for tool in objects(body.get("tools"))]
    deferred = turn.last and (not turn.replies or _only_results(turn))
    for call in turn.open_server_calls:
        # What becomes of open MCP calls in earlier turns is not known.
        if call.get("type") != "server_tool_use":
            continue
        name = string(call.get("name"))
        found = f"messages.{turn.at}: `{name}` tool use with id `{call.get('id')}` was found"
        # One tool has several names for its calls.
        tool = "code_execution" if name.endswith("code_execution") else name
        result = "tool_search_tool_result" if name.startswith("tool_search_tool") else f"{name}_tool_result"
        if not deferred:
            return Refusal(f"{found} without a corresponding `{result}` block")
        if tool not in declared and not _continued(body):
            return Refusal(
                f"{found} without a corresponding `{result}` block, but no `{tool}` tool was provided"
            )
    return None


def _only_results(turn: Turn) -> bool:
    return bool(turn.calls) and all(block.get("type") == "tool_result" for _, block in turn.replies)


def _unanswered(turn: Turn) -> Refusal | None:
    if turn.open_server_calls and not turn.replies:
        return None
    leading: set[str] = set()
    for _, block in turn.replies:
        if block.get("type") != "tool_result":
            break
        leading.add(string(block.get("tool_use_id")))
    missing = [id_ for id_ in turn.calls if id_ not in leading]
    if not missing:
        return None
    return Refusal(
        f"messages.{turn.at}: `tool_use` ids were found without `tool_result` blocks immediately "
        f"after: {', '.join(missing)}. Each `tool_use` block must have a corresponding `tool_result` block "
        "in the next message."
    )


# Thinking: where it stands. Whether it is the provider's own, only the provider can tell.


def _bad_thinking(body: Json, messages: list[Json], turns: list[Turn]) -> Refusal | None:
    for at, message in enumerate(messages):
        kinds = [string(block.get("type")) for block in _blocks(message)]
        if any(kind in THINKING for kind in kinds) and kinds[0] not in THINKING:
            return Refusal(
                f"messages.{at}.content.0.type: If an assistant message contains any thinking blocks, "
                f"the first block must be thinking or redacted_thinking. Found {kinds[0]}."
            )
    manual = mapping(body.get("thinking")).get("type") == "enabled"
    return _thoughtless_loop(turns) if manual else None


def _thoughtless_loop(turns: list[Turn]) -> Refusal | None:
    """Manual thinking: the assistant thinks before the calls whose results end the conversation."""
    loop: list[Turn] = []
    for turn in reversed(turns):
        if not _only_results(turn):
            break
        loop.append(turn)
    # Thinking once at the start of the loop is enough: its turns are one to the provider.
    if not loop or any(block.get("type") in THINKING for turn in loop for _, block in turn.blocks):
        return None
    place, block = loop[0].blocks[0]
    return Refusal(
        f"{place}.type: Expected `thinking` or `redacted_thinking`, but found `{block.get('type')}`. When "
        "`thinking` is enabled, a final `assistant` message must start with a thinking block (preceeding the "
        "lastmost set of `tool_use` and `tool_result` blocks)."
    )


# The assistant has the last word.


def _bad_prefill(body: Json, messages: list[Json], turns: list[Turn]) -> Refusal | None:
    at, last = len(messages) - 1, messages[-1]
    paused = any(block.get("type") == "server_tool_use" for _, block in turns[-1].blocks)
    if last.get("role") != "assistant" or paused or body.get("fallback_credit_token") is not None:
        return None
    model = string(body.get("model"))
    version = model_version(model)
    if "mythos" in model or (version is not None and version >= PREFILL_GONE):
        return Refusal(
            "This model does not support assistant message prefill. The conversation must end with a user message."
        )
    return _bad_ending(body, _blocks(last), at)


def _bad_ending(body: Json, blocks: list[Json], at: int) -> Refusal | None:
    kinds = [block.get("type") for block in blocks]
    thinks = mapping(body.get("thinking")).get("type", "disabled") != "disabled"
    if "thinking" in kinds and not thinks:
        return Refusal(
            f"messages.{at}.content.{kinds.index('thinking')}: When thinking is disabled, an `assistant` message "
            "in the final position cannot contain `thinking`."
        )
    if kinds[-1:] == ["thinking"]:
        return Refusal(f"messages.{at}: The final block in an assistant message cannot be `thinking`.")
    if kinds[-1:] == ["text"] and (text := string(blocks[-1].get("text"))) != text.rstrip():
        return Refusal("messages: final assistant content cannot end with trailing whitespace")
    return None
