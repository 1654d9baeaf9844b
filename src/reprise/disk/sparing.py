"""Sparing the SSD: how much is written in a day, and when nothing is."""

import contextlib
import logging
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

from reprise.core.sizes import nbytes_text
from reprise.disk.folders.lease import PRIVATE_FILE

log = logging.getLogger(__name__)

COUNT = "written-today"
"""The file in the directory with the day and the bytes written on it, so that a restart does not forget them."""

_COUNTED_NBYTES = 64 << 20
"""The file lags behind by less than this."""


def today() -> str:
    """The local day."""
    return datetime.now().astimezone().date().isoformat()


class SparedWrites:
    """The bytes written below a directory today, at most `daily_nbytes` (None: no bound). Thread-safe.

    The file has what all servers of the directory wrote. Each reads of the others when it starts and when it saves.
    """

    def __init__(
        self,
        directory: Path,
        daily_nbytes: int | None,
        *,
        day: Callable[[], str] = today,
        why_quiet: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`why_quiet`: why nothing is done in the background, in a sentence; None: it is."""
        self._file = directory / COUNT
        self.daily_nbytes = daily_nbytes
        self._day_now, self.why_quiet = day, why_quiet
        self._lock = Lock()
        self._day: str
        self._nbytes: int
        self._day, self._nbytes = self._counted()
        self._unsaved_nbytes = 0

    @property
    def today_nbytes(self) -> int:
        with self._lock:
            return self._nbytes if self._day == self._day_now() else 0

    def why_not(self, nbytes: int) -> str | None:
        """Why a record of `nbytes` is too much for this day, in a sentence; None: it may be written."""
        if self.daily_nbytes is not None and self.today_nbytes + nbytes > self.daily_nbytes:
            most = nbytes_text(self.daily_nbytes)
            return f"{most} were written to the disk cache today, as many as --disk-daily-writes allows."
        return None

    def note(self, nbytes: int) -> None:
        """So many bytes were written."""
        with self._lock:
            day = self._day_now()
            is_due = day != self._day
            if is_due:
                self._day, self._nbytes, self._unsaved_nbytes = day, 0, 0
            self._nbytes += nbytes
            self._unsaved_nbytes += nbytes
            is_due |= self._unsaved_nbytes >= _COUNTED_NBYTES
        if is_due:
            self.save()

    def save(self) -> None:
        """Write the count to its file, as far as that is possible."""
        with self._lock:
            if self._unsaved_nbytes == 0:
                return
            unsaved_nbytes, self._unsaved_nbytes = self._unsaved_nbytes, 0
            day, counted_nbytes = self._counted()
            if day != self._day:
                # That day is over.
                return
            self._nbytes = max(self._nbytes, counted_nbytes + unsaved_nbytes)
            text = f"{self._day} {self._nbytes}\n"
        unfinished = self._file.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            unfinished.touch(mode=PRIVATE_FILE)
            unfinished.write_text(text)
            unfinished.replace(self._file)

    def _counted(self) -> tuple[str, int]:
        try:
            day, nbytes = self._file.read_text().split()
            return (day, int(nbytes)) if day == self._day_now() else (self._day_now(), 0)
        except (OSError, ValueError):
            return self._day_now(), 0


_shared: WeakValueDictionary[Path, SparedWrites] = WeakValueDictionary()
_making = Lock()


def spared_writes(
    directory: Path, daily_nbytes: int | None, *, why_quiet: Callable[[], str | None] = lambda: None
) -> SparedWrites:
    """The one count that all models of this process with this directory share."""
    with _making:
        writes = _shared.get(directory)
        if writes is None or writes.daily_nbytes != daily_nbytes:
            writes = _shared[directory] = SparedWrites(directory, daily_nbytes, why_quiet=why_quiet)
        return writes
