"""Threads for work that would block the event loop, separate per stage, so that no answer waits for a new request."""

import asyncio
import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from typing import TypeVar

from reprise.core.abandon import abandonable
from reprise.core.errors import QueueFull

T = TypeVar("T")


class Stage(StrEnum):
    """Where a request is when it needs a thread. An answer that ends never waits for one that begins."""

    READ = "read"
    """Its body is parsed. One thread: a parser holds the interpreter, so two would only take turns."""
    FETCH = "fetch"
    """Its images are fetched: threads that wait for a network."""
    SEE = "see"
    """Its images are decoded, a limited number at once for all requests together."""
    BEGIN = "begin"
    """Its prompt is rendered and tokenized."""
    END = "end"
    """Its answer is complete, and the client waits for the last words."""
    AFTER = "after"
    """Nobody waits: what the next turn begins with, and what the record says."""
    VIEW = "view"
    """Somebody looks at the cache: pages of its tree and their text."""
    SURVEY = "survey"
    """All of the cache is searched, or many requests are replayed: `alone`."""


_NUM_THREADS = {
    Stage.READ: 1,
    Stage.FETCH: 8,
    Stage.SEE: 2,
    Stage.BEGIN: min(4, os.cpu_count() or 1),
    Stage.END: 2,
    Stage.AFTER: 1,
    Stage.VIEW: 1,
    Stage.SURVEY: 1,
}


class StageThreads:
    """The threads of one server. `run` belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._pools = {
            stage: ThreadPoolExecutor(max_workers=num, thread_name_prefix=f"reprise-{stage}")
            for stage, num in _NUM_THREADS.items()
        }
        self._num_open = dict.fromkeys(Stage, 0)
        self._lock = threading.Lock()

    @property
    def is_idle(self) -> bool:
        """Whether no thread works, also not for somebody who has gone."""
        return not any(self._num_open.values())

    def num_open(self, stage: Stage) -> int:
        """How much work waits or runs, counting what nobody waits for any more but still runs."""
        return self._num_open[stage]

    async def run(self, stage: Stage, work: Callable[[], T]) -> T:
        """Do the work on another thread. If the caller is cancelled, work that waits is dropped, and work that runs
        is cancelled (`reprise.core.abandon`)."""
        given_up = threading.Event()

        def do() -> T:
            with abandonable(given_up):
                return work()

        with self._lock:
            self._num_open[stage] += 1
        future: Future[T] = self._pools[stage].submit(do)
        future.add_done_callback(lambda _: self._close(stage))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            given_up.set()
            raise

    @contextmanager
    def alone(self, stage: Stage) -> Generator[None]:
        """Have the stage for this block's work alone. Raises QueueFull while other work is open there."""
        with self._lock:
            if self._num_open[stage] > 0:
                raise QueueFull("Another search or replay is running, and they run one at a time. Try again in 1 s.")
            self._num_open[stage] += 1
        try:
            yield
        finally:
            self._close(stage)

    def _close(self, stage: Stage) -> None:
        with self._lock:
            self._num_open[stage] -= 1

    def shutdown(self) -> None:
        """Take no more work; what waits is dropped."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
