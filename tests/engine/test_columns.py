"""What a restore reads and writes: the same bytes, as words, each copied once into buffers of their own."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from reprise.cache.lookup import Restore, SegmentSlice
from reprise.core.kinds import Full, KvKind, Window
from reprise.core.tokens import Span
from reprise.engine.states.layers import FullLayer, KvLayer, QuantizedLayer
from reprise.engine.states.payloads import Column, EntryTransfer, as_words, columns_of, pack
from reprise.engine.states.windows import SinkWindowLayer, WindowLayer
from tests.engine.pieces import restore_in_pieces
from tests.holding import active_memory, settled_memory

WIDTHS = [(8, mx.bfloat16, mx.uint64), (2, mx.bfloat16, mx.uint32), (3, mx.float16, mx.uint16), (5, mx.uint8, mx.uint8)]


def bits(array: mx.array) -> bytes:
    return np.array(array.view(mx.uint8)).tobytes()


@pytest.fixture
def memory() -> Callable[[], tuple[int, int]]:
    """Bytes held since the test began, and the most since then."""
    before = active_memory()
    mx.reset_peak_memory()
    return lambda: (settled_memory() - before, mx.get_peak_memory() - before)


def plane(length: int, *, heads: int = 2, width: int = 64, seed: int = 0) -> mx.array:
    made = mx.random.normal((1, heads, length, width), key=mx.random.key(seed))
    mx.eval(made)
    return made


def restore_of(kind: KvKind, planes: list[mx.array], cuts: tuple[int, ...]) -> Restore:
    """`planes` as a restore would read them: in segments that end at `cuts`, the first entry of each left out."""
    parts: list[SegmentSlice] = []
    start = 0
    for stop in cuts:
        first = mx.zeros_like(planes[0][:, :, :1, :])
        segment = pack([mx.concatenate([first, p[:, :, start:stop, :]], axis=2) for p in planes])
        parts.append(SegmentSlice(segment, 1, stop - start + 1, Span(start, stop)))
        start = stop
    return Restore(position=start, slices={kind: tuple(parts)}, snapshot=None)


@pytest.mark.parametrize(("width", "dtype", "word"), WIDTHS)
def test_words_are_as_wide_as_rows_allow_and_have_the_same_bytes(width: int, dtype: mx.Dtype, word: mx.Dtype) -> None:
    whole = (100 * mx.random.normal((1, 3, 10, width))).astype(dtype)
    words = as_words(whole)
    assert words.dtype == word
    assert bits(words) == bits(whole)
    cut = Column(parts=[words[:, :, 2:5, :], words[:, :, 5:9, :]], dtype=dtype).joined(room=4)
    assert cut.dtype == dtype and cut.shape == (1, 3, 11, width)
    assert bits(cut[:, :, :7, :]) == bits(whole[:, :, 2:9, :])
    assert not mx.any(cut[:, :, 7:, :]).item()


def test_words_of_a_buffer_are_no_copy(memory: Callable[[], tuple[int, int]]) -> None:
    whole = plane(1024)
    part = as_words(whole)[:, :, 100:110, :]
    mx.eval(part)
    held, most = memory()
    assert held == whole.nbytes
    assert most <= held + 1024


@pytest.mark.parametrize("room", [0, 16])
def test_one_part_owns_its_bytes(memory: Callable[[], tuple[int, int]], room: int) -> None:
    whole = plane(1024)
    mine = Column(parts=[as_words(whole)[:, :, :512, :]], dtype=whole.dtype).joined(room=room)
    mx.eval(mine)
    del whole
    held, _ = memory()
    assert held == mine.nbytes


def test_layers_take_their_planes_in_turn() -> None:
    planes = [plane(9, seed=seed) for seed in range(6)]
    parts = restore_of(Full(), planes, (4, 9)).slices[Full()]
    assert [part.span for part in parts] == [Span(0, 4), Span(4, 9)]
    taken = [columns_of(parts, range(first, first + 2)) for first in (0, 2, 4)]
    joined = [column.joined(room=1) for pair in taken for column in pair]
    assert [bits(one[:, :, :9, :]) for one in joined] == [bits(one) for one in planes]


@pytest.mark.parametrize("at_most", [1 << 30, 50_000])
@pytest.mark.parametrize(
    "make", [FullLayer, lambda: QuantizedLayer(bits=8, group_size=32), lambda: WindowLayer(Window(2000))]
)
def test_a_restored_layer_takes_no_more_than_its_buffers_and_goes_on_in_them(
    memory: Callable[[], tuple[int, int]], make: Callable[[], KvLayer], at_most: int
) -> None:
    layer = make()
    made = [plane(1500, seed=seed) for seed in range(layer.num_planes)]
    restore = restore_of(layer.kind, made, (400, 1100, 1500))
    del made
    stored, _ = memory()
    mx.reset_peak_memory()
    parts = restore.slices[layer.kind]
    pieces = restore_in_pieces(layer, parts, 1500, at_most=at_most)
    # A plane that is larger than a piece may be is made empty, and filled by as many entries as fit.
    each = layer.planes[0].nbytes // layer.capacity
    per_plane = 1 + -(-1500 // (at_most // each)) if at_most < layer.planes[0].nbytes else 1
    assert len(pieces) == layer.num_planes * per_plane
    held, most = memory()
    assert held - stored == layer.nbytes
    # Not even the room to grow is made apart and then copied; a zero is.
    assert most - stored <= layer.nbytes + 1024
    mx.reset_peak_memory()
    entries = mx.zeros((1, 2, 1, 64))
    layer.append([entries.astype(p.dtype) for p in layer.planes])
    mx.eval(layer.state)
    _, most = memory()
    # Nobody else holds the buffers, so that the first entry behind them is written in place.
    assert most - held <= layer.num_planes * 4096


@pytest.mark.parametrize("at_most", [1, 10**6])
def test_kept_positions_are_told_from_recent_ones(at_most: int) -> None:
    kind = Window(9, 4)
    layer = SinkWindowLayer(kind)
    made = [plane(4 + 4, seed=seed) for seed in range(2)]
    restore = restore_of(kind, made, (1, 4, 8))
    needs = kind.needs(50)
    assert [len(need) for need in needs] == [4, 4]
    first, second, recent = restore.slices[kind]
    parts = [replace(first, span=Span(0, 1)), replace(second, span=Span(1, 4)), replace(recent, span=needs[1])]
    restore_in_pieces(layer, parts, 50, at_most=at_most)
    assert [bits(sink) for sink in layer.sinks] == [bits(p[:, :, :4, :]) for p in made]
    assert [bits(p) for p in layer.read(0, needs[1])] == [bits(p[:, :, 4:, :]) for p in made]


def test_kept_positions_alone_leave_room_for_recent_ones() -> None:
    layer, made = SinkWindowLayer(Window(5, 4)), [plane(4, seed=seed) for seed in range(2)]
    parts = restore_of(layer.kind, made, (4,)).slices[layer.kind]
    restore_in_pieces(layer, parts, 50, at_most=1)
    assert [bits(sink) for sink in layer.sinks] == [bits(p) for p in made]
    assert layer.held == 0 and layer.capacity > 0


def test_moving_entries_are_read_until_they_are_given_up(memory: Callable[[], tuple[int, int]]) -> None:
    made = [plane(9, seed=seed) for seed in range(4)]
    cuts = (Span(0, 4), Span(4, 9))
    moving = EntryTransfer([(span, pack([p[:, :, span.start : span.stop, :] for p in made])) for span in cuts])
    wanted = [bits(p[:, :, 2:7, :]) for p in made]

    def reads(planes: range) -> None:
        read = [bits(words) for words in moving.words(Span(2, 7), planes)]
        assert read == [bits(moving.plane(i, Span(2, 7))) for i in planes] == [wanted[i] for i in planes]

    num_parts = 0
    while moving.is_packed:
        reads(range(4))
        each = made[0].nbytes // 9
        assert moving.unpack(at_most=1) in (4 * each, 5 * each), "a plane of one segment"
        num_parts += 1
    assert num_parts == 8
    for first in range(4):
        reads(range(first, 4))
        held, _ = memory()
        moving.give_up(range(first + 1))
        assert moving.nbytes == (3 - first) * made[0].nbytes
        assert held - memory()[0] >= made[0].nbytes
