from typing import Any

from mlx.core import array

def tree_flatten(tree: dict[str, Any]) -> list[tuple[str, array]]: ...
