"""Tokens computed and time to the first token, turn by turn, with reuse and without."""

from collections.abc import Sequence
from pathlib import Path

from reprise.charts import Line, line_chart, report_page
from reprise.demo.turns import Turn

_HEIGHT = 8
_WITH, _WITHOUT = "█", "░"


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


def plot_page(turns: Sequence[Turn], path: Path) -> str | None:
    """Write the same as a page for a browser; None, or a sentence that says why there is none."""
    tokens = _chart(
        "Prompt tokens computed",
        "tokens a turn",
        [(turn.turn, turn.computed) for turn in turns],
        [(turn.turn, turn.cold_computed) for turn in turns],
    )
    waits = _chart(
        "Time to the first token",
        "ms",
        [(turn.turn, 1000 * turn.ttft_s) for turn in turns],
        [(turn.turn, 1000 * turn.cold_ttft_s) for turn in turns],
    )
    about = f"A chat of {len(turns)} turns, held with two servers of one model."
    page = report_page("With reuse and without", about, f'<div class="columns">{tokens}{waits}</div>')
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        return f"Cannot write the plot: {error}"
    return None


def _chart(title: str, unit: str, warm: Sequence[tuple[int, float]], cold: Sequence[tuple[int, float]]) -> str:
    lines = (Line(name="with reuse", points=tuple(warm)), Line(name="without", points=tuple(cold)))
    return f'<section class="panel">{line_chart(lines, title=title, x="turn", y=unit)}</section>'
