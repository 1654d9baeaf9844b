"""Trial runs of a newly loaded model, for what only running it shows."""

from __future__ import annotations

import logging

import mlx.core as mx
from mlx import nn

from reprise.core.errors import LoadFailed
from reprise.core.kinds import Full
from reprise.core.settings import KV_GROUP_SIZES
from reprise.engine.blueprint import Blueprint, KvSpec, blueprint_of
from reprise.engine.sequence_batch import SequenceBatch

log = logging.getLogger("reprise.engine")

_TRIAL = (3, 2, 1, 1)
"""Tokens per pass: prefill of an empty and a non-empty state, and decode, which some models implement separately."""


def vocabulary_size(model: nn.Module, blueprint: Blueprint) -> int:
    """The width of the logits, from a forward pass: configurations and tokenizers may say otherwise."""
    logits = model(mx.array([[0]]), cache=blueprint.build())
    mx.eval(logits)
    return int(logits.shape[-1])


def check_quantised(model: nn.Module, source: str, *, bits: int, group_size: int) -> None:
    """Raise LoadFailed if the model cannot run on quantised entries, which not all mlx-lm models support."""
    blueprint = blueprint_of(model, kv_bits=bits, kv_group_size=group_size)
    if not any(isinstance(spec, KvSpec) and isinstance(spec.kind, Full) for spec in blueprint.leaves):
        log.warning("%s has no full-attention layer, so --kv-bits has no effect", source)
        return
    _check_widths(model, source, group_size)
    rows = SequenceBatch(blueprint)
    try:
        for num in _TRIAL:
            mx.eval(rows.forward(model, mx.array([[0] * num])), rows.arrays())
    except Exception as error:
        # A model's code may raise anything when it gets a tuple instead of an array.
        raise LoadFailed(
            f"{source}: its attention does not support quantized KV ({_reason(error)}). Start it without --kv-bits."
        ) from error


def _check_widths(model: nn.Module, source: str, group_size: int) -> None:
    rows = SequenceBatch(blueprint_of(model))
    mx.eval(rows.forward(model, mx.array([[0]])), rows.arrays())
    widths = {plane.shape[3] for layer in rows.layers(Full()) for plane in layer.planes}
    if all(width % group_size == 0 for width in widths):
        return
    fitting = [size for size in KV_GROUP_SIZES if all(width % size == 0 for width in widths)]
    advice = f"Start it with --kv-group-size {max(fitting)}" if fitting else "Start it without --kv-bits"
    raise LoadFailed(
        f"{source}: entries {' and '.join(map(str, sorted(widths)))} values wide cannot be quantized in groups of "
        f"{group_size}. {advice}."
    )


def _reason(error: Exception) -> str:
    """The first sentence of an error."""
    first = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".:")
    return f"{type(error).__name__}: {first}" if first != "" else type(error).__name__
