"""`reprise inspect MODEL`."""

import json
from typing import Annotated

import typer
from typer import Option

from reprise.cli.options import amount, check_kv_bits, check_kv_group_size
from reprise.cli.refuse import refusals
from reprise.core.settings import KV_BITS, KV_GROUP_SIZES


def inspect(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A local model directory or a hub id.")],
    cache_bytes: Annotated[
        str | None, Option(metavar="AMOUNT", help="As for `serve`; else what the device can spare.")
    ] = None,
    kv_bits: Annotated[
        int | None, Option(help=f"Quantise KV to {', '.join(map(str, KV_BITS))} bits.", callback=check_kv_bits)
    ] = None,
    kv_group_size: Annotated[
        int, Option(help=f"{', '.join(map(str, KV_GROUP_SIZES))}.", callback=check_kv_group_size)
    ] = 64,
    as_numbers: Annotated[bool, Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show a model's layers, where it resumes, what its template does to earlier turns, and how many chats fit."""
    share = amount("--cache-bytes", cache_bytes) if cache_bytes is not None else None
    from rich.console import Console  # noqa: PLC0415 (quick start)

    from reprise.cli.inspection import as_json, inspect_model  # noqa: PLC0415 (imports MLX)
    from reprise.cli.inspection_table import table_of  # noqa: PLC0415
    from reprise.engine import memory  # noqa: PLC0415
    from reprise.engine.load import load_model  # noqa: PLC0415

    with refusals():
        loaded = load_model(model, kv_bits=kv_bits, kv_group_size=kv_group_size)
        budget = share.of(memory.device_bytes()) if share is not None else memory.default_budget(loaded.nbytes)
        inspection = inspect_model(loaded, budget=budget)
    if as_numbers:
        typer.echo(json.dumps(as_json(inspection), indent=2))
    else:
        Console().print(table_of(inspection))
