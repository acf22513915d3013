"""Coding agents from npm, unchanged, at work through `turngate run`: one tool call each, against the simulator.

`make clients` installs them and runs this. What they send goes into docs/clients.md with CLIENTS_WRITE_DOCS=1.
"""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pytest
from running import evidence

from turngate.proxy.simulator import Received, Simulator

HERE: Final = Path(__file__).parent
DOCUMENT: Final = HERE.parents[1] / "docs" / "clients.md"
MODULES: Final = HERE / "node_modules"
PINNED: Final[Mapping[str, str]] = json.loads((HERE / "package.json").read_text())["dependencies"]

by_make = pytest.mark.skipif(os.environ.get("CLIENTS") != "1", reason="run by `make clients`")

WRITING: Final = os.environ.get("CLIENTS_WRITE_DOCS") == "1"

HANG_S: Final = 120.0
"""A bound that only an agent that hangs meets; they take one to ten seconds."""

PROMPT: Final = "Write hello into made.txt."
COMMAND: Final = "echo hello > made.txt"
FINAL: Final = "The file is there now."

Json = dict[str, Any]


# The agents: how each is called, and what keeps it from reaching for anything but its provider.


@dataclass(frozen=True, slots=True)
class Agent:
    name: str
    package: str
    api: str
    """The dialect that the evidence names; empty where the sidecar only relays."""
    model: str
    call: Json
    """What the simulated model calls: a tool of the agent's own."""
    command: tuple[str, ...]
    env: Mapping[str, str]
    config: tuple[str, Json | str] = ("", "")
    """A file below the home folder and what is in it."""


def opencode(name: str, api: str, model: str, small_model: str, provider: Json) -> Agent:
    return Agent(
        name=name,
        package="opencode-ai",
        api=api,
        model=model.partition("/")[2],
        call={"name": "bash", "arguments": {"command": COMMAND, "description": "Write the file"}},
        command=("opencode", "run", "--model", model, PROMPT),
        # The list of models is compiled in too; the rest is for the plugin package that it installs at each start.
        env={"OPENCODE_DISABLE_MODELS_FETCH": "1", "npm_config_offline": "true"},
        config=(
            ".config/opencode/opencode.json",
            # Titles come from the small model, so that their requests can be told from the work.
            {"autoupdate": False, "share": "disabled", "small_model": small_model, "provider": provider},
        ),
    )


def codex(name: str, base_url: str, more: str = "") -> Agent:
    """`base_url` names the setting for the address, which no variable of the environment can give."""
    return Agent(
        name=name,
        package="@openai/codex",
        api="openai.responses",
        model="gpt-5.5",
        call={"name": "exec_command", "arguments": {"cmd": COMMAND}},
        # Its own sandbox needs rights that a container often lacks, and the one command that is run here is ours.
        command=(
            *("sh", "-c", f'exec codex -c {base_url}="$OPENAI_BASE_URL" "$@"', "sh"),
            *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT),
        ),
        env={"CODEX_API_KEY": "sk-test"},
        config=(".codex/config.toml", more + CODEX_ALONE),
    )


CODEX_ALONE: Final = """
model = "gpt-5.5"
check_for_update_on_startup = false
analytics.enabled = false
features.plugins = false
"""

CODEX_PROVIDER: Final = """
model_provider = "own"
model_providers.own.name = "own"
model_providers.own.wire_api = "responses"
model_providers.own.env_key = "OPENAI_API_KEY"
"""

AGENTS: Final = (
    Agent(
        name="Claude Code",
        package="@anthropic-ai/claude-code",
        api="anthropic.messages",
        model="claude-opus-5-5",
        call={"name": "Bash", "arguments": {"command": COMMAND, "description": "Write the file"}},
        command=("claude", "-p", PROMPT, "--model", "claude-opus-5-5", "--allowedTools", "Bash"),
        env={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1"},
    ),
    codex("Codex CLI, built-in provider", "openai_base_url"),
    codex("Codex CLI, provider of its own", "model_providers.own.base_url", CODEX_PROVIDER),
    opencode(
        "OpenCode, Messages",
        "anthropic.messages",
        "anthropic/claude-sonnet-4-5",
        "anthropic/claude-haiku-4-5",
        {"anthropic": {"options": {"baseURL": "{env:ANTHROPIC_BASE_URL}/v1"}}},
    ),
    opencode(
        "OpenCode, Chat Completions",
        "openai.chat",
        "own/large",
        "own/small",
        {
            "own": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
                "models": {"large": {}, "small": {}},
            }
        },
    ),
)


def scenario(agent: Agent) -> Json:
    """One call at the first request to the agent's model, the last word at all others; titles and such: an echo."""
    mine = {"model": agent.model}
    return {
        "steps": [
            {"when": mine, "times": 1, "answer": {"text": "I will write it.", "calls": [agent.call]}},
            {"when": mine, "answer": {"text": FINAL}},
        ]
    }


# A run.


@dataclass(frozen=True, slots=True)
class Run:
    code: int
    out: str
    err: str
    made: str | None
    """What is in the file that the tool call was to make."""
    requests: Sequence[Received]
    elsewhere: Sequence[str]
    """Hosts that the agent asked for beside its provider; it got none of them."""
    data_dir: Path

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        return evidence(self.data_dir, statement)


@dataclass(slots=True)
class DeadEnd:
    """A forward proxy that leads nowhere and notes what it was asked for."""

    asked: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._refuse, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # the agent has given up: it was to get nothing anyway
            target = (await reader.readline()).decode("latin-1").split(" ")[1:2]
            self.asked += target
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()


async def run(agent: Agent, stage: str, folder: Path) -> Run:
    """Let the agent do its work beside a sidecar of its own, in folders of its own."""
    home, work, data_dir = folder / "home", folder / "work", folder / "data"
    for made in (home, work):
        made.mkdir()
    path, content = agent.config
    if path:
        (home / path).parent.mkdir(parents=True)
        (home / path).write_text(content if isinstance(content, str) else json.dumps(content))
    dead_end = DeadEnd()
    async with Simulator(scenario(agent)) as simulator, dead_end.listen() as proxy:
        upstreams = [f"--upstream={name}={simulator.url}" for name in ("openai", "anthropic")]
        turngate = (sys.executable, "-m", "turngate", "run", f"--stage={stage}", f"--data-dir={data_dir}")
        env = environment(home, proxy) | dict(agent.env)
        code, out, err = await finish((*turngate, *upstreams, "--", *agent.command), work, env)
        requests = list(simulator.requests)
    file = work / "made.txt"
    content_made = file.read_text() if file.exists() else None
    return Run(code, out, err, content_made, requests, dead_end.asked, data_dir)


def environment(home: Path, proxy: str) -> dict[str, str]:
    """Nothing of the user's: agents look for keys, settings and sessions in many variables."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
    return {
        "PATH": f"{MODULES / '.bin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "NO_COLOR": "1",
        "PYTHONSAFEPATH": "1",
        **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), "sk-test"),
        **dict.fromkeys(names, proxy),
    }


async def finish(command: Sequence[str], work: Path, env: Mapping[str, str]) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=work, env=env, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), HANG_S)
    finally:
        if process.returncode is None:
            # The agent too; the sidecar is in a session of its own and ends when `turngate run` has.
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


# What must hold.

STAGES: Final = ("off", "observe", "enforce-tools")
RUNS: Final = {f"{agent.name}, {stage}": (agent, stage) for agent in AGENTS for stage in STAGES}

UNREAD: Final = frozenset({"openai.responses"})
"""What has no dialect yet: relayed at every stage, and counted as unjudged."""

TROUBLE: Final = (
    "finding_made",
    "preview_retracted",
    "failure_counted",
    "events_dropped",
)


@by_make
@pytest.mark.parametrize(("agent", "stage"), RUNS.values(), ids=RUNS)
async def test_an_agent_works_through_the_sidecar_and_nothing_is_found(
    agent: Agent, stage: str, tmp_path: Path, seen: dict[str, Run]
) -> None:
    ran = await run(agent, stage, tmp_path)
    assert (ran.code, ran.made) == (0, "hello\n"), ran.out + ran.err
    assert FINAL in ran.out
    assert ran.elsewhere == []
    unread = stage == "off" or agent.api in UNREAD
    unjudged = set(ran.rows("SELECT surface, why FROM request_unjudged"))
    assert unjudged == ({(agent.api, "surface.uncovered")} if unread and stage != "off" else set())
    assert {table: ran.rows(f"FROM {table}") for table in TROUBLE} == {table: [] for table in TROUBLE}
    exchanges = ran.rows("SELECT outcome, status FROM exchange_ended ORDER BY status")
    assert exchanges == [("passed", status) for status in sorted(r.status or 0 for r in ran.requests)]
    read = set(ran.rows("SELECT api, verdict, messages > 0, stream FROM exchange_ended WHERE status = 200"))
    calls = ran.rows("SELECT decision, held FROM call_decided")
    if unread:
        named = "" if stage == "off" and agent.api in UNREAD else agent.api
        assert (read, calls) == ({(named, "unjudged", False, False)}, [])
    else:
        assert read == {(agent.api, "legal", True, True)}
        assert calls == [("released", stage == "enforce-tools")]
    if stage == "observe":
        seen[agent.name] = ran


@pytest.mark.skipif(WRITING, reason="the document is being written")
def test_the_document_is_about_the_versions_that_are_pinned() -> None:
    document = DOCUMENT.read_text()
    missing = [
        f"{package} {version}"
        for package, version in PINNED.items()
        if f"{package} {version}" not in document
    ]
    assert missing == []


# What was seen, for the document.


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[str, Run]]:
    """By agent: a run whose requests are described. At the end they are written down, if that is asked for."""
    runs: dict[str, Run] = {}
    yield runs
    if WRITING:
        assert set(runs) == {agent.name for agent in AGENTS}, "an agent failed: the document stays as it is"
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        DOCUMENT.write_text(f"{before}{BEGIN}\n\n{table(runs)}\n\n{END}{after}")


BEGIN: Final = "<!-- what was seen: written by CLIENTS_WRITE_DOCS=1 make clients -->"
END: Final = "<!-- end of what was seen -->"

USUAL_HEADERS: Final = frozenset(
    {"host", "connection", "content-length", "content-type", "accept", "accept-encoding", "user-agent"}
)
QUOTED: Final = (
    "accept",
    "accept-encoding",
    "user-agent",
    "anthropic-version",
    "anthropic-beta",
    "openai-beta",
)
"""Headers whose values are shown: never a credential, an id or what a machine is called."""


def table(runs: Mapping[str, Run]) -> str:
    facts = [
        {"package": f"{agent.package} {PINNED[agent.package]}"} | describe(runs[agent.name])
        for agent in AGENTS
    ]
    lines = [["", *(agent.name for agent in AGENTS)], ["---"] * (len(AGENTS) + 1)]
    names = dict.fromkeys(name for agent_facts in facts for name in agent_facts)
    lines += [[name, *(agent_facts.get(name, "–") for agent_facts in facts)] for name in names]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def describe(ran: Run) -> dict[str, str]:
    """The facts of a run, by name."""
    paths = Counter(f"`{request.method} {request.path}`: {request.status}" for request in ran.requests)
    # By size: which of two requests at once comes first is chance.
    sent = sorted(
        (request for request in ran.requests if request.body), key=lambda request: len(request.body)
    )
    bodies = [json.loads(request.body) for request in sent]
    largest = max(bodies, key=lambda body: len(turns(body)))
    tools = largest.get("tools", [])
    size = len(json.dumps(tools, ensure_ascii=False, separators=(",", ":")))
    return {
        "requests": "<br>".join(f"{count} × {path}" for path, count in paths.items()),
        "bodies, bytes": " / ".join(f"{len(request.body):,}" for request in sent),
        "streaming": yes_no(all(body.get("stream") is True for body in bodies)),
        "outside the turns": ", ".join(f"`{key}`" for key in ("system", "instructions") if key in largest)
        or "–",
        "turns at the end": " → ".join(turns(largest)),
        "cache marks in them": " / ".join(str(request.body.count(b'"cache_control"')) for request in sent),
        "tools": f"{len(tools)}, {size:,} bytes: {', '.join(f'`{tool_name(tool)}`' for tool in tools)}",
        "other fields": ", ".join(f"`{key}`" for key in largest if key not in KNOWN_FIELDS),
    } | headers(sent[-1])


KNOWN_FIELDS: Final = {"model", "messages", "input", "tools", "stream", "system", "instructions"}


def yes_no(holds: bool) -> str:
    return "all" if holds else "not all"


def turns(body: Json) -> list[str]:
    """Roles in order, with the kinds of their blocks; for Responses the kinds of the items."""
    described = []
    for item in body.get("messages") or body.get("input") or []:
        content = item.get("content")
        kinds = [block.get("type", "?") for block in content] if isinstance(content, list) else []
        kinds += ["text"] * isinstance(content, str) + ["tool_calls"] * ("tool_calls" in item)
        runs = ((kind, len(list(group))) for kind, group in groupby(kinds))
        inside = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in runs)
        described.append(f"{item['role']} ({inside})" if item.get("role") else str(item.get("type")))
    return described


def tool_name(tool: Json) -> str:
    return str(tool.get("name") or tool.get("function", {}).get("name") or tool.get("type"))


def headers(request: Received) -> dict[str, str]:
    given = {name.decode().lower(): value.decode() for name, value in request.headers}
    quoted = {f"`{name}`": f"`{given[name]}`" for name in QUOTED if name in given}
    others = [f"`{name}`" for name in given if name not in USUAL_HEADERS and name not in QUOTED]
    return {"other headers": ", ".join(others)} | quoted
