"""Has the engine's memory budget follow the machine, from a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from reprise.core.follow import Budget, Reading
from reprise.engine.machine import read_machine
from reprise.loop.engine_loop import EngineLoop

log = logging.getLogger("reprise.loop")

_EVERY_S = 1.0
_LEAST_SHARE = 8
"""The budget keeps this part at least: running requests need some."""


@contextmanager
def following_machine(
    engine: EngineLoop, *, read: Callable[[], Reading] = read_machine, every_s: float = _EVERY_S
) -> Generator[None]:
    """While other programs need memory the engine keeps to less, and to all of its budget when they do not."""
    is_over = threading.Event()
    thread = threading.Thread(target=_follow, args=(engine, read, every_s, is_over), name="reprise-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _follow(engine: EngineLoop, read: Callable[[], Reading], every_s: float, is_over: threading.Event) -> None:
    most = engine.status().held.budget
    budget = Budget(nbytes=most, least=most // _LEAST_SHARE, most=most)
    has_told = False
    while not is_over.wait(every_s):
        try:
            reading = read()
        except Exception:
            log.exception("the machine's memory cannot be read: the budget stays as it is")
            return
        before, budget = budget, budget.after(reading, now_s=time.monotonic())
        returns = budget.returns_buffers and not before.returns_buffers
        if returns or budget.nbytes != before.nbytes:
            engine.set_budget(budget.nbytes, returns_buffers=budget.returns_buffers)
        if budget.is_reduced and not has_told:
            has_told = True
            log.warning(
                "other programs need memory (%.1f GB are free): the cache shrinks, and grows again when there is room",
                reading.available / 10**9,
            )
