"""The responses API of the OpenAI SDK, unmodified, against a running server."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest
from pydantic import BaseModel

from reprise.core.job import Job
from reprise.core.settings import Settings
from tests.api.servers import EOS, MODEL, RunningServer, running_server
from tests.chat.text_models import text_model
from tests.sdks import openai

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


class Point(BaseModel):
    a: int


def script(job: Job) -> list[int]:
    """A call where there is a tool and no result; JSON where it is asked for; else a thought and a greeting."""
    if job.constraint is not None:
        return text_model().encode('{"a":1}' + EOS)
    prompt = text_model().decode(job.prompt.tokens.tolist())
    wants_call = "get_weather" in prompt and "sunny" not in prompt
    return text_model().encode("<think>\nHm.\n</think>\n\n" + (CALL if wants_call else "Hello there.") + EOS)


@pytest.fixture(scope="module")
def server() -> Generator[RunningServer]:
    with running_server(script, settings=Settings(model=MODEL, settles=False)) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_whole_response(client: openai.OpenAI):
    made = client.responses.create(model=MODEL, input="Hi", instructions="Be kind.")
    assert made.output_text == "Hello there."
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert made.usage is not None
    assert made.usage.input_tokens_details.cached_tokens >= 0
    assert client.responses.retrieve(made.id).output_text == "Hello there."
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_stream(client: openai.OpenAI):
    with client.responses.stream(model=MODEL, input="Hi") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert "response.reasoning_text.delta" in kinds
    assert final.output_text == "Hello there."


def test_a_tool_loop(client: openai.OpenAI):
    items: Any = [{"role": "user", "content": "Hi"}]
    with client.responses.stream(
        model=MODEL, input=items, tools=[TOOL], store=False, include=["reasoning.encrypted_content"]
    ) as stream:
        first = stream.get_final_response()
    reasoning, call = first.output
    assert reasoning.type == "reasoning"
    assert reasoning.encrypted_content is not None
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Paris"}
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = client.responses.create(model=MODEL, input=items, tools=[TOOL], store=False)
    assert second.output_text == "Hello there."
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_a_chat_by_id(client: openai.OpenAI):
    first = client.responses.create(model=MODEL, input="Hi")
    second = client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    items = client.responses.input_items.list(second.id)
    assert len(items.data) == 1


# The SDK knows the user's messages by the types of the model's.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
def test_a_compaction(client: openai.OpenAI):
    first = client.responses.create(model=MODEL, input="Hi")
    made = client.responses.compact(model=MODEL, previous_response_id=first.id)
    assert [item.type for item in made.output] == ["message", "compaction"]
    items: Any = [*made.output, {"role": "user", "content": "And?"}]
    assert client.responses.create(model=MODEL, input=items).output_text == "Hello there."


def test_structured_output(client: openai.OpenAI):
    made = client.responses.parse(model=MODEL, input="Hi", text_format=Point)
    assert made.output_parsed == Point(a=1)


def test_errors_are_typed(server: RunningServer, client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="conversation"):
        client.responses.create(model=MODEL, input="Hi", conversation="c")
    server.backend.fail_after = 2
    try:
        events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
    finally:
        server.backend.fail_after = None
    assert events[-1].type == "response.failed"
