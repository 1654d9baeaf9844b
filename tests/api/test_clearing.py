"""What is cleared stays cleared, also where the next turn was about to be computed ahead."""

import time

import httpx
import pytest

import reprise
from tests.api.real_server import real_server
from tests.models.tiny import tiny_model

CHAT = {"messages": [{"role": "user", "content": "Tell me of the sea. " * 20}], "max_tokens": 4, "temperature": 0}


def idle(client: httpx.Client) -> dict[str, int]:
    until_s = time.monotonic() + 60
    while not (health := client.get("/health").json())["idle"]:
        assert time.monotonic() < until_s
        time.sleep(0.005)
    return health


def test_nothing_of_a_chat_comes_back_by_a_settle() -> None:
    with real_server("qwen3_5") as client:
        for _ in range(5):
            client.post("/v1/chat/completions", json=CHAT).raise_for_status()
            assert client.delete("/v1/cache").status_code == 200
            assert idle(client)["tokens_held"] == 0


@pytest.mark.parametrize("is_soon", [True, False])
def test_the_library_clears_alike(*, is_soon: bool) -> None:
    with reprise.Engine(tiny_model("qwen3_5")) as engine:
        chat = engine.chat()
        chat.send(CHAT["messages"][0]["content"], max_tokens=4)
        assert is_soon or engine.wait_idle(60)
        engine.clear()
        assert engine.wait_idle(60)
        assert engine.stats.held.num_tokens == 0
