"""What Turngate costs: side by side with other proxies, its two processes apart, with something broken, and its claims.

    make bench                                     # about eight minutes with all peers
    python tests/bench/bench.py --quick            # one round, fewer streams
    python tests/bench/bench.py -- --peers nginx,aiohttp --workload small,agent   # words behind -- go to the harness

The harness that compares proxies (mock provider, load generator, peers) is read from $TURNGATE_SHARED/bench; its
README says how it measures and how to install the peers. Everything runs on 127.0.0.1, bounded in count and time.
"""

import argparse
import os
import resource
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
HARNESS = Path(os.environ.get("TURNGATE_SHARED", HERE.parents[1] / ".." / "shared")).resolve() / "bench"
TICK = os.sysconf("SC_CLK_TCK")
MOCK_CORE, PROXY_CORE = "0", "1"
STAGES = ("off", "observe", "enforce-tools")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of the comparison")
    parser.add_argument("harness", nargs="*", help="words for the harness, behind --")
    options = parser.parse_args()
    if not (HARNESS / "bench").exists():
        sys.exit(f"no harness in {HARNESS}: set TURNGATE_SHARED to the folder that holds bench/")
    words = [*options.harness, *(["--quick"] if options.quick else [])]
    compare(words)
    print("\n## Turngate's two processes apart (CPU us per request)\n")
    apart(seconds=2.0 if options.quick else 5.0)
    print("\n## Observed traffic while something of Turngate's is broken (small requests)\n")
    faults(seconds=2.0 if options.quick else 4.0)
    print("\n## Durable claims\n", flush=True)
    subprocess.run([sys.executable, HERE / "claims.py"], check=True)


def serve(stage: str, port: str, mock: str, data_dir: str) -> list[str]:
    """The command line of a sidecar in front of the mock provider."""
    free = "127.0.0.1:0"
    return [
        *(sys.executable, "-m", "turngate", "serve", "--stage", stage, "--listen", f"127.0.0.1:{port}"),
        *("--metrics", free, "--admin", free, "--data-dir", data_dir),
        *(
            "--upstream",
            f"openai=http://127.0.0.1:{mock}",
            "--upstream",
            f"anthropic=http://127.0.0.1:{mock}",
        ),
    ]


def compare(words: list[str]) -> None:
    """The shared comparison, with the sidecar as two more proxies."""
    with tempfile.TemporaryDirectory(prefix="turngate-bench-") as folder:
        starts = []
        for stage in STAGES[1:]:
            command = shlex.join(serve(stage, "{port}", "{mock}", f"{folder}/{stage}"))
            starts += ["--start", f"{stage}={command}"]
        subprocess.run([HARNESS / "bench", *starts, *words], check=True)


def apart(seconds: float) -> None:
    """CPU of proxy and observer per request, each by its own process's clock ticks."""
    sys.path.insert(0, str(HARNESS))
    import bodies  # type: ignore[import-not-found]  # the harness's own modules
    import loadgen  # type: ignore[import-not-found]
    import uvloop

    workloads = {
        "small": (bodies.short("openai"), 32),
        "agent": (bodies.conversation("openai", 200, 250_000, "last"), 8),
    }
    print("| stage | workload | proxy | observer | requests |\n|---|---|---|---|---|")
    for stage in STAGES:
        folder = tempfile.TemporaryDirectory(prefix="turngate-bench-")
        with folder as name, _mock() as mock, _sidecar(stage, mock, Path(name)) as (process, port):
            observer = _child_of(process.pid)
            for name, (body, connections) in workloads.items():

                def load(duration: float, body: object = body, connections: int = connections) -> int:
                    run = loadgen.Load(
                        port, "/v1/chat/completions", {}, body, conc=connections, duration=duration
                    )
                    return sum(1 for record in uvloop.run(run.run()).records if not record.error)

                load(1.0)
                before = _ticks(process.pid), _ticks(observer)
                requests = load(seconds)
                time.sleep(2.0)  # what is spooled is loaded within a second
                spent = _ticks(process.pid) - before[0], _ticks(observer) - before[1]
                cells = [f"{1e6 * ticks / TICK / max(requests, 1):,.0f}" for ticks in spent]
                print(f"| {stage} | {name} | {cells[0]} | {cells[1]} | {requests:,} |", flush=True)


def faults(seconds: float) -> None:
    """CPU and latency of observed requests with a broken ledger, spool, evidence or observer, against a healthy proxy."""
    sys.path.insert(0, str(HARNESS))
    import bodies
    import loadgen
    import uvloop

    print(
        "| what is broken | CPU us/request, both processes | p50 us | p99 us | not answered |\n|---|---|---|---|---|"
    )
    for name, break_it in FAULTS.items():
        with (
            _mock() as mock,
            tempfile.TemporaryDirectory(prefix="turngate-bench-") as folder,
            _sidecar("observe", mock, Path(folder)) as (process, port),
            break_it(process.pid, Path(folder)),
        ):
            run = loadgen.Load(
                port, "/v1/chat/completions", {}, bodies.short("openai"), conc=8, duration=seconds
            )
            before = _all_ticks(process.pid)
            records = uvloop.run(run.run()).records
            spent_us = 1e6 * (_all_ticks(process.pid) - before) / TICK / max(len(records), 1)
            took = sorted(1e6 * (record.t1 - record.t0) for record in records if not record.error)
            p50, p99 = took[len(took) // 2], took[int(len(took) * 0.99)]
            failed = len(records) - len(took)
            print(f"| {name} | {spent_us:,.0f} | {p50:,.0f} | {p99:,.0f} | {failed} |", flush=True)


@contextmanager
def _healthy(_pid: int, _data_dir: Path) -> Iterator[None]:
    yield


@contextmanager
def _disk_full(pid: int, _data_dir: Path) -> Iterator[None]:
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))  # no file may grow
    yield
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


@contextmanager
def _ledger_locked(_pid: int, data_dir: Path) -> Iterator[None]:
    with closing(sqlite3.connect(data_dir / "ledger.sqlite3", isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        yield
        holder.execute("ROLLBACK")


@contextmanager
def _evidence_corrupt(_pid: int, data_dir: Path) -> Iterator[None]:
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    (data_dir / "evidence" / f"{day}.duckdb").write_bytes(b"no database" * 1000)
    yield


@contextmanager
def _observer_stopped(pid: int, _data_dir: Path) -> Iterator[None]:
    observer = _child_of(pid)
    os.kill(observer, signal.SIGSTOP)
    yield
    os.kill(observer, signal.SIGCONT)


FAULTS = {
    "nothing": _healthy,
    "the disk is full": _disk_full,
    "the ledger is locked": _ledger_locked,
    "the evidence file is corrupt": _evidence_corrupt,
    "the observer hangs": _observer_stopped,
}


@contextmanager
def _mock() -> Iterator[int]:
    port = _free_port()
    command = ["taskset", "-c", MOCK_CORE, sys.executable, str(HARNESS / "mock.py"), "--port", str(port)]
    with subprocess.Popen(command) as process:
        try:
            _wait(port)
            yield port
        finally:
            process.terminate()


@contextmanager
def _sidecar(stage: str, mock: int, data_dir: Path) -> "Iterator[tuple[subprocess.Popen[bytes], int]]":
    port = _free_port()
    command = ["taskset", "-c", PROXY_CORE, *serve(stage, str(port), str(mock), str(data_dir))]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            _wait(port)
            time.sleep(1.5)  # the observer's imports are not part of a request
            yield process, port
        finally:
            process.terminate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    sys.exit(f"nothing listens on port {port}")


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _all_ticks(pid: int) -> int:
    return _ticks(pid) + _ticks(_child_of(pid))


def _ticks(pid: int) -> int:
    """CPU time of a process with all its threads, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


if __name__ == "__main__":
    main()
