"""Agent sessions one after the other, in room for one and a half of them: exact counts over HTTP."""

from pathlib import Path

import pytest

from reprise.chat.answer import Answer
from reprise.core.sizes import Bytes
from reprise.lab.demo.oracle import Oracle
from tests.matrix import now_and_later
from tests.workloads.serving import HttpTurn, Message, Serving, returned, serving
from tests.workloads.talk import TOOLS, calling, prose, result, system, thoughtful, user

_NUM_SESSIONS = 4
_CALLS = (5, 5)
"""Tool calls behind each of a session's user messages."""


def session(server: Serving, number: int) -> list[HttpTurn]:
    """Two tasks with tool calls, each ended by an answer; thoughts do not come back. Settles are waited for."""
    messages: list[Message] = [system(prose()), user(f"Task {number}: find out why count {number} is wrong.")]
    turns: list[HttpTurn] = []

    def ask(answer: Answer) -> Message:
        turns.append(server.ask(messages, answer, tools=TOOLS))
        server.wait_until_idle()
        return returned(turns[-1], has_reasoning=True)

    for task, num_calls in enumerate(_CALLS):
        for step in range(num_calls):
            answer = ask(calling(100 * number + 10 * task + step))
            messages += [answer, result(answer, 100 * number + 10 * task + step)]
        messages += [ask(thoughtful(10 * number + task)), user(f"Now do part {task + 2} of task {number}.")]
    return turns


def computed(server: Serving, num_sessions: int) -> int:
    return sum(turn.computed for number in range(num_sessions) for turn in session(server, number))


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", now_and_later(["qwen3_5"], ["llama", "gemma3_text"]))
def test_in_room_for_one_and_a_half_they_compute_what_endless_memory_computes(
    models: dict[str, Path], architecture: str
) -> None:
    with serving(models[architecture]) as endless:
        computed(endless, 1)
        health = endless.health()
        one = sum(health[f"bytes_{use}"] for use in ("kv", "snapshots", "live"))
        endless.engine.clear()
        endless.engine.oracle = Oracle()
        least = computed(endless, _NUM_SESSIONS)
    with serving(models[architecture], cache_bytes=Bytes(int(1.5 * one))) as bounded:
        seen = computed(bounded, _NUM_SESSIONS)
    assert seen <= 1.02 * least
