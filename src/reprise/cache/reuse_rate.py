"""Learns when chats return: which prompts continue earlier ones, and the rate of reuse per unit of time held.

`ConversationHistory` recognises prompts that continue earlier ones, whether those are still stored or evicted. An
eviction policy needs to know how likely a chat is to return. Evicted chats return too, and a policy that learns only
from what it kept never finds out what it should have kept. So every prompt leaves a few marks here: hashes of its
prefixes, at positions in its new part. A later prompt whose prefix has such a hash continues it. Marks take about 100
bytes per prompt, the newest 16,384 prompts are remembered, and no tokens are stored.

`ReuseRateEstimator` estimates the rate. For each class of prompt (`reprise.cache.policy.ExpectedSaving` says which) the
rate of return is estimated by age: returns ÷ time waited, the Nelson-Aalen estimator, with geometrically growing age
steps. Classes with few observations borrow from similar ones.

An item that is held until age T is used with P(used before T) at a cost of E[time held until used or T]. The best ratio
over all T is the Gittins index ("Bandit processes and dynamic allocation indices", 1979); holding the items of highest
index is optimal if only the price of the budget couples them. If an item gets into another class while it waits, as
when its chat has been silent for longer, the rates are those of the classes on its way. Beckmann, Chen and Cidon use
the same quantity, hits per byte and time, in "LHD: improving cache hit rate by maximizing hit density" (NSDI 2018). For
a constant rate it is the rate of use; a rate that rises at first keeps young items; the prior falls with age, which is
LRU.
"""

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from reprise.core.tokens import Tokens

MEMORY = 1 << 14
"""How many prompts are remembered."""

_SLOTS = 1 << 17
_MARKED = (0.25, 0.5, 0.75, 1.0)
"""Where a prompt is marked, as fractions of its new part: a template may rewrite the end."""

_END = 16
"""One more mark is this many tokens before the end: the next turn may not repeat the generation prompt."""

Hashes = npt.NDArray[np.uint64]

Floats = npt.NDArray[np.float64]

_AGES = np.unique(np.round(2.0 ** (np.arange(28) / 2)).astype(np.int64))
"""The starts of the age steps, in prompts: a factor of about √2 apart."""

_STARTS: list[int] = _AGES.tolist()
_STEPS = len(_AGES)
_WIDTHS = np.diff(np.append(_AGES, MEMORY)).astype(np.float64)

PRIOR_RATE = 0.2
"""The prior: an item of age a is used at the rate 0.2 / a."""

_NEAR = (0.25, 0.5, 0.25)
"""Smoothing kernel over neighbouring age steps: the rate changes slowly with age, while few observations make peaks."""

_REFRESH = 64
"""The number of prompts after which rates are learnt anew; the first times sooner, when twice as many were seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptVisit:
    """One prompt's place in the history of its conversation. Times are counted in prompts.

    `turn`: turns before it. `gap`: prompts since the previous turn, None for a first turn or a branch. `num_new`:
    tokens that no earlier prompt had. `continues`: the number of the prompt that it continues; `num_others`: how many
    prompts continued that one before, `last_other`: the number of the latest of them. `has_tail`: whether it repeats
    what the continued prompt stored past its stable boundary, None if that stored nothing there.
    """

    number: int
    turn: int
    gap: int | None
    num_new: int
    continues: int | None
    num_others: int = 0
    last_other: int | None = None
    has_tail: bool | None = None


class ConversationHistory:
    """The most recent prompts, by number (from 1), and their marks."""

    def __init__(self) -> None:
        self.now = 0
        """The number of the newest prompt."""
        self._turns = np.zeros(MEMORY, dtype=np.int32)
        self._num_continued = np.zeros(MEMORY, dtype=np.int32)
        self._continued_by = np.zeros(MEMORY, dtype=np.int64)
        self._tail_at = np.zeros(MEMORY, dtype=np.int64)
        self._tail_keys = np.zeros(MEMORY, dtype=np.uint64)
        self._keys = np.zeros(_SLOTS, dtype=np.uint64)
        self._numbers = np.zeros(_SLOTS, dtype=np.int64)
        self._factors = np.zeros(0, dtype=np.uint64)
        self._seeds = np.random.default_rng(0x9E3779B9)

    def arrive(self, tokens: Tokens, *, known: int, namespace: str) -> PromptVisit:
        """Record a prompt of which ``[0, known)`` is stored. O(length), about 50 µs for 10,000 tokens."""
        hashes = self._hashes(tokens, namespace)
        found = self._deepest(hashes)
        depth, before = found if found is not None else (0, None)
        new_at = min(len(tokens), max(known, depth))
        self.now += 1
        number = self.now
        slot, before_slot = number % MEMORY, (before or 0) % MEMORY
        num_others = int(self._num_continued[before_slot]) if before is not None else 0
        last_other = int(self._continued_by[before_slot]) if num_others > 0 else None
        # Only the first continuation is the next turn; later ones are branches.
        is_next_turn = before is not None and num_others == 0
        has_tail = self._has_tail(hashes, before) if before is not None and is_next_turn else None
        turn = 0
        if before is not None:
            turn = int(self._turns[before_slot]) + (1 if is_next_turn else 0)
            self._num_continued[before_slot] += 1
            self._continued_by[before_slot] = number
        self._turns[slot], self._num_continued[slot], self._tail_at[slot] = turn, 0, 0
        if new_at < len(tokens) or is_next_turn:
            self._mark(hashes, new_at, number)
        return PromptVisit(
            number=number,
            turn=turn,
            gap=number - before if before is not None and is_next_turn else None,
            num_new=len(tokens) - new_at,
            continues=before,
            num_others=num_others,
            last_other=last_other,
            has_tail=has_tail,
        )

    def leave_tail(self, tokens: Tokens, stable_at: int, *, number: int | None, namespace: str) -> None:
        """Record that prompt `number` and its answer are stored as `tokens`; the next turn may differ past `stable_at`.

        A later prompt's tail is compared up to the middle: a generation prompt may begin like an answer.
        """
        middle = (stable_at + len(tokens) + 1) // 2
        if number is not None and self._is_remembered(number):
            self._tail_at[number % MEMORY] = middle
            self._tail_keys[number % MEMORY] = self._hashes(tokens[:middle], namespace)[-1]

    def expect(self, tokens: Tokens, *, known: int, number: int, namespace: str) -> None:
        """Record that the next turn of prompt `number` will begin with `tokens`; earlier prompts had ``[0, known)``."""
        if known < len(tokens) and self._is_remembered(number):
            self._mark(self._hashes(tokens, namespace), known, number)

    def number_of(self, tokens: Tokens, *, namespace: str) -> int | None:
        """The number of the newest remembered prompt that these tokens continue, or None."""
        found = self._deepest(self._hashes(tokens, namespace))
        return found[1] if found is not None else None

    def last_continuation(self, number: int | None) -> int | None:
        """The number of the latest prompt that continued prompt `number`, or None."""
        return int(self._continued_by[number % MEMORY]) if number is not None and self.is_continued(number) else None

    def is_continued(self, number: int | None) -> bool:
        """Whether a later prompt continued prompt `number`."""
        return number is not None and self._is_remembered(number) and bool(self._num_continued[number % MEMORY] > 0)

    def _has_tail(self, hashes: Hashes, number: int) -> bool | None:
        at = int(self._tail_at[number % MEMORY])
        if at == 0:
            return None
        return at <= len(hashes) and bool(hashes[at - 1] == self._tail_keys[number % MEMORY])

    def _is_remembered(self, number: int) -> bool:
        return number > 0 and self.now - number < MEMORY

    def _hashes(self, tokens: Tokens, namespace: str) -> Hashes:
        """Hashes of all prefixes, shape ``(length,)``: the multilinear family over 64 bits, with a mixing step.

        After Lemire and Kaser, "Strongly universal string hashing is fast" (2014).
        """
        while len(self._factors) < len(tokens):
            more = self._seeds.integers(1, 1 << 63, size=max(4096, len(self._factors)), dtype=np.uint64)
            self._factors = np.concatenate([self._factors, more])
        seed = np.frombuffer(blake2b(namespace.encode(), digest_size=8).digest(), dtype=np.uint64)
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._factors[: len(tokens)]
        sums = np.cumsum(terms, dtype=np.uint64) + seed
        return (sums ^ (sums >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)

    def _deepest(self, hashes: Hashes) -> tuple[int, int] | None:
        """(prefix length, prompt number) of the deepest mark on a path, or None."""
        slots = hashes >> np.uint64(64 - 17)
        for at in np.flatnonzero(self._keys[slots] == hashes)[::-1]:
            number = int(self._numbers[slots[at]])
            if self._is_remembered(number):
                return int(at) + 1, number
        return None

    def _mark(self, hashes: Hashes, new_at: int, number: int) -> None:
        num_new = len(hashes) - new_at
        lengths = {new_at + max(1, int(num_new * share)) for share in _MARKED}
        # An exact repeat has no new part: the mark at the end becomes its own.
        for length in lengths | {len(hashes) - _END} if num_new > 0 else {len(hashes)}:
            if length > new_at or num_new == 0:
                key = hashes[length - 1]
                slot = int(key >> np.uint64(64 - 17))
                self._keys[slot], self._numbers[slot] = key, number


@dataclass(slots=True)
class _WaitingPrompt:
    kind: int
    is_waiting: bool = True


class ReuseRateEstimator:
    """Returns and waiting times by class and age, the rates learnt from them, and their indices, where asked for.

    A class is a bin on each axis of `shape`, and of one more axis with `num_later` bins that is known only later
    (`specify`); until then the average over these bins is used. What waits is identified by the number of its prompt.
    """

    def __init__(self, shape: tuple[int, ...], *, num_later: int = 0, num_fading: int | None = None) -> None:
        """`num_fading`: how many of the later bins, the first, say nothing of ages at which little is known of them."""
        self._shape = (*shape, 1 + num_later)
        self._num_fading = 1 + (num_later if num_fading is None else num_fading)
        size = (int(np.prod(self._shape)), _STEPS)
        self._waiting_now = np.zeros(size)
        self._waited = np.zeros(size)
        self._returned = np.zeros(size)
        self._ring: list[_WaitingPrompt | None] = [None] * MEMORY
        self._now = 0
        self._hazards = _hazards_of_nothing(self._shape)
        self._known_for = MEMORY
        self._indices: dict[tuple[int, int, tuple[tuple[int, int], ...]], float] = {}

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
        if self._now % _REFRESH == 0 or (self._now < _REFRESH and self._now.bit_count() == 1):
            shape = (*self._shape, _STEPS)
            seen, time = self._returned.reshape(shape), self._waited.reshape(shape)
            self._hazards = _hazards(seen, time, num_fading=self._num_fading)
            self._known_for = self._now
            self._indices = {}

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
            one.kind = self._with_later(one.kind, later_bin)
            self._waiting_now[one.kind, step] += 1

    def later_bin(self, number: int | None) -> int | None:
        """The bin on the last axis of what has waited since prompt `number`, returned or not; None: not known."""
        one = self._ring[number % MEMORY] if number is not None and self._is_remembered(number) else None
        later = 0 if one is None else one.kind % self._shape[-1]
        return later - 1 if later > 0 else None

    def come_back(self, number: int) -> None:
        """Record the return of what has waited since prompt `number`."""
        one = self._ring[number % MEMORY] if self._is_remembered(number) else None
        if one is not None and one.is_waiting:
            step = _step_of(self._now - number)
            one.is_waiting = False
            self._waiting_now[one.kind, step] -= 1
            self._returned[one.kind, step] += 1

    def rate(
        self,
        number: int | None,
        *,
        since: int | None = None,
        later_bin: int | None = None,
        becomes: Sequence[tuple[float, int]] = (),
    ) -> float:
        """Expected uses per prompt of waiting, for what has waited since prompt `number`, or since a later one.

        `later_bin`: another bin on the last axis than it has. `becomes`: the bins that it will have there if it goes on
        waiting, in order, each with the number of prompts until then.
        """
        one = self._ring[number % MEMORY] if self._is_remembered(number) else None
        if one is None or number is None:
            return self._index(0, _STEPS - 1)
        kind = one.kind if later_bin is None else self._with_later(one.kind, later_bin)
        # It did not return with the newest prompt: the next one is the first with which it can.
        age = self._now + 1 - max(number, since or 0)
        step = _step_of(age)
        changes = tuple((bisect_left(_STARTS, age + ahead), later) for ahead, later in becomes)
        return self._index(kind, step, changes)

    def chance(self, number: int | None) -> float:
        """The probability that what has waited since prompt `number` is ever used, at an age that was seen so far."""
        one = self._ring[number % MEMORY] if self._is_remembered(number) else None
        kind, step = (0, _STEPS - 1) if one is None or number is None else (one.kind, _step_of(self._now + 1 - number))
        # What is still ahead. Of ages that nobody has reached nothing is known yet.
        ahead = self._hazards[kind, step:] * np.where(self._known_for > _AGES[step:], _WIDTHS[step:], 0)
        return float(-np.expm1(-ahead.sum()))

    def next_step_at(self, number: int | None, *, since: int | None = None) -> int:
        """The prompt at which what has waited since prompt `number`, or a later one, enters the next age step."""
        begun = max(number or 0, since or 0)
        step = _step_of(self._now + 1 - begun)
        return begun + _STARTS[step + 1] - 1 if step + 1 < _STEPS else self._now + MEMORY

    def _index(self, kind: int, step: int, changes: tuple[tuple[int, int], ...] = ()) -> float:
        """The index of this class from this step of age on; `changes`: steps, and bins on the last axis from there."""
        key = kind, step, changes
        if key not in self._indices:
            kinds = np.full(_STEPS, kind)
            for at, later_bin in changes:
                kinds[at:] = self._with_later(kind, later_bin)
            rates = self._hazards[kinds, np.arange(_STEPS)]
            self._indices[key] = gittins_index(rates[step:], _WIDTHS[step:])
        return self._indices[key]

    def _with_later(self, kind: int, later_bin: int) -> int:
        return kind - kind % self._shape[-1] + 1 + later_bin

    def _age(self, number: int, step: int) -> None:
        """Move what has waited since prompt `number` to this age step."""
        one = self._ring[number % MEMORY] if number > 0 else None
        if one is not None and one.is_waiting:
            self._waiting_now[one.kind, step - 1] -= 1
            self._waiting_now[one.kind, step] += 1

    def _is_remembered(self, number: int | None) -> TypeGuard[int]:
        return number is not None and self._now - number < MEMORY


def _hazards(seen: Floats, time: Floats, *, num_fading: int) -> Floats:
    """Expected uses per prompt of waiting, by class and age, shape ``(classes, steps)``.

    `seen`: returns in `time`, both of shape (…, steps). `num_fading`: see `_ratios`.
    """
    by_all = _rates(seen.sum(-2), time.sum(-2))[..., None, :]
    rates = _learned(seen, time, by_all * _ratios(seen, time, by_all, num_fading=num_fading))
    # Of whom less is known is judged by all, and not by those who never came to be known better.
    rates[..., :1, :] = by_all
    return rates.reshape(-1, _STEPS)


@functools.cache
def _hazards_of_nothing(shape: tuple[int, ...]) -> Floats:
    """Those of the prior."""
    return _hazards(np.zeros((*shape, _STEPS)), np.zeros((*shape, _STEPS)), num_fading=shape[-1])


def _step_of(age: int) -> int:
    return max(0, bisect_right(_STARTS, age) - 1)


def _rates(seen: Floats, time: Floats) -> Floats:
    """Rates of return by class and age (the last axis), shrunk towards the product of the marginals."""
    axes = tuple(range(seen.ndim - 1))
    prior = PRIOR_RATE / (_AGES + _WIDTHS / 2)
    overall = (seen.sum(axes) + 1) / (time.sum(axes) + 1 / prior)
    expected = np.broadcast_to(overall, seen.shape)
    for axis in axes:
        others = tuple(a for a in axes if a != axis)
        marginal = _learned(seen.sum(others, keepdims=True), time.sum(others, keepdims=True), overall)
        expected = expected * (marginal / overall)
    return _learned(seen, time, expected)


def _ratios(seen: Floats, time: Floats, expected: Floats, *, num_fading: int) -> Floats:
    """By which factor each bin of the second to last axis returns more often than expected, by age, over all others.

    At an age at which little is known of a bin, its factor is that of all its ages; for the first `num_fading` it is 1.
    """
    others = tuple(range(seen.ndim - 2))
    seen, overall = seen.sum(others, keepdims=True), (time * expected).sum(others, keepdims=True)
    in_all = np.repeat((seen.sum(-1, keepdims=True) + 1) / (overall.sum(-1, keepdims=True) + 1), _STEPS, axis=-1)
    in_all[..., :num_fading, :] = 1
    return _learned(seen, overall, in_all)


def _learned(seen: Floats, time: Floats, expected: Floats) -> Floats:
    """The expected rates corrected by the observations; the expectation weighs as much as one return.

    A Gamma prior of mean 1 on the ratio of the true rate to the expected one, which changes slowly with age.
    """
    return expected * (_nearby(seen) + 1) / (_nearby(time * expected) + 1)


def _nearby(counts: Floats) -> Floats:
    """Counts smoothed over age, the last axis; zero beyond the ends."""
    before, at, behind = _NEAR
    smooth = at * counts
    smooth[..., 1:] += before * counts[..., :-1]
    smooth[..., :-1] += behind * counts[..., 1:]
    return smooth


def gittins_index(rates: Floats, widths: Floats) -> float:
    """The Gittins index at the start of the first step: max over T of P(used before T) / E[time until used or T].

    `rates`: uses per unit of time, each constant within a step; `widths`: the steps' lengths. Shapes ``(steps,)``.
    """
    hazard = rates * widths
    survival = np.exp(-np.cumsum(hazard))
    # Time spent in a step by those that enter it: the integral of exp(-rate · t).
    spent = np.append(1.0, survival[:-1]) * -np.expm1(-hazard) / rates
    return float(max(rates[0], ((1 - survival) / np.cumsum(spent)).max()))
