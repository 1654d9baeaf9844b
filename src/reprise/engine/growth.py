"""Estimates how many bytes the next pass will add to the buffers of live sequences.

Buffers grow in steps, and sequences that join a batch are copied into buffers of equal length: a token can cost
megabytes or nothing. The memory budget is kept by reserving this before the pass.
"""

from __future__ import annotations

from collections.abc import Mapping

from reprise.core.kinds import Chunk, KvKind, Window
from reprise.engine.layers import STEP, KvLayer, room, rounded
from reprise.engine.sequence_batch import SequenceBatch


def growth(parts: Mapping[int, SequenceBatch], owners: frozenset[int], num: int, fresh: Mapping[KvKind, float]) -> int:
    """Bytes by which buffers grow when the sequences of `owners` (ids) in `parts` are fed `num` tokens together.

    `fresh`: the bytes of one entry of one layer, by kind, for empty layers. An upper bound; exact if one group
    continues unchanged. O(layers).
    """
    groups = list(parts.values())
    num_rows = sum(id(owner) in owners for rows in groups for owner in rows.owners)
    if len(groups) == 1 and num_rows == groups[0].num_rows:
        total = 0
        for layer in groups[0].kv_layers():
            more = layer.capacity_for(num) - layer.capacity
            # Asked for every token, and mostly there is room: what an entry takes is then not looked up.
            total += more * num_rows * _each(layer, fresh) if more != 0 else 0
        return total
    # Sequences that do not take part keep their buffers; groups that join completely are copied and freed.
    gone = [rows for rows in groups if all(id(owner) in owners for owner in rows.owners)]
    total = 0
    for column in zip(*(rows.kv_layers() for rows in groups), strict=True):
        total += KvLayer.capacity_joined(column, num) * num_rows * max(_each(layer, fresh) for layer in column)
    kept = sum(rows.state_nbytes // rows.num_rows * sum(id(o) in owners for o in rows.owners) for rows in groups)
    return max(0, total + kept - sum(rows.nbytes for rows in gone))


def _each(layer: KvLayer, fresh: Mapping[KvKind, float]) -> int:
    """The bytes of one entry of one row."""
    if layer.planes:
        return sum(plane.shape[1] * plane.shape[3] * plane.dtype.size for plane in layer.planes)
    return int(fresh[layer.kind])


def most_entries(kind: KvKind, position: int, chunk: int) -> int:
    """Capacity of a layer's buffers for one sequence that has reached `position` in chunks of `chunk`.

    An upper bound of what `reprise.engine.layers` allocates, if the last 256 positions are the answer's.
    """
    most = min(position, chunk)
    if isinstance(kind, Window | Chunk):
        return rounded(min(position, kind.size) + most + max(64, min(kind.size, STEP)))
    # The first chunk gets spare room in proportion, of which `position` includes a part.
    return rounded(position + max(0, room(most) - STEP))
