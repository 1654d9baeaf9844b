"""What Reprise uses of `mlx.core.linalg`."""

from mlx.core import array

def norm(a: array, *, axis: int | None = None, keepdims: bool = False) -> array: ...
