"""What the trained model answers through the real engine: whatever happens to a chat, it says what it was told."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import reprise
from reprise.lab.demo import story
from reprise.lab.demo.facts import LOOK_UP_TOOL, SYSTEM_PROMPT, FactExchange
from tests.demo.trained import MODEL
from tests.matrix import now_and_later

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 96}


@pytest.fixture(scope="module")
def engine() -> Iterator[reprise.Engine]:
    with reprise.Engine(MODEL, settles=False) as made:
        yield made


def new_chat(engine: reprise.Engine) -> reprise.Chat:
    return engine.chat(SYSTEM_PROMPT, tools=[LOOK_UP_TOOL], **GREEDY)


def say(chat: reprise.Chat, exchange: FactExchange) -> str:
    """The user's part of an exchange, with the tool's where it is called; gives the answer."""
    answer = chat.send(exchange.user)
    if exchange.name is not None:
        (call,) = answer.tool_calls
        assert json.loads(call.arguments) == {"name": exchange.name}
        assert exchange.result is not None
        chat.tool_result(call, exchange.result)
        answer = chat.send()
    return answer.text


def hold(chat: reprise.Chat, told: Sequence[FactExchange]) -> None:
    """The exchanges, each answered right."""
    assert [say(chat, exchange) for exchange in told] == [exchange.answer for exchange in told]


@pytest.mark.matrix
def test_a_growing_chat_its_branch_and_its_edit(engine: reprise.Engine) -> None:
    told = story.exchanges(story.CHAT)
    chat = new_chat(engine)
    hold(chat, told[:20])
    branch = chat.fork()
    hold(branch, story.exchanges((*story.CHAT[:20], *story.BRANCH))[20:])
    hold(chat, told[20:24])
    assert chat.last.usage.cached_tokens > 0
    hold(chat, story.exchanges((*story.CHAT[:24], *story.AFTER_BRANCH))[-1:])
    edited = story.exchanges((story.EDITED, story.CHAT[-1]))
    chat.edit(1, edited[0].user)
    assert (chat.send().text, say(chat, edited[1])) == (edited[0].answer, edited[1].answer)


@pytest.mark.matrix
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


@pytest.mark.parametrize("stop", now_and_later([" is", "8."], ["is", "58", "code is B"]))
def test_a_stop_ends_the_answer_before_its_words(engine: reprise.Engine, stop: str) -> None:
    told = story.exchanges(("tell Clara code B58", "ask Clara code"))
    chat = new_chat(engine)
    hold(chat, told[:1])
    answer = chat.send(told[1].user, stop=[stop])
    assert answer.text == told[1].answer.partition(stop)[0]
    assert answer.finish_reason == "stop"
    # The stop was for that answer only, and the chat goes on behind it.
    hold(chat, told[1:])


def test_without_thinking_it_answers_at_once(engine: reprise.Engine) -> None:
    told = story.exchanges(("tell Emma pet Nala", "tell Clara code B58", "ask Emma pet"))
    chat = new_chat(engine)
    hold(chat, told[:2])
    answer = chat.send(told[2].user, chat_template_kwargs={"enable_thinking": False})
    assert (answer.text, answer.reasoning) == (told[2].answer, None)


def test_a_schema_is_filled_with_what_was_told(engine: reprise.Engine) -> None:
    told = story.exchanges(("tell Clara code B58", "tell Hugo pet Luna", "tell Leo code T31", "ask Leo code"))
    chat = engine.chat(SYSTEM_PROMPT, **GREEDY)
    hold(chat, told[:3])
    fields = {"Leo's code": {"type": "string"}}
    schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "fact", "schema": schema}}
    # It would have answered in a sentence.
    assert json.loads(chat.send(told[3].user, response_format=form).text) == {"Leo's code": "T31"}
    hold(chat, told[3:])


IN_TURN = tuple(
    story.exchanges(
        (
            *(f"tell {name} code {code}" for name, code in zip(("Anna", "Leo", "Ida"), codes, strict=True)),
            *("ask Anna code", f"tell Hugo pet {pets[0]}", "ask Leo code", f"tell Hugo pet {pets[1]}"),
            *("look up Leo", "ask Ida code", "ask Hugo pet"),
        )
    )
    for codes, pets in (
        (("J39", "K82", "R47"), ("Luna", "Coco")),
        (("P84", "B58", "T31"), ("Max", "Ruby")),
    )
)


_LITTLE_MEMORY = {"cache_bytes": 700_000}
_SMALL_STEPS = {"prefill_chunk": 16, "max_batch": 2}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "settings",
    [_LITTLE_MEMORY | _SMALL_STEPS | {"drafts": "always"}, {"drafts": "auto"}, _LITTLE_MEMORY, _SMALL_STEPS],
    ids=str,
)
def test_chats_about_the_same_people_in_turn(settings: dict[str, Any]) -> None:
    with reprise.Engine(MODEL, settles=False, **settings) as engine:
        chats = [new_chat(engine) for _ in IN_TURN]
        for exchanges in zip(*IN_TURN, strict=True):
            for chat, exchange in zip(chats, exchanges, strict=True):
                hold(chat, [exchange])


@pytest.mark.matrix
def test_a_chat_goes_on_after_a_restart(tmp_path: Path) -> None:
    told = story.exchanges(story.CHAT[:12])
    options: dict[str, Any] = {"settles": False, "disk_directory": str(tmp_path)}
    with reprise.Engine(MODEL, **options) as engine:
        before = new_chat(engine)
        hold(before, told[:9])
        history = before.messages
    with reprise.Engine(MODEL, **options) as engine:
        after = engine.chat(messages=history, tools=[LOOK_UP_TOOL], **GREEDY)
        hold(after, told[9:10])
        assert after.last.usage.cached_tokens > 0
        hold(after, told[10:])
