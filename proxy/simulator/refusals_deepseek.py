"""What DeepSeek refuses: the edges of tool calls in words of its own, and turns without their reasoning.

Its `code` repeats the type and `param` is null. It speaks Messages too, of which little is known: two rules.
"""

from dataclasses import replace
from typing import Any, Final

from turngate.proxy.simulator import refusals_chat
from turngate.proxy.simulator.dialect import Json, Refusal, mapping, objects
from turngate.proxy.simulator.refusals_chat import Rule, Run
from turngate.proxy.simulator.refusals_messages import Asked

ROLES: Final = ("system", "user", "assistant", "tool")

CODE: Final = "invalid_request_error"


def refuse(body: Json) -> Refusal | None:
    return refusals_chat.first(RULES, body)


def refuse_messages(body: Json, asked: Asked) -> Refusal | None:
    refusal = _message_role(body) or _no_thinking(body)
    # The code belongs to the other dialect.
    return replace(refusal, code=None) if refusal else None


def _not_of_its_type(place: str, found: Any, expected: str) -> Refusal:
    return Refusal(
        f"Failed to deserialize the JSON body into the target type: {place}: unknown variant `{found}`, "
        f"expected {expected}",
        code=CODE,
    )


def _unknown_role(body: Json) -> Refusal | None:
    known = f"one of {', '.join(f'`{role}`' for role in ROLES)}"
    for at, message in enumerate(objects(body["messages"])):
        if (role := message.get("role")) not in ROLES:
            return _not_of_its_type(f"messages[{at}].role", role, known)
    return None


def _no_text(body: Json) -> Refusal | None:
    """Its models read text only."""
    for at, message in enumerate(objects(body["messages"])):
        for part in objects(message.get("content")):
            if (kind := part.get("type")) != "text":
                return _not_of_its_type(f"messages[{at}]", kind, "`text`")
    return None


def _broken_edge(body: Json) -> Refusal | None:
    for run in refusals_chat.runs(body):
        if refusal := _duplicate_call(run) or _bad_result(run):
            return refusal
        if run.missing:
            return Refusal(
                "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
                "'tool_call_id'. (insufficient tool messages following tool_calls message)",
                code=CODE,
            )
    return None


def _duplicate_call(run: Run) -> Refusal | None:
    for number, id_ in enumerate(run.called):
        if id_ in run.called[:number]:
            return Refusal(f"Duplicate value for 'tool_call_id' of {id_} in message[{run.at}]", code=CODE)
    return None


def _bad_result(run: Run) -> Refusal | None:
    answered: list[Any] = []
    for at, result in run.results:
        id_ = result.get("tool_call_id")
        if not run.called:
            return Refusal(
                "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'",
                code=CODE,
            )
        if id_ in answered:
            return Refusal(f"Duplicate value for 'tool_call_id' of {id_} in message[{at}]", code=CODE)
        answered.append(id_)
    return None


def _no_reasoning(body: Json) -> Refusal | None:
    """In thinking mode turns with calls come back with their reasoning, be it empty, in all later requests."""
    # Thinking is the default of all models but the one that cannot.
    default = "disabled" if body.get("model") == "deepseek-chat" else "enabled"
    if mapping(body.get("thinking")).get("type", default) != "enabled":
        return None
    for message in objects(body["messages"]):
        if message.get("tool_calls") and not isinstance(message.get("reasoning_content"), str):
            return Refusal(
                "The reasoning_content in the thinking mode must be passed back to the API.", code=CODE
            )
    return None


RULES: Final[tuple[Rule, ...]] = (
    refusals_chat.no_messages,
    _unknown_role,
    _no_text,
    refusals_chat.bad_tool_name,
    _broken_edge,
    _no_reasoning,
)


def _message_role(body: Json) -> Refusal | None:
    for at, message in enumerate(objects(body.get("messages"))):
        if (role := message.get("role")) not in ("user", "assistant"):
            return _not_of_its_type(f"messages[{at}].role", role, "`user` or `assistant`")
    return None


def _no_thinking(body: Json) -> Refusal | None:
    if mapping(body.get("thinking")).get("type") != "enabled":
        return None
    for message in objects(body.get("messages")):
        kinds = [block.get("type") for block in objects(message.get("content"))]
        if "tool_use" in kinds and "thinking" not in kinds:
            return Refusal(
                "The `content[].thinking` in the thinking mode must be passed back to the API.", code=CODE
            )
    return None
