"""The one owner of the memory budget: who holds how many bytes, and who gives some up when there is too little.

Bytes are counted here and nowhere else. Clients say what they take and give back (`charge`), what changes hands
(`transfer`), and ask for room before they take it (`reserve`).

Each model has a `Memory`. Those of several models are parts of one `SharedMemory`, which has the weights as well, so
that one model's request can have what another model's prefixes hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import zip_longest
from typing import Protocol


class Account(StrEnum):
    """What bytes are held for."""

    KV = "kv"
    """Entries that the prefix cache holds. What stands in a sequence's buffers and the tree refers to counts here."""
    SNAPSHOTS = "snapshots"
    """Snapshots that the prefix cache holds."""
    LOGITS = "logits"
    """Logits behind the last tokens of prompts, which the prefix cache holds for exact repeats."""
    SEQUENCES = "sequences"
    """Buffers of running and idle sequences, room to grow included, less what counts as KV."""
    INCOMING = "incoming"
    """Read from disk, and not in the tree yet."""


Reclaimer = Callable[[], bool]
"""Gives up one thing. False if it has nothing more to give."""


class Evictable(Protocol):
    """A prefix cache, as far as others want to have its room."""

    def least_worth(self) -> float | None:
        """What `evict_one` would take is worth: tokens saved for each prompt of this cache, per byte. None: nothing."""
        ...

    def evict_one(self) -> bool: ...
    def protected_nbytes(self) -> int:
        """What stays whatever is evicted."""
        ...


_RECENT = 64
"""How often each model is asked is known from about so many requests."""


class SharedMemory:
    """One budget for weights and layer states of several models; `budget` None is no bound. Used by one thread."""

    def __init__(self, budget: int | None = None, *, most_state: int | None = None) -> None:
        """`most_state`: for the layer states alone, within the budget. None: no such bound."""
        self.budget = self._most = budget
        self.most_state = most_state
        self.weights: dict[str, int] = {}
        """The bytes of each model whose weights are here or are being loaded, by its name."""
        self.parts: list[Memory] = []
        self.unload_one: Callable[[], bool] = lambda: False
        """Gives up the weights of one model that nobody uses. False if there is none."""

    @property
    def state_nbytes(self) -> int:
        """Layer states of all models."""
        return sum(part.held for part in self.parts)

    @property
    def weights_nbytes(self) -> int:
        return sum(self.weights.values())

    @property
    def state_budget(self) -> int | None:
        """The most bytes of layer states beside the weights that are here; None: no bound."""
        beside = None if self.budget is None else self.budget - self.weights_nbytes
        return min((bound for bound in (beside, self.most_state) if bound is not None), default=None)

    @property
    def available(self) -> int | None:
        """Bytes left for layer states (negative when over the budget), None without one."""
        budget = self.state_budget
        return None if budget is None else budget - self.state_nbytes

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more fit as it is."""
        available = self.available
        return available is None or available >= nbytes

    def reserve(self, nbytes: int) -> bool:
        """Make `nbytes` more fit the budget. False if that cannot be: then everything was given up that could be."""
        while not self.fits(nbytes):
            if not self._reclaim():
                return False
        return True

    def resize(self, state_budget: int | None) -> None:
        """Change the budget to so many bytes beside the weights that are here, and reclaim what it no longer covers."""
        beside = None if state_budget is None else state_budget + self.weights_nbytes
        # What was measured before the last model was loaded is not more than there was at first.
        if beside is not None and self._most is not None and len(self.weights) > 0:
            beside = min(beside, self._most)
        self.budget = beside
        self.reserve(0)

    def note_request(self, of: Memory) -> None:
        """A request came for this part's model."""
        for part in self.parts:
            part.share_of_requests *= 1 - 1 / _RECENT
        of.share_of_requests += 1 / _RECENT

    def _reclaim(self) -> bool:
        """Have one thing given up: each kind of all parts before the next kind, and weights last."""
        ordered = self.parts if len(self.parts) == 1 else sorted(self.parts, key=Memory.least_worth)
        levels = zip_longest(*(part.reclaimers for part in ordered))
        reclaimers = [reclaim for level in levels for reclaim in level if reclaim is not None]
        return any(reclaim() for reclaim in reclaimers) or self.unload_one()


class Memory:
    """Bytes of one model's layer states by account, under one budget; `budget` None is no bound. Used by one thread."""

    def __init__(self, budget: int | None = None, *, shared: SharedMemory | None = None) -> None:
        """`shared`: has the budget, which others use too; None: this is the only part."""
        self.shared = SharedMemory(budget) if shared is None else shared
        self.shared.parts.append(self)
        self._accounts = dict.fromkeys(Account, 0)
        self.reclaimers: tuple[Reclaimer, ...] = ()
        self.share_of_requests = 1 / _RECENT
        self.forget()

    @property
    def budget(self) -> int | None:
        """The most bytes of all accounts together, with those of other models; None: no bound."""
        return self.shared.state_budget

    @property
    def held(self) -> int:
        """Bytes of all accounts."""
        return sum(self._accounts.values())

    @property
    def available(self) -> int | None:
        """Bytes left in the budget (negative when over it), None without one."""
        return self.shared.available

    def nbytes(self, account: Account) -> int:
        """The bytes of one account."""
        return self._accounts[account]

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more fit the budget as it is."""
        return self.shared.fits(nbytes)

    # Other models.

    @property
    def _others(self) -> list[Memory]:
        return [part for part in self.shared.parts if part is not self]

    @property
    def kept_nbytes(self) -> int:
        """What cannot be evicted: live sequences, what was just read, what leases protect."""
        protected = 0 if self.cache is None else self.cache.protected_nbytes()
        return self._accounts[Account.SEQUENCES] + self._accounts[Account.INCOMING] + protected

    @property
    def kept_by_others(self) -> int:
        """The same of the other models."""
        return sum(part.kept_nbytes for part in self._others)

    @property
    def evictable_from_others(self) -> int:
        """What the other models could give up."""
        return sum(part.held - part.kept_nbytes for part in self._others)

    def least_worth(self) -> float:
        """What a byte that would be evicted next is expected to save, in seconds for each request of any model."""
        worth = None if self.cache is None else self.cache.least_worth()
        return float("inf") if worth is None else self._worth(worth)

    def _worth(self, worth: float) -> float:
        return worth * self.token_s() * self.share_of_requests

    def evict_from_others(self, worth: float | None) -> bool:
        """Have another model evict something that is worth less than anything here, and than `worth`, which is in the
        terms of this cache (None: than anything). False if none has such a thing."""
        others = self._others
        if not others:
            return False
        most = min(self.least_worth(), float("inf") if worth is None else self._worth(worth))
        for part in sorted(others, key=Memory.least_worth):
            if part.cache is not None and part.least_worth() <= most and part.cache.evict_one():
                return True
        return False

    # Changes.

    def charge(self, account: Account, nbytes: int) -> None:
        """`nbytes` more are held; less, if negative."""
        self._accounts[account] += nbytes
        assert self._accounts[account] >= 0, (account, self._accounts)

    def transfer(self, source: Account, target: Account, nbytes: int) -> None:
        """`nbytes` of `source` are held for `target` from now on; the other way round, if negative."""
        # `source` may fall below zero until its client measures it anew: buffers grow before they are measured.
        self._accounts[source] -= nbytes
        self._accounts[target] += nbytes

    def measure(self, account: Account, nbytes: int) -> None:
        """The account holds exactly so many bytes: its client has measured them."""
        assert nbytes >= 0, (account, nbytes)
        self._accounts[account] = nbytes

    def resize(self, budget: int | None) -> None:
        """Change the budget for layer states beside the weights that are here, and reclaim what it no longer covers."""
        self.shared.resize(budget)

    # Room.

    def reclaim_from(self, *reclaimers: Reclaimer) -> None:
        """Who gives something up when there is too little, in this order: after each the first is asked again."""
        self.reclaimers = reclaimers

    def reserve(self, nbytes: int) -> bool:
        """Make `nbytes` more fit the budget. False if that cannot be: then everything was given up that could be."""
        return self.shared.reserve(nbytes)

    def evict_from(self, cache: Evictable, *, token_s: Callable[[], float]) -> None:
        """Let other models have the room of this cache. `token_s`: what computing a token takes, which is what one that
        is stored saves."""
        self.cache, self.token_s = cache, token_s

    def forget(self) -> None:
        """Forget who gives something up."""
        self.reclaimers = ()
        self.cache: Evictable | None = None
        self.token_s: Callable[[], float] = lambda: 1.0

    def leave(self) -> None:
        """This part is over: its model is gone, and all that it held."""
        assert self.held == 0, self._accounts
        self.shared.parts.remove(self)

    def check(self, counted: Mapping[Account, int]) -> None:
        """AssertionError unless these accounts hold what their clients count. O(accounts)."""
        for account, nbytes in counted.items():
            assert self._accounts[account] == nbytes, (account, self._accounts[account], nbytes)
