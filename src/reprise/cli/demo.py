"""`reprise demo`."""

import json
from typing import Annotated

import typer
from rich.console import Console

from reprise.cli.refuse import refuse
from reprise.demo.client import DemoFailed
from reprise.demo.report import as_json, totals
from reprise.demo.show import hold_chat, show_chat


def demo(
    *,
    as_numbers: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON and nothing else.")] = False,
) -> None:
    """Watch a tiny model chat for forty turns, with reuse and without."""
    try:
        turns = hold_chat(lambda _: None) if as_numbers else show_chat(Console())
    except DemoFailed as error:
        refuse(str(error))
    if as_numbers:
        typer.echo(json.dumps(as_json(turns), indent=2))
    if totals(turns).num_different > 0:
        typer.echo("reprise: reuse changed an answer. This is a bug: please report it.", err=True)
        raise typer.Exit(1)
