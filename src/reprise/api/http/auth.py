"""Who may use the server: web pages by host and origin, callers by API key, each key with its namespace."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from reprise.api.http.errors import ErrorFormats, Unauthorized, error_response, problem_of
from reprise.api.http.page import DOCS, PREFIX
from reprise.api.http.web_access import WebAccess
from reprise.core.errors import RepriseError

_HEAD_PATHS = frozenset(
    {"/", "/health", "/health/live", "/health/ready", "/metrics", "/v1/models", "/api/tags", "/api/version"}
)
"""What is also asked for its head alone: by `wget --spider`, by what watches whether a server is up."""
_OPEN_PATHS = frozenset({"/", DOCS, "/health", "/health/live", "/health/ready"})
"""What answers without a key: a load balancer has none, and the pages ask for one."""


class ApiKeys:
    """The keys of a server. Without keys, anyone may use it."""

    def __init__(self, keys: Sequence[str]) -> None:
        assert "" not in keys, "an empty key would let everybody in"
        self._digests = tuple(_digest(key) for key in keys)

    def namespace(self, key: str | None) -> str | None:
        """The namespace of a caller with this key, or None if the key is not known.

        The time it takes does not depend on the key: digests of equal length are compared, and always all of them.
        """
        if not self._digests:
            return ""
        given = _digest(key or "")
        is_known = False
        for digest in self._digests:
            is_known |= hmac.compare_digest(digest, given)
        if not is_known or key is None:
            return None
        return given.hex()[:16]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def keys_of(headers: Headers) -> list[str | None]:
    """The keys that a request brings: OpenAI's `Authorization: Bearer …`, then Anthropic's `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = [token.strip()] if scheme.lower() == "bearer" and token.strip() != "" else []
    return [*bearer, headers.get("x-api-key")]


class Guard:
    """A layer around the application that lets in what `WebAccess` lets a web page do and callers with a known key, and
    notes the caller's namespace."""

    def __init__(self, app: ASGIApp, *, access: WebAccess, keys: ApiKeys, shapes: ErrorFormats) -> None:
        self._app = app
        self._access = access
        self._keys = keys
        self._shapes = shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._access.check_host(scope["headers"])
                self._access.check_origin(scope["method"], scope["path"], scope["headers"])
                scope = self._with_namespace(scope)
                if scope["method"] == "HEAD" and scope["path"] in _HEAD_PATHS:
                    # The HTTP server sends no body for it.
                    scope = {**scope, "method": "GET"}
            except RepriseError as error:
                await error_response(problem_of(error), self._shapes.of(scope))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _with_namespace(self, scope: Scope) -> Scope:
        if scope["path"] in _OPEN_PATHS or scope["path"].startswith(PREFIX):
            return scope
        known = map(self._keys.namespace, keys_of(Headers(scope=scope)))
        namespace = next((each for each in known if each is not None), None)
        if namespace is None:
            raise Unauthorized("Invalid or missing API key. Send `Authorization: Bearer KEY` or `x-api-key: KEY`.")
        return {**scope, "reprise.namespace": namespace}
