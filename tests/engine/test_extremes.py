"""Sampling numbers at the ends of their ranges: a choice is made of what may come, and limits are the limits."""

import json
import math
import time
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.core.errors import BadRequest
from reprise.core.events import Sampled
from reprise.core.job import Job, Sampling
from reprise.engine.running.sampler import TokenSampler, accept, sample_batch
from tests.engine.sequences import a_job
from tests.engine.test_sampler import Only

VOCAB = 512
PROMPT = list(range(1, 40))
LOGITS = np.random.default_rng(3).normal(0, 8, VOCAB).astype(np.float32)
TINY = [5e-324, 1e-310, 1e-45, 1e-38, 1e-31, 1e-20, 1e-9]


def chosen(job: Job, logits: npt.NDArray[np.float32] = LOGITS, *, dtype: mx.Dtype = mx.float32) -> Sampled:
    decoder = TokenSampler(job, vocab_size=VOCAB)
    (made,) = accept([decoder], sample_batch([decoder], mx.array(logits)[None].astype(dtype)))
    assert not isinstance(made, Exception), made
    return made[0]


def ends(low: float, high: float, *, zero: bool = True) -> st.SearchStrategy[float]:
    """Numbers of a range, and those at its ends that float32 does not have."""
    near = [value for value in (*TINY, high, math.nextafter(high, 0), *((0.0, -0.0) if zero else ())) if value >= low]
    near += [low] if zero or low > 0 else []
    return st.one_of(st.sampled_from(near), st.floats(low, high, exclude_min=not zero, allow_nan=False))


SAMPLINGS = st.builds(
    Sampling,
    temperature=ends(0, 1e300),
    top_p=ends(0, 1, zero=False),
    top_k=st.sampled_from([0, 1, 2, VOCAB - 1, VOCAB]),
    min_p=ends(0, 1),
    min_tokens_to_keep=st.sampled_from([1, 2, VOCAB, 1000]),
    xtc_probability=ends(0, 1),
    xtc_threshold=ends(0, 0.5),
    repetition_penalty=ends(0, 100, zero=False),
    repetition_context_size=st.sampled_from([0, 1, 20, 10**6]),
    presence_penalty=ends(-2, 2),
    frequency_penalty=ends(-2, 2),
    logit_bias=st.dictionaries(st.integers(1, VOCAB - 1), ends(-100, 100), max_size=3),
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.sampled_from([0, 5, VOCAB]),
)


@given(SAMPLINGS, st.sampled_from([mx.float32, mx.float16, mx.bfloat16]))
def test_no_numbers_make_the_choice_meaningless(sampling: Sampling, dtype: mx.Dtype) -> None:
    # Token 0 is what the likeliest of numbers that are none is. The grammar forbids it.
    job = a_job(PROMPT, sampling=sampling, constraint=lambda: Only(set(range(1, VOCAB))))
    event = chosen(job, dtype=dtype)
    assert event.token != 0
    json.dumps([event.logprob, event.top], allow_nan=False)
    assert all(token != 0 for token, _ in event.top)


LIMITS: list[dict[str, Any]] = [
    *({"temperature": value} for value in (0.0, -0.0, *TINY[:-1])),
    *({"top_p": value} for value in TINY),
    {"top_k": 1},
    {"min_p": 1.0},
    {"temperature": 1e300, "top_p": 5e-324},
]


@pytest.mark.parametrize("numbers", LIMITS, ids=str)
def test_the_limit_is_the_likeliest_token(numbers: dict[str, Any]) -> None:
    for seed in range(8):
        assert chosen(a_job(PROMPT, sampling=Sampling(seed=seed, **numbers))).token == LOGITS.argmax()


def test_heat_without_end_makes_all_tokens_alike() -> None:
    drawn = {chosen(a_job(PROMPT, sampling=Sampling(seed=seed, temperature=1e300))).token for seed in range(40)}
    assert len(drawn) > 30


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_a_penalty_near_zero_rewards_what_was_said(dtype: mx.Dtype) -> None:
    greedy = Sampling(temperature=0, repetition_penalty=5e-324, logprobs=3)
    event = chosen(a_job(PROMPT, sampling=greedy), dtype=dtype)
    said = PROMPT[-20:]
    assert event.token == said[int(LOGITS[said].argmax())]
    assert event.logprob == 0


def test_a_context_of_no_tokens_has_nothing_to_penalise() -> None:
    at = int(LOGITS.argmax())
    sampling = Sampling(temperature=0, repetition_penalty=50, repetition_context_size=0, presence_context_size=0)
    assert chosen(a_job([at] * 30, sampling=sampling)).token == at


@pytest.mark.parametrize("name", ["temperature", "top_p", "repetition_penalty", "logit_bias"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(name: str, number: float) -> None:
    value: Any = {3: number} if name == "logit_bias" else number
    with pytest.raises(BadRequest, match=name):
        TokenSampler(a_job(PROMPT, sampling=Sampling(**{name: value})), vocab_size=VOCAB)


def test_values_that_nobody_sent_before_hold_nobody_up() -> None:
    """mlx-lm's filters compile a kernel for each value, on the engine thread: half a second here, and kept for ever."""
    began_s = time.monotonic()
    for number in range(20):
        share = 0.5 + number / 1000
        chosen(
            a_job(PROMPT, sampling=Sampling(top_p=share, min_p=share / 100, xtc_probability=1, xtc_threshold=share / 3))
        )
    assert time.monotonic() - began_s < 5


# Log-probabilities under a grammar.


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0, logprobs=4), Sampling(seed=2, logprobs=4)], ids=["greedy", "sampled"]
)
def test_what_the_grammar_forbids_is_not_among_the_likeliest(sampling: Sampling) -> None:
    event = chosen(a_job(PROMPT, sampling=sampling, constraint=lambda: Only({7, 9})))
    assert {token for token, _ in event.top} == {7, 9}
    assert math.exp(event.top[0][1]) + math.exp(event.top[1][1]) == pytest.approx(1)


def test_a_grammar_that_leads_nowhere_fails_alone() -> None:
    decoders = [
        TokenSampler(a_job(PROMPT, sampling=Sampling(temperature=0), **only), vocab_size=VOCAB)
        for only in ({"constraint": lambda: Only(set())}, {})
    ]
    failed, fine = accept(decoders, sample_batch(decoders, mx.array(np.stack([LOGITS, LOGITS]))))
    assert "no further token" in str(failed)
    assert not isinstance(fine, Exception)
    assert fine[0].token == LOGITS.argmax()
