"""Writes docs/metrics.md from the declared metrics: `python -m tools.metrics_page`."""

from pathlib import Path

from reprise.core.metrics import METRICS, Metric

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

_HEAD = """# Metrics

This page is written by `python -m tools.metrics_page` from the declarations in `src/reprise/core/metrics.py`.

`GET /health` returns them as JSON, `GET /metrics` in Prometheus' format, and a line of totals is logged when the server
stops. Counters start at zero with the server. The fields and series of `disk` exist only with `--disk-cache`. Without
`--drafts` or `--record`, their fields are null and their series are absent.

Series with the label `model` have it even if the server has only one model; those without it are for the whole server.
`GET /health` adds up all models; `GET /health?model=NAME` returns one model's metrics.

| /health | /metrics | unit | |
|---|---|---|---|"""

_TAIL = """
`GET /metrics` has three more: `reprise_requests_total{api,outcome,model}`, and the histograms
`reprise_time_to_first_token_seconds{model}` and `reprise_inter_token_seconds{model}`. `model` is empty for a refused
request that names no model of this server.
"""


def page() -> str:
    """The whole page."""
    rows = (f"| `{m.field}` | {_series(m)} | {m.unit} | {m.help} |" for m in METRICS)
    return "\n".join([_HEAD, *rows, _TAIL])


def _series(metric: Metric) -> str:
    if metric.family is None:
        return ""
    name = f"reprise_{metric.family}{'' if metric.kind == 'gauge' else '_total'}"
    labels = (
        [] if metric.label is None else [metric.label if metric.series is None else f'{metric.label}="{metric.series}"']
    )
    labels += [] if metric.is_of_server else ["model"]
    return f"`{name}{{{','.join(labels)}}}`" if labels else f"`{name}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
