"""Copies state from the prefix cache into a sequence's buffers in small pieces, so that other streams are not stalled.

A piece is a plane (a layer's keys or values), several small ones, or some entries of a large one.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from reprise.cache.lookup import Restore, SegmentSlice
from reprise.core.kinds import Full, KvKind
from reprise.engine.states.blueprint import Blueprint, leaf_states, with_leaves
from reprise.engine.states.layers import FullLayer, HiddenLayer, KvLayer, is_saved
from reprise.engine.states.payloads import Column, Snapshot, clip, columns_of
from reprise.engine.states.sequence_batch import SequenceBatch

COPIED_AT_ONCE = 32 << 20
"""Bytes per evaluation when no stream waits; an evaluation costs as much as copying a megabyte or two."""


class LayerRestoration:
    """The restoration of one layer, which stays empty until it is complete."""

    def __init__(self, layer: KvLayer, parts: Sequence[SegmentSlice], position: int, *, first_plane: int = 0) -> None:
        """`first_plane`: the index of the layer's first plane in the parts."""
        self._layer = layer
        self._position = position
        self._first_plane = first_plane
        self._sizes = layer.load_sizes([part.span for part in parts], position)
        self._buffers: list[list[mx.array]] = [[] for _ in self._sizes]
        self._words: mx.array | None = None
        """The buffer being filled, as words, if that takes more than one piece."""
        self._num_filled = 0
        """Entries copied into it."""

    @property
    def is_over(self) -> bool:
        return len(self._buffers[-1]) == self._layer.num_planes

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers so far."""
        buffers = [buffer for planes in self._buffers for buffer in planes]
        return sum(buffer.nbytes for buffer in (*buffers, self._words) if buffer is not None)

    def least_nbytes(self, parts: Sequence[SegmentSlice]) -> int:
        """The fewest bytes that the next piece can write: a whole buffer, or one more entry of it."""
        num, room = self._sizes[self._which]
        each = self._column(parts, 0, 0).nbytes_each
        return each if self._words is not None else each * (num + room)

    def advance(self, parts: Sequence[SegmentSlice], *, at_most: int) -> tuple[mx.array, int]:
        """The next piece: an array to be evaluated, and the bytes that it writes.

        At most `at_most` bytes, or `least_nbytes` if that is more. `parts`: the current slices of the layer's kind.
        """
        num, room = self._sizes[self._which]
        least = self.least_nbytes(parts)
        if self._words is None and least > at_most:
            # Allocate it as a separate piece: touching new pages costs as much as copying the entries.
            self._words = self._column(parts, 0, 0).space(num + room)
            return self._words, least
        if self._words is None:
            return self._end_buffer(self._column(parts, 0, num).joined(room=room)), least
        stop = min(num, self._num_filled + max(1, at_most // least))
        column = self._column(parts, self._num_filled, stop)
        column.write(self._words, self._num_filled)
        nbytes = least * (stop - self._num_filled)
        self._num_filled = stop
        if stop < num:
            return self._words, nbytes
        words, self._words, self._num_filled = self._words, None, 0
        return self._end_buffer(words.view(column.dtype)), nbytes

    @property
    def _which(self) -> int:
        """The index of the next buffer of each plane."""
        return next(i for i, planes in enumerate(self._buffers) if len(planes) < self._layer.num_planes)

    def _column(self, parts: Sequence[SegmentSlice], start: int, stop: int) -> Column:
        """The entries ``[start, stop)`` of the next buffer, in its plane."""
        before = sum(num for num, _ in self._sizes[: self._which])
        plane = self._first_plane + len(self._buffers[self._which])
        (column,) = columns_of(clip(parts, before + start, before + stop), range(plane, plane + 1))
        return column

    def _end_buffer(self, buffer: mx.array) -> mx.array:
        self._buffers[self._which].append(buffer)
        if self.is_over:
            self._layer.load(self._buffers, self._sizes[-1][0], self._position)
        return buffer


class Restoration:
    """The restoration of one sequence to a position.

    The sequence is at that position from the start, and can run once this is complete. If it is aborted, full-attention
    entries that were kept are still valid.
    """

    def __init__(self, rows: SequenceBatch, position: int, *, keeps_full: bool = False) -> None:
        """`keeps_full`: the sequence was at a later position. Keep its full-attention buffers, in which entries past
        `position` will be overwritten, and rebuild all other layers.
        """
        self._rows = rows
        self._position = position
        self._keeps_full = keeps_full
        self._fresh = leaf_states(rows.blueprint.build()) if keeps_full else rows.states
        self._next = 0 if position > 0 else len(self._fresh)
        """The first layer that is not restored."""
        self._layer: LayerRestoration | None = None
        """The restoration of that layer, if begun."""
        self._num_planes: Counter[KvKind] = Counter()
        """The planes of the layers before it, by kind."""
        if keeps_full:
            for state in rows.states:
                if isinstance(state, FullLayer):
                    state.rewind(position)
                elif isinstance(state, HiddenLayer):
                    # Entries behind the position, which its own restoration does not replace before its end.
                    state.waiting.clear()
        rows.lengths = [position]

    @property
    def is_over(self) -> bool:
        """Whether every layer is restored."""
        return self._next == len(self._fresh)

    @property
    def nbytes(self) -> int:
        """Bytes of the layer being restored, which the sequence does not have yet."""
        return self._layer.nbytes if self._layer is not None else 0

    @property
    def num_full_planes(self) -> int:
        """The full-attention planes of the layers that are restored."""
        return self._num_planes[Full()]

    def advance(self, restore: Restore, *, at_most: int, num_pieces: int = sys.maxsize) -> int:
        """Copy the next pieces, at most `at_most` bytes, but at least one piece. Returns the bytes.

        The smallest piece is a plane's buffer including its spare room, or one entry of it. `restore` must be read from
        the cache again each time: entries in another sequence's buffers may have moved.
        """
        assert restore.position == self._position, (restore.position, self._position)
        pending: list[mx.array] = []
        nbytes = 0
        while not self.is_over and len(pending) < num_pieces:
            layer = self._fresh[self._next]
            parts = restore.slices[layer.kind] if isinstance(layer, KvLayer) else ()
            if isinstance(layer, KvLayer) and not (self._keeps_full and isinstance(layer, FullLayer)) and parts:
                first = self._num_planes[layer.kind]
                self._layer = self._layer or LayerRestoration(layer, parts, self._position, first_plane=first)
                if nbytes > 0 and nbytes + self._layer.least_nbytes(parts) > at_most:
                    break
                piece, written = self._layer.advance(parts, at_most=at_most - nbytes)
                pending.append(piece)
                nbytes += written
                if not self._layer.is_over:
                    continue
            self._end_layer(layer, has_entries=len(parts) > 0)
        self._attach(restore if self.is_over else None)
        mx.eval(self._rows.arrays() if self.is_over else pending)
        return nbytes

    def _end_layer(self, layer: Any, *, has_entries: bool) -> None:
        """Advance to the next layer."""
        if isinstance(layer, KvLayer):
            self._num_planes[layer.kind] += layer.num_planes
            if not has_entries:
                layer.lengths = [self._position]
        self._layer = None
        self._next += 1

    def _attach(self, restore: Restore | None) -> None:
        """Put the restored layers into the sequence; at the end, with `restore`, also those of snapshots."""
        leaves = list(self._rows.states)
        for i, fresh in enumerate(self._fresh[: self._next]):
            if isinstance(fresh, KvLayer) and not (self._keeps_full and isinstance(fresh, FullLayer)):
                leaves[i] = fresh
        if restore is not None:
            snapshot = cast(Snapshot | None, restore.snapshot)
            recurrent = iter(snapshot.states if snapshot is not None else ())
            opaque = iter(snapshot.opaque.thaw() if snapshot is not None and snapshot.opaque is not None else ())
            for i, fresh in enumerate(self._fresh):
                if is_saved(fresh):
                    # New array objects with the same bytes: a model may update its own in place.
                    fresh.cache = [copy.copy(array) for array in next(recurrent)]
                    leaves[i] = fresh
                elif isinstance(fresh, HiddenLayer):
                    leaves[i] = fresh
                elif not isinstance(fresh, KvLayer):
                    leaves[i] = next(opaque)
        self._rows.caches = with_leaves(self._rows.caches, iter(leaves))


def restored(blueprint: Blueprint, restore: Restore, *, reserve: int = 0) -> SequenceBatch:
    """A sequence restored in new buffers, at once. `reserve`: positions that these have room for."""
    rows = SequenceBatch(blueprint)
    rows.reserve(reserve)
    restoration = Restoration(rows, restore.position)
    while not restoration.is_over:
        restoration.advance(restore, at_most=COPIED_AT_ONCE)
    return rows
