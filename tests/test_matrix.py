"""The live confusion matrix: what our rules say of a request, against what the provider really answered to it."""

import dataclasses
import json
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from running import InLoop, evidence, in_loop

from turngate.adapters import levels
from turngate.adapters.registry import CHAT
from turngate.proxy.simulator import Simulator
from turngate.validators.checks import Grade, Level, Profile
from turngate.validators.graph import Check

USER: Final = {"role": "user", "content": "Go on."}
LEGAL: Final = [USER]
ODD: Final = [
    USER,
    {"role": "assistant", "content": "Yes."},
    {"role": "system", "content": "Be brief."},
    USER,
]
"""A system message in the middle: OpenAI takes it."""
ORPHAN: Final = [USER, {"role": "tool", "tool_call_id": "call_9", "content": "1"}]
"""A result without its call: OpenAI refuses it."""


@pytest.fixture(params=["right", "wrong"])
def rules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The rules as they are; or one too many (a system message in the middle), and one too few (orphans)."""
    if request.param == "wrong":
        right = levels.levels(CHAT.api, "openai")
        grades = {
            **right.grades,
            Check.SYSTEM_PLACE: Grade(Level.HARD),
            Check.RESULT_ORPHAN: Grade(Level.OFF),
        }
        wrong = dataclasses.replace(right, grades=grades)

        def looked_up(_api: str, _server: str) -> Profile:
            return wrong

        monkeypatch.setattr(levels, "levels", looked_up)
    which: str = request.param
    return which


@asynccontextmanager
async def observed(
    tmp_path: Path, error: dict[str, Any] | None = None
) -> AsyncIterator[tuple[InLoop, openai.AsyncOpenAI]]:
    scenario = {"steps": [{"answer": {"error": error}}]} if error is not None else {}
    async with (
        Simulator(scenario) as simulator,
        in_loop(tmp_path, {"openai": simulator.url}) as sidecar,
        openai.AsyncOpenAI(api_key="k", base_url=f"{sidecar.url}/v1", max_retries=0) as client,
    ):
        yield sidecar, client


async def ask(client: openai.AsyncOpenAI, messages: list[Any], *, stream: bool) -> bool:
    """Whether the provider takes it."""
    try:
        answer = await client.chat.completions.create(model="gpt-4.1", messages=messages, stream=stream)
        if isinstance(answer, openai.AsyncStream):
            async for _ in answer:
                pass
    except openai.BadRequestError:
        return False
    return True


async def report(data_dir: Path, *options: str) -> tuple[int | None, dict[str, Any]]:
    """Exit code and what `turngate report --json` says."""
    command = (sys.executable, "-m", "turngate", "report", "--json", "--data-dir", str(data_dir), *options)
    process = await create_subprocess_exec(*command, stdout=PIPE)
    out, _ = await process.communicate()
    return process.returncode, json.loads(out)


async def test_false_refusals_and_misses_are_what_a_wrong_and_a_missing_rule_make(
    tmp_path: Path, rules: str
) -> None:
    async with observed(tmp_path) as (_, client):
        for stream in (True, False):
            assert await ask(client, LEGAL, stream=stream)
            assert await ask(client, ODD, stream=stream)
            assert not await ask(client, ORPHAN, stream=stream)
    matrix = evidence(
        tmp_path,
        "SELECT reason, client, model, true_refusals, false_refusals, misses, unknown FROM confusion ORDER BY ALL",
    )
    sdk = f"openai-python/{openai.__version__.partition('.')[0]}"
    code, told = await report(tmp_path, "--fail-on", "misses,false-refusals")
    if rules == "right":
        assert matrix == [("result.orphan", sdk, "gpt-4.1", 2, 0, 0, 0)]
        assert code == 0
    else:
        assert matrix == [
            ("result.orphan", sdk, "gpt-4.1", 0, 0, 2, 0),
            ("role.order", sdk, "gpt-4.1", 0, 2, 0, 0),
        ]
        assert code == 1
    shown = {each["reason"]: each for each in told["rules"]}
    assert {reason: (row["false_refusals"], row["misses"]) for reason, row in shown.items()} == {
        row[0]: (row[4], row[5]) for row in matrix
    }


@pytest.mark.parametrize(
    ("status", "error", "provider", "reason"),
    [
        (
            429,
            {"message": "Rate limit reached", "type": "requests"},
            "refused_other",
            "",
        ),
        (500, {"message": "The server had an error", "type": "server_error"}, "unknown", ""),
        (400, {"message": "Something nobody has heard of", "type": "invalid_request_error"}, "unknown", ""),
    ],
)
async def test_an_error_that_is_not_about_the_sequence_is_no_miss(
    tmp_path: Path, status: int, error: dict[str, Any], provider: str, reason: str
) -> None:
    asked: list[Any] = [USER]
    async with observed(tmp_path, {"status": status, **error}) as (_, client):
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(model="m", messages=asked)
    found = evidence(tmp_path, "SELECT provider, provider_reason FROM exchange_ended")
    assert found == [(provider, reason)]
    assert evidence(tmp_path, "SELECT * FROM confusion") == []
