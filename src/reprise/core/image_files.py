"""Image files from clients: their headers, which are read when they come, and their pixels, which are decoded later.

Pillow reads both. It is imported here, and only for a request with images: it belongs to the extra for models that see.
Nothing is decoded before the size that the header declares is known to be allowed, and a decoder stops at that size.
"""

from __future__ import annotations

import io
import re
import warnings
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from reprise.core.errors import BadRequest, UnreadableImage
from reprise.core.images import ImageFile, digest_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from PIL.Image import Image as Picture

INSTALL = "the extra `vision` installed (docs/images.md)"
"""What brings Pillow, and the models that see. Clients read it, so it says nothing of where this server is."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_NAMES = "PNG, JPEG, WebP, GIF or BMP"
LOW = "low"
"""The detail with which an image has at most `LOW_PIXELS` in each direction, as in OpenAI's API."""
LOW_PIXELS = 512
_LONGEST_SIDE = 65_535

_KNOWN: WeakValueDictionary[bytes, ImageFile] = WeakValueDictionary()
"""The images that somebody has: a chat sends the same ones again and again, and they are held once."""
_known_lock = Lock()


def image_of(content: bytes, *, detail: str | None = None, max_pixels: int, where: str | None = None) -> ImageFile:
    """The image in a file, of which the header alone is read. `detail` "low" has it scaled down.

    Raises UnreadableImage for what is no image, for a kind that is not read, and for more pixels than `max_pixels`.
    """
    detail = LOW if detail == LOW else "auto"
    digest = digest_of(content, detail=detail)
    with _known_lock:
        known = _KNOWN.get(digest)
    if known is not None:
        # It may have come when more was allowed.
        _check_size(known.width, known.height, max_pixels=max_pixels, where=where)
        return known
    with _decoding(where), _opened(_File(content, most_reads=_MOST_HEADER_READS, where=where)) as picture:
        width, height = picture.size
    _check_size(width, height, max_pixels=max_pixels, where=where)
    _check_scans(content, where)
    with _known_lock:
        return _KNOWN.setdefault(
            digest, ImageFile(content=content, digest=digest, width=width, height=height, detail=detail)
        )


def pixels_of(image: ImageFile) -> Picture:
    """The image as a viewer shows it: its first frame, turned as its camera says, in RGB without transparency.

    Color profiles are not applied, as in transformers. Raises UnreadableImage for a file that cannot be decoded.
    """
    with _decoding(None), _opened(_File(image.content, most_reads=_MOST_READS)) as picture:
        picture.load()
        shown = _turned(_in_eight_bits(picture), picture.getexif().get(_ORIENTATION)).convert("RGB")
        if image.detail == LOW:
            shown.thumbnail((LOW_PIXELS, LOW_PIXELS))
        return shown


def _check_size(width: int, height: int, *, max_pixels: int, where: str | None) -> None:
    if width * height > max_pixels or max(width, height) > _LONGEST_SIDE:
        raise UnreadableImage(
            f"An image has {width} x {height} pixels; at most {max_pixels:,} in all and {_LONGEST_SIDE:,} in one "
            "direction are read. Send it smaller, or start the server with --max-image-pixels.",
            param=where,
        )
    if width < 1 or height < 1:
        raise UnreadableImage("An image has no pixels.", param=where)


def _check_scans(content: bytes, where: str | None) -> None:
    """Refuse a JPEG that goes over its pixels again and again: a scan of all of them takes 50 bytes, or fewer."""
    # Most have no more of these bytes than scans, and those that have may have them in what is no scan.
    if content.startswith(_JPEG) and content.count(_SCAN) > _MOST_SCANS and _num_scans(content) > _MOST_SCANS:
        raise UnreadableImage(
            f"An image has more than {_MOST_SCANS} scans. Send it encoded in the usual way.", param=where
        )


_JPEG, _SCAN, _END = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"
_MOST_SCANS = 100
"""A progressive JPEG has about ten."""
_MARKER = re.compile(rb"\xff[\x02-\xcf\xd9-\xfe]")
"""Of a segment; in coded pixels another byte stands behind FF."""


def _num_scans(content: bytes) -> int:
    """The scans of a JPEG before its end, or one more than are read."""
    num, at = 0, len(_JPEG)
    for _ in range(_MOST_READS):
        found = _MARKER.search(content, at)
        if found is None or found.group() == _END:
            return num
        num += found.group() == _SCAN
        if num > _MOST_SCANS:
            return num
        at = found.end() + int.from_bytes(content[found.end() : found.end() + 2])
    return _MOST_SCANS + 1


_ORIENTATION = 0x0112
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""What Pillow calls the turns that EXIF numbers, https://www.cipa.jp/std/documents/e/DC-X008-Translation-2019-E.pdf."""


def _turned(picture: Picture, orientation: Any) -> Picture:
    """As Pillow's `ImageOps.exif_transpose`, which also writes all of the EXIF anew, for seconds where it is large."""
    turn = _TURNS.get(orientation)
    return picture if turn is None else picture.transpose(_pillow().Transpose[turn])


def _in_eight_bits(picture: Picture) -> Picture:
    """The same with 8 bits a channel: Pillow cuts off what is more, and white would stay as all grays above 255."""
    if not picture.mode.startswith(("I", "F")):
        return picture
    wide = picture.convert("I") if picture.mode != "F" else picture
    return wide.point(lambda value: value / 257, "F").convert("L")


_MOST_READS = 100_000
"""Pillow reads a file part by part, in Python. An image of 20 MB has a few thousand parts."""
_MOST_HEADER_READS = 5_000
"""Of what stands before the pixels: a hundred parts are many. It is read where text requests wait."""


class _File(io.BytesIO):
    """A file of which so many parts are read at most. `where`: in a body."""

    def __init__(self, content: bytes, *, most_reads: int, where: str | None = None) -> None:
        super().__init__(content)
        self._num_left = most_reads
        self._where = where

    def read(self, size: int | None = -1, /) -> bytes:
        self._num_left -= 1
        if self._num_left < 0:
            raise UnreadableImage(
                "The file of an image has too many parts. Send it encoded in the usual way.", param=self._where
            )
        return super().read(size)


@contextmanager
def _opened(file: _File) -> Generator[Picture]:
    try:
        pillow = _pillow()
    except ImportError as error:
        raise BadRequest(f"This server cannot read images: it needs {INSTALL}.") from error
    with pillow.open(file, formats=FORMATS) as picture:
        yield picture


@cache
def _pillow() -> Any:
    """Pillow, as files of strangers are read with it. Raises ImportError."""
    from PIL import Image as Pictures  # noqa: PLC0415 (an extra)

    # Sizes are checked here: Pillow's own limit is a warning, at another number.
    Pictures.MAX_IMAGE_PIXELS = None
    # A file has as many damaged tags as it likes, and each would be a line on standard error.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Pictures


@contextmanager
def _decoding(where: str | None) -> Generator[None]:
    """Whatever a decoder raises is a sentence: it is a program for files that anybody may have made."""
    try:
        yield
    except BadRequest:
        raise
    except MemoryError as error:
        raise BadRequest("An image needs more memory than there is. Send it smaller.", param=where) from error
    except Exception as error:
        raise UnreadableImage(_fault(error), param=where) from error


def _fault(error: Exception) -> str:
    name: Any = type(error).__name__
    if name == "UnidentifiedImageError":
        return f"This is no image that is read: send {_NAMES}. SVG, HEIC and PDF have to be converted first."
    return f"An image cannot be decoded: it is damaged, or cut off. Send it again, as {_NAMES}."
