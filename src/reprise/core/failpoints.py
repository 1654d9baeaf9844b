"""Failpoints: operations of the engine and the disk at which a test can raise, wait or take note.

So no test replaces a method. Without a test, a failpoint costs one look-up in an empty dict.
"""

from collections.abc import Callable
from enum import Enum, auto


class Failpoint(Enum):
    """An operation, before it does anything (or when it has ended), and what its action is called with."""

    DISK_BEGIN = auto()
    """A record's temporary file is to be created: its folder."""
    DISK_FILL = auto()
    """The open file is to be written: its folder."""
    DISK_FILLED = auto()
    """It is written, flushed and closed: its folder."""
    DISK_READ = auto()
    """A record is to be read: its folder and key."""
    DISK_REMOVE = auto()
    """A file is to be removed: its folder and path."""
    PREFILL = auto()
    """Sequences are to read chunks of their prompts: the sequences."""
    DECODE = auto()
    """Sequences are to get a token each: the sequences."""
    BEGIN_RESTORE = auto()
    """A sequence is to be restored: the position, and whether it keeps its full-attention buffers."""
    COPY_OUT = auto()
    """What an idle sequence shares is to be copied: the sequence."""


ACTIONS: dict[Failpoint, Callable[..., object]] = {}
"""Those of the test that is running."""


def reach(point: Failpoint, *what: object) -> None:
    """Call the action of this failpoint, if it has one."""
    action = ACTIONS.get(point)
    if action is not None:
        action(*what)
