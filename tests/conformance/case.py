"""A case of the table: what happens on a direct connection, and what is expected to differ in which stage."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from wire_peers import ANSWER_BODY, answer, length

from conformance.wire import Script, Stage, Wire

Because = Literal["Z4-1", "Z4-2", "Z4-4", "Z4-6", "Z4-7", "Z5", "HTTP"]
"""Items of what an enforced scope may change (Z4), its promise that nothing broken looks whole (Z5), or HTTP itself."""


@dataclass(frozen=True, slots=True)
class Differs:
    """`facts` are all that differ from a direct connection, with what they are instead."""

    because: Because
    reason: str
    facts: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Case:
    """`direct` tells the page's reader what happens without a proxy. A stage without a difference is None."""

    direct: str
    script: Script
    off: Differs | None = None
    observe: Differs | None = None
    enforce: Differs | None = None

    def expected(self, stage: Stage) -> Differs | None:
        match stage:
            case "off":
                return self.off
            case "observe":
                return self.observe
            case "enforce-tools":
                return self.enforce
        return None


Cases = dict[str, Case]

CHAT: Final = b"/v1/chat/completions"
OK: Final = answer(length(ANSWER_BODY), ANSWER_BODY)


def everywhere(
    direct: str, script: Script, because: Because, reason: str, facts: Mapping[str, object]
) -> Case:
    """A case in which no stage is like a direct connection, and all are like each other."""
    differs = Differs(because, reason, facts)
    return Case(direct, script, differs, differs, differs)


def exchange(asked: bytes, told: bytes = OK, *, close: bool = False) -> Script:
    """The app asks, the provider answers (and closes)."""

    async def script(wire: Wire) -> None:
        app = await wire.app()
        app.send(asked)
        provider = await wire.provider()
        wire.note("request", await provider.request())
        provider.send(told)
        if close:
            provider.close()
        wire.note("answer", await app.answer(asked.partition(b" ")[0]))
        wire.note("app's connection", await wire.connection(app))
        if not close:
            wire.note("provider's connection", await wire.connection(provider))

    return script
