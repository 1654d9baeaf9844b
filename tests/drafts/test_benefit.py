"""How long to draft: what brings the most tokens a second, by what was measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.core.backend import DraftSource
from reprise.drafts.benefit import (
    PASS_SIZES,
    AcceptanceRates,
    DraftAccount,
    DraftCosts,
    DraftedLine,
    PassCosts,
    best_size,
)


def costs(**ms: float) -> PassCosts:
    """Costs that were seen: m1=10, m2=11, …"""
    found = PassCosts()
    for name, value in ms.items():
        # The first of its size does not count.
        for _ in range(4):
            found.note(int(name[1:]), value / 1000)
    return found


FLAT = costs(m1=10, m2=10, m4=10, m8=11, m16=12, m32=14)
LINEAR = costs(m1=10, m2=20, m4=40, m8=80, m16=160, m32=320)


def length(
    rate: float, known: PassCosts, *, available: int = 40, num_fed: int = 1, rewinds: bool = True, step: float = 0.0
) -> int:
    line, most = DraftedLine(num_fed, available, rate), num_fed + available
    return max(0, best_size([line], known, rewinds=rewinds, most=most, step=step) - num_fed)


def test_what_costs_nothing_is_drafted_whole_and_what_costs_as_much_as_it_brings_is_not() -> None:
    assert length(0.99, FLAT) == 31
    assert length(0.05, FLAT) >= 1
    assert [length(rate, LINEAR) for rate in (0.1, 0.6, 0.95)] == [0, 0, 0]


def test_a_size_that_this_device_is_slow_at_is_passed_over() -> None:
    uneven = costs(m1=10, m2=10.5, m4=11, m8=50, m16=52, m32=54)
    assert length(0.8, uneven) == 3
    assert length(0.999, uneven) == 31


def test_a_doubtful_draft_is_short() -> None:
    found = [length(rate, costs(m1=10, m2=11, m4=13, m8=17, m16=25, m32=41)) for rate in (0.05, 0.5, 0.8, 0.97)]
    assert found == sorted(found) and found[0] == 0 and found[-1] > found[1] > 0


def test_tokens_that_are_fed_anyway_take_their_place_in_the_pass() -> None:
    assert length(0.99, FLAT, num_fed=5) == 27
    assert length(0.99, FLAT, num_fed=40) == 0


def test_feeding_accepted_tokens_again_makes_long_drafts_dearer() -> None:
    steep = costs(m1=10, m2=13, m4=18, m8=27, m16=45, m32=80)
    assert length(0.75, steep, rewinds=False) <= length(0.75, steep, rewinds=True)


def test_a_larger_pass_is_tried_one_size_at_a_time() -> None:
    known = costs(m1=10)
    assert length(0.9, known) == 1
    known.note(2, 0.1)
    # The first of its size may have compiled something, and does not count.
    assert length(0.9, known) == 1
    known.note(2, 0.0101)
    assert length(0.9, known) == 3
    dear = costs(m1=10, m2=20)
    assert length(0.9, dear) == 0


@given(
    rate=st.floats(0, 0.999),
    ms=st.lists(st.floats(1, 100), min_size=len(PASS_SIZES), max_size=len(PASS_SIZES)),
    available=st.integers(0, 40),
    num_fed=st.integers(1, 40),
    rewinds=st.booleans(),
)
def test_a_length_is_possible_whatever_was_measured(
    rate: float, ms: list[float], available: int, num_fed: int, rewinds: bool
) -> None:
    known = costs(**{f"m{size}": value for size, value in zip(PASS_SIZES, ms, strict=True)})
    found = length(rate, known, available=available, num_fed=num_fed, rewinds=rewinds)
    assert 0 <= found <= available
    assert found == 0 or num_fed + found <= max(PASS_SIZES)


def test_a_draft_that_has_to_be_computed_is_shorter_or_not_made() -> None:
    assert length(0.8, FLAT) >= length(0.8, FLAT, step=0.1) >= length(0.8, FLAT, step=0.3) > 0
    assert length(0.8, FLAT, step=1.0) == 0


def test_a_guess_is_first_judged_by_the_size_of_what_guesses_and_then_by_what_it_takes() -> None:
    known, guessing = costs(m1=10), DraftCosts(relative=0.1)
    assert guessing.step_s(known) == pytest.approx(0.001)
    guessing.note_steps(4, 1.0)
    assert guessing.step_s(known) == pytest.approx(0.001)
    guessing.note_steps(4, 0.02)
    assert guessing.step_s(known) == pytest.approx(0.005)


def test_what_lost_by_its_guesses_rests_and_is_tried_again_in_time() -> None:
    account = DraftAccount()
    account.add(-5)
    assert not account.is_overdrawn
    account.add(-5)
    assert account.is_overdrawn
    account.note_answered(790)
    assert account.is_overdrawn
    account.note_answered(20)
    assert not account.is_overdrawn
    # What was earned long ago is no reason to lose it.
    account.add(1000)
    account.add(-40)
    assert account.is_overdrawn


def test_a_long_match_is_tried_where_a_short_one_is_not_worth_it() -> None:
    """A pass over two tokens takes 1.62 times as long as one over one, as measured on a CPU."""
    costs, rates = PassCosts(), AcceptanceRates()
    for num_tokens, seconds in ((1, 0.00622), (2, 0.01005)):
        for _ in range(4):
            costs.note(num_tokens, seconds)
    lengths = [length(rates.of(DraftSource.HISTORY, match), costs, available=100) for match in (2, 32)]
    assert lengths[0] == 0 < lengths[1]
    assert rates.of(DraftSource.GRAMMAR, 0) == 0.99


def test_rates_follow_what_is_seen_and_forget_it_when_they_are_not_used() -> None:
    rates = AcceptanceRates()
    before = rates.of(DraftSource.HISTORY, 4)
    for _ in range(30):
        rates.note(DraftSource.HISTORY, 4, accepted=0, drafted=7)
    assert rates.of(DraftSource.HISTORY, 4) < 0.1
    assert rates.of(DraftSource.HISTORY, 16) == rates.of(DraftSource.HISTORY, 31) > before
    for _ in range(400):
        rates.fade(DraftSource.HISTORY, 4, num=1)
    assert rates.of(DraftSource.HISTORY, 4) == pytest.approx(before, abs=0.05)
    for _ in range(40):
        rates.note(DraftSource.HISTORY, 4, accepted=7, drafted=7)
    assert rates.of(DraftSource.HISTORY, 4) > 0.9


def test_requests_are_drafted_for_together_where_the_pass_over_all_of_them_pays() -> None:
    def size(*lines: DraftedLine, known: PassCosts = FLAT, rewinds: bool = True, most: int = 32) -> int:
        return best_size(lines, known, rewinds=rewinds, sizes=PASS_SIZES, most=most)

    good, poor, none = DraftedLine(1, 40, 0.9), DraftedLine(1, 40, 0.1), DraftedLine(1, 0, 0.0)
    assert (size(good, good), size(good, none)) == (32, 16)
    assert size(good, good, most=7) == 7
    assert size(DraftedLine(1, 3, 0.9), none) == 4
    assert size(none, none) == size(good, good, known=LINEAR) == 0
    # What one line saves, the others must not lose: two tokens a pass for two that each cost 1.5.
    dear = costs(m1=10, m2=15, m4=20, m8=40)
    assert size(good, good, known=dear) > 0
    assert size(good, poor, poor, poor, known=dear) == 0
    # Those to be fed again have room, and what recurrent layers feed again has its price.
    assert size(DraftedLine(6, 10, 0.9), good) >= 6
    assert size(poor, poor, known=dear, rewinds=False) == 0
