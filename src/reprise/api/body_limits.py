"""Bodies that are too long or too deep, before they cost anything: a layer around the application."""

import json
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprise.api.body import check_json
from reprise.api.errors import BodyTooLarge, Shapes, error_response, problem_of
from reprise.core.errors import BadRequest

_NOT_FINITE = re.compile(rb"NaN|Infinity|[eE]\+?\d{3}|\d{209}")

# A client that is still sending does not read an answer: so much is read and forgotten first.
_MAX_DRAINED_RATIO = 4


class BodyLimits:
    """Reads each body whole, refuses what is longer than `max_bytes` (413), and what is nested too deep (400)."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_depth: int, shapes: Shapes) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_depth = max_depth
        self._shapes = shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(receive)
            if body is None:
                return
            self._check(body)
        except (BodyTooLarge, BadRequest) as error:
            await error_response(problem_of(error), self._shapes.of(scope["path"]))(scope, receive, send)
            return
        is_read = False

        async def receive_again() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_again, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body, or None if the client hung up."""
        chunks: list[bytes] = []
        length = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk: bytes = message.get("body", b"")
            length += len(chunk)
            if length <= self._max_bytes:
                chunks.append(chunk)
            else:
                chunks.clear()
            has_more: bool = message.get("more_body", False)
            if not has_more or length > _MAX_DRAINED_RATIO * self._max_bytes:
                break
        if length > self._max_bytes:
            raise BodyTooLarge(
                f"The body is longer than {self._max_bytes} bytes. Send less, or start the server with --max-body."
            )
        return b"".join(chunks)

    def _check(self, body: bytes) -> None:
        # Only what can be wrong is looked at twice: nesting needs brackets, half characters need an escape, and numbers
        # that are none have a name, an exponent of three digits, or more digits than any needs.
        may_be_deep = body.count(b"[") + body.count(b"{") > self._max_depth
        if not may_be_deep and b"\\u" not in body and _NOT_FINITE.search(body) is None:
            return
        try:
            value: object = json.loads(body)
        except RecursionError as error:
            raise BadRequest(f"The body is nested more than {self._max_depth} levels deep. Flatten it.") from error
        except ValueError:
            # The route says what is wrong with it.
            return
        check_json(value, max_depth=self._max_depth)
