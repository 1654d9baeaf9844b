"""The date that a template reads is the renderer's."""

from dataclasses import replace
from datetime import datetime

import pytest
from transformers import PreTrainedTokenizerFast

from reprise.chat.rendering.render import Renderer, RenderSettings
from reprise.chat.request import ChatRequest
from reprise.chat.templates.template import read_dates
from tests.chat.text_models import backend_tokenizer, make_text_model

NOON = datetime(2020, 2, 29, 12, 30)
ASK = {"role": "user", "content": "Hi"}


def rendered(template: str, *, freezes_date: bool = False) -> tuple[str, tuple[str, ...]]:
    model = make_text_model(PreTrainedTokenizerFast(tokenizer_object=backend_tokenizer(), chat_template=template))
    renderer = Renderer(model, RenderSettings(freezes_date=freezes_date), clock=lambda: NOON)
    result = renderer.render(ChatRequest(messages=(ASK,)))
    return result.text, result.notes


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ strftime_now('%Y-%m-%d') }}", "2020-02-29"),
        ('{{ strftime_now( "%d %b %Y" ) }} {{ strftime_now("%H:%M") }}', "29 Feb 2020 12:30"),
        ("{%- if strftime_now is defined %}{{ strftime_now('%Y') | int + 1 }}{% endif %}", "2021"),
        ("{%- macro day() %}{{ strftime_now('%A') }}{% endmacro %}{{ day() }}", "Saturday"),
        ("{% for m in messages %}{% set d = strftime_now('%Y') %}{{ d }}{% endfor %}", "2020"),
        # The template's own first line stays as it is, its space too.
        ("\n  {% if true %}\n  {{ strftime_now('%Y') }}\n  {% endif %}", "\n  2020\n"),
        ("  {% if true %}x{% endif %}{{ strftime_now('%Y') }}", "x2020"),
        ("  {{ strftime_now('%Y') }}", "  2020"),
    ],
)
def test_constant_formats_are_answered_by_the_renderers_clock(template: str, text: str) -> None:
    assert rendered(template)[0] == text


def test_the_first_line_is_rendered_as_without_dates() -> None:
    for start in ("\n{{ 1 }}", "\n\n x", "  {% if true %}\ny{% endif %}", "{#- c #}\n z"):
        plain, _ = rendered(start + ".")
        assert rendered(start + ".{{ strftime_now('%Y') }}")[0] == plain + "2020"


def test_a_computed_format_keeps_the_environments_clock() -> None:
    template = "{% set f = '%Y' %}{{ strftime_now(f) }} Hi"
    dates = read_dates(template)
    assert dates.has_dates
    assert not dates.is_controlled
    text, notes = rendered(template, freezes_date=True)
    assert text != "2020 Hi"
    assert "its date cannot be frozen" in notes[-1]


def test_a_source_that_is_not_what_is_rendered_is_not_used() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend_tokenizer(), chat_template="{{ strftime_now('%Y') }}a")
    model = replace(make_text_model(tokenizer), template_source="{{ strftime_now('%Y') }}b")
    text = Renderer(model, clock=lambda: NOON).render(ChatRequest(messages=(ASK,))).text
    assert text == datetime.now().strftime("%Y") + "a"


def test_a_template_without_dates_is_left_alone() -> None:
    dates = read_dates("{% if strftime_now is defined %}x{% endif %}")
    assert not dates.has_dates
    assert dates.options(NOON) == {}
