from typing import Any

from mlx.core import array

def create_causal_mask(
    N: int,
    offset: int = 0,
    window_size: int | None = None,
    right_padding: array | None = None,
    left_padding: array | None = None,
) -> array: ...
def create_attention_mask(
    h: array, cache: Any = None, window_size: int | None = None, return_array: bool = False
) -> array | str | None: ...
