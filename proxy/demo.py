"""`turngate demo`: an agent, the sidecar and a simulated provider on this machine; no key, no network.

What a step shows comes from its two ends, not from the sidecar: the simulator counts what reached the provider, the
agent reads what came back. The evidence is asked last, and must tell the same.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
import duckdb
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from turngate.proxy.demo_agent import (
    CHAT,
    FOREIGN_ERROR,
    MESSAGES,
    Got,
    History,
    Json,
    Kind,
    Move,
    Wire,
    answer_calls,
    ask,
    lose_result,
    repeat_result,
    send,
    speak_first,
    trim,
)
from turngate.proxy.rollout import Stage
from turngate.proxy.simulator import Received, Simulator
from turngate.telemetry.queries import connect_readonly, run_query

PORTS: Final = (8787, 8788, 8789)
"""Data, metrics, admin as `turngate serve` has them; another free port stands in for one that is taken."""

PACE_S: Final = 0.3
"""On a terminal a step takes at least this long: a table that fills in one blink cannot be watched."""

# Bounds of what takes a moment: on a machine so slow that one runs out the demo fails and says where.
START_S: Final = 30.0
STEP_S: Final = 20.0
EVIDENCE_S: Final = 20.0
STOP_S: Final = 15.0

POLL_S: Final = 0.1
LOG_LINES: Final = 10


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


@dataclass(frozen=True, slots=True)
class Step:
    """A line of the table: what the agent sends, what it must get, what the provider is told to play."""

    wire: Wire
    does: str
    move: Move
    kind: Kind = "passed"
    reason: str = ""
    plays: Json = field(default_factory=dict)
    """A step of the simulator's scenario."""


HELLO: Final = {"answer": {"text": "Good morning! What can I do for you?"}}
CALLS: Final = {
    "answer": {
        "text": "Let me look at both.",
        "calls": [
            {"name": "get_weather", "arguments": {"city": "Oslo"}},
            {"name": "get_weather", "arguments": {"city": "Bergen"}},
        ],
    }
}
GREET: Final = ask("Good morning!")
WEATHER: Final = ask("How is the weather in Oslo and Bergen?")

# Both cuts come when the first call's arguments have begun: `{"city":"Osl`.
CUT_CALLS: Final = CALLS | {"fault": {"cut_at_byte": 2300}}
RESET_CALLS: Final = CALLS | {"fault": {"cut_at_byte": 1600, "how": "reset"}}
HALF_CALL: Final = {"answer": {"calls": [{"name": "get_weather", "arguments": ['{"city": ', '"Os']}]}}
NO_END: Final = HELLO | {"fault": {"cut_at_byte": 1500, "clean_end": True}}
OVERLOADED: Final = HELLO | {"fault": {"error_event_after": 6}}

STEPS: Final = (
    Step(CHAT, "says hello", GREET, plays=HELLO),
    Step(CHAT, "asks, and gets two tool calls at once", WEATHER, plays=CALLS),
    Step(CHAT, "sends both results, in another order", answer_calls),
    Step(CHAT, "lost the calls when it cut its history", trim, "refused", "result.orphan"),
    Step(CHAT, "forgets the result of one call", lose_result, "refused", "call.unanswered"),
    Step(CHAT, "sends one result twice", repeat_result, "refused", "result.duplicate"),
    Step(CHAT, "asks; cut off inside a tool call", WEATHER, "retracted", "stream.truncated", CUT_CALLS),
    Step(
        CHAT, "asks; a call ends in half its JSON", WEATHER, "retracted", "call.arguments_unclosed", HALF_CALL
    ),
    Step(CHAT, "says hello; it ends in mid-sentence", GREET, "retracted", "stream.no_stop", NO_END),
    Step(MESSAGES, "says hello", GREET, plays=HELLO),
    Step(MESSAGES, "asks, and gets two tool calls at once", WEATHER, plays=CALLS),
    Step(MESSAGES, "sends both results, in another order", answer_calls),
    Step(MESSAGES, "puts text in front of the results", speak_first, "refused", "result.misplaced"),
    Step(MESSAGES, "lost the calls when it cut its history", trim, "refused", "result.orphan"),
    Step(MESSAGES, "asks; reset inside a tool call", WEATHER, "retracted", "stream.truncated", RESET_CALLS),
    Step(MESSAGES, "says hello; an error event follows", GREET, "retracted", FOREIGN_ERROR, OVERLOADED),
)


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was taken: what reached the provider, and what the agent got."""

    step: Step
    received: tuple[Received, ...]
    got: Got

    @property
    def provider(self) -> str:
        """What the provider saw and did, by its own count."""
        if not self.received:
            return "never saw it"
        last = self.received[-1]
        if last.status != 200:
            return f"refused it ({last.status})"
        return "broke off" if last.ended == "cut" else "answered"

    @property
    def fault(self) -> str:
        """How this differs from what the table promises; empty where it does not."""
        step, got = self.step, self.got
        if (got.kind, got.reason) != (step.kind, step.reason):
            return f"the app should see {Got(step.kind, step.reason)}; it saw {got}"
        if len(self.received) != (step.kind != "refused"):
            return f"{len(self.received)} requests reached the provider"
        return "a tool call that is not whole reached the app" if got.partial_calls else ""


def run(*, stay: bool) -> int:
    """The whole demo. `stay`: keep running for one's own app until Ctrl-C.

    Returns the exit code: 0 all as promised, 1 not, 128 + signal when interrupted before that is known.
    """
    try:
        return asyncio.run(_Demo().run(stay=stay))
    except DemoError as error:
        print(f"turngate demo: {error}", file=sys.stderr)
        return 1


class _Demo:
    """Runs the steps, and ends in order on a signal, so that no process and no folder is left."""

    def __init__(self) -> None:
        self._done: list[Done] = []
        self._code: int | None = None

    async def run(self, *, stay: bool) -> int:
        demo = asyncio.ensure_future(self._all(stay=stay))
        caught: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            caught.append(number)
            if len(caught) == 1:  # a second one must not break off the tidying, which is bounded
                demo.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        try:
            await demo
        except asyncio.CancelledError:
            if not caught:
                raise
        return 128 + caught[0] if self._code is None else self._code

    async def _all(self, *, stay: bool) -> None:
        with tempfile.TemporaryDirectory(prefix="turngate-demo-", ignore_cleanup_errors=True) as folder:
            data_dir = Path(folder)
            async with Simulator() as simulator, _sidecar(data_dir, simulator.url) as sidecar:
                with _shown(self._done) as show:
                    await self._take_steps(simulator, sidecar, show)
                faults = [f"{done.step.does}: {done.fault}" for done in self._done if done.fault]
                faults += await self._sum_up(data_dir / "evidence")
                self._code = 1 if faults else 0
                for fault in faults:
                    print(f"NOT AS PROMISED  {fault}", flush=True)
                if stay:
                    await _stay(simulator, sidecar, data_dir)

    async def _take_steps(self, simulator: Simulator, sidecar: "_Sidecar", show: Callable[[], None]) -> None:
        history: History = ()
        pace_s = PACE_S if sys.stdout.isatty() else 0.0
        timeout = aiohttp.ClientTimeout(total=STEP_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for step in STEPS:
                pace = asyncio.create_task(asyncio.sleep(pace_s))
                simulator.use({"steps": [step.plays] if step.plays else []})
                before = len(simulator.requests)
                sent = step.move(history)
                got = await send(session, sidecar.url, step.wire, sent)
                if got.kind == "passed":
                    history = (*sent, got.turn)
                self._done.append(Done(step, tuple(simulator.requests[before:]), got))
                await pace
                show()

    async def _sum_up(self, evidence_dir: Path) -> list[str]:
        """Print the sums of both ends and the evidence; how the two differ, if they do."""
        seen = Counter(done.got.kind for done in self._done)
        evidence = await _evidence(evidence_dir, len(self._done))
        received = [received for done in self._done for received in done.received]
        illegal = sum(each.status != 200 for each in received)
        partial = sum(done.got.partial_calls for done in self._done)
        print(f"\n{len(self._done)} requests, {len(received)} reached the provider: {_counts(seen)}.")
        print(
            f"illegal sequences sent to the provider: {illegal} · partial tool calls released: {partial}"
            f" · retracted previews: {evidence.retracted_previews} · tool calls withheld: {evidence.withheld_calls}",
            flush=True,
        )
        if evidence.outcomes == seen:
            return []
        return [f"the evidence tells {_counts(evidence.outcomes)}; the app saw {_counts(seen)}"]


def _counts(counter: Counter[str] | Counter[Kind]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counter.items())) or "nothing"


# The evidence.


@dataclass(frozen=True, slots=True)
class _Evidence:
    outcomes: Counter[str]
    retracted_previews: int
    withheld_calls: int


async def _evidence(evidence_dir: Path, requests: int) -> _Evidence:
    """What was written down, as soon as it tells of so many requests, or after EVIDENCE_S. Raises DemoError."""
    until_s = time.monotonic() + EVIDENCE_S
    while True:
        evidence = await asyncio.to_thread(_ask_evidence, evidence_dir)
        if evidence.outcomes.total() >= requests or time.monotonic() > until_s:
            return evidence
        await asyncio.sleep(POLL_S)


def _ask_evidence(evidence_dir: Path) -> _Evidence:
    try:
        with connect_readonly(evidence_dir) as database:
            ask_for = partial(run_query, database)
            outcomes = ask_for("SELECT outcome, count(*) FROM exchange_ended GROUP BY ALL").rows
            retracted = ask_for("SELECT count(*) FROM preview_retracted WHERE enforced").rows
            withheld = ask_for("SELECT count(*) FROM call_decided WHERE decision = 'withheld'").rows
    except duckdb.Error as error:
        raise DemoError(f"cannot read the evidence: {error}") from error
    return _Evidence(Counter(dict(outcomes)), retracted[0][0], withheld[0][0])


# The sidecar.

ANNOUNCED: Final = re.compile(r"listens on (?P<url>\S+).*metrics +(?P<metrics>\S+)\n", re.DOTALL)
"""What `turngate serve` says when it takes requests."""


@dataclass(frozen=True, slots=True)
class _Sidecar:
    process: Process
    url: str
    metrics_url: str


@contextlib.asynccontextmanager
async def _sidecar(data_dir: Path, provider_url: str) -> AsyncIterator[_Sidecar]:
    """`turngate serve` as a child that takes requests; it has ended when the context is left. Raises DemoError."""
    listen, metrics, admin = (f"127.0.0.1:{_port(port)}" for port in PORTS)
    arguments = [
        *("serve", "--stage", Stage.ENFORCE_TOOLS, "--data-dir", str(data_dir)),
        *("--listen", listen, "--metrics", metrics, "--admin", admin),
        *("--upstream", f"openai={provider_url}", "--upstream", f"anthropic={provider_url}"),
    ]
    # Only what is said here counts: no settings of the user's, from environment or folder.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TURNGATE_")}
    log = data_dir / "sidecar.log"
    with log.open("wb") as written:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "turngate", *arguments),
            stdin=DEVNULL,
            stdout=written,
            stderr=written,
            env=environment,
            cwd=data_dir,
        )
    try:
        yield await _announced(process, log)
    finally:
        await _stop(process)


def _port(preferred: int) -> int:
    """The preferred port of loopback if nobody has it; else 0, which is any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            return 0  # somebody has it
    return preferred


async def _announced(process: Process, log: Path) -> _Sidecar:
    """Wait until the sidecar says where it listens. Raises DemoError with its last words if it does not."""
    until_s = time.monotonic() + START_S
    while process.returncode is None and time.monotonic() < until_s:
        if found := ANNOUNCED.search(await asyncio.to_thread(log.read_text)):
            return _Sidecar(process, found["url"], found["metrics"])
        await asyncio.sleep(POLL_S)
    raise DemoError(f"the sidecar did not start\n{_last_lines(log)}")


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


async def _stop(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _stay(simulator: Simulator, sidecar: _Sidecar, data_dir: Path) -> None:
    """Tell how to point one's own app here, and wait until the sidecar ends or a signal comes."""
    simulator.use(None)
    simulator.on_ended = simulator.requests.remove  # it may run for days
    command = sys.argv[0] if Path(sys.argv[0]).name == "turngate" else "python -m turngate"
    Console(highlight=False, soft_wrap=True).print(
        f"""
[bold]Now yours.[/] The simulated provider takes any key and calls the tools that you declare.
  export OPENAI_BASE_URL={sidecar.url}/v1 OPENAI_API_KEY=any
  export ANTHROPIC_BASE_URL={sidecar.url} ANTHROPIC_API_KEY=any
  curl {sidecar.url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "gpt-4.1", "messages": [{{"role": "tool", "tool_call_id": "call_9", "content": "14"}}]}}'
  curl {sidecar.metrics_url}
  {command} query --data-dir {data_dir} "SELECT outcome, count(*) FROM exchange_ended GROUP BY ALL"
Ctrl-C ends it."""
    )
    await sidecar.process.wait()
    raise DemoError("the sidecar ended by itself")


# The table.

LINE: Final = "{:<9} {:<39} {:<15} {}"


@contextlib.contextmanager
def _shown(taken: Sequence[Done]) -> Iterator[Callable[[], None]]:
    """A live table on a terminal, lines elsewhere; to be called after each step."""
    if not sys.stdout.isatty():
        print(LINE.format("API", "the app …", "the provider …", "the app gets"), flush=True)
        yield lambda: print(_line(taken[-1]), flush=True)
        return
    with Live(_table(taken), auto_refresh=False) as live:
        yield lambda: live.update(_table(taken), refresh=True)


def _line(done: Done) -> str:
    line = LINE.format(done.step.wire.name, done.step.does, done.provider, str(done.got))
    return line + "  NOT AS PROMISED" * bool(done.fault)


STYLES: Final = {"passed": "green", "refused": "yellow", "retracted": "magenta", "broken": "red"}


def _table(taken: Sequence[Done]) -> Table:
    table = Table("API", "the app …", "the provider …", "the app gets", box=box.SIMPLE_HEAD)
    for done in taken:
        got = Text(str(done.got), "red reverse" if done.fault else STYLES[done.got.kind])
        table.add_row(done.step.wire.name, done.step.does, done.provider, got)
    for step in STEPS[len(taken) :]:
        table.add_row(step.wire.name, step.does, "", "", style="dim")
    return table
