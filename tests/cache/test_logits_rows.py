"""Logits behind prompts: a row is that of exactly its prompt, goes with its position, is counted, and goes first."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.prefix_cache import PrefixCache
from reprise.core.kinds import Layout
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import as_tokens
from reprise.memory import Account, Memory
from tests.cache.hash_model import HashSource, prefix_hashes
from tests.cache.strategies import EXAMPLES, NAMESPACES, layouts, runs
from tests.cache.trial import SIZES
from tests.matrix import examples

ROW_NBYTES = 5
PROMPT = tuple(i % 3 for i in range(20))


@dataclass(frozen=True, slots=True)
class HashRow:
    item: object
    nbytes: int = ROW_NBYTES


def row_of(tokens: tuple[int, ...]) -> HashRow:
    return HashRow(("logits", prefix_hashes(tokens)[-1]))


def commit(cache: PrefixCache, tokens: tuple[int, ...], *, namespace: str = "") -> bool:
    kind = BoundaryKind.PROMPT_END
    return cache.commit(as_tokens(tokens), HashSource(tokens), kind=kind, namespace=namespace).is_resumable


def row_at(cache: PrefixCache, tokens: tuple[int, ...], *, namespace: str = "") -> object | None:
    """The row that a repeat of these tokens would sample from, which the cache can then resume behind."""
    match = cache.match(as_tokens(tokens), namespace=namespace)
    row = cache.row_at(match)
    if row is None:
        return None
    assert cache.resume_at(match, limit=len(tokens)) == len(tokens), "a row without its position"
    assert isinstance(row, HashRow)
    return row.item


@settings(max_examples=examples(60), deadline=None)
@given(
    layout=layouts(),
    budget=st.one_of(st.none(), st.integers(3000, 40_000)),
    asked=st.lists(st.tuples(NAMESPACES, runs(), st.sampled_from(["keep", "grow", "evict", "clear", "compact"]))),
)
def test_a_row_is_that_of_its_prompt_or_none(layout: Layout, budget: int | None, asked) -> None:
    cache = PrefixCache(layout, memory=Memory(budget), sizes=SIZES)
    known: set[tuple[str, tuple[int, ...]]] = set()
    can_lose = budget is not None
    for namespace, tokens, move in asked:
        if commit(cache, tokens, namespace=namespace) and move == "keep":
            cache.keep_row(as_tokens(tokens), row_of(tokens), namespace=namespace)
            known.add((namespace, tokens))
        elif move == "evict":
            cache.evict_one()
        elif move == "clear":
            cache.clear(namespace)
        elif move == "compact":
            cache.compact(max_entries=50)
        can_lose = can_lose or move in ("evict", "clear") or len(known) > 30
        cache.check()
        assert row_at(cache, (*tokens, 9), namespace=namespace) is None, "no prompt has this token"
        for seen_in, prompt in {(namespace, tokens), *known}:
            found = row_at(cache, prompt, namespace=seen_in)
            assert found in (None, row_of(prompt).item), "the row of another prompt"
            if not can_lose and (seen_in, prompt) in known:
                assert found is not None, "a row that was kept is found"


@pytest.mark.parametrize("layout", EXAMPLES, ids=str)
def test_rows_go_first_and_leave_what_was_there(layout: Layout) -> None:
    cache = PrefixCache(layout, memory=Memory(100_000), sizes=SIZES)
    commit(cache, PROMPT[:-1])
    commit(cache, PROMPT)
    assert cache.keep_row(as_tokens(PROMPT), row_of(PROMPT))
    assert cache.memory.nbytes(Account.LOGITS) == ROW_NBYTES
    commit(cache, (*PROMPT, 7, 7, 7))
    assert row_at(cache, PROMPT) == row_of(PROMPT).item
    assert all(row_at(cache, other) is None for other in ((*PROMPT, 7), (*PROMPT, 9), PROMPT[:-1]))
    assert cache.evict_one() and cache.stats.num_evictions == 0, "an item of the tree went before the row"
    cache.check()
    assert row_at(cache, PROMPT) is None and cache.memory.nbytes(Account.LOGITS) == 0
    for prompt, limit in ((PROMPT, 19), ((*PROMPT, 7, 7, 7), 23)):
        assert cache.resume_at(cache.match(as_tokens(prompt)), limit=limit) == limit


def test_few_rows_are_kept_and_those_that_were_used_last() -> None:
    cache = PrefixCache(EXAMPLES[0], memory=Memory(100_000), sizes=SIZES)
    prompts = [(n, *PROMPT) for n in range(40)]
    for number, prompt in enumerate(prompts):
        commit(cache, prompt)
        assert cache.keep_row(as_tokens(prompt), row_of(prompt))
        if number == 20:
            cache.release(cache.lease(cache.match(as_tokens(prompts[0])), len(prompts[0])))
    kept = [number for number, prompt in enumerate(prompts) if row_at(cache, prompt) is not None]
    assert kept == [0, *range(9, 40)]
    small = PrefixCache(EXAMPLES[0], memory=Memory(64 * 2 * ROW_NBYTES), sizes=SIZES)
    for prompt in ((1, 2), (2, 3), (3, 4)):
        commit(small, prompt)
        small.keep_row(as_tokens(prompt), row_of(prompt))
    assert [row_at(small, prompt) is not None for prompt in ((1, 2), (2, 3), (3, 4))] == [False, True, True]
