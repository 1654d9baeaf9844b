"""Deep copies of caches of unknown classes, with their own arrays.

Python's pickle can take apart and rebuild any object: without a `__dict__`, with containers of any class, with shared
references. It is used for that only: nothing is read from or written to files, and arrays are never serialized.
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
    """A copy of some objects. `beside`: the arrays in them, and objects that cannot be copied and stay shared."""

    structure: bytes
    beside: tuple[Any, ...]

    @property
    def arrays(self) -> list[mx.array]:
        return [kept for kept in self.beside if isinstance(kept, mx.array)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def thaw(self) -> list[Any]:
        """New copies of the objects, with their own arrays: changing them does not affect what is frozen."""
        return cast(list[Any], _Unpickler(self.structure, [_own(kept) for kept in self.beside]).load())


def freeze(objects: Sequence[Any]) -> Frozen:
    """Copy these objects together: what two of them share, their copies share."""
    seen = look_into(objects)
    frozen = Frozen(seen.structure, tuple(_own(kept) for kept in seen.beside))
    mx.eval(frozen.arrays)
    return frozen


def look_into(objects: Sequence[Any]) -> Frozen:
    """Like `freeze`, but with the arrays themselves instead of copies."""
    if not objects:
        # The common case, in every step: a model without such layers.
        return _NOTHING
    structure = io.BytesIO()
    pickler = _Pickler(structure)
    pickler.dump(list(objects))
    return Frozen(structure.getvalue(), tuple(pickler.beside))


def _own(kept: Any) -> Any:
    return mx.array(kept) if isinstance(kept, mx.array) else kept


class _Pickler(pickle.Pickler):
    """Pickles objects, and puts arrays and what cannot be pickled into `beside`."""

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


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: bytes, beside: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(structure))
        self._beside = beside

    def persistent_load(self, pid: int) -> Any:
        return self._beside[pid]


def _can_be_copied(value: Any) -> bool:
    try:
        value.__reduce_ex__(4)
    except Exception:
        # Classes, functions, modules, locks, MLX's dtypes and devices.
        return False
    return True


_NOTHING = Frozen(pickle.dumps([]), ())
