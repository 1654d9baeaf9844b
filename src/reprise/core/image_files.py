"""Image files from clients: their headers, which are read when they come, and their pixels, which are decoded later.

Pillow reads both. It is imported here, and only for a request with images: it belongs to the extra for models that see.
Nothing is decoded before the size that the header declares is known to be allowed, and a decoder stops at that size.
"""

from __future__ import annotations

import io
from contextlib import contextmanager
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
    with _decoding(where), _opened(content) as picture:
        width, height = picture.size
    _check_size(width, height, max_pixels=max_pixels, where=where)
    with _known_lock:
        return _KNOWN.setdefault(
            digest, ImageFile(content=content, digest=digest, width=width, height=height, detail=detail)
        )


def pixels_of(image: ImageFile) -> Picture:
    """The image as a viewer shows it: its first frame, turned as its camera says, in RGB without transparency.

    Color profiles are not applied, as in transformers. Raises UnreadableImage for a file that cannot be decoded.
    """
    from PIL import ImageOps  # noqa: PLC0415 (an extra)

    with _decoding(None), _opened(image.content) as picture:
        picture.load()
        shown = ImageOps.exif_transpose(_in_eight_bits(picture)).convert("RGB")
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


def _in_eight_bits(picture: Picture) -> Picture:
    """The same with 8 bits a channel: Pillow cuts off what is more, and white would stay as all grays above 255."""
    if not picture.mode.startswith(("I", "F")):
        return picture
    wide = picture.convert("I") if picture.mode != "F" else picture
    return wide.point(lambda value: value / 257, "F").convert("L")


@contextmanager
def _opened(content: bytes) -> Generator[Picture]:
    try:
        from PIL import Image as Pictures  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise BadRequest(f"This server cannot read images: it needs {INSTALL}.") from error
    # Sizes are checked here: Pillow's own limit is a warning, at another number.
    Pictures.MAX_IMAGE_PIXELS = None
    with Pictures.open(io.BytesIO(content), formats=FORMATS) as picture:
        yield picture


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
