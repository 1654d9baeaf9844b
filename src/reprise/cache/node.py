"""The parts of the radix tree: nodes with their segments, checkpoints and leases.

A node represents the edge that leads to it: the tokens ``[start, stop)`` of every path through it. It has segments by
layer kind, and checkpoints at positions in ``(start, stop]``. Only `reprise.cache.tree.RadixTree` assigns fields.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, MutableMapping, Sequence, ValuesView
from dataclasses import dataclass, field
from itertools import count

from reprise.cache.payload import Payload, SegmentPayload, SharedPayload
from reprise.core.inspection import LastUse
from reprise.core.kinds import KvKind
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, Tokens, as_tokens, join_tokens, union

_MOST_GHOSTS = 64
"""How many of each are remembered per edge; the oldest are forgotten first."""


NUM_TOLD_APART = 16
"""A path that is not stored is recognised by as many of its tokens: one alone may begin anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GhostPath:
    """A path that branched off at `start` and is not stored: its first tokens, at most 16, and where it ended.

    It was evicted, or would have been stored by a request that was cancelled before it got there.
    """

    start: int
    tokens: tuple[int, ...]
    stop: int
    is_cancelled: bool = False

    @classmethod
    def of(cls, tokens: Tokens, *, start: int, stop: int, is_cancelled: bool = False) -> "GhostPath":
        """The path with these tokens from `start` on."""
        first = tuple(tokens[:NUM_TOLD_APART].tolist())
        return cls(start=start, tokens=first, stop=stop, is_cancelled=is_cancelled)

    def begun_at(self, start: int, tokens: Tokens) -> "GhostPath":
        """The same path from an earlier `start`, with the `tokens` between."""
        return GhostPath.of(
            join_tokens(tokens, as_tokens(self.tokens)), start=start, stop=self.stop, is_cancelled=self.is_cancelled
        )

    def is_on(self, tokens: Tokens) -> bool:
        """Whether `tokens`, at least one, which follow at `start`, begin like this path or end on it."""
        following = tuple(tokens[: len(self.tokens)].tolist())
        return following != () and self.tokens[: len(following)] == following


@dataclass(slots=True)
class Ghosts:
    """The evicted checkpoints of one edge, and the paths that branched off it and are not stored."""

    checkpoints: list[int] = field(default_factory=list[int])
    paths: list[GhostPath] = field(default_factory=list[GhostPath])

    def add_checkpoint(self, position: int) -> None:
        self.forget_checkpoint(position)
        self.checkpoints = [*self.checkpoints, position][-_MOST_GHOSTS:]

    def add_path(self, lost: GhostPath) -> None:
        """Remember a path, in place of what is known of the same one."""
        others = (path for path in self.paths if (path.start, path.tokens) != (lost.start, lost.tokens))
        self.paths = [*others, lost][-_MOST_GHOSTS:]

    def forget_checkpoint(self, position: int) -> None:
        """Forget a checkpoint that exists again."""
        self.checkpoints = [at for at in self.checkpoints if at != position]

    def up_to(self, position: int) -> "Ghosts":
        """The part of the edge that ends at `position`."""
        return Ghosts(
            checkpoints=[at for at in self.checkpoints if at <= position],
            paths=[path for path in self.paths if path.start <= position],
        )

    def after(self, position: int) -> "Ghosts":
        """The part of the edge that begins at `position`."""
        return Ghosts(
            checkpoints=[at for at in self.checkpoints if at > position],
            paths=[path for path in self.paths if path.start > position],
        )


def join_ghosts(parts: Iterable[Ghosts | None]) -> Ghosts | None:
    """The ghosts of several edges that were merged."""
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
        """The sequence whose buffers hold the entries; None: the tree has its own copy."""
        return self.payload.sequence if isinstance(self.payload, SharedPayload) else None

    def cut(self, span: Span) -> "Segment":
        """The entries of `span`, which lies within this one."""
        if span == self.span:
            return self
        return Segment(span, self.payload.cut(span.start - self.span.start, span.stop - self.span.start))


Segments = dict[KvKind, list[Segment]]
"""The segments of one edge by kind, in order of position."""


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A position that a commit made resumable, and its use since.

    `snapshot` is None for models without snapshots. `last_use` is the tree's clock when the position was committed or
    resumed from; `num_uses` counts the resumes. `superseded_by`: a later tip of the same conversation. `is_lost`: it
    was dropped, so its conversation cannot resume here. `is_left`: the conversation's next turn is known to begin
    otherwise. `is_kept`: it stays once it is superseded, since no other is near below. `is_auxiliary`: only auxiliary
    requests (titles, tags) used it. `stable_at`: the next turn may differ past this position (None: not known).
    """

    position: int
    kind: BoundaryKind
    node: "Node"
    snapshot: Payload | None = None
    last_use: int = 0
    num_uses: int = 0
    superseded_by: "Checkpoint | None" = None
    is_lost: bool = False
    is_left: bool = False
    is_kept: bool = False
    is_auxiliary: bool = False
    stable_at: int | None = None

    @property
    def is_fallback(self) -> bool:
        """Whether its conversation resumes here once what is beyond is evicted."""
        return self.is_kept and self.is_superseded

    @property
    def is_useful(self) -> bool:
        """Whether its conversation may resume here: now, or once what is beyond is evicted."""
        return self.is_kept or not self.is_superseded

    @property
    def is_superseded(self) -> bool:
        """Whether its conversation resumes elsewhere: at a later tip, or where its next turn parts from this path."""
        by = self.superseded_by
        while by is not None and (by.is_lost or by.is_left):
            by = by.superseded_by
        return self.is_left or by is not None

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
        """The checkpoints, unordered."""
        return self._by_position.values()

    def highest(self, limit: int) -> int | None:
        """The highest position ≤ `limit` with a checkpoint, or None. O(log n)."""
        number = bisect_right(self._positions, limit)
        return self._positions[number - 1] if number > 0 else None

    def down_from(self, limit: int) -> Iterator[Checkpoint]:
        """The checkpoints at positions ≤ `limit`, highest first."""
        for at in range(bisect_right(self._positions, limit) - 1, -1, -1):
            yield self._by_position[self._positions[at]]

    def within(self, first: int, last: int) -> list[int]:
        """The positions from `first` to `last`, both included. O(log n + what is found)."""
        return self._positions[bisect_left(self._positions, first) : bisect_right(self._positions, last)]


@dataclass(slots=True, eq=False)
class Lease:
    """Protects the path from the root to `position` while a request uses it.

    `number`: the policy's number of the request, None for work that no client asked for. `is_restored`: the request
    has a copy of what it resumed from, so the snapshot at `position` may be replaced by one further on.
    """

    node: "Node"
    position: int
    number: int | None = None
    is_restored: bool = False
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
    """One edge with its segments, checkpoints and leases.

    `num_leases` counts the leases in this node and below; `last_use` is the tree's clock at the last use of a path
    through it, `num_uses` the number of such uses.
    """

    start: int
    tokens: Tokens
    parent: "Node | None"
    totals: TreeTotals
    """Of its namespace, which all nodes of that share."""
    children: dict[int, "Node"] = field(default_factory=dict[int, "Node"])
    """By first token, the last used one last."""
    segments: Segments = field(default_factory=Segments)
    checkpoints: CheckpointMap = field(default_factory=CheckpointMap)
    leases: list[Lease] = field(default_factory=list[Lease])
    num_leases: int = 0
    last_use: int = 0
    num_uses: int = 0
    used_at_s: float = 0.0
    """Time and kind of the last use, for inspection only (decisions use `last_use`)."""
    used_for: LastUse = LastUse.STORED
    serial: int = field(default_factory=_serials.__next__)
    """Unique within the process."""
    last_visit: int | None = None
    """The policy's number of the last prompt through this edge; `first_visit`: of the first."""
    first_visit: int | None = None
    ghosts: Ghosts | None = None
    """What this edge lacks because it was evicted or its computation cancelled; None if nothing is known to."""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments of this edge."""
        return sum(segment.nbytes for group in self.segments.values() for segment in group)

    def coverage(self, kind: KvKind) -> tuple[Span, ...]:
        """The positions of this edge that have entries of `kind`."""
        return union(segment.span for segment in self.segments.get(kind, ()))

    def sequences(self) -> tuple[object, ...]:
        """The sequences whose buffers hold entries of this edge, each once."""
        holders = {id(segment.sequence): segment.sequence for group in self.segments.values() for segment in group}
        return tuple(holder for holder in holders.values() if holder is not None)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRef:
    """A segment and its place in the tree. Valid until the tree changes; keeps the segment's entries alive."""

    node: Node
    kind: KvKind
    segment: Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSizes:
    """Sizes in tokens.

    `longest`: the longest segment, which bounds what a split or an eviction copies. `tail`: how much of a path's end is
    evicted at a time if every position is resumable. `fallback`: how far apart the superseded checkpoints of a path are
    that stay, so that its end alone can be evicted if windows or chunks need some; 0: none. Snapshots are too large.
    """

    longest: int = 2048
    tail: int = 1024
    fallback: int = 0

    def __post_init__(self) -> None:
        assert self.longest > 0 and self.tail > 0 and self.fallback >= 0, self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """The path of a prompt in the tree: `nodes` from the root down, of which the last may match only in part.

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
    """The parts of the segments within `span`: a segment that lies within is the same object, others are cut."""
    inside = ((segment, segment.span.clip(span.start, span.stop)) for segment in segments)
    return [segment.cut(part) for segment, part in inside if part is not None]
