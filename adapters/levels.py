"""What each server does about each fault, with the evidence: data in one place.

Keys are (api, server, reason). `hard` stands only where that server's own refusal has been seen or is quoted in the
provider documents; everything else that breaks the meaning is `soft`. A server that is not listed has only soft rules.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from turngate.validators.rules import Level, Levels, Reason


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a level is what it is: the provider's own message, the rule of the provider document, and its date."""

    level: Level
    provider_message: str
    source: str


_OPENAI: Final = {
    Reason.RESULT_ORPHAN: Evidence(
        Level.HARD,
        "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'.",
        "CHAT-B01, 2026-11",
    ),
    Reason.RESULT_MISMATCH: Evidence(
        Level.HARD,
        "Invalid parameter: 'tool_call_id' of '…' not found in 'tool_calls' of previous message.",
        "CHAT-B04, 2026-11",
    ),
    Reason.RESULT_DUPLICATE: Evidence(
        Level.HARD, "Invalid parameter: Duplicate value for 'tool_call_id' of '…'", "CHAT-B05, 2026-11"
    ),
    Reason.RESULT_MISPLACED: Evidence(
        Level.HARD,
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'.",
        "CHAT-B03, 2026-07",
    ),
    Reason.CALL_UNANSWERED: Evidence(
        Level.HARD,
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'.",
        "CHAT-B02, 2026-11",
    ),
}

_DEEPSEEK: Final = {
    Reason.RESULT_ORPHAN: Evidence(
        Level.HARD,
        "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'",
        "DS-02 (B01), 2026-11",
    ),
    Reason.RESULT_DUPLICATE: Evidence(
        Level.HARD, "Duplicate value for 'tool_call_id' of …", "DS-02 (B05), 2026-11"
    ),
    Reason.CALL_UNANSWERED: Evidence(
        Level.HARD, "(insufficient tool messages following tool_calls message)", "DS-02 (B02), 2026-11"
    ),
}

_ANTHROPIC: Final = {
    Reason.RESULT_ORPHAN: Evidence(
        Level.HARD, "unexpected `tool_use_id` found in `tool_result` blocks", "A-B2, 2026-11"
    ),
    Reason.RESULT_MISMATCH: Evidence(
        Level.HARD, "unexpected `tool_use_id` found in `tool_result` blocks", "A-B2, 2026-11"
    ),
    Reason.RESULT_DUPLICATE: Evidence(
        Level.HARD,
        "each tool_use must have a single result. Found multiple `tool_result` blocks",
        "A-B3, 2026-11",
    ),
    Reason.RESULT_MISPLACED: Evidence(
        Level.HARD,
        "`tool_use` ids were found without `tool_result` blocks immediately after",
        "A-B1, A-B4, 2026-07",
    ),
    Reason.CALL_UNANSWERED: Evidence(
        Level.HARD,
        "`tool_use` ids were found without `tool_result` blocks immediately after",
        "A-B1, 2026-11",
    ),
}

SERVERS: Final[Mapping[tuple[str, str], Mapping[Reason, Evidence]]] = {
    ("openai.chat", "openai"): _OPENAI,
    ("openai.chat", "azure"): _OPENAI,
    ("openai.chat", "deepseek"): _DEEPSEEK,
    ("anthropic.messages", "anthropic"): _ANTHROPIC,
}
"""The servers whose refusals are documented."""

_ALL: Final = tuple(_OPENAI)
_SOFT: Final[Levels] = dict.fromkeys(_ALL, Level.SOFT)


def levels(api: str, server: str) -> Levels:
    """The level of each rule at this server; soft wherever it has no evidence of its own."""
    return _LEVELS.get((api, server), _SOFT)


def _merged() -> Iterator[tuple[tuple[str, str], Levels]]:
    for key, evidence in SERVERS.items():
        yield key, {reason: evidence[reason].level if reason in evidence else Level.SOFT for reason in _ALL}


_LEVELS: Final[Mapping[tuple[str, str], Levels]] = dict(_merged())
