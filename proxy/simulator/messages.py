"""Anthropic Messages: reading requests, answers as JSON and as events. Refusals are in `refusals_messages`."""

import json
from typing import Final

from turngate.proxy.simulator import refusals_messages
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

refuse = refusals_messages.refuse

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


def _blocks(message: Json) -> list[Json]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else objects(content)


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
    detail: Json = {"type": refusal.type, "message": refusal.message}
    if refusal.code is not None:
        detail["details"] = {"error_code": refusal.code}
    return {"type": "error", "error": detail, "request_id": _request_id(number)}


def error_event() -> bytes:
    return _event("error", error={"type": FAILURE.type, "message": FAILURE.message})
