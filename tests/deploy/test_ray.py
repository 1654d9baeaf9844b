"""`reprise.deploy` on Ray Serve, with two replicas of a tiny model on this machine. Needs the extra `ray`."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from reprise.benchmark.server_process import free_port
from tests.models.tiny import tiny_model

pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(find_spec("ray") is None, reason='needs Ray Serve: pip install "mlx-reprise[ray]"'),
]

KEY = "a-key"
REPLICA = "x-reprise-replica"


class Cluster:
    """The process of `tests/deploy/cluster.py`, and a client of what it serves."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path, client: httpx.Client) -> None:
        self._process, self._log, self.client = process, log, client

    def command(self, *words: str) -> None:
        """Have it do something, and wait until that is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        self.wait()

    def wait(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "cluster: done\n":
                return
        raise AssertionError(self._log.read_text()[-5000:])

    def chat(self, messages: list[dict[str, str]], *, replica: str | None = None) -> tuple[str, dict[str, Any]]:
        """The replica that answers, and its response."""
        headers = {} if replica is None else {REPLICA: replica}
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        response = self.client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.headers[REPLICA], response.json()

    def replicas(self, num: int) -> list[str]:
        """The replicas, once there are so many."""
        until_s = time.monotonic() + 120
        seen: list[str] = []
        while len(set(seen)) != num or len(seen) < 8:
            assert time.monotonic() < until_s, seen
            seen = [*seen[-7:], self.client.get("/health/ready").headers[REPLICA]]
        return sorted(set(seen))


@contextmanager
def cluster(log: Path, *arguments: str) -> Generator[Cluster]:
    """With these arguments of `build`."""
    port = free_port()
    command = [sys.executable, "-m", "tests.deploy.cluster", str(port), *arguments]
    with (
        log.open("w") as err,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True) as process,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {KEY}"}, timeout=60
        ) as client,
    ):
        try:
            found = Cluster(process, log, client)
            found.wait()
            yield found
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            finally:
                process.kill()


def test_two_replicas(tmp_path: Path) -> None:
    """A chat stays where its text is, goes on where its replica is killed, and streams end whole when one stops."""
    arguments = (f"model={tiny_model('qwen3_5')}", f"api-key={KEY}", "grace=30", "max_requests=32")
    with cluster(tmp_path / "log", *arguments, "replicas=2") as served:
        first, second = served.replicas(2)
        assert served.client.get("/v1/models", headers={"authorization": "Bearer other"}).status_code == 401
        chats = {replica: long_chat(served, number, replica) for number, replica in enumerate((first, second))}
        # Whoever is asked: the second and the third turn go where the first was.
        for _ in range(2):
            for replica, chat in chats.items():
                at, response = served.chat(chat)
                usage = response["usage"]
                assert at == replica
                assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.8 * usage["prompt_tokens"]
                say(chat, response)

        with ThreadPoolExecutor(2) as pool:
            # A replica is killed in the middle of an answer: that is lost, and says so. Its chat goes on elsewhere.
            events = streamed(served, second, max_tokens=2000)
            next(events)
            served.command("kill", second)
            assert "replica_lost" in json.dumps(list(events)[-1])
            at, response = served.chat(chats[second])
            assert at == first and response["usage"]["prompt_tokens_details"]["cached_tokens"] < 100
            say(chats[second], response)

            # One that stops finishes its answers.
            (third,) = set(served.replicas(2)) - {first}
            streams = [streamed(served, replica, max_tokens=300) for replica in (first, third)]
            for events in streams:
                next(events)
            rest = [pool.submit(list, events) for events in streams]
            served.command("deploy", *arguments, "replicas=1")
            for answer in rest:
                *chunks, last, done = answer.result()
                assert done == "[DONE]" and last["choices"][0]["finish_reason"] == "length"
                assert sum(bool(chunk["choices"][0]["delta"]) for chunk in chunks) >= 250
            (left,) = served.replicas(1)
            for chat in chats.values():
                assert served.chat(chat)[0] == left
    said = (tmp_path / "log").read_text()
    assert len(re.findall("draining", said)) >= 1


def long_chat(served: Cluster, number: int, replica: str) -> list[dict[str, str]]:
    """A chat of one turn that this replica has answered."""
    chat = [{"role": "user", "content": f"Chat {number}. " + " ".join(str(number * i * i) for i in range(400))}]
    at, response = served.chat(chat, replica=replica)
    assert at == replica and response["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    say(chat, response)
    return chat


def say(chat: list[dict[str, str]], response: dict[str, Any]) -> None:
    message = response["choices"][0]["message"]
    chat += [
        {"role": "assistant", "content": message["content"], "reasoning_content": message["reasoning_content"]},
        {"role": "user", "content": "And then?"},
    ]


def streamed(served: Cluster, replica: str, *, max_tokens: int) -> Iterator[Any]:
    """The events of an answer of this length by this replica."""
    body = {"messages": [{"role": "user", "content": replica}], "max_tokens": max_tokens, "stream": True}
    body |= {"logit_bias": {}, "ignore_eos": True}
    headers = {REPLICA: replica}
    with served.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.headers[REPLICA] == replica
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])
