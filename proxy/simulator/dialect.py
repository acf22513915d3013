"""What the dialects share: what a request asks for, what an answer says, and how JSON is read and written."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

Json = dict[str, Any]

CREATED_S: Final = 1_700_000_000
"""Unix time of every answer: the simulator's clock stands still, so that equal requests get equal bytes."""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    schema: Json


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the simulator needs to know of a request."""

    model: str
    stream: bool
    last_text: str
    """All text of the last message, that of tool results included."""
    results: tuple[str, ...]
    """Texts of the tool results that end the conversation."""
    tools: tuple[Tool, ...]
    """The tools that may be called now, so none if the tool choice says so."""
    forced_tool: str | None
    parallel_calls: bool
    include_usage: bool
    tokens: int
    """A plausible count, not a tokenizer's."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    fragments: tuple[str, ...]

    @property
    def arguments(self) -> str:
        return "".join(self.fragments)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the simulated model says to a prompt; `number` counts requests and makes the ids."""

    number: int
    prompt: Prompt
    text: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    finish: str | None = None

    @property
    def tokens(self) -> int:
        return rough_tokens("".join(self.text)) + sum(rough_tokens(call.arguments) + 8 for call in self.calls)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error in the provider's words."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    status: int = 400
    code: str | None = None
    """OpenAI's `code`, Anthropic's `details.error_code`."""


class Dialect(Protocol):
    """One wire format. The modules `chat`, `messages` and `responses` are of this type."""

    @property
    def NAME(self) -> str: ...

    @property
    def FAILURE(self) -> Refusal: ...

    def headers(self, number: int) -> list[tuple[str, str]]: ...
    def read(self, body: Json) -> Prompt: ...
    def refuse(self, body: Json) -> Refusal | None: ...
    def models(self) -> Json: ...
    def answer(self, reply: Reply) -> Json: ...
    def events(self, reply: Reply) -> list[bytes]: ...
    def error(self, refusal: Refusal, number: int) -> Json: ...
    def error_event(self) -> bytes: ...


MODELS: Final = ("sim-small", "sim-large")


def encode(value: Json) -> bytes:
    """JSON as providers write it, UTF-8 unescaped.

    By `json`, because orjson refuses the lone surrogates that an echoed prompt may hold; they become "?".
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def objects(value: object) -> list[Json]:
    """The items of a JSON array of objects; what is no object counts as an empty one and keeps its place."""
    return [item if isinstance(item, dict) else {} for item in value] if isinstance(value, list) else []


def mapping(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def string(value: object) -> str:
    return value if isinstance(value, str) else ""


def text_of(content: object) -> str:
    """The text of a message's content, in blocks of any kind; each block on a line of its own."""
    if isinstance(content, str):
        return content
    # A tool result's content is nested one deep and never deeper.
    texts = (
        "\n".join(string(inner.get("text")) for inner in objects(block.get("content")))
        or string(block.get("text"))
        or string(block.get("content"))
        for block in objects(content)
    )
    return "\n".join(text for text in texts if text)


def rough_tokens(text: str) -> int:
    """Four characters a token, the usual rule of thumb."""
    return len(text) // 4 + 1


def call_id(prefix: str, number: int, index: int) -> str:
    return f"{prefix}sim{number:06d}{index:02d}"


def prompt_tokens(messages: Sequence[Json]) -> int:
    return sum(rough_tokens(text_of(message.get("content"))) + 4 for message in messages)
