"""Tool calls in every format that mlx-lm parses, streamed."""

import json
import pkgutil
from typing import Any

import mlx_lm.tool_parsers
import pytest

from reprise.chat.answer import ContentDelta, ToolCallDelta
from reprise.chat.tools import make_calls, parse_calls
from tests.chat.pieces import WEATHER, piece_model, read, thinking_fields, tool, tool_fields
from tests.matrix import every_other

SAMPLES = {
    "function_gemma": (
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>",
    ),
    "gemma4": (
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>',
    ),
    "glm47": (
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    ),
    "json_tools": (
        ("<tool_call>", "</tool_call>"),
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
    ),
    "kimi_k2": (
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "kimi_k3": (
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    "laguna": (
        ("<tool_call>", "</tool_call>"),
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    ),
    "longcat": (
        ("<longcat_tool_call>", "</longcat_tool_call>"),
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Paris</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
        "<longcat_arg_value>2</longcat_arg_value>\n</longcat_tool_call>",
    ),
    "minicpm5": (
        ("</function>",),
        '<function name="get_weather"><param name="city">Paris</param><param name="days">2</param></function>',
    ),
    "minimax_m2": (
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "mistral": (
        ("[TOOL_CALLS]", "[ARGS]"),
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}',
    ),
    "muse_spark": (
        (),
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>\n'
        '<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    ),
    "pythonic": (
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        '<|tool_call_start|>[get_weather(city="Paris", days=2)]<|tool_call_end|>',
    ),
    "qwen3_coder": (
        ("<tool_call>", "</tool_call>"),
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    ),
}


def model_of(parser: str) -> Any:
    specials, _ = SAMPLES[parser]
    return piece_model((*specials, "<think>", "</think>"), **thinking_fields(), **tool_fields(parser))


def test_every_format_has_a_sample() -> None:
    assert sorted(SAMPLES) == sorted(module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__))


@pytest.mark.parametrize("parser", sorted(SAMPLES))
@pytest.mark.parametrize("cuts", [(1,), (3, 4), (1000,)])
@pytest.mark.parametrize("lead", ["", "<think>\nHm.\n</think>\n\n", "<think>\nHm.\n</think>\n\nLet me look.\n\n"])
def test_a_call(parser: str, cuts: tuple[int, ...], lead: str) -> None:
    answer, deltas, _ = read(model_of(parser), lead + SAMPLES[parser][1], cuts=cuts, tools=[WEATHER])
    assert answer.content == ("Let me look." if lead.endswith("look.\n\n") else None)
    assert answer.reasoning == ("Hm." if lead else None)
    (call,) = answer.tool_calls
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Paris", "days": 2}
    first, *rest = (delta for delta in deltas if isinstance(delta, ToolCallDelta))
    assert (first.id, first.name, first.arguments) == (call.id, "get_weather", "")
    assert {(delta.id, delta.name) for delta in rest} == {(None, None)}
    assert cuts != (1,) or len(rest) > 5, "arguments come as they are written"


@pytest.mark.parametrize("parser", sorted(SAMPLES))
def test_calls_one_after_the_other(parser: str) -> None:
    sample = SAMPLES[parser][1]
    answer, _, _ = read(model_of(parser), f"{sample}\n{sample}\n", cuts=(5,), tools=[WEATHER])
    assert answer.content is None
    assert [call.name for call in answer.tool_calls] == ["get_weather", "get_weather"]
    assert len({call.id for call in answer.tool_calls}) == 2


@pytest.mark.parametrize("parser", sorted(SAMPLES))
@pytest.mark.parametrize("facts", [{"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_markup_is_text(parser: str, facts: dict[str, Any]) -> None:
    sample = SAMPLES[parser][1]
    answer, _, _ = read(model_of(parser), sample, cuts=(2,), **facts)
    assert answer.content == sample
    assert answer.tool_calls == ()


@pytest.mark.parametrize("parser", every_other(sorted(SAMPLES)))
def test_a_call_that_is_cut_short_is_a_part_of_it(parser: str) -> None:
    model = model_of(parser)
    sample = SAMPLES[parser][1]
    (whole,) = read(model, sample, tools=[WEATHER])[0].tool_calls
    tokens = model.encode(sample)
    for length in range(len(model.encode(model.tool_start)), len(tokens) - len(model.encode(model.tool_end))):
        cut = model.decode(tokens[:length])
        answer, _, parser_of_it = read(model, cut, cuts=(1,), is_ended=False, tools=[WEATHER])
        assert not answer.content, cut
        for call in answer.tool_calls:
            assert (call.name, call.is_whole) == (whole.name, not parser_of_it.is_call_cut)
            assert whole.arguments.startswith(call.arguments)
        assert parser_of_it.is_call_cut or answer.tool_calls
        assert answer.tool_calls or "cut short" in parser_of_it.notes[0]


@pytest.mark.parametrize("parser", sorted(SAMPLES))
@pytest.mark.parametrize(
    "body", ["", "{", "\ud7ff", '{"name": 5}', "[[[[" * 300, "<think>", '["a"]', "null", "call:x{a"]
)
def test_a_malformed_call_is_text(parser: str, body: str) -> None:
    model = model_of(parser)
    text = "Look: " + model.tool_start + body + model.tool_end
    answer, deltas, _ = read(model, text, cuts=(7,), tools=[WEATHER])
    if answer.tool_calls:
        # GLM's parser takes nearly everything as a name.
        assert parser in {"glm47", "laguna", "minicpm5"}
        return
    assert answer.content == text
    assert all(isinstance(delta, ContentDelta) for delta in deltas)


def test_a_forgotten_end() -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {}}'
    answer, _, _ = read(model_of("json_tools"), call, tools=[WEATHER])
    assert len(answer.tool_calls) == 1, "the model ended its answer after it"
    answer, _, _ = read(model_of("json_tools"), call + call + "</tool_call>", is_ended=False, tools=[WEATHER])
    assert len(answer.tool_calls) == 2


def test_text_between_and_behind_calls_stays() -> None:
    call = SAMPLES["json_tools"][1]
    answer, _, _ = read(model_of("json_tools"), f"One.\n{call}\nTwo.\n{call}\n", tools=[WEATHER])
    assert answer.content == "One.\n\nTwo."
    assert len(answer.tool_calls) == 2


def test_a_call_inside_reasoning_and_a_malformed_one() -> None:
    call = SAMPLES["json_tools"][1]
    model = model_of("json_tools")
    answer, _, _ = read(model, f"<think>I call {call} so.</think>Done.", tools=[WEATHER])
    assert (answer.reasoning, answer.content) == ("I call  so.", "Done.")
    assert len(answer.tool_calls) == 1
    answer, _, _ = read(model, "<think>as <tool_call>x</tool_call> so.</think>Done.", tools=[WEATHER])
    assert (answer.reasoning, answer.content) == ("as <tool_call>x</tool_call> so.", "Done.")


def test_the_models_own_ids_are_kept_once() -> None:
    model = model_of("kimi_k2")
    sample = SAMPLES["kimi_k2"][1]
    answer, _, _ = read(model, sample + sample, tools=[WEATHER])
    assert [call.id for call in answer.tool_calls] == ["functions.get_weather:0", "call_0"]


HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>")
LEAD = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize("end", ["<|call|>", "", "<|end|>"])
@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json",
        " to=functions.get_weather<|channel|>commentary json",
        "<|channel|>analysis to=get_weather code",
    ],
)
def test_harmony_calls(header: str, end: str) -> None:
    model = piece_model(HARMONY)
    text = f'{LEAD}{header}<|message|>{{"city": "Paris"}}{end}'
    answer, _, _ = read(model, text, is_ended=False, tools=[WEATHER])
    assert (answer.reasoning, answer.content) == ("Hm.", None)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("get_weather", '{"city": "Paris"}')]


def test_harmony_without_a_call() -> None:
    model = piece_model(HARMONY)
    text = LEAD + "<|channel|>commentary to=functions.get_weather<|message|>"
    answer, _, parser = read(model, text + '{"city', is_ended=False, tools=[WEATHER])
    assert (answer.content, parser.is_call_cut) == (None, True)
    assert [(call.arguments, call.is_whole) for call in answer.tool_calls] == [('{"city', False)]
    assert read(model, text + "{}", tools=[])[0].content == "{}"
    assert read(model, LEAD + "<|channel|>commentary to=user<|message|>Hi", tools=[WEATHER])[0].content == "Hi"


@pytest.mark.parametrize(
    ("parsed", "expected"),
    [
        ({"name": "f"}, ["{}"]),
        ({"name": "f", "parameters": {"a": 1}}, ['{"a": 1}']),
        ({"name": "f", "arguments": '{"a": "é"}'}, ['{"a": "é"}']),
        ([{"name": "f"}, {"name": "g"}], ["{}", "{}"]),
        ({"name": "f", "arguments": {"a": "\ud800"}}, ['{"a": "\\ud800"}']),
        ({"name": "f", "arguments": {"a": {1}}}, ['{"a": "{1}"}']),
        ({"name": "f", "arguments": {(1, 2): 3}}, None),
        ({"name": "f", "arguments": {"a": float("nan")}}, None),
        ({"name": "f", "arguments": "text"}, None),
        ({"name": "f", "arguments": [1]}, None),
        ({"name": ""}, None),
        ({"name": "\ud800"}, None),
        ([{"name": "f"}, 5], None),
        ([], None),
        (None, None),
    ],
)
def test_what_parsers_give(parsed: object, expected: list[str] | None) -> None:
    calls = make_calls(parsed)
    assert (None if calls is None else [call.arguments for call in calls]) == expected


def test_tools_that_parsers_choke_on() -> None:
    """Schemas may be booleans, and parameters may be missing: no reason to lose a call."""
    for odd in ({"type": "function", "function": {"name": "get_weather"}}, tool("get_weather", city=True), {}):
        for parser, (_, sample) in SAMPLES.items():
            answer, _, _ = read(model_of(parser), sample, tools=[odd])
            assert len(answer.tool_calls) == 1, (parser, odd)


def test_an_argument_of_the_wrong_type_stays_text() -> None:
    body = "<function=get_weather>\n<parameter=days>\nsoon\n</parameter>\n</function>"
    calls = parse_calls(model_of("qwen3_coder"), body, tools=[WEATHER])
    assert calls is not None
    assert calls[0].arguments == '{"days": "soon"}'


def test_ids_are_unique() -> None:
    calls = make_calls([{"name": "f"}] * 50)
    assert calls is not None
    assert len({call.id for call in calls}) == 50
    assert all(call.id.startswith("call_") for call in calls)
