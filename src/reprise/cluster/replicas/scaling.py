"""How many replicas are wanted: a decision without Ray."""

from collections.abc import Sequence

MEMORY = "memory"
"""The metric that replicas report: the share of the memory budget that running requests hold."""


def replicas_wanted(
    *, num_requests: float, per_replica: float, memory: Sequence[float], target_memory: float, num_now: int
) -> float:
    """So many that neither the queue nor running requests' memory is over its target in the mean.

    `num_requests`: running and waiting, of all replicas; `memory`: each replica's share of its budget that running
    requests hold, in [0, 1]. What the cache holds beside them does not count: it gives way.
    """
    if num_now == 0:
        return 1.0 if num_requests > 0 else 0.0
    # A replica that has just started has not reported yet: it is taken to be like the others.
    held = sum(memory) * num_now / len(memory) if memory else 0.0
    return max(num_requests / per_replica, held / target_memory)
