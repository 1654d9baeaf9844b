"""`reprise launch AGENT`: start an agent with a Reprise server."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import platformdirs
import typer

from reprise.cli.agents import AGENTS, Agent, AgentCommand, ServerAddress
from reprise.cli.refuse import refusals, refuse
from reprise.cli.server_url import (
    DEFAULT_URL,
    ServerKey,
    ServerUrl,
    answers_at,
    get_json,
    is_reprise_at,
    server_url,
    wait_while_loading,
)
from reprise.cli.settings_files import SettingsBackups, read_settings
from reprise.core.settings import OPTIONS

_POLL_S = 0.2
START_S = 60.0
"""A server listens before it imports anything that takes long."""
_END_S = 60.0


def launch(
    context: typer.Context,
    *,
    agent: Annotated[
        str, typer.Argument(help=f"One of {', '.join(AGENTS)}. Further arguments are passed to the agent.")
    ],
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerKey = None,
    model: Annotated[
        str | None,
        typer.Option(
            envvar=OPTIONS["model"].variable, help="One of the server's models. If no server runs: start one with it."
        ),
    ] = None,
    prints: Annotated[bool, typer.Option("--print", help="Print the settings for a shell instead.")] = False,
    writes: Annotated[
        bool, typer.Option("--write", help="Write to the agent's own settings; --undo reverts it.")
    ] = False,
    undoes: Annotated[bool, typer.Option("--undo", help="Restore the agent's settings, byte for byte.")] = False,
    is_forced: Annotated[
        bool, typer.Option("--force", help="With --undo: even if the settings have changed since.")
    ] = False,
) -> None:
    """Start an agent with the running server, or with a server started for it.

    What the agent needs (address, key, model, context length, timeouts) is set for its process only. Options for the
    agent follow its name: reprise launch claude --continue.
    """
    chosen = AGENTS.get(agent)
    if chosen is None:
        refuse(f"Unknown agent {agent!r}. Choose from {', '.join(AGENTS)}.")
    if sum((prints, writes, undoes)) > 1 or (is_forced and not undoes):
        refuse("Use only one of --print, --write and --undo. --force needs --undo.")
    backups = SettingsBackups(platformdirs.user_state_path("reprise", appauthor=False) / "launch")
    with refusals():
        if undoes:
            typer.echo(f"Restored {backups.restore(agent, is_forced=is_forced)}.")
            return
        with _server(server_url(url), model=model, may_start=not (prints or writes)) as base:
            server = _address(base, api_key, model)
            if writes:
                _write(backups, agent, chosen, server)
            elif prints:
                typer.echo("".join(_settings_as_remarks(chosen, server)), nl=False)
                typer.echo("\n".join(_extended(chosen.command(server), context.args).lines()))
            else:
                _check_settings(agent, chosen, server)
                raise typer.Exit(_run(chosen, _extended(chosen.command(server), context.args)))


def _address(url: str, api_key: str | None, model: str | None) -> ServerAddress:
    """The server, and the model of it that was named; its first one if none was."""
    listed: dict[str, dict[str, Any]] = {
        found["id"]: found for found in get_json(url, "/v1/models", api_key=api_key)["data"]
    }
    named = next(iter(listed)) if model is None else model if model in listed else Path(model).name
    if named not in listed:
        refuse(f"The server at {url} does not serve {model}. It serves {', '.join(listed)}.")
    length: int | None = listed[named].get("max_model_len")
    sees = "image" in listed[named].get("input_modalities", ())
    known = ServerAddress(url=url, api_key=api_key.split()[0] if api_key else "none", model=named, sees=sees)
    return known if length is None else replace(known, context=length)


def _extended(command: AgentCommand, words: list[str]) -> AgentCommand:
    return replace(command, words=(*command.words, *words))


def _write(backups: SettingsBackups, name: str, agent: Agent, server: ServerAddress) -> None:
    file, _, content = _settings(name, agent, server)
    target = backups.write(name, file, content)
    typer.echo(f"Wrote {target}. `reprise launch {name} --undo` restores it.")


def _settings(name: str, agent: Agent, server: ServerAddress) -> tuple[Path, bytes, bytes]:
    """The agent's settings file, its content, and its content with the server in it."""
    if agent.edited is None:
        refuse(
            f"{agent.title} gets the server from its environment alone: `reprise launch {name} --print` prints that."
        )
    file = agent.settings_file(os.environ, Path.home())
    if agent.has_jsonc and (commented := file.with_suffix(".jsonc")).exists():
        file = commented
    try:
        now = read_settings(file) or b""
        return file, now, agent.edited(now.decode(), server).encode()
    except (OSError, ValueError) as error:
        refuse(f"{file} cannot be changed: {error}. `reprise launch {name} --print` prints the settings instead.")


def _settings_as_remarks(agent: Agent, server: ServerAddress) -> Iterator[str]:
    """What the settings file of an agent has to have, as remarks for a shell, where nothing else names the server."""
    if agent.needs_settings and agent.edited is not None:
        yield f"# in {agent.settings_file(os.environ, Path.home())}, beside what is there (--write does so):\n"
        yield from (f"#   {line}\n" for line in agent.edited("", server).splitlines())


def _check_settings(name: str, agent: Agent, server: ServerAddress) -> None:
    """Refuse to start an agent that does not know the server yet."""
    if agent.needs_settings:
        file, now, wanted = _settings(name, agent, server)
        if now != wanted:
            refuse(
                f"{agent.title} knows only servers that {file} names: `reprise launch {name} --write` adds this one, "
                "and --undo restores the file."
            )


def _run(agent: Agent, command: AgentCommand) -> int:
    program = shutil.which(command.words[0])
    if program is None:
        refuse(f"{agent.title} is not installed: {agent.install}")
    kept = {name: value for name, value in os.environ.items() if name not in command.unset}
    # Ctrl-C is the agent's: it knows what to do with it. A handler does not outlive exec, as SIG_IGN would.
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        return subprocess.call([program, *command.words[1:]], env={**kept, **command.variables})
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _server(url: str, *, model: str | None, may_start: bool) -> Generator[str]:
    """The server there; if there is none and a model was named, one of our own until the block is left."""
    if is_reprise_at(url):
        wait_while_loading(url)
        yield url
        return
    if model is None or not may_start:
        if answers_at(url):
            refuse(f"The server at {url} is not Reprise. Give the address of one with --url.")
        refuse(
            f"No server answers at {url}. Start one with `reprise serve MODEL`"
            f"{', or pass --model MODEL to start one' if may_start else ''}."
        )
    parts = urlsplit(url)
    host = parts.hostname or ""
    if not _is_loopback(host) or parts.scheme != "http" or parts.path:
        refuse(
            f"No server answers at {url}. `launch` starts one only on this machine, at an address such as "
            f"{DEFAULT_URL}. Start that one with `reprise serve MODEL`, or leave out --url."
        )
    log = platformdirs.user_log_path("reprise", appauthor=False) / "launch.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    where = ["--host", host, "--port", str(parts.port or 80)]
    command = [sys.executable, "-m", "reprise.cli.main", "serve", model, *where]
    typer.echo(f"Starting a server for {model} (log: {log}) …", err=True)
    with log.open("wb") as out:
        # In a new session: Ctrl-C in the agent does not end it.
        server = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait_for(server, url, log)
        wait_while_loading(url)
        # One that cannot load its model answers no more, and ends a moment later.
        _wait_for(server, url, log)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(_END_S)
        except subprocess.TimeoutExpired:
            server.kill()


def _wait_for(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Wait until the server answers. Refuse with the last line of its log if it ends, or after `START_S`."""
    end_s = time.monotonic() + START_S
    while not is_reprise_at(url):
        if server.poll() is not None:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            refuse(f"The server did not start: {(lines or ['no output.'])[-1].removeprefix('reprise: ')}")
        if time.monotonic() > end_s:
            refuse(f"The server did not answer at {url} within {START_S:.0f} s. Its log: {log}")
        time.sleep(_POLL_S)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
