"""The request rules: one function each, in one table, and the verdict they add up to.

A rule names no provider. Whether what it finds is refused by the provider behind this request is data (a level per
reason, see `turngate.adapters.levels`); the stage decides later what to do about it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from turngate.validators.graph import MessageSequence, Pairing, Stray, pair


class Reason(StrEnum):
    """The closed list of reasons: one word in code, error bodies, metrics, tables and docs."""

    CALL_UNANSWERED = "call.unanswered"
    RESULT_ORPHAN = "result.orphan"
    RESULT_DUPLICATE = "result.duplicate"
    RESULT_MISPLACED = "result.misplaced"
    RESULT_MISMATCH = "result.mismatch"

    CALL_ARGUMENTS_UNCLOSED = "call.arguments_unclosed"
    CALL_ARGUMENTS_INVALID = "call.arguments_invalid"
    CALL_BAD_NAME = "call.bad_name"
    STREAM_TRUNCATED = "stream.truncated"
    STREAM_NO_STOP = "stream.no_stop"
    STREAM_STALLED = "stream.stalled"
    STREAM_ERROR_EVENT = "stream.error_event"
    STREAM_BAD_FRAMING = "stream.bad_framing"
    STREAM_CALL_ID_MISSING = "stream.call_id_missing"
    STREAM_CALL_ID_CONFLICT = "stream.call_id_conflict"
    STREAM_TOOL_STOP_WITHOUT_CALL = "stream.tool_stop_without_call"
    STREAM_LENGTH_LIMITED = "stream.length_limited"
    STREAM_FILTERED = "stream.filtered"

    DISPATCH_CONFLICT = "dispatch.conflict"
    DISPATCH_UNKNOWN_OUTCOME = "dispatch.unknown_outcome"
    DISPATCH_UNSENT = "dispatch.unsent"
    LIMIT_BODY = "limit.body"
    LIMIT_HOLD = "limit.hold"
    BODY_UNDECODABLE = "body.undecodable"
    SURFACE_UNCOVERED = "surface.uncovered"
    INTERNAL = "internal"


class Level(StrEnum):
    """What the provider does about a finding."""

    HARD = "hard"  # it refuses the request: there is evidence
    SOFT = "soft"  # it accepts the request, and the meaning is broken; or nobody knows
    OFF = "off"


class Verdict(StrEnum):
    """What a request is, whatever the stage."""

    LEGAL = "legal"
    WAITING = "waiting"  # the last assistant turn has a call without result, and nothing else is wrong
    ILLEGAL = "illegal"
    UNJUDGED = "unjudged"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: what, where (a JSON pointer into the app's body), and what to do about it."""

    reason: Reason
    level: Level
    at: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason} at {self.at}: {self.message} {self.remedy}"


class Judgement(msgspec.Struct, frozen=True):
    """A verdict and its findings, the most telling first."""

    verdict: Verdict
    findings: tuple[Finding, ...] = ()


Levels = Mapping[Reason, Level]
"""The level of each reason at the provider that will read the request; a reason that is missing is off."""


_LEGAL: Final = Judgement(Verdict.LEGAL)


def judge(sequence: MessageSequence, levels: Levels) -> Judgement:
    """Apply every rule that is on. Only hard findings make a sequence illegal or waiting."""
    if not sequence.uses_tools:
        return _LEGAL  # all rules so far are about tool edges
    pairing = pair(sequence)
    findings: list[Finding] = []
    for reason, rule in RULES.items():
        level = levels.get(reason, Level.OFF)
        if level is not Level.OFF:
            findings += (Finding(reason, level, *fault) for fault in rule(sequence, pairing))
    if not findings:
        return _LEGAL
    # Hard ones first, else in the order of the table: a result in the wrong place says more than the open call it leaves.
    findings.sort(key=lambda finding: finding.level is not Level.HARD)
    return Judgement(_verdict(findings, pairing), tuple(findings))


def _verdict(findings: list[Finding], pairing: Pairing) -> Verdict:
    hard = [finding for finding in findings if finding.level is Level.HARD]
    if not hard:
        return Verdict.LEGAL
    still_open = {edge.call.at for edge in pairing.last_turn}
    if all(finding.reason is Reason.CALL_UNANSWERED and finding.at in still_open for finding in hard):
        return Verdict.WAITING
    return Verdict.ILLEGAL


Fault = tuple[str, str, str]
"""(at, message, remedy)."""


def result_orphan(sequence: MessageSequence, pairing: Pairing) -> Iterator[Fault]:
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


def result_mismatch(sequence: MessageSequence, pairing: Pairing) -> Iterator[Fault]:
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


def result_duplicate(_: MessageSequence, pairing: Pairing) -> Iterator[Fault]:
    """A second result for one call."""
    for block, stray in pairing.strays:
        if stray is Stray.REPEATED:
            yield (
                block.at,
                f"call {quoted(block.call_id)} has a result already.",
                "Keep one result per call.",
            )


def result_misplaced(_: MessageSequence, pairing: Pairing) -> Iterator[Fault]:
    """A result that does not stand in the run right behind its call."""
    for block, stray in pairing.strays:
        if stray is Stray.ELSEWHERE:
            yield (
                block.at,
                f"the result of call {quoted(block.call_id)} does not directly follow the assistant message that made it.",
                "Put all results right behind that message, before anything else.",
            )


def call_unanswered(_: MessageSequence, pairing: Pairing) -> Iterator[Fault]:
    """A call without a result. Calls the wire gives no id cannot be checked and are left alone."""
    paused = pairing.last_turn if pairing.paused else ()
    for edge in pairing.edges:
        if (
            edge.result is None
            and not edge.result_elsewhere
            and edge.call.call_id is not None
            and edge not in paused
        ):
            yield (
                edge.call.at,
                f"tool call {quoted(edge.call.call_id)} has no result.",
                "Send its result (success, error or cancelled) right behind the assistant message.",
            )
    for call in pairing.server_calls:
        yield (
            call.at,
            f"the server's tool call {quoted(call.call_id)} has no result, and the turn that waits for it is past.",
            "Send the assistant messages as the provider gave them, or drop the call.",
        )


RULES: Final[Mapping[Reason, Callable[[MessageSequence, Pairing], Iterator[Fault]]]] = {
    Reason.RESULT_ORPHAN: result_orphan,
    Reason.RESULT_MISMATCH: result_mismatch,
    Reason.RESULT_DUPLICATE: result_duplicate,
    Reason.RESULT_MISPLACED: result_misplaced,
    Reason.CALL_UNANSWERED: call_unanswered,
}
"""In order of how much a finding says about the fault."""

QUOTED_CHARACTERS_MAX: Final = 64


def quoted(text: str | None) -> str:
    """An id from the app's body, fit for a message: printable, at most 64 characters, in quotes."""
    if text is None:
        return "(none)"
    shown = "".join(c if c.isprintable() else "?" for c in text[:QUOTED_CHARACTERS_MAX])
    return f'"{shown}…"' if len(text) > QUOTED_CHARACTERS_MAX else f'"{shown}"'
