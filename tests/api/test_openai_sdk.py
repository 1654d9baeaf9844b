"""The OpenAI SDK, unmodified, against a running server."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from reprise.core.settings import Settings
from tests.api.servers import MODEL, RunningServer, running_server, says
from tests.sdks import openai

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Generator[RunningServer]:
    with running_server(says("<think>\nHm.\n</think>\n\nHello there."), settings=Settings(model=MODEL)) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_whole_answer(client: openai.OpenAI):
    made = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    message = made.choices[0].message
    assert message.content == "Hello there."
    assert message.model_extra == {"reasoning_content": "Hm."}
    assert made.usage is not None
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens is not None


def test_a_stream(client: openai.OpenAI):
    content, reasoning, usage = "", "", None
    with client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
    assert (content, reasoning) == ("Hello there.", "Hm.")
    assert usage is not None
    assert usage.completion_tokens > 0


def test_the_sdks_own_gathering_of_a_stream(client: openai.OpenAI):
    with client.chat.completions.stream(model=MODEL, messages=[{"role": "user", "content": "Hi"}]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello there."
    assert final.choices[0].finish_reason == "stop"


def test_errors_are_typed(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="empty") as wrong:
        client.chat.completions.create(model=MODEL, messages=[])
    assert wrong.value.param == "messages"
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "Hi"}])


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "reprise"


def test_tools():
    with running_server(says(CALL)) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="x") as client:
        made = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Weather?"}],
            tools=[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}],
        )
    (call,) = made.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')


def test_a_wrong_key():
    settings = Settings(model=MODEL, api_keys=("secret",))
    with running_server(settings=settings) as running:
        url = f"{running.url}/v1"
        with openai.OpenAI(base_url=url, api_key="other") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with openai.OpenAI(base_url=url, api_key="secret") as client:
            assert len(client.models.list().data) == 1
