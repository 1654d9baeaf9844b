"""What MLX's launcher says in the environment of a rank: the backend, the number of ranks, and where rank 0 is."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path

RING, JACCL = "ring", "jaccl"


def backend_of(environment: Mapping[str, str]) -> str | None:
    """The backend by which the ranks of a launcher meet; None: this process is none of them."""
    if not environment.get("MLX_RANK", "").isdecimal():
        return None
    if environment.get("MLX_HOSTFILE"):
        return RING
    # RDMA over Thunderbolt, as a mesh or as a ring.
    return JACCL if environment.get("MLX_IBV_DEVICES") and environment.get("MLX_JACCL_COORDINATOR") else None


def num_ranks_of(environment: Mapping[str, str]) -> int | None:
    """How many ranks the launcher's file lists; None: it cannot be read, which joining the group reports."""
    place = environment.get("MLX_HOSTFILE") or environment.get("MLX_IBV_DEVICES") or ""
    try:
        return max(1, len(json.loads(Path(place).read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):
        return None


def host_of_rank_0(environment: Mapping[str, str]) -> str:
    """The address of rank 0 by which the others can reach it."""
    coordinator = environment.get("MLX_JACCL_COORDINATOR", "")
    if coordinator and not environment.get("MLX_HOSTFILE"):
        return coordinator.rpartition(":")[0].strip("[]")
    try:
        hosts = json.loads(Path(environment["MLX_HOSTFILE"]).read_text(encoding="utf-8"))
        return str(hosts[0][0]).rpartition(":")[0].strip("[]")
    except (KeyError, OSError, ValueError, IndexError, TypeError):
        return socket.gethostname()
