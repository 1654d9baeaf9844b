"""A tiny configuration for each family of models that see: what its folder has beside weights and tokenizer.

Each stands for its kinds of layers, of positions and of masks, and for how its processor writes an image.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Ids = Callable[[str], int]
"""Gives the id of a token."""

WINDOW = 24
_HIDDEN, VOCABULARY = 64, 512
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
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_TOWER = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
_RECURRENT = {
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
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
            "vocab_size": VOCABULARY,
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
        **_TOWER,
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
        "vocab_size": VOCABULARY,
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
        "vocab_size_per_layer_input": VOCABULARY,
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
        **_TOWER,
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
        "vocab_size": VOCABULARY,
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
                **_RECURRENT,
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


# Further families, each with what no other has.


def _chat(image: str) -> str:
    return _CHATML.replace("IMAGE", image)


def _marks(*marks: str) -> tuple[str, ...]:
    return ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *marks)


def _qwen2_5(of: Ids) -> dict[str, Any]:
    # Its text configuration is at the top.
    return {
        **_SIZES,
        "model_type": "qwen2_5_vl",
        "num_hidden_layers": 2,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": _HIDDEN,
            "num_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": of("<|image_pad|>"),
        "video_token_id": of("<|video_pad|>"),
        "vision_start_token_id": of("<|vision_start|>"),
        "vision_end_token_id": of("<|vision_end|>"),
        "eos_token_id": of("<|im_end|>"),
    }


def _pixtral_vision(patch: int) -> dict[str, Any]:
    return {
        "model_type": "pixtral",
        **_TOWER,
        "head_dim": 16,
        "image_size": 128,
        "patch_size": patch,
        "num_channels": 3,
        # What published towers have and mlx-vlm takes for granted; transformers takes another for granted.
        "hidden_act": "silu",
    }


def _pixtral(kind: str, **more: Any) -> Callable[[Ids], dict[str, Any]]:
    return lambda of: {
        "model_type": kind,
        "text_config": {**_SIZES, "model_type": "mistral", "num_hidden_layers": 2, "rope_theta": 10000.0},
        "vision_config": _pixtral_vision(16),
        "image_token_index": of("[IMG]"),
        "eos_token_id": of("<|im_end|>"),
        "vocab_size": VOCABULARY,
        **more,
    }


def _glm4v(of: Ids) -> dict[str, Any]:
    return {
        "model_type": "glm4v",
        "text_config": {
            **{name: value for name, value in _SIZES.items() if name != "head_dim"},
            "model_type": "glm4v_text",
            "num_hidden_layers": 2,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            "eos_token_id": [of("<|im_end|>")],
            "pad_token_id": of("<|endoftext|>"),
        },
        "vision_config": {
            "model_type": "glm4v",
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 14,
            "image_size": 112,
            "out_hidden_size": _HIDDEN,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "image_token_id": of("<|image|>"),
        "image_token_index": of("<|image|>"),
        "video_token_id": of("<|video|>"),
        "video_token_index": of("<|video|>"),
        "vision_start_token_id": of("<|begin_of_image|>"),
        "vision_end_token_id": of("<|end_of_image|>"),
        "hidden_size": _HIDDEN,
        "eos_token_id": [of("<|im_end|>")],
        "vocab_size": VOCABULARY,
    }


def _glm4v_moe(of: Ids) -> dict[str, Any]:
    config = _glm4v(of)
    experts = {
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "use_qk_norm": False,
        "attention_bias": True,
        "rope_theta": 10000.0,
    }
    text = {**config["text_config"], **experts, "model_type": "glm4v_moe_text"}
    vision = {**config["vision_config"], "model_type": "glm4v_moe"}
    return {**config, "model_type": "glm4v_moe", "text_config": text, "vision_config": vision}


def _internvl(of: Ids) -> dict[str, Any]:
    return {
        "model_type": "internvl_chat",
        "llm_config": {**_SIZES, "model_type": "qwen2", "num_hidden_layers": 2, "rope_theta": 10000.0},
        "vision_config": {
            "model_type": "intern_vit_6b",
            **_TOWER,
            "patch_size": 14,
            "image_size": 56,
        },
        "image_token_index": of("<IMG_CONTEXT>"),
        "force_image_size": 56,
        "max_dynamic_patch": 4,
        "eos_token_id": of("<|im_end|>"),
        "vocab_size": VOCABULARY,
    }


def _kimi(of: Ids) -> dict[str, Any]:
    return {
        "model_type": "kimi_vl",
        "text_config": {
            **{name: value for name, value in _SIZES.items() if name != "head_dim"},
            "model_type": "deepseek_v3",
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "qk_nope_head_dim": 16,
        },
        "vision_config": {
            "model_type": "moonvit",
            **_TOWER,
            "depth": 2,
            "embed_dim": 32,
            "num_heads": 2,
            "patch_size": 14,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "merge_kernel_size": [2, 2],
        },
        "media_placeholder_token_id": of("<|media_pad|>"),
        "eos_token_id": of("<|im_end|>"),
        "vocab_size": VOCABULARY,
    }


def _kimi_k25(of: Ids) -> dict[str, Any]:
    return {**_kimi(of), "model_type": "kimi_k25"}


def _lfm2(of: Ids) -> dict[str, Any]:
    return {
        "model_type": "lfm2-vl",
        "text_config": {
            "model_type": "lfm2",
            "hidden_size": _HIDDEN,
            "num_hidden_layers": 4,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": VOCABULARY,
            "block_dim": _HIDDEN,
            "conv_dim": _HIDDEN,
            "conv_dim_out": _HIDDEN,
            "num_heads": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "eos_token_id": of("<|im_end|>"),
        },
        "vision_config": {
            "model_type": "siglip2_vision_model",
            **_TOWER,
            "image_size": 128,
            "patch_size": 16,
            "num_patches": 64,
        },
        "image_token_id": of("<image>"),
        "projector_hidden_size": 64,
        "tile_size": 64,
        "eos_token_id": of("<|im_end|>"),
    }


def _minicpm(of: Ids) -> dict[str, Any]:
    return {
        "model_type": "minicpmv4_6",
        "text_config": {
            **_SIZES,
            "model_type": "qwen3_5_text",
            **_RECURRENT,
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        "vision_config": {
            "model_type": "siglip",
            **_TOWER,
            "image_size": 112,
            "patch_size": 14,
        },
        "insert_layer_id": 0,
        "eos_token_id": of("<|im_end|>"),
        "vocab_size": VOCABULARY,
    }


def _llama4(of: Ids) -> dict[str, Any]:
    return {
        "model_type": "llama4",
        "text_config": {
            **_SIZES,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "attention_chunk_size": 16,
            "floor_scale": 16,
            "attention_bias": False,
            "interleave_moe_layer_step": 1,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
        },
        "vision_config": {
            "model_type": "llama4_vision_model",
            "hidden_size": 32,
            "image_size": 56,
            "initializer_range": 0.02,
            "intermediate_size": 128,
            "norm_eps": 1e-5,
            "num_attention_heads": 2,
            "num_channels": 3,
            "num_hidden_layers": 2,
            "patch_size": 14,
            "pixel_shuffle_ratio": 0.5,
            "projector_dropout": 0.0,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "rope_theta": 10000,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "vision_output_dim": 32,
        },
        "image_token_index": of("<|patch|>"),
        "eos_token_id": [of("<|im_end|>")],
    }


_TILE = {"height": 56, "width": 56}


def _experts(config: Callable[[Ids], dict[str, Any]], **more: Any) -> Callable[[Ids], dict[str, Any]]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, **more}

    def changed(of: Ids) -> dict[str, Any]:
        dense = config(of)
        kind, text = dense["model_type"] + "_moe", dense["text_config"]
        text = {**text, **experts, "model_type": text["model_type"].replace("_text", "_moe_text")}
        return {
            **dense,
            "model_type": kind,
            "text_config": text,
            "vision_config": {**dense["vision_config"], "model_type": kind},
        }

    return changed


def _gemma4_shared(of: Ids) -> dict[str, Any]:
    config = _gemma4(of)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    shared = {
        "num_hidden_layers": 6,
        "layer_types": kinds,
        "num_kv_shared_layers": 3,
        "use_bidirectional_attention": None,
    }
    return {**config, "text_config": {**config["text_config"], **shared}}


_KIMI = SeeingFamily(
    markup=_marks("<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
    eos="<|im_end|>",
    template=_chat("<|media_start|>image<|media_content|><|media_pad|><|media_end|>"),
    config=_kimi,
    files={"preprocessor_config.json": {"patch_size": 14, "merge_kernel_size": [2, 2], **_NORMALISED}},
)

_GLM4V = SeeingFamily(
    markup=_marks("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>"),
    eos="<|im_end|>",
    template=_chat("<|begin_of_image|><|image|><|end_of_image|>"),
    config=_glm4v,
    files={
        "preprocessor_config.json": {
            "image_processor_type": "Glm4vImageProcessor",
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": 784, "longest_edge": 50176},
            **_NORMALISED,
        }
    },
)

FURTHER: Mapping[str, SeeingFamily] = {
    "qwen2_5_vl": SeeingFamily(
        markup=_QWEN_MARKUP,
        eos="<|im_end|>",
        template=_QWEN_TEMPLATE,
        config=_qwen2_5,
        files={
            "preprocessor_config.json": {
                **_QWEN_FILES["preprocessor_config.json"],
                "patch_size": 14,
                "min_pixels": 784,
            }
        },
    ),
    # Rows of placeholders with a mark behind each.
    "pixtral": SeeingFamily(
        markup=_marks("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        eos="<|im_end|>",
        template=_chat("[IMG]"),
        config=_pixtral("pixtral"),
        files={
            "preprocessor_config.json": {"patch_size": 16, "size": {"longest_edge": 128}, **_NORMALISED},
            "processor_config.json": {"patch_size": 16},
        },
    ),
    "mistral3": SeeingFamily(
        markup=_marks("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        eos="<|im_end|>",
        template=_chat("[IMG]"),
        config=_pixtral("mistral3", spatial_merge_size=2, vision_feature_layer=-1),
        files={
            "preprocessor_config.json": {"patch_size": 16, "size": {"longest_edge": 128}, **_NORMALISED},
            "processor_config.json": {"patch_size": 16, "spatial_merge_size": 2},
        },
    ),
    "glm4v": _GLM4V,
    # Tiles and a thumbnail, all one run.
    "internvl_chat": SeeingFamily(
        markup=_marks("<image>", "<img>", "</img>", "<IMG_CONTEXT>"),
        eos="<|im_end|>",
        template=_chat("<image>"),
        config=_internvl,
        files={},
    ),
    # Latent attention.
    "kimi_vl": _KIMI,
    # Short convolutions; tiles with marks that say their row and column.
    "lfm2_vl": SeeingFamily(
        markup=_marks(
            "<image>",
            "<|image_start|>",
            "<|image_end|>",
            "<|img_thumbnail|>",
            *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3) for column in (1, 2, 3)),
        ),
        eos="<|im_end|>",
        template=_chat("<image>"),
        config=_lfm2,
        files={
            "preprocessor_config.json": {
                "tile_size": 64,
                "min_image_tokens": 4,
                "max_image_tokens": 8,
                "max_num_patches": 64,
                "encoder_patch_size": 16,
                **_NORMALISED,
            },
            "processor_config.json": {"use_image_special_tokens": True},
        },
        named={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
    ),
    # Positions with three axes that are told, and are indices.
    "minicpmv4_6": SeeingFamily(
        markup=_marks(
            "<image>", "</image>", "<slice>", "</slice>", "<unk>", "<image_id>", "</image_id>", "<|image_pad|>"
        ),
        eos="<|im_end|>",
        template=_chat("<|image_pad|>"),
        config=_minicpm,
        files={
            "preprocessor_config.json": {
                "max_slice_nums": 4,
                "scale_resolution": 112,
                "patch_size": 14,
                "image_feature_size": 4,
            }
        },
        named={"unk_token": "<unk>"},
    ),
    "qwen3_5_moe": replace(
        FAMILIES["qwen3_5"], config=_experts(FAMILIES["qwen3_5"].config, shared_expert_intermediate_size=32)
    ),
    "qwen3_vl_moe": replace(
        FAMILIES["qwen3_vl"],
        config=_experts(FAMILIES["qwen3_vl"].config, decoder_sparse_step=1, mlp_only_layers=[]),
    ),
    # Causal, and later layers use the entries of earlier ones.
    "gemma4_shared": replace(FAMILIES["gemma4"], config=_gemma4_shared),
    "glm4v_moe": replace(_GLM4V, config=_glm4v_moe),
    "kimi_k25": replace(_KIMI, config=_kimi_k25),
    # Attention in chunks, one row at a time; tiles with marks between them, and the whole picture behind.
    "llama4": SeeingFamily(
        markup=_marks(
            "<|image|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        eos="<|im_end|>",
        template=_chat("<|image|>"),
        config=_llama4,
        files={"preprocessor_config.json": {"size": _TILE, "max_patches": 4}},
    ),
}
