"""Sampling filters: top-p, min-p, XTC and top-k over rows of log-probabilities.

Same semantics as mlx-lm's samplers. Those compile and keep a kernel for each parameter value (half a second on a CPU,
on the engine thread), so a client that varies `top_p` would stall all others; here parameters are operands. Any value
in range keeps at least the likeliest token of a row, and none produces NaN.
"""

from __future__ import annotations

import math

import mlx.core as mx

_NEG_INF = -float("inf")

# Close to the smallest normal float32: a GPU may flush smaller numbers to zero.
_LEAST = 1e-30


def top_p(logprobs: mx.array, p: float) -> mx.array:
    """Keep the likeliest tokens that together hold `p` of the row; shape ``(…, vocabulary)``, 0 < p <= 1."""
    ordered = mx.sort(logprobs, axis=-1)
    probs = mx.exp(ordered)
    above = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    wanted = mx.maximum(p * (above[..., :1] + probs[..., :1]), _LEAST)
    # Nothing is above the likeliest, so it is always kept.
    least = mx.min(mx.where(above < wanted, ordered, mx.inf), axis=-1, keepdims=True)
    return mx.where(logprobs < least, _NEG_INF, logprobs)


def min_p(logprobs: mx.array, share: float, *, num_kept: int) -> mx.array:
    """Keep tokens at least `share` as likely as the likeliest one, 0 < share <= 1, and `num_kept` in any case."""
    least = mx.max(logprobs, axis=-1, keepdims=True) + math.log(share)
    num = min(num_kept, logprobs.shape[-1])
    if num > 1:
        least = mx.minimum(least, mx.sort(logprobs, axis=-1)[..., -num : logprobs.shape[-1] - num + 1])
    return mx.where(logprobs < least, _NEG_INF, logprobs)


def xtc(logprobs: mx.array, threshold: float) -> mx.array:
    """Of the tokens more likely than `threshold` keep the least likely one, and all tokens below it."""
    probs = mx.softmax(logprobs, axis=-1)
    least = mx.min(mx.where(probs > threshold, probs, mx.inf), axis=-1, keepdims=True)
    return mx.where(probs > least, _NEG_INF, logprobs)


def top_k(logprobs: mx.array, k: int) -> mx.array:
    """Keep the `k` likeliest tokens, 0 < k < vocabulary."""
    kept = mx.argpartition(-logprobs, kth=k - 1, axis=-1)[..., :k]
    nothing = mx.full(logprobs.shape, _NEG_INF, dtype=logprobs.dtype)
    return mx.put_along_axis(nothing, kept, mx.take_along_axis(logprobs, kept, axis=-1), axis=-1)
