"""The chat service for synchronous callers: its event loop runs in a thread, which passes events on."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue

from reprise.api.service.exchange import Record, ReplyEvent, ServiceRequest, Usage
from reprise.api.service.service import ChatService
from reprise.chat.request import ChatRequest
from reprise.core.errors import RepriseError, ShuttingDown, engine_failed
from reprise.core.outcome import Outcome

log = logging.getLogger(__name__)

_IDLE_S = 0.005
"""Between two looks at whether the service is idle."""
_CLOSE_S = 30.0


class ReplyStream:
    """One reply: iterate over its events, in any thread. `usage` is set behind the last one.

    Raises what the service raises.
    """

    def __init__(self, cancel: Callable[["ReplyStream"], None]) -> None:
        self.usage: Usage | None = None
        self.record: Future[Record] = Future()
        """Set a moment after the end, when the reason why tokens were computed has been worked out."""
        # Without a bound: an answer has one, and whoever reads it may take any time.
        self._events: SimpleQueue[ReplyEvent | Usage | Exception] = SimpleQueue()
        self._cancel = cancel

    def __iter__(self) -> Iterator[ReplyEvent]:
        while True:
            event = self._events.get()
            if isinstance(event, Usage):
                self.usage = event
                return
            if isinstance(event, Exception):
                raise event
            yield event

    def cancel(self) -> None:
        """Stop within one step; what was computed stays in the cache. Does nothing behind the last event."""
        if self.usage is None:
            self._cancel(self)

    # From the event loop.

    def put(self, event: ReplyEvent | Usage) -> None:
        """The next event; the usage comes last."""
        self._events.put(event)

    def fail(self, error: Exception) -> None:
        """Have the reader raise `error`; behind the last event, whoever asks for the record."""
        self._events.put(error)
        self.record.set_exception(error)


class Replies:
    """Runs a `ChatService` on a separate thread until `close`. Safe to use from several threads."""

    def __init__(self, service: ChatService) -> None:
        self.service = service
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._is_closed = False
        self._open: dict[ReplyStream, asyncio.Task[None]] = {}
        self._prefills: set[Future[Outcome]] = set()
        self._thread = threading.Thread(target=self._run, name="reprise-chats", daemon=True)
        self._thread.start()

    def begin(self, request: Callable[[], ServiceRequest]) -> ReplyStream:
        """Answer the request, which is made on a thread of the service. Raises ShuttingDown when closed."""
        stream = ReplyStream(self._cancel)
        with self._lock:
            if self._is_closed:
                raise ShuttingDown("The engine is closed.")
            self._loop.call_soon_threadsafe(self._start, stream, request)
        return stream

    def prefill(self, request: Callable[[], ServiceRequest]) -> Future[Outcome]:
        """Compute what a chat begins with whose last message is still being typed; cancel the future to stop.

        Raises ShuttingDown when closed.
        """
        with self._lock:
            if self._is_closed:
                raise ShuttingDown("The engine is closed.")
            future = asyncio.run_coroutine_threadsafe(self._prefill(request), self._loop)
            self._prefills.add(future)
        future.add_done_callback(self._prefills.discard)
        return future

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Return when nothing runs, settles or is about to: True. False if that takes longer than `timeout_s`."""
        with self._lock:
            if self._is_closed:
                return True
            waiting = asyncio.run_coroutine_threadsafe(self._idle(timeout_s), self._loop)
        return waiting.result()

    def close(self) -> None:
        """Cancel what runs and end the thread. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        closing = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        try:
            closing.result(_CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)

    def _cancel(self, stream: ReplyStream) -> None:
        with self._lock:
            # Closed: it has been cancelled, and the loop may be gone.
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._stop, stream)

    # On the event loop's thread.

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _start(self, stream: ReplyStream, request: Callable[[], ServiceRequest]) -> None:
        self._open[stream] = task = self._loop.create_task(self._answer(stream, request))
        task.add_done_callback(lambda _: self._open.pop(stream))

    def _stop(self, stream: ReplyStream) -> None:
        task = self._open.get(stream)
        if task is not None:
            task.cancel()

    async def _answer(self, stream: ReplyStream, request: Callable[[], ServiceRequest]) -> None:
        try:
            reply = await self.service.start(await self.service.off_loop(request))
            async with reply:
                async for event in reply.events():
                    stream.put(event)
            stream.put(reply.usage)
            assert reply.recording is not None
            stream.record.set_result(await asyncio.shield(reply.recording))
        except RepriseError as error:
            stream.fail(error)
        except asyncio.CancelledError:
            stream.fail(ShuttingDown("The engine was closed before the answer ended."))
            raise
        except Exception as error:
            log.exception("a request failed")
            stream.fail(engine_failed("The request failed", error))

    async def _prefill(self, request: Callable[[], ServiceRequest]) -> Outcome:
        asked = await self.service.off_loop(request)
        assert isinstance(asked.prompt, ChatRequest)
        prefix = await self.service.typed_prefix(asked.prompt)
        return await self.service.prefill(prefix, request_id=asked.id)

    async def _idle(self, timeout_s: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while not (self._is_closed or self.service.is_idle):
                    await asyncio.sleep(_IDLE_S)
        except TimeoutError:
            return False
        return True

    async def _end(self) -> None:
        # Before the service closes: what follows an answer needs its threads.
        running = tuple(self._open.values())
        for task in (*running, *tuple(self._prefills)):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.service.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*rest, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
