"""The model of scenario files; the package's docstring describes the format."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

SCENARIOS: Final = Path(__file__).parent / "scenarios"
"""Folder of the scenarios that come with the package."""

FRAGMENT_CHARS: Final = 12
"""Length of the argument fragments made from an object: short, so that a call takes several deltas."""


class ScenarioError(ValueError):
    """The scenario cannot be read or breaks the format; the text names the key."""


def words(text: str) -> list[str]:
    """Cut text into the pieces a model would stream; joined they are the text again."""
    return re.findall(r"\s*\S+|\s+", text)


def fragments(arguments: Mapping[str, Any]) -> list[str]:
    """Cut the JSON text of a call's arguments into deltas."""
    text = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return [text[at : at + FRAGMENT_CHARS] for at in range(0, len(text), FRAGMENT_CHARS)]


def _pieces_of(value: object) -> object:
    return words(value) if isinstance(value, str) else value


def _fragments_of(value: object) -> object:
    if isinstance(value, dict):
        return fragments(value)
    if isinstance(value, list):
        return value
    raise ValueError("should be an object or a list of raw fragments")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class When(_Model):
    """Conditions on a request; all that are set must hold."""

    dialect: Literal["chat", "messages", "responses"] | None = None
    stream: bool | None = None
    model: str | None = None
    contains: str | None = None


class PlannedCall(_Model):
    name: str
    arguments: Annotated[list[str], BeforeValidator(_fragments_of)] = Field(default_factory=lambda: ["{}"])


class PlannedError(_Model):
    status: int = Field(ge=400, le=599)
    type: str
    message: str


class Answer(_Model):
    text: Annotated[list[str], BeforeValidator(_pieces_of)] = []
    calls: list[PlannedCall] = []
    finish: str | None = None
    error: PlannedError | None = None
    frames: list[str] | None = None
    headers: dict[str, str | None] = {}

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        content = self.model_fields_set & {"text", "calls", "finish"}
        kinds = [sorted(content), ["error"] * bool(self.error), ["frames"] * (self.frames is not None)]
        given = [key for kind in kinds for key in kind]
        if sum(map(bool, kinds)) > 1:
            raise ValueError(f"content, error and frames exclude each other, got {', '.join(given)}")
        return self


class Cut(_Model):
    """The connection ends after `cut_at_byte` bytes of the body, or after all of it if it is shorter."""

    cut_at_byte: int = Field(ge=0)
    how: Literal["eof", "reset"] = "eof"
    clean_end: bool = False

    @model_validator(mode="after")
    def _one_ending(self) -> Self:
        if self.clean_end and "how" in self.model_fields_set:
            raise ValueError("clean_end and how exclude each other")
        return self


class Stall(_Model):
    """Nothing follows after `stall_at_byte` bytes of the body, not even the end."""

    stall_at_byte: int = Field(ge=0)


class ErrorEvent(_Model):
    """The dialect's error event takes the place of all that would follow `error_event_after` events."""

    error_event_after: int = Field(ge=0)


_FAULTS: Final = ("cut_at_byte", "stall_at_byte", "error_event_after")


def _fault_kind(value: object) -> str | None:
    if isinstance(value, dict):
        return next((key for key in _FAULTS if key in value), None)
    return next((key for key in _FAULTS if hasattr(value, key)), None)


Fault = Cut | Stall | ErrorEvent
_TaggedFault = Annotated[
    Annotated[Cut, Tag("cut_at_byte")]
    | Annotated[Stall, Tag("stall_at_byte")]
    | Annotated[ErrorEvent, Tag("error_event_after")],
    Discriminator(
        _fault_kind,
        custom_error_type="fault_kind",
        custom_error_message=f"should have one of the keys {', '.join(_FAULTS)}",
    ),
]


class Step(_Model):
    when: When | None = None
    times: int | None = Field(default=None, ge=1)
    answer: Answer | None = None
    delay_s: float = Field(default=0, ge=0)
    interval_s: float = Field(default=0, ge=0)
    fault: _TaggedFault | None = None

    @property
    def uses(self) -> int | None:
        """How many requests the step serves; None is no limit."""
        return 1 if self.times is None and self.when is None else self.times


Server = Literal["openai", "azure", "deepseek", "mistral", "vllm", "ollama"]
"""Whose rules and errors are played; `servers` has them."""


class Scenario(_Model):
    description: str = ""
    refusals: bool = True
    server: Server = "openai"
    steps: list[Step] = []


def load(source: Scenario | Path | Mapping[str, Any] | None) -> Scenario:
    """Read a scenario from a file or an object; None is the default behaviour.

    Raises ScenarioError.
    """
    if isinstance(source, Scenario):
        return source
    name, value = "scenario", source
    if isinstance(source, Path):
        name = str(source)
        try:
            value = json.loads(source.read_bytes())
        except (OSError, ValueError) as exc:
            raise ScenarioError(f"{name}: {exc}") from exc
    try:
        return Scenario.model_validate({} if source is None else value)
    except ValidationError as exc:
        raise ScenarioError("\n".join(f"{name}: {line}" for line in _complaints(exc))) from exc


def _complaints(error: ValidationError) -> list[str]:
    """One line a fault, `steps.0.answer.txt: …`; the value is left out, it may be long or private."""
    lines = []
    for fault in error.errors(include_url=False, include_input=False):
        # Pydantic puts the tag of a union into the path, where it would repeat the key that follows.
        path = [str(part) for at, part in enumerate(fault["loc"]) if not _is_tag(fault["loc"], at)]
        lines.append(f"{'.'.join(path) or '(top)'}: {fault['msg']}")
    return lines


def _is_tag(loc: tuple[int | str, ...], at: int) -> bool:
    return at > 0 and loc[at - 1] == "fault" and loc[at] in _FAULTS
