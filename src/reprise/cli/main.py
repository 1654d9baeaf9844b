"""The command `reprise`. Commands import what they need when they run, so that `reprise --help` is quick."""

import functools
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from reprise import __version__
from reprise.cli.chat import chat
from reprise.cli.config import config
from reprise.cli.doctor import doctor
from reprise.cli.explain import explain
from reprise.cli.inspect import inspect
from reprise.cli.installation import mlx_or_refusal
from reprise.cli.launch import launch
from reprise.cli.loaded import ps, stop
from reprise.cli.mlx_lm_flags import ServeCommand
from reprise.cli.models import models
from reprise.cli.pull import pull
from reprise.cli.requests import requests
from reprise.cli.rm import rm
from reprise.cli.serve import serve
from reprise.cli.service.command import InstallCommand, install, logs, service_app, status, uninstall
from reprise.cli.top import top
from reprise.cli.wings import COMMANDS, lab_command


class _LazyGroup(TyperGroup):
    """The server's own commands, and those of the lab, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *(name for name in COMMANDS if name not in self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            _add(lab_command(cmd_name), to=alone)
            self.add_command(typer.main.get_command(alone), cmd_name)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="reprise",
    cls=_LazyGroup,
    help="A chat server for MLX language models that never prefills a token twice while a user waits.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _add(function: Callable[..., None], *, to: typer.Typer | None = None, **options: Any) -> None:
    """Its docstring is its help: lines of the source are no lines of the terminal, whose width they do not know."""
    paragraphs = cleandoc(function.__doc__ or "").split("\n\n")

    @functools.wraps(function)
    def command(*words: Any, **named: Any) -> None:
        with mlx_or_refusal():
            function(*words, **named)

    text = "\n\n".join(" ".join(each.split("\n")) for each in paragraphs)
    (app if to is None else to).command(help=text, **options)(command)


_add(serve, cls=ServeCommand)
_add(chat)
# What follows the agent is the agent's.
_add(launch, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
for _command in (pull, models, rm, ps, stop, config, doctor, inspect, explain, requests, top):
    _add(_command)
# The words that people type who come from Ollama.
_add(models, name="list", short_help="The same as `models`.")
_add(chat, name="run", short_help="The same as `chat`.")
app.add_typer(service_app)
_add(install, to=service_app, cls=InstallCommand)
for _command in (uninstall, status, logs):
    _add(_command, to=service_app)


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
