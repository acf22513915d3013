"""Rules about the order of turns: which role may follow which, who may speak last, and where reasoning must stand."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from turngate.validators.checks import Fault, Profile, quoted
from turngate.validators.graph import Block, Kind, MessageSequence, Role

_CALLS: Final = frozenset({Kind.TOOL_CALL, Kind.SERVER_TOOL_CALL, Kind.SERVER_TOOL_RESULT})
_THINKING: Final = frozenset({Kind.THINKING, Kind.REDACTED_THINKING})
_APART: Final = frozenset({Role.SYSTEM, Role.DEVELOPER})


def role_unsupported(sequence: MessageSequence, profile: Profile) -> Iterator[Fault]:
    """A role of this wire format that this server does not know."""
    if profile.roles is None:
        return
    for turn, role in enumerate(sequence.turns):
        if role not in profile.roles and role is not Role.UNKNOWN:
            yield (
                f"/messages/{turn}/role",
                f"this server knows no role {quoted(role)}.",
                "Send the text in a message of a role it knows.",
            )


def role_of_model(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """The developer's role, which some models do not take. Only models that are known not to are asked about."""
    if Role.DEVELOPER not in sequence.turns:
        return
    for turn, role in enumerate(sequence.turns):
        if role is Role.DEVELOPER:
            yield (
                f"/messages/{turn}/role",
                "this model takes no message of role developer.",
                "Send it as a user's message.",
            )


# -- who follows whom -------------------------------------------------------------------------------------------


def succession(sequence: MessageSequence, profile: Profile) -> Iterator[Fault]:
    """A role behind one that it may not follow. Results without a call are another rule's."""
    successors = profile.successors
    if successors is None:
        return
    before = sequence.before
    for turn, role in enumerate(sequence.turns):
        if (
            before is not None
            and before in successors
            and role not in successors[before]
            and role is not Role.TOOL
        ):
            yield (
                f"/messages/{turn}",
                f"a {role} message may not follow a {before} message.",
                "Move it, or send its text in another place.",
            )
        before = role


def alternation(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """User and assistant must take turns, beginning with the user. With tool messages templates differ: not judged."""
    turns = sequence.turns
    if Role.TOOL in turns or sequence.before is Role.TOOL:
        return
    expected = Role.ASSISTANT if sequence.before is Role.USER else Role.USER
    for turn, role in enumerate(turns):
        if role in _APART:
            continue
        if role is not expected:
            yield (
                f"/messages/{turn}",
                f"a message of role {role} stands where one of role {expected} is due.",
                "Join neighbours of one role, and begin with the user.",
            )
            return
        expected = Role.ASSISTANT if role is Role.USER else Role.USER


def first_role(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """A history that begins with the assistant."""
    if sequence.before is None and sequence.turns[:1] == (Role.ASSISTANT,) and not sequence.continues:
        yield (
            "/messages/0",
            "the history begins with the assistant.",
            "Send a user message first, if this model refuses it.",
        )


def system_first(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """The system prompt as a message: on this wire the first one has a field of its own."""
    if sequence.before is None and sequence.turns[:1] == (Role.SYSTEM,) and not sequence.continues:
        block = next(iter(sequence.blocks), None)
        if block is not None and block.turn == 0:
            yield (
                "/messages/0",
                "the initial system prompt stands among the messages.",
                "Send it in the field `system`.",
            )


def system_place(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """A system message in the middle must follow the user, or a server tool's result, and precede the assistant."""
    turns = sequence.turns
    if Role.SYSTEM not in turns:
        return
    spoken = {block.turn for block in sequence.blocks if block.role is Role.SYSTEM}
    server_ended = {
        first.turn
        for first, second in pairwise((*sequence.blocks, None))
        if first is not None
        and first.kind is Kind.SERVER_TOOL_RESULT
        and (second is None or second.turn != first.turn)
    }
    before = sequence.before or (Role.USER if sequence.continues else None)
    for turn, role in enumerate(turns):
        if role is not Role.SYSTEM:
            before = Role.USER if turn in server_ended else role
            continue
        after = turns[turn + 1] if turn + 1 < len(turns) else Role.ASSISTANT
        if turn not in spoken or before is None:
            continue  # a message of settings alone may stand anywhere; the first one is another rule's
        if before is not Role.USER:
            yield (
                f"/messages/{turn}",
                "a system message must follow a user message, or an assistant message that ends in a server tool's result.",
                "Put it behind the next user message.",
            )
        elif after is Role.USER:
            yield (
                f"/messages/{turn}",
                "a system message must precede an assistant message or end the list.",
                "Put it behind the user message that follows.",
            )


# -- who speaks last --------------------------------------------------------------------------------------------


def last_role(sequence: MessageSequence, profile: Profile) -> Iterator[Fault]:
    """A history that ends with a role this server does not answer."""
    if profile.last_roles is None or not sequence.turns or sequence.setting.continues_turn:
        return
    role = sequence.turns[-1]
    if role in profile.last_roles or _waits(sequence):
        return
    yield (
        f"/messages/{len(sequence.turns) - 1}",
        f"the history ends with a message of role {role}.",
        "Let a user or tool message be the last, or mark the assistant's as a prefix.",
    )


def prefill(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """A history that ends with the assistant's own words, for the model to go on with."""
    if sequence.turns[-1:] != (Role.ASSISTANT,) or sequence.setting.continues_turn or _waits(sequence):
        return
    yield (
        f"/messages/{len(sequence.turns) - 1}",
        "the history ends with an assistant message, which this model does not continue.",
        "Let a user message be the last.",
    )


def assistants_at_end(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """Two assistant messages at the end of the history."""
    if sequence.turns[-2:] == (Role.ASSISTANT, Role.ASSISTANT):
        yield (
            f"/messages/{len(sequence.turns) - 1}",
            "the history ends with two assistant messages.",
            "Join them, or let a user message be the last.",
        )


def _waits(sequence: MessageSequence) -> bool:
    """True where the last message has a call that waits, or a server tool's work that the provider goes on with."""
    last = len(sequence.turns) - 1
    return any(block.kind in _CALLS or block.wire == "fallback" for block in _of_turn(sequence, last))


def _of_turn(sequence: MessageSequence, turn: int) -> list[Block]:
    """The blocks of one of the last messages."""
    found: list[Block] = []
    for block in reversed(sequence.blocks):
        if block.turn < turn:
            break
        if block.turn == turn:
            found.append(block)
    return found[::-1]


# -- reasoning --------------------------------------------------------------------------------------------------


def reasoning_not_echoed(sequence: MessageSequence, profile: Profile) -> Iterator[Fault]:
    """A turn with tool calls came back without the reasoning that led to them."""
    if not _thinks(sequence, profile):
        return
    thought: set[int] = set()
    told = -1
    for block in sequence.blocks:
        if block.kind in _THINKING:
            thought.add(block.turn)
    for block in sequence.blocks:
        if block.kind is Kind.TOOL_CALL and block.turn not in thought and block.turn != told:
            told = block.turn
            yield (
                f"/messages/{block.turn}",
                "an assistant message with tool calls has lost its reasoning.",
                "Send the message as the provider gave it, its reasoning included.",
            )


def reasoning_empty(sequence: MessageSequence, profile: Profile) -> Iterator[Fault]:
    """The reasoning of a turn with calls came back as an empty text."""
    if not _thinks(sequence, profile):
        return
    calls = {block.turn for block in sequence.blocks if block.kind is Kind.TOOL_CALL}
    for block in sequence.blocks:
        if block.kind is Kind.THINKING and block.wire == EMPTY and block.turn in calls:
            yield (
                block.at,
                "the reasoning of an assistant message with tool calls is empty.",
                "Send the reasoning as the provider gave it.",
            )


EMPTY: Final = "empty"
"""`Block.wire` of reasoning that is there and says nothing."""


def _thinks(sequence: MessageSequence, profile: Profile) -> bool:
    """True where this request's model thinks: the request says so, or says nothing and the model does by default."""
    if sequence.setting.thinking is None:
        return profile.thinks is not None and profile.thinks.search(sequence.model) is not None
    return sequence.setting.thinking


def reasoning_not_first(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """In a tool loop with thinking on, an assistant message begins with thinking.

    The loop runs from the last message of the user's own to the results at the end. Only its first message has
    thinking where thoughts are not interleaved, so one of them is enough; none is a fault.
    """
    turns = sequence.turns
    if not sequence.setting.thinking or sequence.continues or turns[-1:] != (Role.USER,):
        return
    last: Block | None = None
    results = set()
    for block in reversed(sequence.blocks):
        if block.role is Role.USER and block.kind is Kind.TOOL_RESULT and last is None:
            results.add(block.turn)
        elif block.role is Role.ASSISTANT:
            last = block  # ends as the first block of the earliest assistant message of the loop
            if block.kind in _THINKING and block.field == "/content" and block.index == 0:
                return
        elif block.kind is not Kind.TOOL_RESULT:
            break
    if last is None or not results or _calls_nothing(sequence):
        return
    yield (
        last.at,
        "with thinking enabled, the assistant turn of a tool loop must begin with its thinking.",
        "Send the turn as the provider gave it: the thinking block first, unchanged.",
    )


def _calls_nothing(sequence: MessageSequence) -> bool:
    """True where the assistant's last message has no call: the results at the end answer nothing."""
    for block in reversed(sequence.blocks):
        if block.role is Role.ASSISTANT:
            return not any(b.kind is Kind.TOOL_CALL for b in _of_turn(sequence, block.turn))
    return True


def reasoning_disabled(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """Thinking in a last assistant message, and thinking switched off."""
    if sequence.setting.thinking is not False or sequence.turns[-1:] != (Role.ASSISTANT,):
        return
    for block in _of_turn(sequence, len(sequence.turns) - 1):
        if block.kind in _THINKING:
            yield (
                block.at,
                "thinking is disabled, and the last assistant message has a thinking block.",
                "Enable thinking, or drop the block.",
            )


def reasoning_at_end(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """A history whose very last block is thinking: there is nothing to go on with."""
    block = sequence.blocks[-1] if sequence.blocks else None
    if block is None or block.kind not in _THINKING or block.turn != len(sequence.turns) - 1:
        return
    yield (
        block.at,
        "the last block of the last assistant message is thinking.",
        "Drop the message, or send it with what followed the thinking.",
    )
