"""Refuses bodies that are too long, alone or together, before they cost anything: a layer around the routes."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprise.api.errors import BodyTooLarge, ServerBusy, Shapes, error_response, problem_of
from reprise.core.settings import Settings

# A client that is still sending does not read an answer: so much is read and forgotten first.
_MAX_DRAINED_RATIO = 4

# So many bodies of the greatest length may be held at the same time, counting only what of them has come.
_MAX_TOGETHER = 4
_SMALL_NBYTES = 1 << 16
"""Bodies up to here are always read."""

RELEASE_BODY = "reprise.release_body"
"""In the scope: to be called when the body's bytes are not needed any more."""


# The default: a token is four bytes of English, three times that where every character is escaped, and more where a
# body says all of it as JSON; and some MB for tools, names and pictures.
_NBYTES_PER_TOKEN = 32
_BASE_NBYTES = 4 << 20
_MANY_TOKENS = 1 << 20
"""For models whose context is not known."""


def max_body_nbytes(settings: Settings, context: int | None) -> int:
    """The longest body that is read: what the settings say, else what a prompt that fits the context may need."""
    if settings.max_body_bytes is not None:
        return settings.max_body_bytes
    return _BASE_NBYTES + _NBYTES_PER_TOKEN * (_MANY_TOKENS if context is None else context)


class BodyLimits:
    """Reads each body whole, and refuses what is longer than `max_bytes` (413).

    What is being read of all bodies and waits to be parsed is bounded as well (503): many clients that send large
    bodies do not fill the memory together.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, shapes: Shapes) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._shapes = shapes
        self.num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        body = _ReceivedBody(self)
        try:
            try:
                if not await self._read(body, receive):
                    return
            except (BodyTooLarge, ServerBusy) as error:
                await error_response(problem_of(error), self._shapes.of(scope))(scope, receive, send)
                return
            await self._app({**scope, RELEASE_BODY: body.release}, body.receiver(receive), send)
        finally:
            body.release()

    async def _read(self, body: "_ReceivedBody", receive: Receive) -> bool:
        """Read the body. False if the client hung up."""
        length = 0
        refusal: BodyTooLarge | ServerBusy | None = None
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            chunk: bytes = message.get("body", b"")
            length += len(chunk)
            if length > self._max_bytes:
                refusal = BodyTooLarge(
                    f"The body is longer than {self._max_bytes} bytes. Send less, or start the server with --max-body."
                )
            elif length > _SMALL_NBYTES and self.num_held + len(chunk) > _MAX_TOGETHER * self._max_bytes:
                refusal = ServerBusy("The server is reading too many large bodies. Try again in a moment.")
            if refusal is None:
                body.add(chunk)
            else:
                body.release()
            has_more: bool = message.get("more_body", False)
            if not has_more or length > _MAX_DRAINED_RATIO * self._max_bytes:
                break
        if refusal is not None:
            raise refusal
        return True

    def hold(self, nbytes: int) -> None:
        self.num_held += nbytes


class _ReceivedBody:
    """What has come of one body, until the application takes it."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._chunks: list[bytes] = []
        self._nbytes = 0

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._nbytes += len(chunk)
        self._limits.hold(len(chunk))

    def release(self) -> None:
        self._chunks.clear()
        self._limits.hold(-self._nbytes)
        self._nbytes = 0

    def receiver(self, receive: Receive) -> Receive:
        """Gives the body once, without keeping it, and then what the server says."""
        is_read = False

        async def receive_again() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            whole = b"".join(self._chunks)
            self._chunks.clear()
            return {"type": "http.request", "body": whole, "more_body": False}

        return receive_again
