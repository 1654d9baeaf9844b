"""The disk behind the prefix cache, as the loop sees it: with one or without."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from reprise.cache.prefix_cache import PrefixCache
from reprise.core.allowance import StepAllowance
from reprise.core.backend import StoredRun
from reprise.core.inspection import DiskTree, InspectedRead, OnDisk
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, Tokens
from reprise.disk.cache import DiskCache
from reprise.disk.ports import NewEncoder, StateSizes, TierRequest, TierSequences
from reprise.disk.read_ahead import ReadAhead
from reprise.disk.write_behind import WriteBehind

LAST_WRITES_S = 10.0
"""What is stored and not written yet is handed over when the server stops, for so long at most."""

_LAST_FLUSH_S = 20.0
"""And so long it may take until it stands in files."""


class DiskTier:
    """Reads ahead of admissions and writes behind commits. Without a disk nothing here does anything.

    Used on the engine thread, which never waits for a file, but for `clear` and `close`; some may be asked on any.
    """

    def __init__(
        self,
        disk: DiskCache | None,
        cache: PrefixCache,
        *,
        sizes: StateSizes,
        sequences: TierSequences,
        new_encoder: NewEncoder,
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
            self._read_ahead = ReadAhead(
                disk, cache, sizes=sizes, sequences=sequences, allowance=allowance, prefill_s=prefill_s, wake=wake
            )
            self._write_behind = WriteBehind(disk, cache, sizes=sizes, new_encoder=new_encoder)

    # Reading.

    def begin(self, request: TierRequest) -> bool:
        """Whether a request that is to be admitted has to wait for what is being read for it."""
        return self._read_ahead is not None and self._read_ahead.begin(request)

    def reach(self, request: TierRequest) -> int:
        """How far the request's prompt could be resumed from the disk."""
        return self._read_ahead.reach(request) if self._read_ahead is not None else 0

    def would_read_to(self, request: TierRequest, *, held: int) -> int:
        """How far the disk would be read for the request, where memory has ``[0, held)``; 0: it would not be."""
        return self._read_ahead.would_read_to(request, held=held) if self._read_ahead is not None else 0

    def advance(self) -> list[str]:
        """Take what was read. Gives the ids of the requests that wait for the disk no more."""
        return self._read_ahead.advance() if self._read_ahead is not None else []

    # Writing.

    def note(self, request: TierRequest, position: int, kind: BoundaryKind) -> None:
        """The path of a request has been stored up to `position`."""
        if self._write_behind is not None:
            self._write_behind.note(request, position, kind)

    def write(self, *, is_closing: bool = False) -> bool:
        """Go on with writing, if something is due; `is_closing`: whatever waits is. Whether there was something."""
        return self._write_behind is not None and self._write_behind.write(is_closing=is_closing)

    def hurry(self) -> None:
        """From now on, wait with nothing that is to be written."""
        if self._write_behind is not None:
            self._write_behind.is_hurried = True

    @property
    def due_in_s(self) -> float | None:
        """When there will be something to write or to give up, unless something comes; None: never."""
        dues = [each.due_in_s for each in (self._read_ahead, self._write_behind) if each is not None]
        return min((due_s for due_s in dues if due_s is not None), default=None)

    # All of it.

    def runs(self, namespace: str) -> list[StoredRun]:
        """See `Backend.stored_runs`. May be asked on any thread."""
        if self._disk is None:
            return []
        root = self._disk.root(namespace)
        return [
            StoredRun(name=key.hex(), parent=None if parent == root else parent.hex(), tokens=tokens)
            for key, parent, tokens in self._disk.runs(namespace)
        ]

    def tree(self, namespace: str) -> DiskTree | None:
        """See `Backend.disk_tree`. May be asked on any thread, like `path_tokens`."""
        return None if self._disk is None else self._disk.tree(namespace)

    def path_tokens(self, namespace: str, key: bytes, span: Span) -> Tokens | None:
        return None if self._disk is None else self._disk.path_tokens(namespace, key, span)

    def read_note(self, namespace: str) -> str | None:
        """See `Backend.read_note`. On any thread but the loop's, like `keep_note`."""
        return None if self._disk is None else self._disk.read_note(namespace)

    def keep_note(self, namespace: str, text: str) -> None:
        if self._disk is not None:
            self._disk.keep_note(namespace, text)

    @property
    def cache(self) -> DiskCache | None:
        """The records themselves; None: nothing is kept on disk."""
        return self._disk

    def reads(self) -> tuple[InspectedRead, ...]:
        """What is being read, for whoever looks."""
        return self._read_ahead.reads() if self._read_ahead is not None else ()

    @property
    def num_unwritten(self) -> int:
        """How many stored paths wait to be written."""
        return self._write_behind.num_due if self._write_behind is not None else 0

    def clear(self, namespace: str | None) -> Future[None] | None:
        """Remove what is on disk: of one namespace, or of all. See `DiskCache.clear`; None: nothing is kept there."""
        if self._disk is None or self._read_ahead is None or self._write_behind is None:
            return None
        self._read_ahead.void(namespace)
        self._write_behind.forget(namespace)
        return self._disk.clear(namespace)

    def close(self) -> None:
        """Write what was stored and is not written yet, as far as a short time allows."""
        if self._disk is None or self._write_behind is None:
            return
        until_s = time.monotonic() + LAST_WRITES_S
        while self._write_behind.due_in_s is not None and time.monotonic() < until_s:
            if self.write(is_closing=True):
                continue
            if self._disk.is_paused():
                break
            time.sleep(0.01)  # The writer is behind.
        self._disk.close(_LAST_FLUSH_S)
        # They refer to the loop, and it to them.
        self._read_ahead = self._write_behind = None

    def stats(self) -> OnDisk | None:
        """What is on disk, None without one. May be asked on any thread."""
        return self._disk.stats() if self._disk is not None else None
