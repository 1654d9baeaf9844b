"""Groups decode rows by similar length, so that a long row does not cost short ones much padding.

All rows of a group are padded to its longest. Groups are merged while the total padding stays below half of the limit,
and split when it exceeds the limit; in between they stay as they are (hysteresis).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from reprise.schedule.limits import SchedulerLimits
from reprise.schedule.state import DecodingJob, Group


@dataclass(frozen=True, slots=True)
class _Bucket:
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
    buckets = _buckets(together)
    own = sum(row.length for row in together)
    padding = (limits.max_padding - 1) * own + limits.free_padding
    buckets = _merge(buckets, own + padding / 2)
    buckets = _split(buckets, own + padding)
    alone = [_Bucket(row.group, (row,)) for row in rows if is_alone[row.id]]
    return _named([*buckets, *alone])


def _buckets(rows: Iterable[DecodingJob]) -> list[_Bucket]:
    """The groups of the last pass without the rows that ended; each new row in its own bucket."""
    kept: dict[int, list[DecodingJob]] = {}
    buckets: list[_Bucket] = []
    for row in sorted(rows, key=lambda row: (row.length, row.id)):
        if row.group is None:
            buckets.append(_Bucket(None, (row,)))
        else:
            kept.setdefault(row.group, []).append(row)
    return [*buckets, *(_Bucket(key, tuple(members)) for key, members in kept.items())]


def _joined(a: _Bucket, b: _Bucket) -> _Bucket:
    """Both groups as one, with the key of the larger, so that the smaller one's rows are copied."""
    larger = max((a, b), key=lambda bucket: (bucket.key is not None, bucket.padded))
    return _Bucket(larger.key, tuple(sorted((*a.rows, *b.rows), key=lambda row: (row.length, row.id))))


def _merge(buckets: list[_Bucket], allowed: float) -> list[_Bucket]:
    """Merge neighbours, cheapest first, while the total padded length is within `allowed`."""
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
    """Split groups where that saves most, until the total padded length is within `allowed`."""
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
    """The groups; new ones get the lowest free keys."""
    ordered = sorted(buckets, key=lambda bucket: (bucket.longest, bucket.rows[-1].id))
    taken = {bucket.key for bucket in ordered if bucket.key is not None}
    free = (key for key in range(len(taken) + len(ordered)) if key not in taken)
    return tuple(
        Group(key=next(free) if bucket.key is None else bucket.key, ids=tuple(row.id for row in bucket.rows))
        for bucket in ordered
    )
