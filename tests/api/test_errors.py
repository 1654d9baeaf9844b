"""Wrong input gets OpenAI's error shape and a sentence; the next request is served as if nothing had happened."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from reprise.core.errors import OutOfMemory, QueueFull, RepriseError, ShuttingDown
from reprise.core.job import Purpose
from reprise.core.settings import Settings
from tests.api.servers import MODEL, api

pytestmark = pytest.mark.anyio

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


WRONG: list[tuple[dict[str, Any], int, str | None]] = [
    ({}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"content": "Hi"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}, 400, "messages[0].content[0].type"),
    ({"messages": HI, "model": "gpt-4"}, 404, None),
    ({"messages": HI, "model": 5}, 400, "model"),
    ({"messages": HI, "stop": [5]}, 400, "stop[0]"),
    ({"messages": HI, "stop": ""}, 400, "stop"),
    ({"messages": HI, "top_k": 10_000_000}, 400, "top_k"),
    ({"messages": HI, "top_p": -0.1}, 400, "top_p"),
    ({"messages": HI, "temperature": -1}, 400, "temperature"),
    ({"messages": HI, "temperature": "hot"}, 400, "temperature"),
    ({"messages": HI, "logit_bias": {"10000000": 1}}, 400, "logit_bias"),
    ({"messages": HI, "logit_bias": {"-1": 1}}, 400, "logit_bias"),
    ({"messages": HI, "logit_bias": {"5": 1000}}, 400, "logit_bias.5"),
    ({"messages": HI, "logit_bias": [5]}, 400, "logit_bias"),
    ({"messages": HI, "max_tokens": 0}, 400, "max_tokens"),
    ({"messages": HI, "n": 0}, 400, "n"),
    ({"messages": HI, "n": 1000}, 400, "n"),
    ({"messages": HI, "seed": 2**70}, 400, "seed"),
    ({"messages": HI, "top_logprobs": 2}, 400, "top_logprobs"),
    ({"messages": HI, "tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
    ({"messages": HI, "tool_choice": "required"}, 400, "tool_choice"),
    ({"messages": HI, "functions": [{}]}, 400, "functions"),
    ({"messages": HI, "response_format": {"type": "xml"}}, 400, "response_format.type"),
    ({"messages": HI, "continue_final_message": True}, 400, "messages"),
    ({"messages": HI, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": "long " * 5000}]}, 400, "messages"),
    ({"messages": HI, "metadata": deep(500)}, 400, None),
]


@pytest.mark.parametrize(("body", "status", "param"), WRONG, ids=lambda value: json.dumps(value)[:60])
async def test_wrong_bodies_are_refused_by_name(body: dict[str, Any], status: int, param: str | None):
    async with api(settings=Settings(model=MODEL, max_queue=4)) as a:
        for stream in (False, True):
            response = await a.client.post(URL, json=body | {"stream": stream})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (status, param), error
            assert error["message"].endswith((".", "?"))
        assert a.backend.jobs == []
        assert (await a.client.post(URL, json={"messages": HI})).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"messages": [' + b"[" * 100_000,
        b'{"messages": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
        b'{"messages": [{"role": "user", "content": "hi"}], "seed": ' + b"9" * 10_000 + b"}",
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": ' + b"9" * 400 + b"}",
    ],
    ids=lambda content: repr(content[:60]),
)
async def test_bodies_that_are_no_request(content: bytes):
    async with api() as a:
        response = await a.client.post(URL, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert (await a.client.post(URL, json={"messages": HI})).status_code == 200


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (rb"\ud83d", "\ufffd"),
        (rb"a \uDE00b", "a \ufffdb"),
        (rb"\ud83d\ude00 \ud83d", "\U0001f600 \ufffd"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\\ud83d \ud83d", "\\ud83d \ufffd"),
    ],
)
async def test_half_a_character_is_replaced(sent: bytes, read: str):
    """JavaScript cuts text between the halves, and what was said so stays in every later request of the chat."""
    async with api() as a:
        content = b'{"messages": [{"role": "user", "content": "%s"}]}' % sent
        response = await a.client.post(URL, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 200, response.text
        assert f"user\n{read}<" in a.service.served.text.decode(a.backend.of(Purpose.GENERATE)[0].prompt.tokens)


@pytest.mark.parametrize("fields", [{"top_p": 0}, {"functions": []}, {"function_call": "none"}, {"functions": None}])
async def test_what_asks_for_nothing_is_not_refused(fields: dict[str, Any]):
    async with api() as a:
        response = await a.client.post(URL, json={"messages": HI, **fields})
        assert response.status_code == 200, response.text
        assert a.backend.of(Purpose.GENERATE)[0].sampling.top_p in (1e-6, 1.0)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/api/version"])
async def test_a_head_is_what_a_get_would_have(path: str):
    async with api() as a:
        head, whole = await a.client.head(path), await a.client.get(path)
        assert (head.status_code, head.headers["content-type"]) == (200, whole.headers["content-type"])
        assert (await a.client.head("/v1/chat/completions")).status_code == 405


@pytest.mark.parametrize("content", [b"", b"[]", b'"hi"', b"null", b"5"])
async def test_a_body_that_is_no_object_is_told_so(content: bytes):
    async with api() as a:
        for url in (URL, "/v1/messages", "/v1/responses", "/v1/completions"):
            response = await a.client.post(url, content=content, headers={"Content-Type": "application/json"})
            assert response.status_code == 400
            assert response.json()["error"]["message"] == "The body must be a JSON object."


async def test_control_characters_are_text():
    async with api() as a:
        response = await a.client.post(URL, json={"messages": [{"role": "user", "content": "a\u0000b\u0007\u202e"}]})
    assert response.status_code == 200


async def test_a_body_that_is_too_long():
    async with api(settings=Settings(model=MODEL, max_body_bytes=1000)) as a:
        response = await a.client.post(URL, json={"messages": [{"role": "user", "content": "x" * 5000}]})
        assert response.status_code == 413
        assert "1000 bytes" in response.json()["error"]["message"]
        assert (await a.client.post(URL, json={"messages": HI})).status_code == 200


async def test_unknown_addresses_and_methods():
    async with api() as a:
        nowhere, wrong = await a.client.get("/v1/nothing"), await a.client.get(URL)
    assert (nowhere.status_code, wrong.status_code) == (404, 405)
    assert wrong.headers["allow"] == "POST"
    assert nowhere.json()["error"]["code"] == "http_404"


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (QueueFull("Too many requests wait.", retry_after_s=7), 429, "7"),
        (ShuttingDown("The server is shutting down."), 503, "5"),
        (OutOfMemory("There is no memory left for this prompt."), 507, None),
    ],
    ids=str,
)
async def test_what_the_engine_refuses(error: RepriseError, status: int, retry: str | None):
    async with api() as a:
        a.backend.refuse = error
        for stream in (False, True):
            response = await a.client.post(URL, json={"messages": HI, "stream": stream})
            assert response.status_code == status
            assert response.headers.get("retry-after") == retry
            assert response.json()["error"]["message"] == str(error)


async def test_an_engine_error_ends_this_request_only():
    async with api() as a:
        a.backend.fail_after = 2
        whole = await a.client.post(URL, json={"messages": HI})
        streamed = await a.client.post(URL, json={"messages": HI, "stream": True})
        a.backend.fail_after = None
        assert (await a.client.post(URL, json={"messages": HI})).status_code == 200
    assert whole.status_code == 500
    assert whole.json()["error"]["code"] == "engine_failed"
    last = [line for line in streamed.text.split("\n\n") if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"


async def test_an_error_of_our_own_is_answered_and_logged(caplog: pytest.LogCaptureFixture):
    async with api() as a:
        a.backend.refuse = ZeroDivisionError("ours")  # type: ignore[assignment]
        response = await a.client.post(URL, json={"messages": HI})
        a.backend.refuse = None
        assert (await a.client.post(URL, json={"messages": HI})).status_code == 200
    assert response.status_code == 500
    assert "ours" not in response.text
    assert "ours" in caplog.text


async def test_a_template_that_raises():
    chat = [*HI, {"role": "assistant", "content": "Hello."}, *HI]
    async with api(template="single_turn") as a:
        response = await a.client.post(URL, json={"messages": chat})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "template_failed"


async def test_addresses_without_the_version_or_with_it_twice():
    async with api() as a:
        for prefix in ("", "/v1", "/v1/v1"):
            response = await a.client.post(f"{prefix}/chat/completions", json={"messages": HI})
            assert response.status_code == 200, prefix
            assert (await a.client.get(f"{prefix}/models/{MODEL}")).json()["id"] == MODEL
        wrong = await a.client.post("/messages", json={})
        assert (await a.client.get("/health")).json()["status"] == "ok"
        assert (await a.client.get("/v1/health")).status_code == 404
    # In the shape of its API.
    assert wrong.json()["type"] == "error"


async def test_models_in_the_shape_of_who_asks():
    async with api(headers={"anthropic-version": "2023-06-01"}) as a:
        listed = (await a.client.get("/v1/models")).json()
        one = (await a.client.get("/v1/models/tiny-chat")).json()
    assert listed == {"data": [one], "has_more": False, "first_id": MODEL, "last_id": MODEL}
    assert (one["type"], one["id"], one["max_input_tokens"]) == ("model", MODEL, 4096)
    assert one["created_at"] == "2023-11-14T22:13:20Z"


async def test_errors_about_models_in_the_shape_of_who_asks():
    settings = Settings(model=MODEL, api_keys=("one",))
    anthropic = {"anthropic-version": "2023-06-01"}
    async with api(settings=settings) as a:
        for headers in ({}, anthropic):
            missing = await a.client.get("/v1/models/other", headers={"x-api-key": "one", **headers})
            unknown = await a.client.get("/v1/models", headers=headers)
            assert [missing.status_code, unknown.status_code] == [404, 401]
            for response, kind in ((missing, "not_found_error"), (unknown, "authentication_error")):
                told = response.json()
                assert told["error"]["type"] == kind
                assert ("type" in told) == (headers == anthropic)


async def test_names_of_the_model():
    async with api() as a:
        for name in (MODEL, "tiny-chat", None):
            assert (await a.client.post(URL, json={"messages": HI, "model": name})).status_code == 200
        listed = (await a.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == [MODEL]
        assert (await a.client.get(f"/v1/models/{MODEL}")).json() == listed[0]
        assert (await a.client.get("/v1/models/other")).status_code == 404
    async with api(settings=Settings(model=MODEL, accepts_any_model=True)) as a:
        answer = (await a.client.post(URL, json={"messages": HI, "model": "gpt-4"})).json()
    assert answer["model"] == MODEL


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/cache/tree"),
        ("GET", "/v1/cache/requests"),
        ("GET", "/v1/cache/pin"),
        ("GET", "/health"),
        ("DELETE", "/v1/cache"),
    ],
)
async def test_an_unknown_name_in_the_address_is_refused(method: str, path: str):
    async with api() as a:
        refused = await a.client.request(method, path, params={"model": "other"})
        assert (await a.client.request(method, path, params={"model": MODEL})).status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("served", ["adapters/legal", None])
async def test_names_of_the_adapter(served: str | None):
    """As mlx-lm's server takes it, in both of its APIs. `--any-model` is about the model's name alone."""
    async with api(settings=Settings(model=MODEL, adapter_path=served, accepts_any_model=True)) as a:
        for url, body in ((URL, {"messages": HI}), ("/v1/completions", {"prompt": "Hi", "max_tokens": 2})):
            for name in ("adapters/legal", "legal", None):
                status = 200 if name is None or served is not None else 404
                assert (await a.client.post(url, json={**body, "adapters": name})).status_code == status
            refused = await a.client.post(url, json={**body, "adapters": "other"})
            assert refused.status_code == 404
            assert "'other' is not served here" in refused.json()["error"]["message"]


async def test_keys_share_what_is_computed_and_nothing_else():
    async with api(settings=Settings(model=MODEL, api_keys=("one", "two"))) as a:
        one, two = {"x-api-key": "one"}, {"x-api-key": "two"}
        first = (await a.client.post("/v1/responses", json={"input": "hi"}, headers=one)).json()
        second = (await a.client.post("/v1/responses", json={"input": "hi"}, headers=two)).json()
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
        await a.until_idle()
        for address in (f"/v1/responses/{first['id']}", f"/v1/cache/requests/{first['id']}"):
            assert (await a.client.get(address, headers=two)).status_code == 404
            assert (await a.client.get(address, headers=one)).status_code == 200
        follows = {"input": "and?", "previous_response_id": first["id"]}
        assert (await a.client.post("/v1/responses", json=follows, headers=two)).status_code == 404
        for address in (f"/v1/responses/{first['id']}", f"/v1/requests/{first['id']}"):
            assert (await a.client.delete(address, headers=two)).status_code == 404
        listed = (await a.client.get("/v1/cache/requests", headers=two)).json()["data"]
        assert second["id"] in [record["id"] for record in listed]
        assert first["id"] not in [record["id"] for record in listed]


async def test_keys():
    settings = Settings(model=MODEL, api_keys=("one", "two"), separates_keys=True)
    async with api(settings=settings) as a:
        for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "one"}, {"x-api-key": ""}):
            refused = await a.client.post(URL, json={"messages": HI}, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        first = await a.client.post(URL, json={"messages": HI}, headers={"Authorization": "Bearer one"})
        second = await a.client.post(URL, json={"messages": HI}, headers={"x-api-key": "two"})
        again = await a.client.post(URL, json={"messages": HI}, headers={"Authorization": "Bearer two"})
        cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second, again)]
        assert cached[:2] == [0, 0]
        assert cached[2] > 0
        # What is remembered of chats, for their tokens and for explanations, is not shared either.
        assert a.service.renderers.of(a.backend.jobs[0].namespace) is not a.service.renderers.of("")
        mine = await a.client.get(f"/v1/cache/requests/{first.json()['id']}", headers={"x-api-key": "two"})
        assert mine.status_code == 404
        assert (await a.client.get("/health")).status_code == 200


async def test_cors_is_off_unless_asked_for():
    origin = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    async with api() as a:
        assert "access-control-allow-origin" not in (await a.client.options(URL, headers=origin)).headers
    async with api(settings=Settings(model=MODEL, cors_origins=("https://app.example",))) as a:
        allowed = await a.client.options(URL, headers=origin)
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"


async def test_cors_for_all_origins():
    async with api(settings=Settings(model=MODEL, cors_origins=("*",), api_keys=("one",))) as a:
        for origin in ("https://app.example", "http://localhost:3000", "null"):
            asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            wants = {"Access-Control-Request-Headers": "authorization,x-api-key,anthropic-version,content-type"}
            before = await a.client.options(URL, headers=asks | wants)
            assert before.status_code == 200
            assert "x-api-key" in before.headers["access-control-allow-headers"]
            for key, status in (("one", 200), ("two", 401)):
                got = await a.client.post(
                    URL, json={"messages": HI}, headers={"Origin": origin, "Authorization": f"Bearer {key}"}
                )
                # A page sees what was wrong, too.
                assert (got.status_code, got.headers["access-control-allow-origin"]) == (status, "*")
                assert "access-control-allow-credentials" not in got.headers


@pytest.mark.parametrize(
    ("path", "named"), [(URL, "param"), ("/v1/messages", "type"), ("/v1/responses", "param"), ("/api/chat", None)]
)
async def test_a_validation_error_inside_a_handler_is_the_requests_fault(
    path: str, named: str | None, monkeypatch: pytest.MonkeyPatch
):
    async def validate(make: object) -> None:
        TypeAdapter(dict[str, int]).validate_python({"seed": "planted"}, strict=True)

    async with api() as a:
        monkeypatch.setattr(a.service, "off_loop", validate)
        refused = await a.client.post(path, json={"messages": HI, "input": "Hi", "max_tokens": 4, "stream": False})
    error = refused.json()["error"]
    assert (refused.status_code, error["message"] if named else error) == (
        400,
        "`seed`: Input should be a valid integer.",
    )
    assert named is None or named in error


async def test_a_model_that_is_not_there_is_not_called_always_loaded() -> None:
    async with api() as a:
        wrong = await a.client.post("/v1/models/nobody/unload")
        assert (wrong.status_code, "'nobody' is not served here" in wrong.text) == (404, True)
        only = await a.client.post(f"/v1/models/{MODEL}/unload")
        assert (only.status_code, "always loaded" in only.text) == (400, True)
