"""Agent sessions one after the other, in room for more than one of them, and what runs: exact counts over HTTP."""

from pathlib import Path

import pytest

from reprise.chat.answer import Answer
from reprise.core.sizes import Bytes
from reprise.lab.demo.oracle import Oracle
from tests.workloads.serving import Message, Serving, returned, serving
from tests.workloads.talk import TOOLS, calling, prose, result, system, thoughtful, user

_NUM_SESSIONS = 4
_CALLS = (5, 5)
"""Tool calls behind each of a session's user messages."""


def session(server: Serving, number: int, computed: list[int] | None = None) -> list[list[Message]]:
    """Two tasks with tool calls, each ended by an answer. Gives each request's messages; settles are waited for."""
    messages: list[Message] = [system(prose()), user(f"Task {number}: find out why count {number} is wrong.")]
    asked: list[list[Message]] = []

    def ask(answer: Answer) -> Message:
        turn = server.ask(messages, answer, tools=TOOLS)
        server.wait_until_idle()
        asked.append([*messages])
        if computed is not None:
            computed.append(turn.computed)
        return returned(turn, has_reasoning=True)

    for task, num_calls in enumerate(_CALLS):
        for step in range(num_calls):
            answer = ask(calling(100 * number + 10 * task + step))
            messages += [answer, result(answer, 100 * number + 10 * task + step)]
        messages += [ask(thoughtful(10 * number + task)), user(f"Now do part {task + 2} of task {number}.")]
    ask(thoughtful(number))
    return asked


def computed(server: Serving) -> list[int]:
    """What each request of the sessions computes."""
    found: list[int] = []
    for number in range(_NUM_SESSIONS):
        session(server, number, found)
    return found


@pytest.mark.matrix
def test_in_room_for_more_than_one_they_compute_what_endless_memory_computes(models: dict[str, Path]) -> None:
    with serving(models["qwen3_5"]) as endless:
        last = session(endless, 0)[-1]
        endless.engine.clear()
        endless.ask(last, thoughtful(0), tools=TOOLS)
        endless.wait_until_idle()
        health = endless.health()
        one, running = health["bytes_kv"] + health["bytes_snapshots"], health["bytes_live_most"]
        endless.engine.clear()
        endless.engine.oracle = Oracle()
        least = computed(endless)
    for room in (1.2, 1.5, 2.0):
        with serving(models["qwen3_5"], cache_bytes=Bytes(int(room * one) + running)) as bounded:
            seen = computed(bounded)
        more = [pair for pair in zip(seen, least, strict=True) if pair[0] != pair[1]]
        assert sum(seen) <= 1.02 * sum(least), (room, more)
