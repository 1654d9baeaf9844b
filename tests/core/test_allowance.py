"""What one step takes over: always a part, and another only where it should end in time."""

import pytest

from reprise.core.allowance import LEAST_NBYTES, TAKEN_AT_ONCE, StepAllowance


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


class Copying:
    """Steps beside which others decode; `nbytes_per_s`: how fast parts are copied."""

    def __init__(self, *, nbytes_per_s: float) -> None:
        self.nbytes_per_s = nbytes_per_s
        self._clock = HandClock()
        self.allowance = StepAllowance(0.1, clock=self._clock)

    def step(self, *, decode_s: float) -> list[int]:
        """The parts of one step, in bytes."""
        self._clock.now_s += decode_s
        self.allowance.renew(decode_s=decode_s)
        parts: list[int] = []
        while self.allowance.has_room:
            parts.append(self.allowance.part_nbytes)
            self._clock.now_s += parts[-1] / self.nbytes_per_s
            self.allowance.take(parts[-1])
        return parts


def test_parts_are_as_large_as_their_speed_lets_them_end_in_time() -> None:
    copying = Copying(nbytes_per_s=1e9)
    assert copying.step(decode_s=0.02)[0] == LEAST_NBYTES, "nothing is known yet"
    assert sum(copying.step(decode_s=0.02)) == pytest.approx(25e6, rel=1e-3), "a quarter of 100 ms"
    # Half of what the decode leaves.
    assert sum(copying.step(decode_s=0.07)) == pytest.approx(15e6, rel=1e-3)
    copying.nbytes_per_s = 1e8
    copying.step(decode_s=0.07)
    # What has become slow is copied in small parts from the next step on.
    assert copying.step(decode_s=0.07) == [LEAST_NBYTES]
    copying.nbytes_per_s = 1e12
    for _ in range(100):
        copying.step(decode_s=0.0)
    assert sum(copying.step(decode_s=0.0)) == TAKEN_AT_ONCE


def test_beside_a_decode_that_takes_all_of_the_gap_there_is_progress() -> None:
    copying = Copying(nbytes_per_s=1e9)
    for decode_s in (0.099, 0.1, 5.0):
        assert copying.step(decode_s=decode_s) == [LEAST_NBYTES]
        assert copying.step(decode_s=decode_s) == [LEAST_NBYTES]
        assert copying.allowance.spent_s == pytest.approx(LEAST_NBYTES / 1e9)
