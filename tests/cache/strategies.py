"""Layouts and chats for Hypothesis: few different tokens, so that chats share, branch and diverge all the time."""

from itertools import pairwise

from hypothesis import strategies as st

from reprise.core.kinds import Chunk, Full, KvKind, Layout, Window
from reprise.core.tokens import Span


def kinds() -> st.SearchStrategy[KvKind]:
    windows = st.integers(1, 14).flatmap(
        lambda size: st.builds(Window, size=st.just(size), keep=st.integers(0, min(4, size - 1)))
    )
    return st.one_of(st.just(Full()), windows, st.builds(Chunk, size=st.integers(1, 12)))


def layouts() -> st.SearchStrategy[Layout]:
    mixtures = st.lists(kinds(), max_size=3, unique=True).map(tuple)
    # The plain compositions are the common ones, and the pathological mixtures would drown them.
    both = st.tuples(mixtures, st.booleans()).filter(lambda pair: len(pair[0]) > 0 or pair[1])
    return st.one_of(st.sampled_from(EXAMPLES), both.map(lambda pair: Layout(kinds=pair[0], has_snapshots=pair[1])))


def runs(*, max_size: int = 24) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 2), min_size=1, max_size=max_size).map(tuple)


@st.composite
def spans(draw: st.DrawFn, length: int) -> list[Span]:
    """Images in a prompt of this length, some of them one behind the other."""
    cuts = sorted(draw(st.sets(st.integers(0, length), max_size=8)))
    return [Span(start, stop) for start, stop in pairwise(cuts) if draw(st.booleans())]


NAMESPACES = st.sampled_from(["", "", "", "other"])
BUDGETS = st.one_of(st.none(), st.integers(100, 3000))
EXAMPLES = (
    Layout(kinds=(Full(),)),
    Layout(kinds=(Full(),), has_snapshots=True),
    Layout(kinds=(Full(), Window(8))),
    Layout(kinds=(Full(), Window(9, keep=2), Chunk(5))),
    Layout(kinds=(Window(6), Window(12, keep=3))),
    Layout(kinds=(Chunk(7),)),
    Layout(kinds=(Window(6),), has_snapshots=True),
    Layout(kinds=(), has_snapshots=True),
)
"""One of each composition, for tests that do not draw."""
