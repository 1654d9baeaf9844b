"""Stop strings: where the engine stops and where the text is cut."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.chat.answers.answer_format import AnswerFormat
from reprise.chat.answers.parse import AnswerParser
from reprise.chat.answers.stop import StopWatch
from reprise.chat.scan import first_match, num_held
from tests.chat.pieces import WEATHER, piece_model, read, thinking_fields, tool_fields

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MODEL = piece_model(TAGS, **thinking_fields(), **tool_fields("json_tools"))


@pytest.mark.parametrize(
    ("text", "stops", "content", "stop"),
    [
        ("one STOP two", ["STOP"], "one ", "STOP"),
        ("one STO two", ["STOP"], "one STO two", None),
        ("one STO", ["STOP"], "one STO", None),
        ("SSSTOP", ["SSTOP"], "S", "SSTOP"),
        ("abcd", ["abcd", "c"], "ab", "c"),
        ("abcd", ["cd", "bcd"], "a", "bcd"),
        ("日本語", ["本"], "日", "本"),
        ("<think>a STOP b</think>\n\nc STOP d", ["STOP"], "c ", "STOP"),
        ("<think>a</think>\n\nb\n\nc", ["\n\n"], "b", "\n\n"),
        ("a\nb", ["\n"], "a", "\n"),
        ("\na", ["\n"], "", "\n"),
        ("a", [""], "a", None),
        ("STOP", ["STOP"], "", "STOP"),
    ],
)
@pytest.mark.parametrize("cuts", [(1,), (4, 3), (1000,)])
def test_cut(text: str, stops: list[str], content: str, stop: str | None, cuts: tuple[int, ...]) -> None:
    answer, _, parser = read(MODEL, text, cuts=cuts, stops=stops)
    assert answer.content == content
    assert parser.stop == stop


@pytest.mark.parametrize(
    ("text", "least", "content"),
    [
        ("a.b.c", 0, "a"),
        ("a.b.c", 1, "a"),
        ("a.b.c", 2, "a.b"),
        ("a.b.c", 3, "a.b"),
        ("a.b.c", 4, "a.b.c"),
        ("a.b.c", 99, "a.b.c"),
        (" .b.c", 2, " .b"),
        ("<think>a</think>\n\n.b.c", 6, ".b"),
    ],
)
def test_stops_are_not_looked_for_in_the_tokens_that_an_answer_has_to_have(text: str, least: int, content: str) -> None:
    encode: Any = MODEL.encode
    tokens = encode(text, (1,))
    answer_format = AnswerFormat(MODEL, stops=["."], min_tokens=least)
    parser, watch = AnswerParser(answer_format), StopWatch(answer_format)
    for token in tokens:
        parser.feed(token, is_stop=watch(token))
        # They stop at the same token.
        assert watch.stop == parser.stop
        if watch.stop is not None:
            break
    parser.finish()
    assert parser.answer.content == content


def test_a_call_is_not_cut_but_text_behind_it_is() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "STOP"}}</tool_call>b STOP c'
    answer, _, _ = read(MODEL, text, stops=["STOP"], tools=[WEATHER])
    assert len(answer.tool_calls) == 1
    assert answer.content == "b"
    answer, _, _ = read(MODEL, text, stops=["STOP"])
    assert answer.content == '<tool_call>{"name": "f", "arguments": {"a": "'


def test_what_stands_before_the_stop_in_the_last_token_is_kept() -> None:
    encode: Any = MODEL.encode
    parser = AnswerParser(AnswerFormat(MODEL, stops=["STOP"]))
    (token,) = encode("one STOP two", (100,))
    parser.feed(token, is_stop=True)
    parser.finish()
    assert parser.answer.content == "one "


_WORDS = st.lists(
    st.sampled_from(["a", "b", "ab", "ba", "\n", " ", "<think>", "</think>", "<tool_call>", "</tool_call>", "日"]),
    max_size=14,
).map("".join)
_STOPS = st.lists(st.text("ab\n日 ", min_size=1, max_size=3), min_size=1, max_size=3)


@given(text=_WORDS, stops=_STOPS, cuts=st.lists(st.integers(1, 5), min_size=1, max_size=3), has_tools=st.booleans())
def test_the_watch_stops_at_the_token_that_completes_the_stop(
    text: str, stops: list[str], cuts: list[int], has_tools: bool
) -> None:
    tools = [WEATHER] if has_tools else []
    watch = StopWatch(AnswerFormat(MODEL, stops=stops, tools=tools))
    parser = AnswerParser(AnswerFormat(MODEL, stops=stops, tools=tools))
    encode: Any = MODEL.encode
    for token in encode(text, cuts):
        parser.feed(token)
        assert watch(token) == (parser.stop is not None)
        assert watch.stop == parser.stop
        if parser.stop is not None:
            break


@given(text=st.text("ab", max_size=12), needles=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_first_match_is_the_one_a_reader_of_characters_finds(text: str, needles: list[str]) -> None:
    found = first_match(text, needles)
    ends = [stop for stop in range(1, len(text) + 1) if text[:stop].endswith(tuple(needles))]
    if found is None:
        assert not ends
        held = num_held(text, needles)
        assert not any(
            n[:k] == text[len(text) - k :] for n in needles for k in range(held + 1, len(n)) if k <= len(text)
        )
        return
    assert found.stop == ends[0]
    assert text[found.start : found.stop] == needles[found.index]
    assert len(needles[found.index]) == max(len(n) for n in needles if text[: found.stop].endswith(n))
