"""A model without a model: the entry of a layer at a position is a hash of the kind and of the prefix up to there.

So whoever hands out a wrong entry, an old one, another chat's or one of another kind, changes what is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from reprise.cache.prefix_cache import PrefixCache
from reprise.core.kinds import KvKind
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, as_tokens

ENTRY_NBYTES = 10
SNAPSHOT_NBYTES = 70


class SourceFailed(Exception):
    """What a source raises that was told to fail."""


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """`[h0, h1, …]`: the hash of each prefix, that of the empty one first."""
    hashes = [hash("start")]
    for token in tokens:
        hashes.append(hash((hashes[-1], int(token))))
    return hashes


def cold_entries(tokens: Sequence[int], kind: KvKind) -> list[object]:
    """What a layer of this kind holds after a cold run, were it to forget nothing."""
    return [(kind, digest) for digest in prefix_hashes(tokens)[1:]]


def cold_snapshot(tokens: Sequence[int]) -> object:
    return ("state", prefix_hashes(tokens)[-1])


ALIVE: "WeakSet[HashSegment | HashSnapshot]" = WeakSet()
"""Every payload that somebody still holds."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class HashSegment:
    items: tuple[object, ...]

    def __post_init__(self) -> None:
        ALIVE.add(self)

    @property
    def nbytes(self) -> int:
        return len(self.items) * ENTRY_NBYTES

    def cut(self, start: int, stop: int) -> "HashSegment":
        assert 0 <= start < stop <= len(self.items), (start, stop, len(self.items))
        return HashSegment(self.items[start:stop])

    def join(self, others: Sequence["HashSegment"]) -> "HashSegment":
        return HashSegment(sum((other.items for other in others), self.items))


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class HashSnapshot:
    item: object

    def __post_init__(self) -> None:
        ALIVE.add(self)

    @property
    def nbytes(self) -> int:
        return SNAPSHOT_NBYTES


class HashSource:
    """A live sequence that stands behind `tokens`. With `fails_after` n, its payload number n (from 0) raises."""

    def __init__(self, tokens: Sequence[int], *, fails_after: int | None = None) -> None:
        self.tokens = [int(token) for token in tokens]
        self.left = fails_after
        self.copied: list[tuple[KvKind, Span]] = []

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        return ENTRY_NBYTES * length

    def snapshot_nbytes(self) -> int:
        return SNAPSHOT_NBYTES

    def segment(self, kind: KvKind, span: Span) -> HashSegment:
        self._count()
        # A layer has forgotten what it does not need any more: asking for it is a bug.
        assert any(need.start <= span.start and span.stop <= need.stop for need in kind.needs(len(self.tokens)))
        self.copied.append((kind, span))
        return HashSegment(tuple(cold_entries(self.tokens, kind)[span.start : span.stop]))

    def snapshot(self) -> HashSnapshot:
        self._count()
        return HashSnapshot(cold_snapshot(self.tokens))

    def _count(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise SourceFailed
            self.left -= 1


class BlankSource:
    """A live sequence whose entries are all the same, for tests that look at the tree alone."""

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        return ENTRY_NBYTES * length

    def snapshot_nbytes(self) -> int:
        return 0

    def segment(self, kind: KvKind, span: Span) -> HashSegment:
        return HashSegment((0,) * len(span))

    def snapshot(self) -> HashSnapshot:
        raise AssertionError("full attention needs no snapshot")


def fill_with_chats(cache: PrefixCache, *, num_chats: int, num_turns: int, names: int = 400) -> None:
    """Chats that share a system prompt, with a regenerated answer at every turn: two edges a turn.

    A chat begins with two tokens that name it, below `names`.
    """
    for chat in range(num_chats):
        path = [*range(5, 45), chat // names + 1, chat % names + 1]
        for turn in range(num_turns):
            for end in ([50 + turn], [50 + turn + num_turns, 5, 6]):
                cache.commit(as_tokens([*path, *end]), BlankSource(), kind=BoundaryKind.STABLE)
            path += [50 + turn + num_turns, 5, 6]
