"""Chooses the next token of one sequence: processors, grammar, sampling, thinking budget, stops.

All state belongs to one request. The random key is made of the request's seed and the token's index, so a token does
not depend on the rest of the batch. Sequences that decode together are sampled with one operation for all that share
parameters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.sample_utils import make_logits_processors

from reprise.core.errors import BadRequest, EngineFailed
from reprise.core.events import FinishReason, Sampled
from reprise.core.job import Constraint, ForcingConstraint, Job, Sampling, Thinking, ThinkingTracker
from reprise.engine.running import filters

_NEG_INF = -float("inf")

_COLDEST, _HOTTEST = 1e-9, 1e9
"""A temperature below the first is greedy: the noise is below float32's resolution. Above the second, all tokens are
equally likely."""

_PENALTIES = (1e-20, 1e20)
"""Limits of the repetition penalty within which logits stay finite in float32 and keep their order."""

_FLOATS = tuple(field.name for field in fields(Sampling) if field.type in (float, "float"))

_LEAST_LOGPROB = -9999.0
"""OpenAI's value for a practically impossible token."""


class TokenSampler:
    """Chooses the tokens of one job."""

    def __init__(self, job: Job, *, vocab_size: int) -> None:
        self.job = job
        sampling = job.sampling
        check_sampling(sampling, vocab_size)
        self.seed = sampling.seed if sampling.seed is not None else random.getrandbits(63)
        """The request's seed, or one drawn at random."""
        self._processors = _processors(sampling)
        self._context = max(
            sampling.repetition_context_size, sampling.presence_context_size, sampling.frequency_context_size
        )
        said = job.prompt.tokens[job.prompt.tokens >= 0] if self._processors else job.prompt.tokens[:0]
        self._history: list[int] = said[-self._context :].tolist()
        self._constraint: Constraint | None = job.constraint() if job.constraint is not None else None
        # Checked once: `isinstance` of a protocol takes longer than a draft look-up.
        self._forcing = self._constraint if isinstance(self._constraint, ForcingConstraint) else None
        self._mask: npt.NDArray[np.uint32] | None = None
        self._has_mask = False
        """Whether `_mask` is the grammar's for the next token: it is asked for once."""
        self._budget = _ThinkingBudget(job.thinking) if job.thinking is not None else None
        self.tokens: list[int] = []
        self.is_audited = False
        self.logprobs: list[float] = []
        """Log-probabilities of `tokens` if the answer is audited."""

    @property
    def is_plain(self) -> bool:
        """Whether it is plain greedy sampling, which needs one operation for a whole batch."""
        asks_nothing = not self._is_shaped and not self.wants_logprobs and not self._holds_back(0)
        return self.is_greedy and asks_nothing and self.forced() is None

    @property
    def is_greedy(self) -> bool:
        sampling = self.job.sampling
        return sampling.temperature < _COLDEST or (sampling.top_k == 1 and sampling.xtc_probability == 0)

    @property
    def wants_logprobs(self) -> bool:
        return self.job.sampling.logprobs is not None or self.is_audited

    @property
    def _is_shaped(self) -> bool:
        return len(self._processors) > 0 or self._constraint is not None

    def can_sample_ahead(self, num: int) -> bool:
        """Whether the `num` tokens after the next can be sampled before the next is accepted, as far as is known.

        Not if processors or a grammar must see each token, nor if the answer ends before.
        """
        if self._is_shaped or len(self.tokens) + num >= self.job.max_tokens:
            return False
        return self._budget is None or not self._budget.is_within(num)

    @property
    def sampler(self) -> object:
        """A key that is equal for all sequences with equal sampling parameters."""
        s = self.job.sampling
        return (s.temperature, s.top_p, s.top_k, s.min_p, s.min_tokens_to_keep, s.xtc_probability, s.xtc_threshold)

    def key(self, num_pending: int = 0) -> mx.array:
        """The random key of the token after `num_pending` that were sampled and not accepted yet."""
        return mx.random.key((self.seed * 1_000_003 + len(self.tokens) + num_pending) % 2**64)

    def forced(self) -> int | None:
        """The forced next token (a thinking budget is spent), or None."""
        return self._budget.forced() if self._budget is not None else None

    def grammar_draft(self) -> Sequence[int]:
        """The next tokens if the grammar allows hardly any others: a draft."""
        return self._forcing.forced() if self._forcing is not None else ()

    def only_choice(self, vocab_size: int) -> int | None:
        """The next token if the grammar allows no other and nobody wants log-probabilities; None: it is sampled.

        Raises what the grammar raises.
        """
        mask = None if self.wants_logprobs or self.forced() is not None else self._allowed()
        words = np.flatnonzero(mask) if mask is not None else ()
        if mask is None or len(words) != 1:
            return None
        at, word = int(words[0]), int(mask[words[0]])
        token = 32 * at + word.bit_length() - 1
        return token if word & (word - 1) == 0 and token < vocab_size else None

    def _allowed(self) -> npt.NDArray[np.uint32] | None:
        if not self._has_mask:
            self._mask = self._constraint.allowed() if self._constraint is not None else None
            self._has_mask = True
        return self._mask

    def _holds_back(self, num_pending: int) -> bool:
        """Whether the token after `num_pending` unaccepted ones must not end the answer (`min_tokens`)."""
        return len(self.job.stop_tokens) > 0 and len(self.tokens) + num_pending < self.job.min_tokens

    def shape(self, logits: mx.array, num_pending: int = 0) -> mx.array:
        """Apply processors and grammar to logits of shape ``(vocabulary,)``; lazy."""
        held = frozenset[int]()
        if self._holds_back(num_pending):
            held = frozenset(token for token in self.job.stop_tokens if token < logits.shape[-1])
        if self._processors:
            # Penalties reach beyond what 16 bits hold.
            logits = logits.astype(mx.float32)
            history = mx.array(self._history[-self._context :])
            for process in self._processors:
                logits = process(history, logits[None])[0]
        if self._constraint is not None:
            allowed = self._allowed()
            if allowed is not None:
                mask = _unpacked(allowed, logits.shape[-1])
                if not mask.any():
                    raise EngineFailed("The grammar of this request allows no further token.")
                others = mask.copy()
                others[list(held)] = False
                if not others.any():
                    # The text of the grammar is complete: there is nothing to go on with.
                    held = frozenset[int]()
                logits = mx.where(mx.array(mask), logits, _NEG_INF)
        if held:
            never = mx.full((len(held),), _NEG_INF, dtype=logits.dtype)
            logits = mx.put_along_axis(logits, mx.array(sorted(held)), never, axis=0)
        return logits

    def guess(self, logits: mx.array, num_pending: int) -> mx.array:
        """What it would choose from these logits of another model, shape ``(vocabulary,)``, behind `num_pending` more.

        With the same random key; processors and grammars are left out. Lazy, shape ``()``.
        """
        if self.is_greedy:
            return mx.argmax(logits, axis=-1)
        return sample(logprobs_of(logits[None]), self.job.sampling, [self.key(num_pending)])[0]

    def accept(self, token: int, logprobs: npt.NDArray[np.float32] | None) -> tuple[Sampled, FinishReason | None]:
        """Take `token` as the next one; gives the event, and why the job ends if it does."""
        job = self.job
        is_stop = token in job.stop_tokens
        self.tokens.append(token)
        if self.is_audited and logprobs is not None:
            self.logprobs.append(float(logprobs[token]))
        if self._processors:
            self._history.append(token)
        self._has_mask = False
        if self._constraint is not None and not is_stop:
            self._constraint.accept(token)
        if self._budget is not None:
            self._budget.saw(token)
        sampled = _sampled(token, logprobs, job.sampling.logprobs, is_stop=is_stop)
        if is_stop or (job.watch is not None and job.watch(token)):
            return sampled, FinishReason.STOP
        return sampled, FinishReason.LENGTH if len(self.tokens) >= job.max_tokens else None


def sample(logprobs: mx.array, sampling: Sampling, keys: Sequence[mx.array]) -> mx.array:
    """One token for each row of `logprobs`, shape ``(rows, vocabulary)``, by keys of their own; lazy, ``(rows,)``."""
    gates: list[mx.array] = []
    if sampling.xtc_probability > 0:
        # The gates are drawn here, from each request's own key, and not from the global state.
        pairs = [mx.random.split(key) for key in keys]
        keys = [pair[0] for pair in pairs]
        gates = [mx.random.uniform(key=pair[1]) for pair in pairs]
    if sampling.top_p < 1:
        logprobs = filters.top_p(logprobs, sampling.top_p)
    if sampling.min_p > 0:
        logprobs = filters.min_p(logprobs, sampling.min_p, num_kept=sampling.min_tokens_to_keep)
    if gates:
        opened = filters.xtc(logprobs, sampling.xtc_threshold)
        logprobs = mx.where(mx.stack(gates)[:, None] < sampling.xtc_probability, opened, logprobs)
    if 0 < sampling.top_k < logprobs.shape[-1]:
        logprobs = filters.top_k(logprobs, sampling.top_k)
    # From the likeliest down, so that a low temperature makes zeros and infinities of the differences, and no NaN.
    below = logprobs - mx.max(logprobs, axis=-1, keepdims=True)
    # The largest of logits with Gumbel noise is distributed as their softmax.
    noise = mx.stack([mx.random.gumbel(shape=logprobs.shape[1:], key=key) for key in keys])
    return mx.argmax(below * (1 / min(sampling.temperature, _HOTTEST)) + noise, axis=-1)


class _ThinkingBudget:
    """Forces the end of thinking when its budget is spent."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._tracker = ThinkingTracker(thinking)
        self._queue: list[int] = []

    def is_within(self, num: int) -> bool:
        """Whether one of the `num` tokens after the next will be forced, unless thinking ends before."""
        budget, tracker = self._thinking.budget, self._tracker
        return len(self._queue) > 0 or (tracker.is_open and budget is not None and tracker.num_tokens + num >= budget)

    def forced(self) -> int | None:
        # Reasoning that starts again has what is left of the budget.
        if not self._queue and self.is_within(0):
            self._queue = list(self._thinking.end)
        return self._queue[0] if self._queue else None

    def saw(self, token: int) -> None:
        if self._queue and token == self._queue[0]:
            self._queue.pop(0)
        self._tracker.saw(token)
        if not self._tracker.is_open:
            self._queue = []


def _processors(sampling: Sampling) -> list[Callable[[mx.array, mx.array], mx.array]]:
    least, most = _PENALTIES
    penalty = min(most, max(least, sampling.repetition_penalty))
    # mlx-lm treats a context size of 0 as all tokens.
    return make_logits_processors(
        logit_bias=dict(sampling.logit_bias) or None,
        repetition_penalty=None if penalty == 1 or sampling.repetition_context_size == 0 else penalty,
        repetition_context_size=sampling.repetition_context_size,
        presence_penalty=sampling.presence_penalty if sampling.presence_context_size > 0 else None,
        presence_context_size=sampling.presence_context_size,
        frequency_penalty=sampling.frequency_penalty if sampling.frequency_context_size > 0 else None,
        frequency_context_size=sampling.frequency_context_size,
    )


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raise BadRequest for numbers that are not finite and tokens out of range, with which MLX is undefined."""
    numbers = {name: getattr(sampling, name) for name in _FLOATS} | {"logit_bias": sum(sampling.logit_bias.values())}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise BadRequest(f"{name} is {value}. Send a finite number.", param=name)
    for token in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"logit_bias contains an invalid token id {token} (valid: 0 to {vocab_size - 1}).",
                param="logit_bias",
            )


def _unpacked(words: npt.NDArray[np.uint32], size: int) -> npt.NDArray[np.bool_]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
    if len(bits) < size:
        bits = np.pad(bits, (0, size - len(bits)))
    return bits.astype(np.bool_)


def _sampled(token: int, logprobs: npt.NDArray[np.float32] | None, num_top: int | None, *, is_stop: bool) -> Sampled:
    if logprobs is None or num_top is None:
        return Sampled(token=token, is_stop=is_stop)
    num = min(num_top, len(logprobs))
    likeliest = np.argpartition(-logprobs, num - 1)[:num] if num > 0 else np.empty(0, dtype=np.int64)
    top = [(int(t), float(logprobs[t])) for t in likeliest]
    return sampled_with(token, float(logprobs[token]), top, is_stop=is_stop)


def sampled_with(
    token: int, logprob: float, top: Sequence[tuple[int, float]] = (), *, is_stop: bool = False
) -> Sampled:
    """A token with finite log-probabilities; impossible tokens (forbidden by a grammar) are left out of `top`.

    Raises EngineFailed if the model returned NaN.
    """
    if math.isnan(logprob):
        raise EngineFailed("The model's output is not a number here, so there are no log-probabilities.")
    possible = [(t, max(value, _LEAST_LOGPROB)) for t, value in top if math.isfinite(value)]
    ordered = tuple(sorted(possible, key=lambda pair: -pair[1]))
    return Sampled(token=token, logprob=max(logprob, _LEAST_LOGPROB), top=ordered, is_stop=is_stop)


@dataclass(frozen=True, slots=True, eq=False)
class SampledBatch:
    """One token per row, shape ``(rows,)``, lazy. `broken`: errors of rows whose token is invalid.

    `logprobs`: of the rows that want them, shape ``(vocabulary,)``, lazy.
    """

    tokens: mx.array
    logprobs: Mapping[int, mx.array]
    broken: Mapping[int, Exception]

    def arrays(self) -> list[mx.array]:
        return [self.tokens, *self.logprobs.values()]

    def read(self, row: int) -> npt.NDArray[np.float32] | None:
        """The log-probabilities of a row, if it wants them. Raises its error if its token is invalid."""
        if row in self.broken:
            raise self.broken[row]
        wanted = self.logprobs.get(row)
        return None if wanted is None else np.array(wanted)


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
            sampled, reason = sampler.accept(token, choices.read(row))
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
) -> SampledBatch:
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
            only = sampler.only_choice(mine.shape[-1])
            if only is not None:
                # As late as any other, so that a pass takes its time.
                own[row] = mx.depends(mx.array(only, dtype=mx.uint32), [mine])
                continue
            shaped[row] = sampler.shape(mine, pending[row])
            forced = sampler.forced()
        except Exception as error:
            broken[row] = error
            continue
        if sampler.wants_logprobs:
            logprobs[row] = logprobs_of(shaped[row])
        if forced is not None:
            own[row] = mx.array(forced, dtype=mx.uint32)
        elif sampler.is_greedy:
            own[row] = mx.argmax(shaped[row], axis=-1)
        else:
            sampled.setdefault(sampler.sampler, []).append(row)
    for rows in sampled.values():
        try:
            keys = [samplers[row].key(pending[row]) for row in rows]
            # Rows with equal parameters in one operation; each has its own noise.
            tokens = sample(logprobs_of(mx.stack([shaped[row] for row in rows])), samplers[rows[0]].job.sampling, keys)
        except Exception as error:
            broken |= dict.fromkeys(rows, error)
            continue
        own |= {row: tokens[i] for i, row in enumerate(rows)}
    return SampledBatch(_joined(logits, own), logprobs, broken)


def logprobs_of(logits: mx.array) -> mx.array:
    """Log-probabilities over the last axis, lazy: in float32, since 16 bits lose the tail."""
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


def accept(
    samplers: Sequence[TokenSampler], choices: SampledBatch
) -> list[tuple[Sampled, FinishReason | None] | Exception]:
    """Wait for the tokens and give each to its sampler; an error concerns only its own row."""
    tokens: list[int] = np.array(choices.tokens).tolist()
    accepted: list[tuple[Sampled, FinishReason | None] | Exception] = []
    for row, (sampler, token) in enumerate(zip(samplers, tokens, strict=True)):
        try:
            accepted.append(sampler.accept(token, choices.read(row)))
        except Exception as error:
            accepted.append(error)
    return accepted
