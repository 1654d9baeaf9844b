"""The page in Firefox and in WebKit, which is Safari's engine: the tree, a text, and a chat that is prefilled."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.api.real_server import real_server
from tests.browser.drivers import Browser, firefox, webkit

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(("opened", "packages"), [(firefox, "firefox-esr"), (webkit, "webkit2gtk-driver xvfb")])
def test_the_page_works_in_other_browsers(
    opened: Callable[[], AbstractContextManager[Browser | None]], packages: str
) -> None:
    with opened() as browser, real_server() as server:
        if browser is None:
            pytest.skip(f"needs {opened.__name__}: apt-get install {packages}")
        body = {"messages": [{"role": "user", "content": "What does the lighthouse show?"}], "max_tokens": 2}
        server.post("/v1/chat/completions", json=body).raise_for_status()
        browser.go(str(server.base_url))
        browser.until("document.querySelectorAll('.edge[data-id]').length > 0")
        browser.until("document.querySelector('#memory-process') !== null")
        browser.run("document.querySelector('.edge[data-id]').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
        browser.until("document.querySelector('#edge .text').textContent.includes('lighthouse')")
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
        browser.run("location.hash = '#chat'")
        browser.run(
            "const d = document.querySelector('#draft'); d.value = 'Hello.'; d.dispatchEvent(new Event('input'))"
        )
        browser.until("document.querySelector('#draft-note').textContent.includes('ready before you send')")
        browser.run("document.querySelector('#composer').requestSubmit()")
        browser.until("document.querySelector('.after strong') !== null")
        browser.run("document.querySelector('#send').click()")
        browser.until("document.querySelector('.after .reuse') !== null")
