"""Who computes a shared prefix, and who waits for it until when."""

from dataclasses import replace

import numpy as np

from reprise.core.tokens import as_tokens
from reprise.schedule.decide import decide
from reprise.schedule.sharing import Wait, common_prefix_lengths, share
from reprise.schedule.state import DecodingJob, PrefillingJob, SchedulerLimits, SchedulerState, Slice, WaitingJob

SNAPSHOTS = SchedulerLimits(resumes_anywhere=False, min_shared=16, prefill_chunk=4096)
ANYWHERE = replace(SNAPSHOTS, resumes_anywhere=True)


def follower(job_id: str = "f", *, resume_at: int = 0, prompt_len: int = 1000, **shared: int) -> WaitingJob:
    return WaitingJob(id=job_id, arrived_s=1, prompt_len=prompt_len, resume_at=resume_at, common_prefix_lengths=shared)


def leader(job_id: str = "a", position: int = 100, end: int = 2000, **kwargs: int) -> PrefillingJob:
    return PrefillingJob(id=job_id, arrived_s=0, position=position, end=end, **kwargs)  # pyright: ignore


def waits(waiting: WaitingJob, *leaders: PrefillingJob, limits: SchedulerLimits = SNAPSHOTS) -> tuple[Wait, ...]:
    return share([waiting], leaders, (), limits).waits


def test_prompts_are_compared_once_and_those_without_a_common_beginning_left_out() -> None:
    prompt = as_tokens([1, 2, 3, 4])
    live = {"a": as_tokens([1, 2, 9]), "b": as_tokens([7]), "c": as_tokens([1, 2, 3, 4, 5])}
    assert common_prefix_lengths(prompt, live) == {"a": 2, "c": 4}


def test_a_follower_waits_where_it_leaves_its_leader() -> None:
    assert waits(follower(a=700), leader()) == (Wait(follower="f", leader="a", wait_until=700),)


def test_the_later_of_the_two_knows_what_they_share() -> None:
    late = replace(leader(), common_prefix_lengths={"f": 700})
    assert waits(follower(), late) == (Wait(follower="f", leader="a", wait_until=700),)


def test_nobody_waits_for_what_is_not_coming() -> None:
    assert waits(follower(a=700), leader(position=700)) == (), "the leader has passed the parting"
    assert waits(follower(a=700), leader("b")) == (), "the leader is gone"
    assert waits(follower(a=700, resume_at=690), leader()) == (), "not worth it"
    assert share([follower(a=700)], (), [DecodingJob(id="a", length=2000)], SNAPSHOTS).ready, "it is decoding"


def test_a_job_waits_for_no_less_than_what_is_worth_it() -> None:
    assert SNAPSHOTS.min_shared == 16
    assert waits(follower(a=700, resume_at=684), leader()) and not waits(follower(a=700, resume_at=685), leader())
    apart = [follower("f", a=700), follower("g", a=716)]
    assert [wait.wait_until for wait in share(apart, [leader()], (), SNAPSHOTS).waits] == [700, 716]
    close = [follower("f", a=700), follower("g", a=715)]
    assert [wait.wait_until for wait in share(close, [leader()], (), SNAPSHOTS).waits] == [700, 700]


def test_one_token_is_always_left_to_the_follower() -> None:
    assert waits(follower(a=1000), leader())[0].wait_until == 999


def test_a_leader_is_waited_for_no_further_than_its_prefill_goes() -> None:
    assert waits(follower(a=800), leader(end=799), limits=replace(SNAPSHOTS, min_shared=1))[0].wait_until == 799


def test_of_two_leaders_the_one_that_goes_further_together() -> None:
    assert waits(follower(a=300, b=500), leader("a"), leader("b"))[0].leader == "b"
    assert waits(follower(a=500, b=500), leader("a", position=200), leader("b"))[0].leader == "a"


def test_partings_that_fall_together_are_one_pause() -> None:
    jobs = [follower("f", a=700), follower("g", a=710), follower("h", a=730)]
    found = share(jobs, [leader()], (), SNAPSHOTS).waits
    assert [wait.wait_until for wait in found] == [700, 700, 730]
    planned = replace(leader(), checkpoints=(90, 695))
    assert [wait.wait_until for wait in share(jobs, [planned], (), SNAPSHOTS).waits] == [695, 695, 730]
    between = replace(leader(), checkpoints=(705,))
    assert [wait.wait_until for wait in share(jobs, [between], (), SNAPSHOTS).waits] == [700, 705, 730]


def test_a_leader_pauses_at_the_parting_if_the_model_needs_a_snapshot_there() -> None:
    state = SchedulerState(now_s=1, waiting=(follower(a=700),), prefilling=(leader(),))
    assert decide(state, SNAPSHOTS).prefill == (Slice(id="a", start=100, stop=700, is_checkpoint=True),)
    assert decide(state, ANYWHERE).prefill == (Slice(id="a", start=100, stop=2000),)


def test_where_all_positions_can_be_resumed_what_is_computed_is_committed_for_who_needs_it() -> None:
    passed = SchedulerState(now_s=1, waiting=(follower(a=700),), prefilling=(leader(position=900),))
    assert decide(passed, ANYWHERE).commit == ("a",)
    decoding = SchedulerState(now_s=1, waiting=(follower(a=700),), decoding=(DecodingJob(id="a", length=2100),))
    assert decide(decoding, ANYWHERE).commit == ("a",)
    refused = SchedulerState(now_s=1, waiting=(follower(a=700),), prefilling=(leader(position=900, stored=900),))
    assert share(refused.waiting, refused.prefilling, (), ANYWHERE).ready, "the cache has refused: nothing to wait for"
    assert not decide(refused, ANYWHERE).commit


def test_a_leader_goes_as_early_as_the_first_of_its_followers() -> None:
    leading = replace(leader(), arrived_s=50)
    other = PrefillingJob(id="other", arrived_s=10, position=0, end=2000)
    alone = SchedulerState(now_s=60, prefilling=(leading, other))
    assert decide(alone, SNAPSHOTS).prefill[0].id == "other"
    followed = replace(alone, waiting=(follower(a=700),))
    assert decide(followed, SNAPSHOTS).prefill[0].id == "a"


def test_a_queue_of_long_prompts_with_one_beginning_is_compared_without_copies() -> None:
    base = np.arange(10_000, dtype=np.int32)
    live = {f"j{index}": as_tokens(base.copy()) for index in range(64)}
    assert set(common_prefix_lengths(as_tokens(base), live).values()) == {10_000}


def test_of_two_short_prompts_with_one_beginning_one_is_admitted() -> None:
    # Equal in length, so that one pass could take both: it would compute what they share twice.
    first, second = (
        replace(follower(name, prompt_len=100), common_prefix_lengths=shares)
        for name, shares in (("a", {}), ("b", {"a": 40}))
    )
    for limits in (SNAPSHOTS, ANYWHERE):
        assert decide(SchedulerState(now_s=2, waiting=(first, second)), limits).admit == ("a",)
        strangers = (first, replace(second, common_prefix_lengths={"a": limits.min_shared - 1}))
        assert decide(SchedulerState(now_s=2, waiting=strangers), limits).admit == ("a", "b")
