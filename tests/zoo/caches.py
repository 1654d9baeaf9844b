"""Which cache classes the models of the zoo work on, under mlx-lm's own rules."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mlx import nn
from mlx_lm.models.cache import CacheList, ConcatenateKVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from tests.zoo.build import build
from tests.zoo.catalogue import ZOO
from tests.zoo.sizes import WINDOW

Composition = tuple[tuple[str, int], ...]
"""Cache classes and how often each occurs, sorted by name: `(("ArraysCache", 2), ("KVCache", 1))`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """An architecture on caches that its users choose and not itself: `layer` makes the cache of each layer."""

    architecture: str
    layer: Callable[[], Any]


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "qwen3, kept beginning": Variant(architecture="qwen3", layer=lambda: RotatingKVCache(max_size=WINDOW, keep=4)),
        "qwen3, quantised": Variant(architecture="qwen3", layer=lambda: QuantizedKVCache(group_size=32, bits=8)),
        "qwen3, concatenated": Variant(architecture="qwen3", layer=ConcatenateKVCache),
    }
)
"""Cache classes that no architecture asks for by itself."""


def available() -> tuple[str, ...]:
    """The names of everything that can be built here, architectures first, then variants."""
    return (*(name for name, config in ZOO.items() if isinstance(config, dict)), *VARIANTS)


def build_any(name: str) -> nn.Module:
    """The tiny model of an architecture or a variant. A variant's `make_cache` makes the caches that it is about."""
    variant = VARIANTS.get(name)
    if variant is None:
        return build(name)
    model = build(variant.architecture)
    num_layers = len(make_prompt_cache(model))
    model.make_cache = lambda: [variant.layer() for _ in range(num_layers)]
    return model


def make_caches(model: nn.Module) -> list[Any]:
    """Empty caches of mlx-lm for this model, as many as the model wants: not always one a layer."""
    return make_prompt_cache(model)


def cache_name(cache: Any) -> str:
    """The class of a cache; of a `CacheList` also the classes of its parts; of a window whether it has a `keep`."""
    name = type(cache).__name__
    if isinstance(cache, CacheList):
        return f"{name}({', '.join(cache_name(part) for part in cache.caches)})"
    if isinstance(cache, RotatingKVCache) and cache.keep > 0:
        return f"{name}(keep)"
    return name


def composition(name: str) -> Composition:
    """The multiset of cache classes of one model."""
    return tuple(sorted(Counter(cache_name(cache) for cache in make_caches(build_any(name))).items()))


def compositions() -> dict[str, Composition]:
    """The multiset of cache classes of every model that can be built here. Builds them all: a few seconds."""
    return {name: composition(name) for name in available()}


EACH_KIND = ("gear", "llama4", "baichuan_m1", "qwen3, kept beginning", "qwen3, quantised")
"""Full attention, windows, states, chunks, composites, windows with a kept beginning, and quantised entries."""


def one_of_each() -> tuple[str, ...]:
    """The first name of each distinct set of cache classes (whatever their number)."""
    first: dict[tuple[str, ...], str] = {}
    for name, classes in compositions().items():
        first.setdefault(tuple(cls for cls, _ in classes), name)
    return tuple(first.values())
