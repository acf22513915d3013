"""The servers that speak these dialects: what each refuses, and the shape of its errors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from turngate.proxy.simulator import (
    chat,
    messages,
    refusals_deepseek,
    refusals_local,
    refusals_mistral,
)
from turngate.proxy.simulator.dialect import Dialect, Json, Refusal
from turngate.proxy.simulator.refusals_messages import Asked
from turngate.proxy.simulator.scenario import Server as Name


@dataclass(frozen=True, slots=True)
class Server:
    """What differs from server to server; whatever is not said is that of OpenAI and of Anthropic."""

    refuse_chat: Callable[[Json], Refusal | None] = chat.refuse
    refuse_messages: Callable[[Json, Asked], Refusal | None] = messages.refuse
    error_chat: Callable[[Refusal, int], Json] = chat.error

    def refuse(self, dialect: Dialect, body: Json, asked: Asked) -> Refusal | None:
        if dialect is chat:
            return self.refuse_chat(body)
        return self.refuse_messages(body, asked) if dialect is messages else dialect.refuse(body)

    def error(self, dialect: Dialect, refusal: Refusal, number: int) -> Json:
        return self.error_chat(refusal, number) if dialect is chat else dialect.error(refusal, number)


SERVERS: Final[Mapping[Name, Server]] = {
    "openai": Server(),
    "azure": Server(),
    "deepseek": Server(refusals_deepseek.refuse, refusals_deepseek.refuse_messages),
    "mistral": Server(refusals_mistral.refuse, error_chat=refusals_mistral.error),
    "vllm": Server(refusals_local.refuse_vllm, error_chat=refusals_local.vllm_error),
    "ollama": Server(refusals_local.refuse_ollama),
}
