"""Completions, tokens, prefill and metrics."""

import asyncio
from typing import Any

import pytest

from reprise.core.job import Purpose
from reprise.core.settings import Settings
from tests.api.servers import MODEL, api, says
from tests.api.test_chat_completions import events_of
from tests.chat.text_models import text_model
from tests.matrix import now_and_later

pytestmark = pytest.mark.anyio

URL = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


async def test_a_completion_is_text_as_it_is():
    async with api(says(" <think>not thinking</think> and on")) as a:
        whole = (await a.client.post(URL, json={"prompt": "Once upon", "model": MODEL})).json()
        body = {"prompt": "Once upon", "echo": True, "stream": True, "stream_options": {"include_usage": True}}
        events = events_of(await a.client.post(URL, json=body))
        assert text_model().decode(a.backend.jobs[0].prompt.tokens.tolist()) == "Once upon"
    assert whole["object"] == "text_completion"
    assert whole["choices"][0]["text"] == " <think>not thinking</think> and on"
    streamed = "".join(choice["text"] for event in events for choice in event["choices"])
    assert streamed == "Once upon <think>not thinking</think> and on"
    assert events[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_batch_of_prompts(stream: bool):
    def echo(job: Any) -> list[int]:
        return [*job.prompt.tokens.tolist(), *text_model().eos]

    async with api(echo) as a:
        body = {"prompt": ["one", "two"], "n": 2, "stop": "zzz", "logprobs": 1, "stream": stream}
        response = await a.client.post(URL, json=body)
    if stream:
        texts = [""] * 4
        for event in events_of(response):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        choices = response.json()["choices"]
        assert choices[0]["logprobs"]["text_offset"][0] == 0
        assert "".join(choices[0]["logprobs"]["tokens"]) == "one"
        texts = [choice["text"] for choice in choices]
    assert texts == ["one", "one", "two", "two"]


@pytest.mark.parametrize("stream", now_and_later([False], [True]))
async def test_more_prompts_than_may_wait(stream: bool):
    def echo(job: Any) -> list[int]:
        return [*job.prompt.tokens.tolist(), *text_model().eos]

    prompts = [f"number {number}" for number in range(40)]
    async with api(echo, settings=Settings(model=MODEL, max_queue=16)) as a:
        response = await a.client.post(URL, json={"prompt": prompts, "stream": stream})
        await a.until_idle()
        assert len(a.backend.jobs) == 40
    if stream:
        texts = [""] * 40
        for event in events_of(response):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        texts = [choice["text"] for choice in response.json()["choices"]]
        total = sum(len(text_model().encode(prompt)) for prompt in prompts)
        assert response.json()["usage"]["prompt_tokens"] == total
    assert texts == prompts


@pytest.mark.parametrize("body", [{}, {"n": 2}, {"best_of": 4}, {"n": 2, "best_of": 5}])
async def test_no_more_than_sixteen_answers_are_computed_at_a_time(body: dict[str, Any]):
    peak = num_done = 0
    each = int(body.get("best_of", body.get("n", 1)))
    together = 16 // each * each

    def watched(job: Any) -> list[int]:
        nonlocal peak, num_done
        peak, num_done = max(peak, len(a.backend.jobs) - num_done), num_done + 1
        return says("Hello.")(job)

    async with api(watched) as a:
        a.backend.may_prefill.clear()
        asked = asyncio.create_task(a.client.post(URL, json={"prompt": ["Hi"] * 24, **body}))
        while len(a.backend.jobs) < together:
            await asyncio.sleep(0.001)
        a.backend.may_prefill.set()
        choices = (await asked).json()["choices"]
    assert len(choices) == 24 * body.get("n", 1)
    assert (num_done, peak) == (24 * each, together)


async def test_one_prompt_of_many_that_is_too_long_is_refused_before_any_is_computed():
    async with api() as a:
        many = await a.client.post(URL, json={"prompt": [[5]] * 30 + [[5] * 5000]})
        together = await a.client.post(URL, json={"prompt": [[5] * 4000] * 20})
        assert a.backend.jobs == []
    assert "maximum context length" in many.json()["error"]["message"]
    assert "80000 tokens in total" in together.json()["error"]["message"]


async def test_what_a_tokenizer_needs_that_is_far_away():
    async with api() as a:
        told = (await a.client.get("/tokenizer_info")).json()
        served = a.service.served
        eos = (await a.client.post("/tokenize", json={"prompt": told["eos_token"], "add_special_tokens": False})).json()
    assert eos["tokens"][0] in served.text.eos
    assert (told["chat_template"] or "") == served.text.template_source
    assert told["max_model_len"] == served.context


async def test_prompts_as_tokens():
    tokens = text_model().encode("Hello")
    async with api(says(" there")) as a:
        one = (await a.client.post(URL, json={"prompt": tokens})).json()
        two = (await a.client.post(URL, json={"prompt": [tokens, tokens]})).json()
    assert one["usage"]["prompt_tokens"] == len(tokens)
    assert len(two["choices"]) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 300, "n": 4}, "prompt"),
        ({"prompt": "a", "stop": [5]}, "stop[0]"),
    ],
    ids=str,
)
async def test_wrong_completions(body: dict[str, Any], param: str):
    async with api() as a:
        response = await a.client.post(URL, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_tokens_and_back():
    async with api() as a:
        made = (await a.client.post("/tokenize", json={"prompt": "Hello there"})).json()
        text = (await a.client.post("/detokenize", json={"tokens": made["tokens"]})).json()
        chat = (await a.client.post("/tokenize", json={"messages": HI})).json()
        answer = (await a.client.post("/v1/chat/completions", json={"messages": HI})).json()
        assert (await a.client.post("/tokenize", json={})).status_code == 400
        assert (await a.client.post("/detokenize", json={"tokens": [-5]})).status_code == 400
    assert text["prompt"] == "Hello there"
    assert made["count"] == len(made["tokens"])
    assert chat["count"] == answer["usage"]["prompt_tokens"]


async def test_prefill_makes_the_next_request_warm():
    chat = [{"role": "system", "content": "You are kind."}, *HI]
    async with api() as a:
        head = (await a.client.post("/v1/prefill", json={"messages": chat[:1]})).json()
        warm = (await a.client.post("/v1/chat/completions", json={"messages": chat})).json()
        whole = (await a.client.post("/v1/prefill", json={"messages": chat})).json()
        assert (await a.client.post("/v1/prefill", json={"messages": []})).status_code == 400
        assert (await a.client.post("/v1/prefill", json={"prompt": "You"})).status_code == 200
        assert {job.max_tokens for job in a.backend.of(Purpose.PREFILL)} == {0}
    assert head["prefilled_tokens"] > 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == head["prompt_tokens"]
    assert whole["cached_tokens"] == whole["prompt_tokens"] - 1


async def test_metrics_follow_prometheus():
    async with api() as a:
        await a.client.post("/v1/chat/completions", json={"messages": HI})
        await a.until_idle()
        response = await a.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    lines = response.text.splitlines()
    assert 'reprise_requests_total{api="chat",model="org/tiny-chat",outcome="stop"} 1.0' in lines
    assert 'reprise_time_to_first_token_seconds_count{model="org/tiny-chat"} 1.0' in lines
    assert 'reprise_state_bytes{model="org/tiny-chat",use="kv"} 100.0' in lines
    assert any(line.startswith("reprise_inter_token_seconds_count") and not line.endswith(" 0.0") for line in lines)
    assert any(line.startswith("reprise_prefilled_tokens_total") for line in lines)
