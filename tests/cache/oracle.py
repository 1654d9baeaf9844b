"""What could be reused, found by brute force: a set of stored entries by prefix, and a scan over all positions.

Written apart from the cache: no spans, no tree, no `needs`; a kind is here which positions a token can see.
"""

from collections.abc import Iterable, Iterator, Sequence

from reprise.cache.node import Node
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.kinds import Chunk, Full, KvKind, Layout, Window

Prefix = tuple[int, ...]


def sees(kind: KvKind, token_at: int, position: int) -> bool:
    """Whether a token at `token_at` attends to the entry at `position`, from the definition of the mask."""
    if position > token_at:
        return False
    match kind:
        case Full():
            return True
        case Window(size=size, keep=keep):
            return position < keep or token_at - position < size - keep
        case Chunk(size=size):
            return position // size == token_at // size


class StoreOracle:
    """Remembers everything that was stored, one namespace and prefix at a time."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        # At a chunk's start nothing is needed; still the cache speaks only of prefixes that it has seen.
        self.prefixes: set[tuple[str, Prefix]] = set()
        self.entries: set[tuple[str, KvKind, Prefix]] = set()
        self.snapshots: set[tuple[str, Prefix]] = set()

    def store(self, namespace: str, tokens: Sequence[int]) -> None:
        """A commit of these tokens: what a request that goes on there would look at."""
        prefix = tuple(tokens)
        self.prefixes.update((namespace, prefix[:length]) for length in range(1, len(prefix) + 1))
        for kind in self.layout.kinds:
            for position in range(len(prefix)):
                if sees(kind, len(prefix), position):
                    self.entries.add((namespace, kind, prefix[: position + 1]))
        if self.layout.has_snapshots:
            self.snapshots.add((namespace, prefix))

    def can_resume(self, namespace: str, tokens: Sequence[int], position: int) -> bool:
        prefix = tuple(tokens[:position])
        if position > 0 and (namespace, prefix) not in self.prefixes:
            return False
        if position > 0 and self.layout.has_snapshots and (namespace, prefix) not in self.snapshots:
            return False
        return all(
            (namespace, kind, prefix[: at + 1]) in self.entries
            for kind in self.layout.kinds
            for at in range(position)
            if sees(kind, position, at)
        )

    def resume_at(
        self, namespace: str, tokens: Sequence[int], limit: int, images: Iterable[tuple[int, int]] = ()
    ) -> int:
        """The largest position up to the limit, where no image has tokens on both sides of it."""
        inside = {position for start, stop in images for position in range(start + 1, stop)}
        return next(p for p in range(limit, -1, -1) if p not in inside and self.can_resume(namespace, tokens, p))


def stored_in(cache: PrefixCache) -> StoreOracle:
    """An oracle that knows exactly what the cache's trees hold now, read off node by node."""
    oracle = StoreOracle(cache.layout)
    for namespace, root in cache.tree.roots.items():
        for prefix, node in _nodes(root, ()):
            path = (*prefix, *map(int, node.tokens))
            oracle.prefixes.update((namespace, path[:length]) for length in range(node.start + 1, node.stop + 1))
            for kind, segments in node.segments.items():
                for piece in segments:
                    for at in range(piece.span.start, piece.span.stop):
                        oracle.entries.add((namespace, kind, path[: at + 1]))
            for position, checkpoint in node.checkpoints.items():
                if checkpoint.snapshot is not None:
                    oracle.snapshots.add((namespace, path[:position]))
    return oracle


def _nodes(node: Node, prefix: Prefix) -> Iterator[tuple[Prefix, Node]]:
    yield prefix, node
    below = (*prefix, *map(int, node.tokens))
    for child in node.children.values():
        yield from _nodes(child, below)
