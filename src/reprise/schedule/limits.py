"""Scheduler limits, the engine's measured speed, and estimates of the waiting time."""

from dataclasses import dataclass, replace
from math import ceil


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The limits for one served model. Lengths in tokens, times in seconds."""

    max_batch: int = 8
    """Rows that run at the same time, prefilling and decoding together."""
    max_queue: int = 64
    """Jobs that may wait, settling jobs not counted."""
    prefill_chunk: int = 2048
    """The most tokens of one prefill pass, over all its slices."""
    min_chunk: int = 16
    """The smallest chunk while streams decode."""
    max_stall_s: float = 0.25
    """The inter-token gap of a stream that prefill should not exceed."""
    can_batch: bool = True
    """Whether the model's rows can share a pass. If not, every pass has one row."""
    resumes_anywhere: bool = True
    """`Layout.resumes_anywhere`: whether every computed position can be resumed from without a planned checkpoint."""
    min_shared: int = 16
    """The fewest shared tokens for which a job waits while another computes them."""
    short_slice: int = 512
    """Shorter slices do not fill the device, so several are run in one pass."""
    max_padding: float = 1.1
    """Limit of the padded length of all decode rows, as a multiple of their total length."""
    free_padding: int = 1024
    """Padding in tokens, over all rows, that costs less than another pass over the weights."""
    patience: float = 4.0
    """A job precedes every later one after waiting this many times its own prefill time."""
    side_grace_s: float = 1.0
    """How long an auxiliary request gives way to all others."""

    def __post_init__(self) -> None:
        assert self.max_batch > 0, self
        assert self.max_queue >= 0, self
        assert 0 < self.min_chunk <= self.prefill_chunk, self
        assert self.max_stall_s > 0, self
        assert self.min_shared > 0, self
        assert self.short_slice > 0, self
        assert self.max_padding >= 1, self
        assert self.free_padding >= 0, self
        assert self.patience > 0, self
        assert self.side_grace_s >= 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Running means of the engine's speed, as measured by the loop. Immutable; reads no clock."""

    prefill_tokens_per_s: float = 512.0
    """At any depth."""
    by_depth: tuple[float | None, ...] = ()
    """Prefill tokens per second at positions ``[0, 1024)``, ``[1024, 2048)``, ``[2048, 4096)``, …: attention makes a
    token cost more at greater depth. None: not measured yet."""
    load_tokens_per_s: float | None = None
    """Reading from disk. None: not measured yet."""
    decode_s: float = 0.0
    """One pass of every decode group."""
    generation_s: float = 0.0
    """Time from a job's first decoded token to its last."""

    def __post_init__(self) -> None:
        assert self.prefill_tokens_per_s > 0, self
        assert self.decode_s >= 0, self
        assert self.generation_s >= 0, self

    def prefill_at(self, position: int) -> float:
        """Prefill tokens per second at `position`.

        If not measured there: the value of the nearest smaller depth, halved for each doubling, attention's worst case.
        """
        depth = _depth(position)
        for shallower in range(min(depth, len(self.by_depth) - 1), -1, -1):
            seen = self.by_depth[shallower]
            if seen is not None:
                return seen / 2 ** (depth - shallower)
        deeper = next((seen for seen in self.by_depth if seen is not None), None)
        return self.prefill_tokens_per_s if deeper is None else deeper

    def prefill_s(self, start: int, stop: int) -> float:
        """Seconds to prefill ``[start, stop)``. O(log stop)."""
        seconds = 0.0
        while start < stop:
            # Up to the end of this depth.
            end = min(stop, 1024 << _depth(start))
            seconds += (end - start) / self.prefill_at(start)
            start = end
        return seconds

    def after_load(self, num_tokens: int, seconds: float) -> "Speed":
        """The speed after `num_tokens` of a prompt were read from disk in `seconds`."""
        if num_tokens <= 0 or seconds <= 0:
            return self
        seen = num_tokens / seconds
        known = self.load_tokens_per_s
        return replace(self, load_tokens_per_s=seen if known is None else _mean(known, seen, 0.5))

    def after_prefill(self, num_tokens: int, seconds: float, *, position: int = 0) -> "Speed":
        """The speed after a prefill pass over `num_tokens` from `position` took `seconds`."""
        # With a few tokens, the fixed cost of a pass dominates.
        if num_tokens < 16 or seconds <= 0:
            return self
        seen = num_tokens / seconds
        depth = _depth(position)
        depths = [*self.by_depth, *[None] * (depth + 1 - len(self.by_depth))]
        before = depths[depth]
        depths[depth] = seen if before is None else _mean(before, seen, 0.5)
        return replace(self, prefill_tokens_per_s=_mean(self.prefill_tokens_per_s, seen, 0.5), by_depth=tuple(depths))

    def after_decode(self, seconds: float) -> "Speed":
        """The speed after every decode group ran once, in `seconds`."""
        return replace(self, decode_s=_mean(self.decode_s, seconds, 0.25))

    def after_generation(self, seconds: float) -> "Speed":
        """The speed after a job that decoded for `seconds` ended."""
        return replace(self, generation_s=_mean(self.generation_s, seconds, 0.25))


def _depth(position: int) -> int:
    return (position // 1024).bit_length()


def _mean(before: float, seen: float, weight: float) -> float:
    return (1 - weight) * before + weight * seen


LONGEST_RETRY_S = 120
"""Upper limit of `retry_after_s`, which is a rough estimate."""


def retry_after_s(*, num_waiting: int, num_left: int, limits: SchedulerLimits, speed: Speed) -> int | None:
    """None if another job may queue; otherwise the seconds until about half of the queue will have started.

    `num_left`: tokens that waiting and prefilling jobs still have to prefill. Half, so that clients that were refused
    do not return to a queue that is full again. Settling jobs are not counted.
    """
    if num_waiting < limits.max_queue:
        return None
    prefill_s = num_left / speed.prefill_tokens_per_s
    # All rows are taken: each round of `max_batch` jobs waits for the one before it to end.
    rows_s = num_waiting / limits.max_batch * speed.generation_s
    return min(LONGEST_RETRY_S, max(1, ceil((prefill_s + rows_s) / 2)))


def queue_wait_s(*, num_running: int, num_waiting: int, num_left: int, limits: SchedulerLimits, speed: Speed) -> float:
    """Estimated seconds until a job that arrives now starts to prefill.

    `num_running` jobs have a row, `num_waiting` wait for one; together they have `num_left` tokens to prefill.
    """
    ahead_s = num_left / speed.prefill_tokens_per_s
    num_behind = num_running + num_waiting + 1 - limits.max_batch
    # Without a free row, `num_behind` jobs must end first, `max_batch` per generation time.
    return ahead_s + max(0, num_behind) / limits.max_batch * speed.generation_s
