"""`reprise chat [MODEL|URL]`."""

import logging
import os
import select
import sys
import termios
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import platformdirs
import typer

from reprise.cli.chat_model import ChatModel, LoadingModel, LocalModel, remote_model
from reprise.cli.configuration import COMMAND_LINE, Configuration, with_options
from reprise.cli.process_limits import check_process_limits
from reprise.cli.refuse import refusals
from reprise.cli.server_url import DEFAULT_URL, is_reprise_at, looks_like_url, server_url, wait_while_loading
from reprise.core.settings import ENGINE_OPTIONS, OPTIONS, Settings

if TYPE_CHECKING:
    from reprise.cli.chat_terminal import Terminal

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

    Enter sends, Alt-Enter starts a new line, Ctrl-C stops an answer, Ctrl-D quits; /help lists the commands. The first
    message can be typed while the model is loaded. Piped input is sent as one message, and the answer goes to standard
    output.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    has_user = sys.stdin.isatty() and sys.stdout.isatty()
    # Closed last: a model that is still loaded then ends the process, and the terminal is as it was.
    with refusals(), ExitStack() as closing, _lines_held(sys.stdin.fileno()) if has_user else nullcontext("") as typed:
        model = _remote_model(configuration, url, name, api_key)
        if has_user:
            terminal = _terminal(typed)
            model = _local_model(configuration.one_model(), terminal) if model is None else model
            closing.callback(model.close)
            _talk(model, terminal, system)
        else:
            model = _loaded_model(configuration.one_model()) if model is None else model
            closing.callback(model.close)
            _answer_input(model, system)


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


def _remote_model(
    configuration: Configuration, url: str | None, name: str | None, api_key: str | None
) -> ChatModel | None:
    """The server that the command names, or the one on this machine; None: a model is to be loaded."""
    named: str | None = configuration["model"]
    is_chosen = configuration.chosen["model"].source == COMMAND_LINE
    if url is not None:
        url = server_url(url)
        name = name or (named if is_chosen else None)
    elif named is not None and looks_like_url(named):
        url = server_url(named)
    elif not is_chosen and is_reprise_at(DEFAULT_URL):
        url = DEFAULT_URL
    if url is None:
        return None
    wait_while_loading(url)
    options = {field: configuration[option] for option, field in _SENT.items()}
    sent = {field: value for field, value in options.items() if value not in (None, {})}
    return remote_model(url, api_key=api_key.split()[0] if api_key else None, model=name, options=sent)


def _local_model(settings: Settings, terminal: "Terminal") -> ChatModel:
    """The model, loaded while the first line is typed; before, where a download would write beside it."""
    directory = Path(settings.model).expanduser()
    if not directory.is_dir() and not _has_been_downloaded(settings.model):
        return _loaded_model(settings)
    check_process_limits(settings.model)
    name = directory.resolve().name if directory.is_dir() else settings.model
    return LoadingModel(name, lambda: _loaded_model(settings), when_failed=terminal.fail)


def _has_been_downloaded(model: str) -> bool:
    from huggingface_hub import constants  # noqa: PLC0415 (a command that needs no model does not import it)
    from huggingface_hub.utils import disable_progress_bars  # noqa: PLC0415

    found = Path(constants.HF_HUB_CACHE, f"models--{model.replace('/', '--')}", "snapshots").is_dir()
    if found:
        disable_progress_bars()
    return found


def _loaded_model(settings: Settings) -> ChatModel:
    check_process_limits(settings.model)
    from reprise.cli.engines import reported_loading  # noqa: PLC0415 (imports MLX)
    from reprise.library.engine import Engine  # noqa: PLC0415

    with reported_loading(settings.model):
        return LocalModel(Engine(settings))


def _terminal(typed: str) -> "Terminal":
    from reprise.cli.chat_terminal import Terminal  # noqa: PLC0415 (imports prompt_toolkit)

    return Terminal(history=platformdirs.user_state_path("reprise", appauthor=False) / "chat_history", typed=typed)


def _talk(model: ChatModel, terminal: "Terminal", system: str | None) -> None:
    from reprise.cli.chat_session import Session  # noqa: PLC0415

    session = Session(model, terminal, system=system)
    terminal.on_typed(session.typed)
    state = ", which is being loaded" if isinstance(model, LoadingModel) else ""
    terminal.note(f"{model.name}{state}. /help lists the commands, Alt-Enter starts a new line, Ctrl-D leaves.")
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
    from reprise.cli.chat_session import Screen, Session  # noqa: PLC0415

    session = Session(model, Screen(), system=system)
    if not session.say(sys.stdin.read().strip()):
        raise typer.Exit(1)
