"""What `reprise bench` shows: a table for the terminal, JSON for a program, a page to show to others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from rich import box
from rich.markup import escape as plain
from rich.table import Table

from reprise.lab.bench.results import BenchResult, Run, Spread, Summary
from reprise.lab.charts import Line, bar_chart, line_chart, report_page


def table_of(result: BenchResult) -> Table:
    """A group of rows for each workload, a row for each side: medians, with the range over the repeats."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in (
        "",
        "prompt\ntokens",
        "\ncomputed",
        "first token, ms\nmedian (range)",
        "total wait, s\nmedian (range)",
    ):
        table.add_column(head, justify="left" if head == "" else "right", no_wrap=True)
    rows = {(row.workload, row.side): row for row in result.summaries()}
    for name, _ in result.workloads:
        if any((name, side) in rows for side in result.sides):
            table.add_row(f"[bold]{plain(name)}[/bold]")
        for side in result.sides:
            row, refusal = rows.get((name, side)), result.refusal_of(name, side)
            if row is not None:
                table.add_row(f"  {plain(side)}", *_cells(row))
            elif refusal is not None:
                table.add_row(f"  {plain(side)}", "", "", "", f"[dim]{plain(refusal[:40])}[/dim]")
    return table


def _cells(row: Summary) -> tuple[str, str, str, str]:
    return (
        _count(row.num_prompt),
        _count(row.num_computed),
        _ranged(row.ttft_s, scale=1000),
        _ranged(row.wait_s),
    )


def _count(spread: Spread | None) -> str:
    """What is counted is nearly the same each time; where it is not reported there is a dash."""
    return "–" if spread is None else f"{spread.middle:,.0f}"


def _ranged(spread: Spread | None, *, scale: float = 1.0) -> str:
    if spread is None:
        return "–"
    middle, least, most = (_digits(value * scale) for value in (spread.middle, spread.least, spread.most))
    return middle if least == most else f"{middle} ({least}–{most})"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def summary_lines(result: BenchResult) -> list[str]:
    """What the numbers say: a sentence for each side beside the leading one, and about the answers."""
    rows = {(row.workload, row.side): row for row in result.summaries()}
    lead = result.sides[0]
    lines: list[str] = []
    for side in result.sides[1:]:
        both = [name for name, _ in result.workloads if (name, side) in rows and (name, lead) in rows]
        if not both:
            continue
        waits = [_total(rows[name, which].wait_s for name in both) for which in (side, lead)]
        computed = [_total(rows[name, which].num_computed for name in both) for which in (side, lead)]
        tokens = "" if None in computed else f" and computes {_ratio(computed)} times the prompt tokens"
        compared = sum(rows[name, side].num_compared for name in both)
        different = sum(rows[name, side].num_different for name in both)
        same = "all the same" if different == 0 else f"{different} different"
        lines.append(
            f"{side} takes {_ratio(waits)} times as long as {lead}{tokens}; "
            f"of {compared} answers to the same prompts, {same}."
        )
        lines += [line for name in both if (line := _why_slower(rows[name, lead], rows[name, side])) is not None]
    return lines


def _why_slower(lead: Summary, other: Summary) -> str | None:
    """What the servers' own work takes where the leading side waits longer though it computes no more; else None."""
    if lead.wait_s is None or other.wait_s is None or lead.wait_s.middle <= other.wait_s.middle:
        return None
    if lead.num_computed is None or other.num_computed is None or lead.cpu_s is None or other.cpu_s is None:
        return None
    if lead.num_computed.middle > other.num_computed.middle:
        return None
    own, others = (_digits(1000 * spread.middle) for spread in (lead.cpu_s, other.cpu_s))
    return (
        f"{lead.workload}: {lead.side} takes longer than {other.side} and computes no more prompt tokens. A request "
        f"takes {own} ms of processor time there and {others} ms in {other.side}, with the same passes of the model: "
        "what differs is the server's own work, which counts less the larger the model is."
    )


def _total(spreads: "Sequence[Spread | None] | Any") -> float | None:
    found = list(spreads)
    return None if any(spread is None for spread in found) else sum(spread.middle for spread in found if spread)


def _ratio(pair: Sequence[float | None]) -> str:
    other, lead = pair
    return "?" if other is None or lead is None or lead <= 0 else f"{other / lead:.2f}"


def as_json(result: BenchResult) -> dict[str, Any]:
    """Everything, for a program. Times in seconds; `sent_s` counts from the run's first request."""
    return {
        "head": result.head,
        "sides": list(result.sides),
        "notes": list(result.notes),
        "summary": [asdict(row) for row in result.summaries()],
        "runs": [_run_json(run) for run in result.runs],
        "memory": {side: [list(sample) for sample in samples] for side, samples in result.memory.items()},
    }


def _run_json(run: Run) -> dict[str, Any]:
    began_s = min((reply.sent_s for reply in run.replies), default=0.0)
    numbered = [(wave, reply) for wave, replies in enumerate(run.waves) for reply in replies]
    reasons = run.reasons or ("",) * len(numbered)
    return {
        "workload": run.workload,
        "repeat": run.repeat,
        "side": run.side,
        "refusal": run.refusal,
        "prompt": run.num_prompt,
        "computed": run.num_computed,
        "wait_s": run.wait_s,
        "cpu_s": run.cpu_s,
        "requests": [
            {
                "id": reply.id,
                "wave": wave,
                "prompt": reply.num_prompt,
                "cached": reply.num_cached,
                "computed": reply.num_computed,
                "generated": reply.num_generated,
                "sent_s": round(reply.sent_s - began_s, 4),
                "ttft_s": round(reply.ttft_s, 4),
                "total_s": round(reply.total_s, 4),
                "why": reason,
            }
            for (wave, reply), reason in zip(numbered, reasons, strict=True)
        ],
    }


def as_html(result: BenchResult) -> str:
    """The report as one file that needs nothing else, in the look of the server's own page, light and dark."""
    head = result.head
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in head.items() if value)
    said = "".join(f"<li>{escape(line)}</li>" for line in summary_lines(result))
    notes = "".join(f'<li class="error">{escape(note)}</li>' for note in result.notes)
    parts = [
        _panel("In short", f"<ul>{said}{notes}</ul>"),
        _panel("What was measured, and where", f'<dl class="facts">{facts}</dl>'),
        _panel("Figures", _html_table(result)),
        _panel("Total wait", _waits(result)),
    ]
    for name, about in result.workloads:
        charts = [_per_turn(result, name, what, title) for what, title in _PER_TURN]
        if any(charts):
            parts.append(_panel(f"{name}: {about}", f'<div class="columns">{"".join(charts)}</div>'))
    memory = [
        Line(name=side, points=tuple((at, nbytes / 1e9) for at, nbytes in samples))
        for side in result.sides
        if (samples := result.memory.get(side, []))
    ]
    if memory:
        chart = line_chart(memory, title="Memory of the processes", x="seconds", y="GB")
        parts.append(_panel("Memory over time", chart))
    return report_page("reprise bench", str(head["model"]), "\n".join(parts))


def _panel(title: str, content: str) -> str:
    return f'<section class="panel"><header><h2>{escape(title)}</h2></header>{content}</section>'


def _html_table(result: BenchResult) -> str:
    heads = (
        "workload",
        "side",
        "repeats",
        "prompt tokens",
        "computed",
        "first token, ms",
        "total wait, s",
        "other words",
    )
    kinds = ("", "", *(' class="num"',) * 6)
    shown = "".join(f"<th{kind}>{head}</th>" for kind, head in zip(kinds, heads, strict=True))
    rows: list[str] = []
    for row in result.summaries():
        cells = (str(row.num_repeats), *_cells(row), f"{row.num_different} of {row.num_compared}")
        numbers = "".join(f'<td class="num">{escape(cell)}</td>' for cell in cells)
        rows.append(f"<tr><td>{escape(row.workload)}</td><td>{escape(row.side)}</td>{numbers}</tr>")
    for name, _ in result.workloads:
        for side in result.sides:
            refusal = result.refusal_of(name, side)
            if refusal is not None:
                rows.append(
                    f"<tr><td>{escape(name)}</td><td>{escape(side)}</td><td colspan=6>{escape(refusal)}</td></tr>"
                )
    return f"<table><thead><tr>{shown}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _waits(result: BenchResult) -> str:
    rows = {(row.workload, row.side): row for row in result.summaries()}
    groups: list[tuple[str, list[tuple[int, float, float, float]]]] = []
    for name, _ in result.workloads:
        spreads = [(index, rows[name, side].wait_s) for index, side in enumerate(result.sides) if (name, side) in rows]
        bars = [(index, spread.middle, spread.least, spread.most) for index, spread in spreads if spread is not None]
        if bars:
            groups.append((name, bars))
    return bar_chart(groups, result.sides, title="From sending to the end of the answer", y="seconds, all requests")


def _per_turn(result: BenchResult, workload: str, what: Callable[[Run, int], float | None], title: str) -> str:
    lines: list[Line] = []
    for side in result.sides:
        runs = result.runs_of(workload, side)
        points: list[tuple[float, float]] = []
        band: list[tuple[float, float]] = []
        for index in range(len(runs[0].replies) if runs else 0):
            spread = Spread.of([value for run in runs if (value := what(run, index)) is not None])
            if spread is not None:
                points.append((index + 1, spread.middle))
                band.append((spread.least, spread.most))
        lines.append(Line(name=side, points=tuple(points), band=tuple(band)))
    name, unit = title.split(", ")
    return line_chart(lines, title=name, x="request", y=unit)


_PER_TURN: tuple[tuple[Callable[[Run, int], float | None], str], ...] = (
    (lambda run, index: run.replies[index].num_computed, "Prompt tokens computed, tokens"),
    (lambda run, index: 1000 * run.replies[index].ttft_s, "Time to first token, ms"),
)


def head_lines(head: Mapping[str, Any]) -> list[str]:
    """The head for a terminal."""
    return [f"{name}: {value}" for name, value in head.items() if value]
