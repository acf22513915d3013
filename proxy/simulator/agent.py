"""The default behaviour: call tools that are declared, quote their results, else echo."""

import re
from typing import Any, Final

from turngate.proxy.simulator.dialect import Call, Json, Prompt, Reply, Tool, mapping, objects, string
from turngate.proxy.simulator.scenario import fragments, words

QUOTE_CHARS_MAX: Final = 2_000
"""Longest quotation of a prompt or a result: every word is an event of the stream."""

SCHEMA_DEPTH_MAX: Final = 8
"""Schemas may refer to themselves; deeper values are empty."""


def reply(prompt: Prompt, number: int) -> Reply:
    """Answer as a model that calls tools whenever it may."""
    if prompt.results:
        quoted = "; ".join(result[:QUOTE_CHARS_MAX] for result in prompt.results)
        return Reply(number, prompt, text=tuple(words(f"The tools said: {quoted}")))
    tools = _chosen(prompt)
    if not tools:
        return Reply(number, prompt, text=tuple(words(f"You said: {prompt.last_text[:QUOTE_CHARS_MAX]}")))
    calls = tuple(Call(tool.name, tuple(fragments(arguments(tool.schema)))) for tool in tools)
    text = words(f"I call {', '.join(tool.name for tool in tools)}.")
    return Reply(number, prompt, text=tuple(text), calls=calls)


def _chosen(prompt: Prompt) -> list[Tool]:
    if prompt.forced_tool is not None:
        return [tool for tool in prompt.tools if tool.name == prompt.forced_tool][:1]
    named = [tool for tool in prompt.tools if _names(prompt.last_text, tool.name)]
    chosen = named or list(prompt.tools[:1])
    return chosen if prompt.parallel_calls else chosen[:1]


def _names(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None


def arguments(schema: Json) -> Json:
    """The smallest object that a tool's schema asks for: its required properties, in their order."""
    return mapping(_value(schema, schema, 0))


def _value(schema: Json, root: Json, depth: int) -> Any:
    """A value for one schema. Knows the keywords that tool declarations use; others are not looked at."""
    schema = _resolved(schema, root)
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][0]
    for union in ("anyOf", "oneOf"):
        if (branches := objects(schema.get(union))) and depth < SCHEMA_DEPTH_MAX:
            return _value(branches[0], root, depth + 1)
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "string":
            return "sample".ljust(_bound(schema, "minLength", 0), ".")[
                : _bound(schema, "maxLength", QUOTE_CHARS_MAX)
            ]
        case "integer" | "number":
            return _bound(schema, "minimum", min(1, _bound(schema, "maximum", 1)))
        case "boolean":
            return True
        case "null":
            return None
        case "array":
            if depth >= SCHEMA_DEPTH_MAX:
                return []
            item = _value(mapping(schema.get("items")), root, depth + 1)
            return [item] * max(1, min(_bound(schema, "minItems", 1), 16))
        case "object" | None:
            return _object(schema, root, depth)
    return None


def _object(schema: Json, root: Json, depth: int) -> Json:
    properties, required = mapping(schema.get("properties")), schema.get("required")
    if depth >= SCHEMA_DEPTH_MAX or not isinstance(required, list):
        return {}
    names = [name for name in required if isinstance(name, str)]
    return {name: _value(mapping(properties.get(name)), root, depth + 1) for name in names}


def _resolved(schema: Json, root: Json) -> Json:
    """Follow a reference inside the schema, once: `#/$defs/Name`, or `#` for all of it."""
    target = root
    reference = string(schema.get("$ref"))
    if not reference.startswith("#"):
        return schema
    for key in filter(None, reference[1:].split("/")):
        target = mapping(target.get(key))
    return target


def _bound(schema: Json, keyword: str, default: int) -> int:
    bound = schema.get(keyword)
    return bound if isinstance(bound, int) else default
