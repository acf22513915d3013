"""What every wire format's file offers, and the error all of them raise on a body they cannot read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from turngate.validators.graph import MessageSequence
from turngate.validators.rules import Reason
from turngate.validators.stream import StreamEvent, StreamParser


class Undecodable(Exception):
    """The body is not what this dialect can be read from: the request is unjudged, never refused for it."""


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


class Dialect(Protocol):
    """One provider's wire format. Pure: bytes to graph and back."""

    @property
    def api(self) -> str:
        """Its name in settings, metrics and tables, e.g. "openai.chat"."""

    def parse_request(self, body: bytes) -> MessageSequence:
        """Raises Undecodable."""

    def model_of(self, body: bytes) -> str:
        """The model a request asks for, "" where that cannot be read."""

    def open_stream(self, sequence: MessageSequence) -> StreamParser:
        """Fresh state for one streamed answer to this request."""

    def parse_answer(self, body: bytes) -> list[StreamEvent]:
        """The events of a whole JSON answer. Raises Undecodable."""

    def error(self, status: int, trouble: Trouble, operation: str, *, retry: bool = False) -> Answer:
        """An HTTP error that this dialect's SDKs raise on; they repeat the request only if `retry`."""

    def stream_error(self, trouble: Trouble) -> bytes:
        """The in-stream error of the same kind: one frame, after which the stream ends."""
