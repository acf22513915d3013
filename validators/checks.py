"""What is looked for in a request, under which reason it is reported, and what a server does about it.

A reason is the word outsiders see; a check is finer: at one provider an empty text block is refused and an empty
assistant message is not, and both are `block.empty`. So levels are kept by check. A rule names no provider: all that
differs between servers (a level, the form of an id, which role may follow which) is data in a `Profile`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from turngate.validators.graph import Check, Role


class Reason(StrEnum):
    """The closed list of reasons: one word in code, error bodies, metrics, tables and docs."""

    ROLE_UNKNOWN = "role.unknown"
    ROLE_ORDER = "role.order"
    BLOCK_UNKNOWN_KIND = "block.unknown_kind"
    BLOCK_WRONG_ROLE = "block.wrong_role"
    BLOCK_MIXED_TURN = "block.mixed_turn"
    BLOCK_EMPTY = "block.empty"
    CALL_BAD_ID = "call.bad_id"
    CALL_BAD_NAME = "call.bad_name"
    CALL_DUPLICATE_ID = "call.duplicate_id"
    CALL_ARGUMENTS_UNCLOSED = "call.arguments_unclosed"
    CALL_ARGUMENTS_INVALID = "call.arguments_invalid"
    CALL_ARGUMENTS_DUPLICATE_KEY = "call.arguments_duplicate_key"
    CALL_ARGUMENTS_SCHEMA = "call.arguments_schema"
    CALL_UNANSWERED = "call.unanswered"
    CALL_UNKNOWN_TOOL = "call.unknown_tool"
    RESULT_ORPHAN = "result.orphan"
    RESULT_DUPLICATE = "result.duplicate"
    RESULT_MISPLACED = "result.misplaced"
    RESULT_MISMATCH = "result.mismatch"
    RESULT_BAD_SHAPE = "result.bad_shape"
    REASONING_DETACHED = "reasoning.detached"
    SIGNATURE_MISSING = "signature.missing"
    TOOLSET_INVALID = "toolset.invalid"
    CONTEXT_OVER_BUDGET = "context.over_budget"

    STREAM_TRUNCATED = "stream.truncated"
    STREAM_NO_STOP = "stream.no_stop"
    STREAM_STALLED = "stream.stalled"
    STREAM_ERROR_EVENT = "stream.error_event"
    STREAM_BAD_FRAMING = "stream.bad_framing"
    STREAM_DUPLICATE_DELTA = "stream.duplicate_delta"
    STREAM_OUT_OF_ORDER = "stream.out_of_order"
    STREAM_AFTER_STOP = "stream.after_stop"
    STREAM_WRONG_HANDLE = "stream.wrong_handle"
    STREAM_MALFORMED_CALL = "stream.malformed_call"
    STREAM_CALL_ID_MISSING = "stream.call_id_missing"
    STREAM_CALL_ID_CONFLICT = "stream.call_id_conflict"
    STREAM_TOOL_STOP_WITHOUT_CALL = "stream.tool_stop_without_call"
    STREAM_LENGTH_LIMITED = "stream.length_limited"
    STREAM_FILTERED = "stream.filtered"

    PREVIEW_LEAKED = "preview.leaked"
    CALL_UNCOMMITTED = "call.uncommitted"

    DISPATCH_CONFLICT = "dispatch.conflict"
    DISPATCH_UNKNOWN_OUTCOME = "dispatch.unknown_outcome"
    DISPATCH_PAUSED = "dispatch.paused"
    DISPATCH_UNSENT = "dispatch.unsent"
    LIMIT_BODY = "limit.body"
    LIMIT_HOLD = "limit.hold"
    BODY_UNDECODABLE = "body.undecodable"
    BODY_AMBIGUOUS = "body.ambiguous"
    SURFACE_UNCOVERED = "surface.uncovered"
    INTERNAL = "internal"


class Level(StrEnum):
    """What the provider does about a finding."""

    HARD = "hard"  # it refuses the request: there is evidence
    SOFT = "soft"  # it accepts the request, and the meaning is broken; or nobody knows
    OFF = "off"


REASONS: Final[Mapping[Check, Reason]] = {
    Check.NO_MESSAGES: Reason.BLOCK_EMPTY,
    Check.NOT_A_MESSAGE: Reason.BLOCK_UNKNOWN_KIND,
    Check.ROLE_UNKNOWN: Reason.ROLE_UNKNOWN,
    Check.ROLE_UNSUPPORTED: Reason.ROLE_UNKNOWN,
    Check.ROLE_OF_MODEL: Reason.ROLE_UNKNOWN,
    Check.CALL_IN_WRONG_ROLE: Reason.BLOCK_WRONG_ROLE,
    Check.RESULT_IN_WRONG_ROLE: Reason.BLOCK_WRONG_ROLE,
    Check.MEDIA_IN_WRONG_ROLE: Reason.BLOCK_WRONG_ROLE,
    Check.KIND_IN_WRONG_ROLE: Reason.BLOCK_WRONG_ROLE,
    Check.DOCUMENT_OF_ASSISTANT: Reason.BLOCK_WRONG_ROLE,
    Check.CITATIONS_OF_USER: Reason.BLOCK_WRONG_ROLE,
    Check.KIND_OF_SYSTEM: Reason.BLOCK_WRONG_ROLE,
    Check.COMPACTION_OF_SYSTEM: Reason.BLOCK_WRONG_ROLE,
    Check.COMPACTION_MISPLACED: Reason.BLOCK_WRONG_ROLE,
    Check.ARGUMENTS_UNCLOSED: Reason.CALL_ARGUMENTS_UNCLOSED,
    Check.ARGUMENTS_INVALID: Reason.CALL_ARGUMENTS_INVALID,
    Check.ARGUMENTS_EMPTY: Reason.CALL_ARGUMENTS_INVALID,
    Check.ARGUMENTS_NO_OBJECT: Reason.CALL_ARGUMENTS_INVALID,
    Check.ARGUMENTS_NO_TEXT: Reason.CALL_ARGUMENTS_INVALID,
    Check.ID_REPEATED: Reason.CALL_DUPLICATE_ID,
    Check.RESULT_WITHOUT_ID: Reason.RESULT_BAD_SHAPE,
    Check.RESULT_WITHOUT_NAME: Reason.RESULT_BAD_SHAPE,
    Check.RESULT_AS_LIST: Reason.RESULT_BAD_SHAPE,
    Check.RESULT_ORPHAN: Reason.RESULT_ORPHAN,
    Check.RESULT_MISMATCH: Reason.RESULT_MISMATCH,
    Check.RESULT_DUPLICATE: Reason.RESULT_DUPLICATE,
    Check.RESULT_MISPLACED: Reason.RESULT_MISPLACED,
    Check.CALL_WITHOUT_ID: Reason.CALL_BAD_ID,
    Check.ID_PATTERN: Reason.CALL_BAD_ID,
    Check.ID_TOO_LONG: Reason.CALL_BAD_ID,
    Check.SERVER_ID_PATTERN: Reason.CALL_BAD_ID,
    Check.NAME_EMPTY: Reason.CALL_BAD_NAME,
    Check.NAME_PATTERN: Reason.CALL_BAD_NAME,
    Check.PART_WITHOUT_TYPE: Reason.BLOCK_UNKNOWN_KIND,
    Check.KIND_UNKNOWN: Reason.BLOCK_UNKNOWN_KIND,
    Check.KIND_WITHOUT_BETA: Reason.BLOCK_UNKNOWN_KIND,
    Check.KIND_UNCERTAIN: Reason.BLOCK_UNKNOWN_KIND,
    Check.PART_UNSUPPORTED: Reason.BLOCK_UNKNOWN_KIND,
    Check.AUDIO_OF_MODEL: Reason.BLOCK_UNKNOWN_KIND,
    Check.IMAGE_BY_ADDRESS: Reason.BLOCK_UNKNOWN_KIND,
    Check.CALLS_EMPTY: Reason.BLOCK_EMPTY,
    Check.CONTENT_NULL: Reason.BLOCK_EMPTY,
    Check.CONTENT_OF_USER_EMPTY: Reason.BLOCK_EMPTY,
    Check.CONTENT_OF_ASSISTANT_EMPTY: Reason.BLOCK_EMPTY,
    Check.CONTENT_OF_SYSTEM_EMPTY: Reason.BLOCK_EMPTY,
    Check.TEXT_EMPTY: Reason.BLOCK_EMPTY,
    Check.TEXT_BLANK: Reason.BLOCK_EMPTY,
    Check.TEXT_OF_ASSISTANT_BLANK: Reason.BLOCK_EMPTY,
    Check.COMPACTION_EMPTY: Reason.BLOCK_EMPTY,
    Check.REFUSAL_MIXED: Reason.BLOCK_MIXED_TURN,
    Check.CALL_FORMS_MIXED: Reason.BLOCK_MIXED_TURN,
    Check.COMPACTION_REPEATED: Reason.BLOCK_MIXED_TURN,
    Check.REASONING_NOT_ECHOED: Reason.REASONING_DETACHED,
    Check.REASONING_EMPTY: Reason.REASONING_DETACHED,
    Check.REASONING_NOT_FIRST: Reason.REASONING_DETACHED,
    Check.REASONING_DISABLED: Reason.REASONING_DETACHED,
    Check.REASONING_AT_END: Reason.REASONING_DETACHED,
    Check.SIGNATURE_MISSING: Reason.SIGNATURE_MISSING,
    Check.SYSTEM_FIRST: Reason.ROLE_ORDER,
    Check.SYSTEM_PLACE: Reason.ROLE_ORDER,
    Check.SUCCESSION: Reason.ROLE_ORDER,
    Check.ALTERNATION: Reason.ROLE_ORDER,
    Check.FIRST_ROLE: Reason.ROLE_ORDER,
    Check.LAST_ROLE: Reason.ROLE_ORDER,
    Check.PREFIX_NOT_LAST: Reason.ROLE_ORDER,
    Check.PREFILL: Reason.ROLE_ORDER,
    Check.PREFILL_BLANK: Reason.ROLE_ORDER,
    Check.ASSISTANTS_AT_END: Reason.ROLE_ORDER,
    Check.CALL_UNANSWERED: Reason.CALL_UNANSWERED,
    Check.CALL_STOOD_IN: Reason.CALL_UNANSWERED,
    Check.SERVER_CALL_UNANSWERED: Reason.CALL_UNANSWERED,
    Check.SERVER_TOOL_UNDECLARED: Reason.CALL_UNKNOWN_TOOL,
    Check.TOOL_UNDECLARED: Reason.CALL_UNKNOWN_TOOL,
    Check.TOOLS_EMPTY: Reason.TOOLSET_INVALID,
    Check.TOOL_NAME_PATTERN: Reason.TOOLSET_INVALID,
    Check.TOOL_NAME_REPEATED: Reason.TOOLSET_INVALID,
    Check.TOOL_WITHOUT_SCHEMA: Reason.TOOLSET_INVALID,
    Check.TOOL_SCHEMA_TYPE: Reason.TOOLSET_INVALID,
    Check.TOOL_WITHOUT_PARAMETERS: Reason.TOOLSET_INVALID,
    Check.TOOLS_MISSING: Reason.TOOLSET_INVALID,
    Check.CHOICE_WITHOUT_TOOLS: Reason.TOOLSET_INVALID,
    Check.NO_CHOICE_WITHOUT_TOOLS: Reason.TOOLSET_INVALID,
    Check.PARALLEL_WITHOUT_TOOLS: Reason.TOOLSET_INVALID,
    Check.CHOICE_UNDECLARED: Reason.TOOLSET_INVALID,
    Check.CHOICE_NO_OBJECT: Reason.TOOLSET_INVALID,
    Check.MARKS_TOO_MANY: Reason.CONTEXT_OVER_BUDGET,
    Check.WINDOW_EXCEEDED: Reason.CONTEXT_OVER_BUDGET,
    Check.COMPLETION_BEYOND_WINDOW: Reason.CONTEXT_OVER_BUDGET,
    Check.ID_REUSED: Reason.CALL_DUPLICATE_ID,
}
"""Every check's reason, the most telling check first: in this order the findings of one request are given."""

RANK: Final[Mapping[Check, int]] = {check: rank for rank, check in enumerate(REASONS)}


@dataclass(frozen=True, slots=True)
class Grade:
    """A check's level at one server. With `models`, for models whose name matches; for all others it is `otherwise`."""

    level: Level
    models: re.Pattern[str] | None = None
    otherwise: Level = Level.SOFT

    def of(self, model: str) -> Level:
        """The level for a request that asks for this model."""
        if self.models is None or self.models.search(model):
            return self.level
        return self.otherwise


OFF: Final = Grade(Level.OFF)
Levels = Mapping[Reason, Level]
"""The level of each reason at the provider that will read the request; a reason that is missing is off."""


@dataclass(frozen=True, slots=True, eq=False)
class Profile(Levels):
    """What one server does about each fault, and the data its rules need.

    Read as a mapping it gives the strictest level among the checks of a reason. A parameter that is None has no rule.
    """

    grades: Mapping[Check, Grade]
    call_id: re.Pattern[str] | None = None
    server_call_id: re.Pattern[str] | None = None
    call_id_characters_max: int | None = None
    call_name: re.Pattern[str] | None = None
    tool_name: re.Pattern[str] | None = None
    roles: frozenset[Role] | None = None
    parts: frozenset[str] | None = None
    successors: Mapping[Role, frozenset[Role]] | None = None
    last_roles: frozenset[Role] | None = None
    thinks: re.Pattern[str] | None = None
    """Models that think unless told not to, where the server demands its reasoning back."""
    marks_max: int | None = None
    by_reason: Levels = field(init=False)

    def __post_init__(self) -> None:
        strictest: dict[Reason, Level] = {}
        for check, grade in self.grades.items():
            reason = REASONS[check]
            strictest[reason] = min(strictest.get(reason, Level.OFF), grade.level, key=_STRICT.index)
        object.__setattr__(self, "by_reason", strictest)

    def __getitem__(self, reason: Reason) -> Level:
        return self.by_reason[reason]

    def __iter__(self) -> Iterator[Reason]:
        return iter(self.by_reason)

    def __len__(self) -> int:
        return len(self.by_reason)

    # Mapping compares by content; two servers that happen to agree are still two, and a cache key must be cheap.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


_STRICT: Final = (Level.HARD, Level.SOFT, Level.OFF)


def profile_of(levels: Levels) -> Profile:
    """A profile that gives every check the level of its reason."""
    if isinstance(levels, Profile):
        return levels
    return Profile({check: Grade(levels.get(reason, Level.OFF)) for check, reason in REASONS.items()})


Fault = tuple[str, str, str]
"""(at, message, remedy)."""

QUOTED_CHARACTERS_MAX: Final = 64


def quoted(text: str | None) -> str:
    """An id from the app's body, fit for a message: printable, at most 64 characters, in quotes."""
    if text is None:
        return "(none)"
    shown = "".join(c if c.isprintable() else "?" for c in text[:QUOTED_CHARACTERS_MAX])
    return f'"{shown}…"' if len(text) > QUOTED_CHARACTERS_MAX else f'"{shown}"'
