"""Tiny models from the catalogue: seeded weights, float32, on the CPU."""

import copy

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from tests.zoo.catalogue import ZOO
from tests.zoo.sizes import Config

_GAIN = 2.0
"""Matrices are this much larger than a model's own initialisation, or attention would be nearly uniform and would not
tell one position from another."""
_NOISE = 0.2
_FORGETTING = ("dt_bias", "dt_proj.bias", "recurrent_param", "w_lora.lora.2.bias")
"""Weights that set, through a softplus or a sigmoid, how fast a recurrent state forgets."""


def build(name: str, *, seed: int = 0) -> nn.Module:
    """The tiny model of this architecture, always the same for a seed. KeyError if the catalogue says unavailable."""
    config = ZOO[name]
    if not isinstance(config, dict):
        raise KeyError(f"{name} cannot run here: {config.reason}")
    return build_config(config, seed=seed)


def build_config(config: Config, *, seed: int = 0) -> nn.Module:
    """A model of this configuration. Weights depend on the configuration and the seed alone."""
    mx.random.seed(seed)
    # Some configurations write into the mappings they are given.
    own = copy.deepcopy(config)
    model_class, arguments_class = _get_classes(own)
    model = model_class(arguments_class.from_dict(own))
    weights = [(path, _lively(path, value)) for path, value in tree_flatten(model.parameters())]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def _lively(path: str, value: mx.array) -> mx.array:
    """The weight, changed where its initial value would make layers the same, or the model insensitive to its input."""
    if value.dtype == mx.uint32:
        return mx.random.randint(0, 1 << 31, value.shape).astype(mx.uint32)  # packed quantised weights
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    value = value.astype(mx.float32)
    if path.endswith(_FORGETTING):
        # Slow forgetting, as in trained models: a recurrent state that remembers more than a few tokens.
        return mx.random.uniform(-5.0, -2.0, value.shape)
    is_constant = value.size > 1 and mx.all(value == value.reshape(-1)[0]).item()
    if is_constant and value.ndim < 2:
        return value + _NOISE * mx.random.normal(value.shape)
    if is_constant:
        return value + mx.random.normal(value.shape) * value.shape[-1] ** -0.5
    if value.ndim >= 2 and path.endswith(".weight") and "embed" not in path and "norm" not in path:
        return _GAIN * value
    return value
