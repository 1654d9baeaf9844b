"""Inspection of the tree: nodes in memory, joined with those only on disk. Changes nothing."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from reprise.cache.node import Node, path_to
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.inspection import (
    DiskEdge,
    DiskTree,
    EdgeTokens,
    InspectedCheckpoint,
    InspectedNode,
    InspectedTree,
    TreePart,
)
from reprise.core.tokens import common_prefix, join_tokens
from reprise.disk.store.cache import DiskCache, DiskCursor
from reprise.loop.requests import Decoding, Prefilling, RunningRequest

_NUM_FIRST_TOKENS = 24
"""How many tokens of an edge are shown."""


def inspect_tree(
    cache: PrefixCache,
    disk: DiskCache | None,
    requests: Iterable[RunningRequest],
    *,
    max_nodes: int,
    now_s: float,
    part: TreePart,
) -> InspectedTree:
    """The most recently used nodes, parents first."""
    leased: dict[int, list[str]] = defaultdict(list)
    for request in requests:
        if isinstance(request.phase, Prefilling | Decoding) and request.phase.lease is not None:
            leased[request.phase.lease.node.serial].append(request.id)
    nodes: list[InspectedNode] = []
    cursors: dict[int, DiskCursor] = {}
    """Cursors on disk at the ends of the nodes shown, as far as their paths are on disk."""
    has_more = False
    for at, found in enumerate(_newest_first(cache, part)):
        has_more = len(nodes) == max_nodes
        if has_more:
            break
        node = found.node
        if not isinstance(node, Node):
            if at >= part.skip:
                nodes.append(_inspected_on_disk(node, found, now_s=now_s))
            continue
        on_disk: Mapping[int, int] = {}
        if disk is not None:
            place = cursors.get(node.parent.serial) if node.parent is not None else disk.start(found.namespace)
            if place is not None:
                ends = [position - node.start for position in node.checkpoints]
                cursor, on_disk = disk.follow(place, node.tokens, ends)
                if cursor is not None:
                    cursors[node.serial] = cursor
        if at >= part.skip:
            nodes.append(_inspected(found, node, cache, on_disk, tuple(leased[node.serial]), now_s=now_s))
    totals = cache.tree.totals if part.namespace is None else cache.tree.totals_of(part.namespace)
    return InspectedTree(
        nodes=tuple(nodes),
        num_nodes=totals.num_nodes,
        num_tokens=totals.num_tokens,
        num_checkpoints=totals.num_checkpoints,
        nbytes=totals.nbytes,
        evictions=cache.stats.evictions,
        has_more=has_more or (part.on_disk is not None and not part.on_disk.is_whole),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _DiskRun:
    """A chain of edges on disk without branches, from `start`."""

    start: int
    edges: tuple[DiskEdge, ...]

    @property
    def stop(self) -> int:
        return self.edges[-1].stop

    @property
    def children(self) -> list[_DiskRun]:
        return [_run_on_disk(child) for child in self.edges[-1].children.values()]

    @property
    def id(self) -> str:
        return f"{self.edges[-1].key}-{self.start}-{self.stop}"


def _run_on_disk(edge: DiskEdge, start: int = 0) -> _DiskRun:
    """The run from `start` within an edge, or from the edge's start, to the next branch."""
    edges = [edge]
    while len(edges[-1].children) == 1:
        edges.extend(edges[-1].children.values())
    return _DiskRun(start=max(start, edge.start), edges=tuple(edges))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """A node or run that is shown, and the runs on disk that branch off it."""

    node: Node | _DiskRun
    parent: int | str | None
    namespace: str
    used_at_s: float
    """At most that of its parent."""
    branches: Sequence[_DiskRun]
    place: tuple[DiskEdge, int] | None
    """Its end on disk: an edge, and an offset in it. None if it is not on disk."""


def _newest_first(cache: PrefixCache, part: TreePart) -> Iterator[_Shown]:
    """The nodes of a part and the runs that are only on disk, most recently used first, parents before children."""
    on_disk = part.on_disk
    # The disk has wall-clock times, the cache monotonic ones.
    ahead_s = time.time() - time.monotonic()
    num = count()
    left: list[tuple[float, int, int, Node | _DiskRun, _Shown | None, str]] = []

    def add(node: Node | _DiskRun, above: _Shown | None, namespace: str) -> None:
        is_in_memory = isinstance(node, Node)
        used_at_s = node.used_at_s if is_in_memory else node.edges[0].used_at_s - ahead_s
        if above is not None:
            used_at_s = min(used_at_s, above.used_at_s)
        last_use = node.last_use if is_in_memory else 0
        heapq.heappush(left, (-used_at_s, -last_use, next(num), node, above, namespace))

    for namespace, top in _tops(cache, part):
        add(top, None, namespace)
    if on_disk is not None and part.namespace is not None:
        for run in _tops_on_disk(cache, on_disk, part):
            add(run, None, part.namespace)
    while left:
        newest_at_s, _, _, node, above, namespace = heapq.heappop(left)
        branches, place = (node.children, None) if isinstance(node, _DiskRun) else ([], None)
        if isinstance(node, Node) and on_disk is not None:
            begins = above.place if above is not None else _place_of(on_disk, node)
            branches, place = _follow(begins, node) if begins is not None else ([], None)
        shown = _Shown(
            node=node,
            parent=_parent_of(node, above),
            namespace=namespace,
            used_at_s=-newest_at_s,
            branches=branches,
            place=place,
        )
        yield shown
        for below in (*branches, *(node.children.values() if isinstance(node, Node) else ())):
            add(below, shown, namespace)


def _parent_of(node: Node | _DiskRun, above: _Shown | None) -> int | str | None:
    if isinstance(node, Node):
        return node.parent.serial if node.parent is not None else None
    if above is None:
        return None
    return above.node.serial if isinstance(above.node, Node) else above.node.id


def _tops_on_disk(cache: PrefixCache, on_disk: DiskTree, part: TreePart) -> list[_DiskRun]:
    """The runs at which the part begins, if it is only on disk; other runs are found at the nodes they branch off."""
    if part.under is None and part.namespace not in cache.tree.roots:
        return [_run_on_disk(edge) for edge in on_disk.root.children.values()]
    run = _run_under(on_disk, part.under) if isinstance(part.under, str) else None
    return [] if run is None else [run]


def _place_of(on_disk: DiskTree, node: Node) -> tuple[DiskEdge, int] | None:
    """The place on disk at the start of a node's edge."""
    place: tuple[DiskEdge, int] | None = (on_disk.root, 0)
    for above in path_to(node)[:-1]:
        if place is not None:
            _, place = _follow(place, above)
    return place


def _follow(place: tuple[DiskEdge, int], node: Node) -> tuple[list[_DiskRun], tuple[DiskEdge, int] | None]:
    """The runs on disk that branch off within a node's edge or at its end beside its children; and the end's place.

    O(edges on disk along the node's edge).
    """
    leaves: list[_DiskRun] = []
    (edge, num), tokens, is_above = place, node.tokens, True
    while len(tokens) > 0:
        if num == len(edge.tokens):
            if not is_above:
                leaves += [_run_on_disk(each) for first, each in edge.children.items() if first != int(tokens[0])]
            below = edge.children.get(int(tokens[0]))
            if below is None:
                return leaves, None
            edge, num = below, 0
        same = common_prefix(edge.tokens[num:], tokens)
        num, tokens = num + same, tokens[same:]
        # Branches at the node's start belong to the node above.
        is_above = is_above and same == 0
        if len(tokens) > 0 and num < len(edge.tokens):
            return leaves if is_above else [*leaves, _run_on_disk(edge, edge.start + num)], None
    if num < len(edge.tokens):
        if int(edge.tokens[num]) not in node.children:
            leaves.append(_run_on_disk(edge, edge.start + num))
    else:
        leaves += [_run_on_disk(each) for first, each in edge.children.items() if first not in node.children]
    return leaves, (edge, num)


def _run_under(on_disk: DiskTree, name: str) -> _DiskRun | None:
    """The run with this `id`, or None."""
    key, start, stop = name.split("-")
    edge = on_disk.ends.get(key)
    if edge is None or not int(start) < int(stop) <= edge.stop:
        return None
    while edge.parent is not None and edge.start > int(start):
        edge = edge.parent
    return _run_on_disk(edge, int(start))


def _tops(cache: PrefixCache, part: TreePart) -> list[tuple[str, Node]]:
    """The nodes in memory at which the part begins, with their namespaces."""
    if part.under is None:
        return [(name, root) for name, root in cache.tree.roots.items() if part.namespace in (None, name)]
    node = cache.tree.node(part.under) if isinstance(part.under, int) else None
    if node is None:
        return []
    name = cache.tree.namespace_of(node)
    return [(name, node)] if part.namespace in (None, name) else []


def edge_tokens(cache: PrefixCache, part: TreePart, *, max_nodes: int) -> list[EdgeTokens]:
    """The tokens of the `max_nodes` most recently used nodes of a part; those in memory are not copied."""
    found: list[EdgeTokens] = []
    for shown in islice(_newest_first(cache, part), max_nodes):
        node = shown.node
        if isinstance(node, Node):
            found.append(EdgeTokens(id=node.serial, start=node.start, tokens=node.tokens))
        else:
            first, *others = node.edges
            tokens = join_tokens(first.tokens[node.start - first.start :], *(edge.tokens for edge in others))
            found.append(EdgeTokens(id=node.id, start=node.start, tokens=tokens))
    return found


def _inspected_on_disk(run: _DiskRun, shown: _Shown, *, now_s: float) -> InspectedNode:
    first: list[int] = []
    for edge in run.edges:
        first += map(int, edge.tokens[max(0, run.start - edge.start) :][: _NUM_FIRST_TOKENS - len(first)])
        if len(first) == _NUM_FIRST_TOKENS:
            break
    return InspectedNode(
        id=run.id,
        parent=shown.parent,
        namespace=shown.namespace,
        start=run.start,
        num_tokens=run.stop - run.start,
        first_tokens=tuple(first),
        disk_nbytes=sum(edge.nbytes for edge in run.edges),
        age_s=max(0.0, now_s - shown.used_at_s),
        num_children=len(shown.branches),
        checkpoints=tuple(
            InspectedCheckpoint(position=edge.stop, disk_nbytes=edge.tail_nbytes)
            for edge in run.edges
            if edge.tail_nbytes > 0
        ),
    )


def _inspected(
    shown: _Shown,
    node: Node,
    cache: PrefixCache,
    on_disk: Mapping[int, int],
    request_ids: tuple[str, ...],
    *,
    now_s: float,
) -> InspectedNode:
    segments = [segment for group in node.segments.values() for segment in group]
    return InspectedNode(
        id=node.serial,
        parent=shown.parent,
        namespace=shown.namespace,
        start=node.start,
        num_tokens=len(node.tokens),
        first_tokens=tuple(map(int, node.tokens[:_NUM_FIRST_TOKENS])),
        nbytes=node.nbytes,
        shared_nbytes=sum(segment.nbytes for segment in segments if segment.sequence is not None),
        disk_nbytes=sum(on_disk.values()),
        age_s=max(0.0, now_s - node.used_at_s),
        last_use=node.used_for,
        num_uses=node.num_uses,
        num_children=len(node.children) + len(shown.branches),
        checkpoints=tuple(
            InspectedCheckpoint(
                position=position,
                kind=checkpoint.kind,
                nbytes=checkpoint.snapshot.nbytes if checkpoint.snapshot is not None else 0,
                disk_nbytes=on_disk.get(position - node.start, 0),
                num_uses=checkpoint.num_uses,
                is_superseded=checkpoint.is_superseded,
                pinned_for_s=cache.pins.until(checkpoint) - now_s if cache.pins.holds(checkpoint) else None,
            )
            for position, checkpoint in node.checkpoints.items()
        ),
        request_ids=request_ids,
    )
