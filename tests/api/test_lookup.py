"""What a request would find is what it finds, whatever API it is for."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.real_server import real_server
from tests.api.servers import api

TEXT = "The tide comes in twice a day and leaves again, and nobody is asked. " * 6
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}),
    "chat with tools": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": TEXT}],
            "tools": [{"type": "function", "function": TOOL}],
            "max_tokens": 2,
        },
    ),
    "messages": (
        "/v1/messages",
        {"system": "Be brief.", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
    ),
    "responses": ("/v1/responses", {"input": TEXT, "max_output_tokens": 2}),
    "completions": ("/v1/completions", {"prompt": TEXT, "max_tokens": 2}),
    "ollama chat": (
        "/api/chat",
        {"messages": [{"role": "user", "content": TEXT}], "options": {"num_predict": 2}, "stream": False},
    ),
    "ollama generate": ("/api/generate", {"prompt": TEXT, "options": {"num_predict": 2}, "stream": False}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with real_server(settles=False) as client:
        yield client


def latest(client: httpx.Client) -> dict[str, Any]:
    while not client.get("/health").json()["idle"]:
        pass
    return client.get("/v1/cache/requests", params={"limit": 1}).json()["data"][0]


@pytest.mark.parametrize("name", BODIES)
def test_it_says_what_the_request_then_finds(server: httpx.Client, name: str) -> None:
    path, body = BODIES[name]
    # Once before it is known, and once after.
    for _ in range(2):
        told = server.post("/v1/cache/lookup", json=body).json()
        assert server.post(path, json=body).status_code == 200
        record = latest(server)
        assert (told["prompt_tokens"], told["matched"], told["resume_at"], told["to_compute"]) == (
            record["prompt_tokens"],
            record["matched"],
            record["reused"],
            record["prefilled"],
        )
        assert told["from"] == ("memory" if record["reused"] > 0 else None)
        assert 0 <= told["queue_s"] <= told["est_ttft_s"]


def test_a_response_that_goes_on_is_known(server: httpx.Client) -> None:
    first = server.post("/v1/responses", json={"input": TEXT, "max_output_tokens": 2}).json()
    body = {"input": "And then?", "previous_response_id": first["id"], "max_output_tokens": 2}
    told = server.post("/v1/cache/lookup", json=body).json()
    server.post("/v1/responses", json=body)
    assert told["resume_at"] == latest(server)["reused"] > 0
    missing = server.post("/v1/cache/lookup", json=body | {"previous_response_id": "resp_none"})
    assert missing.status_code == 404


@pytest.mark.anyio
async def test_an_unknown_shape_and_a_wrong_field_are_refused_with_their_name() -> None:
    async with api() as a:
        nothing = await a.client.post("/v1/cache/lookup", json={"model": None})
        assert nothing.status_code == 400 and "`messages`" in nothing.json()["error"]["message"]
        wrong = await a.client.post("/v1/cache/lookup", json={"messages": [{"role": "user", "content": 5}]})
        assert wrong.status_code == 400 and "content" in wrong.json()["error"]["message"]


@pytest.mark.anyio
async def test_asking_first_does_not_change_why_the_request_computes() -> None:
    body = {"messages": [{"role": "user", "content": TEXT}]}
    async with api() as a:
        assert (await a.client.post("/v1/cache/lookup", json=body)).json()["matched"] == 0
        made = (await a.client.post("/v1/chat/completions", json=body)).json()
        record = await a.client.get(f"/v1/cache/requests/{made['id']}")
        while record.status_code == 404:
            record = await a.client.get(f"/v1/cache/requests/{made['id']}")
        assert record.json()["reason"] == "cold"
        known = (await a.client.post("/v1/cache/lookup", json=body)).json()
    assert known["resume_at"] == known["prompt_tokens"] - 1
    assert (known["queue_s"], known["est_ttft_s"]) == (0.5, 0.51)
