"""Pins: positions that stay whatever else would be worth more, until a time on the cache's clock (`now_s`).

A pin keeps its path and its snapshot. Some are set one by one (`cache_control`, an administrator's call) and hold until
their time is over; others follow a conversation (`prompt_cache_retention`), and a later turn's takes the place of an
earlier one's. Pins give way to nothing but a running request that has no room otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reprise.cache.store import PrefixCache
from reprise.cache.tree import Landmark, Node, path_to, subtree
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens


def pin(cache: PrefixCache, tokens: Tokens, *, namespace: str, until: float) -> bool:
    """Keep the position ``len(tokens)`` until then, or longer if it is pinned longer. False if it is not resumable."""
    mark = cache.landmark(tokens, namespace=namespace, kind=BoundaryKind.EXPLICIT)
    if mark is None:
        return False
    mark.pinned_until = max(mark.pinned_until, until)
    return True


def retain(cache: PrefixCache, tokens: Tokens, *, namespace: str, until: float) -> bool:
    """The same for a conversation that has come to ``len(tokens)``: what it retained before is let go."""
    mark = cache.landmark(tokens, namespace=namespace, kind=BoundaryKind.STABLE)
    if mark is None:
        return False
    for node in path_to(mark.node):
        for earlier in node.landmarks.values():
            if earlier.position < mark.position:
                earlier.retained_until = 0.0
    mark.retained_until = max(mark.retained_until, until)
    return True


def unpin(cache: PrefixCache, tokens: Tokens, *, namespace: str) -> bool:
    """Let the position ``len(tokens)`` go. False if it was not pinned."""
    match = cache.match(tokens, namespace=namespace)
    node = next((node for node in match.walk.nodes if len(tokens) <= node.stop), None)
    mark = node.landmarks.get(len(tokens)) if node is not None and match.length == len(tokens) else None
    if mark is None or mark.stays_until <= cache.now_s:
        return False
    mark.pinned_until = mark.retained_until = 0.0
    return True


def lift_one(cache: PrefixCache) -> bool:
    """Let the pin go that would end first. False if there is none. O(size of the trees)."""
    first = min(_pinned(cache), key=lambda mark: mark.stays_until, default=None)
    if first is None:
        return False
    first.pinned_until = first.retained_until = 0.0
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """How many positions are pinned, how many bytes stay for them, and when the first of them ends (`now_s`)."""

    num: int = 0
    nbytes: int = 0
    until: float = float("inf")


def pinned(cache: PrefixCache) -> Pinned:
    """What the pins keep: paths that they share count once. O(size of the trees)."""
    marks = list(_pinned(cache))
    stops: dict[int, tuple[Node, int]] = {}
    for mark in marks:
        for node in path_to(mark.node):
            stop = min(node.stop, mark.position)
            known = stops.get(id(node))
            stops[id(node)] = (node, stop if known is None else max(stop, known[1]))
    nbytes = sum(_nbytes_to(node, stop) for node, stop in stops.values())
    nbytes += sum(mark.snapshot.nbytes for mark in marks if mark.snapshot is not None)
    return Pinned(num=len(marks), nbytes=nbytes, until=min((mark.stays_until for mark in marks), default=float("inf")))


def _pinned(cache: PrefixCache) -> Iterator[Landmark]:
    for root in cache.roots.values():
        for node in subtree(root):
            for mark in node.landmarks.values():
                if mark.stays_until > cache.now_s:
                    yield mark


def _nbytes_to(node: Node, stop: int) -> int:
    """The bytes of an edge's entries up to `stop`; of a piece that goes on behind it, its share."""
    total = 0
    for pieces in node.pieces.values():
        for piece in pieces:
            inside = piece.span.clip(0, stop)
            total += piece.payload.nbytes * len(inside) // len(piece.span) if inside is not None else 0
    return total
