"""What each kind of layer needs, against the masks themselves."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reprise.core.kinds import Chunk, Full, KvKind, Layout, Window, best_position
from reprise.core.tokens import Span, union


def is_seen(kind: KvKind, token_at: int, position: int) -> bool:
    """Whether the token at `token_at` attends to `position`, as the attention mask says it."""
    causal = position <= token_at
    if isinstance(kind, Full):
        return causal
    if isinstance(kind, Chunk):
        return causal and position // kind.size == token_at // kind.size
    return causal and (position < kind.keep or position > token_at - (kind.size - kind.keep))


kinds = st.one_of(
    st.just(Full()),
    st.integers(1, 9).flatmap(lambda size: st.builds(Window, st.just(size), st.integers(0, size - 1))),
    st.builds(Chunk, st.integers(1, 9)),
)
runs = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=5).map(
    lambda pairs: union(Span(start, start + length) for start, length in pairs)
)


@given(kinds, st.integers(0, 40))
def test_a_position_needs_what_the_next_token_sees(kind: KvKind, position: int) -> None:
    needs = kind.needs(position)
    wanted = {at for at in range(position) if is_seen(kind, position, at)}
    assert {at for span in needs for at in range(span.start, span.stop)} == wanted
    assert needs == union(needs), "sorted, disjoint, not empty"


@given(kinds, st.integers(0, 40), st.integers(0, 20))
def test_what_is_not_needed_now_is_never_needed_again(kind: KvKind, position: int, later: int) -> None:
    now = {at for span in kind.needs(position) for at in range(span.start, span.stop)}
    then = {at for span in kind.needs(position + later) for at in range(span.start, span.stop)}
    assert {at for at in then if at < position} <= now


@given(kinds, runs, st.integers(0, 45))
@example(Full(), (Span(0, 10),), 20)
@example(Window(4), (Span(5, 20),), 25)
@example(Window(6, keep=2), (Span(0, 4), Span(9, 20)), 25)
@example(Chunk(5), (Span(0, 3), Span(10, 13)), 12)
@example(Chunk(5), (Span(0, 3),), 12)
def test_the_best_position_is_the_one_that_brute_force_finds(
    kind: KvKind, stored: tuple[Span, ...], limit: int
) -> None:
    have = {at for span in stored for at in range(span.start, span.stop)}
    best = next(p for p in range(limit, -1, -1) if all(at in have for at in range(p) if is_seen(kind, p, at)))
    assert best_position(kind, stored, limit) == best


@pytest.mark.parametrize(("size", "keep"), [(4, 4), (4, -1), (0, 0)])
def test_a_window_is_larger_than_what_it_keeps(size: int, keep: int) -> None:
    with pytest.raises(AssertionError):
        Window(size, keep)


def test_a_layout_has_each_kind_once() -> None:
    with pytest.raises(AssertionError):
        Layout(kinds=(Full(), Full()))
    assert Layout(kinds=(Full(),)).resumes_anywhere
    assert not Layout(kinds=(Full(),), has_snapshots=True).resumes_anywhere
    assert not Layout(kinds=(Full(), Window(4))).resumes_anywhere
