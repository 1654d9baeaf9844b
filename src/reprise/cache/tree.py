"""The radix tree: all stored paths of one model, by namespace.

`RadixTree` is the only code that changes nodes and their contents (`reprise.cache.node`), and it charges the bytes;
what to store is decided in `reprise.cache.prefix_cache`, and what to evict in `reprise.cache.evictor`.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence

from reprise.cache.node import (
    NUM_TOLD_APART,
    Checkpoint,
    CheckpointMap,
    GhostPath,
    Ghosts,
    Lease,
    Node,
    Segment,
    SegmentRef,
    Segments,
    SegmentSizes,
    TreeTotals,
    Walk,
    cut_segments,
    join_ghosts,
    path_to,
    subtree,
)
from reprise.cache.payload import Payload, SegmentPayload
from reprise.core.clock import Clock, monotonic
from reprise.core.inspection import LastUse
from reprise.core.kinds import Full, KvKind, Layout
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, Tokens, as_tokens, common_prefix, covers, join_tokens, own_tokens, subtract, union
from reprise.memory import Account, Memory


class RadixTree:
    """The nodes of all namespaces, and their bytes. Used by one thread."""

    def __init__(self, layout: Layout, memory: Memory, sizes: SegmentSizes, *, time: Clock = monotonic) -> None:
        self.layout = layout
        self._time = time
        self.sizes = sizes
        self._memory = memory
        self.roots: dict[str, Node] = {}
        """By namespace."""
        self.clock = 0
        """Counts uses and commits."""
        self._nodes: dict[int, Node] = {}
        self.totals = TreeTotals()
        """Of all namespaces."""

    # Queries.

    def totals_of(self, namespace: str) -> TreeTotals:
        """What the tree holds of one namespace. Do not change it."""
        root = self.roots.get(namespace)
        return TreeTotals() if root is None else root.totals

    def node(self, serial: int) -> Node | None:
        """The node with this serial number, or None if it is gone."""
        return self._nodes.get(serial)

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents first."""
        for root in self.roots.values():
            yield from subtree(root)

    def checkpoints(self, namespace: str | None = None) -> Iterator[Checkpoint]:
        """All checkpoints of a namespace (None: of all), unordered."""
        for name, root in self.roots.items():
            if namespace in (None, name):
                for node in subtree(root):
                    yield from node.checkpoints.values()

    def walk(self, tokens: Tokens, namespace: str) -> Walk:
        """Follow `tokens` from the root as far as they match. Changes nothing. O(length of the match)."""
        root = self.roots.get(namespace)
        nodes = [root if root is not None else _new_root()]
        at = 0
        while at < len(tokens):
            child = nodes[-1].children.get(int(tokens[at]))
            if child is None:
                break
            shared = common_prefix(child.tokens, tokens[at:])
            nodes.append(child)
            at += shared
            if at < child.stop:
                break
        return Walk(nodes=tuple(nodes), length=at)

    def namespace_of(self, node: Node) -> str:
        """The namespace of a node. O(depth + namespaces)."""
        root = path_to(node)[0]
        return next(name for name, known in self.roots.items() if known is root)

    def leased_nbytes(self) -> int:
        """The bytes of full-attention entries and non-superseded snapshots up to the leases. O(leased nodes)."""
        nbytes = 0
        stack = [root for root in self.roots.values() if root.num_leases > 0]
        while stack:
            node = stack.pop()
            below = [child for child in node.children.values() if child.num_leases > 0]
            stack.extend(below)
            stop = node.stop if below else max(lease.position for lease in node.leases)
            for kind, segments in node.segments.items():
                if isinstance(kind, Full):
                    nbytes += sum(segment.nbytes for segment in segments if segment.span.stop <= stop)
            leased = {lease.position for lease in node.leases}
            for checkpoint in node.checkpoints.values():
                is_needed = not checkpoint.is_superseded or checkpoint.position in leased
                if checkpoint.snapshot is not None and checkpoint.position <= stop and is_needed:
                    nbytes += checkpoint.snapshot.nbytes
        return nbytes

    # Leases and use.

    def protect(self, walk: Walk, position: int) -> Lease:
        """Lease the walked path up to `position`, until `unprotect`. O(depth)."""
        node = next(n for n in walk.nodes if position <= n.stop)
        lease = Lease(node, position)
        node.leases.append(lease)
        for above in path_to(node):
            above.num_leases += 1
        return lease

    def unprotect(self, lease: Lease) -> None:
        """Release a lease. Releasing twice is a bug."""
        assert not lease.is_released, lease
        lease.is_released = True
        lease.node.leases.remove(lease)
        for above in path_to(lease.node):
            above.num_leases -= 1

    def use(self, walk: Walk, position: int, *, use: LastUse = LastUse.RESUMED) -> Checkpoint | None:
        """Mark the walked path as used up to `position`; returns the checkpoint there, if any."""
        self.clock += 1
        now_s = self._time()
        used: Checkpoint | None = None
        for node in walk.nodes:
            if node.start < position:
                self._note_use(node, now_s, use)
                node.num_uses += 1
                used = node.checkpoints.get(position)
        if used is not None:
            used.last_use = self.clock
            used.num_uses += 1
            used.is_left = False
        return used

    def visit(self, node: Node, number: int) -> bool:
        """Record that prompt `number` passed through `node`. False if it or a later one is already recorded."""
        if node.last_visit is not None and number <= node.last_visit:
            return False
        node.last_visit = number
        return True

    def note_first_visit(self, node: Node, number: int) -> None:
        """Record that prompt `number` stored `node`, unless an earlier one did."""
        node.first_visit = number if node.first_visit is None else node.first_visit

    # Growth.

    def extend(self, walk: Walk, tokens: Tokens, namespace: str) -> tuple[Node, ...]:
        """Add the tokens past the walk; returns the nodes from the root to the end of `tokens`."""
        root, last = walk.nodes[0], walk.last
        if namespace not in self.roots:
            self.roots[namespace] = self._nodes[root.serial] = root
            self._count(root, num_nodes=1)
        if walk.length == len(tokens):
            return walk.nodes
        if walk.length < last.stop:
            last = self._split(last, walk.length)
        child = Node(start=walk.length, tokens=own_tokens(tokens[walk.length :]), parent=last, totals=last.totals)
        child.last_visit = last.last_visit
        last.children[int(child.tokens[0])] = self._nodes[child.serial] = child
        self._count(child, num_nodes=1, num_tokens=len(child.tokens))
        return path_to(child)

    def attach(self, path: Sequence[Node], kind: KvKind, segment: Segment) -> None:
        """Attach a segment to the edge of `path` within which its span lies."""
        node = path[bisect_left(path, segment.span.stop, key=lambda n: n.stop)]
        assert node.start <= segment.span.start, (node.start, segment.span)
        insort(node.segments.setdefault(kind, []), segment, key=lambda s: s.span.start)
        self._charge_kv(node, [segment], ())

    def tick(self, path: Iterable[Node]) -> None:
        """Mark this path as just committed to."""
        self.clock += 1
        now_s = self._time()
        for node in path:
            self._note_use(node, now_s, LastUse.STORED)

    def _note_use(self, node: Node, now_s: float, use: LastUse) -> None:
        node.last_use, node.used_at_s, node.used_for = self.clock, now_s, use
        if node.parent is not None:
            beside, first = node.parent.children, int(node.tokens[0])
            beside[first] = beside.pop(first)

    def _split(self, node: Node, position: int) -> Node:
        """Split the edge at `position`, strictly inside it. Returns the new upper node; `node` becomes the lower one.

        Payloads are cut before anything changes, so a failure leaves the tree unchanged.
        """
        assert node.start < position < node.stop and node.parent is not None, (node.start, position, node.stop)
        above, below = _cut(node, node.start, position), _cut(node, position, node.stop)
        head, tail = own_tokens(node.tokens[: position - node.start]), own_tokens(node.tokens[position - node.start :])
        upper = Node(start=node.start, tokens=head, parent=node.parent, totals=node.totals)
        node.parent.children[int(head[0])] = upper
        upper.children[int(tail[0])] = node
        for at in [p for p in node.checkpoints if p <= position]:
            checkpoint = node.checkpoints.pop(at)
            checkpoint.node = upper
            upper.checkpoints[at] = checkpoint
        upper.num_leases, upper.last_use, upper.num_uses = node.num_leases, node.last_use, node.num_uses
        upper.used_at_s, upper.used_for = node.used_at_s, node.used_for
        upper.last_visit, upper.first_visit = node.last_visit, node.first_visit
        if node.ghosts is not None:
            upper.ghosts, node.ghosts = node.ghosts.up_to(position), node.ghosts.after(position)
        for lease in [lease for lease in node.leases if lease.position <= position]:
            node.leases.remove(lease)
            node.num_leases -= 1
            upper.leases.append(lease)
            lease.node = upper
        node.parent, node.start, node.tokens = upper, position, tail
        self._set_segments(node, below)
        self._set_segments(upper, above)
        self._nodes[upper.serial] = upper
        self._count(upper, num_nodes=1)
        return upper

    # Checkpoints.

    def add_checkpoint(
        self, node: Node, position: int, kind: BoundaryKind, *, is_auxiliary: bool = False, stable_at: int | None = None
    ) -> Checkpoint:
        """Add a checkpoint to this edge, without a snapshot."""
        checkpoint = Checkpoint(position, kind, node, is_auxiliary=is_auxiliary, stable_at=stable_at)
        checkpoint.last_use = node.last_use
        node.checkpoints[position] = checkpoint
        self._count(node, num_checkpoints=1)
        if node.ghosts is not None:
            node.ghosts.forget_checkpoint(position)
        return checkpoint

    def renew_checkpoint(
        self, checkpoint: Checkpoint, kind: BoundaryKind, *, is_auxiliary: bool, stable_at: int | None
    ) -> None:
        """Record another commit at this checkpoint: it is a tip again, and gets the better of the two kinds."""
        checkpoint.kind = min(kind, checkpoint.kind, key=list(BoundaryKind).index)
        checkpoint.last_use = checkpoint.node.last_use
        checkpoint.superseded_by, checkpoint.is_left, checkpoint.stable_at = None, False, stable_at
        checkpoint.is_auxiliary = checkpoint.is_auxiliary and is_auxiliary

    def inherit_uses(self, checkpoint: Checkpoint) -> None:
        """Count the uses of the path as uses of its new end."""
        checkpoint.num_uses = checkpoint.node.num_uses

    def save(self, checkpoint: Checkpoint, snapshot: Payload) -> None:
        assert checkpoint.snapshot is None, checkpoint
        checkpoint.snapshot = snapshot
        self._memory.charge(Account.SNAPSHOTS, snapshot.nbytes)
        self._count(checkpoint.node, nbytes=snapshot.nbytes)

    def supersede(self, checkpoint: Checkpoint, by: Checkpoint) -> None:
        """Mark the checkpoint as superseded by a newer one of the same conversation."""
        checkpoint.superseded_by, checkpoint.is_kept = by, False

    def leave(self, checkpoint: Checkpoint) -> None:
        """Mark the checkpoint as one where its conversation does not go on."""
        checkpoint.is_left, checkpoint.is_kept = True, False

    def keep(self, checkpoint: Checkpoint, *, is_kept: bool) -> None:
        """Have a superseded checkpoint stay to fall back on, or not."""
        checkpoint.is_kept = is_kept

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint and release its bytes."""
        del checkpoint.node.checkpoints[checkpoint.position]
        # Where every position is resumable, the path to it may remain, or have grown.
        checkpoint.is_lost = not self.layout.resumes_anywhere
        self._count(checkpoint.node, num_checkpoints=-1)
        if checkpoint.snapshot is not None:
            self._memory.charge(Account.SNAPSHOTS, -checkpoint.snapshot.nbytes)
            self._count(checkpoint.node, nbytes=-checkpoint.snapshot.nbytes)
            # The eviction order may keep the checkpoint for a while; free its snapshot now.
            checkpoint.snapshot = None

    def note_lost(self, checkpoint: Checkpoint) -> None:
        """Remember that this position was evicted."""
        _ghosts(checkpoint.node).add_checkpoint(checkpoint.position)

    def note_cancelled(self, walk: Walk, rest: Tokens) -> None:
        """Remember that a request was cancelled before it had computed what follows this walk, `rest`."""
        stop = walk.length + len(rest)
        _ghosts(walk.last).add_path(GhostPath.of(rest, start=walk.length, stop=stop, is_cancelled=True))

    def forget_lost(self, nodes: Iterable[Node]) -> None:
        """Forget what these edges lack: it was dropped on purpose."""
        for node in nodes:
            node.ghosts = None

    # Removal.

    def drop_entries(self, node: Node, spans: Mapping[KvKind, Sequence[Span]]) -> None:
        """Drop the entries of these spans, which are in ascending order, from this edge.

        Touches only the segments that hold any of them, and cuts before anything changes.
        """
        runs = {kind: _run_within(node.segments[kind], spans[kind]) for kind in spans if kind in node.segments}
        rests = {
            kind: [
                segment.cut(part)
                for segment in node.segments[kind][run]
                for part in subtract((segment.span,), spans[kind])
            ]
            for kind, run in runs.items()
        }
        for kind, run in runs.items():
            segments, rest = node.segments[kind], rests[kind]
            before, segments[run] = segments[run], rest
            if not segments:
                del node.segments[kind]
            self._charge_kv(node, rest, before)

    def shorten(self, leaf: Node, stop: int) -> None:
        """Drop the tokens ``[stop, leaf.stop)`` of a leaf, of which at least one must remain."""
        assert not leaf.children and leaf.start < stop < leaf.stop, (leaf.start, stop, leaf.stop)
        self.drop_entries(leaf, {kind: [Span(stop, leaf.stop)] for kind in leaf.segments})
        self._count(leaf, num_tokens=stop - leaf.stop)
        lost = _lost_with(leaf, stop)
        leaf.ghosts = _ghosts(leaf).up_to(stop)
        for path in lost:
            leaf.ghosts.add_path(path)
        leaf.tokens = own_tokens(leaf.tokens[: stop - leaf.start])

    def remove(self, leaf: Node) -> Node:
        """Remove a leaf without checkpoints and leases; returns its parent."""
        parent = leaf.parent
        assert parent is not None and leaf.num_leases == 0 and not leaf.checkpoints and not leaf.children, leaf.start
        del parent.children[int(leaf.tokens[0])]
        self._set_segments(leaf, {})
        self._count(leaf, num_nodes=-1, num_tokens=-len(leaf.tokens))
        del self._nodes[leaf.serial]
        leaf.parent = None
        for path in _lost_with(leaf, leaf.start):
            _ghosts(parent).add_path(path)
        return parent

    def remove_empty_root(self, namespace: str) -> None:
        """Remove a namespace if it is empty and not leased."""
        root = self.roots[namespace]
        if not root.children and root.num_leases == 0:
            del self.roots[namespace], self._nodes[root.serial]
            self._count(root, num_nodes=-1)

    def reset(self) -> None:
        """Drop everything at once, leases included."""
        for node in self.nodes():
            # Reference cycles may keep the nodes alive for a while: free their bytes now.
            for checkpoint in list(node.checkpoints.values()):
                self.drop_checkpoint(checkpoint)
            self._set_segments(node, {})
        self.roots, self._nodes = {}, {}
        self.totals = TreeTotals()

    # Sharing buffers with sequences.

    def owned_segments(self, tokens: Tokens, namespace: str) -> list[SegmentRef]:
        """The full-attention segments on this path that the tree owns and at most one lease covers."""
        walk = self.walk(tokens, namespace)
        return [
            SegmentRef(node, kind, segment)
            for node in walk.nodes
            if node.num_leases <= 1
            for kind, segments in node.segments.items()
            if isinstance(kind, Full)
            for segment in segments
            if segment.span.stop <= walk.length and segment.sequence is None
        ]

    def shared_segments(self, sequence: object, tokens: Tokens, namespace: str, *, start: int = 0) -> list[SegmentRef]:
        """The segments on this path past `start`, or across it, that are in the buffers of `sequence`, in order."""
        return [
            SegmentRef(node, kind, segment)
            for node in self.walk(tokens, namespace).nodes
            for kind, segments in node.segments.items()
            for segment in segments
            if segment.sequence is sequence and segment.span.stop > start
        ]

    def cut_shared(self, sequence: object, tokens: Tokens, namespace: str, position: int) -> None:
        """Split the segments in the buffers of `sequence` that cross `position`. Copies nothing."""
        for ref in self.shared_segments(sequence, tokens, namespace):
            span = ref.segment.span
            if span.start < position < span.stop:
                parts = [ref.segment.cut(Span(span.start, position)), ref.segment.cut(Span(position, span.stop))]
                segments = ref.node.segments[ref.kind]
                at = segments.index(ref.segment)
                segments[at : at + 1] = parts

    def replace(self, refs: Sequence[SegmentRef], payloads: Sequence[SegmentPayload]) -> None:
        """Replace payloads by others of the same entries: shared ones by copies, or the reverse."""
        for ref, payload in zip(refs, payloads, strict=True):
            segments = ref.node.segments[ref.kind]
            new = Segment(ref.segment.span, payload)
            segments[segments.index(ref.segment)] = new
            self._charge_kv(ref.node, [new], [ref.segment])

    # Compaction: the 200th turn of a conversation restores as fast as its second. Tokens, entries, checkpoints and
    # leases stay the same (the same objects), in fewer nodes and segments.

    def compact(self, *, max_entries: int) -> int:
        """Merge all chains of edges, and join segments until `max_entries` entries were copied.

        Returns the work done; 0: nothing is left to join. Each step leaves the tree consistent, even if the next one
        fails. O(nodes + entries copied).
        """
        num_merged = num_copied = 0
        for root in list(self.roots.values()):
            for node in subtree(root):
                if node.parent is not None and len(node.children) == 1:
                    num_merged += self._merge_chain(node)
                while num_copied < max_entries and (run := _joinable(node, self.sizes.longest)) is not None:
                    num_copied += self._join(node, *run)
        return num_merged + num_copied

    def compact_path(self, tokens: Tokens, namespace: str, *, max_entries: int) -> int:
        """Like `compact`, for the end of one path: merges its edges, and joins segments with others as long.

        Segment lengths then grow like powers of two, so there are few, and each entry is copied only a few times
        however often the path grows. O(edges of the path) if there is nothing to do.
        """
        node = last = self.walk(tokens, namespace).last
        while (above := node.parent) is not None and above.parent is not None and len(above.children) == 1:
            node = above
        if node.parent is None:
            return 0
        done = self._merge_chain(node) if node is not last else 0
        copied = 0
        while copied < max_entries and (run := _joinable(node, self.sizes.longest, is_growing=True)) is not None:
            copied += self._join(node, *run)
        return done + copied

    def _merge_chain(self, top: Node) -> int:
        """Merge `top` and the chain of only children below it into `top`. Returns the number of nodes removed."""
        chain = [top]
        while len(chain[-1].children) == 1:
            chain.extend(chain[-1].children.values())
        top.tokens = join_tokens(*(node.tokens for node in chain))
        top.children = chain[-1].children
        for child in top.children.values():
            child.parent = top
        for node in chain[1:]:
            for kind, segments in node.segments.items():
                top.segments.setdefault(kind, []).extend(segments)
            for at, checkpoint in node.checkpoints.items():
                checkpoint.node = top
                top.checkpoints[at] = checkpoint
            for lease in node.leases:
                lease.node = top
                top.leases.append(lease)
        newest = max(chain, key=lambda node: node.last_use)
        top.last_use, top.used_at_s, top.used_for = newest.last_use, newest.used_at_s, newest.used_for
        top.last_visit = max((n.last_visit for n in chain if n.last_visit is not None), default=None)
        top.num_uses = max(node.num_uses for node in chain)
        top.ghosts = join_ghosts(node.ghosts for node in chain)
        for node in chain[1:]:
            del self._nodes[node.serial]
            # References to the removed node must not keep its payloads alive.
            node.parent, node.children, node.segments, node.checkpoints = None, {}, {}, CheckpointMap()
            node.leases, node.tokens = [], as_tokens(())
        self._count(top, num_nodes=1 - len(chain))
        return len(chain) - 1

    def _join(self, node: Node, kind: KvKind, first: int, stop: int) -> int:
        """Join the segments ``[first, stop)`` into one. Returns the entries copied."""
        segments = node.segments[kind]
        head, *rest = run = segments[first:stop]
        span = Span(head.span.start, run[-1].span.stop)
        joined = Segment(span, head.payload.join([segment.payload for segment in rest]))
        segments[first:stop] = [joined]
        self._charge_kv(node, [joined], run)
        return len(span)

    # Bytes.

    def _set_segments(self, node: Node, segments: Segments) -> None:
        before, node.segments = node.segments, segments
        self._charge_kv(node, _flat(segments), _flat(before))

    def _charge_kv(self, node: Node, new: Iterable[Segment], old: Iterable[Segment]) -> None:
        """On this edge these segments came, and those went: the one place where the bytes of entries are charged.

        Entries in a sequence's buffers move between the tree's account and the sequences'.
        """
        own = shared = 0
        for sign, segments in ((1, new), (-1, old)):
            for segment in segments:
                if segment.sequence is None:
                    own += sign * segment.nbytes
                else:
                    shared += sign * segment.nbytes
        self._memory.charge(Account.KV, own)
        self._memory.transfer(Account.SEQUENCES, Account.KV, shared)
        self._count(node, nbytes=own + shared)

    def _count(
        self, node: Node, *, num_nodes: int = 0, num_tokens: int = 0, num_checkpoints: int = 0, nbytes: int = 0
    ) -> None:
        """So much more is held where `node` is. The one place that changes totals."""
        for totals in (self.totals, node.totals):
            totals.num_nodes += num_nodes
            totals.num_tokens += num_tokens
            totals.num_checkpoints += num_checkpoints
            totals.nbytes += nbytes

    # Integrity.

    def check(self) -> None:
        """Recompute everything from the nodes; AssertionError on any difference. O(size of the tree)."""
        kv = snapshots = 0
        nodes: dict[int, Node] = {}
        counted = TreeTotals()
        for root in self.roots.values():
            assert root.start == 0 and len(root.tokens) == 0 and root.parent is None
            assert not root.segments and not root.checkpoints
            own = TreeTotals()
            for node in subtree(root):
                _check_node(node, self.layout)
                assert node.totals is root.totals, "the nodes of a namespace count together"
                of_node = sum(c.snapshot.nbytes for c in node.checkpoints.values() if c.snapshot is not None)
                kv += node.nbytes
                snapshots += of_node
                nodes[node.serial] = node
                for totals in (own, counted):
                    totals.num_nodes += 1
                    totals.num_tokens += len(node.tokens)
                    totals.num_checkpoints += len(node.checkpoints)
                    totals.nbytes += node.nbytes + of_node
            assert own == root.totals, (own, root.totals)
        assert counted == self.totals, (counted, self.totals)
        assert nodes == self._nodes, nodes.keys() ^ self._nodes.keys()
        self._memory.check({Account.KV: kv, Account.SNAPSHOTS: snapshots})


def _new_root() -> Node:
    return Node(start=0, tokens=as_tokens(()), parent=None, totals=TreeTotals())


def _lost_with(leaf: Node, start: int) -> list[GhostPath]:
    """What is lost where a leaf is cut at `start`: what branched off behind that and was lost before, then its rest.

    The rest counts as far as any path through the leaf reached before any of them was evicted.
    """
    known = [] if leaf.ghosts is None else leaf.ghosts.paths
    cut = leaf.tokens[start - leaf.start :]
    near = [path for path in known if 0 < path.start - start < NUM_TOLD_APART]
    branched = [path.begun_at(start, cut[: path.start - start]) for path in near]
    reached = max((leaf.stop, *(path.stop for path in known if not path.is_cancelled)))
    return [*branched, GhostPath.of(cut, start=start, stop=reached)]


def _ghosts(node: Node) -> Ghosts:
    if node.ghosts is None:
        node.ghosts = Ghosts()
    return node.ghosts


def _flat(segments: Segments) -> Iterator[Segment]:
    return (segment for group in segments.values() for segment in group)


def _cut(node: Node, start: int, stop: int) -> Segments:
    """The segments of this edge within ``[start, stop)``, by kind."""
    cut = {kind: cut_segments(segments, Span(start, stop)) for kind, segments in node.segments.items()}
    return {kind: segments for kind, segments in cut.items() if segments}


def _run_within(segments: Sequence[Segment], spans: Sequence[Span]) -> slice:
    """Which of these segments may hold positions of the spans, in ascending order."""
    if not spans:
        return slice(0, 0)
    first = bisect_right(segments, spans[0].start, key=lambda segment: segment.span.stop)
    return slice(first, bisect_left(segments, spans[-1].stop, key=lambda segment: segment.span.start))


def _joinable(node: Node, longest: int, *, is_growing: bool = False) -> tuple[KvKind, int, int] | None:
    """The first run of adjacent segments that fit into one of `longest` tokens, as (kind, first, stop), or None.

    `is_growing`: more segments will follow, with which the joined one may be joined again. Segments in a sequence's
    buffers join only each other: otherwise they would be copied while the sequence still holds them.
    """
    for kind, segments in node.segments.items():
        for first in range(len(segments) - 1):
            stop = first + 1
            while stop < len(segments) and _adjoin(segments, stop) and _tokens(segments, first, stop + 1) <= longest:
                stop += 1
            # Copy an entry again only if its segment at least doubles.
            is_worth = not is_growing or len(segments[first].span) <= _tokens(segments, first + 1, stop)
            if stop - first > 1 and is_worth:
                return kind, first, stop
    return None


def _adjoin(segments: Sequence[Segment], at: int) -> bool:
    """Whether the segment at index `at` starts where the previous one ends and has the same owner."""
    before, after = segments[at - 1], segments[at]
    return after.span.start == before.span.stop and after.sequence is before.sequence


def _tokens(segments: Sequence[Segment], first: int, stop: int) -> int:
    return segments[stop - 1].span.stop - segments[first].span.start


def _check_node(node: Node, layout: Layout) -> None:
    assert not node.tokens.flags.writeable and node.tokens.base is None, "tokens own their bytes"
    for first, child in node.children.items():
        assert child.parent is node and child.start == node.stop and len(child.tokens) > 0
        assert int(child.tokens[0]) == first
    uses = [child.last_use for child in node.children.values()]
    assert uses == sorted(uses), "children are in order of use"
    assert node.num_leases == len(node.leases) + sum(child.num_leases for child in node.children.values())
    for lease in node.leases:
        assert lease.node is node and not lease.is_released and node.start <= lease.position <= node.stop
    for kind, segments in node.segments.items():
        assert kind in layout.kinds and segments, kind
        at = node.start
        for segment in segments:
            assert at <= segment.span.start < segment.span.stop <= node.stop, (kind, segment.span)
            at = segment.span.stop
    for kind in layout.kinds:
        if isinstance(kind, Full):
            whole = (Span(node.start, node.stop),)
            assert covers(node.coverage(kind), whole), ("full attention entries are complete on every edge", node.start)
    for position, checkpoint in node.checkpoints.items():
        assert checkpoint.node is node and checkpoint.position == position and node.start < position <= node.stop
        assert (checkpoint.snapshot is not None) == layout.has_snapshots, position
        _check_resumable(node, position, layout)
    if not node.children and node.parent is not None:
        # If every position is resumable, only a checkpoint at a path's end makes the path evictable, leased or not.
        is_leased = any(lease.position == node.stop for lease in node.leases) and not layout.resumes_anywhere
        assert node.stop in node.checkpoints or is_leased, ("a path ends at a checkpoint", node.start, node.stop)


def _check_resumable(node: Node, position: int, layout: Layout) -> None:
    for kind in layout.kinds:
        if isinstance(kind, Full):
            continue  # `_check_node` verifies that it is complete on every edge.
        have = union(span for above in path_to(node) for span in above.coverage(kind))
        assert covers(have, kind.needs(position)), (kind, position, have)
