"""Anthropic's messages API in process: what goes in, what comes out, what is handed to the engine."""

import json
from typing import Any

import httpx
import pytest

from reprise.api.http.limits import Limits
from reprise.api.service.reasoning_signature import decode_reasoning, encode_reasoning, is_signed, signature_of
from reprise.core.errors import QueueFull, ShuttingDown
from reprise.core.job import Job, Purpose
from reprise.core.prompt import BoundaryKind
from reprise.core.settings import Settings
from tests.api.servers import HELLO, MODEL, api, running_server, says
from tests.chat.text_models import text_model

pytestmark = pytest.mark.anyio

URL = "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": HI}
TOOLS = [{"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
EPHEMERAL = {"type": "ephemeral"}


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for entry in response.text.strip().split("\n\n"):
        name, data = entry.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def prompt_of(job: Job) -> str:
    return text_model().decode(job.prompt.tokens.tolist())


def explicit_texts(job: Job) -> list[str]:
    """What stands before each explicit boundary."""
    tokens = job.prompt.tokens.tolist()
    at = [boundary.position for boundary in job.prompt.boundaries if boundary.kind is BoundaryKind.EXPLICIT]
    return [text_model().decode(tokens[:position]) for position in at]


async def record_of(a: Any, made: httpx.Response) -> dict[str, Any]:
    await a.until_idle()
    return (await a.client.get(f"/v1/cache/requests/{made.json()['id']}")).json()


async def test_a_whole_message():
    async with api(says("<think>\nHm.\n</think>\n\nHello there.")) as a:
        response = await a.client.post(f"{URL}?beta=true", json=BODY, headers={"anthropic-version": "2023-06-01"})
    body = response.json()
    assert response.status_code == 200, body
    assert response.headers["request-id"] == body["id"]
    assert body["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": signature_of("Hm.")},
        {"type": "text", "text": "Hello there.", "citations": []},
    ]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", MODEL)
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert (body["stop_details"], body["container"]) == (None, None)
    usage = body["usage"]
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": usage["cache_creation_input_tokens"],
        "ephemeral_1h_input_tokens": 0,
    }
    assert usage["output_tokens_details"]["thinking_tokens"] > 0
    assert (usage["service_tier"], usage["server_tool_use"], usage["inference_geo"]) == ("standard", None, None)


async def test_the_order_of_a_stream():
    async with api(says(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}")) as a:
        events = events_of(await a.client.post(URL, json={**BODY, "tools": TOOLS, "stream": True}))
        whole = (await a.client.post(URL, json={**BODY, "tools": TOOLS})).json()
    told = [e["type"] + (f" {e['delta']['type']}" if "type" in e.get("delta", {}) else "") for e in events]
    once = [kind for at, kind in enumerate(told) if at == 0 or told[at - 1] != kind]
    call = ["content_block_start", "content_block_delta input_json_delta", "content_block_stop"]
    assert once == [
        "message_start",
        "content_block_start",
        "content_block_delta thinking_delta",
        "content_block_delta signature_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta text_delta",
        "content_block_stop",
        *call,
        *call,
        "message_delta",
        "message_stop",
    ]
    starts = [e for e in events if e["type"] == "content_block_start"]
    assert [e["index"] for e in starts] == [0, 1, 2, 3]
    assert starts[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[2]["content_block"]["input"] == {}
    assert events[0]["message"]["content"] == []
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][2]["input"] == {"city": "Paris"}
    assert whole["content"][2]["caller"] == {"type": "direct"}


async def test_a_call_that_the_length_cuts_is_a_part_of_one():
    async with api(says(CALL)) as a:
        for num_tokens in range(4, 40, 3):
            body = {**BODY, "tools": TOOLS, "max_tokens": num_tokens}
            whole = (await a.client.post(URL, json=body)).json()
            assert all(block["type"] == "tool_use" for block in whole["content"])
            assert all(isinstance(block["input"], dict) for block in whole["content"])
            assert whole["stop_reason"] in ("max_tokens", "tool_use")
            assert whole["stop_reason"] == "max_tokens" or whole["content"][0]["input"] == {"city": "Paris"}


async def test_counts_add_up_and_the_next_turn_reads_the_cache():
    async with api(settings=Settings(model=MODEL, settles=False)) as a:
        first = (await a.client.post(URL, json=BODY)).json()
        history = [*HI, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "And?"}]
        body = {**BODY, "messages": history}
        count = (await a.client.post(f"{URL}/count_tokens", json={"messages": history})).json()["input_tokens"]
        start, *_, delta, _ = events_of(await a.client.post(URL, json={**body, "stream": True}))
    num_prompt = len(a.backend.of(Purpose.GENERATE)[0].prompt)
    usage = first["usage"]
    assert usage["cache_read_input_tokens"] == 0
    assert usage["input_tokens"] + usage["cache_creation_input_tokens"] == num_prompt
    assert usage["output_tokens"] > 0
    for usage in (start["message"]["usage"], delta["usage"]):
        assert usage["cache_read_input_tokens"] >= num_prompt - 10
        parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(usage[part] for part in parts) == count


async def test_without_a_cache_nothing_is_created():
    async with api(settings=Settings(model=MODEL, has_prefix_cache=False)) as a:
        start = events_of(await a.client.post(URL, json={**BODY, "stream": True}))[0]
    assert start["message"]["usage"]["cache_creation_input_tokens"] == 0


async def test_history_reaches_the_template():
    history = [
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": signature_of("Hm.")},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "t2", "name": "get_weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no city", "is_error": True},
                {"type": "document", "title": "Map", "source": {"type": "text", "data": "Here.", "media_type": "x"}},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}]
    async with api() as a:
        made = await a.client.post(URL, json={**BODY, "system": system, "messages": history, "tools": TOOLS})
        assert made.status_code == 200, made.text
        (job,) = a.backend.of(Purpose.GENERATE)
        rendered = prompt_of(job)
        record = await record_of(a, made)
    assert "system\nBe kind.\nBe brief." in rendered
    assert "user\nOne\ntwo<" in rendered
    assert '{"name": "get_weather", "arguments": {"city": "Rome"}}' in rendered
    assert rendered.index("sunny") < rendered.index("Error: no city") < rendered.index("Map\nHere.\nGo on.")
    assert record["notes"] == ["thinking blocks without readable text, left out: 1"]


async def test_thinking_goes_round():
    async with api(says(f"<think>\nHm.\n</think>\n\n{CALL}"), template="keeps_everything") as a:
        first = (await a.client.post(URL, json={**BODY, "tools": TOOLS})).json()
        result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "sunny"}
        history = [*HI, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        await a.client.post(URL, json={**BODY, "messages": history, "tools": TOOLS})
        foreign = [{"type": "thinking", "thinking": "Ah.", "signature": "EqQB"}, {"type": "text", "text": "Yes."}]
        history = [*HI, {"role": "assistant", "content": foreign}, *HI]
        other = await a.client.post(URL, json={**BODY, "messages": history})
        jobs = a.backend.of(Purpose.GENERATE)
        record = await record_of(a, other)
    assert "Hm." in prompt_of(jobs[1])
    assert "Ah." in prompt_of(jobs[2])
    assert record["notes"] == ["thinking blocks signed by another server, accepted unchecked: 1"]


async def test_sampling_reaches_the_engine():
    body = {
        **BODY,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "stop_sequences": ["there"],
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "metadata": {"user_id": "u"},
    }
    async with api() as a:
        answer = (await a.client.post(URL, json=body)).json()
        (job,) = a.backend.of(Purpose.GENERATE)
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.top_k) == (0, 0.5, 7)
    assert (job.max_tokens, job.pin_for_s) == (100, None)
    assert job.thinking is not None
    assert job.thinking.budget == 5
    assert answer["content"] == [{"type": "text", "text": "Hello ", "citations": []}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "there")


async def test_too_few_tokens():
    async with api() as a:
        answer = (await a.client.post(URL, json={**BODY, "max_tokens": 1})).json()
    assert answer["stop_reason"] == "max_tokens"


async def test_thinking_is_switched_in_the_template():
    async with api(template="thinking_off_mark") as a:
        for kind in ("enabled", "disabled", "adaptive"):
            made = await a.client.post(URL, json={**BODY, "thinking": {"type": kind}})
            assert made.status_code == 200, made.text
        endings = [prompt_of(job).endswith("</think>\n\n") for job in a.backend.of(Purpose.GENERATE)]
    assert endings == [False, True, False]


async def test_the_choice_of_tools():
    async with api(says(f"{CALL}\n{CALL}")) as a:
        body = {**BODY, "tools": TOOLS}
        one = await a.client.post(
            URL, json={**body, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
        )
        none = await a.client.post(URL, json={**body, "tool_choice": {"type": "none"}})
        unknown = await a.client.post(URL, json={**body, "tool_choice": {"type": "tool", "name": "nope"}})
        toolless = await a.client.post(URL, json={**BODY, "tool_choice": {"type": "any"}})
        await a.client.post(URL, json={**body, "tool_choice": {"type": "any"}})
        forced = a.backend.of(Purpose.GENERATE)[-1]
    assert [block["type"] for block in one.json()["content"]] == ["tool_use"]
    assert [block["type"] for block in none.json()["content"]] == ["text"]
    assert unknown.status_code == toolless.status_code == 400
    assert forced.constraint is not None


async def test_hosted_tools_are_left_out_and_named():
    tools = [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    async with api() as a:
        made = await a.client.post(URL, json={**BODY, "tools": tools})
        record = await record_of(a, made)
        (job,) = a.backend.of(Purpose.GENERATE)
    assert "web_search" not in prompt_of(job)
    assert record["notes"] == ["unsupported server tool left out: web_search (web_search_20250305)"]


async def test_an_answer_that_was_begun_goes_on():
    async with api(says(" a time.")) as a:
        body = {**BODY, "messages": [*HI, {"role": "assistant", "content": "Once upon"}]}
        answer = (await a.client.post(URL, json=body)).json()
        assert prompt_of(a.backend.jobs[0]).endswith("Once upon")
    assert answer["content"] == [{"type": "text", "text": " a time.", "citations": []}]


async def test_marks_are_checkpoints_and_pins():
    body = {
        **BODY,
        "tools": [{**TOOLS[0], "cache_control": EPHEMERAL}],
        "system": [{"type": "text", "text": "Be kind.", "cache_control": EPHEMERAL}, {"type": "text", "text": "Now."}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "A long document.", "cache_control": {**EPHEMERAL, "ttl": "1h"}},
                    {"type": "text", "text": "What does it say?", "cache_control": EPHEMERAL},
                ],
            }
        ],
    }
    async with api() as a:
        made = await a.client.post(URL, json=body)
        assert made.status_code == 200, made.text
        (job,) = a.backend.of(Purpose.GENERATE)
        texts = explicit_texts(job)
        assert texts[-3].endswith("Be kind.")
        assert texts[-2].endswith("A long document.")
        assert "What does it say?" in texts[-1]
        assert job.pin_for_s == 3600
        usage = made.json()["usage"]
        assert usage["cache_creation"]["ephemeral_1h_input_tokens"] == usage["cache_creation_input_tokens"] > 0
        five = [{"type": "text", "text": "x", "cache_control": EPHEMERAL}] * 5
        refused = await a.client.post(URL, json={**BODY, "system": five})
        assert refused.status_code == 400


async def test_a_mark_on_the_whole_request_is_at_its_end():
    async with api() as a:
        await a.client.post(URL, json={**BODY, "cache_control": EPHEMERAL})
        (text,) = explicit_texts(a.backend.of(Purpose.GENERATE)[0])
    assert "Hi" in text


def test_a_long_prefill_pings():
    kinds: list[str] = []
    with running_server(limits=Limits(keep_alive_s=0.01)) as server, httpx.Client(base_url=server.url) as client:
        server.backend.may_prefill.clear()
        with client.stream("POST", URL, json={**BODY, "stream": True}, timeout=60) as response:
            for line in response.iter_lines():
                kinds += [line.removeprefix("event: ")] if line.startswith("event: ") else []
                if kinds.count("ping") == 2:
                    server.backend.may_prefill.set()
    assert kinds[:3] == ["message_start", "ping", "ping"]
    assert kinds[-1] == "message_stop"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "message"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "image"),
        ({"messages": [{"role": "user", "content": []}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}, "name"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"tools": [{"name": "x"}]}, "input_schema"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"top_k": 10**9}, "top_k"),
        ({"system": [{"type": "text", "text": "x", "cache_control": {"type": "forever"}}]}, "cache_control"),
    ],
)
async def test_what_is_wrong_is_named(change: dict[str, Any], field: str):
    async with api() as a:
        response = await a.client.post(URL, json={**BODY, **change})
    body = response.json()
    assert response.status_code == 400, body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert field in body["error"]["message"]


@pytest.mark.parametrize("kind", ["web_fetch_tool_result", "code_execution_tool_result", "tool_search_tool_result"])
async def test_a_result_of_a_tool_that_anthropic_ran_stays_in_a_history(kind: str):
    result = {"type": kind, "tool_use_id": "s", "content": {"type": f"{kind}_error", "error_code": "unavailable"}}
    said = [{"type": "server_tool_use", "id": "s", "name": "web_fetch", "input": {}}, result]
    messages = [*HI, {"role": "assistant", "content": [*said, {"type": "text", "text": "No."}]}, *HI]
    toolset = {"type": "mcp_toolset", "mcp_server_name": "x"}
    async with api() as a:
        made = await a.client.post(URL, json={**BODY, "messages": messages, "tools": [toolset], "mcp_servers": []})
        assert made.status_code == 200, made.text
        nameless = await a.client.post(URL, json={**BODY, "tools": [{"input_schema": {"type": "object"}}]})
    assert (nameless.status_code, "needs its `name`" in nameless.text) == (400, True)


async def test_errors_have_anthropics_types():
    settings = Settings(model=MODEL, api_keys=("secret",))
    async with api(settings=settings) as a:
        unknown = await a.client.post(URL, json=BODY, headers={"x-api-key": "wrong"})
        known = await a.client.post(URL, json=BODY, headers={"x-api-key": "secret"})
        bearer = await a.client.post(URL, json=BODY, headers={"authorization": "Bearer secret"})
        both = await a.client.post(URL, json=BODY, headers={"authorization": "Bearer none", "x-api-key": "secret"})
        headers = {"x-api-key": "secret"}
        model = await a.client.post(URL, json={**BODY, "model": "claude"}, headers=headers)
        a.backend.refuse = QueueFull("Full.", retry_after_s=3)
        full = await a.client.post(URL, json=BODY, headers=headers)
        a.backend.refuse = ShuttingDown("Closing.")
        closing = await a.client.post(URL, json={**BODY, "stream": True}, headers=headers)
    assert (known.status_code, bearer.status_code, both.status_code) == (200, 200, 200)
    told = [(r.status_code, r.json()["error"]["type"]) for r in (unknown, model, full, closing)]
    assert told == [
        (401, "authentication_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        (503, "overloaded_error"),
    ]
    assert full.headers["retry-after"] == "3"


async def test_an_error_in_the_midst_of_a_stream_is_its_last_event():
    async with api(HELLO) as a:
        a.backend.fail_after = 2
        events = events_of(await a.client.post(URL, json={**BODY, "stream": True}))
        whole = await a.client.post(URL, json=BODY)
    assert events[-1]["error"]["type"] == "api_error"
    assert whole.status_code == 500
    assert whole.json()["type"] == "error"


async def test_structured_output():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    async with api(says('{"a": 1}')) as a:
        answer = await a.client.post(URL, json={**BODY, **wanted})
        assert a.backend.jobs[0].constraint is not None
    assert answer.json()["content"][0]["text"] == '{"a": 1}'


def test_seals():
    for reasoning in ("", "Hm.", "ü\n€"):
        assert is_signed(reasoning, signature_of(reasoning))
        assert not is_signed(reasoning + "x", signature_of(reasoning))
        assert decode_reasoning(encode_reasoning(reasoning)) == reasoning
    encoded = encode_reasoning("Hm.")
    for other in ("", "gAAAAABo", "reprise1.abc", "reprise1.abc.###", encoded[:-1], encoded + "="):
        assert decode_reasoning(other) is None
