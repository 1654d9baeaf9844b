"""Joins what a long conversation leaves in small parts, so that its 200th turn restores as fast as its second.

Runs while the server is idle, a step at a time; and for one path alone, however busy the server is, when that has come
to be made of many parts. The tree's meaning does not change: the same tokens, entries,
landmarks and leases, in fewer nodes and pieces. Landmarks and leases keep their identity, so their places in the
order of eviction stay good.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from reprise.cache.ghosts import join_ghosts
from reprise.cache.landmarks import Landmarks
from reprise.cache.loans import lender_of
from reprise.cache.tree import Node, Piece, kv_nbytes, subtree
from reprise.core.kinds import KvKind
from reprise.core.spans import Span
from reprise.core.tokens import as_tokens, join_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """What a step did: nodes merged away, or entries copied and by how much the bytes of the pieces changed."""

    num_nodes: int = 0
    num_entries: int = 0
    nbytes: int = 0


def compaction_steps(roots: Iterable[Node], *, longest: int, max_entries: int) -> Iterator[Compacted]:
    """Merge all chains of edges, and join pieces up to `longest` tokens until `max_entries` entries were copied.

    Each step is whole when it is given, so that the books are right even if the next one fails.
    """
    num_entries = 0
    for root in roots:
        for node in subtree(root):
            if node.parent is not None and len(node.children) == 1:
                yield Compacted(num_nodes=_merge_chain(node))
            while num_entries < max_entries and (found := _joinable(node, longest)) is not None:
                before = kv_nbytes(node)
                copied = _join(node, *found)
                num_entries += copied
                yield Compacted(num_entries=copied, nbytes=kv_nbytes(node) - before)


def path_steps(path: Sequence[Node], *, longest: int) -> Iterator[Compacted]:
    """Join what the end of a path, given from the root on, is made of: its edges, and pieces with others as long.

    The pieces that are left grow like powers of two, so they are few, and an entry is copied a few times in all however
    often the path grows. Steps as in `compaction_steps`.
    """
    chain = list(path[-1:])
    while (above := chain[-1].parent) is not None and above.parent is not None and len(above.children) == 1:
        chain.append(above)
    node = chain[-1]
    if node.parent is None:
        return
    if len(chain) > 1:
        yield Compacted(num_nodes=_merge_chain(node))
    while (found := _joinable(node, longest, is_growing=True)) is not None:
        before = kv_nbytes(node)
        copied = _join(node, *found)
        yield Compacted(num_entries=copied, nbytes=kv_nbytes(node) - before)


def _merge_chain(top: Node) -> int:
    """Make one edge of `top` and the only children below it. `top` stays; gives how many nodes went."""
    chain = [top]
    while len(chain[-1].children) == 1:
        chain.extend(chain[-1].children.values())
    top.tokens = join_tokens(*(node.tokens for node in chain))
    top.children = chain[-1].children
    for child in top.children.values():
        child.parent = top
    for node in chain[1:]:
        for landmark in node.landmarks.values():
            landmark.node = top
        for lease in node.leases:
            lease.node = top
        top.landmarks.update(node.landmarks)
        top.leases.extend(node.leases)
        for kind, pieces in node.pieces.items():
            top.pieces.setdefault(kind, []).extend(pieces)
    top.last_use = max(node.last_use for node in chain)
    top.visit = max(node.visit for node in chain)
    top.num_uses = max(node.num_uses for node in chain)
    top.ghosts = join_ghosts(node.ghosts for node in chain)
    for node in chain[1:]:
        # Whoever still holds the node must not keep its payloads alive.
        node.parent, node.children, node.pieces, node.landmarks, node.leases = None, {}, {}, Landmarks(), []
        node.tokens = as_tokens(())
    return len(chain) - 1


def _joinable(node: Node, longest: int, *, is_growing: bool = False) -> tuple[KvKind, int, int] | None:
    """The first run of adjacent pieces that fit into one of `longest` tokens, as (kind, first, stop), or None.

    `is_growing`: more will come, and what is joined now may be joined with that again.
    What is lent joins only what the same sequence lends. Else it would be copied, while the sequence holds it still.
    """
    for kind, pieces in node.pieces.items():
        for first in range(len(pieces) - 1):
            stop = first + 1
            while stop < len(pieces) and _adjoin(pieces, stop) and _tokens(pieces, first, stop + 1) <= longest:
                stop += 1
            # Copied once more only where that makes the piece that it stands in twice as long.
            is_worth = not is_growing or len(pieces[first].span) <= _tokens(pieces, first + 1, stop)
            if stop - first > 1 and is_worth:
                return kind, first, stop
    return None


def _adjoin(pieces: Sequence[Piece], at: int) -> bool:
    """Whether the piece at `at` goes on where the one before ends, in the hands of the same holder."""
    before, after = pieces[at - 1], pieces[at]
    return after.span.start == before.span.stop and lender_of(after) is lender_of(before)


def _tokens(pieces: Sequence[Piece], first: int, stop: int) -> int:
    return pieces[stop - 1].span.stop - pieces[first].span.start


def _join(node: Node, kind: KvKind, first: int, stop: int) -> int:
    """Make one piece of the pieces ``[first, stop)``. Gives the entries copied."""
    pieces = node.pieces[kind]
    head, *rest = pieces[first:stop]
    joined = head.payload.join([piece.payload for piece in rest])
    span = Span(head.span.start, pieces[stop - 1].span.stop)
    node.pieces[kind] = [*pieces[:first], Piece(span, joined), *pieces[stop:]]
    return len(span)
