"""Tasks for an agent of a framework that PYTHONPATH brings: it may look at the weather by a tool of ours.

A job as JSON on each line of standard input: framework, api, base_url, stream. On a line of standard output what came of
it: `called`, how often the tool ran, and `error`, the class of what was raised, or `said`, the agent's last word.
"""

import asyncio
import json
import sys
from typing import Any

CALLED = 0
TASK = "What is the weather in Oslo?"
MODELS = {"openai": "gpt-4.1", "anthropic": "claude-sonnet-4-5"}


def look(city: str) -> str:
    """Look at the weather of a city."""
    global CALLED
    CALLED += 1
    return f"4 C in {city}"


async def langchain(job: dict[str, Any]) -> str:
    from langchain.agents import create_agent

    model: Any
    if job["api"] == "openai":
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(
            model=MODELS["openai"], base_url=job["base_url"], api_key="k", streaming=job["stream"]
        )
    else:
        from langchain_anthropic import ChatAnthropic

        model = ChatAnthropic(
            model=MODELS["anthropic"], base_url=job["base_url"], api_key="k", streaming=job["stream"]
        )
    agent = create_agent(model, tools=[look])
    found = await agent.ainvoke({"messages": [("user", TASK)]})
    return str(found["messages"][-1].content)


async def openai_agents(job: dict[str, Any]) -> str:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=job["base_url"], api_key="k")
    model = agents.OpenAIChatCompletionsModel(MODELS["openai"], client)
    agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(look)])
    if not job["stream"]:
        return str((await agents.Runner.run(agent, TASK)).final_output)
    streamed = agents.Runner.run_streamed(agent, TASK)
    async for _ in streamed.stream_events():
        pass
    return str(streamed.final_output)


async def pydantic_ai(job: dict[str, Any]) -> str:
    from pydantic_ai import Agent

    model: Any
    if job["api"] == "openai":
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider: Any = OpenAIProvider(base_url=job["base_url"], api_key="k")
        model = OpenAIChatModel(MODELS["openai"], provider=provider)
    else:
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        provider = AnthropicProvider(base_url=job["base_url"], api_key="k")
        model = AnthropicModel(MODELS["anthropic"], provider=provider)
    agent = Agent(model, tools=[look])
    if not job["stream"]:
        return str((await agent.run(TASK)).output)
    async with agent.run_stream(TASK) as streamed:
        return str(await streamed.get_output())


FRAMEWORKS = {"langchain": langchain, "openai-agents": openai_agents, "pydantic-ai": pydantic_ai}


def main() -> None:
    global CALLED
    for line in sys.stdin:
        CALLED = 0
        print(json.dumps(done(json.loads(line))), flush=True)


def done(job: dict[str, Any]) -> dict[str, Any]:
    said: str | None = None
    error: str | None = None
    try:
        said = asyncio.run(FRAMEWORKS[job["framework"]](job))
    except Exception as raised:  # noqa: BLE001 - what the agent's caller would see
        error = type(raised).__name__
    return {"called": CALLED, "said": said, "error": error}


if __name__ == "__main__":
    main()
