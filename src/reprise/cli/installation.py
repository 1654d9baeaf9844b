"""A machine without MLX: each command says why it cannot run and what installs MLX."""

import platform
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module

from reprise.cli.refuse import refuse
from reprise.core.installation import mend_line


def mlx_fault() -> str | None:
    """Why MLX cannot be imported, with what to do, as a sentence; None: it can be."""
    try:
        import_module("mlx.core")
    except ImportError as error:
        if sys.platform == "darwin" and platform.machine() != "arm64":
            return "MLX needs a Mac with Apple silicon."
        is_missing = isinstance(error, ModuleNotFoundError)
        what = "MLX is not installed" if is_missing else f"MLX cannot be imported ({str(error).splitlines()[0]})"
        return f"{what}. Install it with: {mend_line()}"
    return None


@contextmanager
def mlx_or_refusal() -> Generator[None]:
    """Turn a failed import into a refusal, if MLX is what is missing."""
    try:
        yield
    except ImportError:
        check_mlx()
        raise


def check_mlx() -> None:
    """Refuse if MLX cannot be imported: for commands whose servers would fail one by one."""
    if fault := mlx_fault():
        refuse(fault)
