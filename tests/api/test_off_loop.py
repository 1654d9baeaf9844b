"""Work on other threads: an answer that ends waits for nothing that begins, and who has gone holds nothing."""

import asyncio
import threading

import pytest

from reprise.api.http.off_loop import Stage, StageThreads
from reprise.core.abandon import stop_if_abandoned
from reprise.core.errors import QueueFull

pytestmark = pytest.mark.anyio


async def settled(threads: StageThreads) -> None:
    while not threads.is_idle:
        await asyncio.sleep(0.001)


async def test_an_end_does_not_wait_for_beginnings():
    threads, may_go = StageThreads(), threading.Event()
    begun = [asyncio.create_task(threads.run(Stage.BEGIN, may_go.wait)) for _ in range(20)]
    try:
        await asyncio.wait_for(threads.run(Stage.END, lambda: None), 60)
        assert threads.num_open(Stage.BEGIN) == 20
        assert not threads.is_idle
    finally:
        may_go.set()
    await asyncio.gather(*begun)
    assert threads.is_idle
    threads.shutdown()


async def test_abandoned_work_stops_and_what_waits_is_dropped():
    threads, started = StageThreads(), threading.Event()
    done: list[int] = []

    def endless() -> None:
        started.set()
        while True:
            stop_if_abandoned()

    begun = [asyncio.create_task(threads.run(Stage.BEGIN, endless)) for _ in range(20)]
    last = asyncio.create_task(threads.run(Stage.BEGIN, lambda: done.append(1)))
    while not started.is_set():
        await asyncio.sleep(0.001)
    for task in begun:
        task.cancel()
    await asyncio.wait_for(last, 60)
    await asyncio.wait_for(settled(threads), 60)
    assert done == [1]
    threads.shutdown()


async def test_a_stage_that_is_had_alone_refuses_others_until_its_work_has_ended():
    threads, started, may_go = StageThreads(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        may_go.wait()

    async def survey() -> None:
        with threads.alone(Stage.SURVEY):
            await threads.run(Stage.SURVEY, work)

    gone = asyncio.create_task(survey())
    try:
        while not started.is_set():
            await asyncio.sleep(0.001)
        with pytest.raises(QueueFull):
            await survey()
        # The client has gone, and the thread still works.
        gone.cancel()
        await asyncio.wait([gone])
        with pytest.raises(QueueFull):
            await survey()
    finally:
        may_go.set()
    await asyncio.wait_for(settled(threads), 60)
    await asyncio.wait_for(survey(), 60)
    assert threads.is_idle
    threads.shutdown()


async def test_work_of_others_is_not_abandoned():
    threads = StageThreads()
    for _ in range(4):
        await threads.run(Stage.BEGIN, stop_if_abandoned)
    stop_if_abandoned()
    threads.shutdown()
