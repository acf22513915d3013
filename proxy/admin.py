"""The admin listener: who may ask, and what about.

A web page can make a browser send requests to loopback, so every request must name us in Host, and an Origin must be
our own. Writing takes the token always, reading takes it as soon as the listener is bound off loopback.
"""

import asyncio
import hmac
import ipaddress
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, assert_never
from urllib.parse import urlsplit

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from turngate.proxy import control
from turngate.proxy.gates import Evidence
from turngate.proxy.rollout import EVERYTHING, Rung, Stage

_SAFE_METHODS: Final = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})


class Status(msgspec.Struct, frozen=True):
    """What `GET /api/status` answers; lag in seconds, rows and restarts since this observer started."""

    version: str
    evidence_rows: int
    evidence_lag_s: float
    spool_bytes: int
    observer_restarts: int


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `POST /api/rollout` takes; the words are those of `turngate rollout`.

    `scope`: "" is everything for `set`, and what no other scope covers for the others. `stage`: for `set` only.
    """

    action: Literal["set", "promote", "rollback"]
    scope: str = ""
    stage: str = ""
    percent: Annotated[int, msgspec.Meta(ge=1, le=100)] | None = None
    force: bool = False
    why: str
    by: Annotated[str, msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class RolloutDesk:
    """Where stages are changed: the ledger file, and who gathers the evidence (rungs, the rung, its next stage)."""

    ledger: Path
    gathered: Callable[[Sequence[Rung], Rung, Stage], Evidence]


def admin_app(
    *, host: str, token: str, status: Callable[[], Status], rollout: RolloutDesk | None = None
) -> web.Application:
    """The application; `host` is the address it is bound to, without port."""

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def show_status(_request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(status()), content_type="application/json")

    app = web.Application(middlewares=[_guard(host, token)])
    app.router.add_get("/-/healthz", healthz)
    app.router.add_get("/api/status", show_status)
    if rollout is not None:
        _add_rollout(app, rollout)
    return app


def _add_rollout(app: web.Application, desk: RolloutDesk) -> None:
    """`GET /api/rollout`: where things stand. `POST /api/rollout`: a `Change`; the answer is where they stand then."""

    async def show(_request: web.Request) -> web.Response:
        return await _answered(lambda: None, desk)

    async def change(request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read(), type=Change)
        except msgspec.MsgspecError as error:
            return _told(400, str(error))
        return await _answered(lambda: _carry_out(wanted, desk), desk)

    app.router.add_get("/api/rollout", show)
    app.router.add_post("/api/rollout", change)


async def _answered(work: Callable[[], None], desk: RolloutDesk) -> web.Response:
    """Where things stand after some work, or why it was not done. SQLite and DuckDB may block: not in the loop."""

    def done() -> bytes:
        work()
        return msgspec.json.encode(control.read(desk.ledger).told())

    try:
        return web.Response(body=await asyncio.to_thread(done), content_type="application/json")
    except control.NotYet as error:
        return _told(409, str(error), error.missing)
    except control.Overtaken as error:
        return _told(409, str(error))
    except (control.BadOrder, ValueError) as error:
        return _told(400, str(error))
    except (control.NoEvidence, sqlite3.Error, FileNotFoundError) as error:
        return _told(503, f"{type(error).__name__}: {error}")


def _carry_out(change: Change, desk: RolloutDesk) -> None:
    """Raises as `control` does."""
    rollout, by = control.read(desk.ledger), control.Operator(change.by, change.why)
    match change.action:
        case "set":
            if not change.stage:
                raise control.BadOrder("set takes a stage, or settings")
            stage = None if change.stage == "settings" else Stage(change.stage)
            percent = 100 if change.percent is None else change.percent
            control.put(desk.ledger, rollout, change.scope or EVERYTHING, stage, percent, by)
        case "promote":
            control.promote(
                desk.ledger,
                rollout,
                change.scope or "*",
                partial(desk.gathered, rollout.rungs),
                by,
                percent=change.percent,
                force=change.force,
            )
        case "rollback":
            control.roll_back(desk.ledger, rollout, change.scope or "*", by)
        case _:
            assert_never(change.action)


def _told(status: int, message: str, missing: Sequence[str] = ()) -> web.Response:
    body = msgspec.json.encode({"error": message, "missing": missing})
    return web.Response(status=status, body=body, content_type="application/json")


def is_loopback(host: str) -> bool:
    """Whether a host name or address without port means this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _guard(host: str, token: str) -> Middleware:
    local = is_loopback(host)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not _names_us(request.headers.getall(hdrs.HOST, []), host):
            return _refuse(421, "Host is not this listener. Use its own address.")
        if not _own_origin(request):
            return _refuse(403, "Origin is another site. Call from this listener's own pages.")
        if not (local and request.method in _SAFE_METHODS) and not _has_token(request, token):
            answer = _refuse(401, "This takes the token. Send Authorization: Bearer and keys/admin.token.")
            answer.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
            return answer
        return await handler(request)

    return guard


def _names_us(hosts: list[str], bound: str) -> bool:
    if len(hosts) != 1:
        return False
    name = _hostname(f"//{hosts[0]}")
    if name is None:
        return False
    # Bound to all addresses we cannot know our names; then each request has to bring the token, which no page has.
    return is_loopback(name) or name == bound.lower() or bound in ("0.0.0.0", "::")


def _own_origin(request: web.Request) -> bool:
    origins = request.headers.getall(hdrs.ORIGIN, [])
    return not origins or [origin.lower() for origin in origins] == [
        f"http://{request.headers[hdrs.HOST]}".lower()
    ]


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None  # no host at all is what the caller refuses


def _has_token(request: web.Request, token: str) -> bool:
    scheme, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    # As bytes: compare_digest refuses text beyond ASCII.
    return scheme.lower() == "bearer" and hmac.compare_digest(
        given.strip().encode(errors="surrogateescape"), token.encode()
    )


def _refuse(status: int, message: str) -> web.Response:
    return web.Response(status=status, text=message + "\n")
