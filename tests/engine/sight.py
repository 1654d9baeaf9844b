"""Who sees whom, by brute force: a layer under test beside plain lists of what each sequence was fed.

Every entry is a number that says of which sequence and position it is, so that what a layer gives to attention can be
read back: which entries, under which mask. What a token should see is said here by the layer kinds' definitions alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from reprise.core.kinds import Chunk, Full, KvKind, Window
from reprise.core.tokens import Span
from reprise.engine.states.layers import KvLayer, QuantizedLayer
from reprise.engine.states.windows import ChunkLayer

HEADS = 2
WIDTH = 32
"""Entries of one value each, as wide as a group of quantisation."""


def sees(kind: KvKind, token: int, other: int, window: int | None = None) -> bool:
    """Whether the token at position `token` sees the one at `other`; `window`: in a model that asks for less."""
    if other > token or (window is not None and other <= token - window):
        return False
    match kind:
        case Full():
            return True
        case Window(size=size, keep=keep):
            return other < keep or other > token - (size - keep)
        case Chunk(size=size):
            return other // size == token // size


@dataclass(eq=False)
class Story:
    """One sequence: the numbers of the entries that it was fed, by position."""

    entries: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.entries)


class Numbers:
    """Gives every entry a number of its own."""

    def __init__(self) -> None:
        self.last = 0

    def draw(self, num: int) -> list[int]:
        self.last += num
        return list(range(self.last - num + 1, self.last + 1))


def entries(rows: Sequence[Sequence[int]]) -> tuple[mx.array, mx.array]:
    """Keys and values of shape ``(rows, heads, n, width)``: head h of an entry holds its number plus h halves."""
    numbers = np.asarray(rows, dtype=np.float32)[:, None, :, None]
    heads = numbers + 0.5 * np.arange(HEADS, dtype=np.float32)[None, :, None, None]
    keys = np.broadcast_to(heads, (*heads.shape[:3], WIDTH))
    return mx.array(keys), mx.array(-keys)


def numbers_in(layer: KvLayer, fetched: Any) -> np.ndarray:
    """The numbers of keys or values as a layer gave them, shape ``(rows, n)``; 0 is padding. All heads must agree."""
    if isinstance(layer, QuantizedLayer):
        fetched = mx.dequantize(*fetched, group_size=layer.group_size, bits=layer.bits)
    heads = np.array(fetched)
    assert (heads == heads[..., :1]).all(), "an entry is torn"
    sign = -1 if heads.min(initial=0) < 0 else 1
    bare = sign * heads[..., 0] - 0.5 * np.arange(HEADS)[None, :, None]
    bare[np.broadcast_to((heads[..., 0] == 0).all(axis=1, keepdims=True), bare.shape)] = 0
    assert (bare == bare[:, :1]).all(), "heads are mixed up"
    return bare[:, 0].astype(np.int64)


def feed(
    layer: KvLayer,
    stories: Sequence[Story],
    fed: Sequence[Sequence[int]],
    *,
    window: int | None = None,
    blocks: Sequence[Sequence[Span]] = (),
) -> None:
    """Give a layer the next tokens of all its sequences, and check what each of them may see.

    `blocks`: of each sequence, the positions of images, which attend both ways.
    """
    num = len(fed[0])
    layer.blocks = blocks
    offsets = layer.offset
    assert [s.length for s in stories] == (
        [offsets] * len(stories) if isinstance(offsets, int) else np.array(offsets).tolist()
    )
    if isinstance(layer, ChunkLayer):
        layer.maybe_trim_front()
        mask: Any = _chunk_mask(layer, num)
    else:
        mask = layer.make_mask(num, window_size=window, return_array=layer.lengths[0] % 2 == 0)
    layer.blocks = ()
    keys, values = layer.update_and_fetch(*entries(fed))
    shown, values_shown = numbers_in(layer, keys), numbers_in(layer, values)
    assert (shown == values_shown).all(), "keys and values of different entries"
    assert (numbers_in(layer, layer.keys_and_values()[0]) == shown).all(), "another layer would get something else"
    visible = _visible(mask, rows=len(stories), num=num, seen=shown.shape[1])
    for row, story in enumerate(stories):
        story.entries.extend(fed[row])
        for i in range(num):
            at = story.length - num + i
            ahead = max(
                (block.stop for block in (blocks[row] if blocks else ()) if at in range(*_edges(block))), default=0
            )
            wanted = [e for p, e in enumerate(story.entries) if sees(layer.kind, at, p, window) or at < p < ahead]
            assert sorted(shown[row][visible[row, i]].tolist()) == sorted(wanted), (layer.kind, row, at)


def _edges(span: Span) -> tuple[int, int]:
    return span.start, span.stop


def _chunk_mask(layer: ChunkLayer, num: int) -> mx.array:
    """As llama4 makes it, from what it reads off the layer."""
    keys = mx.arange(layer.start_position, layer.lengths[0] + num)
    queries = mx.arange(layer.lengths[0], layer.lengths[0] + num)[:, None]
    return (keys // layer.chunk_size == queries // layer.chunk_size) & (keys <= queries)


def _visible(mask: Any, *, rows: int, num: int, seen: int) -> np.ndarray:
    """A mask as attention takes it (none, causal, boolean), as booleans of shape ``(rows, num, seen)``."""
    if mask is None:
        assert num == 1, "without a mask several tokens see each other's future"
        return np.ones((rows, num, seen), dtype=bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.broadcast_to(np.tril(np.ones((num, seen), dtype=bool), seen - num), (rows, num, seen))
    assert mask.dtype == mx.bool_
    bits = np.array(mask)
    assert bits.shape[-2:] == (num, seen), (bits.shape, num, seen)
    return np.broadcast_to(bits.reshape(-1, num, seen), (rows, num, seen))


def check_reads(layer: KvLayer, stories: Sequence[Story]) -> None:
    """Everything that a commit may ask of each row is there, and right."""
    for row, story in enumerate(stories):
        for span in layer.kind.needs(story.length):
            for planes in (layer.read(row, span), layer.read(row, Span(span.stop - 1, span.stop))):
                num = planes[0].shape[2]
                assert numbers_in(layer, _keys(layer, planes))[0].tolist() == story.entries[span.stop - num : span.stop]


def _keys(layer: KvLayer, planes: list[mx.array]) -> Any:
    return tuple(planes[:3]) if isinstance(layer, QuantizedLayer) else planes[0]
