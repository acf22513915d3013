"""The ladder of stages as one pure table: stage × request class × verdict → what is done.

A verdict never knows the stage. This file alone turns the two into pass, mark or refuse, and says whether the
answer's gate may hold.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from turngate.validators.rules import Verdict


class Stage(StrEnum):
    """How far Turngate may go in a scope. Each stage does what the one before it does, and more."""

    OFF = "off"  # a byte pump: nothing is parsed
    OBSERVE = "observe"  # judge and record; change nothing
    ENFORCE_TEXT = "enforce-text"  # requests without tools
    ENFORCE_TOOLS = "enforce-tools"  # tool turns too: calls leave whole or not at all


class RequestClass(StrEnum):
    """What a stage's promise is about."""

    TEXT = "text"  # no tools declared, no tool edges
    TOOLS = "tools"


class Action(StrEnum):
    """What becomes of a request."""

    PASS = "pass"
    MARK = "mark"  # passed, and recorded as what would have been refused
    REFUSE = "refuse"


class Rung(NamedTuple):
    """One scope of the settings: which upstreams and models (shell patterns) stand on which stage."""

    upstream: str
    model: str
    stage: Stage


class Ladder:
    """Which stage is in force where. The first scope that matches counts; an operator's order stands above all."""

    def __init__(self, rungs: Sequence[Rung], default: Stage) -> None:
        self._rungs = (*rungs, Rung("*", "*", default))
        self._possible: dict[
            str, frozenset[Stage]
        ] = {}  # by configured upstream: asked for with each request
        self.ordered: Stage | None = None

    def stage(self, upstream: str, model: str) -> Stage:
        """The stage of one request."""
        if self.ordered is not None:
            return self.ordered
        if len(self._rungs) == 1:
            return self._rungs[0].stage
        return next(
            r.stage for r in self._rungs if fnmatchcase(upstream, r.upstream) and fnmatchcase(model, r.model)
        )

    def possible(self, upstream: str) -> frozenset[Stage]:
        """Every stage that may be in force at an upstream, before the model is known."""
        if self.ordered is not None:
            return frozenset({self.ordered})
        found = self._possible.get(upstream)
        if found is None:
            found = self._possible[upstream] = frozenset(self._may_apply(upstream))
        return found

    def _may_apply(self, upstream: str) -> Iterator[Stage]:
        for rung in self._rungs:
            if fnmatchcase(upstream, rung.upstream):
                yield rung.stage
                if rung.model == "*":
                    return


_ENFORCED: Final = frozenset(
    {
        (Stage.ENFORCE_TEXT, RequestClass.TEXT),
        (Stage.ENFORCE_TOOLS, RequestClass.TEXT),
        (Stage.ENFORCE_TOOLS, RequestClass.TOOLS),
    }
)
_REFUSABLE: Final = frozenset({Verdict.ILLEGAL, Verdict.WAITING})


def enforced(stage: Stage, request_class: RequestClass) -> bool:
    """True where requests may be refused and answers held."""
    return (stage, request_class) in _ENFORCED


def decide(stage: Stage, request_class: RequestClass, verdict: Verdict) -> Action:
    """What to do with a judged request. What could not be judged passes (Turngate's `uncovered: pass`)."""
    if verdict not in _REFUSABLE:
        return Action.PASS
    return Action.REFUSE if enforced(stage, request_class) else Action.MARK
