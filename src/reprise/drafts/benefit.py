"""Cost and benefit of drafts: seconds of a pass by its size, acceptance rates, and the best draft length."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from reprise.core.backend import DraftSource

PASS_SIZES = (1, 2, 4, 8, 16, 32)
"""Pass sizes in tokens that drafts fill up to: on real devices, the cost between two sizes is not smooth."""
TRIED_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 32)
"""Those whose costs a trial measures: they rise in steps, which may be anywhere between the others."""
_WORTHWHILE = 1.1
"""What a pass must save at least, if all of its draft is right: less may be a mistake of the trial."""

_KEPT = 63
"""Most measurements kept of a pass size. Their median counts: one pass that was held up changes nothing."""

_KEPT_SINGLES = 15
"""Most seconds kept of passes over one token: fewer, since they show how fast the device is now."""

_ENOUGH = 3
"""From this number of measurements on, what is expected from other sizes no longer counts as one of them."""

_STALE = 256
"""After this many passes without a size, the dearer half of its measurements is dropped, so that it is tried again
in time."""

_MOST_DRAFTED = 64
"""After this many passes in a row with a draft, one without is made: costs are multiples of a pass over one token."""

_SUSPICIOUS = 1.5
"""Two passes in a row that take this many times as long as expected are followed by one over a single token: either
this size is dear, or the device has become slow."""

_MARGIN = 1.04
"""By how much a draft has to promise more than a pass over one token: less may be a mistake of the measurements."""

_OPTIMISM = 0.02
"""Assumed cost of another token while only passes of one token were measured, as a fraction of such a pass."""

_TRIAL = 6.0
"""What its drafts may lose until it rests, in passes over one token: enough to learn how often they are right."""
_MOST_CREDIT = 32.0
"""What it may at most have saved, in the same unit: what was earned long ago is no reason to lose it."""
_SHARE_OF_TRIALS = 0.005
"""The share of the time that answers take which it may lose on trials after that."""

_EVIDENCE = 4.0
"""What drafts that were not verified would have saved before their source is tried again, in the same unit."""
_DEARNESS = 0.1
_LATE_TRIAL = 2.0
"""What its drafts may then lose."""
_HELD_UP = 2.0
"""A pass that took this many times as long as expected was delayed by something else: drafts are not charged for it."""

_PRIOR_TRIALS = 4.0
_MEMORY = 64.0
"""Trials that a rate remembers."""
_FORGETTING = 0.98
"""Decay of a rate's observations each time a draft was not worth computing, so that one is tried again now and then."""

_PRIOR = {
    DraftSource.ANSWER: 0.5,
    DraftSource.PREDICTION: 0.8,
    DraftSource.HISTORY: 0.6,
    DraftSource.GRAMMAR: 0.99,
    DraftSource.HEAD: 0.7,
    DraftSource.DRAFT_MODEL: 0.7,
}
"""Prior probability that the next token of a draft is accepted."""
TEXTS = frozenset({DraftSource.ANSWER, DraftSource.PREDICTION, DraftSource.HISTORY})
"""What is looked up in text."""
_DOUBT = 0.75
"""By how much each doubling of a match, from four tokens on, reduces the prior doubt in what follows it: a long match
is mostly a text that is written again, and without a trial that would never be learnt."""


def _prior(source: DraftSource, match: int) -> float:
    doublings = max(0, match.bit_length() - 2) if source in TEXTS else 0
    return 1 - (1 - _PRIOR[source]) * _DOUBT**doublings


class PassCosts:
    """The cost of a pass over one sequence by its tokens, relative to one over a single token.

    Both are medians of the last few. A pass is compared with those over one token just before and after it, since other
    programs and longer prompts make all passes slower.
    """

    def __init__(self, sizes: Sequence[int] = PASS_SIZES) -> None:
        """`sizes`: those that drafts fill up to; what lies between two of them costs as much as the larger one."""
        self.sizes = sizes
        self._singles: deque[float] = deque(maxlen=_KEPT_SINGLES)
        """Seconds of the last passes over one token."""
        self._one_s: float | None = None
        """Their median; None: not known since the last of them."""
        self._seen: dict[int, deque[float]] = {}
        """Relative costs of the last passes by tokens, oldest first. No entry is empty."""
        self._unsettled: dict[int, list[float]] = {}
        """Seconds of passes since the last one over a single token, by tokens."""
        self._medians: dict[int, float] = {}
        self._estimates: dict[int, float] = {}
        self._is_warm: set[int] = set()
        self._num = 0
        """Passes so far."""
        self._last: dict[int, int] = {}
        """When a pass over this number of tokens was measured last, as a value of `_num`."""
        self._num_suspicious = 0
        """Passes in a row that took much longer than expected."""

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record a pass over `num_tokens` that took `seconds`."""
        num_tokens = min(num_tokens, self.sizes[-1])
        self._num += 1
        if self._num % (_STALE // 4) == 0:
            self._forget()
        if num_tokens not in self._is_warm:
            # The first pass of a size may include compiling kernels.
            self._is_warm.add(num_tokens)
        elif num_tokens == 1:
            self._note_single(seconds)
        else:
            self._note_several(num_tokens, seconds)

    def _note_single(self, seconds: float) -> None:
        before = self.one_s if self._unsettled and self.is_known else seconds
        if self._unsettled and len(self._singles) >= _ENOUGH:
            # Old ones count less, and not at all if the device has become slow since.
            is_slow = self._num_suspicious > 1 and seconds > _SUSPICIOUS * before
            self._singles = deque([] if is_slow else list(self._singles)[-_KEPT_SINGLES // 2 :], maxlen=_KEPT_SINGLES)
        self._last[1] = self._num
        self._num_suspicious = 0
        self._singles.append(seconds)
        self._one_s = None
        if self._unsettled and len(self._singles) >= _ENOUGH:
            one_s = _between(before, self.one_s)
            for size, each in self._unsettled.items():
                self._seen.setdefault(size, deque(maxlen=_KEPT)).extend(taken / one_s for taken in each)
                self._has_changed(size)
            self._unsettled.clear()

    def _note_several(self, num_tokens: int, seconds: float) -> None:
        self._last[num_tokens] = self._num
        if self.is_known:
            is_slow = seconds > _SUSPICIOUS * self.one_s * self.relative(num_tokens)
            self._num_suspicious = self._num_suspicious + 1 if is_slow else 0
        self._unsettled.setdefault(num_tokens, []).append(seconds)
        self._has_changed(num_tokens)

    def _forget(self) -> None:
        """Drop the dearer half of what was measured of each size, unless it was measured lately."""
        for size in [size for size in self._seen if self._num - self._last[size] >= _STALE]:
            seen = sorted(self._seen.pop(size))
            if len(seen) > 1:
                self._seen[size] = deque(seen[: len(seen) // 2], maxlen=_KEPT)
                self._last[size] = self._num
            self._has_changed(size)

    @property
    def is_known(self) -> bool:
        """Whether a pass over one token was measured."""
        return len(self._singles) > 0

    @property
    def wants_single(self) -> bool:
        """Whether the next pass should be over one token, since what all others are compared with may be outdated."""
        if len(self._singles) < _ENOUGH:
            return True
        return self._num_suspicious > 1 or self._num - self._last.get(1, self._num) >= _MOST_DRAFTED

    @property
    def one_s(self) -> float:
        """Seconds of a pass over one token."""
        if self._one_s is None:
            assert self._singles, "no pass over one token was measured"
            self._one_s = median_low(self._singles)
        return self._one_s

    @property
    def largest(self) -> int:
        """The largest pass to try: one size beyond those measured, so that a trial never costs much."""
        seen, sizes = max([1, *self._seen, *self._unsettled]), self.sizes
        return sizes[min(bisect_right(sizes, seen), len(sizes) - 1)] if self.is_known else 1

    def relative_of(self, num_tokens: int, seconds: float) -> float:
        """The cost of this pass over `num_tokens`, as a multiple of one over a single token."""
        return min(seconds / self.one_s, _HELD_UP * self.relative(num_tokens))

    def relative(self, num_tokens: int) -> float:
        """The cost of a pass over `num_tokens`, as a multiple of one over a single token."""
        num_tokens = min(num_tokens, self.sizes[-1])
        if num_tokens not in self._estimates:
            self._estimates[num_tokens] = self._estimate(num_tokens)
        return self._estimates[num_tokens]

    def _estimate(self, num_tokens: int) -> float:
        if num_tokens <= 1:
            return 1.0
        seen = self._measured(num_tokens)
        if len(seen) < _ENOUGH:
            return max(1.0, median_low([*seen, self._expected(num_tokens)]))
        # A larger pass that takes less is a sign of noise, unless all of these took longer.
        larger = [self._median(size) for size in self._sizes if size > num_tokens]
        least = min(seen)
        return max(1.0, min([self._median(num_tokens), *(cost for cost in larger if cost >= least)]))

    def _median(self, num_tokens: int) -> float:
        if num_tokens not in self._medians:
            self._medians[num_tokens] = median_low(self._measured(num_tokens)) if num_tokens > 1 else 1.0
        return self._medians[num_tokens]

    def _measured(self, num_tokens: int) -> list[float]:
        """The costs of the last few passes over this number of tokens."""
        unsettled = [seconds / self.one_s for seconds in self._unsettled.get(num_tokens, [])[-_KEPT:]]
        return [*self._seen.get(num_tokens, ()), *unsettled][-_KEPT:]

    def _has_changed(self, num_tokens: int) -> None:
        self._medians.pop(num_tokens, None)
        self._estimates.clear()

    @property
    def _sizes(self) -> list[int]:
        """The sizes measured of those that drafts fill up to, in order; the first one is 1."""
        return [size for size in self.sizes if size == 1 or size in self._seen or size in self._unsettled]

    def _expected(self, num_tokens: int) -> float:
        """The cost of a pass over this number of tokens, estimated from other sizes.

        As much as the size that it is rounded up to, since costs can rise in steps; or between the sizes measured next
        to it; or extrapolated from the two largest ones below it.
        """
        costs = {size: self._median(size) for size in self._sizes}
        size = self.sizes[bisect_left(self.sizes, num_tokens)]
        if size > num_tokens and size in costs:
            return costs[size]
        below, above = [s for s in costs if s < num_tokens], [s for s in costs if s > num_tokens]
        last = below[-1]
        if above:
            part = (num_tokens - last) / (above[0] - last)
            return costs[last] + part * (costs[above[0]] - costs[last])
        slope = (costs[last] - costs[below[-2]]) / (last - below[-2]) if len(below) > 1 else 0.0
        return costs[last] + max(_OPTIMISM, slope) * (num_tokens - last)

    def worthwhile(self, largest: int) -> tuple[int, ...]:
        """The sizes of up to `largest` tokens that can save time, by what was measured; the first one is 1.

        Of several on one step, as expensive as each other, the largest.
        """
        sizes = sorted({*(size for size in self.sizes if size < largest), largest})
        found: list[int] = []
        for size in reversed(sizes[1:]):
            is_on_step = len(found) > 0 and self.relative(found[-1]) <= self.relative(size) * _MARGIN
            if not is_on_step and size >= _WORTHWHILE * self.relative(size):
                found.append(size)
        return (1, *reversed(found))

    def table(self) -> dict[int, float]:
        """Milliseconds by tokens, of the sizes measured."""
        return {size: 1000 * self.one_s * self.relative(size) for size in self._sizes} if self.is_known else {}


def _between(before: float, after: float) -> float:
    """Seconds of a pass over one token between two measurements. Where they differ much: as slow as the device was."""
    return (before + after) / 2 if max(before, after) < _SUSPICIOUS * min(before, after) else max(before, after)


class DraftCosts:
    """The seconds of a guessed token: the median of the last few."""

    def __init__(self, *, relative: float) -> None:
        """`relative`: the size of what guesses, as a fraction of the model's."""
        self.relative = relative
        self._steps: deque[float] = deque(maxlen=_KEPT_SINGLES)
        self._has_guessed = False

    def step_s(self, passes: PassCosts) -> float:
        """Of a guessed token. Before it was seen: decoding reads the weights, so it follows from their size."""
        return median_low(self._steps) if self._steps else passes.one_s * self.relative

    def note_steps(self, num: int, seconds: float) -> None:
        """So many tokens were guessed one after the other. The first time may have compiled kernels."""
        if self._has_guessed:
            self._steps.append(seconds / num)
        self._has_guessed = True


class DraftAccount:
    """What the drafts of a source have brought so far, less what they cost, in passes over one token.

    Where they lose, the source rests, whatever was estimated: what it may lose from then on is a small share of the
    time that answers take. It is also back as soon as drafts that nobody verified would have paid.
    """

    def __init__(self) -> None:
        self.balance = 0.0
        self._dearness = 1.0
        """What its passes cost, as a multiple of what was expected: a mean over about the last ten."""
        self._evidence = 0.0
        """What drafts that were not verified would have saved, if that is more than nothing (a cumulative sum)."""

    @property
    def is_overdrawn(self) -> bool:
        return self.balance < -_TRIAL

    def add(self, num_passes: float) -> None:
        """How many passes drafts have saved; less than 0: they have cost them."""
        self.balance = max(-2 * _TRIAL, min(_MOST_CREDIT, self.balance + num_passes))

    def note_verified(self, num_tokens: int, *, cost: float, expected: float, step: float) -> None:
        """A pass has yielded `num_tokens`. Costs are in passes over one token: of the pass, and of making the draft."""
        self._dearness += _DEARNESS * (cost / expected - self._dearness)
        self.add(num_tokens - cost - step)

    def note_unverified(self, num_tokens: int, *, expected: float) -> None:
        """While it rests, a pass that was expected to cost this much would have yielded `num_tokens`."""
        self._evidence = max(0.0, self._evidence + num_tokens - expected * self._dearness)
        if self._evidence >= _EVIDENCE:
            self._evidence = 0.0
            self.balance = max(self.balance, _LATE_TRIAL - _TRIAL)

    def note_answered(self, num_tokens: int) -> None:
        """So many tokens of answers were decoded."""
        if self.balance < 0:
            self.balance = min(0.0, self.balance + _SHARE_OF_TRIALS * num_tokens)


@dataclass(slots=True)
class _Rate:
    """The acceptance rate of the next draft token, over about `_MEMORY` trials."""

    prior: float
    accepted: float = 0.0
    trials: float = 0.0

    @property
    def value(self) -> float:
        return (self.accepted + _PRIOR_TRIALS * self.prior) / (self.trials + _PRIOR_TRIALS)

    def note(self, accepted: int, trials: int) -> None:
        keep = min(1.0, max(0.0, (_MEMORY - trials) / max(self.trials, 1.0)))
        self.accepted = keep * self.accepted + accepted
        self.trials = keep * self.trials + trials

    def fade(self, num: int) -> None:
        self.accepted *= _FORGETTING**num
        self.trials *= _FORGETTING**num


class AcceptanceRates:
    """Acceptance rates of drafts, by source and length of the match.

    `is_resumed`: the match is what agrees again behind a change.
    """

    def __init__(self) -> None:
        self._rates: dict[tuple[DraftSource, int, bool], _Rate] = {}

    def _rate(self, source: DraftSource, match: int, *, is_resumed: bool = False) -> _Rate:
        key = (source, match.bit_length(), is_resumed)
        if key not in self._rates:
            self._rates[key] = _Rate(_prior(source, match))
        return self._rates[key]

    def of(self, source: DraftSource, match: int, *, is_resumed: bool = False) -> float:
        """The probability that the next token of such a draft is accepted."""
        return min(0.999, self._rate(source, match, is_resumed=is_resumed).value)

    def note(self, source: DraftSource, match: int, *, accepted: int, drafted: int, is_resumed: bool = False) -> None:
        """Record that the first `accepted` of `drafted` tokens were accepted. Those after a rejection do not count."""
        self._rate(source, match, is_resumed=is_resumed).note(accepted, min(accepted + 1, drafted))

    def fade(self, source: DraftSource, match: int, *, num: int) -> None:
        """Record that such a draft was not worth computing, for `num` steps."""
        self._rate(source, match).fade(num)


@dataclass(frozen=True, slots=True)
class DraftedLine:
    """What one of several sequences would have in a pass: tokens that it takes anyway, and a draft."""

    num_fed: int
    available: int
    rate: float
    """The probability that the next token of the draft is accepted."""

    def num_drafted(self, size: int) -> int:
        """The draft tokens that a pass over `size` tokens has room for."""
        return min(self.available, size - self.num_fed)


def best_size(
    lines: Sequence[DraftedLine],
    costs: PassCosts,
    *,
    rewinds: bool,
    sizes: Sequence[int] = PASS_SIZES,
    most: int,
    step: float = 0.0,
) -> int:
    """The tokens that one pass over all these lines has of each, for the most tokens per second; 0: without drafts.

    Shorter lines are filled up. `costs`: of passes over as many sequences. `rewinds`: whether layers can drop rejected
    tokens; if not, the tokens accepted before a rejection are fed again in the next pass. `most`: tokens of the longest
    pass that fits. `step`: the cost of making one draft token, as a multiple of a pass over one token.
    """
    least = max(line.num_fed for line in lines)
    best, speed = 0, _MARGIN * len(lines) / _cost_without(least, len(lines), costs)
    longest = min(most, max(line.num_fed + line.available for line in lines))
    largest = costs.largest
    for size in {min(size, longest) for size in sizes if size <= largest}:
        drafted = [line.num_drafted(size) for line in lines]
        if size < least or not any(drafted):
            continue
        expected = [_expected(line.rate, num) for line, num in zip(lines, drafted, strict=True)]
        cost = costs.relative(size) + max(drafted) * step
        if not rewinds:
            kept = 1.0
            for line, num in zip(lines, drafted, strict=True):
                kept *= line.rate**num if line.num_fed + num == size else 0.0
            cost += (1 - kept) * (costs.relative(1 + round(max(expected))) - 1)
        if sum(expected) / cost > speed:
            best, speed = size, sum(expected) / cost
    return best


def _cost_without(num_fed: int, num_lines: int, costs: PassCosts) -> float:
    """Without drafts, unfed tokens share the pass of a single line; with several lines they take a separate pass."""
    return costs.relative(num_fed) if num_lines == 1 or num_fed == 1 else 1.0 + costs.relative(num_fed - 1)


def _expected(rate: float, length: int) -> float:
    """The tokens that a draft yields on average, with the one that the model samples after them.

    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.
    """
    return (1 - rate ** (length + 1)) / (1 - rate)
