"""A client that lost its connection asks again: the same answer, and nothing of the prompt is computed twice."""

import time
from typing import Any

import pytest

from tests.api.real_server import real_server

SYSTEM = "You are a careful assistant. " * 40


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_a_retry_with_the_same_seed_is_the_same_answer(architecture: str) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Tell me a long story."}]
    body: dict[str, Any] = {"messages": messages, "seed": 7, "temperature": 1.0, "max_tokens": 240}
    with real_server(architecture, has_prefix_cache=False, settles=False) as client:
        cold = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    with real_server(architecture, settles=False) as client:
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as lost:
            for number, _ in enumerate(lost.iter_lines()):
                if number == 12:
                    break
        deadline = time.monotonic() + 30
        while not (health := client.get("/health").json())["idle"]:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert health["cancelled"] == 1
        again = client.post("/v1/chat/completions", json=body).json()
        assert again["choices"][0]["message"]["content"] == cold["content"]
        assert again["choices"][0]["message"]["reasoning_content"] == cold["reasoning_content"]
        details = again["usage"]["prompt_tokens_details"]
        assert again["usage"]["prompt_tokens"] - details["cached_tokens"] <= 1
