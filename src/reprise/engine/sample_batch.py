"""The next tokens of sequences that decode together: what is the same for several is one operation for all of them.

Each token depends on its own sequence alone: its logits, its parameters and a key of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from reprise.core.events import FinishReason, Sampled
from reprise.engine.token_sampler import TokenSampler, sample


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """One token for each row, shape ``(rows,)``, lazy. `broken`: rows whose choice raised; their token means nothing.

    `logprobs`: of the rows that were asked for them, shape ``(vocabulary,)``, lazy.
    """

    tokens: mx.array
    logprobs: Mapping[int, mx.array]
    broken: Mapping[int, Exception]

    def arrays(self) -> list[mx.array]:
        return [self.tokens, *self.logprobs.values()]


def sample_batch(samplers: Sequence[TokenSampler], logits: mx.array, *, num_pending: int = 0) -> Choices:
    """The next token of each row of `logits`, shape ``(rows, vocabulary)``.

    `num_pending`: how many tokens before this one have been chosen, but not accepted yet.
    """
    own: dict[int, mx.array] = {}
    logprobs: dict[int, mx.array] = {}
    broken: dict[int, Exception] = {}
    sampled: dict[object, list[int]] = {}
    shaped = {row: logits[row] for row, sampler in enumerate(samplers) if not sampler.is_plain}
    for row, mine in list(shaped.items()):
        sampler = samplers[row]
        try:
            shaped[row] = sampler.shape(mine, num_pending)
            forced = sampler.forced()
        except Exception as error:
            broken[row] = error
            continue
        if sampler.wants_logprobs:
            logprobs[row] = _logprobs(shaped[row])
        if forced is not None:
            own[row] = mx.array(forced, dtype=mx.uint32)
        elif sampler.is_greedy:
            own[row] = mx.argmax(shaped[row], axis=-1)
        else:
            sampled.setdefault(sampler.sampler, []).append(row)
    for rows in sampled.values():
        try:
            tokens = _sample([samplers[row] for row in rows], [shaped[row] for row in rows], num_pending)
        except Exception as error:
            broken |= dict.fromkeys(rows, error)
            continue
        own |= {row: tokens[i] for i, row in enumerate(rows)}
    return Choices(_joined(logits, own), logprobs, broken)


def _sample(samplers: Sequence[TokenSampler], logits: Sequence[mx.array], num_pending: int) -> mx.array:
    """Rows with the same parameters: one operation each for filters and temperature; the noise is each row's own."""
    keys = [sampler.key(num_pending) for sampler in samplers]
    return sample(_logprobs(mx.stack(logits)), samplers[0].job.sampling, keys)


def _logprobs(logits: mx.array) -> mx.array:
    # Sampling works on float32: 16 bits lose the tail.
    wide = logits.astype(mx.float32)
    return wide - mx.logsumexp(wide, axis=-1, keepdims=True)


def _joined(logits: mx.array, own: Mapping[int, mx.array]) -> mx.array:
    """The likeliest token of each row, but for the rows that have one of their own."""
    num = logits.shape[0]
    if not own:
        return mx.argmax(logits, axis=-1)
    likeliest = mx.argmax(logits, axis=-1) if len(own) < num else None
    tokens: list[mx.array] = []
    for row in range(num):
        mine = own.get(row)
        if mine is None:
            assert likeliest is not None
            mine = likeliest[row]
        tokens.append(mine.astype(mx.uint32))
    return mx.stack(tokens)


def accept(samplers: Sequence[TokenSampler], choices: Choices) -> list[tuple[Sampled, FinishReason | None] | Exception]:
    """Read the tokens (waits until they are computed) and give each to its sequence; one that raises breaks alone."""
    tokens: list[int] = np.array(choices.tokens).tolist()
    accepted: list[tuple[Sampled, FinishReason | None] | Exception] = []
    for row, (sampler, token) in enumerate(zip(samplers, tokens, strict=True)):
        if row in choices.broken:
            accepted.append(choices.broken[row])
            continue
        try:
            wanted = choices.logprobs.get(row)
            accepted.append(sampler.accept(token, np.array(wanted) if wanted is not None else None))
        except Exception as error:
            accepted.append(error)
    return accepted
