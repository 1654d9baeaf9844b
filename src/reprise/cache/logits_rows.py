"""The logits behind the last tokens of prompts, so that an exact repeat samples at once.

A row hangs on the checkpoint at the prompt's end and goes with it. Rows are few: the most recently used 32, within a
64th of the budget (with the snapshots that were taken for them), and they are the first to go when memory is short.
What is lost with a row is one token: the position before the last one stays as resumable as it was.
"""

from collections.abc import Collection

from reprise.cache.node import Checkpoint
from reprise.cache.payload import LogitsRow
from reprise.memory import Account, Memory

_MOST = 32
_SHARE = 64


class LogitsRows:
    """The rows by checkpoint, least recently used first. Charged to `Account.LOGITS`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._rows: dict[Checkpoint, LogitsRow] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def checkpoints(self) -> Collection[Checkpoint]:
        """Those that have a row, least recently used first."""
        return self._rows.keys()

    def at(self, checkpoint: Checkpoint | None) -> LogitsRow | None:
        """The logits behind this position, or None."""
        return self._rows.get(checkpoint) if checkpoint is not None else None

    def admits(self, nbytes: int) -> bool:
        """Whether a row that takes `nbytes`, its snapshot included, is kept at all within the budget."""
        return self._memory.budget is None or nbytes <= self._memory.budget // _SHARE

    @property
    def exceed_share(self) -> bool:
        """Whether there are more rows than may stay."""
        nbytes = sum(_nbytes(checkpoint, row) for checkpoint, row in self._rows.items())
        return len(self._rows) > _MOST or not self.admits(nbytes)

    # Changes.

    def keep(self, checkpoint: Checkpoint, row: LogitsRow) -> None:
        self.discard(checkpoint)
        self._rows[checkpoint] = row
        self._memory.charge(Account.LOGITS, row.nbytes)

    def use(self, checkpoint: Checkpoint) -> None:
        """A request came to this position: its row, if it has one, is the last to go."""
        row = self._rows.pop(checkpoint, None)
        if row is not None:
            self._rows[checkpoint] = row

    def discard(self, checkpoint: Checkpoint) -> None:
        """The row of this checkpoint goes, if it has one."""
        row = self._rows.pop(checkpoint, None)
        if row is not None:
            self._memory.charge(Account.LOGITS, -row.nbytes)

    def check(self) -> None:
        """AssertionError unless every row hangs on a checkpoint of the tree and is counted once."""
        assert all(checkpoint.is_in_tree for checkpoint in self._rows), "a row has outlived its position"
        self._memory.check({Account.LOGITS: sum(row.nbytes for row in self._rows.values())})


def _nbytes(checkpoint: Checkpoint, row: LogitsRow) -> int:
    return row.nbytes + (checkpoint.snapshot.nbytes if checkpoint.snapshot is not None else 0)
