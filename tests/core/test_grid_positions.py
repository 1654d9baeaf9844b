"""Where tokens stand in three axes: by brute force over the whole prompt, in any slice of it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reprise.core.images import ImageFile, PromptImage, grid_positions
from reprise.core.tokens import Span

NOBODY = ImageFile(content=b"", digest=b"", width=1, height=1)
grids = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 4)), max_size=4)
"""Words before an image, its rows and its columns."""


def prompt_images(grids: list[tuple[int, int, int]]) -> list[PromptImage]:
    images: list[PromptImage] = []
    at = 0
    for words, rows, columns in grids:
        span = Span(at + words, at + words + rows * columns)
        images.append(PromptImage(span=span, image=NOBODY, rows=rows, columns=columns))
        at = span.stop
    return images


def counted(images: list[PromptImage], num: int) -> np.ndarray:
    """The positions of `num` tokens, one after the other, as the reference counts them: on from the largest so far."""
    columns: list[tuple[int, int, int]] = []
    following = 0
    while len(columns) < num:
        image = next((each for each in images if each.span.start == len(columns)), None)
        if image is None:
            columns.append((following,) * 3)
            following += 1
            continue
        columns += [(following, following + r, following + c) for r in range(image.rows) for c in range(image.columns)]
        following = 1 + max(max(column) for column in columns[-len(image.span) :])
    return np.array(columns[:num], dtype=np.int32).reshape(-1, 3).T


@given(grids=grids, more=st.integers(0, 6), cut=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_slice_stands_where_it_stands_in_the_whole(
    grids: list[tuple[int, int, int]], more: int, cut: tuple[float, float]
) -> None:
    images = prompt_images(grids)
    end = (images[-1].span.stop if images else 0) + more
    start, stop = sorted(round(share * end) for share in cut)
    assert np.array_equal(grid_positions(start, stop, images), counted(images, end)[:, start:stop])


@given(grids=grids, behind=st.integers(0, 1000))
def test_behind_all_images_a_token_is_its_index_and_their_shifts(
    grids: list[tuple[int, int, int]], behind: int
) -> None:
    images = prompt_images(grids)
    at = (images[-1].span.stop if images else 0) + behind
    assert grid_positions(at, at + 1, images).tolist() == [[at + sum(image.shift for image in images)]] * 3
