"""Several models behind one server: each by its name, loaded when it is asked for, and its prefixes stay."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message
from typer.testing import CliRunner

from reprise.api.app import shapes_of_apis
from reprise.api.service.models import ModelBackend, Models, ServedModel
from reprise.api.wire.while_loading import answer_when_ready
from reprise.cli.main import app
from reprise.core.backend import Status, WeightsState
from reprise.core.errors import LoadFailed, UnknownModel
from tests.api.test_health import until
from tests.api.test_watching import ServerEvents
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
    # Who only looks does not have it loaded.
    for looked in (
        server.post("/v1/cache/lookup", json={"model": second, "messages": CHAT}),
        server.get("/v1/cache/tree", params={"model": second}),
    ):
        assert looked.status_code == 404 and "has not been loaded yet" in looked.json()["error"]["message"]
    assert states(server) == {first: "ready", second: "unloaded"}
    assert ask(server, first)["model"] == first
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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/completions", {"prompt": "The sea"}),
        ("/v1/responses", {"input": "The sea"}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 4}),
    ],
)
def test_one_of_several_models_has_to_be_named(server: httpx.Client, path: str, body: dict[str, Any]) -> None:
    reply = server.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"] == "Several models are served here. Send `model`: qwen3_5, llama."


def told_by_prometheus(server: httpx.Client) -> dict[str, float]:
    lines = server.get("/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_every_number_is_of_a_model_or_of_the_server(server: httpx.Client) -> None:
    first, second = states(server)
    ask(server, first)
    ask(server, second)
    server.post(f"/v1/models/{second}/unload").raise_for_status()
    until(lambda: server.get("/health").json()["idle"])
    whole = server.get("/health").json()
    each = {name: server.get("/health", params={"model": name}).json() for name in (first, second)}
    assert [told["model"] for told in each.values()] == [first, second]
    for field in ("prompt_tokens", "generated", "bytes_kv", "bytes_weights", "tokens_held", "loads"):
        assert whole[field] == sum(told[field] for told in each.values()), field
    assert each[second]["bytes_kv"] > 0 and each[second]["bytes_weights"] == 0 < each[first]["bytes_weights"]
    assert {told["id"]: told["state"] for told in whole["models"]} == {first: "ready", second: "unloaded"}
    told = told_by_prometheus(server)
    for name in (first, second):
        assert told[f'reprise_prompt_tokens_total{{model="{name}"}}'] == each[name]["prompt_tokens"]
        assert told[f'reprise_state_bytes{{model="{name}",use="kv"}}'] == each[name]["bytes_kv"]
        assert told[f'reprise_model_ready{{model="{name}"}}'] == (name == first)
        assert told[f'reprise_time_to_first_token_seconds_count{{model="{name}"}}'] > 0
    assert told["reprise_budget_bytes"] == whole["bytes_budget"], "all models have it together"
    overview = server.get("/v1/cache/overview").json()
    parts, models = overview["memory"]["parts"], overview["models"]
    assert parts["weights"] == sum(model["bytes_weights"] for model in models) == each[first]["bytes_weights"]
    assert parts["kept"] == sum(model["bytes_kv"] for model in models) == whole["bytes_kv"]
    assert sum(parts.values()) - overview["memory"]["untouched"] == overview["memory"]["process"]
    for name in (first, second):
        alone = server.get("/v1/cache/overview", params={"model": name}).json()
        assert (alone["model"], alone["health"]["generated"]) == (name, each[name]["generated"])
        assert alone["memory"]["parts"]["kept"] == each[name]["bytes_kv"]
        assert alone["memory"]["parts"]["weights"] == each[name]["bytes_weights"]
        assert alone["savings"]["prompt"] == each[name]["prompt_tokens"] < overview["savings"]["prompt"]
    assert server.get("/v1/cache/overview", params={"model": "none"}).status_code == 404


def test_each_record_is_counted_once(server: httpx.Client) -> None:
    """Whatever was looked at of another model before."""
    _, second = states(server)
    for path in ("/v1/cache/tree", "/v1/cache/requests", "/health", "/metrics"):
        server.get(path, params={"model": second}).raise_for_status()

    def num_told() -> float:
        told = told_by_prometheus(server)
        return sum(n for name, n in told.items() if name.startswith("reprise_requests_total{") and second in name)

    before = num_told()
    ask(server, second)
    until(lambda: num_told() > before)
    assert num_told() == before + 1


def test_what_is_stored_is_shown_while_the_weights_are_unloaded(server: httpx.Client) -> None:
    first, second = states(server)
    answer = ask(server, second)
    until(lambda: server.get("/health").json()["idle"])
    server.post(f"/v1/models/{second}/unload").raise_for_status()
    at = {"model": second}
    tree = server.get("/v1/cache/tree", params=at).json()
    assert tree["model"] == second and tree["totals"]["tokens"] > 0
    edge = max(tree["data"], key=lambda node: node["tokens"])
    text = server.get(f"/v1/cache/tree/{edge['id']}", params=at).json()
    assert text["model"] == second and text["text"].startswith(edge["text"])
    assert server.get("/v1/cache/tree/search", params={**at, "q": "harbour"}).json()["data"]
    for path in ("evictions", "budgets"):
        assert server.get(f"/v1/cache/{path}", params=at).json()["model"] == second
    found = server.post("/v1/cache/lookup", json={"model": second, "messages": CHAT}).json()
    assert (found["model"], found["state"], found["from"]) == (second, "unloaded", "memory")
    assert found["matched"] >= answer["usage"]["prompt_tokens"] - 1 and found["est_ttft_s"] > 0
    assert server.post("/tokenize", json={"model": second, "prompt": "sea"}).json()["count"] > 0
    records = server.get("/v1/cache/requests", params=at).json()["data"]
    assert {record["model"] for record in records} == {second}
    assert states(server)[second] == "unloaded", "nothing of it has loaded the weights"
    explained = CliRunner().invoke(app, ["explain", answer["id"], "--url", str(server.base_url)])
    assert f"(chat, {second}): " in explained.output
    shown = CliRunner().invoke(app, ["top", "--once", "--model", second, "--url", str(server.base_url)]).output
    assert re.search(rf"{second} +unloaded", shown) and f"Cache of {second}: " in shown
    listed = CliRunner().invoke(app, ["requests", "--model", second, "--url", str(server.base_url)]).output
    assert f"  {second}  chat  " in listed and f"  {first}  " not in listed


def test_pins_and_clearing_are_of_one_model_or_of_all(server: httpx.Client) -> None:
    first, second = states(server)

    def num_held() -> list[int]:
        return [server.get("/v1/cache/tree", params={"model": m}).json()["totals"]["tokens"] for m in (first, second)]

    made = {
        name: server.post("/v1/cache/pin", json={"model": name, "messages": CHAT}).json() for name in (first, second)
    }
    assert [made[name]["model"] for name in made] == [first, second]
    assert [pin["model"] for pin in server.get("/v1/cache/pin").json()["data"]] == [first, second]
    one = server.get("/v1/cache/pin", params={"model": second}).json()
    assert [(pin["id"], pin["model"]) for pin in one["data"]] == [(made[second]["id"], second)]
    server.post(f"/v1/models/{second}/unload").raise_for_status()
    lifted = server.delete(f"/v1/cache/pin/{made[second]['id']}", params={"model": second}).json()
    assert lifted["models"] == [second]
    assert [pin["model"] for pin in server.get("/v1/cache/pin").json()["data"]] == [first]
    assert server.delete("/v1/cache", params={"model": second}).json()["models"] == [second]
    assert num_held()[0] > 0 == num_held()[1]
    assert server.delete("/v1/cache").json()["models"] == [first, second]
    assert num_held() == [0, 0] and states(server)[second] == "unloaded"


def test_events_name_the_model_and_tell_its_state(server: httpx.Client) -> None:
    first, second = states(server)
    ask(server, second)
    server.post(f"/v1/models/{second}/unload").raise_for_status()
    with server.stream("GET", "/v1/events") as response:
        stream = ServerEvents(response)
        name, snapshot = stream.next()
        assert name == "snapshot" and [tree["model"] for tree in snapshot["trees"]] == [first, second]
        assert {each["id"]: each["state"] for each in snapshot["models"]} == {first: "ready", second: "unloaded"}
        ask(server, second, messages=[{"role": "user", "content": "And of the tide?"}])
        seen = dict.fromkeys(("tree", "models", "request.ended"), False)
        while not all(seen.values()):
            name, body = stream.next()
            if name == "models":
                seen[name] |= {each["id"]: each["state"] for each in body["models"]}[second] == "ready"
            elif name in seen:
                seen[name] |= body["model"] == second


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


def served(name: str, *, ready: "Future[Any] | None" = None) -> ServedModel[Any]:
    class LoadingBackend:
        def status(self) -> Status:
            return Status(weights=WeightsState.LOADING)

        def ready(self) -> "Future[Any]":
            assert ready is not None
            return ready

    def no_service(loaded: object) -> Any:
        return object()

    return ServedModel(id=name, backend=cast(ModelBackend, LoadingBackend()), make_service=no_service)


def test_names_are_ids_or_the_last_part_of_one() -> None:
    models = Models([served("org/small"), served("other/small"), served("org/large")])
    assert models.of(None).id == "org/small"
    assert models.of("large").id == models.of("large:latest").id == "org/large"
    assert models.of("other/small").id == "other/small"
    for name in ("small", "larg"):
        with pytest.raises(UnknownModel, match="org/small, other/small, org/large"):
            models.of(name)
    assert Models(models.all, accepts_any_name=True).of("gpt").id == "org/small"


@pytest.mark.anyio
async def test_a_service_of_other_weights_does_not_answer() -> None:
    """What an alias of the same files has had loaded meanwhile may be another model."""

    class ReadyBackend:
        fingerprint = "a"

        def status(self) -> Status:
            return Status(weights=WeightsState.READY)

        def ready(self) -> "Future[Any]":
            ready: Future[Any] = Future()
            ready.set_result(SimpleNamespace(fingerprint=self.fingerprint, nbytes=1))
            return ready

    def make_service(loaded: Any) -> Any:
        return SimpleNamespace(of=loaded.fingerprint)

    backend = ReadyBackend()
    model = ServedModel(id="it", backend=cast(ModelBackend, backend), make_service=make_service)
    first: Any = await model.ready()
    assert model.is_ready and await model.ready() is first and first.of == "a"
    backend.fingerprint = "b"
    assert not model.is_ready
    second: Any = await model.ready()
    assert second.of == "b" and model.is_ready


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


@pytest.mark.matrix
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
