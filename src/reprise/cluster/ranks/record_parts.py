"""What rank 0 has the other ranks do with their parts of the disk cache's records (see `split_directory`)."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from reprise.cluster.ranks.links import Message, RanksFailed
from reprise.cluster.ranks.split_directory import SplitDirectory, form_of
from reprise.core.errors import DiskUnusable
from reprise.disk.folders.model_folder import OpenedParts
from reprise.disk.records.record import DiskRecord

ANSWERED_S = 60.0
"""How long rank 0 waits until another rank has read its part of a record. Nothing else waits for it."""

_LOOKED_S = 0.5
"""How often it looks meanwhile whether the group has failed."""


class Links(Protocol):
    """The connections to the other ranks (`reprise.cluster.ranks.links.LinksToFollowers`)."""

    failure: RanksFailed | None
    on_answer: Callable[[int, int, Message], None]

    def send(self, message: Message) -> None:
        """Raises RanksFailed."""
        ...

    def next_reports(self, *, within_s: float) -> Mapping[int, Any]:
        """Raises RanksFailed."""
        ...


@dataclass(slots=True, eq=False)
class _ShardQuestion:
    """What was asked of all other ranks, and what they have answered."""

    answers: dict[int, Message] = field(default_factory=dict[int, Message])
    cleared: Future[None] | None = None


class ShardsElsewhere:
    """The parts of records on the other ranks' disks (`reprise.cluster.ranks.split_directory.OtherRanks`)."""

    def __init__(
        self,
        links: Links,
        num_others: int,
        *,
        name_record: Callable[[DiskRecord, int], None],
        opened_within_s: float,
        answered_within_s: float = ANSWERED_S,
    ) -> None:
        """`name_record`: see `Leader.name_record`."""
        self._links = links
        self._num_others = num_others
        self._name_record = name_record
        self._opened_within_s = opened_within_s
        self.answered_within_s = answered_within_s
        self._numbers = itertools.count(-1, -1)
        self._asked: dict[int, _ShardQuestion] = {}
        self._changed = threading.Condition()
        links.on_answer = self._hear

    def open(self, *, fingerprint: str, block: int, resumes_anywhere: bool) -> OpenedParts:
        """Have the other ranks open theirs. Raises DiskUnusable and RanksFailed."""
        self._links.send(["shards", fingerprint, block, resumes_anywhere])
        reports = self._links.next_reports(within_s=self._opened_within_s)
        for rank, report in reports.items():
            if report["unusable"] is not None:
                raise DiskUnusable(f"Rank {rank}: {report['unusable']}")
        return OpenedParts(
            max_bytes=min(int(report["max_bytes"]) for report in reports.values()),
            keys=tuple(frozenset(map(bytes.fromhex, report["keys"])) for report in reports.values()),
        )

    def folder(self, directory: Path, *, fingerprint: str) -> SplitDirectory:
        """See `PartsElsewhere`."""
        return SplitDirectory(directory, fingerprint=fingerprint, others=self)

    def begin_read(self, key: bytes) -> int:
        """See `OtherRanks`."""
        number = self._ask(_ShardQuestion())
        try:
            self._links.send(["read", number, key.hex()])
        except RanksFailed as failure:
            self._drop(number)
            raise _unreadable(failure) from failure
        return number

    def end_read(self, number: int, record: DiskRecord) -> bool:
        """See `OtherRanks`."""
        asked, form = self._asked[number], form_of(record)
        if not self._wait(asked):
            self.forget(number)
            raise _unreadable(self._links.failure)
        if any(answer != form for answer in asked.answers.values()):
            self.forget(number)
            return False
        self._drop(number)
        self._name_record(record, number)
        return True

    def _wait(self, asked: _ShardQuestion) -> bool:
        """Wait until all have answered; returns whether they have."""
        due_s = time.monotonic() + self.answered_within_s
        with self._changed:
            while len(asked.answers) < self._num_others:
                left_s = due_s - time.monotonic()
                if self._links.failure is not None or left_s <= 0:
                    return False
                self._changed.wait(min(_LOOKED_S, left_s))
        return True

    def forget(self, number: int) -> None:
        """See `OtherRanks`."""
        self._drop(number)
        with suppress(RanksFailed):
            self._links.send(["forget", number])

    def remove(self, keys: Collection[bytes]) -> None:
        """See `OtherRanks`."""
        with suppress(RanksFailed):
            if keys:
                self._links.send(["remove", [key.hex() for key in keys]])

    def clear(self, root: bytes | None) -> Future[None]:
        """See `OtherRanks`."""
        cleared: Future[None] = Future()
        cleared.set_running_or_notify_cancel()
        number = self._ask(_ShardQuestion(cleared=cleared))
        try:
            self._links.send(["clear", number, None if root is None else root.hex()])
        except RanksFailed as failure:
            self._drop(number)
            cleared.set_exception(failure)
        return cleared

    def _ask(self, asked: _ShardQuestion) -> int:
        with self._changed:
            number = next(self._numbers)
            self._asked[number] = asked
        return number

    def _drop(self, number: int) -> None:
        with self._changed:
            self._asked.pop(number, None)

    def _hear(self, rank: int, number: int, answer: Message) -> None:
        with self._changed:
            asked = self._asked.get(number)
            if asked is None:
                return  # Nobody waits for it any more.
            asked.answers[rank] = answer
            is_over = len(asked.answers) == self._num_others
            if is_over and asked.cleared is not None:
                del self._asked[number]
            self._changed.notify_all()
        if is_over and asked.cleared is not None:
            asked.cleared.set_result(None)


def _unreadable(failure: RanksFailed | None) -> OSError:
    # No error of the file: the record stays.
    return OSError(errno.ETIMEDOUT, "another rank does not answer" if failure is None else str(failure))
