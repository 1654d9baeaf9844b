"""The kinds of a model's layer states, recognised from the caches that the model makes.

Only mlx-lm's own classes and their copies in mlx-vlm are recognised, by exact type: a subclass may behave differently.
Any other cache is opaque: it is used unchanged, one sequence at a time, and stored as snapshots.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx import nn
from mlx_lm.models.cache import CacheList, make_prompt_cache

from reprise.core.kinds import Chunk, Full, KvKind, Layout, Window
from reprise.engine.states.layers import FullLayer, HiddenLayer, KvLayer, QuantizedLayer, StateLayer
from reprise.engine.states.payloads import look_into
from reprise.engine.states.seeing import Positions, SeeingModel
from reprise.engine.states.windows import ChunkLayer, SinkWindowLayer, WindowLayer


@dataclass(frozen=True, slots=True)
class KvSpec:
    """Entries of one kind; those of full attention are quantised if `bits` is set.

    `is_of_head`: of the model's head, not of the model.
    """

    kind: KvKind
    bits: int | None = None
    group_size: int = 64
    is_of_head: bool = False


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A recurrent state of `size` arrays."""

    size: int


@dataclass(frozen=True, slots=True)
class HiddenSpec:
    """The hidden state behind the last token, for a head. `is_kept`: snapshots have it."""

    is_kept: bool


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueSpec:
    """A cache of an unknown class; `prototype` is an empty one."""

    prototype: Any


@dataclass(frozen=True, slots=True)
class PartsSpec:
    """A layer with several states."""

    parts: tuple[Spec, ...]


Spec = KvSpec | StateSpec | HiddenSpec | OpaqueSpec | PartsSpec

_SOURCES = ("mlx_lm.models.cache", "mlx_vlm.models.cache")
"""The modules whose classes are recognised, where they are imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """The layer states of a model, in the model's order."""

    specs: tuple[Spec, ...]
    positions: Positions = Positions.OWN
    both_ways: frozenset[type[KvKind]] = frozenset()
    """The kinds in which the placeholders of an image see each other both ways."""

    @property
    def whole_images(self) -> bool:
        """Whether a pass must hold an image whole."""
        return len(self.both_ways) > 0

    @property
    def leaves(self) -> tuple[Spec, ...]:
        """The single layer states, with composites flattened."""
        return tuple(_leaves(self.specs))

    @property
    def layout(self) -> Layout:
        """The distinct kinds, for the prefix cache."""
        kinds: dict[KvKind, None] = {}
        for spec in self.leaves:
            if isinstance(spec, KvSpec):
                kinds[spec.kind] = None
        has_snapshots = any(isinstance(spec, StateSpec | OpaqueSpec) for spec in self.leaves)
        return Layout(kinds=tuple(kinds), has_snapshots=has_snapshots)

    @property
    def joins(self) -> bool:
        """Whether every layer state can hold several sequences."""
        return all(
            isinstance(spec, StateSpec | HiddenSpec) or (isinstance(spec, KvSpec) and _joins(spec.kind))
            for spec in self.leaves
        )

    @property
    def can_undo(self) -> bool:
        """Whether the last tokens of a pass can be undone: entries by dropping them, states by restoring copies."""
        return not any(isinstance(spec, OpaqueSpec) for spec in self.leaves)

    @property
    def rewinds(self) -> bool:
        """Whether any number of the last tokens can be undone without saved states."""
        return not self.layout.has_snapshots

    def with_head(self, head: Blueprint) -> Blueprint:
        """These states, then those of a head's layers, then the hidden state that the head continues from.

        Models that resume without snapshots do so with a head, too: they lack that one vector then.
        """
        assert all(isinstance(spec, KvSpec) and spec.kind == Full() for spec in head.specs), head
        own = (replace(spec, is_of_head=True) for spec in head.specs if isinstance(spec, KvSpec))
        return replace(self, specs=(*self.specs, *own, HiddenSpec(is_kept=self.layout.has_snapshots)))

    def build(self) -> list[Any]:
        """Fresh layer states for the model."""
        # Copied together, since caches of unknown classes may share objects.
        prototypes = [spec.prototype for spec in self.leaves if isinstance(spec, OpaqueSpec)]
        copies = iter(look_into(prototypes).thaw())
        caches = [_build(spec, copies) for spec in self.specs]
        for state in leaf_states(caches):
            if isinstance(state, KvLayer):
                state.is_told = self.positions is not Positions.OWN
        return caches


def _joins(kind: KvKind) -> bool:
    """Whether a layer of this kind can hold several sequences."""
    return isinstance(kind, Full) or (isinstance(kind, Window) and kind.keep == 0)


def blueprint_of(model: nn.Module, *, kv_bits: int | None = None, kv_group_size: int = 64) -> Blueprint:
    """Recognise the caches that `model` makes. `kv_bits`: quantise the entries of full attention."""
    caches = make_prompt_cache(model)
    assert len(caches) > 0, "a model that makes text has layer states"
    specs = tuple(_recognise(cache, kv_bits, kv_group_size) for cache in caches)
    if not isinstance(model, SeeingModel):
        return Blueprint(specs=specs)
    return Blueprint(specs=specs, positions=model.sight.positions, both_ways=model.sight.both_ways)


def _recognise(cache: Any, bits: int | None, group_size: int) -> Spec:
    match _class_name(cache):
        case "KVCache" | "ConcatenateKVCache":
            return KvSpec(Full(), bits, group_size)
        case "QuantizedKVCache":
            return KvSpec(Full(), cache.bits, cache.group_size)
        case "RotatingKVCache":
            return KvSpec(Window(cache.max_size, cache.keep))
        case "ChunkedKVCache":
            return KvSpec(Chunk(cache.chunk_size))
        case "ArraysCache":
            return StateSpec(len(cache.cache))
        case "CacheList":
            return PartsSpec(tuple(_recognise(part, bits, group_size) for part in cache.caches))
        case _:
            return OpaqueSpec(cache)


def _class_name(cache: Any) -> str | None:
    """The name of a cache's class, if that is one of a source's own."""
    kind: type = cache.__class__
    modules = (sys.modules.get(source) for source in _SOURCES)
    return kind.__name__ if any(vars(module).get(kind.__name__) is kind for module in modules if module) else None


def _build(spec: Spec, opaque: Iterator[Any]) -> Any:
    match spec:
        case KvSpec():
            return _build_kv(spec)
        case StateSpec(size=size):
            return StateLayer(size)
        case HiddenSpec(is_kept=is_kept):
            return HiddenLayer(is_kept=is_kept)
        case PartsSpec(parts=parts):
            return CacheList(*(_build(part, opaque) for part in parts))
        case OpaqueSpec():
            return next(opaque)


def _build_kv(spec: KvSpec) -> KvLayer:
    match spec.kind:
        case Full():
            bits, group_size = spec.bits, spec.group_size
            layer = FullLayer() if bits is None else QuantizedLayer(bits=bits, group_size=group_size)
            layer.hides_first = spec.is_of_head
            return layer
        case Window() as kind:
            return WindowLayer(kind) if kind.keep == 0 else SinkWindowLayer(kind)
        case Chunk() as kind:
            return ChunkLayer(kind)


def _leaves(specs: Sequence[Spec]) -> Iterator[Spec]:
    for spec in specs:
        if isinstance(spec, PartsSpec):
            yield from _leaves(spec.parts)
        else:
            yield spec


def leaf_states(caches: Sequence[Any]) -> list[Any]:
    """The single layer states in the result of `Blueprint.build`, in the order of `Blueprint.leaves`."""
    found: list[Any] = []
    for cache in caches:
        if type(cache) is CacheList:
            found.extend(leaf_states(cache.caches))
        else:
            found.append(cache)
    return found


def with_leaves(caches: Sequence[Any], leaves: Iterator[Any]) -> list[Any]:
    """The same caches with other single layer states, given in the order of `leaf_states`."""
    return [
        CacheList(*with_leaves(cache.caches, leaves)) if type(cache) is CacheList else next(leaves) for cache in caches
    ]
