"""What a restore reads: the entries of each plane, in parts, on their way from payloads into the buffers of a layer.

They travel as machine words. What a copy costs goes by the number of elements and hardly by their size, and a row of
an entry is a run of bytes: eight 16-bit numbers are two 64-bit words, in which they are copied four times as fast.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import mlx.core as mx

from reprise.cache.lookup import Restore, SegmentSlice
from reprise.core.kinds import KvKind
from reprise.core.spans import Span

_WORDS = ((8, mx.uint64), (4, mx.uint32), (2, mx.uint16), (1, mx.uint8))


class Planes(Protocol):
    """Entries of one layer kind that a restore can read: a packed, a shared or a moved segment."""

    @property
    def dtypes(self) -> Sequence[mx.Dtype]:
        """The type of each plane."""
        ...

    def words(self, start: int, stop: int) -> Sequence[mx.array]:
        """The entries ``[start, stop)`` of each plane, shape ``(1, heads, length, words)``: views, see `as_words`."""
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

    def joined(self, *, room: int) -> mx.array:
        """All entries with space for `room` more behind them, in one array that owns its bytes, each copied once."""
        like = self.parts[0]
        if len(self.parts) == 1 and room == 0:
            return mx.array(like).view(self.dtype)
        # One zero, seen everywhere: only what it is copied into takes memory.
        space = mx.broadcast_to(mx.array(0, dtype=like.dtype), (*like.shape[:2], room, like.shape[3]))
        return mx.concatenate([*self.parts, space], axis=2).view(self.dtype)

    def split(self, num_parts: int) -> tuple["Column", "Column"]:
        """The first parts, and the others. Where there are no others, no entries."""
        first, rest = self.parts[:num_parts], self.parts[num_parts:]
        if len(rest) == 0:
            rest = (self.parts[0][:, :, :0, :],)
        return Column(parts=first, dtype=self.dtype), Column(parts=rest, dtype=self.dtype)


class Columns:
    """The planes of a restore, handed out layer by layer. What was handed out is held here no more."""

    def __init__(self, restore: Restore) -> None:
        self._restore = restore
        self._left: dict[KvKind, deque[Column]] = {}

    def spans(self, kind: KvKind) -> list[Span]:
        return [part.span for part in self._restore.slices[kind]]

    def take(self, kind: KvKind, num_planes: int) -> list[Column]:
        """The planes of the next layer of this kind."""
        if kind not in self._left:
            self._left[kind] = deque(columns_of(self._restore.slices[kind]))
        left = self._left[kind]
        return [left.popleft() for _ in range(num_planes)]


def columns_of(parts: Sequence[SegmentSlice]) -> list[Column]:
    """One column for each plane of these parts, which are in order."""
    payloads = [cast(Planes, part.payload) for part in parts]
    read = [payload.words(part.start, part.stop) for payload, part in zip(payloads, parts, strict=True)]
    planes = zip(*read, strict=True)
    return [Column(parts=plane, dtype=dtype) for plane, dtype in zip(planes, payloads[0].dtypes, strict=True)]
