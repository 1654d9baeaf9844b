"""Reasoning between markers that were learnt from the template is reasoning on every API."""

from typing import Any

import pytest

from reprise.core.job import Job
from tests.api.servers import MODEL, api
from tests.chat.test_learnt_thinking import FAMILIES, MODELS

pytestmark = pytest.mark.anyio
ASKED = [{"role": "user", "content": "Look!"}]


def _openai(reply: Any) -> tuple[str, str]:
    message = reply["choices"][0]["message"]
    return message["reasoning_content"], message["content"]


def _messages(reply: Any) -> tuple[str, str]:
    thought, said = reply["content"]
    return thought["thinking"], said["text"]


def _responses(reply: Any) -> tuple[str, str]:
    thought, said = reply["output"]
    return thought["content"][0]["text"], said["content"][0]["text"]


def _ollama(reply: Any) -> tuple[str, str]:
    return reply["message"]["thinking"], reply["message"]["content"]


APIS = {
    "/v1/chat/completions": ({"messages": ASKED}, _openai),
    "/v1/messages": ({"messages": ASKED, "max_tokens": 100}, _messages),
    "/v1/responses": ({"input": "Look!"}, _responses),
    "/api/chat": ({"messages": ASKED, "stream": False}, _ollama),
}


@pytest.mark.parametrize("name", ["parts of the content", "beside calls alone", "begun by the prompt in words"])
@pytest.mark.parametrize("path", sorted(APIS))
async def test_reasoning_is_apart_from_content(name: str, path: str) -> None:
    model, family = MODELS[name], FAMILIES[name]
    opening, closing = (*family.around, "", "")[:2]
    start = "" if family.prompt else family.start

    def says(_job: Job) -> list[int]:
        return [*model.encode(f"{start}Hm, so.{family.end}{opening}Hi!{closing}"), *model.eos]

    body, separated = APIS[path]
    async with api(says, text=model) as server:
        reply = await server.client.post(path, json={"model": MODEL, **body})
    assert reply.status_code == 200, reply.text
    assert separated(reply.json()) == ("Hm, so.", "Hi!")
