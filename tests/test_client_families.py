"""The family of a client by its headers: real SDKs, known user agents, and never a word of the app's own."""

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.adapters.clients import client_family, families

Headers = dict[str, str]


def wire(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]


def sent_by(
    client: openai.OpenAI | openai.AsyncOpenAI | anthropic.Anthropic | anthropic.AsyncAnthropic,
) -> Headers:
    return {name: value for name, value in client.default_headers.items() if isinstance(value, str)}


KEY = "not-a-key"
SDKS = {
    "OpenAI": (openai.OpenAI(api_key=KEY), "openai-python", openai.__version__),
    "OpenAI, asynchronous": (openai.AsyncOpenAI(api_key=KEY), "openai-python", openai.__version__),
    "OpenAI at Azure": (
        openai.AsyncAzureOpenAI(api_key=KEY, api_version="1", azure_endpoint="http://127.0.0.1"),
        "openai-python",
        openai.__version__,
    ),
    "Anthropic": (anthropic.Anthropic(api_key=KEY), "anthropic-python", anthropic.__version__),
    "Anthropic, asynchronous": (
        anthropic.AsyncAnthropic(api_key=KEY),
        "anthropic-python",
        anthropic.__version__,
    ),
}


@pytest.mark.parametrize(("client", "family", "version"), SDKS.values(), ids=SDKS)
def test_an_installed_sdk_is_known_with_its_major(
    client: openai.OpenAI | anthropic.Anthropic, family: str, version: str
) -> None:
    major = version.partition(".")[0]
    assert client_family(wire(sent_by(client))) == f"{family}/{major}"


@pytest.mark.parametrize(("client", "family", "version"), SDKS.values(), ids=SDKS)
def test_an_app_that_names_itself_is_still_known_by_the_sdk_below(
    client: openai.OpenAI | anthropic.Anthropic, family: str, version: str
) -> None:
    headers = {**sent_by(client), "User-Agent": "shop-assistant/7.1"}
    assert client_family(wire(headers)) == f"{family}/{version.partition('.')[0]}"


AGENTS = {
    "OpenAI/Python 1.109.1": "openai-python/1",
    "AsyncAzureOpenAI/Python 2.54.0": "openai-python/2",
    "OpenAI/JS 6.26.0": "openai-node/6",
    "AzureOpenAI/JS 4.104.0": "openai-node/4",
    "OpenAI/Python 12.0.0": "openai-python",
    "OpenAI/Python unknown": "openai-python",
    "Anthropic/JS 0.39.0": "anthropic-node/0",
    "AnthropicBedrock/Python 0.125.0": "anthropic-python/0",
    "AsyncAnthropicVertex/Python 2.14.0": "anthropic-python/2",
    "claude-cli/2.1.220 (external, cli)": "claude-code",
    "claude-code/2.0.1": "claude-code",
    "codex_cli_rs/0.144.6 (Ubuntu 26.4.0; x86_64) xterm-256color": "codex",
    "codex_vscode/0.98.0": "codex",
    "codex-tui/0.1.0": "codex",
    "opencode/1.2.3 ai-sdk/provider-utils/3.0.7 runtime/bun/1.3": "opencode",
    "ai-sdk/openai/2.0.1 opencode/1.2.3": "opencode",
    "langchainjs-openai/1.0.0 ((node/v20.18.0; win32; x64))": "langchain",
    "langchain-google-genai/2.0.0 google-genai-sdk/1.2.0": "langchain",
    "litellm/1.77.3": "litellm/1",
    "ai/5.0.30 ai-sdk/provider-utils/3.0.7 runtime/node.js/22": "vercel-ai/5",
    "ai-sdk/openai/2.0.1 ai-sdk/provider-utils/3.0.7": "vercel-ai",
    "google-genai-sdk/1.41.0 gl-node/v22.19.0": "google-genai/1",
    "mistral-client-python/3.7.0": "mistralai/3",
    "mistral-client-typescript/1.10.0": "mistralai/1",
    "Boto3/1.40.2 md/Botocore#1.40.2 ua/2.1 os/linux": "boto3/1",
    "curl/8.11.0": "curl",
    "python-httpx/0.28.1": "httpx",
    "Mozilla/5.0 (X11; Linux x86_64)": "other",
    "kai/3.0": "other",
    "my-codex_thing/1": "other",
    "openai/python 3.1": "openai-python/3",
}


@pytest.mark.parametrize(("agent", "family"), AGENTS.items())
def test_a_user_agent_is_read(agent: str, family: str) -> None:
    assert client_family(wire({"user-agent": agent})) == family
    assert client_family(wire({"Host": "x", "USER-AGENT": agent, "Accept": "*/*"})) == family


OTHERS = {
    "nothing": ({}, "none"),
    "no user agent": ({"Host": "x"}, "none"),
    "an empty one": ({"User-Agent": ""}, "none"),
    "no user agent, but an SDK": (
        {"X-Stainless-Lang": "js", "X-Stainless-Package-Version": "6.1.0"},
        "openai-node/6",
    ),
    "Anthropic's SDK by its version header": (
        {"x-stainless-lang": "js", "x-stainless-package-version": "1.1.0", "anthropic-version": "2023-06-01"},
        "anthropic-node/1",
    ),
    "another provider's SDK of the same make": (
        {
            "User-Agent": "Groq/Python 1.7.0",
            "X-Stainless-Lang": "python",
            "X-Stainless-Package-Version": "1.7.0",
        },
        "other",
    ),
    "an SDK in another language": ({"User-Agent": "shop/1", "X-Stainless-Lang": "go"}, "other"),
    "an SDK without a version": ({"User-Agent": "shop/1", "X-Stainless-Lang": "python"}, "openai-python"),
}


@pytest.mark.parametrize(("headers", "family"), OTHERS.values(), ids=OTHERS)
def test_what_has_no_known_user_agent(headers: Headers, family: str) -> None:
    assert client_family(wire(headers)) == family


NAMES = [
    b"User-Agent",
    b"x-stainless-lang",
    b"x-stainless-package-version",
    b"anthropic-version",
    b"Host",
]
VALUES = st.binary(max_size=400) | st.sampled_from(
    [*(agent.encode() for agent in AGENTS), b"python", b"js", b"9.9", b"10", "²".encode("latin-1")]
)


@given(st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=6))
def test_whatever_is_sent_the_name_is_from_the_list(headers: list[tuple[bytes, bytes]]) -> None:
    assert client_family(iter(headers)) in families()


def test_the_list_is_short_enough_for_a_label() -> None:
    assert len(families()) < 120
    assert set(AGENTS.values()) <= families()
