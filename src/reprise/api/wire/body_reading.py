"""Reads bodies.

What is too long, alone or with others, is refused before it costs anything. What a JSON body may cost is known before
it is parsed, and large ones are parsed on another thread.
"""

import asyncio
import re
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprise.api.http.body import Needs, check_numbers
from reprise.api.http.encoding import JsonResponse
from reprise.api.http.errors import (
    BodyTooLarge,
    ErrorBody,
    ErrorFormats,
    InvalidJson,
    ServerBusy,
    error_response,
    problem_of,
)
from reprise.api.http.limits import Limits
from reprise.api.http.off_loop import Stage
from reprise.api.http.web_access import is_from_page
from reprise.api.wire.background import HEADER, address_of
from reprise.api.wire.context import MODEL_IN_SCOPE, Context
from reprise.api.wire.controls import AnswerControls
from reprise.api.wire.while_loading import answer_when_ready
from reprise.core.errors import BadRequest
from reprise.core.json_shape import json_shape
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
_IMAGES_NBYTES = 64 << 20
"""For the images of a chat: a hundred screenshots of half a megabyte."""
_MANY_TOKENS = 1 << 20
"""For models whose context is not known."""


def max_body_nbytes(settings: Settings, context: int | None, *, sees: bool = False) -> int:
    """The longest body that is read: what the settings say, else what a prompt that fits the context may need.

    `sees`: images may be in it, three bytes in four characters.
    """
    if settings.max_body_bytes is not None:
        return settings.max_body_bytes
    images = max(_IMAGES_NBYTES, settings.max_image_bytes * 4 // 3) if sees else 0
    return _BASE_NBYTES + _NBYTES_PER_TOKEN * (_MANY_TOKENS if context is None else context) + images


class BodyLimits:
    """Reads each body whole, and refuses what is longer than `max_bytes` (413).

    What is being read of all bodies and waits to be parsed is bounded as well (503): many clients that send large
    bodies do not fill the memory together.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, shapes: ErrorFormats) -> None:
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


_MAX_ON_LOOP_NBYTES = 32_768
"""What is parsed on the event loop takes a few milliseconds there."""
_BOM = b"\xef\xbb\xbf"
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
"""An escape in JSON; two of them that are one character count as one."""


def parse_body(raw: bytes, adapter: TypeAdapter[BaseModel], *, limits: Limits, context: int | None) -> BaseModel:
    """The body as its model. Raises BadRequest and RequestValidationError.

    Memory and time are bounded before an object is made: by the numbers of lists, objects and values, by nesting, and
    by the first error.
    """
    _check_shape(raw, limits=limits, context=context)
    raw = raw.removeprefix(_BOM)
    try:
        value = _from_json(raw)
    except ValueError as error:
        raise InvalidJson(f"The body is not valid JSON: {error}.") from None
    check_numbers(value)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise RequestValidationError(found, body=value) from None


def _from_json(raw: bytes) -> object:
    """The value of a JSON text. Half a character, as in text that was cut in JavaScript, is replaced by U+FFFD."""
    try:
        return from_json(raw)
    except ValueError:
        whole = _ESCAPE.sub(lambda found: rb"\ufffd" if found["half"] is not None else found[0], raw)
        if whole == raw:
            raise
        return from_json(whole)


def _check_shape(raw: bytes, *, limits: Limits, context: int | None) -> None:
    shape = json_shape(raw)
    max_commas = limits.max_commas + 2 * (_MANY_TOKENS if context is None else context)
    if shape.depth > limits.max_depth:
        raise BadRequest(f"The body is nested more than {limits.max_depth} levels deep. Flatten it.")
    if shape.num_containers > limits.max_containers:
        raise BadRequest(
            f"The body has {shape.num_containers} lists and objects; at most {limits.max_containers} are accepted. "
            "Send fewer messages or tools."
        )
    if shape.num_commas > max_commas:
        raise BadRequest(f"The body lists {shape.num_commas} values; at most {max_commas} are accepted. Send less.")


_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
"""As FastAPI reads a switch in a header."""


class _ReadRequest(Request):
    """A request whose body was read: its JSON is the model, which validates as itself."""

    model: BaseModel | None = None
    beginning: bytes = b""
    """Enough of the body for the question whether there is one. Nobody needs the rest while the answer is made."""

    async def body(self) -> bytes:
        return self.beginning

    async def json(self) -> BaseModel | None:
        return self.model


class BodyRoute(APIRoute):
    """A route whose JSON body is read by `parse_body`.

    Whatever its type is called (curl calls it a form), unless a web page sends it: a page of another origin may send
    forms and text without asking the server first. `Guard` refuses those; this holds without it, too.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        adapter: TypeAdapter[BaseModel] = TypeAdapter(cast(type[BaseModel], self.body_field.field_info.annotation))

        async def handle_read(request: Request) -> Response:
            if not is_from_page(request.scope["headers"]):
                others = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
                request.scope["headers"] = [*others, (b"content-type", b"application/json")]
                request = Request(request.scope, request.receive)  # The headers of the other one may be known already.
            read = _ReadRequest(request.scope, request.receive)
            await _read(request, read, adapter)
            context = cast(Context, request.app.state.context)
            if context.models is None:
                return await handle(read)
            # Ollama's older clients call it `name`.
            name: str | None = getattr(read.model, "model", None) or getattr(read.model, "name", None)
            needs = getattr(type(read.model), "needs", Needs.WEIGHTS)
            if needs is Needs.NO_MODEL:
                return await handle(read)
            meant = context.models.asked if needs is Needs.WEIGHTS else context.models.of
            model = meant(name, getattr(read.model, "adapters", None))
            request.scope[MODEL_IN_SCOPE] = model
            if needs is Needs.NOTHING or (needs is Needs.TOKENIZER and model.service is not None):
                return await handle(read)
            is_stream = getattr(read.model, "stream", None) is True and not request.scope["path"].startswith("/api/")
            headers, goes_on = _headers_of(read) if is_stream else ({}, False)
            expected: AbstractContextManager[None] | None = None
            if goes_on:
                namespace = cast(str, request.scope.get("reprise.namespace", ""))
                expected = context.background.expecting(headers["x-request-id"], namespace=namespace)
                # Its handler does not end with its client.
                read = _read_as(read, request.scope)
            return await answer_when_ready(
                model,
                request,
                lambda: handle(read),
                is_stream=is_stream,
                shapes=context.shapes,
                headers=headers,
                expected=expected,
            )

        return handle_read


def _headers_of(read: _ReadRequest) -> tuple[dict[str, str], bool]:
    """The headers of a streamed answer that is not there yet, and whether it continues without its client."""
    body = read.model
    if not isinstance(body, AnswerControls):
        return {}, False
    asked = read.headers.get(HEADER, "false").lower() in _TRUE or getattr(body, "background", None) is True
    return {"x-request-id": body.request_id, **(address_of(body.request_id) if asked else {})}, asked


def _read_as(read: _ReadRequest, scope: Scope) -> _ReadRequest:
    """The same without the end of its connection."""
    alone = _ReadRequest(scope, _silence)
    alone.model, alone.beginning = read.model, read.beginning
    return alone


async def _silence() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


def api_router(tag: str, *, errors: type[BaseModel] = ErrorBody) -> APIRouter:
    """The routes of one API, whose errors have this body."""
    return APIRouter(
        tags=[tag],
        route_class=BodyRoute,
        default_response_class=JsonResponse,
        responses={"4XX": {"model": errors}, "5XX": {"model": errors}},
    )


async def _read(request: Request, read: _ReadRequest, adapter: TypeAdapter[BaseModel]) -> None:
    # The stream, since `request.body()` would keep the bytes.
    raw = b"".join([chunk async for chunk in request.stream()])
    read.beginning = raw[:1]
    if not raw or not _is_json(request):
        return
    found = cast(Context, request.app.state.context)
    service = found.service
    is_bounded = found.models is None and service.served.embedder is None
    context = service.served.context if is_bounded else None
    parse = partial(parse_body, raw, adapter, limits=service.limits, context=context)
    # Who leaves meanwhile is noticed when it is parsed.
    read.model = parse() if len(raw) <= _MAX_ON_LOOP_NBYTES else await service.threads.run(Stage.READ, parse)
    del raw, parse
    request.scope[RELEASE_BODY]()


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind.startswith("application/") and kind.endswith(("/json", "+json"))
