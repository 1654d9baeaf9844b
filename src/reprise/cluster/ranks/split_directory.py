"""Rank 0's folder of a model that is split over ranks, each of which has its part of each record under the same key.

Rank 0 decides alone what is written, read and removed. It has the index in which prompts are found, and a record counts
as present only while its own file is there. A record is read only if every rank has read and verified its part: if one
rank lacks it, it is removed everywhere and its tokens are computed. Each rank also keeps to its own size limit: what it
evicts for that, rank 0 notices when it wants to read it.
"""

import errno
import hashlib
import json
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from reprise.disk.folders.model_directory import ModelDirectory
from reprise.disk.records.record import DiskRecord


class OtherRanks(Protocol):
    """What rank 0 has the other ranks do with their parts of records. Thread-safe.

    They do it in the order of these calls and of the operations on layer states.
    """

    def begin_read(self, key: bytes) -> int:
        """Have them read and verify their parts of a record. Returns the number of this reading. Raises OSError."""
        ...

    def end_read(self, number: int, record: DiskRecord) -> bool:
        """Wait for them, and return whether all have the part that belongs to our `record`.

        If so, they keep it while `record` is referenced here. Raises OSError if they do not answer.
        """
        ...

    def forget(self, number: int) -> None:
        """Have them drop what they read, instead of `end_read`."""
        ...

    def remove(self, keys: Collection[bytes]) -> None:
        """Have them remove their parts of these records."""
        ...

    def clear(self, root: bytes | None) -> Future[None]:
        """Have them remove everything of a namespace (None: of the model). The future is done when they have."""
        ...


def form_of(record: DiskRecord) -> str:
    """A hash of everything but the content: the same for all parts of a record, unless they were written apart."""
    sections = [[section.dtype, list(section.shape)] for section in record.sections]
    form = [record.is_tail, record.start, len(record.tokens), dict(record.about), sections]
    return hashlib.blake2b(json.dumps(form, sort_keys=True).encode(), digest_size=16).hexdigest()


class SplitDirectory(ModelDirectory):
    """Rank 0's folder: reading waits for the other ranks, and what is removed here they remove too."""

    def __init__(self, directory: Path, *, fingerprint: str, others: OtherRanks) -> None:
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
