"""What the scheduler decides from: its limits, the measured speed, and a record per job; and its output, a `Step`.

The estimates of the waiting time follow from limits and speed, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from reprise.core.pass_price import SMALLEST_CHUNK, PassPrice
from reprise.core.tokens import Span

LAST_SLICE = 32
"""So many tokens take about as long as one, and their logits some MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The limits for one served model. Lengths in tokens, times in seconds."""

    max_batch: int = 8
    """Rows that run at the same time, prefilling and decoding together."""
    max_queue: int = 64
    """Jobs that may wait, settling jobs not counted."""
    prefill_chunk: int = 2048
    """The most tokens of one prefill pass, over all its slices."""
    min_chunk: int = SMALLEST_CHUNK
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
    """Shorter slices do not fill the device, so several run in one pass; none is cut shorter to save an eviction."""
    max_padding: float = 1.1
    """Limit of the padded length of all decode rows, as a multiple of their total length."""
    free_padding: int = 1024
    """Padding in tokens, over all rows, that costs less than another pass over the weights."""
    patience: float = 4.0
    """A job precedes every later one after waiting this many times its own prefill time."""
    side_grace_s: float = 1.0
    """How long an auxiliary request gives way to all others."""
    whole_images: bool = False
    """Whether a pass must hold an image whole, since its tokens attend to each other both ways."""
    last_slice: int = LAST_SLICE
    """The most tokens of a slice that also gives its answer's first token: it has logits for each of them."""

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
        assert self.last_slice > 0, self
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
    tower_row_s: tuple[float | None, ...] = ()
    """Seconds of the tower for each placeholder of an image of 1, 2 to 3, 4 to 7, … of them. None: not measured yet."""
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

    def tower_s(self, num_rows: int) -> float:
        """Seconds that the tower will take for an image of so many placeholders: as the nearest size that was measured,
        in proportion; 0 if none was."""
        size = num_rows.bit_length() - 1
        known = [(abs(size - at), seen) for at, seen in enumerate(self.tower_row_s) if seen is not None]
        return num_rows * min(known)[1] if known else 0.0

    def after_tower(self, num_rows: int, seconds: float) -> "Speed":
        """The speed after the tower took `seconds` for an image of `num_rows` placeholders."""
        size, seen = num_rows.bit_length() - 1, seconds / num_rows
        sizes = [*self.tower_row_s, *[None] * (size + 1 - len(self.tower_row_s))]
        before = sizes[size]
        sizes[size] = seen if before is None else _mean(before, seen, 0.5)
        return replace(self, tower_row_s=tuple(sizes))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJob:
    """A job that has not been admitted yet.

    Prefill would compute ``[resume_at, prompt_len)``. `resume_at` is what the cache has now: the loop matches again
    whenever a job with which it has a common prefix commits, ends or is stopped.
    """

    id: str
    arrived_s: float
    prompt_len: int
    resume_at: int = 0
    common_prefix_lengths: Mapping[str, int] = field(default_factory=dict[str, int])
    """Job id → length of the common prefix of the two prompts, for the jobs present when this one arrived
    (`sharing.common_prefix_lengths`). May contain jobs that have ended."""
    live_nbytes: int = 0
    """Estimated bytes of its live state."""
    tower_nbytes: int = 0
    """The most bytes of the memory for live state that the tower takes for one of its images that are not encoded."""
    preempted_beside: frozenset[str] = frozenset()
    """The jobs that continued when it was preempted for lack of memory. While all of them run, it has no more room
    than then, whatever the estimate says."""
    spans: tuple[Span, ...] = ()
    """Its images, in order."""
    can_batch: bool = True
    is_auxiliary: bool = False
    """A short request besides the chats (a title, tags): gives way for `SchedulerLimits.side_grace_s`."""
    is_settle: bool = False
    """Runs only while there is no request."""
    beside: str | None = None
    """Of a settle: the job beside whose decoding it may run, if there is no other request."""

    def __post_init__(self) -> None:
        # The last token is always computed: its logits start the decode.
        assert 0 <= self.resume_at < self.prompt_len, self


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillingJob:
    """An admitted job whose live state is (or will be) at `position`; ``[position, end)`` is still to be prefilled.

    `end`: the prompt's length, or one less if its last token starts the decode. A job at its end is no longer
    prefilling.
    """

    id: str
    arrived_s: float
    position: int
    end: int
    checkpoints: tuple[int, ...] = ()
    """The planned positions where prefill pauses, ascending; may include positions already passed."""
    stored: int = 0
    """``[0, stored)`` of its prompt is committed, or was refused by the cache."""
    common_prefix_lengths: Mapping[str, int] = field(default_factory=dict[str, int])
    spans: tuple[Span, ...] = ()
    """Its images, in order."""
    unseen: tuple[Span, ...] = ()
    """Those of them, in order, that the tower has to run for before a slice reaches them."""
    tower_nbytes: int = 0
    """As in `WaitingJob`."""
    can_batch: bool = True
    is_auxiliary: bool = False
    is_settle: bool = False
    beside: str | None = None
    is_restoring: bool = False
    """Its state is still being restored: it cannot run yet."""
    may_sample: bool = False
    """Whether its last slice may go beyond `end` to the prompt's last token, and give the answer's first."""

    def __post_init__(self) -> None:
        assert 0 <= self.position < self.end, self
        assert list(self.checkpoints) == sorted(self.checkpoints), self


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingJob:
    """A row that decodes. Its live state has `length` positions: 0 at first for a prompt of one token."""

    id: str
    length: int
    group: int | None = None
    """The key of its last decode group; None for a row that has just finished prefill."""
    stored: int = 0
    """``[0, stored)`` of its prompt is committed, or was refused by the cache."""
    common_prefix_lengths: Mapping[str, int] = field(default_factory=dict[str, int])
    can_batch: bool = True

    def __post_init__(self) -> None:
        assert self.length >= 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """Everything that a decision depends on besides the limits. Cancelled and failed jobs are not included."""

    now_s: float
    waiting: tuple[WaitingJob, ...] = ()
    """In any order."""
    prefilling: tuple[PrefillingJob, ...] = ()
    decoding: tuple[DecodingJob, ...] = ()
    speed: Speed = field(default_factory=Speed)
    free_nbytes: int | None = None
    """Bytes available for live state, once all is evicted that may be; None: unlimited."""
    unused_nbytes: int | None = None
    """Bytes of the budget that nothing holds, and that no running job will need; None: unlimited."""
    price: PassPrice = field(default_factory=PassPrice)
    """What prefill passes take at their peak beside live state."""
    kept_for_passes: int | None = None
    """Bytes that are kept for that beside the budget; None: unlimited."""
    num_others: int = 0
    """Other models that serve requests: each runs a step between two steps of this one."""
    is_closed: bool = False
    """Admit no further jobs: the model is to be unloaded once the running ones have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Prefill the tokens ``[start, stop)`` of one job. `samples`: to the prompt's end, and sample the next token."""

    id: str
    start: int
    stop: int
    is_checkpoint: bool = False
    """Commit the state at `stop`: the plan has a checkpoint there, or a waiting job diverges there."""
    samples: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop, self
        assert not (self.is_checkpoint and self.samples), self

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows that decode in one pass. `key` identifies the group across passes."""

    key: int
    ids: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.ids, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Either changes of jobs, or passes to run, or neither (idle).

    Changes (`give_up`, `commit`, `admit`): the loop applies them, updates its state (a commit can move the `resume_at`
    of waiting jobs) and decides again at once.

    Passes: one over all `prefill` slices, which have the same length, and one for each `decode` group. Every decoding
    row is in exactly one group. A slice that samples is the only one.
    """

    give_up: tuple[str, ...] = ()
    """Settling jobs to stop, because a request has arrived. What they have computed is committed."""
    commit: tuple[str, ...] = ()
    """Running jobs to commit now, since a waiting job can resume from them. It sets `stored` to what was committed,
    or to the position if the cache refused."""
    admit: tuple[str, ...] = ()
    """Waiting jobs to restore, plan and start."""
    encode: str | None = None
    """A prefilling job for whose next image the tower runs, before the slices."""
    prefill: tuple[Slice, ...] = ()
    decode: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        assert not (self.is_change and (self.encode is not None or self.prefill or self.decode)), self
        assert len({len(piece) for piece in self.prefill}) <= 1, self
        assert len(self.prefill) == 1 or not any(piece.samples for piece in self.prefill), self

    @property
    def is_change(self) -> bool:
        """Whether the step changes jobs; then no pass runs, and the loop decides again."""
        return len(self.give_up) + len(self.commit) + len(self.admit) > 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do until a job arrives."""
        computes = self.encode is not None or len(self.prefill) + len(self.decode) > 0
        return not self.is_change and not computes
