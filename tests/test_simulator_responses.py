"""The simulator's Responses, seen by the official SDK, and what it says to a client that asks for a WebSocket."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI, BadRequestError
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage

from turngate.proxy.simulator import Simulator, responses
from turngate.proxy.simulator.dialect import Dialect, Json

DIALECT: Final[Dialect] = responses

TOOL: Final[Any] = {
    "type": "function",
    "name": "get_weather",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def call(id_: str) -> Json:
    return {"type": "function_call", "call_id": id_, "name": "get_weather", "arguments": "{}"}


def output(id_: str, text: str = "rain") -> Json:
    return {"type": "function_call_output", "call_id": id_, "output": text}


@pytest.fixture
async def simulator() -> AsyncIterator[Simulator]:
    async with Simulator() as simulator:
        yield simulator


@pytest.fixture
async def openai(simulator: Simulator) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=simulator.url + "/v1", api_key="k-secret", max_retries=0) as client:
        yield client


async def test_a_whole_answer_and_a_streamed_one_are_the_same(
    simulator: Simulator, openai: AsyncOpenAI
) -> None:
    """The SDK's helper checks the order of the events and builds the answer from them."""
    whole = await openai.responses.create(model="m", input="Weather?", tools=[TOOL])
    simulator.reset()  # so that the ids are the same too
    async with openai.responses.stream(model="m", input="Weather?", tools=[TOOL]) as stream:
        numbers = [event.sequence_number async for event in stream]
        streamed = await stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    assert whole.output_text == streamed.output_text == "I call get_weather."
    # The helper adds what it parsed from the arguments.
    assert [item.model_dump(exclude={"parsed_arguments"}) for item in whole.output] == [
        item.model_dump(exclude={"parsed_arguments": True, "content": {"__all__": {"parsed"}}})
        for item in streamed.output
    ]


async def test_a_call_is_streamed_in_fragments_between_its_item(openai: AsyncOpenAI) -> None:
    stream = await openai.responses.create(model="m", input="Weather?", tools=[TOOL], stream=True)
    kinds = [event.type.removeprefix("response.") async for event in stream]
    begin = len(kinds) - kinds[::-1].index("output_item.added") - 1
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[begin:] == [
        "output_item.added",
        *["function_call_arguments.delta"] * (len(kinds) - begin - 4),
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


async def test_results_are_quoted(openai: AsyncOpenAI) -> None:
    conversation: Any = [user("Weather?"), call("c1"), output("c1")]
    answer = await openai.responses.create(model="m", input=conversation, tools=[TOOL])
    (message,) = answer.output
    assert isinstance(message, ResponseOutputMessage)
    assert answer.output_text == "The tools said: rain"


async def test_a_scenario_can_be_for_this_dialect_alone(simulator: Simulator, openai: AsyncOpenAI) -> None:
    planned = {"calls": [{"name": "exec", "arguments": {"cmd": "true"}}]}
    simulator.use({"steps": [{"when": {"dialect": "responses"}, "answer": planned}]})
    answer = await openai.responses.create(model="m", input="go")
    (item,) = answer.output
    assert isinstance(item, ResponseFunctionToolCall)
    assert (item.name, item.arguments, item.status) == ("exec", '{"cmd":"true"}', "completed")
    chat = await openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
    assert chat.choices[0].message.content == "You said: go"


SEQUENCES: Final[dict[str, tuple[object, str | None]]] = {
    "text": ("hi", None),
    "a call and its output": ([user("a"), call("c1"), output("c1")], None),
    "a message between them": ([user("a"), call("c1"), user("b"), output("c1")], None),
    "a call without output": (
        [user("a"), call("c1"), user("b")],
        "No tool output found for function call c1.",
    ),
    "an output without call": (
        [user("a"), output("c1")],
        "No tool call found for function call output with call_id c1.",
    ),
    "two outputs": (
        [user("a"), call("c1"), output("c1"), output("c1")],
        "Duplicate function_call_output for call_id 'c1'.",
    ),
}


@pytest.mark.parametrize(("sequence", "message"), SEQUENCES.values(), ids=SEQUENCES)
def test_calls_and_outputs_belong_together(sequence: object, message: str | None) -> None:
    refusal = responses.refuse({"input": sequence})
    assert (refusal and refusal.message) == message


@pytest.mark.parametrize("key", ["previous_response_id", "conversation"])
def test_an_output_may_answer_a_call_that_the_provider_keeps(key: str) -> None:
    assert responses.refuse({key: "resp_1", "input": [output("c1")]}) is None


async def test_the_sdk_raises_on_a_refusal(openai: AsyncOpenAI) -> None:
    orphan: Any = [output("c1")]
    with pytest.raises(BadRequestError) as raised:
        await openai.responses.create(model="m", input=orphan)
    assert raised.value.param == "input"


async def test_the_sdk_raises_on_an_error_event(simulator: Simulator, openai: AsyncOpenAI) -> None:
    simulator.use({"steps": [{"fault": {"error_event_after": 3}}]})
    stream = await openai.responses.create(model="m", input="hi", stream=True)
    with pytest.raises(APIError, match="The server had an error"):
        [event async for event in stream]


JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KINDS: Final = st.sampled_from(["function", "function_call", "function_call_output"]) | JSON
FIELDS: Final = dict.fromkeys(("role", "content", "output", "call_id", "name", "parameters"), JSON)
ITEMS: Final = st.lists(st.fixed_dictionaries({}, optional={"type": KINDS, **FIELDS}), max_size=3) | JSON
SETTINGS: Final = dict.fromkeys(("tool_choice", "stream", "model"), JSON)
BODIES: Final = st.fixed_dictionaries({}, optional={"input": ITEMS, "tools": ITEMS, **SETTINGS})


@given(BODIES)
@settings(deadline=None)
def test_any_json_object_is_read_and_judged_without_an_exception(body: Json) -> None:
    DIALECT.read(body)
    DIALECT.refuse(body)


async def test_a_websocket_is_refused_in_http_and_the_connection_ends(simulator: Simulator) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", simulator.port)
    writer.write(b"GET /v1/responses HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 426 Upgrade Required\r\n")
    assert [(request.path, request.status) for request in simulator.requests] == [("/v1/responses", 426)]
