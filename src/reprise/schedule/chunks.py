"""How much is prefilled in one pass, and for whom.

A slice ends exactly at the job's next stop (a checkpoint, a parting or the end) or at the chunk size, whichever comes
first. Slices of several jobs share a pass only if they have the same length: prefill is never padded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reprise.schedule.limits import SchedulerLimits, Speed
from reprise.schedule.state import PrefillingJob

DivergencePoints = Mapping[str, frozenset[int]]
"""Job id → the positions where waiting jobs want it to pause."""


def chunk_tokens(
    limits: SchedulerLimits, speed: Speed, *, must_be_short: bool, position: int = 0, num_sharing: int = 1
) -> int:
    """The most tokens of the next prefill pass, whose first job stands at `position`.

    `must_be_short`: streams are decoding, or somebody may come. Then the pass and the decode passes that follow it
    take about `max_stall_s` together, of which each of `num_sharing` models has its part; else it is a whole
    `prefill_chunk`.
    """
    if not must_be_short:
        return limits.prefill_chunk
    room_s = max(0.0, limits.max_stall_s / num_sharing - speed.decode_s)
    fitting = min(limits.prefill_chunk, int(room_s * speed.prefill_at(position)))
    # Its last tokens cost what tokens cost there, which may be more than was ever seen.
    fitting = min(fitting, int(room_s * speed.prefill_at(position + fitting)))
    # Multiples of the smallest chunk: fewer different shapes for the allocator and for compiled kernels.
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
    """The next pass: a slice of the first job, and slices of others where that saves passes.

    `jobs` in their order, at least one. One long slice keeps the engine busy by itself. Short ones of the same length
    run together; ragged ones are cut by powers of two, if that gives far fewer passes than one for each job.
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
        # Slices of 2^k tokens for all that have the bit k set: as many passes as there are bits, and not lengths.
        length = 1 << (length.bit_length() - 1)
        taking = [job for job in short if to_stop[job.id] & length]
    else:
        taking = [job for job in short if to_stop[job.id] == length]
    return Pass(jobs=tuple(taking[: budget // length]), length=length)


def _fits_beside(job: PrefillingJob, head: PrefillingJob) -> bool:
    # In one pass all rows are as wide as the longest, so rows of very different lengths stay apart.
    low, high = sorted((job.position, head.position))
    # State that does not exist yet cannot be joined with state that does.
    return job.can_batch and (low > 0 or high == 0) and high <= 2 * low + 512
