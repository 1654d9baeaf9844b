"""The way from the prefix cache into the buffers of a sequence, a piece at a time, so that nobody waits for all of it.

A piece is a plane (the keys of a layer, or its values), several small ones, or some entries of a large one.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from reprise.cache.lookup import Restore, SegmentSlice
from reprise.core.kinds import Full, KvKind
from reprise.engine.blueprint import leaf_states, with_leaves
from reprise.engine.columns import Column, clip, columns_of
from reprise.engine.layers import FullLayer, KvLayer, StateLayer
from reprise.engine.payloads import Snapshot

if TYPE_CHECKING:
    from reprise.engine.sequence_batch import SequenceBatch

COPIED_AT_ONCE = 32 << 20
"""Bytes. Where nobody waits: evaluating costs as much as copying a megabyte or two."""


class LayerRestoration:
    """A fresh layer on its way to a position. It has nothing until this is over."""

    def __init__(self, layer: KvLayer, parts: Sequence[SegmentSlice], position: int, *, first_plane: int = 0) -> None:
        """`first_plane`: the number of the layer's first plane in the parts."""
        self._layer = layer
        self._position = position
        self._first_plane = first_plane
        self._sizes = layer.load_sizes([part.span for part in parts], position)
        self._buffers: list[list[mx.array]] = [[] for _ in self._sizes]
        self._words: mx.array | None = None
        """The buffer that is being filled, as words, where that takes more than one piece."""
        self._num_filled = 0
        """How many entries it has."""

    @property
    def is_over(self) -> bool:
        return len(self._buffers[-1]) == self._layer.num_planes

    @property
    def nbytes(self) -> int:
        """The bytes of its buffers so far."""
        buffers = [buffer for planes in self._buffers for buffer in planes]
        return sum(buffer.nbytes for buffer in (*buffers, self._words) if buffer is not None)

    def least_nbytes(self, parts: Sequence[SegmentSlice]) -> int:
        """What the next piece writes at least: a buffer as a whole, or one more entry of it."""
        num, room = self._sizes[self._which]
        each = self._column(parts, 0, 0).nbytes_each
        return each if self._words is not None else each * (num + room)

    def advance(self, parts: Sequence[SegmentSlice], *, at_most: int) -> tuple[mx.array, int]:
        """The next piece: an array to be evaluated, and the bytes that it writes.

        No more than `at_most`, or `least_nbytes`. `parts`: the entries of the layer's kind, as they are held now.
        """
        num, room = self._sizes[self._which]
        least = self.least_nbytes(parts)
        if self._words is None and least > at_most:
            # The pages of a buffer are new as a rule: that costs as much as the entries that follow.
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
        """Which of the buffers of each plane is next."""
        return next(i for i, planes in enumerate(self._buffers) if len(planes) < self._layer.num_planes)

    def _column(self, parts: Sequence[SegmentSlice], start: int, stop: int) -> Column:
        """These entries of the buffer that is next, in its plane."""
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
    """One sequence on its way to a position.

    It counts as standing there from the start, and can run when this is over. Where it breaks off, the entries of full
    attention that were kept are as good as before.
    """

    def __init__(self, rows: SequenceBatch, position: int, *, keeps_full: bool = False) -> None:
        """`keeps_full`: the sequence comes from further on. Its full-attention buffers stay as they are, with what is
        behind the position to be overwritten; all other layers are made anew.
        """
        self._rows = rows
        self._position = position
        self._keeps_full = keeps_full
        self._fresh = leaf_states(rows.blueprint.build()) if keeps_full else rows.states()
        self._next = 0 if position > 0 else len(self._fresh)
        """The first layer that lacks its state."""
        self._layer: LayerRestoration | None = None
        """That layer, where it has some of it."""
        self._num_planes: Counter[KvKind] = Counter()
        """How many planes of each kind the layers before it have."""
        if keeps_full:
            for state in rows.states():
                if isinstance(state, FullLayer):
                    state.rewind(position)
        rows.lengths = [position]

    @property
    def is_over(self) -> bool:
        """Whether every layer has its state."""
        return self._next == len(self._fresh)

    @property
    def nbytes(self) -> int:
        """The bytes of what is there of the layer under way: the sequence does not have it yet."""
        return self._layer.nbytes if self._layer is not None else 0

    @property
    def num_full_planes(self) -> int:
        """How many planes of full attention are in layers that have all of their entries."""
        return self._num_planes[Full()]

    def advance(self, restore: Restore, *, at_most: int, num_pieces: int = sys.maxsize) -> int:
        """Copy the next pieces, which write no more than `at_most` bytes together; but one piece at least.

        The least piece is a plane's buffer with its room to grow, or one entry of it. Gives the bytes. `restore` is
        read anew each time: what stood in the buffers of another sequence may be somewhere else by now.
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
        """The next layer has its entries: the one behind it is next."""
        if isinstance(layer, KvLayer):
            self._num_planes[layer.kind] += layer.num_planes
            if not has_entries:
                layer.lengths = [self._position]
        self._layer = None
        self._next += 1

    def _attach(self, restore: Restore | None) -> None:
        """Put the layers that have their state into the sequence; in the end, with `restore`, all of them."""
        leaves = self._rows.states()
        for i, fresh in enumerate(self._fresh[: self._next]):
            if isinstance(fresh, KvLayer) and not (self._keeps_full and isinstance(fresh, FullLayer)):
                leaves[i] = fresh
        if restore is not None:
            saved = _Saved(restore)
            for i, fresh in enumerate(self._fresh):
                if not isinstance(fresh, KvLayer):
                    leaves[i] = saved.give(fresh)
        self._rows.caches = with_leaves(self._rows.caches, iter(leaves))


class _Saved:
    """The states of a snapshot, handed out layer by layer."""

    def __init__(self, restore: Restore) -> None:
        snapshot = cast(Snapshot | None, restore.snapshot)
        self._recurrent = iter(snapshot.states if snapshot is not None else ())
        self._opaque = iter(snapshot.opaque.thaw() if snapshot is not None and snapshot.opaque is not None else ())

    def give(self, fresh: Any) -> Any:
        """The state in the place of this fresh one, as it was saved."""
        if not isinstance(fresh, StateLayer):
            return next(self._opaque)
        # Another object for the same bytes: a model may write into the one it has, and the snapshot stays as it is.
        fresh.arrays = [copy.copy(array) for array in next(self._recurrent)]
        return fresh
