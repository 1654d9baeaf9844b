"""A malformed call: its text where nothing of it was sent; else a call, and the rest of it as text."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.api.servers import api, says

pytestmark = pytest.mark.anyio

BEGUN, REST = '{"city": "Paris"', "] so"
BROKEN = f'<tool_call>\n{{"name": "get_weather", "arguments": {BEGUN}{REST}</tool_call>'
HI = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
Heard = tuple[str, list[str], str]
"""Text, the arguments of the calls, and how the answer ended."""


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(response: httpx.Response) -> Heard:
    text, calls, end = "", list[str](), ""
    for choice in (choice for event in events_of(response) for choice in event["choices"]):
        delta = choice["delta"]
        text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            calls += [""] if "id" in call else []
            calls[-1] += call["function"].get("arguments") or ""
        end = choice["finish_reason"] or end
    return text, calls, end


def messages(response: httpx.Response) -> Heard:
    text, calls, end = "", list[str](), ""
    for event in events_of(response):
        block, delta = event.get("content_block", {}), event.get("delta", {})
        calls += [""] if block.get("type") == "tool_use" else []
        text += delta.get("text", "")
        if "partial_json" in delta:
            calls[-1] += delta["partial_json"]
        end = delta.get("stop_reason") or end
    return text, calls, end


def responses(response: httpx.Response) -> Heard:
    text, calls = "", list[str]()
    events = events_of(response)
    for event in events:
        match event["type"]:
            case "response.output_text.delta":
                text += event["delta"]
            case "response.function_call_arguments.done":
                calls.append(event["arguments"])
            case _:
                pass
    output = events[-1]["response"]["output"]
    assert text == "".join(item["content"][0]["text"] for item in output if item["type"] == "message")
    assert calls == [item["arguments"] for item in output if item["type"] == "function_call"]
    return text, calls, events[-1]["response"]["status"]


APIS: dict[str, tuple[str, dict[str, Any], Callable[[httpx.Response], Heard], str]] = {
    "chat": ("/v1/chat/completions", {"messages": HI, "tools": TOOLS}, chat, "tool_calls"),
    "messages": (
        "/v1/messages",
        {
            "messages": HI,
            "max_tokens": 200,
            "tools": [{"name": "get_weather", "input_schema": FUNCTION["parameters"]}],
        },
        messages,
        "tool_use",
    ),
    "responses": (
        "/v1/responses",
        {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]},
        responses,
        "completed",
    ),
}


@pytest.mark.parametrize("name", sorted(APIS))
async def test_what_reached_the_client_as_a_call_stays_one_and_no_text_comes_twice(name: str) -> None:
    url, body, read, end = APIS[name]
    async with api(says(f"I look.\n{BROKEN}")) as a:
        text, calls, ended = read(await a.client.post(url, json={**body, "stream": True}))
    assert (calls, ended) == ([BEGUN], end)
    assert text.replace("\n", "") == f"I look.{REST}"


@pytest.mark.parametrize("name", sorted(APIS))
async def test_what_is_not_streamed_is_text_alone(name: str) -> None:
    url, body, _, _ = APIS[name]
    async with api(says(f"I look.\n{BROKEN}")) as a:
        answer = (await a.client.post(url, json=body)).text
    assert json.dumps(BROKEN)[1:-1] in answer
    assert not any(mark in answer for mark in ('"function_call"', '"tool_use"', '"tool_calls"'))


async def test_ollama_gives_calls_whole() -> None:
    async with api(says(f"I look.\n{BROKEN}")) as a:
        response = await a.client.post("/api/chat", json={"messages": HI, "tools": TOOLS})
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(line["message"].get("content", "") for line in lines) == f"I look.\n{BROKEN}"
    assert not any(line["message"].get("tool_calls") for line in lines)
