"""What a body costs is known before it is parsed: counts, nesting, the first error, and all bodies together."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from reprise.api.app import create_app
from reprise.api.http.errors import ErrorFormats
from reprise.api.http.limits import Limits
from reprise.api.openai.chat_body import ChatBody
from reprise.api.openai.completions_body import CompletionsBody
from reprise.api.wire import body_reading
from reprise.api.wire.body_reading import BodyLimits, BodyRoute, max_body_nbytes, parse_body
from reprise.core import json_shape
from reprise.core.errors import BadRequest
from reprise.core.settings import Settings
from tests.api.fake_backend import FakeBackend
from tests.api.servers import HELLO, MODEL, api, make_service

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},:é/\n', max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='b"\\,{', max_size=4), inner),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Containers, commas and depth, by walking."""
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = [counted(item) for item in (value.values() if isinstance(value, dict) else value)]
    return (
        1 + sum(each[0] for each in inner),
        max(0, len(value) - 1) + sum(each[1] for each in inner),
        1 + max((each[2] for each in inner), default=0),
    )


@given(JSON, st.booleans(), st.sampled_from([1, 2, 3, 7, 64, 1 << 18]))
def test_the_shape_of_json_is_exact(value: Any, is_ascii: bool, block: int):
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_shape, "BLOCK_NBYTES", block)
        shape = json_shape.json_shape(text)
    assert (shape.num_containers, shape.num_commas, shape.depth) == counted(value)


def parsed(raw: bytes, model: type[BaseModel], **limits: int) -> BaseModel:
    return parse_body(raw, TypeAdapter(model), limits=Limits(**limits), context=4096)


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionsBody, {"prompt": [{}] * 5000}),
        (CompletionsBody, {"prompt": [[{}] * 5000]}),
        (ChatBody, {"messages": [{}] * 5000}),
        (ChatBody, {"messages": HI, "stop": [5] * 5000}),
        (ChatBody, {"messages": HI, "tools": [5] * 5000}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_validation_ends_at_the_first_wrong_item(model: type[BaseModel], body: dict[str, Any]):
    with pytest.raises(RequestValidationError) as caught:
        parsed(json.dumps(body).encode(), model)
    assert len(caught.value.errors()) < 10


@pytest.mark.parametrize(
    ("limits", "body", "sentence"),
    [
        ({"max_containers": 100}, {"messages": HI, "metadata": [[] for _ in range(100)]}, "lists and objects"),
        ({"max_commas": 100}, {"messages": HI, "metadata": [1] * 8400}, "values"),
        ({"max_depth": 5}, {"messages": HI, "metadata": [[[[[1]]]]]}, "levels deep"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_counts_are_checked_before_anything_is_parsed(
    limits: dict[str, int], body: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
):
    def unexpected(raw: bytes) -> Any:
        raise AssertionError("parsed")

    monkeypatch.setattr(body_reading, "from_json", unexpected)
    with pytest.raises(BadRequest, match=sentence):
        parsed(json.dumps(body).encode(), ChatBody, **limits)


@pytest.mark.anyio
@pytest.mark.parametrize("num_quotes", [0, 1])
@pytest.mark.parametrize("num_calls", [1, 20])
async def test_values_in_the_texts_of_tool_arguments_are_counted(num_quotes: int, num_calls: int):
    def body(num: int) -> dict[str, Any]:
        """Calls whose arguments have `num` lists together."""
        text = json.dumps({"of": [[] for _ in range(num // num_calls)]})
        for _ in range(num_quotes):
            text = json.dumps(text)
        call = {"type": "function", "function": {"name": "look", "arguments": text}}
        calls = [{**call, "id": f"call{number}"} for number in range(num_calls)]
        told = [{"role": "tool", "tool_call_id": each["id"], "content": "x"} for each in calls]
        return {"messages": [*HI, {"role": "assistant", "tool_calls": calls}, *told], "max_tokens": 1}

    async with api() as a:
        assert (await a.client.post(CHAT, json=body(100))).status_code == 200
        refused = await a.client.post(CHAT, json=body(200_000))
    assert refused.status_code == 400
    assert "arguments of the tool calls" in refused.json()["error"]["message"]


@pytest.mark.anyio
async def test_prompts_are_counted_before_the_first_is_tokenized():
    async with api() as a:
        encode, asked = a.service.served.text.encode, []
        object.__setattr__(a.service.served.text, "encode", lambda text: asked.append(text) or encode(text))
        response = await a.client.post("/v1/completions", json={"prompt": ["word"] * 1025})
        assert response.status_code == 400
        assert asked == []


@pytest.mark.anyio
@pytest.mark.parametrize(("num_chars", "is_off_loop"), [(100, False), (60_000, True)])
async def test_a_large_body_is_parsed_on_another_thread(
    num_chars: int, is_off_loop: bool, monkeypatch: pytest.MonkeyPatch
):
    threads: list[threading.Thread] = []

    def noting(*arguments: Any, **named: Any) -> BaseModel:
        threads.append(threading.current_thread())
        return parse_body(*arguments, **named)

    monkeypatch.setattr(body_reading, "parse_body", noting)
    async with api() as a:
        body = {"messages": HI, "user": "x" * num_chars}
        assert (await a.client.post(CHAT, json=body)).status_code == 200
    assert [thread is not threading.main_thread() for thread in threads] == [is_off_loop]


def test_all_routes_with_a_body_parse_it_so():
    backend = FakeBackend(script=HELLO)
    settings = Settings(model=MODEL)
    app = create_app(make_service(backend, settings=settings), settings)
    backend.stop()
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.body_field is not None]
    assert len(routes) > 5
    assert [route.path for route in routes if not isinstance(route, BodyRoute)] == []


def test_the_default_limit_follows_from_the_context():
    asked = Settings(model=MODEL)
    assert max_body_nbytes(asked, 4096) < max_body_nbytes(asked, 131_072) < max_body_nbytes(asked, None)
    # Every token of a text that JSON escapes character by character.
    assert max_body_nbytes(asked, 131_072) > 131_072 * 24
    assert max_body_nbytes(Settings(model=MODEL, max_body_bytes=1000), 4096) == 1000


@pytest.mark.anyio
async def test_bodies_together_are_bounded_and_small_ones_come_through():
    may_go = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await may_go.wait()
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    limits = BodyLimits(slow, max_bytes=100_000, shapes=ErrorFormats())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(limits), base_url="http://localhost") as client:
        held = [asyncio.create_task(client.post("/", content=b"x" * 100_000)) for _ in range(4)]
        while limits.num_held < 400_000:
            await asyncio.sleep(0.001)
        refused = await client.post("/", content=b"x" * 100_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_busy")
        small = asyncio.create_task(client.post("/", content=b"x"))
        may_go.set()
        assert [(await each).status_code for each in (*held, small)] == [200] * 5
        assert limits.num_held == 0
        assert (await client.post("/", content=b"x" * 100_000)).status_code == 200
