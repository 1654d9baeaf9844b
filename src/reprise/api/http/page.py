"""`GET /`: the page that shows the cache at work; `GET /docs`: the API; and the files that they are made of."""

from collections.abc import Mapping
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from reprise.core.errors import NotFound

router = APIRouter(include_in_schema=False)

PREFIX = "/page/"
DOCS = "/docs"

_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_HEADERS: Mapping[str, str] = {
    # Nothing from elsewhere, no script or style within the page, and no text that becomes markup.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def _read() -> dict[str, tuple[bytes, str]]:
    """The files by name, with their types."""
    found: dict[str, tuple[bytes, str]] = {}
    for file in files("reprise").joinpath("page").iterdir():
        kind = _TYPES.get(f".{file.name.rpartition('.')[2]}")
        if kind is not None:
            found[file.name] = (file.read_bytes(), kind)
    return found


_FILES = _read()


@router.api_route("/", methods=["GET", "HEAD"])
async def index(request: Request) -> Response:
    """The page for browsers; Ollama's clients look here for a server, and read a line."""
    if "text/html" in request.headers.get("accept", ""):
        return _file("index.html")
    return PlainTextResponse("Reprise is running")


@router.get(DOCS)
async def docs() -> Response:
    """The API for people, from `/openapi.json`, without anything from elsewhere."""
    return _file("docs.html")


@router.get(PREFIX + "{name}")
async def file(name: str) -> Response:
    """A file of the page."""
    return _file(name)


def _file(name: str) -> Response:
    found = _FILES.get(name)
    if found is None:
        raise NotFound(f"The page has no file {name!r}.")
    body, kind = found
    return Response(body, headers={"content-type": kind, **_HEADERS})
