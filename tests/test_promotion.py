"""Orders as they are written down and told, promotion by evidence, and rollback by itself, on real files."""

import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from test_gates import FALSE, MISS, REFUSED, TRUE, ended, spoke

from turngate.proxy import cli, control
from turngate.proxy.control import (
    HISTORY_MAX,
    AutomaticRollback,
    BadOrder,
    Declared,
    FileWatcher,
    NoEvidence,
    NotYet,
    Operator,
    Overtaken,
    Watcher,
)
from turngate.proxy.gates import Evidence, Fault, RollbackLimits
from turngate.proxy.observer import restore_orders
from turngate.proxy.rollout import Order, Rung, Stage
from turngate.proxy.rollout_evidence import read_evidence
from turngate.telemetry.events import AnyEvent, FailureCounted, StateChanged
from turngate.telemetry.metrics import Registry
from turngate.telemetry.recorder import Recorder

ADA = Operator("ada", "a quiet week")
WAIT_S = 30.0
"""A bound that only a test that fails meets."""


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """A ledger file as a proxy leaves it, without a dispatch."""
    path = tmp_path / "ledger.sqlite3"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
    return path


def shown(order: Order) -> tuple[str, str, int, str]:
    return order.scope, str(order.stage or ""), order.percent, str(order.rest or "")


def stages(ledger: Path) -> list[tuple[str, Stage, int]]:
    return [(rung.name, rung.stage, rung.percent) for rung in control.read(ledger).rungs]


# -- orders on disk -------------------------------------------------------------------------------------------------


def test_orders_are_kept_and_the_latest_of_each_scope_is_in_force(ledger: Path) -> None:
    control.give(ledger, Stage.OFF, who="ada", why="too strict")
    control.give(ledger, Stage.ENFORCE_TEXT, who="bo", why="", scope="openai", percent=10, rest=Stage.OBSERVE)
    control.give(ledger, None, who="ada", why="", evidence="none")
    found = control.read(ledger)
    assert [shown(order) for order in found.history] == [
        ("all", "", 100, ""),
        ("openai", "enforce-text", 10, "observe"),
        ("all", "off", 100, ""),
    ]
    assert [(each.who, each.why, each.evidence) for each in found.history_of("all")] == [
        ("ada", "", "none"),
        ("ada", "too strict", ""),
    ]
    assert found.history[0].set_s >= found.history[2].set_s > 0
    assert stages(ledger) == [("openai", Stage.ENFORCE_TEXT, 10), ("*", Stage.OBSERVE, 100)]


def test_nothing_is_written_where_no_proxy_has_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        control.give(tmp_path / "none", Stage.OFF, who="ada", why="")
    assert list(tmp_path.iterdir()) == []


def test_a_scope_is_written_in_one_way_and_a_name_that_is_none_not_at_all(ledger: Path) -> None:
    control.give(ledger, Stage.OFF, who="ada", why="", scope="openai,B=2,A=1")
    with pytest.raises(ValueError, match="no scope"):
        control.give(ledger, Stage.OFF, who="ada", why="", scope="openai/")
    assert [order.scope for order in control.read(ledger).history] == ["openai,a=1,b=2"]


def test_of_two_orders_that_follow_the_same_one_the_second_is_refused(ledger: Path) -> None:
    control.give(ledger, Stage.OFF, who="ada", why="", after=0)
    with pytest.raises(Overtaken):
        control.give(ledger, Stage.OBSERVE, who="bo", why="", after=0)
    (order,) = control.read(ledger).history
    control.give(ledger, Stage.OBSERVE, who="bo", why="", after=order.number)
    control.give(ledger, Stage.OFF, who="bo", why="", scope="openai", after=0)
    assert len(control.read(ledger).history) == 3


def test_the_history_is_bounded_and_what_is_in_force_stays(ledger: Path) -> None:
    control.give(ledger, Stage.ENFORCE_TEXT, who="ada", why="", scope="openai")
    with closing(sqlite3.connect(ledger)) as database, database:
        row = "INSERT INTO rollout_orders (scope, stage, percent, rest, set_s, who, why, evidence)"
        database.executemany(
            f"{row} VALUES ('all', 'off', 100, '', ?, '', '', '')", [(n,) for n in range(3_000)]
        )
    control.give(ledger, Stage.OFF, who="ada", why="x" * 10_000)
    found = control.read(ledger)
    assert len(found.history) == HISTORY_MAX + 1
    assert found.history[-1].scope == "openai"
    assert len(found.history[0].why) == control.WORDS_MAX


def test_what_the_proxy_declares_is_what_everybody_goes_by(ledger: Path) -> None:
    own = Declared((Rung("openai", "*", Stage.OFF, (("x", "y"),), 10),), Stage.ENFORCE_TEXT)
    other = Declared((), Stage.OFF)
    assert control.read(ledger, other).declared == other
    control.declare(ledger, other)
    control.declare(ledger, own)
    assert control.read(ledger, other).declared == own


def test_a_file_of_another_making_is_an_error_and_no_guess(ledger: Path) -> None:
    control.declare(ledger, Declared())
    with closing(sqlite3.connect(ledger)) as database, database:
        database.execute("""UPDATE rollout_settings SET value = '{"default": "brave"}'""")
    with pytest.raises(ValueError, match="brave"):
        control.read(ledger)


# -- watching -------------------------------------------------------------------------------------------------------


@contextmanager
def watched(ledger: Path) -> Iterator[SimpleQueue[Order | Exception]]:
    heard: SimpleQueue[Order | Exception] = SimpleQueue()
    watcher = Watcher(ledger, heard.put, heard.put)
    watcher.start()
    try:
        yield heard
    finally:
        watcher.stop()


def next_order(heard: SimpleQueue[Order | Exception]) -> Order:
    order = heard.get(timeout=WAIT_S)
    assert isinstance(order, Order), order
    return order


def test_a_watcher_tells_what_is_in_force_then_each_new_order_once(ledger: Path) -> None:
    control.give(ledger, Stage.OFF, who="ada", why="")
    control.give(ledger, Stage.OBSERVE, who="ada", why="")
    control.give(ledger, Stage.ENFORCE_TEXT, who="ada", why="", scope="openai")
    with watched(ledger) as heard:
        assert [shown(next_order(heard))[:2] for _ in range(2)] == [
            ("all", "observe"),
            ("openai", "enforce-text"),
        ]
        for stage in (Stage.OFF, Stage.OBSERVE, None):
            control.give(ledger, stage, who="bo", why="")
        assert [next_order(heard).stage for _ in range(3)] == [Stage.OFF, Stage.OBSERVE, None]
        control.declare(ledger, Declared())  # a change of the file that is no order
        control.give(ledger, Stage.OFF, who="bo", why="", scope="azure")
        assert next_order(heard).scope == "azure"
    assert heard.empty()


def test_the_orders_that_stand_are_in_force_before_the_first_request(ledger: Path) -> None:
    control.give(ledger, Stage.OFF, who="ada", why="")
    heard: list[Stage | None] = []
    watcher = Watcher(ledger, lambda order: heard.append(order.stage), lambda _error: None)
    watcher.start()
    assert heard == [Stage.OFF]
    watcher.stop()
    assert heard == [Stage.OFF]


def test_a_watcher_tells_what_it_cannot_read_and_goes_on(ledger: Path) -> None:
    control.give(ledger, Stage.OFF, who="ada", why="")
    with closing(sqlite3.connect(ledger)) as database, database:
        database.execute("UPDATE rollout_orders SET stage = 'brave'")
    with watched(ledger) as heard:
        assert isinstance(heard.get(timeout=WAIT_S), ValueError)
        control.give(ledger, Stage.OBSERVE, who="ada", why="")
        while isinstance(told := heard.get(timeout=WAIT_S), Exception):
            pass
        assert told.stage is Stage.OBSERVE


@contextmanager
def followed(path: Path) -> Iterator[SimpleQueue[str | Exception]]:
    heard: SimpleQueue[str | Exception] = SimpleQueue()

    def read() -> str:
        text = path.read_text()
        if "bad" in text:
            raise ValueError(text)
        return text

    watcher = FileWatcher(path, read, heard.put, heard.put)
    watcher.start()
    try:
        yield heard
    finally:
        watcher.stop()


def test_a_settings_file_is_read_again_when_it_changes_and_a_bad_one_told_once(tmp_path: Path) -> None:
    path = tmp_path / "turngate.yaml"
    path.write_text("first")
    with followed(path) as heard:
        path.write_text("second")
        assert heard.get(timeout=WAIT_S) == "second"
        path.write_text("bad one")
        assert isinstance(heard.get(timeout=WAIT_S), ValueError)
        path.write_text("third")
        assert heard.get(timeout=WAIT_S) == "third"
        path.unlink()
        assert isinstance(heard.get(timeout=WAIT_S), FileNotFoundError)
    assert heard.empty()


def test_a_settings_file_behind_a_link_that_is_swapped_is_read_again(tmp_path: Path) -> None:
    """As Kubernetes updates a ConfigMap: another file of the same size under the same link."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, ns=(1, 1))
    path = tmp_path / "turngate.yaml"
    path.symlink_to("one")
    with followed(path) as heard:
        (tmp_path / "new").symlink_to("two")
        (tmp_path / "new").rename(path)
        assert heard.get(timeout=WAIT_S) == "two"


# -- up and down ----------------------------------------------------------------------------------------------------


def enough(_rung: Rung, _to: Stage) -> Evidence:
    return Evidence(samples=500)


def promote(ledger: Path, scope: str = "*", **said: Any) -> tuple[Stage, int]:
    return control.promote(ledger, control.read(ledger), scope, said.pop("gathered", enough), ADA, **said)


def roll_back(ledger: Path, scope: str = "*") -> Stage:
    return control.roll_back(ledger, control.read(ledger), scope, ADA)


def test_a_scope_goes_up_step_by_step_and_down_again(ledger: Path) -> None:
    assert promote(ledger) == (Stage.ENFORCE_TEXT, 10)
    assert shown(control.read(ledger).history[0]) == ("*", "enforce-text", 10, "observe")
    assert promote(ledger, percent=50) == (Stage.ENFORCE_TEXT, 50)
    assert promote(ledger) == (Stage.ENFORCE_TEXT, 100)
    assert promote(ledger) == (Stage.ENFORCE_TOOLS, 10)
    assert shown(control.read(ledger).history[0]) == ("*", "enforce-tools", 10, "enforce-text")
    assert promote(ledger) == (Stage.ENFORCE_TOOLS, 100)
    assert promote(ledger) == (Stage.ENFORCE_SCHEMA, 10)
    assert roll_back(ledger) is Stage.ENFORCE_TOOLS
    assert roll_back(ledger) is Stage.ENFORCE_TEXT
    assert roll_back(ledger) is Stage.OBSERVE
    with pytest.raises(BadOrder, match="nothing to roll back"):
        roll_back(ledger)
    assert stages(ledger) == [("*", Stage.OBSERVE, 100)]


def test_a_refused_promotion_says_what_is_missing_and_changes_nothing(ledger: Path) -> None:
    with pytest.raises(NotYet, match=r"enforce-text at 10 %.* 37 of 500 samples"):
        promote(ledger, gathered=lambda rung, to: Evidence(samples=37))
    assert control.read(ledger).history == ()


def test_a_forced_promotion_keeps_what_it_was_forced_over(ledger: Path) -> None:
    promote(ledger, gathered=lambda rung, to: Evidence(samples=37), force=True)
    (order,) = control.read(ledger).history
    assert order.evidence.startswith("37 samples, ")
    assert order.evidence.endswith("; forced over: 37 of 500 samples")
    assert (order.who, order.why) == ("ada", "a quiet week")


def test_the_evidence_is_asked_for_what_is_in_force_and_what_is_to_come(ledger: Path) -> None:
    asked: list[tuple[str, Stage, Stage]] = []

    def gathered(rung: Rung, to: Stage) -> Evidence:
        asked.append((rung.name, rung.stage, to))
        return Evidence(samples=500)

    for _ in range(3):
        promote(ledger, "openai", gathered=gathered)
    assert asked == [
        ("*", Stage.OBSERVE, Stage.ENFORCE_TEXT),
        ("openai", Stage.ENFORCE_TEXT, Stage.ENFORCE_TEXT),
        ("openai", Stage.ENFORCE_TEXT, Stage.ENFORCE_TOOLS),
    ]


def brake(ledger: Path) -> None:
    control.give(ledger, Stage.OBSERVE, who="ada", why="")


def part(ledger: Path) -> None:
    control.give(ledger, Stage.ENFORCE_TEXT, who="ada", why="", scope="*", percent=10, rest=Stage.OBSERVE)


def top(ledger: Path) -> None:
    control.give(ledger, Stage.ENFORCE_SCHEMA, who="ada", why="", scope="openai")


BAD: dict[str, tuple[Callable[[Path], None], str, dict[str, Any], str]] = {
    "below an order for everything": (brake, "openai", {}, "rollout set settings"),
    "everything, where nothing was ordered for it": (part, "all", {}, "no order for everything"),
    "a part of what is on its way itself": (part, "openai", {}, r"part of \*, which is at 10 %"),
    "to fewer than there are": (part, "*", {"percent": 5}, "no such step up"),
    "beyond the top": (top, "openai", {}, "no such step up"),
}


@pytest.mark.parametrize(("before", "scope", "said", "says"), BAD.values(), ids=BAD)
def test_a_promotion_that_makes_no_sense_is_refused(
    ledger: Path, before: Callable[[Path], None], scope: str, said: dict[str, Any], says: str
) -> None:
    before(ledger)
    with pytest.raises(BadOrder, match=says):
        promote(ledger, scope, **said)
    assert len(control.read(ledger).history) == 1


def test_of_two_who_promote_at_once_one_is_told(ledger: Path) -> None:
    seen = control.read(ledger)
    promote(ledger)
    with pytest.raises(Overtaken):
        control.promote(ledger, seen, "*", enough, ADA)
    assert stages(ledger) == [("*", Stage.ENFORCE_TEXT, 10)]


def test_setting_a_percentage_leaves_the_others_with_what_was_ordered_for_them(ledger: Path) -> None:
    for stage, percent in ((Stage.ENFORCE_TEXT, 100), (Stage.ENFORCE_TOOLS, 20), (Stage.ENFORCE_TOOLS, 30)):
        control.put(ledger, control.read(ledger), "openai", stage, percent, ADA)
    orders = [shown(order)[1:] for order in control.read(ledger).history]
    assert orders[:2] == [("enforce-tools", 30, "enforce-text"), ("enforce-tools", 20, "enforce-text")]


# -- evidence -------------------------------------------------------------------------------------------------------

PASSED = FALSE | {"stage": "enforce-text"}
NOW = 1_772_366_400.0
EVERY = (Rung("azure", "*", Stage.OBSERVE), Rung("*", "*", Stage.ENFORCE_TEXT))


def write_evidence(data_dir: Path, events: Sequence[AnyEvent]) -> Path:
    """Evidence as the sidecar writes it; the folder `evidence`."""
    (data_dir / "spool").mkdir(parents=True)
    (data_dir / "spool" / "i-00000000.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(events))
    recorder = Recorder(data_dir / "spool", data_dir / "evidence", Registry("1"), clock=lambda: NOW)
    recorder.load_pending()
    recorder.close()
    return data_dir / "evidence"


def some(count: int, stage: str = "enforce-text", **said: Any) -> list[AnyEvent]:
    return [ended(NOW - 3_600 + n, f"op-{n}", **{**said, "stage": stage}) for n in range(count)]


def fault(what: str, count: int, *operations: str) -> Fault:
    return Fault(what, count, operations)


UNKNOWN = StateChanged(
    at_s=NOW - 9, operation="op-0", upstream="openai", before="SENT", after="UNKNOWN", how="eof"
)
GATHERED: dict[str, tuple[list[AnyEvent], Evidence]] = {
    "nothing": ([], Evidence()),
    "answered requests": (some(3), Evidence(samples=3)),
    "refusals that would have been right": (some(3, **TRUE), Evidence(samples=3, true_refusals=3)),
    "our own refusals, which tell nothing of the provider": (some(3, **REFUSED), Evidence(samples=3)),
    "false ones by rule, with the latest operations": (
        [*some(4, **PASSED), *some(1, **PASSED | {"reasons": ("role.order",)})],
        Evidence(
            samples=5,
            false_refusals=(
                fault("false refusals of reasoning.detached", 4, "op-3", "op-2", "op-1"),
                fault("false refusal of role.order", 1, "op-0"),
            ),
        ),
    ),
    "misses": (
        some(2, **MISS),
        Evidence(samples=2, misses=(fault("misses of call.unanswered", 2, "op-1", "op-0"),)),
    ),
    "refusals whose answer tells nothing": (
        some(2, **TRUE | {"provider": "refused_other"}),
        Evidence(unclear=2),
    ),
    "requests that nobody answered": (some(2, provider="unknown", outcome="unsent"), Evidence()),
    "requests that nobody judged": (some(2, verdict="unjudged"), Evidence()),
    "faults of ours, in an exchange and beside it": (
        [
            *some(1, error_type="turngate_internal", provider=""),
            FailureCounted(at_s=NOW - 5, where="judge", error="KeyError"),
        ],
        Evidence(
            failures=(
                fault("failure (turngate_internal)", 1, "op-0"),
                fault("failure in judge (KeyError)", 1),
            )
        ),
    ),
    "what a witness saw": (
        [*some(1), spoke("op-0", "byte_mismatch", enforced=False, at_s=NOW - 4)],
        Evidence(samples=1, witnesses=(fault("finding of the witness byte_mismatch", 1, "op-0"),)),
    ),
    "but not what the provider did where Turngate only watches": (
        [*some(1), spoke("op-0", "partial_tool_dispatch", enforced=False, at_s=NOW - 4)],
        Evidence(samples=1),
    ),
    "dispatches that are UNKNOWN": ([*some(1), UNKNOWN], Evidence(samples=1, unsettled=1)),
    "nothing of another class": (some(3, request_class="text", **FALSE), Evidence()),
    "nothing of another stage but its faults": (
        [*some(3, "observe"), *some(1, "observe", **MISS)],
        Evidence(misses=(fault("miss of call.unanswered", 1, "op-0"),)),
    ),
    "nothing of another scope": (some(3, upstream="azure", **FALSE), Evidence()),
    "nothing of last month": ([ended(NOW - 30 * 86_400, stage="enforce-text")], Evidence()),
}


@pytest.mark.parametrize(("events", "evidence"), GATHERED.values(), ids=GATHERED)
def test_the_evidence_of_a_scope_is(tmp_path: Path, events: list[AnyEvent], evidence: Evidence) -> None:
    place = write_evidence(tmp_path, events)
    found = read_evidence(place, EVERY, EVERY[1], Stage.ENFORCE_TOOLS, now_s=NOW)
    assert found == evidence


def test_evidence_from_before_the_present_stage_does_not_count(tmp_path: Path) -> None:
    place = write_evidence(tmp_path, some(10, "enforce-tools"))
    order = Order(scope="*", stage=Stage.ENFORCE_TOOLS, who="", why="", set_s=NOW - 3_600 + 7)
    rung = Rung("*", "*", Stage.ENFORCE_TOOLS, order=order)
    assert read_evidence(place, (rung,), rung, Stage.ENFORCE_SCHEMA, now_s=NOW).samples == 3


def test_evidence_that_cannot_be_read_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "2026-03-01.duckdb").write_bytes(b"no database")
    with pytest.raises(NoEvidence, match="cannot read the evidence"):
        read_evidence(tmp_path, EVERY, EVERY[1], Stage.ENFORCE_TOOLS, now_s=NOW)


# -- rollback by itself ---------------------------------------------------------------------------------------------


def test_false_refusals_send_a_scope_down_and_it_is_written_who_did_it_and_why(ledger: Path) -> None:
    for _ in range(4):
        promote(ledger)
    told: list[str] = []
    automatic = AutomaticRollback(ledger, told.append)
    now_s = control.read(ledger).history[0].set_s + 1
    automatic.observe_all([ended(now_s, f"op-{n}", **FALSE) for n in range(3)])
    latest = control.read(ledger).history[0]
    assert shown(latest) == ("*", "enforce-text", 100, "")
    assert (latest.who, latest.why) == ("turngate", "automatic rollback")
    assert latest.evidence == "within 10 minutes: 3 false refusals of reasoning.detached, op-2, op-1, op-0"
    assert told == [f"* is rolled back to enforce-text: {latest.evidence}"]


def test_a_scope_of_the_settings_goes_down_too_and_no_further_than_observing(ledger: Path) -> None:
    control.declare(ledger, Declared((Rung("openai", "*", Stage.ENFORCE_TOOLS),), Stage.OBSERVE))
    automatic = AutomaticRollback(ledger)
    for at_s in (1.0, 2e9, 3e9):
        automatic.observe_all([ended(at_s, f"op-{n}", **FALSE) for n in range(3)])
    assert [shown(order) for order in control.read(ledger).history] == [("openai", "observe", 100, "")]


def test_a_burst_of_illegal_requests_changes_nothing(ledger: Path) -> None:
    control.give(ledger, Stage.ENFORCE_TOOLS, who="ada", why="")
    AutomaticRollback(ledger).observe_all([ended(2e9, f"op-{n}", **REFUSED) for n in range(1_000)])
    assert len(control.read(ledger).history) == 1


def test_the_limits_are_those_of_the_running_proxy(ledger: Path) -> None:
    rungs = (Rung("*", "*", Stage.ENFORCE_TOOLS),)
    control.declare(ledger, Declared(rungs, limits=RollbackLimits(misses=1)))
    AutomaticRollback(ledger).observe_all([ended(1.0, "op-1", **MISS)])
    assert [shown(order) for order in control.read(ledger).history] == [("*", "observe", 100, "")]


def test_an_operator_who_is_faster_is_not_overruled(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control.give(ledger, Stage.ENFORCE_TOOLS, who="ada", why="")
    seen = control.read(ledger)
    control.give(ledger, Stage.OFF, who="ada", why="enough")
    monkeypatch.setattr(control, "read", lambda _ledger: seen)
    AutomaticRollback(ledger).observe_all([ended(2e9, f"op-{n}", **MISS) for n in range(5)])
    monkeypatch.undo()
    assert control.read(ledger).history[0].who == "ada"


def test_what_was_seen_while_the_ledger_could_not_be_read_counts_later(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.give(ledger, Stage.ENFORCE_TOOLS, who="ada", why="")
    automatic = AutomaticRollback(ledger)

    def locked(_ledger: Path) -> control.Rollout:
        raise sqlite3.OperationalError("database is locked")

    with monkeypatch.context() as patched:
        patched.setattr(control, "read", locked)
        with pytest.raises(sqlite3.OperationalError):
            automatic.observe_all([ended(2e9, f"op-{n}", **FALSE) for n in range(2)])
    automatic.observe_all([ended(2e9, "op-2", **FALSE)])
    assert control.read(ledger).history[0].who == "turngate"


def test_an_observer_that_starts_again_knows_which_orders_stand(ledger: Path) -> None:
    control.give(
        ledger, Stage.ENFORCE_TOOLS, who="ada", why="", scope="openai", percent=10, rest=Stage.OBSERVE
    )
    control.give(ledger, Stage.ENFORCE_TOOLS, who="ada", why="", scope="azure")
    AutomaticRollback(ledger).observe_all(
        [ended(2e9, f"op-{n}", upstream="azure", **FALSE) for n in range(3)]
    )
    registry = Registry("1")
    restore_orders(ledger, registry)
    shares = {stage: registry.value("rollout_stage", "openai", stage) for stage in Stage}
    assert {stage: share for stage, share in shares.items() if share} == {
        "enforce-tools": 0.1,
        "observe": 0.9,
    }
    assert [registry.value("rollout_rolled_back", scope) for scope in ("openai", "azure")] == [0, 1]


def test_without_a_ledger_there_is_nothing_to_roll_back(tmp_path: Path) -> None:
    AutomaticRollback(tmp_path / "none").observe_all([ended(1.0, "op-1", **MISS)])
    assert list(tmp_path.iterdir()) == []


# -- the commands ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Said:
    """What a command came to."""

    code: int
    out: str
    err: str


Rollout = Callable[..., Said]


@pytest.fixture
def rollout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ledger: Path, tmp_path: Path
) -> Rollout:
    """`turngate rollout` in this process, on the test's own ledger."""
    for name in [name for name in os.environ if name.startswith("TURNGATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TURNGATE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("getpass.getuser", lambda: "ada")

    def run(*arguments: str) -> Said:
        monkeypatch.setattr("sys.argv", ["turngate", "rollout", *arguments])
        with pytest.raises(SystemExit) as ended_:
            cli.main()
        out, err = capsys.readouterr()
        return Said(int(ended_.value.code or 0), out, err)

    return run


def test_set_puts_a_stage_in_force_for_everything_or_a_scope(
    rollout: Rollout, ledger: Path, tmp_path: Path
) -> None:
    said = rollout("set", "enforce-text", "--why", "a quiet week")
    assert (said.code, said.out) == (0, f"enforce-text is in force for everything in {tmp_path}\n")
    said = rollout("set", "enforce-tools", "--scope", "openai/gpt-4*", "--percent", "10", "--by", "bo")
    assert (said.code, said.out) == (
        0,
        f"enforce-tools is in force for 10 % of openai/gpt-4* in {tmp_path}\n",
    )
    assert rollout("set", "settings").code == 0
    assert [(*shown(order), order.who, order.why) for order in control.read(ledger).history] == [
        ("all", "", 100, "", "ada", ""),
        ("openai/gpt-4*", "enforce-tools", 10, "", "bo", ""),
        ("all", "enforce-text", 100, "", "ada", "a quiet week"),
    ]


def test_show_tells_what_is_in_force_since_when_by_whom_and_why(rollout: Rollout) -> None:
    rollout("set", "enforce-text", "--scope", "openai", "--percent", "10", "--why", "a quiet week")
    said = rollout("show")
    lines = said.out.splitlines()
    assert (said.code, said.err) == (0, "")
    assert lines[0].split() == ["scope", "stage", "since", "(UTC)", "by", "why"]
    assert "openai" in lines[2]
    assert "enforce-text 10 %, else the next scope" in lines[2]
    assert lines[2].endswith("a quiet week")
    assert lines[3].split() == ["all", "the", "rest", "observe", "settings"]
    assert "latest changes" in said.out


def test_show_as_json_tells_scopes_in_order_and_every_change(rollout: Rollout) -> None:
    for stage in ("observe", "off"):
        rollout("set", stage, "--why", "it is late")
    told = json.loads(rollout("show", "--json").out)
    assert [(each["scope"], each["stage"], each["who"]) for each in told["scopes"]] == [
        ("all", "off", "ada"),
        ("*", "observe", "settings"),
    ]
    assert [(each["stage"], each["why"]) for each in told["changes"]] == [
        ("off", "it is late"),
        ("observe", "it is late"),
    ]
    assert told["scopes"][0]["set_s"] == told["changes"][0]["set_s"]


def test_promote_is_refused_with_what_is_missing_and_can_be_forced(rollout: Rollout, tmp_path: Path) -> None:
    write_evidence(tmp_path, [ended(2e9, "op-1", **FALSE | {"request_class": "text"})])
    said = rollout("promote")
    assert said.code == 1
    assert said.err == (
        "error: * stays: for enforce-text at 10 % there is: 1 of 500 samples; "
        "1 false refusal of reasoning.detached, op-1\n"
    )
    said = rollout("promote", "--force", "--percent", "25")
    assert (said.code, said.out) == (0, f"enforce-text is in force for 25 % of all the rest in {tmp_path}\n")
    assert "forced over: 1 of 500 samples" in rollout("show", "--json").out


def test_promote_with_enough_evidence_then_rollback(rollout: Rollout, ledger: Path, tmp_path: Path) -> None:
    said = {"stage": "observe", "request_class": "text"}
    write_evidence(tmp_path, [ended(2e9 + n, f"op-{n}", **said) for n in range(500)])
    assert rollout("promote", "openai", "--why", "ready").code == 0
    assert control.read(ledger).history[0].evidence.startswith("500 samples, 0 true and 0 false refusals")
    said_ = rollout("rollback", "openai", "--why", "late")
    assert (said_.code, said_.out) == (0, f"observe is in force for openai in {tmp_path}\n")


USAGE = {
    "an unknown stage": (["set", "brave"], "choose one of off, observe"),
    "a name that is no scope": (["set", "off", "--scope", "openai/"], "write UPSTREAM"),
    "a percentage of nothing": (["set", "off", "--percent", "0"], "--percent"),
    "a step down from nothing": (["rollback"], "nothing to roll back"),
    "a scope that is none": (["promote", "/"], "write UPSTREAM"),
    "a folder without a ledger": (["show", "--data-dir", "elsewhere"], "no proxy has run"),
    "a settings file that is not there": (["show", "--config", "absent.yaml"], "absent.yaml"),
    "no command": (["unheard-of"], "unheard-of"),
}


@pytest.mark.parametrize(("arguments", "says"), USAGE.values(), ids=USAGE)
def test_what_makes_no_sense_is_a_usage_error(rollout: Rollout, arguments: list[str], says: str) -> None:
    said = rollout(*arguments)
    assert said.code == 64
    assert says in said.err


def test_what_cannot_be_read_is_an_error_of_its_own(rollout: Rollout, ledger: Path, tmp_path: Path) -> None:
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "2099-01-01.duckdb").write_bytes(b"no database")
    assert rollout("promote").code == 70
    ledger.write_bytes(b"no database")
    assert rollout("show").code == 70
