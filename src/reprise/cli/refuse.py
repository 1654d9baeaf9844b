"""How a command fails: one sentence on standard error and exit status 2."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

import typer

from reprise.core.errors import RepriseError

USAGE = 2
"""The exit status for what the user can put right."""


def refuse(sentence: str) -> NoReturn:
    """Print the sentence and end the command."""
    typer.echo(f"reprise: {sentence}", err=True)
    raise typer.Exit(USAGE)


@contextmanager
def refusals() -> Generator[None]:
    """Turn the errors that a user can meet into a refusal."""
    try:
        yield
    except RepriseError as error:
        refuse(str(error))
