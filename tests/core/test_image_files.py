"""Image files: what is read of a header, what is refused, and what of a file the model sees."""

import io
import struct
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
from PIL import Image as Pictures
from PIL import ImageOps

from reprise.core.errors import BadRequest, UnreadableImage
from reprise.core.image_files import image_of, pixels_of
from tests.pictures import bomb, encoded, png

MANY = 50_000_000
RED = (200, 30, 30)


def test_the_header_alone_is_read_and_gives_the_size() -> None:
    content = png(300, 20)
    image = image_of(content[: len(content) // 2], max_pixels=MANY)
    assert (image.width, image.height) == (300, 20)
    with pytest.raises(BadRequest, match="damaged, or cut off"):
        pixels_of(image)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_the_usual_kinds_are_read(form: str) -> None:
    image = image_of(encoded(Pictures.new("RGB", (40, 30), RED), form), max_pixels=MANY)
    picture = pixels_of(image)
    assert (picture.mode, picture.size) == ("RGB", (40, 30))
    assert np.abs(np.asarray(picture).astype(int) - RED).max() < 8


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not an image",
        b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        b"%PDF-1.7\n",
        encoded(Pictures.new("RGB", (9, 9)), "TIFF"),
        encoded(Pictures.new("RGB", (9, 9)), "PPM"),
        encoded(Pictures.new("RGB", (32, 32)), "ICO"),
    ],
    ids=["empty", "text", "svg", "pdf", "tiff", "ppm", "ico"],
)
def test_other_kinds_are_refused_with_what_to_send(content: bytes) -> None:
    with pytest.raises(BadRequest, match="PNG, JPEG, WebP, GIF or BMP"):
        image_of(content, max_pixels=MANY)


def test_a_bomb_is_refused_by_what_it_declares() -> None:
    with pytest.raises(BadRequest, match="60000 x 60000 pixels"):
        image_of(bomb(60_000, 60_000), max_pixels=MANY)
    with pytest.raises(BadRequest, match="in one direction"):
        image_of(bomb(100_000, 1), max_pixels=MANY)
    # The same file where it may be larger, and then no more: what is known is checked again.
    content = png(100, 100)
    held = image_of(content, max_pixels=10_000)
    assert held.width == 100
    with pytest.raises(BadRequest, match="100 x 100"):
        image_of(content, max_pixels=9_999)


def test_a_file_that_holds_less_than_it_declares_is_damaged() -> None:
    with pytest.raises(BadRequest, match="damaged, or cut off"):
        pixels_of(image_of(bomb(2_000, 2_000), max_pixels=MANY))


@pytest.mark.parametrize("size", [(1, 1), (20_000, 1), (1, 20_000)])
def test_extreme_shapes_are_read(size: tuple[int, int]) -> None:
    assert pixels_of(image_of(png(*size), max_pixels=MANY)).size == size


def test_of_an_animation_the_first_frame_is_seen() -> None:
    frames = [Pictures.new("RGB", (20, 10), color) for color in (RED, (0, 0, 255))]
    for form in ("GIF", "WEBP", "PNG"):
        content = encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=50)
        picture = pixels_of(image_of(content, max_pixels=MANY))
        assert np.abs(np.asarray(picture).astype(int) - RED).max() < 8


def test_an_image_is_turned_as_its_camera_says() -> None:
    picture = Pictures.new("RGB", (40, 20), RED)
    exif = Pictures.Exif()
    exif[0x0112] = 6  # To be turned by a quarter.
    assert pixels_of(image_of(encoded(picture, "JPEG", exif=exif), max_pixels=MANY)).size == (20, 40)


@pytest.mark.parametrize("number", range(1, 10))
def test_each_turn_is_that_of_pillow(number: int) -> None:
    picture = Pictures.fromarray(np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3))
    exif = Pictures.Exif()
    exif[0x0112] = number
    said = f'<x tiff:Orientation="{number}"/>'
    for content in (encoded(picture, "PNG", exif=exif), encoded(picture, "WEBP", lossless=True, xmp=said.encode())):
        expected = ImageOps.exif_transpose(Pictures.open(io.BytesIO(content))).convert("RGB")
        seen = pixels_of(image_of(content, max_pixels=MANY))
        assert (seen.size, seen.tobytes()) == (expected.size, expected.tobytes())


def test_a_large_exif_is_not_written_anew() -> None:
    """Its turn is read, and nothing else: Pillow takes eight seconds for all of it."""
    content = png(40, 20)
    tags = struct.pack("<HHII", 0x0112, 3, 1, 6) + struct.pack("<HHII", 0x8000, 3, 9_000_000, 38)
    exif = b"II*\0\x08\0\0\0" + struct.pack("<H", 2) + tags + bytes(4) + bytes(18_000_000)
    began_s = time.process_time()
    assert pixels_of(image_of(content[:33] + _chunk(b"eXIf", exif) + content[33:], max_pixels=MANY)).size == (20, 40)
    assert time.process_time() - began_s < 4


def test_damaged_tags_are_no_lines_on_standard_error() -> None:
    tags = b"".join(struct.pack("<HHII", 0x8000 + number, 3, 9_000_000, 38) for number in range(100))
    exif = b"II*\0\x08\0\0\0" + struct.pack("<H", 100) + tags + bytes(4)
    file = encoded(Pictures.new("RGB", (40, 20)), "JPEG", exif=b"Exif\0\0" + exif)
    code = (
        "import sys; from reprise.core.image_files import image_of, pixels_of; "
        "pixels_of(image_of(sys.stdin.buffer.read(), max_pixels=999))"
    )
    ran = subprocess.run([sys.executable, "-c", code], input=file, capture_output=True, timeout=60, check=True)
    assert ran.stderr == b""


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def test_a_file_of_very_many_parts_is_refused_before_they_are_read() -> None:
    """Pillow reads each part in Python: a million takes it as long as 10 s, while others wait."""
    drawn, photo, moved = png(8, 8), *(encoded(Pictures.new("L", (8, 8)), form) for form in ("JPEG", "GIF"))
    behind = moved.index(b",", 13)
    headers = (
        drawn[:33] + _chunk(b"aaAa", b"") * 5_000 + drawn[33:],
        photo[:2] + b"\xff\xfe\x00\x02" * 5_000 + photo[2:],
    )
    for content in headers:
        with pytest.raises(UnreadableImage, match="too many parts"):
            image_of(content, max_pixels=MANY)
    files = (
        drawn[:33] + _chunk(b"aaAa", b"") * 200_000 + drawn[33:],
        drawn[:-12] + _chunk(b"aaAa", b"") * 200_000 + drawn[-12:],
        photo[:2] + b"\xff\xfe\x00\x02" * 200_000 + photo[2:],
        photo[:2] + b"\xff" * 200_000 + photo[2:],
        moved[:behind] + b"\x21\xfe\x01a\x00" * 200_000 + moved[behind:],
    )
    for content in files:
        with pytest.raises(UnreadableImage, match="too many parts"):
            pixels_of(image_of(content, max_pixels=MANY))


def test_a_png_of_small_parts_is_read() -> None:
    noise = Pictures.fromarray(np.random.default_rng(0).integers(0, 255, (900, 900, 3), dtype=np.uint8))
    head, *_ = (whole := encoded(noise, "PNG")).partition(b"IDAT")
    pixels, at = b"", len(head) - 4
    while at < len(whole):
        (length,) = struct.unpack(">I", whole[at : at + 4])
        pixels += whole[at + 8 : at + 8 + length] if whole[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + length
    parts = b"".join(_chunk(b"IDAT", pixels[start : start + 256]) for start in range(0, len(pixels), 256))
    small = head[:-4] + parts + _chunk(b"IEND", b"")
    assert pixels_of(image_of(small, max_pixels=MANY)).tobytes() == noise.tobytes()


def _scanned(num: int) -> bytes:
    """A progressive JPEG of 64 x 64 black pixels, whose scans say again and again that there is nothing more."""

    def segment(kind: int, content: bytes) -> bytes:
        return bytes((0xFF, kind)) + struct.pack(">H", len(content) + 2) + content

    tables = segment(0xDB, bytes(1) + bytes([1]) * 64) + segment(0xC2, struct.pack(">BHHB", 8, 64, 64, 1) + b"\1\x11\0")
    # One code each: "no difference", and "nothing in 2 ** 6 blocks and more, as the next 6 bits say".
    codes = [
        segment(0xC4, table + bytes([1, *bytes(15)]) + symbol) for table, symbol in ((b"\0", b"\0"), (b"\x10", b"\x60"))
    ]
    first = segment(0xDA, b"\1\1\0\0\0\0") + bytes(8)
    again = segment(0xDA, b"\1\1\0\1\x3f\0") + b"\x01"
    return b"\xff\xd8" + tables + b"".join(codes) + first + again * (num - 1) + b"\xff\xd9"


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    """Each goes over all pixels: with 50 million of them 200,000 scans, in 15 MB, take a quarter of an hour."""
    assert pixels_of(image_of(_scanned(100), max_pixels=MANY)).size == (64, 64)
    with pytest.raises(UnreadableImage, match="more than 100 scans"):
        image_of(_scanned(101), max_pixels=MANY)
    # A comment that looks like an end does not hide what is behind it.
    many = _scanned(101)
    hidden = many.replace(b"\xff\xda", b"\xff\xfe\x00\x04\xff\xd9\xff\xda", 2)
    with pytest.raises(UnreadableImage, match="more than 100 scans"):
        image_of(hidden, max_pixels=MANY)
    # Cameras put a film behind a photo, which has any bytes; so has what an editor writes in front.
    assert image_of(_scanned(3) + b"\0\2" + b"\xff\xda\0\2" * 200, max_pixels=MANY).width == 64
    noted = b"\xff\xd8\xff\xed" + struct.pack(">H", 402) + b"\xff\xda" * 200
    assert image_of(noted + _scanned(3)[2:], max_pixels=MANY).width == 64
    assert image_of(noted + _scanned(100)[2:], max_pixels=MANY).width == 64, "a hundred are not too many"
    # One that is cut off has no end.
    assert image_of(noted + _scanned(3)[2:-2], max_pixels=MANY).width == 64


def test_other_modes_are_seen_in_eight_bits() -> None:
    gray = Pictures.fromarray(np.full((4, 4), 257 * 100, dtype=np.uint16))
    assert np.asarray(pixels_of(image_of(encoded(gray, "PNG"), max_pixels=MANY))).tolist() == [[[100] * 3] * 4] * 4
    ink = Pictures.new("CMYK", (8, 8), (0, 255, 255, 0))
    seen = np.asarray(pixels_of(image_of(encoded(ink, "JPEG"), max_pixels=MANY)))
    assert seen[..., 0].min() > 200 and seen[..., 1:].max() < 60
    palette = Pictures.new("RGB", (8, 8), RED).convert("P")
    seen_palette = pixels_of(image_of(encoded(palette, "PNG"), max_pixels=MANY))
    assert seen_palette.getpixel((0, 0)) == palette.convert("RGB").getpixel((0, 0))


def test_a_low_detail_is_another_image_of_at_most_512_pixels() -> None:
    content = png(1024, 600)
    low, usual = image_of(content, detail="low", max_pixels=MANY), image_of(content, detail="high", max_pixels=MANY)
    assert low != usual and usual == image_of(content, max_pixels=MANY)
    assert pixels_of(low).size == (512, 300) and pixels_of(usual).size == (1024, 600)


def test_the_same_bytes_are_held_once() -> None:
    content = png()
    one = image_of(content, max_pixels=MANY)
    assert image_of(bytes(bytearray(content)), max_pixels=MANY) is one
