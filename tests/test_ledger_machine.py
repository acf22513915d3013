"""The dispatch machine: the table, single moves, claims, and two instances on one file that crash, sleep and come back."""

import shutil
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turngate.proxy.ledger_store import Choice, Question, Store, Written, read_dispatches, resolve
from turngate.validators import ledger
from turngate.validators.ledger import (
    FINAL,
    IN_FORCE,
    NEXT,
    OPEN,
    REACHABLE,
    RETRY_WITHIN_S,
    Dispatch,
    IllegalMove,
    Refusal,
    Retries,
    Standing,
    State,
    may_claim,
    moved,
    sweep,
)

LEASE_S = 10.0
UNKNOWN_TTL_S = 20.0

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
    **more: Any,
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
        **more,
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
    "an unknown row with another channel waits for the time limit": (
        dispatch(State.UNKNOWN, unknown_since_s=80.1, ended_by="never", settle_s=0.0),
        0.0,
        None,
    ),
    "no row is unknown for longer than the time limit": (
        dispatch(State.UNKNOWN, unknown_since_s=80.0, ended_by="retrieval"),
        0.0,
        State.ABANDONED,
    ),
    "the time limit ends a longer settle time": (
        dispatch(State.UNKNOWN, unknown_since_s=80.0, settle_s=600.0),
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
    assert sweep(row, lease_until_s=lease_until_s, now_s=100.0, unknown_ttl_s=UNKNOWN_TTL_S) == expected


CONFLICT, UNKNOWN_OUTCOME, PAUSED = "dispatch.conflict", "dispatch.unknown_outcome", "dispatch.paused"


def pending(state: State, lease_until_s: float = 0.0, **more: Any) -> Standing:
    return Standing(pending=[(dispatch(state, **more), lease_until_s)])


CLAIMS: Mapping[str, tuple[Mapping[str, Any], Standing, str]] = {
    "nothing stands there": ({}, Standing(), ""),
    "an earlier turn stands there": ({}, Standing(revision=2, operation="op-0"), ""),
    "the turn itself stands there": ({}, Standing(revision=3, operation="op-0"), CONFLICT),
    "a later turn stands there": ({}, Standing(revision=4, operation="op-0"), CONFLICT),
    "cancelled since it was prepared": ({"cancel_generation": 1}, Standing(cancel_generation=2), CONFLICT),
    "prepared after the last cancel": ({"cancel_generation": 2}, Standing(cancel_generation=2), ""),
    "prepared under whatever stands": ({}, Standing(cancel_generation=2), ""),
    "a newer document": ({}, Standing(document_version=2), PAUSED),
    "an older document": ({"document_version": 2}, Standing(document_version=1), ""),
    "an attempt that runs": ({}, pending(State.STREAMING, 100.1), CONFLICT),
    "an attempt whose lease ran out": ({}, pending(State.STREAMING, 100.0), ""),
    "one with another channel whose lease ran out": (
        {},
        pending(State.SENT, 100.0, ended_by="retrieval"),
        UNKNOWN_OUTCOME,
    ),
    "an unknown one whose connection ended": (
        {},
        pending(State.UNKNOWN, 200.0, unknown_since_s=100.0, settle_s=60.0),
        "",
    ),
    "an unknown one with another channel": (
        {},
        pending(State.UNKNOWN, unknown_since_s=80.1, ended_by="retrieval"),
        UNKNOWN_OUTCOME,
    ),
    "an unknown one that nothing can end": (
        {},
        pending(State.UNKNOWN, unknown_since_s=80.1, ended_by="never"),
        UNKNOWN_OUTCOME,
    ),
    "an unknown one beyond the time limit": (
        {},
        pending(State.UNKNOWN, unknown_since_s=80.0, ended_by="never"),
        "",
    ),
}


def verdict(strength: str, more: Mapping[str, Any], standing: Standing) -> Refusal | None:
    claim = dispatch(
        State.DISPATCHING, operation="op-9", conversation="c", strength=strength, revision=3, **more
    )
    return may_claim(claim, standing, now_s=100.0, unknown_ttl_s=UNKNOWN_TTL_S)


@pytest.mark.parametrize(("more", "standing", "reason"), CLAIMS.values(), ids=CLAIMS)
def test_a_claim_in_a_conversation_that_the_app_named(
    more: Mapping[str, Any], standing: Standing, reason: str
) -> None:
    refusal = verdict("explicit", more, standing)
    assert (refusal.reason if refusal else "") == reason
    if refusal is not None:
        culprit = standing.operation or "".join(d.operation for d, _ in standing.pending)
        assert refusal.operation == culprit


@pytest.mark.parametrize(("more", "standing", "reason"), CLAIMS.values(), ids=CLAIMS)
def test_a_claim_in_a_conversation_that_was_only_derived_is_never_refused(
    more: Mapping[str, Any], standing: Standing, reason: str
) -> None:
    assert verdict("derived", more, standing) is None
    assert verdict("", more, standing) is None


def test_a_request_that_an_sdk_sends_again_is_recognised_by_its_bytes_and_count() -> None:
    retries = Retries()
    tries = [
        ("aa", 0, "op-1", 0.0),
        ("bb", 1, "op-2", 1.0),  # the first try went elsewhere
        ("aa", 1, "op-3", 2.0),
        ("aa", 0, "op-4", 3.0),  # the app asks again by itself: a sample, a regeneration
        ("aa", 2, "op-5", 4.0),
        ("aa", 1, "op-6", 3.0 + RETRY_WITHIN_S),
        ("aa", 1, "op-7", 3.1 + RETRY_WITHIN_S),
    ]
    assert [retries.retried(*each) for each in tries] == ["", "", "op-1", "", "op-3", "op-4", ""]


def test_only_the_newest_requests_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "RETRIES_MAX", 2)
    retries = Retries()
    for digest in ("aa", "bb", "aa", "cc"):
        retries.retried(digest, 0, f"op-{digest}", 0.0)
    assert [retries.retried(digest, 1, "", 0.0) for digest in ("aa",)] == ["op-aa"]
    retries = Retries()
    for digest in ("aa", "bb", "cc"):
        retries.retried(digest, 0, f"op-{digest}", 0.0)
    assert retries.retried("aa", 1, "", 0.0) == ""


SLOTS = st.sampled_from(("a", "b"))
CONVERSATIONS = st.sampled_from(("x", "x", "x", "y"))


def turn_of(d: Dispatch) -> tuple[str, int]:
    return d.conversation, d.revision


class Fleet(RuleBasedStateMachine):
    """Two instances on one file, by the SQL that the proxy uses; the writer threads' timing is what Hypothesis plays.

    An instance knows its own dispatches in memory; what it wrote may have been swept. One that crashed is followed
    by one of another name in its slot. `released` is what apps have got as their turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "ledger.sqlite3"
        self.now_s = 1_000.0
        self.instances = 0
        self.stores: dict[str, Store] = {}
        self.known: dict[str, dict[str, Dispatch]] = {}
        self.dirty: dict[str, dict[str, Dispatch]] = {}
        self.earlier: list[tuple[str, Dispatch]] = []
        self.granted: set[str] = set()
        self.claims = 0
        self.released: dict[tuple[str, int], str] = {}
        self.paths: dict[str, list[Dispatch]] = {}
        for slot in "ab":
            self.start_in(slot)

    def start_in(self, slot: str) -> None:
        self.instances += 1
        store = self.stores[slot] = Store(
            self.path,
            f"{slot}{self.instances}",
            lease_s=LEASE_S,
            unknown_ttl_s=UNKNOWN_TTL_S,
            retention_s=1e9,
            started_s=self.now_s,
        )
        store.connect()
        assert store._db is not None
        store._db.execute("PRAGMA synchronous = OFF")
        store.write([], [], [], now_s=self.now_s)
        self.known[slot], self.dirty[slot] = {}, {}

    def rows(self) -> dict[str, Dispatch]:
        return {d.operation: d for d in read_dispatches(self.path)}

    @rule(by_s=st.sampled_from((0.5, 4.0, 11.0, 30.0, -3.0)))
    def time_passes(self, by_s: float) -> None:
        self.now_s += by_s

    @rule(slot=SLOTS)
    def write_behind(self, slot: str) -> None:
        self.stores[slot].write(list(self.dirty[slot].values()), [], [], now_s=self.now_s)
        self.dirty[slot].clear()

    @rule(
        slot=SLOTS,
        conversation=CONVERSATIONS,
        strength=st.sampled_from(("explicit", "derived")),
        revision=st.sampled_from((1, 1, 2)),
        cancel_generation=st.sampled_from((IN_FORCE, 0, 1)),
        ended_by=st.sampled_from(("connection_end", "retrieval")),
        settle_s=st.sampled_from((0.0, 5.0)),
    )
    def claim(self, slot: str, **named: Any) -> None:
        self.write_behind(slot)
        self.claims += 1
        d = dispatch(
            State.DISPATCHING,
            operation=f"op-{self.claims}",
            instance=self.stores[slot]._instance,
            now_s=self.now_s,
            **named,
        )
        blocked = d.strength == "explicit" and self.is_blocked(d)
        (answer,) = self.stores[slot].write([], [d], [], now_s=self.now_s).answers
        assert isinstance(answer, Refusal) == blocked
        if answer is not None:
            return
        self.granted.add(d.operation)
        self.known[slot][d.operation] = d
        rows = self.rows()
        assert rows[d.operation].state is State.DISPATCHING  # before a byte is sent
        if d.strength == "explicit":
            tried = [row for row in rows.values() if row.conversation == d.conversation]
            unended = [row for row in tried if row.revision == d.revision and row.state not in FINAL]
            assert [row.operation for row in unended] == [d.operation]

    def is_blocked(self, d: Dispatch) -> bool:
        """The same question as `may_claim` answers, put to all rows there are."""
        generation = self.stores["a"]._standing(d.conversation).cancel_generation
        if d.cancel_generation != IN_FORCE and d.cancel_generation < generation:
            return True
        leases = self.leases()
        for row in self.rows().values():
            if row.conversation != d.conversation:
                continue
            if row.canonical and row.revision >= d.revision:
                return True
            if row.revision != d.revision:
                continue
            alive = row.state in OPEN and self.now_s < leases[row.instance]
            age_s = max(0.0, self.now_s - row.unknown_since_s) if row.state is State.UNKNOWN else 0.0
            unsure = row.state is State.UNKNOWN or row.state in OPEN
            if alive or (unsure and row.ended_by != "connection_end" and age_s < UNKNOWN_TTL_S):
                return True
        return False

    def leases(self) -> dict[str, float]:
        db = self.stores["a"]._db
        assert db is not None
        return dict(db.execute("SELECT instance, lease_until_s FROM instances").fetchall())

    @precondition(lambda self: self.granted)
    @rule(slot=SLOTS, data=st.data())
    def claim_again(self, slot: str, data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(sorted(self.granted)))
        again = msgspec.structs.replace(self.rows()[operation], state=State.DISPATCHING)
        for strength in ("", "explicit"):
            claim = msgspec.structs.replace(again, strength=strength)
            (answer,) = self.stores[slot].write([], [claim], [], now_s=self.now_s).answers
            assert isinstance(answer, Refusal)

    @rule(slot=SLOTS, conversation=CONVERSATIONS)
    def cancel(self, slot: str, conversation: str) -> None:
        before = self.stores[slot]._standing(conversation).cancel_generation
        written = self.stores[slot].write([], [Question(conversation, 1)], [], now_s=self.now_s)
        assert written.answers == [before + 1]

    @rule(slot=SLOTS, data=st.data())
    def an_app_goes_on_with_an_answer(self, slot: str, data: st.DataObject) -> None:
        rows = self.rows()
        if not rows:
            return
        chosen = rows[data.draw(st.sampled_from(sorted(rows)))]
        turn = [d for d in rows.values() if d.canonical and (d.conversation, d.revision) == turn_of(chosen)]
        (answer,) = self.stores[slot].write([], [Choice(chosen.operation)], [], now_s=self.now_s).answers
        derived = {d.strength for d in (chosen, *turn)} == {"derived"}
        assert answer == (chosen.state is State.COMMITTED and derived)
        assert self.rows()[chosen.operation].canonical == (answer == 1 or chosen.canonical)

    @rule(slot=SLOTS, data=st.data())
    def move(self, slot: str, data: st.DataObject) -> None:
        rows = self.known[slot]
        unended = sorted(op for op, d in rows.items() if d.state not in FINAL)
        if not unended:
            return
        d = rows[data.draw(st.sampled_from(unended))]
        to = data.draw(st.sampled_from([State.STREAMING, *sorted(NEXT[d.state] - {State.COMMITTED})]))
        if to in NEXT[d.state]:
            self.earlier.append((slot, d))
            rows[d.operation] = self.dirty[slot][d.operation] = moved(d, to, now_s=self.now_s)

    @rule(slot=SLOTS, data=st.data())
    def commit(self, slot: str, data: st.DataObject) -> None:
        rows = self.known[slot]
        unended = sorted(op for op, d in rows.items() if State.COMMITTED in REACHABLE[d.state])
        if not unended:
            return
        d = rows[data.draw(st.sampled_from(unended))]
        if State.COMMITTED not in NEXT[d.state]:
            d = moved(d, State.STREAMING, now_s=self.now_s)
        self.earlier.append((slot, d))
        d = moved(d, State.COMMITTED, now_s=self.now_s, end="complete", canonical=True)
        rows[d.operation] = self.dirty[slot][d.operation] = d
        written = self.stores[slot].write(list(self.dirty[slot].values()), [], [], now_s=self.now_s)
        self.dirty[slot].clear()
        self.release(d, written)

    def release(self, d: Dispatch, written: Written) -> None:
        """What was granted as the turn of an explicit conversation stays the only one."""
        kept = d.operation not in written.lost and d.operation not in written.unchosen
        if kept and d.strength == "explicit":
            assert self.released.setdefault(turn_of(d), d.operation) == d.operation

    @precondition(lambda self: self.earlier)
    @rule(data=st.data(), to=st.sampled_from(sorted(OPEN | FINAL)))
    def something_late(self, data: st.DataObject, to: State) -> None:
        """A writer with an old picture of its dispatch moves it on as if nothing had happened since."""
        slot, old = data.draw(st.sampled_from(self.earlier))
        if to in NEXT[old.state] and self.stores[slot]._instance == old.instance:
            late = moved(old, to, now_s=self.now_s, canonical=to is State.COMMITTED)
            written = self.stores[slot].write([late], [], [], now_s=self.now_s)
            if to is State.COMMITTED:
                self.release(old, written)

    @rule(slot=SLOTS)
    def crash(self, slot: str) -> None:
        """What was not written is lost, and nobody renews that lease again."""
        self.stores[slot].disconnect()
        self.start_in(slot)

    @rule(slot=SLOTS)
    def sweep(self, slot: str) -> None:
        while self.stores[slot].keep_up(self.now_s).more:
            pass

    @rule(to=st.sampled_from((State.COMMITTED, State.ABANDONED)), data=st.data())
    def an_operator_resolves(self, to: State, data: st.DataObject) -> None:
        rows = self.rows()
        if rows:
            operation = data.draw(st.sampled_from(sorted(rows)))
            told = resolve(self.path, [operation], to, who="op", why="", now_s=self.now_s)
            assert bool(told) == (
                rows[operation].state is State.UNKNOWN
                or (rows[operation].state in OPEN and self.now_s >= self.leases()[rows[operation].instance])
            )

    @invariant()
    def a_revision_has_at_most_one_canonical_turn(self) -> None:
        turns = [turn_of(d) for d in self.rows().values() if d.canonical]
        assert len(turns) == len(set(turns))
        canonical = {turn_of(d): op for op, d in self.rows().items() if d.canonical}
        assert canonical.items() >= self.released.items()

    @invariant()
    def nothing_is_forgotten_and_places_have_no_gaps(self) -> None:
        rows = self.rows()
        assert set(rows) == self.granted
        for conversation in "xy":
            places = sorted(d.seq for d in rows.values() if d.conversation == conversation)
            assert places == list(range(1, len(places) + 1))

    @invariant()
    def each_stored_step_is_reachable_and_what_is_final_never_changes(self) -> None:
        for operation, d in self.rows().items():
            path = self.paths.setdefault(operation, [])
            d = msgspec.structs.replace(d, canonical=False, how="")  # an app may choose another turn
            if not path or path[-1] != d:
                path.append(d)
            assert all(
                after.state in REACHABLE[before.state] | {before.state} for before, after in pairwise(path)
            )
            assert all(before.state not in FINAL for before in path[:-1])

    def teardown(self) -> None:
        """All die, a third one sweeps: every open row is UNKNOWN, then ABANDONED; nothing else moves."""
        before = self.rows()
        self.now_s = max(self.now_s, *self.leases().values(), *(d.unknown_since_s for d in before.values()))
        self.start_in("a")
        self.sweep("a")
        for operation, d in before.items():
            if d.state in OPEN:
                assert self.rows()[operation].state is State.UNKNOWN
        self.now_s += UNKNOWN_TTL_S
        self.start_in("b")
        self.sweep("b")
        for operation, d in before.items():
            unsettled = d.state in OPEN or d.state is State.UNKNOWN
            assert self.rows()[operation].state is (State.ABANDONED if unsettled else d.state)
        self.each_stored_step_is_reachable_and_what_is_final_never_changes()
        for store in self.stores.values():
            store.disconnect()
        shutil.rmtree(self.folder)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
