"""Images in the library's chats, as far as no model is needed: what a message becomes, and what is refused."""

import io
from pathlib import Path

import pytest
from PIL import Image as Pictures

import reprise
from tests.models.tiny import tiny_model
from tests.pictures import data_url, png


def test_a_path_bytes_and_a_picture_are_an_image(tmp_path: Path) -> None:
    content = png(20, 10)
    (tmp_path / "a.png").write_bytes(content)
    for source in (tmp_path / "a.png", str(tmp_path / "a.png"), content):
        assert reprise.Image(source).content == content
    drawn = reprise.Image(Pictures.new("RGB", (20, 10), (1, 2, 3)))
    assert drawn.content.startswith(b"\x89PNG")
    with pytest.raises(FileNotFoundError):
        reprise.Image(tmp_path / "b.png")


def test_a_picture_of_pillows_is_what_a_viewer_shows() -> None:
    inks = reprise.Image(Pictures.new("CMYK", (20, 10), (0, 255, 255, 0)))
    seen = Pictures.open(io.BytesIO(inks.content))
    assert (seen.mode, seen.size, seen.getpixel((3, 3))) == ("RGB", (20, 10), (255, 0, 0))
    camera = Pictures.Exif()
    camera[0x112] = 6
    file = io.BytesIO()
    Pictures.new("RGB", (80, 40)).save(file, "JPEG", exif=camera)
    photo = reprise.Image(Pictures.open(io.BytesIO(file.getvalue())))
    assert Pictures.open(io.BytesIO(photo.content)).size == (40, 80)


def test_a_part_is_openais() -> None:
    part = reprise.Image(png(), detail="low").part
    assert part == {
        "type": "image_url",
        "image_url": {"url": data_url(png()).replace("image/png", ""), "detail": "low"},
    }


def test_a_model_that_sees_nothing_refuses_an_image_in_a_question_and_goes_on_without_one_in_a_result() -> None:
    with reprise.Engine(tiny_model("llama"), settles=False) as engine:
        chat = engine.chat(max_tokens=8)
        with pytest.raises(reprise.BadRequest, match=r"extra .vision."):
            chat.send(["What is this?", reprise.Image(png())])
        assert chat.messages == []
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        looked = engine.chat(
            messages=[{"role": "user", "content": "Look."}, {"role": "assistant", "tool_calls": [call]}], max_tokens=8
        )
        looked.tool_result("c", ["Seen:", reprise.Image(png())])
        assert [part["type"] for part in looked.messages[-1]["content"]] == ["text", "image_url"]
        looked.send()
        with pytest.raises(TypeError):
            looked.tool_result("c", [object()])
