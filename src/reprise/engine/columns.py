"""What a restore reads: the entries of each plane, in parts, on their way from payloads into the buffers of a layer.

They travel as machine words. What a copy costs goes by the number of elements and hardly by their size, and a row of
an entry is a run of bytes: eight 16-bit numbers are two 64-bit words, in which they are copied four times as fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import mlx.core as mx

from reprise.cache.lookup import SegmentSlice
from reprise.core.tokens import Span

_WORDS = ((8, mx.uint64), (4, mx.uint32), (2, mx.uint16), (1, mx.uint8))


class Planes(Protocol):
    """Entries of one layer kind that a restore can read: a packed or a shared segment."""

    @property
    def dtypes(self) -> Sequence[mx.Dtype]:
        """The type of each plane."""
        ...

    def words(self, start: int, stop: int, planes: range) -> Sequence[mx.array]:
        """The entries ``[start, stop)`` of these planes, each ``(1, heads, length, words)``: views, see `as_words`."""
        ...


def as_words(array: mx.array) -> mx.array:
    """The same bytes in the widest words of which a row (the last axis) is made. A view, if `array` is contiguous.

    A slice is not: it is cut from the words of the whole.
    """
    row_nbytes = array.shape[-1] * array.dtype.size
    return array.view(next(word for size, word in _WORDS if row_nbytes % size == 0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """The entries of one plane: `parts` of shape ``(1, heads, length, words)``, one for each span, in order."""

    parts: Sequence[mx.array]
    dtype: mx.Dtype

    @property
    def nbytes_each(self) -> int:
        """Bytes of one entry."""
        like = self.parts[0]
        return like.shape[1] * like.shape[3] * like.dtype.size

    def joined(self, *, room: int) -> mx.array:
        """All entries with space for `room` more behind them, in one array that owns its bytes, each copied once."""
        like = self.parts[0]
        if len(self.parts) == 1 and room == 0:
            return mx.array(like).view(self.dtype)
        # One zero, seen everywhere: only what it is copied into takes memory.
        space = mx.broadcast_to(mx.array(0, dtype=like.dtype), (*like.shape[:2], room, like.shape[3]))
        return mx.concatenate([*self.parts, space], axis=2).view(self.dtype)

    def space(self, num: int) -> mx.array:
        """A buffer of words for `num` entries, of which there are none yet."""
        like = self.parts[0]
        return mx.zeros((*like.shape[:2], num, like.shape[3]), dtype=like.dtype)

    def write(self, buffer: mx.array, at: int) -> None:
        """Copy the entries into a buffer of words, from index `at` on: in place, if nobody else holds the buffer."""
        for part in self.parts:
            buffer[:, :, at : at + part.shape[2], :] = part
            at += part.shape[2]


def clip(parts: Sequence[SegmentSlice], start: int, stop: int) -> list[SegmentSlice]:
    """The entries ``[start, stop)`` of all that the parts have, counted from the first. Never no part: an empty one."""
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
    """One column for each of these planes of the parts, which are in order."""
    payloads = [cast(Planes, part.payload) for part in parts]
    read = [payload.words(part.start, part.stop, planes) for payload, part in zip(payloads, parts, strict=True)]
    dtypes = [payloads[0].dtypes[plane] for plane in planes]
    return [Column(parts=words, dtype=dtype) for words, dtype in zip(zip(*read, strict=True), dtypes, strict=True)]
