"""The states of one dispatch, as a pure machine: what may follow what, what may be claimed, what a sweep decides.

A dispatch is one attempt to send a request to a provider. Money and side effects hang on it, so the machine
is pessimistic: once a byte may have left, not knowing is `UNKNOWN`, and a final state is never left again.
Nothing here reads a clock or a file; times are wall-clock Unix seconds given by the caller, because leases
are compared across processes.

Turns of a conversation are numbered by revisions. A revision may be tried more than once (attempt generations), but
at most one attempt gives it its canonical turn. Where the app itself names its conversation (`explicit`), a second
attempt waits for the end of the first; where the conversation was only derived, nothing is ever held up.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, Literal

import msgspec

DOCUMENT_VERSION: Final = 1
"""Of a stored manifest. A conversation that holds a newer one is left to the program that wrote it."""

IN_FORCE: Final = -1
"""A cancel generation that was not looked up: the claim is made under the one that stands there."""


class State(StrEnum):
    """Where a dispatch stands."""

    PREPARED = "PREPARED"
    WAITING = "WAITING"
    REJECTED = "REJECTED"
    DISPATCHING = "DISPATCHING"
    UNSENT = "UNSENT"
    SENT = "SENT"
    STREAMING = "STREAMING"
    UNKNOWN = "UNKNOWN"
    REFUSED = "REFUSED"
    CANCELLED = "CANCELLED"
    COMMITTED = "COMMITTED"
    ABANDONED = "ABANDONED"


NEXT: Final[Mapping[State, frozenset[State]]] = {
    State.PREPARED: frozenset({State.DISPATCHING, State.WAITING, State.REJECTED, State.CANCELLED}),
    State.WAITING: frozenset(),
    State.REJECTED: frozenset(),
    # From here on the provider may have seen the request: not knowing is UNKNOWN, never a quiet retry.
    State.DISPATCHING: frozenset(
        {State.SENT, State.STREAMING, State.UNSENT, State.REFUSED, State.CANCELLED, State.UNKNOWN}
    ),
    State.UNSENT: frozenset(),
    State.SENT: frozenset({State.STREAMING, State.REFUSED, State.CANCELLED, State.UNKNOWN}),
    State.STREAMING: frozenset({State.COMMITTED, State.REFUSED, State.CANCELLED, State.UNKNOWN}),
    State.UNKNOWN: frozenset({State.STREAMING, State.COMMITTED, State.ABANDONED}),
    State.REFUSED: frozenset(),
    State.CANCELLED: frozenset(),
    State.COMMITTED: frozenset(),
    State.ABANDONED: frozenset(),
}
"""The legal moves; every state has a row, final ones an empty one."""

OPEN: Final[frozenset[State]] = frozenset({State.DISPATCHING, State.SENT, State.STREAMING})
"""Somebody is working on it, under a lease."""

FINAL: Final[frozenset[State]] = frozenset(state for state, following in NEXT.items() if not following)
"""Never left again."""


def _reachable(start: State) -> frozenset[State]:
    found: set[State] = set()
    ahead = list(NEXT[start])
    while ahead:
        state = ahead.pop()
        if state not in found:
            found.add(state)
            ahead.extend(NEXT[state])
    return frozenset(found)


REACHABLE: Final[Mapping[State, frozenset[State]]] = {state: _reachable(state) for state in State}
"""What a stored row may turn into when several moves are written as one (the closure of `NEXT`)."""

End = Literal["", "complete", "truncated", "filtered"]
"""How a COMMITTED answer ended; empty in every other state."""

Strength = Literal["", "derived", "explicit"]
"""How a conversation is known: not at all, by what its history says, or because the app named it."""

EndedBy = Literal["connection_end", "retrieval", "never"]
"""What confirms that an attempt has ended, a fact of the dialect: our closed connection (no channel is left by which
its output could become canonical), asking the provider for it, or nothing (tools it runs itself)."""


class IllegalMove(Exception):
    """A move that `NEXT` does not hold. Nothing was changed."""

    def __init__(self, before: State, after: State) -> None:
        legal = ", ".join(sorted(NEXT[before])) or f"none, {before} is final"
        super().__init__(f"{before} cannot become {after}; legal: {legal}")
        self.before = before
        self.after = after


class Dispatch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One attempt: what is sent where, for whom, and how far it got. Field names are column names.

    Digests are hex, keyed by the caller; empty where there is none.
    """

    operation: str
    upstream: str
    api: str
    model: str
    """As requested."""
    request_digest: str
    instance: str
    """The process that owns the attempt; its lease covers the row while it is open."""
    attempt_generation: int = 1
    """Counts the dispatches of one revision; given by the store, as `seq` is."""
    cancel_generation: int = IN_FORCE
    """The conversation's when the request was prepared; the store puts the one in force in the place of `IN_FORCE`."""
    settle_s: float
    """How long after UNKNOWN the attempt counts as ended: side effects of tools need longer than none."""
    state: State = State.PREPARED
    how: str = ""
    """Short cause of the last move."""
    handle: str = ""
    """The provider's id of the answer, once seen."""
    end: End = ""
    canonical: bool = False
    """This is the turn of its revision. The store keeps at most one of a conversation's revision."""
    opened_s: float
    changed_s: float
    unknown_since_s: float = 0.0
    """When it last became UNKNOWN; 0 if never."""
    ended_by: EndedBy = "connection_end"
    conversation: str = ""
    """A locator within its owner's scope; empty where none is known."""
    strength: Strength = ""
    revision: int = 0
    """The number of the turn that is asked for."""
    seq: int = 0
    """Place in the conversation, without gaps; given by the store, so that clocks order nothing."""
    sequence_digest: str = ""
    adapter: str = ""
    """Name, version and digest."""
    toolset_digest: str = ""
    policy_digest: str = ""
    """Rules and stage in force."""
    rendering_digest: str = ""
    """Empty where the app's own bytes are sent."""
    idempotency_key: str = ""
    answered_model: str = ""
    """As the provider named it in its answer, once seen."""
    document_version: int = DOCUMENT_VERSION


def moved(
    dispatch: Dispatch,
    to: State,
    *,
    now_s: float,
    how: str = "",
    handle: str = "",
    answered_model: str = "",
    end: End = "",
    canonical: bool = False,
) -> Dispatch:
    """The dispatch after one move; an empty `handle` or `answered_model` keeps the one already bound.

    Raises IllegalMove, which lists the legal moves.
    """
    if to not in NEXT[dispatch.state]:
        raise IllegalMove(dispatch.state, to)
    return msgspec.structs.replace(
        dispatch,
        state=to,
        how=how,
        handle=handle or dispatch.handle,
        answered_model=answered_model or dispatch.answered_model,
        end=end,
        canonical=canonical,
        changed_s=now_s,
        unknown_since_s=now_s if to is State.UNKNOWN else dispatch.unknown_since_s,
    )


def sweep(dispatch: Dispatch, *, lease_until_s: float, now_s: float, unknown_ttl_s: float) -> State | None:
    """What becomes of a stored row that nobody may be working on any more; None: leave it.

    An open row goes UNKNOWN when its instance's lease ran out, an UNKNOWN one ABANDONED when it has settled.
    """
    if dispatch.state in OPEN and now_s >= lease_until_s:
        return State.UNKNOWN
    if dispatch.state is not State.UNKNOWN:
        return None
    settle_s = unknown_ttl_s
    if dispatch.ended_by == "connection_end":
        settle_s = min(dispatch.settle_s, unknown_ttl_s)
    return State.ABANDONED if unknown_age_s(dispatch, now_s) >= settle_s else None


def swept_how(dispatch: Dispatch, to: State) -> str:
    """The cause that a sweep writes into the row it moves."""
    if to is State.UNKNOWN:
        return "lease_ended"
    return "connection_end" if dispatch.ended_by == "connection_end" else "time_limit"


def unknown_age_s(dispatch: Dispatch, now_s: float) -> float:
    """How long an UNKNOWN dispatch has been so. A clock that jumped back makes it 0: its time then starts anew."""
    return max(0.0, now_s - dispatch.unknown_since_s)


class Standing(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a conversation's rows say at the moment of a claim. The defaults are those of an unknown conversation."""

    cancel_generation: int = 0
    document_version: int = 0
    """The newest of its rows."""
    revision: int = 0
    """Of its last canonical turn; 0 without one."""
    operation: str = ""
    """Whose that turn is."""
    pending: Sequence[tuple[Dispatch, float]] = ()
    """Dispatches of the claimed revision without an end (open or UNKNOWN), and until when their owner's lease runs."""


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """Why a claim is not granted, and the dispatch that stands in its way, if it is one."""

    reason: Literal["dispatch.conflict", "dispatch.unknown_outcome", "dispatch.paused"]
    message: str
    operation: str = ""


def may_claim(claim: Dispatch, standing: Standing, *, now_s: float, unknown_ttl_s: float) -> Refusal | None:
    """May this attempt be sent? None: yes, and every pending dispatch has ended, for the store to say so.

    Only claims in a conversation that the app named are ever refused. An UNKNOWN dispatch whose connection is closed
    is out of the way at once: it can no longer become canonical, and its settle time is for the record alone.
    """
    if claim.strength != "explicit":
        return None
    if standing.document_version > claim.document_version:
        return Refusal("dispatch.paused", "a newer version of turngate has written to this conversation")
    if IN_FORCE < claim.cancel_generation < standing.cancel_generation:
        return Refusal("dispatch.conflict", "the request was cancelled before it was sent")
    if standing.revision >= claim.revision:
        message = f"the conversation already has its turn {standing.revision}"
        return Refusal("dispatch.conflict", message, standing.operation)
    for other, lease_until_s in standing.pending:
        if other.state in OPEN and now_s < lease_until_s:
            message = f"turn {claim.revision} is being answered ({other.state})"
            return Refusal("dispatch.conflict", message, other.operation)
        if other.ended_by == "connection_end":
            continue
        # Whose lease ran out is UNKNOWN from now on, though no sweep has said so yet.
        age_s = unknown_age_s(other, now_s) if other.state is State.UNKNOWN else 0.0
        if age_s < unknown_ttl_s:
            message = (
                f"whether turn {claim.revision} was answered is not known; wait, or resolve the dispatch"
            )
            return Refusal("dispatch.unknown_outcome", message, other.operation)
    return None


def may_release(committed: Dispatch) -> bool:
    """May the app have this turn, once it is on disk? Not where the attempt was taken from us and ended otherwise, and
    not beside another turn of the same revision, if the app itself named the conversation; samples and regenerations
    of a derived one are all let through, and the app's next request says which of them it goes on with.
    """
    return committed.state is State.COMMITTED and (committed.canonical or committed.strength != "explicit")


class LateEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Something of an attempt that came after its end: kept apart, for it may change nothing any more."""

    operation: str
    at_s: float
    event: str
    """A stream event's reason, or the state that a late move wanted."""
    handle: str = ""
    digest: str = ""
    size_bytes: int = 0


RETRIES_MAX: Final = 10_000
"""Requests that are remembered: about 3 MB."""
RETRY_WITHIN_S: Final = 900.0
"""SDKs wait up to ten minutes for an answer, and a few seconds more before they ask again."""


class Retries:
    """Recognises the requests that an SDK sends again by itself: the same bytes, counted by the SDK.

    For the record alone: it refuses nothing, and whoever repeats a request without counting is not recognised.
    """

    def __init__(self) -> None:
        self._recent: dict[tuple[str, int], tuple[str, float]] = {}

    def retried(self, request_digest: str, count: int, operation: str, now_s: float) -> str:
        """The operation that this one repeats, empty where it repeats none that is known.

        `count` is what the SDK says (`x-stainless-retry-count`), 0 for a first try and where it says nothing.
        """
        before, since_s = self._recent.get((request_digest, count - 1), ("", 0.0))
        self._recent.pop((request_digest, count), None)  # the newest go to the end
        self._recent[request_digest, count] = operation, now_s
        if len(self._recent) > RETRIES_MAX:
            del self._recent[next(iter(self._recent))]
        return before if now_s - since_s <= RETRY_WITHIN_S else ""
