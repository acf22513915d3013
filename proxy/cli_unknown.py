"""`turngate unknown`: dispatches whose outcome is not known, and an operator's word on how they ended."""

import getpass
import json
import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turngate.proxy import config
from turngate.proxy.config import SettingsError
from turngate.proxy.ledger_store import LedgerDown, read_unknown, resolve
from turngate.telemetry.spool import Spool
from turngate.validators.ledger import Dispatch, State, unknown_age_s

EX_NONE, EX_USAGE, EX_INTERNAL = 1, 64, 70


class Resolution(StrEnum):
    """What an operator may say of an UNKNOWN dispatch."""

    COMMITTED = "committed"
    ABANDONED = "abandoned"


STATES: Final = {Resolution.COMMITTED: State.COMMITTED, Resolution.ABANDONED: State.ABANDONED}

app = typer.Typer(no_args_is_help=True, help="Dispatches whose outcome is not known.")
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Settings file (default: ./turngate.yaml).")
]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="The proxy's data_dir.")]


@app.command("list")
def list_command(
    config_file: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a dispatch instead of a table.")
    ] = False,
) -> None:
    """List them, oldest first: how long, where, why, and in which conversation.

    Exit code: 0, 1 there is none, 64 usage, 70 the ledger cannot be read.
    """
    now_s = time.time()
    try:
        found = read_unknown(_ledger(config_file, data_dir), now_s=now_s)
    except LedgerDown as error:
        _fail(str(error), EX_INTERNAL)
    if not found:
        err.print("no dispatch is UNKNOWN")
        raise typer.Exit(EX_NONE)
    if as_json:
        for d in found:
            print(json.dumps(_facts(d, now_s)))
    else:
        _print_table(found, now_s)


@app.command("resolve")
def resolve_command(
    operations: Annotated[
        list[str], typer.Argument(metavar="OPERATION...", help="As `unknown list` names them.")
    ],
    to: Annotated[Resolution, typer.Option("--as", help="How it ended: with an answer, or without one.")],
    why: Annotated[str, typer.Option("--why", help="Kept with the change.")],
    config_file: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Say how they ended, as far as you could find out. The proxy may run or not.

    A committed one is the turn of its revision: a retry does not get another one. After an abandoned one it does.

    Exit code: 0, 1 one of them is not UNKNOWN (the others are resolved), 64 usage, 70 the ledger cannot be changed.
    """
    ledger = _ledger(config_file, data_dir)
    try:
        resolved = _resolve(ledger, operations, STATES[to], why=why, now_s=time.time())
    except (LedgerDown, OSError) as error:
        _fail(str(error), EX_INTERNAL)
    for operation in operations:
        if operation in resolved:
            out.print(f"{operation} is {to}", markup=False)
        else:
            err.print(f"{operation} is not UNKNOWN", markup=False)
    raise typer.Exit(0 if resolved.issuperset(operations) else EX_NONE)


def _resolve(ledger: Path, operations: Sequence[str], to: State, *, why: str, now_s: float) -> set[str]:
    """Which of them were UNKNOWN and are not any more. Raises LedgerDown, OSError.

    The proxy need not run: the file is changed by compare-and-swap, and the events get a segment of their own, which
    the observer reads like the proxy's.
    """
    spool = Spool(ledger.parent / "spool", secrets.token_hex(8))
    spool.start()  # first: what cannot be told is not done
    try:
        moves = resolve(ledger, operations, to, who=_user(), why=why, now_s=now_s)
        for move in moves:
            spool.emit(move)
    finally:
        spool.close()
    return {move.operation for move in moves}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        return str(os.getuid())


def _print_table(dispatches: Sequence[Dispatch], now_s: float) -> None:
    table = Table("operation", "age", "upstream", "model", "how", "conversation")
    for d in dispatches:
        age = str(timedelta(seconds=int(unknown_age_s(d, now_s))))
        # As text: what a provider or an app has named must not be read as markup.
        table.add_row(*map(Text, (d.operation, age, d.upstream, d.model, d.how, d.conversation)))
    out.print(table)


def _facts(d: Dispatch, now_s: float) -> dict[str, Any]:
    return {
        "operation": d.operation,
        "since_s": d.unknown_since_s,
        "age_s": unknown_age_s(d, now_s),
        "upstream": d.upstream,
        "api": d.api,
        "model": d.model,
        "how": d.how,
        "handle": d.handle,
        "conversation": d.conversation,
        "revision": d.revision,
        "ended_by": d.ended_by,
    }


def _ledger(config_file: Path | None, data_dir: Path | None) -> Path:
    try:
        folder = config.load(config_file, data_dir=data_dir).data_dir
    except SettingsError as error:
        _fail(str(error), EX_USAGE)
    ledger = folder / "ledger.sqlite3"
    if not ledger.exists():
        _fail(f"no proxy has run with data_dir {folder}; name its folder with --data-dir", EX_USAGE)
    return ledger


def _fail(text: str, code: int) -> NoReturn:
    err.print(f"error: {text}", markup=False, style="red" if err.is_terminal else None)
    raise typer.Exit(code)
