"""Several models behind one server: each by its name, loaded when it is asked for, and its prefixes stay."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message

from reprise.api.app import shapes_of_apis
from reprise.api.models import ModelBackend, Models, ServedModel, answer_when_ready
from reprise.core.backend import Status, WeightsState
from reprise.core.errors import LoadFailed, UnknownModel
from tests.api.test_health import until
from tests.models.tiny import tiny_model

CHAT = [{"role": "user", "content": "Write a few words about the sea, the wind and the harbour, please."}]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[httpx.Client]:
    first, second = (str(tiny_model(name)) for name in ("qwen3_5", "llama"))
    command = [sys.executable, "-m", "reprise.cli.main", "serve", first, second, "--port", "0", "--max-tokens", "8"]
    with log.open("w") as err, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as process:
        try:
            assert process.stdout is not None
            said = re.fullmatch(r"Serving qwen3_5, llama at (http\S+) .*\n", process.stdout.readline())
            assert said is not None, log.read_text()
            with httpx.Client(base_url=said[1], timeout=120) as client:
                yield client
        finally:
            process.terminate()
            assert process.wait(60) == 0, log.read_text()


def states(server: httpx.Client) -> dict[str, str]:
    return {each["id"]: each["state"] for each in server.get("/v1/models").json()["data"]}


def ask(server: httpx.Client, model: str | None, **options: Any) -> dict[str, Any]:
    body = {"messages": CHAT, "temperature": 0, **({} if model is None else {"model": model}), **options}
    reply = server.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return cast(dict[str, Any], reply.json())


def test_a_model_is_loaded_when_it_is_asked_for_and_its_prefixes_outlive_its_weights(server: httpx.Client) -> None:
    first, second = states(server)
    assert states(server) == {first: "ready", second: "unloaded"}
    assert ask(server, None)["model"] == ask(server, first)["model"] == first
    cold = ask(server, second)
    assert (cold["model"], states(server)[second]) == (second, "ready")
    gone = server.post(f"/v1/models/{second}/unload").json()
    assert gone["state"] == states(server)[second] == "unloaded"
    warm = ask(server, second)
    assert warm["choices"] == cold["choices"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= cold["usage"]["prompt_tokens"] - 1
    assert server.post(f"/v1/models/{second}/load").json()["state"] == "ready"
    told = {each["id"]: each for each in server.get("/v1/models").json()["data"]}
    assert told[second]["bytes"] > 0 and "attention" in told[second]["layers"]
    models = [record["model"] for record in server.get("/v1/cache/requests").json()["data"]]
    assert {first, second} == set(models), "one list of records, which names the model"
    for name in (first, second):
        assert server.get("/health", params={"model": name}).json()["model"] == name


def test_the_log_names_the_model(server: httpx.Client, log: Path) -> None:
    _, second = states(server)
    answer = ask(server, second)
    until(lambda: f"{answer['id']} chat {second}: " in log.read_text())


def test_every_api_asks_for_a_model_by_name(server: httpx.Client) -> None:
    _, second = states(server)
    anthropic = {"model": second, "messages": CHAT, "max_tokens": 4}
    assert server.post("/v1/messages", json=anthropic).json()["model"] == second
    assert [each["name"] for each in server.get("/api/tags").json()["models"]] == [*states(server)]
    ollama = {"model": f"{second}:latest", "messages": CHAT, "stream": False}
    assert server.post("/api/chat", json=ollama).json()["message"]["role"] == "assistant"
    made = server.post("/v1/responses", json={"model": second, "input": "Hello"}).json()
    assert made["model"] == second
    assert server.get(f"/v1/responses/{made['id']}").json()["id"] == made["id"]
    with server.stream("POST", "/v1/chat/completions", json={"model": second, "messages": CHAT, "stream": True}) as it:
        chunks = [json.loads(line[6:]) for line in it.iter_lines() if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {second}


def test_a_name_that_is_not_served_is_answered_with_the_list(server: httpx.Client) -> None:
    reply = server.post("/v1/chat/completions", json={"model": "gpt-9", "messages": CHAT})
    assert reply.status_code == 404
    assert all(name in reply.json()["error"]["message"] for name in states(server))
    assert server.post("/v1/models/gpt-9/load").status_code == 404


def served(name: str, *, ready: "Future[Any] | None" = None) -> ServedModel:
    class Backend:
        def status(self) -> Status:
            return Status(weights=WeightsState.LOADING)

        def ready(self) -> "Future[Any]":
            assert ready is not None
            return ready

    def no_service(loaded: object) -> Any:
        return object()

    return ServedModel(id=name, backend=cast(ModelBackend, Backend()), make_service=no_service)


def test_names_are_ids_or_the_last_part_of_one() -> None:
    models = Models([served("org/small"), served("other/small"), served("org/large")])
    assert models.of(None).id == "org/small"
    assert models.of("large").id == models.of("large:latest").id == "org/large"
    assert models.of("other/small").id == "other/small"
    for name in ("small", "larg"):
        with pytest.raises(UnknownModel, match="org/small, other/small, org/large"):
            models.of(name)
    assert Models(models.all, accepts_any_name=True).of("gpt").id == "org/small"


class _Loaded:
    fingerprint, nbytes = "a", 1


async def _answered(outcome: object, *, is_stream: bool) -> list[Message]:
    """What a client is sent whose model needs longer than a status may wait."""
    ready: Future[Any] = Future()
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def answer() -> Response:
        return PlainTextResponse("data: [DONE]\n\n")

    def come() -> None:
        if isinstance(outcome, Exception):
            ready.set_exception(outcome)
        else:
            ready.set_result(outcome)

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    asyncio.get_running_loop().call_later(3.2, come)
    model = served("org/small", ready=ready)
    response = await answer_when_ready(
        model, Request(scope, receive), answer, is_stream=is_stream, shapes=shapes_of_apis()
    )
    await response(scope, receive, send)
    return sent


@pytest.mark.anyio
async def test_a_stream_begins_while_its_model_is_loaded() -> None:
    loaded, failed, whole = await asyncio.gather(
        _answered(_Loaded(), is_stream=True),
        _answered(LoadFailed("org/small does not fit."), is_stream=True),
        _answered(_Loaded(), is_stream=False),
    )
    bodies = ["".join(message["body"].decode() for message in sent[1:]) for sent in (loaded, failed, whole)]
    assert [sent[0]["status"] for sent in (loaded, failed, whole)] == [200, 200, 200]
    assert bodies[0].startswith(": org/small is being loaded (") and bodies[0].endswith("data: [DONE]\n\n")
    assert [message["type"] for message in loaded].count("http.response.start") == 1
    assert json.loads(bodies[1].rpartition("data: ")[2])["error"]["message"] == "org/small does not fit."
    assert bodies[2] == "data: [DONE]\n\n"
