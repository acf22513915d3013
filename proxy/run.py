"""`turngate run -- COMMAND`: a sidecar of its own for one command, for as long as that runs.

Three processes: this one, which only waits; the command, in our process group, so that the terminal is its own; and
the sidecar (`python -m turngate.proxy.run`), in a session of its own, so that Ctrl-C is not for it. The sidecar's
standard input is a pipe of which only we hold the other end: however we end, SIGKILL included, it ends too.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Self, cast

import uvloop

from turngate.proxy import config, server
from turngate.proxy.config import DEFAULT_UPSTREAMS, Address, Settings, SettingsError
from turngate.proxy.upstream import Origin

EX_OURS, EX_NOT_EXECUTABLE, EX_NOT_FOUND = 125, 126, 127
"""As `env`, `nohup` and `timeout` have them: we failed, the command cannot be run, there is no such command."""

START_S: Final = 30.0
LOAD_S: Final = 15.0
"""What the sidecar may take beyond its drain, to load the evidence."""

KEEP_S: Final = 14 * 86_400
"""A run's folder is kept as long as the evidence of a sidecar that stays."""

LOG: Final = "sidecar.log"
LOG_LINES: Final = 10

PASSED_ON: Final = frozenset(
    {signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
)
"""Without SIGTSTP and its like: a terminal stops and continues the whole group, and we stop with the command."""

SI_KERNEL: Final = 0x80
"""<asm-generic/siginfo.h>: sent by the kernel itself, as by its terminal driver on Ctrl-C."""


class RunError(Exception):
    """The command was not run; the text says why and what to do, `code` is the exit code."""

    def __init__(self, text: str, code: int = EX_OURS) -> None:
        super().__init__(text)
        self.code = code


# Where the command finds the sidecar, and the sidecar the provider.


@dataclass(frozen=True, slots=True)
class Family:
    """The variables that hold one provider's base URL."""

    upstream: str
    variables: tuple[str, ...]
    tail: str = ""
    """How such a URL ends where nothing is special."""
    own_paths: bool = False
    """Its paths tell the provider, so that the base URL needs no `/NAME`."""


FAMILIES: Final = (
    Family(
        "openai", ("OPENAI_BASE_URL", "OPENAI_API_BASE"), tail="/v1", own_paths=True
    ),  # SDKs; LiteLLM, LangChain
    Family("anthropic", ("ANTHROPIC_BASE_URL",), own_paths=True),
    Family("azure", ("AZURE_OPENAI_ENDPOINT",)),
    Family("gemini", ("GOOGLE_GEMINI_BASE_URL",)),
    Family("groq", ("GROQ_BASE_URL",)),
    Family("mistral", ("MISTRAL_BASE_URL", "MISTRAL_API_BASE")),  # LangChain; LiteLLM
    Family("deepseek", ("DEEPSEEK_API_BASE",)),  # both
)
"""Not OLLAMA_HOST, which also tells Ollama's server where to listen."""


@dataclass(frozen=True, slots=True)
class BaseUrls:
    """What becomes of the base URLs in the environment."""

    paths: Mapping[str, str]
    """By variable: the path that it gets, at the sidecar."""
    adopted: Mapping[str, str]
    """By upstream: the URL that the environment held. That is where its traffic goes on going."""

    @classmethod
    def plan(cls, environment: Mapping[str, str], settings: Settings) -> Self:
        """Raises RunError for a base URL in the environment that can be no upstream."""
        paths: dict[str, str] = {}
        adopted: dict[str, str] = {}
        for family in FAMILIES:
            name = family.upstream
            path = family.tail if family.own_paths else f"/{name}{family.tail}"
            # By identity: a built-in upstream that nobody has set, not one that somebody has set to the same URL.
            unset = settings.upstreams.get(name) is DEFAULT_UPSTREAMS.get(name)
            if unset and (url := _held(family, environment)):
                # `https://gateway/v1` is `https://gateway` with paths as usual; else all of the URL is prefix.
                usual = Origin.parse(url)[1].endswith(family.tail)
                adopted[name] = url.removesuffix(family.tail) if usual else url
                path = path if usual else f"/{name}"
            if name in adopted or name in settings.upstreams:
                paths.update(dict.fromkeys(family.variables, path))
        return cls(paths, adopted)

    def refuse_loop(self, sidecar: Address) -> None:
        """Raises RunError where the environment named `sidecar` as a provider."""
        for name, url in self.adopted.items():
            origin, _ = Origin.parse(url)
            if origin.port == sidecar.port and origin.host in (sidecar.host, "127.0.0.1", "::1", "localhost"):
                raise RunError(
                    f"the environment's base URL for {name} is {url}, which is Turngate itself; "
                    f"unset it, or name the provider with --upstream {name}=URL"
                )

    def exports(self, sidecar: Address, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables to set where the sidecar listens at `sidecar`."""
        urls = {variable: f"http://{sidecar}{path}" for variable, path in self.paths.items()}
        # Each spelling with all that stood in either: clients differ in which of the two they read.
        names = ("NO_PROXY", "no_proxy")
        listed = [host.strip() for name in names for host in environment.get(name, "").split(",")]
        hosts = dict.fromkeys(host for host in (*listed, sidecar.host) if host)
        # The star counts for some clients only when it stands alone.
        return urls | dict.fromkeys(names, "*" if "*" in hosts else ",".join(hosts))


def _held(family: Family, environment: Mapping[str, str]) -> str:
    """The base URL that the environment holds for this provider, without a slash at its end; "" for none."""
    held = {name: environment[name].rstrip("/") for name in family.variables if environment.get(name)}
    if len(set(held.values())) > 1:
        raise RunError(
            f"{' and '.join(held)} name two providers; unset one, or say --upstream {family.upstream}=URL"
        )
    for variable, url in held.items():
        try:
            Origin.parse(url)
        except ValueError as error:
            raise RunError(f"{variable}: {error}") from error
        return url
    return ""


def print_exports(settings: Settings) -> None:
    """For `eval` in a shell: how to reach a `turngate serve` with these settings. Starts nothing."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    host = everywhere.get(settings.listen.host, settings.listen.host)
    sidecar = Address(host=host, port=settings.listen.port)
    for name, value in BaseUrls.plan({}, settings).exports(sidecar, os.environ).items():
        print(f"export {name}={shlex.quote(value)}")
    print(AGENTS.format(base=f"http://{sidecar}"))


AGENTS: Final = """\
# Two agents want more. Codex CLI does not read OPENAI_BASE_URL; in ~/.codex/config.toml:
#   openai_base_url = "{base}/v1"
# or, beside a sidecar of its own:
#   turngate run -- sh -c 'codex -c openai_base_url="$OPENAI_BASE_URL"'
# OpenCode, as all on Vercel's AI SDK, wants /v1 behind ANTHROPIC_BASE_URL; in opencode.json:
#   {{"provider": {{"anthropic": {{"options": {{"baseURL": "{{env:ANTHROPIC_BASE_URL}}/v1"}}}}}}}}"""
"""Seen with Codex 0.171.0 and OpenCode 1.18.34 on the wire."""


# The run.


@dataclass(frozen=True, slots=True)
class Choice:
    """What the command line says about the sidecar; None is not said."""

    config_file: Path | None = None
    data_dir: Path | None = None
    stage: str | None = None
    upstreams: Mapping[str, Mapping[str, str]] | None = None


def run(command: Sequence[str], choice: Choice, settings: Settings) -> int:
    """Run `command` beside a sidecar; `settings` are those of `choice`. Returns its exit code. Raises RunError."""
    plan = BaseUrls.plan(os.environ, settings)
    plan.refuse_loop(settings.listen)
    runs = settings.data_dir / "runs"
    _remove_old(runs)
    began_s = time.time()
    # A folder of its own for each run. Several sidecars could share one, but no exchange in the evidence says whose
    # it was, so that a summary would count those of other runs; and an order to the sidecar that serves there
    # (`turngate rollout set`) is not meant for a run that says its own --stage.
    own = runs / time.strftime(f"%Y%m%dT%H%M%SZ-{os.getpid()}", time.gmtime())
    code = 128 + signal.SIGINT  # of a Ctrl-C before the command has begun
    # After its end Ctrl-C means that nobody waits for the summary.
    with _locked((choice.data_dir or own).absolute()) as data_dir, contextlib.suppress(KeyboardInterrupt):
        with _sidecar(_flags(choice, plan, data_dir), settings.drain_s + LOAD_S) as sidecar:
            plan.refuse_loop(sidecar.address)
            environment = {**os.environ, **plan.exports(sidecar.address, os.environ)}
            code = _run_beside(sidecar.process, command, environment)
        _tell(summary(data_dir, began_s))
    return code


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone, and who would read it with it
        print(f"turngate: {text}", file=sys.stderr, flush=True)


def _flags(choice: Choice, plan: BaseUrls, data_dir: Path) -> dict[str, object]:
    """What the sidecar is told. It reads file and environment itself, so that no setting has to survive a trip."""
    adopted = {name: {"url": url} for name, url in plan.adopted.items()}
    return {
        "config": str(choice.config_file) if choice.config_file else None,
        "data_dir": str(data_dir),
        "stage": choice.stage,
        "upstreams": {**adopted, **(choice.upstreams or {})} or None,
        **dict.fromkeys(("listen", "metrics", "admin"), "127.0.0.1:0"),
        "linger_s": 0.0,  # no load balancer has to learn that we leave
    }


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """The folder, made and kept from other runs and from removal. Raises RunError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise RunError(f"cannot use {folder}: {error.strerror}; choose another with --data-dir") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"another run is using {folder}; choose another with --data-dir") from error
        yield folder
    finally:
        os.close(descriptor)


def _remove_old(runs: Path) -> None:
    """Take away what past runs left, after KEEP_S seconds."""
    until_s = time.time() - KEEP_S
    for folder in runs.glob("*"):
        try:
            if folder.stat().st_mtime < until_s:
                with _locked(folder):
                    shutil.rmtree(folder)
        except (OSError, RunError):
            continue  # in use, gone already, or not ours: the next run looks again


# The command.


def _run_beside(
    sidecar: "subprocess.Popen[bytes]", command: Sequence[str], environment: Mapping[str, str]
) -> int:
    """Run the command to its end. Its exit code, 128 + N where signal N ended it. Raises RunError."""
    # From here on signals are taken one by one, so that none falls between the command's start and our waiting.
    # BSD drops what is ignored by default even while it is blocked.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    try:
        # Python has made SIGPIPE and SIGXFSZ ignored for itself; the command starts as from a shell.
        untouched = [signal.SIGPIPE, signal.SIGXFSZ]
        pid = os.posix_spawnp(command[0], list(command), environment, setsigmask=before, setsigdef=untouched)
        return _wait(pid, sidecar)
    except FileNotFoundError as error:
        raise RunError(f"{command[0]}: command not found", EX_NOT_FOUND) from error
    except OSError as error:
        raise RunError(f"{command[0]}: cannot be run: {error.strerror}", EX_NOT_EXECUTABLE) from error
    finally:
        # What the terminal sent to end the command may reach us only after its end has: that must not end us too.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _forgive)
        signal.pthread_sigmask(signal.SIG_SETMASK, {*before, signal.SIGQUIT, signal.SIGHUP})


def _forgive(*_: object) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _wait(pid: int, sidecar: "subprocess.Popen[bytes]") -> int:
    sidecar_lives = True
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if sidecar_lives and sidecar.poll() is not None:
            sidecar_lives = False
            _tell(
                f"the sidecar ended by itself (code {sidecar.returncode}); requests of the command now fail"
            )
        number, for_all = _next_signal()
        if number in PASSED_ON and not for_all:
            os.kill(pid, number)


def _next_signal() -> tuple[int, bool]:
    """Wait for a signal; also whether the terminal sent it, which means that the command has it already."""
    watched = {*PASSED_ON, signal.SIGCHLD}
    if sys.platform == "linux":
        info = signal.sigwaitinfo(watched)
        return info.si_signo, info.si_code == SI_KERNEL
    # Who sent it is not told here: what a terminal can send, in the terminal's foreground, is taken for its own.
    number = signal.sigwait(watched)
    return number, number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP) and _in_foreground()


def _in_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


# The sidecar, from our side.


@dataclass(frozen=True, slots=True)
class _Sidecar:
    process: "subprocess.Popen[bytes]"
    address: Address


@contextlib.contextmanager
def _sidecar(flags: Mapping[str, object], stop_s: float) -> Iterator[_Sidecar]:
    """A sidecar, ready; when the context is left it has drained and loaded its evidence. Raises RunError."""
    log = Path(str(flags["data_dir"])) / LOG
    with log.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "turngate.proxy.run"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=written,
            # With -m the folder where the command runs would come first: its json.py is not for us.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
    to, back = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
    try:
        with contextlib.suppress(BrokenPipeError):  # it has ended: that is told below
            to.write(json.dumps(flags).encode() + b"\n")
            to.flush()
        said = back.readline() if select.select([back], [], [], START_S)[0] else b""
        if not said:
            raise RunError(f"the sidecar did not start\n{_last_lines(log)}")
        yield _Sidecar(process, Address(host="127.0.0.1", port=int(said)))
    finally:
        _end(process, to, stop_s)
        back.close()


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def _end(process: "subprocess.Popen[bytes]", to: IO[bytes], stop_s: float) -> None:
    with contextlib.suppress(BrokenPipeError):  # what could not be written any more
        to.close()
    try:
        process.wait(stop_s)
    except subprocess.TimeoutExpired:
        _tell("the sidecar does not end and is killed; some of the evidence may be missing")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# The sidecar, from its own side.


def _serve() -> None:
    """`python -m turngate.proxy.run`: flags as one JSON line on standard input, the port as one line on standard
    output when ready, the end when standard input ends."""
    line = sys.stdin.buffer.readline()
    if not line:
        return  # who started us is gone already
    flags = json.loads(line)
    file = flags.pop("config")
    flags["log"] = "off"  # stderr belongs to the command
    try:
        settings = config.load(Path(file) if file else None, **flags)
        listening = server.Listening.bind(settings)
        uvloop.run(server.serve(settings, listening, _started))
    except (SettingsError, server.StartError) as error:
        sys.exit(str(error))


def _started(proxy: server.Proxy) -> None:
    loop = asyncio.get_running_loop()
    parent = sys.stdin.fileno()

    def parent_ended() -> None:
        # Nothing follows the flags, so what can be read is the end. Drains, as SIGTERM does to `turngate serve`.
        loop.remove_reader(parent)
        os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(parent, parent_ended)
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more: see above
        print(proxy.listening.data.getsockname()[1], flush=True)


# The summary.


def summary(data_dir: Path, since_s: float) -> str:
    """One line on what the evidence tells of the time since `since_s` (Unix seconds)."""
    # Not above: the sidecar, which is this module too, must not carry DuckDB in its memory.
    import duckdb

    from turngate.telemetry.queries import QueryTimeout, connect_readonly, run_query

    try:
        with connect_readonly(data_dir / "evidence") as database:
            rows = run_query(database, COUNTS.format(since_s=float(since_s))).rows
    except (duckdb.Error, QueryTimeout) as error:
        return f"no summary, the evidence cannot be read: {error}"
    return summary_line({what: (count, reasons) for what, count, reasons in rows}, data_dir)


COUNTS: Final = """
WITH ended AS (SELECT * FROM exchange_ended WHERE at_s >= {since_s}),
made AS (SELECT * FROM finding_made WHERE at_s >= {since_s}),
rejected AS (SELECT * FROM made WHERE action = 'rejected'),
retracted AS (SELECT * FROM preview_retracted WHERE at_s >= {since_s})
SELECT 'requests', count(*), [] FROM ended
UNION ALL
SELECT 'refused', count(DISTINCT operation), list(DISTINCT coalesce(reason, error_type))
FROM ended LEFT JOIN rejected USING (operation) WHERE outcome = 'refused'
UNION ALL
SELECT 'would_refuse', count(DISTINCT operation), list(DISTINCT reason) FROM made WHERE action = 'would_reject'
UNION ALL
SELECT if(enforced, 'retracted', 'broke_off'), count(*), list(DISTINCT cause) FROM retracted GROUP BY enforced
UNION ALL
SELECT 'unsent', count(*), [] FROM ended WHERE outcome = 'unsent'
"""

Counts = Mapping[str, tuple[int, Sequence[str] | None]]

RARE: Final = {
    "would_refuse": ("would be refused", "would be refused"),
    "retracted": ("answer retracted", "answers retracted"),
    "broke_off": ("stream broke off", "streams broke off"),
    "unsent": ("did not reach the provider", "did not reach the provider"),
}
"""For one, for more; what there was none of is not mentioned."""


def summary_line(counts: Counts, data_dir: Path) -> str:
    """What COUNTS found, in words."""
    requests, refused = counts["requests"][0], counts["refused"]
    if not requests:
        return "no request came; does the command take its base URL from a file? See `turngate run --env`"
    parts = [f"{requests} request{'s' * (requests != 1)}", _with_reasons("refused", refused)]
    for what, (one, more) in RARE.items():
        count, reasons = counts.get(what, (0, None))
        if count:
            parts.append(_with_reasons(one if count == 1 else more, (count, reasons)))
    where = shlex.quote(str(data_dir))
    return f'{", ".join(parts)}; details: turngate query --data-dir {where} "FROM exchange_ended"'


def _with_reasons(words: str, counted: tuple[int, Sequence[str] | None]) -> str:
    count, reasons = counted
    return f"{count} {words}" + (f" ({', '.join(sorted(reasons))})" if reasons else "")


if __name__ == "__main__":
    _serve()
