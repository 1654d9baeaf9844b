"""Adjusts the engine's memory budget to the machine's free memory, on a separate thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from reprise.core.backend import Status
from reprise.core.clock import repeating
from reprise.core.follow import Budget, MemoryReading, within_bound
from reprise.engine.machine import read_machine
from reprise.engine.memory import process_nbytes, trim_heap
from reprise.loop.engine_client import EngineClient

log = logging.getLogger("reprise.loop")

_EVERY_S = 1.0
_IDLE_LOOKS = 5
"""After this many looks at an idle engine, freed memory is returned: chats often continue before."""
_LEAST_SHARE = 8
"""The budget keeps at least this fraction (1/8): running requests need some."""


def following_machine(
    engine: EngineClient,
    *,
    others: Sequence[EngineClient] = (),
    bound: int | None = None,
    read: Callable[[], MemoryReading] = read_machine,
    measure: Callable[[], int] = process_nbytes,
    trim: Callable[[], None] = trim_heap,
    every_s: float = _EVERY_S,
) -> AbstractContextManager[None]:
    """Reduce the engine's budget while other programs need memory, and raise it again afterwards.

    `others`: engines of other models, which share its budget. `bound`: limit for the process's memory, as measured by
    `measure`; None: no limit. `trim` returns freed memory to the system: when the engine has become idle or, while it
    is, has freed some, and after free buffers were returned for want of memory.
    """
    follower = _Follower(engine=engine, others=others, bound=bound, read=read, measure=measure, trim=trim)

    def follow() -> bool:
        try:
            follower.look()
        except Exception:
            log.exception("cannot read the machine's memory: the budget stays the same")
            return False
        return True

    return repeating(follow, every_s=every_s, name="reprise-memory")


@dataclass(kw_only=True, eq=False)
class _Follower:
    """Sets the engine's budget to the smaller of two: by the machine's free memory, and by the process's limit."""

    engine: EngineClient
    others: Sequence[EngineClient]
    bound: int | None
    read: Callable[[], MemoryReading]
    measure: Callable[[], int]
    trim: Callable[[], None]

    def __post_init__(self) -> None:
        self._num_idle = self._num_requests = self._held = 0
        self._has_returned = False
        self._sent = most = self.engine.status().held.budget_nbytes
        self._by_machine = Budget(nbytes=most, least=most // _LEAST_SHARE, most=most)
        # No minimum: the process must stay within its limit.
        self._by_bound = Budget(nbytes=most, least=0, most=most)
        self._has_warned_machine = self._has_warned_bound = False

    def look(self) -> None:
        """Read the memory once and update the budget."""
        # A model may have been added since.
        statuses, now_s = [engine.status() for engine in (self.engine, *self.others)], time.monotonic()
        self._return_freed(statuses)
        layers = sum(_layers_nbytes(status) for status in statuses)
        before = self._by_machine, self._by_bound
        reading = self.read()
        self._by_machine = self._by_machine.after(reading, now_s=now_s, held=layers)
        process = 0
        if self.bound is not None:
            process = self.measure()
            self._by_bound = self._by_bound.after(within_bound(self.bound, process), now_s=now_s, held=layers)
        now = self._by_machine, self._by_bound
        returns = any(after.returns_buffers and not was.returns_buffers for was, after in zip(before, now, strict=True))
        nbytes = min(budget.nbytes for budget in now)
        if returns or nbytes != self._sent:
            self._sent = nbytes
            self.engine.set_budget(nbytes, returns_buffers=any(budget.returns_buffers for budget in now))
        self._has_returned |= returns
        self._warn(reading, process)

    def _return_freed(self, statuses: Sequence[Status]) -> None:
        """Return what the C library has kept of freed buffers, here and not on the engine's thread."""
        num_requests = sum(status.counts.num_requests for status in statuses)
        held = sum(_layers_nbytes(status) + status.weights_nbytes for status in statuses)
        is_idle = num_requests == self._num_requests and all(status.is_idle for status in statuses)
        # What is freed meanwhile (a clear, a pin's end, weights) is waited for and returned, too.
        is_calm = is_idle and held >= self._held
        self._num_idle, self._num_requests, self._held = self._num_idle + 1 if is_calm else 0, num_requests, held
        if self._num_idle == _IDLE_LOOKS or self._has_returned:
            self._has_returned = False
            self.trim()

    def _warn(self, reading: MemoryReading, process: int) -> None:
        """Log each of the two reasons once."""
        if self._by_machine.is_reduced and not self._has_warned_machine:
            self._has_warned_machine = True
            log.warning(
                "other programs need memory (%.1f GB free): the cache shrinks, and grows again when memory is free",
                reading.available / 10**9,
            )
        if self._by_bound.is_reduced and not self._has_warned_bound:
            self._has_warned_bound = True
            log.warning(
                "this process holds %.2f GB, close to --memory: the cache shrinks, and grows again when memory is free",
                process / 10**9,
            )


def _layers_nbytes(status: Status) -> int:
    """Bytes of layer states."""
    held = status.held
    return held.kv_nbytes + held.snapshot_nbytes + held.live_nbytes + held.logits_nbytes
