"""Settling beside requests, on the hybrid model: when it runs, when it stops, and what /health says meanwhile."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprise.chat.answer import Answer
from reprise.core.events import Event, FinishReason, Progress, Sampled
from reprise.core.job import Job, Purpose
from tests.workloads.serving import Message, Serving, returned, serving
from tests.workloads.talk import QUESTIONS, prose, system, thoughtful, user


@pytest.fixture(scope="module")
def settling(models: dict[str, Path]) -> Iterator[Serving]:
    with serving(models["qwen3_5"], prefill_chunk=64, max_settle=300) as server:
        yield server


@pytest.fixture
def server(settling: Serving) -> Iterator[Serving]:
    settling.wait_until_idle()
    settling.engine.clear()
    settling.engine.served.clear()
    yield settling
    release(settling)


def hold(server: Serving, purpose: Purpose, kind: type[Event], *, at: int) -> None:
    """Have the engine wait where a job of this purpose says for the so many-th time that it has come on."""
    num = itertools.count(1)
    server.engine.go_on.clear()
    server.engine.holds = lambda job, event: job.purpose is purpose and isinstance(event, kind) and next(num) == at


def release(server: Serving) -> None:
    server.engine.holds = lambda job, event: False
    server.engine.submitted = server.engine.cancelled = lambda _: None
    server.engine.go_on.set()


def settles(server: Serving) -> list[int]:
    """What each settle computed."""
    return [served.outcome.num_prefilled for served in server.engine.of(Purpose.SETTLE)]


def stripped_chat(server: Serving, num_characters: int) -> list[Message]:
    """A chat after its first answer; the answer is so long that settling it takes a while."""
    messages: list[Message] = [system(), user(QUESTIONS[0])]
    turn = server.ask(messages, Answer(content=prose()[:num_characters], reasoning="So?"), max_tokens=2000)
    return [*messages, returned(turn, has_reasoning=True)]


def test_health_is_not_idle_until_the_settle_is_done(server: Serving) -> None:
    hold(server, Purpose.SETTLE, Progress, at=1)
    messages = stripped_chat(server, 400)
    # Whether the settle is rendered, queued or running.
    assert server.health()["idle"] is False
    release(server)
    server.wait_until_idle()
    assert sum(settles(server)) > 0
    turn = server.ask([*messages, user(QUESTIONS[1])], thoughtful(1))
    assert server.record(turn.id)["settled"] > 100


@pytest.mark.matrix
def test_a_settle_computes_no_more_than_its_bound_and_a_chunk(server: Serving) -> None:
    stripped_chat(server, 900)
    server.wait_until_idle()
    assert 300 <= sum(settles(server)) < 300 + 64


def test_the_same_prefix_is_not_settled_twice(server: Serving) -> None:
    messages: list[Message] = [system(), user(QUESTIONS[0])]
    for _ in range(2):
        server.ask(messages, thoughtful(0))
        server.wait_until_idle()
    # The second answer is the same, so its settle finds all of it done.
    assert [computed > 0 for computed in settles(server)] == [True, False]


def test_a_request_stops_the_settle_of_another_chat_which_then_goes_on(server: Serving) -> None:
    hold(server, Purpose.SETTLE, Progress, at=2)

    def arrive(job: Job) -> None:
        if job.purpose is Purpose.GENERATE:
            release(server)

    messages = stripped_chat(server, 700)
    server.engine.submitted = arrive
    other = server.ask([user("A short question: is it so?")], thoughtful(1))
    assert other.computed == other.prompt
    server.wait_until_idle()
    assert server.engine.of(Purpose.SETTLE)[0].outcome.num_prefilled < 300
    turn = server.ask([*messages, user(QUESTIONS[1])], thoughtful(1))
    # What was done before the request came and what was done after it are both there.
    assert turn.computed < 0.5 * turn.prompt, (turn, settles(server))


def test_an_answer_that_the_client_leaves_is_not_settled(server: Serving) -> None:
    server.answer = Answer(content=prose(), reasoning="So?")
    body = {"messages": [system(), user(QUESTIONS[0])], "stream": True, "max_tokens": 5000}
    # The server notices before the next token.
    hold(server, Purpose.GENERATE, Sampled, at=20)
    server.engine.cancelled = lambda job_id: release(server)
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and "reasoning_content" in json.loads(line[6:])["choices"][0]["delta"]:
                break
    server.wait_until_idle()
    assert [served.reason for served in server.engine.of(Purpose.GENERATE)] == [FinishReason.CANCELLED]
    assert server.engine.of(Purpose.SETTLE) == []
