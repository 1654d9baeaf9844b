"""Ollama's API: the same answers and the same reuse as chat completions, in its words."""

import json
from dataclasses import replace
from typing import Any

import pytest

from reprise.core.job import Purpose
from tests.api.servers import MODEL, api, says
from tests.chat.text_models import text_model

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
THOUGHT = says("<think>\nLet me see.\n</think>\n\nIt is sunny.")
CALL = says(
    '<think>\nSo.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": [1, {"b": "c"}]}}\n</tool_call>'
)
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def test_a_chat_streams_lines_by_default():
    async with api(THOUGHT) as a:
        response = await a.client.post("/api/chat", json={"model": f"{MODEL}:latest", "messages": HI})
        whole = (await a.client.post("/api/chat", json={"messages": HI, "stream": False})).json()
    assert response.headers["content-type"] == "application/x-ndjson"
    told = lines(response.text)
    assert "".join(one["message"].get("thinking", "") for one in told).strip() == "Let me see."
    assert "".join(one["message"]["content"] for one in told).strip() == "It is sunny."
    assert [one["done"] for one in told] == [False] * (len(told) - 1) + [True]
    last = told[-1]
    assert (last["model"], last["done_reason"]) == (MODEL, "stop")
    assert last["prompt_eval_count"] > 0 and last["eval_count"] > 0
    assert all(isinstance(last[name], int) for name in DURATIONS)
    assert whole["message"]["content"].strip() == "It is sunny."
    assert whole["message"]["thinking"].strip() == "Let me see."
    # The second request found the first one's prompt.
    assert (last["prompt_cached_count"], whole["prompt_cached_count"]) == (0, whole["prompt_eval_count"] - 1)


async def test_calls_are_objects_and_come_back_without_ids():
    async with api(CALL) as a:
        told = lines((await a.client.post("/api/chat", json={"messages": HI, "tools": [TOOL]})).text)
        (call,) = [call for one in told for call in one["message"].get("tool_calls", [])]
        assert call["function"]["name"] == "look"
        assert call["function"]["arguments"] == {"at": [1, {"b": "c"}]}
        assert told[-1]["done_reason"] == "stop"
        history = [
            *HI,
            {"role": "assistant", "content": "", "tool_calls": [{"function": dict(call["function"])}] * 2},
            {"role": "tool", "content": "seen", "tool_name": "look"},
            {"role": "tool", "content": "again", "tool_name": "look"},
        ]
        response = await a.client.post("/api/chat", json={"messages": history, "tools": [TOOL], "stream": False})
        assert response.status_code == 200, response.text
        record = (await a.client.get("/v1/cache/requests?limit=1")).json()["data"][0]
    assert record["api"] == "ollama"


async def test_a_prompt_is_a_chat_of_one_message_unless_it_is_raw():
    async with api(THOUGHT) as a:
        told = (
            await a.client.post("/api/generate", json={"prompt": "Hi", "system": "Be brief.", "stream": False})
        ).json()
        chat = [{"role": "system", "content": "Be brief."}, *HI]
        await a.client.post("/v1/chat/completions", json={"messages": chat})
        raw = (await a.client.post("/api/generate", json={"prompt": "Hi", "raw": True, "stream": False})).json()
        jobs = a.backend.jobs
    assert told["response"].strip() == "It is sunny." and told["thinking"].strip() == "Let me see."
    prompts = [job.prompt.tokens.tolist() for job in jobs if job.purpose.value == "generate"]
    assert prompts[0] == prompts[1]
    assert len(prompts[2]) < 4 and "Let me see." in raw["response"]


async def test_a_suffix_fills_a_gap():
    async with api() as a:
        refused = await a.client.post("/api/generate", json={"prompt": "a", "suffix": "b"})
        assert (refused.status_code, "fill-in-the-middle" in refused.json()["error"]) == (400, True)
        served = a.service.served
        markers = {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3}
        a.service.served = replace(served, text=replace(served.text, splitters={**served.text.splitters, **markers}))
        told = (await a.client.post("/api/generate", json={"prompt": "a", "suffix": "b", "stream": False})).json()
        both = await a.client.post("/api/generate", json={"prompt": "a", "suffix": "b", "system": "Be brief."})
        (job,) = a.backend.jobs
    encode = text_model().encode
    assert job.prompt.tokens.tolist() == [1, *encode("a"), 2, *encode("b"), 3]
    assert (told["response"], both.status_code) == ("Hello there.", 400)


async def test_options_are_those_of_chat_completions():
    options = {
        "temperature": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["x"],
        "num_predict": 2,
        "num_ctx": 512,
        "repeat_penalty": 1.5,
        "repeat_last_n": -1,
        "frequency_penalty": 0.25,
        "num_gpu": 1,
        "made_up": 1,
    }
    async with api(THOUGHT) as a:
        body = {"messages": HI, "options": options, "keep_alive": "5m", "stream": False, "think": False}
        told = (await a.client.post("/api/chat", json=body)).json()
        job = a.backend.jobs[0]
        record = (await a.client.get("/v1/cache/requests?limit=1")).json()["data"][0]
        for unlimited in (-1, -2):
            await a.client.post("/api/chat", json={"messages": HI, "options": {"num_predict": unlimited}})
            assert a.backend.of(Purpose.GENERATE)[-1].max_tokens > 1000
    sampling = job.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 3, 0.1, 7)
    assert (sampling.repetition_penalty, sampling.frequency_penalty) == (1.5, 0.25)
    assert (told["done_reason"], told["eval_count"]) == ("length", 2)
    assert any("made_up" in note for note in record["notes"])


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}], ids=str)
async def test_a_format_is_a_grammar(form: object):
    async with api(says('{"a": 1}')) as a:
        told = (await a.client.post("/api/chat", json={"messages": HI, "format": form, "stream": False})).json()
        assert a.backend.jobs[0].constraint is not None
    assert json.loads(told["message"]["content"]) == {"a": 1}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/chat", {"messages": HI, "model": "other"}, 404),
        ("/api/chat", {"messages": [{"role": "user", "content": "What?", "images": ["aGk="]}]}, 400),
        ("/api/chat", {"messages": HI, "options": {"seed": 2**63}}, 400),
        ("/api/generate", {"prompt": "Hi", "options": {"repeat_last_n": 1_000_001, "repeat_penalty": 1.1}}, 400),
        ("/api/chat", {"messages": HI, "options": {"mirostat": 2}}, 400),
        ("/api/chat", {"messages": HI, "format": "xml"}, 400),
        ("/api/generate", {"prompt": "Hi", "context": [1, 2]}, 400),
        ("/api/generate", {"prompt": "Hi", "template": "{{ .Prompt }}"}, 400),
        ("/api/embed", {"input": "Hi"}, 400),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
async def test_refusals_are_in_its_shape(path: str, body: dict[str, Any], status: int):
    async with api() as a:
        response = await a.client.post(path, json=body)
        assert response.status_code == status
        assert list(response.json()) == ["error"]
        assert a.backend.jobs == []


async def test_logprobs():
    async with api(THOUGHT) as a:
        body = {"messages": HI, "logprobs": True, "top_logprobs": 2, "stream": False}
        told = (await a.client.post("/api/chat", json=body)).json()
    assert len(told["logprobs"]) == told["eval_count"] - 1
    assert len(told["logprobs"][0]["top_logprobs"]) == 2


async def test_about_the_model():
    async with api() as a:
        (listed,) = (await a.client.get("/api/tags")).json()["models"]
        (loaded,) = (await a.client.get("/api/ps")).json()["models"]
        shown = (await a.client.post("/api/show", json={"model": listed["name"]})).json()
        missing = await a.client.post("/api/show", json={"model": "other"})
        version = (await a.client.get("/api/version")).json()["version"]
        load = (await a.client.post("/api/chat", json={"model": MODEL, "messages": []})).json()
        unload = (await a.client.post("/api/generate", json={"model": MODEL, "keep_alive": 0})).json()
        heartbeat = await a.client.head("/")
    assert listed["model"] == loaded["model"] == MODEL
    assert "tools" in shown["capabilities"] and "thinking" in shown["capabilities"]
    assert shown["template"] != "" and shown["model_info"]["unknown.context_length"] == 4096
    assert missing.status_code == 404
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]
    assert (load["done_reason"], unload["done_reason"], heartbeat.status_code) == ("load", "unload", 200)
