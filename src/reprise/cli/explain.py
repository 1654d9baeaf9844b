"""`reprise explain`: why a request computed what it did, or why one request cannot reuse another."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from typer import Option

from reprise.cli.refuse import refusals, refuse
from reprise.cli.server_url import DEFAULT_URL, ServerKey, ServerUrl, get_json


def explain(
    *,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="ID|FILE", help="Request id (default: the server's last request), or a file with a request body."
        ),
    ] = None,
    other: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="File with the later request body."),
    ] = None,
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerKey = None,
    model: Annotated[
        str | None, Option(help="For two files: the model whose tokenizer and chat template to use.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain why prompt tokens were not reused.

    Without arguments, explains the last request of the server at --url. With a request id (`reprise requests` lists
    them), explains that request. With two files of request bodies, explains without a server where and why the second
    request can't reuse the first.
    """
    from reprise.api.service.records import record_lines  # noqa: PLC0415 (only this command needs it)

    if what is None or other is None:
        record = _record(url, what, api_key)
        typer.echo(json.dumps(record, indent=2) if as_json else "\n".join(record_lines(record)))
        return
    if model is None:
        refuse("Pass --model: its tokenizer and chat template are used to compare the two requests.")
    with refusals():
        comparison = _foresight(model, Path(what), other)
    typer.echo(json.dumps(comparison, indent=2) if as_json else "\n".join(_foretold(comparison)))


def _record(url: str, request_id: str | None, api_key: str | None) -> dict[str, Any]:
    if request_id is not None:
        return get_json(url, f"/v1/cache/requests/{quote(request_id, safe='')}", api_key=api_key)
    latest: list[dict[str, Any]] = get_json(url, "/v1/cache/requests", api_key=api_key, limit=1)["data"]
    if not latest:
        refuse("The server has not answered any requests yet.")
    return latest[0]


def _foresight(model: str, first: Path, second: Path) -> dict[str, Any]:
    from reprise.api.native.any_body import chat_in  # noqa: PLC0415
    from reprise.api.service.records import explanation_body  # noqa: PLC0415
    from reprise.chat.rendering.compare_requests import compare_requests  # noqa: PLC0415
    from reprise.engine.models.load import find_vision, load_text_model  # noqa: PLC0415 (imports MLX)

    text_model = load_text_model(model)
    # It takes seconds, and most bodies are text.
    vision = find_vision(model) if any(map(_may_show_images, (first, second))) else None
    if vision is not None:
        text_model = replace(text_model, images=vision.reader.for_template_of(text_model))
    comparison = compare_requests(text_model, chat_in(first, text_model), chat_in(second, text_model))
    return {
        "first_tokens": comparison.first,
        "prompt_tokens": comparison.second,
        "reused": comparison.reused,
        "resumable": comparison.resumable,
        "reason": str(comparison.explanation.reason),
        "notes": list(comparison.notes),
        "explanation": explanation_body(comparison.explanation),
    }


def _may_show_images(file: Path) -> bool:
    try:
        return b"image" in file.read_bytes()
    except OSError:
        return False  # Reported where it is read as a body.


def _foretold(comparison: dict[str, Any]) -> list[str]:
    from reprise.api.service.records import explanation_lines  # noqa: PLC0415

    return [
        f"prompts of {comparison['first_tokens']:,} and {comparison['prompt_tokens']:,} tokens",
        f"the second can reuse {comparison['reused']:,} of the first; "
        f"{comparison['resumable']:,} on a model that resumes at snapshots only",
        f"reason: {comparison['reason']}",
        *explanation_lines(comparison),
    ]
