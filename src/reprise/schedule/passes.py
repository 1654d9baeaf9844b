"""The passes of a step: which jobs a prefill pass serves and how many tokens it has, and which rows decode together.

A slice ends at the job's next stop (a checkpoint, a divergence point or the end) or at the chunk size, whichever comes
first. A short last one takes the token that starts the decode with it and samples from there, which saves a pass,
unless a state is to be saved before that token. Slices of several jobs share a pass only if they have the same length:
prefill is never padded. Where a pass must hold an image whole, a slice ends before it or, if it begins with it, behind
it. A job with images ahead of it runs alone.

Decode rows are grouped by similar length, so that a long row does not cost short ones much padding: all rows of a group
are padded to its longest. Groups are merged while the total padding stays below half of the limit, and split when it
exceeds the limit; in between they stay as they are (hysteresis).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from reprise.core.pass_price import beyond
from reprise.schedule.state import DecodingJob, Group, PrefillingJob, SchedulerLimits, SchedulerState, Speed

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


def fitting_tokens(most: int, state: SchedulerState, limits: SchedulerLimits, *, position: int) -> int:
    """The most tokens of a pass at `position`, at most `most`, whose peak fits; at least the smallest chunk.

    The next smaller power of two each time. Down to a short slice, so that nothing is evicted for a longer pass, and
    below that only where not even eviction makes room.
    """

    def fits(num: int, within: int | None) -> bool:
        needed = beyond(state.kept_for_passes, state.price.of(num, position))
        return within is None or needed <= max(0, within)

    num = most
    while num > limits.short_slice and not fits(num, state.unused_nbytes):
        num = _shorter(num)
    if fits(num, state.unused_nbytes):
        return num
    while num > limits.min_chunk and not fits(num, state.free_nbytes):
        num = max(limits.min_chunk, _shorter(num))
    return num


def _shorter(num: int) -> int:
    """The largest power of two below `num`."""
    return 1 << (num - 1).bit_length() - 1


def next_stop(job: PrefillingJob, divergence_points: DivergencePoints) -> int:
    """The first position after ``job.position`` where its prefill must pause."""
    stops = (*job.checkpoints, *divergence_points.get(job.id, ()), job.end)
    return min(stop for stop in stops if job.position < stop <= job.end)


def may_sample(job: PrefillingJob, divergence_points: DivergencePoints, limits: SchedulerLimits) -> bool:
    """Whether the next slice of a job that runs alone may be its last, to the end of its prompt, and sample."""
    stops = (*job.checkpoints, *divergence_points.get(job.id, ()))
    is_free = not any(job.position < stop <= job.end for stop in stops) and not _has_images(job)
    return job.may_sample and is_free and job.end + 1 - job.position <= limits.last_slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward pass: `length` tokens of each of the `jobs`."""

    jobs: tuple[PrefillingJob, ...]
    length: int


def plan_pass(
    jobs: Sequence[PrefillingJob], divergence_points: DivergencePoints, budget: int, limits: SchedulerLimits
) -> Pass:
    """The next pass, of at most `budget` tokens or one image: a slice of the first job, and of others to save passes.

    `jobs` in order of priority, at least one. A long slice runs alone. Short ones of equal length run together; ragged
    ones are cut into powers of two if that takes far fewer passes than one per job.
    """
    head = jobs[0]
    to_stop = {job.id: next_stop(job, divergence_points) - job.position for job in jobs}
    length = to_stop[head.id]
    alone = Pass(jobs=(head,), length=_beside_images(head, min(length, budget), limits))
    if not (limits.can_batch and head.can_batch) or length >= min(limits.short_slice, budget) or _has_images(head):
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


def _beside_images(job: PrefillingJob, length: int, limits: SchedulerLimits) -> int:
    """The length of the job's next slice, of at most `length` tokens unless the image it begins with has more."""
    stop = job.position + length
    cut = next((span for span in job.spans if span.start < stop < span.stop), None)
    if cut is None or not limits.whole_images:
        return length
    return (cut.start if cut.start > job.position else cut.stop) - job.position


def _has_images(job: PrefillingJob) -> bool:
    """Whether it has images that are not computed yet."""
    return len(job.spans) > 0 and job.spans[-1].stop > job.position


def _fits_beside(job: PrefillingJob, head: PrefillingJob) -> bool:
    # Rows of a pass are padded to the longest, so rows of very different lengths run separately.
    low, high = sorted((job.position, head.position))
    # A row without state cannot be batched with rows that have state.
    return job.can_batch and (low > 0 or high == 0) and high <= 2 * low + 512 and not _has_images(job)


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """Rows in ascending order of length, at least one; `key` is None for a new group."""

    key: int | None
    rows: tuple[DecodingJob, ...]

    @property
    def longest(self) -> int:
        return self.rows[-1].length

    @property
    def padded(self) -> int:
        return len(self.rows) * self.longest


def group_rows(rows: Sequence[DecodingJob], limits: SchedulerLimits) -> tuple[Group, ...]:
    """The decode groups of the next pass, longest rows last.

    The padded length of all groups is at most ``max_padding`` times the sum of the rows' lengths, plus
    ``free_padding``. Rows that cannot be batched get a group each. O(n log n) when the rows have not changed.
    """
    # A row without state cannot be batched with rows that have state.
    is_alone = {row.id: row.length == 0 or not (limits.can_batch and row.can_batch) for row in rows}
    together = [row for row in rows if not is_alone[row.id]]
    groups = _row_groups(together)
    own = sum(row.length for row in together)
    padding = (limits.max_padding - 1) * own + limits.free_padding
    groups = _merge(groups, own + padding / 2)
    groups = _split(groups, own + padding)
    alone = [_RowGroup(row.group, (row,)) for row in rows if is_alone[row.id]]
    return _named([*groups, *alone])


def _row_groups(rows: Iterable[DecodingJob]) -> list[_RowGroup]:
    """The groups of the last pass without the rows that ended; each new row in its own group."""
    kept: dict[int, list[DecodingJob]] = {}
    groups: list[_RowGroup] = []
    for row in sorted(rows, key=lambda row: (row.length, row.id)):
        if row.group is None:
            groups.append(_RowGroup(None, (row,)))
        else:
            kept.setdefault(row.group, []).append(row)
    return [*groups, *(_RowGroup(key, tuple(members)) for key, members in kept.items())]


def _joined(a: _RowGroup, b: _RowGroup) -> _RowGroup:
    """Both groups as one, with the key of the larger, so that the smaller one's rows are copied."""
    larger = max((a, b), key=lambda group: (group.key is not None, group.padded))
    return _RowGroup(larger.key, tuple(sorted((*a.rows, *b.rows), key=lambda row: (row.length, row.id))))


def _merge(groups: list[_RowGroup], allowed: float) -> list[_RowGroup]:
    """Merge neighbours, cheapest first, while the total padded length is within `allowed`."""
    total = sum(group.padded for group in groups)
    groups = sorted(groups, key=lambda group: (group.longest, group.rows[-1].id))
    while len(groups) > 1:
        added, at = min(
            (_joined(a, b).padded - a.padded - b.padded, index) for index, (a, b) in enumerate(pairwise(groups))
        )
        if total + added > allowed:
            break
        total += added
        groups[at : at + 2] = [_joined(groups[at], groups[at + 1])]
    return groups


def _split(groups: list[_RowGroup], allowed: float) -> list[_RowGroup]:
    """Split groups where that saves most, until the total padded length is within `allowed`."""
    while sum(group.padded for group in groups) > allowed:
        _, index, at = max(
            (at * (group.longest - group.rows[at - 1].length), index, at)
            for index, group in enumerate(groups)
            for at in range(1, len(group.rows))
        )
        short, long = groups[index].rows[:at], groups[index].rows[at:]
        parts = sorted((_RowGroup(None, short), _RowGroup(None, long)), key=lambda group: group.padded)
        groups[index : index + 1] = [parts[0], replace(parts[1], key=groups[index].key)]
    return groups


def _named(groups: Iterable[_RowGroup]) -> tuple[Group, ...]:
    """The groups; new ones get the lowest free keys."""
    ordered = sorted(groups, key=lambda group: (group.longest, group.rows[-1].id))
    taken = {group.key for group in ordered if group.key is not None}
    free = (key for key in range(len(taken) + len(ordered)) if key not in taken)
    return tuple(
        Group(key=next(free) if group.key is None else group.key, ids=tuple(row.id for row in group.rows))
        for group in ordered
    )
