"""Orders to a running proxy, given through a table of the ledger file: from any process, and kept across restarts.

The proxy watches the file's data version, which costs it one small read each tenth of a second; an order is in force
within that time for the next request, and no open stream is touched.
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from turngate.proxy.rollout import Stage

WATCH_S: Final = 0.1

_TABLE: Final = """CREATE TABLE IF NOT EXISTS control (
    name TEXT PRIMARY KEY, value TEXT NOT NULL, set_s REAL NOT NULL, who TEXT NOT NULL, why TEXT NOT NULL)"""
_GIVE: Final = """INSERT INTO control (name, value, set_s, who, why) VALUES ('stage', ?, ?, ?, ?)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value, set_s = excluded.set_s,
    who = excluded.who, why = excluded.why"""


class Order(msgspec.Struct, frozen=True):
    """A stage for everything, whatever the settings say; None: as the settings say. `set_s` is Unix time."""

    stage: Stage | None
    set_s: float
    who: str
    why: str


def give(ledger: Path, stage: Stage | None, *, who: str, why: str) -> None:
    """Write the order down. Raises sqlite3.Error, and FileNotFoundError where no proxy has ever run."""
    if not ledger.exists():
        raise FileNotFoundError(ledger)
    with contextlib.closing(sqlite3.connect(ledger, timeout=5.0)) as db, db:
        db.execute(_TABLE)
        db.execute(_GIVE, (stage or "", time.time(), who, why))


def read(ledger: Path) -> Order | None:
    """The order in force, if one was ever given. Raises sqlite3.Error."""
    with contextlib.closing(
        sqlite3.connect(f"file:{quote(str(ledger))}?mode=ro", uri=True, timeout=1.0)
    ) as db:
        return _read(db)


def _read(db: sqlite3.Connection) -> Order | None:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'control'").fetchone():
        return None
    row = db.execute("SELECT value, set_s, who, why FROM control WHERE name = 'stage'").fetchone()
    if row is None:
        return None
    value, set_s, who, why = row
    return Order(Stage(value) if value else None, set_s, who, why)


class Watcher:
    """Tells `changed` about each new order, from a thread of its own; the present one at once."""

    def __init__(
        self, ledger: Path, changed: Callable[[Order], None], failed: Callable[[Exception], None]
    ) -> None:
        self._ledger = ledger
        self._changed = changed
        self._failed = failed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        known: Order | None = None
        while not self._stop.is_set():
            try:
                known = self._watch(known)
            except (sqlite3.Error, ValueError) as error:
                # A file that cannot be read leaves the stage as it is; the ledger counts its own trouble.
                self._failed(error)
                self._stop.wait(10 * WATCH_S)

    def _watch(self, known: Order | None) -> Order | None:
        """Follow one connection until the end or an error; returns the last order told."""
        uri = f"file:{quote(str(self._ledger))}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=1.0)) as db:
            version = None
            while not self._stop.is_set():
                (now,) = db.execute("PRAGMA data_version").fetchone()
                if now != version:
                    version = now
                    order = _read(db)
                    if order is not None and order != known:
                        self._changed(order)
                        known = order
                self._stop.wait(WATCH_S)
        return known
