"""The renderer: what a request becomes, what survives the next one, and what it refuses."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from reprise.chat.answer import Answer, ToolCall
from reprise.chat.messages.history import as_message
from reprise.chat.rendering.render import Renderer, RenderSettings
from reprise.chat.request import ChatRequest, Message
from reprise.chat.templates.rendered import PartKind, Rendered
from reprise.chat.text_model import TextModel
from reprise.core.errors import BadRequest, TemplateFailed
from reprise.core.prompt import BoundaryKind
from tests.chat.replay import play, spoken
from tests.chat.shapes import (
    ASK,
    CALL,
    CONVERSATION,
    RESULT,
    SHAPES,
    TOLD,
    WEATHER,
    assistant,
    system,
    tool,
    user,
)
from tests.chat.test_piecewise_tokenizer import counting, spelled_out
from tests.chat.text_models import backend_tokenizer, make_text_model, template_names, text_model
from tests.matrix import examples

CHATTY = [name for name in template_names() if name != "single_turn"]
WITH_TOOLS = [name for name in CHATTY if name not in ("alternates", "plain_text", "takes_parts")]

# Real words begin with a letter; a text that begins with a line break may merge with the one before it.
WORDS = st.text(alphabet="abxyzAB 019.,\n<>é世", max_size=12).map(lambda text: "q" + text.strip())
HISTORY = st.lists(st.tuples(WORDS, WORDS, st.none() | WORDS), max_size=3)


def model_with(template: str) -> TextModel:
    """A model with a template of these few words."""
    return make_text_model(PreTrainedTokenizerFast(tokenizer_object=backend_tokenizer(), chat_template=template))


def history(turns: list[tuple[str, str, str | None]]) -> tuple[Message, ...]:
    return tuple(
        message for asked, answered, reasoning in turns for message in (user(asked), assistant(answered, reasoning))
    )


def at(rendered: Rendered, kind: BoundaryKind) -> list[int]:
    return [b.position for b in rendered.prompt.boundaries if b.kind is kind]


def agrees(rendered: Rendered, other: Rendered, position: int) -> bool:
    return rendered.prompt.tokens[:position].tolist() == other.prompt.tokens[:position].tolist()


@pytest.mark.parametrize("template", CHATTY)
@given(turns=HISTORY, asked=WORDS, has_system=st.booleans())
@settings(max_examples=examples(8), deadline=None)
def test_the_tokens_are_those_of_the_text(
    template: str, turns: list[tuple[str, str, str | None]], asked: str, has_system: bool
) -> None:
    model = text_model(template)
    messages = (*((system(),) if has_system else ()), *history(turns), user(asked))
    rendered = Renderer(model).render(ChatRequest(messages=messages))
    assert model.decode(rendered.prompt.tokens.tolist()) == rendered.text
    assert rendered.prompt.tokens.tolist() == model.encode(rendered.text)


@pytest.mark.parametrize("template", CHATTY)
@given(turns=HISTORY, asked=WORDS, answered=WORDS, reasoning=st.none() | WORDS, then=WORDS, other=WORDS)
@settings(max_examples=examples(8), deadline=None)
def test_boundaries_survive(
    *,
    template: str,
    turns: list[tuple[str, str, str | None]],
    asked: str,
    answered: str,
    reasoning: str | None,
    then: str,
    other: str,
) -> None:
    renderer = Renderer(text_model(template))
    messages = (system(), *history(turns), user(asked))
    rendered = renderer.render(ChatRequest(messages=messages))
    grown = renderer.render(ChatRequest(messages=(*messages, assistant(answered, reasoning), user(then))))
    (stable,) = at(rendered, BoundaryKind.STABLE)
    assert agrees(rendered, grown, stable)
    edited = renderer.render(ChatRequest(messages=(*messages[:-1], user(other))))
    (last_user,) = at(rendered, BoundaryKind.LAST_USER)
    assert agrees(rendered, edited, last_user)
    another = renderer.render(ChatRequest(messages=(system(), user(other))))
    assert all(agrees(rendered, another, position) for position in at(rendered, BoundaryKind.SYSTEM))


@pytest.mark.parametrize("template", WITH_TOOLS)
@given(asked=WORDS, reasoning=st.none() | WORDS, result=WORDS, then=WORDS, answered=WORDS)
@settings(max_examples=examples(8), deadline=None)
def test_boundaries_survive_in_a_tool_loop(
    *, template: str, asked: str, reasoning: str | None, result: str, then: str, answered: str
) -> None:
    renderer = Renderer(text_model(template))
    messages = (user(asked), assistant(None, reasoning, city="Paris"), tool(result))
    rendered = renderer.render(ChatRequest(messages=messages, tools=(WEATHER,)))
    by_user = (*messages, assistant(answered, reasoning), user(then))
    by_tool = (*messages, assistant(None, city="Rome"), tool(then))
    after_user = renderer.render(ChatRequest(messages=by_user, tools=(WEATHER,)))
    after_tool = renderer.render(ChatRequest(messages=by_tool, tools=(WEATHER,)))
    stable = at(rendered, BoundaryKind.STABLE)
    assert agrees(rendered, after_user, min(stable))
    assert any(agrees(rendered, after_tool, position) for position in stable)


@pytest.mark.parametrize("template", CHATTY)
@given(turns=HISTORY, answered=WORDS, reasoning=st.none() | WORDS, then=WORDS)
@settings(max_examples=examples(8), deadline=None)
def test_the_next_turn_begins_as_foretold(
    template: str, turns: list[tuple[str, str, str | None]], answered: str, reasoning: str | None, then: str
) -> None:
    model = text_model(template)
    renderer = Renderer(model)
    messages = (system(), *history(turns), ASK)
    rendered = renderer.render(ChatRequest(messages=messages))
    answer = Answer(content=answered, reasoning=reasoning)
    sampled = spelled_out(spoken(answer, rendered, has_channels=template == "channels"))
    renderer.learn(rendered, sampled, answer)
    foretold = renderer.next_turn(rendered, answer, branch="user")
    assert foretold is not None
    returns = all(reasoning is None for *_, reasoning in turns) and turns != []
    message = as_message(answer, has_reasoning=not returns)
    grown = renderer.render(ChatRequest(messages=(*messages, message, user(then))))
    assert grown.prompt.tokens[: len(foretold)].tolist() == foretold.tokens.tolist()
    (stable,) = at(rendered, BoundaryKind.STABLE)
    assert len(foretold) > stable


@pytest.mark.parametrize("template", WITH_TOOLS)
def test_the_next_tool_result_begins_as_foretold(template: str) -> None:
    renderer = Renderer(text_model(template))
    rendered = renderer.render(ChatRequest(messages=(ASK,), tools=(WEATHER,)))
    answer = Answer(
        content=None,
        reasoning="Hm.",
        tool_calls=(ToolCall(id="call00001", name="get_weather", arguments='{"city": "Paris"}'),),
    )
    foretold = renderer.next_turn(rendered, answer, branch="tool")
    assert foretold is not None
    grown = renderer.render(ChatRequest(messages=(ASK, as_message(answer), RESULT), tools=(WEATHER,)))
    assert grown.prompt.tokens[: len(foretold)].tolist() == foretold.tokens.tolist()
    assert renderer.next_turn(rendered, Answer(content="Sunny."), branch="tool") is None


def test_nothing_is_foretold_where_the_template_refuses() -> None:
    # Nothing but this one question, neither behind it nor joined with it.
    refusal = "{{ raise_exception('one question only') }}"
    only = f"{{% if messages | length > 1 or messages[0].content != '{ASK['content']}' %}}{refusal}{{% endif %}}"
    renderer = Renderer(model_with(only + "{{ messages[0].content }}<|im_end|>"))
    rendered = renderer.render(ChatRequest(messages=(ASK,)))
    assert renderer.next_turn(rendered, Answer(content="Sunny."), branch="user") is None
    assert at(rendered, BoundaryKind.STABLE) == []
    assert rendered.notes == ("no stable boundary: the chat template refuses every stand-in for the next turn",)


def test_nothing_is_foretold_that_the_prompt_does_not_hold_already() -> None:
    renderer = Renderer(model_with("{{ messages[-1].content }}<|im_end|>"))
    rendered = renderer.render(ChatRequest(messages=(ASK,)))
    assert renderer.next_turn(rendered, Answer(content="Sunny."), branch="user") is None


def test_a_stand_in_that_merges_with_the_prompt_moves_the_boundary() -> None:
    model = model_with("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:")

    def encode(text: str) -> list[int]:
        # One letter, one token; but for one seam, which only one of the stand-ins shows.
        return [ord(letter) for letter in text.replace(":B", "\u2028")]

    def decode(tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens)).replace("\u2028", ":B")

    odd = replace(model, encode=encode, decode=decode, splitters={})
    rendered = Renderer(odd).render(ChatRequest(messages=(ASK,)))
    assert at(rendered, BoundaryKind.STABLE) == [len(rendered.prompt) - 1]


def test_a_continued_answer_goes_on_where_it_ends() -> None:
    renderer = Renderer(text_model())
    rendered = renderer.render(SHAPES["answer to continue"])
    assert rendered.text.endswith("assistant\nThe weather is")
    foretold = renderer.next_turn(rendered, Answer(content=" fine."), branch="user")
    assert foretold is not None
    assert "The weather is fine.<|im_end|>" in text_model().decode(foretold.tokens.tolist())


@pytest.mark.parametrize("template", CHATTY)
def test_sampled_tokens_are_the_next_prompts_tokens_where_everything_is_kept(template: str) -> None:
    model = text_model(template)
    renderer = Renderer(model)
    canonical = Renderer(model, RenderSettings(has_canonical_tokens=True))
    rendered = renderer.render(ChatRequest(messages=(ASK,)))
    if rendered.is_thinking_open or template in ("plain_text", "channels", "thoughts_or_words", "empty_block"):
        pytest.skip("this template does not give the answer back as it was sampled")
    answer = Answer(content="It is sunny in Paris.")
    sampled = spelled_out("It is sunny in Paris.")
    for each in (renderer, canonical):
        each.learn(each.render(ChatRequest(messages=(ASK,))), [*sampled, *model.encode("<|im_end|>")], answer)
    grown = ChatRequest(messages=(ASK, as_message(answer), user("Thanks!")))
    expected = [*rendered.prompt.tokens.tolist(), *sampled]
    if template not in ("moves_system", "moves_tools"):
        assert renderer.render(grown).prompt.tokens[: len(expected)].tolist() == expected
    assert canonical.render(grown).prompt.tokens.tolist() == model.encode(canonical.render(grown).text)


def test_a_long_chat_that_grows_costs_the_tokenizer_what_grew() -> None:
    model, calls = counting(text_model("think_in_prompt"))
    renderer = Renderer(model)
    chat: list[Message] = [system()]
    for number in range(300):
        chat += [user(f"Question {number}: " + "what is the weather? " * 10), assistant(f"Answer {number}.")]
    renderer.render(ChatRequest(messages=(*chat, ASK)))
    calls.clear()
    rendered = renderer.render(ChatRequest(messages=(*chat, ASK, assistant("It is sunny."), user("And tomorrow?"))))
    assert len(rendered.text) > 60_000
    assert sum(calls) < 200


def test_an_empty_list_of_messages_is_refused() -> None:
    with pytest.raises(BadRequest, match="messages"):
        Renderer(text_model()).render(ChatRequest(messages=()))


def test_a_model_without_template_is_refused() -> None:
    with pytest.raises(BadRequest, match="no chat template"):
        Renderer(text_model(None)).render(ChatRequest(messages=(ASK,)))


def test_the_templates_own_sentence_reaches_the_user() -> None:
    with pytest.raises(TemplateFailed, match=r"chat template refused the chat.*: Only one message is supported\.$"):
        Renderer(text_model("single_turn")).render(ChatRequest(messages=(ASK, TOLD, ASK)))


def test_only_an_assistant_message_can_be_continued() -> None:
    with pytest.raises(BadRequest, match="assistant"):
        Renderer(text_model()).render(ChatRequest(messages=(ASK,), continue_final=True))


@pytest.mark.parametrize("name", ["messages", "chat_template", "tools", "template_dates"])
def test_options_that_are_not_the_templates_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        Renderer(text_model("dated")).render(ChatRequest(messages=(ASK,), template_options={name: "x"}))


def test_pictures_are_refused_by_a_template_of_text() -> None:
    picture = user([{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x"}}])
    with pytest.raises(BadRequest, match="text only"):
        Renderer(text_model()).render(ChatRequest(messages=(picture,)))


def test_parts_become_one_text_unless_the_template_takes_parts() -> None:
    request = SHAPES["list of parts"]
    assert "What is this? A test." in Renderer(text_model()).render(request).text
    assert "What is this? A test." in Renderer(text_model("takes_parts")).render(request).text


def test_thinking_is_open_where_the_generation_prompt_opens_it() -> None:
    assert Renderer(text_model("think_in_prompt")).render(ChatRequest(messages=(ASK,))).is_thinking_open
    assert not Renderer(text_model("keeps_in_loop")).render(ChatRequest(messages=(ASK,))).is_thinking_open
    # A user who writes the markup opens nothing.
    tricky = ChatRequest(messages=(user("What does <think> mean?"),))
    for request in (tricky, replace(tricky, tools=(WEATHER,))):
        assert not Renderer(text_model("keeps_in_loop")).render(request).is_thinking_open
    off = ChatRequest(messages=(ASK,), template_options={"enable_thinking": False})
    assert not Renderer(text_model("thinking_off_mark")).render(off).is_thinking_open


def test_a_continued_answer_that_thinks_is_open() -> None:
    request = ChatRequest(messages=(ASK, assistant("<think>\nLet me")), continue_final=True)
    assert Renderer(text_model()).render(request).is_thinking_open


def test_the_parts_of_a_prompt() -> None:
    model = text_model("keeps_in_loop")
    rendered = Renderer(model).render(ChatRequest(messages=(system(), ASK, CALL, RESULT), tools=(WEATHER,)))
    texts = {str(part): rendered.text[part.chars.start : part.chars.stop] for part in rendered.parts}
    assert texts["message 1 (user)"] == "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n"
    assert texts["message 2 (assistant)"].startswith("<|im_start|>assistant\n<think>\nI need the weather tool.")
    assert texts["message 3 (tool)"].startswith("<|im_start|>tool\n")
    assert texts["generation prompt"] == "<|im_start|>assistant\n"
    assert texts["tools"].startswith('"get_weather"')
    chars = [rendered.char_at(at, model.decode) for at in range(len(rendered.prompt))]
    for part in rendered.parts:
        begun = [part.chars.start <= char < part.chars.stop for char in chars]
        decoded = model.decode(rendered.prompt.tokens[begun].tolist())
        if part.kind is not PartKind.TOOLS:
            assert decoded == texts[str(part)]


class WallClock:
    def __init__(self) -> None:
        self.now = datetime(2026, 3, 1, 23, 59)

    def __call__(self) -> datetime:
        return self.now


def test_a_date_changes_at_midnight_unless_it_is_frozen() -> None:
    clock = WallClock()
    live = Renderer(text_model("dated"), clock=clock)
    frozen = Renderer(text_model("dated"), RenderSettings(freezes_date=True), clock=clock)
    first = ChatRequest(messages=(ASK,))
    second = ChatRequest(messages=(ASK, TOLD, user("Thanks!")))
    assert "Today is 01 March 2026." in live.render(first).text
    assert "Today is 01 March 2026." in frozen.render(first).text
    clock.now += timedelta(minutes=2)
    assert "Today is 02 March 2026." in live.render(second).text
    assert "Today is 01 March 2026." in frozen.render(second).text
    # Another chat has its own first day.
    assert "Today is 02 March 2026." in frozen.render(ChatRequest(messages=(user("Hello."),))).text


def test_a_dropped_reasoning_is_put_back_where_it_was() -> None:
    settings = RenderSettings(restores_reasoning=True)
    for drops in (True, False):
        model = text_model("keeps_in_loop")
        request = ChatRequest(messages=(system(),), tools=(WEATHER,))
        turns = play(
            Renderer(model, settings), model, CONVERSATION[1:3], request=request, settles=False, drops_reasoning=drops
        )
        assert "I need the weather tool." in turns[-1].rendered.text
        assert turns[-1].computed < 25
        assert turns[-1].rendered.notes == (("reasoning put back into messages: 1",) if drops else ())


def test_reasoning_is_put_back_only_into_the_same_answer() -> None:
    renderer = Renderer(text_model("keeps_everything"), RenderSettings(restores_reasoning=True))
    rendered = renderer.render(ChatRequest(messages=(ASK,)))
    renderer.learn(rendered, [1], Answer(content="It is sunny.", reasoning="Secret."))
    same = ChatRequest(messages=(ASK, assistant("It is sunny. "), user("Thanks!")))
    assert "Secret." in renderer.render(same).text
    for messages in (
        (ASK, assistant("It is rainy."), user("Thanks!")),
        (user("Something else?"), assistant("It is sunny."), user("Thanks!")),
    ):
        assert "Secret." not in renderer.render(ChatRequest(messages=messages)).text


def test_reasoning_goes_where_the_template_looks_for_it() -> None:
    """As gpt-oss does: under another key, and for a tool call not beside words."""
    thinks_aloud = assistant("Let me look.", "Look it up.", city="Paris")
    for words, expected in ((None, "Look it up."), ("Let me look.", "Look it up.\n\nLet me look.")):
        messages = (ASK, {**thinks_aloud, "content": words}, tool("Sunny."))
        text = Renderer(text_model("thoughts_or_words")).render(ChatRequest(messages=messages)).text
        assert f"<|channel|>analysis<|message|>{expected}<|im_end|>" in text
        usual = Renderer(text_model("channels")).render(ChatRequest(messages=messages)).text
        assert "<|channel|>analysis<|message|>Look it up.<|im_end|>" in usual


def test_reasoning_that_a_chat_has_not_had_yet_is_foretold_where_the_template_looks_for_it() -> None:
    model = text_model("thoughts_or_words")
    renderer = Renderer(model)
    rendered = renderer.render(ChatRequest(messages=(ASK,)))
    call = ToolCall(id="call_0", name="get_weather", arguments='{"city": "Paris"}')
    foretold = renderer.next_turn(
        rendered, Answer(content=None, reasoning="Look it up.", tool_calls=(call,)), branch="tool"
    )
    assert foretold is not None
    assert "analysis<|message|>Look it up.<|im_end|>" in model.decode(foretold.tokens.tolist())
