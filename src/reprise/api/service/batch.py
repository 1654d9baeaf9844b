"""Several replies generated together: the prompts of one completions request."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from reprise.api.service.exchange import ReplyEvent, ServiceRequest
from reprise.api.service.reply import Reply
from reprise.api.service.service import ChatService
from reprise.core.errors import QueueFull


class Batch:
    """Like a `Reply`: read `events()` to the end within ``async with batch:``; leaving early cancels all.

    The first requests have been started; the others follow, each when one before it has ended.
    """

    def __init__(self, service: ChatService, requests: Sequence[ServiceRequest], started: Sequence[Reply]) -> None:
        assert 0 < len(started) <= len(requests), (len(started), len(requests))
        self.requests = tuple(requests)
        self._replies = list(started)
        self._service = service
        self._num_at_once = len(started)
        self._num_taken = len(started)
        self._entered = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for reply in self._replies:
            await self._entered.enter_async_context(reply)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._entered.__aexit__(kind, error, trace)

    @property
    def replies(self) -> tuple[Reply, ...]:
        """Those that have been started."""
        return tuple(self._replies)

    async def events(self) -> AsyncGenerator[ReplyEvent, None]:
        """The events of all replies as they arrive. Raises the first error.

        Their choices are numbered in the order of the requests: first all of the first request, then of the second.
        """
        # One event for each reply: a reader that is slow holds back those who read for it.
        events: asyncio.Queue[tuple[int, ReplyEvent | Exception | None]] = asyncio.Queue(maxsize=self._num_at_once)

        async def pump(first: int) -> None:
            number = first
            try:
                async for event in self._replies[first].events():
                    await events.put((number, event))
                while self._num_taken < len(self.requests):
                    number, self._num_taken = self._num_taken, self._num_taken + 1
                    async for event in (await self._start(self.requests[number])).events():
                        await events.put((number, event))
            except Exception as error:
                await events.put((number, error))
            else:
                await events.put((number, None))

        tasks = [asyncio.create_task(pump(number)) for number in range(self._num_at_once)]
        num_left = len(tasks)
        try:
            while num_left > 0:
                number, event = await events.get()
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    num_left -= 1
                else:
                    first_choice = number * self.requests[0].num_choices
                    yield event if first_choice == 0 else replace(event, choice=first_choice + event.choice)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, request: ServiceRequest) -> Reply:
        while True:
            try:
                reply = await self._service.start(request)
            except QueueFull as full:
                # Others came in between. What is done of this batch is not given up for that.
                await asyncio.sleep(full.retry_after_s or 1)
            else:
                self._replies.append(reply)
                return await self._entered.enter_async_context(reply)


async def start_batch(service: ChatService, requests: Sequence[ServiceRequest], *, num_at_once: int) -> Batch:
    """Start the first `num_at_once` requests, or none: if one is refused, those before it are cancelled."""
    replies: list[Reply] = []
    try:
        for request in requests[:num_at_once]:
            replies.append(await service.start(request))
    except BaseException as error:
        for reply in replies:
            await reply.__aexit__(type(error), error, None)
        raise
    return Batch(service, requests, replies)
