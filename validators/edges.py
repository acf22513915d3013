"""Rules about tool edges: which result answers which call, and the ids and names they go by."""

from collections.abc import Iterator

from turngate.validators.checks import Fault, Profile, quoted
from turngate.validators.graph import Edge, Kind, MessageSequence, Pairing, Stray


def result_orphan(sequence: MessageSequence, pairing: Pairing, _: Profile) -> Iterator[Fault]:
    """A result whose call is nowhere. Where the provider holds earlier turns, the call may be among those."""
    if sequence.continues:
        return
    for block, stray in pairing.strays:
        if stray is Stray.UNKNOWN_ID:
            yield (
                block.at,
                f"no tool call has id {quoted(block.call_id)}.",
                "Send the assistant message with that call before it, or drop the result.",
            )


def result_mismatch(sequence: MessageSequence, pairing: Pairing, _: Profile) -> Iterator[Fault]:
    """A result stands where an open call's result belongs, with an id that no call has."""
    if sequence.continues:
        return
    for block, stray in pairing.strays:
        if stray is Stray.WRONG_ID:
            yield (
                f"{block.at}/{sequence.result_id_key}",
                f"id {quoted(block.call_id)} is no call of the assistant message it answers.",
                "Give the result the id of the call that waits for it.",
            )


def result_duplicate(_: MessageSequence, pairing: Pairing, __: Profile) -> Iterator[Fault]:
    """A second result for one call."""
    for block, stray in pairing.strays:
        if stray is Stray.REPEATED:
            yield (
                block.at,
                f"call {quoted(block.call_id)} has a result already.",
                "Keep one result per call.",
            )


def result_misplaced(_: MessageSequence, pairing: Pairing, __: Profile) -> Iterator[Fault]:
    """A result that does not stand in the run right behind its call."""
    for block, stray in pairing.strays:
        if stray is Stray.ELSEWHERE:
            yield (
                block.at,
                f"the result of call {quoted(block.call_id)} does not directly follow the assistant message that made it.",
                "Put all results right behind that message, before anything else.",
            )


def call_unanswered(_: MessageSequence, pairing: Pairing, __: Profile) -> Iterator[Fault]:
    """A call without a result. Calls the wire gives no id cannot be checked and are left alone."""
    for edge in _open(pairing):
        if edge.stand_in is None:
            yield _unanswered(edge)


def call_stood_in(_: MessageSequence, pairing: Pairing, __: Profile) -> Iterator[Fault]:
    """A call without a result of its id, and one of another id in that place: some servers only count."""
    for edge in _open(pairing):
        if edge.stand_in is not None:
            yield _unanswered(edge)


def _open(pairing: Pairing) -> Iterator[Edge]:
    paused = {edge.call.at for edge in pairing.last_turn} if pairing.paused else ()
    for edge in pairing.edges:
        if (
            edge.result is None
            and not edge.result_elsewhere
            and edge.call.call_id is not None
            and edge.call.at not in paused
        ):
            yield edge


def _unanswered(edge: Edge) -> Fault:
    return (
        edge.call.at,
        f"tool call {quoted(edge.call.call_id)} has no result.",
        "Send its result (success, error or cancelled) right behind the assistant message.",
    )


def server_call_unanswered(_: MessageSequence, pairing: Pairing, __: Profile) -> Iterator[Fault]:
    """A server tool's call that nobody will answer any more."""
    for call in pairing.server_calls:
        yield (
            call.at,
            f"the server's tool call {quoted(call.call_id)} has no result, and the turn that waits for it is past.",
            "Send the assistant messages as the provider gave them, or drop the call.",
        )


# -- ids and names ----------------------------------------------------------------------------------------------


def id_repeated(_: MessageSequence, pairing: Pairing, __: Profile) -> Iterator[Fault]:
    """Two calls of one id in one turn: nothing can tell their results apart."""
    for edge in pairing.repeated:
        yield (
            edge.call.at,
            f"another call of this turn has id {quoted(edge.call.call_id)} too.",
            "Give each call of a turn an id of its own, and its result the same one.",
        )


def id_reused(_: MessageSequence, pairing: Pairing, __: Profile) -> Iterator[Fault]:
    """An id that comes back in a later turn, once for each id: edges still hold, names in logs do not."""
    for edge in pairing.reused.values():
        yield (
            edge.call.at,
            f"an earlier turn has a call of id {quoted(edge.call.call_id)} too.",
            "Give each call of a conversation an id of its own.",
        )


def call_without_id(_: MessageSequence, pairing: Pairing, __: Profile) -> Iterator[Fault]:
    """A call that no result can name. The legacy function call has no id by design."""
    for edge in pairing.edges:
        if edge.call.call_id is None and edge.call.wire != "function_call":
            yield edge.call.at, "the call has no id.", "Send the call with the id the model gave it."


def id_pattern(sequence: MessageSequence, _: Pairing, profile: Profile) -> Iterator[Fault]:
    """An id in a form this server does not take, told once: at the call, or at a result whose call is elsewhere."""
    pattern = profile.call_id
    if pattern is None:
        return
    ids = {block.call_id for block in sequence.blocks}
    wrong = {id_ for id_ in ids if id_ is not None and pattern.fullmatch(id_) is None}
    for block in sequence.blocks if wrong else ():
        id_ = block.call_id
        if id_ in wrong and (block.kind is Kind.TOOL_CALL or block.kind is Kind.TOOL_RESULT):
            wrong.remove(id_)
            key = sequence.result_id_key if block.kind is Kind.TOOL_RESULT else "id"
            yield (
                f"{block.at}/{key}",
                f"id {quoted(id_)} is not of the form {pattern.pattern}.",
                "Map ids of other providers to ids of this form, in the call and in its result.",
            )


def id_too_long(sequence: MessageSequence, pairing: Pairing, profile: Profile) -> Iterator[Fault]:
    """An id beyond the length that this server is known to take."""
    limit = profile.call_id_characters_max
    for edge in pairing.edges if limit is not None else ():
        if len(edge.call.call_id or "") > (limit or 0):
            yield (
                f"{edge.call.at}/id",
                f"id {quoted(edge.call.call_id)} has more than {limit} characters.",
                "Map the id to a shorter one, in the call and in its result.",
            )


def server_id_pattern(sequence: MessageSequence, _: Pairing, profile: Profile) -> Iterator[Fault]:
    """A server tool's call with an id that this server did not make."""
    pattern = profile.server_call_id
    for block in sequence.blocks if pattern is not None else ():
        if (
            block.wire == "server_tool_use"
            and block.call_id is not None
            and pattern is not None
            and pattern.fullmatch(block.call_id) is None
        ):
            yield (
                f"{block.at}/id",
                f"id {quoted(block.call_id)} is not of the form {pattern.pattern}.",
                "Send server tool calls as the provider gave them, or drop them with their results.",
            )


def name_empty(sequence: MessageSequence, pairing: Pairing, _: Profile) -> Iterator[Fault]:
    """A call of a tool without a name."""
    for edge in pairing.edges:
        if not edge.call.name:
            yield (
                _name_at(sequence, edge),
                "the call names no tool.",
                "Send the name of the tool, or drop the call.",
            )


def name_pattern(sequence: MessageSequence, pairing: Pairing, profile: Profile) -> Iterator[Fault]:
    """A call of a tool by a name that this server does not take."""
    pattern = profile.call_name
    if pattern is None:
        return
    names = {edge.call.name for edge in pairing.edges}
    wrong = {name for name in names if name and pattern.fullmatch(name) is None}
    for edge in pairing.edges if wrong else ():
        if edge.call.name in wrong:
            yield (
                _name_at(sequence, edge),
                f"name {quoted(edge.call.name)} is not of the form {pattern.pattern}.",
                "Rename the tool, in its definition and in the calls of the history.",
            )


def _name_at(sequence: MessageSequence, edge: Edge) -> str:
    return (
        f"{edge.call.at}/{edge.call.wire or 'function'}/name"
        if sequence.names_nested
        else f"{edge.call.at}/name"
    )


def tool_undeclared(sequence: MessageSequence, pairing: Pairing, _: Profile) -> Iterator[Fault]:
    """A call in the history of a tool that the request does not declare."""
    tools = sequence.setting.tools
    if tools is None or sequence.continues:
        return
    names = {tool.name for tool in tools}
    for edge in pairing.edges:
        if edge.call.name and edge.call.name not in names:
            yield (
                edge.call.at,
                f"no tool {quoted(edge.call.name)} is declared.",
                "Declare the tool as long as its calls are in the history.",
            )


def server_tool_undeclared(sequence: MessageSequence, pairing: Pairing, _: Profile) -> Iterator[Fault]:
    """A mixed turn waits for a server tool that the request no longer declares."""
    if sequence.continues:
        return
    names = {tool.name for tool in sequence.setting.tools or ()}
    for call in pairing.deferred:
        if call.name in _NAMED_AS_DECLARED and call.name not in names:
            yield (
                call.at,
                f"the turn waits for the server tool {quoted(call.name)}, which is not declared.",
                "Declare the same tools as in the request before.",
            )


_NAMED_AS_DECLARED = frozenset({"web_search", "web_fetch"})
"""Other server tools are called by names that differ from those they are declared by."""
