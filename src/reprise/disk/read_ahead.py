"""Reading from the disk what the memory has no more, while others go on.

A request whose prompt goes further on disk than in memory is not admitted until its records have been read. What was
read is committed like anything that was computed, under the same budget, and the request resumes from the cache.

A step takes over no more than keeps it within a part of the longest gap that other streams are to have. A large path is
copied straight into the buffers of a sequence, which the cache then shares and the request goes on in: so it is never
copied as a whole, neither into the cache nor out of it. What joins a part in memory is committed in the parts in which
it was read: joining them would be a copy of all of it in one step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from reprise.cache.lookup import Match
from reprise.cache.prefix_cache import Committed, PrefixCache
from reprise.core.allowance import StepAllowance
from reprise.core.inspection import InspectedRead
from reprise.core.kinds import Full
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens
from reprise.disk.cache import DiskCache, Fetch
from reprise.disk.ports import RestoreTarget, StateSizes, TierRequest, TierSequences
from reprise.disk.record import DiskMatch
from reprise.memory import Account

log = logging.getLogger(__name__)

WORTH = 64
"""Tokens. Fewer are computed as soon as they are read."""

_MOST_LOADS = 3
"""How often one request is sent to the disk, should what was read be gone again before it is admitted."""

COMMITTED_AT_ONCE = 32 << 20
"""Bytes. Where every position is resumable, what was read is committed whenever it is about so much."""

STALLED_S = 15.0
"""When no record has come for so long the disk hangs: what was to be read is computed."""

_REST_S = 60.0
"""And nothing is read for so long."""

LEAST_READ_S = 0.25
"""What is read sooner is read, however fast it would be computed: others compute meanwhile."""

MEASURED_EVERY_S = 30.0
"""While reading is slower than computing, one record is read so often to see whether that is still so. Nobody waits."""

LOOKED_S = 1.0
"""For so long at most a request waits until what other servers wrote has been taken up."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _AwaitedLook:
    """A request that waits until the look of that number is over."""

    request: TierRequest
    number: int
    until_s: float


@dataclass(slots=True, eq=False)
class _PathRead:
    """The records of a path on their way into the cache, and the requests that wait for them."""

    tokens: Tokens
    namespace: str
    first_key: bytes
    fetch: Fetch
    target: RestoreTarget
    needed: int
    """Bytes with which the first of them can be admitted."""
    heard_s: float
    """When something came last."""
    requests: list[TierRequest] = field(default_factory=list[TierRequest])
    next: list[TierRequest] = field(default_factory=list[TierRequest])
    """Those for which there is no room beside it."""
    is_void: bool = False
    """The cache was cleared meanwhile: what is read is not to come back."""
    is_finished: bool = False
    """The target has all that it gets."""
    is_kept: bool = False
    """The target's sequence is the loop's now."""


class ReadAhead:
    """What is being read for requests that wait. Used on the engine thread, which never waits for a file."""

    def __init__(
        self,
        disk: DiskCache,
        cache: PrefixCache,
        *,
        sizes: StateSizes,
        sequences: TierSequences,
        allowance: StepAllowance,
        prefill_s: Callable[[int, int], float | None],
        wake: Callable[[], None],
    ) -> None:
        """`prefill_s`: see `DiskTier`.

        `wake` is called on another thread when something was read: `advance` has something to do then.
        """
        self._disk = disk
        self._cache = cache
        self._sizes = sizes
        self._sequences = sequences
        self._allowance = allowance
        self._prefill_s = prefill_s
        self._wake = wake
        self._measured_s = -float("inf")
        self._reads: list[_PathRead] = []
        self._looks: list[_AwaitedLook] = []
        self._admissible: list[str] = []
        """Requests whose reading has ended since the loop asked last."""
        self._rests_until_s = 0.0

    def reach(self, request: TierRequest) -> int:
        """How far the request's prompt could be resumed from the disk."""
        found = self._disk.find(request.prompt.tokens, namespace=request.namespace, limit=request.end)
        return found.position if found is not None else 0

    def begin(self, request: TierRequest) -> bool:
        """Whether a request that is to be admitted has to wait for what is being read for it."""
        tokens, namespace = request.prompt.tokens, request.namespace
        match = self._cache.match(tokens, namespace=namespace)
        held = self._cache.resume_at(match, limit=request.end)
        if self._waits_for_look(request, held=held):
            return True
        found = self._find(request, held=held)
        if found is None:
            return False
        keys = self._keys_to_read(found, match)
        needed = self._sequences.estimate_to_admit(len(request.prompt), found.position)
        read = next((read for read in self._reads if read.first_key == keys[0] and not read.is_void), None)
        if read is not None:
            read.requests.append(request)
        elif not self._is_worth_reading(found, keys, held=held):
            request.not_read_to = found.position
            self._measure(keys[0])
            return False
        elif self._may_fit(found.position, needed):
            request.num_loads += 1
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
        request.set_loading(is_loading=True)
        return True

    def _keys_to_read(self, found: DiskMatch, match: Match) -> tuple[bytes, ...]:
        """The records that memory lacks, where it has this match."""
        known = found.position // self._disk.block
        if any(isinstance(kind, Full) for kind in self._cache.layout.kinds):
            # Full attention is whole on every path; blocks of models without it say only that the path is there.
            known = min(known, match.length // self._disk.block)
        return found.keys[known:]

    def _is_worth_reading(self, found: DiskMatch, keys: Collection[bytes], *, held: int) -> bool:
        """Whether reading takes no longer than computing what memory lacks, as far as both were measured."""
        reading_s, computing_s = self._disk.read_s(keys), self._prefill_s(held, found.position)
        return reading_s is None or computing_s is None or reading_s <= max(computing_s, LEAST_READ_S)

    def _measure(self, key: bytes) -> None:
        """Have a record read for its time alone, unless that was just done."""
        now_s = time.monotonic()
        if now_s - self._measured_s >= MEASURED_EVERY_S:
            self._measured_s = now_s
            self._disk.measure(key)

    def _waits_for_look(self, request: TierRequest, *, held: int) -> bool:
        """Whether what other servers wrote is taken up first, since the prompt could be one of their chats."""
        if not self._disk.is_shared or request.has_looked:
            return False
        known = max(held, self.reach(request))
        unknown = request.end - known
        # A server where most of a chat is known had its last turn, too.
        if unknown < WORTH or unknown < min(known, self._disk.block):
            return False
        request.has_looked = True
        until_s = time.monotonic() + LOOKED_S
        self._looks.append(_AwaitedLook(request=request, number=self._disk.look(self._wake), until_s=until_s))
        request.set_loading(is_loading=True)
        return True

    def would_read_to(self, request: TierRequest, *, held: int) -> int:
        """The position to which `begin` would have the disk read, where memory has ``[0, held)``; 0: not at all."""
        found = self._find(request, held=held)
        if found is None:
            return 0
        keys = self._keys_to_read(found, self._cache.match(request.prompt.tokens, namespace=request.namespace))
        if not self._is_worth_reading(found, keys, held=held):
            return 0
        needed = self._sequences.estimate_to_admit(len(request.prompt), found.position)
        return found.position if self._may_fit(found.position, needed) else 0

    def _find(self, request: TierRequest, *, held: int) -> DiskMatch | None:
        """What the disk has of the prompt, if that is worth reading."""
        is_resting = time.monotonic() < self._rests_until_s
        if request.num_loads >= _MOST_LOADS or request.end - held < WORTH or is_resting:
            return None
        found = self._disk.find(request.prompt.tokens, namespace=request.namespace, limit=request.end)
        return found if found is not None and found.position - held >= WORTH else None

    def _may_fit(self, position: int, needed: int) -> bool:
        """Whether there is room for a path of that length; beside others, for all to be admitted (`needed` bytes).

        Else what was read for one would be evicted for another before it is used.
        """
        free = self._cache.memory.available
        if free is None:
            return True
        # What has come of the others is not free any more, and counted with the rest of them.
        room = free + self._cache.memory.nbytes(Account.INCOMING) + self._cache.nbytes - self._cache.protected_nbytes()
        room += sum(read.target.buffer_nbytes for read in self._reads) + self._cache.memory.evictable_from_others
        if not self._reads:
            return self._sizes.at(position) <= room
        return sum(read.needed for read in self._reads) + needed <= room

    @property
    def due_in_s(self) -> float | None:
        """When there is something to decode, or what is being read is given up; None: nothing is being read."""
        if any(read.fetch.has_more or read.target.is_busy for read in self._reads):
            return 0.0
        dues = [read.heard_s + STALLED_S for read in self._reads] + [look.until_s for look in self._looks]
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    def advance(self) -> list[str]:
        """Decode what was read, as far as this step may, and commit what is complete.

        Gives the ids of the requests that wait for the disk no more.
        """
        for look in list(self._looks):
            if self._disk.has_looked(look.number) or time.monotonic() >= look.until_s:
                self._looks.remove(look)
                self._admit([look.request])
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
        # Asked for before the records are taken: those that come in between are for the next time.
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
            # What others leave no time for in this step is there all the same.
            read.heard_s = now_s
            is_large = read.target.nbytes >= COMMITTED_AT_ONCE and not read.target.is_busy
            if self._cache.layout.resumes_anywhere and is_large:
                self._commit_part(read)
        elif now_s - read.heard_s >= STALLED_S:
            log.warning(
                "The disk cache does not respond: nothing is read from disk for a while; prefixes are computed."
            )
            self._rests_until_s = now_s + _REST_S
            self._end(read)

    def _decode(self, read: _PathRead) -> int:
        """Decode what was read, as far as this step may; gives the bytes."""
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
            read.target.add(records[0])
        return taken

    def reads(self) -> tuple[InspectedRead, ...]:
        """What is being read, for whoever looks."""
        return tuple(map(self._inspected, self._reads))

    def _inspected(self, read: _PathRead) -> InspectedRead:
        match = self._cache.match(read.tokens, namespace=read.namespace)
        return InspectedRead(
            namespace=read.namespace,
            node=match.walk.last.serial if match.length > 0 else None,
            position=len(read.tokens),
            nbytes=read.target.nbytes + read.target.buffer_nbytes,
            request_ids=tuple(request.id for request in (*read.requests, *read.next)),
        )

    def void(self, namespace: str | None) -> None:
        """Nothing of this namespace (None: of any) that is being read now is to get into the cache."""
        for read in self._reads:
            read.is_void |= namespace in (None, read.namespace)

    def _commit_part(self, read: _PathRead) -> None:
        """Commit what has come so far, so that the end of the read joins no more than one step may."""
        position = min(read.target.stop, len(read.tokens))
        committed = self._commit_to(read, position, BoundaryKind.INTERVAL)
        self._count()
        if committed is not None and not committed.is_resumable:
            self._end(read)

    def _end_of(self, read: _PathRead) -> int:
        """How far what has come can be resumed."""
        if not read.fetch.failed:
            return len(read.tokens)
        # What came before it is as good as ever where every position is resumable.
        return min(read.target.stop, len(read.tokens)) if self._cache.layout.resumes_anywhere else 0

    def _finish(self, read: _PathRead) -> None:
        try:
            read.target.finish(self._end_of(read))
        except LookupError as error:
            log.debug("the records of a path are incomplete: %s", error)
            read.is_void = True

    def _commit(self, read: _PathRead) -> None:
        """Commit all that has come."""
        position, kind = self._end_of(read), BoundaryKind.INTERVAL
        if not read.fetch.failed and read.target.kind is not None:
            kind = read.target.kind
        if not read.is_void and self._commit_to(read, position, kind) is not None:
            read.is_kept = True
            self._sequences.keep_restored(read.target, read.tokens[:position], namespace=read.namespace)

    def _commit_to(self, read: _PathRead, position: int, kind: BoundaryKind) -> Committed | None:
        """Commit what was read up to `position`; None if nothing was taken from the target."""
        tokens = read.tokens[:position]
        match = self._cache.match(tokens, namespace=read.namespace)
        if self._cache.resume_at(match, limit=position) == position:
            return None
        self._count(but=read)  # The commit counts what it takes from here.
        waiting = [request for request in (*read.requests, *read.next) if request.is_waiting]
        before = [self._resume_at(request) for request in waiting]
        try:
            source, seams = read.target.source(position), read.target.seams
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
            request.loaded += max(0, self._resume_at(request) - held)
        if not committed.is_resumable:
            # There was no room, whatever could be evicted: there will be none the next time.
            for request in read.requests:
                request.num_loads = _MOST_LOADS
        return committed

    def _resume_at(self, request: TierRequest) -> int:
        match = self._cache.match(request.prompt.tokens, namespace=request.namespace)
        return self._cache.resume_at(match, limit=request.end)

    def _end(self, read: _PathRead) -> None:
        read.fetch.cancel()
        self._reads.remove(read)
        if not read.is_kept:
            read.target.give_up()
        self._admit([*read.requests, *read.next])
        self._count()

    def _admit(self, requests: list[TierRequest]) -> None:
        """Those that still wait have the disk behind them."""
        waiting = [request for request in requests if request.is_waiting]
        for request in waiting:
            request.set_loading(is_loading=False)
        self._admissible += [request.id for request in waiting]

    def _count(self, *, but: _PathRead | None = None) -> None:
        """What was read and is not in the cache yet counts like the buffers of running requests."""
        nbytes = sum(read.target.nbytes for read in self._reads if read is not but)
        self._cache.memory.measure(Account.INCOMING, nbytes)
        self._sequences.measure()
