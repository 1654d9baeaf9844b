"""Looking up how a text went on: what is found stood there, and what stood there is found."""

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.core.tokens import Tokens, as_tokens, join_tokens
from reprise.drafts.history import NGRAMS, TextEnd, TokenHistory
from tests.matrix import examples

_CAPACITY = 1024

_RUNS = st.lists(st.integers(0, 3), min_size=1, max_size=40).map(as_tokens)


def _continuations(text: list[int | None], tail: Tokens) -> set[tuple[int, ...]]:
    """What followed the last two tokens of `tail` anywhere in `text`, in which None is a gap."""
    found: set[tuple[int, ...]] = set()
    for at in range(2, len(text)):
        if text[at - 2 : at] == tail[-2:].tolist() and text[at] is not None:
            found.add(tuple(token for token in text[at : at + 1] if token is not None))
    return found


@given(pieces=st.lists(st.tuples(_RUNS, st.booleans()), min_size=1, max_size=30), tail=_RUNS)
@settings(max_examples=examples(150))
def test_what_is_found_followed_the_same_tokens(pieces: list[tuple[Tokens, bool]], tail: Tokens) -> None:
    history = TokenHistory(_CAPACITY)
    text: list[int | None] = []
    for run, follows in pieces:
        text += run.tolist() if follows or not text else [None, *run.tolist()]
        history.append(run, follows=follows)
        history.check()
    found = history.find(TextEnd(tail.tolist()), num=4)
    held = text[-_CAPACITY:]
    if found is None:
        # The newest occurrence may have been at the end of a piece; with few tokens hashes do not collide.
        return
    assert found.match >= min(NGRAMS)
    before = text[found.at - found.match : found.at]
    assert before == tail[-found.match :].tolist()
    assert text[found.at : found.at + len(found.tokens)] == found.tokens.tolist()
    assert tuple(found.tokens[:1].tolist()) in _continuations(held, tail)


def test_an_image_is_a_gap_in_the_text() -> None:
    history = TokenHistory(_CAPACITY)
    history.append(as_tokens([1, 2, 3, 4, -77, -78, 5, 6, 7, 8]))
    history.check()
    before, behind = history.find(TextEnd([2, 3]), num=8), history.find(TextEnd([5, 6]), num=8)
    assert before is not None and before.tokens.tolist() == [4]
    assert behind is not None and behind.tokens.tolist() == [7, 8]
    assert history.find(TextEnd([3, 4]), num=8) is None
    assert history.find(TextEnd([-77, -78]), num=8) is None


def test_a_repeat_is_found_at_any_distance_within_the_capacity() -> None:
    words = np.random.default_rng(0).integers(0, 100_000, 900)
    history = TokenHistory(_CAPACITY)
    history.append(as_tokens(words))
    for at in (10, 300, 890):
        found = history.find(TextEnd(words[at - 9 : at].tolist()), num=5)
        assert found is not None and found.match == 9
        assert found.tokens.tolist() == words[at : at + 5].tolist()


def test_the_newest_occurrence_and_the_longest_match_win() -> None:
    history = TokenHistory(_CAPACITY)
    history.append(as_tokens([1, 2, 3, 4, 50]))
    history.append(as_tokens([9, 9, 3, 4, 60]))
    history.append(as_tokens([7, 7, 3, 4]), follows=False)
    long = history.find(TextEnd([1, 2, 3, 4]), num=1)
    short = history.find(TextEnd([8, 8, 3, 4]), num=1)
    assert long is not None and (long.match, long.tokens.tolist()) == (4, [50])
    assert short is not None and (short.match, short.tokens.tolist()) == (2, [60])


def test_what_follows_the_end_is_not_known_yet() -> None:
    history = TokenHistory(_CAPACITY)
    history.append(as_tokens([1, 2, 3]))
    assert history.find(TextEnd([2, 3]), num=4) is None
    history.append(as_tokens([4]), follows=True)
    found = history.find(TextEnd([2, 3]), num=4)
    assert found is not None and found.tokens.tolist() == [4]


def test_old_tokens_give_way_and_are_not_found() -> None:
    rng = np.random.default_rng(1)
    first = as_tokens(rng.integers(0, 100_000, 64))
    history = TokenHistory(_CAPACITY)
    history.append(first)
    for _ in range(3):
        history.append(as_tokens(rng.integers(0, 100_000, 512)))
    assert history.find(TextEnd(first[:20].tolist()), num=4) is None
    assert history.start > 0 and history.token(history.start) is not None
    assert [history.token(at) for at in (0, history.start - 1, history.end, history.end + 5)] == [None] * 4
    assert history.nbytes <= 4 * _CAPACITY + 16 * _CAPACITY * len(NGRAMS)
    history.check()


def test_what_was_found_stays_what_it_was_when_the_text_goes_on() -> None:
    history = TokenHistory(_CAPACITY)
    history.append(as_tokens([1, 2, 3, 4, 5, 6]))
    found = history.find(TextEnd([1, 2]), num=4)
    history.append(as_tokens(range(100, 100 + _CAPACITY)))
    assert found is not None and found.tokens.tolist() == [3, 4, 5, 6]


def test_what_is_read_across_the_end_of_the_ring_is_whole() -> None:
    history = TokenHistory(_CAPACITY)
    history.append(as_tokens(range(1000)))
    history.append(as_tokens(range(1000, _CAPACITY + 100)), follows=True)
    for start in range(_CAPACITY - 3, _CAPACITY + 2):
        assert history.read(start, 2).tolist() == [start, start + 1]


def test_a_run_longer_than_the_capacity_leaves_its_end() -> None:
    tokens = as_tokens(np.random.default_rng(2).integers(0, 100_000, 5000))
    history = TokenHistory(_CAPACITY)
    history.append(tokens)
    found = history.find(TextEnd(join_tokens(tokens[4000:4990]).tolist()), num=10)
    assert found is not None and found.tokens.tolist() == tokens[4990:].tolist()
    assert history.find(TextEnd(tokens[:100].tolist()), num=4) is None
    history.check()


def test_a_history_grows_little_by_little_and_finds_what_one_finds_that_never_grew() -> None:
    """Copying it at once would need room for that beside the copy itself."""
    size = 1 << 15
    tokens = as_tokens(np.random.default_rng(3).integers(0, 100_000, 5 * size // 4))
    history, roomy = TokenHistory(4 * size), TokenHistory(4 * size, size=4 * size)
    most = 0
    for at in range(0, len(tokens), 512):
        held = history.nbytes
        tracemalloc.start()
        history.append(tokens[at : at + 512], follows=at % 1024 != 0)
        if at > size // 2:
            most = max(most, tracemalloc.get_traced_memory()[1] - max(0, history.nbytes - held))
        tracemalloc.stop()
        roomy.append(tokens[at : at + 512], follows=at % 1024 != 0)
        if at % 4096 == 0:
            history.check()
    assert most < 20 * size
    assert (history.start, history.end) == (roomy.start, roomy.end) == (0, roomy.end)
    for at in range(1000, len(tokens) - 10, 999):
        tail = TextEnd(tokens[at - 9 : at].tolist())
        found, expected = history.find(tail, num=5), roomy.find(tail, num=5)
        assert expected is None or found is None or found.tokens.tolist() == expected.tokens.tolist()
    # What nothing follows does not hide what something follows.
    history.append(tokens[20_000:20_100])
    history.append(as_tokens(range(10)))
    found = history.find(TextEnd(tokens[20_000:20_100].tolist()), num=5)
    assert found is not None and found.tokens.tolist() == tokens[20_100:20_105].tolist()
