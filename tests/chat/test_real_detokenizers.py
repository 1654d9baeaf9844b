"""Answers through mlx-lm's own streaming detokenizers."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer

from reprise.chat.answers.answer_format import AnswerFormat
from reprise.chat.answers.parse import AnswerParser
from reprise.chat.text_model import TextModel
from tests.chat.pieces import WEATHER
from tests.chat.text_models import fast_tokenizer, text_model

KINDS = {"bpe": BPEStreamingDetokenizer, "naive": NaiveStreamingDetokenizer}


def model_with(kind: str) -> TextModel:
    tokenizer: Any = fast_tokenizer("strips_thinking")
    return replace(text_model(), detokenizer=lambda: KINDS[kind](tokenizer))


MODELS = {kind: model_with(kind) for kind in KINDS}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🌧"}}\n</tool_call>'


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_answer(kind: str) -> None:
    model = MODELS[kind]
    parser = AnswerParser(
        AnswerFormat(model, tools=[WEATHER], is_thinking_open=True, context=model.encode("assistant\n<think>\n"))
    )
    for token in model.encode("日本 — so it is.\n</think>\n\n  indented\n- 🌧️ rain\n\n" + CALL):
        parser.feed(token)
    parser.finish()
    assert parser.answer.reasoning == "日本 — so it is."
    assert parser.answer.content == "  indented\n- 🌧️ rain"
    assert [call.arguments for call in parser.answer.tool_calls] == ['{"city": "Zürich 🌧"}']


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_text_that_goes_on_keeps_its_space(kind: str) -> None:
    model = MODELS[kind]
    parser = AnswerParser(AnswerFormat(model, is_content_open=True, context=model.encode("The weather is")))
    for token in model.encode(" sunny."):
        parser.feed(token)
    parser.finish()
    assert parser.answer.content == " sunny."


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(tokens=st.lists(st.integers(0, 700), max_size=30), is_open=st.booleans())
def test_no_tokens_make_it_raise(kind: str, tokens: list[int], is_open: bool) -> None:
    parser = AnswerParser(AnswerFormat(MODELS[kind], tools=[WEATHER], is_thinking_open=is_open, stops=["a"]))
    for token in tokens:
        parser.feed(token)
    parser.finish()
    (parser.answer.content or "").encode()
