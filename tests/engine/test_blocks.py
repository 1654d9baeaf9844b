"""What an image sees where it attends both ways: all of itself, and what every token sees."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.core.kinds import Window
from reprise.core.tokens import Span
from reprise.engine.states.layers import FullLayer, KvLayer, QuantizedLayer
from reprise.engine.states.windows import WindowLayer
from tests.engine.sight import Numbers, Story, feed

LAYERS: dict[str, Callable[[], KvLayer]] = {
    "full": FullLayer,
    "quantised": lambda: QuantizedLayer(bits=8, group_size=32),
    "window": lambda: WindowLayer(Window(6)),
    "wide window": lambda: WindowLayer(Window(40)),
}


def joined_layers(make: Callable[[], KvLayer], lengths: list[int], numbers: Numbers) -> tuple[KvLayer, list[Story]]:
    """Sequences of these lengths, of text, in one batch."""
    layers, stories = [make() for _ in lengths], [Story() for _ in lengths]
    for layer, story, length in zip(layers, stories, lengths, strict=True):
        feed(layer, [story], [numbers.draw(length)])
    layers[0].join(layers[1:])
    return layers[0], stories


@pytest.mark.parametrize("kind", LAYERS)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    num=st.integers(2, 14),
    edges=st.lists(st.integers(0, 14), min_size=2, max_size=4),
)
def test_an_image_sees_all_of_itself_in_a_pass(kind: str, lengths: list[int], num: int, edges: list[int]) -> None:
    numbers = Numbers()
    layer, stories = joined_layers(LAYERS[kind], lengths, numbers)
    inside = sorted({min(edge, num) for edge in edges})
    spans = [Span(a, b) for a, b in zip(inside[::2], inside[1::2], strict=False)]
    # The last sequence has none: rows of one pass differ.
    blocks = [
        [] if row == len(lengths) - 1 and row > 0 else [Span(low + s.start, low + s.stop) for s in spans]
        for row, low in enumerate(lengths)
    ]
    feed(layer, stories, [numbers.draw(num) for _ in lengths], blocks=blocks)
    feed(layer, stories, [numbers.draw(1) for _ in lengths])


def test_an_image_in_two_passes_is_refused() -> None:
    layer = FullLayer()
    layer.blocks = [[Span(2, 9)]]
    with pytest.raises(AssertionError, match="whole"):
        layer.make_mask(5)
