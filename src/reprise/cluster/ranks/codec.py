"""Operations as messages: plain data as JSON, objects by the numbers that rank 0 assigned.

Sequences, packed segments, snapshots and the records of the disk hold a rank's own part of a state; they are named by a
number. What is only a way of looking at them (a shared segment, a source, the rows of a sequence) is written out.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from reprise.cache.lookup import Restore, SegmentSlice
from reprise.core.kinds import KvKind
from reprise.core.tokens import Span
from reprise.disk.records.record import DiskRecord
from reprise.engine.running.live_sequence import LiveSequence, SharedSegment
from reprise.engine.running.records import RecordEncoder, RecordSource, RestoringSequence
from reprise.engine.running.runner import Runner
from reprise.engine.states.payloads import PackedSegment, Snapshot
from reprise.engine.states.sequence_batch import SequenceBatch, SequenceSource

Numbered = LiveSequence | PackedSegment | Snapshot | DiskRecord | RecordEncoder | RecordSource | RestoringSequence
"""Objects that hold a part of a state and are identified by a number."""

Coded = Any
"""A JSON value: a number, text, boolean or null, or a list that starts with the name of its type."""


def numbered_in(result: object) -> list[Numbered]:
    """The numbered objects in the result of an operation, in order; they get the next numbers."""
    if isinstance(result, Numbered):
        return [result]
    items = cast("Sequence[object]", result) if isinstance(result, list | tuple) else ()
    return [each for item in items for each in numbered_in(item)]


def form_of(record: DiskRecord) -> str:
    """A hash of everything but the content: the same for all parts of a record, unless they were written apart."""
    sections = [[section.dtype, list(section.shape)] for section in record.sections]
    form = [record.is_tail, record.start, len(record.tokens), dict(record.about), sections]
    return hashlib.blake2b(json.dumps(form, sort_keys=True).encode(), digest_size=16).hexdigest()


class Encoder:
    """Encodes the arguments of an operation. `number_of`: the number of an object."""

    def __init__(self, kinds: Sequence[KvKind], number_of: Callable[[Numbered], int]) -> None:
        self._kinds = list(kinds)
        self._number_of = number_of

    def encode(self, value: Any) -> Coded:
        """The value as JSON. Raises TypeError for values that cannot be sent."""
        if isinstance(value, Restore):
            by_kind = [[self._kinds.index(kind), *map(self._slice, parts)] for kind, parts in value.slices.items()]
            return ["restore", value.position, by_kind, self.encode(value.snapshot)]
        match value:
            case None | bool() | int() | float() | str():
                return value
            case list() | tuple():
                return ["list", *map(self.encode, cast("Sequence[Any]", value))]
            case np.ndarray():
                tokens = np.ascontiguousarray(cast("npt.NDArray[np.int32]", value), dtype="<i4")
                return ["tokens", list(tokens.shape), base64.b64encode(tokens.tobytes()).decode("ascii")]
            case Span(start=start, stop=stop):
                return ["span", start, stop]
            case Runner():
                return ["runner"]
            case _ if isinstance(value, Numbered):
                return ["number", self._number_of(value)]
            case SegmentSlice():
                return ["slice", *self._slice(value)]
            case SequenceBatch():
                return ["rows", self._number_of(_owner(value, None))]
            case SequenceSource(rows=rows, row=row):
                return ["source", self._number_of(_owner(rows, row))]
            case SharedSegment(sequence=live, kind=kind, span=span):
                return ["shared", self._number_of(live), self._kinds.index(kind), span.start, span.stop]
            case _ if value in self._kinds:
                return ["kind", self._kinds.index(value)]
            case _:
                raise TypeError(f"cannot send a {type(value).__name__} to other ranks")

    def _slice(self, part: SegmentSlice) -> Coded:
        return [self.encode(part.payload), part.start, part.stop, part.span.start, part.span.stop]


def _owner(rows: SequenceBatch, row: int | None) -> LiveSequence:
    """The sequence in a row of this batch; None: in any."""
    owners = rows.owners if row is None else [rows.owners[row]]
    return next(owner for owner in owners if isinstance(owner, LiveSequence))


class Decoder:
    """Decodes the arguments of an operation on another rank. `object_of`: the object with a number."""

    def __init__(self, runner: Runner, object_of: Callable[[int], Numbered]) -> None:
        self._runner = runner
        self._kinds = runner.loaded.blueprint.layout.kinds
        self._object_of = object_of

    def decode(self, coded: Coded) -> Any:
        """The encoded value. Raises ValueError for an unknown type."""
        if not isinstance(coded, list):
            return coded
        form, *rest = cast("list[Any]", coded)
        match form, rest:
            case "list", _:
                return [self.decode(item) for item in rest]
            case "tokens", [shape, text]:
                return np.frombuffer(base64.b64decode(text), dtype="<i4").astype(np.int32).reshape(shape)
            case "span", [start, stop]:
                return Span(start, stop)
            case "runner", []:
                return self._runner
            case "number", [number]:
                return self._object_of(number)
            case "rows", [number]:
                return self._live(number).rows
            case "source", [number]:
                live = self._live(number)
                return SequenceSource(live.rows, live.row)
            case "shared", [number, kind, start, stop]:
                return self._runner.share(self._live(number), self._kinds[cast(int, kind)], Span(start, stop))
            case "restore", [position, by_kind, snapshot]:
                slices = dict(map(self._slices, cast("list[list[Coded]]", by_kind)))
                return Restore(position=cast(int, position), slices=slices, snapshot=self.decode(snapshot))
            case "slice", _:
                return self._slice(rest)
            case "kind", [index]:
                return self._kinds[cast(int, index)]
            case _:
                raise ValueError(f"unknown type {form!r} in an operation")

    def _live(self, number: int) -> LiveSequence:
        live = self._object_of(number)
        assert isinstance(live, LiveSequence), number
        return live

    def _slices(self, coded: list[Coded]) -> tuple[KvKind, tuple[SegmentSlice, ...]]:
        return self._kinds[cast(int, coded[0])], tuple(map(self._slice, coded[1:]))

    def _slice(self, coded: Coded) -> SegmentSlice:
        payload, start, stop, first, last = coded
        return SegmentSlice(self.decode(payload), start, stop, Span(first, last))
