"""Which jobs a prefill pass serves, and how many tokens it has.

A slice ends at the job's next stop (a checkpoint, a divergence point or the end) or at the chunk size, whichever comes
first. Slices of several jobs share a pass only if they have the same length: prefill is never padded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reprise.schedule.limits import SchedulerLimits, Speed
from reprise.schedule.state import PrefillingJob

DivergencePoints = Mapping[str, frozenset[int]]
"""Job id → the positions at which waiting jobs diverge from it, where it must pause."""


def chunk_tokens(
    limits: SchedulerLimits, speed: Speed, *, must_be_short: bool, position: int = 0, num_sharing: int = 1
) -> int:
    """The most tokens of the next prefill pass, whose first job is at `position`.

    `must_be_short`: streams are decoding, or a request may arrive. The pass and the decode passes after it then take
    about `max_stall_s` together, divided among `num_sharing` models; otherwise the pass may have `prefill_chunk`
    tokens.
    """
    if not must_be_short:
        return limits.prefill_chunk
    room_s = max(0.0, limits.max_stall_s / num_sharing - speed.decode_s)
    fitting = min(limits.prefill_chunk, int(room_s * speed.prefill_at(position)))
    # Its last tokens may be slower than any measured so far.
    fitting = min(fitting, int(room_s * speed.prefill_at(position + fitting)))
    # Multiples of the smallest chunk, for fewer shapes in the allocator and compiled kernels.
    return max(1, fitting // limits.min_chunk) * limits.min_chunk


def next_stop(job: PrefillingJob, divergence_points: DivergencePoints) -> int:
    """The first position after ``job.position`` where its prefill must pause."""
    stops = (*job.checkpoints, *divergence_points.get(job.id, ()), job.end)
    return min(stop for stop in stops if job.position < stop <= job.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward pass: `length` tokens of each of the `jobs`."""

    jobs: tuple[PrefillingJob, ...]
    length: int


def plan_pass(
    jobs: Sequence[PrefillingJob], divergence_points: DivergencePoints, budget: int, limits: SchedulerLimits
) -> Pass:
    """The next pass: a slice of the first job, and slices of others if that saves passes.

    `jobs` in order of rank, at least one. A long slice runs alone. Short ones of equal length run together; ragged ones
    are cut into powers of two if that takes far fewer passes than one per job.
    """
    head = jobs[0]
    to_stop = {job.id: next_stop(job, divergence_points) - job.position for job in jobs}
    length = to_stop[head.id]
    alone = Pass(jobs=(head,), length=min(length, budget))
    if not (limits.can_batch and head.can_batch) or length >= min(limits.short_slice, budget):
        return alone
    short = [job for job in jobs if to_stop[job.id] < limits.short_slice and _fits_beside(job, head)]
    lengths = {to_stop[job.id] for job in short}
    bits = 0
    for each in lengths:
        bits |= each
    num_bits = bits.bit_count()
    if num_bits < len(lengths) and 2 * num_bits <= len(short):
        # Slices of 2^k tokens for all lengths with bit k set: one pass per bit instead of one per length.
        length = 1 << (length.bit_length() - 1)
        taking = [job for job in short if to_stop[job.id] & length]
    else:
        taking = [job for job in short if to_stop[job.id] == length]
    return Pass(jobs=tuple(taking[: budget // length]), length=length)


def _fits_beside(job: PrefillingJob, head: PrefillingJob) -> bool:
    # Rows of a pass are padded to the longest, so rows of very different lengths run separately.
    low, high = sorted((job.position, head.position))
    # A row without state cannot be batched with rows that have state.
    return job.can_batch and (low > 0 or high == 0) and high <= 2 * low + 512
