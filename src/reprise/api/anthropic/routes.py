"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from reprise.api.anthropic.body import CountBody, MessagesBody
from reprise.api.anthropic.reply import PING, ContentBlocks, Event, message, message_delta, usage_body
from reprise.api.anthropic.request import prompt_of, service_request_of
from reprise.api.http.encoding import JsonResponse
from reprise.api.http.errors import Problem
from reprise.api.http.sse import event_lines, while_connected
from reprise.api.service.caller import Caller, with_body
from reprise.api.service.exchange import AnswerDelta, AnswerEnd, Began, StillWaiting
from reprise.api.service.reply import Reply
from reprise.api.wire.background import refuse_unstreamed
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import Context, FromCaller, GoesOn, InContext, Namespace

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
    goes_on: GoesOn = False,
) -> Response:
    """Answer a chat."""
    if body.stream is not True:
        refuse_unstreamed(goes_on=goes_on)
        made = await while_connected(request.receive, _whole(context, body, namespace, caller))
        return JsonResponse(made, headers={"request-id": made["id"], "x-request-id": made["id"]})
    reply = await while_connected(request.receive, _start_reply(context, body, namespace, caller))
    return await context.background.respond(
        reply,
        _tell(context, reply),
        goes_on=goes_on,
        namespace=namespace,
        request_id=reply.request.id,
        on_error=lambda problem: _lines(anthropic_shape(problem)),
        headers={"request-id": reply.request.id},
    )


async def _start_reply(context: Context, body: MessagesBody, namespace: str, caller: Caller) -> Reply:
    service = context.service
    service_request = await service.off_loop(
        lambda: service_request_of(
            body,
            request_id=body.request_id,
            namespace=namespace,
            served=service.served,
            limits=service.limits,
        )
    )
    caller = with_body(caller, (body.model_extra or {}).get("metadata"))
    return await service.start(replace(service_request, caller=caller))


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


async def _whole(context: Context, body: MessagesBody, namespace: str, caller: Caller) -> dict[str, Any]:
    reply = await _start_reply(context, body, namespace, caller)
    blocks = ContentBlocks()
    async with reply:
        async for event in reply.events():
            if isinstance(event, AnswerDelta):
                blocks.take(event.deltas)
    blocks.finish()
    (ended,) = reply.ended
    usage = _usage(reply)
    return message(reply.request.id, context.service.served.id, usage, content=blocks.content, ended=ended)


async def _tell(context: Context, reply: Reply) -> AsyncGenerator[str, None]:
    blocks = ContentBlocks()
    has_begun = False
    async for event in reply.events():
        if not has_begun:
            # A request that waits in the queue begins too, with counts that its end puts right.
            has_begun = True
            yield _lines(_start(context, reply))
        match event:
            case Began():
                pass
            case StillWaiting():
                yield _lines(PING)
            case AnswerDelta():
                for sent in blocks.take(event.deltas):
                    yield _lines(sent)
            case AnswerEnd():
                for sent in blocks.finish():
                    yield _lines(sent)
                yield _lines(message_delta(event, _usage(reply)))
                yield _lines({"type": "message_stop"})


def _start(context: Context, reply: Reply) -> Event:
    # What is computed is stored, as far as it goes: how much of it was is known at the end.
    num_stored = reply.num_prompt if context.settings.has_prefix_cache else 0
    usage = _usage(reply, num_stored=num_stored)
    return {"type": "message_start", "message": message(reply.request.id, context.service.served.id, usage)}


def _usage(reply: Reply, *, num_stored: int | None = None) -> dict[str, Any]:
    stored = reply.usage.num_stored if num_stored is None else num_stored
    return usage_body(reply.usage, num_stored=stored, pin_for_s=reply.request.pin_for_s)


def _lines(event: Event) -> str:
    return event_lines(event["type"], event)
