"""Following an answer along a text, over what it changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.core.backend import DraftSource
from reprise.core.tokens import as_tokens
from reprise.drafts.history import TokenHistory
from reprise.drafts.trail import CONFIRMED, Trail

TEXT = list(range(100, 200))


def begin(at: int = 50, *, text: list[int] = TEXT) -> Trail:
    history = TokenHistory(1024)
    history.append(as_tokens(text))
    return Trail(history, at, match=8, source=DraftSource.HISTORY)


def continued(trail: Trail) -> list[int] | None:
    tokens = trail.continuation(3)
    return None if tokens is None else tokens.tolist()


@pytest.mark.parametrize(
    "change",
    [[7], [7, 8, 9, 7, 8, 9, 7], [7, 8, *TEXT[51:52]], [7, *TEXT[50:51]], TEXT[53:54], [7, 8, *TEXT[58:59]]],
    ids=["one token", "a long value", "replaced", "inserted", "removed", "shorter"],
)
def test_it_is_found_again_behind_a_change(change: list[int]) -> None:
    trail = begin()
    trail.follow(change)
    last = TEXT.index(change[-1]) if change[-1] in TEXT else None
    assert continued(trail) == (None if last is None else TEXT[last + 1 : last + 4])
    assert trail.is_resumed
    trail.follow(TEXT[60 : 60 + CONFIRMED - 1])
    assert trail.is_resumed
    trail.follow(TEXT[60 + CONFIRMED - 1 : 70])
    assert not trail.is_resumed
    assert continued(trail) == TEXT[70:73]


def test_a_token_that_is_equal_by_chance_does_not_lead_away() -> None:
    trail = begin()
    # From here on the first of them would be behind.
    trail.follow([7, TEXT[60], 8, TEXT[52]])
    assert continued(trail) == TEXT[53:56]


def test_an_answer_that_stays_away_is_lost() -> None:
    trail = begin()
    trail.follow([7] * 64)
    assert not trail.is_lost
    trail.follow([7])
    assert trail.is_lost
    trail = begin()
    for at in range(50, 90, 5):
        trail.follow([*TEXT[at : at + 4], 7])
    assert not trail.is_lost


def test_a_text_ends_where_it_ends() -> None:
    trail = begin(99)
    trail.follow(TEXT[99:])
    assert continued(trail) is None
    trail.follow([1, 2, 3])
    assert continued(trail) is None


def test_what_is_no_longer_held_is_not_continued() -> None:
    trail = begin()
    trail.history.append(as_tokens(np.arange(5000, 6200)))
    assert continued(trail) is None
    trail.follow([7, TEXT[51]])
    assert continued(trail) is None


@given(
    text=st.lists(st.integers(0, 5), min_size=2, max_size=60),
    at=st.integers(0, 60),
    answer=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=9), max_size=20),
)
def test_what_continues_stood_behind_as_many_equal_tokens(text: list[int], at: int, answer: list[list[int]]) -> None:
    history = TokenHistory(1024)
    history.append(as_tokens(text))
    trail = Trail(history, at, match=0, source=DraftSource.HISTORY)
    said: list[int] = []
    for tokens in answer:
        trail.follow(tokens)
        said += tokens
        found = continued(trail)
        if found is not None:
            assert found == text[trail.at : trail.at + 3]
            assert trail.match > 0 and text[trail.at - trail.match : trail.at] == said[-trail.match :]
