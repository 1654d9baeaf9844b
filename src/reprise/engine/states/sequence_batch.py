"""A batch of live sequences, and one of its rows as a source for commits to the prefix cache.

Buffers grow in steps, and sequences that join a batch are copied into buffers of equal length: a token can cost
megabytes or nothing. The memory budget is kept by reserving what the next pass will add before it runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np
from mlx import nn

from reprise.cache.payload import SegmentPayload
from reprise.core.failpoints import Failpoint, reach
from reprise.core.images import PromptImage, grid_positions
from reprise.core.kinds import Chunk, KvKind, Window
from reprise.core.tokens import Span
from reprise.engine.states.blueprint import Blueprint, leaf_states
from reprise.engine.states.layers import STEP, FullLayer, HiddenLayer, KvLayer, StateLayer, is_saved, room, rounded
from reprise.engine.states.payloads import PackedSegment, Snapshot, arrays_of, count_bytes, look_into, pack, save
from reprise.engine.states.seeing import PassInputs, Positions, SeeingModel
from reprise.engine.states.windows import slack_of

if TYPE_CHECKING:
    from reprise.engine.running.sampler import SampledBatch


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep:
    """A pass that was run ahead: its choices, and the recurrent states before it, by layer."""

    choices: SampledBatch
    before: Mapping[int, list[mx.array | None]]


class SequenceBatch:
    """Layer states of one or more sequences. Row i is at position `lengths[i]`."""

    def __init__(self, blueprint: Blueprint) -> None:
        """One fresh sequence at position 0."""
        self.blueprint = blueprint
        self.caches = blueprint.build()
        self.lengths = [0]
        self.owners: list[object] = [None]
        """The owner of each row; updated when rows join and leave."""
        self.images: list[tuple[PromptImage, ...]] = [()]
        """The images of each row's prompt, from which follows where its tokens stand."""
        self.ahead: PendingStep | None = None
        """The pass that was run ahead, if any: the layers are then one position past `lengths`."""
        self.before: Mapping[int, list[mx.array | None]] | None = None
        """The recurrent states from before the last pass, while some of that may have to be undone."""

    @property
    def num_rows(self) -> int:
        """Sequences in the batch."""
        return len(self.lengths)

    @property
    def caches(self) -> list[Any]:
        """The states as the model takes them."""
        return self._caches

    @caches.setter
    def caches(self, caches: list[Any]) -> None:
        self._caches = caches
        # Sorted once: each step asks several times for all layers of a kind.
        self.states: Sequence[Any] = leaf_states(caches)
        """Of all layers, in the order of the model, with composites flattened."""
        self.kv_layers: Sequence[KvLayer] = [state for state in self.states if isinstance(state, KvLayer)]
        """Those that hold entries."""
        self._recurrent = [state for state in self.states if isinstance(state, StateLayer)]
        self.opaque: Sequence[Any] = [state for state in self.states if not isinstance(state, KvLayer | StateLayer)]
        """Those of unknown classes."""
        self.hidden = next((state for state in caches[-1:] if isinstance(state, HiddenLayer)), None)
        """The hidden state that a head continues from; None: the model has no head."""

    def recurrent(self) -> list[list[mx.array | None]]:
        """The arrays of each recurrent layer."""
        return [state.cache for state in self._recurrent]

    def saved(self) -> list[list[mx.array | None]]:
        """The arrays of each recurrent layer that snapshots have."""
        return [state.cache for state in self._recurrent if is_saved(state)]

    def layers(self, kind: KvKind) -> list[KvLayer]:
        """The layers of this kind, in the order of the model."""
        return [layer for layer in self.kv_layers if layer.kind == kind]

    @property
    def state_nbytes(self) -> int:
        """Bytes of all layers without entries."""
        return count_bytes(self.recurrent()) + (look_into(self.opaque).nbytes if self.opaque else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, including spare capacity."""
        before = 0 if self.ahead is None else count_bytes(list(self.ahead.before.values()))
        waiting = 0 if self.hidden is None else self.hidden.waiting_nbytes
        return sum([layer.nbytes for layer in self.kv_layers]) + self.state_nbytes + before + waiting

    def arrays(self) -> list[mx.array]:
        """All arrays of all layers: evaluating them computes the states."""
        entries = [plane for layer in self.kv_layers for plane in layer.state]
        return [*entries, *arrays_of(self.recurrent()), *look_into(self.opaque).arrays]

    def reserve(self, length: int) -> None:
        """Expect the sequences to reach this length: buffers are allocated for it at once."""
        for layer in self.kv_layers:
            layer.reserve(length)

    def forward(self, model: nn.Module, tokens: mx.array, inputs: PassInputs | None = None) -> mx.array:
        """Run the model on `tokens` of shape ``(rows, n)``; returns logits of shape ``(rows, n, vocabulary)``, lazy.

        `inputs`: where there are placeholders of images among them.
        """
        assert self.ahead is None, "a pass that was run ahead must be taken or undone first"
        reach(Failpoint.FORWARD, self, tokens)
        if isinstance(model, SeeingModel):
            logits = self._forward_seeing(model, tokens, inputs)
        else:
            assert inputs is None, "a model that does not see gets no image"
            logits = model(tokens, cache=self.caches)
        self.lengths = [length + tokens.shape[1] for length in self.lengths]
        return logits

    def _forward_seeing(self, model: SeeingModel, tokens: mx.array, inputs: PassInputs | None) -> mx.array:
        both_ways = () if inputs is None else [s for s in self.kv_layers if type(s.kind) in self.blueprint.both_ways]
        for layer in both_ways:
            layer.blocks = inputs.blocks if inputs is not None else ()
        try:
            return model(tokens, cache=self.caches, positions=self.positions(tokens.shape[1]), inputs=inputs)
        finally:
            for layer in both_ways:
                layer.blocks = ()

    def positions(self, num: int) -> mx.array | None:
        """Where the next `num` tokens of each row stand, shape ``(3, rows, n)``; None: the model knows it."""
        if self.blueprint.positions is Positions.OWN:
            return None
        has_grids = self.blueprint.positions is Positions.GRID
        rows = zip(self.lengths, self.images, strict=True)
        each = [grid_positions(at, at + num, images if has_grids else ()) for at, images in rows]
        return mx.array(np.stack(each, axis=1))

    # Running ahead.

    def run_ahead(self, model: nn.Module, tokens: mx.array, sample_batch: Callable[[mx.array], SampledBatch]) -> None:
        """Run the next pass ahead, on `tokens` of shape ``(rows, 1)`` that are not computed yet.

        `lengths` do not change. `take_ahead` accepts the pass, `step_back` undoes it: entries are dropped, and
        recurrent states, which cannot be rewound, are restored from copies.
        """
        reach(Failpoint.RUN_AHEAD)
        before = self.save_recurrent()
        lengths = self.lengths
        logits = self.forward(model, tokens)
        self.lengths = lengths
        self.ahead = PendingStep(sample_batch(logits[:, -1, :]), before)

    def take_ahead(self) -> SampledBatch | None:
        """Accept the pass that was run ahead; returns its choices, or None if there is none."""
        if self.ahead is None:
            return None
        choices, self.ahead = self.ahead.choices, None
        self.lengths = [length + 1 for length in self.lengths]
        return choices

    def step_back(self) -> None:
        """Undo the pass that was run ahead, if there is one."""
        if self.ahead is None:
            return
        reach(Failpoint.STEP_BACK)
        before, self.ahead = self.ahead.before, None
        self.lengths = [length + 1 for length in self.lengths]
        self.undo_last(1, before)

    def save_recurrent(self) -> Mapping[int, list[mx.array | None]]:
        """The current recurrent states, by layer: references, not copies."""
        return {i: [copy.copy(a) for a in s.cache] for i, s in enumerate(self.states) if isinstance(s, StateLayer)}

    def undo_last(self, num: int | Sequence[int], before: Mapping[int, list[mx.array | None]]) -> None:
        """Undo the last `num` tokens, of all rows or of each, all of one pass.

        `before`: the recurrent states before the pass, to which rows return of which anything is undone.
        """
        nums = [num] * self.num_rows if isinstance(num, int) else num
        if len(set(nums)) > 1:
            self.write_waiting()
        elif self.hidden is not None and nums[0] > 0:
            self.hidden.undo_waiting(nums[0])
        for i, state in enumerate(self.states):
            if isinstance(state, StateLayer):
                state.undo_last(nums, before[i])
            elif isinstance(state, KvLayer):
                state.undo_last(nums)
            else:
                assert len(set(nums)) == 1, "states of unknown classes have one row"
                state.undo_last(nums[0])
        self.lengths = [length - num for length, num in zip(self.lengths, nums, strict=True)]

    def keep_last_pass(self) -> None:
        """Nothing of the last pass will be undone any more: drop what was kept for that."""
        self.before = None
        if self.hidden is not None:
            self.hidden.recent = None

    def write_waiting(self) -> None:
        """Write the entries that the head has put off, before anyone reads them; lazy."""
        last = self.hidden
        if last is not None and last.write_waiting is not None:
            own = [layer for layer in self.kv_layers if isinstance(layer, FullLayer) and layer.hides_first]
            last.write_waiting(own, last)

    # Joining and leaving.

    def join(self, others: Sequence[SequenceBatch]) -> None:
        """Append the sequences of `others`, which are empty afterwards."""
        assert all(rows.ahead is None for rows in (self, *others))
        for rows in (self, *others):
            rows.write_waiting()
        columns = zip(*(rows.states for rows in (self, *others)), strict=True)
        for mine, *theirs in columns:
            mine.join(theirs)
        self.lengths = [length for rows in (self, *others) for length in rows.lengths]
        self.owners = [owner for rows in (self, *others) for owner in rows.owners]
        self.images = [images for rows in (self, *others) for images in rows.images]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this order."""
        assert self.ahead is None
        self.write_waiting()
        for state in self.states:
            if len(rows) == 1:
                state.take(rows[0])
            else:
                state.keep_rows(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.owners = [self.owners[row] for row in rows]
        self.images = [self.images[row] for row in rows]

    def copy_rows(self, rows: Sequence[int]) -> SequenceBatch:
        """A copy of these sequences, in new buffers."""
        assert self.ahead is None
        self.write_waiting()
        twin = SequenceBatch(self.blueprint)
        for mine, fresh in zip(self.states, twin.states, strict=True):
            for name, value in cast(dict[str, Any], vars(mine)).items():
                setattr(fresh, name, list(cast(list[Any], value)) if isinstance(value, list) else value)
        twin.lengths, twin.owners, twin.images = list(self.lengths), list(self.owners), list(self.images)
        if list(rows) != list(range(self.num_rows)):
            twin.keep_rows(rows)
        return twin


@dataclass(frozen=True, slots=True)
class SequenceSource:
    """One live sequence as a source for commits (`reprise.cache.payload.Source`)."""

    rows: SequenceBatch
    row: int

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        """Bytes of `length` positions in all layers of a kind."""
        return sum(
            plane.shape[1] * plane.shape[3] * plane.dtype.size * length
            for layer in self.rows.layers(kind)
            for plane in layer.planes
        )

    def snapshot_nbytes(self) -> int:
        """Bytes of the recurrent and opaque states."""
        return (count_bytes(self.rows.saved()) + look_into(self.rows.opaque).nbytes) // self.rows.num_rows

    def segment(self, kind: KvKind, span: Span) -> SegmentPayload:
        """The entries of `span`, as a payload for the cache."""
        return self.copy(kind, span)

    def copy(self, kind: KvKind, span: Span) -> PackedSegment:
        """A copy of the entries of `span`, which lies within what `kind` needs at this position."""
        layers = self.rows.layers(kind)
        planes = [plane for layer in layers for plane in layer.read(self.row, span)]
        # If joining a batch was interrupted, some layers may already have moved.
        assert len(planes) == sum(layer.num_planes for layer in layers), "entries of some layers are gone"
        return pack(planes)

    def snapshot(self) -> Snapshot:
        """A copy of the recurrent and opaque states."""
        assert self.rows.ahead is None
        row = slice(self.row, self.row + 1)
        recurrent = [[None if a is None else a[row] for a in arrays] for arrays in self.rows.saved()]
        return save(recurrent, self.rows.opaque)


def growth(parts: Mapping[int, SequenceBatch], owners: frozenset[int], num: int, fresh: Mapping[KvKind, float]) -> int:
    """Bytes by which buffers grow when the sequences of `owners` (ids) in `parts` are fed `num` tokens together.

    `fresh`: the bytes of one entry of one layer, by kind, for empty layers. An upper bound; exact if one group
    continues unchanged. O(layers).
    """
    groups = list(parts.values())
    num_rows = sum(id(owner) in owners for rows in groups for owner in rows.owners)
    if len(groups) == 1 and num_rows == groups[0].num_rows:
        total = 0
        for layer in groups[0].kv_layers:
            more = layer.growth_for(num)
            # Asked for every token, and mostly there is room: what an entry takes is then not looked up.
            total += more * num_rows * _each(layer, fresh) if more != 0 else 0
        return total
    # Sequences that do not take part keep their buffers; groups that join completely are copied and freed.
    gone = [rows for rows in groups if all(id(owner) in owners for owner in rows.owners)]
    total = 0
    for column in zip(*(rows.kv_layers for rows in groups), strict=True):
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

    An upper bound of what `reprise.engine.states.layers` allocates, if the last 256 positions are the answer's.
    """
    most = min(position, chunk)
    if isinstance(kind, Window | Chunk):
        sinks = kind.keep if isinstance(kind, Window) else 0
        return rounded(min(position, kind.size) + most + slack_of(kind.size)) + sinks
    # The first chunk gets spare room in proportion, of which `position` includes a part.
    return rounded(position + max(0, room(most) - STEP))
