"""What is told of a request."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from httpx import Response

from reprise.api.http.off_loop import Stage
from reprise.api.service.exchange import Record
from reprise.api.service.records import Records, log_line, record_body
from reprise.api.service.reply import PrefillProgress, Reply
from reprise.core.errors import QueueFull
from reprise.core.outcome import Outcome, Reason
from reprise.core.settings import Settings
from tests.api.servers import MODEL, api

HI = [{"role": "user", "content": "Hi"}]


def record(*outcomes: Outcome, ended: str = "stop") -> Record:
    return Record(id="r1", api="chat", model="m", created=0.0, namespace="", ended=ended, outcomes=outcomes)


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (record(ended="cancelled"), "r1 chat: cancelled before it started"),
        (
            record(
                Outcome(
                    num_prompt=90,
                    num_reused=60,
                    num_prefilled=30,
                    num_generated=7,
                    reason=Reason.NEW_TOKENS,
                    ttft_s=0.25,
                )
            ),
            "r1 chat: stop, prompt 90, reused 60, prefilled 30 (new tokens), generated 7, first token 0.250 s",
        ),
        (
            record(Outcome(num_prompt=90, num_reused=60, num_loaded=40, num_prefilled=30, reason=Reason.NEW_TOKENS)),
            "r1 chat: stop, prompt 90, reused 60 (40 of them from disk), prefilled 30 (new tokens), generated 0, "
            "first token -",
        ),
    ],
)
def test_a_line_of_the_log_says_what_was_reused_and_from_where(told: Record, line: str) -> None:
    assert log_line(told) == line


def test_a_line_says_how_fast_it_went() -> None:
    outcome = Outcome(
        num_prompt=90, num_prefilled=30, num_generated=9, reason=Reason.COLD, prefill_s=0.1, ttft_s=0.25, total_s=1.25
    )
    line = log_line(record(outcome))
    assert "prefilled 30 (cold, 300.0 tokens/s), generated 9, 8.0 tokens/s, first token" in line
    body = record_body(record(outcome))
    assert (body["prefill_tokens_per_s"], body["decode_tokens_per_s"]) == (300.0, 8.0)


def test_a_long_prefill_is_reported_every_few_seconds() -> None:
    progress = PrefillProgress(request_id="r1", since_s=0.0)
    progress.restart(position=1000, now_s=100.0)
    assert progress.line(position=2000, total=9000, now_s=104.9) is None
    told = progress.line(position=3000, total=9000, now_s=105.0)
    assert told == "r1: prefilled 3000 of 9000 tokens (33 %), 400 tokens/s, about 15 s left"
    assert progress.line(position=4000, total=9000, now_s=107.0) is None
    assert progress.line(position=9000, total=9000, now_s=150.0) is None


REFUSED: list[tuple[str, str, dict[str, Any], dict[str, str], int, str]] = [
    ("POST", "/v1/chat/completions", {"messages": "hi"}, {}, 400, "chat"),
    ("POST", "/chat/completions", {"messages": []}, {}, 400, "chat"),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 999}]}, {}, 413, "chat"),
    ("POST", "/v1/messages", {"messages": [], "max_tokens": 1}, {}, 400, "messages"),
    ("POST", "/v1/responses", {"input": "Hi", "model": "gpt-9"}, {}, 404, "responses"),
    ("POST", "/v1/completions", {"prompt": "Hi"}, {"Authorization": "Bearer no"}, 401, "completions"),
    ("GET", "/v1/nothing", {}, {}, 404, "other"),
]


@pytest.mark.anyio
@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: f"{refused[1]}-{refused[4]}")
async def test_a_refused_request_is_a_line_and_a_record(
    refused: tuple[str, str, dict[str, Any], dict[str, str], int, str], caplog: pytest.LogCaptureFixture
) -> None:
    method, path, body, headers, status, name = refused
    settings = Settings(model=MODEL, api_keys=("one",), max_body_bytes=500)
    async with api(settings=settings, headers={"Authorization": "Bearer one"}) as a:
        response = await a.client.request(method, path, json=body, headers=headers)
        assert response.status_code == status
        (told,) = (await a.client.get("/v1/cache/requests")).json()["data"]
        assert (told["ended"], told["status"], told["api"]) == ("refused", status, name)
        assert told["error"] == response.json()["error"]["message"]
        assert told["notes"] == [f"{method} {path}"]
        assert (await a.client.get(f"/v1/cache/requests/{told['id']}")).json() == told
        metrics = (await a.client.get("/metrics")).text
    assert f'reprise_requests_total{{api="{name}",model="{MODEL}",outcome="refused"}} 1.0' in metrics
    (line,) = [r.message for r in caplog.records if r.message.startswith("refused")]
    assert line.startswith(f"refused with {status} (") and f"{method} {path}" in line


@pytest.mark.anyio
async def test_a_full_queue_is_a_refusal_and_a_failure_is_not() -> None:
    async with api() as a:
        a.backend.refuse = QueueFull("Too many requests wait.")
        await a.client.post("/v1/chat/completions", json={"messages": HI})
        a.backend.refuse, a.backend.fail_after = None, 1
        await a.client.post("/v1/chat/completions", json={"messages": HI})
        await a.client.get("/v1/cache/requests/nobody")
        await a.until_idle()
        told = (await a.client.get("/v1/cache/requests")).json()["data"]
    assert [(r["ended"], r["status"]) for r in told] == [("failed", None), ("refused", 429)]


def test_refusals_do_not_push_out_the_others() -> None:
    records = Records(limit=20)
    for n in range(3):
        records.add(replace(record(), id=f"answered-{n}"))
    for n in range(50):
        records.add(replace(record(ended="refused"), id=f"refused-{n}"))
    kept, _ = records.page(namespace="", limit=100)
    assert [r.id for r in kept] == ["refused-49", "refused-48", "answered-2", "answered-1", "answered-0"]


@pytest.mark.anyio
async def test_who_asks_right_after_an_answer_finds_its_record() -> None:
    async with api() as a:
        is_free = threading.Event()
        busy = [asyncio.create_task(a.service.threads.run(Stage.AFTER, is_free.wait)) for _ in range(8)]
        answer = (await a.client.post("/v1/chat/completions", json={"model": MODEL, "messages": HI})).json()
        asking = [
            asyncio.create_task(a.client.get(path))
            for path in ("/v1/cache/requests?limit=1", f"/v1/cache/requests/{answer['id']}")
        ]
        done, _ = await asyncio.wait(asking, timeout=0.05)
        is_free.set()
        assert not done
        await asyncio.gather(*busy)
        listed, alone = [(await asked).json() for asked in asking]
        assert listed["data"][0]["id"] == alone["id"] == answer["id"]


@pytest.mark.anyio
async def test_who_asks_before_the_answer_is_put_away_finds_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client has the last byte before the server knows that it was sent."""
    asking: list[asyncio.Task[Response]] = []
    leave = Reply.__aexit__
    async with api() as a:

        async def leave_late(reply: Reply, *error: Any) -> None:
            asking.append(asyncio.create_task(a.client.get(f"/v1/cache/requests/{reply.request.id}")))
            done, _ = await asyncio.wait(asking, timeout=0.05)
            assert not done
            await leave(reply, *error)

        monkeypatch.setattr(Reply, "__aexit__", leave_late)
        answer = (await a.client.post("/v1/chat/completions", json={"model": MODEL, "messages": HI})).json()
        assert (await asking[0]).json()["id"] == answer["id"]
