"""A prompt that is too long is refused in the words that clients know, on every API and in its shape."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from reprise.chat.extent import extent_of
from reprise.chat.rendering.render import Renderer, Renderers, RenderSettings
from tests.api.servers import Api, api
from tests.chat.text_models import backend_tokenizer

pytestmark = pytest.mark.anyio

CONTEXT = 200
LONG = "hello there, " * 400
CLAUDE_CODE = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.I)
"""How Claude Code reads the numbers."""

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "completions": ("/v1/completions", {"prompt": LONG}),
    "responses": ("/v1/responses", {"input": LONG}),
    "messages": ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": LONG}]}),
}


def never_tokenize_long(served: Api) -> None:
    """From now on a long text that is tokenized fails the request."""
    encode = served.service.served.text.encode

    def guarded(text: str) -> list[int]:
        assert len(text) < 1000, "a long text was tokenized"
        return encode(text)

    text = replace(served.service.served.text, encode=guarded, extent=extent_of(backend_tokenizer().to_str()))
    renderer = Renderer(text, RenderSettings(context=CONTEXT))
    served.service.served = replace(served.service.served, text=text, renderer=renderer)
    served.service.renderers = Renderers(text, shared=renderer, stored=served.backend)


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("is_tokenized", [True, False])
async def test_the_sentence_and_its_numbers(name: str, is_tokenized: bool) -> None:
    path, body = REQUESTS[name]
    async with api(context=CONTEXT) as served:
        if not is_tokenized:
            never_tokenize_long(served)
        got = await served.client.post(path, json={**body, "stream": name != "responses"})
    assert got.status_code == 400
    error = got.json()["error"]
    read = CLAUDE_CODE.search(error["message"])
    assert read is not None and int(read[1]) > int(read[2]) == CONTEXT
    assert error["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens")
    assert error["type"] == "invalid_request_error"
    if name == "messages":
        assert got.json()["type"] == "error"
    else:
        assert error["code"] == "context_length_exceeded"


async def test_a_prompt_that_leaves_no_room_for_one_token() -> None:
    async with api(context=CONTEXT) as served:
        full = await served.client.post("/v1/completions", json={"prompt": [5] * CONTEXT})
        fits = await served.client.post("/v1/completions", json={"prompt": [5] * (CONTEXT - 1)})
    assert f"{CONTEXT + 1} tokens > {CONTEXT} maximum" in full.json()["error"]["message"]
    assert (fits.status_code, fits.json()["usage"]["completion_tokens"]) == (200, 1)


async def test_a_stream_of_responses_says_so_in_its_events() -> None:
    """Codex looks for the code in a failed response, and takes what is no stream for a request of its own fault."""
    async with api(context=CONTEXT) as served:
        got = await served.client.post("/v1/responses", json={"input": LONG, "stream": True})
    assert got.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "error",
        "response.failed",
    ]
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]
    for error in (events[2]["error"], events[3]["response"]["error"]):
        assert error["code"] == "context_length_exceeded"
        assert CLAUDE_CODE.search(error["message"]) is not None
