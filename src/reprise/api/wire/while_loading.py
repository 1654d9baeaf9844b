"""Answers to requests whose model is still being loaded."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from reprise.api.http.errors import ErrorFormats, log_problem, problem_of
from reprise.api.http.sse import EVENT_STREAM, comment_line, data_line, event_lines, while_connected
from reprise.api.service.models import ServedModel
from reprise.api.service.service import ChatService
from reprise.core.backend import WeightsState
from reprise.core.errors import ClientGone

_AT_ONCE_S = 1.0
"""How long a stream's response waits for the model before it starts with comments."""
_NO_HEADERS: Mapping[str, str] = {}
_TOLD_S = 2.0
"""Interval between two comments about loading."""
_MOST_CLIENTLESS = 64
_CLIENTLESS: set[asyncio.Task[None]] = set()
"""Background answers whose model is still loaded, and whose clients have gone."""


class StreamWhileLoading(Response):
    """A stream that starts while its model is being loaded: comments about that, then the answer's events.

    Since the status has been sent, an error becomes its last event. `headers`: those of the answer, known before it.
    With `expected` it is a background answer, which begins when the model is there, whether or not its client still is;
    what `expected` encloses is the time until then.
    """

    def __init__(
        self,
        model: ServedModel[ChatService],
        ready: asyncio.Task[ChatService],
        answer: Callable[[], Coroutine[Any, Any, Response]],
        *,
        shapes: ErrorFormats,
        headers: Mapping[str, str],
        expected: AbstractContextManager[None] | None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**EVENT_STREAM, **headers})
        self._ready: asyncio.Task[ChatService] | None = ready
        self._model, self._answer, self._shapes = model, answer, shapes
        self._expected = expected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write(text: str, *, has_more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": has_more})

        async def send_rest(message: Any) -> None:
            if message["type"] == "http.response.body":
                await send(message)

        waiting = ExitStack()
        if self._expected is not None:
            waiting.enter_context(self._expected)
        try:
            await while_connected(receive, self._wait(write))
            response = await self._answer()
            waiting.close()
        except (ClientGone, OSError):
            ready = self._ready
            if ready is not None and self._expected is not None and len(_CLIENTLESS) < _MOST_CLIENTLESS:
                self._ready = None
                _CLIENTLESS.add(task := asyncio.create_task(self._begin(ready, waiting.pop_all())))
                task.add_done_callback(_CLIENTLESS.discard)
        except Exception as error:
            problem = problem_of(error)
            log_problem(problem, error, where=self._model.id)
            body = self._shapes.of(scope)(problem)
            is_named = "type" in body
            await write(event_lines("error", body) if is_named else data_line(body), has_more=False)
        else:
            await response(scope, receive, send_rest)
        finally:
            waiting.close()
            if self._ready is not None:
                self._ready.cancel()

    async def _begin(self, ready: asyncio.Task[ChatService], waiting: ExitStack) -> None:
        """Begin the answer without its client, which can read it at its address."""
        try:
            with waiting:
                await ready
                await self._answer()
        except Exception as error:
            log_problem(problem_of(error), error, where=self._model.id)
        finally:
            ready.cancel()

    async def _wait(self, write: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        assert self._ready is not None, "a response is sent once"
        since_s = time.monotonic()
        while True:
            done, _ = await asyncio.wait((self._ready,), timeout=_TOLD_S)
            if done:
                await self._ready
                return
            waits = "being loaded" if self._model.state is WeightsState.LOADING else "waiting for room"
            await write(comment_line(f"{self._model.id} is {waits} ({time.monotonic() - since_s:.0f} s)"))


async def answer_when_ready(
    model: ServedModel[ChatService],
    request: Request,
    answer: Callable[[], Coroutine[Any, Any, Response]],
    *,
    is_stream: bool,
    shapes: ErrorFormats,
    headers: Mapping[str, str] = _NO_HEADERS,
    expected: AbstractContextManager[None] | None = None,
) -> Response:
    """Answer a request once its model is loaded; a stream starts before. Raises what loading raises."""
    if model.is_ready:
        return await answer()
    ready = asyncio.create_task(model.ready())
    try:
        done, _ = await asyncio.wait((ready,), timeout=_AT_ONCE_S)
        if not done and is_stream:
            streamed = StreamWhileLoading(model, ready, answer, shapes=shapes, headers=headers, expected=expected)
            ready = None
            return streamed
        await while_connected(request.receive, ready)
        ready = None
        return await answer()
    finally:
        if ready is not None:
            ready.cancel()
