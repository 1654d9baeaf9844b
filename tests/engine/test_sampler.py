"""How a sequence chooses its tokens: everything that a request may ask for, alone and beside others."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from reprise.core.errors import BadRequest, EngineFailed
from reprise.core.events import FinishReason
from reprise.core.job import Sampling, Thinking
from reprise.engine.running.sampler import TokenSampler, accept, sample_along, sample_batch
from reprise.engine.states.sequence_batch import SequenceBatch
from tests.engine.sequences import GREEDY, RunnerWithCache, a_job
from tests.loop.test_reuse import words
from tests.models.shared import loaded

VOCAB = 512
PROMPT = words(700, 40)


@pytest.fixture
def bench() -> RunnerWithCache:
    return RunnerWithCache()


def logprobs_after(tokens: list[int]) -> npt.NDArray[np.float64]:
    """Of the next token, computed without any of the code under test."""
    model = loaded("llama")
    logits = SequenceBatch(model.blueprint).forward(model.model, mx.array([tokens]))[0, -1]
    logits64 = np.array(logits.astype(mx.float32)).astype(np.float64)
    return logits64 - np.logaddexp.reduce(logits64)


def greedy_by_hand(
    num: int, shape: Callable[[npt.NDArray[np.float64], list[int]], npt.NDArray[np.float64]]
) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(num):
        tokens.append(int(shape(logprobs_after(tokens), tokens).argmax()))
    return tokens[len(PROMPT) :]


# Seeds.

SAMPLINGS = [
    Sampling(seed=5),
    Sampling(seed=5, temperature=0.7, top_p=0.9),
    Sampling(seed=5, top_k=12, min_p=0.02),
    Sampling(seed=5, xtc_probability=0.5, xtc_threshold=0.02),
    Sampling(seed=5, repetition_penalty=1.3, frequency_penalty=0.4),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_a_seed_gives_the_same_tokens_warm_and_cold_and_beside_others(
    bench: RunnerWithCache, sampling: Sampling
) -> None:
    cold = bench.tokens(PROMPT, num=12, sampling=sampling)
    mx.random.seed(99)
    assert bench.tokens(PROMPT, num=12, sampling=sampling) == cold
    assert bench.tokens(PROMPT, num=12, sampling=replace(sampling, seed=6)) != cold
    ours = bench.begin(a_job(PROMPT, num=12, sampling=sampling))
    others = [bench.begin(a_job(words(i, 20 + i), num=12, sampling=replace(sampling, seed=i))) for i in (1, 2)]
    greedy = bench.begin(a_job(words(3, 31), num=12))
    beside = [bench.step([others[0], ours, greedy, others[1]])[ours] for _ in range(12)]
    assert beside == cold


def test_without_a_seed_two_runs_differ(bench: RunnerWithCache) -> None:
    assert bench.tokens(PROMPT, num=12, sampling=Sampling()) != bench.tokens(PROMPT, num=12, sampling=Sampling())


def test_filters_leave_only_what_they_should(bench: RunnerWithCache) -> None:
    logprobs = logprobs_after(PROMPT)
    order = np.argsort(-logprobs)
    nucleus = int(np.searchsorted(np.cumsum(np.exp(logprobs[order])), 0.3)) + 1
    allowed = {
        "top_k": (Sampling(top_k=3), set(order[:3].tolist())),
        "top_p": (Sampling(top_p=0.3), set(order[:nucleus].tolist())),
        "min_p": (Sampling(min_p=0.5), set(np.flatnonzero(logprobs >= logprobs.max() + math.log(0.5)).tolist())),
    }
    for name, (sampling, tokens) in allowed.items():
        seen = {bench.tokens(PROMPT, num=1, sampling=replace(sampling, seed=i))[0] for i in range(30)}
        assert seen <= tokens, name
        assert len(tokens) == 1 or len(seen) > 1, name


def test_tokens_come_as_often_as_they_are_likely(bench: RunnerWithCache) -> None:
    """At a low temperature a few tokens hold nearly everything: their shares are those of the softmax."""
    job = a_job(PROMPT, num=1, sampling=Sampling(temperature=0.5))
    bench.events(job)
    sharp = 2 * logprobs_after(PROMPT)
    shares = np.exp(sharp - np.logaddexp.reduce(sharp))
    likeliest = int(shares.argmax())
    drawn = [bench.tokens(PROMPT, num=1, sampling=Sampling(temperature=0.5, seed=i))[0] for i in range(150)]
    share = float(shares[likeliest])
    assert abs(drawn.count(likeliest) / 150 - share) < 4 * math.sqrt(share * (1 - share) / 150)


# Penalties and biases.


def test_penalties_see_the_history_that_was_reused(bench: RunnerWithCache) -> None:
    sampling = replace(GREEDY, repetition_penalty=0.4, repetition_context_size=200)

    # Below 1 it is a reward: what the prompt says is said again, so every token of the prompt counts.
    def rewarded(_: npt.NDArray[np.float64], tokens: list[int]) -> npt.NDArray[np.float64]:
        model = loaded("llama")
        logits = np.array(SequenceBatch(model.blueprint).forward(model.model, mx.array([tokens]))[0, -1])
        seen = sorted(set(tokens))
        logits[seen] = np.where(logits[seen] < 0, logits[seen] * 0.4, logits[seen] / 0.4)
        return logits

    expected = greedy_by_hand(6, rewarded)
    assert bench.tokens(PROMPT, num=6, sampling=sampling) == expected
    warm = bench.tokens(PROMPT, num=6, sampling=sampling)
    assert warm == expected
    assert expected != greedy_by_hand(6, lambda logprobs, _: logprobs), "the penalty changes nothing here"


def test_penalties_look_past_an_image() -> None:
    sampling = replace(GREEDY, presence_penalty=1.0, presence_context_size=3)
    sampler = TokenSampler(a_job([4, 5, 6, -8, -9, 7], sampling=sampling), vocab_size=10)
    assert sampler.shape(mx.zeros(10)).tolist() == [0, 0, 0, 0, 0, -1, -1, -1, 0, 0]


def test_presence_and_frequency_look_at_the_latest_tokens(bench: RunnerWithCache) -> None:
    sampling = replace(
        GREEDY, presence_penalty=1.5, presence_context_size=10, frequency_penalty=2.0, frequency_context_size=30
    )

    def penalised(logprobs: npt.NDArray[np.float64], tokens: list[int]) -> npt.NDArray[np.float64]:
        shaped = logprobs.copy()
        for token in set(tokens[-10:]):
            shaped[token] -= 1.5
        for token in tokens[-30:]:
            shaped[token] -= 2.0
        return shaped

    assert bench.tokens(PROMPT, num=10, sampling=sampling) == greedy_by_hand(10, penalised)


def test_a_bias_moves_one_token_and_no_other(bench: RunnerWithCache) -> None:
    plain = bench.tokens(PROMPT, num=3)
    assert bench.tokens(PROMPT, num=3, sampling=replace(GREEDY, logit_bias={77: 100.0})) == [77, 77, 77]
    without = bench.tokens(PROMPT, num=1, sampling=replace(GREEDY, logit_bias={plain[0]: -100.0}))
    assert without[0] == int(np.argsort(-logprobs_after(PROMPT))[1])


@pytest.mark.parametrize("token", [-1, VOCAB, 10**9])
def test_a_bias_for_a_token_that_is_none(bench: RunnerWithCache, token: int) -> None:
    with pytest.raises(BadRequest, match="logit_bias"):
        bench.begin(a_job(PROMPT, sampling=replace(GREEDY, logit_bias={token: 1.0})))


# Log-probabilities.


@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB + 5])
def test_logprobs_are_the_models_own(bench: RunnerWithCache, num_top: int) -> None:
    events = bench.events(a_job(PROMPT, num=3, sampling=replace(GREEDY, logprobs=num_top)))
    tokens = list(PROMPT)
    for event in events:
        expected = logprobs_after(tokens)
        assert event.logprob == pytest.approx(expected[event.token], abs=1e-4)
        assert len(event.top) == min(num_top, VOCAB)
        values = [value for _, value in event.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(np.sort(expected)[::-1][: len(values)], abs=1e-4)
        tokens.append(event.token)


def test_nobody_pays_for_logprobs_that_nobody_wants(bench: RunnerWithCache) -> None:
    assert all(event.logprob is None and event.top == () for event in bench.events(a_job(PROMPT, num=3)))


# Thinking.

END = (6, 7, 8)


def test_thinking_is_ended_at_its_budget_by_all_tokens_of_the_end(bench: RunnerWithCache) -> None:
    plain = bench.tokens(PROMPT, num=4)
    thinking = Thinking(start=(5,), end=END, budget=4, is_open=True)
    tokens = bench.tokens(PROMPT, num=12, thinking=thinking)
    assert tokens[:7] == [*plain, *END]
    # What comes behind is the model's own answer to what was forced.
    rest = [*PROMPT, *tokens[:7]]
    assert tokens[7:] == bench.tokens(rest, num=5)


def test_a_budget_of_nothing_ends_thinking_at_once(bench: RunnerWithCache) -> None:
    thinking = Thinking(start=(5,), end=END, budget=0, is_open=True)
    assert bench.tokens(PROMPT, num=6, thinking=thinking)[:3] == list(END)


def test_thinking_that_is_not_open_has_no_budget_to_spend(bench: RunnerWithCache) -> None:
    plain = bench.tokens(PROMPT, num=8)
    assert bench.tokens(PROMPT, num=8, thinking=Thinking(start=(5,), end=END, budget=2)) == plain


def test_thinking_that_the_model_opens_is_counted_from_there(bench: RunnerWithCache) -> None:
    plain = bench.tokens(PROMPT, num=8)
    start = (plain[1], plain[2])
    tokens = bench.tokens(PROMPT, num=8, thinking=Thinking(start=start, end=END, budget=2))
    assert tokens == [*plain[:5], *END]


def test_an_end_that_the_model_has_begun_itself_counts(bench: RunnerWithCache) -> None:
    """The model ends thinking itself, one token before its budget: nothing is forced."""
    plain = bench.tokens(PROMPT, num=8)
    thinking = Thinking(start=(5,), end=(plain[2], plain[3]), budget=5, is_open=True)
    assert bench.tokens(PROMPT, num=8, thinking=thinking) == plain


def test_the_forced_end_is_the_same_beside_others(bench: RunnerWithCache) -> None:
    thinking = Thinking(start=(5,), end=END, budget=3, is_open=True)
    alone = bench.tokens(PROMPT, num=10, thinking=thinking)
    ours = bench.begin(a_job(PROMPT, num=10, thinking=thinking))
    other = bench.begin(a_job(words(4, 25), num=20))
    assert [bench.step([other, ours])[ours] for _ in range(10)] == alone


# Grammars.


class Only:
    """A grammar of fixed sets: one for each token, then anything."""

    def __init__(self, *sets: set[int]) -> None:
        self.sets = list(sets)
        self.taken: list[int] = []

    def allowed(self) -> npt.NDArray[np.uint32] | None:
        if len(self.taken) >= len(self.sets):
            return None
        words = np.zeros((VOCAB + 31) // 32, dtype=np.uint32)
        for token in self.sets[len(self.taken)]:
            words[token // 32] |= np.uint32(1 << (token % 32))
        return words

    def accept(self, token: int) -> None:
        if len(self.taken) < len(self.sets) and token not in self.sets[len(self.taken)]:
            raise ValueError(f"{token} is not allowed")
        self.taken.append(token)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3)], ids=["greedy", "sampled"])
def test_a_grammar_decides_what_may_come(bench: RunnerWithCache, sampling: Sampling) -> None:
    sets = ({0, 31, 32}, {511}, {64, 95})
    tokens = bench.tokens(PROMPT, num=5, sampling=sampling, constraint=lambda: Only(*sets))
    assert all(token in allowed for token, allowed in zip(tokens, sets, strict=False))
    assert len(tokens) == 5


@pytest.mark.parametrize("allowed", [{12, 99, 400}, set(range(96, 128))], ids=["far apart", "one word"])
def test_a_grammar_chooses_the_likeliest_that_it_allows(bench: RunnerWithCache, allowed: set[int]) -> None:
    (token,) = bench.tokens(PROMPT, num=1, constraint=lambda: Only(allowed))
    assert token == max(allowed, key=lambda t: logprobs_after(PROMPT)[t])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3)], ids=["greedy", "sampled"])
def test_the_only_token_that_a_grammar_allows_is_not_sampled(sampling: Sampling) -> None:
    decoder = TokenSampler(a_job([1], constraint=lambda: Only({70}, {31}), sampling=sampling), vocab_size=VOCAB)
    # Whoever sampled from these would take another token, or none.
    logits = mx.full((2, VOCAB), math.nan)
    taken, reason = sample_along(decoder, logits, [70])
    assert ([each.token for each in taken], reason) == ([70, 31], None)
    assert decoder.only_choice(VOCAB) is None


def test_an_only_token_that_the_model_does_not_have_is_an_error() -> None:
    decoder = TokenSampler(a_job([1], constraint=lambda: Only({VOCAB - 1})), vocab_size=VOCAB)
    (failed,) = accept([decoder], sample_batch([decoder], mx.zeros((1, VOCAB - 1))))
    assert isinstance(failed, EngineFailed)


def test_what_is_sampled_behind_an_only_token_is_the_same(bench: RunnerWithCache) -> None:
    def make() -> Only:
        return Only({31}, set(range(100)), {40}, {41})

    sampling = Sampling(seed=3, frequency_penalty=0.5)
    tokens = bench.tokens(PROMPT, num=12, sampling=sampling, constraint=make)
    # With log-probabilities all of them are sampled.
    assert tokens == bench.tokens(PROMPT, num=12, sampling=replace(sampling, logprobs=1), constraint=make)
    assert [tokens[0], *tokens[2:4]] == [31, 40, 41]


def test_a_mask_shorter_than_the_vocabulary_forbids_the_rest(bench: RunnerWithCache) -> None:
    class Short(Only):
        def allowed(self) -> npt.NDArray[np.uint32] | None:
            return np.full(2, 0xFFFFFFFF, dtype=np.uint32)

    assert max(bench.tokens(PROMPT, num=6, sampling=Sampling(seed=1), constraint=Short)) < 64


def test_a_stop_token_is_no_business_of_the_grammar(bench: RunnerWithCache) -> None:
    made: list[Only] = []

    def make() -> Only:
        made.append(Only({40}, {41}))
        return made[-1]

    assert bench.tokens(PROMPT, num=9, constraint=make, stop_tokens=frozenset({41})) == [40, 41]
    assert made[-1].taken == [40]


# Ends.


def test_where_a_sequence_ends(bench: RunnerWithCache) -> None:
    plain = bench.tokens(PROMPT, num=6)
    assert bench.reason is FinishReason.LENGTH
    stopped = bench.events(a_job(PROMPT, num=6, stop_tokens=frozenset({plain[2]})))
    at = plain.index(plain[2])
    assert [event.token for event in stopped] == plain[: at + 1]
    assert [event.is_stop for event in stopped] == [False] * at + [True]
    assert bench.reason is FinishReason.STOP
    heard: list[int] = []

    def watch(token: int) -> bool:
        heard.append(token)
        return len(heard) == 4

    assert bench.tokens(PROMPT, num=6, watch=watch) == plain[:4] == heard
    assert bench.reason is FinishReason.STOP


def test_a_watch_does_not_hear_stop_tokens(bench: RunnerWithCache) -> None:
    plain = bench.tokens(PROMPT, num=2)
    heard: list[Any] = []
    bench.tokens(PROMPT, num=6, stop_tokens=frozenset({plain[0]}), watch=lambda token: bool(heard.append(token)))
    assert heard == []


def test_a_grammar_that_is_complete_ends_an_answer_before_its_minimum() -> None:
    class Complete:
        """Allows the end of the answer, and nothing else."""

        def allowed(self) -> npt.NDArray[np.uint32]:
            words = np.zeros(VOCAB // 32, dtype=np.uint32)
            words[0] = 1 << 3
            return words

        def accept(self, token: int) -> None:
            raise AssertionError(token)

    job = a_job(PROMPT, stop_tokens=frozenset({3}), min_tokens=4, constraint=Complete)
    (only,) = RunnerWithCache().events(job)
    assert (only.token, only.is_stop) == (3, True)
