"""What is computed behind a resumed prefix with images is what a cold run computes, for every kind of layer."""

import mlx.core as mx
import pytest

from reprise.core.images import Image
from reprise.engine.models.load import LoadedModel
from tests.vision.chats import SeenWalk, cold, picture, prompt_of, seeing
from tests.vision.families import FAMILIES, FURTHER

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

ROUNDING = 1e-4
"""Relative to the largest logit: the recurrent scan is rounded otherwise in other chunks."""

ONE, OTHER, THIRD = picture(1), picture(2, 64, 128), picture(3, 64, 64)
ASK = "What is on it?"
ALL = (*FAMILIES, *(pytest.param(name, marks=pytest.mark.matrix) for name in FURTHER))


def walks(loaded: LoadedModel, one: Image = ONE, other: Image = OTHER, third: Image = THIRD) -> dict[str, tuple]:
    """Turns of chats that share prefixes, in an order in which each resumes somewhere else."""
    return {
        "first turn": ((["Look: ", one, ASK],), 0),
        "next turn": ((["Look: ", one, ASK], "A dog.", "Which colour?"), 1),
        "other question about the image": ((["Look: ", one, "How many legs has it?"],), 1),
        "other image, same words": ((["Look: ", other, ASK],), 0),
        "a second image in the next turn": ((["Look: ", one, ASK], "A dog.", [third, "And this?"]), 1),
        "the turn after it": ((["Look: ", one, ASK], "A dog.", [third, "And this?"], "A cat.", "Compare them."), 2),
        "the images swapped": ((["Look: ", third, ASK], "A dog.", [one, "And this?"]), 0),
    }


def distance(a: mx.array, b: mx.array) -> float:
    return float((mx.abs(a - b).max() / mx.abs(b).max()).item())


@pytest.mark.parametrize("family", ALL)
def test_seven_walks_are_resumed_behind_what_they_share_and_equal_cold_runs(family: str) -> None:
    loaded = seeing(family)
    walk = SeenWalk(loaded)
    for name, (turns, num_behind) in walks(loaded).items():
        prompt = prompt_of(loaded, *turns)
        expected = cold(loaded, prompt)
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
