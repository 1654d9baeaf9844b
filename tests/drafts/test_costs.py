"""Drafts on simulated devices whose passes take noisy times: nearly as fast as the best fixed length, never slower."""

from collections.abc import Iterator

import numpy as np
import pytest

from reprise.core.backend import DraftSource
from reprise.core.tokens import as_tokens
from reprise.drafts.benefit import PASS_SIZES, PassCosts
from reprise.drafts.drafter import DecodingRow, Draft, Drafts, note, propose
from tests.matrix import in_turn, now_and_later

DEVICES = {
    "one token at a time": (1, 2, 4, 8, 16, 32),
    "slow beyond one": (1, 1.62, 2.9, 3.8, 8.5, 16),
    "fast at eight": (1, 1.5, 2.6, 1.64, 3.9, 7),
    "fast": (1, 1.05, 1.12, 1.3, 1.8, 2.6),
}
"""What passes cost by size."""


class NoisyDevice:
    """Seconds of a pass over one token: noise, a pass in thirty held up, and phases in which everything is slower."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._slowness, self._left = 1.0, 0

    def one_s(self) -> float:
        if self._left == 0:
            self._slowness, self._left = float(self._rng.choice([1, 1.5, 2.5, 4])), int(self._rng.integers(50, 400))
        self._left -= 1
        held_up = self._rng.uniform(3, 8) if self._rng.random() < 0.03 else 1.0
        return float(0.01 * self._slowness * held_up * np.exp(self._rng.normal(0, 0.15)))


def edits(seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts with a file, and answers that repeat it with some edits."""
    rng = np.random.default_rng(seed)
    for _ in range(5):
        file = rng.integers(10, 30_000, 500).tolist()
        answer = list(file)
        for at in rng.integers(0, 490, 10):
            answer[at : at + 3] = rng.integers(10, 30_000, 3).tolist()
        yield file, answer


def decoys(seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Answers that begin to repeat the prompt all the time, and never go on."""
    rng = np.random.default_rng(seed)
    for _ in range(5):
        prompt = rng.integers(10, 30_000, 300).tolist()
        starts = rng.integers(0, 290, 120)
        yield prompt, [token for at in starts for token in prompt[at : at + int(rng.integers(2, 5))]]


class Fixed(PassCosts):
    """As where every pass up to `largest` tokens is free: drafts fill it."""

    is_known = True  # type: ignore[assignment]
    wants_single = False  # type: ignore[assignment]

    def __init__(self, largest: int) -> None:
        super().__init__()
        self._largest = largest

    @property
    def largest(self) -> int:
        return self._largest

    def relative(self, num_tokens: int) -> float:
        return 1.0


def speed(texts: Iterator[tuple[list[int], list[int]]], name: str, clock: NoisyDevice, costs: PassCosts) -> float:
    """Tokens in the time of a pass over one, by what passes cost on this device without noise, from the third text."""
    drafts, spent, num = Drafts(rewinds=True), 0.0, 0
    drafts.costs = costs
    for number, (prompt, answer) in enumerate(texts):
        if number == 2:
            spent = num = 0
        request = drafts.start(as_tokens(prompt), namespace="")
        request.read_prompt(len(prompt))
        at = 0
        while at < len(answer):
            rows = [DecodingRow(drafts=request, num_fed=1, most=len(answer) - at - 1)]
            (draft,) = propose(rows)
            drafted: list[int] = draft.tokens.tolist() if draft is not None else []
            taken = next((i for i, token in enumerate(drafted) if token != answer[at + i]), len(drafted)) + 1
            cost = float(np.interp(1 + len(drafted), PASS_SIZES, DEVICES[name]))
            note(rows, [draft], [taken], seconds=cost * clock.one_s())
            request.accept(answer[at : at + taken])
            at, spent, num = at + taken, spent + cost, num + taken
        request.end()
    return num / spent


def best_fixed(name: str, seed: int) -> float:
    """The speed of the best fixed length."""
    found = [1.0]
    for size in (2, 8, 32):
        costs = Fixed(size)
        for _ in range(4):
            costs.note(1, 0.01)
        found.append(speed(edits(seed), name, NoisyDevice(seed), costs))
    return max(found)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "seed"), in_turn(list(DEVICES)[1:], range(4)))
def test_a_file_with_edits_is_written_nearly_as_fast_as_with_the_best_length(name: str, seed: int) -> None:
    assert speed(edits(seed), name, NoisyDevice(seed), PassCosts()) >= 0.88 * best_fixed(name, seed)


@pytest.mark.parametrize("seed", now_and_later([0], [1, 2, 3]))
@pytest.mark.parametrize("name", DEVICES)
def test_nothing_is_slower_than_without_drafts(name: str, seed: int) -> None:
    for texts in (edits, decoys):
        assert speed(texts(seed), name, NoisyDevice(seed), PassCosts()) >= 0.98


def test_a_pass_that_is_held_up_does_not_decide() -> None:
    costs = PassCosts()
    for _ in range(4):
        for size, seconds in ((1, 0.01), (2, 0.015), (4, 0.02)):
            costs.note(size, seconds)
    assert costs.relative(8) == pytest.approx(3.0)
    for _ in range(2):
        costs.note(8, 0.066)
    # One counts, beside what the others let expect.
    assert costs.relative(8) == pytest.approx(3.0)
    for _ in range(2):
        costs.note(8, 0.025)
    assert costs.relative(8) == pytest.approx(2.5)


def test_a_size_that_is_dear_is_found_out_with_two_measurements() -> None:
    costs = PassCosts()
    for size, seconds in ((1, 0.01), (2, 0.0105), (4, 0.011), (8, 0.05)):
        for _ in range(3):
            costs.note(size, seconds)
    assert [round(costs.relative(size), 2) for size in (2, 3, 4, 7, 8)] == [1.05, 1.1, 1.1, 5.0, 5.0]


def test_a_size_that_was_dear_is_tried_again_after_a_while() -> None:
    costs = PassCosts()
    for size, seconds in ((1, 0.01), (2, 0.012), (4, 0.1)):
        for _ in range(4):
            costs.note(size, seconds)
    assert costs.relative(4) == pytest.approx(10)
    for i in range(1200):
        costs.note(1 + i % 2, 0.01 + 0.002 * (i % 2))
    assert costs.relative(4) < 2


def test_a_larger_size_that_takes_less_shows_what_a_smaller_one_can_take() -> None:
    costs = PassCosts()
    for size, seconds in ((1, 0.01), (8, 0.02)):
        for _ in range(4):
            costs.note(size, seconds)
    for seconds in (0.02, 0.02, 0.03, 0.03):
        costs.note(4, seconds)
    # Some of four tokens took no longer than those of eight.
    assert costs.relative(4) == pytest.approx(2.0)
    for seconds in (0.031, 0.032, 0.033, 0.034):
        costs.note(2, seconds)
    assert costs.relative(2) == pytest.approx(3.3)


def test_a_device_that_becomes_slow_is_noticed_while_every_pass_has_a_draft() -> None:
    costs = PassCosts()
    for size, seconds in ((1, 0.01), (8, 0.02)):
        for _ in range(20):
            costs.note(size, seconds)
    num_singles = 0
    for _ in range(100):
        size = 1 if costs.wants_single else 8
        num_singles += size == 1
        costs.note(size, 0.03 if size == 1 else 0.06)
    assert costs.relative(8) == pytest.approx(2.0)
    assert costs.one_s == pytest.approx(0.03)
    assert num_singles < 15


class Underestimated(PassCosts):
    """As where passes take twice as long as was measured before: every draft seems worth it."""

    is_known = True  # type: ignore[assignment]
    wants_single = False  # type: ignore[assignment]
    one_s = 0.01  # type: ignore[assignment]
    largest = PASS_SIZES[-1]  # type: ignore[assignment]

    def note(self, num_tokens: int, seconds: float) -> None:
        pass

    def relative(self, num_tokens: int) -> float:
        return 1.0 if num_tokens == 1 else 1.05

    def relative_of(self, num_tokens: int, seconds: float) -> float:
        return 1.0 if num_tokens == 1 else 2.1


def write(drafts: Drafts, prompt: list[int], answer: list[int]) -> tuple[float, int]:
    """What this answer cost, in passes over one token, and the tokens of it before the first draft."""
    request = drafts.start(as_tokens(prompt), namespace="")
    request.read_prompt(len(prompt))
    at, cost = 0, 0.0
    first: int | None = None
    while at < len(answer):
        rows = [DecodingRow(drafts=request, num_fed=1, most=len(answer) - at - 1)]
        (draft,) = propose(rows)
        drafted: list[int] = draft.tokens.tolist() if draft is not None else []
        taken = next((i for i, token in enumerate(drafted) if token != answer[at + i]), len(drafted)) + 1
        if draft is not None:
            first = at if first is None else first
        cost += drafts.costs.relative_of(1 + len(drafted), 0.01)
        note(rows, [draft], [taken], seconds=0.01)
        request.accept(answer[at : at + taken])
        at += taken
    request.end()
    return cost, len(answer) if first is None else first


def test_look_ups_that_lose_rest_whatever_was_estimated_and_are_back_as_soon_as_text_repeats() -> None:
    drafts = Drafts(rewinds=True)
    drafts.costs = Underestimated()
    cost, num = 0.0, 0
    for prompt, answer in decoys(3):
        cost, num = cost + write(drafts, prompt, answer)[0], num + len(answer)
    assert num < cost <= 1.02 * num, (cost, num)
    file = [int(token) for token in np.random.default_rng(4).integers(10, 30_000, 300)]
    cost, before = write(drafts, file, file)
    assert before <= 40 and cost < 100, (cost, before)


class AsMeasured(Underestimated):
    def relative_of(self, num_tokens: int, seconds: float) -> float:
        return seconds / self.one_s


def test_a_draft_answers_for_the_next_pass_which_was_not_run_ahead_for_it() -> None:
    drafts = Drafts(rewinds=True)
    drafts.costs = AsMeasured()
    request = drafts.start(as_tokens(range(10, 60)), namespace="")
    rows = [DecodingRow(drafts=request, num_fed=1, most=8)]
    draft, account = Draft(as_tokens([7]), DraftSource.ANSWER, 2), drafts.accounts[DraftSource.ANSWER]
    note(rows, [draft], [2], seconds=0.01)
    assert account.balance == pytest.approx(1)
    for balance in (-1, -1):
        note(rows, [None], [1], seconds=0.03)
        assert account.balance == pytest.approx(balance)


def test_a_pass_that_was_held_up_is_not_the_drafts_fault() -> None:
    costs = PassCosts()
    for size, seconds in 4 * [(1, 0.01), (4, 0.015)]:
        costs.note(size, seconds)
    assert costs.relative_of(4, 0.02) == pytest.approx(2)
    assert costs.relative_of(4, 5.0) == pytest.approx(2 * costs.relative(4))
