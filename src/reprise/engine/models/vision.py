"""Which models are loaded to see images: decided from a folder's files.

The source is mlx-vlm (`vlm_source.py`), an extra. A model that is not loaded from it is mlx-lm's, for text alone.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reprise.core.images import ImageFile, digest_of
from reprise.core.installation import mend_line

TEXT_ALONE: Mapping[str, str] = {
    "gemma3n": "mlx-vlm's layers for it read entries past the cache's interface",
}
"""Model type → why it is loaded for text alone."""

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def has_source() -> bool:
    """Whether the extra is installed."""
    return find_spec("mlx_vlm") is not None


def is_of_source(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is one of a model that the source has."""
    if not isinstance(config.get("vision_config"), dict) or not has_source():
        return False
    from reprise.engine.models.vlm_source import supports  # noqa: PLC0415 (an extra, and takes seconds)

    return supports(config)


def why_blind(config: Mapping[str, Any], *, has_tower: bool, images: str = "auto", is_whole: bool = True) -> str | None:
    """Why a model is loaded for text alone, as the end of a sentence; empty: it could not see; None: it will see.

    `has_tower`: whether there are such weights. `is_whole`: it is not one rank's part of a model.
    """
    if images == "off" or not has_tower or not isinstance(config.get("vision_config"), dict):
        return ""
    if not is_whole:
        return "it runs on several ranks"
    if (reason := TEXT_ALONE.get(str(config.get("model_type")))) is not None:
        return reason
    if not has_source():
        return f"it could see images, with an extra: {mend_line('vision')}"
    return None if is_of_source(config) else "mlx-vlm does not have its type"


def blank_image(width: int, height: int) -> ImageFile:
    """An image of one colour, as a PNG file."""
    return image_of_pixels(bytes(3 * width * height), width, height)


def image_of_pixels(pixels: bytes, width: int, height: int) -> ImageFile:
    """An image of these pixels, row by row in RGB, as a PNG file."""
    lines = b"".join(b"\0" + pixels[3 * width * row : 3 * width * (row + 1)] for row in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return ImageFile(content=content, digest=digest_of(content), width=width, height=height)


def digest_of_processor(directory: Path) -> str:
    """A digest of the files that say how images are cut and scaled."""
    hashed = hashlib.blake2b(digest_size=16)
    for name in _PROCESSOR_FILES:
        file = directory / name
        hashed.update(name.encode() + b"\0" + (file.read_bytes() if file.is_file() else b"") + b"\0")
    return hashed.hexdigest()
