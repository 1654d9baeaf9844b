import importlib.util
import re
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.zoo.build import build
from tests.zoo.caches import EACH_KIND, VARIANTS, available, build_any, compositions, make_caches, one_of_each
from tests.zoo.catalogue import ZOO
from tests.zoo.forward import largest_difference, prefill, random_tokens
from tests.zoo.sizes import WINDOW, Unavailable


def shipped() -> set[str]:
    """The modules of mlx-lm that have a model, found without importing them: one ends the process when imported."""
    spec = importlib.util.find_spec("mlx_lm.models")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations)))
    has_model = re.compile(r"^class Model\b|^from \S+ import .*\bModel\b", re.MULTILINE)
    has_arguments = re.compile(r"^class ModelArgs\b", re.MULTILINE)
    texts = {path.stem: path.read_text() for path in folder.glob("*.py")}
    return {name for name, text in texts.items() if has_model.search(text) and has_arguments.search(text)}


def assert_lively(name: str) -> None:
    """The model tells tokens and positions apart, within the window and behind it."""
    model = build_any(name)
    tokens = random_tokens(3 * WINDOW, seed=1)
    at = [tokens.shape[0] - WINDOW // 2, tokens.shape[0] - WINDOW - 2]
    base = prefill(model, tokens, make_caches(model))
    assert largest_difference(base[-1], base[-2]) > 0.5, "the same answer everywhere"
    for position in at:
        edited = mx.where(mx.arange(tokens.shape[0]) == position, (tokens + 1) % 256, tokens)
        other = prefill(model, edited, make_caches(model))
        assert largest_difference(base[-1], other[-1]) > 1e-3, f"blind to the token at {position}"


def test_every_shipped_architecture_has_an_entry() -> None:
    assert set(ZOO) == shipped()


def test_reasons_are_sentences() -> None:
    reasons = [entry.reason for entry in ZOO.values() if isinstance(entry, Unavailable)]
    assert all(len(reason) > 20 for reason in reasons)


def test_unavailable_cannot_be_built() -> None:
    with pytest.raises(KeyError, match="Metal"):
        build("bitnet")


def test_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (tree_flatten(build("qwen3", seed=seed).parameters()) for seed in (0, 0, 1))
    assert all(mx.array_equal(a, b) for (_, a), (_, b) in zip(first, again, strict=True))
    assert not all(mx.array_equal(a, b) for (_, a), (_, b) in zip(first, other, strict=True))


@pytest.mark.matrix
def test_every_cache_class_occurs() -> None:
    classes = {cls for composition in compositions().values() for cls, _ in composition}
    assert classes >= {
        "KVCache",
        "RotatingKVCache",
        "RotatingKVCache(keep)",
        "ChunkedKVCache",
        "ConcatenateKVCache",
        "QuantizedKVCache",
        "ArraysCache",
        "CacheList(KVCache)",
        "CacheList(KVCache, KVCache)",
        "CacheList(ArraysCache, KVCache)",
        "CacheList(ArraysCache, RotatingKVCache)",
        "LayerCache",
    }


@pytest.mark.matrix
def test_compositions_are_many() -> None:
    assert len(one_of_each()) >= 15, one_of_each()


@pytest.mark.parametrize("name", EACH_KIND)
def test_one_of_each_kind_is_lively(name: str) -> None:
    assert_lively(name)


@pytest.mark.matrix
@pytest.mark.parametrize("name", available())
def test_all_are_lively(name: str) -> None:
    assert_lively(name)


def test_variants_are_of_available_architectures() -> None:
    assert {variant.architecture for variant in VARIANTS.values()} <= set(ZOO)
