"""Recurrent state that a model works on: one row for each sequence, without padding.

mlx-lm's models ask it for `[i]`, `make_mask`, `lengths` and `advance` (`tests/engine/test_contract.py` notices a
change).
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache


class StateLayer(ArraysCache):
    """Recurrent state: arrays with one row for each sequence. mlx-lm's class, with rows that join and leave.

    It derives from `ArraysCache` because some models ask for that class by name.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)

    @property
    def arrays(self) -> list[mx.array | None]:
        return self.cache

    @arrays.setter
    def arrays(self, value: list[mx.array | None]) -> None:
        self.cache = value

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.cache if array is not None)

    def take(self, row: int) -> None:
        """Keep this row only, in arrays of its own."""
        self.cache = [None if a is None else mx.array(a[row : row + 1]) for a in self.cache]

    def keep_rows(self, rows: Sequence[int]) -> None:
        picked = mx.array(list(rows))
        self.cache = [None if a is None else a[picked] for a in self.cache]

    def join(self, others: Sequence["StateLayer"]) -> None:
        """Add the rows of `others` behind these. All are fresh, or none is."""
        columns = zip(self.cache, *(other.cache for other in others), strict=True)
        joined: list[mx.array | None] = []
        for column in columns:
            present = [a for a in column if a is not None]
            assert len(present) in (0, len(column)), "fresh rows join fresh rows only"
            joined.append(mx.concatenate(present, axis=0) if present else None)
        self.cache = joined
