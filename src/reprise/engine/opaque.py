"""Copies of caches whose class is not known: whatever they hold, with arrays of their own.

Python's pickling knows how to take any object apart and put it together again: one without a `__dict__`, containers of
any class, several names of one thing. It is used for that alone: nothing is written to a file or read from one, and
arrays never become bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """Objects as they were. `beside`: the arrays in them, and what cannot be copied and so stays shared."""

    structure: bytes
    beside: tuple[Any, ...]

    @property
    def arrays(self) -> list[mx.array]:
        return [kept for kept in self.beside if isinstance(kept, mx.array)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def thaw(self) -> list[Any]:
        """The objects again, with arrays of their own: whatever happens to them, what is frozen stays as it is."""
        return cast(list[Any], _Joiner(self.structure, [_own(kept) for kept in self.beside]).load())


def freeze(objects: Sequence[Any]) -> Frozen:
    """Copies of all these objects together: what two of them share, their copies share."""
    seen = look_into(objects)
    frozen = Frozen(seen.structure, tuple(_own(kept) for kept in seen.beside))
    mx.eval(frozen.arrays)
    return frozen


def look_into(objects: Sequence[Any]) -> Frozen:
    """The same with the arrays themselves and not copies of them."""
    if not objects:
        # What every step asks of a model without such layers.
        return _NOTHING
    structure = io.BytesIO()
    taker = _Taker(structure)
    taker.dump(list(objects))
    return Frozen(structure.getvalue(), tuple(taker.beside))


def _own(kept: Any) -> Any:
    return mx.array(kept) if isinstance(kept, mx.array) else kept


class _Taker(pickle.Pickler):
    """Takes objects apart, and puts aside what is not to be pickled."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=4)
        self.beside: list[Any] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, mx.array) and _can_be_copied(obj):
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.beside)
            self.beside.append(obj)
        return self._places[id(obj)]


class _Joiner(pickle.Unpickler):
    def __init__(self, structure: bytes, beside: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(structure))
        self._beside = beside

    def persistent_load(self, pid: int) -> Any:
        return self._beside[pid]


def _can_be_copied(value: Any) -> bool:
    try:
        value.__reduce_ex__(4)
    except Exception:
        # How classes, functions, modules, locks, MLX's data types and devices say that there is nothing to copy.
        return False
    return True


_NOTHING = Frozen(pickle.dumps([]), ())
