"""Tiny random models that see, as complete local folders: configuration, weights, tokenizer, processor, template.

`seeing_model("qwen3_5")` is a directory that mlx-vlm loads without a network, written at the first call of a process.
Each one stands for a family: its kinds of layers, of positions and of masks, and how its processor writes an image.
"""

import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from reprise.lab.demo.tiny.build import write_tokenizer
from reprise.lab.demo.tiny.tokenizer import demo_texts, train_tokenizer

Ids = Callable[[str], int]
"""Gives the id of a token."""

WINDOW = 24
_HIDDEN, _VOCABULARY = 64, 512
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% elif p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template with a place for images, written as IMAGE says."""
_GEMMA = (
    "<bos>{% for m in messages %}OPEN{{ 'model' if m.role == 'assistant' else m.role }}\n{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% elif p.type == 'text' %}"
    "{{ p.text }}{% endif %}{% endfor %}{% endif %}CLOSE\n{% endfor %}"
    "{% if add_generation_prompt %}OPENmodel\n{% endif %}"
)
_SIZES = {
    "hidden_size": _HIDDEN,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 8192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_NORMALISED = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class SeeingFamily:
    """How a family's folder is written. `eos` ends a turn; `named`: token attributes that its processor looks for."""

    markup: Sequence[str]
    eos: str
    template: str
    config: Callable[[Ids], dict[str, Any]]
    files: Mapping[str, Mapping[str, Any]]
    named: Mapping[str, str] = field(default_factory=dict[str, str])
    tied: Mapping[str, str] = field(default_factory=dict[str, str])
    """Weights that are another's, by name."""


def _qwen_config(kind: str, text: Mapping[str, Any], *, deep: Sequence[int] = ()) -> Callable[[Ids], dict[str, Any]]:
    vision = {
        "model_type": kind,
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": _HIDDEN,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": list(deep),
    }

    def config(of: Ids) -> dict[str, Any]:
        return {
            "model_type": kind,
            "text_config": {**_SIZES, "tie_word_embeddings": False, "eos_token_id": of("<|im_end|>"), **text},
            "vision_config": vision,
            "image_token_id": of("<|image_pad|>"),
            "video_token_id": of("<|video_pad|>"),
            "vision_start_token_id": of("<|vision_start|>"),
            "vision_end_token_id": of("<|vision_end|>"),
            "eos_token_id": of("<|im_end|>"),
            "vocab_size": _VOCABULARY,
        }

    return config


_QWEN_MARKUP = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_QWEN_TEMPLATE = _CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
_QWEN_FILES = {
    "preprocessor_config.json": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 1024,
        "max_pixels": 1 << 20,
        **_NORMALISED,
    }
}


def _gemma3(of: Ids) -> dict[str, Any]:
    text = {
        **_SIZES,
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 32,
        "mm_tokens_per_image": 16,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "patch_size": 8,
        "image_size": 64,
    }
    return {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": vision,
        "hidden_size": _HIDDEN,
        "image_token_index": of("<image_soft_token>"),
        "pad_token_id": of("<pad>"),
        "mm_tokens_per_image": 16,
        "eos_token_id": [of("<eos>"), of("<end_of_turn>")],
        "vocab_size": _VOCABULARY,
    }


def _gemma4(of: Ids) -> dict[str, Any]:
    text = {
        **_SIZES,
        "model_type": "gemma4_text",
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": _VOCABULARY,
        "use_double_wide_mlp": False,
        "use_bidirectional_attention": "vision",
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    }
    vision = {
        "model_type": "gemma4_vision",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "patch_size": 8,
        "pooling_kernel_size": 2,
        "default_output_length": 16,
        "position_embedding_size": 64,
    }
    return {
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": vision,
        "hidden_size": _HIDDEN,
        "image_token_id": of("<|image|>"),
        "audio_token_id": of("<|audio|>"),
        "video_token_id": of("<|video|>"),
        "boi_token_id": of("<|image>"),
        "eoi_token_id": of("<image|>"),
        "vision_soft_tokens_per_image": 16,
        "eos_token_id": [of("<eos>"), of("<turn|>")],
        "vocab_size": _VOCABULARY,
    }


FAMILIES: Mapping[str, SeeingFamily] = {
    # Recurrent states and full attention, positions with three axes.
    "qwen3_5": SeeingFamily(
        markup=_QWEN_MARKUP,
        eos="<|im_end|>",
        template=_QWEN_TEMPLATE,
        config=_qwen_config(
            "qwen3_5",
            {
                "model_type": "qwen3_5_text",
                "num_hidden_layers": 2,
                "full_attention_interval": 2,
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "linear_conv_kernel_dim": 4,
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [3, 3, 2],
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_interleaved": True,
                },
            },
        ),
        files=_QWEN_FILES,
    ),
    # Full attention, three axes, and rows added behind the first layers.
    "qwen3_vl": SeeingFamily(
        markup=_QWEN_MARKUP,
        eos="<|im_end|>",
        template=_QWEN_TEMPLATE,
        config=_qwen_config(
            "qwen3_vl",
            {
                "model_type": "qwen3_vl_text",
                "num_hidden_layers": 3,
                "rope_theta": 10000.0,
                "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
            },
            deep=(0, 1),
        ),
        files=_QWEN_FILES,
    ),
    # Windows and full attention; in both an image sees all of itself.
    "gemma3": SeeingFamily(
        markup=(
            "<pad>",
            "<eos>",
            "<bos>",
            "<start_of_turn>",
            "<end_of_turn>",
            "<start_of_image>",
            "<end_of_image>",
            "<image_soft_token>",
        ),
        eos="<eos>",
        template=_GEMMA.replace("OPEN", "<start_of_turn>")
        .replace("CLOSE", "<end_of_turn>")
        .replace("IMAGE", "<start_of_image>"),
        config=_gemma3,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Gemma3ImageProcessor",
                "image_seq_length": 16,
                "size": {"height": 64, "width": 64},
                "do_pan_and_scan": None,
                **_NORMALISED,
            },
            "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 16},
        },
        named={
            "bos_token": "<bos>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        tied={"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"},
    ),
    # The same, but an image sees all of itself in windows alone; and inputs of each layer.
    "gemma4": SeeingFamily(
        markup=(
            "<pad>",
            "<eos>",
            "<bos>",
            "<|turn>",
            "<turn|>",
            "<|image>",
            "<image|>",
            "<|image|>",
            "<|audio>",
            "<audio|>",
            "<|audio|>",
            "<|video|>",
        ),
        eos="<eos>",
        template=_GEMMA.replace("OPEN", "<|turn>").replace("CLOSE", "<turn|>").replace("IMAGE", "<|image|>"),
        config=_gemma4,
        files={
            "processor_config.json": {
                "processor_class": "Gemma4Processor",
                "image_seq_length": 16,
                "image_processor": {"patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 2},
            }
        },
        named={
            "bos_token": "<bos>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "audio_token": "<|audio|>",
            "video_token": "<|video|>",
        },
    ),
}


@functools.cache
def seeing_model(name: str) -> Path:
    """The directory of the tiny model of this family. Removed with the process."""
    directory = Path(_folder().name) / name
    write_seeing_model(directory, FAMILIES[name])
    return directory


def write_seeing_model(directory: Path, family: SeeingFamily, *, seed: int = 0) -> None:
    """Write a folder of this family, in float32; the same weights for the same seed."""
    from mlx_vlm.utils import get_model_and_args, update_module_configs  # noqa: PLC0415 (takes seconds)

    directory.mkdir(parents=True)
    tokenizer = train_tokenizer(_VOCABULARY, demo_texts(), markup=family.markup)

    def id_of(token: str) -> int:
        found = tokenizer.token_to_id(token)
        assert found is not None, token
        return found

    write_tokenizer(directory, tokenizer, template=family.template, eos=family.eos)
    file = directory / "tokenizer_config.json"
    named = {"pad_token": family.markup[0], "extra_special_tokens": dict(family.named)} | (
        {"bos_token": family.named["bos_token"]} if "bos_token" in family.named else {}
    )
    file.write_text(json.dumps(json.loads(file.read_text()) | named), encoding="utf-8")
    config = json.dumps(family.config(id_of))
    (directory / "config.json").write_text(config, encoding="utf-8")
    for name, content in family.files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    module, _ = get_model_and_args(json.loads(config))
    parsed = module.ModelConfig.from_dict(json.loads(config))
    parsed = update_module_configs(parsed, module, json.loads(config), ["text", "vision", "projector"])
    random = np.random.default_rng(seed)
    weights = {path: _lively(path, array, random) for path, array in tree_flatten(module.Model(parsed).parameters())}
    weights |= {name: weights[other] for name, other in family.tied.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})


def _lively(path: str, array: mx.array, random: np.random.Generator) -> mx.array:
    """A weight, so large that images and positions change the logits by far more than rounding does."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    if path.endswith(("A_log", "dt_bias")):
        return mx.array(random.uniform(-0.5, 0.5, array.shape).astype(np.float32))
    if "norm" in path and array.ndim == 1:
        return mx.array(random.uniform(0.5, 1.5, array.shape).astype(np.float32))
    scale = 1.5 / np.sqrt(array.shape[-1]) if array.ndim > 1 else 0.3
    return mx.array(random.normal(0, scale, array.shape).astype(np.float32))


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="reprise-seeing-")
