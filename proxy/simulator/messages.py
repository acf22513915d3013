"""Anthropic Messages: reading requests, the provider's own refusals, answers as JSON and as events."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from turngate.proxy.simulator.dialect import (
    MODELS,
    Call,
    Json,
    Prompt,
    Refusal,
    Reply,
    Tool,
    call_id,
    encode,
    mapping,
    objects,
    prompt_tokens,
    string,
    text_of,
)

NAME: Final = "messages"

FAILURE: Final = Refusal("Overloaded", "overloaded_error", status=529)


def headers(number: int) -> list[tuple[str, str]]:
    return [
        ("anthropic-organization-id", "00000000-0000-4000-8000-000000000000"),
        ("request-id", _request_id(number)),
    ]


def _request_id(number: int) -> str:
    return f"req_sim{number:06d}"


def read(body: Json) -> Prompt:
    """What a request body asks for. Never fails: what has another type than it should counts as absent."""
    messages = objects(body.get("messages"))
    choice = mapping(body.get("tool_choice"))
    # Server tools have a type and no schema; only the provider could run them.
    callable_ = [] if choice.get("type") == "none" else objects(body.get("tools"))
    return Prompt(
        model=string(body.get("model")),
        stream=body.get("stream") is True,
        last_text=text_of(messages[-1].get("content")) if messages else "",
        results=_last_results(messages),
        tools=tuple(
            Tool(tool["name"], tool["input_schema"])
            for tool in callable_
            if string(tool.get("name")) and isinstance(tool.get("input_schema"), dict)
        ),
        forced_tool=choice.get("name") if choice.get("type") == "tool" else None,
        parallel_calls=choice.get("disable_parallel_tool_use") is not True,
        include_usage=True,
        tokens=prompt_tokens(messages),
    )


def _last_results(messages: list[Json]) -> tuple[str, ...]:
    """Results of the last user turn, which may be several messages long."""
    results: list[str] = []
    for message in reversed(messages):
        if message.get("role") == "assistant":
            break
        blocks = [block for block in _blocks(message) if block.get("type") == "tool_result"]
        results[:0] = [text_of(block.get("content")) for block in blocks]
    return tuple(results)


@dataclass(slots=True)
class _Turn:
    """An assistant turn and the user turn after it; neighbours of one role are one turn."""

    assistant_at: int | None = None
    """Index of the assistant message; None before the first."""
    calls: list[str] = field(default_factory=list)
    server_calls: set[str] = field(default_factory=set)
    """Server tools without a result yet: the provider itself will go on with this turn."""
    replies: list[tuple[str, Json]] = field(default_factory=list)
    """What the user turn holds: place in the provider's notation, block."""


def refuse(body: Json) -> Refusal | None:
    """The sequence check: results come first in the user turn after their calls, each once, none missing."""
    if not isinstance(body.get("messages"), list):
        return Refusal("messages: Field required")
    if not body["messages"]:
        return Refusal("messages: at least one message is required")
    continued = mapping(body.get("thread")).get("type") == "continue"
    for turn in _turns(objects(body["messages"])):
        # The calls of a continued thread are on the provider's side: its first results are no orphans.
        known = turn.assistant_at is not None or not continued
        if refusal := _refuse_results(turn, known) or _refuse_unanswered(turn):
            return refusal
    return None


def _turns(messages: list[Json]) -> Iterator[_Turn]:
    turn = _Turn()
    for at, message in enumerate(messages):
        if message.get("role") != "assistant":
            # A system message inside the history counts like text: it ends the run of results.
            turn.replies += [(f"messages.{at}.content.{n}", b) for n, b in enumerate(_blocks(message))]
            continue
        if turn.replies:
            yield turn
            turn = _Turn()
        turn.assistant_at = at
        for block in _blocks(message):
            kind, id_ = string(block.get("type")), string(block.get("id"))
            if kind == "tool_use":
                turn.calls.append(id_)
            elif kind.endswith("_tool_use"):
                turn.server_calls.add(id_)
            elif kind.endswith("_tool_result"):
                turn.server_calls.discard(string(block.get("tool_use_id")))
    yield turn


def _blocks(message: Json) -> list[Json]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else objects(content)


def _refuse_results(turn: _Turn, calls_known: bool) -> Refusal | None:
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


def _refuse_unanswered(turn: _Turn) -> Refusal | None:
    if turn.server_calls and not turn.replies:
        # Only the last turn has no replies.
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
        f"messages.{turn.assistant_at}: `tool_use` ids were found without `tool_result` blocks immediately "
        f"after: {', '.join(missing)}. Each `tool_use` block must have a corresponding `tool_result` block "
        "in the next message."
    )


def models() -> Json:
    data = [
        {"type": "model", "id": id_, "display_name": id_, "created_at": "2023-11-14T22:13:20Z"}
        for id_ in MODELS
    ]
    return {"data": data, "has_more": False, "first_id": MODELS[0], "last_id": MODELS[-1]}


def answer(reply: Reply) -> Json:
    content: list[Json] = [{"type": "text", "text": "".join(reply.text)}] if reply.text else []
    content += [_call(reply, at) | {"input": _input(call)} for at, call in enumerate(reply.calls)]
    return _message(reply, content, _stop_reason(reply), reply.tokens)


def _call(reply: Reply, at: int) -> Json:
    id_ = call_id("toolu_", reply.number, at)
    return {"type": "tool_use", "id": id_, "name": reply.calls[at].name, "input": {}}


def _input(call: Call) -> Json:
    """The arguments as an object, which raw fragments need not make: then it is an empty one."""
    try:
        return mapping(json.loads(call.arguments))
    except ValueError:
        return {}


def _stop_reason(reply: Reply) -> str:
    return reply.finish or ("tool_use" if reply.calls else "end_turn")


def _message(reply: Reply, content: list[Json], stop_reason: str | None, output_tokens: int) -> Json:
    return {
        "id": f"msg_sim{reply.number:06d}",
        "type": "message",
        "role": "assistant",
        "model": reply.prompt.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": _usage(reply, output_tokens),
    }


def _usage(reply: Reply, output_tokens: int) -> Json:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": reply.prompt.tokens, **cached, "output_tokens": output_tokens}


def events(reply: Reply) -> list[bytes]:
    """The answer as a stream: message start, ping, one block after the other, delta with the reason, stop."""
    frames = [_event("message_start", message=_message(reply, [], None, 1)), _event("ping")]
    blocks: list[tuple[Json, list[Json]]] = []
    if reply.text:
        deltas = [{"type": "text_delta", "text": piece} for piece in reply.text]
        blocks.append(({"type": "text", "text": ""}, deltas))
    for at, call in enumerate(reply.calls):
        # The provider's first fragment is empty.
        deltas = [{"type": "input_json_delta", "partial_json": part} for part in ("", *call.fragments)]
        blocks.append((_call(reply, at), deltas))
    for index, (block, deltas) in enumerate(blocks):
        frames.append(_event("content_block_start", index=index, content_block=block))
        frames += [_event("content_block_delta", index=index, delta=delta) for delta in deltas]
        frames.append(_event("content_block_stop", index=index))
    ending = {"stop_reason": _stop_reason(reply), "stop_sequence": None}
    frames.append(_event("message_delta", delta=ending, usage={"output_tokens": reply.tokens}))
    return [*frames, _event("message_stop")]


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def error(refusal: Refusal, number: int) -> Json:
    detail = {"type": refusal.type, "message": refusal.message}
    return {"type": "error", "error": detail, "request_id": _request_id(number)}


def error_event() -> bytes:
    return _event("error", error={"type": FAILURE.type, "message": FAILURE.message})
