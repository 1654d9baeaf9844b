"""The radix tree's nodes. Structure only: no bytes are counted and nothing is decided here.

A node stands for the edge that leads to it: the tokens ``[start, stop)`` of every path through it. Pieces (segments)
hang on the edge by layer kind, landmarks hang on positions in ``(start, stop]``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from reprise.cache.ghosts import Ghosts
from reprise.cache.landmarks import Landmarks
from reprise.cache.payload import SegmentPayload, SnapshotPayload
from reprise.core.kinds import Full, KvKind
from reprise.core.prompt import BoundaryKind
from reprise.core.spans import Span, union
from reprise.core.tokens import Tokens, as_tokens, common_prefix, own_tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """The entries of one layer kind for `span`, which lies within one edge."""

    span: Span
    payload: SegmentPayload


@dataclass(slots=True, eq=False)
class Landmark:
    """A position that a commit promised to be resumable, and what is known of its use.

    `snapshot` is None for models without snapshots. `last_use` is the cache's clock (a count of requests) when the
    position was made or resumed from; `num_uses` counts the resumes. `is_superseded`: a later tip of the same
    conversation exists. `version` marks its newest place in the order of eviction. `stable_at`: from there on the next
    turn may have something else (None: not known); kept where every position is resumable, and up to that one matter.
    """

    position: int
    kind: BoundaryKind
    node: "Node"
    snapshot: SnapshotPayload | None = None
    made_at: int = 0
    last_use: int = 0
    num_uses: int = 0
    is_superseded: bool = False
    is_side: bool = False
    stable_at: int | None = None
    pinned_until: float = 0.0
    retained_until: float = 0.0
    """Like `pinned_until`, until a later position of the same path is retained (`reprise.cache.pins`)."""
    floor: float = 0.0
    version: int = 0

    @property
    def stays_until(self) -> float:
        """Until when it may not be evicted, on the cache's clock."""
        return max(self.pinned_until, self.retained_until)


@dataclass(slots=True, eq=False)
class Lease:
    """Protects the path from the root to `position` while a request uses it.

    `number`: how the policy knows the request, 0 if nobody asked.
    """

    node: "Node"
    position: int
    number: int = 0
    is_released: bool = False


@dataclass(slots=True, eq=False)
class Node:
    """One edge and what hangs on it.

    `num_leases` counts the leases in this node and below it; `last_use` is the clock of the last path through it and
    `num_uses` how many paths went through.
    """

    start: int
    tokens: Tokens
    parent: "Node | None"
    children: dict[int, "Node"] = field(default_factory=dict[int, "Node"])
    pieces: dict[KvKind, list[Piece]] = field(default_factory=dict[KvKind, list[Piece]])
    landmarks: Landmarks = field(default_factory=Landmarks)
    leases: list[Lease] = field(default_factory=list[Lease])
    num_leases: int = 0
    last_use: int = 0
    num_uses: int = 0
    visit: int = 0
    """The policy's number of the prompt that came by last; `first_visit`: of the first."""
    first_visit: int = 0
    ghosts: Ghosts | None = None
    """What was evicted from this edge; None: nothing was."""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def coverage(self, kind: KvKind) -> tuple[Span, ...]:
        """Which positions of this edge have entries of `kind`."""
        return union(piece.span for piece in self.pieces.get(kind, ()))


def new_root() -> Node:
    return Node(start=0, tokens=as_tokens(()), parent=None)


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


def walk(root: Node, tokens: Tokens) -> Walk:
    """Follow `tokens` from the root as far as the tree agrees. Changes nothing. O(length of the match)."""
    nodes = [root]
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


def cut_spans(pieces: Sequence[Piece], span: Span) -> list[Piece]:
    """The pieces of `span` alone. A piece that lies within is shared, one that is cut is copied."""
    inside: list[Piece] = []
    for piece in pieces:
        part = piece.span.clip(span.start, span.stop)
        if part == piece.span:
            inside.append(piece)
        elif part is not None:
            offset = piece.span.start
            inside.append(Piece(part, piece.payload.cut(part.start - offset, part.stop - offset)))
    return inside


def cut_pieces(node: Node, start: int, stop: int) -> dict[KvKind, list[Piece]]:
    """The pieces of ``[start, stop)`` of this edge, by kind."""
    cut = {kind: cut_spans(pieces, Span(start, stop)) for kind, pieces in node.pieces.items()}
    return {kind: pieces for kind, pieces in cut.items() if pieces}


def kv_nbytes(node: Node) -> int:
    """The bytes of all pieces on this edge."""
    return sum(piece.payload.nbytes for pieces in node.pieces.values() for piece in pieces)


def split(node: Node, position: int) -> Node:
    """Split the edge at `position`, strictly inside it. Gives the new upper node; `node` stays the lower one.

    The payloads are cut before anything changes, so a failure leaves the tree as it was.
    """
    assert node.start < position < node.stop and node.parent is not None, (node.start, position, node.stop)
    upper_pieces = cut_pieces(node, node.start, position)
    lower_pieces = cut_pieces(node, position, node.stop)
    head, tail = own_tokens(node.tokens[: position - node.start]), own_tokens(node.tokens[position - node.start :])
    upper = Node(start=node.start, tokens=head, parent=node.parent, pieces=upper_pieces)
    node.parent.children[int(head[0])] = upper
    upper.children[int(tail[0])] = node
    for at in [p for p in node.landmarks if p <= position]:
        landmark = node.landmarks.pop(at)
        landmark.node = upper
        upper.landmarks[at] = landmark
    upper.num_leases, upper.last_use, upper.num_uses = node.num_leases, node.last_use, node.num_uses
    upper.visit, upper.first_visit = node.visit, node.first_visit
    if node.ghosts is not None:
        upper.ghosts, node.ghosts = node.ghosts.up_to(position), node.ghosts.behind(position)
    for lease in [lease for lease in node.leases if lease.position <= position]:
        node.leases.remove(lease)
        node.num_leases -= 1
        upper.leases.append(lease)
        lease.node = upper
    node.parent, node.start, node.tokens, node.pieces = upper, position, tail, lower_pieces
    return upper


def leased_nbytes(roots: Iterable[Node]) -> int:
    """The bytes of full-attention entries and snapshots up to the leases, but for superseded ones on the way.

    O(leased nodes).
    """
    nbytes = 0
    stack = [root for root in roots if root.num_leases > 0]
    while stack:
        node = stack.pop()
        below = [child for child in node.children.values() if child.num_leases > 0]
        stack.extend(below)
        stop = node.stop if below else max(lease.position for lease in node.leases)
        for kind, pieces in node.pieces.items():
            if isinstance(kind, Full):
                nbytes += sum(piece.payload.nbytes for piece in pieces if piece.span.stop <= stop)
        leased = {lease.position for lease in node.leases}
        for mark in node.landmarks.values():
            is_needed = not mark.is_superseded or mark.position in leased
            if mark.snapshot is not None and mark.position <= stop and is_needed:
                nbytes += mark.snapshot.nbytes
    return nbytes
