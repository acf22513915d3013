"""Every case of the table on raw sockets, without a proxy and through real ones, held against what is declared."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
from running import Sidecar

from conformance import page
from conformance.case import Case
from conformance.table import CASES
from conformance.wire import STAGES, Place, Provider, Stage, run

PAGE: Final = Path(__file__).parents[2] / "docs" / "conformance.md"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def places(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[Stage, Place]]:
    """The provider itself, and a sidecar before it in each stage."""
    directory = tmp_path_factory.mktemp("conformance")
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(Provider().listening())
        url = f"http://127.0.0.1:{provider.port}"
        sidecars = {stage: Sidecar(directory / stage, {"openai": url}, stage=stage) for stage in STAGES}
        await asyncio.gather(*(stack.enter_async_context(sidecar) for sidecar in sidecars.values()))
        ports = {stage: int(sidecar.url.rpartition(":")[2]) for stage, sidecar in sidecars.items()}
        yield {
            stage: Place(stage, port, provider) for stage, port in ({"direct": provider.port} | ports).items()
        }


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_what_differs_from_a_direct_connection_is_what_is_declared(
    places: dict[Stage, Place], case: Case, stage: Stage
) -> None:
    direct = await run(case.script, places["direct"])
    through = await run(case.script, places[stage])
    declared = case.expected(stage)
    differing = {fact: value for fact, value in through.items() if direct[fact] != value}
    assert differing == (dict(declared.facts) if declared is not None else {})
    assert through.keys() == direct.keys()


def test_a_declared_difference_differs_in_something_and_says_why() -> None:
    for case in CASES.values():
        for stage in STAGES:
            declared = case.expected(stage)
            assert declared is None or (declared.facts and declared.reason)


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text() == page.text(), f"stale; say: {page.COMMAND}"
