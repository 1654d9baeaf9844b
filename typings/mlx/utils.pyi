from collections.abc import Sequence
from typing import Any

from mlx.core import array

def tree_flatten(tree: dict[str, Any]) -> list[tuple[str, array]]: ...
def tree_unflatten(tree: Sequence[tuple[str, Any]]) -> dict[str, Any]: ...
