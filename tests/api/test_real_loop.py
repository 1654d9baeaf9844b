"""Anthropic's and OpenAI's SDKs against the real loop: a hybrid model with random weights, whose words are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from reprise.chat.answer import Answer, ToolCall
from reprise.core.job import Purpose
from tests.models.tiny import tiny_model
from tests.sdks import anthropic, openai
from tests.workloads.serving import Serving, serving

CALL = Answer(
    content=None,
    reasoning="I should look.",
    tool_calls=(ToolCall(id="c", name="read_file", arguments='{"path": "a.txt"}'),),
)
DONE = Answer(content="It says hello.", reasoning="That was easy.")
SCHEMA: Any = {"type": "object", "properties": {"path": {"type": "string"}}}
DOCUMENT = "\n".join(f"Line {number} of a long document." for number in range(60))


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(tiny_model("qwen3_5"), settles=False, accepts_any_model=True) as made:
        yield made


@pytest.fixture
def claude(served: Serving) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=str(served.client.base_url), api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def gpt(served: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.client.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def assert_like_the_oracle(served: Serving, *, reused: int) -> None:
    """The latest request reused what an oracle would, to a few tokens."""
    (*_, last) = served.engine.of(Purpose.GENERATE)
    assert last.outcome.num_reused == reused
    assert 0 < last.outcome.num_prefilled <= last.oracle + 4


def read(usage: anthropic.types.Usage) -> int:
    assert usage.cache_read_input_tokens is not None
    return usage.cache_read_input_tokens


def test_messages_in_a_tool_loop(served: Serving, claude: anthropic.Anthropic):
    tools: Any = [{"name": "read_file", "input_schema": SCHEMA}]
    messages: Any = [{"role": "user", "content": "What does a.txt say?"}]
    asked: Any = {"model": "claude", "max_tokens": 200, "system": "You are a coding agent.", "tools": tools}
    served.answer = CALL
    with claude.messages.stream(messages=messages, **asked) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    thought, call = first.content
    assert (thought.type, call.type) == ("thinking", "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "hello"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    served.answer = DONE
    second = claude.messages.create(messages=messages, **asked)
    assert_like_the_oracle(served, reused=read(second.usage))
    assert second.content[-1].type == "text"
    counted = claude.messages.count_tokens(model="claude", messages=messages, system=asked["system"], tools=tools)
    created = second.usage.cache_creation_input_tokens or 0
    assert second.usage.input_tokens + created + read(second.usage) == counted.input_tokens


def test_a_marked_document_is_read_once(served: Serving, claude: anthropic.Anthropic):
    """Two chats begin with one document. This model resumes only where a snapshot was taken: at the mark."""

    def ask(question: str) -> anthropic.types.Message:
        document: Any = {"type": "text", "text": DOCUMENT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        content = [document, {"type": "text", "text": question}]
        served.answer = DONE
        return claude.messages.create(model="x", max_tokens=50, messages=[{"role": "user", "content": content}])

    first, second = ask("Who wrote it?"), ask("What is it about?")
    total = first.usage.input_tokens + (first.usage.cache_creation_input_tokens or 0)
    assert read(second.usage) > 0.9 * total


@pytest.mark.matrix
def test_responses_in_a_tool_loop(served: Serving, gpt: openai.OpenAI):
    tools: Any = [{"type": "function", "name": "read_file", "parameters": SCHEMA, "strict": False}]
    items: Any = [{"role": "user", "content": "What does b.txt say?"}]
    asked: Any = {
        "model": "gpt",
        "instructions": "You are another coding agent.",
        "tools": tools,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "chat",
    }
    served.answer = CALL
    with gpt.responses.stream(input=items, **asked) as stream:
        first = stream.get_final_response()
    call = first.output[-1]
    assert call.type == "function_call"
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "hello"}]
    served.answer = DONE
    second = gpt.responses.create(input=items, **asked)
    assert second.output_text == DONE.content
    assert second.usage is not None
    assert_like_the_oracle(served, reused=second.usage.input_tokens_details.cached_tokens)


def test_responses_by_id(served: Serving, gpt: openai.OpenAI):
    served.answer = DONE
    first = gpt.responses.create(model="gpt", input="Hello, who are you?")
    second = gpt.responses.create(model="gpt", input="And what can you do?", previous_response_id=first.id)
    assert second.usage is not None
    assert_like_the_oracle(served, reused=second.usage.input_tokens_details.cached_tokens)
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_a_prediction_is_taken_and_what_was_drafted_is_told(served: Serving, gpt: openai.OpenAI):
    served.answer = DONE
    asked: Any = {"model": "gpt", "messages": [{"role": "user", "content": "Write the file again."}], "max_tokens": 64}
    prediction: Any = {"type": "content", "content": [{"type": "text", "text": DOCUMENT}]}
    first = gpt.chat.completions.create(**asked, prediction=prediction)
    again = gpt.chat.completions.create(**asked, prediction={"type": "content", "content": DOCUMENT})
    assert first.choices[0].message.content == again.choices[0].message.content
    for reply in (first, again):
        assert reply.usage is not None and reply.usage.completion_tokens_details is not None
        told = reply.usage.completion_tokens_details
        assert told.accepted_prediction_tokens is not None and told.rejected_prediction_tokens is not None
    (*_, last) = served.engine.of(Purpose.GENERATE)
    assert last.job.prediction is not None and len(last.job.prediction) > 100
