"""`turngate rules`: what each server does about each fault, as a table for people or as JSON lines."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console
from rich.table import Table

from turngate.adapters import levels
from turngate.adapters.levels import Entry
from turngate.validators.rules import Level

STYLES: Final = {Level.HARD: "red", Level.SOFT: "yellow", Level.OFF: "dim"}


def select(api: str | None, server: str | None) -> tuple[Entry, ...]:
    """The rows of an API and a server, of all where None."""
    return tuple(
        entry
        for entry in levels.ENTRIES
        if (api is None or entry.api == api) and (server is None or entry.server == server)
    )


def servers() -> list[str]:
    """Every server of which something is documented."""
    return sorted({entry.server for entry in levels.ENTRIES})


def print_rules(entries: Sequence[Entry], out: Console, *, as_json: bool) -> None:
    """A table for each API; as JSON one object a row."""
    if as_json:
        for entry in entries:
            print(json.dumps(asdict(entry)))
        return
    for api in dict.fromkeys(entry.api for entry in entries):
        out.print(_table(api, [entry for entry in entries if entry.api == api]))
        out.print()
    out.print("hard: the server refuses it. soft: it takes it, and the meaning is broken, or nobody knows.")


def _table(api: str, entries: list[Entry]) -> Table:
    """One row for each thing that is said about a reason; servers that say the same share a row."""
    table = Table("reason", "fault", "level", "servers", "what the provider says", "rule", "date", title=api)
    table.title_justify = "left"
    rows: dict[tuple[str, ...], list[str]] = {}
    for entry in sorted(entries, key=lambda entry: entry.reason):
        fault = entry.check.replace("_", " ")
        same = (entry.reason, fault, _level(entry), _plain(entry.message), entry.rule, entry.date)
        rows.setdefault(same, []).append(entry.server)
    before = ""
    for (reason, fault, level, *said), named in rows.items():
        table.add_row(reason if reason != before else "", fault, level, ", ".join(named), *said)
        before = reason
    return table


def _level(entry: Entry) -> str:
    level = f"[{STYLES[entry.level]}]{entry.level}[/]"
    return f"{level}, other models {entry.otherwise}" if entry.models else level


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
