"""Files of families: what a template that writes as the family does teaches, and when they help one that does not."""

from dataclasses import replace

import pytest

from reprise.chat.answers.thinking_learning import with_learnt_thinking
from reprise.chat.calls.call_learning import learn_calls
from reprise.chat.families.family import FAMILIES, family_file, most_like, with_calls_of_family
from reprise.chat.learnt import learnt_toml, with_learnt
from reprise.chat.text_model import TextModel
from tests.chat.pieces import piece_model, read
from tests.chat.test_learnt_calls import FORMATS, TOOLS, model_with, source_with
from tests.chat.test_tool_formats import HARMONY

SHOWS = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
_ARGUMENTS = "{% for k, v in c.arguments.items() %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_QUOTE = '<|"|>'
_BARE = (
    "{% macro bare(v) %}{% if v is string %}QUOTE{{ v }}QUOTE"
    "{% elif v is mapping %}{ {%- for k, x in v.items() %}{{ k }}:{{ bare(x) }}{{ '' if loop.last else ',' }}"
    "{% endfor -%} }"
    "{% elif v is iterable %}[{% for x in v %}{{ bare(x) }}{{ '' if loop.last else ',' }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
).replace("QUOTE", _QUOTE)
_LINE = "{{ '\\n' }}"
_JSON = "{{ c.arguments | tojson }}"
_PARAMETERS = _ARGUMENTS + "<parameter={{ k }}>\n" + _VALUE + "\n</parameter>\n{% endfor %}"
_XML = "<tool_call>\n<function={{ c.name }}>\n" + _PARAMETERS + "</function>\n</tool_call>"


def _pairs(space: str) -> str:
    pair = f"<arg_key>{{{{ k }}}}</arg_key>{space}<arg_value>{_VALUE}</arg_value>{space}"
    return "<tool_call>{{ c.name }}" + space + _ARGUMENTS + pair + "{% endfor %}</tool_call>"


_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
THINK, TOOL_CALL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
WRITTEN: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, str, str | None, str]]] = {
    # special tokens, what stands around thinking; what stands before all calls, a call, between two, behind all
    "deepseek-r1": (
        (_BEGIN, _END, *_CALL),
        THINK,
        (
            _BEGIN,
            _CALL[0] + "function" + _CALL[1] + "{{ c.name }}\n```json\n" + _JSON + _LINE + "```" + _CALL[2],
            _LINE,
            _END,
        ),
    ),
    "deepseek-v3.1": (
        (_BEGIN, _END, *_CALL),
        THINK,
        (_BEGIN, _CALL[0] + "{{ c.name }}" + _CALL[1] + _JSON + _CALL[2], "", _END),
    ),
    "devstral": (("[TOOL_CALLS]", "[ARGS]"), (), ("", "[TOOL_CALLS]{{ c.name }}[ARGS]" + _JSON, "", "")),
    "gemma-4": (
        ("<|tool_call>", "<tool_call|>", _QUOTE, "<|channel>", "<channel|>"),
        ("<|channel>thought", "<channel|>"),
        ("", "<|tool_call>call:{{ c.name }}{{ bare(c.arguments) }}<tool_call|>", "", ""),
    ),
    "glm-4.6": (TOOL_CALL, THINK, ("", _pairs("\n"), _LINE, "")),
    "glm-4.7": (TOOL_CALL, THINK, ("", _pairs(""), "", "")),
    "llama-3": ((), (), FORMATS["bare"][1:]),
    "minimax-m2": (
        (),
        THINK,
        (
            "<minimax:tool_call>\n",
            '<invoke name="{{ c.name }}">\n'
            + _ARGUMENTS
            + '<parameter name="{{ k }}">'
            + _VALUE
            + "</parameter>\n{% endfor %}</invoke>\n",
            "",
            "</minimax:tool_call>",
        ),
    ),
    "mistral-small-3.2": (
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        (),
        ("", "[TOOL_CALLS]{{ c.name }}[CALL_ID]{{ t.id }}[ARGS]" + _JSON, "", ""),
    ),
    "qwen3": (
        TOOL_CALL,
        THINK,
        ("", '<tool_call>\n{"name": "{{ c.name }}", "arguments": ' + _JSON + "}\n</tool_call>", _LINE, ""),
    ),
    "qwen3-coder": (TOOL_CALL, (), ("", _XML, _LINE, "")),
    "qwen3.5": (TOOL_CALL, THINK, ("", _XML, _LINE, "")),
}


def source_of(family: str) -> str:
    _, thinking, calls = WRITTEN[family]
    written = SHOWS + _BARE + source_with(*calls)
    thought = "{% if m.reasoning_content %}<|think|>{{ m.reasoning_content }}<|/think|>{% endif %}"
    assert thought in written
    if not thinking:
        return written.replace(thought, "")
    return written.replace("<|think|>", thinking[0]).replace("<|/think|>", thinking[1])


def model_like(family: str, written: str | None = None) -> TextModel:
    """A model whose template is of our own making, and writes as the family does."""
    if family == "gpt-oss":
        return piece_model(HARMONY)
    specials, thinking, _ = WRITTEN[family]
    model = model_with(written or source_of(family), ("<|role|>", *specials))
    if family == "gemma-4":
        # A special token and a word: mlx-lm knows these by the vocabulary.
        model = replace(model, think_start=thinking[0], think_end=thinking[1])
    model = with_learnt_thinking(model)
    return replace(model, calls=learn_calls(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_of_a_family_is_what_a_template_that_writes_as_it_does_teaches(family: str) -> None:
    model = model_like(family)
    assert learnt_toml(model) == family_file(family)
    assert with_learnt(model, family_file(family), source="a file").calls.format == model.calls.format
    for model_type in FAMILIES[family]:
        likeness = most_like(learnt_toml(model), model_type)
        assert likeness is not None and (likeness.family, likeness.differences) == (family, ())
        assert with_calls_of_family(model, model_type) is model


def test_what_a_template_of_a_family_does_otherwise_is_named() -> None:
    model = model_like("qwen3.5", source_of("qwen3.5").replace("\n</parameter>", "</parameter>"))
    likeness = most_like(learnt_toml(model), "qwen3_5")
    assert likeness is not None and likeness.family == "qwen3.5"
    (difference,) = likeness.differences
    assert difference.key == "calls.arguments.value-ending"
    assert (difference.learnt, difference.of_family) == ("</parameter>\n", "\n</parameter>\n")
    # With other arguments, the form alone.
    likeness = most_like(learnt_toml(model_like("qwen3")), "qwen3_5")
    assert likeness is not None
    assert [each.key for each in likeness.differences][-1] == "calls.arguments.form"
    assert most_like(learnt_toml(model), "qwen2") is None


def without_calls(family: str, *, shows_tools: bool = True) -> TextModel:
    """A model of the family whose template leaves out the calls."""
    written = source_of(family).replace("m.tool_calls", "m.nothing")
    return model_like(family, written if shows_tools else written.replace(SHOWS, ""))


def test_where_a_template_shows_tools_and_no_call_they_are_read_as_its_family_writes_them() -> None:
    bare = without_calls("gemma-4")
    assert bare.calls.format is None
    model = with_calls_of_family(bare, "gemma4")
    assert model.calls.format == model_like("gemma-4").calls.format
    assert model.calls.family == "gemma-4" and model.calls.example.startswith("<|tool_call>call:")
    answer, _, _ = read(
        model, '<|tool_call>call:look-up{text:<|"|>Hi<|"|>,n:3}<tool_call|>', is_ended=False, tools=TOOLS
    )
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("look-up", '{"text": "Hi", "n": 3}')]


def test_a_file_of_a_family_does_not_guess() -> None:
    # Of another type, shown no tools, begun by text that any answer may have, begun alike in two families, or seen to
    # be written otherwise.
    odd = source_of("gemma-4").replace("bare(c.arguments) }}", "c.arguments.keys() | list }}")
    for model, model_type in (
        (model_like("gemma-4", odd), "gemma4"),
        (without_calls("gemma-4"), "gemma3"),
        (without_calls("gemma-4", shows_tools=False), "gemma4"),
        (without_calls("llama-3"), "mllama"),
        (without_calls("mistral-small-3.2"), "mistral3"),
        (replace(without_calls("gemma-4"), splitters={}), "gemma4"),
    ):
        assert model.calls.format is None
        assert with_calls_of_family(model, model_type) is model
