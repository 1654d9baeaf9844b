"""The demonstration's client, against scripted HTTP answers."""

import json

import httpx
import pytest

from reprise.lab.demo.client import DemoFailed, ask

HISTORY = ({"role": "user", "content": "Hello"},)


def chunk(delta: dict[str, str], *tokens: str) -> str:
    logprobs = {"content": [{"token": token, "logprob": 0.0} for token in tokens]}
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "logprobs": logprobs}], "usage": None})


USAGE = "data: " + json.dumps(
    {"id": "chat-1", "choices": [], "usage": {"prompt_tokens": 12, "prompt_tokens_details": {"cached_tokens": 5}}}
)


def answering(*lines: str, status: int = 200) -> httpx.Client:
    body = "\n\n".join(lines) + "\n\n"

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/cache/requests/chat-1":
            return httpx.Response(200, json={"reason": "thinking stripped"})
        return httpx.Response(status, text=body, headers={"Content-Type": "text/event-stream"})

    return httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))


def test_reasoning_content_tokens_and_usage_are_gathered() -> None:
    lines = (
        ": still computing",
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "Hm"}, "Hm"),
        chunk({}, "</think>"),
        chunk({"content": "Hi there"}, "Hi", " there"),
        USAGE,
        "data: [DONE]",
    )
    with answering(*lines) as client:
        reply = ask(client, HISTORY)
    assert (reply.content, reply.reasoning) == ("Hi there", "Hm")
    assert reply.tokens == ("Hm", "</think>", "Hi", " there")
    assert (reply.num_prompt, reply.num_cached, reply.num_computed) == (12, 5, 7)
    assert reply.why == "thinking stripped"


@pytest.mark.parametrize(
    ("lines", "status", "sentence"),
    [
        (('{"error": {"message": "no"}}',), 500, "status 500: no"),
        ((chunk({"content": "Hi"}, "Hi"),), 200, "no usage"),
        (('data: {"error": {"message": "broken"}}',), 200, "stream failed: broken"),
        (("data: [DONE]",), 200, "no answer"),
    ],
)
def test_anything_else_is_a_failure_with_a_sentence(lines: tuple[str, ...], status: int, sentence: str) -> None:
    with answering(*lines, status=status) as client, pytest.raises(DemoFailed, match=sentence):
        ask(client, HISTORY)
