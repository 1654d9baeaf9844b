"""However many chats are stored, whoever looks holds up the engine's thread for what is shown, and no more."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from reprise.cache.prefix_cache import PrefixCache
from reprise.core.inspection import WHOLE_TREE, TreePart
from reprise.core.kinds import Full, Layout
from reprise.loop.inspection import inspect_evictions
from reprise.loop.tree_inspection import edge_tokens, inspect_tree
from tests.cache.hash_model import fill_with_chats

NUM_TURNS = 20


def num_lines(work: Callable[[], object]) -> int:
    """How many lines of Python run: the same on a busy machine."""
    count = 0

    def trace(frame: Any, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.fixture(scope="module")
def caches() -> tuple[PrefixCache, PrefixCache]:
    """One with 400 edges, and one with six times as many."""
    made = tuple(PrefixCache(Layout(kinds=(Full(),), has_snapshots=False)) for _ in range(2))
    for cache, num_chats in zip(made, (10, 60), strict=True):
        fill_with_chats(cache, num_chats=num_chats, num_turns=NUM_TURNS)
        assert cache.stats.num_nodes >= 2 * num_chats * NUM_TURNS
        cache.check()
    return made  # type: ignore[return-value]


def under_the_newest(cache: PrefixCache) -> int:
    return inspect_tree(cache, None, (), max_nodes=30, now_s=0.0, part=WHOLE_TREE).nodes[-1].id


@pytest.mark.parametrize(
    "look",
    [
        lambda cache: inspect_tree(cache, None, (), max_nodes=50, now_s=0.0, part=WHOLE_TREE),
        lambda cache: inspect_tree(cache, None, (), max_nodes=50, now_s=0.0, part=TreePart(namespace="", skip=100)),
        lambda cache: inspect_tree(
            cache, None, (), max_nodes=50, now_s=0.0, part=TreePart(namespace="", under=under_the_newest(cache))
        ),
        lambda cache: edge_tokens(cache, TreePart(namespace="", under=under_the_newest(cache)), max_nodes=1),
        lambda cache: edge_tokens(cache, TreePart(namespace=""), max_nodes=100),
        lambda cache: inspect_evictions(cache, nbytes=10**9, most=16, now_s=0.0),
    ],
    ids=["tree", "next page", "under", "text", "search", "evictions"],
)
def test_looking_costs_what_is_shown(
    look: Callable[[PrefixCache], object], caches: tuple[PrefixCache, PrefixCache]
) -> None:
    few, many = (num_lines(lambda cache=cache: look(cache)) for cache in caches)
    # The node where chats part has a child for each.
    assert many < 1.5 * few + 20 * 60


def test_what_is_shown_is_what_was_used_last(caches: tuple[PrefixCache, PrefixCache]) -> None:
    for cache in caches:
        every = edge_tokens(cache, TreePart(namespace=""), max_nodes=10**6)
        assert len(every) == cache.stats.num_nodes
        newest = inspect_tree(cache, None, (), max_nodes=50, now_s=0.0, part=WHOLE_TREE).nodes
        assert [edge.id for edge in every[:50]] == [node.id for node in newest]
        (one,) = edge_tokens(cache, TreePart(namespace="", under=newest[7].id), max_nodes=1)
        assert (one.id, one.start) == (newest[7].id, newest[7].start)
        assert edge_tokens(cache, TreePart(namespace="other", under=newest[7].id), max_nodes=1) == []
        assert edge_tokens(cache, TreePart(namespace="", under=10**9), max_nodes=1) == []
        # As many evictions as one likes: each once, and none dearer than the next.
        order = inspect_evictions(cache, nbytes=10**12, most=10**6, now_s=0.0)
        assert len(order) == len({(each.node, each.position) for each in order}) == cache.stats.num_checkpoints
