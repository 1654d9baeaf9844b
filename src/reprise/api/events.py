"""`GET /v1/events`."""

from typing import Annotated

from fastapi import APIRouter, Header
from starlette.responses import Response

from reprise.api.context import InContext, Namespace
from reprise.api.errors import ErrorBody, Problem, openai_shape
from reprise.api.service import new_request_id
from reprise.api.sse import EventStream, event_lines

router = APIRouter(tags=["Server"], responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}})


@router.get("/v1/events", response_model=None)
async def events(
    context: InContext, namespace: Namespace, last_event_id: Annotated[str | None, Header(max_length=64)] = None
) -> Response:
    """What happens, as server-sent events: requests, the tree, counters. See docs/events.md.

    Goes on behind the event that `Last-Event-ID` names, where that is known still; else it begins with a snapshot.
    """
    telling = context.events.tell(namespace, last_event_id)
    return EventStream(context.events, telling, request_id=new_request_id("events"), on_error=_last)


def _last(problem: Problem) -> str:
    return event_lines("error", openai_shape(problem))
