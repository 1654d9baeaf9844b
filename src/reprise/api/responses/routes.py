"""`POST /v1/responses`, the responses that are kept, and `POST /v1/responses/input_tokens`."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import Header, Query
from starlette.responses import Response

from reprise.api.http.encoding import JsonResponse
from reprise.api.http.errors import Problem, openai_shape, problem_of
from reprise.api.http.sse import comment_line, event_lines
from reprise.api.responses.body import InputTokensBody, ResponsesBody
from reprise.api.responses.items import as_listed
from reprise.api.responses.reply import Event, OutputItems, ResponseExchange, status_of
from reprise.api.responses.request import (
    earlier_items,
    previous_of,
    service_request_of,
    with_referenced_items,
)
from reprise.api.responses.store import Stored
from reprise.api.responses.tools import callees
from reprise.api.service.caller import with_body
from reprise.api.service.exchange import AnswerDelta, AnswerEnd, Began, StillWaiting
from reprise.api.service.reply import Reply
from reprise.api.wire.background import refuse_unstreamed
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import EventNumber, OfModel, RouteCall, ToAnswer
from reprise.api.wire.wire import Wire, respond
from reprise.chat.request import ChatRequest
from reprise.core.errors import BadRequest, ContextTooLong, NotFound

router = api_router("OpenAI")

_SEALED = "reasoning.encrypted_content"


@router.post("/v1/responses", response_model=None)
async def create_response(body: ResponsesBody, call: ToAnswer) -> Response:
    """Answer a chat. With `background` the answer continues without its client: see docs/background.md."""
    is_streamed = body.stream is True
    if call.is_background and is_streamed:
        body = body.model_copy(update={"background": True})
    is_background = body.background is True
    if not is_streamed and not is_background:
        refuse_unstreamed(is_background=call.is_background)
    call = replace(call, is_background=is_background)
    exchange = await call.while_connected(_prepare(body, call))

    async def start() -> ResponsesWire:
        return ResponsesWire(exchange, await call.service.start(exchange.request))

    try:
        return await respond(call, start, is_streamed=is_streamed, has_state=True)
    except ContextTooLong as error:
        if not is_streamed:
            raise
        # OpenAI's API reports this in the stream, and that is where clients look for it.
        refused = _refused(exchange, problem_of(error))
        return Response(refused, media_type="text/event-stream", headers={"x-request-id": exchange.request.id})


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: InputTokensBody, call: OfModel) -> dict[str, Any]:
    """How many tokens the prompt of such a request has."""

    async def count() -> int:
        chat = (await _prepare(body, call)).request.prompt
        assert isinstance(chat, ChatRequest)
        return len((await call.service.render(chat, namespace=call.namespace, is_final=False)).prompt)

    return {"object": "response.input_tokens", "input_tokens": await call.while_connected(count())}


@router.get("/v1/responses/{response_id}", response_model=None)
async def get_response(
    response_id: str,
    call: OfModel,
    *,
    stream: bool = False,
    starting_after: Annotated[EventNumber, Query()] = -1,
    last_event_id: Annotated[EventNumber, Header()] = -1,
) -> Response:
    """A response that is kept, or is made in the background.

    With `stream` the events of one in the background, from behind the number `starting_after` (or `Last-Event-ID`).
    """
    if stream:
        answer = call.context.background.get(response_id, namespace=call.namespace)
        return answer.stream(after=max(starting_after, last_event_id))
    answer = call.context.background.find(response_id, namespace=call.namespace)
    if answer is not None and answer.state is not None:
        return JsonResponse(answer.state())
    return JsonResponse(call.context.responses.get(response_id, namespace=call.namespace).body)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, call: OfModel) -> dict[str, Any]:
    """End a response that is made in the background; what was computed stays in the cache. One that is over stays."""
    answer = call.context.background.find(response_id, namespace=call.namespace)
    if answer is None or answer.state is None:
        made = call.context.responses.get(response_id, namespace=call.namespace).body
        if not made["background"]:
            raise BadRequest("Only a background response can be cancelled this way. Disconnect to cancel this one.")
        return made
    answer.cancel("The response was cancelled.")
    await answer.wait()
    return answer.state()


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, call: OfModel) -> dict[str, Any]:
    """Forget a response, and end it if it is being made."""
    answer = call.context.background.find(response_id, namespace=call.namespace)
    if answer is not None:
        call.context.background.drop(answer, "The response was deleted.")
        await answer.wait()
    try:
        call.context.responses.delete(response_id, namespace=call.namespace)
    except NotFound:
        if answer is None:
            raise
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    call: OfModel,
    order: Literal["asc", "desc"] = "desc",
    limit: Annotated[int, Query(ge=1)] = 100,
    after: str | None = None,
) -> dict[str, Any]:
    """The items that a response answered, by default newest first. `after`: the id of the one before them."""
    entry = call.context.responses.get(response_id, namespace=call.namespace)
    own = entry.items[len(entry.items) - entry.num_input :]
    found = [as_listed(item, item_id=f"{response_id}_{at}") for at, item in enumerate(own)]
    found = found[::-1] if order == "desc" else found
    ids = [item["id"] for item in found]
    if after is not None and after not in ids:
        raise BadRequest(
            f"`after` names the item {after[:80]!r}, which is not among those of this response.", param="after"
        )
    found = found[0 if after is None else ids.index(after) + 1 :]
    items = found[:limit]
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": len(items) < len(found),
    }


async def _prepare(body: ResponsesBody, call: RouteCall) -> ResponseExchange:
    # On the event loop, where what is kept does not change meanwhile.
    previous = previous_of(body.previous_response_id, call)
    body = with_referenced_items(body, call)
    return await call.service.off_loop(lambda: _exchange(body, call, previous))


def _exchange(body: ResponsesBody, call: RouteCall, previous: Stored | None) -> ResponseExchange:
    request = service_request_of(body, earlier_items(previous), call.asked)
    reasoning = body.reasoning
    wants_summary = reasoning is not None and (reasoning.summary or reasoning.generate_summary or "none") != "none"
    return ResponseExchange(
        call=call,
        body=body,
        request=replace(
            request,
            # A chat that is continued by ids is named by its first response.
            chat=request.chat if request.chat is not None or previous is None else previous.first_id,
            caller=with_body(call.caller, (body.model_extra or {}).get("client_metadata")),
        ),
        previous=previous,
        output=OutputItems(
            callees=callees(body.tools or ()),
            has_summary=wants_summary,
            has_seals=_SEALED in (body.include or ()),
        ),
        created=int(time.time()),
    )


class ResponsesWire(Wire[Reply]):
    """An answer as a response, with numbered events."""

    def __init__(self, exchange: ResponseExchange, reply: Reply) -> None:
        super().__init__(exchange.call, reply, request_id=exchange.request.id)
        self.state = self._latest
        self._exchange = exchange
        self._num_events = 0
        self._made: dict[str, Any] | None = None
        self._is_queued = exchange.body.background is True
        self._begun = self._latest()

    def _latest(self) -> dict[str, Any]:
        """The response as it is now."""
        return self._made or self._exchange.response("queued" if self._is_queued else "in_progress")

    def begin(self) -> Iterator[str]:
        yield self._lines("response.created", self._begun)
        yield self._lines(f"response.{self._begun['status']}", self._begun)

    def began(self, event: Began) -> Iterator[str]:
        if self._is_queued:
            self._is_queued = False
            self._begun = self._latest()
            yield self._lines("response.in_progress", self._begun)

    def waiting(self, event: StillWaiting) -> Iterator[str]:
        # Clients that give up on a silent stream count events, and not comments.
        yield comment_line(event.text) + self._lines(f"response.{self._begun['status']}", self._begun)

    def delta(self, event: AnswerDelta) -> Iterator[str]:
        return map(self._numbered, self._exchange.output.take(event.deltas))

    def end(self, event: AnswerEnd) -> Iterator[str]:
        yield from map(self._numbered, self._finish(event))
        made = self._made = self._exchange.end(self.reply.usage, event)
        yield self._lines(f"response.{made['status']}", made)

    def error(self, problem: Problem) -> str:
        self._made = self._exchange.failed(problem)
        return self._lines("response.failed", self._made)

    def take(self, event: AnswerDelta) -> None:
        self._exchange.output.take(event.deltas)

    def whole(self) -> dict[str, Any]:
        (ended,) = self.ended
        self._finish(ended)
        return self._exchange.end(self.reply.usage, ended)

    def _finish(self, ended: AnswerEnd) -> list[Event]:
        status = "incomplete" if status_of(ended) == "incomplete" else "completed"
        return self._exchange.output.finish(status=status)

    def _lines(self, kind: str, response: dict[str, Any]) -> str:
        return self._numbered({"type": kind, "response": response})

    def _numbered(self, event: Event) -> str:
        self._num_events += 1
        return _numbered(self._num_events - 1, event)


def _refused(exchange: ResponseExchange, problem: Problem) -> str:
    """All events of a response that does not begin."""
    begun = exchange.response("in_progress")
    events: list[Event] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "error", **openai_shape(problem)},
        {"type": "response.failed", "response": exchange.failed(problem)},
    ]
    return "".join(_numbered(number, event) for number, event in enumerate(events))


def _numbered(number: int, event: Event) -> str:
    return event_lines(event["type"], {"type": event["type"], "sequence_number": number, **event})
