"""Engines one after the other on one directory, as a server that is started again."""

import itertools
import random
from pathlib import Path
from typing import Any

from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.inspection import OnDisk
from reprise.core.sizes import Bytes
from reprise.disk.store.cache import DiskCache
from reprise.loop.worker import Worker
from tests.loop.driving import DrivenEngine

BLOCK = 32
"""Far shorter than the prompts of the tests, so that these are made of blocks and tails."""


_MOST_STEPS = 1000
"""Far more than an answer takes."""


def bound_steps_of_reading() -> None:
    """Have requests fail where the engine waits for ever for what is read: it takes one step after the other then."""
    steps = itertools.count(1)

    def advancing() -> None:
        assert next(steps) < _MOST_STEPS, "it waits for what never comes"

    ACTIONS[Failpoint.DISK_ADVANCE] = advancing


class Restarts:
    """Starts an engine on a directory, and ends the one before."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._running: DrivenEngine | None = None

    def __call__(self, model: str | Path = "qwen3_5", **options: Any) -> DrivenEngine:
        self.end()
        settings: dict[str, Any] = {"prefill_chunk": 256, "disk_bytes": Bytes(1 << 30), "disk_block": BLOCK}
        settings["disk_directory"] = str(self.directory)
        self._running = DrivenEngine(model, **(settings | options))
        return self._running

    def end(self) -> None:
        if self._running is not None:
            self._running.close()


def words(seed: int, num: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(512) for _ in range(num)]


def disk_cache(worker: Worker) -> DiskCache:
    assert worker.disk.cache is not None
    return worker.disk.cache


def disk_of(engine: DrivenEngine) -> OnDisk:
    disk = engine.loop.status().disk
    assert disk is not None
    return disk
