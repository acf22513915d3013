"""The request rules in one table, and the verdict they add up to.

A rule names no provider. Whether what it finds is refused by the provider behind this request is data (a level per
check, see `turngate.adapters.levels`); the stage decides later what to do about it. The rules themselves stand by
subject in `edges`, `turns` and `shapes`; what a single message tells, the adapter has noticed already.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

import msgspec

from turngate.validators import edges, shapes, turns
from turngate.validators.checks import (
    OFF,
    RANK,
    REASONS,
    Fault,
    Grade,
    Level,
    Levels,
    Profile,
    Reason,
    profile_of,
    quoted,
)
from turngate.validators.graph import Check, MessageSequence, Pairing, pair

__all__ = ["Finding", "Judgement", "Level", "Levels", "Reason", "Verdict", "judge", "quoted"]


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


_LEGAL: Final = Judgement(Verdict.LEGAL)

Found = tuple[Check, Level, Fault]
EdgeRule = Callable[[MessageSequence, Pairing, Profile], Iterator[Fault]]
TurnRule = Callable[[MessageSequence, Profile], Iterator[Fault]]


def judge(sequence: MessageSequence, levels: Levels) -> Judgement:
    """Apply every rule that is on. Only hard findings make a sequence illegal or waiting."""
    profile = profile_of(levels)
    turn_rules, edge_rules = _active(profile)
    found: list[Found] = []
    model = sequence.model
    for oddities in (sequence.oddities, sequence.setting.oddities):
        for oddity in oddities:
            level = profile.grades.get(oddity.check, OFF).of(model)
            if level is not Level.OFF:
                found.append((oddity.check, level, shapes.worded(oddity)))
    for check, turn_rule, grade in turn_rules:
        for fault in turn_rule(sequence, profile):
            found.append((check, grade.of(model), fault))
    pairing: Pairing | None = None
    if sequence.uses_tools:  # else there are no edges to look at
        pairing = pair(sequence)
        for check, edge_rule, grade in edge_rules:
            for fault in edge_rule(sequence, pairing, profile):
                found.append((check, grade.of(model), fault))
    found = [entry for entry in found if entry[1] is not Level.OFF]
    if not found:
        return _LEGAL
    # Hard ones first, else in the order of the table: a result in the wrong place says more than the open call it leaves.
    found.sort(key=lambda entry: (entry[1] is not Level.HARD, RANK[entry[0]]))
    return Judgement(
        _verdict(found, pairing),
        tuple(Finding(REASONS[check], level, *fault) for check, level, fault in found),
    )


def _verdict(found: list[Found], pairing: Pairing | None) -> Verdict:
    hard = [(check, fault) for check, level, fault in found if level is Level.HARD]
    if not hard:
        return Verdict.LEGAL
    still_open = {edge.call.at for edge in pairing.last_turn} if pairing is not None else set()
    if all(REASONS[check] is Reason.CALL_UNANSWERED and fault[0] in still_open for check, fault in hard):
        return Verdict.WAITING
    return Verdict.ILLEGAL


@lru_cache(maxsize=64)
def _active(
    profile: Profile,
) -> tuple[tuple[tuple[Check, TurnRule, Grade], ...], tuple[tuple[Check, EdgeRule, Grade], ...]]:
    """The rules that this server has switched on. Profiles are few; the cache is bounded for the sake of tests."""
    grades = {check: profile.grades.get(check, OFF) for check in RANK}
    on = {check for check, grade in grades.items() if grade.level is not Level.OFF}
    return (
        tuple((check, rule, grades[check]) for check, rule in TURN_RULES.items() if check in on),
        tuple((check, rule, grades[check]) for check, rule in EDGE_RULES.items() if check in on),
    )


TURN_RULES: Final[Mapping[Check, TurnRule]] = {
    Check.ROLE_UNSUPPORTED: turns.role_unsupported,
    Check.ROLE_OF_MODEL: turns.role_of_model,
    Check.SUCCESSION: turns.succession,
    Check.ALTERNATION: turns.alternation,
    Check.FIRST_ROLE: turns.first_role,
    Check.SYSTEM_FIRST: turns.system_first,
    Check.SYSTEM_PLACE: turns.system_place,
    Check.LAST_ROLE: turns.last_role,
    Check.PREFILL: turns.prefill,
    Check.ASSISTANTS_AT_END: turns.assistants_at_end,
    Check.REASONING_NOT_ECHOED: turns.reasoning_not_echoed,
    Check.REASONING_EMPTY: turns.reasoning_empty,
    Check.REASONING_NOT_FIRST: turns.reasoning_not_first,
    Check.REASONING_DISABLED: turns.reasoning_disabled,
    Check.REASONING_AT_END: turns.reasoning_at_end,
    Check.PART_UNSUPPORTED: shapes.part_unsupported,
    Check.AUDIO_OF_MODEL: shapes.audio_of_model,
    Check.TOOL_NAME_PATTERN: shapes.tool_name_pattern,
    Check.TOOL_NAME_REPEATED: shapes.tool_name_repeated,
    Check.CHOICE_UNDECLARED: shapes.choice_undeclared,
    Check.TOOLS_MISSING: shapes.tools_missing,
    Check.MARKS_TOO_MANY: shapes.marks_too_many,
    Check.WINDOW_EXCEEDED: shapes.window_exceeded,
    Check.COMPLETION_BEYOND_WINDOW: shapes.completion_beyond_window,
}
"""Rules that look at turns, blocks and what is declared."""

EDGE_RULES: Final[Mapping[Check, EdgeRule]] = {
    Check.RESULT_ORPHAN: edges.result_orphan,
    Check.RESULT_MISMATCH: edges.result_mismatch,
    Check.RESULT_DUPLICATE: edges.result_duplicate,
    Check.RESULT_MISPLACED: edges.result_misplaced,
    Check.CALL_UNANSWERED: edges.call_unanswered,
    Check.CALL_STOOD_IN: edges.call_stood_in,
    Check.SERVER_CALL_UNANSWERED: edges.server_call_unanswered,
    Check.SERVER_TOOL_UNDECLARED: edges.server_tool_undeclared,
    Check.TOOL_UNDECLARED: edges.tool_undeclared,
    Check.ID_REPEATED: edges.id_repeated,
    Check.ID_REUSED: edges.id_reused,
    Check.CALL_WITHOUT_ID: edges.call_without_id,
    Check.ID_PATTERN: edges.id_pattern,
    Check.ID_TOO_LONG: edges.id_too_long,
    Check.SERVER_ID_PATTERN: edges.server_id_pattern,
    Check.NAME_EMPTY: edges.name_empty,
    Check.NAME_PATTERN: edges.name_pattern,
}
"""Rules that look at calls and results; run only where there are tools."""
