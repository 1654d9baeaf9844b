"""OpenAI's responses API in process: what goes in, what comes out, what is handed to the engine."""

import json
from typing import Any

import httpx
import pytest

from reprise.api.responses.body import Item
from reprise.api.responses.items import MessageWriter
from reprise.api.responses.store import ResponseStore, Stored, stored
from reprise.api.service.reasoning_signature import encode_reasoning
from reprise.api.service.unread import UnreadParts
from reprise.core.errors import NotFound
from reprise.core.job import Job, Purpose
from reprise.core.settings import Settings
from tests.api.servers import HELLO, MODEL, api, says
from tests.chat.text_models import text_model

pytestmark = pytest.mark.anyio

URL = "/v1/responses"
BODY: dict[str, Any] = {"model": MODEL, "input": "Hi"}
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PATCH_CALL = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for entry in response.text.strip().split("\n\n"):
        if entry.startswith(":"):
            continue
        name, data = entry.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    """The kinds of events in order; repetitions count once."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def prompt_of(job: Job) -> str:
    return text_model().decode(job.prompt.tokens.tolist())


async def notes_of(a: Any, made: httpx.Response) -> list[str]:
    await a.until_idle()
    return (await a.client.get(f"/v1/cache/requests/{made.json()['id']}")).json()["notes"]


async def test_a_whole_response():
    async with api(says(f"{THOUGHT}Hello there.")) as a:
        response = await a.client.post(URL, json={**BODY, "instructions": "Be kind.", "metadata": {"a": "b"}})
    body = response.json()
    assert response.status_code == 200, body
    reasoning, message = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "Hello there.", "annotations": [], "logprobs": []}]
    assert (body["status"], body["error"], body["metadata"]) == ("completed", None, {"a": "b"})
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 0
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0


async def test_what_nobody_gave_is_there_too():
    async with api() as a:
        told = await a.client.post(URL, json={**BODY, "temperature": 0, "tools": [{"type": "function", "name": "f"}]})
        stream = events_of(await a.client.post(URL, json={**BODY, "stream": True}))
    body = told.json()
    assert (body["temperature"], body["top_p"], body["presence_penalty"], body["frequency_penalty"]) == (0, 1, 0, 0)
    assert body["tools"] == [
        {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None},
    ]
    assert (body["service_tier"], body["top_logprobs"], body["max_tool_calls"]) == ("default", 0, None)
    assert body["completed_at"] >= body["created_at"]
    assert stream[0]["response"]["completed_at"] is None
    assert stream[-1]["response"]["completed_at"] is not None


async def test_the_order_of_a_stream():
    async with api(says(f"{THOUGHT}I look.\n{CALL}\n{PATCH_CALL}")) as a:
        body = {**BODY, "tools": [TOOL, PATCH]}
        events = events_of(await a.client.post(URL, json={**body, "stream": True}))
        whole = (await a.client.post(URL, json=body)).json()
    added, done = "output_item.added", "output_item.done"
    assert kinds_of(events) == [
        "created",
        "in_progress",
        *(added, "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done", done),
        *(added, "content_part.added", "output_text.delta", "output_text.done", "content_part.done", done),
        *(added, "function_call_arguments.delta", "function_call_arguments.done", done),
        *(added, "custom_tool_call_input.delta", "custom_tool_call_input.done", done),
        "completed",
    ]
    last = events[-1]["response"]
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == last["output"]
    assert without_ids(last["output"]) == without_ids(whole["output"])
    assert last["output"][3]["input"] == "*** Begin"
    assert json.loads(last["output"][2]["arguments"]) == {"city": "Paris"}
    assert events[0]["response"]["output"] == []
    indices = [e["output_index"] for e in events if "output_index" in e]
    assert indices == sorted(indices)


async def test_a_call_that_the_length_cuts():
    async with api(says(CALL)) as a:
        seen: list[str] = []
        for num_tokens in range(12, 28, 2):
            body = {**BODY, "tools": [TOOL], "max_output_tokens": num_tokens}
            response = await a.client.post(URL, json=body)
            whole = response.json()
            events = events_of(await a.client.post(URL, json={**body, "stream": True}))
            assert events[-1]["type"] == f"response.{whole['status']}"
            assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
            if whole["status"] == "completed":
                continue
            assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
            for item in whole["output"]:
                assert (item["type"], item["name"], item["status"]) == ("function_call", "get_weather", "incomplete")
                assert '{"city": "Paris"}'.startswith(item["arguments"])
                seen.append(item["arguments"])
            if not whole["output"]:
                (note,) = [note for note in await notes_of(a, response) if "cut short" in note]
                assert note.startswith("the answer was cut short before a tool call had its name: '<tool_call>")
        assert len(set(seen)) > 1


async def test_tools_in_a_namespace():
    space = {"type": "namespace", "name": "crm", "description": "x", "tools": [{"type": "function", "name": "find"}]}
    call = '<tool_call>\n{"name": "crm__find", "arguments": {}}\n</tool_call>'
    async with api(says(call)) as a:
        first = (await a.client.post(URL, json={**BODY, "tools": [space]})).json()
        (called,) = first["output"]
        result = {"type": "function_call_output", "call_id": called["call_id"], "output": "nobody"}
        items = [{"role": "user", "content": "Hi"}, called, result]
        await a.client.post(URL, json={"input": items, "tools": [space]})
        prompt = prompt_of(a.backend.of(Purpose.GENERATE)[-1])
    assert (called["type"], called["name"], called["namespace"]) == ("function_call", "find", "crm")
    assert prompt.count('"name": "crm__find"') == 2


async def test_reasoning_as_a_summary():
    async with api(says(f"{THOUGHT}Hello.")) as a:
        body = {**BODY, "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
        events = events_of(await a.client.post(URL, json={**body, "stream": True}))
    assert kinds_of(events)[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    reasoning = events[-1]["response"]["output"][0]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert reasoning["encrypted_content"] == encode_reasoning("Hm.")
    assert "content" not in reasoning


async def test_items_reach_the_template():
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "One"}, {"type": "input_text", "text": "two"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": None,
            "encrypted_content": encode_reasoning("Hm."),
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** End"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x", "outcome": {"type": "exit"}}]},
        {"type": "tool_search_call", "call_id": "c", "arguments": {"q": "x"}},
        {"type": "image_generation_call", "id": "i", "action": "generate", "result": "AA"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "gAAAAABo"},
    ]
    tools = [TOOL, PATCH, {"type": "web_search"}, {"type": "local_shell"}]
    async with api(template="keeps_everything") as a:
        made = await a.client.post(URL, json={**BODY, "input": items, "tools": tools, "truncation": "auto"})
        assert made.status_code == 200, made.text
        (job,) = a.backend.of(Purpose.GENERATE)
        notes = await notes_of(a, made)
    prompt = prompt_of(job)
    assert "Be brief." in prompt
    assert "user\nOne\ntwo<" in prompt
    assert "Hm." in prompt
    assert "gAAAAABo" not in prompt
    assert '{"name": "get_weather", "arguments": {"city": "Rome"}}' in prompt
    assert '{"name": "apply_patch", "arguments": {"input": "*** End"}}' in prompt
    assert prompt.index("*** End") < prompt.index("sunny") < prompt.index("done")
    assert notes == [
        "`truncation` has no effect: prompts that are too long are refused",
        "items of type web_search_call left out: 1",
        "items of type shell_call_output left out: 1",
        "items of type tool_search_call left out: 1",
        "items of type image_generation_call left out: 1",
        "items of type reasoning without readable text left out: 1",
        "unsupported server tool left out: web_search",
        "unsupported server tool left out: local_shell",
    ]


def test_what_follows_each_other_is_one_assistant_message():
    writer = MessageWriter(None, UnreadParts(None))
    given: list[dict[str, Any]] = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "A"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "B"}]},
        {"type": "local_shell_call", "call_id": "2", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "2", "output": "x"},
        {"type": "computer_call", "call_id": "3", "action": {"type": "screenshot"}},
        {
            "type": "computer_call_output",
            "call_id": "3",
            "output": {"type": "computer_screenshot", "image_url": "data:"},
        },
    ]
    for item in given:
        writer.add(Item.model_validate(item), "input")
    first, second, result, third, screenshot = writer.messages
    assert (first["reasoning_content"], len(first["tool_calls"])) == ("A", 1)
    assert second["reasoning_content"] == "B"
    assert second["tool_calls"][0]["function"] == {"name": "local_shell", "arguments": {"command": ["ls"]}}
    assert result == {"role": "tool", "tool_call_id": "2", "content": "x", "name": "local_shell"}
    assert third["tool_calls"][0]["function"] == {"name": "computer", "arguments": {"type": "screenshot"}}
    assert (screenshot["name"], screenshot["content"]) == ("computer", "[image omitted: this model reads text only]")


async def test_a_chat_goes_on_by_id():
    async with api(says(f"{THOUGHT}Hello."), settings=Settings(model=MODEL, settles=False)) as a:
        first = (await a.client.post(URL, json={**BODY, "instructions": "Be kind."})).json()
        body = {"input": "And?", "instructions": "Be kind.", "previous_response_id": first["id"]}
        second = (await a.client.post(URL, json=body)).json()
        chat = [{"role": "user", "content": "Hi"}, *first["output"], {"role": "user", "content": "And?"}]
        whole = (await a.client.post(URL, json={"input": chat, "instructions": "Be kind."})).json()
        third = (await a.client.post(URL, json={"input": "So?", "previous_response_id": second["id"]})).json()
        jobs = a.backend.of(Purpose.GENERATE)
        kept = (await a.client.get(f"{URL}/{first['id']}")).json()
        items = (await a.client.get(f"{URL}/{second['id']}/input_items")).json()
        deleted = (await a.client.delete(f"{URL}/{first['id']}")).json()
        gone = await a.client.get(f"{URL}/{first['id']}")
    assert prompt_of(jobs[1]) == prompt_of(jobs[2])
    assert whole["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert "Be kind." not in prompt_of(jobs[3])
    assert prompt_of(jobs[3]).index("And?") < prompt_of(jobs[3]).index("So?")
    assert third["previous_response_id"] == second["id"]
    assert kept == first
    assert [item["content"] for item in items["data"]] == [[{"type": "input_text", "text": "And?"}]]
    assert deleted["deleted"] is True
    assert gone.status_code == 404


async def test_input_items_are_listed_in_pages():
    given = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "3"},
    ]
    async with api() as a:
        made = (await a.client.post(URL, json={**BODY, "input": given})).json()
        url = f"{URL}/{made['id']}/input_items"
        pages = [(await a.client.get(url, params={"order": "asc", "limit": 2})).json()]
        pages.append((await a.client.get(url, params={"order": "asc", "after": pages[0]["last_id"]})).json())
        newest = (await a.client.get(url)).json()
        lost = await a.client.get(url, params={"after": "nobody"})
    texts = [[item["content"][0]["text"] for item in page["data"]] for page in (*pages, newest)]
    assert texts == [["One", "Two"], ["3"], ["3", "Two", "One"]]
    assert [page["has_more"] for page in (*pages, newest)] == [True, False, False]
    assert [item["content"][0]["type"] for item in pages[0]["data"]] == ["input_text", "output_text"]
    assert lost.status_code == 400


@pytest.mark.parametrize("kind", [[], {}, 5, True])
async def test_a_type_that_is_no_text_is_refused_by_name(kind: object):
    async with api() as a:
        made = await a.client.post(URL, json={**BODY, "input": [{"type": kind, "content": "x"}]})
    assert (made.status_code, made.json()["error"]["param"]) == (400, "input[0].type")


async def test_penalties_are_what_was_asked_for():
    async with api() as a:
        made = await a.client.post(URL, json={**BODY, "presence_penalty": 1.5, "frequency_penalty": -0.5, "top_p": 0})
        sampling = a.backend.of(Purpose.GENERATE)[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -0.5)
    assert (made.json()["presence_penalty"], made.json()["frequency_penalty"]) == (1.5, -0.5)


async def test_responses_are_kept_only_if_wanted_and_by_key():
    settings = Settings(model=MODEL, api_keys=("a", "b"), separates_keys=True)
    async with api(settings=settings) as a:
        mine, other = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
        kept = (await a.client.post(URL, json=BODY, headers=mine)).json()["id"]
        loose = (await a.client.post(URL, json={**BODY, "store": False}, headers=mine)).json()["id"]
        assert (await a.client.get(f"{URL}/{kept}", headers=mine)).status_code == 200
        assert (await a.client.get(f"{URL}/{kept}", headers=other)).status_code == 404
        assert (await a.client.delete(f"{URL}/{kept}", headers=other)).status_code == 404
        assert (await a.client.get(f"{URL}/{loose}", headers=mine)).status_code == 404
        follow = await a.client.post(URL, json={**BODY, "previous_response_id": kept}, headers=other)
    assert follow.status_code == 404
    assert follow.json()["error"]["code"] == "not_found"


def test_the_store_is_bounded():
    store = ResponseStore(max_nbytes=20_000)
    previous = None
    for number in range(50):
        body = {"id": f"resp_{number}", "output": [{"id": f"msg_{number}", "type": "message", "content": "x" * 100}]}
        previous = stored(body, previous, [{"content": "y" * 100}], namespace="")
        store.add(previous)
        store.check()
    with pytest.raises(NotFound):
        store.get("resp_0", namespace="")
    assert len(previous.chat) == 100 if previous is not None else False


def test_a_chat_counts_once_in_the_store_however_many_turns_it_has():
    store, previous = ResponseStore(max_nbytes=100_000), None
    entries: list[Stored] = []
    for turn in range(40):
        body = {"id": f"resp_{turn}", "output": [{"id": f"msg_{turn}", "content": "x" * 400}]}
        previous = stored(body, previous, [{"content": "y" * 400}], namespace="")
        entries.append(previous)
        store.add(previous)
        store.check()
    assert store.get("resp_0", namespace="") is entries[0]
    # The items of a response are held by those that follow it, and end with the last of these.
    for turn in (0, 39, *range(1, 39)):
        store.delete(f"resp_{turn}", namespace="")
        store.check()
    store.add(stored({"id": "last", "output": []}, None, [{"content": "z" * 49_000}], namespace=""))
    assert store.get("last", namespace="")
    store.check()


async def test_sampling_reaches_the_engine():
    body = {**BODY, "temperature": 0, "top_p": 0.5, "max_output_tokens": 3, "prompt_cache_key": "k", "user": "me"}
    async with api(template="thinking_off_mark") as a:
        made = (await a.client.post(URL, json={**body, "reasoning": {"effort": "none"}})).json()
        (job,) = a.backend.of(Purpose.GENERATE)
        events = events_of(await a.client.post(URL, json={**body, "stream": True}))
    assert (job.sampling.temperature, job.sampling.top_p, job.max_tokens, job.chat) == (0, 0.5, 3, "k")
    assert prompt_of(job).endswith("</think>\n\n")
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert made["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


async def test_structured_output():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": True}}
    async with api(says('{"a": 1}')) as a:
        made = (await a.client.post(URL, json={**BODY, "text": wanted})).json()
        assert a.backend.jobs[0].constraint is not None
    assert made["output"][0]["content"][0]["text"] == '{"a": 1}'
    assert made["text"]["format"]["schema"] == schema


async def test_the_choice_of_tools():
    async with api(says(f"{CALL}\n{CALL}")) as a:
        body = {**BODY, "tools": [TOOL, PATCH]}
        one = (await a.client.post(URL, json={**body, "parallel_tool_calls": False})).json()
        none = (await a.client.post(URL, json={**body, "tool_choice": "none"})).json()
        hosted = await a.client.post(URL, json={**body, "tool_choice": {"type": "web_search"}})
        toolless = await a.client.post(URL, json={**BODY, "tool_choice": "required"})
        await a.client.post(URL, json={**body, "tool_choice": {"type": "function", "name": "get_weather"}})
        forced = a.backend.of(Purpose.GENERATE)[-1]
    assert [item["type"] for item in one["output"]] == ["function_call"]
    assert [item["type"] for item in none["output"]] == ["message"]
    assert hosted.status_code == toolless.status_code == 400
    assert forced.constraint is not None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"conversation": "c"}, "conversation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ],
)
async def test_what_is_wrong_is_named(change: dict[str, Any], field: str):
    async with api() as a:
        response = await a.client.post(URL, json={**BODY, **change})
    assert response.status_code == 400, response.json()
    assert response.json()["error"]["param"] == field


async def test_an_error_in_the_midst_of_a_stream_is_its_last_event():
    async with api(HELLO) as a:
        a.backend.fail_after = 2
        events = events_of(await a.client.post(URL, json={**BODY, "stream": True}))
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["output"][0]["status"] == "incomplete"
