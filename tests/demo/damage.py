"""Ways to spoil what the cache holds, for tests that ask whether answers show it."""

from collections.abc import Callable, Iterator

import mlx.core as mx

from reprise.cache.node import subtree
from reprise.core.kinds import KvKind
from reprise.engine.states.payloads import PackedSegment
from reprise.engine.states.sequence_batch import SequenceBatch
from reprise.loop.worker import Worker

Entries = mx.array
"""Of a segment: [keys and values, heads, tokens, width]."""

Damage = Callable[[Entries, Entries], None]
"""Changes the first entries in place, perhaps with the help of the second, which are another text's."""


def lose(entries: Entries, _other: Entries) -> None:
    entries[:] = 0


def confuse(entries: Entries, other: Entries) -> None:
    """Those of another text."""
    num = min(entries.shape[2], other.shape[2])
    entries[:, :, :num] = other[:, :, :num]


def shift(entries: Entries, _other: Entries) -> None:
    """The keys by one token: with the values they would be the same entries in another order."""
    entries[:1] = mx.roll(entries[:1], 1, axis=2)


def falling_behind(num: int) -> Damage:
    """The last `num` tokens have none yet."""

    def fall_behind(entries: Entries, _other: Entries) -> None:
        entries[:, :, -num:] = 0

    return fall_behind


def replace_layer(rows: SequenceBatch, layer: int, other: SequenceBatch) -> None:
    """Give `rows` the state that `other` has in this layer."""
    rows.caches = [*rows.caches[:layer], other.caches[layer], *rows.caches[layer + 1 :]]


def damage_all(worker: Worker, damage: Damage, *, of: Callable[[KvKind], bool] = lambda kind: True) -> None:
    """Damage all entries of these kinds that the cache holds."""
    entries = list(_held_entries(worker, of))
    others = [mx.array(other) for other in entries]
    assert entries
    for mine, other in zip(entries, reversed(others), strict=True):
        damage(mine, other)


def _held_entries(worker: Worker, of: Callable[[KvKind], bool]) -> Iterator[Entries]:
    """Path by path."""
    for root in worker.cache.tree.roots.values():
        for node in subtree(root):
            for kind, segments in node.segments.items():
                if of(kind):
                    for segment in segments:
                        assert isinstance(segment.payload, PackedSegment)
                        yield from segment.payload.stacks
