"""The owner of the memory budget: the accounts, and the order in which memory is reclaimed.

Bytes are counted only here. Clients `reserve` before they allocate, `charge` what they allocate and free, and
`transfer` between accounts.

Each model has a `Memory`. Those of several models are parts of one `SharedMemory`, which also counts the weights, so
that a request of one model can evict prefixes of another.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from itertools import zip_longest
from typing import Protocol

from reprise.core.failpoints import Failpoint, reach
from reprise.core.pass_price import beyond


class Account(StrEnum):
    """What bytes are held for."""

    KV = "kv"
    """Entries in the prefix cache, including those in a sequence's buffers that the tree refers to."""
    SNAPSHOTS = "snapshots"
    """Snapshots in the prefix cache."""
    LOGITS = "logits"
    """Logits after the last tokens of prompts, stored in the prefix cache for exact repeats."""
    SEQUENCES = "sequences"
    """Buffers of running and idle sequences including spare capacity, without what counts as KV."""
    INCOMING = "incoming"
    """Read from disk and not yet committed."""
    PASSES = "passes"
    """What a pass or a tower takes at its peak, while it runs, beyond what is kept for passes beside the budget."""
    IMAGES = "images"
    """What the tower made of images."""
    EMBEDDINGS = "embeddings"
    """Vectors of earlier inputs, kept for exact repeats."""


Reclaimer = Callable[[], bool]
"""Frees one thing. False if it has nothing left to free."""


class Evictable(Protocol):
    """A prefix cache, from which other models' requests may evict. A protocol: `cache` imports this module."""

    def least_score(self) -> float | None:
        """The score of what `evict_one` would evict, in expected tokens saved per byte and prompt of this cache.

        None if nothing may be evicted.
        """
        ...

    def evict_one(self) -> bool: ...
    def protected_nbytes(self) -> int:
        """A lower bound of the bytes that cannot be evicted."""
        ...


_RECENT = 64
"""Each model's share of the requests is averaged over about this many."""


class SharedMemory:
    """One budget in bytes for weights and layer states of several models; None: unlimited. Used by one thread."""

    def __init__(self, budget: int | None = None, *, max_state_nbytes: int | None = None) -> None:
        """`max_state_nbytes`: limit for the layer states alone, within the budget; None: no such limit."""
        self.budget = self._most = budget
        self.max_state_nbytes = max_state_nbytes
        self._weights: Mapping[str, int] = {}
        self.weights_nbytes = 0
        """Bytes of all weights that are charged."""
        self.parts: list[Memory] = []
        self.unload_one: Callable[[], bool] = lambda: False
        """Unloads one model that is not in use. False if there is none."""

    @property
    def state_nbytes(self) -> int:
        """Bytes of the layer states of all models."""
        return sum(part.held for part in self.parts)

    @property
    def weights(self) -> Mapping[str, int]:
        """Bytes of the weights that are charged, by model name."""
        return self._weights

    def charge_weights(self, nbytes: Mapping[str, int]) -> None:
        """Charge the weights that are loaded or being loaded, by model name, in place of those charged before."""
        assert all(each >= 0 for each in nbytes.values()), nbytes
        self._weights = dict(nbytes)
        self.weights_nbytes = sum(nbytes.values())

    @property
    def state_budget(self) -> int | None:
        """The most bytes of layer states besides the loaded weights; None: unlimited."""
        beside = None if self.budget is None else self.budget - self.weights_nbytes
        return min((bound for bound in (beside, self.max_state_nbytes) if bound is not None), default=None)

    @property
    def available(self) -> int | None:
        """Bytes left for layer states (negative when over the budget); None: unlimited."""
        budget = self.state_budget
        return None if budget is None else budget - self.state_nbytes

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more fit without reclaiming anything."""
        if reach(Failpoint.FITS, nbytes) is False:
            return False
        available = self.available
        return available is None or available >= nbytes

    def reserve(self, nbytes: int) -> bool:
        """Reclaim until `nbytes` more fit. False if they do not: then everything reclaimable was freed."""
        while not self.fits(nbytes):
            if not self._reclaim():
                return False
        return True

    def resize(self, state_budget: int | None) -> None:
        """Set the budget to `state_budget` plus the loaded weights, and reclaim what exceeds it."""
        beside = None if state_budget is None else state_budget + self.weights_nbytes
        # Never more than the initial budget, even if it was measured before the last model was loaded.
        if beside is not None and self._most is not None and len(self.weights) > 0:
            beside = min(beside, self._most)
        self.budget = beside
        self.reserve(0)

    def note_request(self, of: Memory) -> None:
        """Count a request for this part's model."""
        for part in self.parts:
            part.share_of_requests *= 1 - 1 / _RECENT
        of.share_of_requests += 1 / _RECENT

    def _reclaim(self) -> bool:
        """Free one thing: of the first kind from all parts, then of the next kind, weights last."""
        ordered = self.parts if len(self.parts) == 1 else sorted(self.parts, key=Memory.least_score)
        levels = zip_longest(*(part.reclaimers for part in ordered))
        reclaimers = [reclaim for level in levels for reclaim in level if reclaim is not None]
        return any(reclaim() for reclaim in reclaimers) or self.unload_one()


class Memory:
    """Bytes of one model's layer states, by account, within a budget; None: unlimited. Used by one thread."""

    def __init__(self, budget: int | None = None, *, shared: SharedMemory | None = None) -> None:
        """`shared`: the budget that this part shares with others; None: `budget` is for this part alone."""
        self.shared = SharedMemory(budget) if shared is None else shared
        self.shared.parts.append(self)
        self._accounts = dict.fromkeys(Account, 0)
        self._most_measured = dict.fromkeys(Account, 0)
        self.reclaimers: tuple[Reclaimer, ...] = ()
        self.share_of_requests = 1 / _RECENT
        self.kept_for_passes: int | None = None
        """Bytes beside the budget; None: unlimited."""
        self.disconnect()

    @property
    def budget(self) -> int | None:
        """The most bytes of all accounts of all models; None: unlimited."""
        return self.shared.state_budget

    @property
    def held(self) -> int:
        """Bytes of all accounts."""
        return sum(self._accounts.values())

    @property
    def available(self) -> int | None:
        """Bytes left in the budget (negative when over it); None: unlimited."""
        return self.shared.available

    def nbytes(self, account: Account) -> int:
        """The bytes of one account."""
        return self._accounts[account]

    def most_nbytes(self, account: Account) -> int:
        """The most bytes that were ever measured for this account."""
        return self._most_measured[account]

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more fit without reclaiming anything."""
        return self.shared.fits(nbytes)

    # Other models.

    @property
    def _others(self) -> list[Memory]:
        return [part for part in self.shared.parts if part is not self]

    @property
    def kept_nbytes(self) -> int:
        """Bytes that cannot be evicted: sequences, what was read and not committed, leased paths."""
        protected = 0 if self.cache is None else self.cache.protected_nbytes()
        return self._accounts[Account.SEQUENCES] + self._accounts[Account.INCOMING] + protected

    @property
    def kept_by_others(self) -> int:
        """`kept_nbytes` of the other models."""
        return sum(part.kept_nbytes for part in self._others)

    @property
    def evictable_from_others(self) -> int:
        """Bytes that can be evicted from the other models."""
        return sum(part.held - part.kept_nbytes for part in self._others)

    def least_score(self) -> float:
        """The expected saving of what would be evicted next, in seconds per byte and request of any model."""
        score = None if self.cache is None else self.cache.least_score()
        return float("inf") if score is None else self._saving_s(score)

    def _saving_s(self, score: float) -> float:
        return score * self.token_s() * self.share_of_requests

    def evict_from_others(self, score: float | None) -> bool:
        """Evict one item of another model that is worth no more than anything here and than `score`.

        `score`: in the units of this cache; None: no limit. False if there is no such item.
        """
        others = self._others
        if not others:
            return False
        most = min(self.least_score(), float("inf") if score is None else self._saving_s(score))
        for part in sorted(others, key=Memory.least_score):
            if part.cache is not None and part.least_score() <= most and part.cache.evict_one():
                return True
        return False

    # Changes.

    def charge(self, account: Account, nbytes: int) -> None:
        """Add `nbytes`, which may be negative, to an account."""
        self._accounts[account] += nbytes
        assert self._accounts[account] >= 0, (account, self._accounts)

    def transfer(self, source: Account, target: Account, nbytes: int) -> None:
        """Move `nbytes` from `source` to `target`; in the other direction if negative."""
        # `source` may be negative until its client measures it again: buffers grow before they are measured.
        self._accounts[source] -= nbytes
        self._accounts[target] += nbytes

    def measure(self, account: Account, nbytes: int) -> None:
        """Set an account to the bytes that its client has measured."""
        assert nbytes >= 0, (account, nbytes)
        self._accounts[account] = nbytes
        self._most_measured[account] = max(self._most_measured[account], nbytes)

    def resize(self, budget: int | None) -> None:
        """Set the budget for layer states besides the loaded weights, and reclaim what exceeds it."""
        self.shared.resize(budget)

    def of_pass(self, nbytes: int) -> int:
        """What a pass that takes `nbytes` at its peak takes of the budget."""
        return beyond(self.kept_for_passes, nbytes)

    @contextmanager
    def charged_for_pass(self, nbytes: int) -> Generator[None]:
        """Charge what a pass takes of the budget, while it runs."""
        charged = self.of_pass(nbytes)
        self.charge(Account.PASSES, charged)
        try:
            yield
        finally:
            self.charge(Account.PASSES, -charged)

    # Reclaiming.

    def reclaim_from(self, *reclaimers: Reclaimer) -> None:
        """Set what `reserve` frees, in this order, starting over after each success."""
        self.reclaimers = reclaimers

    def reserve(self, nbytes: int) -> bool:
        """Reclaim until `nbytes` more fit. False if they do not: then everything reclaimable was freed."""
        return self.shared.reserve(nbytes)

    def evict_from(self, cache: Evictable, *, token_s: Callable[[], float]) -> None:
        """Let other models' requests evict from this cache. `token_s`: seconds to compute a token, saved by a hit."""
        self.cache, self.token_s = cache, token_s

    def disconnect(self) -> None:
        """Drop the reclaimers and the cache."""
        self.reclaimers = ()
        self.cache: Evictable | None = None
        self.token_s: Callable[[], float] = lambda: 1.0

    def leave(self) -> None:
        """Remove this part from the shared budget, after its model has freed everything."""
        assert self.held == 0, self._accounts
        self.shared.parts.remove(self)

    def check(self, counted: Mapping[Account, int]) -> None:
        """AssertionError unless these accounts equal what their clients counted. O(accounts)."""
        for account, nbytes in counted.items():
            assert self._accounts[account] == nbytes, (account, self._accounts[account], nbytes)
