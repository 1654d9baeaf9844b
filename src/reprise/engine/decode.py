"""How one sequence chooses its next token: processors, grammar, sampling, thinking budget, stops.

Everything here belongs to one request. Randomness comes from a key of the request's seed and the number of the token,
so a token does not depend on what else is in the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc, make_logits_processors

from reprise.core.errors import BadRequest
from reprise.core.events import FinishReason, Sampled
from reprise.core.job import Constraint, Job, Sampling

_NEG_INF = -float("inf")


class Decoder:
    """The choice of tokens of one job."""

    def __init__(self, job: Job, *, vocab_size: int) -> None:
        self.job = job
        sampling = job.sampling
        check_sampling(sampling, vocab_size)
        self._seed = sampling.seed if sampling.seed is not None else random.getrandbits(63)
        self._processors = _processors(sampling)
        self._context = max(
            sampling.repetition_context_size, sampling.presence_context_size, sampling.frequency_context_size
        )
        self._history = [int(t) for t in job.prompt.tokens[-self._context :]] if self._processors else []
        self._constraint: Constraint | None = job.constraint() if job.constraint is not None else None
        self._budget = _Budget(job) if job.thinking is not None else None
        self.tokens: list[int] = []

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is taken and nothing else is asked: then a batch can choose in one operation."""
        return (
            self.job.sampling.temperature == 0
            and not self._processors
            and self._constraint is None
            and self.job.sampling.logprobs is None
        )

    def forced(self) -> int | None:
        """The token that has to come next whatever the model says, or None."""
        return self._budget.forced() if self._budget is not None else None

    def choose(self, logits: mx.array) -> Choice:
        """The next token for logits of shape ``(vocabulary,)``; lazy."""
        logits = logits[None]
        if self._processors:
            history = mx.array(self._history[-self._context :])
            for process in self._processors:
                logits = process(history, logits)
        if self._constraint is not None:
            allowed = self._constraint.allowed()
            if allowed is not None:
                logits = mx.where(_unpacked(allowed, logits.shape[-1]), logits, _NEG_INF)
        # Sampling works on float32: 16 bits lose the tail.
        logprobs = logits.astype(mx.float32)
        logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
        return Choice(self._sample(logprobs), logprobs[0])

    def _sample(self, logprobs: mx.array) -> mx.array:
        sampling = self.job.sampling
        if sampling.temperature == 0:
            return mx.argmax(logprobs, axis=-1)[0]
        key, gate = mx.random.split(mx.random.key((self._seed * 1_000_003 + len(self.tokens)) % 2**64))
        if 0 < sampling.top_p < 1:
            logprobs = apply_top_p(logprobs, sampling.top_p)
        if sampling.min_p > 0:
            logprobs = apply_min_p(logprobs, sampling.min_p, sampling.min_tokens_to_keep)
        if sampling.xtc_probability > 0:
            # The gate is drawn here, from the request's own key, and not from the global state.
            opened = apply_xtc(logprobs, 1.0, sampling.xtc_threshold, [])
            logprobs = mx.where(mx.random.uniform(key=gate) < sampling.xtc_probability, opened, logprobs)
        if 0 < sampling.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, sampling.top_k)
        return mx.random.categorical(logprobs * (1 / sampling.temperature), key=key)[0]

    def accept(self, token: int, logprobs: npt.NDArray[np.float32] | None) -> tuple[Sampled, FinishReason | None]:
        """Take `token` as the next one; gives the event, and why the job ends if it does."""
        job = self.job
        is_stop = token in job.stop_tokens
        self.tokens.append(token)
        if self._processors:
            self._history.append(token)
        if self._constraint is not None and not is_stop:
            self._constraint.accept(token)
        if self._budget is not None:
            self._budget.saw(token)
        sampled = _sampled(token, logprobs, job.sampling.logprobs, is_stop=is_stop)
        if is_stop or (job.watch is not None and job.watch(token)):
            return sampled, FinishReason.STOP
        return sampled, FinishReason.LENGTH if len(self.tokens) >= job.max_tokens else None


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A token (scalar array) and the log-probabilities that it was chosen from, shape ``(vocabulary,)``; lazy."""

    token: mx.array
    logprobs: mx.array


class _Budget:
    """Counts reasoning tokens, and forces the end of thinking when the budget is spent."""

    def __init__(self, job: Job) -> None:
        assert job.thinking is not None
        self._thinking = job.thinking
        self._is_open = job.thinking.is_open
        self._num = 0
        self._tail: list[int] = []
        self._queue: list[int] = []

    def forced(self) -> int | None:
        thinking = self._thinking
        if self._queue:
            return self._queue[0]
        if self._is_open and thinking.budget is not None and self._num >= thinking.budget and thinking.end:
            self._queue = list(thinking.end)
            return self._queue[0]
        return None

    def saw(self, token: int) -> None:
        thinking = self._thinking
        if self._queue and token == self._queue[0]:
            self._queue.pop(0)
        longest = max(len(thinking.start), len(thinking.end), 1)
        self._tail = [*self._tail, token][-longest:]
        if self._is_open:
            self._num += 1
            if _ends_with(self._tail, thinking.end):
                self._is_open, self._queue = False, []
        elif _ends_with(self._tail, thinking.start):
            # Reasoning that begins again goes on with what is left of the budget.
            self._is_open = True


def _ends_with(tail: list[int], run: tuple[int, ...]) -> bool:
    return len(run) > 0 and tuple(tail[-len(run) :]) == run


def _processors(sampling: Sampling) -> list[Callable[[mx.array, mx.array], mx.array]]:
    return make_logits_processors(
        logit_bias=dict(sampling.logit_bias) or None,
        repetition_penalty=None if sampling.repetition_penalty == 1 else sampling.repetition_penalty,
        repetition_context_size=sampling.repetition_context_size,
        presence_penalty=sampling.presence_penalty,
        presence_context_size=sampling.presence_context_size,
        frequency_penalty=sampling.frequency_penalty,
        frequency_context_size=sampling.frequency_context_size,
    )


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """BadRequest for a token that the model does not have: an index out of range would be undefined in MLX."""
    for token in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"logit_bias names the token {token}, but this model's tokens go from 0 to {vocab_size - 1}.",
                param="logit_bias",
            )


def _unpacked(words: npt.NDArray[np.uint32], size: int) -> mx.array:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
    if len(bits) < size:
        bits = np.pad(bits, (0, size - len(bits)))
    return mx.array(bits.astype(np.bool_))


def _sampled(token: int, logprobs: npt.NDArray[np.float32] | None, num_top: int | None, *, is_stop: bool) -> Sampled:
    if logprobs is None or num_top is None:
        return Sampled(token=token, is_stop=is_stop)
    num = min(num_top, len(logprobs))
    likeliest = np.argpartition(-logprobs, num - 1)[:num] if num > 0 else np.empty(0, dtype=np.int64)
    ordered = sorted(((int(t), float(logprobs[t])) for t in likeliest), key=lambda pair: -pair[1])
    return Sampled(token=token, logprob=float(logprobs[token]), top=tuple(ordered), is_stop=is_stop)
