"""Whole schedules in a simulated engine: nobody starves, nothing is computed twice, nobody is forgotten."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.core.images import outside
from reprise.core.tokens import Span, Tokens, as_tokens
from reprise.schedule.state import SchedulerLimits
from tests.matrix import examples
from tests.schedule.simulated import PASS_S, PREFILL_TOKENS_PER_S, SimulatedRequest, Simulation, SimulationReport

EXACT = SchedulerLimits(min_shared=1, prefill_chunk=64, max_batch=3, short_slice=24)
SNAPSHOTS = replace(EXACT, resumes_anywhere=False)
WHOLE = replace(SNAPSHOTS, whole_images=True, prefill_chunk=16, min_chunk=8)
LAYOUTS = pytest.mark.parametrize("limits", [EXACT, SNAPSHOTS], ids=["anywhere", "snapshots"])


def run(
    requests: list[SimulatedRequest], limits: SchedulerLimits, *, room_nbytes: int | None = None
) -> SimulationReport:
    return Simulation(requests, limits, room_nbytes=room_nbytes).run()


def num_unique(prompts: Iterable[Tokens]) -> int:
    return len({tokens[: n + 1].tobytes() for tokens in prompts for n in range(len(tokens))})


def random_tokens(length: int, seed: int) -> Tokens:
    return as_tokens(np.random.default_rng(seed).integers(0, 50_000, length))


@st.composite
def prompts(draw: st.DrawFn) -> Tokens:
    """A path through a small tree, so that many prompts share a beginning and some are the same."""
    pieces = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=4))
    return as_tokens(number for kind, length in pieces for number in [kind] * length)


@st.composite
def seen(draw: st.DrawFn) -> tuple[Tokens, tuple[Span, ...]]:
    """The same with images: runs of ids below zero behind a token that all images begin with."""
    run: list[int] = []
    spans: list[Span] = []
    for kind, length in draw(st.lists(st.tuples(st.integers(-2, 2), st.integers(2, 40)), min_size=1, max_size=4)):
        if kind < 0:
            spans.append(Span(len(run), len(run) + length))
        first = 100_000 * kind - 1000 * length
        run += [9, *range(first, first + length - 1)] if kind < 0 else [kind] * length
    return as_tokens([*run, 5]), tuple(spans)


@st.composite
def crowds(
    draw: st.DrawFn, *, is_burst: bool = False, may_leave: bool = True, has_images: bool = False
) -> list[SimulatedRequest]:
    times = st.just(0.0) if is_burst else st.floats(0, 0.6).map(lambda t: round(t, 3))
    requests: list[SimulatedRequest] = []
    for index in range(draw(st.integers(1, 9))):
        tokens, spans = draw(seen()) if has_images else (draw(prompts()), ())
        marks = draw(st.sets(st.integers(0, len(tokens)), max_size=2))
        leaves = draw(st.none() | st.floats(0.01, 1.0)) if may_leave else None
        requests.append(
            SimulatedRequest(
                id=f"r{index}",
                tokens=tokens,
                arrived_s=draw(times),
                max_tokens=draw(st.integers(0, 6)),
                leaves_s=leaves,
                is_lost=draw(st.booleans()),
                checkpoints=tuple(sorted({outside(mark, spans) for mark in marks})),
                spans=spans,
                live_nbytes=draw(st.integers(0, 3)),
                is_auxiliary=draw(st.booleans()),
                can_batch=draw(st.booleans()),
            )
        )
    return requests


@LAYOUTS
@settings(deadline=None, max_examples=examples(60))
@given(requests=crowds())
def test_every_request_ends_and_every_stream_gets_all_its_tokens(
    limits: SchedulerLimits, requests: list[SimulatedRequest]
) -> None:
    report = run(requests, limits, room_nbytes=4)
    assert set(report.ended_s) == {request.id for request in requests}
    for request in requests:
        if request.leaves_s is None:
            assert len(report.token_times.get(request.id, [])) == request.max_tokens


@LAYOUTS
@settings(deadline=None, max_examples=examples(30))
@given(requests=crowds())
def test_the_same_arrivals_give_the_same_schedule(limits: SchedulerLimits, requests: list[SimulatedRequest]) -> None:
    assert run(requests, limits).steps == run(requests, limits).steps


@LAYOUTS
@pytest.mark.parametrize("min_shared", [1, 8])
@settings(deadline=None, max_examples=examples(50))
@given(requests=crowds(is_burst=True, may_leave=False))
def test_a_burst_computes_each_token_once(
    limits: SchedulerLimits, min_shared: int, requests: list[SimulatedRequest]
) -> None:
    report = run(requests, replace(limits, min_shared=min_shared))
    # The last token of each prompt is always computed, and what is not worth waiting for.
    assert sum(report.num_prefilled.values()) <= num_unique(r.tokens for r in requests) + min_shared * len(requests)


@pytest.mark.parametrize("limits", [EXACT, SNAPSHOTS, WHOLE], ids=["anywhere", "snapshots", "whole"])
@settings(deadline=None, max_examples=examples(60))
@given(requests=crowds(is_burst=True, may_leave=False, has_images=True))
def test_a_burst_computes_each_image_once(limits: SchedulerLimits, requests: list[SimulatedRequest]) -> None:
    report = run(requests, limits)
    # Another image begins with the same token, which is computed with it.
    alike = sum(len(request.spans) for request in requests)
    assert sum(report.num_prefilled.values()) <= num_unique(r.tokens for r in requests) + len(requests) + alike


@pytest.mark.parametrize("limits", [EXACT, WHOLE], ids=["cut", "whole"])
@settings(deadline=None, max_examples=examples(40))
@given(requests=crowds(has_images=True))
def test_requests_with_images_come_and_leave_and_each_ends(
    limits: SchedulerLimits, requests: list[SimulatedRequest]
) -> None:
    report = run(requests, limits, room_nbytes=4)
    assert set(report.ended_s) == {request.id for request in requests}


@settings(deadline=None, max_examples=examples(80))
@given(requests=crowds())
def test_who_comes_late_or_leaves_early_costs_nothing_where_all_positions_can_be_resumed(
    requests: list[SimulatedRequest],
) -> None:
    report = run([replace(request, is_lost=False) for request in requests], EXACT)
    assert sum(report.num_prefilled.values()) <= num_unique(r.tokens for r in requests) + len(requests)


def translate_burst(num: int, *, first: int = 0, arrived_s: float = 0.0) -> list[SimulatedRequest]:
    system = random_tokens(2000, seed=1)
    return [
        SimulatedRequest(
            id=f"page{index}",
            tokens=as_tokens(np.concatenate([system, random_tokens(250 + 17 * index, seed=10 + index)])),
            arrived_s=arrived_s,
            max_tokens=20,
        )
        for index in range(first, first + num)
    ]


@pytest.mark.parametrize("resumes_anywhere", [True, False])
def test_the_page_translators_burst_computes_the_system_prompt_once(*, resumes_anywhere: bool) -> None:
    limits = SchedulerLimits(resumes_anywhere=resumes_anywhere)
    requests = [*translate_burst(6), *translate_burst(6, first=6, arrived_s=60.0)]
    report = run(requests, limits)
    unique = num_unique(request.tokens for request in requests)
    assert sum(report.num_prefilled.values()) <= unique + len(requests) <= 1.02 * unique


@LAYOUTS
@pytest.mark.parametrize("is_lost", [True, False])
def test_followers_go_on_where_a_leader_that_leaves_has_stopped(limits: SchedulerLimits, *, is_lost: bool) -> None:
    # The shortest leads, and leaves after about 400 tokens.
    leader, *others = translate_burst(4)
    report = run([replace(leader, leaves_s=0.4, is_lost=is_lost), *others], limits)
    unique = num_unique(request.tokens for request in others)
    done = report.num_prefilled[leader.id]
    assert 300 < done < 600
    assert all(len(report.token_times[other.id]) == 20 for other in others)
    computed = sum(report.num_prefilled[other.id] for other in others)
    assert computed <= unique + len(others) - (0 if is_lost else done)


@LAYOUTS
def test_a_follower_that_leaves_holds_up_nobody(limits: SchedulerLimits) -> None:
    requests = translate_burst(3)
    requests[2] = replace(requests[2], leaves_s=0.1)
    report = run(requests, limits)
    assert report.num_prefilled["page2"] == 0
    assert all(len(report.token_times[request.id]) == 20 for request in requests[:2])


@LAYOUTS
def test_three_answers_to_one_prompt_are_one_prefill(limits: SchedulerLimits) -> None:
    tokens = random_tokens(500, seed=3)
    report = run([SimulatedRequest(id=f"n{index}", tokens=tokens, max_tokens=5) for index in range(3)], limits)
    assert sorted(report.num_prefilled.values()) == [1, 1, 500]


@LAYOUTS
def test_a_long_prompt_stalls_nobody(limits: SchedulerLimits) -> None:
    limits = replace(limits, prefill_chunk=2048, max_stall_s=0.1)
    stream = SimulatedRequest(id="stream", tokens=random_tokens(10, seed=1), max_tokens=400)
    long = SimulatedRequest(id="long", tokens=random_tokens(20_000, seed=2), arrived_s=0.05)
    times = run([stream, long], limits).token_times["stream"]
    gaps = [after - before for before, after in pairwise(times)]
    assert 0.08 < max(gaps) < 0.12


@LAYOUTS
def test_a_short_request_need_not_wait_for_a_long_prompt(limits: SchedulerLimits) -> None:
    limits = replace(limits, prefill_chunk=512)
    long = SimulatedRequest(id="long", tokens=random_tokens(20_000, seed=2))
    short = SimulatedRequest(id="short", tokens=random_tokens(30, seed=1), arrived_s=5.0)
    report = run([long, short], limits)
    assert report.token_times["short"][0] < 6.0


@LAYOUTS
def test_a_long_prompt_does_not_starve_among_short_ones(limits: SchedulerLimits) -> None:
    # More short prompts than can be computed, for ever.
    shorts = [
        SimulatedRequest(id=f"s{index:04}", tokens=random_tokens(50, seed=index), arrived_s=0.04 * index)
        for index in range(160)
    ]
    long = SimulatedRequest(id="long", tokens=random_tokens(1000, seed=999_999), arrived_s=0.1)
    report = run([*shorts, long], replace(limits, max_queue=500, patience=3))
    assert report.ended_s["long"] < 0.1 + 4 * 1000 / PREFILL_TOKENS_PER_S + 2 < max(report.ended_s.values())


@LAYOUTS
def test_a_side_request_gives_way_and_does_not_starve(limits: SchedulerLimits) -> None:
    chats = [
        SimulatedRequest(id=f"c{index:03}", tokens=random_tokens(200, seed=index), arrived_s=0.19 * index)
        for index in range(60)
    ]
    side = SimulatedRequest(id="side", tokens=random_tokens(20, seed=999), arrived_s=0.1, is_auxiliary=True)
    report = run([*chats, side], replace(limits, max_queue=100))
    assert report.ended_s["side"] > report.ended_s["c001"]
    assert 1.0 < report.ended_s["side"] < 2.0
    same = run([*chats, replace(side, is_auxiliary=False)], replace(limits, max_queue=100))
    assert same.ended_s["side"] < 0.5


@LAYOUTS
def test_the_queue_is_bounded_and_says_when_to_come_back(limits: SchedulerLimits) -> None:
    requests = [SimulatedRequest(id=f"r{index:02}", tokens=random_tokens(100, seed=index)) for index in range(30)]
    report = run(requests, replace(limits, max_queue=10))
    assert report.most_waiting == 10
    # Ten prompts of 100 tokens at 1,000 tokens/s: half of them are done in half a second.
    assert set(report.refused.values()) == {1}
    assert len(report.refused) == 20


@LAYOUTS
def test_settling_runs_when_idle_and_is_given_up_on_arrival(limits: SchedulerLimits) -> None:
    limits = replace(limits, prefill_chunk=2048)
    settle = SimulatedRequest(id="settle", tokens=random_tokens(3000, seed=1), max_tokens=0, is_settle=True)
    chat = SimulatedRequest(id="chat", tokens=random_tokens(3100, seed=1), arrived_s=1.0)
    report = run([settle, chat], limits)
    given_up_s = report.ended_s["settle"]
    assert 1.0 <= given_up_s <= 1.0 + limits.max_stall_s + 2 * PASS_S
    # What was settled is not computed again.
    assert report.num_prefilled["settle"] + report.num_prefilled["chat"] == 3100


@LAYOUTS
def test_settling_waits_until_all_streams_have_ended(limits: SchedulerLimits) -> None:
    chat = SimulatedRequest(id="chat", tokens=random_tokens(100, seed=2), max_tokens=50)
    settle = SimulatedRequest(id="settle", tokens=random_tokens(100, seed=1), max_tokens=0, is_settle=True)
    report = run([settle, chat], limits)
    begun = [time for time, step in report.steps if "settle" in step.admit]
    assert begun == [report.ended_s["chat"]]
    assert report.num_prefilled["settle"] == 100


def test_models_that_run_alone_take_turns() -> None:
    limits = SchedulerLimits(can_batch=False)
    requests = [
        SimulatedRequest(id=f"r{index}", tokens=random_tokens(20, seed=index), max_tokens=30) for index in range(4)
    ]
    report = run(requests, limits)
    assert all(len(report.token_times[request.id]) == 30 for request in requests)
    last = [times[-1] for times in report.token_times.values()]
    assert max(last) - min(last) < 0.2


def test_a_job_that_is_too_big_for_now_is_not_overtaken_and_not_forgotten() -> None:
    requests = [
        SimulatedRequest(id="a", tokens=random_tokens(100, seed=1), max_tokens=20, live_nbytes=6),
        SimulatedRequest(id="big", tokens=random_tokens(100, seed=2), arrived_s=0.001, live_nbytes=8),
        SimulatedRequest(id="small", tokens=random_tokens(100, seed=3), arrived_s=0.002, live_nbytes=1),
        SimulatedRequest(id="huge", tokens=random_tokens(100, seed=4), arrived_s=0.003, live_nbytes=99),
    ]
    report = run(requests, SchedulerLimits(), room_nbytes=10)
    assert sorted(report.ended_s, key=lambda job_id: report.ended_s[job_id]) == ["a", "big", "small", "huge"]
