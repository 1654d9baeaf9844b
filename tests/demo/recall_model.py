"""A model whose weights are set by hand: its next token is the one that stood `PERIOD` tokens before.

Two layers of attention, one full and one with a window, each look back by a number of tokens of their own and pass on
what stands there: the window at what the full layer found. So what the model says is known for every prompt, and one
entry of either layer that is lost, another's, or of another position makes a wrong token.
"""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import reprise
from bench.tiny.build import build_model
from bench.tiny.tokenizer import MARKUP

FULL, WINDOWED = 0, 1
"""The layers."""
LOOKS_BACK = {FULL: 100, WINDOWED: 24}
WINDOW = 32
PERIOD = sum(LOOKS_BACK.values()) + 1
"""In tokens. What is said next is behind the token that both layers together look back to."""

_VOCABULARY = 512
_CODE = 64
"""Dimensions in which a token is written: what stands there, what the first layer found, and what the second did."""
_HIDDEN = 3 * _CODE + 1
_COMMON = 100.0
"""What all hidden states have in common, far larger than the rest: the norm of all is nearly the same."""
_SHARPNESS = 15.0
"""Of the softmax over positions, for each pair of rotated dimensions."""
_CERTAINTY = 0.5
"""Of the answer: the logit of a token for each dimension in which its code is found."""
_THETA = 50.0
_INNER = 8
_CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": _CODE,
    "rope_theta": _THETA,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def continued(tokens: Sequence[int], num: int) -> list[int]:
    """What the model says after these tokens, of which there are at least PERIOD."""
    said = list(tokens)
    for _ in range(num):
        said.append(said[-PERIOD])
    return said[len(tokens) :]


@functools.cache
def recall_model() -> Path:
    """Its directory. Written at the first call, removed with the process."""
    directory = Path(_folder().name) / "recall"
    build_model(directory, _CONFIG, markup=MARKUP, vocab_size=_VOCABULARY)
    weights = mx.load(str(directory / "model.safetensors"))
    assert isinstance(weights, dict)
    vocabulary = weights["model.embed_tokens.weight"].shape[0]
    ours = _weights(vocabulary)
    assert weights.keys() == ours.keys() and all(weights[name].shape == ours[name].shape for name in ours)
    mx.save_safetensors(str(directory / "model.safetensors"), ours, metadata={"format": "mlx"})
    return directory


@functools.cache
def loaded() -> reprise.LoadedModel:
    return reprise.load_model(str(recall_model()))


def _weights(vocabulary: int) -> dict[str, mx.array]:
    """By mlx-lm's names."""
    codes = np.random.default_rng(0).choice([-1.0, 1.0], size=(vocabulary, _CODE))
    embedding, head = np.zeros((2, vocabulary, _HIDDEN))
    embedding[:, :_CODE], embedding[:, -1] = codes, _COMMON
    # What a norm divides by.
    norm = np.hypot(_COMMON, np.sqrt(_CODE)) / np.sqrt(_HIDDEN)
    head[:, 2 * _CODE : 3 * _CODE] = codes * norm * _CERTAINTY
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(_HIDDEN), "lm_head.weight": head}
    for layer, num in LOOKS_BACK.items():
        weights |= {f"model.layers.{layer}.{name}": value for name, value in _layer(layer, num, norm).items()}
    return {name: mx.array(value.astype(np.float32)) for name, value in weights.items()}


def _layer(layer: int, num: int, norm: float) -> dict[str, np.ndarray]:
    """One that writes what it finds `num` tokens before behind what it reads.

    Of q and k only positions tell one from another: k points along the first dimension of each rotated pair, q is
    turned back by `num` positions, so that their product is largest where they are so far apart.
    """
    half = _CODE // 2
    angles = num * _THETA ** (-np.arange(half) / half)
    q, k, v = np.zeros((3, _CODE, _HIDDEN))
    length = np.sqrt(_SHARPNESS * np.sqrt(_CODE)) * norm / _COMMON
    q[:half, -1], q[half:, -1] = np.cos(angles) * length, -np.sin(angles) * length
    k[:half, -1] = length
    v[:, layer * _CODE : (layer + 1) * _CODE] = np.eye(_CODE) * norm
    o = np.zeros((_HIDDEN, _CODE))
    o[(layer + 1) * _CODE : (layer + 2) * _CODE] = np.eye(_CODE)
    return {
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": o,
        "mlp.gate_proj.weight": np.zeros((_INNER, _HIDDEN)),
        "mlp.up_proj.weight": np.zeros((_INNER, _HIDDEN)),
        "mlp.down_proj.weight": np.zeros((_HIDDEN, _INNER)),
        "input_layernorm.weight": np.ones(_HIDDEN),
        "post_attention_layernorm.weight": np.ones(_HIDDEN),
    }


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="reprise-recall-")
