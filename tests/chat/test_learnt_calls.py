"""Formats of tool calls learnt from templates: what is rendered is read back, in any pieces, whole and cut short."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import (
    _compile_jinja_template,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)

from reprise.chat.calls.call_learning import learn_calls
from reprise.chat.grammars.tool_grammar import call_grammar
from reprise.chat.rendering.render import Renderer
from reprise.chat.request import ChatRequest, Message
from reprise.chat.text_model import TextModel
from reprise.core.errors import BadRequest
from tests.chat.pieces import piece_model, read, tool, tool_fields
from tests.chat.test_tool_formats import SAMPLES
from tests.matrix import every_other, examples

_PLAIN = "{% for k, v in c.arguments.items() %}"
_TEXT_OR_JSON = "{{ v if v is string else v | tojson }}"
_NESTED = (
    "{% macro nested(v) %}{% if v is mapping %}"
    "{% for k, x in v.items() %}@<{{ k }}>{{ nested(x) }}@</{{ k }}>{% endfor %}"
    "{% elif v is iterable and v is not string %}{% for x in v %}@<item>{{ nested(x) }}@</item>{% endfor %}"
    "{% else %}{{ v if v is string else v | tojson }}{% endif %}{% endmacro %}"
)
_NAMED_JSON = """{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}"""
FORMATS: dict[str, tuple[tuple[str, ...], str, str, str, str]] = {
    # special tokens, what stands before all calls, a call, between two, behind all
    "list in tags": (("<TOOLCALL>", "</TOOLCALL>"), "<TOOLCALL>[", _NAMED_JSON, ", ", "]</TOOLCALL>"),
    "each in tags": ((), "", "<call>\n" + _NAMED_JSON + "\n</call>", "\n", ""),
    "name as key": (("<|p|>", "<|s|>"), "<|p|>[", '{"{{ c.name }}": {{ c.arguments | tojson }}}', ", ", "]<|s|>"),
    "sections": (
        ("<|calls|>", "<|call|>", "<|sep|>", "<|/call|>", "<|/calls|>"),
        "<|calls|>",
        "<|call|>{{ c.name }}<|sep|>{{ c.arguments | tojson }}<|/call|>",
        "",
        "<|/calls|>",
    ),
    "parameters": (
        (),
        "",
        "<seed:call>\n<function={{ c.name }}>\n"
        + _PLAIN
        + "<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}</function>\n</seed:call>",
        "\n",
        "",
    ),
    "typed parameters": (
        (),
        "<calls>\n",
        '<invoke name="{{ c.name }}">\n'
        + _PLAIN
        + """<arg name="{{ k }}" string="{{ 'true' if v is string else 'false' }}">"""
        + _TEXT_OR_JSON
        + "</arg>\n{% endfor %}</invoke>\n",
        "",
        "</calls>",
    ),
    "function calls": (
        ("<|start|>", "<|stop|>"),
        "<|start|>[",
        "{{ c.name }}("
        + _PLAIN
        + "{{ k }}={{ \"'\" ~ v ~ \"'\" if v is string else v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %})",
        ", ",
        "]<|stop|>",
    ),
    "nested": (("@",), "@<calls>\n", '@<call name="{{ c.name }}">{{ nested(c.arguments) }}@</call>\n', "", "@</calls>"),
    # A message begins with the same special token.
    "in a message of its own": (("<|sep|>",), "", "<|role|>function call<|sep|>" + _NAMED_JSON, "", ""),
    # So does reasoning.
    "behind empty reasoning": (
        ("<|think|>", "<|/think|>", "<|act|>", "<|/act|>"),
        "<|think|><|/think|><|act|>[",
        _NAMED_JSON,
        ", ",
        "]<|/act|>",
    ),
    "bare": ((), "", """{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}""", None, ""),  # type: ignore[dict-item]
}
TOOLS = [
    tool(
        "look-up",
        text={"type": "string"},
        n={"type": "integer"},
        on={"type": "boolean"},
        deep={"$ref": "#/$defs/deep"},
    ),
    tool("other"),
]
TOOLS[0]["function"]["parameters"]["$defs"] = {
    "deep": {"type": "object", "properties": {"k": {"$ref": "#/$defs/list"}}},
    "list": {"type": "array", "items": {"type": ["integer", "string"]}},
}


def source(name: str) -> str:
    _, before, call, between, behind = FORMATS[name]
    return source_with(before, call, between, behind)


def source_with(before: str, call: str, between: str | None, behind: str) -> str:
    """A template that writes calls so."""
    alone = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    loop = "{% for t in m.tool_calls %}{% set c = t.function %}" + call
    joint = "" if not between else "{% if not loop.last %}" + between + "{% endif %}"
    calls = (alone if between is None else "") + before + loop + joint + "{% endfor %}" + behind
    return (
        _NESTED
        + "{% for m in messages %}<|role|>{{ m.role }}\n"
        + "{% if m.reasoning_content %}<|think|>{{ m.reasoning_content }}<|/think|>{% endif %}"
        + "{% if m.tool_calls %}{{ m.content }}"
        + calls
        + "{% else %}{{ m.content }}{% endif %}<|eos|>{% endfor %}"
        + "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
    )


def model_of(name: str) -> TextModel:
    return model_with(source(name), ("<|role|>", *FORMATS[name][0]))


def model_with(template_source: str, specials: tuple[str, ...]) -> TextModel:
    template: Any = _compile_jinja_template(template_source)

    def render(messages: Any, **options: Any) -> str:
        return template.render(messages=messages, **{k: v for k, v in options.items() if v is not None})

    model = replace(piece_model(specials), render=render, template_source=template_source)
    return replace(model, calls=learn_calls(model))


MODELS = {name: model_of(name) for name in FORMATS}


def written(model: TextModel, calls: list[tuple[str, dict[str, Any]]]) -> str:
    assert model.render is not None
    made = [{"id": "abc", "type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    text = model.render([{"role": "assistant", "content": "", "tool_calls": made}])
    return text.removeprefix("<|role|>assistant\n").removeprefix("<|think|><|/think|>").removesuffix("<|eos|>")


def test_all_are_learnt() -> None:
    for name, model in MODELS.items():
        assert model.calls.format is not None, name
        assert model.calls.format.is_parallel == (name != "bare")
        assert model.calls.example, name


def start_of(model: TextModel) -> str:
    assert model.calls.format is not None
    return model.calls.format.start


def test_a_call_begins_with_nothing_that_begins_or_ends_something_else() -> None:
    assert start_of(MODELS["in a message of its own"]) == "<|role|>function call<|sep|>"
    assert start_of(MODELS["behind empty reasoning"]) == "<|act|>"
    answer, _, parser = read(MODELS["behind empty reasoning"], "<|think|>Hm.<|/think|>Hi", is_ended=False, tools=TOOLS)
    assert (answer.content, parser.is_call_cut) == ("<|think|>Hm.<|/think|>Hi", False)


def test_a_format_whose_calls_the_model_could_not_end_is_none() -> None:
    template = source("sections").replace("<|/call|>", "<|eos|>")
    model = model_with(template, ("<|role|>", *FORMATS["sections"][0]))
    assert model.calls.format is None


def test_calls_end_before_their_results() -> None:
    template = source("sections").replace(
        "<|eos|>{% endfor %}", "{% if not m.tool_calls %}<|eos|>{% endif %}{% endfor %}"
    )
    assert template != source("sections")
    template = template.replace(
        "{% else %}", "{% elif m.role == 'tool' %}<|sep|>{{ m.tool_call_id }}<|call|>{{ m.content }}{% else %}"
    )
    form = model_with(template, ("<|role|>", *FORMATS["sections"][0])).calls.format
    assert form == MODELS["sections"].calls.format


@pytest.mark.parametrize("name", FORMATS)
def test_calls_end_where_their_results_open_without_a_role(name: str) -> None:
    template = source(name).replace("<|eos|>{% endfor %}", "{% if not m.tool_calls %}<|eos|>{% endif %}{% endfor %}")
    result = "{% if m.role == 'tool' %}<|result|>{{ m.content }}<|/result|>{% else %}"
    template = template.replace("{% for m in messages %}", "{% for m in messages %}" + result)
    template = template.replace("{% endfor %}{% if add", "{% endif %}{% endfor %}{% if add")
    specials = ("<|role|>", "<|result|>", "<|/result|>", *FORMATS[name][0])
    assert model_with(template, specials).calls.format == MODELS[name].calls.format


ASKS = "{% if tools %}Call with <|tool_call|> and a list in JSON.{% endif %}"
PLAIN = "{% for m in messages %}<|role|>{{ m.content }}<|eos|>{% endfor %}"


def test_a_marker_that_the_template_asks_for_and_never_writes() -> None:
    model = model_with(ASKS + PLAIN, ("<|role|>", "<|tool_call|>"))
    answer = read(
        model, '<|tool_call|>[{"name": "look-up", "arguments": {"n": 3}}, {"name": "other", "arguments": {}}]'
    )[0]
    assert answer.tool_calls == ()
    answer = read(model, '<|tool_call|>[{"name": "look-up", "arguments": {"n": 3}}]', tools=TOOLS)[0]
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("look-up", '{"n": 3}')]
    # Without a marker, or with one that stands there in any case, nothing is known.
    assert model_with(ASKS + PLAIN, ("<|role|>",)).calls.format is None
    assert model_with("<|tool_call|>" + ASKS + PLAIN, ("<|role|>", "<|tool_call|>")).calls.format is None


STATED = (
    "{% if tools %}Functions: {% for t in tools %}{{ t.function | tojson }}{% endfor %} Return JSON within tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}'
)
UNMARKED = {
    "one mark before each tag": (
        _NESTED + "{% for m in messages %}<|role|>{{ m.role }}\n{{ m.content or '' }}{% if m.tool_calls %}@<calls>\n"
        '{% for t in m.tool_calls %}{% set c = t.function %}@<call name="{{ c.name }}">{{ nested(c.arguments) }}'
        "@</call>\n{% endfor %}@</calls>{% endif %}<|eos|>{% endfor %}"
    ).replace("@", "]<]mark[>["),
    "typed arguments": (
        "{% macro kind(v) %}{{ 'boolean' if v is boolean else 'null' if v is none else 'number' if v is number else"
        " 'string' if v is string else 'object' if v is mapping else 'array' }}{% endmacro %}"
        "{% macro begin(name) %}<|open|>{{ name }}<|sep|>{% endmacro %}"
        "{% macro end(name) %}<|close|>{{ name }}<|sep|>{% endmacro %}"
        "{% for m in messages %}{{ begin('message role=' ~ m.role) }}{{ begin('response') }}{{ m.content or '' }}"
        "{{ end('response') }}{% if m.tool_calls %}{{ begin('tools') }}{% for t in m.tool_calls %}"
        """{{ begin('call tool="' ~ t.function.name ~ '" index="' ~ loop.index ~ '"') }}"""
        "{% for k, v in t.function.arguments.items() %}"
        """{{ begin('argument key="' ~ k ~ '" type="' ~ kind(v) ~ '"') }}{{ v if v is string else v | tojson }}"""
        "{{ end('argument') }}{% endfor %}{{ end('call') }}{% endfor %}{{ end('tools') }}{% endif %}"
        "{{ end('message') }}<|eos|>{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", UNMARKED)
def test_markers_that_the_tokenizer_does_not_have(name: str) -> None:
    model = model_with("{{ tools }}" + UNMARKED[name], ())
    assert call_grammar(model, tools=TOOLS, tool_choice="required") is not None
    assert model.render is not None
    calls = [("look-up", {"n": 3, "text": "it's", "on": True}), ("other", {})]
    made = [{"id": "abc", "type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    text = model.render([{"role": "assistant", "content": "", "tool_calls": made}], tools=[])
    answer = read(model, text[text.find(start_of(model)) :].removesuffix("<|eos|>"), tools=TOOLS, cuts=(3,))[0]
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == calls


def test_a_call_that_the_template_describes_in_words_alone() -> None:
    stated = STATED.partition("Return")[0] + (
        "For each call, return a JSON object with function name and arguments within <act></act> XML tags.{% endif %}"
    )
    model = model_with(stated + PLAIN, ("<|role|>",))
    assert call_grammar(model, tools=TOOLS, tool_choice="required") is not None
    answer = read(model, '<act>\n{"name": "look-up", "arguments": {"n": 3}}\n</act>', tools=TOOLS)[0]
    assert [(call.name, call.arguments) for call in answer.tool_calls] == TWO_CALLS[:1]


TWO_CALLS = [("look-up", '{"n": 3}'), ("other", "{}")]


@pytest.mark.parametrize("markers", [(), ("<tool_call>", "</tool_call>")])
def test_a_call_that_the_template_only_describes(markers: tuple[str, ...]) -> None:
    model = model_with(STATED + PLAIN, ("<|role|>", *markers))
    assert model.calls.example == (
        '<tool_call>\n{"name": "turnstile", "arguments": {"zebra": "Falcon over"}}\n</tool_call>'
    )
    text = (
        'Well.\n<tool_call>\n{"name": "look-up", "arguments": {"n": 3}}\n</tool_call>\n'
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
    )
    answer = read(model, text, tools=TOOLS, cuts=(3,))[0]
    assert answer.content == "Well."
    assert [(call.name, call.arguments) for call in answer.tool_calls] == TWO_CALLS
    # Said in any chat, it is about something else; and a tool of that shape is none.
    for other in (STATED.replace("{% if tools %}", "{% if true %}"), STATED.replace("<function-name>", '"turnstile"')):
        assert model_with(other + PLAIN, ("<|role|>",)).calls.format is None


def test_a_list_of_calls_that_the_template_only_describes() -> None:
    stated = 'Write functools[{"name": [function name], "arguments": [arguments as JSON]}, ...]'
    model = model_with("{% if tools %}{{ tools }}" + stated + "{% endif %}" + PLAIN, ("<|role|>",))
    text = 'functools[{"name": "look-up", "arguments": {"n": 3}}, {"name": "other", "arguments": {}}]'
    answer = read(model, text, tools=TOOLS)[0]
    assert [(call.name, call.arguments) for call in answer.tool_calls] == TWO_CALLS


@pytest.mark.parametrize(
    ("tools", "given"),
    [
        ("{% if xml_tools %}{{ xml_tools }}{% endif %}", {"xml_tools": [TOOLS[1]]}),
        ("{{ 'Functions: ' + functions + ' Today is ' + datetime }}", {"functions": "mine", "datetime": "Monday"}),
    ],
)
def test_tools_under_another_name(tools: str, given: dict[str, Any]) -> None:
    model = model_with(tools + STATED.partition("Return")[2].removesuffix("{% endif %}") + PLAIN, ("<|role|>",))
    look: tuple[Message, ...] = ({"role": "user", "content": "Look!"},)
    rendered = Renderer(model).render(ChatRequest(messages=look, tools=tuple(TOOLS)))
    assert "look-up" in rendered.text
    assert all("does not show" not in note for note in rendered.notes)
    # Without tools it is rendered too, and what a client gives under this name itself is what stands there.
    assert "look-up" not in Renderer(model).render(ChatRequest(messages=look)).text
    request = ChatRequest(messages=look, tools=tuple(TOOLS), template_options=given)
    assert "look-up" not in Renderer(model).render(request).text


ACTION = (
    "{% for m in messages %}<|role|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}\nAction:\n```json\n[\n"
    "{% for t in m.tool_calls %}{% set f = t.function %}"
    '    {"tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% if not loop.last %},\n{% endif %}{% endfor %}\n]```\n{% else %}<|eos|>{% endif %}{% endfor %}"
    "<|role|>system\nWrite 'Action:' followed by a list of actions. {{ tools }}"
)


def test_calls_that_begin_with_a_word() -> None:
    model = model_with(ACTION, ("<|role|>",))
    assert start_of(model) == "Action:"
    text = (
        'I look.\nAction: ```json\n[\n    {"tool_name": "look-up", "parameters": {"n": 3}},'
        ' {"tool_name": "other", "parameters": {}}\n]```'
    )
    answer, _, parser = read(model, text, tools=TOOLS, cuts=(2,))
    assert (answer.content, parser.notes) == ("I look.", ())
    assert [(call.name, call.arguments) for call in answer.tool_calls] == TWO_CALLS
    # The word alone is a word, also where the answer is cut short behind some of its letters.
    for words in ("Action: none.\n", "Lights, camera, Action: go!", "An Act", "Lights, camera, Action"):
        answer, _, parser = read(model, words, tools=TOOLS, is_ended=False)
        assert (answer.content, answer.tool_calls, parser.notes) == (words, (), ())


ADDRESSED = (
    "{{ tools }}{% for m in messages %}<|role|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.content %}>>>all\n{{ m.content }}{% endif %}"
    "{% for t in m.tool_calls or () %}>>>{{ t.function.name }}\n{{ t.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n>>>{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("all\nHello.", "Hello.", []),
        ("all\n>>> 1 + 1\n2", ">>> 1 + 1\n2", []),
        ('look-up\n{"n": 3}>>>other\n{}', None, TWO_CALLS),
        ('all\nI look.\n>>>look-up\n{"n": 3}', "I look.", TWO_CALLS[:1]),
        # To nobody, and what no call follows.
        ('nobody\n{"n": 3}', '>>>nobody\n{"n": 3}', []),
        ("Hello.", ">>>Hello.", []),
    ],
)
def test_words_that_are_addressed_like_calls(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    model = model_with(ADDRESSED, ("<|role|>",))
    for cuts in ((1,), (4,)):
        answer = read(model, text, tools=TOOLS, cuts=cuts)[0]
        assert (answer.content, [(call.name, call.arguments) for call in answer.tool_calls]) == (content, calls)
    if not calls:
        assert read(model, text)[0].content == content
    # An answer that is continued stands within its words.
    assert read(model, "and so on", is_content_open=True)[0].content == "and so on"


def test_a_section_that_is_ended_only_behind_several_calls() -> None:
    alone = source("sections").replace("<|/calls|>", "{% if m.tool_calls | length > 1 %}<|/calls|>{% endif %}")
    form = model_with(alone, ("<|role|>", *FORMATS["sections"][0])).calls.format
    assert form == MODELS["sections"].calls.format


def test_a_model_that_is_told_nothing_of_tools() -> None:
    model = model_with(PLAIN, ("<|role|>",))
    request = ChatRequest(messages=({"role": "user", "content": "Look!"},), tools=tuple(TOOLS))
    assert Renderer(model).render(request).notes == ("the chat template does not show the tools to the model",)
    with pytest.raises(BadRequest, match=r"template takes no tools.*can only be 'auto' or 'none'"):
        call_grammar(model, tools=TOOLS, tool_choice="required")
    told = model_with("{{ tools }}" + PLAIN, ("<|role|>",))
    note = "the format of this model's tool calls is unknown: calls are returned as text"
    assert Renderer(told).render(request).notes == (note,)
    with pytest.raises(BadRequest, match="format of this model's tool calls is unknown"):
        call_grammar(told, tools=TOOLS, tool_choice="required")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("@<deep>@<k>@<item>3@</item>@<item>x@</item>@</k>@</deep>", {"deep": {"k": [3, "x"]}}),
        ("@<deep> @<k> @<item>3@</item>\n@</k> @</deep>", {"deep": {"k": [3]}}),
        ("@<deep>@</deep>@<n>4@</n>", {"deep": {}, "n": 4}),
        ('@<deep>{"k": [1]}@</deep>', {"deep": {"k": [1]}}),
        ("@<odd>@<odd>@<odd>1@</odd>@</odd>@</odd>", {"odd": {"odd": {"odd": "1"}}}),
        ("@<odd>@<item>1@</item>@</odd>", {"odd": ["1"]}),
        ("@<text>@</text>", {"text": ""}),
        ("@<deep>@<k>1@</deep>", None),
        ("@<deep>@<k>@</k>words@</deep>", None),
        ("@<deep>" + "@<k>" * 2000 + "@</k>" * 2000 + "@</deep>", None),
    ],
)
def test_nested_values(written: str, arguments: Any) -> None:
    text = f'@<calls>\n@<call name="look-up">{written}@</call>\n@</calls>'
    answer = read(MODELS["nested"], text, tools=TOOLS, cuts=(3,), holds_calls=True)[0]
    if arguments is None:
        assert (answer.content, answer.tool_calls) == (text, ())
    else:
        assert [json.loads(call.arguments) for call in answer.tool_calls] == [arguments]


@pytest.mark.parametrize("name", ["parameters", "typed parameters"])
def test_what_ends_a_value_may_stand_in_a_text_within_it(name: str) -> None:
    model = MODELS[name]
    tag = "</parameter>" if name == "parameters" else "</arg>"
    calls: list[tuple[str, dict[str, Any]]] = [("look-up", {"deep": {"k": [f"a{tag}b", 1]}, "n": 3}), ("other", {})]
    text = written(model, calls)
    answer = read(model, text, tools=TOOLS, cuts=(3,))[0]
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == calls
    # What cannot be read ends where it can first.
    answer = read(model, text.replace("1]", "1]]"), tools=TOOLS)[0]
    assert answer.tool_calls == () or not answer.tool_calls[0].is_whole


def test_arguments_end_where_no_json_follows() -> None:
    text = '<call>\n{"name": "look-up", "arguments": {"n": 1</call>'
    (call,) = read(MODELS["each in tags"], text, tools=TOOLS)[0].tool_calls
    assert (call.arguments, call.is_whole) == ('{"n": 1', False)


def test_a_number_beyond_all_is_still_json() -> None:
    for name in ("typed parameters", "function calls", "nested"):
        text = written(MODELS[name], [("look-up", {"n": 12345})]).replace("12345", "1e999")
        (call,) = read(MODELS[name], text, tools=TOOLS)[0].tool_calls
        json.loads(call.arguments, parse_constant=pytest.fail)


_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text("aé \n<>{}[],:=日", max_size=12).map(lambda text: f"a{text}b"),
        "n": st.integers(-(10**6), 10**6),
        "on": st.booleans(),
        "deep": st.fixed_dictionaries({"k": st.lists(st.integers(0, 9) | st.sampled_from(["x", "y z"]), max_size=3)}),
    },
)
_CALLS = st.lists(st.tuples(st.just("look-up"), _VALUES) | st.just(("other", {})), min_size=1, max_size=3)


@settings(max_examples=examples(60))
@given(name=st.sampled_from(sorted(FORMATS)), calls=_CALLS, cuts=st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_what_is_rendered_is_read_back(name: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]) -> None:
    model = MODELS[name]
    calls = calls[:1] if name == "bare" else calls
    answer, _, _ = read(model, written(model, calls), cuts=cuts, tools=TOOLS)
    assert answer.content is None
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == calls


@settings(max_examples=examples(40))
@given(name=st.sampled_from(sorted({*FORMATS} - {"bare"})), calls=_CALLS)
def test_calls_in_text_are_as_the_template_writes_them(name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    form = MODELS[name].calls.format
    assert form is not None
    assert (
        read(MODELS[name], form.written(calls), tools=TOOLS)[0]
        == (read(MODELS[name], written(MODELS[name], calls), tools=TOOLS)[0])
    )


@pytest.mark.parametrize("parser", sorted(SAMPLES))
def test_calls_in_text_are_read_where_the_format_is_known(parser: str) -> None:
    model = piece_model(SAMPLES[parser][0], **tool_fields(parser))
    form = model.calls.format
    if form is None:
        pytest.skip("its calls are in channels")
    calls = [("look-up", {"text": 'it\'s "so"', "n": 3, "on": True, "deep": {"k": ["x", 1]}}), ("other", {"a": "b"})]
    answer = read(model, form.written(calls), tools=TOOLS)[0]
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == calls


@pytest.mark.parametrize("name", every_other(sorted(FORMATS), start=1))
def test_a_cut_shows_no_markup(name: str) -> None:
    model = MODELS[name]
    text = written(model, [("look-up", {"text": "Paris", "n": 12})])
    (whole,) = read(model, text, tools=TOOLS)[0].tool_calls
    tokens = model.encode(text)
    assert model.calls.format is not None
    for length in range(1, len(tokens)):
        answer, _, parser = read(model, model.decode(tokens[:length]), is_ended=False, tools=TOOLS)
        assert not answer.content, "not even of the marker that calls begin with"
        assert parser.is_call_cut or [call.arguments for call in answer.tool_calls] == [whole.arguments]
        assert all(whole.arguments.startswith(call.arguments) for call in answer.tool_calls)


@pytest.mark.parametrize("name", every_other(sorted(FORMATS)))
def test_a_malformed_call_that_is_held_is_its_text_alone(name: str) -> None:
    model = MODELS[name]
    text = written(model, [("look-up", {"text": "Paris", "n": 12})])
    assert model.calls.format is not None
    lead = len(model.encode(model.calls.format.start))
    tokens = model.encode(text)
    num_told = 0
    for length in range(lead + 1, len(tokens)):
        # The model goes on as no call does, or ends its answer.
        broken = model.decode(tokens[:length]) + "\x00"
        held, _, parser = read(model, broken, tools=TOOLS, holds_calls=True)
        told = read(model, broken, tools=TOOLS)[0]
        if all(call.is_whole for call in told.tool_calls):
            continue
        assert (held.content, held.tool_calls) == (broken, ())
        assert parser.notes == ("a malformed tool call was left in the text",)
        # As it is written it cannot be taken back: what is not told is the rest.
        assert broken.endswith(told.content or "")
        assert model.calls.format.start not in (told.content or "")
        assert all(call.arguments for call in told.tool_calls), "a name alone is not told"
        num_told += len(told.tool_calls)
    assert num_told > 0


@pytest.mark.parametrize("before", ["", "Words.\n", "Words. "])
def test_what_could_have_become_a_call_is_text_if_the_model_ends_there(before: str) -> None:
    model = MODELS["parameters"]
    for length in range(1, len("<seed:call>")):
        text = before + "<seed:call>"[:length]
        assert read(model, text, tools=TOOLS)[0].content == text
        answer, _, parser = read(model, text, tools=TOOLS, is_ended=False)
        # A single character in a line is more likely its own.
        is_text = length == 1 and before == "Words. "
        assert (answer.content or "").rstrip() == (text if is_text else before).rstrip()
        assert parser.is_call_cut == (not is_text)


@pytest.mark.parametrize("text", ['{"answer": 1}', '{"name": "nobody", "parameters": {}}', "{", " no", '{"name": "loo'])
def test_text_that_begins_like_a_bare_call(text: str) -> None:
    assert read(MODELS["bare"], text, tools=TOOLS)[0].content == text
