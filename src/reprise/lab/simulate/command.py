"""`reprise simulate TRACE…`: what a budget of memory is worth on a trace of requests."""

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Option

from reprise.cli.refuse import refusals, refuse
from reprise.core.sizes import Bytes, parse_amount
from reprise.lab.progress import ProgressLine
from reprise.lab.simulate import Granularity

_KV_BYTES = 20480
if TYPE_CHECKING:
    from reprise.lab.simulate.traces import RecordedModel
    from reprise.replay.payloads import Sizes

_LAYOUTS = ("full", "hybrid", "window")
_SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9}


def simulate(
    *,
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE…", exists=True, help="File of block hashes, token prompts, dialogues or agent sessions."
        ),
    ],
    tokens: Annotated[str, Option(help="Cache budgets in tokens of KV, separated by commas.")] = "0.25M,1M,3M,10M",
    budgets: Annotated[
        str | None, Option("--budgets", "--cache-bytes", help="Cache budgets in bytes instead, such as 2GB,8GB,32GB.")
    ] = None,
    policy: Annotated[
        str, Option(help="Eviction policies to compare, separated by commas.")
    ] = "lru,cost,infinite,belady",
    layout: Annotated[
        str | None, Option(help=f"Layer kinds of the model: {', '.join(_LAYOUTS)}. Default: as recorded, or full.")
    ] = None,
    kv_bytes: Annotated[
        int | None, Option(min=2, help=f"Bytes of KV per token. Default: as recorded, or {_KV_BYTES}.")
    ] = None,
    snapshot_tokens: Annotated[
        int, Option(min=1, help="Size of a hybrid model's snapshot, in tokens of its KV.")
    ] = 3100,
    window: Annotated[
        int, Option(min=2, help="Window size in tokens, for the half of the layers that have one.")
    ] = 1024,
    granularity: Annotated[
        Granularity, Option(help="Replay block hashes with one token per block (faster, same hits) or token by token.")
    ] = Granularity.BLOCK,
    block_tokens: Annotated[int, Option(min=1, help="Prompt tokens per block hash.")] = 512,
    model: Annotated[
        str | None,
        Option(help="Of a recording of several models, the one to simulate. Default: that of most requests."),
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="Stop after this many requests.")] = None,
    replicas: Annotated[
        str | None, Option(help="Simulate clusters of this many servers, such as 2,4,8; budgets are those of one.")
    ] = None,
    at_once: Annotated[
        int, Option("--at-once", "--live", min=1, help="Dialogues or agent sessions that are under way together.")
    ] = 1,
    plot: Annotated[
        Path | None, Option(dir_okay=False, help="Plot the shares against bytes, as a page (.html).")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print results as JSON.")] = False,
) -> None:
    """Replay request traces against the prefix cache, without a model.

    `reprise simulate requests.jsonl --budgets 2GB,8GB,32GB` says what more memory would save a server that recorded its
    requests (`reprise serve --record`). A trace is a file of JSON lines, one request each, in order: {"input_length":
    700, "hash_ids": [0, 7]} with one hash for 512 tokens, or {"tokens": [1, 2, 3], "answer": [4, 5]}; or one JSON list
    of dialogues, {"messages": [{"role": "user", "content": "…"}, …]}; or recorded sessions of coding agents.
    docs/simulate.md describes them. `belady` is an upper bound for all policies.
    """
    from reprise.lab.simulate.cluster import compare_clusters  # noqa: PLC0415
    from reprise.lab.simulate.report import changes_table, check_plot, cluster_table, computed_lines, draw, table_of  # noqa: PLC0415
    from reprise.lab.simulate.run import run_simulation  # noqa: PLC0415
    from reprise.lab.simulate.sessions import holds_sessions, read_sessions  # noqa: PLC0415
    from reprise.lab.simulate.traces import read_trace  # noqa: PLC0415

    if plot is not None and len(traces) > 1:
        refuse("--plot takes a single trace.")
    policies = tuple(name.strip() for name in policy.split(","))
    progress = ProgressLine(Console(stderr=True))
    with refusals():
        if plot is not None:
            check_plot(plot)
        for trace in traces:
            is_sessions = holds_sessions(trace)
            recorded = _recorded(trace, model, is_recording=not is_sessions)
            own = recorded.sizes if kv_bytes is None and layout is None else None
            sizes = own or _sizes(layout or "full", kv_bytes or _KV_BYTES, snapshot_tokens, window)
            token_nbytes = sizes.full + sizes.window
            limits = _byte_budgets(budgets) if budgets is not None else _token_budgets(tokens, token_nbytes)
            requests = (
                read_sessions(trace, num_live=at_once)
                if is_sessions
                else read_trace(
                    trace,
                    granularity=granularity,
                    block_length=block_tokens,
                    num_at_once=at_once,
                    engine=recorded.engine,
                )
            )
            with progress.of(trace.name):
                if replicas is not None:
                    clusters = compare_clusters(
                        trace.name,
                        islice(requests, limit),
                        replicas=_counts(replicas),
                        budgets=limits,
                        sizes=sizes,
                        on_stage=progress.tell,
                    )
                    if as_json:
                        typer.echo(json.dumps([asdict(each) for each in clusters]))
                    else:
                        Console().print(cluster_table(clusters, bytes_per_token=token_nbytes))
                    continue
                results = run_simulation(
                    trace.name,
                    islice(requests, limit),
                    budgets=limits,
                    policies=policies,
                    sizes=sizes,
                    on_progress=lambda done: progress.tell(f"{done:,} requests"),
                    on_stage=progress.tell,
                )
            if as_json:
                typer.echo(json.dumps([asdict(result) | {"hit_share": result.hit_share} for result in results]))
            else:
                Console().print(table_of(results, bytes_per_token=token_nbytes))
                for line in computed_lines(results):
                    Console().print(line, highlight=False)
                for result in results:
                    if result.changes and result.policy == "cost":
                        Console().print(changes_table(result))
            if plot is not None:
                draw(results, plot)


def _recorded(trace: Path, name: str | None, *, is_recording: bool) -> "RecordedModel":
    """The model to simulate: caches of different models share nothing."""
    from reprise.lab.simulate.traces import RecordedModel, recorded_models  # noqa: PLC0415

    models = recorded_models(trace) if is_recording else []
    models = models or [RecordedModel(engine=None, names=(), num_requests=0, sizes=None)]
    named = [model for model in models if name is None or name in model.names]
    listed = ", ".join(f"{' or '.join(model.names)} ({model.num_requests:,})" for model in models if model.names)
    if not named:
        refuse(f"{trace} has no requests of {name}. Requests by model: {listed or 'it names none'}.")
    chosen = max(named, key=lambda model: model.num_requests)
    if len(models) > 1 and name is None:
        typer.echo(f"{trace}: simulating {chosen.names[0]}. Requests by model: {listed}.", err=True)
    return chosen


def _sizes(layout: str, kv_bytes: int, snapshot_tokens: int, window: int) -> "Sizes":
    from reprise.replay.payloads import Sizes  # noqa: PLC0415 - quick start

    if layout not in _LAYOUTS:
        refuse(f"Unknown layout {layout!r}: choose from {', '.join(_LAYOUTS)}.")
    if layout == "hybrid":
        return Sizes(full=kv_bytes, snapshot=snapshot_tokens * kv_bytes)
    if layout == "window":
        half = kv_bytes // 2
        return Sizes(full=kv_bytes - half, window=half, window_tokens=window)
    return Sizes(full=kv_bytes)


def _token_budgets(text: str, kv_bytes: int) -> tuple[int, ...]:
    return tuple(_tokens(part.strip()) * kv_bytes for part in text.split(","))


def _tokens(text: str) -> int:
    factor = _SUFFIXES.get(text[-1:], 1)
    try:
        num = int(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        num = 0
    if num <= 0:
        refuse(f"Invalid number of tokens {text!r}. Example: 0.25M,1M.")
    return num


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if min(counts, default=0) < 1:
        refuse(f"Invalid number of servers {text!r}. Example: 2,4,8.")
    return counts


def _byte_budgets(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        try:
            amount = parse_amount(part)
        except ValueError as error:
            refuse(str(error))
        if not isinstance(amount, Bytes) or amount.nbytes == 0:
            refuse(f"Invalid budget {part!r}. Example: 2GB,8GB.")
        found.append(amount.nbytes)
    return tuple(found)
