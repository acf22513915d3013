"""Two witnesses of what the app was given. They share no code with the decision and import nothing of ours.

`Scanner` reads the bytes written to the app, only those, and says at the end whether an app could have run a tool
call that is not whole. `Flow` compares what came in with what went out, in one direction of one exchange.

The scanner looks for marks in blocks of a few KB, and decodes only events that bear one. Measured (perf_counter round
30,000 events and `end`, on a machine where an empty function call takes 65 ns): 0.38 us for a text delta of Chat
Completions (280 bytes), 0.20 us for one of Messages (120), 9 us for a piece of a call. Of a `Flow`, `took` and `gave` take
0.2 us each for 280 bytes, and 0.25 ms for 1 MiB.
"""

import json
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

BLOCK_BYTES: Final = 8 * 1024
"""How much may wait to be looked at together."""

KEPT_BYTES_MAX: Final = 64 * 2**20
"""Bytes of one whole answer or unfinished event, and characters of all arguments. The proxy judges no more either."""

CALLS_MAX: Final = 1000
"""More than any model makes in one answer; it bounds what finding the right call for a piece costs."""

_OPENING: Final = {"openai.chat": b"_call", "anthropic.messages": b"tool_use"}
"""What is in every event that begins a call (`tool_calls`, `function_call`). Until one comes nothing else matters."""

_MARKS: Final = {
    "openai.chat": (
        b"_call",
        b"[DONE]",
        b"error",
        b'finish_reason":"',
        b'finish_reason": "',
        b'finish_reason" ',
    ),
    "anthropic.messages": (
        b"tool_use",
        b"input_json_delta",
        b"content_block_stop",
        b"message_stop",
        b"error",
    ),
}
"""What is in every event that goes on with a call, ends it, ends the answer or breaks it off."""


class Flow:
    """A checksum of what came in and of what went out. Not cryptographic: it has to find our mistakes, not a forger.

    `same`: pieces mostly go out as the very objects that came in, which need no sum; from the first other one on
    both sides are summed. Until a piece goes out it is kept then.
    """

    __slots__ = ("_given", "_taken", "_waiting", "bytes_in", "bytes_out")

    def __init__(self, *, same: bool = False) -> None:
        self._taken = self._given = 0
        self._waiting: deque[bytes] | None = deque() if same else None
        self.bytes_in = self.bytes_out = 0

    def took(self, data: bytes) -> None:
        """These bytes came in next."""
        self.bytes_in += len(data)
        if self._waiting is None:
            self._taken = crc32(data, self._taken)
        elif data:
            self._waiting.append(data)

    def gave(self, data: bytes) -> None:
        """These bytes went out next."""
        self.bytes_out += len(data)
        waiting = self._waiting
        if waiting is not None:
            if not data:
                return
            if waiting and waiting[0] is data:
                waiting.popleft()
                return
            for piece in waiting:
                self._taken = crc32(piece, self._taken)
            self._waiting = None
        self._given = crc32(data, self._given)

    @property
    def mismatch(self) -> str:
        """What differs, for an exchange that was passed and is over; empty where nothing does. Holds no content."""
        if self.bytes_in != self.bytes_out:
            return f"{self.bytes_in} bytes came in, {self.bytes_out} went out"
        return "" if self._taken == self._given else f"{self.bytes_in} bytes came in, others went out"


class Scanner:
    """Reads one answer of `api` as it was written to the app, without content coding.

    `gave_up` tells that it grew too big to be read. Raises KeyError for an api it does not know, and nothing else.
    """

    __slots__ = (
        "_calls",
        "_ended",
        "_finished",
        "_kept",
        "_kept_bytes",
        "_look_at",
        "_marks",
        "_messages",
        "_open",
        "_opening",
        "_over",
        "_room",
        "_tail",
        "_whole",
        "gave_up",
    )

    def __init__(self, api: str) -> None:
        self._opening = _OPENING[api]
        self._marks = _MARKS[api]
        self._messages = api == "anthropic.messages"
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._look_at = BLOCK_BYTES
        self._tail = b""
        self._whole: bool | None = None
        self._calls: list[_Call] = []
        self._open: dict[tuple[int, int], _Call] = {}
        self._finished: set[int] = set()
        self._ended = False
        self._over = False
        self._room = KEPT_BYTES_MAX
        self.gave_up = False

    def see(self, data: bytes) -> None:
        """These bytes were written to the app next."""
        self._kept.append(data)
        self._kept_bytes += len(data)
        if self._kept_bytes >= self._look_at:
            self._look()

    def end(self, *, clean: bool) -> str:
        """What an app could have run that is not whole; empty where nothing is. Holds no content.

        `clean`: the transfer ended in HTTP's proper way, so that the app's client does not raise.
        """
        self._look()
        if self._whole:
            self._read_whole(b"".join(self._kept))
        elif self._tail and not self._over:
            # Clients that read line by line do not wait for the blank one; half an event is dropped by all.
            self._read_event(self._tail, half=True)
        if not clean:
            self._break_off()
        return next(self._faults(), "") if self._calls else ""

    def _faults(self) -> Iterator[str]:
        times = Counter((call.choice, call.id) for call in self._calls)
        for number, call in enumerate(self._calls):
            if fault := call.fault():
                yield f"call {number} {fault}"
            elif self._messages and not call.closed:
                yield f"call {number} is not closed"
            elif not self._ends(call):
                yield f"call {number} is in an answer without an end"
            elif times[call.choice, call.id] > 1:
                yield f"call {number} shares its id with another"

    def _ends(self, call: "_Call") -> bool:
        return self._ended or call.choice in self._finished

    def _break_off(self) -> None:
        """From here on the app's client raises: only what had ended before may have been run."""
        self._calls = [call for call in self._calls if self._ends(call)]
        self._over = True

    def _give_up(self) -> None:
        self.gave_up = self._over = True
        self._tail = b""
        self._kept.clear()
        self._calls.clear()
        self._open.clear()

    # Finding events

    def _look(self) -> None:
        """Look at what has been kept; what is no whole event yet stays in `_tail`."""
        if self._whole is None:
            begun = b"".join(self._kept).lstrip()
            if begun:
                self._whole = begun.startswith(b"{")
        if self._over:
            self._kept.clear()
        elif self._whole:
            if self._kept_bytes > KEPT_BYTES_MAX:
                self._give_up()
            return
        else:
            data = b"".join((self._tail, *self._kept))
            self._kept.clear()
            self._tail = self._scan(data)
            if len(self._tail) > KEPT_BYTES_MAX:
                self._give_up()
        self._kept_bytes = 0
        # An event that has outgrown the block is looked at each time it has doubled, not for every block.
        self._look_at = max(BLOCK_BYTES, len(self._tail))

    def _scan(self, data: bytes) -> bytes:
        """Read the events that bear a mark; return what is behind the last whole event."""
        if b"\r" in data:
            cut = data.removesuffix(b"\r")  # its LF may be in the next bytes
            data = cut.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + data[len(cut) :]
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            return data
        if self._calls or data.find(self._opening, 0, end) >= 0:
            for event in data[:end].split(b"\n\n"):
                if any(mark in event for mark in self._marks) and not self._over:
                    self._read_event(event)
        return b"" if self._over else data[end:]

    def _read_event(self, event: bytes, *, half: bool = False) -> None:
        """Take what one event says to an app. `half`: it may be cut."""
        lines = event.split(b"\n")
        text = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
        if text.startswith(b"[DONE]"):
            self._ended = self._over = True
            return
        try:
            said = json.loads(text.decode(errors="replace")) if text else None
        except (ValueError, RecursionError):
            if not half:
                self._break_off()  # a client that decodes it raises
            return
        if any(line in (b"event: error", b"event:error") for line in lines):
            self._break_off()
        elif isinstance(said, dict):
            if self._messages:
                self._read_messages(said)
            else:
                self._read_chat(said)

    def _read_whole(self, body: bytes) -> None:
        """Take a JSON answer. One that does not parse is run by nobody."""
        if self._opening not in body and b"\\u" not in body:  # which could spell it
            return
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            return
        self._ended = True
        if not self._messages:
            self._read_chat(said)
            return
        for block in _dicts(said.get("content")):
            if block.get("type") == "tool_use":
                self._new_call(0, _text(block, "id"), _text(block, "name")).closed = True

    # What events say

    def _read_messages(self, said: dict[str, Any]) -> None:
        place = (0, _number(said.get("index")))
        match said.get("type"):
            case "content_block_start":
                block = _dict(said.get("content_block"))
                self._open.pop(place, None)
                if block.get("type") == "tool_use":
                    self._open[place] = self._new_call(0, _text(block, "id"), _text(block, "name"))
            case "content_block_delta":
                call = self._open.get(place)
                if call is not None:
                    self._add(call, _dict(said.get("delta")).get("partial_json"))
            case "content_block_stop":
                if place in self._open:
                    self._open.pop(place).closed = True
            case "message_stop":
                self._ended = True
            case "error":
                self._break_off()

    def _read_chat(self, said: dict[str, Any]) -> None:
        if said.get("error"):
            self._break_off()
            return
        for choice in _dicts(said.get("choices")):
            number = _number(choice.get("index"))
            message = _dict(choice.get("delta")) or _dict(choice.get("message"))
            for item in _dicts(message.get("tool_calls")):
                self._read_chat_call(number, item)
            legacy = _dict(message.get("function_call"))
            if legacy.get("name") or legacy.get(
                "arguments"
            ):  # some servers put an empty one into every answer
                self._read_chat_call(number, {"id": "function_call", "function": legacy})
            if choice.get("finish_reason"):
                self._finished.add(number)

    def _read_chat_call(self, choice: int, item: dict[str, Any]) -> None:
        id_ = _text(item, "id")
        id_ = "" if id_ == "null" else id_
        index = item.get("index")
        call = self._known_call(choice, index if isinstance(index, int) else None, id_)
        if call is None:
            call = self._new_call(choice, id_, "")
            call.free_text = isinstance(item.get("custom"), dict)
            if isinstance(index, int):
                self._open[choice, index] = call
        body = _dict(item.get("function")) or _dict(item.get("custom"))
        call.id = call.id or id_
        call.name = call.name or _text(body, "name")
        self._add(call, body.get("input") if call.free_text else body.get("arguments"))

    def _known_call(self, choice: int, index: int | None, id_: str) -> "_Call | None":
        """The call that a piece goes on with. Some servers number every call 0, others leave the number out."""
        if index is not None:
            call = self._open.get((choice, index))
            if call is not None and (not id_ or call.id in ("", id_)):
                return call
        of_choice = (call for call in reversed(self._calls) if call.choice == choice)
        return next((call for call in of_choice if (call.id == id_ if id_ else index is None)), None)

    def _new_call(self, choice: int, id_: str, name: str) -> "_Call":
        """A call behind an end needs an end of its own."""
        if not self._whole:
            self._ended = False
            self._finished.discard(choice)
        call = _Call(choice, id_, name)
        if len(self._calls) < CALLS_MAX:
            self._calls.append(call)
        else:
            self._give_up()
        return call

    def _add(self, call: "_Call", fragment: object) -> None:
        """Arguments that are no string are JSON of the answer itself, and whole where that parses."""
        if isinstance(fragment, str):
            call.fragments.append(fragment)
            self._room -= len(fragment)
            if self._room < 0:
                self._give_up()


@dataclass(slots=True)
class _Call:
    """A tool call as an app puts it together."""

    choice: int
    id: str
    name: str
    fragments: list[str] = field(default_factory=list)
    free_text: bool = False
    closed: bool = False

    def fault(self) -> str:
        """Why no app should run this, as far as the call itself tells."""
        if not self.id:
            return "has no id"
        if not self.name:
            return "has no name"
        text = "".join(self.fragments)
        # No text at all stands for an empty object in both dialects.
        return "" if not text or self.free_text or _parses(text) else "has arguments that do not parse"


def _parses(text: str) -> bool:
    """Whether it is one JSON value, by grammar: numbers stay text, so that their size does not matter."""
    try:
        _GRAMMAR.decode(text)
    except ValueError:
        return False
    except RecursionError:
        return True  # too deep to tell, and no witness speaks on suspicion
    return True


_GRAMMAR: Final = json.JSONDecoder(parse_int=str, parse_float=str)


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _text(said: dict[str, Any], key: str) -> str:
    value = said.get(key)
    return value if isinstance(value, str) else ""


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
