"""A stream that waits is alive to its client: data of its own kind at intervals of a clock of the test."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from reprise.api.service.reply import LoopClock
from tests.api.servers import Api, api
from tests.api.test_controls import REQUESTS

pytestmark = pytest.mark.anyio


class CountingClock(LoopClock):
    """Stands still but for `num` silences that pass at once where the stream waits in vain, and then `are_over`."""

    def __init__(self, num: int) -> None:
        self.time_s = 100.0
        self.num_left = num
        self.are_over = asyncio.Event()

    def now_s(self) -> float:
        return self.time_s

    async def wait(self, event: asyncio.Event, timeout_s: float) -> None:
        if self.num_left > 0 and not event.is_set():
            self.num_left -= 1
            self.time_s += timeout_s
            return
        self.are_over.set()
        await event.wait()


async def events_of(served: Api, clock: CountingClock, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream whose prompt is computed once the silences are over."""
    served.backend.may_prefill.clear()

    async def go_on() -> None:
        await clock.are_over.wait()
        served.backend.may_prefill.set()

    going_on = asyncio.create_task(go_on())
    got: httpx.Response = await served.client.post(path, json={**body, "stream": True})
    await going_on
    return [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("name", REQUESTS)
async def test_silence_is_broken_by_data(name: str) -> None:
    path, body = REQUESTS[name]
    clock = CountingClock(3)
    async with api(clock=clock) as served:
        events = await events_of(served, clock, path, body)
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
    assert len(silent) == 3
