"""Image files made to hurt or of rare kinds, behind the processors of real families: an answer or a sentence for each.

A server answers others meanwhile, and goes on after each of them.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.matrix import now_and_later
from tests.pictures import Pictures, bomb, encoded, png
from tests.vision.test_over_http import seeing_server, shows
from tests.vision.tiny import FAMILIES

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

RED, BLUE = (200, 30, 30), (10, 10, 200)


def _plain(mode: str = "RGB") -> Any:
    return Pictures.new(mode, (40, 40))


def _turned() -> bytes:
    exif = Pictures.Exif()
    exif[0x0112] = 6  # By a quarter.
    return encoded(Pictures.new("RGB", (80, 40), RED), "JPEG", exif=exif)


def _animated(form: str) -> bytes:
    frames = [Pictures.new("RGB", (40, 40), color) for color in (RED, BLUE)]
    return encoded(frames[0], form, save_all=True, append_images=frames[1:])


READ: dict[str, Callable[[], bytes]] = {
    "1 x 1": lambda: png(1, 1),
    "CMYK": lambda: encoded(_plain("CMYK"), "JPEG"),
    "16 bit": lambda: encoded(_plain("I;16"), "PNG"),
    "1 bit": lambda: encoded(_plain("1"), "PNG"),
    "a palette": lambda: encoded(_plain("P"), "PNG"),
    "transparent": lambda: encoded(_plain("RGBA"), "PNG"),
    "turned": _turned,
    "a profile that is none": lambda: encoded(_plain(), "PNG", icc_profile=b"junk" * 50),
    "animated GIF": lambda: _animated("GIF"),
    "animated WebP": lambda: _animated("WEBP"),
}
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "a bomb by its header": (lambda: bomb(60_000, 60_000), "--max-image-pixels"),
    "one side too long": (lambda: png(70_000, 1), "65,535 in one direction"),
    "cut off": (
        lambda: encoded(Pictures.effect_noise((64, 64), 80).convert("RGB"), "PNG")[:1500],
        "damaged, or cut off",
    ),
    "less than it declares": (lambda: bomb(2_000, 2_000), "damaged, or cut off"),
    "SVG": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG, HEIC and PDF have to be converted"),
    "PDF": (lambda: b"%PDF-1.7 and so on", "SVG, HEIC and PDF have to be converted"),
    "text": (lambda: b"hello " * 100, "This is no image that is read"),
}
LINES = {"20,000 x 1": (20_000, 1), "1 x 20,000": (1, 20_000), "600 x 3": (600, 3)}
"""A family's processor may take them or not."""


@pytest.mark.parametrize("family", now_and_later(["qwen3_5"], sorted({*FAMILIES} - {"qwen3_5"})))
def test_each_file_has_an_answer_or_a_sentence(family: str) -> None:
    with seeing_server(family, max_tokens=2) as client:

        def ask(content: bytes) -> httpx.Response:
            return client.post("/v1/chat/completions", json={"messages": [shows("Look: ", content, "What?")]})

        for name, make in READ.items():
            assert ask(make()).status_code == 200, name
        for name, (make, sentence) in REFUSED.items():
            told = ask(make())
            assert told.status_code == 400 and sentence in told.json()["error"]["message"], (name, told.text)
        for name, size in LINES.items():
            told = ask(png(*size))
            assert told.status_code == 200 or f"takes no image of {size[0]} x {size[1]}" in told.text, (name, told.text)
        assert ask(png(48, 32)).status_code == 200


@pytest.mark.matrix
def test_health_is_answered_while_large_images_are_decoded() -> None:
    slowest_s = 0.0
    with seeing_server("gemma4", max_tokens=2) as client:

        def ask(number: int) -> None:
            message = shows("Look: ", png(7_000, 7_000, (number, 0, 0)), "What?")
            assert client.post("/v1/chat/completions", json={"messages": [message]}).status_code == 200

        asking = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in asking:
            thread.start()
        with httpx.Client(base_url=client.base_url, timeout=60) as other:
            while any(thread.is_alive() for thread in asking):
                began_s = time.monotonic()
                assert other.get("/health").status_code == 200
                slowest_s = max(slowest_s, time.monotonic() - began_s)
                time.sleep(0.05)
    assert slowest_s < 1


@pytest.mark.parametrize("name", ["cut off", "PDF", "20,000 x 1"])
def test_a_chat_goes_on_behind_an_image_that_cannot_be_read(name: str) -> None:
    content = png(*LINES[name]) if name in LINES else REFUSED[name][0]()
    question = shows("Look: ", content, "What?")
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = [{"role": "assistant", "tool_calls": [call]}, {**question, "role": "tool", "tool_call_id": "c"}]
    with seeing_server("qwen3_5", max_tokens=2) as client:

        def ask(*chat: dict[str, Any]) -> httpx.Response:
            return client.post("/v1/chat/completions", json={"messages": list(chat)})

        joined = shows("Look: ", content, "What?", "Never mind.")
        assert client.post("/v1/prefill", json={"messages": [question]}).status_code == 400
        assert ask(joined).status_code == 400, "nobody has asked yet, so it is a question of its own"
        assert ask(question).status_code == 400
        # Some clients join what the user writes next to the refused message.
        for chat in ((question, shows("Never mind.")), (joined,), (shows("Look."), *result)):
            told = ask(*chat)
            assert told.status_code == 200, told.text
            record = client.get(f"/v1/cache/requests/{told.headers['x-request-id']}").json()
            assert "left out, since they cannot be read: images: 1" in record["notes"]
            assert record["images"] == []
