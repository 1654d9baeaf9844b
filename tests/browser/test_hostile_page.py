"""A hostile page in a real browser: it changes nothing of a server on this machine, and reads nothing of it."""

import http.server
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from reprise.core.settings import Settings
from tests.api.servers import MODEL, RunningServer, running_server
from tests.browser.test_page import CHROMIUM, sync_api

pytestmark = pytest.mark.browser


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>free kittens</title>")

    def log_request(self, code: object = None, size: object = None) -> None:
        pass


@pytest.fixture
def hostile() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made.server_port
        made.shutdown()


@pytest.fixture
def server() -> Iterator[RunningServer]:
    settings = Settings(model=MODEL, cors_origins=("http://friend.example",))
    with running_server(settings=settings) as made:
        body = {"messages": [{"role": "user", "content": "A private question"}], "max_tokens": 4}
        httpx.post(f"{made.url}/v1/chat/completions", json=body).raise_for_status()
        yield made


ASK = """async ([server, asked]) => {
    const [method, path, mode, type] = asked;
    const body = method === 'POST' ? '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}' : undefined;
    try {
        const sent = await fetch(server + path, {method, mode, body, headers: type ? {'content-type': type} : {}});
        return [sent.type, sent.status, (await sent.text()).slice(0, 500)];
    } catch (error) {
        return ['error', 0, String(error)];
    }
}"""
SIMPLE = (
    ("POST", "/v1/models/tiny-chat/unload", "no-cors", None),
    ("POST", "/v1/chat/completions", "no-cors", "text/plain"),
    ("POST", "/api/chat", "no-cors", "application/x-www-form-urlencoded"),
    ("GET", "/v1/cache/budgets", "no-cors", None),
    ("GET", "/v1/cache/tree/search?q=private", "no-cors", None),
)
CHAT = ("POST", "/v1/chat/completions", "cors", "application/json")


def test_a_page_of_another_origin_a_rebound_one_and_one_that_is_allowed(hostile: int, server: RunningServer) -> None:
    port = urlsplit(server.url).port
    rules = f"MAP rebound.example:{port} 127.0.0.1:{port}, MAP *.example 127.0.0.1:{hostile}"
    asked: list[tuple[str, str, int]] = []

    def note(sent: Any) -> None:
        asked.append((sent.request.method, sent.url, sent.status))

    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", f"--host-resolver-rules={rules}"]
        )
        page = chromium.new_page()
        page.on("response", note)

        page.goto("http://evil.example/")
        num_jobs = len(server.backend.jobs)
        for each in SIMPLE:
            assert page.evaluate(ASK, [server.url, each])[:2] in (["opaque", 0], ["error", 0])
        assert page.evaluate(ASK, [server.url, CHAT])[0] == "error"
        statuses = {(method, url): status for method, url, status in asked if url.startswith(server.url)}
        for method, path, *_ in SIMPLE:
            assert statuses[method, server.url + path] == 403
        assert len(server.backend.jobs) == num_jobs

        # Its own origin to the browser, which asks nobody and hides nothing.
        page.goto(f"http://rebound.example:{port}/")
        for method, path in (("GET", "/v1/cache/tree/search?q=private"), ("GET", "/v1/cache/requests"), CHAT[:2]):
            sent = page.evaluate(ASK, [f"http://rebound.example:{port}", [method, path, "cors", "application/json"]])
            assert sent[1] == 421 and "--allowed-host" in sent[2]
        assert len(server.backend.jobs) == num_jobs

        page.goto("http://friend.example/")
        kind, status, _ = page.evaluate(ASK, [server.url, CHAT])
        assert (kind, status) == ("cors", 200)
        page.goto(f"{server.url}/")
        assert page.evaluate(ASK, [server.url, CHAT])[:2] == ["basic", 200]
        chromium.close()
