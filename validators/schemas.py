"""Does a call fit what its request declared: is there such a tool, and do the arguments match its schema?

Checked with jsonschema-rs, which reads each schema by its own `$schema` (2020-12 where it has none) and fetches
nothing. A schema that cannot be used switches the check off for its tool and says so; it never withholds a call.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import jsonschema_rs
import msgspec

from turngate.validators.checks import Reason


class Tools(msgspec.Struct, frozen=True):
    """The JSON text of each declared tool's schema by the tool's name, empty for a tool that has none.

    `complete` is false where calls of other names may be meant, too: a provider's toolset, a form we do not know.
    """

    schemas: Mapping[str, bytes]
    complete: bool = True


SCHEMA_BYTES_MAX: Final = 64 * 1024
"""Tools of real agents stay under 20 KiB; compiling takes about 1 us for 10 bytes."""
ARGUMENTS_CHARACTERS_MAX: Final = 1024 * 1024
"""Whole files are written by tool calls; more than this would hold the loop for tens of milliseconds."""
BACKTRACKS_MAX: Final = 100_000
"""Steps of one regular expression; about a millisecond."""


def _refuse(uri: str) -> NoReturn:
    raise ValueError(f"schemas are not fetched: {uri}")


_PATTERNS: Final = jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACKS_MAX, size_limit=2**20)
_GAVE_UP: Final = (
    jsonschema_rs.ValidationErrorKind.BacktrackLimitExceeded,
    jsonschema_rs.ValidationErrorKind.RegexEngineFailure,
)


class Schemas:
    """Compiled schemas by their digest, the last used ones; one for all requests of a process."""

    def __init__(self, count_max: int = 512) -> None:
        self._count_max = count_max
        self._compiled: OrderedDict[bytes, jsonschema_rs.Validator | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._compiled)

    def fault(self, schema: bytes, arguments: str) -> Reason | None:
        """`call.arguments_schema` where they do not fit, `toolset.invalid` where the schema cannot be used."""
        validator = self._validator(schema)
        if validator is None:
            return Reason.TOOLSET_INVALID
        if len(arguments) > ARGUMENTS_CHARACTERS_MAX:
            return None
        try:
            # The decoder bounds how deep the value is (about 1,000 levels); the validator was tried with ten times that.
            value = msgspec.json.decode(arguments)
            if validator.is_valid(value):
                return None
            gave_up = any(isinstance(error.kind, _GAVE_UP) for error in validator.iter_errors(value))
        except (ValueError, RecursionError):
            return None  # half a letter, a number beyond all bounds: JSON that the validator cannot be given
        return Reason.TOOLSET_INVALID if gave_up else Reason.CALL_ARGUMENTS_SCHEMA

    def _validator(self, schema: bytes) -> jsonschema_rs.Validator | None:
        digest = hashlib.blake2b(schema, digest_size=16).digest()
        if digest in self._compiled:
            self._compiled.move_to_end(digest)
        else:
            self._compiled[digest] = _compile(schema)
            if len(self._compiled) > self._count_max:
                self._compiled.popitem(last=False)
        return self._compiled[digest]


def _compile(schema: bytes) -> jsonschema_rs.Validator | None:
    """None for what is no schema, is too large, or refers to what is not in it."""
    if len(schema) > SCHEMA_BYTES_MAX:
        return None
    try:
        value = msgspec.json.decode(schema, type=dict[str, Any])
        return jsonschema_rs.validator_for(value, retriever=_refuse, pattern_options=_PATTERNS)
    except (ValueError, RecursionError, jsonschema_rs.ReferencingError):
        return None  # the libraries' own errors are ValueErrors; the caller reports it


@dataclass(frozen=True, slots=True)
class Declared:
    """What one request lets its answer's calls be.

    `tools` and `used_ids` are asked only when the answer has calls; `tools` gives None where nothing is declared, or
    cannot be read. `enforced`: a call that does not fit is withheld; else it is only noted.
    """

    tools: Callable[[], Tools | None]
    schemas: Schemas
    enforced: bool = False
    used_ids: Callable[[], Collection[str]] = tuple

    def fault(self, name: str, arguments: str | None) -> Reason | None:
        """What is wrong with a call of this name; `arguments` is None where they are no JSON."""
        tools = self.tools()
        if tools is None:
            return None
        schema = tools.schemas.get(name)
        if schema is None:
            return Reason.CALL_UNKNOWN_TOOL if tools.complete else None
        return self.schemas.fault(schema, arguments) if schema and arguments is not None else None
