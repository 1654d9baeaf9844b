"""Opens the disk cache in the settings for a loaded model, and closes it."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from threading import Thread

from reprise.core.errors import DiskUnusable
from reprise.core.options import OFF
from reprise.core.settings import Settings
from reprise.core.sizes import Share
from reprise.disk.default_place import default_directory
from reprise.disk.folders.bucket import is_url, open_bucket
from reprise.disk.folders.model_directory import file_system_nbytes
from reprise.disk.sparing import spared_writes
from reprise.disk.store.cache import DiskCache
from reprise.engine.models.load import LoadedModel
from reprise.engine.running.records import runtime_id, why_not_persistable
from reprise.engine.running.runner import footprint_of
from reprise.quiet import why_quiet

log = logging.getLogger("reprise.loop")

BLOCK = 512
"""Tokens per block, unless entries are large."""

_LEAST_BLOCK = 64
FILE_NBYTES = 8 << 20
"""If entries are large, blocks are halved to about this many bytes: what follows the last whole block of a path, half a
block on average, is written again for each tail record."""

CLOSED_WITHIN_S = 20.0
"""Time limit for writing what is queued for files when the cache is closed."""

_READ_AHEAD_NBYTES = 64 << 20
"""Limit of what was read and not decoded yet, which is not part of the budget."""


def close_soon(disk: DiskCache | None) -> None:
    """Close a disk cache, if there is one, on another thread."""
    if disk is not None:
        Thread(target=disk.close, args=(CLOSED_WITHIN_S,), name="reprise-disk-close", daemon=True).start()


def open_disk(settings: Settings, loaded: LoadedModel, *, block: int | None = None) -> DiskCache | None:
    """The disk cache in the settings, or None. Raises DiskUnusable.

    Waits for the directory's lock and reads the headers of all records. `block`: tokens per block; None: chosen for the
    model.
    """
    # An embedder has no layer states.
    if loaded.embedder is not None or settings.disk_directory in (None, OFF) or not settings.has_prefix_cache:
        return None
    reason = why_not_persistable(loaded.blueprint)
    if reason is not None:
        log.warning("Prefixes of %s are not stored on disk: %s.", loaded.name, reason)
        return None
    place, footprint = settings.disk_directory, footprint_of(loaded.model, loaded.blueprint)
    is_default = Path(place) == default_directory()
    if loaded.parts_elsewhere is not None and is_url(place):
        raise DiskUnusable("An object store cannot be used with --tensor-parallel: give a directory for --disk-cache.")
    directory = open_bucket(place) if is_url(place) else Path(place).expanduser()
    if block is None:
        block = BLOCK
        while block > _LEAST_BLOCK and block * footprint.full > FILE_NBYTES:
            block //= 2
    if isinstance(directory, Path):
        max_bytes = settings.disk_bytes.of(file_system_nbytes(directory))
    elif isinstance(settings.disk_bytes, Share):
        raise DiskUnusable("--disk-bytes must be a size such as 500GB here: an object store has no size.")
    else:
        max_bytes = settings.disk_bytes.nbytes
    least = 2 * (block * footprint.full + footprint.checkpoint)
    # The same weights give different states with another version or device.
    fingerprint = f"{loaded.fingerprint} {runtime_id()}"
    resumes_anywhere = loaded.blueprint.layout.resumes_anywhere
    parts = None
    if loaded.parts_elsewhere is not None:
        parts = loaded.parts_elsewhere.open(fingerprint=fingerprint, block=block, resumes_anywhere=resumes_anywhere)
        max_bytes = min(max_bytes, parts.max_bytes)
    if max_bytes < least and is_default:
        log.warning("Prefixes of %s are not stored on disk: there is too little room. Set --disk-bytes.", loaded.name)
        return None
    if max_bytes < least:
        raise DiskUnusable(f"--disk-bytes is {max_bytes:,}; this model needs at least {least:,}.")
    writes = None
    if isinstance(directory, Path):
        daily = settings.disk_daily_writes.of(file_system_nbytes(directory))
        quiet = partial(why_quiet, settings.background)
        writes = spared_writes(directory, daily if daily > 0 else None, why_quiet=quiet)
    disk = DiskCache(
        directory,
        fingerprint=fingerprint,
        max_bytes=max_bytes,
        block=block,
        resumes_anywhere=resumes_anywhere,
        read_ahead_bytes=_READ_AHEAD_NBYTES,
        elsewhere=loaded.parts_elsewhere,
        writes=writes,
    )
    if parts is not None:
        disk.agree(parts.keys)
    return disk
