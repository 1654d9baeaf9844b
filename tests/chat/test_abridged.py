"""Leaving out the middle of a long chat changes no boundary, whatever the template does."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from reprise.chat.request import ChatRequest, Message
from reprise.chat.text_model import TextModel
from reprise.core.errors import BadRequest
from tests.chat.long_chats import both_ways, long_chat
from tests.chat.shapes import ASK, CALL, RESULT, WEATHER, assistant
from tests.chat.test_message_shapes import STRICT
from tests.chat.text_models import fast_tokenizer, make_text_model, template_names, text_model
from tests.matrix import every_other

_LOOP = "{% for m in messages %}"
_MESSAGE = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
_END = "{% endfor %}<|im_start|>assistant\n"
ODD = {
    "numbers": _LOOP + "{{ loop.index }}: " + _MESSAGE + _END,
    "counts": "{{ messages | length }}\n" + _LOOP + _MESSAGE + _END,
    "thoughts of the last ten": _LOOP
    + "{% if loop.revindex <= 10 and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    + _MESSAGE
    + _END,
    "the first five are louder": _LOOP + "{% if loop.index <= 5 %}LOUD {% endif %}" + _MESSAGE + _END,
    "old results are dropped": _LOOP
    + "{% if m.role != 'tool' or loop.revindex <= 12 %}"
    + _MESSAGE
    + "{% endif %}"
    + _END,
    "a list of what was asked": "{% for m in messages if m.role == 'user' %}{{ m.content }};{% endfor %}"
    + _LOOP
    + _MESSAGE
    + _END,
    "the last first": "{% for m in messages | reverse %}" + _MESSAGE + _END,
}
"""Templates whose text in one place depends on messages far from it."""


def odd(source: str) -> TextModel:
    tokenizer: Any = fast_tokenizer(None)
    model = make_text_model(tokenizer)

    def render(messages: Any, **options: Any) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **{**options, "chat_template": source})

    return replace(model, render=render, template_source=source)


@pytest.mark.parametrize("name", [*every_other(template_names()), *STRICT, *ODD])
def test_without_the_middle_a_long_chat_has_the_same_boundaries_and_the_same_next_turn(name: str) -> None:
    model = odd(ODD[name]) if name in ODD else text_model(name)
    for seed in range(6):
        request = long_chat(random.Random(seed))
        try:
            both = both_ways(model, request)
        except BadRequest:
            continue  # Single turns alone, say.
        assert both.abridged == both.whole, (name, seed)


def numbered(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The same with other words in each message."""
    return tuple({**message, "content": f"{n} {message['content'] or ''}"} for n, message in enumerate(messages))


def test_a_made_up_turn_of_a_chat_with_many_turns_costs_a_small_part_of_rendering_it() -> None:
    turns = numbered([ASK, assistant("It is sunny.", "Let me see.")] * 40)
    both = both_ways(text_model("strips_thinking"), ChatRequest(messages=(*turns, ASK)))
    assert both.abridged == both.whole
    assert both.abridged_chars < 0.2 * both.whole_chars


def test_what_a_tool_loop_loses_at_the_next_question_is_found_in_its_first_round() -> None:
    loop = numbered([CALL, RESULT] * 40)
    both = both_ways(text_model("keeps_in_loop"), ChatRequest(messages=(ASK, *loop), tools=(WEATHER,)))
    assert both.abridged == both.whole
    # The next turn is rendered whole: its middle is not the prompt's.
    assert both.abridged_chars < 0.6 * both.whole_chars


def test_a_kind_of_message_that_only_the_middle_has_is_not_left_out() -> None:
    plain = numbered([ASK, assistant("It is sunny.")] * 6)
    thinking = numbered([ASK, assistant("It is sunny.", "Let me see.")] * 20)
    both = both_ways(odd(ODD["thoughts of the last ten"]), ChatRequest(messages=(*plain, *thinking, ASK)))
    assert both.abridged == both.whole


def test_a_chat_that_repeats_itself_is_compared_where_it_ends() -> None:
    both = both_ways(text_model("strips_thinking"), ChatRequest(messages=(*[ASK, assistant("It is sunny.")] * 20, ASK)))
    assert both.abridged == both.whole
