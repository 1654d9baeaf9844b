"""What MLX holds, for tests that compare it before and after something."""

import gc

import mlx.core as mx


def active_memory() -> int:
    """Bytes in use, less what earlier tests left behind in circles of references: that would go meanwhile."""
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()
