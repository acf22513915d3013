"""How the sidecar reaches providers: forward proxies, certificates, the age of connections, and connections gone stale.

No name is looked up: whoever is reached by name is reached through a proxy of the test, which ignores it.
"""

import asyncio
import base64
import shutil
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import openai
import orjson
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from running import Sidecar, in_loop, ledger_rows, settings_of

from turngate.proxy import config, server
from turngate.proxy.access import accesses
from turngate.proxy.config import Address, Settings, SettingsError, Upstream
from turngate.proxy.upstream import (
    CONNECTION_AGE_MAX_S,
    TUNNEL_HEAD_BYTES_MAX,
    Access,
    Broken,
    ForwardProxy,
    Link,
    Origin,
    Pool,
    Unreachable,
)

LISTENING: Final = Address(host="127.0.0.1", port=8787)
REQUEST: Final = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
OK: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
OPEN: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"
NAMED: Final = "provider.test"
"""A name that no resolver knows (RFC 6761)."""

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Awaitable[None]], None]]:
    """Runs a scenario on plain asyncio and on uvloop."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run  # type: ignore[misc]


Run = Callable[[Awaitable[None]], None]


@asynccontextmanager
async def serving(handler: Handler, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server on a free port; whatever its handlers still do at the end is ended."""
    handlers: list[asyncio.Task[None]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.append(task)
        # What ends a handler that the test has no more use for.
        with suppress(asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError), closing(writer):
            await handler(reader, writer)

    listener = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def keep_answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)


@dataclass(slots=True)
class TunnelProxy:
    """A forward proxy that leads all tunnels to one port of this machine, or answers `answer` and closes."""

    leads_to: int = 0
    answer: bytes = OPEN
    heads: list[bytes] = field(default_factory=list)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self.answer)
        if not self.leads_to:
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.leads_to)
        with closing(far_writer):
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


async def ask(pool: Pool, origin: Origin) -> tuple[Link, bytes]:
    """The link and the whole answer's entity; raises what the pool and the link raise."""
    link = await pool.acquire(origin)
    link.expect_answer()
    link.write(REQUEST)
    await link.head()
    body = b""
    while data := await link.read():
        body += data
    return link, body


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something is so; the suite's time limit is the only clock."""
    while not condition():  # noqa: ASYNC110 - what is waited for lies inside transports and tells nobody
        await asyncio.sleep(0)


# Certificates


class Certificate(NamedTuple):
    """Self-signed, so that it is also what its peers have to trust."""

    cert: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        return context


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificate]:
    """Of a provider, of its client, and of somebody else."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command to make certificates with")
    folder = tmp_path_factory.mktemp("tls")
    made: dict[str, Certificate] = {}
    for name in ("provider", "client", "stranger"):
        made[name] = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
        command = (
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
            f"-addext subjectAltName=DNS:{NAMED},IP:127.0.0.1 -subj /CN={name} "
            f"-keyout {made[name].key} -out {made[name].cert}"
        )
        subprocess.run([openssl, *command.split()], check=True, capture_output=True)
    return made


def settings_with(upstream: Any, **more: Any) -> Settings:
    return Settings(upstreams={"corp": upstream}, **more)


def access_of(upstream: dict[str, Any], environ: dict[str, str] | None = None, **more: Any) -> Access:
    """How the upstream `corp` is reached."""
    settings = settings_with(upstream, **more)
    return accesses(settings, LISTENING, environ or {}).get(Origin.parse(upstream["url"])[0], Access())


# Which proxy

CORP: Final = {"HTTPS_PROXY": "http://corp:3128", "HTTP_PROXY": "plain:80", "ALL_PROXY": "http://all:1"}


def but_for(no_proxy: str) -> dict[str, str]:
    return {**CORP, "NO_PROXY": no_proxy}


# URL of the upstream, its own setting, the environment, the proxy in use.
PROXIES: dict[str, tuple[str, str | None, dict[str, str], str | None]] = {
    "none": ("https://a.example", None, {}, None),
    "https": ("https://a.example", None, CORP, "corp:3128"),
    "http, without a scheme": ("http://a.example", None, CORP, "plain:80"),
    "all": ("https://a.example", None, {"all_proxy": "http://[::1]:8080/"}, "[::1]:8080"),
    "the default port": ("https://a.example", None, {"https_proxy": "corp"}, "corp:80"),
    "lower case counts": ("https://a.example", None, {**CORP, "https_proxy": "low:1"}, "low:1"),
    "lower case and empty: all": ("https://a.example", None, {**CORP, "https_proxy": ""}, "all:1"),
    "its own": ("https://a.example", "http://own:9", but_for("*"), "own:9"),
    "its own, none": ("https://a.example", "", CORP, None),
    "its own, to loopback": ("http://127.0.0.1:1", "http://own:9", {}, "own:9"),
    "loopback address": ("https://127.3.2.1", None, CORP, None),
    "loopback name": ("http://localhost:80", None, CORP, None),
    "IPv6 loopback": ("http://[::1]:11434", None, CORP, None),
    "no: everything": ("https://a.example", None, but_for("*"), None),
    "no: the host": ("https://a.example", None, but_for("x, A.Example"), None),
    "no: blanks between": ("https://a.example", None, but_for("x a.example"), None),
    "no: lower case counts": ("https://a.example", None, {**but_for("*"), "no_proxy": ""}, "corp:3128"),
    "no: a domain": ("https://a.example", None, but_for("example"), None),
    "no: a domain with a dot": ("https://a.example", None, but_for(".example"), None),
    "no: a domain with a star": ("https://a.example", None, but_for("*.example"), None),
    "no: the end of a label": ("https://ba.example", None, but_for("a.example"), "corp:3128"),
    "no: host and port": ("https://a.example:8443", None, but_for("a.example:8443"), None),
    "no: another port": ("https://a.example", None, but_for("a.example:8443"), "corp:3128"),
    "no: the default port": ("https://a.example", None, but_for("a.example:443"), None),
    "no: an address": ("https://10.1.2.3", None, but_for("10.1.2.3"), None),
    "no: an IPv6 address": ("https://[2001:db8::1]", None, but_for("[2001:db8::1]"), None),
    "no: a network": ("http://10.1.2.3:8000", None, but_for("10.0.0.0/8"), None),
    "no: an IPv6 network": ("https://[2001:db8::1]", None, but_for("2001:db8::/32"), None),
    "no: another network": ("http://11.1.2.3", None, but_for("10.0.0.0/8,fd00::/8"), "plain:80"),
    "no: a network and a name": ("https://a.example", None, but_for("10.0.0.0/8,/,a/b"), "corp:3128"),
    "no: nothing between commas": ("https://a.example", None, but_for(",, ."), "corp:3128"),
}


@pytest.mark.parametrize(("url", "own", "environ", "expected"), PROXIES.values(), ids=PROXIES)
def test_the_setting_or_else_the_environment_says_which_proxy_leads_to_an_upstream(
    url: str, own: str | None, environ: dict[str, str], expected: str | None
) -> None:
    proxy = access_of({"url": url, "proxy": own}, environ).proxy
    assert (str(proxy) if proxy else None) == expected


CREDENTIALS: dict[str, tuple[str, bytes]] = {
    "user and password": ("http://user:pass@corp:3128", b"user:pass"),
    "without a scheme": ("user:pass@corp:3128", b"user:pass"),
    "only a user": ("http://user@corp:3128", b"user:"),
    "percent-encoded": ("http://DOM%5Cu%40x:p%3A%2f%20%C3%BC@corp:3128", "DOM\\u@x:p:/ ü".encode()),
    "a raw @ and / in the password": ("http://user:p@/ss@corp:3128", b"user:p@/ss"),
    "none": ("http://corp:3128", b""),
}


@pytest.mark.parametrize(("url", "credentials"), CREDENTIALS.values(), ids=CREDENTIALS)
def test_credentials_of_a_proxy_url_go_into_the_request_for_a_tunnel_and_nowhere_else(
    url: str, credentials: bytes
) -> None:
    proxy = ForwardProxy.parse(url)
    line = b"Proxy-Authorization: Basic " + base64.b64encode(credentials) + b"\r\n" if credentials else b""
    authority = b"[2001:db8::1]:443"
    assert proxy.tunnel_request(Origin.parse("https://[2001:db8::1]")[0]) == (
        b"CONNECT " + authority + b" HTTP/1.1\r\nHost: " + authority + b"\r\n" + line + b"\r\n"
    )
    assert f"{proxy} {proxy!r}".count("corp") == 2
    assert [word for word in ("user", "pass", "Basic", "DOM") if word in f"{proxy} {proxy!r}"] == []


@given(user=st.text(st.characters(exclude_characters=":@", codec="utf-8")), password=st.text(min_size=1))
def test_no_credential_can_end_the_line_it_stands_in(user: str, password: str) -> None:
    proxy = ForwardProxy.parse(f"http://{user}:{password.encode(errors='replace').decode()}@corp:3128")
    assert proxy.tunnel_request(Origin("https", "a.example", 443)).count(b"\r\n") == 4


BAD_PROXIES: dict[str, tuple[str, str]] = {
    "another kind": ("socks5://u:secret@corp:1080", "no other kind can be used"),
    "TLS to the proxy": ("https://u:secret@corp:3128", "no other kind can be used"),
    "no host": ("http://u:secret@:3128", "write a host name"),
    "a bad port": ("http://u:secret@corp:99999", "write a port"),
    "a path": ("http://u:secret@corp:3128/proxy.pac", "a proxy has no path"),
    "a query": ("http://u:secret@corp:3128?x", "remove ? and #"),
    "a line break": ("http://u:secret@corp\r\n:3128", "percent-encode"),
}


@pytest.mark.parametrize(("url", "remedy"), BAD_PROXIES.values(), ids=BAD_PROXIES)
def test_a_proxy_that_cannot_be_used_stops_the_start_without_its_credentials_being_shown(
    tmp_path: Path, url: str, remedy: str
) -> None:
    path = tmp_path / "turngate.yaml"
    path.write_bytes(orjson.dumps({"upstreams": {"corp": {"url": "https://a.example", "proxy": url}}}))
    with pytest.raises(SettingsError) as of_setting:
        config.load(path)
    with pytest.raises(SettingsError) as of_variable:
        access_of({"url": "https://a.example"}, {"https_proxy": url})
    assert str(of_setting.value).startswith("upstreams.corp.proxy: '***@")
    assert str(of_variable.value).startswith("https_proxy: ")
    for told in (str(of_setting.value), str(of_variable.value)):
        assert remedy in told
        assert "secret" not in told


@pytest.mark.parametrize(
    "upstream",
    [
        {"proxy": "http://u:secret@corp:3128"},
        {"url": "https://secret@a.example"},
        {"url": "https://a.example", "client_key": "k.pem", "proxy": "http://u:secret@corp:3128"},
        {"url": "https://a.example", "header": {"authorization": "Bearer secret\n"}},
    ],
    ids=["no URL", "a credential in the URL", "settings that do not fit", "a header"],
)
def test_an_error_in_an_upstreams_settings_shows_no_credential(
    tmp_path: Path, upstream: dict[str, Any]
) -> None:
    path = tmp_path / "turngate.yaml"
    path.write_bytes(orjson.dumps({"upstreams": {"corp": upstream}}))
    with pytest.raises(SettingsError) as caught:
        config.load(path)
    assert str(caught.value).startswith("upstreams.corp")
    assert "secret" not in str(caught.value)


def test_printed_settings_do_not_show_a_proxys_credentials() -> None:
    settings = settings_with({"url": "https://a.example", "proxy": "http://u:secret@corp:3128"})
    assert "secret" not in f"{settings!r} {settings.model_dump_json()} {accesses(settings, LISTENING, {})!r}"


# What leads nowhere

OWN: dict[str, tuple[str, Address, bool]] = {
    "the same address": ("http://127.0.0.1:8787/v1", LISTENING, True),
    "by name": ("http://localhost:8787", LISTENING, True),
    "of the other family": ("http://[::1]:8787", LISTENING, True),
    "with TLS": ("https://127.0.0.1:8787", LISTENING, True),
    "the wildcard address": ("http://0.0.0.0:8787", LISTENING, True),
    "loopback of a wildcard": ("http://127.0.0.1:8787", Address(host="::", port=8787), True),
    "the host listened on": ("http://10.0.0.5:8787", Address(host="10.0.0.5", port=8787), True),
    "another port": ("http://127.0.0.1:8788", LISTENING, False),
    "another host": ("http://10.0.0.5:8787", LISTENING, False),
    "loopback beside the host listened on": (
        "http://127.0.0.1:8787",
        Address(host="10.0.0.5", port=8787),
        False,
    ),
}


@pytest.mark.parametrize(("url", "listening", "is_own"), OWN.values(), ids=OWN)
def test_neither_an_upstream_nor_its_proxy_may_be_our_own_listener(
    url: str, listening: Address, is_own: bool
) -> None:
    def told(upstream: dict[str, Any]) -> str:
        try:
            accesses(settings_with(upstream), listening, {})
        except SettingsError as error:
            return str(error)
        return ""

    as_upstream = told({"url": url})
    assert ("upstreams.corp.url: " in as_upstream and "this sidecar itself" in as_upstream) == is_own
    proxy = f"http://u:secret@{Origin.parse(url)[0].authority}"
    as_proxy = told({"url": "https://a.example", "proxy": proxy})
    assert ("upstreams.corp: its proxy" in as_proxy and "this sidecar itself" in as_proxy) == is_own
    assert "secret" not in as_proxy


async def test_a_sidecar_that_would_call_itself_does_not_start_also_on_a_port_of_the_systems_choice(
    tmp_path: Path,
) -> None:
    listening = server.Listening.bind(Settings(**settings_of(tmp_path, {}, "observe", {})))
    with closing(listening):
        upstreams = {"loop": f"http://localhost:{listening.data.getsockname()[1]}/v1"}
        settings = Settings(**settings_of(tmp_path, upstreams, "observe", {}))
        with pytest.raises(server.StartError, match=r"^upstreams\.loop\.url: .* is this sidecar itself"):
            server.Proxy(settings, listening)


def test_upstreams_with_one_origin_have_to_agree_on_the_way_there() -> None:
    url = "https://a.example"
    upstreams: Any = {"one": {"url": url}, "two": {"url": f"{url}/v2", "proxy": "http://corp:3128"}}
    settings = Settings(upstreams=upstreams)
    with pytest.raises(
        SettingsError, match=r"upstreams\.two: leads to a\.example:443 as upstreams\.one does, but not"
    ):
        accesses(settings, LISTENING, {})
    proxy = ForwardProxy.parse("http://corp:3128")
    assert accesses(settings, LISTENING, {"https_proxy": "corp:3128", "no_proxy": "api.openai.com"}) == {
        Origin("https", "a.example", 443): Access(proxy),
        Origin("https", "api.anthropic.com", 443): Access(proxy),
    }


# Settings that only others use

HEADERS: dict[str, tuple[dict[str, str], str]] = {
    "no name": ({"": "x"}, "'' is no name of a header"),
    "a blank in the name": ({"x y": "x"}, "'x y' is no name of a header"),
    "a colon in the name": ({"x:": "x"}, "'x:' is no name of a header"),
    "no value": ({"x": ""}, "the value of x must be printable"),
    "a blank at the end": ({"x": "y "}, "the value of x must be printable"),
    "a line break": ({"x": "y\r\nz: 1"}, "the value of x must be printable"),
    "not ASCII": ({"x": "ü"}, "the value of x must be printable"),
}


@pytest.mark.parametrize(("header", "remedy"), HEADERS.values(), ids=HEADERS)
def test_a_header_to_choose_an_upstream_by_is_one_that_a_request_can_carry(
    header: dict[str, str], remedy: str
) -> None:
    with pytest.raises(ValidationError, match=remedy):
        Upstream.model_validate({"url": "https://a.example", "header": header})


def test_upstreams_may_be_chosen_by_model_and_header() -> None:
    upstream = Upstream.model_validate(
        {"url": "https://a.example", "models": ["gpt-*", "o?"], "header": {"X-Team": "search 1"}}
    )
    assert (upstream.models, upstream.header) == (("gpt-*", "o?"), {"x-team": "search 1"})
    with pytest.raises(ValidationError, match="at least 1 character"):
        Upstream.model_validate({"url": "https://a.example", "models": [""]})


# TLS


@pytest.fixture
def pem(tmp_path: Path, certificates: dict[str, Certificate]) -> Callable[[str], str]:
    """Files by what is in them: `absent`, or names of certificates and keys joined by +."""

    def path_of(content: str) -> str:
        path = tmp_path / f"{content}.pem"
        parts = {
            "nothing": "",
            "garbage": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            "encrypted": "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
        }
        for name, certificate in certificates.items():
            parts[name] = certificate.cert.read_text()
            parts[f"{name}-key"] = certificate.key.read_text()
        if content != "absent":
            path.write_text("".join(parts[part] for part in content.split("+")))
        return str(path)

    return path_of


# Settings of the upstream (files by content), which of them is named, what is wrong.
BAD_FILES: dict[str, tuple[dict[str, str], str, str]] = {
    "no CA file": ({"ca_file": "absent"}, "ca_file", "No such file"),
    "a CA file without a certificate": ({"ca_file": "client-key"}, "ca_file", "no certificate (PEM) in it"),
    "a CA file that is broken": ({"ca_file": "garbage"}, "ca_file", "cannot be read"),
    "no client certificate": ({"client_cert": "absent"}, "client_cert", "No such file"),
    "an empty one": ({"client_cert": "nothing"}, "client_cert", "no certificate (PEM) in it"),
    "one that is broken": ({"client_cert": "garbage+client-key"}, "client_cert", "cannot be read"),
    "one without its key": ({"client_cert": "client"}, "client_cert", "no private key (PEM) in it"),
    "no key file": ({"client_cert": "client", "client_key": "absent"}, "client_key", "No such file"),
    "a key file without a key": (
        {"client_cert": "client", "client_key": "client"},
        "client_key",
        "no private key (PEM) in it",
    ),
    "another's key": (
        {"client_cert": "client", "client_key": "stranger-key"},
        "client_key",
        "not that of the certificate",
    ),
    "another's key in one file": (
        {"client_cert": "client+stranger-key"},
        "client_cert",
        "not that of the certificate",
    ),
    "a key with a password": (
        {"client_cert": "client", "client_key": "encrypted-key"},
        "client_key",
        "the private key is encrypted",
    ),
}


@pytest.mark.parametrize(("files", "named", "wrong"), BAD_FILES.values(), ids=BAD_FILES)
def test_files_that_cannot_be_used_stop_the_start_with_key_value_and_what_is_wrong(
    certificates: dict[str, Certificate],
    pem: Callable[[str], str],
    files: dict[str, str],
    named: str,
    wrong: str,
) -> None:
    def path_of(content: str) -> str:
        if content != "encrypted-key":
            return pem(content)
        path = Path(pem("nothing")).with_name("encrypted.pem")
        key = certificates["client"].key
        command = f"openssl pkcs8 -topk8 -in {key} -out {path} -passout pass:secret"
        subprocess.run(command.split(), check=True, capture_output=True)
        return str(path)

    paths = {key: path_of(content) for key, content in files.items()}
    with pytest.raises(SettingsError) as caught:
        access_of({"url": "https://a.example", **paths})
    told = str(caught.value)
    assert told.startswith(f"upstreams.corp.{named}: '{paths[named]}' cannot be used: ")
    assert wrong in told


def test_a_global_ca_file_that_cannot_be_used_is_named(pem: Callable[[str], str]) -> None:
    with pytest.raises(SettingsError, match=r"^tls\.ca_file: .*absent\.pem' cannot be used: No such file"):
        access_of({"url": "https://a.example"}, tls={"ca_file": pem("absent")})


MISFITS: dict[str, tuple[dict[str, str], str]] = {
    "a key alone": ({"url": "https://a.example", "client_key": "k"}, "client_key goes with client_cert"),
    "a CA without TLS": ({"url": "http://a.example", "ca_file": "c"}, "go with an https:// URL"),
    "a certificate without TLS": ({"url": "http://a.example", "client_cert": "c"}, "go with an https:// URL"),
}


@pytest.mark.parametrize(("upstream", "remedy"), MISFITS.values(), ids=MISFITS)
def test_tls_settings_that_would_have_no_effect_are_refused(upstream: dict[str, str], remedy: str) -> None:
    with pytest.raises(ValidationError, match=remedy):
        Upstream.model_validate(upstream)


def test_there_is_one_context_for_each_set_of_files(pem: Callable[[str], str]) -> None:
    ours, theirs = pem("provider"), pem("stranger")
    upstreams: Any = {
        "a": {"url": "https://a.example", "ca_file": ours},
        "b": {"url": "https://b.example", "ca_file": ours},
        "c": {"url": "https://c.example", "ca_file": theirs},
        "d": {"url": "http://d.example"},
    }
    found = accesses(Settings(upstreams=upstreams), LISTENING, {})
    a, b, c = (found[Origin("https", f"{name}.example", 443)].ssl_context for name in "abc")
    assert a is b
    assert a is not c
    assert sorted(origin.host for origin in found) == ["a.example", "b.example", "c.example"]


def test_every_context_verifies(pem: Callable[[str], str]) -> None:
    context = access_of({"url": "https://a.example", "ca_file": pem("provider")}).ssl_context
    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    system = ssl.create_default_context().cert_store_stats()["x509_ca"]
    assert context.cert_store_stats()["x509_ca"] == system + 1


# Trusted certificates (by upstream, for all, by SSL_CERT_FILE); is the provider reached?
TRUST: dict[str, tuple[str, str, str, bool]] = {
    "nobody": ("", "", "", False),
    "its own CA": ("provider", "", "", True),
    "the global CA": ("", "provider", "", True),
    "one of both": ("stranger", "provider", "", True),
    "another's CA": ("stranger", "", "", False),
    "SSL_CERT_FILE": ("", "", "provider", True),
    "SSL_CERT_FILE and a CA": ("stranger", "", "provider", True),
}


@pytest.mark.parametrize(("own", "everywhere", "system", "is_reached"), TRUST.values(), ids=TRUST)
def test_a_provider_is_reached_only_if_its_certificate_is_trusted(
    run: Run,
    certificates: dict[str, Certificate],
    pem: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    everywhere: str,
    system: str,
    is_reached: bool,
) -> None:
    if system:
        monkeypatch.setenv("SSL_CERT_FILE", pem(system))

    async def scenario() -> None:
        async with serving(keep_answering, certificates["provider"].server_context()) as port:
            upstream = {"url": f"https://127.0.0.1:{port}", "ca_file": pem(own) if own else None}
            tls = {"ca_file": pem(everywhere) if everywhere else None}
            pool = Pool(accesses(settings_with(upstream, tls=tls), LISTENING, {}))
            if is_reached:
                assert (await ask(pool, Origin("https", "127.0.0.1", port)))[1] == b"hi"
            else:
                with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED") as caught:
                    await ask(pool, Origin("https", "127.0.0.1", port))
                assert caught.value.cause_kind == "tls"
            await pool.close()

    run(scenario())


# Files of the client; does a provider that asks for its certificate answer?
CLIENTS: dict[str, tuple[dict[str, str], bool]] = {
    "certificate and key in one file": ({"client_cert": "client+client-key"}, True),
    "in two": ({"client_cert": "client", "client_key": "client-key"}, True),
    "no certificate": ({}, False),
    "another's": ({"client_cert": "stranger+stranger-key"}, False),
}


@pytest.mark.parametrize(("files", "is_let_in"), CLIENTS.values(), ids=CLIENTS)
def test_a_provider_that_asks_for_a_certificate_gets_ours(
    run: Run,
    certificates: dict[str, Certificate],
    pem: Callable[[str], str],
    files: dict[str, str],
    is_let_in: bool,
) -> None:
    context = certificates["provider"].server_context()
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificates["client"].cert)

    async def scenario() -> None:
        async with serving(keep_answering, context) as port:
            paths = {key: pem(content) for key, content in files.items()}
            upstream = {"url": f"https://127.0.0.1:{port}", "ca_file": pem("provider"), **paths}
            pool = Pool(accesses(settings_with(upstream), LISTENING, {}))
            if is_let_in:
                assert (await ask(pool, Origin("https", "127.0.0.1", port)))[1] == b"hi"
            else:
                # In TLS 1.3 a client learns of this only when it has begun to speak.
                with pytest.raises((Broken, Unreachable)):
                    await ask(pool, Origin("https", "127.0.0.1", port))
            await pool.close()

    run(scenario())


# Tunnels


def through(port: int, origin: Origin, *, userinfo: str = "", context: ssl.SSLContext | None = None) -> Pool:
    """A pool that reaches an origin through a proxy on a port of this machine."""
    proxy = ForwardProxy.parse(f"http://{userinfo}127.0.0.1:{port}")
    return Pool({origin: Access(proxy, context)})


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_tunnel_leads_to_the_origin_and_is_used_again(
    run: Run, certificates: dict[str, Certificate], scheme: str
) -> None:
    is_tls = scheme == "https"
    provider_context = certificates["provider"].server_context() if is_tls else None
    context = ssl.create_default_context(cafile=certificates["provider"].cert) if is_tls else None
    origin = Origin(scheme, NAMED, 4433)

    async def scenario() -> None:
        async with serving(keep_answering, provider_context) as provider:
            proxy = TunnelProxy(provider)
            async with serving(proxy) as port:
                pool = through(port, origin, userinfo="user:pass@", context=context)
                for is_reused in (False, True):
                    link, body = await ask(pool, origin)
                    assert (link.reused, body) == (is_reused, b"hi")
                    link.release()
                await pool.close()
        credentials = base64.b64encode(b"user:pass").decode()
        head = f"CONNECT {NAMED}:4433 HTTP/1.1\r\nHost: {NAMED}:4433\r\n"
        assert proxy.heads == [f"{head}Proxy-Authorization: Basic {credentials}\r\n\r\n".encode()]

    run(scenario())


def test_a_proxy_cannot_show_another_certificate_for_the_provider(
    run: Run, certificates: dict[str, Certificate]
) -> None:
    origin = Origin("https", NAMED, 443)
    context = ssl.create_default_context(cafile=certificates["provider"].cert)

    async def scenario() -> None:
        async with (
            serving(keep_answering, certificates["stranger"].server_context()) as intruder,
            serving(TunnelProxy(intruder)) as port,
        ):
            pool = through(port, origin, context=context)
            with pytest.raises(Unreachable, match=f"{NAMED}:443: .*CERTIFICATE_VERIFY_FAILED") as caught:
                await pool.acquire(origin)
            assert (caught.value.cause_kind, pool.open_count) == ("tls", 0)

    run(scenario())


REFUSALS: dict[str, tuple[bytes, str]] = {
    "credentials wanted": (
        b'HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm="x"\r\n\r\nlog in',
        "status 407",
    ),
    "forbidden": (b"HTTP/1.0 403\r\nContent-Length: 2\r\n\r\nno", "status 403"),
    "no such host": (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", "status 502"),
    "a redirect": (b"HTTP/1.1 302 Found\r\nLocation: http://login.example\r\n\r\n", "status 302"),
    "a challenge in Latin letters no decoder expects": (b"HTTP/1.1 451 \xff\r\n\r\n", "status 451"),
    "a close": (b"", "it closed the connection"),
    "half a head": (b"HTTP/1.1 200 OK\r\n", "it closed the connection"),
    "another protocol": (b"SSH-2.0-OpenSSH_9.9\r\n\r\n", "its answer is not HTTP/1.1"),
    "a status of four digits": (b"HTTP/1.1 2000 OK\r\n\r\n", "its answer is not HTTP/1.1"),
    "words in the provider's name": (OPEN + b"HTTP/1.1 200 OK\r\n", "it sent more than a head"),
    "two heads": (OPEN + OPEN, "it sent more than a head"),
    "a head without end": (
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * (TUNNEL_HEAD_BYTES_MAX // 5),
        "its answer is too long",
    ),
}


@pytest.mark.filterwarnings("error::ResourceWarning")
@pytest.mark.parametrize(("answer", "why"), REFUSALS.values(), ids=REFUSALS)
def test_a_tunnel_that_is_refused_is_unreachable_and_names_proxy_and_status(
    run: Run, answer: bytes, why: str
) -> None:
    origin = Origin("https", NAMED, 443)

    async def scenario() -> None:
        async with serving(TunnelProxy(answer=answer)) as port:
            pool = through(port, origin, userinfo="user:secret@")
            with pytest.raises(Unreachable) as caught:
                await pool.acquire(origin)
            assert str(caught.value) == f"proxy 127.0.0.1:{port}: no tunnel to {NAMED}:443: {why}"
            assert (caught.value.cause_kind, pool.open_count) == ("proxy", 0)

    run(scenario())


def test_a_proxy_that_is_not_there_is_unreachable_as_proxy(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    origin = Origin("https", NAMED, 443)

    async def scenario() -> None:
        with pytest.raises(Unreachable, match=f"^proxy 127.0.0.1:{port}: ") as caught:
            await through(port, origin).acquire(origin)
        assert caught.value.cause_kind == "proxy"

    run(scenario())


@pytest.mark.filterwarnings("error::ResourceWarning")  # a socket left to the garbage collector
def test_a_caller_may_give_up_while_a_proxy_connects_and_leaves_nothing_open(run: Run) -> None:
    origin = Origin("https", NAMED, 443)
    asked, closed = asyncio.Event(), asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        closed.set()

    async def scenario() -> None:
        async with serving(slow) as port:
            pool = through(port, origin)
            acquiring = asyncio.create_task(pool.acquire(origin))
            await asked.wait()
            acquiring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await acquiring
            await closed.wait()
            assert pool.open_count == 0

    run(scenario())


# Age


class Clock:
    """A clock that the test moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_connection_too_old_is_not_used_again_however_busy_it_was(run: Run) -> None:
    clock = Clock()

    async def scenario() -> None:
        async with serving(keep_answering) as port:
            pool, origin = Pool(reuse_s=60.0, monotonic=clock), Origin("http", "127.0.0.1", port)
            reused = []
            for passed_s in (0.0, CONNECTION_AGE_MAX_S / 2, CONNECTION_AGE_MAX_S / 2 - 1, 1.0, 0.0):
                clock.now_s += passed_s
                link, body = await ask(pool, origin)
                assert body == b"hi"
                reused.append(link.reused)
                link.release()
            assert reused == [False, True, True, False, True]
            await until(lambda: pool.open_count == 1)
            await pool.close()

    run(scenario())


def test_an_answer_goes_on_however_old_its_connection_gets(run: Run) -> None:
    clock = Clock()
    go_on = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK[:-1])
        await go_on.wait()
        writer.write(OK[-1:])
        await reader.read()

    async def scenario() -> None:
        async with serving(slow) as port:
            pool = Pool(monotonic=clock)
            link = await pool.acquire(Origin("http", "127.0.0.1", port))
            link.expect_answer()
            link.write(REQUEST)
            assert await link.read() == b"h"
            clock.now_s += 10 * CONNECTION_AGE_MAX_S
            go_on.set()
            assert (await link.read(), await link.read()) == (b"i", b"")
            await pool.close()

    run(scenario())


async def test_a_name_is_resolved_anew_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    ports: list[int] = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == (NAMED, 80)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", ports.pop(0)))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with serving(keep_answering) as first, serving(keep_answering) as second:
        ports += [first, second]
        pool, origin = Pool(reuse_s=60.0, monotonic=clock), Origin("http", NAMED, 80)
        peers = []
        for passed_s in (0.0, 1.0, CONNECTION_AGE_MAX_S):
            clock.now_s += passed_s
            link, _ = await ask(pool, origin)
            peers.append(link._transport.get_extra_info("peername")[1])
            link.release()
        assert peers == [first, first, second]
        await pool.close()


# Stale connections


async def read_post(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length.partition(b":")[2]))


ANSWER: Final = orjson.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
        ],
    }
)
ANSWERED: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER
)
ASKED: Final = orjson.dumps(
    {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    }
)
POST: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(ASKED) + ASKED
)


@dataclass(slots=True)
class Leaver:
    """A provider that closes each connection at the first byte of its second request, before it has read that."""

    connections: int = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await read_post(reader)
        writer.write(ANSWERED)
        await reader.readexactly(1)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
        writer.transport.abort()


@asynccontextmanager
async def after_one_answer(
    provider: Leaver, data_dir: Path, stage: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """An app's connection to a sidecar that has a connection to the provider, by now stale, in its pool."""
    # Long enough that the dispatch is still unknown when the proxy has ended.
    ledger = {"settle_s": 600.0}
    async with (
        serving(provider) as port,
        in_loop(data_dir, {"openai": f"http://127.0.0.1:{port}"}, stage=stage, ledger=ledger) as sidecar,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(sidecar.url.rpartition(":")[2]))
        with closing(writer):
            writer.write(POST)
            await reader.readuntil(ANSWER)
            await until(lambda: sidecar.proxy._pool.idle_count == 1)
            yield reader, writer


async def test_a_post_lost_on_a_stale_connection_ends_the_apps_own_where_nothing_is_enforced(
    tmp_path: Path,
) -> None:
    provider = Leaver()
    async with after_one_answer(provider, tmp_path / "data", "observe") as (reader, writer):
        writer.write(POST)
        assert await reader.read() == b""
    assert provider.connections == 1


async def test_a_post_lost_on_a_stale_connection_is_unknown_and_not_to_be_repeated_where_enforced(
    tmp_path: Path,
) -> None:
    provider = Leaver()
    async with after_one_answer(provider, tmp_path / "data", "enforce-tools") as (reader, writer):
        writer.write(POST)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 502 ")
    assert b"\r\nx-should-retry: false" in head.lower()
    assert "error" in orjson.loads(body)
    assert provider.connections == 1
    assert [state for (state,) in ledger_rows(tmp_path / "data", "state")][1:] == ["UNKNOWN"]


async def test_a_link_knows_whether_its_connection_ended_before_anything_was_sent() -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_leave.wait()

    may_leave = asyncio.Event()
    async with serving(leave) as port:
        pool = Pool()
        link = await pool.acquire(Origin("http", "127.0.0.1", port))
        assert link.is_open
        may_leave.set()
        await until(lambda: not link.is_open)
        await pool.close()


# The whole sidecar


async def test_an_sdk_reaches_an_https_provider_through_the_proxy_of_the_environment(
    tmp_path: Path, certificates: dict[str, Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def provider(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_post(reader)
            writer.write(ANSWERED)

    async with serving(provider, certificates["provider"].server_context()) as far:
        proxy = TunnelProxy(far)
        async with serving(proxy) as port:
            for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
                monkeypatch.delenv(name, raising=False)
                monkeypatch.delenv(name.upper(), raising=False)
            monkeypatch.setenv("HTTPS_PROXY", f"http://user:secret@127.0.0.1:{port}")
            sidecar = Sidecar(
                tmp_path / "data",
                {"openai": f"https://{NAMED}/base"},
                stage="enforce-tools",
                tls={"ca_file": str(certificates["provider"].cert)},
            )
            async with (
                sidecar,
                openai.AsyncOpenAI(base_url=f"{sidecar.url}/v1", api_key="k", max_retries=0) as client,
            ):
                for _ in range(2):
                    said = await client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": "hi"}]
                    )
                    assert said.choices[0].message.content == "hello"
                proxy.answer, proxy.leads_to = b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", 0
            assert [head.partition(b"\r\n")[0] for head in proxy.heads] == [
                f"CONNECT {NAMED}:443 HTTP/1.1".encode()
            ]
            assert b"Basic " + base64.b64encode(b"user:secret") in proxy.heads[0]
            assert "secret" not in "".join(sidecar.log)


async def test_an_sdk_is_told_to_try_again_when_a_proxy_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = TunnelProxy(answer=b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
    async with serving(proxy) as port:
        monkeypatch.setenv("https_proxy", f"http://user:secret@127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "")
        async with in_loop(
            tmp_path / "data", {"openai": f"https://{NAMED}"}, stage="enforce-tools"
        ) as sidecar:
            client = openai.AsyncOpenAI(base_url=f"{sidecar.url}/v1", api_key="k", max_retries=0)
            async with client:
                with pytest.raises(
                    openai.InternalServerError, match=r"cannot reach openai \(proxy: .*status 407\)"
                ) as caught:
                    await client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": "hi"}]
                    )
    assert caught.value.status_code == 502
    assert caught.value.response.headers.get("x-should-retry") != "false"
    assert "secret" not in caught.value.response.text
