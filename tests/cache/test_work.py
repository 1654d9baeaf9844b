"""How much the store reads for a step: counted, since a path of 200,000 tokens may not make each of them slower.

What a step needs lies within a window's length of where it happens, so the counts of a short path and of one that is
sixteen times as long are equal.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from reprise.cache.node import SegmentSizes
from reprise.cache.payload import SegmentPayload
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.kinds import Chunk, Full, KvKind, Layout, Window, best_position
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, as_tokens

STEP = 8
SIZE = 12
WORK: Counter[str] = Counter()
"""Questions that were asked since it was last cleared."""


class CountedWindow(Window):
    def needs(self, position: int) -> tuple[Span, ...]:
        WORK["needs"] += 1
        return Window.needs(self, position)


class CountedChunk(Chunk):
    def needs(self, position: int) -> tuple[Span, ...]:
        WORK["needs"] += 1
        return Chunk.needs(self, position)


@dataclass(frozen=True, slots=True)
class CountedEntries:
    num: int

    @property
    def nbytes(self) -> int:
        WORK["bytes"] += 1
        return self.num

    def cut(self, start: int, stop: int) -> "CountedEntries":
        WORK["cut"] += 1
        return CountedEntries(stop - start)

    def join(self, others: Sequence[SegmentPayload]) -> "CountedEntries":
        return CountedEntries(self.num + sum(other.nbytes for other in others))


class EmptySource:
    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        return length

    def snapshot_nbytes(self) -> int:
        return 0

    def segment(self, kind: KvKind, span: Span) -> CountedEntries:
        return CountedEntries(len(span))

    def snapshot(self) -> CountedEntries:
        return CountedEntries(0)


def one_edge(kind: KvKind, num_checkpoints: int) -> PrefixCache:
    """A chat as one edge, with a checkpoint every `STEP` tokens."""
    cache = PrefixCache(Layout(kinds=(Full(), kind)), sizes=SegmentSizes(longest=STEP, tail=STEP))
    tokens = as_tokens(range(STEP * num_checkpoints))
    for stop in range(STEP, len(tokens) + 1, STEP):
        cache.commit(tokens[:stop], EmptySource(), kind=BoundaryKind.SYSTEM)
    while cache.compact_path(tokens) > 0:
        pass
    assert cache.stats.num_nodes == 2, "the root and one edge"
    return cache


KINDS = [CountedWindow(SIZE), CountedChunk(SIZE)]


@pytest.mark.parametrize("kind", KINDS, ids=["window", "chunk"])
def test_an_eviction_reads_what_the_checkpoint_needed_and_not_the_path(kind: KvKind) -> None:
    work: list[Counter[str]] = []
    for num_checkpoints in (32, 512):
        cache = one_edge(kind, num_checkpoints)
        # Scores have risen since the chat was shorter: the first eviction looks at all of them once.
        assert cache.evict_one()
        WORK.clear()
        assert cache.evict_one()
        work.append(Counter(WORK))
        cache.check()
    short, long = work
    assert short == long and long.total() > 0


@pytest.mark.parametrize("kind", KINDS, ids=["window", "chunk"])
def test_a_commit_at_the_end_reads_the_end(kind: KvKind) -> None:
    work: list[Counter[str]] = []
    for num_checkpoints in (32, 512):
        cache = one_edge(kind, num_checkpoints)
        tokens = as_tokens(range(STEP * num_checkpoints + STEP))
        WORK.clear()
        cache.commit(tokens, EmptySource(), kind=BoundaryKind.SYSTEM)
        work.append(Counter(WORK))
        cache.check()
    short, long = work
    assert short == long and long.total() > 0


class CountedRuns(tuple[Span, ...]):
    def __iter__(self) -> Iterator[Span]:
        WORK["runs"] += 1
        return super().__iter__()


def test_where_to_resume_is_found_without_reading_all_runs_for_each_candidate() -> None:
    runs = CountedRuns(Span(at, at + 1) for at in range(0, 1000, 2))
    WORK.clear()
    assert best_position(Window(4), runs, 1000) == 1
    assert WORK["runs"] <= 2
