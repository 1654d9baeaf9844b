"""How a command fails: one sentence on standard error and exit status 2, or 75 where a new start may help."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

import typer

from reprise.api.http.ending import RESTARTABLE
from reprise.core.errors import EngineLost, RepriseError

USAGE = 2
"""The exit status for errors that the user can fix."""


def refuse(sentence: str, *, status: int = USAGE) -> NoReturn:
    """Print the message and exit the command."""
    typer.echo(f"reprise: {sentence}", err=True)
    raise typer.Exit(status)


@contextmanager
def refusals() -> Generator[None]:
    """Turn errors meant for users into a refusal."""
    try:
        yield
    except RepriseError as error:
        refuse(str(error), status=RESTARTABLE if isinstance(error, EngineLost) else USAGE)
