"""Plots without a library: bars for a terminal, SVG for a page, and a page that needs nothing from elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from math import ceil, log10

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 10, 40
_BLOCKS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points (x, y) of one name, sorted; `band`: the least and the most at each point."""

    name: str
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float], ...] | None = None

    def __post_init__(self) -> None:
        assert self.band is None or len(self.band) == len(self.points), self.name


def bar_lines(rows: Sequence[tuple[str, float, str]], *, most: float, width: int = 30) -> list[str]:
    """Bars for a terminal: label, value and the text behind the bar of each row. `most` is as long as `width`."""
    labels = max((len(label) for label, _, _ in rows), default=0)
    return [
        f"{label:>{labels}} {_bar(value / most * width if most > 0 else 0.0)} {text}" for label, value, text in rows
    ]


def _bar(length: float) -> str:
    whole = int(length)
    return _BLOCKS[-1] * whole + _BLOCKS[int((length - whole) * (len(_BLOCKS) - 1))].strip()


def line_chart(lines: Sequence[Line], *, title: str, x: str, y: str, is_log_x: bool = False) -> str:
    """An SVG of the lines from zero up, as a figure with its title and a legend. Colours are the page's classes."""
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    tops = [high for line in lines for _, high in line.band or ()]
    ticks_y = _ticks(0.0, max(*(value for _, value in points), *tops, 1e-9))
    first, last = min(at for at, _ in points), max(at for at, _ in points)
    numbers = sorted({at for at, _ in points})
    # What is counted has no halves.
    least_step = 1.0 if all(at == round(at) for at in numbers) else 0.0
    ticks = numbers if is_log_x else _ticks(first, last, least_step=least_step)
    ticks_x = [tick for tick in ticks if first <= tick <= last]

    def across(at: float) -> float:
        span = log10(last / first) if is_log_x else last - first
        share = 0.5 if span == 0 else (log10(at / first) if is_log_x else at - first) / span
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def up(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / ticks_y[-1] * (_HEIGHT - _TOP - _BOTTOM)

    parts: list[str] = []
    for tick in ticks_y:
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{up(tick) + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in ticks_x:
        parts.append(f'<text x="{across(tick):.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{number(tick)}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(x)}</text>')
    for index, line in enumerate(lines):
        if line.band is not None:
            lower = [(at, low) for (at, _), (low, _) in zip(line.points, line.band, strict=True)]
            upper = [(at, high) for (at, _), (_, high) in zip(line.points, line.band, strict=True)]
            around = " ".join(f"{across(at):.1f},{up(value):.1f}" for at, value in (*lower, *reversed(upper)))
            parts.append(f'<polygon class="band s{index}" points="{around}"/>')
        path = " ".join(f"{across(at):.1f},{up(value):.1f}" for at, value in line.points)
        parts.append(f'<polyline class="line s{index}" points="{path}"/>')
        if len(line.points) <= 30:
            parts += [
                f'<circle class="dot s{index}" cx="{across(a):.1f}" cy="{up(v):.1f}" r="3"/>' for a, v in line.points
            ]
    return _figure(title, y, [line.name for line in lines], "".join(parts), height=_HEIGHT)


def bar_chart(
    groups: Sequence[tuple[str, Sequence[tuple[int, float, float, float]]]], names: Sequence[str], *, title: str, y: str
) -> str:
    """An SVG of bars lying in groups: for each group (index of the name, middle, least, most), as a figure."""
    most = max((high for _, bars in groups for _, _, _, high in bars), default=0.0)
    if most <= 0:
        return ""
    left, top_x = 150, _ticks(0.0, most)[-1]
    parts: list[str] = []
    at = 8.0

    def across(value: float) -> float:
        return left + value / top_x * (_WIDTH - left - 70)

    for label, bars in groups:
        middle = at + 9 * len(bars) + 4
        parts.append(f'<text x="{left - 10}" y="{middle:.1f}" text-anchor="end">{escape(label)}</text>')
        for index, value, low, high in bars:
            end = across(value)
            parts.append(
                f'<rect class="bar s{index}" x="{left}" y="{at:.1f}" width="{end - left:.1f}" height="14" rx="2"/>'
            )
            if high > low:
                y_at = at + 7
                parts.append(
                    f'<line class="whisker" x1="{across(low):.1f}" x2="{across(high):.1f}" y1="{y_at}" y2="{y_at}"/>'
                )
            parts.append(f'<text x="{across(high) + 6:.1f}" y="{at + 11:.1f}">{number(value)}</text>')
            at += 18
        at += 10
    return _figure(title, y, names, "".join(parts), height=ceil(at))


def _figure(title: str, y: str, names: Sequence[str], parts: str, *, height: int) -> str:
    keys = "".join(
        f'<span class="key"><i class="s{index}"></i>{escape(name)}</span>' for index, name in enumerate(names)
    )
    return (
        f'<figure><figcaption><b>{escape(title)}</b> <span class="sub">{escape(y)}</span></figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}, {escape(y)}">{parts}</svg>'
        f'<p class="legend">{keys}</p></figure>'
    )


def report_page(title: str, about: str, content: str) -> str:
    """A page with everything in it, in the look of the server's own: no script, font or picture from elsewhere."""
    style = (files("reprise") / "page" / "style.css").read_text(encoding="utf-8")
    hero = f'<div class="hero"><div><h1>{escape(title)}</h1><p class="sub">{escape(about)}</p></div></div>'
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}\n{_STYLE}</style>\n</head>\n"
        f'<body>\n<main id="content">\n{hero}\n{content}\n</main>\n</body>\n</html>\n'
    )


_STYLE = """
:root { --s0: var(--accent); --s1: var(--work); --s2: #b5662f; --s3: #6a5cb8; --s4: #3f78b5; --s5: #a34a78; }
.hero h1 { font-size: 1.7rem; font-weight: 640; color: var(--ink); letter-spacing: -.02em; margin-bottom: .25rem; }
figure { margin: 0; min-width: 0; max-width: 60rem; } .facts dd { text-align: left !important; }
figure svg { display: block; width: 100%; height: auto; font-size: 12px; }
figure text { fill: var(--soft); } figure .grid { stroke: var(--line); } figcaption { margin-bottom: .4rem; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .band { opacity: .16; } .whisker { stroke: var(--ink); }
""" + "".join(
    f".line.s{n} {{ stroke: var(--s{n}); }} .dot.s{n}, .bar.s{n}, .band.s{n} {{ fill: var(--s{n}); }} "
    f"i.s{n} {{ background: var(--s{n}); }}\n"
    for n in range(6)
)


def number(value: float) -> str:
    """For an axis: 0.05, 7, 1,200, 35k."""
    if value >= 100_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if value >= 20 or value == round(value) else f"{value:.3g}"


def _ticks(low: float, high: float, *, least_step: float = 0.0) -> list[float]:
    """Nine round numbers at most, from `low` (rounded down) to `high` (rounded up)."""
    span = max(high - low, 1e-9)
    step = 10.0 ** int(log10(span) // 1)
    step = max(least_step, next(s for s in (step / 5, step / 2, step, step * 2) if span / s <= 8))
    start = int(low // step)
    return [round(index * step, 10) for index in range(start, ceil(high / step) + 1)]
