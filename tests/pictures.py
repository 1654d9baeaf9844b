"""Small image files for tests, made by hand or with Pillow."""

import base64
import io
import struct
import zlib
from typing import Any

import pytest

Pictures: Any = pytest.importorskip("PIL.Image", reason="needs the extra `vision`")


def png(width: int = 48, height: int = 32, color: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    """A PNG of one color."""
    return encoded(Pictures.new("RGB", (width, height), color), "PNG")


def encoded(picture: Any, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, form, **options)
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has so many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    )


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64_of(content)}"
