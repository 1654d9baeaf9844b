"""What a simulation found, as a table and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from reprise.core.errors import RepriseError
from reprise.core.sizes import nbytes_text
from reprise.lab.charts import Line, bar_lines, line_chart, report_page
from reprise.lab.simulate.cluster import ClusterResult
from reprise.lab.simulate.run import BELADY, UNBOUNDED, Result


class PlotUnavailable(RepriseError):
    """There is no place for the file, or it is not to be a page."""

    code = "plot_unavailable"


def table_of(results: Sequence[Result], *, bytes_per_token: int) -> Table:
    """One row for each policy and budget; the last columns compare with LRU and with Belady's rule."""
    title = f"{results[0].trace}: {results[0].requests:,} requests, {results[0].prompt:,} prompt tokens"
    # Eight columns of figures in the eighty of a terminal: no lines between them.
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("budget", "tokens", "policy", "reused", "computed", "hit share", "× lru", "of belady"):
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for result in results:
        lru, best = _peer(results, result, "lru"), _peer(results, result, BELADY)
        table.add_row(
            nbytes_text(result.budget) if result.budget is not None else "∞",
            count_text(result.budget // bytes_per_token) if result.budget is not None else "∞",
            result.policy,
            count_text(result.reused),
            count_text(result.computed),
            f"{result.hit_share:.1%}",
            f"{result.reused / lru.reused:.2f}" if lru is not None and lru.reused > 0 else "",
            f"{result.reused / best.reused:.0%}" if best is not None and best.reused > 0 else "",
        )
    return table


def changes_table(result: Result) -> Table:
    """What was computed of prompts by what they are to those before them, beside the least that can be."""
    budget = "no bound" if result.budget is None else nbytes_text(result.budget)
    table = Table(title=f"{result.policy}, {budget}: computed by reason", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("prompt", "requests", "tokens", "computed", "at best"):
        table.add_column(heading, justify="left" if heading == "prompt" else "right", no_wrap=True)
    for tally in result.changes:
        least = "" if tally.least is None else count_text(tally.least)
        row = (count_text(tally.prompt), count_text(tally.computed), least)
        table.add_row(tally.change, str(tally.requests), *row)
    return table


def cluster_table(results: Sequence[ClusterResult], *, bytes_per_token: int) -> Table:
    """One row for each way to run the replicas, behind one server with as much memory as all of them."""
    title = f"{results[0].trace}: {results[0].requests:,} requests, {results[0].prompt:,} prompt tokens"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("servers", "tokens", "routing", "shared", "computed", "× one", "loaded", "balance"):
        table.add_column(heading, justify="left" if heading in ("routing", "shared") else "right", no_wrap=True)
    one = results[0]
    for result in results:
        if result.num_replicas == 1:
            one = result
        table.add_row(
            str(result.num_replicas),
            count_text(result.budget // bytes_per_token),
            result.routing if result.num_replicas > 1 else "",
            "disk" if result.is_shared else "",
            f"{result.computed_share:.1%}",
            f"{result.computed / max(1, one.computed):.2f}",
            count_text(result.loaded) if result.is_shared else "",
            f"{result.balance:.2f}",
        )
    return table


def count_text(num: int) -> str:
    """`144.79M`: a number of tokens, to four or five digits."""
    if num < 10_000:
        return str(num)
    return f"{num / 1000:.1f}k" if num < 1_000_000 else f"{num / 1_000_000:.2f}M"


def computed_lines(results: Sequence[Result]) -> list[str]:
    """What more memory would save, as bars: the share of prompt tokens computed within each budget.

    Of the server's own policy, where it is among the results, with the bound of who knows the future beside it.
    """
    policies = [r.policy for r in results if r.budget is not None and r.policy != BELADY]
    if not policies:
        return []
    policy = "cost" if "cost" in policies else policies[0]
    rows: list[tuple[str, float, str]] = []
    for result in results:
        if result.policy not in (policy, UNBOUNDED):
            continue
        best = _peer(results, result, BELADY)
        oracle = f", {1 - best.hit_share:.1%} if the future were known" if best is not None else ""
        label = "no bound" if result.budget is None else nbytes_text(result.budget)
        share = 1 - result.hit_share
        rows.append((label, share, f"{share:.1%}, {count_text(result.computed)} tokens{oracle}"))
    return [f"Prompt tokens computed, policy {policy}:", *bar_lines(rows, most=1.0)]


def check_plot(path: Path) -> None:
    """Whether `draw` can write there, asked before a long simulation. Raises PlotUnavailable with a sentence."""
    if path.suffix != ".html":
        raise PlotUnavailable(f"A plot is a page: give it a name that ends in .html, not {path.name}.")
    if not path.absolute().parent.is_dir():
        raise PlotUnavailable(f"Cannot write the plot: there is no directory {path.absolute().parent}.")


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the shares of prompt tokens that are computed against bytes, as a page. Raises PlotUnavailable."""
    bounded = [r for r in results if r.budget is not None]
    budgets = [r.budget / 1e9 for r in bounded if r.budget is not None]
    lines = [
        Line(
            name=policy,
            points=tuple(
                sorted(
                    (r.budget / 1e9, 100 * (1 - r.hit_share))
                    for r in bounded
                    if r.policy == policy and r.budget is not None
                )
            ),
        )
        for policy in dict.fromkeys(r.policy for r in bounded)
    ]
    for result in results:
        if result.budget is None and budgets:
            share = 100 * (1 - result.hit_share)
            lines.append(Line(name=result.policy, points=tuple((at, share) for at in (min(budgets), max(budgets)))))
    first = results[0]
    chart = line_chart(lines, title="Prompt tokens computed", x="GB for the cache", y="% of all", is_log_x=True)
    text = f"{first.requests:,} requests, {first.prompt:,} prompt tokens; belady knows the future"
    try:
        path.write_text(report_page(f"{first.trace}: what more memory would save", text, chart), encoding="utf-8")
    except OSError as error:
        raise PlotUnavailable(f"Cannot write the plot: {error}") from error


def _peer(results: Sequence[Result], result: Result, policy: str) -> Result | None:
    return next((r for r in results if r.policy == policy and r.budget == result.budget), None)
