"""The admin listener: who may ask, and what about.

A web page can make a browser send requests to loopback, so every request must name us in Host, and an Origin must be
our own. Writing takes the token always, reading takes it as soon as the listener is bound off loopback.
"""

import hmac
import ipaddress
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

_SAFE_METHODS: Final = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})


class Status(msgspec.Struct, frozen=True):
    """What `GET /api/status` answers; lag in seconds, rows and restarts since this observer started."""

    version: str
    evidence_rows: int
    evidence_lag_s: float
    spool_bytes: int
    observer_restarts: int


def admin_app(*, host: str, token: str, status: Callable[[], Status]) -> web.Application:
    """The application; `host` is the address it is bound to, without port."""

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def show_status(_request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(status()), content_type="application/json")

    app = web.Application(middlewares=[_guard(host, token)])
    app.router.add_get("/-/healthz", healthz)
    app.router.add_get("/api/status", show_status)
    return app


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
