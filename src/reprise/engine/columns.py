"""What a restore copies from payloads into a layer's buffers: the entries of each plane, in parts.

They are copied as machine words. The cost of a copy depends on the number of elements and hardly on their size: eight
16-bit numbers viewed as two 64-bit words are copied four times as fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import mlx.core as mx

from reprise.cache.lookup import SegmentSlice
from reprise.core.tokens import Span

_WORDS = ((8, mx.uint64), (4, mx.uint32), (2, mx.uint16), (1, mx.uint8))


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
