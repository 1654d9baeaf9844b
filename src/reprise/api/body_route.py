"""Routes that take a JSON body: what it may cost is known before it is parsed, and large ones go to another thread."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.responses import Response

from reprise.api.body import Needs, check_numbers
from reprise.api.body_limits import RELEASE_BODY
from reprise.api.context import MODEL_IN_SCOPE, Context
from reprise.api.encoding import JsonResponse
from reprise.api.errors import ErrorBody, InvalidJson
from reprise.api.limits import Limits
from reprise.api.models import answer_when_ready
from reprise.api.off_loop import Stage
from reprise.core.errors import BadRequest
from reprise.core.json_shape import json_shape

_MAX_ON_LOOP_NBYTES = 32_768
"""What is parsed on the event loop takes a few milliseconds there."""
_MANY_TOKENS = 1 << 20
"""For models whose context is not known."""
_BOM = b"\xef\xbb\xbf"


def parse_body(raw: bytes, adapter: TypeAdapter[BaseModel], *, limits: Limits, context: int | None) -> BaseModel:
    """The body as its model. Raises BadRequest and RequestValidationError.

    Memory and time are bounded before an object is made: by the numbers of lists, objects and values, by nesting, and
    by the first error.
    """
    _check_shape(raw, limits=limits, context=context)
    try:
        value: object = from_json(raw.removeprefix(_BOM))
    except ValueError as error:
        raise InvalidJson(f"The body is not valid JSON: {error}.") from None
    check_numbers(value)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise RequestValidationError(found, body=value) from None


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
    """A route whose JSON body goes through `parse_body`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        adapter: TypeAdapter[BaseModel] = TypeAdapter(cast(type[BaseModel], self.body_field.field_info.annotation))

        async def handle_read(request: Request) -> Response:
            read = _ReadRequest(request.scope, request.receive)
            await _read(request, read, adapter)
            context = cast(Context, request.app.state.context)
            if context.models is None:
                return await handle(read)
            # Ollama's older clients call it `name`.
            name: str | None = getattr(read.model, "model", None) or getattr(read.model, "name", None)
            model = context.models.of(name, getattr(read.model, "adapters", None))
            request.scope[MODEL_IN_SCOPE] = model
            needs = getattr(type(read.model), "needs", Needs.WEIGHTS)
            if needs is Needs.NOTHING or (needs is Needs.TOKENIZER and model.service is not None):
                return await handle(read)
            is_stream = getattr(read.model, "stream", None) is True and not request.scope["path"].startswith("/api/")
            return await answer_when_ready(
                model, request, lambda: handle(read), is_stream=is_stream, shapes=context.shapes
            )

        return handle_read


def api_router(tag: str, *, errors: type[BaseModel] = ErrorBody, route_class: type[BodyRoute] = BodyRoute) -> APIRouter:
    """The routes of one API, whose errors have this body."""
    return APIRouter(
        tags=[tag],
        route_class=route_class,
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
    service, is_only = found.service, found.models is None
    context = service.served.context if is_only else None
    parse = partial(parse_body, raw, adapter, limits=service.limits, context=context)
    # Who leaves meanwhile is noticed when it is parsed.
    read.model = parse() if len(raw) <= _MAX_ON_LOOP_NBYTES else await service.threads.run(Stage.READ, parse)
    del raw, parse
    request.scope[RELEASE_BODY]()


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind.startswith("application/") and kind.endswith(("/json", "+json"))
