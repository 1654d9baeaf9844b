"""The text that drafts come from after a restart: the newest paths on disk, each token once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.disk.folders import model_bucket
from tests.disk.chains import BLOCK, keys_in, put_path
from tests.disk.fake_bucket import FakeBucket
from tests.disk.test_bucket import CHAT, cache_meets, server, wait_until
from tests.disk.test_index import ROOTS, Ids, Piece, entry_for, filled, stores
from tests.matrix import examples


@given(have=stores(), most=st.sampled_from([1, 9, 10**6]))
@settings(max_examples=examples(200), deadline=None)
def test_texts_are_all_that_can_be_found_up_to_a_bound(have: set[Piece], most: int) -> None:
    index = filled(have, resumes_anywhere=False)
    texts = index.newest_texts(ROOTS[""], most=most, most_leaves=100)
    reachable = [
        piece.prefix
        for piece in have
        if piece.namespace == ""
        and all(Piece("", piece.prefix[: (k + 1) * BLOCK], False) in have for k in range(len(piece.prefix) // BLOCK))
    ]
    said = [text.tokens.tolist() for text in texts]
    for text, tokens in zip(texts, said, strict=True):
        # Its end is the end of a path, and what is before its start is a block of that.
        assert text.start in (0, BLOCK)
        assert any(list(path)[-len(tokens) :] == tokens for path in reachable)
    new = [len(text.tokens) - text.start for text in texts]
    assert sum(new[:-1]) < most and sum(new) < most + 2 * BLOCK
    if most > 1000:
        wanted = {path[: i + 1] for path in reachable for i in range(len(path))}
        for path in wanted:
            whole = path[: len(path) // BLOCK * BLOCK]
            assert any(_contains(tokens, list(path[len(whole) :])) for tokens in said)
    assert len(index.newest_texts(ROOTS[""], most=10**6, most_leaves=1)) <= 1


def _contains(text: list[int], part: list[int]) -> bool:
    return any(text[at : at + len(part)] == part for at in range(len(text) - len(part) + 1))


def test_the_newest_texts_are_those_used_last_behind_the_block_that_they_share() -> None:
    block: Ids = (0, 1, 0, 1)
    longer, tail, other = (*block, 2, 3, 4), (*block, 2, 3), (*block, 5)
    have = {Piece("", block, False), *(Piece("", path, True) for path in (longer, tail, other))}
    index = filled(have, resumes_anywhere=False)
    for path in (longer, tail, other):
        index.use(entry_for(Piece("", path, True)).key, index.moment(1.0))
    texts = index.newest_texts(ROOTS[""], most=100, most_leaves=100)
    # What a longer one begins with is left out, though it was used later.
    assert [(text.tokens.tolist(), text.start) for text in texts] == [(list(other), 0), (list(longer), BLOCK)]
    assert [len(text.tokens) for text in index.newest_texts(ROOTS[""], most=3, most_leaves=100)] == [5]


def test_texts_of_a_store_that_is_away_are_not_known_until_it_is_back() -> None:
    bucket = FakeBucket()
    with server(bucket) as one:
        put_path(one, CHAT)
    bucket.failing = dict.fromkeys(("put", "get", "list", "delete"), "no route to host")
    with server(bucket) as cache:
        assert cache.newest_texts("", most=100) is None
        bucket.failing = {}
        cache_meets(cache)
        texts = cache.newest_texts("", most=100)
        assert texts is not None and [text.tokens.tolist() for text in texts] == [CHAT]


def test_texts_of_a_part_of_a_store_are_not_taken_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_bucket, "MOST_HEADERS", 2)
    bucket = FakeBucket()
    with server(bucket) as one:
        put_path(one, list(range(25)))
    with server(bucket) as other:
        wait_until(lambda: other.newest_texts("", most=100) is not None)
        assert len(keys_in(other)) == 7
