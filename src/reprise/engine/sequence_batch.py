"""The live sequences that a model works on together, and the way between them and the prefix cache."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from reprise.cache.lookup import Restore, SegmentSlice
from reprise.cache.payload import SegmentPayload
from reprise.core.kinds import KvKind
from reprise.core.tokens import Span
from reprise.engine.blueprint import Blueprint, leaf_states, with_leaves
from reprise.engine.columns import columns_of
from reprise.engine.layers import FullLayer, KvLayer, StateLayer
from reprise.engine.opaque import look_into
from reprise.engine.payloads import MovedSegment, PackedSegment, Snapshot, arrays_of, count_bytes, pack, save
from reprise.engine.sample_batch import Choices

COPIED_AT_ONCE = 32 << 20
"""Bytes. Evaluating costs as much as copying a megabyte or two, so small layers are restored together."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep:
    """A pass that was run before its tokens were read: what it chose, and the recurrent states before it, by layer."""

    choices: Choices
    before: Mapping[int, list[mx.array | None]]


class SequenceBatch:
    """Layer states of one or more sequences. Row i stands at position `lengths[i]`."""

    def __init__(self, blueprint: Blueprint) -> None:
        """One fresh sequence at position 0."""
        self.blueprint = blueprint
        self.caches = blueprint.build()
        self.lengths = [0]
        self.owners: list[object] = [None]
        """Whose each row is: joins and leaves keep it in step with the rows."""
        self.ahead: PendingStep | None = None
        """The pass that has been run ahead: the layers stand one position behind `lengths`."""

    @property
    def num_rows(self) -> int:
        """Sequences in the batch."""
        return len(self.lengths)

    def states(self) -> list[Any]:
        """The state of each layer, parts of composites one by one."""
        return leaf_states(self.caches)

    def recurrent(self) -> list[list[mx.array | None]]:
        """The arrays of each recurrent layer."""
        return [state.arrays for state in self.states() if isinstance(state, StateLayer)]

    def opaque(self) -> list[Any]:
        """The states of classes that are not known."""
        return [state for state in self.states() if not isinstance(state, KvLayer | StateLayer)]

    def layers(self, kind: KvKind) -> list[KvLayer]:
        """The layers of this kind, in the order of the model."""
        return [s for s in self.states() if isinstance(s, KvLayer) and s.kind == kind]

    def kv_layers(self) -> list[KvLayer]:
        """The layers that hold entries, in the order of the model."""
        return [s for s in self.states() if isinstance(s, KvLayer)]

    @property
    def state_nbytes(self) -> int:
        """The bytes of all layers that hold no entries."""
        return count_bytes(self.recurrent()) + look_into(self.opaque()).nbytes

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers, room to grow included."""
        kept = self.ahead.before.values() if self.ahead is not None else ()
        return sum(layer.nbytes for layer in self.kv_layers()) + self.state_nbytes + count_bytes(list(kept))

    def arrays(self) -> list[mx.array]:
        """All arrays of all layers: evaluating them computes the states."""
        entries = [plane for layer in self.kv_layers() for plane in layer.state]
        return [*entries, *arrays_of(self.recurrent()), *look_into(self.opaque()).arrays]

    def reserve(self, length: int) -> None:
        """Sequences will grow to this length: buffers are made that large at once."""
        for state in self.states():
            if isinstance(state, KvLayer):
                state.reserve(length)

    def forward(self, model: nn.Module, tokens: mx.array) -> mx.array:
        """Run the model on `tokens` of shape ``(rows, n)``; gives logits of shape ``(rows, n, vocabulary)``, lazy."""
        assert self.ahead is None, "what was run ahead is taken or undone first"
        logits = model(tokens, cache=self.caches)
        self.lengths = [length + tokens.shape[1] for length in self.lengths]
        return logits

    # Running ahead.

    def run_ahead(self, model: nn.Module, tokens: mx.array, sample_batch: Callable[[mx.array], Choices]) -> None:
        """Run the pass after this one already, on `tokens` of shape ``(rows, 1)`` that are not computed yet.

        `lengths` stay: for everybody else the pass has not been run. `take_ahead` makes it count, `step_back` undoes
        it. Entries are undone by forgetting them. Recurrent state cannot be rewound, so what it was is kept.
        """
        before = self.save_recurrent()
        lengths = self.lengths
        logits = self.forward(model, tokens)
        self.lengths = lengths
        self.ahead = PendingStep(sample_batch(logits[:, -1, :]), before)

    def take_ahead(self) -> Choices | None:
        """The choices of the pass that was run ahead, which counts from now on; None if there is none."""
        if self.ahead is None:
            return None
        choices, self.ahead = self.ahead.choices, None
        self.lengths = [length + 1 for length in self.lengths]
        return choices

    def step_back(self) -> None:
        """Undo the pass that was run ahead, if there is one."""
        if self.ahead is None:
            return
        before, self.ahead = self.ahead.before, None
        self.lengths = [length + 1 for length in self.lengths]
        self.forget_last(1, before)

    def save_recurrent(self) -> Mapping[int, list[mx.array | None]]:
        """The recurrent states as they are, by layer: references, no copies."""
        return {i: [copy.copy(a) for a in s.arrays] for i, s in enumerate(self.states()) if isinstance(s, StateLayer)}

    def forget_last(self, num: int, before: Mapping[int, list[mx.array | None]]) -> None:
        """Undo the last `num` tokens of each row, all of one pass; `before`: the recurrent states in front of them."""
        for i, state in enumerate(self.states()):
            if isinstance(state, StateLayer):
                state.arrays = list(before[i])
            else:
                state.forget_last(num)
        self.lengths = [length - num for length in self.lengths]

    # Restore.

    @classmethod
    def restored(
        cls, blueprint: Blueprint, restore: Restore, *, reserve: int = 0, at_once: int = COPIED_AT_ONCE
    ) -> SequenceBatch:
        """One sequence that stands where `restore` says, in buffers of its own.

        `at_once`: layers are copied together up to so many bytes. 0: one after the other, so that entries that are
        moved are gone before the next ones are copied.
        """
        rows = cls(blueprint)
        rows.reserve(reserve)
        restoration = Restoration(rows, restore.position)
        while not restoration.is_over:
            restoration.advance(restore, at_once=at_once)
        return rows

    # Joining and leaving.

    def join(self, others: Sequence[SequenceBatch]) -> None:
        """Add the sequences of `others`, which are used up by it."""
        assert all(rows.ahead is None for rows in (self, *others))
        columns = zip(*(rows.states() for rows in (self, *others)), strict=True)
        for mine, *theirs in columns:
            mine.join(theirs)
        self.lengths = [length for rows in (self, *others) for length in rows.lengths]
        self.owners = [owner for rows in (self, *others) for owner in rows.owners]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this order."""
        assert self.ahead is None
        for state in self.states():
            if len(rows) == 1:
                state.take(rows[0])
            else:
                state.keep_rows(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.owners = [self.owners[row] for row in rows]

    def copy_rows(self, rows: Sequence[int]) -> SequenceBatch:
        """These sequences, in buffers of their own. Those here stay as they are."""
        assert self.ahead is None
        twin = SequenceBatch(self.blueprint)
        for mine, fresh in zip(self.states(), twin.states(), strict=True):
            for name, value in cast(dict[str, Any], vars(mine)).items():
                setattr(fresh, name, list(cast(list[Any], value)) if isinstance(value, list) else value)
        twin.lengths, twin.owners = list(self.lengths), list(self.owners)
        if list(rows) != list(range(self.num_rows)):
            twin.keep_rows(rows)
        return twin


class Restoration:
    """One sequence on its way to a position, some layers at a time, so that nobody waits for all of it.

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
        self._fresh = SequenceBatch(rows.blueprint).states() if keeps_full else rows.states()
        self._next = 0 if position > 0 else len(self._fresh)
        """The first layer that lacks its state."""
        self._planes: Counter[KvKind] = Counter()
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

    def advance(self, restore: Restore, *, at_once: int) -> int:
        """Give the next layers their state, until more than `at_once` bytes are there: one layer at least.

        Gives the bytes of entries, with the room to grow beside them. `restore` is read anew each time: what stood in
        the buffers of another sequence may be somewhere else by now.
        """
        assert restore.position == self._position, (restore.position, self._position)
        leaves = self._rows.states()
        pending: list[mx.array] = []
        nbytes = 0
        while not self.is_over and nbytes <= at_once:
            layer = self._fresh[self._next]
            if isinstance(layer, KvLayer) and not (self._keeps_full and isinstance(layer, FullLayer)):
                self._load(layer, restore)
                leaves[self._next] = layer
                pending += layer.state
                nbytes += layer.nbytes
            self._next += 1
        if self.is_over:
            saved = _Saved(restore)
            for i, fresh in enumerate(self._fresh):
                if not isinstance(fresh, KvLayer):
                    leaves[i] = saved.give(fresh)
        self._rows.caches = with_leaves(self._rows.caches, iter(leaves))
        mx.eval(self._rows.arrays() if self.is_over else pending)
        return nbytes

    def _load(self, layer: KvLayer, restore: Restore) -> None:
        """Make a fresh layer stand there with the next planes of its kind."""
        parts = restore.slices[layer.kind]
        if len(parts) == 0:
            layer.lengths = [self._position]
            return
        first = self._planes[layer.kind]
        self._planes[layer.kind] += layer.num_planes
        columns = columns_of(parts, range(first, first + layer.num_planes))
        layer.load(columns, [part.span for part in parts], self._position)


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


def moving(restore: Restore, segments: Sequence[PackedSegment]) -> Restore:
    """The same, with these segments, which are unstacked and nobody else holds, given up as they are read."""
    passing = {id(segment): MovedSegment(segment) for segment in segments}

    def hand_over(part: SegmentSlice) -> SegmentSlice:
        taken = passing.get(id(part.payload))
        return part if taken is None else replace(part, payload=taken)

    return replace(restore, slices={kind: tuple(map(hand_over, slices)) for kind, slices in restore.slices.items()})


@dataclass(frozen=True, slots=True)
class SequenceSource:
    """One live sequence as a source for commits (`reprise.cache.payload.Source`)."""

    rows: SequenceBatch
    row: int

    def _layers(self, kind: KvKind) -> list[KvLayer]:
        return self.rows.layers(kind)

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        """The bytes of `length` positions of one kind of layers, all of them together."""
        return sum(
            plane.shape[1] * plane.shape[3] * plane.dtype.size * length
            for layer in self._layers(kind)
            for plane in layer.planes
        )

    def snapshot_nbytes(self) -> int:
        """The bytes of what cannot be had position by position: recurrent and unknown states."""
        return self.rows.state_nbytes // self.rows.num_rows

    def segment(self, kind: KvKind, span: Span) -> SegmentPayload:
        """The entries of `span`, as the cache keeps them."""
        return self.copy(kind, span)

    def copy(self, kind: KvKind, span: Span) -> PackedSegment:
        """A copy of the entries of `span`, which lies within what `kind` needs at this position."""
        layers = self._layers(kind)
        planes = [plane for layer in layers for plane in layer.read(self.row, span)]
        # Where sequences were coming together and that broke off, some are with others already.
        assert len(planes) == sum(layer.num_planes for layer in layers), "entries of some layers are gone"
        return pack(planes)

    def snapshot(self) -> Snapshot:
        """The recurrent and unknown states as they are now."""
        assert self.rows.ahead is None
        row = slice(self.row, self.row + 1)
        recurrent = [[None if a is None else a[row] for a in arrays] for arrays in self.rows.recurrent()]
        return save(recurrent, self.rows.opaque())
