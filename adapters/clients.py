"""Which SDK or agent an app speaks through, by its headers: one of a closed list, so that it may be a label.

What an app sends is never repeated: a header can hold anything, a name from the list cannot.

Sources: the user agents that the SDKs in our tests build (OpenAI and Anthropic, Python and Node, three majors), and
for the others those in their own sources.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

_SDKS: Final = (
    "openai-python",
    "openai-node",
    "anthropic-python",
    "anthropic-node",
    "litellm",
    "vercel-ai",
    "google-genai",
    "mistralai",
    "boto3",
)
"""Those whose first version number is told: their wire habits change with it."""
_NAMES: Final = ("claude-code", "codex", "opencode", "langchain", "curl", "httpx")
OTHER: Final = "other"
NONE: Final = "none"
"""No user agent at all."""

_MAJORS: Final = range(10)
_AGENT_MAX: Final = 256
"""Bytes of a user agent that are read."""


def families() -> frozenset[str]:
    """Every name there can be."""
    majors = {f"{sdk}/{major}" for sdk in _SDKS for major in _MAJORS}
    return frozenset({*_SDKS, *_NAMES, OTHER, NONE} | majors)


def client_family(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """One of `families()`. Names of headers in any case; of one that stands twice the last counts."""
    agent = language = version = b""
    claude = False
    for name, value in headers:
        # Few names are as long as these: the others are passed without a copy.
        match len(name):
            case 10 if name.lower() == b"user-agent":
                agent = value
            case 16 if name.lower() == b"x-stainless-lang":
                language = value
            case 27 if name.lower() == b"x-stainless-package-version":
                version = value
            case 17 if name.lower() == b"anthropic-version":
                claude = True
    family = _by_agent(agent[:_AGENT_MAX])
    if family in (OTHER, NONE) and language and not _STAINLESS.match(agent):
        return _by_stainless(claude, language[:_AGENT_MAX], version[:_AGENT_MAX])
    return family


# Agents and frameworks come before the SDKs that they stand on. Alternatives begin with their own letters, so a search
# is linear.
_AGENTS: Final = re.compile(
    r"""(?ix)
    (?: ^|[ ] )
    (?:
      (?P<claude_code> claude-(?:cli|code)/ )
    | (?P<codex> codex[_/-] )
    | (?P<opencode> opencode/ )
    | (?P<langchain> langchain )
    | litellm/ (?P<litellm> \d* )
    | ai/ (?P<vercel_ai> \d* )
    | (?P<vercel> ai-sdk/ )
    | (?: Async )? (?: Azure )? OpenAI/Python[ ] (?P<openai_python> \d* )
    | (?: Azure )? OpenAI/JS[ ] (?P<openai_node> \d* )
    | (?: Async )? Anthropic [a-z]*/Python[ ] (?P<anthropic_python> \d* )
    | Anthropic [a-z]*/JS[ ] (?P<anthropic_node> \d* )
    | google-genai-sdk/ (?P<google_genai> \d* )
    | mistral-client-[a-z]+/ (?P<mistralai> \d* )
    | Boto3/ (?P<boto3> \d* )
    | (?P<curl> curl/ )
    | (?P<httpx> python-httpx )
    )
    """
)
_FIRST: Final = tuple(_AGENTS.groupindex)
_STAINLESS: Final = re.compile(rb"\w+/(?:Python|JS) ")
"""The user agent of another provider's SDK of the same make."""


@lru_cache(maxsize=256)
def _by_agent(agent: bytes) -> str:
    """Apps have few user agents, and each is sent with every request."""
    if not agent:
        return NONE
    found = {
        match.lastgroup or "": match for match in reversed(list(_AGENTS.finditer(agent.decode("latin-1"))))
    }
    name = next((group for group in _FIRST if group in found), None)
    if name is None:
        return OTHER
    if name == "vercel":  # a package of its own number
        return "vercel-ai"
    family = name.replace("_", "-")
    return _versioned(family, found[name][name]) if family in _SDKS else family


def _by_stainless(claude: bool, language: bytes, version: bytes) -> str:
    """An app that names itself still tells the language and version of the SDK below."""
    kind = {b"python": "python", b"js": "node"}.get(language.lower())
    if kind is None:
        return OTHER
    return _versioned(
        f"{'anthropic' if claude else 'openai'}-{kind}", version.decode("latin-1").partition(".")[0]
    )


def _versioned(family: str, major: str) -> str:
    return f"{family}/{major}" if len(major) == 1 and major.isascii() and major.isdigit() else family
