"""While the model is loaded the server answers: that it is loading, how far it is, and when to come again."""

import signal
import subprocess
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from reprise.api.loading import LoadingClock, LoadingProgress

SERVER = """
import sys
sys.path.insert(0, ".")
from reprise.api.http.ending import Ending
from reprise.api.loading import LoadingClock
from reprise.api.http.listening import listen, url_of
from reprise.api.run import run_while_loading
from reprise.core.errors import LoadFailed
from reprise.core.settings import Settings
from tests.api.fake_backend import FakeBackend
from tests.api.servers import HELLO, MODEL, make_service

settings = Settings(model=MODEL, port=0, grace_s=60, api_keys=("a key",))
backend = FakeBackend(script=HELLO)

def load():
    if sys.stdin.readline() == "fail\\n":
        raise LoadFailed("There is no such model.")
    return make_service(backend, settings=settings)

listener = listen(settings.host, settings.port)
print(url_of(listener), flush=True)
with Ending(settings.grace_s) as ending:
    try:
        is_loaded = run_while_loading(
            load,
            settings,
            listener=listener,
            ending=ending,
            progress=LoadingClock(10**12).progress,
            holds="holds" in sys.argv,
        )
        print("loaded" if is_loaded else "not loaded", flush=True)
    except LoadFailed as error:
        print(error, flush=True)
backend.stop()
"""
KEY = {"Authorization": "Bearer a key"}
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


class LoadingServer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()


@contextmanager
def loading(*words: str) -> Generator[LoadingServer]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SERVER, *words]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield LoadingServer(started)
        finally:
            started.kill()


def test_requests_are_answered_from_the_first_moment_on():
    with loading() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert health.json()["loading"]["seconds"] > 0
        assert health.json()["loading"]["bytes_total"] == 10**12
        assert int(health.headers["retry-after"]) >= 1
        # A supervisor does not start it again, and nobody is sent here.
        assert client.get("/health/live").status_code == 200
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health/ready", headers={"Host": "evil.example"}).status_code == 421

        assert client.post("/v1/chat/completions", json=BODY).status_code == 401
        refused = client.post("/v1/chat/completions", json=BODY, headers=KEY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
        assert int(refused.headers["retry-after"]) >= 1
        assert client.post("/v1/messages", json=BODY, headers=KEY).json()["type"] == "error"
        large = client.post("/v1/completions", content=b"x" * 3_000_000, headers=KEY)
        assert large.status_code == 503

        server.tell("go on")
        assert server.line().startswith(f"Serving org/tiny-chat at {server.url} ")
        # The same connection, which nobody closed.
        assert client.post("/v1/chat/completions", json=BODY, headers=KEY).status_code == 200
        assert client.get("/health").json()["status"] == "ok"
        server.process.send_signal(signal.SIGTERM)
        assert server.line() == "loaded"


@pytest.mark.parametrize("tell", ["go on", "fail", "stop"])
def test_requests_to_a_server_that_was_started_for_them_wait(tell: str) -> None:
    with (
        loading("holds") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(client.post, "/v1/chat/completions", json=BODY, headers=KEY)
        # Who may not ask is told so at once, as is who asks how the server is.
        assert client.post("/v1/chat/completions", json=BODY).status_code == 401
        assert client.get("/health").json()["status"] == "loading"
        time.sleep(0.2)
        assert not waiting.done()
        if tell == "stop":
            server.process.send_signal(signal.SIGTERM)
        else:
            server.tell(tell)
        assert waiting.result(60).status_code == (200 if tell == "go on" else 503)


@pytest.mark.matrix
def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_sentence():
    with loading() as server:
        server.tell("fail")
        assert server.line() == "There is no such model."


@pytest.mark.matrix
def test_a_signal_ends_the_server_while_it_loads():
    with loading() as server:
        assert httpx.get(f"{server.url}/health/live", timeout=60).status_code == 200
        began_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.line() == "not loaded"
        assert time.monotonic() - began_s < 30


def test_no_more_is_read_than_there_is():
    clock, unknown = LoadingClock(4), LoadingClock(0)
    ballast = bytearray(b"x" * 50_000_000)
    assert str(clock.progress()).startswith("4 B of 4 B (100%) in ")
    assert unknown.progress().nbytes_read > 4 and unknown.progress().share is None
    assert len(ballast) > 0


@pytest.mark.parametrize(
    ("seconds", "read", "total", "expected"),
    [(10, 25, 100, 30), (10, 0, 100, 5), (10, 5, 0, 5), (10, 100, 100, 1), (100, 1, 100, 60)],
)
def test_when_to_come_again_follows_from_the_pace(seconds: float, read: int, total: int, expected: int):
    progress = LoadingProgress(seconds=seconds, nbytes_read=read, nbytes_total=total)
    assert progress.retry_after_s == expected
