"""Image files: what is read of a header, what is refused, and what of a file the model sees."""

import numpy as np
import pytest
from PIL import Image as Pictures

from reprise.core.errors import BadRequest
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
