"""Where a request goes: which configured upstream, what target there, which dialect if it generates.

With no prefix the path tells the provider; `/NAME/…` addresses a configured upstream. Only configured upstreams can
be reached.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from turngate.adapters import registry
from turngate.adapters.dialect import Dialect
from turngate.proxy.config import Settings
from turngate.proxy.upstream import Origin
from turngate.proxy.wire import RequestHead

ANTHROPIC_MARKS: Final = (b"anthropic-version", b"x-api-key")


class NoRoute(Exception):
    """The request leads nowhere: 404 for a path, 421 for a host that is not configured."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Target:
    """A configured upstream, ready for use."""

    name: str
    server: str
    origin: Origin
    prefix: str


class Route(msgspec.Struct, frozen=True):
    """Where one request goes. `dialect` is None for what is only relayed."""

    target: Target
    path: str
    dialect: Dialect | None
    by_model: bool = False
    """Several upstreams share this path and the model decides: `Routes.for_model` once the body is read."""


class Routes:
    """The configured upstreams."""

    def __init__(self, settings: Settings) -> None:
        self._default = settings.default_upstream
        self._targets: Mapping[str, Target] = {
            name: Target(name, upstream.server or name, *Origin.parse(upstream.url))
            for name, upstream in settings.upstreams.items()
        }
        self._by_header = [
            (self._targets[name], upstream.header.items())
            for name, upstream in settings.upstreams.items()
            if upstream.header
        ]
        self._by_model = [
            (self._targets[name], upstream.models)
            for name, upstream in settings.upstreams.items()
            if upstream.models
        ]

    def find(self, head: RequestHead) -> Route:
        """The route of a request; its target's bytes are kept: no percent sign is touched. Raises NoRoute."""
        path = head.target
        if path.startswith("/"):
            return self._by_target(path, head)
        scheme, _, rest = path.partition("://")
        authority, slash, after = rest.partition("/")
        if scheme not in ("http", "https") or not authority:
            raise NoRoute(404, f"no upstream for this target; configured: {self._names()}")
        # Absolute-form: a client that takes us for its HTTP proxy.
        for target in self._targets.values():
            if target.origin.scheme == scheme and target.origin.host_header == authority.lower().encode():
                return self._route(target, slash + after or "/", head, prefixed=False)
        raise NoRoute(421, f"{authority[:64]!r} is no configured upstream; there are {self._names()}")

    def _by_target(self, path: str, head: RequestHead) -> Route:
        first, _, rest = path[1:].partition("/")
        if first in self._targets and rest:
            return self._route(self._targets[first], f"/{rest}", head)
        for target, wanted in self._by_header:
            sent = {
                (name.lower().decode("latin-1"), value.decode("latin-1").strip())
                for name, value in head.headers
            }
            if wanted <= sent:
                return self._route(target, path, head)
        chosen = self._targets.get(self._by_path(path, head))
        if chosen is None:
            raise NoRoute(404, f"no upstream for this path; configured: {self._names()}")
        route = self._route(chosen, path, head)
        if self._by_model and route.dialect is not None:
            return msgspec.structs.replace(route, by_model=True)
        return route

    def for_model(self, route: Route, model: str, path: str) -> Route:
        """The route among upstreams that share a path: the first whose pattern the model fits, else as before."""
        for target, patterns in self._by_model:
            if any(fnmatchcase(model, pattern) for pattern in patterns):
                return Route(target, target.prefix + path, route.dialect)
        return route

    def _names(self) -> str:
        return ", ".join(sorted(self._targets))

    def _by_path(self, path: str, head: RequestHead) -> str:
        bare = path.partition("?")[0]
        dialect = registry.by_path("POST", bare)
        if dialect is registry.CHAT:
            return "openai"
        if dialect is registry.MESSAGES or bare.startswith("/v1/messages"):
            return "anthropic"
        if not path.startswith("/v1/"):
            return self._default
        # Paths that both providers have, e.g. /v1/models.
        return "anthropic" if any(head.has(mark) for mark in ANTHROPIC_MARKS) else "openai"

    def _route(self, target: Target, path: str, head: RequestHead, *, prefixed: bool = True) -> Route:
        dialect = registry.by_path(head.method, path.partition("?")[0])
        return Route(target, target.prefix + path if prefixed else path, dialect)
