"""What every wire format's file offers, and the error all of them raise on a body they cannot read."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from turngate.validators.graph import MessageSequence
from turngate.validators.previews import Said
from turngate.validators.rules import Reason
from turngate.validators.schemas import Tools
from turngate.validators.stream import StreamEvent, StreamParser


class Undecodable(Exception):
    """The body is not what this dialect can be read from: the request is unjudged, never refused for it."""

    reason: Reason = Reason.BODY_UNDECODABLE


class Ambiguous(Undecodable):
    """A key stands twice in one object: we and the provider may read two different bodies."""

    reason = Reason.BODY_AMBIGUOUS


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What bears on a request's meaning and is not in its body.

    `version` and `betas` are what the headers say of the API's version and of features switched on; None where the
    headers are not at hand, so that nothing may be concluded from their absence. `window` is the model's context
    window in tokens where somebody told it.
    """

    version: str | None = None
    betas: frozenset[str] | None = None
    window: int | None = None


NO_CONTEXT: Final = RequestContext()


def context_of(headers: Iterable[tuple[bytes, bytes]], window: int | None = None) -> RequestContext:
    """The context that a request's headers give; names in any case. All headers must be there."""
    version: str | None = None
    betas: set[str] = set()
    for name, value in headers:
        match name.lower():
            case b"anthropic-version":
                version = value.decode("latin-1").strip()
            case b"anthropic-beta":
                betas |= {beta.strip() for beta in value.decode("latin-1").split(",") if beta.strip()}
    return RequestContext(version, frozenset(betas), window)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP answer in a provider's shape."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Trouble:
    """What the app is told, in its dialect's words: reason, where in its body, one message for humans."""

    reason: Reason
    message: str
    at: str = ""


class _Model(msgspec.Struct, gc=False):
    model: str = ""


_decode_model = msgspec.json.Decoder(_Model).decode


def model_in(body: bytes) -> str:
    """The top-level `model` of a JSON body, "" where there is none."""
    try:
        return _decode_model(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


class _Messages(msgspec.Struct, gc=False):
    messages: list[msgspec.Raw]


_decode_messages = msgspec.json.Decoder(_Messages).decode


def messages_among(body: bytes) -> tuple[list[msgspec.Raw], list[int]]:
    """The messages that are objects, and the places of those that are not. Raises msgspec.DecodeError."""
    items = _decode_messages(body).messages
    strangers = [index for index, item in enumerate(items) if memoryview(item)[0] != ord("{")]
    return [item if memoryview(item)[0] == ord("{") else _NO_MESSAGE for item in items], strangers


_NO_MESSAGE: Final = msgspec.Raw(b'{"role":"user","content":"-"}')
"""Stands for what is no message, so that the others keep their places."""


def without_messages(body: bytes) -> bytes:
    """The body with an empty list of messages. Raises msgspec.DecodeError."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields["messages"] = msgspec.Raw(b"[]")
    return msgspec.json.encode(fields)


class _Thinking(msgspec.Struct, gc=False):
    type: str = ""


_decode_thinking = msgspec.json.Decoder(_Thinking).decode


def thinking_in(value: msgspec.Raw) -> bool | None:
    """Whether a request's `thinking` switches it on or off; None where it does neither."""
    try:
        return {"enabled": True, "disabled": False}.get(_decode_thinking(value).type)
    except msgspec.DecodeError:
        return None


def integer_in(value: msgspec.Raw) -> int:
    """A number of tokens; 0 where it is none."""
    try:
        return max(0, msgspec.json.decode(value, type=int))
    except msgspec.DecodeError:
        return 0


_PIECES: Final = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?|\d{1,3}")
_TEXT_KEYS: Final = ("text", "content", "arguments")


def tokens_min(body: bytes) -> int:
    """The least number of tokens that the texts of the messages can be, for tokenizers that cut between words.

    Words and groups of three digits are never joined there, and what stands between them is not counted; so a request
    that is over a window by this count is over it by any. Only for requests whose window is known: it is slow.
    """
    try:
        messages = msgspec.json.decode(body).get("messages")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
    texts: list[str] = []
    waiting = [messages]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, str):
                    texts += [item] if key in _TEXT_KEYS else []
                else:
                    waiting.append(item)
    return sum(len(_PIECES.findall(text)) for text in texts)


class Dialect(Protocol):
    """One provider's wire format. Pure: bytes to graph and back."""

    @property
    def api(self) -> str:
        """Its name in settings, metrics and tables, e.g. "openai.chat"."""

    def parse_request(self, body: bytes, context: RequestContext = NO_CONTEXT) -> MessageSequence:
        """Raises Undecodable, and its kind Ambiguous."""

    def model_of(self, body: bytes) -> str:
        """The model a request asks for, "" where that cannot be read."""

    def declared_tools(self, body: bytes) -> Tools | None:
        """What a request declares; None where that is nothing, or cannot be read. Slow: for answers with calls."""

    def said(self, body: bytes) -> list[Said]:
        """What the assistant has said so far by a request's account; slow. Nothing of a body that cannot be read."""

    def open_stream(self, sequence: MessageSequence) -> StreamParser:
        """Fresh state for one streamed answer to this request."""

    def parse_answer(self, body: bytes) -> list[StreamEvent]:
        """The events of a whole JSON answer. Raises Undecodable."""

    def error(self, status: int, trouble: Trouble, operation: str, *, retry: bool = False) -> Answer:
        """An HTTP error that this dialect's SDKs raise on; they repeat the request only if `retry`."""

    def stream_error(self, trouble: Trouble) -> bytes:
        """The in-stream error of the same kind: one frame, after which the stream ends."""
