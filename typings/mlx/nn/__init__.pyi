from typing import Any

from mlx.core import array

class Module:
    def parameters(self) -> dict[str, Any]: ...
    def __call__(self, inputs: array, *, cache: list[Any]) -> array: ...
