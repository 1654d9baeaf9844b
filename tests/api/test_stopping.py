"""How a server ends: within its time whatever clients do, with the answers under way, and at once when told twice."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import httpx
import pytest

from reprise.core.settings import Settings
from tests.api.servers import MODEL, running_server
from tests.matrix import rows_now_and_later
from tests.models.tiny import tiny_model

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]

SERVER = """
import sys, threading
sys.path.insert(0, ".")
from reprise.api.http.ending import Ending
from reprise.api.http.listening import listen
from reprise.api.loading import LoadingProgress
from reprise.api.run import run_while_loading
from reprise.core.settings import Settings
from tests.api.fake_backend import FakeBackend
from tests.api.servers import MODEL, make_service, says

backend = FakeBackend(script=says(sys.argv[2]))
settings = Settings(model=MODEL, port=0, grace_s=float(sys.argv[1]))
backend.may_decode.clear()
service = make_service(backend, settings=settings)
threading.Thread(target=lambda: (sys.stdin.readline(), backend.may_decode.set()), daemon=True).start()
with Ending(settings.grace_s) as ending:
    run_while_loading(
        lambda: service,
        settings,
        listener=listen(settings.host, settings.port),
        ending=ending,
        progress=lambda: LoadingProgress(seconds=0, nbytes_read=0, nbytes_total=0),
    )
print("hurried" if backend.is_hurried else "not hurried", flush=True)
backend.stop()
"""


@dataclass(frozen=True, kw_only=True)
class Process:
    process: subprocess.Popen[str]
    url: str

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def connect(self, content: bytes) -> socket.socket:
        return connect(self.url, content)

    def is_idle(self) -> bool:
        return bool(httpx.get(self.url + "/health", timeout=60).json()["idle"])


@contextmanager
def process(*, grace_s: float = 60, answer: str = "Hello there.") -> Generator[Process]:
    command = [sys.executable, "-c", SERVER, str(grace_s), answer]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield Process(process=started, url=started.stdout.readline().split(" at ")[1].split()[0])
        finally:
            # Else a test that fails would wait for it.
            started.kill()


def connect(url: str, content: bytes) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(content)
    return connection


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def accepts(url: str) -> bool:
    try:
        httpx.get(url + "/health")
    except httpx.HTTPError:
        return False
    return True


@pytest.mark.parametrize(
    ("first", "second"),
    rows_now_and_later([(signal.SIGINT, signal.SIGTERM)], [(signal.SIGHUP, None)]),
)
def test_a_signal_finishes_answers_and_a_second_does_not_wait(first: signal.Signals, second: signal.Signals | None):
    with process() as server:
        answers: list[httpx.Response | httpx.HTTPError] = []

        def ask() -> None:
            try:
                answers.append(httpx.post(server.url + URL, json={"messages": HI}, timeout=60))
            except httpx.HTTPError as error:
                answers.append(error)

        thread = Thread(target=ask)
        thread.start()
        until(lambda: not server.is_idle())
        server.process.send_signal(first)
        until(lambda: not accepts(server.url))
        assert answers == []
        if second is None:
            server.go_on()
        else:
            server.process.send_signal(second)
        thread.join(60)
        assert server.process.wait(60) == 0
        assert server.process.stdout is not None
        assert server.process.stdout.read() == "hurried\n"
    (answer,) = answers
    assert isinstance(answer, httpx.Response) == (second is None), answer


@pytest.mark.matrix
def test_clients_that_never_finish_do_not_keep_the_server():
    body = b'{"stream": true, "messages": [{"role": "user", "content": "Hi"}]}'
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    with process(grace_s=1.5, answer="some words\\n" * 1300) as server:
        kept = [
            server.connect(b""),
            server.connect(b"GET /health HTTP/1.1\r\nHost:"),
            server.connect(head % 1000 + b'{"messages": ['),
            server.connect(head % len(body) + body),
        ]
        until(lambda: not server.is_idle())
        server.go_on()
        # The stream has begun, and nobody reads it.
        assert kept[-1].recv(10) == b"HTTP/1.1 2"
        begun_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert time.monotonic() - begun_s < 10
        for connection in kept:
            connection.close()


def test_requests_that_have_not_arrived_are_answered_at_once() -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    )
    with running_server() as server:
        kept = [connect(server.url, sent) for sent in (b"GET /health HTTP/1.1\r\nHost:", head, head + b'{"mess', b"")]
        answered = connect(server.url, b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answered.recv(1000).startswith(b"HTTP/1.1 200")
        # The loop has read what the others have sent before.
        begun_s = time.monotonic()
        server.stop()
        assert time.monotonic() - begun_s < 3
        assert [each.recv(12) for each in kept] == [b"HTTP/1.1 503"] * 3 + [b""]
        for connection in (*kept, answered):
            connection.close()


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        (URL, {}, '{"error":{"message":"The server is shutting down'),
        ("/v1/messages", {"max_tokens": 9}, '{"type":"error","error":{"type":"overloaded_error"'),
        ("/v1/responses", {"input": "Hi"}, '"type":"response.failed"'),
        ("/api/chat", {}, '{"error":"The server is shutting down'),
    ],
)
def test_a_stream_that_the_grace_cuts_ends_with_an_error(path: str, body: dict[str, object], last: str) -> None:
    with running_server(settings=Settings(model=MODEL, grace_s=1.5)) as server:
        server.backend.may_decode.clear()
        asked = {"stream": True, "model": MODEL} | ({} if "input" in body else {"messages": HI}) | body
        with httpx.stream("POST", server.url + path, json=asked, timeout=60) as response:
            until(lambda: not server.service.is_idle)
            stopping = Thread(target=server.stop)
            stopping.start()
            text = response.read().decode()
            stopping.join(60)
        assert last in text.replace('": ', '":').replace(', "', ',"'), text


LOADING = """
import sys
import mlx.core as mx
from reprise.cli.main import app
from reprise.loop.model_engine import ModelEngine

read = ModelEngine.read_weights

def reading(loop, *, downloads=False):
    if downloads:
        return read(loop, downloads=downloads)
    print("loading", flush=True)
    while True:
        mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))

ModelEngine.read_weights = reading
app(["serve", *sys.argv[1:], "--port", "0", "--grace", "3"])
"""


@pytest.mark.matrix
def test_a_server_that_is_loading_another_model_ends_without_it(tmp_path: Path):
    first, other = str(tiny_model("llama")), tiny_model("qwen3_5")
    command, log = [sys.executable, "-c", LOADING, first, str(other)], tmp_path / "log"
    with log.open("w") as err, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as started:
        try:
            assert started.stdout is not None
            server = Process(process=started, url=started.stdout.readline().split(" at ")[1].split()[0])
            body = b'{"model": "%s", "prompt": "Hi"}' % other.name.encode()
            head = (
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d"
            )
            with server.connect(head % len(body) + b"\r\n\r\n" + body) as waiting:
                assert started.stdout.readline() == "loading\n"
                begun_s = time.monotonic()
                started.send_signal(signal.SIGTERM)
                assert waiting.recv(100).startswith(b"HTTP/1.1 503")
                assert started.wait(60) == 0, log.read_text()
                assert time.monotonic() - begun_s < 2.5
        finally:
            started.kill()


STUCK = """
import sys, threading, time
from reprise.api.http.ending import Ending

with Ending(float(sys.argv[1])) as ending:
    threading.Thread(target=lambda: time.sleep(600)).start()
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(("grace_s", "num", "status"), [(0.3, 1, 1), (600, 3, 143)])
def test_a_process_that_is_stuck_ends_all_the_same(grace_s: float, num: int, status: int):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", STUCK, str(grace_s)]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "ready\n"
            for _ in range(num):
                started.send_signal(signal.SIGTERM)
                time.sleep(0.05)
            assert started.wait(60) == status
        finally:
            started.kill()


INTERRUPTED = """
import os, signal, sys
from importlib.abc import MetaPathFinder

interrupted = sys.argv.pop(1)

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == interrupted:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from reprise.cli.entry import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "reprise.cli.engines"])
def test_ctrl_c_during_the_imports_ends_with_one_line(module: str) -> None:
    # Without the line that says where it starts.
    command = [sys.executable, "-c", INTERRUPTED, module, "serve", str(tiny_model("llama")), "--port", "0", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "reprise: interrupted.\n")
