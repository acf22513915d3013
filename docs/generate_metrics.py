"""Write metrics.md from the table of metrics: `python docs/generate_metrics.py`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from turngate.telemetry.metrics import PREFIX, SUBJECTS, Label, Metric
from turngate.validators.rules import Reason

PAGE: Final = Path(__file__).parent / "metrics.md"
REASONS: Final = {"", *(reason.value for reason in Reason)}
LISTED_MAX: Final = 5
"""So many reasons are listed; more are told by the page that has them all."""

INTRODUCTION: Final = """<!-- Generated. To change it: edit telemetry/metrics.py, then `python docs/generate_metrics.py`. -->
# Metrics

What `/metrics` on `127.0.0.1:8788` tells, for whoever scrapes it, reads the dashboards or writes an alert. Counters are
those of the observer process and start at 0 with it; `rate` and `increase` take care of that.

- **Labels are bounded.** A label has the values named here, or learns a bounded number of names; anything beyond is
  shown as `other`, so that sums stay right. Nothing is labelled by conversation, call, key or app.
- **A healthy zero is shown.** Series whose labels are all known are there from the first scrape on.
- **Exemplars.** A scraper that asks for OpenMetrics gets the id of the last operation with each bucket or counter marked
  *exemplars*; `turngate explain OPERATION` tells its story. Prometheus keeps them with `--enable-feature=exemplar-storage`.
- **Reasons** are the rules in [docs/rules](rules/README.md): one word in metrics, errors, evidence and documentation.

Dashboards and alert rules over them lie in `dashboards/`; [a compose file](../deploy/README.md) starts all of it.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_all()])


def _all() -> Iterator[str]:
    for subject, metrics in SUBJECTS.items():
        yield f"## {subject}\n"
        yield "| metric | kind | labels | what it says |"
        yield "|---|---|---|---|"
        for metric in metrics:
            labels = "<br>".join(_label(label) for label in metric.labels)
            yield f"| `{PREFIX}{metric.name}` | {_kind(metric)} | {labels} | {metric.help} |"
        yield ""


def _kind(metric: Metric) -> str:
    return f"{metric.kind}, exemplars" if metric.exemplars else metric.kind


def _label(label: Label) -> str:
    values = ", ".join(f"`{value}`" if value else "*none*" for value in label.values)
    if len(label.values) > LISTED_MAX and REASONS.issuperset(label.values):
        values = "a [reason](rules/README.md)" + (" or *none*" if "" in label.values else "")
    learnt = f"up to {label.names_max} {'more' if values else 'names'}" if label.names_max else ""
    return f"**{label.name}**: " + ", ".join(filter(None, (values, learnt)))


if __name__ == "__main__":
    main()
