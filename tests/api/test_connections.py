"""Clients that hang up, do not read or are cancelled; long prefills."""

import time
from collections.abc import Callable
from threading import Thread
from typing import Any

import httpx
import pytest

from reprise.api.http.limits import Limits
from reprise.api.http.listening import CannotListen, listen
from reprise.api.service.reply import Inbox
from reprise.core.events import Finished, FinishReason, Progress, Sampled
from reprise.core.outcome import Outcome
from tests.api.leaving import asking
from tests.api.servers import api, running_server, says

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_is_cancelled(phase: str, stream: bool):
    with running_server(says("word " * 50)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        gate = server.backend.may_prefill if phase == "prefill" else server.backend.may_decode
        gate.clear()
        with asking(server.url, URL, {"messages": HI, "stream": stream}):
            until(
                lambda: len(server.backend.jobs) > 0 if phase == "prefill" else server.backend.counts.num_requests > 0
            )
        until(lambda: len(server.backend.cancelled) > 0)
        gate.set()
        until(lambda: server.service.is_idle)
        assert client.post(URL, json={"messages": HI}).status_code == 200

        def records() -> list[dict[str, Any]]:
            return client.get("/v1/cache/requests").json()["data"]

        # The record of an answer is written when its client may have it already.
        until(lambda: len(records()) == 2)
        assert [record["ended"] for record in records()] == ["stop", "cancelled"]
        assert records()[1]["prompt_tokens"] > 0


def test_a_long_prefill_sends_comments_and_health_answers():
    limits = Limits(keep_alive_s=0.02)
    with running_server(limits=limits) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        server.backend.may_prefill.clear()
        with client.stream("POST", URL, json={"messages": HI, "stream": True}) as response:
            lines = response.iter_lines()
            # The answer's first chunk says that prefill has begun; then there are signs of life alone.
            while not next(lines).startswith(": prefill 0/"):
                pass
            seen = [line for line, _ in zip((line for line in lines if line[:1] == ":"), range(4), strict=False)]
            assert all(line.startswith(": prefill 0/") for line in seen)
            health = httpx.get(f"{server.url}/health").json()
            assert health["idle"] is False
            server.backend.may_prefill.set()
            assert list(lines)[-2] == "data: [DONE]"


def test_a_request_can_be_cancelled_by_its_id():
    with running_server() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.delete("/v1/requests/none").status_code == 404
        server.backend.may_decode.clear()
        with client.stream("POST", URL, json={"messages": HI, "stream": True}) as response:
            request_id = response.headers["x-request-id"]
            assert httpx.delete(f"{server.url}/v1/requests/{request_id}").json()["cancelled"] is True
            text = response.read().decode()
        assert "request_cancelled" in text
        until(lambda: server.service.is_idle)
        assert client.get(f"/v1/cache/requests/{request_id}").json()["ended"] == "cancelled"


def test_a_batch_of_prompts_is_cancelled_as_one():
    with running_server() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        server.backend.may_decode.clear()
        body = {"prompt": ["one", "two"], "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            request_id = response.headers["x-request-id"]
            assert httpx.delete(f"{server.url}/v1/requests/{request_id}").status_code == 200
            response.read()
        until(lambda: server.service.is_idle)
        ended = [record["ended"] for record in client.get("/v1/cache/requests").json()["data"]]
        assert ended == ["cancelled", "cancelled"]


@pytest.mark.anyio
async def test_records_are_paged_newest_first():
    async with api() as a:
        ids = [(await a.client.post(URL, json={"messages": HI})).json()["id"] for _ in range(3)]
        await a.until_idle()
        first = (await a.client.get("/v1/cache/requests", params={"limit": 2})).json()
        rest = (await a.client.get("/v1/cache/requests", params={"limit": 2, "before": ids[1]})).json()
        assert (await a.client.get("/v1/cache/requests", params={"limit": 0})).status_code == 400
        assert (await a.client.delete("/v1/cache")).json()["cleared"] is True
        assert a.backend.is_cleared
    assert [record["id"] for record in first["data"]] == [ids[2], ids[1]]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert [record["id"] for record in rest["data"]] == [ids[0]]
    assert first["data"][0]["reused"] > 0


@pytest.mark.anyio
async def test_a_stream_that_is_not_read_holds_bounded_memory():
    overflows: list[int] = []
    inbox = Inbox(limit=10, on_overflow=lambda: overflows.append(1))
    sink = inbox.sink(0)

    def emit() -> None:
        for token in range(1000):
            sink(Sampled(token=token))
        sink(Finished(reason=FinishReason.CANCELLED, outcome=Outcome(num_prompt=1)))

    thread = Thread(target=emit)
    thread.start()
    thread.join()
    read: list[Any] = []
    while (item := await inbox.get(0.01)) is not None:
        read.append(item[1])
    assert overflows == [1]
    assert inbox.has_overflowed
    # The first tokens, and the end: what a reader needs to know that it missed something.
    assert [event.token for event in read[:-1]] == list(range(10))
    assert isinstance(read[-1], Finished)


@pytest.mark.anyio
async def test_an_inbox_keeps_order_and_times_out():
    inbox = Inbox(limit=10_000, on_overflow=lambda: None)
    sink = inbox.sink(3)
    assert await inbox.get(0.001) is None
    thread = Thread(target=lambda: [sink(Progress(position=at, total=5000)) for at in range(5000)])
    thread.start()
    for at in range(5000):
        item = await inbox.get(10)
        assert item is not None
        assert item == (3, Progress(position=at, total=5000))
    thread.join()
    assert await inbox.get(0.001) is None


def test_a_port_in_use_is_one_sentence():
    with listen("127.0.0.1", 0) as taken, pytest.raises(CannotListen, match="is in use"):
        listen("127.0.0.1", taken.getsockname()[1])
