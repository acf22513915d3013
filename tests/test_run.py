"""`turngate run`: the command has its terminal, its signals and its exit code to itself; the sidecar is only beside."""

import asyncio
import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from running import NOWHERE

from turngate.proxy import run as run_module
from turngate.proxy.config import Address, Settings, Upstream
from turngate.proxy.run import BaseUrls, Choice, RunError, print_exports, summary_line
from turngate.proxy.simulator import Simulator

TURNGATE: Final = (sys.executable, "-P", "-m", "turngate")
NOTHING: Final = tuple(part for name, url in NOWHERE.items() for part in ("--upstream", f"{name}={url}"))
"""No provider can be reached: for commands that ask none."""
HANG_S: Final = 150.0
"""A bound that only what hangs meets."""

BASE_URLS: Final = {name for family in run_module.FAMILIES for name in family.variables}


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """The test's own, without what would be a setting or a base URL, and with all files in `tmp_path`."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TURNGATE_") and name not in BASE_URLS and not name.lower().endswith("_proxy")
    }
    return {**clean, "XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path), **more}


@dataclass(frozen=True, slots=True)
class Ended:
    """What a run came to."""

    code: int
    out: bytes
    err: str

    @property
    def summary(self) -> str:
        lines = [line for line in self.err.splitlines() if line.startswith("turngate: ")]
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("turngate: ")


@contextlib.asynccontextmanager
async def running(tmp_path: Path, *arguments: str, **env: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *TURNGATE,
        "run",
        *arguments,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=environment(tmp_path, **env),
        cwd=tmp_path,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate(
            b""
        )  # with the end of its input, which a command that outlived the run waits for


async def run(tmp_path: Path, *arguments: str, stdin: bytes = b"", **env: str) -> Ended:
    async with running(tmp_path, *arguments, **env) as process:
        out, err = await asyncio.wait_for(process.communicate(stdin), HANG_S)
        assert process.returncode is not None
        return Ended(process.returncode, out, err.decode())


def python(script: str) -> tuple[str, ...]:
    return ("--", sys.executable, "-c", script)


# Base URLs: what the environment and the settings say, and what becomes of it


@dataclass(frozen=True, slots=True)
class Planned:
    """`paths`: the variables' paths at the sidecar; `adopted`: upstreams that the environment named."""

    paths: dict[str, str]
    adopted: dict[str, str]


USUAL: Final = {"OPENAI_BASE_URL": "/v1", "OPENAI_API_BASE": "/v1", "ANTHROPIC_BASE_URL": ""}
PREFIXED: Final = USUAL | dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), "/openai")
PLANS: Final[dict[str, tuple[dict[str, str], dict[str, str], Planned]]] = {
    "nothing said": ({}, {}, Planned(USUAL, {})),
    "an empty variable says nothing": ({"OPENAI_BASE_URL": ""}, {}, Planned(USUAL, {})),
    "a gateway in the environment is the provider": (
        {"OPENAI_BASE_URL": "https://gateway.example/v1"},
        {},
        Planned(USUAL, {"openai": "https://gateway.example"}),
    ),
    "its prefix stays, a slash at its end does not": (
        {"OPENAI_API_BASE": "https://gateway.example/team/v1/"},
        {},
        Planned(USUAL, {"openai": "https://gateway.example/team"}),
    ),
    "a base that does not end in /v1 is all prefix": (
        {"OPENAI_BASE_URL": "https://gateway.example/api/v3"},
        {},
        Planned(PREFIXED, {"openai": "https://gateway.example/api/v3"}),
    ),
    "a host called v1 is no path": (
        {"OPENAI_BASE_URL": "http://v1"},
        {},
        Planned(PREFIXED, {"openai": "http://v1"}),
    ),
    "two variables that agree": (
        {"OPENAI_BASE_URL": "http://a/v1", "OPENAI_API_BASE": "http://a/v1/"},
        {},
        Planned(USUAL, {"openai": "http://a"}),
    ),
    "anthropic with a prefix": (
        {"ANTHROPIC_BASE_URL": "https://gateway.example/anthropic"},
        {},
        Planned(USUAL, {"anthropic": "https://gateway.example/anthropic"}),
    ),
    "settings win over the environment": (
        {"OPENAI_BASE_URL": "https://gateway.example/v1"},
        {"openai": "https://other.example"},
        Planned(USUAL, {}),
    ),
    "even where they say what is built in": (
        {"OPENAI_BASE_URL": "https://gateway.example/v1"},
        {"openai": "https://api.openai.com"},
        Planned(USUAL, {}),
    ),
    "settings win over two variables that differ": (
        {"OPENAI_BASE_URL": "http://a/v1", "OPENAI_API_BASE": "http://b/v1"},
        {"openai": "http://c"},
        Planned(USUAL, {}),
    ),
    "another provider, because it is configured": (
        {},
        {"azure": "https://mine.openai.azure.com", "groq": "https://api.groq.com"},
        Planned(USUAL | {"AZURE_OPENAI_ENDPOINT": "/azure", "GROQ_BASE_URL": "/groq"}, {}),
    ),
    "another provider, because the environment names it": (
        {"AZURE_OPENAI_ENDPOINT": "https://mine.openai.azure.com/"},
        {},
        Planned(USUAL | {"AZURE_OPENAI_ENDPOINT": "/azure"}, {"azure": "https://mine.openai.azure.com"}),
    ),
}


def settings(**upstreams: str) -> Settings:
    return Settings(upstreams={name: Upstream(url=url) for name, url in upstreams.items()})


@pytest.mark.parametrize(("environ", "upstreams", "planned"), PLANS.values(), ids=PLANS)
def test_each_variable_leads_to_the_sidecar_and_its_upstream_to_where_it_led_before(
    environ: dict[str, str], upstreams: dict[str, str], planned: Planned
) -> None:
    plan = BaseUrls.plan(environ, settings(**upstreams))
    assert Planned(dict(plan.paths), dict(plan.adopted)) == planned


BAD: Final = {
    "no URL": (
        {"OPENAI_BASE_URL": "gateway:80"},
        "OPENAI_BASE_URL: 'gateway:80': start the URL with http://",
    ),
    "user information": (
        {"ANTHROPIC_BASE_URL": "http://me:secret@a"},
        "ANTHROPIC_BASE_URL: URL with user info",
    ),
    "two providers": (
        {"OPENAI_BASE_URL": "http://a/v1", "OPENAI_API_BASE": "http://b/v1"},
        "OPENAI_BASE_URL and OPENAI_API_BASE name two providers; unset one, or say --upstream openai=URL",
    ),
}


@pytest.mark.parametrize(("environ", "message"), BAD.values(), ids=BAD)
def test_a_base_url_that_can_be_no_upstream_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(RunError) as raised:
        BaseUrls.plan(environ, settings())
    assert str(raised.value).startswith(message)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_turngate_itself_is_refused_as_a_provider_under_each_of_its_names(host: str) -> None:
    plan = BaseUrls.plan({"ANTHROPIC_BASE_URL": f"http://{host}:8787"}, settings())
    with pytest.raises(RunError, match=r"is Turngate itself; unset it, or .* --upstream anthropic=URL"):
        plan.refuse_loop(Address(host="127.0.0.1", port=8787))


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8788", "http://gateway.example:8787", "https://gateway.example"]
)
def test_another_port_or_host_is_not_turngate_itself(url: str) -> None:
    BaseUrls.plan({"ANTHROPIC_BASE_URL": url}, settings()).refuse_loop(Address(host="127.0.0.1", port=8787))


PROXIES: Final = {
    "none": ({}, "127.0.0.1"),
    "some": ({"NO_PROXY": "corp.example, .local"}, "corp.example,.local,127.0.0.1"),
    "both spellings": ({"NO_PROXY": "a", "no_proxy": "b,a"}, "a,b,127.0.0.1"),
    "there already": ({"no_proxy": "127.0.0.1,a"}, "127.0.0.1,a"),
    "everything": ({"no_proxy": "*"}, "*"),
}


@pytest.mark.parametrize(("environ", "value"), PROXIES.values(), ids=PROXIES)
def test_no_proxy_variable_catches_the_sidecar(environ: dict[str, str], value: str) -> None:
    set_ = BaseUrls.plan({}, settings()).exports(Address(host="127.0.0.1", port=1), environ)
    assert (set_["NO_PROXY"], set_["no_proxy"]) == (value, value)


@pytest.mark.parametrize(
    ("listen", "base"),
    [
        ("127.0.0.1:8787", "http://127.0.0.1:8787"),
        ("[::]:9", "http://[::1]:9"),
        ("0.0.0.0:9", "http://127.0.0.1:9"),
    ],
)
def test_env_prints_what_a_shell_can_eval(
    listen: str, base: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quoted = "it's; $HOME `x`"
    monkeypatch.setenv("NO_PROXY", quoted)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{base}/v1")  # as a second eval would find it
    print_exports(Settings(listen=listen, allow_remote=True))  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    script = (
        'eval "$1"; printf "%s\\n" "$OPENAI_BASE_URL" "$OPENAI_API_BASE" "$ANTHROPIC_BASE_URL" "$NO_PROXY"'
    )
    said = subprocess.run(
        ["sh", "-euc", script, "sh", printed], stdout=PIPE, check=True, env={}
    ).stdout.decode()
    openai, old, anthropic, no_proxy = said.splitlines()
    assert (openai, old, anthropic) == (f"{base}/v1", f"{base}/v1", base)
    assert no_proxy.startswith(quoted)
    assert f'openai_base_url = "{base}/v1"' in printed


# The summary


LINES: Final[dict[str, tuple[dict[str, tuple[int, list[str] | None]], str]]] = {
    "nothing came": (
        {"requests": (0, []), "refused": (0, None)},
        "no request came; does the command take its base URL from a file? See `turngate run --env`",
    ),
    "all well": ({"requests": (1, []), "refused": (0, None)}, "1 request, 0 refused"),
    "one of each": (
        {
            "requests": (12, []),
            "refused": (1, ["result.orphan"]),
            "would_refuse": (1, ["result.orphan"]),
            "retracted": (1, ["stream.truncated"]),
            "broke_off": (1, ["stream.no_stop"]),
            "unsent": (1, []),
        },
        (
            "12 requests, 1 refused (result.orphan), 1 would be refused (result.orphan), 1 answer retracted "
            "(stream.truncated), 1 stream broke off (stream.no_stop), 1 did not reach the provider"
        ),
    ),
    "reasons in order": (
        {"requests": (9, []), "refused": (3, ["b", "a"]), "broke_off": (2, ["d", "c"])},
        "9 requests, 3 refused (a, b), 2 streams broke off (c, d)",
    ),
}


@pytest.mark.parametrize(("counts", "line"), LINES.values(), ids=LINES)
def test_the_summary_mentions_what_there_was(counts: Any, line: str) -> None:
    ending = "; details: turngate query --data-dir '/a b' \"FROM exchange_ended\""
    assert summary_line(counts, Path("/a b")) == line + (ending if counts["requests"][0] else "")


ASKING: Final = """
from openai import BadRequestError, OpenAI
client = OpenAI(api_key="any", max_retries=0)
def ask(*messages, **more):
    return client.chat.completions.create(model="gpt-4.1", messages=messages, **more)
print(ask({"role": "user", "content": "hi"}).choices[0].message.content)
try:
    print(ask({"role": "tool", "tool_call_id": "call_9", "content": "14"}).choices[0].message.content)
except BadRequestError as error:
    print(error.code)
try:
    for _ in ask({"role": "user", "content": "go"}, stream=True):
        pass
except Exception as error:
    print("broken")
"""
PLAYED: Final[dict[str, Any]] = {
    "refusals": False,
    "steps": [
        {"when": {"stream": False}, "answer": {"text": "fine"}},
        {"when": {"stream": True}, "answer": {"text": "half of it"}, "fault": {"cut_at_byte": 700}},
    ],
}
TOLD: Final = {
    "observe": (
        b"fine\nfine\nbroken\n",
        "3 requests, 0 refused, 1 would be refused (result.orphan), 1 stream broke off (stream.truncated)",
    ),
    "enforce-tools": (
        b"fine\nresult.orphan\nbroken\n",
        "3 requests, 1 refused (result.orphan), 1 answer retracted (stream.truncated)",
    ),
}


@pytest.mark.parametrize("stage", TOLD)
async def test_a_script_with_the_openai_sdk_runs_unchanged_and_is_summed_up(
    tmp_path: Path, stage: str
) -> None:
    out, line = TOLD[stage]
    async with Simulator(PLAYED) as simulator:
        ended = await run(
            tmp_path, "--stage", stage, "--upstream", f"openai={simulator.url}", *python(ASKING)
        )
    assert (ended.code, ended.out) == (0, out), ended.err
    assert ended.summary.partition("; details: ")[0] == line
    # The details are where the line says, and the command that it names finds them.
    program, *arguments = shlex.split(ended.summary.partition("; details: ")[2])
    assert program == "turngate"
    asked = await asyncio.create_subprocess_exec(
        *TURNGATE, *arguments, "--json", stdout=PIPE, env=environment(tmp_path), cwd=tmp_path
    )
    rows = (await asked.communicate())[0].splitlines()
    assert [json.loads(row)["upstream"] for row in rows] == ["openai"] * 3
    data_dir = Path(arguments[arguments.index("--data-dir") + 1])
    assert data_dir.parent == tmp_path / "state" / "turngate" / "runs"


GREETING: Final = """
from anthropic import Anthropic
from openai import OpenAI
hello = [{"role": "user", "content": "hi"}]
OpenAI(api_key="any").chat.completions.create(model="gpt-4.1", messages=hello)
Anthropic(api_key="any").messages.create(model="claude", max_tokens=9, messages=hello)
"""
GATEWAYS: Final = {"ending in /v1": "/team/v1", "ending otherwise": "/api/v3"}


@pytest.mark.parametrize("path", GATEWAYS.values(), ids=GATEWAYS)
async def test_traffic_goes_on_to_the_gateway_that_the_environment_named(tmp_path: Path, path: str) -> None:
    async with Simulator() as simulator:
        ended = await run(
            tmp_path,
            *python(GREETING),
            OPENAI_BASE_URL=simulator.url + path,
            ANTHROPIC_BASE_URL=f"{simulator.url}/claude",
        )
        paths = [received.path for received in simulator.requests]
    assert ended.code == 0, ended.err
    assert paths == [f"{path}/chat/completions", "/claude/v1/messages"]
    assert ended.summary.startswith("2 requests, 0 refused;")


# The command


async def test_the_command_finds_the_sidecar_and_everything_else_as_it_was(tmp_path: Path) -> None:
    azure = ("--upstream", "azure=http://127.0.0.1:1")
    # What lies in the folder where the command runs is not for the sidecar.
    (tmp_path / "json.py").write_text("raise SystemExit('not the one')")
    show = ("--", "env", "-0")
    ended = await run(tmp_path, *NOTHING, *azure, *show, MINE="a=b c", HTTPS_PROXY="http://127.0.0.1:1")
    assert ended.code == 0, ended.err
    found = dict(line.split("=", 1) for line in ended.out.decode().split("\0") if line)
    base = found["ANTHROPIC_BASE_URL"]
    assert base.startswith("http://127.0.0.1:")
    changed = {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "ANTHROPIC_BASE_URL": base,
        "AZURE_OPENAI_ENDPOINT": f"{base}/azure",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    assert found == environment(tmp_path, MINE="a=b c", HTTPS_PROXY="http://127.0.0.1:1") | changed


CODES: Final = {
    "its own": (("sh", "-c", "exit 7"), 7, "no request came"),
    "a signal's": (("sh", "-c", "kill -KILL $$"), 137, "no request came"),
    "a broken pipe's": (("sh", "-c", "kill -PIPE $$; exit 0"), 141, "no request came"),
    "not found": (("no-such-command",), 127, "error: no-such-command: command not found"),
    "not executable": (("/etc/passwd",), 126, "error: /etc/passwd: cannot be run: Permission denied"),
    "options of the command": (("sh", "-c", "exit $#", "sh", "--env", "--stage", "x"), 3, "no request came"),
}


async def test_the_exit_code_is_the_command_s(tmp_path: Path) -> None:
    ends = await asyncio.gather(*(run(tmp_path, *NOTHING, *command) for command, _, _ in CODES.values()))
    for ended, (_, code, said) in zip(ends, CODES.values(), strict=True):
        assert ended.code == code, ended.err
        assert said in ended.err


async def test_bytes_pass_through_standard_input_and_output_unchanged(tmp_path: Path) -> None:
    data = bytes(range(256)) * 4096
    ended = await run(tmp_path, *NOTHING, "--", "cat", stdin=data)
    assert ended.code == 0, ended.err
    assert ended.out == data


USAGE: Final = {
    "nothing to run": ((), 64, "error: write either -- COMMAND... or --env"),
    "both": (("--env", "--", "true"), 64, "error: write either -- COMMAND... or --env"),
    "a bad upstream": (("--upstream", "openai", "true"), 64, "error: --upstream openai: write NAME=URL"),
    "no such settings": (
        ("--config", "nowhere.yaml", "true"),
        64,
        "error: cannot read settings from nowhere.yaml",
    ),
    "a data_dir that is a file": (("--data-dir", "file", "true"), 125, "choose another with --data-dir"),
}


@pytest.mark.parametrize(("arguments", "code", "said"), USAGE.values(), ids=USAGE)
async def test_what_cannot_be_run_says_why(
    tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / "file").touch()
    ended = await run(tmp_path, *arguments)
    assert ended.code == code
    assert said in ended.err


# Signals


LISTENING: Final = """
import signal
every = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, every)
print("ready", flush=True)
number = None
while number != signal.SIGTERM:
    number = signal.Signals(signal.sigwait(every))
    print(number.name, flush=True)
raise SystemExit(5)
"""


async def test_signals_sent_to_the_run_reach_the_command_once(tmp_path: Path) -> None:
    async with running(tmp_path, *NOTHING, *python(LISTENING)) as process:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGINT):
            process.send_signal(number)
            assert await process.stdout.readline() == f"{number.name}\n".encode()
        process.terminate()
        out, err = await asyncio.wait_for(process.communicate(), HANG_S)
        assert (out, process.returncode) == (b"SIGTERM\n", 5), err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_killed_run_leaves_no_sidecar_behind(tmp_path: Path) -> None:
    async with running(tmp_path, *NOTHING, "--", "cat") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"here\n")
        assert await process.stdout.readline() == b"here\n"
        (sidecar,) = [pid for pid in children(process.pid) if b"turngate.proxy.run" in command_line(pid)]
        (observer,) = children(sidecar)
        ends = [asyncio.create_task(end_of(pid)) for pid in (sidecar, observer)]
        await asyncio.sleep(0)  # the descriptors are open before the pids can be anybody else's
        process.kill()
        await asyncio.wait_for(asyncio.gather(*ends), HANG_S)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_sidecar_that_dies_is_told_and_the_command_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path, *NOTHING, "--", "cat") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"here\n")
        assert await process.stdout.readline() == b"here\n"
        (sidecar,) = [pid for pid in children(process.pid) if b"turngate.proxy.run" in command_line(pid)]
        os.kill(sidecar, signal.SIGKILL)
        told = await asyncio.wait_for(process.stderr.readline(), HANG_S)
        assert told == b"turngate: the sidecar ended by itself (code -9); requests of the command now fail\n"
        out, _ = await asyncio.wait_for(process.communicate(b"still here\n"), HANG_S)
        assert (out, process.returncode) == (b"still here\n", 0)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def end_of(pid: int) -> None:
    """Returns when the process has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, ended.set)
        await ended.wait()
        asyncio.get_running_loop().remove_reader(descriptor)
    finally:
        os.close(descriptor)


# The terminal

IN_TERMINAL: Final = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """The other side of a command's terminal."""

    def __init__(self, master: int, process: "subprocess.Popen[bytes]") -> None:
        self._master = master
        self._read = b""
        self.process = process

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until `text` comes; what stands before it is gone then."""
        until_s = time.monotonic() + HANG_S
        while text.encode() not in self._read:
            assert select.select([self._master], [], [], max(0.0, until_s - time.monotonic()))[0], self._read
            self._read += os.read(self._master, 4096)
        self._read = self._read.partition(text.encode())[2]


@contextlib.contextmanager
def terminal(tmp_path: Path, *command: str, **env: str) -> Iterator[Terminal]:
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(tmp_path, **env),
        cwd=tmp_path,
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        os.close(master)  # hangs up on what still runs there
        process.kill()
        process.wait()


def test_the_command_has_the_terminal_and_ctrl_c_reaches_it_once(tmp_path: Path) -> None:
    seen = "import os; print(*map(os.isatty, range(3)), os.tcgetpgrp(0) == os.getpgrp(), flush=True)\n"
    with terminal(tmp_path, *TURNGATE, "run", *NOTHING, *python(seen + LISTENING)) as shown:
        shown.wait_for("True True True True")
        shown.wait_for("ready")
        shown.type("\x03")
        shown.wait_for("SIGINT")
        # Had the run passed it on as well, it would have done so before this one.
        shown.process.terminate()
        shown.wait_for("SIG")
        shown.wait_for("TERM")
        shown.wait_for("turngate: no request came")
        assert shown.process.wait(HANG_S) == 5


def test_a_command_that_ctrl_c_ends_is_summed_up(tmp_path: Path) -> None:
    with terminal(tmp_path, *TURNGATE, "run", *NOTHING, "--", "cat") as shown:
        shown.type("here\n")
        shown.wait_for("here\r\nhere")
        shown.type("\x03")
        shown.wait_for("turngate: no request came")
        assert shown.process.wait(HANG_S) == 130


STOPPED: Final = (
    "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCONT]); print(6 * 7, flush=True); "
    "signal.sigwait([signal.SIGCONT]); print(input().upper())"
)
"""Reads nothing before it is continued: a reader that is just being stopped may still take what is typed to the shell."""


@pytest.mark.skipif(shutil.which("bash") is None, reason="job control needs a shell")
def test_ctrl_z_stops_the_run_and_fg_continues_it(tmp_path: Path) -> None:
    line = shlex.join([*TURNGATE, "run", *NOTHING, *python(STOPPED)])
    with terminal(tmp_path, "bash", "--norc", "--noediting", "-i", PS1="$ ") as shown:
        shown.type(f"{line}\n")
        shown.wait_for("42\r\n")
        shown.type("\x1a")
        shown.wait_for("Stopped")
        shown.type("fg\n")
        shown.wait_for("fg\r\n")
        shown.wait_for("sigwait")
        shown.type("again\n")
        shown.wait_for("AGAIN")
        shown.wait_for("turngate: no request came")
        shown.type("echo code=$?\nexit\n")
        shown.wait_for("code=0")


# Folders


def test_folders_of_old_runs_go_unless_a_run_still_has_them(tmp_path: Path) -> None:
    for name in ("old", "old-but-alive", "new"):
        (tmp_path / name / "evidence").mkdir(parents=True)
    for name in ("old", "old-but-alive"):
        os.utime(tmp_path / name, (0, 0))
    with run_module._locked(tmp_path / "old-but-alive"):
        run_module._remove_old(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old-but-alive"]


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    choice = Choice(data_dir=tmp_path / "mine")
    with (
        run_module._locked(tmp_path / "mine"),
        pytest.raises(RunError, match=r"another run is using .*/mine;"),
    ):
        run_module.run(["true"], choice, Settings(data_dir=tmp_path))
    assert not (tmp_path / "mine" / run_module.LOG).exists()
