"""Open WebUI, as its users run it, in front of the real server: chats, their titles, and documents found by meaning."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from reprise.chat.answer import Answer
from reprise.core.job import Job
from tests.agents.packages import python_with
from tests.api.real_server import real_server
from tests.models.tiny import tiny_model
from tests.workloads.serving import Serving, serving, spoken

pytestmark = pytest.mark.agents

VERSION = "0.12.4"
SAID = "Baikal, I think."
_START_S = 240
LEFT_OUT = ("torch", "accelerate", "sentence-transformers", "faster-whisper")
"""For embeddings of its own, and for speech."""
NOTE = "The key of the boat house hangs behind the third oar, and Mrs. Quince has the other one.\n"


@contextmanager
def open_webui(python: Path, data: Path, *, url: str, **more: str) -> Iterator[str]:
    """A running one with this server behind it, and `more` environment; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(data),
        "DATA_DIR": str(data),
        "WEBUI_SECRET_KEY": "none",
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "ENABLE_OLLAMA_API": "false",
        "RAG_EMBEDDING_ENGINE": "openai",
        "OFFLINE_MODE": "true",
        "DO_NOT_TRACK": "1",
        **more,
    }
    command = [str(python.parent / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (data / "log").open("w") as log:
        running = subprocess.Popen(command, cwd=data, env=environment, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + _START_S
        while not _answers(address):
            assert running.poll() is None, (data / "log").read_text()[-4000:]
            assert time.monotonic() < deadline, (data / "log").read_text()[-4000:]
            time.sleep(0.5)
        yield address
    finally:
        running.terminate()
        try:
            running.wait(timeout=30)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_chat_computes_what_is_new(tmp_path: Path) -> None:
    python = python_with("open-webui", (f"open-webui=={VERSION}",), without=LEFT_OUT)
    with serving(tiny_model("qwen3_5"), accepts_any_model=True, max_context=8192) as server:

        def says(job: Job) -> str:
            asked = server.service.served.text.decode(job.prompt.tokens)
            is_title = "concise, 3-5 word title" in asked
            return spoken(Answer(content='{"title": "Lakes"}' if is_title else SAID, reasoning="Hm."))

        server.engine.says = says
        url = str(server.client.base_url).rstrip("/")
        with open_webui(python, tmp_path, url=url) as address, httpx.Client(base_url=address, timeout=120) as client:
            first, title, second = _two_turns(client, server)
    assert title["prompt_tokens"] > 0
    new = second["prompt_tokens"] - first["prompt_tokens"]
    assert second["prefilled"] <= new + 8, (first, second)
    print(f"\nOpen WebUI {VERSION}: {second['prefilled']} of {second['prompt_tokens']} tokens computed")


def test_a_document_is_found_by_its_embedding(tmp_path: Path) -> None:
    """It is embedded once, then each question alone, and none twice."""
    python = python_with("open-webui", (f"open-webui=={VERSION}",), without=LEFT_OUT)
    jobs: list[Job] = []
    with (
        real_server("embed-qwen3") as embedding,
        serving(tiny_model("qwen3_5"), accepts_any_model=True, max_context=8192) as server,
    ):

        def says(job: Job) -> str:
            jobs.append(job)
            return spoken(Answer(content=SAID, reasoning="Hm."))

        server.engine.says = says
        (embedder,) = [model["id"] for model in embedding.get("/v1/models").json()["data"]]
        rag = {
            "RAG_OPENAI_API_BASE_URL": f"{str(embedding.base_url).rstrip('/')}/v1",
            "RAG_OPENAI_API_KEY": "none",
            "RAG_EMBEDDING_MODEL": embedder,
            # Else the chat model is asked what to look for.
            "ENABLE_RETRIEVAL_QUERY_GENERATION": "false",
        }
        url = str(server.client.base_url).rstrip("/")
        with (
            open_webui(python, tmp_path, url=url, **rag) as address,
            httpx.Client(base_url=address, timeout=120) as client,
        ):
            model = _signed_up(client)
            files = {"file": ("note.txt", NOTE.encode(), "text/plain")}
            sent = client.post("/api/v1/files/", files=files, params={"process_in_background": False})
            note = sent.raise_for_status().json()["id"]
            (stored,) = _embedded(embedding)
            body: dict[str, Any] = {"model": model, "stream": False, "files": [{"type": "file", "id": note}]}
            for question in ("Where is the key?", "Who has the other one?", "Where is the key?"):
                _posted(client, "/api/chat/completions", {**body, "messages": [{"role": "user", "content": question}]})
            first, second, again = _embedded(embedding)[1:]
    assert stored["prefilled"] > max(first["prefilled"], second["prefilled"]) > 0
    assert again["prompt_tokens"] == first["prompt_tokens"] and again["prefilled"] == 0
    prompts = [server.service.served.text.decode(job.prompt.tokens) for job in jobs]
    assert [NOTE.strip() in prompt for prompt in prompts] == [True] * 3


def _embedded(embedding: httpx.Client) -> list[dict[str, Any]]:
    """The records of embeddings, oldest first."""
    return embedding.get("/v1/cache/requests", params={"limit": 200}).json()["data"][::-1]


def _signed_up(client: httpx.Client) -> str:
    """The model that the first user finds."""
    user = {"name": "User", "email": "user@example.org", "password": "a password"}
    client.headers["Authorization"] = f"Bearer {_posted(client, '/api/v1/auths/signup', user)['token']}"
    (model,) = [model["id"] for model in client.get("/api/models").raise_for_status().json()["data"]]
    return model


def _two_turns(client: httpx.Client, server: Serving) -> list[dict[str, Any]]:
    """The records of a question, the chat's title and another question."""
    model = _signed_up(client)
    asked: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a guide to lakes. " * 40},
        {"role": "user", "content": "Which lake is the deepest?"},
    ]
    body: dict[str, Any] = {"model": model, "stream": False}
    told = _posted(client, "/api/chat/completions", {**body, "messages": asked})
    said = told["choices"][0]["message"]["content"]
    assert said == SAID
    answered = [*asked, {"role": "assistant", "content": said}]
    _posted(client, "/api/v1/tasks/title/completions", {**body, "messages": answered})
    server.wait_until_idle()
    then = [*answered, {"role": "user", "content": "And the largest?"}]
    with client.stream("POST", "/api/chat/completions", json={**body, "messages": then, "stream": True}) as streamed:
        events = [json.loads(line[6:]) for line in streamed.iter_lines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == SAID
    server.wait_until_idle()
    return server.client.get("/v1/cache/requests").json()["data"][::-1]


def _posted(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, f"{path}: {response.text}"
    return response.json()
