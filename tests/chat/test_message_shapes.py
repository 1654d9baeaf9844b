"""Shapes of histories as clients send them × templates: each renders, and the next turn goes on where it can."""

from collections.abc import Sequence
from typing import Any

import pytest

from reprise.chat.answer import Answer
from reprise.chat.message_format import USUAL_IDS, joined_text
from reprise.chat.messages.history import as_message
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest, Message
from reprise.core.prompt import BoundaryKind
from tests.chat.shapes import WEATHER
from tests.chat.text_models import TEMPLATES, template_names, text_model
from tests.matrix import every_nth

STRICT = sorted(f"strict/{path.stem}" for path in (TEMPLATES / "strict").glob("*.jinja"))
# The two others refuse any second message, and users without a name.
TABLE = [*(name for name in template_names() if name not in ("single_turn", "wants_fields")), *STRICT]

OPENAI, ANTHROPIC, VLLM, UUID = USUAL_IDS


def system(word: str) -> Message:
    return {"role": "system", "content": word}


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def answer(content: str | None, *calls: tuple[str | None, Any]) -> Message:
    made = [
        {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        | ({} if call_id is None else {"id": call_id})
        for call_id, arguments in calls
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})}


def result(call_id: str | None, content: str) -> Message:
    return {"role": "tool", "content": content, **({} if call_id is None else {"tool_call_id": call_id})}


PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome"}'
ASKED = (system("Sycamore"), user("Falcon"))
LOOP = (*ASKED, answer(None, (OPENAI, PARIS)), result(OPENAI, "Razorbill"))
SHAPES: dict[str, Sequence[Message]] = {
    "one message": (user("Falcon"),),
    "system": ASKED,
    "two systems": (system("Sycamore"), system("Juniper"), user("Falcon")),
    "system in the midst": (*ASKED, answer("Rowboat"), system("Juniper"), user("Saffron")),
    "system at the end": (*ASKED, answer("Rowboat"), user("Saffron"), system("Juniper")),
    "parts": (user([{"type": "text", "text": "Falcon"}, {"type": "text", "text": "Saffron"}]),),
    "tool loop": LOOP,
    "two steps": (*LOOP, answer("", (ANTHROPIC, ROME)), result(ANTHROPIC, "Pelican")),
    "parallel": (
        *ASKED,
        answer(None, (VLLM, PARIS), (UUID, ROME)),
        result(VLLM, "Razorbill"),
        result(UUID, "Pelican"),
    ),
    "loop then user": (*LOOP, user("Saffron")),
    "loop then system": (*LOOP, system("Juniper")),
    "loop that was broken off": (*ASKED, answer(None, (OPENAI, PARIS)), user("Saffron")),
    "after a loop": (*LOOP, answer("Rowboat"), user("Saffron")),
    "result without call": (*ASKED, answer("Rowboat"), result(OPENAI, "Razorbill"), user("Saffron")),
    "result first": (result(OPENAI, "Razorbill"), user("Falcon")),
    "without ids": (*ASKED, answer(None, (None, PARIS)), result(None, "Razorbill")),
    "no arguments": (*ASKED, answer(None, (OPENAI, "")), result(OPENAI, "Razorbill")),
    "broken arguments": (*ASKED, answer(None, (OPENAI, '{"city": "Pa')), result(OPENAI, "Razorbill")),
    "arguments in a list": (*ASKED, answer(None, (OPENAI, '["Paris"]')), result(OPENAI, "Razorbill")),
    "empty result": (*ASKED, answer(None, (OPENAI, PARIS)), result(OPENAI, ""), answer("Rowboat"), user("Saffron")),
    "assistant first": (answer("Rowboat"), user("Falcon")),
    "system, assistant first": (system("Sycamore"), answer("Rowboat"), user("Falcon")),
    "two answers": (*ASKED, answer("Rowboat"), answer("Tamarind"), user("Saffron")),
    "two questions": (*ASKED, user("Saffron")),
    "empty answer": (*ASKED, answer(""), user("Saffron")),
    "empty question": (user(""), answer("Rowboat"), user("Falcon")),
    "system alone": (system("Sycamore"),),
    "answer alone": (answer("Rowboat"),),
    "answer last": (*ASKED, answer("Rowboat")),
}


def words(messages: Sequence[Message]) -> list[str]:
    """What was said in turns whose words every template keeps."""
    said: list[str] = []
    for message in messages:
        content: Any = message["content"]
        text = joined_text(content).replace("FalconSaffron", "Falcon")
        said += [text] if text else []
    return said


@pytest.mark.parametrize("template", every_nth(TABLE, 4))
def test_every_shape_renders_and_goes_on(template: str) -> None:
    renderer = Renderer(text_model(template))
    for name, messages in SHAPES.items():
        has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        request = ChatRequest(messages=tuple(messages), tools=(WEATHER,) if has_calls else ())
        rendered = renderer.render(request)
        # A template that puts the system text to the last user message has none where the chat ends otherwise.
        lost = [word for word in words(messages) if word not in rendered.text]
        assert lost == [] or template == "moves_system", (name, lost, rendered.text)
        stable = [b.position for b in rendered.prompt.boundaries if b.kind is BoundaryKind.STABLE]
        assert stable, name
        said = Answer(content="Sunny.")
        then = (*messages, as_message(said), {"role": "user", "content": "Thanks!"})
        grown = renderer.render(ChatRequest(messages=then, tools=request.tools))
        tokens = rendered.prompt.tokens
        assert grown.prompt.tokens[: min(stable)].tolist() == tokens[: min(stable)].tolist(), name
        foretold = renderer.next_turn(rendered, said, branch="user")
        if foretold is not None:
            assert grown.prompt.tokens[: len(foretold)].tolist() == foretold.tokens.tolist(), name
