"""The bound of the queue, and when to come back."""

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
