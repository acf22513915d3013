"""What OpenAI refuses at Chat Completions, in its words: shapes, couplings, and the edges of tool calls.

Two styles of `param` are the provider's own: `messages.[2].role` where the sequence is wrong, `messages[2].content`
with a `code` where a value is. Rules that no report shows to be enforced are not here, so that a doubtful body passes.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from turngate.proxy.simulator.dialect import Json, Refusal, mapping, objects, string

Rule = Callable[[Json], Refusal | None]
"""A rule over a whole body."""

ROLES: Final = ("system", "assistant", "user", "function", "tool", "developer")

ID_CHARS_MAX: Final = 40
NAME_CHARS_MAX: Final = 64
NAME: Final = re.compile(r"[a-zA-Z0-9_-]+")

TOOLS_ONLY: Final = ("tool_choice", "parallel_tool_calls")
"""Parameters that mean nothing without tools."""


def first(rules: Iterable[Rule], body: Json) -> Refusal | None:
    """The first complaint of several rules: a provider stops there too."""
    return next((refusal for rule in rules if (refusal := rule(body))), None)


def refuse(body: Json) -> Refusal | None:
    return first(RULES, body)


def no_messages(body: Json) -> Refusal | None:
    if not isinstance(body.get("messages"), list):
        message = "Missing required parameter: 'messages'."
        return Refusal(message, param="messages", code="missing_required_parameter")
    return None if body["messages"] else empty_array("messages")


def empty_array(param: str) -> Refusal:
    return Refusal(
        f"Invalid '{param}': empty array. Expected an array with minimum length 1, "
        "but got an empty array instead.",
        param=param,
        code="empty_array",
    )


# Values.


def bad_parameter(body: Json) -> Refusal | None:
    if body.get("tools") == []:
        return empty_array("tools")
    for key in TOOLS_ONLY:
        if body.get(key) is not None and not (body.get("tools") or body.get("functions")):
            message = f"Invalid value for '{key}': '{key}' is only allowed when 'tools' are specified."
            return Refusal(message, param=key)
    if body.get("stream_options") is not None and body.get("stream") is not True:
        message = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        return Refusal(message, param="stream_options")
    return bad_tool_name(body)


def bad_tool_name(body: Json) -> Refusal | None:
    for at, tool in enumerate(objects(body.get("tools"))):
        function = mapping(tool.get("function"))
        if "name" in function and (refusal := bad_name(function["name"], f"tools[{at}].function.name")):
            return refusal
    return None


def bad_name(name: object, param: str) -> Refusal | None:
    if name == "":
        return Refusal(
            f"Invalid '{param}': empty string. Expected a string with minimum length 1, "
            "but got an empty string instead.",
            param=param,
            code="empty_string",
        )
    if isinstance(name, str) and len(name) > NAME_CHARS_MAX:
        return _too_long(param, NAME_CHARS_MAX, len(name))
    if isinstance(name, str) and not NAME.fullmatch(name):
        return Refusal(
            f"Invalid '{param}': string does not match pattern. Expected a string that matches the pattern "
            "'^[a-zA-Z0-9_-]+$'.",
            param=param,
            code="invalid_value",
        )
    return None


def _too_long(param: str, most: int, chars: int) -> Refusal:
    return Refusal(
        f"Invalid '{param}': string too long. Expected a string with maximum length {most}, "
        f"but got a string with length {chars} instead.",
        param=param,
        code="string_above_max_length",
    )


def bad_message(body: Json) -> Refusal | None:
    for at, message in enumerate(objects(body["messages"])):
        for check in (_bad_role, _bad_part, _bad_content, _bad_call):
            if refusal := check(message, at):
                return refusal
    return None


def _bad_role(message: Json, at: int) -> Refusal | None:
    role, param = message.get("role"), f"messages[{at}].role"
    if role is None:
        message_ = f"Missing required parameter: '{param}'."
        return Refusal(message_, param=param, code="missing_required_parameter")
    if role not in ROLES:
        *others, last = (f"'{known}'" for known in ROLES)
        supported = f"{', '.join(others)}, and {last}"
        message_ = f"Invalid value: '{role}'. Supported values are: {supported}."
        return Refusal(message_, param=param, code="invalid_value")
    if role == "function" and not string(message.get("name")):
        message_ = "Missing parameter 'name': messages with role 'function' must have a 'name'."
        return Refusal(message_, param=f"messages.[{at}].name")
    return None


def _bad_part(message: Json, at: int) -> Refusal | None:
    for number, part in enumerate(objects(message.get("content"))):
        if "type" not in part:
            param = f"messages[{at}].content[{number}].type"
            missing = f"Missing required parameter: '{param}'."
            return Refusal(missing, param=param, code="missing_required_parameter")
        if part["type"] == "image_url" and message.get("role") != "user":
            return Refusal(
                f"Invalid 'messages[{at}]'. Image URLs are only allowed for messages with role 'user', "
                f"but this message with role '{message.get('role')}' contains an image URL.",
                param=f"messages[{at}]",
                code="invalid_value",
            )
    return None


def _bad_content(message: Json, at: int) -> Refusal | None:
    # Spoken and refused replies come back without text.
    instead: dict[Any, tuple[str, ...]] = {
        "assistant": ("tool_calls", "function_call", "refusal", "audio"),
        "function": ("name",),
    }
    if message.get("content") is not None or any(
        message.get(key) for key in instead.get(message.get("role"), ())
    ):
        return None
    if message.get("tool_calls") == []:
        return None  # an empty list of calls is the more particular fault
    param = f"messages.[{at}].content"
    return Refusal("Invalid value for 'content': expected a string, got null.", param=param)


def _bad_call(message: Json, at: int) -> Refusal | None:
    if message.get("tool_calls") == []:
        return empty_array(f"messages[{at}].tool_calls")
    for number, call in enumerate(objects(message.get("tool_calls"))):
        place, id_ = f"messages[{at}].tool_calls[{number}]", string(call.get("id"))
        if len(id_) > ID_CHARS_MAX:
            return _too_long(f"{place}.id", ID_CHARS_MAX, len(id_))
        if refusal := bad_name(mapping(call.get("function")).get("name"), f"{place}.function.name"):
            return refusal
    return None


# Edges.


@dataclass(slots=True)
class Run:
    """The tool messages that stand together, and the calls of the assistant message before them."""

    at: int = 0
    """Index of the message before them."""
    called: list[str] = field(default_factory=list)
    results: list[tuple[int, Json]] = field(default_factory=list)
    next_at: int = 0
    """Index of the message that ends the run."""

    @property
    def missing(self) -> list[str]:
        answered = {string(result.get("tool_call_id")) for _, result in self.results}
        return [id_ for id_ in self.called if id_ not in answered]


def runs(body: Json) -> Iterator[Run]:
    """Each message that is no tool message opens a run, mostly one without calls and without results."""
    run, messages = Run(), objects(body["messages"])
    for at, message in enumerate(messages):
        if message.get("role") == "tool":
            run.results.append((at, message))
            continue
        run.next_at = at
        yield run
        called = message.get("tool_calls") if message.get("role") == "assistant" else None
        run = Run(at, [string(call.get("id")) for call in objects(called)])
    # The provider's param for calls left open at the very end is not known; the last message is the nearest.
    run.next_at = len(messages) - 1
    yield run


def broken_edge(body: Json) -> Refusal | None:
    """Each run of tool messages answers the calls of the assistant message before it, each call once."""
    for run in runs(body):
        if refusal := _bad_result(run) or _unanswered(run):
            return refusal
    return None


def _bad_result(run: Run) -> Refusal | None:
    answered: dict[str, int] = {}
    for at, result in run.results:
        param, id_ = f"messages.[{at}].tool_call_id", result.get("tool_call_id")
        if not run.called:
            return Refusal(
                "Invalid parameter: messages with role 'tool' must be a response to a preceeding message "
                "with 'tool_calls'.",
                param=f"messages.[{at}].role",
            )
        if not isinstance(id_, str):
            return Refusal(
                "Missing parameter 'tool_call_id': messages with role 'tool' must have a 'tool_call_id'.",
                param=param,
            )
        if id_ not in run.called:
            unknown = f"'tool_call_id' of '{id_}' not found in 'tool_calls' of previous message."
            return Refusal(f"Invalid parameter: {unknown}", param=param)
        if id_ in answered:
            places = f"messages[{answered[id_]}] and messages[{at}]"
            return Refusal(
                f"Invalid parameter: Duplicate value for 'tool_call_id' of '{id_}', in {places}.", param=param
            )
        answered[id_] = at
    return None


def _unanswered(run: Run) -> Refusal | None:
    if not run.missing:
        return None
    return Refusal(
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
        f"'tool_call_id'. The following tool_call_ids did not have response messages: {', '.join(run.missing)}",
        param=f"messages.[{run.next_at}].role",
    )


RULES: Final[tuple[Rule, ...]] = (no_messages, bad_parameter, bad_message, broken_edge)
