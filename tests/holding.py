"""What MLX holds, for tests that compare it before and after something."""

import gc

import mlx.core as mx


def active_memory() -> int:
    """Bytes in use, less what earlier tests left behind in circles of references: that would go meanwhile.

    Nor are buffers kept that earlier tests have freed: MLX takes one for an array that is up to 8 KB smaller, and
    counts all of it.
    """
    gc.collect()
    nbytes = settled_memory()
    mx.clear_cache()
    return nbytes


def settled_memory() -> int:
    """Bytes in use once this thread's operations are done: until then MLX holds what they read and wrote, and on a busy
    machine a pass that nobody waits for any more is under way for long."""
    mx.synchronize()
    return mx.get_active_memory()
