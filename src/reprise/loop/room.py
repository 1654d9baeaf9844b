"""Room for running sequences within the memory budget, which they share with the prefix cache.

The cache gives way first: what it holds twice beside a running sequence, then what it may evict, then the buffers of
parked sequences, and pins at last. What is still too much has to wait, which is for the worker to see to.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reprise.cache import pins
from reprise.cache.loans import LoanPlace
from reprise.cache.lookup import Match
from reprise.cache.store import PrefixCache
from reprise.core.job import Job, Purpose
from reprise.core.tokens import Tokens
from reprise.engine.payloads import Segment
from reprise.engine.rows import handed_over
from reprise.engine.runner import Live, Runner
from reprise.loop.parked import Parked
from reprise.loop.task import Task

log = logging.getLogger("reprise.loop")

ROOM_TO_DECODE = 256
"""Entries for the answer that are there from the start; more are made room for as they come."""

_TIGHT = 8
"""When less than this part of the budget is free, nothing is held twice any more."""


def answer_room(job: Job) -> int:
    """For how many entries of its answer a request has room from the start."""
    # One more than is asked for, since decode may run a pass ahead.
    return min(job.max_tokens + 1, ROOM_TO_DECODE) if job.purpose is Purpose.GENERATE else 0


@dataclass(frozen=True, slots=True, eq=False)
class _Doubled:
    """A path that the cache owns, of which a running sequence has a copy."""

    tokens: Tokens
    namespace: str


class Room:
    """Starts sequences and makes room for what they grow by. `chunk` is the longest prefill chunk."""

    def __init__(self, runner: Runner, cache: PrefixCache, parked: Parked, *, chunk: int) -> None:
        self._runner = runner
        self._cache = cache
        self._parked = parked
        self._chunk = chunk
        self._doubled: dict[Live, _Doubled] = {}

    # Asking.

    def needed(self, num_prompt: int) -> int:
        """The most bytes of live state that a request with so many prompt tokens takes until it has decoded a while."""
        return self._runner.footprint.live(num_prompt + ROOM_TO_DECODE, chunk=self._chunk)

    def needed_to_admit(self, num_prompt: int, resume_at: int) -> int:
        """The same, and what it copies from the cache and cannot take over."""
        is_lent = resume_at >= self._runner.lends_from
        return self.needed(num_prompt) + (0 if is_lent else self._runner.footprint.at(resume_at))

    def free(self, running: Iterable[Task]) -> int | None:
        """Bytes that new requests may take, with all that may be evicted gone; None without a budget.

        What the running ones were promised and have not taken yet is not free.
        """
        cache = self._cache
        if cache.budget is None:
            return None
        promised = sum(max(0, self.needed(len(task.prompt)) - _share(task.live)) for task in running if task.live)
        taken = cache.reserved + cache.coming + promised + cache.protected_nbytes()
        return cache.budget - taken + self._doubled_nbytes()

    def is_full(self, live: Live) -> bool:
        """Whether a sequence cannot have its next token within the budget, when there is nothing left to give up."""
        free = self._cache.free()
        growth = self._runner.growth([live], 2)
        return free is not None and growth > max(0, free)

    # Making.

    def charge(self) -> None:
        """Count the live sequences anew, and evict if they have come to be too much."""
        self._parked.sweep()
        self._cache.reserved = self._runner.live_nbytes
        free, budget = self._cache.free(), self._cache.budget
        if free is not None and budget is not None and free < budget // _TIGHT:
            self._lend_doubled()
        self.make(0)

    def make(self, nbytes: int) -> bool:
        """Make room for so many bytes more. False if that cannot be: then what could be given up is."""
        cache = self._cache
        free = cache.free()
        if free is None or free >= nbytes:
            return True
        self._lend_doubled()
        if cache.make_room(nbytes):
            return True
        self._parked.give_up()
        while not cache.make_room(nbytes):
            if not pins.lift_one(cache):
                return False
            log.warning("a pin gave way: running requests had no room otherwise")
        return True

    def make_for_prefill(self, lives: Sequence[Live], num: int) -> bool:
        """Make room for `num` more tokens of each of these sequences, in one pass."""
        return self.make(self._runner.growth(lives, num))

    def make_for_decode(self, lives: Sequence[Live]) -> bool:
        return self.make(self._runner.growth_to_decode(lives))

    # Starting.

    def start(self, match: Match, position: int, *, reserve: int) -> Live:
        """A sequence that stands at `position` of the matched path, which is leased, and grows to about `reserve`."""
        live = self._parked.adopt(match, position, reserve=reserve)
        if live is not None:
            return live
        needed = self._runner.footprint.live(reserve, chunk=self._chunk)
        is_long = position >= self._runner.lends_from
        free = self._cache.free()
        if free is None or free >= needed or (not is_long and self.make(needed)):
            live = self._runner.start(self._cache.read(match, position), reserve=reserve)
            if is_long:
                self._doubled[live] = _Doubled(match.tokens[:position], match.namespace)
            return live
        # A second copy on the way costs less than what would have to be evicted for having the path twice.
        self.make(needed - self._owned_nbytes(match.tokens[:position], match.namespace))
        return self._take_over(match, position, reserve=reserve)

    def ended(self, live: Live) -> None:
        """The sequence is over, or about to be."""
        self._doubled.pop(live, None)

    def _take_over(self, match: Match, position: int, *, reserve: int) -> Live:
        """Start a sequence with the cache's own entries instead of copies, where there is no room for both.

        A plane at a time is copied, and given up as it is there: so at most one is held twice.
        """
        path = match.tokens[:position]
        packed = list(self._cache.owned(path, namespace=match.namespace))
        while packed:
            # Popped, so that nobody holds the packed entries when their copies are there.
            self._unpack(packed.pop())
        places = self._cache.owned(path, namespace=match.namespace)
        restore = handed_over(self._cache.read(match, position), [_segment(place) for place in places])
        live = self._runner.begin()
        self._cache.replace(places, [self._runner.lend(live, place.kind, place.piece.span) for place in places])
        # The cache has them on loan now, and `restore` alone still holds them.
        del places
        try:
            self._runner.fill(live, restore, reserve=reserve, at_once=0)
        except Exception:
            self._parked.is_spoilt = True
            self._runner.drop(live)
            raise
        return live

    def _unpack(self, place: LoanPlace) -> None:
        self._cache.replace([place], [_segment(place).unpacked()])

    # What is held twice.

    def _lend_doubled(self) -> None:
        """Have the running sequences lend what the cache holds a copy of: that frees the cache's, at no cost."""
        for live, path in self._doubled.items():
            places = self._cache.owned(path.tokens, namespace=path.namespace)
            self._cache.replace(places, [self._runner.lend(live, place.kind, place.piece.span) for place in places])
        self._doubled.clear()

    def _doubled_nbytes(self) -> int:
        return sum(self._owned_nbytes(path.tokens, path.namespace) for path in self._doubled.values())

    def _owned_nbytes(self, tokens: Tokens, namespace: str) -> int:
        # The places are not to be kept: who holds one holds its entries, too.
        return sum(place.piece.payload.nbytes for place in self._cache.owned(tokens, namespace=namespace))


def _segment(place: LoanPlace) -> Segment:
    payload = place.piece.payload
    assert isinstance(payload, Segment), place
    return payload


def _share(live: Live) -> int:
    """What one sequence takes of the buffers it shares with others."""
    return live.rows.nbytes // live.rows.num_rows
