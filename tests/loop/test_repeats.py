"""An exact repeat computes nothing and answers as if it had: every layer kind, every sampler."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from reprise.core.events import Sampled
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.job import Constraint, Sampling, Thinking
from reprise.core.outcome import Reason
from reprise.core.prompt import Boundary, BoundaryKind
from reprise.memory import Account
from tests.loop.driving import GREEDY, DrivenEngine, SubmittedJob
from tests.matrix import every_other, now_and_later


class OddTokens(Constraint):
    """Every other token of the vocabulary, so that the grammar decides what is chosen."""

    def allowed(self) -> Any:
        return np.full(512 // 32, 0xAAAAAAAA, dtype=np.uint32)

    def accept(self, token: int) -> None:
        assert token % 2 == 1


JOBS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": GREEDY},
    "sampled": {"sampling": Sampling(seed=5, temperature=1.3, top_p=0.9, top_k=40, min_p=0.01)},
    "xtc": {"sampling": Sampling(seed=6, xtc_probability=0.9, xtc_threshold=0.001)},
    "penalties": {"sampling": Sampling(seed=7, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5)},
    "bias": {"sampling": Sampling(temperature=0, logit_bias={17: 8.0, 23: 9.0})},
    "logprobs": {"sampling": Sampling(seed=8, logprobs=5)},
    "grammar": {"sampling": Sampling(seed=9, logprobs=2), "constraint": OddTokens},
    "held back": {"sampling": Sampling(seed=10), "stop_tokens": frozenset(range(256)), "min_tokens": 4},
    "thinking": {"sampling": GREEDY, "thinking": Thinking(start=(1,), end=(2, 3), budget=0, is_open=True)},
}


@pytest.fixture(
    scope="module", params=now_and_later(["llama", "gemma3_text", "qwen3_5"], ["gpt_oss", "mamba2", "qwen3"])
)
def engine(request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(request.param)
    yield engine
    engine.close()


def prompt_of(seed: int, num: int = 60) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(4, 512, num)]


def sampled(running: SubmittedJob) -> list[Sampled]:
    return [event for event in running.events if isinstance(event, Sampled)]


def computed_of(running: SubmittedJob) -> tuple[int, int]:
    return running.end.outcome.num_reused, running.end.outcome.num_prefilled


@pytest.mark.parametrize("name", every_other(JOBS))
def test_a_repeat_samples_at_once(engine: DrivenEngine, name: str) -> None:
    prompt, job = prompt_of(sorted(JOBS).index(name)), JOBS[name]
    cold = engine.run(prompt, namespace=f"cold {name}", **job)
    # The row is there whatever the request before was sampled with.
    first = engine.run(prompt, num=3, sampling=Sampling(seed=99))
    repeat = engine.run(prompt, **job)
    assert sampled(repeat) == sampled(cold)
    assert computed_of(first) == (0, 60) and computed_of(repeat) == (60, 0)
    assert repeat.end.outcome.reason is Reason.NOTHING_NEW
    assert computed_of(engine.run([*prompt, 5])) == (60, 1)


def test_choices_of_one_prompt_compute_it_once(engine: DrivenEngine) -> None:
    prompt = prompt_of(31)
    alone = [engine.cold(prompt, sampling=Sampling(seed=seed)) for seed in range(4)]
    choices = engine.ask(lambda _: [engine.submit(prompt, sampling=Sampling(seed=seed)) for seed in range(4)])
    assert [choice.wait().tokens for choice in choices] == alone
    assert sorted(map(computed_of, choices)) == [(0, 60), (60, 0), (60, 0), (60, 0)]
    engine.check()


def test_a_retry_after_a_lost_connection_computes_nothing(engine: DrivenEngine) -> None:
    prompt = prompt_of(32)
    cold = engine.cold(prompt, num=12)
    engine.submit(prompt, num=12, cancel_when=lambda running: len(running.tokens) >= 2).wait()
    retry = engine.run(prompt, num=12)
    assert retry.tokens == cold and computed_of(retry) == (60, 0)


@pytest.mark.parametrize("num", [1, 2])
def test_a_repeat_of_an_answer_of_one_token(engine: DrivenEngine, num: int) -> None:
    prompt = prompt_of(40 + num)
    cold = engine.cold(prompt, num=8)
    engine.run(prompt, num=1)
    assert engine.run(prompt, num=num).tokens == cold[:num]
    whole = engine.run(prompt, num=8)
    assert whole.tokens == cold and computed_of(whole) == (60, 0)


def test_without_its_row_one_token_is_computed(engine: DrivenEngine) -> None:
    prompt = prompt_of(33)
    cold = engine.cold(prompt)
    engine.run(prompt)

    def forget(worker: Any) -> int:
        while worker.memory.nbytes(Account.LOGITS) > 0:
            assert worker.cache.evict_one()
        return int(worker.cache.stats.num_evictions)

    assert engine.ask(forget) == 0, "rows go before anything else"
    repeat = engine.run(prompt)
    assert repeat.tokens == cold and computed_of(repeat) == (59, 1)
    assert computed_of(engine.run(prompt)) == (60, 0)


def test_scored_prompts_and_those_of_others_take_no_row(engine: DrivenEngine) -> None:
    prompt = prompt_of(34)
    engine.run(prompt)
    scored = engine.run(prompt, prompt_logprobs=0)
    assert computed_of(scored) == (0, 60)
    assert computed_of(engine.run(prompt, namespace="other")) == (0, 60)


@pytest.mark.parametrize(
    ("architecture", "num", "passes"),
    [("llama", 20, [20]), ("llama", 60, [59, 1]), ("qwen3_5", 60, [57, 3]), ("qwen3_5", 20, [17, 3])],
)
def test_a_short_last_slice_gives_the_first_token(architecture: str, num: int, passes: list[int]) -> None:
    """The end of a prompt takes no pass of one token, and no snapshot, besides the stable boundary's before it."""
    seen: list[int] = []
    engine = DrivenEngine(architecture)
    try:
        prompt, stable = prompt_of(41, num), [Boundary(num - 3, BoundaryKind.STABLE)]
        cold = engine.run(prompt, namespace="cold", boundaries=stable, prompt_logprobs=0)
        ACTIONS[Failpoint.FORWARD] = lambda rows, tokens: seen.append(tokens.shape[1])
        running = engine.run(prompt, boundaries=stable)
        assert seen[: len(passes)] == passes and set(seen[len(passes) :]) == {1}
        assert running.tokens == cold.tokens and computed_of(running) == (0, num)
        assert engine.loop.status().counts.num_prefilled == 2 * num
        assert running.progress[-1] == num - (passes[-1] == 1)
        engine.check()
    finally:
        engine.close()
