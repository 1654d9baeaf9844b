"""`reprise chat [MODEL|URL]`."""

import logging
import os
import select
import sys
import termios
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import platformdirs
import typer

from reprise.cli.chat_model import ChatModel, LocalModel, remote_model
from reprise.cli.configuration import COMMAND_LINE, Configuration, with_options
from reprise.cli.process_limits import check_process_limits
from reprise.cli.refuse import refusals
from reprise.cli.server_url import DEFAULT_URL, is_reprise_at, looks_like_url, server_url, wait_while_loading
from reprise.core.settings import ENGINE_OPTIONS, OPTIONS, Settings

if TYPE_CHECKING:
    from reprise.library.engine import Engine

_SENT = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "thinking_budget": "thinking_budget",
    "chat_template_args": "chat_template_kwargs",
}
"""Options of an answer, and the field of a request that says the same to a server."""


@with_options(["model", *ENGINE_OPTIONS])
def chat(
    configuration: Configuration,
    *,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Chat with this running server; MODEL is the model's name there.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="With a URL: the API key.", envvar=OPTIONS["api_keys"].variable)
    ] = None,
    name: Annotated[str | None, typer.Option(help="With a URL: the model's name there, if it serves several.")] = None,
) -> None:
    """Chat in the terminal, with a model (a directory or a hub id) or with a server (a URL).

    Without MODEL, it chats with the server on port 8080 of this machine or, if none is running, with the configured
    model.

    Enter sends, Alt-Enter starts a new line, Ctrl-C stops an answer, Ctrl-D quits; /help lists the commands. Piped
    input is sent as one message, and the answer goes to standard output.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    has_user = sys.stdin.isatty() and sys.stdout.isatty()
    with refusals(), _lines_held(sys.stdin.fileno()) if has_user else nullcontext("") as typed:
        model = _model(configuration, url, name, api_key)
        try:
            if has_user:
                _talk(model, system, typed)
            else:
                _answer_input(model, system)
        finally:
            model.close()


@contextmanager
def _lines_held(terminal: int) -> Generator[str]:
    """Lines that are typed while nothing is asked wait for the next prompts, one for each, and are not echoed.

    Yields what was typed before, while this program was imported.
    """
    before = termios.tcgetattr(terminal)
    mode = termios.tcgetattr(terminal)
    # Enter stays what the prompt expects, and Ctrl-C does not take back what was typed.
    mode[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
    mode[3] = (mode[3] & ~(termios.ECHO | termios.ICANON)) | termios.NOFLSH
    termios.tcsetattr(terminal, termios.TCSANOW, mode)
    try:
        typed = bytearray()
        while select.select([terminal], [], [], 0)[0] and (part := os.read(terminal, 4096)):
            typed += part
        # Until now the terminal made line breaks of Enter.
        yield typed.decode(errors="replace").replace("\n", "\r")
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def _model(configuration: Configuration, url: str | None, name: str | None, api_key: str | None) -> ChatModel:
    named: str | None = configuration["model"]
    is_chosen = configuration.chosen["model"].source == COMMAND_LINE
    if url is not None:
        url = server_url(url)
        name = name or (named if is_chosen else None)
    elif named is not None and looks_like_url(named):
        url = server_url(named)
    elif not is_chosen and is_reprise_at(DEFAULT_URL):
        url = DEFAULT_URL
    if url is not None:
        wait_while_loading(url)
        options = {field: configuration[option] for option, field in _SENT.items()}
        sent = {field: value for field, value in options.items() if value not in (None, {})}
        return remote_model(url, api_key=api_key.split()[0] if api_key else None, model=name, options=sent)
    settings = configuration.one_model()
    check_process_limits(settings.model)
    return LocalModel(_engine(settings))


def _engine(settings: Settings) -> "Engine":
    from reprise.cli.engines import reported_loading  # noqa: PLC0415 (imports MLX)
    from reprise.library.engine import Engine  # noqa: PLC0415

    with reported_loading(settings.model):
        return Engine(settings)


def _talk(model: ChatModel, system: str | None, typed: str) -> None:
    from reprise.cli.chat_session import Session  # noqa: PLC0415
    from reprise.cli.chat_terminal import Terminal  # noqa: PLC0415 (imports prompt_toolkit)

    history = platformdirs.user_state_path("reprise", appauthor=False) / "chat_history"
    terminal = Terminal(history=history, typed=typed)
    session = Session(model, terminal, system=system)
    terminal.on_typed(session.typed)
    terminal.note(f"{model.name}. /help lists the commands, Ctrl-D leaves.")
    while (line := terminal.read(_prompt(session.branch))) is not None:
        try:
            if not session.take(line):
                break
        except KeyboardInterrupt:
            # Of an answer that has just ended, or of a command.
            terminal.note("stopped")


def _prompt(branch: str) -> str:
    return "> " if branch == "main" else f"{branch}> "


def _answer_input(model: ChatModel, system: str | None) -> None:
    from reprise.cli.chat_session import Session  # noqa: PLC0415
    from reprise.cli.chat_terminal import PlainScreen  # noqa: PLC0415

    session = Session(model, PlainScreen(), system=system)
    if not session.say(sys.stdin.read().strip()):
        raise typer.Exit(1)
