"""A chat that its template refuses: the error says so, and which message is meant."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from reprise.chat.messages.system_placement import refused_message
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest, Message
from reprise.chat.templates.template import syntax_fault
from reprise.core.errors import TemplateFailed
from tests.chat.text_models import fast_tokenizer, make_text_model, text_model


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def refuses(word: str) -> Any:
    """A renderer whose template raises for a message that holds the word, and for a chat without "please"."""
    known = text_model("strips_thinking")
    assert known.render is not None
    render = known.render

    def render_or_raise(messages: Sequence[Message], **options: Any) -> str:
        if not any("please" in str(message.get("content")) for message in messages):
            raise ValueError("Nobody says please.")
        if any(word in str(message.get("content")) for message in messages):
            raise ValueError("Tool-call ids must have 9 characters!")
        return render(messages, **options)

    return Renderer(replace(known, render=render_or_raise))


@pytest.mark.parametrize("at", [1, 2, 5])
def test_the_message_at_fault_is_named(at: int) -> None:
    messages = [{"role": "system", "content": "Be kind, please."}, *(user(str(n)) for n in range(1, 7))]
    messages[at] = user("a bad word")
    with pytest.raises(
        TemplateFailed, match=rf"chat template refused the chat at messages\[{at}\] \(role 'user'\): "
    ) as e:
        refuses("bad").render(ChatRequest(messages=tuple(messages)))
    assert e.value.param == f"messages[{at}]"
    assert str(e.value).endswith(": Tool-call ids must have 9 characters!")


def test_what_the_chat_lacks_is_the_fault_of_no_message() -> None:
    messages = ({"role": "system", "content": "a"}, {"role": "assistant", "content": "b"})
    with pytest.raises(TemplateFailed, match="refused the chat: Nobody says please") as e:
        refuses("bad").render(ChatRequest(messages=messages))
    assert e.value.param == "messages"


def test_a_long_chat_is_looked_at_a_few_times_only() -> None:
    asked: list[int] = []

    def complaint(messages: Sequence[Message]) -> str | None:
        asked.append(len(messages))
        return "no" if len(messages) > 700 else None

    assert refused_message([user("x")] * 1000, complaint, sentence="no") == 700
    assert len(asked) <= 11


def test_a_template_that_does_not_parse_is_told_before_a_chat_comes() -> None:
    tokenizer = deepcopy(fast_tokenizer("strips_thinking"))
    assert syntax_fault(make_text_model(tokenizer)) is None
    assert syntax_fault(text_model(None)) is None
    tokenizer.chat_template = "{% for m in messages %}\n{{ m.content }\n{% endfor %}"
    fault = syntax_fault(make_text_model(tokenizer))
    assert fault is not None
    assert fault.startswith("line 2: ")
    # One that wants other messages than a probe has is no broken one.
    tokenizer.chat_template = "{{ raise_exception('Only with tools.') }}"
    assert syntax_fault(make_text_model(tokenizer)) is None
