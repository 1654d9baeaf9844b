"""Writes docs/metrics.md from the declared metrics: `python -m tools.metrics_page`."""

from pathlib import Path

from reprise.core.metrics import METRICS, Metric

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

_HEAD = """# Metrics

This page is written by `python -m tools.metrics_page` from the declarations in `src/reprise/core/metrics.py`.

`GET /health` has them as JSON, `GET /metrics` for Prometheus, and the log gets a line of totals when the server stops.
Counters start at zero with the server. Fields and series of `disk` are there with `--disk-cache` only. Without
`--drafts` or `--record`, their fields are null and their series are absent.

The label `model` is there on a server with one model, too. Series without it are of the whole server. `GET /health`
adds up all models; `GET /health?model=NAME` is one model's.

| /health | /metrics | unit | |
|---|---|---|---|"""

_TAIL = """
`GET /metrics` has three more: `reprise_requests_total{api,outcome,model}`, and the histograms
`reprise_time_to_first_token_seconds{model}` and `reprise_inter_token_seconds{model}`. `model` is empty for a refused
request that named no model of this server.
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
