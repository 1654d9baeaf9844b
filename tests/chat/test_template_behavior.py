"""What templates do to earlier turns, as seen from outside: against templates whose behaviour we know."""

from datetime import datetime

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from reprise.chat.templates.template_behavior import Dates, Place, TemplateBehavior, Thoughts, find_behavior
from reprise.chat.text_model import TextModel
from reprise.core.errors import BadRequest
from tests.chat.text_models import backend_tokenizer, make_text_model, text_model


def habits_of(name: str) -> TemplateBehavior:
    return find_behavior(text_model(name))


def with_template(source: str) -> TextModel:
    return make_text_model(
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(backend_tokenizer().to_str()),
            eos_token="<|im_end|>",
            chat_template=source,
        )
    )


@pytest.mark.parametrize(
    ("name", "thoughts", "in_loop", "after_loop", "opens"),
    [
        ("strips_thinking", Thoughts.NONE, Thoughts.NONE, Thoughts.NONE, False),
        ("keeps_in_loop", Thoughts.STRIPPED, Thoughts.KEPT, Thoughts.STRIPPED, False),
        ("keeps_everything", Thoughts.KEPT, Thoughts.KEPT, Thoughts.KEPT, False),
        ("empty_block", Thoughts.EMPTIED, Thoughts.KEPT, Thoughts.EMPTIED, False),
        ("think_in_prompt", Thoughts.STRIPPED, Thoughts.KEPT, Thoughts.STRIPPED, True),
        ("channels", Thoughts.STRIPPED, Thoughts.KEPT, Thoughts.STRIPPED, False),
        ("thoughts_or_words", Thoughts.STRIPPED, Thoughts.KEPT, Thoughts.STRIPPED, False),
        ("alternates", Thoughts.NONE, None, None, False),
    ],
)
def test_what_becomes_of_thinking(
    name: str, thoughts: Thoughts, in_loop: Thoughts | None, after_loop: Thoughts | None, opens: bool
) -> None:
    behavior = habits_of(name)
    assert behavior.thoughts is thoughts
    assert behavior.in_tool_loop is in_loop
    assert behavior.after_tool_loop is after_loop
    assert behavior.opens_thinking is opens


def test_thinking_that_a_template_cuts_out_of_the_answers_text() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert find_behavior(with_template(source)).thoughts is Thoughts.STRIPPED


def test_the_prompts_end() -> None:
    assert habits_of("keeps_in_loop").keeps_prompt_end is True
    assert habits_of("think_in_prompt").keeps_prompt_end is False
    assert habits_of("single_turn").keeps_prompt_end is None


def test_an_option_that_keeps_thinking_is_found_by_trying() -> None:
    assert habits_of("preserve_switch").to_keep == {"preserve_thinking": True}
    assert habits_of("keeps_in_loop").to_keep == {}
    assert habits_of("keeps_everything").to_keep == {}


@pytest.mark.parametrize(
    ("name", "system", "tools"),
    [
        ("keeps_in_loop", Place.HEAD, Place.HEAD),
        ("moves_tools", Place.HEAD, Place.LAST_TURN),
        ("moves_system", Place.LAST_TURN, Place.LAST_TURN),
        ("plain_text", Place.HEAD, Place.ABSENT),
        ("single_turn", Place.REFUSED, Place.REFUSED),
    ],
)
def test_where_the_system_prompt_and_the_tools_stand(name: str, system: Place, tools: Place) -> None:
    behavior = habits_of(name)
    assert (behavior.system, behavior.tools) == (system, tools)


_REST = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "dates"),
    [
        (_REST, Dates.NONE),
        ("{{ strftime_now('%d %b %Y') }}" + _REST, Dates.ALWAYS),
        (
            "{% if messages[0].role != 'system' %}{{ strftime_now('%d %b %Y') }}{% endif %}" + _REST,
            Dates.WITHOUT_SYSTEM,
        ),
        # A format that is not known before the template runs: the clock is the environment's.
        ("{% set form = '%Y-' ~ '%m' %}{{ strftime_now(form) }}" + _REST, Dates.ALWAYS),
        # Written, but asked for in a branch that is never taken.
        ("{% if false %}{{ strftime_now('%Y') }}{% endif %}" + str(datetime.now().year) + _REST, Dates.NONE),
    ],
)
def test_dates(source: str, dates: Dates) -> None:
    assert find_behavior(with_template(source)).dates is dates


def test_a_model_without_a_template_and_one_that_refuses_everything() -> None:
    with pytest.raises(BadRequest, match="no chat template"):
        find_behavior(text_model(None))
    with pytest.raises(BadRequest, match="one user message"):
        find_behavior(text_model("wants_fields"))
