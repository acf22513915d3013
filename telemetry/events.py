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

ProviderClass = Literal[
    "",  # nothing was asked of it, or nothing was judged
    "accepted",  # it answered the request
    "refused_sequence",  # it objects to the order or shape of the messages, tools or ids: what our rules are about
    "refused_other",  # keys, quota, size, model name and the like
    "unknown",  # no answer, or one that cannot be told apart
]
"""What the provider made of a request: the answer that each verdict of ours is held against."""


MODEL_MAX: Final = 128
"""Characters of a model's name."""


def shown_model(model: str) -> str:
    """A model's name as far as it may stand in files and labels: apps and providers invent them."""
    return model if len(model) <= MODEL_MAX and model.isprintable() else "other"


Witness = Literal["partial_tool_dispatch", "byte_mismatch"]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", gc=False, omit_defaults=True):
    """What all events share. A line leaves out the fields that say their default: a quarter of its bytes."""

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


class ProxyPulse(Event, frozen=True, tag="proxy_pulse"):
    """How a proxy process is doing at this moment, told every few seconds while it works.

    `eventloop_lag_s`: the latest that a timer of its loop came since the pulse before.
    """

    instance: str
    open_exchanges: int
    open_streams: int
    held_bytes: int
    eventloop_lag_s: float


class ObserverStarted(Event, frozen=True, tag="observer_started"):
    """The observer child was started; `restart` counts from 0 in this proxy process."""

    instance: str
    restart: int


class StageOrdered(Event, frozen=True, tag="stage_ordered"):
    """Somebody put a stage in force for a scope (`all`: for everything); `stage` empty: as the settings say again.

    `percent` of the scope's conversations get it, the others `rest`, or, where that is empty, what the next scope says.
    """

    instance: str
    stage: str
    who: str
    why: str
    scope: str = "all"
    percent: int = 100
    rest: str = ""
    evidence: str = ""
    """By what it was decided, in one sentence; empty where nobody asked for any."""
    automatic: bool = False
    """Whether Turngate rolled the scope back by itself."""
    set_s: float = 0.0
    """When it was given, Unix time. A proxy that starts tells the orders that stand again, with a later `at_s`."""


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
    server: str = ""
    """The family whose rules applied."""
    client: str = ""
    """The app's SDK and its version's first number, out of a closed list of families (`openai-python/3`)."""
    reasons: tuple[str, ...] = ()
    """What the hard findings say, each once: why it was refused, or would have been."""
    provider: ProviderClass = ""
    provider_reason: str = ""
    """What the provider objects to, in our words, as far as its message is known."""
    input_tokens: int = -1
    output_tokens: int = -1
    """As the provider counted them; -1 where it did not say."""
    answered_model: str = ""
    finish: str = ""
    """Why the provider stopped, in neutral words; empty where it did not say."""
    hold_s: float = 0.0
    request_class: Literal["", "text", "tools"] = ""
    """What a stage's promise about it is about; empty where it was not judged."""
    traceparent: str = ""
    """W3C trace context as the app sent it, where it is well formed."""
    retry_of: str = ""
    """The operation that the app's SDK repeats with this one, as it says itself."""


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
    """One or more moves of a dispatch, told together when the ledger writes its row.

    `before` is empty for the first; `through` are the states passed on the way to `after`, in order.
    """

    operation: str
    upstream: str
    before: str
    after: str
    how: str
    through: tuple[str, ...] = ()


class AnomalySeen(Event, frozen=True, tag="anomaly_seen"):
    """Something irregular in an answer that did not end it: a repeated delta, an event after the stop, ..."""

    operation: str
    upstream: str
    api: str
    reason: str


class PreviewLeaked(Event, frozen=True, tag="preview_leaked"):
    """A request brings back what was retracted, or a call that was never released, as if it were history.

    `reason` is `preview.leaked` or `call.uncommitted`; `cause` why that turn was retracted; `retracted_operation`
    the exchange in which it was; `whole`: all of what the app had been shown, not only its beginning.
    """

    operation: str
    upstream: str
    api: str
    reason: str
    cause: str
    retracted_operation: str
    at: str
    whole: bool


class WitnessSpoke(Event, frozen=True, tag="witness_spoke"):
    """What a witness that shares no code with the decision found wrong. Where `enforced` there must be none.

    `partial_tool_dispatch`: the bytes written to the app hold a tool call that is not whole, in an answer that looks
    ended. `byte_mismatch`: what went out is not what came in, in an exchange that was passed.
    """

    operation: str
    upstream: str
    api: str
    witness: Witness
    enforced: bool
    detail: str


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
    | ProxyPulse
    | ObserverStarted
    | StageOrdered
    | ExchangeEnded
    | FindingMade
    | RequestUnjudged
    | CallDecided
    | PreviewRetracted
    | StateChanged
    | AnomalySeen
    | PreviewLeaked
    | WitnessSpoke
    | FailureCounted
    | EventsDropped
)

EVENT_TYPES: Final[tuple[type[Event], ...]] = AnyEvent.__args__

VERDICT_EVENTS: Final[frozenset[type[Event]]] = frozenset(
    {FindingMade, CallDecided, PreviewRetracted, StateChanged, AnomalySeen, PreviewLeaked, WitnessSpoke}
)
"""Events that outlive others when the spool is at its bound."""
