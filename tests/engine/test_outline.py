"""What is said of a model without loading it is what is found when it is loaded."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from reprise.core.errors import LoadFailed
from reprise.engine.models.load import load_model
from reprise.engine.running.outline import ModelOutline, outline_of
from reprise.engine.running.runner import footprint_of
from tests.models.tiny import CONFIGS, tiny_model
from tests.zoo.build import build
from tests.zoo.catalogue import ZOO


@pytest.mark.parametrize("architecture", CONFIGS)
def test_it_is_what_loading_finds(architecture: str) -> None:
    directory = tiny_model(architecture)
    outline, loaded = outline_of(directory, "it"), load_model(str(directory))
    assert outline.architecture == loaded.architecture and outline.context == loaded.context
    assert outline.blueprint.layout == loaded.blueprint.layout
    assert outline.footprint == footprint_of(loaded.model, loaded.blueprint)
    assert 0 <= outline.nbytes - loaded.nbytes < 50_000
    assert outline.quantisation == "float32"


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name, config in ZOO.items() if isinstance(config, dict)])
def test_it_is_what_every_architecture_has(tmp_path: Path, name: str) -> None:
    model = build(name)
    (tmp_path / "config.json").write_text(json.dumps(ZOO[name]))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    outline = outline_of(tmp_path, name)
    assert outline.footprint == footprint_of(model, outline.blueprint)


def test_a_model_larger_than_any_memory_costs_none(tmp_path: Path) -> None:
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    large = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "vocab_size": 128256}
    heads = {"num_attention_heads": 128, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps({**config, **large, **heads}))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros((9,), mx.bfloat16)})
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    outline = outline_of(tmp_path, "large")
    assert mx.get_peak_memory() - before < 10_000_000
    assert outline.footprint.full == 126 * 2 * 8 * 128 * 2
    assert outline.tokens_within(-1) == outline.tokens_within(0) == 0
    assert outline.tokens_within(10 * outline.footprint.full) == 10
    assert outline.tokens_within(1 << 50) == 131072
    # Of a machine that keeps nothing for passes, the last one takes a part: the scores of 16 tokens, and their rows.
    room = 10_000 * outline.footprint.full
    taken = outline.price.of(16, 10_000)
    assert outline.price.per_key == 3 * 2 * 128 and taken > 16 * 10_000 * outline.price.per_key
    assert outline.tokens_within(room, kept_for_passes=taken) == outline.tokens_within(room) == 10_000
    assert outline.tokens_within(room, kept_for_passes=0) < outline.tokens_within(room + taken, kept_for_passes=0)
    assert outline.tokens_within(room + taken, kept_for_passes=0) == 10_000


def quantised(tmp_path: Path, config: dict[str, object]) -> ModelOutline:
    whole = json.loads((tiny_model("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**whole, **config}))
    shutil.copy(tiny_model("llama") / "model.safetensors", tmp_path)
    return outline_of(tmp_path, "it")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "4-bit"),
        (
            {"quantization": {"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 64}}},
            "4-bit, in part 8-bit",
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({}, "float32"),
    ],
)
def test_how_the_weights_are_stored(tmp_path: Path, config: dict[str, object], words: str) -> None:
    assert quantised(tmp_path, config).quantisation == words


def broken(directory: Path, name: str) -> None:
    weights = directory / "model.safetensors"
    first, second = directory / "model-00001-of-00003.safetensors", directory / "model-00002-of-00003.safetensors"
    match name:
        case "cut off":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "empty":
            weights.write_bytes(b"")
        case "a pointer":
            weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        case "parts":
            weights.rename(first)
            shutil.copy(first, second)
        case "index alone":
            weights.unlink()
            index = {"weight_map": {"a": first.name, "b": second.name}}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        case "for PyTorch":
            weights.rename(directory / "pytorch_model.bin")
        case "under other names":
            weights.rename(directory / "consolidated.safetensors")
        case "nothing":
            weights.unlink()
        case "no config":
            (directory / "config.json").unlink()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cut off", "model.safetensors is cut off after 232,134 of 232,135 bytes"),
        ("empty", "model.safetensors is broken"),
        ("a pointer", "Git LFS pointer"),
        ("parts", "1 of 3 weight files are missing, such as model-00003-of-00003.safetensors"),
        ("index alone", "2 of 2 weight files are missing"),
        ("for PyTorch", "weights for PyTorch"),
        ("under other names", "weights under other names"),
        ("nothing", "holds no weights"),
        ("no config", "has no config.json"),
    ],
)
def test_a_download_that_is_not_whole(tmp_path: Path, name: str, words: str) -> None:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    broken(directory, name)
    for look in (lambda: outline_of(directory, str(directory)), lambda: load_model(str(directory))):
        with pytest.raises(LoadFailed) as raised:
            look()
        assert words in str(raised.value) and "\n" not in str(raised.value)


def test_the_index_of_what_it_was_made_of_is_passed_over(tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    index = {"weight_map": {"a": "model-00001-of-00009.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert outline_of(directory, "it").nbytes > 0
