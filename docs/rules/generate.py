"""Write the rules' reference pages from the rule table and examples.json: `python docs/rules/generate.py`.

What Turngate says of an example is not written down anywhere: each page holds what judging it gives.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from turngate.adapters import levels, registry
from turngate.adapters.dialect import RequestContext
from turngate.adapters.levels import Entry
from turngate.validators.rules import Finding, Judgement, Level, Reason, judge

HERE: Final = Path(__file__).parent
EXAMPLES: Final = HERE / "examples.json"
HEAD: Final = "<!-- Generated. To change it: edit examples.json or adapters/levels, then `python docs/rules/generate.py`. -->\n"
INDENT_MAX: Final = 100
"""JSON that fits on a line of so many characters is written on one."""

Json = dict[str, Any]


def main() -> None:
    """Write all pages, and drop those of reasons that have no row any more."""
    written = pages()
    for path in set(HERE.glob("*.md")) - {HERE / name for name in written}:
        path.unlink()
    for name, text in written.items():
        (HERE / name).write_text(text)


def pages() -> dict[str, str]:
    """Every page by file name."""
    examples: Mapping[str, Json] = json.loads(EXAMPLES.read_text())
    reasons = [reason for reason in Reason if any(entry.reason is reason for entry in levels.ENTRIES)]
    return {
        "README.md": "\n".join([HEAD, *_index(reasons, examples)]) + "\n",
        **{f"{reason}.md": "\n".join([HEAD, *_page(reason, examples[reason])]) + "\n" for reason in reasons},
    }


def judged(example: Json, key: str) -> Judgement:
    """The verdict on the `illegal` or the `legal` body of an example. `window`: the model's, in tokens."""
    dialect = registry.DIALECTS[example["api"]]
    context = RequestContext(window=example.get("window"))
    sequence = dialect.parse_request(json.dumps(example[key]).encode(), context)
    return judge(sequence, levels.levels(example["api"], example["server"]))


def _index(reasons: list[Reason], examples: Mapping[str, Json]) -> Iterator[str]:
    yield "# Rules\n"
    yield "What a request must not hold, by reason: the word in error bodies, metrics and reports. Each page has the"
    yield "providers' own messages, which server refuses it, an illegal example with the nearest legal one, and the"
    yield "remedy. `turngate rules` prints the same table; `turngate check FILE` judges a body of yours.\n"
    yield "**hard**: the server refuses such a request; there is evidence. **soft**: it takes it, and the meaning is"
    yield "broken; or nobody knows. A server without a row has only soft rules. Only hard findings stop a request.\n"
    yield "| reason | what | hard at |"
    yield "|---|---|---|"
    for reason in reasons:
        hard = dict.fromkeys(
            entry.server for entry in levels.ENTRIES if entry.reason is reason and entry.level is Level.HARD
        )
        what = examples[reason]["what"].partition(". ")[0].rstrip(".")
        yield f"| [`{reason}`]({reason}.md) | {what} | {', '.join(hard) or '–'} |"


def _page(reason: Reason, told: Json) -> Iterator[str]:
    yield f"# {reason}\n"
    yield told["what"] + "\n"
    yield "## Who refuses it, in whose words\n"
    yield "| API | fault | servers | level | the provider's message | rule | date |"
    yield "|---|---|---|---|---|---|---|"
    yield from _rows([entry for entry in levels.ENTRIES if entry.reason is reason])
    yield ""
    for example in told["examples"]:
        yield from _example(reason, example)


def _rows(entries: list[Entry]) -> Iterator[str]:
    """Servers that say the same share a row."""
    servers: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        key = (entry.api, _words(entry), _level(entry), _quoted(entry.message), entry.rule, entry.date)
        servers.setdefault(key, []).append(entry.server)
    for (api, fault, *said), named in servers.items():
        yield f"| {' | '.join([api, fault, ', '.join(named), *said])} |"


def _words(entry: Entry) -> str:
    return entry.check.replace("_", " ")


def _level(entry: Entry) -> str:
    if not entry.models:
        return entry.level
    return f"{entry.level} for models {_quoted(entry.models)}, else {entry.otherwise}"


def _quoted(message: str) -> str:
    """Provider text in a table cell: as code, whatever back-quotes it holds."""
    if not message:
        return ""
    fence = "``" if "`" in message else "`"
    space = " " if message.startswith("`") or message.endswith("`") else ""
    return f"{fence}{space}{message}{space}{fence}".replace("|", r"\|")


def _example(reason: Reason, example: Json) -> Iterator[str]:
    judgement = judged(example, "illegal")
    finding = next(finding for finding in judgement.findings if finding.reason is reason)
    window = f", where the window is {example['window']} tokens" if "window" in example else ""
    yield f"## {example['api']}, {example['server']}\n"
    yield f"{str(judgement.verdict).capitalize()}{window}:\n"
    yield from _block(example["illegal"])
    yield from _said(finding)
    yield "Legal:\n"
    yield from _block(example["legal"])


def _said(finding: Finding) -> Iterator[str]:
    yield f"> {finding.level} **{finding.reason}** at `{finding.at}`: {finding.message}"
    yield ">"
    yield f"> **{finding.remedy}**\n"


def _block(body: Json) -> Iterator[str]:
    yield "```json"
    yield _formatted(body)
    yield "```\n"


def _formatted(value: object, indent: str = "") -> str:
    """JSON with every value on one line that fits on one."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(line) <= INDENT_MAX or not isinstance(value, dict | list) or not value:
        return line
    inner = indent + "  "
    if isinstance(value, list):
        parts, ends = [_formatted(each, inner) for each in value], "[]"
    else:
        parts, ends = [f"{json.dumps(key)}: {_formatted(each, inner)}" for key, each in value.items()], "{}"
    rows = ",\n".join(inner + part for part in parts)
    return f"{ends[0]}\n{rows}\n{indent}{ends[1]}"


if __name__ == "__main__":
    main()
