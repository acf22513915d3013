"""Orders to a running proxy, given through tables of the ledger file: from any process, and kept across restarts.

The proxy watches the file's data version, which costs it one small read each tenth of a second; an order is in force
within that time for the next request, and no open stream is touched. It watches its settings file in the same manner.

Orders are only ever added: the latest of a scope is the one in force, the earlier ones are the history that a
rollback goes back along. What the running proxy's settings say stands in the file too, so that commands and the
observer go by the same rungs as the proxy, whatever settings file they would find themselves.
"""

import contextlib
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar
from urllib.parse import quote

import msgspec

from turngate.proxy.gates import Evidence, Guard, RollbackLimits, Thresholds, missing
from turngate.proxy.rollout import EVERYTHING, Order, Rung, Scope, Stage, arrange, step_down, step_up
from turngate.telemetry.events import AnyEvent, StageOrdered

WATCH_S: Final = 0.1
FILE_WATCH_S: Final = 0.25

HISTORY_MAX: Final = 1_000
"""Orders kept beside those in force: years of operators, and a bound for whatever script runs wild."""
WORDS_MAX: Final = 1_000
"""Characters of who, why and evidence."""

_TABLES: Final = (
    """CREATE TABLE IF NOT EXISTS rollout_orders (
    number INTEGER PRIMARY KEY AUTOINCREMENT, scope TEXT NOT NULL, stage TEXT NOT NULL, percent INTEGER NOT NULL,
    rest TEXT NOT NULL, set_s REAL NOT NULL, who TEXT NOT NULL, why TEXT NOT NULL, evidence TEXT NOT NULL)""",
    "CREATE TABLE IF NOT EXISTS rollout_settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
)
_LATEST: Final = "SELECT max(number) FROM rollout_orders GROUP BY scope"
_COLUMNS: Final = "number, scope, stage, percent, rest, set_s, who, why, evidence"
_GIVE: Final = """INSERT INTO rollout_orders (scope, stage, percent, rest, set_s, who, why, evidence)
    SELECT :scope, :stage, :percent, :rest, :set_s, :who, :why, :evidence
    WHERE :after IS NULL
    OR :after = coalesce((SELECT max(number) FROM rollout_orders WHERE scope = :scope), 0)"""
_FORGET: Final = f"""DELETE FROM rollout_orders
    WHERE number <= (SELECT max(number) FROM rollout_orders) - {HISTORY_MAX} AND number NOT IN ({_LATEST})"""
_DECLARE: Final = """INSERT INTO rollout_settings (name, value) VALUES ('declared', ?)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value"""


class Declared(msgspec.Struct, frozen=True):
    """What the settings of the running proxy say about its stages."""

    rungs: tuple[Rung, ...] = ()
    default: Stage = Stage.OBSERVE
    thresholds: Thresholds = Thresholds()
    limits: RollbackLimits = RollbackLimits()


UNTOLD: Final = Declared()
"""Where no proxy has told yet."""


class Rollout(msgspec.Struct, frozen=True):
    """Where things stand. `history` has every order that is kept, the newest first."""

    declared: Declared
    history: tuple[Order, ...]

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """All rungs in the order in which they are tried."""
        return arrange(self.declared.rungs, self.declared.default, self.in_force.values())

    @property
    def in_force(self) -> dict[str, Order]:
        """The latest order of each scope, which may be one to go by the settings again."""
        return {order.scope: order for order in reversed(self.history)}

    def told(self) -> dict[str, object]:
        """For JSON: `scopes` in the order in which they are tried, `changes` the newest first.

        `set_s` is Unix time, 0 where the settings say so.
        """
        return {"scopes": [_row(rung) for rung in self.rungs], "changes": self.history}

    def history_of(self, scope: str) -> tuple[Order, ...]:
        """A scope's orders, the newest first."""
        return tuple(order for order in self.history if order.scope == scope)


def _row(rung: Rung) -> dict[str, object]:
    order = rung.order
    return {
        "scope": rung.name,
        "stage": rung.stage,
        "percent": rung.percent,
        "rest": rung.rest,
        "set_s": rung.since_s,
        "who": order.who if order is not None else "settings",
        "why": order.why if order is not None else "",
        "evidence": order.evidence if order is not None else "",
    }


def ordered(order: Order, *, instance: str, at_s: float) -> StageOrdered:
    """What is told of an order that is in force for a proxy since `at_s`, Unix time."""
    return StageOrdered(
        at_s=at_s,
        instance=instance,
        stage=order.stage or "",
        who=order.who,
        why=order.why,
        scope=order.scope,
        percent=order.percent,
        rest=order.rest or "",
        evidence=order.evidence,
        automatic=Operator(order.who, order.why) == AUTOMATIC,
        set_s=order.set_s,
    )


class Overtaken(Exception):
    """Somebody else gave an order for the scope meanwhile: nothing was changed."""


def give(
    ledger: Path,
    stage: Stage | None,
    *,
    who: str,
    why: str,
    scope: str = EVERYTHING,
    percent: int = 100,
    rest: Stage | None = None,
    evidence: str = "",
    after: int | None = None,
) -> None:
    """Write an order down; `after` is the number of the scope's order that it follows, 0 for none, None for any.

    Raises sqlite3.Error, Overtaken, ValueError for a name that is no scope, and FileNotFoundError where no proxy has
    ever run.
    """
    scope = scope if scope == EVERYTHING else Scope.parse(scope).name
    if not ledger.exists():
        raise FileNotFoundError(ledger)
    values = {
        "scope": scope,
        "stage": stage or "",
        "percent": percent,
        "rest": rest or "",
        "set_s": time.time(),
        "who": who[:WORDS_MAX],
        "why": why[:WORDS_MAX],
        "evidence": evidence[:WORDS_MAX],
        "after": after,
    }
    with contextlib.closing(sqlite3.connect(ledger, timeout=5.0)) as db, db:
        _create(db)
        if db.execute(_GIVE, values).rowcount != 1:
            raise Overtaken(f"another order for {scope} was given meanwhile; look at it first (rollout show)")
        db.execute(_FORGET)


def declare(ledger: Path, declared: Declared) -> None:
    """Write down what the settings say. Raises sqlite3.Error."""
    with contextlib.closing(sqlite3.connect(ledger, timeout=5.0)) as db, db:
        _create(db)
        db.execute(_DECLARE, (msgspec.json.encode(declared).decode(),))


def read(ledger: Path, otherwise: Declared = UNTOLD) -> Rollout:
    """Where things stand; `otherwise` is what the settings say where no proxy has told in this file yet.

    Raises sqlite3.Error, and ValueError for what another version of Turngate wrote there.
    """
    with contextlib.closing(_open(ledger)) as db:
        return Rollout(_declared(db) or otherwise, tuple(_orders(db, "true", ())))


def _create(db: sqlite3.Connection) -> None:
    for statement in _TABLES:
        db.execute(statement)


def _open(ledger: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(ledger))}?mode=ro", uri=True, timeout=1.0)


def _declared(db: sqlite3.Connection) -> Declared | None:
    if not _has(db, "rollout_settings"):
        return None
    row = db.execute("SELECT value FROM rollout_settings WHERE name = 'declared'").fetchone()
    return None if row is None else msgspec.json.decode(row[0], type=Declared)


def _orders(db: sqlite3.Connection, which: str, values: tuple[int, ...]) -> list[Order]:
    """The newest first."""
    if not _has(db, "rollout_orders"):
        return []
    rows = db.execute(f"SELECT {_COLUMNS} FROM rollout_orders WHERE {which} ORDER BY number DESC", values)
    return [_order(row) for row in rows]


def _has(db: sqlite3.Connection, table: str) -> bool:
    return bool(
        db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)).fetchone()
    )


def _order(row: Sequence[object]) -> Order:
    said = dict(zip(_COLUMNS.split(", "), row, strict=True))
    said["stage"], said["rest"] = said["stage"] or None, said["rest"] or None
    return msgspec.convert(said, Order)


class Watcher:
    """Tells `changed` about each new order, from a thread of its own; those in force already before `start` returns."""

    def __init__(
        self, ledger: Path, changed: Callable[[Order], None], failed: Callable[[Exception], None]
    ) -> None:
        self._ledger = ledger
        self._changed = changed
        self._failed = failed
        self._told: int | None = None
        """The number of the last order that was told; None before the first look."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        # Else the first requests after a restart would go by the settings that an order stands above.
        with contextlib.suppress(sqlite3.Error, ValueError), contextlib.closing(_open(self._ledger)) as db:
            self._tell_news(db)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._watch()
            except (sqlite3.Error, ValueError) as error:
                # A file that cannot be read leaves the stages as they are; the ledger counts its own trouble.
                self._failed(error)
                self._stop.wait(10 * WATCH_S)

    def _watch(self) -> None:
        """Follow one connection until the end or an error."""
        with contextlib.closing(_open(self._ledger)) as db:
            version = None
            while not self._stop.is_set():
                (now,) = db.execute("PRAGMA data_version").fetchone()
                if now != version:
                    version = now
                    self._tell_news(db)
                self._stop.wait(WATCH_S)

    def _tell_news(self, db: sqlite3.Connection) -> None:
        for order in self._news(db):
            self._changed(order)
            self._told = order.number

    def _news(self, db: sqlite3.Connection) -> list[Order]:
        """Orders that were not told yet, oldest first."""
        if self._told is None:
            return _orders(db, f"number IN ({_LATEST})", ())[::-1]
        return _orders(db, "number > ?", (self._told,))[::-1]


# -- what an operator asks for --------------------------------------------------------------------------------------


class BadOrder(Exception):
    """What is asked for makes no sense where things stand; the text says why and what does."""


class NoEvidence(Exception):
    """The evidence cannot be read; the text says why."""


class NotYet(Exception):
    """The gate refuses a promotion; `missing` says what stands against it."""

    def __init__(self, scope: str, stage: Stage, percent: int, missing: Sequence[str]) -> None:
        super().__init__(f"{scope} stays: for {stage} at {percent} % there is: {'; '.join(missing)}")
        self.missing = tuple(missing)


class Operator(msgspec.Struct, frozen=True):
    """Who changes something, and why."""

    who: str
    why: str


def standing(rollout: Rollout, scope: str) -> Rung:
    """What is in force for a scope as a whole. Raises BadOrder where that is not one stage."""
    rungs = rollout.rungs
    named = next((rung for rung in rungs if rung.name == scope), None)
    if scope == EVERYTHING and named is None:
        raise BadOrder("no order for everything is in force; promote or roll back a scope, e.g. '*'")
    if rungs[0].name == EVERYTHING and rungs[0].takes_all and scope != EVERYTHING:
        raise BadOrder(
            f"an order for everything stands above ({rungs[0].stage}); end it first: turngate rollout set settings"
        )
    if named is not None:
        return named
    wanted = Scope.parse(scope)
    for rung in rungs:
        if rung.scope.may_match(wanted.upstream, wanted.model) and set(rung.header) <= set(wanted.header):
            if rung.percent < 100:
                raise BadOrder(
                    f"{scope} is part of {rung.name}, which is at {rung.percent} %: finish that first"
                )
            return rung
    raise AssertionError("the last rung covers everything")


def put(ledger: Path, rollout: Rollout, scope: str, stage: Stage | None, percent: int, by: Operator) -> None:
    """Put a stage in force for `percent` of a scope's conversations, without a gate; None: as the settings say.

    The others keep what an order gave them, if there is one. Raises as `give`.
    """
    order = rollout.in_force.get(scope)
    rest = None
    if order is not None and percent < 100:
        rest = order.stage if order.percent == 100 else order.rest
    give(ledger, stage, who=by.who, why=by.why, scope=scope, percent=percent, rest=rest)


def promote(
    ledger: Path,
    rollout: Rollout,
    scope: str,
    gathered: Callable[[Rung, Stage], Evidence],
    by: Operator,
    *,
    percent: int | None = None,
    force: bool = False,
) -> tuple[Stage, int]:
    """One step up, if the evidence allows it or `force` overrules it; the stage and percentage now in force.

    Raises BadOrder, NotYet, and as `give`.
    """
    rung = standing(rollout, scope)
    step = step_up(rung, percent)
    if step is None:
        raise BadOrder(f"{scope} is at {rung.stage} for {rung.percent} %: there is no such step up")
    stage, percent = step
    evidence = gathered(rung, stage)
    lacking = missing(evidence, rollout.declared.thresholds)
    if lacking and not force:
        raise NotYet(scope, stage, percent, lacking)
    told = evidence.summary() + (f"; forced over: {'; '.join(lacking)}" if lacking else "")
    rest = rung.rest if rung.percent < 100 else rung.stage
    _follow(
        ledger, rollout, scope, stage, by, percent=percent, rest=rest if percent < 100 else None, told=told
    )
    return stage, percent


def roll_back(ledger: Path, rollout: Rollout, scope: str, by: Operator) -> Stage:
    """Down to the last lower stage that held for all of the scope; the stage now in force. Raises BadOrder, and as
    `give`."""
    rung = standing(rollout, scope)
    stage = step_down(rung, rollout.history_of(scope))
    if stage is None:
        raise BadOrder(f"{scope} is at {rung.stage}, which enforces nothing: there is nothing to roll back")
    _follow(ledger, rollout, scope, stage, by)
    return stage


def _follow(
    ledger: Path,
    rollout: Rollout,
    scope: str,
    stage: Stage,
    by: Operator,
    *,
    percent: int = 100,
    rest: Stage | None = None,
    told: str = "",
) -> None:
    """Give an order that was decided by what stood before: not if somebody else was faster."""
    history = rollout.history_of(scope)
    give(
        ledger,
        stage,
        who=by.who,
        why=by.why,
        scope=scope,
        percent=percent,
        rest=rest,
        evidence=told,
        after=history[0].number if history else 0,
    )


# -- watching -------------------------------------------------------------------------------------------------------

T = TypeVar("T")


class FileWatcher(Generic[T]):
    """Reads a settings file again whenever it changes, from a thread of its own, and tells what it holds.

    A file that is not there or cannot be used is told to `failed` once, and what was in force stays.
    """

    def __init__(
        self,
        path: Path,
        reread: Callable[[], T],
        changed: Callable[[T], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._path = path
        self._reread = reread
        self._changed = changed
        self._failed = failed
        self._known = self._stamp()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="settings", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        before = self._known
        while not self._stop.wait(FILE_WATCH_S):
            # Only what is the same at two looks: an editor empties a file before it writes it.
            before, now = self._stamp(), before
            if now == before != self._known:
                self._known = now
                self._read()

    def _read(self) -> None:
        try:
            if self._known is None:
                raise FileNotFoundError(f"{self._path} is gone")
            read = self._reread()
        except Exception as error:  # noqa: BLE001 - whatever a file does to its reader is told, and the old one stays
            self._failed(error)
        else:
            self._changed(read)

    def _stamp(self) -> tuple[int, int, int] | None:
        """What tells one content from another: an edit changes the time, a swapped link (ConfigMap) the inode."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


AUTOMATIC: Final = Operator("turngate", "automatic rollback")
UNWATCHED_MAX: Final = 10_000
"""Events kept while the ledger cannot be read."""


class AutomaticRollback:
    """The observer's hand on the ladder: feeds the guard with events and gives the orders it asks for.

    `told` hears each order's scope and reason. For one thread.
    """

    def __init__(self, ledger: Path, told: Callable[[str], None] = lambda text: None) -> None:
        self._ledger = ledger
        self._told = told
        self._guard = Guard()
        self._unwatched: deque[AnyEvent] = deque(maxlen=UNWATCHED_MAX)

    def observe_all(self, events: Sequence[AnyEvent]) -> None:
        """Take in events that are in the evidence now. Raises sqlite3.Error and ValueError; the next call goes on."""
        if not self._ledger.exists():
            return  # the proxy could not make its ledger yet, and enforces nothing
        self._unwatched.extend(events)
        rollout = read(self._ledger)
        self._guard.limits = rollout.declared.limits
        alarms = self._guard.watch(tuple(self._unwatched), rollout.rungs)
        self._unwatched.clear()
        for alarm in alarms:
            scope = alarm.rung.name
            stage = step_down(alarm.rung, rollout.history_of(scope))
            if stage is None:
                continue
            with contextlib.suppress(Overtaken):  # an operator was faster: the guard judges what stands then
                _follow(self._ledger, rollout, scope, stage, AUTOMATIC, told=alarm.because)
                self._told(f"{scope} is rolled back to {stage}: {alarm.because}")
