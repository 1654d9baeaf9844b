"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from collections.abc import Iterator
from typing import Any

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from reprise.api.anthropic.body import CountBody, MessagesBody
from reprise.api.anthropic.reply import PING, ContentBlocks, Event, message, message_delta, usage_body
from reprise.api.anthropic.request import prompt_of, service_request_of
from reprise.api.http.errors import Problem
from reprise.api.http.sse import event_lines, while_connected
from reprise.api.service.caller import with_body
from reprise.api.service.exchange import AnswerDelta, AnswerEnd, Began, StillWaiting
from reprise.api.service.reply import Reply
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import BackgroundHeader, Context, FromCaller, InContext, Namespace
from reprise.api.wire.wire import Wire, respond, start_reply

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_shape(problem: Problem) -> dict[str, Any]:
    """Anthropic's error body, which is also the `error` event of a stream."""
    kind = _TYPES.get(problem.status, "api_error" if problem.status >= 499 else "invalid_request_error")
    details = {} if problem.details is None else {"details": dict(problem.details)}
    return {"type": "error", "error": {"type": kind, "message": problem.message, **details}}


PREFIX = "/v1/messages"


class AnthropicErrorDetail(BaseModel):
    """What went wrong, in a sentence that says what to do."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """The body of every answer of this API that is an error."""

    type: str
    error: AnthropicErrorDetail


router = api_router("Anthropic", errors=AnthropicErrorBody)


@router.post(PREFIX, response_model=None)
async def create_message(
    body: MessagesBody,
    request: Request,
    context: InContext,
    namespace: Namespace,
    caller: FromCaller,
    *,
    is_background: BackgroundHeader = False,
) -> Response:
    """Answer a chat."""

    async def start() -> MessagesWire:
        service = context.service
        reply = await start_reply(
            context,
            lambda: service_request_of(
                body, request_id=body.request_id, namespace=namespace, served=service.served, limits=service.limits
            ),
            with_body(caller, (body.model_extra or {}).get("metadata")),
        )
        return MessagesWire(context, reply)

    is_streamed = body.stream is True
    return await respond(
        request, context, start, namespace=namespace, is_streamed=is_streamed, is_background=is_background
    )


@router.post(f"{PREFIX}/count_tokens")
async def count_tokens(body: CountBody, request: Request, context: InContext, namespace: Namespace) -> dict[str, Any]:
    """How many tokens the prompt of such a request has."""
    service = context.service

    async def count() -> int:
        service_request = await service.off_loop(
            lambda: prompt_of(body, served=service.served, limits=service.limits, namespace=namespace)
        )
        return len((await service.render(service_request.chat, namespace=namespace, is_final=False)).prompt)

    return {"input_tokens": await while_connected(request.receive, count())}


class MessagesWire(Wire[Reply]):
    """An answer as a message of content blocks."""

    error_format = staticmethod(anthropic_shape)

    def __init__(self, context: Context, reply: Reply) -> None:
        request_id = reply.request.id
        super().__init__(context, reply, request_id=request_id, headers={"request-id": request_id})
        self._has_prefix_cache = context.settings.has_prefix_cache
        self._blocks = ContentBlocks()
        self._has_begun = False

    def began(self, event: Began) -> Iterator[str]:
        return self._start()

    def waiting(self, event: StillWaiting) -> Iterator[str]:
        yield from self._start()
        yield _lines(PING)

    def delta(self, event: AnswerDelta) -> Iterator[str]:
        yield from self._start()
        yield from map(_lines, self._blocks.take(event.deltas))

    def end(self, event: AnswerEnd) -> Iterator[str]:
        yield from self._start()
        yield from map(_lines, self._blocks.finish())
        yield _lines(message_delta(event, self._usage()))
        yield _lines({"type": "message_stop"})

    def error(self, problem: Problem) -> str:
        return _lines(anthropic_shape(problem))

    def take(self, event: AnswerDelta) -> None:
        self._blocks.take(event.deltas)

    def whole(self) -> dict[str, Any]:
        self._blocks.finish()
        (ended,) = self.ended
        return message(self.request_id, self.served.id, self._usage(), content=self._blocks.content, ended=ended)

    def _start(self) -> Iterator[str]:
        """With the first event: a request that waits in the queue begins too, with counts that its end corrects."""
        if self._has_begun:
            return
        self._has_begun = True
        # What is computed is stored, as far as possible: how much of it was is known at the end.
        usage = self._usage(num_stored=self.reply.num_prompt if self._has_prefix_cache else 0)
        yield _lines({"type": "message_start", "message": message(self.request_id, self.served.id, usage)})

    def _usage(self, *, num_stored: int | None = None) -> dict[str, Any]:
        usage = self.reply.usage
        stored = usage.num_stored if num_stored is None else num_stored
        return usage_body(usage, num_stored=stored, pin_for_s=self.reply.request.pin_for_s)


def _lines(event: Event) -> str:
    return event_lines(event["type"], event)
