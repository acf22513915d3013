"""What the ledger's file holds, and the SQL on it, for one thread: rows, claims, leases, sweeps, retention.

What is numbered (`seq`, attempt generations) and what is unique (the canonical turn of a revision) is given by triggers
of the schema, in the transaction that stores the row, whichever process writes.

A transaction is one statement wherever possible. sqlite3 gives the GIL up for each statement and each row of
`executemany`, and where the loop thread is busy it waits up to 5 ms to get it back: 16 rows in one statement cost there
19 us of CPU time each, by `executemany` 86, and the whole takes a fifteenth of the time.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote

import msgspec
from msgspec.structs import astuple

from turngate.telemetry.events import StateChanged
from turngate.validators.ledger import (
    DOCUMENT_VERSION,
    OPEN,
    REACHABLE,
    Dispatch,
    End,
    LateEvent,
    Refusal,
    Standing,
    State,
    may_claim,
    moved,
    sweep,
    swept_how,
)

SCHEMA_VERSION: Final = 2

STATEMENT_ROWS_MAX: Final = 32
"""Rows of one statement. Each number of them is a prepared statement of its own, of up to 100 KB."""

SWEEP_ROWS_MAX: Final = 200
EXPIRE_ROWS_MAX: Final = 500
"""Small, because a claim that arrives meanwhile waits for the transaction."""

BUSY_S: Final = 0.25
"""How long one transaction waits for another process's lock; commands hold it for a few ms."""


class LedgerDown(Exception):
    """The ledger could not be read or written; the cause, if any, is SQLite's own error.

    What follows is the scope's `ledger_down`: `degrade` goes on as in observe, `refuse` does not send.
    """


@dataclass(slots=True)
class Change:
    """A dispatch, and the moves that are not told yet: from `before` (empty at first) by way of `through`."""

    dispatch: Dispatch
    before: str
    through: tuple[str, ...] = ()

    def event(self) -> StateChanged:
        """The moves, to be told."""
        d = self.dispatch
        return StateChanged(
            at_s=d.changed_s,
            operation=d.operation,
            upstream=d.upstream,
            before=str(self.before),
            after=str(d.state),
            how=d.how,
            through=self.through,
        )


@dataclass(frozen=True, slots=True)
class Question:
    """For a conversation's cancel generation, which `step` raises first."""

    conversation: str
    step: Literal[0, 1]


@dataclass(frozen=True, slots=True)
class Choice:
    """That a committed dispatch of a derived conversation is the turn of its revision, instead of another one."""

    operation: str


Order = Dispatch | Question | Choice
"""What is decided by what stands in the file: a claim, and the others."""


def read_dispatches(path: Path) -> list[Dispatch]:
    """All dispatches in the order they were first stored; also beside a running proxy. Raises LedgerDown."""
    with _reading(path) as db:
        return [_dispatch(row) for row in db.execute(f"{_SELECT} ORDER BY rowid", _OUR_DOCUMENTS)]


def read_unknown(path: Path, *, now_s: float) -> list[Dispatch]:
    """Dispatches whose outcome is not known, oldest first; also beside a running proxy. Raises LedgerDown.

    Those of a process that died are among them, whether or not a sweep has said so yet.
    """
    with _reading(path) as db:
        return sorted((d for _, d in _unknown(db, now_s).values()), key=lambda d: d.unknown_since_s)


def resolve(
    path: Path,
    operations: Iterable[str],
    to: State,
    *,
    who: str,
    why: str,
    now_s: float,
) -> list[StateChanged]:
    """Say how UNKNOWN dispatches ended (COMMITTED, ABANDONED); returns the moves, for the caller to tell.

    Raises LedgerDown, and IllegalMove for any other state.

    A compare-and-swap on the file, so that it works beside a running proxy and without one. A dispatch resolved as
    COMMITTED becomes the canonical turn of its revision, if that has none.
    """
    end: End = "complete" if to is State.COMMITTED else ""
    told: list[StateChanged] = []
    with _changing(path) as db:
        unknown = _unknown(db, now_s)
        for operation in dict.fromkeys(operations):
            if operation not in unknown:
                continue
            before, d = unknown[operation]
            after = moved(d, to, now_s=now_s, how="operator", end=end, canonical=to is State.COMMITTED)
            db.execute(_REPLACE, _replacement(after))
            db.execute("INSERT INTO resolutions VALUES (?, ?, ?, ?, ?)", (operation, to, now_s, who, why))
            row = Change(after, before, () if before is State.UNKNOWN else (State.UNKNOWN,))
            told.append(row.event())
    return told


def _unknown(db: sqlite3.Connection, now_s: float) -> dict[str, tuple[State, Dispatch]]:
    """By operation: the state in the file, and the dispatch as UNKNOWN."""
    found: dict[str, tuple[State, Dispatch]] = {}
    for *values, lease_until_s in db.execute(_UNENDED, _OUR_DOCUMENTS):
        before = d = _dispatch(values)
        if d.state in OPEN and now_s >= lease_until_s:
            # Since when the owner is gone, as far as its last lease tells.
            d = moved(d, State.UNKNOWN, now_s=lease_until_s or d.changed_s, how=swept_how(d, State.UNKNOWN))
        if d.state is State.UNKNOWN:
            found[d.operation] = (before.state, d)
    return found


@contextlib.contextmanager
def _reading(path: Path, mode: Literal["ro", "rw"] = "ro") -> Iterator[sqlite3.Connection]:
    """The file of a proxy that may be running. Raises LedgerDown."""
    try:
        with contextlib.closing(
            sqlite3.connect(
                f"file:{quote(str(path))}?mode={mode}", uri=True, timeout=BUSY_S, isolation_level=None
            )
        ) as db:
            version = _check_version(path, db)
            if version < SCHEMA_VERSION:
                raise LedgerDown(
                    f"ledger {path} has schema {version}, of an older turngate: start the proxy once"
                )
            yield db
    except sqlite3.Error as exc:
        raise down(path, exc) from exc


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[sqlite3.Connection]:
    with _reading(path, "rw") as db:
        db.execute("BEGIN IMMEDIATE")
        yield db
        db.execute("COMMIT")


def already_known(operation: str, state: str) -> Refusal:
    return Refusal("dispatch.conflict", f"{operation} is in the ledger already, {state}", operation)


# A row is the fields of a Dispatch. The state names below are ours and hold no quotes.


def _listed(states: Iterable[State]) -> str:
    return ", ".join(f"'{state}'" for state in sorted(states))


_UNSETTLED: Final = _listed(OPEN | {State.UNKNOWN})
_FIELDS: Final = Dispatch.__struct_fields__
_COLUMNS: Final = ", ".join(_FIELDS)
_STATE: Final = _FIELDS.index("state")
_CANONICAL: Final = _FIELDS.index("canonical")
_TYPES: Final[Mapping[object, str]] = {int: "INTEGER", bool: "INTEGER", float: "REAL"}
_DECLARED: Final[Mapping[str, str]] = {
    each.name: f"{each.name} {_TYPES.get(each.type, 'TEXT')} NOT NULL"
    for each in msgspec.structs.fields(Dispatch)
}

UNCHOSEN: Final = "unchosen"
"""The cause of a COMMITTED dispatch that wanted to be the turn of its revision, where another one is."""

_CHOOSE: Final = f"""INSERT INTO turns (conversation, revision, operation)
        SELECT new.conversation, new.revision, new.operation WHERE NOT EXISTS (
            SELECT 1 FROM turns WHERE conversation = new.conversation AND revision = new.revision);
    UPDATE dispatches SET canonical = 0, how = '{UNCHOSEN}'
        WHERE operation = new.operation AND new.operation <> (
            SELECT operation FROM turns WHERE conversation = new.conversation AND revision = new.revision);"""

_TABLES_AND_TRIGGERS: Final = (
    # Sought only for rows of a conversation; the others are not in it.
    "CREATE INDEX lineage ON dispatches (conversation, revision) WHERE conversation <> ''",
    """CREATE TABLE conversations (
        conversation TEXT PRIMARY KEY, seq INTEGER NOT NULL, cancel_generation INTEGER NOT NULL,
        document_version INTEGER NOT NULL, changed_s REAL NOT NULL) WITHOUT ROWID""",
    "CREATE INDEX unused ON conversations (changed_s) WHERE seq = 0",
    # Its key is what allows each revision at most one canonical turn.
    """CREATE TABLE turns (
        conversation TEXT NOT NULL, revision INTEGER NOT NULL, operation TEXT NOT NULL,
        PRIMARY KEY (conversation, revision)) WITHOUT ROWID""",
    """CREATE TRIGGER numbered AFTER INSERT ON dispatches WHEN new.conversation <> '' BEGIN
        INSERT INTO conversations (conversation, seq, cancel_generation, document_version, changed_s)
            VALUES (new.conversation, 1, 0, new.document_version, new.changed_s)
            ON CONFLICT (conversation) DO UPDATE SET
            seq = seq + 1, document_version = max(document_version, excluded.document_version);
        UPDATE dispatches SET
            seq = (SELECT seq FROM conversations WHERE conversation = new.conversation),
            cancel_generation = CASE WHEN cancel_generation >= 0 THEN cancel_generation ELSE
                (SELECT cancel_generation FROM conversations WHERE conversation = new.conversation) END,
            attempt_generation = 1 + coalesce((SELECT max(other.attempt_generation) FROM dispatches other
                WHERE other.conversation = new.conversation AND other.conversation <> ''
                AND other.revision = new.revision AND other.operation <> new.operation), 0)
            WHERE operation = new.operation;
    END""",
    f"""CREATE TRIGGER committed_at_once AFTER INSERT ON dispatches
        WHEN new.canonical AND new.conversation <> '' BEGIN {_CHOOSE} END""",
    f"""CREATE TRIGGER committed AFTER UPDATE OF canonical ON dispatches
        WHEN new.canonical AND new.conversation <> '' BEGIN {_CHOOSE} END""",
    """CREATE TRIGGER forgotten AFTER DELETE ON dispatches WHEN old.conversation <> '' BEGIN
        DELETE FROM turns WHERE conversation = old.conversation AND revision = old.revision
            AND operation = old.operation;
        DELETE FROM conversations WHERE conversation = old.conversation AND NOT EXISTS (
            SELECT 1 FROM dispatches WHERE conversation = old.conversation AND conversation <> '');
    END""",
    """CREATE TABLE quarantine (
        operation TEXT NOT NULL, at_s REAL NOT NULL, event TEXT NOT NULL, handle TEXT NOT NULL,
        digest TEXT NOT NULL, size_bytes INTEGER NOT NULL)""",
    """CREATE TABLE resolutions (
        operation TEXT NOT NULL, state TEXT NOT NULL, at_s REAL NOT NULL, who TEXT NOT NULL,
        why TEXT NOT NULL)""",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

_SCHEMA: Final = (
    f"CREATE TABLE dispatches ({', '.join(_DECLARED.values())}, PRIMARY KEY (operation))",
    # The sweep looks at these alone; a finished row is not in it, so in observe it costs nothing.
    f"CREATE INDEX unsettled ON dispatches (operation) WHERE state IN ({_UNSETTLED})",
    """CREATE TABLE instances (
        instance TEXT PRIMARY KEY, pid INTEGER NOT NULL, started_s REAL NOT NULL,
        lease_until_s REAL NOT NULL)""",
    *_TABLES_AND_TRIGGERS,
)

_FROM_SCHEMA_1: Final = (
    *(
        f"ALTER TABLE dispatches ADD COLUMN {_DECLARED[each.name]} DEFAULT {each.default!r}"
        for each in msgspec.structs.fields(Dispatch)[_FIELDS.index("ended_by") : -1]
    ),
    *_TABLES_AND_TRIGGERS,
)
"""Schema 1 lacked these columns, and all that has to do with conversations."""

_SELECT: Final = f"SELECT {_COLUMNS} FROM dispatches WHERE document_version <= :document_version"
_OUR_DOCUMENTS: Final = {"document_version": DOCUMENT_VERSION}

_UPDATED: Final = (
    "state",
    "how",
    "handle",
    "answered_model",
    "end",
    "canonical",
    "changed_s",
    "unknown_since_s",
)
"""The columns that a move may change."""


@cache
def _insert(rows: int) -> str:
    row = f"({', '.join('?' * len(_FIELDS))})"
    return f"INSERT INTO dispatches ({_COLUMNS}) VALUES {', '.join([row] * rows)}"


@cache
def _upsert(rows: int) -> str:
    """Store rows, each only over a state that may become its own, and over its own instance's."""
    prior = " ".join(
        f"WHEN '{after}' THEN ',{','.join(before for before in State if after in REACHABLE[before])},'"
        for after in State
    )
    return (
        f"{_insert(rows)} ON CONFLICT (operation) DO UPDATE SET "
        + ", ".join(f"{name} = excluded.{name}" for name in _UPDATED)
        + " WHERE dispatches.instance = excluded.instance"
        f" AND instr(CASE excluded.state {prior} END, ',' || dispatches.state || ',') > 0"
    )


def _parameters(rows: Iterable[Dispatch]) -> list[object]:
    return list(chain.from_iterable(map(_row, rows)))


def _row(d: Dispatch) -> list[object]:
    # Plain str and int spare sqlite3 the search for an adapter of each enum and bool: a fifth of a row's cost.
    row = list(astuple(d))
    row[_STATE] = d.state.value
    row[_CANONICAL] = int(d.canonical)
    return row


def _portions(rows: Sequence[Dispatch]) -> list[Sequence[Dispatch]]:
    return [rows[at : at + STATEMENT_ROWS_MAX] for at in range(0, len(rows), STATEMENT_ROWS_MAX)]


_RENEW: Final = (
    "INSERT INTO instances (instance, pid, started_s, lease_until_s) VALUES (?, ?, ?, ?)"
    " ON CONFLICT (instance) DO UPDATE SET lease_until_s = excluded.lease_until_s"
)

# Rows of an instance nobody knows have no lease.
_UNENDED: Final = f"""SELECT {", ".join(f"d.{name}" for name in _FIELDS)}, coalesce(i.lease_until_s, 0.0)
    FROM dispatches d LEFT JOIN instances i ON i.instance = d.instance
    WHERE d.state IN ({_UNSETTLED}) AND d.document_version <= :document_version"""

# Our own open rows are never swept by us: we are alive.
_SWEEPABLE: Final = f"""{_UNENDED.replace("dispatches d", "dispatches d INDEXED BY unsettled")}
    AND d.operation > :after
    AND CASE WHEN d.instance = :instance THEN d.state = 'UNKNOWN'
        ELSE coalesce(i.lease_until_s, 0.0) <= :now_s END
    ORDER BY d.operation LIMIT {SWEEP_ROWS_MAX}"""

_PENDING: Final = f"""{_UNENDED} AND d.conversation = :conversation AND d.conversation <> ''
    AND d.revision = :revision ORDER BY d.rowid"""

_STANDING: Final = """SELECT c.cancel_generation, c.document_version, coalesce(t.revision, 0), coalesce(t.operation, '')
    FROM conversations c LEFT JOIN turns t ON t.conversation = c.conversation
    WHERE c.conversation = ? ORDER BY t.revision DESC LIMIT 1"""

_GENERATION: Final = """INSERT INTO conversations (conversation, seq, cancel_generation, document_version, changed_s)
    VALUES (:conversation, 0, 1, 0, :now_s)
    ON CONFLICT (conversation) DO UPDATE SET cancel_generation = cancel_generation + 1"""

_CHOICE: Final = (
    """INSERT INTO turns SELECT conversation, revision, operation FROM dispatches
        WHERE operation = :operation AND state = 'COMMITTED' AND strength = 'derived' AND conversation <> ''
        ON CONFLICT (conversation, revision) DO UPDATE SET operation = excluded.operation
        WHERE 'derived' = (SELECT strength FROM dispatches WHERE operation = turns.operation)""",
    f"""UPDATE dispatches SET canonical = operation = :operation,
        how = CASE WHEN operation = :operation THEN '' ELSE '{UNCHOSEN}' END
        WHERE (conversation, revision) =
            (SELECT conversation, revision FROM dispatches WHERE operation = :operation)
        AND conversation <> '' AND (canonical OR operation = :operation)""",
)
"""A turn of an explicit conversation was let through as the only one, and stays."""

_REPLACE: Final = f"UPDATE dispatches SET {', '.join(f'{name} = ?' for name in _UPDATED)} WHERE operation = ?"
"""For a row that was read in the same transaction."""

# Row ids grow with age, so the oldest need no index of their own. A PREPARED row that old was never sent.
_EXPIRE: Final = f"""DELETE FROM dispatches WHERE rowid IN
    (SELECT rowid FROM dispatches ORDER BY rowid LIMIT {EXPIRE_ROWS_MAX})
    AND state NOT IN ({_UNSETTLED}) AND changed_s < ?"""
_EXPIRE_LATE: Final = f"""DELETE FROM quarantine WHERE rowid IN
    (SELECT rowid FROM quarantine ORDER BY rowid LIMIT {EXPIRE_ROWS_MAX}) AND at_s < ?"""
_EXPIRE_OTHERS: Final = (
    "DELETE FROM instances WHERE lease_until_s < ?",
    "DELETE FROM conversations WHERE seq = 0 AND changed_s < ?",
    "DELETE FROM resolutions WHERE at_s < ?",
)

_END_LEASE: Final = f"""UPDATE instances SET lease_until_s = ? WHERE instance = ? AND NOT EXISTS
    (SELECT 1 FROM dispatches WHERE instance = ? AND state IN ({_listed(OPEN)}))"""


def _dispatch(values: Iterable[object]) -> Dispatch:
    # Not strict: SQLite has no booleans.
    return msgspec.convert(dict(zip(_FIELDS, values, strict=True)), Dispatch, strict=False)


def _replacement(d: Dispatch) -> tuple[object, ...]:
    return (*(getattr(d, name) for name in _UPDATED), d.operation)


def down(path: Path, cause: Exception) -> LedgerDown:
    failure = LedgerDown(f"ledger {path}: {cause}")
    failure.__cause__ = cause
    return failure


def may_pass(exc: Exception) -> bool:
    """Can a later try succeed (disk, file, lock)? Else a value or our code is wrong."""
    # A damaged file is a plain DatabaseError; the subclasses other than OperationalError blame the statement.
    return (
        isinstance(exc, LedgerDown | OSError | sqlite3.OperationalError) or type(exc) is sqlite3.DatabaseError
    )


def _check_version(path: Path, db: sqlite3.Connection) -> int:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise LedgerDown(
            f"ledger {path} has schema {version}, this turngate knows up to {SCHEMA_VERSION}: "
            "upgrade turngate or give it another data_dir"
        )
    return int(version)


Answer = Refusal | int | None


@dataclass(slots=True)
class Written:
    """What became of one transaction."""

    answers: list[Answer] = field(default_factory=list)
    """One for each order, in their order: a refusal, a generation, or nothing to add."""
    ended: list[Change] = field(default_factory=list)
    """Pending dispatches that a claim found ended."""
    lost: dict[str, Dispatch] = field(default_factory=dict)
    """As they stand in the file, which did not let us change them."""
    unchosen: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What one sweep did; `more` if a page was full."""

    swept: list[Change]
    more: bool


class Store:
    """The SQL, for one thread. After any error call `disconnect`: that is also the rollback."""

    def __init__(
        self,
        path: Path,
        instance: str,
        *,
        lease_s: float,
        unknown_ttl_s: float,
        retention_s: float,
        started_s: float,
    ) -> None:
        self._path = path
        self._instance = instance
        self._lease_s = lease_s
        self._unknown_ttl_s = unknown_ttl_s
        self._retention_s = retention_s
        self._started_s = started_s
        self._db: sqlite3.Connection | None = None
        self._renewed_s = -lease_s
        self._swept_to = ""
        self._swept_asleep: set[str] = set()

    def connect(self) -> None:
        """Open the file, made 0600, and bring it to our schema; nothing if it is open.

        Raises LedgerDown, OSError, sqlite3.Error.
        """
        if self._db is not None:
            return
        if not self._path.exists():
            _create_private(self._path)
        self._db = db = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise LedgerDown(f"ledger {self._path}: no WAL on this file system (it says {mode!r})")
        db.execute("PRAGMA synchronous = FULL")
        if _check_version(self._path, db) < SCHEMA_VERSION:
            db.execute("BEGIN IMMEDIATE")
            version = _check_version(self._path, db)
            if version < SCHEMA_VERSION:  # another process may have been first
                for statement in _FROM_SCHEMA_1 if version else _SCHEMA:
                    db.execute(statement)
            db.execute("COMMIT")

    def disconnect(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            # Closing a broken file may fail too; the error that led here is the one that is reported.
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def renewal_in_s(self, now_s: float) -> float:
        """Seconds until the lease should be renewed; 0 when due, or when the clock jumped back."""
        age_s = now_s - self._renewed_s
        return max(0.0, self._lease_s / 3 - age_s) if age_s >= 0.0 else 0.0

    def revived(self, operation: str) -> bool:
        """Was the row, which we have just written, UNKNOWN because we slept through our lease?"""
        if operation not in self._swept_asleep:
            return False
        self._swept_asleep.remove(operation)
        return True

    def write(
        self,
        rows: Sequence[Dispatch],
        orders: Sequence[Order],
        late: Sequence[LateEvent],
        *,
        now_s: float,
    ) -> Written:
        """Commit rows, claims and, when due, the lease, as one transaction, on disk when this returns."""
        claims = [order for order in orders if isinstance(order, Dispatch) and order.strength != "explicit"]
        if len(claims) == len(orders):
            try:
                return self._write(rows, claims, [], late, now_s)
            except sqlite3.IntegrityError:
                if not claims:
                    raise
            # An operation that is there already: which one is found out one by one.
            if self._open_db().in_transaction:
                self._open_db().execute("ROLLBACK")
        return self._write(rows, [], orders, late, now_s)

    def _write(
        self,
        rows: Sequence[Dispatch],
        claims: Sequence[Dispatch],
        orders: Sequence[Order],
        late: Sequence[LateEvent],
        now_s: float,
    ) -> Written:
        db = self._open_db()
        renew = self.renewal_in_s(now_s) <= 0.0
        statements = [(_upsert(len(some)), some) for some in _portions(rows)]
        inserts = [(_insert(len(some)), some) for some in _portions(claims)]
        alone = len(statements) + len(inserts) == 1 and not (orders or late or renew)
        if not alone:
            db.execute("BEGIN IMMEDIATE")
        if renew and now_s >= self._renewed_s + self._lease_s:
            self._swept_asleep.update(self._swept_rows())
        changed = sum(db.execute(sql, _parameters(some)).rowcount for sql, some in statements)
        for sql, some in inserts:
            db.execute(sql, _parameters(some))
        written = Written(answers=[None] * len(claims))
        self._look_back(rows, changed, written)
        for order in orders:
            written.answers.append(self._decide(order, written.ended, now_s))
        if late:
            db.executemany("INSERT INTO quarantine VALUES (?, ?, ?, ?, ?, ?)", map(astuple, late))
        if renew:
            db.execute(_RENEW, (self._instance, os.getpid(), self._started_s, now_s + self._lease_s))
        if not alone:
            db.execute("COMMIT")
        if renew:
            self._renewed_s = now_s
        return written

    def _look_back(self, rows: Sequence[Dispatch], changed: int, written: Written) -> None:
        """Which rows the file did not let us change, and which turns are not the canonical one they wanted to be."""
        if changed < len(rows):
            wanted = {d.operation: d for d in rows}
            for stored in self._stored(wanted):
                d = wanted[stored.operation]
                # Our own row in that state: a write whose success was never told, or a sweep that said the same.
                if stored.state is not d.state or stored.instance != d.instance:
                    written.lost[d.operation] = stored
        turns = [d.operation for d in rows if d.canonical and d.conversation]
        if turns:
            written.unchosen = {stored.operation for stored in self._stored(turns) if not stored.canonical}

    def _stored(self, operations: Iterable[str]) -> list[Dispatch]:
        named = msgspec.json.encode(list(operations)).decode()
        query = f"SELECT {_COLUMNS} FROM dispatches WHERE operation IN (SELECT value FROM json_each(?))"
        return [_dispatch(row) for row in self._open_db().execute(query, (named,))]

    def _swept_rows(self) -> list[str]:
        """Our rows that others took for a dead process's."""
        query = (
            f"SELECT operation FROM dispatches INDEXED BY unsettled WHERE state IN ({_UNSETTLED})"
            " AND state = 'UNKNOWN' AND how = 'lease_ended' AND instance = ?"
        )
        return [operation for (operation,) in self._open_db().execute(query, (self._instance,))]

    def _decide(self, order: Order, ended: list[Change], now_s: float) -> Answer:
        """Grant or refuse one claim by what stands in the file, or do what else is ordered."""
        db = self._open_db()
        if isinstance(order, Choice):
            return self._choose(order.operation)
        if isinstance(order, Question):
            if order.step:
                db.execute(_GENERATION, {"conversation": order.conversation, "now_s": now_s})
            return self._standing(order.conversation).cancel_generation
        known = self._stored([order.operation])
        if known:
            return already_known(order.operation, known[0].state)
        if order.strength == "explicit":
            standing = self._standing(order.conversation, order.revision)
            refusal = may_claim(order, standing, now_s=now_s, unknown_ttl_s=self._unknown_ttl_s)
            if refusal is not None:
                return refusal
            for pending, _ in standing.pending:
                self._end(pending, ended, now_s)
        db.execute(_insert(1), _parameters([order]))
        return None

    def _choose(self, operation: str) -> int:
        """1 if it is the turn of its revision now, else 0."""
        turn, flags = _CHOICE
        chosen = self._open_db().execute(turn, {"operation": operation}).rowcount
        if chosen:
            self._open_db().execute(flags, {"operation": operation})
        return chosen

    def _standing(self, conversation: str, revision: int = 0) -> Standing:
        db = self._open_db()
        found = db.execute(_STANDING, (conversation,)).fetchone()
        if found is None:
            return Standing()
        cancel_generation, document_version, last, operation = found
        named = {**_OUR_DOCUMENTS, "conversation": conversation, "revision": revision}
        pending = db.execute(_PENDING, named).fetchall() if revision else []
        return Standing(
            cancel_generation=cancel_generation,
            document_version=document_version,
            revision=last,
            operation=operation,
            pending=[(_dispatch(values), lease_until_s) for *values, lease_until_s in pending],
        )

    def _end(self, d: Dispatch, ended: list[Change], now_s: float) -> None:
        """Abandon what nobody works on any more, by way of UNKNOWN."""
        for to in (State.UNKNOWN, State.ABANDONED):
            if d.state is not to:
                after = moved(d, to, now_s=now_s, how=swept_how(d, to))
                ended.append(Change(after, d.state))
                d = after
        self._open_db().execute(_REPLACE, _replacement(d))

    def keep_up(self, now_s: float) -> Upkeep:
        """Sweep a page of rows that lost their owner or settled, drop a batch of those kept long enough."""
        db = self._open_db()
        # The write lock first: an instance that renews its lease after we read it would lose live rows.
        db.execute("BEGIN IMMEDIATE")
        page = db.execute(
            _SWEEPABLE,
            {**_OUR_DOCUMENTS, "after": self._swept_to, "instance": self._instance, "now_s": now_s},
        ).fetchall()
        swept: list[Change] = []
        for *values, lease_until_s in page:
            d = _dispatch(values)
            to = sweep(d, lease_until_s=lease_until_s, now_s=now_s, unknown_ttl_s=self._unknown_ttl_s)
            if to is not None:
                swept.append(Change(moved(d, to, now_s=now_s, how=swept_how(d, to)), d.state))
        db.executemany(_REPLACE, [_replacement(row.dispatch) for row in swept])
        kept_from_s = now_s - self._retention_s
        expired = max(db.execute(sql, (kept_from_s,)).rowcount for sql in (_EXPIRE, _EXPIRE_LATE))
        for sql in _EXPIRE_OTHERS:
            db.execute(sql, (kept_from_s,))
        db.execute("COMMIT")
        page_full = len(page) == SWEEP_ROWS_MAX
        self._swept_to = page[-1][0] if page_full else ""
        return Upkeep(swept, more=page_full or expired == EXPIRE_ROWS_MAX)

    def end_lease(self, now_s: float) -> None:
        """Let others take over at once what we leave, unless an attempt is still open under this lease."""
        self._open_db().execute(_END_LEASE, (now_s, self._instance, self._instance))

    def _open_db(self) -> sqlite3.Connection:
        assert self._db is not None, "connect() comes first"
        return self._db


def _create_private(path: Path) -> None:
    """Make the file for its owner only, its name durable. SQLite gives `-wal` and `-shm` the same mode."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
