"""Which rows decode together: rows of similar length, so that a long one does not make short ones pay for padding.

A group of n rows is as wide as its longest. Groups are merged while the padding of all of them stays below half of
what is allowed, and split when it exceeds what is allowed: between the two, nobody moves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from reprise.schedule.limits import SchedulerLimits
from reprise.schedule.state import DecodingJob, Group


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Rows in ascending order of length, at least one; `key` is None for a group that is new."""

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

    The padded length of all groups is at most ``max_padding`` times the sum of the rows' own lengths, plus
    ``free_padding``. Rows that cannot be batched have a group each. O(n log n) when nobody came or went.
    """
    # State that does not exist yet cannot be joined with state that does.
    is_alone = {row.id: row.length == 0 or not (limits.can_batch and row.can_batch) for row in rows}
    together = [row for row in rows if not is_alone[row.id]]
    buckets = _buckets(together)
    own = sum(row.length for row in together)
    padding = (limits.max_padding - 1) * own + limits.free_padding
    buckets = _merge(buckets, own + padding / 2)
    buckets = _split(buckets, own + padding)
    alone = [_Bucket(row.group, (row,)) for row in rows if is_alone[row.id]]
    return _named([*buckets, *alone])


def _buckets(rows: Iterable[DecodingJob]) -> list[_Bucket]:
    """The groups of the last pass without the rows that left; each new row by itself."""
    kept: dict[int, list[DecodingJob]] = {}
    buckets: list[_Bucket] = []
    for row in sorted(rows, key=lambda row: (row.length, row.id)):
        if row.group is None:
            buckets.append(_Bucket(None, (row,)))
        else:
            kept.setdefault(row.group, []).append(row)
    return [*buckets, *(_Bucket(key, tuple(members)) for key, members in kept.items())]


def _joined(a: _Bucket, b: _Bucket) -> _Bucket:
    """Both groups as one, under the key of the larger: the other's rows are the ones that are copied."""
    larger = max((a, b), key=lambda bucket: (bucket.key is not None, bucket.padded))
    return _Bucket(larger.key, tuple(sorted((*a.rows, *b.rows), key=lambda row: (row.length, row.id))))


def _merge(buckets: list[_Bucket], allowed: float) -> list[_Bucket]:
    """Merge neighbours, cheapest first, while all are within `allowed`."""
    total = sum(bucket.padded for bucket in buckets)
    buckets = sorted(buckets, key=lambda bucket: (bucket.longest, bucket.rows[-1].id))
    while len(buckets) > 1:
        added, at = min(
            (_joined(a, b).padded - a.padded - b.padded, index) for index, (a, b) in enumerate(pairwise(buckets))
        )
        if total + added > allowed:
            break
        total += added
        buckets[at : at + 2] = [_joined(buckets[at], buckets[at + 1])]
    return buckets


def _split(buckets: list[_Bucket], allowed: float) -> list[_Bucket]:
    """Cut groups where that saves most, until all are within `allowed`. Single rows have no padding, so it ends."""
    while sum(bucket.padded for bucket in buckets) > allowed:
        _, index, at = max(
            (at * (bucket.longest - bucket.rows[at - 1].length), index, at)
            for index, bucket in enumerate(buckets)
            for at in range(1, len(bucket.rows))
        )
        short, long = buckets[index].rows[:at], buckets[index].rows[at:]
        parts = sorted((_Bucket(None, short), _Bucket(None, long)), key=lambda bucket: bucket.padded)
        buckets[index : index + 1] = [parts[0], replace(parts[1], key=buckets[index].key)]
    return buckets


def _named(buckets: Iterable[_Bucket]) -> tuple[Group, ...]:
    """Groups with keys, the lowest that are free for the new ones."""
    ordered = sorted(buckets, key=lambda bucket: (bucket.longest, bucket.rows[-1].id))
    taken = {bucket.key for bucket in ordered if bucket.key is not None}
    free = (key for key in range(len(taken) + len(ordered)) if key not in taken)
    return tuple(
        Group(key=next(free) if bucket.key is None else bucket.key, ids=tuple(row.id for row in bucket.rows))
        for bucket in ordered
    )
