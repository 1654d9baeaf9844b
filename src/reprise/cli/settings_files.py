"""Changes other programs' settings files so that each change can be undone exactly.

The original is kept in one file for each program until it is restored. A second change keeps the first's
original, so what is restored is what the person had.
"""

import base64
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from reprise.core.errors import RepriseError


class SettingsConflict(RepriseError):
    """A settings file cannot be changed or restored; the message says why."""

    code = "settings_conflict"


class SettingsBackups:
    """The originals of changed files, in one directory, by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, name: str, file: Path, content: bytes) -> Path:
        """Write the file and keep its original. Returns its real path, with links resolved."""
        target = file.resolve()
        before = read_settings(target)
        kept = self._read(name)
        if kept is not None and (kept["path"] != str(target) or not _is_ours(before, kept)):
            raise SettingsConflict(
                f"{kept['path']} has changed since Reprise wrote it. Run --undo (or --undo --force) first."
            )
        mode = target.stat().st_mode & 0o777 if before is not None else 0o600
        if kept is None:
            original = None if before is None else base64.b64encode(before).decode()
            kept = {"path": str(target), "mode": mode, "before": original}
        # The original first, so that it is never lost.
        body = {**kept, "after": hashlib.sha256(content).hexdigest(), "until": _digest(before)}
        replace_file(self._place(name), json.dumps(body).encode(), mode=0o600)
        replace_file(target, content, mode=mode)
        return target

    def restore(self, name: str, *, is_forced: bool = False) -> Path:
        """Restore the original. `is_forced`: even if the file was changed since. Raises SettingsConflict."""
        kept = self._read(name)
        if kept is None:
            raise SettingsConflict(f"There are no settings to restore for {name}.")
        target = Path(kept["path"])
        now = read_settings(target)
        if not is_forced and not _is_ours(now, kept):
            raise SettingsConflict(
                f"{target} has changed since Reprise wrote it. --undo --force restores the original anyway."
            )
        if kept["before"] is None:
            target.unlink(missing_ok=True)
        else:
            replace_file(target, base64.b64decode(kept["before"]), mode=kept["mode"])
        self._place(name).unlink()
        return target

    def _place(self, name: str) -> Path:
        return self._directory / f"{name}.json"

    def _read(self, name: str) -> dict[str, Any] | None:
        """What is kept of a file. A backup that cannot be read is moved aside and named."""
        place = self._place(name)
        content = read_settings(place)
        if content is None:
            return None
        try:
            kept: Any = json.loads(content)
            is_whole = all(isinstance(kept[key], str) for key in ("path", "after")) and isinstance(kept["mode"], int)
            is_whole = is_whole and isinstance(kept["until"], str | None)
            base64.b64decode(kept["before"] or "", validate=True)
        except (ValueError, TypeError, KeyError):
            is_whole, kept = False, None
        if is_whole:
            return kept
        aside = place.with_suffix(".damaged")
        place.replace(aside)
        raise SettingsConflict(
            f"The backup of the settings is damaged. It is now {aside}, and the settings are as they were: check them, "
            "and run the command again."
        )


def read_settings(file: Path) -> bytes | None:
    """The content of a settings file; None if there is none. Raises SettingsConflict for what is no file."""
    if not file.exists():
        return None
    if not file.is_file():
        # A pipe would never end.
        raise SettingsConflict(f"{file} is not a regular file, so it is not changed.")
    return file.read_bytes()


def _is_ours(content: bytes | None, kept: dict[str, Any]) -> bool:
    """Whether this is what was written or, if writing was interrupted, the original."""
    return _digest(content) in (kept["after"], kept["until"])


def _digest(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def replace_file(target: Path, content: bytes, *, mode: int) -> None:
    """Write the file atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
