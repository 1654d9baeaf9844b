"""Chat completions in process: what goes in, what comes out, what is handed to the engine."""

import json
from typing import Any

import httpx
import pytest

from reprise.core.job import Purpose
from tests.api.servers import MODEL, api, says
from tests.chat.text_models import text_model

pytestmark = pytest.mark.anyio

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def joined(events: list[dict[str, Any]], field: str, choice: int = 0) -> str:
    choices = [entry for event in events for entry in event["choices"] if entry["index"] == choice]
    return "".join(entry["delta"].get(field) or "" for entry in choices)


async def test_a_whole_answer():
    async with api(says("<think>\nHm.\n</think>\n\nHello there.")) as a:
        response = await a.client.post(URL, json={"model": MODEL, "messages": HI})
    body = response.json()
    assert response.status_code == 200, body
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hello there.", "Hm.")
    assert (message["refusal"], message["annotations"]) == (None, [])
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert response.headers["x-request-id"] == body["id"]


async def test_a_stream_says_the_same():
    async with api(says("<think>\nHm.\n</think>\n\nHello there.")) as a:
        body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
        response = await a.client.post(URL, json=body)
    events = events_of(response)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert joined(events, "content") == "Hello there."
    assert joined(events, "reasoning_content") == "Hm."
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] > 0
    assert len({event["id"] for event in events}) == 1


async def test_a_stream_has_usage_only_if_asked():
    async with api() as a:
        events = events_of(await a.client.post(URL, json={"messages": HI, "stream": True}))
    assert all("usage" not in event for event in events)


async def test_the_next_turn_is_reused_and_settled():
    async with api(says("<think>\nHm.\n</think>\n\nHello there.")) as a:
        await a.client.post(URL, json={"messages": HI})
        await a.until_idle()
        assert len(a.backend.of(Purpose.SETTLE)) == 1
        history = [*HI, {"role": "assistant", "content": "Hello there."}, {"role": "user", "content": "And?"}]
        body = (await a.client.post(URL, json={"messages": history})).json()
        settled = a.backend.of(Purpose.SETTLE)[0]
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == len(settled.prompt)


async def test_tool_calls():
    async with api(says(f"I look.\n{CALL}")) as a:
        whole = (await a.client.post(URL, json={"messages": HI, "tools": TOOLS})).json()
        events = events_of(await a.client.post(URL, json={"messages": HI, "tools": TOOLS, "stream": True}))
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    pieces = [piece for e in events for c in e["choices"] for piece in c["delta"].get("tool_calls", [])]
    assert pieces[0]["function"]["name"] == "get_weather"
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == {"city": "Paris"}


async def test_a_call_that_the_length_cuts_is_a_part_of_one():
    async with api(says(f"I look.\n{CALL}\n{CALL}")) as a:
        ends: set[str] = set()
        for num_tokens in range(10, 60, 2):
            body = {"messages": HI, "tools": TOOLS, "max_tokens": num_tokens}
            choice = (await a.client.post(URL, json=body)).json()["choices"][0]
            assert "<" not in (choice["message"]["content"] or "")
            *_, last = [None, *choice["message"].get("tool_calls", [])]
            if last is not None and choice["finish_reason"] == "tool_calls":
                assert json.loads(last["function"]["arguments"]) == {"city": "Paris"}
            ends.add(choice["finish_reason"])
    assert "length" in ends


async def test_a_malformed_call_is_its_text_and_noted():
    broken = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"]\n</tool_call>'
    async with api(says(f"I look.\n{broken}")) as a:
        response = await a.client.post(URL, json={"messages": HI, "tools": TOOLS})
        (choice,) = response.json()["choices"]
        await a.until_idle()
        record = (await a.client.get(f"/v1/cache/requests/{response.json()['id']}")).json()
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == f"I look.\n{broken}"
    assert "tool_calls" not in choice["message"]
    assert "a malformed tool call was left in the text" in record["notes"]


async def test_only_one_tool_call_if_parallel_ones_are_not_wanted():
    async with api(says(f"{CALL}\n{CALL}")) as a:
        body = {"messages": HI, "tools": TOOLS}
        both = (await a.client.post(URL, json=body)).json()
        one = (await a.client.post(URL, json={**body, "parallel_tool_calls": False})).json()
    assert len(both["choices"][0]["message"]["tool_calls"]) == 2
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1
    assert one["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_forced_call_is_a_grammar():
    async with api(says("no call")) as a:
        body = {"messages": HI, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}
        response = await a.client.post(URL, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"


async def test_history_reaches_the_template():
    history = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    async with api() as a:
        response = await a.client.post(URL, json={"messages": history, "tools": TOOLS})
        assert response.status_code == 200, response.text
        text = text_model().decode(a.backend.jobs[0].prompt.tokens.tolist())
    assert "system\nBe kind." in text
    assert "user\nOne two<" in text
    assert '{"name": "get_weather", "arguments": {"city": "Rome"}}' in text
    assert "sunny" in text


async def test_sampling_reaches_the_engine():
    body = {
        "messages": HI,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "max_completion_tokens": 9,
        "logit_bias": {"5": -100},
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "thinking_budget": 4,
        "n": 2,
        "prompt_cache_key": "chat-1",
    }
    async with api() as a:
        response = await a.client.post(URL, json=body)
        assert response.status_code == 200, response.text
        first, second = a.backend.jobs
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0, 0.5, 7)
    assert (first.sampling.min_p, first.sampling.logit_bias) == (0.1, {5: -100})
    assert (first.sampling.presence_penalty, first.sampling.frequency_penalty) == (0.5, -0.5)
    assert (first.sampling.seed, second.sampling.seed) == (3, 4)
    assert (first.max_tokens, first.chat) == (9, "chat-1")
    assert first.thinking is not None
    assert first.thinking.budget == 4
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1]


async def test_n_streams_are_told_apart():
    async with api(lambda job: text_model().encode(f"I am {job.id[-1]}.<|im_end|>")) as a:
        events = events_of(await a.client.post(URL, json={"messages": HI, "n": 3, "stream": True}))
    assert [joined(events, "content", choice) for choice in range(3)] == ["I am 0.", "I am 1.", "I am 2."]


async def test_stop_strings_cut_the_content():
    async with api(says("one two three four")) as a:
        body = (await a.client.post(URL, json={"messages": HI, "stop": ["wo th"]})).json()
        events = events_of(await a.client.post(URL, json={"messages": HI, "stop": "three", "stream": True}))
    assert body["choices"][0]["message"]["content"] == "one t"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert joined(events, "content") == "one two "


async def test_max_tokens_and_the_context_end_an_answer():
    async with api(says("word " * 200), context=60) as a:
        short = (await a.client.post(URL, json={"messages": HI, "max_tokens": 3})).json()
        full = (await a.client.post(URL, json={"messages": HI})).json()
    assert short["choices"][0]["finish_reason"] == "length"
    assert short["usage"]["completion_tokens"] == 3
    assert full["choices"][0]["finish_reason"] == "length"
    assert full["usage"]["total_tokens"] == 60


async def test_logprobs_of_each_token():
    async with api(says("Hello there.")) as a:
        body = {"messages": HI, "logprobs": True, "top_logprobs": 2}
        whole = (await a.client.post(URL, json=body)).json()
        events = events_of(await a.client.post(URL, json={**body, "stream": True}))
    content = whole["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "Hello there."
    assert content[0]["logprob"] == -0.5
    assert content[0]["bytes"] == list(content[0]["token"].encode())
    assert len(content[0]["top_logprobs"]) == 2
    streamed = [
        entry for e in events for c in e["choices"] if c["logprobs"] is not None for entry in c["logprobs"]["content"]
    ]
    assert streamed == content


async def test_continuing_an_answer():
    history = [*HI, {"role": "assistant", "content": "Once upon"}]
    async with api(says(" a time.")) as a:
        body = {"messages": history, "continue_final_message": True, "add_generation_prompt": False}
        answer = (await a.client.post(URL, json=body)).json()
        text = text_model().decode(a.backend.jobs[0].prompt.tokens.tolist())
    assert text.endswith("Once upon")
    assert answer["choices"][0]["message"]["content"] == " a time."


async def test_structured_output_is_held_to_its_schema():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    async with api(says('{"a": 1}')) as a:
        response = await a.client.post(URL, json={"messages": HI, "response_format": wanted})
        assert response.json()["choices"][0]["message"]["content"] == '{"a": 1}'
        assert a.backend.jobs[0].constraint is not None
        for field, value in (("guided_regex", "[a-z]+"), ("guided_choice", ["x", "y"]), ("guided_json", schema)):
            # The script breaks this grammar: only what reaches the engine matters here.
            await a.client.post(URL, json={"messages": HI, field: value})
            assert a.backend.of(Purpose.GENERATE)[-1].constraint is not None
        wrong = await a.client.post(URL, json={"messages": HI, "guided_regex": "(("})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "guided_regex")


async def test_unknown_fields_are_noted():
    async with api() as a:
        made = await a.client.post(URL, json={"messages": HI, "user": "me", "temprature": 1})
        await a.until_idle()
        record = (await a.client.get(f"/v1/cache/requests/{made.json()['id']}")).json()
    assert record["notes"] == ["field without effect: user", "unknown field ignored: temprature"]
