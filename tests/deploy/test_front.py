"""What clients see of replicas that answer, fail and are lost."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from reprise.cluster.replicas.forwarded import AsgiCall, CutOff, ForwardedRequest
from reprise.cluster.replicas.front import front_app
from reprise.core.settings import Settings

CHAT = "/v1/chat/completions"
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


def start(status: int = 200, headers: Sequence[tuple[bytes, bytes]] = STREAM) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(text: str, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": not is_last}


LOST = RuntimeError("the actor died")
Step = Message | Exception


class Replicas:
    """Each answers one request with its steps; an exception is its end."""

    def __init__(self, *answers: Sequence[Step]) -> None:
        self._answers = list(answers)
        self.seen: list[ForwardedRequest] = []

    async def respond(self, request: ForwardedRequest) -> AsyncGenerator[list[Message]]:
        self.seen.append(request)
        for step in self._answers.pop(0):
            if isinstance(step, Exception):
                raise step
            yield [step]

    async def respond_all(self, request: ForwardedRequest) -> list[list[Message]]:
        num = len(self._answers)
        return [[message async for batch in self.respond(request) for message in batch] for _ in range(num)]

    def ask(
        self, path: str = CHAT, *, method: str = "POST", settings: Settings | None = None, **options: Any
    ) -> httpx.Response:
        settings = Settings(model="m") if settings is None else settings
        app = front_app(settings, respond=self.respond, respond_all=self.respond_all)

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())


WHOLE = [start(), body("data: a\n\n"), body("", is_last=True)]


def test_a_response_passes_as_it_is() -> None:
    replicas = Replicas([start(201, [(b"x-some", b"thing")]), body("one "), body("two", is_last=True)])
    response = replicas.ask(json={"x": 1}, headers={"X-Other": "y"}, params={"q": "z"})
    assert (response.status_code, response.text, response.headers["x-some"]) == (201, "one two", "thing")
    (seen,) = replicas.seen
    assert (seen.method, seen.path, seen.query, json.loads(seen.body)) == ("POST", CHAT, b"q=z", {"x": 1})
    assert seen.header("x-other") == "y" and seen.header("x-none") is None


@pytest.mark.parametrize(
    "lost",
    [[LOST], [start(), LOST], [start(), body(": wait\n\n"), LOST], [start()], [start(), body(": wait\n\n")], []],
    ids=["at once", "after the start", "after a comment", "without an end", "ends after a comment", "says nothing"],
)
def test_a_request_goes_to_another_replica_while_nothing_was_answered(lost: list[Step]) -> None:
    replicas = Replicas(lost, WHOLE)
    response = replicas.ask()
    assert response.status_code == 200 and response.text.endswith("data: a\n\n") and "replica_lost" not in response.text
    assert len(replicas.seen) == 2


def test_when_all_are_lost_it_is_a_503() -> None:
    replicas = Replicas([LOST], [start(), LOST], [LOST], WHOLE)
    response = replicas.ask()
    assert response.status_code == 503 and response.json()["error"]["code"] == "replica_lost"
    assert response.headers["retry-after"] == "1" and len(replicas.seen) == 3


def test_a_replica_that_is_lost_after_its_answer_takes_nothing_from_it() -> None:
    replicas = Replicas([*WHOLE, LOST], WHOLE)
    assert replicas.ask().text == "data: a\n\n" and len(replicas.seen) == 1


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_a_stream_that_has_begun_ends_with_an_error_of_its_api(path: str) -> None:
    replicas = Replicas([start(), body("data: a\n\n"), LOST], WHOLE)
    response = replicas.ask(path)
    assert response.text.startswith("data: a\n\n") and len(replicas.seen) == 1
    event = response.text.removeprefix("data: a\n\n")
    if path == CHAT:
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == "replica_lost"
    else:
        assert event.startswith("event: error\ndata: ") and '"type":"error"' in event.replace(" ", "")


def test_lines_of_json_end_with_one_that_is_the_error() -> None:
    lines = start(headers=[(b"content-type", b"application/x-ndjson")])
    response = Replicas([lines, body('{"a": 1}\n'), LOST]).ask("/api/chat")
    assert [set(json.loads(line)) for line in response.text.splitlines()] == [{"a"}, {"error"}]


def test_another_response_that_was_begun_stays_without_its_end() -> None:
    replicas = Replicas([start(headers=[(b"content-type", b"application/json")]), body('{"a": '), LOST], WHOLE)
    app = front_app(Settings(model="m"), respond=replicas.respond, respond_all=replicas.respond_all)

    async def all_of(call: AsgiCall) -> list[Message]:
        return [message async for batch in call.messages() for message in batch]

    _, text = run_call(app, all_of)
    assert text["body"] == b'{"a": ' and text["more_body"] and len(replicas.seen) == 1


def test_a_stream_does_not_go_on_with_what_is_none() -> None:
    refused = [start(400, [(b"content-type", b"application/json")]), body("{}", is_last=True)]
    response = Replicas([start(), body(": wait\n\n"), LOST], refused).ask()
    assert response.text.startswith(": wait\n\n") and "replica_lost" in response.text and "{}" not in response.text


def test_all_replicas_clear_their_caches() -> None:
    answer = [start(200, []), body("cleared", is_last=True)]
    replicas = Replicas(answer, answer)
    assert replicas.ask("/v1/cache", method="DELETE").text == "cleared" and len(replicas.seen) == 2


_CLEARED = [start(200, []), body("cleared", is_last=True)]
_REFUSED = [start(503, []), body("the model is loading", is_last=True)]


@pytest.mark.parametrize(
    ("answers", "status", "text"),
    [
        ([_CLEARED, _REFUSED, _CLEARED], 503, "the model is loading"),
        ([_REFUSED, _CLEARED], 503, "the model is loading"),
        ([_CLEARED, [start(401, []), body("no", is_last=True)], _REFUSED], 503, "the model is loading"),
        ([_CLEARED, [start(200, [])]], 503, "A replica was lost"),
        ([_CLEARED, []], 503, "A replica was lost"),
        ([_CLEARED, [LOST]], 503, "A replica was lost"),
        ([], 503, "No replica is running"),
    ],
)
def test_what_one_replica_has_not_cleared_is_not_cleared(answers: list[list[Step]], status: int, text: str) -> None:
    response = Replicas(*answers).ask("/v1/cache", method="DELETE")
    assert response.status_code == status and text in response.text


def test_keys_and_lengths_are_checked_in_front() -> None:
    settings = Settings(model="m", api_keys=("right",), max_body_bytes=100)
    replicas = Replicas([start(200, []), body("fine", is_last=True)])

    def ask(key: str, text: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return replicas.ask(settings=settings, content=text, headers=headers).status_code

    assert ask("wrong", "x") == 401 and ask("right", "x" * 101) == 413 and not replicas.seen
    assert ask("right", "x") == 200 and replicas.seen[0].header("authorization") == "Bearer right"


@pytest.mark.parametrize(
    ("root", "path", "expected"),
    [("", "/health", "/health"), ("/llm", "/llm/health", "/health"), ("/llm", "/llm", "/"), ("/llm", "/llms", "/llms")],
)
def test_the_prefix_of_an_application_is_taken_off(root: str, path: str, expected: str) -> None:
    scope = {"type": "http", "method": "GET", "path": path, "root_path": root, "headers": [], "client": None}
    assert ForwardedRequest.of(scope, b"").path == expected


def request() -> ForwardedRequest:
    return ForwardedRequest(method="POST", path="/", query=b"", headers=(), body=b"hello")


def run_call(app: Callable[[Scope, Receive, Send], Any], use: Callable[[AsgiCall], Any]) -> Any:
    async def run() -> Any:
        return await asyncio.wait_for(use(AsgiCall(app, request())), 20)

    return asyncio.run(run())


def test_whoever_leaves_early_is_a_client_that_has_gone() -> None:
    said: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        said.append((await receive())["body"].decode())
        await send(start())
        said.append((await receive())["type"])
        with pytest.raises(OSError, match="gone"):
            await send(body("late"))

    async def leave(call: AsgiCall) -> None:
        messages = call.messages()
        assert [message["type"] for message in await anext(messages)] == ["http.response.start"]
        await messages.aclose()

    run_call(app, leave)
    assert said == ["hello", "http.disconnect"]


def test_a_call_that_is_cut_off_ends_with_that() -> None:
    ended: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def cut(call: AsgiCall) -> None:
        messages = call.messages()
        await anext(messages)
        call.cut_off()
        with pytest.raises(CutOff):
            await anext(messages)

    run_call(app, cut)
    assert ended == [True]
