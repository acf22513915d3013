"""What the providers' own words are taken for: those of the documents, recorded refusals, and the simulator's."""

import base64
import gzip
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.adapters import answers
from turngate.adapters.answers import Answered, classify, classify_error_event
from turngate.adapters.levels import ENTRIES
from turngate.proxy.simulator import chat, messages
from turngate.proxy.simulator.refusals_messages import Asked
from turngate.proxy.simulator.servers import SERVERS
from turngate.telemetry.events import ProviderClass

Json = dict[str, Any]
SHARED: Final = Path(os.environ.get("TURNGATE_SHARED") or Path(__file__).parents[2] / "shared")
RULES: Final = Path(__file__).parents[1] / "docs" / "rules"
CHAT, MESSAGES = "openai.chat", "anthropic.messages"
GREATER: Final = "Expected an array with minimum length 1, but got an empty array instead."

# The whole sentences, as the provider documents quote them; the reasons by hand.
SEQUENCE: Final[dict[str | None, tuple[str, ...]]] = {
    "result.orphan": (
        "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'.",
        "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'",
        "Unexpected role 'tool' after role 'user'",
        (
            "messages.2.content.0: unexpected `tool_use_id` found in `tool_result` blocks: toolu_9. Each `tool_result` "
            "block must have a corresponding `tool_use` block in the previous message."
        ),
        "The number of toolResult blocks at messages.2.content exceeds the number of toolUse blocks of previous turn.",
        "Please ensure that function response turn comes immediately after a function call turn.",
        "No tool call found for function call output with call_id call_77.",
        "invalid params, tool result's tool id(call_function_1) not found (2013)",
    ),
    "call.unanswered": (
        (
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
            "The following tool_call_ids did not have response messages: call_a, call_b"
        ),
        (
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
            "(insufficient tool messages following tool_calls message)"
        ),
        "Not the same number of function calls and responses",
        (
            "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_01. Each "
            "`tool_use` block must have a corresponding `tool_result` block in the next message."
        ),
        (
            "messages.54: Did not find 2 `tool_result` block(s) at the beginning of this message. Messages following "
            "`tool_use` blocks must begin with a matching number of `tool_result` blocks."
        ),
        (
            "messages.3: `web_search` tool use with id `srvtoolu_1` was found without a corresponding "
            "`web_search_tool_result` block"
        ),
        "Expected toolResult blocks at messages.2.content for the following Ids: tooluse_a, tooluse_b",
        (
            "Please ensure that the number of function response parts is equal to the number of function call parts of "
            "the function call turn."
        ),
        "No tool output found for function call call_77.",
    ),
    "result.mismatch": (
        "Invalid parameter: 'tool_call_id' of 'call_x' not found in 'tool_calls' of previous message.",
        "Unexpected tool call id abc in tool results",
        "tool_call_id call_1 is not found",
    ),
    "result.duplicate": (
        "Invalid parameter: Duplicate value for 'tool_call_id' of 'call_1', in messages[7] and messages[8].",
        "messages.2.content.1: each tool_use must have a single result. Found multiple `tool_result` blocks with id: t",
        "Duplicate tool call id abc in tool results",
    ),
    "result.bad_shape": (
        "Missing parameter 'tool_call_id': messages with role 'tool' must have a 'tool_call_id'.",
        "Missing parameter 'name': messages with role 'function' must have a 'name'.",
        "messages.2.content.0.tool_result.tool_use_id: Field required",
    ),
    "call.duplicate_id": (
        "messages.3.content.1: `tool_use` ids must be unique",
        "Duplicate tool call id abc in assistant message",
    ),
    "call.bad_id": (
        (
            "Invalid 'messages[10].tool_calls[0].id': string too long. Expected a string with maximum length 40, but got "
            "a string with length 46 instead."
        ),
        "Tool call id was call_abc but must be a-z, A-Z, 0-9, with a length of 9.",
        "messages.1.content.0.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'",
        "messages.1.content.0.server_tool_use.id: String should match pattern '^srvtoolu_[a-zA-Z0-9_]+$'",
    ),
    "call.bad_name": (
        (
            "Invalid 'messages[69].tool_calls[0].function.name': empty string. Expected a string with minimum length 1, "
            "but got an empty string instead."
        ),
        (
            "Invalid 'messages[1].tool_calls[0].function.name': string does not match pattern. Expected a string that "
            "matches the pattern '^[a-zA-Z0-9_-]+$'."
        ),
        (
            "Function name was a.b but must be a-z, A-Z, 0-9, or contain underscores and dashes, with a maximum length of "
            "64."
        ),
    ),
    "call.arguments_invalid": (
        "invalid tool call arguments",
        "messages.1.content.0.tool_use.input: Input should be an object",
        "messages.1.content.0.tool_use.input: Input should be a valid dictionary",
        "invalid params, invalid function arguments json string (2013)",
        "Failed to parse tool call arguments as JSON: unexpected end",
    ),
    "call.unknown_tool": (
        "`web_search` tool use has a pending result, but no `web_search` tool was provided",
    ),
    "block.empty": (
        f"Invalid 'messages': empty array. {GREATER}",
        f"Invalid 'messages[2].tool_calls': empty array. {GREATER}",
        "Invalid value for 'content': expected a string, got null.",
        "messages: text content blocks must be non-empty",
        "messages: text content blocks must contain non-whitespace text",
        "messages.0: user messages must have non-empty content",
        "messages.0: all messages must have non-empty content except for the optional final assistant message",
        "messages: at least one message is required",
        "messages.1.content.0.text: cache_control cannot be set for empty text blocks",
        "messages.1: system content must contain at least one block",
        "messages.1.content: Field required",
        "Conversation must have at least one message",
        "invalid message content type: <nil>",
        "Invalid request: the message at position 2 with role 'assistant' must not be empty",
        "* GenerateContentRequest.contents: contents is not specified",
        (
            "The text field in the ContentBlock object at messages.0.content.1 is blank. Add text to the text field, and "
            "try again."
        ),
    ),
    "block.unknown_kind": (
        "Missing required parameter: 'messages[4].content[2].type'.",
        "Invalid 'messages[3]'. Content blocks are expected to be either text or image_url type.",
        (
            "Failed to deserialize the JSON body into the target type: messages[7]: unknown variant `video_url`, expected "
            "`text` at line 1 column 9"
        ),
        "messages.0: Input does not match the expected shape.",
        "messages.0.content.1: Input tag 'fallback' found using 'type' does not match any of the expected tags: 'text'",
        "Unknown part type: speech",
        "invalid message format",
        "image URLs are not currently supported, please use base64 encoded data instead",
    ),
    "block.wrong_role": (
        (
            "Invalid 'messages[3]'. Image URLs are only allowed for messages with role 'user', but this message with role "
            "'tool' contains an image URL."
        ),
        "messages.1: `tool_result` blocks can only be in `user` messages",
        "messages.1: `tool_use` blocks can only be in `assistant` messages",
    ),
    "block.mixed_turn": ("Assistant message must have either content or tool_calls, but not both.",),
    "role.unknown": (
        (
            "Invalid value: 'bot'. Supported values are: 'system', 'assistant', 'user', 'function', 'tool', and "
            "'developer'."
        ),
        "Unsupported value: 'messages[0].role' does not support 'developer' with this model.",
        (
            "Failed to deserialize the JSON body into the target type: messages[0].role: unknown variant `developer`, "
            "expected one of `system`, `user`, `assistant`, `tool` at line 1 column 9"
        ),
        "unknown variant `system`, expected `user` or `assistant`",
        (
            'messages: Unexpected role "system". The Messages API accepts a top-level `system` parameter, not "system" as '
            "an input message role."
        ),
        "Please use a valid role: user, model.",
    ),
    "role.order": (
        "Unexpected role 'user' after role 'tool'",
        "Unexpected role 'system' after role 'assistant'",
        "Expected last role User or Tool (or Assistant with prefix True) for serving but got assistant",
        "Assistant message with prefix True must be last message",
        "Conversation roles must alternate user/assistant/user/assistant/...",
        'messages: roles must alternate between "user" and "assistant", but found multiple "user" roles in a row',
        'messages: first message must use the "user" role',
        "This model does not support assistant message prefill. The conversation must end with a user message.",
        "messages: final assistant content cannot end with trailing whitespace",
        (
            "messages.0: use the top-level 'system' parameter for the initial system prompt; the directive-only form "
            "(content: [] with output_config) is accepted at any position"
        ),
        (
            "messages.3: role 'system' must follow a 'user' message or an 'assistant' message ending in a server tool "
            "result; see the docs"
        ),
        "messages.3: role 'system' must precede an 'assistant' message or end the array; see the docs",
        "Cannot have 2 or more assistant messages at the end of the list.",
        "A conversation must start with a user message. Try again with a conversation that starts with a user message.",
        "Please ensure that function call turn comes immediately after a user turn or after a function response turn.",
    ),
    "reasoning.detached": (
        "The reasoning_content in the thinking mode must be passed back to the API.",
        "Missing `reasoning_content` field in the assistant message at message index 2. For more, see the guide",
        "thinking is enabled but reasoning_content is missing in assistant tool call message at index 4",
        (
            "messages.1.content.0.type: Expected `thinking` or `redacted_thinking`, but found `tool_use`. When `thinking` "
            "is enabled, a final `assistant` message must start with a thinking block (preceeding the lastmost set of "
            "`tool_use` and `tool_result` blocks)."
        ),
        (
            "messages.1.content.0: When thinking is disabled, an `assistant` message in the final position cannot contain "
            "`thinking`. To use thinking blocks, enable `thinking` in your request."
        ),
        (
            "messages.1.content.0: `thinking` or `redacted_thinking` blocks in the latest assistant message cannot be "
            "modified. These blocks must remain as they were in the original response."
        ),
        "messages.1: The final block in an assistant message cannot be `thinking`.",
        "Item 'rs_1' of type 'reasoning' was provided without its required following item.",
        "Item 'fc_1' of type 'function_call' was provided without its required 'reasoning' item: 'rs_1'.",
    ),
    "signature.missing": (
        "messages.1.content.0: Invalid `signature` in `thinking` block",
        (
            "Function call is missing a thought_signature in functionCall parts. This is required for tools to work "
            "correctly, and missing thought_signature may lead to degraded model performance."
        ),
    ),
    "toolset.invalid": (
        "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are specified.",
        "Invalid value for 'parallel_tool_calls': 'parallel_tool_calls' is only allowed when 'tools' are specified.",
        f"Invalid 'tools': empty array. {GREATER}",
        "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
        "When using `tool_choice`, `tools` must be set.",
        (
            "Invalid 'tools[0].function.name': string too long. Expected a string with maximum length 64, but got a string "
            "with length 90 instead."
        ),
        "tools.0.custom.name: String should match pattern '^[a-zA-Z0-9_-]{1,128}$'",
        "tools.0.custom.input_schema: Field required",
        "tools.0.custom.input_schema.type: Input should be 'object'",
        "tool_choice: Input should be an object",
        "Requests which include `tool_use` or `tool_result` blocks must define tools.",
        "invalid params, function parameters is empty (2013)",
        "The toolConfig field must be defined when using toolUse and toolResult content blocks.",
    ),
    "context.over_budget": ("A maximum of 4 blocks with cache_control may be provided. Found 5.",),
    None: (
        "messages.1: role 'system' supports text, tool_addition, and tool_removal blocks only",
        "Previous response with id 'resp_1' not found.",
        "Duplicate item found with id fc_1. Remove duplicate items from your input and try again.",
        "Malformed input request: #/messages/2/content/0: extraneous key [toolResult] is not permitted",
        "Invalid type for 'messages[0].content[1]': expected an object, but got a string instead.",
        "messages.4.content.0.tool_result.is_error: Input should be a valid boolean",
    ),
}
WORDS: Final = [(reason, message) for reason, said in SEQUENCE.items() for message in said]

OTHER: Final = (
    "Incorrect API key provided: sk-abc. You can find your API key at https://x/account.",
    "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing.",
    "You exceeded your current quota, please check your plan and billing details.",
    "Rate limit reached for gpt-9 in organization org-1 on tokens per min (TPM): Limit 1, Used 1, Requested 1.",
    "The model `gpt-9` does not exist or you do not have access to it.",
    "Invalid model: open-nothing",
    "gpt-9/x is not a valid model ID",
    "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 9.0 instead.",
    "max_tokens: 900000 > 64000, which is the maximum allowed number of output tokens for claude-x",
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    "Unrecognized request argument supplied: foo",
    "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
    "Stream options can only be defined when `stream=True`.",
    "Invalid schema for function 'f': In context=(), 'additionalProperties' is required to be supplied.",
    'tool_choice: type "tool" and "any" are not supported for this model.',
    "messages.0.content.1.image.source.base64.data: URL sources are not supported",
    "Invalid 'messages[0].content[1].image_url.url'. Expected a base64-encoded data URL with an image MIME type",
    "invalid image input",
    "messages.0.content.0.pdf.source.base64.data: The PDF specified was not valid.",
    "Invalid value: 'mp9'. Supported values are: 'wav' and 'mp3'.",
    "Invalid 'messages[0].content[1].input_audio.format'. Supported values are: 'wav' and 'mp3'.",
    "model: Field required",
    "metadata.user_id: Extra inputs are not permitted",
    "Invalid type for 'seed': expected an integer, but got a string instead.",
    "Unexpected value(s) `x-2030-01-01` for the `anthropic-beta` header.",
    "tools.0.custom.input_schema: JSON schema is invalid. It must match JSON Schema draft 2020-12",
    "* GenerateContentRequest.tools[0].function_declarations[0].parameters.properties: should be non-empty for OBJECT type",
    "We could not parse the JSON body of your request.",
    "The response was filtered due to the prompt triggering Azure OpenAI's content management policy.",
    "Failed to call a function. Please adjust your prompt. See 'failed_generation' for more details.",
)
"""Causes that no rule of ours is about, all with status 400."""

CONTEXT: Final = (
    "This model's maximum context length is 128000 tokens. However, your messages resulted in 130000 tokens.",
    "prompt is too long: 210000 tokens > 200000 maximum",
    "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, decrease one of them",
    "request (2009 tokens) exceeds the available context size (512 tokens), try increasing it",
)


def body(message: str, **more: object) -> bytes:
    return json.dumps({"error": {"message": message, "type": "invalid_request_error", **more}}).encode()


def test_its_words_are_those_of_the_evidence() -> None:
    assert set(get_args(answers.Kind)) == set(get_args(ProviderClass)) - {""}


@pytest.mark.parametrize(("reason", "message"), WORDS, ids=[message[:60] for _, message in WORDS])
def test_a_provider_that_names_a_fault_of_the_sequence_is_understood(
    reason: str | None, message: str
) -> None:
    server = "minimax" if "(2013)" in message else ""
    assert classify(CHAT, server, 400, body(message)) == Answered("refused_sequence", _reason(reason))


def _reason(word: str | None) -> Any:
    return next((entry.reason for entry in ENTRIES if entry.reason == word), None)


def test_no_message_is_set_aside_that_the_table_does_not_have() -> None:
    assert {entry.message for entry in ENTRIES} >= answers._LOOSE


def test_every_message_of_the_table_is_among_these_words() -> None:
    """Else a rule could be right and its provider's answer never be told."""
    said = {message for _, message in WORDS} | set(CONTEXT) | set(ONE_SERVER_ONLY)
    missing = {
        entry.message
        for entry in ENTRIES
        if entry.message and not any(_same(entry.message) in _same(each) for each in said)
    }
    assert missing == set()


def _same(text: str) -> str:
    return text.replace("`", "'").replace('"', "'")


ONE_SERVER_ONLY: Final = {
    "Unterminated string starting at: line 1 column 9 (char 8)": "call.arguments_unclosed",
    "Expecting ',' delimiter: line 1 column 9 (char 8)": "call.arguments_invalid",
}


@pytest.mark.parametrize(("message", "reason"), ONE_SERVER_ONLY.items())
def test_what_a_parser_says_is_about_arguments_only_where_nothing_else_is_parsed_by_it(
    message: str, reason: str
) -> None:
    assert classify(CHAT, "vllm", 400, body(message)) == Answered("refused_sequence", _reason(reason))
    assert classify(CHAT, "", 400, body(message)) == Answered("unknown")


@pytest.mark.parametrize("message", OTHER)
def test_another_cause_is_no_fault_of_the_sequence(message: str) -> None:
    assert classify(CHAT, "", 400, body(message)) == Answered("refused_other")


@pytest.mark.parametrize("message", CONTEXT)
def test_a_context_that_is_too_long_is_told_and_is_no_fault_of_the_sequence(message: str) -> None:
    expected = Answered("refused_other", _reason("context.over_budget"))
    assert classify(CHAT, "", 400, body(message)) == expected


ORPHAN: Final = SEQUENCE["result.orphan"][0]
SEEN: Final = Answered("refused_sequence", _reason("result.orphan"))
INNER: Final = json.dumps({"error": {"message": ORPHAN}})

ENVELOPES: Final[dict[str, bytes]] = {
    "an object": body(ORPHAN),
    "in a list": b"[" + body(ORPHAN) + b"]",
    "at the top": json.dumps({"object": "error", "message": ORPHAN, "code": None}).encode(),
    "a text": json.dumps({"error": ORPHAN}).encode(),
    "FastAPI's detail": json.dumps({"detail": ORPHAN}).encode(),
    "JSON in a text": json.dumps({"error": {"message": INNER}}).encode(),
    "a gateway's inner answer": json.dumps(
        {"error": {"message": "Provider returned error", "code": 400, "metadata": {"raw": INNER}}}
    ).encode(),
    "a gateway that quotes": body(f"upstream.BadRequestError: OpenAIException - {INNER}"),
    "in capitals": body(ORPHAN.upper()),
    "with other marks": body(ORPHAN.replace("'", "`")),
    "no JSON": ORPHAN.encode(),
    "cut": body(ORPHAN)[:-4],
}


@pytest.mark.parametrize("data", ENVELOPES.values(), ids=ENVELOPES)
def test_a_message_is_found_in_whatever_it_is_wrapped(data: bytes) -> None:
    assert classify(CHAT, "openrouter", 400, data) == SEEN


def test_a_validator_names_the_place_beside_the_complaint() -> None:
    detail = [{"type": "missing", "loc": ["body", "messages", 1, "content"], "msg": "Field required"}]
    expected = Answered("refused_sequence", _reason("block.empty"))
    assert classify(CHAT, "mistral", 422, json.dumps({"detail": detail}).encode()) == expected
    quoted = "[{'type': 'missing', 'loc': ('body', 'messages', 0, 'x'), 'msg': 'no', 'input': 'api key'}]"
    assert classify(CHAT, "vllm", 400, body(quoted)) == Answered("refused_sequence")
    elsewhere = quoted.replace("'messages', 0, 'x'", "'n'")
    assert classify(CHAT, "vllm", 400, body(elsewhere)) == Answered("unknown")


CODES: Final[dict[str, tuple[str, str, Json, str | None]]] = {
    "Anthropic's detail": (
        MESSAGES,
        "",
        {"details": {"error_code": "compaction_block_misplaced"}},
        "block.wrong_role",
    ),
    "a repeated compaction": (
        MESSAGES,
        "",
        {"details": {"error_code": "compaction_block_ambiguous"}},
        "block.mixed_turn",
    ),
    "a tool set": (MESSAGES, "", {"details": {"error_code": "tool_name_conflict"}}, "toolset.invalid"),
    "Mistral's order": (CHAT, "mistral", {"code": "3230"}, None),
    "Mistral's ids": (CHAT, "mistral", {"code": "3280"}, "call.bad_id"),
}


@pytest.mark.parametrize(("api", "server", "more", "reason"), CODES.values(), ids=CODES)
def test_a_code_says_it_without_words(api: str, server: str, more: Json, reason: str | None) -> None:
    assert classify(api, server, 400, body("No.", **more)) == Answered("refused_sequence", _reason(reason))


STATUS: Final[dict[str, tuple[int, bytes, str]]] = {
    "an answer": (200, b'{"choices":[]}', "accepted"),
    "an answer about errors": (200, b'{"choices":[{"message":{"content":"error"}}]}', "accepted"),
    "an answer with an empty error": (200, b'{"error":null,"choices":[]}', "accepted"),
    "a stream": (200, b'data: {"choices":[{"delta":{"content":"error"}}]}\n\ndata: {"error":{"code":429}}\n\n', "accepted"),
    "a stream that begins with an error": (200, b': wait\n\ndata: {"error":{"code":429}}\n\n', "refused_other"),
    "a stream of which only the error is more than its frame": (
        200,
        b'event: message_start\ndata: {"type":"message_start"}\n\nevent: error\ndata: ' + body(ORPHAN) + b"\n\n",
        "refused_sequence",
    ),
    "a stream that ends as it begins": (200, b'data: {"error":{"code":429},"choices":[{"index":0}]}\n\n', "refused_other"),
    "an error with status 200": (200, json.dumps({"error": {"code": 402, "message": "x"}}).encode(), "refused_other"),
    "a sequence refused with status 200": (200, body(ORPHAN), "refused_sequence"),
    "elsewhere": (307, b"", "unknown"),
    "no key": (401, b"", "refused_other"),
    "no key, in words of a rule": (401, body(ORPHAN), "refused_other"),
    "no money": (402, b"<html>", "refused_other"),
    "no right": (403, b"", "refused_other"),
    "no model": (404, body("what?"), "refused_other"),
    "too long for the door": (413, b"<html>413</html>", "refused_other"),
    "too often": (429, b"", "refused_other"),
    "a refusal in no list": (400, body("Something is off"), "unknown"),
    "a refusal without words": (400, b"", "unknown"),
    "a refusal of a template": (422, body(ORPHAN), "refused_sequence"),
    "a timeout": (408, body("Request timed out"), "unknown"),
    "a failure": (500, body("Internal error", type="api_error"), "unknown"),
    "a failure that says why": (500, body("Failed to parse tool call arguments as JSON: x"), "refused_sequence"),
    "an overload": (529, body("Overloaded", type="overloaded_error"), "refused_other"),
    "a gateway without its server": (502, b"<html>Bad gateway</html>", "unknown"),
}  # fmt: skip


@pytest.mark.parametrize(("status", "data", "kind"), STATUS.values(), ids=STATUS)
def test_a_status_counts_with_what_the_body_says(status: int, data: bytes, kind: str) -> None:
    assert classify(CHAT, "", status, data).kind == kind


EVENTS: Final[dict[str, tuple[str, bytes, str]]] = {
    "Anthropic is overloaded": (
        MESSAGES,
        b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}',
        "refused_other",
    ),
    "Anthropic fails": (
        MESSAGES,
        b'{"type":"error","error":{"type":"api_error","message":"Internal server error"}}',
        "unknown",
    ),
    "a gateway that began too early": (CHAT, body(ORPHAN), "refused_sequence"),
    "the error alone": (CHAT, b'{"message":"Overloaded","type":"overloaded_error"}', "refused_other"),
    "the error alone, cut": (CHAT, b'{"type":"overloaded_error","message":"Over', "refused_other"),
    "a chunk with an error": (
        CHAT,
        b'{"choices":[{"finish_reason":"error"}],"error":{"code":429,"message":"slow down"}}',
        "refused_other",
    ),
    "Groq's model wrote no call": (
        CHAT,
        b'{"error":{"message":"No.","code":"tool_use_failed","status_code":400}}',
        "refused_other",
    ),
    "Groq's own field": (CHAT, b'{"choices":[],"x_groq":{"error":"over capacity"}}', "unknown"),
    "a text": (CHAT, b'{"error":"model runner has stopped"}', "unknown"),
    "nothing": (CHAT, b"", "unknown"),
}


@pytest.mark.parametrize(("api", "data", "kind"), EVENTS.values(), ids=EVENTS)
def test_an_error_inside_a_stream_counts_by_what_it_says(api: str, data: bytes, kind: str) -> None:
    assert classify_error_event(api, "", data).kind == kind


# -- kinds of complaints, not single ones -----------------------------------------------------------------------------


@given(
    words=st.sampled_from(WORDS),
    number=st.integers(0, 99_999),
    word=st.from_regex(r"[a-zA-Z][a-zA-Z0-9_-]{0,30}", fullmatch=True),
    mark=st.sampled_from("'\"`"),
)
def test_places_ids_and_marks_may_be_any(
    words: tuple[str | None, str], number: int, word: str, mark: str
) -> None:
    reason, message = words
    other = re.sub(r"(?<=[\[.])\d+(?=[\].:])", str(number), message)
    other = re.sub(r"\b(?:call_|toolu_|srvtoolu_|tooluse_|rs_|fc_|resp_)\w+", word, other)
    other = re.sub("['`\"]", mark, other)
    server = "minimax" if "(2013)" in message else ""
    assert classify(CHAT, server, 400, body(other)) == Answered("refused_sequence", _reason(reason))


@given(
    st.integers(100, 599),
    st.binary(max_size=300)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=20) | st.sampled_from([ORPHAN, INNER]),
        lambda inner: st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["error", "message", "detail", "loc", "msg", "code", "type", "metadata", "raw"]), inner
        ),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode()),
)  # fmt: skip
def test_any_body_is_classified(status: int, data: bytes) -> None:
    assert classify(CHAT, "", status, data).kind in get_args(answers.Kind)
    assert classify_error_event(MESSAGES, "", data).kind in get_args(answers.Kind)


def test_a_body_in_a_body_in_a_body_is_followed_only_so_far() -> None:
    data = ORPHAN
    for _ in range(9):
        data = json.dumps({"error": {"message": data}})
    assert len(data) < answers.BODY_MAX
    assert classify(CHAT, "", 400, data.encode()) == SEEN
    assert classify(CHAT, "", 400, b"[" * answers.BODY_MAX) == Answered("unknown")
    assert classify(CHAT, "", 400, b"messages" * answers.BODY_MAX) == Answered("unknown")


def test_what_stands_behind_the_bounds_is_not_read() -> None:
    assert classify(CHAT, "", 400, body(" x" * answers.BODY_MAX + ORPHAN)) == Answered("unknown")
    assert classify(CHAT, "", 400, body("x" * 5_000 + ORPHAN)) == Answered("unknown")
    many = json.dumps({"errors": [{"message": "x"}] * 100 + [{"message": ORPHAN}]})
    assert classify(CHAT, "", 400, many.encode()) == Answered("unknown")


# -- against the simulator, which has the providers' words by code of its own -------------------------------------------

EXAMPLES: Final = [
    (reason, example)
    for reason, told in json.loads((RULES / "examples.json").read_text()).items()
    for example in told["examples"]
    if "window" not in example
]


@pytest.mark.parametrize(
    ("reason", "example"), EXAMPLES, ids=[f"{reason} {each['server']}" for reason, each in EXAMPLES]
)
def test_what_the_simulator_says_of_an_illegal_example_is_its_reason(reason: str, example: Json) -> None:
    server = next((each for name, each in SERVERS.items() if name == example["server"]), SERVERS["openai"])
    dialect = messages if example["api"] == MESSAGES else chat
    refusal = server.refuse(dialect, example["illegal"], Asked())
    if refusal is None:
        pytest.skip("the simulator takes it")
    data = json.dumps(server.error(dialect, refusal, 1)).encode()
    answered = classify(example["api"], example["server"], refusal.status, data)
    assert answered.kind == "refused_sequence"
    assert answered.reason in (reason, *ALSO.get(reason, ()))


ALSO: Final[dict[str, tuple[str, ...]]] = {
    "result.mismatch": ("result.orphan",),  # Anthropic has the same words for both
    "result.misplaced": ("call.unanswered",),  # providers say of it that the call has no result
}


# -- against recorded refusals ----------------------------------------------------------------------------------------

KIND_OF_CLASS: Final = {"A": "refused_sequence", "Z": "unknown"}
"""By the analysis beside the recordings: A is about the structure, Z is nobody's word, all others have other causes."""
SHAPES: Final = re.compile(r"^tools\.\d|unknown variant|unsupported content\[\]\.type")
"""Classes B2 and B3 hold refusals that rules of ours are about too: of a block's kind, and of a tool's definition."""


SAYS_WHY: Final = "image input is not supported"
"""A failure of class Z that says what it cannot read."""


def _said(row: Json) -> str:
    if SAYS_WHY in row["message"]:
        return "refused_other"
    if SHAPES.search(row["message"]):
        return "refused_sequence"
    return KIND_OF_CLASS.get(row["class"], "refused_other")


def test_recorded_refusals_are_what_their_analysis_says() -> None:
    recordings = SHARED / "traffic"
    if not recordings.is_dir():
        pytest.skip(f"no recordings at {recordings}; set TURNGATE_SHARED")
    rows = {row["id"]: row for row in map(json.loads, (recordings / "refused.jsonl").open())}
    wrong, counted = [], Counter[str]()
    with gzip.open(recordings / "dev.jsonl.gz") as lines:
        for line in lines:
            exchange = json.loads(line)
            if row := rows.get(exchange["id"]):
                answered = classify(row["api"], "", row["status"], _bytes(exchange["response"]))
                counted[answered.kind] += 1
                if answered.kind != _said(row):
                    wrong.append((row["class"], row["message"], answered))
    assert wrong == []
    assert counted == Counter(map(_said, rows.values()))
    assert counted.total() == len(rows) > 100


def _bytes(response: Json) -> bytes:
    if "body_b64" in response:
        return base64.b64decode(response["body_b64"])
    text = response.get("body")
    return b"" if text is None else (text if isinstance(text, str) else json.dumps(text)).encode()
