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


def test_weights_that_are_loaded_take_another_file(tmp_path: Path) -> None:
    model, other = str(tiny_model("qwen3_5")), tmp_path / "other.toml"
    other.write_text('calls = "none"', encoding="utf-8")
    bases = SharedBases()
    plain = bases.load(Settings(model=model))
    changed = bases.load(Settings(model=model, learnt=str(other)))
    assert plain.text.calls.format is not None and changed.text.calls.format is None
    assert changed.base is plain and changed.fingerprint == plain.fingerprint
