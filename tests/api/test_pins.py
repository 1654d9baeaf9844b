"""What clients and administrators pin, over HTTP, on real engines of little memory."""

import time
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.job import Purpose
from tests.api.servers import api
from tests.loop.test_budget import needed
from tests.matrix import now_and_later
from tests.soak.house import SoakServer, house

PIN = "/v1/cache/pin"
CHAT = "/v1/chat/completions"
SYSTEM = "You are a patient adviser. Answer in plain words, and say what you are not sure of. " * 4
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
HEAD: dict[str, Any] = {"messages": [{"role": "system", "content": SYSTEM}], "tools": TOOLS}
_PROMPT = 200
"""About as many tokens as a request of `flood` has."""


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def budget(architecture: str) -> int:
    return 4 * needed(architecture, _PROMPT)


@pytest.fixture(scope="module")
def running(architecture: str, budget: int) -> Iterator[SoakServer]:
    with house(architecture, cache_bytes=budget, prefill_chunk=128, settles=False) as made:
        yield made


@pytest.fixture
def server(running: SoakServer) -> SoakServer:
    """A server with an empty cache."""
    running.engine.loop.clear()
    running.engine.check()
    return running


@pytest.fixture
def client(server: SoakServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def flood(client: httpx.Client) -> None:
    """Requests that have nothing in common with any other, until they have taken all the room there is."""
    before = client.get("/health").json()["evictions"]
    for number in range(16):
        body = {"prompt": [(7 * number + step * step) % 400 for step in range(_PROMPT)], "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert client.get("/health").json()["evictions"] > before


def cached(client: httpx.Client, body: dict[str, Any]) -> int:
    """How much of a chat's prompt is there."""
    answer = client.post(CHAT, json={"max_tokens": 1, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def asking(question: str) -> dict[str, Any]:
    return {**HEAD, "messages": [*HEAD["messages"], {"role": "user", "content": question}]}


def unpinned_delete(client: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    return client.request("DELETE", PIN, json=body)


def test_a_system_prompt_and_tools_are_pinned_before_anybody_came(client: httpx.Client, server: SoakServer) -> None:
    made = client.post(PIN, json=HEAD).json()
    assert made["prefilled_tokens"] == made["tokens"] > 100
    assert made["expires_in_s"] is None
    again = client.post(PIN, json=HEAD).json()
    assert (again["id"], again["prefilled_tokens"]) == (made["id"], 0)
    flood(client)
    assert cached(client, asking("Why is the sky blue?")) == made["tokens"]
    listed = client.get(PIN).json()
    assert [pin["id"] for pin in listed["data"]] == [made["id"]]
    assert listed["bytes"] == listed["data"][0]["bytes"] == made["bytes"] > 0
    # Let go, it is worth no more than its use.
    assert unpinned_delete(client, HEAD).json() == {
        "id": made["id"],
        "object": "cache.pin",
        "unpinned": True,
        "models": [Path(server.engine.settings.model).name],
    }
    assert client.get(PIN).json()["data"] == []
    assert unpinned_delete(client, HEAD).status_code == 404
    assert client.delete(f"{PIN}/{made['id']}").status_code == 404
    server.engine.check()


@pytest.mark.matrix
def test_what_is_not_pinned_is_gone_where_a_pin_would_stay(client: httpx.Client) -> None:
    made = client.post("/v1/prefill", json=HEAD).json()
    flood(client)
    assert cached(client, asking("Why is the sky blue?")) < made["prompt_tokens"]


def test_a_plain_prompt_and_a_whole_chat_can_be_pinned(client: httpx.Client) -> None:
    tokens = [step % 50 for step in range(200)]
    plain = client.post(PIN, json={"prompt": tokens, "ttl": 100}).json()
    assert plain["tokens"] == 200
    assert 0 < plain["expires_in_s"] <= 100
    chat = client.post(PIN, json=asking("Why is the sky blue?")).json()
    flood(client)
    usage = client.post("/v1/completions", json={"prompt": [*tokens, 7, 8], "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 200
    later = asking("Why is the sky blue?")
    later["messages"] += [{"role": "assistant", "content": "It scatters."}, {"role": "user", "content": "Why?"}]
    assert cached(client, later) == chat["tokens"]
    assert client.delete(f"{PIN}/{plain['id']}").status_code == 200
    assert unpinned_delete(client, {"id": chat["id"]}).status_code == 200
    assert client.get(PIN).json() == {"object": "list", "data": [], "bytes": 0}


def test_a_pin_ends_with_its_time_though_nothing_happens(client: httpx.Client) -> None:
    # A busy machine may take longer to ask than the first of them lasts.
    for ttl in (0.3, 3, 30):
        client.post(PIN, json={**HEAD, "ttl": ttl})
        health = client.get("/health").json()
        if health["pins"] > 0:
            break
    assert health["pins"] == 1
    assert health["bytes_pinned"] > 0
    deadline = time.monotonic() + 120
    while client.get("/health").json()["pins"] > 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert client.get("/health").json()["bytes_pinned"] == 0
    assert client.get(PIN).json()["data"] == []


@pytest.mark.parametrize("ttl", [0.04, 1e-6])
def test_a_pin_shorter_than_its_own_prefill_is_set_all_the_same(
    client: httpx.Client, server: SoakServer, monkeypatch: pytest.MonkeyPatch, ttl: float
) -> None:
    monkeypatch.setitem(ACTIONS, Failpoint.PREFILL, lambda lives: time.sleep(0.05))
    # The shorter one may be over before the answer: it was there, and not refused for want of room.
    answer = client.post(PIN, json={**HEAD, "ttl": ttl})
    assert answer.status_code == 200, answer.text
    assert 0 <= answer.json()["expires_in_s"] <= ttl


def test_clearing_the_cache_drops_pins(client: httpx.Client, server: SoakServer) -> None:
    client.post(PIN, json=HEAD)
    assert client.delete("/v1/cache").json()["cleared"]
    server.engine.check()
    health = client.get("/health").json()
    assert (health["pins"], health["bytes_pinned"], health["bytes_held"]) == (0, 0, 0)


def test_pins_keep_half_of_the_budget_at_most(client: httpx.Client, budget: int) -> None:
    made: list[str] = []
    refused: list[httpx.Response] = []
    for number in range(12):
        answer = client.post(PIN, json={"prompt": [(number + step * step) % 400 for step in range(_PROMPT)]})
        if answer.status_code == 200:
            made.append(answer.json()["id"])
        else:
            refused.append(answer)
    # An administrator's pins do not push each other out: those that came too late are told so.
    assert made
    assert [pin["id"] for pin in client.get(PIN).json()["data"]] == made
    assert refused
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {(507, "out_of_memory")}
    assert 0 < client.get("/health").json()["bytes_pinned"] <= budget // 2


def test_a_running_request_that_has_no_room_otherwise_comes_before_pins(
    client: httpx.Client, server: SoakServer, budget: int
) -> None:
    held = client.post(PIN, json={"prompt": [step % 400 for step in range(3 * _PROMPT)]}).json()
    assert client.get("/health").json()["bytes_pinned"] == held["bytes"]
    # All of the memory but less than the pin has.
    left = budget - held["bytes"] // 4
    most = server.engine.ask(lambda worker: bisect_right(range(10_000), left, key=worker.sequences.estimate) - 1)
    body = {"prompt": [(3 + step * step) % 400 for step in range(most)], "max_tokens": 2}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert client.get(PIN).json()["data"] == []
    server.engine.check()


@pytest.mark.parametrize("path", now_and_later(["/v1/responses"], [CHAT, "/v1/completions"]))
def test_retention_pins_what_the_next_turn_can_use(client: httpx.Client, path: str) -> None:
    text = "Tell me of the sea, and leave nothing out. " * 5
    first: dict[str, Any] = {"prompt": text, "max_tokens": 2}
    if path == CHAT:
        first = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    elif path == "/v1/responses":
        first = {"input": text, "max_output_tokens": 2, "store": True}
    for nothing in ({}, {"prompt_cache_retention": None}, {"prompt_cache_retention": "in_memory"}):
        assert client.post(path, json={**first, **nothing}).status_code == 200
    assert client.get(PIN).json()["data"] == []
    answer = client.post(path, json={**first, "prompt_cache_retention": "24h"}).json()
    (pin,) = client.get(PIN).json()["data"]
    assert pin["follows_chat"]
    assert 23 * 3600 < pin["expires_in_s"] <= 24 * 3600
    flood(client)
    usage = client.post(path, json=first).json()["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    # Where every position is resumable, a token or two that were not pinned may be left behind it.
    assert pin["tokens"] <= details["cached_tokens"] <= pin["tokens"] + 2
    assert pin["tokens"] >= 0.8 * (usage.get("prompt_tokens") or usage["input_tokens"])
    if path == "/v1/responses":
        assert answer["prompt_cache_retention"] == "24h"


def test_a_later_turn_is_retained_in_the_place_of_an_earlier_one(client: httpx.Client) -> None:
    messages: list[dict[str, str]] = []
    tokens: list[int] = []
    for question in ("Tell me of the sea.", "And of the wind?", "Go on."):
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "max_tokens": 4, "temperature": 0, "prompt_cache_retention": "24h"}
        answer = client.post(CHAT, json=body).json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "Well."})
        (pin,) = client.get(PIN).json()["data"]
        tokens.append(pin["tokens"])
    assert tokens == sorted(set(tokens))


@pytest.mark.anyio
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
async def test_a_retention_that_is_not_known_is_refused(path: str) -> None:
    for wrong in ("forever", 24, "24H"):
        body = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi"}
        async with api() as made:
            answer = await made.client.post(path, json={**body, "prompt_cache_retention": wrong})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt_cache_retention"


@pytest.mark.anyio
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ({"prompt_cache_options": None}, None),
        ({"prompt_cache_options": {}}, None),
        ({"prompt_cache_options": {"mode": "implicit"}}, None),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1800),
        ({"prompt_cache_options": {"ttl": "12h", "mode": "implicit", "prewarm": False}}, 12 * 3600),
        # Only what is marked is to stay, and nothing is.
        ({"prompt_cache_options": {"ttl": "12h", "mode": "explicit"}}, None),
        # Each has what it asks for.
        ({"prompt_cache_options": {"ttl": "12h"}, "prompt_cache_retention": "24h"}, 24 * 3600),
        ({"prompt_cache_options": {"ttl": "12h"}, "prompt_cache_retention": "in_memory"}, 12 * 3600),
    ],
    ids=str,
)
async def test_the_least_time_that_a_prefix_is_to_stay(path: str, asked: dict[str, Any], seconds: float | None) -> None:
    async with api() as made:
        body = {"messages": [{"role": "user", "content": "Hi"}], "input": "Hi", **asked}
        answer = await made.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        (job,) = made.backend.of(Purpose.GENERATE)
    assert job.retain_for_s == seconds
    if path == "/v1/responses":
        assert answer.json()["prompt_cache_options"] == asked["prompt_cache_options"]


@pytest.mark.anyio
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
@pytest.mark.parametrize("wrong", [{"ttl": "1h"}, {"ttl": 1800}, {"mode": "none"}, {"prewarm": 1}], ids=str)
async def test_cache_options_that_are_not_offered_are_refused(path: str, wrong: dict[str, Any]) -> None:
    async with api() as made:
        body = {"messages": [{"role": "user", "content": "Hi"}], "input": "Hi", "prompt_cache_options": wrong}
        answer = await made.client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"prompt_cache_options.{next(iter(wrong))}"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"prompt": "Hi", "ttl": 0}, "ttl"),
        ({"prompt": "Hi", "ttl": "1h"}, "ttl"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "Hi", "messages": []}, "messages"),
    ],
    ids=str,
)
async def test_what_cannot_be_pinned(body: dict[str, Any], param: str) -> None:
    async with api() as made:
        answer = await made.client.post(PIN, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_key_sees_pins_and_clears_its_own_only() -> None:
    with (
        house("llama", settles=False, api_keys=("one", "two"), separates_keys=True) as server,
        httpx.Client(base_url=server.url, headers={"x-api-key": "one"}, timeout=60) as one,
        httpx.Client(base_url=server.url, headers={"x-api-key": "two"}, timeout=60) as two,
    ):
        pins = [each.post(PIN, json=HEAD).json() for each in (one, two)]
        # The other's is not even seen: each computed its own.
        assert pins[0]["prefilled_tokens"] == pins[1]["prefilled_tokens"] == pins[0]["tokens"]
        assert server.engine.loop.status().held.num_pins == 2
        assert one.delete(f"{PIN}/{pins[0]['id']}").status_code == 200
        assert one.delete(f"{PIN}/{pins[1]['id']}").status_code == 404
        assert one.get(PIN).json()["data"] == []
        assert [pin["id"] for pin in two.get(PIN).json()["data"]] == [pins[1]["id"]]
        assert one.delete("/v1/cache").status_code == 200
        assert cached(two, asking("Why?")) == pins[1]["tokens"]
        assert cached(one, asking("Why?")) == 0
        assert httpx.get(f"{server.url}{PIN}").status_code == 401


def test_keys_that_share_the_cache_do_not_share_pins() -> None:
    with (
        house("llama", settles=False, api_keys=("one", "two")) as server,
        httpx.Client(base_url=server.url, headers={"x-api-key": "one"}, timeout=60) as one,
        httpx.Client(base_url=server.url, headers={"x-api-key": "two"}, timeout=60) as two,
    ):
        pin = one.post(PIN, json=HEAD).json()
        # The work is shared, and what is known of the pin is not.
        assert cached(two, asking("Why?")) == pin["tokens"]
        assert two.get(PIN).json() == {"object": "list", "data": [], "bytes": 0}
        assert two.delete(f"{PIN}/{pin['id']}").status_code == 404
        assert unpinned_delete(two, HEAD).status_code == 404
        assert two.post(PIN, json=HEAD).json()["prefilled_tokens"] == 0
        assert one.delete(f"{PIN}/{pin['id']}").status_code == 200
        assert one.get(PIN).json()["data"] == []
        # The other one has asked for the same, and keeps it.
        assert server.engine.loop.status().held.num_pins == 1
        assert two.delete(f"{PIN}/{pin['id']}").status_code == 200
        assert server.engine.loop.status().held.num_pins == 0


def test_a_key_that_clears_a_shared_cache_leaves_what_others_have_pinned() -> None:
    with (
        house("llama", settles=False, api_keys=("one", "two")) as server,
        httpx.Client(base_url=server.url, headers={"x-api-key": "one"}, timeout=60) as one,
        httpx.Client(base_url=server.url, headers={"x-api-key": "two"}, timeout=60) as two,
    ):
        pin = one.post(PIN, json=HEAD).json()
        other = {**HEAD, "messages": [{"role": "system", "content": "Nothing of the kind. " * 20}]}
        assert two.post(PIN, json=other).status_code == 200
        assert two.delete("/v1/cache").status_code == 200
        assert two.get(PIN).json()["data"] == []
        assert [each["id"] for each in one.get(PIN).json()["data"]] == [pin["id"]]
        assert cached(one, asking("Why?")) == pin["tokens"]
        assert one.delete("/v1/cache").status_code == 200
        assert server.engine.loop.status().held.num_pins == 0
        assert cached(one, asking("Why?")) == 0
        server.engine.check()


@pytest.mark.matrix
def test_pinning_unpinning_and_clearing_during_load(client: httpx.Client, server: SoakServer, budget: int) -> None:
    """Clients of few chats beside an administrator who pins, unpins and clears: nobody fails, and the books balance."""

    def talk(number: int) -> None:
        for turn in range(4):
            body = asking(f"Question {number}: why is the sky {'very ' * (20 * turn)} blue?")
            if number % 2 == 0:
                body["prompt_cache_retention"] = "24h"
            cached(client, body)

    def administer(number: int) -> None:
        for turn in range(6):
            made = client.post(PIN, json={**HEAD, "ttl": 0.1 if turn % 2 else None})
            assert made.status_code in (200, 507)
            if turn % 3 == number:
                assert client.delete("/v1/cache").status_code == 200
            assert unpinned_delete(client, HEAD).status_code in (200, 404)
            server.engine.check()

    with ThreadPoolExecutor(max_workers=6) as pool:
        work = [*(pool.submit(talk, number) for number in range(4)), *(pool.submit(administer, n) for n in range(2))]
        for each in work:
            each.result()
    server.engine.check()
    assert server.engine.num_leases() == 0
    held = server.engine.loop.status().held
    assert held.kv_nbytes + held.snapshot_nbytes + held.live_nbytes <= budget
