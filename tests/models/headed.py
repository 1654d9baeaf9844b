"""Tiny models with a head, whose tensors stand where the hub's models have them."""

import functools
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from bench.tiny.build import build_model, random_weights
from reprise.engine.models.assistant import AssistantHead
from reprise.engine.models.load import LoadedModel, load_model
from tests.models.tiny import CONFIGS
from tests.zoo.catalogue import ZOO

HEADED = (
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "nemotron_h",
    "mimo",
    "mimo_v2_flash",
)
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
_MIMO = {
    "mimo": (
        "model.mtp_layers.0.",
        {
            "fc": "input_proj",
            "pre_fc_norm_embedding": "token_layernorm",
            "pre_fc_norm_hidden": "hidden_layernorm",
            "norm": "final_layernorm",
        },
    ),
    "mimo_v2_flash": ("model.mtp.layers.0.", {"norm": "final_layernorm"}),
}
"""What begins MiMo's names, and those that differ from DeepSeek's."""


def config_of(architecture: str) -> dict[str, Any]:
    found = CONFIGS.get(architecture) or ZOO[architecture]
    assert isinstance(found, Mapping), architecture
    if architecture in ASSISTED:
        # Ids beyond that table would be read from elsewhere.
        text = {**found.get("text_config", found), "vocab_size_per_layer_input": 512}
        # Said, since what mlx-vlm takes where nothing is said is not what mlx-lm takes.
        text["rope_parameters"] = {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 1e4, "rope_type": "default"},
        }
        return {**found, "vocab_size": 512, "text_config": text} if "text_config" in found else text
    return dict(found) | (NEMOTRON if architecture == "nemotron_h" else {})


def head_tensors(config: Mapping[str, Any], *, seed: int = 7) -> dict[str, mx.array]:
    """Random weights of a head for a model with this configuration, as converted for MLX, by Qwen's names."""
    text = config.get("text_config", config)
    small = {**text, **_ONE_LAYER}
    if "hybrid_layer_pattern" in text:
        # With one of its own kind behind it, which the head does not have.
        small |= {"num_hidden_layers": 2, "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 0]}
    if "mtp_hybrid_override_pattern" in text:
        small |= {"num_hidden_layers": 2, "hybrid_override_pattern": list(text["mtp_hybrid_override_pattern"])}
    one = {**config, "text_config": small} if "text_config" in config else small
    layers = {
        "layers." + name.partition("layers.")[2]: array
        for name, array in random_weights(one, seed=seed).items()
        if "layers." in name and ("layers.1." not in name or "hybrid_layer_pattern" not in text)
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
    prefix, own = f"model.layers.{config['num_hidden_layers']}.", dict(_NEXTN)
    if config["model_type"] in _MIMO:
        prefix, renamed = _MIMO[config["model_type"]]
        own |= renamed
    found: dict[str, mx.array] = {}
    for name, array in tensors.items():
        part, _, rest = name.partition(".")
        found[prefix + (name.removeprefix("layers.0.") if part == "layers" else f"{own[part]}.{rest}")] = array
    for name in [name for name in found if "post_attention_layernorm" in name and "mimo_v2" in config["model_type"]]:
        found[name.replace("post_attention", "pre_mlp")] = found.pop(name)
    if config["model_type"] == "mimo":
        # Its projection takes the hidden state first.
        name, width = f"{prefix}input_proj.weight", config["hidden_size"]
        found[name] = mx.concatenate([found[name][:, width:], found[name][:, :width]], axis=1)
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


ASSISTED = ("gemma4", "gemma4_text")
"""Architectures whose head is a drafter folder that reads the model's entries."""


@functools.cache
def assistant(architecture: str, kind: str) -> Path:
    """The folder of an assistant for the tiny model. `kind`: "tied", or "grouped": it looks in groups of tokens."""
    config = json.loads((plain_model(architecture) / "config.json").read_text())
    return assistant_for(config, Path(_folder().name) / f"{architecture}-assistant-{kind}", kind)


def assistant_for(config: Mapping[str, Any], directory: Path, kind: str) -> Path:
    """An assistant for a model with this configuration, written to `directory`."""
    directory.mkdir()
    text = config.get("text_config", config)
    own = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": text["hidden_size"],
        "use_ordered_embeddings": kind == "grouped",
        "num_centroids": 16,
        "centroid_intermediate_top_k": 4,
        "tie_word_embeddings": True,
        "text_config": {
            **text,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 0,
            "vocab_size": 512,
            "vocab_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
        },
    }
    (directory / "config.json").write_text(json.dumps(own))
    head = AssistantHead(own, read_from={})
    random = np.random.default_rng(11)
    weights = {name: mx.array(_drawn(name, array, random)) for name, array in tree_flatten(head.parameters())}
    inner = ("embed_tokens.", "layers.", "norm.")
    write_weights(
        directory / "model.safetensors",
        {f"model.{name}" if name.startswith(inner) else name: array for name, array in weights.items()},
    )
    return directory


def _drawn(name: str, like: mx.array, random: np.random.Generator) -> np.ndarray:
    if name.endswith("token_ordering"):
        return random.permutation(like.size).astype(np.int32)
    if like.ndim == 1:
        # Gemma's attention is not scaled: with larger queries, rounding would grow from guess to guess.
        low, high = (0.05, 0.1) if "q_norm" in name else (0.7, 1.3)
        return random.uniform(low, high, like.shape).astype(np.float32)
    return random.normal(0, like.shape[-1] ** -0.5, like.shape).astype(np.float32)


@functools.cache
def plain_model(architecture: str) -> Path:
    """The directory of a tiny model without a head."""
    directory = Path(_folder().name) / f"{architecture}-plain"
    build_model(directory, config_of(architecture), vocab_size=512)
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
