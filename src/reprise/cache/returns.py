"""Learns when chats come back, and says what waiting for one is worth.

For each class of prompt (how many turns, how long the last pause, how much was new) the rate of return is estimated at
each age: returns seen ÷ time waited, the Nelson-Aalen estimator, with ages in steps that grow geometrically. A class
of which little is known borrows from those it resembles.

What is it worth to hold something until it is used? Give it up at age T, and it earns P(used before T) for
E[time held until used or given up]; the best ratio over all T is the index of Gittins ("Bandit processes and dynamic
allocation indices", 1979), and to hold those of highest index is optimal while the budget binds them together only
through its price. Beckmann, Chen and Cidon use the same quantity, hits per byte and time, in "LHD: improving cache hit
rate by maximizing hit density" (NSDI 2018). A constant rate gives the plain rate of use; a rate that first rises keeps
young items for what is coming; before anything was seen the prior falls with age, which is LRU.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reprise.cache.lineage import MEMORY, Visit

Floats = npt.NDArray[np.float64]

_AGES = np.unique(np.round(2.0 ** (np.arange(28) / 2)).astype(np.int64))
"""Where the steps of age begin, in prompts: about √2 apart."""

_STEPS = len(_AGES)
_WIDTHS = np.diff(np.append(_AGES, MEMORY)).astype(np.float64)

_TURNS = (1, 2, 4, 8)
_PAUSES = (16, 64, 256, 1024)
_NEW_TOKENS = (512, 4096, 32768)
_SHAPE = (len(_TURNS) + 1, len(_PAUSES) + 2, len(_NEW_TOKENS) + 1)
"""Classes: by turn, by pause (the first: there was none), by new tokens; powers of two, four and eight."""

_PRIOR_RATE = 0.2
"""Before anything was seen, an item of age a is used at the rate 0.2 / a: the older, the less likely."""

_TRUST = 3.0
"""So many returns of its own, or so much waiting, and a class is believed as much as its neighbours."""

_REFRESH = 64
"""Prompts between two computations of the table."""


def class_of(visit: Visit, *, unit_tokens: int) -> int:
    """The class of a prompt, as a flat index."""
    turn = int(np.searchsorted(_TURNS, visit.turn, side="right"))
    pause = 0 if visit.gap is None else 1 + int(np.searchsorted(_PAUSES, visit.gap, side="right"))
    new = int(np.searchsorted(_NEW_TOKENS, visit.num_new * unit_tokens, side="right"))
    return int(np.ravel_multi_index((turn, pause, new), _SHAPE))


@dataclass(slots=True)
class _Waiting:
    kind: int
    is_waiting: bool = True


class Returns:
    """Counts of returns and of waiting, by class and age, and the table of worth made from them."""

    def __init__(self) -> None:
        size = (int(np.prod(_SHAPE)), _STEPS)
        self._waiting_now = np.zeros(size)
        self._waited = np.zeros(size)
        self._returned = np.zeros(size)
        self._ring: list[_Waiting | None] = [None] * MEMORY
        self._now = 0
        self._worth = self._make_table()

    def arrive(self, visit: Visit, kind: int) -> None:
        """One prompt later: everybody is older, and perhaps somebody came back."""
        self._now = visit.number
        for step in range(1, _STEPS):
            self._grow_older(self._now - int(_AGES[step]), step)
        self._waited += self._waiting_now
        if visit.continues is not None and visit.is_next_turn:
            self._came_back(visit.continues)
        oldest = self._ring[self._now % MEMORY]
        if oldest is not None and oldest.is_waiting:
            self._waiting_now[oldest.kind, -1] -= 1
        self._ring[self._now % MEMORY] = _Waiting(kind)
        self._waiting_now[kind, 0] += 1
        if self._now % _REFRESH == 0:
            self._worth = self._make_table()

    def worth(self, number: int) -> float:
        """Uses to be expected per prompt of waiting, for what prompt `number` left."""
        one = self._ring[number % MEMORY] if number > 0 and self._now - number < MEMORY else None
        if one is None:
            return float(self._worth[0, -1])
        return float(self._worth[one.kind, _step_of(self._now - number)])

    def next_step_at(self, number: int) -> int:
        """The number of the prompt at which prompt `number` enters its next step of age."""
        step = _step_of(self._now - number)
        return number + int(_AGES[step + 1]) if step + 1 < _STEPS else self._now + MEMORY

    def _grow_older(self, number: int, step: int) -> None:
        one = self._ring[number % MEMORY] if number > 0 else None
        if one is not None and one.is_waiting:
            self._waiting_now[one.kind, step - 1] -= 1
            self._waiting_now[one.kind, step] += 1

    def _came_back(self, number: int) -> None:
        one = self._ring[number % MEMORY]
        if one is not None and one.is_waiting:
            step = _step_of(self._now - number)
            one.is_waiting = False
            self._waiting_now[one.kind, step] -= 1
            self._returned[one.kind, step] += 1

    def _make_table(self) -> Floats:
        return index_table(_rates(self._returned, self._waited), _WIDTHS)


def _step_of(age: int) -> int:
    return max(0, int(np.searchsorted(_AGES, age, side="right")) - 1)


def _rates(returned: Floats, waited: Floats) -> Floats:
    """Rates of return by class and age: what was seen, shrunk towards what the marginals make of it."""
    seen, time = returned.reshape(*_SHAPE, -1), waited.reshape(*_SHAPE, -1)
    axes = tuple(range(len(_SHAPE)))
    prior = _PRIOR_RATE / (_AGES + _WIDTHS / 2)
    overall = (seen.sum(axes) + 1) / (time.sum(axes) + 1 / prior)
    expected = np.broadcast_to(overall, (*_SHAPE, _STEPS))
    for axis in axes:
        others = tuple(a for a in axes if a != axis)
        marginal = (seen.sum(others, keepdims=True) + _TRUST) / (time.sum(others, keepdims=True) + _TRUST / overall)
        expected = expected * (marginal / overall)
    rates = (seen + _TRUST) / (time + _TRUST / expected)
    return rates.reshape(returned.shape)


def index_table(rates: Floats, widths: Floats) -> Floats:
    """The Gittins index at each step of age: max over T of P(used before T) / E[time until used or T].

    `rates`: uses per unit of time, shape ``(classes, steps)``, constant within a step; `widths`: the steps' lengths.
    """
    hazard = rates * widths
    survival = np.exp(-np.cumsum(hazard, axis=1))
    before = np.concatenate([np.ones((len(rates), 1)), survival[:, :-1]], axis=1)
    # The time spent in a step, by those who enter it: the integral of exp(-rate · t) over it.
    spent = np.cumsum(before * -np.expm1(-hazard) / rates, axis=1)
    spent_before = np.concatenate([np.zeros((len(rates), 1)), spent[:, :-1]], axis=1)
    used = before[:, :, None] - survival[:, None, :]
    held = spent[:, None, :] - spent_before[:, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(held > 0, used / held, 0.0)
    # Stops before the start are no stops; one step at least is held.
    stops_later = np.triu(np.ones(ratio.shape[1:]))
    return np.maximum((ratio * stops_later).max(axis=2), rates)
