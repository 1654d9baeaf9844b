"""Cost and benefit of drafts: seconds of a pass by its size, acceptance rates, and the best draft length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from reprise.core.backend import DraftSource

PASS_SIZES = (1, 2, 4, 8, 16, 32)
"""Pass sizes in tokens that drafts fill up to: on real devices, the cost between two sizes is not smooth."""

_WEIGHT = 0.15
"""Weight of a new measurement in a running mean."""

_OPTIMISM = 0.02
"""Assumed cost of another token while only passes of one token were measured, as a fraction of such a pass."""

_PREFILL_SPEEDUP = 8
"""How much less a token takes in a long pass than alone, before that was seen."""

_PRIOR_TRIALS = 4.0
_MEMORY = 64.0
"""Trials that a rate remembers."""
_FORGETTING = 0.98
"""Decay of a rate's observations each time a draft was not worth a pass, so that one is tried again now and then."""


_PRIOR = {
    DraftSource.ANSWER: 0.5,
    DraftSource.PREDICTION: 0.8,
    DraftSource.HISTORY: 0.6,
    DraftSource.GRAMMAR: 0.99,
    DraftSource.DRAFT_MODEL: 0.7,
}
"""Prior probability that the next token of a draft is accepted."""
_TEXTS = frozenset({DraftSource.ANSWER, DraftSource.PREDICTION, DraftSource.HISTORY})
_DOUBT = 0.75
"""By how much each doubling of a match, from four tokens on, reduces the prior doubt in what follows it: a long match
is mostly a text that is written again, and without a trial that would never be learnt."""


def _prior(source: DraftSource, match: int) -> float:
    doublings = max(0, match.bit_length() - 2) if source in _TEXTS else 0
    return 1 - (1 - _PRIOR[source]) * _DOUBT**doublings


@dataclass(slots=True)
class PassCosts:
    """Running means of the seconds of a pass over one sequence, by pass size in tokens."""

    _seconds: dict[int, float] = field(default_factory=dict[int, float])
    _is_warm: set[int] = field(default_factory=set[int])

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record a pass over `num_tokens` that took `seconds`."""
        size = PASS_SIZES[min(bisect_left(PASS_SIZES, num_tokens), len(PASS_SIZES) - 1)]
        if size not in self._is_warm:
            # The first pass of a size may include compiling kernels.
            self._is_warm.add(size)
            return
        self._seconds[size] = _mean(self._seconds.get(size), seconds)

    @property
    def is_known(self) -> bool:
        """Whether a pass over one token was measured."""
        return 1 in self._seconds

    @property
    def one_s(self) -> float:
        """Seconds of a pass over one token."""
        return self._seconds[1]

    @property
    def largest(self) -> int:
        """The largest pass to try: one size beyond those measured, so that a trial never costs much."""
        seen = [size for size in PASS_SIZES if size in self._seconds]
        return PASS_SIZES[min(PASS_SIZES.index(seen[-1]) + 1, len(PASS_SIZES) - 1)] if seen else 1

    def relative(self, num_tokens: int) -> float:
        """The cost of a pass over `num_tokens`, as a multiple of one over a single token.

        For a size not measured yet, extrapolated from the two largest measured ones below it.
        """
        size = PASS_SIZES[min(bisect_left(PASS_SIZES, num_tokens), len(PASS_SIZES) - 1)]
        one = self._seconds[1]
        if size in self._seconds:
            return max(1.0, self._seconds[size] / one)
        below = [s for s in PASS_SIZES if s in self._seconds and s < size]
        last = max(1.0, self._seconds[below[-1]] / one)
        slope = (last - max(1.0, self._seconds[below[-2]] / one)) / (below[-1] - below[-2]) if len(below) > 1 else 0.0
        return last + max(_OPTIMISM, slope) * (size - below[-1])

    def table(self) -> dict[int, float]:
        """Milliseconds by size, of the sizes measured."""
        return {size: 1000 * self._seconds[size] for size in PASS_SIZES if size in self._seconds}


@dataclass(slots=True, kw_only=True)
class DraftCosts:
    """The seconds of a draft model's passes, as running means. `relative`: its size, as a part of the other model's."""

    relative: float
    _step_s: float | None = None
    _token_s: float | None = None
    _num_steps: int = 0
    _num_prefills: int = 0

    def step_s(self, passes: PassCosts) -> float:
        """Of a drafted token. Before it was seen: decoding reads the weights, so it follows from their size."""
        return passes.one_s * self.relative if self._step_s is None else self._step_s

    def token_s(self, passes: PassCosts) -> float:
        """Of a token of what it has to compute before it can draft."""
        return self.step_s(passes) / _PREFILL_SPEEDUP if self._token_s is None else self._token_s

    def note_steps(self, num: int, seconds: float) -> None:
        """So many tokens were drafted in so many passes. The first of all may have compiled its kernels."""
        self._num_steps += 1
        if self._num_steps > 1:
            self._step_s = _mean(self._step_s, seconds / num)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """So many tokens were computed in one pass."""
        self._num_prefills += 1
        if self._num_prefills > 1:
            self._token_s = _mean(self._token_s, seconds / num_tokens)


def _mean(before: float | None, seen: float) -> float:
    return seen if before is None else (1 - _WEIGHT) * before + _WEIGHT * seen


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

    def fade(self) -> None:
        self.accepted *= _FORGETTING
        self.trials *= _FORGETTING


class AcceptanceRates:
    """Acceptance rates of drafts, by source and length of the match."""

    def __init__(self) -> None:
        self._rates: dict[tuple[DraftSource, int], _Rate] = {}

    def _rate(self, source: DraftSource, match: int) -> _Rate:
        key = (source, match.bit_length())
        if key not in self._rates:
            self._rates[key] = _Rate(_prior(source, match))
        return self._rates[key]

    def of(self, source: DraftSource, match: int) -> float:
        """The probability that the next token of such a draft is accepted."""
        return min(0.999, self._rate(source, match).value)

    def note(self, source: DraftSource, match: int, *, accepted: int, drafted: int) -> None:
        """Record that the first `accepted` of `drafted` tokens were accepted. Those after a rejection do not count."""
        self._rate(source, match).note(accepted, min(accepted + 1, drafted))

    def fade(self, source: DraftSource, match: int) -> None:
        """Record that such a draft was not worth a pass."""
        self._rate(source, match).fade()


@dataclass(frozen=True, slots=True)
class BestLength:
    """How many tokens of a draft to verify, 0: none; and the tokens that brings in the time of one pass over one."""

    length: int
    speed: float


def best_length(
    available: int,
    rate: float,
    costs: PassCosts,
    *,
    num_fed: int,
    rewinds: bool,
    sizes: Sequence[int] = PASS_SIZES,
    step: float = 0.0,
) -> BestLength:
    """The number of draft tokens to verify for the most tokens per second; 0 if drafting does not pay.

    `available`: tokens of the draft. `num_fed`: tokens that the pass takes anyway, at least one. `rewinds`: whether
    layers can drop rejected tokens; if not, the tokens accepted before a rejection are fed again in the next pass.
    `step`: the cost of making one draft token, as a multiple of a pass over one token.

    With acceptance probability p, k draft tokens yield (1 - p^(k+1)) / (1 - p) tokens on average, including the one
    that the model samples after them (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
    2023).
    """
    best = BestLength(0, 1 / costs.relative(num_fed))
    largest = costs.largest
    for length in {min(available, size - num_fed) for size in sizes if size <= largest}:
        if length < 1:
            continue
        expected = (1 - rate ** (length + 1)) / (1 - rate)
        cost = costs.relative(num_fed + length) + length * step
        if not rewinds:
            again = costs.relative(1 + round(expected)) - 1
            cost += (1 - rate**length) * again
        if expected / cost > best.speed:
            best = BestLength(length, expected / cost)
    return best
