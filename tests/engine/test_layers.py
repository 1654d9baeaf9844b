"""Each kind of layer alone, in random lives, against brute force: every token sees what its kind says, nothing else."""

import copy
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.lookup import SegmentSlice
from reprise.core.kinds import Chunk, Window
from reprise.core.tokens import Span
from reprise.engine.states.layers import FullLayer, KvLayer, QuantizedLayer, StateLayer
from reprise.engine.states.payloads import pack
from reprise.engine.states.windows import ChunkLayer, SinkWindowLayer, WindowLayer
from tests.engine.pieces import restore_in_pieces
from tests.engine.sight import Numbers, Story, check_reads, entries, feed
from tests.holding import active_memory
from tests.matrix import examples

Make = Callable[[], KvLayer]

JOINING: dict[str, Make] = {
    "full": FullLayer,
    "quantised": lambda: QuantizedLayer(bits=8, group_size=32),
    "window of 1": lambda: WindowLayer(Window(1)),
    "window of 5": lambda: WindowLayer(Window(5)),
    "window of 300": lambda: WindowLayer(Window(300)),
}
ALONE: dict[str, Make] = {
    "kept window of 2": lambda: SinkWindowLayer(Window(2, 1)),
    "kept window of 9": lambda: SinkWindowLayer(Window(9, 4)),
    "kept window of 300": lambda: SinkWindowLayer(Window(300, 7)),
    "chunks of 1": lambda: ChunkLayer(Chunk(1)),
    "chunks of 6": lambda: ChunkLayer(Chunk(6)),
    "chunks of 300": lambda: ChunkLayer(Chunk(300)),
}
ALL = {**JOINING, **ALONE}

SLICES = st.sampled_from((1, 1, 1, 2, 3, 7, 20, 290))
LIVES = settings(max_examples=examples(20), deadline=None)


class Life:
    """A layer and its sequences, on which anything that the engine does can be done."""

    def __init__(self, make: Make, draw: Any) -> None:
        self.make = make
        self.draw = draw
        self.numbers = Numbers()
        self.layer = self.fresh()
        self.stories = [Story()]

    def fresh(self) -> KvLayer:
        layer = self.make()
        layer.reserve(self.draw(st.sampled_from((0, 0, 100, 700))))
        return layer

    def feed(self, num: int | None = None) -> None:
        num = num if num is not None else self.draw(SLICES)
        # Models of windows ask for their own window; models of full attention may mask one themselves.
        window = self.draw(st.sampled_from((None, None, 3, 40))) if type(self.layer) is FullLayer else None
        if isinstance(self.layer, WindowLayer):
            size = self.layer.kind.size
            window = self.draw(st.sampled_from((None, size, max(1, size // 2))))
        feed(self.layer, self.stories, [self.numbers.draw(num) for _ in self.stories], window=window)

    def join(self) -> None:
        others: list[KvLayer] = []
        for _ in range(self.draw(st.integers(1, 2))):
            layer, story = self.fresh(), Story()
            for num in self.draw(st.lists(SLICES, min_size=1, max_size=3)):
                feed(layer, [story], [self.numbers.draw(num)])
            others.append(layer)
            self.stories.append(story)
        if self.stories[0].length == 0:
            self.feed_first()
        self.layer.join(others)

    def feed_first(self) -> None:
        feed(self.layer, self.stories[:1], [self.numbers.draw(3)])

    def leave(self) -> None:
        rows = self.draw(st.permutations(range(len(self.stories))))
        rows = rows[: self.draw(st.integers(1, len(rows)))]
        if len(rows) == 1 and self.draw(st.booleans()):
            self.layer.take(rows[0])
        else:
            self.layer.keep_rows(rows)
        self.stories = [self.stories[row] for row in rows]

    def copy(self) -> None:
        """As `SequenceBatch.copy_rows`: a twin goes another way, and leaves no trace."""
        twin = self.make()
        vars(twin).update({k: list(v) if isinstance(v, list) else v for k, v in vars(self.layer).items()})
        stories = copy.deepcopy(self.stories)
        for num in (1, self.draw(SLICES)):
            feed(twin, stories, [self.numbers.draw(num) for _ in stories])

    def store(self) -> None:
        """What a commit reads makes a layer that goes on as this one: of one row, in pieces cut anywhere."""
        row = self.draw(st.integers(0, len(self.stories) - 1))
        story = self.stories[row]
        at = self.draw(st.integers(1, story.length)) if isinstance(self.layer, FullLayer) else story.length
        spans = [piece for span in self.layer.kind.needs(at) for piece in self.cut(span)]
        layer = self.fresh()
        if spans:
            parts = [SegmentSlice(pack(self.layer.read(row, span)), 0, len(span), span) for span in spans]
            restore_in_pieces(layer, parts, at, at_most=self.draw(st.sampled_from((1, 300, 20_000, 10**9))))
        else:
            layer.lengths = [at]
        self.layer, self.stories = layer, [Story(story.entries[:at])]

    def cut(self, span: Span) -> list[Span]:
        at = self.draw(st.integers(span.start, span.stop))
        return [piece for piece in (Span(span.start, at), Span(at, span.stop)) if len(piece) > 0]

    def rewind(self) -> None:
        if isinstance(self.layer, FullLayer) and len(self.stories) == 1:
            # A sequence that is rewound has buffers of its own.
            self.layer.take(0)
            at = self.draw(st.integers(0, self.stories[0].length))
            self.layer.rewind(at)
            del self.stories[0].entries[at:]

    def forget(self) -> None:
        """A pass that was run ahead is undone."""
        self.feed(1)
        self.layer.undo_last(1)
        for story in self.stories:
            story.entries.pop()

    def guess(self) -> None:
        """Single tokens come, and those of each row that were wrong are undone together."""
        num = self.draw(st.integers(1, 9))
        self.layer.keep_visible(num)
        for _ in range(num):
            self.feed(1)
        wrong = [self.draw(st.integers(0, num)) for _ in self.stories]
        self.layer.undo_last(wrong)
        for story, num_wrong in zip(self.stories, wrong, strict=True):
            del story.entries[story.length - num_wrong :]

    def check(self) -> None:
        assert self.layer.lengths == [story.length for story in self.stories]
        check_reads(self.layer, self.stories)


def live(make: Make, draw: Any, *, joins: bool) -> None:
    life = Life(make, draw)
    verbs = [life.feed, life.feed, life.copy, life.store, life.rewind, life.forget, life.guess]
    verbs += [life.join, life.leave] if joins else []
    life.feed()
    for _ in range(draw(st.integers(1, 8))):
        draw(st.sampled_from(verbs))()
        if all(story.length > 0 for story in life.stories):
            life.check()
        else:
            life.feed()


@pytest.mark.parametrize("name", JOINING)
@LIVES
@given(data=st.data())
def test_sequences_that_join_and_leave(name: str, data: st.DataObject) -> None:
    live(JOINING[name], data.draw, joins=True)


@pytest.mark.parametrize("name", ALONE)
@LIVES
@given(data=st.data())
def test_one_sequence(name: str, data: st.DataObject) -> None:
    live(ALONE[name], data.draw, joins=False)


@pytest.mark.parametrize("name", JOINING)
def test_rows_of_which_different_numbers_were_undone_go_on_apart(name: str) -> None:
    rng, numbers = random.Random(0), Numbers()

    def one(num: int) -> tuple[KvLayer, Story]:
        layer, story = JOINING[name](), Story()
        feed(layer, [story], [numbers.draw(num)])
        return layer, story

    def go_on(layer: KvLayer, stories: list[Story]) -> None:
        for _ in range(12):
            num = rng.choice((1, 2, 5, 40))
            feed(layer, stories, [numbers.draw(num) for _ in stories])
            wrong = [rng.randint(0, num) for _ in stories]
            layer.undo_last(wrong)
            for story, num_wrong in zip(stories, wrong, strict=True):
                del story.entries[story.length - num_wrong :]
            assert layer.lengths == [story.length for story in stories]
            check_reads(layer, stories)

    (layer, first), (second, third) = one(9), (one(4), one(13))
    stories = [first, second[1], third[1]]
    layer.join([second[0], third[0]])
    go_on(layer, stories)
    layer.keep_rows([2, 0])
    stories = [stories[2], stories[0]]
    go_on(layer, stories)
    other, story = one(30)
    other.join([layer])
    stories = [story, *stories]
    check_reads(other, stories)
    go_on(other, stories)
    other.take(1)
    check_reads(other, stories[1:2])
    go_on(other, stories[1:2])


@pytest.mark.parametrize("name", ALL)
def test_long_lives_of_single_tokens(name: str) -> None:
    """Past every growth of the buffers and every wrap of a window."""
    layer, story, numbers = ALL[name](), Story(), Numbers()
    feed(layer, [story], [numbers.draw(13)])
    for _ in range(700):
        keys, values = entries([numbers.draw(1)])
        if isinstance(layer, ChunkLayer):
            layer.maybe_trim_front()
        layer.update_and_fetch(keys, values)
        story.entries.append(numbers.last)
    feed(layer, [story], [numbers.draw(1)])
    feed(layer, [story], [numbers.draw(4)])
    check_reads(layer, [story])
    if name not in ("full", "quantised"):
        assert layer.planes[0].shape[2] <= 1024, "a window keeps no more than it needs"


@pytest.mark.parametrize("name", ["full", "window of 5", "kept window of 9", "chunks of 6"])
def test_guesses_are_undone_wherever_buffers_are_moved_in_the_middle_of_them(name: str) -> None:
    layer, story, numbers = ALL[name](), Story(), Numbers()
    feed(layer, [story], [numbers.draw(3)])
    for _ in range(75):
        layer.keep_visible(9)
        for _ in range(9):
            if isinstance(layer, ChunkLayer):
                layer.maybe_trim_front()
            layer.update_and_fetch(*entries([numbers.draw(1)]))
            story.entries.append(numbers.last)
        layer.undo_last(5)
        del story.entries[-5:]
        feed(layer, [story], [numbers.draw(1)])
    check_reads(layer, [story])


def test_a_kept_position_that_was_undone_is_not_kept() -> None:
    layer, story, numbers = SinkWindowLayer(Window(9, 4)), Story(), Numbers()
    feed(layer, [story], [numbers.draw(3)])
    feed(layer, [story], [numbers.draw(1)])
    layer.undo_last(1)
    story.entries.pop()
    for num in (1, 12, 1):
        feed(layer, [story], [numbers.draw(num)])


def test_rows_that_are_fresh_join_rows_that_are_fresh() -> None:
    layer, numbers = FullLayer(), Numbers()
    layer.join([FullLayer(), FullLayer()])
    stories = [Story(), Story(), Story()]
    feed(layer, stories, [numbers.draw(5) for _ in stories])
    check_reads(layer, stories)


def test_a_layer_makes_room_for_what_is_coming_at_once() -> None:
    layer, story, numbers = FullLayer(), Story(), Numbers()
    layer.reserve(1000)
    feed(layer, [story], [numbers.draw(3)])
    assert layer.planes[0].shape[2] == 1024


def _joined(stories: list[Story], numbers: Numbers) -> FullLayer:
    """Three rows together, of which nobody knows how far the first will go; the others will come to 300 and 1,500."""
    layers = [FullLayer(), FullLayer(), FullLayer()]
    for layer, story, reserved, num in zip(layers, stories, (0, 300, 1500), (400, 10, 20), strict=True):
        layer.reserve(reserved)
        feed(layer, [story], [numbers.draw(num)])
    layers[0].join(layers[1:])
    return layers[0]


@pytest.mark.parametrize(("row", "capacity"), [(1, 512), (2, 1536)])
def test_a_row_that_goes_on_alone_makes_room_for_what_it_was_told_itself(row: int, capacity: int) -> None:
    stories, numbers = [Story(), Story(), Story()], Numbers()
    layer = _joined(stories, numbers)
    layer.keep_rows([0, row])
    layer.take(1)
    feed(layer, [stories[row]], [numbers.draw(256)])
    assert layer.capacity == capacity
    check_reads(layer, [stories[row]])


def test_rows_that_come_together_make_room_for_the_one_that_has_most_to_come() -> None:
    stories, numbers = [Story(), Story(), Story()], Numbers()
    layer = _joined(stories, numbers)
    # All end at one index, 400, and the third has 1,480 to come.
    assert layer.capacity == 2048
    layer.keep_rows([0, 1])
    story, other = Story(), FullLayer()
    other.reserve(60)
    feed(other, [story], [numbers.draw(50)])
    other.join([layer])
    assert other.capacity == 768, "400 are there, and 290 to come"
    check_reads(other, [story, *stories[:2]])


class TestState:
    def test_rows_come_and_go(self) -> None:
        layer, *others = [_state(row) for row in range(4)]
        layer.join(others)
        assert _rows(layer) == [0, 1, 2, 3]
        layer.keep_rows([2, 0, 3])
        assert _rows(layer) == [2, 0, 3]
        layer.take(2)
        assert _rows(layer) == [3]

    def test_fresh_rows_join_fresh_rows_only(self) -> None:
        layer = StateLayer(2)
        layer.join([StateLayer(2)])
        assert layer.cache == [None, None]
        with pytest.raises(AssertionError, match="empty rows"):
            _state(1).join([StateLayer(2)])

    def test_a_row_that_is_taken_does_not_hold_the_others(self) -> None:
        mx.clear_cache()
        layer = StateLayer(1)
        layer.cache = [mx.ones((8, 256, 256))]
        mx.eval(layer.cache)
        before = active_memory()
        layer.take(3)
        mx.eval(layer.cache)
        assert mx.get_active_memory() - before == -7 * 256 * 256 * 4


def _state(row: int) -> StateLayer:
    layer = StateLayer(2)
    layer.cache = [mx.full((1, 3), row), mx.full((1, 2, 2), row)]
    return layer


def _rows(layer: StateLayer) -> list[int]:
    first, second = layer.cache
    assert first is not None
    assert second is not None
    assert first[:, 0].tolist() == second[:, 1, 1].tolist()
    return [int(value) for value in first[:, 0].tolist()]
