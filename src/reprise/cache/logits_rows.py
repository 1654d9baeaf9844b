"""The logits after the last tokens of prompts, so that an exact repeat samples without a forward pass.

A row belongs to the checkpoint at the prompt's end and is dropped with it. At most the 32 most recently used rows are
kept, within a 64th of the budget (including the snapshots taken for them), and they are evicted before anything else.
Losing a row costs the few tokens behind the last checkpoint, in the one pass that an answer begins with anyway.
"""

from collections.abc import Collection

from reprise.cache.node import Checkpoint
from reprise.cache.payload import Payload
from reprise.memory import Account, Memory

_MOST = 32
_SHARE = 64


class LogitsRows:
    """The rows by checkpoint, least recently used first. Charged to `Account.LOGITS`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._rows: dict[Checkpoint, Payload] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def checkpoints(self) -> Collection[Checkpoint]:
        """The checkpoints that have a row, least recently used first."""
        return self._rows.keys()

    def at(self, checkpoint: Checkpoint | None) -> Payload | None:
        """The logits at this position, or None."""
        return self._rows.get(checkpoint) if checkpoint is not None else None

    def admits(self, nbytes: int) -> bool:
        """Whether a row of `nbytes`, including its snapshot, is small enough for the budget."""
        return self._memory.budget is None or nbytes <= self._memory.budget // _SHARE

    @property
    def exceed_share(self) -> bool:
        """Whether there are more rows than may be kept."""
        nbytes = sum(_nbytes(checkpoint, row) for checkpoint, row in self._rows.items())
        return len(self._rows) > _MOST or not self.admits(nbytes)

    # Changes.

    def keep(self, checkpoint: Checkpoint, row: Payload) -> None:
        self.discard(checkpoint)
        self._rows[checkpoint] = row
        self._memory.charge(Account.LOGITS, row.nbytes)

    def use(self, checkpoint: Checkpoint) -> None:
        """Mark the row at this checkpoint, if any, as most recently used."""
        row = self._rows.pop(checkpoint, None)
        if row is not None:
            self._rows[checkpoint] = row

    def discard(self, checkpoint: Checkpoint) -> None:
        """Drop the row of this checkpoint, if any."""
        row = self._rows.pop(checkpoint, None)
        if row is not None:
            self._memory.charge(Account.LOGITS, -row.nbytes)

    def check(self) -> None:
        """AssertionError unless every row belongs to a checkpoint in the tree and is charged once."""
        assert all(checkpoint.is_in_tree for checkpoint in self._rows), "a row outlived its checkpoint"
        self._memory.check({Account.LOGITS: sum(row.nbytes for row in self._rows.values())})


def _nbytes(checkpoint: Checkpoint, row: Payload) -> int:
    return row.nbytes + (checkpoint.snapshot.nbytes if checkpoint.snapshot is not None else 0)
