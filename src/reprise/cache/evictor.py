"""Makes room in a prefix cache: what may be evicted, what a commit may evict for itself, and what goes with it."""

from collections import Counter
from collections.abc import Callable, Sequence

from reprise.cache.eviction import EvictionOrder, end_of_use, superseded_on, unneeded
from reprise.cache.logits_rows import LogitsRows
from reprise.cache.node import Checkpoint, Lease, Node, Walk, subtree
from reprise.cache.pins import Pins
from reprise.cache.policy import SHARED_KINDS, EvictionCandidate
from reprise.cache.tree import RadixTree
from reprise.core.kinds import Full, KvKind
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span
from reprise.memory import Account, Memory


def _nobody_shares(sequence: object) -> None:
    raise AssertionError(f"entries are in the buffers of {sequence}, and nothing can close it")


class Evictor:
    """Evicts from one tree, charged to one memory budget. Pins and leases stay.

    A lease protects its path, except for superseded checkpoints before its position.
    """

    def __init__(self, tree: RadixTree, order: EvictionOrder, rows: LogitsRows, pins: Pins, memory: Memory) -> None:
        self._tree = tree
        self._layout = tree.layout
        self._order = order
        self._rows = rows
        self._pins = pins
        self._memory = memory
        self.evictions: Counter[str] = Counter()
        """Items dropped so far, by reason."""
        self.close_idle: Callable[[object], None] = _nobody_shares
        """See `PrefixCache.close_idle_with`."""

    # What may go.

    def may_evict(self, checkpoint: Checkpoint) -> bool:
        if self._pins.holds(checkpoint):
            return False
        node = checkpoint.node
        if checkpoint.is_superseded and not self._layout.resumes_anywhere:
            # Requests on this path resumed further on. If leases protected superseded checkpoints, one growing chat
            # would fill the budget with them and have no room for its next one.
            return all(lease.position != checkpoint.position for lease in node.leases)
        below = node.num_leases - len(node.leases)
        return below == 0 and all(lease.position < checkpoint.position for lease in node.leases)

    def _may_replace(self, checkpoint: Checkpoint) -> bool:
        if self._pins.holds(checkpoint) or self.may_evict(checkpoint):
            return False  # What may be evicted anyway makes no further room.
        return all(lease.is_restored for lease in checkpoint.node.leases if lease.position == checkpoint.position)

    # Room for what is to be stored.

    def make_room(
        self,
        nbytes: int,
        new: EvictionCandidate,
        *,
        walk: Walk,
        position: int,
        stable_at: int | None,
        has_snapshot: bool,
        overrides_admission: bool,
    ) -> bool:
        """Make room for a commit of `nbytes` at `position`, past the walked path; False if it does not fit whole.

        It evicts what scores lower than `new` (`overrides_admission`: anything). See `PrefixCache.commit`.
        """
        if nbytes == 0:
            return True
        admitted = None if overrides_admission else new
        replaced = self._replaced(walk, position, new.kind, stable_at) if has_snapshot else []
        if self._admit(nbytes, admitted, replaced):
            return True
        if not new.is_auxiliary and self._admit_for_fallbacks(walk, nbytes, admitted):
            return True
        return has_snapshot and self._admit(nbytes, admitted, [*replaced, *self._passed(walk, new)])

    def _replaced(self, walk: Walk, position: int, kind: BoundaryKind, stable_at: int | None) -> list[Checkpoint]:
        """What a snapshot at `position` replaces, and nothing protects but requests that have resumed from there.

        A path that has outgrown the budget could not get any longer if it needed room for both.
        """
        older = superseded_on(walk.nodes, position, kind, stable_at)
        # The last node may go on beside the path: what lies there is another chat's.
        return [each for each in older if each.position <= walk.length and self._may_replace(each)]

    def _admit_for_fallbacks(self, walk: Walk, nbytes: int, new: EvictionCandidate | None) -> bool:
        """Make room with what this path has to fall back on, if that is enough; otherwise give up none of it.

        A path that fills the budget could not get any longer.
        """
        on_path = (each for node in walk.nodes for each in node.checkpoints.values() if each.position <= walk.length)
        given_up = [each for each in on_path if each.is_fallback]
        if (self._memory.available or 0) + sum(map(self._order.own_nbytes, given_up)) < nbytes:
            return False
        self._keep(given_up, is_kept=False)
        if self._admit(nbytes, new):
            return True
        self._keep([each for each in given_up if each.is_in_tree], is_kept=True)
        return False

    def _keep(self, checkpoints: Sequence[Checkpoint], *, is_kept: bool) -> None:
        for each in checkpoints:
            self._tree.keep(each, is_kept=is_kept)
            self._order.place(each)

    def _passed(self, walk: Walk, new: EvictionCandidate) -> list[Checkpoint]:
        """What the path of a snapshot has passed and is worth less than it, the least useful first.

        Other chats may share it, but a path that fills the budget could not get any longer. Stable checkpoints stay:
        there a chat goes on whose end is rewritten.
        """
        on_path = (each for node in walk.nodes for each in node.checkpoints.values() if each.position <= walk.length)
        passed = [each for each in on_path if each.kind in SHARED_KINDS and self._may_replace(each)]
        scores = {each: self._order.policy.score(self._order.candidate(each)) for each in passed}
        worth = self._order.policy.score(new)
        return sorted((each for each in passed if scores[each] <= worth), key=lambda each: scores[each])

    def _admit(self, nbytes: int, new: EvictionCandidate | None, replaced: Sequence[Checkpoint] = ()) -> bool:
        """Make room for `nbytes` by evicting what scores lower than `new` (None: anything); False if impossible.

        If it cannot succeed, it evicts nothing, unless a beginning can be stored: then it makes room for that. What is
        `replaced` is evicted last, and only if that is enough.
        """
        available = self._memory.available
        if available is None or available >= nbytes:
            return True
        freed = sum(older.snapshot.nbytes for older in replaced if older.snapshot is not None)
        if freed > 0:
            if not self._admit(nbytes - freed, new):
                return False
            for older in replaced:
                if older.is_in_tree and not self._memory.fits(nbytes):
                    self._evict(older, "budget")
            return self._memory.fits(nbytes)
        held = sum(map(self._memory.nbytes, (Account.KV, Account.SNAPSHOTS, Account.LOGITS)))
        most = available + held - self._tree.leased_nbytes() + self._memory.evictable_from_others
        if nbytes > most:
            if new is not None and self._layout.resumes_anywhere and new.cost * most // nbytes >= self._tree.sizes.tail:
                self._evict_for(most, new)
            return False
        return self._evict_for(nbytes, new)

    def stop_that_fits(self, walk: Walk, position: int, nbytes: int) -> int:
        """How far a path of `nbytes` more fits into free memory, if every position is resumable.

        A beginning saves as much per byte as the whole. It is at least as long as what is evicted at a time, so that
        paths do not grow by tiny steps.
        """
        available = self._memory.available
        if available is None or available <= 0 or not self._layout.resumes_anywhere:
            return walk.length
        num = (position - walk.length) * available // nbytes
        return walk.length + num if num >= self._tree.sizes.tail else walk.length

    # Eviction.

    def evict_one(self) -> bool:
        """Evict the item with the lowest score. False if nothing may be evicted."""
        return self._evict_least(None)

    def _evict_least(self, new: EvictionCandidate | None, *, needed: int = 0) -> bool:
        if self.evict_row():
            return True
        checkpoint = self._order.pop(may_evict=self.may_evict, new=new, needed=needed)
        if checkpoint is not None:
            self._evict(checkpoint, "budget")
        return checkpoint is not None

    def _evict_for(self, nbytes: int, new: EvictionCandidate | None) -> bool:
        """Evict until `nbytes` fit, but nothing that scores higher than `new`. False if they do not fit."""
        score = None if new is None else self._order.policy.score(new)
        while not self._memory.fits(nbytes):
            missing_nbytes = nbytes - (self._memory.available or 0)
            if not self._memory.evict_from_others(score) and not self._evict_least(new, needed=missing_nbytes):
                return False
        return True

    def evict_row(self) -> bool:
        """Evict the least recently used row, and its checkpoint if kept only for the row. False if there is none."""
        checkpoint = next(iter(self._rows.checkpoints()), None)
        if checkpoint is None:
            return False
        self._rows.discard(checkpoint)
        node, position = checkpoint.node, checkpoint.position
        is_end = not node.children and position == node.stop
        is_inner = checkpoint.kind is BoundaryKind.PROMPT_END or self._layout.resumes_anywhere
        if is_inner and not is_end and not checkpoint.is_fallback and self.may_evict(checkpoint):
            self.drop(checkpoint)
            if not self._layout.resumes_anywhere:
                self._trim_path(node, position)
        return True

    def evict_all(self, top: Node, reason: str) -> None:
        """Evict what may be evicted of a node and below."""
        # Repeat: dropping the end of a path makes its new end evictable.
        while checkpoints := [c for node in subtree(top) for c in node.checkpoints.values()]:
            num_before = self.evictions.total()
            for checkpoint in checkpoints:
                if checkpoint.is_in_tree and self.may_evict(checkpoint):
                    self._evict(checkpoint, reason)
            if self.evictions.total() == num_before:
                break

    def _evict(self, checkpoint: Checkpoint, reason: str) -> None:
        self.evictions[reason] += 1
        node, position = checkpoint.node, checkpoint.position
        for sequence in node.sequences():
            # Dropping entries in the buffers of a sequence frees nothing until it is closed.
            self.close_idle(sequence)
        is_end = not node.children and position == node.stop
        if not self._layout.resumes_anywhere:
            self.drop(checkpoint)
            self._tree.note_lost(checkpoint)
            self._trim_path(node, position)
            self._prune(node)
            return
        cut = self._order.evicted_from(checkpoint)
        self.drop(checkpoint)
        if is_end:
            # Only expired pins are checkpoints inside an edge here.
            for behind in [c for c in node.checkpoints.values() if c.position > cut]:
                self.drop(behind)
            self._cut_tail(node, cut, behind=checkpoint)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint from the tree, the order, the rows and the pins."""
        self._rows.discard(checkpoint)
        self._tree.drop_checkpoint(checkpoint)
        self._pins.discard(checkpoint)
        self._order.remove(checkpoint)

    # What goes with it.

    def drop_kept_for(self, lease: Lease) -> None:
        """A lease has ended: drop what was kept only for it."""
        if not self._layout.resumes_anywhere:
            self._trim_path(lease.node, lease.position)
            self._prune(lease.node)

    def _cut_tail(self, leaf: Node, stop: int, *, behind: Checkpoint) -> None:
        """Drop ``[stop, leaf.stop)``, and add a checkpoint at the path's new end so that it can be evicted.

        `behind`: what was the end until now.
        """
        end, is_auxiliary = leaf, behind.is_auxiliary and stop > leaf.start
        if stop > leaf.start:
            self._tree.shorten(leaf, stop)
        else:
            end = self._remove(leaf)
        if end.parent is not None and not end.children and end.stop not in end.checkpoints:
            made = self._tree.add_checkpoint(
                end, end.stop, BoundaryKind.INTERVAL, is_auxiliary=is_auxiliary, stable_at=behind.stable_at
            )
            self._tree.inherit_uses(made)
            self._order.place(made)

    def _trim_path(self, node: Node, position: int) -> None:
        """Drop the window and chunk entries that only a checkpoint or lease at `position` needed.

        O(entries that it needed and what else needs them), however long the path.
        """
        kinds = [kind for kind in self._layout.kinds if not isinstance(kind, Full)]
        needs = {kind: kind.needs(position) for kind in kinds}
        lowest = min((need.start for spans in needs.values() for need in spans), default=position)
        above: Node | None = node
        while above is not None and above.stop > lowest:
            spare: dict[KvKind, list[Span]] = {}
            for kind in kinds:
                spare[kind] = [span for need in needs[kind] for span in unneeded(above, kind, need)]
            self._tree.drop_entries(above, spare)
            above = above.parent

    def _prune(self, node: Node) -> None:
        """Shorten a path to its last checkpoint or lease, removing edges as needed."""
        while node.parent is not None and not node.children:
            stop = end_of_use(node)
            if stop > node.start:
                if stop < node.stop:
                    self._tree.shorten(node, stop)
                    self._place_end(node)
                return
            node = self._remove(node)

    def _remove(self, leaf: Node) -> Node:
        """Remove a leaf; returns its parent."""
        parent = self._tree.remove(leaf)
        self._place_end(parent)  # Fewer paths continue from it.
        return parent

    def _place_end(self, node: Node) -> None:
        """Re-evaluate the checkpoint at the end of this edge, if there is one: its score may have fallen."""
        end = node.checkpoints.get(node.stop)
        if end is not None:
            self._order.place(end)
