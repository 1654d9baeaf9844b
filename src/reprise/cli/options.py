"""What the values of options are checked for, before anything is loaded."""

import json
from pathlib import Path
from typing import Any, cast

import typer

from reprise.core.settings import KV_BITS, KV_GROUP_SIZES
from reprise.core.sizes import Amount, Bytes, parse_amount


def amount(option: str, text: str) -> Amount:
    """An amount of memory. Raises typer.BadParameter."""
    try:
        return parse_amount(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{option}'") from error


def some(option: str, text: str) -> Amount:
    """An amount of memory that is not zero. Raises typer.BadParameter."""
    given = amount(option, text)
    if given.of(2**40) == 0:
        raise typer.BadParameter(
            "Running requests need memory too: give an amount above zero, and --no-prefix-cache to serve without "
            "the prefix cache.",
            param_hint=f"'{option}'",
        )
    return given


def num_bytes(option: str, text: str) -> int:
    """A number of bytes that is no percentage and not zero. Raises typer.BadParameter."""
    given = amount(option, text)
    if not isinstance(given, Bytes) or given.nbytes == 0:
        raise typer.BadParameter("Give a number of bytes here, as 32MiB.", param_hint=f"'{option}'")
    return given.nbytes


def one_of(value: object, choices: tuple[object, ...]) -> None:
    """Raises typer.BadParameter for a value that is given and not among the choices."""
    if value is not None and value not in choices:
        raise typer.BadParameter(f"Choose one of {', '.join(map(str, choices))}.")


def check_kv_bits(value: int | None) -> int | None:
    one_of(value, KV_BITS)
    return value


def check_kv_group_size(value: int) -> int:
    one_of(value, KV_GROUP_SIZES)
    return value


def above_zero(value: float | None) -> float | None:
    """Raises typer.BadParameter for zero and less."""
    if value is not None and value <= 0:
        raise typer.BadParameter("Give a number above 0.")
    return value


def template_source(option: str, given: str) -> str:
    """The Jinja source of a chat template that is given as a file or as itself. Raises typer.BadParameter."""
    if "{%" in given or "{{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(
            f"{given!r} is neither a file that can be read nor a Jinja template.", param_hint=f"'{option}'"
        ) from error


def template_options(option: str, text: str) -> dict[str, Any]:
    """The options of a chat template, given as a JSON object. Raises typer.BadParameter."""
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"This is not JSON: {error}.", param_hint=f"'{option}'") from error
    if not isinstance(value, dict):
        raise typer.BadParameter("Give a JSON object.", param_hint=f"'{option}'")
    return cast(dict[str, Any], value)
