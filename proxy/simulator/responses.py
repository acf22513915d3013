"""OpenAI Responses, as much of it as an agent needs for a turn with tool calls and one with text.

Function tools only, whole conversations in `input` (`store` off), and of the sequence check the rule that joins a
call to its output. Whatever else the provider has (stored responses, reasoning, its own tools, WebSockets) is not here.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from turngate.proxy.simulator import chat
from turngate.proxy.simulator.dialect import (
    CREATED_S,
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

NAME: Final = "responses"

# One provider: the same headers, models, failure and shape of errors as for Chat Completions.
FAILURE: Final = chat.FAILURE
headers = chat.headers
models = chat.models
error = chat.error

OUTPUT: Final = "function_call_output"


def read(body: Json) -> Prompt:
    """What a request body asks for. Never fails: what has another type than it should counts as absent."""
    items = _items(body)
    choice = body.get("tool_choice")
    tools = [tool for tool in objects(body.get("tools")) if tool.get("type") == "function"]
    return Prompt(
        model=string(body.get("model")),
        stream=body.get("stream") is True,
        last_text=_text(items[-1]) if items else "",
        results=_last_results(items),
        tools=tuple(
            Tool(tool["name"], mapping(tool.get("parameters")))
            for tool in tools
            if choice != "none" and string(tool.get("name"))
        ),
        forced_tool=mapping(choice).get("name"),
        parallel_calls=body.get("parallel_tool_calls") is not False,
        include_usage=True,
        tokens=prompt_tokens(items),
    )


def _items(body: Json) -> list[Json]:
    given = body.get("input")
    return [{"role": "user", "content": given}] if isinstance(given, str) else objects(given)


def _text(item: Json) -> str:
    return text_of(item.get("output" if item.get("type") == OUTPUT else "content"))


def _last_results(items: list[Json]) -> tuple[str, ...]:
    results = []
    for item in reversed(items):
        if item.get("type") != OUTPUT:
            break
        results.append(_text(item))
    return tuple(reversed(results))


def refuse(body: Json) -> Refusal | None:
    """The sequence check: one output for each function call, wherever in the input, and none without a call."""
    if "previous_response_id" in body or "conversation" in body:
        return None  # the calls may be on the provider's side
    calls, outputs = _ids(body, "function_call"), _ids(body, OUTPUT)
    for id_ in outputs:
        if id_ not in calls:
            return Refusal(f"No tool call found for function call output with call_id {id_}.", param="input")
    for id_ in calls:
        if id_ not in outputs:
            return Refusal(f"No tool output found for function call {id_}.", param="input")
    for id_, count in outputs.items():
        if count > calls[id_]:
            return Refusal(f"Duplicate {OUTPUT} for call_id '{id_}'.", param="input")
    return None


def _ids(body: Json, kind: str) -> Counter[str]:
    return Counter(string(item.get("call_id")) for item in _items(body) if item.get("type") == kind)


def answer(reply: Reply) -> Json:
    return _response(reply, "completed", [item for item, _ in _output(reply)])


def _response(reply: Reply, status: str, output: list[Json]) -> Json:
    return {
        "id": f"resp_sim{reply.number:06d}",
        "object": "response",
        "created_at": CREATED_S,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": reply.prompt.model,
        "output": output,
        "parallel_tool_calls": reply.prompt.parallel_calls,
        "tool_choice": "auto",
        "tools": [],
        "usage": _usage(reply) if status == "completed" else None,
    }


def _usage(reply: Reply) -> Json:
    return {
        "input_tokens": reply.prompt.tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": reply.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt.tokens + reply.tokens,
    }


def _output(reply: Reply) -> Iterator[tuple[Json, tuple[str, ...]]]:
    """The items of an answer, each whole and with the fragments that a stream brings it in."""
    done = {"status": "completed"}
    if reply.text:
        item = {"id": f"msg_sim{reply.number:06d}", "type": "message", "role": "assistant"}
        yield item | done | {"content": [_part("".join(reply.text))]}, reply.text
    for at, call in enumerate(reply.calls):
        ids = {"id": call_id("fc_", reply.number, at), "call_id": call_id("call_", reply.number, at)}
        item = {"type": "function_call"} | ids | {"name": call.name, "arguments": call.arguments}
        yield item | done, call.fragments


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def events(reply: Reply) -> list[bytes]:
    """The answer as a stream: created, the items one after the other, completed; numbered from 0."""
    opened = _response(reply, "in_progress", [])
    steps: list[Json] = [
        {"type": "response.created", "response": opened},
        {"type": "response.in_progress", "response": opened},
    ]
    for index, (item, pieces) in enumerate(_output(reply)):
        body = _message if item["type"] == "message" else _call
        begun, inside = body(item, {"item_id": item["id"], "output_index": index}, pieces)
        begun = item | {"status": "in_progress"} | begun
        steps.append({"type": "response.output_item.added", "output_index": index, "item": begun})
        steps += inside
        steps.append({"type": "response.output_item.done", "output_index": index, "item": item})
    steps.append({"type": "response.completed", "response": answer(reply)})
    return [_event(number, step) for number, step in enumerate(steps)]


def _message(item: Json, place: Json, pieces: tuple[str, ...]) -> tuple[Json, list[Json]]:
    """What differs in the item as it begins, and the events between its two ends."""
    kind, place = "response.output_text", place | {"content_index": 0}
    part = item["content"][0]
    return {"content": []}, [
        {"type": "response.content_part.added", **place, "part": _part("")},
        *({"type": f"{kind}.delta", **place, "delta": piece, "logprobs": []} for piece in pieces),
        {"type": f"{kind}.done", **place, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
    ]


def _call(item: Json, place: Json, pieces: tuple[str, ...]) -> tuple[Json, list[Json]]:
    kind = "response.function_call_arguments"
    return {"arguments": ""}, [
        *({"type": f"{kind}.delta", **place, "delta": piece} for piece in pieces),
        {"type": f"{kind}.done", **place, "arguments": item["arguments"], "name": item["name"]},
    ]


def _event(number: int, step: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (step["type"].encode(), encode(step | {"sequence_number": number}))


def error_event() -> bytes:
    # Nested, as the provider writes it and as its SDKs raise on it. The stream's own numbers are not known here.
    detail = {"type": FAILURE.type, "code": None, "message": FAILURE.message, "param": None}
    return _event(0, {"type": "error", "error": detail})
