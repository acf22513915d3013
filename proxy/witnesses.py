"""The witnesses of one exchange: they see what came in on one side and what was written on the other, and share no code
with what decides between the two."""

from collections.abc import Callable, Iterator

from turngate.telemetry.events import Witness
from turngate.telemetry.witness import Flow, Scanner


class Carried:
    """The witness of one request: what came from the app against what was written to the provider."""

    __slots__ = ("_failed", "_flow", "whole")

    def __init__(self, failed: Callable[[str, Exception], None]) -> None:
        self._flow: Flow | None = Flow(same=True)
        self._failed = failed
        self.whole = False
        """All of it was written."""

    def took(self, data: bytes) -> None:
        """The app sent this."""
        try:
            if self._flow is not None:
                self._flow.took(data)
        except Exception as error:  # noqa: BLE001 - who only watches must not disturb
            self._give_up(error)

    def gave(self, data: bytes) -> None:
        """The provider is written this."""
        try:
            if self._flow is not None:
                self._flow.gave(data)
        except Exception as error:  # noqa: BLE001 - who only watches must not disturb
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._flow = None
        self._failed("witness", error)

    @property
    def mismatch(self) -> str:
        """What differs of a request that was written whole; empty where nothing does."""
        differs = self._flow.mismatch if self._flow is not None and self.whole else ""
        return differs and f"request: {differs}"


class Witnesses:
    """`took` and `told` are shown each piece; a fault in them is told to `failed`, once, and costs nobody a byte."""

    __slots__ = ("_failed", "_flow", "_scanner")

    def __init__(self, api: str, *, plain: bool, failed: Callable[[str, Exception], None]) -> None:
        self._flow: Flow | None = Flow()
        self._scanner = Scanner(api) if plain else None  # what is compressed it cannot read
        self._failed = failed

    def took(self, data: bytes) -> None:
        """The provider sent this."""
        try:
            if self._flow is not None:
                self._flow.took(data)
        except Exception as error:  # noqa: BLE001 - who only watches must not disturb
            self._give_up(error)

    def told(self, data: bytes) -> None:
        """The app was written this."""
        try:
            if self._flow is not None:
                self._flow.gave(data)
            if self._scanner is not None:
                self._scanner.see(data)
        except Exception as error:  # noqa: BLE001 - who only watches must not disturb
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._flow = self._scanner = None
        self._failed("witness", error)

    def found(self, *, clean: bool, passed: bool) -> Iterator[tuple[Witness, str]]:
        """What is wrong. `clean`: the answer was given a proper end; `passed`: all of it should have gone to the app."""
        if self._scanner is not None and (detail := self._scanner.end(clean=clean)):
            yield "partial_tool_dispatch", detail
        if self._flow is not None and passed and (detail := self._flow.mismatch):
            yield "byte_mismatch", detail
