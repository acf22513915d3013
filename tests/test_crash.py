"""`kill -9` of proxy and observer under load: nothing leaves unclaimed, twice, or is forgotten; no event counts twice.

One run of a real sidecar (`enforce-tools`, short leases) between raw clients and the simulator, killed at seeded
moments, the proxy and the observer in turn. Four witnesses take notes: the simulator's side looks into the ledger
file the moment a request arrives; the clients know whether an answer was whole and whether anything was killed
meanwhile; rows are read again after each restart; every spool segment is kept by a hard link before the observer
can remove it. The tests below are what the notes must say.

    CRASHES=100 CRASH_SEED=7 pytest tests/test_crash.py
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import socket
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from turngate.proxy.simulator import Received, Simulator
from turngate.telemetry.events import AnyEvent, StateChanged
from turngate.telemetry.queries import connect_readonly
from turngate.telemetry.schema import TABLES

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="finds the observer's process id in /proc"
)

KILLS: Final = int(os.environ.get("CRASHES") or 6)
SEED: Final = int(os.environ.get("CRASH_SEED") or 1)

CLIENTS: Final = 16
BATCH: Final = 4 * CLIENTS
"""Answers that must arrive whole while there is no observer."""
PATIENCE_S: Final = 30.0
"""A restart takes about 1 s; whoever waits so long waits for something that never comes."""
LEASES_S: Final = (0.5, 3.0)
"""Of one life and the next: one runs out before the next sidecar is up, the other while it watches."""
SETTLE_S: Final = 0.2

OPEN: Final = ("DISPATCHING", "SENT", "STREAMING")
ORDER: Final[Mapping[str, int]] = {**dict.fromkeys(OPEN, 0), "UNKNOWN": 1, "ABANDONED": 2}
"""The only way of a row whose owner died."""

SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS: Final = {
    "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
}
MESSAGES_TOOLS: Final = {"tools": [{"name": "get_weather", "input_schema": SCHEMA}]}
STREAM: Final = {"stream": True}
CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
STUCK: Final = f"/stuck{CHAT}"
CHAT_ORPHAN: Final = {"role": "tool", "tool_call_id": "call_1", "content": "fine"}
MESSAGES_ORPHAN: Final = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "fine"}],
}


class Kind(NamedTuple):
    """A kind of request: where it goes, what it holds beside one unique question, how its whole answer ends."""

    path: str
    fields: Mapping[str, Any]
    status: int
    ends: bytes
    orphan: Mapping[str, Any] | None = None
    """An illegal message after the question."""


DONE: Final = b"data: [DONE]\n\n"
STOPPED: Final = b'"type":"message_stop"}\n\n'
KINDS: Final = {
    "chat text": Kind(CHAT, {}, 200, b"}"),
    "chat text stream": Kind(CHAT, STREAM, 200, DONE),
    "chat tools": Kind(CHAT, CHAT_TOOLS, 200, b"}"),
    "chat tools stream": Kind(CHAT, CHAT_TOOLS | STREAM, 200, DONE),
    "messages text": Kind(MESSAGES, {}, 200, b"}"),
    "messages text stream": Kind(MESSAGES, STREAM, 200, STOPPED),
    "messages tools stream": Kind(MESSAGES, MESSAGES_TOOLS | STREAM, 200, STOPPED),
    "chat illegal": Kind(CHAT, CHAT_TOOLS, 400, b"}", CHAT_ORPHAN),
    "messages illegal stream": Kind(MESSAGES, MESSAGES_TOOLS | STREAM, 400, b"}", MESSAGES_ORPHAN),
}
NEVER_SENT: Final = Kind(STUCK, CHAT_TOOLS, 0, b"")
"""To a provider that accepts no connection: claimed, and then it cannot leave."""

SLOW: Final = "slowly"
SCENARIO: Final = {"steps": [{"when": {"stream": True, "contains": SLOW}, "interval_s": 0.02}]}
"""Half of the streams last long enough to be met in the middle."""


async def patience(what: str) -> AsyncIterator[None]:
    """Look again and again, until the caller has seen what it waits for; fails if it never does."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + PATIENCE_S
    while clock() < until_s:
        yield
        await asyncio.sleep(0.005)
    pytest.fail(f"seed {SEED}: {what} never came")


class Sidecar:
    """`turngate serve` as a child process, one life after the other on the same data and the same ports."""

    def __init__(self, data_dir: Path, upstreams: Mapping[str, str]) -> None:
        self.data_dir = data_dir
        self.up = asyncio.Event()
        self.kills = 0
        self.port, self.metrics_port, self.admin_port = free_ports(3)
        self._upstreams = upstreams
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "start() comes first"
        return self._process

    async def start(self) -> None:
        """Start a life once the last one's observer has let go of its ports; wait for readiness."""
        async for _ in patience("the end of the orphaned observer"):
            if is_free(self.metrics_port) and is_free(self.admin_port):
                break
        local = "127.0.0.1:{}".format
        command = [sys.executable, "-m", "turngate", "serve", "--stage", "enforce-tools"]
        command += ["--listen", local(self.port), "--metrics", local(self.metrics_port)]
        command += ["--admin", local(self.admin_port), "--data-dir", str(self.data_dir)]
        for name, url in self._upstreams.items():
            command += ["--upstream", f"{name}={url}"]
        settings = {
            "LEDGER__LEASE_S": LEASES_S[self.kills % 2],
            "LEDGER__SETTLE_S": SETTLE_S,
            "DRAIN_S": 1,
            "TIMEOUTS__CONNECT_S": 600,
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TURNGATE_")}
        with self.data_dir.with_name("sidecar.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                env=clean | {f"TURNGATE_{name}": str(value) for name, value in settings.items()},
                cwd=self.data_dir.parent,  # no settings file of ours lies here
                stdout=log,
                stderr=log,
            )
        async for _ in patience("a ready sidecar"):
            assert self.process.returncode is None, f"the sidecar did not start, see {log.name}"
            answer = await answer_to(self.port, b"GET /-/readyz HTTP/1.1\r\nhost: x\r\n\r\n")
            if answer.startswith(b"HTTP/1.1 200 "):
                break
        self.up.set()

    async def kill(self) -> None:
        self.up.clear()
        self.kills += 1
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> int:
        """Drain; the exit code."""
        self.up.clear()
        self.process.terminate()
        return await self.process.wait()

    def observer_pid(self) -> int | None:
        """The living observer; not a child that is still a copy of the proxy, for which the proxy has to wait."""
        assert self.process.returncode is None, f"seed {SEED}: the sidecar ended by itself"
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # gone while we looked
                if b"turngate.proxy.observer" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        return None


def free_ports(count: int) -> list[int]:
    """Below the range that the system gives to clients: theirs would take a port while the sidecar is down, or
    connect to themselves there."""
    candidates = list(range(20_000, 32_000))
    random.SystemRandom().shuffle(candidates)
    return list(itertools.islice(filter(is_free, candidates), count))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
        return True


async def answer_to(port: int, request: bytes) -> bytes:
    """All that comes back on a connection of its own; what came so far if it breaks."""
    answer = bytearray()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return b""
    try:
        writer.write(request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))
        while data := await reader.read(65_536):
            answer += data
    except OSError:
        pass  # what came so far is the answer; whether that was allowed is the caller's to say
    finally:
        writer.close()
    return bytes(answer)


class Load:
    """Clients that ask one unique question after the other, and go on when a sidecar dies under them."""

    def __init__(self, sidecar: Sidecar) -> None:
        self.whole = 0
        self.broken = 0
        self.faults: list[str] = []
        """Answers that were not whole although nothing was killed."""
        self.answered: set[bytes] = set()
        self.illegal: set[bytes] = set()
        self._sidecar = sidecar
        self._numbers = itertools.count()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        choices = [random.Random(f"{SEED}-{n}") for n in range(CLIENTS)]
        tasks = [asyncio.create_task(self._client(KINDS, rng)) for rng in choices]
        tasks.append(asyncio.create_task(self._client({"never sent": NEVER_SENT}, random.Random(SEED))))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        self.faults += [repr(each) for each in outcomes if isinstance(each, Exception)]

    async def batch(self) -> None:
        """Let one more batch be answered."""
        enough = self.whole + BATCH
        async for _ in patience(f"a batch of {BATCH} answers"):
            if self.whole >= enough or self.faults:
                return

    async def _client(self, kinds: Mapping[str, Kind], rng: random.Random) -> None:
        while not self.faults:
            await self._sidecar.up.wait()
            name = rng.choice(list(kinds))
            await self._ask(name, kinds[name], f"Question {next(self._numbers)} {rng.choice(['', SLOW])}")

    async def _ask(self, name: str, kind: Kind, question: str) -> None:
        messages = [{"role": "user", "content": question}, *([kind.orphan] if kind.orphan else [])]
        body = json.dumps({"model": "m-1", "max_tokens": 64, "messages": messages, **kind.fields}).encode()
        if kind.orphan:
            self.illegal.add(body)
        head = f"POST {kind.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        kills = self._sidecar.kills
        answer = await answer_to(
            self._sidecar.port, f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        )
        if is_whole(answer, kind):
            self.whole += 1
            self.answered.add(body)
        elif kills != self._sidecar.kills:
            self.broken += 1
        else:
            self.faults.append(f"{name}: {answer[:80]!r} … {answer[-80:]!r} ({len(answer)} bytes)")


def is_whole(answer: bytes, kind: Kind) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 %d " % kind.status):
        return False
    if b"chunked" in head.lower():
        return body.endswith(b"\r\n0\r\n\r\n") and kind.ends in body
    return f"content-length: {len(body)}".encode() in head.lower() and body.endswith(kind.ends)


class Row(NamedTuple):
    """A dispatch as it stands in the ledger file."""

    rowid: int
    operation: str
    upstream: str
    digest: str
    instance: str
    state: str
    settle_s: float
    changed_s: float
    unknown_since_s: float


class Witness:
    """What arrived at the provider, and what the ledger file said at that moment to somebody who only reads it."""

    def __init__(self, data_dir: Path) -> None:
        self.arrivals: Counter[str] = Counter()
        self.unclaimed: list[bytes] = []
        """Bodies that arrived without a committed row."""
        self._key = bytes.fromhex((data_dir / "keys" / "digest.key").read_text())
        self._path = data_dir / "ledger.sqlite3"
        self._db = self._connect()
        self._claimed: set[str] = set()
        self._read_to = 0

    def close(self) -> None:
        self._db.close()

    def reopen(self) -> None:
        """Let go of the file; the next to read it recovers its log.

        What a killed writer had committed but not yet told its readers is seen only after that.
        """
        self.close()
        self._db = self._connect()

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, isolation_level=None)

    def digest(self, body: bytes) -> str:
        return hashlib.blake2b(hashlib.sha256(body).digest(), key=self._key, digest_size=16).hexdigest()

    def on_request(self, received: Received) -> None:
        digest = self.digest(received.body)
        self.arrivals[digest] += 1
        if digest not in self._claimed:
            self._read_new_rows()
        if digest not in self._claimed:
            self.unclaimed.append(received.body)

    def _read_new_rows(self) -> None:
        # Rows are never removed here and a row's digest never changes, so each needs to be read once only.
        query = "SELECT rowid, request_digest FROM dispatches WHERE rowid > ?"
        for rowid, digest in self._db.execute(query, (self._read_to,)).fetchall():
            self._claimed.add(digest)
            self._read_to = max(self._read_to, rowid)

    def rows(self, where: str = "true") -> dict[str, Row]:
        columns = "rowid, operation, upstream, request_digest, instance, state"
        columns += ", settle_s, changed_s, unknown_since_s"
        found = self._db.execute(f"SELECT {columns} FROM dispatches WHERE {where}").fetchall()
        return {row.operation: row for row in itertools.starmap(Row, found)}

    def leases(self) -> dict[str, float]:
        return dict(self._db.execute("SELECT instance, lease_until_s FROM instances").fetchall())


class Keeper:
    """Keeps every spool segment: a hard link goes on showing what is written to it, also when it is removed there."""

    def __init__(self, spool: Path, kept: Path) -> None:
        self._spool, self._kept = spool, kept
        kept.mkdir()

    def look(self) -> None:
        for path in self._spool.glob("*-*"):
            # Kept already, or renamed while we looked: then it has its other name at the next look.
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.link(path, self._kept / path.stem)

    async def go_on_looking(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(0.005)

    def segments(self) -> Iterator[tuple[str, list[AnyEvent]]]:
        """Names and events. A last line that its writer could not finish is no event."""
        decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
        for path in sorted(self._kept.iterdir()):
            *lines, _torn = path.read_bytes().split(b"\n")
            yield f"{path.name}.jsonl", [decoder.decode(line) for line in lines]


@dataclass(slots=True)
class Run:
    """The notes of the whole run."""

    sidecar: Sidecar
    load: Load
    witness: Witness
    keeper: Keeper
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))
    in_doubt: set[str] = field(default_factory=set)
    """Digests of the rows that were open at a kill."""
    observer_kills: int = 0
    observer_stops: int = 0
    row_faults: list[str] = field(default_factory=list)
    exit_code: int = -1

    def surplus(self) -> set[str]:
        """Those in doubt whose request never arrived."""
        return self.in_doubt - self.witness.arrivals.keys()

    async def kill_proxy(self) -> None:
        """Kill the proxy at a random moment, start it again, and follow every row that it left."""
        moment_s = self.rng.uniform(0.05, 0.6)
        await asyncio.sleep(moment_s)
        self.keeper.look()
        await self.sidecar.kill()
        self.witness.reopen()
        left = self.witness.rows()
        leases = self.witness.leases()
        doubtful = [row for row in left.values() if row.state in OPEN or row.state == "UNKNOWN"]
        self.in_doubt.update(row.digest for row in doubtful)
        print(f"proxy killed after {moment_s:.3f} s: {len(left)} rows, {len(doubtful)} open")
        self.witness.reopen()  # a connection that has read would spare the sidecar the recovery
        await self.sidecar.start()
        await self._follow(
            {row.operation: [row.state] for row in doubtful}, max(row.rowid for row in left.values())
        )
        self._compare(left, self.witness.rows(), leases)

    async def _follow(self, ways: dict[str, list[str]], last_rowid: int) -> None:
        """Watch rows of the dead until none is unsettled; each may only go the way of `ORDER`."""
        unsettled = ", ".join(f"'{state}'" for state in (*OPEN, "UNKNOWN"))
        async for _ in patience("the end of every row that a dead proxy left"):
            now = self.witness.rows(f"rowid <= {last_rowid} AND state IN ({unsettled})")
            for operation, row in now.items():
                ways.setdefault(operation, []).append(row.state)
            if not now:
                break
        for operation, way in ways.items():
            ranks = [ORDER[state] for state in way]
            if ranks != sorted(ranks):
                self.row_faults.append(f"{operation} went {way}")

    def _compare(self, left: Mapping[str, Row], now: Mapping[str, Row], leases: Mapping[str, float]) -> None:
        for operation, before in left.items():
            after = now.get(operation)
            if after is None:
                self.row_faults.append(f"{before} is lost")
            elif before.state not in ORDER or before.state == "ABANDONED":
                if after != before:
                    self.row_faults.append(f"{before} was final and is {after}")
            elif after.state != "ABANDONED":
                self.row_faults.append(f"{before} is not abandoned but {after}")
            elif before.state in OPEN and after.unknown_since_s < leases[before.instance]:
                self.row_faults.append(f"{after} was UNKNOWN before its lease ran out")
            elif after.changed_s - after.unknown_since_s < after.settle_s:
                self.row_faults.append(f"{after} was ABANDONED before it had settled")

    async def kill_observer(self) -> None:
        """Kill the observer, every other time in the middle of a load; traffic must not see it."""
        await asyncio.sleep(self.rng.uniform(0.05, 0.3))
        pid = await self._living_observer()
        loading = self.rng.random() < 0.5
        if loading:
            await self._until_it_loads(pid)
            await asyncio.sleep(self.rng.uniform(0.0, 0.03))  # about as long as a load takes
        self.keeper.look()
        os.kill(pid, signal.SIGKILL)
        self.observer_kills += 1
        print(f"observer {pid} killed {'while it loaded' if loading else 'at any moment'}")
        await self.load.batch()
        async for _ in patience("a new observer"):
            if self.sidecar.observer_pid() not in (None, pid):
                break

    async def stop_observer(self) -> None:
        """Freeze the observer for as long as a batch takes."""
        pid = await self._living_observer()
        os.kill(pid, signal.SIGSTOP)
        self.observer_stops += 1
        print(f"observer {pid} stopped")
        await self.load.batch()
        os.kill(pid, signal.SIGCONT)

    async def _living_observer(self) -> int:
        async for _ in patience("an observer"):
            pid = self.sidecar.observer_pid()
            if pid is not None:
                return pid
        raise AssertionError  # patience fails before

    async def _until_it_loads(self, pid: int) -> None:
        async for _ in patience("a load"):
            if is_loading(pid):
                return

    async def all_rounds(self) -> None:
        for number in range(KILLS):
            if number % 2 == 0:
                await self.kill_proxy()
            else:
                await self.kill_observer()
            if number % 5 == 4:
                await self.stop_observer()
            if self.load.faults:
                return


def is_loading(observer_pid: int) -> bool:
    """The observer has its lock file open as long as it loads, and only then."""
    for descriptor in Path(f"/proc/{observer_pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we looked
            if descriptor.readlink().name == ".loading":
                return True
    return False


@contextmanager
def stuck_provider() -> Iterator[str]:
    """The address of a listener that accepts nobody: its queue is full, so connecting never ends."""
    with socket.socket() as listener, socket.socket() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting.connect(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def crash_and_recover(place: Path) -> Run:
    data_dir = place / "data"
    data_dir.mkdir()
    async with Simulator(SCENARIO) as simulator:
        with stuck_provider() as stuck:
            upstreams = {"openai": simulator.url, "anthropic": simulator.url, "stuck": stuck}
            sidecar = Sidecar(data_dir, upstreams)
            await sidecar.start()
            try:
                run = Run(
                    sidecar, Load(sidecar), Witness(data_dir), Keeper(data_dir / "spool", place / "kept")
                )
                simulator.on_request = run.witness.on_request
                watching = asyncio.create_task(run.keeper.go_on_looking())
                async with run.load.running():
                    await run.all_rounds()
                run.exit_code = await sidecar.stop()
                watching.cancel()
            finally:
                if sidecar.process.returncode is None:
                    await sidecar.kill()
    run.keeper.look()
    return run


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def tell(line: str) -> None:
        """On the terminal also where nothing fails: a seed that is not seen cannot be used again."""
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", end=" ")

    tell(f"CRASHES={KILLS} CRASH_SEED={SEED}")
    run = asyncio.run(crash_and_recover(tmp_path_factory.mktemp("crash")))
    tell(
        f"killed: proxy {run.sidecar.kills}, observer {run.observer_kills} (and stopped {run.observer_stops}); answers: "
        f"{run.load.whole} whole, {run.load.broken} broken by a kill; arrived: {run.witness.arrivals.total()}; "
        f"open at a kill: {len(run.in_doubt)} rows, {len(run.surplus())} of them never left"
    )
    yield run
    run.witness.close()


def test_the_run_met_what_it_is_about(run: Run) -> None:
    assert run.sidecar.kills + run.observer_kills == KILLS
    assert run.surplus() or KILLS < 20, "no request was claimed and could not leave"
    assert run.in_doubt - run.surplus(), "no request was under way when its proxy was killed"
    assert run.load.whole > KILLS * CLIENTS


def test_every_request_was_on_disk_before_it_left(run: Run) -> None:
    assert run.witness.unclaimed == []


def test_every_request_has_one_row_and_reaches_the_provider_at_most_once(run: Run) -> None:
    rows = run.witness.rows().values()
    assert twice(row.digest for row in rows) == {}
    assert twice(run.witness.arrivals.elements()) == {}
    assert run.witness.arrivals.keys() - {row.digest for row in rows} == set()


def test_nothing_illegal_reached_the_provider(run: Run) -> None:
    illegal = set(map(run.witness.digest, run.load.illegal))
    assert illegal
    assert illegal & run.witness.arrivals.keys() == set()


def test_every_whole_answer_is_of_a_request_that_arrived(run: Run) -> None:
    answered = set(map(run.witness.digest, run.load.answered - run.load.illegal))
    assert answered - run.witness.arrivals.keys() == set()
    delivered = {row.digest for row in run.witness.rows("state IN ('COMMITTED', 'REFUSED')").values()}
    assert delivered - run.witness.arrivals.keys() == set()


def test_rows_of_a_dead_proxy_become_unknown_when_its_lease_ran_out_and_abandoned_when_settled(
    run: Run,
) -> None:
    assert run.row_faults == []


def test_nothing_stays_open(run: Run) -> None:
    assert run.exit_code == 0
    assert [row for row in unsettled(run) if row.upstream != "stuck"] == []


def test_nothing_stays_open_that_was_still_connecting_at_the_end(run: Run) -> None:
    assert [row for row in unsettled(run) if row.upstream == "stuck"] == []


def unsettled(run: Run) -> list[Row]:
    return [row for row in run.witness.rows().values() if row.state in ("PREPARED", *OPEN, "UNKNOWN")]


def test_traffic_does_not_notice_what_happens_to_the_observer(run: Run) -> None:
    assert run.load.faults == []


def test_every_segment_is_in_the_evidence_once(run: Run) -> None:
    assert [path.name for path in (run.sidecar.data_dir / "spool").iterdir()] == [".loading"]
    with connect_readonly(run.sidecar.data_dir / "evidence") as evidence:
        # By sums, because a segment that spans midnight has its rows and its name in the files of two days.
        loaded = dict(
            evidence.execute("SELECT name, sum(rows)::BIGINT FROM segments GROUP BY name").fetchall()
        )
        counts = [evidence.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0] for table in TABLES]
    kept = {name: len(events) for name, events in run.keeper.segments() if events}
    assert len(kept) > run.sidecar.kills
    assert {name: loaded.get(name) for name in kept} == kept
    assert sum(counts) == sum(loaded.values())


def test_every_event_is_in_the_evidence_once(run: Run) -> None:
    spooled = [event for _, events in run.keeper.segments() for event in events]
    moves = Counter(
        (event.operation, event.before, event.after) for event in spooled if isinstance(event, StateChanged)
    )
    with connect_readonly(run.sidecar.data_dir / "evidence") as evidence:
        ended = [each for (each,) in evidence.execute("SELECT operation FROM exchange_ended").fetchall()]
        recorded = Counter(
            evidence.execute('SELECT operation, "before", "after" FROM state_changed').fetchall()
        )
        lost = evidence.execute("SELECT * FROM events_dropped").fetchall()
        failures = evidence.execute("SELECT * FROM failure_counted").fetchall()
    assert twice(ended) == {}
    assert twice(recorded.elements()) == {}
    assert moves - recorded == Counter()
    assert (lost, failures) == ([], [])


def twice(each: Iterable[Any]) -> dict[Any, int]:
    """What occurs more than once, and how often."""
    return {value: count for value, count in Counter(each).items() if count > 1}
