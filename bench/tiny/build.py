"""Writes a tiny model directory: configuration, random weights, tokenizer and chat template."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import (
    _get_classes,  # pyright: ignore[reportPrivateUsage] -- the one way to a model without weights
    save_config,
)
from tokenizers import Tokenizer

from bench.tiny.tokenizer import MARKUP, demo_texts, train_tokenizer

QWEN3_5: Mapping[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "rope_parameters": {"type": "default", "rope_theta": 100000.0, "partial_rotary_factor": 0.5},
    },
}
"""Three recurrent layers and one of attention, the proportions of the real ones; about 1M parameters."""


def thinking_template() -> str:
    """The chat template of the tiny models: thinks, calls tools, and drops the thoughts of earlier turns."""
    return Path(__file__).with_name("template.jinja").read_text(encoding="utf-8")


def build_model(
    directory: Path,
    config: Mapping[str, Any] = QWEN3_5,
    *,
    template: str | None = None,
    markup: Iterable[str] = MARKUP,
    eos: str = "<|im_end|>",
    vocab_size: int = 1024,
    seed: int = 0,
    mutes_markup: bool = True,
) -> None:
    """Write a model that `mlx_lm.load(directory)` reads, float32, the same bytes for the same arguments.

    `config` is that of the architecture, without the vocabulary's size and the stop token, which are put in here
    (under `text_config` where there is one). `template` None is `thinking_template()`. With `mutes_markup` a model with
    a separate output matrix never writes markup or broken UTF-8: it speaks until `max_tokens`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    markup = tuple(markup)
    tokenizer = train_tokenizer(vocab_size, demo_texts(), markup=markup)
    facts = {"vocab_size": vocab_size, "eos_token_id": tokenizer.token_to_id(eos)}
    full = {**config, "eos_token_id": facts["eos_token_id"]}
    if "text_config" in config:
        full["text_config"] = {**config["text_config"], **facts}
    else:
        full |= facts
    save_config(dict(full), config_path=directory / "config.json")
    muted = unspoken_tokens(tokenizer, markup, vocab_size) if mutes_markup else ()
    weights = random_weights(json.loads((directory / "config.json").read_text()), seed=seed, muted=muted)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_tokenizer(directory, tokenizer, template=template or thinking_template(), eos=eos)


def unspoken_tokens(tokenizer: Tokenizer, markup: Iterable[str], vocab_size: int) -> tuple[int, ...]:
    """The ids that are no clean text alone: markup, pieces of characters, control characters, ids without a token."""
    clean = set[int]()
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" not in text and text.isprintable() and text not in set(markup):
            clean.add(token)
    return tuple(token for token in range(vocab_size) if token not in clean)


def random_weights(config: dict[str, Any], *, seed: int, muted: tuple[int, ...] = ()) -> dict[str, mx.array]:
    """Weights by name. The output rows of the `muted` tokens are zero, so that they are never the likeliest."""
    model_class, arguments = _get_classes(config)
    model: nn.Module = model_class(arguments.from_dict(config))
    key = mx.random.key(seed)
    weights: dict[str, mx.array] = {}
    for name, value in sorted(tree_flatten(model.parameters())):
        key, own = mx.random.split(key)
        weights[name] = _random(name, value, own)
    if muted and "lm_head.weight" in {name.removeprefix("language_model.") for name in weights}:
        name = next(name for name in weights if name.endswith("lm_head.weight"))
        weights[name][mx.array(muted)] = 0
    mx.eval(weights)
    return weights


def _random(name: str, value: mx.array, key: mx.array) -> mx.array:
    if name.endswith("A_log"):
        # A slow decay, so that the recurrent state remembers hundreds of tokens and a wrong one would show.
        return mx.random.uniform(math.log(0.001), math.log(0.3), value.shape, key=key)
    if name.endswith("embed_tokens.weight"):
        return mx.random.normal(value.shape, key=key)
    if value.ndim < 2:
        return value + 0.1 * mx.random.normal(value.shape, key=key)
    # Twice the usual scale: attention that picks out positions instead of averaging them all.
    return mx.random.normal(value.shape, scale=2 / math.sqrt(math.prod(value.shape[1:])), key=key)


def write_tokenizer(directory: Path, tokenizer: Tokenizer, *, template: str, eos: str) -> None:
    """Write `tokenizer.json`, and `tokenizer_config.json` with the chat template."""
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    text = json.dumps(tokenizer_config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
