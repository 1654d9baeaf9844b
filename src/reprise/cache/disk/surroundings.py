"""What lies below the directory beside our own folder: other models' files, quarantine, whatever else."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from reprise.cache.disk.files import Seen, is_locked, listing

QUARANTINE = "quarantine"
LOCK = "lock"
RECORD_ENDING = ".kv"
TEMPORARY_ENDING = ".tmp"

_MODEL = re.compile(r"[0-9a-f]{16}")
_RECORD = re.compile(r"[0-9a-f]{64}(\.kv|\.tmp)")

# A folder that changed within so long before it was listed could change again and show the same time.
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """A folder as it was when it was last changed."""

    changed_ns: int
    is_settled: bool
    files: tuple[Seen, ...]
    folders: tuple[Path, ...]
    nbytes: int


class Surroundings:
    """The files below `directory` that are not below `own`, as they were when last looked at."""

    def __init__(self, directory: Path, own: Path) -> None:
        self._directory = directory
        self._own = own
        self._listings: dict[Path, _Listing] = {}
        self.nbytes = 0

    def look(self, now_ns: int) -> None:
        """Look again; `now_ns` is the file system's own time. O(folders) and what has changed. Raises OSError."""
        listings: dict[Path, _Listing] = {}
        unseen = [self._directory]
        while unseen:
            folder = unseen.pop()
            try:
                changed_ns = folder.stat().st_mtime_ns
            except FileNotFoundError:
                continue
            known = self._listings.get(folder)
            if known is None or not known.is_settled or known.changed_ns != changed_ns:
                files, folders = listing(folder)
                known = _Listing(
                    changed_ns=changed_ns,
                    is_settled=now_ns - changed_ns > _SETTLED_NS,
                    files=files,
                    folders=folders,
                    nbytes=sum(seen.nbytes for seen in files),
                )
            listings[folder] = known
            unseen += [inner for inner in known.folders if inner != self._own]
        self._listings = listings
        self.nbytes = sum(known.nbytes for known in listings.values())

    def evictable(self) -> list[Seen]:
        """The files that may go, in that order: quarantine, then those of models that nobody serves now, oldest first.

        A live server's files are its own. Whoever starts one waits for the directory's lock, which the caller holds.
        """
        quarantined = self._listings.get(self._directory / QUARANTINE)
        # As if they had never been used: nothing is worth less.
        first = [replace(seen, mtime_ns=0) for seen in quarantined.files] if quarantined is not None else []
        models = [inner for inner in self._listings[self._directory].folders if inner != self._own]
        dead = [model for model in models if _MODEL.fullmatch(model.name) and not is_locked(model / LOCK)]
        return first + sorted((seen for model in dead for seen in self._records(model)), key=_age)

    def _records(self, model: Path) -> Iterator[Seen]:
        for inner in self._listings[model].folders if model in self._listings else ():
            if inner in self._listings:
                yield from (seen for seen in self._listings[inner].files if _RECORD.fullmatch(seen.path.name))


def _age(seen: Seen) -> int:
    return seen.mtime_ns
