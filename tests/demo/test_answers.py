"""What the trained model answers through the real engine: whatever happens to a chat, it says what it was told."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import reprise
from reprise.demo import story
from reprise.demo.facts import SYSTEM_PROMPT, WEATHER_TOOL, Exchange
from tests.demo.trained import MODEL

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 96}


@pytest.fixture(scope="module")
def engine() -> Iterator[reprise.Engine]:
    with reprise.Engine(MODEL, settles=False) as made:
        yield made


def new_chat(engine: reprise.Engine) -> reprise.Chat:
    return engine.chat(SYSTEM_PROMPT, tools=[WEATHER_TOOL], **GREEDY)


def say(chat: reprise.Chat, exchange: Exchange) -> str:
    """The user's part of an exchange, with the tool's where it is called; gives the answer."""
    answer = chat.send(exchange.user)
    if exchange.city is not None:
        (call,) = answer.tool_calls
        assert json.loads(call.arguments) == {"city": exchange.city}
        assert exchange.weather is not None
        chat.tool_result(call, exchange.weather)
        answer = chat.send()
    return answer.text


def hold(chat: reprise.Chat, told: Sequence[Exchange]) -> None:
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
    edited = story.exchanges((story.EDITED, told_again := "ask Anna code"))
    chat.edit(1, edited[0].user)
    assert (chat.send().text, say(chat, edited[1])) == (edited[0].answer, edited[1].answer), told_again


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


def test_what_was_evicted_is_computed_again() -> None:
    first, second = (story.exchanges(lines) for lines in story.AT_ONCE)
    with reprise.Engine(MODEL, settles=False, cache_bytes="3MB") as engine:
        chats = new_chat(engine), new_chat(engine)
        for pair in zip(first, second, strict=True):
            for chat, exchange in zip(chats, pair, strict=True):
                hold(chat, [exchange])
        assert engine.stats.num_evictions > 0


def test_a_restart_remembers(tmp_path: Path) -> None:
    told = story.exchanges(story.CHAT[:12])
    messages: list[dict[str, Any]] = []
    for start in (0, 4, 8):
        with reprise.Engine(MODEL, settles=False, disk_cache=tmp_path) as engine:
            chat = new_chat(engine) if start == 0 else engine.chat(messages=messages, tools=[WEATHER_TOOL], **GREEDY)
            hold(chat, told[start : start + 1])
            assert (chat.last.usage.cached_tokens > 0) is (start > 0)
            hold(chat, told[start + 1 : start + 4])
            messages = chat.messages


def test_output_held_to_a_schema_says_what_was_told(engine: reprise.Engine) -> None:
    told = story.exchanges(("tell Paul code 906", "tell Olga code 218", "ask Paul code"))
    chat = new_chat(engine)
    hold(chat, told[:2])
    choices = [f"Paul's code is {code}." for code in ("218", "427", "906")]

    def form(allowed: list[str]) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "code", "schema": {"enum": allowed}, "strict": True}}

    assert json.loads(chat.send(told[2].user, response_format=form(choices)).text) == told[2].answer
    # Where the schema leaves out what was told, the answer is another one that the schema has.
    assert json.loads(chat.regenerate(response_format=form(choices[:2])).text) in choices[:2]


def test_a_call_can_be_forced(engine: reprise.Engine) -> None:
    told = story.exchanges(("tell Leo city Oslo", "ask Leo city"))
    chat = new_chat(engine)
    hold(chat, told[:1])
    (call,) = chat.fork().send(told[1].user, tool_choice="required").tool_calls
    assert (call.name, set(json.loads(call.arguments))) == ("weather", {"city"})
    hold(chat, told[1:])


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
