"""What is learned from prompts: who goes on from whom, when they come back, what waiting is worth."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.reuse_rate import MEMORY, ConversationHistory, ReuseRateEstimator, gittins_index
from reprise.core.tokens import Tokens, as_tokens, join_tokens
from tests.matrix import examples


def run_of(seed: int, length: int) -> Tokens:
    return as_tokens(np.random.default_rng(seed).integers(0, 1 << 31, length).astype(np.int32))


def brute_index(rates: list[float], widths: list[float], start: int) -> float:
    """The best ratio of use to holding over all stops at the end of a step, by numerical integration."""
    best = rates[start]
    alive, used, held = 1.0, 0.0, 0.0
    for rate, width in zip(rates[start:], widths[start:], strict=True):
        steps = 2000
        for _ in range(steps):
            leaving = alive * (1 - np.exp(-rate * width / steps))
            held += (alive - leaving / 2) * width / steps
            used += leaving
            alive -= leaving
        best = max(best, used / held)
    return best


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.tuples(st.floats(1e-3, 0.5), st.floats(0.5, 8.0)), min_size=1, max_size=5))
def test_the_index_is_the_best_ratio_over_all_stops(steps: list[tuple[float, float]]) -> None:
    rates, widths = [s[0] for s in steps], [s[1] for s in steps]
    for start in range(len(steps)):
        found = gittins_index(np.array(rates[start:]), np.array(widths[start:]))
        assert found == pytest.approx(brute_index(rates, widths, start), rel=0.01)


def test_before_anything_was_seen_older_is_worth_less() -> None:
    returns = ReuseRateEstimator((1,))
    returns.advance()
    returns.wait(0)
    scores: list[float] = []
    for _ in range(50):
        returns.advance()
        scores.append(returns.rate(1))
    assert all(a >= b for a, b in pairwise(scores))
    assert scores[0] > 10 * scores[-1]


def test_a_first_chat_of_sixteen_turns_is_learnt_from() -> None:
    returns = ReuseRateEstimator((1,))
    for number in range(1, 18):
        returns.advance()
        returns.come_back(number - 1)
        returns.wait(0)
    assert returns.rate(17) > 0.7


def test_who_always_comes_back_after_forty_is_worth_most_just_before() -> None:
    returns = ReuseRateEstimator((1,))
    for number in range(1, 600):
        returns.advance()
        if number > 40:
            returns.come_back(number - 40)
        returns.wait(0)
    fresh, due, late = (returns.rate(599 - age) for age in (1, 36, 39))
    assert due > 3 * fresh
    assert late >= due
    assert returns.next_step_at(598) > 599


def test_who_comes_back_more_than_others_at_one_age_does_so_a_little_later() -> None:
    returns = ReuseRateEstimator((2,))
    # Of the even a quarter comes back after 50 and a quarter after 70; of the odd nine in ten after 50.
    after_50 = {began for began in range(1, 400) if (began % 20 > 1 if began % 2 == 1 else began % 8 == 0)}
    after_70 = {began for began in range(1, 400) if began % 8 == 2}
    for number in range(1, 400):
        returns.advance()
        for age, those in ((50, after_50), (70, after_70)):
            if number - age in those:
                returns.come_back(number - age)
        returns.wait(number % 2)
    odd, even = 321, 326  # Both still wait, and are a little older than 70.
    assert returns.rate(odd) > returns.rate(even)


def test_what_never_comes_back_is_worth_less_than_what_does() -> None:
    returns = ReuseRateEstimator((2,))
    for number in range(1, 800):
        returns.advance()
        if number > 20 and (number - 20) % 2 == 0:
            returns.come_back(number - 20)
        returns.wait(number % 2)
    assert returns.rate(798) > 5 * returns.rate(797)


def test_who_is_known_better_later_is_judged_by_all_until_then() -> None:
    returns = ReuseRateEstimator((1,), num_later=2)
    # Those of the first place come back after 20, and nobody else; of a third it is never known where they are.
    for number in range(1, 900):
        returns.advance()
        if number > 20 and (number - 20) % 3 == 0:
            returns.come_back(number - 20)
        returns.wait(0)
        if number > 3 and (number - 3) % 3 < 2:
            returns.specify(number - 3, (number - 3) % 3)
    always, never, unknown = (returns.rate(number) for number in (891, 892, 893))
    assert always > unknown > 5 * never
    assert returns.rate(899) == pytest.approx(returns.rate(898), rel=0.1), "that nothing is known yet says nothing"
    returns.specify(899, 0)
    assert returns.rate(899) > returns.rate(898)


def test_somebody_comes_back_once() -> None:
    returns = ReuseRateEstimator((1,))
    returns.advance()
    returns.wait(0)
    returns.advance()
    before = returns.rate(1)
    returns.come_back(1)
    returns.come_back(1)
    returns.come_back(7)
    assert returns.rate(1) == before, "the table is computed anew only now and then"


def test_a_longer_prompt_goes_on_from_a_shorter_one() -> None:
    lineage = ConversationHistory()
    first = run_of(1, 300)
    lineage.arrive(first, known=0, namespace="")
    lineage.arrive(run_of(2, 200), known=0, namespace="")
    # The generation prompt at the end is not part of the next turn.
    visit = lineage.arrive(join_tokens(first[:-4], run_of(3, 80)), known=0, namespace="")
    assert (visit.turn, visit.gap, visit.continues, visit.num_others) == (1, 2, 1, 0)
    assert lineage.is_continued(1) and not lineage.is_continued(2)
    assert lineage.number_of(first[:290], namespace="") == 1
    assert lineage.number_of(run_of(2, 200), namespace="") == 2


@pytest.mark.parametrize("others", ["ca", "", "b"])
def test_nobody_continues_a_chat_of_another_namespace(others: str) -> None:
    history = ConversationHistory()
    prompt = run_of(0, 300)
    history.arrive(prompt, known=0, namespace="ab")
    assert history.number_of(prompt, namespace="ab") == 1
    assert history.number_of(prompt, namespace=others) is None
    visit = history.arrive(join_tokens(prompt, run_of(1, 80)), known=0, namespace=others)
    assert (visit.turn, visit.continues) == (0, None)


def test_it_is_recognised_without_anything_being_stored() -> None:
    lineage = ConversationHistory()
    history = run_of(0, 100)
    for turn in range(8):
        visit = lineage.arrive(history, known=0, namespace="")
        assert visit.turn == turn
        history = join_tokens(history, run_of(turn + 1, 60))


def test_a_shared_beginning_is_no_conversation() -> None:
    lineage = ConversationHistory()
    system = run_of(0, 500)
    visits = [lineage.arrive(join_tokens(system, run_of(n, 100)), known=500, namespace="") for n in range(1, 9)]
    assert all(visit.turn == 0 and visit.continues is None for visit in visits)


def test_the_second_that_goes_on_is_a_branch() -> None:
    lineage = ConversationHistory()
    first = run_of(0, 200)
    lineage.arrive(first, known=0, namespace="")
    lineage.arrive(join_tokens(first, run_of(1, 100)), known=200, namespace="")
    branch = lineage.arrive(join_tokens(first, run_of(2, 100)), known=200, namespace="")
    assert (branch.turn, branch.gap, branch.num_others, branch.last_other) == (0, None, 1, 2)
    assert branch.num_others == 1
    assert lineage.last_continuation(1) == 3


def test_a_repeat_goes_on_from_the_one_before() -> None:
    lineage = ConversationHistory()
    prompt = run_of(0, 200)
    visits = [lineage.arrive(prompt, known=200 * (n > 0), namespace="") for n in range(4)]
    assert [visit.continues for visit in visits] == [None, 1, 2, 3]


@pytest.mark.parametrize(("kept", "has_tail"), [(200, True), (180, True), (160, False)])
def test_whether_a_next_turn_has_what_was_left_is_judged_in_the_middle(kept: int, *, has_tail: bool) -> None:
    lineage = ConversationHistory()
    path = run_of(0, 200)
    number = lineage.arrive(path[:150], known=0, namespace="").number
    lineage.leave_tail(path, 150, number=number, namespace="")
    visit = lineage.arrive(join_tokens(path[:kept], run_of(1, 40)), known=0, namespace="")
    assert visit.continues == number
    assert visit.has_tail is has_tail
    assert lineage.arrive(join_tokens(path[:kept], run_of(1, 40)), known=0, namespace="").has_tail is None


def test_namespaces_are_strangers() -> None:
    lineage = ConversationHistory()
    prompt = run_of(0, 200)
    lineage.arrive(prompt, known=0, namespace="a")
    assert lineage.arrive(prompt, known=0, namespace="b").continues is None
    assert lineage.number_of(prompt, namespace="ab") is None


def test_old_prompts_are_forgotten() -> None:
    lineage = ConversationHistory()
    prompt = run_of(0, 50)
    lineage.arrive(prompt, known=0, namespace="")
    filler = run_of(1, 1)
    for _ in range(MEMORY):
        lineage.arrive(filler, known=1, namespace="")
    assert lineage.number_of(prompt, namespace="") is None
    assert not lineage.is_continued(1)


def test_what_returns_at_once_or_never_is_worth_most_before_the_next_prompt() -> None:
    returns = ReuseRateEstimator((1,))
    # Each third one is followed by its return.
    for number in range(1, 1200):
        returns.advance()
        if number % 3 == 0:
            returns.come_back(number - 1)
        returns.wait(0)
    now = 1199
    assert returns.rate(now) > 2 * returns.rate(now - 1), "this one has missed its moment"


def test_a_prompt_that_begins_as_expected_is_the_next_turn() -> None:
    lineage = ConversationHistory()
    asked = lineage.arrive(run_of(1, 100), known=0, namespace="").number
    looped = lineage.arrive(join_tokens(run_of(1, 100), run_of(2, 50)), known=100, namespace="").number
    stripped = join_tokens(run_of(1, 100), run_of(3, 60))
    lineage.expect(stripped, known=100, number=looped, namespace="")
    visit = lineage.arrive(join_tokens(stripped, run_of(4, 30)), known=160, namespace="")
    assert (visit.continues, visit.num_others) == (looped, 0)
    assert asked != looped


def test_what_will_return_in_its_next_bin_is_worth_that_soon() -> None:
    """Every other one never returns; the rest gets into another bin after two prompts, and returns after four."""
    returns = ReuseRateEstimator((1,), num_later=2)
    for number in range(1, 129):
        returns.advance()
        returns.wait(0)
        returns.specify(number, 0)
        if number > 4 and number % 2 == 0:
            returns.specify(number - 2, 1)
            returns.come_back(number - 4)
    assert returns.rate(128, becomes=[(2, 1)]) > 5 * returns.rate(128)
    assert returns.rate(128, becomes=[(MEMORY, 1)]) == returns.rate(128)
    assert returns.rate(128, becomes=[(1, 1)]) > returns.rate(128, becomes=[(2, 1)])


@pytest.mark.parametrize("num_fading", [0, 2])
def test_a_bin_that_never_returns_is_not_expected_to_at_ages_that_nobody_has_reached(num_fading: int) -> None:
    returns = ReuseRateEstimator((1,), num_later=2, num_fading=num_fading)
    for number in range(1, 33):
        returns.advance()
        returns.wait(0)
        returns.specify(number, number % 2)
        if number % 2 == 1:
            returns.come_back(number - 1)
    for _ in range(28):
        returns.advance()
    assert (returns.rate(1) < 0.5 * returns.rate(1, later_bin=0)) is (num_fading == 0)
