"""Resource limits of the process, checked before MLX is imported: later failures do not name the limit."""

import resource
from pathlib import Path

from reprise.cli.refuse import refuse
from reprise.core.sizes import nbytes_text

LEAST_DESCRIPTORS = 4096
"""mlx-lm sets the hard limit of open files to this many when it is imported, and fails where that would raise it."""

_LEAST_ADDRESS_SPACE = 2**30
"""Address space for Python, MLX and their libraries, besides the weights. With less they abort silently."""


def check_process_limits(model: str) -> None:
    """Refuse to start under limits (`ulimit`) that are too low to load the model. `model`: a directory or a hub id."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < LEAST_DESCRIPTORS:
        refuse(
            f"This process may open only {most} files, but mlx-lm needs {LEAST_DESCRIPTORS}. "
            f"Raise the hard limit: `ulimit -Hn {LEAST_DESCRIPTORS}`, or LimitNOFILE= of a systemd unit."
        )
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed = _LEAST_ADDRESS_SPACE + weights_nbytes(Path(model).expanduser())
    if space != resource.RLIM_INFINITY and space < needed:
        refuse(
            f"This process may use only {nbytes_text(space)} of address space (`ulimit -v`), but needs "
            f"{nbytes_text(needed)} for its libraries and the model. Raise that limit, and use --memory instead."
        )


def weights_nbytes(directory: Path) -> int:
    """The size of the weights in a model directory; 0 for a hub id."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors")) if directory.is_dir() else 0
