"""Layers with limited attention: sliding windows and chunks. Entries out of reach are dropped.

Rows, buffers and the interface with mlx-lm's models are those of `reprise.engine.states.layers`.
"""

# ruff: noqa: N803 -- the name of the argument is part of the contract.

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from reprise.core.kinds import Chunk, Window
from reprise.core.tokens import Span
from reprise.engine.states.layers import STEP, KvLayer


def slack_of(size: int) -> int:
    """Spare entries of a buffer of which no more than about `size` are seen."""
    return max(64, min(size, STEP))


class WindowLayer(KvLayer):
    """Sliding window: a token sees the last `size` positions, itself included.

    The buffer is in temporal order: entries are appended, and the oldest dropped when it is full.
    """

    def __init__(self, kind: Window) -> None:
        super().__init__()
        assert kind.keep == 0, "a window with sinks is a SinkWindowLayer"
        self.kind = self.window = kind

    def _visible(self, num: int) -> int:
        rows = zip(self.behind or [0] * self.num_rows, self.lengths, strict=True)
        return min(self.held, max(num_behind + min(length, self.window.size - 1) for num_behind, length in rows))

    def _slack(self, length: int) -> int:
        return slack_of(self.window.size)

    def _is_wasteful(self, keep: int, num: int) -> bool:
        # After a long prefill chunk the buffer is larger than decode needs.
        return num == 1 and self.planes[0].shape[2] > 2 * (self.window.size + self._slack(0)) + STEP

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """The mask for the next N tokens over what `update_and_fetch` will return."""
        window = min(window_size if window_size is not None else self.window.size, self.window.size)
        seen = self._visible(N)
        if self.is_padded or any(self.blocks):
            return self.with_blocks(self._mask(N, seen=seen, window=window), N, seen=seen, window=window)
        if seen + N > window and (N > 1 or window < self.window.size):
            return create_causal_mask(N, seen, window_size=window)
        if N == 1:
            return None
        return create_causal_mask(N, seen, window_size=window) if return_array else "causal"


class SinkWindowLayer(KvLayer):
    """Sliding window of `size` positions that always include the first `keep` (attention sinks). One row at a time.

    mlx-lm's `RotatingKVCache(keep=…)` masks by buffer index, so there the result depends on how the prompt was chunked.
    Here it depends on positions only: ``[0, keep)`` and the last ``size - keep``, as in its decode.
    """

    def __init__(self, kind: Window) -> None:
        super().__init__()
        self.kind = self.window = kind
        self.sinks: list[mx.array] = []

    def _first(self) -> int:
        """The position of the oldest entry in the buffer."""
        return self.lengths[0] - self.held

    def _visible(self, num: int) -> int:
        recent = min(self.held, self.window.recent - 1)
        # Until the window has moved past the sinks, the buffer includes them.
        return self.held if self.lengths[0] - recent <= self.window.keep else recent

    def _slack(self, length: int) -> int:
        return slack_of(self.window.size)

    def growth_for(self, num: int) -> int:
        # Sinks are copied into buffers of their own.
        keep = self.window.keep
        copied = keep if not self.sinks and self._first() == 0 and self.held + num >= keep else 0
        return copied + super().growth_for(num)

    def append(self, new: list[mx.array]) -> int:
        is_whole = self._first() == 0
        low = super().append(new)
        keep, start = self.window.keep, self.end - self.held
        if not self.sinks and is_whole and self.held >= keep:
            self.sinks = [mx.array(plane[..., start : start + keep, :]) for plane in self.planes]
        return low

    def undo_last(self, num: int | Sequence[int]) -> None:
        super().undo_last(num)
        if self.lengths[0] < self.window.keep:
            # One of the sinks was undone: collect them again later.
            self.sinks = []

    def _shown_sinks(self) -> bool:
        return bool(self.sinks) and self.lengths[0] - self._visible(0) > self.window.keep

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._show = self._shown_sinks()
        super().update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        seen_keys, seen_values = super().keys_and_values()
        if not self._show:
            return seen_keys, seen_values
        return (
            mx.concatenate([self.sinks[0], seen_keys], axis=2),
            mx.concatenate([self.sinks[1], seen_values], axis=2),
        )

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        at, keep = self.lengths[0], self.window.keep
        seen = self._visible(N)
        shows = self._shown_sinks()
        query = mx.arange(at, at + N)[:, None]
        key = mx.arange(at - seen, at + N)[None]
        mask = (key <= query) & ((key > query - self.window.recent) | (key < keep))
        if shows:
            mask = mx.concatenate([mx.ones((N, keep), dtype=mx.bool_), mask], axis=1)
        return mask

    def read(self, row: int, span: Span) -> list[mx.array]:
        first = self._first()
        if span.start >= first:
            return super().read(row, span)
        kept = [plane[..., span.start : min(span.stop, self.window.keep), :] for plane in self.sinks]
        if span.stop <= self.window.keep:
            return kept
        rest = super().read(row, Span(self.window.keep, span.stop))
        return [mx.concatenate(pair, axis=2) for pair in zip(kept, rest, strict=True)]

    def load_sizes(self, spans: Sequence[Span], position: int) -> list[tuple[int, int]]:
        """See `KvLayer.load_sizes`; the sinks may be separate spans before the rest."""
        if self.window.needs(position) == (Span(0, position),):
            return super().load_sizes(spans, position)
        kept = [span for span in spans if span.stop <= self.window.keep]
        return [(sum(map(len, kept)), 0), *super().load_sizes(spans[len(kept) :], position)]

    def load(self, buffers: Sequence[Sequence[mx.array]], held: int, position: int) -> None:
        super().load(buffers, held, position)
        if len(buffers) > 1:
            self.sinks = list(buffers[0])

    @property
    def state(self) -> list[mx.array]:
        return [*self.planes, *self.sinks]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)


class ChunkLayer(KvLayer):
    """Attention within chunks of `size` positions (llama4). One row at a time.

    The model masks by absolute position over ``[start_position, offset + N)`` and calls `maybe_trim_front` before each
    step, which drops what is before the current chunk.
    """

    def __init__(self, kind: Chunk) -> None:
        super().__init__()
        self.kind = kind
        self.chunk_size = kind.size
        self.start_position = 0
        self._kept = (0, 0)
        """Where in the buffers, and at which position, what `keep_visible` keeps begins."""

    def maybe_trim_front(self) -> None:
        at = self.lengths[0]
        self.start_position = max(self.start_position, self.chunk_size * (at // self.chunk_size))
        self.held = min(self.held, at - self.start_position)

    def _visible(self, num: int) -> int:
        return self.lengths[0] - self.start_position

    def _slack(self, length: int) -> int:
        return slack_of(self.chunk_size)

    def keep_visible(self, num: int) -> None:
        super().keep_visible(num)
        self._kept = self.end - self._visible(num), self.start_position

    def undo_last(self, num: int | Sequence[int]) -> None:
        super().undo_last(num)
        if self.lengths[0] < self.start_position:
            # A chunk began among what is undone: the one before it is seen again.
            low, self.start_position = self._kept
            self.held = self.end - low

    def load(self, buffers: Sequence[Sequence[mx.array]], held: int, position: int) -> None:
        super().load(buffers, held, position)
        self.start_position = position - self.held
