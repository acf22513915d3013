"""The command line: one function a command. Errors say what is wrong and what to do; exit codes are for scripts."""

import sys
import time
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import uvloop
from rich.console import Console

import turngate
from turngate.adapters import registry
from turngate.proxy import (
    cli_check,
    cli_replay,
    cli_rollout,
    cli_rules,
    cli_torture,
    cli_unknown,
    config,
    server,
)
from turngate.proxy.config import Settings, SettingsError
from turngate.proxy.replay import STRICTEST
from turngate.proxy.rollout import Stage

EX_USAGE, EX_INTERNAL = 64, 70

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Sidecar between an app and its LLM provider: illegal message sequences stay in, half tool calls stay out.",
)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point."""
    # Typer's own code for a wrong command line is 2, which is `check`'s word for "waiting".
    usage_error: Any = typer.BadParameter.__base__
    usage_error.exit_code = EX_USAGE
    app()


@app.command()
def serve(
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Settings file (default: ./turngate.yaml).")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="Where apps connect (default: 127.0.0.1:8787).")] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Where Prometheus scrapes (default: 127.0.0.1:8788).")
    ] = None,
    admin: Annotated[str | None, typer.Option(help="Admin and health (default: 127.0.0.1:8789).")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Ledger, spool, evidence, keys.")] = None,
    stage: Annotated[Stage | None, typer.Option(help="How far Turngate may go (default: observe).")] = None,
    upstream: Annotated[
        list[str] | None, typer.Option(metavar="NAME=URL", help="A provider; may be repeated.")
    ] = None,
    allow_remote: Annotated[bool | None, typer.Option("--allow-remote", help="Listen off loopback.")] = None,
) -> None:
    """Run the sidecar.

    Point the app at it with OPENAI_BASE_URL=http://127.0.0.1:8787/v1 or ANTHROPIC_BASE_URL=http://127.0.0.1:8787.
    SIGTERM and Ctrl-C drain: open answers may end first; a second one ends them.
    """
    flags = {
        "listen": listen,
        "metrics": metrics,
        "admin": admin,
        "data_dir": data_dir,
        "stage": stage,
        "upstreams": _upstreams(upstream or []) or None,
        "allow_remote": allow_remote,
    }
    settings = _settings(config_file, **flags)
    path = config.file_of(config_file)
    source = server.Source(path, partial(config.load, path, **flags)) if path.is_file() else None
    try:
        listening = server.Listening.bind(settings)
        uvloop.run(server.serve(settings, listening, _announce, source))
    except server.StartError as error:
        _fail(str(error), 1)


def _announce(proxy: server.Proxy) -> None:
    host, port = proxy.listening.data.getsockname()[:2]
    base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    metrics = proxy.listening.metrics.getsockname()
    settings = proxy.settings
    err.print(
        f"turngate {turngate.__version__} listens on {base} (stage {settings.stage}, data in {settings.data_dir})"
    )
    for name, each in sorted(settings.upstreams.items()):
        err.print(f"  {name:<12} {each.url}")
    err.print(f"  app      OPENAI_BASE_URL={base}/v1  ANTHROPIC_BASE_URL={base}")
    err.print(f"  metrics  http://{metrics[0]}:{metrics[1]}/metrics")


class Api(StrEnum):
    """The dialects that are judged."""

    CHAT = registry.CHAT.api
    MESSAGES = registry.MESSAGES.api


@app.command("run", context_settings={"allow_interspersed_args": False})
def run_command(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND...", help="What to run, with its arguments.")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Settings file (default: ./turngate.yaml).")
    ] = None,
    stage: Annotated[Stage | None, typer.Option(help="How far Turngate may go (default: observe).")] = None,
    upstream: Annotated[
        list[str] | None, typer.Option(metavar="NAME=URL", help="A provider; may be repeated.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Write here, not into a folder of the run's own under the usual one.")
    ] = None,
    env: Annotated[
        bool, typer.Option("--env", help="Run nothing; print the exports for a sidecar started by `serve`.")
    ] = False,
) -> None:
    """Run a command beside a sidecar of its own: turngate run -- python agent.py

    Its environment gets the base URLs that SDKs and agents read; one that it has already stays the provider behind
    the sidecar. At the end one line on standard error sums up.

    Exit code: the command's own, 128 + N where signal N ended it; 64 usage, 125 no sidecar, 126 not executable, 127
    not found.
    """
    from turngate.proxy import run  # not above: it is also a program of its own (`python -m`)

    upstreams = _upstreams(upstream or []) or None
    settings = _settings(config_file, stage=stage, data_dir=data_dir, upstreams=upstreams)
    if env == bool(command):
        _fail("write either -- COMMAND... or --env", EX_USAGE)
    if not command:
        run.print_exports(settings)
        return
    try:
        code = run.run(command, run.Choice(config_file, data_dir, stage, upstreams), settings)
    except run.RunError as error:
        _fail(str(error), error.code)
    raise typer.Exit(code)


@app.command()
def check(
    file: Annotated[
        str, typer.Argument(metavar="FILE|-", help="A request body as JSON; - reads standard input.")
    ],
    api: Annotated[
        Api | None, typer.Option(help="Its dialect; guessed from the body where not given.")
    ] = None,
    server_name: Annotated[
        str, typer.Option("--server", help="Whose rules, e.g. openai, azure, deepseek, vllm.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Judge one request body as the sidecar would.

    Exit code: 0 legal, 1 illegal, 2 waiting for a tool result, 3 unjudged, 64 usage, 70 internal error.
    """
    try:
        body = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        _fail(f"cannot read {file}: {error.strerror or error}", EX_USAGE)
    try:
        checked = cli_check.check(body, api.value if api else None, server_name)
        if as_json:
            print(cli_check.as_json(file, checked))
        else:
            cli_check.print_checked(checked, body, out)
    except Exception as error:  # noqa: BLE001 - told with its own exit code
        _fail(f"turngate failed on {file}: {type(error).__name__}: {error}", EX_INTERNAL)
    raise typer.Exit(cli_check.EXIT_CODES[checked.judgement.verdict])


@app.command("replay")
def replay_command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Exchange lines, also .gz; or one exchange a .json file."),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object an exchange, and a last one with the summary.")
    ] = False,
    stage: Annotated[Stage, typer.Option(help="Judge as at this stage.")] = STRICTEST,
    api: Annotated[
        Api | None, typer.Option(help="The dialect of every line, whatever it says itself.")
    ] = None,
) -> None:
    """Judge recorded exchanges as the sidecar would have done, without network.

    Requests by the rules of the line's server (its `server`, else its host, else its API's own), answers by the gate.
    APIs without rules are counted as unjudged, lines that are no exchange as bad.

    Exit code: 0 whatever was found, for it is a report; 64 usage, or a file that cannot be read.
    """
    forced = registry.DIALECTS[api.value] if api else None
    try:
        cli_replay.run(files, stage, forced, out, err, as_json=as_json)
    except BrokenPipeError:
        raise  # whoever read the output has enough: no fault of a file
    except OSError as error:
        _fail(f"cannot read {error.filename}: {error.strerror or error}", EX_USAGE)


app.command("torture")(cli_torture.command)


@app.command("rules")
def rules_command(
    api: Annotated[Api | None, typer.Option(help="Only this dialect.")] = None,
    server_name: Annotated[str | None, typer.Option("--server", help="Only this server.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a row instead of tables.")] = False,
) -> None:
    """Print what each server does about each fault, in the provider's own words, with rule number and date."""
    if server_name is not None and server_name not in cli_rules.servers():
        _fail(f"--server {server_name}: choose one of {', '.join(cli_rules.servers())}", EX_USAGE)
    entries = cli_rules.select(api.value if api else None, server_name)
    cli_rules.print_rules(entries, out, as_json=as_json)


@app.command("demo")
def demo_command(
    exit_: Annotated[bool, typer.Option("--exit", help="End after the summary, also on a terminal.")] = False,
) -> None:
    """Watch the sidecar work: a simulated provider, broken and sound traffic; no key, no network.

    On a terminal it then stays up for your own app until Ctrl-C. Exit code: 0 all as promised, 1 not.
    """
    from turngate.proxy import demo  # not above: `serve` must not carry DuckDB in its memory

    raise typer.Exit(demo.run(stay=sys.stdout.isatty() and not exit_))


@app.command()
def query(
    sql: Annotated[
        str | None, typer.Argument(metavar="SQL", help="One SELECT; without it the views are listed.")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Settings file (default: ./turngate.yaml).")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Whose evidence.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a row instead of a table.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV instead of a table.")] = False,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Into a Parquet file instead of a table.")
    ] = None,
    rows_max: Annotated[int, typer.Option("--rows", min=1, help="At most so many rows.")] = 10_000,
    time_s: Annotated[float, typer.Option("--seconds", min=0.001, help="Stop after so long.")] = 30.0,
) -> None:
    """Read-only SQL on what the sidecar wrote down. DuckDB's dialect.

    Exit code: 0, 1 the evidence cannot be opened or the time ran out, 64 usage or a bad statement.
    """
    from turngate.proxy import cli_query  # not above: `serve` must not carry DuckDB in its memory

    if as_json + as_csv + (parquet is not None) > 1:
        _fail("--json, --csv and --parquet: choose one", EX_USAGE)
    evidence_dir = _settings(config_file, data_dir=data_dir).data_dir / "evidence"
    if sql is None:
        cli_query.print_views(out)
        return
    if not evidence_dir.is_dir():
        err.print(f"nothing is written down yet in {evidence_dir}", markup=False)
    try:
        result, newer = cli_query.ask(evidence_dir, sql, rows_max=rows_max, time_s=time_s)
        cli_query.give_out(result, "json" if as_json else "csv" if as_csv else parquet or "table")
    except cli_query.BadStatement as error:
        _fail(str(error), EX_USAGE)
    except cli_query.NoAnswer as error:
        _fail(str(error), 1)
    if newer:
        err.print(
            f"a newer turngate wrote {', '.join(newer)}: what it added may be missing here", markup=False
        )
    if result.cut:
        err.print(f"more rows than {rows_max}: these are the first; say --rows N for more", markup=False)


@app.command()
def report(
    since: Annotated[
        str, typer.Option(metavar="7d|24h|30m|DAY", help="How far back, or a first day (UTC).")
    ] = "7d",
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Settings file (default: ./turngate.yaml).")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Whose evidence.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Into one HTML file that needs nothing else.")
    ] = None,
    fail_on: Annotated[
        str, typer.Option(metavar="FAULT,...", help="Exit code 1 if there is one of these: see below.")
    ] = "",
) -> None:
    """What each rule would have done, against what the provider did; how streams and dispatches ended; what broke.

    For scripts: --fail-on takes misses, false-refusals, witnesses, failures, no-evidence.

    Exit code: 0, 1 a fault named by --fail-on, 64 usage, 70 the evidence cannot be read.
    """
    from turngate.proxy import cli_report  # not above: `serve` must not carry DuckDB in its memory

    if as_json and html is not None:
        _fail("--json and --html: choose one", EX_USAGE)
    now_s = time.time()
    evidence_dir = _settings(config_file, data_dir=data_dir).data_dir / "evidence"
    try:
        named = cli_report.parse_faults(fail_on)
        gathered = cli_report.read(evidence_dir, cli_report.parse_since(since, now_s), now_s, err)
        cli_report.give_out(gathered, evidence_dir, out, err, as_json=as_json, html=html)
    except cli_report.BadOption as error:
        _fail(str(error), EX_USAGE)
    except cli_report.NoEvidence as error:
        _fail(str(error), EX_INTERNAL)
    if found := cli_report.found(gathered, named):
        _fail(found, 1)


@app.command()
def explain(
    operation: Annotated[str, typer.Argument(metavar="OPERATION", help="As in x-turngate-operation.")],
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Settings file (default: ./turngate.yaml).")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Whose evidence and ledger.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a page.")] = False,
) -> None:
    """One exchange on one page: timeline, verdict, findings, holds, dispatch, and what each other stage would have done.

    Exit code: 0, 1 no such operation, 64 usage, 70 evidence or ledger cannot be read.
    """
    from turngate.proxy import cli_explain  # not above: `serve` must not carry DuckDB in its memory

    try:
        story = cli_explain.look_up(_settings(config_file, data_dir=data_dir).data_dir, operation)
    except cli_explain.NotFound as error:
        _fail(str(error), 1)
    except cli_explain.NoEvidence as error:
        _fail(str(error), EX_INTERNAL)
    if as_json:
        print(cli_explain.as_json(story))
    else:
        cli_explain.print_story(story, out)


app.add_typer(cli_rollout.app, name="rollout")
app.add_typer(cli_unknown.app, name="unknown")


@app.command()
def version() -> None:
    """Print the version."""
    out.print(turngate.__version__)


def _settings(config_file: Path | None, **flags: object) -> Settings:
    try:
        settings = config.load(config_file, **flags)
    except SettingsError as error:
        _fail(str(error), EX_USAGE)
    for name in config.unknown_variables():
        err.print(f"[yellow]warning:[/] environment variable {name} is no setting and is not used")
    return settings


def _upstreams(named: list[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for each in named:
        name, equals, url = each.partition("=")
        if not equals or not name or not url:
            _fail(f"--upstream {each}: write NAME=URL, e.g. openai=https://api.openai.com", EX_USAGE)
        found[name] = {"url": url}
    return found


def _fail(text: str, code: int) -> NoReturn:
    err.print(f"[red]error:[/] {text}" if err.is_terminal else f"error: {text}", markup=err.is_terminal)
    raise typer.Exit(code)
