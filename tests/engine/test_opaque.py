"""Caches of classes that nobody knows: copies of them have everything, and share nothing that changes."""

import collections
import threading
import types
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache

from reprise.engine.states.blueprint import OpaqueSpec, blueprint_of
from reprise.engine.states.payloads import freeze, look_into
from tests.matrix import now_and_later
from tests.zoo.caches import build_any
from tools.matrix.sequence import answers_of, random_prompt
from tools.matrix.warm import warm_against_cold

Pair = collections.namedtuple("Pair", ["first", "second"])


class Growing:
    """Keys and values by `grown`, which subclasses keep in their own way."""

    __slots__ = ()

    def __init__(self) -> None:
        self.offset = 0

    def grown(self, keys: mx.array, values: mx.array) -> list[Any]:
        raise NotImplementedError

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        parts = self.grown(keys, values)
        self.offset += keys.shape[2]
        return mx.concatenate([k for k, _ in parts], axis=2), mx.concatenate([v for _, v in parts], axis=2)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        return None if N == 1 else create_causal_mask(N, self.offset)


class WithoutDict(Growing):
    __slots__ = ("offset", "parts")

    def __init__(self) -> None:
        super().__init__()
        self.parts: tuple[Pair, ...] = ()

    def grown(self, keys: mx.array, values: mx.array) -> list[Any]:
        self.parts = (*self.parts, Pair(keys, values))
        return list(self.parts)


class InDeque(Growing):
    def __init__(self) -> None:
        super().__init__()
        self.parts: collections.deque[Any] = collections.deque()

    def grown(self, keys: mx.array, values: mx.array) -> list[Any]:
        self.parts.append((keys, values))
        return list(self.parts)


class IsList(list[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.offset = 0

    def grown(self, keys: mx.array, values: mx.array) -> list[Any]:
        self.append((keys, values))
        return list(self)

    update_and_fetch = Growing.update_and_fetch
    make_mask = Growing.make_mask


class CountingCache(KVCache):
    """Counts its positions in things that change in place, and has what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.count = np.zeros(1, dtype=np.int64)
        self.positions: set[int] = set()
        self.by_length: collections.defaultdict[int, int] = collections.defaultdict(int)
        self.pair = Pair(1, [2])
        self.itself = self
        self.shared = (threading.Lock(), mx.float32, mx.add, types, KVCache, lambda: 1)
        self.layer = nn.Identity()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.count += keys.shape[2]
        self.by_length[keys.shape[2]] += keys.shape[2]
        keys, values = super().update_and_fetch(self.layer(keys), values)
        self.positions |= set(range(self.offset))
        assert self.count[0] == len(self.positions) == sum(self.by_length.values()) == self.offset
        assert self.itself is self and self.pair.second == [2]
        return keys, values


class SharedClock:
    """One for all layers of a sequence."""


class Together(KVCache):
    def __init__(self, clock: SharedClock) -> None:
        super().__init__()
        self.clock = clock


@pytest.mark.parametrize("cls", now_and_later([InDeque], [WithoutDict, IsList, CountingCache]))
def test_whatever_a_cache_keeps_its_things_in(cls: type) -> None:
    model = build_any("qwen3")
    prompt = random_prompt(30, seed=4)
    plain = answers_of(model, blueprint_of(model), prompt)
    model.make_cache = lambda: [cls() for _ in range(2)]
    blueprint = blueprint_of(model)
    assert [type(spec) for spec in blueprint.specs] == [OpaqueSpec, OpaqueSpec]
    assert mx.array_equal(answers_of(model, blueprint, prompt), plain), "it is no cache"
    result = warm_against_cold(model, blueprint, chunks=(7,))
    assert result.missed == ()
    assert result.gap.is_rounding, result.gap


def test_what_two_caches_share_their_copies_share() -> None:
    model = build_any("qwen3")

    def make() -> list[Together]:
        clock = SharedClock()
        return [Together(clock), Together(clock)]

    model.make_cache = make
    blueprint = blueprint_of(model)
    one, other = blueprint.build(), blueprint.build()
    assert one[0].clock is one[1].clock is not other[0].clock
    back = freeze(one).thaw()
    assert back[0].clock is back[1].clock is not one[0].clock


class Nested:
    """State as a model of its own kind might keep it."""

    def __init__(self) -> None:
        self.ring = {"a": [mx.arange(6), None], "b": (mx.ones((2, 3)), 7)}
        self.again = self.ring["a"][0]
        self.position = 3


def test_an_object_is_frozen_with_all_its_arrays() -> None:
    state = Nested()
    frozen = freeze([state])
    assert frozen.nbytes == 6 * 4 + 6 * 4
    state.ring["a"][0] += 1
    state.position = 4
    (back,) = frozen.thaw()
    assert back.ring["a"][0].tolist() == [0, 1, 2, 3, 4, 5]
    assert (back.position, back.ring["a"][1], back.ring["b"][1]) == (3, None, 7)
    assert back.again is back.ring["a"][0]
    back.again += 1
    assert frozen.thaw()[0].again.tolist() == [0, 1, 2, 3, 4, 5]


def test_looking_into_an_object_gives_its_own_arrays() -> None:
    state = Nested()
    assert [id(array) for array in look_into([state]).arrays] == [id(state.again), id(state.ring["b"][0])]
