"""Drafts are verified: the answer is the one without them, and all layers stand where it does, whatever their kind."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from reprise.core.events import FinishReason, Sampled
from reprise.core.job import Job, Sampling, Thinking
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.runner import TokenFailure
from tests.engine.sequences import GREEDY, RunnerWithCache, a_job
from tests.matrix import now_and_later

KINDS = ("llama", "gemma3_text", "gpt_oss", "qwen3_5", "mamba2")
SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=5)
PROMPT = [int(token) for token in np.random.default_rng(3).integers(5, 200, 70)]
"""Longer than the windows of the tiny models."""


class Unrestricted:
    """A grammar that allows everything: tokens are sampled one after the other."""

    def allowed(self) -> npt.NDArray[np.uint32] | None:
        return None

    def accept(self, token: int) -> None:
        pass


def drafted(bench: RunnerWithCache, job: Job, truth: Sequence[int], right: Sequence[int]) -> list[Sampled]:
    """The answer to a job whose drafts have so many right tokens and then three wrong ones, in turn; -1: no draft."""
    live = bench.begin(job)
    found: list[Sampled] = []
    rounds = 0
    while True:
        num = right[rounds % len(right)]
        rounds += 1
        left = job.max_tokens - len(found) - 1
        known = list(truth[len(found) : len(found) + max(0, num)])
        draft = [*known, *(1 + (t + 1) % 3 for t in truth[len(found) + len(known) :][:3])][: max(0, left)]
        if num < 0 or not draft:
            (result,) = bench.runner.decode([live])
        else:
            # What a pass ahead has computed is undone.
            (result,) = bench.runner.verify([live], [draft])
        if isinstance(result, TokenFailure):
            raise result.error
        found.extend(result.sampled)
        stand_together(bench, live, job, found)
        if result.reason is not None:
            bench.runner.catch_up([live])
            assert live.position == len(job.prompt) - 1 + len(found)
            bench.keep(live, job)
            bench.runner.stop(live)
            return found


def stand_together(bench: RunnerWithCache, live: LiveSequence, job: Job, found: Sequence[Sampled]) -> None:
    assert live.position + len(live.unfed) == len(job.prompt) - 1 + len(found)
    assert not live.unfed or not bench.runner.loaded.blueprint.rewinds
    for layer in live.rows.kv_layers:
        assert layer.lengths == [live.position + (live.rows.ahead is not None)]


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize(
    "sampling", now_and_later([replace(SAMPLED, logprobs=2, repetition_penalty=1.2)], [GREEDY, SAMPLED])
)
def test_an_answer_is_the_one_without_drafts(architecture: str, sampling: Sampling) -> None:
    plain = RunnerWithCache(architecture).events(a_job(PROMPT, num=40, sampling=sampling))
    truth = [event.token for event in plain]
    bench = RunnerWithCache(architecture)
    for right in ((0,), (7,), (0, 3, -1, 1, -2, 12)):
        found = drafted(bench, a_job(PROMPT, num=40, sampling=sampling), truth, right)
        assert [event.token for event in found] == truth, right
        for one, other in zip(found, plain, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_what_is_stored_behind_drafts_resumes_as_if_computed(architecture: str) -> None:
    bench, cold = RunnerWithCache(architecture), RunnerWithCache(architecture)
    truth = cold.tokens(PROMPT, num=24)
    drafted(bench, a_job(PROMPT, num=24), truth, (3, 0))
    following = [*PROMPT, *truth, 9, 8, 7]
    expected = RunnerWithCache(architecture).tokens(following, num=12)
    match = bench.cache.match(a_job(following).prompt.tokens)
    assert bench.cache.resume_at(match, limit=len(following) - 1) == len(PROMPT) + len(truth) - 1
    assert bench.tokens(following, num=12) == expected


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_an_answer_ends_in_the_middle_of_a_draft_that_was_right(architecture: str) -> None:
    truth = RunnerWithCache(architecture).tokens(PROMPT, num=20)
    bench = RunnerWithCache(architecture)
    seen: list[int] = []
    live = bench.begin(a_job(PROMPT, num=20, watch=lambda token: seen.append(token) or len(seen) == 7))
    (result,) = bench.runner.verify([live], [truth[:12]])
    assert not isinstance(result, TokenFailure)
    assert (len(result.sampled), result.reason) == (7, FinishReason.STOP)
    bench.runner.catch_up([live])
    assert live.position == len(PROMPT) - 1 + 7


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_a_thinking_budget_ends_where_it_would(architecture: str) -> None:
    thinking = Thinking(start=(3,), end=(4, 6), budget=9, is_open=True)
    truth = RunnerWithCache(architecture).tokens(PROMPT, num=24, thinking=thinking)
    assert truth[9:11] == [4, 6]
    for right in ((12,), (0, 5)):
        found = drafted(RunnerWithCache(architecture), a_job(PROMPT, num=24, thinking=thinking), truth, right)
        assert [event.token for event in found] == truth


def test_a_grammar_sees_accepted_tokens_only() -> None:
    seen: list[int] = []

    class Notes(Unrestricted):
        def accept(self, token: int) -> None:
            seen.append(token)

    truth = RunnerWithCache("qwen3_5").tokens(PROMPT, num=24)
    found = drafted(RunnerWithCache("qwen3_5"), a_job(PROMPT, num=24, constraint=Notes), truth, (4, 0))
    assert [event.token for event in found] == truth == seen


def test_a_token_that_raises_leaves_the_sequence_where_it_was() -> None:
    class Breaks(Unrestricted):
        def accept(self, token: int) -> None:
            raise ValueError("no")

    for architecture in ("llama", "qwen3_5"):
        bench = RunnerWithCache(architecture)
        truth = RunnerWithCache(architecture).tokens(PROMPT, num=24)
        live = bench.begin(a_job(PROMPT, num=24, constraint=Breaks))
        (result,) = bench.runner.verify([live], [truth[:6]])
        assert isinstance(result, TokenFailure)
        assert live.position == len(PROMPT) - 1
        mx.eval(live.rows.arrays())


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("sampling", now_and_later([SAMPLED], [GREEDY, replace(SAMPLED, repetition_penalty=1.2)]))
def test_rows_of_a_batch_verify_drafts_of_different_lengths(architecture: str, sampling: Sampling) -> None:
    prompts = [PROMPT, [*PROMPT[:30], 11, 12], PROMPT[7:60]]
    jobs = [a_job(prompt, num=num, sampling=sampling) for prompt, num in zip(prompts, (40, 13, 31), strict=True)]
    truths = [[e.token for e in RunnerWithCache(architecture).events(job)] for job in jobs]
    bench = RunnerWithCache(architecture)
    lives = [bench.begin(job) for job in jobs]
    found: list[list[int]] = [[], [], []]
    running = [0, 1, 2]
    seen: list[tuple[int, int]] = []
    # How many tokens of each draft are right, before three wrong ones; -1: no draft. Rows end while others go on.
    rounds = itertools.cycle([(3, 0, -1), (-1, 5, 2), (-1, -1, -1), (0, 1, 6), (9, -1, 0), (-1, -1, -1)])
    while running:
        drafts: list[list[int]] = []
        for at, num in zip(running, itertools.compress(next(rounds), [i in running for i in range(3)]), strict=True):
            left = truths[at][len(found[at]) :]
            draft = [*left[: max(0, num)], *(1 + (t + 1) % 3 for t in left[max(0, num) :][:3])] if num >= 0 else []
            drafts.append(draft[: len(left) - 1])
        for result in bench.runner.decode([lives[at] for at in running], drafts=drafts):
            assert not isinstance(result, TokenFailure), result
            at = lives.index(result.live)
            found[at] += [event.token for event in result.sampled]
            seen += [(result.num_drafted, len(result.sampled))] if len(running) == 3 else []
            assert found[at] == truths[at][: len(found[at])]
            assert lives[at].position + len(lives[at].unfed) == len(prompts[at]) - 1 + len(found[at])
            if result.reason is not None:
                running.remove(at)
                bench.runner.catch_up([lives[at]])
                bench.keep(lives[at], jobs[at])
                bench.runner.stop(lives[at])
    assert found == truths
    assert {(0, 1), (3, 1), (8, 6)} <= set(seen)
    for prompt, truth in zip(prompts, truths, strict=True):
        following = [*prompt, *truth, 9, 8, 7]
        match = bench.cache.match(a_job(following).prompt.tokens)
        assert bench.cache.resume_at(match, limit=len(following) - 1) >= len(prompt) + len(truth) - 1
        assert bench.tokens(following, num=6) == RunnerWithCache(architecture).tokens(following, num=6)


def test_sequences_with_rejected_drafts_join_a_batch() -> None:
    for architecture in ("llama", "qwen3_5"):
        other = [*PROMPT[:30], 11, 12]
        truths = [RunnerWithCache(architecture).tokens(prompt, num=16) for prompt in (PROMPT, other)]
        bench = RunnerWithCache(architecture)
        lives = [bench.begin(a_job(prompt, num=16)) for prompt in (PROMPT, other)]
        found: list[list[int]] = [[], []]
        for number, live in enumerate(lives):
            (result,) = bench.runner.verify([live], [[*truths[number][: 2 + number], 1, 2]])
            assert not isinstance(result, TokenFailure)
            found[number] += [event.token for event in result.sampled]
        for _ in range(5):
            for result in bench.runner.decode(lives):
                assert not isinstance(result, TokenFailure)
                found[lives.index(result.live)] += [event.token for event in result.sampled]
        assert all(truth[: len(answer)] == answer for truth, answer in zip(truths, found, strict=True))
