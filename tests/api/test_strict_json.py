"""Whatever leaves the server is strict JSON, whatever numbers a request has and whatever a grammar forbids."""

import json
import logging
import math
from collections.abc import Iterator
from typing import Any, NoReturn

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.real_server import real_server
from tests.api.servers import api
from tests.matrix import examples, in_turn

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]
CHAT, RESPONSES, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def _refuse(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [strict(line) for line in lines if line != "[DONE]"]


@pytest.fixture(scope="module")
def real() -> Iterator[httpx.Client]:
    with real_server(settles=False, accepts_any_model=True) as client:
        yield client


# What a grammar forbids.


@pytest.mark.parametrize(
    "asked", [{"reasoning_effort": "none"}, {"messages": [*HI, {"role": "assistant", "content": "Well:"}]}]
)
def test_where_the_model_is_not_to_think_nothing_stands_before_what_a_grammar_allows(
    real: httpx.Client, asked: dict[str, Any]
) -> None:
    """Its prompt ends behind thinking, or in the words to be continued, where a parser takes all for content."""
    likely = real.post("/tokenize", json={"prompt": "\n\n\n<think>"}).json()["tokens"]
    body = {"messages": HI, "max_tokens": 40, "guided_choice": ["yes", "no"], **asked}
    if "messages" in asked:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    response = real.post(CHAT, json=body | {"logit_bias": {str(token): 50 for token in likely}})
    message = response.json()["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) in {("yes", None), ("no", None)}, message


def test_a_pattern_that_no_grammar_has_is_left_out_unless_the_schema_is_strict(real: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(?!a).*$"}}}
    for is_strict, status in ((False, 200), (True, 400)):
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": is_strict}}
        response = real.post(CHAT, json={"messages": HI, "max_tokens": 4, "response_format": wanted})
        assert response.status_code == status, response.text


STRUCTURED: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"guided_choice": ["yes", "no"]},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}, "temperature": 0},
]


@pytest.mark.parametrize(("asked", "stream"), in_turn(STRUCTURED, [False, True]))
def test_likeliest_tokens_under_a_grammar(real: httpx.Client, asked: dict[str, Any], stream: bool) -> None:
    body = {"messages": HI, "max_tokens": 40, "logprobs": True, "top_logprobs": 20, "thinking_budget": 1, "seed": 4}
    response = real.post(CHAT, json=body | asked | {"stream": stream})
    assert response.status_code == 200, response.text
    given = events_of(response.text) if stream else [strict(response.text)]
    assert all("error" not in event for event in given), given
    tokens = [
        token
        for event in given
        for choice in event["choices"]
        for token in ((choice["logprobs"] or {}).get("content") or ())
    ]
    assert len(tokens) > 1
    # Where only few tokens may come, only those are told; together they are all that can come.
    held = [token for token in tokens if len(token["top_logprobs"]) < 20]
    assert held, "the grammar forbids something"
    for token in held:
        shares = [math.exp(top["logprob"]) for top in token["top_logprobs"]]
        assert sum(shares) == pytest.approx(1, abs=1e-3)
        assert token["token_id"] in [top["token_id"] for top in token["top_logprobs"]]


# Numbers in requests.

NUMBERS = st.one_of(
    st.sampled_from(
        [0.0, -0.0, 5e-324, 1e-310, 1e-45, 1e-38, 1e-31, 1.0, math.nextafter(1, 0), 2.0, 100.0, 1e300, -1.0]
    ),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.floats(0, 2),
)
COUNTS = st.sampled_from([-1, 0, 1, 2, 511, 512, 1000, 10**6, 2**63, 10**400])
SHARED = {"temperature": NUMBERS, "top_p": NUMBERS}
OPENAI = SHARED | {
    "top_k": COUNTS,
    "min_p": NUMBERS,
    "min_tokens_to_keep": COUNTS,
    "xtc_probability": NUMBERS,
    "xtc_threshold": NUMBERS,
    "repetition_penalty": NUMBERS,
    "repetition_context_size": COUNTS,
    "presence_penalty": NUMBERS,
    "presence_context_size": COUNTS,
    "frequency_penalty": NUMBERS,
    "frequency_context_size": COUNTS,
    "logit_bias": st.dictionaries(st.sampled_from(["0", "5", "511", "512"]), NUMBERS, max_size=2),
    "seed": COUNTS,
}


def some_of(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """A few fields: with all of them nearly every body would be refused for one."""
    names = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))


ASKED = st.one_of(
    st.tuples(
        st.just(CHAT),
        st.just({"messages": HI, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}),
        some_of(OPENAI),
    ),
    st.tuples(
        st.just(COMPLETIONS),
        st.just({"prompt": "hi", "max_tokens": 2, "logprobs": 2}),
        some_of(OPENAI),
    ),
    st.tuples(
        st.just(MESSAGES),
        st.just({"messages": HI, "max_tokens": 2}),
        some_of(SHARED | {"top_k": COUNTS}),
    ),
    st.tuples(
        st.just(RESPONSES),
        st.just({"input": "hi", "max_output_tokens": 2}),
        some_of(SHARED),
    ),
)


@settings(max_examples=examples(150))
@given(ASKED, st.booleans())
def test_no_number_makes_the_server_fail(
    real: httpx.Client, asked: tuple[str, dict[str, Any], dict[str, Any]], stream: bool
) -> None:
    address, body, numbers = asked
    content = json.dumps(body | {"stream": stream} | numbers)
    response = real.post(address, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400), response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        assert all("error" not in event for event in events_of(response.text)), response.text
    else:
        told = strict(response.text)
        assert response.status_code == 200 or told["error"]["message"].endswith(".")


@pytest.mark.parametrize(
    "number", [b"NaN", b"-Infinity", b"1e999", b"1E+0999", b"9" * 309 + b".0", b"9" * 250 + b"e99"]
)
@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_a_number_that_is_none_is_refused_wherever_it_stands(number: bytes, stream: bytes) -> None:
    content = b'{"input": "hi", "stream": %s, "metadata": {"number": %s}}' % (stream, number)
    async with api() as a:
        response = await a.client.post(RESPONSES, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert "NaN" in strict(response.text)["error"]["message"]
        text = await a.client.post(RESPONSES, json={"input": "NaN, Infinity and 1e999", "metadata": {"number": 1e300}})
        assert text.status_code == 200


# Our own mistakes.

BROKEN = [
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2}),
    (COMPLETIONS, {"prompt": "hi", "logprobs": 2}),
]


@pytest.mark.parametrize(("address", "body"), BROKEN)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
async def test_a_number_that_json_lacks_is_an_error_that_is_logged(
    address: str, body: dict[str, Any], value: float, caplog: pytest.LogCaptureFixture
) -> None:
    async with api() as a:
        a.backend.logprob = value
        with caplog.at_level(logging.ERROR):
            whole = await a.client.post(address, json=body)
            streamed = await a.client.post(address, json=body | {"stream": True})
    assert whole.status_code == 500
    assert strict(whole.text)["error"]["code"] == "not_json_value"
    assert events_of(streamed.text)[-1]["error"]["code"] == "not_json_value"
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


async def test_what_a_route_returns_is_strict_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reprise.api.native.server_routes.record_body", lambda record, verdicts: {"ttft_s": math.nan})
    async with api() as a:
        await a.client.post(CHAT, json={"messages": HI})
        await a.until_idle()
        response = await a.client.get("/v1/cache/requests")
    # FastAPI makes null of such a number on its own way to the encoder.
    assert strict(response.text)["data"] == [{"ttft_s": None}]
