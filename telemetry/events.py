"""What can happen, as typed events: one frozen record per fact, the only thing `proxy` says to this room.

An event is written once, as one JSON line with its kind under `event` (`EVENT_TYPES` lists them), and read once by
the observer for both the metrics registry and the evidence tables. Field names are column names.

`at_s` is wall-clock time (Unix seconds): for people and day files, never for order. Durations come from a
monotonic clock. No event holds a credential or message text.
"""

from typing import Final, Literal

import msgspec

Outcome = Literal[
    "passed",  # the whole answer went to the app
    "refused",  # answered by us, nothing was sent
    "provider_error",  # the provider answered with an error status
    "retracted",  # the turn did not end well after its head
    "incomplete",  # the provider itself ended the turn early and said so
    "unsent",  # the upstream could not be reached
    "client_gone",  # the app left first
    "unknown",  # the upstream ended before its head
]
"""How an exchange ended, as the app saw it."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", gc=False):
    """What all events share."""

    at_s: float


class ProxyStarted(Event, frozen=True, tag="proxy_started"):
    """A proxy process began to listen; `instance` is random per process."""

    instance: str
    version: str
    pid: int


class ProxyStopped(Event, frozen=True, tag="proxy_stopped"):
    """A proxy process drained and ended by itself; its absence after a start means a crash."""

    instance: str
    open_exchanges: int


class ObserverStarted(Event, frozen=True, tag="observer_started"):
    """The observer child was started; `restart` counts from 0 in this proxy process."""

    instance: str
    restart: int


class StageOrdered(Event, frozen=True, tag="stage_ordered"):
    """An operator put a stage in force for everything; `stage` empty: as the settings say again."""

    instance: str
    stage: str
    who: str
    why: str


class ExchangeEnded(Event, frozen=True, tag="exchange_ended"):
    """One request and what came of it. Emitted once per exchange, also for relayed bytes (`api` empty)."""

    operation: str
    upstream: str
    api: str
    model: str
    stream: bool
    stage: str
    verdict: str
    outcome: Outcome
    status: int
    error_type: str
    messages: int
    request_bytes: int
    response_bytes: int
    judge_s: float
    claim_s: float
    first_byte_s: float
    total_s: float


class FindingMade(Event, frozen=True, tag="finding_made"):
    """A request rule objects. `action` is what this stage did about it."""

    operation: str
    upstream: str
    api: str
    reason: str
    level: str
    at: str
    action: Literal["rejected", "would_reject", "reported"]


class RequestUnjudged(Event, frozen=True, tag="request_unjudged"):
    """A generation request that was not judged, and why (`body.undecodable`, `limit.body`, ...)."""

    operation: str
    surface: str
    why: str


class CallDecided(Event, frozen=True, tag="call_decided"):
    """One streamed or whole tool call of an answer: let through, or withheld (`held` false: watched only)."""

    operation: str
    upstream: str
    api: str
    decision: Literal["released", "withheld"]
    reason: str
    held: bool
    hold_s: float
    hold_bytes: int


class PreviewRetracted(Event, frozen=True, tag="preview_retracted"):
    """A turn did not end well; `enforced` tells whether the app was told so by us."""

    operation: str
    upstream: str
    api: str
    cause: str
    enforced: bool
    preview_bytes: int


class StateChanged(Event, frozen=True, tag="state_changed"):
    """A move of one dispatch in the ledger. `before` is empty for the first."""

    operation: str
    upstream: str
    before: str
    after: str
    how: str


class FailureCounted(Event, frozen=True, tag="failure_counted"):
    """Something of ours broke and traffic went on; `where` names the stage."""

    where: str
    error: str


class EventsDropped(Event, frozen=True, tag="events_dropped"):
    """The spool was at its bound; `count` events of `event_class` are lost."""

    event_class: Literal["verdict", "other"]
    count: int


AnyEvent = (
    ProxyStarted
    | ProxyStopped
    | ObserverStarted
    | StageOrdered
    | ExchangeEnded
    | FindingMade
    | RequestUnjudged
    | CallDecided
    | PreviewRetracted
    | StateChanged
    | FailureCounted
    | EventsDropped
)

EVENT_TYPES: Final[tuple[type[Event], ...]] = AnyEvent.__args__

VERDICT_EVENTS: Final[frozenset[type[Event]]] = frozenset(
    {FindingMade, CallDecided, PreviewRetracted, StateChanged}
)
"""Events that outlive others when the spool is at its bound."""
