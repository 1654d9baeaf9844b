"""The command `reprise`. Each command is imported when it is asked for, and imports then what it needs.

`reprise --help` asks for all of them: what takes long to import stands in their functions.
"""

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from reprise import __version__
from reprise.cli.installation import mlx_or_refusal
from reprise.cli.mlx_lm_flags import ServeCommand
from reprise.cli.service.command import InstallCommand, install, logs, service_app, status, uninstall

COMMANDS: Mapping[str, str] = {
    "serve": "reprise.cli.serve:serve",
    "chat": "reprise.cli.chat:chat",
    "launch": "reprise.cli.launch:launch",
    "pull": "reprise.cli.pull:pull",
    "models": "reprise.cli.models:models",
    "rm": "reprise.cli.rm:rm",
    "ps": "reprise.cli.loaded:ps",
    "stop": "reprise.cli.loaded:stop",
    "config": "reprise.cli.config:config",
    "doctor": "reprise.cli.doctor:doctor",
    "inspect": "reprise.cli.inspect:inspect",
    "explain": "reprise.cli.explain:explain",
    "requests": "reprise.cli.requests:requests",
    "top": "reprise.cli.top:top",
    # The words that people type who come from Ollama.
    "list": "reprise.cli.models:models",
    "run": "reprise.cli.chat:chat",
    "bench": "reprise.lab.bench.command:bench",
    "demo": "reprise.lab.demo.command:demo",
    "simulate": "reprise.lab.simulate.command:simulate",
}
"""The function of each command."""
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "serve": {"cls": ServeCommand},
    # What follows the agent is the agent's.
    "launch": {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}},
    "list": {"short_help": "The same as `models`."},
    "run": {"short_help": "The same as `chat`."},
}


class _LazyGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, "service"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # Instead of one that there is not, any may be meant.
        for name in (cmd_name,) if cmd_name in self.list_commands(ctx) else COMMANDS:
            if name not in self.commands:
                module, function = COMMANDS[name].split(":")
                alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
                _add(getattr(import_module(module), function), to=alone, name=name, **_OPTIONS.get(name, {}))
                self.add_command(typer.main.get_command(alone), name)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="reprise",
    cls=_LazyGroup,
    help="A chat server for MLX language models that never prefills a token twice while a user waits.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _add(function: Callable[..., None], *, to: typer.Typer, **options: Any) -> None:
    """Its docstring is its help: lines of the source are no lines of the terminal, whose width they do not know."""
    paragraphs = cleandoc(function.__doc__ or "").split("\n\n")

    @functools.wraps(function)
    def command(*words: Any, **named: Any) -> None:
        with mlx_or_refusal():
            function(*words, **named)

    text = "\n\n".join(" ".join(each.split("\n")) for each in paragraphs)
    to.command(help=text, **options)(command)


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
