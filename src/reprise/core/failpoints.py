"""Failpoints: operations of the memory, the engine and the disk at which a test can raise, wait or take note.

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
    DISK_SCAN = auto()
    """A store is to be scanned for other servers' changes: whether that was asked for."""
    DISK_ADVANCE = auto()
    """What was read is to be taken over, within a step's allowance."""
    ENCODE = auto()
    """Entries are to be copied for a record: the layers' kind and the span."""
    FITS = auto()
    """Whether so many bytes fit is asked: the bytes. They do not if the action returns False."""
    STEP = auto()
    """The engine thread begins a step: its worker."""
    STEPPED = auto()
    """The step has ended: the worker."""
    EMBED = auto()
    """An embedder is to run over inputs: the inputs."""
    JOINED = auto()
    """Rows of entries have been joined, in one of the layers: the layer."""
    PREFILL = auto()
    """Sequences are to read chunks of their prompts: the sequences."""
    DECODE = auto()
    """Sequences are to get a token each: the sequences."""
    BEGIN_RESTORE = auto()
    """A sequence is to be restored: the position, and whether it keeps its full-attention buffers."""
    LOGITS = auto()
    """A sequence is to be fed a chunk whose logits are asked for: the chunk, and whether the pass is undone."""
    FORWARD = auto()
    """The model is to run on tokens: the batch and the tokens."""
    RUN_AHEAD = auto()
    """The next pass is to be started before this one's tokens are read."""
    STEP_BACK = auto()
    """A pass that was run ahead is to be undone."""
    COPY_OUT = auto()
    """What a sequence shares is to be copied, so that it can end or be reopened: the sequence."""
    GUESSED = auto()
    """A head or companion has guessed tokens: the sequence and the list of tokens, which the action may change."""


ACTIONS: dict[Failpoint, Callable[..., object]] = {}
"""Those of the test that is running."""


def reach(point: Failpoint, *what: object) -> object:
    """Call the action of this failpoint and return what it returns; None if it has no action."""
    action = ACTIONS.get(point)
    return None if action is None else action(*what)
