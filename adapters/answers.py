"""What a provider's answer says about the request: taken, refused for its sequence, refused for another cause, or unclear.

Providers word a complaint anew for every request: places, ids, names, numbers and the marks round them vary. So what
is known of their words stands here as templates, in which "…" is any text. Gateways pass on the words of others; a
template therefore holds for every server, unless only one means by it what it says here.

Sources: the messages of the table of levels, the provider documents, and for the causes that no rule is about also
recorded refusals. What stands in no list is unknown, not guessed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import orjson

from turngate.adapters import levels, sse
from turngate.validators.checks import Reason

Kind = Literal["accepted", "refused_sequence", "refused_other", "unknown"]
"""The words of the evidence, see `telemetry.events.ProviderClass`."""

BODY_MAX: Final = 65_536
"""Bytes of an answer that are read; providers' errors have a few hundred."""


@dataclass(frozen=True, slots=True)
class Answered:
    """`reason` is what the provider objects to, in our words, as far as its message is known.

    A context that is too long is `refused_other` with `context.over_budget`: it is told, but it is no fault of the
    sequence, and mostly nobody told us the window.
    """

    kind: Kind
    reason: Reason | None = None


ACCEPTED: Final = Answered("accepted")
OTHER: Final = Answered("refused_other")
UNKNOWN: Final = Answered("unknown")


def classify(api: str, server: str, status: int, body: bytes) -> Answered:
    """What an answer says. `body` is decoded; its first `BODY_MAX` bytes suffice.

    `server` as in the settings, "" for the API's own provider. Of an answer with a good status the body may be left
    out: it is accepted then, which is wrong only for servers that send an error with status 200, whole or as the first
    event of a stream. Pure, and linear in the body.
    """
    body = body[:BODY_MAX]
    if 200 <= status < 300:
        error = _error_in_success(body)
        return ACCEPTED if error is None else classify_error_event(api, server, error)
    if status < 400:
        return UNKNOWN
    return _judge(_server(api, server), status, _read(body))


def classify_error_event(api: str, server: str, data: bytes) -> Answered:
    """The same of an error inside a stream: `data` is the error itself, its event, or the chunk that it is a field of.

    The status was 200 by then, so only what the error itself says counts. An answer that has begun before was accepted.
    """
    error = _read(data[:BODY_MAX])
    return _judge(_server(api, server), error.status, error)


def _server(api: str, server: str) -> str:
    return server or levels.SERVERS.get(api, ("",))[0]


def _error_in_success(body: bytes) -> bytes | None:
    """The error that stands in the place of the answer: gateways have sent their head by the time they hear of it."""
    if b'"error"' not in body:
        return None
    whole = body.lstrip()
    events = (
        [whole] if whole.startswith(b"{") else (sse.fields(each)[1] for each in sse.SseFramer().feed(whole))
    )
    for event in events:
        value = _json(event) if event else None
        if isinstance(value, dict) and value.get("type") not in _BEFORE_CONTENT:
            return event if value.get("error") else None
    return None


_BEFORE_CONTENT: Final = ("ping", "message_start")

# -- judging --------------------------------------------------------------------------------------------------------

_NOT_FOR_CONTENTS: Final = frozenset({401, 402, 403, 413, 429})
"""What these say comes before anything in the body is read."""
_OTHER_STATUS: Final = _NOT_FOR_CONTENTS | {404, 405, 411, 414, 415, 431}


def _judge(server: str, status: int, error: "_Error") -> Answered:
    """The most telling sign first: a fault that we know, another known cause, a place in the messages, in anything."""
    if status in _NOT_FOR_CONTENTS:
        return OTHER
    for text in error.texts:
        for template in _SEQUENCE:
            if template.server in ("", server) and template.matches(text):
                return Answered("refused_sequence", template.reason)
    for code in error.codes:
        if (code in _SEQUENCE_CODES) or (server == "mistral" and code in _MISTRAL_CODES):
            return Answered("refused_sequence", _SEQUENCE_CODES.get(code) or _MISTRAL_CODES.get(code))
    for text in error.texts:
        for template in _OTHER:
            if template.matches(text):
                return Answered("refused_other", template.reason)
    if error.codes & _CONTEXT_CODES:
        return Answered("refused_other", Reason.CONTEXT_OVER_BUDGET)
    if status in _OTHER_STATUS or error.codes & _OTHER_CODES:
        return OTHER
    if any(_PLACE.search(text) for text in error.texts):
        return Answered("refused_sequence")
    return OTHER if any(words in text for text in error.texts for words in _SOMEWHERE) else UNKNOWN


_PLACE: Final = re.compile(
    r"\b(?:messages|tools)(?:\.?\[|\.|/)\d"  # OpenAI's two ways, Anthropic's, Bedrock's
    r"|\('body', '(?:messages|tools)'"  # vLLM quotes its validator
    r"|'messages'|\bcontents\[\d|\binput\[\d"
)
"""A place in the sequence that a complaint names."""


@dataclass(frozen=True, slots=True)
class Template:
    """A complaint with its gaps. With `server` it holds for that one alone."""

    pieces: tuple[str, ...]
    reason: Reason | None
    server: str = ""

    def matches(self, text: str) -> bool:
        """Whether a text (as `_plain` makes it) holds the pieces in their order. Linear: no way back."""
        at = 0
        for piece in self.pieces:
            found = text.find(piece, at)
            if found < 0:
                return False
            at = found + len(piece)
        return True


_MARKS: Final = str.maketrans({**dict.fromkeys('"`´‘’“”', "'"), "\\": None})


def _plain(text: str) -> str:
    """Without what varies between servers and between layers of JSON: case, marks, escapes, white space."""
    return " ".join(text.translate(_MARKS).lower().split())


# -- reading --------------------------------------------------------------------------------------------------------

_TEXT_MAX: Final = 4_096
"""Characters of one message that are looked at: behind them providers quote the request."""
_VALUES_MAX: Final = 32
"""Values of an error that are looked at: they nest a few deep, in gateways twice."""

_TEXTS: Final = frozenset({"message", "msg", "error", "detail", "raw", "status_msg", "error_message"})
_CODES: Final = frozenset(
    {"code", "type", "status", "error_code", "error_type", "status_code", "http_code", "reason", "__type"}
)
_INNER: Final = frozenset(
    {
        "error",
        "errors",
        "detail",
        "details",
        "metadata",
        "innererror",
        "base_resp",
        "x_groq",
        "message",
        "raw",
    }
)


@dataclass(frozen=True, slots=True)
class _Error:
    """What an error body says. `status` is the HTTP status that it names itself, 0 where it names none."""

    texts: tuple[str, ...]
    codes: frozenset[str]
    status: int


def _read(body: bytes) -> _Error:
    """The messages and codes of an error in any of the known envelopes; a body that is no JSON is one message."""
    value = _json(body)
    texts: list[str] = []
    codes: set[str] = set()
    waiting: list[object] = [body.decode(errors="replace") if value is None else value]
    for _ in range(_VALUES_MAX):
        if not waiting:
            break
        match waiting.pop(0):
            case str() as text:
                inner = _json(text.encode(errors="replace")) if text.lstrip()[:1] in ("{", "[") else None
                if inner is None:
                    texts.append(
                        _plain(text[:_TEXT_MAX].split("'input':", 1)[0])
                    )  # vLLM quotes the request there
                else:
                    waiting.append(inner)
            case list() as items:
                waiting += items[:_VALUES_MAX]
            case dict() as fields:
                codes.update(_codes(fields))
                waiting += _parts(fields)
    return _Error(tuple(texts), frozenset(codes), _status(codes))


def _json(body: bytes) -> object:
    """None where it is no JSON."""
    try:
        value: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value


def _codes(fields: Mapping[object, object]) -> Iterator[str]:
    for key in _CODES & fields.keys():
        value = fields[key]
        if isinstance(value, str | int) and not isinstance(value, bool):
            yield str(value).lower()


def _parts(fields: Mapping[object, object]) -> Iterator[object]:
    """The messages of one object, and what may hold more."""
    match fields:
        case {"loc": list() as place, "msg": str() as message}:  # FastAPI: a complaint and where it belongs
            yield ".".join(str(step) for step in place if step != "body") + ": " + message
            return
    for key, value in fields.items():
        if (key in _TEXTS and isinstance(value, str)) or (key in _INNER and isinstance(value, dict | list)):
            yield value


def _status(codes: set[str]) -> int:
    return max((int(code) for code in codes if re.fullmatch(r"[45]\d\d", code)), default=0)


# -- what is known: faults of the sequence ----------------------------------------------------------------------------

_LOOSE: Final = frozenset(
    {
        "Invalid value:",
        "Missing required parameter:",
        "Field required",
        "Unexpected role",
        "empty array",
        "empty array. Expected an array with minimum length 1",
        "empty string. Expected a string with minimum length 1",
        "expected `text`",
        "input_schema",
        "input_schema.type",
        "invalid params",
        "maximum context length is",
        "This model's maximum context length is",
        "not found",
        "string does not match pattern",
        "string too long. Expected a string with maximum length 40",
        "string too long. Expected a string with maximum length 64",
        "does not match any of the expected tags",
        "Input does not match the expected shape.",
        "String should match pattern '^[a-zA-Z0-9_-]+$'",
        "String should match pattern '^[a-zA-Z0-9_-]{1,",
        "supports text",
        "tool was provided",
        "was found without a corresponding",
        "unknown variant `developer`",
        "Unterminated string starting at",
        "Expecting ',' delimiter",
    }
)
"""Messages of the table that other complaints hold too: `_WORDS` says them with what tells them apart."""

_WORDS: Final[Mapping[Reason | None, tuple[str, ...]]] = {
    Reason.ROLE_UNKNOWN: (
        "invalid value: '…'. supported values are: …'assistant'",
        "missing required parameter: 'messages[….role'",
        "unsupported value: 'messages[….role'",
        "unknown variant '…', expected …'user'",
        "unknown variant '…', expected …'assistant'",
        "missing field 'role'",
        "messages: unexpected role '",
        "messages.….role: input should be",
        "messages.….role: field required",
        "use a valid role: user, model",
        "assistant and tool roles are supported",
        "user and assistant roles are supported",
        "system role not supported",
    ),
    Reason.ROLE_ORDER: (
        "unexpected role '…' after role",
        "expected last role",
        "roles must alternate",
        "conversation must alternate between",
        "multiturn requests alternate between",
        "multiturn requests ends with a user role",
        "conversation must start with a user message",
        "conversation must end with a user message",
        "function call turn comes immediately after a user turn",
        "no user query found in messages",
        "system message must be at the beginning",
    ),
    Reason.BLOCK_UNKNOWN_KIND: (
        "missing required parameter: 'messages[….type'",
        "content blocks are expected to be either",
        "messages[…unknown variant '…', expected …'text'",
        "messages.…does not match any of the expected tags",
        "messages.….type: field required",
        "messages.…: input does not match the expected shape",
        "unsupported content[].type",
        "unknown part type",
    ),
    Reason.BLOCK_EMPTY: (
        "invalid 'messages': empty array",
        "invalid 'messages[….tool_calls': empty array",
        "invalid 'messages[….content': empty array",
        "messages: field required",
        "missing required parameter: 'messages'",
        "missing required parameter: 'messages[….content'",
        "messages.….content: field required",
        "messages.….content: input should be",
        "messages[…missing field 'content'",
        "with role '…' must not be empty",
        "cache_control cannot be set for empty text blocks",
        "contents is not specified",
        "contents.parts must not be empty",
        "has an empty text parameter",
        "text field in the contentblock object at …is blank",
        "assistant message must have either content or tool_calls",
    ),
    Reason.BLOCK_MIXED_TURN: ("assistant message must have either content or tool_calls, but not both",),
    Reason.CALL_BAD_ID: (
        "invalid '…id': string too long. expected a string with maximum length",
        "invalid '….tool_calls[….id': empty string",
        "missing required parameter: 'messages[….tool_calls[….id'",
        "messages.….tool_use.id: field required",
        "messages.….tool_use.id: string should",
        "messages.….id: string should match pattern",
        "messages.….tool_use_id: string should match pattern",
        "tool call ids should be alphanumeric strings",
    ),
    Reason.CALL_BAD_NAME: (
        "invalid 'messages[….name': empty string",
        "invalid 'messages[….name': string does not match pattern",
        "invalid 'messages[….name': string too long",
        "messages.….name: string should",
        "messages.….tool_use.name: field required",
        "function_response.name: name cannot be empty",
    ),
    Reason.CALL_ARGUMENTS_INVALID: (
        "messages.….input: input should be",
        "invalid tool call arguments",
        "failed to parse tool call arguments as json",
        "invalid params, …arguments",
    ),
    Reason.CALL_DUPLICATE_ID: ("duplicate tool call id",),
    Reason.CALL_UNANSWERED: (
        "did not find …'tool_result' block(s) at the beginning of this message",
        "did not have response messages",
        "no tool output found for",
        "number of function response parts is equal to the number of function call parts",
        "expected toolresult blocks at",
        "tool use with id '…' was found without a corresponding",
    ),
    Reason.CALL_UNKNOWN_TOOL: (
        "but no '…' tool was provided",
        "tool use with id '…' was found without a corresponding …but no '…' tool was provided",
    ),
    Reason.RESULT_ORPHAN: (
        "unexpected role 'tool' after role",
        "no tool call found for",
        "number of toolresult blocks at …exceeds the number of tooluse blocks",
        "function response turn comes immediately after a function call turn",
    ),
    Reason.RESULT_DUPLICATE: ("duplicate tool call id …in tool results",),
    Reason.RESULT_MISMATCH: ("tool_call_id …not found",),
    Reason.RESULT_BAD_SHAPE: (
        "must have a 'tool_call_id'",
        "missing required parameter: 'messages[….tool_call_id'",
        "messages[…missing field 'tool_call_id'",
        "messages.….tool_use_id: field required",
    ),
    Reason.REASONING_DETACHED: (
        "missing 'reasoning_content' field in the assistant message",
        "blocks in the latest assistant message cannot be modified",
        "expected 'thinking' or 'redacted_thinking', but found",
        "was provided without its required following item",
        "was provided without its required 'reasoning' item",
    ),
    Reason.SIGNATURE_MISSING: (
        "missing a thought_signature",
        "invalid thought signature",
        "corrupted thought signature",
    ),
    Reason.TOOLSET_INVALID: (
        "invalid 'tools': empty array",
        "invalid 'tools[….name': empty string",
        "invalid 'tools[….name': string",
        "missing required parameter: 'tools[",
        "tools[…unknown variant",
        "tools.….name: string should",
        "tools.…: field required",
        "tools.….input_schema: input",
        "tools.….input_schema.type: input",
        "tools.…does not match any of the expected tags",
        "tool names must be unique",
        "does not match any of the specified 'tools'",
        "not found in 'tools' parameter",
        "not found in provided tools",
        "invalid function name. must start with",
        "toolconfig field must be defined when using tooluse",
    ),
    Reason.CONTEXT_OVER_BUDGET: ("blocks with cache_control may be provided",),
    None: (
        "role 'system' supports",
        "turn-scoped system message supports",
        "missing required parameter: 'messages[",
        "unknown parameter: 'messages[",
        "unsupported value: 'messages[",
        "invalid type for 'messages",
        "tool call result does not follow tool call",
        "previous response with id '…' not found",
        "invalid 'previous_response_id'",
        "duplicate item found with id",
        "item with id '…' not found",
        "unknown input item type",
        "malformed input request: #/messages/",
        "required oneof field 'data' must have one initialized field",
    ),
}
"""Further wordings, by what they object to. In lower case, all quotes as '."""

_WORDS_OF: Final[tuple[tuple[str, Reason, tuple[str, ...]], ...]] = (
    # It parses old arguments and passes on what Python's parser says; elsewhere that is about the whole body.
    ("vllm", Reason.CALL_ARGUMENTS_UNCLOSED, ("unterminated string starting at",)),
    (
        "vllm",
        Reason.CALL_ARGUMENTS_INVALID,
        (
            "expecting value: line",
            "expecting ',' delimiter",
            "expecting ':' delimiter",
            "expecting property name enclosed in double quotes",
            "extra data: line",
            "invalid control character at",
        ),
    ),
)

_MISTRAL_CODES: Final[Mapping[str, Reason | None]] = {"3230": None, "3280": Reason.CALL_BAD_ID}
_SEQUENCE_CODES: Final[Mapping[str, Reason | None]] = {
    **{
        entry.code: entry.reason
        for entry in levels.ENTRIES
        if entry.code.startswith(("compaction_", "tool_"))
    },
    "compaction_content_mismatch": None,
    "compaction_signature_invalid": Reason.SIGNATURE_MISSING,
    "compaction_incomplete_turn": None,
    "compaction_nothing_to_summarize": None,
    "compaction_tool_changes_mismatch": Reason.TOOLSET_INVALID,
    "compaction_too_many_tool_references": Reason.TOOLSET_INVALID,
    "tool_reference_unresolved": Reason.TOOLSET_INVALID,
    "available_tools_limit_exceeded": Reason.TOOLSET_INVALID,
    "thread_already_continued": None,
    "thread_fingerprint_mismatch": None,
    "invalid_request_message_order": None,
    "invalid_function_call": Reason.CALL_BAD_ID,
    "previous_response_not_found": None,
}
"""Codes that say it without words. None: about the sequence, not which fault."""

# -- what is known: other causes ------------------------------------------------------------------------------------

_CONTEXT_WORDS: Final = (
    "context length",
    "context size",
    "context window",
    "context limit",
    "prompt is too long",
    "prompt too long",
    "input is too long",
    "input tokens exceed",
    "maximum number of tokens allowed",
    "reduce the length of the messages",
    "too large for model with",
)
_CONTEXT_CODES: Final = frozenset({"context_length_exceeded", "exceed_context_size_error"})

_OTHER_WORDS: Final = (
    # Who asks, and what he may
    "api key",
    "api-key",
    "authentication",
    "credentials",
    "unauthorized",
    "forbidden",
    "permission",
    "access denied",
    "security token",
    "signature expired",
    "subscription key",
    "unregistered callers",
    "country, region, or territory not supported",
    # How much
    "rate limit",
    "rate-limit",
    "too many requests",
    "quota",
    "credit balance",
    "insufficient balance",
    "insufficient credits",
    "resource exhausted",
    "resource has been exhausted",
    "throttl",
    "overloaded",
    "request too large",
    "request entity too large",
    "payload too large",
    "body too large",
    "request exceeds the maximum",
    "exceeds the maximum allowed",
    "list should have at most",
    "request size exceeds",
    # Which model
    "model not found",
    "model '…' not found",
    "model '…' does not exist",
    "model '…' has been deprecated",
    "invalid model",
    "not a valid model",
    "model identifier is invalid",
    "supported api model names",
    "not a chat model",
    "deployment for this resource does not exist",
    "do not have access to it",
    "end of its life",
    "on-demand throughput",
    "no endpoints found",
    "resource not found",
    # Parameters, outputs and what tools take
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "stop_sequences",
    "budget_tokens",
    "thinking.type",
    "reasoning_effort",
    "effort level",
    "logprobs",
    "logit_bias",
    "response_format",
    "output_format",
    "output_config",
    "stream options",
    "stream_options",
    "unsupported parameter",
    "unrecognized request argument",
    "does not support this tool_choice",
    "invalid schema for",
    "schema is too complex",
    "schemas contains too many",
    "too many strict tools",
    "could not parse the json body",
    "invalid json",
    "json schema",
    "parameters.properties",
    "anthropic-version",
    "anthropic-beta",
    "model parameter",
    # What is in a block: pictures, sound, documents
    ".source.",
    "image_url",
    "image input",
    "input_audio",
    "audio input",
    "file_data",
    "file_id",
    "mime type",
    "unsupported image",
    "invalid image",
    "could not process image",
    "could not process pdf",
    "image exceeds",
    "image dimensions exceed",
    "failed to load image",
    "url sources are not supported",
    "media type",
    "media_type",
    "error while downloading",
    "failed to download",
    "cannot fetch content",
    "timeout while downloading",
    "file type you uploaded is not supported",
    "content block that you provided",
    "doesn't support the …field",
    "does not support image",
    # What may be asked
    "content management policy",
    "content filter",
    "content policy",
    "usage policies",
    "usage policy",
    "safety system",
    "moderation",
    # What the model wrote was no call: the request itself was taken
    "failed to call a function",
    "tool call validation failed",
)
_SOMEWHERE: Final = (
    ": field required",
    ": input should be",
    "extra inputs are not permitted",
    "missing required parameter",
    "invalid type for '",
    "unsupported value: '",
    "supported values are",
    "unknown parameter",
    "not supported",
)
"""Words of validators, about whatever they name."""
_OTHER_CODES: Final = frozenset(
    {
        "authentication_error",
        "invalid_api_key",
        "api_key_invalid",
        "unauthorized",
        "unauthenticated",
        "permission_error",
        "permission_denied",
        "forbidden",
        "billing_error",
        "insufficient_quota",
        "billing_hard_limit_reached",
        "rate_limit_error",
        "rate_limit_exceeded",
        "ratelimitreached",
        "throttlingexception",
        "resource_exhausted",
        "overloaded_error",
        "request_too_large",
        "not_found_error",
        "model_not_found",
        "invalid_model",
        "deploymentnotfound",
        "thread_not_found",
        "unsupported_parameter",
        "unknown_model",
        "invalid_image_url",
        "invalid_image_format",
        "invalid_image",
        "image_parse_error",
        "invalid_base64_image",
        "invalid_function_parameters",
        "invalid_json_schema",
        "integer_above_max_value",
        "integer_below_min_value",
        "decimal_above_max_value",
        "decimal_below_min_value",
        "content_filter",
        "content_policy_violation",
        "invalid_prompt",
        "tool_use_failed",
    }
)


def _sequence() -> Iterator[Template]:
    for reason, wordings in _WORDS.items():
        yield from (Template(_pieces(words), reason) for words in wordings)
    for server, reason, wordings in _WORDS_OF:
        yield from (Template(_pieces(words), reason, server) for words in wordings)
    for entry in levels.ENTRIES:
        if entry.message and entry.message not in _LOOSE:
            yield Template((_plain(entry.message),), entry.reason)


def _pieces(words: str) -> tuple[str, ...]:
    return tuple(words.split("…"))


# The one that says most is asked first. Some words stand for several faults: then for the plainest, the first in the table.
_SEQUENCE: Final = sorted(_sequence(), key=lambda each: -sum(map(len, each.pieces)))
_OTHER: Final = (
    *(Template(_pieces(words), Reason.CONTEXT_OVER_BUDGET) for words in _CONTEXT_WORDS),
    *(Template(_pieces(words), None) for words in _OTHER_WORDS),
)
