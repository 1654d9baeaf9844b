"""`POST /v1/chat/completions`."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import Response

from reprise.api.http.encoding import JsonResponse
from reprise.api.http.errors import openai_shape
from reprise.api.http.sse import DONE, comment_line, data_line, while_connected
from reprise.api.openai.chat_body import ChatBody
from reprise.api.openai.chat_reply import (
    Head,
    completion,
    end_chunk,
    piece_chunks,
    role_chunk,
    usage_chunk,
    waiting_chunk,
)
from reprise.api.openai.chat_request import service_request_of
from reprise.api.service.caller import Caller
from reprise.api.service.exchange import AnswerDelta, AnswerEnd, Began, StillWaiting
from reprise.api.service.reply import Reply
from reprise.api.wire.background import refuse_unstreamed
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import Context, FromCaller, GoesOn, InContext, Namespace
from reprise.core.events import Sampled

router = api_router("OpenAI")


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(
    body: ChatBody,
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
        return JsonResponse(made, headers={"x-request-id": made["id"]})
    options = body.stream_options
    includes_usage = options is not None and options.include_usage is True
    reply = await while_connected(request.receive, _start(context, body, namespace, caller))
    return await context.background.respond(
        reply,
        _tell(context, reply, includes_usage=includes_usage),
        goes_on=goes_on,
        namespace=namespace,
        request_id=reply.request.id,
        on_error=lambda problem: data_line(openai_shape(problem)),
    )


async def _start(context: Context, body: ChatBody, namespace: str, caller: Caller) -> Reply:
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
    return await service.start(replace(service_request, caller=caller))


async def _whole(context: Context, body: ChatBody, namespace: str, caller: Caller) -> dict[str, Any]:
    reply = await _start(context, body, namespace, caller)
    tokens: list[list[Sampled]] = [[] for _ in reply.running]
    async with reply:
        async for event in reply.events():
            if isinstance(event, AnswerDelta):
                tokens[event.choice].extend(event.tokens)
    return completion(_head(context, reply), reply.ended, tokens, reply.usage, context.service.served.text.decode)


async def _tell(context: Context, reply: Reply, *, includes_usage: bool) -> AsyncGenerator[str, None]:
    head, decode = _head(context, reply), context.service.served.text.decode
    unsaid = set(range(len(reply.running)))
    async for event in reply.events():
        match event:
            case Began():
                if event.choice in unsaid:
                    unsaid.remove(event.choice)
                    yield data_line(role_chunk(head, event.choice))
            case StillWaiting():
                # Clients that give up on a silent stream count chunks, and not comments.
                for choice in sorted(unsaid):
                    yield data_line(role_chunk(head, choice))
                unsaid.clear()
                yield comment_line(event.text) + data_line(waiting_chunk(head))
            case AnswerDelta():
                for chunk in piece_chunks(head, event, decode):
                    yield data_line(chunk)
            case AnswerEnd():
                yield data_line(end_chunk(head, event))
    if includes_usage:
        yield data_line(usage_chunk(head, reply.usage))
    yield DONE


def _head(context: Context, reply: Reply) -> Head:
    return Head(id=reply.request.id, created=int(reply.created), model=context.service.served.id)
