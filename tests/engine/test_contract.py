"""What we lean on in mlx-lm: if one of these fails after an upgrade, the layers or the blueprint have to follow."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx_lm.models import cache as theirs
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from reprise.core.kinds import Chunk, Full, Window
from reprise.engine.states.blueprint import (
    KvSpec,
    OpaqueSpec,
    PartsSpec,
    Spec,
    StateSpec,
    blueprint_of,
    leaf_states,
)
from reprise.engine.states.layers import FullLayer, KvLayer, QuantizedLayer, StateLayer
from reprise.engine.states.windows import ChunkLayer, SinkWindowLayer, WindowLayer
from tests.matrix import now_and_later
from tests.zoo.build import build
from tests.zoo.caches import build_any, make_caches
from tests.zoo.forward import largest_difference, prefill, random_tokens
from tools.matrix.gaps import ROUNDING
from tools.matrix.sequence import answers_of, random_prompt
from tools.matrix.warm import warm_against_cold

MADE: dict[type, tuple[Callable[..., Any], Spec]] = {
    KVCache: (lambda cls: cls(), KvSpec(Full())),
    ConcatenateKVCache: (lambda cls: cls(), KvSpec(Full())),
    QuantizedKVCache: (lambda cls: cls(group_size=32, bits=4), KvSpec(Full(), 4, 32)),
    RotatingKVCache: (lambda cls: cls(max_size=24, keep=3), KvSpec(Window(24, 3))),
    ChunkedKVCache: (lambda cls: cls(chunk_size=8192), KvSpec(Chunk(8192))),
    ArraysCache: (lambda cls: cls(size=2), StateSpec(2)),
}

PARAMETERS: dict[type, list[str]] = {
    KVCache: [],
    ConcatenateKVCache: [],
    QuantizedKVCache: ["group_size", "bits"],
    RotatingKVCache: ["max_size", "keep"],
    ChunkedKVCache: ["chunk_size"],
    ArraysCache: ["size", "left_padding"],
    CacheList: ["caches"],
}

ASKED_FOR = {"update_and_fetch", "offset", "keys", "values", "make_mask", "bits", "group_size", "keys_and_values"}
ASKED_FOR_OF_STATE = {"advance", "lengths"}
ASKED_FOR_OF_CHUNKS = {"start_position", "maybe_trim_front"}
OWN_CACHES = {"deepseek_v41"}
"""Models that bring a class of their own, which is used as it is."""


class FakeModel:
    """A model as far as `make_prompt_cache` is concerned."""

    def __init__(self, *caches: Any) -> None:
        self.caches = caches

    def make_cache(self) -> list[Any]:
        return list(self.caches)


def specs_of(*caches: Any) -> tuple[Spec, ...]:
    return blueprint_of(FakeModel(*caches)).specs  # type: ignore[arg-type]


def test_no_class_of_caches_has_come_or_gone() -> None:
    classes = {cls for _, cls in inspect.getmembers(theirs, inspect.isclass) if issubclass(cls, theirs._BaseCache)} - {
        theirs._BaseCache
    }
    # The batch classes are mlx-lm's own way to do what our layers do.
    assert classes == {*MADE, CacheList, theirs.BatchKVCache, theirs.BatchRotatingKVCache}


@pytest.mark.parametrize("cls", PARAMETERS)
def test_they_are_made_as_before(cls: type) -> None:
    assert list(inspect.signature(cls).parameters) == PARAMETERS[cls]


@pytest.mark.parametrize("cls", MADE)
def test_they_are_recognised(cls: type) -> None:
    make, spec = MADE[cls]
    assert specs_of(make(cls)) == (spec,)
    assert specs_of(CacheList(make(cls), KVCache())) == (PartsSpec((spec, KvSpec(Full()))),)


@pytest.mark.parametrize("cls", MADE)
def test_a_subclass_is_opaque(cls: type) -> None:
    changed = type("Changed", (cls,), {"update_and_fetch": lambda self, keys, values: (values, keys)})
    cache = MADE[cls][0](changed)
    (spec,) = specs_of(cache)
    assert isinstance(spec, OpaqueSpec)
    assert spec.prototype is cache


def test_a_list_of_parts_that_is_a_subclass_is_opaque() -> None:
    assert isinstance(specs_of(type("Changed", (CacheList,), {})(KVCache()))[0], OpaqueSpec)


def test_only_full_attention_is_quantised_when_asked() -> None:
    caches = [make(cls) for cls, (make, _) in MADE.items()]
    specs = blueprint_of(FakeModel(*caches), kv_bits=8, kv_group_size=64).specs  # type: ignore[arg-type]
    assert specs == (
        KvSpec(Full(), 8, 64),
        KvSpec(Full(), 8, 64),
        KvSpec(Full(), 4, 32),
        *(spec for cls, (_, spec) in MADE.items() if cls in (RotatingKVCache, ChunkedKVCache, ArraysCache)),
    )


def test_models_ask_layers_for_nothing_else() -> None:
    """Every attribute that any shipped model reads off something called a cache."""
    asked: set[str] = set()
    for path in Path(next(iter(mlx_lm.models.__path__))).glob("*.py"):
        if path.stem not in {"cache", *OWN_CACHES}:
            asked |= set(_attributes_of_caches(ast.parse(path.read_text(encoding="utf-8"))))
    # Of lists and mappings that are called caches too.
    asked -= {"append", "get", "setdefault"}
    assert asked == ASKED_FOR | ASKED_FOR_OF_STATE | ASKED_FOR_OF_CHUNKS


def _attributes_of_caches(tree: ast.AST) -> list[str]:
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of = node.value.value if isinstance(node.value, ast.Subscript) else node.value
            if isinstance(of, ast.Name) and (of.id.endswith("cache") or of.id == "c"):
                found.append(node.attr)
    return found


def test_our_layers_have_what_models_ask_for() -> None:
    layers: list[KvLayer] = [FullLayer(), WindowLayer(Window(4)), SinkWindowLayer(Window(4, 1)), ChunkLayer(Chunk(4))]
    for layer in layers:
        # The model that has chunks makes their masks itself.
        unasked = {"bits", "group_size"} | ({"make_mask"} if isinstance(layer, ChunkLayer) else set())
        assert set(dir(layer)) >= ASKED_FOR - unasked
        # Attention takes whatever has this attribute for quantised.
        assert not hasattr(layer, "bits")
    assert set(dir(QuantizedLayer(bits=4, group_size=32))) >= ASKED_FOR
    assert set(dir(ChunkLayer(Chunk(4)))) >= ASKED_FOR_OF_CHUNKS
    assert set(dir(StateLayer(2))) >= {*ASKED_FOR_OF_STATE, "make_mask"}


def test_masks_are_asked_of_layers_in_the_same_words() -> None:
    """A layer that counts as false, or whose mask takes other names, would be passed over in silence."""
    seen: list[dict[str, Any]] = []

    class MaskRecorder(FullLayer):
        def make_mask(self, N: int, **named: Any) -> None:
            seen.append({"N": N, **named})

    create_attention_mask(mx.zeros((1, 3, 8)), MaskRecorder(), window_size=5, return_array=True)
    assert seen == [{"N": 3, "window_size": 5, "return_array": True}]
    assert create_ssm_mask(mx.zeros((1, 3, 8)), StateLayer(2)) is None


@pytest.mark.parametrize(
    "name",
    # Of the last two MLX compiles kernels, with a compiler.
    now_and_later(
        ["qwen3", "gemma3_text", "gpt_oss", "llama4", "qwen3_5", "falcon_h1", "recurrent_gemma"],
        ["deepseek_v32", "rwkv7"],
    ),
)
def test_our_layers_answer_as_theirs(name: str) -> None:
    """Prefill in chunks, then token by token, past the window."""
    model = build_any(name)
    blueprint = blueprint_of(model)
    tokens = random_tokens(50, seed=11)
    for chunk in (None, 7, 1):
        caches = make_caches(model)
        expected = prefill(model, tokens, caches, chunk=chunk)
        found = prefill(model, tokens, blueprint.build(), chunk=chunk)
        assert largest_difference(found, expected) <= ROUNDING, chunk


def test_quantised_layers_answer_as_theirs() -> None:
    model = build_any("qwen3, quantised")
    tokens = random_tokens(50, seed=12)
    expected = prefill(model, tokens, make_caches(model), chunk=7)
    assert largest_difference(prefill(model, tokens, blueprint_of(model).build(), chunk=7), expected) <= ROUNDING


class Strange(KVCache):
    """Nothing that a blueprint knows: its values lean towards the latest of all chunks so far."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = super().update_and_fetch(keys, values)
        self.log = {"seen": [*getattr(self, "log", {"seen": []})["seen"], values[..., -1:, :]]}
        return keys, values + mx.concatenate(self.log["seen"], axis=2).mean(axis=2, keepdims=True)


@pytest.mark.matrix
def test_a_class_that_nobody_knows_answers_the_same_warm_and_cold() -> None:
    model = build("qwen3")
    num = len(make_caches(model))
    model.make_cache = lambda: [Strange() if i == 0 else KVCache() for i in range(num)]
    blueprint = blueprint_of(model)
    assert [type(spec) for spec in blueprint.specs] == [OpaqueSpec, *[KvSpec] * (num - 1)]
    assert blueprint.layout.has_snapshots
    assert not blueprint.joins
    # Its answer depends on how a prompt is cut, so cold and warm are cut alike.
    result = warm_against_cold(model, blueprint, chunks=(1,))
    assert result.missed == ()
    assert result.gap.is_rounding, result.gap
    plain, prompt = build("qwen3"), random_prompt(30, seed=4)
    strange = answers_of(model, blueprint, prompt, chunk=1)
    assert largest_difference(strange, answers_of(plain, blueprint_of(plain), prompt)) > 0.01, "it does nothing strange"


def test_fresh_layers_of_an_opaque_kind_share_nothing() -> None:
    (spec,) = specs_of(Strange())
    assert isinstance(spec, OpaqueSpec)
    blueprint = blueprint_of(FakeModel(Strange()))  # type: ignore[arg-type]
    one, other = blueprint.build()[0], blueprint.build()[0]
    one.update_and_fetch(mx.ones((1, 1, 2, 4)), mx.ones((1, 1, 2, 4)))
    assert (one.offset, other.offset) == (2, 0)
    assert spec.prototype.keys is None


def test_parts_are_taken_apart_in_order() -> None:
    blueprint = blueprint_of(FakeModel(CacheList(ArraysCache(size=1), KVCache()), KVCache()))  # type: ignore[arg-type]
    states = leaf_states(blueprint.build())
    assert [type(state) for state in states] == [StateLayer, FullLayer, FullLayer]
    assert [isinstance(state, KvLayer) for state in states] == [False, True, True]
