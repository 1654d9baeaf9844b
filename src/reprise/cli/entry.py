"""The command `reprise`, which Ctrl-C ends from the first moment on. Imports the standard library alone."""

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


def main() -> None:
    """Import the commands, and run the one that the command line names."""
    with ended_by_interrupt():
        from reprise.cli.main import app  # noqa: PLC0415 (the rest of the program)
    app()


@contextmanager
def ended_by_interrupt() -> Generator[None]:
    """Have Ctrl-C end the process at once, with one line and status 130, unless it is handled or ignored.

    Python's own handler raises KeyboardInterrupt, which can be lost in the middle of an import.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"reprise: interrupted.\n")
    os._exit(128 + number)
