"""`reprise pull ID`."""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from reprise.cli.refuse import refusals, refuse
from reprise.core.sizes import nbytes_text

if TYPE_CHECKING:
    # Imports MLX.
    from reprise.engine.models.hub import Download

_LOOKS_EVERY_S = 0.2
_INTERRUPTED = 130
"""The exit status of a command that was interrupted with Ctrl-C, by shell convention."""


def pull(model: Annotated[str, typer.Argument(metavar="ID", help="A Hugging Face repository id: owner/name.")]) -> None:
    """Download a model from the hub: only the files needed to run it that are not here yet.

    Refuses at once a model that cannot run: an unknown architecture, unsupported weights, too large for the disk.
    """
    from huggingface_hub.utils import disable_progress_bars  # noqa: PLC0415 (quick start)

    from reprise.cli.models import describe  # noqa: PLC0415 (imports MLX)
    from reprise.engine.models.hub import fetch  # noqa: PLC0415
    from reprise.engine.models.load import checked_download, is_local  # noqa: PLC0415
    from reprise.engine.running.outline import outline_of  # noqa: PLC0415

    disable_progress_bars()
    with refusals():
        if is_local(model):
            refuse(f"{model} is already a local directory: `reprise serve {model}`.")
        download = checked_download(model)
        try:
            with shown(download):
                directory = fetch(model)
        except KeyboardInterrupt:
            typer.echo(
                f"reprise: Stopped. `reprise pull {model}` downloads the files that are still missing.", err=True
            )
            raise typer.Exit(_INTERRUPTED) from None
        outline = outline_of(directory, model)
    typer.echo(f"{model}: {describe(outline)}")
    typer.echo(f"reprise serve {model}")


@contextmanager
def shown(download: "Download") -> Generator[None]:
    """Show the progress of a download, in bytes."""
    if download.missing_nbytes == 0:
        yield
        return
    if not sys.stderr.isatty():
        typer.echo(f"downloading {nbytes_text(download.missing_nbytes)} of {nbytes_text(download.nbytes)}", err=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    is_over = threading.Event()
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(download.id, total=download.nbytes, completed=download.arrived_nbytes())

        def look() -> None:
            while not is_over.wait(_LOOKS_EVERY_S):
                progress.update(task, completed=download.arrived_nbytes())

        looker = threading.Thread(target=look, name="reprise-download", daemon=True)
        looker.start()
        try:
            yield
            progress.update(task, completed=download.nbytes)
        finally:
            is_over.set()
            looker.join()
