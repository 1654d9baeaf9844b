"""Pins: positions that stay whatever else would be worth more, until a time on the cache's clock (`now_s`).

A pin keeps its path and its snapshot. Some are set one by one (`cache_control`, an administrator's call) and hold until
their time is over; others follow a conversation (`prompt_cache_retention`), and a later turn's takes the place of an
earlier one's. Where there are too many (`keep_within`), or a running request has no room otherwise, those go first that
would end first; of those that end together, the newest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reprise.cache.store import PrefixCache
from reprise.cache.tree import Landmark, Node, path_to
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens, join_tokens


def pin(cache: PrefixCache, tokens: Tokens, *, namespace: str, until: float) -> Landmark | None:
    """Keep the position ``len(tokens)`` until then, or longer if it is pinned longer. None if it is not resumable."""
    mark = cache.landmark(tokens, namespace=namespace, kind=BoundaryKind.EXPLICIT)
    if mark is None:
        return None
    cache.pins.pin(mark, until)
    return mark


def retain(cache: PrefixCache, tokens: Tokens, *, namespace: str, until: float) -> Landmark | None:
    """The same for a conversation that has come to ``len(tokens)``: what it retained before is let go."""
    mark = cache.landmark(tokens, namespace=namespace, kind=BoundaryKind.STABLE)
    if mark is None:
        return None
    for node in path_to(mark.node):
        for earlier in node.landmarks.values():
            if earlier.position < mark.position:
                cache.pins.retain_no_more(earlier)
    cache.pins.retain(mark, until)
    return mark


def unpin(cache: PrefixCache, mark: Landmark) -> bool:
    """Let the position go. False if it was not pinned."""
    if mark.stays_until <= cache.now_s:
        return False
    cache.pins.lift(mark)
    return True


def lift_one(cache: PrefixCache) -> bool:
    """Let the pin go that would end first. False if there is none. O(pins)."""
    first = min(reversed(list(pinned(cache))), key=lambda mark: mark.stays_until, default=None)
    return first is not None and unpin(cache, first)


def keep_within(cache: PrefixCache, nbytes: int) -> int:
    """Let pins go until the rest keep so many bytes at most. Gives how many went."""
    num = 0
    while kept(cache).nbytes > nbytes:
        lift_one(cache)
        num += 1
    return num


def pinned(cache: PrefixCache) -> Iterator[Landmark]:
    """The landmarks whose pins hold now, oldest pin first."""
    return (mark for mark in cache.pins if mark.stays_until > cache.now_s)


def namespace_of(cache: PrefixCache, mark: Landmark) -> str:
    """The namespace in whose tree the landmark stands. O(depth)."""
    root = path_to(mark.node)[0]
    return next(name for name, known in cache.roots.items() if known is root)


def tokens_of(mark: Landmark) -> Tokens:
    """The prefix that the landmark stands at the end of."""
    return join_tokens(*(node.tokens for node in path_to(mark.node)))[: mark.position]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """How many positions are pinned, how many bytes stay for them, and when the first of them ends (`now_s`)."""

    num: int = 0
    nbytes: int = 0
    until: float = float("inf")


def kept(cache: PrefixCache, *, namespace: str | None = None) -> Kept:
    """What the pins keep, of one namespace or of all: paths that they share count once. O(pins × depth)."""
    marks = [mark for mark in pinned(cache) if namespace is None or namespace_of(cache, mark) == namespace]
    return Kept(
        num=len(marks),
        nbytes=nbytes_of(marks),
        until=min((mark.stays_until for mark in marks), default=float("inf")),
    )


def nbytes_of(marks: list[Landmark]) -> int:
    """The bytes that stay for these landmarks."""
    stops: dict[int, tuple[Node, int]] = {}
    for mark in marks:
        for node in path_to(mark.node):
            stop = min(node.stop, mark.position)
            known = stops.get(id(node))
            stops[id(node)] = (node, stop if known is None else max(stop, known[1]))
    nbytes = sum(_nbytes_to(node, stop) for node, stop in stops.values())
    return nbytes + sum(mark.snapshot.nbytes for mark in marks if mark.snapshot is not None)


def _nbytes_to(node: Node, stop: int) -> int:
    """The bytes of an edge's entries up to `stop`; of a piece that goes on behind it, its share."""
    total = 0
    for pieces in node.pieces.values():
        for piece in pieces:
            inside = piece.span.clip(0, stop)
            total += piece.payload.nbytes * len(inside) // len(piece.span) if inside is not None else 0
    return total
