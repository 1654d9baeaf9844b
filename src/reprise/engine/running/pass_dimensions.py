"""What a model's dimensions say about the peak of a prefill pass, before one has run. No weights are needed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from reprise.core.kinds import Footprint, Full
from reprise.core.pass_price import PassPrice
from reprise.engine.states.blueprint import Blueprint, KvSpec

_FIXED_NBYTES = 1 << 20
_COPIES = 2
"""Results are there twice for a moment: what an operation reads, and what it writes."""
_OUTPUTS = 4
"""Of logits: in single precision, as log-probabilities, with noise, and what one of these becomes."""
_SCORES = 3
"""Of scores there is a third copy where sinks or a mask are put beside them."""

_HEADS = ("num_attention_heads", "num_query_heads", "n_head", "n_heads", "num_heads")
_UNKNOWN_HEADS = 32
_KV_HEADS = ("num_key_value_heads",)
_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_k")
_UNKNOWN_CHOSEN = 8

_LAYER = re.compile(r"(.*?\blayers|.*?\bh|.*?\bblocks)\.(\d+)\.")


def price_by_dimensions(
    model: nn.Module, blueprint: Blueprint, config: Mapping[str, Any], footprint: Footprint
) -> PassPrice:
    """The price of a pass: per token, what all matrices of the widest layer give; per token and key, a score of each
    head, as if no kernel were fused; per token whose logits are computed, these and what is sampled from.

    On a CPU, MLX copies quantised entries for each of the heads that share them, keys and values; other devices do not.
    """
    widths: dict[str, int] = defaultdict(int)
    chosen = _largest(config, _CHOSEN_EXPERTS, _UNKNOWN_CHOSEN)
    for path, module in cast(list[tuple[str, nn.Module]], cast(Any, model).named_modules()):
        place = _LAYER.match(f"{path}.")
        if place is not None and isinstance(weight := module.get("weight"), mx.array):
            widths[place[0]] += _width(type(module).__name__, weight, chosen=chosen)
    size, num_heads = _float_size(model), _largest(config, _HEADS, _UNKNOWN_HEADS)
    is_quantised = any(isinstance(spec, KvSpec) and spec.bits is not None for spec in blueprint.leaves)
    is_copied = is_quantised and mx.default_device() == mx.Device(mx.cpu)
    num_sharing = -(-num_heads // _largest(config, _KV_HEADS, num_heads))
    return PassPrice(
        layout=blueprint.layout,
        fixed=_FIXED_NBYTES,
        per_token=_COPIES * size * max(widths.values(), default=0),
        per_key=_SCORES * size * num_heads,
        per_output=footprint.logits * (1 + _OUTPUTS * 4 / size),
        per_entry=num_sharing * footprint.each[Full()] if is_copied else 0,
    )


def _width(name: str, weight: mx.array, *, chosen: int) -> int:
    """How many numbers a module makes of a token: what it gives, for the chosen ones of experts."""
    if weight.ndim == 2:
        return weight.shape[0]
    if weight.ndim == 3 and "Switch" in name:
        return min(chosen, weight.shape[0]) * weight.shape[1]
    if weight.ndim == 3 and "Conv" not in name:
        return weight.shape[0] * weight.shape[1]
    return weight.shape[0]


def _float_size(model: nn.Module) -> int:
    """Bytes of a number between two layers: as the weights that are not packed have."""
    weights = tree_flatten(model.parameters())
    sizes = [array.dtype.size for _, array in weights if mx.issubdtype(array.dtype, mx.floating)]
    # Some models keep a few parameters in single precision.
    return max(set(sizes), key=sizes.count) if sizes else 2


def _largest(config: Mapping[str, Any], names: tuple[str, ...], unknown: int) -> int:
    """The largest value of any of these names in a configuration, or in that of its text model."""
    inner = [cast(Mapping[str, Any], part) for part in config.values() if isinstance(part, Mapping)]
    found = [part.get(name) for part in (config, *inner) for name in names]
    numbers = [n for each in found for n in (cast(list[Any], each) if isinstance(each, list) else [each])]
    return max((n for n in numbers if isinstance(n, int) and n > 0), default=unknown)
