"""How a server ends: the first signal lets it finish, for a bounded time; the second ends it at once."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, Self

log = logging.getLogger(__name__)

RESTARTABLE = 75
"""The exit status of a server that cannot continue (EX_TEMPFAIL): a supervisor starts it again."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_AT_ONCE_S = 2.0
"""After the second signal: for what was computed to be put where it can be found again."""

_LAST_PART = 3
"""A third of the time is for writing to the disk, but not more than this many seconds:"""
_LAST_PART_S = 10.0


def end_at_once(status: int) -> NoReturn:
    """End the process as it is, whatever its threads do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Ending:
    """The signals that end the process, from the first on. Within ``with ending:``, on the main thread.

    `on_first` and `on_second` are called by signal handlers, so between any two instructions of the main thread. When
    the time is over the process ends, whatever still runs: `exit_status` is then 1, or that of the second signal.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._num_signals = 0
        self._end_s: float | None = None
        self._before: dict[signal.Signals, object] = {}
        self.on_first: Callable[[], None] = lambda: None
        self.on_second: Callable[[], None] = lambda: None

    @property
    def answers_s(self) -> float:
        """How much of the time is for answers under way; what is left is for the disk."""
        return self._grace_s - min(_LAST_PART_S, self._grace_s / _LAST_PART)

    @property
    def left_s(self) -> float:
        """How much time is left; all of it before the first signal."""
        return self._grace_s if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                # A signal that is ignored (`nohup`) stays so.
                if signal.getsignal(each) is not signal.SIG_IGN:
                    self._before[each] = signal.signal(each, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._end_within(self._grace_s, status=1)
            self.on_first()
        elif self._num_signals == 2:
            self._end_within(_AT_ONCE_S, status=128 + number)
            self.on_second()
        else:
            os._exit(128 + number)

    def _end_within(self, seconds: float, *, status: int) -> None:
        self._end_s = time.monotonic() + seconds

        def end() -> None:
            log.warning("Not everything finished within --grace: exiting now.")
            end_at_once(status)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
