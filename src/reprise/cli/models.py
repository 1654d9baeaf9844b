"""`reprise models`."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reprise.cli.refuse import refusals, refuse
from reprise.core.errors import LoadFailed
from reprise.core.sizes import nbytes_text

if TYPE_CHECKING:
    # Imports MLX.
    from reprise.engine.running.outline import ModelOutline


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A local model: its outline, or why it cannot be served (`fault`)."""

    name: str
    nbytes: int
    outline: "ModelOutline | None"
    fault: str | None

    def __post_init__(self) -> None:
        assert (self.outline is None) != (self.fault is None), self.name


def models(
    directories: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DIR]...", help="Model directories, or folders of them, to list besides the hub's cache."
        ),
    ] = None,
    *,
    as_numbers: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """List the local models, and the context with which each fits into this machine's memory.

    `reprise models search WORD` lists models of the hub instead, with the most downloads first.
    """
    if directories and directories[0] == _SEARCH and not Path(_SEARCH).is_dir():
        _search(directories[1:], as_numbers=as_numbers)
        return
    for directory in directories or ():
        if not Path(directory).expanduser().is_dir():
            refuse(f"{directory} is not a directory. `reprise models` without arguments lists the hub's cache.")
    listed = list(listed_models([Path(directory) for directory in directories or ()]))
    if as_numbers:
        typer.echo(json.dumps([_as_json(model) for model in listed], indent=2))
        return
    if not listed:
        typer.echo(
            "No models found. `reprise pull ID` downloads one from the hub, such as mlx-community/Qwen3-4B-4bit."
        )
        return
    from rich.console import Console  # noqa: PLC0415 (quick start)
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    for column in ("model", "type", "weights", "layers", "context that fits"):
        table.add_column(column, overflow="fold")
    for model in listed:
        if model.outline is not None:
            cells = (model.outline.architecture, _weights(model.outline), _layers(model.outline), fit(model.outline))
            table.add_row(escape(model.name), *cells)
    console = Console()
    if table.row_count > 0:
        console.print(table)
    for model in listed:
        if model.fault is not None:
            console.print(
                f"cannot be served ({nbytes_text(model.nbytes)}): {model.fault}", markup=False, highlight=False
            )


_SEARCH = "search"
_MOST_FOUND = 20


def _search(words: list[str], *, as_numbers: bool) -> None:
    """What the hub has, and whether its weights fit into this machine's memory."""
    if len(words) != 1:
        refuse("Give one word to search for: `reprise models search qwen3`.")
    from reprise.engine.memory import device_bytes  # noqa: PLC0415 (imports MLX)
    from reprise.engine.models.hub import search  # noqa: PLC0415
    from reprise.engine.models.load import has_architecture  # noqa: PLC0415

    with refusals():
        found = search(words[0], limit=_MOST_FOUND)
    if as_numbers:
        typer.echo(json.dumps([asdict(model) for model in found], indent=2))
        return
    room = device_bytes()
    for model in found:
        notes = ["size not known" if model.nbytes is None else nbytes_text(model.nbytes)]
        if model.kind is not None and not has_architecture(model.kind):
            notes.append(f"{model.kind}: cannot be served")
        elif model.nbytes is not None and model.nbytes > room:
            notes.append("too large for this machine")
        typer.echo(f"{model.id}  {', '.join(notes)}")
    typer.echo(
        f"reprise pull {found[0].id}" if found else f"The hub has no model for MLX with {words[0]!r} in its name."
    )


def listed_models(directories: list[Path]) -> Iterator[ListedModel]:
    """Those of the directories, then those of the hub's cache."""
    from reprise.cli.process_limits import weights_nbytes  # noqa: PLC0415
    from reprise.engine.models.hub import cached_models  # noqa: PLC0415 (imports MLX)

    for directory in directories:
        for found in model_directories(directory.expanduser()):
            yield _listed(str(found), found, weights_nbytes(found))
    for cached in cached_models():
        yield _listed(cached.id, cached.directory, cached.nbytes)


def model_directories(directory: Path) -> list[Path]:
    """The directory itself if it is a model's, else those below it, as `name` or `owner/name`."""
    if (directory / "config.json").is_file():
        return [directory]
    return sorted(file.parent for pattern in ("*/config.json", "*/*/config.json") for file in directory.glob(pattern))


def describe(outline: "ModelOutline") -> str:
    """A model in one line."""
    return f"{outline.architecture}, {_weights(outline)}, {_layers(outline)}; context that fits: {fit(outline)}"


def fit(outline: "ModelOutline") -> str:
    """The longest chat that fits into this machine's memory beside the weights, as text."""
    tokens = tokens_that_fit(outline)
    if tokens == 0:
        return "none: the weights alone exceed this machine's memory"
    if tokens == outline.context:
        return f"all {tokens:,} tokens"
    return f"{tokens:,} tokens" if outline.context is None else f"{tokens:,} of {outline.context:,} tokens"


def tokens_that_fit(outline: "ModelOutline") -> int:
    """The longest chat that the memory of this machine holds beside the weights, up to the model's context."""
    from reprise.engine.memory import room_beside  # noqa: PLC0415

    return outline.tokens_within(room_beside(outline.nbytes))


def _listed(name: str, directory: Path, nbytes: int) -> ListedModel:
    from reprise.engine.running.outline import outline_of  # noqa: PLC0415

    try:
        return ListedModel(name=name, nbytes=nbytes, outline=outline_of(directory, name), fault=None)
    except LoadFailed as error:
        return ListedModel(name=name, nbytes=nbytes, outline=None, fault=str(error))


def _weights(outline: "ModelOutline") -> str:
    return f"{nbytes_text(outline.nbytes)}, {outline.quantisation}"


def _layers(outline: "ModelOutline") -> str:
    from reprise.cli.inspection import layers_text  # noqa: PLC0415

    return layers_text(outline.blueprint.specs, outline.embedder)


def _as_json(model: ListedModel) -> dict[str, Any]:
    outline = model.outline
    if outline is None:
        return {"name": model.name, "nbytes": model.nbytes, "fault": model.fault}
    return {
        "name": model.name,
        "nbytes": outline.nbytes,
        "architecture": outline.architecture,
        "quantization": outline.quantisation,
        "layers": _layers(outline),
        "context": outline.context,
        "context_that_fits": tokens_that_fit(outline),
        "kv_bytes_per_token": outline.footprint.full,
        "snapshot_bytes": outline.footprint.snapshot,
    }
