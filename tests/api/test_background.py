"""Answers that outlive their connection: read on from any event, once, by the key that asked, within bounds."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, cast

import httpx
import pytest
from starlette.types import Message

from reprise.api.app import create_app
from reprise.api.service.models import ModelBackend, Models, ServedModel
from reprise.core.backend import Status, WeightsState
from reprise.core.job import Job
from reprise.core.settings import Settings
from tests.api.fake_backend import FakeBackend
from tests.api.real_server import real_server
from tests.api.servers import MODEL, RunningServer, make_service, running_server, says

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": ["Once", "Twice"], "max_tokens": 12},
    "/v1/messages": {**CHAT, "max_tokens": 50},
    "/v1/responses": {"input": "Hi"},
}
TEXT = "<think>\nHm.\n</think>\n\nHello there,\n\nyou."
HEADER = {"X-Reprise-Background": "true"}


class Steps:
    """A script whose tokens come one at a time, as many as were let through."""

    def __init__(self, text: str = TEXT) -> None:
        self._says = says(text)
        self._allowed = threading.Semaphore(0)

    def __call__(self, job: Job) -> Iterator[int]:
        for token in self._says(job):
            self._allowed.acquire()
            yield token

    def allow(self, num: int) -> None:
        self._allowed.release(num)


class EndHeld:
    """A script whose last tokens wait until they may come, or for a moment."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def __call__(self, job: Job) -> Iterator[int]:
        tokens = says(TEXT)(job)
        yield from tokens[:-3]
        self.may_end.wait(0.03)
        yield from tokens[-3:]


@contextmanager
def server_of(script: Callable[[Job], Any], **settings: Any) -> Iterator[tuple[RunningServer, httpx.Client]]:
    with (
        running_server(script, settings=Settings(model=MODEL, settles=False, **settings)) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        try:
            yield server, client
        finally:
            if isinstance(server.backend.script, Steps):
                server.backend.script.allow(1000)


def events_in(text: str) -> list[str]:
    """The events of a stream, without its comments."""
    return [block for block in text.split("\n\n") if block != "" and not block.startswith(":")]


def events_of(response: httpx.Response) -> Iterator[str]:
    """The events as they come."""
    rest = ""
    for text in response.iter_text():
        *whole, rest = (rest + text).split("\n\n")
        yield from (block for block in whole if not block.startswith(":"))


def id_of(event: str) -> int:
    return int(event.removeprefix("id: ").partition("\n")[0])


def read_on(client: httpx.Client, address: str, last: int, **headers: str) -> list[str]:
    response = client.get(address, headers={"Last-Event-ID": str(last), **headers})
    assert response.status_code == 200, response.text
    return events_in(response.text)


def same(text: str) -> str:
    """A stream without what is another's in every answer: ids and times."""
    text = re.sub(r"^id: \d+\n", "", text, flags=re.MULTILINE)
    text = text.replace("response.queued", "response.in_progress")
    text = re.sub(r'"background":(true|false)|"status":"(queued|in_progress)"|"sequence_number":\d+', "", text)
    return re.sub(r'((chatcmpl-|cmpl-|msg_|resp_|rs_)[0-9a-f]{32})|"(created|created_at|completed_at)":\d+', "", text)


@pytest.mark.parametrize("path", APIS)
def test_read_on_behind_every_event(path: str) -> None:
    """Also for an answer that is over: what follows, in the same bytes, and what a plain stream would have said."""
    body = {**APIS[path], "stream": True}
    with server_of(says(TEXT)) as (_, client):
        client.post(path, json=body)
        plain = client.post(path, json=body)
        response = client.post(path, json=body, headers=HEADER)
        events, address = events_in(response.text), response.headers["x-reprise-stream"]
        assert "x-reprise-stream" not in plain.headers
        assert address == f"/v1/requests/{response.headers['x-request-id']}/stream"
        assert [id_of(event) for event in events] == list(range(len(events))) and len(events) > 8
        # Of the two prompts of the completions request the answers come in any order.
        assert set(map(same, events)) == set(map(same, events_in(plain.text)))
        for last in range(-1, len(events)):
            assert read_on(client, address, last) == events[last + 1 :]
        beyond = client.get(address, headers={"Last-Event-ID": str(len(events))})
        assert beyond.status_code == 400 and f"the last one of this answer is {len(events) - 1}" in beyond.text


def test_the_number_of_an_event_is_read_as_it_is_written() -> None:
    with server_of(says(TEXT)) as (_, client):
        response = client.post("/v1/responses", json={**APIS["/v1/responses"], "stream": True}, headers=HEADER)
        address, answer = response.headers["x-reprise-stream"], f"/v1/responses/{response.headers['x-request-id']}"
        for number in ("1.0", "+1", "1_0", "01", "-0", "-2", "x", "", "9" * 400):
            by_header = {"headers": {"Last-Event-ID": number}}
            for refused in (
                client.get(address, **by_header),
                client.get(answer, params={"stream": True}, **by_header),
                client.get(answer, params={"stream": True, "starting_after": number}),
            ):
                assert refused.status_code == 400 and "number of an event" in refused.text, (number, refused.text)


@pytest.mark.parametrize("path", APIS)
def test_a_connection_that_breaks_after_any_event(path: str) -> None:
    """It breaks while the answer is being made; what was read before and after is the answer, each event once."""
    body = {**APIS[path], "stream": True}
    with server_of(says(TEXT)) as (server, client):
        last, is_over = 0, False
        while not is_over:
            script = server.backend.script = EndHeld()
            read: list[str] = []
            with client.stream("POST", path, json=body, headers=HEADER) as broken:
                for event in events_of(broken):
                    read.append(event)
                    if len(read) > last:
                        break
                else:
                    is_over = True
            script.may_end.set()
            address = broken.headers["x-reprise-stream"]
            rest = read_on(client, address, id_of(read[-1]))
            whole = read_on(client, address, -1)
            assert read + rest == whole and [id_of(event) for event in whole] == list(range(len(whole)))
            assert "[DONE]" in whole[-1] or "message_stop" in whole[-1] or "response.completed" in whole[-1]
            last += 3
        assert last > 10 and server.backend.cancelled == []


def test_without_the_header_an_answer_ends_with_its_connection() -> None:
    steps = Steps()
    with server_of(steps) as (server, client):
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as lost:
            assert next(lost.iter_lines())
        while not server.backend.cancelled:
            time.sleep(0.001)
        steps.allow(100)
        request_id = lost.headers["x-request-id"]
        assert client.get(f"/v1/requests/{request_id}/stream").status_code == 404


def test_several_read_at_once_while_it_is_made() -> None:
    steps = Steps()
    with server_of(steps) as (_, client):
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}, headers=HEADER) as lost:
            first = next(events_of(lost))
        address = lost.headers["x-reprise-stream"]
        read: list[list[str]] = [[], []]
        threads = [threading.Thread(target=lambda to=to: to.extend(read_on(client, address, -1))) for to in read]
        for thread in threads:
            thread.start()
        steps.allow(100)
        for thread in threads:
            thread.join()
        assert read[0] == read[1] == read_on(client, address, -1) and read[0][0] == first


def test_another_key_does_not_see_it() -> None:
    steps = Steps()
    with server_of(steps, api_keys=("one", "two")) as (server, client):
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"input": "Hi", "background": True}
        made = client.post("/v1/responses", json=body, headers=mine).json()
        named, absent = f"/v1/responses/{made['id']}", f"/v1/responses/resp_{'0' * 32}"
        stream, no_stream = (f"/v1/requests/{name.rpartition('/')[2]}/stream" for name in (named, absent))
        for method, path, missing in (
            ("GET", named, absent),
            ("GET", f"{named}?stream=true", f"{absent}?stream=true"),
            ("POST", f"{named}/cancel", f"{absent}/cancel"),
            ("DELETE", named, absent),
            ("GET", stream, no_stream),
            ("DELETE", stream.removesuffix("/stream"), no_stream.removesuffix("/stream")),
        ):
            refused = client.request(method, path, headers=other)
            as_unknown = client.request(method, missing, headers=other)
            assert refused.status_code == as_unknown.status_code == 404
            # Not even that it exists.
            assert refused.text.replace(made["id"], "") == as_unknown.text.replace(f"resp_{'0' * 32}", "")
        assert client.get(stream).status_code == 401
        assert not server.backend.cancelled
        steps.allow(100)
        assert "response.completed" in client.get(stream, headers=mine).text


def test_a_response_in_the_background_as_openai_has_it() -> None:
    steps = Steps()
    with server_of(steps) as (server, client):
        server.backend.may_prefill.clear()
        made = client.post("/v1/responses", json={"input": "Hi", "background": True}).json()
        assert made["status"] in ("queued", "in_progress") and (made["background"], made["output"]) == (True, [])
        address = f"/v1/responses/{made['id']}"
        server.backend.may_prefill.set()
        with client.stream("GET", address, params={"stream": True}) as stream:
            for event in events_of(stream):
                if "response.in_progress" in event:
                    break
        assert client.get(address).json()["status"] == "in_progress"
        steps.allow(100)
        events = events_in(client.get(address, params={"stream": True}).text)
        kinds = [event.split("\n")[1].removeprefix("event: response.") for event in events]
        assert kinds[:3] == ["created", "queued", "in_progress"] and kinds[-1] == "completed"
        assert all(f'"sequence_number":{number},' in event for number, event in enumerate(events))
        after = client.get(address, params={"stream": True, "starting_after": 4})
        assert events_in(after.text) == events[5:]
        over = client.get(address).json()
        assert over["status"] == "completed" and over["output"][-1]["content"][0]["text"].startswith("Hello there")
        assert client.post(f"{address}/cancel").json() == over
        follows = client.post("/v1/responses", json={"input": "And?", "previous_response_id": made["id"]})
        assert follows.status_code == 200
        assert client.post(f"/v1/responses/{follows.json()['id']}/cancel").status_code == 400
        assert client.delete(address).status_code == 200
        assert client.get(address).status_code == 404
        assert client.get(address, params={"stream": True}).status_code == 404


def test_a_cancelled_response_says_so_and_is_not_followed() -> None:
    steps = Steps()
    with server_of(steps) as (server, client):
        made = client.post("/v1/responses", json={"input": "Hi", "background": True}).json()
        address = f"/v1/responses/{made['id']}"
        steps.allow(12)
        cancelled = client.post(f"{address}/cancel").json()
        assert cancelled["status"] == "cancelled" == client.get(address).json()["status"]
        assert cancelled["error"] is None
        assert client.post(f"{address}/cancel").json() == cancelled
        last = events_in(client.get(address, params={"stream": True}).text)[-1]
        assert '"status":"cancelled"' in last
        assert len(server.backend.cancelled) == 1
        steps.allow(100)
        assert client.post("/v1/responses", json={"input": "?", "previous_response_id": made["id"]}).status_code == 404


def test_a_request_is_cancelled_and_forgotten_by_its_id() -> None:
    steps = Steps()
    with server_of(steps) as (server, client):
        with client.stream("POST", "/v1/messages", json={**APIS["/v1/messages"], "stream": True}, headers=HEADER) as r:
            next(events_of(r))
        address = r.headers["x-reprise-stream"]
        assert client.delete(address.removesuffix("/stream")).json()["cancelled"] is True
        while not server.service.is_idle:
            steps.allow(1)
        assert client.get(address).status_code == 404
        steps.allow(100)
        over = client.post("/v1/messages", json={**APIS["/v1/messages"], "stream": True}, headers=HEADER)
        named = over.headers["x-reprise-stream"].removesuffix("/stream")
        assert client.delete(named).json()["cancelled"] is False
        while not server.service.is_idle:
            time.sleep(0.001)
        assert client.delete(named).status_code == 404


def test_what_fails_in_the_background_says_so() -> None:
    with server_of(says(TEXT)) as (server, client):
        server.backend.fail_after = 2
        response = client.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=HEADER)
        events = read_on(client, response.headers["x-reprise-stream"], -1)
        assert events == events_in(response.text) and "The sampler failed" in events[-1]


@pytest.mark.parametrize("path", APIS)
def test_the_header_is_for_streams(path: str) -> None:
    with server_of(says(TEXT)) as (server, client):
        refused = client.post(path, json=APIS[path], headers=HEADER)
        assert refused.status_code == 400 and "stream" in refused.text
        unclear = client.post(path, json={**APIS[path], "stream": True}, headers={"X-Reprise-Background": "perhaps"})
        assert unclear.status_code == 400
        lines = client.post("/api/chat", json=CHAT, headers=HEADER)
        assert lines.status_code == 400 and "/v1/chat/completions" in lines.json()["error"]
        assert server.backend.jobs == []


def test_an_answer_that_nobody_reads_ends_in_time() -> None:
    steps = Steps()
    with server_of(steps, background_s=0.2) as (server, client):
        begun_s = time.monotonic()
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}, headers=HEADER) as read:
            address = read.headers["x-reprise-stream"]
            coming = events_of(read)
            # Who is still there has as long as it takes.
            while time.monotonic() - begun_s < 0.5:
                steps.allow(1)
                assert not server.backend.cancelled
                time.sleep(0.05)
            assert next(coming)
        while not server.backend.cancelled:
            time.sleep(0.005)
        assert client.get(address).status_code == 404
        steps.allow(100)
        over = client.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=HEADER)
        assert read_on(client, over.headers["x-reprise-stream"], -1)
        while client.get(over.headers["x-reprise-stream"]).status_code != 404:
            # Asking is reading: between two questions it has its time.
            time.sleep(0.25)
            assert time.monotonic() - begun_s < 30


def test_answers_in_the_background_have_a_bound_of_bytes() -> None:
    """Those that are over go first, the oldest of them; then the largest that runs. Readers are told."""
    long = " ".join(f"word{number}" for number in range(50))
    body = {**CHAT, "stream": True}
    with server_of(says(long), background_nbytes=200_000) as (server, client):
        addresses: list[str] = []
        for _ in range(6):
            made = client.post("/v1/chat/completions", json=body, headers=HEADER)
            assert made.text.endswith("data: [DONE]\n\n")
            addresses.append(made.headers["x-reprise-stream"])
        kept = [client.get(address).status_code == 200 for address in addresses]
        assert kept[-1] and not kept[0] and kept == sorted(kept)
        server.backend.script = says(long * 20)
        large = client.post("/v1/chat/completions", json=body, headers=HEADER)
        assert "--background-bytes" in events_in(large.text)[-1]
        assert client.get(large.headers["x-reprise-stream"]).status_code == 404
        assert [client.get(address).status_code for address in addresses] == [404] * 6


@pytest.mark.parametrize("is_read", [True, False])
def test_a_server_that_stops_with_an_answer_under_way(is_read: bool) -> None:
    """Who reads is answered to the end, as on any connection; where nobody does, nothing is waited for."""
    steps = Steps()
    text: list[str] = []
    with server_of(steps, grace_s=20.0) as (server, client):
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}, headers=HEADER) as lost:
            next(events_of(lost))
        address = lost.headers["x-reprise-stream"]
        reader = threading.Thread(target=lambda: text.append(client.get(address).text))
        if is_read:
            with client.stream("GET", address) as stream:
                next(events_of(stream))
            reader.start()
            while sum(1 for _ in text) == 0 and not server.service.is_closing:
                # The reader is connected when its first bytes were sent; the server stops right after.
                time.sleep(0.05)
                server.service.begin_close()
            steps.allow(100)
            reader.join()
            assert text[0].endswith("data: [DONE]\n\n")
        begun_s = time.monotonic()
        server.backend.may_decode.set()
    assert time.monotonic() - begun_s < 10


def test_what_a_cancelled_answer_computed_stays() -> None:
    body: dict[str, Any] = {"input": "Tell me a long story. " * 30, "temperature": 0, "max_output_tokens": 300}
    with real_server(settles=False) as client:
        made = client.post("/v1/responses", json={**body, "background": True}).json()
        address = f"/v1/responses/{made['id']}"
        with client.stream("GET", address, params={"stream": True}) as stream:
            for event in events_of(stream):
                if ".delta" in event:
                    break
        assert client.post(f"{address}/cancel").json()["status"] == "cancelled"
        while not client.get("/health").json()["idle"]:
            time.sleep(0.01)
        usage = client.post("/v1/responses", json={**body, "max_output_tokens": 1}).json()["usage"]
        assert usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"] <= 1


class ColdBackend:
    """The engine of a model that is loaded when `load` is called."""

    fingerprint, nbytes = "a", 1

    def __init__(self) -> None:
        self._waiting: list[Future[Any]] = []

    def status(self) -> Status:
        return Status(weights=WeightsState.LOADING)

    def ready(self) -> "Future[Any]":
        self._waiting.append(Future())
        return self._waiting[-1]

    def load(self) -> None:
        for each in self._waiting:
            if not each.cancelled():
                each.set_result(self)


@pytest.mark.anyio
async def test_the_address_is_known_while_the_model_is_loaded_and_the_answer_needs_no_client():
    settings, backend, cold = Settings(model=MODEL, settles=False), FakeBackend(script=says(TEXT)), ColdBackend()
    service = make_service(backend, settings=settings)
    model = ServedModel(id=MODEL, backend=cast(ModelBackend, cold), make_service=lambda loaded: service)
    service.models = Models([model])
    app = create_app(service, settings)

    async def ask(path: str, header: dict[str, str]) -> dict[str, str]:
        """The headers of a response whose client leaves with them."""
        body = json.dumps({**APIS[path], "stream": True}).encode()
        incoming = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
        sent: list[Message] = []

        async def receive() -> Message:
            return incoming.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(name.lower().encode(), value.encode()) for name, value in header.items()]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        await app(scope, receive, send)
        return {name.decode(): value.decode() for name, value in sent[0]["headers"]}

    try:
        plain, *begun = await asyncio.gather(ask("/v1/messages", {}), *(ask(path, HEADER) for path in APIS))
        assert plain["x-request-id"].startswith("msg_") and "x-reprise-stream" not in plain
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            reading = [asyncio.create_task(client.get(headers["x-reprise-stream"])) for headers in begun]
            await asyncio.sleep(0)
            cold.load()
            for headers, told in zip(begun, await asyncio.gather(*reading), strict=True):
                assert headers["x-reprise-stream"] == f"/v1/requests/{headers['x-request-id']}/stream"
                assert told.status_code == 200, told.text
                assert headers["x-request-id"] in told.text
        assert len(backend.jobs) == sum(1 + (path == "/v1/completions") for path in APIS)
    finally:
        await service.close()
        backend.stop()
