"""Which passes verify drafts, tried with a made-up engine whose passes differ from some size on, and cost in steps."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from reprise.core.settings import Settings
from reprise.core.tokens import Tokens
from reprise.drafts.benefit import TRIED_SIZES, PassCosts
from reprise.drafts.drafter import DecodingRow, Drafts, propose
from reprise.engine.running.pass_trial import NEAR_TIE, PassTrial, are_same
from reprise.engine.running.runner import Runner
from reprise.loop.draft_trial import DraftTrial
from reprise.memory import Memory


class SteppedEngine:
    """Passes of `differ_from` tokens or more give other logits, by `by`, and each takes what `cost_of` says."""

    def __init__(
        self,
        *,
        differ_from: int = 99,
        by: float = 1.0,
        context: int | None = None,
        tile: int = 8,
        together_from: int = 99,
        can_batch: bool = False,
        slower_s: float = 0.0,
    ) -> None:
        self.loaded = SimpleNamespace(context=context, vocab_size=50)
        self.now_s = 0.0
        self.differ_from, self.by, self.tile = differ_from, by, tile
        self.can_batch, self.together_from = can_batch, together_from
        """From how many tokens of all rows on passes over several rows give other logits."""
        self.slower_s = slower_s
        """Seconds more that a pass over one row takes."""
        self.fed: Counter[int] = Counter()
        self.num_begun = 0
        self.num_live = 0

    def clock(self) -> float:
        return self.now_s

    @property
    def live_nbytes(self) -> int:
        return self.num_live

    def most_live_nbytes(self, position: int, *, chunk: int) -> int:
        return position

    def begin(self) -> SimpleNamespace:
        self.num_begun += 1
        self.num_live += 1
        return SimpleNamespace(at=0)

    def drop(self, live: object) -> None:
        self.num_live -= 1

    def prefill(self, lives: list[SimpleNamespace], chunks: list[Tokens]) -> None:
        lives[0].at += len(chunks[0])
        assert self.loaded.context is None or lives[0].at <= self.loaded.context

    def logits(self, live: SimpleNamespace, chunk: Tokens) -> mx.array:
        found = self.logits_undone(live, chunk)
        live.at += len(chunk)
        return found

    def logits_together(self, lives: list[SimpleNamespace], chunks: list[Tokens]) -> mx.array:
        num = len(lives) * len(chunks[0])
        self.now_s += 0.01 * -(-num // self.tile)
        logits = np.zeros((len(lives), len(chunks[0]), 50), dtype=np.float32)
        for row, (live, chunk) in enumerate(zip(lives, chunks, strict=True)):
            logits[row, np.arange(len(chunk)), chunk % 50] = 1.0
            live.at += len(chunk)
        if num >= self.together_from:
            # Of the last row alone: all of them count.
            logits[-1, :, 3] += self.by
        return mx.array(logits)

    def logits_undone(self, live: SimpleNamespace, chunk: Tokens) -> mx.array:
        self.fed[len(chunk)] += 1
        self.now_s += self.slower_s + 0.01 * -(-len(chunk) // self.tile)
        positions = live.at + np.arange(len(chunk))
        assert self.loaded.context is None or positions[-1] < self.loaded.context
        logits = np.zeros((len(chunk), 50), dtype=np.float32)
        logits[np.arange(len(chunk)), positions % 50] = 1.0
        if len(chunk) >= self.differ_from:
            logits[:, 3] += self.by
        return mx.array(logits)


def tried(engine: SteppedEngine, *, tolerance: float = NEAR_TIE) -> int:
    costs = PassCosts(TRIED_SIZES)
    trial = PassTrial(
        cast(Runner, engine),
        TRIED_SIZES,
        tolerance=tolerance,
        note=lambda num_rows, num, seconds: costs.note(num, seconds),
        clock=engine.clock,
    )
    while not trial.is_over:
        trial.advance()
    assert engine.num_live == 0
    return trial.largest


@pytest.mark.parametrize("size", [2, 3, 5, 7, 16, 17, 32])
def test_passes_are_used_below_the_first_size_that_differs(size: int) -> None:
    assert tried(SteppedEngine(differ_from=size)) == size - 1


def test_all_sizes_are_used_where_none_differs() -> None:
    assert tried(SteppedEngine()) == 32


def test_nothing_larger_is_tried_once_a_size_differs() -> None:
    engine = SteppedEngine(differ_from=3)
    tried(engine)
    assert max(engine.fed) == 3


def test_logits_may_differ_by_less_than_a_near_tie_unless_they_must_be_equal() -> None:
    assert tried(SteppedEngine(differ_from=2, by=0.005)) == 32
    assert tried(SteppedEngine(differ_from=2, by=0.005), tolerance=0.0) == 1
    assert tried(SteppedEngine(differ_from=2, by=0.02)) == 1


def test_another_token_is_a_difference_however_near_it_is() -> None:
    single, several = np.array([[1.0, 1.001]], np.float32), np.array([[1.0, 0.999]], np.float32)
    assert not are_same(several, single, tolerance=NEAR_TIE)
    assert are_same(single, single, tolerance=0.0)
    nan = np.array([[np.nan, 1.0]], np.float32)
    assert not are_same(nan, nan, tolerance=NEAR_TIE)


@pytest.mark.parametrize(("context", "largest"), [(60, 1), (65, 1), (70, 6), (200, 32), (1110, 32)])
def test_a_trial_stays_within_the_context(context: int, largest: int) -> None:
    assert tried(SteppedEngine(context=context)) == largest


def test_passes_are_bounded_and_counted() -> None:
    engine = SteppedEngine()
    tried(engine)
    # 32 positions behind each text one by one; those behind the short one once more by each size, and rounds of each.
    assert engine.fed[1] == 32 + 32 + 3 + sum(32 % size == 1 for size in range(2, 33))
    assert sum(engine.fed.values()) < 240
    assert engine.num_begun == 33


def decided(engine: SteppedEngine, **settings: Any) -> tuple[bool, Drafts, int]:
    """Whether nothing can be drafted, the drafts, and the number of steps."""
    drafts = Drafts(rewinds=True, sizes=(1,))
    trial = DraftTrial(cast(Runner, engine), Memory(), drafts, Settings(model="any", **settings), clock=engine.clock)
    for number in range(1, 1000):
        if trial.step():
            return True, drafts, number
        if trial.due_in_s is None:
            return False, drafts, number
    raise AssertionError("the trial did not end")


def test_of_sizes_on_one_step_the_largest_is_used() -> None:
    is_off, drafts, _ = decided(SteppedEngine(tile=16))
    assert not is_off and drafts.sizes == (1, 16, 32)
    assert [drafts.costs.relative(size) for size in (2, 16, 17, 20, 32)] == pytest.approx([1, 1, 2, 2, 2])


def test_where_each_token_costs_a_pass_nothing_is_drafted() -> None:
    is_off, drafts, _ = decided(SteppedEngine(tile=1))
    assert is_off and drafts.sizes == (1,)


def test_where_no_pass_gives_the_same_nothing_is_drafted() -> None:
    is_off, drafts, steps = decided(SteppedEngine(differ_from=2))
    assert is_off and drafts.sizes == (1,) and steps < 60


def test_groups_draft_with_the_passes_that_are_the_same_and_save_time() -> None:
    _, drafts, _ = decided(SteppedEngine(tile=16, can_batch=True))
    assert {num: drafts.group(num).sizes for num in (2, 3, 4)} == {2: (1, 8), 3: (1, 5, 8), 4: (1, 4, 8)}
    assert drafts.group(4).costs.relative(8) == pytest.approx(2)
    # More were not tried, and one row has what it has alone.
    assert drafts.group(5).sizes == (1,) and drafts.sizes == (1, 16, 32)
    _, drafts, _ = decided(SteppedEngine(tile=16, together_from=12, can_batch=True))
    assert {num: drafts.group(num).sizes for num in (2, 3, 4)} == {2: (1, 5), 3: (1, 3), 4: (1, 2)}


def test_what_decodes_alone_tries_no_groups() -> None:
    engine = SteppedEngine()
    _, drafts, _ = decided(engine)
    assert engine.num_begun == 33 and drafts.group(2).sizes == (1,)
    _, drafts, _ = decided(SteppedEngine(can_batch=True), max_batch=2)
    assert drafts.group(2).sizes[-1] == 8 and drafts.group(3).sizes == (1,)


def test_a_slow_device_uses_what_was_tried_in_time() -> None:
    engine = SteppedEngine(slower_s=0.3)
    is_off, drafts, _ = decided(engine)
    assert not is_off and 2 <= drafts.sizes[-1] < 8
    assert engine.num_live == 0


def test_until_the_trial_is_over_nothing_is_drafted_or_held_back() -> None:
    drafts = Drafts(rewinds=True, sizes=(1,))
    request = drafts.start(np.arange(20, dtype=np.int32), namespace="")
    for _ in range(4):
        drafts.costs.note(1, 0.01)
    assert propose([DecodingRow(drafts=request, num_fed=1, most=8, forced=lambda: (1, 2, 3))]) == [None]
    assert not request.holds_back


def test_a_trial_that_gives_up_its_memory_begins_again() -> None:
    engine = SteppedEngine()
    drafts = Drafts(rewinds=True, sizes=(1,))
    trial = DraftTrial(cast(Runner, engine), Memory(), drafts, Settings(model="any"), clock=engine.clock)
    assert not trial.give_up()
    for _ in range(20):
        trial.step()
    assert trial.give_up() and engine.num_live == 0
    while trial.due_in_s is not None:
        trial.step()
    assert drafts.sizes[-1] == 32


def test_a_machine_that_is_left_alone_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reprise.quiet.MACHINE.reason", "hot")
    engine = SteppedEngine()
    drafts = Drafts(rewinds=True, sizes=(1,))
    trial = DraftTrial(cast(Runner, engine), Memory(), drafts, Settings(model="any"), clock=engine.clock)
    assert not trial.step() and engine.num_begun == 0
    assert trial.due_in_s is not None and trial.due_in_s > 1
