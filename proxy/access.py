"""How each upstream is reached: directly or through a corporate proxy, which certificates are trusted, with which of ours.

Certificates and proxy variables are read once, at the start of the proxy, and what cannot be used stops it.
"""

import ipaddress
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from turngate.proxy.config import Address, Settings, SettingsError, Upstream
from turngate.proxy.upstream import Access, ForwardProxy, Origin, verifying_context


class _TlsFiles(NamedTuple):
    """What distinguishes one TLS context from another."""

    ca_files: tuple[Path, ...] = ()
    client_cert: Path | None = None
    client_key: Path | None = None


def accesses(settings: Settings, listening: Address, environ: Mapping[str, str]) -> dict[Origin, Access]:
    """How the upstreams' origins are reached, where that is not directly with the system's certificates.

    `listening` is the data port as bound. Raises SettingsError for files that cannot be used, for a proxy variable
    that cannot be, and for what leads back to ourselves. Not part of `load`, because only the proxy needs it: others
    may not even be allowed to read a key.
    """
    ways: dict[Origin, tuple[str, ForwardProxy | None, _TlsFiles]] = {}
    contexts: dict[_TlsFiles, ssl.SSLContext | None] = {_TlsFiles(): None}
    found: dict[Origin, Access] = {}
    for name, upstream in settings.upstreams.items():
        origin, _ = Origin.parse(upstream.url)
        if _is_own(origin, listening):
            raise SettingsError(
                f"upstreams.{name}.url: {upstream.url!r} is this sidecar itself: name a provider"
            )
        proxy, files = _proxy_for(name, upstream, origin, environ), _TlsFiles()
        if proxy is not None and _is_own(proxy.address, listening):
            raise SettingsError(
                f"upstreams.{name}: its proxy {proxy} is this sidecar itself: {_NO_PROXY_REMEDY}"
            )
        if origin.scheme == "https":
            ca_files = tuple(path for path in (settings.tls.ca_file, upstream.ca_file) if path)
            files = _TlsFiles(ca_files, upstream.client_cert, upstream.client_key)
        other, *way = ways.setdefault(origin, (name, proxy, files))
        if way != [proxy, files]:
            raise SettingsError(
                f"upstreams.{name}: leads to {origin.authority} as upstreams.{other} does, but not in the same way; "
                "give both the same proxy, ca_file, client_cert and client_key"
            )
        if files not in contexts:
            contexts[files] = _tls_context(name, settings, upstream)
        found[origin] = Access(proxy, contexts[files])
    return {origin: access for origin, access in found.items() if access != Access()}


_NO_PROXY_REMEDY: Final = "set proxy to another one, or to an empty string for none"
_WILDCARDS: Final = ("0.0.0.0", "::")


def _is_own(origin: Origin, listening: Address) -> bool:
    """Whether a connection there would be one to our own data port."""
    if origin.port != listening.port:
        return False
    local = origin.host in _WILDCARDS or Address(host=origin.host, port=origin.port).is_loopback
    return origin.host == listening.host or (
        local and (listening.is_loopback or listening.host in _WILDCARDS)
    )


def _proxy_for(
    name: str, upstream: Upstream, origin: Origin, environ: Mapping[str, str]
) -> ForwardProxy | None:
    if upstream.proxy is not None:
        url = upstream.proxy.get_secret_value()
        return ForwardProxy.parse(url) if url else None
    if _bypassed(origin, _variable(environ, "no_proxy")[1]):
        return None
    for suffix in (origin.scheme, "all"):
        variable, url = _variable(environ, f"{suffix}_proxy")
        if url:
            try:
                return ForwardProxy.parse(url)
            except ValueError as error:
                raise SettingsError(f"{variable}: {error} (upstreams.{name}: {_NO_PROXY_REMEDY})") from error
    return None


def _variable(environ: Mapping[str, str], lower: str) -> tuple[str, str]:
    """Name and value of a proxy variable. As everywhere, the lower-case one counts, even if it is empty."""
    name = lower if lower in environ else lower.upper()
    return name, environ.get(name, "").strip()


def _bypassed(origin: Origin, no_proxy: str) -> bool:
    """Whether NO_PROXY spares a host: `*`, names with all below them, `HOST:PORT`, addresses, networks (10.0.0.0/8)."""
    if Address(host=origin.host, port=origin.port).is_loopback:
        return True  # to a proxy, loopback is the proxy itself
    for entry in re.split(r"[,\s]+", no_proxy.lower()):
        name = entry.removeprefix("*.").lstrip(".")
        if entry == "*" or name in (origin.host, origin.authority, f"[{origin.host}]"):
            return True
        if name and (origin.host.endswith(f".{name}") or origin.authority.endswith(f".{name}")):
            return True
        if "/" in entry and _is_within(origin.host, entry):
            return True
    return False


def _is_within(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:  # a name, or no network: this entry does not speak of it
        return False


def _tls_context(name: str, settings: Settings, upstream: Upstream) -> ssl.SSLContext:
    """The verifying context of an upstream. Raises SettingsError."""
    context = verifying_context()
    for key, path in (("tls.ca_file", settings.tls.ca_file), (f"upstreams.{name}.ca_file", upstream.ca_file)):
        if path is not None:
            _require(key, path, "certificate", rb"-----BEGIN (X509 |TRUSTED )?CERTIFICATE-----")
            try:
                context.load_verify_locations(path)
            except ssl.SSLError as error:
                _unusable(key, path, f"a certificate in it cannot be read ({error.reason})", error)
    if upstream.client_cert is not None:
        _load_client_cert(context, name, upstream.client_cert, upstream.client_key)
    return context


def _load_client_cert(context: ssl.SSLContext, name: str, cert: Path, key: Path | None) -> None:
    cert_setting = f"upstreams.{name}.client_cert"
    key_setting = f"upstreams.{name}.client_key" if key else cert_setting
    _require(cert_setting, cert, "certificate", rb"-----BEGIN (X509 |TRUSTED )?CERTIFICATE-----")
    _require(key_setting, key or cert, "private key", rb"-----BEGIN ([A-Z]+ )?PRIVATE KEY-----")

    def no_password() -> NoReturn:  # without it, OpenSSL would ask on the terminal
        _unusable(key_setting, key or cert, "the private key is encrypted; write it without a password")

    try:
        context.load_cert_chain(cert, key, password=no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            _unusable(key_setting, key or cert, "the private key is not that of the certificate", error)
        _unusable(cert_setting, cert, f"certificate or key cannot be read ({error.reason})", error)


def _require(key: str, path: Path, what: str, mark: bytes) -> None:
    """Refuse a file that is not there or holds no PEM block of a kind: OpenSSL's own words do not tell."""
    try:
        content = path.read_bytes()
    except OSError as error:
        _unusable(key, path, error.strerror or str(error), error)
    if not re.search(mark, content):
        _unusable(key, path, f"there is no {what} (PEM) in it")


def _unusable(key: str, path: Path, why: str, cause: Exception | None = None) -> NoReturn:
    raise SettingsError(f"{key}: '{path}' cannot be used: {why}") from cause
