"""Payloads of MLX arrays: what the prefix cache holds of a model's layers.

A segment packs the entries of all layers of one kind: planes of equal shape and type are stacked into one array of
shape ``(planes, heads, length, width)``, so that a segment is a few big arrays and not hundreds of small ones. Every
payload owns its bytes: `mx.array` of a slice is a copy, where a slice itself keeps the whole buffer alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from reprise.cache.payload import SegmentPayload
from reprise.engine.columns import as_words
from reprise.engine.opaque import Frozen, freeze


@dataclass(frozen=True, slots=True, eq=False)
class PackedSegment:
    """Packed entries of one layer kind: `stacks` of shape ``(planes, heads, length, width)``.

    `places` says for each plane, in the order of the layers, its stack and its index there.
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
            # Packed in another way: plane by plane.
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

    def unstacked(self) -> PackedSegment:
        """The same entries with an array of its own for each plane, so that planes can be given up one by one."""
        planes = tuple(mx.array(self.plane(i, 0, self.length)) for i in range(len(self.places)))
        mx.eval(planes)
        return PackedSegment(planes, tuple((i, 0) for i in range(len(planes))))

    @property
    def length(self) -> int:
        return self.stacks[0].shape[2] if self.stacks else 0

    def plane(self, index: int, start: int, stop: int) -> mx.array:
        """The entries ``[start, stop)`` of one plane, shape ``(1, heads, length, width)``; a view."""
        stack, place = self.places[index]
        return self.stacks[stack][place : place + 1, :, start:stop, :]

    @property
    def dtypes(self) -> tuple[mx.Dtype, ...]:
        return tuple(self.stacks[stack].dtype for stack, _ in self.places)

    def words(self, start: int, stop: int, planes: range) -> list[mx.array]:
        """The entries ``[start, stop)`` of these planes, as words; views."""
        wanted = [self.places[plane] for plane in planes]
        cuts: dict[tuple[int, int], mx.array] = {}
        # Few operations for many planes: each stack is cut once and split once.
        for stack in {stack for stack, _ in wanted}:
            places = [place for of, place in wanted if of == stack]
            run = range(min(places), max(places) + 1)
            cut = as_words(self.stacks[stack])[run.start : run.stop, :, start:stop, :]
            cuts |= {(stack, place): each for place, each in zip(run, mx.split(cut, len(run)), strict=True)}
        return [cuts[place] for place in wanted]


class MovedSegment:
    """The entries of an unstacked segment on their way elsewhere: each plane is read once, and whoever reads has it."""

    def __init__(self, segment: PackedSegment) -> None:
        assert len(segment.stacks) == len(segment.places), "planes of a packed segment cannot be given up one by one"
        self.length = segment.length
        self.dtypes = segment.dtypes
        self._planes: list[mx.array | None] = [segment.stacks[stack] for stack, _ in segment.places]

    def words(self, start: int, stop: int, planes: range) -> list[mx.array]:
        moved = [self._planes[plane] for plane in planes]
        self._planes[planes.start : planes.stop] = [None] * len(planes)
        given = [as_words(plane)[:, :, start:stop, :] for plane in moved if plane is not None]
        assert len(given) == len(planes), "moved entries are read once"
        return given


def pack(planes: Sequence[mx.array]) -> PackedSegment:
    """A segment of copies of these planes, each of shape ``(1, heads, length, width)`` with one common length."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The saved states of all layers that have no entries, in the order of the layers.

    A recurrent layer's state is a list of arrays of shape ``(1, …)`` (None: not set yet). Those of classes that are not
    known are frozen together.
    """

    states: tuple[list[mx.array | None], ...]
    opaque: Frozen | None = None
    nbytes: int


def save(states: Sequence[Sequence[mx.array | None]], opaque: Sequence[Any] = ()) -> Snapshot:
    """A snapshot of copies of these recurrent states, and of these objects of classes that are not known."""
    copies = tuple([None if array is None else mx.array(array) for array in state] for state in states)
    mx.eval(arrays_of(copies))
    frozen = freeze(opaque) if len(opaque) > 0 else None
    nbytes = count_bytes(copies) + (frozen.nbytes if frozen is not None else 0)
    return Snapshot(states=copies, opaque=frozen, nbytes=nbytes)


def arrays_of(states: Sequence[Sequence[mx.array | None]]) -> list[mx.array]:
    """Every array in these recurrent states."""
    return [array for state in states for array in state if array is not None]


def count_bytes(states: Sequence[Sequence[mx.array | None]]) -> int:
    """The bytes of all arrays in these recurrent states."""
    return sum(array.nbytes for array in arrays_of(states))
