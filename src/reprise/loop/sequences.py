"""The sequences of running requests and the idle ones, within the memory budget that they share with the prefix cache.

A long sequence and the tree share buffers: the tree's segments are spans of them, instead of copies. When its request
ends, such a sequence stays as it is, *idle*, and the next turn of the conversation goes on in it. It is closed, and the
tree gets copies, when something of it is evicted or its room is needed. A path that the tree has copies of beside a
running sequence's own is a *duplicate*, which is given up before anything is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakMethod

from reprise.cache.lookup import Match
from reprise.cache.node import SegmentRef
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.allowance import StepAllowance
from reprise.core.job import Job, Purpose
from reprise.core.tokens import Tokens, own_tokens
from reprise.disk.ports import RestoreTarget
from reprise.engine.payloads import PackedSegment
from reprise.engine.records import RecordSource, RestoringSequence
from reprise.engine.runner import LiveSequence, Runner
from reprise.engine.shared_segment import SharedSegment, copy_out
from reprise.loop.requests import RunningRequest
from reprise.memory import Account, Memory, Reclaimer

INITIAL_DECODE_SLOTS = 256
"""Entries for the answer that are there from the start; more are made room for as they come."""

LARGE_NBYTES = 32 << 20
"""A path of more bytes is read from the disk straight into a sequence."""

_MOST_IDLE = 4
"""How many sequences stay idle. Each has room to grow that nobody else can use."""

_TIGHT = 8
"""When less than this part of the budget is free, no duplicate is kept."""


def initial_decode_slots(job: Job) -> int:
    """For how many entries of its answer a request has room from the start."""
    # One more than is asked for, since decode may run a pass ahead.
    return min(job.max_tokens + 1, INITIAL_DECODE_SLOTS) if job.purpose is Purpose.GENERATE else 0


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """What a sequence holds, or the cache holds twice: positions ``[0, len(tokens))``."""

    tokens: Tokens
    namespace: str


class SequencePool:
    """Starts sequences, ends them, and gives up what is not needed for running. `chunk`: the longest prefill chunk."""

    def __init__(self, runner: Runner, cache: PrefixCache, memory: Memory, *, chunk: int) -> None:
        self.runner = runner
        self.cache = cache
        self.memory = memory
        self._chunk = chunk
        self._idle: dict[LiveSequence, _Path] = {}
        """Oldest first."""
        self._duplicates: dict[LiveSequence, _Path] = {}
        self.is_broken = False
        """Copying broke off in the middle: the tree has segments whose entries nobody holds any more."""
        # Weakly, or two that hold each other would keep the model and all that is stored after the loop has ended.
        close = WeakMethod(self._close_if_idle)

        def close_if_there(sequence: object) -> None:
            here = close()
            assert here is not None, "the pool outlives the cache"
            here(sequence)

        cache.close_idle_with(close_if_there)
        memory.reclaim_from(*self.reclaimers)

    @property
    def reclaimers(self) -> tuple[Reclaimer, ...]:
        """What gives up something of the sequences or the cache, in the order in which it is asked."""
        return self.share_duplicates, self.cache.evict_one, self.close_idle

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def idle(self) -> tuple[LiveSequence, ...]:
        """The idle sequences, oldest first."""
        return tuple(self._idle)

    # Asking.

    def estimate(self, num_prompt: int) -> int:
        """The most bytes of live state that a request with so many prompt tokens takes until it has decoded a while."""
        return self.runner.footprint.live(num_prompt + INITIAL_DECODE_SLOTS, chunk=self._chunk)

    def estimate_to_admit(self, num_prompt: int, resume_at: int) -> int:
        """The same, and what it copies from the cache that cannot be shared."""
        is_shared = resume_at >= self.runner.shares_from
        return self.estimate(num_prompt) + (0 if is_shared else self.runner.footprint.at(resume_at))

    def available(self, running: Iterable[RunningRequest]) -> int | None:
        """Bytes that new requests may take, with all that may be evicted gone; None without a budget.

        What the running ones were promised and have not taken yet is not available.
        """
        memory = self.memory
        if memory.budget is None:
            return None
        promised = sum(
            max(0, self.estimate(len(request.prompt)) - _share(request.live)) for request in running if request.live
        )
        live = memory.nbytes(Account.SEQUENCES) + memory.nbytes(Account.INCOMING)
        taken = live + promised + self.cache.protected_nbytes() + memory.kept_by_others
        return memory.budget - taken + sum(map(self._owned_nbytes, self._duplicates.values()))

    def fits_next_token(self, live: LiveSequence, *, budget: int | None) -> bool:
        """Whether a sequence can have its next token within a budget, with all that is held now."""
        return budget is None or self.runner.growth([live], 2) <= max(0, budget - self.memory.held)

    def fits_draft(self, live: LiveSequence, num: int) -> bool:
        """Whether a pass over `num` tokens fits as things are: a draft is no reason to give anything up."""
        return self.memory.fits(self.runner.growth_to_decode([live], num))

    # Room.

    def measure(self) -> None:
        """Count the buffers anew, and give up what is too much."""
        for live in [live for live in self._idle if not self.runner.is_worth_keeping(live)]:
            # The cache has dropped too much of what it shares for it to be worth its buffers.
            self._close_idle(live)
        self._count()
        available, budget = self.memory.available, self.memory.budget
        if available is not None and budget is not None and available < budget // _TIGHT:
            self.share_duplicates()
        self.memory.reserve(0)

    def reserve_to_prefill(self, lives: Sequence[LiveSequence], num: int) -> bool:
        """Make room for `num` more tokens of each of these sequences, in one pass."""
        return self.memory.reserve(self.runner.growth(lives, num))

    def reserve_to_decode(self, lives: Sequence[LiveSequence]) -> bool:
        """Make room for the next token of each."""
        return self.memory.reserve(self.runner.growth_to_decode(lives))

    def share_duplicates(self) -> bool:
        """Have the tree refer to the buffers of running sequences where it has copies. False if there is none."""
        had_any = len(self._duplicates) > 0
        for live, path in self._duplicates.items():
            refs = self.cache.owned_segments(path.tokens, namespace=path.namespace)
            self.cache.replace(refs, [self.runner.share(live, ref.kind, ref.segment.span) for ref in refs])
        self._duplicates.clear()
        return had_any

    def close_idle(self) -> bool:
        """Close all idle sequences: the tree gets copies of what it needs. False if there is none."""
        had_any = len(self._idle) > 0
        for live in list(self._idle):
            self._close_idle(live)
        return had_any

    def _count(self) -> None:
        # An exception that is being handled may keep shared segments alive that the tree has replaced by copies.
        self.memory.measure(Account.SEQUENCES, max(0, self.runner.live_nbytes))

    # Starting.

    def start(self, match: Match, position: int, *, reserve: int) -> LiveSequence:
        """A sequence at `position` of the matched path, which is leased, that grows to about `reserve`.

        It can run when `restore` has copied what it lacks.
        """
        live = self._reopen(match, position, reserve=reserve)
        if live is not None:
            return live
        path = _Path(match.tokens[:position], match.namespace)
        needed = self.runner.footprint.live(reserve, chunk=self._chunk)
        is_long = position >= self.runner.shares_from
        if self.memory.fits(needed) or (not is_long and self.memory.reserve(needed)):
            live = self.runner.begin()
            self.runner.begin_restore(live, position, reserve=reserve)
            return live
        # A second copy on the way costs less than what would have to be evicted for having the path twice.
        self.memory.reserve(needed - self._owned_nbytes(path))
        live = self.runner.begin()
        self.runner.begin_restore(live, position, reserve=reserve)
        refs = self.cache.owned_segments(path.tokens, namespace=path.namespace)
        if refs:
            self.cache.replace(refs, self.runner.begin_move(live, [(ref.segment.span, _segment(ref)) for ref in refs]))
        return live

    def restore(self, live: LiveSequence, tokens: Tokens, *, namespace: str, allowance: StepAllowance) -> bool:
        """Copy what a sequence lacks of `tokens`, as far as this step may. Whether it can run."""
        restoration = live.restoration
        if restoration is None:
            return True
        # Looked up in each step: others end in between, and what stood in their buffers is elsewhere.
        restore = self.cache.read(self.cache.match(tokens, namespace=namespace), len(tokens))
        while not restoration.is_over and allowance.has_room:
            allowance.take(self.runner.restore_part(live, restore, at_most=allowance.part_nbytes))
        if restoration.is_over and len(tokens) >= self.runner.shares_from and len(live.shared) == 0:
            self._duplicates[live] = _Path(tokens, namespace)
        return restoration.is_over

    def _reopen(self, match: Match, position: int, *, reserve: int) -> LiveSequence | None:
        """The idle sequence that holds the matched path up to `position`, to be restored; None if none does."""
        if not self._idle or position == 0:
            return None
        live = self.cache.sharing_sequence(match, position)
        if not isinstance(live, LiveSequence) or live not in self._idle:
            return None
        path = self._idle[live]
        # What comes behind the position will be overwritten, and may be on somebody else's path.
        self.cache.split_shared(live, path.tokens, namespace=path.namespace, position=position)
        self._copy_shared(live, path, start=position)
        self.runner.begin_restore(live, position, reserve=reserve, keeps_full=True)
        # Only now: if it cannot be taken back to the position, it is idle as before, and can still be closed.
        del self._idle[live]
        return live

    # What is read from the disk.

    def restore_target(self, position: int, num_prompt: int, *, is_whole: bool) -> RecordSource | RestoringSequence:
        """What the records of a path up to `position` go into; `is_whole`: all of the path is read."""
        footprint = self.runner.footprint
        if not is_whole or footprint.full * position <= LARGE_NBYTES:
            return RecordSource()
        # No more room to grow than a sequence may have that waits for its next turn.
        length = min(num_prompt + INITIAL_DECODE_SLOTS, position + max(INITIAL_DECODE_SLOTS, position // 16))
        if not self.memory.reserve(footprint.live(length, chunk=1) + footprint.checkpoint):
            # It takes less to have the cache hold it alone until the request can start.
            return RecordSource()
        return RestoringSequence(self.runner, length=length)

    def keep_restored(self, target: RestoreTarget, tokens: Tokens, *, namespace: str) -> None:
        """What was committed from the target waits for its request like one whose next turn is to come."""
        if isinstance(target, RestoringSequence):
            self.end(target.live, tokens, namespace=namespace)

    # Ending.

    def end(self, live: LiveSequence, tokens: Tokens, *, namespace: str) -> None:
        """A sequence that stands behind `tokens` has ended: it stays idle, or is stopped where that is not worth it."""
        self._duplicates.pop(live, None)
        if live.moving is not None:
            self._close(live, _Path(tokens, namespace))
            return
        if not self.runner.is_worth_keeping(live):
            self._copy_shared(live, _Path(tokens, namespace))
            self.runner.stop(live)
            return
        self.runner.keep_idle(live)
        self._idle[live] = _Path(own_tokens(tokens), namespace)
        while len(self._idle) > _MOST_IDLE:
            self._close_idle(next(iter(self._idle)))

    def discard(self, live: LiveSequence, tokens: Tokens, *, namespace: str) -> None:
        """The state of a running sequence is not to be trusted: only what it shared before is kept, as copies."""
        # Before anybody has it share what the tree holds of its path: nobody could read that.
        self._duplicates.pop(live, None)
        try:
            self._copy_shared(live, _Path(tokens, namespace))
        finally:
            self.runner.drop(live)

    def drop(self, live: LiveSequence) -> None:
        """Forget a sequence that could not be ended."""
        self._duplicates.pop(live, None)
        self.runner.drop(live)

    def reset(self) -> None:
        """Stop all idle sequences, after the cache has dropped what they shared."""
        for live in self._idle:
            self.runner.stop(live)
        self._idle.clear()
        self._duplicates.clear()
        self.is_broken = False
        self._count()

    def _close_if_idle(self, sequence: object) -> None:
        # What a running sequence shares behind its lease may be dropped: copies of that are of no use to anybody.
        if isinstance(sequence, LiveSequence) and sequence in self._idle:
            self._close_idle(sequence)

    def _close_idle(self, live: LiveSequence) -> None:
        self._close(live, self._idle.pop(live))

    def _close(self, live: LiveSequence, path: _Path) -> None:
        """Replace what an idle sequence shares, or one that has not taken over all of it, by copies, and stop it."""
        refs = self.cache.shared_segments(live, path.tokens, namespace=path.namespace)
        try:
            self.cache.replace(refs, copy_out(_shared_of(refs)))
        except Exception:
            self.is_broken = True
            raise
        finally:
            self.runner.stop(live)
        self._count()

    def _copy_shared(self, live: LiveSequence, path: _Path, *, start: int = 0) -> None:
        """Replace what a sequence shares of ``[start, …)`` by copies."""
        if len(live.shared) > 0:
            refs = self.cache.shared_segments(live, path.tokens, namespace=path.namespace, start=start)
            self.cache.replace(refs, [segment.owned() for segment in _shared_of(refs)])

    def _owned_nbytes(self, path: _Path) -> int:
        # The references are not to be kept: who holds one holds its entries, too.
        refs = self.cache.owned_segments(path.tokens, namespace=path.namespace)
        return sum(ref.segment.nbytes for ref in refs)


def _shared_of(refs: Sequence[SegmentRef]) -> list[SharedSegment]:
    payloads = [ref.segment.payload for ref in refs]
    return [payload for payload in payloads if isinstance(payload, SharedSegment)]


def _segment(ref: SegmentRef) -> PackedSegment:
    payload = ref.segment.payload
    assert isinstance(payload, PackedSegment), ref
    return payload


def _share(live: LiveSequence) -> int:
    """What one sequence takes of the buffers it shares with others, and what it is taking over."""
    moving = live.moving.nbytes if live.moving is not None else 0
    return live.rows.nbytes // live.rows.num_rows + moving
