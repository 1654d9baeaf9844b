"""Tool-call ids as clients and servers make them, in templates that insist on a form of their own."""

import re
from collections.abc import Sequence

import pytest

from reprise.chat.answer import Answer, ToolCall
from reprise.chat.message_format import USUAL_IDS, shortened_ids
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest, Message
from reprise.chat.templates.rendered import Rendered
from reprise.chat.templates.template import ChatTemplate
from reprise.core.prompt import BoundaryKind
from tests.chat.shapes import ASK, WEATHER, user
from tests.chat.text_models import text_model

NINE = "strict/nine_letter_ids"
IDS = (*USUAL_IDS, "call_0", "c1", "functions.get_weather:0", "call_7f", "ünïcode-id", "abcdef123")


def called(*ids: str) -> Message:
    calls = [{"id": i, "type": "function", "function": {"name": "get_weather", "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def told(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": f"seen by {call_id}"}


def render(messages: Sequence[Message], *, template: str = NINE) -> Rendered:
    return Renderer(text_model(template)).render(ChatRequest(messages=tuple(messages), tools=(WEATHER,)))


def ids_in(text: str) -> list[str]:
    return re.findall(r"<tool_(?:call>get_weather|response>) ?(\S+) ", text)


@pytest.mark.parametrize("call_id", IDS)
def test_a_call_and_its_result_have_the_same_id_in_the_templates_form(call_id: str) -> None:
    first, second = ids_in(render((ASK, called(call_id), told(call_id))).text)
    assert first == second
    assert re.fullmatch(r"[A-Za-z0-9]{9}", first)
    assert (first == call_id) == (call_id == "abcdef123")


def test_an_id_stays_the_same_as_the_chat_grows() -> None:
    chat: list[Message] = [ASK]
    before = render(chat).text
    for call_id in IDS:
        chat += [called(call_id), told(call_id)]
        text = render(chat).text
        assert text.startswith(before)
        before = text


def test_parallel_calls_keep_their_results_apart() -> None:
    ids = ids_in(render((ASK, called(*IDS), *map(told, reversed(IDS)))).text)
    assert len(set(ids)) == len(IDS)
    assert ids[: len(IDS)] == ids[len(IDS) :], "in the order of their calls"


def test_an_id_that_another_one_has_been_given_gets_another() -> None:
    (made,) = shortened_ids([told("call_0")], 9).values()
    chat = [told("call_0"), told(made), told("call_1")]
    ids = shortened_ids(chat, 9)
    assert ids["call_0"] == made
    assert len(set(ids.values())) == 3
    # Where it comes first it keeps it, and what comes later gives way.
    assert shortened_ids([told(made), told("call_0")], 9)[made] == made
    assert shortened_ids([told(made), told("call_0")], 9)["call_0"] != made


@pytest.mark.parametrize("template", ["strips_thinking", "channels"])
def test_templates_that_take_any_id_get_the_clients(template: str) -> None:
    assert ChatTemplate(text_model(template)).id_length is None
    assert ChatTemplate(text_model(NINE)).id_length == 9


@pytest.mark.parametrize("call_id", IDS)
def test_the_next_turn_is_known_with_an_id_of_the_servers(call_id: str) -> None:
    renderer = Renderer(text_model(NINE))
    rendered = renderer.render(ChatRequest(messages=(ASK,), tools=(WEATHER,)))
    stable = [b.position for b in rendered.prompt.boundaries if b.kind is BoundaryKind.STABLE]
    assert stable == [len(rendered.prompt)]
    answer = Answer(content=None, tool_calls=(ToolCall(id=call_id, name="get_weather", arguments="{}"),))
    foretold = renderer.next_turn(rendered, answer, branch="tool")
    assert foretold is not None
    grown = renderer.render(
        ChatRequest(
            messages=(ASK, called(call_id), told(call_id), called("toolu_9"), told("toolu_9")), tools=(WEATHER,)
        )
    )
    assert grown.prompt.tokens[: len(foretold)].tolist() == foretold.tokens.tolist()


def test_calls_and_results_without_ids_belong_together_by_their_order() -> None:
    calls = [{"type": "function", "function": {"name": name, "arguments": ""}} for name in ("get_weather", "search")]
    chat = (
        ASK,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "name": "search", "content": "found"},
        {"role": "tool", "content": "sunny"},
    )
    rendered = render(chat)
    _, answer, sunny, found = rendered.request.messages
    weather, search = answer["tool_calls"]
    assert (found["tool_call_id"], found["name"]) == (search["id"], "search")
    assert (sunny["tool_call_id"], sunny["name"]) == (weather["id"], "get_weather")
    assert "tool calls or results without an id, numbered in order: 1, 2, 3" in rendered.notes
    assert any("order of their calls" in note for note in rendered.notes)
    assert render((*chat, {"role": "assistant", "content": "Sunny."}, user("Thanks!"))).text.startswith(rendered.text)
