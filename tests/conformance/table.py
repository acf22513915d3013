"""All cases, in the order of the page."""

from typing import Final

from conformance.answer_cases import ANSWERS
from conformance.case import Cases
from conformance.connection_cases import CONNECTIONS
from conformance.generation_cases import GENERATIONS
from conformance.request_cases import REQUESTS

GROUPS: Final[dict[str, Cases]] = {
    "Requests": REQUESTS,
    "Answers": ANSWERS,
    "Connections": CONNECTIONS,
    "Requests and answers that are judged": GENERATIONS,
}
CASES: Final[Cases] = {
    f"{title}: {name}": case for title, group in GROUPS.items() for name, case in group.items()
}
