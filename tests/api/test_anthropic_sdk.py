"""The Anthropic SDK, unmodified, against a running server."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from reprise.core.job import Job
from reprise.core.settings import Settings
from tests.api.servers import EOS, MODEL, RunningServer, running_server
from tests.chat.text_models import text_model
from tests.sdks import anthropic

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
HI: Any = [{"role": "user", "content": "Hi"}]


def weather_forecast(job: Job) -> list[int]:
    """Asks for the weather if it may, and tells it once it knows."""
    prompt = text_model().decode(job.prompt.tokens.tolist())
    wants_call = "get_weather" in prompt and "sunny" not in prompt
    return text_model().encode("<think>\nHm.\n</think>\n\n" + (CALL if wants_call else "Hello there.") + EOS)


@pytest.fixture(scope="module")
def server() -> Generator[RunningServer]:
    settings = Settings(model=MODEL, settles=False, api_keys=("secret",))
    with running_server(weather_forecast, settings=settings) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Generator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as made:
        yield made


def test_a_whole_message(client: anthropic.Anthropic):
    made = client.messages.create(model=MODEL, max_tokens=100, messages=HI)
    assert [block.type for block in made.content] == ["thinking", "text"]
    assert made.stop_reason == "end_turn"
    assert made.usage.cache_read_input_tokens is not None


def test_a_stream(client: anthropic.Anthropic):
    with client.messages.stream(model=MODEL, max_tokens=100, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Hello there."
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0].type == "thinking"
    assert final.content[0].signature != ""
    assert final.usage.output_tokens > 0


def test_the_beta_messages(client: anthropic.Anthropic):
    made = client.beta.messages.create(
        model=MODEL,
        max_tokens=100,
        messages=HI,
        betas=["interleaved-thinking-2025-05-14"],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert made.content[-1].type == "text"


def test_a_tool_loop_with_thinking(client: anthropic.Anthropic):
    messages: Any = list(HI)
    with client.messages.stream(model=MODEL, max_tokens=100, messages=messages, tools=[TOOL]) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.type == "tool_use"
    assert call.input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(model=MODEL, max_tokens=100, messages=messages, tools=[TOOL])
    assert second.stop_reason == "end_turn"
    usage = second.usage
    assert usage.cache_read_input_tokens is not None
    assert usage.cache_creation_input_tokens is not None
    assert usage.cache_read_input_tokens > 0
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert total == client.messages.count_tokens(model=MODEL, messages=messages, tools=[TOOL]).input_tokens


def test_errors_are_typed(server: RunningServer, client: anthropic.Anthropic):
    with pytest.raises(anthropic.BadRequestError, match="at least one message"):
        client.messages.create(model=MODEL, max_tokens=100, messages=[])
    with pytest.raises(anthropic.NotFoundError, match="not served"):
        client.messages.create(model="claude", max_tokens=100, messages=HI)
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError, match="API key"):
        stranger.messages.create(model=MODEL, max_tokens=100, messages=HI)


def test_an_error_in_the_midst_of_a_stream_is_raised(server: RunningServer, client: anthropic.Anthropic):
    server.backend.fail_after = 2
    try:
        with (
            client.messages.stream(model=MODEL, max_tokens=100, messages=HI) as stream,
            pytest.raises(anthropic.APIStatusError, match="sampler"),
        ):
            stream.until_done()
    finally:
        server.backend.fail_after = None


def test_a_time_out_cancels(server: RunningServer, client: anthropic.Anthropic):
    server.backend.may_decode.clear()
    try:
        with pytest.raises(anthropic.APITimeoutError):
            client.with_options(timeout=0.3).messages.create(model=MODEL, max_tokens=100, messages=HI)
    finally:
        server.backend.may_decode.set()
    assert client.messages.create(model=MODEL, max_tokens=100, messages=HI).stop_reason == "end_turn"
