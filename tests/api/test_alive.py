"""A stream that waits is alive to its client: data of its own kind at intervals of a clock that the test moves."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from reprise.api.service.exchange import StillWaiting
from reprise.api.service.reply import LoopClock
from tests.api.servers import Api, api
from tests.api.test_controls import REQUESTS

pytestmark = pytest.mark.anyio


class StillClock(LoopClock):
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self._moved = asyncio.Event()

    def now_s(self) -> float:
        return self.time_s

    async def wait(self, event: asyncio.Event, timeout_s: float) -> None:
        due_s = self.time_s + timeout_s
        while self.time_s < due_s and not event.is_set():
            moved = self._moved
            waits = [asyncio.ensure_future(moved.wait()), asyncio.ensure_future(event.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waits:
                    one.cancel()

    def move(self, seconds: float) -> None:
        self.time_s += seconds
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


async def told(served: Api, clock: StillClock, path: str, body: dict[str, Any], num: int) -> list[dict[str, Any]]:
    """The events of a stream, of which `num` silences pass before the prompt is computed."""
    reader = served.service.start
    events: list[dict[str, Any]] = []
    served.backend.may_prefill.clear()
    started = asyncio.Event()

    async def watched(request: Any) -> Any:
        reply = await reader(request)
        inner = reply.events

        async def counted() -> AsyncIterator[Any]:
            silences = 0
            started.set()
            async for event in inner():
                silences += isinstance(event, StillWaiting)
                if silences == num:
                    served.backend.may_prefill.set()
                yield event

        reply.events = counted
        return reply

    served.service.start = watched  # type: ignore[method-assign]

    async def move() -> None:
        await started.wait()
        while not served.backend.may_prefill.is_set():
            clock.move(served.service.limits.keep_alive_s)
            await asyncio.sleep(0.001)

    moving = asyncio.create_task(move())
    got: httpx.Response = await served.client.post(path, json={**body, "stream": True})
    await moving
    for line in got.text.splitlines():
        if line.startswith("data: {"):
            events.append(json.loads(line[6:]))
    return events


@pytest.mark.parametrize("name", REQUESTS)
async def test_silence_is_broken_by_data(name: str) -> None:
    path, body = REQUESTS[name]
    clock = StillClock()
    async with api(clock=clock) as served:
        events = await told(served, clock, path, body, 3)
    match name:
        case "chat":
            silent = [event for event in events if event["choices"] and event["choices"][0]["delta"] == {}]
            silent = [event for event in silent if event["choices"][0]["finish_reason"] is None]
            roles = [event for event in events if "role" in (event["choices"] or [{"delta": {}}])[0]["delta"]]
            assert len(roles) == 1 and events[0] is roles[0]
        case "completions":
            silent = [e for e in events if e["choices"][0]["text"] == "" and e["choices"][0]["finish_reason"] is None]
        case "responses":
            silent = [event for event in events if event["type"] == "response.in_progress"][1:]
            numbers = [event["sequence_number"] for event in events]
            assert numbers == list(range(len(events)))
        case _:
            silent = [event for event in events if event["type"] == "ping"]
            assert events[0]["type"] == "message_start"
    assert len(silent) >= 3
