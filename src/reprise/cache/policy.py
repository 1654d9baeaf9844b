"""Eviction policies: what is known about an item in, a score out; the item with the lowest score is evicted first.

A policy does not see the tree. It learns from the prompts and their times alone, without I/O, clock or randomness, so
the same prompts at the same times give the same order.
"""

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isnan
from typing import Protocol

import numpy as np

from reprise.cache.reuse_rate import MEMORY, PRIOR_RATE, ConversationHistory, ReuseRateEstimator
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens

SHARED_KINDS = frozenset({BoundaryKind.SYSTEM, BoundaryKind.EXPLICIT})
"""Kinds of checkpoints that several chats may share."""

_ENOUGH = 256
"""Until this many prompts were seen, every chat is expected to continue."""

_DOUBT = 64
"""About this many prompts have to be seen before a new item is refused for what is believed of an older one."""

_TURNS = (1, 2, 4, 8)
_PAUSES = (16, 64, 256, 1024)
_NEW_TOKENS = (512, 4096, 32768)
_ANSWERED = (16, 64, 256, 1024)
"""Bin edges of the classes within which chats are expected to behave alike."""

_SILENT_S = (2.0, 10.0, 30.0, 120.0, 600.0)
"""More such edges, where it is known how the answer ended: the seconds since.

A tool that runs is back soon, a person who thinks later, and one who has left never.
"""

_GAPS = 32
"""So many gaps between the last prompts tell how many there will be until a chat has been silent for longer.

One in which everybody was away counts as the longest edge of silence.
"""

_END_KNOWN = len(_ANSWERED) + 1
"""The first class of answers of which it is known whether they end with a tool call; those before are by length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionCandidate:
    """What is known about one item that could be evicted.

    `cost`: the tokens to recompute for a request at its position if it were gone. `nbytes`: what evicting it frees.
    `last_use`, `now`: the cache's clock. `num_uses`: requests that resumed here. `num_branches`: paths that continue
    from here. `last_visit`, `first_visit`: the numbers of the last and first prompt on its path (None: not known).
    `num_passes`: requests whose path leads through it. `is_tail`: it lies past the stable boundary of its path.
    `is_passed`: the chat that was here last goes on from further on. `has_ended`: only a chat that will not go on
    brought it here. `alive_at`: the number of the last prompt sent on behalf of its chat, which waits for it.
    """

    kind: BoundaryKind
    cost: int
    nbytes: int
    last_use: int
    now: int
    num_uses: int = 0
    num_branches: int = 0
    is_superseded: bool = False
    is_auxiliary: bool = False
    last_visit: int | None = None
    first_visit: int | None = None
    num_passes: int = 0
    is_tail: bool = False
    is_passed: bool = False
    has_ended: bool = False
    alive_at: int | None = None


class Policy(Protocol):
    """An eviction order. Prompts are numbered from 1."""

    def arrive(self, tokens: Tokens, *, known: int, namespace: str) -> tuple[int, int | None]:
        """Record a request with this prompt, of which ``[0, known)`` is stored.

        Returns the prompt's number, and the number of the prompt that it continues, if any.
        """
        ...

    def number_of(self, tokens: Tokens, *, namespace: str) -> int | None:
        """The number of the prompt that these tokens continue, or None."""
        ...

    def answered(
        self, number: int, num_tokens: float, *, calls_tool: bool | None = None, at_s: float | None = None
    ) -> None:
        """Record that prompt `number` got an answer of `num_tokens`; `calls_tool`: whether it ends with a tool call.

        An answer that does comes back by itself, another when a person writes. None: not known. `at_s`: the time.
        """
        ...

    def fall_silent(self, now_s: float) -> Collection[int]:
        """Record when the newest prompt arrived. Returns those whose answers are so old by now that they score anew."""
        ...

    def expect(
        self, tokens: Tokens, *, known: int, number: int, namespace: str, calls_tool: bool | None = None
    ) -> None:
        """Record that the next turn of prompt `number` will begin with `tokens`, of which ``[0, known)`` is stored.

        `calls_tool`: whether the answer to that prompt ends with a tool call (None: not known).
        """
        ...

    def leave_tail(self, tokens: Tokens, stable_at: int, *, number: int | None, namespace: str) -> None:
        """Record that prompt `number` and its answer are stored as `tokens`, stable up to `stable_at`."""
        ...

    def score(self, candidate: EvictionCandidate) -> float: ...

    def returns(self, number: int | None) -> float:
        """The probability that prompt `number` is ever continued."""
        ...

    def admits(self, new: EvictionCandidate, than: EvictionCandidate, *, is_exact: bool) -> bool:
        """Whether a new item may replace another; `is_exact`: no more than is needed is lost of it."""
        ...

    def review_at(self, candidate: EvictionCandidate) -> int | None:
        """The number of the prompt at which this item's score will have changed with time, or None."""
        ...

    def evicted(self, candidate: EvictionCandidate, score: float) -> None:
        """Record that an item with this score was evicted."""
        ...


class ExpectedSaving:
    """The default: the tokens that a byte is expected to save per prompt of waiting.

    Score = tokens saved per use × expected uses per prompt of waiting ÷ bytes. The rate at which chats return is
    learned from all chats, evicted ones included (`reprise.cache.reuse_rate`), as is the rate at which new paths branch
    off shared ones. Chats are told apart by how their last answers ended (with a tool call or not; where that is not
    known, by the answer's length and the number of turns: a one-word answer usually ends a task), by their last pause
    and prompt, and by the seconds of silence since. What a chat has passed, such as its system prompt, is used by
    others alone: as often as so far. How often the next turn repeats what lies past the stable boundary is learned for
    all chats together. When a chat continues elsewhere or has ended, what it left has a score below -1 and is evicted
    first, the least useful first; then what auxiliary requests brought, so that these never displace a chat. New
    entries that are expected to save less than anything stored are not stored, so one-off prompts do not displace
    chats, once about a hundred prompts were seen.
    """

    def __init__(self, *, unit_tokens: int = 1) -> None:
        """`unit_tokens`: how many real tokens each token of the prompts represents (replayed block hashes)."""
        self._unit_tokens = unit_tokens
        self._history = ConversationHistory()
        self._turns = ReuseRateEstimator(
            (len(_TURNS) + 3, len(_PAUSES) + 2, len(_NEW_TOKENS) + 1),
            num_later=_place_of_end(True, len(_SILENT_S)) + 1,
            num_fading=_END_KNOWN,
        )
        self._waiting: tuple[list[tuple[float, int]], ...] = tuple([] for _ in _SILENT_S)
        """Heaps of (answered at, number): prompts that have not been silent for as long as each edge."""
        self._answered_s = np.full(MEMORY, np.nan)
        """When the last prompts were answered, by number."""
        self._arrived_s: deque[float] = deque(maxlen=_GAPS + 1)
        """When they came."""
        self._pace = inf
        """How many of them come per second."""
        self._branches = ReuseRateEstimator((len(_TURNS) + 1,))
        # A prior of one each.
        self._tails_met, self._tails_missed = 1, 1

    def arrive(self, tokens: Tokens, *, known: int, namespace: str) -> tuple[int, int | None]:
        visit = self._history.arrive(tokens, known=known, namespace=namespace)
        calls_tool = _calls_tool(self._turns.later_bin(visit.continues))
        self._turns.advance()
        self._branches.advance()
        if visit.continues is not None:
            if visit.last_other is None:
                self._turns.come_back(visit.continues)
                if visit.has_tail is not None:
                    self._tails_met += visit.has_tail
                    self._tails_missed += not visit.has_tail
            else:
                self._branches.come_back(visit.last_other)
            self._branches.wait(_place(_TURNS, visit.num_others))
        self._turns.wait(
            _place(_TURNS, visit.turn) if calls_tool is None else len(_TURNS) + 1 + calls_tool,
            0 if visit.gap is None else 1 + _place(_PAUSES, visit.gap),
            _place(_NEW_TOKENS, visit.num_new * self._unit_tokens),
        )
        return visit.number, visit.continues

    def number_of(self, tokens: Tokens, *, namespace: str) -> int | None:
        return self._history.number_of(tokens, namespace=namespace)

    def answered(
        self, number: int, num_tokens: float, *, calls_tool: bool | None = None, at_s: float | None = None
    ) -> None:
        place = _place(_ANSWERED, num_tokens * self._unit_tokens)
        self._turns.specify(number, place if calls_tool is None else _place_of_end(calls_tool))
        self._answered_s[number % MEMORY] = np.nan if at_s is None else at_s
        if at_s is not None:
            heapq.heappush(self._waiting[0], (at_s, number))
            if len(self._waiting[0]) > MEMORY:
                heapq.heappop(self._waiting[0])

    def fall_silent(self, now_s: float) -> Collection[int]:
        self._arrived_s.append(now_s)
        gaps_s = [min(later - earlier, _SILENT_S[-1]) for earlier, later in pairwise(self._arrived_s)]
        self._pace = len(gaps_s) / sum(gaps_s) if sum(gaps_s) > 0 else inf
        fallen: set[int] = set()
        for at, (length_s, waiting) in enumerate(zip(_SILENT_S, self._waiting, strict=True), start=1):
            while waiting and now_s - waiting[0][0] >= length_s:
                since_s, number = heapq.heappop(waiting)
                if self._history.is_continued(number):
                    continue
                if at < len(_SILENT_S):
                    heapq.heappush(self._waiting[at], (since_s, number))
                calls_tool = _calls_tool(self._turns.later_bin(number))
                if calls_tool is not None:
                    self._turns.specify(number, _place_of_end(calls_tool, at))
                    fallen.add(number)
        return fallen

    def expect(
        self, tokens: Tokens, *, known: int, number: int, namespace: str, calls_tool: bool | None = None
    ) -> None:
        self._history.expect(tokens, known=known, number=number, namespace=namespace)
        if calls_tool is not None and _calls_tool(self._turns.later_bin(number)) is not calls_tool:
            self._turns.specify(number, _place_of_end(calls_tool))

    def leave_tail(self, tokens: Tokens, stable_at: int, *, number: int | None, namespace: str) -> None:
        self._history.leave_tail(tokens, stable_at, number=number, namespace=namespace)

    def score(self, candidate: EvictionCandidate) -> float:
        if candidate.nbytes == 0:
            return 0.0
        saved = candidate.cost / candidate.nbytes
        if candidate.is_passed:
            rate = (candidate.num_uses + PRIOR_RATE) / max(1, self._history.now - (candidate.first_visit or 0))
        else:
            rate = self._rate_of_chat(candidate)
        branched_at = self._history.last_continuation(candidate.first_visit)
        if branched_at is not None:
            rate += self._branches.rate(branched_at)
        if candidate.num_branches > 1:
            rate = max(rate, self._rate_of_passes(candidate))
        if candidate.is_tail:
            rate *= self._tails_met / (self._tails_met + self._tails_missed)
        score = saved * rate
        if self._is_left_behind(candidate):
            return -1.0 - 1.0 / (1.0 + score)
        return -1.0 / (1.0 + score) if candidate.is_auxiliary else score

    def returns(self, number: int | None) -> float:
        return self._turns.chance(number) if self._history.now >= _ENOUGH else 1.0

    def admits(self, new: EvictionCandidate, than: EvictionCandidate, *, is_exact: bool) -> bool:
        """A new item saves at least as much per byte, and also in total where more would be lost than it needs.

        So a short turn does not displace a long chat, whose snapshot is all that makes the path to it reusable. As long
        as little is known, what is new comes in, as with LRU: whose chat runs may go on, and of the older ones nobody
        knows yet whether they have ended.
        """
        score, other = self.score(new), self.score(than)
        if score > 0:
            score *= 1 + (_DOUBT / max(1, self._history.now)) ** 2
        return score >= other and (is_exact or other <= 0 or score * new.nbytes >= other * than.nbytes)

    def review_at(self, candidate: EvictionCandidate) -> int | None:
        return self._turns.next_step_at(candidate.last_visit, since=candidate.alive_at)

    def evicted(self, candidate: EvictionCandidate, score: float) -> None:
        pass

    def _rate_of_chat(self, candidate: EvictionCandidate) -> float:
        """How often the chat that passed an item last comes back, per prompt."""
        number, alive_at = candidate.last_visit, candidate.alive_at
        place = self._turns.later_bin(number)
        calls_tool = _calls_tool(place)
        if number is None or place is None or calls_tool is None or not self._arrived_s:
            return self._turns.rate(number, since=alive_at)
        now_s = self._arrived_s[-1]
        silence, silent_s = (place - _END_KNOWN) // 2, now_s - self._answered_s.item(number % MEMORY)
        if alive_at is not None:
            # Who waits for others is not silent.
            silence, silent_s = 0, 0.0
        becomes: list[tuple[float, int]] = []
        if not isnan(silent_s):
            for longer, edge_s in enumerate(_SILENT_S[silence:], start=silence + 1):
                becomes.append((self._pace * max(0.0, edge_s - silent_s), _place_of_end(calls_tool, longer)))
        place = _place_of_end(calls_tool, silence)
        return self._turns.rate(number, since=alive_at, later_bin=place, becomes=becomes)

    def _is_left_behind(self, candidate: EvictionCandidate) -> bool:
        """Whether its chat has ended or continued elsewhere. What two requests resumed from is shared, so it is not."""
        if candidate.has_ended and candidate.num_branches <= 1:
            return True
        if candidate.num_branches > 1 or candidate.num_uses > 1:
            return False
        return candidate.is_superseded or (
            candidate.kind not in SHARED_KINDS and self._history.is_continued(candidate.last_visit)
        )

    def _rate_of_passes(self, candidate: EvictionCandidate) -> float:
        """Requests on this path, per prompt: any of them resumes here if what it had further on is evicted.

        When none has come for longer than usual, the rate falls with the time since the last.
        """
        # Unknown prompts count as the oldest.
        first, last = (0 if number is None else number for number in (candidate.first_visit, candidate.last_visit))
        rate = candidate.num_passes / max(1, self._history.now - first)
        silence = max(1, self._history.now - last)
        return min(rate, 1 / silence)


def _place_of_end(calls_tool: bool, silence: int = 0) -> int:
    """The class of an answer of which it is known whether it ends with a tool call, and of the silence behind it."""
    return _END_KNOWN + 2 * silence + calls_tool


def _calls_tool(place: int | None) -> bool | None:
    """Whether an answer of this class ends with a tool call."""
    return None if place is None or place < _END_KNOWN else (place - _END_KNOWN) % 2 == 1


def _place(edges: tuple[int, ...], value: float) -> int:
    return bisect_right(edges, value)
