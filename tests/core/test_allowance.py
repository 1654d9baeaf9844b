"""What one step takes over: always a part, and another only where it should end in time."""

from reprise.core.allowance import TAKEN_AT_ONCE, StepAllowance


class HandClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def parts_taken(*, seconds: float, nbytes: int) -> int:
    """How many parts, of so many seconds and bytes each, one step takes where 100 ms are aimed at."""
    clock = HandClock()
    allowance = StepAllowance(0.1, clock=clock)
    clock.now_s = 7.0
    allowance.renew()
    num = 0
    while allowance.has_room and num < 1000:
        clock.now_s += seconds
        allowance.take(nbytes)
        num += 1
    return num


def test_a_step_always_takes_a_part_and_another_where_it_ends_in_time() -> None:
    assert parts_taken(seconds=3.0, nbytes=1) == 1
    # A quarter of the gap is for this: a second part of 15 ms would end after it.
    assert parts_taken(seconds=0.015, nbytes=1) == 1
    assert parts_taken(seconds=0.004, nbytes=1) == 6


def test_parts_that_take_no_time_are_bounded_by_their_bytes() -> None:
    assert parts_taken(seconds=0.0, nbytes=TAKEN_AT_ONCE) == 1
    assert parts_taken(seconds=0.0, nbytes=TAKEN_AT_ONCE // 4) == 4
