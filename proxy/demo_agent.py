"""The app of `turngate demo`: a small agent that speaks two providers' APIs over plain HTTP, and its mistakes.

It is an app like any other: it keeps histories of its own, breaks them in ways that apps do, and believes what it
gets. So this file knows wire formats, as the simulator does, and asks nothing of the proxy's own parts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol

import aiohttp
import msgspec

Json = dict[str, Any]
Kind = Literal["passed", "refused", "retracted", "broken"]
"""How a request ended for the agent; `broken` is every way in which it must not end."""

FOREIGN_ERROR: Final = "provider's own error"
"""Stands for a reason where the provider itself told that its answer failed, and its words were passed on."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the agent has it; `arguments` is JSON text, whole or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Asked:
    """The user's words."""

    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """The model's turn."""

    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Told:
    """A tool's result."""

    call_id: str
    text: str


History = tuple[Asked | Said | Told, ...]


@dataclass(frozen=True, slots=True)
class Got:
    """What the agent got for a request: how it ended, our reason if it gives one, and what there was of a turn."""

    kind: Kind
    reason: str = ""
    turn: Said = Said("")

    @property
    def partial_calls(self) -> int:
        """Calls that must not be here: not whole, or of a turn that did not end well."""
        if self.kind != "passed":
            return len(self.turn.calls)
        return sum(not _is_object(call.arguments) for call in self.turn.calls)

    def __str__(self) -> str:
        if self.kind != "passed":
            return f"{self.kind}: {self.reason}"
        return f"passed: {len(self.turn.calls)} whole calls" if self.turn.calls else "passed: text"


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except msgspec.DecodeError:
        return False


class Wire(Protocol):
    """One provider's API as the agent speaks it."""

    @property
    def name(self) -> str:
        """As in the simulator's scenarios."""

    @property
    def path(self) -> str: ...

    def body(self, history: History) -> Json: ...

    def turn(self, events: Sequence[Json]) -> Said:
        """What the events of a stream make, finished or not."""

    def reason(self, error: Json) -> str:
        """Turngate's reason in an error body or event; empty in one of the provider's own."""


class Chat:
    """OpenAI Chat Completions."""

    name = "chat"
    path = "/v1/chat/completions"

    def body(self, history: History) -> Json:
        tools = [{"type": "function", "function": {"name": name, "parameters": TOOL}} for name in TOOLS]
        return {"model": "gpt-4.1", "messages": [_chat_message(entry) for entry in history], "tools": tools}

    def turn(self, events: Sequence[Json]) -> Said:
        text = ""
        calls: dict[int, Call] = {}
        for delta in (choice["delta"] for event in events for choice in event.get("choices", [])):
            text += delta.get("content") or ""
            for piece in delta.get("tool_calls", []):
                known = calls.get(piece["index"]) or Call(piece["id"], piece["function"]["name"], "")
                arguments = known.arguments + piece["function"].get("arguments", "")
                calls[piece["index"]] = replace(known, arguments=arguments)
        return Said(text, tuple(calls.values()))

    def reason(self, error: Json) -> str:
        return str(error["error"].get("code") or "")


def _chat_message(entry: Asked | Said | Told) -> Json:
    match entry:
        case Asked(text):
            return {"role": "user", "content": text}
        case Told(call_id, text):
            return {"role": "tool", "tool_call_id": call_id, "content": text}
        case Said(text, ()):
            return {"role": "assistant", "content": text}
        case Said(text, calls):
            return {"role": "assistant", "content": text, "tool_calls": [_chat_call(call) for call in calls]}


def _chat_call(call: Call) -> Json:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


class Messages:
    """Anthropic Messages."""

    name = "messages"
    path = "/v1/messages"

    def body(self, history: History) -> Json:
        messages: list[Json] = []
        for entry in history:
            role, blocks = _blocks(entry)
            if not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": []})
            messages[-1]["content"] += blocks
        tools = [{"name": name, "input_schema": TOOL} for name in TOOLS]
        return {"model": "claude-sonnet-4-5", "max_tokens": 512, "messages": messages, "tools": tools}

    def turn(self, events: Sequence[Json]) -> Said:
        text = ""
        calls: dict[int, Call] = {}
        for event in events:
            match event:
                case {"type": "content_block_start", "index": int(at), "content_block": {"type": "tool_use"}}:
                    calls[at] = Call(event["content_block"]["id"], event["content_block"]["name"], "")
                case {"delta": {"type": "text_delta", "text": str(piece)}}:
                    text += piece
                case {"index": int(at), "delta": {"type": "input_json_delta", "partial_json": str(piece)}}:
                    calls[at] = replace(calls[at], arguments=calls[at].arguments + piece)
        return Said(text, tuple(calls.values()))

    def reason(self, error: Json) -> str:
        return str(error["error"].get("details", {}).get("error_code", ""))


def _blocks(entry: Asked | Said | Told) -> tuple[str, list[Json]]:
    """Role and blocks; what follows each other in one role is one message."""
    match entry:
        case Asked(text):
            return "user", [{"type": "text", "text": text}]
        case Told(call_id, text):
            return "user", [{"type": "tool_result", "tool_use_id": call_id, "content": text}]
        case Said(text, calls):
            uses = [
                {
                    "type": "tool_use",
                    "id": call.id,
                    "name": call.name,
                    "input": msgspec.json.decode(call.arguments),
                }
                for call in calls
            ]
            return "assistant", [{"type": "text", "text": text}] * bool(text) + uses


CHAT: Final = Chat()
MESSAGES: Final = Messages()

TOOL: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Final = ("get_weather", "get_time")


async def send(session: aiohttp.ClientSession, base: str, wire: Wire, history: History) -> Got:
    """Ask for a streamed answer to a history and take all that comes."""
    body = wire.body(history) | {"stream": True}
    try:
        async with session.post(base + wire.path, json=body) as response:
            raw = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        return Got("broken", type(error).__name__)
    if response.status != 200:
        reason = wire.reason(msgspec.json.decode(raw))
        return Got("refused", reason) if reason else Got("broken", f"status {response.status}")
    lines = [line.removeprefix(b"data: ") for line in raw.splitlines() if line.startswith(b"data: ")]
    events = [msgspec.json.decode(line) for line in lines if line != b"[DONE]"]
    turn = wire.turn(events)
    errors = [wire.reason(event) for event in events if "error" in event]
    if errors:
        return Got("retracted", errors[0] or FOREIGN_ERROR, turn)
    return Got("passed", turn=turn)


# What it does. Each move makes the history of its next request from the one that it has.

Move = Callable[[History], History]


def ask(text: str) -> Move:
    """A new conversation."""
    return lambda _history: (Asked(text),)


def answer_calls(history: History) -> History:
    """A result for every call of the last turn, in another order than they came in."""
    calls = [call for entry in history if isinstance(entry, Said) for call in entry.calls]
    return (*history, *(Told(call.id, "14 degrees") for call in reversed(calls)))


def trim(history: History) -> History:
    """The context was cut to size, and the turn with the calls went; their results stayed."""
    return _go_on(entry for entry in history if not (isinstance(entry, Said) and entry.calls))


def lose_result(history: History) -> History:
    """One tool crashed; its result was never put in."""
    lost = next(entry for entry in history if isinstance(entry, Told))
    return _go_on(entry for entry in history if entry is not lost)


def repeat_result(history: History) -> History:
    """The error handler put a result in, and then the tool did."""
    first = next(entry for entry in history if isinstance(entry, Told))
    return _go_on(twice for entry in history for twice in (entry,) * (2 if entry is first else 1))


def speak_first(history: History) -> History:
    """The user's next words went in before the results."""
    first = next(at for at, entry in enumerate(history) if isinstance(entry, Told))
    return _go_on((*history[:first], Asked("By the way:"), *history[first:]))


def _go_on(entries: Iterable[Asked | Said | Told]) -> History:
    return (*entries, Asked("And tomorrow?"))
