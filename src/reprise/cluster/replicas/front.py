"""The HTTP side of the cluster: takes requests, hands them to a replica, and to another one if that one is lost."""

import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprise.api.app import protected, shapes_of_apis
from reprise.api.http.errors import ErrorFormats, Problem, error_response
from reprise.api.http.sse import data_line, event_lines, while_connected
from reprise.cluster.replicas.forwarded import ForwardedRequest
from reprise.core.errors import ClientGone
from reprise.core.settings import Settings

log = logging.getLogger(__name__)

Respond = Callable[[ForwardedRequest], AsyncGenerator[Sequence[Message]]]
"""Has a replica answer: the ASGI messages of its response. Raises whatever became of it."""
RespondAll = Callable[[ForwardedRequest], Awaitable[Sequence[Sequence[Message]]]]
"""Has all replicas answer."""

_NUM_TRIES = 3
_LOST = Problem(
    status=503,
    code="replica_lost",
    message="The replica that answered was lost. Send the request again.",
    retry_after_s=1,
)
_NOT_ALL = Problem(
    status=503,
    code="replica_lost",
    message="A replica was lost before it answered; the others may have. Send the request again.",
    retry_after_s=1,
)
_NONE = Problem(
    status=503, code="no_replica", message="No replica is running. Send the request again later.", retry_after_s=5
)
_FOR_ALL = frozenset({("DELETE", "/v1/cache")})


def front_app(settings: Settings, *, respond: Respond, respond_all: RespondAll) -> ASGIApp:
    """The application in front of the replicas. Keys and lengths of bodies are checked here already."""
    shapes = shapes_of_apis()
    forwarding = Forwarding(respond=respond, respond_all=respond_all, shapes=shapes)
    return protected(forwarding, settings, shapes=shapes, context=settings.max_context)


class Forwarding:
    """An ASGI application whose responses are those of replicas.

    A request whose replica is lost is sent to another one as long as nothing of the answer has been sent; comments that
    keep a stream alive don't count. Later the stream ends with an error in its API's form.
    """

    def __init__(self, *, respond: Respond, respond_all: RespondAll, shapes: ErrorFormats) -> None:
        self._respond = respond
        self._respond_all = respond_all
        self._shapes = shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = ForwardedRequest.of(scope, await _body(receive))
        response = _Response(send)
        if (request.method, request.path) in _FOR_ALL:
            await self._answer_of_all(scope, request, response)
            return
        with contextlib.suppress(ClientGone):
            await while_connected(receive, self._answer(scope, request, response))

    async def _answer_of_all(self, scope: Scope, request: ForwardedRequest, response: "_Response") -> None:
        """Send the answer of the replica with the worst status: what one has not done is not done."""
        problem = _NONE
        try:
            answers = await self._respond_all(request)
        except Exception as error:
            log.warning("%s %s: a replica was lost: %s", request.method, request.path, error)
            answers, problem = (), _NOT_ALL
        if not all(_is_whole(answer) for answer in answers):
            answers, problem = (), _NOT_ALL
        if not answers:
            await error_response(problem, self._shapes.of(scope))(scope, _nothing, response.send)
            return
        for message in max(answers, key=lambda answer: answer[0]["status"]):
            await response.send(message)

    async def _answer(self, scope: Scope, request: ForwardedRequest, response: "_Response") -> None:
        for number in range(1, _NUM_TRIES + 1):
            try:
                async with contextlib.aclosing(self._respond(request)) as batches:
                    async for batch in batches:
                        for message in batch:
                            await response.send(message)
            except _Unlike:
                break
            except Exception as error:
                log.warning("%s %s, try %d: the replica was lost: %s", request.method, request.path, number, error)
            if response.is_whole:
                return
            if response.has_content:
                break
        shape = self._shapes.of({**scope, "path": request.path})
        if response.has_started:
            await response.break_off(shape(_LOST))
        else:
            await error_response(_LOST, shape)(scope, _nothing, response.send)


class _Response:
    """What the client has of its response. The start is held back until something follows it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._sent: Message | None = None
        self.has_content = False
        """More than comments of a stream was sent."""
        self.is_whole = False

    @property
    def has_started(self) -> bool:
        return self._sent is not None

    async def send(self, message: Message) -> None:
        """Send a message of the response. Raises _Unlike for one that does not go on from what was sent."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        body, is_last = bytes(message.get("body", b"")), not message.get("more_body", False)
        if body == b"" and not is_last:
            return
        if self._sent is None:
            assert self._start is not None, "a body comes after its start"
            self._sent = self._start
            await self._send(self._start)
        elif self._start is not self._sent:
            if self._start is None or _form(self._start) != _form(self._sent):
                raise _Unlike
            self._sent = self._start
        self.has_content |= not (is_stream(self._sent) and body.startswith(b":") and not is_last)
        await self._send(message)
        self.is_whole |= is_last

    async def break_off(self, problem: dict[str, object]) -> None:
        """End a stream with an error. Another response stays without its end, and its connection is cut."""
        assert self._sent is not None
        kind = _content_type(self._sent)
        if is_stream(self._sent):
            text = event_lines("error", problem) if "type" in problem else data_line(problem)
        elif kind.startswith(b"application/x-ndjson"):
            text = json.dumps(problem) + "\n"
        else:
            return
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": False})


class _Unlike(Exception):
    """What another replica answers does not go on from what the client has."""


def _is_whole(answer: Sequence[Message]) -> bool:
    return len(answer) > 1 and answer[0]["type"] == "http.response.start" and not answer[-1].get("more_body", False)


def is_stream(start: Message) -> bool:
    """Whether a response is a stream of events."""
    return _content_type(start).startswith(b"text/event-stream")


def _form(start: Message) -> tuple[int, bytes]:
    return start["status"], _content_type(start)


def _content_type(start: Message) -> bytes:
    return next((bytes(value) for name, value in start["headers"] if bytes(name).lower() == b"content-type"), b"")


async def _body(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
