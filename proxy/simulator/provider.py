"""What is answered: the provider's refusals first, then the scenario, then the default behaviour."""

import json
from collections.abc import Mapping
from typing import Final

from turngate.proxy.simulator import agent, chat, messages, responses
from turngate.proxy.simulator.dialect import Call, Dialect, Json, Prompt, Refusal, Reply, encode
from turngate.proxy.simulator.http import Received, Response
from turngate.proxy.simulator.refusals_messages import Asked
from turngate.proxy.simulator.scenario import Answer, ErrorEvent, Scenario, Step, When
from turngate.proxy.simulator.servers import SERVERS, Server

Headers = list[tuple[str, str]]

DIALECTS: Final[Mapping[str, Dialect]] = {
    "/chat/completions": chat,
    "/messages": messages,
    "/responses": responses,
}

# The same instant as `CREATED_S`.
DATE: Final = "Tue, 14 Nov 2023 22:13:20 GMT"

DEFAULT_STEP: Final = Step()


class Provider:
    """Answers requests one after the other; remembers how many there were and which steps are used up."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._number = 0
        self._used = [0] * len(scenario.steps)

    def use(self, scenario: Scenario) -> None:
        """Take another scenario from its first step on; ids go on counting."""
        self.scenario = scenario
        self._used = [0] * len(scenario.steps)

    @property
    def _server(self) -> Server:
        return SERVERS[self.scenario.server]

    def respond(self, request: Received) -> Response:
        self._number += 1
        path = request.path.partition("?")[0].rstrip("/")
        dialect = next((known for suffix, known in DIALECTS.items() if path.endswith(suffix)), None)
        if request.method == "GET" and path.endswith("/models"):
            known = chat if request.header(b"anthropic-version") is None else messages
            return self._json(known, 200, known.models())
        if (request.header(b"upgrade") or b"").lower() == b"websocket":
            # Codex asks for a WebSocket first, and goes on over HTTP after this status only.
            return self._refusal(chat, Refusal("WebSockets are not served here.", status=426))
        if dialect is None or request.method != "POST":
            unknown = Refusal(f"Invalid URL ({request.method} {path})", status=404)
            return self._refusal(chat, unknown, bodiless=request.method == "HEAD")
        body = _decoded(request.body)
        if body is None:
            return self._refusal(dialect, Refusal("The body of the request is not a JSON object."))
        if self.scenario.refusals and (refusal := self._server.refuse(dialect, body, _asked(request))):
            return self._refusal(dialect, refusal)
        prompt = dialect.read(body)
        return self._answer(dialect, prompt, self._step(dialect, prompt))

    def _step(self, dialect: Dialect, prompt: Prompt) -> Step:
        for at, step in enumerate(self.scenario.steps):
            left = step.uses is None or self._used[at] < step.uses
            if left and _matches(step.when or When(), dialect, prompt):
                self._used[at] += 1
                return step
        return DEFAULT_STEP

    def _answer(self, dialect: Dialect, prompt: Prompt, step: Step) -> Response:
        answer = step.answer
        if answer and answer.error:
            error = answer.error
            parts = [encode(self._server.error(dialect, Refusal(error.message, error.type), self._number))]
            return self._response(dialect, parts, step, error.status)
        if answer and answer.frames is not None:
            return self._response(dialect, [frame.encode() for frame in answer.frames], step, streamed=True)
        reply = _planned(answer, prompt, self._number) if answer else agent.reply(prompt, self._number)
        if prompt.stream:
            parts = dialect.events(reply)
            if isinstance(step.fault, ErrorEvent):
                parts = [*parts[: step.fault.error_event_after], dialect.error_event()]
            return self._response(dialect, parts, step, streamed=True)
        if isinstance(step.fault, ErrorEvent):
            return self._refusal(dialect, dialect.FAILURE)
        return self._response(dialect, [encode(dialect.answer(reply))], step)

    def _refusal(self, dialect: Dialect, refusal: Refusal, *, bodiless: bool = False) -> Response:
        body = self._server.error(dialect, refusal, self._number)
        return self._json(dialect, refusal.status, body, bodiless=bodiless)

    def _json(self, dialect: Dialect, status: int, body: Json, *, bodiless: bool = False) -> Response:
        parts = [] if bodiless else [encode(body)]
        return self._response(dialect, parts, DEFAULT_STEP, status)

    def _response(
        self, dialect: Dialect, parts: list[bytes], step: Step, status: int = 200, *, streamed: bool = False
    ) -> Response:
        kind = "text/event-stream; charset=utf-8" if streamed else "application/json"
        own: Headers = [("date", DATE), ("content-type", kind), ("server", "turngate-simulator")]
        own += [("cache-control", "no-cache")] * streamed + dialect.headers(self._number)
        return Response(
            status=status,
            headers=_changed(own, step.answer.headers if step.answer else {}),
            # An empty part would be the chunk that ends a body.
            parts=tuple(part for part in parts if part),
            streamed=streamed,
            delay_s=step.delay_s,
            interval_s=step.interval_s,
            fault=step.fault,
        )


def _changed(headers: Headers, changes: Mapping[str, str | None]) -> tuple[tuple[str, str], ...]:
    replaced = {name.lower() for name in changes}
    kept = [(name, value) for name, value in headers if name not in replaced]
    return (*kept, *((name, value) for name, value in changes.items() if value is not None))


def _asked(request: Received) -> Asked:
    version, betas = (request.header(name) or b"" for name in (b"anthropic-version", b"anthropic-beta"))
    return Asked(version.decode("latin-1"), betas.decode("latin-1"))


def _decoded(body: bytes) -> Json | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        # The client hears of it: a refusal follows.
        return None
    return value if isinstance(value, dict) else None


def _matches(when: When, dialect: Dialect, prompt: Prompt) -> bool:
    return (
        when.dialect in (None, dialect.NAME)
        and when.stream in (None, prompt.stream)
        and when.model in (None, prompt.model)
        and (when.contains is None or when.contains in prompt.last_text)
    )


def _planned(answer: Answer, prompt: Prompt, number: int) -> Reply:
    calls = tuple(Call(call.name, tuple(call.arguments)) for call in answer.calls)
    return Reply(number, prompt, text=tuple(answer.text), calls=calls, finish=answer.finish)
