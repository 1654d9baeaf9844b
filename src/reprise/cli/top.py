"""`reprise top`: what the page at `GET /` shows, in a terminal."""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from typer import Option

from reprise.cli.server_url import DEFAULT_URL, ServerKey, ServerUrl, get_json

_SOURCES = (
    ("memory", "█", "cyan"),
    ("disk", "▓", "blue"),
    ("ahead", "▒", "cyan"),
    ("shared", "░", "cyan"),
    ("computed", "·", "bright_black"),
)
_NAMES = {"memory": "from memory", "disk": "from disk", "ahead": "prefilled while idle", "shared": "shared in flight"}
_PARTS = (
    ("weights", "weights"),
    ("running", "KV of running requests"),
    ("kept", "KV kept"),
    ("checkpoints", "checkpoints"),
    ("incoming", "coming from disk"),
    ("images", "images encoded"),
    ("embeddings", "vectors of texts"),
    ("work", "MLX's work"),
    ("pool", "MLX's free pool"),
    ("other", "everything else"),
)
_STATES = {"ready": "cyan", "loading": "yellow", "unloaded": "bright_black"}
_BAR = 16
_CHAT_CHARS = 27
"""Session and agent, 12 characters of each."""


def top(
    *,
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerKey = None,
    once: Annotated[bool, Option("--once", help="Print the current state and exit.")] = False,
    every: Annotated[float, Option(min=0.2, max=60, help="Seconds between refreshes.")] = 1.0,
    model: Annotated[
        str | None, Option(help="Of several models, the one whose cache is listed. Default: the first.")
    ] = None,
) -> None:
    """Show what a running server's cache holds, saves and computes.

    A browser shows the same, and more, at the server's address. Ctrl-C ends.
    """
    console = Console()
    if once:
        console.print(_screen(_look(url, api_key, model), rows=200))
        return
    before = _look(url, api_key, model)
    with Live(_screen(before, rows=console.height), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                now = _look(url, api_key, model)
                live.update(_screen(now, rows=console.height, before=before), refresh=True)
                before = now
        except KeyboardInterrupt:
            return


def _look(url: str, api_key: str | None, model: str | None) -> dict[str, Any]:
    """The content of one screen."""
    of_model = {} if model is None else {"model": model}
    return {
        "at": time.monotonic(),
        "overview": get_json(url, "/v1/cache/overview", api_key=api_key),
        "requests": get_json(url, "/v1/cache/requests", api_key=api_key, limit=40)["data"],
        "tree": get_json(url, "/v1/cache/tree", api_key=api_key, limit=60, **of_model),
    }


def _screen(look: Mapping[str, Any], *, rows: int, before: Mapping[str, Any] | None = None) -> RenderableType:
    told = look["overview"]
    side = Columns([_memory(told), _breakers(told["breakers"]), _changes(told["changes"])], padding=(0, 4))
    # About how many lines the rest of the screen takes.
    models: Sequence[Mapping[str, Any]] = told["models"]
    num_requests = max(5, min(20, rows - 34 - len(models)))
    return Group(
        _head(told),
        _load(look, before),
        "",
        *([_models(models), ""] if models else []),
        _requests(look["requests"][:num_requests], names_model=len(models) > 1),
        "",
        side,
        "",
        _tree(look["tree"], names_model=len(models) > 1),
    )


def _head(told: Mapping[str, Any]) -> Text:
    savings = told["savings"]
    text = Text()
    text.append(f"{_seconds(savings['saved_today_s'])} of waiting saved today", style="bold cyan")
    text.append(f"   {_seconds(savings['saved_s'])} since the start")
    text.append(f"   {_printable(', '.join(each['id'] for each in told['models']) or told['model'])}\n")
    known = savings["reused"] + savings["computed"]
    share = f" ({savings['reused'] / known:.0%})" if known > 0 else ""
    text.append(f"reused {savings['reused']:,}{share}   computed {savings['computed']:,}")
    text.append(f"   prefilled ahead {savings['prefilled_ahead']:,}   could have been reused {savings['lost']:,}")
    drafts = told["drafts"]
    if drafts is not None and drafts["drafted"] > 0:
        text.append(f"\ndrafts: {drafts['accepted']:,} of {drafts['drafted']:,} tokens accepted")
        text.append(f"   {'-' if drafts['saved_s'] < 0 else ''}{_seconds(abs(drafts['saved_s']))} of decoding saved")
    return text


def _load(look: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    load, health = look["overview"]["load"], look["overview"]["health"]
    parts = [f"decoding {load['decoding']}", f"prefilling {load['prefilling']}", f"waiting {load['queued']}"]
    if before is not None:
        seconds, earlier = max(0.05, look["at"] - before["at"]), before["overview"]["health"]
        parts.insert(0, f"{(health['generated'] - earlier['generated']) / seconds:,.0f} tokens/s generated")
    if load["decode_groups"]:
        parts.append(f"groups of {', '.join(map(str, load['decode_groups']))}")
    return "   ".join(parts)


def _models(models: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for name in ("model", "weights"):
        table.add_column(name, no_wrap=True)
    for name in ("in memory", "KV kept", "running", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in models:
        table.add_row(
            Text(_printable(each["id"])),
            Text(each["state"], style=_STATES[each["state"]]),
            _nbytes(each["bytes_weights"]) if each["bytes_weights"] > 0 else "",
            _nbytes(each["bytes_kv"] + each["bytes_snapshots"]),
            f"{each['running']:,}",
            f"{each['queued']:,}",
        )
    return table


def _requests(records: Sequence[Mapping[str, Any]], *, names_model: bool) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    names_chat = any(record.get("chat") for record in records)
    for name, is_number in (
        ("time", 0),
        *((("model", 0),) if names_model else ()),
        ("api", 0),
        *((("chat", 0),) if names_chat else ()),
        ("prompt", 1),
        ("", 0),
        ("reused", 1),
        ("first", 1),
        ("why", 0),
    ):
        # Where the terminal is narrow the reason is cut off, not the numbers.
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name != "why")
    for record in records:
        ttft = record.get("ttft_s")
        has_counts = "prompt_tokens" in record
        table.add_row(
            datetime.fromtimestamp(record["created"]).strftime("%H:%M:%S"),
            *([Text(_printable(record["model"]))] if names_model else []),
            Text(_printable(record["api"])),
            *([Text(_printable(record.get("chat") or "")[:_CHAT_CHARS])] if names_chat else []),
            f"{record['prompt_tokens']:,}" if has_counts else "",
            _bar(record["sources"]) if has_counts else "",
            f"{record['reused']:,}" if has_counts else "",
            "" if ttft is None else _seconds(ttft),
            Text(
                _printable(record.get("reason") or record.get("error") or record["ended"]),
                no_wrap=True,
                overflow="ellipsis",
            ),
        )
    legend = Text("   ").join(
        [Text.assemble((sign, style), f" {_NAMES.get(name, name)}") for name, sign, style in _SOURCES]
    )
    if not records:
        return "No requests yet."
    return Group(table, legend)


def _bar(sources: Mapping[str, int]) -> Text:
    """Where a prompt came from, in characters: rounded at the ends of parts, so that the bar has one length."""
    total, text, done, drawn = max(1, sum(sources.values())), Text(), 0, 0
    for name, sign, style in _SOURCES:
        done += sources[name]
        end = round(_BAR * done / total)
        text.append(sign * (end - drawn), style=style)
        drawn = end
    return text


def _memory(told: Mapping[str, Any]) -> RenderableType:
    memory, disk = told["memory"], told["disk"]
    table = Table(box=None, show_header=False, title="Memory", title_justify="left", title_style="bold")
    table.add_column()
    table.add_column(justify="right")
    for name, text in _PARTS:
        if memory["parts"][name] > 0:
            table.add_row(text, _nbytes(memory["parts"][name]))
    if memory["untouched"] > 0:
        table.add_row("not in memory yet", f"-{_nbytes(memory['untouched'])}")
    table.add_row("the process", _nbytes(memory["process"]), style="bold")
    if memory["running_most"] > 0:
        table.add_row("running requests, at most", _nbytes(memory["running_most"]))
    if disk is not None:
        table.add_row("disk", f"{_nbytes(disk['bytes'])}, {_nbytes(disk['bytes_written_today'])} written today")
        if disk.get("trouble") is not None:
            table.caption = Text(_printable(disk["trouble"]))
    return table


def _breakers(breakers: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table(box=None, show_header=False, title="What breaks prefixes", title_justify="left", title_style="bold")
    table.add_column(justify="right")
    table.add_column(max_width=70)
    for breaker in breakers[:5]:
        table.add_row(_seconds(breaker["seconds"]), f"{breaker['reason']}, {breaker['requests']}×: {breaker['advice']}")
    if not breakers:
        table.add_row("", "Nothing so far.")
    return table


def _changes(changes: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table(box=None, title="Computed", title_justify="left", title_style="bold", header_style="bright_black")
    table.add_column("prompt")
    for name in ("requests", "computed", "at best"):
        table.add_column(name, justify="right")
    for change in changes[:5]:
        table.add_row(change["reason"], *(f"{change[name]:,}" for name in ("requests", "computed", "at_best")))
    return table if changes else ""


def _tree(tree: Mapping[str, Any], *, names_model: bool) -> RenderableType:
    totals = tree["totals"]
    of_model = f" of {_printable(tree['model'])}" if names_model else ""
    root = Tree(
        Text(
            f"Cache{of_model}: {totals['tokens']:,} tokens in {totals['edges']:,} parts, {_nbytes(totals['bytes'])}",
            style="bold",
        ),
        guide_style="bright_black",
    )
    branches: dict[int, Tree] = {}
    for node in tree["data"]:
        above = branches.get(node["parent"], root)
        if node["tokens"] == 0:
            branches[node["id"]] = above
            continue
        line = Text(f"{node['tokens']:,} tokens  ")
        if node["in_memory"]:
            line.append(_nbytes(node["bytes"]), style="cyan")
            line.append(" + disk" if node["disk_bytes"] else "", style="blue")
        else:
            line.append(f"{_nbytes(node['disk_bytes'])} on disk, {_seconds(node['age_s'])} ago", style="blue")
        if any(each["pinned"] for each in node["checkpoints"]):
            line.append(" pinned", style="yellow")
        if node["requests"]:
            line.append(" running", style="yellow")
        line.append(f"  {_printable(' '.join(node['text'].split()))[:60]}", style="bright_black")
        branches[node["id"]] = above.add(line)
    return root


def _printable(text: object) -> str:
    """The text without control and format characters, which could move the cursor or reverse text."""
    return "".join(character if character.isprintable() else "·" for character in str(text))


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = round(seconds / 60), round(seconds) // 3600
    return f"{minutes} min" if seconds < 3600 else f"{hours} h {minutes - 60 * hours} min"


def _nbytes(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
