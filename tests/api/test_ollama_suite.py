"""Ollama's own integration tests (its repository's `integration` folder) as what they send and what they look at.

They need Ollama's process and its library of models. Here a tiny model says what is asked for.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from reprise.chat.answer import Answer, ToolCall
from tests.models.tiny import tiny_model
from tests.workloads.serving import Serving, serving

SKY = "Why is the sky blue?"
GREEDY = {"temperature": 0, "seed": 123}
BRIEF = {"temperature": 0, "seed": 17, "num_predict": 96}
COLORS = {
    "type": "object",
    "properties": {
        "color": {"type": "string", "enum": ["blue", "violet"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 3},
    },
    "required": ["color", "count"],
    "additionalProperties": False,
}
PLACE = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
WEATHER = {"name": "get_weather", "description": "Tells the weather of a place", "parameters": PLACE}
TOOLS = [{"type": "function", "function": WEATHER}]
AGAIN = "Now call get_weather for Boston."
PARIS = {"location": "Paris"}
CALLED = {"name": "get_weather", "arguments": PARIS}
CALL_TEXT = '{"location": "Paris"}'


def said(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


@dataclass(frozen=True, kw_only=True)
class SuiteRequest:
    """What one of the tests sends."""

    test: str
    path: str
    body: dict[str, Any]


def generate(test: str, **body: Any) -> SuiteRequest:
    return SuiteRequest(test=test, path="/api/generate", body={"prompt": SKY, **body})


def chat(test: str, *messages: dict[str, Any], **body: Any) -> SuiteRequest:
    return SuiteRequest(test=test, path="/api/chat", body={"messages": messages or [said("user", SKY)], **body})


ANSWERED = [
    generate("TestAPIGenerate", options=GREEDY, stream=True),
    generate("TestAPIGenerate", options=GREEDY | {"seed": 2**63 - 1}, stream=False),
    chat("TestAPIChat", options=GREEDY, stream=True),
    chat("TestAPIChat", options=GREEDY, stream=False),
    generate("TestBlueSky", options=GREEDY, stream=True),
    generate("TestUnicodeOutput", prompt="Write some emoji.", options=GREEDY, stream=True),
    generate("TestLongInputContext", prompt=SKY * 50, options=GREEDY | {"num_ctx": 128}, stream=True),
    chat("TestContextExhaustion", options=GREEDY | {"num_ctx": 128}, stream=True),
    chat("TestChatWithHistory", keep_alive="10s", options={"num_ctx": 2048}, stream=True),
    chat(
        "TestChatWithHistory",
        *(said("user", SKY), said("assistant", "It scatters.", thinking="Hm."), said("user", "Tell me more!")),
        keep_alive="10s",
        options={"num_ctx": 2048},
        stream=True,
    ),
    generate("TestConcurrentGenerate", keep_alive="10s", options={"seed": 42, "temperature": 0.0}, stream=True),
    chat("runChatModel", keep_alive="10s"),
    chat("TestThinkingEnabled", think=True, stream=False, options=BRIEF),
    chat("TestThinkingSuppressed", stream=False, options=BRIEF),
    generate("runStructuredOutput", format="json", think=False, stream=True, options=BRIEF),
    generate(
        "runStructuredOutput", format=COLORS, think=False, stream=False, logprobs=True, top_logprobs=20, options=BRIEF
    ),
    generate("runStructuredOutput", format=COLORS, think=False, stream=True, options=BRIEF | {"temperature": 0.7}),
    chat("runStructuredOutput", format=COLORS, think=False, stream=False, options=BRIEF),
    chat("TestAPIToolCalling", tools=TOOLS, stream=True, keep_alive="10s", options={"temperature": 0}),
    chat(
        "runOllamaToolRoute",
        said("system", "Call get_weather."),
        said("user", "Call get_weather for Paris."),
        {"role": "assistant", "tool_calls": [{"id": "before", "function": CALLED}]},
        said("tool", '{"condition": "sunny"}', tool_name="get_weather", tool_call_id="before"),
        said("user", AGAIN),
        tools=TOOLS,
        stream=True,
        think=False,
        keep_alive="10s",
        options={"temperature": 0, "num_ctx": 16384, "num_predict": 256},
    ),
]

NO_EMBEDDINGS = "a chat model makes no embeddings"
NO_IMAGES = "models read text only"
NO_CONTEXT = "`context` is tokens that stand for a chat, which Ollama calls deprecated: the chat itself is reused"
NO_DOWNLOADS = "a server that was not started with --download fetches no model for a client"
NO_LIBRARY = "there are no Modelfiles to make a model from"
IMAGE = {"images": ["aGk="]}
REFUSED = [
    (generate("TestGenerateWithHistory", context=[1, 2]), 400, NO_CONTEXT),
    (generate("TestParallelGenerateWithHistory", context=[1, 2]), 400, NO_CONTEXT),
    (generate("TestIntegrationMultimodal", **IMAGE), 400, NO_IMAGES),
    (chat("TestVision", said("user", "What is it?", **IMAGE)), 400, NO_IMAGES),
    (SuiteRequest(test="TestAPIEmbeddings", path="/api/embeddings", body={"prompt": SKY}), 400, NO_EMBEDDINGS),
    (SuiteRequest(test="TestEmbed", path="/api/embed", body={"input": SKY, "truncate": True}), 400, NO_EMBEDDINGS),
    (SuiteRequest(test="PullIfMissing", path="/api/pull", body={"name": "smol"}), 403, NO_DOWNLOADS),
    (SuiteRequest(test="TestCreate", path="/api/create", body={"model": "new", "from": "smol"}), 404, NO_LIBRARY),
]
"""What is refused, and why. Beside it, tests of Ollama's own scheduler, templates, quantization and speed."""


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(tiny_model("qwen3_5"), max_context=8192) as served:
        yield served


def answer_to(body: dict[str, Any]) -> Answer:
    reasoning = None if body.get("think") is False else "Hm."
    if body.get("tools"):
        call = ToolCall(id="call", name="get_weather", arguments=CALL_TEXT)
        return Answer(content=None, reasoning=reasoning, tool_calls=(call,))
    content = '{"color": "blue", "count": 2}' if body.get("format") else "Air scatters blue light."
    return Answer(content=content, reasoning=reasoning)


def told_by(server: Serving, sent: SuiteRequest) -> list[dict[str, Any]]:
    server.answer = answer_to(sent.body)
    reply = server.client.post(sent.path, json={"model": "qwen3_5", **sent.body})
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


@pytest.mark.parametrize("sent", ANSWERED, ids=lambda sent: sent.test)
def test_what_they_send_is_answered(server: Serving, sent: SuiteRequest) -> None:
    told = told_by(server, sent)
    assert len(told) > 1 or sent.body.get("stream") is False
    assert all(each["model"] == "qwen3_5" and each["created_at"] for each in told)
    *_, last = told
    assert last["done"] and last["done_reason"] == "stop"
    for name in ("total", "load", "prompt_eval", "eval"):
        assert last[f"{name}_duration"] > 0, name
    assert last["eval_count"] > 0 and last["prompt_eval_count"] > 0
    parts = [each.get("message", each) for each in told]
    content = "".join(part.get("content", part.get("response", "")) for part in parts)
    thinking = "".join(part.get("thinking", "") for part in parts)
    assert (thinking != "") == (sent.body.get("think") is not False)
    if sent.body.get("tools"):
        (call,) = [call for part in parts for call in part.get("tool_calls", ())]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("get_weather", {"location": "Paris"})
    elif sent.body.get("format"):
        assert json.loads(content) == {"color": "blue", "count": 2}
    else:
        assert content.strip() == "Air scatters blue light."
    if sent.body.get("logprobs"):
        assert all(top["logprob"] <= 0 for each in last["logprobs"] for top in each["top_logprobs"])


@pytest.mark.parametrize(("sent", "status", "reason"), REFUSED, ids=lambda value: getattr(value, "test", ""))
def test_what_is_refused(server: Serving, sent: SuiteRequest, status: int, reason: str) -> None:
    reply = server.client.post(sent.path, json={"model": "qwen3_5", **sent.body})
    assert (reply.status_code, list(reply.json())) == (status, ["error"]), reason


def test_about_models(server: Serving) -> None:
    """What TestAPIListModels, TestAPIShowModel and TestAPIGenerate ask, but the license, which is not known."""
    (listed,) = server.client.get("/api/tags").json()["models"]
    (running,) = server.client.get("/api/ps").json()["models"]
    shown = server.client.post("/api/show", json={"name": listed["name"]}).json()
    for model in (listed, running):
        assert all(model[name] for name in ("name", "model", "size", "digest", "modified_at"))
    assert running["expires_at"]
    for details in (listed["details"], running["details"], shown["details"]):
        assert all(details[name] for name in ("format", "family", "parameter_size", "quantization_level"))
    assert all(shown[name] for name in ("modelfile", "parameters", "template", "model_info", "modified_at"))


@pytest.mark.parametrize("body", [{"keep_alive": "10s"}, {"keep_alive": 0}], ids=str)
def test_loading_and_unloading(server: Serving, body: dict[str, Any]) -> None:
    """`preloadGenerateModel` and what the tests end with: a request without a prompt."""
    reply = server.client.post("/api/generate", json={"model": "qwen3_5", **body})
    assert (reply.status_code, reply.json()["done"]) == (200, True)


def strings_under(key: str, value: Any) -> list[str]:
    """The texts of this key anywhere in a JSON value, in order."""
    if isinstance(value, list):
        return [text for item in value for text in strings_under(key, item)]
    if not isinstance(value, dict):
        return []
    own = [value[key]] if isinstance(value.get(key), str) else []
    return own + [text for item in value.values() for text in strings_under(key, item)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    said("system", "A test."),
                    said("developer", "Call get_weather."),
                    {"role": "user", "content": [{"type": "text", "text": "Call get_weather for Paris."}]},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": CALL_TEXT}}
                        ],
                    },
                    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "sunny"}]},
                    said("user", AGAIN),
                ],
                "tools": TOOLS,
                "max_tokens": 256,
                "reasoning_effort": "none",
            },
        ),
        (
            "/v1/responses",
            {
                "instructions": "A test.",
                "input": [
                    {"type": "message", "role": "developer", "content": "Call get_weather."},
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "For Paris."}]},
                    {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": CALL_TEXT},
                    {
                        "type": "function_call_output",
                        "call_id": "a",
                        "output": [{"type": "input_text", "text": "sunny"}],
                    },
                    {"type": "message", "role": "user", "content": AGAIN},
                ],
                "tools": [{"type": "function", "strict": False, **WEATHER}],
                "max_output_tokens": 256,
                "reasoning": {"effort": "none"},
            },
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 256,
                "system": [
                    {"type": "text", "text": "A test."},
                    {"type": "text", "text": "Call get_weather.", "cache_control": {"type": "ephemeral"}},
                ],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Call get_weather for Paris."}]},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "get_weather", "input": PARIS}],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sunny"}]},
                            {"type": "text", "text": AGAIN},
                        ],
                    },
                ],
                "tools": [{"name": "get_weather", "description": "Tells the weather.", "input_schema": PLACE}],
                "thinking": {"type": "disabled"},
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_other_routes_of_a_tool(server: Serving, path: str, body: dict[str, Any]) -> None:
    """`runToolRoutesModel`."""
    server.answer = answer_to({"tools": TOOLS, "think": False})
    reply = server.client.post(path, json={"model": "qwen3_5", "stream": True, "temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert "get_weather" in strings_under("name", events)
    assert CALL_TEXT in "".join((*strings_under("arguments", events), *strings_under("partial_json", events)))
