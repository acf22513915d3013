"""Which message sequences are broken, and how?"""

from typing import Final

from panels import NONE_IS_FINE, Advice, Page, Query, grid, in_range, lines, number, rate

FINE: Final = (
    number(
        "Findings that refused",
        in_range("sequence_rejects_total", action="rejected") + " or vector(0)",
        Advice("0 once the app is right.", "the reasons are below; each has a page in docs/rules."),
        steps=((None, "green"), (1.0, "yellow")),
    ),
    number(
        "Findings that would have",
        in_range("sequence_rejects_total", action="would_reject") + " or vector(0)",
        Advice("some, where a scope only observes.", "fix them in the app before you raise the stage."),
        steps=((None, "green"), (1.0, "yellow")),
    ),
    number(
        "Waiting for a result",
        in_range("waiting_total"),
        Advice("0: agents answer calls before they go on.", "the app sends before its tool has answered."),
        steps=((None, "green"), (1.0, "yellow")),
    ),
    number(
        "Orphan results",
        in_range("tool_result_faults_total", kind="orphan"),
        Advice("0.", "the app cuts its history between a call and its result: look at the trimming."),
        steps=NONE_IS_FINE,
    ),
    number(
        "Retracted text that came back",
        in_range("preview_leaks_total"),
        Advice(
            "0.",
            "the app saves text of a stream that ended in an error as if it were whole.",
            "TurngatePreviewLeaked",
        ),
        steps=NONE_IS_FINE,
    ),
    number(
        "Not judged",
        in_range("unjudged_total") + " or vector(0)",
        Advice("0, or what Turngate does not cover.", "the Overview tells which surface and why."),
        steps=((None, "green"), (1.0, "yellow")),
    ),
)
WHY: Final = (
    lines(
        "Refused, by reason",
        [Query(rate("sequence_rejects_total", "reason", action="rejected"), "{{reason}}")],
        Advice("0.", "`turngate explain` on an exemplar's operation shows the place.", ""),
        unit="ops",
        exemplars=True,
    ),
    lines(
        "Would be refused, by reason",
        [Query(rate("sequence_rejects_total", "reason", action="would_reject"), "{{reason}}")],
        Advice("falls to 0 before a scope is raised.", "compare with what the provider said: *Rollout*."),
        unit="ops",
        exemplars=True,
    ),
    lines(
        "Faulty tool results",
        [Query(rate("tool_result_faults_total", "kind"), "{{kind}}")],
        Advice(
            "0.",
            "orphan: history was cut; duplicate: a retry was saved twice; misplaced: text in between.",
        ),
        unit="ops",
    ),
    lines(
        "Retracted text that came back, by why it was retracted",
        [Query(rate("preview_leaks_total", "cause"), "{{cause}}")],
        Advice(
            "0.",
            "drop what a failed stream had shown, before the next request.",
            "TurngatePreviewLeaked",
        ),
        unit="ops",
        exemplars=True,
    ),
    grid(
        "Where findings come from",
        in_range("sequence_rejects_total", "upstream, api, reason, action") + " >= 0.5",
        Advice("empty.", "start with the biggest: one bug of an app makes most of them."),
    ),
    lines(
        "Waiting requests by how they ended",
        [Query(rate("waiting_total", "end"), "{{end}}")],
        Advice("0; `refused` where enforced.", "`provider_error` in observe: the provider minds too."),
        unit="reqps",
    ),
)

PAGE: Final = Page(
    "turngate-sequences",
    "Turngate / Sequence integrity",
    "Which message sequences are broken, in which way, and did they reach the provider?",
    (("Is it fine?", FINE), ("Why", WHY)),
)
