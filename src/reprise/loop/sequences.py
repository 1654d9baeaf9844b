"""The running and idle sequences, within the memory budget that they share with the prefix cache.

A long sequence shares its buffers with the tree, whose segments are spans of them rather than copies. When its request
ends, it stays *idle*, and the next turn of the conversation continues in it. It is closed, and the tree gets copies,
when any of its entries are evicted or its memory is needed. A path of which both the tree and a running sequence have a
copy is a *duplicate*; duplicates are freed before anything is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakMethod

from reprise.cache.lookup import Match, sharing_sequence
from reprise.cache.node import SegmentRef
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.allowance import StepAllowance
from reprise.core.failpoints import Failpoint, reach
from reprise.core.images import PromptImage
from reprise.core.job import Job, Purpose
from reprise.core.tokens import Span, Tokens, own_tokens
from reprise.engine.running.live_sequence import LiveSequence, SharedSegment
from reprise.engine.running.records import RecordSource, RestoringSequence
from reprise.engine.running.runner import Runner
from reprise.engine.states.payloads import PackedSegment
from reprise.loop.requests import RunningRequest
from reprise.memory import Account, Memory, Reclaimer

INITIAL_DECODE_SLOTS = 256
"""Entries for the answer that are allocated at the start; more are allocated as needed."""

SEGMENT_NBYTES = 32 << 20
"""The most bytes of a stored segment, which cutting or joining copies in one step."""

_COMPACT_ENTRIES = 8192
"""The most entries joined per step, so that others are not delayed."""

LARGE_NBYTES = 32 << 20
"""Paths of more bytes are read from disk straight into a sequence."""

_MOST_IDLE = 4
"""How many sequences stay idle. Each has spare capacity that is otherwise unused."""

_TIGHT = 8
"""When less than this fraction (1/8) of the budget is free, no duplicates are kept."""


def initial_decode_slots(job: Job) -> int:
    """The number of entries allocated for a request's answer at the start."""
    # One more than requested, since decode may run a pass ahead.
    return min(job.max_tokens + 1, INITIAL_DECODE_SLOTS) if job.purpose is Purpose.GENERATE else 0


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """The path ``[0, len(tokens))`` of an idle sequence or a duplicate."""

    tokens: Tokens
    namespace: str


class SequencePool:
    """Starts, restores and ends sequences, and frees memory for them. `chunk`: the longest prefill chunk."""

    def __init__(self, runner: Runner, cache: PrefixCache, memory: Memory, *, chunk: int) -> None:
        self.runner = runner
        self.cache = cache
        self._tree = cache.tree
        self.memory = memory
        self._chunk = chunk
        largest = max(runner.footprint.by_kind.values(), default=1)
        self.max_compacted = max(1, min(_COMPACT_ENTRIES, SEGMENT_NBYTES // largest))
        """How many entries the cache may join in one step."""
        self._idle: dict[LiveSequence, _Path] = {}
        """Oldest first."""
        self._duplicates: dict[LiveSequence, _Path] = {}
        self.is_broken = False
        """Closing a sequence failed halfway, so the tree has segments without entries: reset the cache."""
        # Weakly: a reference cycle would keep the model and the cache alive after the loop has ended.
        close = WeakMethod(self._close_if_idle)

        def close_if_there(sequence: object) -> None:
            here = close()
            assert here is not None, "the pool outlives the cache"
            here(sequence)

        cache.close_idle_with(close_if_there)
        memory.reclaim_from(*self.reclaimers)

    @property
    def reclaimers(self) -> tuple[Reclaimer, ...]:
        """What frees memory of sequences and cache, in order."""
        return self.share_duplicates, self.cache.evict_one, self.close_idle

    @property
    def idle(self) -> tuple[LiveSequence, ...]:
        """The idle sequences, oldest first."""
        return tuple(self._idle)

    # Estimates.

    def estimate(self, num_prompt: int, *, images: Iterable[Span] = ()) -> int:
        """Upper bound of the live state of a request with `num_prompt` tokens, including the start of its answer.

        `images`: in its prompt. Where a pass must hold one whole, a chunk may be longer than others.
        """
        whole = images if self.runner.loaded.blueprint.whole_images else ()
        chunk = max((self._chunk, *map(len, whole)))
        return self.runner.most_live_nbytes(num_prompt + INITIAL_DECODE_SLOTS, chunk=chunk)

    def estimate_to_admit(self, num_prompt: int, resume_at: int, *, images: Sequence[PromptImage] = ()) -> int:
        """Like `estimate`, plus what the request copies from the cache and cannot share, and features of its images."""
        is_shared = resume_at >= self.runner.shares_from
        copied = 0 if is_shared else self.runner.footprint.at(resume_at)
        states = self.estimate(num_prompt, images=[each.span for each in images])
        return states + copied + self._features_nbytes(images, resume_at)

    def _features_nbytes(self, images: Iterable[PromptImage], position: int) -> int:
        """Upper bound of the features that a request at this position has still to hold."""
        return self.runner.features.nbytes_to_hold(each for each in images if each.span.stop > position)

    def available(self, running: Iterable[RunningRequest]) -> int | None:
        """Bytes that new requests may use if everything evictable is evicted; None: unlimited.

        Does not include what is reserved for the running ones.
        """
        memory = self.memory
        if memory.budget is None:
            return None
        promised = self._promised(running)
        live = memory.nbytes(Account.SEQUENCES) + memory.nbytes(Account.INCOMING) + self.runner.features.held_nbytes
        taken = live + promised + self.cache.protected_nbytes() + memory.kept_by_others
        return memory.budget - taken + sum(map(self._owned_nbytes, self._duplicates.values()))

    def _promised(self, running: Iterable[RunningRequest]) -> int:
        """Bytes by which the states of running requests may still grow, and what they hold of images."""
        return sum(
            max(0, self.estimate(len(request.prompt), images=request.prompt.spans) - _share(request.live))
            + self._features_nbytes(request.prompt.images, request.position)
            for request in running
            if request.live
        )

    def unused(self, running: Iterable[RunningRequest]) -> int | None:
        """Bytes of the budget that nothing holds, less what is reserved for the running requests; None: unlimited."""
        available = self.memory.available
        return None if available is None else available - self._promised(running)

    def fits_draft(self, lives: Sequence[LiveSequence], num: int, *, pass_nbytes: int = 0) -> bool:
        """Whether a pass over `num` tokens of each fits without reclaiming anything, which a draft is not worth."""
        return self.memory.fits(self.runner.growth_to_decode(lives, num) + self.memory.of_pass(pass_nbytes))

    # Memory.

    def measure(self) -> None:
        """Recount the buffers, and free what exceeds the budget."""
        for live in [live for live in self._idle if not self.runner.is_worth_keeping(live)]:
            # The cache has dropped too much of what it shares.
            self._close_idle(live)
        self._count()
        available, budget = self.memory.available, self.memory.budget
        if available is not None and budget is not None and available < budget // _TIGHT:
            self.share_duplicates()
        self.memory.reserve(0)

    def share_duplicates(self) -> bool:
        """Replace the tree's copies of duplicates by spans of the sequences' buffers. False if there are none."""
        had_any = len(self._duplicates) > 0
        for live, path in self._duplicates.items():
            refs = self._tree.owned_segments(path.tokens, path.namespace)
            self._tree.replace(refs, [self.runner.share(live, ref.kind, ref.segment.span) for ref in refs])
        self._duplicates.clear()
        return had_any

    def close_idle(self) -> bool:
        """Close all idle sequences; the tree gets copies of what it shares. False if there are none."""
        had_any = len(self._idle) > 0
        for live in list(self._idle):
            self._close_idle(live)
        return had_any

    def _count(self) -> None:
        # Not negative: an exception being handled may keep shared segments alive that the tree has replaced.
        self.memory.measure(Account.SEQUENCES, max(0, self.runner.live_nbytes))

    # Starting.

    def start(self, match: Match, position: int, *, reserve: int) -> LiveSequence:
        """A sequence at `position` of the matched, leased path, with buffers for about `reserve` positions.

        It can run once `restore` is complete.
        """
        live = self._reopen(match, position, reserve=reserve)
        if live is not None:
            return live
        path = _Path(match.tokens[:position], match.namespace)
        needed = self.runner.most_live_nbytes(reserve, chunk=self._chunk)
        is_long = position >= self.runner.shares_from
        if self.memory.fits(needed) or (not is_long and self.memory.reserve(needed)):
            live = self.runner.begin()
            self.runner.begin_restore(live, position, reserve=reserve)
            return live
        # Too little memory to have the path twice: move its segments into the sequence.
        self.memory.reserve(needed - self._owned_nbytes(path))
        live = self.runner.begin()
        self.runner.begin_restore(live, position, reserve=reserve)
        refs = self._tree.owned_segments(path.tokens, path.namespace)
        if refs:
            self._tree.replace(refs, self.runner.begin_move(live, [(ref.segment.span, _segment(ref)) for ref in refs]))
        return live

    def restore(self, live: LiveSequence, tokens: Tokens, *, namespace: str, allowance: StepAllowance) -> bool:
        """Continue the restore of a sequence to `tokens`, within the step's allowance. Returns whether it can run."""
        restoration = live.restoration
        if restoration is None:
            return True
        # Looked up in every step: when other sequences end, entries move out of their buffers.
        restore = self.cache.read(self.cache.match(tokens, namespace=namespace), len(tokens))
        while not restoration.is_over and allowance.has_room:
            allowance.take(self.runner.restore_part(live, restore, at_most=allowance.part_nbytes))
        if restoration.is_over and len(tokens) >= self.runner.shares_from and len(live.shared) == 0:
            self._duplicates[live] = _Path(tokens, namespace)
        return restoration.is_over

    def _reopen(self, match: Match, position: int, *, reserve: int) -> LiveSequence | None:
        """Reopen the idle sequence that holds the matched path up to `position`; None if there is none."""
        if not self._idle or position == 0:
            return None
        live = sharing_sequence(self.cache.read(match, position))
        if not isinstance(live, LiveSequence) or live not in self._idle:
            return None
        path = self._idle[live]
        # Entries past the position will be overwritten, and may be on other paths: copy them.
        self._tree.cut_shared(live, path.tokens, path.namespace, position)
        self._copy_shared(live, path, start=position)
        self.runner.begin_restore(live, position, reserve=reserve, keeps_full=True)
        # Only now: if any of this fails, it is still idle and can be closed.
        del self._idle[live]
        return live

    # Reads from disk.

    def restore_target(self, position: int, num_prompt: int, *, is_whole: bool) -> RecordSource | RestoringSequence:
        """A target for the records of a path up to `position`; `is_whole`: the path is read from its beginning."""
        footprint = self.runner.footprint
        if not is_whole or footprint.full * position <= LARGE_NBYTES:
            return RecordSource.new()
        # No more spare capacity than an idle sequence may have.
        length = min(num_prompt + INITIAL_DECODE_SLOTS, position + max(INITIAL_DECODE_SLOTS, position // 16))
        if not self.memory.reserve(self.runner.most_live_nbytes(length, chunk=1) + footprint.checkpoint):
            # Holding it only in the cache until the request can start takes less memory.
            return RecordSource.new()
        return RestoringSequence.new(self.runner, length=length)[0]

    # Ending.

    def end(self, live: LiveSequence, tokens: Tokens, *, namespace: str) -> None:
        """End a sequence at the end of `tokens`: keep it idle if that is worth it, otherwise stop it."""
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
        """Drop a running sequence whose state cannot be trusted; what it already shares is kept as copies."""
        # First, so that nothing more is shared with it.
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
        # Running sequences stay: what they share past their leases can be dropped without a copy.
        if isinstance(sequence, LiveSequence) and sequence in self._idle:
            self._close_idle(sequence)

    def _close_idle(self, live: LiveSequence) -> None:
        self._close(live, self._idle.pop(live))

    def _close(self, live: LiveSequence, path: _Path) -> None:
        """Replace what an idle (or still moving) sequence shares by copies, and stop it."""
        refs = self._tree.shared_segments(live, path.tokens, path.namespace)
        try:
            self._tree.replace(refs, live.copy_out(_shared_of(refs)))
        except Exception:
            self.is_broken = True
            raise
        finally:
            self.runner.stop(live)
        self._count()

    def _copy_shared(self, live: LiveSequence, path: _Path, *, start: int = 0) -> None:
        """Replace what a sequence shares past `start` by copies."""
        if len(live.shared) > 0:
            refs = self._tree.shared_segments(live, path.tokens, path.namespace, start=start)
            reach(Failpoint.COPY_OUT, live)
            self._tree.replace(refs, [segment.owned() for segment in _shared_of(refs)])

    def _owned_nbytes(self, path: _Path) -> int:
        # Not kept: each reference keeps its entries alive.
        refs = self._tree.owned_segments(path.tokens, path.namespace)
        return sum(ref.segment.nbytes for ref in refs)


def _shared_of(refs: Sequence[SegmentRef]) -> list[SharedSegment]:
    payloads = [ref.segment.payload for ref in refs]
    return [payload for payload in payloads if isinstance(payload, SharedSegment)]


def _segment(ref: SegmentRef) -> PackedSegment:
    payload = ref.segment.payload
    assert isinstance(payload, PackedSegment), ref
    return payload


def _share(live: LiveSequence) -> int:
    """The bytes of one sequence in its batch's buffers, and of the entries moving into it."""
    moving = live.moving.nbytes if live.moving is not None else 0
    return live.rows.nbytes // live.rows.num_rows + moving
