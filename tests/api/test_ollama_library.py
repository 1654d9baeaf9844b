"""`/api/pull`, `/api/delete` and `/api/ps` of a server that fetches models for requests, with a hub on this machine."""

import json
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from reprise.api.ollama.library import ends_with_request
from reprise.api.service.models import ModelBackend, Models, ServedModel
from reprise.cli.engines import ServingEngines
from reprise.cli.main import app
from reprise.core.settings import Settings
from tests.api.server_thread import ServerThread
from tests.api.servers import api
from tests.cli.fake_hub import FakeHub, running_hub
from tests.models.tiny import tiny_model

ID = "someone/tiny-llama"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[FakeHub]:
    with running_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        hub.add(ID, tiny_model("llama"))
        yield hub


@pytest.fixture
def client(hub: FakeHub) -> Generator[httpx.Client]:
    settings = Settings(model=str(tiny_model("qwen3_5")), has_hub_cache=True, downloads=True, is_audit_off=True)
    engines = ServingEngines(settings)
    try:
        server = ServerThread(engines.load(), settings)
        try:
            with httpx.Client(base_url=server.url, timeout=120) as client:
                yield client
        finally:
            server.stop()
    finally:
        engines.close()


def names(client: httpx.Client, path: str) -> list[str]:
    return [model["name"] for model in client.get(path).json()["models"]]


def ask(client: httpx.Client, model: str) -> httpx.Response:
    return client.post(
        "/api/chat", json={"model": model, "messages": HI, "stream": False, "options": {"num_predict": 2}}
    )


def test_a_model_is_pulled_served_unloaded_and_deleted(client: httpx.Client) -> None:
    assert names(client, "/api/tags") == ["qwen3_5"]
    assert ask(client, ID).status_code == 404
    pulled = client.post("/api/pull", json={"model": ID})
    assert pulled.headers["content-type"] == "application/x-ndjson"
    steps: list[dict[str, Any]] = [json.loads(each) for each in pulled.text.splitlines()]
    assert (steps[0], steps[-1]) == ({"status": "pulling manifest"}, {"status": "success"})
    size = sum(file.stat().st_size for file in tiny_model("llama").iterdir())
    assert {step["total"] for step in steps[1:-1]} == {size} and steps[-2]["completed"] == size
    # It is served from now on, and loaded by the request that names it.
    assert names(client, "/api/tags") == ["qwen3_5", ID]
    answered = ask(client, f"{ID}:latest")
    assert answered.status_code == 200, answered.text
    assert names(client, "/api/ps") == ["qwen3_5", ID]
    shown = CliRunner().invoke(app, ["ps", "--url", str(client.base_url)])
    assert shown.exit_code == 0 and f"{ID}: 230 kB, context of 8,192 tokens" in shown.output
    # As `ollama stop` does it, and as ours.
    unload = client.post("/api/generate", json={"model": ID, "keep_alive": 0}).json()
    assert (unload["done_reason"], names(client, "/api/ps")) == ("unload", ["qwen3_5"])
    assert ask(client, ID).status_code == 200
    assert CliRunner().invoke(app, ["stop", ID, "--url", str(client.base_url)]).exit_code == 0
    assert names(client, "/api/ps") == ["qwen3_5"]
    assert ask(client, ID).status_code == 200
    assert client.request("DELETE", "/api/delete", json={"model": ID}).status_code == 200
    assert names(client, "/api/tags") == names(client, "/api/ps") == ["qwen3_5"]
    assert client.request("DELETE", "/api/delete", json={"model": ID}).status_code == 404
    assert ask(client, ID).status_code == 404
    # It comes back.
    assert client.post("/api/pull", json={"name": ID, "stream": False}).json() == {"status": "success"}
    assert ask(client, ID).status_code == 200


def test_a_model_that_was_named_at_the_start_stays_when_its_files_go() -> None:
    listed = [
        ServedModel(
            id=name,
            backend=cast(ModelBackend, SimpleNamespace()),
            make_service=lambda loaded: pytest.fail("nothing is loaded"),
            was_found=name == "found",
        )
        for name in ("first", "named", "found")
    ]
    models = Models(listed)
    models.note_removed("named")
    models.note_removed("found")
    assert [model.id for model in models.all] == ["first", "named"]


def test_a_model_that_cannot_be_pulled_is_a_line_with_the_reason(client: httpx.Client, hub: FakeHub) -> None:
    last = client.post("/api/pull", json={"model": "someone/else"}).text.splitlines()[-1]
    assert "neither a local directory nor a public model" in json.loads(last)["error"]
    refused = client.post("/api/pull", json={"model": "someone/else", "stream": False})
    assert list(refused.json()) == ["error"] and refused.status_code >= 400
    assert client.post("/api/pull", json={}).status_code == 400
    kept = client.request("DELETE", "/api/delete", json={"model": "someone/else"})
    assert kept.status_code == 404
    assert not hub.fetched()


@pytest.mark.anyio
@pytest.mark.parametrize(("method", "path"), [("POST", "/api/pull"), ("DELETE", "/api/delete")])
async def test_a_server_without_download_changes_nothing_on_its_disk(method: str, path: str, hub: FakeHub) -> None:
    async with api() as a:
        refused = await a.client.request(method, path, json={"model": ID})
        assert (refused.status_code, "--download" in refused.json()["error"]) == (403, True)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("keep_alive", "ends"),
    [(0, True), ("0", True), ("0m", True), ("0.0s", True), ("5m", False), ("10s", False), (-1, False), (None, False)],
)
def test_a_time_of_none_has_any_unit(keep_alive: str | float | None, ends: bool) -> None:
    assert ends_with_request(keep_alive) is ends
