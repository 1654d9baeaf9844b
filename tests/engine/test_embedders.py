"""Embedders and rerankers: what transformers makes of them, together as alone, and folders that are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from safetensors.numpy import load_file, save_file

from reprise.core.embedding import EmbeddingInput
from reprise.core.errors import LoadFailed
from reprise.core.tokens import as_tokens
from reprise.engine.models.embedders import EmbedderModel
from reprise.engine.models.load import LoadedModel, load_model
from reprise.engine.running.outline import outline_of
from tests.models.embedders import NAMES, RERANKERS, embedder, texts
from tests.models.tiny import tiny_model

RECORDED = json.loads((Path(__file__).parent / "embedders.json").read_text())
"""What PyTorch and transformers gave (`tools/record_embedders.py`)."""
_ROUNDING = 1e-4


def _loaded(name: str) -> LoadedModel:
    return load_model(str(embedder(name)), embedder="yes-no" if name == "yes-no" else "auto")


def _inputs(loaded: LoadedModel) -> list[EmbeddingInput]:
    assert loaded.embedder is not None
    pair, encode = loaded.embedder.encode_pair, loaded.embedder.encode
    if pair is not None:
        return [pair("the boat", text) for text in texts()]
    return [EmbeddingInput(tokens=as_tokens(encode(text))) for text in texts()]


def _vectors(loaded: LoadedModel, inputs: list[EmbeddingInput], *, chunk: int = 1000) -> np.ndarray:
    assert isinstance(loaded.model, EmbedderModel)
    *_, result = loaded.model.run(inputs, chunk=chunk)
    return np.array(result)


@pytest.mark.every_model
@pytest.mark.parametrize("name", [*NAMES, *RERANKERS, "yes-no"])
def test_vectors_and_scores_are_those_of_transformers(name: str) -> None:
    loaded = _loaded(name)
    assert np.abs(_vectors(loaded, _inputs(loaded)) - np.array(RECORDED[name])).max() < _ROUNDING


@pytest.mark.parametrize(
    "name", ["bert", "nomic_bert", "modernbert", "qwen3", "gemma3_text", "bert-rerank", "modernbert-rerank"]
)
def test_together_as_alone_and_whole_as_in_chunks(name: str) -> None:
    loaded = _loaded(name)
    inputs = _inputs(loaded)
    together = _vectors(loaded, inputs)
    alone = np.concatenate([_vectors(loaded, [each], chunk=7) for each in inputs])
    assert np.abs(together - alone).max() < _ROUNDING


def test_the_end_of_a_text_that_is_too_long_is_left_out_before_what_stands_behind_each() -> None:
    side = _loaded("bert").embedder
    assert side is not None and side.max_tokens == 48
    tokens = side.encode("boat " * 100)
    # The folder's tokenizer cuts texts off by itself, and was told not to.
    assert len(tokens) == 402
    cut = side.truncated(tokens)
    assert len(cut) == 48 and list(cut) == [*tokens[:47], tokens[-1]]
    assert list(side.truncated(tokens[:20])) == tokens[:20]


def test_a_document_that_is_too_long_leaves_the_question_whole() -> None:
    for name in ("bert-rerank", "yes-no"):
        side = _loaded(name).embedder
        assert side is not None and side.encode_pair is not None and side.max_tokens is not None
        short, long = side.encode_pair("the boat", "a"), side.encode_pair("the boat", "river " * 2000)
        assert len(long.tokens) == side.max_tokens
        assert long.tokens[-1] == short.tokens[-1] and long.num_first == short.num_first


def test_quantized_weights_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    shutil.copytree(embedder("bert"), folder)
    tensors = load_file(folder / "model.safetensors")
    quantized: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        if name.endswith("query.weight"):
            weight, scales, biases = mx.quantize(mx.array(tensor), group_size=32, bits=8)
            stem = name.removesuffix("weight")
            quantized |= {name: weight, f"{stem}scales": scales, f"{stem}biases": biases}
        else:
            quantized[name] = mx.array(tensor)
    mx.save_safetensors(str(folder / "model.safetensors"), quantized)
    config = json.loads((folder / "config.json").read_text()) | {"quantization": {"group_size": 32, "bits": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_model(str(folder))
    kinds = {type(module) for _, module in loaded.model.named_modules()}
    assert nn.QuantizedLinear in kinds
    assert np.abs(_vectors(loaded, _inputs(loaded)) - np.array(RECORDED["bert"])).max() < 0.02


def test_weights_without_output_matrix_and_prefix_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(embedder("qwen3"), folder)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, str(folder / "model.safetensors"))
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_model(str(folder))
    assert not any("lm_head" in name for name, _ in tree_flatten(loaded.model.parameters()))
    assert np.abs(_vectors(loaded, _inputs(loaded)) - np.array(RECORDED["qwen3"])).max() < _ROUNDING


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "lacking"
    shutil.copytree(embedder("bert"), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, str(folder / "model.safetensors"))
    with pytest.raises(LoadFailed, match=r"1 of its tensors are missing, such as layers\.1\.down\.weight"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("module", "reason"),
    [("WeightedLayerPooling", "a module 'WeightedLayerPooling'"), ("Pooling", "its pooling .* is not cls")],
)
def test_what_cannot_be_computed_is_refused(tmp_path: Path, module: str, reason: str) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(embedder("bert"), folder)
    modules = [{"type": f"sentence_transformers.models.{module}", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(LoadFailed, match=reason):
        load_model(str(folder))


@pytest.mark.parametrize("said", [{"is_causal": False}, {"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}])
def test_a_decoder_with_code_of_its_own_is_refused(tmp_path: Path, said: dict[str, object]) -> None:
    folder = tmp_path / "own"
    shutil.copytree(embedder("qwen3"), folder)
    config = json.loads((folder / "config.json").read_text()) | said
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadFailed, match="made by code in its folder"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"attention_bias": True}, "biases in part"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}}, "rotary positions are scaled"),
        ({"hidden_activation": "tanh"}, "its activation 'tanh'"),
    ],
)
def test_a_modernbert_that_is_computed_otherwise_is_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = tmp_path / "modernbert"
    shutil.copytree(embedder("modernbert"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(LoadFailed, match=told):
        load_model(str(folder))


def test_sizes_are_read_under_the_names_of_newer_configurations(tmp_path: Path) -> None:
    folder = tmp_path / "modernbert"
    shutil.copytree(embedder("modernbert"), folder)
    config = json.loads((folder / "config.json").read_text())
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    ropes = {"full_attention": config.pop("global_rope_theta"), "sliding_attention": config.pop("local_rope_theta")}
    del config["global_attn_every_n_layers"]
    config |= {"layer_types": kinds, "rope_parameters": {kind: {"rope_theta": base} for kind, base in ropes.items()}}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_model(str(folder))
    assert np.abs(_vectors(loaded, _inputs(loaded)) - np.array(RECORDED["modernbert"])).max() < _ROUNDING


def test_a_classifier_of_several_classes_is_no_reranker(tmp_path: Path) -> None:
    folder = tmp_path / "classes"
    shutil.copytree(embedder("bert-rerank"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["classifier.weight"] = np.repeat(tensors["classifier.weight"], 3, axis=0)
    save_file(tensors, str(folder / "model.safetensors"))
    with pytest.raises(LoadFailed, match="it sorts texts into 3 classes"):
        load_model(str(folder))


def test_the_user_says_what_files_do_not() -> None:
    chat = str(tiny_model("qwen3"))
    assert load_model(chat).embedder is None
    loaded = load_model(chat, embedder="last")
    assert loaded.embedder is not None and loaded.embedder.summary == "last pooling, normalised"
    # Another pooling is another model to a cache of its vectors.
    assert loaded.fingerprint != load_model(chat, embedder="mean").fingerprint
    with pytest.raises(LoadFailed, match="is an encoder"):
        load_model(str(embedder("bert")), embedder="off")


def test_the_outline_says_what_it_makes() -> None:
    outline = outline_of(embedder("dense"), "dense")
    assert outline.embedder == "mean pooling, dense, normalised"
    assert outline.blueprint.specs == () and outline.footprint.at(100) == 0
