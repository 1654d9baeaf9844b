"""Another KV format, template or adapter on weights that are here: the same arrays, and all else as if loaded alone."""

from pathlib import Path

import mlx_lm
import pytest
from mlx.utils import tree_flatten

from bench.tiny.build import build_model
from reprise.core.settings import Settings
from reprise.engine.models.adapters import SharedBases
from reprise.engine.models.load import LoadedModel
from tests.holding import active_memory
from tests.models.adapters import write_adapter
from tests.models.tiny import CONFIGS, MARKUP

_SMALL = 1 << 15
"""Bytes of what else MLX makes meanwhile, and of what earlier tests leave."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With entries as wide as a group of quantisation."""
    directory = tmp_path_factory.mktemp("wide") / "model"
    build_model(directory, {**CONFIGS["llama"], "head_dim": 32}, markup=MARKUP, vocab_size=512)
    return str(directory)


def arrays(loaded: LoadedModel) -> set[int]:
    return {id(array) for _, array in tree_flatten(loaded.model.parameters())}


def facts(loaded: LoadedModel) -> tuple[object, ...]:
    text = loaded.text
    return loaded.fingerprint, loaded.blueprint.specs, loaded.name, loaded.context, text.template_source, text.eos


def test_all_are_as_if_loaded_alone_in_the_memory_of_one(model: str, tmp_path: Path) -> None:
    adapter = str(write_adapter(tmp_path / "adapter", mlx_lm.load(model)[0]))
    template = "{{ messages[0].content }}"
    chosen = [
        Settings(model=model),
        Settings(model=model, kv_bits=8, kv_group_size=32),
        Settings(model=model, kv_bits=4, kv_group_size=32, chat_template=template),
        Settings(model=model, kv_bits=8, kv_group_size=32, adapter_path=adapter),
    ]
    alone = [facts(SharedBases().load(each)) for each in chosen]
    before = active_memory()
    bases = SharedBases()
    held = [bases.load(each) for each in chosen]
    added = held[3].nbytes - held[3].shared_nbytes
    assert 0 < added < held[0].nbytes
    # Far less than the weights a second time.
    assert active_memory() - before <= held[0].nbytes + added + _SMALL
    assert [facts(each) for each in held] == alone
    assert len({each.fingerprint for each in held}) == 4
    assert all(arrays(each) >= arrays(held[0]) for each in held[1:3])
    assert [each.base is held[0] for each in held] == [False, True, True, True]
    assert [each.shared_nbytes for each in held] == [0, *[held[0].nbytes] * 3]
    # Whoever goes, the others keep the weights, and find them again.
    del held[0], held[1:]
    assert bases.load(chosen[0]) is held[0].base
    del held
    assert active_memory() <= before + _SMALL
