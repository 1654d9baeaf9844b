"""Tiny models with a head, whose tensors stand where the hub's models have them."""

import functools
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from reprise.engine.models.load import LoadedModel, load_model
from reprise.lab.demo.tiny.build import build_model, random_weights
from tests.models.tiny import CONFIGS
from tests.zoo.catalogue import ZOO

HEADED = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "nemotron_h")
PLACES = {"qwen3_next": "mtp.safetensors", "deepseek_v3": "mtp.safetensors"}
"""Where mlx-lm refuses a checkpoint with the head inside: converted ones, and those with other than 61 layers."""
_ONE_LAYER = {"num_hidden_layers": 1, "full_attention_interval": 1, "first_k_dense_replace": 0}
NEMOTRON = {"mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1}
_NEXTN = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
"""The names of DeepSeek and GLM for those of Qwen."""


def config_of(architecture: str) -> dict[str, Any]:
    found = CONFIGS.get(architecture) or ZOO[architecture]
    assert isinstance(found, Mapping), architecture
    return dict(found) | (NEMOTRON if architecture == "nemotron_h" else {})


def head_tensors(config: Mapping[str, Any], *, seed: int = 7) -> dict[str, mx.array]:
    """Random weights of a head for a model with this configuration, as converted for MLX, by Qwen's names."""
    text = config.get("text_config", config)
    small = {**text, **_ONE_LAYER}
    if "mtp_hybrid_override_pattern" in text:
        small |= {"num_hidden_layers": 2, "hybrid_override_pattern": list(text["mtp_hybrid_override_pattern"])}
    one = {**config, "text_config": small} if "text_config" in config else small
    layers = {
        "layers." + name.partition("layers.")[2]: array
        for name, array in random_weights(one, seed=seed).items()
        if "layers." in name
    }
    width = text["hidden_size"]
    keys = mx.random.split(mx.random.key(seed + 1), 4)
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return {
        "fc.weight": mx.random.normal((width, 2 * width), scale=(2 * width) ** -0.5, key=keys[0]),
        **{f"{n}.weight": 1 + 0.1 * mx.random.normal((width,), key=k) for n, k in zip(norms, keys[1:], strict=True)},
        **layers,
    }


def checkpoint_names(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """These tensors by the names that they have in a checkpoint of the whole model."""
    if str(config["model_type"]).startswith("qwen"):
        return {f"mtp.{name}": array for name, array in tensors.items()}
    if config["model_type"] == "nemotron_h":
        return {"mtp." + _in_blocks(name): array for name, array in tensors.items()}
    prefix = f"model.layers.{config['num_hidden_layers']}."
    found: dict[str, mx.array] = {}
    for name, array in tensors.items():
        part, _, rest = name.partition(".")
        found[prefix + (name.removeprefix("layers.0.") if part == "layers" else f"{_NEXTN[part]}.{rest}")] = array
    return found


def _in_blocks(name: str) -> str:
    """Nemotron's name: in the first and the last block stands what is beside the layers."""
    part, _, rest = name.partition(".")
    if part == "layers":
        return name
    return f"layers.1.final_layernorm.{rest}" if part == "norm" else f"layers.0.{_NEXTN[part]}.{rest}"


@functools.cache
def headed_model(architecture: str) -> Path:
    """The directory of a tiny model whose weights include a head."""
    directory = Path(_folder().name) / architecture
    build_model(directory, config_of(architecture), vocab_size=512)
    config = json.loads((directory / "config.json").read_text())
    tensors = checkpoint_names(config, head_tensors(config))
    place = PLACES.get(architecture, "model.safetensors")
    if (directory / place).exists():
        tensors |= read_weights(directory / place)
    write_weights(directory / place, tensors)
    return directory


def read_weights(file: Path) -> dict[str, mx.array]:
    return cast(dict[str, mx.array], mx.load(str(file)))


def write_weights(file: Path, tensors: dict[str, mx.array], *, form: str = "mlx") -> None:
    # The file may be where they are still to be read from.
    mx.eval(tensors)
    mx.save_safetensors(str(file), tensors, metadata={"format": form})


def without_tensors_of_head(architecture: str, directory: Path) -> Path:
    """A copy of the same model in `directory`, of which the head was dropped; returns its path."""
    copied = shutil.copytree(headed_model(architecture), directory / f"{architecture}-without")
    (copied / "mtp.safetensors").unlink(missing_ok=True)
    config = json.loads((copied / "config.json").read_text())
    own = checkpoint_names(config, head_tensors(config))
    weights = read_weights(copied / "model.safetensors")
    write_weights(copied / "model.safetensors", {name: array for name, array in weights.items() if name not in own})
    return copied


@functools.cache
def loaded_with_head(architecture: str) -> LoadedModel:
    return load_model(str(headed_model(architecture)), mtp="auto")


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="reprise-headed-")
