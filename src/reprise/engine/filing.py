"""Layer states as named bytes, for files, and back.

What a record holds is described beside its bytes: entries of one layer kind and span as the stacks of a `Segment`, and
a snapshot as one array after the other. Nothing here is executable: a file cannot name a class.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import mlx_lm
import numpy as np

from reprise.cache.disk.record import Record, Section
from reprise.cache.lookup import Part, Restore
from reprise.core.kinds import Chunk, Full, KvKind, Window
from reprise.core.prompt import BoundaryKind
from reprise.core.spans import Span
from reprise.engine.blueprint import Blueprint, OpaqueSpec
from reprise.engine.columns import as_words, columns_of
from reprise.engine.payloads import Segment, Snapshot, pack

_DTYPES: Mapping[str, mx.Dtype] = {
    str(dtype).rsplit(".", 1)[-1]: dtype
    for dtype in (
        *(mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64),
        *(mx.float16, mx.bfloat16, mx.float32, mx.complex64),
    )
}
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def runtime() -> str:
    """What computes: bytes of one version or device are not those of another."""
    info = cast(dict[str, Any], mx.device_info())
    device = info.get("architecture") or info.get("device_name") or platform.machine()
    return f"mlx {mx.__version__} mlx-lm {mlx_lm.__version__} {mx.default_device().type} {device}"


def reason_not_to_file(blueprint: Blueprint) -> str | None:
    """Why the states of a model cannot be written to files, None if they can."""
    for spec in blueprint.leaves:
        if isinstance(spec, OpaqueSpec):
            return f"a layer keeps its state in a class of its own ({type(spec.prototype).__name__})"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filed:
    """What goes into a record: the bytes, and the description that `FiledSource` reads them by."""

    about: Mapping[str, Any]
    sections: tuple[Section, ...]


def filed(
    restore: Restore, spans: Mapping[KvKind, Iterable[Span]], *, kind: BoundaryKind | None, has_snapshot: bool
) -> Filed:
    """The entries of `spans`, which lie within what `restore` gives, and its snapshot, in bytes of their own.

    `kind`: what kind of position it is where somebody can resume, for whoever loads it.
    """
    sections: list[Section] = []
    segments: list[dict[str, Any]] = []
    for layers, wanted in spans.items():
        for span in wanted:
            segment = _packed(restore.parts[layers], span)
            first = len(sections)
            sections += [_section(stack, len(sections) + i) for i, stack in enumerate(segment.stacks)]
            segments.append(
                {
                    "layers": _described(layers),
                    "span": [span.start, span.stop],
                    "stacks": list(range(first, len(sections))),
                    "places": [list(place) for place in segment.places],
                }
            )
    states: list[list[int | None]] = []
    if has_snapshot:
        for arrays in cast(Snapshot, restore.snapshot).states:
            numbers: list[int | None] = []
            for array in cast(Sequence[mx.array | None], arrays):
                numbers.append(None if array is None else len(sections))
                if array is not None:
                    sections.append(_section(array, len(sections)))
            states.append(numbers)
    about = {"kind": kind, "segments": segments, "states": states if has_snapshot else None}
    return Filed(about=about, sections=tuple(sections))


def _packed(parts: Sequence[Part], span: Span) -> Segment:
    """The entries of `span`, in order, from the parts that have some of them."""
    clipped: list[Part] = []
    for part in parts:
        both = part.span.clip(span.start, span.stop)
        if both is not None:
            low = part.start + both.start - part.span.start
            clipped.append(replace(part, start=low, stop=low + len(both), span=both))
    assert sum(len(part.span) for part in clipped) == len(span), (span, [part.span for part in clipped])
    return pack([column.joined(room=0) for column in columns_of(clipped)])


def _section(array: mx.array, index: int) -> Section:
    name = str(array.dtype).rsplit(".", 1)[-1]
    flat = array.reshape(1, -1)
    # As words, since numpy has no bfloat16; a copy of its own, which may be freed on any thread.
    data = np.array(as_words(flat) if flat.shape[1] > 0 else mx.zeros((1, 0), dtype=mx.uint8))
    return Section(label=f"{index}", dtype=name, shape=tuple(array.shape), data=data.reshape(-1).view(np.uint8).data)


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


class FiledSource:
    """A position read from files, as a source for a commit (`reprise.cache.payload.Source`).

    Records are added in the order of their positions. Every entry is given once: it is not held here as well then.
    """

    def __init__(self) -> None:
        self._segments: dict[KvKind, list[tuple[Span, Segment]]] = {}
        self._nbytes_each: dict[KvKind, int] = {}
        self._snapshot: Snapshot | None = None
        self.kind: BoundaryKind | None = None
        """The kind of position that the last record is for; None if it is for none."""
        self.stop = 0
        """Where the last record ends."""

    @property
    def nbytes(self) -> int:
        """What is held here."""
        held = sum(segment.nbytes for each in self._segments.values() for _, segment in each)
        return held + (self._snapshot.nbytes if self._snapshot is not None else 0)

    def add(self, record: Record) -> None:
        """Take over what a record holds. Raises ValueError or KeyError if it is not what `filed` writes."""
        arrays = [_array(section) for section in record.sections]
        mx.eval(arrays)
        about = record.about
        for each in about["segments"]:
            kind, span = _kind(each["layers"]), Span(*each["span"])
            places = tuple((int(stack), int(index)) for stack, index in each["places"])
            segment = Segment(tuple(arrays[i] for i in each["stacks"]), places)
            if segment.length != len(span):
                raise ValueError(f"{segment.length} entries do not fill {span}")
            self._segments.setdefault(kind, []).append((span, segment))
            self._nbytes_each[kind] = segment.nbytes // len(span)
        if about["states"] is not None:
            states = tuple([None if i is None else arrays[i] for i in numbers] for numbers in about["states"])
            nbytes = sum(array.nbytes for state in states for array in state if array is not None)
            self._snapshot = Snapshot(states, nbytes)
        self.kind = BoundaryKind(about["kind"]) if about["kind"] is not None else None
        self.stop = record.start + len(record.tokens)

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        return self._nbytes_each.get(kind, 0) * length

    def snapshot_nbytes(self) -> int:
        return self._snapshot.nbytes if self._snapshot is not None else 0

    def segment(self, kind: KvKind, span: Span) -> Segment:
        found: list[tuple[Segment, int, int]] = []
        kept: list[tuple[Span, Segment]] = []
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


def _view(segment: Segment, start: int, stop: int) -> Segment:
    return Segment(tuple(stack[:, :, start:stop, :] for stack in segment.stacks), segment.places)
