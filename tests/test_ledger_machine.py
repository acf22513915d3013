"""The dispatch machine: the table, single moves, and two instances that crash, sleep, sweep and come back."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from turngate.validators.ledger import (
    FINAL,
    NEXT,
    OPEN,
    REACHABLE,
    SWEPT_HOW,
    Dispatch,
    IllegalMove,
    State,
    moved,
    sweep,
)

LEASE_S = 10.0

EXPECTED_NEXT: Mapping[str, str] = {
    "PREPARED": "DISPATCHING WAITING REJECTED CANCELLED",
    "WAITING": "",
    "REJECTED": "",
    "DISPATCHING": "SENT STREAMING UNSENT REFUSED CANCELLED UNKNOWN",
    "UNSENT": "",
    "SENT": "STREAMING REFUSED CANCELLED UNKNOWN",
    "STREAMING": "COMMITTED REFUSED CANCELLED UNKNOWN",
    "UNKNOWN": "STREAMING COMMITTED ABANDONED",
    "REFUSED": "",
    "CANCELLED": "",
    "COMMITTED": "",
    "ABANDONED": "",
}


def dispatch(
    state: State = State.PREPARED,
    *,
    operation: str = "op-1",
    instance: str = "a",
    settle_s: float = 5.0,
    unknown_since_s: float = 0.0,
    now_s: float = 100.0,
) -> Dispatch:
    return Dispatch(
        operation=operation,
        upstream="openai",
        api="openai_chat",
        model="gpt-5",
        request_digest="00ff",
        instance=instance,
        settle_s=settle_s,
        state=state,
        opened_s=now_s,
        changed_s=now_s,
        unknown_since_s=unknown_since_s,
    )


def test_the_table_is_the_documented_one() -> None:
    assert {str(s): {str(n) for n in following} for s, following in NEXT.items()} == {
        s: set(following.split()) for s, following in EXPECTED_NEXT.items()
    }


def test_open_and_final_leave_only_prepared_and_unknown_over() -> None:
    assert set(State) - OPEN - FINAL == {State.PREPARED, State.UNKNOWN}
    assert not OPEN & FINAL


def test_an_unknown_row_can_no_longer_count_as_unsent_and_a_final_one_goes_nowhere() -> None:
    assert REACHABLE[State.UNKNOWN] >= {State.STREAMING, State.COMMITTED, State.ABANDONED, State.CANCELLED}
    assert not REACHABLE[State.UNKNOWN] & {State.UNSENT, State.REJECTED, State.WAITING, State.PREPARED}
    assert all(not REACHABLE[state] for state in FINAL)


@given(st.sampled_from(State), st.sampled_from(State))
def test_a_move_is_made_exactly_when_the_table_holds_it(before: State, after: State) -> None:
    d = dispatch(before)
    if after in NEXT[before]:
        assert moved(d, after, now_s=101.0).state is after
    else:
        with pytest.raises(IllegalMove) as caught:
            moved(d, after, now_s=101.0)
        assert all(legal in str(caught.value) for legal in NEXT[before])
    assert d == dispatch(before)


def test_an_illegal_move_lists_the_legal_ones() -> None:
    assert str(IllegalMove(State.UNKNOWN, State.SENT)) == (
        "UNKNOWN cannot become SENT; legal: ABANDONED, COMMITTED, STREAMING"
    )
    assert str(IllegalMove(State.COMMITTED, State.SENT)) == (
        "COMMITTED cannot become SENT; legal: none, COMMITTED is final"
    )


def test_a_move_keeps_the_handle_and_the_time_it_became_unknown() -> None:
    d = moved(dispatch(State.SENT), State.STREAMING, now_s=101.0, handle="msg_1")
    d = moved(d, State.UNKNOWN, now_s=102.0, how="eof")
    assert (d.handle, d.how, d.unknown_since_s, d.changed_s) == ("msg_1", "eof", 102.0, 102.0)
    d = moved(d, State.COMMITTED, now_s=103.0, end="complete", canonical=True)
    assert (d.handle, d.how, d.unknown_since_s, d.changed_s) == ("msg_1", "", 102.0, 103.0)
    assert (d.end, d.canonical) == ("complete", True)


SWEEPS: Mapping[str, tuple[Dispatch, float, State | None]] = {
    "an open row under a lease stays": (dispatch(State.STREAMING), 100.1, None),
    "a streaming row without a lease is unknown": (dispatch(State.STREAMING), 100.0, State.UNKNOWN),
    "a sent row without a lease is unknown": (dispatch(State.SENT), 99.0, State.UNKNOWN),
    "a dispatching row without a lease is unknown": (dispatch(State.DISPATCHING), 99.0, State.UNKNOWN),
    "a prepared row was never sent and stays": (dispatch(State.PREPARED), 0.0, None),
    "a final row stays": (dispatch(State.COMMITTED), 0.0, None),
    "an unknown row settles": (dispatch(State.UNKNOWN, unknown_since_s=95.0), 0.0, State.ABANDONED),
    "an unknown row settles under a lease too": (
        dispatch(State.UNKNOWN, unknown_since_s=95.0),
        200.0,
        State.ABANDONED,
    ),
    "an unknown row waits for its settle time": (dispatch(State.UNKNOWN, unknown_since_s=95.1), 0.0, None),
    "no settle time, no wait": (
        dispatch(State.UNKNOWN, unknown_since_s=100.0, settle_s=0.0),
        0.0,
        State.ABANDONED,
    ),
    "a clock that jumped back makes no age": (dispatch(State.UNKNOWN, unknown_since_s=900.0), 0.0, None),
    "a clock that jumped back does not hold a row without settle time": (
        dispatch(State.UNKNOWN, unknown_since_s=900.0, settle_s=0.0),
        0.0,
        State.ABANDONED,
    ),
}


@pytest.mark.parametrize(("row", "lease_until_s", "expected"), SWEEPS.values(), ids=SWEEPS)
def test_sweep(row: Dispatch, lease_until_s: float, expected: State | None) -> None:
    assert sweep(row, lease_until_s=lease_until_s, now_s=100.0) == expected


SLOTS = st.sampled_from(("a", "b"))


class Fleet(RuleBasedStateMachine):
    """Two instances on one store. An instance knows its own rows; what it wrote may have been swept.

    The store takes a late write as the database does: only from the row's owner, and only what is reachable.
    An instance that crashed is followed by one of another name in its slot.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_000.0
        self.store: dict[str, Dispatch] = {}
        self.names = {"a": "a0", "b": "b0"}
        self.lease_until_s = {"a0": self.now_s + LEASE_S, "b0": self.now_s + LEASE_S}
        self.known: dict[str, dict[str, Dispatch]] = {"a": {}, "b": {}}
        self.dirty: dict[str, set[str]] = {"a": set(), "b": set()}
        self.ended: dict[str, Dispatch] = {}
        self.path: dict[str, list[State]] = {}

    def put(self, row: Dispatch) -> None:
        self.store[row.operation] = row
        self.path.setdefault(row.operation, []).append(row.state)

    @rule(by_s=st.sampled_from((0.5, 4.0, 11.0, -3.0)))
    def time_passes(self, by_s: float) -> None:
        self.now_s += by_s

    @rule(slot=SLOTS)
    def renew(self, slot: str) -> None:
        self.lease_until_s[self.names[slot]] = self.now_s + LEASE_S

    @rule(slot=SLOTS, settle_s=st.sampled_from((0.0, 5.0)))
    def claim(self, slot: str, settle_s: float) -> None:
        prepared = dispatch(
            operation=f"op-{len(self.path)}", instance=self.names[slot], settle_s=settle_s, now_s=self.now_s
        )
        row = moved(prepared, State.DISPATCHING, now_s=self.now_s)
        self.known[slot][row.operation] = row
        self.put(row)

    @rule(slot=SLOTS, to=st.sampled_from(State), data=st.data())
    def move(self, slot: str, to: State, data: st.DataObject) -> None:
        rows = self.known[slot]
        if not rows:
            return
        row = rows[data.draw(st.sampled_from(sorted(rows)))]
        try:
            rows[row.operation] = moved(row, to, now_s=self.now_s)
        except IllegalMove:
            assert to not in NEXT[row.state]
            return
        assert to in NEXT[row.state]
        self.dirty[slot].add(row.operation)

    @rule(slot=SLOTS)
    def write_behind(self, slot: str) -> None:
        for operation in sorted(self.dirty[slot]):
            row, stored = self.known[slot][operation], self.store[operation]
            if row.state in REACHABLE[stored.state]:
                self.put(row)
        self.dirty[slot].clear()

    @rule(slot=SLOTS)
    def crash(self, slot: str) -> None:
        """What was not written is lost, and nobody renews that lease again."""
        self.known[slot].clear()
        self.dirty[slot].clear()
        self.names[slot] = f"{slot}{len(self.lease_until_s)}"
        self.renew(slot)

    @rule(slot=SLOTS)
    def sweep_by(self, slot: str) -> None:
        self.sweep_once(self.names[slot])

    def sweep_once(self, sweeper: str) -> None:
        for row in list(self.store.values()):
            to = sweep(row, lease_until_s=self.lease_until_s[row.instance], now_s=self.now_s)
            if row.instance == sweeper and row.state in OPEN:
                continue  # whoever sweeps is alive
            if to is not None:
                assert to in NEXT[row.state]
                self.put(moved(row, to, now_s=self.now_s, how=SWEPT_HOW[to]))

    @invariant()
    def each_stored_step_is_reachable(self) -> None:
        for path in self.path.values():
            assert all(after in REACHABLE[before] for before, after in pairwise(path))

    @invariant()
    def what_is_final_never_changes(self) -> None:
        for operation, row in self.store.items():
            if row.state in FINAL:
                assert self.ended.setdefault(operation, row) is row

    def teardown(self) -> None:
        """All die, a third one sweeps: every open row is UNKNOWN, then ABANDONED; nothing else moves."""
        before = dict(self.store)
        self.now_s = max(self.now_s, *self.lease_until_s.values())
        self.sweep_once("c")
        for operation, row in before.items():
            if row.state in OPEN:
                assert self.store[operation].state is State.UNKNOWN
        latest = max((row.unknown_since_s for row in self.store.values()), default=0.0)
        self.now_s = max(self.now_s, latest) + 5.0
        self.sweep_once("c")
        for operation, row in before.items():
            unsettled = row.state in OPEN or row.state is State.UNKNOWN
            assert self.store[operation].state is (State.ABANDONED if unsettled else row.state)
        self.what_is_final_never_changes()
        self.each_stored_step_is_reachable()


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
