"""The bound of the queue, how long it takes, and when to come back."""

from math import ceil

from reprise.schedule.limits import SchedulerLimits, Speed

LONGEST_RETRY_S = 120
"""Nobody plans further ahead than this; the estimate is rough anyway."""


def retry_after_s(*, num_waiting: int, num_left: int, limits: SchedulerLimits, speed: Speed) -> int | None:
    """None if one more job may wait; else in how many seconds about half of those that wait will have started.

    `num_waiting` jobs wait; `num_left` tokens of waiting and prefilling jobs are still to be prefilled. Half, so that a
    crowd that was turned away does not come back to a queue that is full again. Jobs that settle count in neither.
    """
    if num_waiting < limits.max_queue:
        return None
    prefill_s = num_left / speed.prefill_tokens_per_s
    # All rows are taken: each round of `max_batch` jobs waits for the one before it to end.
    rows_s = num_waiting / limits.max_batch * speed.generation_s
    return min(LONGEST_RETRY_S, max(1, ceil((prefill_s + rows_s) / 2)))


def queue_wait_s(*, num_running: int, num_waiting: int, num_left: int, limits: SchedulerLimits, speed: Speed) -> float:
    """In how many seconds a job that came now would begin to be prefilled, roughly.

    `num_running` jobs have a row and `num_waiting` wait for one; `num_left` tokens of them are still to be prefilled.
    """
    ahead_s = num_left / speed.prefill_tokens_per_s
    num_behind = num_running + num_waiting + 1 - limits.max_batch
    # Without a free row: until as many have ended as stand before it, `max_batch` in the time of one.
    return ahead_s + max(0, num_behind) / limits.max_batch * speed.generation_s
