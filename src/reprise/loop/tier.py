"""The disk tier behind the prefix cache, as the loop sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from reprise.core.allowance import StepAllowance
from reprise.core.inspection import InspectedRead
from reprise.core.prompt import BoundaryKind
from reprise.disk.store.cache import DiskCache
from reprise.loop.disk import CLOSED_WITHIN_S, close_soon
from reprise.loop.read_ahead import ReadAhead
from reprise.loop.requests import RunningRequest
from reprise.loop.sequences import SequencePool
from reprise.loop.write_behind import WriteBehind

LAST_WRITES_S = 10.0
"""At shutdown, time limit for copying what is stored and not yet written to the writer's queue."""


class DiskTier:
    """Reads ahead of admissions and writes behind commits. With `disk` None every method is a no-op.

    Used on the engine thread, which waits for files only in `close`.
    """

    def __init__(
        self,
        disk: DiskCache | None,
        sequences: SequencePool,
        *,
        allowance: StepAllowance,
        prefill_s: Callable[[int, int], float | None],
        wake: Callable[[], None],
    ) -> None:
        """`prefill_s`: how long it takes to compute positions from the first to before the second; None: not known.

        `wake` has the loop take a step; it is called on another thread.
        """
        self._disk = disk
        self._read_ahead: ReadAhead | None = None
        self._write_behind: WriteBehind | None = None
        if disk is not None:
            self._read_ahead = ReadAhead(disk, sequences, allowance=allowance, prefill_s=prefill_s, wake=wake)
            self._write_behind = WriteBehind(disk, sequences)

    # Reading.

    def begin(self, request: RunningRequest) -> bool:
        """Start or join a read for a request about to be admitted. Returns whether it has to wait for it."""
        return self._read_ahead is not None and self._read_ahead.begin(request)

    def reach(self, request: RunningRequest) -> int:
        """The position at which the request's prompt could resume from disk; 0 if nothing matches."""
        return self._read_ahead.reach(request) if self._read_ahead is not None else 0

    def common_length(self, request: RunningRequest) -> int:
        """How far the request's prompt agrees with a path on disk, whether or not it could resume there."""
        return 0 if self._disk is None else self._disk.common_length(request.prompt.tokens, namespace=request.namespace)

    def would_read_to(self, request: RunningRequest, *, held: int) -> int:
        """The position to which `begin` would read, given ``[0, held)`` in memory; 0: it would not read."""
        return self._read_ahead.would_read_to(request, held=held) if self._read_ahead is not None else 0

    def advance(self) -> list[str]:
        """Decode and commit what was read. Returns the ids of the requests that no longer wait for the disk."""
        return self._read_ahead.advance() if self._read_ahead is not None else []

    # Writing.

    def note(self, request: RunningRequest, position: int, kind: BoundaryKind) -> None:
        """Schedule a request's path, which was committed up to `position`, for writing."""
        if self._write_behind is not None:
            self._write_behind.note(request, position, kind)

    def write(self, *, is_closing: bool = False) -> bool:
        """Copy the next part of what is due (`is_closing`: everything is). Returns whether there was anything."""
        return self._write_behind is not None and self._write_behind.write(is_closing=is_closing)

    def hurry(self) -> None:
        """From now on, write without delay."""
        if self._write_behind is not None:
            self._write_behind.is_hurried = True

    @property
    def due_in_s(self) -> float | None:
        """Seconds until there is something to write or to time out, if nothing arrives before; None: never."""
        dues = [each.due_in_s for each in (self._read_ahead, self._write_behind) if each is not None]
        return min((due_s for due_s in dues if due_s is not None), default=None)

    # Inspection and shutdown.

    @property
    def cache(self) -> DiskCache | None:
        """The disk cache, or None. Its methods are thread-safe."""
        return self._disk

    def reads(self) -> tuple[InspectedRead, ...]:
        """The current reads, for inspection."""
        return self._read_ahead.reads() if self._read_ahead is not None else ()

    @property
    def num_unwritten(self) -> int:
        """Stored paths that wait to be written."""
        return self._write_behind.num_due if self._write_behind is not None else 0

    def clear(self, namespace: str | None) -> Future[None] | None:
        """Remove everything on disk of a namespace (None: of this model). See `DiskCache.clear`; None: no disk."""
        if self._disk is None or self._read_ahead is None or self._write_behind is None:
            return None
        self._read_ahead.void(namespace)
        self._write_behind.forget(namespace)
        return self._disk.clear(namespace)

    def check(self) -> None:
        """AssertionError unless what was read and is not committed is charged."""
        if self._read_ahead is not None:
            self._read_ahead.check()

    def close(self) -> None:
        """Write what was stored and is not yet written, within a time limit, and close the disk cache."""
        if self._disk is None or self._write_behind is None:
            return
        until_s = time.monotonic() + LAST_WRITES_S
        while self._write_behind.due_in_s is not None and time.monotonic() < until_s:
            if self.write(is_closing=True):
                continue
            if self._disk.is_paused():
                break
            time.sleep(0.01)  # The writer's queue is full.
        self._disk.close(CLOSED_WITHIN_S)
        # Break the reference cycles with the loop.
        self._read_ahead = self._write_behind = None

    def abandon(self) -> None:
        """As `close`, without waiting: what is not copied yet is not written, and another thread closes the cache."""
        close_soon(self._disk)
        self._read_ahead = self._write_behind = None
