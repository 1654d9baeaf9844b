"""Broadcasts the operations of rank 0: each is sent to the other ranks before it runs here.

Objects that hold arrays are identified by numbers. When rank 0 drops its last reference to one, the others are notified
with the next operation. If an operation that copies fails, only this rank is affected: its objects are dropped on all
ranks. A failed pass leaves the other ranks waiting, so it ends the group.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import ref

from reprise.cluster.ranks.codec import Coded, Encoder, Numbered, form_of, numbered_in
from reprise.cluster.ranks.links import RanksFailed, is_lost_peer
from reprise.cluster.ranks.operations import PASSES, one_operation
from reprise.core.kinds import KvKind
from reprise.disk.records.record import DiskRecord
from reprise.engine.running.records import RecordEncoder, RecordSource, RestoringSequence
from reprise.engine.states.payloads import PackedSegment, Snapshot

log = logging.getLogger("reprise.engine")

T = TypeVar("T")

_CHECKED_EVERY = 512
"""How many operations pass between two comparisons of what the ranks hold."""


class Leader:
    """Sends operations to the other ranks: `run` is a recorder of `reprise.cluster.ranks.operations`."""

    def __init__(
        self,
        kinds: Sequence[KvKind],
        send: Callable[[Coded], None],
        *,
        fail: Callable[[str], RanksFailed] = RanksFailed,
        checked_every: int = _CHECKED_EVERY,
    ) -> None:
        """`send` raises RanksFailed once the group has failed; `fail` marks it as failed."""
        self._encoder = Encoder(kinds, self._number_of)
        self._send = send
        self._fail = fail
        self._checked_every = checked_every
        self._numbers: dict[ref[Numbered], int] = {}
        self._next = 0
        self._dropped: deque[int] = deque()
        self._named: list[int] = []
        """The numbers in the operation being encoded."""
        self._doubtful: set[int] = set()
        """Objects of operations that failed here, which are about to be dropped."""
        self._has_failed = False
        self.num_operations = 0
        self.spent_s = 0.0
        """Time that this thread has spent on sending operations."""

    def run(self, name: str, function: Callable[..., T], positional: Sequence[Any], named: Mapping[str, Any]) -> T:
        if self._has_failed and name not in PASSES:
            # The group has failed: what remains is cleanup, which needs no other rank.
            with one_operation():
                return function(*positional, **named)
        started_s = time.thread_time()
        if self.num_operations % self._checked_every == self._checked_every - 1:
            self.check()
        self._named = []
        coded = [self._encoder.encode(value) for value in positional]
        by_name = {key: self._encoder.encode(value) for key, value in named.items()}
        about = self._named
        try:
            self._send(["run", self._take_dropped(), self._next, name, coded, by_name])
        except RanksFailed:
            self._has_failed = True
            raise
        self.num_operations += 1
        self.spent_s += time.thread_time() - started_s
        try:
            with one_operation():
                result = function(*positional, **named)
        except Exception as error:
            self._doubtful.update(about)
            if name in PASSES:
                self._has_failed = True
                if not is_lost_peer(error):
                    log.error("a pass failed on rank 0", exc_info=error)
                raise self._fail(f"a pass failed on rank 0 ({type(error).__name__}: {error})") from error
            raise
        for each in numbered_in(result):
            self._numbers[ref(each, self._forget)] = self._next
            self._next += 1
        return result

    def name_record(self, record: Numbered, number: int) -> None:
        """The other ranks have read their parts of this record under a separate number, below 0. Thread-safe."""
        assert number < 0, number
        self._numbers[ref(record, self._forget)] = number

    def check(self) -> None:
        """Have the other ranks compare what they hold with what this rank holds."""
        held = {number: each for number, each in self.held.items() if number not in self._doubtful}
        self._send(["check", self._take_dropped(), sorted(held), digest_of(held)])

    @property
    def held(self) -> dict[int, Numbered]:
        """The objects that exist here, by number."""
        held = [(number, each()) for each, number in list(self._numbers.items())]
        return {number: each for number, each in held if each is not None}

    def _number_of(self, each: Numbered) -> int:
        number = self._numbers.get(ref(each))
        assert number is not None, f"the other ranks know nothing of this {type(each).__name__}"
        self._named.append(number)
        return number

    def _forget(self, gone: ref[Numbered]) -> None:
        # Runs on whichever thread drops the last reference.
        number = self._numbers.pop(gone)
        self._doubtful.discard(number)
        self._dropped.append(number)

    def _take_dropped(self) -> list[int]:
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


def digest_of(held: Mapping[int, Numbered]) -> str:
    """A hash of the shapes and positions of these objects, by number. Their contents differ between ranks."""
    digest = hashlib.blake2b(digest_size=8)
    for number in sorted(held):
        digest.update(f"{number} {_form(held[number])};".encode())
    return digest.hexdigest()


def _form(each: Numbered) -> object:
    if isinstance(each, PackedSegment):
        return [stack.shape for stack in each.stacks]
    if isinstance(each, Snapshot):
        return each.nbytes
    match each:
        case DiskRecord():
            return form_of(each)
        case RecordEncoder():
            return [(section.dtype, section.shape) for section in each.sections]
        case RecordSource() | RestoringSequence():
            return each.records.stop, each.records.nbytes, each.buffer_nbytes
        case _:
            pass
    layers = [(layer.end, layer.held, layer.capacity, layer.lengths) for layer in each.rows.kv_layers]
    return each.rows.lengths, layers, each.restoration is None, each.moving is None
