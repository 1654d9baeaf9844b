"""`reprise inspect --learnt` prints what a template taught, and a model is loaded with the same file changed."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reprise.chat.learnt import FILE_NAME
from reprise.cli.main import app
from reprise.core.errors import LoadFailed
from reprise.core.settings import Settings
from reprise.engine.models.adapters import SharedBases
from reprise.engine.models.load import load_model
from tests.chat.test_families import SHOWS
from tests.models.tiny import tiny_model


def printed(model: Path) -> str:
    result = CliRunner().invoke(app, ["inspect", str(model), "--learnt"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_printed_file_beside_the_model_changes_nothing_and_edited_it_does(tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model("qwen3_5"), tmp_path / "model")
    plain = load_model(str(model)).text
    text = printed(model)
    assert "#   thinking of earlier turns: stripped" in text and "#   ids of calls: as they are" in text
    # The tiny model's template is not the family's.
    assert "# The template of the family qwen3.5 taught the same, but for:" in text
    assert '#   calls.arguments.form: "json", not "keyed"' in text
    file = model / FILE_NAME
    file.write_text(text, encoding="utf-8")
    same = load_model(str(model)).text
    assert (same.think_start, same.calls.format) == (plain.think_start, plain.calls.format)
    file.write_text(text.replace('start = "<think>"', 'start = "<thought>"'), encoding="utf-8")
    assert load_model(str(model)).text.think_start == "<thought>"
    # A file that is named takes its place.
    other = tmp_path / "other.toml"
    other.write_text('thinking = "none"', encoding="utf-8")
    named = load_model(str(model), learnt=str(other)).text
    assert named.think_start is None and named.calls.format == plain.calls.format
    file.write_text("[calls]\nstart = 1", encoding="utf-8")
    with pytest.raises(LoadFailed, match=FILE_NAME):
        load_model(str(model))


def test_a_template_is_compared_with_that_of_its_family() -> None:
    assert "# The same as the template of the family gpt-oss taught." in printed(tiny_model("gpt_oss"))
    text = printed(tiny_model("qwen3_5"))
    assert "# The template of the family qwen3.5 taught the same, but for:" in text
    assert '#   calls.arguments.form: "json", not "keyed"' in text
    assert "famil" not in printed(tiny_model("mamba2"))


def test_a_template_that_shows_no_call_leaves_calls_to_its_family(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = shutil.copytree(tiny_model("qwen3"), tmp_path / "model")
    template = SHOWS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    (model / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}<|im_start|>{% endif %}")
    loaded = load_model(str(model))
    assert loaded.text.calls.family == "qwen3" and loaded.text.calls.example.startswith("<tool_call>")
    assert "shows tools and no call, so calls are read as qwen3 writes them" in caplog.text
    assert "# The template shows tools and no call: [calls] is of the family qwen3." in printed(model)
    (model / FILE_NAME).write_text('calls = "none"', encoding="utf-8")
    assert load_model(str(model)).text.calls.format is None


def test_weights_that_are_loaded_take_another_file(tmp_path: Path) -> None:
    model, other = str(tiny_model("qwen3_5")), tmp_path / "other.toml"
    other.write_text('calls = "none"', encoding="utf-8")
    bases = SharedBases()
    plain = bases.load(Settings(model=model))
    changed = bases.load(Settings(model=model, learnt=str(other)))
    assert plain.text.calls.format is not None and changed.text.calls.format is None
    assert changed.base is plain and changed.fingerprint == plain.fingerprint
