"""A log in a file that does not grow without end: standard error of the process, whoever writes to it."""

import logging
import os
from pathlib import Path
from typing import TextIO

MOST_NBYTES = 10 * 10**6
NUM_KEPT = 3


class LogFileHandler(logging.StreamHandler[TextIO]):
    """Makes the file the process's standard error, and writes records there.

    So what MLX, Python and a command that is refused write there is in the file too. A file of more than `max_nbytes`
    is renamed to FILE.1, that one to FILE.2, and so on up to `NUM_KEPT`. Several processes may share the file: the
    first one renames it, and the others follow. Raises OSError. `descriptor`: of what becomes the file.
    """

    def __init__(self, path: Path, *, max_nbytes: int = MOST_NBYTES, descriptor: int = 2) -> None:
        self._path = path
        self._max_nbytes = max_nbytes
        self._descriptor = descriptor
        self._open()
        super().__init__(open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115 (as long as the process)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if os.fstat(self._descriptor).st_size > self._max_nbytes:
                self._rename()
        except OSError:
            # A full or vanished disk is no reason to stop serving.
            self.handleError(record)
        super().emit(record)

    def _open(self) -> None:
        opened = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(opened, self._descriptor)
        os.close(opened)

    def _rename(self) -> None:
        if self._path.exists() and os.path.samestat(os.fstat(self._descriptor), self._path.stat()):
            for number in range(NUM_KEPT, 0, -1):
                earlier = kept_file(self._path, number - 1)
                if earlier.exists():
                    earlier.replace(kept_file(self._path, number))
        self._open()


def kept_file(path: Path, number: int) -> Path:
    """The file that was renamed `number` times."""
    return path if number == 0 else path.with_name(f"{path.name}.{number}")
