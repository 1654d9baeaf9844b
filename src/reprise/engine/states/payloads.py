"""Payloads of MLX arrays: what the prefix cache stores of a model's layers, and how a restore reads it.

A segment packs the entries of all layers of one kind: planes of equal shape and dtype are stacked into one array of
shape ``(planes, heads, length, width)``, so a segment is a few large arrays instead of hundreds of small ones. Every
payload owns its bytes: `mx.array` of a slice is a copy, whereas a slice keeps the whole buffer alive.

A cache of an unknown class is kept as a deep copy with its own arrays (`freeze`). Python's pickle can take apart and
rebuild any object: without a `__dict__`, with containers of any class, with shared references. It is used for that
only: nothing is read from or written to files, and arrays are never serialized.

A restore copies the entries of each plane, in parts, as machine words (`Column`). The cost of a copy depends on the
number of elements and hardly on their size: eight 16-bit numbers viewed as two 64-bit words are copied four times as
fast.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import mlx.core as mx

from reprise.cache.lookup import SegmentSlice
from reprise.cache.payload import SegmentPayload
from reprise.core.tokens import Span

_WORDS = ((8, mx.uint64), (4, mx.uint32), (2, mx.uint16), (1, mx.uint8))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedSegment:
    """Packed entries of one layer kind: `stacks` of shape ``(planes, heads, length, width)``.

    `places`: for each plane, in the order of the layers, its stack and its index in it.
    """

    stacks: tuple[mx.array, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)

    def cut(self, start: int, stop: int) -> PackedSegment:
        stacks = tuple(mx.array(stack[:, :, start:stop, :]) for stack in self.stacks)
        mx.eval(stacks)
        return PackedSegment(stacks, self.places)

    def join(self, others: Sequence[SegmentPayload]) -> PackedSegment:
        parts = [self, *(cast(PackedSegment, other) for other in others)]
        segments = [part for part in parts if part.places == self.places]
        if len(segments) < len(parts):
            # Packed differently: join plane by plane.
            lengths = [part.length for part in parts]
            planes = [
                mx.concatenate([p.plane(i, 0, n) for p, n in zip(parts, lengths, strict=True)], axis=2)
                for i in range(len(self.places))
            ]
            return pack(planes)
        columns = zip(*(segment.stacks for segment in segments), strict=True)
        stacks = tuple(mx.concatenate(list(column), axis=2) for column in columns)
        mx.eval(stacks)
        return PackedSegment(stacks, self.places)

    @property
    def length(self) -> int:
        return self.stacks[0].shape[2] if self.stacks else 0

    def plane(self, index: int, start: int, stop: int) -> mx.array:
        """The entries ``[start, stop)`` of one plane: a view of shape ``(1, heads, length, width)``."""
        stack, place = self.places[index]
        return self.stacks[stack][place : place + 1, :, start:stop, :]

    @property
    def dtypes(self) -> tuple[mx.Dtype, ...]:
        return tuple(self.stacks[stack].dtype for stack, _ in self.places)

    def words(self, start: int, stop: int, planes: range) -> list[mx.array]:
        """The entries ``[start, stop)`` of these planes, as words; views."""
        wanted = [self.places[plane] for plane in planes]
        cuts: dict[tuple[int, int], mx.array] = {}
        # For few operations: slice and split each stack once.
        for stack in {stack for stack, _ in wanted}:
            places = [place for of, place in wanted if of == stack]
            run = range(min(places), max(places) + 1)
            cut = as_words(self.stacks[stack])[run.start : run.stop, :, start:stop, :]
            cuts |= {(stack, place): each for place, each in zip(run, mx.split(cut, len(run)), strict=True)}
        return [cuts[place] for place in wanted]


class EntryTransfer:
    """Full-attention entries that move from segments, to which there is no other reference, into a sequence.

    First each plane is copied to its own array, so that it can be freed as soon as the sequence has it; until then it
    is read from here. At most one segment is held twice, and then one layer.
    """

    def __init__(self, segments: Sequence[tuple[Span, PackedSegment]]) -> None:
        """`segments`: in order of position, possibly with gaps."""
        self._segments = [_SegmentInTransfer(span, segment) for span, segment in segments]

    @property
    def is_packed(self) -> bool:
        """Whether some planes cannot be freed one by one yet."""
        return any(segment.packed is not None for segment in self._segments)

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self._segments)

    def unpack(self, *, at_most: int) -> int:
        """Copy the next planes to their own arrays: `at_most` bytes, but at least one plane. Returns the bytes."""
        segment = next(segment for segment in self._segments if segment.packed is not None)
        return segment.unpack(at_most=at_most)

    def plane(self, index: int, span: Span) -> mx.array:
        """The entries of `span` in one plane: a view if they are in one segment."""
        return _joined([segment.plane(index)[:, :, start:stop, :] for segment, start, stop in self._find(span)])

    def words(self, span: Span, planes: range) -> list[mx.array]:
        """Like `PackedSegment.words`."""
        read = [segment.words(start, stop, planes) for segment, start, stop in self._find(span)]
        return [_joined(parts) for parts in zip(*read, strict=True)]

    @property
    def dtypes(self) -> Sequence[mx.Dtype]:
        return self._segments[0].dtypes

    def give_up(self, planes: range) -> None:
        """Free these planes: the sequence has them."""
        for segment in self._segments:
            segment.give_up(planes)

    def _find(self, span: Span) -> list[tuple[_SegmentInTransfer, int, int]]:
        """The segments that have the entries of `span`, each with its slice ``[start, stop)``."""
        found: list[tuple[_SegmentInTransfer, int, int]] = []
        for segment in self._segments:
            both = segment.span.clip(span.start, span.stop)
            if both is not None or (len(span) == 0 and segment.span.start <= span.start <= segment.span.stop):
                low = (both or span).start - segment.span.start
                found.append((segment, low, low + len(both or span)))
        assert sum(stop - start for _, start, stop in found) == len(span), span
        return found


class _SegmentInTransfer:
    def __init__(self, span: Span, packed: PackedSegment) -> None:
        self.span = span
        self.packed: PackedSegment | None = packed
        self.dtypes = packed.dtypes
        self._planes: list[mx.array | None] = []
        """Its unpacked planes, in order; None for those that were freed."""

    @property
    def nbytes(self) -> int:
        held = sum(plane.nbytes for plane in self._planes if plane is not None)
        return held + (self.packed.nbytes if self.packed is not None else 0)

    def plane(self, index: int) -> mx.array:
        if self.packed is not None:
            return self.packed.plane(index, 0, self.packed.length)
        plane = self._planes[index]
        assert plane is not None, "the sequence has this plane"
        return plane

    def unpack(self, *, at_most: int) -> int:
        assert self.packed is not None
        fresh: list[mx.array] = []
        nbytes = 0
        while len(self._planes) < len(self.dtypes):
            view = self.plane(len(self._planes))
            if nbytes > 0 and nbytes + view.nbytes > at_most:
                break
            fresh.append(mx.array(view))
            self._planes.append(fresh[-1])
            nbytes += view.nbytes
        mx.eval(fresh)
        if len(self._planes) == len(self.dtypes):
            self.packed = None
        return nbytes

    def words(self, start: int, stop: int, planes: range) -> list[mx.array]:
        if self.packed is not None:
            return self.packed.words(start, stop, planes)
        return [as_words(self.plane(index))[:, :, start:stop, :] for index in planes]

    def give_up(self, planes: range) -> None:
        if self.packed is not None:
            self.unpack(at_most=self.packed.nbytes)
        self._planes[planes.start : planes.stop] = [None] * len(planes)


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=2)


def pack(planes: Sequence[mx.array]) -> PackedSegment:
    """A segment with copies of these planes, each of shape ``(1, heads, length, width)`` with the same length."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, plane in enumerate(planes):
        groups.setdefault((plane.shape[1], plane.shape[3], plane.dtype), []).append(index)
    places: list[tuple[int, int]] = [(0, 0)] * len(planes)
    stacks: list[mx.array] = []
    for stack, members in enumerate(groups.values()):
        for place, index in enumerate(members):
            places[index] = (stack, place)
        parts = [planes[index] for index in members]
        stacks.append(mx.array(parts[0]) if len(parts) == 1 else mx.concatenate(parts, axis=0))
    mx.eval(stacks)
    return PackedSegment(tuple(stacks), tuple(places))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Snapshot:
    """The saved states of all layers without entries, in the order of the layers.

    A recurrent layer's state is a list of arrays of shape ``(1, …)`` (None: not set yet). States of unknown classes are
    frozen together.
    """

    states: tuple[list[mx.array | None], ...]
    opaque: Frozen | None = None
    nbytes: int


def save(states: Sequence[Sequence[mx.array | None]], opaque: Sequence[Any] = ()) -> Snapshot:
    """A snapshot with copies of these recurrent states and of these objects of unknown classes."""
    copies = tuple([None if array is None else mx.array(array) for array in state] for state in states)
    mx.eval(arrays_of(copies))
    frozen = freeze(opaque) if len(opaque) > 0 else None
    nbytes = count_bytes(copies) + (frozen.nbytes if frozen is not None else 0)
    return Snapshot(states=copies, opaque=frozen, nbytes=nbytes)


def arrays_of(states: Sequence[Sequence[mx.array | None]]) -> list[mx.array]:
    """All arrays in these recurrent states."""
    return [array for state in states for array in state if array is not None]


def count_bytes(states: Sequence[Sequence[mx.array | None]]) -> int:
    """The bytes of all arrays in these recurrent states."""
    return sum([array.nbytes for array in arrays_of(states)])


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """A copy of some objects. `beside`: the arrays in them, and objects that cannot be copied and stay shared."""

    structure: bytes
    beside: tuple[Any, ...]

    @property
    def arrays(self) -> list[mx.array]:
        return [kept for kept in self.beside if isinstance(kept, mx.array)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def thaw(self) -> list[Any]:
        """New copies of the objects, with their own arrays: changing them does not affect what is frozen."""
        return cast(list[Any], _Unpickler(self.structure, [_own(kept) for kept in self.beside]).load())


def freeze(objects: Sequence[Any]) -> Frozen:
    """Copy these objects together: what two of them share, their copies share."""
    seen = look_into(objects)
    frozen = Frozen(seen.structure, tuple(_own(kept) for kept in seen.beside))
    mx.eval(frozen.arrays)
    return frozen


def look_into(objects: Sequence[Any]) -> Frozen:
    """Like `freeze`, but with the arrays themselves instead of copies."""
    if not objects:
        # The common case, in every step: a model without such layers.
        return _NOTHING
    structure = io.BytesIO()
    pickler = _Pickler(structure)
    pickler.dump(list(objects))
    return Frozen(structure.getvalue(), tuple(pickler.beside))


def _own(kept: Any) -> Any:
    return mx.array(kept) if isinstance(kept, mx.array) else kept


class _Pickler(pickle.Pickler):
    """Pickles objects, and puts arrays and what cannot be pickled into `beside`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=4)
        self.beside: list[Any] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, mx.array) and _can_be_copied(obj):
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.beside)
            self.beside.append(obj)
        return self._places[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: bytes, beside: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(structure))
        self._beside = beside

    def persistent_load(self, pid: int) -> Any:
        return self._beside[pid]


def _can_be_copied(value: Any) -> bool:
    try:
        value.__reduce_ex__(4)
    except Exception:
        # Classes, functions, modules, locks, MLX's dtypes and devices.
        return False
    return True


_NOTHING = Frozen(pickle.dumps([]), ())


class EntryPlanes(Protocol):
    """Entries of one layer kind that a restore can read: a packed or a shared segment."""

    @property
    def dtypes(self) -> Sequence[mx.Dtype]:
        """The dtype of each plane."""
        ...

    def words(self, start: int, stop: int, planes: range) -> Sequence[mx.array]:
        """The entries ``[start, stop)`` of these planes, each ``(1, heads, length, words)``: views, see `as_words`."""
        ...


def as_words(array: mx.array) -> mx.array:
    """View the array as the widest words that divide a row (the last axis). Only a contiguous array is not copied.

    So convert before slicing.
    """
    row_nbytes = array.shape[-1] * array.dtype.size
    return array.view(next(word for size, word in _WORDS if row_nbytes % size == 0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """The entries of one plane: `parts` of shape ``(1, heads, length, words)``, one per span, in order."""

    parts: Sequence[mx.array]
    dtype: mx.Dtype

    @property
    def nbytes_each(self) -> int:
        """Bytes of one entry."""
        like = self.parts[0]
        return like.shape[1] * like.shape[3] * like.dtype.size

    def joined(self, *, room: int) -> mx.array:
        """All entries followed by space for `room` more, in one array that owns its bytes; each is copied once."""
        like = self.parts[0]
        if len(self.parts) == 1 and room == 0:
            return mx.array(like).view(self.dtype)
        # A broadcast zero takes no memory until it is copied.
        space = mx.broadcast_to(mx.array(0, dtype=like.dtype), (*like.shape[:2], room, like.shape[3]))
        return mx.concatenate([*self.parts, space], axis=2).view(self.dtype)

    def space(self, num: int) -> mx.array:
        """An empty buffer of words for `num` entries."""
        like = self.parts[0]
        return mx.zeros((*like.shape[:2], num, like.shape[3]), dtype=like.dtype)

    def write(self, buffer: mx.array, at: int) -> None:
        """Copy the entries into a buffer of words at index `at`: in place if there is no other reference to it."""
        for part in self.parts:
            buffer[:, :, at : at + part.shape[2], :] = part
            at += part.shape[2]


def clip(parts: Sequence[SegmentSlice], start: int, stop: int) -> list[SegmentSlice]:
    """The entries ``[start, stop)`` of the concatenated parts. At least one part, which may be empty."""
    clipped: list[SegmentSlice] = []
    at = 0
    for part in parts:
        low, high = max(start - at, 0), min(stop - at, len(part.span))
        if low < high:
            span = Span(part.span.start + low, part.span.start + high)
            clipped.append(replace(part, start=part.start + low, stop=part.start + high, span=span))
        at += len(part.span)
    first = parts[0]
    return clipped or [replace(first, stop=first.start, span=Span(first.span.start, first.span.start))]


def columns_of(parts: Sequence[SegmentSlice], planes: range) -> list[Column]:
    """One column for each of these planes of the parts."""
    payloads = [cast(EntryPlanes, part.payload) for part in parts]
    read = [payload.words(part.start, part.stop, planes) for payload, part in zip(payloads, parts, strict=True)]
    dtypes = [payloads[0].dtypes[plane] for plane in planes]
    return [Column(parts=words, dtype=dtype) for words, dtype in zip(zip(*read, strict=True), dtypes, strict=True)]
