"""A model's layers and sizes from its configuration and weight headers, without loading or computing anything."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import (
    _get_classes,  # pyright: ignore[reportPrivateUsage] -- the only way to a model without weights
    load_config,
)

from reprise.core.errors import LoadFailed, first_line
from reprise.core.kinds import Footprint
from reprise.core.pass_price import SMALLEST_CHUNK, PassPrice, beyond
from reprise.engine.models.embedders import look_for_embedder
from reprise.engine.models.headed import blueprint_with_head
from reprise.engine.models.heads import attach_head
from reprise.engine.models.load import check_config, check_makes_text, context_of
from reprise.engine.models.model_files import check_weights, quantisation, read_config
from reprise.engine.models.vision import why_blind
from reprise.engine.running.pass_dimensions import price_by_dimensions
from reprise.engine.running.runner import NO_STATE, footprint_of
from reprise.engine.states.blueprint import Blueprint

_LONGEST = 1 << 20
_FLOATS = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutline:
    """A model on disk. `nbytes`: of its weights; `context`: the most positions, None if not specified."""

    architecture: str
    quantisation: str
    nbytes: int
    context: int | None
    blueprint: Blueprint
    footprint: Footprint
    price: PassPrice = field(default_factory=PassPrice)
    """Of a prefill pass, by the model's dimensions."""
    embedder: str = ""
    """How it makes vectors or scores; empty: it makes text."""

    def tokens_within(self, nbytes: int, *, kept_for_passes: int | None = None) -> int:
        """The longest chat, up to the context, whose layer states fit in `nbytes`; 0 if not even one token fits.

        With what its last pass takes in the smallest chunk, beyond what is kept for passes beside `nbytes`.
        """

        def taken(position: int) -> int:
            return self.footprint.at(position) + beyond(kept_for_passes, self.price.of(SMALLEST_CHUNK, position))

        most = self.context if self.context is not None else _LONGEST
        return bisect_right(range(1, most + 1), nbytes, key=taken)


def outline_of(
    directory: Path, source: str, *, kv_bits: int | None = None, mtp: str = "auto", embedder: str = "auto"
) -> ModelOutline:
    """The outline of a model directory; `source`: its name for the user. Raises LoadFailed if it cannot be loaded.

    `mtp`: where its head is, see `attach_head`. `embedder`: as in `load_model`.
    """
    read_config(directory, source)
    config = check_config(load_config(directory), source)
    weights = check_weights(directory, source)
    plan = look_for_embedder(directory, config, choice=embedder)
    if plan is not None:
        blueprint = Blueprint(specs=())
        return ModelOutline(
            architecture=str(config["model_type"]),
            quantisation=quantisation(config, weights),
            nbytes=weights.nbytes,
            context=context_of(config) if plan.max_tokens is None else plan.max_tokens,
            blueprint=blueprint,
            footprint=NO_STATE,
            embedder=plan.summary,
        )
    check_makes_text(config, source)
    floats = [dtype for dtype in weights.dtypes if dtype in _FLOATS]
    dtype = _FLOATS[max(floats, key=lambda each: weights.dtypes[each])] if floats else mx.float16
    try:
        model = _unfilled(config, sees=why_blind(config, has_tower=weights.has_tower) is None)
        # Broadcast arrays: the right shapes without memory.
        hollow = [(name, _hollow(array, dtype)) for name, array in tree_flatten(model.parameters())]
        model.update(tree_unflatten(hollow))
        model, head = attach_head(model, config, directory, mtp=mtp)
        blueprint = blueprint_with_head(model, kv_bits=kv_bits)
        footprint = footprint_of(model, blueprint)
        price = price_by_dimensions(model, blueprint, config, footprint)
    except LoadFailed:
        raise
    except Exception as error:
        # A model's code may raise anything for a configuration that it does not support.
        raise LoadFailed(f"{source}: mlx-lm cannot build this model: {first_line(error)}") from error
    return ModelOutline(
        architecture=str(config.get("model_type", "unknown")),
        quantisation=quantisation(config, weights),
        nbytes=weights.nbytes + (0 if head is None or head.place == directory.name else head.nbytes),
        context=context_of(config),
        blueprint=blueprint,
        footprint=footprint,
        price=price,
    )


def _unfilled(config: dict[str, Any], *, sees: bool) -> nn.Module:
    """The model with weights that nobody has read."""
    if sees:
        from reprise.engine.models.vlm_source import unfilled  # noqa: PLC0415 (an extra)

        return unfilled(config)
    model_class, arguments = _get_classes(config)
    return model_class(arguments.from_dict(config))


def _hollow(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Broadcast zeros of this shape; floats with this dtype."""
    is_float = mx.issubdtype(array.dtype, mx.floating)
    return mx.broadcast_to(mx.zeros((), dtype if is_float else array.dtype), array.shape)
