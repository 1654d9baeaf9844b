"""Rank 0's record of what it runs: each operation is told to the other ranks before it runs here.

Numbers name the objects that hold arrays. When nobody here holds one any more, the others are told with the next
operation. A failure of an operation that copies is this rank's own: what it was about is dropped, here and there. One
within a pass of the model leaves ranks waiting for each other, so it ends the group.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import ref

from reprise.core.kinds import KvKind
from reprise.engine.operation_codec import Coded, Encoder, Numbered, numbered_in
from reprise.engine.operations import one_operation
from reprise.engine.payloads import PackedSegment, Snapshot
from reprise.engine.rank_links import RanksFailed

T = TypeVar("T")

PASS = "Runner._feed"
"""The operation in which ranks wait for each other."""

_CHECKED_EVERY = 512
"""Operations after which the ranks compare what they hold."""


class Leader:
    """Tells the other ranks what runs here (`reprise.engine.operations.OperationRecorder`)."""

    def __init__(
        self,
        kinds: Sequence[KvKind],
        send: Callable[[Coded], None],
        *,
        fail: Callable[[str], RanksFailed] = RanksFailed,
        checked_every: int = _CHECKED_EVERY,
    ) -> None:
        """`send` raises RanksFailed when the group is of no use any more; `fail` makes it so."""
        self._encoder = Encoder(kinds, self._number_of)
        self._send = send
        self._fail = fail
        self._checked_every = checked_every
        self._numbers: dict[ref[Numbered], int] = {}
        self._next = 0
        self._dropped: deque[int] = deque()
        self._named: list[int] = []
        """The numbers in the operation that is being written."""
        self._doubtful: set[int] = set()
        """Objects of operations that failed here: they are about to be dropped."""
        self._has_failed = False
        self.num_operations = 0
        self.spent_s = 0.0
        """Of this thread's time: what telling the others took."""

    def run(self, name: str, function: Callable[..., T], positional: Sequence[Any], named: Mapping[str, Any]) -> T:
        if self._has_failed and name != PASS:
            # Nobody follows any more, and what runs is given up: that takes no other rank.
            with one_operation():
                return function(*positional, **named)
        started_s = time.perf_counter()
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
        self.spent_s += time.perf_counter() - started_s
        try:
            with one_operation():
                result = function(*positional, **named)
        except Exception as error:
            self._doubtful.update(about)
            if name == PASS:
                self._has_failed = True
                raise self._fail(f"a pass failed on rank 0 ({type(error).__name__}: {error})") from error
            raise
        for each in numbered_in(result):
            self._numbers[ref(each, self._forget)] = self._next
            self._next += 1
        return result

    def check(self) -> None:
        """Have the other ranks compare what they hold with what is held here."""
        held = {number: each for number, each in self.held.items() if number not in self._doubtful}
        self._send(["check", self._take_dropped(), sorted(held), digest_of(held)])

    @property
    def held(self) -> dict[int, Numbered]:
        """The objects that are held here, by number."""
        held = [(number, each()) for each, number in list(self._numbers.items())]
        return {number: each for number, each in held if each is not None}

    def _number_of(self, each: Numbered) -> int:
        number = self._numbers[ref(each)]
        self._named.append(number)
        return number

    def _forget(self, gone: ref[Numbered]) -> None:
        # On whatever thread the last one lets it go.
        number = self._numbers.pop(gone)
        self._doubtful.discard(number)
        self._dropped.append(number)

    def _take_dropped(self) -> list[int]:
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


def digest_of(held: Mapping[int, Numbered]) -> str:
    """A hash of the forms of these objects, by number: lengths and places. Entries are each rank's own."""
    digest = hashlib.blake2b(digest_size=8)
    for number in sorted(held):
        digest.update(f"{number} {_form(held[number])};".encode())
    return digest.hexdigest()


def _form(each: Numbered) -> object:
    if isinstance(each, PackedSegment):
        return [stack.shape for stack in each.stacks]
    if isinstance(each, Snapshot):
        return each.nbytes
    layers = [(layer.end, layer.held, layer.capacity, layer.lengths) for layer in each.rows.kv_layers()]
    return each.rows.lengths, layers, each.restoration is None, each.moving is None
