"""Layer states as named bytes, for files, and back.

What a record holds is described beside its bytes: entries of one layer kind and span as the stacks of a
`PackedSegment`, and a snapshot as one array after the other. Nothing here is executable: a file cannot name a class.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import mlx_lm
import numpy as np

from reprise.cache.lookup import Restore, SegmentSlice
from reprise.cache.payload import SnapshotPayload, Source
from reprise.core.kinds import Chunk, Full, KvKind, Layout, Window
from reprise.core.prompt import BoundaryKind
from reprise.core.spans import Span
from reprise.disk.record import DiskRecord, Section
from reprise.engine.blueprint import Blueprint, OpaqueSpec
from reprise.engine.columns import as_words, columns_of
from reprise.engine.layers import KvLayer
from reprise.engine.payloads import PackedSegment, Snapshot, count_bytes, pack
from reprise.engine.runner import Runner

_DTYPES: Mapping[str, mx.Dtype] = {
    str(dtype).rsplit(".", 1)[-1]: dtype
    for dtype in (
        *(mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64),
        *(mx.float16, mx.bfloat16, mx.float32, mx.complex64),
    )
}
_FORM = 2
"""What is written here means something else when this changes: files of another form are not found."""

COPIED_TOGETHER = 2 << 20
"""Bytes. Evaluating costs as much as copying so many."""

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def runtime_id() -> str:
    """What computes, and how that is written: bytes of one version or device are not those of another."""
    info = cast(dict[str, Any], mx.device_info())
    device = info.get("architecture") or info.get("device_name") or platform.machine()
    return f"form {_FORM} mlx {mx.__version__} mlx-lm {mlx_lm.__version__} {mx.default_device().type} {device}"


def why_not_persistable(blueprint: Blueprint) -> str | None:
    """Why the states of a model cannot be written to files, None if they can."""
    for spec in blueprint.leaves:
        if isinstance(spec, OpaqueSpec):
            return f"a layer keeps its state in a class of its own ({type(spec.prototype).__name__})"
    return None


class RecordEncoder:
    """A record in the making: bytes of their own, and the description that `RecordSource` reads them by.

    `kind`: what kind of position it is where somebody can resume, for whoever loads it.
    """

    def __init__(self, kind: BoundaryKind | None) -> None:
        self._kind = kind
        self._sections: list[Section] = []
        self._segments: list[dict[str, Any]] = []
        self._states: list[list[int | None]] | None = None

    def add_entries(self, parts: Sequence[SegmentSlice], layers: KvKind, span: Span) -> None:
        """Copy the entries of `span`, which lies within what the parts have."""
        segment = _packed(parts, span)
        self._segments.append(
            {
                "layers": _described(layers),
                "span": [span.start, span.stop],
                "stacks": [self._add(stack) for stack in segment.stacks],
                "places": [list(place) for place in segment.places],
            }
        )

    def add_snapshot(self, snapshot: SnapshotPayload) -> None:
        assert isinstance(snapshot, Snapshot), snapshot
        self._states = [
            [None if array is None else self._add(array) for array in cast(Sequence[mx.array | None], arrays)]
            for arrays in snapshot.states
        ]

    @property
    def about(self) -> Mapping[str, Any]:
        return {"kind": self._kind, "segments": self._segments, "states": self._states}

    @property
    def sections(self) -> tuple[Section, ...]:
        return tuple(self._sections)

    def _add(self, array: mx.array) -> int:
        """The number of the section that holds a copy of the array."""
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
    return pack([column.joined(room=0) for column in columns_of(clipped)])


def _section(array: mx.array) -> Section:
    name = str(array.dtype).rsplit(".", 1)[-1]
    flat = array.reshape(1, -1)
    # As words, since numpy has no bfloat16; a copy of its own, which may be freed on any thread.
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
    """A live sequence that is filled from records, a layer at a time, so that nobody has to wait for all of it.

    Entries of full attention are copied straight into the sequence's buffers, where they stay: the cache shares them.
    """

    def __init__(self, runner: Runner, *, length: int) -> None:
        """`length`: to how many positions it will come, with some room to grow."""
        self._runner = runner
        self.live = runner.begin()
        self._length = length
        self._rest = RecordSource()
        self._work: deque[tuple[KvLayer, PackedSegment, int]] = deque()
        """Layers that lack a segment, and the number of their first plane in it."""

    @property
    def nbytes(self) -> int:
        """What is held beside the sequence."""
        return self._rest.nbytes

    @property
    def buffer_nbytes(self) -> int:
        return self.live.rows.nbytes

    @property
    def is_busy(self) -> bool:
        """Whether something that was added is not in the sequence yet."""
        return len(self._work) > 0

    @property
    def stop(self) -> int:
        """Where the last record that was added ends."""
        return self._rest.stop

    @property
    def kind(self) -> BoundaryKind | None:
        """As `RecordSource.kind`."""
        return self._rest.kind

    def add(self, record: DiskRecord) -> None:
        """Take over what a record holds, with the next calls of `work`. Raises as `RecordSource.add` does."""
        layers = self.live.rows.layers(Full())
        for segment in self._rest.add(record, keeps_full=False):
            at = 0
            for layer in layers:
                self._work.append((layer, segment, at))
                at += layer.num_planes

    def work(self) -> int:
        """Copy the next part, of one layer or of several small ones: gives the bytes copied and made room for."""
        nbytes = 0
        pending: list[mx.array] = []
        while self._work and nbytes < COPIED_TOGETHER:
            layer, segment, at = self._work.popleft()
            before = layer.nbytes
            planes = [segment.plane(i, 0, segment.length) for i in range(at, at + layer.num_planes)]
            # Its buffers are made that large at once.
            layer.reserve(self._length)
            layer.extend(planes)
            pending += layer.planes
            nbytes += sum(plane.nbytes for plane in planes) + layer.nbytes - before
        mx.eval(pending)
        return nbytes

    def source(self, position: int) -> Source:
        """The sequence as a source; it stands at `position` now. Raises LookupError if the records lack something."""
        assert not self._work
        restore = self._rest.restore(self._runner.loaded.blueprint.layout, position)
        self._runner.reopen(self.live, restore, reserve=self._length)
        self._rest = RecordSource()
        return self._runner.source(self.live, shares=True)

    def give_up(self) -> None:
        """Nothing of it is needed any more."""
        self._work.clear()
        self._runner.drop(self.live)


class RecordSource:
    """A position read from files, as a source for a commit (`reprise.cache.payload.Source`).

    Records (`RecordEncoder` makes them) are added in the order of their positions. Every entry is given once: it is
    not held here as well then.
    """

    def __init__(self) -> None:
        self._segments: dict[KvKind, list[tuple[Span, PackedSegment]]] = {}
        self._nbytes_each: dict[KvKind, int] = {}
        self._snapshot: Snapshot | None = None
        self.kind: BoundaryKind | None = None
        """The kind of position that the last record is for; None if it is for none."""
        self.stop = 0
        """Where the last record ends."""
        self.is_busy = False
        self.buffer_nbytes = 0

    def work(self) -> int:
        """There is nothing left to copy when a record was added."""
        return 0

    def source(self, position: int) -> Source:
        assert position <= self.stop, (position, self.stop)
        return self

    def give_up(self) -> None:
        """Nothing of it is needed any more."""
        self._segments.clear()
        self._snapshot = None

    @property
    def nbytes(self) -> int:
        """What is held here."""
        held = sum(segment.nbytes for each in self._segments.values() for _, segment in each)
        return held + (self._snapshot.nbytes if self._snapshot is not None else 0)

    def add(self, record: DiskRecord, *, keeps_full: bool = True) -> list[PackedSegment]:
        """Take over what a record holds. Raises ValueError or KeyError if it is not what `RecordEncoder` writes.

        What is of full attention is given back instead unless it is kept.
        """
        given: list[PackedSegment] = []
        arrays: list[mx.array] = [_array(section) for section in record.sections]
        mx.eval(arrays)
        about = record.about
        described: list[dict[str, Any]] = about["segments"]
        for each in described:
            kind, span = _kind(each["layers"]), Span(*each["span"])
            places = tuple((int(stack), int(index)) for stack, index in each["places"])
            stacks: list[int] = each["stacks"]
            segment = PackedSegment(tuple(arrays[i] for i in stacks), places)
            if segment.length != len(span):
                raise ValueError(f"{segment.length} entries do not fill {span}")
            if isinstance(kind, Full) and not keeps_full:
                given.append(segment)
                continue
            self._segments.setdefault(kind, []).append((span, segment))
            self._nbytes_each[kind] = segment.nbytes // len(span)
        if about["states"] is not None:
            layers: list[list[int | None]] = about["states"]
            states = tuple([None if i is None else arrays[i] for i in numbers] for numbers in layers)
            self._snapshot = Snapshot(states=states, nbytes=count_bytes(states))
        self.kind = BoundaryKind(about["kind"]) if about["kind"] is not None else None
        self.stop = record.start + len(record.tokens)
        return given

    def restore(self, layout: Layout, position: int) -> Restore:
        """All but the entries of full attention, as a restore reads it. LookupError if something is not there."""
        slices: dict[KvKind, tuple[SegmentSlice, ...]] = {}
        for kind in layout.kinds:
            needs = () if isinstance(kind, Full) else kind.needs(position)
            segments = [(span, self.segment(kind, span)) for span in needs]
            slices[kind] = tuple(SegmentSlice(segment, 0, len(span), span) for span, segment in segments)
        return Restore(position=position, slices=slices, snapshot=self.snapshot() if layout.has_snapshots else None)

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        return self._nbytes_each.get(kind, 0) * length

    def snapshot_nbytes(self) -> int:
        return self._snapshot.nbytes if self._snapshot is not None else 0

    def segment(self, kind: KvKind, span: Span) -> PackedSegment:
        found: list[tuple[PackedSegment, int, int]] = []
        kept: list[tuple[Span, PackedSegment]] = []
        at = span.start
        for own, segment in self._segments.get(kind, ()):
            both = own.clip(span.start, span.stop)
            if both is not None and both.start == at:
                found.append((segment, both.start - own.start, both.stop - own.start))
                at = both.stop
            if own.stop > span.stop:
                kept.append((own, segment))
        if at != span.stop or not found:
            raise LookupError(f"the files lack entries of {span} behind {at}")
        self._segments[kind] = kept
        (first, start, stop), *others = found
        if not others:
            # A view would keep the whole record alive.
            return first if (start, stop) == (0, first.length) else first.cut(start, stop)
        return _view(first, start, stop).join([_view(*each) for each in others])

    def snapshot(self) -> Snapshot:
        if self._snapshot is None:
            raise LookupError("the files lack a snapshot")
        return self._snapshot


def _view(segment: PackedSegment, start: int, stop: int) -> PackedSegment:
    return PackedSegment(tuple(stack[:, :, start:stop, :] for stack in segment.stacks), segment.places)
