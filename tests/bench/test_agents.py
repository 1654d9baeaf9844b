"""Recorded sessions as chats: which prompt repeats what, who says it, and in which order."""

import gzip
import json
from pathlib import Path
from typing import Any

from bench.agents import AgentCall, PlayedChat, SideTally, played, sessions_of
from reprise.lab.bench.client import ClientReply


def call(at_s: float, *blocks: int, agent: str = "main", num_answered: int = 1) -> AgentCall:
    return AgentCall(at_s=at_s, agent=agent, blocks=blocks, num_answered=num_answered)


def texts(*calls: AgentCall) -> list[str]:
    """The prompts of one session's calls, as one text each."""
    prompts = played([calls], num_live=1, words_per_block=2)
    return [" ".join(message["content"] for message in messages) for messages in prompts]


def test_a_chat_grows_by_an_answer_and_what_came_back() -> None:
    first = PlayedChat().asked((1, 2, 3, 4), 0)
    assert first.said == (("system", (1, 2)), ("user", (3, 4)))
    second = first.asked((1, 2, 3, 4, 5, 6, 7), 2)
    assert second.said == (*first.said, ("assistant", (5, 6)), ("user", (7,)))
    assert second.asked((1, 2, 3, 4, 5, 6, 7, 8), 2).said[-1] == ("user", (8,)), "something always came back"
    edited = second.asked((1, 2, 3, 9, 10), 1)
    assert edited.said == (("system", (1, 2)), ("user", (3,)), ("user", (9, 10)))


def test_equal_numbers_are_equal_texts_and_others_are_not() -> None:
    one, two, three = texts(call(0, 1, 2), call(1, 1, 2, 3, 4), call(2, 1, 5, 6))
    assert two.startswith(one) and three.startswith(one.rsplit(" ", 2)[0])
    (other,) = texts(call(0, 3, 4))
    assert other != one
    sessions = [[call(0, 1, 2)], [call(0, 1, 2)]]
    first, second = played(sessions, num_live=1, words_per_block=2)
    assert first != second, "numbers mean something within a session alone"


def test_sessions_run_side_by_side_and_the_next_begins_when_one_ends() -> None:
    sessions = [[call(0, 1, 2), call(9, 1, 2, 3)], [call(1, 4, 5)], [call(3, 6, 7)]]
    lengths = [len(messages) for messages in played(sessions, num_live=2, words_per_block=1)]
    assert lengths == [2, 2, 2, 3], "the third begins when the second has ended, before the first goes on"


def test_a_file_is_read_with_its_sub_agents_in_the_order_of_their_times(tmp_path: Path) -> None:
    def request(t: float, *runs: Any) -> dict[str, Any]:
        return {"t": t, "in": 128, "out": 100, "hash_ids": runs}

    sub = {"type": "subagent", "t": 5.0, "requests": [request(0.0, [8, 9]), request(3.0, [8, 10])]}
    session = {"block_size": 64, "requests": [request(0.0, [1, 3], 7), request(6.0, [1, 4]), sub]}
    file = tmp_path / "sessions.jsonl.gz"
    with gzip.open(file, "wt") as opened:
        opened.write(json.dumps(session) + "\n")
    (calls,) = sessions_of(file)
    assert [(each.at_s, each.agent, each.blocks) for each in calls] == [
        (0.0, "main", (1, 2, 3, 7)),
        (5.0, "agent 0", (8, 9)),
        (6.0, "main", (1, 2, 3, 4)),
        (8.0, "agent 0", (8, 9, 10)),
    ]
    assert calls[0].num_answered == 2


def test_a_line_has_the_share_and_the_waits() -> None:
    times = {"sent_s": 0.0, "ended_s": 2.0}
    replies = tuple(
        ClientReply(
            id="",
            content="",
            reasoning="",
            calls=(),
            num_prompt=100,
            num_cached=40,
            num_generated=1,
            first_s=first_s,
            **times,
        )
        for first_s in (0.1, 0.2, 0.3)
    )
    line = SideTally(name="us", replies=replies).line(oracle=90, num_prompt=300)
    assert line.split() == ["us", "3", "300", "180", "2.00", "200", "290"]
    assert "?" in SideTally(name="us", replies=(), refusal="it died").line(oracle=0, num_prompt=0)
