"""The disk cache of a model that is split over ranks, each of which has its part of each record under the same key.

Rank 0 decides alone what is written, read and removed. It has the index in which prompts are found, and a record counts
as present only while its own file is there. A record is read only if every rank has read and verified its part: if one
rank lacks it, it is removed everywhere and its tokens are computed. Each rank also keeps to its own size limit: what it
evicts for that, rank 0 notices when it wants to read it.
"""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from reprise.cluster.ranks.codec import form_of
from reprise.cluster.ranks.links import LinksToFollowers, Message, RanksFailed
from reprise.core.errors import DiskUnusable
from reprise.disk.folders.model_directory import ModelDirectory
from reprise.disk.folders.model_folder import OpenedParts
from reprise.disk.records.record import DiskRecord

ANSWERED_S = 60.0
"""How long rank 0 waits until another rank has read its part of a record. Nothing else waits for it."""

_LOOKED_S = 0.5
"""How often it looks meanwhile whether the group has failed."""


@dataclass(slots=True, eq=False)
class _ShardQuestion:
    """What was asked of all other ranks, and what they have answered."""

    answers: dict[int, Message] = field(default_factory=dict[int, Message])
    cleared: Future[None] | None = None


class ShardsElsewhere:
    """What rank 0 has the other ranks do with their parts of records. Thread-safe.

    They do it in the order of these calls and of the operations on layer states.
    """

    def __init__(
        self,
        links: LinksToFollowers,
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
        """Have them read and verify their parts of a record. Returns the number of this reading. Raises OSError."""
        number = self._ask(_ShardQuestion())
        try:
            self._links.send(["read", number, key.hex()])
        except RanksFailed as failure:
            self._drop(number)
            raise _unreadable(failure) from failure
        return number

    def end_read(self, number: int, record: DiskRecord) -> bool:
        """Wait for them, and return whether all have the part that belongs to our `record`.

        If so, they keep it while `record` is referenced here. Raises OSError if they do not answer.
        """
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
        """Have them drop what they read, instead of `end_read`."""
        self._drop(number)
        with suppress(RanksFailed):
            self._links.send(["forget", number])

    def remove(self, keys: Collection[bytes]) -> None:
        """See `PartsElsewhere`."""
        with suppress(RanksFailed):
            if keys:
                self._links.send(["remove", [key.hex() for key in keys]])

    def clear(self, root: bytes | None) -> Future[None]:
        """See `PartsElsewhere`."""
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


class SplitDirectory(ModelDirectory):
    """Rank 0's folder: reading waits for the other ranks, and what is removed here they remove too."""

    def __init__(self, directory: Path, *, fingerprint: str, others: ShardsElsewhere) -> None:
        """Raises DiskUnusable."""
        super().__init__(directory, fingerprint=fingerprint)
        self._others = others

    def read(self, key: bytes) -> DiskRecord:
        number = self._others.begin_read(key)
        try:
            record = super().read(key)
        except BaseException:
            self._others.forget(number)
            raise
        if self._others.end_read(number, record):
            return record
        with self.names:
            self.remove(self.path_of(key))
        raise FileNotFoundError(errno.ENOENT, "another rank lacks its part of the record")

    def remove(self, path: Path) -> None:
        super().remove(path)
        self._tell_of(path)

    def remove_all(self, paths: Collection[Path]) -> None:
        # Only `clear` calls this, which tells the other ranks itself.
        for path in paths:
            super().remove(path)

    def quarantine(self, path: Path) -> None:
        super().quarantine(path)
        self._tell_of(path)

    def _tell_of(self, path: Path) -> None:
        key = self.key_of(path)
        if key is not None:
            self._others.remove([key])
