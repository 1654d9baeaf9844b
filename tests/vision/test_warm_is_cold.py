"""What is computed behind a resumed prefix with images is what a cold run computes, for every kind of layer."""

import mlx.core as mx
import pytest

from tests.vision.chats import ASK, CUT, ONE, OTHER, SeenWalk, cold, picture, prompt_of, seeing, seven_walks
from tests.vision.families import FAMILIES, FURTHER

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

ROUNDING = 1e-4
"""Relative to the largest logit: the recurrent scan is rounded otherwise in other chunks."""

ALL = (*FAMILIES, *(pytest.param(name, marks=pytest.mark.matrix) for name in FURTHER))


def distance(a: mx.array, b: mx.array) -> float:
    return float((mx.abs(a - b).max() / mx.abs(b).max()).item())


@pytest.mark.every_model
@pytest.mark.parametrize("family", ALL)
def test_seven_walks_are_resumed_behind_what_they_share_and_equal_cold_runs(family: str) -> None:
    loaded = seeing(family)
    walk = SeenWalk(loaded)
    for name, (turns, num_behind) in seven_walks().items():
        prompt = prompt_of(loaded, *turns)
        expected = cold(loaded, prompt)
        if name == CUT:
            walk.cut(prompt)
        at, logits = walk.logits(prompt)
        behind = [each for each in prompt.images if each.span.stop <= at]
        assert len(behind) == num_behind, (name, at)
        assert distance(logits, expected[at:]) < ROUNDING, name


@pytest.mark.parametrize("family", ALL)
def test_chunks_equal_the_whole(family: str) -> None:
    loaded = seeing(family)
    prompt = prompt_of(loaded, ["Look: ", ONE, ASK, OTHER, "Compare them with a dog."])
    assert distance(cold(loaded, prompt, chunk=5), cold(loaded, prompt)) < ROUNDING


@pytest.mark.parametrize("family", ALL)
def test_another_image_is_another_answer(family: str) -> None:
    """What the other tests compare with: images change the logits by far more than rounding does."""
    loaded = seeing(family)
    one, other = (prompt_of(loaded, ["Look: ", image, ASK]) for image in (ONE, picture(4)))
    assert distance(cold(loaded, one)[-8:], cold(loaded, other)[-8:]) > 100 * ROUNDING
