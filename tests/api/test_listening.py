"""What is answered at the server's address before there is a server."""

import socket
import time
from collections.abc import Generator
from contextlib import closing

import httpx
import pytest

from reprise.api.anthropic.routes import anthropic_shape
from reprise.api.http.errors import Problem, openai_shape
from reprise.api.http.listening import FirstAnswers, listen, url_of
from reprise.api.http.web_access import WebAccess
from reprise.api.ollama.reply import ollama_shape
from reprise.core.settings import Settings


@pytest.fixture
def listener() -> Generator[socket.socket]:
    with closing(listen("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def first(listener: socket.socket) -> Generator[FirstAnswers]:
    made = FirstAnswers(listener, WebAccess(Settings(model="m", allowed_hosts=("gpu.lan",))))
    yield made
    made.stop()


@pytest.mark.usefixtures("first")
def test_who_comes_first_is_told_to_come_again(listener: socket.socket) -> None:
    with httpx.Client(base_url=url_of(listener), timeout=30) as client:
        for _ in range(2):
            health = client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "loading")
            assert health.json()["loading"].keys() == {"seconds", "bytes_read", "bytes_total"}
            assert int(health.headers["retry-after"]) >= 1
        # A supervisor does not start it again.
        assert client.get("/health/live?verbose=1").status_code == 200
        assert client.head("/health").content == b""
    # Who sends a large body before it reads gets the answer too.
    with socket.create_connection(listener.getsockname(), timeout=30) as sender:
        sender.sendall(b"POST /v1/responses HTTP/1.1\r\nContent-Length: 20000000\r\n\r\n" + b"x" * 20_000_000)
        assert sender.recv(100).startswith(b"HTTP/1.1 503 ")


@pytest.mark.usefixtures("first")
@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/chat/completions", openai_shape),
        ("/v1/models", openai_shape),
        ("/v1/messages", anthropic_shape),
        ("/v1/messages/count_tokens", anthropic_shape),
        ("/api/chat", ollama_shape),
    ],
)
def test_errors_are_those_of_the_api(path: str, shape: object, listener: socket.socket) -> None:
    body = httpx.post(url_of(listener) + path, json={}, timeout=30).json()
    error = body["error"]
    message = error if isinstance(error, str) else error["message"]
    assert callable(shape)
    expected = shape(Problem(status=503, code="model_loading", message=message, retry_after_s=2))
    if "request_id" in expected:
        del expected["request_id"]
    assert body == expected


@pytest.mark.usefixtures("first")
def test_another_host_name_is_refused(listener: socket.socket) -> None:
    with httpx.Client(base_url=url_of(listener), timeout=30) as client:
        assert client.get("/health/live", headers={"Host": "GPU.lan:8080"}).status_code == 200
        refused = client.post("/v1/messages", headers={"Host": "evil.example"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (421, "invalid_request_error")
    # What only looks like a header, in the body; and HTTP/1.0, which has none.
    with socket.create_connection(listener.getsockname(), timeout=30) as older:
        older.sendall(b"POST /health/live HTTP/1.0\r\n\r\nHost: evil.example")
        assert older.recv(100).startswith(b"HTTP/1.1 200 ")


def test_one_that_says_nothing_keeps_nobody_waiting(listener: socket.socket, first: FirstAnswers) -> None:
    with socket.create_connection(listener.getsockname()) as silent:
        assert httpx.get(f"{url_of(listener)}/health", timeout=30).status_code == 503
        # The next owner takes who comes from now on; what came before is still answered.
        began_s = time.monotonic()
        first.stop()
        assert time.monotonic() - began_s < 3
        silent.sendall(b"GET /health/live HTTP/1.1\r\n\r\n")
        silent.settimeout(30)
        assert silent.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
    with socket.create_connection(listener.getsockname()) as later:
        listener.settimeout(30)
        taken, _ = listener.accept()
        with taken:
            taken.sendall(b"mine")
            assert later.recv(10) == b"mine"
