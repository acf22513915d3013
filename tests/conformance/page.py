"""The table as a page of the docs."""

from collections.abc import Iterable, Iterator
from typing import Final

from conformance.case import Case
from conformance.table import GROUPS
from conformance.wire import STAGES

COMMAND: Final = "PYTHONPATH=tests .venv/bin/python -m conformance.page > docs/conformance.md"

INTRODUCTION: Final = f"""\
<!-- Generated from tests/conformance; a test fails when it is stale. Make it anew with
{COMMAND} -->
# HTTP through Turngate

Each line is a script of raw bytes between an app and a provider. The tests play it on a direct connection and through
a real proxy in each stage, and compare what arrived on both sides, in which order, and how the connections ended.

- **same**: no difference but the value of Host and the headers that end at each hop.
- **HTTP**: the protocol makes every intermediary do so, or allows it and nothing is lost.
- **Z4-*n***: what an enforced scope may change: **1** a refusal instead of forwarding, for which the request is read
  first; **2** events withheld from the first tool call on, then all of them or an error; **4** `Accept-Encoding:
  identity` where a stream is gated; **6** the provider's word that a failed request with tools may be repeated;
  **7** the headers `x-turngate-*`.
- **Z5**: in an enforced scope an answer that did not end well is an error in the provider's own shape.

Where a stage differs, the tests fail when the difference is another one than declared, and also when there is none.
"""


def text() -> str:
    """The page as Markdown."""
    return "\n".join([INTRODUCTION, *_sections()])


def _sections() -> Iterator[str]:
    for title, cases in GROUPS.items():
        yield f"## {title}\n"
        yield _row(["behaviour", "direct", *STAGES, "reason"])
        yield _row(["---"] * (len(STAGES) + 3))
        yield from (_line(name, case) for name, case in cases.items())
        yield ""


def _line(name: str, case: Case) -> str:
    declared = [case.expected(stage) for stage in STAGES]
    reasons = dict.fromkeys(differs.reason for differs in declared if differs is not None)
    marks = ["same" if differs is None else differs.because for differs in declared]
    return _row([name, case.direct, *marks, "; ".join(reasons)])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(text(), end="")
