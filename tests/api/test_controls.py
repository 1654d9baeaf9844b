"""Fields that change what a request means: acted on, on every API where they make sense, or refused; never ignored."""

import json
from dataclasses import replace
from typing import Any

import pytest

from reprise.core.job import Job
from tests.api.servers import MODEL, api, running_server, says
from tests.chat.text_models import text_model
from tests.matrix import in_turn
from tests.sdks import anthropic

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HI}),
    "completions": ("/v1/completions", {"prompt": "Hi"}),
    "responses": ("/v1/responses", {"input": "Hi"}),
    "messages": ("/v1/messages", {"max_tokens": 40, "messages": HI}),
}
EACH = pytest.mark.parametrize("name", REQUESTS)


def text_of(name: str, body: dict[str, Any]) -> str:
    match name:
        case "chat":
            return body["choices"][0]["message"]["content"]
        case "completions":
            return body["choices"][0]["text"]
        case "responses":
            return body["output"][-1]["content"][0]["text"]
        case _:
            return body["content"][-1]["text"]


async def post(name: str, script: Any = None, **fields: Any) -> tuple[Any, Job | None]:
    path, body = REQUESTS[name]
    async with api() if script is None else api(script) as served:
        got = await served.client.post(path, json={**body, **fields})
        return got, served.backend.jobs[0] if served.backend.jobs else None


GRAMMARS: list[dict[str, Any]] = [
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"structured_outputs": {"choice": ['{"a":1}', "no"]}},
    {"structured_outputs": {"regex": r"\{.a.:[0-9]\}"}},
    {"structured_outputs": {"grammar": 'root ::= "{" [^}]+ "}"'}},
    {"structured_outputs": {"json_object": True}},
    {"guided_json": SCHEMA},
    {"guided_regex": r"\{.*\}"},
    {"guided_choice": ['{"a":1}']},
    {"guided_grammar": 'start: "{" /[^}]+/ "}"'},
    {"grammar": 'root ::= "{" [^}]+ "}"'},
    {"json_schema": SCHEMA},
]


@pytest.mark.parametrize(("fields", "name"), in_turn(GRAMMARS, [*REQUESTS]), ids=lambda value: str(value)[:50])
async def test_an_answer_is_held_to_each_kind_of_grammar(name: str, fields: dict[str, Any]) -> None:
    # The engine of this test fails an answer that breaks its grammar.
    held, job = await post(name, says('{"a":1}'), **fields)
    assert (held.status_code, text_of(name, held.json())) == (200, '{"a":1}')
    assert job is not None and job.constraint is not None
    broken, _ = await post(name, says("Hello."), **fields)
    assert broken.status_code == 500


async def test_completions_take_a_response_format() -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}
    flat = {"type": "json_schema", "schema": SCHEMA}
    for name in ("completions", "chat"):
        broken, _ = await post(name, says("Hello."), response_format=flat)
        assert broken.status_code == 500
    held, _ = await post("completions", says('{"a":1}'), response_format=wanted)
    assert text_of("completions", held.json()) == '{"a":1}'
    broken, _ = await post("completions", says("Hello."), response_format={"type": "json_object", "schema": SCHEMA})
    assert broken.status_code == 500


@EACH
async def test_an_answer_that_may_not_end(name: str) -> None:
    _, held = await post(name, min_tokens=5, max_output_tokens=30, max_tokens=30)
    assert held is not None and (held.min_tokens, held.max_tokens) == (5, 30)
    _, endless = await post(name, ignore_eos=True, max_output_tokens=30, max_tokens=30)
    assert endless is not None and (endless.min_tokens, endless.max_tokens) == (30, 30)
    eos = text_model().eos
    _, own = await post(name, ignore_eos=True, stop_token_ids=[7])
    assert own is not None and own.min_tokens == 0 and own.stop_tokens == eos | {7}
    assert all(own.sampling.logit_bias[token] < -100 for token in eos)


@pytest.mark.parametrize("name", ["chat", "completions", "messages"])
async def test_stop_strings_wait_for_the_least_number_of_tokens(name: str) -> None:
    stop = {"stop_sequences": ["."]} if name == "messages" else {"stop": ["."]}
    said = says("One. Two. Three.")
    at_once, _ = await post(name, said, **stop)
    later, job = await post(name, said, min_tokens=len(text_model().encode("One.")), **stop)
    # Only the model's own end is ignored.
    endless, _ = await post(name, said, ignore_eos=True, **stop)
    assert [text_of(name, got.json()) for got in (at_once, later, endless)] == ["One", "One. Two", "One"]
    assert job is not None and job.watch is not None


@EACH
async def test_tokens_that_end_an_answer(name: str) -> None:
    (end,) = text_model().encode(".")
    got, _ = await post(name, says("One. Two."), stop_token_ids=[end])
    assert text_of(name, got.json()) == "One"
    refused, _ = await post(name, stop_token_ids=[10**6])
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("name", "fields", "is_on"),
    [
        ("chat", {"enable_thinking": False}, False),
        ("chat", {"thinking": {"type": "disabled"}}, False),
        ("chat", {"thinking": {"type": "enabled", "budget_tokens": 9}}, True),
        ("chat", {"thinking": False}, False),
        ("chat", {"thinking": {"type": "auto"}}, None),
        ("chat", {"thinking": True, "chat_template_kwargs": {"enable_thinking": False, "thinking": False}}, False),
        ("responses", {"enable_thinking": False}, False),
        ("responses", {"thinking": {"type": "disabled"}}, False),
        ("responses", {"reasoning": {"effort": "none"}}, False),
        ("messages", {"enable_thinking": True}, True),
        ("messages", {"thinking": {"type": "disabled"}}, False),
        ("messages", {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}, True),
    ],
    ids=str,
)
async def test_thinking_is_switched_on_every_api(name: str, fields: dict[str, Any], is_on: bool | None) -> None:
    path, body = REQUESTS[name]
    text, seen = text_model(), list[dict[str, Any]]()
    template = text.render
    assert template is not None

    def render(messages: Any, **options: Any) -> str:
        if [message["content"] for message in messages] == ["Hi"]:
            seen.append(options)
        return template(messages, **options)

    async with api(text=replace(text, render=render)) as served:
        assert (await served.client.post(path, json={**body, **fields})).status_code == 200
        (job, *_) = served.backend.jobs
    assert seen and {options.get(key) for options in seen for key in ("enable_thinking", "thinking")} == {is_on}
    budget = 9 if "budget_tokens" in str(fields) else None
    assert job.thinking is not None and job.thinking.budget == budget


@pytest.mark.parametrize("name", ["chat", "completions", "responses"])
async def test_options_of_a_stream_that_is_none(name: str) -> None:
    refused, job = await post(name, stream_options={"include_usage": True})
    assert (refused.status_code, refused.json()["error"]["param"], job) == (400, "stream_options", None)


@EACH
@pytest.mark.parametrize(("field", "value"), [("use_beam_search", True), ("bad_words", ["no"]), ("typical_p", 0.5)])
async def test_what_would_change_the_answer_is_refused(name: str, field: str, value: Any) -> None:
    refused, _ = await post(name, **{field: value})
    assert refused.status_code == 400 and f"`{field}`" in refused.json()["error"]["message"]
    harmless: Any = {"use_beam_search": False, "bad_words": [], "typical_p": 1.0}[field]
    assert (await post(name, **{field: harmless}))[0].status_code == 200


@EACH
async def test_two_grammars_exclude_each_other(name: str) -> None:
    refused, _ = await post(name, guided_json=SCHEMA, grammar='root ::= "a"')
    assert refused.status_code == 400 and "`guided_json` and `grammar`" in refused.json()["error"]["message"]


async def test_names_of_llama_cpp() -> None:
    for name in ("chat", "completions"):
        _, job = await post(name, repeat_penalty=1.2, repeat_last_n=64, n_predict=9)
        assert job is not None
        sampling = job.sampling
        assert (sampling.repetition_penalty, sampling.repetition_context_size, job.max_tokens) == (1.2, 64, 9)


def test_a_thread_is_refused_as_the_sdk_expects() -> None:
    with (
        running_server() as server,
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client,
        pytest.raises(anthropic.BadRequestError) as caught,
    ):
        client.messages.create(
            model=MODEL,
            max_tokens=5,
            messages=[{"role": "user", "content": "Hi"}],
            extra_body={"thread": {"type": "a"}},
        )
    body: Any = caught.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_items_are_referred_to_by_their_ids() -> None:
    async with api() as served:
        first = (await served.client.post("/v1/responses", json={"input": "Hi"})).json()
        item = first["output"][-1]
        again = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": item["id"]}]
        follow: dict[str, Any] = {"input": [*again, {"role": "user", "content": "And?"}]}
        second = await served.client.post("/v1/responses", json=follow)
        # The same as the items themselves, also for who goes on from there.
        by_value = {"input": [again[0], item, follow["input"][-1]]}
        third = await served.client.post("/v1/responses", json=by_value)
        assert second.json()["usage"]["input_tokens"] == third.json()["usage"]["input_tokens"]
        later = {"input": "So?", "previous_response_id": second.json()["id"]}
        assert (await served.client.post("/v1/responses", json=later)).status_code == 200
        hidden = await served.client.post("/v1/responses", json={"input": "Hi", "store": False})
        for unknown in (hidden.json()["output"][-1]["id"], "msg_0", None):
            reference = {"type": "item_reference", **({} if unknown is None else {"id": unknown})}
            refused = await served.client.post("/v1/responses", json={"input": [reference]})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0]")
        await served.client.delete(f"/v1/responses/{first['id']}")
        assert (await served.client.post("/v1/responses", json=follow)).status_code == 400
