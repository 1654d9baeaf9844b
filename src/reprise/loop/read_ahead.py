"""Loads prefixes from disk before their requests are admitted, while other requests run.

A request whose prompt matches further on disk than in memory is not admitted until its records have been read. They are
committed to the prefix cache like computed state, within the same budget, and the request resumes from the cache.

Each step decodes only as much as the `StepAllowance` permits, so other streams are not stalled. A long path is copied
straight into the buffers of a sequence, which the cache shares and the request continues in, so it is copied once. What
extends a path in memory is committed in the parts in which it was read: joining them would copy all of it in one step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from reprise.cache.lookup import Match
from reprise.cache.prefix_cache import Committed
from reprise.core.allowance import StepAllowance
from reprise.core.failpoints import Failpoint, reach
from reprise.core.inspection import InspectedRead
from reprise.core.kinds import Full
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens
from reprise.disk.records.record import DiskMatch
from reprise.disk.store.cache import DiskCache, Fetch
from reprise.engine.running.records import RecordSource, RestoringSequence
from reprise.loop.requests import RunningRequest
from reprise.loop.sequences import SequencePool
from reprise.memory import Account

log = logging.getLogger(__name__)

MIN_TOKENS = 64
"""A gain of fewer tokens is not worth a read: they are computed as fast."""

_MOST_LOADS = 3
"""Reads per request, in case what was read is evicted again before it is admitted."""

COMMITTED_AT_ONCE = 32 << 20
"""Where every position is resumable, what was read is committed whenever it reaches this many bytes."""

STALLED_S = 15.0
"""After this long without a record the disk counts as hung: the read is abandoned and the prompt computed."""

_REST_S = 60.0
"""How long nothing is read after that."""

LEAST_READ_S = 0.25
"""What is read sooner is read, however fast it would be computed: others compute meanwhile."""

MEASURED_EVERY_S = 30.0
"""While reading is slower than computing, a little is read so often to see whether that is still so. Nobody waits."""

SCAN_TIMEOUT_S = 1.0
"""A request waits at most this long for a scan for other servers' records."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _AwaitedScan:
    """A request that waits for a scan to end, until `until_s` at the latest."""

    request: RunningRequest
    ended: Future[None]
    until_s: float


@dataclass(slots=True, eq=False)
class _PathRead:
    """The records of a path being read into the cache, and the requests that wait for them."""

    tokens: Tokens
    namespace: str
    first_key: bytes
    fetch: Fetch
    target: RecordSource | RestoringSequence
    needed: int
    """Bytes required to admit the first request."""
    progress_s: float
    """When it last made progress (monotonic)."""
    requests: list[RunningRequest] = field(default_factory=list[RunningRequest])
    next: list[RunningRequest] = field(default_factory=list[RunningRequest])
    """Requests whose own reads do not fit in memory beside this one: they wait until it ends."""
    is_void: bool = False
    """The cache was cleared since: discard what is read."""
    is_finished: bool = False
    """`finish` was called on the target."""
    is_kept: bool = False
    """The loop owns the target's sequence now."""


class ReadAhead:
    """The reads for waiting requests. Used on the engine thread; never waits for a file. See `DiskTier`."""

    def __init__(
        self,
        disk: DiskCache,
        sequences: SequencePool,
        *,
        allowance: StepAllowance,
        prefill_s: Callable[[int, int], float | None],
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called on another thread when something was read: `advance` has something to do then."""
        self._disk = disk
        self._cache = sequences.cache
        self._footprint = sequences.runner.footprint
        self._sequences = sequences
        self._allowance = allowance
        self._prefill_s = prefill_s
        self._wake = wake
        self._measured_s = -float("inf")
        self._reads: list[_PathRead] = []
        self._awaited_scans: list[_AwaitedScan] = []
        self._admissible: list[str] = []
        """Ids of the requests whose reads have ended since the last `advance`."""
        self._suspended_until_s = 0.0

    def reach(self, request: RunningRequest) -> int:
        found = self._on_disk(request)
        return found.position if found is not None else 0

    def _on_disk(self, request: RunningRequest) -> DiskMatch | None:
        prompt = request.prompt
        return self._disk.find(prompt.tokens, namespace=request.namespace, limit=request.end, spans=prompt.spans)

    def begin(self, request: RunningRequest) -> bool:
        tokens, namespace = request.prompt.tokens, request.namespace
        held, match = self._cache.lookup(tokens, request.end, namespace=namespace, spans=request.prompt.spans)
        if self._waits_for_scan(request, held=held):
            return True
        found = self._find(request, held=held)
        if found is None:
            return False
        keys = self._keys_to_read(found, match)
        needed = self._needed(request, found)
        read = next((read for read in self._reads if read.first_key == keys[0] and not read.is_void), None)
        if read is not None:
            read.requests.append(request)
        elif not self._is_worth_reading(found, keys, held=held):
            request.reading.not_read_to = found.position
            self._measure(keys)
            return False
        elif self._may_fit(found.position, needed):
            request.reading.num_loads += 1
            self._disk.touch(found)
            fetch = self._disk.fetch(replace(found, keys=keys), self._wake)
            target = self._sequences.restore_target(found.position, len(request.prompt), is_whole=keys == found.keys)
            read = _PathRead(tokens[: found.position], namespace, keys[0], fetch, target, needed, time.monotonic())
            read.requests.append(request)
            self._reads.append(read)
        elif self._reads:
            self._reads[-1].next.append(request)
        else:
            return False
        request.reading.is_loading = True
        return True

    def _keys_to_read(self, found: DiskMatch, match: Match) -> tuple[bytes, ...]:
        """The records that memory lacks, where it has this match."""
        known = found.position // self._disk.block
        if any(isinstance(kind, Full) for kind in self._cache.layout.kinds):
            # With full attention, the blocks below the match are in memory. Without it, blocks hold no entries.
            known = min(known, match.length // self._disk.block)
        return found.keys[known:]

    def _is_worth_reading(self, found: DiskMatch, keys: Collection[bytes], *, held: int) -> bool:
        """Whether reading takes no longer than computing what memory lacks, as far as both were measured."""
        reading_s, computing_s = self._disk.read_s(keys), self._prefill_s(held, found.position)
        return reading_s is None or computing_s is None or reading_s <= max(computing_s, LEAST_READ_S)

    def _measure(self, keys: Sequence[bytes]) -> None:
        """Have the first of these records read for their time alone, unless that was just done."""
        now_s = time.monotonic()
        if now_s - self._measured_s >= MEASURED_EVERY_S:
            self._measured_s = now_s
            self._disk.measure(keys)

    def _waits_for_scan(self, request: RunningRequest, *, held: int) -> bool:
        """Whether to scan for other servers' records first, since the prompt may continue a chat of theirs."""
        if not self._disk.is_shared or request.reading.has_awaited_scan:
            return False
        known = max(held, self.reach(request))
        unknown = request.end - known
        # If this server knows most of the chat, it served the last turn too.
        if unknown < MIN_TOKENS or unknown < min(known, self._disk.block):
            return False
        request.reading.has_awaited_scan = True
        scan = _AwaitedScan(request=request, ended=self._disk.scan(), until_s=time.monotonic() + SCAN_TIMEOUT_S)
        self._awaited_scans.append(scan)
        scan.ended.add_done_callback(lambda _: self._wake())
        request.reading.is_loading = True
        return True

    def would_read_to(self, request: RunningRequest, *, held: int) -> int:
        found = self._find(request, held=held)
        if found is None:
            return 0
        keys = self._keys_to_read(found, self._cache.match(request.prompt.tokens, namespace=request.namespace))
        if not self._is_worth_reading(found, keys, held=held):
            return 0
        needed = self._needed(request, found)
        return found.position if self._may_fit(found.position, needed) else 0

    def _needed(self, request: RunningRequest, found: DiskMatch) -> int:
        prompt = request.prompt
        return self._sequences.estimate_to_admit(len(prompt), found.position, images=prompt.images)

    def _find(self, request: RunningRequest, *, held: int) -> DiskMatch | None:
        """The longest match of the prompt on disk, if it is worth reading."""
        is_suspended = time.monotonic() < self._suspended_until_s
        if request.reading.num_loads >= _MOST_LOADS or request.end - held < MIN_TOKENS or is_suspended:
            return None
        found = self._on_disk(request)
        return found if found is not None and found.position - held >= MIN_TOKENS else None

    def _may_fit(self, position: int, needed: int) -> bool:
        """Whether memory fits a path of `position` tokens or, beside other reads, all their requests (`needed` bytes).

        Otherwise what was read for one request would be evicted for another before it is used.
        """
        free = self._cache.memory.available
        if free is None:
            return True
        # The parts of other reads already in memory are not free, but included in their `needed`: add them back.
        room = free + self._cache.memory.nbytes(Account.INCOMING) + self._cache.nbytes - self._cache.protected_nbytes()
        room += sum(read.target.buffer_nbytes for read in self._reads) + self._cache.memory.evictable_from_others
        if not self._reads:
            return self._footprint.at(position) <= room
        return sum(read.needed for read in self._reads) + needed <= room

    @property
    def due_in_s(self) -> float | None:
        """Seconds until there is something to decode or to time out; None if nothing is being read."""
        if any(read.fetch.has_more or read.target.is_busy for read in self._reads):
            return 0.0
        dues = [read.progress_s + STALLED_S for read in self._reads] + [scan.until_s for scan in self._awaited_scans]
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    def advance(self) -> list[str]:
        """Decode what was read, within the step's allowance, and commit what is complete.

        Returns the ids of the requests that no longer wait for the disk.
        """
        reach(Failpoint.DISK_ADVANCE)
        for scan in list(self._awaited_scans):
            if scan.ended.done() or time.monotonic() >= scan.until_s:
                self._awaited_scans.remove(scan)
                self._admit([scan.request])
        for read in list(self._reads):
            if read.is_void or all(request.has_ended for request in read.requests):
                self._end(read)
                continue
            try:
                self._take(read)
            except Exception:
                log.exception("what was read from disk could not be used; it will be computed")
                self._end(read)
        admissible, self._admissible = self._admissible, []
        return admissible

    def _take(self, read: _PathRead) -> None:
        # Read before the records are taken: records that arrive in between are left for the next step.
        is_done = read.fetch.is_done
        taken = self._decode(read)
        now_s = time.monotonic()
        has_more = read.fetch.has_more
        if is_done and not has_more and not read.target.is_busy and not read.is_finished:
            read.is_finished = True
            self._finish(read)
            self._decode(read)
        self._count()
        if is_done and not has_more and not read.target.is_busy:
            self._commit(read)
            self._end(read)
        elif taken > 0 or has_more or read.target.is_busy:
            # Records for which this step had no allowance left are progress all the same.
            read.progress_s = now_s
            is_large = read.target.records.nbytes >= COMMITTED_AT_ONCE and not read.target.is_busy
            if self._cache.layout.resumes_anywhere and is_large:
                self._commit_part(read)
        elif now_s - read.progress_s >= STALLED_S:
            log.warning(
                "The disk cache does not respond: nothing is read from disk for a while; prefixes are computed."
            )
            self._suspended_until_s = now_s + _REST_S
            self._end(read)

    def _decode(self, read: _PathRead) -> int:
        """Decode what was read, within the step's allowance; returns the bytes."""
        taken = 0
        while self._allowance.has_room:
            if read.target.is_busy:
                nbytes = read.target.work()
                self._allowance.take(nbytes)
                taken += max(1, nbytes)
                continue
            records = read.fetch.take(1)
            if not records:
                break
            read.target.records.add(records[0])
        return taken

    def reads(self) -> tuple[InspectedRead, ...]:
        return tuple(map(self._inspected, self._reads))

    def _inspected(self, read: _PathRead) -> InspectedRead:
        match = self._cache.match(read.tokens, namespace=read.namespace)
        return InspectedRead(
            namespace=read.namespace,
            node=match.walk.last.serial if match.length > 0 else None,
            position=len(read.tokens),
            nbytes=read.target.records.nbytes + read.target.buffer_nbytes,
            request_ids=tuple(request.id for request in (*read.requests, *read.next)),
        )

    def void(self, namespace: str | None) -> None:
        """Discard the current reads of a namespace (None: of all) instead of committing them."""
        for read in self._reads:
            read.is_void |= namespace in (None, read.namespace)

    def _commit_part(self, read: _PathRead) -> None:
        """Commit what has been read so far, so that the end of the read does not join too much in one step."""
        position = min(read.target.records.stop, len(read.tokens))
        committed = self._commit_to(read, position, BoundaryKind.INTERVAL)
        self._count()
        if committed is not None and not committed.is_resumable:
            self._end(read)

    def _end_of(self, read: _PathRead) -> int:
        """The furthest position that can be resumed from what has been read."""
        if not read.fetch.failed:
            return len(read.tokens)
        # Records before the failed one are usable if every position is resumable.
        return min(read.target.records.stop, len(read.tokens)) if self._cache.layout.resumes_anywhere else 0

    def _finish(self, read: _PathRead) -> None:
        try:
            read.target.finish(self._end_of(read))
        except LookupError as error:
            log.debug("the records of a path are incomplete: %s", error)
            read.is_void = True

    def _commit(self, read: _PathRead) -> None:
        """Commit everything that was read."""
        position, kind = self._end_of(read), BoundaryKind.INTERVAL
        if not read.fetch.failed and read.target.records.kind is not None:
            kind = read.target.records.kind
        if not read.is_void and self._commit_to(read, position, kind) is not None:
            read.is_kept = True
            if isinstance(read.target, RestoringSequence):
                # Its sequence stays idle, for the request to reopen.
                self._sequences.end(read.target.live, read.tokens[:position], namespace=read.namespace)

    def _commit_to(self, read: _PathRead, position: int, kind: BoundaryKind) -> Committed | None:
        """Commit what was read up to `position`; None if nothing was committed."""
        tokens = read.tokens[:position]
        if self._cache.lookup(tokens, position, namespace=read.namespace).position == position:
            return None
        self._count(but=read)  # The commit charges this read's bytes itself.
        waiting = [request for request in (*read.requests, *read.next) if request.is_waiting]
        before = [self._resume_at(request) for request in waiting]
        try:
            source, seams = read.target.source(position), read.target.records.seams
            committed = self._cache.commit(
                tokens,
                source,
                kind=kind,
                namespace=read.namespace,
                overrides_admission=True,
                seams=seams,
            )
        except LookupError as error:
            log.debug("entries that were not read, since memory had them, are gone: %s", error)
            return None
        for request, held in zip(waiting, before, strict=True):
            request.reading.num_loaded += max(0, self._resume_at(request) - held)
        if not committed.is_resumable:
            # No room even after eviction: another read would end the same way.
            for request in read.requests:
                request.reading.num_loads = _MOST_LOADS
        return committed

    def _resume_at(self, request: RunningRequest) -> int:
        prompt = request.prompt
        found = self._cache.lookup(prompt.tokens, request.end, namespace=request.namespace, spans=prompt.spans)
        return found.position

    def _end(self, read: _PathRead) -> None:
        read.fetch.cancel()
        self._reads.remove(read)
        if not read.is_kept:
            read.target.give_up()
        self._admit([*read.requests, *read.next])
        self._count()

    def _admit(self, requests: list[RunningRequest]) -> None:
        """Let the requests that still wait be admitted without the disk."""
        waiting = [request for request in requests if request.is_waiting]
        for request in waiting:
            request.reading.is_loading = False
        self._admissible += [request.id for request in waiting]

    def _count(self, *, but: _PathRead | None = None) -> None:
        """Charge what was read and is not committed, except `but`, to `Account.INCOMING`."""
        nbytes = sum(read.target.records.nbytes for read in self._reads if read is not but)
        self._cache.memory.measure(Account.INCOMING, nbytes)
        self._sequences.measure()

    def check(self) -> None:
        self._cache.memory.check({Account.INCOMING: sum(read.target.records.nbytes for read in self._reads)})
