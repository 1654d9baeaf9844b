"""`reprise inspect MODEL`."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from reprise.cli.configuration import Configuration, with_options
from reprise.cli.refuse import refusals


@with_options(("model", "embedder", "cache_bytes", "kv_bits", "kv_group_size"))
def inspect(
    configuration: Configuration,
    *,
    as_numbers: Annotated[bool, Option("--json", help="Print JSON and nothing else.")] = False,
    as_learnt: Annotated[
        bool, Option("--learnt", help="Print what its chat template taught, as a TOML file that `--learnt FILE` takes.")
    ] = False,
) -> None:
    """Show a model's layers, where it resumes, what its template does to earlier turns, and how many chats fit."""
    settings = configuration.one_model()
    share = settings.cache_bytes
    from reprise.cli.inspection import embedder_facts, inspect_model  # noqa: PLC0415 (imports MLX)
    from reprise.cli.inspection_table import table_of  # noqa: PLC0415
    from reprise.engine import memory  # noqa: PLC0415
    from reprise.engine.models.load import load_model  # noqa: PLC0415

    with refusals():
        if as_learnt:
            from reprise.cli.inspection import learnt_file  # noqa: PLC0415

            typer.echo(learnt_file(settings.model), nl=False)
            return
        loaded = load_model(
            settings.model,
            kv_bits=settings.kv_bits,
            kv_group_size=settings.kv_group_size,
            mtp=settings.head_source,
            embedder=settings.embedder,
        )
        if loaded.embedder is not None:
            facts = embedder_facts(loaded)
            lines = [f"{name.replace('_', ' '):<12}  {value}" for name, value in facts.items()]
            typer.echo(json.dumps(facts, indent=2) if as_numbers else "\n".join(lines))
            return
        budget = share.of(memory.device_bytes()) if share is not None else memory.default_budget(loaded.nbytes)
        inspection = inspect_model(loaded, settings, budget=budget)
    if as_numbers:
        typer.echo(json.dumps(asdict(inspection), indent=2))
    else:
        Console().print(table_of(inspection))
