"""Tiny models of several architectures, built once a run: `tiny_model("llama")` is a directory that mlx-lm loads."""

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.tiny.build import QWEN3_5, build_model
from bench.tiny.tokenizer import MARKUP

_ATTENTION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}

WINDOW = 32
"""Far shorter than any chat of the tests, so that it wraps."""

# Every layer costs time in a thousand tests: each kind occurs twice in one model, where who confuses two is found, and
# once in the others.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5": {
        **QWEN3_5,
        "text_config": {
            **QWEN3_5["text_config"],
            "num_hidden_layers": 2,
            "full_attention_interval": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
        },
    },
    "llama": {"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 10000.0, **_ATTENTION},
    "qwen3": {"model_type": "qwen3", "num_hidden_layers": 2, "rope_theta": 10000.0, **_ATTENTION},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        **_ATTENTION,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_theta": 10000,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        **_ATTENTION,
    },
    # Recurrent state only.
    "mamba2": {
        "model_type": "mamba2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 32,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.0, 1e6],
        "time_step_rank": 4,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
    },
}

CHANNEL_MARKUP = ("<|endoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>")

CHANNEL_TEMPLATE = """\
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}
  {%- else -%}
    {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""
"""Channels instead of tags: thoughts stand in a channel of their own and are gone from history."""


@functools.cache
def tiny_model(architecture: str) -> Path:
    """The directory of the tiny model of this architecture. Written at the first call, removed with the process."""
    directory = Path(_folder().name) / architecture
    if architecture == "gpt_oss":
        markup = {"markup": CHANNEL_MARKUP, "eos": "<|return|>", "template": CHANNEL_TEMPLATE}
        build_model(directory, CONFIGS[architecture], **markup, vocab_size=512)
    else:
        build_model(directory, CONFIGS[architecture], markup=MARKUP, vocab_size=512)
    return directory


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="reprise-tiny-")
