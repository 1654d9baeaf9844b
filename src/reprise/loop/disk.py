"""The disk behind the prefix cache, as the loop sees it: with one or without."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from reprise.cache.prefix_cache import PrefixCache
from reprise.core.backend import OnDisk, StoredRun
from reprise.core.errors import DiskUnusable
from reprise.core.prompt import BoundaryKind
from reprise.core.settings import Settings
from reprise.disk.cache import DiskCache
from reprise.engine.load import LoadedModel
from reprise.engine.records import runtime_id, why_not_persistable
from reprise.engine.runner import Footprint, Runner
from reprise.loop.loads import Loads, PrefixMatcher
from reprise.loop.requests import RunningRequest
from reprise.loop.sequences import SequencePool
from reprise.loop.writes import Writes

log = logging.getLogger("reprise.loop")

BLOCK = 512
"""Tokens of one file, where their entries are not large."""

_LEAST_BLOCK = 64
_FILE_NBYTES = 8 << 20
"""Where entries are large, a file has about so many bytes. What a path has behind its last whole block is written again
with each turn: half a block on average, for each position that is kept."""

_READ_AHEAD_NBYTES = 64 << 20
"""What one step takes over of what was read, and what is in memory beside the budget."""

_LAST_WRITES_S = 10.0
"""What is stored and not written yet is handed over when the server stops, for so long at most."""

_LAST_FLUSH_S = 20.0
"""And so long it may take until it stands in files."""


def open_disk(
    settings: Settings, loaded: LoadedModel, footprint: Footprint, *, block: int | None = None
) -> DiskCache | None:
    """The disk that the settings ask for, None if they ask for none. Raises DiskUnusable.

    `block`: tokens of a file; None: as fits the model.
    """
    if settings.disk_directory is None or not settings.has_prefix_cache:
        return None
    reason = why_not_persistable(loaded.blueprint)
    if reason is not None:
        log.warning("The prefixes of %s are not kept on disk: %s.", loaded.name, reason)
        return None
    directory = Path(settings.disk_directory).expanduser()
    if block is None:
        block = BLOCK
        while block > _LEAST_BLOCK and block * footprint.full > _FILE_NBYTES:
            block //= 2
    max_bytes = settings.disk_bytes.of(_disk_nbytes(directory))
    least = 2 * (block * footprint.full + footprint.checkpoint)
    if max_bytes < least:
        raise DiskUnusable(f"--disk-bytes is {max_bytes:,}; with this model {least:,} are the least.")
    return DiskCache(
        directory,
        # The same weights give other bytes in another version or on another device.
        fingerprint=f"{loaded.fingerprint} {runtime_id()}",
        max_bytes=max_bytes,
        block=block,
        resumes_anywhere=loaded.blueprint.layout.resumes_anywhere,
        read_ahead_bytes=_READ_AHEAD_NBYTES,
    )


def _disk_nbytes(directory: Path) -> int:
    """The size of the disk that the directory is on, or will be."""
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(there).total


class Disk:
    """Reads and writes for the loop. Without a disk nothing here does anything."""

    def __init__(
        self,
        disk: DiskCache | None,
        cache: PrefixCache,
        *,
        runner: Runner,
        sequences: SequencePool,
        matcher: PrefixMatcher,
        max_stall_s: float,
        wake: Callable[[], None],
    ) -> None:
        """`wake` has the loop take a step; it is called on another thread."""
        self._disk = disk
        self._loads: Loads | None = None
        self._writes: Writes | None = None
        if disk is not None:
            self._loads = Loads(
                disk,
                cache,
                runner=runner,
                sequences=sequences,
                matcher=matcher,
                max_stall_s=max_stall_s,
                wake=wake,
            )
            self._writes = Writes(disk, cache, runner.footprint)

    # Reading.

    def begin(self, task: RunningRequest) -> bool:
        """Whether a request that is to be admitted has to wait for what is being read for it."""
        return self._loads is not None and self._loads.begin(task)

    def reach(self, task: RunningRequest) -> int:
        """How far the task's prompt could be resumed from the disk."""
        return self._loads.reach(task) if self._loads is not None else 0

    def advance(self) -> None:
        """Take what was read."""
        if self._loads is not None:
            self._loads.advance()

    # Writing.

    def note(self, task: RunningRequest, position: int, kind: BoundaryKind) -> None:
        """The path of a task has been stored up to `position`."""
        if self._writes is not None:
            self._writes.note(task, position, kind)

    def write(self) -> None:
        """Go on with writing, if something is due."""
        if self._writes is not None:
            self._writes.write()

    def hurry(self) -> None:
        """From now on, wait with nothing that is to be written."""
        if self._writes is not None:
            self._writes.is_hurried = True

    @property
    def due_in_s(self) -> float | None:
        """When there will be something to write or to give up, unless something comes; None: never."""
        dues = [each.due_in_s for each in (self._loads, self._writes) if each is not None]
        return min((due_s for due_s in dues if due_s is not None), default=None)

    # All of it.

    def runs(self, namespace: str) -> list[StoredRun]:
        """See `Backend.stored_runs`. May be asked on any thread."""
        if self._disk is None:
            return []
        root = self._disk.root(namespace)
        return [
            StoredRun(name=key.hex(), parent="" if parent == root else parent.hex(), tokens=tokens)
            for key, parent, tokens in self._disk.runs(namespace)
        ]

    def clear(self, namespace: str | None) -> None:
        """Remove what is on disk: of one namespace, or of all."""
        if self._disk is None or self._loads is None or self._writes is None:
            return
        self._loads.void(namespace)
        self._writes.forget(namespace)
        self._disk.clear(namespace)

    def close(self) -> None:
        """Write what was stored and is not written yet, as far as a short time allows."""
        if self._disk is None or self._writes is None:
            return
        until_s = time.monotonic() + _LAST_WRITES_S
        while self._writes.due_in_s is not None and time.monotonic() < until_s:
            if self._writes.write(is_closing=True):
                continue
            if self._disk.is_paused():
                break
            time.sleep(0.01)  # The writer is behind.
        self._disk.close(_LAST_FLUSH_S)
        # They refer to the loop, and it to them.
        self._loads = self._writes = None

    def stats(self) -> OnDisk | None:
        """What is on disk, None without one. May be asked on any thread."""
        if self._disk is None:
            return None
        stats = self._disk.stats()
        return OnDisk(
            budget=stats.max_bytes,
            held=stats.nbytes,
            others=stats.others_nbytes,
            files=stats.files,
            queued=stats.queued_nbytes,
            written=stats.written_nbytes,
            read=stats.read_nbytes,
            evicted=stats.evicted,
            quarantined=stats.quarantined,
            errors=stats.errors,
        )
