from typing import Any

from mlx import nn
from mlx.core import array

class KVCache: ...
class ConcatenateKVCache: ...

class QuantizedKVCache:
    group_size: int
    bits: int

class RotatingKVCache:
    keep: int
    max_size: int

class ChunkedKVCache:
    chunk_size: int

class ArraysCache:
    cache: list[array | None]
    def __init__(self, size: int) -> None: ...

class CacheList:
    caches: tuple[Any, ...]
    def __init__(self, *caches: Any) -> None: ...

def make_prompt_cache(model: nn.Module) -> list[Any]: ...
