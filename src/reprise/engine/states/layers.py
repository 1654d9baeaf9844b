"""The live layer states that a model works on, for a batch of one or more sequences (rows).

They implement the small interface that the models of mlx-lm and mlx-vlm use: `update_and_fetch`, `offset` and
`make_mask` of attention layers (`tests/engine/test_contract.py`, `tests/vision/test_vlm_contract.py` notice a change).
Rows are right-aligned: row i of length n_i occupies the buffer indices ``[end - n_i, end)``, so all rows append at
`end`; indices before are padding and are masked. Rows of which different numbers of tokens were undone end `behind`
each other instead, and go on there, each written apart, until they are copied.

Buffers have shape ``(rows, heads, capacity, width)``, one per plane (keys and values; for quantised entries the words,
scales and biases of each).

This module has the base class, full attention, and recurrent state (one row per sequence, without padding; models use
`[i]`, `make_mask`, `lengths` and `advance`, mlx-vlm's also `update_window` and `update_recurrent`); `windows.py` beside
it has layers that drop what no token will see again.
"""

# ruff: noqa: N803 -- the name of the argument is part of the contract.

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache

from reprise.core.failpoints import Failpoint, reach
from reprise.core.kinds import Full, KvKind
from reprise.core.tokens import Span
from reprise.engine.states.payloads import as_words

STEP = 256
"""Buffer capacities are multiples of this many entries."""
_MOST_ROOM = 4096
_MOST_RECENT = 64
"""Tokens of a pass, part of which may have to be undone."""
MOST_WAITING = 256
"""Tokens that a head may follow later, all in one pass: on most devices that costs little more than one of them. Until
then, passes over one token are as fast as without a head. Each waits with a hidden state, of some kilobytes."""


def room(length: int) -> int:
    """Spare entries to allocate: a sixteenth of the length, so that copying stays linear, between 256 and 4,096."""
    return max(STEP, min(_MOST_ROOM, length // 16))


def rounded(length: int) -> int:
    """The capacity of a buffer for at least `length` entries."""
    return -(-length // STEP) * STEP


class KvLayer:
    """Entries of one attention layer. Subclasses define what a token sees and what may be dropped."""

    kind: KvKind
    num_planes = 2

    def __init__(self) -> None:
        self.planes: list[mx.array] = []
        self.end = 0
        """Where the row that reaches farthest ends."""
        self.behind: Sequence[int] = ()
        """By how much each row ends before `end`; empty: all end there."""
        self.held = 0
        """Number of indices below `end` that hold entries (or padding of shorter rows)."""
        self.lengths: list[int] = [0]
        """Position of each row: tokens seen, whether or not their entries are still held."""
        self.reserved: list[int] = [0]
        """The position that each row is expected to reach: buffers are allocated for it at once."""
        self.blocks: Sequence[Sequence[Span]] = ()
        """During a pass, of each row: the positions whose tokens see each other both ways, all within the pass."""
        self.is_told = False
        """Whether the model is told where tokens stand, and reads of `offset` only how long a mask may be."""
        self._offsets: tuple[list[int], mx.array] | None = None

    # The interface that mlx-lm's models use.

    @property
    def offset(self) -> int | mx.array:
        """The position of the next token: an int if all rows agree, otherwise an array of shape ``(rows,)``."""
        # Models that are told positions cut masks to the longest row, which may be behind others.
        behind = max(self.behind, default=0) if self.is_told else 0
        if self.is_even:
            return self.lengths[0] + behind
        # Used several times per pass.
        if self._offsets is None or self._offsets[0] is not self.lengths:
            self._offsets = (self.lengths, mx.array(self.lengths) + behind)
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
        """Append entries of shape ``(rows, heads, n, width)``; returns all entries that these n tokens may see."""
        num = keys.shape[2]
        low = self.append([keys, values])
        self.lengths = [length + num for length in self.lengths]
        return self._from(low)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The result of the last update, for layers that share this one's entries."""
        return self._from(self._last_low)

    def seen_next(self) -> tuple[mx.array, mx.array]:
        """What the next token of a single row will see beside itself, in the form of `keys_and_values`."""
        assert self.num_rows == 1, self.num_rows
        return self._from(self.end - self._visible(1))

    def _from(self, low: int) -> tuple[mx.array, mx.array]:
        return self.planes[0][..., low : self.end, :], self.planes[1][..., low : self.end, :]

    def reserve(self, length: int) -> None:
        """Expect all rows to reach this position."""
        self.reserved = [length] * self.num_rows

    def with_blocks(self, mask: mx.array, num: int, *, seen: int, window: int | None) -> mx.array:
        """A mask of the next `num` tokens over `seen` entries and themselves, where a block sees all of itself.

        `window`: as far back as a token sees.
        """
        if not any(self.blocks):
            return mask
        added = np.zeros((self.num_rows, 1, num, seen + num), dtype=np.bool_)
        for row, (blocks, low) in enumerate(zip(self.blocks, self.lengths, strict=True)):
            for block in blocks:
                assert low <= block.start and block.stop <= low + num, "a pass holds an image whole"
                at = np.arange(block.start - low, block.stop - low)
                is_near = True if window is None else at[None] > at[:, None] - window
                added[row, 0, at[:, None], seen + at[None]] = is_near
        return mask | mx.array(added)

    # Storage.

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def is_even(self) -> bool:
        """Whether all rows have the same length, without padding."""
        return len(set(self.lengths)) == 1

    @property
    def is_padded(self) -> bool:
        """Whether some indices are entries of one row and not of another."""
        return len(self.behind) > 0 or not self.is_even

    @property
    def _ends(self) -> list[int]:
        """The index behind the last entry of each row."""
        return [self.end - num for num in self.behind or [0] * self.num_rows]

    @property
    def nbytes(self) -> int:
        # A list, here and below: asked for in each step, and a generator is entered once for each plane.
        return sum([plane.nbytes for plane in self.planes])

    def _mask(self, num: int, *, seen: int, window: int | None) -> mx.array:
        """Of the next `num` tokens over the `seen` indices before `end` and behind: each row sees its own entries."""
        low = self.end - seen
        stops = mx.array(self._ends)[:, None, None, None]
        query, key = stops + mx.arange(num)[:, None], mx.arange(low, self.end + num)
        mask = (key <= query) & (key >= stops - mx.array(self.lengths)[:, None, None, None])
        return mask if window is None else mask & (key > query - window)

    def _visible(self, num: int) -> int:
        """Number of indices below `end` that the next `num` tokens may see."""
        raise NotImplementedError

    def append(self, new: list[mx.array]) -> int:
        """Write `new` at `end`; returns the first index that the new tokens may see."""
        num = new[0].shape[2]
        keep = self._visible(num)
        self._make_space(new, keep, num)
        for i, entries in enumerate(new):
            for rows, at in self._parts():
                self.planes[i][rows, :, at : at + num, :] = entries[rows]
        self._last_low = self.end - keep
        self.end += num
        self.held = min(self.held + num, self.end)
        return self._last_low

    def extend(self, entries: list[mx.array]) -> None:
        """Append entries of n tokens: ``(rows, heads, n, width)`` for each plane."""
        num = entries[0].shape[2]
        self.append(entries)
        self.lengths = [length + num for length in self.lengths]

    def make_plane(self, like: mx.array) -> mx.array:
        """Allocate the next plane of this empty layer at its reserved capacity, shaped like `like`."""
        assert self.end == 0 and len(self.planes) < self.num_planes
        plane = mx.zeros((*like.shape[:2], rounded(self._reserved_capacity()), like.shape[3]), dtype=like.dtype)
        self.planes.append(plane)
        return plane

    def capacity_for(self, num: int) -> int:
        """The buffers' capacity per row after `num` more entries have been appended."""
        keep = self._visible(num)
        if self._has_space(keep, num):
            return self.capacity
        reserved = self._reserved_capacity()
        # Beyond the reservation, with spare room.
        return rounded(reserved if keep + num <= reserved else keep + num + self._slack(keep + num))

    def growth_for(self, num: int) -> int:
        """Entries per row by which the buffers grow when `num` more are appended."""
        return self.capacity_for(num) - self.capacity

    @property
    def capacity(self) -> int:
        """Entries per row that the buffers have room for."""
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
        # Evaluate now: otherwise the old and the new buffers of all layers would be in memory together.
        mx.eval(grown)
        self.planes = grown
        self.end = self.held = keep

    def _slack(self, length: int) -> int:
        return room(length)

    def _reserved_capacity(self) -> int:
        return 0

    def _is_wasteful(self, keep: int, num: int) -> bool:
        return False

    def keep_visible(self, num: int) -> None:
        """Have room for `num` more tokens, so that nothing that is seen now is dropped while they come, one by one.

        `undo_last` may undo them then, over several passes.
        """
        for more in (1, num):
            self._make_space(self.planes, self._visible(more), more)

    def undo_last(self, num: int | Sequence[int]) -> None:
        """Undo the last `num` entries, of all rows or of each, all of one pass or appended after `keep_visible`."""
        nums = [num] * self.num_rows if isinstance(num, int) else num
        ends = [end - num for end, num in zip(self._ends, nums, strict=True)]
        self.held -= self.end - max(ends)
        self.end = max(ends)
        self.behind = [self.end - end for end in ends] if min(ends) < self.end else ()
        self.lengths = [length - num for length, num in zip(self.lengths, nums, strict=True)]

    def index(self, row: int, position: int) -> int:
        """The buffer index of this row's entry at `position`."""
        return self._ends[row] - (self.lengths[row] - position)

    def read(self, row: int, span: Span) -> list[mx.array]:
        """The entries of `span`: per plane, a view of shape ``(1, heads, length, width)``."""
        return [self._cut(plane, row, span) for plane in self.planes]

    def words(self, row: int, span: Span) -> list[mx.array]:
        """Like `read`, as words (`reprise.engine.states.payloads`)."""
        return [self._cut(as_words(plane), row, span) for plane in self.planes]

    def _cut(self, plane: mx.array, row: int, span: Span) -> mx.array:
        low, high = self.index(row, span.start), self.index(row, span.stop)
        assert max(0, self.end - self.held) <= low <= high <= self.end, (self, row, span)
        return plane[row : row + 1, :, low:high, :]

    def load_sizes(self, spans: Sequence[Span], position: int) -> list[tuple[int, int]]:
        """The buffers that `load` needs per plane to be at `position` with the entries of `spans`.

        For each buffer, its number of entries and its room for more; together they have the entries in order.
        """
        held = sum(map(len, spans))
        total = rounded(max(held + min(STEP, self._slack(held)), self._reserved_capacity()))
        return [(held, total - held)]

    def load(self, buffers: Sequence[Sequence[mx.array]], held: int, position: int) -> None:
        """Put this empty layer at `position` with these buffers (see `load_sizes`), each with all planes.

        `held`: the number of entries in the last one.
        """
        self.planes = list(buffers[-1])
        self.end = self.held = held
        self.lengths = [position]

    # Batching.

    @staticmethod
    def capacity_joined(layers: Sequence["KvLayer"], num: int) -> int:
        """The capacity per row after `layers` were joined and `num` more entries appended."""
        held, joined = layers[0]._joined(layers)
        return joined if held + num <= joined else rounded(held + num + layers[0]._slack(held + num))

    def _joined(self, layers: Sequence["KvLayer"]) -> tuple[int, int]:
        """The entries per row after `layers` were joined, and the capacity, which includes their reservations."""
        held = max(layer._visible(1) for layer in layers)
        to_come = max(layer._reserved_capacity() - layer._visible(1) for layer in layers)
        return held, rounded(held + (to_come if to_come > 0 else self._slack(held)))

    def _parts(self) -> list[tuple[slice, int]]:
        """Rows that end together, and where."""
        if not self.behind:
            return [(slice(None), self.end)]
        return [(slice(row, row + 1), end) for row, end in enumerate(self._ends)]

    def take(self, row: int) -> None:
        """Keep only this row, in new buffers."""
        low, end = max(self.index(row, 0), self.end - self.held), self._ends[row]
        held = end - low
        room = STEP - held % STEP
        self.planes = [
            mx.concatenate(
                [p[row : row + 1, :, low:end, :], mx.zeros((1, p.shape[1], room, p.shape[3]), p.dtype)], axis=2
            )
            for p in self.planes
        ]
        # Layer by layer, here and below: free the old buffers of one before copying the next.
        mx.eval(self.planes)
        self.end = self.held = held
        self.behind = ()
        self.lengths, self.reserved = [self.lengths[row]], [self.reserved[row]]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        picked = mx.array(list(rows))
        ends, lengths = [self._ends[row] for row in rows], [self.lengths[row] for row in rows]
        end = max(ends)
        held = min(self.held - (self.end - end), max(end - at + n for at, n in zip(ends, lengths, strict=True)))
        low = end - held
        self.planes = [p[:, :, low:, :][picked] for p in self.planes]
        mx.eval(self.planes)
        self.end = self.held = held
        self.behind = [end - at for at in ends] if min(ends) < end else ()
        self.lengths, self.reserved = lengths, [self.reserved[row] for row in rows]

    def join(self, others: Sequence["KvLayer"]) -> None:
        """Append the rows of `others`, padded on the left to the longest. The others are empty afterwards."""
        layers = [self, *others]
        held, capacity = self._joined(layers)
        num_rows = sum(layer.num_rows for layer in layers)
        joined: list[mx.array] = []
        for i, like in enumerate(self.planes):
            plane = mx.zeros((num_rows, like.shape[1], capacity, like.shape[3]), dtype=like.dtype)
            row = 0
            for layer in layers:
                have = layer._visible(1)
                for rows, end in layer._parts():
                    # Of a row that ends behind others, what is before its entries is left out.
                    more = min(have, end)
                    view = layer.planes[i][rows, :, end - more : end, :]
                    plane[row : row + view.shape[0], :, held - more : held, :] = view
                    row += view.shape[0]
                assert layer.planes[i].dtype == like.dtype
            joined.append(plane)
        self.lengths = [length for layer in layers for length in layer.lengths]
        self.reserved = [length for layer in layers for length in layer.reserved]
        for layer in others:
            layer.planes = []
        self.planes = joined
        mx.eval(self.planes)
        self.end = self.held = held
        self.behind = ()
        reach(Failpoint.JOINED, self)


class FullLayer(KvLayer):
    """Full attention: every token sees all tokens before it."""

    kind = Full()
    hides_first = False
    """Whether no later token sees the entry of the first one: a head's, which stands behind no hidden state."""
    num_unwritten = 0
    """The last entries, of a head, that are written later, in their place."""

    def _visible(self, num: int) -> int:
        if not self.behind:
            return max(self.lengths)
        return max(num_behind + length for num_behind, length in zip(self.behind, self.lengths, strict=True))

    @property
    def _skips_first(self) -> bool:
        # Nobody asks what a head says in other passes, and its entries, of one layer, do not depend on what it sees.
        return self.hides_first and not self.is_padded and self.lengths[0] > 0

    def append(self, new: list[mx.array]) -> int:
        assert self.num_unwritten == 0, "entries are written in their order"
        self._last_low = super().append(new) + int(self._skips_first)
        return self._last_low

    def growth_for(self, num: int) -> int:
        # Asked for in each step, and mostly there is room.
        return 0 if self.planes and self.end + num <= self.planes[0].shape[2] else super().growth_for(num)

    def leave_unwritten(self) -> None:
        """Be one token further; its entries are written later: `undo_last`, and then append them."""
        if self.end == self.capacity:
            self._make_space(self.planes, self._visible(1), 1)
        self.end += 1
        self.held += 1
        self.lengths = [length + 1 for length in self.lengths]
        self.num_unwritten += 1

    def undo_last(self, num: int | Sequence[int]) -> None:
        super().undo_last(num)
        nums = [num] if isinstance(num, int) else num
        assert self.num_unwritten == 0 or len(set(nums)) == 1, "rows of which different numbers go are written before"
        self.num_unwritten = max(0, self.num_unwritten - nums[0])

    def _cut(self, plane: mx.array, row: int, span: Span) -> mx.array:
        assert span.stop <= self.lengths[row] - self.num_unwritten, "entries are written before they are read"
        return super()._cut(plane, row, span)

    def _reserved_capacity(self) -> int:
        # Rows end at the same index: the longest row, plus the largest number of entries any row is still to get.
        to_come = (reserved - length for reserved, length in zip(self.reserved, self.lengths, strict=True))
        return self._visible(0) + max(to_come)

    def rewind(self, position: int) -> None:
        """Rewind the single row to `position`; entries past it will be overwritten."""
        assert self.num_rows == 1 and self.end == self.lengths[0], position
        assert position <= self.end - self.num_unwritten, position
        self.end = self.held = position
        self.lengths = [position]
        self.num_unwritten = 0

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """The mask for the next N tokens, in a form that mlx-lm's models accept (array, "causal" or None)."""
        longest = self._visible(N)
        if self._skips_first:
            longest -= 1
        if self.is_padded or any(self.blocks):
            mask = self._mask(N, seen=longest, window=window_size)
            return self.with_blocks(mask, N, seen=longest, window=window_size)
        if window_size is not None and longest + N > window_size:
            return create_causal_mask(N, longest, window_size=window_size)
        if N == 1:
            # Even if an array is requested: mlx-lm's caches return None, and some models rely on that.
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
        pair = (mx.quantize(each, group_size=self.group_size, bits=self.bits) for each in (keys, values))
        self.extend([plane for planes in pair for plane in planes])
        return self.keys_and_values()

    def _from(self, low: int):  # type: ignore[override]
        views = [plane[..., low : self.end, :] for plane in self.planes]
        return tuple(views[:3]), tuple(views[3:])


class StateLayer(ArraysCache):
    """Recurrent state: arrays with one row per sequence, which can join and leave.

    Derives from `ArraysCache` because some models check for that class.
    """

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.cache if array is not None)

    def update_window(self, index: int, source: mx.array, width: int, *, lengths: mx.array | None = None) -> mx.array:
        """Keep the last `width` inputs of a convolution, as mlx-vlm's recurrent layers write them."""
        assert lengths is None, "rows of recurrent layers are never padded"
        # A copy: a view would keep all of the pass's inputs.
        kept = mx.contiguous(source[:, source.shape[1] - width :])
        self.cache[index] = kept
        return kept

    def update_recurrent(
        self, index: int, length: int, update: Callable[[mx.array | None, int | None], tuple[mx.array, ...]]
    ) -> tuple[mx.array, mx.array]:
        """Run mlx-vlm's `update` over `length` tokens: from the state to an output and the next state."""
        del length
        output, state = update(self.cache[index], None)[:2]
        self.cache[index] = state
        return output, state

    def undo_last(self, nums: Sequence[int], before: Sequence[mx.array | None]) -> None:
        """Undo the last pass where the number of a row is not 0; `before`: the arrays before that."""
        if all(nums):
            self.cache = list(before)
            return
        undone = mx.array([num > 0 for num in nums])
        pairs = list(zip(before, self.cache, strict=True))
        assert all((old is None) == (new is None) for old, new in pairs), "rows that go on have state"
        self.cache = [
            None if old is None or new is None else mx.where(undone.reshape(-1, *[1] * (new.ndim - 1)), old, new)
            for old, new in pairs
        ]

    def take(self, row: int) -> None:
        """Keep only this row, in new arrays."""
        self.cache = [None if a is None else mx.array(a[row : row + 1]) for a in self.cache]

    def keep_rows(self, rows: Sequence[int]) -> None:
        picked = mx.array(list(rows))
        self.cache = [None if a is None else a[picked] for a in self.cache]

    def join(self, others: Sequence["StateLayer"]) -> None:
        """Append the rows of `others`. Either all are empty, or none is."""
        columns = zip(self.cache, *(other.cache for other in others), strict=True)
        joined: list[mx.array | None] = []
        for column in columns:
            present = [a for a in column if a is not None]
            assert len(present) in (0, len(column)), "empty rows join only empty rows"
            joined.append(mx.concatenate(present, axis=0) if present else None)
        self.cache = joined


@dataclass(slots=True, eq=False)
class FollowedTokens:
    """Tokens that a head follows, shape ``(rows, n)``, and the hidden state before each, ``(rows, n, width)``.

    `positions`: where they stand, if the model has to be told.
    """

    tokens: mx.array
    hidden: mx.array
    positions: mx.array | None

    @staticmethod
    def joined(several: Sequence["FollowedTokens"]) -> "FollowedTokens":
        """All of these tokens, in this order."""
        positions = [each.positions for each in several if each.positions is not None]
        return FollowedTokens(
            mx.concatenate([each.tokens for each in several], axis=1),
            mx.concatenate([each.hidden for each in several], axis=1),
            mx.concatenate(positions, axis=-1) if positions else None,
        )


class HiddenLayer(StateLayer):
    """The model's hidden state behind the last token, shape ``(rows, 1, width)``, for its head.

    Unlike recurrent state it can be returned to any token of the last pass, whose hidden states are all kept for that.
    It also has what the head needs of the last tokens that were fed one by one, and whose entries it has not written.
    """

    def __init__(self, *, is_kept: bool) -> None:
        """`is_kept`: snapshots have it. If not, it is unknown after a restore, and zeros stand for it."""
        super().__init__(1)
        self.is_kept = is_kept
        self.num_rows = 1
        self.recent: mx.array | None = None
        """Of the last pass, if that was over few tokens."""
        self.waiting: list[FollowedTokens] = []
        """Of single tokens, whose entries `write_waiting` writes, given the head's layers and this one."""
        self.write_waiting: Callable[[Sequence[FullLayer], HiddenLayer], None] | None = None

    def follow(self, hidden: mx.array) -> mx.array:
        """The pass gave these hidden states, shape ``(rows, n, width)``: returns those before each of its tokens."""
        before = self.cache[0]
        if before is None:
            before = self.last(hidden)
        if hidden.shape[1] == 1:
            self.cache[0] = self.recent = hidden
            return before
        # A copy: a view would keep those of the whole pass.
        self.cache = [mx.contiguous(hidden[:, -1:])]
        self.recent = hidden if hidden.shape[1] <= _MOST_RECENT else None
        return mx.concatenate([before, hidden[:, :-1]], axis=1)

    def last(self, like: mx.array) -> mx.array:
        """The last hidden state; zeros of the width and dtype of `like` if it is unknown."""
        last = self.cache[0]
        return mx.zeros((self.num_rows, 1, like.shape[-1]), like.dtype) if last is None else last

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of what waits. Asked for in each step: every token takes the same."""
        if not self.waiting:
            return 0
        first = self.waiting[0]
        return len(self.waiting) * (first.tokens.nbytes + first.hidden.nbytes)

    def undo_waiting(self, num: int) -> None:
        """Undo the last `num` tokens, at least one, all of one pass: if they do not wait, none does."""
        del self.waiting[-num:]

    def undo_last(self, nums: Sequence[int], before: Sequence[mx.array | None]) -> None:
        """Undo the last tokens of the last pass, so many of each row; `before`: its arrays before that."""
        num = 0 if self.recent is None else self.recent.shape[1]
        if self.recent is None or min(nums) == num:
            super().undo_last(nums, before)
            return
        ends = [num - each for each in nums]
        first = before[0] if before[0] is not None else mx.zeros_like(self.recent[:, :1])
        known = mx.concatenate([first, self.recent], axis=1)
        self.cache = [mx.concatenate([known[row : row + 1, at : at + 1] for row, at in enumerate(ends)], axis=0)]
        self.recent = self.recent[:, : max(ends)] if len(set(ends)) == 1 else None

    def take(self, row: int) -> None:
        super().take(row)
        self.num_rows, self.recent = 1, None

    def keep_rows(self, rows: Sequence[int]) -> None:
        super().keep_rows(rows)
        self.num_rows, self.recent = len(rows), None

    def join(self, others: Sequence[StateLayer]) -> None:
        """Append the rows of `others`, also of those whose hidden state is unknown."""
        layers = [self, *(other for other in others if isinstance(other, HiddenLayer))]
        like = next((array for layer in layers for array in layer.cache if array is not None), None)
        if like is not None:
            self.cache = [mx.concatenate([layer.last(like) for layer in layers], axis=0)]
        self.num_rows, self.recent = sum(layer.num_rows for layer in layers), None


def is_saved(state: object) -> bool:
    """Whether snapshots have the state of this layer, as recurrent state."""
    return isinstance(state, StateLayer) and (not isinstance(state, HiddenLayer) or state.is_kept)
