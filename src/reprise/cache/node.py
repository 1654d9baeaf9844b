"""What the radix tree is made of: edges with the segments, checkpoints and leases that hang on them.

A node stands for the edge that leads to it: the tokens ``[start, stop)`` of every path through it. Segments hang on the
edge by layer kind, checkpoints on positions in ``(start, stop]``. Only `reprise.cache.tree.RadixTree` assigns fields.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, MutableMapping, Sequence, ValuesView
from dataclasses import dataclass, field
from itertools import count

from reprise.cache.payload import SegmentPayload, SharedPayload, SnapshotPayload
from reprise.core.inspection import LastUse
from reprise.core.kinds import KvKind
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, Tokens, union

_MOST_GHOSTS = 64
"""How many of each are remembered for one edge; the oldest are forgotten first."""


@dataclass(slots=True)
class Ghosts:
    """The evicted checkpoints of one edge, and the evicted paths that left it.

    A path is known by where it left and the token that it went on with.
    """

    checkpoints: list[int] = field(default_factory=list[int])
    paths: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def lose_checkpoint(self, position: int) -> None:
        self.forget_checkpoint(position)
        self.checkpoints = [*self.checkpoints, position][-_MOST_GHOSTS:]

    def lose_path(self, position: int, token: int) -> None:
        lost = (position, token)
        self.paths = [*(path for path in self.paths if path != lost), lost][-_MOST_GHOSTS:]

    def forget_checkpoint(self, position: int) -> None:
        """The checkpoint was made again."""
        self.checkpoints = [at for at in self.checkpoints if at != position]

    def up_to(self, position: int) -> "Ghosts":
        """The part of the edge that ends at `position`."""
        return Ghosts(
            checkpoints=[at for at in self.checkpoints if at <= position],
            paths=[path for path in self.paths if path[0] <= position],
        )

    def behind(self, position: int) -> "Ghosts":
        """The part of the edge that begins at `position`."""
        return Ghosts(
            checkpoints=[at for at in self.checkpoints if at > position],
            paths=[path for path in self.paths if path[0] > position],
        )


def join_ghosts(parts: Iterable[Ghosts | None]) -> Ghosts | None:
    """Those of several edges that became one."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return Ghosts(
        checkpoints=[at for part in known for at in part.checkpoints][-_MOST_GHOSTS:],
        paths=[path for part in known for path in part.paths][-_MOST_GHOSTS:],
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """The entries of one layer kind for `span`, which lies within one edge."""

    span: Span
    payload: SegmentPayload

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes

    @property
    def sequence(self) -> object | None:
        """Whose buffers the entries stand in; None: the tree has its own."""
        return self.payload.sequence if isinstance(self.payload, SharedPayload) else None

    def cut(self, span: Span) -> "Segment":
        """The entries of `span` alone, which lies within this one."""
        if span == self.span:
            return self
        return Segment(span, self.payload.cut(span.start - self.span.start, span.stop - self.span.start))


Segments = dict[KvKind, list[Segment]]
"""What hangs on one edge: by kind, in order of position."""


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A position that a commit promised to be resumable, and what is known of its use.

    `snapshot` is None for models without snapshots. `last_use` is the tree's clock when the position was made or
    resumed from; `num_uses` counts the resumes. `is_superseded`: a later tip of the same conversation exists.
    `is_auxiliary`: only side requests (titles, tags) came here. `stable_at`: from there on the next turn may have
    something else (None: not known); kept where every position is resumable, and up to that one matter.
    """

    position: int
    kind: BoundaryKind
    node: "Node"
    snapshot: SnapshotPayload | None = None
    last_use: int = 0
    num_uses: int = 0
    is_superseded: bool = False
    is_auxiliary: bool = False
    stable_at: int | None = None

    @property
    def is_in_tree(self) -> bool:
        return self.node.checkpoints.get(self.position) is self


class CheckpointMap(MutableMapping[int, Checkpoint]):
    """The checkpoints of one edge by position, in order of position."""

    __slots__ = ("_by_position", "_positions")

    def __init__(self) -> None:
        self._by_position: dict[int, Checkpoint] = {}
        self._positions: list[int] = []

    def __getitem__(self, position: int) -> Checkpoint:
        return self._by_position[position]

    def __setitem__(self, position: int, checkpoint: Checkpoint) -> None:
        if position not in self._by_position:
            insort(self._positions, position)
        self._by_position[position] = checkpoint

    def __delitem__(self, position: int) -> None:
        del self._by_position[position]
        del self._positions[bisect_left(self._positions, position)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def __contains__(self, position: object) -> bool:
        return position in self._by_position

    def values(self) -> ValuesView[Checkpoint]:
        """The checkpoints, in no order."""
        return self._by_position.values()

    def highest(self, limit: int) -> int | None:
        """The highest position ≤ `limit` that has a checkpoint, or None. O(log n)."""
        number = bisect_right(self._positions, limit)
        return self._positions[number - 1] if number > 0 else None


@dataclass(slots=True, eq=False)
class Lease:
    """Protects the path from the root to `position` while a request uses it.

    `number`: how the policy knows the request, None if nobody asked.
    """

    node: "Node"
    position: int
    number: int | None = None
    is_released: bool = False


@dataclass(slots=True)
class TreeTotals:
    """What the tree holds of a namespace, or of all. `nbytes`: of entries and snapshots."""

    num_nodes: int = 0
    num_tokens: int = 0
    num_checkpoints: int = 0
    nbytes: int = 0


_serials = count()


@dataclass(slots=True, eq=False)
class Node:
    """One edge and what hangs on it.

    `num_leases` counts the leases in this node and below it; `last_use` is the clock of the last path through it and
    `num_uses` how many paths went through.
    """

    start: int
    tokens: Tokens
    parent: "Node | None"
    totals: TreeTotals
    """Of its namespace, which all nodes of that share."""
    children: dict[int, "Node"] = field(default_factory=dict[int, "Node"])
    segments: Segments = field(default_factory=Segments)
    checkpoints: CheckpointMap = field(default_factory=CheckpointMap)
    leases: list[Lease] = field(default_factory=list[Lease])
    num_leases: int = 0
    last_use: int = 0
    num_uses: int = 0
    used_at_s: float = 0.0
    """When it was used last, and for what: for whoever looks (`last_use` is what decides)."""
    used_for: LastUse = LastUse.STORED
    serial: int = field(default_factory=_serials.__next__)
    """Tells it from all other nodes of the process."""
    last_visit: int | None = None
    """The policy's number of the prompt that came by last; `first_visit`: of the first."""
    first_visit: int | None = None
    ghosts: Ghosts | None = None
    """What was evicted from this edge; None: nothing was."""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        """The bytes of all segments on this edge."""
        return sum(segment.nbytes for group in self.segments.values() for segment in group)

    def coverage(self, kind: KvKind) -> tuple[Span, ...]:
        """Which positions of this edge have entries of `kind`."""
        return union(segment.span for segment in self.segments.get(kind, ()))

    def sequences(self) -> tuple[object, ...]:
        """Whose buffers entries of this edge stand in, each once."""
        holders = {id(segment.sequence): segment.sequence for group in self.segments.values() for segment in group}
        return tuple(holder for holder in holders.values() if holder is not None)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRef:
    """Where a segment hangs. Valid until the tree changes; who keeps one keeps its entries alive."""

    node: Node
    kind: KvKind
    segment: Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSizes:
    """How finely payloads are cut, in tokens.

    `longest`: of a segment, which bounds what a split or an eviction has to copy. `tail`: how much of a path's end is
    evicted at a time where every position is resumable.
    """

    longest: int = 2048
    tail: int = 1024

    def __post_init__(self) -> None:
        assert self.longest > 0 and self.tail > 0, self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """How far a prompt agrees with the tree: `nodes` from the root down, the last perhaps only in part.

    Valid until the tree changes.
    """

    nodes: tuple[Node, ...]
    length: int

    @property
    def last(self) -> Node:
        return self.nodes[-1]


def path_to(node: Node) -> tuple[Node, ...]:
    """The nodes from the root to `node`."""
    nodes = [node]
    while (parent := nodes[-1].parent) is not None:
        nodes.append(parent)
    return tuple(reversed(nodes))


def subtree(node: Node) -> Iterator[Node]:
    """`node` and everything below it, parents first."""
    stack = [node]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(top.children.values())


def cut_segments(segments: Sequence[Segment], span: Span) -> list[Segment]:
    """The segments of `span` alone. One that lies within is the same object, one that is cut is copied."""
    inside = ((segment, segment.span.clip(span.start, span.stop)) for segment in segments)
    return [segment.cut(part) for segment, part in inside if part is not None]
