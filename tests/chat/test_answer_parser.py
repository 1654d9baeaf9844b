"""Reasoning, content and their markup, in any pieces."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.chat.answer import Answer, ContentDelta, ReasoningDelta, ToolCallDelta
from reprise.chat.answers.answer_format import AnswerFormat
from reprise.chat.answers.parse import AnswerParser
from tests.chat.pieces import EOS, WEATHER, piece_model, read, thinking_fields, tool_fields
from tests.chat.text_models import text_model

HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
HEADERS = {
    "initial_state": "header",
    "transitions": {
        "header": [
            ("to=self<|message|>", "reasoning"),
            ("to=user<|message|>", "normal"),
            ("<calls>", "tool"),
        ],
        "reasoning": [("<|eom|>", "header")],
        "normal": [("<|eom|>", "header"), ("<|eot|>", "normal")],
    },
    "tool_start": "<calls>",
    "tool_end": "</calls>",
    "parse_tool_call": lambda text, _tools: json.loads(text),
}
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MODELS = {
    "tags": piece_model(TAGS, **thinking_fields(), **tool_fields("json_tools")),
    "text tags": piece_model((), **thinking_fields(), **tool_fields("json_tools")),
    "channel tag": piece_model(("<|channel>", "<channel|>"), **thinking_fields("<|channel>thought", "<channel|>")),
    "xtml": piece_model(
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        **thinking_fields("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        **tool_fields("kimi_k3"),
        structural_markers=(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
        ),
    ),
    "harmony": piece_model(HARMONY),
    "headers": piece_model(("<|message|>", "<|eom|>", "<|eot|>"), **HEADERS),
    "mistral": piece_model(("[TOOL_CALLS]", "[ARGS]"), **tool_fields("mistral")),
    "plain": piece_model(),
}


def answer(content: str | None, reasoning: str | None = None) -> Answer:
    return Answer(content=content, reasoning=reasoning)


@pytest.mark.parametrize(
    ("model", "text", "expected"),
    [
        ("tags", "<think>\nHm.\n\nYes.\n</think>\n\nHello.\n", answer("Hello.\n", "Hm.\n\nYes.")),
        ("tags", "<think>\n\n</think>\n\nHello", answer("Hello")),
        ("tags", "\n<think>a</think>b", answer("b", "a")),
        ("tags", "<think>a</think>\n\n    code", answer("    code", "a")),
        ("tags", "no thinking\n", answer("no thinking\n")),
        ("tags", "\n\n indented", answer("\n\n indented")),
        ("tags", "<think>a\n</think>b<think>\nc</think>\n\nd", answer("b\n\nd", "a\nc")),
        ("tags", "<think>a<think>b</think>c", answer("c", "ab")),
        ("tags", "<think>cut short\n", answer("", "cut short")),
        ("tags", "</think>\n\nHello", answer("Hello")),
        ("tags", "", answer("")),
        ("text tags", "<think>\n1 < 2 </thin\n</think>\n\na <b", answer("a <b", "1 < 2 </thin")),
        ("text tags", "<think>a</thi", answer("", "a</thi")),
        ("channel tag", "<|channel>thought\nhm<channel|>Hello", answer("Hello", "hm")),
        ("channel tag", "a<|channel>other", answer("a<|channel>other")),
        (
            "xtml",
            "<|open|>think<|sep|>hm<|close|>think<|sep|>"
            "<|open|>response<|sep|>Hello<|close|>response<|sep|><|close|>message<|sep|>",
            answer("Hello", "hm"),
        ),
        ("xtml", "a<|open|>b", answer("a<|open|>b")),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello",
            answer("Hello", "hm"),
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>d",
            answer("bd", "a\nc"),
        ),
        ("harmony", "<|channel|>analysis<|message|>forgot<|channel|>final<|message|>Hello", answer("Hello", "forgot")),
        ("harmony", "<|channel|>analysis", answer("")),
        ("harmony", "No channel at all", answer("No channel at all")),
        (
            "headers",
            "to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Hello<|eot|>",
            answer("Hello", "hm"),
        ),
        ("headers", " to=user<|message|>Hello", answer("Hello")),
        ("headers", "Tomorrow", answer("Tomorrow")),
        ("headers", "to", answer("to")),
        ("mistral", "Hello [TOOL", answer("Hello [TOOL")),
        ("plain", "<think>\nis text</think>", answer("<think>\nis text</think>")),
    ],
)
@pytest.mark.parametrize("cuts", [(1,), (2, 3), (1000,)])
def test_prompt_parts(model: str, text: str, expected: Answer, cuts: tuple[int, ...]) -> None:
    got, _, _ = read(MODELS[model], text, cuts=cuts, is_ended=False, tools=[WEATHER])
    assert got == expected


def test_a_tag_that_the_model_spells_out_is_text() -> None:
    model = MODELS["tags"]
    parser = AnswerParser(AnswerFormat(model, is_thinking_open=True))
    vocabulary = model.detokenizer().vocabulary  # type: ignore[attr-defined]
    deltas = parser.feed(vocabulary.token(b"</think>"))
    deltas += parser.feed(model.splitters["</think>"])
    deltas += parser.feed(vocabulary.token(b"yes"))
    assert deltas == [ReasoningDelta("</think>"), ContentDelta("yes")]


def test_thinking_that_the_prompt_opened() -> None:
    got, deltas, parser = read(MODELS["tags"], "a b\n</think>\n\nc", cuts=(1,), is_thinking_open=True)
    assert got == answer("c", "a b")
    assert parser.num_reasoning_tokens == 4
    assert deltas[0] == ReasoningDelta("a"), "text that is certain does not wait"


def test_reasoning_tokens_are_counted_without_their_markers() -> None:
    _, _, parser = read(MODELS["tags"], "<think>abc</think>de<think>fg</think>h", cuts=(1,))
    assert parser.num_reasoning_tokens == 5


def test_content_that_the_prompt_opened() -> None:
    for name in ("tags", "harmony", "headers"):
        got, _, _ = read(MODELS[name], "\n and so on", is_content_open=True)
        assert got == answer("\n and so on"), name


def test_the_token_that_ends_the_generation_is_no_text() -> None:
    parser = AnswerParser(AnswerFormat(MODELS["plain"]))
    assert parser.feed(0, is_stop=True) == []
    assert parser.finish() == []
    assert parser.feed(0) == [ContentDelta(EOS)], "sampled where it is no stop, it is text"


def test_a_token_outside_of_the_vocabulary_has_no_text() -> None:
    parser = AnswerParser(AnswerFormat(MODELS["tags"]))
    assert parser.feed(10**7) == []
    assert parser.finish() == []


def test_a_real_tokenizer_keeps_spaces_behind_special_tokens() -> None:
    model = text_model()
    parser = AnswerParser(AnswerFormat(model, tools=[WEATHER]))
    text = "<think>\nLet me think — 日本\n</think>\n\n It is sunny. <tool_call>\n" + CALL + "\n</tool_call>"
    deltas = [delta for token in model.encode(text) for delta in parser.feed(token)]
    deltas += parser.finish()
    assert parser.answer.reasoning == "Let me think — 日本"
    assert parser.answer.content == " It is sunny."
    assert [d.name for d in deltas if isinstance(d, ToolCallDelta) and d.name is not None] == ["get_weather"]


_FRAGMENTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|channel|>",
        "<|message|>",
        "<|start|>assistant",
        "<|end|>",
        "<|call|>",
        "analysis",
        "commentary to=functions.get_weather ",
        "final",
        "<|open|>",
        "<|close|>",
        "<|sep|>",
        "think",
        "response",
        "tools",
        "<|channel>thought",
        "<channel|>",
        "<|eom|>",
        "<|eot|>",
        "to=self<|message|>",
        "to=user",
        "<calls>",
        "</calls>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "get_weather",
        CALL,
        '{"city": "Paris"}',
        "\n",
        "\n\n",
        " ",
        "a",
        "é日",
        "<",
        "stop",
    ]
)
_TEXTS = st.lists(_FRAGMENTS | st.text(max_size=4), max_size=14).map("".join)
_CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=5)
_STOPS = st.lists(st.sampled_from(["stop", "\n", "\n\n", "aa", "<a", "pst", "日", "</tool_call>"]), max_size=3)


_FACTS = st.fixed_dictionaries(
    {
        "tools": st.sampled_from([[], [WEATHER]]),
        "stops": _STOPS,
        "is_thinking_open": st.booleans(),
        "is_ended": st.booleans(),
    }
)


@given(name=st.sampled_from(sorted(MODELS)), text=_TEXTS, cuts=_CUTS, other=_CUTS, facts=_FACTS)
def test_the_pieces_do_not_matter(
    name: str, text: str, cuts: list[int], other: list[int], facts: dict[str, Any]
) -> None:
    """Also: nothing raises, and the deltas joined are the answer (checked in `read`)."""
    one, _, first = read(MODELS[name], text, cuts=cuts, **facts)
    two, _, second = read(MODELS[name], text, cuts=other, **facts)
    assert one == two
    assert first.stop == second.stop


@given(name=st.sampled_from(sorted(MODELS)), pieces=st.lists(st.binary(max_size=4), max_size=20), is_open=st.booleans())
def test_no_bytes_make_it_raise(name: str, pieces: list[bytes], is_open: bool) -> None:
    model = MODELS[name]
    vocabulary = model.detokenizer().vocabulary  # type: ignore[attr-defined]
    parser = AnswerParser(AnswerFormat(model, is_thinking_open=is_open, tools=[WEATHER]))
    for piece in pieces:
        for delta in parser.feed(vocabulary.token(piece)):
            assert delta
    parser.finish()
    (parser.answer.content or "").encode()
