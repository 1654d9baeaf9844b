"""Forward passes over mlx-lm's own caches, and how much two of them differ."""

from typing import Any

import mlx.core as mx
from mlx import nn


def random_tokens(length: int, *, seed: int, vocab: int = 256) -> mx.array:
    """Token ids, shape ``(length,)``."""
    return mx.random.randint(0, vocab, (length,), key=mx.random.key(seed))


def log_probabilities(logits: mx.array) -> mx.array:
    """Logits ``(…, vocabulary)`` as log-probabilities, in float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def prefill(model: nn.Module, tokens: mx.array, caches: list[Any], *, chunk: int | None = None) -> mx.array:
    """Feed `tokens`, `chunk` at a time (None: at once): log-probabilities everywhere, shape `(length, vocabulary)`."""
    length = tokens.shape[0]
    step = length if chunk is None else chunk
    parts: list[mx.array] = []
    for start in range(0, length, step):
        parts.append(log_probabilities(model(tokens[None, start : start + step], cache=caches)[0]))
        mx.eval(parts[-1])
    return mx.concatenate(parts)


def largest_difference(one: mx.array, other: mx.array) -> float:
    """The largest absolute difference of two arrays of log-probabilities.

    Minus infinity (a token that a model forbids) differs from a number by infinity and from itself not at all.
    """
    gap = mx.where(one == other, mx.zeros_like(one), mx.abs(one - other))
    return float(mx.max(gap).item())
