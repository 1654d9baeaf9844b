"""What a draft model guesses and takes back leaves no trace: it stands where one stands that was fed the text alone."""

import functools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from reprise.cache.prefix_cache import PrefixCache
from reprise.core.job import Sampling
from reprise.engine.models.load import LoadedModel, vocabulary_size
from reprise.engine.running.draft_sequence import DraftSequence
from reprise.engine.running.runner import Runner
from reprise.engine.running.sampler import TokenSampler
from reprise.engine.states.blueprint import blueprint_of
from tests.engine.sequences import GREEDY, a_job
from tests.matrix import now_and_later
from tests.models.shared import loaded
from tests.models.tiny import CONFIGS
from tests.zoo.caches import build_any

KINDS = ("llama", "gemma3_text", "gpt_oss", "qwen3_5", "mamba2", "llama4", "qwen3, kept beginning")
"""Full attention, windows, states, chunks, and windows with a kept beginning."""
TEXT = [int(token) for token in np.random.default_rng(4).integers(5, 200, 110)]
"""Longer than the windows of the tiny models."""


@functools.cache
def any_model(architecture: str) -> LoadedModel:
    if architecture in CONFIGS:
        return loaded(architecture)
    model = build_any(architecture)
    blueprint = blueprint_of(model)
    return replace(loaded("llama"), model=model, blueprint=blueprint, vocab_size=vocabulary_size(model, blueprint))


def a_sequence(architecture: str) -> DraftSequence:
    runner = Runner(any_model(architecture), can_batch=False)
    cache = PrefixCache(runner.loaded.blueprint.layout)
    live = runner.start(cache.read(cache.match(np.array([], dtype=np.int32)), 0), reserve=20)
    return DraftSequence(runner, live)


def guessed(sequence: DraftSequence, text: list[int], num: int, *, sampling: Sampling = GREEDY) -> list[int]:
    sampler = TokenSampler(a_job(TEXT, num=500, sampling=sampling), vocab_size=512)
    _, tokens = sequence.guess(text, num, sampler=sampler, vocab_size=512)
    return tokens


@pytest.mark.parametrize(
    "architecture",
    now_and_later(["gemma3_text", "qwen3_5"], [kind for kind in KINDS if kind not in ("gemma3_text", "qwen3_5")]),
)
@pytest.mark.parametrize("sampling", now_and_later([Sampling(temperature=0.8, top_p=0.9, seed=3)], [GREEDY]))
def test_guesses_that_were_wrong_leave_no_trace(architecture: str, sampling: Sampling) -> None:
    sequence, rng = a_sequence(architecture), np.random.default_rng(1)
    sequence.feed(TEXT[:29])
    at, num_rounds = 30, 0
    while at < len(TEXT) - 12:
        start = sequence.position
        num = int(rng.integers(1, 6))
        alone = a_sequence(architecture)
        alone.feed(TEXT[: at - 1])
        expected = guessed(alone, TEXT[at - 1 : at], num, sampling=sampling)
        assert guessed(sequence, TEXT[start:at], num, sampling=sampling) == expected, at
        assert sequence.position == at
        at += int(rng.integers(1, 6))
        num_rounds += 1
    assert num_rounds > 10


@pytest.mark.parametrize("architecture", KINDS)
def test_what_was_guessed_right_is_kept(architecture: str) -> None:
    sequence, alone = a_sequence(architecture), a_sequence(architecture)
    sequence.feed(TEXT[:40])
    guesses = guessed(sequence, TEXT[40:41], 5)
    text = [*TEXT[:41], *guesses]
    # All of it is right, and one more comes: of those the model has seen all but the last of its guesses.
    num_fed, _ = sequence.guess([*guesses, 7], 1, sampler=TokenSampler(a_job(TEXT), vocab_size=512), vocab_size=512)
    assert num_fed == 2
    assert sequence.position == len(text) + 1
    # Two are right: attention goes on behind them, recurrent state from where it was before.
    third = guessed(sequence, [9], 5)
    rest = sequence.keep([*third[:2], 11])
    assert list(rest) == ([11] if sequence.live.rows.blueprint.rewinds else [*third[:2], 11])
    sequence.feed(rest)
    alone.feed([*text, 7, 9, *third[:2], 11])
    assert alone.live.position == sequence.live.position
    assert guessed(sequence, [12], 4) == guessed(alone, [12], 4)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_a_text_that_ends_within_a_guess_can_be_gone_on_with(architecture: str) -> None:
    sequence, alone = a_sequence(architecture), a_sequence(architecture)
    sequence.feed(TEXT[:40])
    guesses = guessed(sequence, TEXT[40:41], 5)
    assert len(sequence.keep(guesses[:2])) >= 1
    sequence = a_sequence(architecture)
    sequence.feed(TEXT[:40])
    guessed(sequence, TEXT[40:41], 5)
    again = guessed(sequence, guesses[:2], 3)
    alone.feed([*TEXT[:41], guesses[0]])
    assert again == guessed(alone, guesses[1:2], 3)


def test_the_states_from_before_a_guess_are_counted() -> None:
    sequence = a_sequence("qwen3_5")
    sequence.feed(TEXT[:40])
    before = sequence.live.rows.nbytes
    guessed(sequence, TEXT[40:41], 4)
    assert sequence.live.rows.nbytes == before + sequence.live.rows.state_nbytes
    sequence.keep([1])
    assert sequence.live.rows.nbytes == before


def test_a_smaller_vocabulary_is_filled_up_and_a_larger_one_cut() -> None:
    sequence = a_sequence("llama")
    sequence.feed(TEXT[:40])
    job = a_job(TEXT, num=500, sampling=Sampling(temperature=1.0, seed=3))
    for size in (100, 700):
        sampler, at = TokenSampler(job, vocab_size=size), sequence.position
        _, tokens = sequence.guess(TEXT[at : at + 1], 9, sampler=sampler, vocab_size=size)
        assert max(tokens) < min(size, 512)
        assert mx.array(tokens).shape == (9,)
