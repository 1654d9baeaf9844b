"""Requests to a running server: its address as people write it, and a sentence for any failure."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast
from urllib.parse import urlsplit

from typer import Option

from reprise.cli.configuration import default_of
from reprise.cli.refuse import refuse
from reprise.core.settings import OPTIONS

DEFAULT_URL = f"http://{default_of('host')}:{default_of('port')}"
ServerUrl = Annotated[str, Option(help="Server, as host:port or a URL.")]
ServerKey = Annotated[str | None, Option(help="API key of the server.", envvar=OPTIONS["api_keys"].variable)]
"""The options `--url` and `--api-key` of the commands that ask a running server."""

_TIMEOUT_S = 30.0
_HERE_S = 2.0
_POLL_S = 0.2
_LINE_S = 5.0
"""Seconds between progress lines where a line cannot be updated in place."""
LOADING_S = 3600.0
"""How long a server may take to download and load its model."""


def server_url(text: str) -> str:
    """The base URL of an address as people write it: maybe without a scheme, or with `/v1` or a slash at the end."""
    text = text.strip()
    if "://" not in text:
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        refuse(f"Invalid --url {text!r}. Example: 127.0.0.1:8080.")
    return text.rstrip("/").removesuffix("/v1")


def looks_like_url(text: str) -> bool:
    """Whether an address is meant, and not a model: it has a scheme, or a host with a port."""
    host, _, port = text.rpartition(":")
    return "://" in text or (host != "" and port.isdecimal() and not Path(text).exists())


def is_reprise_at(url: str) -> bool:
    """Whether a Reprise server runs there, ready or loading its model."""
    return (body := _health_at(url)) is not None and ("tokens_held" in body or "loading" in body)


def answers_at(url: str) -> bool:
    """Whether any HTTP server answers there."""
    import httpx  # noqa: PLC0415 (slow to import)

    try:
        httpx.get(url, timeout=_HERE_S)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return True


def loading_at(url: str) -> str | None:
    """The loading progress of a Reprise server as text; None if there is none, or loading is complete."""
    told = (_health_at(url) or {}).get("loading")
    if told is None:
        return None
    share = f" of {told['bytes_total'] / 1e9:.1f} GB" if told["bytes_total"] > 0 else ""
    return f"{told['bytes_read'] / 1e9:.1f} GB{share} loaded, {told['seconds']:.0f} s"


def wait_while_loading(url: str) -> None:
    """Report a server's loading progress on stderr until it is loaded or gone, or for an hour: then refuse."""
    if (told := loading_at(url)) is None:
        return
    from rich.console import Console  # noqa: PLC0415 (slow to import)

    console = Console(stderr=True)
    due_s = 0.0
    end_s = time.monotonic() + LOADING_S
    with console.status(f"{url}: {told}") as status:
        while told is not None:
            status.update(f"{url}: {told}")
            if not console.is_terminal and time.monotonic() >= due_s:
                due_s = time.monotonic() + _LINE_S
                console.print(f"Waiting for the server at {url}: {told}", highlight=False, soft_wrap=True)
            if time.monotonic() > end_s:
                refuse(f"The server at {url} has been loading its model for {LOADING_S / 60:.0f} minutes. See its log.")
            time.sleep(_POLL_S)
            told = loading_at(url)


def _health_at(url: str) -> dict[str, Any] | None:
    import httpx  # noqa: PLC0415

    try:
        return _json_object(httpx.get(f"{url}/health", timeout=_HERE_S).text)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None


def get_json(url: str, path: str, *, api_key: str | None, **query: str | int) -> dict[str, Any]:
    """The JSON that a running server answers to `GET path`. Ends the command with a sentence where it does not."""
    return _answer(url, "GET", path, api_key=api_key, query=query)


def post_json(url: str, path: str, *, api_key: str | None) -> dict[str, Any]:
    """As `get_json`, for `POST path` without a body."""
    return _answer(url, "POST", path, api_key=api_key, query={})


def _answer(url: str, method: str, path: str, *, api_key: str | None, query: Mapping[str, str | int]) -> dict[str, Any]:
    import httpx  # noqa: PLC0415 (slow to import)

    base = server_url(url)
    # REPRISE_API_KEY may have several keys where a server runs beside: any of them is right.
    headers = {} if not api_key else {"Authorization": f"Bearer {api_key.split()[0]}"}
    try:
        response = httpx.request(method, f"{base}{path}", headers=headers, params=query, timeout=_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        refuse(f"No server answers at {base}: {error}. Start one with `reprise serve`, or give its address with --url.")
    body = _json_object(response.text)
    if body is None or not (response.is_success or "error" in body):
        refuse(f"The server at {base} is not Reprise.")
    if not response.is_success:
        refuse(str(body["error"]["message"]))
    return body


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        body: Any = json.loads(text)
    except ValueError:
        return None
    return cast(dict[str, Any], body) if isinstance(body, dict) else None
