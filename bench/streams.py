"""Streams of completions over HTTP, with the time of every token. No more work in the client than it takes."""

import http.client
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from bench.rivals import RivalServer

_TIMEOUT_S = 900.0


@dataclass(eq=False)
class TimedStream:
    """One streamed answer. Times are `time.perf_counter`'s."""

    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list[float])
    ended_s: float = 0.0
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    failure: str | None = None
    is_unwanted: bool = False
    """Set by whoever has seen enough."""

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def first_s(self) -> float:
        return self.token_s[0]


def chat(text: str, *, system: str | None = None, num: int = 16) -> dict[str, Any]:
    """The body of a greedy, streamed chat request."""
    head = [] if system is None else [{"role": "system", "content": system}]
    return {
        "messages": [*head, {"role": "user", "content": text}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": num,
    }


def run(server: RivalServer, body: dict[str, Any], stream: TimedStream) -> None:
    """Send one request and read its answer to the end, or until somebody has had enough of it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_TIMEOUT_S)
    stream.sent_s = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        stream.failure = response.read().decode(errors="replace")
        return
    for line in response:
        now = time.perf_counter()
        if b'"usage": {' in line or b'"usage":{' in line:
            usage: dict[str, Any] = json.loads(line.removeprefix(b"data: "))["usage"]
            details: dict[str, int | None] = usage.get("prompt_tokens_details") or {}
            stream.prompt, stream.generated = usage["prompt_tokens"], usage["completion_tokens"]
            stream.cached = details.get("cached_tokens") or 0
        elif _says_something(line):
            stream.token_s.append(now)
        if stream.is_unwanted:
            break
    stream.ended_s = time.perf_counter()
    connection.close()


def _says_something(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line.removeprefix(b"data: "))["choices"]
    return any(c["delta"].get(key) for c in choices for key in ("content", "reasoning", "reasoning_content"))


class StreamClient:
    """Requests under way on threads of their own."""

    def __init__(self, server: RivalServer) -> None:
        self._server = server
        self._running: list[threading.Thread] = []
        self.streams: list[TimedStream] = []

    def send(self, body: dict[str, Any]) -> TimedStream:
        stream = TimedStream()
        thread = threading.Thread(target=run, args=(self._server, body, stream))
        self.streams.append(stream)
        self._running.append(thread)
        thread.start()
        return stream

    def hang_up(self) -> None:
        """Read no stream any further."""
        for stream in self.streams:
            stream.is_unwanted = True
        self.wait()

    def wait(self) -> list[TimedStream]:
        """All streams, when they have ended."""
        for thread in self._running:
            thread.join()
        failures = [stream.failure for stream in self.streams if stream.failure is not None]
        if failures:
            raise RuntimeError(f"{self._server.name}: {failures[0]}")
        return self.streams


def burst(server: RivalServer, bodies: Sequence[dict[str, Any]]) -> list[TimedStream]:
    """All at once."""
    client = StreamClient(server)
    for body in bodies:
        client.send(body)
    return client.wait()


def total_s(streams: Sequence[TimedStream]) -> float:
    """From the first request to the end of the last answer."""
    return max(s.ended_s for s in streams) - min(s.sent_s for s in streams)


def prose(seed: int, num_words: int) -> str:
    """Words of a text in an order of their own; the tiny tokenizer needs about two tokens for each."""
    words = (files("reprise.lab.demo") / "texts" / "prose.txt").read_text(encoding="utf-8").split()
    source = random.Random(seed)
    return " ".join(source.choice(words) for _ in range(num_words))
