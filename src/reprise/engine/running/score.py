"""Log-probabilities of a prompt's own tokens, taken from the logits of its prefill."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from reprise.core.events import Sampled, Scored
from reprise.core.job import Job
from reprise.engine.running.sampler import logprobs_of, sampled_with

SCORED_AT_ONCE = 256
"""Positions whose logits are in memory at a time: with a large vocabulary, each takes a megabyte."""


class PromptScorer:
    """Scores the prompt of one job: token i by the logits after the tokens ``[0, i)``."""

    def __init__(self, job: Job, *, start: int = 1) -> None:
        """`start`: the first token to score."""
        assert job.prompt_logprobs is not None and start >= 1, (job.prompt_logprobs, start)
        self._tokens = job.prompt.tokens
        self._num_top = job.prompt_logprobs
        self._start = start
        self._scored: list[Sampled] = []

    def take(self, position: int, logits: mx.array) -> None:
        """Score with the logits of the tokens from `position`, shape ``(n, vocabulary)``. O(n · vocabulary)."""
        first = self._start + len(self._scored)
        # Row r predicts the token after `position + r`; the prompt's last token has no successor to score.
        stop = min(position + logits.shape[0] + 1, len(self._tokens))
        assert position < first, "logits of a scored prompt were skipped"
        if stop <= first:
            return
        logprobs = logprobs_of(logits[first - position - 1 : stop - position - 1])
        chosen = mx.array(self._tokens[first:stop].astype(np.int32))[:, None]
        own = mx.take_along_axis(logprobs, chosen, axis=-1)[:, 0]
        num_top = min(self._num_top, logits.shape[-1])
        tops: Sequence[Sequence[tuple[int, float]]] = [()] * (stop - first)
        if num_top > 0:
            likeliest = mx.argpartition(-logprobs, kth=num_top - 1, axis=-1)[:, :num_top]
            scores = mx.take_along_axis(logprobs, likeliest, axis=-1)
            mx.eval(own, likeliest, scores)
            tops = [list(zip(*pair, strict=True)) for pair in zip(likeliest.tolist(), scores.tolist(), strict=True)]
        for token, score, top in zip(chosen[:, 0].tolist(), own.tolist(), tops, strict=True):
            self._scored.append(sampled_with(token, score, top))

    def give(self) -> Scored | None:
        """The scores since the last call, or None if there are none."""
        if not self._scored:
            return None
        scored = Scored(start=self._start, tokens=tuple(self._scored))
        self._start += len(self._scored)
        self._scored = []
        return scored
