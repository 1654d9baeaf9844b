"""What MLX holds, for tests that compare it before and after something."""

import gc

import mlx.core as mx


def active_memory() -> int:
    """Bytes in use, less what earlier tests left behind in circles of references: that would go meanwhile."""
    gc.collect()
    return settled_memory()


def settled_memory() -> int:
    """Bytes in use once this thread's operations are done: until then MLX holds what they read and wrote, and on a busy
    machine a pass that nobody waits for any more is under way for long."""
    mx.synchronize()
    return mx.get_active_memory()
