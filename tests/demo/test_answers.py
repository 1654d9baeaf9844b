"""What the trained model answers through the real engine: whatever happens to a chat, it says what it was told."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import reprise
from reprise.demo import story
from reprise.demo.facts import SYSTEM_PROMPT, WEATHER_TOOL, FactExchange
from tests.demo.trained import MODEL

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 96}


@pytest.fixture(scope="module")
def engine() -> Iterator[reprise.Engine]:
    with reprise.Engine(MODEL, settles=False) as made:
        yield made


def new_chat(engine: reprise.Engine) -> reprise.Chat:
    return engine.chat(SYSTEM_PROMPT, tools=[WEATHER_TOOL], **GREEDY)


def say(chat: reprise.Chat, exchange: FactExchange) -> str:
    """The user's part of an exchange, with the tool's where it is called; gives the answer."""
    answer = chat.send(exchange.user)
    if exchange.city is not None:
        (call,) = answer.tool_calls
        assert json.loads(call.arguments) == {"city": exchange.city}
        assert exchange.weather is not None
        chat.tool_result(call, exchange.weather)
        answer = chat.send()
    return answer.text


def hold(chat: reprise.Chat, told: Sequence[FactExchange]) -> None:
    """The exchanges, each answered right."""
    assert [say(chat, exchange) for exchange in told] == [exchange.answer for exchange in told]


def test_a_growing_chat_its_branch_and_its_edit(engine: reprise.Engine) -> None:
    told = story.exchanges(story.CHAT)
    chat = new_chat(engine)
    hold(chat, told[:20])
    branch = chat.fork()
    hold(branch, story.exchanges((*story.CHAT[:20], *story.BRANCH))[20:])
    hold(chat, told[20:])
    assert chat.last.usage.cached_tokens > 0
    hold(chat, story.exchanges((*story.CHAT, *story.AFTER_BRANCH))[-1:])
    edited = story.exchanges((story.EDITED, story.CHAT[-1]))
    chat.edit(1, edited[0].user)
    assert (chat.send().text, say(chat, edited[1])) == (edited[0].answer, edited[1].answer)


def test_chats_about_the_same_people_at_once(engine: reprise.Engine) -> None:
    stories = [story.exchanges(lines) for lines in story.AT_ONCE for _ in range(2)]
    with ThreadPoolExecutor(len(stories)) as pool:
        for held in [pool.submit(hold, new_chat(engine), told) for told in stories]:
            held.result()


def test_an_answer_that_was_broken_off_leaves_nothing_wrong(engine: reprise.Engine) -> None:
    told = story.exchanges(("tell Ida pet Max", "tell Leo city Bern", "ask Ida pet", "ask Leo city"))
    chat = new_chat(engine)
    hold(chat, told[:2])
    for num_pieces in (1, 3, 6):
        stream = chat.stream(told[2].user)
        for _ in range(num_pieces):
            next(stream)
        stream.close()
    hold(chat, told[2:])
    assert chat.regenerate().text == told[-1].answer


@pytest.mark.parametrize("stop", ["is", " is", "58", "0.", "code is 5"])
def test_a_stop_ends_the_answer_before_its_words(engine: reprise.Engine, stop: str) -> None:
    told = story.exchanges(("tell Clara code 580", "ask Clara code"))
    chat = new_chat(engine)
    hold(chat, told[:1])
    answer = chat.send(told[1].user, stop=[stop])
    assert answer.text == told[1].answer.partition(stop)[0]
    assert answer.finish_reason == "stop"
    # The stop was for that answer only, and the chat goes on behind it.
    hold(chat, told[1:])


def test_without_thinking_it_answers_at_once(engine: reprise.Engine) -> None:
    told = story.exchanges(("tell Emma food pasta", "tell Emma pet Nala", "ask Emma food"))
    chat = new_chat(engine)
    hold(chat, told[:2])
    answer = chat.send(told[2].user, chat_template_kwargs={"enable_thinking": False})
    assert (answer.text, answer.reasoning) == (told[2].answer, None)
