"""Images in the messages of a chat."""

import base64
import io
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol, cast


class Picture(Protocol):
    """An image of Pillow's, as far as it is used: it can be converted, and written to a file."""

    @property
    def mode(self) -> str: ...
    def convert(self, mode: str) -> Any: ...
    def save(self, fp: Any, format: str) -> None: ...  # noqa: A002 (Pillow's name)


class Image:
    """An image for a message: `chat.send(["What is this?", reprise.Image("a.png")])`.

    `source`: a path, the bytes of a file, or an image of Pillow's. A file is read now. With `detail` "low" the model
    sees at most 512 pixels in each direction. Two images are one to the cache if their files are the same bytes: keep
    the object, or the file, and send it again as it is.
    """

    def __init__(
        self,
        source: str | PathLike[str] | bytes | Picture,
        *,
        detail: Literal["auto", "low", "high"] = "auto",
    ) -> None:
        if isinstance(source, bytes | bytearray):
            self.content = bytes(source)
        elif isinstance(source, str | PathLike):
            self.content = Path(source).read_bytes()
        else:
            self.content = _png(source)
        self.detail = detail

    def __repr__(self) -> str:
        return f"Image({len(self.content):,} bytes)"

    @property
    def part(self) -> dict[str, Any]:
        """The part of a message in OpenAI's form, as `Chat.messages` has it."""
        url = "data:;base64," + base64.b64encode(self.content).decode()
        return {"type": "image_url", "image_url": {"url": url, "detail": self.detail}}


Content = str | Image | Sequence[str | Image | Mapping[str, Any]]
"""What a message says and shows, in this order; a mapping is a part in OpenAI's form."""


def parts_of(content: Content) -> str | list[dict[str, Any]]:
    """The content of a message in OpenAI's form."""
    if isinstance(content, str):
        return content
    parts = [content] if isinstance(content, Image) else content
    return [_part(part) for part in parts]


def _part(part: str | Image | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(part, Image):
        return part.part
    return {"type": "text", "text": part} if isinstance(part, str) else dict(part)


_PNG_MODES = frozenset(("1", "L", "LA", "I", "I;16", "I;16B", "P", "RGB", "RGBA"))


def _png(picture: Picture) -> bytes:
    """The picture as a viewer shows it: a PNG has neither inks nor, as Pillow writes it, the camera's turn."""
    from PIL import ImageOps  # noqa: PLC0415 (an extra: whoever has a picture has it)

    turned = cast(Picture, ImageOps.exif_transpose(cast(Any, picture)))
    file = io.BytesIO()
    (turned if turned.mode in _PNG_MODES else turned.convert("RGB")).save(file, "PNG")
    return file.getvalue()
