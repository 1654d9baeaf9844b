"""What the tower takes for an image is foreseen, and taken from the longest gap."""

from dataclasses import replace

import pytest

from reprise.core.tokens import Span
from reprise.schedule.decide import decide
from reprise.schedule.state import DecodingJob, PrefillingJob, SchedulerLimits, SchedulerState, Speed, Step

LIMITS = SchedulerLimits(max_stall_s=0.25, prefill_chunk=2048)
IMAGE, NEXT = Span(100, 356), Span(400, 656)
LOOKING = PrefillingJob(id="looking", arrived_s=0, position=90, end=1000, spans=(IMAGE, NEXT), unseen=(IMAGE, NEXT))
SPEED = Speed(prefill_tokens_per_s=1000, decode_s=0.05)


def step_of(job: PrefillingJob, speed: Speed, *, is_read: bool) -> Step:
    talking = (DecodingJob(id="talking", length=50),) if is_read else ()
    return decide(SchedulerState(now_s=0, prefilling=(job,), decoding=talking, speed=speed), LIMITS)


def test_an_image_that_takes_the_gap_runs_without_a_slice() -> None:
    step = step_of(LOOKING, SPEED.after_tower(256, 0.3), is_read=True)
    assert (step.encode, step.prefill) == ("looking", ()) and step.decode


def test_an_image_that_leaves_room_leaves_it_to_the_slice() -> None:
    quick = step_of(LOOKING, SPEED.after_tower(256, 0.1), is_read=True)
    (piece,) = quick.prefill
    # 250 ms less 50 of decoding and 100 of the tower are 100 tokens, in multiples of 16.
    assert quick.encode == "looking" and len(piece) == 96
    quicker = step_of(LOOKING, SPEED.after_tower(256, 0.05), is_read=True)
    assert len(quicker.prefill[0]) == 144


def test_a_slice_ends_before_the_next_image_that_is_not_seen() -> None:
    step = step_of(LOOKING, SPEED.after_tower(256, 0.1), is_read=False)
    assert step.encode == "looking" and step.prefill[0].stop == NEXT.start


def test_an_image_that_was_encoded_is_computed_before_the_next_one_is_encoded() -> None:
    """In a memory with room for the features of one."""
    step = step_of(replace(LOOKING, unseen=(NEXT,)), SPEED.after_tower(256, 0.1), is_read=False)
    assert step.encode is None and step.prefill[0].stop == NEXT.start
    computed = replace(LOOKING, position=NEXT.start, unseen=(NEXT,))
    step = step_of(computed, SPEED.after_tower(256, 0.1), is_read=False)
    assert step.encode == "looking" and step.prefill[0].stop == 1000


def test_an_image_beyond_the_slice_waits() -> None:
    step = step_of(replace(LOOKING, position=0, spans=(NEXT,), unseen=(NEXT,)), SPEED, is_read=True)
    assert step.encode is None and len(step.prefill[0]) == 192


def test_nothing_is_foreseen_before_the_first_image() -> None:
    step = step_of(LOOKING, SPEED, is_read=True)
    assert (step.encode, step.prefill) == ("looking", ())


def test_the_tower_is_foreseen_by_the_number_of_placeholders() -> None:
    speed = Speed()
    assert speed.tower_s(256) == 0
    speed = speed.after_tower(256, 0.1)
    assert speed.tower_s(256) == pytest.approx(0.1)
    assert speed.tower_s(1024) == pytest.approx(0.4)
    # Attention within an image grows faster than the image.
    speed = speed.after_tower(1024, 0.8)
    assert speed.tower_s(1024) == pytest.approx(0.8)
    assert speed.tower_s(2048) == pytest.approx(1.6)
    assert speed.tower_s(256) == pytest.approx(0.1)
    for _ in range(20):
        speed = speed.after_tower(256, 0.2)
    assert speed.tower_s(256) == pytest.approx(0.2, rel=0.01)
