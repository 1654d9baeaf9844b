"""Answers that continue without their client, which can resume after the last event it received.

Such a request is read by a task here instead of its connection: the events are numbered and kept, and sent to any
client with the id of the answer and the key that requested it. docs/background.md is for users.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, Self

from reprise.api.http.errors import problem_of
from reprise.api.http.sse import EventStream, StreamSource
from reprise.core.errors import BadRequest, NotFound, RequestCancelled

log = logging.getLogger(__name__)

HEADER = "x-reprise-background"
"""A request with this header and the value `true` asks for an answer that continues without its client."""
ADDRESS_HEADER = "x-reprise-stream"
"""In the response: where its stream can be read on."""

_ANSWER_NBYTES = 4096
"""What an answer takes beside its events."""
_AT_ONCE = 256
"""The most events that are sent together."""


def address_of(request_id: str) -> dict[str, str]:
    """The header that says where the stream of this answer can be read on."""
    return {ADDRESS_HEADER: f"/v1/requests/{request_id}/stream"}


def refuse_unstreamed(*, is_background: bool) -> None:
    """Raises BadRequest if an answer that is not streamed is to go on: nobody would learn its id in time."""
    if is_background:
        raise BadRequest("A background answer must be streamed: set `stream` to true.", param="stream")


class BackgroundAnswer:
    """One answer, whose events are kept from the first on. Within ``async with answer:`` it has a reader.

    `state`: the answer as it is now, for APIs that can be asked for it.
    """

    def __init__(
        self,
        owner: "BackgroundAnswers",
        *,
        source: StreamSource,
        namespace: str,
        state: Callable[[], dict[str, Any]] | None,
    ) -> None:
        self.id = source.request_id
        self.namespace = namespace
        self.state = state
        self.is_over = False
        self.nbytes = _ANSWER_NBYTES
        self.num_readers = 0
        self.timer: asyncio.TimerHandle | None = None
        """Drops the answer, while nobody reads it."""
        self._owner = owner
        self._source = source
        self._events: list[str] = []
        self._news = asyncio.Event()
        """Set, and replaced by another, when there is something to read."""
        self._why = ""
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.num_readers += 1
        self._owner.rearm(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.num_readers -= 1
        if self.num_readers == 0 and not self.is_over:
            log.info("%s: continues in the background without a reader", self.id)
        self._owner.rearm(self)

    def begin(self) -> None:
        self._reading = asyncio.create_task(self._read())

    def stream(self, *, after: int = -1) -> EventStream:
        """The events behind number `after`, those that are kept and then the others as they come.

        Raises BadRequest if there is no event of this number.
        """
        if not -1 <= after < len(self._events):
            raise BadRequest(f"There is no event {after} yet; the last one of this answer is {len(self._events) - 1}.")
        headers = {**self._source.headers, **address_of(self.id)}
        return EventStream(replace(self._source, reply=self, texts=self._events_after(after), headers=headers))

    async def _events_after(self, after: int) -> AsyncGenerator[str, None]:
        at = after + 1
        while True:
            if at < len(self._events):
                stop = min(at + _AT_ONCE, len(self._events))
                yield "".join(self._events[at:stop])
                at = stop
            elif self.is_over:
                return
            else:
                await self._news.wait()

    def cancel(self, why: str) -> None:
        """End it, with an event that says why. What was computed stays in the prefix cache."""
        if self._reading is not None and not self.is_over and self._why == "":
            self._why = why
            self._reading.cancel()

    async def wait(self) -> None:
        """Until it is over."""
        if self._reading is not None:
            await asyncio.wait((self._reading,))

    async def _read(self) -> None:
        try:
            async with self._source.reply, aclosing(self._source.to_the_end()) as texts:
                async for text in texts:
                    self._keep(text)
        except asyncio.CancelledError:
            self._keep(self._source.last_text(problem_of(RequestCancelled(self._why))))
        finally:
            self.is_over = True
            self._wake()
            self._owner.rearm(self)

    def _keep(self, text: str) -> None:
        """Number the events of a text: clients name the last one that they heard. Comments stay before their event."""
        comments, nbytes = "", 0
        for block in text.split("\n\n")[:-1]:
            if block.startswith(":"):
                comments += f"{block}\n\n"
                continue
            event = f"{comments}id: {len(self._events)}\n{block}\n\n"
            comments = ""
            self._events.append(event)
            nbytes += sys.getsizeof(event)
        self.nbytes += nbytes
        self._wake()
        self._owner.grown(self, nbytes)

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class BackgroundAnswers:
    """The background answers of one server: `max_nbytes` of events, each for `keep_s` seconds without a reader.

    Over the bound those that are over go first, the oldest of them before others, then the largest that runs.
    Belongs to the event loop's thread.
    """

    def __init__(self, *, keep_s: float, max_nbytes: int) -> None:
        self._keep_s = keep_s
        self._max_nbytes = max_nbytes
        self._by_id: dict[str, BackgroundAnswer] = {}
        self._expected: dict[str, tuple[str, asyncio.Event]] = {}
        """Answers whose model is still loaded: their namespace, and what is set when they have begun or will not."""
        self._nbytes = 0

    async def begin(
        self, source: StreamSource, *, namespace: str, state: Callable[[], dict[str, Any]] | None = None
    ) -> BackgroundAnswer:
        """Read the stream, whether or not a client reads it. `state` as in `BackgroundAnswer`."""
        answer = BackgroundAnswer(self, source=source, namespace=namespace, state=state)
        answer.begin()
        # A task that is cancelled before its first step never enters its reply, and nobody would leave it.
        await asyncio.sleep(0)
        self._by_id[answer.id] = answer
        self._nbytes += answer.nbytes
        self._make_room()
        self.rearm(answer)
        return answer

    @contextmanager
    def expecting(self, request_id: str, *, namespace: str) -> Generator[None]:
        """Its address is known; within, its model is loaded and it begins."""
        has_begun = asyncio.Event()
        self._expected[request_id] = (namespace, has_begun)
        try:
            yield
        finally:
            del self._expected[request_id]
            has_begun.set()

    async def begun(self, request_id: str, *, namespace: str) -> None:
        """Wait for an answer that is expected; at once for any other."""
        whose, has_begun = self._expected.get(request_id, ("", None))
        if has_begun is not None and whose == namespace:
            await has_begun.wait()

    def find(self, request_id: str, *, namespace: str) -> BackgroundAnswer | None:
        answer = self._by_id.get(request_id)
        if answer is None or answer.namespace != namespace:
            return None
        self.rearm(answer)
        return answer

    def get(self, request_id: str, *, namespace: str) -> BackgroundAnswer:
        """Raises NotFound."""
        answer = self.find(request_id, namespace=namespace)
        if answer is None:
            raise NotFound(
                f"There is no background answer {request_id[:80]!r}. Its request did not have the header "
                f"`{HEADER}: true`, or no client read it for {self._keep_s:g} s (--background-time), or it was dropped "
                "to free memory (--background-bytes). The prefix cache has what was computed: send the request again."
            )
        return answer

    def drop(self, answer: BackgroundAnswer, why: str) -> None:
        """Forget an answer, and end it if it runs. A client that is reading it can read to its end."""
        if self._by_id.get(answer.id) is not answer:
            return
        del self._by_id[answer.id]
        self._nbytes -= answer.nbytes
        self.rearm(answer)
        answer.cancel(why)

    async def close(self) -> None:
        """End all: who reads one hears why."""
        for answer in list(self._by_id.values()):
            self.drop(
                answer, "The server is shutting down. The prefix cache has what was computed: send the request again."
            )
            await answer.wait()

    def rearm(self, answer: BackgroundAnswer) -> None:
        """Somebody reads it, asks for it, or has left: its time begins anew."""
        if answer.timer is not None:
            answer.timer.cancel()
            answer.timer = None
        if answer.num_readers == 0 and self._by_id.get(answer.id) is answer:
            why = f"No client read this answer for {self._keep_s:g} s (--background-time)."
            answer.timer = asyncio.get_running_loop().call_later(self._keep_s, self.drop, answer, why)

    def grown(self, answer: BackgroundAnswer, nbytes: int) -> None:
        if self._by_id.get(answer.id) is answer:
            self._nbytes += nbytes
            self._make_room()

    def _make_room(self) -> None:
        while self._nbytes > self._max_nbytes:
            over = [answer for answer in self._by_id.values() if answer.is_over]
            if over:
                # Of several that are alike `min` takes the first, which is the oldest.
                victim = min(over, key=lambda answer: answer.num_readers > 0)
            else:
                victim = max(self._by_id.values(), key=lambda answer: answer.nbytes)
            self.drop(victim, f"Background answers hold more than {self._max_nbytes} bytes (--background-bytes).")

    def check(self) -> None:
        """Recount; raises AssertionError on any difference."""
        assert self._nbytes == sum(answer.nbytes for answer in self._by_id.values()) <= self._max_nbytes
        for answer in self._by_id.values():
            assert (answer.timer is None) == (answer.num_readers > 0), answer.id
