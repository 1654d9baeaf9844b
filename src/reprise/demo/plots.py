"""Tokens computed and time to the first token, turn by turn, with reuse and without."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from reprise.demo.turns import Turn

_HEIGHT = 8
_WITH, _WITHOUT = "█", "░"


def plot_text(turns: Sequence[Turn]) -> str:
    """Two bar charts for a terminal, a column for each turn."""
    tokens = _bars("tokens", [turn.computed for turn in turns], [turn.cold_computed for turn in turns])
    waits = _bars("ms", [1000 * turn.ttft_s for turn in turns], [1000 * turn.cold_ttft_s for turn in turns])
    key = f"{_WITH} with reuse  {_WITHOUT} without, a column a turn"
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


def plot_png(turns: Sequence[Turn], path: Path) -> str | None:
    """Write the same as a PNG; None, or a sentence that says why there is none."""
    try:
        figures = import_module("matplotlib.figure")  # An optional extra, so nothing here knows its types.
    except ImportError:
        return "For the plot as a PNG: pip install matplotlib."
    figure = figures.Figure(figsize=(8, 6), layout="constrained")
    numbers = [turn.turn for turn in turns]
    tokens, waits = figure.subplots(2, sharex=True)
    tokens.plot(numbers, [turn.cold_computed for turn in turns], marker=".", label="without reuse")
    tokens.plot(numbers, [turn.computed for turn in turns], marker=".", label="with reuse")
    tokens.set(ylabel="prompt tokens computed")
    waits.plot(numbers, [1000 * turn.cold_ttft_s for turn in turns], marker=".", label="without reuse")
    waits.plot(numbers, [1000 * turn.ttft_s for turn in turns], marker=".", label="with reuse")
    waits.set(ylabel="time to first token, ms", xlabel="turn")
    for axes in (tokens, waits):
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        return f"The plot cannot be written: {error}"
    return None
