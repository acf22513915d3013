"""What Mistral refuses: another order of roles, calls and results that differ in number, ids of another form.

A user message right after a tool message passes, as recorded; reports of its refusal are older.
Tokenizers differ in what they refuse: ids of nine characters are the older ones' rule, ids compared the newer's.
Both apply here.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

from turngate.proxy.simulator import refusals_chat
from turngate.proxy.simulator.dialect import Json, Refusal, mapping, objects, string
from turngate.proxy.simulator.refusals_chat import Rule, Run

SUCCESSORS: Final[Mapping[str, tuple[str, ...]]] = {
    "system": ("user", "assistant", "system"),
    "user": ("assistant", "system", "user"),
    "assistant": ("assistant", "user", "tool"),
    "tool": ("assistant", "tool", "user"),
}

ID: Final = re.compile(r"[a-zA-Z0-9]{9}")
NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def refuse(body: Json) -> Refusal | None:
    return refusals_chat.first(RULES, body)


def error(refusal: Refusal, number: int) -> Json:
    """The error at the top level, where only this provider has it."""
    detail = {"message": refusal.message, "type": refusal.type, "param": refusal.param, "code": refusal.code}
    return {"object": "error", **detail}


def _order(message: str) -> Refusal:
    return Refusal(message, "invalid_request_message_order", code="3230")


def _call(message: str) -> Refusal:
    return Refusal(message, "invalid_function_call", code="3280")


def _no_messages(body: Json) -> Refusal | None:
    return None if objects(body.get("messages")) else _order("Conversation must have at least one message")


def _role(message: Json) -> str:
    # The provider reads the one as the other.
    return "system" if message.get("role") == "developer" else string(message.get("role"))


def _wrong_order(body: Json) -> Refusal | None:
    roles = [_role(message) for message in objects(body["messages"])]
    for role, follower in pairwise(roles):
        # What an unknown role gets is not known.
        if role in SUCCESSORS and follower in SUCCESSORS and follower not in SUCCESSORS[role]:
            return _order(f"Unexpected role '{follower}' after role '{role}'")
    return None


def _wrong_end(body: Json) -> Refusal | None:
    *earlier, last = objects(body["messages"])
    if any(message.get("prefix") is True for message in earlier):
        return _order("Assistant message with prefix True must be last message")
    if _role(last) in ("user", "tool") or (_role(last) == "assistant" and last.get("prefix") is True):
        return None
    return _order(
        "Expected last role User or Tool (or Assistant with prefix True) for serving "
        f"but got {string(last.get('role'))}"
    )


def _bad_call(body: Json) -> Refusal | None:
    for message in objects(body["messages"]):
        calls = objects(message.get("tool_calls"))
        ids = [call.get("id") for call in calls]
        if message.get("role") == "tool":
            ids.append(message.get("tool_call_id"))
        for id_ in ids:
            if not ID.fullmatch(string(id_)):
                return _call(f"Tool call id was {id_} but must be a-z, A-Z, 0-9, with a length of 9.")
        for call in calls:
            if refusal := _bad_name(mapping(call.get("function")).get("name")):
                return refusal
    return None


def _bad_name(name: Any) -> Refusal | None:
    if NAME.fullmatch(string(name)):
        return None
    return _call(
        f"Function name was {name} but must be a-z, A-Z, 0-9, or contain underscores and dashes, "
        "with a maximum length of 64."
    )


def _broken_edge(body: Json) -> Refusal | None:
    for run in refusals_chat.runs(body):
        if refusal := _duplicate(run) or _unequal(run):
            return refusal
    return None


def _duplicate(run: Run) -> Refusal | None:
    results = [string(result.get("tool_call_id")) for _, result in run.results]
    for ids, place in ((run.called, "assistant message"), (results, "tool results")):
        if len(set(ids)) < len(ids):
            return _order(f"Duplicate tool call id in {place}")
    return None


def _unequal(run: Run) -> Refusal | None:
    if len(run.results) != len(run.called):
        return _order("Not the same number of function calls and responses")
    for _, result in run.results:
        if (id_ := result.get("tool_call_id")) not in run.called:
            return _order(f"Unexpected tool call id {id_} in tool results")
    return None


RULES: Final[tuple[Rule, ...]] = (_no_messages, _wrong_order, _bad_call, _broken_edge, _wrong_end)
