"""Whether a model's code is correct for batches and chunks: tables of measured exceptions, and a check for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from reprise.engine.models.load import LoadedModel
from reprise.engine.states.sequence_batch import SequenceBatch

ALONE: Mapping[str, str] = {
    "afm7": "its reuse layers take positions from the length of the buffer (off by 2.5 in log-probability)",
    "minimax_m3_vl": "it picks blocks by their index in the buffer (off by 2.4 in log-probability)",
    "gpt_bigcode": "its learned positions want one offset for all sequences",
    "phi3small": "its mask for sequences of different lengths raises",
}
"""Architecture → why its sequences run one at a time, measured by `make matrix`."""

TOKEN_BY_TOKEN: Mapping[str, str] = {
    "phi3small": "its mask is added to the scores as a number, so that a chunk differs from its tokens (6.5)",
}
"""Architecture → why its prompts are prefilled one token at a time: its code gives other results for chunks, so that
cold and warm runs would differ."""

_LENGTHS = (11, 4, 7)
_STEPS = 3
_SLICE = 3

_TOLERANCE = {mx.float32: 1e-3}
_TOLERANCE_OF_HALF = 0.05
"""Largest total variation distance between a token's distributions alone and in a batch. Half precision differs by
rounding; a wrong mask or position differs by far more."""


_tried: WeakKeyDictionary[LoadedModel, str | None] = WeakKeyDictionary()
"""What was found out, as long as the model is there."""


def reason_to_run_alone(loaded: LoadedModel) -> str | None:
    """Why this model's sequences must run one at a time, or None if they may share passes. Tried once a model."""
    if loaded.embedder is not None:
        return None
    known = ALONE.get(loaded.architecture)
    if known is not None:
        return known
    if loaded not in _tried:
        _tried[loaded] = _why_alone(loaded)
    return _tried[loaded]


def _why_alone(loaded: LoadedModel) -> str | None:
    if not loaded.blueprint.joins:
        return "a layer's state cannot hold several sequences"
    try:
        distance = batch_distance(loaded)
    except Exception as error:
        return f"a batch raised {type(error).__name__}: {error}"
    dtype = next((a.dtype for a in _begun(loaded, np.zeros(1, dtype=np.int32)).arrays()), mx.float32)
    # Not `>`: NaN must fail too.
    if not distance <= _TOLERANCE.get(dtype, _TOLERANCE_OF_HALF):
        return f"a batch of different lengths differs from the same sequences alone (distance {distance:.2g})"
    return None


def batch_distance(loaded: LoadedModel) -> float:
    """How far sequences of different lengths in one batch differ from the same sequences alone.

    They decode together for a few steps and then prefill a slice of equal length together. Returns the largest total
    variation distance between distributions of a token, or NaN.
    """
    random = np.random.default_rng(0)
    most = min(loaded.vocab_size, 1000)
    prompts = [random.integers(0, most, size=length + _STEPS + _SLICE) for length in _LENGTHS]
    starts = [prompt[:length] for prompt, length in zip(prompts, _LENGTHS, strict=True)]
    pairs = zip(prompts, starts, strict=True)
    alone = [_continue(loaded, _begun(loaded, start), [prompt])[0] for prompt, start in pairs]
    batch, *others = [_begun(loaded, start) for start in starts]
    batch.join(others)
    together = _continue(loaded, batch, prompts)
    # Unlike Python's `max`, MLX's propagates NaN.
    return float((0.5 * mx.abs(together - mx.stack(alone)).sum(axis=-1)).max().item())


def _begun(loaded: LoadedModel, tokens: np.ndarray) -> SequenceBatch:
    """A sequence that has read these tokens."""
    rows = SequenceBatch(loaded.blueprint)
    rows.forward(loaded.model, mx.array(tokens[None]))
    mx.eval(rows.arrays())
    return rows


def _continue(loaded: LoadedModel, rows: SequenceBatch, prompts: Sequence[np.ndarray]) -> mx.array:
    """The distributions of all further tokens, shape ``(rows, steps, vocabulary)``."""
    starts = list(rows.lengths)
    found: list[mx.array] = []
    for step, num in [*((i, 1) for i in range(_STEPS)), (_STEPS, _SLICE)]:
        tokens = [prompt[start + step : start + step + num] for prompt, start in zip(prompts, starts, strict=True)]
        logits = rows.forward(loaded.model, mx.array(np.stack(tokens)))
        found.append(mx.softmax(logits.astype(mx.float32), axis=-1))
        mx.eval(found[-1], rows.arrays())
    return mx.concatenate(found, axis=1)
