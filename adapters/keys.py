"""Is a key repeated where a request is decoded?

JSON does not say which of two equal keys counts, and decoders disagree: a checker and the provider may read two
different bodies. The fast decoder takes the last one silently. So what was read of the messages is written out again:
if that is as long as their text, nothing was dropped (`nothing_dropped`). A message with a key that the adapter does not
know fails that test. Then each object on the decoded path is taken apart once more, without looking into its values: if
its keys and values, with the punctuation that compact JSON needs, add up to the length of its text, nothing was dropped.
Only a body that does not add up is read slowly and exactly.
"""

import json
from itertools import chain
from typing import Any, Final

import msgspec

_Object = dict[str, msgspec.Raw]
_decode_object = msgspec.json.Decoder(_Object).decode
_decode_objects = msgspec.json.Decoder(list[_Object]).decode
_decode_lists = msgspec.json.Decoder(list[list[_Object]]).decode

_MESSAGES: Final = b'"messages":['
_PER_KEY: Final = len('"":,')
_OPENS_LIST: Final = ord("[")
_OPENS_OBJECT: Final = ord("{")


def compacted(body: bytes) -> bytes:
    """The body without blanks between its tokens, where its first key shows that it has some. Raises DecodeError.

    Only a compact body passes the quick test below, and many clients write `": "`.
    """
    colon = body.find(b'":') + 2
    if body[colon : colon + 1].isspace() or body[1:2].isspace():
        return msgspec.json.format(body, indent=-1)
    return body


def nothing_dropped(body: bytes, length: int) -> bool:
    """True if the messages' text in the body has this length, and no key stands twice beside them.

    `length` is that of the messages written out again. Written text is the shortest there is, so a key that was dropped
    makes it shorter than the body's. The messages' place need not be known for certain: only where they begin and end
    there does an object with an empty list in their stead remain that adds up.
    """
    at = body.find(_MESSAGES) + len(_MESSAGES) - 1
    rest = body[:at] + b"[]" + body[at + length :]
    try:
        top = _decode_object(rest)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    messages = top.get("messages")
    return messages is not None and bytes(messages) == b"[]" and _length([top]) == len(rest)


def repeats_key(body: bytes) -> bool:
    """True if an object that a request's adapter reads has one key twice.

    The body must be JSON that has been decoded. Linear, and the walking is left to the decoder.
    """
    try:
        if _adds_up(body):
            return False
        return not _adds_up(msgspec.json.format(body, indent=-1)) and _repeats_slowly(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _repeats_slowly(body)


def _adds_up(body: bytes) -> bool:
    top = _decode_object(body)
    if _length([top]) != len(body):
        return False
    text = top.get("messages")
    if text is None or len(text) == len("[]"):
        return True
    messages = _decode_objects(text)
    if 1 + len(messages) + _length(messages) != len(text):
        return False
    contents = _members(messages, "content", _OPENS_LIST)
    calls = _members(messages, "tool_calls", _OPENS_LIST)
    functions = _members(messages, "function_call", _OPENS_OBJECT)
    for lists, of_calls in ((contents, False), (calls, True)):
        if not lists:
            continue
        joined = b"[" + b",".join(lists) + b"]"
        objects = list(chain.from_iterable(_decode_lists(joined)))
        if 1 + 2 * len(lists) + len(objects) + _length(objects) != len(joined):
            return False
        if of_calls:
            functions += _members(objects, "function", _OPENS_OBJECT)
            functions += _members(objects, "custom", _OPENS_OBJECT)
    if not functions:
        return True
    joined = b"[" + b",".join(functions) + b"]"
    objects = _decode_objects(joined)
    return 1 + len(objects) + _length(objects) == len(joined)


def _members(objects: list[_Object], name: str, opens: int) -> list[msgspec.Raw]:
    """The values of this key that are not empty and begin with this byte."""
    return [
        value
        for item in objects
        if (value := item.get(name)) is not None and len(value) > len("[]") and memoryview(value)[0] == opens
    ]


def _length(objects: list[_Object]) -> int:
    """Length of the compact text of these objects, if their keys are plain ASCII and none is empty."""
    keys = sum(map(len, objects))
    names = sum(map(len, chain.from_iterable(objects)))
    values = sum(map(len, chain.from_iterable(map(dict.values, objects))))
    return len(objects) + _PER_KEY * keys + names + values


class _Repeating(dict[str, Any]):
    """An object with a key that stands in it twice."""


def _repeats_slowly(body: bytes) -> bool:
    text = body.decode(errors="replace")  # what is no text may stand where nothing is decoded
    try:
        top = json.loads(text, object_pairs_hook=_object, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        return False  # nobody can read it twice; whether it can be read at all is the adapter's question
    if not isinstance(top, dict):
        return False
    if isinstance(top, _Repeating):
        return True
    for message in _objects(top.get("messages")):
        if isinstance(message, _Repeating) or any(
            isinstance(block, _Repeating) for block in _objects(message.get("content"))
        ):
            return True
        for call in (*_objects(message.get("tool_calls")), {"function": message.get("function_call")}):
            parts = (call, call.get("function"), call.get("custom"))
            if any(isinstance(part, _Repeating) for part in parts):
                return True
    return False


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    return value if len(value) == len(pairs) else _Repeating(value)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
