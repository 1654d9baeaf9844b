"""Encodes layer states as records for the disk, and decodes them.

Each record describes its sections: the entries of one layer kind and span as the stacks of a `PackedSegment`, a
snapshot as a list of arrays. Nothing is executable: a file cannot name a class.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import mlx_lm
import numpy as np

from reprise.cache.lookup import Restore, SegmentSlice
from reprise.cache.payload import Payload, SegmentPayload, Source
from reprise.core.failpoints import Failpoint, reach
from reprise.core.kinds import Chunk, Full, KvKind, Layout, Window
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span
from reprise.disk.records.record import DiskRecord, Section
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.runner import Runner
from reprise.engine.states.blueprint import Blueprint, OpaqueSpec
from reprise.engine.states.layers import KvLayer
from reprise.engine.states.payloads import EntryPlanes, PackedSegment, Snapshot, as_words, columns_of, count_bytes, pack

_DTYPES: Mapping[str, mx.Dtype] = {
    str(dtype).rsplit(".", 1)[-1]: dtype
    for dtype in (
        *(mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64),
        *(mx.float16, mx.bfloat16, mx.float32, mx.complex64),
    )
}
_FORM = 2
"""Version of the encoding: files with another one are never found."""

COPIED_TOGETHER = 2 << 20
"""Bytes to copy per evaluation, which costs about as much as copying that many."""

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def runtime_id() -> str:
    """Identifies encoding, library versions and device: states computed by others are not reused."""
    info = cast(dict[str, Any], mx.device_info())
    device = info.get("architecture") or info.get("device_name") or platform.machine()
    return f"form {_FORM} mlx {mx.__version__} mlx-lm {mlx_lm.__version__} {mx.default_device().type} {device}"


def why_not_persistable(blueprint: Blueprint) -> str | None:
    """Why the states of a model cannot be written to disk, or None if they can."""
    for spec in blueprint.leaves:
        if isinstance(spec, OpaqueSpec):
            return f"a layer keeps its state in a class of its own ({type(spec.prototype).__name__})"
    return None


class RecordEncoder:
    """Encodes one record: copies of the bytes, and the description by which `RecordSource` decodes them.

    `kind`: the kind of boundary at the record's end, None for a block.
    """

    def __init__(self, kind: str | None) -> None:
        self._kind = kind
        self._sections: list[Section] = []
        self._segments: list[dict[str, Any]] = []
        self._states: list[list[int | None]] | None = None

    def add_entries(self, parts: Sequence[SegmentSlice], layers: KvKind, span: Span) -> None:
        """Copy the entries of `span`, all of which `parts` have."""
        reach(Failpoint.ENCODE, layers, span)
        segment = _packed(parts, span)
        self._segments.append(
            {
                "layers": _described(layers),
                "span": [span.start, span.stop],
                "stacks": [self._add(stack) for stack in segment.stacks],
                "places": [list(place) for place in segment.places],
            }
        )

    def add_snapshot(self, snapshot: Payload) -> None:
        assert isinstance(snapshot, Snapshot), snapshot
        self._states = [
            [None if array is None else self._add(array) for array in cast(Sequence[mx.array | None], arrays)]
            for arrays in snapshot.states
        ]

    @staticmethod
    def new(kind: str | None) -> RecordEncoder:
        """An empty encoder. Encoders are made here alone."""
        return RecordEncoder(kind)

    def note_queued(self, record: DiskRecord) -> None:
        """The record with this content was queued for writing."""

    @property
    def about(self) -> Mapping[str, Any]:
        return {"kind": self._kind, "segments": self._segments, "states": self._states}

    @property
    def sections(self) -> tuple[Section, ...]:
        return tuple(self._sections)

    def _add(self, array: mx.array) -> int:
        """Add a section with a copy of the array; returns its number."""
        self._sections.append(_section(array))
        return len(self._sections) - 1


def _packed(parts: Sequence[SegmentSlice], span: Span) -> PackedSegment:
    """The entries of `span`, in order, from the parts that have some of them."""
    clipped: list[SegmentSlice] = []
    for part in parts:
        both = part.span.clip(span.start, span.stop)
        if both is not None:
            low = part.start + both.start - part.span.start
            clipped.append(replace(part, start=low, stop=low + len(both), span=both))
    assert sum(len(part.span) for part in clipped) == len(span), (span, [part.span for part in clipped])
    num_planes = len(cast(EntryPlanes, clipped[0].payload).dtypes)
    return pack([column.joined(room=0) for column in columns_of(clipped, range(num_planes))])


def _section(array: mx.array) -> Section:
    name = str(array.dtype).rsplit(".", 1)[-1]
    flat = array.reshape(1, -1)
    # As words, since NumPy has no bfloat16; copied, so that it can be freed on any thread.
    data = np.array(as_words(flat) if flat.shape[1] > 0 else mx.zeros((1, 0), dtype=mx.uint8))
    return Section(dtype=name, shape=tuple(array.shape), data=data.reshape(-1).view(np.uint8).data)


def _array(section: Section) -> mx.array:
    dtype = _DTYPES[section.dtype]
    if len(section.data) == 0:
        return mx.zeros(section.shape, dtype=dtype)
    words = mx.array(np.frombuffer(section.data, dtype=_WORDS[dtype.size]))
    return words.view(dtype).reshape(section.shape)


def _described(kind: KvKind) -> list[Any]:
    match kind:
        case Full():
            return ["full"]
        case Window(size=size, keep=keep):
            return ["window", size, keep]
        case Chunk(size=size):
            return ["chunk", size]


def _kind(described: Sequence[Any]) -> KvKind:
    match described:
        case ["full"]:
            return Full()
        case ["window", int(size), int(keep)]:
            return Window(size, keep)
        case ["chunk", int(size)]:
            return Chunk(size)
        case _:
            raise ValueError(f"no kind of layer is called {described}")


class RestoringSequence:
    """A live sequence that is filled from records, a layer at a time, so that other streams are not stalled.

    Full-attention entries are copied straight into the sequence's buffers, which the cache then shares.
    """

    def __init__(self, runner: Runner, *, length: int) -> None:
        """`length`: the number of positions to allocate buffers for."""
        self._runner = runner
        self.live = runner.begin()
        self._length = length
        self.records = RecordSource(keeps_full=False)
        """To which records are added."""
        self._work: deque[tuple[KvLayer, PackedSegment, int]] = deque()
        """(layer, segment to copy into it, index of the layer's first plane in the segment)."""
        self._restore: Restore | None = None
        """What the other layers are restored from, once all records are there."""
        self._filled: Source | None = None
        """The sequence as a source, once its state is complete."""

    @staticmethod
    def new(runner: Runner, *, length: int) -> tuple[RestoringSequence, LiveSequence, RecordSource]:
        """An empty sequence to restore, and its parts, from which commits take payloads. They are made here alone."""
        target = RestoringSequence(runner, length=length)
        return target, target.live, target.records

    @property
    def buffer_nbytes(self) -> int:
        return self.live.rows.nbytes

    @property
    def is_busy(self) -> bool:
        """Whether something is left to copy into the sequence."""
        return len(self._work) > 0 or self.records.is_busy or self.live.restoration is not None

    def work(self) -> int:
        """Copy the next part: of a record, of one layer, or of several small ones. Returns the bytes."""
        if self._work:
            return self._extend()
        if self.records.is_busy:
            nbytes = self.records.work()
            layers = self.live.rows.layers(Full())
            for segment in self.records.take_full():
                at = 0
                for layer in layers:
                    self._work.append((layer, segment, at))
                    at += layer.num_planes
            return nbytes
        assert self._restore is not None, "nothing is left to do"
        return self._runner.restore_part(self.live, self._restore, at_most=COPIED_TOGETHER)

    def _extend(self) -> int:
        """Copy a segment into the buffers of the next layers; returns the bytes copied and allocated."""
        nbytes = 0
        pending: list[mx.array] = []
        while self._work and nbytes < COPIED_TOGETHER:
            layer, segment, at = self._work[0]
            planes = [segment.plane(i, 0, segment.length) for i in range(at, at + layer.num_planes)]
            if len(layer.planes) < layer.num_planes:
                # Allocate its buffers at full size, one at a time.
                layer.reserve(self._length)
                made = layer.make_plane(planes[len(layer.planes)])
                pending.append(made)
                nbytes += made.nbytes
                continue
            self._work.popleft()
            layer.extend(planes)
            pending += layer.planes
            nbytes += sum(plane.nbytes for plane in planes)
        mx.eval(pending)
        return nbytes

    def finish(self, position: int) -> None:
        """Have the next calls of `work` put the state at `position`. Raises LookupError if records are incomplete."""
        if position > 0:
            # What is incomplete is refused before the other ranks are told.
            self.records.restore(self._runner.loaded.blueprint.layout, position)
            self._finish(position)

    def _finish(self, position: int) -> None:
        self._restore = self.records.restore(self._runner.loaded.blueprint.layout, position)
        self._runner.begin_restore(self.live, position, reserve=self._length, keeps_full=True)

    def source(self, position: int) -> Source:
        """The sequence, which is at `position`, and the decoded entries of other kinds, as a source for a commit."""
        assert not self.is_busy and self.live.position == position, (self.live.position, position)
        self._restore = None
        self._filled = self._runner.source(self.live, shares=True)
        return self

    # As a source: full-attention entries from the sequence, everything else from the records, without copies.

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        return self._source_of(kind).segment_nbytes(kind, length)

    def snapshot_nbytes(self) -> int:
        return self.records.snapshot_nbytes()

    def segment(self, kind: KvKind, span: Span) -> SegmentPayload:
        return self._source_of(kind).segment(kind, span)

    def snapshot(self) -> Snapshot:
        return self.records.snapshot()

    def _source_of(self, kind: KvKind) -> Source:
        if not isinstance(kind, Full):
            return self.records
        assert self._filled is not None, "a source after `source`"
        return self._filled

    def give_up(self) -> None:
        """Free everything."""
        self._work.clear()
        self._restore = None
        self.records.give_up()
        self._runner.drop(self.live)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncodedSegment:
    """Entries of one layer kind in sections that are not decoded yet."""

    kind: KvKind
    span: Span
    places: tuple[tuple[int, int], ...]
    sections: tuple[Section, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncodedState:
    """An array of a snapshot that is not decoded yet, and its place in the snapshot."""

    layer: int
    index: int
    section: Section


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncodedRecord:
    """What a record describes. `states`: None without a snapshot; `nums_of_states`: arrays per layer of it."""

    kind: BoundaryKind | None
    segments: tuple[_EncodedSegment, ...]
    states: tuple[_EncodedState, ...] | None
    nums_of_states: tuple[int, ...]


def parse(record: DiskRecord) -> _EncodedRecord:
    """The content of a record. ValueError or KeyError if it is not what `RecordEncoder` writes."""
    about = record.about
    described: list[dict[str, Any]] = about["segments"]
    layers: list[list[int | None]] | None = about["states"]
    return _EncodedRecord(
        kind=BoundaryKind(about["kind"]) if about["kind"] is not None else None,
        segments=tuple(_segment(each, record.sections) for each in described),
        states=None
        if layers is None
        else tuple(
            _EncodedState(layer=layer, index=index, section=record.sections[number])
            for layer, numbers in enumerate(layers)
            for index, number in enumerate(numbers)
            if number is not None
        ),
        nums_of_states=tuple(map(len, layers or ())),
    )


def _segment(described: Mapping[str, Any], sections: Sequence[Section]) -> _EncodedSegment:
    places = tuple((int(stack), int(index)) for stack, index in described["places"])
    stacks: list[int] = described["stacks"]
    span, chosen = Span(*described["span"]), tuple(sections[i] for i in stacks)
    length = chosen[0].shape[2] if chosen else 0
    if length != len(span):
        raise ValueError(f"{length} entries do not fill {span}")
    return _EncodedSegment(kind=_kind(described["layers"]), span=span, places=places, sections=chosen)


class RecordSource:
    """A state read from disk, as a source for a commit (`reprise.cache.payload.Source`).

    Records (made by `RecordEncoder`) are added in order of position and decoded a segment at a time. Each entry can be
    taken only once: it is not held here afterwards.
    """

    def __init__(self, *, keeps_full: bool = True) -> None:
        """`keeps_full`: full-attention segments are taken by `segment` like the rest, otherwise by `take_full`."""
        self._keeps_full = keeps_full
        self._encoded: deque[_EncodedSegment | _EncodedState] = deque()
        self._segments: dict[KvKind, deque[tuple[Span, PackedSegment]]] = {}
        self._full: list[PackedSegment] = []
        self._nbytes_each: dict[KvKind, int] = {}
        self._states: tuple[list[mx.array | None], ...] | None = None
        self.kind: BoundaryKind | None = None
        """The kind of boundary at the end of the last added record; None for a block."""
        self.stop = 0
        """The position where the last added record ends."""
        self.buffer_nbytes = 0

    @property
    def records(self) -> RecordSource:
        """As of a `RestoringSequence`, which has one beside its buffers."""
        return self

    @staticmethod
    def new() -> RecordSource:
        """An empty source for whole segments. Those that stand alone are made here alone."""
        return RecordSource()

    def finish(self, position: int) -> None:
        """Nothing to do: the parts are committed as they are."""

    def source(self, position: int) -> Source:
        assert position <= self.stop and not self.is_busy, (position, self.stop)
        return self

    def give_up(self) -> None:
        """Free everything."""
        self._encoded.clear()
        self._segments.clear()
        self._states = None

    @property
    def is_busy(self) -> bool:
        """Whether something is left to decode."""
        return len(self._encoded) > 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        left = sum(section.nbytes for each in self._encoded for section in _sections_of(each))
        held = sum(segment.nbytes for each in self._segments.values() for _, segment in each)
        return left + held + sum(segment.nbytes for segment in self._full) + self.snapshot_nbytes()

    @property
    def seams(self) -> Mapping[KvKind, Sequence[int]]:
        """The positions at which its segments end, by kind."""
        return {kind: [span.stop for span, _ in each] for kind, each in self._segments.items()}

    def add(self, record: DiskRecord) -> None:
        """Queue a record for the next calls of `work`.

        Both raise ValueError or KeyError if its content is not what `RecordEncoder` writes.
        """
        parse(record)
        self._add(record)

    def _add(self, record: DiskRecord) -> None:
        content = parse(record)
        self._encoded += content.segments
        if content.states is not None:
            self._states = tuple([None] * num for num in content.nums_of_states)
            self._encoded += content.states
        self.kind = content.kind
        self.stop = record.position

    def work(self) -> int:
        """Decode the next part: a segment, an array of a snapshot, or several small ones. Returns the bytes."""
        nbytes = 0
        pending: list[mx.array] = []
        while self._encoded and nbytes < COPIED_TOGETHER:
            each = self._encoded.popleft()
            arrays = tuple(_array(section) for section in _sections_of(each))
            pending += arrays
            nbytes += sum(array.nbytes for array in arrays)
            if isinstance(each, _EncodedState):
                assert self._states is not None
                self._states[each.layer][each.index] = arrays[0]
            else:
                self._keep(each, PackedSegment(arrays, each.places))
        mx.eval(pending)
        return nbytes

    def _keep(self, encoded: _EncodedSegment, segment: PackedSegment) -> None:
        kind, span = encoded.kind, encoded.span
        if isinstance(kind, Full) and not self._keeps_full:
            self._full.append(segment)
            return
        self._segments.setdefault(kind, deque()).append((span, segment))
        self._nbytes_each[kind] = segment.nbytes // len(span)

    def take_full(self) -> list[PackedSegment]:
        """The full-attention segments decoded since the last call, in order."""
        taken, self._full = self._full, []
        return taken

    def restore(self, layout: Layout, position: int) -> Restore:
        """What a restore needs, except full-attention entries. Raises LookupError if something is missing."""
        slices: dict[KvKind, tuple[SegmentSlice, ...]] = {}
        for kind in layout.kinds:
            needs = () if isinstance(kind, Full) else kind.needs(position)
            slices[kind] = tuple(piece for span in needs for piece in self._slices(kind, span))
        return Restore(position=position, slices=slices, snapshot=self._snapshot() if layout.has_snapshots else None)

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        return self._nbytes_each.get(kind, 0) * length

    def snapshot_nbytes(self) -> int:
        return count_bytes(self._states) if self._states is not None else 0

    def segment(self, kind: KvKind, span: Span) -> PackedSegment:
        # What is missing is refused before the other ranks are told.
        self._slices(kind, span)
        return self._take(kind, span)

    def _take(self, kind: KvKind, span: Span) -> PackedSegment:
        pieces = self._slices(kind, span)
        segments = self._segments[kind]
        while segments and segments[0][0].stop <= span.stop:
            segments.popleft()
        first, *others = [cast(PackedSegment, piece.payload) for piece in pieces]
        if others:
            views = [_view(piece) for piece in pieces]
            return views[0].join(views[1:])
        (piece,) = pieces
        # A view would keep the whole record alive.
        return first if (piece.start, piece.stop) == (0, first.length) else first.cut(piece.start, piece.stop)

    def _slices(self, kind: KvKind, span: Span) -> list[SegmentSlice]:
        """The slices that make up `span`, in order. Raises LookupError if entries are missing."""
        found: list[SegmentSlice] = []
        at = span.start
        for own, segment in self._segments.get(kind, ()):
            if own.start >= span.stop:
                break
            both = own.clip(span.start, span.stop)
            if both is not None and both.start == at:
                found.append(SegmentSlice(segment, both.start - own.start, both.stop - own.start, both))
                at = both.stop
        if at != span.stop or not found:
            raise LookupError(f"the records lack entries of {span} from {at}")
        return found

    def snapshot(self) -> Snapshot:
        # As in `segment`.
        self._snapshot()
        return self._take_snapshot()

    def _take_snapshot(self) -> Snapshot:
        return self._snapshot()

    def _snapshot(self) -> Snapshot:
        if self._states is None:
            raise LookupError("the records lack a snapshot")
        return Snapshot(states=self._states, nbytes=self.snapshot_nbytes())


def _sections_of(encoded: _EncodedSegment | _EncodedState) -> tuple[Section, ...]:
    return (encoded.section,) if isinstance(encoded, _EncodedState) else encoded.sections


def _view(piece: SegmentSlice) -> PackedSegment:
    segment = cast(PackedSegment, piece.payload)
    return PackedSegment(tuple(stack[:, :, piece.start : piece.stop, :] for stack in segment.stacks), segment.places)
