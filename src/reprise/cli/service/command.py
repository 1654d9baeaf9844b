"""`reprise service install | uninstall | status | logs`."""

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import platformdirs
import typer

from reprise.cli.configuration import FILE_VARIABLE, Configuration, with_options
from reprise.cli.log_file import kept_file
from reprise.cli.mlx_lm_flags import ServeCommand
from reprise.cli.refuse import refusals, refuse
from reprise.cli.service.managers import ServiceFailed, ServiceManager, this_manager
from reprise.cli.service.units import Service
from reprise.cli.settings_files import replace_file
from reprise.core.settings import OPTIONS, Settings

_OWN_FLAGS = frozenset({"--on-demand", "--print"})
_KEPT = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN_PATH")
"""Variables, beside our own, that say where models are."""
_WORDS = "reprise.words"
_POLL_S = 0.5

service_app = typer.Typer(
    name="service",
    help="Run the server as a service: started at login or by the first request, and again after a failure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class InstallCommand(ServeCommand):
    """`reprise service install`, which keeps the words it was given: they are those of `reprise serve`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        ctx.meta[_WORDS] = [word for word in args if word not in _OWN_FLAGS]
        return super().parse_args(ctx, args)


@with_options(OPTIONS)
def install(
    configuration: Configuration,
    *,
    context: typer.Context,
    on_demand: Annotated[
        bool,
        typer.Option("--on-demand", help="Listen now, and start the server with the first connection to its port."),
    ] = False,
    prints: Annotated[bool, typer.Option("--print", help="Print the files instead of installing them.")] = False,
) -> None:
    """Install and start the service. It takes the model and the options of `reprise serve`.

    What it is not given here it reads from `reprise.toml` whenever it starts. Installing again replaces it.
    """
    settings = configuration.settings()
    if on_demand and settings.port == 0:
        refuse("--on-demand needs a port that clients know: pass --port.")
    words: Sequence[str] = context.meta[_WORDS]
    service = service_of(
        settings, words, environment=os.environ, folder=Path.cwd(), log=log_file(), on_demand=on_demand
    )
    manager = this_manager()
    files = manager.files(service)
    if prints:
        for path, content in files.items():
            typer.echo(f"# {path}\n{content.decode()}")
        return
    with refusals():
        if manager.installed():
            remove(manager)
        service.log.parent.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            # Readable by the owner alone: an API key may be among the options.
            replace_file(path, content, mode=0o600)
            typer.echo(f"Wrote {path}.")
        try:
            manager.start(service)
        except ServiceFailed:
            # A service that did not start is not installed.
            with suppress(ServiceFailed):
                manager.stop()
            for path in manager.installed():
                path.unlink()
                typer.echo(f"Removed {path}.")
            raise
    how = "waits for its first request" if on_demand else "runs"
    typer.echo(f"The service {how} at http://{settings.host}:{settings.port}. Its log: {service.log}")
    if (advice := manager.advice()) is not None:
        typer.echo(advice)


def uninstall() -> None:
    """Stop the service and remove its files. Prefixes on disk and the log stay."""
    manager = this_manager()
    with refusals():
        removed = remove(manager)
    if not removed:
        refuse("The service is not installed.")
    for path in removed:
        typer.echo(f"Removed {path}.")


def status() -> None:
    """Say whether the service is installed and runs. Exits with 1 if it does not run."""
    manager = this_manager()
    files = manager.installed()
    if not files:
        typer.echo("not installed; `reprise service install MODEL` installs it")
        raise typer.Exit(1)
    with refusals():
        is_active = manager.is_active()
    typer.echo(f"{'active' if is_active else 'not running'}: {', '.join(map(str, files))}")
    typer.echo(f"log: {log_file()}")
    if not is_active:
        raise typer.Exit(1)


def logs(
    *,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many of the last lines.")] = 100,
    follows: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what is written from now on.")] = False,
) -> None:
    """Print the end of the service's log."""
    path = log_file()
    if not path.exists():
        refuse(f"There is no log at {path}: the service has not run yet.")
    for line in last_lines([kept_file(path, 1), path], lines):
        typer.echo(line, nl=False)
    if follows:
        _follow(path)


def service_of(
    settings: Settings,
    words: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    on_demand: bool,
) -> Service:
    """The service that runs `reprise serve` with these words as this command would run here."""
    names = {*_KEPT, FILE_VARIABLE, *(option.variable for option in OPTIONS.values())}
    kept = {name: value for name, value in environment.items() if name in names}
    return Service(
        # The last one counts: `reprise service logs` knows this file.
        words=[*_program(), "serve", *words, "--log-file", str(log)],
        folder=folder,
        log=log,
        variables=kept,
        grace_s=settings.grace_s,
        listens_at=(settings.host, settings.port) if on_demand else None,
    )


def remove(manager: ServiceManager) -> tuple[Path, ...]:
    """Stop the service and remove its files; those that were there."""
    files = manager.installed()
    manager.stop()
    for path in files:
        path.unlink()
    return files


def log_file() -> Path:
    """Where the service's log is."""
    return platformdirs.user_log_path("reprise", appauthor=False) / "service.log"


def last_lines(files: Iterable[Path], num: int) -> deque[str]:
    """The last lines of these files, the oldest of which comes first; one that does not exist has none."""
    found: deque[str] = deque(maxlen=num)
    for path in files:
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as file:
                found.extend(file)
    return found


def _follow(path: Path) -> None:
    file = path.open(encoding="utf-8", errors="replace")
    file.seek(0, os.SEEK_END)
    while True:
        for line in file:
            typer.echo(line, nl=False)
        if path.exists() and not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            # It has been renamed, and what was written until then has been read.
            file.close()
            file = path.open(encoding="utf-8", errors="replace")
        time.sleep(_POLL_S)


def _program() -> tuple[str, ...]:
    """The command `reprise` of this installation."""
    beside = Path(sys.executable).with_name("reprise")
    return (str(beside),) if beside.exists() else (sys.executable, "-m", "reprise.cli.main")
