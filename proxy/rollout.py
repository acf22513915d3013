"""The ladder of stages: which stage is in force where, and what it does with a verdict. Pure.

A verdict never knows the stage. This file alone turns the two into pass, mark or refuse, and says whether the
answer's gate may hold.

Where a stage is in force is an ordered list of rungs, and the first that matches counts. The list is the settings'
scopes with the operators' orders worked in: an order for everything stands above all; one for a scope that the
settings name takes its place; any other stands in front of the first scope that is no more specific than itself, so
that an exception that somebody wrote down stays one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from hashlib import blake2b
from itertools import chain, takewhile
from typing import Final, NamedTuple, Self

import msgspec

from turngate.validators.rules import Verdict

Headers = Sequence[tuple[bytes, bytes]]


class Stage(StrEnum):
    """How far Turngate may go in a scope. Each stage does what the one before it does, and more."""

    OFF = "off"  # a byte pump: nothing is parsed
    OBSERVE = "observe"  # judge and record; change nothing
    ENFORCE_TEXT = "enforce-text"  # requests without tools
    ENFORCE_TOOLS = "enforce-tools"  # tool turns too: calls leave whole or not at all
    ENFORCE_SCHEMA = "enforce-schema"  # calls must also name a declared tool and fit its schema

    @property
    def rank(self) -> int:
        """0 for the lowest stage."""
        return _RANKS[self]


_RANKS: Final = {stage: rank for rank, stage in enumerate(Stage)}


class RequestClass(StrEnum):
    """What a stage's promise is about."""

    TEXT = "text"  # no tools declared, no tool edges
    TOOLS = "tools"


class Action(StrEnum):
    """What becomes of a request."""

    PASS = "pass"
    MARK = "mark"  # passed, and recorded as what would have been refused
    REFUSE = "refuse"


_ENFORCED: Final = frozenset(
    {
        (Stage.ENFORCE_TEXT, RequestClass.TEXT),
        *((stage, kind) for stage in (Stage.ENFORCE_TOOLS, Stage.ENFORCE_SCHEMA) for kind in RequestClass),
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


# -- scopes and orders ----------------------------------------------------------------------------------------------

EVERYTHING: Final = "all"
"""The name of an order's scope that stands above all others, whatever the settings say."""


class Scope(NamedTuple):
    """What a rung covers: shell patterns of upstream, model and header values. `header`: (lower-case name, pattern)."""

    upstream: str = "*"
    model: str = "*"
    header: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, name: str) -> Self:
        """The scope of a name such as `openai/gpt-4*,x-team=blue`. Raises ValueError with what can be written."""
        place, *pairs = name.split(",")
        upstream, slash, model = place.partition("/")
        header = tuple(
            sorted((key.strip().lower(), value) for key, _, value in (p.partition("=") for p in pairs))
        )
        if not upstream or (slash and not model) or not all(key and value for key, value in header):
            raise ValueError(
                f"{name!r} is no scope: write UPSTREAM[/MODEL][,HEADER=VALUE], e.g. openai/gpt-4*"
            )
        return cls(upstream, model or "*", header)

    @property
    def name(self) -> str:
        """How people write it: `*`, `openai`, `openai/gpt-4*`, `openai,x-team=blue`."""
        place = self.upstream if self.model == "*" else f"{self.upstream}/{self.model}"
        return ",".join((place, *(f"{key}={value}" for key, value in sorted(self.header))))

    @property
    def specificity(self) -> tuple[int, int, int]:
        """Larger for a narrower scope: headers count most, then what is written out of the model, of the upstream."""
        return len(self.header), len(self.model.replace("*", "")), len(self.upstream.replace("*", ""))

    def may_match(self, upstream: str, model: str) -> bool:
        """Whether it covers such requests, as far as upstream and model tell."""
        return fnmatchcase(upstream, self.upstream) and fnmatchcase(model, self.model)

    def has_headers(self, headers: Headers) -> bool:
        """Whether a request's headers are those it asks for."""
        return all(
            any(
                key.lower() == wanted.encode() and fnmatchcase(value.decode("latin-1").strip(), pattern)
                for key, value in headers
            )
            for wanted, pattern in self.header
        )


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A stage that somebody put in force for a scope; None: as the settings say again.

    `percent` of the conversations get `stage`, the others `rest`; where that is None, what the next rung says.
    `number` grows with each order, `set_s` is Unix time, `evidence` the sentence by which it was decided.
    """

    scope: str = EVERYTHING
    stage: Stage | None
    percent: int = 100
    rest: Stage | None = None
    who: str
    why: str
    evidence: str = ""
    number: int = 0
    set_s: float = 0.0


class Rung(NamedTuple):
    """A stage in force for a scope, out of the settings or by an order; `percent` and `rest` as in an order."""

    upstream: str
    model: str
    stage: Stage
    header: tuple[tuple[str, str], ...] = ()
    percent: int = 100
    rest: Stage | None = None
    order: Order | None = None

    @property
    def scope(self) -> Scope:
        return Scope(self.upstream, self.model, self.header)

    @property
    def name(self) -> str:
        return self.order.scope if self.order is not None else self.scope.name

    @property
    def since_s(self) -> float:
        """When it was ordered, Unix time; 0 where the settings say so."""
        return self.order.set_s if self.order is not None else 0.0

    @property
    def takes_all(self) -> bool:
        """Whether nothing that its upstream and model fit goes on to the next rung."""
        return not self.header and (self.percent == 100 or self.rest is not None)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Every stage that it can give."""
        if self.percent == 100:
            return (self.stage,)
        others = () if self.rest is None else (self.rest,)
        return (self.stage, *others) if self.percent else others


def arrange(declared: Sequence[Rung], default: Stage, orders: Iterable[Order]) -> tuple[Rung, ...]:
    """All rungs in the order in which they are tried: the settings' scopes, with at most one order a scope."""
    rungs = [*declared, Rung("*", "*", default)]
    above: list[Rung] = []
    for order in sorted(orders, key=lambda each: each.scope):
        if order.stage is None:
            continue
        scope = Scope() if order.scope == EVERYTHING else Scope.parse(order.scope)
        rung = Rung(scope.upstream, scope.model, order.stage, scope.header, order.percent, order.rest, order)
        if order.scope == EVERYTHING:
            above.append(rung)
            continue
        same = next((n for n, each in enumerate(rungs) if each.scope == scope), None)
        if same is None:
            wider = (n for n, each in enumerate(rungs) if each.scope.specificity <= scope.specificity)
            rungs.insert(next(wider), rung)  # the last one covers all
        elif order.percent == 100 or order.rest is not None:
            rungs[same] = rung
        else:
            rungs.insert(same, rung)  # those outside its percentage go on to what it stands for
    return (*above, *rungs)


def matching(rungs: Iterable[Rung], upstream: str, model: str) -> Iterator[Rung]:
    """The rungs that can be in force for such requests, whatever their headers and conversation."""
    for rung in rungs:
        if rung.scope.may_match(upstream, model):
            yield rung
            if rung.takes_all:
                return


# -- one step up, one step down -------------------------------------------------------------------------------------

FIRST_PERCENT: Final = 10
"""A stage that may refuse begins with so many of a hundred conversations."""


def step_up(rung: Rung, percent: int | None = None) -> tuple[Stage, int] | None:
    """(stage, percent) of the next promotion; None at the top, or where `percent` is no step up.

    First all conversations get the stage that some have, then some get the next one.
    """
    if rung.percent < 100:
        wanted = 100 if percent is None else percent
        return (rung.stage, wanted) if wanted > rung.percent else None
    if rung.stage.rank + 1 == len(Stage):
        return None
    stage = list(Stage)[rung.stage.rank + 1]
    # Observing changes nothing for anybody: no need to begin with some.
    first = 100 if stage is Stage.OBSERVE else FIRST_PERCENT
    return stage, first if percent is None else percent


def step_down(rung: Rung, history: Sequence[Order]) -> Stage | None:
    """The stage to roll back to, for all conversations; None where nothing is enforced.

    It is the last lower stage that was in force for all of them, never below `observe`: that only lets go of the
    evidence. `history` has the orders of this scope, the newest first.
    """
    if rung.stage.rank <= Stage.OBSERVE.rank:
        return None
    # What stood before the settings were in force says nothing any more.
    standing = takewhile(lambda order: order.stage is not None, history)
    before = chain((rung.rest,), (each.stage if each.percent == 100 else each.rest for each in standing))
    lower = (stage for stage in before if stage is not None and stage.rank < rung.stage.rank)
    return max(next(lower, Stage.OBSERVE), Stage.OBSERVE, key=lambda stage: stage.rank)


# -- the ladder of a running proxy ----------------------------------------------------------------------------------


def _no_turn() -> bytes:
    return b""


class Ladder:
    """Which stage is in force for which request: the settings' rungs and the orders that stand.

    A conversation's identity is the value of `sticky_header`, where that is named and sent, else what the request
    offers of its first turn. `key` keeps anybody from choosing a side. The one with an identity of none is in no
    percentage.
    """

    def __init__(
        self, declared: Sequence[Rung], default: Stage, *, sticky_header: str = "", key: bytes = b""
    ) -> None:
        self._declared = tuple(declared)
        self._default = default
        self._sticky_header = sticky_header.lower().encode()
        self._key = key
        self._orders: dict[str, Order] = {}
        self._arrange()

    def _arrange(self) -> None:
        self.rungs = arrange(self._declared, self._default, self._orders.values())
        self._tried = tuple((rung.scope, rung) for rung in self.rungs)
        first = self.rungs[0]
        plain = not first.header and first.percent == 100 and (first.upstream, first.model) == ("*", "*")
        self._everywhere = first.stage if plain else None
        self._has_headers = any(rung.header for rung in self.rungs)
        self._possible: dict[
            str, frozenset[Stage]
        ] = {}  # by configured upstream: asked for with each request

    def obey(self, order: Order) -> None:
        """Put an order in force in the place of the one before it for the same scope."""
        self._orders[order.scope] = order
        self._arrange()

    def redeclare(self, declared: Sequence[Rung], default: Stage, *, sticky_header: str = "") -> None:
        """The settings have changed; the orders stand."""
        self._declared, self._default = tuple(declared), default
        self._sticky_header = sticky_header.lower().encode()
        self._arrange()

    @property
    def ordered(self) -> Stage | None:
        """The stage that an order put in force for everything."""
        order = self._orders.get(EVERYTHING)
        return order.stage if order is not None else None

    @ordered.setter
    def ordered(self, stage: Stage | None) -> None:
        self.obey(Order(stage=stage, who="", why=""))

    def stage(
        self,
        upstream: str,
        model: str,
        headers: Headers = (),
        first_turn: Callable[[], bytes] = _no_turn,
    ) -> Stage:
        """The stage of one request. `first_turn` is asked only where a percentage depends on it."""
        if self._everywhere is not None:
            return self._everywhere
        identity: bytes | None = None
        for scope, rung in self._tried:
            if not scope.may_match(upstream, model) or not scope.has_headers(headers):
                continue
            if rung.percent == 100:
                return rung.stage
            if identity is None:
                identity = self._identity(headers) or first_turn()
            if identity and self._bucket(identity) < rung.percent:
                return rung.stage
            if rung.rest is not None:
                return rung.rest
        return self._default

    def possible(self, upstream: str, headers: Headers = ()) -> frozenset[Stage]:
        """Every stage that may be in force at an upstream, before model and conversation are known."""
        if self._has_headers:
            return frozenset(self._may_apply(upstream, headers))
        found = self._possible.get(upstream)
        if found is None:
            found = self._possible[upstream] = frozenset(self._may_apply(upstream, headers))
        return found

    def _may_apply(self, upstream: str, headers: Headers) -> Iterator[Stage]:
        for scope, rung in self._tried:
            if fnmatchcase(upstream, scope.upstream) and scope.has_headers(headers):
                yield from rung.stages
                if rung.model == "*" and (rung.percent == 100 or rung.rest is not None):
                    return

    def _identity(self, headers: Headers) -> bytes:
        if not self._sticky_header:
            return b""
        return next((value.strip() for name, value in headers if name.lower() == self._sticky_header), b"")

    def _bucket(self, identity: bytes) -> int:
        """0 to 99, the same for a conversation as long as the key lives: who is in 10 % is also in 20 %."""
        return int.from_bytes(blake2b(identity, key=self._key, digest_size=8).digest()) % 100


# -- what a request offers of its first turn ------------------------------------------------------------------------


class _Messages(msgspec.Struct, gc=False):
    messages: list[msgspec.Raw]


class _Message(msgspec.Struct, gc=False):
    role: str = ""
    content: str | list[dict[str, object]] | None = None


_messages_of = msgspec.json.Decoder(_Messages).decode
_message_of = msgspec.json.Decoder(_Message).decode
_encode = msgspec.json.Encoder(order="sorted").encode


def first_turn(body: bytes) -> bytes:
    """What stays the same of a conversation's first user message in each of its requests; b"" where none is found.

    Clients move their cache marks on with each request and write a text now as a string and now as a part; both leave
    the meaning as it is. System messages are left out: they often hold the time of day.
    """
    try:
        for raw in _messages_of(body).messages:
            message = _message_of(raw)
            if message.role == "user":
                return _encode(_parts(message.content))
    except msgspec.MsgspecError:
        return b""  # a body that cannot be read has no conversation: the rules say what is wrong with it
    return b""


def _parts(content: str | list[dict[str, object]] | None) -> list[dict[str, object]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{key: value for key, value in part.items() if key != "cache_control"} for part in content or ()]
