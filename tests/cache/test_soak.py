"""A long random run over the store: layouts, budgets, chats and faults drawn anew every few hundred operations."""

import random

import pytest

from reprise.core.kinds import Chunk, Full, KvKind, Layout, Window
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import as_tokens
from reprise.memory import Account
from tests.cache.trial import CacheTrial
from tests.matrix import examples
from tests.soak.lengths import times

OPERATIONS = times(100_000)


def some_layout(rng: random.Random) -> Layout:
    keep = rng.randint(0, 3)
    kinds: list[KvKind] = [Full(), Window(rng.randint(keep + 1, 14), keep), Window(20), Chunk(rng.randint(1, 12))]
    chosen = tuple(rng.sample(kinds, rng.randint(0, 3)))
    return Layout(kinds=chosen, has_snapshots=len(chosen) == 0 or rng.random() < 0.4)


def some_prompt(rng: random.Random, chats: list[tuple[int, ...]]) -> tuple[int, ...]:
    base = rng.choice(chats)
    if rng.random() < 0.5:
        base = base[: rng.randint(0, len(base))]
    return base[:50] + tuple(rng.randint(0, 2) for _ in range(rng.randint(1, 20)))


def one_life(rng: random.Random, rounds: int) -> CacheTrial:
    """A cache from empty to cleared."""
    trial = CacheTrial(some_layout(rng), rng.choice([None, 400, 900, 2500]))
    chats: list[tuple[int, ...]] = [()]
    for _ in range(rounds):
        namespace = rng.choice(["", "", "other"])
        prompt = some_prompt(rng, chats)
        trial.request(prompt, namespace=namespace)
        trial.judge()
        done = trial.commit(
            prompt[: rng.choice([None, None, rng.randint(1, len(prompt))])],
            namespace=namespace,
            kind=rng.choice(list(BoundaryKind)),
            fails_after=rng.choice([None, None, None, None, 0, 1, 2]),
            pinned_until=rng.choice([0.0, 0.0, 0.0, trial.clock.now + 3]),
        )
        trial.judge()
        if done is not None:
            chats = [*chats, prompt][-12:]
        while trial.held and rng.random() < 0.6:
            trial.release(rng.randrange(9))
            trial.judge()
        chance = rng.random()
        if chance < 0.15:
            trial.num_changes += 1
            if rng.random() < 0.5:
                trial.cache.compact(max_entries=rng.randint(1, 50))
            else:
                trial.cache.compact_path(as_tokens(prompt), namespace=namespace)
        elif chance < 0.3:
            trial.evict()
        elif chance < 0.35:
            trial.cache.memory.measure(Account.SEQUENCES, rng.choice([0, 0, 200]))
        elif chance < 0.45:
            trial.clock.now += 2
        elif chance < 0.46:
            trial.clear()
        trial.judge()
        if rng.random() < 0.05:
            trial.judge_contents()
    while trial.held:
        trial.release(0)
    trial.judge()
    trial.judge_contents()
    trial.clear()
    trial.judge()
    assert trial.cache.nbytes == 0 and trial.cache.stats.num_tokens == 0
    return trial


@pytest.mark.soak
def test_millions_of_operations() -> None:
    changes = lookups = life = 0
    while changes + lookups < OPERATIONS:
        trial = one_life(random.Random(life), rounds=40)
        changes += trial.num_changes
        lookups += trial.num_lookups
        life += 1
    print(f"{changes:,} changes and {lookups:,} judged lookups in {life:,} lives, no violation")


def test_some_lives() -> None:
    for life in range(examples(16)):
        one_life(random.Random(f"short {life}"), rounds=20)
