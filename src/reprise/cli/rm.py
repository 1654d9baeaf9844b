"""`reprise rm ID`."""

from pathlib import Path
from typing import Annotated

import typer

from reprise.cli.refuse import refuse
from reprise.core.sizes import nbytes_text


def rm(
    model: Annotated[str, typer.Argument(metavar="ID", help="A model that `reprise models` lists.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Delete a model from the hub's cache, with all its versions."""
    if Path(model).expanduser().exists():
        refuse(f"{model} is a local directory: delete it yourself if you don't need it.")
    from reprise.engine.models.hub import cached_model, remove  # noqa: PLC0415 (imports MLX)

    found = cached_model(model)
    if found is None:
        refuse(f"{model} is not in the hub's cache. `reprise models` lists the models there.")
    if not yes and not typer.confirm(f"Delete {model} ({nbytes_text(found.nbytes)})?"):
        raise typer.Exit(1)
    typer.echo(f"Deleted {model}: {nbytes_text(remove(found))} freed.")
