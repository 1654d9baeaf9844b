"""One request as it travels from the HTTP front to a replica, and its response on the way back."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from starlette.types import ASGIApp, Message, Scope

_LEAVES_S = 5.0
"""How long an application may take to notice that its client has gone."""

LOOKUP_PATH = "/v1/cache/lookup"
REPLICA_HEADER = "x-reprise-replica"
"""In a response, the replica that gave it; in a request, the one that is to answer."""

_ASKED = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/responses/input_tokens",
        "/v1/prefill",
        "/api/chat",
        "/api/generate",
        LOOKUP_PATH,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedRequest:
    """A request with its whole body. `path` is without the prefix under which the application is mounted."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        assert self.path.startswith("/"), self.path

    @property
    def has_prompt(self) -> bool:
        """Whether the cache of a replica may have the beginning of it."""
        return self.method == "POST" and self.path in _ASKED

    def header(self, name: str) -> str | None:
        """The first of this name, in lower case; None without."""
        wanted = name.encode()
        return next((value.decode("latin-1") for key, value in self.headers if key == wanted), None)

    def as_lookup(self) -> "ForwardedRequest":
        """The question what the prompt would find."""
        return ForwardedRequest(method="POST", path=LOOKUP_PATH, query=b"", headers=self.headers, body=self.body)

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> "ForwardedRequest":
        """From an ASGI scope of type http."""
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        if root and (path == root or path.startswith(root.rstrip("/") + "/")):
            path = path[len(root.rstrip("/")) :] or "/"
        client = cast(Sequence[Any] | None, scope.get("client"))
        return cls(
            method=scope["method"],
            path=path,
            query=bytes(scope.get("query_string", b"")),
            headers=tuple((bytes(name).lower(), bytes(value)) for name, value in scope["headers"]),
            body=body,
            client=None if client is None else (str(client[0]), int(client[1])),
        )

    def scope(self) -> Scope:
        """As an ASGI scope."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
            "state": {},
        }


class AsgiCall:
    """A request under way in an application. `cut_off` ends it, and `messages` then raises CutOff."""

    def __init__(self, app: ASGIApp, request: ForwardedRequest) -> None:
        self._request = request
        # Unbounded: an answer is bounded, and a slow reader must not hold up the others.
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._has_read = False
        self._is_cut_off = False
        self._task = asyncio.create_task(self._run(app))

    def cut_off(self) -> None:
        """End the response here."""
        self._is_cut_off = True
        self._task.cancel()

    async def messages(self) -> AsyncGenerator[list[Message]]:
        """The ASGI messages of the response, those that are there together. Leaving early is a disconnected client."""
        try:
            while True:
                batch = [await self._queue.get()]
                while not self._queue.empty():
                    batch.append(self._queue.get_nowait())
                found = [message for message in batch if message is not None]
                if found:
                    yield found
                if batch[-1] is None:
                    break
            if self._is_cut_off:
                raise CutOff("The replica has to stop.")
            await self._task
        finally:
            self._gone.set()
            if not self._task.done():
                await asyncio.wait((self._task,), timeout=_LEAVES_S)
                self._task.cancel()

    async def _run(self, app: ASGIApp) -> None:
        try:
            await app(self._request.scope(), self._receive, self._send)
        finally:
            self._queue.put_nowait(None)

    async def _receive(self) -> Message:
        if not self._has_read:
            self._has_read = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            raise OSError("the client has gone")
        self._queue.put_nowait(message)


class CutOff(Exception):
    """A response ends before its end, since its replica has to stop."""


async def whole_response(app: ASGIApp, request: ForwardedRequest) -> tuple[int, bytes]:
    """Status and body of a response that is no stream."""
    status, body = 500, b""
    async with contextlib.aclosing(AsgiCall(app, request).messages()) as batches:
        async for batch in batches:
            for message in batch:
                if message["type"] == "http.response.start":
                    status = message["status"]
                elif message["type"] == "http.response.body":
                    body += message.get("body", b"")
    return status, body


def json_object(text: bytes) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    try:
        found: object = json.loads(text)
    except ValueError:
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}
