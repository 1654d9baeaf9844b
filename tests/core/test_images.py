"""Images in a prompt: their ids are their content, and positions inside them are none to resume at."""

import numpy as np
import pytest

from reprise.core.images import (
    ImageExpansion,
    ImageFile,
    PromptImage,
    digest_of,
    grid_positions,
    of_namespace,
    outside,
    path_tokens,
)
from reprise.core.prompt import Boundary, BoundaryKind, Prompt
from reprise.core.tokens import Span, as_tokens

PLACEHOLDER, BREAK = 7, 9


def expansion(rows: int = 2, columns: int = 3) -> ImageExpansion:
    run = [token for _ in range(rows) for token in [*[PLACEHOLDER] * columns, BREAK]]
    return ImageExpansion(tokens=as_tokens(run), placeholder=PLACEHOLDER, rows=rows, columns=columns)


def image(start: int, stop: int, *, rows: int = 2, columns: int = 3) -> PromptImage:
    seen = ImageFile(content=b"", digest=digest_of(b""), width=1, height=1)
    return PromptImage(span=Span(start, stop), image=seen, rows=rows, columns=columns)


def test_placeholders_are_ids_below_zero_and_separators_stay() -> None:
    run = path_tokens(expansion(), digest_of(b"a"))
    assert run[[3, 7]].tolist() == [BREAK, BREAK] and len(run) == 8
    ids = np.delete(run, [3, 7])
    assert (ids < 0).all() and len(set(ids.tolist())) == 6


def test_the_same_image_is_the_same_run_and_another_differs_from_its_first_placeholder_on() -> None:
    one, same, other = (path_tokens(expansion(), digest_of(content)) for content in (b"a", b"a", b"b"))
    assert one.tolist() == same.tolist()
    assert one[0] != other[0]


def test_no_namespace_has_the_digest_of_another() -> None:
    sent = image(0, 6).image
    digests = {of_namespace(sent, name).digest for name in ("", "one", "two")}
    assert len(digests) == 3 and sent.digest in digests


def test_what_changes_the_pixels_changes_the_digest() -> None:
    assert digest_of(b"a", detail="low") != digest_of(b"a", detail="high")


def test_an_image_is_short_of_the_largest_and_the_smallest_id() -> None:
    # The words are unsigned; half of each keeps to 31 bits.
    runs = [path_tokens(expansion(64, 64), digest_of(bytes([n]))) for n in range(8)]
    assert all(run.dtype == np.int32 and run.min() >= -(2**31) for run in runs)


@pytest.mark.parametrize(("position", "expected"), [(0, 0), (2, 2), (3, 2), (4, 2), (5, 5), (8, 8), (9, 8), (12, 12)])
def test_a_position_inside_an_image_moves_to_its_start(position: int, expected: int) -> None:
    assert outside(position, [Span(2, 5), Span(5, 6), Span(8, 12)]) == expected


def test_a_prompt_that_is_cut_has_whole_images() -> None:
    marks = (Boundary(2, BoundaryKind.SYSTEM), Boundary(12, BoundaryKind.STABLE))
    prompt = Prompt(tokens=as_tokens(range(20)), boundaries=marks, images=(image(3, 6), image(8, 12)))
    whole, inside = prompt.up_to(12), prompt.up_to(10)
    assert (len(whole), whole.spans, whole.boundaries) == (12, (Span(3, 6), Span(8, 12)), marks)
    assert (len(inside), inside.spans, inside.boundaries) == (8, (Span(3, 6),), marks[:1])


def test_text_behind_images_stands_nearer_than_its_index() -> None:
    images = (image(3, 9), image(12, 16, rows=1, columns=4))
    shifts = [int(grid_positions(at, at + 1, images)[0, 0]) - at for at in (3, 9, 12, 16)]
    assert shifts == [0, -3, -3, -3]
