"""What judging a request costs, by length of its history and by size.

    python tests/bench/judging.py              # the tables of docs/cost-of-judging.md, about a minute
    python tests/bench/judging.py --quick      # fewer repetitions

Bodies are made here: an agent's conversation, one call and one result a turn. CPU time of this process, the least of
several rounds. "cold" meets the body for the first time; "next turn" has judged the conversation twice, one turn earlier.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from turngate.adapters import keys
from turngate.adapters.levels import SERVERS, levels
from turngate.adapters.registry import DIALECTS
from turngate.proxy.judging import Judge
from turngate.validators.rules import Verdict, judge

LENGTHS = (10, 30, 100, 300, 1000)
SIZES = (10_000, 30_000, 100_000, 250_000, 1_000_000, 4_000_000)
SIZED_MESSAGES = 200
WORDS = "the handler returns a value from the cache when the request times out and is tried again "
CHAT = "openai.chat"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    rounds = 5 if parser.parse_args().quick else 25
    for api in DIALECTS:
        print(f"\n### {api}\n")
        print("| messages | KB | keys | decode | rules | cold | next turn | cold, us a message |")
        print("|---:|---:|---:|---:|---:|---:|---:|---:|")
        for messages in LENGTHS:
            show(api, messages, 300 * messages, rounds)
        for size in SIZES:
            show(api, min(SIZED_MESSAGES, size // 200), size, rounds)


def show(api: str, messages: int, size: int, rounds: int) -> None:
    """Print one row; all times in microseconds."""
    dialect, profile = DIALECTS[api], levels(api, SERVERS[api][0])
    body, earlier = conversation(api, messages, size), conversation(api, messages, size, without=2)
    sequence = dialect.parse_request(body)
    assert judge(sequence, profile).verdict is Verdict.LEGAL
    cold = least(lambda: Judge().judge(dialect, body, profile), rounds)
    columns = (
        least(lambda: keys.repeats_key(body), rounds),
        least(lambda: dialect.parse_request(body), rounds),
        least(lambda: judge(sequence, profile), rounds),
        cold,
        next_turn(lambda warm, which: warm.judge(dialect, (earlier, body)[which], profile), rounds),
    )
    cells = " | ".join(f"{column * 1e6:.0f}" for column in columns)
    each = cold * 1e6 / sequence.messages
    print(f"| {sequence.messages} | {len(body) / 1000:.0f} | {cells} | {each:.1f} |", flush=True)


def conversation(api: str, messages: int, size: int, without: int = 0) -> bytes:
    """An agent's legal history of about so many messages and bytes; `without` so many at its end."""
    turns = max(1, (messages - 1) // 2)
    words = (WORDS * (size // turns // len(WORDS) + 1))[: max(1, size // turns - 250)]
    history: list[dict[str, Any]] = [{"role": "user", "content": "find out why it is slow"}]
    for turn in range(turns):
        id_, command = f"call_{turn:06}", {"command": words[: len(words) // 5]}
        told = words[len(words) // 5 :] or "."
        if api == CHAT:
            function = {"name": "shell", "arguments": json.dumps(command)}
            calls = [{"id": id_, "type": "function", "function": function}]
            history.append({"role": "assistant", "content": "I look.", "tool_calls": calls})
            history.append({"role": "tool", "tool_call_id": id_, "content": told})
        else:
            use = {"type": "tool_use", "id": id_, "name": "shell", "input": command}
            result = {"type": "tool_result", "tool_use_id": id_, "content": told}
            history.append({"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]})
            history.append({"role": "user", "content": [result]})
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    tool = (
        {"type": "function", "function": {"name": "shell", "parameters": schema}}
        if api == CHAT
        else {"name": "shell", "input_schema": schema}
    )
    request = {"model": "m", "messages": history[: len(history) - without], "tools": [tool]}
    return json.dumps(request, separators=(",", ":")).encode()


def least(run: Callable[[], object], rounds: int) -> float:
    """Seconds of CPU that one run takes, the least of so many rounds."""
    times = 1
    while measured(run, times) < 0.002:
        times *= 4
    return min(measured(run, times) for _ in range(rounds)) / times


def measured(run: Callable[[], object], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        run()
    return time.process_time() - began


def next_turn(run: Callable[[Judge, int], object], rounds: int) -> float:
    """Seconds of CPU that the second body takes behind the first, seen twice: then its beginning is worked out."""
    best = float("inf")
    for _ in range(rounds * 4):
        warm = Judge()
        run(warm, 0)
        run(warm, 0)
        began = time.process_time()
        run(warm, 1)
        best = min(best, time.process_time() - began)
    return best


if __name__ == "__main__":
    main()
