"""Which item of the cache is worth least. Facts in, a number out; the lowest number goes first.

A policy knows nothing of the tree. It is told of every prompt (`arrive`), and learns from that alone: nothing here
does I/O, reads a clock or draws a random number, so the same prompts give the same order.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

from reprise.cache.conversation_history import ConversationHistory
from reprise.cache.reuse_rate import ReuseRateEstimator
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens

_SHARED = frozenset({BoundaryKind.SYSTEM, BoundaryKind.EXPLICIT})
"""Kinds that do not belong to one chat's newest turn."""

_TURNS = (1, 2, 4, 8)
_PAUSES = (16, 64, 256, 1024)
_NEW_TOKENS = (512, 4096, 32768)
_ANSWERED = (16, 64, 256, 1024)
"""Edges of the classes in which chats are thought alike, in powers of two, four and eight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of one item that could be evicted.

    `cost`: the tokens to compute again if it were gone and its position were asked for. `nbytes`: what evicting it
    gives back. `last_use`, `now`: the cache's clock. `num_uses`: how often a request resumed here. `num_branches`: the
    paths that go on from here. `last_visit`: the number of the prompt that came by last; `first_visit`: that of the
    first (None: not known). `num_passes`: how many requests came by. `is_tail`: it lies behind the stable boundary of
    its path.
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


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a policy knows a prompt: its number, and the number of the one that it goes on from, if there is one."""

    number: int
    continues: int | None = None


class Policy(Protocol):
    """An order of eviction. The numbers of prompts begin at 1."""

    def arrive(self, tokens: Tokens, *, known: int, namespace: str) -> Arrival:
        """A request came with this prompt, of which ``[0, known)`` is stored."""
        ...

    def number_of(self, tokens: Tokens, *, namespace: str) -> int | None:
        """The number of the prompt that these tokens belong to, None if it is not known."""
        ...

    def answered(self, number: int, num_tokens: float) -> None:
        """Prompt `number` has its answer, of so many tokens."""
        ...

    def leave_tail(self, tokens: Tokens, stable_at: int, *, number: int | None, namespace: str) -> None:
        """Prompt `number` and its answer are stored as far as `tokens`; from `stable_at` on a next turn may differ."""
        ...

    def worth(self, facts: Facts) -> float: ...

    def admits(self, new: Facts, than: float) -> bool:
        """Whether something new may take the place of an item of worth `than`."""
        ...

    def review_at(self, facts: Facts) -> int | None:
        """The number of the prompt at which this item's worth will have changed by itself, None if it never does."""
        ...

    def evicted(self, facts: Facts, worth: float) -> None:
        """An item of this worth was evicted."""
        ...


class ExpectedSaving:
    """What a byte is expected to save for each prompt that it waits: the default.

    Worth = tokens saved by a use × uses expected per prompt of waiting ÷ bytes. How soon a chat comes back is
    learned from the chats themselves, also from those that were evicted (`reprise.cache.reuse_rate`), and so is how
    often another path leaves from what is shared. Once a prompt has its answer, its length tells more: a word is
    the answer to a task that is done. How often next turns have what stands behind the stable boundary of the last
    one is learned for all of them together. A chat that has gone on elsewhere leaves ends behind that nobody waits
    for: these have negative worth and go before anything else, the least useful first. New entries that are
    expected to save less than everything stored are not stored, so that prompts which come once do not wash out
    chats.
    """

    def __init__(self, *, unit_tokens: int = 1) -> None:
        """`unit_tokens`: how many real tokens one token of the prompts stands for (replayed block hashes)."""
        self._unit_tokens = unit_tokens
        self._history = ConversationHistory()
        self._turns = ReuseRateEstimator(
            (len(_TURNS) + 1, len(_PAUSES) + 2, len(_NEW_TOKENS) + 1), num_later=len(_ANSWERED) + 1
        )
        self._branches = ReuseRateEstimator((len(_TURNS) + 1,))
        # One of each before any was seen.
        self._tails_met, self._tails_missed = 1, 1

    def arrive(self, tokens: Tokens, *, known: int, namespace: str) -> Arrival:
        visit = self._history.arrive(tokens, known=known, namespace=namespace)
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
            _place(_TURNS, visit.turn),
            0 if visit.gap is None else 1 + _place(_PAUSES, visit.gap),
            _place(_NEW_TOKENS, visit.num_new * self._unit_tokens),
        )
        return Arrival(visit.number, visit.continues)

    def number_of(self, tokens: Tokens, *, namespace: str) -> int | None:
        return self._history.number_of(tokens, namespace=namespace)

    def answered(self, number: int, num_tokens: float) -> None:
        self._turns.specify(number, _place(_ANSWERED, num_tokens * self._unit_tokens))

    def leave_tail(self, tokens: Tokens, stable_at: int, *, number: int | None, namespace: str) -> None:
        self._history.leave_tail(tokens, stable_at, number=number, namespace=namespace)

    def worth(self, facts: Facts) -> float:
        if facts.nbytes == 0:
            return 0.0
        saved = facts.cost / facts.nbytes
        rate = self._turns.worth(facts.last_visit)
        branched_at = self._history.last_continuation(facts.first_visit)
        if branched_at is not None:
            rate += self._branches.worth(branched_at)
        if facts.num_branches > 1:
            rate = max(rate, self._rate_of_passes(facts))
        if facts.is_auxiliary:
            rate *= 0.1
        if facts.is_tail:
            rate *= self._tails_met / (self._tails_met + self._tails_missed)
        worth = saved * rate
        return worth if not self._is_left_behind(facts) else -1.0 / (1.0 + worth)

    def admits(self, new: Facts, than: float) -> bool:
        return self.worth(new) >= than

    def review_at(self, facts: Facts) -> int | None:
        return self._turns.next_step_at(facts.last_visit)

    def evicted(self, facts: Facts, worth: float) -> None:
        pass

    def _is_left_behind(self, facts: Facts) -> bool:
        """Whether the chat has gone on from elsewhere. What two requests have resumed from is not one chat's alone."""
        if facts.num_branches > 1 or facts.num_uses > 1:
            return False
        return facts.is_superseded or (facts.kind not in _SHARED and self._history.is_continued(facts.last_visit))

    def _rate_of_passes(self, facts: Facts) -> float:
        """Requests that come by, per prompt: any of them falls back on this place if what it had further on is gone.

        Once none has come for longer than usual, the rate falls as the silence lasts.
        """
        # Of prompts that are not known, the first came before all others.
        first, last = (0 if number is None else number for number in (facts.first_visit, facts.last_visit))
        rate = facts.num_passes / max(1, self._history.now - first)
        silence = max(1, self._history.now - last)
        return min(rate, 1 / silence)


def _place(edges: tuple[int, ...], value: float) -> int:
    return bisect_right(edges, value)
