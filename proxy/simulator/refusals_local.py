"""What vLLM and Ollama refuse: they take any sequence and fail where a prompt cannot be made of it.

Whether tool calls and results belong together is not looked at: both answer, and the model sees nonsense.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from turngate.proxy.simulator import refusals_chat
from turngate.proxy.simulator.dialect import Json, Refusal, mapping, objects, string
from turngate.proxy.simulator.refusals_chat import Rule

ALTERNATING: Final[Mapping[str, str]] = {
    "llama-2": "Conversation roles must alternate user/assistant/user/assistant/...",
    "mistral": (
        "After the optional system message, conversation roles must alternate user/assistant/user/assistant/..."
    ),
}
"""Model families whose prompt templates know no other order, with the complaint of the template."""


def refuse_vllm(body: Json) -> Refusal | None:
    return refusals_chat.first(VLLM, body)


def refuse_ollama(body: Json) -> Refusal | None:
    return refusals_chat.first(OLLAMA, body)


def vllm_error(refusal: Refusal, number: int) -> Json:
    kind = "BadRequestError" if refusal.status == 400 else refusal.type
    detail = {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.status}
    return {"error": detail}


def _arguments(body: Json) -> Iterator[Any]:
    """The arguments of all calls in the history; calls without any are left out."""
    for message in objects(body.get("messages")):
        for call in objects(message.get("tool_calls")):
            yield mapping(call.get("function")).get("arguments")


# vLLM.


def _bad_parameter(body: Json) -> Refusal | None:
    if body.get("tools") == []:
        return Refusal("`tools` must not be an empty array.")
    if body.get("tool_choice") not in (None, "none") and not body.get("tools"):
        return Refusal("When using `tool_choice`, `tools` must be set.")
    if body.get("stream_options") and body.get("stream") is not True:
        return Refusal("Stream options can only be defined when `stream=True`.")
    if body.get("continue_final_message") and body.get("add_generation_prompt", True):
        return Refusal(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        )
    return None


def _unparsed(body: Json) -> Refusal | None:
    for arguments in _arguments(body):
        if not isinstance(arguments, str) or not arguments:
            continue
        try:
            json.loads(arguments)
        except (ValueError, RecursionError) as exc:
            return Refusal(str(exc))
    return None


def _unfit_for_template(body: Json) -> Refusal | None:
    family = next((name for name in ALTERNATING if name in string(body.get("model")).lower()), None)
    if family is None:
        return None
    roles = [message.get("role") for message in objects(body.get("messages"))]
    # Calls and results stand outside the order of the two.
    spoken = [role for role in roles if role in ("user", "assistant")] if "tool" not in roles else []
    if any(role != ("user", "assistant")[at % 2] for at, role in enumerate(spoken)):
        return Refusal(ALTERNATING[family])
    return None


# Ollama.


def _bad_content(body: Json) -> Refusal | None:
    for message in objects(body.get("messages")):
        content = message.get("content")
        if isinstance(content, list):
            if refusal := _bad_part(content):
                return refusal
        elif not isinstance(content, str) and not message.get("tool_calls"):
            kind = "<nil>" if content is None else _GO.get(type(content), "map[string]interface {}")
            return Refusal(f"invalid message content type: {kind}")
    return None


_GO: Final[Mapping[type, str]] = {bool: "bool", int: "float64", float: "float64"}
"""How its language names the types that JSON has."""


def _bad_part(content: list[Any]) -> Refusal | None:
    for part in objects(content):
        url = mapping(part.get("image_url")).get("url", part.get("image_url"))
        if re.match(r"https?://", string(url)):
            return Refusal(
                "image URLs are not currently supported, please use base64 encoded data instead",
            )
        if part.get("type") not in ("text", "image_url", "input_audio"):
            return Refusal("invalid message format")
    return None


def _no_object(body: Json) -> Refusal | None:
    for arguments in _arguments(body):
        try:
            value = json.loads(arguments) if isinstance(arguments, str) else None
        except (ValueError, RecursionError):
            value = None  # the client hears of it: a refusal follows
        if not isinstance(value, dict):
            return Refusal("invalid tool call arguments")
    return None


VLLM: Final[tuple[Rule, ...]] = (_bad_parameter, _unparsed, _unfit_for_template)
OLLAMA: Final[tuple[Rule, ...]] = (_bad_content, _no_object)
