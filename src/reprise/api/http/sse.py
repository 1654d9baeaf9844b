"""Server-sent events, and work that ends when its client is gone."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from reprise.api.http.encoding import NotJson, encode_json
from reprise.api.http.errors import Problem, log_problem, openai_shape, problem_of
from reprise.core.errors import ClientGone

log = logging.getLogger(__name__)

T = TypeVar("T")

DONE = "data: [DONE]\n\n"


def data_line(body: object) -> str:
    """An event without a name."""
    return f"data: {encode_json(body)}\n\n"


def event_lines(name: str, body: object) -> str:
    """An event with a name."""
    return f"event: {name}\ndata: {encode_json(body)}\n\n"


def comment_line(text: str) -> str:
    """What clients skip: it keeps the connection alive."""
    return f": {text}\n\n"


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Await the work, and cancel it as soon as the client hangs up (then raises ClientGone).

    To be called when the body has been read: what the server hears from then on is the end of the connection.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


EVENT_STREAM: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies would gather events otherwise.
    "x-accel-buffering": "no",
}
"""The headers of server-sent events."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamSource:
    """A stream's `texts`, read within `reply` (a `Reply`, a `Batch`), which is left in any case.

    An error in the middle of the stream becomes its last text, through `on_error`: the status was sent long before.
    """

    reply: AbstractAsyncContextManager[object]
    texts: AsyncGenerator[str, None]
    request_id: str
    on_error: Callable[[Problem], str]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    async def to_the_end(self) -> AsyncGenerator[str, None]:
        """All texts; an error becomes the last of them, and is logged."""
        async with aclosing(self.texts) as texts:
            try:
                async for text in texts:
                    yield text
            except Exception as error:
                problem = problem_of(error)
                log_problem(problem, error, where=self.request_id)
                yield self.last_text(problem)

    def last_text(self, problem: Problem) -> str:
        """The end of a stream that broke off."""
        try:
            return self.on_error(problem)
        except NotJson:
            # What cannot be sent may be in all that the API would send.
            return data_line(openai_shape(problem))


class EventStream(Response):
    """Server-sent events that end as soon as the client disconnects."""

    def __init__(self, source: StreamSource) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**EVENT_STREAM, "x-request-id": source.request_id, **source.headers})
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._source.reply:
                await while_connected(receive, self._send_all(send))
        except (ClientGone, OSError):
            log.debug("%s: the client disconnected", self._source.request_id)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._source.to_the_end()) as texts:
            async for text in texts:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                # Only the loop notices that the connection is lost, and everybody else has their turn.
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
