"""`POST /v1/responses/compact` in process: the summary, what stays beside it, and the turn after it."""

from typing import Any

import pytest

from reprise.api.responses.compact import INSTRUCTION
from reprise.api.service.reasoning_signature import decode_reasoning, encode_reasoning
from reprise.chat.answer import Answer
from reprise.core.job import Job, Purpose
from tests.api.servers import EOS, MODEL, Api, api, says
from tests.chat.text_models import text_model
from tests.models.tiny import tiny_model
from tests.workloads.serving import serving

pytestmark = pytest.mark.anyio

URL = "/v1/responses/compact"
CHAT: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "We launch on Tuesday."},
    {"role": "assistant", "content": "Noted, Tuesday."},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    {"role": "user", "content": [{"type": "input_text", "text": "And support?"}]},
]
SUMMARY = "The launch is on Tuesday."
BODY: dict[str, Any] = {"model": MODEL, "input": CHAT, "instructions": "You plan launches."}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def script(job: Job) -> list[int]:
    thought = "<think>\nHm.\n</think>\n\n"
    said = SUMMARY if INSTRUCTION in prompt_of(job) else "Hello."
    return text_model().encode(thought + said + EOS)


def prompt_of(job: Job) -> str:
    return text_model().decode(job.prompt.tokens.tolist())


async def settled_before(a: Api, body: dict[str, Any]) -> tuple[str, str]:
    """The only prompt that was settled, and that of the next request, which must begin with it."""
    await a.until_idle()
    (settle,) = a.backend.of(Purpose.SETTLE)
    made = await a.client.post("/v1/responses", json=body)
    assert made.status_code == 200, made.text
    return prompt_of(settle), prompt_of(a.backend.of(Purpose.GENERATE)[-1])


async def test_the_users_messages_and_a_summary_stay_and_the_next_turn_is_settled():
    async with api(script) as a:
        reply = await a.client.post(URL, json={**BODY, "tools": [TOOL]})
        body = reply.json()
        assert reply.status_code == 200, body
        *kept, compaction = body["output"]
        question = {"role": "user", "content": "When is it?"}
        following = {**BODY, "input": [*body["output"], question], "tools": [TOOL]}
        settled, following_prompt = await settled_before(a, following)
        record = (await a.client.get(f"/v1/cache/requests/{body['id']}")).json()
        asked = prompt_of(a.backend.of(Purpose.GENERATE)[0])
    assert (body["object"], reply.headers["x-request-id"], record["id"]) == (
        "response.compaction",
        body["id"],
        body["id"],
    )
    assert [(item["role"], item["content"][0]["text"], item["status"]) for item in kept] == [
        ("developer", "Be kind.", "completed"),
        ("user", "We launch on Tuesday.", "completed"),
        ("user", "And support?", "completed"),
    ]
    assert (compaction["type"], decode_reasoning(compaction["encrypted_content"])) == ("compaction", SUMMARY)
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert INSTRUCTION in asked and "Noted, Tuesday." in asked and "sunny" in asked
    assert following_prompt.startswith(settled)
    # Up to the user's own words, and nothing of what was summarised.
    assert following_prompt[len(settled) :].startswith("When is it?")
    assert SUMMARY in settled and "You plan launches." in settled and "Noted" not in settled and "sunny" not in settled


async def test_a_response_that_is_kept_is_summarised_with_its_own_tools_and_instructions():
    async with api(script) as a:
        first = await a.client.post("/v1/responses", json={**BODY, "tools": [TOOL]})
        await a.until_idle()
        a.backend.jobs.clear()
        body = (await a.client.post(URL, json={"model": MODEL, "previous_response_id": first.json()["id"]})).json()
        assert body["usage"]["input_tokens_details"]["cached_tokens"] >= first.json()["usage"]["input_tokens"] - 1
        following = {**BODY, "input": [*body["output"], {"role": "user", "content": "So?"}], "tools": [TOOL]}
        settled, following_prompt = await settled_before(a, following)
    assert following_prompt[len(settled) :].startswith("So?") and following_prompt.startswith(settled)


async def test_a_compaction_is_summarised_again_and_may_be_the_last_item():
    async with api(script) as a:
        once = (await a.client.post(URL, json=BODY)).json()["output"]
        again = (await a.client.post(URL, json={**BODY, "input": once})).json()["output"]
        asked = prompt_of(a.backend.of(Purpose.GENERATE)[-1])
        goes_on = await a.client.post("/v1/responses", json={"model": MODEL, "input": again})
        continued = prompt_of(a.backend.of(Purpose.GENERATE)[-1])
    assert SUMMARY in asked
    assert [item["type"] for item in again] == [item["type"] for item in once]
    assert goes_on.status_code == 200 and SUMMARY in continued


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        (URL, {"input": "Hi"}, "model"),
        (URL, {"model": MODEL}, "input"),
        (URL, {"model": MODEL, "input": []}, "input"),
        (URL, {"model": MODEL, "input": "Hi", "conversation": "c"}, "conversation"),
        *(
            (url, {"model": MODEL, "input": [{"type": kind, "encrypted_content": word}]}, "input[0].encrypted_content")
            for url, kind, word in (
                (URL, "compaction", "gAAAAA"),
                ("/v1/responses", "compaction_summary", encode_reasoning("Yes.")[:-4]),
            )
        ),
    ],
)
async def test_what_is_wrong_is_named(url: str, body: dict[str, Any], field: str):
    async with api() as a:
        reply = await a.client.post(url, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text


def test_only_the_users_words_are_computed_after_it():
    with serving(tiny_model("qwen3_5"), max_context=8192) as server:
        server.answer = Answer(content=SUMMARY * 20, reasoning="Hm.")
        body = {"model": "qwen3_5", "input": CHAT, "instructions": "You plan launches."}
        output = server.client.post(URL, json=body).raise_for_status().json()["output"]
        server.wait_until_idle()
        following = {**body, "input": [*output, {"role": "user", "content": "When?"}]}
        usage = server.client.post("/v1/responses", json=following).raise_for_status().json()["usage"]
    computed = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    assert computed <= 20 and usage["input_tokens"] > 200, usage


async def test_a_model_that_writes_no_summary_is_an_error():
    async with api(says("<think>\nHm.\n</think>\n\n")) as a:
        reply = await a.client.post(URL, json=BODY)
        await a.until_idle()
        assert a.backend.of(Purpose.SETTLE) == []
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "engine_failed")
