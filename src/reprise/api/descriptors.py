"""How many connections the file descriptors of this process allow."""

import resource

_RESERVED = 384
"""For listeners, pipes, files of the model and of the disk cache, and connections that are accepted in one go."""


def raise_descriptor_limit(num_connections: int) -> int:
    """Ask the system for as many descriptors as these connections need; gives how many connections there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + _RESERVED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (ValueError, OSError):
            target = soft
        soft = target
    if soft == resource.RLIM_INFINITY:
        return num_connections
    return connections_within(soft, num_connections)


def connections_within(num_descriptors: int, num_connections: int) -> int:
    """How many of the connections fit, where a part of the descriptors is for everything else."""
    return max(1, min(num_connections, num_descriptors - min(_RESERVED, num_descriptors // 2)))
