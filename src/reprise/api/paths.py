"""Addresses as clients write them: without `/v1`, or with it twice, where a base URL was given in another form."""

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

_VERSION = "/v1"


class CanonicalPaths:
    """Serves `/chat/completions` and `/v1/v1/chat/completions` as `/v1/chat/completions`.

    `paths`: those that the application serves. One that is served as it stands, or is not known either way, stays.
    """

    def __init__(self, app: ASGIApp, *, paths: Iterable[str]) -> None:
        self._app = app
        given = tuple(paths)
        under_version = {_first(path.removeprefix(_VERSION)) for path in given if path.startswith(f"{_VERSION}/")}
        self._short = under_version - {_first(path) for path in given}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = self.canonical(scope["path"])
            if path != scope["path"]:
                scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)

    def canonical(self, path: str) -> str:
        """The path under which the application serves this one."""
        while path.startswith(f"{_VERSION}{_VERSION}/"):
            path = path.removeprefix(_VERSION)
        return f"{_VERSION}{path}" if _first(path) in self._short else path


def _first(path: str) -> str:
    """The first part of a path."""
    return path.removeprefix("/").partition("/")[0]
