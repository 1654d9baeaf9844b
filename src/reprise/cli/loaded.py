"""`reprise ps` and `reprise stop`: the models that a running server has loaded."""

from typing import Annotated, Any
from urllib.parse import quote

import typer

from reprise.cli.server_url import DEFAULT_URL, ServerKey, ServerUrl, get_json, post_json
from reprise.core.sizes import nbytes_text


def ps(*, url: ServerUrl = DEFAULT_URL, api_key: ServerKey = None) -> None:
    """List the models that a running server has loaded, and the size of their weights."""
    found: list[dict[str, Any]] = get_json(url, "/api/ps", api_key=api_key)["models"]
    for model in found:
        context = "" if not model["context_length"] else f", context of {model['context_length']:,} tokens"
        typer.echo(f"{model['name']}: {nbytes_text(model['size'])}{context}")
    if not found:
        typer.echo("No model is loaded. The next request loads the one that it names.")


def stop(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model that `reprise ps` lists.")],
    *,
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerKey = None,
) -> None:
    """Have a running server unload a model as soon as no request runs on it; its prefixes stay.

    The server itself ends with Ctrl-C, or with `reprise service uninstall`.
    """
    post_json(url, f"/v1/models/{quote(model)}/unload", api_key=api_key)
    typer.echo(f"{model} is unloaded. The next request that names it loads it again.")
