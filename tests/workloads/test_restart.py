"""A restart between any two turns costs nothing: the same counts as a server that was never stopped."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from socket import create_connection
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from reprise.chat.answer import Answer
from reprise.core.sizes import Bytes
from tests.workloads.serving import HttpTurn, Message, Serving, returned, serving
from tests.workloads.talk import QUESTIONS, TOOLS, calling, result, system, thoughtful, user

TURNS = 4


class Restarting:
    """A server that may be stopped between two turns, and another one started in its place."""

    def __init__(self, model: Path, options: dict[str, Any], *, restarts: bool) -> None:
        self._begin = lambda: serving(model, **options)
        self._restarts = restarts
        self._running: AbstractContextManager[Serving] | None = None

    def server(self) -> Serving:
        """The one for the next turn."""
        if self._running is not None:
            self._server.wait_until_idle()
        if self._running is None or self._restarts:
            self.stop()
            self._running = self._begin()
            self._server = self._running.__enter__()
        return self._server

    def stop(self) -> None:
        if self._running is not None:
            self._running.__exit__(None, None, None)
            self._running = None

    def __enter__(self) -> "Restarting":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def chat(restarting: Restarting) -> list[HttpTurn]:
    """Questions and answers; the template drops earlier thoughts."""
    turns: list[HttpTurn] = []
    messages: list[Message] = [system()]
    for number in range(TURNS):
        messages.append(user(QUESTIONS[number]))
        turns.append(restarting.server().ask(messages, thoughtful(number)))
        messages.append(returned(turns[-1], has_reasoning=True))
    return turns


def tool_loop(restarting: Restarting) -> list[HttpTurn]:
    """Calls of tools, whose thoughts stay in the prompt, in the model's own odd spelling."""
    turns: list[HttpTurn] = []
    messages: list[Message] = [system(), user("Find out why the count is wrong.")]
    for step in range(TURNS):
        turns.append(restarting.server().ask(messages, calling(step), tools=TOOLS))
        answer = returned(turns[-1], has_reasoning=True)
        messages += [answer, result(answer, step)]
    return turns


@pytest.mark.matrix
@pytest.mark.every_model
@pytest.mark.parametrize("settles", [True, False])
@pytest.mark.parametrize("play", [chat, tool_loop])
@pytest.mark.parametrize("model", ["qwen3_5", "llama", "gemma3_text"])
def test_turns_with_restarts_between_them(
    models: dict[str, Path], tmp_path: Path, model: str, play: Callable[[Restarting], list[HttpTurn]], *, settles: bool
) -> None:
    options: dict[str, Any] = {"settles": settles, "prefill_chunk": 64}
    with Restarting(models[model], options, restarts=False) as restarting:
        expected = play(restarting)
    on_disk = {"disk_directory": str(tmp_path), "disk_bytes": Bytes(1 << 30)}
    with Restarting(models[model], options | on_disk, restarts=True) as restarting:
        turns = play(restarting)
    assert [turn.message["content"] for turn in turns] == [turn.message["content"] for turn in expected]
    # The model spells its answers in other ways each time, in more or in fewer tokens.
    assert [turn.computed for turn in turns] == [turn.computed for turn in expected]
    assert sum(turn.computed for turn in turns[1:]) < sum(turn.prompt for turn in turns[1:]) / 2


_SERVER = """
import sys
from reprise.api.http.ending import Ending
from reprise.cli.main import app

# Answers are cut off at once, and for the rest there is time on the slowest machine.
Ending.answers_s = property(lambda ending: 0.0)
app(["serve", *sys.argv[1:]])
"""


@contextmanager
def started(model: Path, directory: Path, *options: str) -> Generator[tuple[httpx.Client, "subprocess.Popen[str]"]]:
    """`reprise serve` as a process of its own."""
    command = [sys.executable, "-c", _SERVER, str(model), "--port", "0", "--any-model"]
    command += ["--disk-cache", str(directory), "--disk-bytes", "1GB", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split(" at ")[1].split()[0]
        try:
            with httpx.Client(base_url=url, timeout=120) as client:
                yield client, process
        finally:
            process.kill()


def wait_until_written(client: httpx.Client) -> None:
    """Until all that was stored is on disk, as its events say."""
    tree: dict[str, Any] = {}
    counters: dict[str, Any] = {}
    with connect_sse(client, "GET", "/v1/events") as events:
        for event in events.iter_sse():
            body = event.json()
            match event.event:
                case "snapshot":
                    (tree,), counters = body["trees"], body["counters"]
                case "tree":
                    tree = body
                case "counters":
                    counters = body
                case _:
                    continue
            is_queued = tree["unwritten"] > 0 or counters["disk"]["bytes_queued"] > 0
            if counters["idle"] and tree["files"] >= 2 and not is_queued:
                return
    raise AssertionError("the server has ended")


@pytest.mark.soak
def test_a_server_that_was_killed_finds_its_chats_again(models: dict[str, Path], tmp_path: Path) -> None:
    messages: list[Message] = [system(), user(QUESTIONS[0])]
    body = {"model": "any", "max_tokens": 40, "temperature": 0}
    with started(models["qwen3_5"], tmp_path) as (client, process):
        reply = client.post("/v1/chat/completions", json={**body, "messages": messages}).json()
        wait_until_written(client)
        process.send_signal(signal.SIGKILL)
    said = reply["choices"][0]["message"]
    messages += [{"role": "assistant", "content": said["content"]}, user(QUESTIONS[1])]
    with started(models["qwen3_5"], tmp_path) as (client, process):
        usage = client.post("/v1/chat/completions", json={**body, "messages": messages}).json()["usage"]
        health = client.get("/health").json()
        assert health["loaded"] == usage["prompt_tokens_details"]["cached_tokens"] > 0
        assert health["disk"]["bytes_read"] > 0 and health["disk"]["errors"] == 0
        reason = client.get("/v1/cache/requests").json()["data"][0]
        assert reason["loaded"] == health["loaded"]
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    assert not any(path.suffix not in (".kv", ".lock", "") for path in tmp_path.rglob("*"))


@pytest.mark.matrix
def test_a_server_that_is_stopped_writes_what_waits_whatever_clients_do(
    models: dict[str, Path], tmp_path: Path
) -> None:
    messages: list[Message] = [system(), user(QUESTIONS[0])]
    body = {"model": "any", "max_tokens": 4, "temperature": 0, "messages": messages}
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    stream = json.dumps({**body, "max_tokens": 2000, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
    with started(models["qwen3_5"], tmp_path, "--grace", "600") as (client, process):
        address = (client.base_url.host, client.base_url.port)
        with create_connection(address) as half, create_connection(address) as unread:
            half.sendall(head % 1000 + b'{"messages": [')
            unread.sendall(head % len(stream) + stream)
            assert unread.recv(1) == b"H"
            usage = client.post("/v1/chat/completions", json=body).json()["usage"]
            # What was stored waits for some seconds before it is written.
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
    on_disk: dict[str, Any] = {
        "disk_directory": str(tmp_path),
        "disk_bytes": Bytes(10**9),
        "accepts_any_model": True,
    }
    with serving(models["qwen3_5"], **on_disk) as server:
        server.answer = Answer(content="Yes.")
        again = server.client.post("/v1/chat/completions", json=body).json()["usage"]
        assert again["prompt_tokens"] == usage["prompt_tokens"]
        # All that the next turn has in common with it: the template drops the `<think>` at the end.
        assert again["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 2
        assert server.health()["loaded"] > 0
