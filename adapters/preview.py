"""The text of an answer as an app would show it, read from bytes that have been let through.

Live traffic is judged by the size of its text alone (see `turngate.validators.stream.TextDelta`); only reports on
recorded answers want the text itself. Reasoning is not part of it.
"""

from collections.abc import Iterator
from typing import Any

import orjson

from turngate.adapters import sse
from turngate.adapters.registry import CHAT, MESSAGES


def text_of(api: str, data: bytes, *, streamed: bool) -> str:
    """Everything shown of one answer in this dialect; what cannot be read shows nothing."""
    texts = {CHAT.api: _chat, MESSAGES.api: _messages}[api]
    pieces = (sse.fields(frame)[1] for frame in sse.SseFramer().feed(data)) if streamed else (data,)
    return "".join(text for piece in pieces if piece for text in texts(_object(piece)))


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}  # `[DONE]`, or a frame that the verdict on the answer has named already
    return value if isinstance(value, dict) else {}


def _chat(answer: dict[str, Any]) -> Iterator[str]:
    for choice in _objects(answer.get("choices")):
        said = choice.get("delta") or choice.get("message")
        if isinstance(said, dict) and isinstance(said.get("content"), str):
            yield said["content"]


def _messages(answer: dict[str, Any]) -> Iterator[str]:
    """An event of a stream, or a whole message."""
    for block in (answer.get("delta"), answer.get("content_block"), *_objects(answer.get("content"))):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            yield block["text"]


def _objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
