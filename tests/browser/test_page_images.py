"""Images in the page's chat, in a real browser: chosen, pasted, dropped, left out, and shown small."""

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from reprise.core.job import Purpose
from reprise.core.settings import Settings
from tests.api.fake_backend import FakeBackend
from tests.api.server_thread import ServerThread
from tests.api.servers import HELLO, MODEL, make_service
from tests.chat.seeing import seeing
from tests.pictures import base64_of, png

pytestmark = pytest.mark.browser

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright (pip install playwright)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("needs Chromium: apt-get install chromium", allow_module_level=True)

GIVE = """([kind, name, data]) => {
  const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
  const moved = new DataTransfer();
  moved.items.add(new File([bytes], name, { type: "image/png" }));
  const target = document.getElementById("draft");
  const event = kind === "paste"
    ? new ClipboardEvent("paste", { clipboardData: moved, bubbles: true, cancelable: true })
    : new DragEvent("drop", { dataTransfer: moved, bubbles: true, cancelable: true });
  target.dispatchEvent(event);
}"""


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(script=HELLO)


@pytest.fixture
def page(backend: FakeBackend) -> Iterator[Any]:
    settings = Settings(model=MODEL)
    server = ServerThread(make_service(backend, settings=settings, text=seeing()), settings)
    try:
        with sync_api.sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            opened = chromium.new_page()
            errors: list[str] = []
            opened.on("pageerror", lambda error: errors.append(str(error)))
            opened.on("console", lambda told: errors.append(told.text) if told.type == "error" else None)
            opened.goto(f"{server.url}/#chat")
            yield opened
            chromium.close()
            assert errors == []
    finally:
        server.stop()
        backend.stop()


def test_images_are_chosen_pasted_dropped_and_sent(page: Any, backend: FakeBackend) -> None:
    page.set_input_files("#image-file", [{"name": "a.png", "mimeType": "image/png", "buffer": png(48, 32)}])
    sync_api.expect(page.locator("#pictures img")).to_have_count(1)
    page.evaluate(GIVE, ["paste", "b.png", base64_of(png(64, 16))])
    page.evaluate(GIVE, ["drop", "c.png", base64_of(png(16, 16))])
    sync_api.expect(page.locator("#pictures img")).to_have_count(3)
    page.click("#pictures button >> nth=1")
    sync_api.expect(page.locator("#pictures img")).to_have_count(2)
    page.fill("#draft", "What are these?")
    sync_api.expect(page.locator("#draft-note")).to_have_text(re.compile("ready before you send"))
    page.press("#draft", "Enter")
    sync_api.expect(page.locator(".message.assistant .said")).to_have_text("Hello there.")
    shown = page.locator(".message.user .pictures img")
    sync_api.expect(shown).to_have_count(2)
    assert shown.first.evaluate("image => image.naturalWidth") == 48
    assert page.locator("#pictures img").count() == 0
    images = backend.of(Purpose.GENERATE)[-1].prompt.images
    assert [(image.image.width, image.image.height) for image in images] == [(48, 32), (16, 16)]
    # An edit keeps them.
    page.click(".message.user >> text=Edit")
    page.fill(".message.user textarea", "And now?")
    page.click("text=Send as a branch")
    sync_api.expect(page.locator(".message.user .said")).to_have_text("And now?")
    sync_api.expect(page.locator(".message.assistant .said")).to_have_text("Hello there.")
    assert len(backend.of(Purpose.GENERATE)[-1].prompt.images) == 2


def test_an_image_alone_is_a_message_and_the_bar_of_its_request_says_so(page: Any, backend: FakeBackend) -> None:
    page.press("#draft", "Enter")
    page.set_input_files("#image-file", [{"name": "a.png", "mimeType": "image/png", "buffer": png(48, 32)}])
    sync_api.expect(page.locator("#pictures img")).to_have_count(1)
    page.press("#draft", "Enter")
    sync_api.expect(page.locator(".message.assistant .said")).to_have_text("Hello there.")
    (job,) = backend.of(Purpose.GENERATE)
    assert len(job.prompt.images) == 1
    page.click("a[data-view=cache]")
    sync_api.expect(page.locator(".request .bar-cell")).to_have_text(f"{len(job.prompt)} · 1 image")
