"""Learns when chats return, and estimates the rate of reuse per unit of time that an item is held.

For each class of prompt (number of turns, length of the last pause, number of new tokens) the rate of return is
estimated by age: returns ÷ time waited, the Nelson-Aalen estimator, with geometrically growing age steps. Classes with
few observations borrow from similar ones.

An item that is held until age T is used with P(used before T) at a cost of E[time held until used or T]. The best ratio
over all T is the Gittins index ("Bandit processes and dynamic allocation indices", 1979); holding the items of highest
index is optimal if only the price of the budget couples them. Beckmann, Chen and Cidon use the same quantity, hits per
byte and time, in "LHD: improving cache hit rate by maximizing hit density" (NSDI 2018). For a constant rate it is the
rate of use; a rate that rises at first keeps young items; the prior falls with age, which is LRU.
"""

import functools
from bisect import bisect_right
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from reprise.cache.conversation_history import MEMORY

Floats = npt.NDArray[np.float64]

_AGES = np.unique(np.round(2.0 ** (np.arange(28) / 2)).astype(np.int64))
"""The starts of the age steps, in prompts: a factor of about √2 apart."""

_STARTS: list[int] = _AGES.tolist()
_STEPS = len(_AGES)
_WIDTHS = np.diff(np.append(_AGES, MEMORY)).astype(np.float64)

_PRIOR_RATE = 0.2
"""The prior: an item of age a is used at the rate 0.2 / a."""

_NEAR = (0.25, 0.5, 0.25)
"""Smoothing kernel over neighbouring age steps: the rate changes slowly with age, while few observations make peaks."""

_REFRESH = 64
"""The table is recomputed every so many prompts."""


@dataclass(slots=True)
class _WaitingPrompt:
    kind: int
    is_waiting: bool = True


class ReuseRateEstimator:
    """Returns and waiting times by class and age, and the table of rates computed from them.

    A class is a bin on each axis of `shape`, and of one more axis with `num_later` bins that is known only later
    (`specify`); until then the average over these bins is used. What waits is identified by the number of its prompt.
    """

    def __init__(self, shape: tuple[int, ...], *, num_later: int = 0) -> None:
        self._shape = (*shape, 1 + num_later)
        size = (int(np.prod(self._shape)), _STEPS)
        self._waiting_now = np.zeros(size)
        self._waited = np.zeros(size)
        self._returned = np.zeros(size)
        self._ring: list[_WaitingPrompt | None] = [None] * MEMORY
        self._now = 0
        self._rates = _table_of_nothing(self._shape)

    def advance(self) -> None:
        """Advance time by one prompt."""
        self._now += 1
        for step in range(1, _STEPS):
            self._age(self._now - _STARTS[step], step)
        self._waited += self._waiting_now
        oldest = self._ring[self._now % MEMORY]
        if oldest is not None and oldest.is_waiting:
            self._waiting_now[oldest.kind, -1] -= 1
        self._ring[self._now % MEMORY] = None
        if self._now % _REFRESH == 0:
            shape = (*self._shape, _STEPS)
            self._rates = _table(self._returned.reshape(shape), self._waited.reshape(shape))

    def wait(self, *bins: int) -> None:
        """From this prompt on, an item of this class waits; at most one per prompt."""
        kind = int(np.ravel_multi_index((*bins, 0), self._shape))
        self._ring[self._now % MEMORY] = _WaitingPrompt(kind)
        self._waiting_now[kind, 0] += 1

    def specify(self, number: int, later_bin: int) -> None:
        """Set the bin on the last axis of what has waited since prompt `number`."""
        one = self._ring[number % MEMORY] if self._is_remembered(number) else None
        if one is not None and one.is_waiting:
            step = _step_of(self._now - number)
            self._waiting_now[one.kind, step] -= 1
            one.kind += 1 + later_bin - one.kind % self._shape[-1]
            self._waiting_now[one.kind, step] += 1

    def come_back(self, number: int) -> None:
        """Record the return of what has waited since prompt `number`."""
        one = self._ring[number % MEMORY] if self._is_remembered(number) else None
        if one is not None and one.is_waiting:
            step = _step_of(self._now - number)
            one.is_waiting = False
            self._waiting_now[one.kind, step] -= 1
            self._returned[one.kind, step] += 1

    def rate(self, number: int | None) -> float:
        """Expected uses per prompt of waiting, for what has waited since prompt `number`."""
        one = self._ring[number % MEMORY] if self._is_remembered(number) else None
        if one is None or number is None:
            return float(self._rates[0, -1])
        return float(self._rates[one.kind, _step_of(self._now - number)])

    def next_step_at(self, number: int | None) -> int:
        """The prompt at which what has waited since prompt `number` enters the next age step."""
        begun = 0 if number is None else number
        step = _step_of(self._now - begun)
        return begun + _STARTS[step + 1] if step + 1 < _STEPS else self._now + MEMORY

    def _age(self, number: int, step: int) -> None:
        """Move what has waited since prompt `number` to this age step."""
        one = self._ring[number % MEMORY] if number > 0 else None
        if one is not None and one.is_waiting:
            self._waiting_now[one.kind, step - 1] -= 1
            self._waiting_now[one.kind, step] += 1

    def _is_remembered(self, number: int | None) -> TypeGuard[int]:
        return number is not None and self._now - number < MEMORY


def _table(seen: Floats, time: Floats) -> Floats:
    """Expected uses per prompt of waiting, by class and age; `seen` returns in `time`, both of shape (…, steps)."""
    by_all = _rates(seen.sum(-2), time.sum(-2))[..., None, :]
    rates = _learned(seen, time, by_all * _ratios(seen, time, by_all))
    # Of whom less is known is judged by all, and not by those who never came to be known better.
    rates[..., :1, :] = by_all
    return index_table(rates.reshape(-1, _STEPS), _WIDTHS)


@functools.cache
def _table_of_nothing(shape: tuple[int, ...]) -> Floats:
    """The table of the prior."""
    return _table(np.zeros((*shape, _STEPS)), np.zeros((*shape, _STEPS)))


def _step_of(age: int) -> int:
    return max(0, bisect_right(_STARTS, age) - 1)


def _rates(seen: Floats, time: Floats) -> Floats:
    """Rates of return by class and age (the last axis), shrunk towards the product of the marginals."""
    axes = tuple(range(seen.ndim - 1))
    prior = _PRIOR_RATE / (_AGES + _WIDTHS / 2)
    overall = (seen.sum(axes) + 1) / (time.sum(axes) + 1 / prior)
    expected = np.broadcast_to(overall, seen.shape)
    for axis in axes:
        others = tuple(a for a in axes if a != axis)
        marginal = _learned(seen.sum(others, keepdims=True), time.sum(others, keepdims=True), overall)
        expected = expected * (marginal / overall)
    return _learned(seen, time, expected)


def _ratios(seen: Floats, time: Floats, expected: Floats) -> Floats:
    """By which factor each bin of the second to last axis returns more often than expected, over all others."""
    others = tuple(range(seen.ndim - 2))
    overall = (time * expected).sum(others, keepdims=True)
    return _learned(seen.sum(others, keepdims=True), overall, np.ones_like(overall))


def _learned(seen: Floats, time: Floats, expected: Floats) -> Floats:
    """The expected rates corrected by the observations; the expectation weighs as much as one return.

    A Gamma prior of mean 1 on the ratio of the true rate to the expected one, which changes slowly with age.
    """
    return expected * (_nearby(seen) + 1) / (_nearby(time * expected) + 1)


def _nearby(counts: Floats) -> Floats:
    """Counts smoothed over age, the last axis; zero beyond the ends."""
    padded = np.pad(counts, [(0, 0)] * (counts.ndim - 1) + [(1, 1)])
    return sum((share * padded[..., at : at + _STEPS] for at, share in enumerate(_NEAR)), np.zeros_like(counts))


def index_table(rates: Floats, widths: Floats) -> Floats:
    """The Gittins index at each step of age: max over T of P(used before T) / E[time until used or T].

    `rates`: uses per unit of time, shape ``(classes, steps)``, constant within a step; `widths`: the steps' lengths.
    """
    hazard = rates * widths
    survival = np.exp(-np.cumsum(hazard, axis=1))
    before = np.concatenate([np.ones((len(rates), 1)), survival[:, :-1]], axis=1)
    # Time spent in a step by those that enter it: the integral of exp(-rate · t).
    spent = np.cumsum(before * -np.expm1(-hazard) / rates, axis=1)
    spent_before = np.concatenate([np.zeros((len(rates), 1)), spent[:, :-1]], axis=1)
    index = rates.copy()
    for stop in range(rates.shape[1]):
        # Held from the start of each step before `stop` to the end of that one.
        used = before[:, : stop + 1] - survival[:, stop, None]
        held = spent[:, stop, None] - spent_before[:, : stop + 1]
        ratio = np.divide(used, held, out=np.zeros_like(used), where=held > 0)
        index[:, : stop + 1] = np.maximum(index[:, : stop + 1], ratio)
    return index
