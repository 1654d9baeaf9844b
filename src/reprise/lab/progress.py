"""The progress of a simulation: a line that is updated in a terminal, or a line every few seconds elsewhere."""

import time
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

_TERMINAL_S = 0.1
_FILE_S = 10.0


class ProgressLine:
    """Shows on `console` what is running, and for how long."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._every_s = _TERMINAL_S if console.is_terminal else _FILE_S
        self._name = ""
        self._status: Status | None = None
        self._begun_s = self._told_s = time.monotonic()

    @contextmanager
    def of(self, name: str) -> Generator[None]:
        """While the trace of this name is replayed."""
        self._name = name
        self._begun_s = self._told_s = time.monotonic()
        if not self._console.is_terminal:
            yield
            return
        with self._console.status(f"{name}: reading") as self._status:
            yield

    def tell(self, text: str) -> None:
        """Set what is running now; shown if it is time."""
        now_s = time.monotonic()
        if now_s - self._told_s < self._every_s:
            return
        self._told_s = now_s
        line = f"{self._name}: {text}, {now_s - self._begun_s:.0f} s"
        if self._status is not None:
            self._status.update(line)
        else:
            self._console.print(line, highlight=False)
