"""Tokens computed while a user waits, against an oracle that remembers every state: exact counts over HTTP.

The oracle computes what no earlier request had computed with the same tokens before it, and at least one token.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from tests.workloads.serving import Message, Serving, Turn, returned
from tests.workloads.talk import QUESTIONS, TOOLS, calling, prose, result, system, thoughtful, user


def ratio(turns: list[Turn]) -> float:
    return sum(turn.computed for turn in turns) / sum(turn.oracle for turn in turns)


@pytest.mark.parametrize("has_reasoning", [True, False], ids=["returns", "drops"])
def test_an_agent_with_20_tool_calls_and_then_a_new_message(server: Serving, *, has_reasoning: bool) -> None:
    # The others differ from the hybrid in no step, so a few will do.
    num_calls = 20 if server.service.served.id == "qwen3_5" else 6
    messages: list[Message] = [system(), user("Find out why the count is wrong.")]
    turns: list[Turn] = []
    for step in range(num_calls):
        turns.append(server.ask(messages, calling(step), tools=TOOLS))
        assert turns[-1].message["tool_calls"][0]["function"]["name"] == "read_file"
        answer = returned(turns[-1], has_reasoning=has_reasoning)
        messages += [answer, result(answer, step)]
    turns.append(server.ask(messages, thoughtful(0), tools=TOOLS))
    messages += [returned(turns[-1], has_reasoning=has_reasoning), user("Now mend it, and say what you changed.")]
    turns.append(server.ask(messages, thoughtful(1), tools=TOOLS))
    assert ratio(turns) <= 1.05, [(turn.computed, turn.oracle) for turn in turns]


def test_ten_users_of_one_system_prompt(server: Serving) -> None:
    turns = [server.ask([system(prose()), user(text)], thoughtful(0)) for text in QUESTIONS[:10]]
    assert ratio(turns) <= 1.02, [(turn.computed, turn.oracle) for turn in turns]


def test_ten_users_of_the_same_tools_without_a_system_prompt(server: Serving) -> None:
    turns = [server.ask([user(text)], thoughtful(0), tools=TOOLS) for text in QUESTIONS[:10]]
    assert ratio(turns) <= 1.02, [(turn.computed, turn.oracle) for turn in turns]


def test_ten_users_at_once(server: Serving) -> None:
    body = {"temperature": 0, "max_tokens": 40}

    def ask(text: str) -> tuple[int, int]:
        messages = [system(prose()), user(text)]
        response = server.client.post("/v1/chat/completions", json={"messages": messages, **body})
        usage = response.json()["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(10) as pool:
        counts = list(pool.map(ask, QUESTIONS[:10]))
    shared = len(server.service.served.text.encode(prose()))
    own = sum(prompt - shared for prompt, _ in counts)
    assert sum(computed for _, computed in counts) <= 1.02 * (shared + own), counts


OPENINGS = (
    "What does the first paragraph say?",
    "What does the last one say?",
    "Who is named in it?",
    "How many numbers are there?",
    "Is it a letter?",
    "Write it again in one sentence.",
    "Which word is the longest?",
    "In what order are the things told?",
    "Say whether it rhymes.",
    "Name what is missing.",
)


def test_ten_questions_on_one_document(server: Serving) -> None:
    turns = [server.ask([system(), user(f"{prose()}\n\n{text}")], thoughtful(0)) for text in OPENINGS]
    assert ratio(turns[2:]) <= 1.05, [(turn.computed, turn.oracle) for turn in turns]


def chat(server: Serving, num: int) -> tuple[list[Message], list[Turn]]:
    """A chat of so many questions; its messages end with the last one."""
    messages: list[Message] = [system()]
    turns: list[Turn] = []
    for number, text in enumerate(QUESTIONS[:num]):
        messages.append(user(text))
        turns.append(server.ask(messages, thoughtful(number)))
        messages.append(returned(turns[-1], has_reasoning=True))
    return messages[:-1], turns


def test_regenerate(server: Serving) -> None:
    messages, _ = chat(server, 4)
    turns = [server.ask(messages, thoughtful(number)) for number in (7, 8)]
    assert [turn.computed for turn in turns] == [turn.oracle for turn in turns] == [1, 1]


def test_edit_the_last_message(server: Serving) -> None:
    messages, _ = chat(server, 4)
    edits = ["Yet another thing: is it so?", "Or rather: what would you do?", "Zero in on the price, please."]
    turns = [server.ask([*messages[:-1], user(text)], thoughtful(5)) for text in edits]
    assert ratio(turns) <= 1.02, [(turn.computed, turn.oracle) for turn in turns]


def test_edit_earlier_messages(server: Serving) -> None:
    messages, turns = chat(server, 6)
    # From one prompt's end to the next is the longest stretch without a snapshot.
    prompts = [0, *(turn.prompt for turn in turns)]
    spacing = max(high - low for low, high in pairwise(prompts))
    for at in (4, 2, 0):
        edited = [*messages]
        where = 1 + 2 * at
        edited[where] = user(f"{messages[where]['content']} No more than three, please.")
        turn = server.ask(edited, thoughtful(5))
        assert turn.computed <= turn.oracle + spacing, turn
