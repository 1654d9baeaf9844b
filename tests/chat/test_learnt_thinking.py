"""Markers of reasoning learnt from templates: an answer in them is separated, and history is written in them."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from reprise.chat.answers.thinking_learning import with_learnt_thinking
from reprise.chat.calls.call_learning import learn_calls
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest, Message
from reprise.chat.text_model import TextModel
from tests.chat.pieces import read
from tests.chat.test_learnt_calls import TOOLS, model_with

_THOUGHT = "{{ m.reasoning_content }}"
_PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family writes answers. `prompt` is what the generation prompt has behind the role."""

    specials: tuple[str, ...] = ()
    thinking: str = ""
    words: str = "{{ m.content }}"
    call: str = "<call>{{ c.name }}<args>{{ c.arguments | tojson }}</call>"
    prompt: str = ""
    start: str = ""
    end: str = ""
    around: tuple[str, ...] = ()

    def model(self) -> TextModel:
        source = (
            "{% for m in messages %}<|role|>{{ m.role }}\n{% if m.role == 'assistant' %}"
            + (f"{{% if m.reasoning_content %}}{self.thinking}{{% endif %}}" if self.thinking else "")
            + "{% if m.tool_calls %}{% for t in m.tool_calls %}{% set c = t.function %}"
            + self.call
            + "{% endfor %}{% else %}"
            + self.words
            + "{% endif %}{% else %}{{ m.content }}{% endif %}<|eos|>{% endfor %}"
            + "{% if add_generation_prompt %}<|role|>assistant\n"
            + self.prompt
            + "{% endif %}"
        )
        learnt = with_learnt_thinking(model_with(source, ("<|role|>", *self.specials)))
        return replace(learnt, calls=learn_calls(learnt))


FAMILIES = {
    "tags": Family(thinking=f"<seed:think>{_THOUGHT}</seed:think>\n", start="<seed:think>", end="</seed:think>"),
    "special tokens": Family(
        specials=("<|t|>", "<|/t|>"), thinking=f"<|t|>{_THOUGHT}<|/t|>", prompt="<|t|>", start="<|t|>", end="<|/t|>"
    ),
    # An answer without reasoning has the end alone.
    "an end without a start": Family(
        thinking=f"<mm:think>{_THOUGHT}", words="</mm:think>{{ m.content }}", start="<mm:think>", end="</mm:think>"
    ),
    "parts of the content": Family(
        specials=("[THINK]", "[/THINK]"),
        words=_PARTS,
        call=_PARTS + Family.call,
        start="[THINK]",
        end="[/THINK]",
    ),
    # Only beside a call; content stands between tokens of its own.
    "beside calls alone": Family(
        specials=("<|T|>", "<|/T|>", "<|R|>", "<|/R|>"),
        words="<|R|>{{ m.content }}<|/R|>",
        call="{% if m.reasoning_content %}<|T|>" + _THOUGHT + "<|/T|>{% endif %}" + Family.call,
        start="<|T|>",
        end="<|/T|>",
        around=("<|R|>", "<|/R|>"),
    ),
    "begun by the prompt in words": Family(
        thinking=f"{_THOUGHT}\n[BEGIN FINAL RESPONSE]\n",
        prompt="Here are my reasoning steps:\n",
        start="Here are my reasoning steps:",
        end="[BEGIN FINAL RESPONSE]",
    ),
    "a message of its own": Family(
        specials=("<|think|>", "<|end|>", "<|begin|>", "<|content|>"),
        thinking=f"<|think|>{_THOUGHT}<|end|><|begin|>assistant",
        words="<|content|>{{ m.content }}",
        start="<|think|>",
        end="<|end|><|begin|>assistant",
        around=("<|content|>",),
    ),
}
MODELS = {name: family.model() for name, family in FAMILIES.items()}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_markers_are_those_of_the_template(name: str) -> None:
    model, family = MODELS[name], FAMILIES[name]
    assert (model.think_start, model.think_end) == (family.start, family.end)
    assert model.structural_markers == family.around
    assert model.decode(model.think_end_tokens) == family.end


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("then_calls", [False, True])
def test_an_answer_is_separated(name: str, *, then_calls: bool) -> None:
    model, family = MODELS[name], FAMILIES[name]
    opening, closing = (*family.around, "", "")[:2]
    call = '<call>look-up<args>{"n": 3}</call>'
    is_open = family.prompt != ""
    text = f"{'' if is_open else family.start}Hm, so.{family.end}" + (call if then_calls else f"{opening}Hi!{closing}")
    answer = read(model, text, is_thinking_open=is_open, tools=TOOLS, cuts=(2,))[0]
    assert (answer.reasoning, answer.content) == ("Hm, so.", None if then_calls else "Hi!")
    assert [call.name for call in answer.tool_calls] == (["look-up"] if then_calls else [])


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_prompt_says_whether_thinking_is_open_and_has_the_thoughts(name: str) -> None:
    call: Any = {"id": "a1B2c3D4e", "type": "function", "function": {"name": "look-up", "arguments": '{"n": 3}'}}
    messages: tuple[Message, ...] = (
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": None, "reasoning_content": "Thimble", "tool_calls": [call]},
        {"role": "tool", "content": "seen", "tool_call_id": "a1B2c3D4e"},
    )
    rendered = Renderer(MODELS[name]).render(ChatRequest(messages=messages, tools=tuple(TOOLS)))
    assert rendered.is_thinking_open == (FAMILIES[name].prompt != "")
    assert "Thimble" in rendered.text
    assert rendered.notes == ("the chat template does not show the tools to the model",)


def test_what_is_known_stays_and_what_is_not_shown_is_not_made_up() -> None:
    known = replace(MODELS["tags"], think_start="<a>", think_end="</a>")
    assert with_learnt_thinking(known).think_start == "<a>"
    # Without a generation prompt nothing says that what stands before words is not the role.
    plain = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|m|>{% else %}<|role|>{% endif %}"
        "{{ m.content }}<|eos|>{% endfor %}"
    )
    # What opens a thought opens words too.
    channel = (
        "{% for m in messages %}<|role|>{{ m.role }}<|m|>{% if m.reasoning_content %}{{ m.reasoning_content }}<|e|>"
        "<|role|>assistant<|m|>{% endif %}{{ m.content }}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}<|role|>assistant{% endif %}"
    )
    for source, around in ((plain, ()), (channel, ("<|m|>",))):
        model = with_learnt_thinking(model_with(source, ("<|role|>", "<|m|>", "<|e|>")))
        assert (model.think_start, model.structural_markers) == (None, around)
