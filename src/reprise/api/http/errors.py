"""Errors as responses: every exception becomes one problem, and every problem takes the form of its API."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprise.api.http.body import invalid_body
from reprise.api.http.encoding import JsonResponse
from reprise.core.errors import BadRequest, RepriseError

log = logging.getLogger(__name__)

PROBLEMS = "reprise.problems"
"""The scope's key for the problems that were answered, each with the scope that it was answered in."""


class Unauthorized(RepriseError):
    status = 401
    code = "invalid_api_key"


class InvalidJson(BadRequest):
    code = "not_json"


class ServerBusy(RepriseError):
    """The server holds as much of others' bodies as it may."""

    status = 503
    code = "server_busy"
    retry_after_s = 1


class BodyTooLarge(RepriseError):
    status = 413
    code = "body_too_large"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error as any API can tell it: `param` is the field at fault, `retry_after_s` when to come again."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    details: Mapping[str, object] | None = None
    """For programs, where the API has a place for that."""
    has_record: bool = False
    """The request had begun, and its own record says what became of it."""


Shape = Callable[[Problem], dict[str, Any]]
"""How one API writes a problem as a JSON body."""


def problem_of(error: Exception) -> Problem:
    """The problem that an exception stands for. Unexpected exceptions are internal errors without details."""
    match error:
        case RepriseError():
            is_bad = isinstance(error, BadRequest)
            return Problem(
                status=error.status,
                code=error.code,
                message=str(error),
                param=error.param if is_bad else None,
                retry_after_s=error.retry_after_s,
                details=error.details if is_bad else None,
                has_record=error.has_record,
            )
        case RequestValidationError():
            return _invalid_body(error)
        case ValidationError():
            # What one body takes may be written as another API's, which does not.
            found = [{**each, "loc": ("", *each["loc"])} for each in error.errors(include_url=False)]
            return problem_of(invalid_body(None, found))
        case HTTPException():
            message = _HTTP_SENTENCES.get(error.status_code, error.detail)
            return Problem(status=error.status_code, code=f"http_{error.status_code}", message=message)
        case _:
            message = "Internal server error. The server's log has the details; other requests continue."
            return Problem(status=500, code="internal_error", message=message)


_HTTP_SENTENCES = {
    400: "The body cannot be parsed: it is nested too deeply, has a number that is too long, or is not UTF-8.",
    404: "No such endpoint. GET /openapi.json lists them.",
    405: "Method not allowed for this endpoint. GET /openapi.json lists the allowed ones.",
}


def _invalid_body(error: RequestValidationError) -> Problem:
    found = cast(Sequence[Mapping[str, Any]], error.errors())
    if isinstance(error.body, bytes):
        return Problem(
            status=400, code="not_json", message="Send JSON with the header `Content-Type: application/json`."
        )
    return problem_of(invalid_body(error.body, found))


_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
    """What went wrong, in a sentence that says what to do."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


def openai_shape(problem: Problem) -> dict[str, Any]:
    """OpenAI's error body."""
    kind = _OPENAI_TYPES.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


class ErrorFormats:
    """Which API writes errors how, by the beginning of the path; OpenAI's shape where none is registered."""

    def __init__(self) -> None:
        self._by_prefix: dict[str, tuple[Shape, bytes | None]] = {}

    def register(self, prefix: str, shape: Shape, *, header: bytes | None = None) -> None:
        """The shape of errors under `prefix`; with `header`, where APIs share an address, of requests that have it."""
        self._by_prefix[prefix] = (shape, header)

    def of(self, scope: Scope) -> Shape:
        names = {name for name, _ in scope["headers"]}
        matching = [
            prefix
            for prefix, (_, header) in self._by_prefix.items()
            if scope["path"].startswith(prefix) and (header is None or header in names)
        ]
        return self._by_prefix[max(matching, key=len)][0] if matching else openai_shape


class ProblemResponse(JsonResponse):
    """A problem as a response. Who put a list under `PROBLEMS` into the scope finds it there when it is sent."""

    def __init__(self, problem: Problem, content: object, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content, status_code=problem.status, headers=headers)
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._problem.has_record and PROBLEMS in scope:
            scope[PROBLEMS].append((self._problem, scope))
        await super().__call__(scope, receive, send)


def error_response(problem: Problem, shape: Shape, headers: Mapping[str, str] | None = None) -> JsonResponse:
    response = ProblemResponse(problem, shape(problem), headers=headers)
    if problem.retry_after_s is not None:
        response.headers["Retry-After"] = str(problem.retry_after_s)
    if problem.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def log_problem(problem: Problem, error: Exception, *, where: str) -> None:
    """Log what is the server's fault; the stack only where it tells more than the sentence."""
    if problem.status == 500:
        log.error("%s: %s", where, problem.message, exc_info=error)
    elif problem.status > 500:
        log.warning("%s: %s", where, problem.message)


def install_error_handlers(app: FastAPI, shapes: ErrorFormats) -> None:
    """Answer every known exception in the shape of the API that was asked."""

    async def answer(request: Request, error: Exception) -> JsonResponse:
        problem = problem_of(error)
        log_problem(problem, error, where=f"{request.method} {request.url.path}")
        headers = error.headers if isinstance(error, HTTPException) else None
        return error_response(problem, shapes.of(request.scope), headers)

    for kind in (RepriseError, RequestValidationError, ValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


class UnhandledErrors:
    """A layer: an exception that nobody handled is logged and answered, and the server continues. Inside that of CORS:
    a page that is allowed to ask can read the answer."""

    def __init__(self, app: ASGIApp, *, shapes: ErrorFormats) -> None:
        self._app = app
        self._shapes = shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            problem = problem_of(error)
            log_problem(problem, error, where=f"{scope['method']} {scope['path']}")
            # Half a response cannot be taken back: the connection ends, which the client sees.
            if not has_started:
                await error_response(problem, self._shapes.of(scope))(scope, receive, send)
