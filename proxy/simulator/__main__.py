"""`python -m turngate.proxy.simulator`: a provider to point an SDK at."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

from turngate.proxy.simulator.http import Received
from turngate.proxy.simulator.scenario import SCENARIOS, Scenario, ScenarioError, Server, load
from turngate.proxy.simulator.server import Simulator

GREEN: Final = "\x1b[32m"
YELLOW: Final = "\x1b[33m"
RED: Final = "\x1b[31m"
RESET: Final = "\x1b[0m"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until interrupted; returns the exit code (1: the address cannot be used; argparse exits with 2)."""
    parser = argparse.ArgumentParser(
        prog="python -m turngate.proxy.simulator", description="A provider that lives on this machine."
    )
    shipped = ", ".join(sorted(path.name for path in SCENARIOS.glob("*.json")))
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default: any free port")
    parser.add_argument("--scenario", metavar="FILE", help=f"a JSON file, or one that comes along: {shipped}")
    parser.add_argument("--server", choices=get_args(Server), help="whose refusals; default: the scenario's")
    options = parser.parse_args(arguments)
    host, _, port = options.listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        parser.error(f"--listen {options.listen}: should be HOST:PORT")
    try:
        scenario = load(_scenario_file(options.scenario))
    except ScenarioError as exc:
        parser.error(str(exc))
    if options.server is not None:
        scenario = scenario.model_copy(update={"server": options.server})
    try:
        asyncio.run(_serve(scenario, host.strip("[]"), int(port)))
    except OSError as exc:
        print(f"cannot listen on {options.listen}: {exc}", file=sys.stderr)
        return 1
    return 0


def _scenario_file(name: str | None) -> Path | None:
    if name is None:
        return None
    shipped = SCENARIOS / name
    return shipped if shipped.is_file() and not Path(name).exists() else Path(name)


async def _serve(scenario: Scenario, host: str, port: int) -> None:
    simulator = Simulator(scenario, host=host, port=port)
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def show(received: Received) -> None:
        print(line(received, coloured=coloured), flush=True)
        # It may run for days: what is shown is forgotten.
        simulator.requests.remove(received)

    simulator.on_ended = show
    stopped = asyncio.Event()
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(interrupt, stopped.set)
    async with simulator:
        print(
            f"provider simulator on {simulator.url}{'  ' * bool(scenario.description)}{scenario.description}"
        )
        print(f"  export OPENAI_BASE_URL={simulator.url}/v1 OPENAI_API_KEY=any")
        print(f"  export ANTHROPIC_BASE_URL={simulator.url} ANTHROPIC_API_KEY=any", flush=True)
        await stopped.wait()


def line(received: Received, *, coloured: bool) -> str:
    """One request and its end, on one line whatever the client put into its path."""
    path = "".join(character if character.isprintable() else "?" for character in received.path)
    text = f"{received.method} {path} {received.status or '-'} {received.bytes_sent} bytes {received.ended}"
    if not coloured:
        return text
    failed = received.status is None or received.status >= 400
    colour = RED if failed else GREEN if received.ended == "complete" else YELLOW
    return f"{colour}{text}{RESET}"


if __name__ == "__main__":
    sys.exit(main())
