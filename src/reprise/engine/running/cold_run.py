"""Recomputes an answer without reuse (teacher-forced) and compares it token by token with the one given.

The given tokens are fed whatever the cold run would choose, so each position is judged separately: by what the
request's sampler, with the same seed and index, chooses from the cold logits, and by the difference in log-probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from reprise.core.images import outside
from reprise.core.job import Job
from reprise.core.outcome import Outcome
from reprise.core.tokens import as_tokens, join_tokens
from reprise.engine.running.runner import Runner
from reprise.engine.running.sampler import TokenSampler, sample_batch

_AT_ONCE = 32
"""Positions whose logits are in memory at a time."""

_NUDGES = tuple(0.001 * 4**i for i in range(7))
"""Log-probabilities, 0.001 to 4, added in turn to the given token until the sampler chooses it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GivenAnswer:
    """The answer to a request. `job` has its seed; `logprobs` are those of `tokens`; `outcome` is for the report."""

    job: Job
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    outcome: Outcome

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.logprobs) > 0 and self.job.sampling.seed is not None, self.job.id


@dataclass(frozen=True, slots=True)
class OtherChoice:
    """The cold run chooses `cold` as token number `index`, unless the given one is favoured by `gap`."""

    index: int
    given: int
    cold: int
    gap: float


class ColdRun:
    """A cold run of one answer, without the prefix cache. Each step feeds a chunk."""

    def __init__(self, runner: Runner, answer: GivenAnswer, *, chunk: int) -> None:
        self._runner = runner
        self._answer = answer
        self._chunk = chunk
        self._live = runner.begin()
        self._live.see(answer.job.prompt.images)
        self._tokens = join_tokens(answer.job.prompt.tokens, as_tokens(answer.tokens[:-1]))
        self._sampler = TokenSampler(answer.job, vocab_size=runner.loaded.vocab_size)
        self.logprobs: list[float] = []
        """The cold run's log-probabilities of the given tokens."""
        self.others: list[OtherChoice] = []

    @property
    def is_over(self) -> bool:
        return len(self.logprobs) == len(self._answer.tokens)

    @property
    def worst(self) -> float:
        """The largest difference in log-probability of a given token; infinite if either is not finite."""
        pairs = zip(self.logprobs, self._answer.logprobs, strict=False)
        return max((_distance(cold, given) for cold, given in pairs), default=0.0)

    def step(self) -> None:
        """Feed the next chunk, and judge the positions of the answer in it."""
        start, last = self._live.position, len(self._answer.job.prompt) - 1
        num = self._whole(start, min(self._chunk, last - start)) if start < last else min(self._chunk, _AT_ONCE)
        chunk = self._tokens[start : start + num]
        if start < last:
            self._runner.prefill([self._live], [chunk])
            return
        logits = self._runner.logits(self._live, chunk)
        for row, given in enumerate(self._answer.tokens[start - last : start - last + num]):
            self._judge(logits[row], given)

    def _whole(self, start: int, num: int) -> int:
        """As many tokens or fewer, so that no image is cut where a pass must hold it whole; more if it begins here."""
        if not self._runner.loaded.blueprint.whole_images:
            return num
        spans = [each.span for each in self._answer.job.prompt.images]
        stop = outside(start + num, spans)
        return stop - start if stop > start else next(span.stop for span in spans if span.start == start) - start

    def stop(self) -> None:
        """Free its state."""
        self._runner.drop(self._live)

    def _judge(self, logits: mx.array, given: int) -> None:
        index, sampler = len(self.logprobs), self._sampler
        wide = sampler.shape(logits).astype(mx.float32)
        self.logprobs.append(float((wide[given] - mx.logsumexp(wide)).item()))
        cold = _choice(sampler, logits)
        if cold != given:
            gap = next(
                (by for by in _NUDGES if _choice(sampler, _favoured(logits, given, cold, by)) == given), math.inf
            )
            self.others.append(OtherChoice(index, given, cold, gap))
        sampler.accept(given, None)


def rounding_between(one: ColdRun, other: ColdRun) -> float:
    """The largest difference between two cold runs with different chunk lengths, which is due to rounding."""
    return max(map(_distance, one.logprobs, other.logprobs), default=0.0)


def _choice(sampler: TokenSampler, logits: mx.array) -> int:
    choices = sample_batch([sampler], logits[None])
    if choices.broken:
        raise choices.broken[0]
    return int(choices.tokens[0].item())


def _favoured(logits: mx.array, given: int, cold: int, by: float) -> mx.array:
    places, half = mx.array([given, cold]), by / 2
    wide = logits.astype(mx.float32)
    return mx.put_along_axis(wide, places, wide[places] + mx.array([half, -half]), axis=0)


def _distance(one: float, other: float) -> float:
    return abs(one - other) if math.isfinite(one) and math.isfinite(other) else math.inf
