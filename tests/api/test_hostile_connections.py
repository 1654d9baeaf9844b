"""Connections that hold a place without using it end, the others are served, and the log stays short."""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from reprise.api.app import create_app
from reprise.api.http.connections import Unread, connections_within
from reprise.api.run import KEEP_ALIVE_S, Server
from reprise.cli.log import OncePerSecond
from reprise.core.backend import Status
from reprise.core.settings import Settings
from tests.api.real_server import real_server
from tests.api.servers import MODEL, RunningServer, running_server, says

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HI = [{"role": "user", "content": "Hi"}]


def connected(server: RunningServer, content: bytes = b"", *, receive_buffer: int | None = None) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.settimeout(60)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((host, int(port)))
    connection.sendall(content)
    return connection


def is_ended(connection: socket.socket) -> bool:
    """Waits for the other side to end the connection."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost:",
        HEAD + b"Content-Length: 1000\r\n\r\n" + b'{"messages": [',
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
        # The answer comes before the body has, which then never does.
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
    ],
    ids=["silent", "half a header", "half a body", "half a chunk", "answered"],
)
def test_a_request_that_does_not_arrive_is_given_up(content: bytes):
    settings = Settings(model=MODEL, request_timeout_s=0.2)
    with running_server(settings=settings) as server, connected(server, content) as connection:
        assert is_ended(connection)
        assert httpx.get(server.url + "/health").status_code == 200


def test_an_answer_may_take_longer_than_a_request():
    settings = Settings(model=MODEL, request_timeout_s=0.2, read_timeout_s=0.2)
    with running_server(settings=settings) as server:
        server.backend.may_decode.clear()
        body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
        with connected(server, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body) as connection:
            until(lambda: len(server.backend.jobs) > 0)
            with connected(server) as later:
                assert is_ended(later)
            server.backend.may_decode.set()
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_an_answer_that_nobody_reads_is_cancelled_and_memory_is_bounded():
    settings = Settings(model=MODEL, read_timeout_s=0.3, max_tokens=10**6)
    with running_server(says("some words\n" * 1300), settings=settings) as server:
        body = b'{"stream": true, "messages": [{"role": "user", "content": "Hi"}]}'
        content = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        with connected(server, content, receive_buffer=4096) as connection:
            until(lambda: len(server.backend.cancelled) > 0)
            until(lambda: server.service.is_idle)
            records = httpx.get(server.url + "/v1/cache/requests").json()["data"]
            assert [record["ended"] for record in records] == ["cancelled"]
            assert is_ended(connection)


def test_who_did_not_read_and_asks_again_goes_on_where_the_work_was():
    body = {"messages": [{"role": "user", "content": "Tell me all of it. " * 20}], "temperature": 0}
    many = {"stream": True, "max_tokens": 1500, "logprobs": True, "top_logprobs": 20}
    with real_server(read_timeout_s=0.3, settles=False) as client, socket.socket() as connection:
        content = json.dumps({**body, **many}).encode()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((client.base_url.host, client.base_url.port))
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        until(lambda: len(client.get("/v1/cache/requests").json()["data"]) > 0)
        (record,) = client.get("/v1/cache/requests").json()["data"]
        assert record["ended"] == "cancelled"
        usage = client.post("/v1/chat/completions", json={**body, "max_tokens": 4}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]


def test_one_that_reads_slowly_is_not_one_that_does_not_read():
    unread = Unread()
    # More is added than is read, but every now and then something is.
    waiting = [0, 500, 900, 800, 1200, 1100, 1100, 1100, 0, 300, 300]
    assert [unread.waited_s(nbytes, float(at)) for at, nbytes in enumerate(waiting)] == [
        0, 0, 1, 0, 1, 0, 1, 2, 0, 0, 1
    ]  # fmt: skip


def test_an_idle_connection_is_kept_longer_than_clients_keep_theirs():
    """Else a request may be sent on one that the server is just closing: httpx keeps them 5 s, aiohttp 15."""
    settings = Settings(model=MODEL)
    with running_server(settings=settings) as running:
        server = Server(create_app(running.service, settings), settings, running.service, answers_s=1.0)
    assert server.config.timeout_keep_alive == KEEP_ALIVE_S > 15


def test_idle_connections_make_room_and_all_at_work_is_said(caplog: pytest.LogCaptureFixture):
    settings = Settings(model=MODEL, max_connections=4)
    with running_server(settings=settings) as server:
        idle = [connected(server) for _ in range(20)]
        assert httpx.get(server.url + "/health").status_code == 200
        assert all(is_ended(connection) for connection in idle[:10])
        server.backend.may_decode.clear()
        body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
        content = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        busy = [connected(server, content) for _ in range(4)]
        until(lambda: len(server.backend.jobs) == 4)
        for _ in range(3):
            refused = httpx.get(server.url + "/health")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
        server.backend.may_decode.set()
        assert [connection.recv(12) for connection in busy] == [b"HTTP/1.1 200"] * 4
        for connection in (*idle, *busy):
            connection.close()
    # One sentence for each case, whatever the numbers: the log says the same once a second.
    said = {record.getMessage() for record in caplog.records if "all connections" in record.getMessage()}
    assert len(said) == 2


def test_connections_leave_descriptors_for_the_rest():
    assert connections_within(100_000, 1024) == 1024
    assert connections_within(1024, 1024) == 640
    assert connections_within(100, 1024) == 50


def test_a_log_says_the_same_once_a_second():
    now_s = 0.0
    limit = OncePerSecond(clock=lambda: now_s)

    def said(text: str) -> str | None:
        record = logging.LogRecord("any", logging.WARNING, "", 0, "%s", (text,), None)
        return record.getMessage() if limit.filter(record) else None

    assert [said("no room") for _ in range(1000)] == ["no room", *[None] * 999]
    assert said("other") == "other"
    now_s = 1.5
    assert said("no room") == "no room (and 999 more times)"
    now_s = 3.0
    assert said("no room") == "no room"


def test_a_client_does_not_pay_for_the_time_in_which_the_server_did_not_look():
    unread = Unread()
    unread.waited_s(10, 0.0)
    unread.forgive(5.0, 7.0)
    assert unread.waited_s(10, 8.0) == 3.0
    # What it was late before the client came is not the client's either.
    unread.forgive(100.0, 8.0)
    assert unread.waited_s(10, 9.0) == 1.0


@pytest.mark.matrix
def test_a_server_that_stalls_ends_nobody_who_has_just_come(monkeypatch: pytest.MonkeyPatch):
    with running_server(settings=Settings(model=MODEL, request_timeout_s=1)) as server:
        status = server.service.status

        def slow() -> Status:
            time.sleep(1.5)
            return status()

        with connected(server) as connection:
            httpx.get(server.url + "/health/live", timeout=60)
            with monkeypatch.context() as patch:
                patch.setattr(server.service, "status", slow)
                httpx.get(server.url + "/health", timeout=60)
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_who_is_refused_can_send_its_request_and_read_why():
    with running_server(settings=Settings(model=MODEL, max_connections=1)) as server:
        server.backend.may_decode.clear()
        body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
        content = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        with connected(server, content) as busy:
            until(lambda: len(server.backend.jobs) == 1)
            with connected(server) as refused:
                assert refused.recv(12, socket.MSG_PEEK).startswith(b"HTTP/1.1 503")
                # As clients do: first the head, then the body.
                for part in (HEAD + b"Content-Length: 40000\r\n\r\n", *[b" " * 10_000] * 4):
                    refused.sendall(part)
                answer = b""
                while received := refused.recv(65536):
                    answer += received
                assert answer.endswith(b"}}")
            # None of those that were refused takes the place of another.
            for _ in range(3):
                assert httpx.get(server.url + "/health").status_code == 503
            server.backend.may_decode.set()
            assert busy.recv(12) == b"HTTP/1.1 200"
        until(lambda: httpx.get(server.url + "/health").status_code == 200)


def test_a_request_that_came_while_the_server_was_busy_is_not_an_idle_connection(monkeypatch: pytest.MonkeyPatch):
    with running_server(settings=Settings(model=MODEL, max_connections=4)) as server:
        status = server.service.status
        is_busy, is_over = threading.Event(), threading.Event()

        def slow() -> Status:
            is_busy.set()
            assert is_over.wait(60)
            return status()

        monkeypatch.setattr(server.service, "status", slow)
        asking = threading.Thread(target=httpx.get, args=(server.url + "/health",), kwargs={"timeout": 60})
        asking.start()
        assert is_busy.wait(60)
        with connected(server, b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n") as honest:
            idle = [connected(server) for _ in range(20)]
            is_over.set()
            assert honest.recv(12) == b"HTTP/1.1 200"
            assert all(is_ended(connection) for connection in idle[:10])
            for connection in idle:
                connection.close()
        asking.join()
