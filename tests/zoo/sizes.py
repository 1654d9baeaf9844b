"""The sizes that the tiny configurations share."""

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
"""The content of a `config.json`."""

WINDOW = 16
"""Positions of a sliding window, and of a chunk of chunked attention: short prompts already leave it behind."""

VOCAB = 256

# The names that nearly all configurations share. Two key-value heads, so that an exchange of axes shows; entries of
# 32 values, so that they can be quantised in groups of 32.
_SHARED: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

EXPERTS: Config = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "norm_topk_prob": True,
}
"""Mixture of experts, in the names of Qwen and Mixtral."""

LATENT: Config = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""Multi-head latent attention and experts, in the names of DeepSeek."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """An architecture that cannot be run where there is no GPU, and why."""

    reason: str


def sized(model_type: str, *parts: Config, **changes: Any) -> Config:
    """The configuration of a tiny model: the shared sizes, then `parts`, then `changes`."""
    config: Config = {**_SHARED, "model_type": model_type}
    for part in parts:
        config |= part
    return config | changes


def without_type(config: Config) -> Config:
    """A configuration as it stands inside another one, under `text_config`."""
    return {key: value for key, value in config.items() if key != "model_type"}
