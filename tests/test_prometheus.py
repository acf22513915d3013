"""A real Prometheus scrapes a sidecar that carries the demo's traffic: every panel and rule finds its data there."""

import asyncio
import json
import shutil
import socket
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
import yaml
from aiohttp import web
from promql import Selector, exprs_of_dashboard, rules_of, selectors, unvaried
from running import Sidecar

from turngate.proxy.demo import STEPS
from turngate.proxy.demo_agent import History, send
from turngate.proxy.simulator import Simulator
from turngate.telemetry.events import CallDecided
from turngate.telemetry.metrics import Registry

ROOT: Final = Path(__file__).parents[1]
ALERTS: Final = ROOT / "dashboards" / "alerts"
EXPRS: Final = {
    **{
        f"{path.stem} {where}": unvaried(expr)
        for path in sorted((ROOT / "dashboards" / "grafana").glob("*.json"))
        for where, expr in exprs_of_dashboard(json.loads(path.read_text()))
    },
    **{
        rule.get("alert") or rule["record"]: rule["expr"]
        for path in sorted(ALERTS.glob("*.yml"))
        for rule in rules_of(path)
    },
}

PATIENCE_S: Final = 30.0
"""Bound of what takes a moment: a scrape, an evaluation, a load of the evidence."""

pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="no prometheus here: apt-get install prometheus"
    ),
    pytest.mark.asyncio(loop_scope="module"),
]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """One that runs, asked by its HTTP API."""

    session: aiohttp.ClientSession
    url: str

    async def ask(self, path: str, **parameters: str) -> Any:
        """What the API says under `data`; an error fails the test with its text."""
        async with self.session.get(f"{self.url}/api/v1/{path}", params=parameters) as answer:
            said = await answer.json()
        assert said["status"] == "success", f"{parameters}: {said.get('error')}"
        return said["data"]

    async def series(self, expr: str) -> list[dict[str, Any]]:
        """The instant vector of an expression, an empty one without data."""
        data = await self.ask("query", query=expr)
        return data["result"] if data["resultType"] == "vector" else [data["result"]]

    async def until(self, expr: str) -> None:
        """Wait until an expression has data."""
        until_s = time.monotonic() + PATIENCE_S
        while not await self.series(expr):
            assert time.monotonic() < until_s, f"no data: {expr}"
            await asyncio.sleep(0.1)


@asynccontextmanager
async def prometheus(folder: Path, jobs: dict[str, str]) -> AsyncIterator[Prometheus]:
    """A Prometheus with our rules that scrapes each job's address five times a second."""
    settings = {
        "global": {"scrape_interval": "200ms", "evaluation_interval": "200ms"},
        "rule_files": [str(hurried(path, folder)) for path in sorted(ALERTS.glob("*.yml"))],
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": [url.removeprefix("http://")]}]}
            for name, url in jobs.items()
        ],
    }
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(settings))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        *(f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address={address}", "--enable-feature=exemplar-storage", "--log.level=warn"),
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
    )
    try:
        async with aiohttp.ClientSession() as session:
            await ready(session, f"http://{address}", process)
            yield Prometheus(session, f"http://{address}")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


def hurried(path: Path, folder: Path) -> Path:
    """The rules of a file, evaluated as often as it is scraped here."""
    rules = yaml.safe_load(path.read_text())
    for group in rules["groups"]:
        group.pop("interval", None)
    (folder / path.name).write_text(yaml.safe_dump(rules))
    return folder / path.name


async def ready(session: aiohttp.ClientSession, url: str, process: asyncio.subprocess.Process) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            async with session.get(f"{url}/-/ready") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass  # it does not listen yet
        if process.returncode is not None or time.monotonic() > until_s:
            said = await process.stderr.read() if process.stderr is not None else b""
            raise AssertionError(f"prometheus did not start:\n{said.decode()}")
        await asyncio.sleep(0.05)


# -- traffic ----------------------------------------------------------------------------------------------------------

CHAT: Final = "/v1/chat/completions"
ORPHAN: Final = {
    "model": "gpt-4.1",
    "messages": [{"role": "user", "content": "q"}, {"role": "tool", "tool_call_id": "x", "content": "y"}],
}
HELLO: Final = {"model": "gpt-4.1", "messages": [{"role": "user", "content": "q"}]}
RATE_LIMITED: Final = {"answer": {"error": {"status": 429, "type": "rate_limit", "message": "slow down"}}}


ROUNDS: Final = 2
"""A rate is seen only of what happens after the series' first scrape."""


async def carry_traffic(simulator: Simulator, sidecar: Sidecar) -> None:
    """The demo's steps where enforced, then what an upstream that is only watched adds, and what is not judged."""
    history: History = ()
    async with aiohttp.ClientSession() as session:
        for step in STEPS:
            simulator.use({"steps": [step.plays] if step.plays else []})
            sent = step.move(history)
            got = await send(session, sidecar.url, step.wire, sent)
            assert (got.kind, got.reason) == (step.kind, step.reason)
            if got.kind == "passed":
                history = (*sent, got.turn)
        for path, body, plays in (
            (f"/watched{CHAT}", ORPHAN, {}),
            (f"/watched{CHAT}", HELLO, RATE_LIMITED),
            (f"/lost{CHAT}", HELLO, {}),
            (CHAT, b"{", {}),
        ):
            simulator.use({"steps": [plays] if plays else []})
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with session.post(sidecar.url + path, data=data) as answer:
                await answer.read()


@asynccontextmanager
async def exposing(registry: Registry) -> AsyncIterator[str]:
    """A registry behind an address of its own, in the format that its scraper asks for."""

    async def metrics(request: web.Request) -> web.Response:
        body, content_type = registry.expose(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def server_that_scraped_the_demo(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    registry = Registry("1")
    registry.observe(
        CallDecided(
            at_s=time.time(),
            operation="op-held",
            upstream="u",
            api="a",
            decision="released",
            reason="",
            held=True,
            hold_s=0.2,
            hold_bytes=1000,
        )
    )
    async with Simulator() as simulator:
        upstreams: dict[str, str | dict[str, Any]] = {
            "openai": simulator.url,
            "anthropic": simulator.url,
            "watched": {"url": simulator.url, "server": "openai"},
            "lost": "http://127.0.0.1:1",
        }
        scopes = [{"match": {"upstream": "watched"}, "stage": "observe"}]
        async with (
            Sidecar(folder / "sidecar", upstreams, stage="enforce-tools", scopes=scopes) as sidecar,
            exposing(registry) as other,
            prometheus(folder, {"turngate": sidecar.metrics_url, "turngate-other": other}) as running,
        ):
            await running.until('up{job="turngate"} == 1')
            for round_ in range(1, ROUNDS + 1):
                await carry_traffic(simulator, sidecar)
                await running.until(f'sum(turngate_unjudged_total{{job="turngate"}}) == {round_}')
            yield running


async def test_every_selector_of_every_panel_and_rule_finds_data(server: Prometheus) -> None:
    """Of the sidecar alone. A healthy zero is data: what has never happened is there as well."""
    asked = {within(each, "turngate") for expr in EXPRS.values() for each in selectors(expr)}
    assert len(asked) > 60
    for selector in sorted(asked):
        await server.until(selector)


def within(selector: Selector, job: str) -> str:
    """A selector narrowed to one job."""
    matchers = ",".join(f'{name}{how}"{value}"' for name, how, value in selector.matchers if name != "job")
    return f'{selector.name}{{job="{job}"{"," if matchers else ""}{matchers}}}'


async def test_every_expression_of_a_panel_can_be_evaluated(server: Prometheus) -> None:
    for expr in EXPRS.values():
        await server.ask("query", query=expr)


async def test_figures_that_say_whether_all_is_fine_are_never_empty(server: Prometheus) -> None:
    for path in sorted((ROOT / "dashboards" / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] == "stat":
                (target,) = panel["targets"]
                assert len(await server.series(unvaried(target["expr"]))) == 1, panel["title"]


async def test_the_rules_are_evaluated_without_an_error(server: Prometheus) -> None:
    groups = (await server.ask("rules"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == sum(len(rules_of(path)) for path in ALERTS.glob("*.yml"))
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}


async def test_what_the_demo_did_is_what_prometheus_counts(server: Prometheus) -> None:
    """Sums of the sidecar's own figures, as a panel would show them."""
    for outcome in ("refused", "retracted"):
        wanted = ROUNDS * sum(step.kind == outcome for step in STEPS)
        expr = f'sum(turngate_requests_total{{job="turngate",stage="enforce-tools",outcome="{outcome}"}})'
        await server.until(f"{expr} == {wanted}")
    await server.until(
        'sum(turngate_sequence_rejects_total{job="turngate",action="would_reject"}) == ' + str(ROUNDS)
    )
    await server.until('sum(turngate_partial_tool_calls_blocked_total{job="turngate"}) > 0')
    await server.until('sum(turngate_partial_tool_dispatch_total{job="turngate"}) == 0')


async def test_exemplars_name_the_operation(server: Prometheus) -> None:
    await server.until('turngate_tool_hold_seconds_count{job="turngate-other"} == 1')
    found = await server.ask(
        "query_exemplars",
        query='turngate_tool_hold_seconds_bucket{job="turngate-other"}',
        start=str(time.time() - 600),
        end=str(time.time() + 600),
    )
    assert [each["labels"] for series in found for each in series["exemplars"]] == [{"operation": "op-held"}]
    assert [float(each["value"]) for series in found for each in series["exemplars"]] == [0.2]
