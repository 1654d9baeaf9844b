"""Structured output together with tools: a tool call now, or the JSON at the end, on all APIs."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from reprise.core.job import Purpose
from tests.api.servers import api, says
from tests.matrix import in_turn

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}},
    "required": ["sky"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OUTPUT = '{"sky": "blue"}'
HI = [{"role": "user", "content": "How is the sky?"}]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """An API: where a request goes and how its answer is read. `choices` are its ways to say how tools are chosen."""

    url: str
    body: dict[str, Any]
    choices: dict[str, Any]
    read: Callable[[dict[str, Any]], tuple[str | None, list[Any]]]
    """The text and the arguments of the calls of an answer."""


def read_chat(answer: dict[str, Any]) -> tuple[str | None, list[Any]]:
    message = answer["choices"][0]["message"]
    calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    return message["content"], calls


def read_response(answer: dict[str, Any]) -> tuple[str | None, list[Any]]:
    texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
    calls = [json.loads(item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    return "".join(texts) or None, calls


def read_message(answer: dict[str, Any]) -> tuple[str | None, list[Any]]:
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    return "".join(texts) or None, [block["input"] for block in answer["content"] if block["type"] == "tool_use"]


FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}
OUTPUT_FORMAT = {"type": "json_schema", "schema": SCHEMA}
MESSAGES = Dialect(
    url="/v1/messages",
    body={
        "max_tokens": 64,
        "messages": HI,
        "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
        "output_config": {"format": OUTPUT_FORMAT},
    },
    choices={
        "auto": {"type": "auto"},
        "none": {"type": "none"},
        "required": {"type": "any"},
        "named": {"type": "tool", "name": "get_weather"},
    },
    read=read_message,
)
DIALECTS = {
    "chat": Dialect(
        url="/v1/chat/completions",
        body={
            "messages": HI,
            "tools": [{"type": "function", "function": FUNCTION}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        },
        choices={
            "auto": "auto",
            "none": "none",
            "required": "required",
            "named": {"type": "function", "function": {"name": "get_weather"}},
        },
        read=read_chat,
    ),
    "responses": Dialect(
        url="/v1/responses",
        body={
            "input": HI,
            "tools": [{"type": "function", **FUNCTION}],
            "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}},
        },
        choices={
            "auto": "auto",
            "none": "none",
            "required": "required",
            "named": {"type": "function", "name": "get_weather"},
        },
        read=read_response,
    ),
    "messages": MESSAGES,
    "messages, before": Dialect(
        url=MESSAGES.url,
        body={k: v for k, v in MESSAGES.body.items() if k != "output_config"} | {"output_format": OUTPUT_FORMAT},
        choices=MESSAGES.choices,
        read=read_message,
    ),
}


async def asked(name: str, said: str, choice: str | None = None, *, template: str = "strips_thinking") -> Any:
    """The status of the answer when the model says this, and what the client reads; the engine holds to the grammar."""
    dialect = DIALECTS[name]
    chosen = {} if choice is None else {"tool_choice": dialect.choices[choice]}
    async with api(says(said), template=template) as a:
        response = await a.client.post(dialect.url, json={**dialect.body, **chosen})
    return dialect.read(response.json()) if response.status_code == 200 else response.status_code


@pytest.mark.parametrize(("name", "choice"), in_turn(DIALECTS, [None, "auto"]))
async def test_the_answer_is_a_call_or_the_output(name: str, choice: str | None) -> None:
    assert await asked(name, CALL, choice) == (None, [{"city": "Paris"}])
    assert await asked(name, f"{CALL}\n{CALL}", choice) == (None, [{"city": "Paris"}] * 2)
    assert await asked(name, OUTPUT, choice) == (OUTPUT, [])
    for other in ("Blue.", '{"sky": "red"}', OUTPUT + CALL, CALL + OUTPUT):
        assert await asked(name, other, choice) == 500, other


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_choice_decides_which(name: str) -> None:
    for choice in ("required", "named"):
        assert await asked(name, CALL, choice) == (None, [{"city": "Paris"}])
        assert await asked(name, OUTPUT, choice) == 500
    assert await asked(name, OUTPUT, "none") == (OUTPUT, [])
    assert await asked(name, CALL, "none") == 500


@pytest.mark.parametrize("name", DIALECTS)
async def test_thinking_comes_before_either(name: str) -> None:
    for said, expected in ((CALL, (None, [{"city": "Paris"}])), (OUTPUT, (OUTPUT, []))):
        assert await asked(name, f"Hm.\n</think>\n\n{said}", template="think_in_prompt") == expected
        assert await asked(name, f"<think>\nHm.\n</think>\n\n{said}") == expected
    assert await asked(name, "Hm.\n</think>\n\nBlue.", template="think_in_prompt") == 500


WIDE: dict[str, Any] = {"type": "object", "properties": {f"property{number}": {} for number in range(600)}}
TOOL = {"type": "function", "function": {"name": "fill_in", "parameters": WIDE}}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": WIDE}}}),
        ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "required"}),
        ("/v1/completions", {"prompt": "Hi", "guided_json": WIDE}),
        ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": WIDE}}}),
        ("/v1/messages", {"max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": WIDE}}}),
        ("/api/chat", {"format": WIDE}),
    ],
)
async def test_a_schema_that_cannot_be_followed_is_refused_before_anything_is_computed(url: str, body: dict[str, Any]):
    messages = {} if {"prompt", "input"} & body.keys() else {"messages": HI}
    async with api(context=32_768) as a:
        refused = await a.client.post(url, json={**messages, **body})
    assert refused.status_code == 400
    assert "600 optional properties" in refused.text
    assert a.backend.jobs == []


NAMES = ("look_up", "get_weather", "write")


@pytest.mark.parametrize(
    ("url", "tools", "allowed"),
    [
        (
            "/v1/chat/completions",
            [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES],
            lambda mode, tools: {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}},
        ),
        (
            "/v1/responses",
            [{"type": "function", "name": name, "parameters": PARAMETERS} for name in NAMES],
            lambda mode, tools: {"type": "allowed_tools", "mode": mode, "tools": tools},
        ),
    ],
    ids=["chat", "responses"],
)
async def test_only_the_allowed_tools_are_called_and_all_stay_in_the_prompt(
    url: str, tools: list[dict[str, Any]], allowed: Callable[[str, list[dict[str, Any]]], dict[str, Any]]
) -> None:
    body = {"tools": tools, ("input" if "responses" in url else "messages"): HI}
    # The engine of this test fails an answer that breaks its grammar.
    async with api(says(CALL)) as a:
        required = [
            await a.client.post(url, json={**body, "tool_choice": allowed("required", chosen)})
            for chosen in (tools[1:2], tools[:1], [])
        ]
        free = await a.client.post(url, json={**body, "tool_choice": allowed("auto", tools[:1])})
        plain = await a.client.post(url, json=body)
        prompts = [job.prompt.tokens.tolist() for job in a.backend.of(Purpose.GENERATE)]
        records = (await a.client.get("/v1/cache/requests")).json()["data"]
    assert [answer.status_code for answer in (*required, free, plain)] == [200, 500, 400, 200, 200]
    assert all(prompt == prompts[0] for prompt in prompts)
    noted = [record for record in records if any("only the allowed ones" in note for note in record["notes"])]
    assert len(noted) == 1
