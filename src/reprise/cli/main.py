"""The command `reprise`. Commands import what they need when they run, so that `reprise --help` is quick."""

from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any

import typer

from reprise import __version__
from reprise.cli.bench import bench
from reprise.cli.chat import chat
from reprise.cli.config import config
from reprise.cli.demo import demo
from reprise.cli.doctor import doctor
from reprise.cli.explain import explain
from reprise.cli.inspect import inspect
from reprise.cli.launch import launch
from reprise.cli.mlx_lm_flags import ServeCommand
from reprise.cli.models import models
from reprise.cli.pull import pull
from reprise.cli.requests import requests
from reprise.cli.rm import rm
from reprise.cli.serve import serve
from reprise.cli.simulate import simulate
from reprise.cli.top import top

app = typer.Typer(
    name="reprise",
    help="A chat server for MLX language models that never prefills a token twice while a user waits.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _add(function: Callable[..., None], **options: Any) -> None:
    """Its docstring is its help: lines of the source are no lines of the terminal, whose width they do not know."""
    paragraphs = cleandoc(function.__doc__ or "").split("\n\n")
    app.command(help="\n\n".join(" ".join(each.split("\n")) for each in paragraphs), **options)(function)


_add(serve, cls=ServeCommand)
_add(chat)
# What follows the agent is the agent's.
_add(launch, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
for _command in (pull, models, rm, config, doctor, inspect, demo, bench, explain, requests, top, simulate):
    _add(_command)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"reprise {__version__}")
        raise typer.Exit


@app.callback()
def main(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A chat server for MLX language models."""


if __name__ == "__main__":
    app()
