"""Tokens computed and time to the first token, turn by turn, with reuse and without."""

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from reprise.lab.charts import Line, line_chart, report_page
from reprise.lab.demo.turns import Turn

_HEIGHT = 8
_WITH, _WITHOUT = "█", "░"

_PAPER, _PANEL, _INK, _GRID = "#f6f5f1", "#fdfdfb", "#1b1c1e", "#dfdcd4"
_REUSED, _COMPUTED = "#0c7d74", "#a9a498"

Chart = tuple[str, str, Line, Line]
"""Title, unit, and the two sides."""


def plot_text(turns: Sequence[Turn]) -> str:
    """Two bar charts for a terminal, a column for each turn."""
    tokens = _bars("tokens", [turn.computed for turn in turns], [turn.cold_computed for turn in turns])
    waits = _bars("ms", [1000 * turn.ttft_s for turn in turns], [1000 * turn.cold_ttft_s for turn in turns])
    key = f"{_WITH} with reuse  {_WITHOUT} without, one column per turn"
    return f"Prompt tokens computed: {key}\n{tokens}\n\nTime to the first token, ms: {key}\n{waits}"


def _bars(unit: str, warm: Sequence[float], cold: Sequence[float]) -> str:
    """One chart: what both need is full, what only `cold` needs is light."""
    top = max(*warm, *cold)
    lines: list[str] = []
    for row in range(_HEIGHT, 0, -1):
        # A column reaches into a row if it fills half of it; the lowest row shows that there is something.
        floor = top * (row - 0.5) / _HEIGHT if row > 1 else 0.0
        cells = (_WITH if w > floor else _WITHOUT if c > floor else " " for w, c in zip(warm, cold, strict=True))
        lines.append(f"{top * row / _HEIGHT:7,.0f} ┤{''.join(cells)}")
    return "\n".join((*lines, f"{unit:>7} └{'─' * len(warm)}"))


def save_plot(turns: Sequence[Turn], directory: Path) -> str:
    """Write the same as `reprise-demo.png`, or as a page where matplotlib is not installed; what to tell the user.

    It is drawn in the colours of the server's own page.
    """
    charts = (
        (
            "Prompt tokens computed",
            "tokens a turn",
            Line(name="with reuse", points=tuple((turn.turn, turn.computed) for turn in turns)),
            Line(name="without", points=tuple((turn.turn, turn.cold_computed) for turn in turns)),
        ),
        (
            "Time to the first token",
            "ms",
            Line(name="with reuse", points=tuple((turn.turn, 1000 * turn.ttft_s) for turn in turns)),
            Line(name="without", points=tuple((turn.turn, 1000 * turn.cold_ttft_s) for turn in turns)),
        ),
    )
    about = f"A chat of {len(turns)} turns, held with two servers of one model."
    try:
        figures = import_module("matplotlib.figure")  # An optional extra, so nothing here knows its types.
    except ImportError:
        path, draw = directory / "reprise-demo.html", partial(_draw_page, charts, about)
    else:
        path, draw = directory / "reprise-demo.png", partial(_draw_png, charts, about, figures)
    try:
        draw(path)
    except OSError as error:
        return f"Cannot write the plot: {error}"
    return f"Wrote the plot to {path}."


def _draw_page(charts: Sequence[Chart], about: str, path: Path) -> None:
    panels = (
        f'<section class="panel">{line_chart(lines, title=title, x="turn", y=unit)}</section>'
        for title, unit, *lines in charts
    )
    path.write_text(
        report_page("With reuse and without", about, f'<div class="columns">{"".join(panels)}</div>'), "utf-8"
    )


def _draw_png(charts: Sequence[Chart], about: str, figures: Any, path: Path) -> None:
    figure = figures.Figure(figsize=(12, 4.2), layout="constrained", facecolor=_PAPER)
    figure.suptitle(about, color=_INK, fontsize=11)
    for axes, (title, unit, *lines) in zip(figure.subplots(1, len(charts)), charts, strict=True):
        for line, colour in zip(lines, (_REUSED, _COMPUTED), strict=True):
            axes.plot(*zip(*line.points, strict=True), color=colour, linewidth=2, label=line.name)
        axes.set_title(title, color=_INK, fontsize=11, loc="left")
        axes.set(xlabel="turn", ylabel=unit, ylim=(0, None), facecolor=_PANEL)
        axes.grid(visible=True, axis="y", color=_GRID)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, format="png", dpi=120)
