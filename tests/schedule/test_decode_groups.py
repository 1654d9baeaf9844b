"""Decode groups: little padding, few groups, and rows that stay where they are."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.schedule.passes import group_rows
from reprise.schedule.state import DecodingJob, Group, SchedulerLimits

LIMITS = SchedulerLimits(max_batch=32, free_padding=100)


def rows(*lengths: int) -> list[DecodingJob]:
    return [DecodingJob(id=f"r{index:02}", length=length) for index, length in enumerate(lengths)]


def padded(groups: Sequence[Group], lengths: Mapping[str, int]) -> int:
    return sum(len(group.ids) * max(lengths[job_id] for job_id in group.ids) for group in groups)


def settled(before: Sequence[DecodingJob], groups: Sequence[Group], *, grow: int = 1) -> list[DecodingJob]:
    keys = {job_id: group.key for group in groups for job_id in group.ids}
    return [replace(row, length=row.length + grow, group=keys[row.id]) for row in before]


def test_a_long_chat_does_not_make_seven_short_ones_pay() -> None:
    groups = group_rows(rows(60_000, *[20] * 7), SchedulerLimits())
    assert [len(group.ids) for group in groups] == [7, 1]


def test_rows_of_similar_length_decode_together() -> None:
    assert len(group_rows(rows(2250, 2267, 2284, 2301, 2318, 2335), SchedulerLimits())) == 1


def test_rows_that_cannot_be_batched_decode_alone() -> None:
    some = [replace(row, can_batch=index > 1) for index, row in enumerate(rows(10, 10, 10, 10))]
    assert sorted(len(group.ids) for group in group_rows(some, LIMITS)) == [1, 1, 2]
    assert len(group_rows(some, replace(LIMITS, can_batch=False))) == 4


def test_a_row_without_state_decodes_alone_once() -> None:
    new = rows(0, 10, 0)
    groups = group_rows(new, LIMITS)
    assert sorted(group.ids for group in groups) == [("r00",), ("r01",), ("r02",)]
    assert len(group_rows(settled(new, groups), LIMITS)) == 1


def test_a_row_that_joins_moves_nobody() -> None:
    running = settled(rows(1000, 1010, 5000), group_rows(rows(1000, 1010, 5000), LIMITS))
    before = {row.id: row.group for row in running}
    groups = group_rows([*running, DecodingJob(id="new", length=1005)], LIMITS)
    after = {job_id: group.key for group in groups for job_id in group.ids}
    assert {job_id: after[job_id] for job_id in before} == before
    assert after["new"] == after["r00"]


def test_a_group_between_the_two_bounds_is_neither_split_nor_formed() -> None:
    # 80 tokens of padding: more than half of what is allowed, and less than all of it.
    limits = replace(LIMITS, max_padding=1.0)
    apart = rows(1000, 1080)
    together = [replace(row, group=4) for row in apart]
    assert len(group_rows(apart, limits)) == 2
    assert [group.key for group in group_rows(together, limits)] == [4]


def test_groups_that_have_become_alike_are_merged() -> None:
    limits = replace(LIMITS, max_padding=1.0)
    one, other = (replace(row, group=key) for key, row in enumerate(rows(1000, 1040)))
    assert len(group_rows([one, other], limits)) == 1


def test_of_two_groups_that_are_merged_the_smaller_moves() -> None:
    few, many = rows(1000), [replace(row, id=f"m{row.id}") for row in rows(1010, 1010, 1010)]
    for key_few, key_many in [(0, 1), (1, 0)]:
        live = [*(replace(row, group=key_few) for row in few), *(replace(row, group=key_many) for row in many)]
        assert [group.key for group in group_rows(live, LIMITS)] == [key_many]


@settings(deadline=None)
@given(data=st.data())
def test_padding_is_bounded_while_rows_come_and_go(data: st.DataObject) -> None:
    live: list[DecodingJob] = []
    for number in range(12):
        live = [row for row in live if data.draw(st.integers(0, 4)) != 0]
        new = data.draw(st.lists(st.integers(1, 40_000), max_size=4))
        live += [DecodingJob(id=f"{number}.{index}", length=length) for index, length in enumerate(new)]
        groups = group_rows(live, LIMITS)
        assert sorted(job_id for group in groups for job_id in group.ids) == sorted(row.id for row in live)
        assert len({group.key for group in groups}) == len(groups)
        lengths = {row.id: row.length for row in live}
        own = sum(lengths.values())
        assert padded(groups, lengths) <= LIMITS.max_padding * own + LIMITS.free_padding
        live = settled(live, groups)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=8))
def test_rows_that_only_grow_move_at_most_towards_fewer_groups(lengths: list[int]) -> None:
    live = rows(*lengths)
    counts: list[int] = []
    moves = 0
    for _ in range(40):
        groups = group_rows(live, LIMITS)
        after = settled(live, groups, grow=50)
        moves += sum(row.group is not None and row.group != new.group for row, new in zip(live, after, strict=True))
        counts.append(len(groups))
        live = after
    assert counts == sorted(counts, reverse=True)
    assert moves <= len(lengths) * (counts[0] - counts[-1])
