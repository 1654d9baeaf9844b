"""`reprise demo`."""

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from reprise.cli.installation import check_mlx
from reprise.cli.refuse import refuse


def demo(
    *,
    as_numbers: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON and nothing else.")] = False,
    images: Annotated[bool, typer.Option("--images", help="A chat about pictures (needs the extra `vision`).")] = False,
) -> None:
    """Watch a small model that remembers what it is told, with reuse and without."""
    check_mlx()
    from reprise.lab.bench.server_process import ServerFailed  # noqa: PLC0415 (imports HTTP)
    from reprise.lab.demo.client import DemoFailed  # noqa: PLC0415 (imports NumPy and HTTP)
    from reprise.lab.demo.report import all_turns, as_json, totals  # noqa: PLC0415
    from reprise.lab.demo.show import hold_chats, show_chats  # noqa: PLC0415

    try:
        # In a file or a pipe nothing says how wide it may be: as wide as the table.
        console = Console() if sys.stdout.isatty() else Console(width=120)
        if images:
            from reprise.lab.demo.see import (  # noqa: PLC0415
                hold_chat_about_pictures,
                show_chat_about_pictures,
            )

            parts = hold_chat_about_pictures() if as_numbers else show_chat_about_pictures(console)
        else:
            parts = hold_chats() if as_numbers else show_chats(console)
    except (DemoFailed, ServerFailed) as error:
        refuse(str(error))
    if as_numbers:
        typer.echo(json.dumps(as_json(parts), indent=2))
    if totals(all_turns(parts)).num_different > 0:
        typer.echo("reprise: reuse changed an answer. This is a bug: please report it.", err=True)
        raise typer.Exit(1)
