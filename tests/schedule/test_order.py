"""The order of jobs, admission and the bound of the queue."""

from dataclasses import replace
from typing import Any

import pytest

from reprise.core.kinds import Full, Layout
from reprise.core.pass_price import PassPrice
from reprise.schedule.decide import decide, is_auxiliary_request, priority_of
from reprise.schedule.state import (
    LONGEST_RETRY_S,
    DecodingJob,
    PrefillingJob,
    SchedulerLimits,
    SchedulerState,
    Speed,
    Step,
    WaitingJob,
    retry_after_s,
)

SPEED = Speed(prefill_tokens_per_s=1000)


def job(
    job_id: str, arrived_s: float, prompt_len: int, resume_at: int = 0, *, is_auxiliary: bool = False
) -> WaitingJob:
    return WaitingJob(
        id=job_id, arrived_s=arrived_s, prompt_len=prompt_len, resume_at=resume_at, is_auxiliary=is_auxiliary
    )


def order(*jobs: WaitingJob, now_s: float = 0.0) -> list[str]:
    state = SchedulerState(now_s=now_s, waiting=jobs, speed=SPEED)
    return [one.id for one in sorted(jobs, key=lambda one: priority_of(one, state, SchedulerLimits()))]


def decoding(num: int) -> tuple[DecodingJob, ...]:
    return tuple(DecodingJob(id=f"d{index}", length=10) for index in range(num))


def test_jobs_of_one_size_go_in_the_order_of_their_arrival() -> None:
    assert order(job("b", 0.2, 100), job("c", 0.3, 100), job("a", 0.1, 100)) == ["a", "b", "c"]


def test_of_jobs_that_came_together_the_one_with_most_reuse_and_least_left_goes_first() -> None:
    assert order(job("a", 0, 1000), job("b", 0, 1000, 900), job("c", 0, 500, 300)) == ["b", "c", "a"]


def test_a_job_that_has_waited_goes_ahead_of_a_shorter_one() -> None:
    assert order(job("long", 0, 1000), job("short", 3.9, 10)) == ["short", "long"]
    assert order(job("long", 0, 1000), job("short", 4.1, 10)) == ["long", "short"]


def test_a_side_request_comes_last_until_it_has_waited() -> None:
    jobs = job("side", 0, 10, is_auxiliary=True), job("chat", 0.5, 5000)
    assert order(*jobs, now_s=0.9) == ["chat", "side"]
    assert order(*jobs, now_s=1.0) == ["side", "chat"]


def test_a_side_request_leaves_a_row_free_until_it_has_waited() -> None:
    limits = SchedulerLimits(max_batch=3)
    state = SchedulerState(now_s=0.5, waiting=(job("side", 0, 10, is_auxiliary=True),), decoding=decoding(2))
    assert decide(state, limits).admit == ()
    assert decide(replace(state, now_s=1.0), limits).admit == ("side",)
    assert decide(replace(state, decoding=decoding(1)), limits).admit == ("side",)
    assert decide(replace(state, decoding=()), SchedulerLimits(max_batch=1)).admit == ("side",)


def test_what_is_a_side_request() -> None:
    assert is_auxiliary_request(prompt_len=300, resume_at=20, has_chats=True)
    assert not is_auxiliary_request(prompt_len=300, resume_at=20, has_chats=False)
    assert not is_auxiliary_request(prompt_len=300, resume_at=200, has_chats=True)
    assert not is_auxiliary_request(prompt_len=5000, resume_at=20, has_chats=True)
    # Less than half is cached, of at most 1,024 tokens.
    assert is_auxiliary_request(prompt_len=301, resume_at=149, has_chats=True)
    assert not is_auxiliary_request(prompt_len=301, resume_at=150, has_chats=True)
    assert is_auxiliary_request(prompt_len=1024, resume_at=0, has_chats=True)
    assert not is_auxiliary_request(prompt_len=1025, resume_at=0, has_chats=True)


def test_no_more_rows_than_the_batch_has() -> None:
    state = SchedulerState(now_s=0, waiting=(job("a", 0, 10),), decoding=decoding(8))
    step = decide(state, SchedulerLimits(max_batch=8))
    assert not step.is_change
    assert len(step.decode[0].ids) == 8


def test_a_preempted_job_waits_until_one_that_ran_beside_it_has_ended() -> None:
    again = replace(job("again", 1, 10), preempted_beside=frozenset({"d0", "d1"}), live_nbytes=1)
    state = SchedulerState(now_s=5, waiting=(again, job("later", 2, 10)), decoding=decoding(2), free_nbytes=100)
    # Whatever it is thought to need; and nobody overtakes it.
    assert not decide(state, SchedulerLimits()).is_change
    assert not decide(replace(state, decoding=decoding(3)), SchedulerLimits()).is_change
    assert decide(replace(state, decoding=decoding(1)), SchedulerLimits()).admit[0] == "again"
    assert decide(replace(state, decoding=()), SchedulerLimits()).admit[0] == "again"


def test_jobs_that_are_admitted_together_share_the_rows() -> None:
    waiting = tuple(job(f"j{index}", 0, 10) for index in range(6))
    assert decide(
        SchedulerState(now_s=0, waiting=waiting, decoding=decoding(1)), SchedulerLimits(max_batch=3)
    ).admit == ("j0", "j1")


def test_the_last_row_goes_to_the_first_in_order_wherever_it_stands_in_the_queue() -> None:
    waiting = (job("late", 2, 10), job("early", 1, 10))
    assert decide(
        SchedulerState(now_s=3, waiting=waiting, decoding=decoding(1)), SchedulerLimits(max_batch=2)
    ).admit == ("early",)


def test_a_job_without_room_waits_and_those_behind_it_too() -> None:
    big, small = replace(job("big", 0, 10), live_nbytes=100), replace(job("small", 1, 10), live_nbytes=1)
    state = SchedulerState(now_s=2, waiting=(big, small), decoding=decoding(1), free_nbytes=50)
    assert decide(state, SchedulerLimits()).admit == ()
    assert decide(replace(state, decoding=()), SchedulerLimits()).admit == ("big",), "it will never have more room"


FAST = Speed(prefill_tokens_per_s=1e6)


def test_a_job_waits_for_room_for_its_dearest_pass_too() -> None:
    """In the smallest chunks, the last pass of the prompt takes 16 × 116 bytes, of which 800 are kept."""
    new = replace(job("new", 0, 100), live_nbytes=30)
    price = PassPrice(layout=Layout(kinds=(Full(),)), per_key=1)
    state = SchedulerState(now_s=2, waiting=(new,), decoding=decoding(1), price=price, kept_for_passes=800, speed=FAST)
    taken = price.of(16, 100) - 800
    assert decide(replace(state, free_nbytes=taken + 30), SchedulerLimits()).admit == ("new",)
    assert decide(replace(state, free_nbytes=taken + 29), SchedulerLimits()).admit == ()
    # One pass runs at a time: two need room for the dearer one.
    two = replace(state, waiting=(new, replace(new, id="newer")), free_nbytes=taken + 60)
    assert decide(two, SchedulerLimits()).admit == ("new", "newer")
    # And one that prefills already needs it as well.
    deep = PrefillingJob(id="deep", arrived_s=0, position=0, end=200)
    needed = price.of(16, 200) - 800 + 30
    beside = replace(state, prefilling=(deep, replace(deep, id="shallower", end=150)), free_nbytes=needed)
    assert decide(beside, SchedulerLimits()).admit == ("new",)
    assert decide(replace(beside, free_nbytes=needed - 1), SchedulerLimits()).admit == ()


def test_a_job_waits_for_room_for_the_tower_too_which_runs_for_one_image_at_a_time() -> None:
    new = replace(job("new", 0, 100), live_nbytes=30, tower_nbytes=500)
    state = SchedulerState(now_s=2, waiting=(new,), decoding=decoding(1), speed=FAST)
    assert decide(replace(state, free_nbytes=530), SchedulerLimits()).admit == ("new",)
    assert decide(replace(state, free_nbytes=529), SchedulerLimits()).admit == ()
    two = replace(state, waiting=(new, replace(new, id="newer")), free_nbytes=560)
    assert decide(two, SchedulerLimits()).admit == ("new", "newer")
    seeing = PrefillingJob(id="seeing", arrived_s=0, position=0, end=100, tower_nbytes=600)
    assert decide(replace(state, prefilling=(seeing,), free_nbytes=629), SchedulerLimits()).admit == ()


def test_jobs_that_are_admitted_together_share_the_room() -> None:
    waiting = tuple(replace(job(f"j{index}", 0, 10), live_nbytes=20) for index in range(4))
    assert len(decide(SchedulerState(now_s=0, waiting=waiting, free_nbytes=50), SchedulerLimits()).admit) == 2


@pytest.mark.parametrize("num_here", [0, 1, 2])
@pytest.mark.parametrize("num_others", [0, 1, 2])
def test_a_job_without_room_waits_while_anything_runs_on_any_model(num_here: int, num_others: int) -> None:
    big = replace(job("big", 0, 10), live_nbytes=100)
    state = SchedulerState(now_s=2, waiting=(big,), decoding=decoding(num_here), free_nbytes=50, num_others=num_others)
    assert decide(state, SchedulerLimits()).admit == (("big",) if num_here == num_others == 0 else ())


@pytest.mark.parametrize(("num_others", "num"), [(0, 2048), (1, 112), (3, 48)])
def test_a_chunk_leaves_time_for_the_steps_of_other_models(num_others: int, num: int) -> None:
    """All of them share the stall of a quarter of a second, also while nothing decodes here."""
    prefilling = PrefillingJob(id="a", arrived_s=0, position=0, end=9000)
    state = SchedulerState(now_s=0, prefilling=(prefilling,), speed=SPEED, num_others=num_others)
    assert len(decide(state, SchedulerLimits(max_stall_s=0.25)).prefill[0]) == num


def test_settling_stops_for_a_request_and_nothing_else_happens_in_that_step() -> None:
    settling = PrefillingJob(id="s", arrived_s=0, position=10, end=100, is_settle=True)
    state = SchedulerState(now_s=0, prefilling=(settling,), waiting=(job("a", 0, 10),))
    step = decide(state, SchedulerLimits())
    assert (step.give_up, step.admit) == (("s",), ())
    assert decide(replace(state, waiting=()), SchedulerLimits()).prefill[0].id == "s"


def test_settling_runs_in_short_chunks() -> None:
    settling = PrefillingJob(id="s", arrived_s=0, position=10, end=9000, is_settle=True)
    step = decide(SchedulerState(now_s=0, prefilling=(settling,), speed=SPEED), SchedulerLimits(max_stall_s=0.1))
    assert len(step.prefill[0]) == 96


def beside_an_answer(**changed: Any) -> SchedulerState:
    """An answer that decodes, and a settle of what it starts."""
    settling = PrefillingJob(id="s", arrived_s=0, position=10, end=9000, is_settle=True, beside="d0")
    return replace(SchedulerState(now_s=0, prefilling=(settling,), decoding=decoding(1), speed=SPEED), **changed)


def test_what_the_only_answer_starts_is_settled_in_what_it_leaves_of_the_gap() -> None:
    alone = decide(beside_an_answer(decoding=()), SchedulerLimits(max_stall_s=0.1))
    step = decide(beside_an_answer(), SchedulerLimits(max_stall_s=0.1))
    assert [group.ids for group in step.decode] == [("d0",)] and step.give_up == ()
    assert 10 < step.prefill[0].stop <= alone.prefill[0].stop


@pytest.mark.parametrize(
    "changed",
    [
        {"waiting": (WaitingJob(id="a", arrived_s=0, prompt_len=10),)},
        {"decoding": decoding(2)},
        {"decoding": (DecodingJob(id="other", length=10),)},
        {"num_others": 1},
        {"is_closed": True},
    ],
)
def test_it_is_given_up_for_anything_else(changed: dict[str, Any]) -> None:
    assert decide(beside_an_answer(**changed), SchedulerLimits()) == Step(give_up=("s",))


@pytest.mark.parametrize(
    ("changed", "is_admitted"),
    [({}, True), ({"beside": "other"}, False), ({"resume_at": 99}, False), ({"live_nbytes": 7}, False)],
)
def test_it_is_begun_where_there_is_room_and_something_to_compute(
    changed: dict[str, Any], *, is_admitted: bool
) -> None:
    settle = replace(WaitingJob(id="s", arrived_s=0, prompt_len=100, is_settle=True, beside="d0"), **changed)
    state = SchedulerState(now_s=0, waiting=(settle,), decoding=decoding(1), free_nbytes=6)
    step = decide(state, SchedulerLimits())
    assert step.admit == (("s",) if is_admitted else ())
    assert is_admitted or [group.ids for group in step.decode] == [("d0",)]
    assert decide(state, SchedulerLimits(max_batch=1)).admit == ()


def test_nothing_to_do_is_idle() -> None:
    assert decide(SchedulerState(now_s=0), SchedulerLimits()).is_idle


@pytest.mark.parametrize(
    ("num_waiting", "num_left", "generation_s", "expected"),
    [
        (7, 99_999, 9.0, None),
        (8, 10_000, 0.0, 5),
        (8, 0, 0.0, 1),
        (8, 10_000, 4.0, 7),
        (8, 10**9, 0.0, LONGEST_RETRY_S),
    ],
)
def test_a_full_queue_says_when_half_of_it_will_be_gone(
    num_waiting: int, num_left: int, generation_s: float, expected: int | None
) -> None:
    speed = replace(SPEED, generation_s=generation_s)
    limits = SchedulerLimits(max_queue=8, max_batch=8)
    assert retry_after_s(num_waiting=num_waiting, num_left=num_left, limits=limits, speed=speed) == expected
