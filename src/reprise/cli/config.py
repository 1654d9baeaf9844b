"""`reprise config`: the options in force, as a configuration file that says where each value comes from."""

import json
from collections.abc import Iterable
from typing import Annotated

import typer

from reprise.cli.configuration import Chosen, Configuration, with_options
from reprise.core.options import Option, OptionGroup
from reprise.core.settings import OPTIONS
from reprise.core.sizes import Bytes, Share


@with_options(OPTIONS)
def config(
    configuration: Configuration,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the options in force and where each value comes from.

    Takes the options of `reprise serve`. The output is a valid configuration file; API keys are left out.
    """
    if as_json:
        typer.echo(json.dumps(_body(configuration), indent=2))
    else:
        typer.echo("\n".join(_lines(configuration)))


def _body(configuration: Configuration) -> dict[str, object]:
    return {
        "file": str(configuration.file.path) if configuration.file.is_found else None,
        "options": {
            option.name: {"value": _plain(option, chosen), "source": chosen.source}
            for option, chosen in _pairs(configuration)
        },
    }


def _plain(option: Option, chosen: Chosen) -> object:
    if option.is_secret:
        return f"{len(chosen.value)} set, not shown" if chosen.value else None
    return str(chosen.value) if isinstance(chosen.value, Bytes | Share) else chosen.value


def _lines(configuration: Configuration) -> Iterable[str]:
    file = configuration.file
    yield f"# Configuration file: {file.path}{'' if file.is_found else ' (not found)'}"
    pairs = list(_pairs(configuration))
    settings = {option.name: _assignment(option, chosen) for option, chosen in pairs}
    width = min(40, max(map(len, settings.values())))
    for group in OptionGroup:
        yield f"\n# {group.value}"
        for option, chosen in pairs:
            if option.group is group:
                yield f"{settings[option.name]:{width}}  # {chosen.source}"


def _assignment(option: Option, chosen: Chosen) -> str:
    if option.is_secret and chosen.value:
        return f"# {option.name}: {len(chosen.value)} set, not shown"
    if chosen.value is None or chosen.value == ():
        return f"# {option.name}: not set"
    return f"{option.name} = {option.kind.write(chosen.value)}"


def _pairs(configuration: Configuration) -> Iterable[tuple[Option, Chosen]]:
    return ((OPTIONS[field], chosen) for field, chosen in configuration.chosen.items())
