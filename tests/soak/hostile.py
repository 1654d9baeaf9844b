"""Clients that mean harm: bodies, connections and manners that a server on a shared network meets."""

import http.client
import json
import random
import socket
import threading
import time
from typing import Any

from tests.soak.clients import ClientReport

_TIMEOUT_S = 120.0
_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_HI: list[Any] = [{"role": "user", "content": "Hi"}]
_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


def _chat(**fields: Any) -> tuple[str, bytes]:
    return _CHAT, json.dumps({"messages": _HI, "max_tokens": 4, **fields}).encode()


def _schema(num: int, depth: int) -> dict[str, Any]:
    """A schema of `num` keys, `depth` levels deep."""
    inner: Any = {"type": "string", "pattern": "^(a|b|c){1,40}$"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"key": inner}, "required": ["key"]}
    keys = {f"key{number}": inner for number in range(num)}
    schema = {"type": "object", "properties": keys, "required": list(keys)}
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


def _arguments(text: str) -> tuple[str, bytes]:
    call = {"id": "call0", "type": "function", "function": {"name": "look", "arguments": text}}
    return _chat(messages=[*_HI, {"role": "assistant", "tool_calls": [call]}, *_HI])


BODIES: tuple[tuple[str, bytes], ...] = (
    (_COMPLETIONS, b'{"prompt": [' + b"{}," * 350_000 + b"{}]}"),
    (_COMPLETIONS, b'{"prompt": [' + b'"",' * 700_000 + b'""]}'),
    (_COMPLETIONS, b'{"prompt": [' + b"1e999," * 20_000 + b"1]}"),
    (_COMPLETIONS, json.dumps({"prompt": "word " * 400_000, "max_tokens": 1}).encode()),
    (_CHAT, b'{"messages": [], "metadata": [' + b"[]," * 700_000 + b"[]]}"),
    (_CHAT, b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    (_CHAT, b"\xff\xfe" * 1000),
    (_CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    _chat(messages=[{"role": "user", "content": "again and again " * 100_000}]),
    _chat(messages=[{"role": "user", "content": "x"}] * 20_000),
    _chat(stop=[5]),
    _chat(n=10**9),
    _chat(max_tokens=-1),
    _chat(max_tokens=10**30),
    _chat(temperature=1e-40),
    _chat(temperature=1e300),
    _chat(top_p=1e-30),
    _chat(repetition_penalty=1e-300),
    _chat(frequency_penalty=-1e300),
    _chat(seed=2**70),
    _chat(logit_bias={"99999999": 100}),
    _chat(logit_bias={"5": 1e400}),
    _chat(logprobs=True, top_logprobs=10**6),
    _chat(logprobs=True, top_logprobs=5, response_format=_schema(2, 1)),
    _chat(response_format=_schema(400, 3)),
    _chat(response_format=_schema(2, 60)),
    _chat(response_format={"type": "regex", "regex": "((a*)*)*" * 200}),
    _chat(tools=[{"type": "function", "function": {"name": "\u0000", "parameters": 5}}]),
    _arguments(json.dumps({"of": [[]] * 300_000})),
    _arguments("{" * 50_000),
)


class Intruder:
    """One hostile client, doing one thing after another."""

    def __init__(self, port: int, number: int, seed: int, report: ClientReport) -> None:
        self._port = port
        self._rng = random.Random(f"hostile:{seed}:{number}")
        self._report = report

    def run(self, until: threading.Event) -> None:
        """Go on until that is set. Never raises: what the server does wrong is in the report."""
        doings = (self._post, self._post, self._hang_up, self._retry, self._idle, self._half_header, self._half_body,
                  self._unread)  # fmt: skip
        while not until.is_set():
            doing = self._rng.choice(doings)
            try:
                doing()
            except (OSError, http.client.HTTPException):
                # A server may hang up on such a client.
                self._report.note("hung up on")
            except Exception as error:
                self._report.fail(f"{doing.__name__}: {type(error).__name__}: {error}")
            time.sleep(self._rng.random() * 0.5)

    def _post(self) -> None:
        path, body = self._rng.choice(BODIES)
        self._ask(path, body)

    def _ask(self, path: str, body: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        self._report.note(f"status {response.status}")
        if response.status == 500:
            self._report.fail(f"{body[:100]!r} gave 500: {text[:200]!r}")
        json.loads(text, parse_constant=self._refuse_constant)

    def _refuse_constant(self, name: str) -> None:
        self._report.fail(f"an answer has {name}, which is not JSON")

    def _hang_up(self) -> None:
        path, body = self._rng.choice(BODIES)
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        time.sleep(self._rng.random() * 0.3)
        connection.close()
        self._report.note("hung up")

    def _retry(self) -> None:
        """The same prompt again and again, each time given up before its answer."""
        text = f"{self._rng.randrange(5)} is what I ask about. " * 60
        for _ in range(3):
            with self._connected(self._stream(text)):
                time.sleep(self._rng.random() * 0.2)
        self._report.note("retried")

    def _idle(self) -> None:
        self._hold(b"")

    def _half_header(self) -> None:
        self._hold(b"GET /health HTTP/1.1\r\nHost:")

    def _half_body(self) -> None:
        self._hold(_HEAD % 10_000_000 + b'{"messages": [' * self._rng.choice([1, 1000]))

    def _unread(self) -> None:
        self._hold(self._stream("Tell me all. "))

    def _stream(self, text: str) -> bytes:
        _, body = _chat(messages=[{"role": "user", "content": text}], stream=True, max_tokens=400)
        return _HEAD % len(body) + body

    def _hold(self, content: bytes) -> None:
        with self._connected(content):
            # Some stay until the server ends them.
            time.sleep(self._rng.random() * self._rng.choice([3, 3, 12]))
        self._report.note("held a connection")

    def _connected(self, content: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=_TIMEOUT_S)
        connection.sendall(content)
        return connection
