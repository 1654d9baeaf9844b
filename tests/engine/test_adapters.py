"""Adapters: another model, with the arrays of the base, which goes on as if there were none."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config

from reprise.core.errors import LoadFailed
from reprise.core.settings import Settings
from reprise.engine.models.adapters import SharedBases, with_adapter
from reprise.engine.models.load import LoadedModel, load_model
from reprise.engine.states.blueprint import blueprint_of
from tests.holding import active_memory
from tests.models.adapters import write_adapter
from tests.models.tiny import tiny_model
from tests.zoo.build import build
from tests.zoo.catalogue import ZOO
from tests.zoo.forward import random_tokens

_TOKENS = random_tokens(24, seed=5)[None]

_NOT_BY_MLX_LM = {"afm7", "gemma3n", "prism_hadamard_qwen35"}
"""mlx-lm cannot put adapters on their layers, or not read them back."""


def logits(model: nn.Module) -> list[float]:
    return model(_TOKENS, cache=None).reshape(-1).tolist()


def arrays(loaded: LoadedModel) -> dict[str, mx.array]:
    return dict(tree_flatten(loaded.model.parameters()))


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with weights of 4 bits."""
    directory = shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("quantised") / "model")
    model, _, config = mlx_lm.load(str(directory), return_config=True)
    model, config = quantize_model(model, config, group_size=32, bits=4)
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())))
    save_config(config, directory / "config.json")
    return directory


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("llama", "lora"), ("llama", "dora"), ("qwen3_5", "dora"), ("gpt_oss", "lora"), ("gemma3_text", "dora")],
)
def test_it_answers_as_mlx_lm_does_and_the_base_as_before(tmp_path: Path, architecture: str, kind: str) -> None:
    directory = tiny_model(architecture)
    adapter = write_adapter(tmp_path / "adapter", mlx_lm.load(str(directory))[0], kind=kind)
    base = load_model(str(directory))
    before = logits(base.model)
    adapted = with_adapter(base, str(adapter))
    theirs, _ = mlx_lm.load(str(directory), adapter_path=str(adapter))
    assert logits(adapted.model) == logits(theirs) != before
    assert logits(base.model) == before


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_on_quantised_weights(tmp_path: Path, quantised: Path, kind: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", mlx_lm.load(str(quantised))[0], kind=kind)
    base = load_model(str(quantised))
    adapted = with_adapter(base, str(adapter))
    assert logits(adapted.model) == logits(mlx_lm.load(str(quantised), adapter_path=str(adapter))[0])
    assert adapted.shared_nbytes == base.nbytes


def test_adapters_share_the_weights_of_their_base(tmp_path: Path) -> None:
    """Counted in bytes that MLX holds: three models in the memory of one, and what the adapters add."""
    directory = tiny_model("llama")
    paths = [str(write_adapter(tmp_path / str(seed), mlx_lm.load(str(directory))[0], seed=seed)) for seed in (1, 2)]
    base = load_model(str(directory))
    before = active_memory()
    adapted = [with_adapter(base, path) for path in paths]
    added = sum(each.nbytes - each.shared_nbytes for each in adapted)
    assert 0 < added < base.nbytes / 2
    assert active_memory() - before <= added + 4096
    assert {id(array) for array in arrays(base).values()} <= {id(array) for array in arrays(adapted[0]).values()}
    del adapted
    assert active_memory() <= before


def test_a_base_is_loaded_once_for_all_who_hold_it(tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    paths = [str(write_adapter(tmp_path / str(seed), mlx_lm.load(str(directory))[0], seed=seed)) for seed in (1, 2)]
    settings = [Settings(model=str(directory), adapter_path=path) for path in (*paths, None)]
    alone = [SharedBases().load(each).fingerprint for each in settings]
    before = active_memory()
    bases = SharedBases()
    held = [bases.load(each) for each in settings]
    added = sum(each.nbytes - each.shared_nbytes for each in held)
    assert [each.fingerprint for each in held] == alone
    assert active_memory() - before <= added + 4096
    # The base goes, and an adapter keeps its weights for the next one.
    held = held[:1]
    held += [bases.load(settings[1])]
    assert held[0].base is held[1].base
    assert active_memory() - before <= held[0].nbytes + held[1].nbytes - held[1].shared_nbytes + 4096
    # New files are read, although the old weights are here.
    weights = dict(mx.load(str(directory / "model.safetensors")))
    mx.save_safetensors(str(directory / "model.safetensors"), {name: 2 * each for name, each in weights.items()})
    del weights
    assert bases.load(settings[1]).fingerprint not in alone
    del held
    assert active_memory() <= before + 4096


def test_a_fingerprint_for_each_and_the_same_one_again(tmp_path: Path) -> None:
    directory = tiny_model("llama")
    made = {
        name: write_adapter(tmp_path / name, mlx_lm.load(str(directory))[0], **facts)
        for name, facts in {
            "a": {},
            "other seed": {"seed": 2},
            "scaled": {"scale": 3.0},
            "dora": {"kind": "dora"},
        }.items()
    }
    base = load_model(str(directory))
    prints = {name: with_adapter(base, str(path)).fingerprint for name, path in made.items()}
    assert len({base.fingerprint, *prints.values()}) == 5
    assert with_adapter(load_model(str(directory)), str(made["a"])).fingerprint == prints["a"]
    assert with_adapter(replace(base, fingerprint="another"), str(made["a"])).fingerprint != prints["a"], (
        "of another base"
    )


def test_whole_weights_are_shared_as_far_as_they_are_the_same(tmp_path: Path) -> None:
    """`mlx_lm.lora --fine-tune-type full` writes the layers that it trained."""
    directory, adapter = tiny_model("llama"), tmp_path / "adapter"
    adapter.mkdir()
    name = "model.layers.1.mlp.down_proj.weight"
    base = load_model(str(directory))
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {name: arrays(base)[name] * 2})
    (adapter / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "full"}))
    adapted = with_adapter(base, str(adapter))
    assert adapted.nbytes - adapted.shared_nbytes == arrays(base)[name].nbytes
    assert adapted.fingerprint != base.fingerprint
    assert logits(adapted.model) != logits(base.model)


def broken(tmp_path: Path, name: str) -> Path:
    adapter = write_adapter(tmp_path / "adapter", mlx_lm.load(str(tiny_model("llama")))[0])
    config, weights = adapter / "adapter_config.json", adapter / "adapters.safetensors"
    match name:
        case "absent":
            shutil.rmtree(adapter)
        case "without weights":
            weights.unlink()
        case "cut off":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "of another model":
            return write_adapter(tmp_path / "other", mlx_lm.load(str(tiny_model("gpt_oss")))[0])
        case "not JSON":
            config.write_text("{")
        case "of PEFT":
            config.write_text('{"peft_type": "LORA"}')
        case "without a scale":
            config.write_text('{"num_layers": 2, "lora_parameters": {"rank": 4, "dropout": 0.0}}')
        case "in part":
            kept = mx.load(str(weights))
            del kept["model.layers.1.mlp.up_proj.lora_b"]
            mx.save_safetensors(str(weights), kept)
    return adapter


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent", "no such directory"),
        ("without weights", "is missing adapters.safetensors"),
        ("cut off", "does not fit llama"),
        ("of another model", "does not fit llama"),
        ("not JSON", "cannot be read"),
        ("of PEFT", "a PEFT adapter"),
        ("without a scale", "'scale'"),
        ("in part", "lacks model.layers.1.mlp.up_proj.lora_b"),
    ],
)
def test_what_cannot_be_loaded_is_said_and_changes_nothing(tmp_path: Path, name: str, words: str) -> None:
    base = load_model(str(tiny_model("llama")))
    before = logits(base.model)
    with pytest.raises(LoadFailed, match=words) as raised:
        with_adapter(base, str(broken(tmp_path, name)))
    assert "\n" not in str(raised.value)
    assert logits(base.model) == before


def assert_apart(tmp_path: Path, name: str) -> None:
    """No layer of the base is changed by an adapter on all of them, whatever the architecture."""
    model = build(name)
    base = replace(
        load_model(str(tiny_model("llama"))),
        model=model,
        blueprint=blueprint_of(model),
        architecture=name,
        vocab_size=model(_TOKENS).shape[-1],
    )
    before = logits(model)
    adapted = with_adapter(base, str(write_adapter(tmp_path / "adapter", build(name))))
    assert logits(adapted.model) != before
    assert logits(model) == before


@pytest.mark.parametrize("name", ["gear", "baichuan_m1"])
def test_a_model_of_several_kinds_of_layers(tmp_path: Path, name: str) -> None:
    assert_apart(tmp_path, name)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", [name for name, config in ZOO.items() if isinstance(config, dict) and name not in _NOT_BY_MLX_LM]
)
def test_every_architecture(tmp_path: Path, name: str) -> None:
    assert_apart(tmp_path, name)
