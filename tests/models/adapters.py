"""Adapters for tiny models, as `mlx_lm.lora` writes them, with random weights that change every answer."""

import json
from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers


def write_adapter(directory: Path, model: nn.Module, *, kind: str = "lora", seed: int = 1, scale: float = 2.0) -> Path:
    """Write an adapter for all layers of `model`, which becomes a model with adapted layers: do not go on with it."""
    config = {
        "fine_tune_type": kind,
        "num_layers": len(model.layers),
        "lora_parameters": {"rank": 4, "scale": scale, "dropout": 0.0},
    }
    linear_to_lora_layers(model, config["num_layers"], config["lora_parameters"], use_dora=kind == "dora")
    key = mx.random.key(seed)
    weights: dict[str, mx.array] = {}
    for name, value in tree_flatten(model.parameters()):
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("lora_a", "lora_b", "m"):
            key, own = mx.random.split(key)
            noise = mx.random.normal(value.shape, key=own)
            weights[name] = value * (1 + 0.2 * noise) if leaf == "m" else 0.2 * noise
    assert weights
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
