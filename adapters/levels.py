"""What each server does about each fault, with the evidence: data in one place.

`hard` stands only where that server's own refusal has been recorded, quoted or read in its source; what the provider
documents mark as unverified, and what nobody has tried, is `soft`. `off` stands where a server was seen to accept what
others refuse and nothing is lost by it. A server without an entry of its own for a check has it soft where the api's
default server minds at all; a server that is not listed has only soft rules.

The rule numbers are those of the provider documents (CHAT-… openai-chat.md; M-, DS-, GQ-, OLL- and the rows of the
matrix openai-compatible.md; A-… anthropic-messages.md). `message` is the stable part of the provider's own text.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from turngate.validators.checks import REASONS, Grade, Level, Profile, Reason
from turngate.validators.graph import Check, Role

CHAT: Final = "openai.chat"
MESSAGES: Final = "anthropic.messages"


@dataclass(frozen=True, slots=True)
class Entry:
    """One server's answer to one fault.

    `check` is finer than the reason. With `models`, a regular expression, the level holds for models whose name it
    finds, and `otherwise` for all others. `code` is the provider's own error code, "" where it gives none.
    """

    api: str
    server: str
    reason: Reason
    level: Level
    rule: str
    message: str
    code: str
    source: str
    date: str
    check: Check
    models: str = ""
    otherwise: Level = Level.SOFT


@dataclass(frozen=True, slots=True)
class _Row:
    """An entry without its place in the table."""

    check: Check
    level: Level
    rule: str
    message: str
    source: str
    date: str
    code: str = ""
    models: str = ""
    otherwise: Level = Level.SOFT

    def at(self, api: str, server: str) -> Entry:
        return Entry(
            api,
            server,
            REASONS[self.check],
            self.level,
            self.rule,
            self.message,
            self.code,
            self.source,
            self.date,
            self.check,
            self.models,
            self.otherwise,
        )


H, S, OFF = Level.HARD, Level.SOFT, Level.OFF

_UNANSWERED: Final = "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'."
_NULL: Final = "Invalid value for 'content': expected a string, got null."
_ONLY_USER: Final = "Image URLs are only allowed for messages with role 'user'"

_OPENAI: Final = (
    _Row(
        Check.RESULT_ORPHAN,
        H,
        "CHAT-B01",
        "messages with role 'tool' must be a response to a prec",
        "issues 1 to 3",
        "2026-11",
    ),
    _Row(Check.CALL_UNANSWERED, H, "CHAT-B02", _UNANSWERED, "issues 3 and 4", "2026-11"),
    _Row(Check.CALL_STOOD_IN, H, "CHAT-B02", _UNANSWERED, "issues 3 and 4", "2026-11"),
    _Row(Check.RESULT_MISPLACED, H, "CHAT-B03", _UNANSWERED, "measured on gpt-4o", "2026-07-31"),
    _Row(
        Check.RESULT_MISMATCH,
        H,
        "CHAT-B04",
        "not found in 'tool_calls' of previous message.",
        "issue 6",
        "2026-11",
    ),
    _Row(Check.RESULT_DUPLICATE, H, "CHAT-B05", "Duplicate value for 'tool_call_id'", "issue 7", "2026-11"),
    _Row(Check.ID_REPEATED, S, "CHAT-B06", "", "its text was not found for this placement", "2026-11"),
    _Row(Check.ID_REUSED, S, "CHAT-B07", "", "accepted: matching is local to the run", "2026-11"),
    _Row(Check.RESULT_WITHOUT_ID, H, "CHAT-B08", "Missing parameter 'tool_call_id'", "issue 8", "2026-11"),
    _Row(
        Check.CALLS_EMPTY,
        H,
        "CHAT-B09",
        "empty array. Expected an array with minimum length 1",
        "issue 9",
        "2026-11",
        "empty_array",
    ),
    _Row(
        Check.ID_TOO_LONG,
        S,
        "CHAT-B10",
        "string too long. Expected a string with maximum length 40",
        "issue 12; not reproduced in 2026-07, issue 13",
        "2026-07",
        "string_above_max_length",
    ),
    _Row(Check.CALL_WITHOUT_ID, S, "CHAT-A.3", "", "specification", "2026-08-21"),
    _Row(
        Check.NAME_EMPTY,
        H,
        "CHAT-B11",
        "empty string. Expected a string with minimum length 1",
        "issue 14",
        "2026-11",
        "empty_string",
    ),
    _Row(
        Check.NAME_PATTERN,
        H,
        "CHAT-B11",
        "string does not match pattern",
        "specification of FunctionObject.name",
        "2026-08-21",
    ),
    _Row(
        Check.TOOL_NAME_PATTERN,
        H,
        "CHAT-B11",
        "string does not match pattern",
        "specification of FunctionObject.name",
        "2026-08-21",
    ),
    _Row(Check.ARGUMENTS_UNCLOSED, S, "CHAT-B12", "", "accepted: any string is", "2026-08-21"),
    _Row(Check.ARGUMENTS_INVALID, S, "CHAT-B12", "", "accepted, recorded with gpt-4o", "2026-11"),
    _Row(Check.ARGUMENTS_NO_OBJECT, S, "CHAT-B12", "", "accepted: any string is", "2026-08-21"),
    _Row(Check.ARGUMENTS_EMPTY, OFF, "CHAT-B12", "", "accepted: the absence of arguments", "2026-08-21"),
    _Row(
        Check.ARGUMENTS_NO_TEXT,
        S,
        "CHAT-A.3",
        "",
        "specification: arguments are a string, no refusal seen",
        "2026-08-21",
    ),
    _Row(Check.CONTENT_NULL, H, "CHAT-B20", _NULL, "issues 15 to 17", "2026-11"),
    _Row(
        Check.NO_MESSAGES,
        H,
        "CHAT-B21",
        "Invalid 'messages': empty array.",
        "issue 18; recorded with gpt-5-nano",
        "2026-11",
        "empty_array",
    ),
    _Row(
        Check.MEDIA_IN_WRONG_ROLE,
        H,
        "CHAT-B22",
        _ONLY_USER,
        "code bases; newer models take it, openai-openapi 523",
        "2026-11",
        "invalid_value",
        models=r"^(?:gpt-4|gpt-3\.5|chatgpt-4o)",
    ),
    _Row(
        Check.KIND_IN_WRONG_ROLE, S, "CHAT-A.3", "", "specification: only users have such parts", "2026-08-21"
    ),
    _Row(
        Check.RESULT_WITHOUT_NAME,
        H,
        "CHAT-B23",
        "messages with role 'function' must have a 'name'.",
        "code bases",
        "2026-11",
    ),
    _Row(
        Check.ROLE_UNKNOWN,
        H,
        "CHAT-B24",
        "Invalid value:",
        "specification, discriminator",
        "2026-08-21",
        "invalid_value",
    ),
    _Row(
        Check.ROLE_OF_MODEL,
        H,
        "CHAT-B26",
        "does not support 'developer' with this model.",
        "recorded with o1-mini",
        "2026-11",
        "unsupported_value",
        models=r"^o1-mini",
        otherwise=OFF,
    ),
    _Row(
        Check.AUDIO_OF_MODEL,
        H,
        "CHAT-A.3",
        "Content blocks are expected to be either text or image_url type.",
        "recorded with gpt-5-mini",
        "2026-11",
        "invalid_value",
        models=r"^gpt-5-mini",
        otherwise=OFF,
    ),
    _Row(Check.REFUSAL_MIXED, S, "CHAT-B25", "", "not tried", "2026-11"),
    _Row(Check.CALL_FORMS_MIXED, S, "CHAT-B28", "", "not tried", "2026-11"),
    _Row(Check.PREFILL, S, "CHAT-B27", "", "accepted and answered by a new message; recorded", "2026-11"),
    _Row(
        Check.PART_WITHOUT_TYPE,
        H,
        "CHAT-A.3",
        "Missing required parameter:",
        "recorded with gpt-4o-mini",
        "2026-11",
        "missing_required_parameter",
    ),
    _Row(Check.KIND_UNKNOWN, S, "CHAT-A.3", "", "the set of parts is open", "2026-08-21"),
    _Row(Check.NOT_A_MESSAGE, S, "CHAT-A.3", "", "specification: messages are objects", "2026-08-21"),
    _Row(Check.CALL_IN_WRONG_ROLE, S, "CHAT-A.3", "", "specification", "2026-08-21"),
    _Row(
        Check.CHOICE_WITHOUT_TOOLS,
        H,
        "CHAT-B40",
        "'tool_choice' is only allowed when 'tools' are specified.",
        "code bases",
        "2026-11",
    ),
    _Row(
        Check.NO_CHOICE_WITHOUT_TOOLS,
        H,
        "CHAT-B40",
        "'tool_choice' is only allowed when 'tools' are specified.",
        "code bases",
        "2026-11",
    ),
    _Row(
        Check.PARALLEL_WITHOUT_TOOLS,
        H,
        "CHAT-B41",
        "'parallel_tool_calls' is only allowed when 'tools' are specified.",
        "code bases",
        "2026-11",
    ),
    _Row(Check.TOOLS_EMPTY, S, "CHAT-B43", "empty array", "from memory", "2026-11"),
    _Row(Check.TOOLS_MISSING, OFF, "CHAT-B45", "", "accepted", "2026-11"),
    _Row(Check.TOOL_UNDECLARED, OFF, "CHAT-B45", "", "accepted, recorded", "2026-11"),
    _Row(Check.TOOL_NAME_REPEATED, S, "CHAT-A.2", "", "not tried", "2026-11"),
    _Row(Check.CHOICE_UNDECLARED, S, "CHAT-A.2", "", "not tried", "2026-11"),
    _Row(
        Check.WINDOW_EXCEEDED,
        H,
        "context",
        "maximum context length is",
        "public reports",
        "2026-11",
        "context_length_exceeded",
    ),
    _Row(
        Check.COMPLETION_BEYOND_WINDOW,
        S,
        "context",
        "maximum context length is",
        "newer models only cut the answer",
        "2026-11",
        "context_length_exceeded",
    ),
)

_EDGES: Final = (
    Check.RESULT_ORPHAN,
    Check.CALL_UNANSWERED,
    Check.CALL_STOOD_IN,
    Check.RESULT_MISPLACED,
    Check.RESULT_MISMATCH,
    Check.RESULT_DUPLICATE,
    Check.ID_REPEATED,
    Check.RESULT_WITHOUT_ID,
)
"""What a server that pairs nothing accepts, and what the model then misreads."""


def _lenient(source: str) -> tuple[_Row, ...]:
    return tuple(_Row(check, S, "matrix B01 to B08", "", source, "2026-11") for check in _EDGES)


_DEEPSEEK_CODE: Final = "invalid_request_error"
_DEEPSEEK: Final = (
    _Row(
        Check.RESULT_ORPHAN,
        H,
        "DS-02",
        "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'",
        "issue 1",
        "2026-11",
        _DEEPSEEK_CODE,
    ),
    _Row(
        Check.CALL_UNANSWERED,
        H,
        "DS-02",
        "insufficient tool messages following tool_calls message",
        "issue 2; agno 3105",
        "2026-11",
        _DEEPSEEK_CODE,
    ),
    _Row(
        Check.RESULT_DUPLICATE,
        H,
        "DS-02",
        "Duplicate value for 'tool_call_id'",
        "code bases",
        "2026-11",
        _DEEPSEEK_CODE,
    ),
    _Row(
        Check.ID_REPEATED,
        H,
        "DS-02",
        "Duplicate value for 'tool_call_id'",
        "code bases, CHAT-B06",
        "2026-11",
        _DEEPSEEK_CODE,
    ),
    _Row(
        Check.REASONING_NOT_ECHOED,
        H,
        "DS-01",
        "in the thinking mode must be passed back to the API.",
        "issue 12, thinking guide",
        "2026-11",
        _DEEPSEEK_CODE,
    ),
    _Row(Check.REASONING_EMPTY, OFF, "DS-01", "", "an empty text is accepted", "2026-11"),
    _Row(
        Check.ROLE_UNSUPPORTED,
        H,
        "CHAT-B24",
        "unknown variant `developer`",
        "github.com/num-scope/pix/issues/34",
        "2026-11",
        _DEEPSEEK_CODE,
    ),
    _Row(
        Check.PART_UNSUPPORTED,
        H,
        "matrix B22",
        "expected `text`",
        "recorded with deepseek-v4-flash",
        "2026-11",
        _DEEPSEEK_CODE,
    ),
    _Row(
        Check.TOOL_NAME_PATTERN,
        H,
        "CHAT-B11",
        "string too long. Expected a string with maximum length 64",
        "github.com/mrexodia/ida-pro-mcp/issues/129",
        "2026-11",
    ),
    _Row(
        Check.WINDOW_EXCEEDED,
        H,
        "context",
        "This model's maximum context length is",
        "github.com/evalstate/fast-agent/issues/621",
        "2026-11",
        _DEEPSEEK_CODE,
    ),
    _Row(
        Check.COMPLETION_BEYOND_WINDOW,
        H,
        "context",
        "This model's maximum context length is",
        "github.com/evalstate/fast-agent/issues/621",
        "2026-11",
        _DEEPSEEK_CODE,
    ),
)

_ORDER: Final = "3230"
_COUNT: Final = "Not the same number of function calls and responses"
_SIBLING: Final = "mistral-common 1.13.1, run in serving mode"
_MISTRAL: Final = (
    _Row(
        Check.ID_PATTERN,
        H,
        "M-01",
        "but must be a-z, A-Z, 0-9, with a length of 9.",
        "issues 5 and 6; hosted as late as 2026-04",
        "2026-04",
        "3280",
    ),
    _Row(
        Check.RESULT_ORPHAN,
        H,
        "M-02, M-03",
        "Unexpected role 'tool' after role",
        f"issues 3, 4 and 7; {_SIBLING}",
        "2026-11",
        _ORDER,
    ),
    _Row(
        Check.SUCCESSION,
        H,
        "M-02",
        "Unexpected role",
        f"issues 4 and 7; {_SIBLING}; user behind tool is recorded as accepted",
        "2026-11",
        _ORDER,
    ),
    _Row(Check.CALL_UNANSWERED, H, "M-03", _COUNT, f"issue 3; {_SIBLING}", "2026-11", _ORDER),
    _Row(Check.RESULT_MISPLACED, H, "M-03", _COUNT, f"matrix B03; {_SIBLING}", "2026-11", _ORDER),
    _Row(Check.RESULT_DUPLICATE, H, "M-03", _COUNT, f"matrix B05; {_SIBLING}", "2026-11", _ORDER),
    _Row(
        Check.RESULT_MISMATCH,
        S,
        "M-04",
        "Unexpected tool call id",
        "only from tokenizer v13 on; before, only numbers are compared",
        "2026-11",
        _ORDER,
    ),
    _Row(
        Check.CALL_STOOD_IN,
        S,
        "M-03",
        _COUNT,
        "the numbers agree; refused from v13 on alone",
        "2026-11",
        _ORDER,
    ),
    _Row(
        Check.ID_REPEATED, H, "M-04", "Duplicate tool call id", f"matrix B06; {_SIBLING}", "2026-11", _ORDER
    ),
    _Row(Check.ID_REUSED, S, "matrix B07", "", "the hosted server counts, issue 3", "2026-11"),
    _Row(Check.RESULT_WITHOUT_ID, H, "matrix B08", "", _SIBLING, "2026-11"),
    _Row(
        Check.LAST_ROLE,
        H,
        "M-05",
        "Expected last role User or Tool (or Assistant with prefix True) for serving",
        f"issue 8; {_SIBLING}",
        "2026-11",
        _ORDER,
    ),
    _Row(
        Check.PREFIX_NOT_LAST,
        H,
        "M-06",
        "Assistant message with prefix True must be last message",
        "mistral-common at bc022b9",
        "2026-07-23",
    ),
    _Row(
        Check.NAME_PATTERN,
        H,
        "M-08",
        "but must be a-z, A-Z, 0-9, or contain underscores and dashes, with a maximum length of 64.",
        "mistral-common at bc022b9",
        "2026-07-23",
    ),
    _Row(
        Check.NAME_EMPTY,
        H,
        "M-08",
        "but must be a-z, A-Z, 0-9, or contain underscores and dashes, with a maximum length of 64.",
        "mistral-common at bc022b9",
        "2026-07-23",
    ),
    _Row(
        Check.NO_MESSAGES,
        H,
        "M-09",
        "Conversation must have at least one message",
        "mistral-common at bc022b9",
        "2026-07-23",
    ),
    _Row(Check.PREFILL, OFF, "M-05", "", "the last role says it", "2026-11"),
    _Row(Check.CALLS_EMPTY, OFF, "matrix B09", "", "accepted, recorded", "2026-11"),
    _Row(Check.CHOICE_WITHOUT_TOOLS, OFF, "CHAT-B40", "", "accepted, recorded", "2026-11"),
    _Row(Check.NO_CHOICE_WITHOUT_TOOLS, OFF, "CHAT-B40", "", "accepted like any other choice", "2026-11"),
)

_VLLM: Final = (
    *_lenient("builds the prompt message by message, chat_utils.py"),
    _Row(
        Check.ARGUMENTS_UNCLOSED,
        H,
        "matrix B12",
        "Unterminated string starting at",
        "github.com/vllm-project/vllm/pull/48922; versions from about 2026-07 may accept",
        "2026-07",
    ),
    _Row(
        Check.ARGUMENTS_INVALID,
        H,
        "matrix B12",
        "Expecting ',' delimiter",
        "github.com/vllm-project/vllm/issues/43995",
        "2026-07",
    ),
    _Row(Check.ARGUMENTS_NO_OBJECT, S, "matrix B12", "", "any JSON value is parsed", "2026-11"),
    _Row(Check.ARGUMENTS_EMPTY, OFF, "matrix B12", "", "read as {}", "2026-11"),
    _Row(Check.ARGUMENTS_NO_TEXT, OFF, "matrix B12", "", "a dict is taken", "2026-11"),
    _Row(Check.CONTENT_NULL, OFF, "matrix B20", "", "treated as empty", "2026-11"),
    _Row(Check.CALLS_EMPTY, OFF, "matrix B09", "", "dropped", "2026-11"),
    _Row(Check.KIND_UNKNOWN, H, "section 4", "Unknown part type:", "chat_utils.py at bd5ec6d", "2026-11"),
    _Row(
        Check.TOOLS_EMPTY,
        H,
        "section 4",
        "`tools` must not be an empty array",
        "protocol.py at 002032e",
        "2026-11",
    ),
    _Row(
        Check.CHOICE_WITHOUT_TOOLS,
        H,
        "section 4",
        "When using `tool_choice`, `tools` must be set.",
        "protocol.py at 002032e",
        "2026-11",
    ),
    _Row(Check.NO_CHOICE_WITHOUT_TOOLS, OFF, "section 4", "", "asks for no tool", "2026-11"),
    _Row(Check.PARALLEL_WITHOUT_TOOLS, OFF, "section 4", "", "no validator", "2026-11"),
    _Row(
        Check.CHOICE_UNDECLARED,
        H,
        "section 4",
        "",
        "protocol.py at 002032e: unknown name in a named choice",
        "2026-11",
    ),
    _Row(
        Check.ALTERNATION,
        H,
        "matrix, order",
        "roles must alternate user/assistant/user/assistant/",
        "templates: github.com/vllm-project/vllm/issues/6862, github.com/microsoft/autogen/issues/3597",
        "2024-09",
        models=r"(?i)\bllama-2-\d+b-chat|\bmistral-7b-instruct",
        otherwise=OFF,
    ),
    _Row(
        Check.PREFILL, OFF, "section 4", "", "accepted; continue_final_message gives it a meaning", "2026-11"
    ),
)

_OLLAMA_BAD: Final = "invalid tool call arguments"
_OLLAMA_SOURCE: Final = "source at fb30760"
_OLLAMA: Final = (
    *_lenient(f"no pairing checks, {_OLLAMA_SOURCE}"),
    *(
        _Row(check, H, "matrix B12", _OLLAMA_BAD, _OLLAMA_SOURCE, "2026-08-21")
        for check in (
            Check.ARGUMENTS_UNCLOSED,
            Check.ARGUMENTS_INVALID,
            Check.ARGUMENTS_NO_OBJECT,
            Check.ARGUMENTS_EMPTY,
        )
    ),
    _Row(
        Check.CONTENT_NULL,
        H,
        "matrix B20",
        "invalid message content type: <nil>",
        _OLLAMA_SOURCE,
        "2026-08-21",
    ),
    _Row(Check.KIND_UNKNOWN, H, "section 5.1", "invalid message format", _OLLAMA_SOURCE, "2026-08-21"),
    _Row(Check.PART_WITHOUT_TYPE, H, "section 5.1", "invalid message format", _OLLAMA_SOURCE, "2026-08-21"),
    _Row(
        Check.IMAGE_BY_ADDRESS,
        H,
        "section 5.1",
        "image URLs are not currently supported",
        _OLLAMA_SOURCE,
        "2026-08-21",
    ),
    _Row(
        Check.RESULT_AS_LIST,
        S,
        "section 5.1",
        "",
        f"the result loses its call, {_OLLAMA_SOURCE}",
        "2026-08-21",
    ),
    _Row(Check.CALLS_EMPTY, OFF, "matrix B09", "", _OLLAMA_SOURCE, "2026-08-21"),
    _Row(Check.MEDIA_IN_WRONG_ROLE, OFF, "matrix B22", "", "splits the message", "2026-08-21"),
    *(
        _Row(check, OFF, "section 5.1", "", "unknown fields are ignored", "2026-08-21")
        for check in (Check.CHOICE_WITHOUT_TOOLS, Check.NO_CHOICE_WITHOUT_TOOLS, Check.PARALLEL_WITHOUT_TOOLS)
    ),
)

_LLAMA_CPP: Final = (
    *(
        _Row(
            check,
            H,
            "matrix B12",
            "Failed to parse tool call arguments as JSON",
            "github.com/OpenHands/software-agent-sdk/issues/2887",
            "2026-11",
        )
        for check in (Check.ARGUMENTS_UNCLOSED, Check.ARGUMENTS_INVALID)
    ),
    _Row(
        Check.ASSISTANTS_AT_END,
        H,
        "matrix, order",
        "Cannot have 2 or more assistant messages at the end of the list.",
        "github.com/HKUDS/nanobot/issues/2376",
        "2026-11",
    ),
)

_MOONSHOT: Final = (
    _Row(
        Check.CONTENT_OF_ASSISTANT_EMPTY,
        H,
        "matrix B20",
        "with role 'assistant' must not be empty",
        "github.com/AstrBotDevs/AstrBot/issues/7200",
        "2026-11",
    ),
    *(
        _Row(
            check,
            H,
            "matrix, reasoning",
            "thinking is enabled but reasoning_content is missing in assistant tool call message",
            "github.com/HKUDS/nanobot/issues/1014, github.com/earendil-works/pi/pull/4178",
            "2026-11",
        )
        for check in (Check.REASONING_NOT_ECHOED, Check.REASONING_EMPTY)
    ),
    *(
        _Row(
            check,
            H,
            "matrix B04",
            "not found",
            "tool_call_id not found: github.com/langbot-app/LangBot/pull/1298",
            "2026-11",
        )
        for check in (Check.RESULT_MISMATCH, Check.RESULT_ORPHAN)
    ),
)

_MINIMAX: Final = (
    _Row(
        Check.RESULT_ORPHAN,
        H,
        "matrix B01",
        "invalid params, tool result's tool id",
        "github.com/MiniMax-AI/MiniMax-M2/issues/76",
        "2026-11",
        "2013",
    ),
    _Row(
        Check.TOOL_WITHOUT_PARAMETERS,
        H,
        "CHAT-A.2",
        "invalid params, function parameters is empty",
        "github.com/QwenLM/qwen-code/issues/11834",
        "2026-11",
        "2013",
    ),
    *(
        _Row(check, H, "matrix B12", "invalid params", "parses old arguments", "2026-11", "2013")
        for check in (Check.ARGUMENTS_UNCLOSED, Check.ARGUMENTS_INVALID)
    ),
)

_GROQ: Final = (
    _Row(
        Check.ARGUMENTS_NO_OBJECT,
        OFF,
        "GQ-01",
        "",
        "writes null itself for no arguments, and takes it back; recorded",
        "2026-11",
    ),
)
_OPENROUTER: Final = (
    _Row(Check.ID_TOO_LONG, OFF, "CHAT-B10", "", "accepted, recorded with 48 characters", "2026-11"),
)
_FIREWORKS: Final = (_Row(Check.ID_REUSED, OFF, "CHAT-B07", "", "three turns of it driven live", "2026-07"),)

_ADJACENT: Final = "`tool_use` ids were found without `tool_result` blocks immediately after"
_PROBE: Final = "live probe"
_SYSTEM_PLACE: Final = "role 'system' must"
_ANTHROPIC: Final = (
    _Row(
        Check.CALL_UNANSWERED,
        H,
        "A-B1",
        _ADJACENT,
        "claude-code 6575, 2697, 6242; troubleshooting page",
        "2026-07-25",
    ),
    _Row(Check.CALL_STOOD_IN, H, "A-B1", _ADJACENT, "claude-code 6575", "2026-07-25"),
    _Row(Check.RESULT_MISPLACED, H, "A-B1, A-B4", _ADJACENT, _PROBE, "2026-07-25"),
    *(
        _Row(
            check,
            H,
            "A-B2",
            "unexpected `tool_use_id` found in `tool_result` blocks",
            "Anthropic.SDK 184",
            "2026-11",
        )
        for check in (Check.RESULT_ORPHAN, Check.RESULT_MISMATCH)
    ),
    _Row(
        Check.RESULT_DUPLICATE,
        H,
        "A-B3",
        "each tool_use must have a single result. Found multiple `tool_result` blocks",
        "three quotations",
        "2026-11",
    ),
    _Row(
        Check.ID_REPEATED,
        H,
        "A-B5",
        "`tool_use` ids must be unique",
        "claude-code 20700 and 28515",
        "2026-11",
    ),
    _Row(Check.ID_REUSED, S, "A-B5", "", "a recorded 200 of claude-sonnet-4-5", "2026-11"),
    _Row(
        Check.ID_PATTERN,
        H,
        "A-B6",
        "String should match pattern '^[a-zA-Z0-9_-]+$'",
        "ClawRouter 17, opencode 1279",
        "2026-11",
    ),
    _Row(
        Check.SERVER_ID_PATTERN,
        H,
        "A-B6",
        "String should match pattern '^srvtoolu_[a-zA-Z0-9_]+$'",
        "claude-code-hub 470",
        "2026-11",
    ),
    _Row(Check.CALL_WITHOUT_ID, H, "A-B6", "Field required", _PROBE, "2026-11"),
    _Row(Check.RESULT_WITHOUT_ID, H, "A-B6", "Field required", _PROBE, "2026-11"),
    _Row(Check.NAME_EMPTY, S, "A-B6", "", "not quoted for calls", "2026-11"),
    _Row(
        Check.TOOL_NAME_PATTERN,
        H,
        "A-B6",
        "String should match pattern '^[a-zA-Z0-9_-]{1,",
        "tester-mcp-client 11; 128 characters since, from memory",
        "2025-03",
    ),
    _Row(Check.TOOL_WITHOUT_SCHEMA, H, "A-B6", "input_schema", _PROBE, "2026-11"),
    _Row(
        Check.TOOL_SCHEMA_TYPE, H, "A-B6", "input_schema.type", "recorded with claude-sonnet-4-6", "2026-11"
    ),
    _Row(
        Check.ARGUMENTS_NO_OBJECT,
        H,
        "A-B6",
        "tool_use.input: Input should be an object",
        "three quotations",
        "2026-11",
    ),
    _Row(
        Check.RESULT_IN_WRONG_ROLE,
        H,
        "A-B7",
        "`tool_result` blocks can only be in `user` messages",
        "two quotations",
        "2026-11",
    ),
    _Row(
        Check.CALL_IN_WRONG_ROLE,
        H,
        "A-B7",
        "`tool_use` blocks can only be in `assistant` messages",
        "two quotations",
        "2026-11",
    ),
    _Row(Check.KIND_IN_WRONG_ROLE, S, "A-A5", "", "not tried", "2026-11"),
    _Row(
        Check.FIRST_ROLE,
        S,
        "A-B9",
        'first message must use the "user" role',
        f"{_PROBE}: 200; a 400 of 2026-07 is quoted",
        "2026-09-10",
    ),
    _Row(
        Check.TEXT_EMPTY, H, "A-B10", "text content blocks must be non-empty", "claude-code 59812", "2026-11"
    ),
    _Row(
        Check.TEXT_BLANK,
        H,
        "A-B10",
        "text content blocks must contain non-whitespace text",
        "claude-code 23369",
        "2026-11",
    ),
    _Row(
        Check.TEXT_OF_ASSISTANT_BLANK,
        S,
        "A-B10",
        "text content blocks must contain non-whitespace text",
        "a recorded 200 of claude-haiku-4-5",
        "2026-11",
    ),
    _Row(
        Check.CONTENT_OF_USER_EMPTY,
        H,
        "A-B10",
        "messages must have non-empty content",
        f"{_PROBE}; recorded with claude-haiku-4-5",
        "2026-07-25",
    ),
    _Row(Check.CONTENT_NULL, H, "A-A5, A-B6", "Field required", "required in every message", "2026-11"),
    _Row(
        Check.NO_MESSAGES, H, "A-B10", "at least one message is required", "a live reply quoted", "2026-09-10"
    ),
    _Row(
        Check.NOT_A_MESSAGE,
        H,
        "A-A5",
        "Input does not match the expected shape.",
        "recorded with claude-3-opus",
        "2026-11",
    ),
    _Row(Check.ROLE_UNKNOWN, H, "A-A4", "Unexpected role", "SDK types; vertex reply quoted", "2026-11"),
    _Row(
        Check.PREFILL,
        H,
        "A-B11",
        "This model does not support assistant message prefill.",
        "errors page; recorded with claude-sonnet-5",
        "2026-11",
        models=r"claude-(?:mythos|[a-z]+-(?:4-(?:[6-9]|1\d)|[5-9]|[1-9]\d)(?!\d))",
    ),
    _Row(
        Check.PREFILL_BLANK,
        H,
        "A-B11",
        "final assistant content cannot end with trailing whitespace",
        "forgecode 1872, crewAI 4413",
        "2026-11",
    ),
    _Row(
        Check.REASONING_AT_END,
        H,
        "A-B11",
        "The final block in an assistant message cannot be `thinking`.",
        "two quotations",
        "2026-07-25",
    ),
    _Row(
        Check.SERVER_CALL_UNANSWERED,
        H,
        "A-B12",
        "was found without a corresponding",
        "a quotation; stop reasons page",
        "2026-11",
    ),
    _Row(Check.SERVER_TOOL_UNDECLARED, H, "A-B12", "tool was provided", "stop reasons page", "2026-11"),
    _Row(
        Check.REASONING_NOT_FIRST,
        H,
        "A-B13",
        "a final `assistant` message must start with a thinking block",
        "opencode 3077, mastra 7799",
        "2026-11",
    ),
    _Row(
        Check.REASONING_DISABLED,
        H,
        "A-B13",
        "When thinking is disabled, an `assistant` message in the final position cannot contain `thinking`",
        "forgecode 1853",
        "2026-11",
    ),
    _Row(
        Check.SIGNATURE_MISSING,
        H,
        "A-B13",
        "Invalid `signature` in `thinking` block",
        "Antigravity-Manager 498",
        "2026-11",
    ),
    _Row(
        Check.SYSTEM_FIRST,
        H,
        "A-B14",
        "use the top-level 'system' parameter for the initial system prompt",
        _PROBE,
        "2026-10-06",
    ),
    _Row(Check.SYSTEM_PLACE, H, "A-B14", _SYSTEM_PLACE, _PROBE, "2026-10-06"),
    _Row(
        Check.CONTENT_OF_SYSTEM_EMPTY,
        H,
        "A-B14",
        "system content must contain at least one block",
        _PROBE,
        "2026-10-06",
    ),
    _Row(Check.KIND_OF_SYSTEM, H, "A-B14", "supports text", _PROBE, "2026-10-06"),
    _Row(
        Check.TOOLS_MISSING,
        S,
        "A-B15",
        "Requests which include `tool_use` or `tool_result` blocks must define tools.",
        "whether still enforced is not known",
        "2026-11",
    ),
    _Row(Check.TOOL_UNDECLARED, OFF, "A-B15", "", "accepted, recorded many times", "2026-11"),
    _Row(
        Check.MARKS_TOO_MANY,
        H,
        "A-B16",
        "A maximum of 4 blocks with cache_control may be provided.",
        _PROBE,
        "2026-09-10",
    ),
    _Row(
        Check.COMPACTION_OF_SYSTEM,
        H,
        "A-B17",
        "",
        "error types of the SDK",
        "2026-11",
        "compaction_block_misplaced",
    ),
    _Row(
        Check.COMPACTION_MISPLACED,
        S,
        "A-B17",
        "",
        "error types of the SDK; where first is counted from is not known",
        "2026-11",
        "compaction_block_misplaced",
    ),
    _Row(
        Check.COMPACTION_REPEATED,
        H,
        "A-B17",
        "",
        "error types of the SDK",
        "2026-11",
        "compaction_block_ambiguous",
    ),
    _Row(Check.COMPACTION_EMPTY, H, "A-A5", "", "SDK types: the empty string is illegal", "2026-11"),
    _Row(
        Check.TOOL_NAME_REPEATED,
        S,
        "A-B18",
        "",
        "error types of the SDK, for edits of the tool set",
        "2026-11",
        "tool_name_conflict",
    ),
    _Row(Check.DOCUMENT_OF_ASSISTANT, H, "A-B19", "", "migration page of version 2026-10-21", "2026-10-21"),
    _Row(Check.CITATIONS_OF_USER, H, "A-B19", "", "migration page of version 2026-10-21", "2026-10-21"),
    _Row(
        Check.PART_WITHOUT_TYPE,
        H,
        "A-A5",
        "does not match any of the expected tags",
        "a quotation",
        "2026-11",
    ),
    _Row(
        Check.KIND_UNKNOWN,
        H,
        "A-A5",
        "does not match any of the expected tags",
        "a quotation; only where no beta is sent",
        "2026-11",
    ),
    _Row(
        Check.KIND_WITHOUT_BETA,
        H,
        "A-A5",
        "does not match any of the expected tags",
        "quoted for `fallback`",
        "2026-11",
    ),
    _Row(Check.KIND_UNCERTAIN, S, "A-A5", "", "the set of kinds is open", "2026-11"),
    _Row(Check.CHOICE_NO_OBJECT, H, "A-A5", "tool_choice: Input should be an object", _PROBE, "2026-11"),
    _Row(Check.CHOICE_UNDECLARED, S, "A-A5", "", "not tried", "2026-11"),
    _Row(Check.WINDOW_EXCEEDED, S, "context", "", "not quoted", "2026-11"),
    _Row(Check.COMPLETION_BEYOND_WINDOW, S, "context", "", "not quoted", "2026-11"),
)

_DEEPSEEK_ANTHROPIC: Final = (
    _Row(
        Check.ROLE_UNSUPPORTED,
        H,
        "A-A4",
        "unknown variant `system`, expected `user` or `assistant`",
        "github.com/aattaran/deepclaude/issues/29",
        "2026-11",
    ),
    _Row(
        Check.REASONING_NOT_ECHOED,
        H,
        "DS-01",
        "in the thinking mode must be passed back to the API.",
        "github.com/esengine/DeepSeek-Reasonix/issues/8902; its 8927 tried it",
        "2026-08-15",
    ),
    _Row(Check.REASONING_EMPTY, OFF, "DS-01", "", "200 for an empty thinking", "2026-08-15"),
    _Row(Check.SIGNATURE_MISSING, OFF, "DS-01", "", "its reasoning is not signed", "2026-11"),
)

_ROWS: Final[Mapping[tuple[str, str], tuple[_Row, ...]]] = {
    (CHAT, "openai"): _OPENAI,
    (CHAT, "azure"): _OPENAI,
    (CHAT, "deepseek"): _DEEPSEEK,
    (CHAT, "mistral"): _MISTRAL,
    (CHAT, "vllm"): _VLLM,
    (CHAT, "ollama"): _OLLAMA,
    (CHAT, "groq"): _GROQ,
    (CHAT, "openrouter"): _OPENROUTER,
    (CHAT, "moonshot"): _MOONSHOT,
    (CHAT, "minimax"): _MINIMAX,
    (CHAT, "llama.cpp"): _LLAMA_CPP,
    (CHAT, "fireworks"): _FIREWORKS,
    (MESSAGES, "anthropic"): _ANTHROPIC,
    (MESSAGES, "deepseek-anthropic"): _DEEPSEEK_ANTHROPIC,
}

ENTRIES: Final[tuple[Entry, ...]] = tuple(
    row.at(api, server) for (api, server), rows in _ROWS.items() for row in rows
)
"""The whole table."""

SERVERS: Final[Mapping[str, tuple[str, ...]]] = {
    api: tuple(server for a, server in _ROWS if a == api) for api in (CHAT, MESSAGES)
}
"""The servers with entries, by api; the default server of each first."""

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_BEFORE: Final = {
    # mistral-common; user behind tool is accepted by the hosted server too (recorded). It reads developer as system.
    **dict.fromkeys(
        (Role.SYSTEM, Role.DEVELOPER), frozenset({Role.USER, Role.ASSISTANT, Role.SYSTEM, Role.DEVELOPER})
    ),
    Role.USER: frozenset({Role.ASSISTANT, Role.SYSTEM, Role.DEVELOPER, Role.USER}),
    Role.ASSISTANT: frozenset({Role.ASSISTANT, Role.USER, Role.TOOL}),
    Role.TOOL: frozenset({Role.ASSISTANT, Role.TOOL, Role.USER}),
}
_OPENAI_FORMS: Final[Mapping[str, Any]] = {
    "call_name": _NAME,
    "tool_name": _NAME,
    "call_id_characters_max": 40,
}
_DEEPSEEK_THINKS: Final = re.compile(r"deepseek-(?:v4|reasoner)")

_PARAMETERS: Final[Mapping[tuple[str, str], Mapping[str, Any]]] = {
    (CHAT, "openai"): _OPENAI_FORMS,
    (CHAT, "azure"): _OPENAI_FORMS,
    (CHAT, "deepseek"): {
        "tool_name": re.compile(r"(?s).{1,64}"),
        "roles": frozenset({Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL}),
        "parts": frozenset({"text"}),
        "thinks": _DEEPSEEK_THINKS,
    },
    (CHAT, "mistral"): {
        "call_id": re.compile(r"[a-zA-Z0-9]{9}"),
        "call_name": _NAME,
        "successors": _BEFORE,
        "last_roles": frozenset({Role.USER, Role.TOOL}),
    },
    (CHAT, "moonshot"): {"thinks": re.compile(r"kimi-k(?:2\.[5-9]|[3-9])|kimi-.*thinking")},
    (MESSAGES, "anthropic"): {
        "call_id": re.compile(r"[a-zA-Z0-9_-]+"),
        "server_call_id": re.compile(r"srvtoolu_[a-zA-Z0-9_]+"),
        "tool_name": re.compile(r"[a-zA-Z0-9_-]{1,128}"),
        "marks_max": 4,
    },
    (MESSAGES, "deepseek-anthropic"): {
        "roles": frozenset({Role.USER, Role.ASSISTANT}),
        "thinks": _DEEPSEEK_THINKS,
    },
}
"""What the rules of a server need to know beside the levels."""


def levels(api: str, server: str) -> Profile:
    """The levels of this server's rules, and their data; soft wherever it has no evidence of its own."""
    return _PROFILES.get((api, server)) or _SOFT.get(api) or _NOTHING


def entries(api: str, server: str) -> tuple[Entry, ...]:
    """The entries of one server, in the order of the table."""
    return tuple(entry for entry in ENTRIES if (entry.api, entry.server) == (api, server))


def _soft(api: str) -> dict[Check, Grade]:
    """What the default server of an api minds, as far as it is not about models of its own."""
    return {
        entry.check: Grade(Level.SOFT)
        for entry in entries(api, SERVERS[api][0])
        if entry.level is not Level.OFF and entry.otherwise is not Level.OFF
    }


def _profiles() -> Iterator[tuple[tuple[str, str], Profile]]:
    for api, server in _ROWS:
        grades = _soft(api)
        for entry in entries(api, server):
            models = re.compile(entry.models) if entry.models else None
            grades[entry.check] = Grade(entry.level, models, entry.otherwise)
        yield (api, server), Profile(grades, **_PARAMETERS.get((api, server), {}))


_PROFILES: Final[Mapping[tuple[str, str], Profile]] = dict(_profiles())
_SOFT: Final[Mapping[str, Profile]] = {api: Profile(_soft(api)) for api in SERVERS}
_NOTHING: Final = Profile({})
