"""The one owner of the memory budget: who holds how many bytes, and who gives some up when there is too little.

Bytes are counted here and nowhere else. Clients say what they take and give back (`charge`), what changes hands
(`transfer`), and ask for room before they take it (`reserve`).
"""

from collections.abc import Callable, Mapping
from enum import StrEnum


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


class Memory:
    """Bytes by account under one budget; `budget` None is no bound. Used by one thread."""

    def __init__(self, budget: int | None = None) -> None:
        self._budget = budget
        self._accounts = dict.fromkeys(Account, 0)
        self._reclaimers: tuple[Reclaimer, ...] = ()

    @property
    def budget(self) -> int | None:
        """The most bytes of all accounts together; None: no bound."""
        return self._budget

    @property
    def held(self) -> int:
        """Bytes of all accounts."""
        return sum(self._accounts.values())

    @property
    def available(self) -> int | None:
        """Bytes left in the budget (negative when over it), None without one."""
        return None if self._budget is None else self._budget - self.held

    def nbytes(self, account: Account) -> int:
        """The bytes of one account."""
        return self._accounts[account]

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more fit the budget as it is."""
        available = self.available
        return available is None or available >= nbytes

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
        """Change the budget, and reclaim what it no longer covers."""
        self._budget = budget
        self.reserve(0)

    # Room.

    def reclaim_from(self, *reclaimers: Reclaimer) -> None:
        """Who gives something up when there is too little, in this order: after each the first is asked again."""
        self._reclaimers = reclaimers

    def reserve(self, nbytes: int) -> bool:
        """Make `nbytes` more fit the budget. False if that cannot be: then everything was given up that could be."""
        while not self.fits(nbytes):
            if not any(reclaim() for reclaim in self._reclaimers):
                return False
        return True

    def check(self, counted: Mapping[Account, int]) -> None:
        """AssertionError unless these accounts hold what their clients count. O(accounts)."""
        for account, nbytes in counted.items():
            assert self._accounts[account] == nbytes, (account, self._accounts[account], nbytes)
