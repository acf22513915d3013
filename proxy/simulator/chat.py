"""OpenAI Chat Completions: reading requests, answers as JSON and as events. Refusals are in `refusals_chat`."""

from typing import Final

from turngate.proxy.simulator import refusals_chat
from turngate.proxy.simulator.dialect import (
    CREATED_S,
    MODELS,
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

NAME: Final = "chat"

refuse = refusals_chat.refuse

FAILURE: Final = Refusal(
    "The server had an error while processing your request. Sorry about that!", "server_error", status=500
)


def headers(number: int) -> list[tuple[str, str]]:
    return [
        ("openai-version", "2020-10-01"),
        ("openai-processing-ms", "12"),
        ("x-request-id", f"req_sim{number:06d}"),
    ]


def read(body: Json) -> Prompt:
    """What a request body asks for. Never fails: what has another type than it should counts as absent."""
    messages = objects(body.get("messages"))
    choice = body.get("tool_choice")
    tools = [mapping(tool.get("function")) for tool in objects(body.get("tools"))]
    return Prompt(
        model=string(body.get("model")),
        stream=body.get("stream") is True,
        last_text=text_of(messages[-1].get("content")) if messages else "",
        results=_last_results(messages),
        tools=tuple(
            Tool(tool["name"], mapping(tool.get("parameters")))
            for tool in tools
            if choice != "none" and string(tool.get("name"))
        ),
        forced_tool=mapping(mapping(choice).get("function")).get("name"),
        parallel_calls=body.get("parallel_tool_calls") is not False,
        include_usage=mapping(body.get("stream_options")).get("include_usage") is True,
        tokens=prompt_tokens(messages),
    )


def _last_results(messages: list[Json]) -> tuple[str, ...]:
    results = []
    for message in reversed(messages):
        if message.get("role") != "tool":
            break
        results.append(text_of(message.get("content")))
    return tuple(reversed(results))


def models() -> Json:
    data = [{"id": id_, "object": "model", "created": CREATED_S, "owned_by": "simulator"} for id_ in MODELS]
    return {"object": "list", "data": data}


def answer(reply: Reply) -> Json:
    calls = [
        {"id": call_id("call_", reply.number, at), "type": "function"}
        | {"function": {"name": call.name, "arguments": call.arguments}}
        for at, call in enumerate(reply.calls)
    ]
    message: Json = {"role": "assistant", "content": "".join(reply.text) or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    message |= {"refusal": None, "annotations": []}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(reply)}
    return _envelope(reply, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}


def _envelope(reply: Reply, kind: str) -> Json:
    return {
        "id": f"chatcmpl-sim{reply.number:06d}",
        "object": kind,
        "created": CREATED_S,
        "model": reply.prompt.model,
        "service_tier": "default",
        "system_fingerprint": "fp_simulator",
    }


def _finish(reply: Reply) -> str:
    # A named tool choice ends with "stop" although there is a call: so does the provider.
    called = reply.calls and reply.prompt.forced_tool is None
    return reply.finish or ("tool_calls" if called else "stop")


def _usage(reply: Reply) -> Json:
    return {
        "prompt_tokens": reply.prompt.tokens,
        "completion_tokens": reply.tokens,
        "total_tokens": reply.prompt.tokens + reply.tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def events(reply: Reply) -> list[bytes]:
    """The answer as a stream: role, text, calls one by one, finish, usage if asked for, terminator."""
    opening: Json = {"role": "assistant", "content": "" if reply.text or not reply.calls else None}
    deltas: list[Json] = [opening | {"refusal": None}]
    deltas += [{"content": piece} for piece in reply.text]
    for at, call in enumerate(reply.calls):
        head = {"index": at, "id": call_id("call_", reply.number, at), "type": "function"}
        deltas.append({"tool_calls": [head | {"function": {"name": call.name, "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": at, "function": {"arguments": part}}]} for part in call.fragments
        ]
    frames = [_chunk(reply, delta, None) for delta in deltas]
    frames.append(_chunk(reply, {}, _finish(reply)))
    if reply.prompt.include_usage:
        last = {"choices": [], "usage": _usage(reply)}
        frames.append(_frame(_envelope(reply, "chat.completion.chunk") | last))
    return [*frames, b"data: [DONE]\n\n"]


def _chunk(reply: Reply, delta: Json, finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    chunk = _envelope(reply, "chat.completion.chunk") | {"choices": [choice]}
    return _frame(chunk | {"usage": None} if reply.prompt.include_usage else chunk)


def _frame(value: Json) -> bytes:
    return b"data: %b\n\n" % encode(value)


def error(refusal: Refusal, number: int) -> Json:
    # The request id stands in a header only.
    detail = {"message": refusal.message, "type": refusal.type, "param": refusal.param, "code": refusal.code}
    return {"error": detail}


def error_event() -> bytes:
    return _frame(error(FAILURE, 0))
