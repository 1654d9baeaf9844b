"""What was learnt of a template as a file: it is read to the same, and says what is wrong with it."""

from dataclasses import replace

import pytest

from reprise.chat.answers.thinking_learning import with_learnt_thinking
from reprise.chat.learnt import learnt_toml, with_learnt
from reprise.core.errors import LoadFailed
from tests.chat.pieces import piece_model
from tests.chat.test_learnt_calls import MODELS
from tests.chat.test_tool_formats import HARMONY
from tests.chat.text_models import TEMPLATES, text_model

_TEMPLATES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
LIST = MODELS["list in tags"]


@pytest.mark.parametrize("name", list(MODELS))
def test_a_format_of_calls_is_read_as_it_was_written(name: str) -> None:
    model = MODELS[name]
    # Nothing of it is left to learn.
    bare = replace(model, calls=replace(model.calls, format=None, example=""), structural_markers=("<|other|>",))
    read = with_learnt(bare, learnt_toml(model), source="a file")
    assert read.calls.format == model.calls.format is not None
    assert (read.think_start, read.structural_markers) == (model.think_start, model.structural_markers)
    assert read.calls.example


@pytest.mark.parametrize("name", _TEMPLATES)
def test_what_a_template_taught_is_read_as_it_was_written(name: str) -> None:
    model = with_learnt_thinking(text_model(name))
    without = replace(model, think_start="<x>", think_end="</x>", think_start_tokens=(), think_end_tokens=())
    read = with_learnt(without, learnt_toml(model), source="a file")
    assert (read.think_start, read.think_end) == (model.think_start, model.think_end)
    assert read.calls.format == model.calls.format
    assert learnt_toml(read) == learnt_toml(model)
    if model.think_start is not None:
        assert read.think_start_tokens == tuple(model.encode(model.think_start))


def test_what_has_no_table_stays_as_it_was_learnt() -> None:
    read = with_learnt(LIST, '[thinking]\nstart = "<think>"\nend = "</think>"\n', source="a file")
    assert (read.think_start, read.think_end) == ("<think>", "</think>")
    assert read.think_start_tokens == tuple(LIST.encode("<think>"))
    assert read.calls is LIST.calls and read.structural_markers == LIST.structural_markers


def test_a_file_may_say_that_there_is_nothing() -> None:
    thinking = with_learnt(LIST, '[thinking]\nstart = "<t>"\nend = "</t>"', source="a file")
    none = with_learnt(thinking, 'thinking = "none"\ncalls = "none"', source="a file")
    assert none.think_start is none.think_end is none.calls.format is None


def test_a_field_that_is_changed_changes_the_format() -> None:
    text = learnt_toml(LIST).replace("<TOOLCALL>", "<OTHER>")
    read = with_learnt(LIST, text, source="a file").calls
    assert read.format is not None and read.format.start == "<OTHER>"
    assert read.format.arguments is None
    assert read.example.startswith("<OTHER>")


def test_a_format_without_a_joint_takes_one_call_at_a_time() -> None:
    text = learnt_toml(MODELS["bare"])
    assert "between" not in text
    read = with_learnt(LIST, text, source="a file").calls.format
    assert read is not None and not read.is_parallel


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[thinking", "it is not valid TOML"),
        ("[thinkings]", "thinkings is unknown: do you mean thinking?"),
        ('[thinking]\nstart = "<think>"', "thinking.end is missing"),
        ('[thinking]\nstart = " "\nend = "x"', "thinking.start must not be blank"),
        ("thinking = 1", "thinking must be a table, or 'none'"),
        ("content = 1", "content must be a table."),
        ("[content]\nmarkers = 1", "content.markers must be a list of texts"),
        ('[calls]\nstart = "<c>"', "calls.opening is missing"),
        ("[calls]\nstart = 1", "calls.start must be a text"),
        ('[calls]\nends = "x"', "calls.ends is unknown: do you mean end?"),
        ("[calls]\nis-bare = 1", "calls.is-bare must be true or false"),
        ('[calls.arguments]\nform = "xml"', 'calls.arguments.form must be "json" or "keyed"'),
        ('[calls.arguments]\nform = "keyed"', "calls.arguments.key-opening is missing"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(text: str, told: str) -> None:
    with pytest.raises(LoadFailed) as refused:
        with_learnt(LIST, text, source="a file")
    assert str(refused.value).startswith("a file: ") and told in str(refused.value)


def test_a_format_that_could_not_be_read_back_is_refused() -> None:
    text = learnt_toml(LIST).replace('start = "<TOOLCALL>"', 'start = " "')
    with pytest.raises(LoadFailed, match="cannot be read back: markup that begins"):
        with_learnt(LIST, text, source="a file")


def test_the_channels_of_gpt_oss_are_printed_and_cannot_be_changed() -> None:
    model = piece_model(HARMONY)
    printed = learnt_toml(model)
    assert "<|channel|>analysis<|message|>" in printed and "<|channel|>commentary to=functions." in printed
    assert with_learnt(model, printed, source="a file") is model
    assert with_learnt(model, printed[: printed.index("[content]")], source="a file") is model
    for changed in (printed.replace("analysis", "thoughts"), 'calls = "none"'):
        with pytest.raises(LoadFailed, match="the channels of gpt-oss, which cannot be changed"):
            with_learnt(model, changed, source="a file")
