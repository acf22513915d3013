"""Where a request goes: which configured upstream, what target there, which dialect if it generates.

With no prefix the path tells the provider; `/NAME/…` addresses a configured upstream. Only configured upstreams can
be reached.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from turngate.adapters import registry
from turngate.adapters.dialect import Dialect
from turngate.proxy.config import Settings
from turngate.proxy.upstream import Origin
from turngate.proxy.wire import RequestHead

ANTHROPIC_MARKS: Final = (b"anthropic-version", b"x-api-key")


@dataclass(frozen=True, slots=True)
class Target:
    """A configured upstream, ready for use."""

    name: str
    server: str
    origin: Origin
    prefix: str


@dataclass(frozen=True, slots=True)
class Route:
    """Where one request goes. `dialect` is None for what is only relayed."""

    target: Target
    path: str
    dialect: Dialect | None


class Routes:
    """The configured upstreams."""

    def __init__(self, settings: Settings) -> None:
        self._default = settings.default_upstream
        self._targets: Mapping[str, Target] = {
            name: Target(name, upstream.server or name, *Origin.parse(upstream.url))
            for name, upstream in settings.upstreams.items()
        }

    @property
    def names(self) -> list[str]:
        """For the answer to a request that leads nowhere."""
        return sorted(self._targets)

    def find(self, head: RequestHead) -> Route | None:
        """The route of a request, or None. The target's bytes are kept: no percent sign is touched."""
        path = head.target
        if not path.startswith("/"):
            return None  # absolute-form and `*`: nothing a base URL produces
        first, _, rest = path[1:].partition("/")
        if first in self._targets and rest:
            return self._route(self._targets[first], f"/{rest}", head)
        target = self._targets.get(self._by_path(path, head))
        return self._route(target, path, head) if target is not None else None

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

    def _route(self, target: Target, path: str, head: RequestHead) -> Route:
        dialect = registry.by_path(head.method, path.partition("?")[0])
        return Route(target, target.prefix + path, dialect)
