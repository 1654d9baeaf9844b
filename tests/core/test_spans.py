import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.core.tokens import Span, covers, subtract, union

spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: Span(pair[0], sum(pair))), max_size=6
)


def positions(of: tuple[Span, ...] | list[Span]) -> set[int]:
    return {at for span in of for at in range(span.start, span.stop)}


def is_tidy(of: tuple[Span, ...]) -> bool:
    return all(len(span) > 0 for span in of) and all(a.stop < b.start for a, b in itertools.pairwise(of))


@given(spans)
def test_a_union_has_the_same_positions_and_is_tidy(some: list[Span]) -> None:
    assert positions(union(some)) == positions(some)
    assert is_tidy(union(some))


@given(spans, spans)
def test_a_difference_has_what_is_in_one_and_not_in_the_other(some: list[Span], holes: list[Span]) -> None:
    assert positions(subtract(some, holes)) == positions(some) - positions(holes)
    assert is_tidy(subtract(some, holes))


@given(spans, spans)
def test_covered_is_what_has_no_hole(some: list[Span], needed: list[Span]) -> None:
    assert covers(some, needed) == (positions(needed) <= positions(some))


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_clip_is_what_lies_in_both(start: int, length: int, low: int, extent: int) -> None:
    clipped = Span(start, start + length).clip(low, low + extent)
    both = positions([Span(start, start + length)]) & positions([Span(low, low + extent)])
    assert (set() if clipped is None else positions([clipped])) == both
    assert clipped is None or len(clipped) > 0


@pytest.mark.parametrize(("start", "stop"), [(3, 2), (-1, 2)])
def test_a_span_goes_forward_from_zero(start: int, stop: int) -> None:
    with pytest.raises(AssertionError):
        Span(start, stop)
