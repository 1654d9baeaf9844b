"""Tiny random models that see, as complete local folders: configuration, weights, tokenizer, processor, template.

`seeing_model("qwen3_5")` is a directory that mlx-vlm loads without a network, written at the first call of a process.
"""

import functools
import hashlib
import json
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from bench.tiny.build import unspoken_tokens, write_tokenizer
from bench.tiny.tokenizer import demo_texts, train_tokenizer
from tests.vision.families import FAMILIES, FURTHER, VOCABULARY, SeeingFamily


@functools.cache
def seeing_model(name: str) -> Path:
    """The directory of the tiny model of this family. Removed with the process."""
    directory = Path(_folder().name) / name
    write_seeing_model(directory, {**FAMILIES, **FURTHER}[name])
    return directory


def digest_of_weights(name: str) -> str:
    """What tells whether this family's model has the weights that it had."""
    hashed = hashlib.blake2b(digest_size=16)
    for weight, array in sorted(mx.load(str(seeing_model(name) / "model.safetensors")).items()):  # type: ignore[union-attr]
        hashed.update(weight.encode() + bytes(memoryview(array)))
    return hashed.hexdigest()


def write_seeing_model(directory: Path, family: SeeingFamily, *, seed: int = 0) -> None:
    """Write a folder of this family, in float32; the same weights for the same seed."""
    from mlx_vlm.utils import get_model_and_args, update_module_configs  # noqa: PLC0415 (takes seconds)

    directory.mkdir(parents=True)
    tokenizer = train_tokenizer(VOCABULARY, demo_texts(), markup=family.markup)

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
    # As mlx-vlm does it: parsing also completes the dictionary.
    raw = json.loads(config)
    raw.setdefault("text_config", raw.pop("llm_config", {}))
    parsed = update_module_configs(module.ModelConfig.from_dict(raw), module, raw, ["text", "vision", "projector"])
    random = np.random.default_rng(seed)
    weights = {path: _lively(path, array, random) for path, array in tree_flatten(module.Model(parsed).parameters())}
    weights |= {name: weights[other] for name, other in family.tied.items()}
    # Neither markup nor broken characters are said: an answer's text is the same tokens again.
    muted = mx.array(unspoken_tokens(tokenizer, family.markup, VOCABULARY))
    for name in [name for name in weights if name.endswith("lm_head.weight") and name not in family.tied]:
        weights[name][muted] = 0
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
