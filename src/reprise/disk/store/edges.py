"""The records on disk as a tree of edges, for inspection. Pure: built from index entries."""

from collections.abc import Iterable

import numpy as np

from reprise.core.inspection import DiskEdge, DiskTree
from reprise.core.tokens import Tokens, as_tokens, common_prefix
from reprise.disk.records.record import IndexEntry


def disk_tree(entries: Iterable[tuple[IndexEntry, int]], *, root: bytes, is_whole: bool) -> DiskTree:
    """The tree of these (entry, time of last use in ns), given parents first.

    Edges view the entries' tokens without copying. O(entries + tokens that paths share within a block).
    """
    nothing = as_tokens(())
    top = DiskEdge(key=root.hex(), start=0, tokens=nothing, used_at_s=0.0, parent=None)
    blocks, ends = {root: top}, dict[str, DiskEdge]()
    for entry, used_at_ns in entries:
        tokens = as_tokens(np.frombuffer(entry.tokens, dtype=np.int32))
        end = _grow(blocks[entry.parent], tokens, key=entry.key.hex(), used_at_s=used_at_ns / 1e9)
        end.nbytes += entry.file_nbytes
        ends[entry.key.hex()] = end
        if entry.is_tail:
            end.tail_nbytes += entry.file_nbytes
        else:
            blocks[entry.key] = end
    return DiskTree(root=top, ends=ends, is_whole=is_whole)


def _grow(at: DiskEdge, tokens: Tokens, *, key: str, used_at_s: float) -> DiskEdge:
    """The edge that ends where `tokens` below the end of `at` end; edges are added and split as needed."""
    while True:
        at.used_at_s = max(at.used_at_s, used_at_s)
        if len(tokens) == 0:
            return at
        below = at.children.get(int(tokens[0]))
        if below is None:
            below = DiskEdge(key=key, start=at.stop, tokens=tokens, used_at_s=used_at_s, parent=at)
            at.children[int(tokens[0])] = below
            return below
        num = common_prefix(below.tokens, tokens)
        at, tokens = (below if num == len(below.tokens) else _split(below, num)), tokens[num:]


def _split(lower: DiskEdge, num: int) -> DiskEdge:
    """Split an edge after `num` tokens; returns the new upper edge. `lower` keeps its key and its end."""
    above = lower.parent
    assert above is not None
    upper = DiskEdge(
        key=lower.key, start=lower.start, tokens=lower.tokens[:num], used_at_s=lower.used_at_s, parent=above
    )
    lower.start, lower.tokens, lower.parent = lower.start + num, lower.tokens[num:], upper
    above.children[int(upper.tokens[0])] = upper
    upper.children[int(lower.tokens[0])] = lower
    return upper
