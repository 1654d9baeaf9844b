"""Drafts of known answers with passes of fixed costs: how near they come to what was written before."""

import pytest

from bench.draft_replay import COSTS, ReplayCounts, ReplayTurn, WrittenRuns, demo_chats, least_cost, replay, workloads
from tests.matrix import rows_now_and_later

LEAST = {
    ("compute", "edit"): 0.93,
    ("compute", "tools"): 0.9,
    ("compute", "again"): 0.97,
    ("memory", "edit"): 0.85,
    ("memory", "tools"): 0.8,
    ("memory", "again"): 0.9,
}
"""The share of what an oracle reaches."""


def counted(turns: list[ReplayTurn], costs: str, *, rewinds: bool = True) -> ReplayCounts:
    counts = ReplayCounts()
    replay(turns, COSTS[costs], counts, rewinds=rewinds)
    return counts


@pytest.mark.parametrize(("costs", "name"), LEAST)
def test_what_was_written_before_is_drafted(costs: str, name: str) -> None:
    found = counted(workloads(0)[name], costs)
    assert found.ratio >= LEAST[costs, name] * found.best
    assert found.tokens == found.passes + found.accepted
    assert found == counted(workloads(0)[name], costs)
    # Layers that cannot drop tokens take those again that stood before a wrong one.
    assert 2.0 <= counted(workloads(0)[name], costs, rewinds=False).ratio <= found.ratio


@pytest.mark.parametrize("costs", COSTS)
def test_where_nothing_repeats_nothing_is_drafted(costs: str) -> None:
    found = counted(workloads(0)["chat"], costs)
    assert (found.passes, found.drafted, found.cost) == (399, 0, 399)


@pytest.mark.matrix
@pytest.mark.parametrize(("costs", "least"), rows_now_and_later([("compute", 1.7)], [("memory", 2.8)]))
def test_answers_of_the_demo_are_drafted(costs: str, least: float) -> None:
    assert all(counted(turns, costs).ratio > least for turns in demo_chats().values())


def test_an_oracle_drafts_all_that_repeats_and_nothing_else() -> None:
    said = WrittenRuns()
    assert said.repeated(ReplayTurn(prompt=[1, 2, 3], answer=[4, 5, 6])) == [False] * 3
    assert said.repeated(ReplayTurn(prompt=[9], answer=[2, 3, 4, 5, 7, 3, 4])) == [True] * 4 + [False] * 3
    costs = [1.0, 1.5, 2.0, 2.5]
    # A token is sampled behind each draft, so the first five take 2.5 and 1, or 2 and 1.5.
    assert least_cost([True] * 4 + [False], costs) == 3.5
    assert least_cost([False] * 3, costs) == 3.0
