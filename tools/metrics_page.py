"""Writes docs/metrics.md from the declared metrics: `python -m tools.metrics_page`."""

from pathlib import Path

from reprise.core.metrics import METRICS, Metric, MetricKind

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

_HEAD = """# Metrics

This page is written by `python -m tools.metrics_page` from the declarations in `src/reprise/core/metrics.py`.

`GET /health` has them as JSON, `GET /metrics` for Prometheus, and the log gets a line of totals when the server stops.
Counters start at zero with the server. Fields and series of `disk` are there with `--disk-cache` only.

| /health | /metrics | unit | |
|---|---|---|---|"""

_TAIL = """
`GET /metrics` has three more: `reprise_requests_total{api,outcome}`, and the histograms
`reprise_time_to_first_token_seconds` and `reprise_inter_token_seconds`.
"""


def page() -> str:
    """The whole page."""
    rows = (f"| `{m.field}` | {_series(m)} | {m.unit} | {m.help} |" for m in METRICS)
    return "\n".join([_HEAD, *rows, _TAIL])


def _series(metric: Metric) -> str:
    if metric.family is None:
        return ""
    name = f"reprise_{metric.family}{'_total' if metric.kind is MetricKind.COUNTER else ''}"
    if metric.label is None:
        return f"`{name}`"
    return f"`{name}{{{metric.label}}}`" if metric.series is None else f'`{name}{{{metric.label}="{metric.series}"}}`'


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
