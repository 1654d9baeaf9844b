"""Samples the next tokens of sequences that decode together, with one operation for all that share parameters.

Each token depends only on its own sequence: its logits, its parameters and its random key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from reprise.core.events import FinishReason, Sampled
from reprise.core.job import Sampling
from reprise.engine.token_sampler import TokenSampler, sample


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """One token per row, shape ``(rows,)``, lazy. `broken`: errors of rows whose token is invalid.

    `logprobs`: of the rows that want them, shape ``(vocabulary,)``, lazy.
    """

    tokens: mx.array
    logprobs: Mapping[int, mx.array]
    broken: Mapping[int, Exception]

    def arrays(self) -> list[mx.array]:
        return [self.tokens, *self.logprobs.values()]


def sample_along(
    sampler: TokenSampler, logits: mx.array, draft: Sequence[int]
) -> tuple[list[Sampled], FinishReason | None]:
    """The next tokens of one sequence as long as they equal a draft's, and the one after them.

    `logits`, shape ``(len(draft) + 1, vocabulary)``: row i is after ``draft[:i]``. Raises what sampling raises.
    """
    # One by one if processors or a grammar must see each token, otherwise all in one operation.
    at_once = len(draft) + 1 if sampler.can_sample_ahead(len(draft)) else 1
    taken: list[Sampled] = []
    reason: FinishReason | None = None
    while reason is None and len(taken) <= len(draft):
        first = len(taken)
        rows = logits[first : first + at_once]
        choices = sample_batch([sampler] * len(rows), rows, num_pending=range(len(rows)))
        tokens: list[int] = np.array(choices.tokens).tolist()
        for row, token in enumerate(tokens):
            if row in choices.broken:
                raise choices.broken[row]
            wanted = choices.logprobs.get(row)
            sampled, reason = sampler.accept(token, np.array(wanted) if wanted is not None else None)
            taken.append(sampled)
            if reason is not None or len(taken) > len(draft) or token != draft[len(taken) - 1]:
                return taken, reason
            if sampler.forced() is not None:
                # A thinking budget has ended: the tokens sampled after this one are invalid.
                at_once = 1
                break
    return taken, reason


def sample_batch(
    samplers: Sequence[TokenSampler], logits: mx.array, *, num_pending: int | Sequence[int] = 0
) -> Choices:
    """The next token of each row of `logits`, shape ``(rows, vocabulary)``.

    `num_pending`: how many tokens before this one were sampled and not accepted yet; one number, or one per row.
    """
    pending = [num_pending] * len(samplers) if isinstance(num_pending, int) else num_pending
    own: dict[int, mx.array] = {}
    logprobs: dict[int, mx.array] = {}
    broken: dict[int, Exception] = {}
    sampled: dict[object, list[int]] = {}
    shaped = {row: logits[row] for row, sampler in enumerate(samplers) if not sampler.is_plain}
    for row, mine in list(shaped.items()):
        sampler = samplers[row]
        try:
            shaped[row] = sampler.shape(mine, pending[row])
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
            keys = [samplers[row].key(pending[row]) for row in rows]
            tokens = _sample(samplers[rows[0]].job.sampling, [shaped[row] for row in rows], keys)
        except Exception as error:
            broken |= dict.fromkeys(rows, error)
            continue
        own |= {row: tokens[i] for i, row in enumerate(rows)}
    return Choices(_joined(logits, own), logprobs, broken)


def _sample(sampling: Sampling, logits: Sequence[mx.array], keys: Sequence[mx.array]) -> mx.array:
    """Sample rows with equal parameters in one operation; each row has its own noise."""
    return sample(_logprobs(mx.stack(logits)), sampling, keys)


def _logprobs(logits: mx.array) -> mx.array:
    # In float32: 16 bits lose the tail.
    wide = logits.astype(mx.float32)
    return wide - mx.logsumexp(wide, axis=-1, keepdims=True)


def _joined(logits: mx.array, own: Mapping[int, mx.array]) -> mx.array:
    """The token of each row in `own`, and the likeliest token of all other rows."""
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
    """Wait for the tokens and give each to its sampler; an error concerns only its own row."""
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
