"""The prefix cache.

A radix tree per namespace (`reprise.cache.tree`), an eviction order and pins, all charged to one memory budget. Lookups
change nothing; a commit adds only what is missing; eviction never takes what a lease protects; `check()` recomputes all
accounts. Used by one thread.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from reprise.cache.eviction import (
    EvictionOrder,
    end_of_use,
    is_far_up,
    superseded_beside,
    superseded_on,
    unneeded,
)
from reprise.cache.logits_rows import LogitsRows
from reprise.cache.lookup import (
    Found,
    Match,
    Restore,
    checkpoint_at,
    match_of,
    missing,
    read,
    resume_position,
)
from reprise.cache.node import Checkpoint, Lease, Node, Segment, SegmentSizes, Walk, path_to, subtree
from reprise.cache.payload import Payload, Source
from reprise.cache.pins import Pins
from reprise.cache.policy import SHARED_KINDS, EvictionCandidate, ExpectedSaving, Policy
from reprise.cache.tree import RadixTree
from reprise.core.clock import Clock, monotonic
from reprise.core.inspection import LastUse
from reprise.core.job import Lineage
from reprise.core.kinds import Full, KvKind, Layout
from reprise.core.pin import Pin, PinList, pin_id
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, Tokens, join_tokens
from reprise.memory import Account, Memory

_LEAST_CHANCE = 0.1
"""A chat that continues more rarely than this is not expected to continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The result of a commit: `num_tokens` and `nbytes` added, and whether the position is now resumable."""

    num_tokens: int
    nbytes: int
    is_resumable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What a prefix cache holds, and how many items it has dropped so far, by reason."""

    kv_nbytes: int
    snapshot_nbytes: int
    num_tokens: int
    num_nodes: int
    num_checkpoints: int
    evictions: dict[str, int]

    @property
    def num_evictions(self) -> int:
        """Items dropped so far, for any reason."""
        return sum(self.evictions.values())


def _nobody_shares(sequence: object) -> None:
    raise AssertionError(f"entries are in the buffers of {sequence}, and nothing can close it")


class PrefixCache:
    """Everything reusable of one model."""

    def __init__(
        self,
        layout: Layout,
        *,
        memory: Memory | None = None,
        policy: Policy | None = None,
        sizes: SegmentSizes | None = None,
        clock: Clock = monotonic,
    ) -> None:
        """`memory`: the budget that payloads are charged to (default: unlimited); it reclaims by evicting from here."""
        self.layout = layout
        self.memory = memory if memory is not None else Memory()
        self.tree = RadixTree(layout, self.memory, sizes if sizes is not None else SegmentSizes(), time=clock)
        self.pins = Pins(clock)
        self.rows = LogitsRows(self.memory)
        self.order = EvictionOrder(policy if policy is not None else ExpectedSaving(), self.tree, self.pins)
        self._clock = clock
        self._close_idle: Callable[[object], None] = _nobody_shares
        self.memory.reclaim_from(self.evict_one)
        self._evictions: Counter[str] = Counter()
        self.is_compact = True
        """Whether nothing was stored since the last complete compaction."""

    @property
    def nbytes(self) -> int:
        """Bytes of all segments and snapshots."""
        return self.memory.nbytes(Account.KV) + self.memory.nbytes(Account.SNAPSHOTS)

    @property
    def stats(self) -> CacheStats:
        """Sizes now, and counters."""
        return CacheStats(
            kv_nbytes=self.memory.nbytes(Account.KV),
            snapshot_nbytes=self.memory.nbytes(Account.SNAPSHOTS),
            num_tokens=self.tree.totals.num_tokens,
            num_nodes=self.tree.totals.num_nodes,
            num_checkpoints=self.tree.totals.num_checkpoints,
            evictions=dict(self._evictions),
        )

    # Lookups. They change nothing.

    def match(self, tokens: Tokens, *, namespace: str = "") -> Match:
        """How far the tree agrees with `tokens`. O(length of the match)."""
        return match_of(self.tree.walk(tokens, namespace), tokens, namespace)

    def resume_at(self, match: Match, *, limit: int, spans: Sequence[Span] = ()) -> int:
        """The largest position ≤ `limit` at which every layer can resume; 0 if there is none.

        `spans`: the prompt's images, which are reused whole or not at all.
        """
        return resume_position(self.layout, match, limit, spans=spans)

    def lookup(self, tokens: Tokens, limit: int, *, namespace: str = "", spans: Sequence[Span] = ()) -> Found:
        """The match of `tokens`, and `resume_at` for it."""
        match = self.match(tokens, namespace=namespace)
        return Found(self.resume_at(match, limit=limit, spans=spans), match)

    def read(self, match: Match, position: int) -> Restore:
        """What is needed to resume at `position`, a result of `resume_at` for the same match."""
        return read(self.layout, match, position)

    def row_at(self, match: Match) -> Payload | None:
        """The logits after the prompt's last token, if all of it matched and they are stored."""
        if match.length < len(match.tokens):
            return None
        return self.rows.at(checkpoint_at(match.walk, match.length))

    def would_evict(self, num: int) -> list[tuple[Checkpoint, EvictionCandidate]]:
        """The first `num` items that `evict_one` would evict now."""
        return self.order.first(num, may_evict=self._may_evict)

    def least_score(self) -> float | None:
        """The policy's score of what `evict_one` would evict; None if nothing may be evicted."""
        if len(self.rows) > 0:
            return 0.0
        first = self.would_evict(1)
        return self.order.policy.score(first[0][1]) if first else None

    def expects_return(self, tokens: Tokens, *, namespace: str) -> bool:
        """Whether a chat that is stored as these tokens is likely enough to go on, now or after a restart."""
        policy = self.order.policy
        number = policy.number_of(tokens, namespace=namespace)
        has_ended = self.order.lineages.has_ended(number)
        return not has_ended and (number is None or policy.returns(number) >= _LEAST_CHANCE)

    def protected_nbytes(self) -> int:
        """A lower bound of the bytes that cannot be evicted, pins aside: full entries, snapshots up to the leases."""
        return self.tree.leased_nbytes()

    # Leases.

    def lease(self, match: Match, position: int, *, is_request: bool = True) -> Lease:
        """Protect the matched path up to `position` until `release`, and mark it as used.

        `is_request`: a client asked for it. The policy does not learn from the server's own work.
        """
        assert position <= match.length, (position, match.length)
        lease = self.tree.protect(match.walk, position)
        try:
            used = self.tree.use(match.walk, position, use=LastUse.RESUMED if is_request else LastUse.SETTLED)
            if used is not None:
                self.order.place(used)
                self.rows.use(used)
            if is_request:
                lease.number = self._arrive(match)
        except BaseException:
            # Nobody has it: the path would be protected for ever.
            self.tree.unprotect(lease)
            raise
        return lease

    def note_answer(self, lease: Lease, num_tokens: float, *, calls_tool: bool | None = None) -> None:
        """Tell the policy the length of the answer to this lease's request, and whether it ends with a tool call.

        The length is in units of the prompt's tokens: a fraction if each of those represents many.
        """
        if lease.number is not None:
            self.order.policy.answered(lease.number, num_tokens, calls_tool=calls_tool, at_s=self._clock())

    def expect(self, match: Match, *, number: int, calls_tool: bool | None = None) -> None:
        """Record that the next turn of request `number` will begin with the matched prompt.

        What the request left beside that path is no longer where its chat goes on. `calls_tool`: whether the answer to
        the request ends with a tool call.
        """
        self.order.policy.expect(
            match.tokens, known=match.length, number=number, namespace=match.namespace, calls_tool=calls_tool
        )
        if match.length < len(match.tokens):
            for checkpoint in self._beside(match, number):
                if checkpoint.kind not in SHARED_KINDS:
                    self.tree.leave(checkpoint)
                    self.order.place(checkpoint)

    def note_lineage(self, job_id: str, lease: Lease, lineage: Lineage, *, trunk_at: int, namespace: str) -> None:
        """Record what this lease's request tells of other chats; `trunk_at`: its system prompt and tools end there.

        O(nodes used since the ended chats were).
        """
        self._review(self.order.lineages.arrive(job_id, lease, lineage, trunk_at=trunk_at, namespace=namespace))

    def release(self, lease: Lease) -> None:
        """Release the lease, and drop what was kept only for it. Releasing twice is a bug."""
        self.tree.unprotect(lease)
        if not self.layout.resumes_anywhere:
            self._trim_path(lease.node, lease.position)
            self._prune(lease.node)

    def _arrive(self, match: Match) -> int:
        """Tell the policy of a request, and re-evaluate everything whose score that changes. Returns its number."""
        number, continued = self.order.policy.arrive(match.tokens, known=match.length, namespace=match.namespace)
        nodes, last = match.walk.nodes, match.walk.last
        for node in nodes if match.length == last.stop else nodes[:-1]:
            self._visit(node, number)
        if continued is not None:
            # The chat has continued: what its earlier prompt left beside this path is scored lower.
            for checkpoint in self._beside(match, continued):
                self.order.place(checkpoint)
        self._review(self.order.policy.fall_silent(self._clock()))
        self.order.advance(number)
        return number

    def _review(self, numbers: Collection[int]) -> None:
        """Re-evaluate what these prompts were the last to pass. O(nodes used since the oldest, and children)."""
        if not numbers:
            return
        oldest, numbers = min(numbers), frozenset(numbers)
        # A path is used with everything above it, so below a node that was not used since there is nothing to find.
        stack = [node for root in self.tree.roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            if node.last_visit is None or node.last_visit < oldest:
                continue
            stack.extend(node.children.values())
            if node.last_visit in numbers:
                for checkpoint in node.checkpoints.values():
                    self.order.place(checkpoint)

    @staticmethod
    def _beside(match: Match, number: int) -> list[Checkpoint]:
        """The checkpoints that prompt `number` was the last to pass, past the end of the matched path."""
        last = match.walk.last
        beside = last.children.values() if match.length == last.stop else (last,)
        # Who passed a node passed what is above it, so below another's there is nothing of it.
        stack, found = [node for node in beside if node.last_visit == number], list[Checkpoint]()
        while stack:
            node = stack.pop()
            found += [checkpoint for checkpoint in node.checkpoints.values() if checkpoint.position > match.length]
            stack += [below for below in node.children.values() if below.last_visit == number]
        return found

    def _visit(self, node: Node, number: int) -> None:
        """Record that prompt `number` passed through `node`; re-evaluate the checkpoints whose score that changes."""
        if self.tree.visit(node, number):
            for checkpoint in node.checkpoints.values():
                # Superseded ones are evicted first, unless they stay to fall back on, and re-evaluated when popped.
                if checkpoint.is_useful:
                    self.order.place(checkpoint)

    # Commits.

    def commit(
        self,
        tokens: Tokens,
        source: Source,
        *,
        kind: BoundaryKind,
        namespace: str = "",
        is_auxiliary: bool = False,
        overrides_admission: bool = False,
        stable_at: int | None = None,
        number: int | None = None,
        seams: Mapping[KvKind, Sequence[int]] | None = None,
    ) -> Committed:
        """Make position ``len(tokens)`` resumable: copy from `source` what the tree lacks.

        What does not fit the budget even after eviction is not stored, or only its beginning if every position is
        resumable; the result says so. If `source` raises, nothing is added; what was evicted for it stays evicted.
        `overrides_admission`: a client asked to keep this path, so anything evictable may be evicted for it.
        `stable_at`: the next turn may differ past this position (None: not known). `number`: the policy's number of the
        request that computed this (None: that of the prompt that these tokens continue). `seams`: positions at which to
        cut the entries of a kind, since `source` holds them in these parts.
        """
        position = len(tokens)
        if position == 0:
            return Committed(num_tokens=0, nbytes=0, is_resumable=True)
        walk = self.tree.walk(tokens, namespace)
        # Protect the path that is about to be extended from eviction.
        guard = self.tree.protect(walk, walk.length)
        guard.is_restored = True
        try:
            wanted = missing(self.layout, walk, position, self.tree.sizes.longest, seams)
            needs_snapshot = self.layout.has_snapshots and checkpoint_at(walk, position) is None
            nbytes = sum(source.segment_nbytes(k, len(span)) for k, span in wanted)
            nbytes += source.snapshot_nbytes() if needs_snapshot else 0
            visit = number
            if visit is None:
                visit = self.order.policy.number_of(tokens, namespace=namespace)
            if stable_at is not None and stable_at < position:
                self.order.policy.leave_tail(tokens, stable_at, number=visit, namespace=namespace)
            new = self.order.new_candidate(
                walk, position, nbytes, kind=kind, stable_at=stable_at, visit=visit, is_auxiliary=is_auxiliary
            )
            replaced = self._replaced(walk, position, kind, stable_at) if needs_snapshot else []
            admitted = None if overrides_admission else new
            is_whole = nbytes == 0 or self._admit(nbytes, admitted, replaced)
            if not is_whole and not is_auxiliary:
                is_whole = self._admit_for_fallbacks(walk, nbytes, admitted)
            if not is_whole and needs_snapshot:
                is_whole = self._admit(nbytes, admitted, [*replaced, *self._passed(walk, position, new)])
            if not is_whole:
                position = self._stop_that_fits(walk, position, nbytes)
                if position == walk.length:
                    return Committed(num_tokens=0, nbytes=0, is_resumable=False)
                tokens, kind = tokens[:position], BoundaryKind.INTERVAL
                wanted = missing(self.layout, walk, position, self.tree.sizes.longest, seams)
            segments = [(k, Segment(span, source.segment(k, span))) for k, span in wanted]
            snapshot = source.snapshot() if needs_snapshot else None

            held_before = self.nbytes
            path = self._extend(walk, tokens, namespace)
            for segment_kind, segment in segments:
                self.tree.attach(path, segment_kind, segment)
            if visit is not None:
                for node in path if self._has_left(path[-1], tokens, namespace) else path[:-1]:
                    self._visit(node, visit)
                    self.tree.note_first_visit(node, visit)
            self._place_checkpoint(path, position, kind, snapshot, is_auxiliary=is_auxiliary, stable_at=stable_at)
            added = self.nbytes - held_before
        finally:
            self.release(guard)
        self.order.sweep()
        self.is_compact = False
        return Committed(num_tokens=position - walk.length, nbytes=added, is_resumable=is_whole)

    def _has_left(self, node: Node, tokens: Tokens, namespace: str) -> bool:
        """Whether what `node` has behind these tokens, which end in it, belongs to their own chat.

        Of a chat whose earlier prompt they continue, it is what was edited away. Otherwise it is another chat, which
        begins alike.
        """
        return len(tokens) == node.stop or self.order.policy.number_of(tokens, namespace=namespace) is not None

    def _replaced(self, walk: Walk, position: int, kind: BoundaryKind, stable_at: int | None) -> list[Checkpoint]:
        """What a snapshot at `position` replaces, and nothing protects but requests that have resumed from there.

        A path that has outgrown the budget could not get any longer if it needed room for both.
        """
        older = superseded_on(walk.nodes, position, kind, stable_at)
        return [each for each in older if self._may_replace(each)]

    def _admit_for_fallbacks(self, walk: Walk, nbytes: int, new: EvictionCandidate | None) -> bool:
        """Make room with what this path has to fall back on, if that is enough; otherwise give up none of it.

        A path that fills the budget could not get any longer.
        """
        on_path = (each for node in walk.nodes for each in node.checkpoints.values() if each.position <= walk.length)
        given_up = [each for each in on_path if each.is_fallback]
        if (self.memory.available or 0) + sum(map(self.order.own_nbytes, given_up)) < nbytes:
            return False
        self._keep(given_up, is_kept=False)
        if self._admit(nbytes, new):
            return True
        self._keep([each for each in given_up if each.is_in_tree], is_kept=True)
        return False

    def _keep(self, checkpoints: Sequence[Checkpoint], *, is_kept: bool) -> None:
        for each in checkpoints:
            self.tree.keep(each, is_kept=is_kept)
            self.order.place(each)

    def _passed(self, walk: Walk, position: int, new: EvictionCandidate) -> list[Checkpoint]:
        """What the path of a snapshot at `position` has passed and is worth less than it, the least useful first.

        Other chats may share it, but a path that fills the budget could not get any longer. Stable checkpoints stay:
        there a chat goes on whose end is rewritten.
        """
        below = [each for node in walk.nodes for each in node.checkpoints.values() if each.position < position]
        passed = [each for each in below if each.kind in SHARED_KINDS and self._may_replace(each)]
        scores = {each: self.order.policy.score(self.order.candidate(each)) for each in passed}
        worth = self.order.policy.score(new)
        return sorted((each for each in passed if scores[each] <= worth), key=lambda each: scores[each])

    def _may_replace(self, checkpoint: Checkpoint) -> bool:
        if self.pins.holds(checkpoint) or self._may_evict(checkpoint):
            return False  # What may be evicted anyway makes no further room.
        return all(lease.is_restored for lease in checkpoint.node.leases if lease.position == checkpoint.position)

    def _admit(self, nbytes: int, new: EvictionCandidate | None, replaced: Sequence[Checkpoint] = ()) -> bool:
        """Make room for `nbytes` by evicting what scores lower than `new` (None: anything); False if impossible.

        If it cannot succeed, it evicts nothing, unless a beginning can be stored: then it makes room for that. What is
        `replaced` is evicted last, and only if that is enough.
        """
        available = self.memory.available
        if available is None or available >= nbytes:
            return True
        freed = sum(older.snapshot.nbytes for older in replaced if older.snapshot is not None)
        if freed > 0:
            if not self._admit(nbytes - freed, new):
                return False
            for older in replaced:
                if older.is_in_tree and not self.memory.fits(nbytes):
                    self._evict(older, "budget")
            return self.memory.fits(nbytes)
        most = available + self.nbytes + self.memory.nbytes(Account.LOGITS) - self.protected_nbytes()
        most += self.memory.evictable_from_others
        if nbytes > most:
            if new is not None and self.layout.resumes_anywhere and new.cost * most // nbytes >= self.tree.sizes.tail:
                self._evict_for(most, new)
            return False
        return self._evict_for(nbytes, new)

    def _stop_that_fits(self, walk: Walk, position: int, nbytes: int) -> int:
        """How far a path of `nbytes` more fits into free memory, if every position is resumable.

        A beginning saves as much per byte as the whole. It is at least as long as what is evicted at a time, so that
        paths do not grow by tiny steps.
        """
        available = self.memory.available
        if available is None or available <= 0 or not self.layout.resumes_anywhere:
            return walk.length
        num = (position - walk.length) * available // nbytes
        return walk.length + num if num >= self.tree.sizes.tail else walk.length

    def _extend(self, walk: Walk, tokens: Tokens, namespace: str) -> tuple[Node, ...]:
        """Add what the tree lacks of `tokens`; returns the nodes from the root to the one that holds the end."""
        path = self.tree.extend(walk, tokens, namespace)
        if self.layout.resumes_anywhere and len(path) > 1 and walk.length < len(tokens):
            end = path[-2].checkpoints.get(path[-2].stop)
            if end is not None and not self.pins.holds(end) and self.rows.at(end) is None:
                # Only path ends are evicted where every position is resumable, and this one no longer is one.
                self._drop(end)
        return path

    def _place_checkpoint(
        self,
        path: Sequence[Node],
        position: int,
        kind: BoundaryKind,
        snapshot: Payload | None,
        *,
        is_auxiliary: bool,
        stable_at: int | None,
    ) -> None:
        self.tree.tick(path)
        last = path[-1]
        checkpoint = last.checkpoints.get(position)
        if checkpoint is None:
            is_inner = position < last.stop or len(last.children) > 0
            if self.layout.resumes_anywhere and is_inner:
                return
            checkpoint = self.tree.add_checkpoint(last, position, kind, is_auxiliary=is_auxiliary, stable_at=stable_at)
        else:
            self.tree.renew_checkpoint(checkpoint, kind, is_auxiliary=is_auxiliary, stable_at=stable_at)
        if snapshot is not None:
            self.tree.save(checkpoint, snapshot)
        superseded = sorted(superseded_on(path, position, kind, stable_at), key=lambda older: older.position)
        # All of them before any is looked at, which is judged by those below.
        for older in superseded:
            self.tree.supersede(older, checkpoint)
        distance = self.tree.sizes.fallback
        if distance > 0 and not self.layout.resumes_anywhere and not self.layout.has_snapshots:
            for older in superseded:
                self.tree.keep(older, is_kept=is_far_up(older, distance))
        if kind is BoundaryKind.STABLE:
            for beside in [*superseded_beside(path)]:
                self.tree.supersede(beside, checkpoint)
                superseded.append(beside)
        for older in superseded:
            self.order.place(older)
        self.order.place(checkpoint)

    # Exact repeats.

    def has_room_for_row(self, nbytes: int, *, snapshot: int) -> bool:
        """Whether a row and its snapshot fit, evicting only older rows."""
        if not self.rows.admits(nbytes + snapshot):
            return False
        while not self.memory.fits(nbytes):
            if not self._evict_row():
                return False
        return True

    def keep_row(self, tokens: Tokens, row: Payload, *, namespace: str = "") -> bool:
        """Store the logits at ``len(tokens)``, evicting older rows. False if the position is not resumable."""
        checkpoint = self._checkpoint(tokens, namespace, BoundaryKind.PROMPT_END)
        if checkpoint is None:
            return False
        self.rows.keep(checkpoint, row)
        while self.rows.exceed_share or not self.memory.fits(0):
            if not self._evict_row():
                break
        return self.rows.at(checkpoint) is not None

    def _evict_row(self) -> bool:
        """Evict the least recently used row, and its checkpoint if kept only for the row. False if there is none."""
        checkpoint = next(iter(self.rows.checkpoints()), None)
        if checkpoint is None:
            return False
        self.rows.discard(checkpoint)
        node, position = checkpoint.node, checkpoint.position
        is_end = not node.children and position == node.stop
        is_inner = checkpoint.kind is BoundaryKind.PROMPT_END or self.layout.resumes_anywhere
        if is_inner and not is_end and not checkpoint.is_fallback and self._may_evict(checkpoint):
            self._drop(checkpoint)
            if not self.layout.resumes_anywhere:
                self._trim_path(node, position)
        return True

    # Pins.

    def pin(self, tokens: Tokens, *, namespace: str, until: float, owner: str = "") -> bool:
        """Pin the position ``len(tokens)`` at least until `until`. False if it is not resumable."""
        checkpoint = self._checkpoint(tokens, namespace, BoundaryKind.EXPLICIT)
        if checkpoint is not None:
            self.pins.pin(checkpoint, until, owner=owner)
        return checkpoint is not None

    def retain(self, tokens: Tokens, *, namespace: str, until: float, owner: str = "") -> bool:
        """Like `pin`, for a conversation that has reached ``len(tokens)``: replaces what it retained before."""
        checkpoint = self._checkpoint(tokens, namespace, BoundaryKind.STABLE)
        if checkpoint is not None:
            self.pins.retain(checkpoint, until, owner=owner)
        return checkpoint is not None

    def pin_of(self, tokens: Tokens, *, namespace: str) -> Pin | None:
        """The pin of this prefix, even if expired, or None. O(tokens)."""
        checkpoint = checkpoint_at(self.match(tokens, namespace=namespace).walk, len(tokens))
        return self._pin(checkpoint) if checkpoint is not None and self.pins.until(checkpoint) > 0 else None

    def list_pins(self, namespace: str, *, owner: str = "") -> PinList:
        """The pins of an owner in a namespace, oldest first. O(their tokens)."""
        pinned = [c for c in self.pinned(namespace) if self.pins.is_owned_by(c, owner)]
        return PinList(pins=tuple(map(self._pin, pinned)), nbytes=self.pins.total_of(pinned).nbytes)

    def unpin(self, name: str, *, namespace: str, owner: str = "") -> bool:
        """Remove this owner from the pin with this id. False if the owner has no such pin."""
        checkpoint = next((c for c in self.pinned(namespace) if pin_id(self.prefix_of(c)) == name), None)
        return checkpoint is not None and self.pins.disown(checkpoint, owner)

    def pinned(self, namespace: str) -> list[Checkpoint]:
        """The pinned checkpoints of a namespace, oldest pin first. O(pins × depth)."""
        return [checkpoint for checkpoint in self.pins if self.tree.namespace_of(checkpoint.node) == namespace]

    def prefix_of(self, checkpoint: Checkpoint) -> Tokens:
        """The tokens before the checkpoint."""
        return join_tokens(*(node.tokens for node in path_to(checkpoint.node)))[: checkpoint.position]

    def _pin(self, checkpoint: Checkpoint) -> Pin:
        until = self.pins.until(checkpoint)
        return Pin(
            id=pin_id(self.prefix_of(checkpoint)),
            num_tokens=checkpoint.position,
            nbytes=self.pins.total_of([checkpoint]).nbytes,
            expires_in_s=None if until == float("inf") else max(0.0, until - self._clock()),
            follows_chat=self.pins.follows_chat(checkpoint),
        )

    def _checkpoint(self, tokens: Tokens, namespace: str, kind: BoundaryKind) -> Checkpoint | None:
        """The checkpoint at ``len(tokens)``, added if the position is resumable without one; None if it is not."""
        position = len(tokens)
        resume_at, match = self.lookup(tokens, position, namespace=namespace)
        if position == 0 or match.length < position:
            return None
        known = checkpoint_at(match.walk, position)
        if known is not None or resume_at < position:
            return known
        node = next(node for node in match.walk.nodes if position <= node.stop)
        made = self.tree.add_checkpoint(node, position, kind)
        self.order.place(made)
        return made

    # Removal. Only `reset` touches what a lease protects; only `reset`, `clear` and `drop_path` touch pins. A lease
    # protects its path, except for superseded checkpoints before its position.

    def evict_one(self) -> bool:
        """Evict the item with the lowest score. False if nothing may be evicted."""
        return self._evict_least(None)

    def clear(self, namespace: str | None = None, *, owner: str | None = None) -> None:
        """Drop everything that no lease protects, of one namespace or all, pins included. O(size of the trees).

        With an `owner`, only this owner's pins are dropped, and what others pinned stays.
        """
        for name in [name for name in self.tree.roots if namespace in (None, name)]:
            for checkpoint in list(self.tree.checkpoints(name)):
                if owner is None:
                    self.pins.discard(checkpoint)
                else:
                    self.pins.disown(checkpoint, owner)
            self._evict_all(self.tree.roots[name], "cleared")
            self.tree.forget_lost(subtree(self.tree.roots[name]))
            self.tree.remove_empty_root(name)
        self.order.sweep()

    def note_cancelled(self, tokens: Tokens, *, namespace: str) -> None:
        """Remember that a request with this prompt was cancelled before it had computed what is not stored of it."""
        match = self.match(tokens, namespace=namespace)
        if match.length < len(tokens):
            self.tree.note_cancelled(match.walk, tokens[match.length :])

    def drop_path(self, tokens: Tokens, *, namespace: str) -> None:
        """Drop every path that begins like these tokens, pins included, since a state on it was found to be wrong.

        States below a wrong one were computed from it. Leased paths stay.
        """
        nodes = self.tree.walk(tokens, namespace).nodes
        for top in nodes[1:2]:
            for checkpoint in [c for node in subtree(top) for c in node.checkpoints.values()]:
                self.pins.discard(checkpoint)
            self._evict_all(top, "audit")
            self.tree.forget_lost((nodes[0], *subtree(top)))
        self.order.sweep()

    def reset(self) -> None:
        """Drop everything, leases included, when stored state can no longer be trusted."""
        for checkpoint in self.tree.checkpoints():
            self.pins.discard(checkpoint)
            self.rows.discard(checkpoint)
        self.order.clear()
        self.tree.reset()

    def _evict_all(self, top: Node, reason: str) -> None:
        """Evict what may be evicted of a node and below."""
        # Repeat: dropping the end of a path makes its new end evictable.
        while checkpoints := [c for node in subtree(top) for c in node.checkpoints.values()]:
            num_before = self._evictions.total()
            for checkpoint in checkpoints:
                if checkpoint.is_in_tree and self._may_evict(checkpoint):
                    self._evict(checkpoint, reason)
            if self._evictions.total() == num_before:
                break

    def _evict_for(self, nbytes: int, new: EvictionCandidate | None) -> bool:
        """Evict until `nbytes` fit, but nothing that scores higher than `new`. False if they do not fit."""
        score = None if new is None else self.order.policy.score(new)
        while not self.memory.fits(nbytes):
            missing_nbytes = nbytes - (self.memory.available or 0)
            if not self.memory.evict_from_others(score) and not self._evict_least(new, needed=missing_nbytes):
                return False
        return True

    def _evict_least(self, new: EvictionCandidate | None, *, needed: int = 0) -> bool:
        if self._evict_row():
            return True
        checkpoint = self.order.pop(may_evict=self._may_evict, new=new, needed=needed)
        if checkpoint is not None:
            self._evict(checkpoint, "budget")
        return checkpoint is not None

    def _may_evict(self, checkpoint: Checkpoint) -> bool:
        if self.pins.holds(checkpoint):
            return False
        node = checkpoint.node
        if checkpoint.is_superseded and not self.layout.resumes_anywhere:
            # Requests on this path resumed further on. If leases protected superseded checkpoints, one growing chat
            # would fill the budget with them and have no room for its next one.
            return all(lease.position != checkpoint.position for lease in node.leases)
        below = node.num_leases - len(node.leases)
        return below == 0 and all(lease.position < checkpoint.position for lease in node.leases)

    def _evict(self, checkpoint: Checkpoint, reason: str) -> None:
        self._evictions[reason] += 1
        node, position = checkpoint.node, checkpoint.position
        for sequence in node.sequences():
            # Dropping entries in the buffers of a sequence frees nothing until it is closed.
            self._close_idle(sequence)
        is_end = not node.children and position == node.stop
        if not self.layout.resumes_anywhere:
            self._drop(checkpoint)
            self.tree.note_lost(checkpoint)
            self._trim_path(node, position)
            self._prune(node)
            return
        cut = self.order.evicted_from(checkpoint)
        self._drop(checkpoint)
        if is_end:
            # Only expired pins are checkpoints inside an edge here.
            for behind in [c for c in node.checkpoints.values() if c.position > cut]:
                self._drop(behind)
            self._cut_tail(node, cut, behind=checkpoint)

    def _drop(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint from the tree, the order, the rows and the pins."""
        self.rows.discard(checkpoint)
        self.tree.drop_checkpoint(checkpoint)
        self.pins.discard(checkpoint)
        self.order.remove(checkpoint)

    def _cut_tail(self, leaf: Node, stop: int, *, behind: Checkpoint) -> None:
        """Drop ``[stop, leaf.stop)``, and add a checkpoint at the path's new end so that it can be evicted.

        `behind`: what was the end until now.
        """
        end, is_auxiliary = leaf, behind.is_auxiliary and stop > leaf.start
        if stop > leaf.start:
            self.tree.shorten(leaf, stop)
        else:
            end = self._remove(leaf)
        if end.parent is not None and not end.children and end.stop not in end.checkpoints:
            made = self.tree.add_checkpoint(
                end, end.stop, BoundaryKind.INTERVAL, is_auxiliary=is_auxiliary, stable_at=behind.stable_at
            )
            self.tree.inherit_uses(made)
            self.order.place(made)

    def _trim_path(self, node: Node, position: int) -> None:
        """Drop the window and chunk entries that only a checkpoint or lease at `position` needed.

        O(entries that it needed and what else needs them), however long the path.
        """
        kinds = [kind for kind in self.layout.kinds if not isinstance(kind, Full)]
        needs = {kind: kind.needs(position) for kind in kinds}
        lowest = min((need.start for spans in needs.values() for need in spans), default=position)
        above: Node | None = node
        while above is not None and above.stop > lowest:
            spare: dict[KvKind, list[Span]] = {}
            for kind in kinds:
                spare[kind] = [span for need in needs[kind] for span in unneeded(above, kind, need)]
            self.tree.drop_entries(above, spare)
            above = above.parent

    def _prune(self, node: Node) -> None:
        """Shorten a path to its last checkpoint or lease, removing edges as needed."""
        while node.parent is not None and not node.children:
            stop = end_of_use(node)
            if stop > node.start:
                if stop < node.stop:
                    self.tree.shorten(node, stop)
                    self._place_end(node)
                return
            node = self._remove(node)

    def _remove(self, leaf: Node) -> Node:
        """Remove a leaf; returns its parent."""
        parent = self.tree.remove(leaf)
        self._place_end(parent)  # Fewer paths continue from it.
        return parent

    def _place_end(self, node: Node) -> None:
        """Re-evaluate the checkpoint at the end of this edge, if there is one: its score may have fallen."""
        end = node.checkpoints.get(node.stop)
        if end is not None:
            self.order.place(end)

    # Sharing buffers with sequences: who has these asks the tree for segments, and replaces their payloads there.

    def close_idle_with(self, close_idle: Callable[[object], None]) -> None:
        """Set what closes an idle sequence, replacing what it shares by copies, before any of that is evicted.

        It must ignore running sequences: what they share is dropped, and they keep their buffers.
        """
        self._close_idle = close_idle

    # Compaction.

    def compact(self, *, max_entries: int) -> int:
        """Join small edges and segments, copying at most about `max_entries` entries. Returns the work done.

        0: nothing is left to join. For idle times, a step at a time. O(nodes + entries copied).
        """
        # Set first, so that a compaction that raises is not retried forever.
        self.is_compact = True
        copied = self.tree.compact(max_entries=max_entries)
        self.is_compact = copied == 0
        return copied

    def compact_path(self, tokens: Tokens, *, namespace: str = "", max_entries: int = sys.maxsize) -> int:
        """Like `compact`, for the end of one growing path, so it has few segments even on a server that is never idle.

        Copies at most one segment per layer kind at a time. O(edges of the path) if there is nothing to do.
        """
        return self.tree.compact_path(tokens, namespace, max_entries=max_entries)

    # Integrity.

    def check(self) -> None:
        """Recompute bytes, leases, order and coverage from the trees; AssertionError on any difference."""
        self.tree.check()
        for node in self.tree.nodes():
            for kind in self.layout.kinds:
                if not isinstance(kind, Full):
                    spare = [span for have in node.coverage(kind) for span in unneeded(node, kind, have)]
                    assert not spare, ("window and chunk entries are kept for somebody", kind, spare)
        checkpoints = list(self.tree.checkpoints())
        assert len(self.order) == len(checkpoints), "every checkpoint is in the eviction order exactly once"
        assert all(checkpoint in self.order for checkpoint in checkpoints)
        assert all(checkpoint.is_in_tree for checkpoint in self.pins.noted()), "pinned checkpoints are in the tree"
        self.rows.check()
