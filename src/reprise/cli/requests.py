"""`reprise requests`: what a running server did with its latest requests."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from typer import Option

from reprise.cli.server_url import DEFAULT_URL, ServerKey, ServerUrl, get_json


def requests(
    *,
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerKey = None,
    limit: Annotated[int, Option(min=1, max=200, help="Number of requests to list, newest first.")] = 20,
    model: Annotated[str | None, Option(help="Only those of this model.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """List a server's latest requests: what was reused, what was computed, and why.

    `reprise explain ID` has the details.
    """
    of_model = {} if model is None else {"model": model}
    told = get_json(url, "/v1/cache/requests", api_key=api_key, limit=limit, **of_model)
    records: list[dict[str, Any]] = told["data"]
    if as_json:
        typer.echo(json.dumps(records, indent=2))
    elif records:
        typer.echo("\n".join(_lines(records)))
    else:
        typer.echo("No requests yet.")


_HEADINGS = ("time", "id", "model", "api", "ended", "prompt", "reused", "computed", "first token", "reason")
_COUNTS = frozenset({"prompt", "reused", "computed", "first token"})


def _lines(records: Sequence[dict[str, Any]]) -> list[str]:
    """A table whose rows are one line each, however long: a terminal wraps them, and `grep` finds them."""
    rows = [_HEADINGS, *(_row(record) for record in records)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEADINGS))]
    return ["  ".join(_cell(*cell) for cell in zip(_HEADINGS, row, widths, strict=True)).rstrip() for row in rows]


def _cell(heading: str, text: str, width: int) -> str:
    return text.rjust(width) if heading in _COUNTS else text.ljust(width)


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    return (
        datetime.fromtimestamp(record["created"]).strftime("%H:%M:%S"),
        str(record["id"]),
        str(record["model"]),
        str(record["api"]),
        str(record["ended"]),
        *(_count(record.get(key)) for key in ("prompt_tokens", "reused", "prefilled")),
        "" if record.get("ttft_s") is None else f"{record['ttft_s']:.2f} s",
        str(record.get("reason") or record.get("error") or ""),
    )


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
