"""System messages in the midst of a chat, and several messages of one role in a row."""

import pytest

from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest, Cut, Message
from reprise.core.errors import BadRequest, TemplateFailed
from reprise.core.prompt import BoundaryKind
from tests.chat.text_models import text_model


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


CHAT = (said("system", "Be kind."), said("user", "One"), said("assistant", "Two"))
LATE = (*CHAT, said("system", "Be brief."), said("user", "Three"))


@pytest.mark.parametrize("template", ["strips_thinking", "needs_user", "keeps_everything"])
def test_a_late_system_message_stays_where_the_template_takes_it(template: str) -> None:
    rendered = Renderer(text_model(template)).render(ChatRequest(messages=LATE))
    assert rendered.request.messages == LATE
    assert "system\nBe brief." in rendered.text
    assert not any("system message" in note for note in rendered.notes)


def test_a_template_that_drops_it_gets_it_as_a_user_message() -> None:
    renderer = Renderer(text_model("plain_text"))
    before = renderer.render(ChatRequest(messages=CHAT[:2]))
    rendered = renderer.render(ChatRequest(messages=LATE))
    assert rendered.text.endswith("User: Be brief.\nUser: Three\nAssistant:")
    assert rendered.text.startswith(before.text.removesuffix("Assistant:"))
    assert "message 3" in rendered.notes[0]


def test_a_template_that_wants_turns_gets_it_with_the_user_message_behind_it() -> None:
    renderer = Renderer(text_model("alternates"))
    rendered = renderer.render(ChatRequest(messages=LATE, breakpoints=(3, 4, 5), cuts=(Cut(4, 2),)))
    assert rendered.request.messages == (*CHAT, said("user", "Be brief.\n\nThree"))
    assert rendered.request.breakpoints == (3, 4)
    assert rendered.request.cuts == (Cut(3, len("Be brief.\n\nTh")), Cut(3, len("Be brief.")))
    explicit = [b.position for b in rendered.prompt.boundaries if b.kind is BoundaryKind.EXPLICIT]
    ends = [text_model("alternates").decode(rendered.prompt.tokens[:at].tolist())[-9:] for at in explicit]
    assert "Be brief." in ends
    assert len(rendered.notes) == 2


def test_several_system_messages_at_the_beginning_are_one_where_only_one_is_taken() -> None:
    renderer = Renderer(text_model("alternates"))
    messages = (said("system", "Be kind."), said("system", "Be brief."), said("user", "One"))
    rendered = renderer.render(ChatRequest(messages=messages, breakpoints=(1,)))
    assert rendered.request.messages == (said("system", "Be kind.\n\nBe brief."), said("user", "One"))
    assert rendered.request.cuts == (Cut(0, len("Be kind.")),)
    assert rendered.notes == ("the system messages at the beginning merged, since the chat template accepts one",)


def calls(*words: str) -> Message:
    made = [
        {"id": f"call_{word}", "type": "function", "function": {"name": "look", "arguments": {"at": word}}}
        for word in words
    ]
    return {"role": "assistant", "content": "Looking.", "tool_calls": made}


def seen(word: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{word}", "content": f"{word} is seen"}


@pytest.mark.parametrize("template", ["plain_text", "keeps_everything"])
def test_parallel_results_stand_in_the_order_of_their_calls(template: str) -> None:
    asked = said("user", "One")
    renderer = Renderer(text_model(template))
    given = (asked, calls("Heron", "Kestrel", "Osprey"), seen("Osprey"), seen("Heron"), seen("Kestrel"))
    ordered = (asked, calls("Heron", "Kestrel", "Osprey"), seen("Heron"), seen("Kestrel"), seen("Osprey"))
    rendered = renderer.render(ChatRequest(messages=given))
    assert rendered.text == renderer.render(ChatRequest(messages=ordered)).text
    places = [rendered.text.index(f"{word} is seen") for word in ("Heron", "Kestrel", "Osprey")]
    assert places == sorted(places)
    assert any("order of their calls" in note for note in rendered.notes)
    # A template that writes no calls gets them as the model writes them.
    form = text_model(template).calls.format
    section = "" if form is None else form.start + form.opening + form.head
    assert section in rendered.text


def test_what_no_form_helps_is_refused_in_the_templates_words() -> None:
    messages = (said("user", "One"), said("assistant", "Two"), said("user", "Three"))
    with pytest.raises(TemplateFailed, match="Only one message is supported"):
        Renderer(text_model("single_turn")).render(ChatRequest(messages=messages))


@pytest.mark.parametrize("template", ["needs_user", "alternates", "plain_text"])
def test_no_message_at_all_is_refused_also_where_one_could_be_added(template: str) -> None:
    with pytest.raises(BadRequest, match="Send at least one message"):
        Renderer(text_model(template)).render(ChatRequest(messages=()))
