"""Where `reprise serve` keeps prefixes unless an option sets it: the platform's cache directory."""

import os
import shutil
from pathlib import Path

import platformdirs

MOST_NBYTES = 20 * 10**9
LEAST_NBYTES = 10**9
"""With less room it is not worth it."""

_OF_FREE = 10


def default_directory() -> Path:
    return platformdirs.user_cache_path("reprise", appauthor=False) / "prefixes"


def default_nbytes(directory: Path) -> int:
    """What the directory may hold: at most 20 GB, and a tenth of what would be free without it. Raises OSError."""
    existing = next(each for each in (directory, *directory.parents) if each.exists())
    held = sum(file.stat().st_size for file in directory.rglob("*.kv")) if existing == directory else 0
    return min(MOST_NBYTES, (shutil.disk_usage(existing).free + held) // _OF_FREE)


def why_unusable(directory: Path) -> str | None:
    """Why prefixes cannot be kept there; None: they can."""
    existing = next(each for each in (directory, *directory.parents) if each.exists())
    try:
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            return f"{existing} is not writable"
        if default_nbytes(directory) < LEAST_NBYTES:
            return "the disk is nearly full"
    except OSError as error:
        return f"{existing}: {error.strerror}"
    return None
