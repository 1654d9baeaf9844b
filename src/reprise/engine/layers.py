"""The live layers that a model works on: rows of entries or of state, for one or more sequences.

They follow the small contract that mlx-lm's models share: attention layers are asked for `update_and_fetch`, `offset`
and `make_mask` (`tests/engine/test_contract.py` notices a change). A layer holds `num_rows` sequences. Rows are
right-aligned: row i of length n_i occupies the buffer indices ``[end - n_i, end)``, so that all rows append at `end`;
what stands before is padding and is masked.

Buffers have the shape ``(rows, heads, capacity, width)``; a layer has one buffer for each of its planes (keys and
values; for quantised entries the words, scales and biases of each).

Here are what all of them share, full attention, and recurrent state (one row for each sequence, without padding: models
ask it for `[i]`, `make_mask`, `lengths` and `advance`); `reprise.engine.windows` has those that drop what no token will
see again.
"""

# ruff: noqa: N803 -- the name of the argument is part of the contract.

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache

from reprise.core.kinds import Full, KvKind
from reprise.core.tokens import Span
from reprise.engine.columns import as_words

STEP = 256
"""Buffers are made in multiples of so many entries."""
_MOST_ROOM = 4096


def room(length: int) -> int:
    """How many entries to grow by: a sixteenth more, so that copying stays linear, but never over 4,096."""
    return max(STEP, min(_MOST_ROOM, length // 16))


def rounded(length: int) -> int:
    """The capacity of a buffer for at least `length` entries."""
    return -(-length // STEP) * STEP


class KvLayer:
    """Entries of one attention layer. Subclasses say what a token sees and what may be dropped."""

    kind: KvKind
    num_planes = 2

    def __init__(self) -> None:
        self.planes: list[mx.array] = []
        self.end = 0
        self.held = 0
        """How many indices below `end` hold entries (or padding of shorter rows)."""
        self.lengths: list[int] = [0]
        """Positions of each row: tokens seen, whether or not their entries are still held."""
        self.reserved: list[int] = [0]
        """The position that each row will come to, where its owner knows: buffers grow to that at once."""
        self._offsets: tuple[list[int], mx.array] | None = None

    # The contract with mlx-lm's models.

    @property
    def offset(self) -> int | mx.array:
        """The position of the next token: an int where all rows agree, else an array of shape ``(rows,)``."""
        if self.is_even:
            return self.lengths[0]
        # Asked for several times in each pass.
        if self._offsets is None or self._offsets[0] is not self.lengths:
            self._offsets = (self.lengths, mx.array(self.lengths))
        return self._offsets[1]

    @property
    def keys(self) -> mx.array | None:
        return self.planes[0] if self.planes else None

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self.planes[0] = value

    @property
    def values(self) -> mx.array | None:
        return self.planes[1] if self.planes else None

    @values.setter
    def values(self, value: mx.array) -> None:
        self.planes[1] = value

    @property
    def state(self) -> list[mx.array]:
        return self.planes

    def empty(self) -> bool:
        return not self.planes

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append entries of shape ``(rows, heads, n, width)``; gives all that these n tokens may see."""
        num = keys.shape[2]
        low = self.append([keys, values])
        self.lengths = [length + num for length in self.lengths]
        return self.planes[0][..., low : self.end, :], self.planes[1][..., low : self.end, :]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last update gave, for layers that share another's entries."""
        low = self._last_low
        return self.planes[0][..., low : self.end, :], self.planes[1][..., low : self.end, :]

    def reserve(self, length: int) -> None:
        """All rows will come to this position."""
        self.reserved = [length] * self.num_rows

    # Storage.

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def is_even(self) -> bool:
        """Whether all rows have the same length, so that none is padded."""
        return len(set(self.lengths)) == 1

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def _visible(self, num: int) -> int:
        """How many held indices below `end` the next `num` tokens may see."""
        raise NotImplementedError

    def append(self, new: list[mx.array]) -> int:
        """Write `new` behind `end`; gives the index where what the new tokens may see begins."""
        num = new[0].shape[2]
        keep = self._visible(num)
        self._make_space(new, keep, num)
        for i, entries in enumerate(new):
            self.planes[i][..., self.end : self.end + num, :] = entries
        self._last_low = self.end - keep
        self.end += num
        self.held = min(self.held + num, self.end)
        return self._last_low

    def extend(self, entries: list[mx.array]) -> None:
        """Append entries that were computed before, to one row: ``(1, heads, n, width)`` for each plane."""
        num = entries[0].shape[2]
        self.append(entries)
        self.lengths = [length + num for length in self.lengths]

    def make_plane(self, like: mx.array) -> mx.array:
        """Make the next plane of this fresh layer, which is reserved: without entries, of the shape of `like`."""
        assert self.end == 0 and len(self.planes) < self.num_planes
        plane = mx.zeros((*like.shape[:2], rounded(self._reserved_capacity()), like.shape[3]), dtype=like.dtype)
        self.planes.append(plane)
        return plane

    def capacity_for(self, num: int) -> int:
        """How many entries of each row the buffers will hold once `num` more have been appended."""
        keep = self._visible(num)
        if self._has_space(keep, num):
            return self.capacity
        reserved = self._reserved_capacity()
        # Beyond what was foreseen, and so as not to do it again soon, with room to spare.
        return rounded(reserved if keep + num <= reserved else keep + num + self._slack(keep + num))

    @property
    def capacity(self) -> int:
        """How many entries of each row the buffers hold, filled or not."""
        return self.planes[0].shape[2] if self.planes else 0

    def _has_space(self, keep: int, num: int) -> bool:
        return len(self.planes) > 0 and self.end + num <= self.capacity and not self._is_wasteful(keep, num)

    def _make_space(self, like: list[mx.array], keep: int, num: int) -> None:
        if self._has_space(keep, num):
            return
        total = self.capacity_for(num)
        if not self.planes:
            self.planes = [mx.zeros((*p.shape[:2], total, p.shape[3]), dtype=p.dtype) for p in like]
            return
        grown: list[mx.array] = []
        for plane in self.planes:
            room = mx.zeros((*plane.shape[:2], total - keep, plane.shape[3]), dtype=plane.dtype)
            grown.append(mx.concatenate([plane[..., self.end - keep : self.end, :], room], axis=2))
        # Now, and not with the rest of the pass: there the old buffers of all layers would wait beside the new ones.
        mx.eval(grown)
        self.planes = grown
        self.end = self.held = keep

    def _slack(self, length: int) -> int:
        return room(length)

    def _reserved_capacity(self) -> int:
        return 0

    def _is_wasteful(self, keep: int, num: int) -> bool:
        return False

    def forget_last(self, num: int) -> None:
        """Undo what was appended last: `num` entries of each row, all of one pass."""
        self.end -= num
        self.held -= num
        self.lengths = [length - num for length in self.lengths]

    def index(self, row: int, position: int) -> int:
        """Where the entry of this row's `position` stands in the buffers."""
        return self.end - (self.lengths[row] - position)

    def read(self, row: int, span: Span) -> list[mx.array]:
        """The entries of `span`, one array of shape ``(1, heads, length, width)`` for each plane; views, not copies."""
        return [self._cut(plane, row, span) for plane in self.planes]

    def words(self, row: int, span: Span) -> list[mx.array]:
        """As `read`, but as words (`reprise.engine.columns`)."""
        return [self._cut(as_words(plane), row, span) for plane in self.planes]

    def _cut(self, plane: mx.array, row: int, span: Span) -> mx.array:
        low, high = self.index(row, span.start), self.index(row, span.stop)
        assert max(0, self.end - self.held) <= low <= high <= self.end, (self, row, span)
        return plane[row : row + 1, :, low:high, :]

    def load_sizes(self, spans: Sequence[Span], position: int) -> list[tuple[int, int]]:
        """The buffers that `load` takes for each plane, to stand at `position` with the entries of `spans`.

        For each how many entries, and how many more it has room for; together they have the entries in order.
        """
        held = sum(map(len, spans))
        total = rounded(max(held + min(STEP, self._slack(held)), self._reserved_capacity()))
        return [(held, total - held)]

    def load(self, buffers: Sequence[Sequence[mx.array]], held: int, position: int) -> None:
        """Make this (fresh) layer stand at `position` with these buffers, each with all planes: see `load_sizes`.

        `held`: the entries of the last one.
        """
        self.planes = list(buffers[-1])
        self.end = self.held = held
        self.lengths = [position]

    # SequenceBatch.

    @staticmethod
    def capacity_joined(layers: Sequence["KvLayer"], num: int) -> int:
        """How many entries of each row the buffers will hold when `layers` have joined and taken `num` more."""
        held, joined = layers[0]._joined(layers)
        return joined if held + num <= joined else rounded(held + num + layers[0]._slack(held + num))

    def _joined(self, layers: Sequence["KvLayer"]) -> tuple[int, int]:
        """The entries of each row when `layers` have joined, and the capacity: for as many more as are to come."""
        held = max(layer._visible(1) for layer in layers)
        to_come = max(layer._reserved_capacity() - layer._visible(1) for layer in layers)
        return held, rounded(held + (to_come if to_come > 0 else self._slack(held)))

    def take(self, row: int) -> None:
        """Keep this row only, in buffers of its own."""
        low = max(self.index(row, 0), self.end - self.held)
        held = self.end - low
        room = STEP - held % STEP
        self.planes = [
            mx.concatenate(
                [p[row : row + 1, :, low : self.end, :], mx.zeros((1, p.shape[1], room, p.shape[3]), p.dtype)], axis=2
            )
            for p in self.planes
        ]
        # A layer at a time, here and below: the old buffers of one are gone before those of the next are copied.
        mx.eval(self.planes)
        self.end = self.held = held
        self.lengths, self.reserved = [self.lengths[row]], [self.reserved[row]]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        picked = mx.array(list(rows))
        lengths = [self.lengths[row] for row in rows]
        held = min(self.held, max(lengths))
        low = self.end - held
        self.planes = [p[:, :, low:, :][picked] for p in self.planes]
        mx.eval(self.planes)
        self.end = self.held = held
        self.lengths, self.reserved = lengths, [self.reserved[row] for row in rows]

    def join(self, others: Sequence["KvLayer"]) -> None:
        """Add the rows of `others` behind these, padded on the left to the longest. The others have nothing then."""
        layers = [self, *others]
        held, capacity = self._joined(layers)
        num_rows = sum(layer.num_rows for layer in layers)
        joined: list[mx.array] = []
        for i, like in enumerate(self.planes):
            plane = mx.zeros((num_rows, like.shape[1], capacity, like.shape[3]), dtype=like.dtype)
            row = 0
            for layer in layers:
                have = layer._visible(1)
                view = layer.planes[i][:, :, layer.end - have : layer.end, :]
                plane[row : row + layer.num_rows, :, held - have : held, :] = view
                row += layer.num_rows
                assert layer.planes[i].dtype == like.dtype
            joined.append(plane)
        self.lengths = [length for layer in layers for length in layer.lengths]
        self.reserved = [length for layer in layers for length in layer.reserved]
        for layer in others:
            layer.planes = []
        self.planes = joined
        mx.eval(self.planes)
        self.end = self.held = held


class FullLayer(KvLayer):
    """Full attention: every token sees all before it."""

    kind = Full()

    def _visible(self, num: int) -> int:
        return max(self.lengths)

    def _reserved_capacity(self) -> int:
        # Rows end at the same index: the longest that are held, and as many as the one that has most to come.
        to_come = (reserved - length for reserved, length in zip(self.reserved, self.lengths, strict=True))
        return max(self.lengths) + max(to_come)

    def rewind(self, position: int) -> None:
        """Take the one row back to `position`; what is behind it will be overwritten."""
        assert self.num_rows == 1 and position <= self.lengths[0] and self.end == self.lengths[0], position
        self.end = self.held = position
        self.lengths = [position]

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """The mask for the next N tokens, in the forms that mlx-lm's models take (array, "causal" or None)."""
        longest = max(self.lengths)
        if not self.is_even:
            padding = mx.array([longest - length for length in self.lengths])
            return create_causal_mask(N, longest, window_size=window_size, left_padding=padding)
        if window_size is not None and longest + N > window_size:
            return create_causal_mask(N, longest, window_size=window_size)
        if N == 1:
            # Also where an array is asked for: mlx-lm's own caches give none, and some models count on that.
            return None
        return create_causal_mask(N, longest, window_size=window_size) if return_array else "causal"


class QuantizedLayer(FullLayer):
    """Full attention over quantised entries (`mx.quantize`, affine). Six planes: words, scales, biases, twice."""

    num_planes = 6

    def __init__(self, *, bits: int, group_size: int) -> None:
        super().__init__()
        self.bits = bits
        self.group_size = group_size

    def update_and_fetch(self, keys: mx.array, values: mx.array):  # type: ignore[override]
        num = keys.shape[2]
        new = [
            *mx.quantize(keys, group_size=self.group_size, bits=self.bits),
            *mx.quantize(values, group_size=self.group_size, bits=self.bits),
        ]
        self.append(new)
        self.lengths = [length + num for length in self.lengths]
        return self.keys_and_values()

    def keys_and_values(self):  # type: ignore[override]
        views = [plane[..., self._last_low : self.end, :] for plane in self.planes]
        return tuple(views[:3]), tuple(views[3:])


class StateLayer(ArraysCache):
    """Recurrent state: arrays with one row for each sequence. mlx-lm's class, with rows that join and leave.

    It derives from `ArraysCache` because some models ask for that class by name.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)

    @property
    def arrays(self) -> list[mx.array | None]:
        return self.cache

    @arrays.setter
    def arrays(self, value: list[mx.array | None]) -> None:
        self.cache = value

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.cache if array is not None)

    def take(self, row: int) -> None:
        """Keep this row only, in arrays of its own."""
        self.cache = [None if a is None else mx.array(a[row : row + 1]) for a in self.cache]

    def keep_rows(self, rows: Sequence[int]) -> None:
        picked = mx.array(list(rows))
        self.cache = [None if a is None else a[picked] for a in self.cache]

    def join(self, others: Sequence["StateLayer"]) -> None:
        """Add the rows of `others` behind these. All are fresh, or none is."""
        columns = zip(self.cache, *(other.cache for other in others), strict=True)
        joined: list[mx.array | None] = []
        for column in columns:
            present = [a for a in column if a is not None]
            assert len(present) in (0, len(column)), "fresh rows join fresh rows only"
            joined.append(mx.concatenate(present, axis=0) if present else None)
        self.cache = joined
