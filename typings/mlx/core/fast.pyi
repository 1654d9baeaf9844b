"""What Reprise uses of `mlx.core.fast`."""

from mlx.core import array

def rope(a: array, dims: int, *, traditional: bool, base: float | None, scale: float, offset: int | array) -> array: ...
def scaled_dot_product_attention(
    q: array, k: array, v: array, *, scale: float, mask: array | str | None = None
) -> array: ...
