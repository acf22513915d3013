"""Settings: one model, read once, passed down as values.

Flags win over environment variables (`TURNGATE_SECTION__KEY`), those over `turngate.yaml`. An unknown key or a bad
value stops the start with the key, the value and what is allowed.
"""

import difflib
import ipaddress
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, Self, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from turngate.proxy import rollout
from turngate.proxy.control import Declared
from turngate.proxy.gates import RollbackLimits, Thresholds
from turngate.proxy.rollout import Headers, Ladder, Rung, Stage
from turngate.proxy.upstream import ForwardProxy, Origin

ENV_PREFIX: Final = "TURNGATE_"
CONFIG_VARIABLE: Final = "TURNGATE_CONFIG"


class SettingsError(Exception):
    """The settings cannot be used; the text says which key, which value, and what is allowed."""


class Address(BaseModel):
    """Where to listen."""

    model_config = ConfigDict(frozen=True)
    host: str
    port: int = Field(ge=0, le=65535)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def _address(value: object) -> object:
    if not isinstance(value, str):
        return value
    host, colon, port = value.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError("an address is HOST:PORT, e.g. 127.0.0.1:8787")
    return {"host": host.removeprefix("[").removesuffix("]") or "127.0.0.1", "port": int(port)}


AddressField = Annotated[Address, NoDecode, BeforeValidator(_address)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _url(value: str) -> str:
    Origin.parse(value)  # raises ValueError with what to do
    return value.rstrip("/")


def _endpoint(value: str) -> str:
    return _url(value) if value else value


def _off(value: object) -> object:
    return "off" if value is False else value  # YAML reads a bare `off` as false


StageField = Annotated[Stage, BeforeValidator(_off)]


def _proxy(value: SecretStr) -> SecretStr:
    if value.get_secret_value():
        ForwardProxy.parse(value.get_secret_value())  # raises ValueError with what to do
    return value


def _headers(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise ValueError(f"{name!r} is no name of a header")
        if not re.fullmatch(r"[!-~]([ -~]*[!-~])?", value):  # not quoted: it may be a key
            raise ValueError(f"the value of {name} must be printable ASCII without blanks at its ends")
    return {name.lower(): value for name, value in headers.items()}


class Upstream(_Section):
    """A provider that may be reached. `server` names the family whose rules it has; else its own name does."""

    url: Annotated[str, AfterValidator(_url)]
    server: str = ""
    models: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Patterns (`gpt-*`) of the models it serves, where several upstreams share a path without prefix."""
    header: Annotated[dict[str, str], AfterValidator(_headers)] = Field(default_factory=dict)
    """Headers, by lower-case name, that a request for it carries where several upstreams share a path."""
    proxy: Annotated[SecretStr, AfterValidator(_proxy)] | None = None
    """`http://[USER:PASSWORD@]HOST:PORT`. Empty: none. Not set: what HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY
    of the sidecar's environment say, which never concern loopback addresses."""
    ca_file: Path | None = None
    """Certificates (PEM) trusted here, beside the system's and those of `tls.ca_file`."""
    client_cert: Path | None = None
    """Our certificate and its chain (PEM), with the key unless `client_key` names its file."""
    client_key: Path | None = None

    @model_validator(mode="after")
    def _tls_fits(self) -> Self:
        if self.client_key and not self.client_cert:
            raise ValueError("client_key goes with client_cert; set that too")
        if self.url.startswith("http:") and (self.ca_file or self.client_cert):
            raise ValueError("ca_file and client_cert go with an https:// URL")
        return self


class Tls(_Section):
    """What is trusted at all upstreams beside the system's certificates (or those of SSL_CERT_FILE)."""

    ca_file: Path | None = None


class Match(_Section):
    """What a scope covers: an upstream, models and values of headers, by pattern (`gpt-*`). Empty covers all."""

    upstream: str = "*"
    model: str = "*"
    header: Annotated[dict[str, str], AfterValidator(_headers)] = Field(default_factory=dict)

    @property
    def covered(self) -> rollout.Scope:
        return rollout.Scope(self.upstream, self.model, tuple(sorted(self.header.items())))


class Policy(_Section):
    """What a scope does beside its stage. All of it concerns enforced requests only."""

    integrity: Literal["report", "enforce"] = "report"
    """enforce: refuse a request that brings back what the app was told to drop."""
    uncovered: Literal["pass", "refuse"] = "pass"
    """What becomes of a request that cannot be judged."""
    ledger_down: Literal["degrade", "refuse"] = "degrade"
    """What becomes of a request that the ledger cannot take: treated as in `observe`, or refused."""
    reattempt: Literal["never", "confirmed"] = "never"
    """confirmed: where the provider's connection ended before anything of an answer was passed on, ask once more."""


class Scope(Policy):
    """A stage for what it matches. The first scope that matches counts."""

    match: Match = Match()
    stage: StageField
    percent: int = Field(default=100, ge=0, le=100)
    """Of the conversations; the others go on to the next scope that matches."""


class Limits(_Section):
    """Bounds of what is kept in memory."""

    body_bytes: int = Field(default=64 * 2**20, ge=1024)
    """A request body, or a whole JSON answer, larger than this is passed on unjudged."""
    hold_bytes: int = Field(default=32 * 2**20, ge=1024)
    """What one answer's gate may hold before it gives the turn up (`limit.hold`)."""
    hold_all_bytes: int = Field(default=256 * 2**20, ge=1024)
    """What all answers together may hold; the one that would go beyond it is given up."""


class Timeouts(_Section):
    """How long an enforced scope waits for a provider, in seconds. The defaults are above the SDKs' own (connect 5,
    read 600), so that an app that has limits keeps them. None of these applies where nothing is enforced."""

    connect_s: float = Field(default=10.0, gt=0)
    first_byte_s: float = Field(default=660.0, gt=0)
    idle_s: float = Field(default=660.0, gt=0)
    """Silence within an answer; time in which the app itself does not read does not count."""
    keep_alive_s: float = Field(default=15.0, gt=0)
    """How often a comment tells the app's reader, while calls are held, that the stream is alive."""


class LedgerSettings(_Section):
    """Leases and ages of the dispatch ledger, in seconds."""

    lease_s: float = Field(default=10.0, gt=0)
    settle_s: float = Field(default=5.0, ge=0)
    """How long a dispatch with tools stays UNKNOWN after its connection ended before it counts as abandoned."""


_WANTED: Final = Thresholds()
_BORNE: Final = RollbackLimits()


class Promotion(_Section):
    """What a promotion asks for; `gates.Thresholds` has the meaning of each."""

    samples_min: int = Field(default=_WANTED.samples_min, ge=0)
    false_refusals_max: int = Field(default=_WANTED.false_refusals_max, ge=0)
    misses_max: int = Field(default=_WANTED.misses_max, ge=0)
    witnesses_max: int = Field(default=_WANTED.witnesses_max, ge=0)
    failures_max: int = Field(default=_WANTED.failures_max, ge=0)
    unclear_share_max: float = Field(default=_WANTED.unclear_share_max, ge=0, le=1)
    unsettled_share_max: float = Field(default=_WANTED.unsettled_share_max, ge=0, le=1)

    def thresholds(self) -> Thresholds:
        return Thresholds(**self.model_dump())


class Rollback(_Section):
    """At how many within `window_s` seconds a scope is rolled back by itself; 0: never for this."""

    window_s: float = Field(default=_BORNE.window_s, gt=0)
    false_refusals: int = Field(default=_BORNE.false_refusals, ge=0)
    misses: int = Field(default=_BORNE.misses, ge=0)
    witnesses: int = Field(default=_BORNE.witnesses, ge=0)
    failures: int = Field(default=_BORNE.failures, ge=0)

    def limits(self) -> RollbackLimits:
        return RollbackLimits(**self.model_dump())


class Otlp(_Section):
    """Where spans and metrics go; headers only by OTEL_EXPORTER_OTLP_HEADERS, so that no key stands in a file."""

    endpoint: Annotated[str, AfterValidator(_endpoint)] = ""
    """Base URL of a collector (OTLP over HTTP). Empty: as OTEL_EXPORTER_OTLP_ENDPOINT says, and without that none."""


class Spool(_Section):
    """The log between proxy and observer."""

    bytes_max: int = Field(default=256 * 2**20, ge=2**20)


DEFAULT_UPSTREAMS: Final = {
    "openai": Upstream(url="https://api.openai.com"),
    "anthropic": Upstream(url="https://api.anthropic.com"),
}


def _default_data_dir() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "turngate"


class Settings(BaseSettings):
    """Everything that can be set. See `turngate serve --help` for the flags."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, validate_default=True
    )

    listen: AddressField = Address(host="127.0.0.1", port=8787)
    metrics: AddressField = Address(host="127.0.0.1", port=8788)
    admin: AddressField = Address(host="127.0.0.1", port=8789)
    allow_remote: bool = False
    data_dir: Path = Field(default_factory=_default_data_dir)
    stage: StageField = Stage.OBSERVE
    """The stage of everything that no scope covers."""
    scopes: tuple[Scope, ...] = ()
    conversation_from: str = ""
    """The header by which an app names its conversation; empty: a conversation is known by its first user message."""
    owner_from: str = ""
    """The header that tells apart whose requests these are; empty: the credential does."""
    upstreams: dict[str, Upstream] = Field(default_factory=dict)
    default_upstream: str = ""
    drain_s: float = Field(default=25.0, ge=0)
    """How long open answers may take to end after SIGTERM; then they are ended by an error."""
    linger_s: float = Field(default=0.0, ge=0)
    """How long to go on listening after SIGTERM even when idle: for load balancers that learn of it late."""
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    tls: Tls = Tls()
    ledger: LedgerSettings = LedgerSettings()
    promotion: Promotion = Promotion()
    rollback: Rollback = Rollback()
    spool: Spool = Spool()
    otlp: Otlp = Otlp()
    log: Annotated[Literal["auto", "text", "json", "off"], BeforeValidator(_off)] = "auto"
    """A line for each exchange on stderr; auto: text on a terminal, else JSON."""

    @field_validator("upstreams", mode="after")
    @classmethod
    def _with_defaults(cls, named: dict[str, Upstream]) -> dict[str, Upstream]:
        return {**DEFAULT_UPSTREAMS, **named}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = ", ".join(sorted(self.upstreams))
        if self.default_upstream and self.default_upstream not in self.upstreams:
            raise ValueError(f"default_upstream: {self.default_upstream!r} is no upstream; there are {names}")
        if not self.listen.is_loopback and not self.allow_remote:
            raise ValueError(
                f"listen: {self.listen} can be reached from elsewhere and would be an open relay; "
                "say allow_remote: true (--allow-remote) if that is meant"
            )
        return self

    def policy(self, upstream: str, model: str, headers: Headers = ()) -> Policy:
        """What the first scope says that matches."""
        for scope in self.scopes:
            covered = scope.match.covered
            if covered.may_match(upstream, model) and covered.has_headers(headers):
                return scope
        return Policy()

    def ladder(self, key: bytes = b"") -> Ladder:
        """The stages as set; orders to the running proxy come on top."""
        return Ladder(self.rungs(), self.stage, sticky_header=self.conversation_from, key=key)

    def rungs(self) -> tuple[Rung, ...]:
        """The scopes as rungs of the ladder."""
        covered = [(scope.match.covered, scope) for scope in self.scopes]
        return tuple(
            [Rung(of.upstream, of.model, scope.stage, of.header, scope.percent) for of, scope in covered]
        )

    def declared(self) -> Declared:
        """All that commands and the observer have to know of them."""
        return Declared(self.rungs(), self.stage, self.promotion.thresholds(), self.rollback.limits())


def file_of(config: Path | None) -> Path:
    """The settings file that is read, if it is there."""
    return config or Path(os.environ.get(CONFIG_VARIABLE) or "turngate.yaml")


def load(config: Path | None = None, **flags: object) -> Settings:
    """Read all sources. Flags that are None were not given. Raises SettingsError."""
    path = file_of(config)
    named = path if config or os.environ.get(CONFIG_VARIABLE) else None
    if named is not None and not named.is_file():
        raise SettingsError(f"cannot read settings from {named}: there is no such file")

    class FromFile(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=path)

    try:
        return FromFile(**{key: value for key, value in flags.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        raise SettingsError("\n".join(_told(error))) from error
    except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
        raise SettingsError(f"cannot read settings from {path}: {error}") from error


def unknown_variables() -> list[str]:
    """Environment variables that look like settings and are none. A warning only: orchestrators make up such names
    (a Kubernetes service called turngate gives every pod a TURNGATE_PORT)."""
    known = {f"{ENV_PREFIX}{name}".upper() for name in Settings.model_fields} | {CONFIG_VARIABLE}
    return sorted(
        name
        for name in os.environ
        if name.startswith(ENV_PREFIX) and name.split("__")[0].upper() not in known
    )


def _told(error: ValidationError) -> Iterator[str]:
    """One line per fault: key, value, what is allowed."""
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"]) or "settings"
        if fault["type"] == "extra_forbidden":
            allowed = _allowed_keys(fault["loc"])
            close = difflib.get_close_matches(str(fault["loc"][-1]), allowed, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            yield f"{key}: no such setting{hint}; allowed here: {', '.join(allowed)}"
        elif key == "settings":
            yield fault["msg"].removeprefix("Value error, ")
        else:
            yield f"{key}: {_shown(fault['input'])}{fault['msg'].removeprefix('Value error, ')}"


def _shown(value: object) -> str:
    """A refused value for a message. A table is left out: it may hold credentials; so may what stands before an @."""
    if isinstance(value, dict | list | tuple):
        return ""
    if isinstance(value, str) and "@" in value:
        value = f"***@{value.rpartition('@')[2]}"
    return f"{value!r} is not allowed: "


def _allowed_keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys of the section that an unknown key stands in."""
    model: type[BaseModel] = Settings
    for part in location[:-1]:
        field = model.model_fields.get(str(part))
        if field is None:
            continue  # a name in a table (`upstreams.NAME`) or an index in a list: the section below it follows
        model = next((found for found in _models(field.annotation)), model)
    return sorted(model.model_fields)


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
