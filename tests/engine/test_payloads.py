"""Payloads of the prefix cache: bytes out = bytes in, and every payload owns its bytes."""

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.prefix_cache import PrefixCache
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, Tokens
from reprise.engine.states.blueprint import blueprint_of
from reprise.engine.states.layers import KvLayer, StateLayer
from reprise.engine.states.payloads import PackedSegment, Snapshot, look_into, pack, save
from reprise.engine.states.restoration import restored
from reprise.engine.states.sequence_batch import SequenceBatch, SequenceSource
from tests.holding import active_memory, settled_memory
from tests.matrix import every_nth, examples
from tests.zoo.caches import build_any
from tools.matrix.sequence import feed, random_prompt

KINDS = ["qwen3", "qwen3, quantised", "qwen3, kept beginning", "llama", "llama4", "falcon_h1", "rwkv7", "deepseek_v41"]
"""Full, quantised, kept and plain windows, chunks, parts, state alone, and a cache of the model's own."""


def bits(array: mx.array) -> bytes:
    return np.array(array.view(mx.uint8)).tobytes()


def all_bits(state: Any) -> list[bytes]:
    return [bits(array) for array in look_into([state]).arrays]


def saved_bits(snapshot: Snapshot) -> list[bytes]:
    others = snapshot.opaque.arrays if snapshot.opaque is not None else []
    return [bits(array) for array in [*look_into(snapshot.states).arrays, *others]]


def stored(name: str, at: int) -> tuple[SequenceBatch, Tokens, PrefixCache]:
    """A sequence at `at`, committed in three steps so that its entries lie in several payloads."""
    model = build_any(name)
    rows = SequenceBatch(blueprint_of(model))
    cache = PrefixCache(rows.blueprint.layout)
    tokens = random_prompt(at, seed=at)
    for start, stop in ((0, 20), (20, 33), (33, at)):
        feed(model, rows, tokens[start:stop], chunk=5)
        cache.commit(tokens[:stop], SequenceSource(rows, 0), kind=BoundaryKind.STABLE)
    return rows, tokens, cache


@pytest.mark.parametrize("name", KINDS)
def test_bytes_out_are_bytes_in(name: str) -> None:
    rows, tokens, cache = stored(name, 51)
    match = cache.match(tokens)
    assert cache.resume_at(match, limit=51) == 51
    back = restored(rows.blueprint, cache.read(match, 51))
    for mine, theirs in zip(rows.states, back.states, strict=True):
        if isinstance(mine, KvLayer):
            for span in mine.kind.needs(51):
                planes = zip(mine.read(0, span), theirs.read(0, span), strict=True)
                assert all(bits(one) == bits(other) for one, other in planes), (mine, span)
        else:
            assert all_bits(mine) == all_bits(theirs)
    assert back.lengths == [51]


@pytest.mark.parametrize("name", every_nth(KINDS, 5))
def test_what_is_stored_stays_as_it_was_while_the_sequence_goes_on(name: str) -> None:
    rows, tokens, cache = stored(name, 51)
    restore = cache.read(cache.match(tokens), 51)
    payloads = [part.payload for parts in restore.slices.values() for part in parts] + [restore.snapshot]
    before = [all_bits(payload) for payload in payloads]
    model = build_any(name)
    feed(model, rows, random_prompt(9, seed=1), chunk=1)
    again = restored(rows.blueprint, restore)
    feed(model, again, random_prompt(9, seed=2), chunk=4)
    assert [all_bits(payload) for payload in payloads] == before


@pytest.mark.parametrize("name", KINDS)
def test_a_payload_is_as_large_as_it_says(name: str) -> None:
    rows, _, _ = stored(name, 51)
    source = SequenceSource(rows, 0)
    for kind in rows.blueprint.layout.kinds:
        for span in kind.needs(51):
            segment = source.segment(kind, span)
            assert segment.nbytes == source.segment_nbytes(kind, len(span)) == sum(s.nbytes for s in segment.stacks)
            assert segment.length == len(span)
    if rows.blueprint.layout.has_snapshots:
        snapshot = source.snapshot()
        assert snapshot.nbytes == source.snapshot_nbytes() == sum(map(len, saved_bits(snapshot)))


@pytest.mark.parametrize("name", ["qwen3", "llama", "falcon_h1"])
def test_one_row_of_several(name: str) -> None:
    """A commit of one row of a batch takes that row alone."""
    model = build_any(name)
    blueprint = blueprint_of(model)
    alone: list[SequenceBatch] = []
    for length in (9, 40, 23):
        alone.append(SequenceBatch(blueprint))
        feed(model, alone[-1], random_prompt(length, seed=length), chunk=None)
    expected = [_committed(rows, 0) for rows in alone]
    batch, *others = alone
    batch.join(others)
    assert [_committed(batch, row) for row in range(3)] == expected


def _committed(rows: SequenceBatch, row: int) -> list[list[bytes]]:
    source, layout = SequenceSource(rows, row), rows.blueprint.layout
    found = [
        [bits(s[i : i + 1]) for s in source.segment(kind, span).stacks for i in range(s.shape[0])]
        for kind in layout.kinds
        for span in kind.needs(rows.lengths[row])
    ]
    return [*found, saved_bits(source.snapshot())] if layout.has_snapshots else found


# Who owns which bytes.

LARGE = 64 * 1024


@pytest.fixture
def memory() -> Callable[[], int]:
    """Bytes that are held since the test began."""
    before = active_memory()
    return lambda: settled_memory() - before


def planes(num: int, length: int, *, heads: int = 2, width: int = 64) -> list[mx.array]:
    made = [mx.random.normal((1, heads, length, width), key=mx.random.key(i)) for i in range(num)]
    mx.eval(made)
    return made


def assert_held(memory: Callable[[], int], nbytes: int) -> None:
    assert nbytes >= LARGE
    # The tree and a model's modules refer to each other.
    gc.collect()
    assert abs(memory() - nbytes) <= 0.01 * nbytes, (memory(), nbytes)


def test_a_segment_does_not_hold_what_it_was_cut_from(memory: Callable[[], int]) -> None:
    source = planes(4, 4096)
    segment = pack([plane[:, :, 100:300, :] for plane in source])
    del source
    assert_held(memory, segment.nbytes)


def test_a_segment_of_one_plane_owns_its_bytes_too(memory: Callable[[], int]) -> None:
    source = planes(1, 4096)
    segment = pack([source[0][:, :, :256, :]])
    del source
    assert_held(memory, segment.nbytes)


def test_a_piece_of_a_segment_owns_its_bytes(memory: Callable[[], int]) -> None:
    whole = pack(planes(4, 4096))
    piece = whole.cut(1000, 1200)
    del whole
    assert_held(memory, piece.nbytes)


def test_a_segment_of_pieces_owns_its_bytes(memory: Callable[[], int]) -> None:
    pieces = [pack(planes(2, length)) for length in (300, 200, 700)]
    whole = pieces[0].join(pieces[1:])
    del pieces
    assert whole.length == 1200
    assert_held(memory, whole.nbytes)


def test_a_snapshot_holds_one_row(memory: Callable[[], int]) -> None:
    batch = mx.random.normal((8, 256, 256))
    mx.eval(batch)
    snapshot = save([[batch[3:4], None]])
    del batch
    assert snapshot.nbytes == 256 * 256 * 4
    assert_held(memory, snapshot.nbytes)


def test_a_commit_of_a_sequence_holds_what_the_books_say(memory: Callable[[], int]) -> None:
    rows, _, cache = stored("qwen3", 300)
    del rows
    assert_held(memory, cache.stats.kv_nbytes)


def test_restored_rows_hold_their_buffers_only(memory: Callable[[], int]) -> None:
    rows, tokens, cache = stored("qwen3", 300)
    back = restored(rows.blueprint, cache.read(cache.match(tokens), 300), reserve=400)
    del rows, cache
    assert_held(memory, back.nbytes)


# Cutting and joining.


@given(cuts=st.lists(st.integers(1, 39), unique=True, max_size=4), heads=st.integers(1, 3), data=st.data())
@settings(max_examples=examples(30), deadline=None)
def test_pieces_joined_again_are_the_whole(cuts: list[int], heads: int, data: st.DataObject) -> None:
    # Planes of two shapes, as in latent attention; entries of two types, as in quantised ones.
    made = [*planes(2, 40, heads=heads, width=8), *planes(1, 40, heads=1, width=4)]
    made.append(mx.arange(40 * 3, dtype=mx.uint32).reshape(1, 1, 40, 3))
    whole = pack(made)
    edges = [0, *sorted(cuts), 40]
    pieces = [whole.cut(low, high) for low, high in pairwise(edges)]
    joined = pieces[0].join(pieces[1:])
    assert [bits(stack) for stack in joined.stacks] == [bits(stack) for stack in whole.stacks]
    low = data.draw(st.integers(0, 39))
    high = data.draw(st.integers(low + 1, 40))
    for index, plane in enumerate(made):
        assert bits(joined.plane(index, low, high)) == bits(plane[:, :, low:high, :])


def test_pieces_packed_in_another_way_join_plane_by_plane() -> None:
    made = planes(3, 30, width=8)
    usual = pack([plane[:, :, :10, :] for plane in made])
    other = PackedSegment(tuple(mx.array(plane[:, :, 10:, :]) for plane in made), tuple((i, 0) for i in range(3)))
    for joined in (usual.join([other]), PackedSegment(other.stacks, other.places).join([]).cut(0, 20)):
        assert [bits(joined.plane(i, 0, joined.length)) for i in range(3)] == [
            bits(plane[:, :, 30 - joined.length :, :]) for plane in made
        ]


# Recurrent states.


def test_a_recurrent_layer_restores_to_the_same_bits() -> None:
    layer = StateLayer(2)
    layer.cache = [mx.random.normal((1, 4)), None]
    snapshot = save([layer.cache])
    assert all_bits(snapshot.states[0]) == all_bits(layer.cache)
    assert snapshot.states[0][1] is None


def test_a_model_that_writes_into_its_state_leaves_the_snapshot_alone() -> None:
    model = build_any("rwkv7")
    blueprint, tokens = blueprint_of(model), random_prompt(9, seed=1)
    rows, cache = SequenceBatch(blueprint), PrefixCache(blueprint_of(model).layout)
    feed(model, rows, tokens, chunk=None)
    cache.commit(tokens, SequenceSource(rows, 0), kind=BoundaryKind.STABLE)
    restore = cache.read(cache.match(tokens), 9)
    before = saved_bits(cast(Snapshot, restore.snapshot))
    for layer in restored(blueprint, restore).states:
        for i in range(len(layer.cache)):
            layer.cache[i] += 1
    assert saved_bits(cast(Snapshot, restore.snapshot)) == before


def test_a_loan_of_a_span_reads_as_its_copy() -> None:
    """`SequenceSource.segment` of a part is the part of `SequenceSource.segment`."""
    rows, _, _ = stored("qwen3", 51)
    (kind,) = rows.blueprint.layout.kinds
    source = SequenceSource(rows, 0)
    whole, part = source.segment(kind, Span(0, 51)), source.segment(kind, Span(17, 30))
    assert [bits(s) for s in whole.cut(17, 30).stacks] == [bits(s) for s in part.stacks]
