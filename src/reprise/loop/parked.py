"""Long sequences that have ended, kept with their buffers: the next turn of the conversation goes on in them.

The prefix cache counts what they lend; see `reprise.engine.loans`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakMethod

from reprise.cache.loans import LoanPlace
from reprise.cache.lookup import Match
from reprise.cache.store import PrefixCache
from reprise.core.tokens import Tokens, own_tokens
from reprise.engine.loans import Loan, own_all
from reprise.engine.runner import Live, Runner

_MOST = 4
"""How many are kept. Each has room to grow that nobody else can use."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    """What a parked sequence holds: positions ``[0, len(tokens))``."""

    tokens: Tokens
    namespace: str


class Parked:
    """The parked sequences, oldest first."""

    def __init__(self, runner: Runner, cache: PrefixCache) -> None:
        self._runner = runner
        self._cache = cache
        self._sequences: dict[Live, _Sequence] = {}
        self.is_spoilt = False
        """A recall broke off in the middle: the cache has entries on loan that nobody holds any more."""
        # Weakly, or two that hold each other would keep the model and all that is stored after the loop has ended.
        recall = WeakMethod(self._recall)

        def recall_if_there(lender: object) -> None:
            here = recall()
            assert here is not None, "who is parked outlives the cache"
            here(lender)

        cache.recall = recall_if_there

    def __len__(self) -> int:
        return len(self._sequences)

    def end(self, live: Live, tokens: Tokens, *, namespace: str) -> None:
        """A sequence that stands behind `tokens` has ended: park it, or give it up when nothing is lent any more."""
        if not self._runner.can_park(live):
            self.recall(live, tokens, namespace=namespace)
            self._runner.stop(live)
            return
        self._runner.park(live)
        self._sequences[live] = _Sequence(own_tokens(tokens), namespace)
        while len(self._sequences) > _MOST:
            self._recall_parked(next(iter(self._sequences)))

    def adopt(self, match: Match, position: int, *, reserve: int) -> Live | None:
        """The parked sequence that holds the matched path up to `position`, now standing there; None if none does."""
        if not self._sequences or position == 0:
            return None
        live = self._cache.lender_at(match, position)
        if not isinstance(live, Live) or live not in self._sequences:
            return None
        parked = self._sequences[live]
        # What comes behind the position will be overwritten, and may be on somebody else's path.
        behind = self._cache.loans(live, parked.tokens, namespace=parked.namespace, start=position)
        self._cache.replace(behind, [loan.owned() for loan in _loans(behind)])
        self._runner.adopt(live, self._cache.read(match, position), reserve=reserve)
        # Only now: if it cannot be taken back to the position, it is parked as before, and can still be recalled.
        del self._sequences[live]
        return live

    def sweep(self) -> None:
        """Give up the sequences of which the cache has dropped too much for them to be worth their buffers."""
        for live in [live for live in self._sequences if not self._runner.can_park(live)]:
            self._recall_parked(live)

    def give_up(self) -> None:
        """Give all up: the cache gets copies of what they lend, and the rest of their buffers is free."""
        for live in list(self._sequences):
            self._recall_parked(live)

    def forget(self) -> None:
        """Give all up, after the cache has forgotten what they lent."""
        for live in self._sequences:
            self._runner.stop(live)
        self._sequences.clear()
        self.is_spoilt = False

    def recall(self, live: Live, tokens: Tokens, *, namespace: str) -> None:
        """Replace what a running sequence lends by copies."""
        if len(live.loans) > 0:
            places = self._cache.loans(live, tokens, namespace=namespace)
            self._cache.replace(places, [loan.owned() for loan in _loans(places)])

    def _recall(self, lender: object) -> None:
        # What a running sequence has lent behind its lease may be dropped: copies of that are of no use to anybody.
        if isinstance(lender, Live) and lender in self._sequences:
            self._recall_parked(lender)

    def _recall_parked(self, lender: Live) -> None:
        """Replace what a parked sequence lends by copies, and give the sequence up."""
        parked = self._sequences.pop(lender)
        places = self._cache.loans(lender, parked.tokens, namespace=parked.namespace)
        try:
            self._cache.replace(places, own_all(_loans(places)))
        except Exception:
            self.is_spoilt = True
            self._runner.stop(lender)
            raise
        self._runner.stop(lender)
        self._cache.reserved = self._runner.live_nbytes


def _loans(places: Sequence[LoanPlace]) -> list[Loan]:
    loans: list[Loan] = []
    for place in places:
        assert isinstance(place.payload, Loan), place
        loans.append(place.payload)
    return loans
