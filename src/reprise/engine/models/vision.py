"""Which models are loaded to see images: decided from a folder's files.

The source is mlx-vlm (`vlm_source.py`), an extra. A model that is not loaded from it is mlx-lm's, for text alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reprise.core.installation import mend_line
from reprise.engine.models.model_files import WeightsSummary

log = logging.getLogger(__name__)

_TEXT_ALONE: Mapping[str, str] = {
    "gemma3n": "mlx-vlm's layers for it read entries past the cache's interface",
    "llama4": "mlx-vlm's processor writes placeholders for a tile that it does not cut, and has no rows for them",
}
"""Model type → why it is loaded for text alone."""

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def could_see(config: Mapping[str, Any], summary: WeightsSummary) -> bool:
    """Whether a folder has a tower: in its configuration and among its weights."""
    return isinstance(config.get("vision_config"), dict) and bool(config["vision_config"]) and summary.has_tower


def has_source() -> bool:
    """Whether the extra is installed."""
    return find_spec("mlx_vlm") is not None


def is_to_see(config: Mapping[str, Any], summary: WeightsSummary, source: str, *, images: str, is_whole: bool) -> bool:
    """Whether to load a model so that it sees. Where it could and will not, the log says why.

    `is_whole`: it is not one rank's part of a model.
    """
    if images == "off" or not could_see(config, summary):
        return False
    reason = _TEXT_ALONE.get(str(config.get("model_type")))
    if not is_whole:
        log.info("%s runs on several ranks, so it takes text alone", source)
    elif reason is not None:
        log.info("%s takes text alone: %s", source, reason)
    elif not has_source():
        log.info("%s could see images, with an extra: %s", source, mend_line("vision"))
    else:
        from reprise.engine.models.vlm_source import SOURCE, supports  # noqa: PLC0415 (an extra, and takes seconds)

        if supports(config):
            return True
        log.info("%s takes text alone: %s does not have its type", source, SOURCE)
    return False


def digest_of_processor(directory: Path) -> str:
    """A digest of the files that say how images are cut and scaled."""
    hashed = hashlib.blake2b(digest_size=16)
    for name in _PROCESSOR_FILES:
        file = directory / name
        hashed.update(name.encode() + b"\0" + (file.read_bytes() if file.is_file() else b"") + b"\0")
    return hashed.hexdigest()
