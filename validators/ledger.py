"""The states of one dispatch, as a pure machine: what may follow what, and what a sweep decides.

A dispatch is one attempt to send a request to a provider. Money and side effects hang on it, so the machine
is pessimistic: once a byte may have left, not knowing is `UNKNOWN`, and a final state is never left again.
Nothing here reads a clock or a file; times are wall-clock Unix seconds given by the caller, because leases
are compared across processes.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Literal

import msgspec


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

SWEPT_HOW: Final[Mapping[State, str]] = {
    State.UNKNOWN: "lease_ended",
    # Confirmed ended: Chat and Messages have no other channel once the upstream socket is closed.
    State.ABANDONED: "connection_end",
}
"""The cause a sweep writes into the row it moves."""


class IllegalMove(Exception):
    """A move that `NEXT` does not hold. Nothing was changed."""

    def __init__(self, before: State, after: State) -> None:
        legal = ", ".join(sorted(NEXT[before])) or f"none, {before} is final"
        super().__init__(f"{before} cannot become {after}; legal: {legal}")
        self.before = before
        self.after = after


class Dispatch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One attempt: what is sent where, for whom, and how far it got. Field names are column names."""

    operation: str
    upstream: str
    api: str
    model: str
    request_digest: str
    """Hex, keyed by the caller."""
    instance: str
    """The process that owns the attempt; its lease covers the row while it is open."""
    attempt_generation: int = 1
    cancel_generation: int = 0
    settle_s: float
    """How long after UNKNOWN the attempt counts as ended: side effects of tools need longer than none."""
    state: State = State.PREPARED
    how: str = ""
    """Short cause of the last move."""
    handle: str = ""
    """The provider's id of the answer, once seen."""
    end: End = ""
    canonical: bool = False
    opened_s: float
    changed_s: float
    unknown_since_s: float = 0.0
    """When it last became UNKNOWN; 0 if never."""


def moved(
    dispatch: Dispatch,
    to: State,
    *,
    now_s: float,
    how: str = "",
    handle: str = "",
    end: End = "",
    canonical: bool = False,
) -> Dispatch:
    """The dispatch after one move; an empty `handle` keeps the one already bound.

    Raises IllegalMove, which lists the legal moves.
    """
    if to not in NEXT[dispatch.state]:
        raise IllegalMove(dispatch.state, to)
    return msgspec.structs.replace(
        dispatch,
        state=to,
        how=how,
        handle=handle or dispatch.handle,
        end=end,
        canonical=canonical,
        changed_s=now_s,
        unknown_since_s=now_s if to is State.UNKNOWN else dispatch.unknown_since_s,
    )


def sweep(dispatch: Dispatch, *, lease_until_s: float, now_s: float) -> State | None:
    """What becomes of a stored row that nobody may be working on any more; None: leave it.

    An open row goes UNKNOWN when its instance's lease ran out, an UNKNOWN one ABANDONED when it has settled.
    """
    if dispatch.state in OPEN and now_s >= lease_until_s:
        return State.UNKNOWN
    # A clock that jumped back makes the age 0, not negative: the settle time then starts anew.
    if dispatch.state is State.UNKNOWN and max(0.0, now_s - dispatch.unknown_since_s) >= dispatch.settle_s:
        return State.ABANDONED
    return None
