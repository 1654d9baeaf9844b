"""One prefix cache under trial: every operation that its owner has, and the laws that hold after each.

Driven by Hypothesis (`test_laws.py`, `test_machine.py`) and by a random generator (`test_soak.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from reprise.cache.eviction import superseded_on
from reprise.cache.lookup import Match, evicted_to
from reprise.cache.node import Lease, SegmentSizes
from reprise.cache.policy import SHARED_KINDS, Policy
from reprise.cache.prefix_cache import Committed, PrefixCache
from reprise.core.kinds import KvKind, Layout
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, as_tokens
from reprise.memory import Memory
from tests.cache.hash_model import (
    ENTRY_NBYTES,
    SNAPSHOT_NBYTES,
    HashSource,
    SourceFailed,
    cold_entries,
    cold_snapshot,
)
from tests.cache.oracle import StoreOracle, sees, stored_in

SIZES = SegmentSizes(longest=8, tail=6, fallback=12)
"""Small, so that short chats have several pieces and lose their ends in several bites."""
_TOLD_APART = 16
"""A lost path is recognised by as many of its tokens."""


@dataclass(slots=True)
class ManualClock:
    """A clock that stands until it is turned."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """A lease, and what was asked of the cache when it was taken."""

    lease: Lease
    namespace: str
    tokens: tuple[int, ...]
    position: int
    checkpoints: frozenset[tuple[str, tuple[int, ...]]]
    """Those of the leased path."""


@dataclass(slots=True, kw_only=True)
class Promise:
    """A commit that was said to be resumable, and how much of it still was when last looked at."""

    tokens: tuple[int, ...]
    namespace: str
    reach: int
    pinned_until: float


@dataclass(slots=True)
class CacheTrial:
    layout: Layout
    budget: int | None = None
    policy: Policy | None = None
    num_changes: int = 0
    num_lookups: int = 0
    """Calls of the cache that changed something, and those whose answer was judged."""
    clock: ManualClock = field(default_factory=ManualClock)
    cache: PrefixCache = field(init=False)
    stored: StoreOracle = field(init=False)
    held: list[HeldLease] = field(default_factory=list[HeldLease])
    promises: dict[tuple[str, tuple[int, ...]], Promise] = field(default_factory=dict)
    evictions: int = 0
    superseded: set[tuple[str, tuple[int, ...]]] = field(default_factory=set[tuple[str, tuple[int, ...]]])
    """The checkpoints that a newer one had superseded when last looked at."""

    def __post_init__(self) -> None:
        self.cache = PrefixCache(
            self.layout, memory=Memory(self.budget), policy=self.policy, sizes=SIZES, clock=self.clock
        )
        self.stored = StoreOracle(self.layout)

    # What the owner of a cache does.

    def request(
        self, tokens: Sequence[int], *, namespace: str = "", is_held: bool = True, limit: int | None = None
    ) -> int:
        """A prompt comes in: find where it resumes, judge it, and take a lease."""
        self.judge_read(tokens, namespace=namespace, limit=limit)
        match = self.cache.match(as_tokens(tokens), namespace=namespace)
        position = self.cache.resume_at(match, limit=len(tokens) - 1 if limit is None else limit)
        if is_held:
            self.num_changes += 1
            path = {(namespace, tuple(tokens[:at])) for at in range(1, position + 1)}
            held = HeldLease(
                lease=self.cache.lease(match, position),
                namespace=namespace,
                tokens=tuple(tokens),
                position=position,
                checkpoints=frozenset(path & self._checkpoints()),
            )
            self.held.append(held)
        return position

    def commit(
        self,
        tokens: Sequence[int],
        *,
        namespace: str = "",
        kind: BoundaryKind = BoundaryKind.STABLE,
        fails_after: int | None = None,
        pinned_until: float = 0.0,
    ) -> Committed | None:
        """Store a position; None: the source failed."""
        self.num_changes += 1
        before, evictions, held = stored_in(self.cache), self.cache.stats.num_evictions, self.cache.nbytes
        match = self.cache.match(as_tokens(tokens), namespace=namespace)
        stood = match.length
        # What it supersedes, and beginnings that others share: a path that fills the budget may need their room.
        shared = [c for node in match.walk.nodes for c in node.checkpoints.values() if c.kind in SHARED_KINDS]
        older = [*superseded_on(match.walk.nodes, len(tokens), kind, None), *shared]
        replaced = {(namespace, tuple(tokens[: each.position])) for each in older if each.position <= stood}
        source = HashSource(tokens, fails_after=fails_after)
        is_pinned = pinned_until > self.clock.now
        try:
            done = self.cache.commit(
                as_tokens(tokens), source, kind=kind, namespace=namespace, overrides_admission=is_pinned
            )
        except SourceFailed:
            # Room had been made for it; what is still there is worth what it was.
            done, self.superseded = None, self.superseded | (replaced - self._checkpoints())
        if done is not None and done.num_tokens > 0 and not done.is_resumable:
            # A beginning of it found room.
            assert self.cache.layout.resumes_anywhere and 0 < stood + done.num_tokens < len(tokens)
            tokens, pinned_until = tokens[: stood + done.num_tokens], 0.0
        elif done is None or not done.is_resumable:
            after = stored_in(self.cache)
            assert after.entries <= before.entries and after.snapshots <= before.snapshots
            if self.cache.stats.num_evictions == evictions:
                assert after.entries == before.entries and after.snapshots == before.snapshots
            return done
        if is_pinned:
            assert self.cache.pin(as_tokens(tokens), namespace=namespace, until=pinned_until)
        assert self._fits_budget() or done.nbytes == 0
        if self.cache.stats.num_evictions == evictions:
            assert self.cache.nbytes == held + done.nbytes
        copied = {(kind, at) for kind, span in source.copied for at in range(span.start, span.stop)}
        assert len(copied) == sum(len(span) for _, span in source.copied), "an entry was copied twice"
        assert not any((namespace, kind, (*tokens[: at + 1],)) in before.entries for kind, at in copied) or (
            self.cache.stats.num_evictions > evictions
        ), "an entry was copied that was there"
        # Beside those that were superseded before: the commit may have evicted some of them, or what it supersedes.
        self.superseded |= self._checkpoints(only_superseded=True) | replaced
        self.stored.store(namespace, tokens)
        known = self.promises.get((namespace, tuple(tokens)))
        pinned_before = known.pinned_until if known is not None else 0.0
        self.promises[(namespace, tuple(tokens))] = Promise(
            tokens=tuple(tokens), namespace=namespace, reach=len(tokens), pinned_until=max(pinned_until, pinned_before)
        )
        return done

    def expect(self, tokens: Sequence[int], *, namespace: str, follows: Sequence[int]) -> None:
        """It is found out how the next turn of the chat begins that these tokens continue."""
        number = self.cache.order.policy.number_of(as_tokens(follows), namespace=namespace)
        if number is not None:
            self.num_changes += 1
            self.cache.expect(self.cache.match(as_tokens(tokens), namespace=namespace), number=number)
            self.superseded |= self._checkpoints(only_superseded=True)

    def evict(self) -> None:
        """Evict one item; prompts that lose something are told so.

        Not those that left the lost path within a few tokens: that few may begin anything.
        """
        before = {key: (self._reach(promise), self._match(promise).length) for key, promise in self.promises.items()}
        self.num_changes += 1
        self.cache.evict_one()
        for key, (reach, matched) in before.items():
            promise = self.promises[key]
            now = self._reach(promise)
            if now < reach and (matched == len(promise.tokens) or len(promise.tokens) - now >= _TOLD_APART):
                assert evicted_to(self._match(promise), now) is not None, "what was evicted was not said to be"

    def clear(self) -> None:
        """Drop everything that no lease protects; pins give way."""
        self.num_changes += 1
        self.cache.clear()
        for promise in self.promises.values():
            promise.pinned_until = 0.0

    def _reach(self, promise: Promise) -> int:
        self.num_lookups += 1
        return self.cache.resume_at(self._match(promise), limit=len(promise.tokens))

    def _match(self, promise: Promise) -> Match:
        self.num_lookups += 1
        return self.cache.match(as_tokens(promise.tokens), namespace=promise.namespace)

    def release(self, index: int) -> None:
        self.num_changes += 1
        self.cache.release(self.held.pop(index % len(self.held)).lease)

    # What must be true.

    def judge(self) -> None:
        """The books, the leases and the promises. After every operation."""
        self.cache.check()
        evicted = self.cache.stats.num_evictions - self.evictions
        self.evictions = self.cache.stats.num_evictions
        self._judge_promises(evicted)
        checkpoints = self._checkpoints()
        for at, held in enumerate(self.held):
            match = self.cache.match(as_tokens(held.tokens), namespace=held.namespace)
            assert self.cache.resume_at(match, limit=held.position) == held.position, "a leased path was evicted"
            if not self.layout.resumes_anywhere:
                gone = held.checkpoints - checkpoints
                assert gone <= self.superseded, "a checkpoint of a leased path was evicted that nothing had superseded"
                self.held[at] = replace(held, checkpoints=held.checkpoints - gone)
        self.superseded = self._checkpoints(only_superseded=True)

    def _judge_promises(self, evicted: int) -> None:
        checkpoints = self._checkpoints()
        num_lost = 0
        for key, promise in list(self.promises.items()):
            reach = self._reach(promise)
            if promise.pinned_until > self.clock.now:
                assert reach == len(promise.tokens), "a pinned position was evicted"
            if self.layout.resumes_anywhere:
                assert reach >= promise.reach - evicted * 2 * SIZES.tail, "more was lost than was evicted"
                promise.reach = reach
            elif key in checkpoints:
                assert reach == len(promise.tokens), "a checkpoint does not hold what it promises"
            else:
                num_lost += 1
                del self.promises[key]
        if not self.layout.resumes_anywhere:
            assert num_lost == evicted, "an eviction takes one checkpoint, and nothing else takes any"

    def judge_read(
        self, tokens: Sequence[int], *, namespace: str = "", limit: int | None = None, spans: Sequence[Span] = ()
    ) -> None:
        """SAFETY: what is read is what a cold run would hold. REUSE: no better position can be had."""
        run = as_tokens(tokens)
        limit = len(tokens) - 1 if limit is None else limit
        match = self.cache.match(run, namespace=namespace)
        position = self.cache.resume_at(match, limit=limit, spans=spans)
        restore = self.cache.read(match, position)
        self.num_lookups += 3  # match, resume_at, read
        for kind in self.layout.kinds:
            cold = cold_entries(tokens, kind)
            seen = [
                (at, item)
                for part in restore.slices[kind]
                for at, item in zip(
                    range(part.span.start, part.span.stop),
                    part.payload.items[part.start : part.stop],  # pyright: ignore
                    strict=True,
                )
            ]
            assert seen == [(at, cold[at]) for at, _ in seen], "an entry is not that of a cold run"
            assert [at for at, _ in seen] == sorted({at for at, _ in seen}), "entries are out of order or double"
            assert self.positions_needed(kind, position) <= {at for at, _ in seen}, "an entry is missing"
        if self.layout.has_snapshots and position > 0:
            assert restore.snapshot is not None and restore.snapshot.item == cold_snapshot(tokens[:position])  # pyright: ignore
        else:
            assert restore.snapshot is None
        if evicted_to(match, position) is not None:
            assert (namespace, tuple(tokens[: position + 1])) in self.stored.prefixes, "never there, so never evicted"
        best = self._best_known(namespace, tokens, limit, [(span.start, span.stop) for span in spans])
        assert position == best, f"resumes at {position}, but {best} was possible"

    def _best_known(self, namespace: str, tokens: Sequence[int], limit: int, images: Sequence[tuple[int, int]]) -> int:
        known = self.stored if self.cache.stats.num_evictions == 0 else stored_in(self.cache)
        return known.resume_at(namespace, tokens, limit, images)

    @staticmethod
    def positions_needed(kind: KvKind, position: int) -> set[int]:
        return {at for at in range(position) if sees(kind, position, at)}

    def judge_contents(self) -> None:
        """Every entry is stored once, and none that nothing needs. Slow."""
        now = stored_in(self.cache)
        assert self.cache.stats.kv_nbytes == ENTRY_NBYTES * len(now.entries), "an entry is stored twice"
        assert self.cache.stats.snapshot_nbytes == SNAPSHOT_NBYTES * len(now.snapshots)
        if not self.layout.resumes_anywhere:
            needed = StoreOracle(self.layout)
            for namespace, tokens in self._checkpoints():
                needed.store(namespace, tokens)
            for held in self.held:
                needed.store(held.namespace, held.tokens[: held.position])
            assert now.entries == needed.entries, "entries stayed that nothing needs, or needed ones went"

    def _checkpoints(self, *, only_superseded: bool = False) -> set[tuple[str, tuple[int, ...]]]:
        found: set[tuple[str, tuple[int, ...]]] = set()
        for namespace, root in self.cache.tree.roots.items():
            stack = [(root, ())]
            while stack:
                node, prefix = stack.pop()
                path = (*prefix, *map(int, node.tokens))
                found.update(
                    (namespace, path[:position])
                    for position, mark in node.checkpoints.items()
                    if mark.is_superseded or not only_superseded
                )
                stack.extend((child, path) for child in node.children.values())
        return found

    def _fits_budget(self) -> bool:
        free = self.cache.memory.available
        return free is None or free >= 0
