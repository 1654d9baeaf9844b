"""Tokens computed while a user waits, against an oracle that remembers every state: exact counts over HTTP.

The oracle computes what no earlier request had computed with the same tokens before it, and at least one token unless
the same prompt was answered before.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.matrix import rows_now_and_later
from tests.workloads import plays
from tests.workloads.plays import counts, ratio
from tests.workloads.serving import Serving
from tests.workloads.talk import QUESTIONS, prose, system, user


@pytest.mark.parametrize(
    ("num_calls", "has_reasoning"),
    rows_now_and_later([(6, False)], [(6, True), (20, False), (20, True)]),
)
def test_an_agent_with_tool_calls_and_then_a_new_message(
    server: Serving, num_calls: int, *, has_reasoning: bool
) -> None:
    turns = plays.agent(server, num_calls, has_reasoning=has_reasoning)
    called = [turn.message["tool_calls"][0]["function"]["name"] for turn in turns[:num_calls]]
    assert called == ["read_file"] * num_calls
    assert ratio(turns) <= 1.05, counts(turns)


@pytest.mark.matrix
def test_ten_users_of_one_system_prompt(server: Serving) -> None:
    turns = plays.one_system_prompt(server)
    assert ratio(turns) <= 1.02, counts(turns)


@pytest.mark.matrix
def test_ten_users_of_the_same_tools_without_a_system_prompt(server: Serving) -> None:
    turns = plays.tools_alone(server)
    assert ratio(turns) <= 1.02, counts(turns)


def test_ten_users_at_once(server: Serving) -> None:
    body = {"temperature": 0, "max_tokens": 40}

    def ask(text: str) -> tuple[int, int]:
        messages = [system(prose()), user(text)]
        response = server.client.post("/v1/chat/completions", json={"messages": messages, **body})
        usage = response.json()["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(10) as pool:
        seen = list(pool.map(ask, QUESTIONS[:10]))
    shared = len(server.service.served.text.encode(prose()))
    own = sum(prompt - shared for prompt, _ in seen)
    assert sum(computed for _, computed in seen) <= 1.02 * (shared + own), seen


@pytest.mark.matrix
def test_ten_questions_on_one_document(server: Serving) -> None:
    turns = plays.one_document(server, prose())
    assert ratio(turns[2:]) <= 1.05, counts(turns)


def test_regenerate_and_edit(server: Serving) -> None:
    messages, turns = plays.chat(server, 6)
    again = plays.regenerated(server, messages)
    assert [turn.computed for turn in again] == [turn.oracle for turn in again] == [0, 0]
    last = plays.edited_last(server, messages)
    assert ratio(last) <= 1.02, counts(last)
    for at in (4, 2, 0):
        earlier = plays.edited_earlier(server, messages, at)
        assert earlier.computed <= earlier.oracle + plays.spacing(turns), earlier
