"""A conversation that grows while the server is never idle is made of few pieces all the same."""

import pytest

from reprise.cache.node import SegmentSizes
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.kinds import Full, Layout, Window
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import as_tokens
from tests.cache.hash_model import HashSource
from tests.cache.strategies import EXAMPLES
from tests.cache.trial import CacheTrial

TURN = 3


def chat(turns: int) -> tuple[int, ...]:
    return tuple(i % 7 for i in range(turns * TURN))


def pieces_of(cache: PrefixCache, tokens: tuple[int, ...]) -> dict[object, int]:
    walked = cache.match(as_tokens(tokens)).walk
    return {kind: sum(len(node.segments.get(kind, ())) for node in walked.nodes) for kind in cache.layout.kinds}


@pytest.mark.parametrize("layout", EXAMPLES, ids=str)
def test_a_path_that_is_tidied_as_it_grows_reads_as_before(layout: Layout) -> None:
    trial = CacheTrial(layout)
    for turn in range(1, 30):
        tokens = chat(turn)
        assert trial.commit(tokens, kind=BoundaryKind.STABLE)
        held = trial.cache.nbytes
        trial.cache.compact_path(as_tokens(tokens))
        assert trial.cache.nbytes == held
        trial.judge()
        trial.judge_read(tokens, limit=len(tokens))
        nodes = trial.cache.match(as_tokens(tokens)).walk.nodes
        assert len(nodes) == 2


def test_few_pieces_are_left_and_little_is_copied() -> None:
    cache = PrefixCache(Layout(kinds=(Full(), Window(16))), sizes=SegmentSizes(longest=24, tail=8))
    turns, copied = 200, 0
    for turn in range(1, turns + 1):
        tokens = as_tokens(chat(turn))
        cache.commit(tokens, HashSource(chat(turn)), kind=BoundaryKind.STABLE)
        copied += cache.compact_path(tokens)
        # Whole ones, and of the rest one for each power of two turns.
        assert pieces_of(cache, chat(turn))[Full()] <= len(tokens) // 24 + 3, turn
    assert copied <= 5 * len(chat(turns)), "an entry is not copied again and again"


def test_a_long_piece_is_not_copied_for_each_short_one() -> None:
    cache = PrefixCache(Layout(kinds=(Full(),)), sizes=SegmentSizes(longest=2000, tail=8))
    tokens = tuple(i % 7 for i in range(1900))
    copied = 0
    for stop in [1500, *range(1501, 1900)]:
        cache.commit(as_tokens(tokens[:stop]), HashSource(tokens[:stop]), kind=BoundaryKind.STABLE)
        copied += cache.compact_path(as_tokens(tokens[:stop]))
        assert pieces_of(cache, tokens[:stop])[Full()] <= 10
    assert copied <= 10 * 400


def test_others_paths_are_left_alone() -> None:
    cache = PrefixCache(Layout(kinds=(Full(),)))
    other = tuple(6 - token for token in chat(12))
    for turn in range(1, 13):
        for tokens in (chat(turn), other[: turn * TURN]):
            cache.commit(as_tokens(tokens), HashSource(tokens), kind=BoundaryKind.STABLE)
    assert cache.compact_path(as_tokens(chat(12))) > 0
    assert cache.compact_path(as_tokens(chat(12))) == 0
    assert pieces_of(cache, chat(12))[Full()] == 1
    assert pieces_of(cache, other)[Full()] == 12
    assert cache.compact_path(as_tokens(chat(1)), namespace="nobody's") == 0
    cache.check()
