"""What Turngate costs: side by side with other proxies, its two processes apart, and its durable claims.

    make bench                                     # three tables, about six minutes
    python tests/bench/bench.py --quick            # one round, fewer streams
    python tests/bench/bench.py -- --peers nginx,aiohttp --workload small,agent   # words behind -- go to the harness

The harness that compares proxies (mock provider, load generator, peers) is read from $TURNGATE_SHARED/bench; its
README says how it measures and how to install the peers. Everything runs on 127.0.0.1, bounded in count and time.
"""

import argparse
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
        with _mock() as mock, _sidecar(stage, mock) as (process, port):
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
def _sidecar(stage: str, mock: int) -> "Iterator[tuple[subprocess.Popen[bytes], int]]":
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="turngate-bench-") as folder:
        command = ["taskset", "-c", PROXY_CORE, *serve(stage, str(port), str(mock), folder)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                _wait(port)
                time.sleep(1.0)  # the observer's imports are not part of a request
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


def _ticks(pid: int) -> int:
    """CPU time of a process with all its threads, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


if __name__ == "__main__":
    main()
