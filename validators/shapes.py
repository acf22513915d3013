"""What adapters notice in a single message or beside them, put into words; and the rules about what is declared."""

from collections.abc import Iterator, Mapping
from typing import Final

from turngate.validators.checks import Fault, Profile, quoted
from turngate.validators.graph import Check, Kind, MessageSequence, Oddity

WORDS: Final[Mapping[Check, tuple[str, str]]] = {
    Check.NO_MESSAGES: ("the list of messages is empty.", "Send at least one message."),
    Check.NOT_A_MESSAGE: ("this is no message.", "Send an object with role and content."),
    Check.ROLE_UNKNOWN: ("there is no role {}.", "Use a role of this API."),
    Check.CALL_IN_WRONG_ROLE: (
        "a tool call stands in a message that is not the assistant's.",
        "Move it to an assistant message.",
    ),
    Check.RESULT_IN_WRONG_ROLE: (
        "a tool result stands in a message that is not the user's.",
        "Move it to the user message behind its call.",
    ),
    Check.MEDIA_IN_WRONG_ROLE: (
        "{} stands in a message that may only have text.",
        "Put it into a user message behind all results.",
    ),
    Check.KIND_IN_WRONG_ROLE: ("{} belongs to another role.", "Move it to a message of its role."),
    Check.DOCUMENT_OF_ASSISTANT: (
        "a document stands in an assistant message.",
        "Move it to a user message.",
    ),
    Check.CITATIONS_OF_USER: ("a user's text has citations.", "Drop the citations."),
    Check.KIND_OF_SYSTEM: ("a system message may not have {}.", "Keep to text in system messages."),
    Check.COMPACTION_OF_SYSTEM: (
        "a compaction block stands in a system message.",
        "Put it first in the conversation.",
    ),
    Check.COMPACTION_MISPLACED: (
        "a compaction block stands behind other blocks.",
        "Put it first, and drop what it replaces.",
    ),
    Check.COMPACTION_REPEATED: (
        "there is more than one compaction block with content.",
        "Keep the latest one alone.",
    ),
    Check.COMPACTION_EMPTY: ("the compaction block's content is empty.", "Send it as the provider gave it."),
    Check.ARGUMENTS_UNCLOSED: (
        "the arguments of the call are cut off.",
        "Drop the call and its result: it never came whole.",
    ),
    Check.ARGUMENTS_INVALID: ("the arguments of the call are not JSON.", "Send them as the model gave them."),
    Check.ARGUMENTS_EMPTY: ("the arguments of the call are an empty text.", "Send {{}} for no arguments."),
    Check.ARGUMENTS_NO_OBJECT: ("the arguments of the call are no object.", "Send a JSON object."),
    Check.ARGUMENTS_NO_TEXT: (
        "the arguments of the call are not a text.",
        "Send the JSON object as a string.",
    ),
    Check.RESULT_WITHOUT_ID: ("the result does not say which call it answers.", "Send the id of its call."),
    Check.RESULT_WITHOUT_NAME: ("the function's result has no name.", "Send the name of its function."),
    Check.RESULT_AS_LIST: (
        "the result is a list of parts, which loses its call here.",
        "Send its content as one string.",
    ),
    Check.PART_WITHOUT_TYPE: ("the part of the content has no type.", "Send a part of a type of this API."),
    Check.KIND_UNKNOWN: ("there is no kind {} in this API.", "Use a kind of this API."),
    Check.KIND_WITHOUT_BETA: (
        "kind {} needs a beta that the request does not name.",
        "Send the header of its beta, or drop it.",
    ),
    Check.KIND_UNCERTAIN: (
        "kind {} is not known here; a beta may enable it.",
        "Check that the provider knows this kind.",
    ),
    Check.IMAGE_BY_ADDRESS: ("the image is only named by its address.", "Send the image itself in base64."),
    Check.CALLS_EMPTY: ("the list of tool calls is empty.", "Leave the key out."),
    Check.CONTENT_NULL: ("the message has no content.", "Send a text, or drop the message."),
    Check.CONTENT_OF_USER_EMPTY: ("the user message is empty.", "Send a text, or drop the message."),
    Check.CONTENT_OF_ASSISTANT_EMPTY: ("the assistant message is empty.", "Drop the message."),
    Check.CONTENT_OF_SYSTEM_EMPTY: (
        "the system message has no block.",
        "Send at least one block, or drop the message.",
    ),
    Check.TEXT_EMPTY: ("the text block is empty.", "Drop the block."),
    Check.TEXT_BLANK: ("the text block is only blanks.", "Drop the block."),
    Check.TEXT_OF_ASSISTANT_BLANK: ("the text block is only blanks.", "Drop the block."),
    Check.REFUSAL_MIXED: (
        "a refusal stands beside other parts.",
        "Send the refusal alone, or only the text.",
    ),
    Check.CALL_FORMS_MIXED: (
        "the message has both a function_call and tool_calls.",
        "Send the calls in one form.",
    ),
    Check.SIGNATURE_MISSING: (
        "the thinking block has no signature.",
        "Send it as the provider gave it, or drop it.",
    ),
    Check.PREFIX_NOT_LAST: (
        "an assistant message marked as prefix is not the last message.",
        "Drop the mark.",
    ),
    Check.PREFILL_BLANK: ("the last assistant message ends with blanks.", "Trim its end."),
    Check.TOOLS_EMPTY: ("the list of tools is empty.", "Leave the key out."),
    Check.TOOL_WITHOUT_SCHEMA: ("the tool has no input_schema.", "Send a JSON Schema of type object."),
    Check.TOOL_SCHEMA_TYPE: ("the tool's schema is not of type object.", "Give the schema the type object."),
    Check.TOOL_WITHOUT_PARAMETERS: (
        "the function has no parameters.",
        "Send an empty object schema for none.",
    ),
    Check.CHOICE_WITHOUT_TOOLS: ("tool_choice is set, and no tools are.", "Leave tool_choice out."),
    Check.NO_CHOICE_WITHOUT_TOOLS: ("tool_choice is set, and no tools are.", "Leave tool_choice out."),
    Check.PARALLEL_WITHOUT_TOOLS: ("parallel_tool_calls is set, and no tools are.", "Leave it out."),
    Check.CHOICE_NO_OBJECT: ("tool_choice is no object.", 'Send an object such as {{"type": "auto"}}.'),
}
"""(message, remedy) of each oddity; `{}` stands for what it is about."""


def worded(oddity: Oddity) -> Fault:
    """An oddity in the words of a finding."""
    message, remedy = WORDS[oddity.check]
    return oddity.at, message.format(quoted(oddity.about)), remedy.format()


def part_unsupported(sequence: MessageSequence, profile: Profile) -> Iterator[Fault]:
    """A part of a type that this server does not take, though the API has it or others do."""
    parts = profile.parts
    for block in sequence.blocks if parts is not None else ():
        if block.wire and block.kind not in _NOT_PARTS and block.wire not in (parts or ()):
            yield (
                block.at,
                f"this server takes no part of type {quoted(block.wire)}.",
                "Send a part of a type it takes.",
            )


_NOT_PARTS: Final = frozenset({Kind.TOOL_CALL, Kind.TOOL_RESULT, Kind.THINKING})


_AUDIO: Final = Kind.AUDIO


def audio_of_model(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """Audio, which some models do not take. Only models that are known not to are asked about."""
    for block in sequence.blocks:
        if block.kind is _AUDIO:
            yield block.at, "this model takes no audio.", "Send the audio to a model that takes it."


# -- what is declared -------------------------------------------------------------------------------------------


def tool_name_pattern(sequence: MessageSequence, profile: Profile) -> Iterator[Fault]:
    """A declared tool with a name this server does not take."""
    pattern = profile.tool_name
    for tool in (sequence.setting.tools or ()) if pattern is not None else ():
        if pattern is not None and not tool.wire and pattern.fullmatch(tool.name) is None:
            yield (
                f"{tool.at}/name",
                f"name {quoted(tool.name)} is not of the form {pattern.pattern}.",
                "Rename the tool.",
            )


def tool_name_repeated(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """Two tools of one name."""
    tools = [tool for tool in sequence.setting.tools or () if tool.name]
    if len({tool.name for tool in tools}) == len(tools):
        return
    met: set[str] = set()
    for tool in tools:
        if tool.name in met:
            yield f"{tool.at}/name", f"another tool is named {quoted(tool.name)} too.", "Rename one of them."
        met.add(tool.name)


def choice_undeclared(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """The one tool that must be called is not declared."""
    choice, tools = sequence.setting.choice, sequence.setting.tools
    if choice is not None and tools is not None and not any(tool.name == choice for tool in tools):
        yield "/tool_choice", f"no tool {quoted(choice)} is declared.", "Name a declared tool."


def tools_missing(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """Calls or results in the history, and no tools declared."""
    if sequence.setting.tools or sequence.continues or not sequence.uses_tools:
        return
    for block in sequence.blocks:
        if block.kind is Kind.TOOL_CALL or block.kind is Kind.TOOL_RESULT:
            yield (
                block.at,
                "the history has tool blocks, and no tools are declared.",
                "Declare the tools as long as their calls are in the history.",
            )
            return


def marks_too_many(sequence: MessageSequence, profile: Profile) -> Iterator[Fault]:
    """More cache borders than this server takes, counted over the whole request."""
    limit = profile.marks_max
    if limit is None:
        return
    # The provider reads tools and system before the messages.
    marks = (*sequence.setting.marks, *sequence.marks)
    if len(marks) > limit:
        yield (
            marks[limit],
            f"{len(marks)} blocks have cache_control, and at most {limit} may.",
            "Drop the earlier marks.",
        )


def window_exceeded(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """The messages alone are more than the model's window."""
    budget = sequence.budget
    if budget is not None and budget.messages_min > budget.window:
        yield (
            "/messages",
            f"the messages are at least {budget.messages_min} tokens, and the window is {budget.window}.",
            "Send a shorter history.",
        )


def completion_beyond_window(sequence: MessageSequence, _: Profile) -> Iterator[Fault]:
    """The messages fit, and with the answer that is asked for they do not."""
    budget = sequence.budget
    if (
        budget is not None
        and budget.messages_min <= budget.window < budget.messages_min + budget.completion_max
    ):
        yield (
            budget.completion_at,
            f"{budget.messages_min} tokens at least and {budget.completion_max} asked for exceed {budget.window}.",
            "Ask for a shorter answer, or send a shorter history.",
        )
