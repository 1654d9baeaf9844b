"""Slices: exactly to the next stop, short while somebody reads, together only where that saves passes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.core.kinds import Full, Layout
from reprise.core.pass_price import PassPrice
from reprise.core.tokens import Span
from reprise.schedule.decide import decide
from reprise.schedule.passes import chunk_tokens, fitting_tokens, next_stop, plan_pass
from reprise.schedule.state import DecodingJob, PrefillingJob, SchedulerLimits, SchedulerState, Slice, Speed, WaitingJob

LIMITS = SchedulerLimits(prefill_chunk=2048, short_slice=512)


def job(job_id: str, position: int, end: int, *checkpoints: int) -> PrefillingJob:
    return PrefillingJob(id=job_id, arrived_s=0, position=position, end=end, checkpoints=checkpoints)


def test_whole_chunks_while_nobody_decodes() -> None:
    assert chunk_tokens(LIMITS, Speed(prefill_tokens_per_s=10), must_be_short=False) == 2048


@pytest.mark.parametrize(
    ("tokens_per_s", "decode_s", "expected"),
    [(1000, 0.0, 240), (1000, 0.05, 192), (1000, 9.0, 16), (10, 0.0, 16), (1e9, 0.0, 2048)],
)
def test_chunks_that_fit_the_stall_while_streams_decode(tokens_per_s: float, decode_s: float, expected: int) -> None:
    speed = Speed(prefill_tokens_per_s=tokens_per_s, decode_s=decode_s)
    assert chunk_tokens(replace(LIMITS, max_stall_s=0.25), speed, must_be_short=True) == expected


PRICE = PassPrice(layout=Layout(kinds=(Full(),)), per_token=100, per_key=1)
"""At 10,000 tokens, 2048 take 24.9 MB, 1024 11.4, 512 5.4, 256 2.7, 16 0.16."""


def priced(*, kept: int, unused: int = 0, free: int = 0) -> SchedulerState:
    return SchedulerState(
        now_s=0,
        prefilling=(job("a", 10_000, 20_000),),
        price=PRICE,
        kept_for_passes=kept,
        unused_nbytes=unused,
        free_nbytes=free,
    )


@pytest.mark.parametrize(
    ("kept", "unused", "free", "expected"),
    [
        (25_000_000, 0, 0, 2048),
        (24_000_000, 0, 0, 1024),
        (24_000_000, 1_000_000, 1_000_000, 2048),
        (6_000_000, 0, 0, 512),
        # Below a short slice, what is stored gives way; and only then the chunk is cut further.
        (6_000_000, 0, 90_000_000, 512),
        (1_000_000, 0, 90_000_000, 512),
        (1_000_000, 0, 2_000_000, 256),
        (1_000_000, -5_000_000, -5_000_000, 64),
        (0, 0, 0, 16),
    ],
)
def test_a_chunk_is_cut_until_its_peak_fits(kept: int, unused: int, free: int, expected: int) -> None:
    state = priced(kept=kept, unused=unused, free=free)
    assert fitting_tokens(2048, state, LIMITS, position=10_000) == expected
    assert len(decide(state, LIMITS).prefill[0]) == expected


def test_without_a_limit_no_chunk_is_cut() -> None:
    state = replace(priced(kept=0), kept_for_passes=None)
    assert fitting_tokens(2048, state, LIMITS, position=10_000) == 2048
    assert fitting_tokens(2048, replace(priced(kept=0), unused_nbytes=None), LIMITS, position=10_000) == 2048


@given(
    st.sampled_from([2048, 1000, 512, 48, 16]),
    st.integers(0, 100_000),
    st.integers(0, 1 << 26),
    st.integers(-(1 << 20), 1 << 26),
    st.integers(0, 1 << 26),
)
def test_a_chunk_that_is_cut_fits_or_is_the_smallest(
    most: int, position: int, kept: int, unused: int, more: int
) -> None:
    state = replace(priced(kept=kept), unused_nbytes=unused, free_nbytes=unused + more)
    num = fitting_tokens(most, state, LIMITS, position=position)
    assert min(most, LIMITS.min_chunk) <= num <= most
    assert num in (most, LIMITS.min_chunk) or num & (num - 1) == 0
    room = kept + max(0, unused + more)
    assert PRICE.of(num, position) <= room or num <= LIMITS.min_chunk
    longer = min(most, 2 * num)
    assert num == most or PRICE.of(longer, position) > kept + max(0, unused), "nothing longer fits without eviction"


def test_the_speed_follows_what_is_measured() -> None:
    speed = Speed(prefill_tokens_per_s=512)
    for _ in range(20):
        speed = speed.after_prefill(1000, 0.1).after_decode(0.02).after_generation(3.0)
    assert speed.prefill_tokens_per_s == pytest.approx(10_000, rel=0.01)
    assert speed.decode_s == pytest.approx(0.02, rel=0.01)
    assert speed.generation_s == pytest.approx(3.0, rel=0.01)


def test_a_short_prompt_does_not_lengthen_the_chunks_of_one_that_stands_deep() -> None:
    """Beside 9,000 tokens a token takes ten times as long as at the start of a prompt."""
    speed = Speed()
    for _ in range(10):
        speed = speed.after_prefill(48, 0.1, position=9000).after_prefill(30, 0.005, position=0)
    assert chunk_tokens(replace(LIMITS, max_stall_s=0.1), speed, must_be_short=True, position=9100) == 48
    assert chunk_tokens(replace(LIMITS, max_stall_s=0.1), speed, must_be_short=True, position=0) == 592


@pytest.mark.parametrize(("position", "expected"), [(0, 1000), (1500, 1000), (3000, 500), (5000, 250), (40_000, 400)])
def test_where_the_speed_was_never_seen_it_is_taken_for_slow(position: int, expected: float) -> None:
    assert Speed().prefill_at(position) == 512
    speed = Speed().after_prefill(100, 0.1, position=1024).after_prefill(800, 1.0, position=16_384)
    assert speed.prefill_at(position) == expected


def test_a_long_slice_costs_what_its_last_tokens_cost() -> None:
    """A stream's first long prompt comes when only short ones were ever measured."""
    speed = Speed().after_prefill(40, 0.002)
    found = chunk_tokens(replace(LIMITS, max_stall_s=0.1), speed, must_be_short=True, position=0)
    # 2,000 tokens in 0.1 s as far as is known, but the last of them stand twice as deep.
    assert found == 992


def test_a_pass_over_one_token_says_nothing_about_prefill() -> None:
    speed = Speed(prefill_tokens_per_s=512)
    assert speed.after_prefill(1, 0.1) == speed == speed.after_prefill(1000, 0.0)


def test_stops_are_checkpoints_partings_and_the_end() -> None:
    one = job("a", 10, 100, 5, 10, 40)
    assert next_stop(one, {}) == 40
    assert next_stop(one, {"a": frozenset({30, 7}), "b": frozenset({11})}) == 30
    assert next_stop(job("a", 40, 100, 40), {}) == 100


def test_a_long_slice_runs_alone_and_is_cut_to_the_budget() -> None:
    plan = plan_pass([job("a", 0, 5000), job("b", 0, 5000)], {}, 2048, LIMITS)
    assert ([one.id for one in plan.jobs], plan.length) == (["a"], 2048)


def test_short_slices_of_one_length_run_together() -> None:
    plan = plan_pass([job("a", 10, 110), job("b", 50, 150), job("c", 10, 100), job("d", 10, 130)], {}, 2048, LIMITS)
    assert ([one.id for one in plan.jobs], plan.length) == (["a", "b"], 100)


def test_the_budget_bounds_all_slices_together() -> None:
    plan = plan_pass([job(f"j{index}", 0, 100) for index in range(30)], {}, 2048, LIMITS)
    assert len(plan.jobs) == 20


def test_rows_of_very_different_positions_stay_apart() -> None:
    plan = plan_pass([job("a", 0, 100), job("b", 60_000, 60_100)], {}, 2048, LIMITS)
    assert [one.id for one in plan.jobs] == ["a"]


def test_rows_without_state_run_with_their_like() -> None:
    jobs = [job("a", 0, 100), job("b", 10, 110), job("c", 0, 100)]
    assert [one.id for one in plan_pass(jobs, {}, 2048, LIMITS).jobs] == ["a", "c"]
    assert [one.id for one in plan_pass([jobs[1], jobs[0]], {}, 2048, LIMITS).jobs] == ["b"]


def test_rows_that_cannot_be_batched_stay_apart() -> None:
    jobs = [job("a", 0, 100), replace(job("b", 0, 100), can_batch=False)]
    assert len(plan_pass(jobs, {}, 2048, LIMITS).jobs) == 1
    assert len(plan_pass(jobs[::-1], {}, 2048, LIMITS).jobs) == 1
    same = [job("a", 0, 100), job("b", 0, 100)]
    assert len(plan_pass(same, {}, 2048, LIMITS).jobs) == 2
    assert len(plan_pass(same, {}, 2048, replace(LIMITS, can_batch=False)).jobs) == 1


def test_a_few_ragged_prompts_go_one_by_one() -> None:
    plan = plan_pass([job("a", 0, 1), job("b", 0, 2), job("c", 0, 3)], {}, 2048, LIMITS)
    assert [one.id for one in plan.jobs] == ["a"]


@pytest.mark.parametrize(
    ("position", "budget", "expected"), [(0, 100, 40), (0, 30, 30), (40, 16, 160), (40, 300, 210), (200, 300, 50)]
)
def test_a_slice_ends_before_an_image_or_holds_it_whole(position: int, budget: int, expected: int) -> None:
    one = replace(job("a", position, 250), spans=(Span(40, 200),))
    assert plan_pass([one], {}, budget, replace(LIMITS, whole_images=True)).length == expected
    # Where an image is read from left to right, it may be cut.
    assert plan_pass([one], {}, budget, LIMITS).length == min(budget, 250 - position)


def test_who_has_images_ahead_runs_alone() -> None:
    sees, text, saw = (
        replace(job("a", 50, 150), spans=(Span(60, 70),)),
        job("b", 50, 150),
        replace(job("c", 50, 150), spans=(Span(20, 50),)),
    )
    assert plan_pass([sees, text, saw], {}, 2048, LIMITS).jobs == (sees,)
    assert plan_pass([text, sees, saw], {}, 2048, LIMITS).jobs == (text, saw)


def test_many_ragged_prompts_take_as_many_passes_as_bits() -> None:
    jobs = [job(f"j{index:02}", 0, 33 + index) for index in range(31)]
    passes = 0
    while jobs:
        plan = plan_pass(jobs, {}, 2048, LIMITS)
        passes += 1
        moved = {one.id: one.position + plan.length for one in plan.jobs}
        jobs = [replace(one, position=moved.get(one.id, one.position)) for one in jobs if moved.get(one.id) != one.end]
    assert passes == 6, "31 lengths of six bits"


@settings(deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.integers(0, 900), st.integers(1, 900), st.lists(st.integers(0, 1800), max_size=3)),
        min_size=1,
        max_size=20,
    ),
    budget=st.integers(16, 2048),
)
def test_a_pass_serves_the_first_job_within_the_budget_and_skips_no_stop(
    jobs: list[tuple[int, int, list[int]]], budget: int
) -> None:
    all_jobs = [
        job(f"j{index}", start, start + left, *sorted(stops)) for index, (start, left, stops) in enumerate(jobs)
    ]
    plan = plan_pass(all_jobs, {}, budget, LIMITS)
    assert plan.jobs[0] is all_jobs[0]
    assert 0 < plan.length * len(plan.jobs) <= budget
    assert all(one.position + plan.length <= next_stop(one, {}) for one in plan.jobs)


LAST = replace(job("a", 50, 57), may_sample=True)


def slices_of(*jobs: PrefillingJob, decoding: tuple[DecodingJob, ...] = ()) -> list[Slice]:
    limits = replace(LIMITS, last_slice=8, resumes_anywhere=False)
    return list(decide(SchedulerState(now_s=0, prefilling=jobs, decoding=decoding), limits).prefill)


def test_a_short_last_slice_takes_the_prompts_last_token_with_it_and_samples() -> None:
    """The token that starts the decode needs no pass of its own then."""
    whole = [Slice(id="a", start=50, stop=58, samples=True)]
    assert slices_of(LAST) == whole
    assert slices_of(LAST, decoding=(DecodingJob(id="b", length=9),)) == whole
    assert slices_of(replace(LAST, checkpoints=(50,))) == whole, "it is saved there already"


@pytest.mark.parametrize(
    "last",
    [
        replace(LAST, may_sample=False),
        replace(LAST, end=58),  # Logits of that many tokens take too much.
        replace(LAST, checkpoints=(57,)),  # A state is saved before the last token.
        replace(LAST, checkpoints=(53,)),
        replace(LAST, position=40),
        replace(LAST, spans=(Span(49, 52),)),  # Images run as slices.
    ],
)
def test_a_last_slice_ends_before_the_last_token_where_that_has_a_reason(last: PrefillingJob) -> None:
    pieces = slices_of(last)
    assert len(pieces) == 1 and not pieces[0].samples


def test_a_last_slice_does_not_run_past_where_a_waiting_request_diverges() -> None:
    last = replace(job("a", 30, 57), may_sample=True)
    for common in (57, 58):
        waiting = WaitingJob(id="b", arrived_s=1, prompt_len=60, common_prefix_lengths={"a": common})
        limits = replace(LIMITS, resumes_anywhere=False)
        (piece,) = decide(SchedulerState(now_s=1, prefilling=(last,), waiting=(waiting,)), limits).prefill
        assert (piece.stop, piece.is_checkpoint, piece.samples) == (57, True, False)


def test_slices_that_share_a_pass_sample_together_later() -> None:
    pieces = slices_of(*(replace(LAST, id=name) for name in "ab"))
    assert [(piece.stop, piece.samples) for piece in pieces] == [(57, False)] * 2
