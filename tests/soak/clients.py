"""Clients of every kind, each with a random source of its own: what they ask follows from their number and the seed."""

import http.client
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.workloads.talk import QUESTIONS, TOOLS

Message = dict[str, Any]

_SYSTEMS = (
    "You are a patient adviser. Answer in plain words.",
    "Translate the page that follows, and keep its form. " * 12,
    "You may read and write files, and run commands. Look before you change anything. " * 6,
)
_TIMEOUT_S = 120.0

_BROKEN: tuple[tuple[bytes, frozenset[int]], ...] = (
    (b"{", frozenset({400})),
    (b"[]", frozenset({400, 422})),
    (b'{"messages": "hello"}', frozenset({400, 422})),
    (b'{"messages": []}', frozenset({400, 422})),
    (b'{"messages": [{"role": "user", "content": "x"}], "stop": [5]}', frozenset({400, 422})),
    (b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"99999": 1}}', frozenset({400, 422})),
    (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', frozenset({400, 422})),
    (b'{"messages": [{"role": "user", "content": "x"}], "model": "of another house"}', frozenset({404})),
    (b'{"messages": [{"role": "user", "content": "\\x"}]}', frozenset({400, 422})),
)
"""Bodies and the statuses that fit."""


@dataclass(slots=True)
class ClientReport:
    """What all clients saw."""

    seen: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str) -> None:
        with self.lock:
            self.seen[what] += 1

    def fail(self, sentence: str) -> None:
        with self.lock:
            self.failures.append(sentence)


class SoakClient:
    """One client, doing one thing after another until it is told to stop."""

    def __init__(self, port: int, number: int, seed: int, report: ClientReport) -> None:
        self._port = port
        self._rng = random.Random(f"{seed}:{number}")
        self._report = report
        self._chats: list[list[Message]] = []

    def run(self, num: int) -> None:
        """Do so many things. Never raises: what goes wrong is in the report."""
        doings = (
            (self._turn, 6),
            (self._branch, 2),
            (self._regenerate, 2),
            (self._tool_loop, 3),
            (self._several, 1),
            (self._leave, 3),
            (self._dawdle, 1),
            (self._cancel_by_id, 1),
            (self._malformed, 2),
            (self._completion, 1),
        )
        for _ in range(num):
            doing = self._rng.choices([d for d, _ in doings], [w for _, w in doings])[0]
            try:
                doing()
            except Exception as error:
                self._report.fail(f"{doing.__name__}: {type(error).__name__}: {error}")

    # What it does.

    def _turn(self) -> None:
        """The next turn of one of its chats, or the first of a new one."""
        if not self._chats or self._rng.random() < 0.3 or len(self._chat()) > 12:
            self._chats = [*self._chats[-2:], [{"role": "system", "content": self._rng.choice(_SYSTEMS)}]]
        messages = self._chats[-1]
        messages.append({"role": "user", "content": self._question()})
        answer = self._ask(self._body(messages))
        if answer is None:
            messages.pop()
            return
        if self._rng.random() < 0.5:
            answer.pop("reasoning_content", None)
        messages.append(answer)

    def _branch(self) -> None:
        messages = self._chat()
        cut = [i for i, message in enumerate(messages) if message["role"] == "user"]
        at = self._rng.choice(cut) if cut else len(messages)
        self._ask(self._body([*messages[:at], {"role": "user", "content": self._question()}]))

    def _regenerate(self) -> None:
        messages = list(self._chat())
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        if messages:
            self._ask(self._body(messages))

    def _tool_loop(self) -> None:
        messages: list[Message] = [
            {"role": "system", "content": _SYSTEMS[2]},
            {"role": "user", "content": self._question()},
        ]
        for step in range(self._rng.randint(1, 4)):
            call = {"name": "read_file", "arguments": json.dumps({"path": f"{self._rng.randrange(9)}.py"})}
            calls = [{"id": f"call{step}", "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": f"call{step}", "content": self._question() * 3})
            self._ask({**self._body(messages), "tools": list(TOOLS)})

    def _several(self) -> None:
        body = {**self._body([{"role": "user", "content": self._question()}]), "n": 3, "temperature": 0.8}
        self._ask({**body, "seed": self._rng.randrange(1000)})

    def _leave(self) -> None:
        """Hang up at a random moment, before or after the first token."""
        body = {**self._body([*self._chat(), {"role": "user", "content": self._question() * 4}]), "stream": True}
        connection = self._post({**body, "max_tokens": 200})
        num_lines = self._rng.choice([0, 0, 1, 5, 20])
        try:
            if num_lines == 0:
                time.sleep(self._rng.random() * 0.5)
                return
            response = connection.getresponse()
            for _ in range(num_lines):
                response.readline()
        finally:
            connection.close()
        self._report.note("left")

    def _dawdle(self) -> None:
        """Read slowly."""
        self._ask({**self._body([{"role": "user", "content": self._question()}]), "max_tokens": 40}, pause_s=0.05)

    def _cancel_by_id(self) -> None:
        body = {**self._body([{"role": "user", "content": self._question() * 3}]), "stream": True, "max_tokens": 200}
        connection = self._post(body)
        response = connection.getresponse()
        request_id = response.headers["x-request-id"]
        if response.status != 200 or request_id is None:
            connection.close()
            return
        response.readline()
        other = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        other.request("DELETE", f"/v1/requests/{request_id}")
        status = other.getresponse().status
        other.close()
        rest = response.read()
        connection.close()
        if status not in (200, 404):
            self._report.fail(f"DELETE answered {status}")
        elif status == 200 and b"request_cancelled" not in rest and b"[DONE]" not in rest:
            self._report.fail(f"a cancelled stream ended with {rest[-200:]!r}")
        self._report.note("cancelled")

    def _malformed(self) -> None:
        body, statuses = self._rng.choice(_BROKEN)
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        told = response.read()
        connection.close()
        # A server with many bodies in its hands refuses another before it reads it.
        if response.status not in (*statuses, 429) or "error" not in json.loads(told):
            self._report.fail(f"{body!r} gave {response.status}: {told[:200]!r}")
        self._report.note("refused")

    def _completion(self) -> None:
        self._ask({"prompt": self._question() * 2, "temperature": 0, "max_tokens": 8}, path="/v1/completions")

    # How it asks.

    def _chat(self) -> list[Message]:
        return self._rng.choice(self._chats) if self._chats else [{"role": "system", "content": _SYSTEMS[0]}]

    def _question(self) -> str:
        return self._rng.choice(QUESTIONS)

    def _body(self, messages: list[Message]) -> dict[str, Any]:
        rng = self._rng
        body: dict[str, Any] = {"messages": list(messages), "max_tokens": rng.randint(1, 24), "temperature": 0}
        chance = rng.random()
        if chance < 0.25:
            body |= {"temperature": rng.choice([0.7, 1.0]), "seed": rng.randrange(1000), "top_p": 0.95, "top_k": 40}
        elif chance < 0.35:
            body |= {"logprobs": True, "top_logprobs": 3}
        elif chance < 0.45:
            body |= {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        elif chance < 0.5:
            body |= {"stop": [rng.choice("aeiou"), "the"]}
        elif chance < 0.55:
            body |= {"thinking_budget": rng.randint(0, 6)}
        return {**body, "stream": rng.random() < 0.5}

    def _post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def _ask(self, body: dict[str, Any], *, path: str = "/v1/chat/completions", pause_s: float = 0.0) -> Message | None:
        """The answer's message; None if the queue is full, after the pause that the server asks for."""
        connection = self._post(body, path)
        response = connection.getresponse()
        if response.status == 429:
            response.read()
            connection.close()
            self._report.note("turned away")
            time.sleep(min(1.0, float(response.headers["retry-after"])))
            return None
        assert response.status == 200, (response.status, response.read()[:300], body)
        message = self._read_stream(response, pause_s) if body.get("stream") else self._read_whole(response, body)
        connection.close()
        self._report.note("answered")
        return message

    def _read_whole(self, response: http.client.HTTPResponse, body: dict[str, Any]) -> Message:
        told = json.loads(response.read())
        assert len(told["choices"]) == body.get("n", 1), told
        message = told["choices"][0].get("message", {})
        return {key: value for key, value in message.items() if value is not None}

    def _read_stream(self, response: http.client.HTTPResponse, pause_s: float) -> Message:
        said = {"content": "", "reasoning_content": ""}
        last = b""
        for line in response:
            if line.startswith(b"data: {"):
                told = json.loads(line.removeprefix(b"data: "))
                assert "error" not in told, told
                for choice in told["choices"]:
                    for key in said:
                        said[key] += choice["delta"].get(key) or "" if choice["index"] == 0 else ""
            last = line.strip() or last
            if pause_s > 0:
                time.sleep(pause_s)
        assert last == b"data: [DONE]", last
        return {"role": "assistant", **said}
