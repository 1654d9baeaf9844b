"""Sequences that come together and part: what that takes beside what is there before and after."""

import gc
from collections.abc import Callable

import mlx.core as mx

from reprise.core.kinds import Full
from reprise.engine.states.blueprint import Blueprint, KvSpec
from reprise.engine.states.sequence_batch import SequenceBatch

NUM_LAYERS = 8


def rows_of(length: int, num: int = 1) -> SequenceBatch:
    """`num` sequences of this length, in eight layers of full attention."""
    rows = SequenceBatch(Blueprint(specs=(KvSpec(Full()),) * NUM_LAYERS))
    for layer in rows.kv_layers:
        entries = mx.random.normal((1, 4, length, 64))
        layer.update_and_fetch(entries, entries)
    rows.lengths = [length]
    mx.eval(rows.arrays())
    if num > 1:
        rows.join([rows_of(length) for _ in range(num - 1)])
    return rows


def most_beside(rows: SequenceBatch, work: Callable[[], object]) -> int:
    """The most bytes that were in use at once while these rows changed, less what is in use in the end."""
    # What earlier tests left behind in circles of references would go meanwhile.
    gc.collect()
    mx.synchronize()
    mx.reset_peak_memory()
    work()
    mx.eval(rows.arrays())
    return mx.get_peak_memory() - mx.get_active_memory()


def test_a_group_is_never_held_twice() -> None:
    group = rows_of(1000, num=4)
    newcomers = [rows_of(750), rows_of(1050)]
    held = group.nbytes + sum(rows.nbytes for rows in newcomers)
    # A layer at a time; some of the newcomers' buffers are there until the end.
    assert most_beside(group, lambda: group.join(newcomers)) < 2 * held / NUM_LAYERS
    assert sum(rows.nbytes for rows in newcomers) == 0
    held = group.nbytes
    # One of six has left, and so has its part of the buffers.
    assert most_beside(group, lambda: group.keep_rows([0, 1, 2, 4, 5])) < held / 6 + 2 * held / NUM_LAYERS
    held = group.nbytes
    assert most_beside(group, lambda: group.keep_rows([3])) < held


def test_buffers_that_grow_are_held_twice_a_layer_at_a_time() -> None:
    rows = rows_of(3000)
    held = rows.nbytes
    entries = mx.random.normal((1, 4, 600, 64))
    mx.eval(entries)

    def feed() -> None:
        # One evaluation for all layers, as in a pass of a model.
        for layer in rows.kv_layers:
            layer.update_and_fetch(entries, entries)

    assert most_beside(rows, feed) < 2 * held / NUM_LAYERS
    assert rows.nbytes > held


def test_rows_that_come_together_keep_their_entries() -> None:
    group, newcomer = rows_of(700, num=2), rows_of(900)
    before = [
        [layer.planes[0][row, :, layer.index(row, 0) : layer.end, :] for layer in rows.kv_layers]
        for rows, row in ((group, 0), (group, 1), (newcomer, 0))
    ]
    mx.eval(before)
    group.join([newcomer])
    assert group.lengths == [700, 700, 900]
    for row, layers in enumerate(before):
        for layer, entries in zip(group.kv_layers, layers, strict=True):
            assert mx.array_equal(layer.planes[0][row, :, layer.index(row, 0) : layer.end, :], entries)
