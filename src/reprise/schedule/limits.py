"""What bounds the schedule, how fast the engine was seen to be, and so how long the queue takes."""

from dataclasses import dataclass, replace
from math import ceil


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The bounds that hold while a model is served. Lengths in tokens, times in seconds."""

    max_batch: int = 8
    """Rows that run at the same time, prefilling and decoding together."""
    max_queue: int = 64
    """Jobs that may wait (jobs that settle are not counted)."""
    prefill_chunk: int = 2048
    """The most tokens of one prefill pass, all its slices together."""
    min_chunk: int = 16
    """The fewest tokens that a chunk is cut to while streams decode."""
    max_stall_s: float = 0.25
    """The gap between two tokens of a stream that prefill should not exceed."""
    can_batch: bool = True
    """Whether the model's rows may share a pass. If not, every pass has one row and the rows take turns."""
    resumes_anywhere: bool = True
    """`Layout.resumes_anywhere`: whether every computed position can be resumed from without a planned checkpoint."""
    min_shared: int = 16
    """The fewest tokens that are worth waiting for while another job computes them."""
    short_slice: int = 512
    """Slices shorter than this leave the engine partly idle, so several are run in one pass."""
    max_padding: float = 1.1
    """Padded length of all decode rows, as a multiple of their own lengths."""
    free_padding: int = 1024
    """Padding, in tokens of all rows together, that costs less than one more pass over the weights."""
    patience: float = 4.0
    """How many times the time that it needs may pass before a job goes ahead of every later one."""
    side_grace_s: float = 1.0
    """How long a side request gives way to all others."""

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
    """Running means of what the engine was seen to do. The loop measures; nothing here reads a clock."""

    prefill_tokens_per_s: float = 512.0
    """Wherever it was measured last."""
    by_depth: tuple[float | None, ...] = ()
    """Prefill tokens per second where the prompt stands in ``[0, 1024)``, ``[1024, 2048)``, ``[2048, 4096)``, …: a
    token costs more the more there is to attend to. None: not seen yet."""
    load_tokens_per_s: float | None = None
    """From the disk. None: not seen yet."""
    decode_s: float = 0.0
    """One pass of every decode group."""
    generation_s: float = 0.0
    """How long a job decodes, from its first token to its last."""

    def __post_init__(self) -> None:
        assert self.prefill_tokens_per_s > 0, self
        assert self.decode_s >= 0, self
        assert self.generation_s >= 0, self

    def prefill_at(self, position: int) -> float:
        """Tokens per second of a prompt that stands at `position`.

        Where that was never seen: what was seen before it, halved for each doubling of the position, which is the
        worst that attention can do.
        """
        depth = _depth(position)
        for shallower in range(min(depth, len(self.by_depth) - 1), -1, -1):
            seen = self.by_depth[shallower]
            if seen is not None:
                return seen / 2 ** (depth - shallower)
        deeper = next((seen for seen in self.by_depth if seen is not None), None)
        return self.prefill_tokens_per_s if deeper is None else deeper

    def prefill_s(self, start: int, stop: int) -> float:
        """How long the positions ``[start, stop)`` of a prompt take. O(log stop)."""
        seconds = 0.0
        while start < stop:
            # To the end of the depth that `start` is in.
            end = min(stop, 1024 << _depth(start))
            seconds += (end - start) / self.prefill_at(start)
            start = end
        return seconds

    def after_load(self, num_tokens: int, seconds: float) -> "Speed":
        """The speed after so many tokens of a prompt were read from the disk in `seconds`."""
        if num_tokens <= 0 or seconds <= 0:
            return self
        seen = num_tokens / seconds
        known = self.load_tokens_per_s
        return replace(self, load_tokens_per_s=seen if known is None else _mean(known, seen, 0.5))

    def after_prefill(self, num_tokens: int, seconds: float, *, position: int = 0) -> "Speed":
        """The speed after a pass over `num_tokens` prompt tokens from `position` on that took `seconds`."""
        # A handful of tokens measures the pass and not the tokens.
        if num_tokens < 16 or seconds <= 0:
            return self
        seen = num_tokens / seconds
        depth = _depth(position)
        depths = [*self.by_depth, *[None] * (depth + 1 - len(self.by_depth))]
        before = depths[depth]
        depths[depth] = seen if before is None else _mean(before, seen, 0.5)
        return replace(self, prefill_tokens_per_s=_mean(self.prefill_tokens_per_s, seen, 0.5), by_depth=tuple(depths))

    def after_decode(self, seconds: float) -> "Speed":
        """The speed after every decode group has run once, in `seconds`."""
        return replace(self, decode_s=_mean(self.decode_s, seconds, 0.25))

    def after_generation(self, seconds: float) -> "Speed":
        """The speed after a job has decoded for `seconds` and ended."""
        return replace(self, generation_s=_mean(self.generation_s, seconds, 0.25))


def _depth(position: int) -> int:
    return (position // 1024).bit_length()


def _mean(before: float, seen: float, weight: float) -> float:
    return (1 - weight) * before + weight * seen


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
