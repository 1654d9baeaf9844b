"""Several replies that are answered together: the prompts of one completions request."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from reprise.api.exchange import ReplyEvent, ServiceRequest
from reprise.api.reply import Reply
from reprise.api.service import ChatService


class Batch:
    """Like a `Reply`: read `events()` to the end within ``async with batch:``; leaving early cancels all."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self.replies = tuple(replies)
        self._entered = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for reply in self.replies:
            await self._entered.enter_async_context(reply)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._entered.__aexit__(kind, error, trace)

    async def events(self) -> AsyncGenerator[tuple[int, ReplyEvent], None]:
        """The events of all replies as they come, each with the number of its reply. Raises the first error."""
        # One event for each reply: a reader that is slow holds back those who read for it.
        events: asyncio.Queue[tuple[int, ReplyEvent | Exception | None]] = asyncio.Queue(maxsize=len(self.replies))

        async def pump(number: int, reply: Reply) -> None:
            try:
                async for event in reply.events():
                    await events.put((number, event))
            except Exception as error:
                await events.put((number, error))
            else:
                await events.put((number, None))

        tasks = [asyncio.create_task(pump(number, reply)) for number, reply in enumerate(self.replies)]
        num_left = len(tasks)
        try:
            while num_left > 0:
                number, event = await events.get()
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    num_left -= 1
                else:
                    yield number, event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def start_batch(service: ChatService, requests: Sequence[ServiceRequest]) -> Batch:
    """Start all requests, or none: if one is refused, those before it are cancelled."""
    replies: list[Reply] = []
    try:
        for request in requests:
            replies.append(await service.start(request))
    except BaseException as error:
        for reply in replies:
            await reply.__aexit__(type(error), error, None)
        raise
    return Batch(replies)
